//! A timeline: when each operation of a program began and ended, predicted or measured.

use crate::program::{Lane, OpId, OpKind, Program};

/// Begin and end of one operation, in nanoseconds on one clock.
pub type Times = (u64, u64);

/// How a lane spent its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneUse {
    /// Which lane.
    pub lane: Lane,
    /// Nanoseconds in operations.
    pub busy: u64,
    /// Nanoseconds between operations, from the first to the last of the program.
    pub idle: u64,
    /// Of the compute lane's idle time: what ended because a receive did.
    pub awaiting_receive: u64,
}

/// First begin and last end of a program.
pub fn span(times: &[Times]) -> Times {
    let begin = times.iter().map(|t| t.0).min().unwrap_or(0);
    let end = times.iter().map(|t| t.1).max().unwrap_or(0);
    (begin, end)
}

/// How each lane of `program` spent its time.
pub fn lane_use(program: &Program, times: &[Times]) -> Vec<LaneUse> {
    let (begin, end) = span(times);
    let end_of = |id: OpId| times.get(id.0 as usize).map_or(0, |t| t.1);
    program
        .lanes
        .iter()
        .map(|(lane, ids)| {
            let (mut busy, mut awaiting, mut at) = (0, 0, begin);
            for id in ids {
                let Some(&(from, to)) = times.get(id.0 as usize) else { continue };
                busy += to.saturating_sub(from);
                let received = program.operation(*id).waits.iter().any(|wait| {
                    let (other, ids) = &program.lanes[usize::from(wait.lane.0)];
                    let last = (wait.count as usize).checked_sub(1).map(|i| ids[i]);
                    matches!(other, Lane::Receive(_)) && last.is_some_and(|id| end_of(id) > at)
                });
                if received && *lane == Lane::Compute {
                    awaiting += from.saturating_sub(at);
                }
                at = to;
            }
            let idle = (end - begin).saturating_sub(busy);
            LaneUse { lane: *lane, busy, idle, awaiting_receive: awaiting }
        })
        .collect()
}

/// Bytes that a program sends and receives, frames' headers not counted.
pub fn traffic(program: &Program) -> (u64, u64) {
    let (mut sent, mut received) = (0, 0);
    for op in &program.operations {
        match op.kind {
            OpKind::Send { .. } => {
                sent += op.reads.iter().map(|r| program.region_bytes(r)).sum::<u64>();
            }
            OpKind::Receive { .. } => {
                received += op.writes.iter().map(|r| program.region_bytes(r)).sum::<u64>();
            }
            _ => {}
        }
    }
    (sent, received)
}

/// The share of communication that compute hid: 1 - (compute idle while awaiting a receive) /
/// (bytes received / link rate). `None` when nothing was received.
///
/// # Units
/// `awaiting` in nanoseconds, `rate` in bytes per second.
pub fn hidden(awaiting: u64, received: u64, rate: f64) -> Option<f64> {
    (received > 0 && rate > 0.0).then(|| 1.0 - awaiting as f64 * 1e-9 / (received as f64 / rate))
}
