//! Measures the links between workers: in rounds, and some of them once more alone.
//!
//! In a round each device is in one probe at most, and the pairs of all devices are measured at the
//! same time: that takes one round for what else would take one probe for each pair, and says what a
//! link carries when others work, too, as in a ring. Links that share a medium (a radio channel) are
//! slower so than alone. So a few are measured again when nothing else is, and where that makes a
//! difference, more of them.

use super::{CollectError, Listener, Progress, Store, Wanted, reached::Reached};
use galaxy_common::{DeviceName, LinkProfile, LinkType, PROFILE_VERSION, Spread};
use galaxy_proto::{
    fault::from_status,
    v1::{Peer, ProbeReply, ProbeRequest},
};
use std::{
    collections::HashSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::task::JoinSet;

/// The limit of one probe: the worker ends it by itself well before.
const PROBE: Duration = Duration::from_secs(20);
/// How many links of a type are measured alone, too, to see whether they share a medium.
const SAMPLE: usize = 3;
/// The most links of a type that are measured alone if they share a medium: those from each device to the next first.
const MOST_ALONE: usize = 32;

/// One direction of one pair, over one type of link.
#[derive(Clone)]
struct Direction {
    from: Reached,
    to: Reached,
    link: LinkType,
}

impl Direction {
    fn name(&self) -> String {
        format!("{} -> {}, {}", self.from.device.name, self.to.device.name, self.link)
    }

    fn is_of(&self, profile: &LinkProfile) -> bool {
        (&profile.from, &profile.to, profile.link)
            == (&self.from.device.name, &self.to.device.name, self.link)
    }
}

/// Profiles of all links: from the store where it has them, else measured, and then stored.
pub(super) async fn links(
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
    let mut links = Vec::new();
    let all = rounds(reached.len()).into_iter().flat_map(|pairs| {
        wanted.links.iter().flat_map(move |&link| {
            let way = |&(a, b): &(usize, usize)| {
                let (from, to) = (reached[a].clone(), reached[b].clone());
                Direction { from, to, link }
            };
            let back: Vec<_> = pairs.iter().map(|&(a, b)| (b, a)).collect();
            [pairs.iter().map(way).collect(), back.iter().map(way).collect::<Vec<_>>()]
        })
    });
    let rounds: Vec<Vec<Direction>> = all
        .map(|round| {
            let mut missing = Vec::new();
            for way in round {
                match stored.iter().find(|profile| way.is_of(profile)) {
                    Some(link) => links.push(link.clone()),
                    None => missing.push(way),
                }
            }
            missing
        })
        .collect();
    let mut ways: Vec<Direction> = rounds.iter().flatten().cloned().collect();
    // A device that has not answered once is not asked again: others wait for the end of this.
    let mut silent = HashSet::new();
    let mut measured = in_rounds(rounds, &mut silent, progress).await;
    // From each device to its next before others, so that a few have every device in them; of these
    // the slowest first: those that share a medium are among them.
    let at = |worker: &Reached| {
        reached.iter().position(|r| r.device.name == worker.device.name).unwrap_or(0)
    };
    let ahead = |way: &Direction| (at(&way.to) + reached.len() - at(&way.from)) % reached.len();
    let rate = |way: &Direction| measured.iter().find(|m| way.is_of(m)).map_or(0.0, |m| m.rate);
    ways.sort_by(|a, b| ahead(a).cmp(&ahead(b)).then(rate(a).total_cmp(&rate(b))));
    alone(&ways, &wanted.links, &mut measured, &mut silent, progress).await;
    if !measured.is_empty() {
        store.save_links(&measured)?;
    }
    links.extend(measured);
    Ok(links)
}

/// Measures all ways of a round at the same time, one round after another.
async fn in_rounds(
    rounds: Vec<Vec<Direction>>,
    silent: &mut HashSet<DeviceName>,
    progress: Listener<'_>,
) -> Vec<LinkProfile> {
    let total = u32::try_from(rounds.iter().map(Vec::len).sum::<usize>()).unwrap_or(u32::MAX);
    let (mut done, mut measured) = (0, Vec::new());
    for round in rounds {
        let mut probes = JoinSet::new();
        let beside = u32::try_from(round.len().saturating_sub(1)).unwrap_or(u32::MAX);
        for way in round {
            let now = way.name();
            if silent.contains(&way.from.device.name) {
                done += 1;
                progress(Progress::Note(format!("no profile of the link {now}: not asked again")));
                continue;
            }
            progress(Progress::Links { done, total, now });
            probes.spawn(async move {
                let profile = probe(&way, beside).await;
                (way, profile)
            });
        }
        while let Some(finished) = probes.join_next().await {
            done += 1;
            match finished {
                Ok((_, Ok(link))) => measured.push(link),
                Ok((way, Err(why))) => {
                    let what = way.name();
                    progress(Progress::Note(format!("no profile of the link {what}: {why}")));
                    if matches!(why, Unprobed::Silent) {
                        silent.insert(way.from.device.name);
                    }
                }
                Err(error) => progress(Progress::Note(format!("a probe broke off: {error}"))),
            }
        }
    }
    if total > 0 {
        progress(Progress::Links { done, total, now: "done".to_owned() });
    }
    measured
}

/// Measures links of each type that had others beside them when nothing else is measured: a sample,
/// and more where one of these shares a medium.
async fn alone(
    ways: &[Direction],
    types: &[LinkType],
    measured: &mut [LinkProfile],
    silent: &mut HashSet<DeviceName>,
    progress: Listener<'_>,
) {
    for &link in types {
        let had_others = |way: &&Direction| measured.iter().any(|m| m.beside > 0 && way.is_of(m));
        let ways: Vec<&Direction> =
            ways.iter().filter(|w| w.link == link).filter(had_others).collect();
        let mut total = ways.len().min(SAMPLE);
        let mut done = 0;
        while done < total {
            let way = ways[done];
            if silent.contains(&way.from.device.name) {
                done += 1;
                continue;
            }
            let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            let now = format!("{}, alone", way.name());
            progress(Progress::Links { done: count(done), total: count(total), now });
            if let Some(profile) = measured.iter_mut().find(|profile| way.is_of(profile)) {
                match ask(way, false).await {
                    Ok(reply) => profile.alone = alone_rate(profile.rate, &reply),
                    // It was measured beside others: what it does alone stays unknown.
                    Err(why) => {
                        let what = way.name();
                        progress(Progress::Note(format!("no rate of {what} alone: {why}")));
                        if matches!(why, Unprobed::Silent) {
                            silent.insert(way.from.device.name.clone());
                        }
                    }
                }
                if profile.shares_medium() {
                    total = ways.len().min(MOST_ALONE);
                }
            }
            done += 1;
        }
    }
}

/// The rate of a link that was measured alone; 0 if the measurement is not sound.
fn alone_rate(beside_others: f64, reply: &ProbeReply) -> f64 {
    let median = Spread::of(&reply.rate).median;
    // Noise may make a link look slower alone; none is.
    if median.is_finite() { median.max(beside_others) } else { 0.0 }
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

/// Why there is no profile of a link.
#[derive(Debug, thiserror::Error)]
enum Unprobed {
    #[error("no answer within {PROBE:?}")]
    Silent,
    #[error("{0}")]
    Said(String),
}

/// Measures one way, idle and under compute, while `beside` others are measured.
async fn probe(way: &Direction, beside: u32) -> Result<LinkProfile, Unprobed> {
    let reply = ask(way, true).await?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let (from, to) = (way.from.device.name.clone(), way.to.device.name.clone());
    let link = link_profile(from, to, way.link, &reply);
    let profile = LinkProfile {
        measured: now.map_or(0, |since| since.as_secs()),
        beside,
        alone: if beside == 0 { link.rate } else { 0.0 },
        ..link
    };
    profile.check().map_err(|error| Unprobed::Said(error.to_string()))?;
    Ok(profile)
}

/// The profile that a link's measurements give, without a time and beside no other link. A worker
/// may report anything: the profile is to be checked.
pub(crate) fn link_profile(
    from: DeviceName,
    to: DeviceName,
    link: LinkType,
    reply: &ProbeReply,
) -> LinkProfile {
    let rates = Spread::of(&reply.rate);
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    // Noise may make kernels look faster while a link works; no link gives time back.
    let cost = |values: &[f64]| Spread::of(values).median.max(0.0);
    LinkProfile {
        version: PROFILE_VERSION,
        from,
        to,
        link,
        latency: least(&reply.round_trip_ns) / 2.0,
        rate: rates.median,
        busy_rate: Spread::of(&reply.busy_rate).median,
        beside: 0,
        alone: 0.0,
        send_cost: cost(&reply.send_cost_ns),
        receive_cost: cost(&reply.receive_cost_ns),
        spread: (rates.high - rates.low) / rates.median,
        measured: 0,
    }
}

async fn ask(way: &Direction, compute: bool) -> Result<ProbeReply, Unprobed> {
    let to = &way.to;
    let peer = Peer {
        name: to.device.name.to_string(),
        address: to.device.address_for(&way.from.device).to_owned(),
        plain_port: to.description.plain_port,
    };
    let request =
        ProbeRequest { peer: Some(peer), link: way.link.to_string(), compute, bulk_ms: 0 };
    let mut connection = way.from.connection.clone();
    let asked = tokio::time::timeout(PROBE, connection.probe(request)).await;
    let reply = asked.map_err(|_| Unprobed::Silent)?;
    let said = |status| Unprobed::Said(from_status(&status).to_string());
    reply.map(tonic::Response::into_inner).map_err(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_link_is_slower_alone_than_beside_others() {
        let reply = |rate: &[f64]| ProbeReply { rate: rate.to_vec(), ..Default::default() };
        assert_eq!(alone_rate(5e6, &reply(&[9e6, 1e7, 3e7])), 1e7);
        assert_eq!(alone_rate(5e6, &reply(&[4e6])), 5e6, "noise");
        assert_eq!(alone_rate(5e6, &reply(&[])), 0.0, "not known");
        assert_eq!(alone_rate(5e6, &reply(&[f64::NAN])), 0.0);
    }

    #[test]
    fn probe_rounds_have_each_pair_once_and_each_device_at_most_once() {
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
