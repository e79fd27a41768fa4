//! A worker as a whole: its sockets, its service, its end.

use crate::{
    announce::announce,
    content::{
        cache::{Cache, CacheConfig},
        service::Share,
    },
    core::{Core, Grant},
    models::Models,
    probe,
    ring::{self, Ring},
    service::Control,
};
use galaxy_common::Bytes;
use galaxy_engine::compute::choice::{EngineChoice, EngineError};
use galaxy_proto::{
    ALPN_RING,
    door::{Door, Hook, Peer},
    identity::{Identity, IdentityError, Removed, Role},
    join::Contact,
};
use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinHandle,
    time::timeout,
};
use tonic::transport::Server;

/// How long programs that run may take when the worker has to end.
const DRAIN_DEADLINE: Duration = Duration::from_secs(10);
/// How long connections may take to close after that.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);
/// The most calls at one time on one connection: a coordinator has a handful.
const STREAMS: u32 = 64;
/// Bytes that may be on their way to this worker: a model comes in one stream, over links of 1
/// Gbit/s and some milliseconds.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;
/// The time between signs of life on a connection, and the time for an answer to one: a peer that
/// was unplugged must not keep a connection for good.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Ports that are tried where any will do: one that is free for TCP may be taken for UDP.
const PORTS: usize = 16;
const UDP: &str = "UDP";
/// The list of removed members, in the directory of the identity.
const REMOVED: &str = "removed";
/// The pause after an accept that failed (no descriptors left, most likely).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The settings of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The directory of its identity; the certificate has its name.
    pub identity: PathBuf,
    /// The address on which it listens; port 0 takes any that is free.
    pub listen: SocketAddr,
    /// The address from which it dials other devices over TCP; none: the system chooses.
    pub from: Option<IpAddr>,
    /// The directory of its models: model directories and GGUF files, or itself one of them.
    pub models: Option<PathBuf>,
    /// The cache for models that are not among these; none: they are refused.
    pub cache: Option<CacheConfig>,
    /// The engine that programs run on.
    pub engine: EngineChoice,
    /// The most cores that it may use for kernels.
    pub threads: u16,
    /// The most bytes that it grants, besides what the coordinator's files say.
    pub memory: Option<Bytes>,
    /// Whether ring links without TLS are taken, on a port of their own.
    pub plain: bool,
}

/// Why a worker does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its identity is not in order.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Its certificate is not a device's.
    #[error("{} is the identity of a {role}: a worker needs one issued with --role device", path.display())]
    Role {
        /// The directory of the identity.
        path: PathBuf,
        /// The role in its certificate.
        role: Role,
    },
    /// The directory of its models cannot be read.
    #[error("no models in {}: {source}", path.display())]
    Models {
        /// The directory that was given for models.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Neither models nor a cache for them.
    #[error("a worker needs --models, or a cache to bring models to")]
    Nowhere,
    /// An engine that this build does not have.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A config that grants no threads.
    #[error("a worker needs at least one thread")]
    Threads,
    /// The address cannot be listened on.
    #[error("cannot listen on {address}, {transport}: {source}")]
    Listen {
        /// The address on which the worker should listen.
        address: SocketAddr,
        /// The protocol: TCP or UDP.
        transport: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

/// A worker that serves. End it with [`Worker::shutdown`].
pub struct Worker {
    core: Arc<Core>,
    address: SocketAddr,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    stop: oneshot::Sender<()>,
    stopped: watch::Sender<bool>,
}

impl Worker {
    /// Checks the config, then binds, then serves. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// What is wrong with the config, or with the address.
    pub async fn start(config: WorkerConfig) -> Result<Self, StartError> {
        let WorkerConfig {
            identity: path,
            listen,
            from,
            models,
            cache,
            engine,
            threads,
            memory,
            plain,
        } = config;
        let engine = engine.built()?;
        let identity = Identity::load(&path)?;
        let file = |source| IdentityError::File { path: path.clone(), source };
        let contact = Contact::load(&path).map_err(file)?;
        let kept = path.join(REMOVED);
        identity.denied().take(Removed::load(&kept).map_err(file)?);
        if identity.role() != Role::Device {
            return Err(StartError::Role { path, role: identity.role() });
        }
        if models.is_none() && cache.is_none() {
            return Err(StartError::Nowhere);
        }
        let models = match models {
            Some(path) => {
                Models::new(&path).map_err(|source| StartError::Models { path, source })?
            }
            None => Models::default(),
        };
        if threads == 0 {
            return Err(StartError::Threads);
        }
        let (listener, address, socket) = bind_both(listen).await?;
        let plain = match plain {
            true => Some(bind(SocketAddr::new(listen.ip(), 0)).await?),
            false => None,
        };
        let plain_port = plain.as_ref().map(|(_, address)| address.port());
        let core = Arc::new(Core::new(
            (identity, kept, Ring::new(from)),
            (models, cache.map(Cache::new)),
            Grant { engine, threads, memory, plain_port },
        ));
        let opened = core.ring.open_quic(socket, &core.identity);
        opened.map_err(|source| StartError::Listen { address, transport: UDP, source })?;

        let door = {
            // Not the core itself: the door must not keep it alive.
            let (ring, tasks) = (core.ring.clone(), Arc::downgrade(&core));
            let hook: Hook = Arc::new(move |peer, stream| {
                if let Some(core) = tasks.upgrade() {
                    core.tasks.spawn(ring.clone().arrive(peer, stream));
                }
            });
            Door::open(listener, Some(&core.identity), Some((ALPN_RING, hook)))
        };
        let probes = core.ring.probes();
        core.tasks.spawn(probe::answer_all(Arc::downgrade(&core), probes));
        let stopped = watch::Sender::new(false);
        if let Some((listener, _)) = plain {
            let ring = core.ring.clone();
            core.tasks.spawn(accept_plain(listener, ring, stopped.subscribe()));
        }
        if let Some(contact) = contact {
            core.tasks.spawn(announce(Arc::downgrade(&core), contact, address));
        }
        let (stop, stopping) = oneshot::channel();
        let server = Server::builder()
            .max_concurrent_streams(STREAMS)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .add_service(Control::service(core.clone()))
            .add_service(Share::service(core.clone()));
        let server = tokio::spawn(server.serve_with_incoming_shutdown(door, async {
            // A dropped sender means the same.
            drop(stopping.await);
        }));
        Ok(Self { core, address, server, stop, stopped })
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port on which it takes plain ring links, if it does.
    pub fn plain_port(&self) -> Option<u16> {
        self.core.grant.plain_port
    }

    /// Ends the worker: takes no more, finishes what runs, closes all, and joins every task and
    /// thread.
    pub async fn shutdown(self) {
        let Self { core, mut server, stop, stopped, .. } = self;
        core.tell(|state| state.drain(true));
        core.ending.store(true, Ordering::Relaxed);
        let mut state = core.state.subscribe();
        if timeout(DRAIN_DEADLINE, state.wait_for(|state| state.quiet())).await.is_err() {
            tracing::warn!("a program still runs: it is aborted");
        }
        let epoch = core.state.borrow().epoch();
        core.tell(|state| state.cancel(epoch));
        core.ring.close(epoch);
        if let Err(error) = core.disconnect(epoch).await {
            tracing::warn!(%error, "closing the links");
        }
        core.ring.close_quic().await;
        stopped.send_replace(true);
        // Results that were ready are on their way; connections that idle are closed at once.
        let _ = stop.send(());
        if timeout(CLOSE_DEADLINE, &mut server).await.is_err() {
            server.abort();
        }
        let mut tasks = core.tasks.take();
        tasks.abort_all();
        while tasks.join_next().await.is_some() {}
        // Joins the threads of programs and of kernels.
        let held = core.running.held.clone().write_owned().await.take();
        let end = move || {
            core.running.programs.join();
            drop(held);
        };
        drop(tokio::task::spawn_blocking(end).await);
    }
}

/// Binds TCP, for control and links, and the same port of UDP, for links over QUIC.
async fn bind_both(
    address: SocketAddr,
) -> Result<(TcpListener, SocketAddr, UdpSocket), StartError> {
    let mut left = PORTS;
    loop {
        left -= 1;
        let (listener, bound) = bind(address).await?;
        match ring::bind_quic(bound) {
            Ok(socket) => return Ok((listener, bound, socket)),
            // Any port will do, and this one is taken by another process.
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && address.port() == 0 && left > 0 => {}
            Err(source) => {
                return Err(StartError::Listen { address: bound, transport: UDP, source });
            }
        }
    }
}

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let error = |source| StartError::Listen { address, transport: "TCP", source };
    let listener = TcpListener::bind(address).await.map_err(error)?;
    let bound = listener.local_addr().map_err(error)?;
    Ok((listener, bound))
}

/// Accepts plain ring links. The ring bounds how many arrive.
async fn accept_plain(listener: TcpListener, ring: Ring, mut stopped: watch::Receiver<bool>) {
    let mut arrivals = tokio::task::JoinSet::new();
    loop {
        while arrivals.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stopped| *stopped) => return,
        };
        match accepted {
            Ok((stream, address)) => {
                arrivals.spawn(ring.clone().arrive_plain(Peer { identity: None, address }, stream));
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a plain ring link failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
