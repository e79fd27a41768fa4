//! The identity that a process holds: its certificate, its key, and whom it trusts.

use super::{
    IdentityError, Role,
    denied::{Denied, Unless},
    hardware_aes, peer, provider,
};
use crate::ALPN_JOIN;
use galaxy_common::DeviceName;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{ParsedCertificate, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::TLS13,
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A PEM file of ours has a few KB; more is some other file.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// An identity, checked and ready for connections.
#[derive(Clone)]
pub struct Identity {
    name: DeviceName,
    role: Role,
    client: ClientConfig,
    server: ServerConfig,
    joining: ServerConfig,
    denied: Denied,
    key: Vec<u8>,
}

impl Identity {
    /// Loads `cert.pem`, `key.pem` and `ca.pem` of a directory; checks that the certificate is of
    /// that authority, valid by the clock of this machine, and fits the key.
    ///
    /// # Errors
    /// The first thing that is wrong, and in which file.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let [cert_path, key_path, ca_path] =
            ["cert.pem", "key.pem", "ca.pem"].map(|name| dir.join(name));
        let certificate = certificate(&cert_path)?;
        let authority = certificate_of(&ca_path, "certificate of an authority")?;
        let key = PrivateKeyDer::from_pem_slice(&read(&key_path)?)
            .map_err(|_| IdentityError::Pem { path: key_path, what: "private key" })?;
        let (name, role) = peer(std::slice::from_ref(&certificate))?;
        check(&certificate, &cert_path, &authority, &ca_path, &format!("{role} {name}"))?;

        let public = ParsedCertificate::try_from(&certificate);
        let public = public.map(|parsed| parsed.subject_public_key_info().to_vec());
        let unusable = |source| IdentityError::Unusable { path: cert_path.clone(), source };
        let public = public.map_err(unusable)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone()).map_err(unusable)?;
        let roots = Arc::new(roots);
        let denied = Denied::default();
        let general = |error: &dyn ToString| unusable(rustls::Error::General(error.to_string()));
        let inner: Arc<dyn ServerCertVerifier> =
            WebPkiServerVerifier::builder_with_provider(roots.clone(), provider())
                .build()
                .map_err(|error| general(&error))?;
        let mut client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unless { denied: denied.clone(), inner }))
            .with_client_auth_cert(vec![certificate.clone()], key.clone_key())
            .map_err(unusable)?;
        // Connections live long, and a resumed one would not look at certificates again.
        client.resumption = Resumption::disabled();
        let server = |strangers: bool, chain: Vec<CertificateDer<'static>>| {
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider());
            let verifier = match strangers {
                true => verifier.allow_unauthenticated(),
                false => verifier,
            };
            let inner: Arc<dyn ClientCertVerifier> =
                verifier.build().map_err(|error| general(&error))?;
            let mut server = ServerConfig::builder_with_provider(provider())
                .with_protocol_versions(&[&TLS13])
                .map_err(unusable)?
                .with_client_cert_verifier(Arc::new(Unless { denied: denied.clone(), inner }))
                .with_single_cert(chain, key.clone_key())
                .map_err(unusable)?;
            // The side without instructions for AES chooses, whichever side dials.
            server.ignore_client_order = !hardware_aes();
            Ok::<_, IdentityError>(server)
        };
        // Who joins does not have the authority's certificate yet.
        let joining = server(true, vec![certificate.clone(), authority])?;
        let server = server(false, vec![certificate])?;
        Ok(Self { name, role, client, server, joining, denied, key: public })
    }

    /// The name in the certificate.
    pub fn name(&self) -> &DeviceName {
        &self.name
    }
    /// The role in the certificate.
    pub fn role(&self) -> Role {
        self.role
    }
    /// The public key, as a SubjectPublicKeyInfo.
    pub fn key(&self) -> &[u8] {
        &self.key
    }
    /// Who was removed from the cluster: no connection of this identity is made with them.
    pub fn denied(&self) -> &Denied {
        &self.denied
    }
    /// How to answer those that join, who have no certificate yet, and those that have one.
    pub fn joining_config(&self) -> Arc<ServerConfig> {
        let mut config = self.joining.clone();
        config.alpn_protocols = vec![ALPN_JOIN.to_vec()];
        Arc::new(config)
    }
    /// How to dial, for one protocol.
    pub fn client_config(&self, alpn: &[u8]) -> Arc<ClientConfig> {
        let mut config = self.client.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        Arc::new(config)
    }
    /// How to answer, for these protocols. Peers without a certificate of ours are refused.
    pub fn server_config(&self, alpns: &[&[u8]]) -> Arc<ServerConfig> {
        let mut config = self.server.clone();
        config.alpn_protocols = alpns.iter().map(|alpn| alpn.to_vec()).collect();
        Arc::new(config)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    let file = |source| IdentityError::File { path: path.to_owned(), source };
    if fs::metadata(path).map_err(file)?.len() > MAX_PEM_BYTES {
        return Err(IdentityError::Pem { path: path.to_owned(), what: "certificate or key" });
    }
    fs::read(path).map_err(file)
}

fn certificate(path: &Path) -> Result<CertificateDer<'static>, IdentityError> {
    certificate_of(path, "certificate")
}

fn certificate_of(
    path: &Path,
    what: &'static str,
) -> Result<CertificateDer<'static>, IdentityError> {
    CertificateDer::from_pem_slice(&read(path)?)
        .map_err(|_| IdentityError::Pem { path: path.to_owned(), what })
}

fn check(
    certificate: &CertificateDer<'_>,
    path: &Path,
    authority: &CertificateDer<'_>,
    authority_path: &Path,
    whose: &str,
) -> Result<(), IdentityError> {
    let pem = |path: &Path, what| IdentityError::Pem { path: PathBuf::from(path), what };
    let anchor = webpki::anchor_from_trusted_cert(authority)
        .map_err(|_| pem(authority_path, "certificate of an authority"))?;
    let end = webpki::EndEntityCert::try_from(certificate).map_err(|_| pem(path, "certificate"))?;
    let anchors = [anchor];
    let verdict = end.verify_for_usage(
        provider().signature_verification_algorithms.all,
        &anchors,
        &[],
        UnixTime::now(),
        webpki::KeyUsage::client_auth(),
        None,
        None,
    );
    let whose = whose.to_owned();
    match verdict {
        Ok(_) => Ok(()),
        Err(webpki::Error::CertExpired { time, not_after }) => {
            Err(IdentityError::Expired { whose, until: not_after.into(), now: time.into() })
        }
        Err(webpki::Error::CertNotValidYet { time, not_before }) => {
            Err(IdentityError::NotYetValid { whose, from: not_before.into(), now: time.into() })
        }
        Err(_) => Err(IdentityError::Foreign {
            certificate: path.to_owned(),
            authority: authority_path.to_owned(),
        }),
    }
}
