//! A testbed that is up: its network, limits, workers, and what is kept about it.
//!
//! All that a testbed creates is found again from its name alone (namespaces, groups), so that `down` works
//! after any crash. Its directory serves the other commands: the environment, the calibration, keys, logs,
//! and the workers' process ids.

mod removal;

use crate::{
    ballast::Ballast,
    calibrate::{self, Calibrated, Calibration, tell},
    cgroup::{self, DiskLimit, Group, Limits, Usage},
    environment::{COORDINATOR, Environment, Hold, check_name, state_directory},
    holding::{Holding, Limited, compute_threads, threads, took},
    inside, links,
    network::{self, Network},
    processes::{Keys, PATIENCE, program},
};
use anyhow::{Context, Result, bail, ensure};
use galaxy_common::{LinkType, Reading, Strategy, WireType};
use galaxy_coord::{Cluster, cluster};
use galaxy_proto::identity::Role;
pub use removal::down;
use removal::{Passing, Undisturbed, end, remove, sweep};
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// The port on which workers listen; each has a network of its own.
const PORT: u16 = 7100;
/// The time between two looks at a process that does not report a change.
const LOOK: Duration = Duration::from_millis(5);

/// A testbed that is up.
pub struct Testbed {
    /// The testbed's name.
    pub name: String,
    /// The environment that it emulates.
    pub environment: Environment,
    /// Whether it is only processes on this machine: no shaping, no limits.
    pub loopback: bool,
    /// The quotas and speeds of the devices.
    pub calibration: Calibration,
    directory: PathBuf,
    /// Takes the testbed down with the process that made it, if it is for one measurement. It is dropped
    /// before the lock.
    passing: Option<Passing>,
    /// The lock that is held while an experiment uses the testbed.
    lock: Option<File>,
    /// The process of the metronome, which keeps its quotas, if that was started here.
    metronome: Option<u32>,
}

/// The state that is kept in the testbed's directory.
#[derive(Serialize, Deserialize)]
struct SavedState {
    loopback: bool,
    calibration: Calibration,
}

/// The way by which work is split over the devices.
#[derive(Clone, Copy, Debug)]
pub enum Split<'a> {
    /// A split by hand.
    Shares {
        /// The share of each device.
        shares: &'a [f64],
        /// The number of tiles.
        tiles: u16,
    },
    /// A split by the planner, from what the devices measure of themselves.
    Profiles {
        /// The tokens of the text that is planned for.
        tokens: u32,
    },
}

/// A worker that was started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Worker {
    /// The name of the device on which it runs.
    pub device: String,
    /// The worker's process id.
    pub pid: u32,
    /// The time at which the process began, in ticks since boot, since ids are used again.
    pub began: u64,
    /// The address on which the worker listens.
    pub address: String,
}

impl Worker {
    /// Whether the worker still runs.
    pub fn alive(&self) -> bool {
        began(self.pid).is_some_and(|began| began == self.began)
    }
}

/// The time at which a process began, in ticks since boot; none when it is gone, or a zombie without threads.
/// A zombie that has threads still holds what they hold, sockets too, and threads under a quota end slowly.
fn began(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold any characters, closing brackets too.
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?;
    let threads: u32 = fields.nth(16)?.parse().ok()?;
    let over = state == "X" || (state == "Z" && threads <= 1);
    (!over).then_some(())?;
    fields.nth(1)?.parse().ok()
}

/// Whether this process may create namespaces and groups.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// What a shaped testbed of this environment needs and this machine lacks, each with a remedy.
pub fn missing(environment: &Environment) -> Vec<String> {
    let delayed = environment.devices.iter().any(|d| !d.delay.is_zero() || d.loss > 0.0);
    let throttled = environment.devices.iter().any(|d| d.disk.is_some());
    let mut missing: Vec<String> =
        Network::missing(delayed).iter().map(ToString::to_string).collect();
    missing.extend(cgroup::missing(throttled));
    missing
}

impl Testbed {
    /// Brings up all of it: networks, limits, and quotas that give each device its speed.
    ///
    /// # Errors
    /// When the machine lacks something (all that it lacks is named), or the name is taken.
    pub fn up(environment: Environment, name: &str, loopback: bool, cache: &Path) -> Result<Self> {
        check_name("the testbed", name)?;
        if !loopback {
            let missing = missing(&environment);
            ensure!(
                missing.is_empty(),
                "this machine lacks what a testbed needs:\n- {}\nWithout, only --loopback works (no shaping, no limits)",
                missing.join("\n- ")
            );
        }
        let directory = state_directory(!loopback).join(name);
        let taken = directory.join("state.json").exists();
        ensure!(
            !taken,
            "testbed {name:?} is up: take it down first (`galaxy-testbed down {name}`), or give another --name"
        );
        // Removes what a crash left behind.
        sweep(name, loopback)?;
        std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        std::fs::write(directory.join("environment.toml"), environment.source())?;
        let calibration = Calibration::none(&environment);
        let name = name.to_owned();
        let (lock, metronome, passing) = (None, None, None);
        let mut testbed =
            Self { name, environment, loopback, calibration, directory, lock, metronome, passing };
        testbed.lock()?;
        match testbed.build(cache) {
            Ok(()) => Ok(testbed),
            Err(error) => {
                let swept = sweep(&testbed.name, loopback);
                drop(std::fs::remove_dir_all(&testbed.directory));
                swept.with_context(|| format!("after: {error:#}"))?;
                Err(error)
            }
        }
    }

    /// [`Testbed::up`] for a measurement: nothing is left under that name by a run that was killed, and
    /// nothing is on its way to the disk. Warns of others that are up. The testbed is also taken down when it
    /// is dropped, and when a signal ends this process.
    ///
    /// # Errors
    /// As [`Testbed::up`] and [`down`].
    pub fn anew(
        environment: Environment,
        name: &str,
        loopback: bool,
        cache: &Path,
    ) -> Result<Self> {
        rustix::fs::sync();
        down(name)?;
        for other in names() {
            eprintln!(
                "warning: testbed {other} is up, too, and takes time of the same cores, which figures will show; \
                 if nobody uses it: galaxy-testbed down {other}"
            );
        }
        let mut testbed = Self::up(environment, name, loopback, cache)?;
        testbed.passing = Some(Passing::new(name, loopback, &testbed.directory)?);
        Ok(testbed)
    }

    fn build(&mut self, cache: &Path) -> Result<()> {
        let keys = Keys::create(&self.directory.join("keys"))?;
        for device in &self.environment.devices {
            keys.of(device.name.as_str(), Role::Device)?;
        }
        keys.of(COORDINATOR, Role::Coordinator)?;
        keys.of("client", Role::Client)?;
        if !self.loopback {
            let environment = &self.environment;
            Network::up(&self.name, &links::places(environment))?;
            for device in &environment.devices {
                let limits = Limits {
                    quota: None,
                    memory: Some(environment.memory(device)),
                    disk: environment
                        .disk(device)
                        .map(|rate| DiskLimit { holding: cache.to_owned(), rate }),
                };
                Group::create(&self.name, device.name.as_str(), &limits)?;
            }
            // A testbed's groups outweigh all else, so what serves its devices needs one too.
            let served = Group::create(&self.name, COORDINATOR, &Limits::default())?;
            for daemon in network::daemons(&self.name) {
                // One that got a real-time priority needs no weight, and is let into no group.
                let _ = served.adopt(daemon.unsigned_abs());
            }
            let metronome = &mut self.metronome;
            let turn = environment.turn;
            let mut tell = |devices: &[Calibrated]| tell(&self.name, turn, devices, metronome);
            self.calibration = calibrate::calibrate(&self.name, environment, cache, &mut tell)?;
        }
        self.save()
    }

    fn save(&self) -> Result<()> {
        let state = SavedState { loopback: self.loopback, calibration: self.calibration.clone() };
        let text = serde_json::to_vec_pretty(&state)?;
        Ok(std::fs::write(self.directory.join("state.json"), text)?)
    }

    /// Opens a testbed that is up.
    ///
    /// # Errors
    /// When no testbed of that name is up.
    pub fn open(name: &str) -> Result<Self> {
        for loopback in [false, true] {
            let directory = state_directory(!loopback).join(name);
            let Ok(text) = std::fs::read(directory.join("state.json")) else { continue };
            let SavedState { loopback, calibration } =
                serde_json::from_slice(&text).with_context(|| {
                    format!("testbed {name:?} is damaged: `galaxy-testbed down {name}`")
                })?;
            let environment = directory.join("environment.toml");
            let environment = Environment::open(&environment.display().to_string())?;
            let name = name.to_owned();
            return Ok(Self {
                name,
                environment,
                loopback,
                calibration,
                directory,
                lock: None,
                metronome: None,
                passing: None,
            });
        }
        let names = names();
        let up = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        bail!("no testbed {name:?} is up (up: {up}); `galaxy-testbed up ENVIRONMENT` makes one")
    }

    /// Opens the only testbed that is up, or the one of that name.
    ///
    /// # Errors
    /// When none is up, or several are and no name is given.
    pub fn find(name: Option<&str>) -> Result<Self> {
        match (name, names().as_slice()) {
            (Some(name), _) => Self::open(name),
            (None, [one]) => Self::open(one),
            (None, []) => bail!("no testbed is up; `galaxy-testbed up ENVIRONMENT` makes one"),
            (None, many) => bail!("several are up ({}): say which by --name", many.join(", ")),
        }
    }

    /// Keeps other processes from using or removing the testbed, as long as this value lives.
    ///
    /// # Errors
    /// When another process has locked it.
    pub fn lock(&mut self) -> Result<()> {
        let file = File::create(self.directory.join("lock"))?;
        match file.try_lock() {
            Ok(()) => self.lock = Some(file),
            Err(TryLockError::WouldBlock) => {
                bail!("testbed {:?} is in use by another galaxy-testbed", self.name)
            }
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        Ok(())
    }

    /// The directory of keys, logs and state.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The identity of the coordinator, or of a client.
    pub fn identity(&self, name: &str) -> PathBuf {
        self.directory.join("keys").join(name)
    }

    /// The index of a device.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn device(&self, name: &str) -> Result<usize> {
        let devices = &self.environment.devices;
        devices.iter().position(|d| d.name.as_str() == name).with_context(|| {
            let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
            format!("{:?} has no device {name:?}; it has {}", self.name, names.join(", "))
        })
    }

    /// A command that runs on a device (or at [`COORDINATOR`]), within its network and limits.
    ///
    /// # Errors
    /// When there is no such place.
    pub fn command(&self, place: &str, hold: Hold, program: &Path) -> Result<Command> {
        if place != COORDINATOR {
            self.device(place)?;
        }
        if self.loopback {
            return Ok(Command::new(program));
        }
        match place {
            COORDINATOR => inside::command(&self.name, COORDINATOR, Hold::Compute, None, program),
            device => inside::command(&self.name, device, hold, None, program),
        }
    }

    /// The resources that a device has used.
    ///
    /// # Errors
    /// When its group cannot be read.
    pub fn usage(&self, device: usize) -> Result<Usage> {
        if self.loopback {
            return Ok(Usage::default());
        }
        Group::open(&self.name, self.environment.devices[device].name.as_str())?.usage()
    }

    /// Moves this process into the group beside the devices, so that they do not keep it waiting.
    ///
    /// # Errors
    /// When its groups are gone.
    pub fn join(&self) -> Result<()> {
        match self.loopback {
            true => Ok(()),
            false => Group::open(&self.name, COORDINATOR)?.adopt(std::process::id()),
        }
    }

    /// The processor time of the testbed's own processes beside the devices, in ns.
    pub fn overhead(&self) -> u64 {
        if self.loopback {
            return 0;
        }
        network::daemons(&self.name).into_iter().map(|pid| took(pid.unsigned_abs())).sum()
    }

    /// Starts a worker on every device that serves the models below `models`, and waits until all listen. The
    /// files that they make or bring of models are in `caches`, by device name, or where workers keep them by
    /// default.
    ///
    /// # Errors
    /// When a worker does not start.
    pub fn start_workers(
        &self,
        models: &Path,
        plain: bool,
        caches: Option<&Path>,
    ) -> Result<Vec<Worker>> {
        self.stop_workers()?;
        let mut workers = Vec::new();
        for (i, device) in self.environment.devices.iter().enumerate() {
            let name = device.name.as_str();
            let hold = self.environment.hold;
            let mut command = self.command(name, hold, &program("galaxy-worker")?)?;
            let listen = match self.loopback {
                true => "127.0.0.1:0".to_owned(),
                false => format!("{}:{PORT}", Network::address(i)),
            };
            command.args(["--threads", "1", "--listen", &listen]);
            command.arg("--identity").arg(self.identity(name)).arg("--models").arg(models);
            if plain {
                command.arg("--plain");
            }
            if let Some(caches) = caches {
                command.arg("--cache").arg(caches.join(name));
            }
            let undisturbed = Undisturbed::begin();
            let out = File::create(self.log(name))?;
            command.stdin(Stdio::null()).stderr(out.try_clone()?).stdout(out);
            // A group of its own: it outlives `up`, and no Ctrl-C of ours reaches it.
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            let child = command.spawn().with_context(|| format!("a worker on {name}"))?;
            let pid = child.id();
            let began =
                began(pid).with_context(|| format!("the worker on {name} ended at once"))?;
            workers.push(Worker { device: name.to_owned(), pid, began, address: String::new() });
            self.keep(&workers, &undisturbed)?;
            // A thread has to wait for the process, so that it is no zombie when it ends before us.
            std::thread::spawn(move || drop({ child }.wait()));
        }
        for worker in &mut workers {
            worker.address = self.listening(worker)?;
        }
        self.keep(&workers, &Undisturbed::begin())?;
        Ok(workers)
    }

    /// The file of what the worker on a device prints.
    pub fn log(&self, device: &str) -> PathBuf {
        self.directory.join(format!("{device}.log"))
    }

    fn keep(&self, workers: &[Worker], _: &Undisturbed) -> Result<()> {
        Ok(std::fs::write(self.directory.join("workers.json"), serde_json::to_vec(workers)?)?)
    }

    fn listening(&self, worker: &Worker) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = std::fs::read_to_string(self.log(&worker.device)).unwrap_or_default();
            if let Some((_, address)) = said.split_once("listening on ")
                && let Some(address) = address.split_once('\n')
            {
                return Ok(address.0.trim().to_owned());
            }
            let late = Instant::now() > deadline;
            ensure!(
                worker.alive() && !late,
                "the worker on {} {}; it said:\n{said}",
                worker.device,
                if late { "does not listen" } else { "ended" }
            );
            std::thread::sleep(LOOK);
        }
    }

    /// The workers that were started last.
    pub fn workers(&self) -> Vec<Worker> {
        let text = std::fs::read(self.directory.join("workers.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Ends all workers of the testbed.
    ///
    /// # Errors
    /// When a worker does not end.
    pub fn stop_workers(&self) -> Result<()> {
        end(&self.workers())?;
        self.keep(&[], &Undisturbed::begin())
    }

    /// Puts the threads that multiply under their devices' quotas. It has to be called once a model is placed
    /// on `devices`: only then do the threads exist.
    ///
    /// # Errors
    /// When a worker is gone, or runs no kernels.
    pub fn hold<'a>(&self, devices: impl Iterator<Item = &'a str>) -> Result<()> {
        if self.loopback {
            return Ok(());
        }
        for name in devices {
            let limited = self.limited(name)?;
            for thread in compute_threads(limited.pid)? {
                limited.hold(thread)?;
            }
        }
        Ok(())
    }

    /// Puts all threads of a process that is no worker under the quota of a device.
    ///
    /// # Errors
    /// When there is no such device, or the process is gone.
    pub fn hold_all(&self, device: &str, pid: u32) -> Result<()> {
        if self.loopback {
            return Ok(());
        }
        let limited = self.limited_as(device, pid)?;
        let tasks = format!("/proc/{pid}/task");
        for entry in std::fs::read_dir(&tasks).with_context(|| format!("{pid} is gone"))? {
            if let Some(thread) = entry?.file_name().to_str().and_then(|id| id.parse().ok()) {
                limited.hold(thread)?;
            }
        }
        Ok(())
    }

    fn limited(&self, name: &str) -> Result<Limited> {
        self.limited_as(name, self.worker(name)?.pid)
    }

    pub(crate) fn limited_as(&self, name: &str, pid: u32) -> Result<Limited> {
        let set = &self.calibration.devices[self.device(name)?];
        let quota = set.quota.is_some() && self.environment.hold == Hold::Compute;
        let group = quota.then(|| Group::open(&self.name, name)).transpose()?;
        Ok(Limited { pid, core: set.core, group })
    }

    /// Puts threads that multiply under their devices' quotas as soon as they exist, as long as the result
    /// lives: for kernels that run before a model is placed, as profiles do.
    ///
    /// # Errors
    /// When a worker is gone.
    pub fn holding(&self) -> Result<Holding> {
        let names = self.environment.devices.iter().map(|device| device.name.as_str());
        let limited = names.filter(|_| !self.loopback).map(|name| self.limited(name));
        Ok(Holding::start(limited.collect::<Result<_>>()?))
    }

    fn worker(&self, device: &str) -> Result<Worker> {
        let found = self.workers().into_iter().find(|w| w.device == device);
        found.with_context(|| format!("no worker was started on {device}"))
    }

    /// Starts the ballast of devices without gates, which takes their quotas while they wait, as long as the
    /// result lives.
    ///
    /// # Errors
    /// When a process of it does not start.
    pub fn ballast(&self) -> Result<Vec<Ballast>> {
        let mut limited = Vec::new();
        for device in self.calibration.devices.iter().filter(|d| d.quota.is_some()) {
            // What does not pass a gate in its turn is gone anyway.
            if Group::open(&self.name, &device.name)?.gate().is_none() {
                limited.push(device);
            }
        }
        limited.into_iter().map(|d| Ballast::start(&self.name, &d.name, d.core)).collect()
    }

    /// The processor time that the kernels of a device took since its worker began, in ns.
    ///
    /// # Errors
    /// When the worker is gone.
    pub fn computed(&self, device: usize) -> Result<u64> {
        let name = self.environment.devices[device].name.as_str();
        let worker = self.worker(name)?;
        let of = |thread: &u32| {
            let path = format!("/proc/{}/task/{thread}/schedstat", worker.pid);
            let text = std::fs::read_to_string(path).ok()?;
            text.split_whitespace().next()?.parse::<u64>().ok()
        };
        Ok(threads(worker.pid)?.iter().filter_map(of).sum())
    }

    /// The cluster of all devices, split as `split` says.
    pub fn cluster(&self, model: &Path, strategy: Strategy, split: Split<'_>) -> Cluster {
        let workers = self.workers();
        let (tiles, lengths) = match split {
            Split::Shares { tiles, .. } => (Some(tiles), vec![cluster::DEFAULT_LENGTH]),
            Split::Profiles { tokens } => (None, vec![tokens]),
        };
        let devices = self.environment.devices.iter().zip(workers).enumerate();
        let devices = devices.map(|(i, (device, worker))| cluster::DeviceConfig {
            name: device.name.clone(),
            address: worker.address,
            addresses: Vec::new(),
            memory: self.environment.memory(device),
            threads: Some(1),
            share: match split {
                Split::Shares { shares, .. } => Some(shares[i]),
                Split::Profiles { .. } => None,
            },
        });
        Cluster {
            kv_cache_tokens: Some(0),
            generate: None,
            kv_cache_format: galaxy_common::CacheType::F32,
            name: self.name.clone(),
            model: model.to_owned(),
            identity: self.identity(COORDINATOR),
            authority: None,
            strategy,
            wire: Some(WireType::F32),
            activations: galaxy_common::Activations::default(),
            tiles,
            listen: "127.0.0.1:0".to_owned(),
            max_rows: cluster::DEFAULT_MAX_ROWS,
            queue: 4,
            client_memory: galaxy_coord::client_memory::DEFAULT_CLIENT_MEMORY,
            speculation: false,
            link: Some(LinkType::Tls),
            plain: false,
            lossy: false,
            weight_streaming: Reading::Auto,
            warnings: Vec::new(),
            weights_format: None,
            lengths,
            texts: 1,
            profiles: self.directory.join(cluster::DEFAULT_PROFILES),
            drift: cluster::DEFAULT_DRIFT,
            patience: cluster::DEFAULT_PATIENCE,
            timeout: Duration::from_secs(600),
            devices: devices.collect(),
        }
    }

    /// Mends the shares of devices: cores of a machine that others share do not keep their speed.
    ///
    /// # Errors
    /// When a device stays too far from its speed.
    pub fn settle(&mut self, cache: &Path) -> Result<()> {
        if self.loopback {
            return Ok(());
        }
        let (turn, metronome) = (self.environment.turn, &mut self.metronome);
        let mut tell = |devices: &[Calibrated]| tell(&self.name, turn, devices, metronome);
        self.calibration.again(&self.name, cache, &mut tell)?;
        self.save()
    }

    /// The testbed, for measurements that count.
    ///
    /// # Errors
    /// When a device is too far from its speed.
    pub fn calibrated(self) -> Result<Self> {
        self.calibration.check()?;
        Ok(self)
    }

    /// Makes a device `factor` times as slow as its environment says, while it works.
    ///
    /// # Errors
    /// When the device has no quota.
    pub fn slow(&mut self, device: usize, factor: f64) -> Result<()> {
        let mut devices = self.calibration.devices.clone();
        let told = devices[device].set_share.as_mut().context(
            "a device without a speed has no quota to be made smaller: choose another device",
        )?;
        *told /= factor;
        tell(&self.name, self.environment.turn, &devices, &mut self.metronome)
    }

    /// Removes the testbed and all that it made.
    ///
    /// # Errors
    /// When something of the testbed stays.
    pub fn down(self) -> Result<()> {
        remove(&self.name, self.loopback, &self.directory)
    }
}

/// The names of the testbeds that are up, or were before a crash.
pub fn names() -> Vec<String> {
    let mut names = Vec::new();
    for root in [true, false] {
        let entries = std::fs::read_dir(state_directory(root)).into_iter().flatten().flatten();
        names.extend(entries.filter_map(|e| e.file_name().into_string().ok()));
    }
    if is_root() {
        names.extend(network::testbeds());
    }
    names.sort();
    names.dedup();
    names
}
