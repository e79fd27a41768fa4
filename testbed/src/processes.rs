//! Real processes under test: workers and a coordinator with fresh keys, and what may befall them.

use crate::{
    cgroup::{self, Group, Limits},
    network::{Held, Network, Place},
};
use anyhow::{Context, Result, bail, ensure};
use galaxy_client::{Builder, Client, RetryPolicy};
use galaxy_common::{Bytes, DeviceName};
use galaxy_proto::{
    channel,
    identity::{Authority, Identity, Role},
    v1::{self, worker_client::WorkerClient},
};
use std::{
    fmt::Write as _,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tonic::transport::Channel;

/// How long a process may take to say or become what it should: a hang, not slowness, exceeds it.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// Between two looks at something that does not tell when it changes.
const LOOK: Duration = Duration::from_millis(20);

/// A program of the workspace, built into the directory above the tests' own.
///
/// # Errors
/// When it is not built.
pub fn program(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let found = me.ancestors().skip(1).take(3).map(|dir| dir.join(name)).find(|p| p.is_file());
    found.with_context(|| {
        format!("{name} is not built: run `cargo build --release --workspace --bins` first")
    })
}

/// The root of the checkout.
pub fn root() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir).to_owned()
}

/// Looks until `found` gives something, at most for [`PATIENCE`].
///
/// # Errors
/// When it never does; `what` says what was waited for.
pub async fn until<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut found: impl FnMut() -> F,
) -> Result<T> {
    let look = async {
        loop {
            if let Some(found) = found().await {
                return found;
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    let late = || format!("waited {PATIENCE:?} in vain until {what}");
    tokio::time::timeout(PATIENCE, look).await.with_context(late)
}

#[derive(Default)]
struct Said {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

impl Said {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that was started here, and is ended when dropped.
pub struct Process {
    name: String,
    child: Child,
    said: Arc<Said>,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts it and reads what it prints.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(name: &str, mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{name} does not start"))?;
        let said = Arc::new(Said::default());
        let pipes: [Option<Box<dyn Read + Send>>; 2] = [
            child.stdout.take().map(|pipe| Box::new(pipe) as _),
            child.stderr.take().map(|pipe| Box::new(pipe) as _),
        ];
        let reader = |pipe: Box<dyn Read + Send>| {
            let said = said.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    said.lines().push(line);
                    said.more.notify_all();
                }
            })
        };
        let readers = pipes.into_iter().flatten().map(reader).collect();
        Ok(Self { name: name.to_owned(), child, said, readers })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// All that it printed so far.
    pub fn output(&self) -> String {
        self.said.lines().join("\n")
    }

    /// Waits for a line that holds `text`.
    ///
    /// # Errors
    /// When it ends without, or says nothing new for [`PATIENCE`].
    pub fn line(&mut self, text: &str) -> Result<String> {
        let (mut deadline, mut heard) = (Instant::now() + PATIENCE, 0);
        loop {
            let ended = self.child.try_wait()?;
            let lines = self.said.lines();
            if lines.len() > heard {
                (deadline, heard) = (Instant::now() + PATIENCE, lines.len());
            }
            if let Some(line) = lines.iter().find(|line| line.contains(text)) {
                return Ok(line.clone());
            }
            let all = lines.join("\n");
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(status) = ended.filter(|_| self.readers.iter().all(|r| r.is_finished())) {
                bail!("{} ended ({status}) without saying {text:?}; it said:\n{all}", self.name);
            }
            ensure!(!left.is_zero(), "{} does not say {text:?}; it said:\n{all}", self.name);
            drop(self.said.more.wait_timeout(lines, left.min(LOOK)));
        }
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn has_ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until it ends by itself, and gives what it printed.
    ///
    /// # Errors
    /// When it does not.
    pub fn ended(&mut self) -> Result<(ExitStatus, String)> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                for reader in self.readers.drain(..) {
                    drop(reader.join());
                }
                return Ok((status, self.output()));
            }
            ensure!(Instant::now() < deadline, "{} does not end:\n{}", self.name, self.output());
            std::thread::sleep(LOOK);
        }
    }

    /// Sends it a signal, like `STOP`.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let id = self.id().to_string();
        let sent = Command::new("kill").args([&format!("-{signal}"), &id]).status()?;
        ensure!(sent.success(), "{} takes no signal {signal}", self.name);
        Ok(())
    }

    /// Ends it at once, and waits until the system has let go of it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Also where it is stopped: SIGKILL reaches it then too.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for reader in self.readers.drain(..) {
            drop(reader.join());
        }
    }
}

/// A directory of identities under one authority.
pub struct Keys {
    /// The authority, for identities of unusual validity.
    pub authority: Authority,
    dir: PathBuf,
}

impl Keys {
    /// A fresh authority in `dir`.
    ///
    /// # Errors
    /// When files cannot be written.
    pub fn create(dir: &Path) -> Result<Self> {
        Ok(Self { authority: Authority::create(dir, "test")?, dir: dir.to_owned() })
    }

    /// The identity of that name, issued when it is first asked for.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn of(&self, name: &str, role: Role) -> Result<PathBuf> {
        let path = self.dir.join(name);
        if path.exists() {
            return Ok(path);
        }
        Ok(self.authority.issue(&DeviceName::new(name)?, role, 1)?)
    }
}

/// What a cluster under test is like. The devices are `d0`, `d1`, and so on.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model's directory.
    pub model: PathBuf,
    /// `local`, `megatron` or `galaxy`.
    pub strategy: &'static str,
    /// `f32` or `f16`.
    pub wire: &'static str,
    /// Tiles of a transfer.
    pub tiles: u16,
    /// `tls`, `quic` or `plain`.
    pub link: &'static str,
    /// Most rows of a program.
    pub max_rows: u32,
    /// Rows of texts that go on that are kept; none: what the model says.
    pub cache_rows: Option<u32>,
    /// To what matrices are rounded; none: as the model has them.
    pub weights_format: Option<&'static str>,
    /// A device for each, with its share.
    pub shares: Vec<f64>,
    /// What each device grants.
    pub memory: &'static str,
    /// Whether the devices stand behind links of their own that can be pulled; needs root.
    pub network: bool,
    /// Work is split by profiles, and not by shares.
    pub planned: Option<Planned>,
    /// Devices have no model: each keeps what it is brought in a directory under this.
    pub caches: Option<PathBuf>,
}

/// What a cluster is like whose work is split by profiles.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What each device grants.
    pub memory: Bytes,
    /// More lines of the `[cluster]` table.
    pub lines: String,
}

impl Setup {
    /// Three unequal devices.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            strategy: "galaxy",
            wire: "f32",
            tiles: 4,
            link: "tls",
            max_rows: 512,
            cache_rows: None,
            weights_format: None,
            shares: vec![3.0, 2.0, 1.0],
            memory: "1GB",
            network: false,
            planned: None,
            caches: None,
        }
    }

    /// The cluster file for workers at these addresses.
    pub fn cluster_file(&self, identity: &Path, addresses: &[String]) -> String {
        let Self { strategy, wire, tiles, link, max_rows, planned, .. } = self;
        let mut text = format!(
            "[cluster]\nname = \"test\"\nmodel = {:?}\nidentity = {identity:?}\n\
             strategy = \"{strategy}\"\nwire = \"{wire}\"\ntiles = {tiles}\nlink = \"{link}\"\n\
             max_rows = {max_rows}\nlisten = \"127.0.0.1:0\"\n",
            self.model
        );
        if let Some(rows) = self.cache_rows {
            let _ = writeln!(text, "cache_rows = {rows}");
        }
        if let Some(bits) = self.weights_format {
            let _ = writeln!(text, "weights_format = \"{bits}\"");
        }
        let mut memory = self.memory.to_owned();
        if let Some(planned) = planned {
            let _ = writeln!(text, "{}", planned.lines);
            memory = format!("{}B", planned.memory.0);
        }
        for (i, (address, share)) in addresses.iter().zip(&self.shares).enumerate() {
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n[[device]]\nname = \"d{i}\"\naddress = \"{address}\"\nmemory = \"{memory}\"\n\
                 threads = 1\n"
            );
            if planned.is_none() {
                let _ = writeln!(text, "share = {share:?}");
            }
        }
        text
    }
}

/// The address of this process among devices that stand behind links of their own.
const OUTSIDE: &str = "10.201.77.200/24";

/// Workers and a coordinator.
pub struct TestCluster {
    /// What it is like.
    pub setup: Setup,
    /// The identities.
    pub keys: Keys,
    /// The workers, by rank of the file.
    pub workers: Vec<Process>,
    /// The coordinator.
    pub coordinator: Process,
    /// Where workers listen.
    pub addresses: Vec<String>,
    /// Where the coordinator listens.
    pub address: String,
    /// The links, if the devices have some of their own.
    pub network: Option<Held>,
    _alone: Option<Alone>,
    dir: TempDir,
}

impl TestCluster {
    /// Starts all, and waits until requests can be served.
    ///
    /// # Errors
    /// When something does not start.
    pub fn start(setup: Setup) -> Result<Self> {
        let mut cluster = Self::begin(setup)?;
        cluster.coordinator.line("ready: ")?;
        Ok(cluster)
    }

    /// Starts all, and does not wait for more than open ports.
    ///
    /// # Errors
    /// When something does not start.
    pub fn begin(setup: Setup) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let keys = Keys::create(&dir.path().join("keys"))?;
        let alone = setup.network.then(Alone::wait);
        let network = match setup.network {
            true => Some(joined(setup.shares.len())?),
            false => None,
        };
        let (mut workers, mut addresses) = (Vec::new(), Vec::new());
        for i in 0..setup.shares.len() {
            // Devices listen on all their addresses, as by default, and so may get others.
            let (listen, host) = match &network {
                Some(_) => ("0.0.0.0:0", Network::address(i)),
                None => ("127.0.0.1:0", "127.0.0.1".to_owned()),
            };
            let mut process = worker(&keys, network.as_deref(), &setup, i, listen, &[])?;
            let said = listening(&mut process)?;
            let (_, port) = said.rsplit_once(':').context("an address ends in a port")?;
            addresses.push(format!("{host}:{port}"));
            workers.push(process);
        }
        let file = setup.cluster_file(&keys.of("coordinator", Role::Coordinator)?, &addresses);
        std::fs::write(dir.path().join("cluster.toml"), file)?;
        let (coordinator, address) = coordinator(&dir.path().join("cluster.toml"))?;
        Ok(Self {
            setup,
            keys,
            workers,
            coordinator,
            addresses,
            address,
            network,
            _alone: alone,
            dir,
        })
    }

    /// A client that does not try again by itself.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn client(&self) -> Result<Client> {
        self.client_as("laptop", Role::Client).await
    }

    /// A client with an identity of this role, that does not try again by itself.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn client_as(&self, name: &str, role: Role) -> Result<Client> {
        Ok(self.builder(name, role)?.retry(RetryPolicy::never()).connect().await?)
    }

    /// A client of this cluster that has not connected yet.
    ///
    /// # Errors
    /// When there is no identity for it.
    pub fn builder(&self, name: &str, role: Role) -> Result<Builder> {
        Ok(Client::builder().address(&self.address).identity(self.keys.of(name, role)?))
    }

    /// A connection to a worker's control service, as from a coordinator.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn control(&self, i: usize) -> Result<WorkerClient<Channel>> {
        let identity = Identity::load(&self.keys.of("coordinator", Role::Coordinator)?)?;
        let name = DeviceName::new(format!("d{i}"))?;
        let server = (&name, Role::Device);
        let channel =
            channel::connect(&self.addresses[i], Some(&identity), server, PATIENCE).await?;
        Ok(WorkerClient::new(channel))
    }

    /// What a worker says of itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn health(&self, i: usize) -> Result<v1::HealthReply> {
        Ok(self.control(i).await?.health(v1::HealthRequest {}).await?.into_inner())
    }

    /// Waits until a program runs on device `i`, and gives its sequence number.
    ///
    /// # Errors
    /// When none does.
    pub async fn running(&self, i: usize) -> Result<u64> {
        let control = self.control(i).await?;
        until("a program runs", || {
            let mut control = control.clone();
            async move {
                let health = control.health(v1::HealthRequest {}).await.ok()?;
                let health = health.get_ref();
                health.running.then_some(health.running_sequence)
            }
        })
        .await
    }

    /// Starts a worker anew where it was, with further flags.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_worker(&mut self, i: usize, flags: &[&str]) -> Result<()> {
        self.workers[i].kill()?;
        let (network, at) = (self.network.as_deref(), &self.addresses[i]);
        let mut process = worker(&self.keys, network, &self.setup, i, at, flags)?;
        listening(&mut process)?;
        self.workers[i] = process;
        Ok(())
    }

    /// Starts a coordinator anew; it takes a free port.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_coordinator(&mut self) -> Result<()> {
        self.coordinator.kill()?;
        (self.coordinator, self.address) = coordinator(&self.dir.path().join("cluster.toml"))?;
        self.coordinator.line("ready: ").map(drop)
    }

    /// Starts a coordinator that was killed anew where it was, and does not wait until requests can be served.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_coordinator_there(&mut self) -> Result<()> {
        self.coordinator.kill()?;
        let mut command = coordinator_command(&self.dir.path().join("cluster.toml"))?;
        command.args(["--listen", &self.address]);
        self.coordinator = Process::spawn("the coordinator", command)?;
        listening(&mut self.coordinator).map(drop)
    }

    /// All that anyone printed, to be shown when a test fails.
    pub fn output(&self) -> String {
        let mut text = format!("coordinator:\n{}\n", self.coordinator.output());
        for worker in &self.workers {
            text += &format!("{}:\n{}\n", worker.name, worker.output());
        }
        text
    }
}

/// Starts a coordinator and says where it listens.
///
/// # Errors
/// When it does not start.
pub fn coordinator(file: &Path) -> Result<(Process, String)> {
    let mut process = Process::spawn("the coordinator", coordinator_command(file)?)?;
    let address = listening(&mut process)?;
    Ok((process, address))
}

/// The command of a coordinator.
///
/// # Errors
/// When it is not built.
pub fn coordinator_command(file: &Path) -> Result<Command> {
    let mut command = Command::new(program("galaxy-coord")?);
    command.arg("--cluster").arg(file);
    Ok(command)
}

/// The command of a worker that listens on a free port of this machine.
///
/// # Errors
/// When it is not built.
pub fn worker_command(identity: &Path, models: &Path) -> Result<Command> {
    let mut command = Command::new(program("galaxy-worker")?);
    command.arg("--identity").arg(identity).arg("--models").arg(models);
    command.args(["--threads", "1", "--cache-bytes", "0B"]);
    Ok(command)
}

/// The command of a worker that has no model, and keeps what it is brought in `cache`.
///
/// # Errors
/// When it is not built.
pub fn bare_worker(identity: &Path, cache: &Path) -> Result<Command> {
    let mut command = Command::new(program("galaxy-worker")?);
    command.arg("--identity").arg(identity).arg("--cache").arg(cache);
    command.args(["--threads", "1"]);
    Ok(command)
}

fn worker(
    keys: &Keys,
    network: Option<&Network>,
    setup: &Setup,
    i: usize,
    listen: &str,
    flags: &[&str],
) -> Result<Process> {
    let identity = keys.of(&format!("d{i}"), Role::Device)?;
    let mut command = match &setup.caches {
        None => worker_command(&identity, &setup.model)?,
        Some(caches) => bare_worker(&identity, &caches.join(format!("d{i}")))?,
    };
    command.args(["--listen", listen]).args(flags);
    if setup.link == "plain" {
        command.arg("--plain");
    }
    let start = || Process::spawn(&format!("worker d{i}"), command);
    match network {
        Some(network) => network.inside(i, start)?,
        None => start(),
    }
}

/// Waits for an open port.
///
/// # Errors
/// When none is opened.
pub fn listening(process: &mut Process) -> Result<String> {
    let line = process.line("listening on ")?;
    let (_, address) = line.split_once("listening on ").context("line() found it")?;
    Ok(address.trim().to_owned())
}

/// This process has one network at a time: it stands in each under the same address.
struct Alone;

static TAKEN: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

impl Alone {
    /// Waits until no other test of this process has one.
    fn wait() -> Self {
        let taken = TAKEN.0.lock().unwrap_or_else(PoisonError::into_inner);
        let free = TAKEN.1.wait_while(taken, |taken| *taken);
        *free.unwrap_or_else(PoisonError::into_inner) = true;
        Self
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        *TAKEN.0.lock().unwrap_or_else(PoisonError::into_inner) = false;
        TAKEN.1.notify_one();
    }
}

/// A network of devices, on links that do not matter, with this process beside them.
fn joined(devices: usize) -> Result<Held> {
    let places: Vec<Place> =
        (0..devices).map(|i| Place { name: format!("d{i}"), link: None }).collect();
    Network::held(&format!("glx{}", std::process::id()), &places)?.joined(OUTSIDE)
}

/// A share of one core that a process may use; needs root and control groups.
pub struct Throttle {
    testbed: String,
    group: Group,
    process: u32,
}

impl Throttle {
    /// One twentieth of a core.
    ///
    /// # Errors
    /// Where such a group cannot be made.
    pub fn twentieth(process: &Process) -> Result<Self> {
        let testbed = format!("slow-{}", process.id());
        let group =
            Group::create(&testbed, "d", &Limits { quota: Some(0.05), ..Limits::default() })?;
        let throttle = Self { testbed, group, process: process.id() };
        throttle.group.hold_process(throttle.process)?;
        Ok(throttle)
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // It goes first, for what is in a group that is removed is ended.
        let _ = self.group.release(self.process);
        let _ = cgroup::remove(&self.testbed);
    }
}

/// Ends a process at once; one that has ended is no error.
pub(crate) fn kill(pid: u32) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).context("ids begin at 1")?;
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    Ok(())
}
