//! The errors of downloads from a Hub.

use super::{
    address::{AddressError, Origin},
    answer::words,
};
use std::{io, path::PathBuf, time::Duration};

/// Why a Hub does not give what was asked for. Places in it are scheme, host and port: addresses may have
/// passwords and signatures in them.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The endpoint's address is not valid.
    #[error("the address of the Hub cannot be used: {problem}")]
    Endpoint {
        /// What is wrong with it.
        problem: AddressError,
    },
    /// The token has characters that no token has.
    #[error("the token has characters that may not stand in a header")]
    Token,
    /// The certificate authorities cannot be read.
    #[error("no certificates of authorities: {problem}")]
    Authorities {
        /// Why they cannot be read.
        problem: String,
    },
    /// A redirect that is not followed.
    #[error("{from} sends elsewhere, and that is not followed: {problem}")]
    Redirect {
        /// The server that redirects.
        from: Origin,
        /// Why it is not followed.
        problem: String,
    },
    /// The answer is a refusal.
    #[error("{from} answers {status}{words}")]
    Status {
        /// The server that answers.
        from: Origin,
        /// The HTTP status of the answer.
        status: u16,
        /// The Hub's own code for the refusal; empty without one.
        code: String,
        /// The server's message after a colon; empty without one.
        words: String,
        /// How long the server asks to wait, if it does.
        wait: Option<Duration>,
    },
    /// The server's certificate is not accepted.
    #[error("the certificate of {from} is not accepted: {why}")]
    Tls {
        /// The server with the certificate.
        from: Origin,
        /// The kind of the fault.
        fault: TlsFault,
        /// The fault in detail, for people.
        why: String,
    },
    /// There is no connection, or it broke off.
    #[error("{from}: {why}")]
    Network {
        /// The server that was asked.
        from: Origin,
        /// What went wrong, for people.
        why: String,
    },
    /// The answer makes no sense.
    #[error("the answer of {from} makes no sense: {problem}")]
    Answer {
        /// The server that answers.
        from: Origin,
        /// What is wrong with the answer.
        problem: String,
    },
    /// The answer has other bytes than those that were asked for.
    #[error("{from} gives other bytes of {file} than it was asked for")]
    Range {
        /// The server that gives them.
        from: Origin,
        /// The file that was asked for.
        file: String,
    },
    /// All bytes came, and they are not those of the file.
    #[error("{file} came with another digest than {from} says that it has")]
    Digest {
        /// The Hub that names the digest.
        from: Origin,
        /// The file with another digest.
        file: String,
    },
    /// The disk does not take what comes.
    #[error("cannot write {path}: {source}")]
    Disk {
        /// The path that cannot be written.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Why a certificate is not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsFault {
    /// No authority that is known here issued it.
    Issuer,
    /// It is not valid yet, or not any more, by the clock of this machine.
    Time,
    /// Any other fault.
    Other,
}

impl HubError {
    /// Whether the same request may succeed later.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Network { .. } | Self::Range { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502..=504),
            _ => false,
        }
    }

    /// The error that a failed exchange with `from` means; `silence` is how long nothing came, if it timed out.
    pub(super) fn of(from: Origin, error: ureq::Error, silence: Duration) -> Self {
        use ureq::Error as E;
        let network = |from, why: &str| Self::Network { from, why: why.to_owned() };
        match error {
            E::Rustls(error) => Self::tls(from, &error),
            E::Io(error) => match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(error) => Self::tls(from, error),
                None => network(from, &error.to_string()),
            },
            E::Tls(why) => Self::Tls { from, fault: TlsFault::Other, why: why.to_owned() },
            E::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => {
                network(from, "no connection came about in time")
            }
            E::Timeout(_) => network(from, &format!("nothing came for {silence:?}")),
            E::HostNotFound => network(from, "no address is known for that name"),
            E::ConnectProxyFailed(why) => {
                network(from, &format!("the proxy refuses ({})", words(why.as_bytes())))
            }
            E::LargeResponseHeader(..) => {
                Self::Answer { from, problem: "its headers are too long".to_owned() }
            }
            error => network(from, &words(error.to_string().as_bytes())),
        }
    }

    fn tls(from: Origin, error: &rustls::Error) -> Self {
        use rustls::CertificateError as C;
        let fault = match error {
            rustls::Error::InvalidCertificate(why) => match why {
                C::UnknownIssuer => TlsFault::Issuer,
                C::Expired
                | C::ExpiredContext { .. }
                | C::NotValidYet
                | C::NotValidYetContext { .. } => TlsFault::Time,
                _ => TlsFault::Other,
            },
            // Not the certificate, but what should be TLS.
            error => {
                return Self::Network { from, why: words(error.to_string().as_bytes()) };
            }
        };
        Self::Tls { from, fault, why: words(error.to_string().as_bytes()) }
    }
}
