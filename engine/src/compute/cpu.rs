//! The cpu engine: operations of programs, mapped to kernels.

mod between;
mod classify;
mod held;
mod slots;

use super::{
    Binding, ComputeError, Engine, Staged,
    call::{Attended, Call},
    kernels::{
        area::{Area, AreaMut, Extent, grow},
        attention::{self, BiasTable, Layout, Sources},
        dense::{self, Epilogue},
        rotary::{self, RotaryTable, RowPosition},
        rows::{self, Norm},
        threads::Threads,
        vector,
    },
    op_error::{NO_MATRIX, NO_OPERATOR, NOT_ITS_HEADS, NOT_ITS_TOKENS, OpError},
    sequences::{Sequences, sequences},
};
use crate::{
    sampler::Sequence,
    stream::Stream,
    weights::{Shard, ShardProduct},
};
use classify::classify;
use galaxy_common::{Bytes, Cache, Head, Share, Span};
use galaxy_graph::{
    budget,
    operators::{HeadNorms, Operator, OperatorId, Rotary},
    program::{OpKind, Operation, OutputKind, Program, Reduce, Slot},
};
use galaxy_model::{NormKind, Table};
use held::{by, matrix, norm_of};
use slots::{Slots, extent};
use std::sync::Arc;

/// Position rows that are read at a time.
const POSITION_ROWS: usize = budget::POSITION_ROWS as usize;

/// Runs the operations of one shard on kernel threads of its own.
pub struct CpuEngine {
    shard: Shard,
    threads: Threads,
    slots: Slots,
    products: dense::Scratch,
    attention: attention::Scratch,
    /// The rotary tables, one for each kind of rotary positions of the model.
    rotary: Vec<(Arc<Rotary>, RotaryTable)>,
    relative_bias: BiasTable,
    places: Vec<RowPosition>,
    sequences: Sequences,
    /// Scratch space for a few rows, on their way from a table, or between the two layers of a class
    /// head.
    few: Vec<f32>,
}

impl CpuEngine {
    /// An engine for `shard` on exactly `threads` threads: the calling one, and as many of its own as
    /// are missing.
    pub fn new(shard: Shard, threads: u16) -> Self {
        let threads = Threads::new(threads);
        let attention = attention::Scratch::new(&threads);
        let products = dense::Scratch::new(&threads);
        let rotary = shard.graph.rotations().into_iter();
        let rotary = rotary.map(|rotary| (rotary, RotaryTable::default())).collect();
        Self {
            sequences: sequences(&shard, Cache::NONE),
            shard,
            threads,
            slots: Slots::default(),
            products,
            attention,
            rotary,
            relative_bias: BiasTable::default(),
            places: Vec::new(),
            few: Vec::new(),
        }
    }

    /// The same engine, with a KV cache of this size and type.
    #[must_use]
    pub fn with_cache(mut self, cache: Cache) -> Self {
        self.sequences = sequences(&self.shard, cache);
        self
    }
}

impl Engine for CpuEngine {
    fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError> {
        self.sequences.forget_candidates();
        self.slots.prepare(slots)
    }

    fn run(
        &mut self,
        program: &Program,
        operation: &Operation,
        binding: &Binding,
        staged: Staged<'_>,
    ) -> Result<(), ComputeError> {
        let mut written = self.slots.take(program, &operation.writes);
        let call = Call { program, operation, binding };
        let result = self.compute(&call, staged, &mut written);
        self.slots.put_back(program, &operation.writes, written);
        result.map_err(|error| error.of(operation))
    }

    fn begin(&mut self, text: &Sequence, blocks: &Arc<[u32]>) -> Result<(), ComputeError> {
        for (rotary, table) in &mut self.rotary {
            table.reach(rotary, text.rows);
        }
        if let Some(heads) = self.shard.graph.heads() {
            self.attention.expect_few(heads.width as usize);
        }
        self.sequences.begin(text, blocks)
    }

    fn end(&mut self, slot: u32) {
        self.sequences.end(slot);
    }

    fn end_all(&mut self) {
        self.sequences.clear();
    }

    fn labels(&self) -> u32 {
        self.shard.graph.labels()
    }

    fn held(&self) -> (Bytes, Bytes) {
        let buffer = Bytes(self.shard.streams().map_or(0, |stream| stream.bytes()));
        (self.shard.bytes() + buffer, self.slots.held() + self.sequences.held())
    }

    fn streams(&self) -> Option<Arc<Stream>> {
        self.shard.streams()
    }

    fn into_shard(self: Box<Self>) -> Option<Shard> {
        Some(self.shard)
    }
}

impl Call<'_> {
    fn source<'s>(&self, slots: &'s Slots, at: usize) -> Result<Area<'s>, OpError> {
        slots.area(self.program, self.reads(at)?).ok_or(OpError::Why("what it reads is not held"))
    }
    fn target<'w>(&self, written: &'w mut [f32], at: usize) -> Result<AreaMut<'w>, OpError> {
        let extent = extent(self.program, self.writes(at)?);
        extent
            .and_then(|extent| AreaMut::new(written, extent))
            .ok_or(OpError::Why("what it writes has no room"))
    }
}

fn alike(rows: usize, columns: usize, area: Area<'_>) -> Result<(), OpError> {
    if area.rows() == rows && area.columns() == columns {
        Ok(())
    } else {
        Err(OpError::Why("what it reads and writes differ in shape"))
    }
}

/// Whether the cpu engine has an operator.
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

impl CpuEngine {
    fn compute(
        &mut self,
        call: &Call<'_>,
        staged: Staged<'_>,
        written: &mut [Vec<f32>; 2],
    ) -> Result<(), OpError> {
        let first = &mut written[0];
        match call.operation.kind {
            OpKind::Embed(operator) => self.embed(call, operator, first),
            OpKind::Rows(operator) => {
                let out = call.target(first, 0)?;
                let from = call.source(&self.slots, 0)?;
                alike(out.rows(), out.columns(), from)?;
                match self.shard.graph.get(operator) {
                    Some(Operator::Norm(_)) => {
                        let norm = self.norm(operator, out.columns())?;
                        rows::norm(&self.threads, norm, from, out);
                        Ok(())
                    }
                    _ => Err(NO_OPERATOR),
                }
            }
            OpKind::Product { operator, share, .. } => {
                self.product(call, (operator, share), staged.weights, first)
            }
            OpKind::Attend { operator, heads, kv_heads } => {
                call.attends(&self.shard, operator, (heads, kv_heads))?;
                self.attend(call, (operator, heads), first)
            }
            OpKind::AppendKv { operator, kv_heads } => {
                let attention = self.shard.graph.attention(operator).ok_or(NO_OPERATOR)?;
                if attention.kv_heads(self.shard.heads(attention)) != kv_heads {
                    return Err(NOT_ITS_HEADS);
                }
                let keys = call.source(&self.slots, 0)?;
                self.sequences.append_kv(call, attention.layer, call.reads(0)?, keys)
            }
            OpKind::TopK { tokens } => {
                if !self.shard.vocabulary().contains(tokens) {
                    return Err(NOT_ITS_TOKENS);
                }
                let logits = |at| {
                    let logits = call.source(&self.slots, at)?;
                    alike(1, tokens.len() as usize, logits)?;
                    Ok(logits.row(0))
                };
                self.sequences.top_k(call, tokens.start(), logits, staged.output)
            }
            OpKind::GatherCandidates => self.sequences.gather(call, staged.input),
            OpKind::Sample => self.sequences.sample(call, staged.emitted),
            OpKind::AddNorm { add, norm, post, partial, staged: adds } => {
                let of = between::AddNorm { add, norm, post, partial, adds };
                self.add_norm(call, of, staged.input, written)
            }
            OpKind::Export { staged: adds } => self.export(call, adds, staged),
            OpKind::Import => self.import(call, staged.input, first),
            OpKind::Add => self.add(call, staged.input, first),
            OpKind::Select => {
                let mut out = call.target(first, 0)?;
                let from = call.source(&self.slots, 0)?;
                alike(out.rows(), out.columns(), from)?;
                (0..out.rows()).for_each(|row| out.row(row).copy_from_slice(from.row(row)));
                Ok(())
            }
            OpKind::Emit { output } => self.emit(call, output, staged.emitted),
            OpKind::Send { .. } | OpKind::Receive { .. } | OpKind::Load { .. } => {
                Err(OpError::Why("it belongs to a lane of its own, not to the compute lane"))
            }
        }
    }

    fn norm(&self, which: OperatorId, columns: usize) -> Result<Norm<'_>, OpError> {
        let norm = self.shard.graph.norm(which).ok_or(NO_OPERATOR)?;
        if columns != norm.width as usize {
            return Err(OpError::Why("norms are over whole rows"));
        }
        norm_of(&self.shard, norm)
    }

    fn embed(
        &mut self,
        call: &Call<'_>,
        operator: OperatorId,
        written: &mut [f32],
    ) -> Result<(), OpError> {
        let embed = match self.shard.graph.get(operator) {
            Some(Operator::Embed(embed)) => embed,
            _ => return Err(NO_OPERATOR),
        };
        let hidden = embed.width as usize;
        let rows = call.writes(0)?.rows;
        let mut out = call.target(written, 0)?;
        if out.columns() != hidden {
            return Err(OpError::Why("embeddings are whole rows"));
        }
        let asked = |slot| self.sequences.prompt_tokens(slot);
        rotary::places(&call.binding.shape, rows, asked, &mut self.places);
        if self.places.len() != rows.len() as usize {
            return Err(OpError::Why("the batch has fewer rows"));
        }
        let read = |table, ids: &[u32], area: &mut [f32]| {
            let result = self.shard.dir.embedding_rows(table, ids, area);
            result.map_err(|error| OpError::Weights(error.into()))
        };
        let whole = OpError::Why("embeddings are whole rows");
        let area = match embed.patches {
            Some((patches, product, class)) => {
                let ShardProduct { matrices, bias, .. } = self.held(product)?;
                let matrix = by(call, matrices.first().ok_or(NO_MATRIX)?)?;
                let class = self.shard.vector(class).ok_or(NO_MATRIX)?;
                let (count, width) = (out.rows(), patches.values() as usize);
                let extent = Extent { start: 0, rows: count, columns: width, stride: width };
                let squares = Area::new(call.patches(patches, rows)?, extent);
                let squares = squares.ok_or(OpError::Why("image patches have another width"))?;
                let epilogue = Epilogue::of(bias.as_deref(), false, None);
                let (threads, scratch) = (&self.threads, &self.products);
                dense::product(threads, scratch, squares, matrix, out.again(), epilogue);
                let first = |place: &RowPosition| place.position == 0;
                for (row, _) in self.places.iter().enumerate().filter(|(_, place)| first(place)) {
                    out.row(row).copy_from_slice(class);
                }
                out.contiguous().ok_or(whole)?
            }
            None => {
                let area = out.contiguous().ok_or(whole)?;
                read(Table::Word, call.tokens(rows)?, area)?;
                if embed.scale != 1.0 {
                    area.iter_mut().for_each(|value| *value *= embed.scale);
                }
                area
            }
        };
        if let Some(offset) = embed.positions {
            grow(&mut self.few, POSITION_ROWS * hidden);
            let mut ids = [0; POSITION_ROWS];
            let pieces = area.chunks_mut(POSITION_ROWS * hidden);
            for (piece, places) in pieces.zip(self.places.chunks(POSITION_ROWS)) {
                let ids = &mut ids[..places.len()];
                for (id, place) in ids.iter_mut().zip(places) {
                    *id = place.position.saturating_add(offset);
                }
                let table = &mut self.few[..piece.len()];
                read(Table::Position, ids, table)?;
                vector::add(piece, table);
            }
        }
        let table = match embed.types {
            Some((table, _)) => Some(self.shard.vector(table).ok_or(NO_MATRIX)?),
            None => None,
        };
        let types = call.types(rows, embed.types.map_or(0, |(_, kinds)| kinds))?;
        let norm = match &embed.norm {
            Some(norm) => Some(norm_of(&self.shard, norm)?),
            None => None,
        };
        for (index, row) in area.chunks_exact_mut(hidden.max(1)).enumerate() {
            if let Some(table) = table {
                let kind = types.map_or(0, |types| usize::from(types[index]));
                vector::add(row, &table[kind * hidden..][..hidden]);
            }
            if let Some(norm) = norm {
                norm.apply(row);
            }
        }
        Ok(())
    }

    fn held(&self, product: OperatorId) -> Result<&ShardProduct, OpError> {
        self.shard.product(product).ok_or(NO_OPERATOR)
    }

    fn product(
        &mut self,
        call: &Call<'_>,
        (operator, share): (OperatorId, Span<Share>),
        loaded: Option<&[u8]>,
        written: &mut [f32],
    ) -> Result<(), OpError> {
        let mut out = call.target(written, 0)?;
        let left = call.source(&self.slots, 0)?;
        let of = self.shard.graph.product(operator).ok_or(NO_OPERATOR)?;
        let held = self.held(operator)?.share;
        let within = match held == share {
            true => None,
            false => {
                Some(of.within(held, share).ok_or(OpError::Why("the shard has not this share"))?)
            }
        };
        let columns = call.writes(0)?.columns.range();
        let (threads, scratch) = (&self.threads, &self.products);
        // Queries, keys and values of some heads of the shard lie apart; of other products all is one run.
        let apart = within.as_ref().filter(|_| of.heads.is_some());
        let first = within.as_ref().and_then(|within| within.columns.first());
        let one = [(first.map_or(0, |run| run.start), columns.end)];
        let runs = apart.into_iter().flat_map(|within| &within.columns);
        let runs = runs.map(|run| (run.start, run.len()));
        let mut at = 0;
        for (start, length) in runs.chain(one.into_iter().filter(|_| apart.is_none())) {
            let mut own = at.max(columns.start)..(at + length).min(columns.end);
            let mut from = start as usize + own.start - at;
            at += length;
            // Matrices of several formats stand side by side.
            while !own.is_empty() {
                let inputs = within.as_ref().map(|within| &within.inputs);
                let of_run = (inputs, from..from + own.len());
                let (matrix, epilogue) = matrix(&self.shard, (operator, of), of_run, loaded)?;
                let matrix = by(call, matrix)?;
                let width = matrix.columns();
                let fits = (left.columns(), left.rows()) == (matrix.layout.inputs, out.rows());
                if !fits || width == 0 || width > own.len() {
                    return Err(OpError::Why("rows, matrix and product do not fit together"));
                }
                let out = out.part(0, left.rows(), own.start - columns.start, width);
                dense::product(threads, scratch, left, matrix, out, epilogue);
                own.start += width;
                from += width;
            }
        }
        if call.program.operands(call.operation) > 1 {
            let more = call.source(&self.slots, 1)?;
            alike(out.rows(), out.columns(), more)?;
            rows::add(threads, more, out.again());
        }
        let Some(of_heads) = &of.heads else { return Ok(()) };
        let (heads, kv_heads) = call.heads_made(of_heads, share.of())?;
        if let Some(HeadNorms { query, key, epsilon }) = of_heads.norms {
            let norm = |id| {
                let weight = self.shard.vector(id).ok_or(NO_MATRIX)?;
                Ok(Norm { kind: NormKind::Rms, epsilon, weight, bias: None })
            };
            let norms = [(heads, norm(query)?), (kv_heads, norm(key)?)];
            rows::norm_heads(threads, norms, out.again());
        }
        if let Some(rotary) = &of_heads.rotary {
            let asked = |slot| self.sequences.prompt_tokens(slot);
            call.rotary_positions(of_heads, rotary, asked, &mut self.places)?;
            let mut tables = self.rotary.iter_mut();
            let table = tables.find(|(known, _)| Arc::ptr_eq(known, rotary));
            let (_, table) = table.ok_or(NO_OPERATOR)?;
            table.reach_rows(rotary, &self.places);
            let (heads, width) = (heads + kv_heads, of_heads.width as usize);
            table.rotate(threads, out, &self.places, rotary.pairs, heads, width);
        }
        Ok(())
    }

    fn attend(
        &mut self,
        call: &Call<'_>,
        (operator, own): (OperatorId, Span<Head>),
        written: &mut [f32],
    ) -> Result<(), OpError> {
        let attention = self.shard.graph.attention(operator).ok_or(NO_OPERATOR)?;
        let context = call.target(written, 0)?;
        let kv_heads = attention.kv_heads(own);
        let Attended { queries, keys } = call.attended(attention, own.len(), kv_heads.len())?;
        let layer = attention.layer;
        self.sequences.has_context(call, layer)?;
        let area = |region| {
            let area = self.slots.area(call.program, region);
            area.ok_or(OpError::Why("what it reads is not held"))
        };
        let layout = Layout {
            heads: own.len() as usize,
            first_head: own.start() as usize,
            kv_heads: kv_heads.len() as usize,
            first_kv_head: kv_heads.start() as usize,
            group: attention.group.max(1) as usize,
            width: attention.width as usize,
        };
        let relative_bias = match attention.relative_bias {
            Some((of, table)) => {
                let table = self.shard.vector(table).ok_or(NO_MATRIX)?;
                let longest = call.binding.shape.segments().iter().map(|s| s.rows).max();
                Some(self.relative_bias.reach(of, table, longest.unwrap_or(0) as usize))
            }
            None => None,
        };
        let sources = Sources {
            queries: area(&queries)?,
            first_query: queries.rows.start(),
            keys: area(&keys)?,
            first_key: keys.rows.start(),
            layout,
            of: attention,
            cache: Some(&self.sequences.cache),
            layer,
            relative_bias,
        };
        let (scratch, shape) = (&mut self.attention, &call.binding.shape);
        attention::attend(&self.threads, scratch, sources, shape, queries.rows, context);
        Ok(())
    }

    /// The width of the rows after the last norm.
    fn hidden(&self) -> u32 {
        let graph = &self.shard.graph;
        graph.values.get(graph.last.0 as usize).map_or(0, |value| value.columns())
    }

    fn emit(
        &mut self,
        call: &Call<'_>,
        output: u32,
        emitted: Option<&mut [f32]>,
    ) -> Result<(), OpError> {
        let output = call.program.outputs.get(output as usize);
        let output = output.ok_or(OpError::Why("the program has no such output"))?;
        let out = emitted.ok_or(OpError::Why("the result has no room"))?;
        let from = call.source(&self.slots, 0)?;
        let hidden = self.hidden();
        let (rows, width) = output.extent(hidden, self.labels());
        let values = rows as usize * width as usize;
        let out = out.get_mut(..values).ok_or(OpError::Why("the result has too little room"))?;
        if let OutputKind::Logits { vocabulary, .. } = output.kind
            && !self.shard.vocabulary().contains(vocabulary)
        {
            return Err(NOT_ITS_TOKENS);
        }
        match output.kind {
            OutputKind::Hidden { .. } | OutputKind::Logits { .. } => {
                alike(rows as usize, width as usize, from)?;
                for (row, out) in out.chunks_exact_mut(width.max(1) as usize).enumerate() {
                    out.copy_from_slice(from.row(row));
                }
                Ok(())
            }
            OutputKind::Pooled { reduce, .. } => {
                alike(from.rows().max(1), width as usize, from)?;
                out.copy_from_slice(from.row(0));
                for row in 1..from.rows() {
                    match reduce {
                        Reduce::Row => return Err(OpError::Why("one row is taken, not several")),
                        Reduce::Sum => vector::add(out, from.row(row)),
                        Reduce::Max => vector::largest(out, from.row(row)),
                    }
                }
                Ok(())
            }
            OutputKind::Token => Err(OpError::Why("a token is in no tensor")),
            OutputKind::Classes => {
                alike(1, hidden as usize, from)?;
                let engine = (&self.shard, &self.threads, &self.products);
                classify(call, engine, &mut self.few, from, out)
            }
        }
    }
}
