//! Lanes: query rows of the heads that share keys and values, and where these are read from.
// Hot path: no locks, no logging, no allocation once the room has grown.

use super::{
    super::{
        super::cache::{GROUP, Past, Stored},
        area::{Area, Extent, grow},
        vector,
    },
    distances::Distances,
    fetch,
};
use rten_simd::{Isa, ops::BitOps};
use std::ops::Range;

/// How many rows ahead of copying they are fetched, at least to a second-level cache.
const COPY_AHEAD: usize = 12;

/// Query rows of the heads that share a key-value head, and what they see.
///
/// Lane `l` of it is head `l % group` of row `l / group`.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'a> {
    /// `[rows, group * width]`
    pub(super) queries: Area<'a>,
    /// What was kept of earlier rows,
    pub(super) past: Past<'a>,
    /// whether rows of the batch are to be read as they will be kept, so that a row sees the same whether it comes
    /// with those before it or after them,
    pub(super) rounded: bool,
    /// and the column of its keys, and of its values, with which those of the head begin.
    pub(super) column: usize,
    /// Of the batch: `[seen, width]`
    pub(super) keys: Area<'a>,
    /// `[seen, width]`
    pub(super) values: Area<'a>,
    pub(super) group: usize,
    pub(super) width: usize,
    /// What scores are multiplied by.
    pub(super) scale: f32,
    /// How many keys, those of the past included, the first row sees, where each row sees one more than the row
    /// before it. None where all rows see all keys.
    pub(super) sees: Option<usize>,
    /// What is added to the scores, of the one head that there is then.
    pub(super) distances: Option<Distances<'a>>,
}

impl<'a> Lanes<'a> {
    pub(super) fn count(&self) -> usize {
        self.queries.rows() * self.group
    }

    /// The row and the columns of a lane.
    #[inline(always)]
    pub(super) fn place(&self, lane: usize) -> (usize, Range<usize>) {
        let column = lane % self.group * self.width;
        (lane / self.group, column..column + self.width)
    }

    #[inline(always)]
    pub(super) fn query(&self, lane: usize) -> &[f32] {
        let (row, columns) = self.place(lane);
        &self.queries.row(row)[columns]
    }

    /// How many keys a lane sees.
    #[inline(always)]
    pub(super) fn seen(&self, lane: usize) -> usize {
        let all = self.past.rows() + self.keys.rows();
        self.sees.map_or(all, |first| first + lane / self.group)
    }

    /// The keys from `group * GROUP` on: `[columns, GROUP]`, where they are stored, or put together in `room`.
    /// Those that nobody sees are any.
    #[inline(always)]
    pub(super) fn group<'r>(&self, group: usize, room: &'r mut [f32]) -> &'r [f32]
    where
        'a: 'r,
    {
        let (past, width) = (self.past.rows(), self.width);
        let (first, end) = (group * GROUP, (group + 1) * GROUP);
        if first < past {
            match self.past.keys(group, self.column, width) {
                Stored::F32(keys) if end <= past => return keys,
                stored => stored.widen(&mut room[..width * GROUP]),
            }
        }
        for key in first.max(past)..end.min(past + self.keys.rows()) {
            let places = room[key - first..].iter_mut().step_by(GROUP);
            for (place, key) in places.zip(self.keys.row(key - past)) {
                *place = if self.rounded { half::f16::from_f32(*key).to_f32() } else { *key };
            }
        }
        &room[..width * GROUP]
    }

    /// Keys of a block, row after row: where they are, if they are not to be `copied`, else in `room`, which has
    /// room for `most` of them and a group.
    #[inline(always)]
    pub(super) fn keys<'r, I: Isa>(
        &self,
        isa: I,
        which: Range<usize>,
        (copied, most): (bool, usize),
        room: &'r mut Vec<f32>,
    ) -> Area<'r>
    where
        'a: 'r,
    {
        let (past, width) = (self.past.rows(), self.width);
        let own = which.start.max(past) - past..which.end.max(past) - past;
        let own = self.keys.part(own.start, own.len(), 0, width);
        if !copied && !self.rounded && which.start >= past {
            return own;
        }
        grow(room, (most + GROUP) * width);
        let (rows, wide) = room.split_at_mut(most * width);
        for group in which.start / GROUP..which.end.min(past).div_ceil(GROUP) {
            self.past.keys(group, self.column, width).widen(&mut wide[..width * GROUP]);
            let first = group * GROUP - which.start;
            let rows = rows[first * width..].chunks_exact_mut(width);
            for (at, row) in rows.take(which.end.min(past) - group * GROUP).take(GROUP).enumerate()
            {
                let keys = wide[at..].iter().step_by(GROUP);
                row.iter_mut().zip(keys).for_each(|(place, key)| *place = *key);
            }
        }
        let kept = which.len() - own.rows();
        copy(isa, own, &mut rows[kept * width..], width);
        if self.rounded {
            vector::round_f16(&mut rows[kept * width..which.len() * width]);
        }
        rows_of(rows, which.len(), width)
    }

    /// Values of a block, row after row: where they are, if they are there together and not to be `copied`, else
    /// in `room`, `padded` apart.
    #[inline(always)]
    pub(super) fn values<'r, I: Isa>(
        &self,
        isa: I,
        which: Range<usize>,
        (copied, most): (bool, usize),
        room: &'r mut Vec<f32>,
        padded: usize,
    ) -> Area<'r>
    where
        'a: 'r,
    {
        let (past, width) = (self.past.rows(), self.width);
        let own = which.start.max(past) - past..which.end.max(past) - past;
        let own = self.values.part(own.start, own.len(), 0, width);
        let kept = which.len() - own.rows();
        let area = match kept {
            0 => Some(own),
            _ => self.past.area(which.start..which.start + kept, self.column, width),
        };
        let together = own.rows() * kept == 0 && !self.rounded;
        if let (true, Some(area)) = (together && !copied, area) {
            return area;
        }
        grow(room, most * padded);
        let rows = &mut room[..];
        match area {
            Some(area) if kept > 0 => copy(isa, area, rows, padded),
            _ => {
                for (at, row) in rows.chunks_exact_mut(padded).take(kept).enumerate() {
                    let (to, rest) = row.split_at_mut(width);
                    self.past.value(which.start + at, self.column, width).widen(to);
                    rest.fill(0.0);
                }
            }
        }
        copy(isa, own, &mut rows[kept * padded..], padded);
        if self.rounded {
            vector::round_f16(&mut rows[kept * padded..which.len() * padded]);
        }
        rows_of(rows, which.len(), padded)
    }

    /// What queries are multiplied by, for weights that are powers of 2 and not of e.
    pub(super) fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E * self.scale
    }
}

/// The first rows of a room that are `stride` apart.
#[inline(always)]
fn rows_of(room: &[f32], rows: usize, stride: usize) -> Area<'_> {
    let extent = Extent { start: 0, rows, columns: stride, stride };
    Area::new(room, extent).expect("rows that follow each other")
}

/// Copies rows together, `stride` apart, with zeros between them.
#[inline(always)]
fn copy<I: Isa>(isa: I, from: Area<'_>, room: &mut [f32], stride: usize) {
    let ops = isa.f32();
    for (row, to) in (0..from.rows()).zip(room.chunks_exact_mut(stride)) {
        fetch(isa, from, row + COPY_AHEAD);
        let (to, rest) = to.split_at_mut(from.columns());
        let mut to = to.chunks_exact_mut(ops.len());
        let mut from = from.row(row).chunks_exact(ops.len());
        for (to, from) in (&mut to).zip(&mut from) {
            ops.store(ops.load(from), to);
        }
        to.into_remainder().copy_from_slice(from.remainder());
        rest.fill(0.0);
    }
}
