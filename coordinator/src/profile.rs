//! Profiles of a cluster: measured by its workers, kept in files, used again.
//!
//! [`collect`] asks every worker what it is, takes from the [`Store`] what was measured before for
//! the same device, shape, threads and engine, and has the rest measured: all devices at the same
//! time, since each is a machine of its own, and then the links, in rounds in which no device
//! takes part in two probes, and some of them once more alone.

pub(crate) mod links;
mod measure;
mod store;

pub use measure::{collect, measure_each};
pub use store::{Store, StoreError};

use galaxy_common::{DeviceName, LinkType, ProfileError};
use galaxy_proto::fault::Fault;
use std::fmt;

/// What is wanted of [`collect`].
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// Everything is measured, whatever the store has.
    pub fresh: bool,
    /// Of which types links are measured.
    pub links: Vec<LinkType>,
}

/// What happens meanwhile.
#[derive(Clone, PartialEq, Debug)]
pub enum Progress {
    /// A device is measured.
    Device {
        /// Which.
        device: DeviceName,
        /// Points that were measured,
        done: u32,
        /// of so many.
        total: u32,
        /// What is measured now.
        now: String,
    },
    /// The links are measured.
    Links {
        /// Probes that were made,
        done: u32,
        /// of so many.
        total: u32,
        /// What is measured now: "a -> b, tls".
        now: String,
    },
    /// Something that a person should know: a file that is damaged, a link that does not stand.
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

/// Who is told of it. It must not block.
pub type Listener<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// Why there are no profiles.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// A worker that cannot be reached, or is not what it should be.
    #[error("device {device} cannot be measured: {why}")]
    Unreachable {
        /// Which.
        device: DeviceName,
        /// Why.
        why: String,
    },
    /// A worker that refuses.
    #[error("device {device} was not measured: {fault}")]
    Refused {
        /// Which.
        device: DeviceName,
        /// What it says.
        fault: Fault,
    },
    /// A profile that cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A file that cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
}
