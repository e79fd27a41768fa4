//! Wrong cluster files, damaged models, absent devices, and certificates that are not in order.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, Output, RetryPolicy};
use galaxy_common::DeviceName;
use galaxy_proto::{
    PROTOCOL, channel,
    door::Door,
    identity::{Identity, Role},
    v1::{
        self,
        worker_server::{Worker, WorkerServer},
    },
};
use galaxy_testbed::{
    golden::checkpoints_dir,
    processes::{
        Keys, PATIENCE, Process, Setup, TestCluster, coordinator, listening, program, until,
        worker_command,
    },
};
use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tempfile::TempDir;
use time::OffsetDateTime;
use tonic::{Request, Response, Status, Streaming, codegen::BoxStream};

fn fresh() -> (TempDir, Keys) {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::create(&dir.path().join("keys")).unwrap();
    (dir, keys)
}

fn setup(devices: usize) -> Setup {
    Setup { shares: vec![1.0; devices], ..Setup::new(checkpoints_dir().join("bert")) }
}

/// The output of a process that must end with an error, and not by a panic.
fn refused(name: &str, command: Command) -> String {
    let (status, said) = Process::spawn(name, command).unwrap().ended().unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn refused_cluster(dir: &TempDir, text: &str) -> String {
    let file = dir.path().join("cluster.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = Command::new(program("galaxy-coord").unwrap());
    command.arg("--cluster").arg(file);
    refused("the coordinator", command)
}

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in:\n{said}");
    }
}

#[test]
fn cluster_files_with_errors_are_refused_with_a_reason() {
    let (dir, keys) = fresh();
    let identity = keys.of("coordinator", Role::Coordinator).unwrap();
    let addresses = ["127.0.0.1:7101".to_owned(), "127.0.0.1:7102".to_owned()];
    let right = setup(2).cluster_file(&identity, &addresses);
    let wrong: [(&str, &str, &[&str]); 6] = [
        ("strategy =", "stratgy =", &["stratgy", "did you mean \"strategy\"?"]),
        ("share = 1.0", "shares = 1.0", &["shares", "did you mean \"share\"?"]),
        ("\"galaxy\"", "\"ring\"", &["\"ring\"", "local megatron galaxy"]),
        ("127.0.0.1:7102", "127.0.0.1:7101", &["127.0.0.1:7101 is used twice", "d0 has it too"]),
        ("name = \"d1\"", "name = \"d0\"", &["the name d0 is used twice"]),
        ("memory = \"1GB\"", "memory = \"2MB\"", &["device d0 needs", "grants 2.0 MB", "missing"]),
    ];
    for (from, to, words) in wrong {
        assert!(right.contains(from), "{right}");
        assert_says(&refused_cluster(&dir, &right.replace(from, to)), words);
    }
    let device = keys.of("d0", Role::Device).unwrap();
    let said = refused_cluster(&dir, &setup(2).cluster_file(&device, &addresses));
    assert_says(&said, &["identity of device d0", "--role coordinator"]);
}

/// A copy of a checkpoint, and its weights.
fn copy(dir: &Path) -> (PathBuf, Vec<u8>) {
    let to = dir.join("bert");
    std::fs::create_dir_all(&to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(checkpoints_dir().join("bert").join(file), to.join(file)).unwrap();
    }
    let weights = std::fs::read(to.join("model.safetensors")).unwrap();
    (to, weights)
}

fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
    let mut bytes = bytes.to_vec();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}

#[test]
fn damaged_models_are_refused_with_the_damage_named() {
    let (dir, keys) = fresh();
    let identity = keys.of("coordinator", Role::Coordinator).unwrap();
    let (model, whole) = copy(dir.path());
    let name = "bert.encoder.layer.0.output.dense.weight";
    let other = "bert.encoder.layer.0.output.dense.weighs";
    let mut absurd = whole.clone();
    absurd[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let damaged: [(Vec<u8>, &[&str]); 5] = [
        (whole[..whole.len() - 4].to_vec(), &["model.safetensors is cut short", "fetch it again"]),
        (whole[..5].to_vec(), &["model.safetensors is damaged", "5 bytes"]),
        (absurd, &["model.safetensors is damaged", "header claims 18446744073709551615 bytes"]),
        (replaced(&whole, name, other), &["has no tensor", name]),
        (replaced(&whole, "\"F32\"", "\"I32\""), &["I32", "F32, F16, BF16"]),
    ];
    let text = Setup { model: model.clone(), ..setup(1) }
        .cluster_file(&identity, &["127.0.0.1:7101".to_owned()]);
    for (bytes, words) in damaged {
        std::fs::write(model.join("model.safetensors"), bytes).unwrap();
        assert_says(&refused_cluster(&dir, &text), words);
    }
}

/// The error of a request that has little time while the cluster is not ready.
async fn unavailable(client: &Client) -> String {
    let hurried = client.with_timeout(Duration::from_secs(3));
    let error = hurried.run(&[[2, 3, 4]], Output::Hidden).await.expect_err("not ready");
    assert!(error.code() == "unavailable" && error.retryable(), "{error:?}");
    error.to_string()
}

async fn assert_serves(cluster: &TestCluster, client: &Client) {
    let served = until("a request succeeds", || async {
        client.run(&[[2, 3, 4]], Output::Hidden).await.ok()
    });
    served.await.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.output()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_damaged_while_serving_is_reported_until_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let (model, whole) = copy(dir.path());
    let weights = model.join("model.safetensors");
    let mut cluster = TestCluster::start(Setup { model, ..setup(2) }).unwrap();
    let client = cluster.client().await.unwrap();
    std::fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    cluster.restart_worker(1, &[]).unwrap();
    cluster.coordinator.line("is cut short").unwrap();
    assert_says(&unavailable(&client).await, &["has not taken its place", "is cut short"]);
    std::fs::write(&weights, &whole).unwrap();
    assert_serves(&cluster, &client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_grants_too_little_memory_gives_a_no_plan_error() {
    let mut cluster = TestCluster::start(setup(2)).unwrap();
    let client = cluster.client().await.unwrap();
    cluster.restart_worker(1, &["--memory", "3MB"]).unwrap();
    cluster.coordinator.line("grants 3.0 MB: ").unwrap();
    let words = ["device d1 has not taken its place", "needs", "grants 3.0 MB", "are missing"];
    // A request does not wait for a plan that will not come.
    let error = client.run(&[[2, 3, 4]], Output::Hidden).await.expect_err("there is no plan");
    assert!(error.code() == "no_plan" && !error.retryable(), "{error:?}");
    assert_says(&error.to_string(), &words);
    let health = cluster.health(1).await.unwrap();
    assert!(!health.running);
    cluster.restart_worker(1, &[]).unwrap();
    assert_serves(&cluster, &client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_and_unreachable_devices_are_named_in_errors() {
    let (dir, keys) = fresh();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_at = silent.local_addr().unwrap().to_string();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let identity = keys.of("coordinator", Role::Coordinator).unwrap();
    let file = dir.path().join("cluster.toml");
    let addresses = [silent_at.clone(), closed.clone()];
    std::fs::write(&file, setup(2).cluster_file(&identity, &addresses)).unwrap();
    let (mut process, address) = coordinator(&file).unwrap();
    process.line("device d0 (").unwrap();
    process.line("device d1 (").unwrap();
    let said = process.output();
    assert_says(&said, &[&format!("{silent_at} did not answer within")]);
    assert_says(&said, &[&format!("nobody listens at {closed}"), "trying again"]);

    let laptop = || {
        let identity = keys.of("laptop", Role::Client).unwrap();
        Client::builder().identity(identity).retry(RetryPolicy::never())
    };
    let client = laptop().address(address).connect().await.unwrap();
    let why = unavailable(&client).await;
    assert_says(&why, &["the cluster is not ready: device d0", "did not answer within"]);
    let status = client.status().await.unwrap();
    assert_eq!(status.state, "starting");
    assert_says(&status.devices[1].detail, &["nobody listens"]);

    let short = Duration::from_millis(300);
    let error = laptop().address(silent_at).timeout(short).connect().await.unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("timed_out", true), "{error}");
    let error = laptop().address(closed).connect().await.unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("connection_refused", true), "{error}");
}

#[test]
fn a_worker_refuses_to_start_with_an_invalid_identity() {
    let (_dir, keys) = fresh();
    let (_other_dir, other) = fresh();
    let now = OffsetDateTime::now_utc();
    let hour = time::Duration::hours(1);
    let between = |name: &str, from, until| {
        keys.authority.issue_between(&DeviceName::new(name).unwrap(), Role::Device, from, until)
    };
    let expired = between("expired", now - hour * 2, now - hour).unwrap();
    let early = between("early", now + hour, now + hour * 2).unwrap();
    let foreign = keys.of("foreign", Role::Device).unwrap();
    let theirs = other.of("theirs", Role::Device).unwrap();
    std::fs::copy(theirs.join("ca.pem"), foreign.join("ca.pem")).unwrap();
    let client = keys.of("laptop", Role::Client).unwrap();
    let clock = "is the clock";
    let wrong: [(&Path, &[&str]); 4] = [
        (&expired, &["certificate of device expired expired on", clock]),
        (&early, &["certificate of device early is not valid before", clock]),
        (&foreign, &["was not issued by the authority in"]),
        (&client, &["is the identity of a client", "--role device"]),
    ];
    for (identity, words) in wrong {
        let command = worker_command(identity, &checkpoints_dir()).unwrap();
        assert_says(&refused("the worker", command), words);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_without_the_right_role_or_certificate_are_refused() {
    let cluster = TestCluster::start(setup(2)).unwrap();
    // A device and a coordinator are no clients.
    for (name, role) in [("d0", Role::Device), ("coordinator", Role::Coordinator)] {
        let error = cluster.client_as(name, role).await.err().unwrap();
        assert_says(&format!("{error:#}"), &["refused our certificate", "its role is not served"]);
    }
    // A client controls no worker.
    let laptop = Identity::load(&cluster.keys.of("laptop", Role::Client).unwrap()).unwrap();
    let name = DeviceName::new("d0").unwrap();
    let server = (&name, Role::Device);
    let control = channel::connect(&cluster.addresses[0], Some(&laptop), server, PATIENCE).await;
    assert_says(&control.unwrap_err().to_string(), &["its role is not served there"]);
    // A client of another cluster is not known.
    let (_dir, other) = fresh();
    let stranger = Client::builder().address(&cluster.address);
    let stranger = stranger.identity(other.of("laptop", Role::Client).unwrap());
    let error = stranger.connect().await.unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("foreign_authority", false), "{error}");
    // Nor is a client whose certificate has expired.
    let (now, hour) = (OffsetDateTime::now_utc(), time::Duration::HOUR);
    let guest = DeviceName::new("guest").unwrap();
    let authority = &cluster.keys.authority;
    let guest = authority.issue_between(&guest, Role::Client, now - hour * 2, now - hour).unwrap();
    let error = Client::builder().address(&cluster.address).identity(guest).connect().await;
    let error = error.unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("identity", false), "{error}");
    assert_says(&error.to_string(), &["certificate of client guest expired on", "is the clock"]);
    // Nor is a client without a certificate.
    let nobody = Client::builder().address(&cluster.address).retry(RetryPolicy::never());
    let error = nobody.connect().await.unwrap().status().await.unwrap_err();
    assert_says(&error.to_string(), &["takes clients with an identity only"]);
    assert_serves(&cluster, &cluster.client().await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_with_wrong_or_expired_certificates_are_refused() {
    let (dir, keys) = fresh();
    let (_other_dir, other) = fresh();
    let now = OffsetDateTime::now_utc();
    let soon = now + time::Duration::seconds(2);
    let d1 = DeviceName::new("d1").unwrap();
    let briefly = keys.authority.issue_between(&d1, Role::Device, now - time::Duration::HOUR, soon);
    let identities = [
        other.of("d0", Role::Device).unwrap(),
        briefly.unwrap(),
        keys.of("d3", Role::Device).unwrap(),
    ];
    let mut workers: Vec<_> = identities
        .iter()
        .map(|identity| {
            let mut command = worker_command(identity, &checkpoints_dir()).unwrap();
            command.args(["--listen", "127.0.0.1:0"]);
            Process::spawn("a worker", command).unwrap()
        })
        .collect();
    let addresses: Vec<_> = workers.iter_mut().map(|w| listening(w).unwrap()).collect();
    // Certificates count whole seconds, and the last one belongs to them.
    let end = soon + time::Duration::seconds(1);
    let over = || async { (OffsetDateTime::now_utc() > end).then_some(()) };
    until("the certificate expires", over).await.unwrap();
    let identity = keys.of("coordinator", Role::Coordinator).unwrap();
    let file = dir.path().join("cluster.toml");
    std::fs::write(&file, setup(3).cluster_file(&identity, &addresses)).unwrap();
    let (mut process, _) = coordinator(&file).unwrap();
    let words: [&[&str]; 3] = [
        &["certificate of device d0", "is not of this cluster's authority"],
        &["certificate of device d1", "has expired", "is the clock right?"],
        &["answers as d3.device.galaxy", "d2.device.galaxy was expected"],
    ];
    for (i, words) in words.iter().enumerate() {
        assert_says(&process.line(&format!("device d{i} (")).unwrap(), words);
    }
}

/// A worker of a later protocol version.
struct Later;

#[tonic::async_trait]
impl Worker for Later {
    type PlaceStream = BoxStream<v1::PlaceEvent>;
    type ExecuteStream = BoxStream<v1::ExecuteEvent>;
    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeReply>, Status> {
        assert_eq!(request.get_ref().protocol, PROTOCOL);
        Ok(Response::new(v1::DescribeReply {
            protocol: PROTOCOL + 1,
            version: "9.9.9".to_owned(),
            name: "d0".to_owned(),
            ..Default::default()
        }))
    }
    async fn place(
        &self,
        _: Request<v1::PlaceRequest>,
    ) -> Result<Response<Self::PlaceStream>, Status> {
        Err(Status::unimplemented("place"))
    }
    async fn execute(
        &self,
        _: Request<v1::ExecuteRequest>,
    ) -> Result<Response<Self::ExecuteStream>, Status> {
        Err(Status::unimplemented("execute"))
    }
    async fn end_burst(
        &self,
        _: Request<v1::EndBurstRequest>,
    ) -> Result<Response<v1::EndBurstReply>, Status> {
        Err(Status::unimplemented("end_burst"))
    }
    async fn forget(
        &self,
        _: Request<v1::ForgetRequest>,
    ) -> Result<Response<v1::ForgetReply>, Status> {
        Err(Status::unimplemented("forget"))
    }
    async fn health(
        &self,
        _: Request<v1::HealthRequest>,
    ) -> Result<Response<v1::HealthReply>, Status> {
        Err(Status::unimplemented("health"))
    }
    async fn deny(&self, _: Request<v1::DenyRequest>) -> Result<Response<v1::DenyReply>, Status> {
        Err(Status::unimplemented("deny"))
    }
    async fn cancel(
        &self,
        _: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelReply>, Status> {
        Err(Status::unimplemented("cancel"))
    }
    async fn drain(
        &self,
        _: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainReply>, Status> {
        Err(Status::unimplemented("drain"))
    }
    type PrepareStream = BoxStream<v1::PlaceEvent>;
    async fn prepare(
        &self,
        _: Request<v1::PrepareRequest>,
    ) -> Result<Response<Self::PrepareStream>, Status> {
        Err(Status::unimplemented("prepare"))
    }
    type SupplyStream = BoxStream<v1::Wants>;
    async fn supply(
        &self,
        _: Request<Streaming<v1::Supplied>>,
    ) -> Result<Response<Self::SupplyStream>, Status> {
        Err(Status::unimplemented("supply"))
    }
    type ProfileStream = BoxStream<v1::ProfileEvent>;
    async fn profile(
        &self,
        _: Request<v1::ProfileRequest>,
    ) -> Result<Response<Self::ProfileStream>, Status> {
        Err(Status::unimplemented("profile"))
    }
    async fn probe(
        &self,
        _: Request<v1::ProbeRequest>,
    ) -> Result<Response<v1::ProbeReply>, Status> {
        Err(Status::unimplemented("probe"))
    }
    async fn timeline(
        &self,
        _: Request<v1::TimelineRequest>,
    ) -> Result<Response<v1::TimelineReply>, Status> {
        Err(Status::unimplemented("timeline"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_another_protocol_version_is_refused_with_advice() {
    let (dir, keys) = fresh();
    let identity = Identity::load(&keys.of("d0", Role::Device).unwrap()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let door = Door::open(listener, Some(&identity), None);
    let server = tonic::transport::Server::builder().add_service(WorkerServer::new(Later));
    let server = tokio::spawn(server.serve_with_incoming(door));
    let identity = keys.of("coordinator", Role::Coordinator).unwrap();
    let file = dir.path().join("cluster.toml");
    std::fs::write(&file, setup(1).cluster_file(&identity, &[address])).unwrap();
    let (mut process, _) = coordinator(&file).unwrap();
    let line = process.line("device d0 (").unwrap();
    let (theirs, ours) = (PROTOCOL + 1, PROTOCOL);
    assert_says(
        &line,
        &[
            &format!("it speaks protocol {theirs} (version 9.9.9)"),
            &format!("this is protocol {ours} (version "),
        ],
    );
    assert_says(&line, &["install the same version on both"]);
    server.abort();
}
