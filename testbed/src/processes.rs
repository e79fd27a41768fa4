//! Real processes under test: workers and a coordinator with fresh keys, and the faults that may happen to
//! them.

pub use crate::programs::program;
use crate::{
    cgroup::{self, Group, Limits},
    network::{Network, NetworkGuard, NetworkNode},
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

/// The longest that a process may take to print or become what it should: only a hang exceeds it, not
/// slowness.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// The time between two looks at something that does not report a change.
const LOOK: Duration = Duration::from_millis(20);

/// The root of the checkout.
pub fn root() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir).to_owned()
}

/// Calls `found` until it gives something, at most for [`PATIENCE`].
///
/// # Errors
/// When it never does; the error names `what` was waited for.
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
struct OutputLines {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

impl OutputLines {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that was started here, and is ended when dropped.
pub struct Process {
    name: String,
    child: Child,
    said: Arc<OutputLines>,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts a process, and reads what it prints.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(name: &str, mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{name} does not start"))?;
        let said = Arc::new(OutputLines::default());
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

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the process has ended.
    ///
    /// # Errors
    /// An error of the system.
    pub fn is_over(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// All that the process has printed so far.
    pub fn output(&self) -> String {
        self.said.lines().join("\n")
    }

    /// Waits for a line that contains `text`.
    ///
    /// # Errors
    /// When the process ends without it, or prints nothing new for [`PATIENCE`].
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

    /// The exit status, if the process has ended.
    ///
    /// # Errors
    /// When the system does not report it.
    pub fn has_ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until the process ends by itself, and returns its exit status and what it printed.
    ///
    /// # Errors
    /// When the process does not end.
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

    /// Sends the process a signal, like `STOP`.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let id = self.id().to_string();
        let sent = Command::new("kill").args([&format!("-{signal}"), &id]).status()?;
        ensure!(sent.success(), "{} takes no signal {signal}", self.name);
        Ok(())
    }

    /// Ends the process at once, and waits until the system has removed it.
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
        // SIGKILL reaches a process that is stopped, too.
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
    /// Creates a fresh authority in `dir`.
    ///
    /// # Errors
    /// When files cannot be written.
    pub fn create(dir: &Path) -> Result<Self> {
        Ok(Self { authority: Authority::create(dir, "test")?, dir: dir.to_owned() })
    }

    /// The identity of that name, issued when it is first asked for.
    ///
    /// # Errors
    /// When it cannot be issued.
    pub fn of(&self, name: &str, role: Role) -> Result<PathBuf> {
        let path = self.dir.join(name);
        if path.exists() {
            return Ok(path);
        }
        Ok(self.authority.issue(&DeviceName::new(name)?, role, 1)?)
    }
}

/// The settings of a cluster under test. The devices are `d0`, `d1`, and so on.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model's directory.
    pub model: PathBuf,
    /// The strategy: `local`, `megatron` or `galaxy`.
    pub strategy: &'static str,
    /// The wire format: `f32` or `f16`.
    pub wire: &'static str,
    /// The number of tiles of a transfer.
    pub tiles: u16,
    /// The type of links: `tls`, `quic` or `plain`.
    pub link: &'static str,
    /// The most rows of a program.
    pub max_rows: u32,
    /// The rows of the KV cache; without it, the coordinator's default for the model.
    pub kv_cache_tokens: Option<u32>,
    /// The format that matrices are rounded to; without it, they are as the model has them.
    pub weights_format: Option<&'static str>,
    /// The share of each device; there are as many devices.
    pub shares: Vec<f64>,
    /// The memory that each device grants.
    pub memory: &'static str,
    /// Whether the devices are behind links of their own that can be pulled; needs root.
    pub network: bool,
    /// The settings of a split by profiles; without it, work is split by shares.
    pub planned: Option<Planned>,
    /// The directory under which each device keeps what it is brought; with it, devices have no model at
    /// first.
    pub caches: Option<PathBuf>,
}

/// The settings of a cluster whose work is split by profiles.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The memory that each device grants.
    pub memory: Bytes,
    /// Further lines of the `[cluster]` table.
    pub lines: String,
}

impl Setup {
    /// The settings of three unequal devices.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            strategy: "galaxy",
            wire: "f32",
            tiles: 4,
            link: "tls",
            max_rows: 512,
            kv_cache_tokens: None,
            weights_format: None,
            shares: vec![3.0, 2.0, 1.0],
            memory: "1GB",
            network: false,
            planned: None,
            caches: None,
        }
    }

    /// The text of the cluster file for workers at these addresses.
    pub fn cluster_file(&self, identity: &Path, addresses: &[String]) -> String {
        let Self { strategy, wire, tiles, link, max_rows, planned, .. } = self;
        let mut text = format!(
            "[cluster]\nname = \"test\"\nmodel = {:?}\nidentity = {identity:?}\n\
             strategy = \"{strategy}\"\nwire = \"{wire}\"\ntiles = {tiles}\nlink = \"{link}\"\n\
             max_rows = {max_rows}\nlisten = \"127.0.0.1:0\"\n",
            self.model
        );
        if let Some(rows) = self.kv_cache_tokens {
            let _ = writeln!(text, "kv_cache_tokens = {rows}");
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

/// The address of this process among devices that are behind links of their own.
const OUTSIDE: &str = "10.201.77.200/24";

/// A cluster under test: workers and a coordinator as processes.
pub struct TestCluster {
    /// The settings of the cluster.
    pub setup: Setup,
    /// The identities of the cluster.
    pub keys: Keys,
    /// The workers, in the order of the cluster file.
    pub workers: Vec<Process>,
    /// The process of the coordinator.
    pub coordinator: Process,
    /// The addresses on which the workers listen.
    pub addresses: Vec<String>,
    /// The address on which the coordinator listens.
    pub address: String,
    /// The links, if the devices have links of their own.
    pub network: Option<NetworkGuard>,
    _alone: Option<Alone>,
    dir: TempDir,
}

impl TestCluster {
    /// Starts all processes, and waits until requests can be served.
    ///
    /// # Errors
    /// When a process does not start.
    pub fn start(setup: Setup) -> Result<Self> {
        let mut cluster = Self::begin(setup)?;
        cluster.coordinator.line("ready: ")?;
        Ok(cluster)
    }

    /// Starts all processes, and waits only for open ports.
    ///
    /// # Errors
    /// When a process does not start.
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
            // Devices listen on all their addresses, as by default, so that they may get others.
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

    /// Connects a client that does not retry.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn client(&self) -> Result<Client> {
        self.client_as("laptop", Role::Client).await
    }

    /// Connects a client with an identity of this role that does not retry.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn client_as(&self, name: &str, role: Role) -> Result<Client> {
        Ok(self.builder(name, role)?.retry(RetryPolicy::never()).connect().await?)
    }

    /// The builder of a client of this cluster, which has not connected yet.
    ///
    /// # Errors
    /// When there is no identity for it.
    pub fn builder(&self, name: &str, role: Role) -> Result<Builder> {
        Ok(Client::builder().address(&self.address).identity(self.keys.of(name, role)?))
    }

    /// The command of `galaxy serve` for this cluster, by the identity of that name.
    ///
    /// # Errors
    /// When the command is not built, or there is no identity for it.
    pub fn serve_command(&self, name: &str, listen: &str, flags: &[&str]) -> Result<Command> {
        let mut command = Command::new(program("galaxy")?);
        command.args(["serve", "--listen", listen, "--coordinator", &self.address]);
        command.arg("--identity").arg(self.keys.of(name, Role::Client)?);
        command.args(flags).env_remove("GALAXY_API_KEY");
        Ok(command)
    }

    /// Starts `galaxy serve` on a free port, and returns its address.
    ///
    /// # Errors
    /// When it does not start.
    pub fn serve(&self, name: &str, flags: &[&str]) -> Result<(Process, String)> {
        let command = self.serve_command(name, "127.0.0.1:0", flags)?;
        let mut process = Process::spawn("galaxy serve", command)?;
        let line = process.line("listening on http://")?;
        let address = line.trim_start_matches("listening on http://").split('/').next();
        let address = address.unwrap_or_default().to_owned();
        Ok((process, address))
    }

    /// Connects to a worker's control service, as a coordinator does.
    ///
    /// # Errors
    /// When the worker does not answer.
    pub async fn control(&self, i: usize) -> Result<WorkerClient<Channel>> {
        let identity = Identity::load(&self.keys.of("coordinator", Role::Coordinator)?)?;
        let name = DeviceName::new(format!("d{i}"))?;
        let server = (&name, Role::Device);
        let channel =
            channel::connect(&self.addresses[i], Some(&identity), server, PATIENCE).await?;
        Ok(WorkerClient::new(channel))
    }

    /// The health that a worker reports.
    ///
    /// # Errors
    /// When the worker does not answer.
    pub async fn health(&self, i: usize) -> Result<v1::HealthReply> {
        Ok(self.control(i).await?.health(v1::HealthRequest {}).await?.into_inner())
    }

    /// Waits until a program runs on device `i`, and returns its sequence number.
    ///
    /// # Errors
    /// When no program runs.
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

    /// Ends a worker, and starts it again on the same address, with further flags.
    ///
    /// # Errors
    /// When the worker does not start.
    pub fn restart_worker(&mut self, i: usize, flags: &[&str]) -> Result<()> {
        self.workers[i].kill()?;
        let (network, at) = (self.network.as_deref(), &self.addresses[i]);
        let mut process = worker(&self.keys, network, &self.setup, i, at, flags)?;
        listening(&mut process)?;
        self.workers[i] = process;
        Ok(())
    }

    /// Ends the coordinator, and starts another, on a free port.
    ///
    /// # Errors
    /// When the coordinator does not start.
    pub fn restart_coordinator(&mut self) -> Result<()> {
        self.coordinator.kill()?;
        (self.coordinator, self.address) = coordinator(&self.dir.path().join("cluster.toml"))?;
        self.coordinator.line("ready: ").map(drop)
    }

    /// Starts a coordinator that was killed again on the same address, and does not wait until requests can
    /// be served.
    ///
    /// # Errors
    /// When the coordinator does not start.
    pub fn restart_coordinator_there(&mut self) -> Result<()> {
        self.coordinator.kill()?;
        let mut command = coordinator_command(&self.dir.path().join("cluster.toml"))?;
        command.args(["--listen", &self.address]);
        self.coordinator = Process::spawn("the coordinator", command)?;
        listening(&mut self.coordinator).map(drop)
    }

    /// All that any process printed, to be shown when a test fails.
    pub fn output(&self) -> String {
        let mut text = format!("coordinator:\n{}\n", self.coordinator.output());
        for worker in &self.workers {
            text += &format!("{}:\n{}\n", worker.name, worker.output());
        }
        text
    }
}

/// Starts a coordinator, and returns the address on which it listens.
///
/// # Errors
/// When the coordinator does not start.
pub fn coordinator(file: &Path) -> Result<(Process, String)> {
    let mut process = Process::spawn("the coordinator", coordinator_command(file)?)?;
    let address = listening(&mut process)?;
    Ok((process, address))
}

/// The command of a coordinator.
///
/// # Errors
/// When the coordinator is not built.
pub fn coordinator_command(file: &Path) -> Result<Command> {
    let mut command = Command::new(program("galaxy-coord")?);
    command.arg("--cluster").arg(file);
    Ok(command)
}

/// The command of a worker that listens on a free port of this machine.
///
/// # Errors
/// When the worker is not built.
pub fn worker_command(identity: &Path, models: &Path) -> Result<Command> {
    let mut command = Command::new(program("galaxy-worker")?);
    command.arg("--identity").arg(identity).arg("--models").arg(models);
    command.args(["--threads", "1", "--cache-bytes", "0B"]);
    Ok(command)
}

/// The command of a worker that has no model, and keeps what it is brought in `cache`.
///
/// # Errors
/// When the worker is not built.
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

/// Waits until a process has opened its port, and returns the address.
///
/// # Errors
/// When no port is opened.
pub fn listening(process: &mut Process) -> Result<String> {
    let line = process.line("listening on ")?;
    let (_, address) = line.split_once("listening on ").context("line() found it")?;
    Ok(address.trim().to_owned())
}

/// A guard by which this process is in one network at a time: it has the same address in each.
struct Alone;

static TAKEN: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

impl Alone {
    /// Waits until no other test of this process holds the guard.
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

/// A network of devices, on links without shaping, with this process beside them.
fn joined(devices: usize) -> Result<NetworkGuard> {
    let places: Vec<NetworkNode> =
        (0..devices).map(|i| NetworkNode { name: format!("d{i}"), link: None }).collect();
    Network::held(&format!("glx{}", std::process::id()), &places)?.joined(OUTSIDE)
}

/// A process held to a share of one core, until this is dropped; needs root and control groups.
pub struct Throttle {
    testbed: String,
    group: Group,
    process: u32,
}

impl Throttle {
    /// Holds a process to one twentieth of a core.
    ///
    /// # Errors
    /// When such a group cannot be created.
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
        // The process leaves first, since processes in a group that is removed are ended.
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
