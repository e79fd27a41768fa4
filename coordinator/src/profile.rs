//! Profiles of a cluster: measured by its workers, kept in files, used again.
//!
//! [`collect`] asks every worker what it is, takes from the [`Store`] what was measured before for
//! the same device, shape, threads and engine, and has the rest measured: all devices at the same
//! time, since each is a machine of its own, and then the links, in rounds in which no device
//! takes part in two probes. [`load`] takes what the store has and measures nothing.

mod measure;
mod store;

pub use store::{Store, StoreError};

use crate::cluster::Cluster;
use galaxy_common::{ClusterProfile, DeviceName, DeviceProfile, LinkType, ProfileError};
use galaxy_model::ModelDir;
use galaxy_proto::{fault::Fault, identity::Identity};
use std::fmt;

/// What is wanted of [`collect`].
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// Everything is measured, whatever the store has.
    pub fresh: bool,
    /// Of which types links are measured.
    pub links: Vec<LinkType>,
}

/// What a device says of itself, as far as profiles depend on it.
#[derive(Clone, PartialEq, Debug)]
pub struct Facts {
    /// Whose.
    pub device: DeviceName,
    /// Kernel threads that it will use.
    pub threads: u16,
    /// Engine and instructions, as "cpu avx512".
    pub engine: String,
}

impl Facts {
    /// Whether a profile is still one of this device as it is.
    pub fn match_with(&self, profile: &DeviceProfile) -> bool {
        profile.device == self.device
            && profile.threads == self.threads
            && profile.engine == self.engine
    }
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

/// Profiles of every device of a cluster for a model, and of the links between them: from the
/// store where it has them, else measured, and then stored.
///
/// A link that cannot be probed is left out, with a [`Progress::Note`]: a planner can do without.
///
/// # Errors
/// When a device cannot be reached or measured, or a profile cannot be stored. What was measured
/// until then is stored.
pub async fn collect(
    cluster: &Cluster,
    model: &ModelDir,
    identity: &Identity,
    store: &Store,
    wanted: &Wanted,
    progress: Listener<'_>,
) -> Result<ClusterProfile, CollectError> {
    measure::collect(cluster, model, identity, store, wanted, progress).await
}

/// What the store has for a cluster and a model; nothing where a device or a link of these types
/// is missing, stale or damaged.
///
/// `facts` are what devices say of themselves, where that is known; of the others any profile of
/// the name and shape will do.
pub fn load(
    store: &Store,
    cluster: &Cluster,
    model: &ModelDir,
    links: &[LinkType],
    facts: &[Facts],
) -> Option<ClusterProfile> {
    let shape = model.shape_key();
    let devices = cluster.devices.iter().map(|device| {
        let known = facts.iter().find(|facts| facts.device == device.name);
        store.device(&device.name, &shape, |profile| match known {
            Some(facts) => facts.match_with(profile),
            None => device.threads.is_none_or(|threads| threads == profile.threads),
        })
    });
    let devices: Option<Vec<DeviceProfile>> =
        devices.map(Result::ok).map(Option::flatten).collect();
    let stored = store.links().ok()?;
    let mut found = Vec::new();
    for (from, to) in pairs(cluster) {
        for link in links {
            let same = |l: &&galaxy_common::LinkProfile| {
                (&l.from, &l.to, &l.link) == (from, to, link) && l.check().is_ok()
            };
            found.push(stored.iter().find(same)?.clone());
        }
    }
    Some(ClusterProfile { devices: devices?, links: found })
}

/// All ordered pairs of devices.
fn pairs(cluster: &Cluster) -> impl Iterator<Item = (&DeviceName, &DeviceName)> {
    let names = || cluster.devices.iter().map(|device| &device.name);
    names().flat_map(move |from| names().map(move |to| (from, to))).filter(|(a, b)| a != b)
}
