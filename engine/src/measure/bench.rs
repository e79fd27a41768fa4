//! Timing the operations of a program one by one, on one thread's clock.

use crate::{
    compute::{Binding, ComputeError, Engine, Inputs, Staged, choice::EngineError, cpu::CpuEngine},
    executor::RunError,
    weights::{Shard, WeightError},
};
use galaxy_common::{
    BatchShape, BlockAssignment, Bytes, Cache, DeviceName, Kernel, Plan, Row, ShapeError, Span,
    Strategy, Wanted, WeightFormat, WireType, plan::Phase,
};
use galaxy_graph::{
    LowerError, Program, lower,
    operators::{Operate, Operator, OperatorGraph, Sizes, Weight},
    program::{OpKind, Operation},
    share::{Member, PlanOptions, ShareError, plan},
};
use galaxy_model::{Formats, HeadSpec, ModelDir};
use std::{
    fmt,
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

/// Why nothing can be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The shares give no plan.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The plan or the rows give no program.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The rows are no batch.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// An operation failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// The engine cannot be used.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A program of the executor failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The executor has no thread.
    #[error("threads cannot be started: {0}")]
    Thread(#[from] std::io::Error),
    /// The listener to progress asked to stop.
    #[error("measuring was stopped")]
    Stopped,
    /// The device has no room for anything of the model.
    #[error(
        "measuring needs {needed} of memory, and {granter} allows {granted}: raise it, or take a smaller model"
    )]
    Room {
        /// The memory for the least that can be measured, with what the process holds anyway.
        needed: Bytes,
        /// The memory that may be used.
        granted: Bytes,
        /// What limits the memory, for people.
        granter: &'static str,
    },
    /// There are more rows than the model has positions.
    #[error("{rows} rows are more than the {limit} positions of the model")]
    Rows {
        /// The rows that were asked for.
        rows: u32,
        /// The positions of the model.
        limit: u32,
    },
    /// There is no such part.
    #[error("there is no part {part} of {parts}")]
    Part {
        /// The part that was asked for, from 0.
        part: usize,
        /// The number of parts that the model is cut into.
        parts: usize,
    },
}

/// The part of a model that is held.
#[derive(Clone, Debug)]
pub struct ModelPart {
    /// The number of layers, from the first on. Several, because weights are to come from memory:
    /// together they should be larger than the last-level cache.
    pub layers: u32,
    /// The relative shares by which heads and columns are cut into parts; one share for the whole.
    pub shares: Vec<f64>,
    /// The number of the part that is held, from 0.
    pub part: usize,
    /// The number of kernel threads.
    pub threads: u16,
}

impl ModelPart {
    /// A cut of the first `layers` layers, each whole.
    pub fn whole(layers: u32, threads: u16) -> Self {
        Self { layers, shares: vec![1.0], part: 0, threads }
    }
}

/// The kind of an operation, whatever its layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum OperationKind {
    /// A product, by its place in a layer.
    Product(Kernel),
    /// Attention, without the products before and after it.
    Attention,
    /// Residual, bias and norm after attention.
    AttentionAddNorm,
    /// Residual, bias and norm after the MLP.
    MlpAddNorm,
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Product(Kernel::Qkv) => "qkv",
            Self::Product(Kernel::AttentionOutput) => "attention output",
            Self::Product(Kernel::Up) => "up",
            Self::Product(Kernel::Down) => "down",
            Self::Product(_) => "language head",
            Self::Attention => "attention",
            Self::AttentionAddNorm => "add and norm after attention",
            Self::MlpAddNorm => "add and norm after mlp",
        })
    }
}

/// What an operation has to do, however it does it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Work {
    /// The number of rows.
    pub rows: u32,
    /// The width of the rows that a product reads; for attention, of all its heads.
    pub inputs: u32,
    /// The columns of a product's matrix, gate and up both; for attention, of all its heads.
    pub outputs: u32,
    /// Multiplications and additions of products and attention; of row operations 0.
    pub operations: f64,
    /// Bytes of its weights.
    pub weights: f64,
}

impl Work {
    /// The least time that it can take on a device of such limits.
    ///
    /// # Units
    /// `peak` in GFLOP/s, `stream` in GB/s; the result in milliseconds.
    pub fn bound(&self, peak: f64, stream: f64) -> f64 {
        (self.operations / peak).max(self.weights / stream) * 1e-6
    }
}

/// An operation that has run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timed {
    /// The kind of the operation.
    pub part: OperationKind,
    /// The work that it had to do.
    pub work: Work,
    /// The time that it took.
    pub time: Duration,
}

/// A program of some rows, with its operations sorted by what is measured apart.
pub struct Batch {
    program: Program,
    binding: Binding,
    first: Vec<Operation>,
    layers: Vec<Vec<(OperationKind, Work, Operation)>>,
    head: Vec<(Option<(OperationKind, Work)>, Operation)>,
}

/// A part of a model in memory, and the engine that multiplies with it.
pub struct Bench {
    engine: CpuEngine,
    dir: Arc<ModelDir>,
    plan: Plan,
    part: usize,
    layers: u32,
}

impl Bench {
    /// Loads the part of a model that `cut` describes.
    ///
    /// # Errors
    /// When there is no such part, or its weights cannot be loaded.
    pub fn open(dir: Arc<ModelDir>, cut: &ModelPart) -> Result<Self, MeasureError> {
        let (spec, formats) = (dir.spec(), dir.formats());
        let parts = cut.shares.len();
        let members = cut.shares.iter().enumerate().map(|(at, &share)| Member {
            name: DeviceName::new(format!("part-{at}")).expect("letters, a dash and digits"),
            budget: Bytes(u64::MAX),
            threads: cut.threads,
            share,
        });
        let terms = PlanOptions {
            model: dir.name(),
            fingerprint: dir.fingerprint(),
            formats,
            strategy: if parts == 1 { Strategy::Local } else { Strategy::Megatron },
            wire: WireType::F32,
            tiles: 1,
            max_rows: spec.position_limit().min(galaxy_common::shape::MAX_ROWS),
            cache: Cache::NONE,
        };
        let plan = plan(spec, &terms, &members.collect::<Vec<_>>())?;
        let missing = MeasureError::Part { part: cut.part, parts };
        let mut held = plan.ring.get(cut.part).ok_or(missing)?.clone();
        let layers = cut.layers.clamp(1, spec.layers);
        let whole = held.prefill.block(0);
        // The program is the whole model's; layers that never run need no weights.
        let block = BlockAssignment { layers: Span::first(layers), ..whole };
        held.prefill.blocks = vec![block];
        held.decode.blocks = vec![block];
        let shard = Shard::load(dir.clone(), &held, &mut |_, _| ControlFlow::Continue(()))?;
        let engine = CpuEngine::new(shard, cut.threads);
        Ok(Self { engine, dir, plan, part: cut.part, layers })
    }

    /// The number of layers that are held.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The directory of the model.
    pub fn model(&self) -> &Arc<ModelDir> {
        &self.dir
    }

    /// Bytes of weights as they are held.
    pub fn weights(&self) -> Bytes {
        self.engine.held().0
    }

    /// The program of one sequence of `rows` tokens, with the rows of products and of attention's
    /// queries cut into `tiles`.
    ///
    /// # Errors
    /// When there are no rows, or more than the model has positions.
    pub fn batch(&self, rows: u32, tiles: u32) -> Result<Batch, MeasureError> {
        let spec = self.dir.spec();
        let limit = spec.position_limit();
        if rows > limit {
            return Err(MeasureError::Rows { rows, limit });
        }
        let wanted = match spec.head {
            HeadSpec::Language { .. } => Wanted::LastLogits,
            HeadSpec::None | HeadSpec::Classes(_) => Wanted::Hidden,
        };
        let shape = BatchShape::single(rows, wanted)?;
        let programs = lower(spec, self.dir.formats(), &self.plan, Phase::Prefill, &shape)?;
        let lost = MeasureError::Part { part: self.part, parts: self.plan.ring.len() };
        let program = programs.into_iter().nth(self.part).ok_or(lost)?;
        let graph = OperatorGraph::of(spec);
        let describe = Describe { graph: &graph, formats: self.dir.formats(), rows };
        let mut batch = Batch {
            binding: Binding::new(shape, Inputs::any(spec, rows, 0)),
            first: Vec::new(),
            layers: (0..self.layers).map(|_| Vec::new()).collect(),
            head: Vec::new(),
            program,
        };
        for operation in &batch.program.operations {
            let layer = match operation.kind {
                OpKind::Embed(_) | OpKind::Rows(_) => {
                    batch.first.push(operation.clone());
                    continue;
                }
                OpKind::Select | OpKind::Product { kernel: Kernel::Language, .. } => {
                    let what = describe.operation(operation);
                    batch.head.push((what, operation.clone()));
                    continue;
                }
                OpKind::Product { .. } | OpKind::Attend { .. } | OpKind::AddNorm { .. } => {
                    operation.layer
                }
                // What travels or is handed over is no kernel's work.
                _ => continue,
            };
            let Some(list) = batch.layers.get_mut(layer as usize) else { continue };
            for operation in tiled(operation, tiles) {
                if let Some((part, work)) = describe.operation(&operation) {
                    list.push((part, work, operation));
                }
            }
        }
        Ok(batch)
    }

    /// Makes room for a batch and embeds its rows: before its layers run, and again before the
    /// layers of another batch do.
    ///
    /// # Errors
    /// When there is no room, or an operation fails.
    pub fn enter(&mut self, batch: &Batch) -> Result<(), MeasureError> {
        self.engine.prepare(&batch.program.slots)?;
        for operation in &batch.first {
            run(&mut self.engine, batch, operation)?;
        }
        Ok(())
    }

    /// Runs one of the layers that are held, counted from 0 and beginning anew after the last.
    /// Adds to `timed` what each operation took, and returns what all took together.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn layer(
        &mut self,
        batch: &Batch,
        layer: u32,
        timed: &mut Vec<Timed>,
    ) -> Result<Duration, MeasureError> {
        let operations = &batch.layers[(layer % self.layers) as usize];
        let begin = Instant::now();
        let mut last = begin;
        for (part, work, operation) in operations {
            run(&mut self.engine, batch, operation)?;
            let now = Instant::now();
            timed.push(Timed { part: *part, work: *work, time: now - last });
            last = now;
        }
        Ok(last - begin)
    }

    /// Runs the language head on the last row. Adds what its product took to `timed`; nothing
    /// where the model has no such head.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn head(&mut self, batch: &Batch, timed: &mut Vec<Timed>) -> Result<(), MeasureError> {
        for (what, operation) in &batch.head {
            let begin = Instant::now();
            run(&mut self.engine, batch, operation)?;
            if let Some((part, work)) = *what {
                timed.push(Timed { part, work, time: begin.elapsed() });
            }
        }
        Ok(())
    }
}

fn run(engine: &mut CpuEngine, batch: &Batch, operation: &Operation) -> Result<(), MeasureError> {
    let staged = Staged::default();
    Ok(engine.run(&batch.program, operation, &batch.binding, staged)?)
}

/// An operation cut by rows, as the tiles of a transfer cut it. Joins stay whole: the owner of
/// rows joins its own, however they arrive.
fn tiled(operation: &Operation, tiles: u32) -> Vec<Operation> {
    let cuts = matches!(operation.kind, OpKind::Product { .. } | OpKind::Attend { .. });
    let (Some(from), Some(to)) = (operation.reads.first(), operation.writes.first()) else {
        return vec![operation.clone()];
    };
    if !cuts || tiles <= 1 {
        return vec![operation.clone()];
    }
    from.rows
        .cut(tiles)
        .zip(to.rows.cut(tiles))
        .filter(|(from, _)| !from.is_empty())
        .map(|(from, to)| {
            let mut tile = operation.clone();
            tile.reads[0].rows = from;
            tile.writes[0].rows = to;
            tile
        })
        .collect()
}

struct Describe<'a> {
    graph: &'a OperatorGraph,
    /// The formats of the weights.
    formats: &'a Formats,
    /// The number of rows of the batch.
    rows: u32,
}

impl Describe<'_> {
    /// The format of the first matrix of an operator.
    fn format(&self, operator: &Operator) -> WeightFormat {
        let first =
            operator.operate().weights().first().map(|id| self.graph.weights[id.0 as usize]);
        match first {
            Some(Weight::Matrix(matrix)) => self.formats.held(matrix),
            _ => WeightFormat::F32,
        }
    }

    fn operation(&self, operation: &Operation) -> Option<(OperationKind, Work)> {
        let (from, to) = (operation.reads.first()?, operation.writes.first()?);
        let (id, part) = match operation.kind {
            OpKind::Product { operator, kernel, .. } => (operator, OperationKind::Product(kernel)),
            OpKind::Attend { operator, .. } => (operator, OperationKind::Attention),
            OpKind::AddNorm { add, .. } => {
                let of = self.graph.layers.get(operation.layer as usize)?;
                let mlp = of.after_mlp.add == add;
                (add, if mlp { OperationKind::MlpAddNorm } else { OperationKind::AttentionAddNorm })
            }
            _ => return None,
        };
        let operator = self.graph.get(id)?;
        let (rows, outputs) = (to.rows.len(), to.columns.len());
        let text = Span::<Row>::first(self.rows);
        let pairs = match operator {
            Operator::Attention(attention) => {
                let reach = attention.reach(1);
                let seen = |row| reach.of(Span::new(row, row + 1), text, text).len();
                to.rows.iter().map(|row| f64::from(seen(row))).sum()
            }
            _ => 0.0,
        };
        let inputs = from.columns.len();
        let work = operator.operate().work(Sizes { rows, inputs, outputs, pairs });
        // A matrix has columns of gate and up both.
        let outputs = if work.weights.1 > 0 { work.weights.1 as u32 } else { outputs };
        let weights = self.format(operator).bytes(work.weights.0, work.weights.1) as f64;
        Some((part, Work { rows, inputs, outputs, operations: work.operations, weights }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::Path;

    fn golden(name: &str) -> Arc<ModelDir> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name);
        Arc::new(ModelDir::open(&path).unwrap())
    }

    /// Everything that a layer does is timed once, whatever the cut.
    #[test]
    fn timed_parts_and_tiles_have_all_operations_of_the_layer() {
        for name in ["bert", "llama", "gpt2"] {
            let dir = golden(name);
            let run = |shares: &[f64], part, tiles| {
                let cut = ModelPart { layers: 2, shares: shares.to_vec(), part, threads: 1 };
                let mut bench = Bench::open(dir.clone(), &cut).unwrap();
                assert_eq!(bench.layers(), 2);
                let batch = bench.batch(9, tiles).unwrap();
                let mut timed = Vec::new();
                for layer in 0..3 {
                    bench.enter(&batch).unwrap();
                    timed.clear();
                    let total = bench.layer(&batch, layer, &mut timed).unwrap();
                    assert_eq!(total, timed.iter().map(|t| t.time).sum::<Duration>());
                }
                bench.head(&batch, &mut timed).unwrap();
                timed
            };
            let operations = |timed: &[Timed]| timed.iter().map(|t| t.work.operations).sum::<f64>();
            let whole = run(&[1.0], 0, 1);
            let language = OperationKind::Product(Kernel::Language);
            assert_eq!(whole.iter().any(|t| t.part == language), name != "bert", "{name}");
            assert_eq!(whole.iter().filter(|t| t.part != language).count(), 7, "{name}");
            let tiles = run(&[1.0], 0, 4);
            assert_eq!(operations(&whole), operations(&tiles), "{name}");
            let parts: Vec<Timed> = (0..2).flat_map(|part| run(&[3.0, 2.0], part, 1)).collect();
            // Key-value heads that both parts use are computed by both.
            assert!(operations(&parts) >= operations(&whole) - 0.5, "{name}");
            if name == "bert" {
                assert_eq!(operations(&parts), operations(&whole));
            }
        }
    }

    #[test]
    fn a_batch_or_part_that_cannot_be_measured_is_an_error() {
        let dir = golden("bert");
        let bench = Bench::open(dir.clone(), &ModelPart::whole(1, 1)).unwrap();
        assert!(matches!(bench.batch(1 << 20, 1), Err(MeasureError::Rows { .. })));
        assert!(matches!(bench.batch(0, 1), Err(MeasureError::Shape(_))));
        let cut = ModelPart { part: 2, ..ModelPart::whole(1, 1) };
        assert!(matches!(Bench::open(dir, &cut), Err(MeasureError::Part { part: 2, parts: 1 })));
    }

    #[test]
    fn the_bound_is_the_larger_of_arithmetic_and_memory() {
        let work = Work { operations: 4e9, weights: 1e9, ..Work::default() };
        assert_eq!(work.bound(100.0, 10.0), 100.0);
        assert_eq!(work.bound(20.0, 10.0), 200.0);
    }
}
