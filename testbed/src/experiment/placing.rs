//! Places models on a testbed's devices, for what is measured there.

use crate::{
    driver::{Driver, Observation, Placed, Refusal},
    health::{self, Watch},
    instance::Testbed,
};
use anyhow::Result;
use galaxy_coord::Cluster;
use galaxy_model::ModelDir;
use std::{path::PathBuf, sync::Arc};

/// A margin of drift that no device exceeds, so that the plan does not change while an experiment runs.
const STEADY: f64 = 100.0;
/// The most times that devices are measured until the host leaves the machine alone meanwhile.
const PROFILES: usize = 5;

/// Places a model, with the threads that multiply under their devices' quotas.
pub(super) fn place<'s>(
    testbed: &Testbed,
    smoke: bool,
    driver: &'s Driver,
    cluster: Cluster,
    model: &Arc<ModelDir>,
) -> Result<Result<Placed<'s>, Refusal>> {
    let placed = beside_quotas(testbed, smoke, driver, cluster, model)?;
    if let Ok(placed) = &placed {
        testbed.hold(placed.plan().ring.iter().map(|device| device.name.as_str()))?;
    }
    Ok(placed)
}

/// Places a model. Profiles that this measures must be measured while the host leaves the machine alone, like
/// every sample.
fn beside_quotas<'s>(
    testbed: &Testbed,
    smoke: bool,
    driver: &'s Driver,
    mut cluster: Cluster,
    model: &Arc<ModelDir>,
) -> Result<Result<Placed<'s>, Refusal>> {
    // A plan that changed on the way would be another cell.
    cluster.drift = STEADY;
    let by_profiles = cluster.tiles.is_none();
    let _holding = by_profiles.then(|| testbed.holding()).transpose()?;
    let profiles = cluster.profiles.clone();
    let kept = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&profiles).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let counts = by_profiles && !testbed.loopback && !smoke;
    let tries = if counts { PROFILES } else { 1 };
    for _ in 1..tries {
        health::quiet()?;
        let (before, watch) = (kept(), Watch::start()?);
        let placed = driver.place(cluster.clone(), model)?;
        let stolen = watch.finish(0)?.steal_share;
        let mut new = kept();
        new.retain(|file| !before.contains(file));
        if new.is_empty() || stolen <= health::MOST_STEAL {
            return Ok(placed);
        }
        // A device that holds a part of a plan does not measure itself.
        drop(placed);
        eprintln!(
            "profiles do not count: the host took {:.1}% of the machine; they are measured again",
            stolen * 100.0
        );
        new.iter().try_for_each(std::fs::remove_file)?;
    }
    driver.place(cluster, model)
}

/// Bytes per second of the cable of each device of a run, by rank.
pub(super) fn rates(testbed: &Testbed, observation: &Observation) -> Vec<f64> {
    let environment = &testbed.environment;
    let rate = |i: usize| match testbed.loopback {
        true => f64::INFINITY,
        false => environment.rate(&environment.devices[i]).0 / 8.0,
    };
    devices(testbed, observation).into_iter().map(rate).collect()
}

/// Indices of the devices of a run, by rank.
pub(super) fn devices(testbed: &Testbed, observation: &Observation) -> Vec<usize> {
    let index = |name: &galaxy_common::DeviceName| testbed.device(name.as_str()).unwrap_or(0);
    observation.run.devices.iter().map(|d| index(&d.name)).collect()
}
