//! Whole workers in one process, driven as a coordinator drives them.
#![allow(clippy::unwrap_used, missing_docs)]

mod manifest;

use galaxy_common::{
    BatchShape, Bytes, Cache, DeviceName, Exchange, LinkType, Plan, Strategy, Wanted, WireType,
    plan::Phase,
};
use galaxy_engine::{compute::choice::EngineChoice, local::LocalCluster, merge::merge};
use galaxy_graph::{
    budget::needs_all,
    holdings::transition,
    operators::OperatorGraph,
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use galaxy_proto::{
    channel::{ConnectError, connect},
    convert,
    fault::{Fault, from_status},
    identity::{Authority, Identity, Role},
    v1::{self, worker_client::WorkerClient},
};
use galaxy_worker::{StartError, Worker, WorkerConfig};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tonic::transport::Channel;

/// Only something that hangs takes so long, on whatever machine.
const LONG: Duration = Duration::from_secs(240);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden")
}

struct Cluster {
    _dir: tempfile::TempDir,
    authority: Authority,
    model: Arc<ModelDir>,
    workers: Vec<(Worker, WorkerClient<Channel>)>,
}

impl Cluster {
    async fn of(model: &str, devices: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "home").unwrap();
        let desk = authority.issue(&name("desk"), Role::Coordinator, 30).unwrap();
        let desk = Identity::load(&desk).unwrap();
        let mut workers = Vec::new();
        for i in 0..devices {
            let device = name(&format!("d{i}"));
            let identity = authority.issue(&device, Role::Device, 30).unwrap();
            let config = WorkerConfig {
                identity,
                listen: ([127, 0, 0, 1], 0).into(),
                from: None,
                models: Some(golden()),
                cache: None,
                engine: EngineChoice::Cpu,
                threads: 1,
                memory: None,
                plain: true,
            };
            let worker = Worker::start(config).await.unwrap();
            let address = worker.address().to_string();
            let channel =
                connect(&address, Some(&desk), (&device, Role::Device), LONG).await.unwrap();
            workers.push((worker, WorkerClient::new(channel)));
        }
        let model = Arc::new(ModelDir::open(&golden().join(model)).unwrap());
        Self { _dir: dir, authority, model, workers }
    }

    fn plan(&self, strategy: Strategy) -> Plan {
        self.plan_of(strategy, |i| 1.0 + i as f64)
    }

    fn plan_of(&self, strategy: Strategy, share: impl Fn(usize) -> f64) -> Plan {
        let member = |i: usize| Member {
            name: name(&format!("d{i}")),
            budget: Bytes(1 << 30),
            threads: 1,
            share: share(i),
        };
        let terms = PlanOptions {
            model: self.model.name(),
            fingerprint: self.model.fingerprint(),
            formats: self.model.formats(),
            strategy,
            wire: WireType::F32,
            tiles: 2,
            max_rows: 160,
            cache: Cache::NONE,
        };
        let members: Vec<_> = (0..self.workers.len()).map(member).collect();
        share::plan(self.model.spec(), &terms, &members).unwrap()
    }

    fn request(&self, plan: &Plan, rank: usize, epoch: u64) -> v1::PlaceRequest {
        let peer = |(i, (worker, _)): (usize, &(Worker, _))| v1::Peer {
            name: format!("d{i}"),
            address: worker.address().to_string(),
            plain_port: worker.plain_port().unwrap().into(),
        };
        v1::PlaceRequest {
            epoch,
            plan: postcard::to_stdvec(plan).unwrap(),
            rank: rank as u32,
            peers: self.workers.iter().enumerate().map(peer).collect(),
            memory_bytes: 0,
        }
    }

    async fn place_all(&self, plan: &Plan, epoch: u64) -> Vec<v1::PlaceReady> {
        let mut placing = tokio::task::JoinSet::new();
        for (rank, (_, client)) in self.workers.iter().enumerate() {
            let request = self.request(plan, rank, epoch);
            let client = client.clone();
            placing.spawn(async move { (rank, place(client, request).await.unwrap()) });
        }
        let mut ready = placing.join_all().await;
        ready.sort_by_key(|(rank, _)| *rank);
        ready.into_iter().map(|(_, ready)| ready).collect()
    }

    fn execute(
        &self,
        plan: &Plan,
        epoch: u64,
        sequence: u64,
        tokens: &[u32],
    ) -> v1::ExecuteRequest {
        let shape = BatchShape::single(tokens.len() as u32, Wanted::Hidden).unwrap();
        let programs = galaxy_graph::lower(
            self.model.spec(),
            self.model.formats(),
            plan,
            Phase::Prefill,
            &shape,
        )
        .unwrap();
        v1::ExecuteRequest {
            epoch,
            sequence,
            digest: galaxy_graph::digest(&programs).to_vec(),
            segments: convert::segments(&shape),
            tokens: tokens.to_vec(),
            timeout_ms: 20_000,
            ..v1::ExecuteRequest::default()
        }
    }

    /// Hidden states of `tokens`, run by all workers.
    async fn run(&self, plan: &Plan, epoch: u64, sequence: u64, tokens: &[u32]) -> Vec<f32> {
        let request = self.execute(plan, epoch, sequence, tokens);
        let mut running = tokio::task::JoinSet::new();
        for (rank, (_, client)) in self.workers.iter().enumerate() {
            let (client, request) = (client.clone(), request.clone());
            running.spawn(async move { (rank, execute(client, request).await.unwrap()) });
        }
        let mut results = running.join_all().await;
        results.sort_by_key(|(rank, _)| *rank);
        let shape = BatchShape::single(tokens.len() as u32, Wanted::Hidden).unwrap();
        let programs = galaxy_graph::lower(
            self.model.spec(),
            self.model.formats(),
            plan,
            Phase::Prefill,
            &shape,
        )
        .unwrap();
        let parts: Vec<_> = programs
            .iter()
            .zip(&results)
            .map(|(program, (_, outputs))| {
                (program.outputs.as_slice(), &outputs[..program.outputs.len()])
            })
            .collect();
        merge(self.model.spec(), &shape, &parts).unwrap()[0].values().to_vec()
    }

    async fn end(self) {
        for (worker, client) in self.workers {
            drop(client);
            worker.shutdown().await;
        }
    }
}

async fn place(
    mut client: WorkerClient<Channel>,
    request: v1::PlaceRequest,
) -> Result<v1::PlaceReady, Fault> {
    let plan: Option<Plan> = postcard::from_bytes(&request.plan).ok();
    let mut events = client.place(request).await.map_err(|s| from_status(&s))?.into_inner();
    let mut supplies = tokio::task::JoinSet::new();
    while let Some(event) = events.message().await.map_err(|s| from_status(&s))? {
        match event.event.unwrap() {
            v1::place_event::Event::Ready(ready) => return Ok(ready),
            v1::place_event::Event::Progress(_) => {}
            v1::place_event::Event::Wanted(_) => {
                let (client, path) = (client.clone(), golden().join(&plan.as_ref().unwrap().model));
                supplies.spawn(async move { manifest::say(client, &path).await });
            }
        }
    }
    panic!("the stream ended without a verdict");
}

async fn execute(
    mut client: WorkerClient<Channel>,
    request: v1::ExecuteRequest,
) -> Result<Vec<Vec<f32>>, Fault> {
    let mut outputs = vec![Vec::new(); 8];
    let mut events = client.execute(request).await.map_err(|s| from_status(&s))?.into_inner();
    while let Some(event) = events.message().await.map_err(|s| from_status(&s))? {
        match event.event.unwrap() {
            v1::execute_event::Event::Piece(piece) => {
                let output: &mut Vec<f32> = &mut outputs[piece.output as usize];
                assert_eq!(output.len() as u64 * 4, piece.offset);
                let values = piece.data.chunks_exact(4);
                output.extend(values.map(|v| f32::from_le_bytes(v.try_into().unwrap())));
            }
            v1::execute_event::Event::Step(_) => panic!("no token was asked for"),
            v1::execute_event::Event::Done(done) => {
                assert!(done.lanes.iter().any(|lane| lane.lane == "compute"));
                return Ok(outputs);
            }
        }
    }
    panic!("the stream ended without a verdict");
}

fn close(have: &[f32], want: &[f32]) {
    assert_eq!(have.len(), want.len());
    let scale = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = have.iter().zip(want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(worst <= 1e-4 * scale, "off by {worst} of {scale}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_compute_what_one_device_computes() {
    let cluster = Cluster::of("bert", 3).await;
    let tokens: Vec<u32> = (0..29).map(|i| i * 3 % 97).collect();
    let alone = {
        let mut plan = cluster.plan(Strategy::Local);
        plan.ring[0].name = name("alone");
        let local = LocalCluster::open(cluster.model.clone(), plan).unwrap();
        let shape = BatchShape::single(29, Wanted::Hidden).unwrap();
        local.run(&shape, tokens.clone()).unwrap()[0].values().to_vec()
    };
    let plan = cluster.plan(Strategy::Galaxy);
    let first = cluster.place_all(&plan, 10).await;
    assert!(first.iter().all(|ready| !ready.reused && ready.weight_bytes > 0));
    for sequence in 0..3 {
        close(&cluster.run(&plan, 10, sequence, &tokens).await, &alone);
    }
    close(&cluster.run(&plan, 10, 7, &tokens[..1]).await, &{
        let mut plan = cluster.plan(Strategy::Local);
        plan.ring[0].name = name("alone");
        let local = LocalCluster::open(cluster.model.clone(), plan).unwrap();
        let shape = BatchShape::single(1, Wanted::Hidden).unwrap();
        local.run(&shape, &tokens[..1]).unwrap()[0].values().to_vec()
    });
    // The same parts over links of other types: the shard stays.
    for (epoch, link) in [(11, LinkType::Plain), (12, LinkType::Quic)] {
        let plan = Plan { link, ..plan.clone() };
        let second = cluster.place_all(&plan, epoch).await;
        assert!(second.iter().all(|ready| ready.reused));
        close(&cluster.run(&plan, epoch, 0, &tokens).await, &alone);
    }
    // Another strategy; and the timeline of what ran.
    let plan = cluster.plan(Strategy::Megatron);
    cluster.place_all(&plan, 13).await;
    close(&cluster.run(&plan, 13, 0, &tokens).await, &alone);
    let mut client = cluster.workers[0].1.clone();
    let request = v1::TimelineRequest { epoch: 13, sequence: 0 };
    let times = client.timeline(request).await.unwrap().into_inner();
    assert!(!times.start_ns.is_empty() && times.start_ns.len() == times.end_ns.len());
    let health = client.health(v1::HealthRequest {}).await.unwrap().into_inner();
    assert_eq!((health.epoch, health.running), (13, false));
    assert!(health.clock_ns >= *times.end_ns.iter().max().unwrap());
    // Links between all of them, and from stage to stage.
    let direct = |strategy| Plan { exchange: Exchange::Direct, ..cluster.plan(strategy) };
    let plans = [Strategy::Sequence, Strategy::Galaxy, Strategy::Pipeline].map(direct);
    let over = |link| plans.clone().map(|plan| Plan { link, ..plan });
    let plans = [over(LinkType::Tls), over(LinkType::Quic)].concat();
    for (epoch, plan) in (14..).zip(plans) {
        cluster.place_all(&plan, epoch).await;
        close(&cluster.run(&plan, epoch, 0, &tokens).await, &alone);
    }
    cluster.end().await;
}

/// A new plan reads what its devices do not hold, and no more; where there is no room for old and
/// new together on the way, it reads all of it. The results are the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_plan_reads_only_weights_that_are_not_held() {
    let cluster = Cluster::of("llama", 3).await;
    let tokens: Vec<u32> = (0..29).map(|i| i * 3 % 97).collect();
    let (spec, formats) = (cluster.model.spec(), cluster.model.formats());
    let graph = OperatorGraph::of(spec);
    let first = cluster.plan(Strategy::Galaxy);
    let second = cluster.plan_of(Strategy::Galaxy, |i| 1.4 + 0.6 * i as f64);
    let read = |old: Option<&Plan>, new: &Plan, rank: usize| {
        let old = old.map(|old| &old.ring[rank].prefill);
        transition(&graph, formats, old, &new.ring[rank].prefill).read.0
    };
    let ready = cluster.place_all(&first, 1).await;
    let have: Vec<u64> = ready.iter().map(|ready| ready.read_bytes).collect();
    assert_eq!(have, [0, 1, 2].map(|rank| read(None, &first, rank)));
    let want = cluster.run(&first, 1, 0, &tokens).await;
    let ready = cluster.place_all(&second, 2).await;
    let have: Vec<u64> = ready.iter().map(|ready| ready.read_bytes).collect();
    assert_eq!(have, [0, 1, 2].map(|rank| read(Some(&first), &second, rank)));
    let anew: u64 = (0..3).map(|rank| read(None, &second, rank)).sum();
    assert!(have.iter().sum::<u64>() * 2 < anew, "{have:?} of {anew}");
    close(&cluster.run(&second, 2, 0, &tokens).await, &want);

    // Back, where the budget has no room for both a matrix and the one that it is made of.
    let mut tight = first.clone();
    for (device, needs) in tight.ring.iter_mut().zip(needs_all(spec, formats, &first).unwrap()) {
        let load = transition(&graph, formats, None, &device.prefill);
        device.budget = needs.total().max(load.peak);
    }
    let ready = cluster.place_all(&tight, 3).await;
    let have: Vec<u64> = ready.iter().map(|ready| ready.read_bytes).collect();
    assert_eq!(have, [0, 1, 2].map(|rank| read(None, &first, rank)));
    close(&cluster.run(&tight, 3, 0, &tokens).await, &want);
    // Other weights of rows alone: all is held.
    for device in &mut tight.ring {
        (device.prefill.row_weight, device.decode.row_weight) = (1, 1);
        device.budget = Bytes(1 << 30);
    }
    let ready = cluster.place_all(&tight, 4).await;
    assert!(ready.iter().all(|ready| ready.reused && ready.read_bytes == 0));
    close(&cluster.run(&tight, 4, 0, &tokens).await, &want);
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_placement_leaves_the_current_one_unchanged() {
    let cluster = Cluster::of("bert", 1).await;
    let client = &cluster.workers[0].1;
    let good = cluster.plan(Strategy::Local);
    let refused =
        async |request: v1::PlaceRequest| place(client.clone(), request).await.unwrap_err();

    let mut request = cluster.request(&good, 0, 1);
    request.plan.truncate(20);
    assert_eq!(refused(request).await.code, "bad_plan");
    let request = v1::PlaceRequest { rank: 1 << 20, ..cluster.request(&good, 0, 1) };
    assert_eq!(refused(request).await.code, "bad_plan");
    let request = v1::PlaceRequest { peers: vec![], ..cluster.request(&good, 0, 1) };
    assert_eq!(refused(request).await.code, "bad_plan");
    let mut plan = good.clone();
    plan.ring[0].prefill.row_weight = 0;
    assert_eq!(refused(cluster.request(&plan, 0, 1)).await.code, "bad_plan");

    let plan = Plan { model: "../bert".into(), ..good.clone() };
    let fault = refused(cluster.request(&plan, 0, 1)).await;
    assert!(fault.code == "unknown_model" && fault.message.contains("gpt2"), "{fault}");
    let plan = Plan { fingerprint: "0badc0de".into(), ..good.clone() };
    let fault = refused(cluster.request(&plan, 0, 1)).await;
    assert_eq!(fault.code, "model_differs");
    assert!(
        fault.message.contains("0badc0de") && fault.message.contains(cluster.model.fingerprint())
    );

    let request = v1::PlaceRequest { memory_bytes: 1_234_000, ..cluster.request(&good, 0, 1) };
    let fault = refused(request).await;
    assert_eq!((fault.code.as_str(), fault.retryable), ("over_budget", false));
    assert!(fault.message.contains("1.2 MB") && fault.message.contains("needs 34"), "{fault}");
    assert_eq!(fault.device, "d0");

    place(client.clone(), cluster.request(&good, 0, 5)).await.unwrap();
    for epoch in [4, 5] {
        let fault = refused(cluster.request(&good, 0, epoch)).await;
        assert_eq!((fault.code.as_str(), fault.retryable), ("stale_epoch", true));
    }
    // All of them left the placement of epoch 5 as it was.
    cluster.run(&good, 5, 0, &[1, 2, 3]).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_execute_requests_are_rejected_and_later_ones_still_run() {
    let cluster = Cluster::of("bert", 1).await;
    let client = &cluster.workers[0].1;
    let plan = cluster.plan(Strategy::Local);
    let good = cluster.execute(&plan, 5, 1, &[1, 2, 3]);
    let code = async |request: v1::ExecuteRequest| {
        execute(client.clone(), request).await.unwrap_err().code
    };
    assert_eq!(code(good.clone()).await, "stale_epoch");
    place(client.clone(), cluster.request(&plan, 0, 5)).await.unwrap();
    assert_eq!(code(v1::ExecuteRequest { epoch: 6, ..good.clone() }).await, "stale_epoch");
    assert_eq!(
        code(v1::ExecuteRequest { tokens: vec![1], ..good.clone() }).await,
        "invalid_argument"
    );
    assert_eq!(
        code(v1::ExecuteRequest { tokens: vec![1, 2, 97], ..good.clone() }).await,
        "invalid_argument"
    );
    assert_eq!(
        code(v1::ExecuteRequest { segments: vec![], ..good.clone() }).await,
        "invalid_argument"
    );
    assert_eq!(
        code(v1::ExecuteRequest { digest: vec![1; 32], ..good.clone() }).await,
        "digest_mismatch"
    );
    let long = vec![1; 161];
    let mut request = good.clone();
    request.segments[0].rows = 161;
    request.tokens = long;
    assert_eq!(code(request).await, "cannot_lower");
    execute(client.clone(), good.clone()).await.unwrap();
    assert_eq!(code(good.clone()).await, "out_of_order");

    let mut control = client.clone();
    control.drain(v1::DrainRequest { off: false }).await.unwrap();
    let next = v1::ExecuteRequest { sequence: 2, ..good };
    assert_eq!(code(next.clone()).await, "draining");
    control.drain(v1::DrainRequest { off: true }).await.unwrap();
    execute(client.clone(), next.clone()).await.unwrap();
    control.cancel(v1::CancelRequest { epoch: 5 }).await.unwrap();
    assert_eq!(code(v1::ExecuteRequest { sequence: 3, ..next }).await, "not_placed");
    let ready = place(client.clone(), cluster.request(&plan, 0, 6)).await.unwrap();
    assert!(ready.reused, "a cancelled epoch leaves its shard");
    cluster.end().await;
}

/// Waits until a program runs on a device, or until none does.
async fn until_running(control: &mut WorkerClient<Channel>, wanted: bool) {
    let looking = async {
        loop {
            let health = control.health(v1::HealthRequest {}).await.unwrap().into_inner();
            if health.running == wanted {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, looking).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_ends_when_its_caller_disconnects() {
    let cluster = Cluster::of("bert", 2).await;
    let plan = cluster.plan(Strategy::Galaxy);
    cluster.place_all(&plan, 1).await;
    // The coordinator asks one device, and is gone before it asks the other.
    let request = cluster.execute(&plan, 1, 0, &[1, 2, 3]);
    let request = v1::ExecuteRequest { timeout_ms: 600_000, ..request };
    let asked = tokio::spawn(execute(cluster.workers[0].1.clone(), request));
    let mut control = cluster.workers[0].1.clone();
    until_running(&mut control, true).await;
    asked.abort();
    until_running(&mut control, false).await;
    cluster.place_all(&plan, 2).await;
    cluster.run(&plan, 2, 0, &[1, 2, 3]).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_and_lost_links_end_a_program_waiting_for_a_peer() {
    let cluster = Cluster::of("bert", 2).await;
    let plan = cluster.plan(Strategy::Galaxy);
    cluster.place_all(&plan, 1).await;
    let tokens: Vec<u32> = (0..40).collect();
    let request = cluster.execute(&plan, 1, 0, &tokens);
    let lonely = tokio::spawn(execute(cluster.workers[0].1.clone(), request));
    let mut control = cluster.workers[0].1.clone();
    until_running(&mut control, true).await;
    control.cancel(v1::CancelRequest { epoch: 1 }).await.unwrap();
    let fault = lonely.await.unwrap().unwrap_err();
    assert!(fault.retryable && fault.code == "aborted", "{fault:?}");
    cluster.place_all(&plan, 2).await;
    cluster.run(&plan, 2, 0, &tokens).await;

    // A peer that ends breaks the link: an error that names it, and nobody hangs.
    let request = cluster.execute(&plan, 2, 1, &tokens);
    let lonely = tokio::spawn(execute(cluster.workers[0].1.clone(), request));
    let mut cluster = cluster;
    let (gone, _) = cluster.workers.pop().unwrap();
    gone.shutdown().await;
    let fault = lonely.await.unwrap().unwrap_err();
    assert!(fault.retryable, "{fault:?}");
    assert_eq!((fault.code.as_str(), fault.device.as_str()), ("link_lost", "d1"));
    cluster.end().await;
}

/// A placement whose coordinator hangs up is over, and a later one succeeds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_placement_ends_when_its_caller_disconnects() {
    let cluster = Cluster::of("bert", 2).await;
    let plan = cluster.plan(Strategy::Galaxy);
    let placing = tokio::spawn(place(cluster.workers[0].1.clone(), cluster.request(&plan, 0, 1)));
    let mut control = cluster.workers[0].1.clone();
    loop {
        let health = control.health(v1::HealthRequest {}).await.unwrap().into_inner();
        if health.epoch == 1 {
            break;
        }
        tokio::task::yield_now().await;
    }
    placing.abort();
    cluster.place_all(&plan, 2).await;
    cluster.run(&plan, 2, 0, &[5, 6, 7]).await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_coordinators_may_control_a_worker() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let cluster = Cluster::of("bert", 1).await;
    let address = cluster.workers[0].0.address().to_string();
    let to = (&name("d0"), Role::Device);
    for role in [Role::Client, Role::Admin, Role::Device] {
        let who = name(&format!("a-{role}"));
        let identity = cluster.authority.issue(&who, role, 30).unwrap();
        let identity = Identity::load(&identity).unwrap();
        let channel = connect(&address, Some(&identity), to, LONG).await;
        if role != Role::Device {
            let error = channel.unwrap_err();
            assert!(matches!(error, ConnectError::RefusedUs { .. }), "{error}");
            continue;
        }
        // Devices ask each other for content.
        let channel = channel.unwrap();
        let mut client = WorkerClient::new(channel);
        let status = client.describe(v1::DescribeRequest::default()).await.unwrap_err();
        let fault = from_status(&status);
        assert_eq!(fault.code, "permission_denied");
        assert!(fault.message.contains(who.as_str()), "{fault}");
        assert!(fault.message.contains("coordinator"), "{fault}");
        // Refused before anything is read from it.
        let large = v1::PlaceRequest { plan: vec![0; 9 << 20], ..Default::default() };
        let status = client.place(large).await.unwrap_err();
        assert_eq!(from_status(&status).code, "permission_denied");
    }
    let large = v1::PlaceRequest { plan: vec![0; 33 << 20], ..Default::default() };
    let status = cluster.workers[0].1.clone().place(large).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status}");
    let error = connect(&address, None, to, LONG).await;
    // Plain text to a door with TLS: the first call fails, the worker does not.
    if let Ok(channel) = error {
        let mut client = WorkerClient::new(channel);
        client.describe(v1::DescribeRequest::default()).await.unwrap_err();
    }
    let plain = cluster.workers[0].0.plain_port().unwrap();
    for port in [cluster.workers[0].0.address().port(), plain] {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xa5; 5000], b"GLXH\x01\xff"] {
            let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.write_all(garbage).await.unwrap();
            stream.shutdown().await.unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }
    let mut client = cluster.workers[0].1.clone();
    let reply = client.describe(v1::DescribeRequest::default()).await.unwrap().into_inner();
    assert_eq!((reply.name.as_str(), reply.protocol), ("d0", galaxy_proto::PROTOCOL));
    assert!(reply.models.contains(&"bert".to_owned()));
    cluster.end().await;
}

#[tokio::test]
async fn a_worker_with_a_bad_config_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let config = |identity: PathBuf, models: PathBuf, threads| WorkerConfig {
        identity,
        listen: ([127, 0, 0, 1], 0).into(),
        from: None,
        models: Some(models),
        cache: None,
        engine: EngineChoice::Cpu,
        threads,
        memory: None,
        plain: false,
    };
    let device = authority.issue(&name("d0"), Role::Device, 1).unwrap();
    let client = authority.issue(&name("c"), Role::Client, 1).unwrap();
    let start = async |config| Worker::start(config).await.err().unwrap();
    let error = start(config(dir.path().join("none"), golden(), 1)).await;
    assert!(matches!(error, StartError::Identity(_)), "{error}");
    let error = start(config(client, golden(), 1)).await;
    assert!(matches!(error, StartError::Role { .. }), "{error}");
    let error = start(config(device.clone(), dir.path().join("none"), 1)).await;
    assert!(matches!(error, StartError::Models { .. }), "{error}");
    let error = start(config(device, golden(), 0)).await;
    assert!(matches!(error, StartError::Threads), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes half a minute"]
async fn memory_stays_flat_over_ten_thousand_requests() {
    let cluster = Cluster::of("bert", 2).await;
    let plan = cluster.plan(Strategy::Galaxy);
    cluster.place_all(&plan, 1).await;
    let mut control = cluster.workers[0].1.clone();
    let mut warm = 0;
    for sequence in 0..10_000u64 {
        let tokens: Vec<u32> = (0..1 + (sequence * 7 % 40) as u32).collect();
        cluster.run(&plan, 1, sequence, &tokens).await;
        if sequence == 2_000 {
            let health = control.health(v1::HealthRequest {}).await.unwrap().into_inner();
            warm = health.resident_bytes;
        }
    }
    // And over placements, with and without TLS.
    for epoch in 2..200 {
        let link = if epoch % 2 == 0 { LinkType::Plain } else { LinkType::Tls };
        let plan = Plan { link, ..plan.clone() };
        cluster.place_all(&plan, epoch).await;
    }
    let health = control.health(v1::HealthRequest {}).await.unwrap().into_inner();
    let grown = health.resident_bytes.saturating_sub(warm);
    assert!(grown < 4 << 20, "grew by {grown} bytes");
    cluster.end().await;
}
