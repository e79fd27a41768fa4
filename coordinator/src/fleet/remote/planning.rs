//! Plans of a fleet: where profiles come from, the first plan, and a look at a better one.

use super::{
    Message, Shared,
    calls::{self, Unready},
};
use crate::{
    cluster::Cluster,
    drift::{Change, GAIN},
    fleet::{BoxFuture, Readiness, blocking},
    membership::Index,
    placement::{self, Placement, PlacementError, Planner, Predictor, Pricer},
    profile::{self, Store},
};
use galaxy_common::{ClusterProfile, DeviceName, DeviceProfile, Epoch, LinkProfile, Plan};
use galaxy_model::ModelDir;
use galaxy_planner::{Offer, ProfileCosts, Request};
use galaxy_proto::identity::Identity;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::sync::OwnedRwLockWriteGuard;

use super::device_table::Notice;

/// Where profiles come from: measured, or from files.
pub trait ProfileSource: Send + Sync {
    /// Measures what `cluster`'s devices do alone, whatever others do meanwhile, so that `collect` need not. Gives the
    /// devices that it could not measure, and why.
    fn measure<'a>(
        &'a self,
        _cluster: &'a Cluster,
        _model: &'a ModelDir,
        _identity: &'a Identity,
        _progress: profile::Listener<'a>,
    ) -> BoxFuture<'a, Vec<(DeviceName, String)>> {
        Box::pin(std::future::ready(Vec::new()))
    }

    /// Profiles of all devices of `cluster` and of the links between them. No device holds a place.
    ///
    /// # Errors
    /// What is missing, and what to do, for people.
    fn collect<'a>(
        &'a self,
        cluster: &'a Cluster,
        model: &'a ModelDir,
        identity: &'a Identity,
        progress: profile::Listener<'a>,
    ) -> BoxFuture<'a, Result<ClusterProfile, String>>;
}

/// How a fleet plans where the cluster file has no shares.
#[derive(Clone)]
pub struct Planning {
    /// The source of profiles.
    pub profiles: Arc<dyn ProfileSource>,
    /// Makes plans from profiles.
    pub planner: Planner,
    /// Predicts how long a plan takes.
    pub predictor: Predictor,
    /// Predicts how long operations take.
    pub pricer: Pricer,
}

impl Planning {
    /// Profiles that workers measure, kept beside the cluster file, and our own planner.
    pub fn measured() -> Self {
        Self {
            profiles: Arc::new(Measured),
            planner: galaxy_planner::plan,
            predictor: galaxy_planner::predict,
            pricer: |spec, plan, shape, profile| {
                Ok(Box::new(ProfileCosts::new(spec, plan, shape, profile)?))
            },
        }
    }
}

/// Profiles that workers measure, and that the coordinator keeps.
struct Measured;

impl ProfileSource for Measured {
    fn measure<'a>(
        &'a self,
        cluster: &'a Cluster,
        model: &'a ModelDir,
        identity: &'a Identity,
        progress: profile::Listener<'a>,
    ) -> BoxFuture<'a, Vec<(DeviceName, String)>> {
        Box::pin(async move {
            let store = Store::new(&cluster.profiles);
            let failed = profile::measure_each(cluster, model, identity, &store, progress).await;
            failed.into_iter().map(|(device, error)| (device, error.to_string())).collect()
        })
    }

    fn collect<'a>(
        &'a self,
        cluster: &'a Cluster,
        model: &'a ModelDir,
        identity: &'a Identity,
        progress: profile::Listener<'a>,
    ) -> BoxFuture<'a, Result<ClusterProfile, String>> {
        Box::pin(async move {
            let store = Store::new(&cluster.profiles);
            let wanted = profile::Wanted { fresh: false, links: cluster.links() };
            let found = profile::collect(cluster, model, identity, &store, &wanted, progress).await;
            found.map_err(|e| e.to_string())
        })
    }
}

/// Why there is no plan: the device that stands in the way, if it is one, and the reason.
pub(super) type Failure = (Option<Index>, String);

/// A plan, or why there is none, with what it is for.
pub(super) struct PlanningResult {
    pub(super) offers: Vec<Offer>,
    /// The profiles as they were measured; none where the split is by hand.
    pub(super) profile: Option<Arc<ClusterProfile>>,
    pub(super) outcome: Result<Arc<Placement>, Failure>,
}

/// The outcome of a look at another plan.
pub(super) enum Verdict {
    /// The plan in force stays: a typical text takes `now` by it, and `then` by the best other.
    Keep { now: Duration, then: Duration },
    /// Another plan is better by enough. Nothing runs while the guard lives.
    Move {
        placement: Arc<Placement>,
        now: Duration,
        then: Duration,
        guard: OwnedRwLockWriteGuard<()>,
    },
    /// The plans could not be compared, because one could not be found or predicted.
    Unknown { reason: String },
    /// A device cannot make ready for the other plan; `passes` says whether it may soon.
    Unready { reason: String, passes: bool },
    /// The plan in force, or its epoch, ended meanwhile.
    Overtaken,
}

/// Makes a plan for what devices offer, with their curves scaled by `factors`. `before` are the profiles that were
/// collected before, and whether the last plan worked: if it did, they are taken where they cover what is offered. In
/// any case devices that offer nothing now keep theirs.
///
/// # Errors
/// Only when profiles cannot be had: asking again may help. Where no plan is possible, that is the outcome.
pub(super) async fn make(
    shared: Arc<Shared>,
    offers: Vec<Offer>,
    factors: Vec<f64>,
    (worked, before): (bool, Option<Arc<ClusterProfile>>),
) -> Result<PlanningResult, Failure> {
    let profile = match shared.cluster().by_hand() {
        true => None,
        false => Some(profile_of(&shared, &offers, (worked, before)).await?),
    };
    let (of, from, curves) = (shared.clone(), offers.clone(), profile.clone());
    let made = blocking(move || match curves {
        None => placement::by_shares(&of.cluster(), &of.model, &from),
        Some(profile) => {
            by_profiles(&of, &from, &placement::scaled(&of.cluster(), &profile, &factors))
        }
    });
    let made = made.await.map_err(|e| (None, e.to_string()))?;
    let outcome = made.map(Arc::new).map_err(|e| failure(&shared, &e));
    Ok(PlanningResult { offers, profile, outcome })
}

/// Measures what is not known of devices and links, and keeps `kept`, a plan for some of them.
///
/// # Errors
/// As [`make`].
pub(super) async fn keep(
    shared: &Arc<Shared>,
    offers: Vec<Offer>,
    before: (bool, Option<Arc<ClusterProfile>>),
    kept: Arc<Placement>,
) -> Result<PlanningResult, Failure> {
    let profile = profile_of(shared, &offers, before).await?;
    Ok(PlanningResult { offers, profile: Some(profile), outcome: Ok(kept) })
}

/// Has devices that hold no place measure themselves while others run. Gives those that failed, and why.
pub(super) async fn measure(shared: &Arc<Shared>, devices: &[Index]) -> Vec<(Index, String)> {
    if shared.cluster().by_hand() {
        return Vec::new();
    }
    let cluster = freed(shared, |device| devices.contains(&device)).await;
    let progress = profiling(shared);
    let Shared { model, identity, planning, .. } = &**shared;
    let failed = planning.profiles.measure(&cluster, model, identity, &progress).await;
    let known = shared.cluster();
    let index = |name: &DeviceName| known.devices.iter().position(|d| d.name == *name);
    failed.into_iter().filter_map(|(name, why)| Some((index(&name)?, why))).collect()
}

/// The profiles of what is offered: those from before if they cover it and the last plan worked, else collected ones.
async fn profile_of(
    shared: &Arc<Shared>,
    offers: &[Offer],
    (worked, before): (bool, Option<Arc<ClusterProfile>>),
) -> Result<Arc<ClusterProfile>, Failure> {
    match before {
        Some(known) if worked && offers.iter().all(|offer| covers(&known, offer)) => Ok(known),
        before => {
            let mut profile = collect(shared, offers).await?;
            if let Some(before) = before {
                keep_others(&mut profile, &before);
            }
            Ok(Arc::new(profile))
        }
    }
}

/// Looks for a better plan than `present` with the curves of `change`, off the request path, and reports to the driver.
pub(super) async fn look(
    shared: Arc<Shared>,
    offers: Vec<Offer>,
    profile: Arc<ClusterProfile>,
    present: Arc<Placement>,
    change: Change,
) {
    let (of, was, factors) = (shared.clone(), present.clone(), change.factors.clone());
    let compared = blocking(move || {
        let cluster = of.cluster();
        let curves = placement::scaled(&cluster, &profile, &factors);
        let found = by_profiles(&of, &offers, &curves)?;
        // Both by the same measure, whatever the planner says of its own.
        let time = |plan: &Plan| {
            let predict = |request: &Request<'_>| (of.planning.predictor)(request, plan);
            let predicted = placement::ask(&cluster, &of.model, &offers, &curves, predict)?;
            Ok::<_, PlacementError>(Duration::from_nanos(predicted.latency.max(0.0) as u64))
        };
        Ok::<_, PlacementError>((time(&was.plan)?, time(&found.plan)?, found))
    });
    let verdict = match compared.await {
        Err(error) => Verdict::Unknown { reason: error.to_string() },
        Ok(Err(error)) => Verdict::Unknown { reason: error.to_string() },
        Ok(Ok((now, then, found))) => {
            let better = then.as_secs_f64() <= now.as_secs_f64() * (1.0 - GAIN);
            if better && found.plan != present.plan {
                move_to(&shared, &present, Arc::new(found), (now, then)).await
            } else {
                Verdict::Keep { now, then }
            }
        }
    };
    shared.send(Message::Looked { change, present, verdict }).await;
}

/// Has devices make ready for a better plan, and waits until nothing runs.
async fn move_to(
    shared: &Arc<Shared>,
    present: &Arc<Placement>,
    placement: Arc<Placement>,
    (now, then): (Duration, Duration),
) -> Verdict {
    let mut readiness = shared.readiness.subscribe();
    let Readiness::Ready(epoch) = readiness.borrow_and_update().clone() else {
        return Verdict::Overtaken;
    };
    let in_force = shared.device_table().placement.clone();
    if in_force.is_none_or(|in_force| !Arc::ptr_eq(&in_force, present)) {
        return Verdict::Overtaken;
    }
    // What has to come over the network comes while requests are answered, and only then.
    let prepared = tokio::select! {
        biased;
        _ = readiness.wait_for(|now| *now != Readiness::Ready(epoch)) => return Verdict::Overtaken,
        prepared = calls::prepare(shared, present, &placement) => prepared,
    };
    if let Err(Unready { reason, passes }) = prepared {
        return Verdict::Unready { reason, passes };
    }
    // Who waits for this lock is let in before those that come later: it takes as long as the program
    // that runs.
    let guard = shared.plan_lock.clone().write_owned().await;
    Verdict::Move { placement, now, then, guard }
}

fn by_profiles(
    shared: &Shared,
    offers: &[Offer],
    curves: &ClusterProfile,
) -> Result<Placement, PlacementError> {
    let Shared { model, planning, .. } = shared;
    let cluster = shared.cluster();
    let planned = placement::ask(&cluster, model, offers, curves, planning.planner)?;
    placement::settle(&cluster, planned)
}

/// Adds what was measured before of devices and links that are not in `profile`.
fn keep_others(profile: &mut ClusterProfile, before: &ClusterProfile) {
    let new = |device: &&DeviceProfile| profile.device(&device.device).is_err();
    let devices: Vec<_> = before.devices.iter().filter(new).cloned().collect();
    let ends = |link: &LinkProfile| (link.from.clone(), link.to.clone(), link.link);
    let known: HashSet<_> = profile.links.iter().map(ends).collect();
    let links = before.links.iter().filter(|link| !known.contains(&ends(link)));
    profile.links.extend(links.cloned());
    profile.devices.extend(devices);
}

/// Whether `profile` was measured for what a device offers.
pub(super) fn covers(profile: &ClusterProfile, offer: &Offer) -> bool {
    profile.device(&offer.name).is_ok_and(|device| device.threads == offer.threads)
}

async fn collect(shared: &Arc<Shared>, offers: &[Offer]) -> Result<ClusterProfile, Failure> {
    let names: Vec<_> = shared.cluster().devices.iter().map(|d| d.name.clone()).collect();
    let offered = |device: Index| offers.iter().any(|offer| offer.name == names[device]);
    let cluster = freed(shared, offered).await;
    let progress = profiling(shared);
    let Shared { model, identity, planning, .. } = &**shared;
    let collected = planning.profiles.collect(&cluster, model, identity, &progress).await;
    collected.map_err(|reason| (None, reason))
}

/// The cluster of some devices alone, which are freed from the places in which a coordinator that was killed has left
/// them: there they refuse to measure.
async fn freed(shared: &Arc<Shared>, wanted: impl Fn(Index) -> bool) -> Cluster {
    let mut cluster = (*shared.cluster()).clone();
    let held: Vec<(Index, Epoch)> = {
        let table = shared.device_table();
        let described = table.entries.iter().enumerate().filter(|(device, _)| wanted(*device));
        let held = described.filter_map(|(i, e)| Some((i, Epoch(e.description.as_ref()?.epoch))));
        held.filter(|(_, epoch)| epoch.0 > 0).collect()
    };
    for (device, epoch) in held {
        calls::cancel(shared.clone(), device, epoch).await;
    }
    let mut device = 0..;
    cluster.devices.retain(|_| device.next().is_some_and(&wanted));
    cluster
}

/// Reports measurements to the fleet's listener.
fn profiling(shared: &Shared) -> impl Fn(profile::Progress) + Send + Sync + 'static {
    let listener = shared.listener.clone();
    move |progress| listener(Notice::Profiling { progress })
}

fn failure(shared: &Shared, error: &PlacementError) -> Failure {
    let blamed = error.device();
    let device = blamed.and_then(|b| shared.cluster().devices.iter().position(|d| d.name == *b));
    (device, error.to_string())
}
