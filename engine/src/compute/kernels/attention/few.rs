//! Attention of a few lanes: neighbouring keys stand side by side in vectors, and pass by once.
//!
//! One query row over a long cache is bound by memory; so are the few heads that share its keys.
// Hot path: no locks, no logging, no allocation once the room has grown.

use super::{
    super::{
        super::cache::GROUP,
        activation::cap,
        area::{Area, AreaMut, grow},
        micro::{F32, Left, Right, accumulate},
        vector::exp2_falling,
    },
    AttentionBuffers, HIDDEN, Lanes, block, collide, fetch,
    many::columns,
};
use rten_simd::{
    Isa, Simd,
    ops::{BitOps, NumOps},
};
use std::ops::Range;

/// The most lanes that this kernel has room for.
const MOST_LANES: usize = 8;

/// The most lanes that are better off here than in a vector of `len` lanes.
pub(super) fn at_most(len: usize) -> usize {
    match len {
        16 => 8,
        8 => 4,
        _ => 1,
    }
}

/// Makes room for [`MOST_LANES`] lanes, of heads of `width` columns.
pub(super) fn make_room(room: &mut AttentionBuffers, width: usize) {
    // Vectors have 16 values at most.
    let padded = width.next_multiple_of(16);
    for (buffer, values) in [
        (&mut room.queries, MOST_LANES * width),
        (&mut room.scores, MOST_LANES * block(width)),
        (&mut room.context, MOST_LANES * padded),
        (&mut room.keys, GROUP * width),
        (&mut room.values, block(width) * padded),
    ] {
        grow(buffer, values);
    }
}

/// Computes the context of the lanes from `first` on, at most [`at_most`] of them.
#[inline(always)]
pub(super) fn attend<I: Isa, const MOST: usize, const PARTS: usize>(
    isa: I,
    lanes: &Lanes<'_>,
    first: usize,
    out: &mut AreaMut<'_>,
    room: &mut AttentionBuffers,
) {
    let (width, block) = (lanes.width, block(lanes.width));
    let count = lanes.count() - first;
    let padded = width.next_multiple_of(isa.f32().len());
    let AttentionBuffers { queries, scores, context, keys: keys_room, values: values_room, .. } =
        room;
    grow(queries, count * width);
    grow(scores, count * block);
    grow(context, count * padded);
    grow(keys_room, GROUP * width);
    let queries = &mut queries[..count * width];
    let scale = lanes.scale();
    for (lane, scaled) in queries.chunks_exact_mut(width).enumerate() {
        for (scaled, query) in scaled.iter_mut().zip(lanes.query(first + lane)) {
            *scaled = query * scale;
        }
    }
    let context = &mut context[..count * padded];
    context.fill(0.0);
    let mut state = [(HIDDEN, 0.0); MOST_LANES];
    let copied = padded != width || collide(lanes.values);

    let seen = lanes.seen(lanes.count() - 1);
    for start in (lanes.from(first) / block * block..seen).step_by(block) {
        let keys = start..seen.min(start + block);
        let values = lanes.values(isa, keys.clone(), (copied, block), values_room, padded);
        let (queries, scores, context) = (&*queries, &mut scores[..], &mut context[..]);
        let mut some = Few { lanes, keys, first, block, queries, scores, context, padded, values };
        for group in start / GROUP..some.keys.end.div_ceil(GROUP) {
            some.score_group::<I, PARTS>(isa, group, count, lanes.group(group, keys_room));
        }
        let mut factors = [0.0; MOST_LANES];
        for (lane, (factor, state)) in factors.iter_mut().zip(&mut state).enumerate().take(count) {
            *factor = some.weights(isa, lane, state);
        }
        let mut lane = 0;
        while lane < count {
            let height = 1 << (count - lane).min(4).ilog2();
            match height {
                4 => some.weigh::<I, 4, MOST>(isa, lane, &factors[lane..]),
                2 => some.weigh::<I, 2, 4>(isa, lane, &factors[lane..]),
                _ => some.weigh::<I, 1, 4>(isa, lane, &factors[lane..]),
            }
            lane += height;
        }
    }

    for ((lane, context), (_, sum)) in context.chunks_exact(padded).enumerate().zip(state) {
        let (row, columns) = lanes.place(first + lane);
        let factor = 1.0 / sum;
        for (out, context) in out.row(row)[columns].iter_mut().zip(context) {
            *out = context * factor;
        }
    }
}

/// A few lanes and a block of keys that they see.
struct Few<'a, 'b> {
    lanes: &'b Lanes<'a>,
    keys: Range<usize>,
    /// The first of the lanes.
    first: usize,
    /// The number of keys of a whole block.
    block: usize,
    /// The queries, scaled: `[lanes, width]`.
    queries: &'b [f32],
    /// The scores, which become weights: `[lanes, block]`.
    scores: &'b mut [f32],
    /// The context so far, `[lanes, padded]`.
    context: &'b mut [f32],
    padded: usize,
    /// The values, `[keys, width or padded]`.
    values: Area<'b>,
}

impl Few<'_, '_> {
    /// Computes the scores of all lanes with a group of keys, `[width, GROUP]`.
    #[inline(always)]
    fn score_group<I: Isa, const PARTS: usize>(
        &mut self,
        isa: I,
        group: usize,
        count: usize,
        keys: &[f32],
    ) {
        let at = group * GROUP - self.keys.start;
        // The values that these keys belong to are read next.
        (at..at + GROUP).for_each(|row| fetch(isa, self.values, row));
        let mut lane = 0;
        while lane < count {
            let height = 1 << (count - lane).min(4).ilog2();
            match height {
                4 => self.score::<I, 4, PARTS>(isa, lane, at, keys),
                2 => self.score::<I, 2, PARTS>(isa, lane, at, keys),
                _ => self.score::<I, 1, PARTS>(isa, lane, at, keys),
            }
            lane += height;
        }
    }

    #[inline(always)]
    fn score<I: Isa, const LANES: usize, const PARTS: usize>(
        &mut self,
        isa: I,
        lane: usize,
        at: usize,
        keys: &[f32],
    ) {
        let ops = isa.f32();
        let width = self.lanes.width;
        let left = Left { values: &self.queries[lane * width..], row: width, step: 1 };
        let right = Right::<F32> { values: keys, step: GROUP };
        let zero = [[ops.zero(); PARTS]; LANES];
        let sums = accumulate::<I, F32, LANES, PARTS>(isa, zero, width, left, right);
        for (i, sums) in sums.into_iter().enumerate() {
            let scores = &mut self.scores[(lane + i) * self.block + at..];
            for (part, sum) in sums.into_iter().enumerate() {
                ops.store(sum, &mut scores[part * ops.len()..]);
            }
        }
    }

    /// Turns the scores of a lane into weights, and gives the factor by which what it has summed up
    /// before is to be scaled.
    #[inline(always)]
    fn weights<I: Isa>(&mut self, isa: I, lane: usize, state: &mut (f32, f32)) -> f32 {
        let ops = isa.f32();
        let len = ops.len();
        let whole = self.keys.len().next_multiple_of(GROUP);
        let scores = &mut self.scores[lane * self.block..][..whole];
        let seen = self.lanes.seen(self.first + lane).min(self.keys.end);
        let seen = seen.saturating_sub(self.keys.start);
        let from = self.lanes.from(self.first + lane).saturating_sub(self.keys.start).min(seen);
        if let Some(most) = self.lanes.cap() {
            for scores in scores.chunks_exact_mut(len) {
                ops.store(cap(isa, ops.load(scores), most), scores);
            }
        }
        if let Some(distances) = &self.lanes.relative_bias {
            for (key, score) in self.keys.clone().zip(scores.iter_mut()) {
                *score += distances.from(self.first + lane, key)[0];
            }
        }
        scores[..from].fill(HIDDEN);
        scores[seen..].fill(HIDDEN);
        let (before, sum) = *state;
        let mut most = ops.splat(before);
        for scores in scores.chunks_exact(len) {
            most = ops.max(most, ops.load(scores));
        }
        let largest = most.to_array().into_iter().fold(before, f32::max);
        let most = ops.splat(largest);
        for scores in scores.chunks_exact_mut(len) {
            let weight = exp2_falling(isa, ops.sub(ops.load(scores), most));
            ops.store(weight, scores);
        }
        // What a lane does not see is of no weight at all.
        scores[..from].fill(0.0);
        scores[seen..].fill(0.0);
        let mut four = [0.0; 4];
        for weights in scores.as_chunks::<4>().0 {
            for (sum, weight) in four.iter_mut().zip(weights) {
                *sum += weight;
            }
        }
        let factor = exp2_falling(isa, ops.sub(ops.splat(before), most)).to_array()[0];
        *state = (largest, sum * factor + ((four[0] + four[1]) + (four[2] + four[3])));
        factor
    }

    /// Adds the weighted values to the context of some lanes.
    #[inline(always)]
    fn weigh<I: Isa, const LANES: usize, const VECTORS: usize>(
        &mut self,
        isa: I,
        lane: usize,
        factors: &[f32],
    ) {
        let (len, padded, keys) = (isa.f32().len(), self.padded, self.keys.len());
        let left = Left { values: &self.scores[lane * self.block..], row: self.block, step: 1 };
        let mut column = 0;
        while column < padded {
            let right =
                Right { values: &self.values.values()[column..], step: self.values.stride() };
            let context = &mut self.context[lane * padded + column..];
            if column + VECTORS * len <= padded {
                columns::<I, LANES, VECTORS>(isa, context, padded, factors, keys, left, right);
                column += VECTORS * len;
            } else {
                columns::<I, LANES, 1>(isa, context, padded, factors, keys, left, right);
                column += len;
            }
        }
    }
}
