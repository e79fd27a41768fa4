//! What a request can fail with, and the one place where that becomes a gRPC status.

use galaxy_common::{Bytes, DeviceName};
use galaxy_proto::fault::{Fault, to_status};
use std::time::Duration;
use tonic::{Code, Status};

/// Limits of a text that the cluster's operator may raise, as messages name them.
pub(crate) const MAX_ROWS: &str = "max_rows in the cluster file";
pub(crate) const KV_CACHE_TOKENS: &str = "kv_cache_tokens in the cluster file";

/// What can be done about a limit besides shortening the text.
fn raised(limited_by: &str) -> &'static str {
    if [MAX_ROWS, KV_CACHE_TOKENS].contains(&limited_by) { ", or raise that" } else { "" }
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The request asks for nothing.
    #[error("the request has no {what}: give at least one")]
    Nothing {
        /// What the request should have, like "texts".
        what: &'static str,
    },
    /// A text has only white space.
    #[error("text {index} is empty: leave it out, or give it words")]
    EmptyText {
        /// Which text it is, counted from 0.
        index: usize,
    },
    /// A text has more tokens than fit.
    #[error(
        "text {index} has {tokens} tokens, and {limited_by} allows {limit}: shorten it{}, or ask to truncate",
        raised(limited_by)
    )]
    TextTooLong {
        /// Which text it is, counted from 0.
        index: usize,
        /// How many tokens the text has.
        tokens: usize,
        /// How many tokens are allowed.
        limit: u32,
        /// What sets the limit, as the message names it.
        limited_by: &'static str,
    },
    /// An input has more tokens than fit, and is not cut.
    #[error(
        "{what} has {tokens} tokens, and {limited_by} allows {limit}: shorten it{}",
        raised(limited_by)
    )]
    TooLong {
        /// What is too long: "the prompt", or which sequence.
        what: String,
        /// How many tokens it has.
        tokens: usize,
        /// How many tokens are allowed.
        limit: u32,
        /// What sets the limit, as the message names it.
        limited_by: &'static str,
    },
    /// The request has more texts than one request may have.
    #[error("{texts} texts are more than the {limit} of one request: send them in parts")]
    TooManyTexts {
        /// How many texts the request has.
        texts: usize,
        /// How many texts are allowed.
        limit: usize,
    },
    /// The result would be larger than what one reply should carry.
    #[error(
        "the result would have {bytes} bytes, and a request may ask for {limit}: send the sequences in parts, or ask for less of each"
    )]
    ResultTooLarge {
        /// How many bytes the result would have.
        bytes: u64,
        /// How many bytes are allowed.
        limit: u64,
    },
    /// A text has more bytes than its tokens could have.
    #[error(
        "{what} has {bytes} bytes, and {limited_by} allows {limit} tokens, for which {most} bytes are read: shorten it{}",
        raised(limited_by)
    )]
    TextTooLarge {
        /// What is too large: "the prompt", or which text.
        what: String,
        /// How many bytes the text has.
        bytes: usize,
        /// The most bytes that are read of it.
        most: usize,
        /// How many tokens are allowed.
        limit: u32,
        /// What sets the limit, as the message names it.
        limited_by: &'static str,
    },
    /// The request has more bytes than are taken.
    #[error("the request has {bytes} bytes, and {limit} are taken: send it in parts")]
    RequestTooLarge {
        /// How many bytes the request has.
        bytes: u64,
        /// How many bytes are taken.
        limit: u64,
    },
    /// The client holds as much of the coordinator's memory as it may.
    #[error(
        "a client may hold {limit} of the coordinator's memory (client_memory in the cluster file); this one holds {held}, and the request needs {more} more: {}",
        if more > limit { "send it in parts" } else { "take the answers first, or send less at a time" }
    )]
    ClientMemory {
        /// What the client holds already.
        held: Bytes,
        /// What the request needs in addition.
        more: Bytes,
        /// What one client may hold.
        limit: Bytes,
    },
    /// A token id is not in the model's vocabulary.
    #[error("sequence {index} has token {token}, and the vocabulary has {vocabulary}")]
    UnknownToken {
        /// Which sequence has the token, counted from 0.
        index: usize,
        /// The token id that is not known.
        token: u32,
        /// How many tokens the vocabulary has.
        vocabulary: u32,
    },
    /// The model does not have the output that is wanted.
    #[error("model {model} has no {wanted}: {why}")]
    UnsupportedOutput {
        /// The name of the model.
        model: String,
        /// The output that was asked for.
        wanted: String,
        /// The reason why the model does not have it.
        why: String,
    },
    /// The model directory lacks what the request needs.
    #[error("{why}")]
    Model {
        /// What is missing or damaged.
        why: String,
    },
    /// The request is malformed in another way.
    #[error("{why}")]
    Invalid {
        /// What is wrong with the request.
        why: String,
    },
    /// The queue is full.
    #[error("{queue} requests are waiting already: try again later")]
    Overloaded {
        /// How many requests may wait.
        queue: usize,
    },
    /// The request's time is over.
    #[error("the request was not done within {allowed:?}{}", if *ours { ", what this coordinator allows one that does not say" } else { "" })]
    Deadline {
        /// How much time the request had.
        allowed: Duration,
        /// Whether the limit is the coordinator's, and not the caller's.
        ours: bool,
    },
    /// The cluster is not ready.
    #[error("the cluster is not ready: {reason}")]
    Unavailable {
        /// The device that stands in the way, if it is one.
        device: Option<DeviceName>,
        /// The reason, for people.
        reason: String,
    },
    /// The cluster will not be ready before somebody changes it.
    #[error("there is no plan for this cluster as it is: {reason}")]
    NoPlan {
        /// The device that stands in the way, if it is one.
        device: Option<DeviceName>,
        /// The reason, for people.
        reason: String,
    },
    /// A device was lost while the request ran.
    #[error("device {device} was lost while the request ran: {reason}")]
    DeviceLost {
        /// The device that was lost.
        device: DeviceName,
        /// How the loss was noticed.
        reason: String,
    },
    /// A device could not run the program.
    #[error("device {device} failed: {reason}")]
    DeviceFailed {
        /// The device that failed.
        device: DeviceName,
        /// The reason, for people.
        reason: String,
        /// Whether another try may help.
        retryable: bool,
    },
    /// The cached rows of a sequence are gone, and its tokens have to be computed again.
    #[error("the cached rows of the sequence in epoch {epoch} are gone with that epoch")]
    CacheLost {
        /// The epoch in which the rows were cached.
        epoch: galaxy_common::Epoch,
    },
    /// No more requests are taken.
    #[error("the coordinator is draining and takes no more requests")]
    Draining,
    /// The trace of a request is not kept.
    #[error("request {request} is not among the last {kept} requests{}", last.map(|l| format!("; the last one is {l}")).unwrap_or_default())]
    NoTrace {
        /// The number of the request.
        request: u64,
        /// How many requests are kept.
        kept: usize,
        /// The number of the last request, if there was one.
        last: Option<u64>,
    },
    /// A fault of the coordinator itself.
    #[error("internal fault: {why}")]
    Internal {
        /// What broke, for people.
        why: String,
    },
}

impl RequestError {
    /// The stable name of the error, in snake case.
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
            Self::CacheLost { .. } => "text_lost",
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
            | Self::CacheLost { .. } => true,
            Self::DeviceFailed { retryable, .. } => *retryable,
            Self::ClientMemory { more, limit, .. } => more <= limit,
            Self::Deadline { ours, .. } => *ours,
            _ => false,
        }
    }

    /// Whether the error is over once the cluster has recovered, so that what failed is run again.
    pub fn passes(&self) -> bool {
        match self {
            Self::DeviceFailed { retryable, .. } => *retryable,
            Self::Unavailable { .. } | Self::DeviceLost { .. } | Self::CacheLost { .. } => true,
            _ => false,
        }
    }

    /// The device that caused the error, if it is known.
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
            Self::DeviceFailed { .. } | Self::CacheLost { .. } => Code::Aborted,
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
    fn a_lost_device_error_names_the_device_and_is_retryable() {
        let device = DeviceName::new("pi-2").unwrap();
        let error = RequestError::DeviceLost { device, reason: "no sign of life".into() };
        let status = Status::from(error);
        let fault = from_status(&status);
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!((fault.code.as_str(), fault.device.as_str()), ("device_lost", "pi-2"));
        assert!(fault.retryable);
    }

    #[test]
    fn invalid_requests_and_draining_are_not_retryable() {
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
