//! Place: checks the plan, holds the shard, forms the links. And prepare: as much of that as can be
//! done while another epoch runs.

mod request;

pub(crate) use request::Request;

use crate::{
    content::{
        self, Arriving, Evictable,
        data::Data,
        fetch::{self, Meter, Sources},
        links::ModelServer,
        own,
        share::Shared,
    },
    core::Core,
    error::WorkerError,
    ring::Formation,
    running::{Active, LOWERED, LoadedShard, ShardKey},
    state::{Refusal, WorkerState},
    tasks::{blocking, lock, on_thread},
};
use galaxy_common::{Activations, Bytes, Epoch};
use galaxy_engine::{
    executor::Executor,
    link::Links,
    weights::{Shard, WeightError},
};
use galaxy_graph::{Lowered, budget, holdings::transition, operators::OperatorGraph};
use galaxy_model::ModelDir;
use galaxy_proto::v1;
use std::{
    ops::ControlFlow,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedRwLockWriteGuard, mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tonic::Status;

/// The time between two reports of progress, which is for people.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// The most devices that are asked for pieces of the model while programs run.
const HELD_BESIDE: usize = 2;

/// The channel that takes the events of a placement. When it closes, the coordinator hung up.
pub(crate) type Events = mpsc::Sender<Result<v1::PlaceEvent, Status>>;

/// What a placement read and fetched.
#[derive(Clone, Copy)]
struct Placed {
    /// Bytes of the weights as held.
    bytes: Bytes,
    /// Bytes of weights that were read for the shard.
    read: Bytes,
    /// Bytes of the model that came over the network.
    fetched: Bytes,
    /// Bytes of the model that came from other devices; also counted in `fetched`.
    from_peers: Bytes,
}

impl Placed {
    fn of(bytes: Bytes, read: Bytes) -> Self {
        Self { bytes, read, fetched: Bytes(0), from_peers: Bytes(0) }
    }

    /// The same placement, with the bytes that came over the network.
    fn fetched(self, meter: &Meter) -> Self {
        let of = |value: &AtomicU64| Bytes(value.load(Ordering::Relaxed));
        Self { fetched: of(&meter.fetched), from_peers: of(&meter.from_peers), ..self }
    }
}

/// Reports the progress of a placement.
struct PlacementProgress {
    meter: Meter,
    events: Events,
    last: Mutex<Instant>,
    /// Whether it is ahead of a placement: then nothing of an epoch that runs may be touched.
    ahead: bool,
    /// Set when a preparation is not wanted any more.
    over: AtomicBool,
}

impl PlacementProgress {
    fn new(events: &Events, ahead: bool) -> Arc<Self> {
        let (meter, last) = (Meter::default(), Mutex::new(Instant::now()));
        let over = AtomicBool::new(false);
        Arc::new(Self { meter, events: events.clone(), last, ahead, over })
    }

    /// Reports the progress, if the last report is some time ago.
    fn tell(&self) {
        let mut last = lock(&self.last);
        if last.elapsed() < PROGRESS_EVERY {
            return;
        }
        *last = Instant::now();
        let of = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let progress = v1::PlaceProgress {
            bytes_done: of(&self.meter.read),
            bytes_total: of(&self.meter.to_read),
            fetched: of(&self.meter.fetched),
            to_fetch: of(&self.meter.to_fetch),
        };
        let event = v1::place_event::Event::Progress(progress);
        // A slow reader misses some.
        drop(self.events.try_send(Ok(v1::PlaceEvent { event: Some(event) })));
    }

    /// Asks the coordinator to call with the model.
    async fn want(&self, core: &Core) -> Result<oneshot::Receiver<ModelServer>, WorkerError> {
        let waiting = core.content.model_server.wait();
        let event = v1::place_event::Event::Wanted(v1::ModelWanted {});
        let wanted = self.events.send(Ok(v1::PlaceEvent { event: Some(event) })).await;
        wanted.map(|()| waiting).map_err(|_| WorkerError::GivenUp)
    }

    /// Reports the progress again and again.
    async fn go_on(&self) -> std::convert::Infallible {
        let mut ticks = tokio::time::interval(PROGRESS_EVERY);
        loop {
            ticks.tick().await;
            self.tell();
        }
    }
}

/// Places an epoch and reports into `events`.
pub(crate) async fn place(core: Arc<Core>, request: v1::PlaceRequest, events: Events) {
    let (epoch, begun) = (Epoch(request.epoch), Instant::now());
    let placed = until_ready(&core, request, &events).await;
    report(&core, ("placement", epoch), begun, placed, &events).await;
}

/// Prepares a placement as far as is possible while an epoch runs, and reports into `events`. The
/// epoch of the request has no meaning.
pub(crate) async fn prepare(core: Arc<Core>, request: v1::PrepareRequest, events: Events) {
    let begun = Instant::now();
    let mut changes = core.state.subscribe();
    let epoch = changes.borrow().epoch();
    let over = |state: &WorkerState| {
        state.epoch() != epoch || state.placing() || state.measuring() || state.draining()
    };
    let told = PlacementProgress::new(&events, true);
    // In this order: no preparation begins beside a placement.
    let prepared = tokio::select! {
        biased;
        _ = changes.wait_for(over) => Err(WorkerError::GivenUp),
        () = events.closed() => Err(WorkerError::GivenUp),
        prepared = until_there(&core, request, &told) => prepared,
        never = told.go_on() => match never {},
    };
    told.over.store(true, Ordering::Relaxed);
    report(&core, ("preparation", epoch), begun, prepared, &events).await;
}

/// Logs the result of a placement or a preparation, and sends it to the coordinator.
async fn report(
    core: &Core,
    (what, epoch): (&str, Epoch),
    begun: Instant,
    placed: Result<Placed, WorkerError>,
    events: &Events,
) {
    let event = match placed {
        Ok(Placed { bytes, read, fetched, from_peers }) => {
            tracing::info!(%epoch, %bytes, %read, %fetched, %from_peers, "{what} done");
            let ready = v1::PlaceReady {
                weight_bytes: bytes.0,
                reused: read == Bytes(0),
                seconds: begun.elapsed().as_secs_f64(),
                read_bytes: read.0,
                fetched_bytes: fetched.0,
                peer_bytes: from_peers.0,
            };
            Ok(v1::PlaceEvent { event: Some(v1::place_event::Event::Ready(ready)) })
        }
        Err(error) => {
            tracing::warn!(%epoch, %error, "{what} failed");
            Err(error.into_status(&core.name))
        }
    };
    // Nobody listens any more if this fails.
    drop(events.send(event).await);
}

async fn until_ready(
    core: &Arc<Core>,
    request: v1::PlaceRequest,
    events: &Events,
) -> Result<Placed, WorkerError> {
    let request = Request::read(&core.name, core.grant.plain_port.is_some(), request)?;
    let epoch = request.epoch;
    let there = open(core, &request).await?;
    core.tell(|state| state.place(epoch))?;
    let placed = {
        let mut state = core.state.subscribe();
        tokio::select! {
            placed = hold_and_link(core, request, there, events) => placed,
            () = events.closed() => Err(WorkerError::GivenUp),
            _ = state.wait_for(|state| !state.is_current(epoch)) => Err(WorkerError::GivenUp),
        }
    };
    if placed.is_err() && core.tell(|state| state.cancel(epoch)) {
        core.ring.close(epoch);
        core.disconnect(epoch).await?;
    }
    placed
}

/// Opens the model and checks the plan and the budget against it: nothing is loaded yet. Returns
/// the model and the budget; none if the model has to be fetched.
async fn open(
    core: &Arc<Core>,
    request: &Request,
) -> Result<Option<(Arc<ModelDir>, Bytes)>, WorkerError> {
    let (models, plan) = (core.content.models.clone(), request.plan.clone());
    let opened = blocking(move || {
        let model = models.open(&plan.model, &plan.fingerprint)?;
        Ok::<_, WorkerError>(model.with_activations(plan.activations)?)
    });
    match opened.await? {
        Ok(model) => {
            let model = Arc::new(model);
            let granted = check(core, request, model.clone()).await?;
            Ok(Some((model, granted)))
        }
        Err(error) if core.content.cache.is_some() && error.is_absent_model() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Checks the plan and the budget against a model. Returns the budget.
async fn check(core: &Core, request: &Request, model: Arc<ModelDir>) -> Result<Bytes, WorkerError> {
    let (plan, rank, engine) = (request.plan.clone(), request.rank, core.grant.engine);
    let needed = blocking(move || {
        plan.validate(model.spec().extent())?;
        engine.check(&OperatorGraph::of(model.spec()))?;
        let formats = engine.holds(model.formats());
        Ok::<_, WorkerError>(budget::needs(model.spec(), &formats, &plan, rank)?.total())
    });
    let needed = needed.await??;
    let (mut granted, mut granter) = (request.device().budget, "its budget in the plan");
    for (limit, by) in [
        (request.limit, "memory in the cluster file"),
        (core.grant.memory, "the worker's own --memory"),
    ] {
        if let Some(limit) = limit.filter(|limit| *limit < granted) {
            (granted, granter) = (limit, by);
        }
    }
    match needed > granted {
        true => Err(WorkerError::Budget { needed, granted, granter, device: core.name.clone() }),
        false => Ok(granted),
    }
}

/// The lock on the held shard, which nobody else changes meanwhile.
type Holding = OwnedRwLockWriteGuard<Option<LoadedShard>>;

async fn hold_and_link(
    core: &Arc<Core>,
    request: Request,
    there: Option<(Arc<ModelDir>, Bytes)>,
    events: &Events,
) -> Result<Placed, WorkerError> {
    core.disconnect(request.epoch).await?;
    let formation = Formation {
        epoch: request.epoch,
        rank: request.rank,
        digest: request.digest,
        plan: request.plan.clone(),
        peers: request.peers.clone(),
        link: request.plan.link,
        links: galaxy_graph::links(&request.plan),
    };
    // Together, because peers load for different times, and each waits for the links only for a
    // while.
    let links =
        async { core.ring.form(&core.identity, formation).await.map_err(WorkerError::from) };
    let told = PlacementProgress::new(events, false);
    let shard = get_and_hold(core, &request, there, &told);
    let both = async { tokio::try_join!(shard, links) };
    let ((model, held, placed), links) = tokio::select! {
        both = both => both?,
        never = told.go_on() => match never {},
    };
    let (shared, epoch) = (core.clone(), request.epoch);
    blocking(move || shared.connect(&held, request, model, links)).await??;
    if let Some(at) = core.ring.ends(epoch) {
        core.tasks.spawn(end_with_certificate(Arc::downgrade(core), epoch, at));
    }
    Ok(placed)
}

/// Ends an epoch when the certificate of a device at one of its links ends.
async fn end_with_certificate(core: Weak<Core>, epoch: Epoch, at: Instant) {
    let Some(mut state) = core.upgrade().map(|core| core.state.subscribe()) else { return };
    tokio::select! {
        () = sleep_until(at) => {}
        // The epoch is over, and its links are closed.
        _ = state.wait_for(|state| state.epoch() > epoch) => return,
    }
    if let Some(core) = core.upgrade() {
        tracing::warn!(%epoch, "the certificate of a device ended: so does the epoch");
        if let Err(error) = core.cancel(epoch).await {
            tracing::warn!(%error, "closing the links");
        }
    }
}

/// The part of a model that a placement may have to fetch, and from whom.
struct MissingPieces {
    model: Arc<ModelDir>,
    granted: Bytes,
    data: Arc<Data>,
    list: Vec<u32>,
    sources: Sources,
}

/// Has the coordinator call, and checks plan and budget against the model that it brings. None if
/// there is no `room`.
async fn call(
    core: &Arc<Core>,
    request: &Request,
    told: &PlacementProgress,
    room: Evictable,
) -> Result<Option<MissingPieces>, WorkerError> {
    let waiting = told.want(core).await?;
    let arriving = content::open(core, waiting, &request.plan.fingerprint).await?;
    let granted = check(core, request, arriving.model.clone()).await?;
    let device = request.device();
    let place = (request.rank.index(), request.plan.ring.len());
    let list = content::order(&arriving.model, &arriving.data.pieces, &device.holds(), place)?;
    let Some(Arriving { model, data, supply }) = content::room(core, arriving, &list, room).await?
    else {
        return Ok(None);
    };
    *lock(&core.content.shared) = Some(Shared::Cached(data.clone()));
    let sources = Sources {
        coordinator: supply,
        peers: request.neighbours(),
        identity: core.identity.clone(),
        from: core.ring.dials_from(),
    };
    Ok(Some(MissingPieces { model, granted, data, list, sources }))
}

/// Fetches the model, as much of it as this device needs, and holds the shard: it is loaded while
/// the rest is fetched.
async fn fetch_and_hold(
    core: &Arc<Core>,
    request: &Request,
    told: &Arc<PlacementProgress>,
) -> Result<(Arc<ModelDir>, Holding, Placed), WorkerError> {
    let coming = call(core, request, told, Evictable::Anew).await?;
    let MissingPieces { model, granted, data, list, sources } = coming.ok_or(WorkerError::Bug)?;
    let (loaded, all_loaded) = oneshot::channel::<()>();
    let done = async { drop(all_loaded.await) };
    let fetching = async {
        let fetched = fetch::fetch(data, list, sources, &told.meter, done).await;
        fetched.map_err(WorkerError::from)
    };
    let holding = async {
        let held = hold(core, request, (model.clone(), granted), told).await;
        drop(loaded);
        held
    };
    // The reason why nothing comes is reported before the piece that is missing.
    let ((), (held, placed)) = tokio::try_join!(fetching, holding)?;
    Ok((model, held, placed.fetched(&told.meter)))
}

/// Holds the shard, of the model that is on this device or is fetched.
async fn get_and_hold(
    core: &Arc<Core>,
    request: &Request,
    there: Option<(Arc<ModelDir>, Bytes)>,
    told: &Arc<PlacementProgress>,
) -> Result<(Arc<ModelDir>, Holding, Placed), WorkerError> {
    let Some((model, granted)) = there else { return fetch_and_hold(core, request, told).await };
    match prove_and_hold(core, request, (model, granted), told).await {
        Err(error) if core.content.cache.is_some() && error.is_changed_model() => {
            tracing::warn!(%error, "the model is brought by the coordinator instead");
            fetch_and_hold(core, request, told).await
        }
        held => held,
    }
}

/// Holds the shard of a model directory of this device: what is read of it is compared with the
/// manifest first.
async fn prove_and_hold(
    core: &Arc<Core>,
    request: &Request,
    (model, granted): (Arc<ModelDir>, Bytes),
    told: &Arc<PlacementProgress>,
) -> Result<(Arc<ModelDir>, Holding, Placed), WorkerError> {
    if !own::prove_again(core, &model).await? {
        let waiting = told.want(core).await?;
        own::prove(core, &model, waiting).await?;
    }
    let of = model.clone();
    let shared = blocking(move || Shared::own(of)).await??;
    *lock(&core.content.shared) = Some(shared);
    let (held, placed) = hold(core, request, (model.clone(), granted), told).await?;
    own::finish(core, &model).await?;
    Ok((model, held, placed))
}

/// Fetches what this device lacks of the model for a later placement. If it has no part in what
/// runs, it holds the shard, too.
async fn until_there(
    core: &Arc<Core>,
    request: v1::PrepareRequest,
    told: &Arc<PlacementProgress>,
) -> Result<Placed, WorkerError> {
    let v1::PrepareRequest { place, load } = request;
    let request =
        Request::read(&core.name, core.grant.plain_port.is_some(), place.unwrap_or_default())?;
    let there = open(core, &request).await?;
    if load && !core.state.borrow().has_epoch() {
        return Ok(get_and_hold(core, &request, there, told).await?.2);
    }
    let nothing = Placed::of(Bytes(0), Bytes(0));
    if there.is_some() {
        return Ok(nothing);
    }
    let coming = call(core, &request, told, Evictable::Beside).await?;
    // Where the cache has no room beside what runs, all is fetched with the placement.
    let Some(MissingPieces { data, list, mut sources, .. }) = coming else { return Ok(nothing) };
    // The receive windows of connections take memory that programs have, too.
    sources.peers.truncate(HELD_BESIDE);
    fetch::fetch(data, list, sources, &told.meter, std::future::ready(())).await?;
    Ok(nothing.fetched(&told.meter))
}

impl Core {
    /// Hands the links to the executor. Runs to its end even if nobody waits for it any more, so it
    /// checks itself whether the epoch still lives; `held` keeps the next placement waiting.
    fn connect(
        &self,
        held: &Holding,
        request: Request,
        model: Arc<ModelDir>,
        links: Links,
    ) -> Result<(), WorkerError> {
        let held = held.as_ref().expect("hold() returns the lock with a shard inside");
        let epoch = request.epoch;
        held.executor.connect(epoch, links);
        // Sequences of another epoch begin again from their tokens.
        held.executor.end(None);
        self.activate(Some(Arc::new(Active {
            epoch,
            rank: request.rank,
            plan: request.plan,
            model,
            executor: Arc::downgrade(&held.executor),
            lowered: Mutex::new(Lowered::new(LOWERED)),
        })));
        if self.tell(|state| state.placed(epoch)) {
            return Ok(());
        }
        self.activate(None);
        held.executor.disconnect(Some(epoch));
        Err(WorkerError::GivenUp)
    }
}

/// Holds the shard of `device`: the one that is held if it is the same, one made out of it if both
/// have room on the way, else a new one, loaded after the old one was dropped. Nobody else changes
/// it while the lock that is returned lives.
///
/// # Cancel safety
/// A load that has begun runs to its end, and is held for the next placement; it stops only when
/// the worker ends, or when it is for a preparation that is not wanted any more.
async fn hold(
    core: &Arc<Core>,
    request: &Request,
    (model, granted): (Arc<ModelDir>, Bytes),
    told: &Arc<PlacementProgress>,
) -> Result<(Holding, Placed), WorkerError> {
    let (device, cache) = (request.device(), request.plan.cache);
    // No more kernel threads than the device grants, whatever a plan says.
    let threads = device.threads.clamp(1, core.grant.threads);
    let key = ShardKey {
        fingerprint: model.fingerprint().to_owned(),
        activations: request.plan.activations,
        holds: device.holds().into_owned(),
        threads,
        cache,
        streaming: device.streaming.clone(),
    };
    let mut held = core.running.held.clone().write_owned().await;
    if told.ahead && core.state.borrow().has_epoch() {
        return Err(WorkerError::GivenUp);
    }
    if let Some(bytes) = held.as_ref().filter(|held| held.key == key).map(|held| held.bytes) {
        return Ok((held, Placed::of(bytes, Bytes(0))));
    }
    let (device, name, told) = (device.clone(), core.name.to_string(), told.clone());
    let (ending, engine) = (core.ending.clone(), core.grant.engine);
    let shared = core.clone();
    // Where the model is being fetched, the load waits for its pieces.
    let loading = on_thread("load", move || {
        let mut progress = |done, total| {
            told.meter.read.store(done, Ordering::Relaxed);
            told.meter.to_read.store(total, Ordering::Relaxed);
            told.tell();
            match ending.load(Ordering::Relaxed) || told.over.load(Ordering::Relaxed) {
                false => ControlFlow::Continue(()),
                true => ControlFlow::Break(()),
            }
        };
        // A shard has the formats of the model, whichever engine takes it then.
        let formats = model.formats();
        let graph = OperatorGraph::of(model.spec());
        let fits = |old: &LoadedShard| {
            let way = transition(&graph, formats, Some(&old.key.holds), &device.holds());
            // Weights that come from disk are read again.
            let held = old.key.streaming.is_none() && key.streaming.is_none();
            // Matrices that are held in blocks are no part of those that are held as f32.
            let exact = |key: &ShardKey| key.activations == Activations::F32;
            let alike = exact(&old.key) == exact(&key);
            held && alike && old.key.fingerprint == key.fingerprint && way.peak <= granted
        };
        // A task that still reports on a run may hold the executor: then its shard is dropped with
        // it.
        let old = held.take().filter(fits).and_then(|old| Arc::into_inner(old.executor));
        let loaded = match old.and_then(Executor::into_shard) {
            Some(shard) => shard.reshape(model, &device, &mut progress),
            None if key.streaming.is_some() => {
                let shards =
                    shared.content.cache.as_ref().ok_or(WorkerError::NoShards)?.shards()?;
                let shard = Shard::stream(model.clone(), &device, &shards, &mut progress);
                shard.map(|shard| (shard.bytes(), shard)).map(|(read, shard)| (shard, read))
            }
            None => {
                let read = transition(&graph, formats, None, &device.holds()).read;
                let shard = Shard::load(model.clone(), &device, &mut progress);
                shard.map(|shard| (shard, read))
            }
        };
        let (shard, read) = match loaded {
            Err(WeightError::Stopped) => return Err(Refusal::Draining.into()),
            loaded => loaded?,
        };
        let engine = engine.start(shard, threads, cache)?;
        let (bytes, _) = engine.held();
        let executor = Arc::new(Executor::start(&name, engine)?);
        *held = Some(LoadedShard { key, executor, bytes });
        Ok((held, Placed::of(bytes, read)))
    })?;
    loading.await.map_err(|_| WorkerError::Bug)?
}
