//! One more device never makes a plan of many devices worse.
#![allow(clippy::unwrap_used)]

use galaxy_common::{Bytes, Cache, DeviceName, Wanted, WeightFormat};
use galaxy_model::Formats;
use galaxy_planner::{Allowed, Offer, Request, Workload, plan, split, synthetic};
use synthetic::SyntheticDevice;

#[path = "additions/sample.rs"]
mod sample;
#[path = "../src/testing.rs"]
#[allow(dead_code)]
mod testing;

/// Latencies within this factor are as good: plans of one kind differ by less.
const AS_GOOD: f64 = 1.01;

/// `examples/additions.rs` looks at 1,000 of larger clusters.
#[test]
fn an_added_device_never_slows_sampled_clusters() {
    let mut planned = 0;
    for seed in 0..6 {
        let case = sample::addition(seed, 8, 12);
        let Ok(before) = plan(&case.request(case.before())) else { continue };
        let after = plan(&case.request(&case.after.offers)).unwrap();
        let (before, after) = (before.prediction.latency, after.prediction.latency);
        assert!(after <= before * AS_GOOD, "{}, seed {seed}: {before} to {after}", case.what);
        planned += 1;
    }
    assert!(planned > 3, "{planned}");
}

/// Predicted seconds of a model of 70 billion parameters on four fast machines and so many laptops.
fn fast_machines_and_laptops(laptops: usize, made: u32) -> f64 {
    let device = |name: String, gflops, memory_rate, memory: u64| SyntheticDevice {
        name: DeviceName::new(name).unwrap(),
        gflops,
        memory_rate,
        memory: Bytes(memory),
        threads: 1,
        link_rate: 125e6,
        latency: 1e5,
    };
    let fast = (0..4).map(|at| device(format!("fast-{at}"), 800.0, 100.0, 32_000_000_000));
    let slow = (0..laptops).map(|at| device(format!("laptop-{at}"), 120.0, 30.0, 12_000_000_000));
    let devices: Vec<SyntheticDevice> = fast.chain(slow).collect();
    let mut question = testing::Question::new(&testing::llama(80, 8192, 64, 8), devices.clone());
    question.profile = synthetic::profile(&question.spec, "shape", WeightFormat::F16, &devices);
    question.workload.lengths = vec![(284, 1.0)];
    question.workload.wanted = Wanted::LastLogits;
    question.allowed.max_rows = 512;
    question.workload.generated = made;
    if made > 0 {
        question.allowed.cache =
            Cache { rows: Cache::taken(284 + made), values: galaxy_common::CacheType::F32 };
    }
    let planned =
        plan(&Request { formats: &Formats::all(WeightFormat::F16), ..question.request() }).unwrap();
    planned.prediction.latency * 1e-9
}

#[test]
fn more_laptops_never_slow_a_large_model() {
    for made in [0, 64] {
        let mut least = f64::INFINITY;
        for laptops in [4, 5, 6, 8] {
            let seconds = fast_machines_and_laptops(laptops, made);
            assert!(seconds <= least * AS_GOOD, "{laptops} laptops, {made}: {least} to {seconds}");
            least = least.min(seconds);
        }
    }
}
