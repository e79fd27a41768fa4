//! Attention of a few lanes: vectors stand along the width of a head, keys pass by once.
//!
//! One query row over a long cache is bound by memory; so are the few heads that share its keys.
// Hot path: no locks, no logging, no allocation once the room has grown.

use super::{
    super::{
        area::{Area, AreaMut, grow},
        micro::{Left, Right},
        vector::exp2_falling,
    },
    FEW_AHEAD, HIDDEN, Lanes, Room, collide, fetch,
    many::columns,
};
use rten_simd::{
    Isa, Simd,
    ops::{BitOps, NumOps},
};
use std::ops::Range;

/// Keys of a block: few enough that its values stay in a first-level cache.
const BLOCK: usize = 64;
/// Keys that are scored at a time.
const KEYS: usize = 2;
/// Most lanes.
const MOST_LANES: usize = 8;

/// The most lanes that are better off here than in a vector of `len` lanes.
pub(super) fn at_most(len: usize) -> usize {
    match len {
        16 => 8,
        8 => 4,
        _ => 1,
    }
}

/// Room for as many lanes as there may be, of heads of `width` columns.
pub(super) fn make_room(room: &mut Room, width: usize) {
    // Vectors have 16 values at most.
    let padded = width.next_multiple_of(16);
    for (buffer, values) in [
        (&mut room.queries, MOST_LANES * padded),
        (&mut room.scores, MOST_LANES * BLOCK),
        (&mut room.context, MOST_LANES * padded),
        (&mut room.keys, BLOCK * padded),
        (&mut room.values, BLOCK * padded),
    ] {
        grow(buffer, values);
    }
}

/// Context of the lanes from `first` on, at most [`at_most`] of them.
#[inline(always)]
pub(super) fn attend<I: Isa, const MOST: usize>(
    isa: I,
    lanes: &Lanes<'_>,
    first: usize,
    out: &mut AreaMut<'_>,
    room: &mut Room,
) {
    let ops = isa.f32();
    let (len, width) = (ops.len(), lanes.width);
    let count = lanes.count() - first;
    let padded = width.next_multiple_of(len);
    let Room { queries, scores, context, keys: keys_room, values: values_room, .. } = room;
    grow(queries, count * padded);
    grow(scores, count * BLOCK);
    grow(context, count * padded);
    let queries = &mut queries[..count * padded];
    let scale = lanes.scale();
    for (lane, packed) in queries.chunks_exact_mut(padded).enumerate() {
        for (packed, query) in packed.iter_mut().zip(lanes.query(first + lane)) {
            *packed = query * scale;
        }
        packed[width..].fill(0.0);
    }
    let context = &mut context[..count * padded];
    context.fill(0.0);
    let mut state = [(HIDDEN, 0.0); MOST_LANES];
    let there = padded != width || collide(lanes.values);

    let seen = lanes.seen(lanes.count() - 1);
    let mut first_key = 0;
    while first_key < seen {
        let keys = first_key..first_key + lanes.together(first_key, BLOCK.min(seen - first_key));
        first_key = keys.end;
        let rooms = (&mut *keys_room, &mut *values_room);
        let (rows, values) = lanes.block(isa, (keys.clone(), BLOCK), (false, there), rooms, padded);
        let ahead = if collide(rows) { FEW_AHEAD } else { 2 * FEW_AHEAD };
        let mut lane = 0;
        while lane < count {
            let height = 1 << (count - lane).min(4).ilog2();
            let some = Few {
                lanes,
                keys: keys.clone(),
                rows,
                first: first + lane,
                queries: &queries[lane * padded..],
                scores: &mut scores[lane * BLOCK..],
                context: &mut context[lane * padded..],
                padded,
                values,
                ahead,
            };
            let state = &mut state[lane..];
            match height {
                4 => some.add::<I, 4, MOST>(isa, state),
                2 => some.add::<I, 2, 4>(isa, state),
                _ => some.add::<I, 1, 4>(isa, state),
            }
            lane += height;
        }
    }

    for ((lane, context), (_, sum)) in context.chunks_exact(padded).enumerate().zip(state) {
        let (row, columns) = lanes.place(first + lane);
        for (out, context) in out.row(row)[columns].iter_mut().zip(context) {
            *out = context / sum;
        }
    }
}

/// A few lanes and a block of keys.
struct Few<'a, 'b> {
    lanes: &'b Lanes<'a>,
    keys: Range<usize>,
    /// `[keys, width]`
    rows: Area<'b>,
    /// The first of the lanes.
    first: usize,
    queries: &'b [f32],
    scores: &'b mut [f32],
    context: &'b mut [f32],
    padded: usize,
    values: Area<'b>,
    ahead: usize,
}

impl Few<'_, '_> {
    #[inline(always)]
    fn add<I: Isa, const LANES: usize, const VECTORS: usize>(
        mut self,
        isa: I,
        state: &mut [(f32, f32)],
    ) {
        let mut key = self.keys.start;
        while key + KEYS <= self.keys.end {
            self.score::<I, LANES, KEYS>(isa, key);
            key += KEYS;
        }
        while key < self.keys.end {
            self.score::<I, LANES, 1>(isa, key);
            key += 1;
        }
        let mut factors = [0.0; LANES];
        for lane in 0..LANES {
            factors[lane] = self.weights(isa, lane, &mut state[lane]);
        }
        self.weigh::<I, LANES, VECTORS>(isa, factors);
    }

    /// Scores of `COUNT` keys from `key` on.
    #[inline(always)]
    fn score<I: Isa, const LANES: usize, const COUNT: usize>(&mut self, isa: I, key: usize) {
        let ops = isa.f32();
        let len = ops.len();
        let at = key - self.keys.start;
        for row in at..at + COUNT {
            fetch(isa, self.rows, row + self.ahead);
        }
        let mut rows: [&[f32]; COUNT] = [&[]; COUNT];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = self.rows.row(at + i);
        }
        let mut sums = [[ops.zero(); LANES]; COUNT];
        let whole = self.lanes.width / len * len;
        for column in (0..whole).step_by(len) {
            let mut queries = [ops.zero(); LANES];
            for (i, query) in queries.iter_mut().enumerate() {
                *query = ops.load(&self.queries[i * self.padded + column..]);
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let key = ops.load(&row[column..]);
                for (sum, query) in sums.iter_mut().zip(queries) {
                    *sum = ops.mul_add(query, key, *sum);
                }
            }
        }
        if whole < self.lanes.width {
            for (sums, row) in sums.iter_mut().zip(rows) {
                let key = ops.load_pad(&row[whole..]).0;
                for (i, sum) in sums.iter_mut().enumerate() {
                    let query = ops.load(&self.queries[i * self.padded + whole..]);
                    *sum = ops.mul_add(query, key, *sum);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (lane, sum) in sums.into_iter().enumerate() {
                self.scores[lane * BLOCK + at + i] = ops.sum(sum);
            }
        }
    }

    /// Turns the scores of a lane into weights. What it summed up before is to be scaled by the
    /// result.
    #[inline(always)]
    fn weights<I: Isa>(&mut self, isa: I, lane: usize, state: &mut (f32, f32)) -> f32 {
        let ops = isa.f32();
        let len = ops.len();
        let scores = &mut self.scores[lane * BLOCK..][..self.keys.len().next_multiple_of(len)];
        let seen = self.lanes.seen(self.first + lane).min(self.keys.end);
        if let Some(distances) = &self.lanes.distances {
            for (key, score) in self.keys.clone().zip(scores.iter_mut()) {
                *score += distances.from(self.first + lane, key)[0];
            }
        }
        scores[seen.saturating_sub(self.keys.start)..].fill(HIDDEN);
        let (before, sum) = *state;
        let mut most = ops.splat(before);
        for scores in scores.chunks_exact(len) {
            most = ops.max(most, ops.load(scores));
        }
        let largest = most.to_array().into_iter().fold(before, f32::max);
        let most = ops.splat(largest);
        let mut sums = ops.zero();
        for scores in scores.chunks_exact_mut(len) {
            let weight = exp2_falling(isa, ops.sub(ops.load(scores), most));
            sums = ops.add(sums, weight);
            ops.store(weight, scores);
        }
        let factor = (before - largest).exp2();
        *state = (largest, sum * factor + ops.sum(sums));
        factor
    }

    #[inline(always)]
    fn weigh<I: Isa, const LANES: usize, const VECTORS: usize>(
        &mut self,
        isa: I,
        factors: [f32; LANES],
    ) {
        let (len, padded, keys) = (isa.f32().len(), self.padded, self.keys.len());
        let left = Left { values: self.scores, row: BLOCK, step: 1 };
        let mut column = 0;
        while column < padded {
            let right =
                Right { values: &self.values.values()[column..], step: self.values.stride() };
            let context = &mut self.context[column..];
            if column + VECTORS * len <= padded {
                columns::<I, LANES, VECTORS>(isa, context, padded, &factors, keys, left, right);
                column += VECTORS * len;
            } else {
                columns::<I, LANES, 1>(isa, context, padded, &factors, keys, left, right);
                column += len;
            }
        }
    }
}
