//! Placement: from a cluster, a model and what devices say of themselves to a plan that fits.
//!
//! Everything here is a pure function, and everything after it only takes a [`Plan`]: a planner
//! that chooses by profiles takes the place of [`plan`], and nothing else changes.

use crate::cluster::Cluster;
use galaxy_common::{Bytes, DeviceName, plan::Plan};
use galaxy_graph::{
    LowerError,
    budget::{self, Needs},
    share::{self, Member, ShareError, Terms},
};
use galaxy_model::ModelDir;

/// A model that has no place in a cluster.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// The shares give no plan.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The plan gives no programs.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// A device's part does not fit into what it grants.
    #[error(
        "device {device} needs {} for its part ({} weights, {} activations, {} transfers, {} results, {} scratch, {} process) and grants {grants}: {} are missing. Raise its memory to {}, give it a smaller share, add a device, or lower max_rows",
        needs.total(), needs.weights, needs.activations, needs.staging, needs.results, needs.scratch, needs.process,
        Bytes(needs.total().0.saturating_sub(grants.0)), megabytes(needs.total())
    )]
    Budget {
        /// Whose.
        device: DeviceName,
        /// What it would take.
        needs: Needs,
        /// What it grants.
        grants: Bytes,
    },
}

/// A number of bytes as one would write it into a cluster file, rounded up.
fn megabytes(bytes: Bytes) -> String {
    format!("{}MB", bytes.0.div_ceil(1_000_000))
}

/// The plan that follows from the shares of the cluster file.
///
/// `threads` stands for devices whose threads the file leaves open, in the order of the file.
///
/// # Errors
/// When the shares give no plan.
pub fn plan(cluster: &Cluster, model: &ModelDir, threads: &[u16]) -> Result<Plan, PlacementError> {
    let members: Vec<Member> = cluster
        .devices
        .iter()
        .enumerate()
        .map(|(i, device)| Member {
            name: device.name.clone(),
            budget: device.memory,
            threads: device.threads.or_else(|| threads.get(i).copied()).unwrap_or(1).max(1),
            share: device.share,
        })
        .collect();
    let terms = Terms {
        model: model.name(),
        fingerprint: model.fingerprint(),
        strategy: cluster.strategy,
        wire: cluster.wire,
        tiles: cluster.tiles,
        max_rows: cluster.max_rows,
    };
    Ok(share::plan(model.spec(), &terms, &members)?)
}

/// What each device of the ring needs; checked against what it grants.
///
/// `limits` are the devices' own limits in ring order, where they have one.
///
/// # Errors
/// [`PlacementError::Budget`] for the first device whose part does not fit.
pub fn fit(
    model: &ModelDir,
    plan: &Plan,
    limits: &[Option<Bytes>],
) -> Result<Vec<Needs>, PlacementError> {
    let all = budget::needs_all(model.spec(), model.dtype().width(), plan)?;
    all.into_iter()
        .zip(plan.ranked())
        .map(|(needs, (rank, device))| {
            let own = limits.get(rank.index()).copied().flatten();
            let grants = own.map_or(device.budget, |own| own.min(device.budget));
            if needs.total() > grants {
                return Err(PlacementError::Budget { device: device.name.clone(), needs, grants });
            }
            Ok(needs)
        })
        .collect()
}
