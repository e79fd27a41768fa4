//! How testbeds are taken down: on request, whatever became of them; and those for one measurement together
//! with the process that made them: when they are dropped, as after an error, and when a signal ends the
//! process.

use super::{LOOK, Worker, is_root};
use crate::{
    cgroup,
    environment::{check_name, state_directory},
    network::Network,
    processes::{PATIENCE, kill},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    process,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};

/// Removes what is left of a testbed, whatever became of it. That nothing is left is no error.
///
/// # Errors
/// When the testbed is in use, or something of it stays.
pub fn down(name: &str) -> Result<()> {
    check_name("the testbed", name)?;
    for root in [true, false] {
        let directory = state_directory(root).join(name);
        if directory.exists() {
            if let Ok(file) = File::open(directory.join("lock")) {
                let used = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
                ensure!(
                    !used,
                    "testbed {name:?} is in use by another galaxy-testbed: end that first"
                );
            }
            remove(name, !root, &directory)?;
        }
    }
    sweep(name, !is_root())
}

/// Removes a testbed that is not in use by others. Its directory goes last, so that the name is known as long
/// as anything of the testbed is there.
pub(super) fn remove(name: &str, loopback: bool, directory: &Path) -> Result<()> {
    end_workers_of(directory)?;
    sweep(name, loopback)?;
    fs::remove_dir_all(directory).with_context(|| directory.display().to_string())
}

pub(super) fn sweep(name: &str, loopback: bool) -> Result<()> {
    if loopback || !is_root() {
        return Ok(());
    }
    Network::down(name)?;
    cgroup::remove(name)
}

fn end_workers_of(directory: &Path) -> Result<()> {
    let text = fs::read(directory.join("workers.json")).unwrap_or_default();
    end(&serde_json::from_slice::<Vec<Worker>>(&text).unwrap_or_default())
}

/// Ends workers at once, and waits until the system has removed their processes.
pub(super) fn end(workers: &[Worker]) -> Result<()> {
    let alive: Vec<&Worker> = workers.iter().filter(|w| w.alive()).collect();
    for worker in &alive {
        kill(worker.pid)?;
    }
    let deadline = Instant::now() + PATIENCE;
    while let Some(worker) = alive.iter().find(|w| w.alive()) {
        ensure!(Instant::now() < deadline, "the worker on {} does not end", worker.device);
        thread::sleep(LOOK);
    }
    Ok(())
}

/// The testbeds for one measurement that are up; `None` as long as no thread waits for signals. A signal is
/// sent to the whole process, and so this is one for the process.
static UP: Mutex<Option<Vec<TestbedRecord>>> = Mutex::new(None);

struct TestbedRecord {
    name: String,
    loopback: bool,
    directory: PathBuf,
}

/// Takes a testbed down when it is dropped, if that has not been done.
pub(super) struct Passing {
    name: String,
}

impl Passing {
    /// The guard of a testbed that is up.
    ///
    /// # Errors
    /// When no thread can wait for signals.
    pub(super) fn new(name: &str, loopback: bool, directory: &Path) -> Result<Self> {
        let mut up = locked();
        if up.is_none() {
            wait_for_signals()?;
        }
        let (name, directory) = (name.to_owned(), directory.to_owned());
        up.get_or_insert_default().push(TestbedRecord { name: name.clone(), loopback, directory });
        Ok(Self { name })
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let mut up = locked();
        for made in up.iter_mut().flat_map(|up| up.extract_if(.., |made| made.name == self.name)) {
            made.down();
        }
    }
}

impl TestbedRecord {
    fn down(&self) {
        if self.directory.exists()
            && let Err(error) = remove(&self.name, self.loopback, &self.directory)
        {
            eprintln!("warning: something stays of testbed {}: {error:#}", self.name);
        }
    }
}

/// Keeps a signal from taking testbeds down while this is held, so that no worker starts that `workers.json` does not
/// list yet: its process would stay.
pub(super) struct Undisturbed {
    _up: MutexGuard<'static, Option<Vec<TestbedRecord>>>,
}

impl Undisturbed {
    /// Begins. Where a signal takes testbeds down already, this process ends here.
    pub(super) fn begin() -> Self {
        Self { _up: locked() }
    }
}

/// Locks the list. It is held while a testbed is taken down, so that the process does not end in the middle.
fn locked() -> MutexGuard<'static, Option<Vec<TestbedRecord>>> {
    UP.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_for_signals() -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let inside = runtime.enter();
    let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
    let [mut interrupt, mut terminate] = [signal(kinds[0])?, signal(kinds[1])?];
    drop(inside);
    let body = move || {
        let kind = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => kinds[0],
                _ = terminate.recv() => kinds[1],
            }
        });
        let up = locked();
        for made in up.iter().flatten() {
            eprintln!("ended by a signal: takes testbed {} down", made.name);
            made.down();
        }
        // The exit code that a shell gives for a process that a signal ended.
        process::exit(128 + kind.as_raw_value())
    };
    thread::Builder::new().name("signals".to_owned()).spawn(body)?;
    Ok(())
}
