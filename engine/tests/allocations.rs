//! Nothing is allocated on the way of a token, by any thread.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    BatchShape, Bytes, Cache, CacheType, CandidateCount, DeviceName, Epoch, Exchange, Sampling,
    Segment, SequenceNumber, Strategy, Wanted, WireType, plan::Phase,
};
use galaxy_engine::{
    compute::{Binding, cpu::CpuEngine},
    executor::{Executor, Job, RunError},
    generate::{Generation, Goal},
    link::{Links, memory},
    sampler::{Sequence, TokenMask},
    weights::Shard,
};
use galaxy_graph::{
    Program, links, lower,
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::{alloc::System, ops::ControlFlow, path::Path, sync::Arc, time::Duration};

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Allocations so far, of all threads.
fn allocations() -> usize {
    let stats = COUNTED.stats();
    stats.allocations + stats.reallocations
}

const PROMPT: [u32; 5] = [3, 14, 15, 92, 65];
/// After so many tokens all that grows has grown.
const WARM: usize = 120;
/// Behind so many tokens nothing is asked for a while.
const IDLE: usize = 60;

/// The allocations between the warm tokens of sequences that are sampled so, in the same steps, on all
/// devices of a plan. Of the last one a mask leaves out a token.
fn allocated(
    strategy: Strategy,
    devices: usize,
    samplings: &[Sampling],
    values: CacheType,
) -> usize {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/llama");
    let model = Arc::new(ModelDir::open(&path).unwrap());
    let sequences = samplings.len() as u32;
    let cache = Cache { rows: 2 * sequences * Cache::BLOCK, values };
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: 64,
        cache,
    };
    let member = |at: usize| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 2,
        share: 1.0,
    };
    let members: Vec<Member> = (0..devices).map(member).collect();
    let mut plan = share::plan(model.spec(), &terms, &members).unwrap();
    plan.exchange = Exchange::Direct;
    let mut ends: Vec<Links> = plan.ring.iter().map(|_| Links::default()).collect();
    for (from, to) in links(&plan) {
        let (sender, receiver, closer) = memory::link();
        ends[from.index()].senders.push((to, sender));
        ends[from.index()].closers.push(closer.clone());
        ends[to.index()].receivers.push((from, receiver));
        ends[to.index()].closers.push(closer);
    }
    let make = |(device, ends): (&galaxy_common::DevicePlan, Links)| {
        let shard = Shard::load(model.clone(), device, &mut |_, _| ControlFlow::Continue(()));
        let engine = CpuEngine::new(shard.unwrap(), device.threads).with_cache(cache);
        let executor = Executor::start(device.name.as_str(), Box::new(engine)).unwrap();
        executor.connect(Epoch(1), ends);
        // Over the edge between two blocks.
        for ((slot, sampling), block) in (0..).zip(samplings).zip((0..).step_by(2)) {
            let (rows, tokens, sampling) = (300, PROMPT.to_vec(), sampling.clone());
            let text = Sequence { slot, rows, sampling, tokens, prompt: PROMPT.len() };
            executor.begin(text, [block, block + 1].into()).unwrap();
        }
        executor
    };
    let executors: Vec<Executor> = plan.ring.iter().zip(ends).map(make).collect();
    let mask = TokenMask::of(&(0..96).collect::<Vec<u32>>());
    let stage = |phase, context_len, tokens: &[u32], count: u32, sequence| -> (Vec<u32>, usize) {
        let on = |rank: usize| {
            let wanted = Wanted::Token(CandidateCount::Few);
            let rows = tokens.len() as u32 / sequences;
            let segment = |slot| Segment { slot, context_len, cached: true, rows, wanted };
            let program = |shape: &BatchShape| -> Result<Arc<Program>, RunError> {
                Ok(Arc::new(
                    lower(model.spec(), model.formats(), &plan, phase, shape).unwrap().remove(rank),
                ))
            };
            let shape = BatchShape::new((0..sequences).map(segment).collect()).unwrap();
            let first = Job {
                epoch: Epoch(1),
                sequence: SequenceNumber(sequence),
                program: program(&shape).unwrap(),
                binding: Binding::new(shape, tokens),
                deadline: None,
            };
            let goals = vec![Goal { count, ..Goal::default() }; samplings.len()];
            let generation = Generation { first, goals, steps: 999, drafting: None };
            let (mut made, mut warm, mut last) = (Vec::with_capacity(1024), 0, 0);
            let tell = |at, told: &galaxy_engine::generate::TokenEvent| {
                made.push(told[0] as u32);
                let each = made.len().div_ceil(samplings.len());
                // Another device may be through with the last one, and write its report.
                if each < count as usize {
                    last = allocations();
                }
                match each {
                    // A channel takes memory when a thread sleeps on it for the first time: now.
                    IDLE => std::thread::sleep(Duration::from_millis(20)),
                    WARM => warm = last,
                    _ => {}
                }
                (samplings.len() > 1 && at + 1 == samplings.len()).then(|| mask.clone())
            };
            generation.run(&executors[rank], program, tell).unwrap();
            (made, last.saturating_sub(warm))
        };
        std::thread::scope(|scope| {
            let others = (1..devices).map(|rank| scope.spawn(move || on(rank)));
            let others: Vec<_> = others.collect();
            let first = on(0);
            for other in others {
                assert_eq!(other.join().unwrap().0, first.0);
            }
            first
        })
    };
    let prompts = PROMPT.repeat(samplings.len());
    let (first, _) = stage(Phase::Prefill, 0, &prompts, 1, 1);
    let (made, allocated) = stage(Phase::Decode, PROMPT.len() as u32, &first, 280, 2);
    assert_eq!(made.len(), 280 * samplings.len());
    allocated
}

/// One test only: others of the same process would be counted, too.
#[test]
fn nothing_is_allocated_for_a_token() {
    let sampled = Sampling {
        temperature: 1.0,
        top_k: 40,
        min_p: 0.001,
        repetition: 1.1,
        presence: 0.1,
        bias: vec![(7, -1.0)],
        logprobs: 5,
        ..Sampling::default()
    };
    let (greedy, sampled) = (vec![Sampling::greedy()], vec![sampled]);
    let together = [&greedy[..], &sampled, &greedy].concat();
    for samplings in [greedy, sampled, together] {
        for (strategy, devices) in [
            (Strategy::Local, 1),
            (Strategy::Galaxy, 2),
            (Strategy::Pipeline, 2),
            (Strategy::Sequence, 2),
        ] {
            // Where both devices are late, one may sleep on a link for the first time late, too.
            for values in [CacheType::F16, CacheType::Q8] {
                let counts = [0; 3].map(|_| allocated(strategy, devices, &samplings, values));
                let what = format!("{strategy} on {devices}, {values}, {samplings:?}");
                assert!(counts.contains(&0), "{counts:?}: {what}");
            }
        }
    }
}
