//! Rounds: each runs everything of a section once, in turn.

use super::{Known, Options, Section, Wanted, quiet::quietly, sets};
use crate::record::{Record, Verdict};
use anyhow::Result;
use galaxy_common::{Spread, WeightFormat};
use galaxy_engine::{
    compute::kernels::instructions::{self, Instructions},
    measure::{self, Batch, Bench, OperationKind, Timed, Work},
};
use std::collections::BTreeMap;

/// The length of a measurement that counts, in milliseconds, after runs that do not count: one run of many
/// rows, or a hundred of one row.
const TURN: f64 = 20.0;
/// The most runs of a turn.
const MOST: usize = 100;

pub(super) fn measure(section: Section, options: &Options, record: &mut Record) -> Result<()> {
    match section {
        Section::Bounds => bounds(options, record),
        Section::Splits => splits(options, record),
        Section::Formats => formats(options, record),
        Section::Threads => threads(options, record),
    }
}

/// The work of each operation of a layer, and its time in milliseconds.
type Operations = Vec<(OperationKind, Work, f64)>;

/// A batch on some parts of a model, and the index of the layer whose turn is next.
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

    /// Runs layers of all parts. Returns the median time of each operation, in milliseconds, and the least
    /// share of the core that a part had.
    fn take(&mut self) -> Result<(Operations, f64)> {
        let (mut all, mut least) = (Vec::new(), f64::INFINITY);
        for bench in &mut self.benches {
            let batch = bench.batch(self.rows, self.tiles)?;
            bench.enter(&batch)?;
            let (found, share) = quietly(|| layers(bench, &batch, &mut self.next))?;
            all.extend(found);
            least = least.min(share);
        }
        Ok((all, least))
    }

    /// The sum of the times by [`Turn::take`] of the operations that `pick` picks, and the share of the core.
    fn sum(&mut self, pick: impl Fn(OperationKind) -> bool) -> Result<[(&'static str, f64); 2]> {
        let (all, share) = self.take()?;
        let of = all.iter().filter(|(part, ..)| pick(*part));
        Ok([("ms", of.map(|(_, _, ms)| ms).sum()), ("cpu", share)])
    }
}

/// The median time of each operation of a layer, in milliseconds. Layers run in turn; one before them warms
/// up.
fn layers(bench: &mut Bench, batch: &Batch, next: &mut u32) -> Result<Operations> {
    let mut timed: Vec<Timed> = Vec::new();
    let warm = bench.layer(batch, *next, &mut timed)?.as_secs_f64() * 1e3;
    let mut all: Vec<(OperationKind, Work, Vec<f64>)> =
        timed.iter().map(|t| (t.part, t.work, Vec::new())).collect();
    let runs = (TURN / warm.max(1e-3)).ceil().clamp(1.0, MOST as f64) as usize;
    for _ in 0..runs {
        *next = next.wrapping_add(1);
        timed.clear();
        bench.layer(batch, *next, &mut timed)?;
        // Every layer has the same operations in the same order.
        for ((.., times), timed) in all.iter_mut().zip(&timed) {
            times.push(timed.time.as_secs_f64() * 1e3);
        }
    }
    *next = next.wrapping_add(1);
    Ok(all.into_iter().map(|(part, work, ms)| (part, work, Spread::of(&ms).median)).collect())
}

fn add(record: &mut Record, key: &str, labels: &[(&str, &str)], values: &[(&str, f64)]) {
    let values: BTreeMap<String, f64> = values.iter().map(|&(n, v)| (n.to_owned(), v)).collect();
    record.cell(key, labels).add(values, Verdict::Valid);
}

/// Measures the products of BERT-Large, beside the least time that their arithmetic or weights take.
fn bounds(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Relu };
    let before = Instructions::current();
    let mut turns = Vec::new();
    for held in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::F16] {
        let turn = Turn::new(options, &Wanted::whole(known, held, 1), 0, 1)?;
        turns.push((held, held.name(), turn));
    }
    for _ in 0..options.rounds {
        for set in sets() {
            instructions::limit(set)?;
            let (peak, stream) = (measure::peak(set, 1).median, measure::stream(set, 1).median);
            let set = set.to_string();
            for (held, format, turn) in &mut turns {
                for rows in [1, 71, 284] {
                    // Formats matter where memory is the bound; many rows show the arithmetic.
                    if rows == 71 && *held != WeightFormat::F32 {
                        continue;
                    }
                    turn.rows = rows;
                    let (operations, cpu) = turn.take()?;
                    for (part, work, ms) in operations {
                        if !matches!(part, OperationKind::Product(_)) {
                            continue;
                        }
                        let shape = format!("{rows}x{}x{}", work.inputs, work.outputs);
                        let key = format!("bounds/{set}/{format}/{shape}");
                        let labels =
                            [("instructions", set.as_str()), ("format", format), ("shape", &shape)];
                        let values = [
                            ("ms", ms),
                            ("bound_ms", work.bound(peak, stream)),
                            ("gflops", work.operations / ms * 1e-6),
                            ("gigabytes", work.weights / ms * 1e-6),
                            ("peak", peak),
                            ("stream", stream),
                            ("cpu", cpu),
                        ];
                        add(record, &key, &labels, &values);
                    }
                }
            }
        }
    }
    Ok(instructions::limit(before)?)
}

/// Measures the products and attention of a layer: whole, by columns and heads, and by rows.
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
        let wanted = Wanted { shares, ..Wanted::whole(known, WeightFormat::F32, 1) };
        turns.push((name, Turn::new(options, &wanted, 0, tiles)?));
    }
    for _ in 0..options.rounds {
        for rows in [284, 71] {
            for (name, turn) in &mut turns {
                turn.rows = rows;
                let found = turn.sum(|part| {
                    !matches!(part, OperationKind::AttentionAddNorm | OperationKind::MlpAddNorm)
                })?;
                let label = rows.to_string();
                let labels = [("rows", label.as_str()), ("cut", *name)];
                add(record, &format!("splits/{rows}/{name}"), &labels, &found);
            }
        }
    }
    Ok(())
}

/// Measures a layer of Llama in each format: the bytes that are held, and the time.
fn formats(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Llama };
    let mut turns = Vec::new();
    for held in WeightFormat::FLOATS {
        let turn = Turn::new(options, &Wanted::whole(known, held, 1), 0, 1)?;
        turns.push((held.name(), turn));
    }
    for _ in 0..options.rounds {
        for rows in [1, 16, 284] {
            for (format, turn) in &mut turns {
                turn.rows = rows;
                let found = turn.sum(|_| true)?;
                let label = rows.to_string();
                let labels = [("rows", label.as_str()), ("format", *format)];
                let key = format!("formats/{rows}/{format}");
                add(record, &key, &labels, &found);
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

/// Measures a layer of BERT-Large on one and on two threads.
fn threads(options: &Options, record: &mut Record) -> Result<()> {
    let known = if options.smoke { Known::Small } else { Known::Bert };
    let mut turns = Vec::new();
    for threads in [1, 2] {
        let turn = Turn::new(options, &Wanted::whole(known, WeightFormat::F32, threads), 0, 1)?;
        turns.push((threads.to_string(), turn));
    }
    for _ in 0..options.rounds {
        for rows in [284, 71, 16, 1] {
            for (threads, turn) in &mut turns {
                turn.rows = rows;
                let found = turn.sum(|_| true)?;
                let label = rows.to_string();
                let labels = [("rows", label.as_str()), ("threads", threads.as_str())];
                add(record, &format!("threads/{rows}/{threads}"), &labels, &found);
            }
        }
    }
    Ok(())
}
