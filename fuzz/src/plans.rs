//! Plans, and the programs that they are lowered into, each with a batch shape.

use super::{Input, said};
use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, CacheType, CandidateCount, DeviceName,
    DevicePlan, Exchange, Layout, LinkType, Mode, Modes, Plan, Pooling, Rank, Room, Segment, Span,
    Strategy, Streaming, Wanted, WeightFormat, WireType,
    plan::{Extent, Phase, own_rows},
    span::Unit,
};
use galaxy_graph::{
    Costs, LinkRate, Program, budget, digest, links, program::Operation, simulate, verify,
};
use galaxy_model::{
    Activation, ClassHead, ClassRow, Formats, HeadSpec, ModelSpec, NormKind, NormPlace, Positions,
    ScoreScale,
};

/// The extent of the largest model.
const LARGEST: Extent =
    Extent { layers: 4096, heads: 1 << 16, intermediate: 1 << 22, vocabulary: 1 << 24 };

/// A plan in postcard's encoding.
pub(crate) fn plan(bytes: &[u8]) {
    let plan: Plan = match postcard::from_bytes(bytes) {
        Ok(plan) => plan,
        Err(error) => return said(&error),
    };
    let again = postcard::to_stdvec(&plan).expect("a plan has a binary form");
    assert_eq!(postcard::from_bytes(&again).as_ref(), Ok(&plan));
    if let Err(error) = plan.validate(LARGEST) {
        said(&error);
    }
    let fitting = fitting(&plan);
    if let Err(error) = plan.validate(fitting) {
        return said(&error);
    }
    for (from, to) in links(&plan) {
        assert!(from != to && from.index().max(to.index()) < plan.ring.len());
    }
    for phase in [Phase::Prefill, Phase::Decode] {
        let rows: u32 = own_rows(&plan, phase, plan.max_rows).iter().map(|s| s.len()).sum();
        assert_eq!(rows, plan.max_rows);
    }
    let Extent { layers, heads, intermediate, vocabulary } = fitting;
    let devices = plan.ring.len() as u32;
    let small = [(layers, 3), (heads, 64), (intermediate, 512), (vocabulary, 512), (devices, 4)];
    let small = small.iter().all(|(have, most)| have <= most);
    if small && heads > 0 && intermediate > 0 && plan.tiles <= 4 && plan.max_rows <= 32 {
        let head = if vocabulary > 0 {
            HeadSpec::Language { tied: true, bias: false }
        } else {
            HeadSpec::None
        };
        let spec = ModelSpec {
            heads,
            kv_heads: heads,
            intermediate,
            layers,
            vocabulary: vocabulary.max(1),
            head,
            ..encoder()
        };
        let wanted = if vocabulary > 0 { Wanted::AllLogits } else { Wanted::Hidden };
        let shape = BatchShape::single(plan.max_rows, wanted).expect("at least a row");
        all_holds(&spec, &plan, &shape);
    }
}

/// The smallest extent of a model that all spans of the plan fit.
fn fitting(plan: &Plan) -> Extent {
    let parts = || plan.ring.iter().map(|device| &device.prefill);
    let blocks = || parts().flat_map(|part| &part.blocks);
    Extent {
        layers: plan.modes.last().map_or(0, |m| m.layers.end()).min(LARGEST.layers),
        heads: blocks().map(|b| b.heads.end()).max().unwrap_or(0).min(LARGEST.heads),
        intermediate: blocks()
            .map(|b| b.columns.end())
            .max()
            .unwrap_or(0)
            .min(LARGEST.intermediate),
        vocabulary: parts().map(|p| p.vocabulary.end()).max().unwrap_or(0).min(LARGEST.vocabulary),
    }
}

/// A small model, a plan for it and a batch shape, all decided by the bytes.
pub(crate) fn lower(bytes: &[u8]) {
    let mut input = Input(bytes);
    let spec = spec(&mut input);
    let plan = planned(&mut input, &spec);
    let shape = shape(&mut input, &spec, &plan);
    let bytes = postcard::to_stdvec(&plan).expect("a plan has a binary form");
    let plan: Plan = postcard::from_bytes(&bytes).expect("its own");
    match plan.validate(spec.extent()) {
        Ok(()) => all_holds(&spec, &plan, &shape),
        Err(error) => said(&error),
    }
}

/// Checks what holds of the programs of every plan and shape that fit a model.
fn all_holds(spec: &ModelSpec, plan: &Plan, shape: &BatchShape) {
    // Whether the plan fits the devices' budgets is not asked here.
    let mut plan = plan.clone();
    plan.ring.iter_mut().for_each(|device| device.budget = Bytes(u64::MAX));
    let plan = &plan;
    let ways = links(plan);
    let needs = match budget::needs_all(spec, &Formats::default(), plan) {
        Ok(needs) => needs,
        // A parallel residual's two blocks must be cut alike.
        Err(error) => return said(&error),
    };
    // A shard holds one assignment; that phases differ in rows only is checked when it is made.
    let held = |part: &Assignment| (part.blocks.clone(), part.vocabulary);
    let agree = plan.ring.iter().all(|device| held(&device.prefill) == held(&device.decode));
    let both = agree && plan.cache.rows > 0;
    let phases = if both { &[Phase::Prefill, Phase::Decode][..] } else { &[Phase::Prefill] };
    for &phase in phases {
        let programs = match galaxy_graph::lower(spec, &Formats::default(), plan, phase, shape) {
            Ok(programs) => programs,
            Err(error) => {
                said(&error);
                continue;
            }
        };
        let again =
            galaxy_graph::lower(spec, &Formats::default(), plan, phase, shape).expect("as before");
        assert_eq!(digest(&programs), digest(&again), "each device lowers by itself");
        if let Err(error) = verify(spec, &Formats::default(), plan, shape, &programs) {
            panic!("{phase:?} of {plan:?}, {shape:?}: {error}");
        }
        for program in &programs {
            let (to, from) = program.peers();
            assert!(to.iter().all(|peer| ways.contains(&(program.rank, *peer))));
            assert!(from.iter().all(|peer| ways.contains(&(*peer, program.rank))));
            if phase == Phase::Prefill {
                let device = &plan.ring[program.rank.index()];
                let takes = budget::of_program(spec, &Formats::default(), device, program);
                let planned = needs[program.rank.index()];
                let fits = takes.total() <= planned.total();
                assert!(
                    fits,
                    "{takes:?} where {planned:?} is planned for: {plan:?}, {shape:?}, {spec:?}"
                );
            }
        }
        simulate(&programs, &Slow).expect("no deadlock");
    }
}

/// Costs by which every operation and transfer takes some time.
struct Slow;

impl Costs for Slow {
    fn compute(&self, _: &Program, _: &Operation) -> u64 {
        1000
    }
    fn link(&self, _: Rank, _: Rank) -> LinkRate {
        LinkRate { latency: 500, rate: 1e6, window: 0, burst: 0 }
    }
}

/// An encoder, of which the other models here are variants.
fn encoder() -> ModelSpec {
    ModelSpec {
        family: "bert".into(),
        hidden: 4,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_width: 2,
        intermediate: 1,
        vocabulary: 1,
        patches: None,
        norm: NormKind::Layer,
        norm_place: NormPlace::Post,
        norm_epsilon: 1e-12,
        norm_bias: true,
        norms_from_one: false,
        first_norm: true,
        sum_norms: false,
        activation: Activation::Gelu,
        gated: false,
        parallel: false,
        causal: false,
        kinds: Vec::new(),
        scores: ScoreScale { over_root: Some(8.0), by_layer: false },
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        unplaced: None,
        positions: Positions::Learned { rows: 64, offset: 0 },
        local_positions: None,
        relative_bias: None,
        token_types: 2,
        embedding_norm: true,
        head_norm: false,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        head: HeadSpec::None,
        headless: None,
    }
}

fn spec(input: &mut Input<'_>) -> ModelSpec {
    let heads = input.within(1, 6);
    let divisors: Vec<u32> = (1..=heads).filter(|n| heads.is_multiple_of(*n)).collect();
    let labels = input.within(1, 3);
    let classes = ClassHead {
        row: input.pick(&[ClassRow::First, ClassRow::Last]),
        dense: None,
        dense_bias: false,
        norm: false,
        labels,
        bias: true,
        names: (0..labels).map(|n| n.to_string()).collect(),
        problem: None,
        padding: None,
    };
    let heads_on_top = [
        HeadSpec::None,
        HeadSpec::Language { tied: true, bias: false },
        HeadSpec::Classes(classes),
    ];
    let norms = [(NormPlace::Post, false), (NormPlace::Pre, false), (NormPlace::Pre, true)];
    let (norm_place, parallel) = input.pick(&norms);
    ModelSpec {
        hidden: 2 * input.within(1, 4),
        layers: input.within(1, 3),
        heads,
        kv_heads: input.pick(&divisors),
        intermediate: input.within(1, 9),
        vocabulary: input.within(1, 9),
        norm_place,
        parallel,
        gated: input.flag(),
        causal: input.flag(),
        positions: Positions::Learned { rows: input.within(8, 32), offset: 0 },
        head: input.pick(&heads_on_top),
        ..encoder()
    }
}

fn planned(input: &mut Input<'_>, spec: &ModelSpec) -> Plan {
    let devices = input.within(1, 4);
    let layout = input.pick(&[Layout::Ring, Layout::Replicated, Layout::Stages]);
    let modes = (0..spec.layers).map(|layer| {
        let mut mode = || match layout {
            Layout::Ring => input.pick(&[Mode::Tensor, Mode::Sequence]),
            Layout::Replicated | Layout::Stages => Mode::Tensor,
        };
        Modes { layers: Span::new(layer, layer + 1), attention: mode(), mlp: mode() }
    });
    let modes: Vec<Modes> = modes.collect();
    let prefill = parts(input, spec, devices, layout, &modes);
    // Decode may split rows in another way, among those who have any.
    let mut decode = prefill.clone();
    if input.flag() {
        let owners = decode.iter_mut().filter(|part| part.row_weight > 0);
        owners.for_each(|part| part.row_weight = input.within(0, 3));
    }
    let ring = (0..).zip(prefill).zip(decode).map(|((n, prefill), decode)| DevicePlan {
        name: DeviceName::new(format!("pi-{n}")).expect("a name"),
        budget: Bytes(u64::MAX),
        threads: 1 + input.byte() as u16 % 4,
        prefill,
        decode,
        streaming: None,
    });
    let mut plan = Plan {
        model: "m".into(),
        fingerprint: "f".into(),
        strategy: Strategy::Auto,
        layout,
        ring: ring.collect(),
        modes,
        exchange: input.pick(&[Exchange::Ring, Exchange::Direct]),
        link: LinkType::Tls,
        wire: input.pick(&[WireType::F32, WireType::F16]),
        activations: galaxy_common::Activations::default(),
        tiles: input.within(1, 4) as u16,
        max_rows: input.within(1, 24),
        // Read behind all else, so that inputs found before mean the same.
        cache: match spec.causal && matches!(spec.head, HeadSpec::Language { .. }) && input.flag() {
            true => Cache {
                rows: 1 << 20,
                values: input.pick(&[CacheType::F32, CacheType::F16, CacheType::Q8]),
            },
            false => Cache::NONE,
        },
    };
    if input.flag() {
        for device in &mut plan.ring {
            device.streaming = input.flag().then(|| streaming(input));
        }
    }
    plan
}

/// Weight streaming, with a small buffer: pieces of such small models take a block each.
fn streaming(input: &mut Input<'_>) -> Streaming {
    let buffer = Bytes(4096 * u64::from(input.within(1, 6)));
    let room = input.pick(&[Room::Ring, Room::Parts(1), Room::Parts(2)]);
    let from = input.within(0, 3);
    Streaming {
        format: WeightFormat::F32,
        piece: Streaming::PIECE,
        buffer,
        room,
        loaders: input.within(1, 3) as u16,
        resident: vec![Span::new(from, from + input.within(1, 4))],
    }
}

/// The assignments of all devices in one phase: mostly those that make a valid plan.
fn parts(
    input: &mut Input<'_>,
    spec: &ModelSpec,
    devices: u32,
    layout: Layout,
    modes: &[Modes],
) -> Vec<Assignment> {
    let vocabulary = cut(input, spec.extent().vocabulary, devices);
    let none = || Assignment { blocks: Vec::new(), row_weight: 0, vocabulary: Span::empty() };
    let mut parts = vec![none(); devices as usize];
    for (part, vocabulary) in parts.iter_mut().zip(vocabulary) {
        part.vocabulary = vocabulary;
        part.row_weight = u32::from(input.byte()) % 5;
    }
    let all = (Span::first(spec.heads), Span::first(spec.intermediate));
    let mut stage = 0;
    for modes in modes {
        let mut heads = cut(input, spec.heads, devices);
        let mut columns = cut(input, spec.intermediate, devices);
        if layout == Layout::Stages {
            stage = input.within(stage, devices - 1);
        }
        for (rank, part) in parts.iter_mut().enumerate() {
            let owns = part.row_weight > 0;
            match layout {
                Layout::Stages => {
                    let here = rank == stage as usize;
                    (heads[rank], columns[rank]) =
                        if here { all } else { (Span::empty(), Span::empty()) };
                }
                Layout::Ring | Layout::Replicated => {
                    if owns && modes.attention == Mode::Sequence {
                        heads[rank] = all.0;
                    }
                    if owns && modes.mlp == Mode::Sequence {
                        columns[rank] = all.1;
                    }
                }
            }
            let (heads, columns) = (heads[rank], columns[rank]);
            match part.blocks.last_mut() {
                Some(last) if (last.heads, last.columns) == (heads, columns) => {
                    last.layers = Span::new(last.layers.start(), modes.layers.end());
                }
                _ if heads.is_empty() && columns.is_empty() => {}
                _ => part.blocks.push(BlockAssignment { layers: modes.layers, heads, columns }),
            }
        }
    }
    if layout == Layout::Stages {
        parts.iter_mut().for_each(|part| part.row_weight = 0);
        parts[stage as usize].row_weight = 1;
    }
    parts
}

/// Cuts `0..whole` into one span for each device, in any order.
fn cut<U: Unit>(input: &mut Input<'_>, whole: u32, devices: u32) -> Vec<Span<U>> {
    let mut ends: Vec<u32> = (1..devices).map(|_| input.within(0, whole)).collect();
    ends.push(whole);
    ends.sort_unstable();
    let mut from = 0;
    let runs = ends.into_iter().map(|to| {
        let run = Span::new(from, to);
        from = to;
        run
    });
    let mut runs: Vec<Span<U>> = runs.collect();
    runs.rotate_left(input.within(0, devices - 1) as usize);
    runs
}

fn shape(input: &mut Input<'_>, spec: &ModelSpec, plan: &Plan) -> BatchShape {
    let poolings =
        [Pooling::Cls, Pooling::Mean, Pooling::MeanSqrtLen, Pooling::Max, Pooling::LastToken];
    let mut wanted = vec![Wanted::Hidden];
    wanted.extend(poolings.map(Wanted::Pooled));
    match spec.head {
        HeadSpec::None => {}
        HeadSpec::Classes(_) => wanted.extend([Wanted::Classes; 3]),
        HeadSpec::Language { .. } => {
            wanted.extend([Wanted::LastLogits, Wanted::AllLogits, Wanted::LastLogits]);
        }
    }
    let goes_on = plan.cache.rows > 0;
    if goes_on {
        wanted.push(Wanted::Nothing);
        wanted.extend(
            [CandidateCount::Few, CandidateCount::Many, CandidateCount::All].map(Wanted::Token),
        );
    }
    let segments = (0..input.within(1, 4)).map(|slot| Segment {
        slot,
        context_len: 0,
        rows: input.within(1, plan.max_rows),
        wanted: input.pick(&wanted),
        cached: goes_on && input.flag(),
    });
    BatchShape::new(segments.collect()).expect("a few rows")
}
