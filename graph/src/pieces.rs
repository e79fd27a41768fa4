//! The pieces in which a shard is read from disk: its matrices, or columns of them.

use crate::{
    holdings::{Run, WeightSlice},
    operators::{OperatorGraph, OperatorId, Product},
};
use galaxy_common::{
    Assignment, Bytes, Column, DevicePlan, PIECE_ALIGNMENT, Span, Streaming, WeightFormat,
};
use galaxy_model::Formats;
use smallvec::SmallVec;
use std::{borrow::Cow, ops::Range};

/// The multiple of columns at which pieces are cut: what a kernel takes at a time.
const CUT: u32 = 2 * WeightFormat::PANEL;
/// The multiple of bytes at which matrices of a piece begin: a cache line.
pub const RUN_ALIGNMENT: u64 = 64;
/// Bytes of the checksum behind each piece.
const CHECKSUM: u64 = 4;

/// A piece: columns of one product, which are read from disk together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The product that it is of.
    pub operator: OperatorId,
    /// The columns of the product that it computes.
    pub columns: Span<Column>,
    /// The slices of the model's matrices that are in it.
    pub slices: Vec<WeightSlice>,
    /// The matrices in which these are held: queries, keys and values may be in several formats.
    pub runs: SmallVec<[Run; 1]>,
    /// Bytes of its values, packed as kernels read them.
    pub bytes: u64,
}

/// Each run of a piece with the bytes that it has in there, one behind another.
fn places(runs: &[Run]) -> impl Iterator<Item = (&Run, Range<u64>)> {
    let mut end = 0u64;
    runs.iter().map(move |run| {
        let start = end.next_multiple_of(RUN_ALIGNMENT);
        end = start + run.bytes();
        (run, start..end)
    })
}

impl Piece {
    fn new(
        (operator, product): (OperatorId, &Product),
        formats: &Formats,
        columns: Span<Column>,
        slices: Vec<WeightSlice>,
    ) -> Self {
        let runs: SmallVec<_> = product.runs(formats, &slices).into_iter().collect();
        let bytes = places(&runs).last().map_or(0, |(_, place)| place.end);
        Self { operator, columns, slices, runs, bytes }
    }

    /// Its runs, each with the bytes of the piece that it has.
    pub fn places(&self) -> impl Iterator<Item = (&Run, Range<u64>)> {
        places(&self.runs)
    }

    /// Bytes of its matrices, without padding between them.
    pub fn held(&self) -> u64 {
        self.runs.iter().map(Run::bytes).sum()
    }

    /// Bytes that it takes in a file, and in the buffer that it is read into: with its checksum, in whole
    /// blocks.
    pub fn stored(&self) -> u64 {
        (self.bytes + CHECKSUM).next_multiple_of(PIECE_ALIGNMENT)
    }

    /// The piece with its first `planes` bit planes only, where it is stored plane by plane, the most
    /// significant first: these are its first bytes, and all that a request holds that selects no more planes. A
    /// piece of several matrices, or of values in blocks, is read whole.
    pub fn first_planes(&self, planes: u32) -> Self {
        let bytes = match &self.runs[..] {
            [run] if run.format.block().is_none() => run.bytes_by(|inputs, outputs| {
                run.format.held_planes(inputs, outputs, planes.min(run.format.planes()))
            }),
            _ => self.bytes,
        };
        Self { bytes, ..self.clone() }
    }
}

/// The pieces of the shard of an assignment, in the order in which a program needs them first, in these formats;
/// a piece has at most so many bytes, if it can be cut.
///
/// Queries, keys and values stay together: what follows their product goes over whole heads.
pub fn pieces(
    graph: &OperatorGraph,
    assignment: &Assignment,
    formats: &Formats,
    most: Bytes,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for of in graph.shared() {
        let slices = graph.slices(of.1, assignment);
        let Some(first) = slices.first() else { continue };
        if of.1.heads.is_some() {
            let columns: usize = slices.iter().map(|slice| slice.outputs.len()).sum();
            pieces.push(Piece::new(of, formats, Span::first(columns as u32), slices));
            continue;
        }
        // Gate and up columns of a pair stand in one piece.
        let columns = first.outputs.len() as u32;
        let all: u64 = of.1.runs(formats, &slices).iter().map(Run::bytes).sum();
        let step = u64::from(columns).saturating_mul(most.0) / all.max(1);
        let step = (step.min(u64::from(columns)) as u32 / CUT * CUT).max(CUT);
        // As even as can be.
        let count = columns.div_ceil(step);
        let step = columns.div_ceil(count).next_multiple_of(CUT);
        for from in (0..columns).step_by(step as usize) {
            let columns = Span::new(from, columns.min(from + step));
            let cut = |slice: &WeightSlice| {
                let start = slice.outputs.start;
                let outputs = start + columns.start()..start + columns.end();
                WeightSlice { outputs, ..slice.clone() }
            };
            let slices = slices.iter().map(cut).collect();
            pieces.push(Piece::new(of, formats, columns, slices));
        }
    }
    pieces
}

/// The formats of weights on disk, of a model in these formats: the same, or all widened to f32.
pub fn on_disk<'a>(streaming: &Streaming, formats: &'a Formats) -> Cow<'a, Formats> {
    match streaming.format {
        WeightFormat::F32 => Cow::Owned(Formats::default()),
        _ => Cow::Borrowed(formats),
    }
}

/// The pieces of a device that reads its weights from disk, of a model in these formats; none of one that does
/// not.
pub fn of_device(graph: &OperatorGraph, formats: &Formats, device: &DevicePlan) -> Vec<Piece> {
    let pieces = |s: &Streaming| pieces(graph, &device.holds(), &on_disk(s, formats), s.piece);
    device.streaming.as_ref().map_or_else(Vec::new, pieces)
}

/// The identity of a file of these pieces: two that are equal hold the same bytes, in the same formats.
/// `fingerprint` is the model's.
pub fn identity(fingerprint: &str, pieces: &[Piece]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut tell = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    tell(fingerprint);
    for Piece { operator, columns, slices, runs, bytes } in pieces {
        // Another spelling only makes a file foreign, and then it is written again.
        tell(&format!("{operator:?} {columns:?} {slices:?} {runs:?} {bytes}"));
    }
    *hasher.finalize().as_bytes()
}
