//! Several sequences in a step: each gets the tokens that it gets alone, and only those that its mask allows.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    BatchShape, Bytes, Cache, CandidateCount, DeviceName, Exchange, Sampling, Segment, Strategy,
    Wanted, WireType, plan::Phase,
};
use galaxy_engine::{
    compute::ComputeError,
    executor::RunError,
    generate::{Decoded, Goal, TokenEvent},
    local::{LocalCluster, LocalError, LocalGeneration},
    sampler::{Sequence, TokenMask},
};
use galaxy_graph::{
    program::{OpKind, Role},
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use std::{
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

fn open(model: &str, strategy: Strategy, devices: usize) -> LocalCluster {
    open_by(model, strategy, devices, Exchange::Ring)
}

fn open_by(model: &str, strategy: Strategy, devices: usize, exchange: Exchange) -> LocalCluster {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(model);
    let model = Arc::new(ModelDir::open(&path).unwrap());
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: 64,
        cache: Cache { rows: 16 * Cache::BLOCK, values: galaxy_common::CacheType::F16 },
    };
    let member = |at: usize| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        share: 1.0 + at as f64 / 2.0,
    };
    let members: Vec<Member> = (0..devices).map(member).collect();
    let mut plan = share::plan(model.spec(), &terms, &members).unwrap();
    plan.exchange = exchange;
    LocalCluster::open(model, plan).unwrap()
}

const LLAMA: &str = "testdata/golden/llama";
const TINY: &str = "models/tiny-galaxy";
const RINGS: [(Strategy, usize); 5] = [
    (Strategy::Local, 1),
    (Strategy::Galaxy, 2),
    (Strategy::Pipeline, 2),
    (Strategy::Galaxy, 3),
    (Strategy::Sequence, 3),
];

/// What is asked for a sequence.
#[derive(Clone)]
struct SequenceRequest {
    prompt: Vec<u32>,
    sampling: Sampling,
    goal: Goal,
    /// The cost of one more row, where drafts are verified.
    row_cost: Option<f32>,
}

fn ask(prompt: &[u32], sampling: Sampling, count: u32) -> SequenceRequest {
    let goal = Goal { count, ..Goal::default() };
    SequenceRequest { prompt: prompt.to_vec(), sampling, goal, row_cost: None }
}

/// Different prompts, chosen in different ways, of different lengths.
fn asks() -> Vec<SequenceRequest> {
    let seeded = Sampling { temperature: 1.0, seed: 5, ..Sampling::default() };
    let penalties = Sampling { repetition: 1.3, presence: 0.4, frequency: 0.6, ..seeded.clone() };
    // Of a random model it needs many candidates.
    let flat = Sampling { temperature: 8.0, top_p: 0.97, seed: 11, ..Sampling::default() };
    vec![
        ask(&[3, 14, 15, 92, 65, 35, 89, 79, 14], Sampling::greedy(), 24),
        ask(&[7, 2], penalties, 30),
        ask(&[60, 61, 62, 63, 1], flat, 17),
        ask(&[9], Sampling { presence: 1.5, ..Sampling::greedy() }, 21),
        ask(&[44, 4, 44, 4], Sampling { top_k: 5, top_p: 0.8, ..seeded }, 9),
    ]
}

fn text(slot: u32, ask: &SequenceRequest) -> Sequence {
    let (tokens, sampling) = (ask.prompt.clone(), ask.sampling.clone());
    let prompt = tokens.len();
    Sequence { slot, rows: prompt as u32 + ask.goal.count, sampling, tokens, prompt }
}

fn tokens(told: &[TokenEvent]) -> Vec<u32> {
    told.iter().map(|told| told[0] as u32).collect()
}

fn alone(cluster: &LocalCluster, ask: &SequenceRequest) -> Vec<u32> {
    let mut all = Vec::new();
    let mut tell = |told: &TokenEvent| {
        all.push(*told);
        ControlFlow::Continue(())
    };
    let Goal { count, stop, .. } = &ask.goal;
    cluster.generate(&text(0, ask), *count, 64, stop, &mut tell).unwrap();
    tokens(&all)
}

/// A sequence that has begun.
struct Running<'a> {
    slot: u32,
    ask: &'a SequenceRequest,
    made: Vec<u32>,
    breadth: CandidateCount,
    mask: Option<TokenMask>,
}

impl Running<'_> {
    fn left(&self) -> Goal {
        let count = self.ask.goal.count - self.made.len() as u32;
        Goal { count, stop: self.ask.goal.stop.clone(), mask: self.mask.clone() }
    }
    fn last_token(&self) -> u32 {
        *self.made.last().unwrap()
    }
    /// The segment of the row that is to run next.
    fn next_row(&self) -> Segment {
        let context_len = (self.ask.prompt.len() + self.made.len()) as u32 - 1;
        let wanted = Wanted::Token(self.breadth);
        Segment { slot: self.slot, context_len, cached: true, rows: 1, wanted }
    }
    fn is_over(&self) -> bool {
        let stopped = self.made.last().is_some_and(|last| self.ask.goal.stop.contains(last));
        stopped || self.left().count == 0
    }
}

/// Runs the prompts of sequences that begin, all in one batch.
fn begin<'a>(
    cluster: &LocalCluster,
    asks: &[(u32, &'a SequenceRequest)],
) -> Result<Vec<Running<'a>>, LocalError> {
    begin_beside(cluster, &mut [], asks)
}

/// Runs the prompts of sequences that begin and a step of those that run, all in one batch of prefill.
fn begin_beside<'a>(
    cluster: &LocalCluster,
    running: &mut [Running<'_>],
    asks: &[(u32, &'a SequenceRequest)],
) -> Result<Vec<Running<'a>>, LocalError> {
    let mut segments: Vec<Segment> = running.iter().map(Running::next_row).collect();
    for (slot, ask) in asks {
        cluster.begin(&text(*slot, ask))?;
        let (rows, wanted) = (ask.prompt.len() as u32, Wanted::Token(CandidateCount::Few));
        segments.push(Segment { slot: *slot, context_len: 0, cached: true, rows, wanted });
    }
    let last = running.iter().map(Running::last_token);
    let rows: Vec<u32> = last.chain(asks.iter().flat_map(|(_, ask)| ask.prompt.clone())).collect();
    let goal = |(_, ask): &(u32, &SequenceRequest)| Goal { count: 1, ..ask.goal.clone() };
    let decoding = running.iter().map(|of| Goal { count: 1, ..of.left() });
    let goals: Vec<Goal> = decoding.chain(asks.iter().map(goal)).collect();
    let shape = BatchShape::new(segments).unwrap();
    let LocalGeneration { tokens: events, decoded, .. } =
        cluster.generate_steps(Phase::Prefill, &shape, &rows, &goals, None)?;
    let mut results = events.into_iter().zip(decoded.candidate_counts);
    for (of, (events, breadth)) in running.iter_mut().zip(&mut results) {
        of.made.extend(tokens(&events));
        of.breadth = breadth;
    }
    let begun = |((events, breadth), (slot, ask)): (
        (Vec<TokenEvent>, CandidateCount),
        &(u32, &'a SequenceRequest),
    )| {
        assert_eq!(events.len(), 1);
        Running { slot: *slot, ask, made: tokens(&events), breadth, mask: ask.goal.mask.clone() }
    };
    Ok(results.zip(asks).map(begun).collect())
}

/// Steps of all sequences until one is over, but no more than `most`.
fn steps(
    cluster: &LocalCluster,
    running: &mut [Running<'_>],
    most: u32,
) -> Result<LocalGeneration, LocalError> {
    let goal = |of: &Running<'_>| Goal { count: of.left().count.min(most), ..of.left() };
    let last: Vec<u32> = running.iter().map(Running::last_token).collect();
    let goals: Vec<Goal> = running.iter().map(goal).collect();
    let shape = BatchShape::new(running.iter().map(Running::next_row).collect()).unwrap();
    let goals = (&goals[..], most, running.iter().find_map(|of| of.ask.row_cost));
    let made = cluster.generate_drafting(Phase::Decode, &shape, &last, goals, None)?;
    for ((of, told), breadth) in
        running.iter_mut().zip(&made.tokens).zip(&made.decoded.candidate_counts)
    {
        of.made.extend(tokens(told));
        of.breadth = *breadth;
    }
    Ok(made)
}

/// The tokens of all: some begin at once, and one more joins whenever a run ends.
fn together(cluster: &LocalCluster, asks: &[SequenceRequest], at_once: usize) -> Vec<Vec<u32>> {
    let mut waiting = (3..).zip(asks).collect::<Vec<_>>();
    let mut running = begin(cluster, &waiting.drain(..at_once).collect::<Vec<_>>()).unwrap();
    let mut over: Vec<Running<'_>> = Vec::new();
    while !running.is_empty() || !waiting.is_empty() {
        if !waiting.is_empty() {
            running.extend(begin(cluster, &[waiting.remove(0)]).unwrap());
        }
        let before: Vec<usize> = running.iter().map(|of| of.made.len()).collect();
        let LocalGeneration { tokens, .. } = steps(cluster, &mut running, 16).unwrap();
        let most = tokens.iter().map(Vec::len).max().unwrap();
        assert!(tokens.iter().all(|tokens| (1..=16).contains(&tokens.len())), "each gets some");
        let all = running.iter().zip(before).zip(&tokens);
        assert!(all.into_iter().all(|((of, n), tokens)| of.made.len() == n + tokens.len()));
        let (done, left) = running.into_iter().partition(Running::is_over);
        running = left;
        let done: Vec<Running<'_>> = done;
        assert!(!done.is_empty() || most == 16, "a run ends when a sequence is over");
        done.iter().for_each(|of| cluster.end(of.slot));
        over.extend(done);
    }
    over.sort_by_key(|of| of.slot);
    over.into_iter().map(|of| of.made).collect()
}

#[test]
fn sequences_that_share_steps_get_the_same_tokens_as_alone() {
    for model in [LLAMA, TINY] {
        let single = open(model, Strategy::Local, 1);
        let mut asks = asks();
        // One ends early, by a token that it makes.
        let stop = alone(&single, &asks[3])[6];
        asks[3].goal.stop = [stop].into();
        let want: Vec<_> = asks.iter().map(|ask| alone(&single, ask)).collect();
        assert!(want[3].len() < 8 && want[1].len() == 30);
        for (strategy, devices) in RINGS {
            let cluster = open(model, strategy, devices);
            for at_once in [1, 3, 5] {
                let got = together(&cluster, &asks, at_once);
                assert_eq!(got, want, "{model}, {strategy} on {devices}, {at_once} at once");
            }
        }
    }
}

/// Prompts are prefilled in the steps of sequences that decode.
#[test]
fn sequences_that_decode_while_prompts_are_prefilled_get_the_same_tokens_as_alone() {
    let asks = asks();
    for (strategy, devices) in RINGS {
        let cluster = open_by(LLAMA, strategy, devices, Exchange::Direct);
        assert!(cluster.plan().computes_alike());
        let want: Vec<_> = asks.iter().map(|ask| alone(&cluster, ask)).collect();
        let mut running: Vec<Running<'_>> = Vec::new();
        for (slot, ask) in (0..).zip(&asks) {
            for _ in 0..2 {
                if !running.is_empty() {
                    steps(&cluster, &mut running, 1).unwrap();
                }
            }
            let begun = begin_beside(&cluster, &mut running, &[(slot, ask)]).unwrap();
            running.extend(begun);
        }
        for (of, want) in running.iter().zip(&want) {
            assert!(of.slot > 3 || of.made.len() > 2);
            assert_eq!(of.made, want[..of.made.len()], "{strategy} on {devices}: {}", of.slot);
        }
    }
}

/// The sequences that need no more candidates are not moved on by a step that runs again for another one. What is
/// reported of each token (its log-probability and those of the likeliest, too) is the same to the bit, whichever
/// sequences share the steps.
#[test]
fn token_events_are_bit_identical_whichever_sequences_share_steps() {
    let told_bits = |told: &[TokenEvent]| -> Vec<u32> {
        told.iter().flatten().map(|value| value.to_bits()).collect()
    };
    let mut asks = asks();
    asks.iter_mut().for_each(|ask| (ask.sampling.logprobs, ask.goal.count) = (20, 9));
    for (strategy, devices) in [(Strategy::Local, 1), (Strategy::Galaxy, 2), (Strategy::Galaxy, 3)]
    {
        let cluster = open_by(LLAMA, strategy, devices, Exchange::Direct);
        let run = |asks: &[SequenceRequest]| {
            let all: Vec<_> = (0..).zip(asks).collect();
            let mut running = begin(&cluster, &all).unwrap();
            running.iter_mut().for_each(|of| of.breadth = CandidateCount::Many);
            let told = steps(&cluster, &mut running, 8).unwrap().tokens;
            (0..asks.len() as u32).for_each(|slot| cluster.end(slot));
            told
        };
        let together = run(&asks);
        for (ask, together) in asks.iter().zip(&together) {
            let alone = run(std::slice::from_ref(ask));
            assert_eq!(together.len(), 8);
            assert_eq!(told_bits(&alone[0]), told_bits(together), "{strategy} on {devices}");
        }
    }
}

#[test]
fn only_one_sequence_of_a_step_is_given_more_candidates() {
    for (strategy, devices) in [(Strategy::Local, 1), (Strategy::Galaxy, 2), (Strategy::Galaxy, 3)]
    {
        let cluster = open(TINY, strategy, devices);
        let asks = &asks()[1..4];
        let want: Vec<_> = asks.iter().map(|ask| alone(&cluster, ask)).collect();
        let all: Vec<_> = (0..).zip(asks).collect();
        let mut running = begin(&cluster, &all).unwrap();
        running.iter_mut().for_each(|of| of.breadth = CandidateCount::Few);
        let made = steps(&cluster, &mut running, 16).unwrap();
        assert_eq!(
            made.decoded.candidate_counts,
            [CandidateCount::Few, CandidateCount::Many, CandidateCount::Few]
        );
        for (of, want) in running.iter().zip(&want) {
            assert_eq!(of.made, want[..of.made.len()], "{strategy} on {devices}");
        }
        // While the row of one is asked for more candidates, the others go on.
        assert_eq!(running.iter().map(|of| of.made.len()).max(), Some(17));
        // One tile for all goes to each other device.
        for (rank, program) in made.programs.iter().enumerate() {
            let role = |region: &galaxy_graph::program::Region| program.tensor(region.tensor).role;
            let sent = program.operations.iter().filter(|op| {
                matches!(op.kind, OpKind::Send { .. }) && role(&op.reads[0]) == Role::Candidates
            });
            assert_eq!(sent.count(), devices - 1, "rank {rank}");
        }
    }
}

#[test]
fn a_token_mask_limits_only_the_masked_sequences() {
    let allowed: Vec<u32> = (0..97).filter(|token| token % 5 == 2).collect();
    let mut asks = asks();
    let single = open(LLAMA, Strategy::Local, 1);
    let free: Vec<_> = asks.iter().map(|ask| alone(&single, ask)).collect();
    for masked in [0, 1, 2] {
        asks[masked].goal.mask = Some(TokenMask::of(&allowed));
    }
    let mut first = None;
    for (strategy, devices) in RINGS {
        let cluster = open(LLAMA, strategy, devices);
        let got = together(&cluster, &asks, 5);
        assert_eq!(got[3..], free[3..], "{strategy} on {devices}: others are as without masks");
        for (got, free) in got.iter().zip(&free).take(3) {
            assert!(got.iter().all(|token| allowed.contains(token)), "{got:?}");
            assert_ne!(got, free);
        }
        assert_eq!(first.get_or_insert(got.clone()), &got, "{strategy} on {devices}");
    }
}

/// A mask is bound for a step: here each token has another, as a grammar would give it.
#[test]
fn a_token_mask_can_change_with_each_token() {
    let halves = [0, 1].map(|odd| (0..97).filter(|token| token % 2 == odd).collect::<Vec<_>>());
    let halves = halves.map(|tokens| TokenMask::of(&tokens));
    let asks = asks();
    let cluster = open(LLAMA, Strategy::Galaxy, 3);
    let mut masked = asks[1].clone();
    masked.goal.mask = Some(halves[0].clone());
    let free = alone(&cluster, &asks[0]);
    let mut running = begin(&cluster, &[(0, &asks[0]), (1, &masked)]).unwrap();
    for step in 1..12 {
        running[1].mask = Some(halves[step % 2].clone());
        steps(&cluster, &mut running, 1).unwrap();
    }
    let made = &running[1].made;
    assert!(made.iter().enumerate().all(|(at, token)| *token as usize % 2 == at % 2), "{made:?}");
    assert_eq!(running[0].made, free[..12]);
}

#[test]
fn a_mask_that_allows_no_token_is_an_error_that_names_the_sequence() {
    for (strategy, devices) in RINGS {
        let cluster = open(LLAMA, strategy, devices);
        let asks = &asks()[..2];
        let want: Vec<_> = asks.iter().map(|ask| alone(&cluster, ask)).collect();
        // No token at all, or none that the model has.
        for mask in [TokenMask::of(&[]), TokenMask::of(&[97, 5000])] {
            let mut running = begin(&cluster, &[(2, &asks[0]), (4, &asks[1])]).unwrap();
            running[1].mask = Some(mask);
            let error = steps(&cluster, &mut running, 16).unwrap_err();
            let named = ComputeError::NoToken { slot: 4 }.to_string();
            assert!(matches!(error, LocalError::Run(RunError::Compute(_))), "{error}");
            assert_eq!(error.to_string(), named, "{strategy} on {devices}");
            // The sequences themselves are as they were.
            running[1].mask = None;
            steps(&cluster, &mut running, 16).unwrap();
            for (of, want) in running.iter().zip(&want) {
                assert_eq!(of.made, want[..of.made.len()]);
                cluster.end(of.slot);
            }
        }
    }
}

/// A request to end a burst ends it on all devices after the same step, and the tokens until then are kept.
#[test]
fn an_ended_decode_burst_stops_all_devices_after_the_same_step() {
    for (strategy, devices) in RINGS {
        let cluster = open(LLAMA, strategy, devices);
        let asks =
            [ask(&[3, 14, 15], Sampling::greedy(), 500), ask(&[9, 2], Sampling::greedy(), 500)];
        let want: Vec<_> = asks.iter().map(|of| alone(&cluster, of)).collect();
        let all: Vec<_> = (0..).zip(&asks).collect();
        let mut running = begin(&cluster, &all).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    cluster.end_burst();
                    std::thread::yield_now();
                }
            });
            let made = steps(&cluster, &mut running, 400).unwrap();
            over.store(true, Ordering::Relaxed);
            let counts = made.decoded.counts;
            assert!(counts.iter().all(|count| (1..400).contains(count)), "{strategy}: {counts:?}");
        });
        for (of, want) in running.iter().zip(&want) {
            assert_eq!(of.made, want[..of.made.len()], "{strategy} on {devices}");
        }
    }
}

/// Drafted rows are those of single steps, to the bit; what they change is how many steps it takes.
#[test]
fn drafts_reduce_steps_and_never_change_tokens() {
    for (strategy, devices) in RINGS {
        let cluster = open(LLAMA, strategy, devices);
        let bits = |told: &[TokenEvent]| -> Vec<u32> {
            told.iter().flatten().map(|value| value.to_bits()).collect()
        };
        // A likely token repeats itself sooner or later; penalties and masks are beside it.
        let mut asks = asks();
        let bias = vec![(5, 6.0), (6, 6.0), (9, 5.5)];
        let likely = Sampling { bias, logprobs: 3, ..Sampling::greedy() };
        asks.push(ask(&[5, 6, 9, 5, 6, 9, 5, 6], likely.clone(), 60));
        let drawn = Sampling { temperature: 0.7, seed: 3, ..likely };
        asks.push(ask(&[5, 5, 6, 5, 5, 6, 5], drawn, 60));
        let run = |row_cost: Option<f32>, asks: &[SequenceRequest]| {
            let asks: Vec<SequenceRequest> =
                asks.iter().map(|ask| SequenceRequest { row_cost, ..ask.clone() }).collect();
            let all: Vec<_> = (0..).zip(&asks).collect();
            let mut running = begin(&cluster, &all).unwrap();
            let (mut told, mut run) = (vec![Vec::new(); asks.len()], (0, 0, 0));
            while !running.is_empty() {
                let made = steps(&cluster, &mut running, 16).unwrap();
                let tokens: usize = made.tokens.iter().map(Vec::len).sum();
                let Decoded { steps, rows, .. } = made.decoded;
                run = (run.0 + steps, run.1 + rows, run.2 + tokens);
                for (of, one) in running.iter().zip(&made.tokens) {
                    told[of.slot as usize].extend(bits(one));
                }
                running.retain(|of| {
                    let over = of.is_over();
                    if over {
                        cluster.end(of.slot);
                    }
                    !over
                });
            }
            (told, run)
        };
        for some in [&asks[..], &asks[5..6], &asks[6..]] {
            let (want, (steps, rows, tokens)) = run(None, some);
            let (got, (fewer, more, same)) = run(Some(0.02), some);
            assert_eq!(got, want, "{strategy} on {devices}");
            assert_eq!(same, tokens);
            assert!(fewer < steps && more >= rows, "{fewer} of {steps} steps, {more} rows");
            if some.len() == 1 {
                assert!(3 * fewer < 2 * steps, "{strategy} on {devices}: {fewer} of {steps}");
            }
            // Rows that cost as much as steps are not drafted.
            let (_, plain) = run(Some(1.0), some);
            assert_eq!(plain, (steps, rows, tokens));
        }
    }
}
