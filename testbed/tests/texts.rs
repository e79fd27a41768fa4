//! Generation over real processes: the tokens, and what happens when a device or a client goes.
#![allow(clippy::unwrap_used)]

use galaxy_client::{
    Client, ClientError, GenerateOptions, Generated, Generating, Output, Prompt, RetryPolicy,
    Sampling, Token,
};
use galaxy_testbed::{
    golden::checkpoints_dir,
    models,
    processes::{PATIENCE, Process, Setup, TestCluster, root, until},
};
use std::{path::Path, time::Duration};

/// A decoder that generates some hundred tokens a second.
fn decoder() -> std::path::PathBuf {
    models::gpt2(Path::new(env!("CARGO_TARGET_TMPDIR")), "gpt2-512x4", 4, 512, 8).unwrap()
}

fn greedy(max_tokens: u32) -> GenerateOptions {
    GenerateOptions { max_tokens, ignore_end: true, ..GenerateOptions::default() }
}

/// The tokens of a generation to its end, and the reason of the end.
async fn rest(text: &mut Generating) -> Result<(Vec<Token>, String), ClientError> {
    let mut tokens = Vec::new();
    loop {
        match text.next().await? {
            Some(Generated::Token(token)) => tokens.push(token),
            Some(Generated::Done(done)) => {
                assert!(text.next().await?.is_none(), "nothing comes behind the end");
                return Ok((tokens, done.finish));
            }
            None => panic!("a text without an end"),
        }
    }
}

async fn ids(
    client: &Client,
    prompt: &[u32],
    options: GenerateOptions,
) -> Result<Vec<u32>, ClientError> {
    let mut text = client.generate(prompt.to_vec(), options).await?;
    let (tokens, _) = rest(&mut text).await?;
    Ok(tokens.iter().map(|token| token.token).collect())
}

fn strategies() -> [(&'static str, &'static str, &'static str, Vec<f64>); 5] {
    [
        ("llama", "galaxy", "tls", vec![3.0, 2.0, 1.0]),
        ("gpt2", "megatron", "quic", vec![1.0, 2.0]),
        ("qwen3", "galaxy", "plain", vec![1.0; 4]),
        ("gptj", "local", "tls", vec![1.0, 1.0]),
        ("opt", "galaxy", "quic", vec![1.0, 3.0]),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_tokens_equal_transformers() {
    for (checkpoint, strategy, link, shares) in strategies() {
        let path = checkpoints_dir().join(checkpoint);
        let text = std::fs::read(path.join("generated.json")).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let setup = Setup { strategy, link, shares, tiles: 2, max_rows: 5, ..Setup::new(&path) };
        let cluster = TestCluster::start(setup).unwrap();
        let client = cluster.client().await.unwrap();
        for prompt in golden["prompts"].as_array().unwrap() {
            let list =
                |key: &str| -> Vec<u32> { serde_json::from_value(prompt[key].clone()).unwrap() };
            let (begins, want) = (list("prompt"), list("generated"));
            let made = ids(&client, &begins, greedy(want.len() as u32)).await;
            let made = made.unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()));
            assert_eq!(made, want, "{checkpoint}, {strategy}, {link}");
        }
        let status = client.status().await.unwrap();
        assert_eq!(status.failed, 0);
        let trace = client.trace(None).await.unwrap();
        assert!(!trace.devices.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_samples_the_same_tokens_on_any_split() {
    let path = checkpoints_dir().join("llama");
    let options = |seed| {
        let base = Sampling { temperature: 1.0, top_p: 0.95, ..Sampling::default() };
        let sampling = Sampling { logprobs: 3, seed, ..base }.into();
        GenerateOptions { sampling, ..greedy(48) }
    };
    let mut all = Vec::new();
    for (strategy, shares) in
        [("local", vec![1.0]), ("galaxy", vec![1.0, 2.0]), ("megatron", vec![2.0, 1.0, 1.0])]
    {
        let setup = Setup { strategy, shares, ..Setup::new(&path) };
        let cluster = TestCluster::start(setup).unwrap();
        let client = cluster.client().await.unwrap();
        let mut texts = Vec::new();
        for seed in 0..3 {
            let mut text = client.generate(vec![5, 17, 9], options(seed)).await.unwrap();
            assert_eq!((text.seed, text.prompt_tokens, text.text), (seed, 3, false));
            let (tokens, finish) = rest(&mut text).await.unwrap();
            assert_eq!(finish, "length");
            for token in &tokens {
                assert_eq!(token.top.len(), 3);
                assert!(token.top[0].1 >= token.logprob && token.top[0].1 >= token.top[1].1);
            }
            texts.push(tokens.iter().map(|token| token.token).collect::<Vec<_>>());
        }
        assert_ne!(texts[0], texts[1]);
        all.push(texts);
    }
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0], all[2]);
}

/// The pieces of text that the demo's decoder generates behind a prompt, token by token, and the reason of
/// the end.
async fn said(client: &Client, options: GenerateOptions) -> (Vec<String>, String) {
    let mut text = client.generate("Each device ", options).await.unwrap();
    assert!(text.text);
    let mut pieces = Vec::new();
    loop {
        match text.next().await.unwrap() {
            Some(Generated::Token(token)) => pieces.push(token.text),
            Some(Generated::Done(done)) => {
                pieces.push(done.text);
                return (pieces, done.finish);
            }
            None => panic!("a text without an end"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_ends_before_its_stop_string_or_end_of_text_token() {
    let setup = Setup { shares: vec![1.0, 1.0], ..Setup::new(root().join("models/tiny-galaxy")) };
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let (pieces, finish) = said(&client, greedy(120)).await;
    let whole = pieces.concat();
    assert_eq!((pieces.len(), finish.as_str()), (121, "length"));
    // Tokens are bytes, and all of them are text.
    assert_eq!(whole.chars().count(), 120, "{whole}");
    // A stop string in the middle, which spans several pieces.
    let stop = whole[40..52].to_owned();
    let want = &whole[..whole.find(&stop).unwrap()];
    let options = GenerateOptions { stop: vec!["never said".into(), stop.clone()], ..greedy(120) };
    let (pieces, finish) = said(&client, options).await;
    assert_eq!((pieces.concat().as_str(), finish.as_str()), (want, "stop"), "before {stop:?}");
    // A token that ends texts ends this one, and is no text.
    let options = GenerateOptions { ignore_end: false, ..greedy(400) };
    let biased = Sampling { bias: vec![(256, 1000.0)], ..Sampling::default() };
    let (pieces, finish) =
        said(&client, GenerateOptions { sampling: biased.into(), ..options }).await;
    assert_eq!((pieces.concat().as_str(), finish.as_str()), ("", "stop"));
}

async fn refused(client: &Client, prompt: Prompt, options: GenerateOptions) -> ClientError {
    let begun = tokio::time::timeout(PATIENCE, client.generate(prompt, options));
    begun.await.unwrap().expect_err("bad input")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_generation_requests_are_refused_and_keep_no_kv_blocks() {
    let path = checkpoints_dir().join("llama");
    // The cache has room for one sequence at a time.
    let setup = Setup { kv_cache_tokens: Some(192), shares: vec![1.0, 1.0], ..Setup::new(&path) };
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let sampling = |sampling: Sampling| GenerateOptions { sampling: sampling.into(), ..greedy(4) };
    let fine = Sampling::default();
    let some = || Prompt::Ids(vec![1, 2, 3]);
    let cases: Vec<(Prompt, GenerateOptions, &str, &str)> = vec![
        (Prompt::Ids(vec![1; 500]), greedy(4), "text_too_long", "500 tokens"),
        (Prompt::Ids(vec![]), greedy(4), "unsupported_model", "tokenizer"),
        (Prompt::Ids(vec![1, 99_999]), greedy(4), "unknown_token", "99999"),
        (Prompt::from("words"), greedy(4), "unsupported_model", "tokenizer"),
        (
            some(),
            sampling(Sampling { temperature: f32::NAN, ..fine.clone() }),
            "invalid_argument",
            "temperature",
        ),
        (some(), sampling(Sampling { top_p: -0.1, ..fine.clone() }), "invalid_argument", "top_p"),
        (some(), sampling(Sampling { logprobs: 21, ..fine.clone() }), "invalid_argument", "20"),
        (
            some(),
            sampling(Sampling { bias: vec![(5000, 1.0)], ..fine.clone() }),
            "invalid_argument",
            "5000",
        ),
        (
            some(),
            GenerateOptions { stop: vec![String::new()], ..greedy(4) },
            "invalid_argument",
            "stop",
        ),
        (
            some(),
            GenerateOptions { stop: vec!["end".into()], ..greedy(4) },
            "unsupported_model",
            "tokenizer",
        ),
    ];
    for (prompt, options, code, word) in cases {
        let error = refused(&client, prompt, options).await;
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(word) && !error.retryable(), "{error}");
    }
    // As many tokens as the model has positions for, whatever is asked.
    let made = ids(&client, &[1, 2, 3], greedy(u32::MAX)).await.unwrap();
    let limit = galaxy_model::ModelDir::open(&path).unwrap().spec().position_limit();
    assert_eq!(made.len() as u32, limit.min(192) - 3);
    // An encoder has no next token.
    let setup = Setup { shares: vec![1.0], ..Setup::new(checkpoints_dir().join("bert")) };
    let encoder = TestCluster::start(setup).unwrap();
    let client = encoder.client().await.unwrap();
    let error = refused(&client, some(), greedy(4)).await;
    assert_eq!(error.code(), "unsupported_output");
    assert!(error.to_string().contains("decoder"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_disconnect_free_their_kv_blocks() {
    // The cache has room for one sequence at a time.
    let setup = Setup { kv_cache_tokens: Some(768), ..Setup::new(decoder()) };
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let whole = ids(&client, &[5, 6, 7], greedy(700)).await.unwrap();
    // The memory that the first client leaves with the allocator is there for the others.
    let mut before = Vec::new();
    for at in 0..=20 {
        let mut text = client.generate(vec![5, 6, 7], greedy(700)).await.unwrap();
        for want in &whole[..3] {
            match text.next().await.unwrap() {
                Some(Generated::Token(token)) => assert_eq!(token.token, *want),
                other => panic!("{other:?}"),
            }
        }
        if at == 1 {
            before = resident(&cluster);
        }
        // The client goes, with most tokens still to come; the next one gets its room.
        drop(text);
    }
    // A client that does not read, and another request that is not affected, which runs between decode
    // bursts.
    let idle = client.generate(vec![5, 6, 7], greedy(700)).await.unwrap();
    client.run(&[[2, 3, 4]], Output::Hidden).await.unwrap();
    drop(idle);
    let again = ids(&client, &[5, 6, 7], greedy(700)).await.unwrap();
    assert_eq!(again, whole);
    for (before, after) in before.iter().zip(resident(&cluster)) {
        // A block of rows is 1 MB on each device. The last sequence had four of them; the twenty before it,
        // each with one, left none.
        assert!(after < before + (8 << 20), "{before} bytes became {after}");
    }
}

/// The resident bytes of all processes of a cluster.
fn resident(cluster: &TestCluster) -> Vec<u64> {
    let of = |process: &Process| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    cluster.workers.iter().chain([&cluster.coordinator]).map(of).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_continues_after_a_killed_device_restarts() {
    let mut cluster = TestCluster::start(Setup::new(decoder())).unwrap();
    let policy = RetryPolicy::default();
    let builder = cluster.builder("phone", galaxy_proto::identity::Role::Client).unwrap();
    let client = builder.retry(policy).connect().await.unwrap();
    let whole = ids(&client, &[9, 8, 7], greedy(900)).await.unwrap();
    for victim in [0, 2] {
        let mut text = client.generate(vec![9, 8, 7], greedy(900)).await.unwrap();
        let mut made = Vec::new();
        while made.len() < 40 {
            match text.next().await.unwrap() {
                Some(Generated::Token(token)) => made.push(token.token),
                other => panic!("{other:?}"),
            }
        }
        cluster.workers[victim].kill().unwrap();
        cluster.restart_worker(victim, &[]).unwrap();
        let (tokens, finish) =
            rest(&mut text).await.unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()));
        made.extend(tokens.iter().map(|token| token.token));
        assert_eq!(finish, "length");
        assert_eq!(made, whole, "d{victim} was killed");
    }
    // A device that does not come back ends the request, with the device's name, when the caller's time is
    // over.
    let hurried = client.with_timeout(Duration::from_secs(8));
    let mut text = hurried.generate(vec![9, 8, 7], greedy(900)).await.unwrap();
    text.next().await.unwrap();
    cluster.workers[1].kill().unwrap();
    let error = loop {
        match text.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the device is gone"),
            Err(error) => break error,
        }
    };
    assert!(error.retryable() && error.device() == Some("d1"), "{error:?}");
    cluster.restart_worker(1, &[]).unwrap();
    let again =
        until("a text is made", || async { ids(&client, &[9, 8, 7], greedy(20)).await.ok() });
    assert_eq!(again.await.unwrap(), whole[..20]);
}
