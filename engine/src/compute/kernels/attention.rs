//! Attention of query rows over the rows of their segments.
//!
//! Scores never fill a matrix: keys are taken by blocks, and what was summed up so far is scaled
//! down whenever a block has a larger score (the online softmax of Milakov and Gimelshein, as in
//! FlashAttention). Query rows of heads that share keys and values are worked on together, each a
//! *lane*. There are two kernels: many lanes stand side by side in vectors ([`many`]); of a few the
//! keys do ([`few`]).
//!
//! Both add up in one order, so that a row's context is the same to the bit whatever the number of rows
//! beside it, and wherever the keys that it sees lie: a score over the columns of a head, one after the
//! other; weights of a block in four sums, of the keys whose numbers are equal modulo four; a context over
//! keys. Blocks of keys begin at multiples of [`block`], counted from the first key of the text.
// Hot path: no allocation once the scratch has grown; the only lock is a thread's own.

mod distances;
mod few;
mod many;

use super::{
    super::cache::{GROUP, KvCache, Past, Stored},
    area::{Area, AreaMut, Cut, Extent, grow},
    instructions::Instructions,
    threads::Threads,
    vector,
};
pub(crate) use distances::DistanceTable;
use distances::Distances;
use galaxy_common::{BatchShape, Cache, Row, Segment, Span};
use rten_simd::{Isa, SimdOp, ops::BitOps};
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// Lanes of most tasks come in multiples of this, which fill vectors.
const TOGETHER: usize = 32;
/// Wider heads have one vector of lanes at a time, not several.
const WIDE: usize = 512;
/// Score of a key that a row does not see: its exponential is next to 0, and it is still a number.
const HIDDEN: f32 = -1e38;
/// Below so many products of two values another thread has not woken up before one is done.
const WORTH_SHARING: usize = 1 << 19;

/// Where heads lie in the rows of queries, and of keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Query heads of the device.
    pub(crate) heads: usize,
    /// Number of the first of them in the model.
    pub(crate) first_head: usize,
    /// Key-value heads of the device.
    pub(crate) kv_heads: usize,
    /// Number of the first of them in the model.
    pub(crate) first_kv_head: usize,
    /// Query heads that share a key-value head.
    pub(crate) group: usize,
    /// Columns of a head.
    pub(crate) width: usize,
}

impl Layout {
    /// The query heads that use a key-value head, numbered within the device.
    fn sharing(&self, kv_head: usize) -> Range<usize> {
        let first = (self.first_kv_head + kv_head) * self.group;
        let end = (first + self.group).min(self.first_head + self.heads);
        let first = first.max(self.first_head);
        first - self.first_head..end.max(first) - self.first_head
    }
    fn query(&self, head: usize) -> usize {
        head * self.width
    }
    fn key(&self, kv_head: usize) -> usize {
        kv_head * self.width
    }
    fn value(&self, kv_head: usize) -> usize {
        self.key(self.kv_heads + kv_head)
    }
}

/// Query rows of one segment. All rows count in the batch.
#[derive(Clone, Copy, Debug)]
struct Part {
    rows: Span<Row>,
    /// The rows of the batch that the last of them sees.
    seen: Span<Row>,
    /// The slot where earlier rows of the text are,
    slot: u32,
    /// how many there are,
    past: u32,
    /// and whether those of the batch are there, too.
    kept: bool,
}

/// What a thread works in: 250 KiB for heads of 64 columns, 490 KiB for those of 1024, which is the
/// most up to there.
#[derive(Default)]
struct Room {
    queries: Vec<f32>,
    /// Context that is not divided by its sum of weights yet.
    context: Vec<f32>,
    /// Largest scores so far, and sums of weights.
    state: Vec<f32>,
    scores: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

#[cfg(test)]
impl Room {
    fn bytes(&self) -> u64 {
        let Self { queries, context, state, scores, keys, values } = self;
        let all = [queries, context, state, scores, keys, values];
        4 * all.map(|part| part.capacity() as u64).iter().sum::<u64>()
    }
}

/// Memory that attention reuses.
pub(crate) struct Scratch {
    parts: Vec<Part>,
    rooms: Vec<Mutex<Room>>,
}

impl Scratch {
    pub(crate) fn new(threads: &Threads) -> Self {
        Self { parts: Vec::new(), rooms: (0..threads.count()).map(|_| Mutex::default()).collect() }
    }

    /// Makes room on every thread for a few lanes of heads of `width` columns: any of them may be the first
    /// to take some late.
    pub(crate) fn expect_few(&self, width: usize) {
        for room in &self.rooms {
            few::make_room(&mut room.lock().unwrap_or_else(PoisonError::into_inner), width);
        }
    }
}

/// What attention reads.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// `[rows, heads * width]`
    pub(crate) queries: Area<'a>,
    /// Row of the batch that is row 0 of `queries`.
    pub(crate) first_query: u32,
    /// `[rows, 2 * kv_heads * width]`: keys | values.
    pub(crate) keys: Area<'a>,
    /// Row of the batch that is row 0 of `keys`.
    pub(crate) first_key: u32,
    pub(crate) layout: Layout,
    /// What scores are multiplied by.
    pub(crate) scale: f32,
    pub(crate) causal: bool,
    /// What is added to scores, where each head has keys of its own.
    pub(crate) distances: Option<&'a DistanceTable>,
    /// Rows of texts that go on,
    pub(crate) cache: Option<&'a KvCache>,
    /// in this layer.
    pub(crate) layer: u32,
}

impl<'a> Sources<'a> {
    /// Queries of some heads.
    fn query(&self, rows: Span<Row>, column: usize, columns: usize) -> Area<'a> {
        let row = (rows.start() - self.first_query) as usize;
        self.queries.part(row, rows.len() as usize, column, columns)
    }
    /// Keys or values of a head.
    fn key(&self, rows: Span<Row>, column: usize) -> Area<'a> {
        let row = (rows.start() - self.first_key) as usize;
        self.keys.part(row, rows.len() as usize, column, self.layout.width)
    }
}

/// The rows that `rows` of the batch see in it, for each segment among them: (own rows, seen rows).
pub(crate) fn seen(
    shape: &BatchShape,
    rows: Span<Row>,
    causal: bool,
) -> impl Iterator<Item = (Span<Row>, Span<Row>)> {
    shape.placed().filter(move |(segment, _)| segment.overlaps(rows)).map(move |(segment, _)| {
        let own = segment.intersect(rows);
        let end = if causal { own.end() } else { segment.end() };
        (own, Span::new(segment.start(), end))
    })
}

/// `context = softmax(queries x keys' * scale) x values` for the query rows `rows`.
///
/// # Shapes
/// context `[rows, heads * width]`.
pub(crate) fn attend(
    threads: &Threads,
    scratch: &mut Scratch,
    sources: Sources<'_>,
    shape: &BatchShape,
    rows: Span<Row>,
    context: AreaMut<'_>,
) {
    attend_by(Instructions::current(), threads, scratch, sources, shape, rows, context);
}

fn attend_by(
    instructions: Instructions,
    threads: &Threads,
    scratch: &mut Scratch,
    sources: Sources<'_>,
    shape: &BatchShape,
    rows: Span<Row>,
    context: AreaMut<'_>,
) {
    let Scratch { parts, rooms } = scratch;
    parts.clear();
    let segments = shape.placed().filter(|(segment, _)| segment.overlaps(rows));
    let seen = seen(shape, rows, sources.causal).zip(segments);
    let part = |((rows, seen), (_, segment)): (_, (_, &Segment))| {
        let (kept, slot) = (segment.kept, segment.slot);
        Part { rows, seen, slot, past: if kept { segment.past } else { 0 }, kept }
    };
    parts.extend(seen.map(part));
    let seen = |part: &Part| part.past as usize + part.seen.len() as usize;
    let longest = parts.iter().map(seen).max().unwrap_or(0);
    let job = Job { instructions, threads, rooms, parts, sources, longest };
    let kv_heads = 0..sources.layout.kv_heads;
    if threads.count() > 1 && job.products(&kv_heads, rows) > WORTH_SHARING {
        let whole = Share { kv_heads, rows, context };
        threads.split(whole, |share| job.halve(share), |share| job.run(share));
    } else {
        job.run(Share { kv_heads, rows, context });
    }
}

/// One call of [`attend`].
struct Job<'a> {
    instructions: Instructions,
    threads: &'a Threads,
    rooms: &'a [Mutex<Room>],
    parts: &'a [Part],
    sources: Sources<'a>,
    /// Most rows that a row sees.
    longest: usize,
}

/// Some of the work: rows of some key-value heads.
struct Share<'a> {
    kv_heads: Range<usize>,
    rows: Span<Row>,
    context: AreaMut<'a>,
}

impl Job<'_> {
    /// Products of two values at most.
    fn products(&self, kv_heads: &Range<usize>, rows: Span<Row>) -> usize {
        let layout = self.sources.layout;
        let columns = 2 * kv_heads.len() * layout.group * layout.width;
        columns * self.longest * rows.len() as usize
    }

    fn parts(&self, rows: Span<Row>) -> impl Iterator<Item = Part> {
        let first = self.parts.partition_point(|part| part.rows.end() <= rows.start());
        self.parts[first..].iter().copied().take_while(move |part| part.rows.start() < rows.end())
    }

    /// Cuts work in two, by heads and then by rows. Pieces are small, for whichever thread is idle:
    /// later rows of a causal model cost more than earlier ones.
    fn halve<'c>(&self, share: Share<'c>) -> Result<(Share<'c>, Share<'c>), Share<'c>> {
        let Share { kv_heads, rows, context } = share;
        if self.products(&kv_heads, rows) <= WORTH_SHARING {
            return Err(Share { kv_heads, rows, context });
        }
        if kv_heads.len() > 1 {
            let middle = kv_heads.start + kv_heads.len() / 2;
            let layout = self.sources.layout;
            let column = layout.sharing(middle).start - layout.sharing(kv_heads.start).start;
            let (left, right) = context.cut_columns(column * layout.width);
            return Ok((
                Share { kv_heads: kv_heads.start..middle, rows, context: left },
                Share { kv_heads: middle..kv_heads.end, rows, context: right },
            ));
        }
        let Some(row) = self.middle(rows) else {
            return Err(Share { kv_heads, rows, context });
        };
        let (above, below) = context.cut((row - rows.start()) as usize);
        let rows = (Span::new(rows.start(), row), Span::new(row, rows.end()));
        Ok((
            Share { kv_heads: kv_heads.clone(), rows: rows.0, context: above },
            Share { kv_heads, rows: rows.1, context: below },
        ))
    }

    /// Where to cut rows in two, leaving whole vectors of lanes, and segments whole that have no
    /// more.
    fn middle(&self, rows: Span<Row>) -> Option<u32> {
        let together = (TOGETHER / self.sources.layout.group).max(1) as u32;
        let middle = rows.start() + rows.len() / 2;
        let part = self.parts(Span::new(middle, middle + 1)).next()?;
        let first = part.rows.start().max(rows.start());
        let whole = (middle - first).next_multiple_of(together);
        [first + whole, first, part.rows.end()]
            .into_iter()
            .find(|row| (rows.start() + 1..rows.end()).contains(row))
    }

    /// Does all of it on this thread.
    fn run(&self, share: Share<'_>) {
        let Share { kv_heads, rows, mut context } = share;
        let Sources { layout, causal, distances, .. } = self.sources;
        let room = &self.rooms[self.threads.index()];
        let mut room = room.lock().unwrap_or_else(PoisonError::into_inner);
        let first_column = layout.sharing(kv_heads.start).start * layout.width;
        for part in self.parts(rows) {
            let own = part.rows.intersect(rows);
            let end = if causal { own.end() } else { part.seen.end() };
            let seen = Span::new(part.seen.start(), end);
            for kv_head in kv_heads.clone() {
                let heads = layout.sharing(kv_head);
                let columns = heads.len() * layout.width;
                let (row, height) = (own.start() - rows.start(), own.len() as usize);
                let column = heads.start * layout.width - first_column;
                let (past, rounded) = self.past(part);
                let lanes = Lanes {
                    past,
                    rounded,
                    column: layout.key(kv_head),
                    queries: self.sources.query(own, layout.query(heads.start), columns),
                    keys: self.sources.key(seen, layout.key(kv_head)),
                    values: self.sources.key(seen, layout.value(kv_head)),
                    group: heads.len(),
                    width: layout.width,
                    scale: self.sources.scale,
                    sees: causal
                        .then(|| (part.past + own.start() + 1 - part.seen.start()) as usize),
                    distances: distances.map(|table| {
                        let row = (own.start() - part.seen.start()) as usize;
                        table.of(layout.first_head + heads.start, row)
                    }),
                };
                let context = context.part(row as usize, height, column, columns);
                self.instructions.run(Task { lanes, context, room: &mut room });
            }
        }
    }
}

impl<'a> Job<'a> {
    /// The rows of a text that were kept before this batch, and whether those of the batch, too, are kept with
    /// fewer bits than they have.
    fn past(&self, part: Part) -> (Past<'a>, bool) {
        let Some(cache) = self.sources.cache.filter(|_| part.kept) else {
            return (Past::NONE, false);
        };
        let past = cache.past(part.slot, self.sources.layer, part.past);
        (past.unwrap_or(Past::NONE), cache.rounds())
    }
}

/// Query rows of the heads that share a key-value head, and what they see.
///
/// Lane `l` of it is head `l % group` of row `l / group`.
#[derive(Clone, Copy)]
struct Lanes<'a> {
    /// `[rows, group * width]`
    queries: Area<'a>,
    /// What was kept of earlier rows,
    past: Past<'a>,
    /// whether rows of the batch are to be read as they will be kept, so that a row sees the same whether it comes
    /// with those before it or after them,
    rounded: bool,
    /// and the column of its keys, and of its values, with which those of the head begin.
    column: usize,
    /// Of the batch: `[seen, width]`
    keys: Area<'a>,
    /// `[seen, width]`
    values: Area<'a>,
    group: usize,
    width: usize,
    /// What scores are multiplied by.
    scale: f32,
    /// How many keys, those of the past included, the first row sees, where each row sees one more than the row before it. None
    /// where all rows see all keys.
    sees: Option<usize>,
    /// What is added to the scores, of the one head that there is then.
    distances: Option<Distances<'a>>,
}

impl<'a> Lanes<'a> {
    fn count(&self) -> usize {
        self.queries.rows() * self.group
    }

    /// The row and the columns of a lane.
    #[inline(always)]
    fn place(&self, lane: usize) -> (usize, Range<usize>) {
        let column = lane % self.group * self.width;
        (lane / self.group, column..column + self.width)
    }

    #[inline(always)]
    fn query(&self, lane: usize) -> &[f32] {
        let (row, columns) = self.place(lane);
        &self.queries.row(row)[columns]
    }

    /// How many keys a lane sees.
    #[inline(always)]
    fn seen(&self, lane: usize) -> usize {
        let all = self.past.rows() + self.keys.rows();
        self.sees.map_or(all, |first| first + lane / self.group)
    }

    /// The keys of a block and those that stand in groups with them: `[columns, GROUP]` of each group.
    /// Where a group is not stored like that it is put together in `room`.
    #[inline(always)]
    fn group<'r>(&self, group: usize, room: &'r mut [f32]) -> &'r [f32]
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
    fn keys<'r, I: Isa>(
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
    fn values<'r, I: Isa>(
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
    fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E * self.scale
    }
}

/// Attention of some lanes.
struct Task<'a, 'b> {
    lanes: Lanes<'a>,
    /// `[rows, group * width]`
    context: AreaMut<'b>,
    room: &'b mut Room,
}

impl SimdOp for Task<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        match isa.f32().len() {
            // 32 registers of 16 lanes: 2 x 8 sums.
            16 => self.run::<I, 2, 8, 1>(isa),
            // 16 registers of 8 lanes: 2 x 6 sums.
            8 => self.run::<I, 2, 6, 2>(isa),
            // 32 registers of 4 lanes: 4 x 6 sums.
            _ => self.run::<I, 4, 6, 4>(isa),
        }
    }
}

impl Task<'_, '_> {
    /// All lanes, up to `MOST` vectors of them at a time, in tiles of `ROWS` x `MOST` sums. A group of keys is as
    /// many as `PARTS` vectors have.
    #[inline(always)]
    fn run<I: Isa, const MOST: usize, const ROWS: usize, const PARTS: usize>(mut self, isa: I) {
        let len = isa.f32().len();
        let Self { lanes, room, context } = &mut self;
        let rest = match lanes.count() % len {
            rest if rest <= few::at_most(len) => rest,
            _ => 0,
        };
        let whole = lanes.count() - rest;
        if whole > 0 && lanes.width > WIDE {
            many::attend::<I, 1, ROWS>(isa, lanes, whole, context, room);
        } else if whole > 0 {
            many::attend::<I, MOST, ROWS>(isa, lanes, whole, context, room);
        }
        if rest > 0 {
            few::attend::<I, MOST, PARTS>(isa, lanes, whole, context, room);
        }
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

/// Keys of a block, for heads of `width` columns: multiples of [`GROUP`] by which the blocks of the cache can
/// be divided.
fn block(width: usize) -> usize {
    match width {
        0..=128 => 96,
        129..=256 => 48,
        _ => GROUP,
    }
}

const _: () = assert!(Cache::BLOCK.is_multiple_of(96) && 96 % GROUP == 0 && 48 % GROUP == 0);

/// How many rows ahead of copying they are fetched, at least to a second-level cache.
const COPY_AHEAD: usize = 12;

/// Whether rows are multiples of 4 KiB apart, of which a first-level cache has eight at a time.
fn collide(area: Area<'_>) -> bool {
    area.stride().is_multiple_of(1024)
}

/// Asks for a row of an area to be brought closer.
#[inline(always)]
fn fetch<I: Isa>(isa: I, area: Area<'_>, row: usize) {
    /// Values of a line of a cache.
    const LINE: usize = 16;
    let start = area.values().as_ptr().wrapping_add(row * area.stride());
    for line in 0..area.columns().div_ceil(LINE) {
        // A hint: it may point anywhere.
        isa.f32().prefetch(start.wrapping_add(line * LINE));
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};
    use galaxy_common::{Segment, Wanted};

    /// Queries, keys and values of `qkv` from column `start` on.
    fn sources(qkv: &[f32], start: usize, layout: Layout, causal: bool) -> Sources<'_> {
        let (queries, keys) = (layout.heads * layout.width, 2 * layout.kv_heads * layout.width);
        let stride = start + queries + keys;
        let rows = qkv.len() / stride;
        let area = whole(qkv, rows, stride);
        Sources {
            queries: area.part(0, rows, start, queries),
            first_query: 0,
            keys: area.part(0, rows, start + queries, keys),
            first_key: 0,
            layout,
            scale: 1.0 / (layout.width as f32).sqrt(),
            causal,
            distances: None,
            cache: None,
            layer: 0,
        }
    }

    /// Rows that were kept, as if they stood in the batch: their context is the same.
    #[test]
    fn the_past_counts() {
        use galaxy_common::{Cache, WireType};
        let kv_heads = |layout: Layout| Span::first(layout.kv_heads as u32);
        for (layout, past, rows) in [
            (part(0, 4, 2, 16), 1, 1),
            (part(1, 3, 3, 20), 63, 1),
            (part(0, 2, 1, 64), 200, 3),
            (part(0, 8, 8, 24), 500, 9),
            (part(2, 4, 2, 128), 384, 70),
        ] {
            let columns = (layout.heads + 2 * layout.kv_heads) * layout.width;
            let keys = layout.heads * layout.width;
            let whole_text = batch(&[past + rows]);
            let qkv = Random::default().values((past + rows) as usize * columns);
            let own = Span::new(past, past + rows);
            let want = reference(&qkv, 0, layout, true, &whole_text, own);
            let segment = Segment { slot: 5, past, kept: true, rows, wanted: Wanted::Hidden };
            let shape = BatchShape::new(vec![segment]).expect("a batch");
            for values in [WireType::F32, WireType::F16] {
                let limit = Cache { rows: 4 * Cache::BLOCK, values };
                let heads = [Span::empty(), kv_heads(layout)];
                let mut cache = KvCache::new(limit, heads.into_iter(), layout.width as u32);
                let all = whole(&qkv, (past + rows) as usize, columns);
                let kept = all.part(0, past as usize, keys, columns - keys);
                assert!(cache.bind(5, past + rows, &[3, 1, 2, 0].into()).is_ok());
                assert!(cache.keep(5, 1, 0, kept).is_ok());
                let here = all.part(past as usize, rows as usize, 0, columns);
                for instructions in Instructions::all() {
                    for count in [1, 2] {
                        let threads = Threads::new(count);
                        let mut scratch = Scratch::new(&threads);
                        let (height, width) = (rows as usize, keys);
                        let sources = Sources {
                            queries: here.part(0, height, 0, width),
                            first_query: 0,
                            keys: here.part(0, height, width, columns - width),
                            first_key: 0,
                            layout,
                            scale: 1.0 / (layout.width as f32).sqrt(),
                            causal: true,
                            distances: None,
                            cache: Some(&cache),
                            layer: 1,
                        };
                        let mut out = vec![f32::NAN; height * width];
                        let context = whole_mut(&mut out, height, width);
                        let own = Span::first(rows);
                        attend_by(
                            instructions,
                            &threads,
                            &mut scratch,
                            sources,
                            &shape,
                            own,
                            context,
                        );
                        let (all, lanes) = (u64::from(past + rows), layout.group as u64);
                        let width = layout.width as u64;
                        let said = galaxy_graph::budget::attention_scratch(all, lanes, width);
                        for room in &scratch.rooms {
                            let held = room.lock().expect("nobody panicked").bytes();
                            let said = said + 4 * 144 * (width + 15);
                            assert!(held <= said, "{layout:?} {all}: {held}, {said} were said");
                        }
                        let error = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs();
                        let worst = out.iter().zip(&want).map(error).fold(0.0, f64::max);
                        let most = if values == WireType::F32 { 1e-5 } else { 2e-3 };
                        assert!(worst < most, "{instructions} {layout:?} {past} {values}: {worst}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_is_the_same_to_the_bit_whatever_stands_beside_it() {
        use galaxy_common::{Cache, WireType};
        const ROWS: u32 = 230;
        let runs = [(0, 230), (0, 100), (3, 1), (90, 20), (185, 20), (191, 2), (192, 33), (229, 1)];
        for (layout, values) in [
            (part(0, 4, 2, 16), WireType::F32),
            (part(1, 3, 3, 20), WireType::F16),
            (part(0, 2, 1, 64), WireType::F32),
            (part(0, 8, 8, 64), WireType::F16),
            (part(0, 3, 1, 200), WireType::F32),
        ] {
            let queries = layout.heads * layout.width;
            let columns = queries + 2 * layout.kv_heads * layout.width;
            let qkv = Random::default().values(ROWS as usize * columns);
            let all = whole(&qkv, ROWS as usize, columns);
            let kv_heads = [Span::first(layout.kv_heads as u32)];
            let limit = Cache { rows: 2 * Cache::BLOCK, values };
            let mut cache = KvCache::new(limit, kv_heads.into_iter(), layout.width as u32);
            assert!(cache.bind(1, ROWS, &[1, 0].into()).is_ok());
            let keys = all.part(0, ROWS as usize, queries, columns - queries);
            assert!(cache.keep(1, 0, 0, keys).is_ok());
            for instructions in Instructions::all() {
                let run = |past: u32, rows: u32, beside: u32, count: u16| {
                    let text = Segment { slot: 1, past, kept: true, rows, wanted: Wanted::Hidden };
                    let other = Segment { slot: 2, past: 0, kept: false, ..text };
                    let other = (beside > 0).then_some(Segment { rows: beside, ..other });
                    let segments = [text].into_iter().chain(other).collect();
                    let shape = BatchShape::new(segments).expect("a batch");
                    let height = (rows + beside) as usize;
                    let here = all.part(past as usize, height, 0, columns);
                    let threads = Threads::new(count);
                    let sources = Sources {
                        queries: here.part(0, height, 0, queries),
                        keys: here.part(0, height, queries, columns - queries),
                        cache: Some(&cache),
                        ..sources(&qkv, 0, layout, true)
                    };
                    let mut out = vec![f32::NAN; height * queries];
                    let context = whole_mut(&mut out, height, queries);
                    let own = Span::first(rows + beside);
                    let mut scratch = Scratch::new(&threads);
                    attend_by(instructions, &threads, &mut scratch, sources, &shape, own, context);
                    out.truncate(rows as usize * queries);
                    out
                };
                let want = run(0, ROWS, 0, 1);
                for (past, rows) in runs {
                    for (beside, count) in [(0, 1), (0, 2), (1, 1), (17, 2)] {
                        if beside > 0 && past + rows + beside > ROWS {
                            continue;
                        }
                        let got = run(past, rows, beside, count);
                        let want = &want[past as usize * queries..][..got.len()];
                        let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                        let unlike = got.iter().zip(want).position(|pair| !equal(pair));
                        let what = format!("{instructions} {layout:?} {past}+{rows}|{beside}");
                        assert_eq!(unlike, None, "{what} x{count}");
                    }
                }
            }
        }
    }

    fn reference(
        qkv: &[f32],
        start: usize,
        layout: Layout,
        causal: bool,
        shape: &BatchShape,
        rows: Span<Row>,
    ) -> Vec<f64> {
        let stride = start + (layout.heads + 2 * layout.kv_heads) * layout.width;
        let at = |row: u32, column: usize| f64::from(qkv[row as usize * stride + column]);
        let mut out = Vec::new();
        for row in rows.iter() {
            let (segment, _) = shape.placed().find(|(s, _)| s.has(row)).expect("in the batch");
            let end = if causal { row + 1 } else { segment.end() };
            for head in 0..layout.heads {
                let kv = (layout.first_head + head) / layout.group - layout.first_kv_head;
                let key = start + (layout.heads + kv) * layout.width;
                let value = key + layout.kv_heads * layout.width;
                let query = start + head * layout.width;
                let score = |other: u32| -> f64 {
                    let dot: f64 =
                        (0..layout.width).map(|i| at(row, query + i) * at(other, key + i)).sum();
                    dot / (layout.width as f64).sqrt()
                };
                let scores: Vec<f64> = (segment.start()..end).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let scores: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f64 = scores.iter().sum();
                for i in 0..layout.width {
                    let seen = (segment.start()..end).zip(&scores);
                    out.push(seen.map(|(o, s)| s / sum * at(o, value + i)).sum());
                }
            }
        }
        out
    }

    fn batch(rows: &[u32]) -> BatchShape {
        let segments = rows.iter().zip(0..);
        let segment =
            |(&rows, slot)| Segment { slot, past: 0, kept: false, rows, wanted: Wanted::Hidden };
        BatchShape::new(segments.map(segment).collect()).expect("a batch")
    }

    /// A part of a model: its heads from `first_head` on.
    fn part(first_head: usize, heads: usize, group: usize, width: usize) -> Layout {
        let first_kv_head = first_head / group;
        let kv_heads = (first_head + heads).div_ceil(group) - first_kv_head;
        Layout { heads, first_head, kv_heads, first_kv_head, group, width }
    }

    /// Every instruction set and some numbers of threads against f64. Values are multiplied by
    /// `size`.
    fn check(layout: Layout, shape: &BatchShape, size: f32, some: &[(u32, u32)]) {
        check_from(0, layout, shape, size, some);
    }

    fn check_from(
        start: usize,
        layout: Layout,
        shape: &BatchShape,
        size: f32,
        some: &[(u32, u32)],
    ) {
        let columns = start + (layout.heads + 2 * layout.kv_heads) * layout.width;
        let mut qkv = Random::default().values(shape.rows() as usize * columns);
        qkv.iter_mut().for_each(|value| *value *= size);
        let qkv = qkv.as_slice();
        for (causal, &(first, end)) in
            [false, true].into_iter().flat_map(|c| some.iter().map(move |s| (c, s)))
        {
            let rows = Span::new(first, end);
            let want = reference(qkv, start, layout, causal, shape, rows);
            let sets = Instructions::all().flat_map(|set| [1, 2, 3].map(|count| (set, count)));
            for (instructions, count) in sets {
                let threads = Threads::new(count);
                let mut scratch = Scratch::new(&threads);
                let sources = sources(qkv, start, layout, causal);
                let width = layout.heads * layout.width;
                let mut out = vec![f32::NAN; rows.len() as usize * width];
                let context = whole_mut(&mut out, rows.len() as usize, width);
                attend_by(instructions, &threads, &mut scratch, sources, shape, rows, context);
                let what = format!("{instructions} {layout:?} causal {causal} {rows} x{count}");
                close(&what, &out, &want);
            }
        }
    }

    #[test]
    fn parts_of_batches_match_f64() {
        let shape = batch(&[1, 7, 2, 130, 33]);
        let some = [(0, 173), (0, 1), (5, 9), (60, 61), (100, 173)];
        for layout in [part(0, 3, 1, 7), part(3, 4, 3, 16), part(5, 2, 3, 5)] {
            check(layout, &shape, 1.0, &some);
        }
    }

    #[test]
    fn heads_of_all_widths_match_f64() {
        let shape = batch(&[300, 1, 19]);
        let some = [(0, 320), (3, 22), (270, 320)];
        for layout in [part(0, 2, 1, 64), part(0, 8, 8, 32), part(2, 3, 4, 80), part(1, 1, 1, 128)]
        {
            check(layout, &shape, 1.0, &some);
        }
        // Wide enough for one vector of lanes at a time.
        check(part(0, 1, 1, WIDE + 3), &batch(&[20]), 1.0, &[(0, 20)]);
    }

    #[test]
    fn rows_that_collide_are_as_any() {
        // 1024 columns in all: rows are 4 KiB apart.
        let layout = part(0, 4, 1, 64);
        check_from(256, layout, &batch(&[150]), 1.0, &[(0, 150), (40, 58), (149, 150)]);
    }

    #[test]
    fn keys_may_lie_elsewhere_and_begin_with_another_row() {
        let (shape, layout) = (batch(&[9, 40, 3]), part(0, 4, 2, 8));
        let qkv = Random::default().values(52 * 64);
        let threads = Threads::new(2);
        for (own, seen, causal) in [((20, 31), (9, 49), false), ((30, 52), (9, 52), true)] {
            let rows: Span<Row> = Span::new(own.0, own.1);
            let count = (seen.1 - seen.0) as usize;
            let joint = sources(&qkv, 0, layout, causal);
            let mut keys = Vec::new();
            for row in seen.0..seen.1 {
                keys.extend_from_slice(&qkv[row as usize * 64 + 32..][..32]);
            }
            let apart = Sources {
                queries: joint.queries.part(own.0 as usize, rows.len() as usize, 0, 32),
                first_query: own.0,
                keys: whole(&keys, count, 32),
                first_key: seen.0,
                ..joint
            };
            let mut out = vec![f32::NAN; rows.len() as usize * 32];
            let context = whole_mut(&mut out, rows.len() as usize, 32);
            attend(&threads, &mut Scratch::new(&threads), apart, &shape, rows, context);
            close("keys elsewhere", &out, &reference(&qkv, 0, layout, causal, &shape, rows));
        }
    }

    #[test]
    fn every_length_matches_f64() {
        for rows in [2, 3, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 143, 144, 145, 192, 289] {
            let some = [(0, rows.min(20)), (rows - 1, rows)];
            check(part(0, 1, 1, 8), &batch(&[rows]), 1.0, &some);
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        // Scores of about a hundred: their exponentials are beyond f32.
        check(part(0, 2, 2, 16), &batch(&[200]), 9.0, &[(0, 200), (199, 200)]);
    }

    #[test]
    fn a_row_that_sees_one_key_takes_its_value() {
        let layout = part(0, 1, 1, 4);
        let qkv: Vec<f32> = Random::default().values(40 * 12);
        for instructions in Instructions::all() {
            let threads = Threads::new(1);
            let mut out = vec![f32::NAN; 40 * 4];
            let sources = sources(&qkv, 0, layout, true);
            let context = whole_mut(&mut out, 40, 4);
            let mut scratch = Scratch::new(&threads);
            let (shape, rows) = (batch(&[40]), Span::new(0, 40));
            attend_by(instructions, &threads, &mut scratch, sources, &shape, rows, context);
            let want: Vec<f64> = qkv[8..12].iter().map(|v| f64::from(*v)).collect();
            close(&instructions.to_string(), &out[..4], &want);
        }
    }

    #[test]
    fn what_is_not_a_number_is_not_hidden() {
        let (rows, layout) = (160, part(0, 1, 1, 16));
        for instructions in Instructions::all().filter(|i| *i != Instructions::Portable) {
            // In a key of the first block, of the last, and in a query.
            for (row, column) in [(3, 16 + 5), (159, 16 + 5), (7, 2)] {
                let mut qkv: Vec<f32> = Random::default().values(rows * 48);
                qkv[row * 48 + column] = f32::NAN;
                for (from, to) in [(0, 160), (7, 8)] {
                    let threads = Threads::new(1);
                    let mut out = vec![0.0; (to - from) * 16];
                    let sources = sources(&qkv, 0, layout, false);
                    let context = whole_mut(&mut out, to - from, 16);
                    let mut scratch = Scratch::new(&threads);
                    let shape = batch(&[rows as u32]);
                    let some = Span::new(from as u32, to as u32);
                    attend_by(instructions, &threads, &mut scratch, sources, &shape, some, context);
                    let row = &out[(7 - from) * 16..][..16];
                    assert!(row.iter().all(|v| v.is_nan()), "{instructions} {row:?}");
                }
            }
        }
    }
}
