//! Connections of those who mean no good: they wait, and come again when they are sent away.

use super::{Stage, Target};
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

/// How connections wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// They say nothing.
    Silent,
    /// They begin, and do not go on.
    HalfOpen,
}

/// What begins a handshake of TLS: a record that is not all there.
const HELLO: &[u8] = &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
/// What begins a request over HTTP.
const HEAD: &[u8] = b"GET /v1/models HTTP/1.1\r\nhost: local";
/// For a connection to stand.
const DIAL: Duration = Duration::from_secs(5);
/// For all to have come once.
const GATHERING: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Count {
    open: AtomicUsize,
    opened: AtomicU64,
}

/// A crowd. It goes when it is dropped.
pub struct Crowd {
    _who: JoinSet<()>,
    count: Arc<Count>,
    begins: Arc<Semaphore>,
    most: usize,
}

impl Crowd {
    /// Those who will come from an address, so many, and so many in each second that come again.
    pub async fn gather(
        (target, to): (Target, SocketAddr),
        from: IpAddr,
        manner: Manner,
        most: usize,
        rate: u32,
    ) -> Self {
        let (count, begins) = (Arc::new(Count::default()), Arc::new(Semaphore::new(0)));
        let again = Arc::new(Semaphore::new(0));
        let mut who = JoinSet::new();
        let says: &[u8] = match (manner, target) {
            (Manner::Silent, _) => &[],
            (Manner::HalfOpen, Target::Serve) => HEAD,
            (Manner::HalfOpen, _) => HELLO,
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
                    // What was not used up is not saved.
                    again.add_permits(some.saturating_sub(again.available_permits()));
                }
            });
        }
        Self { _who: who, count, begins, most }
    }

    /// Comes, and gives the first of them time to be there.
    pub async fn begin(&mut self) {
        self.begins.add_permits(self.most);
        sleep(GATHERING).await;
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.count.open.load(Ordering::Relaxed)
    }

    /// Connections in all.
    pub fn opened(&self) -> u64 {
        self.count.opened.load(Ordering::Relaxed)
    }
}

/// One connection, for as long as it is let be.
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

/// Connections with a valid certificate, or a request that was answered over HTTP, which stay.
pub async fn valid(
    stage: &Stage,
    target: Target,
    identity: &Identity,
    most: usize,
) -> Result<Crowd> {
    let (count, begins) = (Arc::new(Count::default()), Arc::new(Semaphore::new(0)));
    let mut who = JoinSet::new();
    let address = stage.address(target).to_owned();
    let name = DeviceName::new(if target == Target::Worker { "d0" } else { "coordinator" })?;
    let role = if target == Target::Worker { Role::Device } else { Role::Coordinator };
    for _ in 0..most {
        let (count, begins, address) = (count.clone(), begins.clone(), address.clone());
        let (name, identity) = (name.clone(), identity.clone());
        who.spawn(async move {
            let Ok(_permit) = begins.acquire_owned().await else { return };
            if target == Target::Serve {
                let says = format!("GET /v1/models HTTP/1.1\r\nhost: {address}\r\n\r\n");
                let Ok(to) = address.parse() else { return };
                return wait(IpAddr::from([127, 0, 0, 1]), to, says.as_bytes(), &count).await;
            }
            let config = identity.client_config(ALPN_CONTROL);
            let dialled = channel::dial(&address, config, None, (&name, role), DIAL).await;
            let Ok(mut stream) = dialled else { return };
            count.opened.fetch_add(1, Ordering::Relaxed);
            count.open.fetch_add(1, Ordering::Relaxed);
            // What begins HTTP/2, so that it is a connection like any other.
            let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
            if stream.write_all(preface).await.is_ok() {
                let mut bytes = [0; 256];
                while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
            }
            count.open.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(Crowd { _who: who, count, begins, most })
}
