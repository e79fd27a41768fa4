//! Has workers measure themselves and their links.

use super::{CollectError, Listener, Progress, Store, Wanted};
use crate::{
    cluster::{Cluster, Device},
    connection::{Connection, introduce},
    supply::Supplier,
};
use futures_util::future::join_all;
use galaxy_common::{
    ClusterProfile, DeviceName, DeviceProfile, LinkProfile, LinkType, PROFILE_VERSION, Spread,
};
use galaxy_model::ModelDir;
use galaxy_proto::{
    fault::from_status,
    identity::Identity,
    v1::{DescribeReply, Peer, ProbeReply, ProbeRequest, ProfileRequest, profile_event},
};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::task::JoinSet;
use tonic::Status;

/// Between two signs of life of a device that measures itself: one point of a slow one takes
/// seconds.
const SILENCE: Duration = Duration::from_secs(60);
/// For all that a device measures: it means to take less than 20 s, and a slow one takes more.
const WHOLE: Duration = Duration::from_secs(180);
/// For one probe: the worker ends it by itself well before.
const PROBE: Duration = Duration::from_secs(20);

/// Who brings the model to a worker without it, and as whom.
type Supplying<'a> = (Arc<Supplier>, &'a Identity);

/// A worker that answers.
#[derive(Clone)]
struct Reached {
    device: Device,
    connection: Connection,
    description: DescribeReply,
    /// Kernel threads that it will use.
    threads: u16,
}

impl Reached {
    /// Whether a profile is one of this device as it is.
    fn is_of(&self, profile: &DeviceProfile) -> bool {
        profile.device == self.device.name
            && profile.threads == self.threads
            && profile.engine == self.description.engine
    }
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
    let reached = join_all(cluster.devices.iter().map(|device| reach(device, identity))).await;
    let reached: Vec<Reached> = reached.into_iter().collect::<Result<_, _>>()?;
    let supplier = (Arc::new(Supplier::new(model.path())), identity);
    let devices = devices(cluster, (model, supplier), store, wanted, &reached, progress).await?;
    let links = links(store, wanted, &reached, progress).await?;
    Ok(ClusterProfile { devices, links })
}

async fn reach(device: &Device, identity: &Identity) -> Result<Reached, CollectError> {
    let failed = |why| CollectError::Unreachable { device: device.name.clone(), why };
    let (connection, description) = introduce(device, identity).await.map_err(failed)?;
    let own = u16::try_from(description.threads).unwrap_or(u16::MAX).max(1);
    let threads = device.threads.map_or(own, |threads| threads.min(own));
    Ok(Reached { device: device.clone(), connection, description, threads })
}

async fn devices(
    cluster: &Cluster,
    (model, supplier): (&ModelDir, Supplying<'_>),
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
                    device(worker.clone(), cluster.max_rows, (model, supplier.clone()), progress);
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
    (model, (supplier, identity)): (&ModelDir, Supplying<'_>),
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
    };
    let asked = tokio::time::timeout(SILENCE, worker.connection.profile(request)).await;
    let mut events = asked.map_err(silent)?.map_err(refused)?.into_inner();
    // They end with this call.
    let mut supplies = JoinSet::new();
    loop {
        let event = tokio::time::timeout(SILENCE, events.message()).await;
        match event.map_err(silent)?.map_err(refused)?.map(|event| event.event) {
            Some(Some(profile_event::Event::Progress(at))) => progress(Progress::Device {
                device: name.clone(),
                done: at.done,
                total: at.total,
                now: at.now,
            }),
            Some(Some(profile_event::Event::Wanted(_))) => {
                let note =
                    format!("{name} has no directory of the model: it is brought what it needs");
                progress(Progress::Note(note));
                let (supplier, identity) = (supplier.clone(), identity.clone());
                let device = worker.device.clone();
                supplies.spawn(async move { supplier.supply(&device, &identity).await });
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

/// One direction of one pair, over one type of link.
#[derive(Clone)]
struct Way {
    from: Reached,
    to: Reached,
    link: LinkType,
}

async fn links(
    store: &Store,
    wanted: &Wanted,
    reached: &[Reached],
    progress: Listener<'_>,
) -> Result<Vec<LinkProfile>, CollectError> {
    let stored = match wanted.fresh {
        true => Vec::new(),
        false => store.links().unwrap_or_else(|error| {
            progress(Progress::Note(format!("{error}: the links are measured again")));
            Vec::new()
        }),
    };
    let known = |way: &Way| {
        let (from, to) = (&way.from.device.name, &way.to.device.name);
        let same = |l: &&LinkProfile| (&l.from, &l.to, l.link) == (from, to, way.link);
        stored.iter().find(same).cloned()
    };
    let mut links = Vec::new();
    let rounds: Vec<Vec<Way>> = rounds(reached.len())
        .into_iter()
        .flat_map(|pairs| {
            wanted.links.iter().flat_map(move |&link| {
                let way = |&(a, b): &(usize, usize)| {
                    let (from, to) = (reached[a].clone(), reached[b].clone());
                    Way { from, to, link }
                };
                let back: Vec<_> = pairs.iter().map(|&(a, b)| (b, a)).collect();
                [pairs.iter().map(way).collect(), back.iter().map(way).collect::<Vec<_>>()]
            })
        })
        .map(|round: Vec<Way>| {
            let mut missing = Vec::new();
            for way in round {
                match known(&way) {
                    Some(link) => links.push(link),
                    None => missing.push(way),
                }
            }
            missing
        })
        .collect();
    let total = u32::try_from(rounds.iter().map(Vec::len).sum::<usize>()).unwrap_or(u32::MAX);
    let (mut done, mut measured) = (0, Vec::new());
    for round in rounds {
        let mut probes = JoinSet::new();
        for way in round {
            let (from, to) = (&way.from.device.name, &way.to.device.name);
            let now = format!("{from} -> {to}, {}", way.link);
            progress(Progress::Links { done, total, now: now.clone() });
            probes.spawn(async move { (now, probe(way).await) });
        }
        while let Some(finished) = probes.join_next().await {
            done += 1;
            match finished {
                Ok((_, Ok(link))) => measured.push(link),
                Ok((what, Err(why))) => {
                    progress(Progress::Note(format!("no profile of the link {what}: {why}")));
                }
                Err(error) => progress(Progress::Note(format!("a probe broke off: {error}"))),
            }
        }
    }
    if !measured.is_empty() {
        progress(Progress::Links { done, total, now: "done".to_owned() });
        store.save_links(&measured)?;
    }
    links.extend(measured);
    Ok(links)
}

/// All pairs of `count` devices, in rounds in which each is in one pair at most: a round robin,
/// where the first stays and the others go around.
fn rounds(count: usize) -> Vec<Vec<(usize, usize)>> {
    let seats = count.next_multiple_of(2);
    let at = |round: usize, seat: usize| match seat {
        0 => 0,
        _ => (seat - 1 + round) % (seats - 1) + 1,
    };
    let pairs = |round| {
        let pair = |seat| {
            let (a, b): (usize, usize) = (at(round, seat), at(round, seats - 1 - seat));
            (a.min(b), a.max(b))
        };
        // With an odd number one seat is empty, and who meets it rests.
        (0..seats / 2).map(pair).filter(|&(_, b)| b < count).collect()
    };
    (1..seats).map(|round| pairs(round - 1)).collect()
}

/// Measures one way, idle and under compute.
async fn probe(way: Way) -> Result<LinkProfile, String> {
    let idle = ask(&way, false).await?;
    let busy = ask(&way, true).await?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let (from, to) = (way.from.device.name, way.to.device.name);
    let profile = LinkProfile {
        measured: now.map_or(0, |since| since.as_secs()),
        ..link_profile(from, to, way.link, &idle, &busy)
    };
    profile.check().map_err(|error| error.to_string())?;
    Ok(profile)
}

/// The profile that a link's measurements give, made at no time. They are a worker's word: it is to
/// be checked.
pub(crate) fn link_profile(
    from: DeviceName,
    to: DeviceName,
    link: LinkType,
    idle: &ProbeReply,
    busy: &ProbeReply,
) -> LinkProfile {
    let rates = Spread::of(&idle.rate);
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    // Noise may make kernels look faster while a link works; no link gives time back.
    let cost = |values: &[f64]| Spread::of(values).median.max(0.0);
    LinkProfile {
        version: PROFILE_VERSION,
        from,
        to,
        link,
        latency: least(&idle.round_trip_ns) / 2.0,
        rate: rates.median,
        busy_rate: Spread::of(&busy.rate).median,
        send_cost: cost(&busy.send_cost_ns),
        receive_cost: cost(&busy.receive_cost_ns),
        spread: (rates.high - rates.low) / rates.median,
        measured: 0,
    }
}

async fn ask(way: &Way, compute: bool) -> Result<ProbeReply, String> {
    let to = &way.to;
    let peer = Peer {
        name: to.device.name.to_string(),
        address: to.device.address.clone(),
        plain_port: to.description.plain_port,
    };
    let request =
        ProbeRequest { peer: Some(peer), link: way.link.to_string(), compute, bulk_ms: 0 };
    let mut connection = way.from.connection.clone();
    let asked = tokio::time::timeout(PROBE, connection.probe(request)).await;
    let reply = asked.map_err(|_| format!("no answer within {PROBE:?}"))?;
    reply.map(tonic::Response::into_inner).map_err(|status| from_status(&status).to_string())
}

#[cfg(test)]
mod tests {
    use super::rounds;

    #[test]
    fn every_pair_meets_once_and_nobody_is_in_two_at_once() {
        for count in 0..=9 {
            let rounds = rounds(count);
            let mut all: Vec<_> = rounds.iter().flatten().copied().collect();
            for round in &rounds {
                let mut busy: Vec<_> = round.iter().flat_map(|&(a, b)| [a, b]).collect();
                busy.sort_unstable();
                assert!(busy.is_sorted_by(|a, b| a < b), "{count}: {round:?}");
            }
            all.sort_unstable();
            let wanted: Vec<_> =
                (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))).collect();
            assert_eq!(all, wanted, "{count}");
        }
    }
}
