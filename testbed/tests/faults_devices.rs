//! Devices that die, freeze, are unplugged, or are merely slow, in the middle of a request.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, ClientError, Output, Tensors};
use galaxy_proto::v1::HealthRequest;
use galaxy_testbed::{
    models,
    processes::{Setup, TestCluster, Throttle, until},
};
use std::{path::Path, time::Duration};
use tokio::task::JoinHandle;

/// Within this a client must know of a lost device: the promise of the product.
const BOUND: Duration = Duration::from_secs(5);
/// Tokens of a sequence: one program each.
const TOKENS: u32 = 512;
/// The device that things happen to.
const VICTIM: usize = 1;
/// What a process may hold beyond what it held after its first request: buffers of the
/// allocator, not a request.
const SLACK: u64 = 24 << 20;

/// A model whose program of [`TOKENS`] rows takes hundreds of milliseconds.
fn model() -> std::path::PathBuf {
    models::bert(Path::new(env!("CARGO_TARGET_TMPDIR")), "bert-768x4", 4, 768, 12).unwrap()
}

fn sequences(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|s| (0..TOKENS).map(|i| 3 + (i * 7 + s) % 900).collect()).collect()
}

type Answer = JoinHandle<Result<Tensors, ClientError>>;

/// A request of many programs.
fn long_request(client: &Client) -> Answer {
    let client = client.clone();
    tokio::spawn(async move { client.run(&sequences(40), Output::Hidden).await })
}

/// The error of a request whose device was just lost.
async fn error_in_time(cluster: &TestCluster, answer: Answer) -> ClientError {
    let answer = tokio::time::timeout(BOUND, answer).await;
    let answer = answer.unwrap_or_else(|_| panic!("no error in {BOUND:?}; {}", cluster.output()));
    answer.unwrap().expect_err("a device is gone")
}

fn assert_lost(cluster: &TestCluster, error: &ClientError) {
    let name = format!("d{VICTIM}");
    let named = error.retryable() && error.device() == Some(&name);
    assert!(named && error.code() == "device_lost", "{error:?}\n{}", cluster.output());
    assert!(error.to_string().contains(&format!("device {name} was lost")), "{error}");
}

/// The others run nothing any more, and hold no more than they did before.
async fn assert_let_go(cluster: &TestCluster, before: &[u64]) {
    for (i, &before) in before.iter().enumerate().filter(|(i, _)| *i != VICTIM) {
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

/// One request after all was mended; the cluster may take its time to form, a client asks again.
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

async fn scene(network: bool) -> Scene {
    let cluster = TestCluster::start(Setup { network, ..Setup::new(model()) }).unwrap();
    let client = cluster.client().await.unwrap();
    let first = client.run(&sequences(1), Output::Hidden).await.unwrap();
    let mut before = Vec::new();
    for i in 0..cluster.workers.len() {
        before.push(cluster.health(i).await.unwrap().resident_bytes);
    }
    Scene { cluster, client, first, before }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_killed() {
    let Scene { mut cluster, client, first, before } = scene(false).await;
    let answer = long_request(&client);
    cluster.running(VICTIM).await.unwrap();
    cluster.workers[VICTIM].kill().unwrap();
    let error = error_in_time(&cluster, answer).await;
    assert_lost(&cluster, &error);
    assert_let_go(&cluster, &before).await;
    cluster.restart_worker(VICTIM, &[]).unwrap();
    assert_serves(&cluster, &client, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_frozen() {
    let Scene { cluster, client, first, before } = scene(false).await;
    let answer = long_request(&client);
    cluster.running(VICTIM).await.unwrap();
    cluster.workers[VICTIM].signal("STOP").unwrap();
    let error = error_in_time(&cluster, answer).await;
    assert_lost(&cluster, &error);
    assert_let_go(&cluster, &before).await;
    cluster.workers[VICTIM].signal("CONT").unwrap();
    assert_serves(&cluster, &client, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_unplugged() {
    if !root() {
        eprintln!("skipped: links of their own need root");
        return;
    }
    let Scene { cluster, client, first, before } = scene(true).await;
    let network = cluster.network.as_ref().unwrap();
    let answer = long_request(&client);
    cluster.running(VICTIM).await.unwrap();
    network.plug(VICTIM, false).unwrap();
    let error = error_in_time(&cluster, answer).await;
    assert_lost(&cluster, &error);
    assert_let_go(&cluster, &before).await;
    network.plug(VICTIM, true).unwrap();
    assert_serves(&cluster, &client, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_merely_slow() {
    let Scene { cluster, client, first, .. } = scene(false).await;
    let epoch = client.status().await.unwrap().epoch;
    let victim = &cluster.workers[VICTIM];
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
async fn a_coordinator_that_is_killed_and_started_again() {
    let Scene { mut cluster, client, first, before } = scene(false).await;
    let answer = long_request(&client);
    cluster.running(VICTIM).await.unwrap();
    cluster.coordinator.kill().unwrap();
    let error = error_in_time(&cluster, answer).await;
    assert!(error.retryable(), "{error:?}");
    assert_let_go(&cluster, &before).await;
    cluster.restart_coordinator().unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.output()));
    let client = cluster.client().await.unwrap();
    assert_serves(&cluster, &client, &first).await;
}

fn root() -> bool {
    let id = std::process::Command::new("id").arg("-u").output().unwrap();
    id.stdout == b"0\n"
}
