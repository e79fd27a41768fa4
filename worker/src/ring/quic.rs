//! Links over QUIC: one UDP socket for each worker, one connection for each pair of devices, one
//! stream for each link between them.
//!
//! A thread of its own drives the socket and all connections. The threads of lanes wait, parked, until it has room
//! for what they send or bytes that they receive: much of either, since packets may come one by one.
//!
//! Sealed bytes belong to the transport until the peer has them, so what a lane sends is copied, at most a window of
//! it and a batch. There are no streams for single tiles: lanes expect tiles in the order in which they were sent, so
//! that none could overtake another.

mod door;

use super::{
    closed::closed_or,
    handshake::{HANDSHAKE_BYTES, HandshakeReply, WELCOME_BYTES},
};
use bytes::Bytes;
use galaxy_common::{DeviceName, FrameHeader};
use galaxy_engine::link::{LinkCloser, LinkError, LinkSender};
use galaxy_proto::{
    ALPN_RING,
    channel::{ConnectError, refused_them, refused_us, resolve},
    door::Peer,
    identity::{Identity, Role, peer, server_name, time_left},
};
use quinn::{
    AckFrequencyConfig, ClientConfig, ConnectionError, Endpoint, EndpointConfig,
    MtuDiscoveryConfig, ReadError, ReadExactError, RecvStream, SendStream, ServerConfig,
    TokioRuntime, TransportConfig, VarInt, WriteError,
    congestion::BbrConfig,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{AlertDescription, pki_types::CertificateDer};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use std::{
    io::{self, Read},
    net::{SocketAddr, UdpSocket},
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Wake, Waker},
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    time::timeout,
};

/// Bytes of a stream that are under way or wait to be read. More than fast links of a building
/// need, and so little that it passes through a core's cache: with eight times as much a byte
/// costs up to a half more.
const WINDOW: u32 = 512 << 10;
/// Bytes of one allocation that the transport owns until they are acknowledged.
const PIECE: usize = 64 << 10;
/// Bytes that are handed over before a lane is woken for more.
const BATCH: usize = 256 << 10;
/// Bytes for which a lane that reads is woken, unless it wants fewer: of packets that come one by
/// one, it is not woken for each.
const ENOUGH: usize = 32 << 10;
/// Packets that a peer takes before it acknowledges them: fewer than are sent before the first acknowledgement.
const UNACKNOWLEDGED: u32 = 8;
/// The longest time that a peer waits for so many packets before it acknowledges.
const LATEST: Duration = Duration::from_millis(5);
/// Bytes that wait in the system for the thread of the transport. It has less work than what a burst brings.
const SOCKET_BUFFER: usize = 4 << 20;
/// A peer that sends nothing for so long is asked for a sign of life, as over TCP.
const ASK: Duration = Duration::from_secs(1);
/// A peer that sends nothing for so long is lost, as over TCP.
const SILENCE: Duration = Duration::from_secs(4);
/// The largest packet that is tried. Packets begin with what every path carries, and grow to what this one does: 1472
/// bytes on Ethernet, this on loopback or in large frames. Ten go into one call of the system, which takes 64 KiB at
/// most.
const LARGEST_PACKET: u16 = 6500;
/// The first guess at a round trip: packets that are lost before there is a measurement are sent
/// again after some of these. For the internet it is three times as much.
const FIRST_TRIP: Duration = Duration::from_millis(100);
/// How long peers have to take note that this side closes.
const CLOSE_DEADLINE: Duration = Duration::from_millis(300);

/// The UDP socket of a worker, and the thread that drives it.
pub(super) struct Quic {
    endpoint: Endpoint,
    runtime: Handle,
    /// The thread, with what stops it; none once it was stopped.
    thread: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

/// Binds the socket that [`super::Ring::open_quic`] takes.
///
/// # Errors
/// The error of the system.
pub fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

impl Quic {
    /// Serves, and is ready to dial. Each stream that a peer opens is handed to `arrive`.
    pub fn open<F: Future<Output = ()> + Send>(
        socket: UdpSocket,
        identity: &Identity,
        arrive: impl Fn(Peer, QuicPipe) -> F + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let unfit = |error| io::Error::other(format!("QUIC with this identity: {error}"));
        let transport = Arc::new(transport());
        let tls = QuicServerConfig::try_from(identity.server_config(&[ALPN_RING]));
        let mut server = ServerConfig::with_crypto(Arc::new(tls.map_err(unfit)?));
        server.transport_config(transport.clone()).max_incoming(door::HANDSHAKES);
        let tls = QuicClientConfig::try_from(identity.client_config(ALPN_RING));
        let mut client = ClientConfig::new(Arc::new(tls.map_err(unfit)?));
        client.transport_config(transport);

        // The system grants as much of it as it allows.
        let buffers = SockRef::from(&socket);
        drop(buffers.set_recv_buffer_size(SOCKET_BUFFER));
        drop(buffers.set_send_buffer_size(SOCKET_BUFFER));
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let mut endpoint = {
            let _inside = handle.enter();
            let mut config = EndpointConfig::default();
            config.max_udp_payload_size(LARGEST_PACKET).expect("more than 1200 bytes");
            Endpoint::new(config, Some(server), socket, Arc::new(TokioRuntime))?
        };
        endpoint.set_default_client_config(client);
        let (stop, stopping) = oneshot::channel::<()>();
        let served = endpoint.clone();
        let body = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = door::accept(served.clone(), arrive) => {}
                    // Stopped, or the handle was dropped.
                    _ = stopping => {}
                }
                served.close(VarInt::from_u32(0), b"");
                drop(timeout(CLOSE_DEADLINE, served.wait_idle()).await);
            });
        };
        let thread = thread::Builder::new().name("quic".to_owned()).spawn(body)?;
        Ok(Self { endpoint, runtime: handle, thread: Mutex::new(Some((stop, thread))) })
    }

    /// Connects to a device, within `patience`.
    ///
    /// # Errors
    /// Typed by what a person can do.
    pub async fn dial(
        &self,
        address: &str,
        to: &DeviceName,
        patience: Duration,
    ) -> Result<Connection, ConnectError> {
        let name = server_name(to, Role::Device).to_str().into_owned();
        let at = over_udp(address);
        let connect = async {
            let mut failed = None;
            for found in resolve(address).await? {
                let connecting = {
                    // Whichever thread dials, the thread of the transport drives the connection.
                    let _inside = self.runtime.enter();
                    self.endpoint.connect(found, &name)
                };
                let error = match connecting {
                    Ok(connecting) => match connecting.await {
                        Ok(inner) => {
                            return Ok(Connection { inner, runtime: self.runtime.clone() });
                        }
                        Err(error) => explain(&at, to, error, patience),
                    },
                    Err(error) => {
                        let source = io::Error::other(error);
                        ConnectError::Io { address: at.clone(), source }
                    }
                };
                failed = Some(error);
            }
            Err(failed.unwrap_or_else(|| ConnectError::Address { address: address.to_owned() }))
        };
        timeout(patience, connect).await.unwrap_or_else(|_| {
            Err(ConnectError::TimedOut { address: at.clone(), after: patience })
        })
    }

    /// Closes all connections, and joins the thread.
    pub async fn close(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((stop, thread)) = thread {
            drop(stop);
            drop(tokio::task::spawn_blocking(move || thread.join()).await);
        }
    }
}

fn transport() -> TransportConfig {
    let mut packets = MtuDiscoveryConfig::default();
    packets.upper_bound(LARGEST_PACKET);
    let mut answers = AckFrequencyConfig::default();
    answers.ack_eliciting_threshold(UNACKNOWLEDGED.into()).max_ack_delay(Some(LATEST));
    let silence = SILENCE.try_into().expect("some seconds are fewer milliseconds than 2^62");
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(silence))
        .keep_alive_interval(Some(ASK))
        .initial_rtt(FIRST_TRIP)
        .mtu_discovery_config(Some(packets))
        .ack_frequency_config(Some(answers))
        // Each side opens one stream at most: its link.
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .stream_receive_window(VarInt::from_u32(WINDOW))
        .receive_window(VarInt::from_u32(WINDOW))
        .send_window(WINDOW.into())
        // A packet that is lost is most often one that the air lost.
        .congestion_controller_factory(Arc::new(BbrConfig::default()));
    transport
}

/// A connection with a device.
#[derive(Clone)]
pub(super) struct Connection {
    inner: quinn::Connection,
    /// The runtime of the thread that drives it.
    runtime: Handle,
}

impl Connection {
    /// Opens this side's stream.
    pub async fn open(&self) -> Result<QuicPipe, ConnectionError> {
        let (send, receive) = self.inner.open_bi().await?;
        Ok(QuicPipe { connection: self.clone(), send: Some(send), receive: Some(receive) })
    }

    /// Waits for the peer's stream.
    pub async fn accept(&self) -> Result<QuicPipe, ConnectionError> {
        let (send, receive) = self.inner.accept_bi().await?;
        Ok(QuicPipe { connection: self.clone(), send: Some(send), receive: Some(receive) })
    }

    /// The peer as the ring knows it.
    pub fn peer(&self) -> Peer {
        Peer { identity: self.identity(), address: self.inner.remote_address() }
    }

    fn identity(&self) -> Option<(DeviceName, Role)> {
        peer(&self.certificates()?).ok()
    }

    fn certificates(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.inner.peer_identity()?.downcast().ok().map(|shown| *shown)
    }

    /// How long the peer's certificate is still valid.
    pub fn time_left(&self) -> Option<Duration> {
        time_left(&self.certificates()?)
    }

    /// Why a handshake that seemed done has failed: the peer does not accept the certificate of this side.
    pub fn refusal(&self, address: &str, to: &DeviceName) -> Option<ConnectError> {
        let error = self.inner.close_reason().filter(|error| alert(error).is_some())?;
        Some(explain(&over_udp(address), to, error, SILENCE))
    }
}

/// Both directions of a stream. Neither exists any more once it has failed.
pub struct QuicPipe {
    connection: Connection,
    send: Option<SendStream>,
    receive: Option<RecvStream>,
}

impl QuicPipe {
    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) fn closer(&self) -> QuicCloser {
        QuicCloser(self.connection.clone())
    }

    fn send(&mut self) -> io::Result<&mut SendStream> {
        self.send.as_mut().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    fn receive(&mut self) -> io::Result<&mut RecvStream> {
        self.receive.as_mut().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    pub(super) async fn handshake(&mut self) -> io::Result<[u8; HANDSHAKE_BYTES]> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        self.receive()?.read_exact(&mut bytes).await.map_err(cut_short)?;
        Ok(bytes)
    }

    /// Sends a handshake, and waits for the answer.
    pub(super) async fn greet(
        &mut self,
        handshake: &[u8; HANDSHAKE_BYTES],
    ) -> io::Result<[u8; WELCOME_BYTES]> {
        self.send()?.write_all(handshake).await.map_err(unsent)?;
        let mut answer = [0; WELCOME_BYTES];
        self.receive()?.read_exact(&mut answer).await.map_err(cut_short)?;
        Ok(answer)
    }

    pub(super) async fn answer(&mut self, answer: HandshakeReply) -> io::Result<()> {
        let send = self.send()?;
        send.write_all(&answer.encode()).await.map_err(unsent)?;
        if answer != HandshakeReply::Welcome {
            // It is the last message: without the wait it would be gone with this side before the peer has it.
            drop(send.finish());
            drop(send.stopped().await);
        }
        Ok(())
    }

    /// Writes a frame; header and payload in one piece, if they are small.
    fn write(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
        silence: Option<Duration>,
    ) -> Result<(), LinkError> {
        let header = header.encode();
        let (with, mut rest) = payload.split_at(payload.len().min(PIECE - header.len()));
        let mut first = Vec::with_capacity(header.len() + with.len());
        first.extend_from_slice(&header);
        first.extend_from_slice(with);
        let mut batch = vec![Bytes::from(first)];
        loop {
            let (now, later) = rest.split_at(rest.len().min(BATCH - PIECE));
            batch.extend(now.chunks(PIECE).map(Bytes::copy_from_slice));
            self.hand_over(std::mem::take(&mut batch), silence).map_err(closed_or)?;
            rest = later;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Hands pieces to the transport. Where there is no room, a task on the transport's own thread waits for it: room
    /// comes packet by packet, and a lane is woken once, when all pieces are taken.
    fn hand_over(&mut self, mut batch: Vec<Bytes>, silence: Option<Duration>) -> io::Result<()> {
        let mut left = &mut batch[..];
        let send = self.send()?;
        while !left.is_empty() {
            match now(send.write_chunks(left)) {
                Some(written) => left = &mut left[written.map_err(unsent)?.chunks..],
                None => break,
            }
        }
        let left = left.len();
        let Some(mut send) = (left > 0).then(|| self.send.take()).flatten() else {
            return Ok(());
        };
        let taken = batch.len() - left;
        let (done, written) = oneshot::channel();
        self.connection.runtime.spawn(async move {
            let written = send.write_all_chunks(&mut batch[taken..]).await;
            // A lane that waits no longer has given the link up.
            drop(done.send(written.map(|()| send)));
        });
        let written = wait(written, silence)?.map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.send = Some(written.map_err(unsent)?);
        Ok(())
    }

    /// Reads what is there; if that is nothing, waits for what comes next, at best all that fits.
    fn read(&mut self, out: &mut [u8], silence: Option<Duration>) -> io::Result<usize> {
        if let Some(read) = now(self.receive()?.read(out)) {
            return Ok(read.map_err(unread)?.unwrap_or(0));
        }
        let Some(mut receive) = self.receive.take() else { return Ok(0) };
        let (enough, most) = (out.len().min(ENOUGH), out.len());
        let (done, came) = oneshot::channel();
        self.connection.runtime.spawn(async move {
            let mut came = Vec::new();
            let mut bytes = 0;
            while bytes < enough {
                match receive.read_chunk(most - bytes, true).await {
                    Ok(Some(chunk)) => {
                        bytes += chunk.bytes.len();
                        came.push(chunk.bytes);
                    }
                    Ok(None) => break,
                    // The next read returns the error.
                    Err(_) if bytes > 0 => break,
                    Err(error) => return drop(done.send(Err(error))),
                }
            }
            drop(done.send(Ok((came, receive))));
        });
        let came = wait(came, silence)?.map_err(|_| io::ErrorKind::BrokenPipe)?;
        let (came, receive) = came.map_err(unread)?;
        self.receive = Some(receive);
        let mut filled = 0;
        for bytes in came {
            out[filled..filled + bytes.len()].copy_from_slice(&bytes);
            filled += bytes.len();
        }
        Ok(filled)
    }
}

/// Closes a connection with all its links.
pub(super) struct QuicCloser(Connection);

impl LinkCloser for QuicCloser {
    fn close(&self) {
        self.0.inner.close(VarInt::from_u32(0), b"");
    }
}

pub(super) struct QuicSender(QuicPipe);

impl QuicSender {
    pub fn new(pipe: QuicPipe) -> Self {
        Self(pipe)
    }
}

impl LinkSender for QuicSender {
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        self.0.write(header, payload, None)
    }
}

/// The end from which a lane reads.
pub(crate) struct QuicReader {
    pipe: QuicPipe,
    silence: Option<Duration>,
}

impl QuicReader {
    /// Every read and write fails after `silence`, if that is given.
    pub(super) fn new(pipe: QuicPipe, silence: Option<Duration>) -> Self {
        Self { pipe, silence }
    }

    /// Sends a frame in the other direction.
    pub(super) fn write(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        self.pipe.write(header, payload, self.silence)
    }
}

impl Read for QuicReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.pipe.read(out, self.silence)
    }
}

/// The result of a future, if it is ready at once.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        Poll::Pending => None,
    }
}

/// A thread that sleeps until it is woken.
struct Parked(Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future on a thread that may block. An error of the kind `TimedOut` after `patience`.
fn wait<T>(future: impl Future<Output = T>, patience: Option<Duration>) -> io::Result<T> {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Parked(thread::current())));
    let mut context = Context::from_waker(&waker);
    let until = patience.map(|patience| Instant::now() + patience);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut context) {
            return Ok(done);
        }
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            None => thread::park(),
            Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
            Some(left) => thread::park_timeout(left),
        }
    }
}

fn unsent(error: WriteError) -> io::Error {
    match error {
        WriteError::ConnectionLost(error) => lost(error),
        error => io::Error::new(io::ErrorKind::BrokenPipe, error),
    }
}

fn unread(error: ReadError) -> io::Error {
    match error {
        ReadError::ConnectionLost(error) => lost(error),
        error => io::Error::new(io::ErrorKind::ConnectionReset, error),
    }
}

fn cut_short(error: ReadExactError) -> io::Error {
    match error {
        ReadExactError::ReadError(error) => unread(error),
        ReadExactError::FinishedEarly(_) => io::ErrorKind::UnexpectedEof.into(),
    }
}

pub(super) fn lost(error: ConnectionError) -> io::Error {
    let kind = match &error {
        ConnectionError::TimedOut => {
            let why = format!("the peer said nothing for {SILENCE:?}");
            return io::Error::new(io::ErrorKind::TimedOut, why);
        }
        ConnectionError::VersionMismatch | ConnectionError::TransportError(_) => {
            io::ErrorKind::InvalidData
        }
        _ => io::ErrorKind::ConnectionReset,
    };
    io::Error::new(kind, error)
}

/// The address as messages show it: a firewall may let TCP pass and not UDP.
fn over_udp(address: &str) -> String {
    format!("{address} (UDP)")
}

/// The TLS alert that ended a connection, and whether this side sent it.
fn alert(error: &ConnectionError) -> Option<(AlertDescription, bool)> {
    let (code, ours) = match error {
        ConnectionError::TransportError(error) => (u64::from(error.code), true),
        ConnectionError::ConnectionClosed(close) => (u64::from(close.error_code), false),
        _ => return None,
    };
    // RFC 9001, section 4.8.
    let alert = u8::try_from(code.checked_sub(0x100)?).ok()?;
    Some((AlertDescription::from(alert), ours))
}

/// The error of a connection, by what a person can do.
fn explain(
    address: &str,
    to: &DeviceName,
    error: ConnectionError,
    patience: Duration,
) -> ConnectError {
    let (at, source) = (address.to_owned(), |error| io::Error::other(format!("{error}")));
    match (alert(&error), &error) {
        (Some((alert, true)), _) => refused_them(address, (to, Role::Device), alert, source(error)),
        (Some((alert, false)), _) => refused_us(address, alert),
        (None, ConnectionError::TimedOut) => {
            ConnectError::TimedOut { address: at, after: patience }
        }
        (None, ConnectionError::VersionMismatch | ConnectionError::TransportError(_)) => {
            ConnectError::Tls { address: at, source: source(error) }
        }
        (None, _) => ConnectError::Io { address: at, source: source(error) },
    }
}

#[cfg(test)]
mod tests;
