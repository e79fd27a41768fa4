//! Attention of query rows over the rows of their segments.
//!
//! Scores never fill a matrix: keys are taken by blocks, and what was summed up so far is scaled down
//! whenever a block has a larger score (the online softmax of Milakov and Gimelshein, as in FlashAttention).
//! Query rows of heads that share keys and values are worked on together, each a *lane*. There are two
//! kernels: one for many lanes, which stand side by side in vectors ([`many`]), and one for a few, whose keys
//! do ([`few`]).
//!
//! Both add up in one order, so that a row's context is the same to the bit whatever the number of rows
//! beside it, and wherever the keys that it sees lie: a score over the columns of a head, one after the
//! other; weights of a block in four sums, of the keys whose numbers are equal modulo four; a context over
//! keys. Blocks of keys begin at multiples of [`block`], counted from the first key of the sequence.
// Hot path: no allocation once the scratch has grown; the only lock is a thread's own.

mod few;
mod lanes;
mod many;
mod relative_bias;

use super::{
    super::cache::{CachedRows, GROUP, KvCache},
    area::{Area, AreaMut, Cut},
    instructions::Instructions,
    threads::Threads,
};
use galaxy_common::{BatchShape, Cache, CacheType, Row, Segment, Span};
use galaxy_graph::operators::Attention;
use lanes::Lanes;
pub(crate) use relative_bias::BiasTable;
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

/// Query rows of one segment. All rows are numbered within the batch.
#[derive(Clone, Copy, Debug)]
struct QueryRun {
    rows: Span<Row>,
    /// All rows of the segment that are in the batch.
    text: Span<Row>,
    /// The slot that has the cached rows of the sequence.
    slot: u32,
    /// The number of earlier rows of the sequence, which are cached; 0 where the segment caches none.
    context_len: u32,
    /// Whether the rows of the batch are cached in the slot, too.
    cached: bool,
}

/// The scratch space of one thread: 250 KiB for heads of 64 columns, 490 KiB for those of 1024, which
/// is the most up to there.
#[derive(Default)]
struct AttentionBuffers {
    queries: Vec<f32>,
    /// The context, not divided by its sum of weights yet.
    context: Vec<f32>,
    /// The largest score of each lane so far, and the sum of its weights.
    state: Vec<f32>,
    scores: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

#[cfg(test)]
impl AttentionBuffers {
    fn bytes(&self) -> u64 {
        let Self { queries, context, state, scores, keys, values } = self;
        let all = [queries, context, state, scores, keys, values];
        4 * all.map(|part| part.capacity() as u64).iter().sum::<u64>()
    }
}

/// Memory that attention reuses, for each thread.
pub(crate) struct Scratch {
    parts: Vec<QueryRun>,
    rooms: Vec<Mutex<AttentionBuffers>>,
}

impl Scratch {
    pub(crate) fn new(threads: &Threads) -> Self {
        Self { parts: Vec::new(), rooms: (0..threads.count()).map(|_| Mutex::default()).collect() }
    }

    /// Makes room on every thread for a few lanes of heads of `width` columns: any thread may be the first to
    /// take some late.
    pub(crate) fn expect_few(&self, width: usize) {
        for room in &self.rooms {
            few::make_room(&mut room.lock().unwrap_or_else(PoisonError::into_inner), width);
        }
    }
}

/// The inputs of attention: queries, keys and values, and where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// The queries, `[rows, heads * width]`.
    pub(crate) queries: Area<'a>,
    /// The row of the batch that is row 0 of `queries`.
    pub(crate) first_query: u32,
    /// Keys and values, `[rows, 2 * kv_heads * width]`: keys | values.
    pub(crate) keys: Area<'a>,
    /// The row of the batch that is row 0 of `keys`.
    pub(crate) first_key: u32,
    pub(crate) layout: Layout,
    /// The operator: how scores are computed, and which rows a row sees.
    pub(crate) of: &'a Attention,
    /// The relative position bias that is added to scores, where each head has keys of its own.
    pub(crate) relative_bias: Option<&'a BiasTable>,
    /// The KV cache, which has the earlier rows of sequences; none where nothing is cached.
    pub(crate) cache: Option<&'a KvCache>,
    /// The layer that is read from the cache.
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
pub(crate) fn seen<'a>(
    shape: &'a BatchShape,
    rows: Span<Row>,
    of: &'a Attention,
) -> impl Iterator<Item = (Span<Row>, Span<Row>)> + 'a {
    shape.placed().filter(move |(segment, _)| segment.overlaps(rows)).map(move |(segment, _)| {
        let own = segment.intersect(rows);
        (own, of.sees(own, segment))
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
    let part = |(text, segment): (Span<Row>, &Segment)| {
        let (cached, slot) = (segment.cached, segment.slot);
        let rows = text.intersect(rows);
        QueryRun {
            rows,
            text,
            slot,
            context_len: if cached { segment.context_len } else { 0 },
            cached,
        }
    };
    parts.extend(segments.map(part));
    let Attention { window_before: behind, window_after: ahead, .. } = *sources.of;
    let seen = |part: &QueryRun| {
        let all = part.context_len as usize + part.text.len() as usize;
        let window = behind.zip(ahead).map(|(behind, ahead)| behind as usize + 1 + ahead as usize);
        window.map_or(all, |window| window.min(all))
    };
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
    rooms: &'a [Mutex<AttentionBuffers>],
    parts: &'a [QueryRun],
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
    /// The number of products of two values, at most.
    fn products(&self, kv_heads: &Range<usize>, rows: Span<Row>) -> usize {
        let layout = self.sources.layout;
        let columns = 2 * kv_heads.len() * layout.group * layout.width;
        columns * self.longest * rows.len() as usize
    }

    fn parts(&self, rows: Span<Row>) -> impl Iterator<Item = QueryRun> {
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

    /// Computes a share on this thread.
    fn run(&self, share: Share<'_>) {
        let Share { kv_heads, rows, mut context } = share;
        let Sources { layout, of, relative_bias, .. } = self.sources;
        let room = &self.rooms[self.threads.index()];
        let mut room = room.lock().unwrap_or_else(PoisonError::into_inner);
        let first_column = layout.sharing(kv_heads.start).start * layout.width;
        for part in self.parts(rows) {
            let own = part.rows.intersect(rows);
            let seen = of.sees(own, part.text);
            let first_key = (part.context_len + seen.start() - part.text.start()) as usize;
            for kv_head in kv_heads.clone() {
                let heads = layout.sharing(kv_head);
                let columns = heads.len() * layout.width;
                let (row, height) = (own.start() - rows.start(), own.len() as usize);
                let column = heads.start * layout.width - first_column;
                let (cached, kept_as) = self.past(part);
                let lanes = Lanes {
                    cached,
                    value_type: kept_as,
                    column: layout.key(kv_head),
                    queries: self.sources.query(own, layout.query(heads.start), columns),
                    keys: self.sources.key(seen, layout.key(kv_head)),
                    values: self.sources.key(seen, layout.value(kv_head)),
                    group: heads.len(),
                    width: layout.width,
                    scale: of.scale,
                    cap: of.cap,
                    first_key,
                    first_row: (part.context_len + own.start() - part.text.start()) as usize,
                    window: of.window_before.map(|rows| rows as usize),
                    ahead: of.window_after.map(|rows| rows as usize),
                    relative_bias: relative_bias.map(|table| {
                        let row = (own.start() - part.text.start()) as usize;
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
    /// The cached rows of a segment's sequence, and the type in which rows of the batch are cached, too; f32 where they
    /// are not.
    fn past(&self, part: QueryRun) -> (CachedRows<'a>, CacheType) {
        let Some(cache) = self.sources.cache.filter(|_| part.cached) else {
            return (CachedRows::NONE, CacheType::F32);
        };
        let past = cache.cached_rows(part.slot, self.sources.layer, part.context_len);
        (past.unwrap_or(CachedRows::NONE), cache.value_type())
    }
}

/// Attention of some lanes.
struct Task<'a, 'b> {
    lanes: Lanes<'a>,
    /// The context, `[rows, group * width]`.
    context: AreaMut<'b>,
    room: &'b mut AttentionBuffers,
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

/// The number of keys of a block, for heads of `width` columns: a multiple of [`GROUP`] by which the blocks
/// of the cache can be divided.
fn block(width: usize) -> usize {
    match width {
        0..=128 => 96,
        129..=256 => 48,
        _ => GROUP,
    }
}

const _: () = assert!(Cache::BLOCK.is_multiple_of(96) && 96 % GROUP == 0 && 48 % GROUP == 0);

/// Whether rows are multiples of 4 KiB apart, of which a first-level cache has eight at a time.
fn collide(area: Area<'_>) -> bool {
    area.stride().is_multiple_of(1024)
}

/// Fetches a row of an area ahead of its use.
#[inline(always)]
fn fetch<I: Isa>(isa: I, area: Area<'_>, row: usize) {
    /// Values of a line of cache.
    const LINE: usize = 16;
    let start = area.values().as_ptr().wrapping_add(row * area.stride());
    for line in 0..area.columns().div_ceil(LINE) {
        // A hint: it may point anywhere.
        isa.f32().prefetch(start.wrapping_add(line * LINE));
    }
}

#[cfg(test)]
mod tests;
