//! The sockets around the join protocol: for a machine that joins, and for a device that announces where it is.

use super::{
    facts::{Attempt, Facts},
    guest::{Granted, Guest, JoinError, JoinStep},
    home::{Contact, StoreError},
    line::JoinLine,
    message::Message,
    proof::EXPORTER,
    request::Request,
    vet::{VetError, Vetted, config, vet},
    wire::{receive, send},
};
use crate::{
    ALPN_JOIN,
    channel::{ConnectError, dial, dial_plain, refused_us},
    identity::{self, Identity, IdentityError, Moment, Role},
};
use galaxy_common::DeviceName;
use rustls::{
    CertificateError,
    pki_types::{ServerName, UnixTime},
};
use std::{io, path::Path, sync::Arc, time::Duration};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// How long an address of a line may take to answer.
const DIAL: Duration = Duration::from_secs(5);
/// How long a coordinator may take for an answer. It writes to its disk, and dials devices back.
const ANSWER: Duration = Duration::from_secs(20);
/// A name that the TLS library wants, although SNI is not sent.
const ANY_NAME: &str = "coordinator.galaxy";

/// An identity that this machine was granted, and that is stored nowhere yet.
pub struct Joined {
    /// The name, the role and the certificate.
    pub granted: Granted,
    /// The coordinator's name.
    pub coordinator: DeviceName,
    /// The addresses of the coordinator, as host:port: first the one at which it was reached, then the others of the
    /// line.
    pub addresses: Vec<String>,
    key_pem: String,
    authority: Vec<u8>,
}

impl Joined {
    /// Stores the identity in `dir`, which must not exist yet.
    ///
    /// # Errors
    /// When that fails, or what is stored does not load.
    pub fn store(&self, dir: &Path) -> Result<Identity, JoinError> {
        let certificate = identity::pem("CERTIFICATE", &self.granted.certificate);
        let authority = identity::pem("CERTIFICATE", &self.authority);
        identity::store(dir, &self.key_pem, &certificate, &authority).map_err(StoreError::from)?;
        let contact = Contact { name: self.coordinator.clone(), addresses: self.addresses.clone() };
        let file = |source| IdentityError::File { path: dir.to_owned(), source };
        contact.save(dir).map_err(|source| StoreError::from(file(source)))?;
        Ok(Identity::load(dir).map_err(StoreError::from)?)
    }
}

/// Joins by a line, and asks for the name `wish`. The key is created here, and does not leave this machine.
///
/// # Errors
/// When that does not end in an identity.
pub async fn join(line: &JoinLine, wish: Option<&DeviceName>) -> Result<Joined, JoinError> {
    let request = Request::new()?;
    let (address, mut stream) = reach(line).await?;
    let (vetted, exporter) = {
        let session = stream.get_ref().1;
        let chain = session.peer_certificates().unwrap_or_default();
        let vetted: Vetted = vet(chain, &line.pin, UnixTime::now())?;
        let exporter = session
            .export_keying_material([0; 32], EXPORTER, None)
            .map_err(|error| tls(&address, io::Error::other(error)))?;
        (vetted, exporter)
    };
    let mut guest = Guest::new(line, wish, &request, &vetted, exporter);
    let granted = loop {
        let message = tokio::time::timeout(ANSWER, receive(&mut stream));
        let message = message.await.map_err(|_| late(&address))??;
        match guest.handle(Moment::now(), message)? {
            JoinStep::Send(message) => send(&mut stream, &message).await?,
            JoinStep::Done(granted) => break granted,
        }
    };
    let (coordinator, authority) = (vetted.name.clone(), vetted.authority.to_vec());
    let key_pem = request.key_pem();
    let others = line.addresses.iter().filter(|other| **other != address).cloned();
    let addresses = [address.clone()].into_iter().chain(others).collect();
    Ok(Joined { granted, coordinator, addresses, key_pem, authority })
}

fn late(address: &str) -> ConnectError {
    ConnectError::TimedOut { address: address.to_owned(), after: ANSWER }
}

fn tls(address: &str, source: io::Error) -> ConnectError {
    ConnectError::Tls { address: address.to_owned(), source }
}

/// Connects to the first address of the line at which the coordinator answers. If another server answers at one, that
/// is an error at once: it is no accident of networks.
async fn reach(line: &JoinLine) -> Result<(String, TlsStream<TcpStream>), JoinError> {
    let config = config(line.pin, ALPN_JOIN);
    let config = Arc::new(config.map_err(|e| tls(&line.addresses[0], io::Error::other(e)))?);
    let mut failed = None;
    for address in &line.addresses {
        let found = async {
            let stream = dial_plain(address, None, DIAL).await?;
            let name = ServerName::try_from(ANY_NAME).expect("a constant that is a name");
            let connect = TlsConnector::from(config.clone()).connect(name, stream);
            match tokio::time::timeout(DIAL, connect).await {
                Ok(stream) => stream.map_err(|error| explain(address, error)),
                Err(_) => Err(late(address).into()),
            }
        };
        match found.await {
            Ok(stream) => return Ok((address.clone(), stream)),
            Err(error @ JoinError::Vet(_)) => return Err(error),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    Err(failed.unwrap_or_else(|| late("the coordinator").into()))
}

fn explain(address: &str, error: io::Error) -> JoinError {
    let found = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match found {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(other))) => {
            match other.0.downcast_ref::<VetError>() {
                Some(vet) => vet.clone().into(),
                None => tls(address, error).into(),
            }
        }
        Some(rustls::Error::AlertReceived(alert)) => refused_us(address, *alert).into(),
        _ => tls(address, error).into(),
    }
}

/// Sends the coordinator the addresses of this device, and receives at which of them it was reached.
///
/// # Errors
/// When the coordinator is not reached, or refuses.
pub async fn announce(
    identity: &Identity,
    (address, coordinator): (&str, &DeviceName),
    facts: Facts,
) -> Result<Vec<Attempt>, JoinError> {
    let config = identity.client_config(ALPN_JOIN);
    let mut stream = dial(address, config, None, (coordinator, Role::Coordinator), DIAL).await?;
    let answer = async {
        match receive(&mut stream).await? {
            Message::Greeting(_) => {}
            Message::Refusal(refusal) => return Err(JoinError::Refused(refusal)),
            _ => return Err(JoinError::Turn),
        }
        send(&mut stream, &Message::Announce(facts)).await?;
        match receive(&mut stream).await? {
            Message::Reached(attempts) => Ok(attempts),
            Message::Refusal(refusal) => Err(JoinError::Refused(refusal)),
            _ => Err(JoinError::Turn),
        }
    };
    tokio::time::timeout(ANSWER, answer).await.unwrap_or_else(|_| Err(late(address).into()))
}
