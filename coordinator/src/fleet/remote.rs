//! A fleet of workers on other machines, over gRPC.
//!
//! One task, the driver, owns the membership, performs its actions and keeps the board that
//! everyone else reads. Executions read the board and watch the readiness.

mod board;
mod calls;
mod driver;
mod execute;

pub use board::Notice;

use super::{BoxFuture, DeviceView, Fleet, Lowered, Readiness, Run, Timeline};
use crate::{
    cluster::{Cluster, Device},
    error::RequestError,
    membership::{Event, Now},
    placement::{self, PlacementError},
};
use board::Board;
use galaxy_common::{BatchShape, Bytes, Epoch, SequenceNumber, plan::Plan};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Identity;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Notify, mpsc, watch};

/// Who hears about what happens in the fleet.
pub type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// Events that wait for the driver: pings and progress of every device of the largest ring.
const EVENTS: usize = 1024;

/// What the driver and the calls share.
pub(crate) struct Shared {
    cluster: Cluster,
    /// The devices of the ring, by rank; those of the cluster that have no part are idle.
    ring: Vec<Device>,
    model: Arc<ModelDir>,
    identity: Identity,
    lowered: Lowered,
    board: Mutex<Board>,
    readiness: watch::Sender<Readiness>,
    events: mpsc::Sender<(Now, Event)>,
    sequence: AtomicU64,
    origin: Instant,
    listener: Listener,
    stop: Notify,
    stopped: AtomicBool,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
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
        drop(self.events.send((self.now(), event)).await);
    }
}

/// Workers under a coordinator.
pub struct RemoteFleet {
    shared: Arc<Shared>,
    driver: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl RemoteFleet {
    /// Makes a first plan, checks it, and starts to connect. `listener` must not block.
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
        let plan = placement::plan(&cluster, &model, &[])?;
        let needs = placement::fit(&model, &plan, &[])?;
        let named = |name| cluster.devices.iter().find(|d| d.name == name).cloned();
        let ring: Vec<Device> = plan.ring.iter().filter_map(|d| named(d.name.clone())).collect();
        let (events, inbox) = mpsc::channel(EVENTS);
        let waiting = Readiness::Waiting { device: None, reason: "it is starting".to_owned() };
        let board = Board::new(&ring, Arc::new(plan), needs.iter().map(|n| n.total()).collect());
        let shared = Arc::new(Shared {
            lowered: Lowered::new(model.spec().clone()),
            cluster,
            ring,
            model,
            identity,
            board: Mutex::new(board),
            readiness: watch::Sender::new(waiting),
            events,
            sequence: AtomicU64::new(0),
            origin: Instant::now(),
            listener,
            stop: Notify::new(),
            stopped: AtomicBool::new(false),
        });
        let driver = tokio::spawn(driver::drive(shared.clone(), inbox, epoch));
        Ok(Self { shared, driver: Mutex::new(Some(driver)) })
    }
}

impl Fleet for RemoteFleet {
    fn readiness(&self) -> watch::Receiver<Readiness> {
        self.shared.readiness.subscribe()
    }

    fn plan(&self) -> Arc<Plan> {
        self.shared.board().plan.clone()
    }

    fn execute(
        &self,
        shape: BatchShape,
        tokens: Arc<[u32]>,
        limit: Duration,
    ) -> BoxFuture<'_, Result<Run, RequestError>> {
        Box::pin(execute::execute(&self.shared, shape, tokens, limit))
    }

    fn timelines(
        &self,
        epoch: Epoch,
        sequence: SequenceNumber,
    ) -> BoxFuture<'_, Result<Vec<Timeline>, RequestError>> {
        Box::pin(calls::timelines(&self.shared, epoch, sequence))
    }

    fn devices(&self) -> Vec<DeviceView> {
        let board = self.shared.board();
        let idle = |device: &Device| DeviceView {
            name: device.name.to_string(),
            address: device.address.clone(),
            state: "idle",
            detail: "the strategy gives it no part".to_owned(),
            budget: device.memory,
            threads: device.threads.unwrap_or(0),
            ..DeviceView::default()
        };
        let in_ring = |device: &Device| self.shared.ring.iter().position(|d| d.name == device.name);
        self.shared
            .cluster
            .devices
            .iter()
            .map(|device| in_ring(device).map_or_else(|| idle(device), |i| board.view(i, device)))
            .collect()
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
