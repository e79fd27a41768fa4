//! Forms the links of an epoch: dials the devices that this one sends to, welcomes those that it
//! receives from.

use super::{
    arrival::{Expected, Ring},
    dial::{Dial, PeerAddress},
    error::RingError,
    handshake::Handshake,
    stream::Stream,
};
use galaxy_common::{DeviceName, Epoch, LinkType, Plan, Rank};
use galaxy_engine::link::Links;
use galaxy_proto::identity::Identity;
use std::{collections::BTreeMap, io, sync::Arc, time::Duration};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

/// How long it may take to form all links of an epoch. The coordinator places all devices at once;
/// those that answer late have this long.
const FORM_DEADLINE: Duration = Duration::from_secs(15);

/// The links that a device needs.
pub struct Formation {
    /// The epoch of the links.
    pub epoch: Epoch,
    /// The rank of this device.
    pub rank: Rank,
    /// The digest of the plan.
    pub digest: [u8; 32],
    /// The plan of the epoch.
    pub plan: Arc<Plan>,
    /// Where each rank is reached.
    pub peers: Vec<PeerAddress>,
    /// The transport of the links.
    pub link: LinkType,
    /// All pairs (from, to) of ranks between which the plan has a link.
    pub links: Vec<(Rank, Rank)>,
}

impl Ring {
    /// Forms all links of an epoch. Devices that wait for an earlier epoch are sent away.
    ///
    /// # Errors
    /// When a peer cannot be reached, refuses, or does not come in time.
    ///
    /// # Cancel safety
    /// Dropping it closes what was formed.
    pub async fn form(&self, identity: &Identity, wanted: Formation) -> Result<Links, RingError> {
        let deadline = Instant::now() + FORM_DEADLINE;
        let name = |rank: Rank| wanted.plan.ring[rank.index()].name.clone();
        let mut awaited: Vec<(Rank, DeviceName)> = Vec::new();
        let mut dials = JoinSet::new();
        // Links over connections that their peers make.
        let mut later = BTreeMap::new();
        let begin =
            |to: Rank, dial: Dial| async move { dial.until(deadline).await.map(|link| (to, link)) };
        for &(from, to) in &wanted.links {
            if to == wanted.rank {
                awaited.push((from, name(from)));
            } else if from == wanted.rank {
                let handshake =
                    Handshake { epoch: wanted.epoch, from, plan: wanted.digest, name: name(from) };
                let dial = Dial {
                    handshake: handshake.encode(),
                    to: name(to),
                    at: wanted.peers[to.index()].clone(),
                    link: wanted.link,
                    over: None,
                    identity: identity.clone(),
                    ring: self.clone(),
                };
                // One connection for each pair, and the lower rank makes it.
                let theirs = to < from && wanted.links.contains(&(to, from));
                match wanted.link {
                    LinkType::Quic if theirs => drop(later.insert(to, dial)),
                    _ => drop(dials.spawn(begin(to, dial))),
                }
            }
        }
        let (arrived, mut arrivals) = mpsc::channel(awaited.len().max(1));
        self.expected.send_if_modified(|expected| {
            // A placement that was overtaken or cancelled must not take the place of the current
            // one.
            let over = wanted.epoch < expected.epoch
                || (wanted.epoch == expected.epoch && expected.closed);
            if !over {
                *expected = Expected {
                    epoch: wanted.epoch,
                    plan: wanted.digest,
                    from: awaited.clone(),
                    link: wanted.link,
                    closed: false,
                    arrived,
                };
            }
            !over
        });

        let (mut to, mut from) = (Vec::new(), Vec::new());
        let mut returns = JoinSet::new();
        while !(awaited.is_empty() && dials.is_empty()) {
            tokio::select! {
                Some(dialled) = dials.join_next() => match dialled {
                    Ok(link) => {
                        let (rank, link) = link?;
                        // The peer's link to this device comes over the same connection.
                        if let Stream::Quic(pipe) = &link
                            && awaited.iter().any(|(awaited, _)| *awaited == rank && rank > wanted.rank)
                        {
                            returns.spawn(self.clone().arrive_again(pipe.connection().clone()));
                        }
                        to.push((rank, link));
                    }
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
                Some(arrival) = arrivals.recv() => {
                    if let Some(at) = awaited.iter().position(|(rank, _)| *rank == arrival.from) {
                        let (rank, peer) = awaited.swap_remove(at);
                        let link = arrival.stream.welcome().await;
                        let link = link.map_err(|source| RingError::Io { peer, source })?;
                        if let (Stream::Quic(pipe), Some(mut dial)) = (&link, later.remove(&rank)) {
                            dial.over = Some(pipe.connection().clone());
                            dials.spawn(begin(rank, dial));
                        }
                        from.push((rank, link));
                    }
                }
                () = tokio::time::sleep_until(deadline), if !awaited.is_empty() => {
                    let (_, peer) = awaited.swap_remove(0);
                    return Err(RingError::Absent { peer, after: FORM_DEADLINE });
                }
            }
        }
        let left = to.iter().chain(&from).filter_map(|(_, stream)| stream.time_left()).min();
        self.links_end(wanted.epoch, left.and_then(|left| Instant::now().checked_add(left)));
        gather(to, from).map_err(|(rank, source)| RingError::Io { peer: name(rank), source })
    }

    /// Sends away devices that come for `epoch` or an earlier one.
    pub fn close(&self, epoch: Epoch) {
        self.expected.send_if_modified(|expected| {
            let mine = expected.epoch <= epoch;
            if mine {
                expected.epoch = epoch;
                expected.from.clear();
                expected.closed = true;
            }
            mine
        });
    }
}

fn gather(to: Vec<(Rank, Stream)>, from: Vec<(Rank, Stream)>) -> Result<Links, (Rank, io::Error)> {
    let mut links = Links::default();
    for (rank, stream) in to {
        links.closers.push(stream.closer().map_err(|error| (rank, error))?);
        links.senders.push((rank, stream.sender()));
    }
    for (rank, stream) in from {
        links.closers.push(stream.closer().map_err(|error| (rank, error))?);
        links.receivers.push((rank, stream.receiver()));
    }
    Ok(links)
}
