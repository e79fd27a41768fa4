//! The simulator: runs programs against costs of operations and rates of links in virtual time.

use crate::{
    program::{Lane, OpId, OpKind, Operation, Program},
    timeline::Times,
    verify::{Site, site},
};
use galaxy_common::Rank;
use std::collections::HashMap;

/// What a link carries.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkRate {
    /// From the end of a send to the arrival of its last byte, nanoseconds.
    pub latency: u64,
    /// Bytes per second.
    pub rate: f64,
    /// Bytes that may be on their way or in buffers before their receive begins.
    pub window: u64,
    /// Bytes that pass at once after a pause (a token bucket); 0 on a cable.
    pub burst: u64,
}

/// What operations and links cost.
pub trait Costs {
    /// Nanoseconds of an operation that is no send or receive.
    fn compute(&self, program: &Program, operation: &Operation) -> u64;
    /// The link between two devices.
    fn link(&self, from: Rank, to: Rank) -> LinkRate;
}

/// Bytes on the wire for a byte of a tile: packets of 1514 bytes carry 1448, and a TLS record adds
/// 22 to 16 KiB.
pub const FRAME_OVERHEAD: f64 = 1514.0 / 1448.0 * (16_384.0 + 22.0) / 16_384.0;

/// A predicted run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Predicted {
    /// For each rank, begin and end of each operation.
    pub times: Vec<Vec<Times>>,
    /// End of the last operation.
    pub total: u64,
}

/// Programs that stop for ever.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the programs stop: {left} operations never start, the first is {site}")]
pub struct Deadlock {
    /// One that never starts.
    pub site: Site,
    /// How many never start.
    pub left: usize,
}

/// Runs `programs` in virtual time, all lanes in their order, each operation as early as it can.
///
/// # Errors
/// When they deadlock; programs that the verifier passed never do.
pub fn simulate(programs: &[Program], costs: &dyn Costs) -> Result<Predicted, Deadlock> {
    let mut links: HashMap<(Rank, Rank), Link> = HashMap::new();
    let mut times: Vec<Vec<Option<Times>>> =
        programs.iter().map(|p| vec![None; p.operations.len()]).collect();
    let mut cursor: Vec<Vec<usize>> = programs.iter().map(|p| vec![0; p.lanes.len()]).collect();
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, program) in programs.iter().enumerate() {
            for (lane, at) in cursor[rank].iter_mut().enumerate() {
                while let Some(&id) = program.lanes[lane].1.get(*at) {
                    let Some(ready) = ready(program, &times[rank], lane, *at, id) else {
                        break;
                    };
                    let op = program.operation(id);
                    let done = match program.lanes[lane].0 {
                        Lane::Send(to) => {
                            let rate = costs.link(program.rank, to);
                            let bytes = op.reads.iter().map(|r| program.region_bytes(r)).sum();
                            let link = links.entry((program.rank, to)).or_default();
                            link.send(ready, bytes, rate)
                        }
                        Lane::Receive(from) => {
                            let link = links.entry((from, program.rank)).or_default();
                            link.receive(ready)
                        }
                        _ => Some((ready, ready + costs.compute(program, op))),
                    };
                    let Some(done) = done else { break };
                    times[rank][id.0 as usize] = Some(done);
                    *at += 1;
                    moved = true;
                }
            }
        }
    }
    let stuck = |rank: usize| {
        let program = &programs[rank];
        let next = |lane: usize| program.lanes[lane].1.get(cursor[rank][lane]).copied();
        (0..program.lanes.len()).find_map(next).map(|id| site(program, id))
    };
    if let Some(site) = (0..programs.len()).find_map(stuck) {
        let left = times.iter().flatten().filter(|t| t.is_none()).count();
        return Err(Deadlock { site, left });
    }
    let times: Vec<Vec<Times>> =
        times.into_iter().map(|t| t.into_iter().flatten().collect()).collect();
    let total = times.iter().flatten().map(|t| t.1).max().unwrap_or(0);
    Ok(Predicted { times, total })
}

/// When an operation may start, once everything that it waits for has ended.
fn ready(
    program: &Program,
    times: &[Option<Times>],
    lane: usize,
    at: usize,
    id: OpId,
) -> Option<u64> {
    let mut ready = match at.checked_sub(1) {
        Some(before) => times[program.lanes[lane].1[before].0 as usize]?.1,
        None => 0,
    };
    for wait in &program.operation(id).waits {
        if let Some(last) = (wait.count as usize).checked_sub(1) {
            let id = program.lanes[usize::from(wait.lane.0)].1[last];
            ready = ready.max(times[id.0 as usize]?.1);
        }
    }
    Some(ready)
}

/// Frames of one link: when each arrived, and when each was received.
#[derive(Default)]
struct Link {
    arrived: Vec<(u64, u64)>,
    received: Vec<u64>,
    /// When the link's bucket was last empty.
    empty: u64,
}

impl Link {
    fn send(&mut self, ready: u64, bytes: u64, rate: LinkRate) -> Option<Times> {
        // Frames back from this one that still fit the window may be unreceived; the rest may not.
        let (mut room, mut must) = (rate.window, self.arrived.len());
        while must > 0 && self.arrived[must - 1].1 <= room {
            room -= self.arrived[must - 1].1;
            must -= 1;
        }
        let open = match must.checked_sub(1) {
            Some(last) => *self.received.get(last)?,
            None => 0,
        };
        let begin = ready.max(open);
        // What the bucket has gathered since it was last empty passes at once.
        let pause = begin.saturating_sub(self.empty) as f64 * 1e-9;
        let tokens = (pause * rate.rate).min(rate.burst as f64);
        let tokens = if self.arrived.is_empty() { rate.burst as f64 } else { tokens };
        let bytes_on_wire = bytes as f64 * FRAME_OVERHEAD;
        let late = (bytes_on_wire - tokens) / rate.rate * 1e9;
        let end = begin + late.max(0.0) as u64;
        // The time at which a bucket that fills without end would have been empty.
        let left = (tokens - bytes_on_wire).max(0.0) / rate.rate * 1e9;
        self.empty = end.saturating_sub(left as u64);
        self.arrived.push((end + rate.latency, bytes));
        Some((begin, end))
    }
    fn receive(&mut self, ready: u64) -> Option<Times> {
        let (arrival, _) = *self.arrived.get(self.received.len())?;
        let end = ready.max(arrival);
        self.received.push(end);
        Some((ready, end))
    }
}

/// From when on an operation costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// From when it could have begun (the one before it on its lane, and all that it waits for,
    /// were over): what it takes to wake a lane and to count an operation as done is in it. So the
    /// simulator predicts this device.
    FromReady,
    /// From its begin: the work alone. So the simulator tells what a device that loses nothing
    /// between its operations would reach.
    Work,
}

/// Costs learnt from timelines of the same devices: the mean of what was seen for operations of
/// the same kind and size, and in proportion to rows for sizes that were not seen.
#[derive(Clone, Debug)]
pub struct Observed {
    seen: HashMap<(Rank, u64), HashMap<u32, Vec<u64>>>,
    cables: Vec<LinkRate>,
}

impl Observed {
    /// Nothing seen yet. Each device, by rank, has one cable to a switch; what it sends is as late as
    /// its cable says, and as fast as the slower of the two cables on its way.
    pub fn new(cables: Vec<LinkRate>) -> Self {
        Self { seen: HashMap::new(), cables }
    }
    /// Learns from one measured run.
    pub fn learn(&mut self, program: &Program, times: &[Times], counted: Counted) {
        let end = |id: OpId| times.get(id.0 as usize).map_or(0, |t| t.1);
        for (_, ids) in &program.lanes {
            let mut before = None;
            for &id in ids {
                let op = program.operation(id);
                let waits = op.waits.iter().filter_map(|w| {
                    let ids = &program.lanes[usize::from(w.lane.0)].1;
                    Some(end(ids[(w.count as usize).checked_sub(1)?]))
                });
                let begin = times.get(id.0 as usize).map_or(0, |t| t.0);
                let ready = match counted {
                    Counted::FromReady => waits.chain(before).max().unwrap_or(begin).min(begin),
                    Counted::Work => begin,
                };
                before = Some(end(id));
                if let Some((key, rows)) = key(program, op) {
                    let samples = self.seen.entry(key).or_default().entry(rows).or_default();
                    samples.push(end(id).saturating_sub(ready));
                }
            }
        }
    }
}

/// What makes two operations cost the same: kind and widths; and the rows, which scale it.
fn key(program: &Program, op: &Operation) -> Option<((Rank, u64), u32)> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    std::mem::discriminant(&op.kind).hash(&mut hasher);
    match op.kind {
        OpKind::Send { .. } | OpKind::Receive { .. } => return None,
        OpKind::Product { product, .. } => product.hash(&mut hasher),
        OpKind::Join { partial, staged, .. } => (partial, staged).hash(&mut hasher),
        OpKind::Export { staged } => staged.hash(&mut hasher),
        _ => {}
    }
    let region = op.writes.first().or(op.reads.first())?;
    region.columns.len().hash(&mut hasher);
    Some(((program.rank, hasher.finish()), region.rows.len()))
}

impl Costs for Observed {
    fn compute(&self, program: &Program, operation: &Operation) -> u64 {
        let Some((key, rows)) = key(program, operation) else { return 0 };
        let Some(sizes) = self.seen.get(&key) else { return 0 };
        let nearest = sizes.iter().min_by_key(|(seen, _)| (seen.abs_diff(rows), **seen));
        let Some((&seen, samples)) = nearest else { return 0 };
        // The mean, not the median: a timeline adds operations up, and I/O that takes the core now
        // and then belongs to the sum.
        let mean = samples.iter().sum::<u64>() as f64 / samples.len() as f64;
        (mean * f64::from(rows) / f64::from(seen.max(1))) as u64
    }
    fn link(&self, from: Rank, to: Rank) -> LinkRate {
        let (own, other) = (self.cables[from.index()], self.cables[to.index()]);
        LinkRate {
            latency: own.latency,
            rate: own.rate.min(other.rate),
            window: own.window.min(other.window),
            burst: own.burst.min(other.burst),
        }
    }
}
