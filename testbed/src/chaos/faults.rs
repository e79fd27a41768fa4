//! The faults of a cluster.

use crate::processes::TestCluster;
use anyhow::{Context, Result};
use fastrand::Rng;
use std::{fmt, time::Duration};

/// The shortest time that a fault lasts, in ms.
const LEAST: u64 = 50;

/// One fault: what is broken, of which device, and for how long.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fault {
    kind: FaultKind,
    device: usize,
    outage: Duration,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum FaultKind {
    Kill,
    Freeze,
    Unplug,
    Coordinator,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, device, outage } = self;
        match kind {
            FaultKind::Kill => write!(f, "d{device} is killed"),
            FaultKind::Freeze => write!(f, "d{device} is frozen"),
            FaultKind::Unplug => write!(f, "d{device} is unplugged"),
            FaultKind::Coordinator => write!(f, "the coordinator is killed"),
        }?;
        write!(f, " for {} ms", outage.as_millis())
    }
}

impl Fault {
    /// Injects the fault, waits for as long as it lasts, and mends it.
    pub fn inject(&self, cluster: &mut TestCluster) -> Result<()> {
        let Self { kind, device, outage } = *self;
        match kind {
            FaultKind::Kill => {
                cluster.workers[device].kill()?;
                std::thread::sleep(outage);
                cluster.restart_worker(device, &[])
            }
            FaultKind::Freeze => {
                cluster.workers[device].signal("STOP")?;
                std::thread::sleep(outage);
                cluster.workers[device].signal("CONT")
            }
            FaultKind::Unplug => {
                let plug = |plugged| {
                    let network = cluster.network.as_ref().context("there are no links to pull")?;
                    network.plug(device, plugged)
                };
                plug(false)?;
                std::thread::sleep(outage);
                plug(true)
            }
            FaultKind::Coordinator => {
                cluster.coordinator.kill()?;
                std::thread::sleep(outage);
                cluster.restart_coordinator_there()
            }
        }
    }
}

/// Faults, one after another: each kind once before any comes again, in a random order.
pub struct FaultSequence {
    dice: Rng,
    kinds: Vec<FaultKind>,
    left: Vec<FaultKind>,
}

impl FaultSequence {
    /// A deck by a seed. `links` says whether devices have links that can be pulled.
    pub fn new(seed: u64, links: bool) -> Self {
        let mut kinds = vec![FaultKind::Kill, FaultKind::Freeze, FaultKind::Coordinator];
        if links {
            kinds.push(FaultKind::Unplug);
        }
        Self { dice: Rng::with_seed(seed), kinds, left: Vec::new() }
    }

    /// The next fault, which lasts at most about `outage` ms. Most last less than half of that.
    pub fn next(&mut self, outage: u64) -> Fault {
        if self.left.is_empty() {
            self.left.clone_from(&self.kinds);
            self.dice.shuffle(&mut self.left);
        }
        let kind = self.left.pop().unwrap_or(FaultKind::Kill);
        let share = self.dice.f64() * self.dice.f64();
        let outage = Duration::from_millis(LEAST + (outage as f64 * share) as u64);
        Fault { kind, device: self.dice.usize(..super::DEVICES), outage }
    }

    /// A random pause of at most `most` ms.
    pub fn pause(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.dice.u64(..=most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_kinds_are_equally_frequent_and_repeatable_by_seed() {
        let faults = |seed| {
            let mut deck = FaultSequence::new(seed, true);
            (0..40).map(|_| deck.next(1000)).collect::<Vec<_>>()
        };
        let all = faults(3);
        for kind in [FaultKind::Kill, FaultKind::Freeze, FaultKind::Unplug, FaultKind::Coordinator]
        {
            assert_eq!(all.iter().filter(|fault| fault.kind == kind).count(), 10);
        }
        assert_eq!(all, faults(3));
        assert_ne!(all, faults(4));
        let mut without = FaultSequence::new(3, false);
        assert!((0..40).all(|_| without.next(1000).kind != FaultKind::Unplug));
    }
}
