//! Traces: what every lane of every device did for a request, for Perfetto and in sums.

mod chrome;

use crate::{error::RequestError, fleet::Timeline};
use galaxy_common::{
    BatchShape, Epoch, Rank, RequestId, SequenceNumber,
    plan::{Phase, Plan},
};
use galaxy_graph::{
    Program, lower,
    program::Lane,
    timeline::{Times, lane_use, span, traffic},
};
use galaxy_model::{Formats, ModelSpec};
use std::{collections::VecDeque, sync::Arc};

/// How many requests are kept. Workers keep as many programs.
pub const KEPT: usize = 32;

/// A program of a request, as far as lowering it again needs it.
#[derive(Debug, Clone)]
pub struct TracedProgram {
    /// The epoch in which it ran.
    pub epoch: Epoch,
    /// Its sequence number in the epoch.
    pub sequence: SequenceNumber,
    /// The plan by which it ran.
    pub plan: Arc<Plan>,
    /// Whether it was lowered for many rows, or for one of each sequence.
    pub phase: Phase,
    /// The shape of its batch.
    pub shape: BatchShape,
}

/// A request that ran lately.
#[derive(Debug, Clone)]
pub(crate) struct TracedRequest {
    pub(crate) request: RequestId,
    pub(crate) programs: Vec<TracedProgram>,
}

/// The requests that ran lately.
#[derive(Default)]
pub(crate) struct TraceLog {
    entries: VecDeque<TracedRequest>,
}

impl TraceLog {
    pub(crate) fn push(&mut self, request: RequestId, programs: Vec<TracedProgram>) {
        self.entries.truncate(KEPT - 1);
        self.entries.push_front(TracedRequest { request, programs });
    }

    /// Finds a request by its number; the last one for 0.
    pub(crate) fn find(&self, request: u64) -> Result<TracedRequest, RequestError> {
        let found = match request {
            0 => self.entries.front(),
            _ => self.entries.iter().find(|e| e.request.0 == request),
        };
        found.cloned().ok_or_else(|| RequestError::NoTrace {
            request,
            kept: self.entries.len(),
            last: self.entries.front().map(|e| e.request.0),
        })
    }
}

/// The sums of one lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneSum {
    /// The name of the lane: "compute", "send pi-2", "receive pi-1".
    pub lane: String,
    /// Time for which the lane worked, in ns. A receive that waits for its tile works.
    pub busy_ns: u64,
    /// The rest of the programs' time, in ns.
    pub idle_ns: u64,
}

/// The sums of one device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceSum {
    /// The name of the device.
    pub device: String,
    /// The sums of each of its lanes.
    pub lanes: Vec<LaneSum>,
    /// Time from the first operation of each program to its last, in ns.
    pub wall_ns: u64,
    /// Time for which the compute lane was idle until a receive ended, in ns.
    pub awaiting_receive_ns: u64,
    /// Bytes that the device received.
    pub bytes_received: u64,
}

/// A request's trace.
#[derive(Debug, Clone)]
pub struct Trace {
    /// The timelines, in Chrome's trace format.
    pub chrome_json: String,
    /// The sums of each device.
    pub devices: Vec<DeviceSum>,
}

impl Trace {
    /// Joins measured times with what the programs say; the times of `missing` programs are gone.
    /// Blocks: it lowers the programs again.
    pub(crate) fn new(
        (spec, formats): (&ModelSpec, &Formats),
        request: RequestId,
        measured: Vec<(TracedProgram, Vec<Timeline>)>,
        missing: usize,
    ) -> Result<Self, RequestError> {
        let mut devices: Vec<DeviceSum> = Vec::new();
        let mut writer = chrome::Writer::new(request);
        for (traced, timelines) in measured {
            let programs =
                lower(spec, formats, &traced.plan, traced.phase, &traced.shape.unbound())
                    .map_err(|e| RequestError::Internal { why: e.to_string() })?;
            for ((rank, part), (program, timeline)) in
                traced.plan.ranked().zip(programs.iter().zip(&timelines))
            {
                if program.operations.len() != timeline.operations.len() {
                    return Err(RequestError::Internal {
                        why: format!(
                            "device {} measured {} operations, and its program has {}",
                            part.name,
                            timeline.operations.len(),
                            program.operations.len()
                        ),
                    });
                }
                writer.program(rank, &traced, program, timeline);
                let sum = sum(&traced.plan, program, &timeline.operations);
                match devices.get_mut(rank.index()) {
                    Some(total) => total.add(&sum),
                    None => devices.push(DeviceSum { device: part.name.to_string(), ..sum }),
                }
            }
        }
        Ok(Self { chrome_json: writer.finish(missing), devices })
    }
}

impl DeviceSum {
    fn add(&mut self, other: &Self) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.wall_ns, other.wall_ns);
        add(&mut self.awaiting_receive_ns, other.awaiting_receive_ns);
        add(&mut self.bytes_received, other.bytes_received);
        for lane in &other.lanes {
            match self.lanes.iter_mut().find(|l| l.lane == lane.lane) {
                Some(sum) => {
                    add(&mut sum.busy_ns, lane.busy_ns);
                    add(&mut sum.idle_ns, lane.idle_ns);
                }
                None => self.lanes.push(lane.clone()),
            }
        }
    }
}

/// The name of a lane, for people.
pub(crate) fn lane_name(plan: &Plan, lane: Lane) -> String {
    let name = |rank: Rank| {
        plan.ring.get(rank.index()).map_or_else(|| rank.to_string(), |d| d.name.to_string())
    };
    match lane {
        Lane::Compute => "compute".to_owned(),
        Lane::Copy => "copy".to_owned(),
        Lane::Send(to) => format!("send {}", name(to)),
        Lane::Receive(from) => format!("receive {}", name(from)),
        Lane::Load(loader) => format!("load {loader}"),
    }
}

/// The sums of one program on one device.
fn sum(plan: &Plan, program: &Program, times: &[Times]) -> DeviceSum {
    let (begin, end) = span(times);
    let lanes = lane_use(program, times);
    let awaited = lanes.iter().find(|l| l.lane == Lane::Compute).map(|l| l.awaiting_receive);
    DeviceSum {
        device: String::new(),
        wall_ns: end.saturating_sub(begin),
        awaiting_receive_ns: awaited.unwrap_or(0),
        bytes_received: traffic(program).1,
        lanes: lanes
            .iter()
            .map(|l| LaneSum { lane: lane_name(plan, l.lane), busy_ns: l.busy, idle_ns: l.idle })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_log_keeps_the_last_requests() {
        let mut log = TraceLog::default();
        for request in 1..=40 {
            log.push(RequestId(request), Vec::new());
        }
        assert_eq!(log.find(0).expect("the last").request, RequestId(40));
        assert_eq!(log.find(9).expect("kept").request, RequestId(9));
        let error = log.find(8).expect_err("dropped");
        assert!(error.to_string().contains("the last one is 40"), "{error}");
        assert_eq!(log.entries.len(), KEPT);
    }
}
