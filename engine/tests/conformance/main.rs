//! One suite for every engine: each operation, of every family, strategy and split, against the same
//! operation in f64.
//!
//! The programs are those of lowering, for plans with awkward parts: one head, no columns, 1, 3, 17 or 33 of
//! them, no rows, slices of the vocabulary of any size. What an operation writes is compared at once, and the
//! reference continues with the engine's values: so an error is that of one operation, and its limit can be
//! tight.
#![allow(clippy::unwrap_used, missing_docs)]

mod cases;
mod driver;
mod reference;

use cases::{Case, cases};
use driver::Pair;
use galaxy_common::{
    BatchShape, Bytes, Cache, CandidateCount, DevicePlan, Epoch, Plan, Sampling, Segment,
    SequenceNumber, Span, Wanted, plan::Phase,
};
use galaxy_engine::{
    compute::{
        Binding, ComputeError, Engine, Inputs, Staged, choice::EngineChoice, cpu::CpuEngine,
    },
    executor::{Executor, Job, RunError},
    generate::{Generation, Goal, TokenEvent},
    sampler::Sequence,
    weights::{Shard, WeightError},
};
use galaxy_graph::{
    Selected, Selection, lower,
    operators::OperatorGraph,
    program::{OpKind, Operation, OutputKind, Program, Slot},
};
use galaxy_model::{ModelDir, ModelSpec};
use reference::Reference;
use std::{collections::BTreeSet, ops::ControlFlow, path::Path, sync::Arc};

const FAMILIES: [&str; 29] = [
    "bert",
    "bert-f16",
    "distilbert",
    "gpt2",
    "gpt2-classes",
    "llama",
    "llama-tied-bf16",
    "roberta",
    "mpnet",
    "opt",
    "gptj",
    "qwen2",
    "qwen3",
    "mistral",
    "vit",
    "gpt2-scales",
    "llama-yarn",
    "mistral-longrope",
    "opt-post",
    "qwen2-both-ways",
    "mistral-window",
    "qwen2-window",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "gemma3-both-ways",
    "modernbert",
    "modernbert-biases",
];

fn open(family: &str) -> Arc<ModelDir> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(family);
    Arc::new(ModelDir::open(&path).unwrap())
}

fn load(dir: &Arc<ModelDir>, device: &DevicePlan) -> Shard {
    Shard::load(dir.clone(), device, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

fn binding(spec: &ModelSpec, shape: &BatchShape) -> Binding {
    Binding::new(shape.clone(), Inputs::any(spec, shape.rows(), 7))
}

/// Runs the programs of a case; gives the largest error, as a share of what passes.
fn conforms(dir: &Arc<ModelDir>, case: &Case, make: impl Fn(Shard) -> Box<dyn Engine>) -> f64 {
    let pair = |device: &DevicePlan| Pair {
        engine: make(load(dir, device)),
        reference: Reference::new(dir, device),
    };
    let mut pairs: Vec<Pair> = case.plan.ring.iter().map(pair).collect();
    let mut worst = 0.0_f64;
    for shape in &case.shapes {
        let programs = lower(dir.spec(), dir.formats(), &case.plan, Phase::Prefill, shape).unwrap();
        let rows: Vec<u32> = shape.segments().iter().map(|s| s.rows).collect();
        let name = format!("{}, rows {rows:?}", case.name);
        let binding = binding(dir.spec(), shape);
        worst = worst.max(driver::run(&name, &programs, &mut pairs, &binding));
    }
    worst
}

fn check(family: &str, engine: EngineChoice, threads: u16) {
    let dir = open(family);
    let run = |case: &Case| {
        conforms(&dir, case, |shard| engine.start(shard, threads, Cache::NONE).unwrap())
    };
    let worst = cases(&dir).iter().map(run).fold(0.0, f64::max);
    println!(
        "{family} on {engine}, {threads} threads: at most {worst:.2} of the error that passes"
    );
}

/// One plan of a model of each activation that configs name: gated, and not.
fn activations(choice: EngineChoice) {
    const NAMES: [&str; 15] = [
        "gelu",
        "gelu_new",
        "silu",
        "relu",
        "quick_gelu",
        "gelu_10",
        "relu2",
        "relu6",
        "leaky_relu",
        "hardswish",
        "mish",
        "laplace",
        "tanh",
        "sigmoid",
        "linear",
    ];
    let fields = [("gpt2-scales", "activation_function"), ("llama-yarn", "hidden_act")];
    let mut seen = BTreeSet::new();
    for ((family, field), name) in fields.into_iter().flat_map(|f| NAMES.map(|name| (f, name))) {
        let copy = tempfile::tempdir().unwrap();
        let from = open(family).path().to_owned();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(from.join(file), copy.path().join(file)).unwrap();
        }
        let path = copy.path().join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[field] = name.into();
        std::fs::write(&path, config.to_string()).unwrap();
        let dir = Arc::new(ModelDir::open(copy.path()).unwrap());
        seen.insert(format!("{:?}", dir.spec().activation));
        let start = |shard| choice.start(shard, 1, Cache::NONE).unwrap();
        conforms(&dir, &cases(&dir)[0], start);
    }
    assert_eq!(seen.len(), NAMES.len());
}

/// Greedy tokens of every decoder are those of `transformers`, with cached rows and without.
fn makes_tokens(choice: EngineChoice) {
    for family in FAMILIES {
        let dir = open(family);
        let Ok(golden) = std::fs::read_to_string(dir.path().join("generated.json")) else {
            continue;
        };
        let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
        let golden = &golden["prompts"][1];
        let ids = |name: &str| -> Vec<u32> {
            golden[name].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let (prompt, want) = (ids("prompt"), ids("generated"));
        let cache = Cache { rows: Cache::BLOCK, values: galaxy_common::CacheType::F32 };
        let plan = Plan { cache, ..cases(&dir)[0].plan.clone() };
        assert_eq!(plan.ring.len(), 1);
        let engine = choice.start(load(&dir, &plan.ring[0]), 1, cache).unwrap();
        let executor = Executor::start("alone", engine).unwrap();
        let (slot, sampling) = (1, Sampling::greedy());
        let text =
            Sequence { slot, rows: 32, sampling, tokens: prompt.clone(), prompt: prompt.len() };
        executor.begin(text, [0].into()).unwrap();
        let make = |phase, context_len, tokens: &[u32], count| {
            let rows = tokens.len() as u32;
            let wanted = Wanted::Token(CandidateCount::Few);
            let segment = Segment { slot, context_len, cached: true, rows, wanted };
            let program = |shape: &BatchShape| -> Result<Arc<Program>, RunError> {
                Ok(Arc::new(
                    lower(dir.spec(), dir.formats(), &plan, phase, shape).unwrap().remove(0),
                ))
            };
            let shape = BatchShape::new(vec![segment]).unwrap();
            let first = Job {
                epoch: Epoch::default(),
                sequence: SequenceNumber::default(),
                program: program(&shape).unwrap(),
                binding: Binding::new(shape, tokens),
                deadline: None,
            };
            let goals = vec![Goal { count, ..Goal::default() }];
            let generation = Generation { first, goals, steps: 999, drafting: None };
            let mut made = Vec::new();
            let tell = |_, told: &TokenEvent| {
                made.push(told[0] as u32);
                None
            };
            generation.run(&executor, program, tell).unwrap();
            made
        };
        let mut got = make(Phase::Prefill, 0, &prompt, 1);
        got.extend(make(Phase::Decode, prompt.len() as u32, &want[..1], 15));
        assert_eq!(got, want[..16], "{family} on {choice}");
        executor.end(Some(slot));
    }
}

/// Programs that select a part of what the devices hold.
fn parts(choice: EngineChoice) {
    let mut done = 0;
    for family in ["bert", "llama", "gptj"] {
        let dir = open(family);
        let spec = dir.spec();
        let all = Selection::all(spec);
        let heads = if spec.head_width.is_multiple_of(16) { spec.group() } else { spec.heads };
        let selections = [
            Selection { layers: 1, ..all },
            Selection { columns: spec.intermediate * 2 / 3, ..all },
            Selection { layers: 1, heads, columns: 1 },
        ];
        let cases = cases(&dir);
        let pairs = cases.iter().step_by(3).flat_map(|case| selections.map(|s| (case, s)));
        for (case, selection) in pairs {
            let plan = Arc::new(case.plan.clone());
            let Ok(selected) = Selected::new(spec, dir.formats(), &plan, selection) else {
                continue;
            };
            let pair = |(whole, part): (&DevicePlan, &DevicePlan)| Pair {
                engine: choice.start(load(&dir, whole), 1, Cache::NONE).unwrap(),
                reference: Reference::new(&dir, part),
            };
            let mut pairs: Vec<Pair> =
                plan.ring.iter().zip(&selected.plan.ring).map(pair).collect();
            for shape in &case.shapes {
                let programs = selected.lower(Phase::Prefill, shape).unwrap();
                let name = format!("{}, {selection:?}", case.name);
                driver::run(&name, &programs, &mut pairs, &binding(spec, shape));
            }
            done += 1;
        }
    }
    assert!(done > 10, "{done}");
}

/// A program of another plan, one without its slots, tokens that the model does not know, a tile
/// that is not there: errors all, and the engine still works.
fn operation_errors(choice: EngineChoice) {
    let dir = open("llama");
    let cases = cases(&dir);
    let whole = &cases[0].plan;
    let shape = BatchShape::single(5, Wanted::AllLogits).unwrap();
    let program =
        lower(dir.spec(), dir.formats(), whole, Phase::Prefill, &shape).unwrap().remove(0);
    let failing = |engine: &mut dyn Engine, program: &Program, tokens: &[u32], slots: bool| {
        let binding = Binding::new(shape.clone(), tokens);
        if slots {
            engine.prepare(&program.slots).unwrap();
        }
        program.operations.iter().find_map(|operation| {
            let mut room = vec![0.0; 5 * 97];
            let staged = Staged { emitted: Some(&mut room), ..Staged::default() };
            engine.run(program, operation, &binding, staged).err()
        })
    };
    let assert_operation_error = |error: Option<ComputeError>| {
        assert!(matches!(error, Some(ComputeError::Operation { .. })), "{error:?}");
    };
    let tokens = [1, 2, 3, 4, 5];
    let mut half = whole.ring[0].clone();
    half.prefill.blocks[0].heads = Span::new(0, 3);
    half.decode = half.prefill.clone();
    let mut engine = choice.start(load(&dir, &half), 1, Cache::NONE).unwrap();
    assert_operation_error(failing(engine.as_mut(), &program, &tokens, true));
    let mut engine = choice.start(load(&dir, &whole.ring[0]), 1, Cache::NONE).unwrap();
    assert_operation_error(failing(engine.as_mut(), &program, &tokens, false));
    let error = failing(engine.as_mut(), &program, &[1, 2, 3, 4, 1 << 20], true);
    assert!(matches!(error, Some(ComputeError::Weights(WeightError::Model(_)))), "{error:?}");
    assert_operation_error(failing(engine.as_mut(), &program, &tokens[..4], true));
    let spread = cases.iter().find(|case| case.plan.ring.len() == 2).unwrap();
    let of_two =
        lower(dir.spec(), dir.formats(), &spread.plan, Phase::Prefill, &shape).unwrap().remove(0);
    assert_operation_error(failing(engine.as_mut(), &of_two, &tokens, true));
    let mut broken = program.clone();
    broken.operations.iter_mut().for_each(|o| o.reads.clear());
    assert_operation_error(failing(engine.as_mut(), &broken, &tokens, true));
    let mut broken = program.clone();
    broken.tensors.iter_mut().for_each(|t| t.width = 1);
    assert_operation_error(failing(engine.as_mut(), &broken, &tokens, true));
    let mut broken = program.clone();
    broken.slots.iter_mut().for_each(|s| s.bytes = 8);
    let mut fresh = choice.start(load(&dir, &whole.ring[0]), 1, Cache::NONE).unwrap();
    assert_operation_error(failing(fresh.as_mut(), &broken, &tokens, true));
    let mut broken = program.clone();
    broken.slots[0].bytes = u64::MAX / 2;
    let error = engine.prepare(&broken.slots).err();
    assert!(matches!(error, Some(ComputeError::Memory { .. })), "{error:?}");
    assert!(failing(engine.as_mut(), &program, &tokens, true).is_none());
}

macro_rules! engine {
    ($name:ident, $engine:expr, $threads:expr) => {
        engine!($name, $engine, $threads;
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
            vit: "vit",
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
    };
    ($name:ident, $engine:expr, $threads:expr; $($test:ident: $family:literal),+ $(,)?) => {
        mod $name {
            use super::*;
            $(#[test]
            fn $test() {
                for threads in $threads {
                    check($family, $engine, threads);
                }
            })+

            #[test]
            fn every_activation_function_matches_the_reference() {
                activations($engine);
            }

            #[test]
            fn selected_parts_of_a_model_match_the_reference() {
                parts($engine);
            }

            #[test]
            fn mismatched_programs_and_inputs_are_errors() {
                operation_errors($engine);
            }

            #[test]
            fn greedy_tokens_match_transformers() {
                makes_tokens($engine);
            }
        }
    };
}
engine!(cpu, EngineChoice::Cpu, [1, 2]);
// Burn cuts its work itself: nothing of this engine depends on the number of threads.
#[cfg(feature = "burn-flex")]
engine!(burn_flex, EngineChoice::Burn(galaxy_engine::compute::choice::BurnDevice::Flex), [2]);

/// The kind of an operation, as far as engines do different things.
fn kind(graph: &OperatorGraph, program: &Program, operation: &Operation) -> String {
    match operation.kind {
        OpKind::Embed(_) => "Embed".to_owned(),
        OpKind::Rows(_) => "norm".to_owned(),
        OpKind::Product { kernel, .. } => {
            let written = operation.writes[0];
            match (written.columns.start(), written.columns.end()) {
                (0, end) if end == program.tensor(written.tensor).width => format!("{kernel:?}"),
                (0, _) => format!("{kernel:?}, first columns"),
                _ => format!("{kernel:?}, last columns"),
            }
        }
        OpKind::AddNorm { add, norm, post, partial, staged } => {
            let mlp = graph.layers[operation.layer as usize].after_mlp.add == add;
            let after = if mlp { "Mlp" } else { "Attention" };
            let last = !post && graph.norm(norm).is_some_and(|norm| norm.output == graph.last);
            format!("join {after} last {last} post {post} partial {partial} staged {staged}")
        }
        OpKind::Export { staged } => format!("export staged {staged}"),
        OpKind::Emit { output } => match program.outputs[output as usize].kind {
            OutputKind::Pooled { reduce, .. } => format!("pooled {reduce:?}"),
            kind => format!("{kind:?}").split(' ').next().unwrap().to_owned(),
        },
        kind => format!("{kind:?}").split(' ').next().unwrap().to_owned(),
    }
}

#[test]
fn the_cases_cover_every_kind_of_operation() {
    let mut kinds = BTreeSet::new();
    for family in FAMILIES {
        let dir = open(family);
        let graph = OperatorGraph::of(dir.spec());
        for case in cases(&dir) {
            for shape in &case.shapes {
                for program in
                    lower(dir.spec(), dir.formats(), &case.plan, Phase::Prefill, shape).unwrap()
                {
                    let kinds_of = program.operations.iter().map(|o| kind(&graph, &program, o));
                    kinds.extend(kinds_of);
                }
            }
        }
    }
    let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
    let expected = [
        "Add",
        "Attend",
        "AttentionOutput",
        "Classes",
        "Down",
        "Embed",
        "Hidden",
        "Import",
        "Language",
        "Logits",
        "Qkv",
        "Qkv, first columns",
        "Qkv, last columns",
        "Receive",
        "Select",
        "Send",
        "Up",
        "export staged false",
        "export staged true",
        "join Attention last false post false partial false staged true",
        "join Attention last false post false partial true staged false",
        "join Attention last false post false partial true staged true",
        "join Attention last false post true partial false staged true",
        "join Attention last false post true partial true staged false",
        "join Attention last false post true partial true staged true",
        "join Mlp last false post false partial false staged true",
        "join Mlp last false post false partial true staged false",
        "join Mlp last false post false partial true staged true",
        "join Mlp last false post true partial false staged true",
        "join Mlp last false post true partial true staged false",
        "join Mlp last false post true partial true staged true",
        "join Mlp last true post false partial false staged true",
        "join Mlp last true post false partial true staged false",
        "join Mlp last true post false partial true staged true",
        "norm",
        "pooled Max",
        "pooled Row",
        "pooled Sum",
    ];
    assert_eq!(kinds, expected);
}

/// An engine that is off by one part in ten thousand in one value of what it exports.
struct Off(CpuEngine);

impl Engine for Off {
    fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError> {
        self.0.prepare(slots)
    }
    fn run(
        &mut self,
        program: &Program,
        operation: &Operation,
        binding: &Binding,
        mut staged: Staged<'_>,
    ) -> Result<(), ComputeError> {
        let Staged { input, output, emitted, .. } = &mut staged;
        let (output, emitted) = (output.as_deref_mut(), emitted.as_deref_mut());
        let Some(output) = output else {
            return self.0.run(
                program,
                operation,
                binding,
                Staged { input: *input, output, emitted, weights: None },
            );
        };
        let given = Staged { input: *input, output: Some(&mut *output), emitted, weights: None };
        self.0.run(program, operation, binding, given)?;
        let values: &mut [f32] = bytemuck::cast_slice_mut(output);
        if let Some(largest) = values.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())) {
            *largest *= 1.0001;
        }
        Ok(())
    }
    fn labels(&self) -> u32 {
        self.0.labels()
    }
    fn held(&self) -> (Bytes, Bytes) {
        self.0.held()
    }
}

#[test]
#[should_panic(expected = "off by")]
fn an_engine_with_wrong_results_fails_the_suite() {
    let dir = open("bert");
    conforms(&dir, &cases(&dir)[0], |shard| Box::new(Off(CpuEngine::new(shard, 1))));
}
