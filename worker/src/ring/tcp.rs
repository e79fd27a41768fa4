//! Links over TCP, with TLS or plain. Hot path: no locks, no logging, no allocation of ours for
//! each frame.
//!
//! The handshake is done by the async side; a link then owns a blocking socket, because each of
//! its ends is driven by an I/O thread of its own.

use galaxy_common::{FrameHeader, HEADER_BYTES};
use galaxy_engine::link::{Accept, LinkCloser, LinkError, LinkReceiver, LinkSender, accept};
use rustls::Connection;
use socket2::{SockRef, TcpKeepalive};
use std::{
    io::{self, BufReader, IoSlice, Read, Write},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::Duration,
};

/// Cipher text that waits for the socket: enough to keep it busy while the next part is sealed.
const SEND_BUFFER: usize = 256 << 10;
/// Bytes taken from the socket at once; rustls asks for 4 KiB at a time.
const RECEIVE_BUFFER: usize = 128 << 10;
/// When a peer that says nothing is asked whether it is there, and how often again. One that was
/// unplugged is known after four seconds; one that is slow has a system that answers for it.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(1))
    .with_interval(Duration::from_secs(1))
    .with_retries(3);
/// What stale payloads are read into.
const SCRATCH: usize = 16 << 10;

/// A connection that the async side has set up.
pub enum Stream {
    /// With TLS. The session may hold bytes that were read with the handshake.
    Tls(TcpStream, Box<Connection>),
    /// Without.
    Plain(TcpStream),
}

impl Stream {
    /// Takes over from tokio.
    ///
    /// # Errors
    /// When the socket cannot be made blocking.
    pub fn plain(stream: tokio::net::TcpStream) -> io::Result<Self> {
        Ok(Self::Plain(blocking(stream)?))
    }
    /// Takes over from tokio.
    ///
    /// # Errors
    /// When the socket cannot be made blocking.
    pub fn tls(stream: tokio::net::TcpStream, session: Connection) -> io::Result<Self> {
        Ok(Self::Tls(blocking(stream)?, Box::new(session)))
    }

    fn socket(&self) -> &TcpStream {
        match self {
            Self::Tls(socket, _) | Self::Plain(socket) => socket,
        }
    }

    /// What closes it from anywhere.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn closer(&self) -> io::Result<Arc<dyn LinkCloser>> {
        Ok(Arc::new(Closer(self.socket().try_clone()?)))
    }

    /// The sending end.
    pub fn sender(self) -> Box<dyn LinkSender> {
        match self {
            Self::Plain(socket) => Box::new(PlainSender { socket }),
            Self::Tls(socket, mut session) => {
                session.set_buffer_limit(Some(SEND_BUFFER));
                Box::new(TlsSender { socket, session })
            }
        }
    }

    /// The receiving end.
    pub fn receiver(self) -> Box<dyn LinkReceiver> {
        match self.duplex(None) {
            Duplex::Plain(receiver) => Box::new(receiver),
            Duplex::Tls(receiver) => Box::new(receiver),
        }
    }

    /// Both ends in one hand, for who sends and receives by turns. Every read and every write
    /// fails after `silence`, if that is given.
    pub(crate) fn duplex(self, silence: Option<Duration>) -> Duplex {
        if silence.is_some() {
            let socket = self.socket();
            // Only a duration of zero is refused, and then there is no limit.
            drop(socket.set_read_timeout(silence).and(socket.set_write_timeout(silence)));
        }
        let scratch = vec![0; SCRATCH].into_boxed_slice();
        match self {
            Self::Plain(socket) => Duplex::Plain(Receiver { source: socket, scratch }),
            Self::Tls(socket, mut session) => {
                session.set_buffer_limit(Some(SEND_BUFFER));
                let socket = BufReader::with_capacity(RECEIVE_BUFFER, socket);
                Duplex::Tls(Receiver { source: TlsReader { socket, session }, scratch })
            }
        }
    }
}

fn blocking(stream: tokio::net::TcpStream) -> io::Result<TcpStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE)?;
    Ok(stream)
}

struct Closer(TcpStream);

impl LinkCloser for Closer {
    fn close(&self) {
        // An error says that it is closed already.
        self.0.shutdown(Shutdown::Both).ok();
    }
}

struct PlainSender {
    socket: TcpStream,
}

impl LinkSender for PlainSender {
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        write(&mut self.socket, header, payload)
    }
}

/// Writes a frame as it is.
fn write(socket: &mut TcpStream, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
    let header = header.encode();
    let mut sent = 0;
    // Header and payload in one packet; whatever is left after that is payload.
    while sent < HEADER_BYTES {
        let parts = [IoSlice::new(&header[sent..]), IoSlice::new(payload)];
        match socket.write_vectored(&parts) {
            Ok(0) => return Err(LinkError::Closed),
            Ok(bytes) => sent += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(closed_or(error)),
        }
    }
    socket.write_all(&payload[sent - HEADER_BYTES..]).map_err(closed_or)
}

/// Seals bytes; writes to the socket whenever the session's buffer is full.
fn seal(
    socket: &mut TcpStream,
    session: &mut Connection,
    mut bytes: &[u8],
) -> Result<(), LinkError> {
    while !bytes.is_empty() {
        let taken = session.writer().write(bytes)?;
        bytes = &bytes[taken..];
        if taken == 0 || !bytes.is_empty() {
            flush(socket, session)?;
        }
    }
    Ok(())
}

fn flush(socket: &mut TcpStream, session: &mut Connection) -> Result<(), LinkError> {
    while session.wants_write() {
        match session.write_tls(socket) {
            Ok(0) => return Err(LinkError::Closed),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(closed_or(error)),
        }
    }
    Ok(())
}

/// Writes a frame through a session.
fn write_sealed(
    socket: &mut TcpStream,
    session: &mut Connection,
    header: &FrameHeader,
    payload: &[u8],
) -> Result<(), LinkError> {
    seal(socket, session, &header.encode())?;
    seal(socket, session, payload)?;
    flush(socket, session)
}

struct TlsSender {
    socket: TcpStream,
    session: Box<Connection>,
}

impl LinkSender for TlsSender {
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        write_sealed(&mut self.socket, &mut self.session, header, payload)
    }
}

/// Opens what a session sealed.
pub(crate) struct TlsReader {
    socket: BufReader<TcpStream>,
    session: Box<Connection>,
}

impl Read for TlsReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if self.session.read_tls(&mut self.socket)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.session
                .process_new_packets()
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}

/// A link that goes both ways, one after the other.
pub(crate) enum Duplex {
    /// Without TLS.
    Plain(Receiver<TcpStream>),
    /// With TLS.
    Tls(Receiver<TlsReader>),
}

impl Duplex {
    /// As [`LinkSender::send`].
    pub(crate) fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        match self {
            Self::Plain(receiver) => write(&mut receiver.source, header, payload),
            Self::Tls(receiver) => {
                let TlsReader { socket, session } = &mut receiver.source;
                write_sealed(socket.get_mut(), session, header, payload)
            }
        }
    }

    /// As [`LinkReceiver::receive`].
    pub(crate) fn receive(
        &mut self,
        wanted: &FrameHeader,
        payload: &mut [u8],
    ) -> Result<(), LinkError> {
        match self {
            Self::Plain(receiver) => receiver.receive(wanted, payload),
            Self::Tls(receiver) => receiver.receive(wanted, payload),
        }
    }
}

/// What frames are read from.
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
    fn skip(&mut self, mut bytes: usize) -> Result<(), LinkError> {
        while bytes > 0 {
            let part = bytes.min(self.scratch.len());
            self.source.read_exact(&mut self.scratch[..part]).map_err(closed_or)?;
            bytes -= part;
        }
        Ok(())
    }
}

fn closed_or(error: io::Error) -> LinkError {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof,
    };
    match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof => {
            LinkError::Closed
        }
        _ => LinkError::Io(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Dialled and accepted sockets both come this way.
    #[tokio::test]
    async fn a_silent_peer_is_asked_whether_it_is_there() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = tokio::net::TcpStream::connect(listener.local_addr().unwrap());
        let (dialled, accepted) = tokio::join!(dialled, listener.accept());
        for stream in [dialled.unwrap(), accepted.unwrap().0] {
            let stream = Stream::plain(stream).unwrap();
            let socket = SockRef::from(stream.socket());
            assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
            assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(1));
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(1));
            assert_eq!(socket.tcp_keepalive_retries().unwrap(), 3);
        }
    }
}
