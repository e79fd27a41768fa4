//! What more devices gain (Galaxy, Figs. 10 and 11).

use super::{
    Records, Shown,
    cells::{At, Cells, Figure, bound, fact, grid, latency, of_bound, over, percent, shown, text},
    goal::{Goal, Rule, Unit},
};
use crate::{
    record::{Cell, LATENCY},
    report::Table,
};

/// The name of the record with as much work for each device.
pub(super) const WEAK: &str = "weak";
/// The name of the record with the same work for all devices.
pub(super) const STRONG: &str = "strong";
const ENVIRONMENTS: [&str; 3] = ["A", "B", "C"];
/// The rate of the links, in Mbit/s.
const RATE: [Option<u32>; 1] = [Some(1000)];
const MODELS: [&str; 2] = ["gpt2-large-4", "opt-2.7b-4"];
/// The environment of four devices, which is judged.
const FOUR: &str = "C";
/// The least share of linear scaling.
const OF_LINEAR: f64 = 0.86;
/// The least speedup.
const SPEEDUP: f64 = 3.3;

/// The work of a run on all devices over that of a run on one: by operations, or by tokens where those are
/// not known.
fn work(one: Option<&Cell>, all: Option<&Cell>) -> f64 {
    let of = |name| fact(all, name) / fact(one, name);
    [of("flops"), of("tokens")].into_iter().find(|times| times.is_finite()).unwrap_or(f64::NAN)
}

/// The work of all devices in a second over that of one device times their number, and the same by the
/// bounds.
fn of_linear(cells: Cells<'_>, at: At<'_>, all: Option<&Cell>) -> (Figure, f64) {
    let one = cells.find(at, "local");
    let times = work(one, all) / cells.devices(at);
    (over(one, all, LATENCY, times), bound(one) / bound(all) * times)
}

/// The latency of one device over that of all, and the same by the bounds.
fn speedup(cells: Cells<'_>, at: At<'_>, all: Option<&Cell>) -> (Figure, f64) {
    let one = cells.find(at, "local");
    (over(one, all, LATENCY, 1.0), bound(one) / bound(all))
}

type Gain = fn(Cells<'_>, At<'_>, Option<&Cell>) -> (Figure, f64);

/// What differs between weak and strong scaling.
struct ScalingPage {
    record: &'static str,
    title: &'static str,
    gain: Gain,
    named: &'static str,
    goal: Goal,
}

pub(super) fn shown_of(records: &Records) -> Shown {
    let sides = [
        ScalingPage {
            record: WEAK,
            title: "96 tokens for each device, 1000 Mbit/s",
            gain: of_linear,
            named: "of linear",
            goal: Goal::new(
                "weak scaling, four devices, 1000 Mbit/s: of linear",
                "81%, 86%",
                Rule::Every(OF_LINEAR),
                Unit::Share,
            ),
        },
        ScalingPage {
            record: STRONG,
            title: "384 tokens, 1000 Mbit/s",
            gain: speedup,
            named: "times one device",
            goal: Goal::new(
                "strong scaling, four devices, 1000 Mbit/s: times one device",
                "3.05, 3.24",
                Rule::Every(SPEEDUP),
                Unit::Times,
            ),
        },
    ];
    let mut found = Shown::default();
    for side in sides {
        let cells = records.cells(side.record);
        let (goal, table) = side.shown(cells);
        found.goals.push(goal);
        if cells.record.is_some() {
            found.tables.push(table);
        }
        found.every.extend(cells.every());
    }
    found
}

impl ScalingPage {
    fn shown(self, cells: Cells<'_>) -> (Goal, Table) {
        let mut goal = self.goal;
        let galaxy_named = format!("galaxy: {}", self.named);
        let auto_named = format!("auto: {}", self.named);
        let mut table = Table::new(
            self.title,
            &[
                "environment",
                "devices",
                "model",
                "tokens",
                "one device, ms: median (range)",
                "of the bound",
                "auto, ms",
                "its bound, ms",
                "of the bound",
                &auto_named,
                "the bounds'",
                "of it",
                &galaxy_named,
                "the paper's",
            ],
        );
        for at in grid(&ENVIRONMENTS, &RATE, &MODELS) {
            let [one, galaxy, auto] = ["local", "galaxy", "auto"].map(|name| cells.find(at, name));
            let (gain, allowed) = (self.gain)(cells, at, auto);
            let (by_galaxy, _) = (self.gain)(cells, at, galaxy);
            if at.environment == FOUR {
                goal.add(at, gain.map(|gain| gain.median));
            }
            table.row([
                at.environment.to_owned(),
                shown(cells.devices(at), 0),
                at.model.to_owned(),
                shown(fact(auto, "tokens"), 0),
                latency(one),
                percent(of_bound(one)),
                latency(auto),
                shown(bound(auto), 0),
                percent(of_bound(auto)),
                text(&gain, 2),
                shown(allowed, 2),
                percent(gain.map_or(f64::NAN, |gain| gain.median) / allowed),
                text(&by_galaxy, 2),
                shown(cells.paper(at, "auto").unwrap_or(f64::NAN), 2),
            ]);
        }
        (goal, table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        calibrate::{Calibrated, Calibration},
        environment::Scale,
        evaluation::fixtures::record,
        record::Record,
    };
    use std::collections::BTreeMap;

    fn made(name: &str, latencies: [f64; 2], tokens: [f64; 2]) -> Record {
        let of = "C-1000Mbit-8GB";
        let keys = ["local", "auto"].map(|variant| format!("{of}/gpt2-large-4/{variant}"));
        let mut record = record(
            name,
            &[(&keys[0], &latencies[..1], Some(100.0)), (&keys[1], &latencies[1..], Some(25.0))],
        );
        for (cell, tokens) in record.cells.iter_mut().zip(tokens) {
            cell.facts.insert("tokens".to_owned(), tokens);
        }
        let device = |core| Calibrated {
            name: format!("m{core}"),
            core,
            wanted_speed: None,
            quota: None,
            set_share: None,
            measured: None,
        };
        let scale = Scale { speed: 2.0, memory: 2.0 };
        let devices = (0..4).map(device).collect();
        let calibration = Calibration { scale, devices, ..Calibration::default() };
        record.calibrations.insert(of.to_owned(), calibration);
        record
    }

    fn reached(records: &Records) -> Vec<String> {
        shown_of(records).goals.iter().map(Goal::reached).collect()
    }

    fn both(weak: Record, strong: Record) -> Records {
        Records(BTreeMap::from([(WEAK.to_owned(), weak), (STRONG.to_owned(), strong)]))
    }

    #[test]
    fn weak_scaling_is_compared_with_linear_and_strong_with_one_device() {
        // Four times the tokens in 1 / 0.9 of the time; a third of the time.
        let found = both(
            made(WEAK, [90.0, 100.0], [96.0, 384.0]),
            made(STRONG, [300.0, 100.0], [384.0; 2]),
        );
        assert_eq!(
            reached(&found),
            ["yes, where measured; 1 of 2 cells not measured", "no; 1 of 2 cells not measured"]
        );
        let tables: Vec<String> = shown_of(&found).tables.iter().map(Table::to_string).collect();
        assert!(tables[0].contains(" 0.90 "), "{}", tables[0]);
        assert!(tables[1].contains(" 3.00 "), "{}", tables[1]);
        assert_eq!(shown_of(&found).every.len(), 2);
    }

    #[test]
    fn scaling_counts_operations_rather_than_tokens_if_recorded() {
        let mut weak = made(WEAK, [50.0, 100.0], [96.0, 384.0]);
        for (cell, flops) in weak.cells.iter_mut().zip([1.0, 7.0]) {
            cell.facts.insert("flops".to_owned(), flops);
        }
        let found = both(weak, made(STRONG, [330.0, 100.0], [384.0; 2]));
        let yes = "yes, where measured; 1 of 2 cells not measured";
        assert_eq!(reached(&found), [yes, yes]);
    }

    #[test]
    fn scaling_goals_without_records_are_not_measured() {
        let found = shown_of(&Records::default());
        assert_eq!(found.goals.len(), 2);
        assert!(found.tables.is_empty() && found.every.is_empty());
        assert_eq!(reached(&Records::default()), ["not measured", "not measured"]);
    }
}
