//! The door of a server: it accepts TCP connections, does the TLS handshake, and knows who each peer is.
//!
//! One port serves several protocols, told apart by ALPN: gRPC goes to tonic with the caller's [`Peer`] attached,
//! everything else to a hook. A connection that has not shown who it is waits in a [`SharedLobby`], where there is
//! always room for one more; [`rules`](fn@rules) decides who may come in after that, and how many.

mod places;
mod rules;
mod sampled;
mod shared_lobby;

pub use places::{AdmissionLimits, Full, Guest, Lobby, Now, Seats, counted};
pub use rules::{Rule, rules};
pub use sampled::Sampled;
pub use shared_lobby::{Notice, SharedLobby, Stay};

use crate::{
    ALPN_CONTROL, ALPN_JOIN,
    fault::{Fault, to_status},
    identity::{Denied, Identity, Removed, Role, peer, time_left},
};
use galaxy_common::DeviceName;
use rustls::{ServerConfig, server::Acceptor};
use std::{
    collections::HashMap,
    fmt,
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, Sleep, sleep, sleep_until, timeout},
};
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};
use tokio_stream::Stream;
use tonic::{Code, Request, Status, transport::server::Connected};

/// Connections that have not shown who they are, at one time. With 500 new ones in each second of one address, each
/// still has a second.
const HANDSHAKES: usize = 512;
/// Connections that are let in and wait until the server takes them.
const WAITING: usize = 64;
/// The time in which a connection has to send its first bytes.
const FIRST_BYTES: Duration = Duration::from_secs(3);
/// The time in which a handshake has to be done.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// The time in which a connection that was let in has to ask for something.
const FIRST_ASKED: Duration = Duration::from_secs(10);
/// The pause after an accept that failed (no descriptors left, most likely).
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// The remaining time of a connection without an end: timers go no further.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Who is at the other end of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// The name and role in the peer's certificate; `None` on a plain connection from this machine, and where a
    /// machine joins without a certificate.
    pub identity: Option<(DeviceName, Role)>,
    /// The peer's address; for messages only.
    pub address: SocketAddr,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.identity {
            Some((name, role)) => write!(f, "{role} {name} at {}", self.address),
            None => write!(f, "a caller without a certificate at {}", self.address),
        }
    }
}

/// What takes connections of a protocol that is not gRPC. It must not block.
pub type Hook = Arc<dyn Fn(Peer, TlsStream<TcpStream>) + Send + Sync>;

/// A stream of connections whose handshake is done, for tonic's `serve_with_incoming_shutdown`.
///
/// Dropping it closes the door; handshakes under way are given up.
pub struct Door {
    connections: mpsc::Receiver<Connection>,
    inside: Inside,
}

impl Door {
    /// Opens the door on `listener`. The role of `identity` decides whom it lets in.
    ///
    /// Without an identity connections are plain, and only those from this machine are taken, as clients
    /// of a coordinator.
    pub fn open(
        listener: TcpListener,
        identity: Option<&Identity>,
        other: Option<(&'static [u8], Hook)>,
    ) -> Self {
        let (sender, connections) = mpsc::channel(WAITING);
        let (alpn, hook) = other.unzip();
        let tls = identity.map(|identity| {
            let joins = alpn.filter(|alpn| *alpn == ALPN_JOIN).map(|_| identity.joining_config());
            let others = alpn.filter(|alpn| *alpn != ALPN_JOIN);
            let alpns: Vec<&[u8]> = [ALPN_CONTROL].into_iter().chain(others).collect();
            Tls { members: identity.server_config(&alpns), joins }
        });
        let denied = identity.map(|identity| identity.denied().clone()).unwrap_or_default();
        let inside = Inside::of(identity.map_or(Role::Coordinator, Identity::role));
        tokio::spawn(end_removed(denied.changes(), Arc::downgrade(&inside.0)));
        let porter = Porter {
            tls,
            alpn,
            hook,
            inside: inside.clone(),
            denied,
            refusals: Sampled::default(),
            sender,
        };
        tokio::spawn(accept(listener, Arc::new(porter)));
        Self { connections, inside }
    }

    /// The connections that were let in; the handle outlives the door.
    pub fn inside(&self) -> Inside {
        self.inside.clone()
    }
}

impl Stream for Door {
    type Item = io::Result<Connection>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections.poll_recv(cx).map(|next| next.map(Ok))
    }
}

/// The gRPC connections that were let in through a door.
#[derive(Clone)]
pub struct Inside(Arc<Mutex<Within>>);

struct Within {
    /// Each rule, with the places that it gives and who has them.
    places: Vec<(&'static Rule, Seats<Option<DeviceName>>)>,
    next: u64,
    /// Each connection, with a sender that ends it when dropped.
    connections: HashMap<u64, (Peer, oneshot::Sender<()>)>,
}

impl Inside {
    fn of(server: Role) -> Self {
        let places = rules(server).iter().map(|rule| (rule, Seats::new(rule.room))).collect();
        Self(Arc::new(Mutex::new(Within { places, next: 0, connections: HashMap::new() })))
    }

    fn within(&self) -> MutexGuard<'_, Within> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connections of those who were removed from the cluster.
    fn end_removed(&self, removed: &Removed) {
        self.end(|peer| peer.identity.as_ref().is_some_and(|(name, _)| removed.has(name)));
    }

    /// Ends all connections whose peer `who` returns true for, and the calls over them.
    pub fn end(&self, who: impl Fn(&Peer) -> bool) {
        // Dropping the sender ends the connection.
        self.within().connections.retain(|_, (peer, _)| !who(peer));
    }

    fn serves(&self, alpn: Option<&[u8]>, role: Role) -> bool {
        let within = self.within();
        alpn.is_some_and(|alpn| within.places.iter().any(|(rule, _)| rule.is(alpn, role)))
    }

    /// Takes a place for `peer`, which speaks gRPC.
    fn take(&self, peer: &Peer) -> Result<ConnectionPermit, Refused> {
        let role = peer.identity.as_ref().map_or(Role::Client, |(_, role)| *role);
        let who = peer.identity.as_ref().map(|(name, _)| name.clone());
        let mut within = self.within();
        let at = within.places.iter().position(|(rule, _)| rule.is(ALPN_CONTROL, role));
        let rule = at.ok_or(Refused::Role(role))?;
        within.places[rule].1.take(&who)?;
        let (end, told) = oneshot::channel();
        let number = within.next;
        within.next += 1;
        within.connections.insert(number, (peer.clone(), end));
        Ok(ConnectionPermit { inside: self.clone(), number, rule, who, told })
    }
}

/// A place inside, given back on drop.
struct ConnectionPermit {
    inside: Inside,
    number: u64,
    rule: usize,
    who: Option<DeviceName>,
    told: oneshot::Receiver<()>,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut within = self.inside.within();
        within.connections.remove(&self.number);
        within.places[self.rule].1.give(&self.who);
    }
}

/// Why a connection is not let in.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("the role {0} is not served here over this protocol")]
    Role(Role),
    #[error(transparent)]
    Full(#[from] Full),
}

/// The TLS configs by which handshakes are answered, by the protocol that the caller asks for.
struct Tls {
    /// The config for callers with a certificate of the cluster.
    members: Arc<ServerConfig>,
    /// The config for machines that join; none where nobody may.
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
    inside: Inside,
    denied: Denied,
    refusals: Sampled,
    sender: mpsc::Sender<Connection>,
}

async fn accept(listener: TcpListener, porter: Arc<Porter>) {
    let lobby = SharedLobby::new(HANDSHAKES);
    let mut handshakes = JoinSet::new();
    loop {
        while handshakes.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = porter.sender.closed() => return,
        };
        match accepted {
            Ok((stream, address)) => {
                let (porter, (stay, notice)) = (porter.clone(), lobby.arrive(address.ip()));
                handshakes.spawn(async move {
                    let shaken = tokio::select! {
                        shaken = timeout(HANDSHAKE_DEADLINE, porter.shake(stream, address, &stay)) => shaken,
                        () = notice.given() => return,
                    };
                    // The peer is known, and stands in nobody's way.
                    drop(stay);
                    match shaken {
                        Ok(Ok(shaken)) => porter.let_in(shaken).await,
                        Ok(Err(why)) => porter.refuse(&address, &why),
                        Err(late) => porter.refuse(&address, &late),
                    }
                });
            }
            Err(error) => {
                porter.refuse(&"somebody", &error);
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// A connection whose peer has shown who it is.
struct Shaken {
    peer: Peer,
    stream: Inner,
    /// The time until the peer's certificate ends.
    left: Duration,
}

impl Porter {
    /// Does the handshake, once the first bytes have come.
    async fn shake(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        stay: &Stay,
    ) -> io::Result<Shaken> {
        if self.tls.is_none() && !address.ip().is_loopback() {
            return Err(io::Error::other("without an identity only loopback is served"));
        }
        stream.set_nodelay(true)?;
        let silent = |_| io::Error::new(io::ErrorKind::TimedOut, "it says nothing");
        timeout(FIRST_BYTES, stream.readable()).await.map_err(silent)??;
        stay.heard();
        let Some(tls) = &self.tls else {
            let peer = Peer { identity: None, address };
            return Ok(Shaken { peer, stream: Inner::Plain(stream), left: NEVER });
        };
        let stream = tls.accept(stream).await?;
        let session = stream.get_ref().1;
        let joins = session.alpn_protocol() == Some(ALPN_JOIN);
        if joins && session.peer_certificates().is_none() {
            let peer = Peer { identity: None, address };
            return Ok(Shaken { peer, stream: Inner::Tls(Box::new(stream)), left: NEVER });
        }
        let certificates = session.peer_certificates().unwrap_or_default();
        let identity = peer(certificates).map_err(io::Error::other)?;
        let left = time_left(certificates).map_or(NEVER, |left| left.min(NEVER));
        let peer = Peer { identity: Some(identity), address };
        Ok(Shaken { peer, stream: Inner::Tls(Box::new(stream)), left })
    }

    /// Authorizes the peer: lets it in if its role may use its protocol. Its certificate was verified in the handshake.
    async fn let_in(&self, Shaken { peer, stream, left }: Shaken) {
        let alpn = match &stream {
            Inner::Tls(stream) => stream.get_ref().1.alpn_protocol(),
            Inner::Plain(_) => Some(ALPN_CONTROL),
        };
        if alpn.is_some() && alpn == self.alpn {
            // Whoever joins, or comes from a new address, says there what it is.
            let joins = alpn == Some(ALPN_JOIN);
            let (Inner::Tls(stream), Some(hook)) = (stream, &self.hook) else { return };
            let role = peer.identity.as_ref().map(|(_, role)| *role);
            let served = |role: &Role| self.inside.serves(self.alpn, *role);
            match joins || role.as_ref().is_some_and(served) {
                true => hook(peer, *stream),
                false => self.refuse(&peer, &"its role is not served here over this protocol"),
            }
            return;
        }
        if alpn != Some(ALPN_CONTROL) {
            return self.refuse(&peer, &"it names no protocol of ours");
        }
        match self.inside.take(&peer) {
            // A closed channel is a closed door.
            Ok(place) => {
                // The peer may have been removed since its handshake. Now it has a place: later removals find it.
                self.inside.end_removed(&self.denied.now());
                drop(self.sender.send(Connection::new(peer, stream, left, place)).await);
            }
            Err(why) => self.refuse(&peer, &why),
        }
    }

    /// Logs that a connection was refused: of many, only some.
    fn refuse(&self, who: &dyn fmt::Display, why: &dyn fmt::Display) {
        if let Some(left_out) = self.refusals.take() {
            tracing::warn!(%who, %why, left_out, "refused a connection");
        }
    }
}

/// Ends connections when their peers are removed from the cluster.
async fn end_removed(mut changes: watch::Receiver<Arc<Removed>>, inside: Weak<Mutex<Within>>) {
    while changes.changed().await.is_ok() {
        let Some(inside) = inside.upgrade().map(Inside) else { return };
        let removed = changes.borrow_and_update().clone();
        inside.end_removed(&removed);
    }
}

/// A connection whose peer is known.
pub struct Connection {
    peer: Peer,
    stream: Inner,
    /// When it ends: with the certificate of its peer, or before, if nothing is asked.
    ends: Pin<Box<Sleep>>,
    /// When its peer's certificate ends, until something was asked.
    unasked: Option<Instant>,
    place: ConnectionPermit,
}

impl Connection {
    fn new(peer: Peer, stream: Inner, left: Duration, place: ConnectionPermit) -> Self {
        let now = Instant::now();
        let ends = Box::pin(sleep_until(now + left.min(FIRST_ASKED)));
        Self { peer, stream, ends, unasked: Some(now + left), place }
    }

    /// Whether the connection has to end.
    fn over(&mut self, cx: &mut Context<'_>) -> bool {
        self.ends.as_mut().poll(cx).is_ready() || Pin::new(&mut self.place.told).poll(cx).is_ready()
    }
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
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.over(cx) {
            let why =
                "its time is over: it asked nothing, its certificate ended, or it was removed";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, why)));
        }
        let before = buffer.filled().len();
        let inner = Pin::new(&mut *this);
        let read = delegate!(inner, stream => stream.poll_read(cx, buffer));
        if buffer.filled().len() > before
            && let Some(until) = this.unasked.take()
        {
            this.ends.as_mut().reset(until);
            // So that it is waited for.
            let _ = this.ends.as_mut().poll(cx);
        }
        read
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
