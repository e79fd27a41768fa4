//! A real model in a GGUF file: chats with SmolLM2-135M-Instruct against what transformers makes of the values that
//! the reference implementation of GGUF reads (`scripts/golden-smollm2.py`).
#![allow(clippy::unwrap_used)]

use galaxy_cli::openai::chat::{Chat, Message, TemplateArguments};
use galaxy_common::{Bytes, Cache, DeviceName, Sampling, Sequence, Strategy, WireType};
use galaxy_engine::{generate::TokenEvent, local::LocalCluster};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::ModelDir;
use galaxy_testbed::{golden::TOLERANCE, processes::root};
use serde::Deserialize;
use std::{ops::ControlFlow, path::PathBuf, sync::Arc};

const FILE: &str = "models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf";

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Message>,
    /// The tokens of the chat.
    prompt: Vec<u32>,
    /// The tokens that were generated behind the chat.
    generated: Vec<u32>,
    /// How far the second best logit was behind at each generated token, over the largest logit.
    margins: Vec<f32>,
    /// The second best token at each place.
    seconds: Vec<u32>,
}

/// The path of the model's file; none where it is not there.
fn brought() -> Option<PathBuf> {
    let path = root().join(FILE);
    if !path.exists() {
        eprintln!("skipped: {FILE} is not there; scripts/setup brings it");
        return None;
    }
    Some(path)
}

fn golden() -> Vec<Case> {
    let text = std::fs::read_to_string(root().join("testdata/cases/smollm2.json")).unwrap();
    let Golden { cases } = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 3);
    for case in &cases {
        let counts = [case.generated.len(), case.margins.len(), case.seconds.len()];
        assert_eq!(counts, [64; 3]);
    }
    cases
}

/// A cluster of devices with these shares in this process.
fn cluster(path: &std::path::Path, strategy: Strategy, shares: &[f64]) -> LocalCluster {
    let model = Arc::new(ModelDir::open(path).unwrap());
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        strategy,
        wire: WireType::F32,
        tiles: 4,
        formats: model.formats(),
        max_rows: 128,
        cache: Cache { rows: 2 * Cache::BLOCK, values: galaxy_common::CacheType::F32 },
    };
    let member = |(at, share): (usize, &f64)| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 31),
        threads: 1,
        share: *share,
    };
    let members: Vec<Member> = shares.iter().enumerate().map(member).collect();
    let plan = share::plan(model.spec(), &terms, &members).unwrap();
    LocalCluster::open(model, plan).unwrap()
}

/// The next `count` tokens behind others, the likeliest each time, even past one that ends a text.
fn greedy(cluster: &LocalCluster, tokens: &[u32], count: u32) -> Vec<u32> {
    let (prompt, rows) = (tokens.len(), tokens.len() as u32 + count);
    let (tokens, sampling) = (tokens.to_vec(), Sampling::greedy());
    let text = Sequence { slot: 0, rows, sampling, tokens, prompt };
    let mut made = Vec::new();
    let mut tell = |told: &TokenEvent| {
        made.push(told[0] as u32);
        ControlFlow::Continue(())
    };
    cluster.generate(&text, count, 128, &[], &mut tell).unwrap();
    made
}

/// Checks that tokens are those of the reference. Where two logits are nearer to each other there than law 1
/// allows, either may be chosen, and the chat goes on with the reference's token.
fn assert_agrees(cluster: &LocalCluster, case: &Case) {
    let mut at = 0;
    while at < case.generated.len() {
        let tokens = [&case.prompt[..], &case.generated[..at]].concat();
        let made = greedy(cluster, &tokens, (case.generated.len() - at) as u32);
        let Some(other) = made.iter().zip(&case.generated[at..]).position(|(a, b)| a != b) else {
            return;
        };
        at += other;
        let (have, want, margin) = (made[other], case.generated[at], case.margins[at]);
        assert!(
            margin <= TOLERANCE && have == case.seconds[at],
            "token {at} is {have} instead of {want}, which is ahead by {margin:e} of the largest logit"
        );
        at += 1;
    }
}

#[test]
fn chat_prompts_have_the_tokens_of_the_reference() {
    let Some(path) = brought() else { return };
    let chat = Chat::open(&path).unwrap();
    for case in golden() {
        let tokens = chat.tokens(&case.messages, &TemplateArguments::default());
        assert_eq!(tokens.map_err(|error| error.message), Ok(case.prompt));
    }
}

#[test]
fn one_device_answers_as_the_reference_does() {
    let Some(path) = brought() else { return };
    let cluster = cluster(&path, Strategy::Local, &[1.0]);
    golden().iter().for_each(|case| assert_agrees(&cluster, case));
}

#[test]
fn three_devices_answer_as_the_reference_does() {
    let Some(path) = brought() else { return };
    let cluster = cluster(&path, Strategy::Galaxy, &[3.0, 2.0, 1.0]);
    golden().iter().for_each(|case| assert_agrees(&cluster, case));
}
