//! The side that joins, as a state machine: it reads no clock, and touches no socket and no file.

use super::{
    dial::StoreError,
    line::Line,
    message::{Ask, Greeting, Message, Refusal},
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

/// By how much our clock may differ from the coordinator's: certificates are valid from an hour before they are made.
const SKEW_S: u64 = 30 * 60;

/// Why a machine does not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Somebody else answers.
    #[error(transparent)]
    Vet(#[from] VetError),
    /// The connection fails, or what comes is no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Another version.
    #[error(
        "the coordinator speaks protocol {theirs} (version {version}), and this is protocol {PROTOCOL} (version {VERSION}): install the same version on both"
    )]
    Protocol {
        /// Theirs.
        theirs: u32,
        /// Their version.
        version: String,
    },
    /// The clocks differ: a board without one, most likely.
    #[error(
        "the clock of this machine says {ours}, and the coordinator's {theirs}: certificates would not be valid here. Set the clock, as by `sudo date -u -s @{}` or with NTP, and join again; the invitation still holds", theirs.0
    )]
    Clock {
        /// Ours.
        ours: Moment,
        /// The coordinator's.
        theirs: Moment,
    },
    /// The coordinator's own certificate.
    #[error("the coordinator's certificate is not valid now, by its clock too: issue it a new one")]
    Validity,
    /// The coordinator's word.
    #[error("the coordinator refuses: {}", .0.message)]
    Refused(Refusal),
    /// A message out of turn.
    #[error("the coordinator says what is not its turn to say")]
    Turn,
    /// It does not know the secret.
    #[error(
        "the server does not know the secret of the invitation, or the connection was tampered with: nothing was stored"
    )]
    Proof,
    /// Something else than was asked for.
    #[error("the coordinator issued a certificate that does not fit: nothing was stored")]
    Certificate,
    /// No key.
    #[error("a key could not be made: {0}")]
    Key(#[from] rcgen::Error),
    /// No place for the identity.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this.
    Send(Message),
    /// It is done.
    Done(Granted),
}

/// What was given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Granted {
    /// The name,
    pub name: DeviceName,
    /// the role,
    pub role: Role,
    /// and the certificate that says so, in DER.
    pub certificate: Vec<u8>,
}

/// Who joins, over one channel.
pub struct Guest<'a> {
    line: &'a Line,
    wish: String,
    request: &'a Request,
    vetted: &'a Vetted,
    binding: Binding,
    asked: bool,
}

impl<'a> Guest<'a> {
    /// Who joins by `line`, over the channel with this exporter to the coordinator `vetted`, and would like to be
    /// called `wish`.
    pub fn new(
        line: &'a Line,
        wish: Option<&DeviceName>,
        request: &'a Request,
        vetted: &'a Vetted,
        exporter: [u8; 32],
    ) -> Self {
        let binding = Binding { exporter, server: vetted.key.clone() };
        let wish = wish.map(ToString::to_string).unwrap_or_default();
        Self { line, wish, request, vetted, binding, asked: false }
    }

    /// Takes in what the coordinator says; `now` is our clock.
    ///
    /// # Errors
    /// When this does not end in an identity.
    pub fn handle(&mut self, now: Moment, message: Message) -> Result<Step, JoinError> {
        match (message, self.asked) {
            (Message::Greeting(greeting), false) => self.greeted(now, greeting).map(Step::Send),
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
                Ok(Step::Done(Granted { name, role, certificate }))
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
        // Before the invitation is used: it would be used in vain.
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
        Ok(Message::Ask(Ask { invitation, wish, request, proof }))
    }
}
