//! The cases: plans with awkward parts, and batches that ask for every output.

use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, DeviceName, DevicePlan, Exchange,
    LinkType, Mode, Modes, Plan, Pooling, Segment, Span, Strategy, Wanted, WireType,
};
use galaxy_model::{HeadSpec, ModelDir, ModelSpec};

/// Programs to run: those of a plan, for some batches.
pub struct Case {
    pub name: String,
    pub plan: Plan,
    pub shapes: Vec<BatchShape>,
}

/// All cases of a model.
pub fn cases(dir: &ModelDir) -> Vec<Case> {
    let spec = dir.spec();
    let all = shapes(spec, &[1, 2, 3, 7, 16, 33, 64, 129], &[3, 1, 17, 40, 2, 5, 33, 1, 9]);
    let few = shapes(spec, &[1, 5, 37], &[3, 1, 17, 2]);
    // Cuts between rows move to the ends of some.
    let many = shapes(spec, &[], &[4, 4, 4, 4, 4, 4, 9, 3, 4, 4, 5]);
    let case = |strategy, split: &Split, tiles, wire, shapes: &Vec<BatchShape>| Case {
        name: format!("{}, {strategy}, {}, {tiles} tiles, {wire}", dir.name(), split.name),
        plan: plan(dir, strategy, split, tiles, wire),
        shapes: shapes.clone(),
    };
    let mut cases = vec![case(Strategy::Local, &WHOLE, 1, WireType::F32, &all)];
    if spec.position_limit() >= LONG {
        let long = shapes(spec, &[LONG], &[LONG, 2]);
        cases.push(case(Strategy::Local, &WHOLE, 1, WireType::F32, &long));
    }
    for split in &SPLITS {
        for strategy in [Strategy::Galaxy, Strategy::Megatron] {
            for tiles in [1, 2, 5] {
                let shapes = if tiles == 2 { &all } else { &few };
                cases.push(case(strategy, split, tiles, WireType::F32, shapes));
            }
        }
        cases.push(case(Strategy::Galaxy, split, 2, WireType::F16, &few));
        cases.push(case(Strategy::Sequence, split, 2, WireType::F16, &few));
        cases.push(case(Strategy::Galaxy, split, 2, WireType::Q8, &few));
        cases.push(case(Strategy::Sequence, split, 2, WireType::Q8, &few));
        for (strategy, tiles) in [(Strategy::Sequence, 1), (Strategy::Sequence, 2)] {
            cases.push(case(strategy, split, tiles, WireType::F32, &few));
        }
        cases.push(case(Strategy::Sequence, split, 3, WireType::F32, &many));
        cases.push(case(Strategy::Pipeline, split, 2, WireType::F32, &few));
        let mut direct = case(Strategy::Galaxy, split, 2, WireType::F32, &few);
        direct.name += ", direct";
        direct.plan.exchange = Exchange::Direct;
        cases.push(direct);
    }
    cases
}

/// The rows of a sequence that no engine takes in one step.
const LONG: u32 = 300;

/// How heads, columns, rows and the vocabulary are split: a device each.
struct Split {
    name: &'static str,
    heads: &'static [Amount],
    columns: &'static [Amount],
    row_weights: &'static [u32],
    vocabulary: &'static [Amount],
}

/// A number, as far as there are so many, or all that is left.
#[derive(Clone, Copy)]
enum Amount {
    Of(u32),
    Rest,
}
use Amount::{Of, Rest};

const WHOLE: Split = Split {
    name: "whole",
    heads: &[Rest],
    columns: &[Rest],
    row_weights: &[1],
    vocabulary: &[Rest],
};

const SPLITS: [Split; 3] = [
    Split {
        name: "one head, one column",
        heads: &[Of(1), Rest],
        columns: &[Rest, Of(1)],
        row_weights: &[1, 1],
        vocabulary: &[Of(3), Rest],
    },
    Split {
        name: "no heads, no columns, no rows",
        heads: &[Rest, Of(0), Of(2), Of(0)],
        columns: &[Of(3), Of(17), Of(0), Rest],
        row_weights: &[2, 0, 1, 1],
        vocabulary: &[Of(0), Of(33), Rest, Of(1)],
    },
    Split {
        name: "all heads in the middle",
        heads: &[Of(0), Rest, Of(0)],
        columns: &[Of(33), Of(0), Rest],
        row_weights: &[0, 1, 3],
        vocabulary: &[Rest, Of(17), Of(0)],
    },
];

/// `parts` of `total`, one behind another.
fn cut(total: u32, parts: &[Amount]) -> Vec<(u32, u32)> {
    let mut left = total;
    let of = |part: &Amount| match part {
        Of(wanted) => {
            let given = left.min(*wanted);
            left -= given;
            given
        }
        Rest => 0,
    };
    let mut sizes: Vec<u32> = parts.iter().map(of).collect();
    let rest = parts.iter().position(|part| matches!(part, Rest)).unwrap();
    sizes[rest] = left;
    let mut at = 0;
    let place = |size: u32| {
        at += size;
        (at - size, at)
    };
    sizes.into_iter().map(place).collect()
}

fn plan(dir: &ModelDir, strategy: Strategy, split: &Split, tiles: u16, wire: WireType) -> Plan {
    let spec = dir.spec();
    let extent = spec.extent();
    let heads = cut(extent.heads, split.heads);
    let columns = cut(extent.intermediate, split.columns);
    let vocabulary = cut(extent.vocabulary, split.vocabulary);
    let ring = (0..heads.len()).map(|i| {
        let row_weight = split.row_weights[i];
        let tensor = (Span::new(heads[i].0, heads[i].1), Span::new(columns[i].0, columns[i].1));
        let all = (Span::first(extent.heads), Span::first(extent.intermediate));
        let none = (Span::empty(), Span::empty());
        // A layer for each of the last devices, the rest for the first.
        let last = heads.len() - 1;
        let above = (last as u32).min(spec.layers - 1);
        let (layers, (heads, columns), row_weight) = match strategy {
            Strategy::Sequence if row_weight > 0 => (Span::first(spec.layers), all, row_weight),
            Strategy::Sequence => (Span::first(spec.layers), none, 0),
            Strategy::Pipeline => {
                let from = (spec.layers - above) + i as u32;
                let layers = match i {
                    0 => Span::first(spec.layers - above),
                    _ if i as u32 <= above => Span::new(from - 1, from),
                    _ => Span::empty(),
                };
                (layers, all, u32::from(i as u32 == above))
            }
            _ => (Span::first(spec.layers), tensor, row_weight),
        };
        let block = BlockAssignment { layers, heads, columns };
        let part = Assignment {
            blocks: (!layers.is_empty()).then_some(block).into_iter().collect(),
            row_weight,
            vocabulary: Span::new(vocabulary[i].0, vocabulary[i].1),
        };
        DevicePlan {
            name: DeviceName::new(format!("d{i}")).unwrap(),
            budget: Bytes(1 << 30),
            threads: 1,
            prefill: part.clone(),
            decode: part,
            streaming: None,
        }
    });
    Plan {
        model: dir.name().to_owned(),
        fingerprint: dir.fingerprint().to_owned(),
        strategy,
        layout: strategy.layout(),
        modes: Modes::uniform(
            dir.spec().layers,
            if strategy == Strategy::Sequence { Mode::Sequence } else { Mode::Tensor },
        ),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire,
        activations: galaxy_common::Activations::default(),
        tiles,
        max_rows: 512,
        cache: Cache::NONE,
        ring: ring.collect(),
    }
}

/// All that the model can be asked for.
fn wanted(spec: &ModelSpec) -> Vec<Wanted> {
    let pooling =
        [Pooling::Cls, Pooling::Mean, Pooling::MeanSqrtLen, Pooling::Max, Pooling::LastToken];
    let mut wanted = vec![Wanted::Hidden];
    wanted.extend(pooling.map(Wanted::Pooled));
    match spec.head {
        HeadSpec::Classes(_) => wanted.push(Wanted::Classes),
        HeadSpec::Language { .. } => wanted.extend([Wanted::LastLogits, Wanted::AllLogits]),
        HeadSpec::None => {}
    }
    wanted
}

/// Batches of one text and of several, together with every output.
fn shapes(spec: &ModelSpec, lengths: &[u32], batch: &[u32]) -> Vec<BatchShape> {
    let wanted = wanted(spec);
    // Images have one length.
    let image = |rows: &u32| spec.patches.map_or(*rows, |patches| patches.rows());
    let [lengths, batch] = [lengths, batch].map(|all| all.iter().map(image).collect::<Vec<_>>());
    let segment = |(at, rows): (usize, &u32)| Segment {
        slot: at as u32,
        context_len: 0,
        cached: false,
        rows: *rows,
        wanted: wanted[at % wanted.len()],
    };
    let alone = |(at, rows): (usize, &u32)| {
        // The richest outputs first.
        BatchShape::single(*rows, wanted[wanted.len() - 1 - at % wanted.len()]).unwrap()
    };
    let mut shapes: Vec<_> = lengths.iter().enumerate().map(alone).collect();
    shapes.push(BatchShape::new(batch.iter().enumerate().map(segment).collect()).unwrap());
    shapes
}
