//! Whether a server is the coordinator of the pinned cluster.

use super::line::Pin;
use crate::identity::{IdentityError, Moment, Role, peer, provider};
use galaxy_common::DeviceName;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, OtherError, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::ParsedCertificate,
    version::TLS13,
};
use std::{sync::Arc, time::Duration};

/// Why a server is not the coordinator that the line names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VetError {
    /// A server of another authority, or of none.
    #[error(
        "the server there is not of the cluster that the line is for: its authority has another key. Is the address right? If it is, somebody else answers there"
    )]
    Pin,
    /// A certificate that the authority of the line did not issue.
    #[error("the server there shows a certificate that the authority of the line did not issue")]
    Chain,
    /// A member of the cluster that is not its coordinator.
    #[error("{role} {name} of this cluster answers there, and the coordinator was expected")]
    Role {
        /// The member's name.
        name: DeviceName,
        /// The member's role.
        role: Role,
    },
}

/// From when a certificate is valid, or until when, if that is not now.
pub type Validity = Option<(Option<Moment>, Option<Moment>)>;

/// The coordinator that answers, verified against the pin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vetted {
    /// The coordinator's name.
    pub name: DeviceName,
    /// The coordinator's public key, as a SubjectPublicKeyInfo.
    pub key: Vec<u8>,
    /// The certificate of the coordinator's authority.
    pub authority: CertificateDer<'static>,
    /// When the certificate is valid, if that is not now by the clock of this machine.
    pub valid: Validity,
}

/// Verifies the certificate chain of a server. That its certificate is not valid now is no error yet: the clock of
/// this machine may be wrong, and the server says what its own shows.
///
/// # Errors
/// When the server is not the coordinator of the pinned cluster.
pub fn vet(chain: &[CertificateDer<'_>], pin: &Pin, now: UnixTime) -> Result<Vetted, VetError> {
    let [end, others @ ..] = chain else { return Err(VetError::Pin) };
    let pinned = |certificate: &&CertificateDer<'_>| Pin::of(certificate) == Some(*pin);
    let authority = others.iter().find(pinned).ok_or(VetError::Pin)?;
    let valid = issued(end, authority, now)?;
    let (name, role) = peer(chain).map_err(|_: IdentityError| VetError::Chain)?;
    if role != Role::Coordinator {
        return Err(VetError::Role { name, role });
    }
    let parsed = ParsedCertificate::try_from(end).map_err(|_| VetError::Chain)?;
    let key = parsed.subject_public_key_info().to_vec();
    Ok(Vetted { name, key, authority: authority.clone().into_owned(), valid })
}

/// Whether `authority` issued `end`; and, if that is not valid now, from when it is, or until when.
fn issued(
    end: &CertificateDer<'_>,
    authority: &CertificateDer<'_>,
    now: UnixTime,
) -> Result<Validity, VetError> {
    let anchor = [webpki::anchor_from_trusted_cert(authority).map_err(|_| VetError::Chain)?];
    let end = webpki::EndEntityCert::try_from(end).map_err(|_| VetError::Chain)?;
    let verify = |now| {
        let algorithms = provider().signature_verification_algorithms.all;
        let usage = webpki::KeyUsage::server_auth();
        end.verify_for_usage(algorithms, &anchor, &[], now, usage, None, None).map(|_| ())
    };
    let (at, valid) = match verify(now) {
        Ok(()) => return Ok(None),
        Err(webpki::Error::CertNotValidYet { not_before, .. }) => {
            (not_before, (Some(Moment::from(not_before)), None))
        }
        // Its last second counts.
        Err(webpki::Error::CertExpired { not_after, .. }) => {
            (not_after, (None, Some(Moment::from(not_after))))
        }
        Err(_) => return Err(VetError::Chain),
    };
    let second = |of: UnixTime, add: u64| {
        UnixTime::since_unix_epoch(Duration::from_secs(of.as_secs().saturating_add(add)))
    };
    verify(at).or_else(|_| verify(second(at, 1))).map_err(|_| VetError::Chain)?;
    Ok(Some(valid))
}

/// The TLS config for dialling the coordinator of the pinned cluster, without a certificate.
pub(super) fn config(pin: Pin, alpn: &[u8]) -> Result<ClientConfig, rustls::Error> {
    let provider = provider();
    let verifier = Arc::new(Pinned { pin, provider: provider.clone() });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(config)
}

#[derive(Debug)]
struct Pinned {
    pin: Pin,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain: Vec<_> = [end_entity].into_iter().chain(intermediates).cloned().collect();
        match vet(&chain, &self.pin, now) {
            Ok(_) => Ok(ServerCertVerified::assertion()),
            Err(error) => Err(CertificateError::Other(OtherError(Arc::new(error))).into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
