//! Forming the links of an epoch: dial those we send to, welcome those we receive from.

use super::{
    arrival::{Expected, Ring},
    hello::{Answer, HELLO_BYTES, Hello, HelloError, ProbeHello, WELCOME_BYTES},
    tcp::Stream,
};
use galaxy_common::{DeviceName, Epoch, Plan, Rank};
use galaxy_engine::link::Links;
use galaxy_proto::{
    ALPN_RING,
    channel::{ConnectError, dial, dial_plain},
    identity::{Identity, Role},
};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};

/// For all links of an epoch to stand. The coordinator places all devices at once; those that
/// answer late have this long.
const FORM_DEADLINE: Duration = Duration::from_secs(15);
/// Between attempts to reach a peer that is not there yet.
const RETRY: Duration = Duration::from_millis(200);
/// For one attempt, without the peer's placement.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Where a peer is reached.
#[derive(Clone, Debug)]
pub struct PeerAddress {
    /// host:port of its worker.
    pub address: String,
    /// Port of its plain ring links, on the same host; 0 where it has none.
    pub plain_port: u16,
}

/// Why the links do not stand.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A peer that cannot be reached.
    #[error("no link to device {peer}: {source}")]
    Connect {
        /// Which.
        peer: DeviceName,
        /// Why.
        source: ConnectError,
    },
    /// A peer that refused us.
    #[error("device {peer} refused the link: {}", match answer {
        Answer::Stale => "it is in a later epoch, or was told to give this one up",
        Answer::WrongName => "it does not know us as a device of its plan",
        Answer::OtherPlan => "it was placed with another plan",
        Answer::Busy => "it holds a place in a plan, or measures already: stop the coordinator",
        Answer::Welcome => "it did not",
    })]
    Refused {
        /// Which.
        peer: DeviceName,
        /// What it said.
        answer: Answer,
    },
    /// A peer that speaks otherwise.
    #[error("device {peer} cannot be understood: {source}")]
    Hello {
        /// Which.
        peer: DeviceName,
        /// Why.
        source: HelloError,
    },
    /// A peer without plain links.
    #[error("device {peer} takes no plain ring links: start its worker with --plain")]
    NoPlain {
        /// Which.
        peer: DeviceName,
    },
    /// Peers that did not come.
    #[error("no link from device {peer} came within {after:?}: is it placed, and can it reach us?")]
    Absent {
        /// Which.
        peer: DeviceName,
        /// How long we waited.
        after: Duration,
    },
    /// A socket that failed.
    #[error("the link with device {peer} failed: {source}")]
    Io {
        /// Which.
        peer: DeviceName,
        /// Why.
        source: io::Error,
    },
}

impl RingError {
    /// The device at the other end.
    pub fn peer(&self) -> &DeviceName {
        match self {
            Self::Connect { peer, .. }
            | Self::Refused { peer, .. }
            | Self::Hello { peer, .. }
            | Self::NoPlain { peer }
            | Self::Absent { peer, .. }
            | Self::Io { peer, .. } => peer,
        }
    }
    /// Whether a later placement may succeed with nobody doing anything.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Connect { source, .. } => source.retryable(),
            Self::Refused { answer, .. } => matches!(answer, Answer::Stale | Answer::Busy),
            Self::Absent { .. } | Self::Io { .. } => true,
            Self::Hello { .. } | Self::NoPlain { .. } => false,
        }
    }
}

/// The links that a device needs.
pub struct Formation {
    /// Of which epoch.
    pub epoch: Epoch,
    /// Our rank.
    pub rank: Rank,
    /// Digest of the plan.
    pub digest: [u8; 32],
    /// The plan.
    pub plan: Arc<Plan>,
    /// Where each rank is reached.
    pub peers: Vec<PeerAddress>,
    /// Whether links go without TLS.
    pub plain: bool,
    /// All pairs (from, to) of the plan.
    pub links: Vec<(Rank, Rank)>,
}

impl Ring {
    /// Forms all links of an epoch. Whoever waits for an earlier epoch is sent away.
    ///
    /// # Errors
    /// When a peer cannot be reached, refuses, or does not come in time.
    ///
    /// # Cancel safety
    /// Dropping it closes what was formed.
    pub async fn form(&self, identity: &Identity, wanted: Formation) -> Result<Links, RingError> {
        let deadline = Instant::now() + FORM_DEADLINE;
        let name = |rank: Rank| wanted.plan.ring[rank.index()].name.clone();
        let mut awaited: Vec<(Rank, DeviceName)> = Vec::new();
        let mut dials = JoinSet::new();
        for &(from, to) in &wanted.links {
            if to == wanted.rank {
                awaited.push((from, name(from)));
            } else if from == wanted.rank {
                let dial = Dial {
                    hello: Hello {
                        epoch: wanted.epoch,
                        from,
                        plan: wanted.digest,
                        name: name(from),
                    }
                    .encode(),
                    to: name(to),
                    at: wanted.peers[to.index()].clone(),
                    plain: wanted.plain,
                    identity: identity.clone(),
                };
                dials.spawn(async move { dial.until(deadline).await.map(|link| (to, link)) });
            }
        }
        let (arrived, mut arrivals) = mpsc::channel(awaited.len().max(1));
        self.expected.send_if_modified(|expected| {
            // A placement that was overtaken or cancelled must not take the place of what is.
            let over = wanted.epoch < expected.epoch
                || (wanted.epoch == expected.epoch && expected.closed);
            if !over {
                *expected = Expected {
                    epoch: wanted.epoch,
                    plan: wanted.digest,
                    from: awaited.clone(),
                    plain: wanted.plain,
                    closed: false,
                    arrived,
                };
            }
            !over
        });

        let (mut to, mut from) = (Vec::new(), Vec::new());
        while !(awaited.is_empty() && dials.is_empty()) {
            tokio::select! {
                Some(dialled) = dials.join_next() => match dialled {
                    Ok(link) => to.push(link?),
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
                Some(arrival) = arrivals.recv() => {
                    if let Some(at) = awaited.iter().position(|(rank, _)| *rank == arrival.from) {
                        let (rank, peer) = awaited.swap_remove(at);
                        let link = arrival.stream.welcome().await;
                        from.push((rank, link.map_err(|source| RingError::Io { peer, source })?));
                    }
                }
                () = tokio::time::sleep_until(deadline), if !awaited.is_empty() => {
                    let (_, peer) = awaited.swap_remove(0);
                    return Err(RingError::Absent { peer, after: FORM_DEADLINE });
                }
            }
        }
        gather(to, from).map_err(|(rank, source)| RingError::Io { peer: name(rank), source })
    }

    /// Sends away whoever comes for `epoch` or an earlier one.
    pub fn close(&self, epoch: Epoch) {
        self.expected.send_if_modified(|expected| {
            let mine = expected.epoch <= epoch;
            if mine {
                expected.epoch = epoch;
                expected.from.clear();
                expected.closed = true;
            }
            mine
        });
    }
}

fn gather(to: Vec<(Rank, Stream)>, from: Vec<(Rank, Stream)>) -> Result<Links, (Rank, io::Error)> {
    let mut links = Links::default();
    for (rank, stream) in to {
        links.closers.push(stream.closer().map_err(|error| (rank, error))?);
        links.senders.push((rank, stream.sender()));
    }
    for (rank, stream) in from {
        links.closers.push(stream.closer().map_err(|error| (rank, error))?);
        links.receivers.push((rank, stream.receiver()));
    }
    Ok(links)
}

/// A link to be dialled.
struct Dial {
    hello: [u8; HELLO_BYTES],
    to: DeviceName,
    at: PeerAddress,
    plain: bool,
    identity: Identity,
}

/// Dials a peer to measure the link to it. Once: who is there now is measured.
///
/// # Errors
/// When it cannot be reached, or refuses.
pub(crate) async fn dial_probe(
    identity: &Identity,
    hello: &ProbeHello,
    to: DeviceName,
    at: PeerAddress,
    plain: bool,
) -> Result<Stream, RingError> {
    let dial = Dial { hello: hello.encode(), to, at, plain, identity: identity.clone() };
    let once = dial.once(Instant::now() + ATTEMPT).await;
    once.map_err(|(Failure::Again(error) | Failure::Final(error))| error)
}

/// What may help to try again.
enum Failure {
    Again(RingError),
    Final(RingError),
}

impl Dial {
    async fn until(self, deadline: Instant) -> Result<Stream, RingError> {
        loop {
            match self.once(deadline).await {
                Ok(stream) => return Ok(stream),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Again(error)) if Instant::now() + RETRY >= deadline => {
                    return Err(error);
                }
                Err(Failure::Again(_)) => sleep(RETRY).await,
            }
        }
    }

    async fn once(&self, deadline: Instant) -> Result<Stream, Failure> {
        let connect = |source: ConnectError| {
            let retryable = source.retryable();
            let error = RingError::Connect { peer: self.to.clone(), source };
            if retryable { Failure::Again(error) } else { Failure::Final(error) }
        };
        let io = |source| Failure::Again(RingError::Io { peer: self.to.clone(), source });
        let hello = self.hello;
        let mut answer = [0; WELCOME_BYTES];
        if self.plain {
            let host = self.at.address.rsplit_once(':').map_or("", |(host, _)| host);
            if self.at.plain_port == 0 {
                return Err(Failure::Final(RingError::NoPlain { peer: self.to.clone() }));
            }
            let address = format!("{host}:{}", self.at.plain_port);
            let mut stream = dial_plain(&address, ATTEMPT).await.map_err(connect)?;
            stream.write_all(&hello).await.map_err(io)?;
            read(&mut stream, &mut answer, deadline).await.map_err(io)?;
            self.judge(&answer)?;
            Stream::plain(stream).map_err(io)
        } else {
            let config = self.identity.client_config(ALPN_RING);
            let peer = (&self.to, Role::Device);
            let mut stream =
                dial(&self.at.address, config, peer, ATTEMPT).await.map_err(connect)?;
            stream.write_all(&hello).await.map_err(io)?;
            stream.flush().await.map_err(io)?;
            read(&mut stream, &mut answer, deadline).await.map_err(io)?;
            self.judge(&answer)?;
            let (stream, session) = stream.into_inner();
            Stream::tls(stream, session.into()).map_err(io)
        }
    }

    fn judge(&self, answer: &[u8; WELCOME_BYTES]) -> Result<(), Failure> {
        match Answer::decode(answer) {
            Ok(Answer::Welcome) => Ok(()),
            Ok(answer) => Err(Failure::Final(RingError::Refused { peer: self.to.clone(), answer })),
            Err(source) => Err(Failure::Final(RingError::Hello { peer: self.to.clone(), source })),
        }
    }
}

/// Waits for the answer; it comes once the peer is placed too.
async fn read(
    stream: &mut (impl tokio::io::AsyncRead + Unpin),
    answer: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    timeout_at(deadline, stream.read_exact(answer)).await??;
    Ok(())
}
