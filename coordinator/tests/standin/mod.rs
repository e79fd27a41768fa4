//! A worker over real gRPC and TLS that computes with the real engine, and otherwise does what the
//! test says.

use galaxy_common::{DeviceName, plan::Plan};
use galaxy_engine::local::LocalCluster;
use galaxy_graph::program::{Lane, OpKind};
use galaxy_model::ModelDir;
use galaxy_proto::{
    PROTOCOL, convert,
    door::{Door, require},
    fault::{Fault, to_status},
    identity::{Authority, Identity, Role},
    v1::{self, execute_event, place_event, worker_server},
};
use std::{
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{Notify, Semaphore, mpsc},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Code, Request, Response, Status, Streaming};

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Answer<T> = Result<Response<T>, Status>;

/// What a worker holds: an epoch, its rank, and all devices of the plan, of which it gives its own results.
type Placed = (u64, usize, Option<Arc<LocalCluster>>);

/// A worker that does what a test says.
pub struct Worker {
    pub name: String,
    pub protocol: AtomicU32,
    pub memory: AtomicU64,
    /// Whether it answers no program.
    pub hang: AtomicBool,
    /// Whether it refuses every place.
    pub refuse: AtomicBool,
    /// Whether it refuses to fetch what a place needs.
    pub unprepared: AtomicBool,
    /// How many bytes of the model it lacks, which come one with each permit.
    pub lacks: AtomicU64,
    pub comes: Semaphore,
    /// How many times as long as [`OPERATION`] its kernels take.
    pub slowness: AtomicU64,
    /// How many times as long as [`BYTE`] its disk takes.
    pub disk: AtomicU64,
    pub running: Notify,
    pub placed: Mutex<Placed>,
    /// The list of removed members that it got, and whether that was before it had a place.
    pub denied: Mutex<Option<(v1::DenyRequest, bool)>>,
}

/// How long an operation takes, in ns.
pub const OPERATION: u64 = 1_000_000;
/// How long a disk takes for a byte, in ns.
pub const BYTE: u64 = 10;

impl Worker {
    pub fn new(name: &str) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            protocol: AtomicU32::new(PROTOCOL),
            memory: AtomicU64::new(0),
            hang: AtomicBool::new(false),
            refuse: AtomicBool::new(false),
            unprepared: AtomicBool::new(false),
            lacks: AtomicU64::new(0),
            comes: Semaphore::new(0),
            slowness: AtomicU64::new(1),
            disk: AtomicU64::new(1),
            running: Notify::new(),
            placed: Mutex::new((0, 0, None)),
            denied: Mutex::default(),
        })
    }
}

/// Keys of a cluster of these devices.
pub fn keys(devices: &[&str]) -> tempfile::TempDir {
    let keys = tempfile::tempdir().unwrap();
    let authority = Authority::create(keys.path(), "test").unwrap();
    let name = |n: &str| DeviceName::new(n).unwrap();
    for device in devices {
        authority.issue(&name(device), Role::Device, 1).unwrap();
    }
    authority.issue(&name("coordinator"), Role::Coordinator, 1).unwrap();
    keys
}

/// Kills a worker as SIGKILL does: every connection is closed, and nobody listens any more.
pub async fn kill(server: Runtime) {
    let ended = move || server.shutdown_timeout(Duration::from_secs(10));
    tokio::task::spawn_blocking(ended).await.unwrap();
}

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/bert")
}

struct Control(Arc<Worker>);

#[tonic::async_trait]
impl worker_server::Worker for Control {
    type PlaceStream = Events<v1::PlaceEvent>;
    type ExecuteStream = Events<v1::ExecuteEvent>;

    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Answer<v1::DescribeReply> {
        require(Role::Coordinator, &request)?;
        Ok(Response::new(v1::DescribeReply {
            protocol: self.0.protocol.load(Ordering::SeqCst),
            version: "test".to_owned(),
            name: self.0.name.clone(),
            threads: 1,
            memory_bytes: self.0.memory.load(Ordering::SeqCst),
            epoch: self.0.placed.lock().unwrap().0,
            ..v1::DescribeReply::default()
        }))
    }
    async fn place(&self, request: Request<v1::PlaceRequest>) -> Answer<Self::PlaceStream> {
        let request = request.into_inner();
        let plan: Plan = postcard::from_bytes(&request.plan).unwrap();
        let model = Arc::new(ModelDir::open(&golden()).unwrap());
        let shards = tempfile::tempdir().unwrap();
        let local = Arc::new(LocalCluster::open_with(model, plan, shards.path()).unwrap());
        if self.0.refuse.load(Ordering::SeqCst) {
            let fault = Fault::new("budget", "no room", false);
            return Err(to_status(Code::FailedPrecondition, fault));
        }
        *self.0.placed.lock().unwrap() = (request.epoch, request.rank as usize, Some(local));
        let ready = v1::PlaceReady { weight_bytes: 7, ..v1::PlaceReady::default() };
        let event = v1::PlaceEvent { event: Some(place_event::Event::Ready(ready)) };
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(event)]))))
    }
    async fn execute(&self, request: Request<v1::ExecuteRequest>) -> Answer<Self::ExecuteStream> {
        let request = request.into_inner();
        self.0.running.notify_one();
        let mut looks = tokio::time::interval(Duration::from_millis(5));
        while self.0.hang.load(Ordering::SeqCst) {
            looks.tick().await;
        }
        let (epoch, rank, local) = self.0.placed.lock().unwrap().clone();
        assert_eq!(epoch, request.epoch);
        let shape = convert::shape(request.segments, request.tokens.len()).unwrap();
        let (programs, reports) = local.unwrap().execute(&shape, request.tokens, None).unwrap();
        let compute = programs[rank].lanes.iter().find(|(lane, _)| *lane == Lane::Compute);
        let operations = compute.map_or(0, |(_, ids)| ids.len() as u64);
        let busy_ns = operations * OPERATION * self.0.slowness.load(Ordering::SeqCst);
        let mut events = Vec::new();
        for (output, values) in reports[rank].outputs.iter().enumerate() {
            let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let piece = v1::OutputPiece { output: output as u32, offset: 0, data: data.into() };
            events.push(execute_event::Event::Piece(piece));
        }
        let lane = v1::LaneSummary { lane: "compute".to_owned(), busy_ns, ..Default::default() };
        let program = &programs[rank];
        let loaded = program.operations.iter().filter(|op| matches!(op.kind, OpKind::Load { .. }));
        let loaded = loaded.flat_map(|op| &op.writes).map(|region| program.region_bytes(region));
        let busy_ns = loaded.sum::<u64>() * BYTE * self.0.disk.load(Ordering::SeqCst);
        let load = v1::LaneSummary { lane: "load 0".to_owned(), busy_ns, ..Default::default() };
        let done = v1::ExecuteDone { lanes: vec![lane, load], ..v1::ExecuteDone::default() };
        events.push(execute_event::Event::Done(done));
        let events = events.into_iter().map(|e| Ok(v1::ExecuteEvent { event: Some(e) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }
    async fn end_burst(&self, _: Request<v1::EndBurstRequest>) -> Answer<v1::EndBurstReply> {
        Ok(Response::new(v1::EndBurstReply {}))
    }
    async fn forget(&self, _: Request<v1::ForgetRequest>) -> Answer<v1::ForgetReply> {
        Ok(Response::new(v1::ForgetReply {}))
    }
    async fn health(&self, _: Request<v1::HealthRequest>) -> Answer<v1::HealthReply> {
        let epoch = self.0.placed.lock().unwrap().0;
        Ok(Response::new(v1::HealthReply { epoch, ..v1::HealthReply::default() }))
    }
    async fn deny(&self, request: Request<v1::DenyRequest>) -> Answer<v1::DenyReply> {
        let early = self.0.placed.lock().unwrap().0 == 0;
        *self.0.denied.lock().unwrap() = Some((request.into_inner(), early));
        Ok(Response::new(v1::DenyReply {}))
    }

    async fn cancel(&self, _: Request<v1::CancelRequest>) -> Answer<v1::CancelReply> {
        Ok(Response::new(v1::CancelReply {}))
    }
    async fn drain(&self, _: Request<v1::DrainRequest>) -> Answer<v1::DrainReply> {
        Ok(Response::new(v1::DrainReply {}))
    }
    type PrepareStream = Events<v1::PlaceEvent>;
    async fn prepare(&self, _: Request<v1::PrepareRequest>) -> Answer<Self::PrepareStream> {
        if self.0.unprepared.load(Ordering::SeqCst) {
            let fault = Fault::new("no_room", "its disk is full", false);
            return Err(to_status(Code::ResourceExhausted, fault));
        }
        let (events, stream) = mpsc::channel(4);
        let worker = self.0.clone();
        tokio::spawn(async move {
            let say =
                async |event| drop(events.send(Ok(v1::PlaceEvent { event: Some(event) })).await);
            let to_fetch = worker.lacks.load(Ordering::SeqCst);
            for fetched in 0..to_fetch {
                let progress = v1::PlaceProgress { fetched, to_fetch, ..Default::default() };
                say(place_event::Event::Progress(progress)).await;
                worker.comes.acquire().await.unwrap().forget();
            }
            let ready = v1::PlaceReady { fetched_bytes: to_fetch, ..v1::PlaceReady::default() };
            worker.lacks.store(0, Ordering::SeqCst);
            say(place_event::Event::Ready(ready)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
    type SupplyStream = Events<v1::Wants>;
    async fn supply(&self, _: Request<Streaming<v1::Supplied>>) -> Answer<Self::SupplyStream> {
        Err(Status::unimplemented("supply"))
    }
    type ProfileStream = Events<v1::ProfileEvent>;
    async fn profile(&self, _: Request<v1::ProfileRequest>) -> Answer<Self::ProfileStream> {
        Err(Status::unimplemented("profile"))
    }
    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Answer<v1::ProbeReply> {
        Err(Status::unimplemented("probe"))
    }
    async fn timeline(&self, _: Request<v1::TimelineRequest>) -> Answer<v1::TimelineReply> {
        Ok(Response::new(v1::TimelineReply::default()))
    }
}

/// A runtime of its own stands for the worker's process.
pub fn serve(listener: TcpListener, worker: Arc<Worker>, keys: &Path) -> Runtime {
    let identity = Identity::load(&keys.join(&worker.name)).unwrap();
    let listener = listener.into_std().unwrap();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().unwrap();
    runtime.spawn(async move {
        let listener = TcpListener::from_std(listener).unwrap();
        let door = Door::open(listener, Some(&identity), None);
        let service = worker_server::WorkerServer::new(Control(worker));
        let server = tonic::transport::Server::builder().add_service(service);
        server.serve_with_incoming(door).await.unwrap();
    });
    runtime
}
