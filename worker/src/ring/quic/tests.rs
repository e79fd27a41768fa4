#![allow(clippy::unwrap_used)]

use super::{super::arrival::Ring, *};
use galaxy_proto::identity::Authority;

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn identity(authority: &Authority, who: &str) -> Identity {
    Identity::load(&authority.issue(&name(who), Role::Device, 30).unwrap()).unwrap()
}

fn ring(identity: &Identity) -> (Ring, String) {
    let socket = bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let ring = Ring::default();
    ring.open_quic(socket, identity).unwrap();
    (ring, address)
}

/// A server that does not speak Galaxy's protocol.
fn other(identity: &Identity, protocol: &[u8], versions: &[u32]) -> String {
    let tls = QuicServerConfig::try_from(identity.server_config(&[protocol])).unwrap();
    let server = ServerConfig::with_crypto(Arc::new(tls));
    let mut config = EndpointConfig::default();
    config.supported_versions(versions.to_vec());
    let socket = bind(([127, 0, 0, 1], 0).into()).unwrap();
    let runtime = Arc::new(TokioRuntime);
    let endpoint = Endpoint::new(config, Some(server), socket, runtime).unwrap();
    let address = endpoint.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Some(incoming) = endpoint.accept().await {
            drop(incoming.await);
        }
    });
    address
}

#[tokio::test]
async fn failed_quic_dials_give_an_error_with_the_cause() {
    const ONE: &[u32] = &[1];
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let home = Authority::create(here.path(), "home").unwrap();
    let away = Authority::create(there.path(), "away").unwrap();
    let (b, foreign) = (identity(&home, "b"), identity(&away, "b"));
    let (ring, _) = ring(&identity(&home, "a"));
    let silent = bind(([127, 0, 0, 1], 0).into()).unwrap();
    let cases = [
        (other(&b, b"galaxy-ring/0", ONE), "b", "not_galaxy", "of the same version?"),
        (other(&b, ALPN_RING, &[0xff00_001d]), "b", "not_galaxy", "(UDP) does not speak"),
        (other(&foreign, ALPN_RING, ONE), "b", "foreign_authority", "device b"),
        (other(&b, ALPN_RING, ONE), "c", "wrong_name", "c.device.galaxy was expected"),
        (silent.local_addr().unwrap().to_string(), "b", "timed_out", "(UDP) did not answer"),
        ("nowhere".to_owned(), "b", "bad_address", "write host:port"),
    ];
    for (address, who, code, says) in cases {
        let patience = Duration::from_millis(if code == "timed_out" { 50 } else { 240_000 });
        let error = ring.dial_quic(&address, &name(who), patience).await.err().unwrap();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

/// More connections at one time than are let in without a proof of their address.
#[tokio::test]
async fn many_simultaneous_quic_dials_are_all_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let home = Authority::create(dir.path(), "home").unwrap();
    let ((a, _), (_b, address)) = (ring(&identity(&home, "a")), ring(&identity(&home, "b")));
    let mut dials = tokio::task::JoinSet::new();
    for _ in 0..3 * door::CROWD {
        let (a, address) = (a.clone(), address.clone());
        dials.spawn(async move {
            let patience = Duration::from_secs(240);
            a.dial_quic(&address, &name("b"), patience).await.map_err(|e| e.to_string())
        });
    }
    for dialled in dials.join_all().await {
        let peer = dialled.unwrap().peer();
        assert_eq!(peer.identity, Some((name("b"), Role::Device)));
    }
}

#[test]
fn a_blocking_wait_past_its_deadline_times_out() {
    let never = std::future::pending::<()>();
    let error = wait(never, Some(Duration::from_millis(1))).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

/// A thread goes on when another one wakes it, also if that happens before it sleeps.
#[test]
fn a_blocking_wait_ends_when_woken_by_another_thread() {
    let (sender, receiver) = oneshot::channel();
    let other = thread::spawn(move || sender.send(7).unwrap());
    assert_eq!(wait(receiver, None).unwrap(), Ok(7));
    other.join().unwrap();
}
