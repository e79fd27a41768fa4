//! The page: the latencies of both sides, their ratios, and whether both sides computed the same.

use super::{
    ABOUT, Contender, GALAXY, GALAXY_TLS, KEPT, MEGATRON, NAME, PLAN, RESULT, SEQUENCE, SIDES,
    SINGLE, WEIGHTS,
};
use crate::{
    experiment::{
        contest::key,
        show::{axis, bar, groups, publish, shown},
    },
    plot::{Axis, Chart, ChartKind, Group},
    record::{Cell, LATENCY, Record},
    report::{Table, figure},
};
use anyhow::Result;
use galaxy_common::Spread;
use std::{collections::BTreeSet, path::Path};

/// The paragraph that follows the experiment's name on its page.
const STORY: &str = "One text, and the mean of its last hidden states: by PyTorch with Gloo, a process on each device, Megatron-style (a part of the heads and of the inner columns on each, as equal as whole numbers can be, two all-reduces in a layer), sequence parallel (all weights and a part of the rows on each, keys and values gathered once in a layer) and on the fastest device alone; and by the plan that `auto` makes, over plain TCP, as Gloo's, and over TCP with TLS. Both sides compute in f32, a device has one thread, and they take turns in one run on the same devices and links.";
/// The least ratio of Megatron-style PyTorch's latency to ours, on equal boards.
const WANTED: f64 = 1.3;
const EQUAL_BOARDS: [&str; 3] = ["A", "B", "C"];

/// The properties of real devices that the emulation does not keep.
const NOT_KEPT: &[&str] = &[
    "Links are driven beside the devices' shares on both sides: what Gloo's thread for its sockets takes, and what ours take, is not taken from the products. The threads in which Gloo adds up are under the share.",
    "A device of a share of a core waits for its gate: 1 ms on average in turns of 2 ms, each time that it waited for another device. Real devices do not.",
    "Devices share a last-level cache, and memory.",
];

/// The cells of a model in an environment.
struct ModelCells<'a> {
    record: &'a Record,
    environment: &'a str,
    model: &'a str,
}

impl ModelCells<'_> {
    fn cell(&self, side: Contender) -> Option<&Cell> {
        let key = key(self.environment, self.model, side.name());
        self.record.cells.iter().find(|cell| cell.key == key)
    }

    fn figure(&self, side: Contender, value: &str) -> String {
        self.cell(side).map_or("-".to_owned(), |cell| figure(cell, value))
    }

    /// The latency of one side over that of another.
    fn ratio(&self, one: Contender, other: Contender) -> Option<Spread> {
        let values = |side| Some(self.cell(side)?.values(LATENCY));
        Some(Spread::of_ratio(&values(one)?, &values(other)?)).filter(|ratio| ratio.n > 0)
    }

    /// The fastest side of PyTorch.
    fn best(&self) -> Option<Contender> {
        let median = |side: &Contender| Some(self.cell(*side)?.spread(LATENCY).median);
        let ways = [SINGLE, MEGATRON, SEQUENCE].into_iter();
        let ways = ways.filter_map(|side| Some((side, median(&side)?)));
        let measured = ways.filter(|(_, median)| median.is_finite());
        measured.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(side, _)| side)
    }

    fn best_ratio(&self, ours: Contender) -> Option<Spread> {
        self.ratio(self.best()?, ours)
    }

    /// The least ratio of Megatron-style PyTorch to ours that is wanted here; none where nothing is.
    fn wanted(&self) -> Option<f64> {
        EQUAL_BOARDS.contains(&self.environment).then_some(WANTED)
    }

    /// The largest difference of the other results from ours, as a share of our largest value.
    fn difference(&self) -> Option<f64> {
        let values = |side: Contender| -> Option<Vec<f64>> {
            let text = self.cell(side)?.labels.get(RESULT)?;
            text.split(' ').map(|value| value.parse().ok()).collect()
        };
        let ours = values(GALAXY)?;
        let others = SIDES.into_iter().filter(|side| *side != GALAXY).filter_map(values);
        let off = |theirs: Vec<f64>| match theirs.len() == ours.len() {
            true => largest(ours.iter().zip(&theirs).map(|(a, b)| a - b)),
            false => f64::NAN,
        };
        let off: Vec<f64> = others.map(off).collect();
        (!off.is_empty()).then(|| largest(off.into_iter()) / largest(ours.iter().copied()))
    }
}

/// The largest magnitude; NaN where one of the values is NaN.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values
        .map(f64::abs)
        .fold(0.0, |most, value| if value <= most || most.is_nan() { most } else { value })
}

/// Shows a record.
///
/// # Errors
/// When files cannot be written.
pub(super) fn show(record: &Record, tokens: u32, output: &Path) -> Result<()> {
    let groups = groups(record);
    let found: Vec<ModelCells<'_>> = groups
        .iter()
        .map(|(environment, model)| ModelCells { record, environment, model })
        .collect();
    let there = |side: &Contender| found.iter().any(|found| found.cell(*side).is_some());
    let sides: Vec<Contender> = SIDES.into_iter().filter(there).collect();
    let tables = vec![latencies(&found, &sides, tokens), ratios(&found), beside(&found, &sides)];
    let bars = found.iter().map(|found| Group {
        label: format!("{}/{}", found.environment, found.model),
        bars: sides
            .iter()
            .enumerate()
            .filter_map(|(series, side)| Some(bar(series, found.cell(*side)?, LATENCY)))
            .collect(),
    });
    let chart = Chart {
        title: format!("Latency of a text of {tokens} tokens"),
        x: axis("environment/model"),
        y: Axis { log: true, ..axis("ms") },
        kind: ChartKind::Bars {
            groups: bars.collect(),
            series: sides.iter().map(|side| side.name().to_owned()).collect(),
        },
    };
    let kept = record.cells.iter().filter_map(|cell| cell.labels.get(WEIGHTS)).map(String::as_str);
    let kept: BTreeSet<&str> = kept.collect();
    let mut notes = vec![reached(&found)];
    if !kept.is_empty() {
        let kept = kept.into_iter().collect::<Vec<_>>().join(" or ");
        notes.push(format!(
            "*Weights of PyTorch* are plain or packed by oneDNN for this length of text, whichever is faster when they are loaded; here they were {kept} (by cell in the JSON). There is one copy of them."
        ));
    }
    notes.extend(NOTES.iter().map(|&note| note.to_owned()));
    let shown = (tables, notes, vec![("", chart)]);
    publish(record, (NAME, &format!("{ABOUT}\n\n{STORY}")), shown, NOT_KEPT, output)
}

const NOTES: &[&str] = &[
    "*Bound*, over plain TCP: what the slowest device computed, or how long the busiest cable is busy, the longer of both.",
    "*Latency*: of PyTorch, from the moment that the process on the first device is asked, which alone knows the tokens, until it has the result; of ours, from the coordinator, a place of its own, and back to it.",
    "*Out of memory*: the kernel ended a process that went above its device's memory, or there is no plan within it. A device's memory is that of the paper's boards twice, whose weights had 16 bit. A process of PyTorch takes 0.2 GB before it has any weights, and holds all weights in f32, also those that are stored in 16 bit. No process of ours is there while one of theirs is.",
    "PyTorch is brought by `testbed/peers/pytorch/bring` from the Python package index. Its programs (`gloo.py` there) are plain PyTorch as the models' own implementations compute, without what these do besides: query, key and value are one product, attention is PyTorch's own, and memory of results is used again.",
];

fn latencies(found: &[ModelCells<'_>], sides: &[Contender], tokens: u32) -> Table {
    let titles: Vec<&str> =
        ["environment", "model"].into_iter().chain(sides.iter().map(|side| side.name())).collect();
    let title = format!("Latency of a text of {tokens} tokens, ms: median (range)");
    let mut table = Table::new(&title, &titles);
    for found in found {
        let figures = sides.iter().map(|side| found.figure(*side, LATENCY));
        let names = [found.environment.to_owned(), found.model.to_owned()];
        table.row(names.into_iter().chain(figures));
    }
    table
}

fn ratios(found: &[ModelCells<'_>]) -> Table {
    let mut table = Table::new(
        "Latency of PyTorch over ours",
        &[
            "environment",
            "model",
            "pytorch-megatron / galaxy",
            "to reach",
            "best of PyTorch",
            "best / galaxy",
            "to reach",
            "pytorch-megatron / galaxy-tls",
            "best / galaxy-tls",
        ],
    );
    let text = |ratio: Option<Spread>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    for found in found {
        table.row([
            found.environment.to_owned(),
            found.model.to_owned(),
            text(found.ratio(MEGATRON, GALAXY)),
            found.wanted().map_or("-".to_owned(), |wanted| format!("{wanted}")),
            found.best().map_or("-", Contender::name).to_owned(),
            text(found.best_ratio(GALAXY)),
            "above 1".to_owned(),
            text(found.ratio(MEGATRON, GALAXY_TLS)),
            text(found.best_ratio(GALAXY_TLS)),
        ]);
    }
    table
}

fn beside(found: &[ModelCells<'_>], sides: &[Contender]) -> Table {
    let sent: Vec<Contender> = sides.iter().copied().filter(|side| *side != SINGLE).collect();
    let bytes: Vec<String> = sent.iter().map(|side| format!("{}, MB", side.name())).collect();
    let differ = format!("first {KEPT} values differ by");
    let mut titles = vec!["environment", "model", "plan", "bound, ms", differ.as_str()];
    titles.extend(bytes.iter().map(String::as_str));
    let mut table =
        Table::new("Plans, results, and bytes on the wire, all devices together", &titles);
    for found in found {
        let plan = found.cell(GALAXY).and_then(|cell| cell.labels.get(PLAN)).cloned();
        let bound = found.cell(GALAXY).and_then(|cell| cell.bound.as_ref());
        let difference = found.difference();
        let row = [
            found.environment.to_owned(),
            found.model.to_owned(),
            plan.unwrap_or_else(|| "-".to_owned()),
            shown(bound.map_or(f64::NAN, |bound| bound.ms), 0),
            difference.map_or("-".to_owned(), |off| format!("{off:.1e}")),
        ];
        let median = |side: &Contender| found.cell(*side).map(|cell| cell.spread("sent_mb").median);
        let bytes = sent.iter().map(|side| shown(median(side).unwrap_or(f64::NAN), 1));
        table.row(row.into_iter().chain(bytes));
    }
    table
}

/// How often the goals were reached, as a sentence.
fn reached(found: &[ModelCells<'_>]) -> String {
    let mut counts = [(0, 0), (0, 0)];
    for found in found {
        let wanted = found.wanted().zip(found.ratio(MEGATRON, GALAXY));
        let megatron = wanted.map(|(wanted, ratio)| ratio.median >= wanted);
        let best = found.best_ratio(GALAXY).map(|ratio| ratio.median > 1.0);
        for (count, reached) in counts.iter_mut().zip([megatron, best]) {
            count.0 += usize::from(reached == Some(true));
            count.1 += usize::from(reached.is_some());
        }
    }
    let [megatron, best] = counts;
    format!(
        "*To reach*: over plain TCP, {WANTED} times as fast as PyTorch Megatron-style in {}, where both run: in {} of {}. Faster than the best of PyTorch, wherever both run: in {} of {}.",
        EQUAL_BOARDS.join(", "),
        megatron.0,
        megatron.1,
        best.0,
        best.1
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::record::{Outcome, Verdict};
    use std::collections::BTreeMap;

    fn record(cells: &[(Contender, f64, &str)]) -> Record {
        let mut record = Record::new(NAME, true, ()).unwrap();
        for (side, ms, result) in cells {
            let cell = record.cell(&key("A", "bert", side.name()), &[]);
            cell.labels.insert(RESULT.to_owned(), (*result).to_owned());
            cell.add(BTreeMap::from([(LATENCY.to_owned(), *ms)]), Verdict::Valid);
        }
        record
    }

    #[test]
    fn ratios_compare_galaxy_with_the_fastest_pytorch_contender() {
        let mut record = record(&[
            (SINGLE, 300.0, "1 2"),
            (MEGATRON, 150.0, "1 2.0002"),
            (SEQUENCE, 140.0, "1 2"),
            (GALAXY, 100.0, "1 2"),
        ]);
        let found = ModelCells { record: &record, environment: "A", model: "bert" };
        assert_eq!(found.best(), Some(SEQUENCE));
        assert_eq!(found.best_ratio(GALAXY).unwrap().median, 1.4);
        assert_eq!(found.ratio(MEGATRON, GALAXY).unwrap().median, 1.5);
        assert!(found.ratio(MEGATRON, GALAXY_TLS).is_none());
        assert!((found.difference().unwrap() - 1e-4).abs() < 1e-9);
        let said = reached(&[found]);
        assert!(said.contains("in 1 of 1. Faster") && said.ends_with("in 1 of 1."), "{said}");
        // A cell without figures is in no ratio.
        let why = Outcome::Refused { why: "so".into() };
        for side in [MEGATRON, SEQUENCE] {
            let cell = record.cell(&key("A", "bert", side.name()), &[]);
            (cell.outcome, cell.samples) = (why.clone(), Vec::new());
        }
        let found = ModelCells { record: &record, environment: "A", model: "bert" };
        assert_eq!(found.best(), Some(SINGLE));
        assert!(found.ratio(MEGATRON, GALAXY).is_none());
        assert!(reached(&[found]).contains("in 0 of 0. Faster"));
        assert!(
            latencies(
                &[ModelCells { record: &record, environment: "A", model: "bert" }],
                &SIDES,
                3
            )
            .to_string()
            .contains("refused")
        );
    }

    #[test]
    fn results_of_other_length_or_with_nan_have_no_finite_difference() {
        for (theirs, fits) in
            [("1 2 3", false), ("1 2.5", true), ("1 NaN", false), ("NaN 2", false)]
        {
            let record =
                record(&[(MEGATRON, 1.0, theirs), (GALAXY, 1.0, "1 2"), (SINGLE, 1.0, "1 2")]);
            let found = ModelCells { record: &record, environment: "A", model: "bert" };
            assert_eq!(found.difference().unwrap().is_finite(), fits, "{theirs}");
        }
    }
}
