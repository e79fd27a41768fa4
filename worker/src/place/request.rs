//! The request of a placement, checked.

use crate::{content::links::Neighbour, error::WorkerError, ring::PeerAddress};
use galaxy_common::{Bytes, DeviceName, DevicePlan, Epoch, LinkType, Plan, Rank};
use galaxy_proto::v1;
use std::sync::Arc;

/// The most bytes of a plan: one for the largest cluster has some ten KB.
const MAX_PLAN_BYTES: usize = 4 << 20;
/// The most devices that are asked for pieces of the model, those that follow in the ring first.
const NEIGHBOURS: usize = 8;

/// A request that was checked as far as possible without files.
pub(crate) struct Request {
    pub(super) epoch: Epoch,
    pub(crate) rank: Rank,
    pub(crate) plan: Arc<Plan>,
    pub(super) digest: [u8; 32],
    pub(super) peers: Vec<PeerAddress>,
    pub(super) limit: Option<Bytes>,
}

impl Request {
    /// Reads a request, on the device of this name, which may take plain links or not.
    pub(crate) fn read(
        own: &DeviceName,
        takes_plain: bool,
        request: v1::PlaceRequest,
    ) -> Result<Self, WorkerError> {
        let v1::PlaceRequest { epoch, plan: bytes, rank, peers, memory_bytes } = request;
        let unreadable = WorkerError::PlanBytes { bytes: bytes.len() };
        if bytes.len() > MAX_PLAN_BYTES {
            return Err(unreadable);
        }
        let plan: Plan = postcard::from_bytes(&bytes).map_err(|_| unreadable)?;
        let rank = Rank(u16::try_from(rank).unwrap_or(u16::MAX));
        let device = plan.ring.get(rank.index());
        if device.is_none_or(|device| device.name != *own) {
            let found = device.map_or("nobody".to_owned(), |device| device.name.to_string());
            return Err(WorkerError::NotMine { rank, found, own: own.clone() });
        }
        let same = peers.len() == plan.ring.len()
            && peers.iter().zip(&plan.ring).all(|(peer, device)| peer.name == device.name.as_str());
        if !same {
            return Err(WorkerError::Peers);
        }
        if plan.link == LinkType::Plain && !takes_plain {
            return Err(WorkerError::NoPlain);
        }
        let address = |peer: v1::Peer| {
            let plain_port = u16::try_from(peer.plain_port).unwrap_or(0);
            PeerAddress { address: peer.address, plain_port }
        };
        Ok(Self {
            epoch: Epoch(epoch),
            rank,
            digest: *blake3::hash(&bytes).as_bytes(),
            plan: Arc::new(plan),
            peers: peers.into_iter().map(address).collect(),
            limit: (memory_bytes > 0).then_some(Bytes(memory_bytes)),
        })
    }

    pub(super) fn device(&self) -> &DevicePlan {
        &self.plan.ring[self.rank.index()]
    }

    /// The other devices of the ring, from the next one on.
    pub(super) fn neighbours(&self) -> Vec<Neighbour> {
        let all = self.plan.ring.iter().zip(&self.peers).map(|(device, peer)| Neighbour {
            name: device.name.clone(),
            address: peer.address.clone(),
        });
        let mut all: Vec<_> = all.collect();
        all.rotate_left(self.rank.index());
        all.into_iter().skip(1).take(NEIGHBOURS).collect()
    }
}
