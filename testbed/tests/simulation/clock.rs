//! A virtual clock, which advances only while everybody waits for it.
//!
//! A coordinator and its workers run in one async runtime whose clock is virtual: it leaps to the next timer
//! when nothing else is left to do. But programs run on threads, over sockets, and the runtime sees neither.
//! So before it leaps, all other threads of the process must sleep, and no socket may be ready.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open},
    thread::{gettid, sched_yield},
    time::{ClockId, clock_gettime},
};
use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::{
        fd::{OwnedFd, RawFd},
        unix::fs::{FileExt, MetadataExt},
    },
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::Notify,
};

/// The longest that a step of a simulation may compute, in real time.
const PATIENCE: Duration = Duration::from_secs(240);

/// Less processor time than any thread uses that was woken, in ns; our own thread runs on while two clocks
/// are read.
const NOTHING: i128 = 1000;

/// A runtime with virtual time. There may be only one at a time in a process, since it watches all threads.
///
/// # Errors
/// An error of the system.
pub fn runtime() -> io::Result<Runtime> {
    let before = polls()?;
    let pump = Arc::new(Notify::new());
    let (ours, events) = (pump.clone(), Arc::new(OnceLock::<OwnedFd>::new()));
    let threads = Mutex::new(Threads::default());
    let watched = events.clone();
    let runtime = Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .thread_name(POOL)
        .max_blocking_threads(POOL_THREADS)
        .on_thread_park(move || {
            let Some(events) = watched.get() else { return };
            if !news(events) {
                threads.lock().unwrap_or_else(PoisonError::into_inner).settle();
            }
            if news(events) {
                // There is work to do first; without this the clock would leap.
                ours.notify_one();
            }
        })
        .build()?;
    let own = polls()?.into_iter().find(|fd| !before.contains(fd));
    let own = own.ok_or_else(|| io::Error::other("the runtime has no epoll of its own"))?;
    let us = pidfd_open(getpid(), PidfdFlags::empty())?;
    events.set(pidfd_getfd(us, own, PidfdGetfdFlags::empty())?).expect("it is set once");
    runtime.spawn(async move {
        loop {
            pump.notified().await;
            tokio::task::yield_now().await;
        }
    });
    Ok(runtime)
}

/// The name of the threads for blocking work.
const POOL: &str = "pool";
/// The number of threads for blocking work, few so that they are checked sooner.
const POOL_THREADS: usize = 2;

/// The descriptors of this process that watch others.
fn polls() -> io::Result<Vec<RawFd>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")?.flatten() {
        let is_poll =
            fs::read_link(entry.path()).is_ok_and(|to| to.ends_with("anon_inode:[eventpoll]"));
        if let (true, Ok(fd)) = (is_poll, entry.file_name().to_string_lossy().parse()) {
            found.push(fd);
        }
    }
    Ok(found)
}

/// Whether a descriptor that the runtime watches is ready.
fn news(events: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(events, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// The other threads of this process.
#[derive(Default)]
struct Threads {
    /// The state that the system reports of each thread: `running`, or the call in which it sleeps.
    calls: HashMap<i32, File>,
}

impl Threads {
    /// Returns when all other threads sleep, and none will run unless we wake it.
    fn settle(&mut self) {
        let begun = Instant::now();
        loop {
            let before = worked();
            let asleep = self.asleep();
            if asleep.is_ok_and(|asleep| asleep) && (worked() - before).abs() < NOTHING {
                return;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "threads still run after {PATIENCE:?}: {:?}",
                self.awake()
            );
            sched_yield();
        }
    }

    fn asleep(&mut self) -> io::Result<bool> {
        let count = fs::metadata("/proc/self/task")?.nlink();
        // Two of the links are not threads, and one thread is ours.
        if count != self.calls.len() as u64 + 3 {
            self.find()?;
        }
        let mut word = [0; 7];
        for call in self.calls.values() {
            match call.read_at(&mut word, 0) {
                Ok(_) if word == *b"running" => return Ok(false),
                Ok(_) => {}
                Err(_) => {
                    // The thread is gone, and another may have come.
                    self.calls.clear();
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn find(&mut self) -> io::Result<()> {
        let own = gettid().as_raw_nonzero().get();
        let mut now = HashMap::new();
        for entry in fs::read_dir("/proc/self/task")?.flatten() {
            let Ok(thread) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
            if thread == own {
                continue;
            }
            match self.calls.remove(&thread) {
                Some(call) => drop(now.insert(thread, call)),
                // A thread that has ended since then is left out.
                None => {
                    drop(File::open(entry.path().join("syscall")).map(|c| now.insert(thread, c)))
                }
            }
        }
        self.calls = now;
        Ok(())
    }

    fn awake(&self) -> Vec<String> {
        let name = |thread: &i32| {
            fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default()
        };
        self.calls.keys().map(name).collect()
    }
}

/// The processor time of all threads but this one, in ns.
fn worked() -> i128 {
    let of = |clock| {
        let time = clock_gettime(clock);
        i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
    };
    of(ClockId::ProcessCPUTime) - of(ClockId::ThreadCPUTime)
}
