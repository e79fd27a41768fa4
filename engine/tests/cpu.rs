//! The cpu engine against reference outputs of `transformers`: one device, its whole program.
#![allow(clippy::unwrap_used)]

use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, DeviceName, DevicePlan, Exchange,
    LinkType, Mode, Modes, Plan, Segment, Span, Strategy, Wanted, WireType, plan::Phase,
};
use galaxy_engine::{
    compute::{Binding, ComputeError, Engine, Inputs, Staged, cpu::CpuEngine},
    weights::{Shard, WeightError},
};
use galaxy_graph::{
    budget,
    holdings::transition,
    lower,
    operators::OperatorGraph,
    program::OpKind,
    share::{self, Member, PlanOptions},
};
use galaxy_model::{HeadSpec, ModelDir};
use safetensors::SafeTensors;
use std::{
    ops::ControlFlow,
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
            columns: Span::first(spec.intermediate),
        }],
        row_weight: 1,
        vocabulary: Span::first(spec.extent().vocabulary),
    };
    Plan {
        model: dir.name().to_owned(),
        fingerprint: dir.fingerprint().to_owned(),
        strategy: Strategy::Local,
        layout: Strategy::Local.layout(),
        modes: Modes::uniform(dir.spec().layers, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: WireType::F32,
        activations: galaxy_common::Activations::default(),
        tiles: 1,
        cache: Cache::NONE,
        max_rows,
        ring: vec![DevicePlan {
            name: DeviceName::new("here").unwrap(),
            budget: Bytes(1 << 30),
            threads,
            prefill: whole.clone(),
            decode: whole,
            streaming: None,
        }],
    }
}

/// Runs a batch and returns the values of each output, in order.
fn run(
    engine: &mut CpuEngine,
    dir: &ModelDir,
    plan: &Plan,
    shape: &BatchShape,
    inputs: impl Into<Inputs>,
) -> Vec<Vec<f32>> {
    let program = &lower(dir.spec(), dir.formats(), plan, Phase::Prefill, shape).unwrap()[0];
    let labels = dir.spec().head.labels();
    let mut outputs: Vec<Vec<f32>> = program
        .outputs
        .iter()
        .map(|output| {
            let (rows, width) = output.extent(dir.spec().hidden, labels);
            vec![f32::NAN; rows as usize * width as usize]
        })
        .collect();
    let binding = Binding::new(shape.clone(), inputs);
    engine.prepare(&program.slots).unwrap();
    for operation in &program.operations {
        let emitted = match operation.kind {
            OpKind::Emit { output } => Some(outputs[output as usize].as_mut_slice()),
            _ => None,
        };
        let staged = Staged { emitted, ..Staged::default() };
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
    let shard = Shard::load(dir.clone(), &plan.ring[0], &mut |done, all| {
        progress.push((done, all));
        ControlFlow::Continue(())
    });
    let shard = shard.unwrap();
    let graph = OperatorGraph::of(dir.spec());
    let total = budget::weights(&graph, dir.formats(), &plan.ring[0]);
    let read = transition(&graph, dir.formats(), None, &plan.ring[0].prefill).read;
    assert_eq!(progress.last(), Some(&(read.0, read.0)));
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
        let segment = |(slot, rows)| Segment {
            slot,
            context_len: 0,
            cached: false,
            rows,
            wanted: wanted(tensor),
        };
        let shape = BatchShape::new((0..).zip(LENGTHS).map(segment).collect()).unwrap();
        let tokens: Vec<u32> = LENGTHS.into_iter().flat_map(ids).collect();
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
    roberta: "roberta",
    mpnet: "mpnet",
    opt: "opt",
    gptj: "gptj",
    qwen2: "qwen2",
    qwen3: "qwen3",
    mistral: "mistral",
    gpt2_scales: "gpt2-scales",
    llama_yarn: "llama-yarn",
    mistral_longrope: "mistral-longrope",
    opt_post: "opt-post",
    qwen2_both_ways: "qwen2-both-ways",
    mistral_window: "mistral-window",
    qwen2_window: "qwen2-window",
    smollm3: "smollm3",
    phi3: "phi3",
    gemma2: "gemma2",
    gemma3: "gemma3",
    gemma3_both_ways: "gemma3-both-ways",
    modernbert: "modernbert",
    modernbert_biases: "modernbert-biases",
);

#[test]
fn vit_hidden_states_and_logits_match_transformers() {
    let path = golden("vit");
    let dir = Arc::new(ModelDir::open(&path).unwrap());
    let patches = dir.spec().patches.unwrap();
    let bytes = std::fs::read(path.join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let data = expected.tensor(name).unwrap();
        data.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let rows = patches.rows();
    let squares = patches.cut(&floats("pixels"));
    for threads in [1, 2] {
        let plan = local(&dir, threads, 512);
        let mut engine = CpuEngine::new(load(&dir, &plan.ring[0]).unwrap(), threads);
        for (wanted, name) in [(Wanted::Hidden, "hidden.13"), (Wanted::Classes, "logits.13")] {
            for images in [1, 3] {
                let segment = |slot| Segment { slot, context_len: 0, cached: false, rows, wanted };
                let shape = BatchShape::new((0..images).map(segment).collect()).unwrap();
                let values = squares.repeat(images as usize).into();
                let inputs = Inputs::Patches { first: 0, values };
                for got in run(&mut engine, &dir, &plan, &shape, inputs) {
                    close(name, &got, &floats(name), 2e-5);
                }
            }
        }
    }
}

fn load(dir: &Arc<ModelDir>, device: &DevicePlan) -> Result<Shard, WeightError> {
    Shard::load(dir.clone(), device, &mut |_, _| ControlFlow::Continue(()))
}

/// The budget counts exactly the bytes that a loaded shard holds.
#[test]
fn shards_of_any_split_take_exactly_the_budgeted_bytes() {
    for name in [
        "bert",
        "bert-f16",
        "distilbert",
        "gpt2",
        "llama",
        "llama-tied-bf16",
        "mpnet",
        "gptj",
        "qwen3",
        "vit",
    ] {
        let dir = Arc::new(ModelDir::open(&golden(name)).unwrap());
        let spec = dir.spec();
        let whole = local(&dir, 1, 16).ring.remove(0);
        for (heads, columns, vocabulary) in [
            ((0, 1), (0, 0), (0, 3)),
            ((1, 4), (3, 20), (3, 90)),
            ((0, 0), (0, 0), (0, 0)),
            ((3, 4), (20, 21), (0, 0)),
        ] {
            let mut device = whole.clone();
            let part = &mut device.prefill;
            part.blocks[0].heads = Span::new(heads.0, heads.1);
            part.blocks[0].columns = Span::new(columns.0, columns.1);
            if matches!(spec.head, HeadSpec::Language { .. }) {
                part.vocabulary = Span::new(vocabulary.0, vocabulary.1);
            }
            device.decode = device.prefill.clone();
            let shard = load(&dir, &device).unwrap();
            let (held, said) = (
                shard.bytes().0,
                budget::weights(&OperatorGraph::of(spec), dir.formats(), &device).0,
            );
            assert_eq!(held, said, "{name} {heads:?}");
        }
    }
}

/// Plans whose devices hold the same weights, or other layers: what is held, slots included, is never
/// more than the budget says, wherever texts end.
#[test]
fn sequence_and_pipeline_shards_stay_within_the_budget() {
    for name in ["bert", "gpt2", "llama", "gptj"] {
        let dir = Arc::new(ModelDir::open(&golden(name)).unwrap());
        let spec = dir.spec();
        for (strategy, tiles) in [(Strategy::Sequence, 1), (Strategy::Sequence, 3)]
            .into_iter()
            .chain([(Strategy::Pipeline, 1), (Strategy::Pipeline, 3)])
        {
            let members = [("a", 2.0), ("b", 1.0), ("c", 1.0)].map(|(name, share)| Member {
                name: DeviceName::new(name).unwrap(),
                budget: Bytes(1 << 30),
                threads: 1,
                share,
            });
            let terms = PlanOptions {
                model: name,
                fingerprint: "",
                formats: dir.formats(),
                strategy,
                wire: WireType::F32,
                tiles,
                max_rows: 60,
                cache: Cache::NONE,
            };
            let plan = share::plan(spec, &terms, &members).unwrap();
            let needs = budget::needs_all(spec, dir.formats(), &plan).unwrap();
            for (rank, device) in plan.ranked() {
                let shard = load(&dir, device).unwrap();
                let (held, said) = (shard.bytes(), needs[rank.index()].weights);
                let slack = 4 * u64::from(spec.hidden) * 4 + 64;
                assert!(
                    held <= said && said.0 <= held.0 + slack,
                    "{name} {rank}: {held} of {said}"
                );
                let mut engine = CpuEngine::new(shard, 1);
                for texts in [&[60][..], &[1], &[7, 40, 13], &[20, 20, 20], &[5; 12], &[33, 2]] {
                    let segment = |(slot, rows): (u32, &u32)| Segment {
                        slot,
                        context_len: 0,
                        cached: false,
                        rows: *rows,
                        wanted: Wanted::Hidden,
                    };
                    let shape = BatchShape::new((0..).zip(texts).map(segment).collect()).unwrap();
                    let programs =
                        lower(spec, dir.formats(), &plan, Phase::Prefill, &shape).unwrap();
                    engine.prepare(&programs[rank.index()].slots).unwrap();
                    let (_, slots) = engine.held();
                    // Gaps between slots of unlike parts, as in the graph's test of budgets.
                    let most = needs[rank.index()].activations;
                    let most = most + Bytes(most.0 / 8 + 32 * u64::from(spec.hidden) + 1024);
                    assert!(slots <= most, "{name} {strategy} {rank} {texts:?}: {slots} of {most}");
                }
            }
        }
    }
}

#[test]
fn plans_that_do_not_fit_the_model_are_errors() {
    let dir = Arc::new(ModelDir::open(&golden("llama")).unwrap());
    let whole = local(&dir, 1, 16).ring.remove(0);
    let mut device = whole.clone();
    device.decode.blocks[0].heads = Span::new(0, 1);
    assert!(matches!(load(&dir, &device), Err(WeightError::Phases { what: "heads", layer: 0 })));
    let mut device = whole.clone();
    device.prefill.blocks[0].columns = Span::new(0, 1 << 20);
    device.decode = device.prefill.clone();
    assert!(matches!(load(&dir, &device), Err(WeightError::Model(_))));
    let dir = Arc::new(ModelDir::open(&golden("bert")).unwrap());
    let mut device = local(&dir, 1, 16).ring.remove(0);
    device.prefill.vocabulary = Span::new(0, 5);
    device.decode = device.prefill.clone();
    assert!(matches!(load(&dir, &device), Err(WeightError::Model(_))));
}

/// A program of another plan, tokens that the model does not know, a program without its slots:
/// errors all, and the engine still works.
#[test]
fn programs_and_tokens_that_do_not_fit_the_shard_are_errors() {
    let dir = Arc::new(ModelDir::open(&golden("llama")).unwrap());
    let plan = local(&dir, 1, 64);
    let mut half = plan.ring[0].clone();
    half.prefill.blocks[0].heads = Span::new(0, 3);
    half.decode = half.prefill.clone();
    let shape = BatchShape::single(5, Wanted::AllLogits).unwrap();
    let program =
        lower(dir.spec(), dir.formats(), &plan, Phase::Prefill, &shape).unwrap().remove(0);
    let failing = |engine: &mut CpuEngine, tokens: &[u32], slots: bool| {
        let binding = Binding::new(shape.clone(), tokens);
        if slots {
            engine.prepare(&program.slots).unwrap();
        }
        program.operations.iter().find_map(|operation| {
            let mut room = vec![0.0; 5 * 97];
            let staged = Staged { emitted: Some(&mut room), ..Staged::default() };
            engine.run(&program, operation, &binding, staged).err()
        })
    };
    let tokens = [1, 2, 3, 4, 5];
    let mut engine = CpuEngine::new(load(&dir, &half).unwrap(), 1);
    let error = failing(&mut engine, &tokens, true);
    assert!(matches!(error, Some(ComputeError::Operation { .. })), "{error:?}");
    let mut engine = CpuEngine::new(load(&dir, &plan.ring[0]).unwrap(), 1);
    let error = failing(&mut engine, &tokens, false);
    assert!(matches!(error, Some(ComputeError::Operation { .. })), "{error:?}");
    let error = failing(&mut engine, &[1, 2, 3, 4, 1 << 20], true);
    assert!(matches!(error, Some(ComputeError::Weights(WeightError::Model(_)))), "{error:?}");
    let error = failing(&mut engine, &tokens[..4], true);
    assert!(matches!(error, Some(ComputeError::Operation { .. })), "{error:?}");
    assert!(failing(&mut engine, &tokens, true).is_none());
}
