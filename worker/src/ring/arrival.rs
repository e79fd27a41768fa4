//! Connections that other devices make: each sends a handshake, and waits until this device is placed in the epoch that
//! it names.

use super::{
    handshake::{Greeting, HANDSHAKE_BYTES, Handshake, HandshakeReply, ProbeHandshake},
    quic::{Connection, Quic, QuicPipe},
    stream::Stream,
};
use galaxy_common::{DeviceName, Epoch, LinkType, Rank};
use galaxy_proto::{
    channel::ConnectError,
    door::{AdmissionLimits, Peer, Sampled, Seats, counted},
    identity::{Identity, Role},
};
use std::{
    io,
    net::{IpAddr, UdpSocket},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, watch},
    time::{Instant, timeout},
};
use tokio_rustls::server::TlsStream;

/// Arrivals at one time: some for each device that a plan can have, so that all may come before this device is
/// placed, and few for each, so that none holds them all.
const ARRIVALS: AdmissionLimits =
    AdmissionLimits { most: 2 * galaxy_common::plan::MAX_DEVICES, each: 8 };
/// Arrivals without TLS at one time: no peer is known by name, and all devices of a machine have one address.
const PLAIN: AdmissionLimits = AdmissionLimits { most: 256, each: 128 };
/// How long a handshake may take to come.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// How long this device's own placement may take to come. The coordinator places all devices at once.
const PARK_DEADLINE: Duration = Duration::from_secs(10);

/// The peer that arrives, as far as it is known.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Who {
    Device(DeviceName),
    Address(IpAddr),
}

/// The place of a peer that arrives, given back on drop.
struct Seat {
    seats: Arc<Mutex<Seats<Who>>>,
    who: Who,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner).give(&self.who);
    }
}

/// Takes the connections of ring links, and makes those that this device dials.
#[derive(Clone)]
pub struct Ring {
    pub(super) expected: Arc<watch::Sender<Expected>>,
    /// The local address of links that this device dials, if not any will do.
    from: Option<IpAddr>,
    arrivals: Arc<Mutex<Seats<Who>>>,
    plain: Arc<Mutex<Seats<Who>>>,
    refusals: Arc<Sampled>,
    /// When the first certificate of a link ends, for the epoch whose links were formed last.
    ends: Arc<Mutex<Option<(Epoch, Instant)>>>,
    /// Takes devices that want to measure the link; none until [`Ring::probes`] was called.
    probes: Arc<Mutex<Option<mpsc::Sender<ProbeArrival>>>>,
    /// The socket for QUIC; empty until [`Ring::open_quic`] was called.
    quic: Arc<OnceLock<Quic>>,
}

/// A device that wants to measure the link, and waits to be welcomed.
pub(crate) struct ProbeArrival {
    stream: Incoming,
}

impl ProbeArrival {
    /// Welcomes the device.
    ///
    /// # Errors
    /// When it does not listen any more.
    pub(crate) async fn welcome(self) -> io::Result<Stream> {
        self.stream.welcome().await
    }
    /// Answers that the link cannot be measured now.
    pub(crate) async fn send_away(mut self) {
        drop(timeout(HANDSHAKE_DEADLINE, self.stream.answer(HandshakeReply::Busy)).await);
    }
}

/// The devices whose links are expected.
#[derive(Clone)]
pub(super) struct Expected {
    pub(super) epoch: Epoch,
    pub(super) plan: [u8; 32],
    pub(super) from: Vec<(Rank, DeviceName)>,
    pub(super) link: LinkType,
    /// Whether the epoch was cancelled, or its placement failed.
    pub(super) closed: bool,
    pub(super) arrived: mpsc::Sender<Arrival>,
}

/// A device that was expected and is here, and waits to be welcomed.
pub(super) struct Arrival {
    pub(super) from: Rank,
    pub(super) stream: Incoming,
}

/// A connection of any transport.
pub(super) enum Incoming {
    Tls(Box<TlsStream<TcpStream>>),
    Plain(TcpStream),
    Quic(Box<QuicPipe>),
}

impl Incoming {
    async fn handshake(&mut self) -> io::Result<[u8; HANDSHAKE_BYTES]> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        match self {
            Self::Tls(stream) => stream.read_exact(&mut bytes).await?,
            Self::Plain(stream) => stream.read_exact(&mut bytes).await?,
            Self::Quic(pipe) => return pipe.handshake().await,
        };
        Ok(bytes)
    }
    pub(super) async fn answer(&mut self, answer: HandshakeReply) -> io::Result<()> {
        let bytes = answer.encode();
        match self {
            Self::Tls(stream) => {
                stream.write_all(&bytes).await?;
                stream.flush().await
            }
            Self::Plain(stream) => stream.write_all(&bytes).await,
            Self::Quic(pipe) => pipe.answer(answer).await,
        }
    }

    /// Answers with a welcome, and hands the connection to threads that block.
    pub(super) async fn welcome(mut self) -> io::Result<Stream> {
        timeout(HANDSHAKE_DEADLINE, self.answer(HandshakeReply::Welcome)).await??;
        match self {
            Self::Plain(stream) => Stream::plain(stream),
            Self::Quic(pipe) => Ok(Stream::Quic(*pipe)),
            Self::Tls(stream) => {
                let (stream, session) = stream.into_inner();
                Stream::tls(stream, session.into())
            }
        }
    }
}

impl Default for Ring {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Ring {
    /// A ring that dials from this address over TCP, if not from any.
    pub fn new(from: Option<IpAddr>) -> Self {
        let nobody = Expected {
            epoch: Epoch(0),
            plan: [0; 32],
            from: Vec::new(),
            link: LinkType::Tls,
            closed: true,
            arrived: mpsc::channel(1).0,
        };
        Self {
            expected: Arc::new(watch::Sender::new(nobody)),
            from,
            arrivals: Arc::new(Mutex::new(Seats::new(ARRIVALS))),
            plain: Arc::new(Mutex::new(Seats::new(PLAIN))),
            refusals: Arc::default(),
            ends: Arc::default(),
            probes: Arc::default(),
            quic: Arc::default(),
        }
    }

    /// Notes when the links of an epoch must end, if they must.
    pub(super) fn links_end(&self, epoch: Epoch, at: Option<Instant>) {
        let ends = at.map(|at| (epoch, at));
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = ends;
    }
    /// When the links of an epoch must end, because the certificate of a device does.
    pub(crate) fn ends(&self, epoch: Epoch) -> Option<Instant> {
        let ends = *self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.filter(|(of, _)| *of == epoch).map(|(_, at)| at)
    }

    /// The local address of calls to other devices over TCP, if not any will do.
    pub(crate) fn dials_from(&self) -> Option<IpAddr> {
        self.from
    }
    /// Takes a connection that came with TLS.
    pub async fn arrive(self, peer: Peer, stream: TlsStream<TcpStream>) {
        self.take(peer, Incoming::Tls(Box::new(stream))).await;
    }
    /// Takes a connection that came without TLS.
    pub async fn arrive_plain(self, peer: Peer, stream: TcpStream) {
        self.take(peer, Incoming::Plain(stream)).await;
    }

    /// Takes a stream that came over QUIC.
    pub(super) async fn arrive_quic(self, peer: Peer, pipe: QuicPipe) {
        self.take(peer, Incoming::Quic(Box::new(pipe))).await;
    }
    /// Takes the stream that a peer opens over the connection that this device made.
    pub(super) async fn arrive_again(self, connection: Connection) {
        // Without a stream the link does not come, and the task that waits for it reports that.
        if let Ok(pipe) = connection.accept().await {
            self.arrive_quic(connection.peer(), pipe).await;
        }
    }

    /// Takes and makes connections over QUIC, too, until [`Ring::close_quic`], or until this ring is dropped
    /// everywhere. The socket is one of [`super::bind_quic`]. Once for each ring.
    ///
    /// # Errors
    /// When the system has no thread or timer left.
    pub fn open_quic(&self, socket: UdpSocket, identity: &Identity) -> io::Result<()> {
        // Arrivals need not dial: so a ring does not keep itself alive.
        let arrivals = Self { quic: Arc::default(), ..self.clone() };
        let arrive = move |peer, pipe| arrivals.clone().arrive_quic(peer, pipe);
        let opened = Quic::open(socket, identity, arrive)?;
        self.quic.set(opened).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }
    /// Closes all connections over QUIC.
    pub async fn close_quic(&self) {
        if let Some(quic) = self.quic.get() {
            quic.close().await;
        }
    }
    /// Connects to a device over QUIC.
    pub(super) async fn dial_quic(
        &self,
        address: &str,
        to: &DeviceName,
        patience: Duration,
    ) -> Result<Connection, ConnectError> {
        match self.quic.get() {
            Some(quic) => quic.dial(address, to, patience).await,
            None => Err(ConnectError::Io {
                address: address.to_owned(),
                source: io::Error::new(io::ErrorKind::Unsupported, "QUIC is not open here"),
            }),
        }
    }

    /// The devices that want to measure the link, from now on. At most one of them waits.
    pub(crate) fn probes(&self) -> mpsc::Receiver<ProbeArrival> {
        let (arrived, arrivals) = mpsc::channel(1);
        *self.probes.lock().unwrap_or_else(PoisonError::into_inner) = Some(arrived);
        arrivals
    }

    /// Takes a device that wants to measure the link: one of the cluster, by its certificate, or any peer where links
    /// without TLS are taken. What it may use of this device is bounded in time and bytes.
    async fn take_probe(&self, peer: Peer, handshake: ProbeHandshake, mut stream: Incoming) {
        let answer = match &peer.identity {
            Some((name, Role::Device)) if *name == handshake.name => HandshakeReply::Busy,
            None if matches!(stream, Incoming::Plain(_)) => HandshakeReply::Busy,
            _ => HandshakeReply::WrongName,
        };
        if answer == HandshakeReply::Busy {
            let probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let arrival = ProbeArrival { stream };
            let waits = match probes {
                Some(probes) => probes.try_send(arrival).map_err(|error| error.into_inner()),
                None => Err(arrival),
            };
            match waits {
                Ok(()) => return,
                Err(arrival) => stream = arrival.stream,
            }
        }
        self.refused(&peer, &format!("to measure it: {answer:?}"));
        drop(timeout(HANDSHAKE_DEADLINE, stream.answer(answer)).await);
    }

    /// A place for `peer`; none if all that it may have are taken.
    fn seat(&self, peer: &Peer, plain: bool) -> Option<Seat> {
        let seats = if plain { &self.plain } else { &self.arrivals };
        let who = match &peer.identity {
            Some((name, _)) => Who::Device(name.clone()),
            None => Who::Address(counted(peer.address.ip())),
        };
        let taken = seats.lock().unwrap_or_else(PoisonError::into_inner).take(&who);
        match taken {
            Ok(()) => Some(Seat { seats: seats.clone(), who }),
            Err(why) => {
                self.refused(peer, &why);
                None
            }
        }
    }

    /// Logs that a link was refused: of many, only some.
    fn refused(&self, peer: &Peer, why: &dyn std::fmt::Display) {
        if let Some(left_out) = self.refusals.take() {
            tracing::warn!(%peer, %why, left_out, "refused a ring link");
        }
    }

    async fn take(self, peer: Peer, mut stream: Incoming) {
        let Some(_seat) = self.seat(&peer, matches!(stream, Incoming::Plain(_))) else { return };
        let handshake = match timeout(HANDSHAKE_DEADLINE, stream.handshake()).await {
            Ok(Ok(bytes)) => Greeting::decode(&bytes),
            Ok(Err(_)) | Err(_) => return tracing::debug!(%peer, "no handshake came"),
        };
        let handshake = match handshake {
            Ok(Greeting::Ring(handshake)) => handshake,
            Ok(Greeting::Probe(handshake)) => {
                return self.take_probe(peer, handshake, stream).await;
            }
            Err(error) => return self.refused(&peer, &error),
        };
        let mut expected = self.expected.subscribe();
        let wait = expected.wait_for(|expected| expected.epoch >= handshake.epoch);
        let expected = match timeout(PARK_DEADLINE, wait).await {
            Ok(Ok(expected)) => expected.clone(),
            Ok(Err(_)) | Err(_) => return tracing::debug!(%peer, "its epoch did not come"),
        };
        let answer = judge(&expected, &handshake, &peer, matches!(stream, Incoming::Plain(_)));
        if answer == HandshakeReply::Welcome {
            let arrival = Arrival { from: handshake.from, stream };
            // The channel is full or closed: the links of that epoch are formed, or it was given up.
            drop(expected.arrived.try_send(arrival));
        } else {
            self.refused(&peer, &format!("epoch {}: {answer:?}", handshake.epoch));
            drop(timeout(HANDSHAKE_DEADLINE, stream.answer(answer)).await);
        }
    }
}

/// Checks the handshake of a ring link: its epoch, the certificate of the peer, its rank and name, and the plan.
fn judge(expected: &Expected, handshake: &Handshake, peer: &Peer, plain: bool) -> HandshakeReply {
    if handshake.epoch != expected.epoch || expected.closed {
        return HandshakeReply::Stale;
    }
    let certified = match &peer.identity {
        Some((name, role)) => *role == Role::Device && *name == handshake.name,
        None => plain && expected.link == LinkType::Plain,
    };
    let named =
        expected.from.iter().any(|(rank, name)| *rank == handshake.from && *name == handshake.name);
    if !certified || !named {
        return HandshakeReply::WrongName;
    }
    if handshake.plan != expected.plan {
        return HandshakeReply::OtherPlan;
    }
    HandshakeReply::Welcome
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A peer that takes all places that it may have waits for its own.
    #[test]
    fn one_device_cannot_take_the_link_places_of_others() {
        let ring = Ring::default();
        let device = |name: &str| Peer {
            identity: Some((DeviceName::new(name).unwrap(), Role::Device)),
            address: ([127, 0, 0, 1], 1).into(),
        };
        let greedy: Vec<_> =
            (0..1000).filter_map(|_| ring.seat(&device("greedy"), false)).collect();
        assert_eq!(greedy.len(), 8);
        let others: Vec<_> = (0..galaxy_common::plan::MAX_DEVICES)
            .filter_map(|i| ring.seat(&device(&format!("d{i}")), false))
            .collect();
        assert_eq!(others.len(), galaxy_common::plan::MAX_DEVICES);
        drop(greedy);
        assert!(ring.seat(&device("greedy"), false).is_some());
    }

    #[test]
    fn only_devices_of_the_plan_may_link() {
        let name = |text: &str| DeviceName::new(text).unwrap();
        let mut expected = Expected {
            epoch: Epoch(3),
            plan: [1; 32],
            from: vec![(Rank(1), name("b"))],
            link: LinkType::Tls,
            closed: false,
            arrived: mpsc::channel(1).0,
        };
        let handshake =
            Handshake { epoch: Epoch(3), from: Rank(1), plan: [1; 32], name: name("b") };
        let peer = |identity| Peer { identity, address: ([127, 0, 0, 1], 1).into() };
        let device = |text: &str| peer(Some((name(text), Role::Device)));
        let judged = |handshake: &Handshake, peer: &Peer| judge(&expected, handshake, peer, false);

        assert_eq!(judged(&handshake, &device("b")), HandshakeReply::Welcome);
        // A device of the cluster that uses another's name, and one that is not in the plan.
        assert_eq!(judged(&handshake, &device("c")), HandshakeReply::WrongName);
        let c = Handshake { name: name("c"), ..handshake.clone() };
        assert_eq!(judged(&c, &device("c")), HandshakeReply::WrongName);
        let client = peer(Some((name("b"), Role::Client)));
        assert_eq!(judged(&handshake, &client), HandshakeReply::WrongName);
        assert_eq!(judged(&handshake, &peer(None)), HandshakeReply::WrongName);
        let other_rank = Handshake { from: Rank(2), ..handshake.clone() };
        assert_eq!(judged(&other_rank, &device("b")), HandshakeReply::WrongName);
        let stale = Handshake { epoch: Epoch(2), ..handshake.clone() };
        assert_eq!(judged(&stale, &device("b")), HandshakeReply::Stale);
        let other = Handshake { plan: [2; 32], ..handshake.clone() };
        assert_eq!(judged(&other, &device("b")), HandshakeReply::OtherPlan);
        // An epoch that was cancelled is over: that is no fault of a device that comes late.
        expected.closed = true;
        assert_eq!(judge(&expected, &handshake, &device("b"), false), HandshakeReply::Stale);
    }
}
