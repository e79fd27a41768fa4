//! Authorization: which roles may use which protocols of a server, with how many connections at a time.

use super::places::AdmissionLimits;
use crate::{ALPN_CONTROL, ALPN_RING, identity::Role};

/// A protocol that a server speaks with a role.
#[derive(Debug)]
pub struct Rule {
    /// The ALPN of the protocol.
    pub alpn: &'static [u8],
    /// The role of the peer.
    pub role: Role,
    /// Places of that role, which no other role takes.
    pub room: AdmissionLimits,
}

impl Rule {
    /// Whether it is about this protocol and this role.
    pub fn is(&self, alpn: &[u8], role: Role) -> bool {
        self.alpn == alpn && self.role == role
    }
}

/// A coordinator has a handful of connections; some more of one that was cut off may not have ended yet.
const COORDINATORS: AdmissionLimits = AdmissionLimits { most: 64, each: 48 };
/// A device asks each other one for parts of a model over one connection.
const DEVICES: AdmissionLimits = AdmissionLimits { most: 160, each: 8 };
/// Links that are being formed: some from each device of the largest plan.
const LINKS: AdmissionLimits = AdmissionLimits { most: 256, each: 16 };
/// Programs that send requests.
const CLIENTS: AdmissionLimits = AdmissionLimits { most: 256, each: 128 };
/// People who run the cluster.
const ADMINS: AdmissionLimits = AdmissionLimits { most: 16, each: 8 };

const OF_A_DEVICE: &[Rule] = &[
    Rule { alpn: ALPN_CONTROL, role: Role::Coordinator, room: COORDINATORS },
    Rule { alpn: ALPN_CONTROL, role: Role::Device, room: DEVICES },
    Rule { alpn: ALPN_RING, role: Role::Device, room: LINKS },
];
const OF_A_COORDINATOR: &[Rule] = &[
    Rule { alpn: ALPN_CONTROL, role: Role::Client, room: CLIENTS },
    Rule { alpn: ALPN_CONTROL, role: Role::Admin, room: ADMINS },
];

/// The rules of a server of this role: none if it is no server's.
pub fn rules(server: Role) -> &'static [Rule] {
    match server {
        Role::Device => OF_A_DEVICE,
        Role::Coordinator => OF_A_COORDINATOR,
        Role::Client | Role::Admin => &[],
    }
}
