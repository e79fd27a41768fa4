//! Tokens of every family, strategy and number of devices against those of `transformers`
//! (`scripts/golden.py generate`).
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    Bytes, Cache, CacheType, DeviceName, Exchange, Plan, Sampling, Strategy, WireType,
    sampling::MOST_LOGPROBS,
};
use galaxy_engine::{
    compute::{Engine, cpu::CpuEngine},
    generate::{Goal, TokenEvent},
    local::{LocalCluster, LocalError},
    sampler::Sequence,
    weights::Shard,
};
use galaxy_graph::{
    LowerError, budget,
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use serde_json::Value;
use std::{ops::ControlFlow, path::PathBuf, sync::Arc};

const DECODERS: [&str; 11] = [
    "gpt2",
    "opt",
    "gptj",
    "llama",
    "llama-tied-bf16",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2-scales",
    "llama-yarn",
    "mistral-longrope",
];
const STRATEGIES: [Strategy; 5] =
    [Strategy::Local, Strategy::Megatron, Strategy::Galaxy, Strategy::Sequence, Strategy::Pipeline];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name)
}

fn plan(
    model: &ModelDir,
    strategy: Strategy,
    devices: usize,
    tiles: u16,
    values: CacheType,
) -> Plan {
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles,
        max_rows: 64,
        cache: Cache { rows: 2 * Cache::BLOCK, values },
    };
    let member = |at: usize| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1 + (at % 2) as u16,
        share: 1.0 + at as f64 / 2.0,
    };
    let members: Vec<Member> = (0..devices).map(member).collect();
    share::plan(model.spec(), &terms, &members).unwrap()
}

fn text(prompt: &[u32], count: u32, sampling: Sampling) -> Sequence {
    let rows = prompt.len() as u32 + count;
    Sequence { slot: 3, rows, sampling, tokens: prompt.to_vec(), prompt: prompt.len() }
}

/// The values that are reported of `count` tokens behind a prompt.
fn generate(
    cluster: &LocalCluster,
    text: &Sequence,
    count: u32,
    chunk: u32,
    stop: &[u32],
) -> Result<Vec<TokenEvent>, LocalError> {
    let mut all = Vec::new();
    let mut tell = |told: &TokenEvent| {
        all.push(*told);
        ControlFlow::Continue(())
    };
    cluster.generate(text, count, chunk, stop, &mut tell)?;
    Ok(all)
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn greedy_tokens_match_transformers() {
    for name in DECODERS {
        let model = Arc::new(ModelDir::open(&folder(name)).unwrap());
        let golden = std::fs::read_to_string(folder(name).join("generated.json")).unwrap();
        let golden: Value = serde_json::from_str(&golden).unwrap();
        let prompts = golden["prompts"].as_array().unwrap();
        for (at, strategy) in STRATEGIES.into_iter().enumerate() {
            for devices in 1..=4 {
                if strategy == Strategy::Local && devices > 1 {
                    continue;
                }
                let tiles = [1, 3][(at + devices) % 2];
                let mut plan = plan(&model, strategy, devices, tiles, CacheType::F32);
                if devices % 2 == 0 && strategy == Strategy::Galaxy {
                    plan.exchange = Exchange::Direct;
                }
                let cluster = LocalCluster::open(model.clone(), plan).unwrap();
                for (nth, prompt) in prompts.iter().enumerate() {
                    let (ids, want) = (ids(&prompt["prompt"]), ids(&prompt["generated"]));
                    let chunk = [64, 5, 8][(at + devices + nth) % 3];
                    let text = text(&ids, want.len() as u32, Sampling::greedy());
                    let told = generate(&cluster, &text, want.len() as u32, chunk, &[]).unwrap();
                    let got: Vec<u32> = told.iter().map(|told| told[0] as u32).collect();
                    assert_eq!(got, want, "{name} {strategy} {devices} devices, chunks of {chunk}");
                }
            }
        }
    }
}

fn open(name: &str, strategy: Strategy, devices: usize, values: CacheType) -> LocalCluster {
    let model = Arc::new(ModelDir::open(&folder(name)).unwrap());
    let plan = plan(&model, strategy, devices, 2, values);
    LocalCluster::open(model, plan).unwrap()
}

fn tokens(told: &[TokenEvent]) -> Vec<u32> {
    told.iter().map(|told| told[0] as u32).collect()
}

const PROMPT: [u32; 9] = [3, 14, 15, 92, 65, 35, 89, 79, 14];

/// The same seed gives the same tokens, whichever device has which part of the vocabulary.
#[test]
fn sampled_tokens_do_not_depend_on_the_split() {
    let base = Sampling { temperature: 1.0, seed: 11, ..Sampling::default() };
    let cases = [
        base.clone(),
        Sampling { top_k: 7, ..base.clone() },
        // Of 97 tokens of a random model many are needed.
        Sampling { top_p: 0.97, logprobs: MOST_LOGPROBS, ..base.clone() },
        Sampling { min_p: 0.4, repetition: 1.3, presence: 0.5, frequency: 0.5, ..base },
    ];
    for (strategy, devices) in [
        (Strategy::Galaxy, 3),
        (Strategy::Pipeline, 2),
        (Strategy::Sequence, 2),
        (Strategy::Megatron, 4),
    ] {
        let (alone, shared) = (
            open("llama", Strategy::Local, 1, CacheType::F32),
            open("llama", strategy, devices, CacheType::F32),
        );
        for sampling in &cases {
            let text = text(&PROMPT, 40, sampling.clone());
            let want = generate(&alone, &text, 40, 64, &[]).unwrap();
            let got = generate(&shared, &text, 40, 4, &[]).unwrap();
            assert_eq!(tokens(&got), tokens(&want), "{strategy} {sampling:?}");
            for (got, want) in got.iter().zip(&want) {
                assert!((got[1] - want[1]).abs() < 1e-3, "{strategy}: {} {}", got[1], want[1]);
            }
        }
        let other = Sampling { seed: 12, ..cases[0].clone() };
        let other = generate(&shared, &text(&PROMPT, 40, other), 40, 64, &[]).unwrap();
        let first = generate(&shared, &text(&PROMPT, 40, cases[0].clone()), 40, 64, &[]).unwrap();
        assert_ne!(tokens(&other), tokens(&first), "another seed, another text");
    }
}

/// The chosen tokens keep to what `transformers` leaves after penalties and bounds, with the probabilities that
/// it gives them.
#[test]
fn sampling_bounds_match_transformers() {
    let golden = std::fs::read_to_string(folder("gpt2").join("processed.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let prompt = ids(&golden["prompt"]);
    let cluster = open("gpt2", Strategy::Galaxy, 2, CacheType::F32);
    let logits: Vec<f64> =
        golden["logits"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    let sum = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
    for result in golden["results"].as_array().unwrap() {
        let of = |name: &str, off: f64| result["settings"][name].as_f64().unwrap_or(off);
        let sampling = |seed| Sampling {
            temperature: of("temperature", 1.0) as f32,
            top_k: of("top_k", 0.0) as u32,
            top_p: of("top_p", 1.0) as f32,
            min_p: of("min_p", 0.0) as f32,
            repetition: of("repetition_penalty", 1.0) as f32,
            seed,
            ..Sampling::default()
        };
        let kept = ids(&result["kept"]);
        let draws = 300;
        let mut seen = vec![0.0; logits.len()];
        for seed in 0..draws {
            let text = Sequence { rows: 13, ..text(&prompt, 1, sampling(seed)) };
            let told = generate(&cluster, &text, 1, 64, &[]).unwrap();
            let token = told[0][0] as usize;
            assert!(kept.contains(&(token as u32)), "{token} of {kept:?}: {}", result["settings"]);
            let logprob = logits[token] - sum;
            assert!((f64::from(told[0][1]) - logprob).abs() < 1e-3, "{} {logprob}", told[0][1]);
            seen[token] += 1.0;
        }
        let probabilities = result["probabilities"].as_array().unwrap();
        for (token, p) in kept.iter().zip(probabilities) {
            let want = p.as_f64().unwrap() * draws as f64;
            let slack = 5.0 * want.sqrt().max(1.0);
            let got: f64 = seen[*token as usize];
            assert!((got - want).abs() <= slack, "token {token}: {got}, not {want}");
        }
    }
}

/// What is reported of each token, to the bit, does not depend on how many rows a prompt is cut into, nor on whether
/// the row before it came with the prompt or as a generated token.
#[test]
fn token_events_are_bit_identical_however_the_prompt_is_cut() {
    let plans = [
        (Strategy::Local, 1, Exchange::Ring, WireType::F32),
        (Strategy::Galaxy, 2, Exchange::Ring, WireType::F32),
        (Strategy::Galaxy, 2, Exchange::Direct, WireType::F32),
        (Strategy::Galaxy, 3, Exchange::Direct, WireType::F32),
        (Strategy::Galaxy, 4, Exchange::Direct, WireType::F32),
        (Strategy::Megatron, 2, Exchange::Ring, WireType::F32),
        (Strategy::Sequence, 3, Exchange::Direct, WireType::F32),
        (Strategy::Pipeline, 3, Exchange::Ring, WireType::F32),
        (Strategy::Pipeline, 3, Exchange::Ring, WireType::F16),
        (Strategy::Pipeline, 3, Exchange::Ring, WireType::Q8),
    ];
    let bits = |told: &[TokenEvent]| -> Vec<Vec<u32>> {
        told.iter().map(|told| told.iter().map(|value| value.to_bits()).collect()).collect()
    };
    for name in ["llama", "gpt2", "gptj", "qwen3", "llama-tied-bf16"] {
        let model = Arc::new(ModelDir::open(&folder(name)).unwrap());
        for values in [CacheType::F32, CacheType::F16, CacheType::Q8] {
            for (strategy, devices, exchange, wire) in plans {
                let plan = Plan { exchange, wire, ..plan(&model, strategy, devices, 2, values) };
                assert!(plan.computes_alike());
                let cluster = LocalCluster::open(model.clone(), plan).unwrap();
                let sampling = Sampling { logprobs: MOST_LOGPROBS, ..Sampling::greedy() };
                let run = |prompt: &[u32], count, chunk| {
                    let text = text(prompt, count, sampling.clone());
                    generate(&cluster, &text, count, chunk, &[]).unwrap()
                };
                let what = format!("{name} {strategy} {devices} {exchange} {wire} {values}");
                let want = run(&PROMPT, 12, 64);
                for chunk in [1, 2, 4, 7] {
                    let got = run(&PROMPT, 12, chunk);
                    assert_eq!(bits(&got), bits(&want), "{what}, chunks of {chunk}");
                }
                for made in [1, 5, 11] {
                    let all = [&PROMPT[..], &tokens(&want)[..made]].concat();
                    let got = run(&all, 1, 64);
                    assert_eq!(bits(&got), bits(&want[made..=made]), "{what}, {made} read");
                }
            }
        }
    }
}

#[test]
fn fewer_bits_in_the_kv_cache_change_logprobs_little() {
    let of = |values| {
        let text = text(&PROMPT, 12, Sampling { logprobs: 1, ..Sampling::default() });
        generate(&open("qwen2", Strategy::Galaxy, 2, values), &text, 12, 4, &[]).unwrap()
    };
    let want = of(CacheType::F32);
    for (values, most) in [(CacheType::F16, 1e-2), (CacheType::Q8, 3e-2)] {
        let got = of(values);
        assert_eq!(tokens(&got)[0], tokens(&want)[0]);
        let error = (got[0][1] - want[0][1]).abs();
        assert!(error > 0.0 && error < most, "{values}: {error}");
    }
}

#[test]
fn a_stop_token_ends_a_sequence_on_all_devices() {
    let cluster = open("llama", Strategy::Galaxy, 3, CacheType::F32);
    let all = generate(&cluster, &text(&PROMPT, 30, Sampling::greedy()), 30, 64, &[]).unwrap();
    let stop = tokens(&all)[9];
    let first = tokens(&all).iter().position(|token| *token == stop).unwrap();
    let some = generate(&cluster, &text(&PROMPT, 30, Sampling::greedy()), 30, 64, &[stop]).unwrap();
    assert_eq!(tokens(&some), tokens(&all)[..=first]);
}

#[test]
fn generation_ends_when_the_token_callback_breaks() {
    let cluster = open("llama", Strategy::Galaxy, 2, CacheType::F32);
    let text = text(&PROMPT, 60, Sampling::greedy());
    let all = generate(&cluster, &text, 60, 64, &[]).unwrap();
    let mut some = Vec::new();
    let mut tell = |told: &TokenEvent| {
        some.push(*told);
        if some.len() == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    cluster.generate(&text, 60, 64, &[], &mut tell).unwrap();
    assert_eq!(tokens(&some), tokens(&all)[..7]);
}

#[test]
fn kv_cache_bytes_match_the_budget_for_every_cache_type() {
    let model = Arc::new(ModelDir::open(&folder("llama")).unwrap());
    let of = |values| {
        let plan = plan(&model, Strategy::Local, 1, 1, values);
        let device = &plan.ring[0];
        let mut quiet = |_, _| ControlFlow::Continue(());
        let shard = Shard::load(model.clone(), device, &mut quiet).unwrap();
        let mut engine = CpuEngine::new(shard, 1).with_cache(plan.cache);
        let text = text(&PROMPT, 300, Sampling::greedy());
        engine.begin(&text, &Arc::from([0, 1])).unwrap();
        (engine.held().1.0, budget::cache(model.spec(), plan.cache, device).0)
    };
    let exact = of(CacheType::F32);
    for values in [CacheType::F16, CacheType::Q8] {
        let (held, said) = of(values);
        assert_eq!(exact.0 - held, exact.1 - said, "{values}");
        assert!(held <= said && held < exact.0, "{values}");
    }
}

#[test]
fn a_sequence_that_does_not_fit_the_kv_cache_is_refused() {
    let cluster = open("llama", Strategy::Galaxy, 2, CacheType::F32);
    // Two blocks of 192 rows.
    let long = text(&PROMPT, 380, Sampling::greedy());
    let error = generate(&cluster, &long, 380, 64, &[]).unwrap_err();
    assert!(matches!(error, LocalError::Lower(LowerError::Cache { rows: 576, .. })), "{error}");
    let model = Arc::new(ModelDir::open(&folder("llama")).unwrap());
    let none = Plan { cache: Cache::NONE, ..plan(&model, Strategy::Local, 1, 1, CacheType::F32) };
    let none = LocalCluster::open(model, none).unwrap();
    let error = generate(&none, &text(&PROMPT, 3, Sampling::greedy()), 3, 64, &[]).unwrap_err();
    assert!(error.to_string().contains("has a KV cache of 0"), "{error}");
    let fine = generate(&cluster, &text(&PROMPT, 3, Sampling::greedy()), 3, 64, &[]).unwrap();
    assert_eq!(fine.len(), 3);
    let model = Arc::new(ModelDir::open(&folder("bert")).unwrap());
    let bert =
        LocalCluster::open(model.clone(), plan(&model, Strategy::Local, 1, 1, CacheType::F32))
            .unwrap();
    let error = generate(&bert, &text(&PROMPT, 3, Sampling::greedy()), 3, 64, &[]).unwrap_err();
    assert!(matches!(error, LocalError::Lower(LowerError::WholeTexts { .. })), "{error}");
}

/// A chat continues behind its earlier turns: their rows are cached, and the rest comes as if all were
/// computed anew.
#[test]
fn a_resumed_sequence_gets_the_same_tokens_as_a_fresh_sequence() {
    for (strategy, devices) in
        [(Strategy::Local, 1), (Strategy::Galaxy, 3), (Strategy::Pipeline, 2)]
    {
        let model = Arc::new(ModelDir::open(&folder("llama")).unwrap());
        let open = || {
            let plan = plan(&model, strategy, devices, 3, CacheType::F32);
            LocalCluster::open(model.clone(), plan).unwrap()
        };
        let (cluster, fresh) = (open(), open());
        let resume = |prompt: &[u32], kept, count| {
            let (mut all, goal) = (Vec::new(), Goal { count, ..Goal::default() });
            let mut tell = |told: &TokenEvent| {
                all.push(*told);
                ControlFlow::Continue(())
            };
            let text = text(prompt, count, Sampling::greedy());
            cluster.resume(&text, kept, &goal, 5, &mut tell).unwrap();
            all
        };
        let mut prompt = vec![3, 14, 15, 92, 65, 35, 89, 79, 14];
        let mut kept = 0;
        // The last of them fills a second block.
        for count in [20, 1, 30, 120, 9] {
            let told = resume(&prompt, kept, count);
            let text = text(&prompt, count, Sampling::greedy());
            let want = generate(&fresh, &text, count, 64, &[]).unwrap();
            let ids =
                |told: &[TokenEvent]| told.iter().map(|told| told[0] as u32).collect::<Vec<_>>();
            assert_eq!(ids(&told), ids(&want), "{strategy} {kept}");
            if strategy == Strategy::Local {
                assert_eq!(told, want, "a row adds up in one order");
            }
            prompt.extend(ids(&told));
            // The last one has gone through no layer.
            kept = prompt.len() as u32 - 1;
            prompt.extend([7, 2]);
        }
        // Another one, which begins alike.
        prompt.truncate(11);
        prompt.push(1);
        let want = generate(&fresh, &text(&prompt, 9, Sampling::greedy()), 9, 64, &[]).unwrap();
        let told = resume(&prompt, 11, 9);
        let alike = told.iter().zip(&want).filter(|(a, b)| a[0] == b[0]).count();
        assert_eq!((told.len(), alike), (9, 9), "{strategy}");
    }
}
