//! What requests cost.

use crate::fleet::{DeviceCost, DeviceRun, Run};
use galaxy_common::{DeviceName, Epoch, RequestId};
use std::time::Duration;

/// What a request cost.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Its number, for a trace.
    pub request: RequestId,
    /// The epoch of its last program.
    pub epoch: Epoch,
    /// Waiting for readiness and for the turn.
    pub queue: Duration,
    /// Tokenising, or reading images.
    pub tokenize: Duration,
    /// Programs on the devices.
    pub execute: Duration,
    /// Tokens in all, or rows of images.
    pub tokens: u64,
    /// Tokens of a prompt that were in the key-value cache already.
    pub cached: u32,
    /// Programs.
    pub programs: u32,
    /// Sums over the programs, by device.
    pub devices: Vec<(DeviceName, DeviceCost)>,
}

impl Report {
    /// Adds a program.
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
