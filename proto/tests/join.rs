//! Joining: clocks that are wrong, messages out of turn, and connections of members that are removed.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::DeviceName;
use galaxy_proto::{
    ALPN_CONTROL, PROTOCOL,
    channel::dial,
    door::Door,
    identity::{Authority, Identity, Moment, Removed, Role},
    join::{
        Binding, Grant, Greeting, Guest, InvitationId, JoinError, JoinLine, JoinStep, Message, Pin,
        Proof, Request, Secret, Vetted, vet,
    },
};
use rustls::pki_types::{CertificateDer, UnixTime, pem::PemObject};
use std::{path::Path, time::Duration};
use tokio::{io::AsyncReadExt, net::TcpListener};
use tokio_stream::StreamExt;

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn chain(identity: &Path) -> Vec<CertificateDer<'static>> {
    let certificate = |file| CertificateDer::from_pem_file(identity.join(file)).unwrap();
    vec![certificate("cert.pem"), certificate("ca.pem")]
}

fn line(pin: Pin) -> JoinLine {
    let addresses = vec!["127.0.0.1:7000".to_owned()];
    JoinLine { addresses, pin, invitation: InvitationId([1; 8]), secret: Secret([2; 16]) }
}

fn greeting(time: Moment) -> Message {
    Message::Greeting(Greeting { protocol: PROTOCOL, version: "1".into(), time })
}

/// A coordinator's certificate, valid for so many hours from now.
fn coordinator(from: i64, until: i64) -> (tempfile::TempDir, Pin, Vec<CertificateDer<'static>>) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let now = time::OffsetDateTime::now_utc();
    let (from, until) = (now + time::Duration::hours(from), now + time::Duration::hours(until));
    let issued = authority.issue_between(&name("boss"), Role::Coordinator, from, until).unwrap();
    let pin = authority.pin().unwrap();
    (dir, pin, chain(&issued))
}

#[test]
fn joining_with_a_wrong_clock_fails_before_the_invitation_is_used() {
    // By the clock of 1970 nothing is valid yet.
    let (_dir, pin, chain) = coordinator(-1, 24);
    let epoch = UnixTime::since_unix_epoch(Duration::from_secs(100));
    let vetted = vet(&chain, &pin, epoch).unwrap();
    assert!(matches!(vetted.valid, Some((Some(_), None))));
    let (line, request) = (line(pin), Request::new().unwrap());
    let mut guest = Guest::new(&line, None, &request, &vetted, [0; 32]);
    let error = guest.handle(Moment(100), greeting(Moment::now())).unwrap_err();
    assert!(matches!(error, JoinError::Clock { .. }), "{error}");
    assert!(error.to_string().contains("date -u -s @"), "{error}");
}

#[test]
fn joining_a_coordinator_with_an_expired_certificate_fails() {
    let (_dir, pin, chain) = coordinator(-48, -24);
    let vetted = vet(&chain, &pin, UnixTime::now()).unwrap();
    let (line, request) = (line(pin), Request::new().unwrap());
    let mut guest = Guest::new(&line, None, &request, &vetted, [0; 32]);
    let error = guest.handle(Moment::now(), greeting(Moment::now())).unwrap_err();
    assert!(matches!(error, JoinError::Validity), "{error}");
}

fn ready() -> (tempfile::TempDir, JoinLine, Vetted) {
    let (dir, pin, chain) = coordinator(-1, 24);
    let vetted = vet(&chain, &pin, UnixTime::now()).unwrap();
    (dir, line(pin), vetted)
}

#[test]
fn a_guest_accepts_only_a_proven_grant_for_its_own_key() {
    let (dir, line, vetted) = ready();
    let authority = Authority::open(dir.path()).unwrap();
    let request = Request::new().unwrap();
    let binding = Binding { exporter: [7; 32], server: vetted.key.clone() };
    let grant = |binding: &Binding, request: &Request, of: &Request| {
        let certificate = authority.certify(&name("pi-1"), Role::Device, 1, &of.key()).unwrap();
        let proof =
            Proof::of_host(&line.secret, binding, request.der(), &request.key(), &certificate);
        Message::Grant(Grant { name: name("pi-1"), role: Role::Device, certificate, proof })
    };
    let guest = || {
        let mut guest = Guest::new(&line, Some(&name("pi-1")), &request, &vetted, [7; 32]);
        let step = guest.handle(Moment::now(), greeting(Moment::now())).unwrap();
        assert!(matches!(step, JoinStep::Send(Message::Ask(_))));
        guest
    };
    let now = Moment::now();
    let good = guest().handle(now, grant(&binding, &request, &request)).unwrap();
    assert!(matches!(good, JoinStep::Done(granted) if granted.name == name("pi-1")));
    let elsewhere = Binding { exporter: [8; 32], ..binding.clone() };
    let proxied = guest().handle(now, grant(&elsewhere, &request, &request)).unwrap_err();
    assert!(matches!(proxied, JoinError::Proof), "{proxied}");
    let other = Request::new().unwrap();
    let foreign = guest().handle(now, grant(&binding, &request, &other)).unwrap_err();
    assert!(matches!(foreign, JoinError::Certificate), "{foreign}");
    let mut early = Guest::new(&line, None, &request, &vetted, [7; 32]);
    let turn = early.handle(now, grant(&binding, &request, &request)).unwrap_err();
    assert!(matches!(turn, JoinError::Turn), "{turn}");
    let again = guest().handle(now, greeting(now)).unwrap_err();
    assert!(matches!(again, JoinError::Turn), "{again}");
}

#[tokio::test]
async fn a_connection_ends_when_its_peer_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let issue =
        |who: &str, role| Identity::load(&authority.issue(&name(who), role, 1).unwrap()).unwrap();
    let (boss, laptop) = (issue("boss", Role::Coordinator), issue("laptop", Role::Client));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut door = Door::open(listener, Some(&boss), None);
    let to = (&name("boss"), Role::Coordinator);
    let long = Duration::from_secs(300);
    let _standing =
        dial(&address, laptop.client_config(ALPN_CONTROL), None, to, long).await.unwrap();
    let mut connection = door.next().await.unwrap().unwrap();
    let reading = tokio::spawn(async move { connection.read_u8().await });
    let mut removed = Removed { version: 1, ..Removed::default() };
    removed.names.insert(name("laptop"));
    assert!(boss.denied().take(removed.clone()));
    let error = reading.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("removed"), "{error}");
    assert!(dial(&address, laptop.client_config(ALPN_CONTROL), None, to, long).await.is_err());
    // Those that dial refuse it, too; by its key, whatever its name.
    let mut by_key = Removed { version: 2, ..Removed::default() };
    let key = ring::digest::digest(&ring::digest::SHA256, laptop.key());
    by_key.keys.insert(key.as_ref().try_into().unwrap());
    assert!(boss.denied().take(by_key));
    assert!(!boss.denied().take(removed), "older lists change nothing");
    assert!(dial(&address, laptop.client_config(ALPN_CONTROL), None, to, long).await.is_err());
}

#[test]
fn the_list_of_removed_members_survives_saving_and_loading() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("removed");
    assert_eq!(Removed::load(&path).unwrap(), Removed::default());
    let mut removed = Removed { version: 3, ..Removed::default() };
    removed.names.insert(name("pi-1"));
    removed.keys.insert([7; 32]);
    removed.save(&path).unwrap();
    assert_eq!(Removed::load(&path).unwrap(), removed);
    std::fs::write(&path, "no list").unwrap();
    assert!(Removed::load(&path).is_err());
}
