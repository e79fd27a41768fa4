//! The errors of a worker's calls: one enum, and one place that maps it to gRPC.

use crate::{content::error::ContentError, ring::RingError, state::Refusal};
use galaxy_common::{Bytes, DeviceName, PlanError, Rank};
use galaxy_engine::{
    compute::choice::EngineError, executor::RunError, measure::MeasureError, stream::StreamError,
    weights::WeightError,
};
use galaxy_graph::LowerError;
use galaxy_model::ModelError;
use galaxy_proto::{
    convert::ConvertError,
    fault::{Fault, to_status},
};
use tonic::{Code, Status};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The worker's state does not allow the call.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The caller hung up, or a later epoch came.
    #[error(
        "the placement was given up: the coordinator went away, cancelled it, or placed a later epoch"
    )]
    GivenUp,
    /// Bytes that are no plan.
    #[error(
        "the plan cannot be read ({bytes} bytes): do coordinator and worker have the same version?"
    )]
    PlanBytes {
        /// The number of bytes that came.
        bytes: usize,
    },
    /// A plan that does not cover its model.
    #[error("the plan does not fit the model: {0}")]
    Plan(#[from] PlanError),
    /// A plan that names another device at this worker's place.
    #[error("the plan has {found} at rank {rank}, and this device is {own}")]
    NotMine {
        /// The rank that the request gives this worker.
        rank: Rank,
        /// The name of the device that the plan has there.
        found: String,
        /// The name of this device.
        own: DeviceName,
    },
    /// Peers that are not the plan's devices.
    #[error("the addresses given are not those of the plan's devices")]
    Peers,
    /// A model that this device does not have.
    #[error("model {name:?} is not on this device: under {place} there are {known}")]
    UnknownModel {
        /// The model's name.
        name: String,
        /// Where the worker looked.
        place: String,
        /// The models that it has, for people.
        known: String,
    },
    /// A model of the same name and other contents.
    #[error(
        "model {name:?} on this device (fingerprint {have}) is not the coordinator's ({want}): copy the same files to both"
    )]
    Fingerprint {
        /// The model's name.
        name: String,
        /// The fingerprint of the model on this device.
        have: String,
        /// The fingerprint in the plan.
        want: String,
    },
    /// A model that cannot be opened.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A model that this device does not have, and that cannot be fetched.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// Tokens that cannot be generated as the request asks.
    #[error("{why}")]
    Burst {
        /// The reason, for people.
        why: String,
    },
    /// The plan needs more memory than the device grants.
    #[error(
        "model needs {needed} on device {device:?}, which grants {granted} ({granter}): raise memory to {needed} or give it a smaller share"
    )]
    Budget {
        /// Bytes that the plan needs, with activations, buffers and the process.
        needed: Bytes,
        /// Bytes that are granted: the least of the limits.
        granted: Bytes,
        /// Where the limit was set, for people.
        granter: &'static str,
        /// The name of this device.
        device: DeviceName,
    },
    /// The shard cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The engine has no device to compute on.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The links cannot be formed.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Weights that come from disk, on a worker without a place to store them in the order of use.
    #[error(
        "the plan reads weights from disk, and this worker has no place for them: start it with --cache, and not with --cache-bytes 0B"
    )]
    NoShards,
    /// Plain ring links that this worker does not take.
    #[error("this worker takes no plain ring links: start it with --plain")]
    NoPlain,
    /// A batch that is not valid.
    #[error(transparent)]
    Shape(#[from] ConvertError),
    /// Token ids that are not one for each row.
    #[error("{tokens} token ids came for {rows} rows")]
    Tokens {
        /// The number of token ids that came.
        tokens: usize,
        /// The number of rows in the batch.
        rows: u32,
    },
    /// Token types that are not one for each row, or not the model's.
    #[error("types below {types} are wanted for {rows} rows, and others came")]
    Types {
        /// The number of rows in the batch.
        rows: u32,
        /// The number of token types that the model has.
        types: u32,
    },
    /// Image patches that are not those of the rows that this device embeds.
    #[error("image patches of {rows} rows are wanted, and others came")]
    Patches {
        /// The number of rows that the patches are wanted for.
        rows: u32,
    },
    /// A token that the model does not have.
    #[error("row {row} has token {token}, and the vocabulary has {vocabulary}")]
    Token {
        /// The row of the batch.
        row: usize,
        /// The token's id.
        token: u32,
        /// The number of tokens in the vocabulary.
        vocabulary: u32,
    },
    /// A batch that cannot be lowered to a program.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// Programs that differ from the coordinator's.
    #[error(
        "this worker's programs differ from the coordinator's: install the same version on both (this one is {})",
        galaxy_proto::version_line()
    )]
    Digest,
    /// The program failed.
    #[error("{}", run_message(source, peer))]
    Run {
        /// The error of the executor.
        source: RunError,
        /// The peer at the other end, where a link failed.
        peer: Option<DeviceName>,
    },
    /// The deadline passed before the program started.
    #[error("the request's time was over before the program could start")]
    Deadline,
    /// A timeline that is not stored any more, or never was.
    #[error("no timeline of that program is stored: the last {kept} are")]
    NoTimeline {
        /// The number of timelines that are stored.
        kept: usize,
    },
    /// A thread that cannot be started.
    #[error("threads cannot be started: {0}")]
    Thread(#[from] std::io::Error),
    /// The device could not be measured.
    #[error("the device cannot be measured: {0}")]
    Measure(#[from] MeasureError),
    /// The caller hung up, or the worker ends.
    #[error("measuring was given up: the caller went away, or the worker ends")]
    MeasuringGivenUp,
    /// A link that failed while it was measured.
    #[error("the link to {peer} cannot be measured: {why}")]
    Probe {
        /// The device at the other end.
        peer: DeviceName,
        /// What went wrong, for people.
        why: String,
    },
    /// A setting with a name that is not known.
    #[error("{why}")]
    Setting {
        /// The name that was asked for, and those that are known, for people.
        why: String,
    },
    /// A probe without a peer's name and address.
    #[error("the probe names no peer with a name and an address")]
    NoPeer,
    /// A task of this worker that panicked.
    #[error("a task of the worker ended early: this is a bug; its log says where")]
    Bug,
}

fn run_message(source: &RunError, peer: &Option<DeviceName>) -> String {
    match (peer, source) {
        // The message names the device, not its rank.
        (Some(peer), RunError::Link { source, .. }) => {
            format!("the link with device {peer} broke: {source}")
        }
        _ => source.to_string(),
    }
}

impl From<RunError> for WorkerError {
    fn from(source: RunError) -> Self {
        Self::Run { source, peer: None }
    }
}

impl WorkerError {
    /// The error for an epoch that ended before the program did.
    pub(crate) fn aborted() -> Self {
        Self::Run { source: RunError::Aborted, peer: None }
    }

    /// Whether the error is that this device does not have the model.
    pub(crate) fn is_absent_model(&self) -> bool {
        matches!(self, Self::UnknownModel { .. } | Self::Fingerprint { .. })
    }

    /// Whether the error is that a directory of the model is not what its manifest says.
    pub(crate) fn is_changed_model(&self) -> bool {
        fn of_weights(error: &WeightError) -> bool {
            match error {
                WeightError::Model(ModelError::Piece { .. }) => true,
                WeightError::Stream(error) => match &**error {
                    StreamError::Weights(error) => of_weights(error),
                    _ => false,
                },
                _ => false,
            }
        }
        match self {
            Self::Model(ModelError::Piece { .. }) => true,
            Self::Weights(error) => of_weights(error),
            _ => false,
        }
    }

    /// The gRPC code, the name of the fault, and whether the same call may succeed later.
    fn class(&self) -> (Code, &'static str, bool) {
        match self {
            Self::Refused(Refusal::StaleEpoch { .. }) => {
                (Code::FailedPrecondition, "stale_epoch", true)
            }
            Self::Refused(Refusal::NotPlaced { .. }) => {
                (Code::FailedPrecondition, "not_placed", true)
            }
            Self::Refused(Refusal::Placed { .. }) => {
                (Code::FailedPrecondition, "holds_place", false)
            }
            Self::Refused(Refusal::Measuring) => (Code::Unavailable, "measuring", true),
            Self::Refused(Refusal::Draining) => (Code::Unavailable, "draining", true),
            Self::Refused(Refusal::Overloaded) => (Code::ResourceExhausted, "overloaded", true),
            Self::Refused(Refusal::OutOfOrder { .. }) => (Code::Aborted, "out_of_order", true),
            Self::GivenUp | Self::MeasuringGivenUp => (Code::Aborted, "given_up", true),
            Self::PlanBytes { .. } | Self::Plan(_) | Self::NotMine { .. } | Self::Peers => {
                (Code::InvalidArgument, "bad_plan", false)
            }
            Self::UnknownModel { .. } => (Code::NotFound, "unknown_model", false),
            Self::Fingerprint { .. } => (Code::FailedPrecondition, "model_differs", false),
            Self::Model(_) | Self::Content(ContentError::Model(_)) => {
                (Code::FailedPrecondition, "bad_model", false)
            }
            Self::Content(error) if error.retryable() => (Code::Unavailable, "no_content", true),
            Self::Content(error) => match error {
                ContentError::Full { .. } | ContentError::Small { .. } => {
                    (Code::FailedPrecondition, "no_room", false)
                }
                ContentError::File { .. }
                | ContentError::Private(_)
                | ContentError::Taken { .. } => (Code::FailedPrecondition, "bad_cache", false),
                _ => (Code::FailedPrecondition, "bad_content", false),
            },
            Self::Weights(_) if self.is_changed_model() => {
                (Code::FailedPrecondition, "bad_model", false)
            }
            Self::Budget { .. } => (Code::FailedPrecondition, "over_budget", false),
            Self::Weights(_) | Self::Engine(_) => (Code::FailedPrecondition, "load_failed", false),
            Self::Ring(error) => (Code::Unavailable, "no_link", error.retryable()),
            Self::NoPlain => (Code::FailedPrecondition, "no_plain", false),
            Self::NoShards => (Code::FailedPrecondition, "no_cache", false),
            Self::Shape(_)
            | Self::Tokens { .. }
            | Self::Types { .. }
            | Self::Token { .. }
            | Self::Patches { .. } => (Code::InvalidArgument, "invalid_argument", false),
            Self::Burst { .. } => (Code::InvalidArgument, "invalid_argument", false),
            Self::Lower(_) => (Code::InvalidArgument, "cannot_lower", false),
            Self::Digest => (Code::FailedPrecondition, "digest_mismatch", false),
            Self::Run { source, .. } => match source {
                RunError::Aborted => (Code::Aborted, "aborted", true),
                RunError::Deadline => (Code::DeadlineExceeded, "deadline_exceeded", true),
                RunError::Link { .. } => (Code::Unavailable, "link_lost", true),
                RunError::Stale { .. } => (Code::FailedPrecondition, "stale_epoch", true),
                _ => (Code::Internal, "run_failed", false),
            },
            Self::Deadline => (Code::DeadlineExceeded, "deadline_exceeded", true),
            Self::NoTimeline { .. } => (Code::NotFound, "no_timeline", false),
            Self::Measure(MeasureError::Room { .. }) => {
                (Code::FailedPrecondition, "over_budget", false)
            }
            Self::Measure(_) => (Code::FailedPrecondition, "measure_failed", false),
            Self::Probe { .. } => (Code::Unavailable, "no_link", true),
            Self::NoPeer | Self::Setting { .. } => {
                (Code::InvalidArgument, "invalid_argument", false)
            }
            Self::Thread(_) => (Code::ResourceExhausted, "no_threads", true),
            Self::Bug => (Code::Internal, "internal", false),
        }
    }

    /// The status that goes to the coordinator.
    pub(crate) fn into_status(self, own: &DeviceName) -> Status {
        let (code, name, retryable) = self.class();
        let fault = Fault::new(name, self.to_string(), retryable);
        // A lost link is its other end's fault, as far as one can tell from here.
        let device = match &self {
            Self::Run { peer: Some(peer), .. } => peer,
            Self::Ring(error) => error.peer(),
            Self::Probe { peer, .. } => peer,
            _ => own,
        };
        to_status(code, fault.of(device))
    }
}
