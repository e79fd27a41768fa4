//! The side that joins, as a state machine: it reads no clock, and touches no socket and no file.

use super::{
    home::StoreError,
    line::JoinLine,
    message::{Greeting, JoinRequest, Message, Refusal},
    proof::{Binding, Proof},
    request::Request,
    vet::{VetError, Vetted},
    wire::WireError,
};
use crate::{
    PROTOCOL, VERSION,
    channel::ConnectError,
    identity::{Moment, Role, peer},
};
use galaxy_common::DeviceName;
use rustls::{pki_types::CertificateDer, server::ParsedCertificate};

/// The most seconds by which the clock of this machine may differ from the coordinator's: certificates are valid from
/// an hour before they are issued.
const SKEW_S: u64 = 30 * 60;

/// Why a machine does not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The coordinator cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Another server answers.
    #[error(transparent)]
    Vet(#[from] VetError),
    /// The connection fails, or what comes is no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The coordinator speaks another version of the protocol.
    #[error(
        "the coordinator speaks protocol {theirs} (version {version}), and this is protocol {PROTOCOL} (version {VERSION}): install the same version on both"
    )]
    Protocol {
        /// The coordinator's protocol.
        theirs: u32,
        /// The coordinator's version, for people.
        version: String,
    },
    /// The clocks differ: a board without one, most likely.
    #[error(
        "the clock of this machine says {ours}, and the coordinator's {theirs}: certificates would not be valid here. Set the clock, as by `sudo date -u -s @{}` or with NTP, and join again; the invitation still holds", theirs.0
    )]
    Clock {
        /// The time by the clock of this machine.
        ours: Moment,
        /// The time by the coordinator's clock.
        theirs: Moment,
    },
    /// The coordinator's own certificate is not valid now.
    #[error("the coordinator's certificate is not valid now, by its clock too: issue it a new one")]
    Validity,
    /// The coordinator refuses.
    #[error("the coordinator refuses: {}", .0.message)]
    Refused(Refusal),
    /// A message out of turn.
    #[error("the coordinator says what is not its turn to say")]
    Turn,
    /// The server does not know the secret of the invitation.
    #[error(
        "the server does not know the secret of the invitation, or the connection was tampered with: nothing was stored"
    )]
    Proof,
    /// The certificate is for another name, role or key.
    #[error("the coordinator issued a certificate that does not fit: nothing was stored")]
    Certificate,
    /// A key cannot be created.
    #[error("a key could not be made: {0}")]
    Key(#[from] rcgen::Error),
    /// The identity cannot be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What the machine that joins does next.
#[derive(Debug, PartialEq, Eq)]
pub enum JoinStep {
    /// Send this message.
    Send(Message),
    /// End: the identity was granted.
    Done(Granted),
}

/// The name, role and certificate that were granted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Granted {
    /// The name in the certificate.
    pub name: DeviceName,
    /// The role in the certificate.
    pub role: Role,
    /// The certificate, in DER.
    pub certificate: Vec<u8>,
}

/// The machine that joins, over one channel.
pub struct Guest<'a> {
    line: &'a JoinLine,
    wish: String,
    request: &'a Request,
    vetted: &'a Vetted,
    binding: Binding,
    asked: bool,
}

impl<'a> Guest<'a> {
    /// A machine that joins by `line`, over the channel with this exporter to the coordinator `vetted`, and asks for
    /// the name `wish`.
    pub fn new(
        line: &'a JoinLine,
        wish: Option<&DeviceName>,
        request: &'a Request,
        vetted: &'a Vetted,
        exporter: [u8; 32],
    ) -> Self {
        let binding = Binding { exporter, server: vetted.key.clone() };
        let wish = wish.map(ToString::to_string).unwrap_or_default();
        Self { line, wish, request, vetted, binding, asked: false }
    }

    /// Handles a message of the coordinator; `now` is the time by the clock of this machine.
    ///
    /// # Errors
    /// When this does not end in an identity.
    pub fn handle(&mut self, now: Moment, message: Message) -> Result<JoinStep, JoinError> {
        match (message, self.asked) {
            (Message::Greeting(greeting), false) => self.greeted(now, greeting).map(JoinStep::Send),
            (Message::Grant(grant), true) => {
                let key = self.request.key();
                let (secret, request) = (&self.line.secret, self.request.der());
                let proof =
                    Proof::of_host(secret, &self.binding, request, &key, &grant.certificate);
                if !proof.is(&grant.proof) {
                    return Err(JoinError::Proof);
                }
                let der = CertificateDer::from(grant.certificate.as_slice());
                let parsed =
                    ParsedCertificate::try_from(&der).map_err(|_| JoinError::Certificate)?;
                let named = peer(std::slice::from_ref(&der)).ok();
                let fits = named == Some((grant.name.clone(), grant.role))
                    && *parsed.subject_public_key_info() == key.info();
                if !fits {
                    return Err(JoinError::Certificate);
                }
                let (name, role, certificate) = (grant.name, grant.role, grant.certificate);
                Ok(JoinStep::Done(Granted { name, role, certificate }))
            }
            (Message::Refusal(refusal), _) => Err(JoinError::Refused(refusal)),
            _ => Err(JoinError::Turn),
        }
    }

    fn greeted(&mut self, now: Moment, greeting: Greeting) -> Result<Message, JoinError> {
        if greeting.protocol != PROTOCOL {
            let Greeting { protocol: theirs, version, .. } = greeting;
            return Err(JoinError::Protocol { theirs, version });
        }
        // Checked before the invitation is used: it would be used in vain.
        if now.0.abs_diff(greeting.time.0) > SKEW_S {
            return Err(JoinError::Clock { ours: now, theirs: greeting.time });
        }
        if self.vetted.valid.is_some() {
            return Err(JoinError::Validity);
        }
        self.asked = true;
        let key = self.request.key();
        let (secret, request) = (&self.line.secret, self.request.der());
        let proof = Proof::of_guest(secret, &self.binding, request, &key, &self.wish);
        let (invitation, wish, request) =
            (self.line.invitation, self.wish.clone(), request.to_vec());
        Ok(Message::Ask(JoinRequest { invitation, wish, request, proof }))
    }
}
