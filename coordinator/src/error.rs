//! What a request can fail with, and the one place where that becomes a gRPC status.

use galaxy_common::{Bytes, DeviceName};
use galaxy_proto::fault::{Fault, to_status};
use std::time::Duration;
use tonic::{Code, Status};

/// Limits of a text that the cluster's operator may raise, as messages name them.
pub(crate) const MAX_ROWS: &str = "max_rows in the cluster file";
pub(crate) const CACHE_ROWS: &str = "cache_rows in the cluster file";

/// What can be done about a limit besides shortening the text.
fn raised(limited_by: &str) -> &'static str {
    if [MAX_ROWS, CACHE_ROWS].contains(&limited_by) { ", or raise that" } else { "" }
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// Nothing was asked.
    #[error("the request has no {what}: give at least one")]
    Nothing {
        /// What it should have.
        what: &'static str,
    },
    /// A text of white space only.
    #[error("text {index} is empty: leave it out, or give it words")]
    EmptyText {
        /// Which, counted from 0.
        index: usize,
    },
    /// A text of more tokens than fit.
    #[error(
        "text {index} has {tokens} tokens, and {limited_by} allows {limit}: shorten it{}, or ask to truncate",
        raised(limited_by)
    )]
    TextTooLong {
        /// Which, counted from 0.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// How many are allowed.
        limit: u32,
        /// By what.
        limited_by: &'static str,
    },
    /// More tokens than fit, where nothing is cut.
    #[error(
        "{what} has {tokens} tokens, and {limited_by} allows {limit}: shorten it{}",
        raised(limited_by)
    )]
    TooLong {
        /// What is too long: "the prompt", or which sequence.
        what: String,
        /// Its tokens.
        tokens: usize,
        /// How many are allowed.
        limit: u32,
        /// By what.
        limited_by: &'static str,
    },
    /// More texts than one request may have.
    #[error("{texts} texts are more than the {limit} of one request: send them in parts")]
    TooManyTexts {
        /// How many there are.
        texts: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// A result beyond what one reply should carry.
    #[error(
        "the result would have {bytes} bytes, and a request may ask for {limit}: send the sequences in parts, or ask for less of each"
    )]
    ResultTooLarge {
        /// How many it would have.
        bytes: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// A text of more bytes than its tokens could have.
    #[error(
        "{what} has {bytes} bytes, and {limited_by} allows {limit} tokens, for which {most} bytes are read: shorten it{}",
        raised(limited_by)
    )]
    TextTooLarge {
        /// What is too large: "the prompt", or which text.
        what: String,
        /// Its bytes.
        bytes: usize,
        /// How many are read.
        most: usize,
        /// How many tokens are allowed.
        limit: u32,
        /// By what.
        limited_by: &'static str,
    },
    /// A request of more bytes than are taken.
    #[error("the request has {bytes} bytes, and {limit} are taken: send it in parts")]
    RequestTooLarge {
        /// How many it has.
        bytes: u64,
        /// How many are taken.
        limit: u64,
    },
    /// A client holds as much of the coordinator's memory as it may.
    #[error(
        "a client may hold {limit} of the coordinator's memory (client_memory in the cluster file); this one holds {held}, and the request needs {more} more: {}",
        if more > limit { "send it in parts" } else { "take the answers first, or send less at a time" }
    )]
    ClientMemory {
        /// What it holds.
        held: Bytes,
        /// What it would need.
        more: Bytes,
        /// What it may hold.
        limit: Bytes,
    },
    /// A token id that the model does not have.
    #[error("sequence {index} has token {token}, and the vocabulary has {vocabulary}")]
    UnknownToken {
        /// Which sequence, counted from 0.
        index: usize,
        /// The id.
        token: u32,
        /// Entries of the vocabulary.
        vocabulary: u32,
    },
    /// An output that the model does not have.
    #[error("model {model} has no {wanted}: {why}")]
    UnsupportedOutput {
        /// Which model.
        model: String,
        /// What was asked.
        wanted: String,
        /// Why not.
        why: String,
    },
    /// A model directory without what the request needs.
    #[error("{why}")]
    Model {
        /// What is missing or damaged.
        why: String,
    },
    /// A request that is malformed in another way.
    #[error("{why}")]
    Invalid {
        /// What is wrong.
        why: String,
    },
    /// The queue is full.
    #[error("{queue} requests are waiting already: try again later")]
    Overloaded {
        /// Places of the queue.
        queue: usize,
    },
    /// The request's time is over.
    #[error("the request was not done within {allowed:?}{}", if *ours { ", what this coordinator allows one that does not say" } else { "" })]
    Deadline {
        /// How much time it had.
        allowed: Duration,
        /// Whether it is the coordinator's limit, and not the caller's.
        ours: bool,
    },
    /// The cluster is not ready.
    #[error("the cluster is not ready: {reason}")]
    Unavailable {
        /// Whose fault it is, if a device's.
        device: Option<DeviceName>,
        /// Why.
        reason: String,
    },
    /// The cluster will not be ready before somebody changes it.
    #[error("there is no plan for this cluster as it is: {reason}")]
    NoPlan {
        /// Whose fault it is, if a device's.
        device: Option<DeviceName>,
        /// Why.
        reason: String,
    },
    /// A device was lost while the request ran.
    #[error("device {device} was lost while the request ran: {reason}")]
    DeviceLost {
        /// Which.
        device: DeviceName,
        /// How that was noticed.
        reason: String,
    },
    /// A device could not run the program.
    #[error("device {device} failed: {reason}")]
    DeviceFailed {
        /// Which.
        device: DeviceName,
        /// Why.
        reason: String,
        /// Whether another try may help.
        retryable: bool,
    },
    /// What was kept of a text is gone, and its tokens have to go through again.
    #[error("what was kept of the text in epoch {epoch} is gone with that epoch")]
    TextLost {
        /// Where it was kept.
        epoch: galaxy_common::Epoch,
    },
    /// No more requests are taken.
    #[error("the coordinator is draining and takes no more requests")]
    Draining,
    /// A trace that is not kept.
    #[error("request {request} is not among the last {kept} requests{}", last.map(|l| format!("; the last one is {l}")).unwrap_or_default())]
    NoTrace {
        /// Which.
        request: u64,
        /// How many are kept.
        kept: usize,
        /// The last one.
        last: Option<u64>,
    },
    /// A fault of ours.
    #[error("internal fault: {why}")]
    Internal {
        /// What broke.
        why: String,
    },
}

impl RequestError {
    /// The stable name in snake case.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Nothing { .. } | Self::Invalid { .. } => "invalid_argument",
            Self::EmptyText { .. } => "empty_text",
            Self::TextTooLong { .. } | Self::TooLong { .. } | Self::TextTooLarge { .. } => {
                "text_too_long"
            }
            Self::RequestTooLarge { .. } => "request_too_large",
            Self::ClientMemory { .. } => "client_memory",
            Self::TooManyTexts { .. } => "too_many_texts",
            Self::ResultTooLarge { .. } => "result_too_large",
            Self::UnknownToken { .. } => "unknown_token",
            Self::UnsupportedOutput { .. } => "unsupported_output",
            Self::Model { .. } => "unsupported_model",
            Self::Overloaded { .. } => "overloaded",
            Self::Deadline { .. } => "deadline",
            Self::Unavailable { .. } => "unavailable",
            Self::NoPlan { .. } => "no_plan",
            Self::DeviceLost { .. } => "device_lost",
            Self::DeviceFailed { .. } => "device_failed",
            Self::TextLost { .. } => "text_lost",
            Self::Draining => "draining",
            Self::NoTrace { .. } => "no_trace",
            Self::Internal { .. } => "internal",
        }
    }

    /// Whether the same request may succeed later.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Overloaded { .. }
            | Self::Unavailable { .. }
            | Self::DeviceLost { .. }
            | Self::TextLost { .. } => true,
            Self::DeviceFailed { retryable, .. } => *retryable,
            Self::ClientMemory { more, limit, .. } => more <= limit,
            Self::Deadline { ours, .. } => *ours,
            _ => false,
        }
    }

    /// Whether it is over once the cluster has mended itself, so that what ran is run again.
    pub fn passes(&self) -> bool {
        match self {
            Self::DeviceFailed { retryable, .. } => *retryable,
            Self::Unavailable { .. } | Self::DeviceLost { .. } | Self::TextLost { .. } => true,
            _ => false,
        }
    }

    /// The device whose fault it is.
    pub fn device(&self) -> Option<&DeviceName> {
        match self {
            Self::Unavailable { device, .. } | Self::NoPlan { device, .. } => device.as_ref(),
            Self::DeviceLost { device, .. } | Self::DeviceFailed { device, .. } => Some(device),
            _ => None,
        }
    }

    fn grpc(&self) -> Code {
        match self {
            Self::Nothing { .. }
            | Self::Invalid { .. }
            | Self::EmptyText { .. }
            | Self::TextTooLong { .. }
            | Self::TooLong { .. }
            | Self::TooManyTexts { .. }
            | Self::TextTooLarge { .. }
            | Self::RequestTooLarge { .. }
            | Self::ResultTooLarge { .. }
            | Self::UnknownToken { .. } => Code::InvalidArgument,
            Self::UnsupportedOutput { .. } | Self::Model { .. } | Self::NoPlan { .. } => {
                Code::FailedPrecondition
            }
            Self::Overloaded { .. } | Self::ClientMemory { .. } => Code::ResourceExhausted,
            Self::Deadline { .. } => Code::DeadlineExceeded,
            Self::Unavailable { .. } | Self::DeviceLost { .. } | Self::Draining => {
                Code::Unavailable
            }
            Self::DeviceFailed { .. } | Self::TextLost { .. } => Code::Aborted,
            Self::NoTrace { .. } => Code::NotFound,
            Self::Internal { .. } => Code::Internal,
        }
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let mut fault = Fault::new(error.code(), error.to_string(), error.retryable());
        if let Some(device) = error.device() {
            fault = fault.of(device);
        }
        to_status(error.grpc(), fault)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_proto::fault::from_status;

    #[test]
    fn a_lost_device_is_named_and_worth_a_retry() {
        let device = DeviceName::new("pi-2").unwrap();
        let error = RequestError::DeviceLost { device, reason: "no sign of life".into() };
        let status = Status::from(error);
        let fault = from_status(&status);
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!((fault.code.as_str(), fault.device.as_str()), ("device_lost", "pi-2"));
        assert!(fault.retryable);
    }

    #[test]
    fn what_the_caller_did_wrong_is_not_worth_a_retry() {
        let errors = [
            RequestError::EmptyText { index: 3 },
            RequestError::TooManyTexts { texts: 10_000, limit: 1024 },
            RequestError::Draining,
        ];
        for error in errors {
            assert!(!from_status(&Status::from(error)).retryable);
        }
    }
}
