//! Weights from disk: load operations before the products that need them.

use super::{
    LowerError,
    build::{Builder, TensorRows},
};
use crate::{
    pieces::Piece,
    program::{Lane, OpKind, Operation, Region, TensorId},
};
use galaxy_common::{PIECE_ALIGNMENT, Room, Span, Streaming};
use std::ops::Range;

/// What is in the buffer for weights while a program is lowered.
struct Buffer<'a> {
    streaming: &'a Streaming,
    /// Pieces that are in the buffer: their numbers and tensors.
    there: Vec<(usize, TensorRows)>,
    /// Ranges of the buffer that were used, each with the tensor that was there last.
    last: Vec<(Range<u64>, TensorId)>,
    /// Where the next piece goes in a ring; `part`: which part it takes where the buffer is cut into parts.
    at: u64,
    part: u64,
}

/// Cuts the products of a device that reads its weights from disk by pieces, and puts before each that is
/// not there the operation that loads it. A piece goes where the oldest ones were: so it may be loaded as soon
/// as those have been used, and no sooner, and the buffer never holds more than it has.
pub(super) fn weave(
    b: Builder,
    streaming: &Streaming,
    pieces: &[Piece],
) -> Result<Builder, LowerError> {
    let mut buffer = Buffer { streaming, there: Vec::new(), last: Vec::new(), at: 0, part: 0 };
    let mut loads = vec![0; usize::from(streaming.loaders)];
    b.replaced(|b, lane, op| {
        let OpKind::Product { operator, .. } = op.kind else {
            b.push_again(lane, &op);
            return Ok(());
        };
        // Pieces stand in the order of layers, and a layer's beside one another.
        let of_product = |(_, piece): &(usize, &Piece)| piece.operator == operator;
        for (number, piece) in pieces.iter().enumerate().filter(of_product) {
            let weights = match streaming.keeps(number as u32) {
                true => None,
                false => Some(buffer.load(b, number, piece, &mut loads)?),
            };
            b.push_again(lane, &part_of(&op, piece, weights));
        }
        Ok(())
    })
}

/// The part of a product that computes the columns of a piece.
fn part_of(op: &Operation, piece: &Piece, weights: Option<TensorRows>) -> Operation {
    let mut part = op.clone();
    let columns = |region: &mut Region| {
        let start = region.columns.start();
        region.columns = Span::new(start + piece.columns.start(), start + piece.columns.end());
    };
    part.writes.iter_mut().for_each(columns);
    // The sums that are added to it.
    part.reads.iter_mut().skip(1).for_each(columns);
    part.reads.extend(weights.map(TensorRows::all));
    part
}

impl Buffer<'_> {
    /// The tensor of a piece, loaded first where it is not there.
    fn load(
        &mut self,
        b: &mut Builder,
        number: usize,
        piece: &Piece,
        loads: &mut [u64],
    ) -> Result<TensorRows, LowerError> {
        if let Some((_, there)) = self.there.iter().find(|(there, _)| *there == number) {
            return Ok(*there);
        }
        let (buffer, size) = (self.streaming.buffer.0, piece.stored());
        let (start, room) = match self.streaming.room {
            Room::Ring => (if self.at + size > buffer { 0 } else { self.at }, buffer),
            Room::Parts(parts) => {
                let room = buffer / u64::from(parts) / PIECE_ALIGNMENT * PIECE_ALIGNMENT;
                (self.part % u64::from(parts) * room, room)
            }
        };
        if size > room {
            return Err(LowerError::Buffer { wanted: size, room });
        }
        let place = start..start + size;
        (self.at, self.part) = (place.end, self.part + 1);
        let former = self.take(&place);
        self.there.retain(|(_, tensor)| !former.contains(&tensor.id));
        // The loader that has had the fewest bytes so far: loaders are through at about the same time,
        // whatever the sizes of pieces.
        let least = (0..loads.len()).min_by_key(|&at| loads[at]).unwrap_or(0);
        loads[least] += size;
        let lane = Lane::Load(least as u16);
        let kind = OpKind::Load { piece: number as u32 };
        let tensor = b.load(lane, kind, (size, start), former);
        self.there.push((number, tensor));
        self.last.push((place, tensor.id));
        Ok(tensor)
    }

    /// Forgets which tensors were last in a range, and returns them.
    fn take(&mut self, place: &Range<u64>) -> Vec<TensorId> {
        let (mut former, mut last) = (Vec::new(), Vec::new());
        for (used, tensor) in self.last.drain(..) {
            if used.start >= place.end || place.start >= used.end {
                last.push((used, tensor));
                continue;
            }
            former.push(tensor);
            let left = [used.start..place.start, place.end..used.end];
            last.extend(left.into_iter().filter(|l| l.start < l.end).map(|left| (left, tensor)));
        }
        self.last = last;
        former
    }
}
