//! Shows an experiment's results: tables, plots, and notes on them.

use super::{Experiment, Options, View, contest::key};
use crate::{
    plot::{self, Axis, Bar, Chart, ChartKind, Group, Point, Series},
    record::{Cell, Outcome, Record},
    report::{Page, Table, figure},
};
use anyhow::Result;
use galaxy_common::Spread;
use std::path::Path;

/// The properties of real devices that no factor of the emulation scales.
pub(super) const NOT_KEPT: &[&str] = &[
    "Processor time of the wire. A byte costs this machine's core a tenth to a fifth of what it costs the boards' in total, but they have four cores and we have a share of one, and their share of it is smaller. So links are driven beside the quotas, which hold the threads that multiply only; what the links took is in the column `links, CPU ms` for whoever wants to add it.",
    "Wake-ups and locks take as long here as on a machine of full speed: a few tens of microseconds, where the boards take more.",
    "Heads and columns stay whole: three devices share 16 heads as 6, 5, 5, here as there.",
    "A quota comes in slices of a millisecond. A device that waited begins with a fresh slice, so each wait gives back up to one; what that gave is in the measured compute, and so in the bound.",
    "Caches: the boards' are smaller, and slices of other devices leave ours cold.",
    "Weights are held in 32 bit by this engine and in 16 bit by the paper's, so memory is scaled by two.",
];

/// The paragraph on how a bound is computed.
pub(super) const BOUND: &str = "*Bound*: the slowest device's measured compute and the busiest cable's time, the larger of both for `galaxy`, `sequence`, `pipeline` and `auto`, whose sends overlap, and the sum for `local` and `megatron`, with the integer split, and the shaped rate with the headers of frames, packets and TLS.";

/// Shows a record, in the form that the experiment has.
///
/// # Errors
/// When files cannot be written.
pub(super) fn show(experiment: &Experiment, record: &Record, options: &Options) -> Result<()> {
    let view = Found { experiment, record };
    let shown = match experiment.view {
        View::Strategies => view.strategies(),
        View::Tiles => view.tiles(),
        View::Repeats => view.repeats(),
        View::Rates => view.rates(),
        View::Scaling => view.scaling(),
    };
    publish(record, (experiment.name, experiment.about), shown, NOT_KEPT, &options.output)
}

/// Writes the page and the plots of a record into the directory `name`, with `about` as its introduction, and
/// prints the tables.
///
/// # Errors
/// When files cannot be written.
pub(super) fn publish(
    record: &Record,
    (name, about): (&str, &str),
    (tables, notes, charts): Shown,
    not_kept: &[&str],
    output: &Path,
) -> Result<()> {
    let directory = output.join(name);
    let mut plots = Vec::new();
    for (suffix, chart) in charts {
        let file = format!("{name}{suffix}");
        plot::draw(&chart, &directory.join(&file))?;
        plots.push(format!("{file}.svg"));
    }
    let not_kept: Vec<String> = not_kept.iter().map(|&text| text.to_owned()).collect();
    let page =
        Page { record, about, tables: &tables, notes: &notes, not_kept: &not_kept, plots: &plots };
    let path = directory.join(format!("{name}.md"));
    std::fs::write(&path, page.to_string())?;
    for table in &tables {
        println!("{table}");
    }
    for note in &notes {
        println!("{note}\n");
    }
    println!("{}", written(&path, &plots));
    Ok(())
}

fn written(page: &Path, plots: &[String]) -> String {
    format!(
        "written: {} with {}, and the samples in JSON beside it",
        page.display(),
        plots.join(", ")
    )
}

/// A record, and the experiment that it is of.
pub(super) struct Found<'a> {
    pub(super) experiment: &'a Experiment,
    pub(super) record: &'a Record,
}

/// The tables of a page, notes on them, and charts with the suffixes of their files' names.
pub(super) type Shown = (Vec<Table>, Vec<String>, Vec<(&'static str, Chart)>);

/// The bound of a cell, or one of the bound's parts, by its name, in ms; NaN where it has none.
pub(super) fn part(cell: &Cell, name: &str) -> f64 {
    let bound = cell.bound.as_ref();
    match name {
        "bound" => bound.map_or(f64::NAN, |b| b.ms),
        part => bound.and_then(|b| b.parts.get(part)).copied().unwrap_or(f64::NAN),
    }
}

pub(super) fn shown(value: f64, digits: usize) -> String {
    if value.is_finite() { format!("{value:.digits$}") } else { "-".to_owned() }
}

pub(super) fn percent(value: f64) -> String {
    if value.is_finite() { format!("{:.1}%", value * 100.0) } else { "-".to_owned() }
}

pub(super) fn axis(label: &str) -> Axis {
    Axis { label: label.to_owned(), log: false, categories: None }
}

/// The environments and models that have cells, in the order in which they were measured.
pub(super) fn groups(record: &Record) -> Vec<(String, String)> {
    let mut groups = Vec::new();
    for cell in &record.cells {
        let mut parts = cell.key.split('/').map(str::to_owned);
        if let (Some(environment), Some(model)) = (parts.next(), parts.next())
            && !groups.contains(&(environment.clone(), model.clone()))
        {
            groups.push((environment, model));
        }
    }
    groups
}

/// A fact of a cell by its name; NaN where it has none of that name.
pub(super) fn fact(cell: &Cell, name: &str) -> f64 {
    cell.facts.get(name).copied().unwrap_or(f64::NAN)
}

impl Found<'_> {
    pub(super) fn cell(&self, environment: &str, model: &str, variant: &str) -> Option<&Cell> {
        let key = key(environment, model, variant);
        self.record.cells.iter().find(|cell| cell.key == key)
    }

    /// A table of the parts of each cell's latency, beside its bound.
    pub(super) fn spent(&self) -> Table {
        let mut table = Table::new(
            "Where the slowest device's time goes, ms (medians)",
            &[
                "cell",
                "latency",
                "bound",
                "strict bound",
                "schedule",
                "compute",
                "awaiting tiles",
                "between operations",
                "dispatch",
                "hidden",
                "links, CPU ms",
            ],
        );
        for cell in self.record.cells.iter().filter(|c| c.bound.is_some()) {
            let median = |name: &str| cell.spread(name).median;
            table.row([
                cell.key.clone(),
                shown(median("latency_ms"), 0),
                shown(part(cell, "bound"), 0),
                shown(part(cell, "strict_ms"), 0),
                shown(part(cell, "schedule_ms"), 0),
                shown(median("busy_ms"), 0),
                shown(median("awaiting_ms"), 0),
                shown(median("between_ms"), 0),
                shown(median("dispatch_ms"), 0),
                percent(median("hidden")),
                shown(median("wire_cpu_ms"), 0),
            ]);
        }
        table
    }

    fn tiles(&self) -> Shown {
        let mut table = Table::new(
            "Latency and hidden communication",
            &["environment", "tiles", "latency, ms", "schedule, ms", "bound, ms", "hidden, %"],
        );
        let (mut latency, mut hidden) = (Vec::new(), Vec::new());
        for (environment, model) in groups(self.record) {
            let (mut measured, mut schedule, mut bound, mut share) =
                (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for variant in self.experiment.variants {
                let cell = self.cell(&environment, &model, variant.name);
                let (Some(cell), Some(tiles)) = (cell, variant.tiles) else { continue };
                let hidden: Vec<f64> = cell.values("hidden").iter().map(|v| v * 100.0).collect();
                table.row([
                    environment.clone(),
                    variant.name.to_owned(),
                    figure(cell, "latency_ms"),
                    shown(part(cell, "schedule_ms"), 0),
                    shown(part(cell, "bound"), 0),
                    format!("{:.1}", Spread::of(&hidden)),
                ]);
                let x = f64::from(tiles);
                let point = |s: Spread| Point { x, y: s.median, low: s.low, high: s.high };
                let plain = |y: f64| Point { x, y, low: y, high: y };
                measured.push(point(cell.spread("latency_ms")));
                schedule.push(plain(part(cell, "schedule_ms")));
                bound.push(plain(part(cell, "bound")));
                share.push(point(Spread::of(&hidden)));
            }
            let named = |what: &str| format!("{environment}/{model}{what}");
            let line = |name: String, points: Vec<Point>, dashed: bool| Series {
                name,
                points: points.into_iter().filter(|p| p.y.is_finite()).collect(),
                dashed,
            };
            latency.push(line(named(""), measured, false));
            latency.push(line(named(", schedule"), schedule, true));
            latency.push(line(named(", bound"), bound, true));
            hidden.push(line(named(""), share, false));
        }
        let x = || Axis {
            label: "tiles of each device's rows".to_owned(),
            log: true,
            categories: None,
        };
        let chart = |title: &str, y: &str, series| Chart {
            title: title.to_owned(),
            x: x(),
            y: axis(y),
            kind: ChartKind::Lines { series },
        };
        let charts = vec![
            ("", chart("Latency over tiles", "ms", latency)),
            ("-hidden", chart("Communication hidden behind compute", "%", hidden)),
        ];
        let notes = vec![
            "*Hidden*: 1 - (compute lane idle while it awaits a tile) / (bytes received / shaped rate), of the worse device. With one tile every collective ends before the product that reads it begins.".to_owned(),
        ];
        (vec![table, self.spent()], notes, charts)
    }

    fn repeats(&self) -> Shown {
        let mut table =
            Table::new("Latency of runs from nothing", &["run", "latency, ms: median (range)"]);
        let (mut medians, mut bars) = (Vec::new(), Vec::new());
        for cell in &self.record.cells {
            let spread = cell.spread("latency_ms");
            if cell.outcome == Outcome::Measured && spread.n > 0 {
                medians.push(spread.median);
            }
            table.row([cell.key.clone(), figure(cell, "latency_ms")]);
            let label = cell.key.rsplit('/').next().unwrap_or_default().to_owned();
            bars.push(Group { label, bars: vec![latency_bar(0, cell)] });
        }
        let all = Spread::of(&medians);
        let notes = vec![format!(
            "Median of the {} medians: {all} ms; spread (largest - smallest) / median: {}.",
            all.n,
            percent(all.relative())
        )];
        let chart = Chart {
            title: "Latency of runs that were made anew".to_owned(),
            x: axis("run"),
            y: axis("ms"),
            kind: ChartKind::Bars { groups: bars, series: vec!["galaxy".to_owned()] },
        };
        (vec![table], notes, vec![("", chart)])
    }
}

pub(super) fn latency_bar(series: usize, cell: &Cell) -> Bar {
    let mark = Some(part(cell, "bound")).filter(|v| v.is_finite());
    Bar { mark, ..bar(series, cell, "latency_ms") }
}

/// The bar of a value, or a note on why there is none.
pub(super) fn bar(series: usize, cell: &Cell, value: &str) -> Bar {
    let spread = cell.spread(value);
    Bar {
        series,
        value: Some(spread.median).filter(|v| v.is_finite()),
        low: spread.low,
        high: spread.high,
        note: match &cell.outcome {
            Outcome::Measured if spread.n > 0 => None,
            _ => Some(figure(cell, value)),
        },
        ..Bar::default()
    }
}
