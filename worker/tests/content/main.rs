//! Models that workers do not have: real workers, and a coordinator's part played here.
#![allow(clippy::unwrap_used, missing_docs)]

mod own;
mod prepare;
mod world;

use galaxy_model::{ModelDir, manifest::Digest, shape::Shape};
use galaxy_proto::{
    channel::connect,
    fault::{Fault, from_status},
    identity::{Authority, Identity, Role},
    v1::{self, content_client::ContentClient, supplied::Event},
};
use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use world::{LONG, Manner, Model, World, content, in_cache, name, on_the_map, small, until, wide};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_resumes_fetching_where_it_stopped() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let all = u64::from(model.pieces.count());
    let first = 20;
    {
        let worker = world.worker("d0", &[]).await;
        let (cache, id) = (world.cache("d0"), worker.child.id());
        let placing = world.alone(&model, &worker, Manner { most: first, ..Manner::default() });
        let killed = async {
            until(&|| in_cache(&cache) >= first as u32).await;
            let id = id.to_string();
            assert!(Command::new("kill").args(["-s", "KILL", &id]).status().unwrap().success());
        };
        let ((refused, asked), ()) = tokio::join!(placing, killed);
        assert!(refused.is_err());
        assert!(asked.pieces().len() > first, "more was asked for than came");
    }
    let worker = world.worker("d0", &[]).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert!(!*asked.manifest.lock().unwrap(), "it has the manifest already");
    assert_eq!(asked.pieces().len() as u64, all - first as u64);
    assert_eq!(ready.unwrap().fetched_bytes, model.bytes(&asked.pieces()));
    // And now it has all.
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    let ready = ready.unwrap();
    assert!(ready.reused && ready.fetched_bytes == 0 && asked.pieces().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_pieces_damaged_on_disk_are_fetched_again() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    drop({
        let worker = world.worker("d0", &[]).await;
        let (ready, _) = world.alone(&model, &worker, Manner::default()).await;
        assert_eq!(ready.unwrap().fetched_bytes, model.pieces.total());
        worker
    });
    let piece = model.pieces.count() / 2;
    let data = content(&world.cache("d0")).join("data");
    let file = OpenOptions::new().read(true).write(true).open(data).unwrap();
    let (at, mut byte) = (model.pieces.span(piece).start + 7, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    let worker = world.worker("d0", &[]).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(asked.pieces(), BTreeSet::from([piece]));
    assert_eq!(ready.unwrap().fetched_bytes, model.pieces.bytes(piece));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_with_a_wrong_digest_are_refused() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    let damage = Manner { damage: true, ..Manner::default() };
    let fault = world.alone(&model, &worker, damage).await.0.unwrap_err();
    assert_eq!((fault.code.as_str(), fault.retryable), ("bad_content", false), "{fault}");
    assert_eq!(on_the_map(&content(&world.cache("d0"))), 0, "nothing of it was kept");
    // A coordinator that is right is believed.
    world.alone(&model, &worker, Manner::default()).await.0.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_plan_fetches_only_missing_pieces() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("wide"), wide(2));
    let workers = [world.worker("d0", &[]).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let (first, second) = (model.plan(&[3.0, 1.0]), model.plan(&[1.0, 3.0]));
    let placed = world.place(&model, &first, &all, Manner::default()).await;
    let fetched = |placed: &[(Result<v1::PlaceReady, Fault>, _)]| {
        let one =
            |(ready, _): &(Result<v1::PlaceReady, Fault>, _)| ready.as_ref().unwrap().fetched_bytes;
        [one(&placed[0]), one(&placed[1])]
    };
    let before = fetched(&placed);
    assert!(before[1] < model.pieces.total() * 6 / 10, "{before:?} of {}", model.pieces.total());
    assert!(before[0] > before[1]);
    // The small one grows, and the large one has all that it needs.
    let placed = world.place(&model, &second, &all, Manner::default()).await;
    let [shrunk, grown] = fetched(&placed);
    assert_eq!(shrunk, 0);
    assert!(grown > 0 && grown < model.pieces.total() / 2, "{grown}");
    // And back, where all is there still.
    let placed = world.place(&model, &first, &all, Manner::default()).await;
    assert_eq!(fetched(&placed), [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_fetch_pieces_from_each_other() {
    let mut world = World::new();
    let models = world.dir.path().join("models");
    let model = Model::of(&models.join("wide"), wide(4));
    // One has the directory, the other nothing.
    let flags = ["--models", models.to_str().unwrap()];
    let workers = [world.worker("d0", &flags).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let plan = model.plan(&[1.0, 1.0]);
    // The coordinator gives nothing before the other device has given much.
    let cache = world.cache("d1");
    let until = Arc::new(move || in_cache(&cache) >= 50);
    let late = Manner { until: Some(until), ..Manner::default() };
    let placed = world.place(&model, &plan, &all, late).await;
    let ready = |rank: usize| placed[rank].0.as_ref().unwrap();
    assert_eq!(ready(0).fetched_bytes, 0, "it has the directory");
    assert!(placed[0].1.pieces().is_empty());
    let (fetched, from_peers) = (ready(1).fetched_bytes, ready(1).peer_bytes);
    assert!(fetched < model.pieces.total() * 8 / 10);
    assert_eq!(from_peers, fetched - model.bytes(&placed[1].1.pieces()));
    assert!(from_peers > fetched / 2, "{from_peers} of {fetched}");
}

/// A relay to a device through which its bytes come back at so many per second, or fewer.
async fn slow_way(to: String, rate: usize) -> String {
    const EACH: Duration = Duration::from_millis(20);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let (mut from, mut back) = near.into_split();
            let (mut sent, mut onward) = TcpStream::connect(&to).await.unwrap().into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from, &mut onward).await });
            tokio::spawn(async move {
                let (mut some, mut ticks) = (vec![0; rate / 50], tokio::time::interval(EACH));
                while let Ok(count @ 1..) = sent.read(&mut some).await {
                    ticks.tick().await;
                    back.write_all(&some[..count]).await?;
                }
                back.shutdown().await
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_of_a_slow_device_come_from_the_coordinator_instead() {
    let mut world = World::new();
    let models = world.dir.path().join("models");
    let shape = Shape { vocabulary: 4000, ..Shape::bert(1, 1024, 16) };
    let model = Model::of(&models.join("wide"), shape);
    let flags = ["--models", models.to_str().unwrap()];
    let mut workers = [world.worker("d0", &flags).await, world.worker("d1", &[]).await];
    // A piece of a matrix takes it five seconds.
    workers[0].address = slow_way(workers[0].address.clone(), 50 << 10).await;
    // All vectors have come of it, but one that the coordinator is asked for: it is at a matrix.
    let small = |piece: &u32| model.pieces.bytes(*piece) < 100 << 10;
    let vectors = (0..model.pieces.count()).filter(small).count() as u32;
    let (cache, log) = (world.cache("d1"), world.log("d1"));
    let until = Arc::new(move || in_cache(&cache) >= vectors - 1);
    let late = Manner { until: Some(until), ..Manner::default() };
    let plan = model.plan(&[1.0, 1.0]);
    let placed = world.place(&model, &plan, &workers.iter().collect::<Vec<_>>(), late).await;
    let ready = placed[1].0.as_ref().unwrap();
    assert!(ready.peer_bytes < 1 << 20, "{} of {}", ready.peer_bytes, ready.fetched_bytes);
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("the coordinator is faster"), "{log}");
}

/// A copy of a model in which every piece of half a cut is another, though its fingerprint is the
/// same.
fn forged(model: &Model, to: &Path) -> Arc<Model> {
    fs::create_dir_all(to).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(model.dir.path().join(file), to.join(file)).unwrap();
    }
    let path = to.join("model.safetensors");
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let end = file.metadata().unwrap().len();
    for at in (end / 20..end).step_by(100_000) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        if ModelDir::open(to).unwrap().fingerprint() != model.dir.fingerprint() {
            file.write_all_at(&byte, at).unwrap();
        }
    }
    assert_eq!(ModelDir::open(to).unwrap().fingerprint(), model.dir.fingerprint());
    Model::open(to)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_pieces_are_fetched_from_a_device_that_sends_wrong_ones() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("wide"), wide(3));
    let forgery = world.dir.path().join("models");
    // A device of ours would find that out, so it is told that this is the model.
    let lie = Some(forged(&model, &forgery.join("wide")));
    let flags = ["--models", forgery.to_str().unwrap()];
    let workers = [world.worker("d0", &flags).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let plan = model.plan(&[1.0, 1.0]);
    let log = world.log("d1");
    let until = Arc::new(move || fs::read_to_string(&log).unwrap().contains("wrong digest"));
    let late = Manner { until: Some(until), lie, ..Manner::default() };
    let placed = world.place(&model, &plan, &all, late).await;
    let ready = placed[1].0.as_ref().unwrap();
    assert!(ready.fetched_bytes > 0 && ready.peer_bytes < ready.fetched_bytes / 2);
    // What it took is right: nothing is fetched again by a worker that is started anew.
    drop(workers);
    let worker = world.worker("d1", &[]).await;
    let other = world.worker("d0", &flags).await;
    let placed = world.place(&model, &plan, &[&other, &worker], Manner::default()).await;
    assert_eq!(placed[1].0.as_ref().unwrap().fetched_bytes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_piece_cache_stays_within_its_byte_limit() {
    let mut world = World::new();
    let dir = world.dir.path().to_owned();
    let (first, second) = (
        Model::of(&dir.join("first"), small()),
        Model::of(&dir.join("second"), Shape { vocabulary: 4100, ..small() }),
    );
    let total = first.pieces.total();
    let bound = |bytes: u64| bytes.to_string() + "B";
    {
        let limit = bound(total / 2);
        let worker = world.worker("d0", &["--cache-bytes", &limit]).await;
        let fault = world.alone(&first, &worker, Manner::default()).await.0.unwrap_err();
        assert_eq!(fault.code, "no_room", "{fault}");
        assert!(fault.message.contains("--cache-bytes"), "{fault}");
    }
    let limit = bound(total * 3 / 2);
    let worker = world.worker("d0", &["--cache-bytes", &limit]).await;
    for model in [&first, &second, &first] {
        let (ready, asked) = world.alone(model, &worker, Manner::default()).await;
        // The other one had to go.
        assert_eq!(ready.unwrap().fetched_bytes, model.pieces.total());
        assert_eq!(asked.pieces().len(), model.pieces.count() as usize);
        let kept = content(&world.cache("d0"));
        assert_eq!(
            kept.file_name().unwrap().to_str().unwrap(),
            Digest::of(&model.manifest).to_string()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_never_share_a_cache() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let first = world.worker("d0", &[]).await;
    world.alone(&model, &first, Manner::default()).await.0.unwrap();
    let second = world.worker("d0", &[]).await;
    let fault = world.alone(&model, &second, Manner::default()).await.0.unwrap_err();
    assert_eq!(fault.code, "bad_cache", "{fault}");
    assert!(fault.message.contains("--cache"), "{fault}");
    // Without a cache it is as it was: what is not there is refused.
    let models = world.dir.path().join("none");
    fs::create_dir(&models).unwrap();
    let flags = ["--cache-bytes", "0B", "--models", models.to_str().unwrap()];
    let third = world.worker("d0", &flags).await;
    let fault = world.alone(&model, &third, Manner::default()).await.0.unwrap_err();
    assert_eq!(fault.code, "unknown_model", "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_devices_of_the_cluster_may_fetch_pieces() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    world.alone(&model, &worker, Manner::default()).await.0.unwrap();
    let wants = v1::Wants {
        content: Digest::of(&model.manifest).0.to_vec(),
        pieces: vec![0, u32::MAX],
        ..v1::Wants::default()
    };
    let fetch = async |authority: &Authority, role: Role, wants: v1::Wants| {
        let who = name(&format!("a-{role}-{}", wants.pieces.len()));
        let identity = authority.issue(&who, role, 1).unwrap();
        let identity = Identity::load(&identity).unwrap();
        let to = (&name("d0"), Role::Device);
        let channel = connect(&worker.address, Some(&identity), to, LONG).await.ok()?;
        let (sender, stream) = mpsc::channel(4);
        // What names the content names no pieces.
        sender.send(v1::Wants { pieces: vec![], ..wants.clone() }).await.unwrap();
        sender.send(wants).await.unwrap();
        let answer = ContentClient::new(channel).fetch(ReceiverStream::new(stream)).await;
        Some(answer.map(|answer| (sender, answer.into_inner())).map_err(|s| from_status(&s)))
    };
    assert!(fetch(&world.authority, Role::Client, wants.clone()).await.is_none(), "no client");
    let fault = fetch(&world.authority, Role::Coordinator, wants.clone()).await.unwrap();
    let fault = fault.err().unwrap();
    assert_eq!(fault.code, "permission_denied", "{fault}");
    let stranger = tempfile::tempdir().unwrap();
    let stranger = Authority::create(stranger.path(), "away").unwrap();
    assert!(fetch(&stranger, Role::Device, wants.clone()).await.is_none(), "another cluster");
    let other = v1::Wants { content: vec![7; 32], pieces: vec![], ..wants.clone() };
    let fault = fetch(&world.authority, Role::Device, other).await.unwrap().err().unwrap();
    assert_eq!(fault.code, "no_content", "{fault}");
    let (_sender, mut answer) =
        fetch(&world.authority, Role::Device, wants).await.unwrap().unwrap();
    let mut pieces = Vec::new();
    while pieces.len() < 2 {
        let said = tokio::time::timeout(LONG, answer.message()).await.unwrap().unwrap().unwrap();
        match said.event.unwrap() {
            Event::Piece(piece) => pieces.push(piece),
            Event::Holding(bits) => {
                let count: u32 = bits.iter().map(|byte| byte.count_ones()).sum();
                assert_eq!(count, model.pieces.count());
            }
            other => panic!("{other:?}"),
        }
    }
    let mut first = Vec::new();
    model.dir.read_piece(&model.pieces, 0, &mut first).unwrap();
    assert_eq!(pieces[0].data[..], first[..]);
    assert!(pieces[1].data.is_empty(), "there is no such piece");
}
