//! What the membership gives out: actions for the driver, and the states of devices.

use super::{Index, Now};
use galaxy_common::Epoch;

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Form a fresh connection and ask the device to describe itself.
    Connect {
        /// The device to connect.
        device: Index,
        /// The number of the attempt, which events about the connection repeat.
        attempt: u64,
    },
    /// Throw the connection away, with every call on it.
    Disconnect {
        /// The device to disconnect.
        device: Index,
    },
    /// Ask a device for its health.
    Ping {
        /// The device to ask.
        device: Index,
        /// The attempt by which the device is connected.
        attempt: u64,
    },
    /// All devices that are needed are connected: make a plan, or take the last one if nothing has changed.
    Plan {
        /// The round of planning, which the answer repeats.
        round: u64,
    },
    /// A device that the plan did not count on is connected: look whether a plan with it is better.
    Look,
    /// Devices that joined are connected ([`joining`](super::Membership::joining)): have them
    /// measured, wait until nothing runs, and then say [`Event::Quiet`](super::Event::Quiet).
    Gather,
    /// Send the device its part of the plan.
    Place {
        /// The device to place.
        device: Index,
        /// The epoch of the place.
        epoch: Epoch,
    },
    /// Tell the device to abort the epoch.
    Cancel {
        /// The device that is to abort.
        device: Index,
        /// The epoch to abort.
        epoch: Epoch,
    },
    /// Fail what runs in the epoch.
    Fail {
        /// The epoch that has ended.
        epoch: Epoch,
        /// The device because of which it has ended.
        device: Index,
        /// The reason, for people.
        reason: String,
    },
    /// Every device of the ring is in place: programs may run.
    Ready {
        /// The epoch that programs may run in.
        epoch: Epoch,
    },
}

/// The state of a device, as the membership sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceState {
    /// Not reached; the next attempt is due at `retry`.
    Unreachable {
        /// When the next attempt is due.
        retry: Now,
        /// Why the device is not reached; empty before the first attempt.
        reason: String,
        /// Whether it was connected before.
        lost: bool,
    },
    /// An attempt is under way.
    Connecting {
        /// When the attempt began.
        since: Now,
        /// Why the last attempt failed; empty for the first.
        reason: String,
        /// Whether it was connected before.
        lost: bool,
    },
    /// The device is connected, and has no place.
    Connected,
    /// The device loads its shard and forms its links.
    Placing,
    /// The device is in its place.
    Ready {
        /// When the device took its place.
        since: Now,
    },
}

impl DeviceState {
    /// The word for the state in status replies.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Unreachable { lost: true, .. } | Self::Connecting { lost: true, .. } => "lost",
            Self::Unreachable { .. } | Self::Connecting { .. } => "unreachable",
            Self::Connected => "connected",
            Self::Placing => "placing",
            Self::Ready { .. } => "ready",
        }
    }
    /// Whether the device is connected.
    pub fn connected(&self) -> bool {
        matches!(self, Self::Connected | Self::Placing | Self::Ready { .. })
    }
}
