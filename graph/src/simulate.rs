//! The simulator: runs programs against costs of operations and rates of links in virtual time.

use crate::{
    program::{Lane, OpId, OpKind, Operation, Program},
    timeline::Times,
    verify::{Site, site},
};
use galaxy_common::Rank;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

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

/// What a device's one network interface carries, over all its links together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cable {
    /// Bytes per second out of the device.
    pub out: f64,
    /// Bytes per second into it.
    pub into: f64,
}

/// How fast a device reads weights from its disk.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Disk {
    /// Bytes per second of all loaders together.
    pub all: f64,
    /// Bytes per second of one loader.
    pub each: f64,
}

/// By how many nanoseconds each byte of a tile delays the kernels of the two devices of a link.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ByteCost {
    /// Nanoseconds per byte at the sender.
    pub send: f64,
    /// Nanoseconds per byte at the receiver.
    pub receive: f64,
}

/// What operations and links cost.
pub trait Costs {
    /// Nanoseconds of an operation that is no send or receive.
    fn compute(&self, program: &Program, operation: &Operation) -> u64;
    /// The link between two devices.
    fn link(&self, from: Rank, to: Rank) -> LinkRate;
    /// The interface that all links of a device share; none where each link has one of its own.
    fn cable(&self, _rank: Rank) -> Option<Cable> {
        None
    }
    /// The disk of a device; none where a load costs what [`Costs::compute`] says.
    fn disk(&self, _rank: Rank) -> Option<Disk> {
        None
    }
    /// What bytes of a link cost the kernels at its two ends.
    fn byte_cost(&self, _from: Rank, _to: Rank) -> ByteCost {
        ByteCost::default()
    }
}

/// Bytes on the wire for a byte of a tile: packets of 1514 bytes carry 1448, and a TLS record adds
/// 22 to 16 KiB.
pub const FRAME_OVERHEAD: f64 = 1514.0 / 1448.0 * (16_384.0 + 22.0) / 16_384.0;

/// A predicted run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Predicted {
    /// For each rank, begin and end of each operation, in nanoseconds.
    pub times: Vec<Vec<Times>>,
    /// The end of the last operation, in nanoseconds.
    pub total: u64,
}

/// The error of programs that never end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the programs stop: {left} operations never start, the first is {site}")]
pub struct Deadlock {
    /// An operation that never starts.
    pub site: Site,
    /// How many operations never start.
    pub left: usize,
}

/// Runs `programs` in virtual time, all lanes in their order, each operation as early as it can.
///
/// Operations are taken in the order in which they may start, so that those which share a cable
/// share it in that order. Links that share a cable take turns with whole tiles, where real ones
/// would take turns with packets: together they end at the same time.
///
/// # Errors
/// When they deadlock; programs that the verifier passed never do.
pub fn simulate(programs: &[Program], costs: &dyn Costs) -> Result<Predicted, Deadlock> {
    let mut run = Run::new(programs, costs);
    for (rank, program) in programs.iter().enumerate() {
        (0..program.lanes.len()).for_each(|lane| run.consider(rank, lane));
    }
    while let Some(Reverse((ready, rank, lane))) = run.queue.pop() {
        run.queued[rank][lane] = false;
        run.take(ready, rank, lane);
    }
    let stuck = |rank: usize| {
        let program = &programs[rank];
        let next = |lane: usize| program.lanes[lane].1.get(run.cursor[rank][lane]).copied();
        (0..program.lanes.len()).find_map(next).map(|id| site(program, id))
    };
    if let Some(site) = (0..programs.len()).find_map(stuck) {
        let left = run.times.iter().flatten().filter(|t| t.is_none()).count();
        return Err(Deadlock { site, left });
    }
    let times: Vec<Vec<Times>> =
        run.times.into_iter().map(|t| t.into_iter().flatten().collect()).collect();
    let total = times.iter().flatten().map(|t| t.1).max().unwrap_or(0);
    Ok(Predicted { times, total })
}

/// A run in virtual time. Programs, and so devices, are numbered by their place in the list.
struct Run<'a> {
    programs: &'a [Program],
    costs: &'a dyn Costs,
    times: Vec<Vec<Option<Times>>>,
    cursor: Vec<Vec<usize>>,
    /// Lanes whose next operation may start, by when: (time, device, lane).
    queue: BinaryHeap<Reverse<(u64, usize, usize)>>,
    queued: Vec<Vec<bool>>,
    /// For each lane of each device, the lanes whose next operation waits for it, and for how many of
    /// its operations.
    blocked: Vec<Vec<Vec<(usize, usize)>>>,
    links: Vec<Link>,
    /// The link of each lane that sends or receives.
    link_of: Vec<Vec<Option<usize>>>,
    /// When the cable of each device is free, (out, in).
    free: Vec<(u64, u64)>,
    /// Nanoseconds that links take from the kernels of each device, not yet paid.
    debt: Vec<f64>,
    /// When the disk of each device is free.
    disk: Vec<u64>,
}

impl<'a> Run<'a> {
    fn new(programs: &'a [Program], costs: &'a dyn Costs) -> Self {
        let mut links: Vec<Link> = Vec::new();
        let mut known: HashMap<(Rank, Rank), usize> = HashMap::new();
        let mut link_of = Vec::with_capacity(programs.len());
        for (at, program) in programs.iter().enumerate() {
            let link = |(lane, (kind, _)): (usize, &(Lane, Vec<OpId>))| {
                let pair = match *kind {
                    Lane::Send(to) => (program.rank, to),
                    Lane::Receive(from) => (from, program.rank),
                    _ => return None,
                };
                let index = *known.entry(pair).or_insert_with(|| {
                    links.push(Link::new(pair, costs));
                    links.len() - 1
                });
                let end = Some((at, lane));
                match kind {
                    Lane::Send(_) => links[index].sender = end,
                    _ => links[index].receiver = end,
                }
                Some(index)
            };
            link_of.push(program.lanes.iter().enumerate().map(link).collect());
        }
        Self {
            programs,
            costs,
            times: programs.iter().map(|p| vec![None; p.operations.len()]).collect(),
            cursor: programs.iter().map(|p| vec![0; p.lanes.len()]).collect(),
            queue: BinaryHeap::new(),
            queued: programs.iter().map(|p| vec![false; p.lanes.len()]).collect(),
            blocked: programs.iter().map(|p| vec![Vec::new(); p.lanes.len()]).collect(),
            links,
            link_of,
            free: vec![(0, 0); programs.len()],
            debt: vec![0.0; programs.len()],
            disk: vec![0; programs.len()],
        }
    }

    /// Queues the next operation of a lane if it can start; otherwise the first lane that it waits
    /// for will wake it.
    fn consider(&mut self, rank: usize, lane: usize) {
        if self.queued[rank][lane] {
            return;
        }
        let (program, at) = (&self.programs[rank], self.cursor[rank][lane]);
        let Some(&id) = program.lanes[lane].1.get(at) else { return };
        let done = &self.cursor[rank];
        let waits = program.operation(id).waits.iter();
        let mut waits = waits.map(|wait| (usize::from(wait.lane.0), wait.count as usize));
        if let Some((other, count)) = waits.find(|&(other, count)| done[other] < count) {
            self.blocked[rank][other].push((count, lane));
            return;
        }
        let ready = ready(program, &self.times[rank], lane, at, id);
        self.queued[rank][lane] = true;
        self.queue.push(Reverse((ready, rank, lane)));
    }

    /// Considers the lanes that waited for what a lane has done.
    fn wake(&mut self, rank: usize, lane: usize) {
        let done = self.cursor[rank][lane];
        let mut blocked = std::mem::take(&mut self.blocked[rank][lane]);
        blocked.retain(|&(count, waiting)| {
            let waits = count > done;
            if !waits {
                self.consider(rank, waiting);
            }
            waits
        });
        // Lanes that wait for more of the same lane have come meanwhile.
        self.blocked[rank][lane].append(&mut blocked);
    }

    fn take(&mut self, ready: u64, rank: usize, lane: usize) {
        let program = &self.programs[rank];
        let id = program.lanes[lane].1[self.cursor[rank][lane]];
        let op = program.operation(id);
        let link = self.link_of[rank][lane];
        let done = match (program.lanes[lane].0, link) {
            (Lane::Send(_), Some(link)) => self.send(ready, rank, op, link),
            (Lane::Receive(_), Some(link)) => {
                self.links[link].receive(ready).map(|(done, bytes)| {
                    self.debt[rank] += bytes as f64 * self.links[link].cost.receive;
                    done
                })
            }
            (Lane::Load(_), _) => Some((ready, self.load(ready, rank, op))),
            _ => {
                // While kernels wait, bytes cost them nothing.
                let before = self.cursor[rank][lane].checked_sub(1);
                let before = before.map(|at| program.lanes[lane].1[at].0 as usize);
                let free = before.and_then(|id| self.times[rank][id]).map_or(0, |times| times.1);
                let debt = std::mem::take(&mut self.debt[rank]) as u64;
                let delay = debt.saturating_sub(ready - free);
                Some((ready, ready + delay + self.costs.compute(program, op)))
            }
        };
        // Without room on the link, or a frame: the other end calls again.
        let Some(done) = done else { return };
        self.times[rank][id.0 as usize] = Some(done);
        self.cursor[rank][lane] += 1;
        self.wake(rank, lane);
        self.consider(rank, lane);
        if let Some(link) = link {
            let link = &self.links[link];
            let other =
                if matches!(op.kind, OpKind::Send { .. }) { link.receiver } else { link.sender };
            if let Some((rank, lane)) = other {
                self.consider(rank, lane);
            }
        }
    }

    /// When the piece of a load that begins now is there. Loaders share the disk.
    fn load(&mut self, begin: u64, rank: usize, op: &Operation) -> u64 {
        let program = &self.programs[rank];
        let Some(disk) = self.costs.disk(program.rank) else {
            return begin + self.costs.compute(program, op);
        };
        let bytes: u64 = op.writes.iter().map(|region| program.region_bytes(region)).sum();
        let takes = |rate: f64| (bytes as f64 / rate * 1e9) as u64;
        let free = &mut self.disk[rank];
        *free = begin.max(*free) + takes(disk.all);
        (*free).max(begin + takes(disk.each))
    }

    fn send(&mut self, ready: u64, rank: usize, op: &Operation, link: usize) -> Option<Times> {
        let bytes = op.reads.iter().map(|r| self.programs[rank].region_bytes(r)).sum();
        let receiver = self.links[link].receiver.map(|(at, _)| at);
        let link = &mut self.links[link];
        let begin = link.open(ready)?;
        let on_wire = bytes as f64 * FRAME_OVERHEAD;
        let takes = |rate: f64| (on_wire / rate * 1e9) as u64;
        let begin = match link.cables.0 {
            Some(own) => {
                let begin = begin.max(self.free[rank].0);
                self.free[rank].0 = begin + takes(own.out);
                begin
            }
            None => begin,
        };
        let end = link.send(begin, on_wire);
        let mut arrival = end;
        if let (Some(other), Some(to)) = (link.cables.1, receiver) {
            let free = &mut self.free[to].1;
            arrival = arrival.max(*free + takes(other.into));
            *free = arrival;
        }
        link.arrived.push((arrival + link.rate.latency, bytes));
        link.flying += bytes;
        self.debt[rank] += bytes as f64 * link.cost.send;
        Some((begin, end))
    }
}

/// When an operation may start whose waits are over: once the last of them has ended, and the one
/// before it on its lane.
fn ready(program: &Program, times: &[Option<Times>], lane: usize, at: usize, id: OpId) -> u64 {
    let end = |lane: usize, count: usize| {
        let last = count.checked_sub(1)?;
        Some(times[program.lanes[lane].1[last].0 as usize]?.1)
    };
    let waits = program.operation(id).waits.iter();
    let waits = waits.filter_map(|wait| end(usize::from(wait.lane.0), wait.count as usize));
    waits.chain(end(lane, at)).max().unwrap_or(0)
}

/// Frames of one link: when each arrived, and when each was received.
struct Link {
    rate: LinkRate,
    cost: ByteCost,
    /// The interfaces of sender and receiver.
    cables: (Option<Cable>, Option<Cable>),
    /// Device and lane of the sender; `receiver`: those of the receiver.
    sender: Option<(usize, usize)>,
    receiver: Option<(usize, usize)>,
    arrived: Vec<(u64, u64)>,
    received: Vec<u64>,
    /// How many frames must have been received before the next may begin.
    must: usize,
    /// Bytes of the frames after those, which may still be on their way.
    flying: u64,
    /// When the link's bucket was last empty.
    empty: u64,
}

impl Link {
    fn new((from, to): (Rank, Rank), costs: &dyn Costs) -> Self {
        Self {
            rate: costs.link(from, to),
            cost: costs.byte_cost(from, to),
            cables: (costs.cable(from), costs.cable(to)),
            sender: None,
            receiver: None,
            arrived: Vec::new(),
            received: Vec::new(),
            flying: 0,
            must: 0,
            empty: 0,
        }
    }

    /// When the next frame may begin: the latest frames that fit the window may be unreceived, the
    /// rest may not. None while one of those is.
    fn open(&mut self, ready: u64) -> Option<u64> {
        while self.flying > self.rate.window {
            self.flying -= self.arrived[self.must].1;
            self.must += 1;
        }
        match self.must.checked_sub(1) {
            Some(last) => Some(ready.max(*self.received.get(last)?)),
            None => Some(ready),
        }
    }

    /// The end of a frame that begins now.
    fn send(&mut self, begin: u64, bytes_on_wire: f64) -> u64 {
        let rate = self.rate;
        // What the bucket has gathered since it was last empty passes at once.
        let pause = begin.saturating_sub(self.empty) as f64 * 1e-9;
        let tokens = (pause * rate.rate).min(rate.burst as f64);
        let tokens = if self.arrived.is_empty() { rate.burst as f64 } else { tokens };
        let late = (bytes_on_wire - tokens) / rate.rate * 1e9;
        let end = begin + late.max(0.0) as u64;
        // The time at which a bucket that fills without end would have been empty.
        let left = (tokens - bytes_on_wire).max(0.0) / rate.rate * 1e9;
        self.empty = end.saturating_sub(left as u64);
        end
    }

    /// Begin and end of the next receive, and its bytes; none while nothing is on its way.
    fn receive(&mut self, ready: u64) -> Option<(Times, u64)> {
        let (arrival, bytes) = *self.arrived.get(self.received.len())?;
        let end = ready.max(arrival);
        self.received.push(end);
        Some(((ready, end), bytes))
    }
}

/// From when on the time of an operation counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// From when it could have begun (the one before it on its lane, and all that it waits for, were
    /// over): the time to wake a lane and to count an operation as done is in it. With such costs the
    /// simulator predicts this device.
    FromReady,
    /// From its begin: the work alone. With such costs the simulator tells what a device would reach
    /// that loses nothing between its operations.
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
    /// Costs without anything seen yet. Each device, by rank, has one cable to a switch; what it
    /// sends is as late as its cable says, and as fast as the slower of the two cables on its way.
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
        OpKind::Product { kernel, .. } => kernel.hash(&mut hasher),
        OpKind::AddNorm { partial, staged, .. } => (partial, staged).hash(&mut hasher),
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
