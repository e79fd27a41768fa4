//! Workers that measure themselves and their links, as a coordinator has them do it.
#![allow(clippy::unwrap_used, missing_docs)]

mod manifest;

use galaxy_common::{Bytes, Cache, DeviceName, DeviceProfile, LinkType, Strategy, WireType};
use galaxy_engine::compute::choice::EngineChoice;
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::ModelDir;
use galaxy_proto::{
    ALPN_RING,
    channel::{connect, dial},
    fault::{Fault, from_status},
    identity::{Authority, Identity, Role},
    v1::{self, worker_client::WorkerClient},
};
use galaxy_worker::{
    Worker, WorkerConfig,
    ring::handshake::{HandshakeReply, ProbeHandshake, WELCOME_BYTES},
};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::transport::Channel;

/// Only something that hangs takes so long, on whatever machine.
const LONG: Duration = Duration::from_secs(240);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden")
}

struct Pair {
    _dir: tempfile::TempDir,
    authority: Authority,
    model: ModelDir,
    workers: Vec<(Worker, WorkerClient<Channel>)>,
}

impl Pair {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "home").unwrap();
        let desk = authority.issue(&name("desk"), Role::Coordinator, 30).unwrap();
        let desk = Identity::load(&desk).unwrap();
        let mut workers = Vec::new();
        for device in ["d0", "d1"].map(name) {
            let config = WorkerConfig {
                identity: authority.issue(&device, Role::Device, 30).unwrap(),
                listen: ([127, 0, 0, 1], 0).into(),
                from: None,
                models: Some(golden()),
                cache: None,
                engine: EngineChoice::Cpu,
                threads: 1,
                memory: Some(Bytes(500_000_000)),
                plain: true,
            };
            let worker = Worker::start(config).await.unwrap();
            let address = worker.address().to_string();
            let channel = connect(&address, Some(&desk), (&device, Role::Device), LONG);
            workers.push((worker, WorkerClient::new(channel.await.unwrap())));
        }
        let model = ModelDir::open(&golden().join("bert")).unwrap();
        Self { _dir: dir, authority, model, workers }
    }

    fn client(&self, device: usize) -> WorkerClient<Channel> {
        self.workers[device].1.clone()
    }

    fn peer(&self, device: usize) -> v1::Peer {
        let worker = &self.workers[device].0;
        v1::Peer {
            name: format!("d{device}"),
            address: worker.address().to_string(),
            plain_port: worker.plain_port().unwrap().into(),
        }
    }

    /// Places an epoch on the first device alone.
    async fn place(&self, epoch: u64) -> Result<v1::PlaceReady, Fault> {
        let member = |i: usize| Member {
            name: name(&format!("d{i}")),
            budget: Bytes(1 << 30),
            threads: 1,
            share: 1.0,
        };
        let terms = PlanOptions {
            model: self.model.name(),
            fingerprint: self.model.fingerprint(),
            formats: self.model.formats(),
            strategy: Strategy::Local,
            wire: WireType::F32,
            tiles: 1,
            max_rows: 64,
            cache: Cache::NONE,
        };
        let plan = share::plan(self.model.spec(), &terms, &[member(0)]).unwrap();
        let request = v1::PlaceRequest {
            epoch,
            plan: postcard::to_stdvec(&plan).unwrap(),
            rank: 0,
            peers: vec![self.peer(0)],
            memory_bytes: 0,
        };
        let fault = |status| from_status(&status);
        let mut events = self.client(0).place(request).await.map_err(fault)?.into_inner();
        let mut supplies = tokio::task::JoinSet::new();
        loop {
            match events.message().await.map_err(fault)?.unwrap().event.unwrap() {
                v1::place_event::Event::Ready(ready) => return Ok(ready),
                v1::place_event::Event::Progress(_) => {}
                v1::place_event::Event::Wanted(_) => {
                    let (client, path) = (self.client(0), self.model.path().to_owned());
                    supplies.spawn(async move { manifest::say(client, &path).await });
                }
            }
        }
    }

    fn request(&self) -> v1::ProfileRequest {
        v1::ProfileRequest {
            model: self.model.name().to_owned(),
            fingerprint: self.model.fingerprint().to_owned(),
            threads: 0,
            max_rows: 64,
            memory_bytes: 0,
            activations: "a16".to_owned(),
        }
    }

    async fn profile(&self, device: usize) -> Result<DeviceProfile, Fault> {
        let fault = |status| from_status(&status);
        let asked = self.client(device).profile(self.request()).await.map_err(fault)?;
        let (mut events, mut told) = (asked.into_inner(), 0);
        loop {
            let event = events.message().await.map_err(fault)?.unwrap();
            match event.event.unwrap() {
                v1::profile_event::Event::Progress(at) => {
                    assert!(at.done <= at.total && !at.now.is_empty());
                    told += 1;
                }
                v1::profile_event::Event::Wanted(_) => panic!("it has the model"),
                v1::profile_event::Event::Profile(bytes) => {
                    assert!(told > 0, "a person sees that it goes on");
                    return Ok(postcard::from_bytes(&bytes).unwrap());
                }
            }
        }
    }

    async fn probe(&self, link: LinkType, compute: bool) -> Result<v1::ProbeReply, Fault> {
        let request = v1::ProbeRequest {
            peer: Some(self.peer(1)),
            link: link.to_string(),
            compute,
            bulk_ms: 0,
        };
        let reply = self.client(0).probe(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| from_status(&status))
    }

    async fn shutdown(self) {
        for (worker, _) in self.workers {
            worker.shutdown().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_is_measured_only_between_placements() {
    let pair = Pair::start().await;
    let profile = pair.profile(0).await.unwrap();
    profile.check(&pair.model.shape_key()).unwrap();
    assert_eq!((profile.device.as_str(), profile.threads), ("d0", 1));
    assert_eq!(profile.memory, Bytes(500_000_000));
    let described = pair.client(0).describe(v1::DescribeRequest { protocol: 0 }).await.unwrap();
    assert_eq!(described.into_inner().engine, profile.engine);

    pair.place(1).await.unwrap();
    let refused = pair.profile(0).await.unwrap_err();
    assert_eq!((refused.code.as_str(), refused.retryable), ("holds_place", false), "{refused}");
    assert!(refused.message.contains("stop the coordinator"), "{refused}");
    let refused = pair.probe(LinkType::Tls, false).await.unwrap_err();
    assert_eq!(refused.code, "holds_place");
    pair.client(0).cancel(v1::CancelRequest { epoch: 1 }).await.unwrap();

    let narrow = v1::ProfileRequest { memory_bytes: 1 << 20, ..pair.request() };
    let mut events = pair.client(0).profile(narrow).await.unwrap().into_inner();
    let refused = loop {
        match events.message().await {
            Ok(event) => drop(event.expect("a refusal comes before the end")),
            Err(status) => break from_status(&status),
        }
    };
    assert!(refused.message.contains("memory in the cluster file allows 1.0 MB"), "{refused}");

    let unknown = v1::ProfileRequest { model: "../bert".to_owned(), ..pair.request() };
    let mut events = pair.client(0).profile(unknown).await.unwrap().into_inner();
    let refused = from_status(&events.message().await.unwrap_err());
    assert_eq!(refused.code, "unknown_model");
    // The shard went, and comes again.
    assert!(pair.place(2).await.is_ok());
    pair.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_measurement_ends_when_its_caller_disconnects() {
    let pair = Pair::start().await;
    let mut events = pair.client(0).profile(pair.request()).await.unwrap().into_inner();
    events.message().await.unwrap().unwrap();
    let refused = pair.place(1).await.unwrap_err();
    assert_eq!((refused.code.as_str(), refused.retryable), ("measuring", true));
    drop(events);
    // A placement is taken as soon as that is over.
    let begun = std::time::Instant::now();
    while let Err(refused) = pair.place(1).await {
        assert_eq!(refused.code, "measuring");
        assert!(begun.elapsed() < LONG, "it goes on");
    }
    pair.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn links_of_all_types_are_measured_idle_and_busy() {
    let pair = Pair::start().await;
    for (link, compute) in LinkType::ALL.into_iter().flat_map(|l| [(l, false), (l, true)]) {
        let reply = pair.probe(link, compute).await.unwrap();
        // As many bulks as it takes until they agree or are steady, or there is no more time.
        assert!(reply.round_trip_ns.len() >= 5 && (1..=8).contains(&reply.rate.len()), "{reply:?}");
        let sound = |values: &[f64]| values.iter().all(|v| v.is_finite() && *v > 0.0);
        assert!(sound(&reply.round_trip_ns) && sound(&reply.rate), "{reply:?}");
        assert!(sound(&reply.busy_rate), "{reply:?}");
        assert!(reply.bytes >= 1 << 20, "{reply:?}");
        assert_eq!(reply.send_cost_ns.len(), reply.receive_cost_ns.len());
        assert_eq!(reply.busy_rate.is_empty(), !compute, "{reply:?}");
        assert!(compute || reply.send_cost_ns.is_empty(), "{reply:?}");
        println!("{link}, compute {compute}: {reply:?}");
    }
    pair.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_cannot_be_probed_is_named_in_the_error() {
    let pair = Pair::start().await;
    pair.place(1).await.unwrap();
    let back = v1::ProbeRequest {
        peer: Some(pair.peer(0)),
        link: "tls".to_owned(),
        compute: false,
        bulk_ms: 0,
    };
    let refused = from_status(&pair.client(1).probe(back).await.unwrap_err());
    assert_eq!((refused.code.as_str(), refused.device.as_str()), ("no_link", "d0"), "{refused}");
    assert!(refused.message.contains("holds a place"), "{refused}");
    // The failed attempt holds nothing up.
    pair.client(0).cancel(v1::CancelRequest { epoch: 1 }).await.unwrap();
    let nobody = v1::Peer { address: "127.0.0.1:1".to_owned(), ..pair.peer(1) };
    let request =
        v1::ProbeRequest { peer: Some(nobody), link: "tls".to_owned(), compute: false, bulk_ms: 0 };
    let refused = from_status(&pair.client(0).probe(request).await.unwrap_err());
    assert_eq!((refused.code.as_str(), refused.device.as_str()), ("no_link", "d1"), "{refused}");
    let request =
        v1::ProbeRequest { peer: None, link: "tls".to_owned(), compute: false, bulk_ms: 0 };
    let refused = from_status(&pair.client(0).probe(request).await.unwrap_err());
    assert_eq!(refused.code, "invalid_argument");
    let unknown = "tin".to_owned();
    let request =
        v1::ProbeRequest { peer: Some(pair.peer(1)), link: unknown, compute: false, bulk_ms: 0 };
    let refused = from_status(&pair.client(0).probe(request).await.unwrap_err());
    assert_eq!(refused.code, "invalid_argument");
    assert!(refused.message.contains("known are tls plain quic"), "{refused}");
    pair.probe(LinkType::Tls, false).await.unwrap();
    pair.shutdown().await;
}

/// Who may open a probe, and that an order of a peer that is not valid ends the link.
#[tokio::test(flavor = "multi_thread")]
async fn probes_from_strangers_and_invalid_orders_are_rejected() {
    let pair = Pair::start().await;
    let dialled = async |who: &str, role, says: &str| {
        let identity =
            Identity::load(&pair.authority.issue(&name(who), role, 30).unwrap()).unwrap();
        let config = identity.client_config(ALPN_RING);
        let address = pair.workers[0].0.address().to_string();
        let mut link =
            dial(&address, config, None, (&name("d0"), Role::Device), LONG).await.unwrap();
        let hello = ProbeHandshake { name: name(says) };
        link.write_all(&hello.encode()).await.unwrap();
        let mut answer = [0; WELCOME_BYTES];
        link.read_exact(&mut answer).await.unwrap();
        (HandshakeReply::decode(&answer).unwrap(), link)
    };
    let (answer, _) = dialled("d9", Role::Device, "d8").await;
    assert_eq!(answer, HandshakeReply::WrongName, "a name that is not its own");
    let client = pair.authority.issue(&name("c1"), Role::Client, 30).unwrap();
    let config = Identity::load(&client).unwrap().client_config(ALPN_RING);
    let address = pair.workers[0].0.address().to_string();
    let refused = dial(&address, config, None, (&name("d0"), Role::Device), LONG).await;
    assert!(refused.is_err(), "no device");
    let (answer, mut link) = dialled("d7", Role::Device, "d7").await;
    assert_eq!(answer, HandshakeReply::Welcome);
    // One at a time: the first holds the device.
    let (second, _) = dialled("d6", Role::Device, "d6").await;
    assert!(matches!(second, HandshakeReply::Busy), "{second:?}");
    link.write_all(&[0xff; 4096]).await.unwrap();
    let mut rest = Vec::new();
    // Closed, in whatever way.
    drop(link.read_to_end(&mut rest).await);
    assert!(rest.is_empty());
    let begun = std::time::Instant::now();
    while let Err(refused) = pair.probe(LinkType::Tls, false).await {
        assert!(begun.elapsed() < LONG, "{refused}");
    }
    pair.shutdown().await;
}
