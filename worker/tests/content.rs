//! Models that workers do not have: real workers, and a coordinator's part played here.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{Bytes, Cache, DeviceName, Plan, Strategy, WireType};
use galaxy_graph::share::{self, Member, Terms};
use galaxy_model::{
    ModelDir,
    manifest::{Digest, Manifest},
    pieces::Pieces,
    shape::Shape,
};
use galaxy_proto::{
    channel::connect,
    fault::{Fault, from_status},
    identity::{Authority, Identity, Role},
    v1::{self, content_client::ContentClient, supplied::Event, worker_client::WorkerClient},
};
use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{BufRead, BufReader},
    ops::ControlFlow,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

const LONG: Duration = Duration::from_secs(20);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

/// A model, and all that a coordinator knows of it.
struct Model {
    dir: Arc<ModelDir>,
    pieces: Pieces,
    manifest: Vec<u8>,
}

impl Model {
    fn of(path: &Path, shape: Shape) -> Arc<Self> {
        fs::create_dir_all(path).unwrap();
        shape.write(path, u64::MAX, &mut |_| {}).unwrap();
        let dir = ModelDir::open(path).unwrap();
        let config = fs::read(path.join("config.json")).unwrap();
        let go_on = &mut |_, _| ControlFlow::Continue(());
        let manifest = Manifest::of(&dir, config, go_on).unwrap().unwrap().to_bytes().unwrap();
        Arc::new(Self { pieces: dir.pieces().unwrap(), dir: Arc::new(dir), manifest })
    }

    /// Bytes of these pieces.
    fn bytes(&self, pieces: &BTreeSet<u32>) -> u64 {
        pieces.iter().map(|piece| self.pieces.bytes(*piece)).sum()
    }

    fn plan(&self, shares: &[f64]) -> Plan {
        let strategy = if shares.len() == 1 { Strategy::Local } else { Strategy::Galaxy };
        let terms = Terms {
            model: self.dir.name(),
            fingerprint: self.dir.fingerprint(),
            strategy,
            wire: WireType::F32,
            tiles: 1,
            max_rows: 64,
            cache: Cache::NONE,
        };
        let member = |(i, share): (usize, &f64)| Member {
            name: name(&format!("d{i}")),
            budget: Bytes(1 << 30),
            threads: 1,
            share: *share,
        };
        let members: Vec<_> = shares.iter().enumerate().map(member).collect();
        share::plan(self.dir.spec(), &terms, &members).unwrap()
    }
}

/// Two layers, some 60 pieces.
fn small() -> Shape {
    Shape { vocabulary: 4000, ..Shape::bert(2, 256, 4) }
}

/// How the coordinator of a test supplies.
#[derive(Clone, Default)]
struct Manner {
    /// Gives nothing before this holds.
    until: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
    /// Gives so many pieces, and then no more; 0: all.
    most: usize,
    /// Changes a byte of each piece.
    damage: bool,
}

/// What one placement asked the coordinator for.
#[derive(Default)]
struct Asked {
    pieces: Mutex<BTreeSet<u32>>,
    manifest: Mutex<bool>,
}

impl Asked {
    fn pieces(&self) -> BTreeSet<u32> {
        self.pieces.lock().unwrap().clone()
    }
}

struct World {
    dir: TempDir,
    authority: Authority,
    desk: Identity,
    epoch: u64,
}

struct Worker {
    child: Child,
    address: String,
    client: WorkerClient<Channel>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("keys"), "home").unwrap();
        let desk = authority.issue(&name("desk"), Role::Coordinator, 1).unwrap();
        let desk = Identity::load(&desk).unwrap();
        Self { dir, authority, desk, epoch: 0 }
    }

    /// Where a worker's log is.
    fn log(&self, device: &str) -> PathBuf {
        self.dir.path().join(format!("{device}.log"))
    }

    fn cache(&self, device: &str) -> PathBuf {
        self.dir.path().join("cache").join(device)
    }

    async fn worker(&self, device: &str, flags: &[&str]) -> Worker {
        let keys = self.dir.path().join("keys").join(device);
        if !keys.exists() {
            self.authority.issue(&name(device), Role::Device, 1).unwrap();
        }
        let mut child = Command::new(env!("CARGO_BIN_EXE_galaxy-worker"))
            .args(["--listen", "127.0.0.1:0", "--threads", "1", "--identity"])
            .arg(keys)
            .arg("--cache")
            .arg(self.cache(device))
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(fs::File::create(self.log(device)).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        let to = (&name(device), Role::Device);
        let channel = connect(&address, Some(&self.desk), to, LONG).await.unwrap();
        Worker { child, address, client: WorkerClient::new(channel) }
    }

    /// Places a plan on all workers, and gives what each was told and asked for.
    async fn place(
        &mut self,
        model: &Arc<Model>,
        plan: &Plan,
        workers: &[&Worker],
        manner: Manner,
    ) -> Vec<(Result<v1::PlaceReady, Fault>, Arc<Asked>)> {
        self.epoch += 1;
        self.all(Call::Place, model, plan, workers, manner).await
    }

    /// Has all workers make ready for a plan.
    async fn prepare(
        &self,
        model: &Arc<Model>,
        plan: &Plan,
        workers: &[&Worker],
        load: bool,
    ) -> Vec<(Result<v1::PlaceReady, Fault>, Arc<Asked>)> {
        self.all(Call::Prepare { load }, model, plan, workers, Manner::default()).await
    }

    async fn all(
        &self,
        call: Call,
        model: &Arc<Model>,
        plan: &Plan,
        workers: &[&Worker],
        manner: Manner,
    ) -> Vec<(Result<v1::PlaceReady, Fault>, Arc<Asked>)> {
        let mut placing = tokio::task::JoinSet::new();
        for (rank, worker) in workers.iter().enumerate() {
            let peers = workers.iter().zip(&plan.ring).map(|(worker, device)| v1::Peer {
                name: device.name.to_string(),
                address: worker.address.clone(),
                plain_port: 0,
            });
            let request = v1::PlaceRequest {
                epoch: self.epoch,
                plan: postcard::to_stdvec(plan).unwrap(),
                rank: rank as u32,
                peers: peers.collect(),
                memory_bytes: 0,
            };
            let (client, model) = (worker.client.clone(), model.clone());
            let (asked, manner) = (Arc::new(Asked::default()), manner.clone());
            placing.spawn(async move {
                (rank, placed(call, client, model, request, manner, asked.clone()).await, asked)
            });
        }
        let mut all = placing.join_all().await;
        all.sort_by_key(|(rank, ..)| *rank);
        all.into_iter().map(|(_, ready, asked)| (ready, asked)).collect()
    }

    /// Places a plan of one device.
    async fn alone(
        &mut self,
        model: &Arc<Model>,
        worker: &Worker,
        manner: Manner,
    ) -> (Result<v1::PlaceReady, Fault>, Arc<Asked>) {
        let plan = model.plan(&[1.0]);
        self.place(model, &plan, &[worker], manner).await.remove(0)
    }
}

/// What a worker is asked to do with a plan.
#[derive(Clone, Copy)]
enum Call {
    Place,
    Prepare { load: bool },
}

async fn placed(
    call: Call,
    mut client: WorkerClient<Channel>,
    model: Arc<Model>,
    request: v1::PlaceRequest,
    manner: Manner,
    asked: Arc<Asked>,
) -> Result<v1::PlaceReady, Fault> {
    let fault = |status| from_status(&status);
    let answer = match call {
        Call::Place => client.place(request).await,
        Call::Prepare { load } => {
            client.prepare(v1::PrepareRequest { place: Some(request), load }).await
        }
    };
    let mut events = answer.map_err(fault)?.into_inner();
    let mut supplies = tokio::task::JoinSet::new();
    loop {
        let event = tokio::time::timeout(LONG, events.message()).await.expect("no event in time");
        match event.map_err(fault)?.expect("it ends with ready or an error").event.unwrap() {
            v1::place_event::Event::Ready(ready) => return Ok(ready),
            v1::place_event::Event::Progress(_) => {}
            v1::place_event::Event::Wanted(_) => {
                let (client, model, asked) = (client.clone(), model.clone(), asked.clone());
                supplies.spawn(supply(client, model, manner.clone(), asked));
            }
        }
    }
}

async fn supply(
    mut client: WorkerClient<Channel>,
    model: Arc<Model>,
    manner: Manner,
    asked: Arc<Asked>,
) {
    let (supplied, stream) = mpsc::channel(4);
    let offer = v1::Offer {
        content: Digest::of(&model.manifest).0.to_vec(),
        manifest_bytes: model.manifest.len() as u64,
        fingerprint: model.dir.fingerprint().to_owned(),
    };
    let send = async |event| drop(supplied.send(v1::Supplied { event: Some(event) }).await);
    send(Event::Offer(offer)).await;
    let mut wants = client.supply(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let mut given = 0;
    while let Ok(Some(wanted)) = wants.message().await {
        if wanted.manifest {
            *asked.manifest.lock().unwrap() = true;
            for part in model.manifest.chunks(1000) {
                send(Event::Manifest(part.to_vec())).await;
            }
        }
        for piece in wanted.pieces {
            asked.pieces.lock().unwrap().insert(piece);
            if manner.most > 0 && given >= manner.most {
                continue;
            }
            if let Some(holds) = &manner.until {
                until(&**holds).await;
            }
            given += 1;
            let mut data = Vec::new();
            model.dir.read_piece(&model.pieces, piece, &mut data).unwrap();
            data[0] ^= u8::from(manner.damage);
            send(Event::Piece(v1::Piece { piece, data: data.into() })).await;
        }
    }
}

/// Waits for a condition.
async fn until(holds: &(dyn Fn() -> bool + Send + Sync)) {
    let mut looks = tokio::time::interval(Duration::from_millis(5));
    let wait = async {
        while !holds() {
            looks.tick().await;
        }
    };
    tokio::time::timeout(LONG, wait).await.expect("waited in vain");
}

/// The only content of a cache.
fn content(cache: &Path) -> PathBuf {
    let found = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path());
    let mut dirs: Vec<_> = found.filter(|path| path.is_dir()).collect();
    assert_eq!(dirs.len(), 1, "{dirs:?}");
    dirs.remove(0)
}

/// Pieces on the map of a content.
fn on_the_map(content: &Path) -> u32 {
    fs::read(content.join("map")).unwrap_or_default().iter().map(|byte| byte.count_ones()).sum()
}

/// The same of a cache that may not be there yet.
fn in_cache(cache: &Path) -> u32 {
    let Ok(mut found) = fs::read_dir(cache) else { return 0 };
    let content = found.find_map(|entry| entry.ok().filter(|entry| entry.path().is_dir()));
    content.map_or(0, |content| on_the_map(&content.path()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_goes_on_from_where_it_was() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let all = u64::from(model.pieces.count());
    let first = 20;
    {
        let worker = world.worker("d0", &[]).await;
        let (cache, id) = (world.cache("d0"), worker.child.id());
        let placing = world.alone(&model, &worker, Manner { most: first, ..Manner::default() });
        let killed = async {
            until(&|| in_cache(&cache) >= first as u32).await;
            let id = id.to_string();
            assert!(Command::new("kill").args(["-s", "KILL", &id]).status().unwrap().success());
        };
        let ((refused, asked), ()) = tokio::join!(placing, killed);
        assert!(refused.is_err());
        assert!(asked.pieces().len() > first, "more was asked for than came");
    }
    let worker = world.worker("d0", &[]).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert!(!*asked.manifest.lock().unwrap(), "it has the manifest already");
    assert_eq!(asked.pieces().len() as u64, all - first as u64);
    assert_eq!(ready.unwrap().fetched_bytes, model.bytes(&asked.pieces()));
    // And now it has all.
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    let ready = ready.unwrap();
    assert!(ready.reused && ready.fetched_bytes == 0 && asked.pieces().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_damaged_on_disk_is_fetched_again_and_nothing_else() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    drop({
        let worker = world.worker("d0", &[]).await;
        let (ready, _) = world.alone(&model, &worker, Manner::default()).await;
        assert_eq!(ready.unwrap().fetched_bytes, model.pieces.total());
        worker
    });
    let piece = model.pieces.count() / 2;
    let data = content(&world.cache("d0")).join("data");
    let file = OpenOptions::new().read(true).write(true).open(data).unwrap();
    let (at, mut byte) = (model.pieces.span(piece).start + 7, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    let worker = world.worker("d0", &[]).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(asked.pieces(), BTreeSet::from([piece]));
    assert_eq!(ready.unwrap().fetched_bytes, model.pieces.bytes(piece));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_with_a_wrong_digest_are_refused() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    let damage = Manner { damage: true, ..Manner::default() };
    let fault = world.alone(&model, &worker, damage).await.0.unwrap_err();
    assert_eq!((fault.code.as_str(), fault.retryable), ("bad_content", false), "{fault}");
    assert_eq!(on_the_map(&content(&world.cache("d0"))), 0, "nothing of it was kept");
    // A coordinator that is right is believed.
    world.alone(&model, &worker, Manner::default()).await.0.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_plan_fetches_what_is_missing() {
    let mut world = World::new();
    let shape = Shape { vocabulary: 4000, ..Shape::bert(2, 512, 8) };
    let model = Model::of(&world.dir.path().join("wide"), shape);
    let workers = [world.worker("d0", &[]).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let (first, second) = (model.plan(&[3.0, 1.0]), model.plan(&[1.0, 3.0]));
    let placed = world.place(&model, &first, &all, Manner::default()).await;
    let fetched = |placed: &[(Result<v1::PlaceReady, Fault>, _)]| {
        let one =
            |(ready, _): &(Result<v1::PlaceReady, Fault>, _)| ready.as_ref().unwrap().fetched_bytes;
        [one(&placed[0]), one(&placed[1])]
    };
    let before = fetched(&placed);
    assert!(before[1] < model.pieces.total() * 6 / 10, "{before:?} of {}", model.pieces.total());
    assert!(before[0] > before[1]);
    // The small one grows, and the large one has all that it needs.
    let placed = world.place(&model, &second, &all, Manner::default()).await;
    let [shrunk, grown] = fetched(&placed);
    assert_eq!(shrunk, 0);
    assert!(grown > 0 && grown < model.pieces.total() / 2, "{grown}");
    // And back, where all is there still.
    let placed = world.place(&model, &first, &all, Manner::default()).await;
    assert_eq!(fetched(&placed), [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_later_plan_needs_comes_while_another_runs() {
    let mut world = World::new();
    let shape = Shape { vocabulary: 4000, ..Shape::bert(2, 512, 8) };
    let model = Model::of(&world.dir.path().join("wide"), shape);
    let workers = [world.worker("d0", &[]).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let (first, second) = (model.plan(&[3.0, 1.0]), model.plan(&[1.0, 3.0]));
    for (ready, _) in world.place(&model, &first, &all, Manner::default()).await {
        ready.unwrap();
    }
    let prepared = world.prepare(&model, &second, &all, true).await;
    let ready = |rank: usize| prepared[rank].0.as_ref().unwrap();
    assert_eq!((ready(0).fetched_bytes, ready(0).weight_bytes), (0, 0));
    let grown = ready(1).fetched_bytes;
    assert!(grown > 0 && grown < model.pieces.total() / 2, "{grown}");
    for worker in &workers {
        let health = worker.client.clone().health(v1::HealthRequest {}).await.unwrap();
        assert_eq!(health.into_inner().epoch, 1, "it keeps its place");
    }
    // And then it takes no network.
    for (ready, asked) in world.place(&model, &second, &all, Manner::default()).await {
        assert_eq!((ready.unwrap().fetched_bytes, asked.pieces().len()), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_placement_ends_what_is_fetched_ahead_and_goes_on_from_there() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    let (plan, cache, some) = (model.plan(&[1.0]), world.cache("d0"), 20);
    let (client, of) = (worker.client.clone(), model.clone());
    let request = v1::PlaceRequest {
        plan: postcard::to_stdvec(&plan).unwrap(),
        peers: vec![v1::Peer { name: "d0".to_owned(), ..v1::Peer::default() }],
        ..v1::PlaceRequest::default()
    };
    let manner = Manner { most: some, ..Manner::default() };
    let preparing =
        placed(Call::Prepare { load: false }, client, of, request, manner, Arc::default());
    let preparing = tokio::spawn(preparing);
    until(&|| in_cache(&cache) >= some as u32).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(asked.pieces().len(), model.pieces.count() as usize - some);
    assert!(ready.unwrap().fetched_bytes > 0);
    let fault = preparing.await.unwrap().unwrap_err();
    assert_eq!((fault.code.as_str(), fault.retryable), ("given_up", true), "{fault}");
    // Without a place it loads what it prepares for.
    let epoch = world.epoch;
    worker.client.clone().cancel(v1::CancelRequest { epoch }).await.unwrap();
    let (other, more) = (Shape { vocabulary: 4100, ..small() }, world.dir.path().join("other"));
    let other = Model::of(&more, other);
    let plan = other.plan(&[1.0]);
    let idle = world.prepare(&other, &plan, &[&worker], true).await.remove(0);
    let read = idle.0.unwrap().read_bytes;
    assert!(read > 0);
    let ready = world.alone(&other, &worker, Manner::default()).await.0.unwrap();
    assert_eq!((ready.reused, ready.weight_bytes, ready.read_bytes), (true, read, 0));
    // One that drains prepares for nothing.
    worker.client.clone().drain(v1::DrainRequest { off: false }).await.unwrap();
    let drains = world.prepare(&model, &plan, &[&worker], true).await;
    assert_eq!(drains[0].0.as_ref().unwrap_err().code, "given_up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_prepared_beside_a_placement() {
    let world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    let request = v1::PlaceRequest {
        epoch: 1,
        plan: postcard::to_stdvec(&model.plan(&[1.0])).unwrap(),
        peers: vec![v1::Peer { name: "d0".to_owned(), ..v1::Peer::default() }],
        ..v1::PlaceRequest::default()
    };
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(Asked::default()));
    let gate = open.clone();
    let until_open: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(move || gate.load(SeqCst));
    let shut = Manner { until: Some(until_open), ..Manner::default() };
    let call = |call, manner, asked| {
        tokio::spawn(placed(
            call,
            worker.client.clone(),
            model.clone(),
            request.clone(),
            manner,
            asked,
        ))
    };
    let placing = call(Call::Place, shut, asked.clone());
    until(&|| !asked.pieces().is_empty()).await;
    let prepare = Call::Prepare { load: true };
    let fault = call(prepare, Manner::default(), Arc::default()).await.unwrap().unwrap_err();
    assert_eq!(fault.code, "given_up", "{fault}");
    open.store(true, SeqCst);
    assert_eq!(placing.await.unwrap().unwrap().fetched_bytes, model.pieces.total());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_a_cache_has_no_room_beside_what_runs_it_all_comes_with_the_place() {
    let mut world = World::new();
    let shape = Shape { vocabulary: 4000, ..Shape::bert(2, 512, 8) };
    let model = Model::of(&world.dir.path().join("wide"), shape);
    // The one in the middle has other heads and columns in each.
    let (first, second) = (model.plan(&[1.0, 1.0, 2.0]), model.plan(&[2.0, 1.0, 1.0]));
    let limits = {
        let mut world = World::new();
        let workers = [
            world.worker("d0", &[]).await,
            world.worker("d1", &[]).await,
            world.worker("d2", &[]).await,
        ];
        let all: Vec<_> = workers.iter().collect();
        let placed = world.place(&model, &first, &all, Manner::default()).await;
        let prepared = world.prepare(&model, &second, &all, true).await;
        [&placed, &prepared].map(|ready| ready[1].0.as_ref().unwrap().fetched_bytes)
    };
    let limit = format!("{}B", limits[0] + limits[1] / 2);
    let workers = [
        world.worker("d0", &[]).await,
        world.worker("d1", &["--cache-bytes", &limit]).await,
        world.worker("d2", &[]).await,
    ];
    let all: Vec<_> = workers.iter().collect();
    world.place(&model, &first, &all, Manner::default()).await[1].0.as_ref().unwrap();
    let held = on_the_map(&content(&world.cache("d1")));
    let prepared = world.prepare(&model, &second, &all, true).await;
    assert_eq!(prepared[1].0.as_ref().unwrap().fetched_bytes, 0);
    assert_eq!(on_the_map(&content(&world.cache("d1"))), held, "what runs has lost nothing");
    let placed = world.place(&model, &second, &all, Manner::default()).await;
    assert!(placed[1].0.as_ref().unwrap().fetched_bytes >= limits[0] / 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_give_each_other_what_they_have() {
    let mut world = World::new();
    let shape = Shape { vocabulary: 4000, ..Shape::bert(4, 512, 8) };
    let models = world.dir.path().join("models");
    let model = Model::of(&models.join("wide"), shape);
    // One has the directory, the other nothing.
    let flags = ["--models", models.to_str().unwrap()];
    let workers = [world.worker("d0", &flags).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let plan = model.plan(&[1.0, 1.0]);
    // The coordinator gives nothing before the other device has given much.
    let cache = world.cache("d1");
    let until = Arc::new(move || in_cache(&cache) >= 50);
    let late = Manner { until: Some(until), ..Manner::default() };
    let placed = world.place(&model, &plan, &all, late).await;
    let ready = |rank: usize| placed[rank].0.as_ref().unwrap();
    assert_eq!(ready(0).fetched_bytes, 0, "it has the directory");
    assert!(placed[0].1.pieces().is_empty());
    let (fetched, from_peers) = (ready(1).fetched_bytes, ready(1).peer_bytes);
    assert!(fetched < model.pieces.total() * 8 / 10);
    assert_eq!(from_peers, fetched - model.bytes(&placed[1].1.pieces()));
    assert!(from_peers > fetched / 2, "{from_peers} of {fetched}");
}

/// A way to a device on which what it sends goes at so many bytes in a second, or fewer.
async fn slow_way(to: String, rate: usize) -> String {
    const EACH: Duration = Duration::from_millis(20);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let (mut from, mut back) = near.into_split();
            let (mut sent, mut onward) = TcpStream::connect(&to).await.unwrap().into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from, &mut onward).await });
            tokio::spawn(async move {
                let (mut some, mut ticks) = (vec![0; rate / 50], tokio::time::interval(EACH));
                while let Ok(count @ 1..) = sent.read(&mut some).await {
                    ticks.tick().await;
                    back.write_all(&some[..count]).await?;
                }
                back.shutdown().await
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_device_is_not_waited_for() {
    let mut world = World::new();
    let models = world.dir.path().join("models");
    let shape = Shape { vocabulary: 4000, ..Shape::bert(1, 1024, 16) };
    let model = Model::of(&models.join("wide"), shape);
    let flags = ["--models", models.to_str().unwrap()];
    let mut workers = [world.worker("d0", &flags).await, world.worker("d1", &[]).await];
    // A piece of a matrix takes it five seconds.
    workers[0].address = slow_way(workers[0].address.clone(), 50 << 10).await;
    // All vectors have come of it, but one that the coordinator is asked for: it is at a matrix.
    let small = |piece: &u32| model.pieces.bytes(*piece) < 100 << 10;
    let vectors = (0..model.pieces.count()).filter(small).count() as u32;
    let (cache, log) = (world.cache("d1"), world.log("d1"));
    let until = Arc::new(move || in_cache(&cache) >= vectors - 1);
    let late = Manner { until: Some(until), ..Manner::default() };
    let plan = model.plan(&[1.0, 1.0]);
    let placed = world.place(&model, &plan, &workers.iter().collect::<Vec<_>>(), late).await;
    let ready = placed[1].0.as_ref().unwrap();
    assert!(ready.peer_bytes < 1 << 20, "{} of {}", ready.peer_bytes, ready.fetched_bytes);
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("the coordinator is faster"), "{log}");
}

/// A copy of a model in which every piece of half a cut is another, though its fingerprint is not.
fn forged(model: &Model, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(model.dir.path().join(file), to.join(file)).unwrap();
    }
    let path = to.join("model.safetensors");
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let end = file.metadata().unwrap().len();
    for at in (end / 20..end).step_by(100_000) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        if ModelDir::open(to).unwrap().fingerprint() != model.dir.fingerprint() {
            file.write_all_at(&byte, at).unwrap();
        }
    }
    assert_eq!(ModelDir::open(to).unwrap().fingerprint(), model.dir.fingerprint());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_gives_what_is_wrong_is_asked_no_more() {
    let mut world = World::new();
    let shape = Shape { vocabulary: 4000, ..Shape::bert(3, 512, 8) };
    let model = Model::of(&world.dir.path().join("wide"), shape);
    let forgery = world.dir.path().join("models");
    forged(&model, &forgery.join("wide"));
    let flags = ["--models", forgery.to_str().unwrap()];
    let workers = [world.worker("d0", &flags).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let plan = model.plan(&[1.0, 1.0]);
    let log = world.log("d1");
    let until = Arc::new(move || fs::read_to_string(&log).unwrap().contains("wrong digest"));
    let late = Manner { until: Some(until), ..Manner::default() };
    let placed = world.place(&model, &plan, &all, late).await;
    let ready = placed[1].0.as_ref().unwrap();
    assert!(ready.fetched_bytes > 0 && ready.peer_bytes < ready.fetched_bytes / 2);
    // What it took is right: nothing is fetched again by a worker that is started anew.
    drop(workers);
    let worker = world.worker("d1", &[]).await;
    let other = world.worker("d0", &flags).await;
    let placed = world.place(&model, &plan, &[&other, &worker], Manner::default()).await;
    assert_eq!(placed[1].0.as_ref().unwrap().fetched_bytes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cache_keeps_its_bound() {
    let mut world = World::new();
    let dir = world.dir.path().to_owned();
    let (first, second) = (
        Model::of(&dir.join("first"), small()),
        Model::of(&dir.join("second"), Shape { vocabulary: 4100, ..small() }),
    );
    let total = first.pieces.total();
    let bound = |bytes: u64| bytes.to_string() + "B";
    {
        let limit = bound(total / 2);
        let worker = world.worker("d0", &["--cache-bytes", &limit]).await;
        let fault = world.alone(&first, &worker, Manner::default()).await.0.unwrap_err();
        assert_eq!(fault.code, "no_room", "{fault}");
        assert!(fault.message.contains("--cache-bytes"), "{fault}");
    }
    let limit = bound(total * 3 / 2);
    let worker = world.worker("d0", &["--cache-bytes", &limit]).await;
    for model in [&first, &second, &first] {
        let (ready, asked) = world.alone(model, &worker, Manner::default()).await;
        // The other one had to go.
        assert_eq!(ready.unwrap().fetched_bytes, model.pieces.total());
        assert_eq!(asked.pieces().len(), model.pieces.count() as usize);
        let kept = content(&world.cache("d0"));
        assert_eq!(
            kept.file_name().unwrap().to_str().unwrap(),
            Digest::of(&model.manifest).to_string()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_never_share_a_cache() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let first = world.worker("d0", &[]).await;
    world.alone(&model, &first, Manner::default()).await.0.unwrap();
    let second = world.worker("d0", &[]).await;
    let fault = world.alone(&model, &second, Manner::default()).await.0.unwrap_err();
    assert_eq!(fault.code, "bad_cache", "{fault}");
    assert!(fault.message.contains("--cache"), "{fault}");
    // Without a cache it is as it was: what is not there is refused.
    let models = world.dir.path().join("none");
    fs::create_dir(&models).unwrap();
    let flags = ["--cache-bytes", "0B", "--models", models.to_str().unwrap()];
    let third = world.worker("d0", &flags).await;
    let fault = world.alone(&model, &third, Manner::default()).await.0.unwrap_err();
    assert_eq!(fault.code, "unknown_model", "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_devices_of_the_cluster_take_pieces() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    world.alone(&model, &worker, Manner::default()).await.0.unwrap();
    let wants = v1::Wants {
        content: Digest::of(&model.manifest).0.to_vec(),
        pieces: vec![0, u32::MAX],
        ..v1::Wants::default()
    };
    let fetch = async |authority: &Authority, role: Role, wants: v1::Wants| {
        let who = name(&format!("a-{role}-{}", wants.pieces.len()));
        let identity = authority.issue(&who, role, 1).unwrap();
        let identity = Identity::load(&identity).unwrap();
        let to = (&name("d0"), Role::Device);
        let channel = connect(&worker.address, Some(&identity), to, LONG).await.ok()?;
        let (sender, stream) = mpsc::channel(4);
        // What names the content names no pieces.
        sender.send(v1::Wants { pieces: vec![], ..wants.clone() }).await.unwrap();
        sender.send(wants).await.unwrap();
        let answer = ContentClient::new(channel).fetch(ReceiverStream::new(stream)).await;
        Some(answer.map(|answer| (sender, answer.into_inner())).map_err(|s| from_status(&s)))
    };
    for role in [Role::Client, Role::Coordinator] {
        let fault = fetch(&world.authority, role, wants.clone()).await.unwrap().err().unwrap();
        assert_eq!(fault.code, "permission_denied", "{fault}");
    }
    let stranger = tempfile::tempdir().unwrap();
    let stranger = Authority::create(stranger.path(), "away").unwrap();
    assert!(fetch(&stranger, Role::Device, wants.clone()).await.is_none(), "another cluster");
    let other = v1::Wants { content: vec![7; 32], pieces: vec![], ..wants.clone() };
    let fault = fetch(&world.authority, Role::Device, other).await.unwrap().err().unwrap();
    assert_eq!(fault.code, "no_content", "{fault}");
    let (_sender, mut answer) =
        fetch(&world.authority, Role::Device, wants).await.unwrap().unwrap();
    let mut pieces = Vec::new();
    while pieces.len() < 2 {
        let said = tokio::time::timeout(LONG, answer.message()).await.unwrap().unwrap().unwrap();
        match said.event.unwrap() {
            Event::Piece(piece) => pieces.push(piece),
            Event::Holding(bits) => {
                let count: u32 = bits.iter().map(|byte| byte.count_ones()).sum();
                assert_eq!(count, model.pieces.count());
            }
            other => panic!("{other:?}"),
        }
    }
    let mut first = Vec::new();
    model.dir.read_piece(&model.pieces, 0, &mut first).unwrap();
    assert_eq!(pieces[0].data[..], first[..]);
    assert!(pieces[1].data.is_empty(), "there is no such piece");
}
