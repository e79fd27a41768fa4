//! Rounds: everything of a section once, in turn, again and again.

use super::{Known, Options, Section, Wanted, format_of, sets};
use crate::record::{Record, Verdict};
use anyhow::{Context, Result};
use galaxy_engine::{
    compute::kernels::instructions::{self, Instructions},
    measure::{self, Batch, Bench, Part, Timed},
};
use galaxy_graph::program::Product;
use galaxy_model::Dtype;
use std::collections::BTreeMap;

/// Measurements of a round begin with runs that do not count, and count so long, in milliseconds:
/// one run of many rows, or a hundred of one row.
const TURN: f64 = 20.0;
/// Most runs of a turn.
const MOST: usize = 100;

pub(super) fn measure(section: Section, options: &Options, record: &mut Record) -> Result<()> {
    match section {
        Section::Bounds => bounds(options, record),
        Section::Splits => splits(options, record),
        Section::Formats => formats(options, record),
        Section::Threads => threads(options, record),
    }
}

/// A batch on some parts of a model, and the layer whose turn is next.
struct Turn {
    benches: Vec<Bench>,
    rows: u32,
    tiles: u32,
    next: u32,
}

impl Turn {
    fn new(options: &Options, wanted: &Wanted, rows: u32, tiles: u32) -> Result<Self> {
        Ok(Self { benches: wanted.open(&options.cache)?, rows, tiles, next: 0 })
    }

    /// The median of runs of what `pick` takes of a layer, all parts together, in milliseconds.
    fn take(&mut self, pick: impl Fn(Part) -> bool) -> Result<f64> {
        let mut sum = 0.0;
        for bench in &mut self.benches {
            let batch = bench.batch(self.rows, self.tiles)?;
            bench.enter(&batch)?;
            let once = |bench: &mut Bench, layer| -> Result<f64> {
                let mut timed = Vec::new();
                bench.layer(&batch, layer, &mut timed)?;
                let of = timed.iter().filter(|t| pick(t.part));
                Ok(of.map(|t| t.time.as_secs_f64() * 1e3).sum())
            };
            sum += repeat(bench, &mut self.next, once)?;
        }
        Ok(sum)
    }
}

/// The median of what `once` says of layers in turn; one before them warms up.
fn repeat(
    bench: &mut Bench,
    next: &mut u32,
    once: impl Fn(&mut Bench, u32) -> Result<f64>,
) -> Result<f64> {
    let mut all = Vec::new();
    let warm = once(bench, *next)?;
    let runs = (TURN / warm.max(1e-3)).ceil().clamp(1.0, MOST as f64) as usize;
    for _ in 0..runs {
        *next = next.wrapping_add(1);
        all.push(once(bench, *next)?);
    }
    *next = next.wrapping_add(1);
    Ok(galaxy_common::Spread::of(&all).median)
}

fn add(record: &mut Record, key: &str, labels: &[(&str, &str)], values: &[(&str, f64)]) {
    let values: BTreeMap<String, f64> = values.iter().map(|&(n, v)| (n.to_owned(), v)).collect();
    record.cell(key, labels).add(values, Verdict::Valid);
}

/// The products of BERT-Large, each alone, beside what its arithmetic or its weights take at least.
fn bounds(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Relu };
    let before = Instructions::current();
    let mut models = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        models.push((dtype, Wanted::whole(known, dtype, 1).open(&options.cache)?));
    }
    let mut next = 0;
    for _ in 0..options.rounds {
        for set in sets() {
            instructions::limit(set)?;
            let (peak, stream) = (measure::peak(set, 1).median, measure::stream(set, 1).median);
            for (dtype, benches) in &mut models {
                for rows in [1, 71, 284] {
                    // Formats matter where memory is the bound; many rows show the arithmetic.
                    if rows == 71 && *dtype != Dtype::F32 {
                        continue;
                    }
                    let bench = benches.first_mut().context("a whole model has one part")?;
                    let batch = bench.batch(rows, 1)?;
                    bench.enter(&batch)?;
                    bench.layer(&batch, next, &mut Vec::new())?;
                    for product in [Product::AttentionOutput, Product::Up, Product::Down] {
                        let part = Part::Product(product);
                        let (ms, timed) = alone(bench, &batch, &mut next, part)?;
                        let work = timed.work;
                        let shape = format!("{rows}x{}x{}", work.inputs, work.outputs);
                        let (set, format) = (set.to_string(), format_of(*dtype));
                        let labels =
                            [("instructions", set.as_str()), ("format", format), ("shape", &shape)];
                        let values = [
                            ("ms", ms),
                            ("bound_ms", work.bound(peak, stream)),
                            ("gflops", work.operations / ms * 1e-6),
                            ("gigabytes", work.weights / ms * 1e-6),
                            ("peak", peak),
                            ("stream", stream),
                        ];
                        add(record, &format!("bounds/{set}/{format}/{shape}"), &labels, &values);
                    }
                }
            }
        }
    }
    Ok(instructions::limit(before)?)
}

fn alone(bench: &mut Bench, batch: &Batch, next: &mut u32, part: Part) -> Result<(f64, Timed)> {
    let missing = || format!("a layer has no {part}");
    let what = bench.alone(batch, *next, part)?.with_context(missing)?;
    let once = |bench: &mut Bench, layer| {
        let timed = bench.alone(batch, layer, part)?.with_context(missing)?;
        Ok(timed.time.as_secs_f64() * 1e3)
    };
    Ok((repeat(bench, next, once)?, what))
}

/// Products and attention of a layer, whole, by columns and heads, and by rows.
fn splits(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Bert };
    let parts = |n: usize| vec![1.0; n];
    let cuts: [(&str, Vec<f64>, u32); 6] = [
        ("whole", parts(1), 1),
        ("2 parts", parts(2), 1),
        ("3 parts", parts(3), 1),
        ("5 parts", parts(5), 1),
        ("3 parts, 3:2:1", vec![3.0, 2.0, 1.0], 1),
        ("4 tiles", parts(1), 4),
    ];
    let mut turns = Vec::new();
    for (name, shares, tiles) in cuts {
        let wanted = Wanted { shares, ..Wanted::whole(known, Dtype::F32, 1) };
        turns.push((name, Turn::new(options, &wanted, 0, tiles)?));
    }
    for _ in 0..options.rounds {
        for rows in [284, 71] {
            for (name, turn) in &mut turns {
                turn.rows = rows;
                let ms = turn.take(|part| !matches!(part, Part::AttentionJoin | Part::MlpJoin))?;
                let label = rows.to_string();
                let labels = [("rows", label.as_str()), ("cut", *name)];
                add(record, &format!("splits/{rows}/{name}"), &labels, &[("ms", ms)]);
            }
        }
    }
    Ok(())
}

/// A layer of Llama in each format: what is held, and how fast it is.
fn formats(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Llama };
    let mut turns = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let turn = Turn::new(options, &Wanted::whole(known, dtype, 1), 0, 1)?;
        turns.push((format_of(dtype), turn));
    }
    for _ in 0..options.rounds {
        for rows in [1, 16, 284] {
            for (format, turn) in &mut turns {
                turn.rows = rows;
                let ms = turn.take(|_| true)?;
                let label = rows.to_string();
                let labels = [("rows", label.as_str()), ("format", *format)];
                let key = format!("formats/{rows}/{format}");
                add(record, &key, &labels, &[("ms", ms)]);
                let held: f64 = turn
                    .benches
                    .iter()
                    .map(|bench| bench.weights().0 as f64 / f64::from(bench.layers()))
                    .sum();
                record.cell(&key, &labels).facts.insert("bytes_per_layer".to_owned(), held);
            }
        }
    }
    Ok(())
}

/// A layer of BERT-Large on one and on two threads.
fn threads(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Bert };
    let mut turns = Vec::new();
    for threads in [1, 2] {
        let turn = Turn::new(options, &Wanted::whole(known, Dtype::F32, threads), 0, 1)?;
        turns.push((threads.to_string(), turn));
    }
    for _ in 0..options.rounds {
        for rows in [284, 71, 16, 1] {
            for (threads, turn) in &mut turns {
                turn.rows = rows;
                let ms = turn.take(|_| true)?;
                let label = rows.to_string();
                let labels = [("rows", label.as_str()), ("threads", threads.as_str())];
                add(record, &format!("threads/{rows}/{threads}"), &labels, &[("ms", ms)]);
            }
        }
    }
    Ok(())
}
