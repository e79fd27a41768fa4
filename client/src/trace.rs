//! The measured lanes of a request, and what they say about overlap.

use crate::answer::milliseconds;
use galaxy_common::{LinkRate, printable::line};
use galaxy_proto::v1;
use serde::Serialize;
use std::time::Duration;

/// The most characters of the name of a device or a lane.
const MAX_NAME: usize = 128;

/// The measured lanes of every device for one request.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// The timeline in Chrome trace format, for Perfetto.
    pub chrome_json: String,
    /// Each device of the plan, in ring order.
    pub devices: Vec<DeviceTrace>,
}

/// What one device did.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceTrace {
    /// The name of the device.
    pub device: String,
    /// The lanes of the device.
    pub lanes: Vec<LaneTrace>,
    /// The time from its first operation to its last.
    #[serde(rename = "wall_ms", serialize_with = "milliseconds")]
    pub wall: Duration,
    /// The time that its compute lane was idle because a receive was not complete.
    #[serde(rename = "awaiting_receive_ms", serialize_with = "milliseconds")]
    pub awaiting_receive: Duration,
    /// Bytes that came from peers.
    pub bytes_received: u64,
}

/// One lane of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LaneTrace {
    /// The name of the lane, like `compute`, `send pi-2` or `receive pi-1`.
    pub lane: String,
    /// The time in operations.
    #[serde(rename = "busy_ms", serialize_with = "milliseconds")]
    pub busy: Duration,
    /// The time between operations.
    #[serde(rename = "idle_ms", serialize_with = "milliseconds")]
    pub idle: Duration,
}

/// The share of communication that compute hid:
/// 1 - (compute lane idle while awaiting a receive) / (bytes received / link rate).
///
/// `None` when nothing was received. Below zero when the device waited longer than its bytes
/// were on the link: it then waited for the compute of its peers.
pub fn hidden_communication(
    awaiting_receive: Duration,
    bytes_received: u64,
    rate: LinkRate,
) -> Option<f64> {
    let on_the_link = rate.time_of(bytes_received).as_secs_f64();
    (on_the_link > 0.0).then(|| 1.0 - awaiting_receive.as_secs_f64() / on_the_link)
}

impl DeviceTrace {
    /// [`hidden_communication`] of this device.
    pub fn hidden(&self, rate: LinkRate) -> Option<f64> {
        hidden_communication(self.awaiting_receive, self.bytes_received, rate)
    }
}

impl Trace {
    /// [`hidden_communication`] of all devices together.
    pub fn hidden(&self, rate: LinkRate) -> Option<f64> {
        let awaiting = self.devices.iter().map(|d| d.awaiting_receive).sum();
        let bytes = self.devices.iter().fold(0u64, |n, d| n.saturating_add(d.bytes_received));
        hidden_communication(awaiting, bytes, rate)
    }
}

impl From<v1::TraceReply> for Trace {
    fn from(reply: v1::TraceReply) -> Self {
        Self {
            chrome_json: reply.chrome_json,
            devices: reply.devices.into_iter().map(DeviceTrace::from).collect(),
        }
    }
}
impl From<v1::TraceDevice> for DeviceTrace {
    fn from(wire: v1::TraceDevice) -> Self {
        let lane = |lane: v1::TraceLane| LaneTrace {
            lane: line(&lane.lane, MAX_NAME),
            busy: Duration::from_nanos(lane.busy_ns),
            idle: Duration::from_nanos(lane.idle_ns),
        };
        Self {
            device: line(&wire.device, MAX_NAME),
            lanes: wire.lanes.into_iter().map(lane).collect(),
            wall: Duration::from_nanos(wire.wall_ns),
            awaiting_receive: Duration::from_nanos(wire.awaiting_receive_ns),
            bytes_received: wire.bytes_received,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(awaiting_ms: u64, bytes: u64) -> DeviceTrace {
        DeviceTrace {
            device: "pi-1".to_owned(),
            lanes: Vec::new(),
            wall: Duration::from_millis(100),
            awaiting_receive: Duration::from_millis(awaiting_ms),
            bytes_received: bytes,
        }
    }

    #[test]
    fn hidden_communication_excludes_waits_of_the_compute_lane() {
        let rate = LinkRate::measured(1_000_000, Duration::from_secs(1)).expect("a rate");
        // 100 KB take 100 ms on this link.
        assert_eq!(device(0, 100_000).hidden(rate), Some(1.0));
        let some = device(20, 100_000).hidden(rate).expect("bytes came");
        assert!((some - 0.8).abs() < 1e-9, "{some}");
        let below = device(150, 100_000).hidden(rate).expect("bytes came");
        assert!((below + 0.5).abs() < 1e-9, "{below}");
        assert_eq!(device(20, 0).hidden(rate), None);
    }

    #[test]
    fn hidden_communication_weights_devices_by_their_bytes() {
        let rate = LinkRate::measured(1_000_000, Duration::from_secs(1)).expect("a rate");
        let trace = Trace {
            chrome_json: String::new(),
            devices: vec![device(0, 300_000), device(100, 100_000)],
        };
        let hidden = trace.hidden(rate).expect("bytes came");
        assert!((hidden - 0.75).abs() < 1e-9, "{hidden}");
    }
}
