//! Where work is done: on threads that may block, on those of kernels and programs, and as tasks.

use crate::error::WorkerError;
use std::{
    future::Future,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
};
use tokio::{sync::oneshot, task::JoinSet};

/// Runs work that blocks on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkerError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| WorkerError::Bug)
}

/// Runs kernels on a thread of their own, named as the executor's is: whoever limits a device by its kernels' threads
/// finds it.
pub(crate) async fn computing<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkerError> {
    on_thread("compute", work)?.await.map_err(|_| WorkerError::Bug)
}

/// Begins work that blocks for long, or waits for the network, on a thread of its own: the threads of [`blocking`]
/// are for work that is soon done.
pub(crate) fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<oneshot::Receiver<T>> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || drop(done.send(work())))?;
    Ok(result)
}

/// The thread that starts programs and waits for their ends, which may take as long as other devices do: one runs at
/// a time.
#[derive(Default)]
pub(crate) struct Programs {
    thread: Mutex<Option<(mpsc::SyncSender<Program>, JoinHandle<()>)>>,
}

type Program = Box<dyn FnOnce() + Send>;

impl Programs {
    /// Runs `program`; the one before it is done, or about to be.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        program: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, WorkerError> {
        let (done, result) = tokio::sync::oneshot::channel();
        let program: Program = Box::new(move || drop(done.send(program())));
        {
            let mut thread = lock(&self.thread);
            let (programs, _) = match &mut *thread {
                Some(thread) => thread,
                none => none.insert(Self::start()?),
            };
            // Programs wait for their turns before they come here.
            programs.try_send(program).map_err(|_| WorkerError::Bug)?;
        }
        result.await.map_err(|_| WorkerError::Bug)
    }

    fn start() -> std::io::Result<(mpsc::SyncSender<Program>, JoinHandle<()>)> {
        let (programs, inbox) = mpsc::sync_channel::<Program>(1);
        let body = move || {
            for program in inbox {
                // A program that panics never answers, and the caller sees that.
                drop(catch_unwind(AssertUnwindSafe(program)));
            }
        };
        let thread = std::thread::Builder::new().name("programs".to_owned()).spawn(body)?;
        Ok((programs, thread))
    }

    /// Ends the thread, after the programs that it was given.
    pub(crate) fn join(&self) {
        if let Some((programs, thread)) = lock(&self.thread).take() {
            drop(programs);
            drop(thread.join());
        }
    }
}

/// Locks a mutex, also if a panic elsewhere poisoned it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tasks that outlive the call that began them; joined at shutdown.
#[derive(Default)]
pub(crate) struct Tasks {
    set: Mutex<JoinSet<()>>,
}

impl Tasks {
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut set = lock(&self.set);
        while set.try_join_next().is_some() {}
        set.spawn(task);
    }
    /// All tasks, to be joined.
    pub(crate) fn take(&self) -> JoinSet<()> {
        std::mem::take(&mut *lock(&self.set))
    }
}
