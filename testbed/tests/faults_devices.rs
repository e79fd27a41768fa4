//! Devices that die, freeze, are unplugged, or are merely slow, in the middle of a request.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, ClientError, Output, Tensors};
use galaxy_proto::{identity::Role, v1::HealthRequest};
use galaxy_testbed::{
    models,
    network::Network,
    processes::{PATIENCE, Setup, TestCluster, Throttle, until},
};
use std::{path::Path, process::Command, time::Duration};
use tokio::task::JoinHandle;

/// The tokens of a sequence; each sequence is one program.
const TOKENS: u32 = 512;
/// The sequences of a long request: seconds of work, most of which is left when a fault comes.
const LONG_REQUEST: u32 = 16;
/// The bytes that a process may hold beyond what it held after its first request: buffers of the allocator,
/// not a request.
const SLACK: u64 = 24 << 20;

/// A model whose program of [`TOKENS`] rows takes hundreds of milliseconds.
fn model() -> std::path::PathBuf {
    models::bert(Path::new(env!("CARGO_TARGET_TMPDIR")), "bert-768x4", 4, 768, 12).unwrap()
}

fn sequences(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|s| (0..TOKENS).map(|i| 3 + (i * 7 + s) % 900).collect()).collect()
}

type Answer = JoinHandle<Result<Tensors, ClientError>>;

/// Sends a request of many programs, which has all the time that it needs.
fn long_request(client: &Client) -> Answer {
    let client = client.with_timeout(PATIENCE);
    tokio::spawn(async move { client.run(&sequences(LONG_REQUEST), Output::Hidden).await })
}

async fn ended(cluster: &TestCluster, answer: Answer) -> Result<Tensors, ClientError> {
    let answer = tokio::time::timeout(2 * PATIENCE, answer).await;
    answer.unwrap_or_else(|_| panic!("it hangs; {}", cluster.output())).unwrap()
}

/// Checks that a request whose device was lost is answered as if nothing had happened.
async fn assert_answered(cluster: &TestCluster, answer: Answer, first: &Tensors) {
    let answer = ended(cluster, answer).await;
    let answer = answer.unwrap_or_else(|error| panic!("{error}\n{}", cluster.output()));
    assert_eq!(answer.tensors.len(), LONG_REQUEST as usize);
    assert_eq!(answer.tensors[..1], first.tensors, "the same devices give the same bits");
}

/// The error of a request that has `seconds` while a device is gone.
async fn error_within(seconds: u64, cluster: &TestCluster, client: &Client) -> ClientError {
    let hurried = client.with_timeout(Duration::from_secs(seconds));
    let one = sequences(1);
    let error = tokio::time::timeout(PATIENCE, hurried.run(&one, Output::Hidden)).await;
    let error = error.unwrap_or_else(|_| panic!("it hangs; {}", cluster.output()));
    error.expect_err("a device is gone")
}

fn assert_lost(cluster: &TestCluster, victim: usize, error: &ClientError) {
    let name = format!("d{victim}");
    let named = error.retryable() && error.device() == Some(&name);
    assert!(named && error.code() == "unavailable", "{error:?}\n{}", cluster.output());
    assert!(error.to_string().contains(&format!("device {name} was lost")), "{error}");
}

/// Checks that the other devices run nothing any more, and hold no more memory than before.
async fn assert_let_go(cluster: &TestCluster, victim: Option<usize>, before: &[u64]) {
    for (i, &before) in before.iter().enumerate().filter(|(i, _)| Some(*i) != victim) {
        let what = format!("d{i} lets go of the request ({before} bytes before)");
        let control = cluster.control(i).await.unwrap();
        let free = until(&what, || {
            let mut control = control.clone();
            async move {
                let health = control.health(HealthRequest {}).await.ok()?.into_inner();
                (!health.running && health.resident_bytes <= before + SLACK).then_some(())
            }
        });
        free.await.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.output()));
    }
}

/// Checks that a request is answered after all was mended. The cluster may need time to form, so a client
/// asks again.
async fn assert_serves(cluster: &TestCluster, client: &Client, want: &Tensors) {
    let again = until("a request succeeds", || async {
        match client.run(&sequences(1), Output::Hidden).await {
            Ok(tensors) => Some(tensors),
            Err(error) => {
                assert!(error.retryable(), "{error:?}");
                None
            }
        }
    });
    let again = again.await.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.output()));
    assert_eq!(again.tensors, want.tensors, "the same devices give the same bits");
}

struct Scene {
    cluster: TestCluster,
    client: Client,
    first: Tensors,
    before: Vec<u64>,
}

/// The types of links over which each fault is tried.
const LINKS: [&str; 2] = ["tls", "quic"];

async fn scene(network: bool, link: &'static str) -> Scene {
    let setup = Setup { network, link, ..Setup::new(model()) };
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let first = client.run(&sequences(1), Output::Hidden).await.unwrap();
    let mut before = Vec::new();
    for i in 0..cluster.workers.len() {
        before.push(cluster.health(i).await.unwrap().resident_bytes);
    }
    Scene { cluster, client, first, before }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_answered_after_a_killed_worker_restarts() {
    // Both at once: most of the time they wait.
    tokio::join!(killed(LINKS[0]), killed(LINKS[1]));
}

async fn killed(link: &'static str) {
    let Scene { mut cluster, client, first, before } = scene(false, link).await;
    let answer = long_request(&client);
    cluster.running(0).await.unwrap();
    cluster.workers[0].kill().unwrap();
    // A request that has no time to wait is answered with the device that is missing.
    let error = error_within(5, &cluster, &client).await;
    assert_lost(&cluster, 0, &error);
    assert_let_go(&cluster, Some(0), &before).await;
    let status = client.status().await.unwrap();
    assert_eq!((&*status.state, &*status.devices[0].state), ("degraded", "lost"));
    assert!(!answer.is_finished(), "it waits");
    cluster.restart_worker(0, &[]).unwrap();
    assert_answered(&cluster, answer, &first).await;
    assert_serves(&cluster, &client, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_retries_survives_a_coordinator_restart() {
    let Scene { mut cluster, first, .. } = scene(false, "tls").await;
    let patient = cluster.builder("phone", Role::Client).unwrap().timeout(PATIENCE);
    let patient = patient.connect().await.unwrap();
    let answer = long_request(&patient);
    cluster.running(2).await.unwrap();
    cluster.coordinator.kill().unwrap();
    cluster.restart_coordinator_there().unwrap();
    assert_answered(&cluster, answer, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_answered_after_a_frozen_worker_resumes() {
    // Both at once: most of the time they wait.
    tokio::join!(frozen(LINKS[0]), frozen(LINKS[1]));
}

async fn frozen(link: &'static str) {
    let Scene { cluster, client, first, before } = scene(false, link).await;
    // Two requests take turns: it is random which of them has its program on the devices.
    let other = cluster.builder("phone", Role::Client).unwrap().connect().await.unwrap();
    let answers = [long_request(&client), long_request(&other)];
    cluster.running(1).await.unwrap();
    cluster.workers[1].signal("STOP").unwrap();
    let error = error_within(5, &cluster, &client).await;
    assert_lost(&cluster, 1, &error);
    assert_let_go(&cluster, Some(1), &before).await;
    cluster.workers[1].signal("CONT").unwrap();
    for answer in answers {
        assert_answered(&cluster, answer, &first).await;
    }
    assert_serves(&cluster, &client, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_answered_after_an_unplugged_device_reconnects() {
    if !root() {
        eprintln!("skipped: links of their own need root");
        return;
    }
    for link in LINKS {
        unplugged(link).await;
    }
}

async fn unplugged(link: &'static str) {
    let Scene { cluster, client, first, before } = scene(true, link).await;
    let network = cluster.network.as_ref().unwrap();
    let answer = long_request(&client);
    cluster.running(2).await.unwrap();
    network.plug(2, false).unwrap();
    let error = error_within(5, &cluster, &client).await;
    assert_lost(&cluster, 2, &error);
    assert_let_go(&cluster, Some(2), &before).await;
    network.plug(2, true).unwrap();
    assert_answered(&cluster, answer, &first).await;
    assert_serves(&cluster, &client, &first).await;
}

/// Two devices lose each other, and the coordinator reaches both: no ping fails, so the ends of
/// the link have to notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_answered_after_a_cut_link_between_devices_returns() {
    if !root() {
        eprintln!("skipped: links of their own need root");
        return;
    }
    for link in LINKS {
        apart(link).await;
    }
}

async fn apart(link: &'static str) {
    let Scene { cluster, client, first, before } = scene(true, link).await;
    let network = cluster.network.as_ref().unwrap();
    let answer = long_request(&client);
    cluster.running(2).await.unwrap();
    network.cut(0, 1, true).unwrap();
    let error = error_within(15, &cluster, &client).await;
    assert!(error.retryable(), "{} {error}", error.code());
    eprintln!("{} {error}", error.code());
    assert!(!answer.is_finished(), "it waits");
    network.cut(0, 1, false).unwrap();
    assert_answered(&cluster, answer, &first).await;
    assert_let_go(&cluster, None, &before).await;
    assert_serves(&cluster, &client, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_device_is_not_lost_and_the_answer_is_unchanged() {
    for link in LINKS {
        slow(link).await;
    }
}

async fn slow(link: &'static str) {
    let Scene { cluster, client, first, .. } = scene(false, link).await;
    let epoch = client.status().await.unwrap().epoch;
    let victim = &cluster.workers[1];
    let one = sequences(1);
    let slowly = client.run(&one, Output::Hidden);
    let answer = match Throttle::twentieth(victim) {
        Ok(_throttle) => slowly.await,
        Err(why) => {
            eprintln!("no share of a core can be set ({why:#}): stopping it for 19 parts of 20");
            let halting = async {
                loop {
                    victim.signal("STOP").unwrap();
                    tokio::time::sleep(Duration::from_millis(285)).await;
                    victim.signal("CONT").unwrap();
                    tokio::time::sleep(Duration::from_millis(15)).await;
                }
            };
            let answer = tokio::select! { answer = slowly => answer, () = halting => return };
            victim.signal("CONT").unwrap();
            answer
        }
    };
    let answer = answer.unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()));
    assert_eq!(answer.tensors, first.tensors);
    let cost = |answer: &Tensors| answer.report.as_ref().unwrap().execute;
    eprintln!("slowly in {:?}, at full speed in {:?}", cost(&answer), cost(&first));
    let status = client.status().await.unwrap();
    assert_eq!((status.state.as_str(), status.epoch), ("ready", epoch), "nobody was lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_coordinator_ends_requests_and_serves_after_its_restart() {
    let Scene { mut cluster, client, first, before } = scene(false, "tls").await;
    let answer = long_request(&client);
    cluster.running(1).await.unwrap();
    cluster.coordinator.kill().unwrap();
    // This client does not try again by itself.
    let error = ended(&cluster, answer).await.expect_err("the coordinator is gone");
    assert!(error.retryable(), "{error:?}");
    assert_let_go(&cluster, None, &before).await;
    cluster.restart_coordinator().unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.output()));
    let client = cluster.client().await.unwrap();
    assert_serves(&cluster, &client, &first).await;
}

/// The first of two devices, which dials the second, gets another address in the middle of a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_continues_when_a_device_changes_its_address() {
    if !root() {
        eprintln!("skipped: links of their own need root");
        return;
    }
    let shares = vec![2.0, 1.0];
    let setup = Setup { network: true, link: "quic", shares, ..Setup::new(model()) };
    let cluster = TestCluster::start(setup).unwrap();
    let client = cluster.client().await.unwrap();
    let first = client.run(&sequences(1), Output::Hidden).await.unwrap();
    let epoch = client.status().await.unwrap().epoch;
    let network = cluster.network.as_ref().unwrap();
    let ip = |i: usize, text: &str| {
        let mut command = Command::new("ip");
        command.args(text.split(' '));
        let done = network.inside(i, || command.output()).unwrap().unwrap();
        assert!(done.status.success(), "{text}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    const NEW: &str = "10.201.77.101";
    let answer = long_request(&client);
    cluster.running(1).await.unwrap();
    ip(0, &format!("address add {NEW}/24 dev eth0"));
    // What it sends to the other device comes from there; control stays where it was.
    ip(0, &format!("route replace {}/32 dev eth0 src {NEW}", Network::address(1)));
    let answer = answer.await.unwrap().unwrap_or_else(|e| panic!("{e}\n{}", cluster.output()));
    assert_eq!(answer.tensors[..1], first.tensors);
    assert_eq!(client.status().await.unwrap().epoch, epoch, "the same links");
    let known = ip(1, "neighbour show");
    assert!(known.contains(NEW), "it was answered there: {known}");
}

fn root() -> bool {
    let id = std::process::Command::new("id").arg("-u").output().unwrap();
    id.stdout == b"0\n"
}
