//! A fleet of workers on other machines, over gRPC.
//!
//! One task, the driver, owns the membership, performs its actions and keeps the device table that
//! everyone else reads. Executions read the table and watch the readiness.

mod calls;
mod device_table;
mod driver;
pub(crate) mod execute;
mod planning;

pub use device_table::{Loading, Notice};
pub use planning::{Planning, ProfileSource};

use super::{
    BoxFuture, DeviceView, Dispatches, Fleet, FleetStatus, Readiness, Run, Task, Timeline,
};
use crate::{
    cluster::{Cluster, DeviceConfig},
    drift::{Change, Sample},
    error::RequestError,
    membership::{Event, Index, Now},
    model_server::ModelServer,
    placement::{self, Placement, PlacementError},
};
use device_table::DeviceTable;
use galaxy_common::{Bytes, Epoch, SequenceNumber};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Identity;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, OwnedRwLockWriteGuard, mpsc, watch},
    time::Instant,
};

/// Receives notices of what happens in the fleet.
pub type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// How many messages may wait for the driver: pings and progress of every device of the largest ring.
const MESSAGES: usize = 1024;

/// A message to the driver.
enum Message {
    /// Something happened at this time.
    Event(Now, Event),
    /// The planning of this round has ended, with a plan or without one.
    Planned { round: u64, made: Result<planning::PlanningResult, planning::Failure> },
    /// A program ran in this epoch, and took these times.
    Ran { epoch: Epoch, samples: Vec<Sample> },
    /// The look for a better plan than `present`, with changed curves, has ended.
    Looked { change: Change, present: Arc<Placement>, verdict: planning::Verdict },
    /// The devices of the cluster are these now; the list of removed members goes to all of them.
    Devices(Vec<DeviceConfig>),
    /// Nothing runs while the guard lives.
    Quiet(OwnedRwLockWriteGuard<()>),
}

/// What the driver and the calls share.
pub(crate) struct Shared {
    /// The cluster as its files say, with the devices that joined. Devices keep their index. Only the driver changes
    /// it.
    cluster: RwLock<Arc<Cluster>>,
    planning: Planning,
    model: Arc<ModelDir>,
    identity: Identity,
    model_server: Arc<ModelServer>,
    lowered: Dispatches,
    device_table: Mutex<DeviceTable>,
    readiness: watch::Sender<Readiness>,
    messages: mpsc::Sender<Message>,
    /// Read while a program runs, written by whoever changes the plan between programs.
    plan_lock: Arc<tokio::sync::RwLock<()>>,
    sequence: AtomicU64,
    /// The decode burst of several steps that runs; none once it has been asked to end.
    burst: Mutex<Option<(Epoch, SequenceNumber)>>,
    /// When a device last made progress on its way to its place.
    placing: Mutex<tokio::time::Instant>,
    origin: Instant,
    listener: Listener,
    stop: Notify,
    stopped: AtomicBool,
}

impl Shared {
    fn device_table(&self) -> MutexGuard<'_, DeviceTable> {
        self.device_table.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn burst(&self) -> MutexGuard<'_, Option<(Epoch, SequenceNumber)>> {
        self.burst.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// A device has made progress on its way to its place, or sets out.
    fn comes_further(&self) {
        *self.placing.lock().unwrap_or_else(PoisonError::into_inner) = tokio::time::Instant::now();
    }
    /// How long no device has made progress on its way to its place.
    fn stands_still(&self) -> Duration {
        self.placing.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
    /// Time since the start, as the membership counts it.
    fn now(&self) -> Now {
        self.origin.elapsed()
    }
    fn now_ns(&self) -> u64 {
        u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX)
    }
    /// Sends an event to the driver, with the time at which it happened. Without a driver it is dropped.
    async fn tell(&self, event: Event) {
        self.send(Message::Event(self.now(), event)).await;
    }
    async fn send(&self, message: Message) {
        drop(self.messages.send(message).await);
    }
    fn cluster(&self) -> Arc<Cluster> {
        self.cluster.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// The device of the cluster with this index.
    fn device(&self, index: Index) -> DeviceConfig {
        self.cluster().devices[index].clone()
    }
}

/// A fleet of workers, which this coordinator drives.
pub struct RemoteFleet {
    shared: Arc<Shared>,
    driver: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl RemoteFleet {
    /// Starts to connect. When all devices are connected, it plans by the shares of the cluster file, or by what its
    /// workers measure. A split by hand is checked at once. `listener` must not block.
    ///
    /// # Errors
    /// When the model has no place in the cluster, whatever the devices say.
    pub fn start(
        cluster: Cluster,
        model: Arc<ModelDir>,
        identity: Identity,
        epoch: Epoch,
        listener: Listener,
    ) -> Result<Self, PlacementError> {
        Self::start_with(cluster, model, identity, epoch, listener, Planning::measured())
    }

    /// [`RemoteFleet::start`] with another source of profiles, or another planner.
    ///
    /// # Errors
    /// As [`RemoteFleet::start`].
    pub fn start_with(
        cluster: Cluster,
        model: Arc<ModelDir>,
        identity: Identity,
        epoch: Epoch,
        listener: Listener,
        planning: Planning,
    ) -> Result<Self, PlacementError> {
        let mut table = DeviceTable::new(cluster.devices.len());
        if cluster.by_hand() {
            let offers = cluster.devices.iter().map(|device| placement::offer(device, None, None));
            let placement = placement::by_shares(&cluster, &model, &offers.collect::<Vec<_>>())?;
            table.placement = Some(Arc::new(placement));
        }
        let (messages, inbox) = mpsc::channel(MESSAGES);
        let waiting = Readiness::waiting("it is starting");
        let shared = Arc::new(Shared {
            lowered: Dispatches::new(&model),
            device_table: Mutex::new(table),
            cluster: RwLock::new(Arc::new(cluster)),
            planning,
            model_server: Arc::new(ModelServer::new(model.opened())),
            model,
            identity,
            readiness: watch::Sender::new(waiting),
            messages,
            plan_lock: Arc::default(),
            placing: Mutex::new(tokio::time::Instant::now()),
            sequence: AtomicU64::new(0),
            burst: Mutex::default(),
            origin: Instant::now(),
            listener,
            stop: Notify::new(),
            stopped: AtomicBool::new(false),
        });
        let driver = tokio::spawn(driver::drive(shared.clone(), inbox, epoch));
        Ok(Self { shared, driver: Mutex::new(Some(driver)) })
    }

    /// Takes over the devices that the cluster has now. New ones are connected, measured and planned with; missing ones
    /// are let go of; the list of removed members goes to all.
    pub async fn update(&self, devices: Vec<DeviceConfig>) {
        self.shared.send(Message::Devices(devices)).await;
    }
}

impl Fleet for RemoteFleet {
    fn readiness(&self) -> watch::Receiver<Readiness> {
        self.shared.readiness.subscribe()
    }

    fn status(&self) -> FleetStatus {
        let cluster = self.shared.cluster();
        let Cluster { strategy, max_rows, .. } = *cluster;
        let table = self.shared.device_table();
        let placement = table.placement.as_ref();
        FleetStatus {
            strategy,
            max_rows,
            plan: placement.map(|p| p.plan.clone()),
            what: placement.map(|p| p.what.clone()).unwrap_or_default(),
            predicted: placement.and_then(|p| p.predicted),
            cache: placement::cache(&cluster, self.shared.model.spec()),
        }
    }

    fn execute(&self, task: Task, limit: Duration) -> BoxFuture<'_, Result<Run, RequestError>> {
        Box::pin(execute::execute(&self.shared, task, limit))
    }

    fn end_burst(&self) {
        execute::end_burst(&self.shared);
    }

    fn forget(&self, epoch: Epoch, slot: u32) -> BoxFuture<'_, ()> {
        Box::pin(execute::forget(&self.shared, epoch, slot))
    }

    fn timelines(
        &self,
        epoch: Epoch,
        sequence: SequenceNumber,
    ) -> BoxFuture<'_, Result<Vec<Timeline>, RequestError>> {
        Box::pin(calls::timelines(&self.shared, epoch, sequence))
    }

    fn devices(&self) -> Vec<DeviceView> {
        let now = self.shared.now();
        let cluster = self.shared.cluster();
        let table = self.shared.device_table();
        // Of one that has just joined the device table does not know yet.
        let devices = cluster.devices.iter().enumerate();
        let devices = devices.filter(|(index, _)| table.shows(*index));
        devices.map(|(index, device)| table.view(index, device, now)).collect()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.shared.stopped.store(true, std::sync::atomic::Ordering::SeqCst);
            self.shared.stop.notify_one();
            let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(driver) = driver {
                // A driver that panicked has nothing left to close.
                drop(driver.await);
            }
        })
    }
}

impl Drop for RemoteFleet {
    fn drop(&mut self) {
        self.shared.stop.notify_one();
    }
}

/// The limit that a device itself sets, if it sets one.
fn own_limit(bytes: u64) -> Option<Bytes> {
    (bytes > 0).then_some(Bytes(bytes))
}
