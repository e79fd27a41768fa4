//! Small records with invented values, for tests.

use super::Records;
use crate::record::{Bound, FORMAT, LATENCY, Machine, Record, Verdict};
use std::collections::BTreeMap;

/// A cell as its key, its latencies in ms, and its bound in ms.
pub(super) type CellFigures<'a> = (&'a str, &'a [f64], Option<f64>);

/// A record of these cells.
pub(super) fn record(experiment: &str, cells: &[CellFigures<'_>]) -> Record {
    let mut record = Record {
        experiment: experiment.to_owned(),
        format: FORMAT,
        started: "2026-01-02T03:04:05Z".to_owned(),
        machine: Machine { processor: "AMD EPYC".to_owned(), cores: 2, ..Machine::default() },
        commits: vec!["aaaaaaa".to_owned()],
        versions: BTreeMap::new(),
        loopback: false,
        settings: serde_json::json!({ "smoke": false }),
        calibrations: BTreeMap::new(),
        cells: Vec::new(),
    };
    for (key, latencies, bound) in cells {
        let cell = record.cell(key, &[]);
        cell.bound = bound.map(|ms| Bound { ms, parts: BTreeMap::new() });
        for ms in *latencies {
            let values = BTreeMap::from([(LATENCY.to_owned(), *ms)]);
            cell.add(values, Verdict::Valid);
            if let Some(sample) = cell.samples.last_mut() {
                sample.at = "2026-01-03T00:00:00Z".to_owned();
            }
        }
    }
    record
}

/// The records of a directory that has only a record of these cells.
pub(super) fn records(experiment: &str, cells: &[CellFigures<'_>]) -> Records {
    of(record(experiment, cells))
}

/// The records of a directory that has only this one.
pub(super) fn of(record: Record) -> Records {
    Records(BTreeMap::from([(record.experiment.clone(), record)]))
}
