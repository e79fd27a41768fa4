//! `galaxy serve` over real processes: the answers to programs that use OpenAI's API.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, GenerateOptions, Generated, Prompt};
use galaxy_testbed::{
    models,
    processes::{Process, Setup, TestCluster, root},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
};

/// A chat template for the demo's decoder, whose tokens are bytes, so that a chat's text can be compared.
const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}\n{% endfor %}Each ";

/// A copy of a model directory that a test may change.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// The demo's decoder, with a chat template.
fn decoder(directory: &Path) -> PathBuf {
    let to = directory.join("tiny-chat");
    copy(&root().join("models/tiny-galaxy"), &to);
    fs::write(to.join("chat_template.jinja"), TEMPLATE).unwrap();
    to
}

fn command(cluster: &TestCluster, listen: &str, flags: &[&str]) -> Command {
    cluster.serve_command("laptop", listen, flags).unwrap()
}

/// Starts a server for a cluster, and returns its address.
fn serve(cluster: &TestCluster, flags: &[&str]) -> (Process, String) {
    cluster.serve("laptop", flags).unwrap()
}

fn connect(address: &str, request: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    BufReader::new(stream)
}

/// The text of a request as programs send it. `head` holds further header lines.
fn request(method: &str, path: &str, head: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {length}\r\n{head}\r\n{body}"
    )
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

fn ask(address: &str, method: &str, path: &str, head: &str, body: &str) -> (u16, Value) {
    let mut answer = String::new();
    connect(address, &request(method, path, head, body)).read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("content-type: application/json"), "{head}");
    (status(head), serde_json::from_str(body).unwrap())
}

fn head(address: &str) -> String {
    format!("host: {address}\r\ncontent-type: application/json\r\n")
}

fn post(address: &str, path: &str, body: &Value) -> (u16, Value) {
    ask(address, "POST", path, &head(address), &body.to_string())
}

fn get(address: &str, path: &str) -> (u16, Value) {
    ask(address, "GET", path, &head(address), "")
}

/// The events of a stream, as they arrive.
fn stream(address: &str, path: &str, body: &Value) -> impl Iterator<Item = String> {
    let mut reader = connect(address, &request("POST", path, &head(address), &body.to_string()));
    let mut first = String::new();
    reader.read_line(&mut first).unwrap();
    assert_eq!(status(&first), 200);
    reader
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| Some(line.strip_prefix("data: ")?.to_owned()))
}

/// The text that the SDK generates behind a prompt.
async fn text(client: &Client, prompt: impl Into<Prompt>, max_tokens: u32) -> String {
    let options = GenerateOptions { max_tokens, ..GenerateOptions::default() };
    let mut text = client.generate(prompt, options).await.unwrap();
    let mut all = String::new();
    while let Some(generated) = text.next().await.unwrap() {
        match generated {
            Generated::Token(token) => all.push_str(&token.text),
            Generated::Done(done) => all.push_str(&done.text),
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_and_chats_match_the_sdk() {
    let dir = tempfile::tempdir().unwrap();
    let model = decoder(dir.path());
    let cluster =
        TestCluster::start(Setup { shares: vec![1.0, 2.0], ..Setup::new(&model) }).unwrap();
    let client = cluster.client().await.unwrap();
    let (mut process, address) = serve(&cluster, &["--model", model.to_str().unwrap()]);
    assert_eq!(get(&address, "/health"), (200, json!({ "state": "ready", "model": "tiny-chat" })));
    let (code, listed) = get(&address, "/v1/models");
    assert_eq!((code, &listed["data"][0]["id"]), (200, &json!("tiny-chat")));
    assert_eq!(get(&address, "/v1/models/tiny-chat"), (200, listed["data"][0].clone()));

    // Several prompts at once, with whole answers.
    let prompts = ["Each device ", "A plan "];
    let want = [text(&client, prompts[0], 12).await, text(&client, prompts[1], 12).await];
    let mut body =
        json!({ "model": "tiny-chat", "prompt": prompts, "max_tokens": 12, "temperature": 0 });
    let (code, answer) = post(&address, "/v1/completions", &body);
    assert_eq!((code, &answer["object"]), (200, &json!("text_completion")), "{answer}");
    for (index, want) in want.iter().enumerate() {
        let choice =
            json!({ "index": index, "text": want, "logprobs": null, "finish_reason": "length" });
        assert_eq!(answer["choices"][index], choice);
    }
    let details = json!({ "cached_tokens": 0 });
    let usage = json!({
        "prompt_tokens": 19,
        "completion_tokens": 24,
        "total_tokens": 43,
        "prompt_tokens_details": details,
    });
    assert_eq!(answer["usage"], usage);
    // The same prompt once more is in the KV cache, but for its last token.
    let long = "Each device holds a part of the model, and all of them ";
    let again = json!({ "model": "tiny-chat", "prompt": long, "max_tokens": 2, "temperature": 0 });
    let cached = [0, 1].map(|_| {
        let (_, answer) = post(&address, "/v1/completions", &again);
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    });
    assert_eq!(cached, [Some(0), Some(long.len() as u64 - 1)]);

    // The same prompts, as a stream.
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let events: Vec<String> = stream(&address, "/v1/completions", &body).collect();
    let (last, events) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    let events: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (last, events) = events.split_last().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (&usage, &json!([])));
    let mut texts = [String::new(), String::new()];
    for event in events {
        let choice = &event["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        texts[index].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(texts, want);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");

    // The ids of the tokens, which are bytes here, whole and as a stream.
    body["return_token_ids"] = true.into();
    let ids = |value: &Value| -> Vec<u64> {
        value.as_array().into_iter().flatten().map(|id| id.as_u64().unwrap()).collect()
    };
    let bytes = want.each_ref().map(|text| text.bytes().map(u64::from).collect::<Vec<_>>());
    let mut streamed = [vec![], vec![]];
    for event in stream(&address, "/v1/completions", &body).take_while(|event| event != "[DONE]") {
        let event: Value = serde_json::from_str(&event).unwrap();
        let choice = &event["choices"][0];
        let index = choice["index"].as_u64().unwrap_or(0);
        streamed[usize::try_from(index).unwrap()].extend(ids(&choice["token_ids"]));
    }
    assert_eq!(streamed, bytes);
    body["stream"] = false.into();
    let (_, answer) = post(&address, "/v1/completions", &body);
    assert_eq!([0, 1].map(|index| ids(&answer["choices"][index]["token_ids"])), bytes);

    // The prompt of a chat is the text that the template gives.
    let want = text(&client, "Who computes?\nEach ", 12).await;
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Who computes?" }], "max_tokens": 12, "temperature": 0,
    });
    let (code, answer) = post(&address, "/v1/chat/completions", &body);
    let message = json!({ "role": "assistant", "content": want });
    assert_eq!((code, &answer["choices"][0]["message"]), (200, &message), "{answer}");
    body["stream"] = true.into();
    let events: Vec<String> = stream(&address, "/v1/chat/completions", &body).collect();
    let (last, events) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    let events: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let content =
        |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    assert_eq!(events.iter().filter_map(content).collect::<String>(), want);

    // A text ends before a stop string.
    let cut = want.chars().nth(5).unwrap().to_string();
    body["stream"] = false.into();
    body["stop"] = json!(cut);
    let (_, answer) = post(&address, "/v1/chat/completions", &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], want.split(&cut).next().unwrap());
    assert_eq!(choice["finish_reason"], "stop");

    // What is wrong with a request is reported by the coordinator, or before it.
    for (path, body, code, reason) in [
        ("/v1/completions", json!({ "prompt": "x", "model": "gpt-4" }), 404, "model_not_found"),
        ("/v1/completions", json!({ "prompt": "x", "temperature": -1 }), 400, "invalid_argument"),
        ("/v1/completions", json!({ "prompt": "x".repeat(4000) }), 400, "text_too_long"),
        ("/v1/completions", json!({ "prompt": [70000] }), 400, "unknown_token"),
        ("/v1/chat/completions", json!({ "messages": [] }), 400, "invalid_argument"),
        ("/v1/embeddings", json!({ "input": "" }), 400, "empty_text"),
        ("/v1/images", json!({}), 404, "not_found"),
        ("/v1/models", json!({}), 405, "method_not_allowed"),
    ] {
        let (said, answer) = post(&address, path, &body);
        assert_eq!(
            (said, &answer["error"]["code"]),
            (code, &json!(reason)),
            "{path} {body}: {answer}"
        );
    }
    assert_eq!(ask(&address, "POST", "/v1/completions", &head(&address), "{").0, 400);
    let large = format!("{{\"prompt\": \"{}\"}}", "x".repeat(17 << 20));
    assert_eq!(ask(&address, "POST", "/v1/completions", &head(&address), &large).0, 413);

    // The server ends when it is asked to.
    process.signal("TERM").unwrap();
    let (status, said) = process.ended().unwrap();
    assert!(status.success(), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_over_http_match_the_sdk() {
    let setup = Setup::new(root().join("models/all-MiniLM-L6-v2"));
    let mut cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let (_process, address) = serve(&cluster, &[]);
    let texts = ["a lighthouse at night", "a beam over the sea"];
    let want = client.embed(&texts).await.unwrap();
    let (code, answer) = post(&address, "/v1/embeddings", &json!({ "input": texts }));
    assert_eq!(code, 200, "{answer}");
    for (index, want) in want.vectors.iter().enumerate() {
        let vector = &answer["data"][index]["embedding"];
        assert_eq!(&serde_json::from_value::<Vec<f32>>(vector.clone()).unwrap(), want);
    }
    assert_eq!(answer["usage"]["prompt_tokens"], json!(want.report.tokens));
    let (code, answer) = post(&address, "/v1/completions", &json!({ "prompt": "x" }));
    assert_eq!((code, &answer["error"]["code"]), (400, &json!("unsupported_output")));
    let chat = json!({ "messages": [{ "role": "user", "content": "x" }] });
    let (code, answer) = post(&address, "/v1/chat/completions", &chat);
    assert!(code == 400 && answer.to_string().contains("--model DIR"), "{answer}");

    // That the coordinator is gone is reported.
    cluster.coordinator.kill().unwrap();
    let (code, answer) = get(&address, "/health");
    assert_eq!((code, &answer["error"]["code"]), (503, &json!("unavailable")), "{answer}");
}

/// The message and code of a request that must be refused.
fn refused(address: &str, path: &str, body: &Value) -> (String, String) {
    let (code, answer) = post(address, path, body);
    assert_eq!(code, 400, "{path} {body}: {answer}");
    let text = |name: &str| answer["error"][name].as_str().unwrap_or_default().to_owned();
    (text("message"), text("param"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_without_effect_are_accepted_and_unsupported_fields_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = decoder(dir.path());
    let cluster = TestCluster::start(Setup { shares: vec![1.0], ..Setup::new(&model) }).unwrap();
    let (_process, address) = serve(&cluster, &["--model", model.to_str().unwrap()]);
    let (chats, texts) = ("/v1/chat/completions", "/v1/completions");
    let messages = json!([{ "role": "user", "content": "hi", "name": null, "tool_calls": null }]);
    for (path, body) in [
        (chats, json!({ "messages": messages, "max_tokens": 1, "chat_template_kwargs": null })),
        (
            chats,
            json!({ "messages": messages, "max_tokens": 1, "logprobs": false, "top_logprobs": 0 }),
        ),
        (
            chats,
            json!({ "messages": messages, "max_tokens": 1, "tools": [], "tool_choice": "none" }),
        ),
        (texts, json!({ "prompt": "a", "max_tokens": 1, "suffix": "" })),
        (
            texts,
            json!({ "prompt": "a", "max_tokens": 1, "stop": null, "logit_bias": null, "seed": null }),
        ),
        (
            texts,
            json!({ "prompt": "a", "max_tokens": 1, "temperature": 1e-30, "top_p": 0, "seed": u64::MAX }),
        ),
    ] {
        let (code, answer) = post(&address, path, &body);
        assert_eq!(code, 200, "{path} {body}: {answer}");
    }
    let body = json!({ "prompt": "a", "max_tokens": 1, "stream": true, "stream_options": { "include_usage": null } });
    assert_eq!(stream(&address, texts, &body).last().unwrap(), "[DONE]");

    for (path, body, param, says) in [
        (
            texts,
            json!({ "prompt": "a", "max_tokens": -1 }),
            "max_tokens",
            "at least 1, not the number -1",
        ),
        (texts, json!({ "prompt": "a", "max_tokens": 8.0 }), "max_tokens", "a whole number"),
        (
            chats,
            json!({ "messages": [{ "role": "user", "content": 5 }] }),
            "messages[0].content",
            "a text or a list",
        ),
        (texts, json!({ "prompt": "a", "n": 0 }), "n", "one choice"),
        (
            texts,
            json!({ "prompt": "a", "guided_json": { "type": "object" } }),
            "guided_json",
            "no format",
        ),
    ] {
        let (message, of) = refused(&address, path, &body);
        assert!(of == param && message.contains(param) && message.contains(says), "{message}");
    }
    // Prompts are not cut, and the message does not suggest to ask for that.
    let (message, _) = refused(&address, texts, &json!({ "prompt": "word ".repeat(1500) }));
    assert!(message.contains("the prompt has") && !message.contains("truncate"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_request_settings_come_from_the_generation_config() {
    let dir = tempfile::tempdir().unwrap();
    let model = decoder(dir.path());
    let write = |text: &str| fs::write(model.join("generation_config.json"), text).unwrap();
    let body = json!({ "prompt": "Each device " });
    let first = |address: &str, body: &Value| {
        let (code, answer) = post(address, "/v1/completions", body);
        assert_eq!(code, 200, "{answer}");
        let count = answer["usage"]["completion_tokens"].as_u64().unwrap();
        (answer["choices"][0]["text"].as_str().unwrap().to_owned(), count)
    };
    write(r#"{"eos_token_id": 256, "do_sample": false, "max_new_tokens": 20}"#);
    let cluster = TestCluster::start(Setup { shares: vec![1.0], ..Setup::new(&model) }).unwrap();
    let (_auto, auto) = serve(&cluster, &[]);
    let (_none, none) = serve(&cluster, &["--generation-config", "none"]);
    let mut greedy = body.clone();
    greedy["temperature"] = 0.into();
    let likeliest = first(&auto, &greedy);
    assert_eq!((first(&auto, &body), likeliest.1), (likeliest.clone(), 20));
    assert_eq!(first(&none, &greedy), (likeliest.0.chars().take(16).collect(), 16));
    // The settings of a request come before those of the model.
    greedy["max_tokens"] = 3.into();
    assert_eq!(first(&auto, &greedy).1, 3);

    write(r#"{"eos_token_id": 256, "no_repeat_ngram_size": 3}"#);
    let cluster = TestCluster::start(Setup { shares: vec![1.0], ..Setup::new(&model) }).unwrap();
    let (_auto, auto) = serve(&cluster, &[]);
    let (_none, none) = serve(&cluster, &["--generation-config", "none"]);
    let (message, _) = refused(&auto, "/v1/completions", &body);
    assert!(message.contains("no_repeat_ngram_size = 3"), "{message}");
    // Sampled as it is, a text may end at any token.
    let mut endless = body;
    endless["ignore_eos"] = true.into();
    assert_eq!(first(&none, &endless).1, 16);
}

/// A small embedding model with a tokenizer; `testdata/cases` describes it.
fn embedder() -> PathBuf {
    root().join("testdata/cases/tiny-embedder")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_of_token_ids_match_the_embedding_of_their_text() {
    let cluster =
        TestCluster::start(Setup { shares: vec![1.0], ..Setup::new(embedder()) }).unwrap();
    let (_process, address) = serve(&cluster, &[]);
    let vectors = |more: Value| {
        let mut body = json!({ "encoding_format": null, "truncate": null });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (code, answer) = post(&address, "/v1/embeddings", &body);
        assert_eq!(code, 200, "{body}: {answer}");
        let data = answer["data"].as_array().unwrap().clone();
        data.into_iter().map(|one| one["embedding"].clone()).collect::<Vec<_>>()
    };
    let text = vectors(json!({ "input": "a" }));
    assert_eq!(text.len(), 1);
    // [CLS] a [SEP], as the tokenizer has it.
    assert_eq!(vectors(json!({ "input": [2, 5, 3] })), text);
    let many = vectors(json!({ "input": [[2, 34, 3], [2, 5, 3]] }));
    let near = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-5;
    let pairs = many[1].as_array().unwrap().iter().zip(text[0].as_array().unwrap());
    assert!(many.len() == 2 && pairs.len() == 16 && pairs.into_iter().all(|(a, b)| near(a, b)));
    assert_eq!(vectors(json!({ "input": "a", "dimensions": 4 }))[0].as_array().unwrap().len(), 4);
    let (message, _) =
        refused(&address, "/v1/embeddings", &json!({ "input": "a", "dimensions": 17 }));
    assert!(message.contains("16") && message.contains("17"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_a_wrong_host_content_type_or_api_key_are_refused() {
    let cluster = TestCluster::start(Setup {
        shares: vec![1.0],
        ..Setup::new(root().join("models/all-MiniLM-L6-v2"))
    })
    .unwrap();
    let body = json!({ "input": "x" }).to_string();
    let kind = "content-type: application/json\r\n";

    let (_open, address) = serve(&cluster, &[]);
    for (head, code, reason) in [
        (format!("host: example.com\r\n{kind}"), 403, "wrong_host"),
        (kind.to_owned(), 403, "wrong_host"),
        (format!("host: {address}\r\n"), 415, "not_json"),
        (format!("host: {address}\r\ncontent-type: text/plain\r\n"), 415, "not_json"),
    ] {
        let (said, answer) = ask(&address, "POST", "/v1/embeddings", &head, &body);
        assert_eq!((said, &answer["error"]["code"]), (code, &json!(reason)), "{head}");
    }

    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    fs::write(&key, "sesame\n").unwrap();
    let (_locked, address) = serve(&cluster, &["--api-key-file", key.to_str().unwrap()]);
    for (shown, code) in [("", 401), ("Bearer open", 401), ("sesame", 401), ("Bearer sesame", 200)]
    {
        // With a key the request may name any host.
        let head = format!("host: example.com\r\n{kind}authorization: {shown}\r\n");
        assert_eq!(ask(&address, "POST", "/v1/embeddings", &head, &body).0, code, "{shown}");
    }

    let mut refused = Process::spawn("galaxy serve", command(&cluster, "0.0.0.0:0", &[])).unwrap();
    let (status, said) = refused.ended().unwrap();
    assert!(status.code() == Some(2) && said.contains("set --api-key-file"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnected_client_ends_its_generation() {
    // The cache has room for one sequence at a time.
    let decoder = models::gpt2(Path::new(env!("CARGO_TARGET_TMPDIR")), "gpt2-512x4", 4, 512, 8);
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    copy(&decoder.unwrap(), &model);
    let tokenizer = root().join("models/tiny-galaxy/tokenizer.json");
    fs::copy(tokenizer, model.join("tokenizer.json")).unwrap();
    let setup = Setup { kv_cache_tokens: Some(768), ..Setup::new(&model) };
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let (_process, address) = serve(&cluster, &[]);
    let long = |stream: bool| json!({ "prompt": "Each ", "max_tokens": 700, "ignore_eos": true, "temperature": 0, "stream": stream });
    let streamed = long(true);
    let begin = || {
        let mut events = stream(&address, "/v1/completions", &streamed);
        assert!(events.next().unwrap().contains("text_completion"));
        events
    };
    // Steps are counted, not seconds: a step takes as long as the machine lets it.
    let first = begin();
    let before = cluster.running(0).await.unwrap();
    assert_eq!(first.last().unwrap(), "[DONE]");
    let second = begin();
    let after_one = cluster.running(0).await.unwrap();
    drop(second);
    for _ in 0..4 {
        drop(begin());
    }
    // Nor does a generation go on whose client does not wait for all of it.
    let all = request("POST", "/v1/completions", &head(&address), &long(false).to_string());
    drop(connect(&address, &all));
    let (code, answer) = post(&address, "/v1/completions", &long(false));
    assert_eq!((code, &answer["usage"]["completion_tokens"]), (200, &json!(700)), "{answer}");
    let last = begin();
    let after_all = cluster.running(0).await.unwrap();
    drop(last);
    let (whole, all) = (after_one - before, after_all - after_one);
    assert!(
        all < 4 * whole,
        "seven requests, six of them left, took {all} steps; one takes {whole}"
    );
    assert_eq!(client.status().await.unwrap().failed, 0);
}
