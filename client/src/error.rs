//! What can go wrong with a call.

use galaxy_proto::{
    channel::ConnectError,
    fault::{self, Fault},
    identity::IdentityError,
};
use std::time::Duration;
use tonic::Code;

/// Why a call failed.
///
/// A program branches on [`ClientError::code`]; [`ClientError::retryable`] says whether the same
/// call may succeed later. The SDK has then already tried again, as far as its policy and the
/// deadline allow.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The identity that was named cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The coordinator's name is not valid.
    #[error(transparent)]
    Name(#[from] galaxy_common::NameError),
    /// No connection came about.
    #[error("no connection to the coordinator: {source}")]
    Connect {
        /// Why there is none, and at which address.
        #[from]
        source: ConnectError,
    },
    /// A connection without TLS ended before an answer came.
    #[error(
        "the coordinator broke off the connection, which is not encrypted: it stopped, or it \
         takes clients with an identity only ({why})"
    )]
    Plain {
        /// The message of the transport.
        why: String,
    },
    /// The coordinator, or a device behind it, refused or failed.
    #[error("{message}")]
    Refused {
        /// Stable name of the reason, like `text_too_long`.
        code: String,
        /// What went wrong, for people.
        message: String,
        /// Whether the same call may succeed later.
        retryable: bool,
        /// The device at fault, if it is one.
        device: Option<String>,
    },
    /// The caller's time ran out.
    #[error("no answer within {timeout:?}")]
    Timeout {
        /// The time that the call had.
        timeout: Duration,
    },
    /// The answer is not what was asked for: the coordinator is broken, or of another version.
    #[error("the coordinator's answer is malformed: {what}")]
    Malformed {
        /// What is wrong with the answer.
        what: String,
    },
    /// The answer ended before it was complete: the coordinator ended, or is broken.
    #[error("the coordinator's answer broke off before its end")]
    BrokenOff,
    /// One part of a call that was sent in parts failed. Indices in `source` count within it.
    #[error("in the part of items {first} to {last}: {source}", last = first + count.saturating_sub(1))]
    Part {
        /// Index of the first item of the part.
        first: usize,
        /// Items of the part.
        count: usize,
        /// What happened to it.
        source: Box<ClientError>,
    },
}

impl ClientError {
    /// A stable name of the reason.
    pub fn code(&self) -> &str {
        match self {
            Self::Identity(_) => "identity",
            Self::Name(_) => "invalid_argument",
            Self::Connect { source, .. } => source.code(),
            Self::Plain { .. } => "connection_broken",
            Self::Refused { code, .. } => code,
            Self::Timeout { .. } => "deadline",
            Self::Malformed { .. } | Self::BrokenOff => "malformed_answer",
            Self::Part { source, .. } => source.code(),
        }
    }

    /// Whether the same call may succeed later.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Refused { retryable, .. } => *retryable,
            Self::Connect { source, .. } => source.retryable(),
            Self::Part { source, .. } => source.retryable(),
            Self::BrokenOff => true,
            _ => false,
        }
    }

    /// The device at fault, if it is one.
    pub fn device(&self) -> Option<&str> {
        match self {
            Self::Refused { device, .. } => device.as_deref(),
            Self::Part { source, .. } => source.device(),
            _ => None,
        }
    }
}

impl ClientError {
    /// Whether this is the deadline as the transport reports it, where `left` is the time that was left.
    pub(crate) fn is_deadline(&self, left: Duration) -> bool {
        match self {
            Self::Refused { code, message, .. } => {
                matches!(&**code, "cancelled" | "deadline_exceeded")
                    && (left.is_zero() || message.contains("Timeout expired"))
            }
            _ => false,
        }
    }

    /// Explains a connection that broke because the coordinator wants TLS, which the transport cannot know. `plain`
    /// says that we speak without it, and that nothing was ever answered.
    pub(crate) fn explained(self, plain: bool) -> Self {
        match self {
            Self::Refused { message, .. } if plain && message.contains("transport error") => {
                Self::Plain { why: message }
            }
            other => other,
        }
    }
}

impl ClientError {
    /// The error of a cluster that is not ready, as a coordinator reports it while a call waits.
    pub(crate) fn unready(reason: &str, device: String) -> Self {
        let unready =
            Fault::new("unavailable", format!("the cluster is not ready: {reason}"), true);
        fault::to_status(Code::Unavailable, unready.of(device)).into()
    }
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        let Fault { code, message, retryable, device } = fault::from_status(&status);
        let device = Some(device).filter(|name| !name.is_empty());
        Self::Refused { code, message, retryable, device }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> ClientError {
        ClientError::Refused {
            code: "device_lost".to_owned(),
            message: "device pi-2 was lost: no answer for 2.5 s".to_owned(),
            retryable: true,
            device: Some("pi-2".to_owned()),
        }
    }

    #[test]
    fn an_error_in_a_part_keeps_the_code_of_its_source() {
        let part = ClientError::Part { first: 1024, count: 512, source: Box::new(lost()) };
        assert_eq!(part.code(), "device_lost");
        assert!(part.retryable());
        assert_eq!(part.device(), Some("pi-2"));
        assert_eq!(
            part.to_string(),
            "in the part of items 1024 to 1535: device pi-2 was lost: no answer for 2.5 s"
        );
    }

    #[test]
    fn a_timeout_is_a_deadline_error_and_not_retryable() {
        let error = ClientError::Timeout { timeout: Duration::from_secs(60) };
        assert_eq!((error.code(), error.retryable(), error.device()), ("deadline", false, None));
        assert_eq!(error.to_string(), "no answer within 60s");
    }
}
