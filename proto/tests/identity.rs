//! Who gets through a door, and which errors the others get.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::DeviceName;
use galaxy_proto::{
    ALPN_RING,
    channel::{ConnectError, connect, dial},
    door::{Door, Hook, Peer},
    identity::{Authority, Identity, IdentityError, Role},
};
use rustls::ClientConfig;
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    sync::Arc,
    time::Duration,
};
use time::OffsetDateTime;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
    sync::mpsc,
};
use tokio_stream::StreamExt;

/// Only something that hangs takes so long, on whatever machine.
const LONG: Duration = Duration::from_secs(240);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn issue(authority: &Authority, who: &str, role: Role) -> Identity {
    Identity::load(&authority.issue(&name(who), role, 30).unwrap()).unwrap()
}

fn hours(from: i64, until: i64) -> (OffsetDateTime, OffsetDateTime) {
    let now = OffsetDateTime::now_utc();
    (now + time::Duration::hours(from), now + time::Duration::hours(until))
}

/// A config that shows a certificate which `Identity::load` would refuse to show.
fn unchecked(dir: &Path, alpn: &[u8]) -> Arc<ClientConfig> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join("ca.pem")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_file(dir.join("cert.pem")).unwrap()],
            PrivateKeyDer::from_pem_file(dir.join("key.pem")).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

/// A door of `identity`: its address, who came by gRPC, and who came by ring.
async fn door(
    identity: Option<&Identity>,
) -> (String, mpsc::UnboundedReceiver<()>, mpsc::UnboundedReceiver<Peer>) {
    door_at("127.0.0.1", identity).await
}

async fn door_at(
    host: &str,
    identity: Option<&Identity>,
) -> (String, mpsc::UnboundedReceiver<()>, mpsc::UnboundedReceiver<Peer>) {
    let listener = TcpListener::bind((host, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (control_sender, control) = mpsc::unbounded_channel();
    let (ring_sender, ring) = mpsc::unbounded_channel();
    let hook: Hook = Arc::new(move |peer, _stream| ring_sender.send(peer).unwrap());
    let mut door = Door::open(listener, identity, Some((ALPN_RING, hook)));
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Some(connection) = door.next().await {
            open.push(connection);
            let _ = control_sender.send(());
        }
    });
    (address, control, ring)
}

#[test]
fn an_authority_is_created_once_and_can_be_reopened() {
    let dir = tempfile::tempdir().unwrap();
    Authority::create(dir.path(), "home").unwrap();
    assert!(matches!(Authority::create(dir.path(), "home"), Err(IdentityError::Exists { .. })));
    let authority = Authority::open(dir.path()).unwrap();
    let identity = issue(&authority, "pi-1", Role::Device);
    assert_eq!((identity.name(), identity.role()), (&name("pi-1"), Role::Device));
    assert!(matches!(
        authority.issue(&name("pi-1"), Role::Device, 30),
        Err(IdentityError::Exists { .. })
    ));
    for key in ["ca/ca.key", "pi-1/key.pem"] {
        assert_eq!(mode(&dir.path().join(key)), 0o600, "{key}");
    }
}

/// The mode of a file or folder.
fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_key_that_others_may_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let held = authority.issue(&name("pi-1"), Role::Device, 30).unwrap();
    assert_eq!((mode(&held), mode(&dir.path().join("ca"))), (0o700, 0o700));
    let key = held.join("key.pem");
    set_mode(&key, 0o644);
    let error = Identity::load(&held).err().unwrap().to_string();
    assert!(error.contains(&format!("`chmod 600 {}`", key.display())), "{error}");
    set_mode(&key, 0o600);
    set_mode(&held.join("ca.pem"), 0o666);
    let error = Identity::load(&held).err().unwrap().to_string();
    assert!(error.contains("may write") && error.contains("ca.pem"), "{error}");
    set_mode(&held.join("ca.pem"), 0o644);
    // The folder is ours alone, and is closed.
    set_mode(&held, 0o755);
    Identity::load(&held).unwrap();
    assert_eq!(mode(&held), 0o700);

    set_mode(&dir.path().join("ca/ca.key"), 0o640);
    let error = Authority::open(dir.path()).err().unwrap().to_string();
    assert!(error.contains("ca.key`") && error.contains("chmod 600"), "{error}");
}

#[test]
fn symbolic_links_to_identity_or_authority_files_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    for (at, file) in ["key.pem", "cert.pem", "ca.pem"].into_iter().enumerate() {
        let held = authority.issue(&name(&format!("pi-{at}")), Role::Device, 30).unwrap();
        let elsewhere = dir.path().join(file);
        fs::rename(held.join(file), &elsewhere).unwrap();
        symlink(&elsewhere, held.join(file)).unwrap();
        let error = Identity::load(&held).err().unwrap().to_string();
        assert!(error.contains(file) && error.contains("symbolic link"), "{error}");
    }
    fs::rename(dir.path().join("ca/ca.key"), dir.path().join("ca.key")).unwrap();
    symlink(dir.path().join("ca.key"), dir.path().join("ca/ca.key")).unwrap();
    assert!(Authority::open(dir.path()).err().unwrap().to_string().contains("symbolic link"));
}

#[test]
fn loading_a_bad_identity_names_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let issue = |who: &str, from, until| {
        let (from, until) = hours(from, until);
        authority.issue_between(&name(who), Role::Device, from, until).unwrap()
    };
    let error = Identity::load(&issue("old", -48, -24)).err().unwrap();
    assert!(matches!(error, IdentityError::Expired { .. }));
    assert!(error.to_string().contains("device old"), "{error}");
    let error = Identity::load(&issue("young", 24, 48)).err().unwrap();
    assert!(matches!(error, IdentityError::NotYetValid { .. }));
    assert!(error.to_string().contains("clock"), "{error}");

    let other_dir = tempfile::tempdir().unwrap();
    let other = Authority::create(other_dir.path(), "away").unwrap();
    let foreign = other.issue(&name("pi-9"), Role::Device, 30).unwrap();
    fs::copy(dir.path().join("ca/ca.pem"), foreign.join("ca.pem")).unwrap();
    assert!(matches!(Identity::load(&foreign), Err(IdentityError::Foreign { .. })));

    let mixed = issue("mixed", -1, 24);
    fs::copy(issue("twin", -1, 24).join("key.pem"), mixed.join("key.pem")).unwrap();
    assert!(matches!(Identity::load(&mixed), Err(IdentityError::Unusable { .. })));
    fs::write(mixed.join("cert.pem"), "no certificate").unwrap();
    let error = Identity::load(&mixed).err().unwrap();
    assert!(error.to_string().contains("cert.pem"), "{error}");
    assert!(matches!(Identity::load(dir.path()), Err(IdentityError::File { .. })));
}

#[tokio::test]
async fn connections_are_routed_by_their_protocol() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let device = issue(&authority, "pi-1", Role::Device);
    let coordinator = issue(&authority, "desk", Role::Coordinator);
    let (address, mut control, mut ring) = door(Some(&device)).await;
    let to = (&name("pi-1"), Role::Device);
    connect(&address, Some(&coordinator), to, LONG).await.unwrap();
    control.recv().await.unwrap();
    let other = issue(&authority, "pi-2", Role::Device);
    dial(&address, other.client_config(ALPN_RING), None, to, LONG).await.unwrap();
    let peer = ring.recv().await.unwrap();
    assert_eq!(peer.identity, Some((name("pi-2"), Role::Device)));
}

#[tokio::test]
async fn rejected_connections_give_an_error_with_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let device = issue(&authority, "pi-1", Role::Device);
    let coordinator = issue(&authority, "desk", Role::Coordinator);
    let (address, _control, mut ring) = door(Some(&device)).await;

    // Another name, and another role, than the one that answers.
    for wanted in [(&name("pi-2"), Role::Device), (&name("pi-1"), Role::Coordinator)] {
        let error = connect(&address, Some(&coordinator), wanted, LONG).await.unwrap_err();
        assert!(matches!(error, ConnectError::WrongName { .. }), "{error}");
        assert!(error.to_string().contains("pi-1.device.galaxy"), "{error}");
    }
    // A certificate of another authority.
    let other_dir = tempfile::tempdir().unwrap();
    let other = Authority::create(other_dir.path(), "away").unwrap();
    let stranger = issue(&other, "desk", Role::Coordinator);
    let to = (&name("pi-1"), Role::Device);
    let error = connect(&address, Some(&stranger), to, LONG).await.unwrap_err();
    assert!(matches!(error, ConnectError::Foreign { .. }), "{error}");
    // Ours is out of its time: the device refuses it, and we learn so at once.
    for (who, from, until) in [("old", -48, -24), ("young", 24, 48)] {
        let (from, until) = hours(from, until);
        let dir = authority.issue_between(&name(who), Role::Device, from, until).unwrap();
        let error = dial(&address, unchecked(&dir, ALPN_RING), None, to, LONG).await.unwrap_err();
        assert!(matches!(error, ConnectError::RefusedUs { .. }), "{error}");
        assert!(error.to_string().contains("clock"), "{error}");
    }
    // A protocol that is not spoken.
    let error = dial(&address, device.client_config(b"smtp"), None, to, LONG).await.unwrap_err();
    assert!(matches!(error, ConnectError::Tls { .. }), "{error}");
    assert!(error.to_string().contains("no protocol that we do"), "{error}");
    // Nobody there, no address, nobody of that name.
    let error = connect("127.0.0.1:1", None, to, LONG).await.unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    assert!(error.retryable());
    let error = connect("pi-1", None, to, LONG).await.unwrap_err();
    assert!(matches!(error, ConnectError::Address { .. }), "{error}");
    assert!(ring.try_recv().is_err(), "nobody came through");
}

#[tokio::test]
async fn without_an_identity_local_connections_are_served() {
    let (address, mut control, _ring) = door(None).await;
    connect(&address, None, (&name("desk"), Role::Coordinator), LONG).await.unwrap();
    control.recv().await.unwrap();
}

/// An address of this machine that other machines may reach; none where it has no network.
async fn network_address() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").await.ok()?;
    // Nothing is sent: it only chooses the address that packets would come from.
    socket.connect("192.0.2.1:9").await.ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then(|| address.to_string())
}

#[tokio::test]
async fn without_an_identity_connections_from_the_network_are_refused() {
    let Some(host) = network_address().await else {
        eprintln!("skipped: this machine has no network");
        return;
    };
    let (address, mut control, _ring) = door_at(&host, None).await;
    let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
    // It is closed, or reset where the greeting was not read.
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.is_empty(), "{answer:?}");
    assert!(control.try_recv().is_err(), "nobody came through");
}

#[tokio::test]
async fn a_door_accepts_connections_after_garbage() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let device = issue(&authority, "pi-1", Role::Device);
    let (address, mut control, _ring) = door(Some(&device)).await;
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0x16, 3, 1, 0xff, 0xff, 1]] {
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        stream.shutdown().await.unwrap();
        drop(stream.read_to_end(&mut Vec::new()).await);
    }
    let coordinator = issue(&authority, "desk", Role::Coordinator);
    let to = (&name("pi-1"), Role::Device);
    connect(&address, Some(&coordinator), to, LONG).await.unwrap();
    control.recv().await.unwrap();
}
