//! Requests that cannot be answered, clients that go away, and draining.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, ClientError, Output, TooLong};
use galaxy_common::DeviceName;
use galaxy_proto::{
    channel,
    fault::from_status,
    identity::{Identity, Role},
    v1::{self, galaxy_client::GalaxyClient},
};
use galaxy_testbed::processes::{PATIENCE, Setup, TestCluster, root, until};
use std::time::Duration;

fn cluster() -> TestCluster {
    let path = root().join("models/all-MiniLM-L6-v2");
    assert!(path.join("model.safetensors").exists(), "{path:?} is missing: run scripts/setup");
    TestCluster::start(Setup::new(path)).unwrap()
}

fn assert_refused(error: &ClientError, code: &str, words: &[&str]) {
    assert_eq!((error.code(), error.retryable()), (code, false), "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is missing in: {error}");
    }
}

async fn assert_serves(cluster: &TestCluster, client: &Client) {
    let answer = client.embed(&["still here"]).await;
    let answer = answer.unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()));
    assert_eq!(answer.vectors[0].len(), 384);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_that_cannot_be_embedded_are_refused_with_a_reason() {
    let cluster = cluster();
    let client = cluster.client().await.unwrap();
    let empty = client.embed(&["a word", " \n"]).await.unwrap_err();
    assert_refused(&empty, "empty_text", &["text 1 is empty"]);
    let none = client.embed::<&str>(&[]).await.unwrap_err();
    assert_refused(&none, "invalid_argument", &["no texts"]);

    let long = "lighthouse ".repeat(1000);
    let refused = client.embed(&[long.as_str()]).await.unwrap_err();
    assert_refused(&refused, "text_too_long", &["text 0 has 1002 tokens", "allows 256"]);
    let cut = client.embed_with(&[long.as_str()], TooLong::Truncate).await.unwrap();
    assert_eq!((cut.vectors.len(), cut.report.tokens), (1, 256));
    // The raw call checks only the table of positions.
    let refused = client.run(&[vec![7; 513]], Output::Hidden).await.unwrap_err();
    assert_refused(&refused, "text_too_long", &["513 tokens", "positions", "allows 512"]);
    let unknown = client.run(&[[7, 40_000]], Output::Hidden).await.unwrap_err();
    assert_refused(&unknown, "unknown_token", &["token 40000", "the vocabulary has 30522"]);
    let classes = client.classify(&["a word"]).await.unwrap_err();
    assert_refused(&classes, "unsupported_output", &["all-MiniLM-L6-v2"]);
    assert_serves(&cluster, &client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sdk_sends_ten_thousand_texts_in_several_requests() {
    let cluster = cluster();
    let client = cluster.client().await.unwrap();
    let texts: Vec<String> = (0..10_000).map(|i| ["sea", "ship", "rope"][i % 3].into()).collect();
    // One request takes fewer texts, and its error says so.
    let identity = Identity::load(&cluster.keys.of("laptop", Role::Client).unwrap()).unwrap();
    let name = DeviceName::new("coordinator").unwrap();
    let server = (&name, Role::Coordinator);
    let raw = channel::connect(&cluster.address, Some(&identity), server, PATIENCE).await.unwrap();
    let request = v1::EmbedRequest { texts: texts.clone(), ..Default::default() };
    let fault = from_status(&GalaxyClient::new(raw).embed(request).await.unwrap_err());
    assert_eq!((fault.code.as_str(), fault.retryable), ("too_many_texts", false));
    assert!(fault.message.contains("10000 texts are more than the 1024"), "{fault}");
    // The SDK sends them in parts.
    let patient = client.with_timeout(Duration::from_secs(240));
    let answer = patient.embed(&texts).await;
    let answer = answer.unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()));
    assert_eq!((answer.vectors.len(), answer.report.requests.len()), (10_000, 10));
    for (vector, like) in answer.vectors.iter().zip(answer.vectors[..3].iter().cycle()) {
        let dot: f32 = vector.iter().zip(like).map(|(a, b)| a * b).sum();
        assert!((dot - 1.0).abs() < 1e-4, "equal texts have equal vectors, not {dot}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_clients_that_disconnect_are_cancelled() {
    let cluster = cluster();
    let client = cluster.client().await.unwrap();
    let texts = vec!["rope ".repeat(200); 512];
    let mut begun = Vec::new();
    for round in 0..4 {
        let phone = cluster.client_as("phone", Role::Client).await.unwrap();
        let texts = texts.clone();
        let leaving = tokio::spawn(async move { phone.embed(&texts).await.map(drop) });
        begun.push(cluster.running(0).await.unwrap());
        // The client's connection goes with it.
        leaving.abort();
        assert!(leaving.await.unwrap_err().is_cancelled());
        assert_serves(&cluster, &client).await;
        let status = client.status().await.unwrap();
        assert_eq!((status.state.as_str(), status.queued), ("ready", 0), "round {round}");
    }
    let quiet = || async {
        let mut all = true;
        for i in 0..3 {
            all &= !cluster.health(i).await.ok()?.running;
        }
        all.then_some(())
    };
    until("nothing runs", quiet).await.unwrap();
    // If a request of a client that left were still served, the next one would wait for 200 programs.
    for rounds in begun.windows(2) {
        assert!(rounds[1] - rounds[0] < 100, "programs before each request: {begun:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_refused_while_draining_and_served_after_undrain() {
    let cluster = cluster();
    let client = cluster.client().await.unwrap();
    let denied = client.drain().await.unwrap_err();
    assert_eq!((denied.code(), denied.retryable()), ("permission_denied", false), "{denied}");
    let client = cluster.client_as("anna", Role::Admin).await.unwrap();
    client.drain().await.unwrap();
    let refused = client.embed(&["late"]).await.unwrap_err();
    assert_refused(&refused, "draining", &["draining and takes no more requests"]);
    assert_eq!(client.status().await.unwrap().state, "draining");
    client.undrain().await.unwrap();
    assert_serves(&cluster, &client).await;

    // A worker that drains keeps the cluster from working, and the error says so.
    let mut control = cluster.control(1).await.unwrap();
    control.drain(v1::DrainRequest { off: false }).await.unwrap();
    let hurried = client.with_timeout(Duration::from_secs(3));
    let refused = hurried.embed(&["late"]).await.unwrap_err();
    assert!(refused.code() == "unavailable" && refused.retryable(), "{refused:?}");
    assert_eq!(refused.device(), Some("d1"), "{refused:?}");
    assert!(refused.to_string().contains("draining"), "{refused}");
    control.drain(v1::DrainRequest { off: true }).await.unwrap();
    let again = || async { client.embed(&["again"]).await.ok() };
    let again = until("requests are served again", again).await;
    again.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.output()));
}
