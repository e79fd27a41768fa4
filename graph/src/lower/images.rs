//! Networks of pools and activations over images, lowered by hand: rows of each value are split over devices
//! by weight, and go to all devices whose windows reach them. The verifier passes what is right and finds
//! what is changed.
#![allow(clippy::unwrap_used)]

use super::build::{Builder, TensorRows as Tensor, Tile};
use crate::{
    Program, VerifyError,
    operators::{
        Activate, Axes, Input, Operate, Operator, OperatorGraph, OperatorId, Pool, Pooling, Value,
        ValueId, Window,
    },
    program::{Element, OpKind, Operation, Role, TensorId},
    verify_graph,
};
use galaxy_common::{
    Assignment, BatchShape, Bytes, Cache, Column, DeviceName, DevicePlan, Exchange, Layout,
    LinkType, Plan, Rank, Row, Segment, Span, Strategy, Wanted, WireType, plan::Phase,
};
use galaxy_model::Activation;
use proptest::prelude::{Strategy as Arbitrary, *};
use std::sync::Arc;

/// An operator of a network: which of the earlier values is read, counted from the last, and the windows of a
/// pool along height and width, or an activation.
type Step = (usize, Option<[Window; 2]>);

#[derive(Debug)]
struct Network {
    graph: OperatorGraph,
    images: u32,
}

impl Network {
    fn new(images: u32, axes: Axes, steps: &[Step]) -> Self {
        let value = |axes| Value { name: "an image", layer: 0, axes };
        let input = Operator::Input(Input { output: ValueId(0), axes });
        let mut graph = OperatorGraph::default();
        graph.values.push(value(axes));
        graph.operators.push(input);
        for &(back, windows) in steps {
            let last = graph.values.len() - 1;
            let input = ValueId((last - back.min(last)) as u32);
            let output = ValueId(last as u32 + 1);
            let pooling = Pooling::Average { padded: false };
            let operator = match windows {
                Some([rows, pixels]) => {
                    Operator::Pool(Pool { input, output, pooling, rows, pixels })
                }
                None => {
                    Operator::Activate(Activate { input, output, activation: Activation::Relu })
                }
            };
            let read = graph.values[input.0 as usize].axes;
            // What does not fit is left out.
            let Ok(axes) = operator.operate().shape(&[read]) else { continue };
            graph.values.push(value(axes));
            graph.operators.push(operator);
        }
        Self { graph, images }
    }

    fn axes(&self, value: usize) -> (u32, u32) {
        match self.graph.values[value].axes {
            Axes::Image { height, width, channels } => (height, width * channels),
            Axes::Text { .. } => unreachable!("all values are images"),
        }
    }

    /// The operator that computes a value.
    fn maker(&self, value: usize) -> &dyn Operate {
        self.graph.operators[value].operate()
    }

    /// The rows of a value that a device computes.
    fn own(&self, value: usize, weights: &[u32], rank: usize) -> Span<Row> {
        let rows = self.axes(value).0 * self.images;
        let until = |rank: usize| weights[..rank].iter().sum::<u32>();
        let at = |rank| rows * until(rank) / until(weights.len());
        Span::new(at(rank), at(rank + 1))
    }

    /// The rows, over all images, that an operator must read to compute the rows `own` of its result.
    fn needs(&self, made: usize, own: Span<Row>) -> Span<Row> {
        let operate = self.maker(made);
        let read = operate.reads()[0].0 as usize;
        let image = |value: usize, at: u32| {
            let height = self.axes(value).0;
            Span::new(at * height, (at + 1) * height)
        };
        let of = |at| operate.reach(0).of(own, image(made, at), image(read, at));
        (0..self.images).map(of).fold(Span::empty(), both)
    }

    /// The rows of a value that a device has a tensor for: its own, and those that it needs of others.
    fn has(&self, value: usize, weights: &[u32], rank: usize) -> Span<Row> {
        let readers = (1..self.graph.values.len())
            .filter(|made| self.maker(*made).reads()[0].0 as usize == value);
        let needs = readers.map(|made| self.needs(made, self.own(made, weights, rank)));
        needs.fold(self.own(value, weights, rank), both)
    }

    fn program(&self, plan: &Plan, weights: &[u32], rank: usize) -> Program {
        let graph = Arc::new(self.graph.clone());
        let mut b = Builder::new(&graph, plan, Phase::Prefill, Rank(rank as u16), 4);
        let mut tensors: Vec<Option<Tensor>> = Vec::new();
        let count = weights.len();
        for value in 0..self.graph.values.len() {
            let (own, has) = (self.own(value, weights, rank), self.has(value, weights, rank));
            let width = self.axes(value).1;
            let tensor = (!has.is_empty()).then(|| b.tensor(Role::Residual, has, width));
            tensors.push(tensor);
            let Some(tensor) = tensor else { continue };
            let operator = OperatorId(value as u32);
            match self.maker(value).reads().first() {
                _ if own.is_empty() => {}
                None => b.compute(OpKind::Embed(operator), &[], &[tensor.rows(own)]),
                Some(read) => {
                    let from = tensors[read.0 as usize].unwrap().rows(self.needs(value, own));
                    b.compute(OpKind::Rows(operator), &[from], &[tensor.rows(own)]);
                }
            }
            let transfer =
                |from: usize, to: usize| (value * count * count + from * count + to) as u32;
            for to in (0..count).filter(|to| *to != rank) {
                let rows = self.has(value, weights, to).intersect(own);
                if !rows.is_empty() {
                    let tile = b.tensor(Role::RowTile, rows, width);
                    b.compute(
                        OpKind::Export { staged: false },
                        &[tensor.rows(rows)],
                        &[tile.all()],
                    );
                    b.send(Rank(to as u16), transfer(rank, to), 0, tile);
                }
            }
            for from in (0..count).filter(|from| *from != rank) {
                let rows = self.own(value, weights, from).intersect(has);
                if !rows.is_empty() {
                    let (peer, id) = (Rank(from as u16), transfer(from, rank));
                    let tile = Tile { role: Role::RowTile, rows, width };
                    let tile = b.receive(peer, id, 0, tile);
                    b.compute(OpKind::Import, &[tile.all()], &[tensor.rows(rows)]);
                }
            }
        }
        b.finish().unwrap()
    }
}

fn both(a: Span<Row>, b: Span<Row>) -> Span<Row> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => Span::new(a.start().min(b.start()), a.end().max(b.end())),
    }
}

fn plan(devices: usize, wire: WireType) -> Plan {
    let nothing = Assignment { blocks: vec![], row_weight: 1, vocabulary: Span::empty() };
    let device = |at| DevicePlan {
        name: DeviceName::new(format!("device-{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        prefill: nothing.clone(),
        decode: nothing.clone(),
        streaming: None,
    };
    Plan {
        model: "images".into(),
        fingerprint: String::new(),
        strategy: Strategy::Sequence,
        layout: Layout::Ring,
        modes: vec![],
        exchange: Exchange::Direct,
        link: LinkType::Plain,
        wire,
        activations: galaxy_common::Activations::default(),
        tiles: 1,
        max_rows: 64,
        cache: Cache::NONE,
        ring: (0..devices).map(device).collect(),
    }
}

#[derive(Debug)]
struct Case {
    network: Network,
    plan: Plan,
    shape: BatchShape,
    programs: Vec<Program>,
}

impl Case {
    fn new(network: Network, weights: &[u32], wire: WireType) -> Self {
        let plan = plan(weights.len(), wire);
        let rows = network.axes(0).0;
        let image =
            Segment { slot: 0, context_len: 0, cached: false, rows, wanted: Wanted::Nothing };
        let image = |slot| Segment { slot, ..image };
        let shape = BatchShape::new((0..network.images).map(image).collect()).unwrap();
        let programs = (0..weights.len()).map(|rank| network.program(&plan, weights, rank));
        Self { programs: programs.collect(), network, plan, shape }
    }

    fn verify(&self) -> Result<(), VerifyError> {
        let pieces = vec![Vec::new(); self.plan.ring.len()];
        verify_graph(&self.network.graph, pieces, &self.plan, &self.shape, &self.programs)
    }

    /// What the verifier finds after a change of the operation of this number among those of a kind.
    fn changed(
        mut self,
        is: impl Fn(&Operation) -> bool,
        number: usize,
        change: impl FnOnce(&mut Operation),
    ) -> Result<(), VerifyError> {
        let all = self.programs.iter_mut().flat_map(|program| &mut program.operations);
        let mut all: Vec<_> = all.filter(|op| is(op)).collect();
        if all.is_empty() {
            return self.verify();
        }
        let number = number % all.len();
        change(all[number]);
        self.verify()
    }
}

fn any_case() -> impl Arbitrary<Value = Case> {
    let window = (1u32..4, 1u32..3, 1u32..4, 0u32..3, 0u32..3).prop_map(
        |(kernel, dilation, stride, before, after)| {
            let window = Window { kernel, dilation, stride, before, after };
            let most = window.extent() - 1;
            Window { before: before.min(most), after: after.min(most), ..window }
        },
    );
    let step = (0usize..3, prop::option::weighted(0.7, [window.clone(), window]));
    let axes = (1u32..15, 1u32..8, 1u32..4).prop_map(|(height, width, channels)| Axes::Image {
        height,
        width,
        channels,
    });
    let steps = prop::collection::vec(step, 1..7);
    let weights = prop::collection::vec(0u32..5, 1..5);
    let wire = prop_oneof![Just(WireType::F32), Just(WireType::F16)];
    (1u32..4, axes, steps, weights, wire).prop_map(|(images, axes, steps, mut weights, wire)| {
        weights[0] += u32::from(weights.iter().all(|weight| *weight == 0));
        Case::new(Network::new(images, axes, &steps), &weights, wire)
    })
}

fn is_window(op: &Operation) -> bool {
    op.writes.get(1).is_some()
}

/// A span without its first or its last unit.
fn fewer<U: galaxy_common::span::Unit>(span: Span<U>, first: bool) -> Span<U> {
    match first {
        true => Span::new(span.start() + 1, span.end()),
        false => Span::new(span.start(), span.end() - 1),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn image_programs_verify_and_changed_regions_are_refused(
        case in any_case(), number in 0usize..1000, first: bool, how in 0..5,
    ) {
        prop_assert_eq!(case.network.graph.check(), Ok(()));
        prop_assert_eq!(case.verify(), Ok(()));
        let there = case.programs.iter().flat_map(|p| &p.operations).any(is_window);
        let found = match how {
            0 => {
                let shrink = |op: &mut Operation| op.reads[0].rows = fewer(op.reads[0].rows, first);
                case.changed(is_window, number, shrink)
            }
            1 => case.changed(is_window, number, |op| {
                op.reads[0].columns = fewer(op.reads[0].columns, true);
            }),
            2 => case.changed(is_window, number, |op| {
                op.writes[1].columns = fewer(op.writes[1].columns, first);
            }),
            3 => case.changed(is_window, number, |op| { op.writes.pop(); }),
            _ => {
                let mut case = case;
                let mut tensors: Vec<_> =
                    case.programs.iter_mut().flat_map(|p| &mut p.tensors).collect();
                let at = number % tensors.len();
                tensors[at].element = match tensors[at].element {
                    Element::F16 => Element::F32,
                    _ => Element::F16,
                };
                let found = case.verify();
                prop_assert!(found.is_err());
                return Ok(());
            }
        };
        let right = match how {
            0 | 1 => matches!(found, Err(VerifyError::Reach { .. })),
            _ => matches!(found, Err(VerifyError::Workspace { .. })),
        };
        prop_assert!(right || !there && found.is_ok(), "{:?}", found);
    }
}

const SAME: Window = Window { kernel: 3, dilation: 1, stride: 1, before: 1, after: 1 };
const HALF: Window = Window { kernel: 2, dilation: 1, stride: 2, before: 0, after: 0 };

/// 7 rows over 4 devices, two of which have two.
fn seven_rows(steps: &[Step]) -> Case {
    let axes = Axes::Image { height: 7, width: 5, channels: 2 };
    Case::new(Network::new(1, axes, steps), &[2, 2, 1, 2], WireType::F32)
}

#[test]
fn halo_rows_go_to_neighbours_and_a_missing_row_is_an_error() {
    let case = seven_rows(&[(0, Some([SAME; 2])), (0, Some([HALF; 2]))]);
    assert_eq!(case.verify(), Ok(()));
    let count = |program: &Program, is: fn(&OpKind) -> bool| {
        program.operations.iter().filter(|op| is(&op.kind)).count()
    };
    // Each neighbour's edge, and of the next value what windows of two rows are cut by.
    let imports = case.programs.iter().map(|p| count(p, |kind| *kind == OpKind::Import));
    assert_eq!(imports.collect::<Vec<_>>(), vec![1, 3, 3, 2]);
    let is_import = |op: &Operation| op.kind == OpKind::Import;
    let found = case.changed(is_import, 0, |op| {
        op.writes[0].rows = Span::empty();
        op.reads[0].rows = Span::empty();
    });
    assert!(matches!(found, Err(VerifyError::UncoveredRead { .. })), "{found:?}");
    // Rows of a tile that are put elsewhere.
    let case = seven_rows(&[(0, Some([SAME; 2]))]);
    let found = case.changed(is_import, 1, |op| {
        let rows = op.writes[0].rows;
        op.writes[0].rows = Span::new(rows.start() + 2, rows.end() + 2);
    });
    assert!(found.is_err());
}

#[test]
fn a_missing_row_at_a_clipped_window_edge_is_an_error() {
    for (rank, first) in [(0, true), (3, false)] {
        let mut case = seven_rows(&[(0, Some([SAME; 2]))]);
        let operations = &mut case.programs[rank].operations;
        let op = operations.iter_mut().find(|op| is_window(op)).unwrap();
        let whole = op.reads[0].rows;
        op.reads[0].rows = fewer(whole, first);
        let found = case.verify();
        let Err(VerifyError::Reach { needed, .. }) = &found else { panic!("{found:?}") };
        assert_eq!(*needed, format!("{whole:?}"));
    }
    // Pixels at the edge of a row.
    let case = seven_rows(&[(0, Some([SAME; 2]))]);
    let found = case.changed(is_window, 0, |op| op.reads[0].columns = Span::<Column>::new(0, 9));
    assert!(matches!(found, Err(VerifyError::Reach { .. })), "{found:?}");
}

/// The slots of what an operation reads first and of what it writes.
fn slots(program: &Program, at: usize) -> [u32; 2] {
    let op = &program.operations[at];
    [op.reads[0].tensor, op.writes[0].tensor].map(|tensor| program.tensor(tensor).slot.0)
}

#[test]
fn tensors_without_later_readers_are_overwritten_in_place() {
    let axes = Axes::Image { height: 7, width: 5, channels: 2 };
    let one = |steps: &[Step]| Case::new(Network::new(1, axes, steps), &[1], WireType::F32);
    let case = one(&[(0, None), (0, None), (0, Some([SAME; 2]))]);
    assert_eq!(case.verify(), Ok(()));
    let program = &case.programs[0];
    assert!([1, 2].iter().all(|at| slots(program, *at) == [0, 0]));
    let takes = |at: usize| (program.operations[at].takes.0, program.operations[at].gives.0);
    assert_eq!((takes(1), takes(2)), ((0, 0), (0, 0)));
    let all = |of: fn(&Operation) -> u64| program.operations.iter().map(of).sum::<u64>();
    assert_eq!(all(|op| op.takes.0), all(|op| op.gives.0));
    // Image, result and the rows between.
    let workspace = (6 + 3) * 10 * 4;
    assert_eq!(takes(3).0, 7 * 10 * 4 + workspace);
    // Of what is read again it takes another.
    let case = one(&[(0, None), (1, None)]);
    assert_eq!(case.verify(), Ok(()));
    assert_eq!((slots(&case.programs[0], 1), slots(&case.programs[0], 2)), ([0, 1], [0, 0]));
}

#[test]
fn overwriting_a_tensor_before_the_last_read_is_an_error() {
    let axes = Axes::Image { height: 7, width: 5, channels: 2 };
    let one = |steps: &[Step]| Case::new(Network::new(1, axes, steps), &[1], WireType::F32);
    let reuse = |case: Case, tensor: u32, slot: u32| {
        let mut case = case;
        case.programs[0].tensors[tensor as usize].slot.0 = slot;
        let found = case.verify();
        assert!(matches!(found, Err(VerifyError::Reuse { .. })), "{found:?}");
    };
    // An activation in the place of what another one reads after it.
    reuse(one(&[(0, None), (1, None)]), 1, 0);
    // Windows read what they would have overwritten.
    reuse(one(&[(0, Some([SAME; 2]))]), 1, 0);
    // Another element of what is read is not its own place.
    let mut case = seven_rows(&[(0, None)]);
    let program = &mut case.programs[0];
    assert_eq!(slots(program, 1), [0, 0]);
    program.tensors[1].rows = Span::new(1, 2);
    for op in &mut program.operations {
        let regions = op.reads.iter_mut().chain(&mut op.writes);
        regions.filter(|r| r.tensor == TensorId(1)).for_each(|r| r.rows = Span::new(1, 2));
    }
    let found = case.verify();
    assert!(matches!(found, Err(VerifyError::Reuse { .. })), "{found:?}");
}
