//! What holds a device to its limits: control groups of the processor, memory and disk.
//!
//! Each controller is looked up by itself, in a hierarchy of the first version or in the unified
//! one of the second, so that machines which have both work too. In every hierarchy a device has
//! the group `galaxy-TESTBED/DEVICE`, and in that of the processor `compute` below it: what is in
//! there runs under the quota, and what is beside it does not. The names are all that there is to
//! know about a testbed, so that [`remove`] needs no record of it.

mod files;
mod hierarchies;

pub use hierarchies::Hierarchies;

use crate::{environment::check_name, priority};
use anyhow::{Context, Result, bail, ensure};
use files::{entry, hand_on, make_group, number, processes_below, remove_groups, text, write};
use galaxy_common::Bytes;
use hierarchies::{ControllerPath, NO_ACCOUNTS, NO_CPU, NO_DISK, NO_MEMORY, Version};
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// The group below a device's own in which the quota holds.
const COMPUTE: &str = "compute";
/// The shortest slice that the kernel grants.
const SLICE_US: f64 = 1000.0;
/// The shortest period in use. A device above half a core gets a longer slice instead of a shorter
/// period: with periods of 1 ms the metronome, which comes each half, would be too coarse.
const SHORTEST_PERIOD_US: f64 = 2000.0;
/// The smallest quota: the longest period of the kernel is 1 s.
const LEAST_QUOTA: f64 = SLICE_US / 1e6;
/// The weight of a testbed against any one other process where both want a core, as a factor: enough that
/// quotas are kept beside compilers and browsers. Beside two compilers on two cores a quota of 0.75 gave 0.2
/// to 0.5 of a core without it, and with it 0.7495 to 0.7505.
///
/// What must not wait for devices, like the coordinator, belongs in a group of its own without
/// limits: on a core with three devices of 0.3, one in a hundred wakes came 7.8 ms late outside of
/// such a group, and 1.2 ms late inside.
const WEIGHT: u32 = 100;
/// How long killed processes may take to be gone, and their groups with them.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time between two looks at a group that still holds something, of which the kernel does not report the
/// end.
const LOOK: Duration = Duration::from_millis(10);

/// The limits of a device. A field that is `None` limits nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Limits {
    /// The share of one core that the threads under the quota get together.
    pub quota: Option<f64>,
    /// The most memory of all its processes together, page cache included.
    pub memory: Option<Bytes>,
    /// The rate at which it reads from a disk.
    pub disk: Option<DiskLimit>,
}

/// How fast a device reads from a disk.
#[derive(Clone, PartialEq, Debug)]
pub struct DiskLimit {
    /// Any path on the disk.
    pub holding: PathBuf,
    /// The most bytes that are read in each second.
    pub rate: Bytes,
}

/// The resources that a device has used since its group was created.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub struct Usage {
    /// Processor time under the quota, in nanoseconds.
    pub compute_ns: u64,
    /// Processor time of the whole device, in nanoseconds.
    pub total_ns: u64,
    /// Periods of the quota in which something ran.
    pub periods: u64,
    /// The periods among them in which the quota ran out.
    pub throttled: u64,
    /// The most memory that it held at once; `None` where the kernel keeps no such count.
    pub memory_peak: Option<Bytes>,
    /// The processes that were killed for exceeding the memory limit.
    pub oom_kills: u64,
}

impl Hierarchies {
    /// What this machine lacks for the limits of a testbed. It is found by creating a group and removing it.
    pub fn missing(&self, disk: bool) -> Vec<String> {
        let mut missing = Vec::new();
        for (place, lack) in [
            (&self.cpu, NO_CPU),
            (&self.accounts, NO_ACCOUNTS),
            (&self.memory, NO_MEMORY),
            (if disk { &self.disk } else { &self.cpu }, if disk { NO_DISK } else { NO_CPU }),
        ] {
            if place.is_none() && !missing.iter().any(|m| m == lack) {
                missing.push(lack.to_owned());
            }
        }
        let quota = self.cpu.is_some().then_some(0.5);
        let memory = self.memory.is_some().then_some(Bytes(64 << 20));
        let probe = format!("probe-{}", std::process::id());
        match Group::create_in(self.clone(), &probe, "probe", &Limits { quota, memory, disk: None })
        {
            Ok(group) => {
                if disk && let Some(place) = &self.disk {
                    let file = group.device(place).join(disk_file(place));
                    if !file.exists() {
                        missing.push(format!("{} is not there; {NO_DISK}", file.display()));
                    }
                }
            }
            Err(error) => missing.push(format!("{error:#}")),
        }
        if let Err(error) = self.remove(&probe) {
            missing.push(format!("{error:#}"));
        }
        missing
    }

    /// Removes all groups of a testbed and kills what is in them.
    ///
    /// # Errors
    /// When a process does not end, or the kernel keeps a group.
    pub fn remove(&self, testbed: &str) -> Result<()> {
        check_name("the testbed", testbed)?;
        for place in self.places() {
            let top = place.root.join(top(testbed));
            let deadline = Instant::now() + PATIENCE;
            while let Err(error) = remove_groups(&top) {
                let inside = processes_below(&top);
                ensure!(
                    Instant::now() < deadline,
                    "cannot remove {} ({error}); still in there: {inside:?}",
                    top.display()
                );
                let me = std::process::id();
                if inside.contains(&me) {
                    // Whoever takes a testbed down from inside must live to see it done.
                    write(&place.root.join("cgroup.procs"), me)?;
                }
                kill(inside.into_iter().filter(|&id| id != me));
                std::thread::sleep(LOOK);
            }
        }
        Ok(())
    }
}

/// What this machine lacks for quotas and memory limits, and for limits of disks where they are
/// asked for; each with what to do about it.
pub fn missing(disk: bool) -> Vec<String> {
    match Hierarchies::find() {
        Ok(found) => found.missing(disk),
        Err(error) => vec![format!("{error:#}")],
    }
}

/// Removes all groups of a testbed and kills what is in them; does nothing where there are none.
///
/// # Errors
/// When a process does not end, or the kernel keeps a group.
pub fn remove(testbed: &str) -> Result<()> {
    Hierarchies::find()?.remove(testbed)
}

/// The groups of one device.
#[derive(Clone, Debug)]
pub struct Group {
    hierarchies: Hierarchies,
    name: PathBuf,
}

impl Group {
    /// Makes the groups of a device, with its limits.
    ///
    /// # Errors
    /// When they are there already, or when a controller that a limit needs is not.
    pub fn create(testbed: &str, device: &str, limits: &Limits) -> Result<Self> {
        Self::create_in(Hierarchies::find()?, testbed, device, limits)
    }

    /// Opens the groups of a device that were created before.
    ///
    /// # Errors
    /// When the system does not say what is mounted.
    pub fn open(testbed: &str, device: &str) -> Result<Self> {
        Self::open_in(Hierarchies::find()?, testbed, device)
    }

    /// Like [`Group::create`], in hierarchies found before.
    ///
    /// # Errors
    /// As [`Group::create`].
    pub fn create_in(
        hierarchies: Hierarchies,
        testbed: &str,
        device: &str,
        limits: &Limits,
    ) -> Result<Self> {
        let group = Self::open_in(hierarchies, testbed, device)?;
        for place in group.hierarchies.places() {
            let dir = group.device(place);
            ensure!(
                !dir.exists(),
                "{} is there already: `galaxy-testbed down {testbed}` removes what is left",
                dir.display()
            );
        }
        if let Err(error) = group.make(testbed, limits) {
            for place in group.hierarchies.places() {
                let _ = remove_groups(&group.device(place));
            }
            return Err(error);
        }
        Ok(group)
    }

    fn open_in(hierarchies: Hierarchies, testbed: &str, device: &str) -> Result<Self> {
        check_name("the testbed", testbed)?;
        check_name("a device", device)?;
        Ok(Self { hierarchies, name: Path::new(&top(testbed)).join(device) })
    }

    fn make(&self, testbed: &str, limits: &Limits) -> Result<()> {
        for place in self.hierarchies.places() {
            let above = place.root.join(top(testbed));
            let (device, compute) = (self.device(place), self.compute(place));
            make_group(&above)?;
            if place.version == Version::Two {
                let controllers = self.hierarchies.handed_on(place);
                hand_on(&place.root, &controllers)?;
                hand_on(&above, &controllers)?;
            }
            if self.hierarchies.cpu.as_ref() == Some(place) {
                let (file, one) = match place.version {
                    Version::One => ("cpu.shares", 1024),
                    Version::Two => ("cpu.weight", 100),
                };
                write(&above.join(file), one * WEIGHT)
                    .context("the kernel needs CONFIG_FAIR_GROUP_SCHED")?;
            }
            make_group(&device)?;
            if self.hierarchies.splits(place) {
                make_group(&compute)?;
                if place.version == Version::Two {
                    // First the type: a group of processes may not stand below other processes.
                    write(&compute.join("cgroup.type"), "threaded")?;
                    if self.hierarchies.handed_on(place).contains(&"cpu") {
                        hand_on(&device, &["cpu"])?;
                    }
                }
            }
        }
        if let Some(quota) = limits.quota {
            self.set_quota(quota)?;
        }
        if let Some(memory) = limits.memory {
            self.set_memory(memory)?;
        }
        if let Some(disk) = &limits.disk {
            self.set_disk(disk)?;
        }
        Ok(())
    }

    fn device(&self, place: &ControllerPath) -> PathBuf {
        place.root.join(&self.name)
    }

    fn compute(&self, place: &ControllerPath) -> PathBuf {
        self.device(place).join(COMPUTE)
    }

    fn cpu(&self) -> Result<&ControllerPath> {
        self.hierarchies.cpu.as_ref().context(NO_CPU)
    }

    /// Sets the share of one core that `compute` gets, while it runs.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_quota(&self, share: f64) -> Result<()> {
        let (slice, period) = slice(share)?;
        let place = self.cpu()?;
        let (dir, option) = (self.compute(place), "the kernel needs CONFIG_CFS_BANDWIDTH");
        match place.version {
            Version::One => {
                // Without a quota in between, or a pair that is refused could come about.
                for (file, value) in [
                    ("quota", -1),
                    ("period", period.cast_signed()),
                    ("quota", slice.cast_signed()),
                ] {
                    write(&dir.join(format!("cpu.cfs_{file}_us")), value).context(option)?;
                }
                Ok(())
            }
            Version::Two => {
                write(&dir.join("cpu.max"), format!("{slice} {period}")).context(option)
            }
        }
    }

    /// The file that stops `compute` and lets it go on; none without the unified hierarchy.
    pub fn gate(&self) -> Option<PathBuf> {
        let unified = self.hierarchies.unified.as_ref()?;
        Some(self.compute(unified).join("cgroup.freeze")).filter(|file| file.exists())
    }

    fn set_memory(&self, limit: Bytes) -> Result<()> {
        let place = self.hierarchies.memory.as_ref().context(NO_MEMORY)?;
        let (dir, option) = (self.device(place), "the kernel needs CONFIG_MEMCG");
        // Nothing may go to swap: what is above the limit is killed, not slow.
        let files: &[(&str, u64)] = match place.version {
            Version::One => &[
                ("memory.limit_in_bytes", limit.0),
                ("memory.memsw.limit_in_bytes", limit.0),
                ("memory.swappiness", 0),
            ],
            Version::Two => {
                &[("memory.max", limit.0), ("memory.swap.max", 0), ("memory.oom.group", 1)]
            }
        };
        for (i, (file, value)) in files.iter().enumerate() {
            let path = dir.join(file);
            // Kernels without swap have no files for it.
            if i == 0 || path.exists() {
                write(&path, value).context(option)?;
            }
        }
        Ok(())
    }

    fn set_disk(&self, limit: &DiskLimit) -> Result<()> {
        let place = self.hierarchies.disk.as_ref().context(NO_DISK)?;
        let number = disk_holding(&limit.holding)?;
        let rate = limit.rate.0;
        let value = match place.version {
            Version::One => format!("{number} {rate}"),
            Version::Two => format!("{number} rbps={rate}"),
        };
        write(&self.device(place).join(disk_file(place)), value)
            .context("the kernel needs CONFIG_BLK_DEV_THROTTLING")
    }

    /// Takes a process in, with all its threads: under every limit except the quota.
    ///
    /// # Errors
    /// When the process or the group is gone.
    pub fn adopt(&self, pid: u32) -> Result<()> {
        for place in self.hierarchies.places() {
            self.enter(&self.device(place), "cgroup.procs", pid)?;
        }
        Ok(())
    }

    /// Takes a process in, with all its threads: under every limit, the quota among them.
    ///
    /// # Errors
    /// When the process or the group is gone.
    pub fn hold_process(&self, pid: u32) -> Result<()> {
        self.adopt(pid)?;
        for place in self.hierarchies.places() {
            if self.hierarchies.splits(place) {
                self.enter(&self.compute(place), "cgroup.procs", pid)?;
            }
        }
        Ok(())
    }

    /// Puts one thread of an adopted process under the quota.
    ///
    /// Behind a gate it gets the lowest real-time priority, where that is granted: what links do
    /// must not take the time in which the gate is open, since nothing makes up for it.
    ///
    /// # Errors
    /// When the thread or the group is gone.
    pub fn hold_thread(&self, pid: u32, tid: u32) -> Result<()> {
        let gated = self.gate().is_some();
        for place in self.hierarchies.places() {
            if self.hierarchies.splits(place) {
                let file = match place.version {
                    Version::One => "tasks",
                    Version::Two => "cgroup.threads",
                };
                // Groups of the processor's first version let nothing real-time in.
                let outside = gated
                    && place.version == Version::One
                    && Some(place) == self.hierarchies.cpu.as_ref()
                    && Some(place) != self.hierarchies.accounts.as_ref();
                let dir = if outside { place.root.clone() } else { self.compute(place) };
                self.enter(&dir, file, tid)
                    .with_context(|| format!("a thread of process {pid}"))?;
            }
        }
        if gated {
            priority::real_time(tid, priority::KERNELS);
        }
        Ok(())
    }

    /// Lets a process go, with all its threads: it runs without limits from then on.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn release(&self, pid: u32) -> Result<()> {
        for place in self.hierarchies.places() {
            self.enter(&place.root, "cgroup.procs", pid)?;
        }
        Ok(())
    }

    fn enter(&self, dir: &Path, file: &str, id: u32) -> Result<()> {
        ensure!(dir.is_dir(), "there is no group {}: `galaxy-testbed up` makes it", dir.display());
        write(&dir.join(file), id)
    }

    /// The resources that the device has used since its group was created.
    ///
    /// # Errors
    /// When the groups are gone.
    pub fn usage(&self) -> Result<Usage> {
        let cpu = self.cpu()?;
        let accounts = self.hierarchies.accounts.as_ref().context(NO_ACCOUNTS)?;
        let time = |dir: &Path| match accounts.version {
            Version::One => number(&dir.join("cpuacct.usage")),
            Version::Two => Ok(1000 * entry(&dir.join("cpu.stat"), "usage_usec")?),
        };
        let stat = self.compute(cpu).join("cpu.stat");
        let mut usage = Usage {
            compute_ns: time(&self.compute(accounts))?,
            total_ns: time(&self.device(accounts))?,
            periods: entry(&stat, "nr_periods")?,
            throttled: entry(&stat, "nr_throttled")?,
            ..Usage::default()
        };
        if let Some(memory) = &self.hierarchies.memory {
            let dir = self.device(memory);
            let (peak, kills) = match memory.version {
                Version::One => ("memory.max_usage_in_bytes", "memory.oom_control"),
                Version::Two => ("memory.peak", "memory.events"),
            };
            usage.memory_peak = number(&dir.join(peak)).ok().map(Bytes);
            usage.oom_kills = entry(&dir.join(kills), "oom_kill")?;
        }
        Ok(usage)
    }

    /// A number of the kernel's account of the device's memory, by its name, like `rss`.
    ///
    /// # Errors
    /// When it keeps none.
    pub fn memory_stat(&self, name: &str) -> Result<u64> {
        let memory = self.hierarchies.memory.as_ref().context(NO_MEMORY)?;
        let name = if memory.version == Version::Two && name == "rss" { "anon" } else { name };
        entry(&self.device(memory).join("memory.stat"), name)
    }

    /// How often memory was asked for that the limit did not allow: at first the system takes back pages of
    /// files.
    ///
    /// # Errors
    /// When the kernel keeps no account of it.
    pub fn refused(&self) -> Result<u64> {
        let memory = self.hierarchies.memory.as_ref().context(NO_MEMORY)?;
        match memory.version {
            Version::One => number(&self.device(memory).join("memory.failcnt")),
            Version::Two => entry(&self.device(memory).join("memory.events"), "max"),
        }
    }

    /// The processes of the device, in order.
    pub fn processes(&self) -> Vec<u32> {
        let all = self.hierarchies.places().into_iter();
        let ids: BTreeSet<u32> = all.flat_map(|p| processes_below(&self.device(p))).collect();
        ids.into_iter().collect()
    }
}

fn top(testbed: &str) -> String {
    format!("galaxy-{testbed}")
}

/// The slice and period that give a share of one core, in microseconds: the shortest there are, so
/// that a device is slow rather than stop and go.
fn slice(share: f64) -> Result<(u64, u64)> {
    let sound = share.is_finite() && share >= LEAST_QUOTA;
    ensure!(
        sound,
        "a quota of {share} of a core: {LEAST_QUOTA} is the least that the kernel keeps"
    );
    let period = (SLICE_US / share).max(SHORTEST_PERIOD_US).round();
    Ok(((share * period).round() as u64, period as u64))
}

fn disk_file(place: &ControllerPath) -> &'static str {
    match place.version {
        Version::One => "blkio.throttle.read_bps_device",
        Version::Two => "io.max",
    }
}

/// The number of the disk that holds a path, as `254:0`. Limits are kept for whole disks.
fn disk_holding(path: &Path) -> Result<String> {
    let device = fs::metadata(path)
        .with_context(|| format!("cannot tell the disk of {}", path.display()))?
        .dev();
    // How Linux packs the two numbers.
    let major = ((device >> 32) & 0xffff_f000) | ((device >> 8) & 0xfff);
    let minor = ((device >> 12) & 0xffff_ff00) | (device & 0xff);
    let mut number = format!("{major}:{minor}");
    let Ok(found) = fs::canonicalize(format!("/sys/dev/block/{number}")) else {
        bail!(
            "{} is not on a disk whose reads can be limited (its file system is device {number}, \
             which is no block device); choose a directory on one",
            path.display()
        );
    };
    if found.join("partition").exists() {
        number = text(&found.join("../dev")).trim().to_owned();
    }
    Ok(number)
}

/// Ends processes at once, stopped ones too. A process that is gone already is no error.
fn kill(processes: impl Iterator<Item = u32>) {
    let ids: Vec<String> = processes.map(|id| id.to_string()).collect();
    if !ids.is_empty() {
        let _ = Command::new("kill").arg("-KILL").args(ids).stderr(Stdio::null()).status();
    }
}

#[cfg(test)]
mod tests;
