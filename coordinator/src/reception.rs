//! The reception: where machines join, and where devices announce their addresses. The protocol is
//! that of [`galaxy_proto::join`]; the [`Registry`] decides who is let in.

use crate::{
    audit::Audit,
    cluster::DeviceConfig,
    registry::{Refused, Registry, slowness::Slowness},
};
use galaxy_common::DeviceName;
use galaxy_proto::{
    ALPN_CONTROL, PROTOCOL, VERSION,
    channel::dial,
    door::{Hook, Peer, SharedLobby, Stay},
    identity::{Identity, Moment, Role},
    join::{
        Attempt, Binding, EXPORTER, Facts, Greeting, JoinRequest, MAX_ADDRESSES, Message, Refusal,
        WireError, receive, send,
    },
};
use serde_json::json;
use std::{
    future::Future,
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::TcpStream,
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};
use tokio_rustls::server::TlsStream;

/// The most machines that are in the lobby at one time, before they have said what they want: for
/// one more, another has to go.
const LOBBY: usize = 256;
/// The most machines that are answered at one time; the others wait in the lobby.
const ANSWERED: usize = 32;
/// How long a connection may last: a message each way, the disk, and dialling back.
const DEADLINE: Duration = Duration::from_secs(15);
/// How long a machine may take to send its message.
const WORD: Duration = Duration::from_secs(5);
/// How long an address may take when it is dialled back.
const DIAL: Duration = Duration::from_secs(3);

/// Takes the devices of the cluster when they have changed.
pub type Update =
    Arc<dyn Fn(Vec<DeviceConfig>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// The reception of a coordinator, where machines join.
pub struct Reception {
    registry: Arc<Registry>,
    identity: Identity,
    audit: Audit,
    update: Update,
    slowness: Mutex<Slowness>,
    origin: Instant,
    lobby: SharedLobby,
    answered: Semaphore,
}

impl Reception {
    /// The reception of `identity`'s cluster.
    pub fn new(registry: Arc<Registry>, identity: Identity, audit: Audit, update: Update) -> Self {
        Self {
            registry,
            identity,
            audit,
            update,
            slowness: Mutex::default(),
            origin: Instant::now(),
            lobby: SharedLobby::new(LOBBY),
            answered: Semaphore::new(ANSWERED),
        }
    }

    /// What the door hands connections to, as long as the reception exists. None of them lasts longer than 15 s.
    pub fn hook(self: &Arc<Self>) -> Hook {
        let reception = Arc::downgrade(self);
        Arc::new(move |peer, stream| {
            let Some(reception) = reception.upgrade() else { return };
            tokio::spawn(async move {
                let spoken = reception.converse(&peer, stream);
                match tokio::time::timeout(DEADLINE, spoken).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%peer, %error, "who came has not joined"),
                    Err(_) => tracing::debug!(%peer, "who came took too long"),
                }
            });
        })
    }

    async fn converse(
        &self,
        peer: &Peer,
        mut stream: TlsStream<TcpStream>,
    ) -> Result<(), WireError> {
        let (stay, notice) = self.lobby.arrive(peer.address.ip());
        let (word, _place) = tokio::select! {
            heard = self.hear(&mut stream, &stay) => heard?,
            () = notice.given() => return Err(WireError::Io(ErrorKind::ConnectionAborted.into())),
        };
        // It stands in nobody's way.
        drop(stay);
        let answer = match (word, &peer.identity) {
            (Message::Ask(ask), _) => self.asked(peer, &stream, ask).await,
            (Message::Announce(facts), Some((name, Role::Device))) => {
                let here = stream.get_ref().0.local_addr()?.ip().to_canonical();
                self.announced(peer, name, facts, here).await
            }
            (Message::Announce(_), _) => {
                Err(refusal("not_a_device", "only devices say where they are".to_owned()))
            }
            _ => Err(refusal("bad_request", "that is not the turn of who comes".to_owned())),
        };
        let answer = answer.unwrap_or_else(|refusal| {
            self.audit.refused(peer, &refusal.message);
            Message::Refusal(refusal)
        });
        send(&mut stream, &answer).await?;
        use tokio::io::AsyncWriteExt;
        Ok(stream.shutdown().await?)
    }

    /// Waits for the message of a machine, and then for a place to be answered at.
    async fn hear(
        &self,
        stream: &mut TlsStream<TcpStream>,
        stay: &Stay,
    ) -> Result<(Message, SemaphorePermit<'_>), WireError> {
        let greeting =
            Greeting { protocol: PROTOCOL, version: VERSION.to_owned(), time: Moment::now() };
        send(stream, &Message::Greeting(greeting)).await?;
        let word = tokio::time::timeout(WORD, receive(stream)).await;
        let word = word.map_err(|_| io::Error::from(ErrorKind::TimedOut))??;
        stay.heard();
        let place = self.answered.acquire().await.map_err(io::Error::other)?;
        Ok((word, place))
    }

    async fn asked(
        &self,
        peer: &Peer,
        stream: &TlsStream<TcpStream>,
        ask: JoinRequest,
    ) -> Result<Message, Refusal> {
        let address = peer.address.ip();
        let slowness = || self.slowness.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(wait) = slowness().wait(self.origin.elapsed(), address) {
            let seconds = wait.as_secs_f64().ceil();
            return Err(Refusal {
                code: "slow".to_owned(),
                message: format!(
                    "too many attempts from {address} failed: try again in {seconds:.0} s; the invitation still holds"
                ),
                wait_s: seconds as u32,
            });
        }
        let exporter = stream.get_ref().1.export_keying_material([0; 32], EXPORTER, None);
        let exporter = exporter.map_err(|error| refusal("internal", error.to_string()))?;
        let binding = Binding { exporter, server: self.identity.key().to_vec() };
        let (registry, invitation) = (self.registry.clone(), ask.invitation);
        let admitted = tokio::task::spawn_blocking(move || registry.admit(&ask, &binding)).await;
        let broke_off = |error: tokio::task::JoinError| refusal("internal", error.to_string());
        match admitted.map_err(broke_off)? {
            Ok(grant) => {
                let details = json!({
                    "joined": grant.name, "as": grant.role.to_string(),
                    "invitation": invitation.to_string(),
                });
                self.audit.record(peer, "join", details);
                Ok(Message::Grant(grant))
            }
            Err(Refused::Denied(denial)) => {
                if denial.guesses() {
                    slowness().failed(self.origin.elapsed(), address);
                }
                tracing::warn!(%address, %invitation, %denial, "refused to let a machine join");
                Err(refusal(denial.code(), denial.to_string()))
            }
            Err(Refused::Registry(error)) => {
                tracing::error!(%error, "a machine could not join");
                Err(refusal("internal", error.to_string()))
            }
        }
    }

    async fn announced(
        &self,
        peer: &Peer,
        name: &DeviceName,
        facts: Facts,
        here: IpAddr,
    ) -> Result<Message, Refusal> {
        let attempts = self.dial_back(name, &facts, peer.address.ip().to_canonical()).await;
        let reached: Vec<_> =
            attempts.iter().filter(|a| a.error.is_none()).map(|a| a.address).collect();
        if reached.is_empty() {
            tracing::warn!(device = %name, port = facts.port, "it is reached at none of its addresses: is the port open in its firewall?");
            return Ok(Message::Reached(attempts));
        }
        let (registry, of) = (self.registry.clone(), name.clone());
        let settled =
            tokio::task::spawn_blocking(move || registry.settle(&of, &facts, &reached, here));
        let settled = settled.await.map_err(|error| error.to_string());
        let devices = settled.and_then(|settled| settled.map_err(|error| error.to_string()));
        let devices = devices.map_err(|error| {
            tracing::error!(device = %name, %error, "its address could not be noted");
            refusal("internal", format!("the coordinator could not note the address: {error}"))
        })?;
        (self.update)(devices).await;
        Ok(Message::Reached(attempts))
    }

    /// Dials a device at the address that it comes from, and at those that it names, all at once.
    async fn dial_back(&self, name: &DeviceName, facts: &Facts, from: IpAddr) -> Vec<Attempt> {
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for ip in [from].into_iter().chain(facts.addresses.iter().map(IpAddr::to_canonical)) {
            let address = SocketAddr::new(ip, facts.port.get());
            let elsewhere =
                ip.is_loopback() && !from.is_loopback() || ip.is_unspecified() || ip.is_multicast();
            if !elsewhere && !addresses.contains(&address) && addresses.len() < MAX_ADDRESSES {
                addresses.push(address);
            }
        }
        let config = self.identity.client_config(ALPN_CONTROL);
        let dials = addresses.into_iter().map(|address| {
            let config = config.clone();
            async move {
                let dialled =
                    dial(&address.to_string(), config, None, (name, Role::Device), DIAL).await;
                Attempt { address, error: dialled.err().map(|error| error.to_string()) }
            }
        });
        futures_util::future::join_all(dials).await
    }
}

fn refusal(code: &str, message: String) -> Refusal {
    Refusal { code: code.to_owned(), message, wait_s: 0 }
}
