//! The cpu engine: operations of programs, mapped to kernels.

mod slots;

use super::{
    Binding, ComputeError, Engine, Staged,
    call::{Attended, Call, Misfit},
    kernels::{
        area::{Area, AreaMut, Extent, grow},
        attention::{self, DistanceTable, Layout, Sources},
        curve::Curve,
        dense::{self, Epilogue},
        rotary::{self, Place, RotaryTable, Rotation},
        rows::{self, Joined, Norm},
        threads::Threads,
        vector, wire,
    },
    texts::{Texts, texts},
};
use crate::{
    choose::Text,
    stream::Stream,
    weights::{AnyMatrix, LayerShard, Shard},
};
use galaxy_common::{Bytes, Cache};
use galaxy_graph::program::{
    JoinOf, NormOf, OpKind, Operation, OutputKind, Product, Program, Reduce, Slot,
};
use galaxy_graph::{budget, pieces};
use galaxy_model::{Activation, ClassActivation, HeadSpec, NormKind, Positions, Table};
use slots::{Slots, extent};
use std::{ops::Range, sync::Arc};

/// Position rows that are read at a time.
const POSITION_ROWS: usize = budget::POSITION_ROWS as usize;

/// Runs the operations of one shard on kernel threads of its own.
pub struct CpuEngine {
    shard: Shard,
    threads: Threads,
    slots: Slots,
    products: dense::Scratch,
    attention: attention::Scratch,
    rotary: RotaryTable,
    distances: DistanceTable,
    places: Vec<Place>,
    texts: Texts,
    /// A few rows on their way from a table, or between the two layers of a class head.
    few: Vec<f32>,
}

impl CpuEngine {
    /// An engine for `shard` on exactly `threads` threads: the calling one, and
    /// as many of its own as are missing.
    pub fn new(shard: Shard, threads: u16) -> Self {
        let threads = Threads::new(threads);
        let attention = attention::Scratch::new(&threads);
        let products = dense::Scratch::new(&threads);
        Self {
            texts: texts(&shard, Cache::NONE),
            shard,
            threads,
            slots: Slots::default(),
            products,
            attention,
            rotary: RotaryTable::default(),
            distances: DistanceTable::default(),
            places: Vec::new(),
            few: Vec::new(),
        }
    }

    /// The same, keeping texts that go on.
    #[must_use]
    pub fn with_cache(mut self, cache: Cache) -> Self {
        self.texts = texts(&self.shard, cache);
        self
    }
}

impl Engine for CpuEngine {
    fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError> {
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
        result.map_err(|misfit| misfit.of(operation))
    }

    fn begin(&mut self, text: &Text) -> Result<(), ComputeError> {
        if let Some(rotation) = Rotation::of(self.shard.spec()) {
            self.rotary.reach(rotation, text.rows);
        }
        self.attention.expect_few(self.shard.spec().head_width as usize);
        self.texts.begin(text)
    }

    fn end(&mut self, slot: u32) {
        self.texts.end(slot);
    }

    fn end_all(&mut self) {
        self.texts.clear();
    }

    fn labels(&self) -> u32 {
        self.shard.spec().head.labels()
    }

    fn held(&self) -> (Bytes, Bytes) {
        let buffer = Bytes(self.shard.streams().map_or(0, |stream| stream.bytes()));
        (self.shard.bytes() + buffer, self.slots.held() + self.texts.held())
    }

    fn streams(&self) -> Option<Arc<Stream>> {
        self.shard.streams()
    }

    fn into_shard(self: Box<Self>) -> Option<Shard> {
        Some(self.shard)
    }
}

impl Call<'_> {
    fn source<'s>(&self, slots: &'s Slots, at: usize) -> Result<Area<'s>, Misfit> {
        slots.area(self.program, self.reads(at)?).ok_or(Misfit::Why("what it reads is not held"))
    }
    fn target<'w>(&self, written: &'w mut [f32], at: usize) -> Result<AreaMut<'w>, Misfit> {
        let extent = extent(self.program, self.writes(at)?);
        extent
            .and_then(|extent| AreaMut::new(written, extent))
            .ok_or(Misfit::Why("what it writes has no room"))
    }
}

fn alike(rows: usize, columns: usize, area: Area<'_>) -> Result<(), Misfit> {
    if area.rows() == rows && area.columns() == columns {
        Ok(())
    } else {
        Err(Misfit::Why("what it reads and writes differ in shape"))
    }
}

fn held(shard: &Shard, layer: u32) -> Result<&LayerShard, Misfit> {
    shard.layers.get(layer as usize).ok_or(Misfit::Why("the model has no such layer"))
}

impl CpuEngine {
    fn compute(
        &mut self,
        call: &Call<'_>,
        staged: Staged<'_>,
        written: &mut [Vec<f32>; 2],
    ) -> Result<(), Misfit> {
        let [first, second] = written;
        match call.operation.kind {
            OpKind::Embed => self.embed(call, first),
            OpKind::Norm(which) => {
                let out = call.target(first, 0)?;
                let from = call.source(&self.slots, 0)?;
                alike(out.rows(), out.columns(), from)?;
                rows::norm(&self.threads, self.norm(which, out.columns())?, from, out);
                Ok(())
            }
            OpKind::Product { layer, product } => {
                self.product(call, (layer, product), staged.weights, first)
            }
            OpKind::Attend { layer, heads, kv_heads } => {
                let held = held(&self.shard, layer)?;
                if held.heads != heads || held.kv_heads != kv_heads {
                    return Err(Misfit::Why("the heads are not those of the shard"));
                }
                self.attend(call, layer, first)
            }
            OpKind::Keep { layer, kv_heads } => {
                if held(&self.shard, layer)?.kv_heads != kv_heads {
                    return Err(Misfit::Why("the heads are not those of the shard"));
                }
                let keys = call.source(&self.slots, 0)?;
                self.texts.keep(call, layer, call.reads(0)?, keys)
            }
            OpKind::Shortlist { segment, breadth } => {
                let logits = call.source(&self.slots, 0)?;
                let slice = self.shard.vocabulary;
                alike(1, slice.len() as usize, logits)?;
                let named = (logits.row(0), slice.start());
                self.texts.shortlist(call, (segment, breadth), named, staged.output)
            }
            OpKind::Collect { segment, .. } => self.texts.collect(call, segment, staged.input),
            OpKind::Choose { segment } => self.texts.choose(call, segment, staged.emitted),
            OpKind::Join { layer, join, norm, post, partial, staged: adds } => {
                let residual = call.target(first, 0)?;
                let (rows, columns) = (residual.rows(), residual.columns());
                let normed = match post {
                    true => None,
                    false => Some(call.target(second, 1)?),
                };
                if normed.as_ref().is_some_and(|n| (n.rows(), n.columns()) != (rows, columns)) {
                    return Err(Misfit::Why("residual and normed rows differ in shape"));
                }
                let old = call.source(&self.slots, 0)?;
                alike(rows, columns, old)?;
                let sum = match partial {
                    true => Some(call.source(&self.slots, 1)?),
                    false => None,
                };
                sum.map_or(Ok(()), |sum| alike(rows, columns, sum))?;
                let tile = match adds {
                    true => Some(call.tile(staged.input, 1 + usize::from(partial))?),
                    false => None,
                };
                if tile.is_some_and(|t| t.shape() != (rows, columns)) {
                    return Err(Misfit::Why("the staged tile differs in shape"));
                }
                let held = held(&self.shard, layer)?;
                let bias = match join {
                    JoinOf::Attention => held.attention_output_bias.as_deref(),
                    JoinOf::Mlp => held.down_bias.as_deref(),
                };
                let norm = self.norm(norm, columns)?;
                let joined = Joined { residual: old, bias, partial: sum, staged: tile, norm };
                rows::join(&self.threads, joined, residual, normed);
                Ok(())
            }
            OpKind::Export { staged: adds } => {
                let rows = call.source(&self.slots, 0)?;
                let tile = match adds {
                    true => Some(call.tile(staged.input, 1)?),
                    false => None,
                };
                if tile.is_some_and(|t| t.shape() != (rows.rows(), rows.columns())) {
                    return Err(Misfit::Why("the staged tile differs in shape"));
                }
                let wire = call.program.wire;
                let out = wire::tile_bytes(wire, rows.rows(), rows.columns())
                    .and_then(|bytes| staged.output?.get_mut(..bytes))
                    .filter(|out| wire::aligned(wire, out))
                    .ok_or(Misfit::Why(
                        "the tile to write is not there, too short or not aligned",
                    ))?;
                wire::export(&self.threads, rows, tile, wire, out);
                Ok(())
            }
            OpKind::Import => {
                let out = call.target(first, 0)?;
                let tile = call.tile(staged.input, 0)?;
                if tile.shape() != (out.rows(), out.columns()) {
                    return Err(Misfit::Why("the staged tile differs in shape"));
                }
                wire::import(&self.threads, tile, out);
                Ok(())
            }
            OpKind::Add => {
                let out = call.target(first, 0)?;
                let from = call.source(&self.slots, 0)?;
                alike(out.rows(), out.columns(), from)?;
                let tile = call.tile(staged.input, 1)?;
                if tile.shape() != (out.rows(), out.columns()) {
                    return Err(Misfit::Why("the staged tile differs in shape"));
                }
                wire::add(&self.threads, from, tile, out);
                Ok(())
            }
            OpKind::Select => {
                let mut out = call.target(first, 0)?;
                let from = call.source(&self.slots, 0)?;
                alike(out.rows(), out.columns(), from)?;
                (0..out.rows()).for_each(|row| out.row(row).copy_from_slice(from.row(row)));
                Ok(())
            }
            OpKind::Emit { output } => self.emit(call, output, staged.emitted),
            OpKind::Send { .. } | OpKind::Receive { .. } | OpKind::Load { .. } => {
                Err(Misfit::Why("it belongs to a lane of its own, not to the compute lane"))
            }
        }
    }

    fn norm(&self, which: NormOf, columns: usize) -> Result<Norm<'_>, Misfit> {
        let spec = self.shard.spec();
        let vectors = match which {
            NormOf::Attention(layer) => &held(&self.shard, layer)?.attention_norm,
            NormOf::Mlp(layer) => {
                let norm = held(&self.shard, layer)?.mlp_norm.as_ref();
                norm.ok_or(Misfit::Why("the MLP has no norm of its own"))?
            }
            NormOf::Final => {
                self.shard.final_norm.as_ref().ok_or(Misfit::Why("the model has no final norm"))?
            }
        };
        if columns != spec.hidden as usize {
            return Err(Misfit::Why("norms are over whole rows"));
        }
        Ok(Norm { kind: spec.norm, epsilon: spec.norm_epsilon, vectors })
    }

    fn embed(&mut self, call: &Call<'_>, written: &mut [f32]) -> Result<(), Misfit> {
        let spec = self.shard.spec();
        let hidden = spec.hidden as usize;
        let rows = call.writes(0)?.rows;
        let mut out = call.target(written, 0)?;
        if out.columns() != hidden {
            return Err(Misfit::Why("embeddings are whole rows"));
        }
        let asked = |slot| self.texts.asked(slot);
        rotary::places(&call.binding.shape, rows, asked, &mut self.places);
        if self.places.len() != rows.len() as usize {
            return Err(Misfit::Why("the batch has fewer rows"));
        }
        let read = |table, ids: &[u32], area: &mut [f32]| {
            let result = self.shard.dir.embedding_rows(table, ids, area);
            result.map_err(|error| Misfit::Weights(error.into()))
        };
        let whole = Misfit::Why("embeddings are whole rows");
        let area = match (spec.patches, &self.shard.patch) {
            (Some(patches), Some(held)) => {
                let (count, width) = (out.rows(), patches.values() as usize);
                let extent = Extent { start: 0, rows: count, columns: width, stride: width };
                let squares = Area::new(call.patches(patches, rows)?, extent);
                let squares = squares.ok_or(Misfit::Why("squares of pixels have another width"))?;
                let epilogue = Epilogue { bias: Some(&held.bias), curve: None };
                let (threads, scratch) = (&self.threads, &self.products);
                dense::product(threads, scratch, squares, &held.matrix, out.again(), epilogue);
                let first = |place: &Place| place.position == 0;
                for (row, _) in self.places.iter().enumerate().filter(|(_, place)| first(place)) {
                    out.row(row).copy_from_slice(&held.class_row);
                }
                out.contiguous().ok_or(whole)?
            }
            _ => {
                let area = out.contiguous().ok_or(whole)?;
                read(Table::Word, call.tokens(rows)?, area)?;
                area
            }
        };
        if let Positions::Learned { offset, .. } = spec.positions {
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
        for row in area.chunks_exact_mut(hidden.max(1)) {
            if let Some(kind) = &self.shard.token_type {
                vector::add(row, kind);
            }
            if let Some(vectors) = &self.shard.embedding_norm {
                Norm { kind: spec.norm, epsilon: spec.norm_epsilon, vectors }.apply(row);
            }
        }
        Ok(())
    }

    fn product(
        &mut self,
        call: &Call<'_>,
        (layer, product): (u32, Product),
        loaded: Option<&[u8]>,
        written: &mut [f32],
    ) -> Result<(), Misfit> {
        let mut out = call.target(written, 0)?;
        let left = call.source(&self.slots, 0)?;
        let spec = self.shard.spec();
        let held = match product {
            Product::Language => None,
            _ => Some(held(&self.shard, layer)?),
        };
        let columns = call.writes(0)?.columns.range();
        let (matrix, bias) = matrix(&self.shard, (layer, product), columns, loaded)?;
        if (left.columns(), out.columns()) != (matrix.layout.inputs, matrix.columns())
            || left.rows() != out.rows()
        {
            return Err(Misfit::Why("rows, matrix and product do not fit together"));
        }
        let (threads, scratch) = (&self.threads, &self.products);
        let curve = curve(spec.activation);
        let epilogue = Epilogue { bias, curve: (product == Product::Up).then_some(curve) };
        dense::product(threads, scratch, left, matrix, out.again(), epilogue);
        if call.program.operands(call.operation) > 1 {
            let more = call.source(&self.slots, 1)?;
            alike(out.rows(), out.columns(), more)?;
            rows::add(threads, more, out.again());
        }
        let (Product::Qkv, Some(held)) = (product, held) else { return Ok(()) };
        let (heads, kv_heads) = call.heads_made(spec, held.heads, held.kv_heads)?;
        if let Some([query, key]) = &held.head_norms {
            let norm = |vectors| Norm { kind: NormKind::Rms, epsilon: spec.norm_epsilon, vectors };
            rows::norm_heads(threads, [(heads, norm(query)), (kv_heads, norm(key))], out.again());
        }
        let asked = |slot| self.texts.asked(slot);
        if let Some(rotation) = call.turned(spec, asked, &mut self.places)? {
            self.rotary.reach_rows(rotation, &self.places);
            let (heads, width) = (heads + kv_heads, spec.head_width as usize);
            self.rotary.turn(threads, out, &self.places, rotation.pairs, heads, width);
        }
        Ok(())
    }

    fn attend(&mut self, call: &Call<'_>, layer: u32, written: &mut [f32]) -> Result<(), Misfit> {
        let spec = self.shard.spec();
        let context = call.target(written, 0)?;
        let held = held(&self.shard, layer)?;
        let Attended { queries, keys } =
            call.attended(spec, held.heads.len(), held.kv_heads.len())?;
        self.texts.has_past(call, layer)?;
        let area = |region| {
            let area = self.slots.area(call.program, region);
            area.ok_or(Misfit::Why("what it reads is not held"))
        };
        let layout = Layout {
            heads: held.heads.len() as usize,
            first_head: held.heads.start() as usize,
            kv_heads: held.kv_heads.len() as usize,
            first_kv_head: held.kv_heads.start() as usize,
            group: spec.group().max(1) as usize,
            width: spec.head_width as usize,
        };
        let sources = Sources {
            queries: area(&queries)?,
            first_query: queries.rows.start(),
            keys: area(&keys)?,
            first_key: keys.rows.start(),
            layout,
            scale: spec.score_scale(layer),
            causal: spec.causal,
            cache: Some(&self.texts.cache),
            layer,
            distances: spec.distances.zip(self.shard.distances.as_deref()).map(|(spec, table)| {
                let longest = call.binding.shape.segments().iter().map(|s| s.rows).max();
                self.distances.reach(spec, table, longest.unwrap_or(0) as usize)
            }),
        };
        let (scratch, shape) = (&mut self.attention, &call.binding.shape);
        attention::attend(&self.threads, scratch, sources, shape, queries.rows, context);
        Ok(())
    }

    fn emit(
        &mut self,
        call: &Call<'_>,
        output: u32,
        emitted: Option<&mut [f32]>,
    ) -> Result<(), Misfit> {
        let output = call.program.outputs.get(output as usize);
        let output = output.ok_or(Misfit::Why("the program has no such output"))?;
        let out = emitted.ok_or(Misfit::Why("the result has no room"))?;
        let from = call.source(&self.slots, 0)?;
        let hidden = self.shard.spec().hidden;
        let (rows, width) = output.extent(hidden, self.labels());
        let values = rows as usize * width as usize;
        let out = out.get_mut(..values).ok_or(Misfit::Why("the result has too little room"))?;
        if let OutputKind::Logits { vocabulary, .. } = output.kind
            && vocabulary != self.shard.vocabulary
        {
            return Err(Misfit::Why("the slice of the vocabulary is not that of the shard"));
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
                        Reduce::Row => return Err(Misfit::Why("one row is taken, not several")),
                        Reduce::Sum => vector::add(out, from.row(row)),
                        Reduce::Max => vector::largest(out, from.row(row)),
                    }
                }
                Ok(())
            }
            OutputKind::Token => Err(Misfit::Why("a token is in no tensor")),
            OutputKind::Classes => {
                alike(1, hidden as usize, from)?;
                classify(&self.shard, &self.threads, &self.products, &mut self.few, from, out)
            }
        }
    }
}

fn curve(activation: Activation) -> Curve {
    match activation {
        Activation::Gelu => Curve::Gelu,
        Activation::GeluTanh => Curve::GeluTanh,
        Activation::Silu => Curve::Silu,
        Activation::Relu => Curve::Relu,
        Activation::QuickGelu => Curve::QuickGelu,
        Activation::ClippedGelu => Curve::ClippedGelu,
        Activation::SquaredRelu => Curve::SquaredRelu,
        Activation::Relu6 => Curve::Relu6,
        Activation::LeakyRelu => Curve::LeakyRelu,
        Activation::HardSwish => Curve::HardSwish,
        Activation::Mish => Curve::Mish,
        Activation::Laplace => Curve::Laplace,
        Activation::Tanh => Curve::Tanh,
        Activation::Sigmoid => Curve::Sigmoid,
        Activation::Linear => Curve::Linear,
    }
}

/// What makes these columns of a product, and their bias.
fn matrix<'a>(
    shard: &'a Shard,
    (layer, product): (u32, Product),
    columns: Range<usize>,
    loaded: Option<&'a [u8]>,
) -> Result<(AnyMatrix<'a>, Option<&'a [f32]>), Misfit> {
    let none = || Misfit::Why("the shard has no such matrix");
    if let Some(streamed) = &shard.streamed {
        let place = (pieces::held(layer, product), columns.start as u32);
        return streamed.matrix(place, loaded).ok_or_else(none);
    }
    let layer = || held(shard, layer);
    let (matrix, bias) = match product {
        Product::Qkv => (&layer()?.qkv, layer()?.qkv_bias.as_deref()),
        Product::AttentionOutput => (&layer()?.attention_output, None),
        Product::Up => (&layer()?.up, layer()?.up_bias.as_deref()),
        Product::Down => (&layer()?.down, None),
        Product::Language => (&shard.language, shard.language_bias.as_deref()),
    };
    let whole = AnyMatrix::from(matrix.as_ref().ok_or_else(none)?);
    let cut = columns != (0..whole.columns());
    let part = whole.part(columns.clone());
    let part = part.ok_or(Misfit::Why("rows, matrix and product do not fit together"))?;
    Ok((part, bias.map(|bias| if cut { &bias[columns] } else { bias })))
}

fn classify(
    shard: &Shard,
    threads: &Threads,
    scratch: &dense::Scratch,
    few: &mut Vec<f32>,
    row: Area<'_>,
    out: &mut [f32],
) -> Result<(), Misfit> {
    let (HeadSpec::Classes(head), Some(held)) = (&shard.spec().head, &shard.classes) else {
        return Err(Misfit::Why("the model has no class head"));
    };
    let single = |columns| Extent { start: 0, rows: 1, columns, stride: columns };
    let room = Misfit::Why("the class head does not fit the row");
    let mut row = row;
    if let Some((dense, bias)) = &held.dense {
        grow(few, dense.outputs);
        if dense.inputs != row.columns() {
            return Err(room);
        }
        let curve = match head.dense {
            Some(ClassActivation::Tanh) => Some(Curve::Tanh),
            Some(ClassActivation::Relu) => Some(Curve::Relu),
            None => None,
        };
        let Some(area) = AreaMut::new(few, single(dense.outputs)) else { return Err(room) };
        dense::product(threads, scratch, row, dense, area, Epilogue { bias: Some(bias), curve });
        row = Area::single(&few[..dense.outputs]);
    }
    let output = &held.output;
    if output.inputs != row.columns() || output.outputs != out.len() {
        return Err(room);
    }
    let Some(area) = AreaMut::new(out, single(output.outputs)) else { return Err(room) };
    let epilogue = Epilogue { bias: held.bias.as_deref(), curve: None };
    dense::product(threads, scratch, row, output, area, epilogue);
    Ok(())
}
