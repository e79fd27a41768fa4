//! The session: from requests to batches, through the queue, and from results to answers.

mod answer;
mod batch;
mod batch_queue;
mod files;
mod generate;
mod limits;
mod raw;
mod reading;
mod report;
mod stepped;
mod texts;

pub use generate::{Finish, GenerateEvent, Listener, Sequences};
pub use limits::{Limits, MAX_RESULT_BYTES, MAX_TEXTS};
pub use raw::{Input, RunOutput, Tensor, Tensors};
pub use report::Report;
pub use texts::{Classes, Embed, Embeddings, Items, Prefix, Scores};

use crate::{
    admission::Admission,
    client_memory::{Caller, ClientMemory},
    error::RequestError,
    fleet::{DeviceView, Fleet, FleetStatus, Readiness, blocking},
    trace::{Trace, TraceLog},
};
use answer::QueuedRequest;
use batch_queue::BatchQueue;
use files::Files;
use galaxy_common::{DeviceName, RequestId};
use galaxy_model::{ModelDir, ModelSpec};
use generate::Steps;
use std::{
    future::Future,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// How long to wait before what failed for a passing reason is tried again.
const AGAIN: Duration = Duration::from_millis(100);
/// How long before the end of its caller's time an answer comes, so that the caller learns what was waited for; a tenth
/// of that time, if that is less.
const SOONER: Duration = Duration::from_millis(200);
/// The time that a request without a time of its own gets on top of the limit: a program that runs into the limit then
/// ends first, and its error names a device.
const GRACE: Duration = Duration::from_millis(500);

/// A session over a fleet, for the requests of one caller. Copies are the same session.
#[derive(Clone)]
pub struct Session {
    inner: Arc<Inner>,
    /// The caller whose requests these are.
    caller: Caller,
}

struct Inner {
    model: Arc<ModelDir>,
    fleet: Arc<dyn Fleet>,
    admission: Admission,
    memory: ClientMemory,
    limits: Limits,
    files: Files,
    log: Mutex<TraceLog>,
    /// Batches of requests that wait for the turn.
    batch_queue: BatchQueue,
    /// Sequences that generate tokens.
    steps: Arc<Steps>,
    counts: Counts,
}

/// How many requests, programs and sequences there were.
#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    served: AtomicU64,
    failed: AtomicU64,
    /// Programs that ran to their end.
    programs: AtomicU64,
    /// How many sequences were to generate tokens, which is the slot of the next one.
    sequences: AtomicU32,
}

impl Counts {
    /// Counts a request that has ended.
    fn end(&self, served: bool) {
        let count = if served { &self.served } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Session {
    /// A session over `fleet`. Reads the tokenizer: blocks.
    pub fn new(model: Arc<ModelDir>, fleet: Arc<dyn Fleet>, limits: Limits) -> Self {
        let memory = ClientMemory::new(limits.client_memory);
        let inner = Inner {
            admission: Admission::new(limits.queue),
            memory: memory.clone(),
            batch_queue: BatchQueue::default(),
            steps: Steps::new(),
            log: Mutex::new(TraceLog::default()),
            counts: Counts::default(),
            files: Files::open(&model),
            model,
            fleet,
            limits,
        };
        Self { inner: Arc::new(inner), caller: memory.caller(None) }
    }

    /// The same session, for the requests of this caller.
    pub fn of(&self, caller: Option<Caller>) -> Self {
        let caller = caller.unwrap_or_else(|| self.inner.memory.caller(None));
        Self { inner: self.inner.clone(), caller }
    }
    /// The memory that all clients hold.
    pub fn client_memory(&self) -> &ClientMemory {
        &self.inner.memory
    }
    /// The caller whose requests these are.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The directory of the model that is served.
    pub fn model(&self) -> &ModelDir {
        &self.inner.model
    }
    /// What the fleet was asked for, and the plan that it has for that.
    pub fn fleet_status(&self) -> FleetStatus {
        self.inner.fleet.status()
    }
    /// The devices, for a status.
    pub fn devices(&self) -> Vec<DeviceView> {
        self.inner.fleet.devices()
    }
    /// Whether programs may run now.
    pub fn readiness(&self) -> Readiness {
        self.inner.fleet.readiness().borrow().clone()
    }
    /// The queue in front of the fleet.
    pub fn admission(&self) -> &Admission {
        &self.inner.admission
    }
    /// Counts of the sequences that generate tokens.
    pub fn sequences(&self) -> Sequences {
        self.inner.steps.sequences()
    }
    /// How many requests were answered, and how many failed.
    pub fn counts(&self) -> (u64, u64) {
        let Counts { served, failed, .. } = &self.inner.counts;
        (served.load(Ordering::Relaxed), failed.load(Ordering::Relaxed))
    }

    /// The measured lanes of a request that ran lately; of the last one for 0.
    ///
    /// # Errors
    /// [`RequestError::NoTrace`] when it is not kept any more.
    pub async fn trace(&self, request: u64) -> Result<Trace, RequestError> {
        let entry = {
            let log = self.inner.log.lock().unwrap_or_else(PoisonError::into_inner);
            log.find(request)?
        };
        let mut timelines = Vec::with_capacity(entry.programs.len());
        let (mut last, mut missing) = (None, 0);
        for program in &entry.programs {
            match self.inner.fleet.timelines(program.epoch, program.sequence).await {
                Ok(times) => timelines.push((program.clone(), times)),
                // Long requests have more programs than devices keep: the others are shown.
                Err(error) => {
                    missing += 1;
                    last = Some(error);
                }
            }
        }
        if let (true, Some(error)) = (timelines.is_empty(), last) {
            return Err(error);
        }
        let model = self.inner.model.clone();
        let trace = move || {
            let formats = model.formats();
            Trace::new((model.spec(), formats), entry.request, timelines, missing)
        };
        blocking(trace).await?
    }

    /// Takes no more requests, and waits until those that were taken are answered.
    pub async fn drain(&self) {
        self.inner.admission.drain(true);
        self.inner.admission.idle().await;
    }

    /// Takes no more requests because the coordinator ends, and waits until those that were taken are answered. Whoever
    /// comes now may come to the next coordinator.
    pub async fn end(&self) {
        self.inner.admission.end();
        self.inner.admission.idle().await;
    }

    /// Lets go of the devices.
    pub async fn close(&self) {
        self.inner.fleet.close().await;
    }

    fn spec(&self) -> &ModelSpec {
        self.inner.model.spec()
    }

    fn begin(&self) -> Result<QueuedRequest<'_>, RequestError> {
        let ticket = self.inner.admission.admit(self.caller.who())?;
        let request = RequestId(self.inner.counts.requests.fetch_add(1, Ordering::Relaxed) + 1);
        let report = Report { request, ..Report::default() };
        Ok(QueuedRequest::new(self, ticket, report))
    }

    /// Runs `work` with a deadline, and counts its end.
    async fn timed<T>(
        &self,
        timeout: Option<Duration>,
        work: impl Future<Output = Result<T, RequestError>>,
    ) -> Result<T, RequestError> {
        let allowed = timeout.unwrap_or(self.inner.limits.timeout);
        let late = || Err(self.late(RequestError::Deadline { allowed, ours: timeout.is_none() }));
        let wait = match timeout {
            None => allowed.saturating_add(GRACE),
            Some(_) => allowed.saturating_sub(SOONER.min(allowed / 10)),
        };
        let result = tokio::time::timeout(wait, work).await.unwrap_or_else(|_| late());
        self.inner.counts.end(result.is_ok());
        result
    }

    /// Waits until programs may run, now or after a move.
    ///
    /// # Errors
    /// [`RequestError::NoPlan`] when they never will as things are.
    async fn ready(&self) -> Result<(), RequestError> {
        let mut readiness = self.inner.fleet.readiness();
        let waits = |r: &Readiness| matches!(r, Readiness::Waiting { planless: false, .. });
        // Without a sender the fleet is gone, and says so as a reason.
        drop(readiness.wait_for(|r| !waits(r)).await);
        self.readiness().runs()
    }

    /// The error of a request whose time is over: what it waited for, if the cluster is not ready, or else `late`.
    fn late(&self, late: RequestError) -> RequestError {
        let readiness = self.readiness();
        let unready = |(device, reason): (Option<&DeviceName>, &str)| RequestError::Unavailable {
            device: device.cloned(),
            reason: reason.to_owned(),
        };
        readiness.obstacle().map_or(late, unready)
    }
}
