//! Identities: who is who in a cluster, by certificates of one authority.
//!
//! A certificate carries a role and a name as the DNS name `NAME.ROLE.galaxy`. Peers are known by
//! it and never by their address. TLS 1.3 only, mutual always.

#[cfg(feature = "members")]
mod authority;
mod denied;
mod held;

#[cfg(feature = "members")]
pub use authority::Authority;
#[cfg(feature = "members")]
pub(crate) use authority::{pem, store};
pub use denied::{Denied, NotRemoved, Removed};
pub use held::Identity;

use galaxy_common::{DeviceName, NameError, private::PrivateError};
use ring::digest::{SHA256, digest};
use rustls::{
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use std::{fmt, io, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

/// The role in a certificate: what its holder may do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// A worker: serves control to coordinators, and joins rings.
    Device,
    /// A coordinator: controls devices, serves clients.
    Coordinator,
    /// A client: sends requests to coordinators.
    Client,
    /// An administrator: sends requests as a client does, and decides which devices belong to the
    /// cluster.
    Admin,
}

impl Role {
    /// Whether a holder of this role may make the calls that `role` may make.
    pub fn acts_as(self, role: Self) -> bool {
        self == role || (self, role) == (Self::Admin, Self::Client)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Coordinator => "coordinator",
            Self::Client => "client",
            Self::Admin => "admin",
        })
    }
}

impl FromStr for Role {
    type Err = IdentityError;
    fn from_str(text: &str) -> Result<Self, IdentityError> {
        match text {
            "device" => Ok(Self::Device),
            "coordinator" => Ok(Self::Coordinator),
            "client" => Ok(Self::Client),
            "admin" => Ok(Self::Admin),
            _ => Err(IdentityError::Role { text: text.to_owned() }),
        }
    }
}

/// A moment as messages show it: UTC, to the second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment(pub u64);

impl Moment {
    /// Now, by the clock of this machine.
    pub fn now() -> Self {
        Self(UnixTime::now().as_secs())
    }
}
impl From<UnixTime> for Moment {
    fn from(time: UnixTime) -> Self {
        Self(time.as_secs())
    }
}
impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = i64::try_from(self.0)
            .ok()
            .and_then(|seconds| time::OffsetDateTime::from_unix_timestamp(seconds).ok());
        match time {
            Some(t) => write!(
                f,
                "{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC",
                t.year(),
                u8::from(t.month()),
                t.day(),
                t.hour(),
                t.minute(),
                t.second()
            ),
            None => write!(f, "second {} after 1970", self.0),
        }
    }
}

/// Why an identity or an authority cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file that cannot be read or written.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// The file that was tried.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file that is there and must not be replaced.
    #[error("{} exists already: keep it, or choose another directory", path.display())]
    Exists {
        /// The file that exists.
        path: PathBuf,
    },
    /// A folder or file that others may use as well, or that is no file.
    #[error(transparent)]
    Private(PrivateError),
    /// A file that holds something else.
    #[error("{} holds no {what} in PEM form", path.display())]
    Pem {
        /// The file that was read.
        path: PathBuf,
        /// What it should hold, for the message.
        what: &'static str,
    },
    /// Text that names no role.
    #[error("{text:?} is not a role: known are device, coordinator, client, admin")]
    Role {
        /// The text that was given.
        text: String,
    },
    /// A name that is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A certificate without a name of the form NAME.ROLE.galaxy.
    #[error("the certificate carries no name of the form NAME.ROLE.galaxy")]
    Nameless,
    /// A certificate that is not valid any more.
    #[error(
        "the certificate of {whose} expired on {until}, and the clock of this machine says {now}: \
         is the clock right? If it is, issue a new certificate"
    )]
    Expired {
        /// The name in the certificate.
        whose: String,
        /// The end of its validity.
        until: Moment,
        /// The time by the clock of this machine.
        now: Moment,
    },
    /// A certificate that is not valid yet.
    #[error(
        "the certificate of {whose} is not valid before {from}, and the clock of this machine says \
         {now}: is the clock of this machine right, and that of the one that issued it?"
    )]
    NotYetValid {
        /// The name in the certificate.
        whose: String,
        /// The begin of its validity.
        from: Moment,
        /// The time by the clock of this machine.
        now: Moment,
    },
    /// A certificate that another authority issued.
    #[error("{} was not issued by the authority in {}", certificate.display(), authority.display())]
    Foreign {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the authority's certificate.
        authority: PathBuf,
    },
    /// A key that does not fit its certificate, or another error of the TLS library.
    #[error("{} and its key cannot be used: {source}", path.display())]
    Unusable {
        /// The file of the certificate.
        path: PathBuf,
        /// The error of the TLS library.
        source: rustls::Error,
    },
    /// A certificate or a key that cannot be created.
    #[cfg(feature = "members")]
    #[error("a certificate could not be made: {source}")]
    Make {
        /// The error of the library that creates certificates.
        #[from]
        source: rcgen::Error,
    },
    /// A file that holds no certificate of an authority.
    #[error("{} holds no certificate of an authority", path.display())]
    Authority {
        /// The file that was read.
        path: PathBuf,
    },
    /// A validity that goes beyond the calendar.
    #[error("a certificate cannot be valid for {days} days")]
    Days {
        /// The number of days that were asked for.
        days: u32,
    },
}

impl From<PrivateError> for IdentityError {
    fn from(error: PrivateError) -> Self {
        match error {
            PrivateError::File { path, source } => Self::File { path, source },
            PrivateError::Exists { path } => Self::Exists { path },
            error => Self::Private(error),
        }
    }
}

/// The name by which a peer's certificate is verified.
pub fn server_name(name: &DeviceName, role: Role) -> ServerName<'static> {
    ServerName::try_from(dns_name(name, role)).expect(
        "a device name is one DNS label of at most 48 bytes, so with a role it is a DNS name",
    )
}

/// The SHA-256 of a SubjectPublicKeyInfo, by which keys are known.
pub(crate) fn fingerprint(info: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(digest(&SHA256, info).as_ref());
    out
}

/// The DNS name that a certificate carries.
pub(crate) fn dns_name(name: &DeviceName, role: Role) -> String {
    format!("{name}.{role}.galaxy")
}

/// The name and role that a verified peer's certificate carries.
///
/// # Errors
/// When there is no certificate, or none of its names is one of ours.
pub fn peer(certificates: &[CertificateDer<'_>]) -> Result<(DeviceName, Role), IdentityError> {
    let first = certificates.first().ok_or(IdentityError::Nameless)?;
    let certificate =
        webpki::EndEntityCert::try_from(first).map_err(|_| IdentityError::Nameless)?;
    certificate.valid_dns_names().find_map(parse_name).ok_or(IdentityError::Nameless)
}

/// How long a verified peer's certificate is still valid, by the clock of this machine.
pub fn time_left(certificates: &[CertificateDer<'_>]) -> Option<Duration> {
    let certificate = webpki::EndEntityCert::try_from(certificates.first()?).ok()?;
    // At the end of time it has expired, and the error says when.
    let verdict = certificate.verify_for_usage(
        provider().signature_verification_algorithms.all,
        &[],
        &[],
        UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX)),
        webpki::KeyUsage::client_auth(),
        None,
        None,
    );
    match verdict.err()? {
        webpki::Error::CertExpired { not_after, .. } => {
            let left = not_after.as_secs().saturating_sub(UnixTime::now().as_secs());
            Some(Duration::from_secs(left))
        }
        _ => None,
    }
}

fn parse_name(dns: &str) -> Option<(DeviceName, Role)> {
    let mut labels = dns.split('.');
    let (name, role, galaxy) = (labels.next()?, labels.next()?, labels.next()?);
    if galaxy != "galaxy" || labels.next().is_some() {
        return None;
    }
    Some((DeviceName::new(name).ok()?, role.parse().ok()?))
}

/// The cryptography that all connections use; passed explicitly, never a global default.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    use rustls::{CipherSuite, crypto::ring};
    let mut provider = ring::default_provider();
    let first = match hardware_aes() {
        true => CipherSuite::TLS13_AES_128_GCM_SHA256,
        false => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    };
    // A stable sort: the others keep their order.
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != first);
    Arc::new(provider)
}

/// Whether the processor has instructions for AES. Without them (a Raspberry Pi 4) AES costs
/// several times what ChaCha20 costs, and every tile pays for it.
pub(crate) fn hardware_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes")
        && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}
