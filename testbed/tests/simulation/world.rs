//! The parties of a simulation, whole: a coordinator and its workers as their programs start them,
//! with certificates, TLS and files, in one process.

use crate::network::{DESK, Network, Party, home};
use galaxy_client::{Client, RetryPolicy};
use galaxy_common::{Bytes, Cache, ClusterProfile, DeviceName, Epoch};
use galaxy_coord::{
    Cluster, Limits, Notice, Planning, ProfileSource, RemoteFleet, Session, api::Api,
    fleet::BoxFuture, profile,
};
use galaxy_engine::compute::choice::EngineChoice;
use galaxy_model::ModelDir;
use galaxy_planner::synthetic::{self, SyntheticDevice};
use galaxy_proto::identity::{Authority, Identity, Role};
use galaxy_testbed::golden;
use galaxy_worker::{CacheConfig, Worker, WorkerConfig};
use std::{
    fmt::Write,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinSet, time::timeout};

/// The keys for all simulations of a process, and the coordinator's models, which are not created anew for
/// each simulation.
pub struct Keys {
    folder: tempfile::TempDir,
    of: Vec<PathBuf>,
    client: PathBuf,
}

impl Keys {
    /// Creates the keys of a coordinator, `devices` devices and a client, and copies models of these names.
    pub fn create(devices: usize, models: &[&str]) -> anyhow::Result<Self> {
        let folder = in_memory()?;
        // The files that are kept beside a model do not go into the folder that all tests share.
        for model in models {
            let to = folder.path().join("models").join(model);
            fs::create_dir_all(&to)?;
            for file in ["config.json", "model.safetensors"] {
                fs::copy(golden::checkpoints_dir().join(model).join(file), to.join(file))?;
            }
        }
        let authority = Authority::create(folder.path(), "home")?;
        let issue =
            |name: &str, role| anyhow::Ok(authority.issue(&DeviceName::new(name)?, role, 30)?);
        let mut of = vec![issue("coordinator", Role::Coordinator)?];
        for device in 1..=devices {
            of.push(issue(&format!("d{device}"), Role::Device)?);
        }
        let client = issue("client", Role::Client)?;
        Ok(Self { folder, of, client })
    }
    fn model(&self, name: &str) -> PathBuf {
        self.folder.path().join("models").join(name)
    }
}

/// A folder in memory, where the system has such a place: while threads wait for a disk, virtual time passes.
fn in_memory() -> io::Result<tempfile::TempDir> {
    match Path::new("/dev/shm").is_dir() {
        true => tempfile::tempdir_in("/dev/shm"),
        false => tempfile::tempdir(),
    }
}

/// The settings of a cluster.
#[derive(Clone, Debug)]
pub struct Setup {
    pub model: &'static str,
    pub strategy: &'static str,
    pub tiles: u16,
    /// The share of each device.
    pub shares: Vec<f64>,
    /// Which devices have the model; the others are brought it.
    pub have: Vec<bool>,
    /// Whether clients ask for several texts at once.
    pub crowds: bool,
    /// The number of KV blocks; without it, the coordinator decides.
    pub blocks: Option<u32>,
}

/// The longest that a coordinator may take to answer what it has accepted, before a second signal ends it.
const PATIENCE: Duration = Duration::from_secs(20);
/// The strategies whose splits the cluster file gives. For the others there are profiles.
pub const BY_HAND: [&str; 2] = ["galaxy", "megatron"];

/// Profiles of devices that are as fast as their shares, over fast links. The real times of programs differ,
/// so that the coordinator finds that devices drift.
struct Imagined(Vec<f64>);

impl ProfileSource for Imagined {
    fn collect<'a>(
        &'a self,
        cluster: &'a Cluster,
        model: &'a ModelDir,
        _: &'a Identity,
        _: profile::Listener<'a>,
    ) -> BoxFuture<'a, Result<ClusterProfile, String>> {
        let devices = cluster.devices.iter().zip(&self.0).map(|(device, share)| SyntheticDevice {
            name: device.name.clone(),
            gflops: 0.01 * share,
            memory_rate: 100.0,
            memory: Bytes(0),
            threads: 1,
            link_rate: 1e9,
            latency: 1e3,
        });
        let (shape, width) = (model.shape_key(), model.format());
        let profile = synthetic::profile(model.spec(), &shape, width, &devices.collect::<Vec<_>>());
        Box::pin(std::future::ready(Ok(profile)))
    }
}

/// A coordinator that is alive.
struct LiveCoordinator {
    session: Session,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<()>,
}

/// All parties of a simulation.
pub struct World {
    keys: Arc<Keys>,
    setup: Setup,
    /// The folder of what devices keep of models, through all their lives.
    caches: tempfile::TempDir,
    /// How often a device was brought pieces of the model, and had its place or was ready for it.
    pub brought: Arc<AtomicU64>,
    /// The number of evicted sequences, and the most that were in a step.
    pub crowds: (u64, usize),
    pub network: Network,
    fronts: Vec<SocketAddr>,
    tasks: JoinSet<()>,
    desk: Option<LiveCoordinator>,
    workers: Vec<Option<Worker>>,
    lives: Vec<u8>,
    /// The tasks of parties that are ending.
    leaving: JoinSet<()>,
}

impl World {
    /// A world with fronts only: no party is alive yet.
    pub async fn new(keys: Arc<Keys>, setup: Setup, network: Network) -> anyhow::Result<Self> {
        let mut tasks = JoinSet::new();
        let mut fronts = Vec::new();
        for party in 0..=setup.shares.len() {
            fronts.push(network.front(party, &mut tasks).await?);
        }
        let workers = setup.shares.iter().map(|_| None).collect();
        let lives = vec![0; setup.shares.len() + 1];
        let leaving = JoinSet::new();
        let caches = in_memory()?;
        Ok(Self {
            keys,
            setup,
            caches,
            brought: Arc::default(),
            crowds: (0, 0),
            network,
            fronts,
            tasks,
            desk: None,
            workers,
            lives,
            leaving,
        })
    }

    pub fn devices(&self) -> usize {
        self.setup.shares.len()
    }
    pub fn alive(&self, party: Party) -> bool {
        match party {
            DESK => self.desk.is_some(),
            device => self.workers[device - 1].is_some(),
        }
    }

    /// Deletes all that a device which is not alive has kept of models.
    pub fn forget(&self, device: Party) -> io::Result<()> {
        match fs::remove_dir_all(self.caches.path().join(device.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Starts a party that is not alive.
    pub async fn start(&mut self, party: Party) -> anyhow::Result<()> {
        self.lives[party] += 1;
        let life = self.lives[party];
        let at = match party {
            DESK => self.start_desk(life).await?,
            device => self.start_device(device, life).await?,
        };
        self.network.up(party, at, life);
        Ok(())
    }

    async fn start_device(&mut self, device: Party, life: u8) -> anyhow::Result<SocketAddr> {
        let here = home(device, life);
        let (has, limit) = (self.setup.have[device - 1], Bytes(1 << 30));
        let cache = CacheConfig { dir: self.caches.path().join(device.to_string()), limit };
        let config = WorkerConfig {
            identity: self.keys.of[device].clone(),
            listen: SocketAddr::new(here, 0),
            from: Some(here),
            models: has.then(golden::checkpoints_dir),
            cache: (!has).then_some(cache),
            engine: EngineChoice::Cpu,
            threads: 1,
            memory: None,
            plain: false,
        };
        let worker = Worker::start(config).await?;
        let address = worker.address();
        self.workers[device - 1] = Some(worker);
        Ok(address)
    }

    async fn start_desk(&mut self, life: u8) -> anyhow::Result<SocketAddr> {
        let Setup { model, strategy, tiles, shares, blocks, .. } = &self.setup;
        let mut text = format!(
            "[cluster]\nmodel = {:?}\nidentity = {:?}\nstrategy = {strategy:?}\ntiles = {tiles}\nlink = \"tls\"\n",
            self.keys.model(model),
            self.keys.of[DESK],
        );
        if let Some(blocks) = blocks {
            writeln!(text, "kv_cache_tokens = {}", blocks * Cache::BLOCK)?;
        }
        for (at, share) in shares.iter().enumerate() {
            let (device, front) = (at + 1, self.fronts[at + 1]);
            write!(
                text,
                "[[device]]\nname = \"d{device}\"\naddress = \"{front}\"\nmemory = \"1GB\"\n"
            )?;
            if BY_HAND.contains(strategy) {
                writeln!(text, "share = {share}")?;
            }
        }
        let cluster = Cluster::parse(&text, Path::new("/"))?;
        let identity = Identity::load(&cluster.identity)?;
        let model = Arc::new(ModelDir::open(&cluster.model)?);
        let limits = Limits {
            queue: cluster.queue,
            timeout: Duration::from_secs(20),
            client_memory: cluster.client_memory,
            drafts: true,
        };
        let epoch = Epoch(u64::from(life) << 20);
        let brought = self.brought.clone();
        let listener = Arc::new(move |notice| {
            if let Notice::Placed { fetched, .. } | Notice::Prepared { fetched, .. } = notice
                && fetched > Bytes(0)
            {
                brought.fetch_add(1, Ordering::Relaxed);
            }
        });
        let profiles = Arc::new(Imagined(shares.clone()));
        let planning = Planning { profiles, ..Planning::measured() };
        let (of, us) = (model.clone(), identity.clone());
        let fleet = RemoteFleet::start_with(cluster, of, us, epoch, listener, planning)?;
        let session =
            tokio::task::spawn_blocking(move || Session::new(model, Arc::new(fleet), limits));
        let session = session.await?;
        let listener = TcpListener::bind((home(DESK, life), 0)).await?;
        let address = listener.local_addr()?;
        let (stop, stopping) = oneshot::channel::<()>();
        let api = Api::new(session.clone(), "home");
        let served = tokio::spawn(async move {
            let stop = async move { drop(stopping.await) };
            drop(api.serve(listener, Some(&identity), stop).await);
        });
        self.desk = Some(LiveCoordinator { session, stop, served });
        Ok(address)
    }

    /// Ends a party that is alive: gently, with a message to all that it serves, or at once.
    pub fn end(&mut self, party: Party, gently: bool) {
        let life = self.lives[party];
        if !gently {
            self.network.down(party, life);
        }
        let network = self.network.clone();
        if party == DESK {
            let Some(LiveCoordinator { session, stop, served }) = self.desk.take() else { return };
            let seen = session.sequences();
            self.crowds = (self.crowds.0 + seen.evicted, self.crowds.1.max(seen.most));
            self.leaving.spawn(async move {
                if gently {
                    // A generation may wait for a device for half a minute, and then for its client: the task
                    // that ended the coordinator then ends it for good.
                    drop(timeout(PATIENCE, session.drain()).await);
                    network.down(DESK, life);
                }
                session.close().await;
                drop(stop);
                drop(served.await);
            });
        } else if let Some(worker) = self.workers[party - 1].take() {
            self.leaving.spawn(async move {
                worker.shutdown().await;
                if gently {
                    network.down(party, life);
                }
            });
        }
    }

    /// Waits until the parties that were ended are gone.
    pub async fn gone(&mut self) {
        while self.leaving.join_next().await.is_some() {}
    }

    /// Connects a client that does not retry.
    pub async fn client(&self, timeout: Duration) -> Result<Client, galaxy_client::ClientError> {
        self.client_by(timeout, RetryPolicy::never()).await
    }

    /// Connects a client that retries by this policy.
    pub async fn client_by(
        &self,
        timeout: Duration,
        retry: RetryPolicy,
    ) -> Result<Client, galaxy_client::ClientError> {
        let client =
            Client::builder().address(self.fronts[DESK].to_string()).identity(&self.keys.client);
        client.timeout(timeout).retry(retry).connect().await
    }

    /// Ends all parties, and the network.
    pub async fn close(&mut self) {
        for party in (0..self.lives.len()).filter(|party| self.alive(*party)).collect::<Vec<_>>() {
            self.end(party, false);
        }
        self.gone().await;
        self.tasks.shutdown().await;
    }
}
