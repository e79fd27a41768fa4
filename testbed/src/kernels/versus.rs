//! The page of the comparison with PyTorch, from what `testbed/peers/kernels.py` measured.

use crate::{
    plot::{self, Axis, Bar, Chart, ChartKind, Group},
    record::{Cell, Record, Verdict},
    report::{Page, Table, figure},
};
use anyhow::{Context, Result};
use galaxy_common::Spread;
use serde::Deserialize;
use std::{collections::BTreeMap, path::PathBuf};

/// The options of `galaxy-testbed kernels-show`.
#[derive(Clone, Debug, clap::Args)]
pub struct ShowOptions {
    /// The file of samples that the comparison wrote.
    samples: PathBuf,
    /// The directory of the page, the record and the plot.
    #[arg(long, default_value = "target/testbed-results/kernels-pytorch")]
    output: PathBuf,
}

const ABOUT: &str = "\
Ours and PyTorch's on one thread of one core, in milliseconds: the median of rounds, and the lowest \
and the highest. In every round each case is run by PyTorch as it comes (eager), by PyTorch with \
weights that MKL or oneDNN has packed beforehand, and by ours, one after another in changing order. \
Weights come from memory on all sides: layers take turns, and together they are larger than the \
last-level cache.";

/// The file that the comparison writes.
#[derive(Deserialize)]
struct Samples {
    versions: BTreeMap<String, String>,
    settings: serde_json::Value,
    /// The number of turns in which something else ran on the core, in all of several tries.
    disturbed: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    /// The name of what is measured, like `bert layer`.
    what: String,
    rows: u32,
    format: String,
    /// The milliseconds of each side, one value for each round.
    sides: BTreeMap<String, Vec<f64>>,
}

/// The names of the sides, as the comparison writes them.
const SIDES: [&str; 4] = ["eager", "mkl", "onednn", "ours"];

/// The sides that are drawn against eager PyTorch, each with its title.
const SHOWN: [(&str, &str); 3] =
    [("mkl", "PyTorch, MKL-packed"), ("onednn", "PyTorch, oneDNN-packed"), ("ours", "ours")];

/// Writes the record, the page and the plot of a comparison.
///
/// # Errors
/// When there is no such comparison, or the disk refuses.
pub fn show(options: &ShowOptions) -> Result<()> {
    let path = || options.samples.display().to_string();
    let bytes = std::fs::read(&options.samples).with_context(path)?;
    let samples: Samples = serde_json::from_slice(&bytes).with_context(path)?;
    let disturbed = samples.disturbed;
    let record = record(samples)?;
    let folder = &options.output;
    record.save(&folder.join("kernels-pytorch.json"))?;
    plot::draw(&chart(&record), &folder.join("kernels-pytorch"))?;
    let tables = [table(&record)];
    let plots = ["kernels-pytorch.svg".to_owned()];
    let mut notes = vec![
        "Below 1, ours is faster. A layer is everything between its input and its output: products, \
         attention, norms, activation, residuals. Of single products, ours have bias and ReLU in \
         them (up) or nothing, PyTorch's have the bias alone or nothing."
            .to_owned(),
    ];
    if disturbed > 0 {
        notes.push(format!(
            "**{disturbed} turns were disturbed: something else ran on the core, in all of several \
             tries.** Measure again on a machine at rest."
        ));
    }
    let page = Page {
        record: &record,
        about: ABOUT,
        tables: &tables,
        notes: &notes,
        not_kept: &[],
        plots: &plots,
    };
    let text = page.to_string();
    let path = folder.join("kernels-pytorch.md");
    std::fs::write(&path, &text).with_context(|| path.display().to_string())?;
    println!("{text}");
    Ok(())
}

fn record(samples: Samples) -> Result<Record> {
    let mut record = Record::new("kernels-pytorch", false, samples.settings)?;
    record.versions.extend(samples.versions);
    for case in samples.cases {
        let Case { what, rows, format, sides } = case;
        let rounds = sides.values().map(Vec::len).min().unwrap_or(0);
        let rows = rows.to_string();
        let labels = [("what", what.as_str()), ("rows", rows.as_str()), ("format", &format)];
        let cell = record.cell(&format!("{what}/{format}/{rows}"), &labels);
        for round in 0..rounds {
            let value = |(side, all): (&String, &Vec<f64>)| (side.clone(), all[round]);
            cell.add(sides.iter().map(value).collect(), Verdict::Valid);
        }
    }
    Ok(record)
}

fn ratio(cell: &Cell, of: &str, to: &str) -> Spread {
    Spread::of_ratio(&cell.values(of), &cell.values(to))
}

fn table(record: &Record) -> Table {
    let columns = [
        "what",
        "weights",
        "rows",
        "eager, ms",
        "MKL-packed, ms",
        "oneDNN-packed, ms",
        "ours, ms",
        "ours / eager",
        "ours / MKL",
        "ours / oneDNN",
    ];
    let mut table = Table::new("Ours and PyTorch's", &columns);
    for cell in &record.cells {
        let label = |name: &str| cell.labels.get(name).cloned().unwrap_or_default();
        let mut row = vec![label("what"), label("format"), label("rows")];
        row.extend(SIDES.map(|side| figure(cell, side)));
        let theirs = &SIDES[..3];
        row.extend(theirs.iter().map(|side| format!("{:.3}", ratio(cell, "ours", side))));
        table.row(row);
    }
    table
}

fn chart(record: &Record) -> Chart {
    let bar = |series, spread: Spread| Bar {
        series,
        value: (spread.n > 0).then_some(spread.median),
        low: spread.low,
        high: spread.high,
        note: (spread.n == 0).then(|| "not measured".to_owned()),
        ..Bar::default()
    };
    let group = |cell: &Cell| {
        let mut name: Vec<&str> = cell.key.split('/').collect();
        // The format that most cases have needs no name.
        name.retain(|part| *part != "f32");
        Group {
            label: name.join(" "),
            bars: SHOWN
                .iter()
                .enumerate()
                .map(|(at, (side, _))| bar(at, ratio(cell, side, "eager")))
                .collect(),
        }
    };
    // Single products stand only in the table.
    let layer = |cell: &Cell| cell.labels.get("what").is_some_and(|what| what.ends_with("layer"));
    Chart {
        title: "A layer's time against eager PyTorch's, one thread".to_owned(),
        x: Axis { label: "model, weights if not f32, rows".to_owned(), ..Axis::default() },
        y: Axis { label: "of eager PyTorch's time".to_owned(), ..Axis::default() },
        kind: ChartKind::Bars {
            groups: record.cells.iter().filter(|cell| layer(cell)).map(group).collect(),
            series: SHOWN.iter().map(|(_, name)| (*name).to_owned()).collect(),
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_comparison_with_pytorch_is_written_as_page_and_plot() {
        let place = tempfile::tempdir().unwrap();
        let samples = place.path().join("samples.json");
        let text = r#"{
            "versions": { "torch": "2.15.0" }, "settings": { "rounds": 3 },
            "disturbed": 2, "cases": [
                { "what": "bert layer", "rows": 284, "format": "f32", "sides": {
                    "eager": [60.0, 62.0, 61.0], "onednn": [50.0, 52.0, 51.0],
                    "ours": [54.0, 55.8, 54.9] } },
                { "what": "llama layer", "rows": 1, "format": "bf16", "sides": {
                    "eager": [4.0], "ours": [3.0] } }
            ]
        }"#;
        std::fs::write(&samples, text).unwrap();
        let output = place.path().join("out");
        show(&ShowOptions { samples, output: output.clone() }).unwrap();
        let page = std::fs::read_to_string(output.join("kernels-pytorch.md")).unwrap();
        for part in
            ["2 turns were disturbed", "0.900 (0.900 to 0.900)", "torch 2.15.0", "bf16", "0.750"]
        {
            assert!(page.contains(part), "{part}\n{page}");
        }
        assert!(output.join("kernels-pytorch.png").exists());
    }
}
