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

use crate::stage::Observation;
use anyhow::{Context, Result};
use galaxy_common::Strategy;
use galaxy_graph::{
    Counted, FRAME_OVERHEAD, LinkRate, Observed, simulate,
    timeline::{lane_use, traffic},
};
use std::collections::BTreeMap;

/// What one cell's runs say about how fast it could be.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Compute of each run and each device, ms.
    compute: Vec<Vec<f64>>,
    /// The busiest cable, ms.
    wire: f64,
    /// The schedule, ms.
    schedule: f64,
}

/// Costs learnt from a cell's runs, for the schedule.
pub struct Learner {
    cables: Vec<LinkRate>,
    costs: Observed,
    seen: Seen,
}

impl Learner {
    /// For devices on these cables, by rank: bytes per second of each.
    pub fn new(rates: &[f64]) -> Self {
        let cable = |&rate: &f64| LinkRate { latency: 0, rate, window: u64::MAX, burst: 0 };
        let cables: Vec<LinkRate> = rates.iter().map(cable).collect();
        Self { costs: Observed::new(cables.clone()), cables, seen: Seen::default() }
    }

    /// Learns from one run.
    ///
    /// # Errors
    /// When the programs do not simulate; programs that ran do.
    pub fn learn(&mut self, observation: &Observation) -> Result<()> {
        let pairs = || observation.programs.iter().zip(&observation.timelines);
        for (program, timeline) in pairs() {
            self.costs.learn(program, &timeline.operations, Counted::Work);
        }
        let busy = pairs().map(|(p, t)| {
            lane_use(p, &t.operations).first().map_or(0, |lane| lane.busy) as f64 * 1e-6
        });
        self.seen.compute.push(busy.collect());
        let wire = |(program, cable): (_, &LinkRate)| {
            let (sent, received) = traffic(program);
            sent.max(received) as f64 * FRAME_OVERHEAD / cable.rate * 1e3
        };
        let programs = &observation.programs;
        self.seen.wire = programs.iter().zip(&self.cables).map(wire).fold(0.0, f64::max);
        self.seen.schedule = simulate(programs, &self.costs)?.total as f64 * 1e-6;
        Ok(())
    }

    /// What was seen.
    pub fn seen(&self) -> Seen {
        self.seen.clone()
    }
}

impl Seen {
    /// Mean compute of the slowest device over the runs, ms. The mean, because a quota's pauses
    /// fall into a run where they fall.
    pub fn compute(&self) -> f64 {
        let devices = self.compute.first().map_or(0, Vec::len);
        let mean = |i: usize| {
            self.compute.iter().map(|run| run[i]).sum::<f64>() / self.compute.len() as f64
        };
        (0..devices).map(mean).fold(0.0, f64::max)
    }
}

/// The bound of a strategy, and what it is made of, in ms.
///
/// `least` is the least compute that any strategy with the same split needed.
pub fn bound(strategy: Strategy, seen: &Seen, least: f64) -> (f64, BTreeMap<String, f64>) {
    let (compute, wire) = (seen.compute(), seen.wire);
    let parts = [
        ("compute_ms", compute),
        ("wire_ms", wire),
        ("strict_ms", with(strategy, compute.min(least), wire)),
        ("schedule_ms", seen.schedule),
    ];
    let bound = with(strategy, compute, wire);
    (bound, parts.into_iter().map(|(name, ms)| (name.to_owned(), ms)).collect())
}

/// What compute and wire make together.
fn with(strategy: Strategy, compute: f64, wire: f64) -> f64 {
    match strategy {
        // The parts of a batch follow each other through a pipeline; what `auto` chose may overlap.
        Strategy::Galaxy | Strategy::Sequence | Strategy::Pipeline | Strategy::Auto => {
            compute.max(wire)
        }
        Strategy::Local | Strategy::Megatron => compute + wire,
    }
}

/// Where one run's latency went on its slowest device, in ms.
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

    #[test]
    fn only_a_strategy_that_overlaps_hides_its_wire() {
        let seen =
            Seen { compute: vec![vec![90.0, 100.0], vec![90.0, 120.0]], wire: 50.0, schedule: 0.0 };
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
}
