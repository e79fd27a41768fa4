//! The whole coordinator in this process: the API over real gRPC on loopback, engines on threads.
#![allow(clippy::unwrap_used)]

mod around;
mod crowds;
mod waits;

use galaxy_common::{
    Bytes, Cache, DeviceName, Epoch, GenerateOptions, SequenceNumber, Wanted,
    plan::{Plan, Strategy, WireType},
};
use galaxy_coord::{
    Fleet, Input, Limits, LocalFleet, RequestError, RunOutput, Session,
    api::Api,
    audit::Audit,
    client_memory::DEFAULT_CLIENT_MEMORY,
    fleet::{BoxFuture, DeviceView, FleetStatus, Readiness, Run, Task, Timeline},
    session::{GenerateEvent, Listener},
};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::ModelDir;
use galaxy_proto::{
    channel,
    fault::{Fault, from_status},
    identity::{Authority, Identity, Role},
    v1::{self, galaxy_client::GalaxyClient, run_event::Event},
};
use safetensors::SafeTensors;
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinHandle,
};
use tonic::transport::Channel;

/// A time that only something that hangs takes, on whatever machine.
const LONG: Duration = Duration::from_secs(240);
const LIMITS: Limits = Limits {
    queue: 2,
    timeout: Duration::from_secs(60),
    client_memory: DEFAULT_CLIENT_MEMORY,
    drafts: true,
};
const MAX_ROWS: u32 = 140;

fn golden() -> PathBuf {
    checkpoint("bert")
}

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name)
}

fn plan(model: &ModelDir, shares: &[f64], strategy: Strategy) -> Plan {
    plan_with(model, shares, strategy, Cache::NONE)
}

fn plan_with(model: &ModelDir, shares: &[f64], strategy: Strategy, cache: Cache) -> Plan {
    let members: Vec<Member> = shares
        .iter()
        .enumerate()
        .map(|(i, share)| Member {
            name: DeviceName::new(format!("dev-{i}")).unwrap(),
            budget: Bytes(1 << 32),
            threads: 1,
            share: *share,
        })
        .collect();
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: MAX_ROWS,
        cache,
    };
    share::plan(model.spec(), &terms, &members).unwrap()
}

struct Service {
    client: GalaxyClient<Channel>,
    session: Session,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Service {
    async fn start(fleet: Option<Arc<dyn Fleet>>) -> Self {
        let model = Arc::new(ModelDir::open(&golden()).unwrap());
        let fleet = fleet.unwrap_or_else(|| {
            let plan = plan(&model, &[3.0, 2.0, 1.0], Strategy::Galaxy);
            Arc::new(LocalFleet::open(model.clone(), plan).unwrap())
        });
        let session = Session::new(model, fleet, LIMITS);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (stop, stopped) = oneshot::channel();
        let api = Api::new(session.clone(), "test");
        let server = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            api.serve(listener, None, stopped).await.unwrap();
        });
        let name = DeviceName::new("coordinator").unwrap();
        let server_name = (&name, Role::Coordinator);
        let channel = channel::connect(&address, None, server_name, LONG).await.unwrap();
        Self { client: GalaxyClient::new(channel), session, stop, server }
    }

    async fn stop(self) {
        drop(self.client);
        let _ = self.stop.send(());
        self.server.await.unwrap();
    }

    async fn run(
        &mut self,
        ids: &[Vec<u32>],
        output: v1::Wanted,
    ) -> Result<(Vec<(Vec<u32>, Vec<f32>)>, v1::RequestReport), Fault> {
        let sequences = ids
            .iter()
            .map(|ids| v1::Sequence { ids: ids.clone(), ..v1::Sequence::default() })
            .collect();
        let request = v1::RunRequest { sequences, output: output.into(), pooled: false };
        let mut events = self.client.run(request).await.map_err(|s| from_status(&s))?.into_inner();
        let mut tensors: Vec<(Vec<u32>, Vec<f32>)> = Vec::new();
        while let Some(event) = events.message().await.map_err(|s| from_status(&s))? {
            match event.event.unwrap() {
                Event::Tensor(head) => tensors.push((head.shape, Vec::new())),
                Event::Data(data) => {
                    let values = data.chunks_exact(4);
                    let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                    tensors.last_mut().unwrap().1.extend(values);
                }
                Event::Report(report) => return Ok((tensors, report)),
            }
        }
        panic!("the stream ended without a report");
    }
}

/// Token ids and a reference output of each length.
fn cases(kind: &str) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let bytes = std::fs::read(golden().join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: String| {
        let tensor = tensors.tensor(&name).unwrap();
        let words = tensor.data().chunks_exact(4).map(|b| b.try_into().unwrap());
        words.collect::<Vec<[u8; 4]>>()
    };
    let lengths = [129, 1, 64, 2, 7];
    let ids =
        lengths.map(|n| words(format!("ids.{n}")).into_iter().map(u32::from_le_bytes).collect());
    let want =
        lengths.map(|n| words(format!("{kind}.{n}")).into_iter().map(f32::from_le_bytes).collect());
    (ids.to_vec(), want.to_vec())
}

fn deviation(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    got.iter().zip(want).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_requests_match_the_reference_outputs() {
    let mut service = Service::start(None).await;
    for (kind, output) in [("hidden", v1::Wanted::Hidden), ("logits", v1::Wanted::Classes)] {
        let (ids, want) = cases(kind);
        let (got, report) = service.run(&ids, output).await.unwrap();
        assert_eq!(got.len(), want.len());
        for ((ids, (shape, got)), want) in ids.iter().zip(&got).zip(&want) {
            let error = deviation(got, want);
            assert!(error <= 1e-4, "{kind} of {} tokens: {error:e}", ids.len());
            let first = if kind == "hidden" { ids.len() as u32 } else { 3 };
            assert_eq!(shape[0], first);
        }
        assert_eq!(report.tokens, 203);
        assert_eq!(report.programs, 2, "129 rows and 74 rows do not fit into one program of 140");
        let devices: Vec<_> = report.devices.iter().map(|d| d.device.as_str()).collect();
        assert_eq!(devices, ["dev-0", "dev-1", "dev-2"]);
        assert!(report.devices.iter().all(|d| d.bytes_received > 0 && d.total_ns > 0));
    }
    // The logits of a class model are its class logits.
    let (ids, want) = cases("logits");
    let (got, _) = service.run(&ids, v1::Wanted::LastLogits).await.unwrap();
    assert!(got.iter().zip(&want).all(|((_, got), want)| deviation(got, want) <= 1e-4));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_gets_a_clear_error() {
    let mut service = Service::start(None).await;
    let embed = |texts: Vec<String>| v1::EmbedRequest { texts, ..Default::default() };
    let texts = [
        (vec![], "invalid_argument", "no texts"),
        (vec!["word".to_owned(), " \t\n".to_owned()], "empty_text", "text 1"),
        (vec!["word".to_owned(); 10_000], "too_many_texts", "in parts"),
        (vec!["word".to_owned()], "unsupported_model", "tokenizer"),
    ];
    for (texts, code, word) in texts {
        let status = service.client.embed(embed(texts)).await.expect_err(code);
        let fault = from_status(&status);
        assert_eq!(fault.code, code, "{fault:?}");
        assert!(fault.message.contains(word) && !fault.retryable, "{fault:?}");
    }
    let runs = [
        (vec![], v1::Wanted::Hidden, "invalid_argument", "no sequences"),
        (vec![vec![1], vec![]], v1::Wanted::Hidden, "invalid_argument", "sequence 1 has no ids"),
        (vec![vec![1], vec![5, 97]], v1::Wanted::Hidden, "unknown_token", "vocabulary has 97"),
        (vec![vec![1; 141]], v1::Wanted::Hidden, "text_too_long", "max_rows"),
        (vec![vec![1]], v1::Wanted::AllLogits, "unsupported_output", "classifies"),
    ];
    for (ids, output, code, word) in runs {
        let fault = service.run(&ids, output).await.expect_err(code);
        assert_eq!(fault.code, code, "{fault:?}");
        assert!(fault.message.contains(word) && !fault.retryable, "{fault:?}");
    }
    let status = service.client.status(v1::StatusRequest {}).await.unwrap().into_inner();
    // One was refused while it came, before it was a request.
    assert_eq!((status.state.as_str(), status.failed, status.served), ("ready", 8, 0));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_shows_every_operation_of_every_device() {
    let mut service = Service::start(None).await;
    let none = service.client.trace(v1::TraceRequest { request: 0 }).await.expect_err("none yet");
    assert_eq!(from_status(&none).code, "no_trace");
    let (ids, _) = cases("hidden");
    let (_, report) = service.run(&ids[2..3], v1::Wanted::Hidden).await.unwrap();
    let request = v1::TraceRequest { request: report.request };
    let trace = service.client.trace(request).await.unwrap().into_inner();
    let json: serde_json::Value = serde_json::from_str(&trace.chrome_json).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let names: Vec<_> = events.iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    for name in ["dev-0", "dev-1", "dev-2", "compute"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let operations = events.iter().filter(|e| e["ph"] == "X").count();
    assert!(operations > 100, "{operations}");
    assert!(events.iter().all(|e| e["ph"] != "X" || e["ts"].as_f64().unwrap() >= 0.0));
    assert!(events.iter().any(|e| e["name"].as_str().unwrap().starts_with("L2 mlp up")));
    assert_eq!(trace.devices.len(), 3);
    for (device, cost) in trace.devices.iter().zip(&report.devices) {
        assert_eq!(device.bytes_received, cost.bytes_received);
        assert_eq!(device.awaiting_receive_ns, cost.awaiting_receive_ns);
        assert!(device.lanes.iter().any(|l| l.lane == "compute" && l.busy_ns > 0));
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_drain_requests_are_refused() {
    let mut service = Service::start(None).await;
    service.session.drain().await;
    let fault = service.run(&[vec![1, 2]], v1::Wanted::Hidden).await.expect_err("draining");
    assert_eq!((fault.code.as_str(), fault.retryable), ("draining", false));
    let status = service.client.status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.state, "draining");
    service.session.admission().drain(false);
    assert!(service.run(&[vec![1, 2]], v1::Wanted::Hidden).await.is_ok());
    // Who asks without a certificate is a client, also on this machine.
    let status = service.client.drain(v1::GalaxyDrainRequest { off: false }).await;
    assert_eq!(from_status(&status.expect_err("no admin")).code, "permission_denied");
    service.stop().await;
}

/// A fleet whose programs run for as long as the test likes.
struct Paused {
    plan: Arc<Plan>,
    readiness: watch::Sender<Readiness>,
    started: Notify,
    proceed: Notify,
    finished: Notify,
    runs: AtomicUsize,
}

impl Paused {
    fn new() -> Arc<Self> {
        let model = ModelDir::open(&golden()).unwrap();
        Arc::new(Self {
            plan: Arc::new(plan(&model, &[1.0], Strategy::Local)),
            readiness: watch::Sender::new(Readiness::Ready(Epoch(1))),
            started: Notify::new(),
            proceed: Notify::new(),
            finished: Notify::new(),
            runs: AtomicUsize::new(0),
        })
    }
}

impl Fleet for Paused {
    fn readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.subscribe()
    }
    fn status(&self) -> FleetStatus {
        FleetStatus {
            strategy: self.plan.strategy,
            max_rows: self.plan.max_rows,
            plan: Some(self.plan.clone()),
            what: String::new(),
            predicted: None,
            cache: Cache::NONE,
        }
    }
    fn execute(&self, _: Task, _: Duration) -> BoxFuture<'_, Result<Run, RequestError>> {
        Box::pin(async {
            self.runs.fetch_add(1, Ordering::SeqCst);
            self.started.notify_one();
            self.proceed.notified().await;
            self.finished.notify_one();
            let device = DeviceName::new("dev-0").unwrap();
            Err(RequestError::DeviceLost { device, reason: "unplugged".to_owned() })
        })
    }
    fn end_burst(&self) {}
    fn forget(&self, _: Epoch, _: u32) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
    fn timelines(
        &self,
        _: Epoch,
        _: SequenceNumber,
    ) -> BoxFuture<'_, Result<Vec<Timeline>, RequestError>> {
        Box::pin(async { Ok(Vec::new()) })
    }
    fn devices(&self) -> Vec<DeviceView> {
        Vec::new()
    }
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

fn hidden(session: &Session, time: Option<Duration>) -> JoinHandle<Result<(), RequestError>> {
    let session = session.clone();
    let output = RunOutput::Wanted(Wanted::Hidden);
    tokio::spawn(async move {
        session.run(vec![Input::Tokens(vec![1, 2])], output, time).await.map(drop)
    })
}

#[tokio::test]
async fn a_full_queue_refuses_requests_and_a_lost_program_is_run_again() {
    let fleet = Paused::new();
    let mut service = Service::start(Some(fleet.clone())).await;
    let first = hidden(&service.session, None);
    fleet.started.notified().await;
    let others = [hidden(&service.session, None), hidden(&service.session, None)];
    while service.session.admission().queued() < 2 {
        tokio::task::yield_now().await;
    }
    let fault = service.run(&[vec![1]], v1::Wanted::Hidden).await.expect_err("full");
    assert_eq!((fault.code.as_str(), fault.retryable), ("overloaded", true));
    fleet.proceed.notify_one();
    // The others waited at the same time: they are one program.
    fleet.started.notified().await;
    assert_eq!(fleet.runs.load(Ordering::SeqCst), 2);
    assert!(!first.is_finished(), "it is to run again");
    // Until there is no plan any more.
    let (device, reason) = (Some(DeviceName::new("dev-0").unwrap()), "it is gone".to_owned());
    fleet.readiness.send_replace(Readiness::Waiting { device, reason, planless: true });
    fleet.proceed.notify_one();
    let [second, third] = others;
    for request in [first, second, third] {
        let error = request.await.unwrap().expect_err("there is no plan");
        assert_eq!((error.code(), error.device().unwrap().as_str()), ("no_plan", "dev-0"));
    }
    assert_eq!(fleet.runs.load(Ordering::SeqCst), 2);
    service.stop().await;
}

#[tokio::test]
async fn a_disconnected_client_leaves_the_queue_and_its_program_completes() {
    let fleet = Paused::new();
    let service = Service::start(Some(fleet.clone())).await;
    let running = hidden(&service.session, None);
    fleet.started.notified().await;
    let waiting = hidden(&service.session, None);
    while service.session.admission().queued() < 1 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    running.abort();
    assert!(waiting.await.is_err() && running.await.is_err());
    assert_eq!(service.session.admission().queued(), 0);
    let session = service.session.clone();
    let drained = session.drain();
    tokio::pin!(drained);
    let ended = tokio::time::timeout(Duration::ZERO, &mut drained).await;
    assert!(ended.is_err(), "the program is still running");
    fleet.proceed.notify_one();
    fleet.finished.notified().await;
    drained.await;
    assert_eq!(fleet.runs.load(Ordering::SeqCst), 1, "the one that waited never ran");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_is_allowed_only_its_own_calls() {
    let keys = tempfile::tempdir().unwrap();
    let authority = Authority::create(keys.path(), "test").unwrap();
    let name = |n: &str| DeviceName::new(n).unwrap();
    let identity =
        |n: &str, role| Identity::load(&authority.issue(&name(n), role, 1).unwrap()).unwrap();
    let model = Arc::new(ModelDir::open(&golden()).unwrap());
    let log = keys.path().join("audit.jsonl");
    let api = Api::new(Session::new(model, Paused::new(), LIMITS), "test")
        .audited(Audit::open(&log).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let coordinator = identity("coordinator", Role::Coordinator);
    let server = tokio::spawn(async move {
        api.serve(listener, Some(&coordinator), std::future::pending()).await.unwrap();
    });
    for (n, role) in [("pi-1", Role::Device), ("me", Role::Client), ("anna", Role::Admin)] {
        let caller = identity(n, role);
        let to = (&name("coordinator"), Role::Coordinator);
        let channel = channel::connect(&address, Some(&caller), to, LONG).await;
        assert_eq!(channel.is_ok(), role != Role::Device, "{role}");
        let Ok(channel) = channel else { continue };
        let mut client = GalaxyClient::new(channel);
        client.status(v1::StatusRequest {}).await.unwrap();
        let drained = client.drain(v1::GalaxyDrainRequest { off: true }).await;
        assert_eq!(drained.is_ok(), role == Role::Admin, "{role}");
    }
    server.abort();
    let log = std::fs::read_to_string(log).unwrap();
    let (refused, drained) = (log.lines().next().unwrap(), log.lines().last().unwrap());
    assert!(refused.contains("\"refused\"") && refused.contains("\"me\""), "{log}");
    assert!(drained.contains("\"drain\"") && drained.contains("\"anna\""), "{log}");
}

#[tokio::test]
async fn a_request_that_waits_past_its_deadline_gets_an_error() {
    let fleet = Paused::new();
    let service = Service::start(Some(fleet.clone())).await;
    let late = hidden(&service.session, Some(Duration::from_millis(5))).await.unwrap();
    assert_eq!(late.expect_err("late").code(), "deadline");
    fleet.proceed.notify_one();
    let device = Some(DeviceName::new("dev-0").unwrap());
    let reason = "device dev-0 is not reachable: nobody listens".to_owned();
    fleet.readiness.send_replace(Readiness::Waiting {
        device: device.clone(),
        reason,
        planless: false,
    });
    let error = hidden(&service.session, Some(Duration::from_millis(5))).await.unwrap();
    let error = error.expect_err("not ready");
    assert_eq!(
        (error.code(), error.device(), error.retryable()),
        ("unavailable", device.as_ref(), true)
    );
    service.stop().await;
}

/// A decoder with room for one sequence.
fn short_of_room() -> Session {
    let model = Arc::new(ModelDir::open(&checkpoint("llama")).unwrap());
    let cache = Cache { rows: Cache::BLOCK, values: galaxy_common::CacheType::F32 };
    let plan = plan_with(&model, &[1.0, 1.0], Strategy::Galaxy, cache);
    let fleet = Arc::new(LocalFleet::open(model.clone(), plan).unwrap());
    Session::new(model, fleet, LIMITS)
}

/// Generates 60 tokens behind a prompt.
async fn generate(session: &Session, listener: Listener) {
    let options = GenerateOptions {
        max_tokens: 60,
        ignore_end: true,
        fallback: None,
        ..GenerateOptions::default()
    };
    session.generate(vec![5, 6, 7].into(), options, None, listener).await;
}

#[tokio::test(start_paused = true)]
async fn a_sequence_waiting_for_kv_blocks_gets_waiting_events() {
    let session = short_of_room();
    // The first has the room, and is not read any more: that is borne for a while.
    let (listener, mut unread) = mpsc::channel(1);
    let first = session.clone();
    tokio::spawn(async move { generate(&first, listener).await });
    assert!(matches!(unread.recv().await, Some(Ok(GenerateEvent::Begun { .. }))));
    let (listener, mut said) = mpsc::channel(1000);
    generate(&session, listener).await;
    let mut waits = 0;
    let first = loop {
        match said.recv().await.unwrap().unwrap() {
            GenerateEvent::Waiting { .. } => waits += 1,
            first => break first,
        }
    };
    assert!(matches!(first, GenerateEvent::Begun { .. }), "{first:?}");
    assert!((5..100).contains(&waits), "{waits}");
}

/// A client that reads nothing is given up after a while, and the next sequence has room.
#[tokio::test(start_paused = true)]
async fn a_client_that_stops_reading_loses_its_sequence() {
    let session = short_of_room();
    let (listener, mut said) = mpsc::channel(1);
    let begun = tokio::time::Instant::now();
    generate(&session, listener).await;
    let took = begun.elapsed();
    assert!((Duration::from_secs(25)..Duration::from_secs(70)).contains(&took), "{took:?}");
    assert!(matches!(said.recv().await, Some(Ok(GenerateEvent::Begun { .. }))));
    let (listener, mut said) = mpsc::channel(100);
    generate(&session, listener).await;
    let mut tokens = 0;
    while let Some(said) = said.recv().await {
        tokens += usize::from(matches!(said.unwrap(), GenerateEvent::Token(_)));
    }
    assert_eq!(tokens, 60);
}
