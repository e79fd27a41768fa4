//! What comes of `generation_config.json` where a request says nothing, against transformers
//! (`scripts/golden-generation.py`): the same tokens, or a refusal that names the setting.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    Bytes, Cache, DeviceName, Fallback, GenerateOptions, Strategy, WireType,
    sampling::SamplingParams,
};
use galaxy_engine::{generate::TokenEvent, local::LocalCluster, sampler::Sequence};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::ModelDir;
use serde_json::Value;
use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

fn testdata() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata")
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// A checkpoint with these settings beside it.
fn model(checkpoint: &str, config: &Value, to: &Path) -> Arc<ModelDir> {
    for name in ["config.json", "model.safetensors"] {
        fs::copy(testdata().join("golden").join(checkpoint).join(name), to.join(name)).unwrap();
    }
    let mut config = config.clone();
    // The reference has taken away what config.json says of it.
    if config.get("eos_token_id").is_none() {
        config["eos_token_id"] = Value::Array(Vec::new());
    }
    fs::write(to.join("generation_config.json"), config.to_string()).unwrap();
    Arc::new(ModelDir::open(to).unwrap())
}

fn cluster(model: &Arc<ModelDir>) -> LocalCluster {
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy: Strategy::Galaxy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: 64,
        cache: Cache { rows: Cache::BLOCK, values: galaxy_common::CacheType::F32 },
    };
    let member = |name: &str| Member {
        name: DeviceName::new(name).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        share: 1.0,
    };
    let plan = share::plan(model.spec(), &terms, &[member("a"), member("b")]).unwrap();
    LocalCluster::open(model.clone(), plan).unwrap()
}

#[test]
fn a_request_without_settings_generates_the_tokens_of_transformers() {
    let golden = fs::read_to_string(testdata().join("cases/generation.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let (prompt, count) = (ids(&golden["prompt"]), golden["count"].as_u64().unwrap() as u32);
    let fallback = Fallback { temperature: 0.0, max_tokens: count };
    let (mut same, mut refused) = (0, 0);
    for case in golden["cases"].as_array().unwrap() {
        let (name, config) = (case["checkpoint"].as_str().unwrap(), &case["config"]);
        let dir = tempfile::tempdir().unwrap();
        let model = model(name, config, dir.path());
        let generation = model.generation().unwrap();
        let vocabulary = model.spec().vocabulary;
        let asked = GenerateOptions { fallback: Some(fallback), ..GenerateOptions::default() };
        let settled = generation.complete(asked, prompt.len() as u32, vocabulary);
        let GenerateOptions { sampling, max_tokens, .. } = match settled {
            Ok(settled) => settled,
            Err(error) => {
                let named =
                    config.as_object().unwrap().keys().any(|name| error.to_string().contains(name));
                assert!(named, "{name} {config}: {error}");
                refused += 1;
                continue;
            }
        };
        let sampling = SamplingParams { seed: Some(1), ..sampling }.complete(0);
        let text = Sequence {
            slot: 0,
            rows: prompt.len() as u32 + max_tokens,
            sampling: sampling.checked(vocabulary).unwrap(),
            tokens: prompt.clone(),
            prompt: prompt.len(),
        };
        let mut made = Vec::new();
        let mut tell = |told: &TokenEvent| {
            made.push(told[0] as u32);
            ControlFlow::Continue(())
        };
        cluster(&model).generate(&text, max_tokens, 64, &generation.ends, &mut tell).unwrap();
        assert_eq!(made, ids(&case["generated"]), "{name} {config}");
        same += 1;
    }
    assert!(same >= 30 && refused >= 20, "{same} the same, {refused} refused");
}
