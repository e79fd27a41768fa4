//! Machines that join a cluster, those that do not, and what is left of those that were removed: over real TLS.
#![allow(clippy::unwrap_used)]

use galaxy_common::{Bytes, DeviceName};
use galaxy_coord::{
    Cluster,
    audit::Audit,
    cluster::DeviceConfig,
    reception::{Reception, Update},
    registry::{LEDGER, Registry, ledger::Terms},
};
use galaxy_proto::{
    ALPN_JOIN, ALPN_RING,
    channel::{ConnectError, dial},
    door::{Door, Hook},
    identity::{Authority, Identity, Role},
    join::{Facts, JoinError, JoinLine, Pin, Secret, VetError, announce, join},
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    net::TcpListener,
    task::{JoinHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;
use tokio_stream::StreamExt;

const LONG: Duration = Duration::from_secs(300);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

/// A coordinator that only receives machines.
struct World {
    dir: tempfile::TempDir,
    registry: Arc<Registry>,
    identity: Identity,
    address: String,
    devices: Arc<Mutex<Vec<DeviceConfig>>>,
    _reception: Arc<Reception>,
    _door: JoinHandle<()>,
}

impl World {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("keys"), "home").unwrap();
        authority.issue(&name("boss"), Role::Coordinator, 30).unwrap();
        let file = dir.path().join("cluster.toml");
        let text = "[cluster]\nmodel = \"m\"\nidentity = \"keys/boss\"\nauthority = \"keys\"\n[[device]]\nname = \"nuc\"\naddress = \"127.0.0.1:7100\"\nmemory = \"1GB\"\n";
        fs::write(&file, text).unwrap();
        let cluster = Cluster::open(&file).unwrap();
        let identity = Identity::load(&cluster.identity).unwrap();
        let registry = Arc::new(Registry::open(&file, &cluster, &identity).unwrap());
        let devices: Arc<Mutex<Vec<DeviceConfig>>> = Arc::default();
        let kept = devices.clone();
        let update: Update = Arc::new(move |devices| {
            *kept.lock().unwrap() = devices;
            Box::pin(std::future::ready(()))
        });
        let reception = Reception::new(registry.clone(), identity.clone(), Audit::none(), update);
        let reception = Arc::new(reception);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut door = Door::open(listener, Some(&identity), Some((ALPN_JOIN, reception.hook())));
        let _door = tokio::spawn(async move {
            let mut open = Vec::new();
            while let Some(connection) = door.next().await {
                open.push(connection);
            }
        });
        Self { dir, registry, identity, address, devices, _reception: reception, _door }
    }

    fn invite(&self, role: Role, uses: u32) -> JoinLine {
        self.invite_at(&self.address, role, uses)
    }

    fn invite_at(&self, address: &str, role: Role, uses: u32) -> JoinLine {
        let terms = Terms { role, uses, lasts: Duration::from_secs(60), name: None };
        let by = "admin a".to_owned();
        self.registry.invite(terms, by, vec![address.to_owned()]).unwrap().0
    }

    fn path(&self, of: &str) -> PathBuf {
        self.dir.path().join(of)
    }

    async fn join(&self, line: &JoinLine, wish: &str) -> Result<Identity, JoinError> {
        join(line, Some(&name(wish))).await?.store(&self.path(wish))
    }
}

fn code(refused: Result<Identity, JoinError>) -> String {
    match refused.err().expect("refused") {
        JoinError::Refused(refusal) => {
            assert!(!refusal.message.is_empty());
            refusal.code
        }
        error => panic!("refused by itself: {error}"),
    }
}

#[tokio::test]
async fn a_machine_joins_once_by_an_invitation() {
    let world = World::new().await;
    let line = world.invite(Role::Device, 1);
    let identity = world.join(&line, "pi-1").await.unwrap();
    assert_eq!((identity.name(), identity.role()), (&name("pi-1"), Role::Device));
    assert_eq!(code(world.join(&line, "pi-2").await), "used");
    assert_eq!(code(world.join(&world.invite(Role::Client, 1), "pi-1").await), "name_taken");
    assert_eq!(code(world.join(&world.invite(Role::Client, 1), "nuc").await), "name_taken");
    assert_eq!(code(world.join(&world.invite(Role::Client, 1), "boss").await), "name_taken");
    // Uses hold when the coordinator starts again.
    let file = world.path("cluster.toml");
    let again = Registry::open(&file, &Cluster::open(&file).unwrap(), &world.identity).unwrap();
    assert_eq!(again.members().0, [(name("pi-1"), Role::Device)]);
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &str| fs::metadata(world.path(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(LEDGER), mode("pi-1/key.pem")), (0o600, 0o600));
    // It is let in as what it is: a coordinator serves clients.
    let laptop = world.join(&world.invite(Role::Client, 1), "laptop").await.unwrap();
    for (identity, served) in [(laptop, true), (identity, false)] {
        let config = identity.client_config(galaxy_proto::ALPN_CONTROL);
        let to = (&name("boss"), Role::Coordinator);
        let dialled = dial(&world.address, config, None, to, LONG).await;
        assert_eq!(dialled.is_ok(), served);
    }
}

#[tokio::test]
async fn of_several_concurrent_joins_by_one_invitation_one_succeeds() {
    let world = Arc::new(World::new().await);
    let line = world.invite(Role::Device, 1);
    let mut joining = JoinSet::new();
    for i in 0..4 {
        let (world, line) = (world.clone(), line.clone());
        joining.spawn(async move { world.join(&line, &format!("pi-{i}")).await });
    }
    let outcomes = joining.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    for refused in outcomes.into_iter().filter(Result::is_err) {
        assert_eq!(code(refused), "used");
    }
}

#[tokio::test]
async fn a_machine_refuses_to_join_a_server_of_another_authority() {
    let (world, other) = (World::new().await, World::new().await);
    let line = world.invite_at(&other.address, Role::Device, 1);
    let error = world.join(&line, "pi-1").await.err().unwrap();
    assert!(matches!(error, JoinError::Vet(VetError::Pin)), "{error}");
    let line = JoinLine { pin: Pin([0; 16]), ..world.invite(Role::Device, 1) };
    let error = world.join(&line, "pi-1").await.err().unwrap();
    assert!(matches!(error, JoinError::Vet(VetError::Pin)), "{error}");
    assert!(!world.path("pi-1").exists());
}

#[tokio::test]
async fn a_machine_refuses_to_join_a_server_with_a_device_certificate() {
    let world = World::new().await;
    let device = world.join(&world.invite(Role::Device, 1), "pi-1").await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = TlsAcceptor::from(device.joining_config());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            drop(acceptor.accept(stream).await);
        }
    });
    let line = world.invite_at(&address, Role::Device, 1);
    let error = world.join(&line, "pi-2").await.err().unwrap();
    let expected = VetError::Role { name: name("pi-1"), role: Role::Device };
    assert!(matches!(&error, JoinError::Vet(vet) if *vet == expected), "{error}");
}

#[tokio::test]
async fn a_wrong_secret_delays_its_address_and_the_invitation_stays_valid() {
    let world = World::new().await;
    let line = world.invite(Role::Device, 1);
    let wrong = JoinLine { secret: Secret([0; 16]), ..line.clone() };
    assert_eq!(code(world.join(&wrong, "pi-1").await), "wrong_secret");
    assert_eq!(code(world.join(&line, "pi-1").await), "slow");
    loop {
        match world.join(&line, "pi-1").await {
            Ok(_) => return,
            Err(JoinError::Refused(refusal)) if refusal.code == "slow" => {
                assert!(refusal.wait_s > 0);
            }
            Err(error) => panic!("the invitation holds: {error}"),
        }
    }
}

#[tokio::test]
async fn silent_connections_do_not_keep_a_machine_from_joining() {
    let world = World::new().await;
    let (line, boss) = (world.invite(Role::Device, 1), name("boss"));
    let config = world.identity.client_config(ALPN_JOIN);
    let mut silent = Vec::new();
    for _ in 0..300 {
        let to = (&boss, Role::Coordinator);
        silent.push(dial(&world.address, config.clone(), None, to, LONG).await.unwrap());
    }
    world.join(&line, "pi-1").await.unwrap();
}

#[tokio::test]
async fn no_certificate_is_issued_before_the_ledger_is_on_disk() {
    let world = World::new().await;
    let line = world.invite(Role::Device, 1);
    // No place for the new ledger.
    let blocked = world.path("members.json.new");
    fs::create_dir(&blocked).unwrap();
    assert_eq!(code(world.join(&line, "pi-1").await), "internal");
    assert!(world.registry.members().0.is_empty());
    fs::remove_dir(&blocked).unwrap();
    world.join(&line, "pi-1").await.unwrap();
}

#[tokio::test]
async fn a_removed_member_is_refused() {
    let world = World::new().await;
    let identity = world.join(&world.invite(Role::Client, 1), "laptop").await.unwrap();
    let config = identity.client_config(galaxy_proto::ALPN_CONTROL);
    let boss = name("boss");
    dial(&world.address, config.clone(), None, (&boss, Role::Coordinator), LONG).await.unwrap();
    world.registry.remove(&name("laptop"), "admin a".to_owned()).unwrap();
    let again = dial(&world.address, config, None, (&boss, Role::Coordinator), LONG).await;
    let error = again.err().unwrap();
    assert!(matches!(error, ConnectError::RefusedUs { .. }), "{error}");
    assert!(error.to_string().contains("removed from the cluster"), "{error}");
    let line = world.invite(Role::Client, 1);
    assert_eq!(code(world.join(&line, "laptop").await), "name_removed");
    // Also after a restart.
    let file = world.path("cluster.toml");
    let cluster = Cluster::open(&file).unwrap();
    let identity = Identity::load(&cluster.identity).unwrap();
    Registry::open(&file, &cluster, &identity).unwrap();
    assert!(identity.denied().now().has(&name("laptop")));
}

/// A worker of `identity`: it has a door, and nothing behind.
async fn worker(identity: &Identity) -> (u16, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let hook: Hook = Arc::new(|_, _| {});
    let mut door = Door::open(listener, Some(identity), Some((ALPN_RING, hook)));
    let task = tokio::spawn(async move { while door.next().await.is_some() {} });
    (port, task)
}

fn facts(port: u16) -> Facts {
    Facts {
        port: port.try_into().unwrap(),
        addresses: vec![],
        memory: Bytes(10_000_000_000),
        threads: 4,
    }
}

fn file(world: &World) -> Option<String> {
    fs::read_to_string(world.path("devices.d/pi-1.toml")).ok()
}

#[tokio::test]
async fn an_announced_device_is_dialled_back_and_saved_at_that_address() {
    let world = World::new().await;
    let identity = world.join(&world.invite(Role::Device, 1), "pi-1").await.unwrap();
    let to = (world.address.as_str(), &name("boss"));
    // A firewall, or no worker.
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let attempts = announce(&identity, to, facts(nobody)).await.unwrap();
    assert!(attempts.iter().all(|attempt| attempt.error.is_some()), "{attempts:?}");
    assert_eq!(file(&world), None);

    let (port, _worker) = worker(&identity).await;
    let attempts = announce(&identity, to, facts(port)).await.unwrap();
    assert!(attempts.iter().any(|attempt| attempt.error.is_none()), "{attempts:?}");
    let text = file(&world).unwrap();
    assert!(text.contains(&format!("address = \"127.0.0.1:{port}\"")), "{text}");
    assert!(text.contains("memory = \"6000MB\"") && text.contains("threads = 4"), "{text}");
    let names = |world: &World| -> Vec<String> {
        world.devices.lock().unwrap().iter().map(|device| device.name.to_string()).collect()
    };
    assert_eq!(names(&world), ["nuc", "pi-1"], "the fleet is told");

    // What a person changed stays; where it is now does not.
    let edited = text.replace("6000MB", "2GB");
    fs::write(world.path("devices.d/pi-1.toml"), edited).unwrap();
    let (elsewhere, _worker) = worker(&identity).await;
    announce(&identity, to, facts(elsewhere)).await.unwrap();
    let text = file(&world).unwrap();
    assert!(text.contains("memory = \"2000MB\""), "{text}");
    assert!(
        text.contains(&format!(":{elsewhere}\"")) && !text.contains(&port.to_string()),
        "{text}"
    );

    world.registry.remove(&name("pi-1"), "admin a".to_owned()).unwrap();
    assert_eq!(file(&world), None);
    assert!(announce(&identity, to, facts(elsewhere)).await.is_err());
}

#[tokio::test]
async fn an_announcement_from_a_client_is_refused() {
    let world = World::new().await;
    let client = world.join(&world.invite(Role::Client, 1), "laptop").await.unwrap();
    let to = (world.address.as_str(), &name("boss"));
    match announce(&client, to, facts(7100)).await {
        Err(JoinError::Refused(refusal)) => assert_eq!(refusal.code, "not_a_device"),
        other => panic!("{other:?}"),
    }
    assert!(!Path::new(&world.path("devices.d")).exists());
}
