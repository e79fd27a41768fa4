//! Place: check the plan, hold the shard, form the links.

use crate::{
    core::{Active, Core, Held, HeldKey, blocking},
    error::WorkerError,
    ring::{Formation, PeerAddress},
    state::Refusal,
};
use galaxy_common::{Bytes, DeviceName, DevicePlan, Epoch, LinkType, Plan, Rank};
use galaxy_engine::{
    executor::Executor,
    link::Links,
    weights::{Shard, WeightError},
};
use galaxy_graph::{budget, holdings::transition};
use galaxy_model::ModelDir;
use galaxy_proto::v1;
use std::{
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::sync::{OwnedRwLockWriteGuard, mpsc};
use tonic::Status;

/// A plan for the largest cluster has some ten KB.
const MAX_PLAN_BYTES: usize = 4 << 20;
/// Progress is for people.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// Where events of a placement go. When it closes, the coordinator hung up.
pub(crate) type Events = mpsc::Sender<Result<v1::PlaceEvent, Status>>;

/// A request that was checked as far as that goes without files.
pub(crate) struct Request {
    epoch: Epoch,
    pub(crate) rank: Rank,
    pub(crate) plan: Arc<Plan>,
    digest: [u8; 32],
    peers: Vec<PeerAddress>,
    limit: Option<Bytes>,
}

/// What a placement took.
#[derive(Clone, Copy)]
struct Placed {
    /// Weights as held.
    bytes: Bytes,
    /// Of that, what was read for it.
    read: Bytes,
}

/// Places an epoch and reports into `events`.
pub(crate) async fn place(core: Arc<Core>, request: v1::PlaceRequest, events: Events) {
    let epoch = Epoch(request.epoch);
    let begun = Instant::now();
    let event = match until_ready(&core, request, &events).await {
        Ok(Placed { bytes, read }) => {
            tracing::info!(%epoch, %bytes, %read, "placed");
            let ready = v1::PlaceReady {
                weight_bytes: bytes.0,
                reused: read == Bytes(0),
                seconds: begun.elapsed().as_secs_f64(),
                read_bytes: read.0,
            };
            Ok(v1::PlaceEvent { event: Some(v1::place_event::Event::Ready(ready)) })
        }
        Err(error) => {
            tracing::warn!(%epoch, %error, "placement failed");
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
    let request = Request::read(&core.name, core.plain_port.is_some(), request)?;
    let epoch = request.epoch;
    let (model, granted) = open(core, &request).await?;
    core.tell(|state| state.place(epoch))?;
    let placed = {
        let mut state = core.state.subscribe();
        tokio::select! {
            placed = hold_and_link(core, request, (model, granted), events) => placed,
            () = events.closed() => Err(WorkerError::GivenUp),
            _ = state.wait_for(|state| !state.alive(epoch)) => Err(WorkerError::GivenUp),
        }
    };
    if placed.is_err() && core.tell(|state| state.cancel(epoch)) {
        core.ring.close(epoch);
        core.disconnect(epoch).await?;
    }
    placed
}

impl Request {
    /// Reads it, on the device of this name, which may take plain links or not.
    pub(crate) fn read(
        own: &DeviceName,
        takes_plain: bool,
        request: v1::PlaceRequest,
    ) -> Result<Self, WorkerError> {
        let v1::PlaceRequest { epoch, plan: bytes, rank, peers, memory_bytes } = request;
        let unreadable = WorkerError::PlanBytes { bytes: bytes.len() };
        if bytes.len() > MAX_PLAN_BYTES {
            return Err(unreadable);
        }
        let plan: Plan = postcard::from_bytes(&bytes).map_err(|_| unreadable)?;
        let rank = Rank(u16::try_from(rank).unwrap_or(u16::MAX));
        let device = plan.ring.get(rank.index());
        if device.is_none_or(|device| device.name != *own) {
            let found = device.map_or("nobody".to_owned(), |device| device.name.to_string());
            return Err(WorkerError::NotMine { rank, found, own: own.clone() });
        }
        let same = peers.len() == plan.ring.len()
            && peers.iter().zip(&plan.ring).all(|(peer, device)| peer.name == device.name.as_str());
        if !same {
            return Err(WorkerError::Peers);
        }
        if plan.link == LinkType::Plain && !takes_plain {
            return Err(WorkerError::NoPlain);
        }
        let address = |peer: v1::Peer| {
            let plain_port = u16::try_from(peer.plain_port).unwrap_or(0);
            PeerAddress { address: peer.address, plain_port }
        };
        Ok(Self {
            epoch: Epoch(epoch),
            rank,
            digest: *blake3::hash(&bytes).as_bytes(),
            plan: Arc::new(plan),
            peers: peers.into_iter().map(address).collect(),
            limit: (memory_bytes > 0).then_some(Bytes(memory_bytes)),
        })
    }

    fn device(&self) -> &DevicePlan {
        &self.plan.ring[self.rank.index()]
    }
}

/// Opens the model and checks the plan and the budget against it: nothing is loaded yet. Gives the
/// budget, too.
async fn open(core: &Arc<Core>, request: &Request) -> Result<(Arc<ModelDir>, Bytes), WorkerError> {
    let (models, plan, rank) = (core.models.clone(), request.plan.clone(), request.rank);
    let engine = core.engine;
    let checked = blocking(move || {
        let model = models.open(&plan.model, &plan.fingerprint)?;
        plan.validate(model.spec().extent())?;
        let width = engine.weight_width(model.dtype().width());
        let needs = budget::needs(model.spec(), width, &plan, rank)?;
        Ok::<_, WorkerError>((Arc::new(model), needs.total()))
    });
    let (model, needed) = checked.await??;
    let (mut granted, mut granter) = (request.device().budget, "its budget in the plan");
    for (limit, by) in
        [(request.limit, "memory in the cluster file"), (core.memory, "the worker's own --memory")]
    {
        if let Some(limit) = limit.filter(|limit| *limit < granted) {
            (granted, granter) = (limit, by);
        }
    }
    match needed > granted {
        true => Err(WorkerError::Budget { needed, granted, granter, device: core.name.clone() }),
        false => Ok((model, granted)),
    }
}

async fn hold_and_link(
    core: &Arc<Core>,
    request: Request,
    (model, granted): (Arc<ModelDir>, Bytes),
    events: &Events,
) -> Result<Placed, WorkerError> {
    core.disconnect(request.epoch).await?;
    let formation = Formation {
        epoch: request.epoch,
        rank: request.rank,
        digest: request.digest,
        plan: request.plan.clone(),
        peers: request.peers.clone(),
        plain: request.plan.link == LinkType::Plain,
        links: galaxy_graph::links(&request.plan),
    };
    // Together, because peers load for different times, and each has little time to be there.
    let links =
        async { core.ring.form(&core.identity, formation).await.map_err(WorkerError::from) };
    let shard = hold(core, request.device(), (model.clone(), granted), events);
    let ((held, placed), links) = tokio::try_join!(shard, links)?;
    let shared = core.clone();
    blocking(move || shared.connect(&held, request, model, links)).await??;
    Ok(placed)
}

impl Core {
    /// Hands the links to the executor. Runs to its end even if nobody waits for it any more, so
    /// it looks itself whether the epoch still lives; `held` keeps the next placement waiting.
    fn connect(
        &self,
        held: &OwnedRwLockWriteGuard<Option<Held>>,
        request: Request,
        model: Arc<ModelDir>,
        links: Links,
    ) -> Result<(), WorkerError> {
        let held = held.as_ref().expect("hold() returns the lock with a shard inside");
        let epoch = request.epoch;
        held.executor.connect(epoch, links);
        self.activate(Some(Arc::new(Active {
            epoch,
            rank: request.rank,
            plan: request.plan,
            model,
            executor: Arc::downgrade(&held.executor),
            lowered: Default::default(),
        })));
        if self.tell(|state| state.placed(epoch)) {
            return Ok(());
        }
        self.activate(None);
        held.executor.disconnect(Some(epoch));
        Err(WorkerError::GivenUp)
    }
}

/// Holds the shard of `device`: the one that is there if it is the same, one made of it if both have
/// room on the way, else a new one, loaded after the old one has gone. Nobody else changes it while
/// the lock that is returned lives.
///
/// # Cancel safety
/// A load that has begun runs to its end, and is held for the next placement; only the end of the
/// worker stops it.
async fn hold(
    core: &Arc<Core>,
    device: &DevicePlan,
    (model, granted): (Arc<ModelDir>, Bytes),
    events: &Events,
) -> Result<(OwnedRwLockWriteGuard<Option<Held>>, Placed), WorkerError> {
    // No more kernel threads than the device grants, whatever a plan says.
    let threads = device.threads.clamp(1, core.threads);
    let key = HeldKey {
        fingerprint: model.fingerprint().to_owned(),
        prefill: device.prefill.clone(),
        decode: device.decode.clone(),
        threads,
    };
    let mut held = core.held.clone().write_owned().await;
    if let Some(bytes) = held.as_ref().filter(|held| held.key == key).map(|held| held.bytes) {
        return Ok((held, Placed { bytes, read: Bytes(0) }));
    }
    let (device, name, events) = (device.clone(), core.name.to_string(), events.clone());
    let (ending, engine) = (core.ending.clone(), core.engine);
    blocking(move || {
        let mut told = Instant::now();
        let mut progress = |bytes_done, bytes_total| {
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                let progress = v1::PlaceProgress { bytes_done, bytes_total };
                let event = v1::place_event::Event::Progress(progress);
                // A slow reader misses some.
                drop(events.try_send(Ok(v1::PlaceEvent { event: Some(event) })));
            }
            match ending.load(Ordering::Relaxed) {
                false => ControlFlow::Continue(()),
                true => ControlFlow::Break(()),
            }
        };
        let (spec, width) = (model.spec(), model.dtype().width());
        let fits = |old: &Held| {
            let way = transition(spec, width, Some(&old.key.prefill), &device.prefill);
            old.key.fingerprint == key.fingerprint && way.peak <= granted
        };
        // Whoever still reports on a run may hold the executor: then its shard goes with it.
        let old = held.take().filter(fits).and_then(|old| Arc::into_inner(old.executor));
        let loaded = match old.and_then(Executor::into_shard) {
            Some(shard) => shard.reshape(model, &device, &mut progress),
            None => {
                let read = transition(spec, width, None, &device.prefill).read;
                let shard = Shard::load(model.clone(), &device, &mut progress);
                shard.map(|shard| (shard, read))
            }
        };
        let (shard, read) = match loaded {
            Err(WeightError::Stopped) => return Err(Refusal::Draining.into()),
            loaded => loaded?,
        };
        let engine = engine.start(shard, threads)?;
        let (bytes, _) = engine.held();
        let executor = Arc::new(Executor::start(&name, engine)?);
        *held = Some(Held { key, executor, bytes });
        Ok((held, Placed { bytes, read }))
    })
    .await?
}
