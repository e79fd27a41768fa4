//! Links over TCP, with TLS or plain. Hot path: no locks, no logging, no allocation of ours for
//! each frame.
//!
//! The handshake is done by the async side; a link then owns a blocking socket, because each of
//! its ends is driven by an I/O thread of its own.

use super::closed::closed_or;
use galaxy_common::{FrameHeader, HEADER_BYTES};
use galaxy_engine::link::{LinkCloser, LinkError, LinkSender};
use rustls::Connection;
use socket2::{SockRef, TcpKeepalive};
use std::{
    io::{self, BufReader, IoSlice, Read, Write},
    net::{Shutdown, TcpStream},
    time::Duration,
};

/// Cipher text that waits for the socket: enough to keep it busy while the next part is sealed.
const SEND_BUFFER: usize = 256 << 10;
/// Bytes taken from the socket at once; rustls asks for 4 KiB at a time.
const RECEIVE_BUFFER: usize = 128 << 10;
/// Bytes that sockets hold on both ends together, with what systems give them by default: Linux 16 KiB to send and 64
/// to receive, others more.
pub(super) const HELD: u64 = 32 << 10;
/// When a silent peer is asked for a sign of life, and how often again. A peer that was unplugged is known after four
/// seconds; for one that is slow, its system answers.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(1))
    .with_interval(Duration::from_secs(1))
    .with_retries(3);

/// Takes a socket over from tokio.
pub(super) fn blocking(stream: tokio::net::TcpStream) -> io::Result<TcpStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE)?;
    Ok(stream)
}

pub(super) struct Closer(pub TcpStream);

impl LinkCloser for Closer {
    fn close(&self) {
        // An error says that it is closed already.
        self.0.shutdown(Shutdown::Both).ok();
    }
}

pub(super) struct PlainSender {
    pub socket: TcpStream,
}

impl LinkSender for PlainSender {
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        write(&mut self.socket, header, payload)
    }
    fn takes(&self) -> u64 {
        HELD
    }
}

/// Writes a frame as it is.
pub(super) fn write(
    socket: &mut TcpStream,
    header: &FrameHeader,
    payload: &[u8],
) -> Result<(), LinkError> {
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

/// Writes a frame through a TLS session.
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

pub(super) struct TlsSender {
    socket: TcpStream,
    session: Box<Connection>,
}

impl TlsSender {
    pub fn new(socket: TcpStream, mut session: Box<Connection>) -> Self {
        session.set_buffer_limit(Some(SEND_BUFFER));
        Self { socket, session }
    }
}

impl LinkSender for TlsSender {
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        write_sealed(&mut self.socket, &mut self.session, header, payload)
    }
    fn takes(&self) -> u64 {
        HELD
    }
}

/// Opens the bytes that a TLS session sealed.
pub(crate) struct TlsReader {
    socket: BufReader<TcpStream>,
    session: Box<Connection>,
}

impl TlsReader {
    pub fn new(socket: TcpStream, mut session: Box<Connection>) -> Self {
        session.set_buffer_limit(Some(SEND_BUFFER));
        Self { socket: BufReader::with_capacity(RECEIVE_BUFFER, socket), session }
    }

    /// Sends a frame in the other direction.
    pub fn write(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        write_sealed(self.socket.get_mut(), &mut self.session, header, payload)
    }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Dialled and accepted sockets both come this way.
    #[tokio::test]
    async fn link_sockets_have_keepalive_and_no_delay() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = tokio::net::TcpStream::connect(listener.local_addr().unwrap());
        let (dialled, accepted) = tokio::join!(dialled, listener.accept());
        for stream in [dialled.unwrap(), accepted.unwrap().0] {
            let stream = blocking(stream).unwrap();
            let socket = SockRef::from(&stream);
            assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
            assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(1));
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(1));
            assert_eq!(socket.tcp_keepalive_retries().unwrap(), 3);
        }
    }
}
