//! Attention of many lanes, side by side in vectors: nothing is summed up across a vector.
//!
//! Blocks of keys and values are copied together once for all lanes: where they lie, rows are often
//! multiples of 4 KiB apart, and no more than eight of those are in a first-level cache at a time.
//! Then scores are `keys x queries'`, and the context is `weights' x values`.
// Hot path: no locks, no logging, no allocation once the room has grown.

use super::{
    super::{
        activation::cap,
        area::{Area, AreaMut, grow},
        micro::{F32, Left, Right, accumulate},
        vector::exp2_falling,
    },
    AttentionBuffers, HIDDEN, Lanes, fetch,
};
use rten_simd::{
    Isa,
    ops::{BitOps, NumOps},
};
use std::ops::Range;

/// Values of the queries of lanes that are worked on together, and of their context: each 80 KiB.
const TOGETHER: usize = 20 << 10;

/// Computes the context of the lanes before `end`, up to `MOST` vectors of them at a time, in tiles of
/// `ROWS` x `MOST` sums.
#[inline(always)]
pub(super) fn attend<I: Isa, const MOST: usize, const ROWS: usize>(
    isa: I,
    lanes: &Lanes<'_>,
    end: usize,
    out: &mut AreaMut<'_>,
    room: &mut AttentionBuffers,
) {
    let step = MOST * isa.f32().len();
    let most = (TOGETHER / lanes.width).max(step) / step * step;
    let size = end.div_ceil(end.div_ceil(most)).next_multiple_of(step);
    for first in (0..end).step_by(size) {
        together::<I, MOST, ROWS>(isa, lanes, first..end.min(first + size), out, room);
    }
}

#[inline(always)]
fn together<I: Isa, const MOST: usize, const ROWS: usize>(
    isa: I,
    lanes: &Lanes<'_>,
    which: Range<usize>,
    out: &mut AreaMut<'_>,
    room: &mut AttentionBuffers,
) {
    let len = isa.f32().len();
    let (step, width, count) = (MOST * len, lanes.width, which.len());
    let padded = width.next_multiple_of(len);
    let seen = lanes.seen(which.end - 1);
    let block = super::block(width);
    // Copying would not be worth it for one pass.
    let copied = count > step || padded > width;
    let places = count.next_multiple_of(step);
    grow(&mut room.queries, width * places);
    grow(&mut room.context, count * padded);
    grow(&mut room.state, 2 * places);
    grow(&mut room.scores, block * step);
    let AttentionBuffers { queries, context, state, scores, keys: keys_room, values: values_room } =
        room;
    let (most, sums) = state[..2 * places].split_at_mut(places);
    most.fill(HIDDEN);
    sums.fill(0.0);
    context[..count * padded].fill(0.0);
    // The lanes of each pass over a block.
    let passes = (0..count).step_by(step).map(|first| first..count.min(first + step));
    for pass in passes.clone() {
        let queries = &mut queries[pass.start * width..];
        let some = which.start + pass.start..which.start + pass.end;
        match pass.len() <= len {
            true => pack::<I, 1>(isa, lanes, some, queries),
            false => pack::<I, MOST>(isa, lanes, some, queries),
        }
    }

    // Of what no lane sees nothing is read: blocks begin where they always do.
    let mut next = lanes.from(which.start) / block * block;
    while next < seen {
        let keys = next..next + block.min(seen - next);
        let first_key = keys.start;
        next = keys.end;
        let keys_here = lanes.keys(isa, keys.clone(), (copied, block), keys_room);
        let values_here = lanes.values(isa, keys.clone(), (copied, block), values_room, padded);
        for pass in passes.clone() {
            let some = which.start + pass.start..which.start + pass.end;
            let seen = lanes.seen(some.end - 1).min(keys.end);
            if seen <= keys.start || lanes.from(some.start) >= keys.end {
                continue;
            }
            let block = Block {
                lanes,
                which: some,
                first_key,
                count: seen - keys.start,
                queries: &queries[pass.start * width..],
                keys: keys_here,
                values: values_here,
                copied,
                scores,
                most: &mut most[pass.start..],
                sums: &mut sums[pass.start..],
                context: &mut context[pass.start * padded..],
                padded,
            };
            match pass.len() <= len {
                true => block.add::<I, 1, MOST, ROWS>(isa),
                false => block.add::<I, MOST, MOST, ROWS>(isa),
            }
        }
    }

    for ((lane, context), sum) in which.zip(context.chunks_exact(padded)).zip(sums) {
        let (row, columns) = lanes.place(lane);
        let factor = 1.0 / *sum;
        for (out, context) in out.row(row)[columns].iter_mut().zip(context) {
            *out = context * factor;
        }
    }
}

/// Packs queries, scaled, side by side. Where lanes do not fill the vectors, the last one is repeated.
///
/// # Shapes
/// packed `[width, VECTORS * lanes]`
#[inline(always)]
fn pack<I: Isa, const VECTORS: usize>(
    isa: I,
    lanes: &Lanes<'_>,
    which: Range<usize>,
    packed: &mut [f32],
) {
    let ops = isa.f32();
    let (len, width, scale) = (ops.len(), lanes.width, ops.splat(lanes.scale()));
    // Square by square: as many columns at a time as a vector has lanes.
    let mut square = [0.0; 256];
    for v in 0..VECTORS {
        for column in (0..width).step_by(len) {
            let columns = len.min(width - column);
            for (at, square) in square.chunks_exact_mut(len).take(len).enumerate() {
                let lane = (which.start + v * len + at).min(which.end - 1);
                let query = ops.load_pad(&lanes.query(lane)[column..column + columns]).0;
                ops.store(ops.mul(query, scale), square);
            }
            let packed = packed[column * VECTORS * len..].chunks_exact_mut(VECTORS * len);
            for (i, packed) in packed.take(columns).enumerate() {
                let mut values = [0.0; 16];
                for (at, value) in values[..len].iter_mut().enumerate() {
                    *value = square[at * len + i];
                }
                ops.store(ops.load(&values), &mut packed[v * len..]);
            }
        }
    }
}

/// For each lane the first key of a block that it sees, and the end of those that it sees.
type VisibleKeys<I, const VECTORS: usize> = [(<I as Isa>::F32, <I as Isa>::F32); VECTORS];

/// The lanes of a pass, and a block of keys that they see.
struct Block<'a, 'b> {
    lanes: &'b Lanes<'a>,
    which: Range<usize>,
    /// The number of the first key in the sequence.
    first_key: usize,
    /// How many keys the last of the lanes sees in this block.
    count: usize,
    /// The packed queries, `[width, VECTORS * lanes]`.
    queries: &'b [f32],
    /// The keys, `[keys, width]`.
    keys: Area<'b>,
    /// The values, `[keys, width or padded]`.
    values: Area<'b>,
    /// Whether keys and values were copied together.
    copied: bool,
    /// The scores, which become weights: `[keys, VECTORS * lanes]`.
    scores: &'b mut [f32],
    /// The largest score of each lane so far.
    most: &'b mut [f32],
    /// The sum of the weights of each lane so far.
    sums: &'b mut [f32],
    /// The context so far, `[lanes, padded]`.
    context: &'b mut [f32],
    padded: usize,
}

/// How many of `left` to take next: `most`, or a power of two below 8.
fn height(left: usize, most: usize) -> usize {
    if left >= most { most } else { 1 << left.min(4).ilog2() }
}

impl Block<'_, '_> {
    #[inline(always)]
    fn add<I: Isa, const VECTORS: usize, const MOST: usize, const ROWS: usize>(mut self, isa: I) {
        let ops = isa.f32();
        let len = ops.len();
        let step = VECTORS * len;
        let count = self.count;
        // Which keys of the block each lane sees, where they do not see all.
        let seen_by_all = self.lanes.from(self.which.end - 1).saturating_sub(self.first_key)
            ..self.lanes.seen(self.which.start).saturating_sub(self.first_key);
        let mut seen = [(ops.zero(), ops.splat(count as f32)); VECTORS];
        if seen_by_all.start > 0 || seen_by_all.end < count {
            for (v, seen) in seen.iter_mut().enumerate() {
                let (mut first, mut last) = ([0.0; 16], [0.0; 16]);
                for (at, (from, end)) in first.iter_mut().zip(&mut last).enumerate().take(len) {
                    let lane = (self.which.start + v * len + at).min(self.which.end - 1);
                    *from = self.lanes.from(lane).saturating_sub(self.first_key) as f32;
                    *end = self.lanes.seen(lane).saturating_sub(self.first_key) as f32;
                }
                *seen = (ops.load(&first), ops.load(&last));
            }
        }
        let mut before = [ops.zero(); VECTORS];
        for (v, before) in before.iter_mut().enumerate() {
            *before = ops.load(&self.most[v * len..]);
        }

        let mut most = before;
        let mut key = 0;
        while key < count {
            let height = height(count - key, ROWS);
            if !self.copied {
                for key in key..key + height {
                    fetch(isa, self.keys, key + ROWS);
                    fetch(isa, self.values, key);
                }
            }
            let all = key >= seen_by_all.start && key + height <= seen_by_all.end;
            let seen = (!all).then_some(seen);
            most = match height {
                1 => self.score::<I, VECTORS, 1>(isa, key, seen, most),
                2 => self.score::<I, VECTORS, 2>(isa, key, seen, most),
                4 => self.score::<I, VECTORS, 4>(isa, key, seen, most),
                _ => self.score::<I, VECTORS, ROWS>(isa, key, seen, most),
            };
            key += height;
        }

        let mut factors = [0.0; 32];
        let mut sums = before;
        for v in 0..VECTORS {
            let factor = exp2_falling(isa, ops.sub(before[v], most[v]));
            ops.store(factor, &mut factors[v * len..]);
            sums[v] = ops.mul(ops.load(&self.sums[v * len..]), factor);
        }
        // Four sums, of keys that are equal modulo four: none waits for the one before it.
        let mut four = [[ops.zero(); VECTORS]; 4];
        let mut key = 0;
        while key < count {
            for (at, four) in four.iter_mut().enumerate() {
                if key + at < count {
                    let scores = &mut self.scores[(key + at) * step..][..step];
                    // What a lane does not see is of no weight at all.
                    let seen = (!seen_by_all.contains(&(key + at))).then_some(seen);
                    weigh_key::<I, VECTORS>(isa, scores, most, (key + at, seen), four);
                }
            }
            key += 4;
        }
        for v in 0..VECTORS {
            let [a, b, c, d] = [four[0][v], four[1][v], four[2][v], four[3][v]];
            sums[v] = ops.add(sums[v], ops.add(ops.add(a, b), ops.add(c, d)));
        }
        for v in 0..VECTORS {
            ops.store(most[v], &mut self.most[v * len..]);
            ops.store(sums[v], &mut self.sums[v * len..]);
        }

        let mut lane = 0;
        while lane < self.which.len() {
            let height = height(self.which.len() - lane, ROWS);
            let seen = self.lanes.seen(self.which.start + lane + height - 1);
            let count = seen.saturating_sub(self.first_key).min(count);
            let factors = &factors[lane..];
            match height {
                1 => self.weigh::<I, MOST, 1>(isa, step, lane, count, factors),
                2 => self.weigh::<I, MOST, 2>(isa, step, lane, count, factors),
                4 => self.weigh::<I, MOST, 4>(isa, step, lane, count, factors),
                _ => self.weigh::<I, MOST, ROWS>(isa, step, lane, count, factors),
            }
            lane += height;
        }
    }

    /// Computes the scores of the `KEYS` keys from `key` on, and gives the largest scores so far.
    #[inline(always)]
    fn score<I: Isa, const VECTORS: usize, const KEYS: usize>(
        &mut self,
        isa: I,
        key: usize,
        seen: Option<VisibleKeys<I, VECTORS>>,
        mut most: [I::F32; VECTORS],
    ) -> [I::F32; VECTORS] {
        let ops = isa.f32();
        let (len, step, stride) = (ops.len(), VECTORS * ops.len(), self.keys.stride());
        let left = Left { values: &self.keys.values()[key * stride..], row: stride, step: 1 };
        let right = Right::<F32> { values: self.queries, step: VECTORS * len };
        let zero = [[ops.zero(); VECTORS]; KEYS];
        let width = self.lanes.width;
        let mut tile = accumulate::<I, F32, KEYS, VECTORS>(isa, zero, width, left, right);
        if let Some(most) = self.lanes.cap() {
            for tile in &mut tile {
                for score in tile.iter_mut() {
                    *score = cap(isa, *score, most);
                }
            }
        }
        if let Some(distances) = &self.lanes.relative_bias {
            for (i, tile) in tile.iter_mut().enumerate() {
                let values = distances.from(self.which.start, self.first_key + key + i);
                for (v, score) in tile.iter_mut().enumerate() {
                    *score = ops.add(*score, ops.load(&values[v * len..]));
                }
            }
        }
        if let Some(seen) = seen {
            for (i, tile) in tile.iter_mut().enumerate() {
                let key = ops.splat((key + i) as f32);
                for (score, (from, end)) in tile.iter_mut().zip(seen) {
                    let before = ops.select(*score, ops.splat(HIDDEN), ops.gt(end, key));
                    *score = ops.select(ops.splat(HIDDEN), before, ops.gt(from, key));
                }
            }
        }
        let scores = self.scores[key * step..][..KEYS * step].chunks_exact_mut(step);
        for (scores, tile) in scores.zip(tile) {
            for v in 0..VECTORS {
                most[v] = ops.max(most[v], tile[v]);
                ops.store(tile[v], &mut scores[v * len..]);
            }
        }
        most
    }

    /// Adds the first `count` values, weighted, to the context of the `LANES` lanes from `lane` on.
    #[inline(always)]
    fn weigh<I: Isa, const MOST: usize, const LANES: usize>(
        &mut self,
        isa: I,
        step: usize,
        lane: usize,
        count: usize,
        factors: &[f32],
    ) {
        if count == 0 {
            return;
        }
        let len = isa.f32().len();
        let left = Left { values: &self.scores[lane..], row: 1, step };
        let context = &mut self.context[lane * self.padded..][..LANES * self.padded];
        let mut column = 0;
        while column < self.padded {
            let right =
                Right { values: &self.values.values()[column..], step: self.values.stride() };
            let context = &mut context[column..];
            if column + MOST * len <= self.padded {
                columns::<I, LANES, MOST>(isa, context, self.padded, factors, count, left, right);
                column += MOST * len;
            } else {
                columns::<I, LANES, 1>(isa, context, self.padded, factors, count, left, right);
                column += len;
            }
        }
    }
}

/// Turns the scores of a key into weights, and adds these to `sums`.
#[inline(always)]
fn weigh_key<I: Isa, const VECTORS: usize>(
    isa: I,
    scores: &mut [f32],
    most: [I::F32; VECTORS],
    (key, seen): (usize, Option<VisibleKeys<I, VECTORS>>),
    sums: &mut [I::F32; VECTORS],
) {
    let ops = isa.f32();
    for v in 0..VECTORS {
        let score = ops.load(&scores[v * ops.len()..]);
        let mut weight = exp2_falling(isa, ops.sub(score, most[v]));
        if let Some(seen) = seen {
            let ((from, end), key) = (seen[v], ops.splat(key as f32));
            weight = ops.select(weight, ops.zero(), ops.gt(end, key));
            weight = ops.select(ops.zero(), weight, ops.gt(from, key));
        }
        sums[v] = ops.add(sums[v], weight);
        ops.store(weight, &mut scores[v * ops.len()..]);
    }
}

/// Computes `context = context * factors + left x right`.
#[inline(always)]
pub(super) fn columns<I: Isa, const LANES: usize, const VECTORS: usize>(
    isa: I,
    context: &mut [f32],
    stride: usize,
    factors: &[f32],
    count: usize,
    left: Left<'_>,
    right: Right<'_, F32>,
) {
    let ops = isa.f32();
    // Plain loops: closures inside of closures are not inlined, and then not vectors either.
    let mut sums = [[ops.zero(); VECTORS]; LANES];
    for (i, sums) in sums.iter_mut().enumerate() {
        let factor = ops.splat(factors[i]);
        for (v, sum) in sums.iter_mut().enumerate() {
            *sum = ops.mul(ops.load(&context[i * stride + v * ops.len()..]), factor);
        }
    }
    let sums = accumulate::<I, F32, LANES, VECTORS>(isa, sums, count, left, right);
    for (i, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            ops.store(sum, &mut context[i * stride + v * ops.len()..]);
        }
    }
}
