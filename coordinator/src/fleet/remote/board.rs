//! The board: what is known of each device, for calls and for people.

use super::super::DeviceView;
use crate::cluster::Device;
use galaxy_common::{Bytes, DeviceName, Epoch, plan::Plan};
use galaxy_proto::v1::{DescribeReply, worker_client::WorkerClient};
use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};
use tonic::transport::Channel;

/// A connection to a worker.
pub(super) type Connection = WorkerClient<Channel>;

/// Pings of which the fastest tells the clock's offset.
const CLOCK_SAMPLES: usize = 16;

/// What is known of one device.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) attempt: u64,
    pub(super) connection: Option<Connection>,
    pub(super) description: Option<DescribeReply>,
    pub(super) state: &'static str,
    pub(super) detail: String,
    pub(super) weight_bytes: Bytes,
    clock: VecDeque<(u64, i64)>,
}

impl Entry {
    /// Takes in one ping: asked and answered by our clock, the worker's clock in between.
    pub(super) fn sample_clock(&mut self, asked: u64, answered: u64, theirs: u64) {
        self.clock.truncate(CLOCK_SAMPLES - 1);
        let middle = asked + answered.saturating_sub(asked) / 2;
        let offset = i128::from(middle) - i128::from(theirs);
        let offset = i64::try_from(offset).unwrap_or(0);
        self.clock.push_front((answered.saturating_sub(asked), offset));
    }

    /// What to add to the worker's clock, by the fastest ping of late: half its time bounds the error.
    pub(super) fn offset_ns(&self) -> i64 {
        self.clock.iter().min_by_key(|(took, _)| *took).map_or(0, |(_, offset)| *offset)
    }

    /// Forgets the connection and what it said.
    pub(super) fn clear(&mut self) {
        self.connection = None;
        self.clock.clear();
        self.weight_bytes = Bytes(0);
    }
}

/// All devices.
pub(super) struct Board {
    pub(super) plan: Arc<Plan>,
    pub(super) needed: Vec<Bytes>,
    pub(super) entries: Vec<Entry>,
    /// The epoch that ended last, because of whom, and why.
    pub(super) ended: Option<(Epoch, usize, String)>,
}

impl Board {
    pub(super) fn new(ring: &[Device], plan: Arc<Plan>, needed: Vec<Bytes>) -> Self {
        let entry = || Entry { state: "unreachable", ..Entry::default() };
        Self { plan, needed, entries: ring.iter().map(|_| entry()).collect(), ended: None }
    }

    /// How a status shows device `index` of the ring.
    pub(super) fn view(&self, index: usize, device: &Device) -> DeviceView {
        let entry = &self.entries[index];
        let part = self.plan.ring.get(index);
        let description = entry.description.as_ref();
        DeviceView {
            name: device.name.to_string(),
            address: device.address.clone(),
            state: entry.state,
            detail: entry.detail.clone(),
            part: part.cloned(),
            weight_bytes: entry.weight_bytes,
            budget: device.memory,
            needed: self.needed.get(index).copied().unwrap_or_default(),
            threads: part.map_or(0, |p| p.threads),
            processor: description.map(|d| d.processor.clone()).unwrap_or_default(),
        }
    }
}

/// Something that a person at the console wants to know.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// A device cannot be used, and why. Sent once for each reason.
    Unreachable {
        /// Which device.
        device: DeviceName,
        /// Where.
        address: String,
        /// Why.
        reason: String,
    },
    /// A device was there and is not any more.
    Lost {
        /// Which device.
        device: DeviceName,
        /// How that was noticed.
        reason: String,
    },
    /// A program failed, and with it the links of its epoch.
    Spoiled {
        /// On which device.
        device: DeviceName,
        /// Which epoch.
        epoch: Epoch,
        /// Why.
        reason: String,
    },
    /// A device is there.
    Connected {
        /// Which device.
        device: DeviceName,
        /// What it said.
        about: String,
    },
    /// A device loads its shard.
    Loading {
        /// Which device.
        device: DeviceName,
        /// Bytes that it has,
        done: Bytes,
        /// of so many.
        total: Bytes,
        /// Since its start.
        elapsed: Duration,
    },
    /// A device is in its place.
    Placed {
        /// Which device.
        device: DeviceName,
        /// Weights as held.
        weights: Bytes,
        /// Bytes that it read for it; what it had already it kept.
        read: Bytes,
        /// How long it took.
        seconds: f64,
    },
    /// A device, or the plan, refused the placement.
    Refused {
        /// Which device.
        device: DeviceName,
        /// Why.
        reason: String,
    },
    /// All devices are in place.
    Ready {
        /// In which epoch.
        epoch: Epoch,
        /// By which plan.
        plan: Arc<Plan>,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { device, address, reason } => {
                write!(f, "device {device} ({address}): {reason}; trying again")
            }
            Self::Lost { device, reason } => write!(f, "device {device} lost: {reason}"),
            Self::Spoiled { device, epoch, reason } => {
                write!(f, "epoch {epoch} ended, placing anew: device {device}: {reason}")
            }
            Self::Connected { device, about } => write!(f, "device {device} connected: {about}"),
            Self::Loading { device, done, total, elapsed } => {
                let rate = done.0 as f64 / elapsed.as_secs_f64().max(1e-3);
                write!(f, "device {device} loads {done} of {total} ({}/s)", Bytes(rate as u64))
            }
            Self::Placed { device, weights, read: Bytes(0), .. } => {
                write!(f, "device {device} placed: holds {weights} already")
            }
            Self::Placed { device, weights, read, seconds } => {
                write!(f, "device {device} placed: {weights}, {read} read in {seconds:.1} s")
            }
            Self::Refused { device, reason } => {
                write!(f, "device {device} has not taken its place: {reason}")
            }
            Self::Ready { epoch, plan } => {
                write!(f, "ready: {} by {}, epoch {epoch}:", plan.model, plan.strategy)?;
                for part in &plan.ring {
                    let block = part.prefill.block(0);
                    write!(f, " {} holds {}, {}", part.name, block.heads, block.columns)?;
                    if !part.prefill.vocabulary.is_empty() {
                        write!(f, ", {}", part.prefill.vocabulary)?;
                    }
                    f.write_str(";")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_ping_tells_the_offset() {
        let mut entry = Entry::default();
        entry.sample_clock(1_000, 9_000, 100_000);
        entry.sample_clock(20_000, 20_200, 120_000);
        entry.sample_clock(40_000, 90_000, 140_000);
        assert_eq!(entry.offset_ns(), 20_100 - 120_000);
        entry.clear();
        assert_eq!(entry.offset_ns(), 0);
    }
}
