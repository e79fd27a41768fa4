//! Hostile connections: they wait, and come again when they are closed.

use super::{HostileCluster, HostileTarget};
use anyhow::Result;
use galaxy_common::DeviceName;
use galaxy_proto::{
    ALPN_CONTROL, channel,
    identity::{Identity, Role},
};
use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{interval, sleep, timeout},
};

/// The manner in which connections wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// They send nothing.
    Silent,
    /// They send the beginning of a handshake or request, and not the rest.
    HalfOpen,
}

/// The beginning of a TLS handshake: a record that is incomplete.
const HELLO: &[u8] = &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
/// The beginning of a request over HTTP.
const HEAD: &[u8] = b"GET /v1/models HTTP/1.1\r\nhost: local";
/// The longest that a connection may take to be established.
const DIAL: Duration = Duration::from_secs(5);
/// The time that all connections have to be opened once.
const GATHERING: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Count {
    open: AtomicUsize,
    opened: AtomicU64,
}

/// A crowd of connections, which end when it is dropped.
pub struct HostileConnections {
    _who: JoinSet<()>,
    count: Arc<Count>,
    begins: Arc<Semaphore>,
    most: usize,
}

impl HostileConnections {
    /// Prepares `most` connections from an address, of which at most `rate` in each second come again.
    pub async fn gather(
        (target, to): (HostileTarget, SocketAddr),
        from: IpAddr,
        manner: ConnectionState,
        most: usize,
        rate: u32,
    ) -> Self {
        let (count, begins) = (Arc::new(Count::default()), Arc::new(Semaphore::new(0)));
        let again = Arc::new(Semaphore::new(0));
        let mut who = JoinSet::new();
        let says: &[u8] = match (manner, target) {
            (ConnectionState::Silent, _) => &[],
            (ConnectionState::HalfOpen, HostileTarget::Serve) => HEAD,
            (ConnectionState::HalfOpen, _) => HELLO,
        };
        for _ in 0..most {
            let (count, begins, again) = (count.clone(), begins.clone(), again.clone());
            who.spawn(async move {
                let mut may = begins;
                loop {
                    let Ok(permit) = may.clone().acquire_owned().await else { return };
                    permit.forget();
                    wait(from, to, says, &count).await;
                    may = again.clone();
                }
            });
        }
        if rate > 0 {
            who.spawn(async move {
                let mut ticks = interval(Duration::from_millis(20));
                loop {
                    ticks.tick().await;
                    let some = (rate / 50).max(1) as usize;
                    // Permits that were not used are not saved.
                    again.add_permits(some.saturating_sub(again.available_permits()));
                }
            });
        }
        Self { _who: who, count, begins, most }
    }

    /// Opens the connections, and gives them time to be established.
    pub async fn begin(&mut self) {
        self.begins.add_permits(self.most);
        sleep(GATHERING).await;
    }

    /// The number of connections that are open now.
    pub fn open(&self) -> usize {
        self.count.open.load(Ordering::Relaxed)
    }

    /// The number of connections in all.
    pub fn opened(&self) -> u64 {
        self.count.opened.load(Ordering::Relaxed)
    }
}

/// Opens one connection, and keeps it until the other side closes it.
async fn wait(from: IpAddr, to: SocketAddr, says: &[u8], count: &Count) {
    let dial = async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(from, 0))?;
        socket.connect(to).await
    };
    let Ok(Ok(stream)) = timeout(DIAL, dial).await else { return };
    count.opened.fetch_add(1, Ordering::Relaxed);
    count.open.fetch_add(1, Ordering::Relaxed);
    drop(until_sent_away(stream, says).await);
    count.open.fetch_sub(1, Ordering::Relaxed);
}

async fn until_sent_away(mut stream: TcpStream, says: &[u8]) -> std::io::Result<()> {
    stream.write_all(says).await?;
    let mut bytes = [0; 256];
    while stream.read(&mut bytes).await? > 0 {}
    Ok(())
}

/// A crowd of connections that stay: with a valid certificate, or over HTTP with a request that was answered.
pub async fn valid(
    stage: &HostileCluster,
    target: HostileTarget,
    identity: &Identity,
    most: usize,
) -> Result<HostileConnections> {
    let (count, begins) = (Arc::new(Count::default()), Arc::new(Semaphore::new(0)));
    let mut who = JoinSet::new();
    let address = stage.address(target).to_owned();
    let name = DeviceName::new(if target == HostileTarget::Worker { "d0" } else { "coordinator" })?;
    let role = if target == HostileTarget::Worker { Role::Device } else { Role::Coordinator };
    for _ in 0..most {
        let (count, begins, address) = (count.clone(), begins.clone(), address.clone());
        let (name, identity) = (name.clone(), identity.clone());
        who.spawn(async move {
            let Ok(_permit) = begins.acquire_owned().await else { return };
            if target == HostileTarget::Serve {
                let says = format!("GET /v1/models HTTP/1.1\r\nhost: {address}\r\n\r\n");
                let Ok(to) = address.parse() else { return };
                return wait(IpAddr::from([127, 0, 0, 1]), to, says.as_bytes(), &count).await;
            }
            let config = identity.client_config(ALPN_CONTROL);
            let dialled = channel::dial(&address, config, None, (&name, role), DIAL).await;
            let Ok(mut stream) = dialled else { return };
            count.opened.fetch_add(1, Ordering::Relaxed);
            count.open.fetch_add(1, Ordering::Relaxed);
            // The beginning of HTTP/2, so that it is a connection like any other.
            let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
            if stream.write_all(preface).await.is_ok() {
                let mut bytes = [0; 256];
                while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
            }
            count.open.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(HostileConnections { _who: who, count, begins, most })
}
