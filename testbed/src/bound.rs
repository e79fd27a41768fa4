//! How fast a strategy could be, from measured compute, the integer split and the shaped rates.
//!
//! Three numbers stand beside each measured latency. The *bound* assumes nothing about order: a
//! strategy whose sends overlap its compute (`galaxy`, `sequence`, `pipeline`) takes at least as
//! long as its slowest device computes, and as its busiest cable is busy; one that hides nothing
//! (`local`, `megatron`) takes at least the sum. The *strict bound* is the same with the least
//! compute that any strategy needed for the same split: small tiles, and links that take the
//! kernels' core, are no part of it. The *schedule* is what these very programs would take on
//! devices and links that lose nothing: every operation at its measured cost, every link at its
//! rate, no latency, no wake-up, no wait for a lock. What is lost against the schedule, the engine
//! lost; what the schedule loses against the bound, the order of the operations does.

use crate::{
    driver::Observation,
    record::{Bound, Cell},
};
use anyhow::{Context, Result};
use galaxy_common::Strategy;
use galaxy_coord::fleet::Timeline;
use galaxy_graph::{
    Counted, FRAME_OVERHEAD, LinkRate, Observed, simulate,
    timeline::{lane_use, traffic},
};
use std::collections::BTreeMap;

/// The names of a bound's two parts: the slowest device's compute, and the busiest cable's time, both in ms.
const COMPUTE: &str = "compute_ms";
const WIRE: &str = "wire_ms";

/// What one cell's runs say about how fast it could be.
#[derive(Clone, Debug, Default)]
pub struct CellBound {
    /// Compute of each run and of each device in it, by rank, in ms.
    compute: Vec<Vec<f64>>,
    /// The time of the busiest cable, in ms.
    wire: f64,
    /// The time that the schedule takes, in ms.
    schedule: f64,
}

/// Costs learnt from a cell's runs, for the schedule.
pub struct Learner {
    rates: Vec<f64>,
    costs: Observed,
    seen: CellBound,
}

impl Learner {
    /// A learner for devices on cables of these `rates`, in bytes per second, by rank.
    pub fn new(rates: &[f64]) -> Self {
        let cable = |&rate: &f64| LinkRate { latency: 0, rate, window: u64::MAX, burst: 0 };
        let costs = Observed::new(rates.iter().map(cable).collect());
        Self { rates: rates.to_vec(), costs, seen: CellBound::default() }
    }

    /// Learns costs from one run.
    ///
    /// # Errors
    /// When the programs do not simulate; programs that ran do.
    pub fn learn(&mut self, observation: &Observation) -> Result<()> {
        for (program, timeline) in observation.programs.iter().zip(&observation.timelines) {
            self.costs.learn(program, &timeline.operations, Counted::Work);
        }
        self.seen.compute.push(compute(observation));
        self.seen.wire = wire(observation, &self.rates);
        self.seen.schedule = simulate(&observation.programs, &self.costs)?.total as f64 * 1e-6;
        Ok(())
    }

    /// What the runs have shown so far.
    pub fn seen(&self) -> CellBound {
        self.seen.clone()
    }
}

impl CellBound {
    /// Mean compute of the slowest device over the runs, in ms. It is the mean because the pauses of a quota
    /// fall into a run by chance.
    pub fn compute(&self) -> f64 {
        let devices = self.compute.first().map_or(0, Vec::len);
        let mean = |i: usize| {
            self.compute.iter().map(|run| run[i]).sum::<f64>() / self.compute.len() as f64
        };
        (0..devices).map(mean).fold(0.0, f64::max)
    }
}

/// The time for which each device of a run computed, by rank, in ms.
fn compute(observation: &Observation) -> Vec<f64> {
    let pairs = observation.programs.iter().zip(&observation.timelines);
    let busy = |(program, timeline): (_, &Timeline)| {
        let lanes = lane_use(program, &timeline.operations);
        lanes.first().map_or(0, |lane| lane.busy) as f64 * 1e-6
    };
    pairs.map(busy).collect()
}

/// How long the busiest cable of a run is busy, in ms. `rates` are bytes per second of each device's cable,
/// by rank.
fn wire(observation: &Observation, rates: &[f64]) -> f64 {
    let of = |(program, rate): (_, &f64)| {
        let (sent, received) = traffic(program);
        sent.max(received) as f64 * FRAME_OVERHEAD / rate * 1e3
    };
    observation.programs.iter().zip(rates).map(of).fold(0.0, f64::max)
}

/// The parts of the bound of a plan of `auto`, by one run: values of its sample, in ms.
pub fn parts(observation: &Observation, rates: &[f64]) -> BTreeMap<String, f64> {
    let slowest = compute(observation).into_iter().fold(0.0, f64::max);
    BTreeMap::from([(COMPUTE.to_owned(), slowest), (WIRE.to_owned(), wire(observation, rates))])
}

/// The bound of a plan of `auto`, by the samples that count and have [`parts`]; none where there are none.
pub fn of(cell: &Cell) -> Option<Bound> {
    let compute = cell.values(COMPUTE);
    let mean = compute.iter().sum::<f64>() / compute.len() as f64;
    let wire = cell.values(WIRE).into_iter().reduce(f64::max)?;
    let parts = BTreeMap::from([(COMPUTE.to_owned(), mean), (WIRE.to_owned(), wire)]);
    Some(Bound { ms: with(Strategy::Auto, mean, wire), parts })
}

/// The bound of a strategy in ms, and its parts.
///
/// `least` is the least compute that any strategy with the same split needed, in ms.
pub fn bound(strategy: Strategy, seen: &CellBound, least: f64) -> (f64, BTreeMap<String, f64>) {
    let (compute, wire) = (seen.compute(), seen.wire);
    let parts = [
        (COMPUTE, compute),
        (WIRE, wire),
        ("strict_ms", with(strategy, compute.min(least), wire)),
        ("schedule_ms", seen.schedule),
    ];
    let bound = with(strategy, compute, wire);
    (bound, parts.into_iter().map(|(name, ms)| (name.to_owned(), ms)).collect())
}

/// The time of compute and wire together: the larger of both where they overlap, else the sum.
fn with(strategy: Strategy, compute: f64, wire: f64) -> f64 {
    match strategy {
        // The parts of a batch follow each other through a pipeline; what `auto` chose may overlap.
        Strategy::Galaxy | Strategy::Sequence | Strategy::Pipeline | Strategy::Auto => {
            compute.max(wire)
        }
        Strategy::Local | Strategy::Megatron => compute + wire,
    }
}

/// The parts of one run's latency on its slowest device, in ms.
///
/// # Errors
/// When there are no devices.
pub fn spent(observation: &Observation) -> Result<BTreeMap<String, f64>> {
    let ms = |ns: u64| ns as f64 * 1e-6;
    let (index, slowest) = observation
        .run
        .devices
        .iter()
        .enumerate()
        .max_by_key(|(_, device)| device.cost.total_ns)
        .context("a run has devices")?;
    let program = &observation.programs[index];
    let lanes = lane_use(program, &observation.timelines[index].operations);
    let compute = lanes.first().context("a program has a compute lane")?;
    let awaiting = compute.awaiting_receive;
    let total = ms(slowest.cost.total_ns);
    let took = observation.run.took.as_secs_f64() * 1e3;
    let parts = [
        ("busy_ms", ms(compute.busy)),
        ("awaiting_ms", ms(awaiting)),
        // Between operations, awaiting nothing: wake-ups, locks, the engine's own steps.
        ("between_ms", ms(compute.idle.saturating_sub(awaiting))),
        ("dispatch_ms", took - ms(compute.busy) - ms(compute.idle)),
        ("device_ms", total),
    ];
    Ok(parts.into_iter().map(|(name, ms)| (name.to_owned(), ms)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Outcome, Verdict};

    #[test]
    fn the_bound_adds_transfers_only_where_they_do_not_overlap() {
        let seen = CellBound {
            compute: vec![vec![90.0, 100.0], vec![90.0, 120.0]],
            wire: 50.0,
            schedule: 0.0,
        };
        let ms = |strategy, least| {
            let (bound, parts) = bound(strategy, &seen, least);
            (bound, parts["strict_ms"])
        };
        // The slowest device's mean is 110.
        assert_eq!(ms(Strategy::Galaxy, 80.0), (110.0, 80.0));
        assert_eq!(ms(Strategy::Galaxy, 40.0), (110.0, 50.0));
        assert_eq!(ms(Strategy::Pipeline, 110.0), (110.0, 110.0));
        assert_eq!(ms(Strategy::Megatron, 110.0), (160.0, 160.0));
    }

    #[test]
    fn the_bound_of_a_cell_uses_valid_samples_with_parts_only() {
        let mut cell = Cell {
            key: String::new(),
            labels: BTreeMap::new(),
            samples: Vec::new(),
            outcome: Outcome::Measured,
            bound: None,
            paper: None,
            facts: BTreeMap::new(),
        };
        let values = |compute: f64, wire: f64| {
            BTreeMap::from([(COMPUTE.to_owned(), compute), (WIRE.to_owned(), wire)])
        };
        assert_eq!(of(&cell), None);
        // A sample from before samples had parts.
        cell.add(BTreeMap::from([("latency_ms".to_owned(), 400.0)]), Verdict::Valid);
        assert_eq!(of(&cell), None);
        cell.add(values(900.0, 50.0), Verdict::Invalid { reasons: vec!["busy".to_owned()] });
        cell.add(values(90.0, 50.0), Verdict::Valid);
        cell.add(values(110.0, 50.0), Verdict::Valid);
        let ms = |cell: &Cell| of(cell).map(|bound| (bound.ms, bound.parts));
        assert_eq!(ms(&cell), Some((100.0, values(100.0, 50.0))));
        cell.add(values(100.0, 150.0), Verdict::Valid);
        assert_eq!(ms(&cell).map(|(ms, _)| ms), Some(150.0));
    }
}
