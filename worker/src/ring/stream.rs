//! Streams: connections after their handshake, as threads that block drive them, whatever the
//! transport. Hot path: no locks, no logging, no allocation of ours for each frame.

use super::{
    closed::closed_or,
    quic::{QuicPipe, QuicReader, QuicSender},
    tcp::{self, Closer, PlainSender, TlsReader, TlsSender},
};
use galaxy_common::{FrameHeader, HEADER_BYTES};
use galaxy_engine::link::{Accept, LinkCloser, LinkError, LinkReceiver, LinkSender, accept};
use galaxy_proto::identity::time_left;
use rustls::Connection;
use std::{
    io::{self, Read},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

/// Bytes of the buffer into which stale payloads are read.
const SCRATCH: usize = 16 << 10;

/// A connection that the async side has set up.
pub enum Stream {
    /// TCP with TLS. The session may hold bytes that were read with the handshake.
    Tls(TcpStream, Box<Connection>),
    /// TCP without TLS.
    Plain(TcpStream),
    /// A stream of a QUIC connection.
    Quic(QuicPipe),
}

impl Stream {
    /// Takes over a TCP connection from tokio.
    ///
    /// # Errors
    /// When the socket cannot be switched to blocking.
    pub fn plain(stream: tokio::net::TcpStream) -> io::Result<Self> {
        Ok(Self::Plain(tcp::blocking(stream)?))
    }
    /// Takes over a TLS connection from tokio.
    ///
    /// # Errors
    /// When the socket cannot be switched to blocking.
    pub fn tls(stream: tokio::net::TcpStream, session: Connection) -> io::Result<Self> {
        Ok(Self::Tls(tcp::blocking(stream)?, Box::new(session)))
    }

    /// How long the certificate of the peer is still valid; none where the peer showed none.
    pub(super) fn time_left(&self) -> Option<Duration> {
        match self {
            Self::Tls(_, session) => time_left(session.peer_certificates()?),
            Self::Plain(_) => None,
            Self::Quic(pipe) => pipe.connection().time_left(),
        }
    }

    /// A handle that closes the stream from any thread.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn closer(&self) -> io::Result<Arc<dyn LinkCloser>> {
        Ok(match self {
            Self::Tls(socket, _) | Self::Plain(socket) => Arc::new(Closer(socket.try_clone()?)),
            Self::Quic(pipe) => Arc::new(pipe.closer()),
        })
    }

    /// The sending end of a link.
    pub fn sender(self) -> Box<dyn LinkSender> {
        match self {
            Self::Plain(socket) => Box::new(PlainSender { socket }),
            Self::Tls(socket, session) => Box::new(TlsSender::new(socket, session)),
            Self::Quic(pipe) => Box::new(QuicSender::new(pipe)),
        }
    }

    /// The receiving end of a link.
    pub fn receiver(self) -> Box<dyn LinkReceiver> {
        match self.duplex(None) {
            Duplex::Plain(receiver) => Box::new(receiver),
            Duplex::Tls(receiver) => Box::new(receiver),
            Duplex::Quic(receiver) => Box::new(receiver),
        }
    }

    /// Both ends in one, for a thread that sends and receives by turns. Every read and every write
    /// fails after `silence`, if that is given.
    pub(crate) fn duplex(self, silence: Option<Duration>) -> Duplex {
        if let (Some(_), Self::Tls(socket, _) | Self::Plain(socket)) = (silence, &self) {
            // Only a duration of zero is refused, and then there is no limit.
            drop(socket.set_read_timeout(silence).and(socket.set_write_timeout(silence)));
        }
        match self {
            Self::Plain(socket) => Duplex::Plain(Receiver::of(socket)),
            Self::Tls(socket, session) => {
                Duplex::Tls(Receiver::of(TlsReader::new(socket, session)))
            }
            Self::Quic(pipe) => Duplex::Quic(Receiver::of(QuicReader::new(pipe, silence))),
        }
    }
}

/// A link in both directions, which take turns.
pub(crate) enum Duplex {
    /// Over TCP without TLS.
    Plain(Receiver<TcpStream>),
    /// Over TCP with TLS.
    Tls(Receiver<TlsReader>),
    /// Over a stream of QUIC.
    Quic(Receiver<QuicReader>),
}

impl Duplex {
    /// Sends a frame, as [`LinkSender::send`] does.
    pub(crate) fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        match self {
            Self::Plain(receiver) => tcp::write(&mut receiver.source, header, payload),
            Self::Tls(receiver) => receiver.source.write(header, payload),
            Self::Quic(receiver) => receiver.source.write(header, payload),
        }
    }

    /// Receives a frame, as [`LinkReceiver::receive`] does.
    pub(crate) fn receive(
        &mut self,
        wanted: &FrameHeader,
        payload: &mut [u8],
    ) -> Result<(), LinkError> {
        match self {
            Self::Plain(receiver) => receiver.receive(wanted, payload),
            Self::Tls(receiver) => receiver.receive(wanted, payload),
            Self::Quic(receiver) => receiver.receive(wanted, payload),
        }
    }
}

/// Reads frames from a source.
pub(crate) struct Receiver<R> {
    source: R,
    scratch: Box<[u8]>,
}

impl<R: Read + Send> LinkReceiver for Receiver<R> {
    fn receive(&mut self, wanted: &FrameHeader, payload: &mut [u8]) -> Result<(), LinkError> {
        loop {
            let mut header = [0; HEADER_BYTES];
            self.source.read_exact(&mut header).map_err(closed_or)?;
            let got = FrameHeader::decode(&header)?;
            match accept(wanted, &got)? {
                Accept::Take if got.payload as usize == payload.len() => {
                    return self.source.read_exact(payload).map_err(closed_or);
                }
                Accept::Take => {
                    let (got, room) = (got.payload as usize, payload.len());
                    return Err(LinkError::Length { got, room });
                }
                Accept::Drop => self.skip(got.payload as usize)?,
            }
        }
    }
}

impl<R: Read> Receiver<R> {
    fn of(source: R) -> Self {
        Self { source, scratch: vec![0; SCRATCH].into_boxed_slice() }
    }

    fn skip(&mut self, mut bytes: usize) -> Result<(), LinkError> {
        while bytes > 0 {
            let part = bytes.min(self.scratch.len());
            self.source.read_exact(&mut self.scratch[..part]).map_err(closed_or)?;
            bytes -= part;
        }
        Ok(())
    }
}
