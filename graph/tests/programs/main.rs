//! Programs of random plans: what the verifier passes never deadlocks, and what is broken on
//! purpose it finds.
#![allow(clippy::unwrap_used)]

mod choices;
mod faults;
mod formats;
mod graphs;
mod operators;
mod planes;
mod schedule;
mod windows;

use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, CandidateCount, DeviceName, DevicePlan,
    Exchange, Layer, LinkType, Mode, Modes, Plan, Pooling, Rank, Room, Segment, Span, Strategy,
    Streaming, Wanted, WeightFormat, WireType, apportion, plan::Phase,
};
use galaxy_graph::{
    Costs, LinkRate, Lowered, Program, VerifyError, Whole, budget, lower,
    operators::OperatorGraph,
    pieces,
    program::{Lane, OpKind, Operation},
    simulate, verify,
};
use galaxy_model::{
    Activation, ClassActivation, ClassHead, ClassRow, Formats, HeadSpec, LayerKind, ModelSpec,
    NormKind, NormPlace, Positions, ScoreScale, SlidingWindow,
};
use proptest::prelude::{Strategy as Arbitrary, *};
use std::sync::Arc;

fn spec(hidden: u32, pre: bool, causal: bool, kv: u32, head: HeadSpec) -> ModelSpec {
    ModelSpec {
        family: "test".into(),
        hidden,
        layers: 2,
        heads: 6,
        kv_heads: kv,
        head_width: 2,
        intermediate: 10,
        vocabulary: 11,
        patches: None,
        norm: NormKind::Layer,
        norm_place: if pre { NormPlace::Pre } else { NormPlace::Post },
        norm_epsilon: 1e-5,
        norm_bias: true,
        norms_from_one: false,
        first_norm: true,
        sum_norms: false,
        activation: Activation::Gelu,
        gated: false,
        parallel: false,
        causal,
        kinds: Vec::new(),
        scores: ScoreScale { over_root: Some(8.0), by_layer: false },
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        unplaced: None,
        positions: Positions::Learned { rows: 300, offset: 0 },
        local_positions: None,
        relative_bias: None,
        token_types: 0,
        embedding_norm: false,
        head_norm: false,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        head,
        headless: None,
    }
}

/// A width of which one row is 16 KiB.
const WIDE: u32 = 4096;

fn language() -> HeadSpec {
    HeadSpec::Language { tied: true, bias: false }
}
fn classes() -> HeadSpec {
    HeadSpec::Classes(ClassHead {
        row: ClassRow::First,
        dense: Some(ClassActivation::Tanh),
        dense_bias: false,
        norm: false,
        labels: 3,
        bias: true,
        names: vec!["a".into(), "b".into(), "c".into()],
        problem: None,
        padding: None,
    })
}

/// A plan whose devices have these weights for (heads, columns, rows, vocabulary).
fn plan(strategy: Strategy, tiles: u16, spec: &ModelSpec, weights: &[[u32; 4]]) -> Plan {
    let column = |k: usize| -> Vec<u32> { weights.iter().map(|w| w[k]).collect() };
    let extent = spec.extent();
    let (heads, columns, vocabulary) = (
        apportion(extent.heads, &column(0)),
        apportion(extent.intermediate, &column(1)),
        apportion(extent.vocabulary, &column(3)),
    );
    let ring = (0..weights.len())
        .map(|i| {
            let part = Assignment {
                blocks: vec![BlockAssignment {
                    layers: Span::first(extent.layers),
                    heads: heads[i],
                    columns: columns[i],
                }],
                row_weight: weights[i][2],
                vocabulary: vocabulary[i],
            };
            DevicePlan {
                name: DeviceName::new(format!("d{i}")).unwrap(),
                budget: Bytes(1 << 40),
                threads: 1,
                prefill: part.clone(),
                decode: part,
                streaming: None,
            }
        })
        .collect();
    Plan {
        model: "test".into(),
        fingerprint: String::new(),
        strategy,
        layout: strategy.layout(),
        modes: Modes::uniform(spec.layers, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: WireType::F32,
        activations: galaxy_common::Activations::default(),
        tiles,
        max_rows: 400,
        cache: Cache::NONE,
        ring,
    }
}

/// The parts of `needs` that running takes.
fn parts(needs: &budget::Needs) -> [Bytes; 4] {
    [needs.activations, needs.staging, needs.results, needs.scratch]
}

struct Random(u64, u64);
impl Costs for Random {
    fn compute(&self, program: &Program, op: &Operation) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (self.0, program.rank, op).hash(&mut hasher);
        hasher.finish() % 1000
    }
    fn link(&self, from: Rank, to: Rank) -> LinkRate {
        let seed = self.0 ^ u64::from(from.0 * 31 + to.0);
        LinkRate {
            latency: seed % 5000,
            rate: (seed % 100 + 1) as f64 * 1e6,
            window: self.1,
            burst: seed % 3 * 100,
        }
    }
}

/// How a random plan is laid out.
#[derive(Clone, Debug)]
struct RandomLayout {
    strategy: Strategy,
    /// For even and odd layers, whether attention and the MLP are cut by rows.
    modes: [(bool, bool); 2],
    exchange: Exchange,
    tiles: u16,
}

fn any_way() -> impl Arbitrary<Value = RandomLayout> {
    let strategy = prop::sample::select(vec![
        Strategy::Galaxy,
        Strategy::Galaxy,
        Strategy::Auto,
        Strategy::Auto,
        Strategy::Sequence,
        Strategy::Megatron,
        Strategy::Pipeline,
    ]);
    let exchange = prop::sample::select(vec![Exchange::Ring, Exchange::Direct]);
    (strategy, any::<[(bool, bool); 2]>(), exchange, 1u16..20).prop_map(
        |(strategy, modes, exchange, tiles)| RandomLayout { strategy, modes, exchange, tiles },
    )
}

/// The plan of these weights in this way.
fn laid_out(way: &RandomLayout, spec: &ModelSpec, weights: &[[u32; 4]]) -> Plan {
    let mut plan = plan(way.strategy, way.tiles, spec, weights);
    plan.exchange = way.exchange;
    let extent = spec.extent();
    match way.strategy {
        Strategy::Pipeline => stages(&mut plan, extent.layers, weights),
        Strategy::Auto | Strategy::Sequence => {
            let mode = |sequence| {
                let sequence = sequence || way.strategy == Strategy::Sequence;
                if sequence { Mode::Sequence } else { Mode::Tensor }
            };
            let each = (0..extent.layers).map(|layer| {
                let (attention, mut mlp) = way.modes[layer as usize % 2];
                if spec.parallel {
                    mlp = attention;
                }
                let layers = Span::new(layer, layer + 1);
                Modes { layers, attention: mode(attention), mlp: mode(mlp) }
            });
            plan.modes = each.collect();
            let modes = plan.modes.clone();
            for device in &mut plan.ring {
                let whole = device.prefill.blocks[0];
                let owns = device.prefill.row_weight > 0;
                let blocks = modes.iter().map(|m| BlockAssignment {
                    layers: m.layers,
                    heads: match m.attention {
                        Mode::Tensor => whole.heads,
                        Mode::Sequence if owns => Span::first(extent.heads),
                        Mode::Sequence => Span::empty(),
                    },
                    columns: match m.mlp {
                        Mode::Tensor => whole.columns,
                        Mode::Sequence if owns => Span::first(extent.intermediate),
                        Mode::Sequence => Span::empty(),
                    },
                });
                device.prefill.blocks = blocks.collect();
                device.decode = device.prefill.clone();
            }
        }
        _ => {}
    }
    plan
}

/// Cuts layers by the first of the weights; the last device that has some owns all rows.
fn stages(plan: &mut Plan, layers: u32, weights: &[[u32; 4]]) {
    let extent = plan.ring.iter().fold((0, 0), |(h, c), d| {
        let block = d.prefill.blocks[0];
        (h + block.heads.len(), c + block.columns.len())
    });
    let of_layers: Vec<u32> = weights.iter().map(|w| w[0]).collect();
    let cut = apportion::<Layer>(layers, &of_layers);
    let last = cut.iter().rposition(|l| !l.is_empty()).unwrap();
    for (at, (device, &layers)) in plan.ring.iter_mut().zip(&cut).enumerate() {
        let (heads, columns) = (Span::first(extent.0), Span::first(extent.1));
        let some = !layers.is_empty();
        device.prefill.blocks =
            some.then_some(BlockAssignment { layers, heads, columns }).into_iter().collect();
        device.prefill.row_weight = u32::from(at == last);
        device.decode = device.prefill.clone();
    }
}

fn any_plan() -> impl Arbitrary<Value = (ModelSpec, Plan, BatchShape)> {
    let weights = prop::collection::vec([0u32..4, 0u32..4, 0u32..4, 0u32..4], 1..6);
    // Few texts, or as many as make cuts move to their ends.
    let texts = |count| prop::collection::vec((1u32..20, 0usize..7), count);
    let segments = prop_oneof![2 => texts(1..5), 1 => texts(5..20)];
    let kv = prop::sample::select(vec![1u32, 2, 3, 6]);
    // A row of the wide one is a tile that is worth staggering.
    let hidden = prop::sample::select(vec![12u32, WIDE]);
    // Norms after blocks, before them, or before both at once.
    let model = (0..3, any::<bool>(), kv, any::<bool>(), hidden);
    // Which layers have a window, and how wide it is.
    let windows = prop_oneof![Just((0, 0, 0)), (0u8..16, 0u32..12, 0u32..12)];
    let layers = (1u32..5, windows, any::<bool>());
    (weights, segments, model, layers, any_way()).prop_map(
        |(mut weights, segments, (norms, causal, kv, lm, hidden), layers, way)| {
            let (layers, (narrow, before, after), first_norm) = layers;
            for k in 0..4 {
                if weights.iter().all(|w| w[k] == 0) {
                    weights[0][k] = 1;
                }
            }
            let head = if lm { language() } else { classes() };
            let mut spec = spec(hidden, norms > 0, causal, kv, head);
            spec.layers = layers;
            spec.parallel = norms == 2;
            (spec.first_norm, spec.sum_norms) = (first_norm || norms != 1, !first_norm);
            let window =
                |layer| (narrow >> layer & 1 == 1).then_some(SlidingWindow { before, after });
            let kind = |layer| LayerKind { window: window(layer), ..LayerKind::default() };
            spec.kinds = (0..layers).map(kind).filter(|_| narrow > 0).collect();
            let wanted = |kind: usize| match (kind, lm) {
                (0, _) => Wanted::Hidden,
                (1, _) => Wanted::Pooled(Pooling::Mean),
                (2, _) => Wanted::Pooled(Pooling::Cls),
                (3, _) => Wanted::Pooled(Pooling::Max),
                (4, _) => Wanted::Pooled(Pooling::LastToken),
                (5, true) => Wanted::LastLogits,
                (_, true) => Wanted::AllLogits,
                (_, false) => Wanted::Classes,
            };
            let segments = segments.into_iter().enumerate();
            let segments = segments
                .map(|(i, (rows, kind))| Segment {
                    slot: i as u32,
                    context_len: 0,
                    cached: false,
                    rows,
                    wanted: wanted(kind),
                })
                .collect();
            let plan = laid_out(&way, &spec, &weights);
            (spec, plan, BatchShape::new(segments).unwrap())
        },
    )
}

/// The plan with weights that are read from disk on all devices, some of which stay.
fn reading(
    spec: &ModelSpec,
    plan: &Plan,
    (spare, parts, loaders, resident): (u64, u16, u16, u64),
) -> Plan {
    let mut plan = plan.clone();
    let graph = OperatorGraph::of(spec);
    for device in &mut plan.ring {
        let piece = Bytes(8 << 10);
        let all = pieces::pieces(&graph, &device.prefill, &Formats::default(), piece);
        let largest = all.iter().map(|piece| piece.stored()).max().unwrap_or(4096);
        let room = if parts == 0 { Room::Ring } else { Room::Parts(parts) };
        let buffer = largest * u64::from(parts.max(1)) + spare * 4096;
        let stay = (0..all.len() as u32).filter(|at| resident >> (at % 64) & 1 == 1);
        let resident = stay.map(|at| Span::new(at, at + 1)).collect();
        device.streaming = Some(Streaming {
            format: WeightFormat::F32,
            piece,
            buffer: Bytes(buffer),
            room,
            loaders,
            resident,
        });
    }
    plan
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn lowered_programs_verify_and_never_deadlock((spec, plan, shape) in any_plan(), seed: u64) {
        let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        prop_assert_eq!(verify(&spec, &Formats::default(), &plan, &shape, &programs), Ok(()));
        for window in [0, 500, u64::MAX] {
            prop_assert!(simulate(&programs, &Random(seed, window)).is_ok());
        }
        let again = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        prop_assert_eq!(galaxy_graph::digest(&programs), galaxy_graph::digest(&again));
        let links = galaxy_graph::links(&plan);
        for program in &programs {
            for to in program.peers().0 {
                prop_assert!(links.contains(&(program.rank, to)));
            }
        }
    }

    /// Sequences in the KV cache, in both phases, with tokens that are chosen.
    #[test]
    fn programs_of_cached_sequences_verify_and_never_deadlock(
        (mut spec, mut plan, shape) in any_plan(),
        seed: u64,
    ) {
        prop_assume!(matches!(spec.head, HeadSpec::Language { .. }));
        spec.causal = true;
        plan.cache = Cache { rows: 1 << 20, values: galaxy_common::CacheType::F16 };
        let breadths = [CandidateCount::Few, CandidateCount::Many, CandidateCount::All];
        let goes_on = |(at, s): (usize, &Segment)| {
            let wanted = if s.wanted == Wanted::Hidden { Wanted::Nothing } else { Wanted::Token(breadths[at % 3]) };
            Segment { cached: at % 4 < 3, wanted, context_len: 0, ..*s }
        };
        let segments: Vec<Segment> = shape.segments().iter().enumerate().map(goes_on).collect();
        let many = BatchShape::new(segments.clone()).unwrap();
        let one = BatchShape::new(segments.iter().map(|s| Segment { rows: 1, ..*s }).collect()).unwrap();
        let links = galaxy_graph::links(&plan);
        for (phase, shape) in [(Phase::Prefill, &many), (Phase::Prefill, &one), (Phase::Decode, &one), (Phase::Decode, &many)] {
            let programs = lower(&spec, &Formats::default(), &plan, phase, shape).unwrap();
            prop_assert_eq!(verify(&spec, &Formats::default(), &plan, shape, &programs), Ok(()));
            if shape.sampled().next().is_some() {
                choices::go_once(&plan, phase, &programs);
            }
            if phase == Phase::Decode {
                programs.iter().for_each(|program| choices::keeps_before_it_attends(program, shape));
            }
            for window in [0, 500, u64::MAX] {
                prop_assert!(simulate(&programs, &Random(seed, window)).is_ok());
            }
            for program in &programs {
                for to in program.peers().0 {
                    prop_assert!(links.contains(&(program.rank, to)));
                }
            }
            let mut later: Vec<Segment> = shape.segments().to_vec();
            later.iter_mut().filter(|s| s.cached).for_each(|s| { s.context_len = 7; s.slot += 9 });
            let later = lower(&spec, &Formats::default(), &plan, phase, &BatchShape::new(later).unwrap()).unwrap();
            prop_assert_eq!(galaxy_graph::digest(&programs), galaxy_graph::digest(&later));
        }
    }

    /// Wherever texts end, a batch takes no more than the budget.
    #[test]
    fn no_batch_takes_more_than_the_budget((spec, mut plan, shape) in any_plan()) {
        prop_assume!(plan.any_sequence() || plan.strategy == Strategy::Pipeline);
        plan.max_rows = shape.rows();
        let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        let needs = budget::needs_all(&spec, &Formats::default(), &plan).unwrap();
        for ((program, device), most) in programs.iter().zip(&plan.ring).zip(needs) {
            let takes = budget::of_program(&spec, &Formats::default(), device, program);
            // Unlike results of one batch leave gaps between slots: a few rows of the head.
            let gaps = most.activations.0 / 8 + 8 * 4 * u64::from(spec.hidden) + 1024;
            prop_assert!(takes.activations.0 <= most.activations.0 + gaps, "{takes:?} of {most:?}");
            prop_assert!(takes.staging <= most.staging, "{takes:?} of {most:?}");
        }
    }

    /// Weights from disk: whatever stays, and however small the buffer.
    #[test]
    fn programs_that_stream_weights_verify_within_the_budget(
        (spec, plan, shape) in any_plan(),
        way in (0u64..4, 0u16..4, 1u16..4, any::<u64>()),
        seed: u64,
    ) {
        let streams = reading(&spec, &plan, way);
        let programs = lower(&spec, &Formats::default(), &streams, Phase::Prefill, &shape).unwrap();
        prop_assert_eq!(verify(&spec, &Formats::default(), &streams, &shape, &programs), Ok(()));
        for window in [0, u64::MAX] {
            prop_assert!(simulate(&programs, &Random(seed, window)).is_ok());
        }
        let needs = budget::needs_all(&spec, &Formats::default(), &streams).unwrap();
        let whole = budget::needs_all(&spec, &Formats::default(), &plan).unwrap();
        for (((program, device), needs), whole) in
            programs.iter().zip(&streams.ring).zip(needs).zip(whole)
        {
            let takes = budget::of_program(&spec, &Formats::default(), device, program);
            prop_assert_eq!(takes.stream, needs.stream, "held whole, whatever is read");
            let streaming = device.streaming.as_ref().unwrap();
            let all = pieces::of_device(&OperatorGraph::of(&spec), &Formats::default(), device);
            let read = (0..).zip(&all).filter(|(at, _)| !streaming.keeps(*at));
            let read: u64 = read.map(|(_, piece)| piece.bytes).sum();
            prop_assert_eq!(needs.weights.0 + read, whole.weights.0);
        }
        // Loads that do not wait for what they lie over are found.
        for rank in 0..programs.len() {
            let mut broken = programs.clone();
            let mut waited = false;
            for op in &mut broken[rank].operations {
                if matches!(op.kind, OpKind::Load { .. }) {
                    waited |= !op.waits.is_empty();
                    op.waits.clear();
                }
            }
            let found = verify(&spec, &Formats::default(), &streams, &shape, &broken);
            let right = matches!(found, Err(VerifyError::Reuse { .. })) || !waited && found.is_ok();
            prop_assert!(right, "{found:?}");
        }
    }

    /// A few of many layers that are cut alike show what all of them need.
    #[test]
    fn memory_needs_from_a_few_layers_equal_needs_of_all_layers(
        (mut spec, mut plan, shape) in any_plan(),
        times in 1u32..7,
    ) {
        let longer = |layers: Span<Layer>| Span::new(layers.start() * times, layers.end() * times);
        spec.layers *= times;
        plan.modes.iter_mut().for_each(|m| m.layers = longer(m.layers));
        for device in &mut plan.ring {
            device.prefill.blocks.iter_mut().for_each(|b| b.layers = longer(b.layers));
            device.decode = device.prefill.clone();
        }
        plan.max_rows = shape.rows();
        let mut all = vec![[Bytes(0); 4]; plan.ring.len()];
        for shape in budget::widest(&spec, &plan).unwrap() {
            let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
            for ((all, device), program) in all.iter_mut().zip(&plan.ring).zip(&programs) {
                let takes = budget::of_program(&spec, &Formats::default(), device, program);
                let takes = parts(&budget::rounded(&spec, &plan, program, takes));
                all.iter_mut().zip(takes).for_each(|(most, takes)| *most = takes.max(*most));
            }
        }
        let needs = budget::needs_all(&spec, &Formats::default(), &plan).unwrap();
        for (mut have, all) in needs.iter().map(parts).zip(all) {
            // Another request, for hidden states, may hand over more.
            prop_assert!(have[2] >= all[2], "{have:?} for {all:?}");
            have[2] = all[2];
            prop_assert_eq!(have, all);
        }
    }

    /// Of programs that are broken at random, the verifier finds what is wrong, or they run to the
    /// end.
    #[test]
    fn broken_programs_are_found_or_run((spec, plan, shape) in any_plan(), seed: u64, at: prop::sample::Index, how in 0..4) {
        let mut programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        let total: usize = programs.iter().map(|p| p.operations.len()).sum();
        let mut index = at.index(total);
        let rank = programs.iter().position(|p| {
            let here = index < p.operations.len();
            if !here { index -= p.operations.len(); }
            here
        }).unwrap();
        let program = &mut programs[rank];
        let lane = program.operations[index].lane;
        let ids = &mut program.lanes[usize::from(lane.0)].1;
        let place = ids.iter().position(|i| i.0 as usize == index).unwrap();
        match how {
            0 => program.operations[index].waits.clear(),
            1 if place + 1 < ids.len() => ids.swap(place, place + 1),
            2 => { program.operations[index].writes.pop(); }
            _ => { program.operations[index].reads.pop(); }
        }
        if verify(&spec, &Formats::default(), &plan, &shape, &programs).is_ok() {
            prop_assert!(simulate(&programs, &Random(seed, 0)).is_ok());
        }
    }
}

/// Programs of a plan, for tests to look at or to break.
struct Case {
    spec: ModelSpec,
    plan: Plan,
    shape: BatchShape,
    programs: Vec<Program>,
}

fn case() -> Case {
    let spec = spec(12, true, true, 3, language());
    let plan = plan(Strategy::Galaxy, 2, &spec, &[[2, 2, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]);
    let shape = BatchShape::single(24, Wanted::LastLogits).unwrap();
    let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
    Case { spec, plan, shape, programs }
}

impl Case {
    fn verify(&self) -> Result<(), VerifyError> {
        verify(&self.spec, &Formats::default(), &self.plan, &self.shape, &self.programs)
    }
}

#[test]
fn programs_of_the_most_recently_used_shapes_are_kept() {
    let Case { spec, plan, .. } = case();
    let (plan, other) = (Arc::new(plan.clone()), Arc::new(plan));
    let mut lowered = Lowered::new(2);
    let (mut made, formats) = (0, Formats::default());
    let mut get = |plan: &Arc<Plan>, rows| {
        let shape = BatchShape::single(rows, Wanted::Hidden).unwrap();
        let programs = |programs: Vec<Program>| {
            made += 1;
            (made, programs.len())
        };
        let whole = Whole { spec: &spec, formats: &formats, plan };
        lowered.get(whole, Phase::Prefill, &shape, programs).unwrap()
    };
    let all = [(&plan, 4), (&plan, 5), (&plan, 4), (&plan, 6), (&plan, 4), (&plan, 5), (&other, 5)];
    let numbers = all.map(|(plan, rows)| get(plan, rows));
    assert_eq!(numbers.map(|(number, _)| number), [1, 2, 1, 3, 1, 4, 5]);
    assert!(numbers.iter().all(|(_, programs)| *programs == 3));
    // Programs that are kept were lowered without cached rows, and of these there may be too many.
    let mut lowered = Lowered::new(1);
    let shape = |context_len| {
        let wanted = Wanted::Hidden;
        BatchShape::new(vec![Segment { slot: 0, context_len, cached: true, rows: 1, wanted }])
            .unwrap()
    };
    let whole = Whole { spec: &spec, formats: &formats, plan: &plan };
    let mut get = |past| lowered.get(whole, Phase::Prefill, &shape(past), |_| ());
    let (fits, too_long) = (get(0), get(300));
    assert!(too_long.is_err() && (fits.is_ok() || plan.cache.rows == 0), "{fits:?}");
}

/// How many tiles of keys and values each device sends in a layer, of texts of these lengths.
fn keys_sent(weights: &[u32], texts: &[u32]) -> Vec<usize> {
    let mut spec = spec(12, false, false, 6, HeadSpec::None);
    spec.layers = 1;
    let way = RandomLayout {
        strategy: Strategy::Sequence,
        modes: [(true, true); 2],
        exchange: Exchange::Direct,
        tiles: 1,
    };
    let weights: Vec<[u32; 4]> = weights.iter().map(|&rows| [1, 1, rows, 1]).collect();
    let mut plan = laid_out(&way, &spec, &weights);
    plan.max_rows = texts.iter().sum();
    let wanted = Wanted::Pooled(Pooling::Mean);
    let segment =
        |(slot, &rows): (u32, &u32)| Segment { slot, context_len: 0, cached: false, rows, wanted };
    let shape = BatchShape::new((0..).zip(texts).map(segment).collect()).unwrap();
    let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
    assert_eq!(verify(&spec, &Formats::default(), &plan, &shape, &programs), Ok(()));
    let sends = |program: &Program| {
        program.operations.iter().filter(|op| matches!(op.kind, OpKind::Send { .. })).count()
    };
    programs.iter().map(sends).collect()
}

#[test]
fn keys_and_values_of_whole_sequences_are_not_sent() {
    assert_eq!(keys_sent(&[1, 1, 1], &[96]), [2, 2, 2]);
    // 10.7 texts each: cuts move to the ends of texts.
    assert_eq!(keys_sent(&[1, 1, 1], &[8; 32]), [0, 0, 0]);
    assert_eq!(keys_sent(&[16, 10, 6], &[8; 32]), [0, 0, 0]);
    assert_eq!(keys_sent(&[2, 1, 1], &[8; 4]), [0, 0, 0]);
    // The second text is cut in two: its devices exchange keys and values.
    assert_eq!(keys_sent(&[1, 1, 1], &[32, 64]), [0, 1, 1]);
}

#[test]
fn memory_needs_of_all_devices_equal_needs_of_each_device() {
    let case = case();
    let all = budget::needs_all(&case.spec, &Formats::default(), &case.plan).unwrap();
    assert_eq!(all.len(), case.plan.ring.len());
    for (rank, device) in case.plan.ranked() {
        let needs = budget::needs(&case.spec, &Formats::default(), &case.plan, rank).unwrap();
        assert_eq!(needs, all[rank.index()]);
        // A smaller program never needs more than was granted for the widest.
        let program = &case.programs[rank.index()];
        assert!(
            budget::of_program(&case.spec, &Formats::default(), device, program).total()
                <= needs.total()
        );
    }
    // All rows of a head-less model, once: what the devices hand over together.
    let spec = spec(12, false, false, 6, HeadSpec::None);
    let mut plan = plan(Strategy::Galaxy, 2, &spec, &[[1; 4], [2; 4]]);
    let results = budget::needs_all(&spec, &Formats::default(), &plan)
        .unwrap()
        .iter()
        .map(|n| n.results)
        .sum();
    assert_eq!(Bytes(u64::from(plan.max_rows * spec.hidden) * 4), results);
    for rows in [0, u32::MAX] {
        plan.max_rows = rows;
        assert!(budget::needs_all(&spec, &Formats::default(), &plan).is_err());
    }
}

#[test]
fn rows_owned_by_any_stage_but_the_last_are_refused() {
    let spec = spec(12, true, true, 3, language());
    let way = RandomLayout {
        strategy: Strategy::Pipeline,
        modes: [(false, false); 2],
        exchange: Exchange::Ring,
        tiles: 2,
    };
    let mut plan = laid_out(&way, &spec, &[[1; 4], [1; 4], [0, 0, 0, 1]]);
    assert_eq!(plan.validate(spec.extent()), Ok(()));
    for wrong in [0, 2] {
        plan.ring[wrong].prefill.row_weight = 1;
        let refused = plan.validate(spec.extent()).unwrap_err();
        assert!(refused.to_string().contains(&format!("device d{wrong} owns rows")), "{refused}");
        plan.ring[wrong].prefill.row_weight = 0;
    }
}

#[test]
fn programs_whose_language_head_has_many_tiles_verify() {
    let spec = spec(12, false, false, 1, language());
    let shape = BatchShape::single(16, Wanted::AllLogits).unwrap();
    for tiles in [8, 16, 64] {
        let plan = plan(Strategy::Megatron, tiles, &spec, &[[1, 1, 1, 1], [0, 1, 0, 1]]);
        let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        assert_eq!(
            verify(&spec, &Formats::default(), &plan, &shape, &programs),
            Ok(()),
            "{tiles} tiles"
        );
    }
}
