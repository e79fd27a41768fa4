//! The network between the parties of a simulation: everything passes through here, and arrives late,
//! later, or not at all.
//!
//! Each party has a front, the address that others know. Behind it is whatever listens now. A
//! connection between two parties is a pair of pipes, one for each way.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// The coordinator and the devices after it, by number. Clients count as one more, the last.
pub type Party = usize;
/// The most parties.
pub const PARTIES: usize = 8;
/// Where clients are.
pub const CLIENT: Party = PARTIES - 1;
/// The party of the coordinator.
pub const DESK: Party = 0;

/// After so much silence the systems of two devices give a link between them up, as theirs would
/// (`TCP_KEEPALIVE` of ring links).
const SILENCE: Duration = Duration::from_secs(4);
/// Bytes that a pipe carries at once.
const PIECE: usize = 64 << 10;

/// What the network is like now.
#[derive(Clone)]
struct Weather {
    /// Nothing passes this way.
    cut: [[bool; PARTIES]; PARTIES],
    /// How often connections between two were broken.
    broken: [[u64; PARTIES]; PARTIES],
    /// What listens behind each front, and in which of its lives.
    behind: [Option<(SocketAddr, u8)>; PARTIES],
    /// How long a piece is on its way: from, to, in microseconds.
    delay: (u64, u64),
}

/// The network. Copies are the same.
#[derive(Clone)]
pub struct Network {
    weather: Arc<watch::Sender<Weather>>,
    dice: Arc<Mutex<fastrand::Rng>>,
}

/// Where a party listens, and dials from, in one of its lives.
pub fn home(party: Party, life: u8) -> IpAddr {
    Ipv4Addr::new(127, 20 + party as u8, life, 1).into()
}

/// Who dials from there, and in which of its lives. The coordinator and clients dial from wherever
/// the system likes: whom they call tells them apart.
fn who(from: IpAddr, to: Party) -> (Party, Option<u8>) {
    match from {
        IpAddr::V4(ip) if ip.octets()[1] >= 20 => {
            let [_, party, life, _] = ip.octets();
            (usize::from(party - 20), Some(life))
        }
        _ if to == DESK => (CLIENT, None),
        _ => (DESK, None),
    }
}

impl Network {
    /// A network in good order.
    pub fn new(seed: u64, delay: (u64, u64)) -> Self {
        let weather = Weather {
            cut: [[false; PARTIES]; PARTIES],
            broken: [[0; PARTIES]; PARTIES],
            behind: [None; PARTIES],
            delay,
        };
        let dice = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
        Self { weather: Arc::new(watch::Sender::new(weather)), dice }
    }

    /// Opens the front of a party; its tasks go into `tasks`.
    ///
    /// # Errors
    /// What the system says.
    pub async fn front(&self, party: Party, tasks: &mut JoinSet<()>) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind((Ipv4Addr::new(127, 19, party as u8, 1), 0)).await?;
        let address = listener.local_addr()?;
        let network = self.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, from)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let network = network.clone();
                connections.spawn(async move { network.carry(stream, from, party).await });
            }
        });
        Ok(address)
    }

    /// A party has come to life, and listens there.
    pub fn up(&self, party: Party, at: SocketAddr, life: u8) {
        self.weather.send_modify(|weather| weather.behind[party] = Some((at, life)));
    }

    /// A party is gone, and all its connections with it, unless another of its lives has begun.
    pub fn down(&self, party: Party, life: u8) {
        self.weather.send_if_modified(|weather| {
            if weather.behind[party].is_none_or(|(_, now)| now != life) {
                return false;
            }
            weather.behind[party] = None;
            for other in 0..PARTIES {
                weather.broken[party][other] += 1;
                weather.broken[other][party] += 1;
            }
            true
        });
    }

    /// Cuts one way, or mends it.
    pub fn cut(&self, from: Party, to: Party, cut: bool) {
        self.weather.send_modify(|weather| weather.cut[from][to] = cut);
    }

    /// Breaks all connections between two.
    pub fn tear(&self, one: Party, other: Party) {
        self.weather.send_modify(|weather| {
            weather.broken[one][other] += 1;
            weather.broken[other][one] += 1;
        });
    }

    /// How long things take from now on, in microseconds.
    pub fn delay(&self, delay: (u64, u64)) {
        self.weather.send_modify(|weather| weather.delay = delay);
    }

    /// Everything passes again.
    pub fn mend(&self) {
        self.weather.send_modify(|weather| weather.cut = [[false; PARTIES]; PARTIES]);
    }

    async fn carry(&self, outer: TcpStream, address: SocketAddr, to: Party) {
        let (from, life) = who(address.ip(), to);
        let mut weather = self.weather.subscribe();
        let broken = weather.borrow_and_update().broken[from][to];
        let behind = weather.borrow().behind[to];
        let ghost = life
            .is_some_and(|life| weather.borrow().behind[from].is_none_or(|(_, now)| now != life));
        let inner = match behind {
            // Who is dead calls nobody.
            Some((at, _)) if !ghost => TcpStream::connect(at).await.ok(),
            _ => None,
        };
        let Some(inner) = inner else { return reset(&outer) };
        drop(outer.set_nodelay(true).and(inner.set_nodelay(true)));
        let ((out_read, out_write), (in_read, in_write)) = (outer.into_split(), inner.into_split());
        let torn = async {
            let devices = from != DESK && from != CLIENT && to != DESK;
            let silent = |w: &Weather| devices && (w.cut[from][to] || w.cut[to][from]);
            loop {
                let lost = silent(&weather.borrow());
                let changed =
                    weather.wait_for(|w| w.broken[from][to] != broken || silent(w) != lost);
                let changed = async { changed.await.map(|w| w.broken[from][to] != broken) };
                match lost {
                    false => match changed.await {
                        Ok(false) => {}
                        _ => return,
                    },
                    true => match tokio::time::timeout(SILENCE, changed).await {
                        Ok(Ok(false)) => {}
                        _ => return,
                    },
                }
            }
        };
        let (mut there, mut back) = (
            Pipe { network: self.clone(), from, to, read: out_read, write: in_write },
            Pipe { network: self.clone(), from: to, to: from, read: in_read, write: out_write },
        );
        let whole = tokio::select! {
            (one, other) = async { tokio::join!(there.pump(), back.pump()) } => one.and(other).is_ok(),
            () = torn => false,
        };
        if !whole {
            reset(there.read.as_ref());
            reset(back.read.as_ref());
        }
    }
}

/// Has a socket end with a reset when it is dropped.
fn reset(stream: &TcpStream) {
    drop(stream.set_zero_linger());
}

struct Pipe {
    network: Network,
    from: Party,
    to: Party,
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
}

impl Pipe {
    async fn pump(&mut self) -> io::Result<()> {
        let mut weather = self.network.weather.subscribe();
        let mut piece = vec![0; PIECE];
        loop {
            let bytes = self.read.read(&mut piece).await?;
            let (low, high) = weather.borrow().delay;
            let delay = match high {
                0 => 0,
                _ => {
                    let dice = self.network.dice.lock();
                    dice.unwrap_or_else(PoisonError::into_inner).u64(low..=high)
                }
            };
            if delay > 0 {
                sleep_until(Instant::now() + Duration::from_micros(delay)).await;
            }
            let passes = weather.wait_for(|weather| !weather.cut[self.from][self.to]).await;
            passes.map_err(io::Error::other)?;
            match bytes {
                0 => return self.write.shutdown().await,
                bytes => self.write.write_all(&piece[..bytes]).await?,
            }
        }
    }
}
