//! Probe: measures the link from this device to a peer, over the door and the code that carry
//! tiles.
//!
//! The side that asks leads: it sends *orders*, frames of 16 bytes, and the peer answers each with a frame of 16
//! bytes when it has done what was ordered. So the peer needs no clock of the leader, reads only frames whose size it
//! knows, and is done when the link closes.
//!
//! | order | numbers | what the peer does | its answer |
//! | --- | --- | --- | --- |
//! | 0 | 0, 0 | closes the link | none |
//! | 1 | 0, 0 | nothing: a round trip | 0, 0 |
//! | 2 | frames, bytes of each | receives them | nanoseconds, and products of its kernels meanwhile |
//! | 3 | milliseconds, 0 | rests as long as we do | the same |
//! | 4 | 0, 0 | has its kernels work from now on | 0, 0 |
//!
//! One dial measures all of it: round trips, then the rate while kernels rest, then the rate and
//! what a byte costs while they work. A whole probe takes less than two seconds, because a cluster
//! has many pairs. Two things would falsify short bulks. A connection begins slowly: a pilot opens
//! it, every bulk is as long as the latest rate says, and bulks go on until three in a row agree.
//! And a bucket lets through at once what it saved up while the link rested: bulks without load
//! follow one another without a rest, and the pilot empties it.

use crate::{
    core::Core,
    error::WorkerError,
    profile::Measuring,
    ring::{Duplex, PeerAddress, ProbeArrival, Stream, handshake::ProbeHandshake},
    tasks::blocking,
};
use galaxy_common::{DeviceName, Epoch, FrameHeader, LinkType, SequenceNumber, Spread, WireType};
use galaxy_engine::{
    link::{LinkCloser, LinkError},
    measure::load::{Load, Span},
};
use galaxy_proto::v1;
use std::{
    ops::RangeInclusive,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// The most round trips that are measured.
const TRIPS: usize = 24;
/// The time after which no more round trips are measured, once there are [`LEAST_TRIPS`].
const TRIPS_TIME: Duration = Duration::from_millis(100);
const LEAST_TRIPS: usize = 5;
/// How many bulks are enough: without load, so many in a row that agree; under load, so many steady ones.
const BULKS: usize = 3;
/// The most bulks of a measurement.
const MOST_BULKS: usize = 8;
/// Rates agree if their range is at most this part of their median.
const AGREE: f64 = 0.05;
/// A bulk is steady if the kernels of both sides were as fast in the rest before it as in the rest after it: the
/// range of the first speed over the second.
const STEADY: RangeInclusive<f64> = 0.91..=1.1;
/// How long a bulk without load takes if the caller asks for no other time, in ms: far longer than what a queue or a
/// token bucket lets through at once.
const BULK_TIME: u32 = 100;
/// How long a bulk under load takes if the caller asks for no other time, in ms: so long that a slow device's kernels
/// end some products meanwhile.
const BUSY_BULK_TIME: u32 = 200;
const LONGEST_BULK: u32 = 1000;
/// The time from the first order after which no more bulk begins without load, and none under load, unless the caller
/// asks how long bulks take.
const UNTIL: Duration = Duration::from_millis(650);
const BUSY_UNTIL: Duration = Duration::from_millis(1450);
/// The seconds that a bulk of the pilot must take before its rate counts.
const PILOT_TIME: f64 = 0.03;
/// Bytes of a bulk, at least and at most.
const BULK_BYTES: (u64, u64) = (16 << 10, 256 << 20);
/// Bytes of a frame, at least and at most: such as tiles have.
const FRAME_BYTES: (u64, u64) = (16 << 10, 256 << 10);
/// How long kernels are watched without a link, before and after each bulk.
const REST: Duration = Duration::from_millis(80);
/// The silence after which a probe is given up, on both sides.
const SILENCE: Duration = Duration::from_secs(4);
/// The longest time of a whole probe.
const LIMIT: Duration = Duration::from_secs(12);
/// The most frames of one order: at the smallest frame the largest bulk. Their numbers are those of tiles.
const MAX_FRAMES: u64 = 16 << 10;

const ORDER_BYTES: usize = 16;
const END: u32 = 0;
const TRIP: u32 = 1;
const BULK: u32 = 2;
const RESTING: u32 = 3;
const WORK: u32 = 4;
/// The transfer numbers of orders, of what is ordered, and of answers.
const ORDERS: u32 = 0;
const PAYLOADS: u32 = 1;
const ANSWERS: u32 = 2;

/// Closes the link when nobody waits for the probe any more.
struct Closing(Arc<dyn LinkCloser>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Measures the link to a peer.
///
/// # Cancel safety
/// Dropped, it closes the link, and both sides end.
pub(crate) async fn probe(
    core: &Arc<Core>,
    request: v1::ProbeRequest,
) -> Result<v1::ProbeReply, WorkerError> {
    let v1::ProbeRequest { peer, link, compute, bulk_ms } = request;
    let asked = (bulk_ms > 0).then(|| bulk_ms.min(LONGEST_BULK));
    let link: LinkType = link.parse().map_err(|why| WorkerError::Setting { why })?;
    let v1::Peer { name, address, plain_port } = peer.ok_or(WorkerError::NoPeer)?;
    let peer = DeviceName::new(name).map_err(|_| WorkerError::NoPeer)?;
    let measuring = Measuring::begin(core)?;
    let at = PeerAddress { address, plain_port: u16::try_from(plain_port).unwrap_or(0) };
    let handshake = ProbeHandshake { name: core.name.clone() };
    let stream = core.ring.dial_probe(&core.identity, &handshake, peer.clone(), at, link).await?;
    let failed = |why: String| WorkerError::Probe { peer: peer.clone(), why };
    let closer = stream.closer().map_err(|error| failed(error.to_string()))?;
    let _closing = Closing(closer);
    let threads = core.grant.threads;
    let leading = blocking(move || {
        // Moved here, so that it lasts as long as the thread, even if the caller gave up waiting.
        let _measuring = measuring;
        Leader::new(stream, asked).measure(compute.then_some(threads))
    });
    match tokio::time::timeout(LIMIT, leading).await {
        Ok(measured) => measured?.map_err(|error| failed(said(&error))),
        Err(_) => Err(failed(format!("it took more than {LIMIT:?}"))),
    }
}

/// The error of a link as people understand it: a read that took too long is silence.
fn said(error: &LinkError) -> String {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    match error {
        LinkError::Io(error) if matches!(error.kind(), TimedOut | WouldBlock) => {
            format!("nothing came for {SILENCE:?}")
        }
        error => error.to_string(),
    }
}

/// Answers devices that measure the link to this one, one at a time, until the worker ends.
pub(crate) async fn answer_all(core: Weak<Core>, mut arrivals: mpsc::Receiver<ProbeArrival>) {
    while let Some(arrival) = arrivals.recv().await {
        let Some(core) = core.upgrade() else { return };
        match Measuring::begin(&core) {
            Ok(measuring) => core.tasks.spawn(answer(arrival, measuring, core.grant.threads)),
            Err(_) => core.tasks.spawn(arrival.send_away()),
        }
    }
}

async fn answer(arrival: ProbeArrival, measuring: Measuring, threads: u16) {
    let Ok(stream) = arrival.welcome().await else { return };
    let Ok(closer) = stream.closer() else { return };
    let _closing = Closing(closer);
    let following = blocking(move || {
        let mut link = stream.duplex(Some(SILENCE));
        let over = follow(&mut link, threads);
        // Before the link closes: the other side may ask again as soon as it sees that.
        drop(measuring);
        over
    });
    // The link closes at its end, whatever error says so.
    let over = tokio::time::timeout(LIMIT, following).await;
    tracing::debug!(?over, "a link was measured");
}

fn header(transfer: u32, sequence: u64, tile: u16, payload: usize) -> FrameHeader {
    FrameHeader {
        epoch: Epoch(0),
        sequence: SequenceNumber(sequence),
        transfer,
        tile,
        wire: WireType::F32,
        // At most FRAME_BYTES.1.
        payload: payload as u32,
    }
}

/// Does what is ordered until the link closes or an order is not valid.
fn follow(link: &mut Duplex, threads: u16) -> Result<(), LinkError> {
    let mut load: Option<Load> = None;
    let mut payload = vec![0; FRAME_BYTES.1 as usize];
    for sequence in 0.. {
        let mut order = [0; ORDER_BYTES];
        link.receive(&header(ORDERS, sequence, 0, ORDER_BYTES), &mut order)?;
        let [kind, a, b] = numbers(&order);
        let (begin, moment) = (Instant::now(), load.as_ref().map(Load::now));
        match (kind as u32, a, b) {
            (TRIP, ..) => {}
            (BULK, frames, bytes) if frames <= MAX_FRAMES && bytes <= FRAME_BYTES.1 => {
                for frame in 0..frames {
                    let payload = &mut payload[..bytes as usize];
                    let wanted = header(PAYLOADS, sequence, frame as u16, payload.len());
                    link.receive(&wanted, payload)?;
                }
            }
            (RESTING, millis, _) => {
                std::thread::sleep(Duration::from_millis(millis).min(REST));
            }
            (WORK, ..) if load.is_none() => load = Some(Load::start(threads)?),
            // The end, or an order that is not valid.
            _ => return Ok(()),
        }
        let idle = Span { nanos: begin.elapsed().as_nanos() as f64, products: 0.0 };
        let span = load.as_ref().zip(moment).map_or(idle, |(load, moment)| load.since(moment));
        let mut answer = [0; ORDER_BYTES];
        answer[..8].copy_from_slice(&span.nanos.to_le_bytes());
        answer[8..].copy_from_slice(&span.products.to_le_bytes());
        link.send(&header(ANSWERS, sequence, 0, ORDER_BYTES), &answer)?;
    }
    Ok(())
}

/// An order: its kind and two numbers, of 4 bytes each, little endian; the rest is zero.
fn numbers(order: &[u8; ORDER_BYTES]) -> [u64; 3] {
    let word = |from: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&order[from..from + 4]);
        u64::from(u32::from_le_bytes(bytes))
    };
    [word(0), word(4), word(8)]
}

/// The result of a bulk.
struct Bulk {
    bytes: f64,
    nanos: f64,
    /// What kernels did meanwhile, on this side and on the other.
    kernels: [Span; 2],
}

impl Bulk {
    /// Bytes per second, where a round trip takes `trip` nanoseconds.
    ///
    /// Its time is the longer one of two. From the order to the answer a round trip passes besides; it
    /// was longer then if others filled a queue on the way. From the order's arrival to the last frame's
    /// less passes if the peer stood still when the order came.
    fn rate(&self, trip: f64) -> f64 {
        let (here, there) = (self.nanos - trip, self.kernels[1].nanos);
        self.bytes / here.max(there).max(self.nanos / 10.0) * 1e9
    }

    /// Nanoseconds by which a byte delayed kernels that did so much in the rests around the bulk.
    fn cost(&self, at: usize, before: Span, after: Span) -> f64 {
        let each = (before.nanos + after.nanos) / (before.products + after.products);
        let work = self.kernels[at];
        (work.nanos - work.products * each) / self.bytes
    }
}

/// Whether rates are so near each other that their median is known well enough.
fn agree(rates: &[f64]) -> bool {
    let rates = Spread::of(rates);
    rates.high - rates.low <= AGREE * rates.median
}

struct Leader {
    link: Duplex,
    load: Option<Load>,
    sequence: u64,
    frame: Vec<u8>,
    /// Bytes of tiles that were sent.
    sent: u64,
    /// How long a bulk is to take, in ms, if the caller asks for a time.
    asked: Option<u32>,
    /// The shortest round trip, in nanoseconds: each bulk takes one more than its bytes.
    trip: f64,
}

impl Leader {
    fn new(stream: Stream, asked: Option<u32>) -> Self {
        // Not zeros: nothing on the way should be able to compress them.
        let frame = (0..FRAME_BYTES.1).map(|at| (at * 31 % 251) as u8).collect();
        let link = stream.duplex(Some(SILENCE));
        Self { link, load: None, sequence: 0, frame, sent: 0, asked, trip: 0.0 }
    }

    /// Measures all; under load, too, if a number of kernel threads is given.
    fn measure(mut self, threads: Option<u16>) -> Result<v1::ProbeReply, LinkError> {
        let begun = Instant::now();
        let mut reply = v1::ProbeReply { round_trip_ns: self.trips()?, ..Default::default() };
        self.trip = reply.round_trip_ns.iter().copied().fold(f64::INFINITY, f64::min);
        let found = self.pilot()?;
        reply.rate = self.rates(found, begun)?;
        if let Some(threads) = threads {
            let found = reply.rate.last().copied().unwrap_or(found);
            self.under_load(threads, found, begun, &mut reply)?;
        }
        reply.bytes = self.sent;
        // The link closes in answer: then the peer is free again.
        drop(self.order(END, 0, 0));
        Ok(reply)
    }

    /// Nanoseconds of round trips of the smallest frame.
    fn trips(&mut self) -> Result<Vec<f64>, LinkError> {
        // The first one warms up.
        self.order(TRIP, 0, 0)?;
        let (begun, mut trips) = (Instant::now(), Vec::new());
        while trips.len() < TRIPS && (trips.len() < LEAST_TRIPS || begun.elapsed() < TRIPS_TIME) {
            trips.push(self.order(TRIP, 0, 0)?.0);
        }
        Ok(trips)
    }

    /// Measures a first rate, of bulks that grow until one takes long enough. That also warms up the connection.
    fn pilot(&mut self) -> Result<f64, LinkError> {
        let mut bytes = BULK_BYTES.0;
        loop {
            let bulk = self.bulk(bytes)?;
            if bulk.nanos >= PILOT_TIME * 1e9 || bytes >= BULK_BYTES.1 {
                return Ok(bulk.rate(self.trip));
            }
            bytes *= 4;
        }
    }

    /// The bytes that take as long as a bulk should at this rate.
    fn bytes(&self, rate: f64, millis: u32) -> u64 {
        let seconds = f64::from(self.asked.unwrap_or(millis)) / 1e3;
        ((rate * seconds) as u64).clamp(BULK_BYTES.0, BULK_BYTES.1)
    }

    /// Whether there is time for another bulk after `tried` of them.
    fn may_go_on(&self, tried: usize, begun: Instant, until: Duration) -> bool {
        match self.asked {
            None => begun.elapsed() < until,
            Some(_) => tried < BULKS,
        }
    }

    /// Measures rates while kernels rest: the first three in a row that agree, or all there was time for.
    fn rates(&mut self, mut found: f64, begun: Instant) -> Result<Vec<f64>, LinkError> {
        let mut rates = Vec::new();
        while rates.len() < MOST_BULKS {
            found = self.bulk(self.bytes(found, BULK_TIME))?.rate(self.trip);
            rates.push(found);
            let latest = &rates[rates.len().saturating_sub(BULKS)..];
            if latest.len() == BULKS && agree(latest) {
                return Ok(latest.to_vec());
            }
            if !self.may_go_on(rates.len(), begun, UNTIL) {
                break;
            }
        }
        Ok(rates)
    }

    /// Measures rates, and the costs of a byte on both sides, while the kernels of both sides work.
    fn under_load(
        &mut self,
        threads: u16,
        mut found: f64,
        begun: Instant,
        reply: &mut v1::ProbeReply,
    ) -> Result<(), LinkError> {
        self.load = Some(Load::start(threads)?);
        self.order(WORK, 0, 0)?;
        // The costs from steady bulks, and from the others.
        let (mut steady, mut shaky) = (Vec::new(), Vec::new());
        let mut before = self.rest()?;
        for tried in 1..=MOST_BULKS {
            let bulk = self.bulk(self.bytes(found, BUSY_BULK_TIME))?;
            // Kernels may take so much of a link that the next bulk must be smaller.
            found = bulk.rate(self.trip);
            reply.busy_rate.push(found);
            let after = self.rest()?;
            let costs = [0, 1].map(|at| bulk.cost(at, before[at], after[at]));
            // Kernels so slow that no product ended meanwhile say nothing.
            if costs.iter().all(|cost| cost.is_finite()) {
                let even = [0, 1].map(|at| before[at].speed() / after[at].speed());
                let is_steady = even.iter().all(|e| STEADY.contains(e));
                if is_steady { &mut steady } else { &mut shaky }.push(costs);
            }
            before = after;
            let enough = tried >= BULKS && steady.len() >= BULKS;
            if enough || !self.may_go_on(tried, begun, BUSY_UNTIL) {
                break;
            }
        }
        let costs = if steady.is_empty() { shaky } else { steady };
        reply.send_cost_ns = costs.iter().map(|cost| cost[0]).collect();
        reply.receive_cost_ns = costs.iter().map(|cost| cost[1]).collect();
        Ok(())
    }

    /// Sends so many bytes, in frames.
    fn bulk(&mut self, bytes: u64) -> Result<Bulk, LinkError> {
        let frame = (bytes / 4).clamp(FRAME_BYTES.0, FRAME_BYTES.1);
        let frames = bytes.div_ceil(frame);
        self.sent += frames * frame;
        let moment = self.load.as_ref().map(Load::now);
        let (nanos, there) = self.order(BULK, frames, frame)?;
        let here = self.load.as_ref().zip(moment).map(|(load, moment)| load.since(moment));
        let here = here.unwrap_or(Span { nanos, products: 0.0 });
        Ok(Bulk { bytes: (frames * frame) as f64, nanos, kernels: [here, there] })
    }

    /// What kernels do on both sides while the link rests.
    fn rest(&mut self) -> Result<[Span; 2], LinkError> {
        let moment = self.load.as_ref().map(Load::now);
        let millis = u64::try_from(REST.as_millis()).unwrap_or(0);
        let (nanos, there) = self.order(RESTING, millis, 0)?;
        let here = self.load.as_ref().zip(moment).map(|(load, moment)| load.since(moment));
        Ok([here.unwrap_or(Span { nanos, products: 0.0 }), there])
    }

    /// Gives an order and waits for its answer: nanoseconds until it came, and what it says.
    fn order(&mut self, kind: u32, a: u64, b: u64) -> Result<(f64, Span), LinkError> {
        let sequence = self.sequence;
        self.sequence += 1;
        let mut order = [0; ORDER_BYTES];
        for (place, number) in order.chunks_exact_mut(4).zip([u64::from(kind), a, b]) {
            place.copy_from_slice(&u32::try_from(number).unwrap_or(0).to_le_bytes());
        }
        let begin = Instant::now();
        self.link.send(&header(ORDERS, sequence, 0, ORDER_BYTES), &order)?;
        if kind == BULK {
            for frame in 0..a {
                let payload = &self.frame[..b as usize];
                let header = header(PAYLOADS, sequence, frame as u16, payload.len());
                self.link.send(&header, payload)?;
            }
        }
        let mut answer = [0; ORDER_BYTES];
        self.link.receive(&header(ANSWERS, sequence, 0, ORDER_BYTES), &mut answer)?;
        let nanos = begin.elapsed().as_nanos() as f64;
        let number = |from: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&answer[from..from + 8]);
            f64::from_le_bytes(bytes)
        };
        Ok((nanos, Span { nanos: number(0), products: number(8) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probed_rate_is_the_slower_one_of_both_ends() {
        let bulk = |nanos: f64, there: f64| {
            let span = |nanos| Span { nanos, products: 0.0 };
            Bulk { bytes: 1e6, nanos, kernels: [span(nanos), span(there)] }
        };
        assert_eq!(bulk(0.11e9, 0.1e9).rate(0.01e9), 1e7);
        assert_eq!(bulk(0.11e9, 0.1e9).rate(0.09e9), 1e7, "a queue made round trips long");
        assert_eq!(bulk(0.11e9, 0.02e9).rate(0.01e9), 1e7, "the peer stood still at first");
        assert_eq!(bulk(0.1e9, f64::NAN).rate(1e9), 1e8, "a peer says nothing of use");
    }

    #[test]
    fn rates_agree_within_a_twentieth() {
        assert!(agree(&[100.0, 97.0, 101.0]));
        assert!(!agree(&[100.0, 94.0, 101.0]));
    }
}
