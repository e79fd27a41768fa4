//! The burn engine: operations of programs on burn's tensors, on whatever device burn has.
//!
//! It is the portable engine and the one for GPUs, and it is written to be plainly right, not fast:
//! one operation of a program is a handful of burn's, values stay on the device, and only `Export`
//! and `Emit` read them back. Weights are f32 there, whatever the checkpoint has: burn multiplies
//! tensors of one type, and widening a matrix for every product would cost more than it saves.

mod attention;
mod device;
mod rows;
mod slots;
mod weights;

use super::{
    Binding, ComputeError, Engine, Staged,
    call::{Attended, Call},
    choice::{BurnDevice, EngineChoice, EngineError},
    kernels::{
        area::{Area, AreaMut, Extent},
        rotary::{self, RowPosition},
        threads::Threads,
        wire::{self, Tile},
    },
    op_error::{NO_MATRIX, NO_OPERATOR, NOT_ITS_HEADS, NOT_ITS_TOKENS, OpError},
    sequences::{Sequences, sequences},
};
use crate::{sampler::Sequence, weights::Shard};
use ::burn::{Device, Int, Tensor, TensorData};
use attention::Sources;
use galaxy_common::{Bytes, Cache, Head, Share, Span, Token};
use galaxy_graph::{
    operators::{self, HeadNorms, Heads, Operator, OperatorId},
    program::{OpKind, Operation, OutputKind, Program, Reduce, Slot},
};
use galaxy_model::{NormKind, Table};
use rows::Norm;
use slots::Slots;
use std::sync::Arc;
use weights::{Product, Weights};

/// Runs the operations of one shard on a device of burn.
pub struct BurnEngine {
    /// The threads that burn computes on where the device is the processor.
    pool: Option<rayon::ThreadPool>,
    runner: Runner,
}

impl BurnEngine {
    /// An engine for `shard` on `device`, which takes the weights over. Where that is the processor, exactly
    /// `threads` threads compute. Its KV cache, of this size and type, is on the host.
    ///
    /// # Errors
    /// When the device was not compiled in or cannot be used.
    pub fn new(
        mut shard: Shard,
        device: BurnDevice,
        threads: u16,
        cache: Cache,
    ) -> Result<Self, EngineError> {
        let opened = device::open(device)?;
        let pool = match device {
            // Also for one thread: without a pool of its own burn takes all cores.
            BurnDevice::Flex => {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(usize::from(threads).max(1))
                    .thread_name(|i| format!("galaxy-kernel-{i}"))
                    .build();
                Some(pool.map_err(|error| EngineError::Device {
                    engine: EngineChoice::Burn(device),
                    why: error.to_string(),
                })?)
            }
            BurnDevice::Wgpu(_) | BurnDevice::Cuda(_) => None,
        };
        let sequences = sequences(&shard, cache);
        let weights = Weights::take(&mut shard, &opened);
        let runner = Runner {
            shard,
            sequences,
            weights,
            device: opened,
            slots: Slots::default(),
            host: Threads::new(1),
            places: Vec::new(),
        };
        Ok(Self { pool, runner })
    }
}

impl Engine for BurnEngine {
    fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError> {
        self.runner.sequences.forget_candidates();
        self.runner.slots.prepare(slots)
    }

    fn run(
        &mut self,
        program: &Program,
        operation: &Operation,
        binding: &Binding,
        staged: Staged<'_>,
    ) -> Result<(), ComputeError> {
        let call = Call { program, operation, binding };
        let runner = &mut self.runner;
        let result = match &self.pool {
            Some(pool) => pool.install(|| runner.run(&call, staged)),
            None => runner.run(&call, staged),
        };
        result.map_err(|error| error.of(operation))
    }

    fn begin(&mut self, text: &Sequence, blocks: &Arc<[u32]>) -> Result<(), ComputeError> {
        self.runner.sequences.begin(text, blocks)
    }

    fn end(&mut self, slot: u32) {
        self.runner.sequences.end(slot);
    }

    fn end_all(&mut self) {
        self.runner.sequences.clear();
    }

    fn labels(&self) -> u32 {
        self.runner.labels()
    }

    fn held(&self) -> (Bytes, Bytes) {
        let kept = self.runner.sequences.held();
        (Bytes(self.runner.weights.bytes), self.runner.slots.bytes() + kept)
    }
}

/// Whether the burn engine has an operator.
pub(super) fn has(operator: &Operator) -> bool {
    match operator {
        Operator::Embed(_)
        | Operator::Norm(_)
        | Operator::Product(_)
        | Operator::Attention(_)
        | Operator::Add(_) => true,
        Operator::Input(_) | Operator::Pool(_) | Operator::Activate(_) => false,
    }
}

struct Runner {
    /// What is left of the shard: the model's directory, the spec, the slice of the vocabulary.
    shard: Shard,
    weights: Weights,
    device: Device,
    slots: Slots,
    /// The threads of the host, which write and read wire format.
    host: Threads,
    places: Vec<RowPosition>,
    sequences: Sequences,
}

impl Runner {
    fn labels(&self) -> u32 {
        self.shard.graph.labels()
    }

    fn run(&mut self, call: &Call<'_>, staged: Staged<'_>) -> Result<(), OpError> {
        self.compute(call, staged)?;
        // An operation is over when the device is through with it.
        self.device.sync().map_err(|error| OpError::Device(format!("{error:?}")))
    }

    fn compute(&mut self, call: &Call<'_>, staged: Staged<'_>) -> Result<(), OpError> {
        let nothing = |region: &galaxy_graph::program::Region| {
            region.rows.is_empty() || region.columns.is_empty()
        };
        if call.operation.writes.first().is_some_and(nothing) {
            return Ok(());
        }
        match call.operation.kind {
            OpKind::Embed(operator) => {
                let rows = self.embed(call, operator)?;
                self.write(call, 0, rows)
            }
            OpKind::Rows(operator) => {
                let from = self.read(call, 0)?;
                let made = match self.shard.graph.get(operator) {
                    Some(Operator::Norm(_)) => self.norm(operator, &from)?.apply(from),
                    _ => return Err(NO_OPERATOR),
                };
                self.write(call, 0, made)
            }
            OpKind::Product { operator, share, .. } => {
                let rows = self.product(call, operator, share)?;
                self.write(call, 0, rows)
            }
            OpKind::Attend { operator, heads, kv_heads } => {
                call.attends(&self.shard, operator, (heads, kv_heads))?;
                let context = self.attend(call, operator, heads)?;
                self.write(call, 0, context)
            }
            OpKind::AppendKv { operator, kv_heads } => {
                let attention = self.shard.graph.attention(operator).ok_or(NO_OPERATOR)?;
                if attention.kv_heads(self.shard.heads(attention)) != kv_heads {
                    return Err(NOT_ITS_HEADS);
                }
                let keys = self.read(call, 0)?;
                let [rows, columns] = keys.dims();
                let values = rows::values(keys)?;
                let extent = Extent { start: 0, rows, columns, stride: columns };
                let area = Area::new(&values, extent);
                let area = area.ok_or(OpError::Why("burn gave too few values"))?;
                self.sequences.append_kv(call, attention.layer, call.reads(0)?, area)
            }
            OpKind::TopK { tokens } => self.top_k(call, tokens, staged.output),
            OpKind::GatherCandidates => self.sequences.gather(call, staged.input),
            OpKind::Sample => self.sequences.sample(call, staged.emitted),
            OpKind::AddNorm { add, norm, post, partial, staged: adds } => {
                let add = self.shard.graph.add(add).ok_or(NO_OPERATOR)?;
                let mut residual = self.read(call, 0)?;
                let shape = residual.dims();
                let norm = self.norm(norm, &residual)?;
                let mut sum = None;
                if partial {
                    sum = Some(alike(self.read(call, 1)?, shape)?);
                }
                if adds {
                    let tile = call.tile(staged.input, 1 + usize::from(partial))?;
                    let tile = alike(self.import(tile)?, shape)?;
                    sum = Some(sum.map_or(tile.clone(), |sum| sum + tile));
                }
                for bias in &add.biases {
                    let bias = self.weights.vector(*bias).ok_or(NO_MATRIX)?.clone();
                    sum = Some(sum.map_or(bias.clone(), |sum| sum + bias));
                }
                if let (Some(norm), Some(rows)) = (&add.norm, &sum) {
                    sum = Some(self.norm_of(norm)?.apply(rows.clone()));
                }
                if let Some(sum) = sum {
                    residual = residual + sum;
                }
                let normed = norm.apply(residual.clone());
                if post {
                    return self.write(call, 0, normed);
                }
                self.write(call, 0, residual)?;
                self.write(call, 1, normed)
            }
            OpKind::Export { staged: adds } => self.export(call, adds, staged),
            OpKind::Import => {
                let rows = self.import(call.tile(staged.input, 0)?)?;
                self.write(call, 0, rows)
            }
            OpKind::Add => {
                let rows = self.read(call, 0)?;
                let tile = alike(self.import(call.tile(staged.input, 1)?)?, rows.dims())?;
                self.write(call, 0, rows + tile)
            }
            OpKind::Select => {
                let rows = self.read(call, 0)?;
                self.write(call, 0, rows)
            }
            OpKind::Emit { output } => self.emit(call, output, staged.emitted),
            OpKind::Send { .. } | OpKind::Receive { .. } | OpKind::Load { .. } => {
                Err(OpError::Why("it belongs to a lane of its own, not to the compute lane"))
            }
        }
    }

    fn top_k(
        &mut self,
        call: &Call<'_>,
        tokens: Span<Token>,
        tile: Option<&mut [u8]>,
    ) -> Result<(), OpError> {
        if !self.shard.vocabulary().contains(tokens) {
            return Err(NOT_ITS_TOKENS);
        }
        let columns = tokens.len() as usize;
        let logits = (0..call.operation.reads.len())
            .map(|at| rows::values(alike(self.read(call, at)?, [1, columns])?));
        let logits: Vec<_> = logits.collect::<Result<_, _>>()?;
        let logits = |at: usize| logits.get(at).ok_or(OpError::Why("it reads too few regions"));
        self.sequences.top_k(call, tokens.start(), logits, tile)
    }

    fn read(&self, call: &Call<'_>, at: usize) -> Result<Tensor<2>, OpError> {
        self.slots.read(call.program, call.reads(at)?)
    }

    fn write(&mut self, call: &Call<'_>, at: usize, values: Tensor<2>) -> Result<(), OpError> {
        self.slots.write(call.program, call.writes(at)?, &self.device, values)
    }

    fn norm(&self, which: OperatorId, of: &Tensor<2>) -> Result<Norm<'_>, OpError> {
        let norm = self.shard.graph.norm(which).ok_or(NO_OPERATOR)?;
        if of.dims()[1] != norm.width as usize {
            return Err(OpError::Why("norms are over whole rows"));
        }
        self.norm_of(norm)
    }

    fn norm_of(&self, norm: &operators::Norm) -> Result<Norm<'_>, OpError> {
        let weight = self.weights.vector(norm.weight).ok_or(NO_MATRIX)?;
        let bias = match norm.bias {
            Some(bias) => Some(self.weights.vector(bias).ok_or(NO_MATRIX)?),
            None => None,
        };
        Ok(Norm { kind: norm.kind, epsilon: norm.epsilon, weight, bias })
    }

    fn embed(&mut self, call: &Call<'_>, operator: OperatorId) -> Result<Tensor<2>, OpError> {
        let embed = match self.shard.graph.get(operator) {
            Some(Operator::Embed(embed)) => embed,
            _ => return Err(NO_OPERATOR),
        };
        let region = call.writes(0)?;
        if region.columns != Span::first(embed.width) {
            return Err(OpError::Why("embeddings are whole rows"));
        }
        let asked = |slot| self.sequences.prompt_tokens(slot);
        rotary::places(&call.binding.shape, region.rows, asked, &mut self.places);
        if self.places.len() != region.rows.len() as usize {
            return Err(OpError::Why("the batch has fewer rows"));
        }
        let width = embed.width as usize;
        let mut rows = match embed.patches {
            Some((patches, product, class)) => {
                let held = self.weights.product(product).ok_or(NO_OPERATOR)?;
                let (matrix, bias) =
                    held.matrix.as_ref().zip(held.bias.as_ref()).ok_or(NO_MATRIX)?;
                let class = self.weights.vector(class).ok_or(NO_MATRIX)?;
                let squares = call.patches(patches, region.rows)?.to_vec();
                let shape = [region.rows.len() as usize, patches.values() as usize];
                let squares = Tensor::<2>::from_data(TensorData::new(squares, shape), &self.device);
                let made = squares.matmul(matrix.clone()) + bias.clone();
                // One where a row is the class's.
                let of_class = |place: &RowPosition| if place.position == 0 { 1.0 } else { 0.0 };
                let mask: Vec<f32> = self.places.iter().map(of_class).collect();
                let mask = TensorData::new(mask, [self.places.len(), 1]);
                let mask = Tensor::<2>::from_data(mask, &self.device);
                made.clone() + mask * (class.clone() - made)
            }
            None => self.table(Table::Word, call.tokens(region.rows)?, width)? * embed.scale,
        };
        if let Some(offset) = embed.positions {
            let id = |place: &RowPosition| place.position.saturating_add(offset);
            let ids: Vec<u32> = self.places.iter().map(id).collect();
            rows = rows + self.table(Table::Position, &ids, width)?;
        }
        let types = call.types(region.rows, embed.types.map_or(0, |(_, kinds)| kinds))?;
        if let Some((table, _)) = embed.types {
            let table = self.weights.vector(table).ok_or(NO_MATRIX)?;
            let of_rows = match types {
                Some(types) => {
                    let types: Vec<i32> = types.iter().map(|kind| i32::from(*kind)).collect();
                    let count = types.len();
                    let types = TensorData::new(types, [count]);
                    table.clone().select(0, Tensor::<1, Int>::from_data(types, &self.device))
                }
                None => table.clone().slice([0..1, 0..width]),
            };
            rows = rows + of_rows;
        }
        Ok(match &embed.norm {
            Some(norm) => self.norm_of(norm)?.apply(rows),
            None => rows,
        })
    }

    /// Rows of a table, read from disk: `[ids, width]`.
    fn table(&self, table: Table, ids: &[u32], width: usize) -> Result<Tensor<2>, OpError> {
        let shape = [ids.len(), width];
        let mut rows = vec![0.0; shape[0] * shape[1]];
        let read = self.shard.dir.embedding_rows(table, ids, &mut rows);
        read.map_err(|error| OpError::Weights(error.into()))?;
        Ok(Tensor::from_data(TensorData::new(rows, shape), &self.device))
    }

    fn product(
        &mut self,
        call: &Call<'_>,
        operator: OperatorId,
        share: Span<Share>,
    ) -> Result<Tensor<2>, OpError> {
        let left = self.read(call, 0)?;
        let out = call.writes(0)?;
        let graph = self.shard.graph.clone();
        let of = graph.product(operator).ok_or(NO_OPERATOR)?;
        let shares = self.shard.product(operator).ok_or(NO_OPERATOR)?.share;
        let within =
            of.within(shares, share).ok_or(OpError::Why("the shard has not this share"))?;
        let held = self.weights.product(operator).ok_or(NO_OPERATOR)?;
        let part = if shares == share { held.clone() } else { held.part(&within) };
        let Product { matrix: Some(matrix), bias } = part else { return Err(NO_MATRIX) };
        let [inputs, outputs] = matrix.dims();
        let width = if of.gated { outputs / 2 } else { outputs };
        let (columns, whole) = (out.columns.range(), out.columns.range() == (0..width));
        let fits = whole || !of.gated && columns.end <= width;
        if left.dims() != [out.rows.len() as usize, inputs] || !fits {
            return Err(OpError::Why("the matrix does not fit what is read and written"));
        }
        let mut rows = match whole {
            true => left.matmul(matrix),
            false => left.matmul(matrix.slice([0..inputs, columns.clone()])),
        };
        if let Some(bias) = bias {
            rows = rows + if whole { bias } else { bias.slice([0..1, columns]) };
        }
        if call.operation.reads.len() > 1 {
            rows = rows.clone() + alike(self.read(call, 1)?, rows.dims())?;
        }
        let activate = |rows: Tensor<2>| match (of.cap, of.activation) {
            (Some(most), _) => (rows / most).tanh() * most,
            (None, Some(activation)) => rows::activate(activation, rows),
            (None, None) => rows,
        };
        let rows = match of.gated {
            true => {
                let part = |columns| rows.clone().slice([0..out.rows.len() as usize, columns]);
                activate(part(0..width)) * part(width..2 * width)
            }
            false => activate(rows),
        };
        match &of.heads {
            Some(heads) => self.rotate(call, heads, share.of(), rows),
            None => Ok(rows),
        }
    }

    /// Norms queries and keys, where the model norms them, and rotates them by their positions, where it has
    /// rotary ones.
    fn rotate(
        &mut self,
        call: &Call<'_>,
        of: &Heads,
        own: Span<Head>,
        rows: Tensor<2>,
    ) -> Result<Tensor<2>, OpError> {
        let (heads, kv_heads) = call.heads_made(of, own)?;
        let width = of.width as usize;
        let mut rows = rows;
        if let Some(HeadNorms { query, key, epsilon }) = of.norms {
            let norm = |id| {
                let weight = self.weights.vector(id).ok_or(NO_MATRIX)?;
                Ok(Norm { kind: NormKind::Rms, epsilon, weight, bias: None })
            };
            let norms = [(heads, norm(query)?), (kv_heads, norm(key)?)];
            rows = rows::norm_heads(rows, norms, width);
        }
        let Some(rotary) = &of.rotary else { return Ok(rows) };
        let asked = |slot| self.sequences.prompt_tokens(slot);
        call.rotary_positions(of, rotary, asked, &mut self.places)?;
        Ok(rows::rotate(rows, &self.places, rotary, heads + kv_heads, width, &self.device))
    }

    fn attend(
        &self,
        call: &Call<'_>,
        operator: OperatorId,
        heads: Span<Head>,
    ) -> Result<Tensor<2>, OpError> {
        let of = self.shard.graph.attention(operator).ok_or(NO_OPERATOR)?;
        let kv_heads = of.kv_heads(heads).len();
        let Attended { queries, keys } = call.attended(of, heads.len(), kv_heads)?;
        let relative_bias = match of.relative_bias {
            Some((spec, table)) => Some((spec, self.shard.vector(table).ok_or(NO_MATRIX)?)),
            None => None,
        };
        let sources = Sources {
            queries: self.slots.read(call.program, &queries)?,
            first_query: queries.rows.start(),
            keys: self.slots.read(call.program, &keys)?,
            first_key: keys.rows.start(),
            of,
            heads,
            kv_of_heads: self.weights.kv_of_heads(operator),
            relative_bias,
            device: &self.device,
            cache: &self.sequences.cache,
        };
        self.sequences.has_context(call, of.layer)?;
        Ok(sources.attend(&call.binding.shape, queries.rows))
    }

    /// A staged tile as a tensor of the device.
    fn import(&self, tile: Tile<'_>) -> Result<Tensor<2>, OpError> {
        let (rows, columns) = tile.shape();
        let mut values = vec![0.0; rows * columns];
        let extent = Extent { start: 0, rows, columns, stride: columns };
        let area = AreaMut::new(&mut values, extent).expect("as many values as that");
        wire::import(&self.host, tile, area);
        Ok(Tensor::from_data(TensorData::new(values, [rows, columns]), &self.device))
    }

    fn export(&self, call: &Call<'_>, adds: bool, staged: Staged<'_>) -> Result<(), OpError> {
        let from = self.read(call, 0)?;
        let [rows, columns] = from.dims();
        let tile = match adds {
            true => Some(call.tile(staged.input, 1)?),
            false => None,
        };
        if tile.is_some_and(|tile| tile.shape() != (rows, columns)) {
            return Err(OpError::Why("the staged tile differs in shape"));
        }
        let wire = call.program.wire;
        let out = wire::tile_bytes(wire, rows, columns)
            .and_then(|bytes| staged.output?.get_mut(..bytes))
            .filter(|out| wire::aligned(wire, out))
            .ok_or(OpError::Why("the tile to write is not there, too short or not aligned"))?;
        let values = rows::values(from)?;
        let extent = Extent { start: 0, rows, columns, stride: columns };
        let area = Area::new(&values, extent).ok_or(OpError::Why("burn gave too few values"))?;
        wire::export(&self.host, area, tile, wire, out);
        Ok(())
    }

    fn emit(
        &self,
        call: &Call<'_>,
        output: u32,
        emitted: Option<&mut [f32]>,
    ) -> Result<(), OpError> {
        let output = call.program.outputs.get(output as usize);
        let output = output.ok_or(OpError::Why("the program has no such output"))?;
        let out = emitted.ok_or(OpError::Why("the result has no room"))?;
        let graph = &self.shard.graph;
        let hidden = graph.values.get(graph.last.0 as usize).map_or(0, |value| value.columns());
        let (rows, width) = output.extent(hidden, self.labels());
        let shape = [rows as usize, width as usize];
        let out = out
            .get_mut(..shape[0] * shape[1])
            .ok_or(OpError::Why("the result has too little room"))?;
        if out.is_empty() {
            return Ok(());
        }
        let from = self.read(call, 0)?;
        let rows = match output.kind {
            OutputKind::Logits { vocabulary, .. }
                if !self.shard.vocabulary().contains(vocabulary) =>
            {
                return Err(NOT_ITS_TOKENS);
            }
            OutputKind::Hidden { .. } | OutputKind::Logits { .. } => from,
            OutputKind::Pooled { reduce: Reduce::Row, .. } => from,
            OutputKind::Pooled { reduce: Reduce::Sum, .. } => from.sum_dim(0),
            OutputKind::Pooled { reduce: Reduce::Max, .. } => from.max_dim(0),
            OutputKind::Token => return Err(OpError::Why("a token is in no tensor")),
            OutputKind::Classes => self.classify(alike(from, [1, hidden as usize])?)?,
        };
        let values = rows::values(alike(rows, shape)?)?;
        if values.len() != out.len() {
            return Err(OpError::Why("burn gave too few values"));
        }
        out.copy_from_slice(&values);
        Ok(())
    }

    fn classify(&self, mut row: Tensor<2>) -> Result<Tensor<2>, OpError> {
        let classes = self.shard.graph.classes.as_ref();
        let classes = classes.ok_or(OpError::Why("the model has no class head"))?;
        let product = |row: Tensor<2>, id| {
            let held = self.weights.product(id).ok_or(NO_OPERATOR)?;
            let matrix = held.matrix.as_ref().ok_or(NO_MATRIX)?;
            if row.dims()[1] != matrix.dims()[0] {
                return Err(OpError::Why("the class head does not fit the row"));
            }
            let made = row.matmul(matrix.clone());
            Ok(match &held.bias {
                Some(bias) => made + bias.clone(),
                None => made,
            })
        };
        if let Some((dense, activation)) = classes.dense {
            row = rows::activate_class(activation, product(row, dense)?);
        }
        if let Some(norm) = &classes.norm {
            row = self.norm_of(norm)?.apply(row);
        }
        product(row, classes.output)
    }
}

fn alike(rows: Tensor<2>, shape: [usize; 2]) -> Result<Tensor<2>, OpError> {
    match rows.dims() == shape {
        true => Ok(rows),
        false => Err(OpError::Why("what it reads and writes differ in shape")),
    }
}
