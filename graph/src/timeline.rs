//! A timeline: when each operation of a program began and ended, predicted or measured.

use crate::program::{Lane, OpId, OpKind, Operation, Program, Region};

/// Begin and end of one operation, in nanoseconds on one clock.
pub type Times = (u64, u64);

/// How a lane spent its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneUse {
    /// The lane whose time it is.
    pub lane: Lane,
    /// Nanoseconds in operations.
    pub busy: u64,
    /// Nanoseconds between operations, from the first to the last of the program.
    pub idle: u64,
    /// Nanoseconds of the compute lane's idle time that ended because a receive did; 0 of other lanes.
    pub awaiting_receive: u64,
}

/// First begin and last end of a program.
pub fn span(times: &[Times]) -> Times {
    let begin = times.iter().map(|t| t.0).min().unwrap_or(0);
    let end = times.iter().map(|t| t.1).max().unwrap_or(0);
    (begin, end)
}

/// How each lane of `program` spent its time. Times may be reported by a device: impossible ones give
/// sums that mean nothing, and do no other harm.
pub fn lane_use(program: &Program, times: &[Times]) -> Vec<LaneUse> {
    let mut lanes = no_use(program);
    add_lane_use(program, times, &mut lanes);
    lanes
}

/// The lanes of a program that has not run.
pub fn no_use(program: &Program) -> Vec<LaneUse> {
    let none = |lane: &(Lane, _)| LaneUse { lane: lane.0, busy: 0, idle: 0, awaiting_receive: 0 };
    program.lanes.iter().map(none).collect()
}

/// Adds how each lane spent its time in one more run of `program` to `lanes`, one for each of its lanes.
/// Nothing is allocated.
pub fn add_lane_use(program: &Program, times: &[Times], lanes: &mut [LaneUse]) {
    let (begin, end) = span(times);
    for (index, sum) in lanes.iter_mut().enumerate() {
        let (mut busy, mut awaiting) = (0u64, 0u64);
        each_of_lane(program, times, (index, begin), receives, |_, worked, awaited| {
            busy = worked.saturating_add(busy);
            awaiting = awaited.saturating_add(awaiting);
        });
        let idle = end.saturating_sub(begin).saturating_sub(busy);
        sum.busy = sum.busy.saturating_add(busy);
        sum.idle = sum.idle.saturating_add(idle);
        if sum.lane == Lane::Compute {
            sum.awaiting_receive = sum.awaiting_receive.saturating_add(awaiting);
        }
    }
}

/// Calls `each` with each operation of the compute lane, in order: how long it took, and how long the
/// lane was idle before it until something was received, both in nanoseconds.
pub fn each_compute(program: &Program, times: &[Times], each: impl FnMut(OpId, u64, u64)) {
    each_of_lane(program, times, (0, span(times).0), receives, each);
}

/// How many nanoseconds the compute lane was idle until weights had come from disk.
pub fn stalled(program: &Program, times: &[Times]) -> u64 {
    let loads = |lane: Lane| matches!(lane, Lane::Load(_));
    let mut stalled = 0u64;
    each_of_lane(program, times, (0, span(times).0), loads, |_, _, awaited| {
        stalled = stalled.saturating_add(awaited);
    });
    stalled
}

fn receives(lane: Lane) -> bool {
    matches!(lane, Lane::Receive(_))
}

fn each_of_lane(
    program: &Program,
    times: &[Times],
    (lane, begin): (usize, u64),
    awaited: impl Fn(Lane) -> bool,
    mut each: impl FnMut(OpId, u64, u64),
) {
    let end_of = |id: OpId| times.get(id.0 as usize).map_or(0, |t| t.1);
    let mut at = begin;
    for id in &program.lanes[lane].1 {
        let Some(&(from, to)) = times.get(id.0 as usize) else { continue };
        let received = program.operation(*id).waits.iter().any(|wait| {
            let (other, ids) = &program.lanes[usize::from(wait.lane.0)];
            let last = (wait.count as usize).checked_sub(1).map(|i| ids[i]);
            awaited(*other) && last.is_some_and(|id| end_of(id) > at)
        });
        each(*id, to.saturating_sub(from), if received { from.saturating_sub(at) } else { 0 });
        at = to;
    }
}

/// Bytes that an operation sends and receives, frames' headers not counted.
pub fn moved(program: &Program, op: &Operation) -> (u64, u64) {
    let bytes = |regions: &[Region]| regions.iter().map(|r| program.region_bytes(r)).sum();
    match op.kind {
        OpKind::Send { .. } => (bytes(&op.reads), 0),
        OpKind::Receive { .. } => (0, bytes(&op.writes)),
        _ => (0, 0),
    }
}

/// Bytes that a program sends and receives, frames' headers not counted.
pub fn traffic(program: &Program) -> (u64, u64) {
    let each = program.operations.iter().map(|op| moved(program, op));
    each.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
}

/// The share of communication that compute hid: 1 - (compute idle while awaiting a receive) /
/// (bytes received / link rate). `None` when nothing was received.
///
/// # Units
/// `awaiting` in nanoseconds, `rate` in bytes per second.
pub fn hidden(awaiting: u64, received: u64, rate: f64) -> Option<f64> {
    (received > 0 && rate > 0.0).then(|| 1.0 - awaiting as f64 * 1e-9 / (received as f64 / rate))
}
