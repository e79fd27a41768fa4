//! What requests cost.

use crate::fleet::{DeviceCost, DeviceRun, Run};
use galaxy_common::{DeviceName, Epoch, RequestId};
use std::time::Duration;

/// What a request cost.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The number of the request, for a trace.
    pub request: RequestId,
    /// The epoch of its last program.
    pub epoch: Epoch,
    /// Time spent waiting for readiness and for the turn.
    pub queue: Duration,
    /// Time spent tokenising, or reading images.
    pub tokenize: Duration,
    /// Time that programs took on the devices.
    pub execute: Duration,
    /// How many tokens there are in all, or rows of images.
    pub tokens: u64,
    /// How many tokens of a prompt had their rows cached already.
    pub cached: u32,
    /// How many programs ran.
    pub programs: u32,
    /// What the programs cost each device, in sum.
    pub devices: Vec<(DeviceName, DeviceCost)>,
}

impl Report {
    /// Adds what a program cost.
    pub(super) fn add(&mut self, run: &Run) {
        self.execute += run.took;
        self.programs += 1;
        self.epoch = run.epoch;
        // The plan may have changed since the last one.
        for DeviceRun { name, cost, .. } in &run.devices {
            let known = self.devices.iter().position(|(of, _)| of == name);
            let at = known.unwrap_or_else(|| {
                self.devices.push((name.clone(), DeviceCost::default()));
                self.devices.len() - 1
            });
            let sum = &mut self.devices[at].1;
            sum.total_ns += cost.total_ns;
            sum.compute_busy_ns += cost.compute_busy_ns;
            sum.awaiting_receive_ns += cost.awaiting_receive_ns;
            sum.bytes_sent += cost.bytes_sent;
            sum.bytes_received += cost.bytes_received;
        }
    }
}
