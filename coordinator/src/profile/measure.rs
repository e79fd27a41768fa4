//! Has workers measure themselves, and then their links.

use super::{
    CollectError, Listener, Progress, Store, Wanted,
    links::links,
    reached::{Reached, reach},
};
use crate::{
    cluster::{Cluster, DeviceConfig},
    model_server::ModelServer,
};
use futures_util::future::join_all;
use galaxy_common::{ClusterProfile, DeviceName, DeviceProfile, printable::line};
use galaxy_model::ModelDir;
use galaxy_proto::{
    fault::from_status,
    identity::Identity,
    v1::{ProfileRequest, profile_event},
};
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::task::JoinSet;
use tonic::Status;

/// The longest silence of a device that measures itself: one point of a slow one takes seconds.
const SILENCE: Duration = Duration::from_secs(60);
/// The limit of all that a device measures: it means to take less than 20 s, and a slow one takes more.
const WHOLE: Duration = Duration::from_secs(180);

/// The most characters by which a device says how far it is.
const MAX_WORDS: usize = 200;

/// What supplies the model to a worker without it, and the identity that is used for that.
type ServerAndIdentity<'a> = (Arc<ModelServer>, &'a Identity);

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
    let reached = join_all(cluster.devices.iter().map(|device| reach(device, identity))).await;
    let reached: Vec<Reached> = reached.into_iter().collect::<Result<_, _>>()?;
    let server = (Arc::new(ModelServer::new(model.path())), identity);
    let devices = devices(cluster, (model, server), store, wanted, &reached, progress).await?;
    let links = links(store, wanted, &reached, progress).await?;
    Ok(ClusterProfile { devices, links })
}

/// Measures each device of a cluster that the store has no profile of, and stores it. Gives the
/// devices that could not be measured, and why.
pub async fn measure_each(
    cluster: &Cluster,
    model: &ModelDir,
    identity: &Identity,
    store: &Store,
    progress: Listener<'_>,
) -> Vec<(DeviceName, CollectError)> {
    let wanted = Wanted { fresh: false, links: Vec::new() };
    let server = Arc::new(ModelServer::new(model.path()));
    let one = async |device: &DeviceConfig| {
        let reached = reach(device, identity).await?;
        let from = (model, (server.clone(), identity));
        devices(cluster, from, store, &wanted, &[reached], progress).await
    };
    let measured = join_all(cluster.devices.iter().map(one)).await;
    let names = cluster.devices.iter().map(|device| device.name.clone());
    names.zip(measured).filter_map(|(name, one)| Some((name, one.err()?))).collect()
}

async fn devices(
    cluster: &Cluster,
    (model, server): (&ModelDir, ServerAndIdentity<'_>),
    store: &Store,
    wanted: &Wanted,
    reached: &[Reached],
    progress: Listener<'_>,
) -> Result<Vec<DeviceProfile>, CollectError> {
    let shape = model.shape_key();
    let mut found: HashMap<DeviceName, DeviceProfile> = HashMap::new();
    let mut running = Vec::new();
    for worker in reached {
        let name = &worker.device.name;
        let stored = match wanted.fresh {
            true => None,
            false => store.device(name, &shape, |profile| worker.is_of(profile)).unwrap_or_else(
                |error| {
                    progress(Progress::Note(format!("{error}: {name} is measured again")));
                    None
                },
            ),
        };
        match stored {
            Some(profile) => drop(found.insert(name.clone(), profile)),
            None => {
                let measured =
                    device(worker.clone(), cluster.max_rows, (model, server.clone()), progress);
                running.push(async move {
                    tokio::time::timeout(WHOLE, measured).await.unwrap_or_else(|_| {
                        let why = format!("it was not done measuring itself after {WHOLE:?}");
                        Err(CollectError::Unreachable { device: name.clone(), why })
                    })
                });
            }
        }
    }
    // All at the same time: each is a machine of its own. What one of them measured is kept even
    // if another fails.
    let mut failed = None;
    for measured in join_all(running).await {
        let kept = measured.and_then(|profile| {
            profile.check(&shape)?;
            store.save_device(&profile)?;
            Ok(profile)
        });
        match kept {
            Ok(profile) => drop(found.insert(profile.device.clone(), profile)),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(reached.iter().filter_map(|r| found.remove(&r.device.name)).collect()),
    }
}

/// Has one device measure itself.
async fn device(
    mut worker: Reached,
    max_rows: u32,
    (model, (server, identity)): (&ModelDir, ServerAndIdentity<'_>),
    progress: Listener<'_>,
) -> Result<DeviceProfile, CollectError> {
    let name = worker.device.name.clone();
    let refused = |status: Status| CollectError::Refused {
        device: name.clone(),
        fault: from_status(&status),
    };
    let silent = |_| CollectError::Unreachable {
        device: name.clone(),
        why: format!("it said nothing for {SILENCE:?} while it measured itself"),
    };
    let request = ProfileRequest {
        model: model.name().to_owned(),
        fingerprint: model.fingerprint().to_owned(),
        threads: worker.threads.into(),
        max_rows,
        memory_bytes: worker.device.memory.0,
        activations: model.formats().activations().to_string(),
    };
    let asked = tokio::time::timeout(SILENCE, worker.connection.profile(request)).await;
    let mut events = asked.map_err(silent)?.map_err(refused)?.into_inner();
    // Supplies end with this call.
    let mut supplies = JoinSet::new();
    loop {
        let event = tokio::time::timeout(SILENCE, events.message()).await;
        match event.map_err(silent)?.map_err(refused)?.map(|event| event.event) {
            Some(Some(profile_event::Event::Progress(at))) => progress(Progress::Device {
                device: name.clone(),
                done: at.done,
                total: at.total,
                now: line(&at.now, MAX_WORDS),
            }),
            Some(Some(profile_event::Event::Wanted(_))) => {
                let note =
                    format!("{name} has no directory of the model: it is brought what it needs");
                progress(Progress::Note(note));
                let (server, identity) = (server.clone(), identity.clone());
                let device = worker.device.clone();
                supplies.spawn(async move { server.supply(&device, &identity).await });
            }
            Some(Some(profile_event::Event::Profile(bytes))) => {
                let profile = postcard::from_bytes(&bytes).ok();
                let mine = profile.filter(|p: &DeviceProfile| worker.is_of(p));
                return mine.ok_or_else(|| CollectError::Unreachable {
                    device: name.clone(),
                    why: "what it sent is no profile of it: install the same version on both"
                        .to_owned(),
                });
            }
            Some(None) => {}
            None => {
                let why = "it broke off while it measured itself".to_owned();
                return Err(CollectError::Unreachable { device: name, why });
            }
        }
    }
}
