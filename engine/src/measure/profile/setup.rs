//! The stand that kernels are measured on: a shard of several widths, and a program that nobody
//! lowers, whose operations are run one by one in the order of a layer.

use super::{
    clock::Clock,
    widths::{LANGUAGE_ROWS, Sample},
};
use crate::{
    compute::{Binding, Engine, Inputs, Staged},
    measure::MeasureError,
};
use galaxy_common::{
    Activations, Assignment, BatchShape, BlockAssignment, Bytes, Column, Head, Kernel, Rank, Row,
    Span, Wanted, WireType, plan::Phase,
};
use galaxy_graph::{
    Program,
    lower::kv_span,
    operators::{AddNorm, OperatorGraph, OperatorId},
    program::{
        Block, LaneId, Memory, OpKind, Operation, Region, Role, Slot, SlotId, Tensor, TensorId,
    },
};
use galaxy_model::{ModelSpec, NormPlace};

/// The time of one operation: kernel, sizes, nanoseconds without pauses.
pub(super) type Taken = (Kernel, Vec<u32>, f64);

/// An engine with a sample of the model's weights, ready to be measured.
pub(super) struct ProfileSetup {
    pub(super) engine: Box<dyn Engine>,
    /// The operator graph, whose layers are those of the sample.
    graph: OperatorGraph,
    shares: Assignment,
    sample: Sample,
    spec: ModelSpec,
    program: Program,
    /// The tensors of each layer of the sample.
    layers: Vec<Widths>,
    logits: Option<TensorId>,
    /// A tile that is read and one that is written, aligned to 4.
    tiles: [Vec<f32>; 2],
    pub(super) clock: Clock,
    /// The number that the next tokens are counted from: no walk reads the rows of the one before.
    token: u32,
}

/// Tensors whose widths a layer's part decides.
#[derive(Clone, Copy)]
struct Widths {
    qkv: TensorId,
    context: TensorId,
    intermediate: TensorId,
}

const RESIDUAL: TensorId = TensorId(0);
const JOINED: TensorId = TensorId(1);
const NORMED: TensorId = TensorId(2);
const INPUT: TensorId = TensorId(3);
const PARTIAL: TensorId = TensorId(4);
const TILE: TensorId = TensorId(5);
const SUM: TensorId = TensorId(6);
/// Slots of the tensors above, then one each for those of each width.
const SLOTS: u32 = 7;

impl ProfileSetup {
    /// Makes room for all operations. `alone` says whether the calling thread does all that the engine
    /// does.
    pub(super) fn new(
        mut engine: Box<dyn Engine>,
        (spec, activations): (&ModelSpec, Activations),
        sample: Sample,
        alone: bool,
    ) -> Result<Self, MeasureError> {
        let rows = Span::<Row>::first(sample.rows);
        let mut tensors = Vec::new();
        let mut slots: Vec<Slot> = Vec::new();
        let mut tensor = |role, width: u32, memory, slot: u32| {
            if slots.len() <= slot as usize {
                slots.resize(slot as usize + 1, Slot { memory, start: 0, bytes: 0 });
            }
            let bytes = u64::from(sample.rows) * u64::from(width) * 4;
            let held = &mut slots[slot as usize].bytes;
            *held = bytes.max(*held);
            let element = memory.element(WireType::F32);
            tensors.push(Tensor { role, rows, width, memory, element, slot: SlotId(slot) });
            TensorId(tensors.len() as u32 - 1)
        };
        let hidden = spec.hidden;
        for (slot, role) in
            [Role::Residual, Role::Residual, Role::Normed, Role::Normed, Role::Partial]
                .into_iter()
                .enumerate()
        {
            tensor(role, hidden, Memory::Device, slot as u32);
        }
        tensor(Role::RowTile, hidden, Memory::Staging, 5);
        tensor(Role::SumTile, hidden, Memory::Staging, 6);
        let layers = sample.blocks.iter().map(|(_, block)| {
            let width = |heads: u32| heads * spec.head_width;
            let kv = kv_span(spec, block.heads).len();
            let context = width(block.heads.len());
            Widths {
                qkv: tensor(Role::Qkv, context + 2 * width(kv), Memory::Device, SLOTS),
                context: tensor(Role::Context, context, Memory::Device, SLOTS + 1),
                intermediate: tensor(
                    Role::Intermediate,
                    block.columns.len(),
                    Memory::Device,
                    SLOTS + 2,
                ),
            }
        });
        let layers: Vec<_> = layers.collect();
        let slice = sample.vocabulary.len();
        let logits = (slice > 0).then(|| tensor(Role::Logits, slice, Memory::Device, SLOTS + 3));
        if let Some(slot) = slots.get_mut(SLOTS as usize + 3) {
            slot.bytes = slot.bytes.min(u64::from(LANGUAGE_ROWS) * u64::from(slice) * 4);
        }
        engine.prepare(&slots)?;
        let values = sample.rows as usize * hidden as usize;
        let program = Program {
            rank: Rank(0),
            phase: Phase::Prefill,
            wire: WireType::F32,
            activations,
            tensors,
            slots,
            operations: Vec::new(),
            lanes: Vec::new(),
            outputs: Vec::new(),
        };
        let tiles = [vec![0.01; values], vec![0.0; values]];
        let spec = spec.clone();
        let clock = Clock::new(alone);
        let graph = OperatorGraph::of(&spec.sample(sample.blocks.len() as u32));
        let block = |(at, (_, block)): (u32, &(u32, BlockAssignment))| BlockAssignment {
            layers: Span::new(at, at + 1),
            ..*block
        };
        let shares = Assignment {
            blocks: (0..).zip(&sample.blocks).map(block).collect(),
            row_weight: 0,
            vocabulary: sample.vocabulary,
        };
        let token = 0;
        Ok(Self {
            engine,
            graph,
            shares,
            sample,
            spec,
            program,
            layers,
            logits,
            tiles,
            clock,
            token,
        })
    }

    fn product(&self, operator: OperatorId, layer: u32) -> OpKind {
        let product = self.graph.product_of(operator, &self.shares, layer);
        product.expect("operators of a layer are what they are")
    }

    pub(super) fn sample(&self) -> &Sample {
        &self.sample
    }

    /// Bytes of the slots of its program.
    pub(super) fn slots(&self) -> Bytes {
        self.program.slots.iter().map(|slot| Bytes(slot.bytes)).sum()
    }

    fn region(&self, tensor: TensorId, rows: Span<Row>) -> Region {
        let columns = Span::<Column>::first(self.program.tensor(tensor).width);
        Region { tensor, rows, columns }
    }

    /// The regions that attention reads of `qkv`: queries of some rows, keys and values of others.
    fn attended(
        &self,
        qkv: TensorId,
        heads: Span<Head>,
        queries: Span<Row>,
        keys: Span<Row>,
    ) -> [Region; 2] {
        let (all, of_queries) =
            (self.program.tensor(qkv).width, heads.len() * self.spec.head_width);
        let region = |rows, columns| Region { tensor: qkv, rows, columns };
        [region(queries, Span::first(of_queries)), region(keys, Span::new(of_queries, all))]
    }

    /// Runs one operation and returns what it took, in nanoseconds.
    fn run(
        &mut self,
        binding: &Binding,
        kind: OpKind,
        reads: &[Region],
        writes: &[Region],
    ) -> Result<f64, MeasureError> {
        let operation = Operation {
            kind,
            lane: LaneId(0),
            reads: reads.into(),
            writes: writes.into(),
            waits: Default::default(),
            takes: Bytes(0),
            gives: Bytes(0),
            block: Block::Head,
            layer: 0,
        };
        let [input, output] = &mut self.tiles;
        let staged = Staged {
            input: Some(bytemuck::cast_slice(input)),
            output: Some(bytemuck::cast_slice_mut(output)),
            ..Staged::default()
        };
        let begun = self.clock.begin();
        self.engine.run(&self.program, &operation, binding, staged)?;
        Ok(self.clock.end(begun))
    }

    fn binding(&mut self, rows: u32) -> Result<Binding, MeasureError> {
        let shape = BatchShape::single(rows, Wanted::Hidden)?;
        let first = self.token;
        self.token = self.token.wrapping_add(rows);
        Ok(Binding::new(shape, Inputs::any(&self.spec, rows, first)))
    }

    /// Runs every operation of a layer over the first `rows` rows, for each width of one set of the
    /// sample, and what stands before and after the layers.
    ///
    /// Each operation finds its rows where the one before has left them, as in a program, and its
    /// weights in memory.
    pub(super) fn walk(
        &mut self,
        rows: u32,
        set: usize,
        taken: &mut Vec<Taken>,
    ) -> Result<(), MeasureError> {
        let binding = self.binding(rows)?;
        let span = Span::<Row>::first(rows);
        let of = |stand: &Self, tensor| stand.region(tensor, span);
        let post = self.spec.norm_place == NormPlace::Post;
        let embed = OpKind::Embed(self.graph.embed);
        let one = vec![rows];
        let (residual, input) = (of(self, RESIDUAL), of(self, INPUT));
        let time = self.run(&binding, embed, &[], &[residual])?;
        taken.push((Kernel::Embed, one.clone(), time));
        let first = set * self.sample.set;
        // Every model has this one.
        let norm = OpKind::Rows(self.graph.layers[first].after_attention.norm);
        let time = self.run(&binding, norm, &[residual], &[input])?;
        taken.push((Kernel::Norm, one.clone(), time));
        for layer in first..first + self.sample.set {
            let Widths { qkv, context, intermediate } = self.layers[layer];
            let block = self.sample.blocks[layer].1;
            let width = |stand: &Self, tensor| stand.program.tensor(tensor).width;
            let layer = layer as u32;
            let two = |stand: &Self, tensor| vec![rows, width(stand, tensor)];
            let operators = self.graph.layers[layer as usize];
            let kv_heads = kv_span(&self.spec, block.heads);
            let (queries, attended) = (of(self, qkv), of(self, context));
            let (inside, partial) = (of(self, intermediate), of(self, PARTIAL));

            let time =
                self.run(&binding, self.product(operators.qkv, layer), &[input], &[queries])?;
            taken.push((Kernel::Qkv, two(self, qkv), time));
            let attend =
                OpKind::Attend { operator: operators.attention, heads: block.heads, kv_heads };
            let both = self.attended(qkv, block.heads, span, span);
            // So that its output is warm; its own times come from a grid of its own.
            self.run(&binding, attend, &both, &[attended])?;
            let output = self.product(operators.output, layer);
            let time = self.run(&binding, output, &[attended], &[partial])?;
            taken.push((Kernel::AttentionOutput, two(self, context), time));

            let (tile, sum, normed) = (of(self, TILE), of(self, SUM), of(self, NORMED));
            let time = self.run(&binding, OpKind::Export { staged: false }, &[partial], &[tile])?;
            taken.push((Kernel::Export, one.clone(), time));
            let adds = OpKind::Export { staged: true };
            let time = self.run(&binding, adds, &[partial, sum], &[tile])?;
            taken.push((Kernel::ExportAdd, one.clone(), time));
            let time = self.run(&binding, OpKind::Import, &[sum], &[normed])?;
            taken.push((Kernel::Import, one.clone(), time));
            let AddNorm { add, norm } = operators.after_attention;
            let join = OpKind::AddNorm { add, norm, post, partial: true, staged: false };
            let joined = [of(self, JOINED), normed];
            let joined = if post { &joined[..1] } else { &joined[..] };
            let time = self.run(&binding, join, &[residual, partial], joined)?;
            taken.push((Kernel::AddNorm, one.clone(), time));

            let time =
                self.run(&binding, self.product(operators.up, layer), &[input], &[inside])?;
            taken.push((Kernel::Up, two(self, intermediate), time));
            let time =
                self.run(&binding, self.product(operators.down, layer), &[inside], &[partial])?;
            taken.push((Kernel::Down, two(self, intermediate), time));
        }
        let head = self.logits.zip(self.graph.language).filter(|_| rows <= LANGUAGE_ROWS);
        if let Some((logits, language)) = head {
            let kind = self.product(language, 0);
            let slice = self.program.tensor(logits).width;
            let logits = of(self, logits);
            let time = self.run(&binding, kind, &[input], &[logits])?;
            taken.push((Kernel::Language, vec![rows, slice], time));
        }
        Ok(())
    }

    /// Runs attention of the heads of one layer of the sample, for every pair of sizes that some
    /// sequence has.
    pub(super) fn attend(
        &mut self,
        layer: usize,
        sizes: &[u32],
        taken: &mut Vec<Taken>,
    ) -> Result<(), MeasureError> {
        let Widths { qkv, context, .. } = self.layers[layer];
        let heads = self.sample.blocks[layer].1.heads;
        let kv_heads = kv_span(&self.spec, heads);
        let of = self.graph.layers[layer];
        let attend = OpKind::Attend { operator: of.attention, heads, kv_heads };
        let whole = Span::<Row>::first(self.sample.rows);
        let binding = self.binding(self.sample.rows)?;
        let kind = self.product(of.qkv, layer as u32);
        let (from, to) = (self.region(INPUT, whole), self.region(qkv, whole));
        self.run(&binding, kind, &[from], &[to])?;
        for &queries in sizes {
            for &keys in sizes {
                let Some((text, own)) = self.seen(queries, keys) else { continue };
                let binding = self.binding(text)?;
                let mut left = queries;
                let mut time = 0.0;
                // More queries than the sequence has rows: the same ones again, in one sum.
                while left > 0 {
                    let own = Span::new(own.start(), own.start() + own.len().min(left));
                    left -= own.len();
                    let reads = self.attended(qkv, heads, own, Span::first(text));
                    let writes = self.region(context, own);
                    time += self.run(&binding, attend, &reads, &[writes])?;
                }
                taken.push((Kernel::Attend, vec![queries, keys, heads.len()], time));
            }
        }
        Ok(())
    }

    /// A sequence whose rows see `keys` keys in the mean, and which of its rows are the queries: fewer
    /// than `queries` where it has no more, as in a batch of several sequences. None where no sequence
    /// that fits is so.
    fn seen(&self, queries: u32, keys: u32) -> Option<(u32, Span<Row>)> {
        if !self.spec.causal {
            return Some((keys, Span::first(queries.min(keys))));
        }
        // Query `i` of the last `queries` of `end` rows sees `end - queries + i + 1` keys: in the
        // mean `end - (queries - 1) / 2`.
        let end = keys + (queries - 1) / 2;
        let (text, own) = match end >= queries {
            true => (end, Span::new(end - queries, end)),
            false => (2 * keys - 1, Span::first(2 * keys - 1)),
        };
        (text <= self.sample.rows).then_some((text, own))
    }
}
