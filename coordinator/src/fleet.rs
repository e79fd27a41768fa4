//! The fleet: what executes one program on every device of a plan, wherever the devices are.

mod local;
pub(crate) mod remote;

pub use local::LocalFleet;
pub use remote::{Loading, Notice, Planning, ProfileSource, RemoteFleet};

use galaxy_common::{
    BatchShape, Burst, Bytes, Cache, DeviceName, Epoch, Row, SequenceNumber, Span, Text,
    plan::{DevicePlan, Phase, Plan, Strategy},
};
use galaxy_engine::{
    compute::Inputs,
    generate::{Decoded, Told},
};
use galaxy_graph::{Lowered, Program, digest, program::Output};
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
    /// They may, in this epoch.
    Ready(Epoch),
    /// Soon: the cluster moves from one plan to another. Programs wait.
    Moving {
        /// What people are told meanwhile.
        reason: String,
    },
    /// Not now.
    Waiting {
        /// Because of whom, if it is a device.
        device: Option<DeviceName>,
        /// Why.
        reason: String,
        /// Whether there is no plan for the devices that there are, so that waiting does not help.
        planless: bool,
    },
}

impl Readiness {
    /// Not now, and no device is to blame.
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

    /// What programs wait for that may not run now: a device, if it is one, and why.
    pub fn obstacle(&self) -> Option<(Option<&DeviceName>, &str)> {
        match self {
            Self::Ready(_) => None,
            Self::Moving { reason } => Some((None, reason)),
            Self::Waiting { device, reason, .. } => Some((device.as_ref(), reason)),
        }
    }
}

/// One program to run.
#[derive(Debug, Clone)]
pub struct Task {
    /// Of this shape,
    pub shape: BatchShape,
    /// with these rows.
    pub inputs: Inputs,
    /// The sequences whose keys and values are kept: one for each segment, or none where nothing is.
    pub cached: Vec<CachedSequence>,
    /// The tokens that are generated for those of which the shape wants some.
    pub burst: Option<Burst>,
}

impl Task {
    /// A program that leaves nothing behind.
    pub fn new(shape: BatchShape, inputs: impl Into<Inputs>) -> Self {
        Self { shape, inputs: inputs.into(), cached: Vec::new(), burst: None }
    }

    /// What its programs are lowered for.
    pub fn phase(&self) -> Phase {
        self.burst.as_ref().map_or(Phase::Prefill, |burst| burst.phase)
    }

    /// Who is told of the tokens of each sequence that gets some, in the order of the batch.
    pub fn listeners(&self) -> Vec<mpsc::UnboundedSender<Told>> {
        let of = |(at, ..): (usize, _, _)| self.cached.get(at).map(|cached| cached.tell.clone());
        self.shape.choices().filter_map(of).collect()
    }
}

/// A sequence whose keys and values are kept.
#[derive(Debug, Clone)]
pub struct CachedSequence {
    /// Where it begins or gets more room: the sequence with the rows that it has room for from now on, and the
    /// blocks that these are in.
    pub room: Option<(Arc<Text>, Arc<[u32]>)>,
    /// The epoch whose blocks these are, and in which its past is.
    pub epoch: Epoch,
    /// Is told of each token as it is generated.
    pub tell: mpsc::UnboundedSender<Told>,
}

/// What one program cost one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceCost {
    /// From its start to the end of its last operation, in ns.
    pub total_ns: u64,
    /// Its compute lane at work, in ns.
    pub compute_busy_ns: u64,
    /// The busiest of its loaders at work, in ns.
    pub disk_busy_ns: u64,
    /// Its compute lane idle until a receive ended, in ns.
    pub awaiting_receive_ns: u64,
    /// Bytes that it sent to other devices.
    pub bytes_sent: u64,
    /// Bytes that it received from other devices.
    pub bytes_received: u64,
}

/// What one device did with a program.
#[derive(Debug, Clone)]
pub struct DeviceRun {
    /// Which device.
    pub name: DeviceName,
    /// What its results are,
    pub outputs: Vec<Output>,
    /// and their values.
    pub values: Vec<Vec<f32>>,
    /// What it cost.
    pub cost: DeviceCost,
}

/// A program that ran on every device.
#[derive(Debug, Clone)]
pub struct Run {
    /// In which epoch.
    pub epoch: Epoch,
    /// Its place in the epoch.
    pub sequence: SequenceNumber,
    /// By which plan.
    pub plan: Arc<Plan>,
    /// The devices, by rank.
    pub devices: Vec<DeviceRun>,
    /// From dispatch to the last result.
    pub took: Duration,
    /// What its burst has decoded, if it had one.
    pub decoded: Decoded,
}

/// When the operations of one program started and ended on one device.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    /// For each operation: start and end, in ns of the device's own clock.
    pub operations: Vec<(u64, u64)>,
    /// What to add to get to the coordinator's clock, in ns.
    pub offset_ns: i64,
}

/// A device, as a status shows it.
#[derive(Debug, Clone, Default)]
pub struct DeviceView {
    /// Its name.
    pub name: String,
    /// Where its worker is.
    pub address: String,
    /// unreachable, connected, placing, ready, lost or idle.
    pub state: &'static str,
    /// More about it, for a person.
    pub detail: String,
    /// Its part of the plan, if it has one.
    pub part: Option<DevicePlan>,
    /// Weights as held; 0 before it is placed.
    pub weight_bytes: Bytes,
    /// What it grants.
    pub budget: Bytes,
    /// What its part needs.
    pub needed: Bytes,
    /// Kernel threads.
    pub threads: u16,
    /// Its widest kernels.
    pub processor: String,
}

/// What a fleet was asked for, and what it makes of it.
#[derive(Debug, Clone)]
pub struct Outlook {
    /// How work is to be cut.
    pub strategy: Strategy,
    /// Most rows of one program.
    pub max_rows: u32,
    /// The plan that is placed, or will be; none before devices have been asked.
    pub plan: Option<Arc<Plan>>,
    /// That plan in words.
    pub what: String,
    /// How long a typical text is predicted to take.
    pub predicted: Option<Duration>,
    /// What is kept of texts that go on.
    pub cache: Cache,
}

/// What executes programs. One at a time: the caller holds the turn.
pub trait Fleet: Send + Sync {
    /// Whether programs may run, now and later.
    fn readiness(&self) -> watch::Receiver<Readiness>;
    /// What it was asked for, and what it makes of it.
    fn outlook(&self) -> Outlook;
    /// The plan that is placed, or will be; none before devices have been asked.
    fn plan(&self) -> Option<Arc<Plan>> {
        self.outlook().plan
    }
    /// Runs one program on every device. Not to be dropped before it is done: the caller gives it
    /// a task of its own, so that a program runs on all devices or on none.
    fn execute(&self, task: Task, limit: Duration) -> BoxFuture<'_, Result<Run, RequestError>>;
    /// Asks the burst that runs to end behind its next step, if one runs. Waits for nothing.
    fn end_burst(&self);
    /// Gives back the room of a text that goes on no more. None of its programs runs.
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

/// Shapes that are kept: what is kept of each is small.
const LOWERED: usize = 256;

/// What the programs of a shape are known by, and what they give.
pub(crate) struct Dispatch {
    /// Of all programs.
    pub(crate) digest: [u8; 32],
    /// Results of each device, by rank,
    pub(crate) outputs: Vec<Vec<Output>>,
    /// and the rows that it embeds.
    pub(crate) embedded: Vec<Span<Row>>,
    /// How long the kernels and loaders of each device work on it by its profile, by rank.
    pub(crate) busy: Option<Vec<Busy>>,
}

/// Dispatches by shape. The programs themselves are the workers' matter.
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
        let found = kept.get(&self.spec, &self.formats, plan, phase, shape, dispatch);
        found.map_err(|e| RequestError::Internal { why: e.to_string() })
    }
}

/// Runs `work` where blocking is allowed.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RequestError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| RequestError::Internal { why: format!("a task broke off: {e}") })
}
