//! Profiles of a cluster: measured by its workers, kept in files, used again.
//!
//! [`collect`] asks every worker what it is, takes from the [`Store`] what was measured before for
//! the same device, shape, threads and engine, and has the rest measured: all devices at the same
//! time, since each is a machine of its own, and then the links, in rounds in which no device
//! takes part in two probes, and some of them once more alone.

pub(crate) mod links;
mod measure;
mod reached;
mod store;

pub use measure::{collect, measure_each};
pub use store::{Store, StoreError};

use galaxy_common::{DeviceName, LinkType, ProfileError};
use galaxy_proto::fault::Fault;
use std::fmt;

/// What [`collect`] is to measure.
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// Whether everything is measured, whatever the store has.
    pub fresh: bool,
    /// The types of links that are measured.
    pub links: Vec<LinkType>,
}

/// What happens while profiles are collected.
#[derive(Clone, PartialEq, Debug)]
pub enum Progress {
    /// A device is measured.
    Device {
        /// The device that is measured.
        device: DeviceName,
        /// How many points have been measured.
        done: u32,
        /// How many points there are to measure.
        total: u32,
        /// What is measured now, for people.
        now: String,
    },
    /// The links are measured.
    Links {
        /// How many probes have ended.
        done: u32,
        /// How many probes there are to run.
        total: u32,
        /// What is measured now: "a -> b, tls".
        now: String,
    },
    /// Something that a person should know: a file that is damaged, a link that cannot be formed.
    Note(String),
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { device, done, total, now } => {
                write!(f, "{device}: {done} of {total}, {now}")
            }
            Self::Links { done, total, now } => write!(f, "links: {done} of {total}, {now}"),
            Self::Note(note) => f.write_str(note),
        }
    }
}

/// Receives the progress. It must not block.
pub type Listener<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// Why there are no profiles.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// A worker cannot be reached, or is not what it should be.
    #[error("device {device} cannot be measured: {why}")]
    Unreachable {
        /// The device that cannot be measured.
        device: DeviceName,
        /// The reason, for people.
        why: String,
    },
    /// A worker refuses to be measured.
    #[error("device {device} was not measured: {fault}")]
    Refused {
        /// The device that was not measured.
        device: DeviceName,
        /// The fault that its worker reports.
        fault: Fault,
    },
    /// A profile cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A profile cannot be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
}
