//! Why links cannot be formed.

use super::handshake::{HandshakeError, HandshakeReply};
use galaxy_common::DeviceName;
use galaxy_proto::channel::ConnectError;
use std::{io, time::Duration};

/// Why the links cannot be formed.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A peer that cannot be reached.
    #[error("no link to device {peer}: {source}")]
    Connect {
        /// The device at the other end.
        peer: DeviceName,
        /// The error of the connection.
        source: ConnectError,
    },
    /// A peer that refused the link.
    #[error("device {peer} refused the link: {}", match answer {
        HandshakeReply::Stale => "it is in a later epoch, or was told to give this one up",
        HandshakeReply::WrongName => "it does not know us as a device of its plan",
        HandshakeReply::OtherPlan => "it was placed with another plan",
        HandshakeReply::Busy => "it holds a place in a plan, or measures already: stop the coordinator",
        HandshakeReply::Welcome => "it did not",
    })]
    Refused {
        /// The device at the other end.
        peer: DeviceName,
        /// The reason for which it refused.
        answer: HandshakeReply,
    },
    /// A peer whose handshake or welcome cannot be read.
    #[error("device {peer} cannot be understood: {source}")]
    Handshake {
        /// The device at the other end.
        peer: DeviceName,
        /// What is wrong with its bytes.
        source: HandshakeError,
    },
    /// A peer that takes no plain links.
    #[error("device {peer} takes no plain ring links: start its worker with --plain")]
    NoPlain {
        /// The device at the other end.
        peer: DeviceName,
    },
    /// A peer that did not come in time.
    #[error("no link from device {peer} came within {after:?}: is it placed, and can it reach us?")]
    Absent {
        /// The device at the other end.
        peer: DeviceName,
        /// How long this device waited.
        after: Duration,
    },
    /// A socket that failed.
    #[error("the link with device {peer} failed: {source}")]
    Io {
        /// The device at the other end.
        peer: DeviceName,
        /// The error of the socket.
        source: io::Error,
    },
}

impl RingError {
    /// The device at the other end.
    pub fn peer(&self) -> &DeviceName {
        match self {
            Self::Connect { peer, .. }
            | Self::Refused { peer, .. }
            | Self::Handshake { peer, .. }
            | Self::NoPlain { peer }
            | Self::Absent { peer, .. }
            | Self::Io { peer, .. } => peer,
        }
    }
    /// Whether a later placement may succeed although nobody changes anything.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Connect { source, .. } => source.retryable(),
            Self::Refused { answer, .. } => {
                matches!(answer, HandshakeReply::Stale | HandshakeReply::Busy)
            }
            Self::Absent { .. } | Self::Io { .. } => true,
            Self::Handshake { .. } | Self::NoPlain { .. } => false,
        }
    }
}
