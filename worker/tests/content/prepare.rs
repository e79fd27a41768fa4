//! What a later plan needs comes while another runs.

use super::world::{
    Asked, Call, Manner, Model, World, content, in_cache, on_the_map, placed, small, until, wide,
};
use galaxy_model::shape::Shape;
use galaxy_proto::v1;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

/// The request to place the whole of a model, in this epoch.
fn whole(model: &Model, epoch: u64) -> v1::PlaceRequest {
    v1::PlaceRequest {
        epoch,
        plan: postcard::to_stdvec(&model.plan(&[1.0])).unwrap(),
        peers: vec![v1::Peer { name: "d0".to_owned(), ..v1::Peer::default() }],
        ..v1::PlaceRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_of_a_later_plan_are_fetched_while_another_plan_runs() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("wide"), wide(2));
    let workers = [world.worker("d0", &[]).await, world.worker("d1", &[]).await];
    let all: Vec<_> = workers.iter().collect();
    let (first, second) = (model.plan(&[3.0, 1.0]), model.plan(&[1.0, 3.0]));
    for (ready, _) in world.place(&model, &first, &all, Manner::default()).await {
        ready.unwrap();
    }
    let prepared = world.prepare(&model, &second, &all, true).await;
    let ready = |rank: usize| prepared[rank].0.as_ref().unwrap();
    assert_eq!((ready(0).fetched_bytes, ready(0).weight_bytes), (0, 0));
    let grown = ready(1).fetched_bytes;
    assert!(grown > 0 && grown < model.pieces.total() / 2, "{grown}");
    for worker in &workers {
        let health = worker.client.clone().health(v1::HealthRequest {}).await.unwrap();
        assert_eq!(health.into_inner().epoch, 1, "it keeps its place");
    }
    // And then it takes no network.
    for (ready, asked) in world.place(&model, &second, &all, Manner::default()).await {
        assert_eq!((ready.unwrap().fetched_bytes, asked.pieces().len()), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_placement_ends_prefetching_and_uses_the_fetched_pieces() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    let (cache, some) = (world.cache("d0"), 20);
    let (client, of) = (worker.client.clone(), model.clone());
    let request = whole(&model, 0);
    let manner = Manner { most: some, ..Manner::default() };
    let preparing =
        placed(Call::Prepare { load: false }, client, of, request, manner, Arc::default());
    let preparing = tokio::spawn(preparing);
    until(&|| in_cache(&cache) >= some as u32).await;
    let (ready, asked) = world.alone(&model, &worker, Manner::default()).await;
    assert_eq!(asked.pieces().len(), model.pieces.count() as usize - some);
    assert!(ready.unwrap().fetched_bytes > 0);
    let fault = preparing.await.unwrap().unwrap_err();
    assert_eq!((fault.code.as_str(), fault.retryable), ("given_up", true), "{fault}");
    // Without a place it loads what it prepares for.
    let epoch = world.epoch;
    worker.client.clone().cancel(v1::CancelRequest { epoch }).await.unwrap();
    let (other, more) = (Shape { vocabulary: 4100, ..small() }, world.dir.path().join("other"));
    let other = Model::of(&more, other);
    let plan = other.plan(&[1.0]);
    let idle = world.prepare(&other, &plan, &[&worker], true).await.remove(0);
    let read = idle.0.unwrap().read_bytes;
    assert!(read > 0);
    let ready = world.alone(&other, &worker, Manner::default()).await.0.unwrap();
    assert_eq!((ready.reused, ready.weight_bytes, ready.read_bytes), (true, read, 0));
    // One that drains prepares for nothing.
    worker.client.clone().drain(v1::DrainRequest { off: false }).await.unwrap();
    let drains = world.prepare(&model, &plan, &[&worker], true).await;
    assert_eq!(drains[0].0.as_ref().unwrap_err().code, "given_up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_plan_is_prepared_during_a_placement() {
    let world = World::new();
    let model = Model::of(&world.dir.path().join("small"), small());
    let worker = world.worker("d0", &[]).await;
    let request = whole(&model, 1);
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(Asked::default()));
    let gate = open.clone();
    let until_open: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(move || gate.load(SeqCst));
    let shut = Manner { until: Some(until_open), ..Manner::default() };
    let call = |call, manner, asked| {
        tokio::spawn(placed(
            call,
            worker.client.clone(),
            model.clone(),
            request.clone(),
            manner,
            asked,
        ))
    };
    let placing = call(Call::Place, shut, asked.clone());
    until(&|| !asked.pieces().is_empty()).await;
    let prepare = Call::Prepare { load: true };
    let fault = call(prepare, Manner::default(), Arc::default()).await.unwrap().unwrap_err();
    assert_eq!(fault.code, "given_up", "{fault}");
    open.store(true, SeqCst);
    assert_eq!(placing.await.unwrap().unwrap().fetched_bytes, model.pieces.total());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_cache_room_nothing_is_fetched_ahead_of_the_placement() {
    let mut world = World::new();
    let model = Model::of(&world.dir.path().join("wide"), wide(2));
    // The one in the middle has other heads and columns in each.
    let (first, second) = (model.plan(&[1.0, 1.0, 2.0]), model.plan(&[2.0, 1.0, 1.0]));
    let limits = {
        let mut world = World::new();
        let workers = [
            world.worker("d0", &[]).await,
            world.worker("d1", &[]).await,
            world.worker("d2", &[]).await,
        ];
        let all: Vec<_> = workers.iter().collect();
        let placed = world.place(&model, &first, &all, Manner::default()).await;
        let prepared = world.prepare(&model, &second, &all, true).await;
        [&placed, &prepared].map(|ready| ready[1].0.as_ref().unwrap().fetched_bytes)
    };
    let limit = format!("{}B", limits[0] + limits[1] / 2);
    let workers = [
        world.worker("d0", &[]).await,
        world.worker("d1", &["--cache-bytes", &limit]).await,
        world.worker("d2", &[]).await,
    ];
    let all: Vec<_> = workers.iter().collect();
    world.place(&model, &first, &all, Manner::default()).await[1].0.as_ref().unwrap();
    let held = on_the_map(&content(&world.cache("d1")));
    let prepared = world.prepare(&model, &second, &all, true).await;
    assert_eq!(prepared[1].0.as_ref().unwrap().fetched_bytes, 0);
    assert_eq!(on_the_map(&content(&world.cache("d1"))), held, "what runs has lost nothing");
    let placed = world.place(&model, &second, &all, Manner::default()).await;
    assert!(placed[1].0.as_ref().unwrap().fetched_bytes >= limits[0] / 2);
}
