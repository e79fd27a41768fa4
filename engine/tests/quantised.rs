//! A model whose matrices are in many types of blocks (`scripts/golden-gguf.py`): the values that its bytes stand for
//! decide what it gives, however devices share it and wherever its weights come from.
#![allow(clippy::unwrap_used)]

use galaxy_common::{
    Activations, BatchShape, Bytes, Cache, DeviceName, Plan, Room, Span, Strategy, Streaming,
    Wanted, WeightFormat, WireType, plan::Phase,
};
use galaxy_engine::{local::LocalCluster, weights::Shard};
use galaxy_graph::{
    budget, digest, lower,
    operators::OperatorGraph,
    pieces,
    share::{self, Member, PlanOptions},
};
use galaxy_model::{ModelDir, Quantisation, shape::Shape};
use std::{ops::ControlFlow, path::PathBuf, sync::Arc};

/// Rows of the sequence.
const ROWS: u32 = 19;
/// The share of the largest logit by which activations of 16 bits may move a logit.
const TOLERANCE: f32 = 2e-4;
/// The share of the largest logit by which activations of 8 bits may move a logit.
const TOLERANCE_8: f32 = 0.06;
/// The share of the largest logit by which activations in f32 may move a logit.
const EXACT: f32 = 2e-6;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata").join(name)
}

fn model() -> Arc<ModelDir> {
    by(Activations::default())
}

/// The model, for devices that compute with such activations.
fn by(activations: Activations) -> Arc<ModelDir> {
    let model = ModelDir::open(&data("gguf/mixed.gguf")).unwrap();
    Arc::new(model.with_activations(activations).unwrap())
}

fn plan(model: &ModelDir, strategy: Strategy, shares: &[f64]) -> Plan {
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles: 3,
        max_rows: 64,
        cache: Cache::NONE,
    };
    let member = |(at, share): (usize, &f64)| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1 + (at % 2) as u16,
        share: *share,
    };
    let members: Vec<Member> = shares.iter().enumerate().map(member).collect();
    share::plan(model.spec(), &terms, &members).unwrap()
}

/// The logits after every row of the sequence.
fn logits(cluster: &LocalCluster) -> Vec<f32> {
    let shape = BatchShape::single(ROWS, Wanted::AllLogits).unwrap();
    let tokens: Vec<u32> = (0..ROWS).map(|at| (3 + at * 7) % 90).collect();
    cluster
        .run(&shape, &tokens[..])
        .unwrap()
        .into_iter()
        .flat_map(|merged| merged.values().to_vec())
        .collect()
}

fn assert_near(what: &str, have: &[f32], want: &[f32]) {
    assert_within(TOLERANCE, what, have, want);
}

fn assert_within(tolerance: f32, what: &str, have: &[f32], want: &[f32]) {
    assert_eq!(have.len(), want.len(), "{what}");
    let largest = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let off = have.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max) / largest;
    println!("{what}: {off:e} of the largest");
    assert!(off <= tolerance, "{what}: {off:e} of the largest");
}

/// The logits of the values, without any rounding.
fn reference() -> Vec<f32> {
    floats("gguf/mixed.f32")
}

fn floats(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(data(name)).unwrap();
    bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
}

#[test]
fn quantised_logits_are_near_logits_of_dequantised_weights() {
    let model = model();
    let want = reference();
    let cluster = LocalCluster::open(model.clone(), plan(&model, Strategy::Local, &[1.0])).unwrap();
    assert_near("one device", &logits(&cluster), &want);
}

/// A checkpoint that compressed-tensors has packed, with the logits that its codes and scales give in f64
/// (`scripts/golden-compressed.py`).
#[test]
fn logits_of_a_compressed_tensors_checkpoint_match_the_reference() {
    let want = floats("compressed/logits.f32");
    for activations in [Activations::F32, Activations::A16] {
        let model = ModelDir::open(&data("compressed")).unwrap();
        let model = Arc::new(model.with_activations(activations).unwrap());
        for (strategy, shares) in [
            (Strategy::Local, &[1.0][..]),
            (Strategy::Galaxy, &[1.0, 2.0]),
            (Strategy::Megatron, &[1.0, 1.0]),
            (Strategy::Sequence, &[1.0, 1.0, 1.0]),
            (Strategy::Pipeline, &[1.0, 1.0]),
        ] {
            let cluster =
                LocalCluster::open(model.clone(), plan(&model, strategy, shares)).unwrap();
            assert_near(&format!("{activations}, {strategy} {shares:?}"), &logits(&cluster), &want);
        }
    }
}

#[test]
fn devices_that_split_quantised_weights_match_one_device() {
    let model = model();
    let one = plan(&model, Strategy::Local, &[1.0]);
    let want = logits(&LocalCluster::open(model.clone(), one).unwrap());
    for strategy in [Strategy::Galaxy, Strategy::Megatron, Strategy::Sequence, Strategy::Pipeline] {
        for shares in [&[1.0, 1.0][..], &[3.0, 1.0], &[1.0, 2.0, 1.0], &[4.0, 1.0, 2.0, 1.0]] {
            if strategy == Strategy::Pipeline && shares.len() > 2 {
                continue;
            }
            let plan = plan(&model, strategy, shares);
            let cluster = LocalCluster::open(model.clone(), plan).unwrap();
            assert_near(&format!("{strategy} {shares:?}"), &logits(&cluster), &want);
        }
    }
}

#[test]
fn logits_with_streamed_quantised_weights_equal_resident_weights() {
    let (model, files) = (model(), tempfile::tempdir().unwrap());
    for (strategy, shares) in [(Strategy::Local, &[1.0][..]), (Strategy::Galaxy, &[2.0, 1.0, 1.0])]
    {
        let mut plan = plan(&model, strategy, shares);
        let want = logits(&LocalCluster::open(model.clone(), plan.clone()).unwrap());
        for device in &mut plan.ring {
            let mut streaming = Streaming {
                format: model.format(),
                piece: Bytes(8 << 10),
                buffer: Bytes(0),
                room: Room::Ring,
                loaders: 1,
                resident: vec![Span::new(1, 2)],
            };
            device.streaming = Some(streaming.clone());
            let graph = OperatorGraph::of(model.spec());
            let pieces = pieces::of_device(&graph, model.formats(), device);
            assert!(pieces.iter().any(|piece| piece.runs.len() > 1), "several types in a piece");
            let largest = pieces.iter().map(|piece| piece.stored()).max().unwrap();
            streaming.buffer = Bytes(largest + 3 * 4096);
            device.streaming = Some(streaming);
        }
        let cluster = LocalCluster::open_with(model.clone(), plan, files.path()).unwrap();
        assert_eq!(logits(&cluster), want, "{strategy}");
    }
}

#[test]
fn logit_errors_stay_within_the_tolerance_of_rounded_activations() {
    let want = reference();
    for (activations, tolerance) in [(Activations::F32, EXACT), (Activations::A8, TOLERANCE_8)] {
        let model = by(activations);
        for (strategy, shares) in [
            (Strategy::Local, &[1.0][..]),
            (Strategy::Galaxy, &[1.0, 2.0, 1.0]),
            (Strategy::Sequence, &[1.0, 1.0]),
            (Strategy::Pipeline, &[3.0, 1.0]),
        ] {
            let plan = plan(&model, strategy, shares);
            assert_eq!(plan.activations, activations);
            let cluster = LocalCluster::open(model.clone(), plan).unwrap();
            let what = format!("{activations}, {strategy} {shares:?}");
            assert_within(tolerance, &what, &logits(&cluster), &want);
        }
    }
}

#[test]
fn shard_bytes_match_the_budget_for_every_activation_rounding() {
    let graph = OperatorGraph::of(model().spec());
    let bytes = [Activations::A16, Activations::A8, Activations::F32].map(|activations| {
        let model = by(activations);
        let plan = plan(&model, Strategy::Galaxy, &[1.0, 2.0]);
        let held = |device| {
            let said = budget::weights(&graph, model.formats(), device);
            let mut quiet = |_, _| ControlFlow::Continue(());
            let shard = Shard::load(model.clone(), device, &mut quiet).unwrap();
            assert_eq!(shard.bytes(), said, "{activations}");
            said.0
        };
        plan.ring.iter().map(held).sum::<u64>()
    });
    assert_eq!(bytes[0], bytes[1]);
    assert!(bytes[2] > 3 * bytes[0], "{bytes:?}");
}

#[test]
fn programs_for_other_activations_differ_and_are_refused() {
    let shape = BatchShape::single(ROWS, Wanted::AllLogits).unwrap();
    let of = |activations| {
        let model = by(activations);
        let plan = plan(&model, Strategy::Galaxy, &[1.0, 1.0]);
        lower(model.spec(), model.formats(), &plan, Phase::Prefill, &shape).unwrap()
    };
    let (a16, a8) = (of(Activations::A16), of(Activations::A8));
    assert_ne!(digest(&a16), digest(&a8));
    // A device that holds blocks does not compute as if it did not.
    let model = model();
    let mut plan = plan(&model, Strategy::Local, &[1.0]);
    plan.activations = Activations::F32;
    let error = LocalCluster::open(model, plan).unwrap().run(&shape, &[3; ROWS as usize][..]);
    let error = error.expect_err("it is refused").to_string();
    assert!(error.contains("its rows are not to be rounded"), "{error}");
}

/// Models of several families, written for the test, rounded as they are read: tables and heads that are tied, rows for
/// each input (GPT-2), and encoders.
#[test]
fn devices_that_split_a_model_quantised_on_load_match_one_device() {
    let (dir, shape) = (tempfile::tempdir().unwrap(), Shape::bert(2, 256, 4));
    let llama = Shape { kv_heads: 2, format: WeightFormat::Bf16, ..shape };
    for (family, shape) in [("bert", shape), ("gpt2", shape), ("llama", llama)] {
        let path = dir.path().join(family);
        std::fs::create_dir(&path).unwrap();
        let shape = Shape { family, vocabulary: 300, intermediate: 512, ..shape };
        shape.write(&path, u64::MAX, &mut |_| {}).unwrap();
        let exact = hidden(&Arc::new(ModelDir::open(&path).unwrap()), Strategy::Local, &[1.0]);
        let mut before = 0.0;
        for bits in Quantisation::ALL {
            let model = Arc::new(ModelDir::open(&path).unwrap().quantised(bits).unwrap());
            let want = hidden(&model, Strategy::Local, &[1.0]);
            let off = exact.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            assert!(off > before, "{family} {bits}: fewer bits, larger errors");
            before = off;
            for strategy in [Strategy::Galaxy, Strategy::Megatron, Strategy::Sequence] {
                let have = hidden(&model, strategy, &[1.0, 2.0, 1.0]);
                assert_near(&format!("{family} {bits} {strategy}"), &have, &want);
            }
        }
    }
}

fn hidden(model: &Arc<ModelDir>, strategy: Strategy, shares: &[f64]) -> Vec<f32> {
    let plan = plan(model, strategy, shares);
    let cluster = LocalCluster::open(model.clone(), plan).unwrap();
    let shape = BatchShape::single(ROWS, Wanted::Hidden).unwrap();
    let tokens: Vec<u32> = (0..ROWS).map(|at| (3 + at * 7) % 90).collect();
    let merged = cluster.run(&shape, &tokens[..]).unwrap();
    merged.into_iter().flat_map(|merged| merged.values().to_vec()).collect()
}
