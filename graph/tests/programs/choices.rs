//! Tokens that are chosen for several sequences of a batch: one tile of candidates between each two devices.

use super::{language, plan, spec};
use galaxy_common::{
    BatchShape, Cache, CandidateCount, Plan, Segment, Span, Strategy, Wanted, plan::Phase,
};
use galaxy_graph::{
    LowerError, Program, VerifyError, lower,
    program::{Lane, OpKind, Operation, Role, candidates_bytes},
    verify,
};
use galaxy_model::{Formats, ModelSpec};
use std::collections::{BTreeMap, BTreeSet};

fn candidates(program: &Program, op: &Operation) -> bool {
    let mut regions = op.reads.iter().chain(&op.writes);
    regions.any(|region| program.tensor(region.tensor).role == Role::Candidates)
}

fn count(program: &Program, kind: impl Fn(&Operation) -> bool) -> usize {
    program.operations.iter().filter(|op| kind(op)).count()
}

/// Asserts that candidates go once from each device that has a slice of the vocabulary to each other device,
/// however many sequences there are.
pub(super) fn go_once(plan: &Plan, phase: Phase, programs: &[Program]) {
    let slices = plan.ring.iter().map(|device| device.assignment(phase).vocabulary);
    let having = slices.clone().filter(|slice| !slice.is_empty()).count();
    for (program, slice) in programs.iter().zip(slices) {
        let sent =
            |op: &Operation| matches!(op.kind, OpKind::Send { .. }) && candidates(program, op);
        let others = if slice.is_empty() { 0 } else { plan.ring.len() - 1 };
        assert_eq!(count(program, sent), others);
        assert_eq!(count(program, |op| op.kind == OpKind::GatherCandidates), having);
        assert_eq!(count(program, |op| op.kind == OpKind::Sample), 1);
    }
}

/// Asserts that all rows before one are in the cache when it attends: it may be a draft of what follows the
/// one before it.
pub(super) fn keeps_before_it_attends(program: &Program, shape: &BatchShape) {
    let lane = program.lanes.iter().find(|(lane, _)| *lane == Lane::Compute);
    let mut kept: BTreeMap<_, BTreeSet<u32>> = BTreeMap::new();
    for id in lane.iter().flat_map(|(_, operations)| operations) {
        let op = program.operation(*id);
        let rows = op.reads.first().map_or(0..0, |read| read.rows.start()..read.rows.end());
        match op.kind {
            OpKind::AppendKv { operator, .. } => kept.entry(operator).or_default().extend(rows),
            OpKind::Attend { operator, .. } => {
                let of_kept = shape.placed().filter(|(_, segment)| segment.cached);
                let mut before = of_kept.flat_map(|(rows, _)| rows.start()..rows.end());
                let there = |row: u32| kept.get(&operator).is_some_and(|kept| kept.contains(&row));
                assert!(before.all(|row| row >= rows.end || there(row)), "{operator:?}, {rows:?}");
            }
            _ => {}
        }
    }
}

fn case() -> (ModelSpec, Plan) {
    let spec = ModelSpec { vocabulary: 5000, ..spec(12, true, true, 3, language()) };
    let plan = plan(Strategy::Galaxy, 2, &spec, &[[2, 2, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]);
    (spec, Plan { cache: Cache { rows: 1 << 20, values: galaxy_common::CacheType::F16 }, ..plan })
}

/// A step with one row for each sequence, with its number of candidates.
fn step(breadths: &[CandidateCount]) -> BatchShape {
    let segment = |(slot, breadth): (u32, &CandidateCount)| {
        let wanted = Wanted::Token(*breadth);
        Segment { slot, context_len: 0, cached: true, rows: 1, wanted }
    };
    BatchShape::new((0..).zip(breadths).map(segment).collect()).unwrap()
}

#[test]
fn a_step_of_many_sequences_samples_with_the_operations_of_one() {
    use CandidateCount::{All, Few, Many};
    let (spec, plan) = case();
    let breadths = [Few, Many, Few, All, Few];
    for phase in [Phase::Prefill, Phase::Decode] {
        let lowered =
            |shape: &BatchShape| lower(&spec, &Formats::default(), &plan, phase, shape).unwrap();
        let (one, many) = (lowered(&step(&[Few])), lowered(&step(&breadths)));
        for (rank, (one, many)) in one.iter().zip(&many).enumerate() {
            let chosen = |op: &Operation| {
                matches!(op.kind, OpKind::TopK { .. } | OpKind::GatherCandidates | OpKind::Sample)
                    || candidates(one, op)
            };
            let of_many = |op: &Operation| {
                matches!(op.kind, OpKind::TopK { .. } | OpKind::GatherCandidates | OpKind::Sample)
                    || candidates(many, op)
            };
            assert_eq!(count(one, chosen), count(many, of_many));
            let results = if rank == 0 { [1, 5] } else { [0, 0] };
            assert_eq!([one.outputs.len(), many.outputs.len()], results);
        }
        go_once(&plan, phase, &many);
        let written = |program: &Program| {
            let op = program
                .operations
                .iter()
                .find(|op| matches!(op.kind, OpKind::TopK { .. }))
                .unwrap();
            program.region_bytes(&op.writes[0])
        };
        let slice = plan.ring[0].assignment(phase).vocabulary.len();
        assert_eq!(written(&one[0]), candidates_bytes(64));
        let each = breadths.map(|breadth| candidates_bytes(breadth.of(slice)));
        assert_eq!(written(&many[0]), each.iter().sum::<u64>());
    }
}

/// A batch of a prompt of which more rows follow, one that ends, sequences that are generated, and logits that
/// are asked for.
#[test]
fn programs_of_mixed_prefill_and_decode_batches_verify() {
    let (spec, plan) = case();
    let token = Wanted::Token(CandidateCount::Few);
    let segments =
        [(7, Wanted::Nothing), (1, token), (5, token), (3, Wanted::AllLogits), (1, token)];
    let segment =
        |(slot, (rows, wanted))| Segment { slot, context_len: 0, cached: true, rows, wanted };
    let shape = BatchShape::new((0..).zip(segments).map(segment).collect()).unwrap();
    assert_eq!(shape.sampled().map(|(index, ..)| index).collect::<Vec<_>>(), [1, 2, 4]);
    for phase in [Phase::Prefill, Phase::Decode] {
        let programs = lower(&spec, &Formats::default(), &plan, phase, &shape).unwrap();
        assert_eq!(verify(&spec, &Formats::default(), &plan, &shape, &programs), Ok(()));
        go_once(&plan, phase, &programs);
    }
}

type Break<'a> = dyn Fn(&mut [Program]) + 'a;

#[test]
fn programs_with_broken_token_choices_are_refused() {
    let (spec, plan) = case();
    let shape = step(&[CandidateCount::Few; 3]);
    let good = lower(&spec, &Formats::default(), &plan, Phase::Decode, &shape).unwrap();
    let find = |program: &Program, kind: OpKind| {
        program.operations.iter().position(|op| op.kind == kind).unwrap()
    };
    let found = |breaks: &Break<'_>| {
        let mut programs = good.clone();
        breaks(&mut programs);
        verify(&spec, &Formats::default(), &plan, &shape, &programs)
    };
    assert_eq!(found(&|_| {}), Ok(()));
    let tokens = plan.ring[1].decode.vocabulary;
    let at = find(&good[1], OpKind::TopK { tokens });
    let collects = find(&good[1], OpKind::GatherCandidates);
    let breaks: [&Break<'_>; 6] = [
        // Other tokens are listed.
        &|programs| programs[1].operations[at].kind = OpKind::TopK { tokens: Span::first(1) },
        // A sequence is left out.
        &|programs| programs[1].operations[at].reads.truncate(2),
        // Two sequences are mixed up.
        &|programs| programs[1].operations[at].reads.swap(0, 1),
        // One row stands for two sequences.
        &|programs| {
            let rows = programs[1].operations[at].reads[1].rows;
            programs[1].operations[at].reads[1].rows = Span::new(rows.start() - 1, rows.end());
        },
        // A token is chosen before all candidates are there.
        &|programs| programs[1].operations[collects].kind = OpKind::Sample,
        // A result is of a sequence that no token was chosen for.
        &|programs| {
            let last = programs[0].outputs.len() - 1;
            programs[0].outputs[last].segment = 0;
        },
    ];
    for (number, broken) in breaks.iter().enumerate() {
        let found = found(broken).unwrap_err();
        let right = matches!(found, VerifyError::Content { .. } | VerifyError::Results { .. });
        assert!(right, "{number}: {found}");
    }
}

/// Rows of a draft are those of one sequence, and sequences may share blocks: each has to fit the cache by
/// itself.
#[test]
fn the_kv_cache_limit_holds_for_each_sequence_not_for_the_sum() {
    let (spec, plan) = case();
    let cache = Cache { rows: Cache::BLOCK, ..plan.cache };
    let plan = Plan { cache, max_rows: 64, ..plan };
    let wanted = Wanted::Token(CandidateCount::Few);
    let row = |slot, context_len| Segment { slot, context_len, cached: true, rows: 1, wanted };
    let lowered = |segments: Vec<Segment>| {
        let shape = BatchShape::new(segments).unwrap();
        lower(&spec, &Formats::default(), &plan, Phase::Decode, &shape).map(|_| ())
    };
    assert_eq!(lowered((0..16).map(|at| row(7, 150 + at)).collect()), Ok(()));
    assert_eq!(lowered((0..8).map(|slot| row(slot, 100)).collect()), Ok(()));
    let limit = cache.rows;
    let error = LowerError::Cache { rows: limit + Cache::BLOCK, limit };
    assert_eq!(lowered(vec![row(0, 3), row(1, limit)]), Err(error));
    // Only single rows behind one another may be of one sequence.
    let two = |a: Segment, b: Segment| BatchShape::new(vec![a, b]).is_ok();
    assert!(two(row(1, 4), row(1, 5)) && !two(row(1, 4), row(1, 6)) && !two(row(1, 4), row(1, 4)));
    assert!(!two(Segment { rows: 2, ..row(1, 4) }, row(1, 6)));
}
