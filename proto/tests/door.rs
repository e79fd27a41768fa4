//! What strangers, and those who are known, can take of a door.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::DeviceName;
use galaxy_proto::{
    ALPN_CONTROL, ALPN_RING,
    channel::{ConnectError, connect, dial},
    door::{Door, Hook, Inside, Peer},
    identity::{Authority, Identity, Role},
};
use rustls::client::{ClientSessionMemoryCache, Resumption};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use time::OffsetDateTime;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::mpsc,
};
use tokio_stream::StreamExt;

const LONG: Duration = Duration::from_secs(20);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

struct Home {
    dir: tempfile::TempDir,
    authority: Authority,
}

impl Home {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "home").unwrap();
        Self { dir, authority }
    }
    fn of(&self, who: &str, role: Role) -> Identity {
        let dir = self.dir.path().join(who);
        if !dir.exists() {
            self.authority.issue(&name(who), role, 30).unwrap();
        }
        Identity::load(&dir).unwrap()
    }
}

struct Opened {
    address: SocketAddr,
    control: mpsc::UnboundedReceiver<()>,
    ring: mpsc::UnboundedReceiver<Peer>,
    inside: Inside,
}

/// A door that reads what comes, so that connections live and end as they do under a server.
async fn open(identity: Option<&Identity>) -> Opened {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, control) = mpsc::unbounded_channel();
    let (ring_sender, ring) = mpsc::unbounded_channel();
    let hook: Hook = Arc::new(move |peer, _stream| ring_sender.send(peer).unwrap());
    let mut door = Door::open(listener, identity, Some((ALPN_RING, hook)));
    let inside = door.inside();
    tokio::spawn(async move {
        while let Some(Ok(mut connection)) = door.next().await {
            let _ = sender.send(());
            tokio::spawn(async move {
                let mut bytes = [0; 1024];
                while connection.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
            });
        }
    });
    Opened { address, control, ring, inside }
}

async fn from(address: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn each_role_is_accepted_only_where_it_is_served() {
    use Role::{Admin, Client, Coordinator, Device};
    let home = Home::new();
    for (server, served) in [(Device, [Coordinator, Device]), (Coordinator, [Client, Admin])] {
        let opened = open(Some(&home.of(&format!("at-{server}"), server))).await;
        let (at, to) = (opened.address.to_string(), (&name(&format!("at-{server}")), server));
        for role in [Device, Coordinator, Client, Admin] {
            let caller = home.of(&format!("a-{role}"), role);
            let answer = connect(&at, Some(&caller), to, LONG).await;
            match answer {
                Ok(_) => assert!(served.contains(&role), "{role} at {server}"),
                Err(error @ ConnectError::RefusedUs { .. }) => {
                    assert!(!served.contains(&role), "{role} at {server}");
                    assert!(error.to_string().contains("role is not served"), "{error}");
                }
                Err(error) => panic!("{role} at {server}: {error}"),
            }
        }
    }
}

/// A coordinator speaks gRPC with a device, and forms no links.
#[tokio::test]
async fn a_coordinator_cannot_open_ring_links_to_a_device() {
    let home = Home::new();
    let mut opened = open(Some(&home.of("pi-1", Role::Device))).await;
    let (at, to) = (opened.address.to_string(), (&name("pi-1"), Role::Device));
    for (who, role) in [("desk", Role::Coordinator), ("pi-2", Role::Device)] {
        let ring = home.of(who, role).client_config(ALPN_RING);
        // Accepted as one that is served over another protocol, and then closed.
        drop(dial(&at, ring, None, to, LONG).await);
    }
    let peer = opened.ring.recv().await.unwrap();
    assert_eq!(peer.identity, Some((name("pi-2"), Role::Device)));
    assert!(opened.ring.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_do_not_block_a_coordinator() {
    let home = Home::new();
    let opened = open(Some(&home.of("pi-1", Role::Device))).await;
    let mut control = opened.control;
    let (at, to) = (opened.address.to_string(), (&name("pi-1"), Role::Device));
    let coordinator = home.of("desk", Role::Coordinator);
    let mut idle = Vec::new();
    for round in 0..3 {
        for i in 0..300 {
            let mut stream =
                from(if i % 2 == 0 { "127.0.0.2" } else { "127.0.0.1" }, opened.address).await;
            if i % 4 > 1 {
                // The beginning of a handshake that never goes on.
                stream.write_all(&[0x16, 3, 1]).await.unwrap();
            }
            idle.push(stream);
        }
        connect(&at, Some(&coordinator), to, LONG).await.unwrap();
        control.recv().await.unwrap();
        assert_eq!(idle.len(), 300 * (round + 1));
    }
}

#[tokio::test]
async fn one_identity_has_a_bounded_number_of_connections() {
    let home = Home::new();
    let mut opened = open(Some(&home.of("desk", Role::Coordinator))).await;
    let (at, to) = (opened.address.to_string(), (&name("desk"), Role::Coordinator));
    let phone = home.of("phone", Role::Client);
    let (ended, mut ends) = mpsc::unbounded_channel();
    for _ in 0..140 {
        let config = phone.client_config(ALPN_CONTROL);
        let mut stream = dial(&at, config, None, to, LONG).await.unwrap();
        let ended = ended.clone();
        tokio::spawn(async move {
            while stream.read(&mut [0; 64]).await.is_ok_and(|read| read > 0) {}
            let _ = ended.send(());
        });
    }
    for _ in 0..12 {
        ends.recv().await.unwrap();
    }
    for _ in 0..128 {
        opened.control.recv().await.unwrap();
    }
    assert!(opened.control.try_recv().is_err());
    for (who, role) in [("laptop", Role::Client), ("anna", Role::Admin)] {
        connect(&at, Some(&home.of(who, role)), to, LONG).await.unwrap();
        opened.control.recv().await.unwrap();
    }
}

#[tokio::test]
async fn a_connection_ends_when_its_certificate_expires() {
    let home = Home::new();
    let opened = open(Some(&home.of("desk", Role::Coordinator))).await;
    let (at, to) = (opened.address.to_string(), (&name("desk"), Role::Coordinator));
    let now = OffsetDateTime::now_utc();
    let until = now + time::Duration::seconds(3);
    let guest = home.authority.issue_between(&name("guest"), Role::Client, now, until).unwrap();
    let config = Identity::load(&guest).unwrap().client_config(ALPN_CONTROL);
    let mut stream = dial(&at, config, None, to, LONG).await.unwrap();
    stream.write_all(b"a").await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), stream.read(&mut [0])).await.unwrap();
    assert!(!matches!(ended, Ok(read) if read > 0), "{ended:?}");
    assert!(OffsetDateTime::now_utc() >= until - time::Duration::seconds(1));
}

#[tokio::test]
async fn a_removed_member_is_disconnected_and_others_stay_connected() {
    let home = Home::new();
    let mut opened = open(Some(&home.of("desk", Role::Coordinator))).await;
    let (at, to) = (opened.address.to_string(), (&name("desk"), Role::Coordinator));
    let mut streams = Vec::new();
    for who in ["guest", "phone"] {
        let config = home.of(who, Role::Client).client_config(ALPN_CONTROL);
        let mut stream = dial(&at, config, None, to, LONG).await.unwrap();
        stream.write_all(b"a").await.unwrap();
        opened.control.recv().await.unwrap();
        streams.push(stream);
    }
    let guest = (name("guest"), Role::Client);
    opened.inside.end(|peer| peer.identity.as_ref() == Some(&guest));
    let ended = tokio::time::timeout(LONG, streams[0].read(&mut [0])).await.unwrap();
    assert!(!matches!(ended, Ok(read) if read > 0), "{ended:?}");
    streams[1].write_all(b"b").await.unwrap();
    let still = tokio::time::timeout(Duration::from_millis(300), streams[1].read(&mut [0])).await;
    assert!(still.is_err(), "{still:?}");
}

#[tokio::test]
async fn tls_sessions_are_never_resumed() {
    let home = Home::new();
    let opened = open(Some(&home.of("desk", Role::Coordinator))).await;
    let (at, to) = (opened.address.to_string(), (&name("desk"), Role::Coordinator));
    let mut config = (*home.of("phone", Role::Client).client_config(ALPN_CONTROL)).clone();
    config.resumption = Resumption::store(Arc::new(ClientSessionMemoryCache::new(8)));
    let config = Arc::new(config);
    for _ in 0..3 {
        let stream = dial(&at, config.clone(), None, to, LONG).await.unwrap();
        let kind = stream.get_ref().1.handshake_kind();
        assert_eq!(kind, Some(rustls::HandshakeKind::Full));
    }
}
