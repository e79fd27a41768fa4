//! The handshake of two devices before a link carries frames. Pure functions over bytes.
//!
//! The dialler sends a handshake, the other side answers with a welcome. All integers are little endian.
//!
//! ```text
//! handshake:   0  4  magic "GLXH"      welcome: 0  4  magic "GLXW"
//!          4  1  version                    4  1  answer
//!          5  1  length of the name         5  3  zero
//!          6  2  rank of the dialler
//!          8  8  epoch
//!          16 32 digest of the plan
//!          48 48 name of the dialler, padded with zeros
//! ```
//!
//! A dialler that wants to measure the link, and not to take part in a ring, uses the magic "GLXP".
//! Rank, epoch and plan are then zero.

use galaxy_common::{DeviceName, Epoch, Rank, ids::MAX_NAME_BYTES};

/// Bytes of a handshake.
pub const HANDSHAKE_BYTES: usize = 48 + MAX_NAME_BYTES;
/// Bytes of a welcome.
pub const WELCOME_BYTES: usize = 8;
const HANDSHAKE_MAGIC: [u8; 4] = *b"GLXH";
const PROBE_MAGIC: [u8; 4] = *b"GLXP";
const WELCOME_MAGIC: [u8; 4] = *b"GLXW";
const VERSION: u8 = 1;

/// The handshake of a device that dials for a ring.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handshake {
    /// The epoch for which the link is formed.
    pub epoch: Epoch,
    /// The dialler's rank in the plan.
    pub from: Rank,
    /// The digest of the plan: both ends must have the same.
    pub plan: [u8; 32],
    /// The dialler's name.
    pub name: DeviceName,
}

/// The handshake of a device that dials to measure the link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProbeHandshake {
    /// The dialler's name.
    pub name: DeviceName,
}

/// A handshake of either kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Greeting {
    /// The link is for a ring.
    Ring(Handshake),
    /// The link is for a measurement.
    Probe(ProbeHandshake),
}

impl Greeting {
    /// Decodes a handshake.
    ///
    /// # Errors
    /// When the bytes are no handshake. Never panics.
    pub fn decode(bytes: &[u8; HANDSHAKE_BYTES]) -> Result<Self, HandshakeError> {
        if bytes[0..4] != PROBE_MAGIC {
            return Handshake::decode(bytes).map(Self::Ring);
        }
        if bytes[4] != VERSION {
            return Err(HandshakeError::Version { version: bytes[4] });
        }
        Ok(Self::Probe(ProbeHandshake { name: name(bytes)? }))
    }
}

impl ProbeHandshake {
    /// Encodes the handshake.
    pub fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let ring =
            Handshake { epoch: Epoch(0), from: Rank(0), plan: [0; 32], name: self.name.clone() };
        let mut out = ring.encode();
        out[0..4].copy_from_slice(&PROBE_MAGIC);
        out
    }
}

/// The name of the dialler.
fn name(bytes: &[u8; HANDSHAKE_BYTES]) -> Result<DeviceName, HandshakeError> {
    bytes[48..]
        .get(..usize::from(bytes[5]))
        .and_then(|name| std::str::from_utf8(name).ok())
        .and_then(|name| DeviceName::new(name).ok())
        .ok_or(HandshakeError::Name)
}

/// The answer to a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandshakeReply {
    /// The link is formed.
    Welcome,
    /// The epoch is over.
    Stale,
    /// The certificate or the plan has another name for the dialler.
    WrongName,
    /// The other side was placed with another plan.
    OtherPlan,
    /// The other side holds a place in a plan, or measures already.
    Busy,
}

/// Why bytes are no handshake or no welcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The bytes do not begin as a handshake or welcome of Galaxy does.
    #[error("it does not speak Galaxy's ring protocol")]
    Magic,
    /// A version of the protocol that this build does not speak.
    #[error("it speaks version {version} of the ring protocol, and this build version {VERSION}")]
    Version {
        /// The version of the other side.
        version: u8,
    },
    /// A name that is not valid.
    #[error("it gives a name that is none")]
    Name,
    /// An answer that this build does not know.
    #[error("it answers {code}, which this build does not know")]
    Answer {
        /// The code of the answer.
        code: u8,
    },
}

impl Handshake {
    /// Encodes the handshake.
    pub fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let mut out = [0; HANDSHAKE_BYTES];
        let name = self.name.as_str().as_bytes();
        out[0..4].copy_from_slice(&HANDSHAKE_MAGIC);
        out[4] = VERSION;
        out[5] = name.len() as u8; // at most MAX_NAME_BYTES
        out[6..8].copy_from_slice(&self.from.0.to_le_bytes());
        out[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[16..48].copy_from_slice(&self.plan);
        out[48..48 + name.len()].copy_from_slice(name);
        out
    }

    /// Decodes the handshake of a ring.
    ///
    /// # Errors
    /// When the bytes are no handshake of a ring. Never panics.
    pub fn decode(bytes: &[u8; HANDSHAKE_BYTES]) -> Result<Self, HandshakeError> {
        if bytes[0..4] != HANDSHAKE_MAGIC {
            return Err(HandshakeError::Magic);
        }
        if bytes[4] != VERSION {
            return Err(HandshakeError::Version { version: bytes[4] });
        }
        let name = name(bytes)?;
        let mut epoch = [0; 8];
        epoch.copy_from_slice(&bytes[8..16]);
        let mut plan = [0; 32];
        plan.copy_from_slice(&bytes[16..48]);
        Ok(Self {
            epoch: Epoch(u64::from_le_bytes(epoch)),
            from: Rank(u16::from_le_bytes([bytes[6], bytes[7]])),
            plan,
            name,
        })
    }
}

impl HandshakeReply {
    /// Encodes the answer as a welcome.
    pub fn encode(self) -> [u8; WELCOME_BYTES] {
        let mut out = [0; WELCOME_BYTES];
        out[0..4].copy_from_slice(&WELCOME_MAGIC);
        out[4] = match self {
            Self::Welcome => 0,
            Self::Stale => 1,
            Self::WrongName => 2,
            Self::OtherPlan => 3,
            Self::Busy => 4,
        };
        out
    }

    /// Decodes a welcome.
    ///
    /// # Errors
    /// When the bytes are no welcome.
    pub fn decode(bytes: &[u8; WELCOME_BYTES]) -> Result<Self, HandshakeError> {
        if bytes[0..4] != WELCOME_MAGIC {
            return Err(HandshakeError::Magic);
        }
        match bytes[4] {
            0 => Ok(Self::Welcome),
            1 => Ok(Self::Stale),
            2 => Ok(Self::WrongName),
            3 => Ok(Self::OtherPlan),
            4 => Ok(Self::Busy),
            code => Err(HandshakeError::Answer { code }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ring_handshakes_and_answers_survive_the_wire() {
        let handshake = Handshake {
            epoch: Epoch(1 << 50),
            from: Rank(7),
            plan: [9; 32],
            name: DeviceName::new("x".repeat(MAX_NAME_BYTES)).unwrap(),
        };
        assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
        let probe = ProbeHandshake { name: DeviceName::new("b").unwrap() };
        assert_eq!(Greeting::decode(&probe.encode()), Ok(Greeting::Probe(probe)));
        use HandshakeReply::*;
        for answer in [Welcome, Stale, WrongName, OtherPlan, Busy] {
            assert_eq!(HandshakeReply::decode(&answer.encode()), Ok(answer));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_valid_handshake_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), HANDSHAKE_BYTES), ours: bool,
        ) {
            if ours {
                let magic: &[u8; 5] = if bytes[5] % 2 == 0 { b"GLXH\x01" } else { b"GLXP\x01" };
                bytes[..5].copy_from_slice(magic);
            }
            let bytes: [u8; HANDSHAKE_BYTES] = bytes.try_into().unwrap();
            match Greeting::decode(&bytes) {
                Ok(Greeting::Ring(handshake)) => {
                    prop_assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
                }
                Ok(Greeting::Probe(probe)) => {
                    let again = Greeting::decode(&probe.encode());
                    prop_assert_eq!(again, Ok(Greeting::Probe(probe)));
                }
                Err(_) => {}
            }
        }
    }
}
