//! What the membership says: what to do, and where devices stand.

use super::{Index, Now};
use galaxy_common::Epoch;

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Form a fresh connection and ask the device to describe itself.
    Connect {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
    },
    /// Throw the connection away, with every call on it.
    Disconnect {
        /// Which device.
        device: Index,
    },
    /// Ask for health.
    Ping {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
    },
    /// Everybody who is needed is there: make a plan, or take the last one if nothing has changed.
    Plan {
        /// Which time.
        round: u64,
    },
    /// A device that the plan did not count on is there: look whether a plan with it is better.
    Look,
    /// Devices that joined are there ([`joining`](super::Membership::joining)): have them measured, wait
    /// until nothing runs, and then say [`Event::Quiet`](super::Event::Quiet).
    Gather,
    /// Send the device its part of the plan.
    Place {
        /// Which device.
        device: Index,
        /// In which epoch.
        epoch: Epoch,
    },
    /// Tell the device to abort the epoch.
    Cancel {
        /// Which device.
        device: Index,
        /// Which epoch.
        epoch: Epoch,
    },
    /// Fail what runs in the epoch.
    Fail {
        /// Which epoch.
        epoch: Epoch,
        /// Because of whom.
        device: Index,
        /// Why.
        reason: String,
    },
    /// Every device of the ring is in place: programs may run.
    Ready {
        /// In which epoch.
        epoch: Epoch,
    },
}

/// Where a device stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not reached; the next attempt is due at `retry`.
    Unreachable {
        /// When to try again.
        retry: Now,
        /// Why not.
        reason: String,
        /// Whether it was connected before.
        lost: bool,
    },
    /// An attempt is under way.
    Connecting {
        /// Since when.
        since: Now,
        /// Why the last one failed; empty for the first.
        reason: String,
        /// Whether it was connected before.
        lost: bool,
    },
    /// Connected, without a place.
    Connected,
    /// Loading its shard, forming its links.
    Placing,
    /// In its place.
    Ready {
        /// Since when.
        since: Now,
    },
}

impl State {
    /// The word for status replies.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Unreachable { lost: true, .. } | Self::Connecting { lost: true, .. } => "lost",
            Self::Unreachable { .. } | Self::Connecting { .. } => "unreachable",
            Self::Connected => "connected",
            Self::Placing => "placing",
            Self::Ready { .. } => "ready",
        }
    }
    /// Whether a connection stands.
    pub fn connected(&self) -> bool {
        matches!(self, Self::Connected | Self::Placing | Self::Ready { .. })
    }
}
