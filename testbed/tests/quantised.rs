//! Weights that are rounded at placement: `weights_format` in the cluster file, real processes.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, GenerateOptions, Generated, Output};
use galaxy_common::{Bytes, Cache, CacheType, DeviceName, Sampling, Sequence, Strategy, WireType};
use galaxy_engine::{generate::TokenEvent, local::LocalCluster};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::{ModelDir, Quantisation};
use galaxy_testbed::{
    models,
    processes::{Setup, TestCluster, root},
};
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

const PROMPT: &str = "Each device ";
const TOKENS: u32 = 40;

fn decoder() -> PathBuf {
    root().join("models/tiny-galaxy")
}

/// The tokens that one device of this process generates behind the prompt.
fn alone(bits: Option<Quantisation>, prompt: &[u32]) -> Vec<u32> {
    let model = ModelDir::open(&decoder()).and_then(|model| model.quantised_to(bits)).unwrap();
    let model = Arc::new(model);
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        strategy: Strategy::Local,
        wire: WireType::F32,
        tiles: 1,
        formats: model.formats(),
        max_rows: 128,
        cache: Cache { rows: 8 * Cache::BLOCK, values: CacheType::F32 },
    };
    let name = DeviceName::new("d0").unwrap();
    let member = Member { name, budget: Bytes(1 << 30), threads: 1, share: 1.0 };
    let plan = share::plan(model.spec(), &terms, &[member]).unwrap();
    let cluster = LocalCluster::open(model, plan).unwrap();
    let (rows, tokens) = (prompt.len() as u32 + TOKENS, prompt.to_vec());
    let text =
        Sequence { slot: 0, rows, sampling: Sampling::greedy(), tokens, prompt: prompt.len() };
    let mut made = Vec::new();
    let mut tell = |told: &TokenEvent| {
        made.push(told[0] as u32);
        ControlFlow::Continue(())
    };
    cluster.generate(&text, TOKENS, 128, &[], &mut tell).unwrap();
    made
}

async fn greedy(client: &Client, prompt: &[u32]) -> Vec<u32> {
    let options = GenerateOptions {
        max_tokens: TOKENS,
        sampling: Sampling::greedy().into(),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    let mut text = client.generate(prompt.to_vec(), options).await.unwrap();
    let mut made = Vec::new();
    loop {
        match text.next().await.unwrap() {
            Some(Generated::Token(token)) => made.push(token.token),
            Some(Generated::Done(_)) => return made,
            None => panic!("a text without an end"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quantised_cluster_generates_the_tokens_of_one_quantised_device() {
    let prompt: Vec<u32> = PROMPT.bytes().map(u32::from).collect();
    for (bits, name, strategy, shares) in [
        (Quantisation::Q8, "q8", "galaxy", vec![3.0, 2.0, 1.0]),
        (Quantisation::Q6, "q6", "megatron", vec![1.0, 1.0]),
        (Quantisation::Q4, "q4", "galaxy", vec![1.0, 2.0]),
    ] {
        let setup = Setup { weights_format: Some(name), strategy, shares, ..Setup::new(decoder()) };
        let cluster = TestCluster::start(setup).unwrap();
        let made = greedy(&cluster.client().await.unwrap(), &prompt).await;
        assert_eq!(made, alone(Some(bits), &prompt), "{name}");
        let said = cluster.coordinator.output();
        assert!(said.contains(&format!("rounded to {name}")) && said.contains("lossy"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_without_the_model_quantise_the_weights_sent_to_them() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let model = models::bert(target, "rounded", 2, 512, 8).unwrap();
    let tokens = [[5u32, 17, 9, 300, 2]];
    let setup = || Setup { weights_format: Some("q4"), ..Setup::new(&model) };
    let with = TestCluster::start(setup()).unwrap();
    let want = with.client().await.unwrap().run(&tokens, Output::Hidden).await.unwrap();
    drop(with);
    let plain = TestCluster::start(Setup::new(&model)).unwrap();
    let exact = plain.client().await.unwrap().run(&tokens, Output::Hidden).await.unwrap();
    drop(plain);
    assert_ne!(want.tensors, exact.tensors, "it is rounded");
    let caches = tempfile::tempdir().unwrap();
    let cluster =
        TestCluster::start(Setup { caches: Some(caches.path().to_owned()), ..setup() }).unwrap();
    let have = cluster.client().await.unwrap().run(&tokens, Output::Hidden).await.unwrap();
    assert_eq!(have.tensors, want.tensors, "the same files, the same plan, the same bits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gguf_model_sent_to_devices_gives_the_same_outputs() {
    let model = root().join("testdata/gguf/mixed.gguf");
    let tokens = [[5u32, 17, 9, 30, 2]];
    let setup = || Setup { shares: vec![1.0, 2.0], ..Setup::new(&model) };
    let with = TestCluster::start(setup()).unwrap();
    let want = with.client().await.unwrap().run(&tokens, Output::Hidden).await.unwrap();
    drop(with);
    let caches = tempfile::tempdir().unwrap();
    let cluster =
        TestCluster::start(Setup { caches: Some(caches.path().to_owned()), ..setup() }).unwrap();
    let have = cluster.client().await.unwrap().run(&tokens, Output::Hidden).await.unwrap();
    assert_eq!(have.tensors, want.tensors, "the same blocks, the same plan, the same bits");
}
