//! Messages, decoded with bounds: `proto/galaxy/v1/join.proto` to types that cannot be wrong.

use super::{
    facts::{Attempt, Facts},
    line::InvitationId,
    malformed::{MAX_BYTES, Malformed},
    proof::Proof,
};
use crate::{
    identity::{Moment, Role},
    v1::{self, join_message::Message as Wire},
};
use galaxy_common::DeviceName;
use prost::Message as _;

/// The most bytes of a text for people.
const MAX_TEXT: usize = 1024;
/// The most bytes of a certificate.
const MAX_CERTIFICATE: usize = 4 << 10;

/// The coordinator's first message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Greeting {
    /// The protocol that the coordinator speaks, in all of Galaxy.
    pub protocol: u32,
    /// The coordinator's version, for people.
    pub version: String,
    /// The time by the coordinator's clock.
    pub time: Moment,
}

/// What a machine that joins asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JoinRequest {
    /// The id of the invitation.
    pub invitation: InvitationId,
    /// The name that it asks for, if the invitation names nobody; may be empty.
    pub wish: String,
    /// The request for a certificate, in DER.
    pub request: Vec<u8>,
    /// The proof that it knows the secret.
    pub proof: Proof,
}

/// What a machine that joins is granted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The name that the machine gets.
    pub name: DeviceName,
    /// The role that the machine gets.
    pub role: Role,
    /// The certificate with this name and role, in DER.
    pub certificate: Vec<u8>,
    /// The proof that the coordinator knows the secret.
    pub proof: Proof,
}

/// Why the coordinator refuses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// A stable name of the reason, in snake case.
    pub code: String,
    /// What is wrong, and what to do.
    pub message: String,
    /// The seconds after which asking again may help; 0: it does not help.
    pub wait_s: u32,
}

/// A message of either side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// The first message, from the coordinator.
    Greeting(Greeting),
    /// The request of a machine that joins.
    Ask(JoinRequest),
    /// The coordinator's answer to [`Message::Ask`]: an identity.
    Grant(Grant),
    /// The coordinator's answer to [`Message::Ask`] or [`Message::Announce`]: a refusal.
    Refusal(Refusal),
    /// A device announces its addresses, and what it has.
    Announce(Facts),
    /// The coordinator's answer to [`Message::Announce`]: at which addresses it reached the device.
    Reached(Vec<Attempt>),
}

impl Message {
    /// Reads a message.
    ///
    /// # Errors
    /// When the bytes are no message, or one that is out of bounds. Never panics, and takes a few times the bytes.
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
            Wire::Ask(v1::JoinAsk { invitation, wish, request, proof }) => Self::Ask(JoinRequest {
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
            Self::Ask(JoinRequest { invitation, wish, request, proof }) => Wire::Ask(v1::JoinAsk {
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

/// Cuts a text to as many bytes as the other side takes.
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
            Message::Ask(JoinRequest {
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
    fn join_messages_survive_the_wire() {
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
    fn join_messages_with_fields_out_of_bounds_are_rejected() {
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
