//! Devices of this process, with something that a test does before each of their programs.

use galaxy_common::{Epoch, SequenceNumber};
use galaxy_coord::{
    Fleet, LocalFleet, RequestError,
    fleet::{BoxFuture, DeviceView, FleetStatus, Readiness, Run, Task, Timeline},
};
use std::time::Duration;
use tokio::sync::watch;

/// What a test does before each program: it waits, or fails it.
pub trait Before: Send + Sync {
    /// Waits until the program may run, or fails it.
    fn program(&self) -> impl Future<Output = Result<(), RequestError>> + Send;
    /// Notes that the burst that runs is asked to end.
    fn burst_ends(&self) {}
}

/// Devices of this process, with `before` in front of each program.
pub struct Around<B> {
    pub devices: LocalFleet,
    pub readiness: watch::Sender<Readiness>,
    pub before: B,
}

impl<B: Before> Around<B> {
    /// Devices that are not ready yet.
    pub fn starting(devices: LocalFleet, before: B) -> Self {
        Self {
            devices,
            readiness: watch::Sender::new(Readiness::waiting("it is starting")),
            before,
        }
    }

    /// Devices that are ready.
    pub fn ready(devices: LocalFleet, before: B) -> Self {
        let fleet = Self::starting(devices, before);
        fleet.make_ready();
        fleet
    }

    pub fn make_ready(&self) {
        let ready = self.devices.readiness().borrow().clone();
        self.readiness.send_replace(ready);
    }
}

impl<B: Before> Fleet for Around<B> {
    fn readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.subscribe()
    }
    fn status(&self) -> FleetStatus {
        self.devices.status()
    }
    fn execute(&self, task: Task, limit: Duration) -> BoxFuture<'_, Result<Run, RequestError>> {
        Box::pin(async move {
            self.before.program().await?;
            self.devices.execute(task, limit).await
        })
    }
    fn end_burst(&self) {
        self.before.burst_ends();
        self.devices.end_burst();
    }
    fn forget(&self, epoch: Epoch, slot: u32) -> BoxFuture<'_, ()> {
        self.devices.forget(epoch, slot)
    }
    fn timelines(
        &self,
        epoch: Epoch,
        sequence: SequenceNumber,
    ) -> BoxFuture<'_, Result<Vec<Timeline>, RequestError>> {
        self.devices.timelines(epoch, sequence)
    }
    fn devices(&self) -> Vec<DeviceView> {
        self.devices.devices()
    }
    fn close(&self) -> BoxFuture<'_, ()> {
        self.devices.close()
    }
}
