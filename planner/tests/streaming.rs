//! Plans for memory that does not add up: weights come from disk.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{BatchShape, Bytes, Cache, Reading, Room, Strategy, Wanted, plan::Phase};
use galaxy_graph::{budget, lower, operators::OperatorGraph, pieces, program::Memory, verify};
use galaxy_model::Formats;
#[allow(
    unused_imports,
    reason = "testing.rs, which is taken in below, names them by this path"
)]
use galaxy_planner::{
    Allowed, Offer, Planned, PlanningError, Request, Workload, plan, split, synthetic,
};

#[path = "../src/testing.rs"]
#[allow(dead_code)]
mod testing;
use testing::{Dice, Question};

/// A question about a BERT of twelve layers, 340 MB, on so many devices of so much memory and such
/// disks.
fn question(memory: &[u64], disks: &[f64]) -> Question {
    let spec = testing::bert(12, 768);
    let mut devices = testing::devices(memory.len(), 40.0, 1e9);
    for (device, memory) in devices.iter_mut().zip(memory) {
        device.memory = Bytes(*memory);
    }
    let mut question = Question::new(&spec, devices);
    question.allowed.reading = Reading::Auto;
    for (device, disk) in question.profile.devices.iter_mut().zip(disks) {
        device.disk = *disk;
    }
    question
}

fn planned(question: &Question) -> Planned {
    plan(&question.request()).unwrap()
}

/// Bytes that each device of a plan reads from disk for a program.
fn read(question: &Question, planned: &Planned) -> Vec<u64> {
    let each = planned.plan.ring.iter();
    each.map(|d| galaxy_planner::stream::read_and_kept(&question.spec, &Formats::default(), d).0.0)
        .collect()
}

#[test]
fn streaming_plans_are_valid_and_keep_to_every_budget() {
    for seed in 0..20 {
        let mut dice = Dice::new(seed);
        let count = dice.whole(1, 4) as usize;
        let memory: Vec<u64> = (0..count).map(|_| dice.whole(70_000_000, 220_000_000)).collect();
        let disks: Vec<f64> = (0..count).map(|_| dice.real(5e7, 2e9)).collect();
        let mut question = question(&memory, &disks);
        question.allowed.max_rows = 128;
        let auto = planned(&question);
        for strategy in Strategy::ALL {
            question.allowed.strategy = strategy;
            let found = match plan(&question.request()) {
                Ok(found) => found,
                Err(PlanningError::Memory { missing, .. }) => {
                    assert!(missing.0 > 0);
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let (spec, plan) = (&question.spec, &found.plan);
            assert_eq!(plan.validate(spec.extent()), Ok(()));
            let needs = budget::needs_all(spec, &Formats::default(), plan).unwrap();
            for (need, device) in needs.iter().zip(&plan.ring) {
                assert!(need.total() <= device.budget, "{}: {need:?}", device.name);
            }
            let shape = BatchShape::single(128, Wanted::Hidden).unwrap();
            let programs = lower(spec, &Formats::default(), plan, Phase::Prefill, &shape).unwrap();
            assert_eq!(verify(spec, &Formats::default(), plan, &shape, &programs), Ok(()));
            assert_eq!(plan.ring.len() + found.left_out.len(), count);
            let (best, other) = (auto.prediction.latency, found.prediction.latency);
            assert!(best <= other, "{strategy}: {other}, auto {}: {best}", auto.what);
        }
    }
}

/// One device whose disk is slow reads what it cannot hold, all the time, and nothing else counts.
#[test]
fn latency_on_a_slow_disk_is_near_the_read_time() {
    let disk = 2e7;
    let mut last = f64::INFINITY;
    for memory in [100, 150, 200, 300, 380] {
        let question = question(&[memory * 1_000_000], &[disk]);
        let planned = planned(&question);
        let read = read(&question, &planned)[0];
        let bound = read as f64 / disk * 1e9;
        let latency = planned.prediction.latency;
        // A buffer of one piece reads least, and then kernels and disk take turns.
        assert!(latency >= bound && latency < bound * 1.04, "{memory}: {latency} of {bound}");
        assert!(latency < last, "more memory is faster");
        last = latency;
        let held = planned.needs[0].total().0;
        assert!(held + (16 << 20) > memory * 1_000_000, "memory is used: {held} of {memory} MB");
    }
    assert!(planned(&question(&[900_000_000], &[disk])).plan.ring[0].streaming.is_none());
}

/// A device with the faster disk, or memory to spare, gets more.
#[test]
fn devices_with_faster_disks_or_more_memory_get_more_weights() {
    let graph = OperatorGraph::of(&testing::bert(12, 768));
    let columns = |planned: &Planned| -> Vec<u64> {
        let held =
            |at: usize| budget::all_weights(&graph, &Formats::default(), &planned.plan.ring[at]);
        (0..planned.plan.ring.len()).map(|at| held(at).0).collect()
    };
    let disks = question(&[100_000_000, 100_000_000], &[2e7, 2e8]);
    let parts = columns(&planned(&disks));
    assert!(parts.len() == 1 || parts[1] > 2 * parts[0], "{parts:?}");
    let memory = question(&[100_000_000, 250_000_000], &[3e7, 3e7]);
    let found = planned(&memory);
    let parts = columns(&found);
    assert!(parts.len() == 2 && parts[1] > parts[0] + 50_000_000, "{parts:?}, {}", found.what);
    // Both are through with reading at about the same time.
    let read = read(&memory, &found);
    assert!(read[0].abs_diff(read[1]) < 40_000_000, "{read:?}");
}

#[test]
fn a_budget_too_small_to_stream_is_refused_with_the_missing_bytes() {
    let question = question(&[40_000_000], &[1e9]);
    let error = plan(&question.request()).unwrap_err();
    let PlanningError::Memory { missing, what, .. } = &error else { panic!("{error}") };
    assert!(missing.0 > 0 && what.contains("even with its weights on disk"), "{error}");
}

/// Tokens are generated, too: for each, everything is read that does not stay.
#[test]
fn decoding_with_streamed_weights_takes_the_time_to_read_them() {
    let spec = testing::llama(8, 1024, 16, 4);
    let mut devices = testing::devices(1, 40.0, 1e9);
    devices[0].memory = Bytes(220_000_000);
    let mut question = Question::new(&spec, devices);
    question.allowed.reading = Reading::Auto;
    question.allowed.cache = Cache { rows: Cache::BLOCK, values: galaxy_common::CacheType::F32 };
    question.workload.generated = 20;
    question.workload.wanted = Wanted::LastLogits;
    question.profile.devices[0].disk = 1e8;
    let found = planned(&question);
    let (plan, spec) = (&found.plan, &question.spec);
    let read = read(&question, &found)[0];
    let token = found.prediction.token;
    assert!((token / (read as f64 / 1e8 * 1e9) - 1.0).abs() < 0.1, "{token} for {read} bytes");
    let shape = BatchShape::single(64, Wanted::LastLogits).unwrap();
    let programs = lower(spec, &Formats::default(), plan, Phase::Prefill, &shape).unwrap();
    assert_eq!(verify(spec, &Formats::default(), plan, &shape, &programs), Ok(()));
    let all = pieces::of_device(&OperatorGraph::of(spec), &Formats::default(), &plan.ring[0]);
    let most = plan.ring[0].streaming.as_ref().unwrap().buffer;
    assert!(programs[0].slot_bytes(Memory::Stream) <= most && all.len() > 8);
}

/// A cluster file names how weights are read; `preload` allows it not at all.
#[test]
fn plans_use_the_named_streaming_policy() {
    let mut question = question(&[150_000_000], &[1e9]);
    question.allowed.max_rows = 128;
    for (reading, room, agents) in [
        (Reading::Sequential, Room::Parts(1), 1),
        (Reading::Sync, Room::Parts(2), 1),
        (Reading::Async, Room::Ring, 1),
        (Reading::PipeLoad(3), Room::Ring, 3),
    ] {
        question.allowed.reading = reading;
        let found = planned(&question);
        let streaming = found.plan.ring[0].streaming.as_ref().unwrap();
        assert_eq!((streaming.room, streaming.loaders), (room, agents), "{reading}");
        let largest = pieces::of_device(
            &OperatorGraph::of(&question.spec),
            &Formats::default(),
            &found.plan.ring[0],
        );
        let largest = largest.iter().map(|piece| piece.stored()).max().unwrap();
        let least = if let Room::Parts(parts) = room { u64::from(parts) } else { 2 };
        assert!(streaming.buffer.0 >= least * largest, "{reading}: {}", streaming.buffer);
        assert!(found.needs[0].total() <= found.plan.ring[0].budget, "{reading}");
    }
    question.allowed.reading = Reading::Preload;
    assert!(matches!(plan(&question.request()), Err(PlanningError::Memory { .. })));
}
