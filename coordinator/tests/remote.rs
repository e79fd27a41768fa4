//! The fleet over real gRPC and TLS, with a worker that does what the test says.
#![allow(clippy::unwrap_used)]

mod standin;

use galaxy_common::{BatchShape, DeviceName, Epoch, Wanted};
use galaxy_coord::{
    Cluster, Fleet, Input, Limits, RemoteFleet, RequestError, RunOutput, Session,
    client_memory::DEFAULT_CLIENT_MEMORY,
    fleet::{Readiness, Task},
};
use galaxy_model::ModelDir;
use galaxy_proto::{
    PROTOCOL,
    identity::{Authority, Identity, Removed, Role},
};
use standin::{Worker, golden, serve};
use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{net::TcpListener, runtime::Runtime};

struct World {
    keys: tempfile::TempDir,
    worker: Arc<Worker>,
    server: Option<Runtime>,
    address: SocketAddr,
}

impl World {
    async fn new() -> Self {
        let keys = standin::keys(&["solo"]);
        let worker = Worker::new("solo");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Some(serve(listener, worker.clone(), keys.path()));
        Self { keys, worker, server, address }
    }

    fn coordinate(&self) -> Session {
        self.coordinate_within(Duration::from_secs(60))
    }

    /// A session that gives callers without a time of their own `timeout`.
    fn coordinate_within(&self, timeout: Duration) -> Session {
        let (model, fleet) = self.fleet();
        Session::new(
            model,
            fleet,
            Limits { queue: 8, timeout, client_memory: DEFAULT_CLIENT_MEMORY, drafts: true },
        )
    }

    fn fleet(&self) -> (Arc<ModelDir>, Arc<dyn Fleet>) {
        self.fleet_of(Identity::load(&self.keys.path().join("coordinator")).unwrap())
    }

    fn fleet_of(&self, identity: Identity) -> (Arc<ModelDir>, Arc<dyn Fleet>) {
        let text = format!(
            "[cluster]\nmodel = {:?}\nidentity = {:?}\nstrategy = \"local\"\n[[device]]\nname = \"solo\"\naddress = \"{}\"\nmemory = \"1GB\"\nshare = 1.0\n",
            golden(),
            self.keys.path().join("coordinator"),
            self.address
        );
        let cluster = Cluster::parse(&text, Path::new("/")).unwrap();
        let model = Arc::new(ModelDir::open(&cluster.model).unwrap());
        let quiet = Arc::new(|_| ());
        let fleet = RemoteFleet::start(cluster, model.clone(), identity, Epoch(7), quiet).unwrap();
        (model, Arc::new(fleet))
    }

    async fn kill(&mut self) {
        standin::kill(self.server.take().unwrap()).await;
    }

    async fn restart(&mut self) {
        *self.worker.placed.lock().unwrap() = (0, 0, None);
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

async fn run(session: &Session) -> Result<(), RequestError> {
    run_within(session, None).await
}

async fn run_within(session: &Session, timeout: Option<Duration>) -> Result<(), RequestError> {
    let output = RunOutput::Wanted(Wanted::Hidden);
    let done = session.run(vec![Input::Tokens(vec![5, 6, 7])], output, timeout).await?;
    assert_eq!(done.tensors[0].shape, [3, 42]);
    Ok(())
}

/// Waits until the readiness shows a word.
async fn until(session: &Session, word: &str) {
    loop {
        if format!("{:?} {:?}", session.readiness(), session.devices()).contains(word) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_killed_in_a_program_is_named_and_used_again_once_back() {
    let mut world = World::new().await;
    let session = world.coordinate();
    run(&session).await.unwrap();
    world.worker.hang.store(true, Ordering::SeqCst);
    let asking = session.clone();
    world.worker.running.notified().await;
    let request = tokio::spawn(async move { run(&asking).await });
    world.worker.running.notified().await;
    world.kill().await;
    until(&session, "\"lost\"").await;
    // One that has little time is told of whom it waited for.
    let error = run_within(&session, Some(Duration::from_millis(20))).await.expect_err("lost");
    assert_eq!((error.code(), error.retryable()), ("unavailable", true), "{error}");
    assert_eq!(error.device().unwrap().as_str(), "solo");
    assert!(error.to_string().contains("device solo was lost"), "{error}");
    assert!(!request.is_finished(), "it waits");
    world.worker.hang.store(false, Ordering::SeqCst);
    world.restart().await;
    // It is run again.
    request.await.unwrap().unwrap();
    run(&session).await.unwrap();
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_exceeds_its_time_names_the_device_and_is_retryable() {
    let world = World::new().await;
    world.worker.hang.store(true, Ordering::SeqCst);
    let (_, fleet) = world.fleet();
    let mut readiness = fleet.readiness();
    readiness.wait_for(|r| matches!(r, Readiness::Ready(_))).await.unwrap();
    let shape = BatchShape::single(3, Wanted::Hidden).unwrap();
    let error = fleet.execute(Task::new(shape, vec![5, 6, 7]), Duration::from_millis(20)).await;
    let error = error.expect_err("too long");
    assert_eq!((error.code(), error.retryable()), ("device_failed", true), "{error}");
    assert_eq!(error.device().unwrap().as_str(), "solo");
    readiness.wait_for(|r| *r == Readiness::Ready(Epoch(9))).await.unwrap();
    fleet.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_queued_behind_a_failed_program_is_answered() {
    let world = World::new().await;
    // Longer than a cluster is waited for.
    let session = world.coordinate_within(Duration::from_millis(2500));
    until(&session, "Ready(").await;
    world.worker.hang.store(true, Ordering::SeqCst);
    let (first, second) = (session.clone(), session.clone());
    let first = tokio::spawn(async move { run(&first).await });
    world.worker.running.notified().await;
    let long = Some(Duration::from_secs(240));
    let second = tokio::spawn(async move { run_within(&second, long).await });
    while session.admission().queued() == 0 {
        tokio::task::yield_now().await;
    }
    let error = first.await.unwrap().expect_err("beyond the limit");
    world.worker.hang.store(false, Ordering::SeqCst);
    assert_eq!(error.code(), "device_failed", "{error}");
    second.await.unwrap().unwrap();
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callers_longer_timeout_replaces_the_default() {
    let world = World::new().await;
    let session = world.coordinate_within(Duration::from_millis(50));
    until(&session, "Ready(").await;
    world.worker.hang.store(true, Ordering::SeqCst);
    let asking = session.clone();
    let long = Some(Duration::from_secs(240));
    let request = tokio::spawn(async move { run_within(&asking, long).await });
    world.worker.running.notified().await;
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    for _ in 0..4 {
        ticks.tick().await;
    }
    world.worker.hang.store(false, Ordering::SeqCst);
    request.await.unwrap().unwrap();
    session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_a_later_epoch_is_placed_in_the_next_one() {
    let world = World::new().await;
    world.worker.placed.lock().unwrap().0 = 1 << 50;
    let (_, fleet) = world.fleet();
    let mut readiness = fleet.readiness();
    let ready = readiness.wait_for(|r| matches!(r, Readiness::Ready(_))).await.unwrap().clone();
    assert_eq!(ready, Readiness::Ready(Epoch((1 << 50) + 1)));
    fleet.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_another_protocol_is_named_until_it_is_updated() {
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
async fn a_device_is_not_placed_above_the_memory_that_its_worker_grants() {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_are_added_and_removed_while_the_cluster_runs() {
    let keys = standin::keys(&["solo", "twin"]);
    let start = async |name: &str| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let worker = Worker::new(name);
        (worker.clone(), address, serve(listener, worker, keys.path()))
    };
    let ((solo, at, first), (twin, twin_at, second)) = (start("solo").await, start("twin").await);
    let text = |more: &str| {
        format!(
            "[cluster]\nmodel = {:?}\nidentity = {:?}\nstrategy = \"local\"\n[[device]]\nname = \"solo\"\naddress = \"{at}\"\nmemory = \"1GB\"\nshare = 2.0\n{more}",
            golden(),
            keys.path().join("coordinator"),
        )
    };
    let alone = Cluster::parse(&text(""), Path::new("/")).unwrap();
    let more = format!("[[device]]\nname = \"twin\"\naddress = \"{twin_at}\"\nmemory = \"1GB\"\n");
    let both = Cluster::parse(&text(&more), Path::new("/")).unwrap();
    let model = Arc::new(ModelDir::open(&alone.model).unwrap());
    let identity = Identity::load(&alone.identity).unwrap();
    let (devices, quiet) = (alone.devices.clone(), Arc::new(|_| ()));
    let fleet = RemoteFleet::start(alone, model.clone(), identity.clone(), Epoch(7), quiet);
    let fleet = Arc::new(fleet.unwrap());
    let limits = Limits {
        queue: 8,
        timeout: Duration::from_secs(300),
        client_memory: DEFAULT_CLIENT_MEMORY,
        drafts: true,
    };
    let session = Session::new(model, fleet.clone(), limits);
    run(&session).await.unwrap();
    let epoch = |session: &Session| match session.readiness() {
        Readiness::Ready(epoch) => Some(epoch),
        _ => None,
    };
    let before = epoch(&session).unwrap();

    fleet.update(both.devices).await;
    // It is planned with: a later epoch, in which strategy local leaves it idle.
    until(&session, "idle").await;
    while epoch(&session).is_none_or(|now| now <= before) {
        tokio::task::yield_now().await;
    }
    run(&session).await.unwrap();
    assert_eq!(session.devices().len(), 2);
    assert!(twin.denied.lock().unwrap().is_none(), "nobody was removed");

    let mut removed = Removed { version: 1, ..Removed::default() };
    removed.names.insert(DeviceName::new("twin").unwrap());
    assert!(identity.denied().take(removed));
    fleet.update(devices).await;
    while session.devices().len() != 1 || solo.denied.lock().unwrap().is_none() {
        tokio::task::yield_now().await;
    }
    run(&session).await.unwrap();
    session.close().await;
    for server in [first, second] {
        server.shutdown_background();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_gets_the_list_of_removed_members_before_its_placement() {
    let world = World::new().await;
    let identity = Identity::load(&world.keys.path().join("coordinator")).unwrap();
    let mut removed = Removed { version: 3, ..Removed::default() };
    removed.names.insert(DeviceName::new("pi-9").unwrap());
    identity.denied().take(removed.clone());
    let (model, fleet) = world.fleet_of(identity);
    let limits = Limits {
        queue: 8,
        timeout: Duration::from_secs(300),
        client_memory: DEFAULT_CLIENT_MEMORY,
        drafts: true,
    };
    let session = Session::new(model, fleet, limits);
    run(&session).await.unwrap();
    let (told, early) = world.worker.denied.lock().unwrap().clone().unwrap();
    assert!(early, "before its place");
    assert_eq!(Removed::try_from(told), Ok(removed));
    session.close().await;
}
