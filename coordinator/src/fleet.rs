//! The fleet: what executes one program on every device of a plan, wherever the devices are.

mod local;
pub(crate) mod remote;

pub use local::LocalFleet;
pub use remote::{Loading, Notice, Planning, ProfileSource, RemoteFleet};

use galaxy_common::{
    BatchShape, Burst, Bytes, Cache, DeviceName, Epoch, Row, Sequence, SequenceNumber, Span,
    plan::{DevicePlan, Phase, Plan, Strategy},
};
use galaxy_engine::{
    compute::Inputs,
    generate::{Decoded, TokenEvent},
};
use galaxy_graph::{Lowered, Program, Whole, digest, program::Output};
use galaxy_model::{Formats, ModelDir, ModelSpec};
use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::sync::{mpsc, watch};

use crate::{error::RequestError, placement::Busy};

/// A future on the heap.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Whether programs may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// Programs may run, in this epoch.
    Ready(Epoch),
    /// The cluster moves from one plan to another, and programs wait for that.
    Moving {
        /// What the cluster does meanwhile, for people.
        reason: String,
    },
    /// Programs may not run now.
    Waiting {
        /// The device that stands in the way, if it is one.
        device: Option<DeviceName>,
        /// The reason, for people.
        reason: String,
        /// Whether there is no plan for the devices as they are, so that waiting does not help.
        planless: bool,
    },
}

impl Readiness {
    /// Programs may not run now, and no device is to blame.
    pub fn waiting(reason: impl Into<String>) -> Self {
        Self::Waiting { device: None, reason: reason.into(), planless: false }
    }

    /// Whether programs may run, now or after a move, or else why not.
    ///
    /// # Errors
    /// [`RequestError::Unavailable`], and [`RequestError::NoPlan`] where waiting does not help.
    pub fn runs(&self) -> Result<(), RequestError> {
        match self.clone() {
            Self::Ready(_) | Self::Moving { .. } => Ok(()),
            Self::Waiting { device, reason, planless: false } => {
                Err(RequestError::Unavailable { device, reason })
            }
            Self::Waiting { device, reason, planless: true } => {
                Err(RequestError::NoPlan { device, reason })
            }
        }
    }

    /// What keeps programs from running now: a device, if it is one, and the reason. None if they may run.
    pub fn obstacle(&self) -> Option<(Option<&DeviceName>, &str)> {
        match self {
            Self::Ready(_) => None,
            Self::Moving { reason } => Some((None, reason)),
            Self::Waiting { device, reason, .. } => Some((device.as_ref(), reason)),
        }
    }
}

/// A program to run on every device.
#[derive(Debug, Clone)]
pub struct Task {
    /// The shape of the batch.
    pub shape: BatchShape,
    /// The inputs of the batch's rows: tokens or image patches.
    pub inputs: Inputs,
    /// The sequences whose keys and values are cached: one for each segment, or none where nothing is cached.
    pub cached: Vec<CachedSequence>,
    /// The tokens to generate for the segments of which the shape wants some.
    pub burst: Option<Burst>,
}

impl Task {
    /// A program that leaves nothing in the KV cache, and generates no tokens.
    pub fn new(shape: BatchShape, inputs: impl Into<Inputs>) -> Self {
        Self { shape, inputs: inputs.into(), cached: Vec::new(), burst: None }
    }

    /// The phase that its programs are lowered for.
    pub fn phase(&self) -> Phase {
        self.burst.as_ref().map_or(Phase::Prefill, |burst| burst.phase)
    }

    /// The listeners of the sequences that get tokens, in the order of the batch.
    pub fn listeners(&self) -> Vec<mpsc::UnboundedSender<TokenEvent>> {
        let of =
            |(at, ..): (usize, _, _)| self.cached.get(at).map(|cached| cached.token_events.clone());
        self.shape.sampled().filter_map(of).collect()
    }
}

/// A sequence whose keys and values are cached.
#[derive(Debug, Clone)]
pub struct CachedSequence {
    /// Where the sequence begins or gets more blocks: the sequence with the rows that it has room
    /// for from now on, and the blocks that these are in.
    pub room: Option<(Arc<Sequence>, Arc<[u32]>)>,
    /// The epoch whose blocks these are, and in which its rows were cached.
    pub epoch: Epoch,
    /// Receives each token as it is generated.
    pub token_events: mpsc::UnboundedSender<TokenEvent>,
}

/// What one program cost one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceCost {
    /// Time from the start of the program to the end of its last operation, in ns.
    pub total_ns: u64,
    /// Time for which its compute lane worked, in ns.
    pub compute_busy_ns: u64,
    /// Time for which the busiest of its loaders worked, in ns.
    pub disk_busy_ns: u64,
    /// Time for which its compute lane was idle until a receive ended, in ns.
    pub awaiting_receive_ns: u64,
    /// Bytes that it sent to other devices.
    pub bytes_sent: u64,
    /// Bytes that it received from other devices.
    pub bytes_received: u64,
}

/// What one device did with a program.
#[derive(Debug, Clone)]
pub struct DeviceRun {
    /// The name of the device.
    pub name: DeviceName,
    /// What each result of the device is.
    pub outputs: Vec<Output>,
    /// The values of each result, in the order of `outputs`.
    pub values: Vec<Vec<f32>>,
    /// What the program cost the device.
    pub cost: DeviceCost,
}

/// A program that ran on every device.
#[derive(Debug, Clone)]
pub struct Run {
    /// The epoch in which it ran.
    pub epoch: Epoch,
    /// Its sequence number in the epoch.
    pub sequence: SequenceNumber,
    /// The plan by which it ran.
    pub plan: Arc<Plan>,
    /// What each device did, by rank.
    pub devices: Vec<DeviceRun>,
    /// Time from dispatch to the last result.
    pub took: Duration,
    /// What its burst has decoded, if it had one.
    pub decoded: Decoded,
}

/// When the operations of one program started and ended on one device.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    /// Start and end of each operation, in ns of the device's own clock.
    pub operations: Vec<(u64, u64)>,
    /// What to add to these times to get the coordinator's clock, in ns.
    pub offset_ns: i64,
}

/// A device, as a status shows it.
#[derive(Debug, Clone, Default)]
pub struct DeviceView {
    /// The name of the device.
    pub name: String,
    /// The address of its worker.
    pub address: String,
    /// Its state: unreachable, connected, placing, ready, lost or idle.
    pub state: &'static str,
    /// More about it, for a person.
    pub detail: String,
    /// Its part of the plan; none if the plan gives it none.
    pub part: Option<DevicePlan>,
    /// Bytes of the weights that it holds; 0 before it is placed.
    pub weight_bytes: Bytes,
    /// The memory that it grants.
    pub budget: Bytes,
    /// The memory that its part needs.
    pub needed: Bytes,
    /// How many threads its kernels use.
    pub threads: u16,
    /// The widest vector instructions that its kernels use.
    pub processor: String,
}

/// What a fleet was asked for, and the plan that it has for that.
#[derive(Debug, Clone)]
pub struct FleetStatus {
    /// How work is to be split over the devices.
    pub strategy: Strategy,
    /// The most rows of one program.
    pub max_rows: u32,
    /// The plan that is placed, or will be; none before devices have been asked.
    pub plan: Option<Arc<Plan>>,
    /// The plan as a phrase, for people.
    pub what: String,
    /// How long a typical text is predicted to take, if that is predicted.
    pub predicted: Option<Duration>,
    /// The size and type of the KV cache.
    pub cache: Cache,
}

/// What executes programs, one at a time: the caller holds the turn.
pub trait Fleet: Send + Sync {
    /// Whether programs may run, now and later.
    fn readiness(&self) -> watch::Receiver<Readiness>;
    /// What it was asked for, and the plan that it has for that.
    fn status(&self) -> FleetStatus;
    /// The plan that is placed, or will be; none before devices have been asked.
    fn plan(&self) -> Option<Arc<Plan>> {
        self.status().plan
    }
    /// Runs one program on every device. Not to be dropped before it is done: the caller gives it a
    /// task of its own, so that a program runs on all devices or on none.
    fn execute(&self, task: Task, limit: Duration) -> BoxFuture<'_, Result<Run, RequestError>>;
    /// Asks the burst that runs, if one does, to end after its next step. Does not wait for that.
    fn end_burst(&self);
    /// Has the devices give back the blocks of a sequence, of which no program runs.
    fn forget(&self, epoch: Epoch, slot: u32) -> BoxFuture<'_, ()>;
    /// The measured operations of a program that ran lately, by rank.
    fn timelines(
        &self,
        epoch: Epoch,
        sequence: SequenceNumber,
    ) -> BoxFuture<'_, Result<Vec<Timeline>, RequestError>>;
    /// The devices, for a status.
    fn devices(&self) -> Vec<DeviceView>;
    /// Lets go of the devices.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// How many shapes are kept: what is kept of each is small.
const LOWERED: usize = 256;

/// What the coordinator knows of the programs of a shape: their digest, and what they give.
pub(crate) struct Dispatch {
    /// The digest of all the programs.
    pub(crate) digest: [u8; 32],
    /// The results of each device, by rank.
    pub(crate) outputs: Vec<Vec<Output>>,
    /// The rows that each device embeds, by rank.
    pub(crate) embedded: Vec<Span<Row>>,
    /// How long the kernels and loaders of each device work on it by its profile, by rank; none
    /// where that is not predicted.
    pub(crate) busy: Option<Vec<Busy>>,
}

/// Dispatches by shape. Only the workers keep the programs themselves.
pub(crate) struct Dispatches {
    spec: ModelSpec,
    formats: Formats,
    kept: Mutex<Lowered<Arc<Dispatch>>>,
}

impl Dispatches {
    pub(crate) fn new(model: &ModelDir) -> Self {
        Self {
            spec: model.spec().clone(),
            formats: model.formats().clone(),
            kept: Mutex::new(Lowered::new(LOWERED)),
        }
    }

    /// The dispatch of a shape; `busy` predicts its programs. Blocks: not for an async task.
    pub(crate) fn dispatch(
        &self,
        plan: &Arc<Plan>,
        phase: Phase,
        shape: &BatchShape,
        busy: impl FnOnce(&[Program]) -> Option<Vec<Busy>>,
    ) -> Result<Arc<Dispatch>, RequestError> {
        let dispatch = |programs: Vec<Program>| {
            Arc::new(Dispatch {
                digest: digest(&programs),
                busy: busy(&programs),
                embedded: programs.iter().map(Program::embedded).collect(),
                outputs: programs.into_iter().map(|p| p.outputs).collect(),
            })
        };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let whole = Whole { spec: &self.spec, formats: &self.formats, plan };
        let found = kept.get(whole, phase, shape, dispatch);
        found.map_err(|e| RequestError::Internal { why: e.to_string() })
    }
}

/// Runs `work` on a thread where blocking is allowed.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RequestError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| RequestError::Internal { why: format!("a task broke off: {e}") })
}
