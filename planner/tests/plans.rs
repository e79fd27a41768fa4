//! Plans of random models and clusters hold what they promise, and bad questions are refused.
#![allow(clippy::unwrap_used)]

use galaxy_common::{
    BatchShape, Bytes, DeviceName, LinkType, ProfileError, Strategy, Wanted, WeightFormat,
    WireType, plan::Phase,
};
use galaxy_graph::{budget, lower, operators::OperatorGraph, verify};
use galaxy_model::{Formats, Matrix, NormPlace};
use galaxy_planner::{
    Allowed, Offer, PlanningError, Request, Workload, plan, predict, split, synthetic,
};
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

#[path = "../src/testing.rs"]
#[allow(dead_code)]
mod testing;
use testing::{Dice, Question};

/// A model and a cluster that may not hold it.
fn question(seed: u64) -> Question {
    let mut dice = Dice::new(seed);
    let layers = dice.whole(1, 6) as u32;
    let heads = [4, 6, 8][dice.whole(0, 2) as usize];
    let mut spec = if dice.whole(0, 1) == 0 {
        testing::bert(layers, 64 * heads)
    } else {
        let shared = [1, 2, heads][dice.whole(0, 2) as usize];
        testing::llama(layers, 64 * heads, heads, shared)
    };
    // A parallel residual needs a norm before its blocks.
    spec.parallel = spec.norm_place == NormPlace::Pre && dice.whole(0, 2) == 0;
    let count = dice.whole(1, 5) as usize;
    let rate = dice.real(1e6, 2e8);
    let mut devices = testing::devices(count, dice.real(5.0, 100.0), rate);
    for device in &mut devices {
        device.gflops *= dice.real(0.2, 1.0);
        device.link_rate *= dice.real(0.3, 1.0);
        device.memory = Bytes(dice.whole(30_000_000, 220_000_000));
        device.threads = dice.whole(1, 4) as u16;
    }
    let mut question = Question::new(&spec, devices);
    question.workload.lengths =
        (0..dice.whole(1, 4)).map(|_| (dice.whole(1, 250) as u32, dice.real(0.1, 2.0))).collect();
    if spec.causal && dice.whole(0, 1) == 0 {
        question.workload.wanted = Wanted::LastLogits;
    }
    question.allowed.tiles = [None, None, Some(1), Some(4)][dice.whole(0, 3) as usize];
    if dice.whole(0, 3) == 0 {
        question.allowed.wires = vec![WireType::F32, WireType::F16];
    }
    question.workload.texts = [1, 1, 2, 3, 7, 1000][dice.whole(0, 5) as usize];
    question
}

/// Quantised matrices are not widened where they are split, and take the memory of their formats.
#[test]
fn quantised_matrices_are_split_between_quantisation_blocks() {
    let spec = testing::llama(4, 640, 8, 8);
    let (four, six) = (WeightFormat::Q4K, WeightFormat::Q6K);
    let mut formats = Formats::all(four).with_vectors(WeightFormat::F32);
    for layer in [0, 3] {
        formats = formats.with(Matrix::Down(layer), six).with(Matrix::Value(layer), six);
    }
    let graph = OperatorGraph::of(&spec);
    for devices in 1..5 {
        let mut question = Question::new(&spec, testing::devices(devices, 50.0, 1e9));
        question.formats = formats.clone();
        for strategy in [Strategy::Galaxy, Strategy::Megatron, Strategy::Pipeline, Strategy::Auto] {
            question.allowed.strategy = strategy;
            let planned = plan(&question.request()).unwrap();
            for (device, needs) in planned.plan.ring.iter().zip(&planned.needs) {
                let part = device.prefill.block(0);
                assert!((part.heads.start() * 80).is_multiple_of(32), "{strategy} {devices}");
                assert!(part.columns.start().is_multiple_of(32), "{strategy} {devices}");
                for (_, product) in graph.shared() {
                    let slices = graph.slices(product, &device.prefill);
                    let runs = product.runs(&formats, &slices);
                    assert!(runs.iter().all(|run| run.format != WeightFormat::F32));
                }
                assert_eq!(needs.weights, budget::weights(&graph, &formats, device));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_plans_verify_and_keep_to_every_budget(seed in any::<u64>(), which in 0usize..6) {
        let mut question = question(seed);
        question.allowed.strategy = Strategy::ALL[which];
        let request = question.request();
        match plan(&request) {
            Ok(planned) => {
                let (spec, plan) = (&question.spec, &planned.plan);
                prop_assert_eq!(plan.validate(spec.extent()), Ok(()));
                let needs = budget::needs_all(spec, &Formats::default(), plan).unwrap();
                for (need, device) in needs.iter().zip(&plan.ring) {
                    prop_assert!(need.total() <= device.budget, "{}: {need:?}", device.name);
                }
                prop_assert_eq!(needs, planned.needs.clone());
                let shape = BatchShape::single(question.allowed.max_rows, request.workload.wanted).unwrap();
                let programs = lower(spec, &Formats::default(), plan, Phase::Prefill, &shape).unwrap();
                prop_assert_eq!(verify(spec, &Formats::default(), plan, &shape, &programs), Ok(()));
                prop_assert!(planned.prediction.latency > 0.0);
                let in_plan = plan.ring.len() + planned.left_out.len();
                prop_assert_eq!(in_plan, question.offers.len());
            }
            Err(PlanningError::Memory { missing, .. }) => prop_assert!(missing.0 > 0),
            Err(PlanningError::Lower(error)) => prop_assert!(false, "{error}"),
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn auto_is_never_predicted_slower_than_another_strategy(seed in any::<u64>()) {
        let mut question = question(seed);
        let auto = plan(&question.request());
        for strategy in Strategy::ALL {
            question.allowed.strategy = strategy;
            let Ok(other) = plan(&question.request()) else { continue };
            let auto = auto.as_ref().map(|a| a.prediction.latency);
            let auto = auto.unwrap_or_else(|e| panic!("{strategy} has a plan, and auto: {e}"));
            prop_assert!(auto <= other.prediction.latency, "{strategy}: {auto}, {other:?}");
        }
    }
}

/// A question about three unlike devices and so many texts of 64 tokens, of a model in the shape of
/// all-MiniLM-L6-v2.
fn embedding(texts: u32, speeds: [f64; 3], bits_per_second: f64) -> Question {
    let mut spec = testing::bert(6, 384);
    (spec.heads, spec.kv_heads, spec.head_width) = (12, 12, 32);
    let mut devices = testing::devices(3, 1.0, bits_per_second / 8.0);
    devices.iter_mut().zip(speeds).for_each(|(device, speed)| device.gflops = speed / 2.0);
    let mut question = Question::new(&spec, devices);
    question.workload.lengths = vec![(64, 1.0)];
    question.workload.texts = texts;
    question.workload.wanted = Wanted::Pooled(galaxy_common::Pooling::Mean);
    question.allowed.max_rows = 4096;
    question
}

/// The plan, and its texts per second over those of all devices together, each alone.
fn gain(question: &mut Question) -> (galaxy_planner::Planned, f64) {
    let texts = f64::from(question.workload.texts);
    let together = plan(&question.request()).unwrap();
    let offers = question.offers.clone();
    let alone = |offer: &Offer| {
        question.offers = vec![offer.clone()];
        texts / plan(&question.request()).unwrap().prediction.latency
    };
    let sum: f64 = offers.iter().map(alone).sum();
    question.offers.clone_from(&offers);
    let rate = texts / together.prediction.latency;
    (together, rate / sum)
}

/// Row weights of each device: its texts, where rows are given out by these.
fn weights(planned: &galaxy_planner::Planned) -> Vec<u32> {
    planned.plan.ring.iter().map(|device| device.prefill.row_weight).collect()
}

/// The best gain where each text stays on one device.
fn whole_texts(texts: u32, speeds: [f64; 3]) -> f64 {
    let mut given = [0.0; 3];
    for _ in 0..texts {
        let end = |at: &usize| (given[*at] + 1.0) / speeds[*at];
        let first = (0..3).min_by(|a, b| end(a).total_cmp(&end(b))).unwrap();
        given[first] += 1.0;
    }
    let end = given.iter().zip(speeds).map(|(texts, speed)| texts / speed).fold(0.0, f64::max);
    f64::from(texts) / end / speeds.iter().sum::<f64>()
}

#[test]
fn many_texts_are_given_to_devices_whole_unless_cutting_is_faster() {
    let alike = [15.0; 3];
    let unlike = [26.7, 15.0, 7.3];
    for speeds in [alike, unlike] {
        for texts in [16, 32, 64] {
            let mut question = embedding(texts, speeds, 125e6);
            let (planned, gain) = gain(&mut question);
            assert!(gain > 0.9, "{texts} texts: {gain:.3} by {}", planned.what);
            // Nothing but results leaves a device, unless that beats whole texts, as of 6, 5 and 5 of 16: 16 of
            // 18 parts.
            let sent: u64 = planned.prediction.devices.iter().map(|device| device.sent).sum();
            let whole = whole_texts(texts, speeds);
            let what = format!("{texts} texts: {gain:.3}, whole {whole:.3}, {}", planned.what);
            assert!(sent == 0 || gain > whole, "{what}");
            let plan = &planned.plan;
            // Where it does, a block may be cut as that takes least.
            let alike = plan.modes.iter().all(|modes| modes.attention == modes.mlp);
            assert!(plan.ring.len() == 3 && (sent > 0 || alike), "{}", planned.what);
        }
    }
}

/// Two of four texts on the fastest device leave it idle for a fifth of the time, five of eight are too many
/// for it; eight do not divide by three.
#[test]
fn texts_are_cut_where_that_is_predicted_to_be_faster() {
    let (alike, unlike) = ([15.0; 3], [26.7, 15.0, 7.3]);
    let cases = [
        (2, alike, 0.8),
        (8, alike, 0.93),
        (16, alike, 0.93),
        (4, unlike, 0.89),
        (8, unlike, 0.89),
    ];
    for (texts, speeds, wanted) in cases {
        let mut question = embedding(texts, speeds, 250e6);
        let (planned, gain) = gain(&mut question);
        assert!(gain > wanted, "{texts} texts: {gain:.3} by {}", planned.what);
        let busy = planned.prediction.devices.iter().map(|device| device.compute);
        let (least, most) = busy.fold((f64::INFINITY, 0.0f64), |(l, m), b| (l.min(b), m.max(b)));
        assert!(least > 0.75 * most, "{texts} texts: {least} {most} by {}", planned.what);
    }
}

#[test]
fn few_texts_are_not_cut_where_links_are_slow() {
    let mut question = embedding(4, [15.0; 3], 20e6);
    let (planned, slow) = gain(&mut question);
    // As fast as two on one and one on each of the others.
    assert_eq!(weights(&planned), [2, 2], "{}", planned.what);
    assert!(slow > 0.6, "{slow:.3} by {}", planned.what);
    // Over faster links, they are.
    let mut question = embedding(4, [15.0; 3], 1e9);
    let (planned, fast) = gain(&mut question);
    assert!(fast > 0.9 && weights(&planned).iter().sum::<u32>() != 4, "{}", planned.what);
}

#[test]
fn texts_beyond_one_program_are_predicted_as_several_programs() {
    let mut question = embedding(64, [15.0; 3], 125e6);
    let one = plan(&question.request()).unwrap();
    question.allowed.max_rows = 1024;
    let four = plan(&question.request()).unwrap();
    let ratio = four.prediction.latency / one.prediction.latency;
    assert!((1.0..1.3).contains(&ratio), "{ratio}");
    // Sequences for which tokens are generated come one by one.
    let mut question = decode_question(3, 1e7);
    let single = plan(&question.request()).unwrap();
    question.workload.texts = 64;
    assert_eq!(plan(&question.request()).unwrap(), single);
}

#[test]
fn equal_planning_requests_give_equal_plans() {
    for seed in 0..6 {
        let (first, second) = (question(seed), question(seed));
        let (first, second) = (plan(&first.request()), plan(&second.request()));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
    }
}

/// A question about prompts for which 100 tokens each are generated.
fn decode_question(devices: usize, rate: f64) -> Question {
    let spec = testing::llama(16, 2048, 32, 8);
    let mut question = Question::new(&spec, testing::devices(devices, 40.0, rate));
    question.workload.wanted = Wanted::LastLogits;
    question.workload.generated = 100;
    question.allowed.cache =
        galaxy_common::Cache { rows: 384, values: galaxy_common::CacheType::F32 };
    question
}

#[test]
fn generation_uses_one_device_where_links_are_slow_and_more_otherwise() {
    // Whatever is split, each token goes to all devices: links that take 200 ms leave everything on one device.
    let far = |mut question: Question| {
        question.profile.links.iter_mut().for_each(|link| link.latency = 2e8);
        question
    };
    let alone = far(decode_question(3, 1e8));
    let planned = plan(&alone.request()).unwrap();
    assert_eq!(planned.plan.ring.len(), 1, "{}", planned.what);
    let near = decode_question(3, 1e8);
    let planned = plan(&near.request()).unwrap();
    assert!(planned.plan.ring.len() > 1, "{}", planned.what);
    let token = planned.prediction.token;
    assert!(token > 0.0 && 100.0 * token < planned.prediction.latency);
    // The same plan without tokens takes what is left.
    let mut read = decode_question(3, 1e8);
    read.workload.generated = 0;
    let reading = predict(&read.request(), &planned.plan).unwrap();
    assert_eq!(reading.token, 0.0);
    let rest = planned.prediction.latency - 100.0 * token;
    assert!((reading.latency / rest - 1.0).abs() < 1e-6, "{} and {rest}", reading.latency);
    // No strategy generates a sequence sooner.
    for strategy in Strategy::ALL {
        let mut other = decode_question(3, 1e8);
        other.allowed.strategy = strategy;
        let other = plan(&other.request()).unwrap();
        let (best, found) = (planned.prediction.latency, other.prediction.latency);
        assert!(best <= found * 1.000_001, "{strategy}: {found}, and auto {best}");
    }
}

/// Devices that are all alike are left out where fewer generate a sequence sooner.
#[test]
fn more_devices_never_slow_generation() {
    let mut left_out = 0;
    for rate in [1e8, 3e7, 1e7, 5e6] {
        let all = decode_question(4, rate);
        let auto = plan(&all.request()).unwrap();
        left_out += 4 - auto.plan.ring.len();
        for few in 1..4 {
            for strategy in [Strategy::Auto, Strategy::Galaxy] {
                let mut fewer = decode_question(few, rate);
                fewer.allowed.strategy = strategy;
                let found = plan(&fewer.request()).unwrap();
                // Splits of one ring that differ by a unit are as good as one another.
                assert!(
                    auto.prediction.latency <= found.prediction.latency * 1.01,
                    "{few} of 4, {rate}: {} is faster than {}",
                    found.what,
                    auto.what
                );
            }
        }
    }
    assert!(left_out > 0);
}

fn plenty(devices: usize, rate: f64) -> Question {
    Question::new(&testing::bert(4, 512), testing::devices(devices, 30.0, rate))
}

#[test]
fn over_slow_links_auto_is_sequence_parallel_or_on_one_device() {
    let mut question = plenty(3, 2e6);
    let auto = plan(&question.request()).unwrap();
    assert!(auto.plan.any_sequence() || auto.plan.ring.len() == 1, "{}", auto.what);
    question.allowed.strategy = Strategy::Galaxy;
    let galaxy = plan(&question.request()).unwrap();
    assert!(auto.prediction.latency * 1.5 < galaxy.prediction.latency);
}

#[test]
fn slow_devices_are_left_out_with_a_reason() {
    let mut devices = testing::devices(4, 40.0, 5e7);
    for device in &mut devices[2..] {
        device.gflops = 0.4;
    }
    let question = Question::new(&testing::bert(4, 512), devices);
    let planned = plan(&question.request()).unwrap();
    assert!(planned.plan.ring.len() <= 2, "{}", planned.what);
    let reasons: Vec<&str> = planned.left_out.iter().map(|l| l.1.as_str()).collect();
    let slow = reasons.iter().filter(|r| r.contains("times slower"));
    assert_eq!(slow.count(), 2, "{reasons:?}");
    assert!(planned.runner_up.is_some());
}

/// The reason why the last of these devices is left out.
fn why_not_the_last(devices: Vec<synthetic::SyntheticDevice>) -> String {
    let last = devices.last().unwrap().name.clone();
    let question = Question::new(&testing::bert(4, 512), devices);
    let planned = plan(&question.request()).unwrap();
    let left_out = planned.left_out.iter().find(|(name, _)| *name == last);
    left_out.unwrap_or_else(|| panic!("it has a part: {}", planned.what)).1.clone()
}

#[test]
fn the_reason_for_leaving_a_device_out_names_its_bottleneck() {
    let three = || {
        let mut devices = testing::devices(3, 40.0, 1e8);
        devices.iter_mut().for_each(|device| device.gflops = 40.0);
        // A little slower than the others, which alone would not keep it out.
        devices[2].gflops = 36.0;
        devices
    };
    let mut devices = three();
    devices[2].link_rate = 1e5;
    let why = why_not_the_last(devices);
    for word in ["because of its link (800.0 kbit/s", "with such a link it would save"] {
        assert!(why.contains(word), "{why}");
    }
    let mut devices = three();
    devices[2].gflops = 0.4;
    let why = why_not_the_last(devices);
    for word in ["because of its kernels", "times slower", "with such kernels it would save"] {
        assert!(why.contains(word), "{why}");
    }
    let mut devices = three();
    devices[2].memory = Bytes(34_000_000);
    let why = why_not_the_last(devices);
    for word in ["it grants 34.0 MB", "because of its memory", "with as much it would save"] {
        assert!(why.contains(word), "{why}");
    }
}

#[test]
fn every_strategy_plans_a_cluster_of_one_device() {
    for strategy in Strategy::ALL {
        let mut question = plenty(1, 1e8);
        question.allowed.strategy = strategy;
        let planned = plan(&question.request()).unwrap();
        assert_eq!(planned.plan.ring.len(), 1, "{strategy}");
        assert_eq!(planned.plan.tiles, 1);
    }
}

#[test]
fn invalid_planning_requests_are_refused() {
    let refused = |change: &dyn Fn(&mut Question)| {
        let mut question = plenty(2, 1e8);
        change(&mut question);
        plan(&question.request()).unwrap_err()
    };
    let profile = |error: PlanningError| match error {
        PlanningError::Profile(error) => error,
        other => panic!("{other}"),
    };
    let nothing =
        |error: PlanningError| assert!(matches!(error, PlanningError::Nothing { .. }), "{error}");
    nothing(refused(&|q| q.offers.clear()));
    nothing(refused(&|q| q.workload.lengths.clear()));
    nothing(refused(&|q| q.workload.texts = 0));
    nothing(refused(&|q| q.workload.lengths[0].1 = f64::NAN));
    nothing(refused(&|q| q.allowed.links.clear()));
    nothing(refused(&|q| q.offers.push(q.offers[0].clone())));
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = profile(refused(&|q| q.profile.devices[1].tables[0].nanos[0] = bad));
        assert!(matches!(error, ProfileError::Device { .. }), "{error}");
        let error = profile(refused(&|q| q.profile.links[0].busy_rate = bad));
        assert!(matches!(error, ProfileError::Link { .. }), "{error}");
    }
    let error = profile(refused(&|q| q.profile.devices[0].shape = "another".into()));
    assert!(matches!(error, ProfileError::Shape { .. }), "{error}");
    let error = profile(refused(&|q| q.profile.devices[0].version += 1));
    assert!(matches!(error, ProfileError::Version { .. }), "{error}");
    let error = profile(refused(&|q| drop(q.profile.devices.pop())));
    assert!(matches!(error, ProfileError::NoDevice { .. }), "{error}");
}

#[test]
fn a_link_that_is_missing_one_way_is_not_used() {
    let mut question = plenty(3, 1e8);
    let name = |n: &str| DeviceName::new(n).unwrap();
    let (first, second) = (name("d0"), name("d1"));
    question.profile.links.retain(|l| l.from != first || l.to != second);
    let planned = plan(&question.request()).unwrap();
    for (from, to) in galaxy_graph::links(&planned.plan) {
        let names = (&planned.plan.ring[from.index()].name, &planned.plan.ring[to.index()].name);
        assert_ne!(names, (&first, &second));
    }
    assert!(planned.plan.ring.len() > 1, "there are ways around it");
    question.allowed.strategy = Strategy::Galaxy;
    let error = plan(&question.request()).unwrap_err();
    assert!(error.to_string().contains("link from d0 to d1"), "{error}");
}

#[test]
fn too_little_memory_is_refused_with_the_missing_bytes() {
    let mut question = plenty(2, 1e8);
    for offer in &mut question.offers {
        offer.budget = Bytes(36_000_000);
    }
    for strategy in Strategy::ALL {
        question.allowed.strategy = strategy;
        let error = plan(&question.request()).unwrap_err();
        assert!(matches!(error, PlanningError::Memory { missing, .. } if missing.0 > 0), "{error}");
    }
}

#[test]
fn predict_gives_a_plan_the_latency_that_the_planner_gave() {
    let question = plenty(3, 1e8);
    let planned = plan(&question.request()).unwrap();
    let again = predict(&question.request(), &planned.plan).unwrap();
    assert_eq!(again.latency, planned.prediction.latency);
    assert_eq!(question.allowed.links, [LinkType::Tls]);
}
