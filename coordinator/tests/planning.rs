//! Plans by profiles over real gRPC and TLS: who takes part, and how the cluster moves to another plan
//! without failing a request. The planner and its predictions are the real ones, the profiles those of
//! devices that do not exist, so far apart that one device alone is always best.
#![allow(clippy::unwrap_used)]

mod standin;

use galaxy_common::{
    Bytes, Cache, ClusterProfile, DeviceName, Epoch, Rank, Strategy, Wanted, WireType,
};
use galaxy_coord::{
    Cluster, Fleet, Input, Limits, Notice, Planning, ProfileSource, RemoteFleet, RequestError,
    RunOutput, Session,
    client_memory::DEFAULT_CLIENT_MEMORY,
    fleet::{BoxFuture, Readiness},
    profile,
};
use galaxy_graph::{
    Costs, Disk, LinkRate, Program, budget,
    program::{OpKind, Operation},
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use galaxy_planner::synthetic::{self, SyntheticDevice};
use galaxy_proto::identity::Identity;
use standin::{BYTE, OPERATION, Worker, golden, serve};
use std::{
    fmt::Write as _,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};
use tokio::{net::TcpListener, runtime::Runtime};

/// The devices, the fastest first, and their 10^9 operations per second.
const DEVICES: [(&str, f64); 3] = [("fast", 0.02), ("medium", 0.01), ("slow", 0.001)];

/// Prices every operation as on a worker of slowness 1.
struct Flat;

impl Costs for Flat {
    fn compute(&self, _: &Program, operation: &Operation) -> u64 {
        match operation.kind {
            OpKind::Send { .. } | OpKind::Receive { .. } | OpKind::Load { .. } => 0,
            _ => OPERATION,
        }
    }
    fn disk(&self, _: Rank) -> Option<Disk> {
        Some(Disk { all: 1e9 / BYTE as f64, each: 1e9 / BYTE as f64 })
    }
    fn link(&self, _: Rank, _: Rank) -> LinkRate {
        LinkRate { latency: 0, rate: 1e9, window: 1 << 20, burst: 0 }
    }
}

struct Synthetic;

impl ProfileSource for Synthetic {
    fn collect<'a>(
        &'a self,
        cluster: &'a Cluster,
        model: &'a ModelDir,
        _: &'a Identity,
        progress: profile::Listener<'a>,
    ) -> BoxFuture<'a, Result<ClusterProfile, String>> {
        progress(profile::Progress::Note("devices that do not exist".to_owned()));
        let device = |device: &galaxy_coord::cluster::DeviceConfig| SyntheticDevice {
            name: device.name.clone(),
            gflops: DEVICES.iter().find(|(name, _)| *name == device.name.as_str()).unwrap().1,
            memory_rate: 100.0,
            memory: Bytes(0),
            threads: 1,
            link_rate: 1e9,
            // Nobody splits work over links like these.
            latency: 1e11,
        };
        let devices: Vec<_> = cluster.devices.iter().map(device).collect();
        let (shape, width) = (model.shape_key(), model.format());
        let mut profile = synthetic::profile(model.spec(), &shape, width, &devices);
        let rate = 1e9 / BYTE as f64;
        profile.devices.iter_mut().for_each(|d| (d.disk, d.disk_shared) = (rate, rate));
        Box::pin(std::future::ready(Ok(profile)))
    }
}

struct World {
    workers: Vec<Arc<Worker>>,
    servers: Vec<Option<Runtime>>,
    addresses: Vec<SocketAddr>,
    session: Session,
    notices: Arc<Mutex<Vec<Notice>>>,
    keys: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        Self::of_memory("1GB").await
    }

    /// A cluster whose devices grant `memory` each.
    async fn of_memory(memory: &str) -> Self {
        let keys = standin::keys(&DEVICES.map(|(name, _)| name));
        let mut text = format!(
            "[cluster]\nmodel = {:?}\nidentity = {:?}\npatience = \"500ms\"\n",
            golden(),
            keys.path().join("coordinator")
        );
        let (mut workers, mut servers, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
        for (name, _) in DEVICES {
            let worker = Worker::new(name);
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            servers.push(Some(serve(listener, worker.clone(), keys.path())));
            workers.push(worker);
            addresses.push(address);
            write!(
                text,
                "[[device]]\nname = {name:?}\naddress = \"{address}\"\nmemory = {memory:?}\n"
            )
            .unwrap();
        }
        let cluster = Cluster::parse(&text, Path::new("/")).unwrap();
        let model = Arc::new(ModelDir::open(&cluster.model).unwrap());
        let identity = Identity::load(&cluster.identity).unwrap();
        let notices: Arc<Mutex<Vec<Notice>>> = Arc::default();
        let heard = notices.clone();
        let listener = Arc::new(move |notice| heard.lock().unwrap().push(notice));
        let planning = Planning {
            profiles: Arc::new(Synthetic),
            pricer: |_, _, _, _| Ok(Box::new(Flat)),
            ..Planning::measured()
        };
        let (of, epoch) = (model.clone(), Epoch(7));
        let fleet = RemoteFleet::start_with(cluster, of, identity, epoch, listener, planning);
        let limits = Limits {
            queue: 64,
            timeout: Duration::from_secs(60),
            client_memory: DEFAULT_CLIENT_MEMORY,
            drafts: true,
        };
        let session = Session::new(model, Arc::new(fleet.unwrap()) as Arc<dyn Fleet>, limits);
        Self { workers, servers, addresses, session, notices, keys }
    }

    async fn kill(&mut self, device: usize) {
        standin::kill(self.servers[device].take().unwrap()).await;
    }

    async fn start_again(&mut self, device: usize) {
        let listener = TcpListener::bind(self.addresses[device]).await.unwrap();
        let server = serve(listener, self.workers[device].clone(), self.keys.path());
        self.servers[device] = Some(server);
    }

    fn worker(&self, name: &str) -> &Worker {
        self.workers.iter().find(|w| w.name == name).unwrap()
    }

    /// The devices that have a part in the plan, by rank.
    fn ring(&self) -> Vec<String> {
        let plan = self.session.fleet_status().plan;
        plan.map(|p| p.ring.iter().map(|d| d.name.to_string()).collect()).unwrap_or_default()
    }

    fn state(&self, name: &str) -> (&'static str, String) {
        let devices = self.session.devices();
        let device = devices.into_iter().find(|d| d.name == name).unwrap();
        (device.state, device.detail)
    }

    fn said(&self, word: &str) -> bool {
        self.notices.lock().unwrap().iter().any(|notice| notice.to_string().contains(word))
    }

    async fn until(&self, is_so: impl Fn(&Self) -> bool) {
        while !is_so(self) {
            tokio::task::yield_now().await;
        }
    }

    /// Runs requests of four clients at once until `is_so`, and at least `least` of them; none may fail.
    async fn run(&self, least: usize, is_so: impl Fn(&Self) -> bool) {
        let mut ran = 0;
        while ran < least || !is_so(self) {
            let four = [(); 4].map(|()| tokio::spawn(request(self.session.clone())));
            for one in four {
                one.await.unwrap().unwrap_or_else(|error| panic!("{error}, after {ran} requests"));
                ran += 1;
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.servers.drain(..).flatten().for_each(Runtime::shutdown_background);
    }
}

async fn request(session: Session) -> Result<(), RequestError> {
    let output = RunOutput::Wanted(Wanted::Hidden);
    let done = session.run(vec![Input::Tokens(vec![5, 6, 7])], output, None).await?;
    assert_eq!(done.tensors[0].shape, [3, 42]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_devices_are_named_and_their_loss_stops_no_request() {
    let mut world = World::new().await;
    world.run(1, |_| true).await;
    assert_eq!(world.ring(), ["fast"]);
    assert!(world.said("devices that do not exist"), "profiles were collected");
    for name in ["medium", "slow"] {
        let (state, why) = world.state(name);
        assert!(state == "idle" && !why.is_empty(), "{state}: {why}");
        assert!(world.said(&format!("device {name} has no part")));
        assert_eq!(world.worker(name).placed.lock().unwrap().0, 0, "nothing was sent");
    }
    let status = world.session.fleet_status();
    assert!(status.predicted.is_some_and(|time| !time.is_zero()) && !status.what.is_empty());
    world.kill(1).await;
    world.until(|world| world.state("medium").0 == "lost").await;
    assert_eq!(world.session.readiness(), Readiness::Ready(Epoch(8)));
    world.run(4, |_| true).await;
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plan_moves_off_a_device_that_becomes_slow_and_no_request_fails() {
    let world = World::new().await;
    world.run(8, |_| true).await;
    world.worker("fast").slowness.store(10, Ordering::SeqCst);
    // How soon it is seen is a matter of the drift's own tests: programs here are faster than planning.
    world.run(1, |world| world.ring() == ["medium"]).await;
    world.run(8, |_| true).await;
    assert_eq!(world.session.readiness(), Readiness::Ready(Epoch(9)));
    assert_eq!(world.session.counts().1, 0, "none failed");
    assert_eq!(world.state("fast").0, "idle");
    for words in ["device fast runs outside its profile", "moving between requests to"] {
        assert!(world.said(words), "{words}");
    }
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_refused_placement_the_old_plan_is_back_and_no_request_fails() {
    let world = World::new().await;
    world.run(8, |_| true).await;
    world.worker("medium").refuse.store(true, Ordering::SeqCst);
    world.worker("fast").slowness.store(10, Ordering::SeqCst);
    let back = Readiness::Ready(Epoch(10));
    world.run(1, |world| world.session.readiness() == back).await;
    assert_eq!(world.ring(), ["fast"]);
    assert!(world.said("device medium has not taken its place: no room"));
    assert_eq!(world.session.counts().1, 0, "none failed");
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_answered_while_a_device_fetches_weights_for_a_move() {
    let world = World::new().await;
    world.run(8, |_| true).await;
    let medium = world.worker("medium");
    medium.lacks.store(2, Ordering::SeqCst);
    world.worker("fast").slowness.store(10, Ordering::SeqCst);
    let fetches = |world: &World, of: &str| world.state("medium").1.contains(of);
    world.run(1, |world| fetches(world, "for a better plan fetches 0 B of 2 B")).await;
    world.run(8, |_| true).await;
    medium.comes.add_permits(1);
    world.run(8, |world| fetches(world, "fetches 1 B of 2 B")).await;
    assert_eq!(world.session.readiness(), Readiness::Ready(Epoch(8)));
    assert_eq!(world.ring(), ["fast"]);
    medium.comes.add_permits(1);
    world.run(1, |world| world.ring() == ["medium"]).await;
    assert!(world.said("device medium is ready for a better plan after 0.0 s, 2 B fetched"));
    assert_eq!(world.state("medium").1, "");
    assert_eq!(world.session.counts().1, 0, "none failed");
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_that_a_device_cannot_prepare_for_is_not_begun() {
    let world = World::new().await;
    world.run(8, |_| true).await;
    world.worker("medium").unprepared.store(true, Ordering::SeqCst);
    world.worker("fast").slowness.store(10, Ordering::SeqCst);
    let why = "the plan stays: device medium cannot make ready for a better one: its disk is full";
    world.run(1, |world| world.said(why)).await;
    world.run(8, |_| true).await;
    assert_eq!(world.session.readiness(), Readiness::Ready(Epoch(8)), "nobody was placed anew");
    assert_eq!((world.ring(), world.session.counts().1), (vec!["fast".to_owned()], 0));
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_lost_while_it_fetches_is_not_waited_for() {
    let mut world = World::new().await;
    world.run(8, |_| true).await;
    world.worker("medium").lacks.store(1, Ordering::SeqCst);
    world.worker("fast").slowness.store(10, Ordering::SeqCst);
    world.run(1, |world| world.state("medium").1.contains("for a better plan")).await;
    world.kill(1).await;
    world.run(1, |world| world.said("the plan stays: device medium cannot make ready")).await;
    assert_eq!((world.ring(), world.session.counts().1), (vec!["fast".to_owned()], 0));
    assert_eq!(world.session.readiness(), Readiness::Ready(Epoch(8)));
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plan_stays_when_devices_are_slower_but_no_plan_is_better() {
    let world = World::new().await;
    world.run(8, |_| true).await;
    // Twice as slow as planned for, it is as slow as the next one.
    for worker in &world.workers {
        worker.slowness.store(2, Ordering::SeqCst);
    }
    world.run(16, |world| world.said("the plan stays")).await;
    assert_eq!((world.ring(), world.session.counts().1), (vec!["fast".to_owned()], 0));
    assert_eq!(world.session.readiness(), Readiness::Ready(Epoch(8)));
    world.session.close().await;
}

/// The memory that the model takes on one device, less that of two of its smallest matrices.
fn too_little() -> String {
    let model = ModelDir::open(&golden()).unwrap();
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy: Strategy::Local,
        wire: WireType::F32,
        tiles: 1,
        max_rows: galaxy_coord::cluster::DEFAULT_MAX_ROWS,
        cache: Cache::NONE,
    };
    let name = DeviceName::new("fast").unwrap();
    let member = Member { name, budget: Bytes(1 << 40), threads: 1, share: 1.0 };
    let plan = share::plan(model.spec(), &terms, &[member]).unwrap();
    let needs = budget::needs_all(model.spec(), model.formats(), &plan).unwrap()[0];
    format!("{}B", needs.total().0 - 30_000)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_slower_than_its_profile_is_detected() {
    let world = World::of_memory(&too_little()).await;
    world.run(8, |_| true).await;
    let plan = world.session.fleet_status().plan.unwrap();
    assert!(plan.ring.iter().any(|device| device.streaming.is_some()), "{plan:?}");
    for worker in &world.workers {
        worker.disk.store(10, Ordering::SeqCst);
    }
    world.run(1, |world| world.said("the disk of device")).await;
    world.run(8, |world| world.said("the plan stays") || world.said("moving")).await;
    assert_eq!(world.session.counts().1, 0, "none failed");
    world.session.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_device_is_planned_around_and_taken_in_again_when_back() {
    let mut world = World::new().await;
    world.run(1, |_| true).await;
    assert_eq!(world.ring(), ["fast"]);
    world.kill(0).await;
    let ready = |world: &World| matches!(world.session.readiness(), Readiness::Ready(_));
    world.until(|world| world.ring() == ["medium"] && ready(world)).await;
    assert_eq!(world.state("fast").0, "lost");
    world.run(4, |_| true).await;
    world.start_again(0).await;
    world.run(1, |world| world.ring() == ["fast"]).await;
    assert!(world.said("moving between requests to"));
    assert_eq!(world.session.counts().1, 0, "none failed");
    world.session.close().await;
}
