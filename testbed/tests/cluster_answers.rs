//! Answers of real processes: three unequal workers, a coordinator, and the SDK.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, Embeddings, Output, TooLong};
use galaxy_proto::version_line;
use galaxy_testbed::{
    golden::{Expected, LENGTHS, checkpoints_dir, deviation},
    processes::{Process, Setup, TestCluster, listening, program, root},
};
use std::{path::PathBuf, process::Command};

fn minilm() -> PathBuf {
    let path = root().join("models/all-MiniLM-L6-v2");
    assert!(path.join("model.safetensors").exists(), "{path:?} is missing: run scripts/setup");
    path
}

/// Sentences, and the vectors that `sentence-transformers` computed for them.
fn reference() -> (Vec<String>, Vec<Vec<f32>>) {
    let text = std::fs::read(checkpoints_dir().join("minilm.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let sentences = serde_json::from_value(json["sentences"].clone()).unwrap();
    (sentences, serde_json::from_value(json["vectors"].clone()).unwrap())
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn assert_close(got: &Embeddings, want: &[Vec<f32>], least: f64) {
    assert_eq!(got.vectors.len(), want.len());
    for (i, (got, want)) in got.vectors.iter().zip(want).enumerate() {
        let cosine = cosine(got, want);
        assert!(cosine >= least, "text {i}: cosine {cosine}, at least {least} was wanted");
    }
}

/// A coordinator that runs the model in its own process.
async fn single() -> (Process, Client) {
    let mut command = Command::new(program("galaxy-coord").unwrap());
    command.arg("--model").arg(minilm()).args(["--threads", "2", "--listen", "127.0.0.1:0"]);
    let mut process = Process::spawn("the embedded model", command).unwrap();
    let address = listening(&mut process).unwrap();
    process.line("ready: ").unwrap();
    let client = Client::builder().address(address).connect().await.unwrap();
    (process, client)
}

async fn embedded(setup: Setup, sentences: &[String]) -> Embeddings {
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let answer = client.embed_with(sentences, TooLong::Truncate).await;
    answer.unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentence_vectors_match_one_device_and_the_reference() {
    let (sentences, want) = reference();
    let alone = {
        let (_process, client) = single().await;
        client.embed_with(&sentences, TooLong::Truncate).await.unwrap()
    };
    assert_close(&alone, &want, 0.9999);
    let cluster = TestCluster::start(Setup::new(minilm())).unwrap();
    let client = cluster.client().await.unwrap();
    let answer = client.embed_with(&sentences, TooLong::Truncate).await.unwrap();
    assert_close(&answer, &alone.vectors, 0.999_999);
    assert_close(&answer, &want, 0.9999);

    let status = client.status().await.unwrap();
    assert_eq!((status.state.as_str(), status.served, status.failed), ("ready", 1, 0));
    assert!(version_line().starts_with(&status.version));
    let heads: Vec<_> = status.devices.iter().map(|d| d.heads.clone()).collect();
    assert_eq!(heads, [0..6, 6..10, 10..12], "12 heads by 3 : 2 : 1");
    for device in &status.devices {
        assert_eq!((device.state.as_str(), device.threads), ("ready", 1), "{device:?}");
        assert!(device.weight_bytes < device.needed_bytes, "{device:?}");
        assert!(device.needed_bytes <= device.budget_bytes, "{device:?}");
    }

    let trace = client.trace(answer.report.requests.first().copied()).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&trace.chrome_json).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let names: Vec<_> = events.iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    for device in &trace.devices {
        assert!(names.contains(&device.device.as_str()), "{names:?}");
        for kind in ["compute", "send", "receive"] {
            let of_kind = |name: &str| name.starts_with(kind);
            assert!(device.lanes.iter().any(|lane| of_kind(&lane.lane)), "{device:?}");
            assert!(names.iter().any(|name| of_kind(name)), "{names:?}");
        }
    }
    assert_eq!(trace.devices.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strategies_links_and_wire_formats_give_the_same_vectors() {
    let (sentences, want) = reference();
    let setup = || Setup::new(minilm());
    let megatron = embedded(Setup { strategy: "megatron", ..setup() }, &sentences).await;
    assert_close(&megatron, &want, 0.9999);
    let plain = embedded(Setup { link: "plain", tiles: 1, ..setup() }, &sentences).await;
    assert_close(&plain, &megatron.vectors, 0.999_999);
    let quic = embedded(Setup { link: "quic", ..setup() }, &sentences).await;
    assert_close(&quic, &megatron.vectors, 0.999_999);
    let half = embedded(Setup { wire: "f16", ..setup() }, &sentences).await;
    assert_close(&half, &want, 0.9999);
    assert_ne!(half.vectors, megatron.vectors, "f16 on the wire is lossy");
    let bytes = |answer: &Embeddings| -> u64 {
        answer.report.devices.iter().map(|d| d.bytes_received).sum()
    };
    assert!(bytes(&half) * 2 <= bytes(&plain), "{} and {}", bytes(&half), bytes(&plain));
    let local = embedded(Setup { strategy: "local", ..setup() }, &sentences).await;
    assert_close(&local, &megatron.vectors, 0.999_999);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raw_outputs_match_the_golden_files() {
    for (checkpoint, what, output) in [
        ("llama-tied-bf16", "logits", Output::AllLogits),
        ("gpt2", "hidden", Output::Hidden),
        ("bert", "logits", Output::Logits),
    ] {
        let path = checkpoints_dir().join(checkpoint);
        let expected = Expected::read(&path).unwrap();
        let cluster = TestCluster::start(Setup { tiles: 2, ..Setup::new(&path) }).unwrap();
        let client = cluster.client().await.unwrap();
        let sequences: Vec<_> = LENGTHS.iter().map(|&n| expected.ids(n).unwrap()).collect();
        let answer = client.run(&sequences, output).await.unwrap();
        for (length, tensor) in LENGTHS.iter().zip(&answer.tensors) {
            let want = expected.values(what, *length).unwrap();
            let off = deviation(&tensor.values, want).unwrap();
            assert!(off <= 1e-4, "{checkpoint}: {what} of {length} tokens is {off:e} off");
        }
    }
}
