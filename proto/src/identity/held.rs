//! The identity that a process holds: its certificate, its key, and the authority that it trusts.

use super::{
    IdentityError, Role,
    denied::{ClientUnlessRemoved, Denied, ServerUnlessRemoved},
    hardware_aes, peer, provider,
};
use crate::{ALPN_JOIN, door::rules};
use galaxy_common::{DeviceName, private::Folder};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{
        ParsedCertificate, StoresServerSessions, WebPkiClientVerifier, danger::ClientCertVerifier,
    },
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The most bytes of a PEM file: ours have a few KB; more is some other file.
pub(super) const MAX_PEM_BYTES: u64 = 1 << 20;

/// An identity, checked and ready for connections.
#[derive(Clone)]
pub struct Identity {
    name: DeviceName,
    role: Role,
    client: ClientConfig,
    /// The certificate that is shown to peers that know the authority.
    shown: Arc<SingleCertAndKey>,
    /// The certificate with that of the authority, which is shown to machines that join and do not know the authority
    /// yet.
    shown_with_authority: Arc<SingleCertAndKey>,
    /// Accepts clients with a certificate of the authority.
    members: Arc<dyn ClientCertVerifier>,
    /// Accepts clients with a certificate of the authority, and clients without any.
    strangers: Arc<dyn ClientCertVerifier>,
    denied: Denied,
    key: Vec<u8>,
}

impl Identity {
    /// Loads `cert.pem`, `key.pem` and `ca.pem` of a directory; checks that nobody else may read the key or
    /// write any of them, and that the certificate is of that authority, valid by the clock of this machine,
    /// and fits the key.
    ///
    /// # Errors
    /// The first thing that is wrong, and in which file.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let [cert_path, key_path, ca_path] =
            ["cert.pem", "key.pem", "ca.pem"].map(|name| dir.join(name));
        let folder = opened(dir, &["cert.pem", "key.pem", "ca.pem"])?;
        let authority = certificate(&folder, "ca.pem", "certificate of an authority")?;
        let certificate = certificate(&folder, "cert.pem", "certificate")?;
        let key = folder.read_secret("key.pem", MAX_PEM_BYTES)?;
        let key = PrivateKeyDer::from_pem_slice(&key)
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
            .with_custom_certificate_verifier(Arc::new(ServerUnlessRemoved {
                denied: denied.clone(),
                inner,
            }))
            .with_client_auth_cert(vec![certificate.clone()], key.clone_key())
            .map_err(unusable)?;
        // Connections live long, and a resumed one would not look at certificates again.
        client.resumption = Resumption::disabled();
        let verifier = || WebPkiClientVerifier::builder_with_provider(roots.clone(), provider());
        let shown = |chain: Vec<CertificateDer<'static>>| {
            let shown = CertifiedKey::from_der(chain, key.clone_key(), &provider());
            Ok::<_, IdentityError>(Arc::new(SingleCertAndKey::from(shown.map_err(unusable)?)))
        };
        Ok(Self {
            name,
            role,
            client,
            shown: shown(vec![certificate.clone()])?,
            shown_with_authority: shown(vec![certificate, authority])?,
            members: verifier().build().map_err(|error| general(&error))?,
            strangers: verifier().allow_unauthenticated().build().map_err(|e| general(&e))?,
            denied,
            key: public,
        })
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
    /// The removed members of the cluster, with which this identity makes no connection.
    pub fn denied(&self) -> &Denied {
        &self.denied
    }
    /// The TLS config that answers machines that join, with or without a certificate.
    pub fn joining_config(&self) -> Arc<ServerConfig> {
        let (denied, inner) = (self.denied.clone(), self.strangers.clone());
        let verifier = ClientUnlessRemoved { denied, roles: None, inner };
        answer(verifier, self.shown_with_authority.clone(), &[ALPN_JOIN])
    }
    /// The TLS config for dialling, with one protocol.
    pub fn client_config(&self, alpn: &[u8]) -> Arc<ClientConfig> {
        let mut config = self.client.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        Arc::new(config)
    }
    /// The TLS config that answers these protocols. Peers without a certificate of the cluster are refused, and so
    /// are those of a role that is served over none of them.
    pub fn server_config(&self, alpns: &[&[u8]]) -> Arc<ServerConfig> {
        let served = rules(self.role).iter().filter(|rule| alpns.contains(&rule.alpn));
        let roles = served.map(|rule| rule.role).collect();
        let (denied, inner) = (self.denied.clone(), self.members.clone());
        let verifier = ClientUnlessRemoved { denied, roles: Some(roles), inner };
        answer(verifier, self.shown.clone(), alpns)
    }
}

/// The TLS config that answers the clients that `verifier` accepts.
fn answer(
    verifier: ClientUnlessRemoved,
    shown: Arc<SingleCertAndKey>,
    alpns: &[&[u8]],
) -> Arc<ServerConfig> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .expect("the provider had it when the identity was loaded")
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(shown);
    // The side without instructions for AES chooses, whichever side dials.
    config.ignore_client_order = !hardware_aes();
    config.session_storage = Arc::new(Forgetful);
    config.alpn_protocols = alpns.iter().map(|alpn| alpn.to_vec()).collect();
    Arc::new(config)
}

/// Keeps no session, so that none is resumed: each connection shows its certificate. Tickets go out all
/// the same and are good for nothing; the first tells a caller that its certificate was accepted.
#[derive(Debug)]
struct Forgetful;

impl StoresServerSessions for Forgetful {
    fn put(&self, _: Vec<u8>, _: Vec<u8>) -> bool {
        true
    }
    fn get(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn take(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn can_cache(&self) -> bool {
        true
    }
}

/// Opens a folder that has all these files. It holds nothing else, so one that is open to others is closed.
pub(super) fn opened(dir: &Path, files: &[&str]) -> Result<Folder, IdentityError> {
    for path in files.iter().map(|file| dir.join(file)) {
        fs::symlink_metadata(&path).map_err(|source| IdentityError::File { path, source })?;
    }
    let folder = Folder::mend(dir)?;
    if let Some(mode) = folder.was_open() {
        let dir = dir.display();
        tracing::warn!(%dir, "other users could reach into this directory (mode {mode:o}); its mode is 700 now");
    }
    Ok(folder)
}

fn certificate(
    folder: &Folder,
    name: &str,
    what: &'static str,
) -> Result<CertificateDer<'static>, IdentityError> {
    CertificateDer::from_pem_slice(&folder.read_public(name, MAX_PEM_BYTES)?)
        .map_err(|_| IdentityError::Pem { path: folder.path().join(name), what })
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
