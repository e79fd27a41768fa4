//! Random operator graphs, and programs for them that are written by hand: all values whole on every
//! device, partial sums from each to each. The verifier passes what is right and finds what is changed.

use super::{RandomLayout, laid_out, spec};
use galaxy_common::{
    BatchShape, Bytes, Column, Exchange, Kernel, Plan, Rank, Row, Span, Strategy, Wanted, WireType,
    plan::Phase,
};
use galaxy_graph::{
    Program, VerifyError,
    operators::{
        Add, Axes, Axis, Cut, CutSide, Norm, Operator, OperatorGraph, OperatorId, Product, Value,
        ValueId, Weight, WeightId,
    },
    program::{
        Block, Lane, LaneId, Memory, OpId, OpKind, Operation, Region, Role, Slot, SlotId, Tensor,
        TensorId, Wait,
    },
    verify_graph,
};
use galaxy_model::{HeadSpec, ModelSpec, NormKind, Vector};
use proptest::prelude::{Strategy as Arbitrary, *};

const ROWS: u32 = 3;

/// A block: how many norms stand before it, how many pairs of products are summed in it, and whether its
/// norm replaces the residual.
type Shape = (u32, u32, bool);

/// The operators of a block, in the order in which a device runs them.
struct BlockOperators {
    norms: Vec<OperatorId>,
    /// The first and last product of each branch.
    branches: Vec<(OperatorId, OperatorId)>,
    add: OperatorId,
    norm: OperatorId,
    post: bool,
}

struct Building {
    graph: OperatorGraph,
    hidden: u32,
    inner: u32,
}

impl Building {
    fn value(&mut self, columns: u32) -> ValueId {
        self.graph.values.push(Value { name: "a value", layer: 0, axes: Axes::Text { columns } });
        ValueId(self.graph.values.len() as u32 - 1)
    }
    fn operator(&mut self, operator: Operator) -> OperatorId {
        self.graph.operators.push(operator);
        OperatorId(self.graph.operators.len() as u32 - 1)
    }
    fn norm(&mut self, input: ValueId) -> (OperatorId, ValueId) {
        let output = self.value(self.hidden);
        let (width, kind, weight) = (self.hidden, NormKind::Rms, WeightId(0));
        let norm = Norm { input, output, width, kind, epsilon: 1e-5, weight, bias: None };
        (self.operator(Operator::Norm(norm)), output)
    }
    fn product(&mut self, input: ValueId, columns: u32, side: CutSide) -> (OperatorId, ValueId) {
        let output = self.value(columns);
        let inputs = self.graph.values[input.0 as usize].columns();
        let cut = Some(Cut { axis: Axis::Columns, side, count: self.inner });
        let product = Product {
            input,
            output,
            matrices: [WeightId(0)].into_iter().collect(),
            shape: (inputs, columns),
            biases: Default::default(),
            cut,
            gated: false,
            activation: None,
            cap: None,
            heads: None,
            kernel: if side == CutSide::Outputs { Kernel::Up } else { Kernel::Down },
        };
        (self.operator(Operator::Product(product)), output)
    }
    fn block(
        &mut self,
        (residual, rows): (ValueId, ValueId),
        (norms, branches, post): Shape,
    ) -> (BlockOperators, (ValueId, ValueId)) {
        let mut rows = rows;
        let mut before = Vec::new();
        for _ in 0..norms {
            let (id, normed) = self.norm(rows);
            before.push(id);
            rows = normed;
        }
        let (mut made, mut sums, mut terms) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..branches {
            let (up, inner) = self.product(rows, self.inner, CutSide::Outputs);
            let (down, sum) = self.product(inner, self.hidden, CutSide::Inputs);
            made.push((up, down));
            sums.push((down, self.inner));
            terms.push(sum);
        }
        let output = self.value(self.hidden);
        let add = Add {
            residual,
            output,
            width: self.hidden,
            sums: sums.into_iter().collect(),
            terms: terms.into_iter().collect(),
            biases: Default::default(),
            norm: None,
        };
        let add = self.operator(Operator::Add(add));
        let (norm, normed) = self.norm(output);
        let next = if post { (normed, normed) } else { (output, normed) };
        (BlockOperators { norms: before, branches: made, add, norm, post }, next)
    }
}

/// A graph of these blocks.
fn graph(spec: &ModelSpec, blocks: &[Shape]) -> (OperatorGraph, Vec<BlockOperators>) {
    let none = ModelSpec { layers: 0, ..spec.clone() };
    let mut graph = OperatorGraph::of(&none);
    graph.weights = vec![Weight::Vector(Vector::FinalNorm)];
    let mut rows = (graph.last, graph.last);
    let mut building = Building { graph, hidden: spec.hidden, inner: spec.intermediate };
    let mut made = Vec::new();
    for block in blocks {
        let (block, next) = building.block(rows, *block);
        made.push(block);
        rows = next;
    }
    building.graph.last = rows.1;
    (building.graph, made)
}

/// One device's program while it is built.
struct ProgramBuilder<'a> {
    graph: &'a OperatorGraph,
    plan: &'a Plan,
    program: Program,
    layer: u32,
}

impl<'a> ProgramBuilder<'a> {
    fn new(graph: &'a OperatorGraph, plan: &'a Plan, rank: usize) -> Self {
        let others = || (0..plan.ring.len()).filter(|at| *at != rank).map(|at| Rank(at as u16));
        let lanes = std::iter::once(Lane::Compute)
            .chain(others().map(Lane::Send))
            .chain(others().map(Lane::Receive));
        let program = Program {
            rank: Rank(rank as u16),
            phase: Phase::Prefill,
            wire: WireType::F32,
            activations: galaxy_common::Activations::default(),
            tensors: vec![],
            slots: vec![],
            operations: vec![],
            lanes: lanes.map(|lane| (lane, vec![])).collect(),
            outputs: vec![],
        };
        Self { graph, plan, program, layer: 0 }
    }

    fn tensor(&mut self, role: Role, width: u32) -> Region {
        let staged = matches!(role, Role::SumTile);
        let memory = if staged { Memory::Staging } else { Memory::Device };
        let rows = Span::<Row>::first(ROWS);
        let slot = SlotId(self.program.slots.len() as u32);
        let bytes = 4 * u64::from(ROWS) * u64::from(width);
        self.program.slots.push(Slot { memory, start: 0, bytes });
        let element = memory.element(WireType::F32);
        self.program.tensors.push(Tensor { role, rows, width, memory, element, slot });
        let columns = Span::<Column>::first(width);
        Region { tensor: TensorId(self.program.tensors.len() as u32 - 1), rows, columns }
    }

    fn lane(&self, lane: Lane) -> LaneId {
        let at = self.program.lanes.iter().position(|(of, _)| *of == lane);
        LaneId(at.expect("a lane for each peer") as u8)
    }

    fn push(
        &mut self,
        lane: Lane,
        kind: OpKind,
        reads: &[Region],
        writes: &[Region],
        wait: Option<Lane>,
    ) {
        let lane = self.lane(lane);
        let waits = wait.map(|lane| {
            let lane = self.lane(lane);
            Wait { lane, count: self.program.lanes[usize::from(lane.0)].1.len() as u32 }
        });
        let id = OpId(self.program.operations.len() as u32);
        self.program.lanes[usize::from(lane.0)].1.push(id);
        self.program.operations.push(Operation {
            kind,
            lane,
            reads: reads.into(),
            writes: writes.into(),
            waits: waits.into_iter().collect(),
            takes: Bytes(0),
            gives: Bytes(0),
            block: Block::Mlp,
            layer: self.layer,
        });
    }

    fn compute(&mut self, kind: OpKind, reads: &[Region], writes: &[Region]) {
        self.push(Lane::Compute, kind, reads, writes, None);
    }

    /// The sums of all devices: the own ones go to each other device, and theirs are added in rank order.
    fn all(&mut self, own: Option<Region>, hidden: u32) -> Region {
        let me = usize::from(self.program.rank.0);
        let has = |at: usize| !self.plan.ring[at].prefill.block(self.layer).columns.is_empty();
        let layer = self.layer;
        let transfer = |from: usize| 100 * layer + from as u32;
        let (mut sum, count) = (own, self.plan.ring.len());
        let givers: Vec<(usize, u32)> =
            (0..count).filter(|&at| has(at)).map(|at| (at, transfer(at))).collect();
        if let Some(own) = own {
            let tile = self.tensor(Role::SumTile, hidden);
            self.compute(OpKind::Export { staged: false }, &[own], &[tile]);
            let kind = OpKind::Send { transfer: transfer(me), tile: 0 };
            for to in (0..count).filter(|at| *at != me).map(|at| Rank(at as u16)) {
                self.push(Lane::Send(to), kind, &[tile], &[], Some(Lane::Compute));
            }
        }
        for (from, transfer) in givers.into_iter().filter(|(from, _)| *from != me) {
            let lane = Lane::Receive(Rank(from as u16));
            let tile = self.tensor(Role::SumTile, hidden);
            self.push(lane, OpKind::Receive { transfer, tile: 0 }, &[], &[tile], None);
            let more = self.tensor(Role::Partial, hidden);
            match sum {
                Some(sum) => {
                    self.push(Lane::Compute, OpKind::Add, &[sum, tile], &[more], Some(lane))
                }
                None => self.push(Lane::Compute, OpKind::Import, &[tile], &[more], Some(lane)),
            }
            sum = Some(more);
        }
        sum.expect("somebody has columns")
    }

    fn run(&mut self, spec: &ModelSpec, blocks: &[BlockOperators]) {
        let rank = usize::from(self.program.rank.0);
        let mut residual = self.tensor(Role::Residual, spec.hidden);
        self.compute(OpKind::Embed(self.graph.embed), &[], &[residual]);
        let mut rows = residual;
        for (layer, block) in (0..).zip(blocks) {
            self.layer = layer;
            for norm in &block.norms {
                let normed = self.tensor(Role::Normed, spec.hidden);
                self.compute(OpKind::Rows(*norm), &[rows], &[normed]);
                rows = normed;
            }
            let part = &self.plan.ring[rank].prefill;
            let columns = part.block(layer).columns.len();
            let mut own: Option<Region> = None;
            for (up, down) in block.branches.iter().filter(|_| columns > 0) {
                let product = |id| self.graph.product_of(id, part, layer).expect("a product");
                let (up, down) = (product(*up), product(*down));
                let inner = self.tensor(Role::Intermediate, columns);
                self.compute(up, &[rows], &[inner]);
                let sum = self.tensor(Role::Partial, spec.hidden);
                let reads: Vec<Region> = [inner].into_iter().chain(own).collect();
                self.compute(down, &reads, &[sum]);
                own = Some(sum);
            }
            let sum = self.all(own, spec.hidden);
            let joined = self.tensor(Role::Residual, spec.hidden);
            let BlockOperators { add, norm, post, .. } = *block;
            let kind = OpKind::AddNorm { add, norm, post, partial: true, staged: false };
            if post {
                self.compute(kind, &[residual, sum], &[joined]);
                rows = joined;
            } else {
                let normed = self.tensor(Role::Normed, spec.hidden);
                self.compute(kind, &[residual, sum], &[joined, normed]);
                rows = normed;
            }
            residual = joined;
        }
    }
}

#[derive(Debug)]
struct Case {
    graph: OperatorGraph,
    plan: Plan,
    shape: BatchShape,
    programs: Vec<Program>,
}

impl Case {
    fn verify(&self) -> Result<(), VerifyError> {
        let pieces = vec![Vec::new(); self.plan.ring.len()];
        verify_graph(&self.graph, pieces, &self.plan, &self.shape, &self.programs)
    }
}

fn any_case() -> impl Arbitrary<Value = Case> {
    let blocks = prop::collection::vec((0u32..3, 1u32..4, any::<bool>()), 1..5);
    let columns = prop::collection::vec(0u32..4, 1..5);
    (blocks, columns).prop_map(|(blocks, mut columns)| {
        if columns.iter().all(|weight| *weight == 0) {
            columns[0] = 1;
        }
        let mut spec = spec(12, false, false, 6, HeadSpec::None);
        spec.layers = blocks.len() as u32;
        let way = RandomLayout {
            strategy: Strategy::Megatron,
            modes: [(false, false); 2],
            exchange: Exchange::Ring,
            tiles: 1,
        };
        let weights: Vec<[u32; 4]> = columns.into_iter().map(|c| [1, c, 1, 1]).collect();
        let plan = laid_out(&way, &spec, &weights);
        let (graph, made) = graph(&spec, &blocks);
        let programs = (0..plan.ring.len()).map(|rank| {
            let mut builder = ProgramBuilder::new(&graph, &plan, rank);
            builder.run(&spec, &made);
            builder.program
        });
        let programs = programs.collect();
        let shape = BatchShape::single(ROWS, Wanted::Nothing).unwrap();
        Case { graph, plan, shape, programs }
    })
}

/// Puts another operator of the same kind, or a smaller share, into an operation; false where there is
/// none.
fn change(graph: &OperatorGraph, kind: &mut OpKind, by: u32) -> bool {
    let count = graph.operators.len() as u32;
    let other = |id: &mut OperatorId| {
        let old = *id;
        let alike = |a: OperatorId| {
            let kinds = (graph.get(a), graph.get(old));
            kinds.0.map(std::mem::discriminant) == kinds.1.map(std::mem::discriminant)
        };
        let mut all = (1..count).map(|step| OperatorId((old.0 + by + step) % count));
        let found = all.find(|id| *id != old && alike(*id));
        *id = found.unwrap_or(old);
        found.is_some()
    };
    match kind {
        OpKind::Rows(operator) => other(operator),
        OpKind::Product { share, .. } if by.is_multiple_of(2) => {
            *share = Span::new(share.start(), share.end() - 1);
            true
        }
        OpKind::Product { operator, .. } => other(operator),
        OpKind::AddNorm { add, .. } if by.is_multiple_of(2) => other(add),
        OpKind::AddNorm { norm, .. } => other(norm),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn programs_of_random_graphs_verify_and_changed_programs_are_refused(
        case in any_case(), rank in any::<usize>(), at in any::<usize>(), by in 0u32..1000,
    ) {
        prop_assert_eq!(case.graph.check(), Ok(()));
        prop_assert_eq!(case.verify(), Ok(()));
        let mut case = case;
        let rank = rank % case.programs.len();
        let operations = &mut case.programs[rank].operations;
        let count = operations.len();
        let changed = (0..count).any(|step| {
            change(&case.graph, &mut operations[(at % count + step) % count].kind, by)
        });
        prop_assert!(!changed || case.verify().is_err());
    }
}
