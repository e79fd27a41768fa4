//! Many requests at once: what each gets does not depend on the others.

use super::{
    LIMITS,
    around::{Around, Before},
    checkpoint, golden, plan, plan_with,
};
use galaxy_common::{
    Cache, CacheType, GenerateOptions, Pooling, SamplingParams, Wanted, plan::Strategy,
};
use galaxy_coord::{
    Input, Limits, LocalFleet, RequestError, RunOutput, Session, session::GenerateEvent,
};
use galaxy_model::ModelDir;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tokio::sync::{Semaphore, mpsc};

/// Holds programs until they may run.
struct ProgramGate {
    may: Semaphore,
    /// How many programs have waited.
    asked: AtomicUsize,
    /// How many programs have run.
    runs: AtomicUsize,
    /// How many times a burst was asked to end.
    ended: AtomicUsize,
}

impl ProgramGate {
    fn new() -> Self {
        let count = || AtomicUsize::new(0);
        Self { may: Semaphore::new(0), asked: count(), runs: count(), ended: count() }
    }
}

impl Before for ProgramGate {
    async fn program(&self) -> Result<(), RequestError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.may.acquire().await.unwrap().forget();
        self.runs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn burst_ends(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Requests that wait for the turn run together, as far as a program has room, and each gets what it gets alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_share_programs() {
    let model = Arc::new(ModelDir::open(&golden()).unwrap());
    let open = || {
        let plan = plan(&model, &[1.0, 1.0], Strategy::Galaxy);
        let devices = LocalFleet::open(model.clone(), plan).unwrap();
        let fleet = Arc::new(Around::ready(devices, ProgramGate::new()));
        let limits = Limits { queue: 64, ..LIMITS };
        (fleet.clone(), Session::new(model.clone(), fleet, limits))
    };
    let (free, alone) = open();
    free.before.may.add_permits(100);
    let (held, session) = open();
    let ask = |session: &Session, at: u32| {
        let session = session.clone();
        // The last kind wants something else, and cannot be in one program with the others.
        let wanted = if at == 9 { Wanted::Pooled(Pooling::Mean) } else { Wanted::Hidden };
        async move {
            let ids = |text: u32| (0..3 + at * 2).map(|row| (row * 5 + at + text) % 90).collect();
            let inputs = (0..1 + at % 2).map(|text| Input::Tokens(ids(text))).collect();
            let output = RunOutput::Wanted(wanted);
            let result = session.run(inputs, output, None).await.unwrap();
            result
                .tensors
                .into_iter()
                .map(|tensor| (tensor.shape, tensor.values))
                .collect::<Vec<_>>()
        }
    };
    let mut tasks = Vec::new();
    for at in 0..10 {
        tasks.push(tokio::spawn(ask(&session, at)));
        // The first has the turn, and the others wait for it.
        while session.admission().queued() < at as usize {
            tokio::task::yield_now().await;
        }
    }
    held.before.may.add_permits(100);
    for (at, task) in (0..).zip(tasks) {
        assert_eq!(task.await.unwrap(), ask(&alone, at).await, "{at}");
    }
    assert_eq!(free.before.runs.load(Ordering::SeqCst), 10);
    // 140 rows of a program: the first alone, most of the others, the rest, and the other kind.
    let runs = held.before.runs.load(Ordering::SeqCst);
    assert!((3..=4).contains(&runs), "{runs} programs");
}

/// The tokens that are sampled by a seed behind a prompt of `prompt` rows, which is another for each seed.
async fn drawn(session: &Session, prompt: u32, seed: u64) -> Vec<u32> {
    let ids = (0..prompt).map(|at| (at * 7 + seed as u32 * 13 + 5) % 90);
    behind(session, ids.collect(), seed).await
}

/// The tokens that are sampled by a seed behind a prompt.
async fn behind(session: &Session, ids: Vec<u32>, seed: u64) -> Vec<u32> {
    let sampling = SamplingParams {
        temperature: Some(0.9),
        seed: Some(seed),
        presence: Some(0.2),
        ..SamplingParams::default()
    };
    let options = GenerateOptions {
        max_tokens: 60,
        ignore_end: true,
        sampling,
        fallback: None,
        ..GenerateOptions::default()
    };
    generated(session, ids, options).await
}

/// The tokens behind a prompt, as many as are asked for.
async fn generated(session: &Session, ids: Vec<u32>, options: GenerateOptions) -> Vec<u32> {
    let (listener, mut said) = mpsc::channel(1000);
    let most = options.max_tokens as usize;
    session.generate(ids.into(), options, None, listener).await;
    let mut tokens = Vec::new();
    loop {
        match said.recv().await.unwrap().unwrap() {
            GenerateEvent::Token(token) => tokens.push(token.token),
            GenerateEvent::Done { finish, .. } => {
                assert_eq!((finish.to_string().as_str(), tokens.len()), ("length", most));
                return tokens;
            }
            GenerateEvent::Begun { .. } | GenerateEvent::Waiting { .. } => {}
        }
    }
}

/// A session of two devices whose programs wait until they may run.
fn held(model: &Arc<ModelDir>) -> (Arc<Around<ProgramGate>>, Session) {
    let cache = Cache { rows: 6 * Cache::BLOCK, values: CacheType::F32 };
    let plan = plan_with(model, &[1.0, 2.0], Strategy::Galaxy, cache);
    let devices = LocalFleet::open(model.clone(), plan).unwrap();
    let fleet = Arc::new(Around::ready(devices, ProgramGate::new()));
    let session = Session::new(model.clone(), fleet.clone(), Limits { queue: 64, ..LIMITS });
    (fleet, session)
}

/// Waits until more than `before` is counted.
async fn until_more(count: &AtomicUsize, before: usize) {
    while count.load(Ordering::SeqCst) <= before {
        tokio::task::yield_now().await;
    }
}

/// Lets the prompt of a sequence be read, and waits until its first burst is about to run. Gives how many bursts were
/// asked to end by then.
async fn first_burst(fleet: &Around<ProgramGate>) -> usize {
    fleet.before.may.add_permits(1);
    until_more(&fleet.before.asked, 1).await;
    fleet.before.ended.load(Ordering::SeqCst)
}

/// A sequence that comes while others decode does not wait for all of their burst.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_burst_ends_when_a_new_sequence_arrives() {
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    let (fleet, session) = held(&model);
    let drawn = |seed| {
        let session = session.clone();
        tokio::spawn(async move { self::drawn(&session, 9, seed).await })
    };
    let first = drawn(1);
    let before = first_burst(&fleet).await;
    let second = drawn(2);
    until_more(&fleet.before.ended, before).await;
    fleet.before.may.add_permits(1000);
    let tokens = [first.await.unwrap(), second.await.unwrap()];
    for (seed, tokens) in (1..).zip(tokens) {
        assert_eq!(tokens, self::drawn(&session, 9, seed).await, "{seed}");
    }
}

/// No request waits for the rest of a burst whose client has gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_burst_ends_when_its_client_disconnects() {
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    let (fleet, session) = held(&model);
    let (listener, said) = mpsc::channel(1000);
    let going = tokio::spawn(async move {
        let options = GenerateOptions {
            max_tokens: 60,
            ignore_end: true,
            fallback: None,
            ..GenerateOptions::default()
        };
        session.generate(vec![3, 14, 15].into(), options, None, listener).await;
    });
    let before = first_burst(&fleet).await;
    drop(said);
    until_more(&fleet.before.ended, before).await;
    fleet.before.may.add_permits(1000);
    going.await.unwrap();
    assert_eq!(fleet.before.runs.load(Ordering::SeqCst), 2, "no more is run for it");
}

/// Alone, in a crowd, and where room is so short that sequences are evicted, the same seed gives the same tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampled_tokens_do_not_depend_on_other_sequences_or_evictions() {
    let prompts = [3, 150, 40, 170, 7, 133, 60, 190];
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    for (shares, blocks, short) in
        [(&[1.0][..], 16, false), (&[1.0], 5, true), (&[1.0, 2.0], 16, false)]
    {
        let rows = blocks * Cache::BLOCK;
        let cache = Cache { rows, values: CacheType::F16 };
        let strategy = if shares.len() == 1 { Strategy::Local } else { Strategy::Galaxy };
        let plan = plan_with(&model, shares, strategy, cache);
        let fleet = Arc::new(LocalFleet::open(model.clone(), plan).unwrap());
        let session = Session::new(model.clone(), fleet, Limits { queue: 64, ..LIMITS });
        let mut alone = Vec::new();
        for (seed, prompt) in (0..).zip(prompts) {
            alone.push(drawn(&session, prompt, seed).await);
        }
        assert_eq!(session.sequences().evicted, 0);
        let crowd = (0..).zip(prompts).map(|(seed, prompt)| {
            let session = session.clone();
            tokio::spawn(async move { drawn(&session, prompt, seed).await })
        });
        let crowd: Vec<_> = crowd.collect();
        for (task, alone) in crowd.into_iter().zip(&alone) {
            assert_eq!(task.await.unwrap(), *alone, "{shares:?}, {blocks} blocks");
        }
        let after = session.sequences();
        assert_eq!(after.evicted > 0, short, "{after:?}");
        assert!(after.most > 3, "{after:?}");
        assert_eq!((after.waiting, after.running), (0, 0));
    }
}

/// The next turn of a chat runs its new rows and no others, and gets the tokens that a fresh session gives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_turn_from_the_prefix_cache_gets_unchanged_tokens() {
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    for shares in [&[1.0][..], &[1.0, 2.0]] {
        let cache = Cache { rows: 6 * Cache::BLOCK, values: CacheType::F32 };
        let strategy = if shares.len() == 1 { Strategy::Local } else { Strategy::Galaxy };
        let plan = plan_with(&model, shares, strategy, cache);
        let open = || {
            let fleet = Arc::new(LocalFleet::open(model.clone(), plan.clone()).unwrap());
            Session::new(model.clone(), fleet, Limits { queue: 64, ..LIMITS })
        };
        let session = open();
        let mut chat: Vec<u32> = (0..100).map(|at| at * 3 % 89).collect();
        let mut rows = 0;
        for turn in 0..4u32 {
            let (before, prompt) = (chat.len() as u64, chat.clone());
            let tokens = behind(&session, prompt.clone(), 3).await;
            assert_eq!(tokens, behind(&open(), prompt, 3).await, "turn {turn} of {shares:?}");
            chat.extend(tokens);
            chat.extend((0..20).map(|at| (at * 11 + turn) % 89));
            let after = session.sequences();
            assert_eq!((after.prefixes, after.prefix_rows), (u64::from(turn), rows), "{after:?}");
            // The last token of a turn was not run.
            rows += before + 59;
        }
        // Another chat that begins like this one has its first block.
        let mut other = chat[..230].to_vec();
        other.extend([9; 100]);
        let tokens = behind(&session, other.clone(), 4).await;
        assert_eq!(tokens, behind(&open(), other, 4).await, "{shares:?}");
        let rows = rows - (chat.len() as u64 - 20 - 1) + u64::from(Cache::BLOCK);
        assert_eq!(session.sequences().prefix_rows, rows);
        assert_eq!(session.sequences().free, 6, "ended ones give their room");
    }
}

/// Sequences that repeat themselves: their tokens are drafted, alone and in a crowd, and they get the tokens
/// that they get without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_do_not_change_tokens_alone_or_among_other_sequences() {
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    for (shares, strategy) in [
        (&[1.0][..], Strategy::Local),
        (&[1.0, 2.0], Strategy::Galaxy),
        (&[1.0, 1.0], Strategy::Pipeline),
    ] {
        let cache = Cache { rows: 12 * Cache::BLOCK, values: CacheType::F16 };
        let plan = plan_with(&model, shares, strategy, cache);
        let open = |drafts| {
            let fleet = Arc::new(LocalFleet::open(model.clone(), plan.clone()).unwrap());
            Session::new(model.clone(), fleet, Limits { queue: 64, drafts, ..LIMITS })
        };
        let (session, plain) = (open(true), open(false));
        let of = |session: &Session, seed: u32| {
            let session = session.clone();
            let options = GenerateOptions {
                max_tokens: 90,
                ignore_end: true,
                sampling: SamplingParams {
                    temperature: Some(if seed.is_multiple_of(2) { 0.0 } else { 0.6 }),
                    seed: Some(seed.into()),
                    // What repeats itself sooner or later.
                    bias: (0..4).map(|at| (20 + 3 * at + seed, 6.0)).collect(),
                    ..SamplingParams::default()
                },
                fallback: None,
                ..GenerateOptions::default()
            };
            let ids = (0..20 + seed).map(|at| (at * 7 + seed * 13) % 90).collect::<Vec<_>>();
            async move { generated(&session, ids, options).await }
        };
        let mut want = Vec::new();
        for seed in 0..6 {
            want.push(of(&plain, seed).await);
            assert_eq!(of(&session, seed).await, want[seed as usize], "{seed}, {strategy}");
        }
        let counts = session.sequences();
        assert!((1..=counts.drafted).contains(&counts.accepted), "{counts:?}");
        let crowd: Vec<_> = (0..6).map(|seed| tokio::spawn(of(&session, seed))).collect();
        for (task, want) in crowd.into_iter().zip(&want) {
            assert_eq!(task.await.unwrap(), *want, "{strategy}");
        }
        assert_eq!((plain.sequences().drafted, plain.sequences().accepted), (0, 0));
        assert_eq!(session.sequences().tokens, 12 * 90);
    }
}

/// Sequences of any length, of which clients leave many at any time, give back all that they had. GALAXY_SEQUENCES says
/// how many; with 10,000 it shows the process's memory, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_end_or_are_abandoned_give_back_all_kv_blocks() {
    let many = std::env::var("GALAXY_SEQUENCES").map_or(200, |n| n.parse::<u32>().unwrap());
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.unwrap_or("unknown").trim().to_owned()
    };
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    let cache = Cache { rows: 8 * Cache::BLOCK, values: CacheType::F16 };
    let plan = plan_with(&model, &[1.0, 1.0], Strategy::Galaxy, cache);
    let fleet = Arc::new(LocalFleet::open(model.clone(), plan).unwrap());
    let session = Session::new(model.clone(), fleet, Limits { queue: 64, ..LIMITS });
    let clients = (0..12u32).map(|client| {
        let session = session.clone();
        tokio::spawn(async move {
            let mut state = client * 7919 + 1;
            let mut draw = move |end: u32| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) % end
            };
            for at in (client..many).step_by(12) {
                let ids: Vec<u32> = (0..1 + draw(150)).map(|_| draw(90)).collect();
                let options = GenerateOptions {
                    max_tokens: 1 + draw(40),
                    ignore_end: true,
                    sampling: SamplingParams {
                        temperature: Some(draw(2) as f32),
                        seed: Some(at.into()),
                        ..SamplingParams::default()
                    },
                    fallback: None,
                    ..GenerateOptions::default()
                };
                let (listener, mut said) = mpsc::channel(8);
                let session = session.clone();
                let answer = tokio::spawn(async move {
                    session.generate(ids.into(), options, None, listener).await
                });
                // Some are read to their end, and some are left somewhere before it.
                let mut heard = if draw(2) == 0 { u32::MAX } else { draw(30) };
                while heard > 0 && said.recv().await.transpose().unwrap().is_some() {
                    heard -= 1;
                }
                drop(said);
                answer.await.unwrap();
                if at % (many / 10).max(1) == 0 {
                    println!("{at} sequences: {}", resident());
                }
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let after = session.sequences();
    assert_eq!((after.waiting, after.running), (0, 0), "{after:?}");
    assert_eq!((after.free, session.admission().queued()), (8, 0), "{after:?}");
    println!("{many} sequences: {}; {after:?}", resident());
}
