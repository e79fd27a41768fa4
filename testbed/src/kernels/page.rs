//! The page of the results for kernels.

use super::quiet::UNDISTURBED;
use crate::{
    plot::{self, Axis, Bar, Chart, ChartKind, Group},
    record::{Cell, Record},
    report::{Page, Table, figure},
};
use anyhow::{Context, Result};
use galaxy_common::{Bytes, Spread};
use std::path::Path;

const ABOUT: &str = "\
Kernels of one device, in milliseconds: the median of rounds, and the lowest and the highest. What \
is compared took turns within each round. Weights come from memory: layers take turns, and together \
they are larger than the last-level cache.";

/// Writes `kernels.md`, its plot, and prints the page.
pub(super) fn show(record: &Record, folder: &Path) -> Result<()> {
    let tables: Vec<Table> = [bounds(record), splits(record), formats(record), threads(record)]
        .into_iter()
        .flatten()
        .collect();
    let mut plots = Vec::new();
    if let Some(chart) = chart(record) {
        plot::draw(&chart, &folder.join("kernels"))?;
        plots.push("kernels.svg".to_owned());
    }
    let notes: Vec<String> = [
        "The bound of a product is its arithmetic at the core's peak (multiplications and additions \
         in registers alone) or its weights at the rate at which the core reads memory, whichever \
         takes longer; both are measured in every round. Products have bias and ReLU in them."
            .to_owned(),
        "Parts of columns are cut as devices would hold them: heads and columns, each part with weights of its own, one \
         after another on the same core. Tiles are rows. Only products and attention count, which is \
         what is cut."
            .to_owned(),
    ]
    .into_iter()
    .chain(disturbed(record))
    .collect();
    let page =
        Page { record, about: ABOUT, tables: &tables, notes: &notes, not_kept: &[], plots: &plots };
    let text = page.to_string();
    let path = folder.join("kernels.md");
    std::fs::write(&path, &text).with_context(|| path.display().to_string())?;
    println!("{text}");
    Ok(())
}

/// A note on how many samples something else on the core disturbed; none where none were.
fn disturbed(record: &Record) -> Option<String> {
    let shares: Vec<f64> = record.cells.iter().flat_map(|cell| cell.values("cpu")).collect();
    let low = shares.iter().filter(|share| **share < UNDISTURBED).count();
    (low > 0).then(|| {
        format!(
            "**{low} of {} samples were disturbed: something else ran on the core for more than \
             {:.0}% of the time, in all of several tries.** Measure again on a machine at rest.",
            shares.len(),
            (1.0 - UNDISTURBED) * 100.0
        )
    })
}

fn cells<'a>(record: &'a Record, section: &'a str) -> impl Iterator<Item = &'a Cell> {
    record.cells.iter().filter(move |cell| cell.key.split('/').next() == Some(section))
}

/// A table with a row for each cell of a section; none where the section was not measured.
fn table(
    record: &Record,
    section: &str,
    title: &str,
    columns: &[&str],
    row: impl Fn(&Cell) -> Vec<String>,
) -> Option<Table> {
    let mut table = Table::new(title, columns);
    let mut found: Vec<&Cell> = cells(record, section).collect();
    // By rows first: figures that are compared stand together.
    found.sort_by_key(|cell| std::cmp::Reverse(label(cell, "rows").parse::<u32>().unwrap_or(0)));
    found.into_iter().for_each(|cell| table.row(row(cell)));
    (!table.rows.is_empty()).then_some(table)
}

fn label(cell: &Cell, name: &str) -> String {
    cell.labels.get(name).cloned().unwrap_or_default()
}

/// The median, the lowest and the highest of percentages.
fn percent(spread: Spread) -> String {
    let Spread { median, low, high, .. } = spread;
    format!("{:.0}% ({:.0} to {:.0})", median * 100.0, low * 100.0, high * 100.0)
}

/// The share of its bound that a product reached.
fn reached(cell: &Cell) -> Spread {
    Spread::of_ratio(&cell.values("bound_ms"), &cell.values("ms"))
}

fn bounds(record: &Record) -> Option<Table> {
    let columns = [
        "instructions",
        "weights",
        "product",
        "ms",
        "GFLOP/s",
        "GB/s",
        "peak",
        "memory",
        "of bound",
    ];
    table(record, "bounds", "Against the core", &columns, |cell| {
        let median = |name: &str| cell.spread(name).median;
        vec![
            label(cell, "instructions"),
            label(cell, "format"),
            label(cell, "shape"),
            figure(cell, "ms"),
            format!("{:.1}", median("gflops")),
            format!("{:.2}", median("gigabytes")),
            format!("{:.0}", median("peak")),
            format!("{:.1}", median("stream")),
            percent(reached(cell)),
        ]
    })
}

/// The times of a cell, and those of the cell whose label `name` is `whole`, in the same rounds; none for
/// that cell itself.
fn against(record: &Record, cell: &Cell, name: &str, whole: &str) -> Option<(Vec<f64>, Vec<f64>)> {
    let (base, own) = (cell.key.rsplit_once('/')?.0, label(cell, name));
    if own == whole {
        return None;
    }
    let other = record.cells.iter().find(|other| other.key == format!("{base}/{whole}"))?;
    Some((cell.values("ms"), other.values("ms")))
}

fn splits(record: &Record) -> Option<Table> {
    let columns = ["rows", "cut", "ms", "longer than whole"];
    table(record, "splits", "Cut into parts", &columns, |cell| {
        let longer = against(record, cell, "cut", "whole").map(|(own, whole)| {
            let Spread { median, low, high, .. } = Spread::of_ratio(&own, &whole);
            let more = |ratio: f64| (ratio - 1.0) * 100.0;
            format!("{:+.1}% ({:+.1} to {:+.1})", more(median), more(low), more(high))
        });
        vec![
            label(cell, "rows"),
            label(cell, "cut"),
            figure(cell, "ms"),
            longer.unwrap_or_else(|| "-".to_owned()),
        ]
    })
}

/// How many times faster a cell is than the one that it is compared with, as text.
fn faster(compared: Option<(Vec<f64>, Vec<f64>)>) -> String {
    compared.map_or_else(
        || "-".to_owned(),
        |(own, other)| format!("{:.2}", Spread::of_ratio(&other, &own)),
    )
}

fn formats(record: &Record) -> Option<Table> {
    let columns = ["rows", "weights", "a layer holds", "ms", "times as fast as f32"];
    table(record, "formats", "In 16 bits", &columns, |cell| {
        let held = cell.facts.get("bytes_per_layer").copied().unwrap_or(0.0);
        vec![
            label(cell, "rows"),
            label(cell, "format"),
            Bytes(held as u64).to_string(),
            figure(cell, "ms"),
            faster(against(record, cell, "format", "f32")),
        ]
    })
}

fn threads(record: &Record) -> Option<Table> {
    let columns = ["rows", "threads", "ms", "times as fast as one"];
    table(record, "threads", "On two threads", &columns, |cell| {
        vec![
            label(cell, "rows"),
            label(cell, "threads"),
            figure(cell, "ms"),
            faster(against(record, cell, "threads", "1")),
        ]
    })
}

/// A chart of the share of their bounds that the products reach, by instruction set.
fn chart(record: &Record) -> Option<Chart> {
    let mut series: Vec<String> = Vec::new();
    let mut groups: Vec<Group> = Vec::new();
    for cell in cells(record, "bounds") {
        let set = label(cell, "instructions");
        let at = series.iter().position(|known| *known == set).unwrap_or_else(|| {
            series.push(set);
            series.len() - 1
        });
        let name = format!("{} {}", label(cell, "shape"), label(cell, "format"));
        let group = groups.iter().position(|group| group.label == name).unwrap_or_else(|| {
            groups.push(Group { label: name, bars: Vec::new() });
            groups.len() - 1
        });
        let Spread { median, low, high, .. } = reached(cell);
        groups[group].bars.push(Bar {
            series: at,
            value: Some(median * 100.0),
            low: low * 100.0,
            high: high * 100.0,
            mark: Some(100.0),
            ..Bar::default()
        });
    }
    (!groups.is_empty()).then(|| Chart {
        title: "Products against what a core can do".to_owned(),
        x: Axis { label: "rows x inputs x outputs, weights".to_owned(), ..Axis::default() },
        y: Axis { label: "of the bound, %".to_owned(), ..Axis::default() },
        kind: ChartKind::Bars { groups, series },
    })
}
