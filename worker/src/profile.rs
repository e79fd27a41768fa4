//! Profile: the device measures itself with a model's shape, and does nothing else meanwhile.

use crate::{
    content::{
        self,
        fetch::{Meter, Sources, fetch},
    },
    core::Core,
    error::WorkerError,
    running::LoadedShard,
    tasks::{blocking, computing},
};
use galaxy_common::{Activations, Bytes};
use galaxy_engine::measure::{
    MeasureError,
    profile::{self, Measured, Setting},
};
use galaxy_model::ModelDir;
use galaxy_proto::v1;
use std::{
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tokio::sync::{OwnedRwLockWriteGuard, mpsc, oneshot};
use tonic::Status;

/// The time between two reports of progress, which is for people.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// The time between two reports of the bytes that a device without the model fetches for it.
const FETCHED_EVERY: Duration = Duration::from_secs(1);

/// The channel that takes the events of a measurement. When it closes, the coordinator hung up.
pub(crate) type Events = mpsc::Sender<Result<v1::ProfileEvent, Status>>;

/// The device is being measured, until this is dropped. Nothing is placed meanwhile.
pub(crate) struct Measuring(Arc<Core>);

impl Measuring {
    /// Begins a measurement.
    ///
    /// # Errors
    /// When the device holds a place, is measured already, or is draining.
    pub(crate) fn begin(core: &Arc<Core>) -> Result<Self, WorkerError> {
        core.tell(|state| state.measure())?;
        Ok(Self(core.clone()))
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.0.tell(|state| state.measured());
    }
}

/// Measures the device and reports into `events`.
pub(crate) async fn profile(core: Arc<Core>, request: v1::ProfileRequest, events: Events) {
    let event = match measured(&core, request, &events).await {
        Ok(event) => Ok(v1::ProfileEvent { event: Some(event) }),
        Err(error) => {
            tracing::warn!(%error, "no profile");
            Err(error.into_status(&core.name))
        }
    };
    // Nobody listens any more if this fails.
    drop(events.send(event).await);
}

async fn measured(
    core: &Arc<Core>,
    request: v1::ProfileRequest,
    events: &Events,
) -> Result<v1::profile_event::Event, WorkerError> {
    let v1::ProfileRequest { model, fingerprint, threads, max_rows, memory_bytes, activations } =
        request;
    let activations: Activations =
        activations.parse().map_err(|why| WorkerError::Setting { why })?;
    let measuring = Measuring::begin(core)?;
    let asked = u16::try_from(threads).ok().filter(|&threads| threads > 0);
    let setting = Setting {
        device: core.name.clone(),
        engine: core.grant.engine,
        // No more kernel threads than the device grants, whatever is asked.
        threads: asked.map_or(core.grant.threads, |threads| threads.min(core.grant.threads)),
        max_rows: max_rows.max(1),
        memory: core.grant.memory,
        limit: (memory_bytes > 0).then_some(Bytes(memory_bytes)),
        time: profile::TIME,
    };
    let (models, name, print) = (core.content.models.clone(), model, fingerprint.clone());
    let open = move || {
        let model = models.open(&name, &print)?;
        Ok::<_, WorkerError>(model.with_activations(activations)?)
    };
    let opened = match blocking(open).await? {
        Ok(model) => (Arc::new(model), None),
        Err(error) if core.content.cache.is_some() && error.is_absent_model() => {
            let waiting = core.content.model_server.wait();
            let wanted = v1::profile_event::Event::Wanted(v1::ModelWanted {});
            let told = events.send(Ok(v1::ProfileEvent { event: Some(wanted) })).await;
            told.map_err(|_| WorkerError::MeasuringGivenUp)?;
            let arriving = content::open(core, waiting, &fingerprint).await?;
            (arriving.model, Some((arriving.data, arriving.supply)))
        }
        Err(error) => return Err(error),
    };
    let held = tokio::select! {
        held = core.running.held.clone().write_owned() => held,
        () = events.closed() => return Err(WorkerError::MeasuringGivenUp),
    };
    let (model, arriving) = opened;
    let measuring = measure(core, model, setting, (measuring, held), events.clone());
    let Some((data, supply)) = arriving else { return measuring.await };
    // As much of the model is fetched as the measurement reads, when it reads it.
    let (measured, done) = oneshot::channel::<()>();
    let (peers, identity) = (Vec::new(), core.identity.clone());
    let from = core.ring.dials_from();
    let sources = Sources { coordinator: supply, peers, identity, from };
    let meter = Meter::default();
    let coming = fetch(data, Vec::new(), sources, &meter, async { drop(done.await) });
    let coming = async { coming.await.map_err(WorkerError::from) };
    let measuring = async {
        let event = measuring.await;
        drop(measured);
        event
    };
    let both = async { tokio::try_join!(coming, measuring).map(|((), event)| event) };
    tokio::select! {
        event = both => event,
        never = tell_fetched(&meter, events) => match never {},
    }
}

/// Reports that more of the model has come, since nothing is measured before.
async fn tell_fetched(meter: &Meter, events: &Events) -> std::convert::Infallible {
    let (mut ticks, mut told) = (tokio::time::interval(FETCHED_EVERY), 0);
    loop {
        ticks.tick().await;
        let fetched = meter.fetched.load(Ordering::Relaxed);
        if fetched != told {
            told = fetched;
            let now = format!("fetched {} of the model", Bytes(fetched));
            let event =
                v1::profile_event::Event::Progress(v1::ProfileProgress { done: 0, total: 1, now });
            // A slow reader misses some.
            drop(events.try_send(Ok(v1::ProfileEvent { event: Some(event) })));
        }
    }
}

/// Measures the device with a model; the shard that it holds is dropped.
async fn measure(
    core: &Arc<Core>,
    model: Arc<ModelDir>,
    setting: Setting,
    (measuring, mut held): (Measuring, OwnedRwLockWriteGuard<Option<LoadedShard>>),
    events: Events,
) -> Result<v1::profile_event::Event, WorkerError> {
    let ending = core.ending.clone();
    computing(move || {
        // There is no room for two shards. The next placement loads this one again.
        *held = None;
        let mut told: Option<Instant> = None;
        let mut progress = |done, total, now: &str| {
            if told.is_none_or(|told| told.elapsed() >= PROGRESS_EVERY) {
                told = Some(Instant::now());
                let at = v1::ProfileProgress { done, total, now: now.to_owned() };
                let event =
                    v1::ProfileEvent { event: Some(v1::profile_event::Event::Progress(at)) };
                // A slow reader misses some.
                drop(events.try_send(Ok(event)));
            }
            match events.is_closed() || ending.load(Ordering::Relaxed) {
                false => ControlFlow::Continue(()),
                true => ControlFlow::Break(()),
            }
        };
        let Measured { profile, pauses } = profile::measure(&model, &setting, &mut progress)?;
        tracing::info!(shape = profile.shape, pauses, "measured");
        drop(measuring);
        let bytes = postcard::to_stdvec(&profile).map_err(|_| WorkerError::Bug)?;
        Ok(v1::profile_event::Event::Profile(bytes))
    })
    .await?
    .map_err(|error| match error {
        WorkerError::Measure(MeasureError::Stopped) => WorkerError::MeasuringGivenUp,
        error => error,
    })
}
