//! The rate of this machine's loopback, measured over plain TCP.

use galaxy_client::LinkRate;
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    time::Instant,
};

/// Bytes that are sent: enough to outweigh the start of the connection, in a fraction of a second.
const BYTES: usize = 64 << 20;
const PIECE: usize = 64 << 10;

/// Measures the rate of the loopback by sending some megabytes over it.
pub fn measure() -> io::Result<Option<LinkRate>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let sender = std::thread::Builder::new().name("loopback".to_owned()).spawn(move || {
        let mut stream = TcpStream::connect(address)?;
        let piece = [0; PIECE];
        (0..BYTES / PIECE).try_for_each(|_| stream.write_all(&piece))
    })?;
    let (mut stream, _) = listener.accept()?;
    let mut piece = vec![0; PIECE];
    let mut received = 0;
    let started = Instant::now();
    loop {
        match stream.read(&mut piece)? {
            0 => break,
            n => received += n as u64,
        }
    }
    let took = started.elapsed();
    match sender.join() {
        Ok(sent) => sent?,
        Err(_) => return Err(io::Error::other("the sending thread panicked")),
    }
    Ok(LinkRate::measured(received, took))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    #[test]
    fn the_rate_of_the_loopback_is_measured() {
        assert!(super::measure().unwrap().is_some());
    }
}
