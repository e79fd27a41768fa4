//! What all handlers of a worker share.

use crate::{
    content::{
        cache::Cache,
        links::ModelServerSlot,
        proven::ProvenModels,
        share::{CALLERS, Shared},
    },
    error::WorkerError,
    models::Models,
    ring::Ring,
    running::{Active, Running},
    state::WorkerState,
    tasks::{Tasks, blocking, lock},
};
use galaxy_common::{Bytes, DeviceName, Epoch};
use galaxy_engine::compute::choice::EngineChoice;
use galaxy_proto::identity::Identity;
use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    time::Duration,
};
use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};

/// What all handlers of a worker share.
pub(crate) struct Core {
    pub(crate) name: DeviceName,
    pub(crate) identity: Identity,
    /// The file that keeps the list of removed members.
    pub(crate) removed: PathBuf,
    /// When a coordinator last asked for the health of this worker.
    asked: Mutex<Option<Instant>>,
    pub(crate) grant: Grant,
    pub(crate) content: ModelContent,
    pub(crate) state: watch::Sender<WorkerState>,
    pub(crate) ring: Ring,
    pub(crate) running: Running,
    pub(crate) tasks: Tasks,
    /// Set when the worker ends: a shard that is being loaded is given up.
    pub(crate) ending: Arc<AtomicBool>,
}

/// What the device grants to programs.
pub(crate) struct Grant {
    /// The engine that programs run on.
    pub(crate) engine: EngineChoice,
    pub(crate) threads: u16,
    pub(crate) memory: Option<Bytes>,
    /// The port of plain ring links, if they are allowed.
    pub(crate) plain_port: Option<u16>,
}

/// The models of this device, and how others are fetched and shared.
pub(crate) struct ModelContent {
    pub(crate) models: Models,
    /// The cache for models that are not among these; none: they are refused.
    pub(crate) cache: Option<Cache>,
    /// What is known of the model directories that were compared with a manifest.
    pub(crate) own: ProvenModels,
    /// Where tasks wait for a coordinator that brings a model.
    pub(crate) model_server: ModelServerSlot,
    /// What this device can give other devices of the model.
    pub(crate) shared: Mutex<Option<Shared>>,
    /// Places for devices that fetch from this one.
    pub(crate) callers: Arc<Semaphore>,
}

impl Core {
    /// Notes that a coordinator has asked for the health of this worker.
    pub(crate) fn was_asked(&self) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// How long no coordinator has asked for the health of this worker.
    pub(crate) fn silent_for(&self) -> Duration {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.map_or(Duration::MAX, |at| at.elapsed())
    }

    pub(crate) fn new(
        (identity, removed, ring): (Identity, PathBuf, Ring),
        (models, cache): (Models, Option<Cache>),
        grant: Grant,
    ) -> Self {
        let content = ModelContent {
            models,
            cache,
            own: ProvenModels::default(),
            model_server: ModelServerSlot::default(),
            shared: Mutex::default(),
            callers: Arc::new(Semaphore::new(CALLERS)),
        };
        Self {
            name: identity.name().clone(),
            identity,
            removed,
            asked: Mutex::default(),
            grant,
            content,
            state: watch::Sender::new(WorkerState::default()),
            ring,
            running: Running::default(),
            tasks: Tasks::default(),
            ending: Arc::default(),
        }
    }

    /// Passes an event to the state machine; tasks that wait for a change see it.
    pub(crate) fn tell<T>(&self, event: impl FnOnce(&mut WorkerState) -> T) -> T {
        let mut answer = None;
        self.state.send_modify(|state| answer = Some(event(state)));
        answer.expect("send_modify calls its closure once")
    }

    /// The epoch that is placed.
    pub(crate) fn active(&self) -> Option<Arc<Active>> {
        lock(&self.running.active).clone()
    }
    pub(crate) fn activate(&self, active: Option<Arc<Active>>) -> Option<Arc<Active>> {
        std::mem::replace(&mut *lock(&self.running.active), active)
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

    /// Aborts what runs and closes the links, if `last` or an earlier epoch is placed: whoever ends
    /// an epoch late ends no later one.
    pub(crate) async fn disconnect(&self, last: Epoch) -> Result<(), WorkerError> {
        let over = lock(&self.running.active).take_if(|active| active.epoch <= last);
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
