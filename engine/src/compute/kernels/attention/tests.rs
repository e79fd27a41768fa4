use super::{super::testing::*, *};
use galaxy_common::{Segment, Wanted};
use galaxy_graph::operators::{OperatorId, ValueId};

/// Attention of these heads, whose rows see so many rows before themselves and so many after.
fn of(layout: Layout, behind: Option<u32>, ahead: Option<u32>) -> Attention {
    Attention {
        input: ValueId(0),
        output: ValueId(1),
        projection: OperatorId(0),
        layer: 0,
        heads: layout.heads as u32,
        group: layout.group as u32,
        width: layout.width as u32,
        scale: 1.0 / (layout.width as f32).sqrt(),
        cap: None,
        window_before: behind,
        window_after: ahead,
        relative_bias: None,
    }
}

/// Attention of these heads, whose rows see all rows, or all before them where it is causal.
fn wide(layout: Layout, causal: bool) -> Attention {
    of(layout, None, causal.then_some(0))
}

/// Queries, keys and values of `qkv` from column `start` on.
fn sources<'a>(qkv: &'a [f32], start: usize, layout: Layout, of: &'a Attention) -> Sources<'a> {
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
        of,
        relative_bias: None,
        cache: None,
        layer: 0,
    }
}

/// Cached rows count as if they stood in the batch: the context is the same.
#[test]
fn attention_over_cached_rows_matches_f64() {
    use galaxy_common::{Cache, CacheType};
    let kv_heads = |layout: Layout| Span::first(layout.kv_heads as u32);
    for (layout, context_len, rows) in [
        (part(0, 4, 2, 16), 1, 1),
        (part(1, 3, 3, 20), 63, 1),
        (part(0, 2, 1, 64), 200, 3),
        (part(0, 8, 8, 24), 500, 9),
        (part(2, 4, 2, 128), 384, 70),
    ] {
        let columns = (layout.heads + 2 * layout.kv_heads) * layout.width;
        let keys = layout.heads * layout.width;
        let whole_text = batch(&[context_len + rows]);
        let qkv = Random::default().values((context_len + rows) as usize * columns);
        let own = Span::new(context_len, context_len + rows);
        for behind in [None, Some(0), Some(40), Some(context_len)] {
            let of = &Attention { cap: behind.map(|_| 1.5), ..of(layout, behind, Some(0)) };
            let want = reference(&qkv, 0, layout, of, &whole_text, own);
            let segment =
                Segment { slot: 5, context_len, cached: true, rows, wanted: Wanted::Hidden };
            let shape = BatchShape::new(vec![segment]).expect("a batch");
            for values in [CacheType::F32, CacheType::F16, CacheType::Q8] {
                let limit = Cache { rows: 4 * Cache::BLOCK, values };
                let heads = [Span::empty(), kv_heads(layout)];
                let mut cache = KvCache::new(limit, heads.into_iter(), layout.width as u32);
                let all = whole(&qkv, (context_len + rows) as usize, columns);
                let kept = all.part(0, context_len as usize, keys, columns - keys);
                assert!(cache.bind(5, context_len + rows, &[3, 1, 2, 0].into()).is_ok());
                assert!(cache.append(5, 1, 0, kept).is_ok());
                let here = all.part(context_len as usize, rows as usize, 0, columns);
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
                            of,
                            relative_bias: None,
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
                        let (all, lanes) = (u64::from(context_len + rows), layout.group as u64);
                        let width = layout.width as u64;
                        let said = galaxy_graph::budget::attention_scratch(all, lanes, width);
                        for room in &scratch.rooms {
                            let held = room.lock().expect("nobody panicked").bytes();
                            let said = said + 4 * 144 * (width + 15);
                            assert!(held <= said, "{layout:?} {all}: {held}, {said} were said");
                        }
                        let error = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs();
                        let worst = out.iter().zip(&want).map(error).fold(0.0, f64::max);
                        let most = match values {
                            CacheType::F32 => 1e-5,
                            CacheType::F16 => 2e-3,
                            CacheType::Q8 => 2e-2,
                        };
                        assert!(
                            worst < most,
                            "{instructions} {layout:?} {context_len} {values}: {worst}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn attention_rows_are_bit_identical_whatever_else_is_in_the_batch() {
    use galaxy_common::{Cache, CacheType};
    const ROWS: u32 = 230;
    let runs = [(0, 230), (0, 100), (3, 1), (90, 20), (185, 20), (191, 2), (192, 33), (229, 1)];
    for (layout, values, behind) in [
        (part(0, 4, 2, 16), CacheType::F32, None),
        (part(1, 3, 3, 20), CacheType::F16, None),
        (part(0, 2, 1, 64), CacheType::F32, None),
        (part(0, 8, 8, 64), CacheType::F16, None),
        (part(0, 3, 1, 200), CacheType::F32, None),
        (part(1, 3, 3, 20), CacheType::Q8, None),
        (part(0, 8, 2, 64), CacheType::Q8, None),
        (part(0, 3, 1, 200), CacheType::Q8, Some(50)),
        (part(0, 4, 2, 16), CacheType::F32, Some(30)),
        (part(0, 8, 8, 64), CacheType::F16, Some(100)),
        (part(0, 2, 1, 64), CacheType::F32, Some(0)),
    ] {
        let of = &Attention { cap: behind.map(|_| 3.0), ..of(layout, behind, Some(0)) };
        let queries = layout.heads * layout.width;
        let columns = queries + 2 * layout.kv_heads * layout.width;
        let qkv = Random::default().values(ROWS as usize * columns);
        let all = whole(&qkv, ROWS as usize, columns);
        let kv_heads = [Span::first(layout.kv_heads as u32)];
        let limit = Cache { rows: 2 * Cache::BLOCK, values };
        let mut cache = KvCache::new(limit, kv_heads.into_iter(), layout.width as u32);
        assert!(cache.bind(1, ROWS, &[1, 0].into()).is_ok());
        let keys = all.part(0, ROWS as usize, queries, columns - queries);
        assert!(cache.append(1, 0, 0, keys).is_ok());
        for instructions in Instructions::all() {
            let run = |context_len: u32, rows: u32, beside: u32, count: u16| {
                let text =
                    Segment { slot: 1, context_len, cached: true, rows, wanted: Wanted::Hidden };
                let other = Segment { slot: 2, context_len: 0, cached: false, ..text };
                let other = (beside > 0).then_some(Segment { rows: beside, ..other });
                let segments = [text].into_iter().chain(other).collect();
                let shape = BatchShape::new(segments).expect("a batch");
                let height = (rows + beside) as usize;
                let here = all.part(context_len as usize, height, 0, columns);
                let threads = Threads::new(count);
                let sources = Sources {
                    queries: here.part(0, height, 0, queries),
                    keys: here.part(0, height, queries, columns - queries),
                    cache: Some(&cache),
                    ..sources(&qkv, 0, layout, of)
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
            for (context_len, rows) in runs {
                for (beside, count) in [(0, 1), (0, 2), (1, 1), (17, 2)] {
                    if beside > 0 && context_len + rows + beside > ROWS {
                        continue;
                    }
                    let got = run(context_len, rows, beside, count);
                    let want = &want[context_len as usize * queries..][..got.len()];
                    let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                    let unlike = got.iter().zip(want).position(|pair| !equal(pair));
                    let what = format!("{instructions} {layout:?} {context_len}+{rows}|{beside}");
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
    of: &Attention,
    shape: &BatchShape,
    rows: Span<Row>,
) -> Vec<f64> {
    let stride = start + (layout.heads + 2 * layout.kv_heads) * layout.width;
    let at = |row: u32, column: usize| f64::from(qkv[row as usize * stride + column]);
    let mut out = Vec::new();
    for row in rows.iter() {
        let (segment, _) = shape.placed().find(|(s, _)| s.has(row)).expect("in the batch");
        let end = of.window_after.map_or(segment.end(), |rows| segment.end().min(row + 1 + rows));
        let from = of.window_before.map_or(0, |rows| row.saturating_sub(rows)).max(segment.start());
        for head in 0..layout.heads {
            let kv = (layout.first_head + head) / layout.group - layout.first_kv_head;
            let key = start + (layout.heads + kv) * layout.width;
            let value = key + layout.kv_heads * layout.width;
            let query = start + head * layout.width;
            let score = |other: u32| -> f64 {
                let dot: f64 =
                    (0..layout.width).map(|i| at(row, query + i) * at(other, key + i)).sum();
                let score = dot / (layout.width as f64).sqrt();
                of.cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let scores: Vec<f64> = (from..end).map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let scores: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = scores.iter().sum();
            for i in 0..layout.width {
                let seen = (from..end).zip(&scores);
                out.push(seen.map(|(o, s)| s / sum * at(o, value + i)).sum());
            }
        }
    }
    out
}

fn batch(rows: &[u32]) -> BatchShape {
    let segments = rows.iter().zip(0..);
    let segment = |(&rows, slot)| Segment {
        slot,
        context_len: 0,
        cached: false,
        rows,
        wanted: Wanted::Hidden,
    };
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

fn check_from(start: usize, layout: Layout, shape: &BatchShape, size: f32, some: &[(u32, u32)]) {
    let columns = start + (layout.heads + 2 * layout.kv_heads) * layout.width;
    let mut qkv = Random::default().values(shape.rows() as usize * columns);
    qkv.iter_mut().for_each(|value| *value *= size);
    let qkv = qkv.as_slice();
    let masks = [(None, None), (None, Some(0)), (Some(37), Some(0)), (Some(9), Some(12))];
    for ((behind, ahead), &(first, end)) in
        masks.into_iter().flat_map(|mask| some.iter().map(move |some| (mask, some)))
    {
        let of = of(layout, behind, ahead);
        let rows = Span::new(first, end);
        let want = reference(qkv, start, layout, &of, shape, rows);
        let sets = Instructions::all().flat_map(|set| [1, 2, 3].map(|count| (set, count)));
        for (instructions, count) in sets {
            let threads = Threads::new(count);
            let mut scratch = Scratch::new(&threads);
            let sources = sources(qkv, start, layout, &of);
            let width = layout.heads * layout.width;
            let mut out = vec![f32::NAN; rows.len() as usize * width];
            let context = whole_mut(&mut out, rows.len() as usize, width);
            attend_by(instructions, &threads, &mut scratch, sources, shape, rows, context);
            let what = format!("{instructions} {layout:?} {behind:?} {ahead:?} {rows} x{count}");
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
    for layout in [part(0, 2, 1, 64), part(0, 8, 8, 32), part(2, 3, 4, 80), part(1, 1, 1, 128)] {
        check(layout, &shape, 1.0, &some);
    }
    // Wide enough for one vector of lanes at a time.
    check(part(0, 1, 1, WIDE + 3), &batch(&[20]), 1.0, &[(0, 20)]);
}

#[test]
fn rows_4_kib_apart_in_memory_match_f64() {
    // 1024 columns in all: rows are 4 KiB apart.
    let layout = part(0, 4, 1, 64);
    check_from(256, layout, &batch(&[150]), 1.0, &[(0, 150), (40, 58), (149, 150)]);
}

#[test]
fn keys_in_another_buffer_from_another_first_row_match_f64() {
    let (shape, layout) = (batch(&[9, 40, 3]), part(0, 4, 2, 8));
    let qkv = Random::default().values(52 * 64);
    let threads = Threads::new(2);
    for (own, seen, (behind, ahead)) in [
        ((20, 31), (9, 49), (None, None)),
        ((30, 52), (9, 52), (None, Some(0))),
        // Not from the first row of the text on, and to its end in neither.
        ((30, 41), (25, 41), (Some(5), Some(0))),
        ((20, 31), (17, 38), (Some(3), Some(7))),
    ] {
        let of = &of(layout, behind, ahead);
        let rows: Span<Row> = Span::new(own.0, own.1);
        let count = (seen.1 - seen.0) as usize;
        let joint = sources(&qkv, 0, layout, of);
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
        close("keys elsewhere", &out, &reference(&qkv, 0, layout, of, &shape, rows));
    }
}

#[test]
fn every_sequence_length_matches_f64() {
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
fn a_row_that_sees_one_key_equals_the_value_of_that_key() {
    let layout = part(0, 1, 1, 4);
    let qkv: Vec<f32> = Random::default().values(40 * 12);
    for instructions in Instructions::all() {
        let threads = Threads::new(1);
        let mut out = vec![f32::NAN; 40 * 4];
        let of = wide(layout, true);
        let sources = sources(&qkv, 0, layout, &of);
        let context = whole_mut(&mut out, 40, 4);
        let mut scratch = Scratch::new(&threads);
        let (shape, rows) = (batch(&[40]), Span::new(0, 40));
        attend_by(instructions, &threads, &mut scratch, sources, &shape, rows, context);
        let want: Vec<f64> = qkv[8..12].iter().map(|v| f64::from(*v)).collect();
        close(&instructions.to_string(), &out[..4], &want);
    }
}

#[test]
fn nan_in_a_query_or_key_reaches_the_output() {
    let (rows, layout) = (160, part(0, 1, 1, 16));
    for instructions in Instructions::all().filter(|i| *i != Instructions::Portable) {
        // In a key of the first block, of the last, and in a query.
        for (row, column) in [(3, 16 + 5), (159, 16 + 5), (7, 2)] {
            let mut qkv: Vec<f32> = Random::default().values(rows * 48);
            qkv[row * 48 + column] = f32::NAN;
            for (from, to) in [(0, 160), (7, 8)] {
                let threads = Threads::new(1);
                let mut out = vec![0.0; (to - from) * 16];
                let of = wide(layout, false);
                let sources = sources(&qkv, 0, layout, &of);
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
