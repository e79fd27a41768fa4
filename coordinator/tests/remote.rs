//! The fleet over real gRPC and TLS, with a worker that does what the test says.
#![allow(clippy::unwrap_used)]

use galaxy_common::{BatchShape, DeviceName, Epoch, Wanted, plan::Plan};
use galaxy_coord::{
    Cluster, Fleet, Limits, RemoteFleet, RequestError, RunOutput, Session, fleet::Readiness,
};
use galaxy_engine::local::LocalCluster;
use galaxy_model::ModelDir;
use galaxy_proto::{
    PROTOCOL, convert,
    door::{Door, require},
    identity::{Authority, Identity, Role},
    v1::{self, execute_event, place_event, worker_server},
};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{net::TcpListener, runtime::Runtime, sync::Notify};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Answer<T> = Result<Response<T>, Status>;

/// A worker of a ring of one.
struct Worker {
    name: String,
    protocol: AtomicU32,
    memory: AtomicU64,
    hang: AtomicBool,
    running: Notify,
    placed: Mutex<(u64, Option<Arc<LocalCluster>>)>,
}

fn golden() -> PathBuf {
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
        let local = Arc::new(LocalCluster::open(model, plan).unwrap());
        *self.0.placed.lock().unwrap() = (request.epoch, Some(local));
        let ready = v1::PlaceReady { weight_bytes: 7, read_bytes: 7, ..Default::default() };
        let event = v1::PlaceEvent { event: Some(place_event::Event::Ready(ready)) };
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(event)]))))
    }
    async fn execute(&self, request: Request<v1::ExecuteRequest>) -> Answer<Self::ExecuteStream> {
        let request = request.into_inner();
        self.0.running.notify_one();
        if self.0.hang.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let (epoch, local) = self.0.placed.lock().unwrap().clone();
        assert_eq!(epoch, request.epoch);
        let shape = convert::shape(request.segments, request.tokens.len()).unwrap();
        let (_, reports) = local.unwrap().execute(&shape, request.tokens.into(), None).unwrap();
        let mut events = Vec::new();
        for (output, values) in reports[0].outputs.iter().enumerate() {
            let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let piece = v1::OutputPiece { output: output as u32, offset: 0, data: data.into() };
            events.push(execute_event::Event::Piece(piece));
        }
        events.push(execute_event::Event::Done(v1::ExecuteDone::default()));
        let events = events.into_iter().map(|e| Ok(v1::ExecuteEvent { event: Some(e) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }
    async fn health(&self, _: Request<v1::HealthRequest>) -> Answer<v1::HealthReply> {
        let epoch = self.0.placed.lock().unwrap().0;
        Ok(Response::new(v1::HealthReply { epoch, ..v1::HealthReply::default() }))
    }
    async fn cancel(&self, _: Request<v1::CancelRequest>) -> Answer<v1::CancelReply> {
        Ok(Response::new(v1::CancelReply {}))
    }
    async fn drain(&self, _: Request<v1::DrainRequest>) -> Answer<v1::DrainReply> {
        Ok(Response::new(v1::DrainReply {}))
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

struct World {
    keys: tempfile::TempDir,
    worker: Arc<Worker>,
    server: Option<Runtime>,
    address: SocketAddr,
}

impl World {
    async fn new() -> Self {
        let keys = tempfile::tempdir().unwrap();
        let authority = Authority::create(keys.path(), "test").unwrap();
        let name = |n: &str| DeviceName::new(n).unwrap();
        authority.issue(&name("solo"), Role::Device, 1).unwrap();
        authority.issue(&name("coordinator"), Role::Coordinator, 1).unwrap();
        let worker = Arc::new(Worker {
            name: "solo".to_owned(),
            protocol: AtomicU32::new(PROTOCOL),
            memory: AtomicU64::new(0),
            hang: AtomicBool::new(false),
            running: Notify::new(),
            placed: Mutex::new((0, None)),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Some(serve(listener, worker.clone(), keys.path()));
        Self { keys, worker, server, address }
    }

    fn coordinate(&self) -> Session {
        let (model, fleet) = self.fleet();
        let limits = Limits { queue: 8, timeout: Duration::from_secs(60) };
        Session::new(model, fleet, limits)
    }

    fn fleet(&self) -> (Arc<ModelDir>, Arc<dyn Fleet>) {
        let text = format!(
            "[cluster]\nmodel = {:?}\nidentity = {:?}\nstrategy = \"local\"\n[[device]]\nname = \"solo\"\naddress = \"{}\"\nmemory = \"1GB\"\n",
            golden(),
            self.keys.path().join("coordinator"),
            self.address
        );
        let cluster = Cluster::parse(&text, Path::new("/")).unwrap();
        let model = Arc::new(ModelDir::open(&cluster.model).unwrap());
        let identity = Identity::load(&cluster.identity).unwrap();
        let quiet = Arc::new(|_| ());
        let fleet = RemoteFleet::start(cluster, model.clone(), identity, Epoch(7), quiet).unwrap();
        (model, Arc::new(fleet))
    }

    /// As a SIGKILL does: every connection is closed, and nobody listens any more.
    async fn kill(&mut self) {
        let server = self.server.take().unwrap();
        let ended = move || server.shutdown_timeout(Duration::from_secs(10));
        tokio::task::spawn_blocking(ended).await.unwrap();
    }

    async fn restart(&mut self) {
        *self.worker.placed.lock().unwrap() = (0, None);
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.server = Some(serve(listener, self.worker.clone(), self.keys.path()));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }
}

/// A runtime of its own stands for the worker's process.
fn serve(listener: TcpListener, worker: Arc<Worker>, keys: &Path) -> Runtime {
    let identity = Identity::load(&keys.join("solo")).unwrap();
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

async fn run(session: &Session) -> Result<(), RequestError> {
    let output = RunOutput::Wanted(Wanted::Hidden);
    let done = session.run(vec![vec![5, 6, 7]], output, None).await?;
    assert_eq!(done.tensors[0].shape, [3, 42]);
    Ok(())
}

/// Waits until the readiness says a word.
async fn until(session: &Session, word: &str) {
    loop {
        if format!("{:?} {:?}", session.readiness(), session.devices()).contains(word) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_hangs_in_a_program_and_dies_is_named_and_used_again() {
    let mut world = World::new().await;
    let session = world.coordinate();
    run(&session).await.unwrap();
    world.worker.hang.store(true, Ordering::SeqCst);
    let asking = session.clone();
    world.worker.running.notified().await;
    let request = tokio::spawn(async move { run(&asking).await });
    world.worker.running.notified().await;
    world.kill().await;
    let error = request.await.unwrap().expect_err("lost");
    assert_eq!(error.code(), "device_lost", "{error}");
    assert_eq!(error.device().unwrap().as_str(), "solo");
    assert!(error.retryable());
    until(&session, "\"lost\"").await;
    world.worker.hang.store(false, Ordering::SeqCst);
    world.restart().await;
    until(&session, "Ready(").await;
    run(&session).await.unwrap();
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_beyond_the_limit_names_who_has_no_result_and_may_be_tried_again() {
    let world = World::new().await;
    world.worker.hang.store(true, Ordering::SeqCst);
    let (_, fleet) = world.fleet();
    let mut readiness = fleet.readiness();
    readiness.wait_for(|r| matches!(r, Readiness::Ready(_))).await.unwrap();
    let shape = BatchShape::single(3, Wanted::Hidden).unwrap();
    let error = fleet.execute(shape, Arc::from([5, 6, 7]), Duration::from_millis(20)).await;
    let error = error.expect_err("too long");
    assert_eq!((error.code(), error.retryable()), ("device_failed", true), "{error}");
    assert_eq!(error.device().unwrap().as_str(), "solo");
    readiness.wait_for(|r| *r == Readiness::Ready(Epoch(9))).await.unwrap();
    fleet.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_knows_a_later_epoch_is_placed_after_it() {
    let world = World::new().await;
    world.worker.placed.lock().unwrap().0 = 1 << 50;
    let (_, fleet) = world.fleet();
    let mut readiness = fleet.readiness();
    let ready = readiness.wait_for(|r| matches!(r, Readiness::Ready(_))).await.unwrap().clone();
    assert_eq!(ready, Readiness::Ready(Epoch((1 << 50) + 1)));
    fleet.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_protocol_is_named_until_it_is_ours() {
    let world = World::new().await;
    world.worker.protocol.store(99, Ordering::SeqCst);
    let session = world.coordinate();
    until(&session, "speaks protocol 99").await;
    let Readiness::Waiting { device, .. } = session.readiness() else { panic!("not ready") };
    assert_eq!(device.unwrap().as_str(), "solo");
    world.worker.protocol.store(PROTOCOL, Ordering::SeqCst);
    until(&session, "Ready(").await;
    run(&session).await.unwrap();
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_device_grants_itself_is_checked_before_it_is_placed() {
    let world = World::new().await;
    world.worker.memory.store(1_000_000, Ordering::SeqCst);
    let session = world.coordinate();
    until(&session, "grants 1.0 MB").await;
    assert_eq!(world.worker.placed.lock().unwrap().0, 0, "nothing was sent");
    world.worker.memory.store(0, Ordering::SeqCst);
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_of_another_role_is_refused() {
    let world = World::new().await;
    let authority = Authority::open(world.keys.path()).unwrap();
    let name = DeviceName::new("solo").unwrap();
    std::fs::remove_dir_all(world.keys.path().join("solo")).unwrap();
    authority.issue(&name, Role::Client, 1).unwrap();
    let mut world = world;
    world.kill().await;
    world.restart().await;
    let session = world.coordinate();
    until(&session, "solo.device.galaxy was expected").await;
    session.close().await;
}
