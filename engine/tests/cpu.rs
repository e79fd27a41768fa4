//! The cpu engine against reference outputs of `transformers`: one device, its whole program.
#![allow(clippy::unwrap_used)]

use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, DeviceName, DevicePlan, Plan, Segment, Span,
    Strategy, Wanted, WireType, plan::Phase,
};
use galaxy_engine::{
    compute::{Binding, Engine, Staged, cpu::CpuEngine},
    weights::Shard,
};
use galaxy_graph::{budget, lower, program::OpKind};
use galaxy_model::{HeadSpec, ModelDir};
use safetensors::SafeTensors;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

const LENGTHS: [u32; 5] = [1, 2, 7, 64, 129];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name)
}

fn local(dir: &ModelDir, threads: u16, max_rows: u32) -> Plan {
    let spec = dir.spec();
    let whole = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(spec.layers),
            heads: Span::first(spec.heads),
            columns: Span::first(spec.inner),
        }],
        row_weight: 1,
        vocabulary: Span::first(spec.extent().vocabulary),
    };
    Plan {
        model: dir.name().to_owned(),
        fingerprint: dir.fingerprint().to_owned(),
        strategy: Strategy::Local,
        wire: WireType::F32,
        tiles: 1,
        max_rows,
        ring: vec![DevicePlan {
            name: DeviceName::new("here").unwrap(),
            budget: Bytes(1 << 30),
            threads,
            prefill: whole.clone(),
            decode: whole,
        }],
    }
}

/// Runs a batch and returns the values of each output, in order.
fn run(
    engine: &mut CpuEngine,
    dir: &ModelDir,
    plan: &Plan,
    shape: &BatchShape,
    tokens: Vec<u32>,
) -> Vec<Vec<f32>> {
    let program = &lower(dir.spec(), plan, Phase::Prefill, shape).unwrap()[0];
    let labels = match &dir.spec().head {
        HeadSpec::Classes(head) => head.labels,
        _ => 0,
    };
    let mut outputs: Vec<Vec<f32>> = program
        .outputs
        .iter()
        .map(|output| {
            let (rows, width) = output.extent(dir.spec().hidden, labels);
            vec![f32::NAN; rows as usize * width as usize]
        })
        .collect();
    let binding = Binding { shape: shape.clone(), tokens: tokens.into() };
    engine.prepare(&program.slots).unwrap();
    for operation in &program.operations {
        let emitted = match operation.kind {
            OpKind::Emit { output } => Some(outputs[output as usize].as_mut_slice()),
            _ => None,
        };
        let staged = Staged { input: None, output: None, emitted };
        engine.run(program, operation, &binding, staged).unwrap();
    }
    outputs
}

fn close(what: &str, got: &[f32], want: &[f32], limit: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let error = got.iter().zip(want).fold(0.0_f32, |a, (g, w)| a.max((g - w).abs()));
    assert!(error <= limit * scale, "{what}: off by {error} of {scale}");
}

fn check(name: &str, threads: u16) {
    let path = golden(name);
    let dir = Arc::new(ModelDir::open(&path).unwrap());
    let bytes = std::fs::read(path.join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: String| -> Vec<f32> {
        let data = expected.tensor(&name).unwrap();
        data.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let ids = |length: u32| -> Vec<u32> {
        let data = expected.tensor(&format!("ids.{length}")).unwrap();
        data.data().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let plan = local(&dir, threads, 512);
    let mut progress = Vec::new();
    let shard =
        Shard::load(dir.clone(), &plan.ring[0], &mut |done, all| progress.push((done, all)));
    let shard = shard.unwrap();
    let total = budget::weights(dir.spec(), dir.dtype().width(), &plan.ring[0]);
    assert_eq!(progress.last(), Some(&(total.0, total.0)));
    assert!(progress.is_sorted() && shard.bytes() <= total, "{} of {total}", shard.bytes());
    assert!(shard.bytes().0 * 10 > total.0 * 9, "{} of {total}", shard.bytes());
    let mut engine = CpuEngine::new(shard, threads);
    let top = match dir.spec().head {
        HeadSpec::Classes(_) => Some(Wanted::Classes),
        HeadSpec::Language { .. } => Some(Wanted::AllLogits),
        HeadSpec::None => None,
    };
    let wanted = |tensor: &str| match (tensor, top) {
        ("logits", Some(top)) => top,
        _ => Wanted::Hidden,
    };
    for tensor in ["hidden", "logits"].into_iter().take(1 + usize::from(top.is_some())) {
        for length in LENGTHS {
            let shape = BatchShape::single(length, wanted(tensor)).unwrap();
            let got = run(&mut engine, &dir, &plan, &shape, ids(length));
            let what = format!("{name} {tensor} {length} threads {threads}");
            close(&what, &got.concat(), &floats(format!("{tensor}.{length}")), 2e-5);
        }
        // All texts in one batch, without padding.
        let segment = |(slot, rows)| Segment { slot, past: 0, rows, wanted: wanted(tensor) };
        let shape = BatchShape::new((0..).zip(LENGTHS).map(segment).collect()).unwrap();
        let tokens = LENGTHS.into_iter().flat_map(ids).collect();
        let got = run(&mut engine, &dir, &plan, &shape, tokens);
        for (length, got) in LENGTHS.into_iter().zip(got) {
            let what = format!("{name} {tensor} {length} of a batch, threads {threads}");
            close(&what, &got, &floats(format!("{tensor}.{length}")), 2e-5);
        }
    }
    // Nothing grows once the largest batch has run.
    let (_, held) = engine.held();
    let shape = BatchShape::single(3, Wanted::Hidden).unwrap();
    run(&mut engine, &dir, &plan, &shape, vec![1, 2, 3]);
    assert!(engine.held().1 <= held);
}

macro_rules! families {
    ($($test:ident: $name:literal),+ $(,)?) => {
        $(#[test]
        fn $test() {
            check($name, 1);
            check($name, 2);
        })+
    };
}
families!(
    bert: "bert",
    bert_in_f16: "bert-f16",
    distilbert: "distilbert",
    gpt2: "gpt2",
    gpt2_classes: "gpt2-classes",
    llama: "llama",
    llama_tied_in_bf16: "llama-tied-bf16",
);
