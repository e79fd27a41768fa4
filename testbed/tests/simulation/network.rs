//! The network between the parties of a simulation: everything passes through it, and arrives late, later, or
//! not at all.
//!
//! Each party has a front, which is the address that others know. Behind it is the socket on which the party
//! listens now. A connection between two parties is a pair of pipes, one for each way.

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

/// The number of a party: the coordinator, and the devices after it. Clients count as one more, the last.
pub type Party = usize;
/// The most parties of a simulation.
pub const PARTIES: usize = 8;
/// The party of all clients.
pub const CLIENT: Party = PARTIES - 1;
/// The party of the coordinator.
pub const DESK: Party = 0;

/// The silence after which the systems of two devices give up a link between them, as real ones would
/// (`TCP_KEEPALIVE` of ring links).
const SILENCE: Duration = Duration::from_secs(4);
/// The most bytes that a pipe carries at once.
const PIECE: usize = 64 << 10;

/// The state of the network.
#[derive(Clone)]
struct Weather {
    /// The directions in which nothing passes, by sender and receiver.
    cut: [[bool; PARTIES]; PARTIES],
    /// How often the connections between two parties were broken.
    broken: [[u64; PARTIES]; PARTIES],
    /// The address that listens behind each front, and in which of its party's lives; none where the party is
    /// not alive.
    behind: [Option<(SocketAddr, u8)>; PARTIES],
    /// The least and the most time that a piece takes, in microseconds.
    delay: (u64, u64),
}

/// The network. Clones share one state.
#[derive(Clone)]
pub struct Network {
    weather: Arc<watch::Sender<Weather>>,
    dice: Arc<Mutex<fastrand::Rng>>,
}

/// The address at which a party listens, and from which it dials, in one of its lives.
pub fn home(party: Party, life: u8) -> IpAddr {
    Ipv4Addr::new(127, 20 + party as u8, life, 1).into()
}

/// The party that dials from an address, and in which of its lives. The coordinator and clients dial from any
/// address that the system chooses: the party that they call tells them apart.
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
    /// A network without faults.
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

    /// Opens the front of a party, whose tasks are added to `tasks`.
    ///
    /// # Errors
    /// An error of the system.
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

    /// Registers that a party has begun a life, and listens at `at`.
    pub fn up(&self, party: Party, at: SocketAddr, life: u8) {
        self.weather.send_modify(|weather| weather.behind[party] = Some((at, life)));
    }

    /// Registers that a party is gone, and all its connections with it, unless another of its lives has
    /// begun.
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

    /// Cuts one direction between two parties, or mends it.
    pub fn cut(&self, from: Party, to: Party, cut: bool) {
        self.weather.send_modify(|weather| weather.cut[from][to] = cut);
    }

    /// Breaks all connections between two parties.
    pub fn tear(&self, one: Party, other: Party) {
        self.weather.send_modify(|weather| {
            weather.broken[one][other] += 1;
            weather.broken[other][one] += 1;
        });
    }

    /// Sets the least and the most time that pieces take from now on, in microseconds.
    pub fn delay(&self, delay: (u64, u64)) {
        self.weather.send_modify(|weather| weather.delay = delay);
    }

    /// Mends all directions.
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
            // A party that is dead calls nobody.
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

/// Makes a socket end with a reset when it is dropped.
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
