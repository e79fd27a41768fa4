//! Kernel threads under their devices' quotas: those of a placed model, or new ones as soon as there are any.

use crate::{cgroup::Group, priority, processes::PATIENCE};
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeSet,
    os::unix::fs::MetadataExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

/// The time between two looks for new threads. Until a thread is found it has no quota: a profile measures
/// for seconds, and repeats what does not fit.
const LOOK: Duration = Duration::from_millis(2);
/// The same time while no new threads are expected: what is measured then shares a core with the thread that
/// looks.
const REST: Duration = Duration::from_millis(50);
/// The number of looks that read the names of all threads after their number has changed: a thread sets its
/// name some time after it starts. Other looks read only the number, which disturbs the kernels on the same
/// core far less.
const NAMES: u32 = 8;
/// One look in this many reads the names anyway: a thread may end as another begins.
const ANYHOW: u32 = 32;

/// A worker whose kernels have one core, or a share of one.
pub(crate) struct Limited {
    pub(crate) pid: u32,
    pub(crate) core: usize,
    /// The group whose quota its kernels are under; none where it has no quota.
    pub(crate) group: Option<Group>,
}

impl Limited {
    /// Binds a thread to the core, and puts it under the quota.
    pub(crate) fn hold(&self, thread: u32) -> Result<()> {
        let id = rustix::thread::Pid::from_raw(thread.cast_signed());
        rustix::thread::sched_setaffinity(id, &core(self.core))?;
        self.group.as_ref().map_or(Ok(()), |group| group.hold_thread(self.pid, thread))
    }

    /// Puts new kernel threads under the quota, and forgets those that have gone.
    fn hold_new(&self, known: &mut Known) {
        // A worker that is gone has no threads, and whoever uses it says so.
        let tasks = std::fs::metadata(format!("/proc/{}/task", self.pid));
        let count = tasks.map_or(0, |tasks| tasks.nlink());
        if count != known.count {
            (known.count, known.looks) = (count, 0);
        }
        known.looks += 1;
        if known.looks > NAMES && !known.looks.is_multiple_of(ANYHOW) {
            return;
        }
        let there = threads(self.pid).unwrap_or_default();
        known.held.retain(|thread| there.contains(thread));
        for thread in there {
            // A thread may end while we look.
            if !known.held.contains(&thread) && self.hold(thread).is_ok() {
                known.held.insert(thread);
            }
        }
    }
}

/// What is known of a worker's threads.
#[derive(Clone, Default)]
struct Known {
    /// The ids of the threads under the quota.
    held: BTreeSet<u32>,
    /// The number of threads, as the number of links of their directory.
    count: u64,
    /// The looks since that number changed.
    looks: u32,
}

/// Looks for new kernel threads, in a thread of its own, until it is dropped.
pub struct Holding {
    over: Arc<AtomicBool>,
    pace: Pace,
    thread: Option<JoinHandle<()>>,
}

/// The control over how often a [`Holding`] looks.
#[derive(Clone)]
pub struct Pace {
    resting: Arc<AtomicBool>,
    looks: Thread,
}

impl Pace {
    /// Lets it look at once, then seldom if `resting`, and often where new threads are expected.
    pub fn rest(&self, resting: bool) {
        self.resting.store(resting, Ordering::Relaxed);
        self.looks.unpark();
    }
}

impl Holding {
    pub(crate) fn start(limited: Vec<Limited>) -> Self {
        let over = Arc::new(AtomicBool::new(limited.is_empty()));
        let resting = Arc::new(AtomicBool::new(false));
        let (end, rests) = (over.clone(), resting.clone());
        let thread = std::thread::spawn(move || {
            if !limited.is_empty() {
                let me = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
                priority::real_time(me, priority::HOLDER);
            }
            let mut known = vec![Known::default(); limited.len()];
            while !end.load(Ordering::Relaxed) {
                limited.iter().zip(&mut known).for_each(|(limited, known)| limited.hold_new(known));
                std::thread::park_timeout(if rests.load(Ordering::Relaxed) { REST } else { LOOK });
            }
        });
        let pace = Pace { resting, looks: thread.thread().clone() };
        Self { over, pace, thread: Some(thread) }
    }

    /// The control over how often it looks: often, until `Pace::rest` says otherwise.
    pub fn pace(&self) -> Pace {
        self.pace.clone()
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.pace.looks.unpark();
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            drop(thread.join());
        }
    }
}

/// Processor time of all threads of a process, in ns.
pub(crate) fn took(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

/// The threads of a worker that run kernels, once there are any: a thread sets its name some time after it
/// starts.
pub(crate) fn compute_threads(pid: u32) -> Result<Vec<u32>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = threads(pid)?;
        if !found.is_empty() {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "worker {pid} has no thread that runs kernels");
        std::thread::sleep(LOOK);
    }
}

/// The threads of a worker that run kernels just now, by their names.
pub(crate) fn threads(pid: u32) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    let tasks = format!("/proc/{pid}/task");
    for entry in std::fs::read_dir(&tasks).with_context(|| format!("worker {pid} is gone"))? {
        let entry = entry?;
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if name.starts_with("compute") || name.starts_with("galaxy-kernel") {
            found.extend(entry.file_name().to_str().and_then(|id| id.parse::<u32>().ok()));
        }
    }
    Ok(found)
}

/// The set of one core.
pub(crate) fn core(index: usize) -> rustix::thread::CpuSet {
    let mut set = rustix::thread::CpuSet::new();
    set.set(index);
    set
}
