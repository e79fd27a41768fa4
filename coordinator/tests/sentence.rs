//! Vectors, scores and classes of texts, compared with those of sentence-transformers and
//! transformers: `scripts/golden-sentence.py`.
#![allow(clippy::unwrap_used)]

use galaxy_common::{
    Bytes, Cache, DeviceName,
    plan::{Strategy, WireType},
};
use galaxy_coord::{
    Embed, Items, Limits, LocalFleet, Prefix, RequestError, Session,
    client_memory::DEFAULT_CLIENT_MEMORY,
};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::ModelDir;
use serde::Deserialize;
use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// A request to a model, and the results that are expected.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Expected {
    Embed {
        embed: Vec<String>,
        dimensions: Option<NonZeroU32>,
        #[serde(default)]
        normalise: bool,
        prompt_name: Option<String>,
        prompt: Option<String>,
        vectors: Vec<Vec<f32>>,
    },
    Rerank {
        rerank: Vec<String>,
        query: String,
        scores: Vec<f32>,
    },
    Classify {
        classify: Vec<String>,
        probabilities: Vec<Vec<f32>>,
    },
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/sentence").join(name)
}

fn session(name: &str) -> Session {
    let model = Arc::new(ModelDir::open(&directory(name)).unwrap());
    assert_eq!(model.warnings(), [], "{name}");
    let member = |(i, share): (usize, &f64)| Member {
        name: DeviceName::new(format!("dev-{i}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        share: *share,
    };
    let members: Vec<Member> = [2.0, 1.0].iter().enumerate().map(member).collect();
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy: Strategy::Galaxy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: 100,
        cache: Cache::NONE,
    };
    let plan = share::plan(model.spec(), &terms, &members).unwrap();
    let fleet = Arc::new(LocalFleet::open(model.clone(), plan).unwrap());
    Session::new(
        model,
        fleet,
        Limits {
            queue: 2,
            timeout: Duration::from_secs(60),
            client_memory: DEFAULT_CLIENT_MEMORY,
            drafts: true,
        },
    )
}

fn near(name: &str, have: &[f32], want: &[f32]) {
    assert_eq!(have.len(), want.len(), "{name}");
    let largest = want.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let apart = have.iter().zip(want).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(apart <= 1e-4 * largest, "{name}: {apart} of {largest}: {have:?}, wanted {want:?}");
}

async fn check(name: &str) {
    let session = session(name);
    let text = std::fs::read_to_string(directory(name).join("expected.json")).unwrap();
    let expected: Vec<Expected> = serde_json::from_str(&text).unwrap();
    assert!(!expected.is_empty());
    for expected in expected {
        match expected {
            Expected::Embed { embed, dimensions, normalise, prompt_name, prompt, vectors } => {
                let named = prompt_name.map(Prefix::Named);
                let prefix = named.or(prompt.map(Prefix::Text));
                let (texts, truncate) = (embed, true);
                let ask = Embed { texts, truncate, prefix, dimensions, normalise, ids: Vec::new() };
                let done = session.embed(ask, None).await.unwrap();
                assert_eq!(done.width as usize, vectors[0].len(), "{name}");
                near(name, &done.vectors, &vectors.concat());
            }
            Expected::Rerank { rerank, query, scores } => {
                let done = session.rerank(query, rerank, true, None).await.unwrap();
                near(name, &done.scores, &scores);
            }
            Expected::Classify { classify, probabilities } => {
                let done = session.classify(Items::Texts(classify, true), None).await.unwrap();
                near(name, &done.probabilities, &probabilities.concat());
            }
        }
    }
}

macro_rules! golden {
    ($($test:ident: $name:literal),* $(,)?) => { $(
        #[tokio::test]
        async fn $test() {
            check($name).await;
        }
    )* };
}

golden! {
    a_dense_module_is_applied_to_the_pooled_vector: "dense",
    modules_of_every_kind_run_in_their_order: "layers",
    several_poolings_are_concatenated: "poolings",
    prompts_are_put_before_texts_and_not_pooled: "prompts",
    vectors_are_cut_to_the_truncate_dim_of_the_files: "truncate-dim",
    the_text_length_limit_is_read_from_the_tokenizer_config: "length",
    texts_are_lower_cased_before_tokenisation: "lower-case",
    a_model_in_its_own_subdirectory_is_read: "old-layout",
    pairs_of_texts_have_their_token_types: "cross-bert",
    the_score_activation_is_read_from_the_config: "cross-identity",
    pairs_without_token_types_are_ranked: "cross-roberta",
    multi_label_probabilities_match_transformers: "several-labels",
    regression_values_match_transformers: "regression",
    single_label_probabilities_match_transformers: "one-of-many",
}

#[tokio::test]
async fn unsupported_embed_and_rerank_requests_are_refused_with_a_reason() {
    let session = session("prompts");
    let why = |error: RequestError| (error.code(), error.to_string());
    let texts = vec!["a lighthouse".to_owned()];
    let of = |embed: Embed| {
        let session = session.clone();
        async move { why(session.embed(embed, None).await.unwrap_err()) }
    };
    let prefix = Some(Prefix::Named("passage".to_owned()));
    let (code, message) = of(Embed { texts: texts.clone(), prefix, ..Embed::default() }).await;
    assert_eq!(code, "invalid_argument");
    assert!(message.contains("known are document, query"), "{message}");
    let dimensions = NonZeroU32::new(25);
    let (code, message) = of(Embed { texts: texts.clone(), dimensions, ..Embed::default() }).await;
    assert_eq!(code, "invalid_argument");
    assert!(message.contains("25") && message.contains("have 24"), "{message}");
    let ids = vec![vec![2, 5, 3]];
    let both = Embed { texts: texts.clone(), ids: ids.clone(), ..Embed::default() };
    assert!(of(both).await.1.contains("one kind"));
    let prefix = Some(Prefix::Text("q".to_owned()));
    assert!(of(Embed { ids: ids.clone(), prefix, ..Embed::default() }).await.1.contains("prompt"));
    let long = Embed { ids: vec![vec![5; 41]], truncate: true, ..Embed::default() };
    assert_eq!(of(long).await.0, "text_too_long");
    let unknown = Embed { ids: vec![vec![1 << 20]], ..Embed::default() };
    assert_eq!(of(unknown).await.0, "unknown_token");
    let (code, message) =
        why(session.rerank("query".to_owned(), texts, false, None).await.unwrap_err());
    assert_eq!(code, "unsupported_output");
    assert!(message.contains("no class head"), "{message}");
}

#[tokio::test]
async fn embed_uses_given_token_ids_unchanged() {
    let session = session("dense");
    let ids = vec![vec![2, 5, 64, 3], vec![2, 66, 3]];
    let of_ids = Embed { ids: ids.clone(), ..Embed::default() };
    let done = session.embed(of_ids, None).await.unwrap();
    assert_eq!((done.width, done.vectors.len(), done.report.tokens), (6, 12, 7));
    let inputs = ids.into_iter().map(galaxy_coord::Input::Tokens).collect();
    let raw = session.run(inputs, galaxy_coord::RunOutput::Sentence, None).await.unwrap();
    let raw: Vec<f32> = raw.tensors.into_iter().flat_map(|tensor| tensor.values).collect();
    assert_eq!(done.vectors, raw);
}
