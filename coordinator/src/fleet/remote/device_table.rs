//! The table of devices: what is known of each device, for calls and for people.

use super::super::DeviceView;
use crate::{
    cluster::DeviceConfig,
    connection::Connection,
    membership::{Index, Now},
    placement::{self, Placement},
    profile::Progress,
};
use galaxy_common::{Bytes, ClusterProfile, DeviceName, Epoch, plan::Plan};
use galaxy_proto::v1::DescribeReply;
use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

/// How many of the last pings are kept; the fastest gives the offset of the clock.
const CLOCK_SAMPLES: usize = 16;

/// What is known of one device.
#[derive(Default)]
pub(super) struct DeviceRow {
    pub(super) attempt: u64,
    pub(super) connection: Option<Connection>,
    pub(super) description: Option<DescribeReply>,
    pub(super) state: &'static str,
    pub(super) detail: String,
    /// What it fetches or loads for another plan while this one runs, for people; empty if it does not.
    pub(super) coming: String,
    pub(super) weight_bytes: Bytes,
    /// When a plan with it is looked for, if it came back and has no part.
    pub(super) look: Option<Now>,
    /// Whether it was removed from the cluster.
    pub(super) removed: bool,
    /// Why plans do not count on it; empty if they do.
    pub(super) out: String,
    clock: VecDeque<(u64, i64)>,
}

impl DeviceRow {
    /// Takes in one ping: `asked` and `answered` by our clock, `theirs` by the worker's clock in between, in ns.
    pub(super) fn sample_clock(&mut self, asked: u64, answered: u64, theirs: u64) {
        self.clock.truncate(CLOCK_SAMPLES - 1);
        let middle = asked + answered.saturating_sub(asked) / 2;
        let offset = i128::from(middle) - i128::from(theirs);
        let offset = i64::try_from(offset).unwrap_or(0);
        self.clock.push_front((answered.saturating_sub(asked), offset));
    }

    /// What to add to the worker's clock, in ns, by the fastest of the last pings: half its time bounds the error.
    pub(super) fn offset_ns(&self) -> i64 {
        self.clock.iter().min_by_key(|(took, _)| *took).map_or(0, |(_, offset)| *offset)
    }

    /// Forgets the connection, and what the worker reported over it.
    pub(super) fn clear(&mut self) {
        self.connection = None;
        self.clock.clear();
        self.coming.clear();
        self.weight_bytes = Bytes(0);
    }
}

/// How many epochs' rings are kept, for the timelines of what ran in them.
const RINGS: usize = 64;

/// What is known of all devices.
pub(super) struct DeviceTable {
    /// The plan in force and the devices that have a part in it; none before the first plan.
    pub(super) placement: Option<Arc<Placement>>,
    /// What devices were measured to do; none where the split is by hand.
    pub(super) profile: Option<Arc<ClusterProfile>>,
    /// What is known of each device, by its place in the cluster file.
    pub(super) entries: Vec<DeviceRow>,
    /// The epoch that ended last, the device because of which it ended, and the reason.
    pub(super) ended: Option<(Epoch, Index, String)>,
    rings: VecDeque<(Epoch, Arc<Placement>)>,
}

impl DeviceTable {
    pub(super) fn new(devices: usize) -> Self {
        let mut table = Self {
            placement: None,
            profile: None,
            entries: Vec::new(),
            ended: None,
            rings: VecDeque::with_capacity(RINGS),
        };
        table.grow(devices);
        table
    }

    /// Makes room for `devices` devices.
    pub(super) fn grow(&mut self, devices: usize) {
        let entry = || DeviceRow { state: "unreachable", ..DeviceRow::default() };
        self.entries.resize_with(devices.max(self.entries.len()), entry);
    }

    /// Whether a status shows the device at `index`.
    pub(super) fn shows(&self, index: Index) -> bool {
        self.entries.get(index).is_some_and(|entry| !entry.removed)
    }

    /// Notes that `epoch` runs by the plan in force.
    pub(super) fn begin(&mut self, epoch: Epoch) {
        self.rings.truncate(RINGS - 1);
        if let Some(placement) = self.placement.clone() {
            self.rings.push_front((epoch, placement));
        }
    }

    /// The devices of an epoch that ran lately, by rank.
    pub(super) fn ring(&self, epoch: Epoch) -> Option<Vec<Index>> {
        let found = self.rings.iter().find(|(of, _)| *of == epoch);
        found.map(|(_, placement)| placement.ring.clone())
    }

    /// How a status shows the device at `index` of the cluster file.
    pub(super) fn view(&self, index: Index, device: &DeviceConfig, now: Now) -> DeviceView {
        let entry = &self.entries[index];
        let placement = self.placement.as_ref();
        let rank = placement.and_then(|p| p.ring.iter().position(|i| *i == index));
        let part = placement.zip(rank).and_then(|(p, rank)| p.plan.ring.get(rank));
        let description = entry.description.as_ref();
        let (mut state, mut detail) = (entry.state, entry.detail.clone());
        if let (Some(placement), None) = (placement, part) {
            if state == "connected" {
                state = "idle";
            }
            detail = match entry.out.is_empty() {
                true => without_part(placement.reason(index), &detail, entry.look, now),
                false => entry.out.clone(),
            };
        }
        if !entry.coming.is_empty() {
            detail = format!("for a better plan {}", entry.coming);
        }
        let described = description.map_or(0, |d| u16::try_from(d.threads).unwrap_or(u16::MAX));
        DeviceView {
            name: device.name.to_string(),
            address: device.address.clone(),
            state,
            detail,
            part: part.cloned(),
            weight_bytes: entry.weight_bytes,
            budget: device.memory,
            needed: placement
                .zip(rank)
                .and_then(|(p, rank)| p.needed.get(rank).copied())
                .unwrap_or_default(),
            threads: part.map_or(device.threads.unwrap_or(described), |p| p.threads),
            processor: description.map(|d| d.processor.clone()).unwrap_or_default(),
        }
    }
}

/// What a status says of a device that has no part: why, or when that is looked at again.
fn without_part(why: &str, detail: &str, look: Option<Now>, now: Now) -> String {
    match (look, detail.is_empty()) {
        (Some(look), _) => {
            let wait = look.saturating_sub(now).as_secs_f64().ceil().max(1.0);
            format!("it is back; in {wait:.0} s a plan with it is looked for")
        }
        (None, true) => why.to_owned(),
        (None, false) => format!("{why}; {detail}"),
    }
}

/// The progress of a device that fetches and loads its part of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loading {
    /// Bytes of its weights that it has read.
    pub done: Bytes,
    /// Bytes of its weights that it has to read.
    pub total: Bytes,
    /// Bytes of the model that have come over the network.
    pub fetched: Bytes,
    /// Bytes of the model that have to come over the network; 0 where the device has all that it needs.
    pub to_fetch: Bytes,
    /// The time since it began.
    pub elapsed: Duration,
}

impl fmt::Display for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, total, fetched, to_fetch, elapsed } = self;
        let rate = |done: &Bytes| done.0 as f64 / elapsed.as_secs_f64().max(1e-3);
        if fetched < to_fetch {
            let rate = rate(fetched);
            write!(f, "fetches {fetched} of {to_fetch} ({}/s", Bytes(rate as u64))?;
            if fetched.0 > 0 {
                write!(f, ", {:.0} s left", (to_fetch.0 - fetched.0) as f64 / rate)?;
            }
            return f.write_str(")");
        }
        write!(f, "loads {done} of {total} ({}/s)", Bytes(rate(done) as u64))
    }
}

/// Something that a person at the console wants to know.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// A device cannot be used, and why. Sent once for each reason.
    Unreachable {
        /// The device that cannot be used.
        device: DeviceName,
        /// The address of its worker.
        address: String,
        /// The reason, for people.
        reason: String,
    },
    /// A device that was connected is lost.
    Lost {
        /// The device that was lost.
        device: DeviceName,
        /// How the loss was noticed.
        reason: String,
    },
    /// A program failed, and with it the links of its epoch.
    Spoiled {
        /// The device on which the program failed.
        device: DeviceName,
        /// The epoch that ended.
        epoch: Epoch,
        /// The reason, for people.
        reason: String,
    },
    /// A device is connected.
    Connected {
        /// The device that is connected.
        device: DeviceName,
        /// What its worker says of itself: version, threads, processor, and its own limit of memory.
        about: String,
    },
    /// Devices and links are being measured.
    Profiling {
        /// What is measured and how far it is, or what is strange about it.
        progress: Progress,
    },
    /// There is a new plan.
    Planned {
        /// The plan as a phrase: "galaxy on 3 devices, 4 tiles".
        what: String,
        /// How long a typical text is predicted to take; none for a split by hand.
        predicted: Option<Duration>,
    },
    /// There is no plan.
    Unplanned {
        /// The reason, for people.
        reason: String,
    },
    /// A device has no part in the plan.
    LeftOut {
        /// The device that has no part.
        device: DeviceName,
        /// The reason, for people.
        reason: String,
    },
    /// A device runs outside its profile.
    Drift {
        /// The device that runs outside its profile.
        device: DeviceName,
        /// Whether it is the device's disk, and not its kernels.
        disk: bool,
        /// How many times as long as by its profile everything took, as the plan in force assumes.
        was: f64,
        /// How many times as long as by its profile everything takes now.
        now: f64,
    },
    /// Another plan would not be better by enough.
    Kept {
        /// How long a typical text takes by the plan in force, as predicted.
        now: Duration,
        /// How long a typical text takes by the best other plan, as predicted.
        then: Duration,
    },
    /// The cluster moves to another plan.
    Moving {
        /// The new plan as a phrase.
        what: String,
        /// How long a typical text takes by the plan in force, as predicted.
        now: Duration,
        /// How long a typical text takes by the new plan, as predicted.
        then: Duration,
    },
    /// The plan stays, because another could not be looked for, or could not be taken.
    Stays {
        /// The reason, for people.
        reason: String,
    },
    /// A device fetches and loads what a better plan needs, while the one in force runs.
    Preparing {
        /// The device that makes ready.
        device: DeviceName,
        /// The progress of the device.
        progress: Loading,
    },
    /// A device is ready for a better plan.
    Prepared {
        /// The device that is ready.
        device: DeviceName,
        /// Bytes of weights that it read, if it had no place.
        read: Bytes,
        /// Bytes of the model that came over the network.
        fetched: Bytes,
        /// Bytes of these that came from other devices.
        from_peers: Bytes,
        /// How long it took, in seconds.
        seconds: f64,
    },
    /// A device loads its shard.
    Loading {
        /// The device that loads.
        device: DeviceName,
        /// The progress of the device.
        progress: Loading,
    },
    /// A device is in its place.
    Placed {
        /// The device that is in its place.
        device: DeviceName,
        /// Bytes of the weights that it holds.
        weights: Bytes,
        /// Bytes that it read for its place; what it held already, it kept.
        read: Bytes,
        /// Bytes of the model that came over the network, because the device has no directory of it.
        fetched: Bytes,
        /// Bytes of these that came from other devices.
        from_peers: Bytes,
        /// How long it took, in seconds.
        seconds: f64,
    },
    /// A device has not taken its place: it refused, or the plan does not allow it.
    Refused {
        /// The device that has not taken its place.
        device: DeviceName,
        /// The reason, for people.
        reason: String,
    },
    /// All devices are in place.
    Ready {
        /// The epoch that begins.
        epoch: Epoch,
        /// The plan by which devices are placed.
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
            Self::Profiling { progress } => write!(f, "profiling: {progress}"),
            Self::Planned { what, predicted: None } => write!(f, "plan: {what}"),
            Self::Planned { what, predicted: Some(time) } => {
                write!(f, "plan: {what}, predicted {}", milliseconds(*time))
            }
            Self::Unplanned { reason } => write!(f, "no plan: {reason}; trying again"),
            Self::LeftOut { device, reason } => write!(f, "device {device} has no part: {reason}"),
            Self::Drift { device, disk, was, now } => write!(
                f,
                "{}device {device} runs outside its profile: it takes {now:.2} times as long as measured, and the plan is made for {was:.2}",
                if *disk { "the disk of " } else { "" }
            ),
            Self::Kept { now, then } => write!(
                f,
                "the plan stays: {} predicted now, {} by the best other",
                milliseconds(*now),
                milliseconds(*then)
            ),
            Self::Moving { what, now, then } => write!(
                f,
                "moving between requests to {what}: {} predicted instead of {}",
                milliseconds(*then),
                milliseconds(*now)
            ),
            Self::Stays { reason } => write!(f, "the plan stays: {reason}"),
            Self::Preparing { device, progress } => {
                write!(f, "for a better plan device {device} {progress}")
            }
            Self::Prepared { device, read, fetched, from_peers, seconds } => {
                write!(f, "device {device} is ready for a better plan after {seconds:.1} s")?;
                if *read > Bytes(0) {
                    write!(f, ", {read} read")?;
                }
                came(f, *fetched, *from_peers)
            }
            Self::Loading { device, progress } => write!(f, "device {device} {progress}"),
            Self::Placed { device, weights, read: Bytes(0), fetched: Bytes(0), .. } => {
                write!(f, "device {device} placed: holds {weights} already")
            }
            Self::Placed { device, weights, read, fetched, from_peers, seconds } => {
                write!(f, "device {device} placed: {weights}, {read} read in {seconds:.1} s")?;
                came(f, *fetched, *from_peers)
            }
            Self::Refused { device, reason } => {
                write!(f, "device {device} has not taken its place: {reason}")
            }
            Self::Ready { epoch, plan } => {
                write!(f, "ready: {} by {}, epoch {epoch}:", plan.model, plan.strategy)?;
                for part in &plan.ring {
                    let block = placement::held(part);
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

/// Writes how much of the model came over the network.
fn came(f: &mut fmt::Formatter<'_>, fetched: Bytes, from_peers: Bytes) -> fmt::Result {
    match (fetched, from_peers) {
        (Bytes(0), _) => Ok(()),
        (fetched, Bytes(0)) => write!(f, ", {fetched} fetched"),
        (fetched, peers) => write!(f, ", {fetched} fetched, {peers} of that from other devices"),
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_progress_is_shown_with_rate_and_time_left() {
        let bytes = |megabytes: u64| Bytes(megabytes * 1_000_000);
        let loading = Loading {
            done: bytes(10),
            total: bytes(80),
            fetched: bytes(30),
            to_fetch: bytes(120),
            elapsed: Duration::from_secs(3),
        };
        assert_eq!(loading.to_string(), "fetches 30.0 MB of 120.0 MB (10.0 MB/s, 9 s left)");
        let none = Loading { fetched: Bytes(0), ..loading };
        assert_eq!(none.to_string(), "fetches 0 B of 120.0 MB (0 B/s)");
        let loads = Loading { to_fetch: Bytes(0), fetched: Bytes(0), done: bytes(60), ..loading };
        assert_eq!(loads.to_string(), "loads 60.0 MB of 80.0 MB (20.0 MB/s)");
    }

    #[test]
    fn an_idle_device_shows_its_reason_or_the_time_of_the_next_plan_search() {
        let seconds = Duration::from_secs_f64;
        assert_eq!(without_part("it is slow", "", None, seconds(3.0)), "it is slow");
        assert_eq!(without_part("it is slow", "hot", None, seconds(3.0)), "it is slow; hot");
        let back = without_part("it is slow", "", Some(seconds(10.0)), seconds(2.5));
        assert_eq!(back, "it is back; in 8 s a plan with it is looked for");
        let due = without_part("it is slow", "", Some(seconds(10.0)), seconds(11.0));
        assert_eq!(due, "it is back; in 1 s a plan with it is looked for");
    }

    #[test]
    fn the_clock_offset_is_taken_from_the_fastest_ping() {
        let mut entry = DeviceRow::default();
        entry.sample_clock(1_000, 9_000, 100_000);
        entry.sample_clock(20_000, 20_200, 120_000);
        entry.sample_clock(40_000, 90_000, 140_000);
        assert_eq!(entry.offset_ns(), 20_100 - 120_000);
        entry.clear();
        assert_eq!(entry.offset_ns(), 0);
    }
}
