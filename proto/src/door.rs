//! The door of a server: it accepts TCP, shakes hands, and knows who comes in.
//!
//! One port serves several protocols, told apart by ALPN: gRPC goes to tonic with the caller's
//! [`Peer`] attached, everything else to a hook.

mod sampled;

pub use sampled::Sampled;

use crate::{
    ALPN_CONTROL, ALPN_JOIN,
    fault::{Fault, to_status},
    identity::{Denied, Identity, Role, peer},
};
use galaxy_common::DeviceName;
use rustls::{ServerConfig, server::Acceptor};
use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
};
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};
use tokio_stream::Stream;
use tonic::{Code, Request, Status, transport::server::Connected};

/// Handshakes at one time; more wait in the kernel's queue, so strangers cannot fill our memory.
const HANDSHAKES: usize = 64;
/// gRPC connections at one time; whoever comes then is sent away.
const CONNECTIONS: usize = 256;
/// A handshake that takes longer is none.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// After an accept that failed (no descriptors left, most likely).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who is at the other end of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// By its certificate; `None` on a plain connection from this machine.
    pub identity: Option<(DeviceName, Role)>,
    /// From where; for messages only.
    pub address: SocketAddr,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.identity {
            Some((name, role)) => write!(f, "{role} {name} at {}", self.address),
            None => write!(f, "a caller without a certificate at {}", self.address),
        }
    }
}

/// Takes connections of a protocol that is not gRPC. It must not block.
pub type Hook = Arc<dyn Fn(Peer, TlsStream<TcpStream>) + Send + Sync>;

/// Connections whose handshake is done: give it to tonic's `serve_with_incoming_shutdown`.
///
/// Dropping it closes the door; handshakes under way are given up.
pub struct Door {
    connections: mpsc::Receiver<Connection>,
}

impl Door {
    /// Opens the door behind `listener`.
    ///
    /// Without an identity connections are plain, and only those from this machine are taken.
    pub fn open(
        listener: TcpListener,
        identity: Option<&Identity>,
        other: Option<(&'static [u8], Hook)>,
    ) -> Self {
        let (sender, connections) = mpsc::channel(HANDSHAKES);
        let (alpn, hook) = other.unzip();
        let tls = identity.map(|identity| {
            let joins = alpn.filter(|alpn| *alpn == ALPN_JOIN).map(|_| identity.joining_config());
            let others = alpn.filter(|alpn| *alpn != ALPN_JOIN);
            let alpns: Vec<&[u8]> = [ALPN_CONTROL].into_iter().chain(others).collect();
            Tls { members: identity.server_config(&alpns), joins }
        });
        let denied = identity.map(|identity| identity.denied().clone()).unwrap_or_default();
        let live = Arc::new(Semaphore::new(CONNECTIONS));
        tokio::spawn(accept(listener, Arc::new(Porter { tls, alpn, hook, live, denied, sender })));
        Self { connections }
    }
}

impl Stream for Door {
    type Item = io::Result<Connection>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections.poll_recv(cx).map(|next| next.map(Ok))
    }
}

/// How handshakes are answered, by what a caller wants.
struct Tls {
    /// Of those that have a certificate,
    members: Arc<ServerConfig>,
    /// and of those that join, where somebody may.
    joins: Option<Arc<ServerConfig>>,
}

impl Tls {
    async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let hello = start.client_hello();
        let joins = hello.alpn().is_some_and(|mut alpn| alpn.any(|alpn| alpn == ALPN_JOIN));
        let config = self.joins.as_ref().filter(|_| joins).unwrap_or(&self.members).clone();
        start.into_stream(config).await
    }
}

struct Porter {
    tls: Option<Tls>,
    alpn: Option<&'static [u8]>,
    hook: Option<Hook>,
    live: Arc<Semaphore>,
    denied: Denied,
    sender: mpsc::Sender<Connection>,
}

async fn accept(listener: TcpListener, porter: Arc<Porter>) {
    let permits = Arc::new(Semaphore::new(HANDSHAKES));
    let mut handshakes = JoinSet::new();
    loop {
        while handshakes.try_join_next().is_some() {}
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = porter.sender.closed() => return,
        };
        match accepted {
            Ok((stream, address)) => {
                let porter = porter.clone();
                handshakes.spawn(async move {
                    let done = porter.greet(stream, address);
                    if tokio::time::timeout(HANDSHAKE_DEADLINE, done).await.is_err() {
                        tracing::debug!(%address, "handshake took too long");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl Porter {
    async fn greet(&self, stream: TcpStream, address: SocketAddr) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%address, %error, "connection gone");
            return;
        }
        let Some(tls) = &self.tls else {
            if address.ip().is_loopback() {
                let peer = Peer { identity: None, address };
                self.admit(peer, Inner::Plain(stream)).await;
            } else {
                tracing::warn!(%address, "refused: without an identity only loopback is served");
            }
            return;
        };
        let stream = match tls.accept(stream).await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%address, %error, "refused a connection");
                return;
            }
        };
        let session = stream.get_ref().1;
        let shown = session.peer_certificates().is_some();
        if let (false, Some(ALPN_JOIN), Some(hook)) = (shown, session.alpn_protocol(), &self.hook) {
            return hook(Peer { identity: None, address }, stream);
        }
        let identity = match peer(session.peer_certificates().unwrap_or_default()) {
            Ok(identity) => identity,
            Err(error) => {
                tracing::warn!(%address, %error, "refused a connection");
                return;
            }
        };
        let peer = Peer { identity: Some(identity), address };
        match (session.alpn_protocol(), &self.hook) {
            (Some(alpn), Some(hook)) if Some(alpn) == self.alpn => hook(peer, stream),
            (Some(ALPN_CONTROL), _) => {
                self.admit(peer, Inner::Tls(Box::new(stream))).await;
            }
            _ => tracing::warn!(%peer, "refused: it names no protocol of ours"),
        }
    }

    async fn admit(&self, peer: Peer, stream: Inner) {
        match self.live.clone().try_acquire_owned() {
            // A closed channel is a closed door.
            Ok(live) => {
                let cut = peer.identity.clone().map(|(name, _)| {
                    let denied = self.denied.clone();
                    Box::pin(async move { denied.until(&name).await }) as Cut
                });
                drop(self.sender.send(Connection { peer, stream, cut, _live: live }).await);
            }
            Err(_) => tracing::warn!(%peer, "refused: {CONNECTIONS} connections stand already"),
        }
    }
}

/// Ends when a peer was removed from the cluster.
type Cut = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection whose peer is known. It ends when the peer is removed from the cluster.
pub struct Connection {
    peer: Peer,
    stream: Inner,
    cut: Option<Cut>,
    _live: OwnedSemaphorePermit,
}

enum Inner {
    Tls(Box<TlsStream<TcpStream>>),
    Plain(TcpStream),
}

impl Connected for Connection {
    type ConnectInfo = Peer;
    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

macro_rules! delegate {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().stream {
            Inner::Tls(stream) => {
                let $stream = Pin::new(stream.as_mut());
                $call
            }
            Inner::Plain(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.as_mut().get_mut().cut.as_mut().is_some_and(|cut| cut.as_mut().poll(cx).is_ready())
        {
            self.as_mut().get_mut().cut = None;
            let why = "the peer was removed from the cluster";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, why)));
        }
        delegate!(self, stream => stream.poll_read(cx, buffer))
    }
}
impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        delegate!(self, stream => stream.poll_write(cx, bytes))
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        delegate!(self, stream => stream.poll_write_vectored(cx, bytes))
    }
    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Inner::Tls(stream) => stream.is_write_vectored(),
            Inner::Plain(stream) => stream.is_write_vectored(),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_shutdown(cx))
    }
}

/// Checks that the caller of `request` has `role`, or one that may do all that it may. A plain
/// connection comes from this machine and may act as a client, and as nothing else.
///
/// # Errors
/// `PermissionDenied`, saying who called and which role is needed.
pub fn require<T>(role: Role, request: &Request<T>) -> Result<Peer, Status> {
    let denied = |message: String| {
        to_status(Code::PermissionDenied, Fault::new("permission_denied", message, false))
    };
    let peer = request
        .extensions()
        .get::<Peer>()
        .ok_or_else(|| denied("the caller is not known".to_owned()))?;
    match &peer.identity {
        Some((_, has)) if has.acts_as(role) => Ok(peer.clone()),
        None if role == Role::Client && peer.address.ip().is_loopback() => Ok(peer.clone()),
        _ => Err(denied(format!("{peer} called what only the role {role} may call"))),
    }
}
