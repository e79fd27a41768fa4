//! Small records that nobody measured, for tests.

use super::Records;
use crate::record::{Bound, FORMAT, Machine, Record, Verdict};
use std::collections::BTreeMap;

/// A cell: its key, its latencies, its bound.
pub(super) type Made<'a> = (&'a str, &'a [f64], Option<f64>);

/// A record of these.
pub(super) fn record(experiment: &str, cells: &[Made<'_>]) -> Record {
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
            let values = BTreeMap::from([(super::cells::LATENCY.to_owned(), *ms)]);
            cell.add(values, Verdict::Valid);
            if let Some(sample) = cell.samples.last_mut() {
                sample.at = "2026-01-03T00:00:00Z".to_owned();
            }
        }
    }
    record
}

/// The same, found as those of a directory are.
pub(super) fn records(experiment: &str, cells: &[Made<'_>]) -> Records {
    of(record(experiment, cells))
}

/// One record and no other.
pub(super) fn of(record: Record) -> Records {
    Records(BTreeMap::from([(record.experiment.clone(), record)]))
}
