//! Real workers, models that they do not have, and a coordinator's part.

use galaxy_common::{Bytes, Cache, DeviceName, Plan, Strategy, WireType};
use galaxy_graph::share::{self, Member, PlanOptions};
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
    v1::{self, supplied::Event, worker_client::WorkerClient},
};
use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Only something that hangs takes so long, on whatever machine.
pub const LONG: Duration = Duration::from_secs(240);

pub fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

/// A model, and all that a coordinator knows of it.
pub struct Model {
    pub dir: Arc<ModelDir>,
    pub pieces: Pieces,
    pub manifest: Vec<u8>,
}

impl Model {
    pub fn of(path: &Path, shape: Shape) -> Arc<Self> {
        fs::create_dir_all(path).unwrap();
        shape.write(path, u64::MAX, &mut |_| {}).unwrap();
        Self::open(path)
    }

    pub fn open(path: &Path) -> Arc<Self> {
        let dir = ModelDir::open(path).unwrap();
        let config = fs::read(path.join("config.json")).unwrap();
        let go_on = &mut |_, _| ControlFlow::Continue(());
        let manifest = Manifest::of(&dir, config, go_on).unwrap().unwrap().to_bytes().unwrap();
        Arc::new(Self { pieces: dir.pieces().unwrap(), dir: Arc::new(dir), manifest })
    }

    /// Bytes of these pieces.
    pub fn bytes(&self, pieces: &BTreeSet<u32>) -> u64 {
        pieces.iter().map(|piece| self.pieces.bytes(*piece)).sum()
    }

    pub fn plan(&self, shares: &[f64]) -> Plan {
        let strategy = if shares.len() == 1 { Strategy::Local } else { Strategy::Galaxy };
        let terms = PlanOptions {
            model: self.dir.name(),
            fingerprint: self.dir.fingerprint(),
            formats: self.dir.formats(),
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

/// A model of two layers, of some 60 pieces.
pub fn small() -> Shape {
    Shape { vocabulary: 4000, ..Shape::bert(2, 256, 4) }
}

/// How the coordinator of a test supplies the model.
#[derive(Clone, Default)]
pub struct Manner {
    /// Gives nothing before this returns true.
    pub until: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
    /// Gives so many pieces, and then no more; 0: all.
    pub most: usize,
    /// Changes a byte of each piece.
    pub damage: bool,
    /// The model whose manifest the first device gets, if not the right one.
    pub lie: Option<Arc<Model>>,
}

/// What one placement asked the coordinator for.
#[derive(Default)]
pub struct Asked {
    pub pieces: Mutex<BTreeSet<u32>>,
    pub manifest: Mutex<bool>,
}

impl Asked {
    pub fn pieces(&self) -> BTreeSet<u32> {
        self.pieces.lock().unwrap().clone()
    }
}

pub struct World {
    pub dir: TempDir,
    pub authority: Authority,
    pub desk: Identity,
    pub epoch: u64,
}

pub struct Worker {
    pub child: Child,
    pub address: String,
    pub client: WorkerClient<Channel>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("keys"), "home").unwrap();
        let desk = authority.issue(&name("desk"), Role::Coordinator, 1).unwrap();
        let desk = Identity::load(&desk).unwrap();
        Self { dir, authority, desk, epoch: 0 }
    }

    /// The file of a worker's log.
    pub fn log(&self, device: &str) -> PathBuf {
        self.dir.path().join(format!("{device}.log"))
    }

    pub fn cache(&self, device: &str) -> PathBuf {
        self.dir.path().join("cache").join(device)
    }

    pub async fn worker(&self, device: &str, flags: &[&str]) -> Worker {
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

    /// Places a plan on all workers; returns the answer of each, and what it asked for.
    pub async fn place(
        &mut self,
        model: &Arc<Model>,
        plan: &Plan,
        workers: &[&Worker],
        manner: Manner,
    ) -> Vec<(Result<v1::PlaceReady, Fault>, Arc<Asked>)> {
        self.epoch += 1;
        self.all(Call::Place, model, plan, workers, manner).await
    }

    /// Has all workers prepare for a plan.
    pub async fn prepare(
        &self,
        model: &Arc<Model>,
        plan: &Plan,
        workers: &[&Worker],
        load: bool,
    ) -> Vec<(Result<v1::PlaceReady, Fault>, Arc<Asked>)> {
        self.all(Call::Prepare { load }, model, plan, workers, Manner::default()).await
    }

    pub async fn all(
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
            let told = manner.lie.as_ref().filter(|_| rank == 0).unwrap_or(model);
            let (client, model) = (worker.client.clone(), told.clone());
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
    pub async fn alone(
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
pub enum Call {
    Place,
    Prepare { load: bool },
}

pub async fn placed(
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

pub async fn supply(
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
pub async fn until(holds: &(dyn Fn() -> bool + Send + Sync)) {
    let mut looks = tokio::time::interval(Duration::from_millis(5));
    let wait = async {
        while !holds() {
            looks.tick().await;
        }
    };
    tokio::time::timeout(LONG, wait).await.expect("waited in vain");
}

/// The only content of a cache.
pub fn content(cache: &Path) -> PathBuf {
    let found = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path());
    let mut dirs: Vec<_> = found.filter(|path| path.is_dir()).collect();
    assert_eq!(dirs.len(), 1, "{dirs:?}");
    dirs.remove(0)
}

/// The number of pieces on the map of a content.
pub fn on_the_map(content: &Path) -> u32 {
    fs::read(content.join("map")).unwrap_or_default().iter().map(|byte| byte.count_ones()).sum()
}

/// The same number for a cache that may not exist yet.
pub fn in_cache(cache: &Path) -> u32 {
    let Ok(mut found) = fs::read_dir(cache) else { return 0 };
    let content = found.find_map(|entry| entry.ok().filter(|entry| entry.path().is_dir()));
    content.map_or(0, |content| on_the_map(&content.path()))
}

/// A model that is wide enough to be split well.
pub fn wide(layers: u32) -> Shape {
    Shape { vocabulary: 4000, ..Shape::bert(layers, 512, 8) }
}
