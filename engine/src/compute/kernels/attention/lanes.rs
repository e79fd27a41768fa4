//! Lanes: query rows of the heads that share keys and values, and where these are read from.
// Hot path: no locks, no logging, no allocation once the room has grown.

use super::{
    super::{
        super::cache::{CachedRows, GROUP, Stored, round},
        area::{Area, Extent, grow},
        eighths,
    },
    fetch,
    relative_bias::HeadBias,
};
use galaxy_common::CacheType;
use rten_simd::{Isa, ops::BitOps};
use std::ops::Range;

/// How many rows ahead of copying they are fetched, at least to a second-level cache.
const COPY_AHEAD: usize = 12;

/// Query rows of the heads that share a key-value head, and what they see.
///
/// Lane `l` of it is head `l % group` of row `l / group`.
#[derive(Clone, Copy)]
pub(super) struct Lanes<'a> {
    /// The queries, `[rows, group * width]`.
    pub(super) queries: Area<'a>,
    /// The cached rows of the sequence.
    pub(super) cached: CachedRows<'a>,
    /// The type in which rows of the batch are cached: they are rounded to it when they are read, so that a row sees
    /// the same whether it comes with those before it or after them.
    pub(super) value_type: CacheType,
    /// The column with which the keys of the head begin in a cached row, and likewise its values.
    pub(super) column: usize,
    /// The keys of rows of the batch, `[seen, width]`.
    pub(super) keys: Area<'a>,
    /// The values of rows of the batch, `[seen, width]`.
    pub(super) values: Area<'a>,
    pub(super) group: usize,
    pub(super) width: usize,
    /// The factor of scores.
    pub(super) scale: f32,
    /// The bound of scores after that: a score s becomes cap * tanh(s / cap). None where they have no
    /// bound.
    pub(super) cap: Option<f32>,
    /// The number in the sequence of the first row of `keys`: where it does not follow the cached rows, nobody sees
    /// those between them.
    pub(super) first_key: usize,
    /// The number in the sequence of the first query row.
    pub(super) first_row: usize,
    /// How many rows before itself a row sees; none for all.
    pub(super) window: Option<usize>,
    /// How many rows after itself a row sees; none for all.
    pub(super) ahead: Option<usize>,
    /// The relative position bias of the only head that there is then.
    pub(super) relative_bias: Option<HeadBias<'a>>,
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

    /// The first key that a lane sees.
    #[inline(always)]
    pub(super) fn from(&self, lane: usize) -> usize {
        let row = self.first_row + lane / self.group;
        self.window.map_or(0, |rows| row.saturating_sub(rows))
    }

    /// The end of the keys that a lane sees.
    #[inline(always)]
    pub(super) fn seen(&self, lane: usize) -> usize {
        let all = self.first_key + self.keys.rows();
        let row = self.first_row + lane / self.group;
        self.ahead.map_or(all, |rows| all.min(row + 1 + rows))
    }

    /// The keys among these that are rows of the batch, numbered from the first row there.
    #[inline(always)]
    fn own(&self, which: &Range<usize>) -> Range<usize> {
        let (first, end) = (self.first_key, self.first_key + self.keys.rows());
        let at = |key: usize| key.clamp(first, end) - first;
        at(which.start)..at(which.end)
    }

    /// The keys from `group * GROUP` on: `[columns, GROUP]`, where they are stored, or put together in `room`. Keys
    /// that nobody sees are arbitrary.
    #[inline(always)]
    pub(super) fn group<'r>(&self, group: usize, room: &'r mut [f32]) -> &'r [f32]
    where
        'a: 'r,
    {
        let (context_len, width, own) = (self.cached.rows(), self.width, self.first_key);
        let (first, end) = (group * GROUP, (group + 1) * GROUP);
        if first < context_len {
            match self.cached.keys(group, self.column, width) {
                Stored::F32(keys) if end <= context_len => return keys,
                stored => stored.widen(&mut room[..width * GROUP]),
            }
        }
        for key in first.max(own)..end.min(own + self.keys.rows()) {
            let mut some = [0.0; eighths::GROUP];
            let groups = self.keys.row(key - own).chunks(eighths::GROUP);
            for (at, columns) in groups.enumerate() {
                let some = &mut some[..columns.len()];
                some.copy_from_slice(columns);
                round(self.value_type, some);
                let places = room[at * eighths::GROUP * GROUP + key - first..].iter_mut();
                places.step_by(GROUP).zip(some).for_each(|(place, key)| *place = *key);
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
        let (context_len, width) = (self.cached.rows(), self.width);
        let own = self.own(&which);
        let own = self.keys.part(own.start, own.len(), 0, width);
        if !copied && !self.rounds() && own.rows() == which.len() {
            return own;
        }
        grow(room, (most + GROUP) * width);
        let (rows, wide) = room.split_at_mut(most * width);
        for group in which.start / GROUP..which.end.min(context_len).div_ceil(GROUP) {
            self.cached.keys(group, self.column, width).widen(&mut wide[..width * GROUP]);
            let first = group * GROUP - which.start;
            let rows = rows[first * width..].chunks_exact_mut(width);
            for (at, row) in
                rows.take(which.end.min(context_len) - group * GROUP).take(GROUP).enumerate()
            {
                let keys = wide[at..].iter().step_by(GROUP);
                row.iter_mut().zip(keys).for_each(|(place, key)| *place = *key);
            }
        }
        let (kept, before) = self.before(&which, own.rows());
        rows[kept * width..before * width].fill(0.0);
        copy(isa, own, &mut rows[before * width..], width);
        self.round(&mut rows[before * width..which.len() * width], width);
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
        let width = self.width;
        let own = self.own(&which);
        let own = self.values.part(own.start, own.len(), 0, width);
        let (kept, before) = self.before(&which, own.rows());
        let area = match kept {
            0 => Some(own),
            _ => self.cached.area(which.start..which.start + kept, self.column, width),
        };
        let together = [kept, own.rows()].contains(&which.len()) && !self.rounds();
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
                    self.cached.value(which.start + at, self.column, width).widen(to);
                    rest.fill(0.0);
                }
            }
        }
        rows[kept * padded..before * padded].fill(0.0);
        copy(isa, own, &mut rows[before * padded..], padded);
        self.round(&mut rows[before * padded..which.len() * padded], padded);
        rows_of(rows, which.len(), padded)
    }

    /// How many of these keys are cached, and how many come before the first of `own` rows of the batch.
    /// Those between, which nobody sees, are in neither.
    #[inline(always)]
    fn before(&self, which: &Range<usize>, own: usize) -> (usize, usize) {
        let kept = which.end.min(self.cached.rows()).saturating_sub(which.start);
        (kept, which.len() - own)
    }

    /// Whether rows are cached with fewer bits than they have.
    #[inline(always)]
    fn rounds(&self) -> bool {
        self.value_type != CacheType::F32
    }

    /// Rounds rows of the batch, which are `stride` apart, as they are cached.
    #[inline(always)]
    fn round(&self, rows: &mut [f32], stride: usize) {
        if self.rounds() {
            for row in rows.chunks_exact_mut(stride) {
                round(self.value_type, &mut row[..self.width]);
            }
        }
    }

    /// The cap of scores times log2(e), for weights that are powers of 2.
    pub(super) fn cap(&self) -> Option<f32> {
        self.cap.map(|cap| std::f32::consts::LOG2_E * cap)
    }

    /// The factor of queries, for weights that are powers of 2 and not of e.
    pub(super) fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E * self.scale
    }
}

/// The first `rows` rows of a buffer, which are `stride` apart.
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
