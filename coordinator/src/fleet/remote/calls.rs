//! The calls to one worker that are not executions: connect, ping, place, prepare, cancel, timeline.

use super::{
    Shared,
    device_table::{Loading, Notice},
};
use crate::{
    connection::{Connection, introduce},
    error::RequestError,
    fleet::Timeline,
    membership::{Event, Index},
    placement::Placement,
};
use galaxy_common::{Bytes, Epoch, SequenceNumber};
use galaxy_proto::{
    fault::{from_status, to_status},
    v1::{
        CancelRequest, DenyRequest, HealthRequest, Peer, PlaceEvent, PlaceProgress, PlaceReady,
        PlaceRequest, PrepareRequest, TimelineRequest, place_event,
    },
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{task::JoinSet, time::Instant};
use tonic::{Code, Status, Streaming};

/// How long a short call may take: a cancellation, or the list of removed members.
const SHORT: Duration = Duration::from_secs(2);
/// Time between two looks at devices that take a place or make ready.
const LOOK: Duration = Duration::from_millis(500);
/// How long devices may make no progress on their way to a place: longer than digests of a large model take.
const STALLED: Duration = Duration::from_secs(600);
/// How long they may make none where all made ready and only have to link: workers give up links after 15 s.
const LINKED: Duration = Duration::from_secs(20);
/// A ping that takes longer than this is none; silence is declared well before.
const PING_LIMIT: Duration = Duration::from_secs(5);

/// Whether a status says that the connection is gone, rather than what the worker answered.
pub(super) fn gone(status: &Status) -> bool {
    status.details().is_empty()
        && matches!(
            status.code(),
            Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal
        )
}

/// What people read of a connection that is gone; the transport's own message goes to the log.
pub(super) fn broke_off(status: &Status) -> String {
    tracing::debug!(%status, "a connection broke off");
    "its connection broke off".to_owned()
}

/// Forms a fresh connection, asks the worker to describe itself, and reports to the driver.
pub(super) async fn connect(shared: Arc<Shared>, device: Index, attempt: u64) {
    let event = match introduce(&shared.device(device), &shared.identity).await {
        Ok((connection, description)) => {
            deny(&shared, device, connection.clone()).await;
            let epoch = Epoch(description.epoch);
            {
                let mut table = shared.device_table();
                let entry = &mut table.entries[device];
                if entry.attempt != attempt {
                    return;
                }
                entry.connection = Some(connection);
                entry.description = Some(description);
            }
            Event::Connected { device, attempt, epoch }
        }
        Err(reason) => Event::Broken { device, attempt, reason },
    };
    shared.tell(event).await;
}

/// Sends a worker the list of members that were removed from the cluster.
pub(super) async fn tell_removed(shared: Arc<Shared>, device: Index) {
    if let Some((_, connection)) = connection(&shared, device) {
        deny(&shared, device, connection).await;
    }
}

async fn deny(shared: &Shared, device: Index, mut connection: Connection) {
    let removed = shared.identity.denied().now();
    if removed.version == 0 {
        return;
    }
    let told = tokio::time::timeout(SHORT, connection.deny(DenyRequest::from(&*removed))).await;
    if !matches!(told, Ok(Ok(_))) {
        let device = &shared.device(device).name;
        tracing::warn!(%device, "it does not take the list of removed members");
    }
}

fn connection(shared: &Shared, device: Index) -> Option<(u64, Connection)> {
    let table = shared.device_table();
    let entry = &table.entries[device];
    entry.connection.clone().map(|connection| (entry.attempt, connection))
}

/// Asks a worker for its health, and samples its clock.
pub(super) async fn ping(shared: Arc<Shared>, device: Index, attempt: u64) {
    let Some((of, mut connection)) = connection(&shared, device) else { return };
    if of != attempt {
        return;
    }
    let (asked, asked_ns) = (shared.now(), shared.now_ns());
    let answer = tokio::time::timeout(PING_LIMIT, connection.health(HealthRequest {})).await;
    let event = match answer {
        Ok(Ok(reply)) => {
            let (reply, answered) = (reply.into_inner(), shared.now_ns());
            let mut table = shared.device_table();
            let entry = &mut table.entries[device];
            if entry.attempt == attempt {
                entry.sample_clock(asked_ns, answered, reply.clock_ns);
            }
            Event::Pong { device, attempt, asked, epoch: Epoch(reply.epoch) }
        }
        Ok(Err(status)) => {
            let reason = match gone(&status) {
                true => broke_off(&status),
                false => from_status(&status).to_string(),
            };
            Event::Broken { device, attempt, reason }
        }
        // The membership counts the silence itself.
        Err(_) => return,
    };
    shared.tell(event).await;
}

/// Sends a device its part and waits until it holds it, as long as some device makes progress.
/// Where all are `prepared` they have nothing to read, so the progress that they report does not
/// count.
pub(super) async fn place(
    shared: Arc<Shared>,
    placement: Arc<Placement>,
    device: Index,
    epoch: Epoch,
    prepared: bool,
) {
    let Some((attempt, connection)) = connection(&shared, device) else { return };
    shared.comes_further();
    let patience = if prepared { LINKED } else { STALLED };
    let stalls = async {
        let mut looks = tokio::time::interval(LOOK);
        while shared.stands_still() < patience {
            looks.tick().await;
        }
    };
    let placed = tokio::select! {
        placed = placed(&shared, &placement, (device, prepared), attempt, epoch, connection) => placed,
        () = stalls => {
            let why = format!("nothing has come of its place for {patience:?}");
            Err(Status::deadline_exceeded(why))
        }
    };
    shared.comes_further();
    let event = match placed {
        Ok(ready) => {
            let name = shared.device(device).name.clone();
            let weights = Bytes(ready.weight_bytes);
            shared.device_table().entries[device].weight_bytes = weights;
            let (read, seconds) = (Bytes(ready.read_bytes), ready.seconds);
            let (fetched, from_peers) = (Bytes(ready.fetched_bytes), Bytes(ready.peer_bytes));
            let placed =
                Notice::Placed { device: name, weights, read, fetched, from_peers, seconds };
            (shared.listener)(placed);
            Event::Placed { device, epoch }
        }
        Err(status) if gone(&status) => {
            Event::Broken { device, attempt, reason: broke_off(&status) }
        }
        Err(status) => Event::PlaceFailed { device, epoch, reason: from_status(&status).message },
    };
    shared.tell(event).await;
}

async fn placed(
    shared: &Shared,
    placement: &Placement,
    (device, prepared): (Index, bool),
    attempt: u64,
    epoch: Epoch,
    mut connection: Connection,
) -> Result<PlaceReady, Status> {
    let request = request(shared, placement, device, epoch)?;
    let events = connection.place(request).await?.into_inner();
    let name = shared.device(device).name;
    let says = |progress: Loading| {
        shared.device_table().entries[device].detail = progress.to_string();
        if !prepared {
            shared.comes_further();
        }
        (shared.listener)(Notice::Loading { device: name.clone(), progress });
    };
    follow(shared, device, attempt, events, says).await
}

/// The request that places a device in an epoch by a plan.
fn request(
    shared: &Shared,
    placement: &Placement,
    device: Index,
    epoch: Epoch,
) -> Result<PlaceRequest, Status> {
    let (cluster, table) = (shared.cluster(), shared.device_table());
    let own = &cluster.devices[device];
    let peers = placement.ring.iter().map(|index| {
        let peer = &cluster.devices[*index];
        Peer {
            name: peer.name.to_string(),
            address: peer.address_for(own).to_owned(),
            plain_port: table.entries[*index].description.as_ref().map_or(0, |d| d.plain_port),
        }
    });
    let refused =
        |e: postcard::Error| Status::invalid_argument(format!("the plan has no wire form: {e}"));
    let rank = placement.ring.iter().position(|index| *index == device);
    Ok(PlaceRequest {
        epoch: epoch.0,
        plan: postcard::to_stdvec(&*placement.plan).map_err(refused)?,
        rank: rank.and_then(|rank| u32::try_from(rank).ok()).unwrap_or(u32::MAX),
        peers: peers.collect(),
        memory_bytes: own.memory.0,
    })
}

/// Follows a device on its way to a place, and supplies the model if the device says that it lacks it.
async fn follow(
    shared: &Shared,
    device: Index,
    attempt: u64,
    mut events: Streaming<PlaceEvent>,
    says: impl Fn(Loading),
) -> Result<PlaceReady, Status> {
    let begun = Instant::now();
    // Supplies end with this call.
    let mut supplies = JoinSet::new();
    loop {
        let event = match events.message().await {
            Ok(Some(event)) => event,
            Ok(None) => return Err(Status::unavailable("it broke off before it was ready")),
            Err(status) => return Err(with_reason(status, &mut supplies)),
        };
        match event.event {
            Some(place_event::Event::Progress(progress)) => {
                shared.tell(Event::Heard { device, attempt }).await;
                let PlaceProgress { bytes_done, bytes_total, fetched, to_fetch } = progress;
                says(Loading {
                    done: Bytes(bytes_done),
                    total: Bytes(bytes_total),
                    fetched: Bytes(fetched),
                    to_fetch: Bytes(to_fetch),
                    elapsed: begun.elapsed(),
                });
            }
            Some(place_event::Event::Wanted(_)) => {
                let (server, identity) = (shared.model_server.clone(), shared.identity.clone());
                let device = shared.device(device);
                supplies.spawn(async move { server.supply(&device, &identity).await });
            }
            Some(place_event::Event::Ready(ready)) => return Ok(ready),
            None => {}
        }
    }
}

/// Why devices cannot make ready for a plan.
pub(super) struct Unready {
    /// The reason, for people.
    pub(super) reason: String,
    /// Whether it may pass soon, without anybody doing anything.
    pub(super) passes: bool,
}

/// Has all devices of `next` make ready for it, while `present` runs.
///
/// # Errors
/// When one of them cannot, or is lost meanwhile.
pub(super) async fn prepare(
    shared: &Arc<Shared>,
    present: &Placement,
    next: &Arc<Placement>,
) -> Result<(), Unready> {
    let attempt = |device: &Index| connection(shared, *device).map(|(attempt, _)| attempt);
    let attempts: Vec<_> = next.ring.iter().map(attempt).collect();
    let lost = || {
        let mut devices = next.ring.iter().zip(&attempts);
        let (device, _) = devices.find(|(device, of)| of.is_none() || attempt(device) != **of)?;
        let reason = format!("device {} was lost", shared.device(*device).name);
        Some(Unready { reason, passes: true })
    };
    let mut preparing = JoinSet::new();
    for device in &next.ring {
        let load = !present.ring.contains(device);
        preparing.spawn(prepared(shared.clone(), next.clone(), *device, load));
    }
    let all = async {
        while let Some(prepared) = preparing.join_next().await {
            prepared.unwrap_or_else(|error| {
                Err(Unready { reason: error.to_string(), passes: false })
            })?;
        }
        Ok(())
    };
    let watch = async {
        let mut looks = tokio::time::interval(LOOK);
        loop {
            looks.tick().await;
            if let Some(lost) = lost() {
                return lost;
            }
        }
    };
    let outcome = tokio::select! {
        outcome = all => outcome,
        lost = watch => Err(lost),
    };
    outcome.and_then(|()| lost().map_or(Ok(()), Err))
}

/// Shows in the table of devices what a device does for another plan, until it is dropped.
struct PreparationGuard<'a> {
    shared: &'a Shared,
    device: Index,
    attempt: u64,
}

impl PreparationGuard<'_> {
    fn show(&self, progress: &str) {
        let entry = &mut self.shared.device_table().entries[self.device];
        if entry.attempt == self.attempt && entry.connection.is_some() {
            progress.clone_into(&mut entry.coming);
        }
    }
}

impl Drop for PreparationGuard<'_> {
    fn drop(&mut self) {
        self.show("");
    }
}

/// Has one device make ready; with `load` it also loads, because it has no part in the plan that runs.
async fn prepared(
    shared: Arc<Shared>,
    placement: Arc<Placement>,
    device: Index,
    load: bool,
) -> Result<(), Unready> {
    let name = shared.device(device).name.clone();
    let failed = |why: &str, passes| {
        let reason = format!("device {name} cannot make ready for a better one: {why}");
        Unready { reason, passes }
    };
    let (attempt, mut to) =
        connection(&shared, device).ok_or_else(|| failed("it is not connected", true))?;
    let coming = PreparationGuard { shared: &shared, device, attempt };
    let told = Mutex::new((Bytes(0), Instant::now()));
    let says = |progress: Loading| {
        let (mut told, now) = (told.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let bytes = Bytes(progress.fetched.0.saturating_add(progress.done.0));
        if bytes != told.0 {
            *told = (bytes, now);
        }
        drop(told);
        if progress.fetched < progress.to_fetch || progress.done < progress.total {
            coming.show(&progress.to_string());
            (shared.listener)(Notice::Preparing { device: name.clone(), progress });
        }
    };
    let prepared = async {
        let place = Some(request(&shared, &placement, device, Epoch(0))?);
        let events = to.prepare(PrepareRequest { place, load }).await?.into_inner();
        follow(&shared, device, attempt, events, &says).await
    };
    let stalls = async {
        let mut looks = tokio::time::interval(LOOK);
        let since = || told.lock().unwrap_or_else(PoisonError::into_inner).1;
        while since().elapsed() < STALLED {
            looks.tick().await;
        }
    };
    let prepared = tokio::select! {
        prepared = prepared => prepared,
        () = stalls => {
            return Err(failed(&format!("nothing has come of it for {STALLED:?}"), false));
        }
    };
    let ready = prepared.map_err(|status| match gone(&status) {
        true => failed(&broke_off(&status), true),
        false => {
            let fault = from_status(&status);
            failed(&fault.message, fault.retryable)
        }
    })?;
    if ready.weight_bytes > 0 {
        shared.device_table().entries[device].weight_bytes = Bytes(ready.weight_bytes);
    }
    let (read, fetched) = (Bytes(ready.read_bytes), Bytes(ready.fetched_bytes));
    if read > Bytes(0) || fetched > Bytes(0) {
        let (from_peers, seconds) = (Bytes(ready.peer_bytes), ready.seconds);
        let device = name.clone();
        (shared.listener)(Notice::Prepared { device, read, fetched, from_peers, seconds });
    }
    Ok(())
}

/// The status of a worker that took no place, with the reason why the model was not supplied, if it was not.
fn with_reason(status: Status, supplies: &mut JoinSet<Result<(), String>>) -> Status {
    match supplies.try_join_next() {
        Some(Ok(Err(why))) if !gone(&status) => {
            let mut fault = from_status(&status);
            fault.message = format!("{}: {why}", fault.message);
            to_status(status.code(), fault)
        }
        _ => status,
    }
}

/// Tells a device to abort an epoch. No answer is only logged.
pub(super) async fn cancel(shared: Arc<Shared>, device: Index, epoch: Epoch) {
    let Some((_, mut connection)) = connection(&shared, device) else { return };
    let answer =
        tokio::time::timeout(SHORT, connection.cancel(CancelRequest { epoch: epoch.0 })).await;
    if !matches!(answer, Ok(Ok(_))) {
        tracing::debug!(device = %shared.device(device).name, %epoch, "cancel was not answered");
    }
}

/// Fetches the measured operations of a program from every device.
pub(super) async fn timelines(
    shared: &Shared,
    epoch: Epoch,
    sequence: SequenceNumber,
) -> Result<Vec<Timeline>, RequestError> {
    let ring = shared.device_table().ring(epoch).ok_or_else(|| RequestError::Invalid {
        why: format!("the timelines of epoch {epoch} are not stored any more"),
    })?;
    let mut timelines = Vec::with_capacity(ring.len());
    for index in ring {
        let name = shared.device(index).name;
        let unavailable = |reason: String| RequestError::Unavailable {
            device: Some(name.clone()),
            reason: format!("the timeline of device {name} cannot be had: {reason}"),
        };
        let (_, mut connection) = connection(shared, index)
            .ok_or_else(|| unavailable("it is not connected".to_owned()))?;
        let asked = connection.timeline(TimelineRequest { epoch: epoch.0, sequence: sequence.0 });
        let reply = tokio::time::timeout(PING_LIMIT, asked)
            .await
            .map_err(|_| unavailable("no answer".to_owned()))?
            .map_err(|status| unavailable(from_status(&status).to_string()))?
            .into_inner();
        let offset_ns = shared.device_table().entries[index].offset_ns();
        let operations = reply.start_ns.into_iter().zip(reply.end_ns).collect();
        timelines.push(Timeline { operations, offset_ns });
    }
    Ok(timelines)
}
