//! The removed members of a cluster: certificates that are refused though the authority issued
//! them.

use super::{Role, fingerprint, peer};
use crate::v1::DenyRequest;
use galaxy_common::{
    DeviceName,
    replace::{PUBLIC, replace},
};
use prost::Message;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use std::{collections::BTreeSet, fs, io, path::Path, sync::Arc};
use tokio::sync::watch;

/// The removed members, by name and by key. Later versions hold all that earlier ones held.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Grows with each removal; 0 before the first.
    pub version: u64,
    /// The names that were removed, whatever their role.
    pub names: BTreeSet<DeviceName>,
    /// Keys, by the SHA-256 of their SubjectPublicKeyInfo.
    pub keys: BTreeSet<[u8; 32]>,
}

/// The most members of a list.
const MAX_REMOVED: usize = 16_384;

/// Bytes that are no list of removed members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the list of removed members has a name or a key that is none, or more than {MAX_REMOVED} of them"
)]
pub struct NotRemoved;

impl TryFrom<DenyRequest> for Removed {
    type Error = NotRemoved;
    fn try_from(wire: DenyRequest) -> Result<Self, NotRemoved> {
        let DenyRequest { version, names, keys } = wire;
        if names.len().max(keys.len()) > MAX_REMOVED {
            return Err(NotRemoved);
        }
        let names = names.into_iter().map(|name| DeviceName::new(name).map_err(|_| NotRemoved));
        let keys = keys.into_iter().map(|key| key.try_into().map_err(|_| NotRemoved));
        Ok(Self {
            version,
            names: names.collect::<Result<_, _>>()?,
            keys: keys.collect::<Result<_, _>>()?,
        })
    }
}

impl From<&Removed> for DenyRequest {
    fn from(removed: &Removed) -> Self {
        Self {
            version: removed.version,
            names: removed.names.iter().map(ToString::to_string).collect(),
            keys: removed.keys.iter().map(|key| key.to_vec()).collect(),
        }
    }
}

impl Removed {
    /// Reads the list that was saved in a file; without the file nobody was removed.
    ///
    /// # Errors
    /// When the file cannot be read, or holds no list.
    pub fn load(path: &Path) -> io::Result<Self> {
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            bytes => bytes?,
        };
        let wire = DenyRequest::decode(&bytes[..]).map_err(io::Error::other)?;
        wire.try_into().map_err(io::Error::other)
    }

    /// Saves the list in a file, whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        replace(path, &DenyRequest::from(self).encode_to_vec(), PUBLIC)
    }

    /// Whether a name was removed.
    pub fn has(&self, name: &DeviceName) -> bool {
        self.names.contains(name)
    }

    fn refuses(&self, certificate: &CertificateDer<'_>) -> bool {
        if self.names.is_empty() && self.keys.is_empty() {
            return false;
        }
        let named = peer(std::slice::from_ref(certificate)).is_ok_and(|(name, _)| self.has(&name));
        let key = ParsedCertificate::try_from(certificate);
        named || key.is_ok_and(|c| self.keys.contains(&fingerprint(&c.subject_public_key_info())))
    }
}

/// The list by which all connections of an identity are checked. Clones are the same list.
#[derive(Clone, Debug)]
pub struct Denied(watch::Sender<Arc<Removed>>);

impl Default for Denied {
    fn default() -> Self {
        Self(watch::Sender::new(Arc::default()))
    }
}

impl Denied {
    /// The list as it is now.
    pub fn now(&self) -> Arc<Removed> {
        self.0.borrow().clone()
    }

    /// Takes a list if it is newer than the one that is held. Returns whether it did.
    pub fn take(&self, removed: Removed) -> bool {
        self.0.send_if_modified(|held| {
            let newer = removed.version > held.version;
            if newer {
                *held = Arc::new(removed);
            }
            newer
        })
    }

    /// Receives the list and its changes, from now on.
    pub fn changes(&self) -> watch::Receiver<Arc<Removed>> {
        self.0.subscribe()
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        match self.0.borrow().refuses(certificate) {
            true => Err(CertificateError::Revoked.into()),
            false => Ok(()),
        }
    }
}

/// A verifier of servers that also refuses removed members.
#[derive(Debug)]
pub(super) struct ServerUnlessRemoved {
    pub(super) denied: Denied,
    pub(super) inner: Arc<dyn ServerCertVerifier>,
}

impl ServerCertVerifier for ServerUnlessRemoved {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.denied.check(end_entity)?;
        self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signed)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// A verifier of clients that also refuses removed members and other roles than those that are
/// served.
#[derive(Debug)]
pub(super) struct ClientUnlessRemoved {
    pub(super) denied: Denied,
    /// The roles that are served; without them, all.
    pub(super) roles: Option<Vec<Role>>,
    pub(super) inner: Arc<dyn ClientCertVerifier>,
}

impl ClientCertVerifier for ClientUnlessRemoved {
    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        self.denied.check(end_entity)?;
        let Some(roles) = &self.roles else { return Ok(verified) };
        match peer(std::slice::from_ref(end_entity)).is_ok_and(|(_, role)| roles.contains(&role)) {
            true => Ok(verified),
            // The caller's alert says that access is denied.
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signed)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
