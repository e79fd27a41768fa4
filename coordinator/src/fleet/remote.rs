//! A fleet of workers on other machines, over gRPC.
//!
//! One task, the driver, owns the membership, performs its actions and keeps the board that
//! everyone else reads. Executions read the board and watch the readiness.

mod board;
mod calls;
mod driver;
pub(crate) mod execute;
mod planning;

pub use board::{Loading, Notice};
pub use planning::{Planning, ProfileSource};

use super::{BoxFuture, DeviceView, Dispatches, Fleet, Outlook, Readiness, Run, Task, Timeline};
use crate::{
    cluster::{Cluster, Device},
    drift::{Change, Sample},
    error::RequestError,
    membership::{Event, Index, Now},
    placement::{self, Placement, PlacementError},
    supply::Supplier,
};
use board::Board;
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

/// Who hears about what happens in the fleet.
pub type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// Messages that wait for the driver: pings and progress of every device of the largest ring.
const MESSAGES: usize = 1024;

/// What the driver is told.
enum Message {
    /// Something happened, then.
    Event(Now, Event),
    /// A plan was made, or could not be, in this round.
    Planned { round: u64, made: Result<planning::Made, planning::Failure> },
    /// A program ran.
    Ran { epoch: Epoch, samples: Vec<Sample> },
    /// Another plan than `present` was looked for, because curves have changed.
    Looked { change: Change, present: Arc<Placement>, verdict: planning::Verdict },
    /// The devices of the cluster are these now; and who was removed is to be told.
    Devices(Vec<Device>),
    /// Nothing runs while the guard lives.
    Quiet(OwnedRwLockWriteGuard<()>),
}

/// What the driver and the calls share.
pub(crate) struct Shared {
    /// As the files say, and as devices join: their places stay the same. Only the driver changes it.
    cluster: RwLock<Arc<Cluster>>,
    planning: Planning,
    model: Arc<ModelDir>,
    identity: Identity,
    supplier: Arc<Supplier>,
    lowered: Dispatches,
    board: Mutex<Board>,
    readiness: watch::Sender<Readiness>,
    messages: mpsc::Sender<Message>,
    /// Read while a program runs, written by who changes the plan between programs.
    gate: Arc<tokio::sync::RwLock<()>>,
    sequence: AtomicU64,
    /// The decode burst of several steps that runs, until it is asked to end.
    burst: Mutex<Option<(Epoch, SequenceNumber)>>,
    /// When something last came of the places that devices take.
    placing: Mutex<tokio::time::Instant>,
    origin: Instant,
    listener: Listener,
    stop: Notify,
    stopped: AtomicBool,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn burst(&self) -> MutexGuard<'_, Option<(Epoch, SequenceNumber)>> {
        self.burst.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// A device has come further on its way to a place, or sets out.
    fn comes_further(&self) {
        *self.placing.lock().unwrap_or_else(PoisonError::into_inner) = tokio::time::Instant::now();
    }
    /// How long none of them has come further.
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
    /// Sends an event to the driver, with the time at which it happened; without a driver there is
    /// nobody to tell.
    async fn tell(&self, event: Event) {
        self.send(Message::Event(self.now(), event)).await;
    }
    async fn send(&self, message: Message) {
        drop(self.messages.send(message).await);
    }
    fn cluster(&self) -> Arc<Cluster> {
        self.cluster.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// A device of the cluster.
    fn device(&self, index: Index) -> Device {
        self.cluster().devices[index].clone()
    }
}

/// Workers under a coordinator.
pub struct RemoteFleet {
    shared: Arc<Shared>,
    driver: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl RemoteFleet {
    /// Starts to connect. When all devices are there, it plans by the shares of the cluster file, or
    /// by what its workers measure. A split by hand is checked at once. `listener` must not block.
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
        let mut board = Board::new(cluster.devices.len());
        if cluster.by_hand() {
            let offers = cluster.devices.iter().map(|device| placement::offer(device, None, None));
            let placement = placement::by_shares(&cluster, &model, &offers.collect::<Vec<_>>())?;
            board.placement = Some(Arc::new(placement));
        }
        let (messages, inbox) = mpsc::channel(MESSAGES);
        let waiting = Readiness::waiting("it is starting");
        let shared = Arc::new(Shared {
            lowered: Dispatches::new(&model),
            board: Mutex::new(board),
            cluster: RwLock::new(Arc::new(cluster)),
            planning,
            supplier: Arc::new(Supplier::new(model.opened())),
            model,
            identity,
            readiness: watch::Sender::new(waiting),
            messages,
            gate: Arc::default(),
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

    /// The devices of the cluster are these now. Those that are new are connected, measured and planned with; those
    /// that are missing are let go of; the list of removed members is told to all.
    pub async fn update(&self, devices: Vec<Device>) {
        self.shared.send(Message::Devices(devices)).await;
    }
}

impl Fleet for RemoteFleet {
    fn readiness(&self) -> watch::Receiver<Readiness> {
        self.shared.readiness.subscribe()
    }

    fn outlook(&self) -> Outlook {
        let cluster = self.shared.cluster();
        let Cluster { strategy, max_rows, .. } = *cluster;
        let board = self.shared.board();
        let placement = board.placement.as_ref();
        Outlook {
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
        let board = self.shared.board();
        // Of one that has just joined the board does not know yet.
        let devices = cluster.devices.iter().enumerate();
        let devices = devices.filter(|(index, _)| board.shows(*index));
        devices.map(|(index, device)| board.view(index, device, now)).collect()
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
