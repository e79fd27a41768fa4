//! Dialling: TCP and TLS with errors that say what a person can do, and gRPC channels on top.

use crate::{
    ALPN_CONTROL,
    identity::{Identity, Moment, Role, dns_name, server_name},
};
use galaxy_common::DeviceName;
use hyper_util::rt::TokioIo;
use rustls::{AlertDescription, CertificateError, ClientConfig};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Endpoint};

/// How long a connection may be silent before the other side is asked for a sign of life, and how long the answer may
/// take. Coordinators ask their clients in the same way.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Why a connection cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Text that is no address.
    #[error("{address:?} is not an address: write host:port, like 192.168.1.20:7100")]
    Address {
        /// The text that was given.
        address: String,
    },
    /// A host name that cannot be resolved.
    #[error("the host of {address} could not be found: {source}")]
    Resolve {
        /// The address, as host:port.
        address: String,
        /// The error of the resolver.
        source: io::Error,
    },
    /// A host that is there, and a port on which nobody listens.
    #[error("nobody listens at {address}: is the process started, and is the port right?")]
    Refused {
        /// The address, as host:port.
        address: String,
    },
    /// No answer in time.
    #[error("{address} did not answer within {after:?}: is the machine on and reachable?")]
    TimedOut {
        /// The address, as host:port.
        address: String,
        /// How long this side waited.
        after: Duration,
    },
    /// The transport failed.
    #[error("the connection to {address} failed: {source}")]
    Io {
        /// The address, as host:port.
        address: String,
        /// The error of the transport.
        source: io::Error,
    },
    /// A certificate of the peer that is not valid any more.
    #[error(
        "the certificate of {whose} at {address} has expired; the clock of this machine says {now}: \
         is the clock right? If it is, issue {whose} a new certificate"
    )]
    Expired {
        /// The address, as host:port.
        address: String,
        /// The role and name of the peer.
        whose: String,
        /// The time by the clock of this machine.
        now: Moment,
    },
    /// A certificate of the peer that is not valid yet.
    #[error(
        "the certificate of {whose} at {address} is not valid yet; the clock of this machine says \
         {now}: is the clock of this machine right, and that of the one that issued it?"
    )]
    NotYetValid {
        /// The address, as host:port.
        address: String,
        /// The role and name of the peer.
        whose: String,
        /// The time by the clock of this machine.
        now: Moment,
    },
    /// A peer with another name or role than the one that was expected.
    #[error(
        "{address} answers as {presented}, and {wanted} was expected: is the address right, and \
         does the certificate there carry that name and role?"
    )]
    WrongName {
        /// The address, as host:port.
        address: String,
        /// The name that was expected, as a certificate carries it.
        wanted: String,
        /// The names in the peer's certificate.
        presented: String,
    },
    /// A certificate of the peer that another authority issued.
    #[error(
        "the certificate of {whose} at {address} is not of this cluster's authority: were both \
         identities issued by the same `galaxy keys init`?"
    )]
    Foreign {
        /// The address, as host:port.
        address: String,
        /// The role and name of the peer.
        whose: String,
    },
    /// The peer refused the certificate of this side.
    #[error("{address} refused our certificate: {why}; the clock of this machine says {now}")]
    RefusedUs {
        /// The address, as host:port.
        address: String,
        /// The reason, by the TLS alert that the peer sent.
        why: &'static str,
        /// The time by the clock of this machine.
        now: Moment,
    },
    /// The peer speaks no TLS, or another protocol.
    #[error("{address} does not speak Galaxy's protocol: {source}")]
    Tls {
        /// The address, as host:port.
        address: String,
        /// What was wrong.
        source: io::Error,
    },
    /// A plain connection to another machine.
    #[error("{address} is not on this machine: without an identity only loopback is allowed")]
    NotLoopback {
        /// The address, as host:port.
        address: String,
    },
}

impl ConnectError {
    /// Whether the same attempt may succeed later although nobody changes anything.
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            Self::Resolve { .. } | Self::Refused { .. } | Self::TimedOut { .. } | Self::Io { .. }
        )
    }
    /// A stable name of the error, in snake case.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Address { .. } => "bad_address",
            Self::Resolve { .. } => "name_not_resolved",
            Self::Refused { .. } => "connection_refused",
            Self::TimedOut { .. } => "timed_out",
            Self::Io { .. } => "connection_failed",
            Self::Expired { .. } => "certificate_expired",
            Self::NotYetValid { .. } => "certificate_not_yet_valid",
            Self::WrongName { .. } => "wrong_name",
            Self::Foreign { .. } => "foreign_authority",
            Self::RefusedUs { .. } => "certificate_refused",
            Self::Tls { .. } => "not_galaxy",
            Self::NotLoopback { .. } => "not_loopback",
        }
    }
}

/// Opens a gRPC channel to `server`, and opens it again when it broke and is used.
///
/// Without an identity the channel is plain text, and only this machine can be reached. The
/// timeout is for one connection attempt.
///
/// # Errors
/// When the first attempt fails.
pub async fn connect(
    address: &str,
    identity: Option<&Identity>,
    server: (&DeviceName, Role),
    timeout: Duration,
) -> Result<Channel, ConnectError> {
    ChannelTarget::new(address, identity, None, server, timeout).channel(true).await
}

/// [`connect`] for a caller that must notice when the process at the other end is another one: once the channel
/// broke, every call on it fails. `from` is the local address, if not any will do.
///
/// # Errors
/// When the attempt fails.
pub async fn connect_once(
    address: &str,
    identity: Option<&Identity>,
    from: Option<IpAddr>,
    server: (&DeviceName, Role),
    timeout: Duration,
) -> Result<Channel, ConnectError> {
    ChannelTarget::new(address, identity, from, server, timeout).channel(false).await
}

/// A plain stream or one with TLS, as hyper wants it.
type Duplex = TokioIo<Box<dyn Both>>;
trait Both: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> Both for T {}

#[derive(Clone)]
struct ChannelTarget {
    address: String,
    tls: Option<Arc<ClientConfig>>,
    from: Option<IpAddr>,
    name: DeviceName,
    role: Role,
    timeout: Duration,
}

impl ChannelTarget {
    fn new(
        address: &str,
        identity: Option<&Identity>,
        from: Option<IpAddr>,
        (name, role): (&DeviceName, Role),
        timeout: Duration,
    ) -> Self {
        let tls = identity.map(|identity| identity.client_config(ALPN_CONTROL));
        Self { address: address.to_owned(), tls, from, name: name.clone(), role, timeout }
    }

    async fn channel(self, again: bool) -> Result<Channel, ConnectError> {
        let first = self.open().await?;
        let (address, timeout) = (self.address.clone(), self.timeout);
        let ready = Arc::new(Mutex::new(Some(first)));
        let endpoint = Endpoint::from_shared(format!("http://{}", dns_name(&self.name, self.role)))
            .map_err(|_| ConnectError::Address { address: address.clone() })?
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(4 << 20)
            // Calls that this side leaves early: what the other side still sends for those that HTTP/2 has forgotten
            // is counted for as long as the connection lives, and after 1024 it would be closed.
            .http2_max_local_error_reset_streams(None)
            .connect_timeout(timeout);
        // A channel that opens again notices by itself that a connection is dead: no call has to fail first. Those
        // who open the other channels ask them for signs of life themselves.
        let endpoint = match again {
            true => endpoint
                .http2_keep_alive_interval(KEEPALIVE)
                .keep_alive_timeout(KEEPALIVE)
                .keep_alive_while_idle(true),
            false => endpoint,
        };
        let connector = tower::service_fn(move |_| {
            let (target, ready) = (self.clone(), ready.clone());
            async move {
                let first = ready.lock().unwrap_or_else(PoisonError::into_inner).take();
                match first {
                    Some(stream) => Ok(stream),
                    None if again => target.open().await,
                    None => Err(ConnectError::Io {
                        address: target.address,
                        source: io::Error::new(io::ErrorKind::BrokenPipe, "it was closed"),
                    }),
                }
            }
        });
        endpoint
            .connect_with_connector(connector)
            .await
            .map_err(|error| ConnectError::Io { address, source: io::Error::other(error) })
    }

    async fn open(&self) -> Result<Duplex, ConnectError> {
        let stream: Box<dyn Both> = match &self.tls {
            Some(tls) => {
                let server = (&self.name, self.role);
                Box::new(dial(&self.address, tls.clone(), self.from, server, self.timeout).await?)
            }
            None => {
                let stream = dial_plain(&self.address, self.from, self.timeout).await?;
                if !stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback()) {
                    return Err(ConnectError::NotLoopback { address: self.address.clone() });
                }
                Box::new(stream)
            }
        };
        Ok(TokioIo::new(stream))
    }
}

/// The socket addresses of a peer; at least one.
///
/// # Errors
/// [`ConnectError::Address`] and [`ConnectError::Resolve`].
pub async fn resolve(address: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    let wrong = || ConnectError::Address { address: address.to_owned() };
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(wrong());
    }
    let unknown = |source| ConnectError::Resolve { address: address.to_owned(), source };
    let found: Vec<SocketAddr> = tokio::net::lookup_host(address).await.map_err(unknown)?.collect();
    match found.is_empty() {
        true => Err(unknown(io::ErrorKind::NotFound.into())),
        false => Ok(found),
    }
}

/// Opens a TCP connection, without delay of small writes. `from` is the local address, if not any will do.
///
/// # Errors
/// Typed by what a person can do.
pub async fn dial_plain(
    address: &str,
    from: Option<IpAddr>,
    timeout: Duration,
) -> Result<TcpStream, ConnectError> {
    let address = address.to_owned();
    let connect = async {
        let found = resolve(&address).await?;
        let stream = connect_from(from, &found).await.map_err(|source| match source.kind() {
            io::ErrorKind::ConnectionRefused => ConnectError::Refused { address: address.clone() },
            io::ErrorKind::TimedOut => {
                ConnectError::TimedOut { address: address.clone(), after: timeout }
            }
            _ => ConnectError::Io { address: address.clone(), source },
        })?;
        stream
            .set_nodelay(true)
            .map_err(|source| ConnectError::Io { address: address.clone(), source })?;
        Ok(stream)
    };
    tokio::time::timeout(timeout, connect).await.unwrap_or_else(|_| {
        Err(ConnectError::TimedOut { address: address.clone(), after: timeout })
    })
}

async fn connect_from(from: Option<IpAddr>, found: &[SocketAddr]) -> io::Result<TcpStream> {
    let Some(from) = from else { return TcpStream::connect(found).await };
    let why = format!("it has no address that can be dialled from {from}");
    let mut failed = io::Error::new(io::ErrorKind::AddrNotAvailable, why);
    for to in found.iter().filter(|to| to.is_ipv4() == from.is_ipv4()) {
        let socket = if from.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind(SocketAddr::new(from, 0)).map_err(|error| {
            let why =
                format!("it cannot be dialled from {from}, is that an address of ours? {error}");
            io::Error::new(error.kind(), why)
        })?;
        match socket.connect(*to).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Opens a TLS connection and waits until the peer has accepted the certificate of this side too.
///
/// # Errors
/// Typed by what a person can do.
pub async fn dial(
    address: &str,
    config: Arc<ClientConfig>,
    from: Option<IpAddr>,
    server: (&DeviceName, Role),
    timeout: Duration,
) -> Result<TlsStream<TcpStream>, ConnectError> {
    let connect = async {
        let stream = dial_plain(address, from, timeout).await?;
        let mut stream = TlsConnector::from(config)
            .connect(server_name(server.0, server.1), stream)
            .await
            .map_err(|error| explain(address, server, error))?;
        accepted(&mut stream).await.map_err(|error| explain(address, server, error))?;
        Ok(stream)
    };
    tokio::time::timeout(timeout, connect).await.unwrap_or_else(|_| {
        Err(ConnectError::TimedOut { address: address.to_owned(), after: timeout })
    })
}

/// Waits for the first bytes after the handshake. In TLS 1.3 the client is done before the server
/// has seen its certificate; what comes first is a session ticket, or the alert that refuses us.
async fn accepted(stream: &mut TlsStream<TcpStream>) -> io::Result<()> {
    let (socket, session) = stream.get_mut();
    loop {
        socket.readable().await?;
        let mut reader = TryReader(socket);
        match session.read_tls(&mut reader) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                session
                    .process_new_packets()
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

struct TryReader<'a>(&'a TcpStream);
impl io::Read for TryReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

fn explain(address: &str, server: (&DeviceName, Role), error: io::Error) -> ConnectError {
    let address = address.to_owned();
    let whose = format!("{} {}", server.1, server.0);
    let now = Moment::now();
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(certificate)) => match certificate {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                ConnectError::Expired { address, whose, now }
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                ConnectError::NotYetValid { address, whose, now }
            }
            CertificateError::NotValidForNameContext { presented, .. } => ConnectError::WrongName {
                address,
                wanted: dns_name(server.0, server.1),
                presented: plain_names(presented),
            },
            CertificateError::NotValidForName => ConnectError::WrongName {
                address,
                wanted: dns_name(server.0, server.1),
                presented: "someone else".to_owned(),
            },
            _ => ConnectError::Foreign { address, whose },
        },
        Some(rustls::Error::AlertReceived(alert)) => refused_us(&address, *alert),
        Some(_) => ConnectError::Tls { address, source: error },
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            ConnectError::Tls { address, source: error }
        }
        None => ConnectError::Io { address, source: error },
    }
}

/// Whether an address, `host:port`, can be reached from its own machine only.
pub fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The error to report when a peer ended the handshake with `alert`.
pub fn refused_us(address: &str, alert: AlertDescription) -> ConnectError {
    let why = match alert {
        AlertDescription::CertificateExpired => {
            "it has expired by the clock there: are both clocks right?"
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is of another authority"
        }
        AlertDescription::AccessDenied => "its role is not served there: is the address right?",
        AlertDescription::CertificateRequired => "it was not shown",
        AlertDescription::CertificateRevoked => "who it names was removed from the cluster",
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            "it is not valid there: are both clocks right?"
        }
        AlertDescription::NoApplicationProtocol => {
            let why = "it knows no protocol that we do: are both of the same version?";
            let (address, source) = (address.to_owned(), io::Error::other(why));
            return ConnectError::Tls { address, source };
        }
        _ => "it broke off the handshake",
    };
    ConnectError::RefusedUs { address: address.to_owned(), why, now: Moment::now() }
}

/// The error to report when this side ended the handshake with `alert` and nothing more is known; `source` is what
/// was wrong.
pub fn refused_them(
    address: &str,
    server: (&DeviceName, Role),
    alert: AlertDescription,
    source: io::Error,
) -> ConnectError {
    let address = address.to_owned();
    let whose = format!("{} {}", server.1, server.0);
    match alert {
        AlertDescription::CertificateExpired => {
            ConnectError::Expired { address, whose, now: Moment::now() }
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            ConnectError::Foreign { address, whose }
        }
        AlertDescription::BadCertificate => ConnectError::WrongName {
            address,
            wanted: dns_name(server.0, server.1),
            presented: "someone else".to_owned(),
        },
        _ => ConnectError::Tls { address, source },
    }
}

/// Names as rustls prints them, `DnsName("pi-1.device.galaxy")`, without the wrapping.
fn plain_names(presented: &[String]) -> String {
    let inner = |name: &String| name.split('"').nth(1).unwrap_or(name).to_owned();
    presented.iter().map(inner).collect::<Vec<_>>().join(", ")
}
