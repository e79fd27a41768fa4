//! What one client can take of a coordinator, and that others are answered meanwhile.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    Bytes, Cache, DeviceName,
    plan::{Strategy, WireType},
};
use galaxy_coord::{
    Cluster, Limits, LocalFleet, Session,
    api::Api,
    client_memory::{DEFAULT_CLIENT_MEMORY, Who},
    registry::Registry,
};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::ModelDir;
use galaxy_proto::{
    channel,
    fault::{Fault, from_status},
    identity::{Authority, Identity, Role},
    v1::{self, galaxy_client::GalaxyClient},
};
use http_body::{Body as HttpBody, Frame};
use std::{
    convert::Infallible,
    fs,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{net::TcpListener, task::JoinSet};
use tonic::{
    Status,
    body::Body,
    codegen::{Bytes as Part, Service as _, http},
    transport::Channel,
};

const LONG: Duration = Duration::from_secs(60);

struct World {
    authority: Authority,
    session: Session,
    address: String,
    _keys: tempfile::TempDir,
}

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn who(text: &str) -> Who {
    Some((name(text), Role::Client))
}

impl World {
    async fn new() -> Self {
        let keys = tempfile::tempdir().unwrap();
        let authority = Authority::create(keys.path(), "test").unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/bert");
        let model = Arc::new(ModelDir::open(&model).unwrap());
        let member = Member { name: name("d0"), budget: Bytes(1 << 32), threads: 1, share: 1.0 };
        let terms = PlanOptions {
            model: model.name(),
            fingerprint: model.fingerprint(),
            formats: model.formats(),
            strategy: Strategy::Local,
            wire: WireType::F32,
            tiles: 1,
            max_rows: 140,
            cache: Cache::NONE,
        };
        let plan = share::plan(model.spec(), &terms, &[member]).unwrap();
        let fleet = Arc::new(LocalFleet::open(model.clone(), plan).unwrap());
        let session = Session::new(
            model,
            fleet,
            Limits { queue: 8, timeout: LONG, client_memory: DEFAULT_CLIENT_MEMORY, drafts: true },
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let identity = authority.issue(&name("coordinator"), Role::Coordinator, 1).unwrap();
        let identity = Identity::load(&identity).unwrap();
        let file = keys.path().join("cluster.toml");
        fs::write(&file, "[cluster]\nmodel = \"m\"\nidentity = \"k\"\nauthority = \".\"\n")
            .unwrap();
        let cluster = Cluster::open(&file).unwrap();
        let registry = Arc::new(Registry::open(&file, &cluster, &identity).unwrap());
        let nothing = Arc::new(|_| Box::pin(std::future::ready(())) as Pin<Box<_>>);
        let api = Api::new(session.clone(), "test").joined_by(registry, nothing);
        tokio::spawn(async move {
            api.serve(listener, Some(&identity), std::future::pending()).await.unwrap();
        });
        Self { authority, session, address, _keys: keys }
    }

    async fn channel(&self, who: &str) -> Channel {
        self.channel_as(who, Role::Client).await
    }

    async fn channel_as(&self, who: &str, role: Role) -> Channel {
        let identity = self.authority.issue(&name(who), role, 1).unwrap();
        let identity = Identity::load(&identity).unwrap();
        let coordinator = name("coordinator");
        let to = (&coordinator, Role::Coordinator);
        channel::connect(&self.address, Some(&identity), to, LONG).await.unwrap()
    }

    fn held(&self, of: &str) -> u64 {
        self.session.client_memory().held(&who(of)).0
    }
}

async fn runs(channel: &Channel) {
    let sequences = vec![v1::Sequence { ids: vec![2, 3], ..Default::default() }];
    let output = v1::Wanted::Hidden.into();
    let request = v1::RunRequest { sequences, output, ..Default::default() };
    GalaxyClient::new(channel.clone()).run(request).await.unwrap();
}

/// A message in parts; it may never end.
struct Sending {
    left: Part,
    endless: bool,
}

impl HttpBody for Sending {
    type Data = Part;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Part>, Infallible>>> {
        let part = self.left.len().min(256 << 10);
        match (part, self.endless) {
            (0, true) => Poll::Pending,
            (0, false) => Poll::Ready(None),
            _ => Poll::Ready(Some(Ok(Frame::data(self.left.split_to(part))))),
        }
    }
}

/// Sends a message that claims to have `says` bytes, and gives the fault that comes back.
async fn send(channel: Channel, says: u32, message: &[u8], endless: bool) -> Fault {
    send_to("Galaxy/Embed", channel, says, message, endless).await
}

async fn send_to(
    method: &str,
    mut channel: Channel,
    says: u32,
    message: &[u8],
    endless: bool,
) -> Fault {
    let mut left = vec![0];
    left.extend(says.to_be_bytes());
    left.extend(message);
    let request = http::Request::builder()
        .method("POST")
        .uri(format!("/galaxy.v1.{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Sending { left: left.into(), endless }))
        .unwrap();
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let answer = channel.call(request).await.unwrap();
    from_status(&Status::from_header_map(answer.headers()).expect("an error has no body"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_empty_lists_are_refused_before_they_are_decoded() {
    let world = World::new().await;
    let greedy = world.channel("greedy").await;
    let lists = [0x1a, 0].repeat(1 << 20);
    let fault = send(greedy, lists.len() as u32, &lists, false).await;
    assert_eq!(fault.code, "too_many_texts");
    assert!(fault.message.contains("1048576"), "{fault}");
    assert_eq!(world.held("greedy"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_requests_hold_no_more_than_the_memory_of_one_client() {
    let world = World::new().await;
    let (greedy, honest) = (world.channel("greedy").await, world.channel("honest").await);
    let mut calls = JoinSet::new();
    for _ in 0..100 {
        let greedy = greedy.clone();
        calls.spawn(async move { send(greedy, 16 << 20, &[0; 1 << 16], true).await });
    }
    // Those that have no room are told so; the others are waited for.
    for _ in 0..100 - 256_000_000 / (2 * (16 << 20)) {
        let fault = calls.join_next().await.unwrap().unwrap();
        assert_eq!((fault.code.as_str(), fault.retryable), ("client_memory", true), "{fault}");
    }
    assert!((1..=256_000_000).contains(&world.held("greedy")));
    runs(&honest).await;
    // With the client goes what it held.
    calls.shutdown().await;
    drop(greedy);
    while world.held("greedy") > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_and_requests_that_are_too_large_are_refused() {
    let world = World::new().await;
    let greedy = world.channel("greedy").await;
    let mut client = GalaxyClient::new(greedy.clone());
    for truncate in [false, true] {
        let texts = vec!["sea".to_owned(), "sea ".repeat(1 << 18)];
        let request = v1::EmbedRequest { texts, truncate, ..Default::default() };
        let fault = from_status(&client.embed(request).await.unwrap_err());
        assert_eq!((fault.code.as_str(), fault.retryable), ("text_too_long", false));
        assert!(fault.message.contains("text 1 has 1048576 bytes"), "{fault}");
    }
    let fault = send(greedy, u32::MAX, &[], true).await;
    assert_eq!(fault.code, "request_too_large");
    assert_eq!(world.held("greedy"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_requests_from_clients_are_refused_before_they_are_read() {
    let world = World::new().await;
    let (client, admin) = (world.channel("me").await, world.channel_as("anna", Role::Admin).await);
    for method in ["Members/Invite", "Members/List", "Members/Remove"] {
        let fault = send_to(method, client.clone(), 4 << 20, &[], true).await;
        assert_eq!(fault.code, "permission_denied", "{method}");
        assert_eq!(world.held("me"), 0);
        let fault = send_to(method, admin.clone(), 4 << 20, &[], true).await;
        assert_eq!(fault.code, "request_too_large", "{method}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_results_hold_no_place_in_the_queue() {
    let world = World::new().await;
    let (greedy, honest) = (world.channel("greedy").await, world.channel("honest").await);
    let mut unread = Vec::new();
    // Far more than there are places.
    for _ in 0..30 {
        let sequences = vec![v1::Sequence { ids: vec![2; 100], ..Default::default() }; 100];
        let output = v1::Wanted::Hidden.into();
        let request = v1::RunRequest { sequences, output, ..Default::default() };
        unread.push(GalaxyClient::new(greedy.clone()).run(request).await.unwrap());
    }
    assert!(world.held("greedy") > 0);
    runs(&honest).await;
    assert_eq!(world.session.admission().queued(), 0);
    drop(unread);
    while world.held("greedy") > 0 {
        tokio::task::yield_now().await;
    }
}
