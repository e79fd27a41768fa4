//! The authority of a cluster: the one key that everyone trusts, and what it issues.

use super::{
    Identity, IdentityError, Role, dns_name,
    held::{MAX_PEM_BYTES, opened},
};
use crate::join::{Pin, PublicKey, Request};
use base64::{Engine, engine::general_purpose::STANDARD};
use galaxy_common::{DeviceName, private::Folder};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use std::{
    fs,
    path::{Path, PathBuf},
};
use time::{Duration, OffsetDateTime};

/// How long before now certificates begin to be valid, so that clocks which differ a little do no harm.
const BACKDATED: Duration = Duration::HOUR;
/// The validity of an authority in days. It outlives the devices: changing it means new certificates for all of them.
const AUTHORITY_DAYS: i64 = 20 * 365;

/// The authority of a cluster.
pub struct Authority {
    dir: PathBuf,
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Creates an authority in `dir/ca`: `ca.pem`, `ca.key` (readable by its owner only) and the cluster's name in
    /// `cluster`.
    ///
    /// # Errors
    /// When there is one already, or files cannot be written.
    pub fn create(dir: &Path, cluster: &str) -> Result<Self, IdentityError> {
        let ca = dir.join("ca");
        let key_path = ca.join("ca.key");
        if key_path.exists() {
            return Err(IdentityError::Exists { path: key_path });
        }
        let folder = Folder::make(&ca)?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = authority_params(cluster);
        let now = OffsetDateTime::now_utc();
        params.not_before = now - BACKDATED;
        params.not_after = now + Duration::days(AUTHORITY_DAYS);
        let certificate = params.self_signed(&key)?.pem();
        folder.write_secret("ca.key", key.serialize_pem().as_bytes())?;
        folder.write_public("ca.pem", certificate.as_bytes())?;
        folder.write_public("cluster", cluster.as_bytes())?;
        Ok(Self { dir: dir.to_owned(), certificate, issuer: Issuer::new(params, key) })
    }

    /// Opens the authority in `dir/ca`.
    ///
    /// # Errors
    /// When it is not there or cannot be read.
    pub fn open(dir: &Path) -> Result<Self, IdentityError> {
        let ca = dir.join("ca");
        let folder = opened(&ca, &["cluster", "ca.pem", "ca.key"])?;
        let text = |name: &str, what, bytes| {
            let path = ca.join(name);
            String::from_utf8(bytes).map_err(|_| IdentityError::Pem { path, what })
        };
        let public = |name| folder.read_public(name, MAX_PEM_BYTES);
        let cluster = text("cluster", "name of a cluster", public("cluster")?)?;
        let certificate = text("ca.pem", "certificate", public("ca.pem")?)?;
        let key = text("ca.key", "private key", folder.read_secret("ca.key", MAX_PEM_BYTES)?)?;
        let key = KeyPair::from_pem(&key)
            .map_err(|_| IdentityError::Pem { path: ca.join("ca.key"), what: "private key" })?;
        let issuer = Issuer::new(authority_params(cluster.trim()), key);
        Ok(Self { dir: dir.to_owned(), certificate, issuer })
    }

    /// Issues an identity of `days` days into `dir/NAME`: `cert.pem`, `key.pem` (readable by its
    /// owner only) and `ca.pem`. Returns that directory.
    ///
    /// # Errors
    /// When there is one of that name already, or files cannot be written.
    pub fn issue(
        &self,
        name: &DeviceName,
        role: Role,
        days: u32,
    ) -> Result<PathBuf, IdentityError> {
        let (from, until) = validity(days)?;
        let into = self.issue_between(name, role, from, until)?;
        // A ca.pem and a ca.key of two authorities would show only on a device far away.
        Identity::load(&into).inspect_err(|_| drop(fs::remove_dir_all(&into)))?;
        Ok(into)
    }

    /// Issues an identity that is valid from one moment to another, whether or not that is now.
    ///
    /// # Errors
    /// As [`Authority::issue`].
    pub fn issue_between(
        &self,
        name: &DeviceName,
        role: Role,
        from: OffsetDateTime,
        until: OffsetDateTime,
    ) -> Result<PathBuf, IdentityError> {
        let into = self.dir.join(name.as_str());
        if into.exists() {
            return Err(IdentityError::Exists { path: into });
        }
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let certificate = self.sign(name, role, (from, until), &key)?.pem();
        store(&into, &key.serialize_pem(), &certificate, &self.certificate)?;
        Ok(into)
    }

    /// Issues an identity for a key that this machine created, into a new directory.
    ///
    /// # Errors
    /// As [`Authority::issue`].
    pub fn issue_for(
        &self,
        name: &DeviceName,
        role: Role,
        days: u32,
        request: &Request,
        into: &Path,
    ) -> Result<(), IdentityError> {
        let certificate = self.sign(name, role, validity(days)?, &request.key())?.pem();
        store(into, &request.key_pem(), &certificate, &self.certificate)
    }

    /// Issues a certificate of `days` days, in DER, for a key that is not on this machine.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn certify(
        &self,
        name: &DeviceName,
        role: Role,
        days: u32,
        key: &PublicKey,
    ) -> Result<Vec<u8>, IdentityError> {
        Ok(self.sign(name, role, validity(days)?, key)?.der().to_vec())
    }

    /// The directory of the authority, and of the identities that it issued here.
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// The pin of its key.
    ///
    /// # Errors
    /// When its certificate cannot be read.
    pub fn pin(&self) -> Result<Pin, IdentityError> {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes()).ok();
        let pin = certificate.and_then(|certificate| Pin::of(&certificate));
        pin.ok_or_else(|| IdentityError::Authority { path: self.dir.join("ca/ca.pem") })
    }

    fn sign(
        &self,
        name: &DeviceName,
        role: Role,
        (from, until): (OffsetDateTime, OffsetDateTime),
        key: &impl PublicKeyData,
    ) -> Result<rcgen::Certificate, IdentityError> {
        let mut params = CertificateParams::new(vec![dns_name(name, role)])?;
        params.distinguished_name = common_name(&format!("{role} {name}"));
        (params.not_before, params.not_after) = (from, until);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(key, &self.issuer)?)
    }
}

/// The validity of a certificate: from an hour ago, for so many days.
fn validity(days: u32) -> Result<(OffsetDateTime, OffsetDateTime), IdentityError> {
    let now = OffsetDateTime::now_utc();
    let until = now
        .checked_add(Duration::days(i64::from(days)))
        // RFC 5280 gives years four digits.
        .filter(|until| until.year() < 9999)
        .ok_or(IdentityError::Days { days })?;
    Ok((now - BACKDATED, until))
}

/// Stores an identity in a new directory: `key.pem` (readable by its owner only), `cert.pem` and `ca.pem`.
pub(crate) fn store(
    into: &Path,
    key: &str,
    certificate: &str,
    authority: &str,
) -> Result<(), IdentityError> {
    let folder = Folder::make(into)?;
    folder.write_secret("key.pem", key.as_bytes())?;
    folder.write_public("cert.pem", certificate.as_bytes())?;
    folder.write_public("ca.pem", authority.as_bytes())?;
    Ok(())
}

/// DER in the PEM form of RFC 7468.
pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    // Base64 is ASCII.
    let lines = text.as_bytes().chunks(64).map(String::from_utf8_lossy);
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    format!("-----BEGIN {label}-----\n{lines}-----END {label}-----\n")
}

/// The parameters from which the issuer's name is rebuilt: they must be the same at creation and at every opening.
fn authority_params(cluster: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(&format!("galaxy cluster {cluster}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}
