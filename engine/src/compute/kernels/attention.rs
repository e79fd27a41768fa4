//! Attention of query rows over the rows of their segments.
// Hot path: no allocation once the scratch has grown; the only lock is a thread's own.

use super::{
    area::{Area, AreaMut, Cut, Extent, grow},
    general::{Right, multiply, multiply_transposed},
    threads::Threads,
    vector::{self, LANES},
};
use galaxy_common::{BatchShape, Row, Span};
use std::sync::{Mutex, PoisonError};

/// Scores of one head that are worked on at a time: 512 KiB.
const SCORES: usize = 1 << 17;
/// Fewer query rows than this at a time would leave the products too thin.
const LEAST_ROWS: usize = 16;
/// More than this at a time would gain nothing.
const MOST_ROWS: usize = 96;
/// Score of a key that a row does not see: its exponential is 0, and it is still a number.
const HIDDEN: f32 = -1e38;

/// Where heads lie in the rows of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// First column.
    pub(crate) start: usize,
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
    fn query(&self, head: usize) -> usize {
        self.start + head * self.width
    }
    fn key(&self, head: usize) -> usize {
        let kv_head = (self.first_head + head) / self.group - self.first_kv_head;
        self.start + (self.heads + kv_head) * self.width
    }
    fn value(&self, head: usize) -> usize {
        self.key(head) + self.kv_heads * self.width
    }
}

/// Query rows of one segment that are worked on together. All rows count in the batch.
#[derive(Clone, Copy, Debug)]
struct Task {
    rows: Span<Row>,
    /// The rows that the last of them sees.
    seen: Span<Row>,
}

/// Memory that attention reuses.
pub(crate) struct Scratch {
    tasks: Vec<Task>,
    scores: Vec<Mutex<Vec<f32>>>,
}

impl Scratch {
    pub(crate) fn new(threads: &Threads) -> Self {
        Self { tasks: Vec::new(), scores: (0..threads.count()).map(|_| Mutex::default()).collect() }
    }
}

/// What attention reads.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// Queries, keys and values of the rows from `first` on.
    pub(crate) qkv: Area<'a>,
    /// Row of the batch that is row 0 of `qkv`.
    pub(crate) first: u32,
    pub(crate) layout: Layout,
    pub(crate) causal: bool,
}

impl Sources<'_> {
    fn part(&self, rows: Span<Row>, column: usize) -> Area<'_> {
        let row = (rows.start() - self.first) as usize;
        self.qkv.part(row, rows.len() as usize, column, self.layout.width)
    }
}

/// The rows that `rows` of the batch see, for each segment among them: (own rows, seen rows).
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

/// `context = softmax(queries x keys' / sqrt(width)) x values` for the query rows `rows`.
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
    let Scratch { tasks, scores } = scratch;
    tasks.clear();
    let share = (rows.len() as usize).div_ceil(threads.count());
    for (own, segment) in seen(shape, rows, sources.causal) {
        let keys = segment.len() as usize;
        let height = (SCORES / keys).clamp(LEAST_ROWS, MOST_ROWS).min(share).max(1);
        let mut at = own.start();
        while at < own.end() {
            let end = own.end().min(at.saturating_add(height as u32));
            let last = if sources.causal { end } else { segment.end() };
            tasks.push(Task { rows: Span::new(at, end), seen: Span::new(segment.start(), last) });
            at = end;
        }
    }
    let run = |task: &Task, context: AreaMut<'_>| {
        let scores = &scores[threads.index()];
        let mut scores = scores.lock().unwrap_or_else(PoisonError::into_inner);
        run(&sources, *task, &mut scores, context);
    };
    spread(tasks, context, false, &run);
}

/// Tasks stand in row order and cover the context, so cutting both at one row keeps them apart.
fn spread(
    tasks: &[Task],
    context: AreaMut<'_>,
    share: bool,
    run: &(impl Fn(&Task, AreaMut<'_>) + Sync),
) {
    match tasks {
        [] => {}
        [task] => run(task, context),
        _ => {
            let (head, tail) = tasks.split_at(tasks.len() / 2);
            let rows = tail[0].rows.start() - head[0].rows.start();
            let (above, below) = context.cut(rows as usize);
            if share {
                rayon::join(|| spread(head, above, true, run), || spread(tail, below, true, run));
            } else {
                spread(head, above, false, run);
                spread(tail, below, false, run);
            }
        }
    }
}

fn run(sources: &Sources<'_>, task: Task, scores: &mut Vec<f32>, context: AreaMut<'_>) {
    if task.rows.len() == 1 {
        run_single(sources, task, scores, context);
    } else {
        run_many(sources, task, scores, context);
    }
}

/// One query row: its products are of a matrix and a vector.
fn run_single(sources: &Sources<'_>, task: Task, scores: &mut Vec<f32>, mut context: AreaMut<'_>) {
    let layout = sources.layout;
    let keys = task.seen.len() as usize;
    let scale = 1.0 / (layout.width as f32).sqrt();
    grow(scores, keys);
    let extent = Extent { start: 0, rows: 1, columns: keys, stride: keys };
    for head in 0..layout.heads {
        let queries = sources.part(task.rows, layout.query(head));
        let keys_seen = Right::Transposed(sources.part(task.seen, layout.key(head)));
        let values_seen = Right::Plain(sources.part(task.seen, layout.value(head)));
        let mut area = AreaMut::new(scores, extent).expect("it has grown to that");
        multiply(queries, keys_seen, scale, &mut area, false, gemm::Parallelism::None);
        vector::softmax(area.row(0));
        let weights = Area::new(scores, extent).expect("it has grown to that");
        let mut out = context.part(0, 1, head * layout.width, layout.width);
        multiply(weights, values_seen, 1.0, &mut out, false, gemm::Parallelism::None);
    }
}

/// Several query rows. Their scores stand in columns, a row for each key: so the product packs the
/// few queries and reads the many keys where they are. The other way round it would pack the keys
/// of every head again for every operation, which costs as much as the product where rows are few.
fn run_many(sources: &Sources<'_>, task: Task, scores: &mut Vec<f32>, mut context: AreaMut<'_>) {
    let layout = sources.layout;
    let (rows, keys) = (task.rows.len() as usize, task.seen.len() as usize);
    let scale = 1.0 / (layout.width as f32).sqrt();
    let stride = rows.next_multiple_of(LANES);
    grow(scores, (keys + 1) * stride);
    let (sums, scores) = scores[..(keys + 1) * stride].split_at_mut(stride);
    let extent = Extent { start: 0, rows: keys, columns: rows, stride };
    // Keys before it are seen by all rows.
    let common = match sources.causal {
        true => (task.rows.start() - task.seen.start()) as usize + 1,
        false => keys,
    };
    for head in 0..layout.heads {
        let queries = Right::Transposed(sources.part(task.rows, layout.query(head)));
        let keys_seen = sources.part(task.seen, layout.key(head));
        let values_seen = Right::Plain(sources.part(task.seen, layout.value(head)));
        let mut area = AreaMut::new(scores, extent).expect("it has grown to that");
        multiply(keys_seen, queries, scale, &mut area, false, gemm::Parallelism::None);
        for key in common..keys {
            area.row(key)[..key + 1 - common].fill(HIDDEN);
        }
        vector::exp_columns(scores, stride, sums);
        let weights = Area::new(scores, extent).expect("it has grown to that");
        let mut out = context.part(0, rows, head * layout.width, layout.width);
        multiply_transposed(weights, values_seen, &mut out, gemm::Parallelism::None);
        for (row, sum) in sums[..rows].iter().enumerate() {
            vector::scale(out.row(row), 1.0 / sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};
    use galaxy_common::{Segment, Wanted};

    fn reference(
        qkv: &[f32],
        layout: Layout,
        causal: bool,
        shape: &BatchShape,
        rows: Span<Row>,
    ) -> Vec<f64> {
        let stride = layout.start + (layout.heads + 2 * layout.kv_heads) * layout.width;
        let at = |row: u32, column: usize| f64::from(qkv[row as usize * stride + column]);
        let mut out = Vec::new();
        for row in rows.iter() {
            let (segment, _) = shape.placed().find(|(s, _)| s.has(row)).expect("in the batch");
            let end = if causal { row + 1 } else { segment.end() };
            for head in 0..layout.heads {
                let kv = (layout.first_head + head) / layout.group - layout.first_kv_head;
                let key = layout.start + (layout.heads + kv) * layout.width;
                let value = key + layout.kv_heads * layout.width;
                let query = layout.start + head * layout.width;
                let score = |other: u32| -> f64 {
                    let dot: f64 =
                        (0..layout.width).map(|i| at(row, query + i) * at(other, key + i)).sum();
                    dot / (layout.width as f64).sqrt()
                };
                let scores: Vec<f64> = (segment.start()..end).map(|o| score(o).exp()).collect();
                let sum: f64 = scores.iter().sum();
                for i in 0..layout.width {
                    let seen = (segment.start()..end).zip(&scores);
                    out.push(seen.map(|(o, s)| s / sum * at(o, value + i)).sum());
                }
            }
        }
        out
    }

    #[test]
    fn attention_matches_f64() {
        let mut random = Random::default();
        let segments = [1, 7, 2, 130, 33].into_iter().zip(0..);
        let segment = |(rows, slot)| Segment { slot, past: 0, rows, wanted: Wanted::Hidden };
        let shape = BatchShape::new(segments.map(segment).collect()).expect("a batch");
        let layouts = [
            // All heads of a model without groups.
            Layout {
                start: 0,
                heads: 3,
                first_head: 0,
                kv_heads: 3,
                first_kv_head: 0,
                group: 1,
                width: 7,
            },
            // Heads 3 to 7 of a model where three share one: parts of key-value heads 1 and 2.
            Layout {
                start: 0,
                heads: 4,
                first_head: 3,
                kv_heads: 2,
                first_kv_head: 1,
                group: 3,
                width: 16,
            },
            Layout {
                start: 0,
                heads: 2,
                first_head: 5,
                kv_heads: 2,
                first_kv_head: 1,
                group: 3,
                width: 5,
            },
        ];
        for threads in [1, 2, 3] {
            let threads = Threads::new(threads);
            let mut scratch = Scratch::new(&threads);
            for layout in layouts {
                for causal in [false, true] {
                    let width = (layout.heads + 2 * layout.kv_heads) * layout.width;
                    let qkv = random.values(shape.rows() as usize * width);
                    let area = whole(&qkv, shape.rows() as usize, width);
                    let sources = Sources { qkv: area, first: 0, layout, causal };
                    for rows in [(0, 173), (0, 1), (5, 9), (60, 61), (100, 173)] {
                        let rows = Span::new(rows.0, rows.1);
                        let columns = layout.heads * layout.width;
                        let mut out = vec![f32::NAN; rows.len() as usize * columns];
                        let context = whole_mut(&mut out, rows.len() as usize, columns);
                        attend(&threads, &mut scratch, sources, &shape, rows, context);
                        let want = reference(&qkv, layout, causal, &shape, rows);
                        close(&format!("{layout:?} causal {causal} {rows}"), &out, &want);
                    }
                }
            }
        }
    }
}
