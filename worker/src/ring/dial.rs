//! Dialling a peer, for a ring or to measure the link: connects, sends a handshake, and is welcomed.

use super::{
    arrival::Ring,
    error::RingError,
    handshake::{HANDSHAKE_BYTES, HandshakeReply, ProbeHandshake, WELCOME_BYTES},
    quic::{self, Connection},
    stream::Stream,
};
use galaxy_common::{DeviceName, LinkType};
use galaxy_proto::{
    ALPN_RING,
    channel::{ConnectError, dial, dial_plain},
    identity::{Identity, Role},
};
use std::{io, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{Instant, sleep, timeout_at},
};

/// The pause between attempts to reach a peer that is not there yet.
const RETRY: Duration = Duration::from_millis(200);
/// How long one attempt may take, without the peer's placement.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Where a peer is reached.
#[derive(Clone, Debug)]
pub struct PeerAddress {
    /// The address of its worker, as host:port.
    pub address: String,
    /// Port of its plain ring links, on the same host; 0 where it has none.
    pub plain_port: u16,
}

/// A link to be dialled.
pub(super) struct Dial {
    pub handshake: [u8; HANDSHAKE_BYTES],
    pub to: DeviceName,
    pub at: PeerAddress,
    pub link: LinkType,
    /// The connection that the peer made already, for its link to this device.
    pub over: Option<Connection>,
    pub identity: Identity,
    pub ring: Ring,
}

impl Ring {
    /// Dials a peer to measure the link to it. Tries once: a peer that is not there now is not
    /// measured.
    ///
    /// # Errors
    /// When it cannot be reached, or refuses.
    pub(crate) async fn dial_probe(
        &self,
        identity: &Identity,
        handshake: &ProbeHandshake,
        to: DeviceName,
        at: PeerAddress,
        link: LinkType,
    ) -> Result<Stream, RingError> {
        let (identity, ring) = (identity.clone(), self.clone());
        let dial = Dial { handshake: handshake.encode(), to, at, link, over: None, identity, ring };
        let once = dial.once(Instant::now() + ATTEMPT).await;
        once.map_err(|(Failure::Again(error) | Failure::Final(error))| error)
    }
}

/// The error of an attempt to dial, and whether another attempt may help.
enum Failure {
    Again(RingError),
    Final(RingError),
}

impl Dial {
    pub async fn until(self, deadline: Instant) -> Result<Stream, RingError> {
        loop {
            match self.once(deadline).await {
                Ok(stream) => return Ok(stream),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Again(error))
                    if Instant::now() + RETRY >= deadline || self.over.is_some() =>
                {
                    return Err(error);
                }
                Err(Failure::Again(_)) => sleep(RETRY).await,
            }
        }
    }

    async fn once(&self, deadline: Instant) -> Result<Stream, Failure> {
        match self.link {
            LinkType::Plain => {
                if self.at.plain_port == 0 {
                    return Err(Failure::Final(RingError::NoPlain { peer: self.to.clone() }));
                }
                let host = self.at.address.rsplit_once(':').map_or("", |(host, _)| host);
                let address = format!("{host}:{}", self.at.plain_port);
                let dialled = dial_plain(&address, self.ring.dials_from(), ATTEMPT).await;
                let mut stream = dialled.map_err(|error| self.unreached(error))?;
                let answer = self.greet(&mut stream, deadline).await;
                self.judge(answer.map_err(|error| self.broken(error))?)?;
                Stream::plain(stream).map_err(|error| self.broken(error))
            }
            LinkType::Tls => {
                let config = self.identity.client_config(ALPN_RING);
                let peer = (&self.to, Role::Device);
                let dialled =
                    dial(&self.at.address, config, self.ring.dials_from(), peer, ATTEMPT).await;
                let mut stream = dialled.map_err(|error| self.unreached(error))?;
                let answer = self.greet(&mut stream, deadline).await;
                self.judge(answer.map_err(|error| self.broken(error))?)?;
                let (stream, session) = stream.into_inner();
                Stream::tls(stream, session.into()).map_err(|error| self.broken(error))
            }
            LinkType::Quic => {
                let connection = match &self.over {
                    Some(connection) => connection.clone(),
                    None => {
                        let dialled = self.ring.dial_quic(&self.at.address, &self.to, ATTEMPT);
                        dialled.await.map_err(|error| self.unreached(error))?
                    }
                };
                let greeted = async {
                    let mut pipe = connection.open().await.map_err(quic::lost)?;
                    let answer = timeout_at(deadline, pipe.greet(&self.handshake)).await??;
                    Ok((pipe, answer))
                };
                let (pipe, answer) = greeted.await.map_err(|error| {
                    let refused = connection.refusal(&self.at.address, &self.to);
                    refused.map_or_else(|| self.broken(error), |error| self.unreached(error))
                })?;
                self.judge(answer)?;
                Ok(Stream::Quic(pipe))
            }
        }
    }

    /// Sends a handshake. The answer comes once the peer is placed too.
    async fn greet(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        deadline: Instant,
    ) -> io::Result<[u8; WELCOME_BYTES]> {
        stream.write_all(&self.handshake).await?;
        stream.flush().await?;
        let mut answer = [0; WELCOME_BYTES];
        timeout_at(deadline, stream.read_exact(&mut answer)).await??;
        Ok(answer)
    }

    fn unreached(&self, source: ConnectError) -> Failure {
        let retryable = source.retryable();
        let error = RingError::Connect { peer: self.to.clone(), source };
        if retryable { Failure::Again(error) } else { Failure::Final(error) }
    }

    fn broken(&self, source: io::Error) -> Failure {
        Failure::Again(RingError::Io { peer: self.to.clone(), source })
    }

    fn judge(&self, answer: [u8; WELCOME_BYTES]) -> Result<(), Failure> {
        match HandshakeReply::decode(&answer) {
            Ok(HandshakeReply::Welcome) => Ok(()),
            Ok(answer) => Err(Failure::Final(RingError::Refused { peer: self.to.clone(), answer })),
            Err(source) => {
                Err(Failure::Final(RingError::Handshake { peer: self.to.clone(), source }))
            }
        }
    }
}
