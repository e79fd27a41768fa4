//! What all handlers of a worker share.

use crate::{
    content::{
        cache::Cache,
        links::Desk,
        own::Own,
        share::{CALLERS, Shared},
    },
    error::WorkerError,
    execute::{Lowered, Timelines},
    models::Models,
    ring::Ring,
    state::State,
};
use galaxy_common::{Assignment, Bytes, DeviceName, Epoch, Plan, Rank, Streaming};
use galaxy_engine::{compute::choice::EngineChoice, executor::Executor};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Identity;
use std::{
    future::Future,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, atomic::AtomicBool, mpsc},
    thread::JoinHandle,
    time::Duration,
};
use tokio::{
    sync::{RwLock, Semaphore, oneshot, watch},
    task::JoinSet,
    time::Instant,
};

/// What all handlers of a worker share.
pub(crate) struct Core {
    pub(crate) name: DeviceName,
    pub(crate) identity: Identity,
    /// Where the list of removed members is kept.
    pub(crate) removed: PathBuf,
    /// When a coordinator asked for our health last.
    asked: Mutex<Option<Instant>>,
    pub(crate) models: Models,
    /// What models that are not among these are brought into; none: they are not.
    pub(crate) cache: Option<Cache>,
    /// What is known of those that are.
    pub(crate) own: Own,
    /// Where a coordinator that brings a model is waited for.
    pub(crate) desk: Desk,
    /// What there is of the model for other devices.
    pub(crate) shared: Mutex<Option<Shared>>,
    /// Places for devices that take it.
    pub(crate) callers: Arc<Semaphore>,
    /// What programs run on.
    pub(crate) engine: EngineChoice,
    pub(crate) threads: u16,
    pub(crate) memory: Option<Bytes>,
    /// Port of plain ring links, if they are allowed.
    pub(crate) plain_port: Option<u16>,
    pub(crate) state: watch::Sender<State>,
    pub(crate) ring: Ring,
    /// The shard: read while a program runs, written when another is loaded. So no two shards
    /// are in memory at once, not even while one goes.
    pub(crate) held: Arc<RwLock<Option<Held>>>,
    pub(crate) timelines: Mutex<Timelines>,
    pub(crate) tasks: Tasks,
    pub(crate) programs: Programs,
    /// The worker ends: a shard that is being loaded is given up.
    pub(crate) ending: Arc<AtomicBool>,
    active: Mutex<Option<Arc<Active>>>,
}

/// A shard in memory, inside the executor that runs it.
pub(crate) struct Held {
    pub(crate) key: HeldKey,
    pub(crate) executor: Arc<Executor>,
    pub(crate) bytes: Bytes,
}

/// What makes two shards the same.
#[derive(Clone, PartialEq)]
pub(crate) struct HeldKey {
    pub(crate) fingerprint: String,
    pub(crate) prefill: Assignment,
    pub(crate) decode: Assignment,
    pub(crate) threads: u16,
    pub(crate) kept: galaxy_common::Cache,
    pub(crate) streaming: Option<Streaming>,
}

/// The epoch that is placed.
pub(crate) struct Active {
    pub(crate) epoch: Epoch,
    pub(crate) rank: Rank,
    pub(crate) plan: Arc<Plan>,
    pub(crate) model: Arc<ModelDir>,
    /// Weak: the shard inside goes when another is to be loaded, whoever still reports on a run.
    pub(crate) executor: Weak<Executor>,
    pub(crate) lowered: Mutex<Lowered>,
}

impl Active {
    /// The name of a device of the plan.
    pub(crate) fn name(&self, rank: Rank) -> Option<&DeviceName> {
        self.plan.ring.get(rank.index()).map(|device| &device.name)
    }
}

impl Core {
    /// A coordinator has asked for our health.
    pub(crate) fn was_asked(&self) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// How long no coordinator has.
    pub(crate) fn silent_for(&self) -> Duration {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.map_or(Duration::MAX, |at| at.elapsed())
    }

    pub(crate) fn new(
        (identity, removed, ring): (Identity, PathBuf, Ring),
        (models, cache): (Models, Option<Cache>),
        engine: EngineChoice,
        threads: u16,
        memory: Option<Bytes>,
        plain_port: Option<u16>,
    ) -> Self {
        Self {
            name: identity.name().clone(),
            identity,
            removed,
            asked: Mutex::default(),
            models,
            cache,
            own: Own::default(),
            desk: Desk::default(),
            shared: Mutex::default(),
            callers: Arc::new(Semaphore::new(CALLERS)),
            engine,
            threads,
            memory,
            plain_port,
            state: watch::Sender::new(State::default()),
            ring,
            held: Arc::default(),
            timelines: Mutex::default(),
            tasks: Tasks::default(),
            programs: Programs::default(),
            ending: Arc::default(),
            active: Mutex::default(),
        }
    }

    /// Tells the state machine of an event; whoever waits for a change sees it.
    pub(crate) fn tell<T>(&self, event: impl FnOnce(&mut State) -> T) -> T {
        let mut answer = None;
        self.state.send_modify(|state| answer = Some(event(state)));
        answer.expect("send_modify calls its closure once")
    }

    /// The epoch that is placed.
    pub(crate) fn active(&self) -> Option<Arc<Active>> {
        lock(&self.active).clone()
    }
    pub(crate) fn activate(&self, active: Option<Arc<Active>>) -> Option<Arc<Active>> {
        std::mem::replace(&mut *lock(&self.active), active)
    }

    /// Ends an epoch, if it is not over: aborts what runs, and closes its links.
    pub(crate) async fn cancel(&self, epoch: Epoch) -> Result<(), WorkerError> {
        if self.tell(|state| state.cancel(epoch)) {
            tracing::info!(%epoch, "cancelled");
            self.ring.close(epoch);
            self.disconnect(epoch).await?;
        }
        Ok(())
    }

    /// Aborts what runs and closes the links, if `last` or an earlier epoch is placed: whoever
    /// ends an epoch late ends no later one.
    pub(crate) async fn disconnect(&self, last: Epoch) -> Result<(), WorkerError> {
        let over = lock(&self.active).take_if(|active| active.epoch <= last);
        match over {
            Some(active) => {
                blocking(move || {
                    if let Some(executor) = active.executor.upgrade() {
                        executor.disconnect(Some(active.epoch));
                    }
                })
                .await
            }
            None => Ok(()),
        }
    }
}

/// Runs what blocks where it may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkerError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| WorkerError::Bug)
}

/// Runs kernels on a thread of their own, named as the executor's is: whoever limits a device by
/// its kernels' threads finds it.
pub(crate) async fn computing<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkerError> {
    on_thread("compute", work)?.await.map_err(|_| WorkerError::Bug)
}

/// Begins what blocks for long, or waits for the network, on a thread of its own: those of [`blocking`]
/// are for what is soon done.
pub(crate) fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<oneshot::Receiver<T>> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || drop(done.send(work())))?;
    Ok(result)
}

/// The thread that starts programs and waits for their ends, which may be as long as other devices
/// take: one runs at a time.
#[derive(Default)]
pub(crate) struct Programs {
    thread: Mutex<Option<(mpsc::SyncSender<Program>, JoinHandle<()>)>>,
}

type Program = Box<dyn FnOnce() + Send>;

impl Programs {
    /// Runs `program`; the one before it is through, or about to be.
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
                // Who waits for a program that panics is told by its silence.
                drop(catch_unwind(AssertUnwindSafe(program)));
            }
        };
        let thread = std::thread::Builder::new().name("programs".to_owned()).spawn(body)?;
        Ok((programs, thread))
    }

    /// Ends the thread, after what it was given.
    pub(crate) fn join(&self) {
        if let Some((programs, thread)) = lock(&self.thread).take() {
            drop(programs);
            drop(thread.join());
        }
    }
}

/// A lock that a panic elsewhere does not close.
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
