//! Messages, decoded with bounds: `proto/galaxy/v1/join.proto` to types that cannot be wrong.

use super::{
    facts::{Attempt, Facts},
    line::InvitationId,
    proof::Proof,
};
use crate::{
    identity::{Moment, Role},
    v1::{self, join_message::Message as Wire},
};
use galaxy_common::DeviceName;
use prost::Message as _;

/// Bytes that a message may have: a certificate has 600, and a device eight addresses.
pub const MAX_BYTES: usize = 8 << 10;
/// Bytes of a text that a person reads.
const MAX_TEXT: usize = 1024;
/// Bytes of a certificate.
const MAX_CERTIFICATE: usize = 4 << 10;

/// Bytes that are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Too many.
    #[error("a message of more than {MAX_BYTES} bytes")]
    Long,
    /// Not in the wire format, or none of the known messages.
    #[error("it does not speak Galaxy's join protocol")]
    Wire,
    /// A field that has not the bytes that it must have, or more than it may.
    #[error("a message with a {field} of a wrong size")]
    Size {
        /// Which.
        field: &'static str,
    },
    /// A name that is none.
    #[error("that is no name: use lower-case letters, digits and hyphens")]
    Name,
    /// A role that is none.
    #[error("a role that is not known")]
    Role,
    /// An address that is none.
    #[error("an address that is not known")]
    Address,
}

/// What a coordinator says first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Greeting {
    /// The protocol that it speaks, in all of Galaxy.
    pub protocol: u32,
    /// Its version, for people.
    pub version: String,
    /// Its clock.
    pub time: Moment,
}

/// What who joins asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// By which invitation.
    pub invitation: InvitationId,
    /// A name, if the invitation names nobody; may be empty.
    pub wish: String,
    /// The request for a certificate.
    pub request: Vec<u8>,
    /// That it knows the secret.
    pub proof: Proof,
}

/// What who joins is given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Its name,
    pub name: DeviceName,
    /// its role,
    pub role: Role,
    /// and the certificate that says so.
    pub certificate: Vec<u8>,
    /// That the coordinator knows the secret.
    pub proof: Proof,
}

/// Why somebody is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// A stable word.
    pub code: String,
    /// What is wrong, and what to do.
    pub message: String,
    /// After so many seconds it may be otherwise; 0: asking again does not help.
    pub wait_s: u32,
}

/// All messages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// The coordinator's first word.
    Greeting(Greeting),
    /// Who joins asks.
    Ask(Ask),
    /// And is given an identity.
    Grant(Grant),
    /// Or is refused.
    Refusal(Refusal),
    /// A device says where it is, and what it has.
    Announce(Facts),
    /// And is told at which addresses it was reached.
    Reached(Vec<Attempt>),
}

impl Message {
    /// Reads a message.
    ///
    /// # Errors
    /// When the bytes are none, or it is out of bounds. Never panics, and takes a few times the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > MAX_BYTES {
            return Err(Malformed::Long);
        }
        let message = v1::JoinMessage::decode(bytes).map_err(|_| Malformed::Wire)?;
        Ok(match message.message.ok_or(Malformed::Wire)? {
            Wire::Greeting(v1::JoinGreeting { protocol, version, time }) => {
                let version = text("version", version)?;
                Self::Greeting(Greeting { protocol, version, time: Moment(time) })
            }
            Wire::Ask(v1::JoinAsk { invitation, wish, request, proof }) => Self::Ask(Ask {
                invitation: InvitationId(sized("invitation", &invitation)?),
                wish: text("wish", wish)?,
                request,
                proof: Proof(sized("proof", &proof)?),
            }),
            Wire::Grant(v1::JoinGrant { name, role, certificate, proof }) => {
                if certificate.is_empty() || certificate.len() > MAX_CERTIFICATE {
                    return Err(Malformed::Size { field: "certificate" });
                }
                Self::Grant(Grant {
                    name: DeviceName::new(name).map_err(|_| Malformed::Name)?,
                    role: role.parse().map_err(|_| Malformed::Role)?,
                    certificate,
                    proof: Proof(sized("proof", &proof)?),
                })
            }
            Wire::Refusal(v1::JoinRefusal { code, message, wait_s }) => Self::Refusal(Refusal {
                code: text("code", code)?,
                message: text("message", message)?,
                wait_s,
            }),
            Wire::Announce(facts) => Self::Announce(facts.try_into()?),
            Wire::Reached(v1::JoinReached { attempts }) => {
                let attempts = attempts.into_iter().map(TryInto::try_into);
                Self::Reached(attempts.collect::<Result<_, _>>()?)
            }
        })
    }

    /// Writes a message.
    pub fn encode(&self) -> Vec<u8> {
        let message = match self.clone() {
            Self::Greeting(Greeting { protocol, version, time }) => {
                Wire::Greeting(v1::JoinGreeting { protocol, version, time: time.0 })
            }
            Self::Ask(Ask { invitation, wish, request, proof }) => Wire::Ask(v1::JoinAsk {
                invitation: invitation.0.to_vec(),
                wish,
                request,
                proof: proof.0.to_vec(),
            }),
            Self::Grant(Grant { name, role, certificate, proof }) => Wire::Grant(v1::JoinGrant {
                name: name.to_string(),
                role: role.to_string(),
                certificate,
                proof: proof.0.to_vec(),
            }),
            Self::Refusal(Refusal { code, message, wait_s }) => {
                Wire::Refusal(v1::JoinRefusal { code, message: cut(message), wait_s })
            }
            Self::Announce(facts) => Wire::Announce(facts.into()),
            Self::Reached(attempts) => {
                let attempts = attempts.into_iter().map(|attempt| v1::JoinAttempt {
                    address: attempt.address.to_string(),
                    error: cut(attempt.error.unwrap_or_default()),
                });
                Wire::Reached(v1::JoinReached { attempts: attempts.collect() })
            }
        };
        v1::JoinMessage { message: Some(message) }.encode_to_vec()
    }
}

fn sized<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], Malformed> {
    bytes.try_into().map_err(|_| Malformed::Size { field })
}

fn text(field: &'static str, text: String) -> Result<String, Malformed> {
    if text.len() <= MAX_TEXT { Ok(text) } else { Err(Malformed::Size { field }) }
}

/// At most as much as the other side takes.
fn cut(mut text: String) -> String {
    let end = (0..=MAX_TEXT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    if text.len() > MAX_TEXT {
        text.truncate(end);
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    pub(crate) fn examples() -> Vec<Message> {
        let name = DeviceName::new("pi-1").unwrap();
        let proof = Proof([9; 32]);
        let attempt = |address: &str, error: Option<&str>| Attempt {
            address: address.parse().unwrap(),
            error: error.map(str::to_owned),
        };
        vec![
            Message::Greeting(Greeting { protocol: 9, version: "1.2.3".into(), time: Moment(7) }),
            Message::Ask(Ask {
                invitation: InvitationId([1; 8]),
                wish: "pi-1".into(),
                request: vec![1, 2, 3],
                proof,
            }),
            Message::Grant(Grant { name, role: Role::Device, certificate: vec![4; 600], proof }),
            Message::Refusal(Refusal { code: "used".into(), message: "used".into(), wait_s: 3 }),
            Message::Announce(Facts {
                port: 7100.try_into().unwrap(),
                addresses: vec!["192.168.1.20".parse().unwrap(), "fd00::20".parse().unwrap()],
                memory: galaxy_common::Bytes(1 << 30),
                threads: 4,
            }),
            Message::Reached(vec![
                attempt("192.168.1.20:7100", None),
                attempt("[fd00::20]:7100", Some("nobody listens")),
            ]),
        ]
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for message in examples() {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Ok(message.clone()));
            for end in 0..bytes.len() {
                // Cut off, or another message that is in order: no panic.
                let _ = Message::decode(&bytes[..end]);
            }
        }
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        let decode =
            |message| Message::decode(&v1::JoinMessage { message: Some(message) }.encode_to_vec());
        let ask =
            v1::JoinAsk { invitation: vec![1; 7], proof: vec![0; 32], ..v1::JoinAsk::default() };
        assert_eq!(decode(Wire::Ask(ask)), Err(Malformed::Size { field: "invitation" }));
        let grant = v1::JoinGrant {
            name: "pi".into(),
            role: "king".into(),
            certificate: vec![1],
            proof: vec![0; 32],
        };
        assert_eq!(decode(Wire::Grant(grant)), Err(Malformed::Role));
        let refusal = v1::JoinRefusal { message: "x".repeat(2000), ..v1::JoinRefusal::default() };
        assert_eq!(decode(Wire::Refusal(refusal)), Err(Malformed::Size { field: "message" }));
        let announce = v1::JoinAnnounce {
            port: 7100,
            addresses: vec!["::1".into(); 9],
            memory_bytes: 1,
            threads: 1,
        };
        assert_eq!(decode(Wire::Announce(announce)), Err(Malformed::Size { field: "addresses" }));
        assert_eq!(Message::decode(&vec![0; MAX_BYTES + 1]), Err(Malformed::Long));
        assert_eq!(Message::decode(&[]), Err(Malformed::Wire));
        let long = Refusal { code: "x".into(), message: "\u{e4}".repeat(2000), wait_s: 0 };
        assert!(Message::decode(&Message::Refusal(long).encode()).is_ok(), "ours are cut");
    }
}
