//! Shows the planner's predictions beside what other experiments measured, and `auto` beside all other
//! strategies.

use super::{
    AUTO_NAME as AUTO, Experiment, Options, PLANNED, USUAL,
    show::{
        BOUND, Found, NOT_KEPT, Shown, axis, groups, latency_bar, part, percent, publish, shown,
    },
};
use crate::{
    plot::{Axis, Chart, ChartKind, Group, Point, Series},
    record::{Cell, Outcome, PREDICTED, Record},
    report::{Table, figure},
};
use anyhow::{Context, Result};
use galaxy_common::Spread;
use serde_json::json;

/// The experiment's name.
pub(super) const NAME: &str = "planner";
/// One line on what the experiment shows.
pub(super) const ABOUT: &str = "what the planner predicts and what is measured, of table4 and heterogeneous; auto against the best other";
/// The experiments that measure every strategy as the planner makes it.
const OF: [&str; 2] = ["table4", "heterogeneous"];
/// The errors that predictions should stay within, and must stay within.
const BOUNDS: [f64; 2] = [0.1, 0.2];

/// A cell that was predicted and measured.
struct Pair<'a> {
    variant: &'a str,
    predicted: f64,
    measured: Spread,
}

impl Pair<'_> {
    /// The predicted latency over the measured one.
    fn ratio(&self) -> f64 {
        self.predicted / self.measured.median
    }
}

/// Shows the predictions of all cells that were measured.
///
/// # Errors
/// When nothing was measured yet, or files cannot be written.
pub(super) fn run(options: &Options) -> Result<()> {
    let path = |name: &str| options.output.join(name).join(format!("{name}.json"));
    let there: Vec<&str> = OF.into_iter().filter(|name| path(name).is_file()).collect();
    let records: Vec<Record> =
        there.iter().map(|name| Record::read(&path(name))).collect::<Result<_>>()?;
    let mut records = records.into_iter();
    let mut all = records.next().with_context(|| {
        format!("nothing was measured yet; first: galaxy-testbed run {}", OF.join(", or run "))
    })?;
    for record in records {
        all.cells.extend(record.cells);
        all.calibrations.extend(record.calibrations);
        for commit in record.commits {
            if !all.commits.contains(&commit) {
                all.commits.push(commit);
            }
        }
    }
    let planned = |cell: &Cell| {
        let variant = cell.labels.get("variant").map_or("", String::as_str);
        PLANNED.iter().any(|known| known.name == variant)
    };
    all.cells.retain(planned);
    all.experiment = NAME.to_owned();
    all.settings = json!({ "of": there });
    let experiment = Experiment { name: NAME, about: ABOUT, ..USUAL };
    let found = Found { experiment: &experiment, record: &all };
    publish(&all, (NAME, ABOUT), found.predictions(), NOT_KEPT, &options.output)
}

fn pair<'a>(cell: &Cell, variant: &'a str) -> Option<Pair<'a>> {
    let measured = cell.spread("latency_ms");
    let predicted = cell.facts.get(PREDICTED).copied().filter(|ms| ms.is_finite())?;
    let done = cell.outcome == Outcome::Measured && measured.n > 0;
    done.then_some(Pair { variant, predicted, measured })
}

impl Found<'_> {
    fn predictions(&self) -> Shown {
        let names: Vec<&str> = self.experiment.variants.iter().map(|v| v.name).collect();
        let mut each = Table::new(
            "Predicted and measured",
            &[
                "environment",
                "model",
                "variant",
                "measured, ms",
                "bound, ms",
                "predicted, ms",
                "error",
                "plan",
            ],
        );
        let mut columns = vec!["environment", "model", "auto, ms", "best other", "of the best"];
        let others: Vec<&str> = names.iter().copied().filter(|name| *name != AUTO).collect();
        let over: Vec<String> = others.iter().map(|name| format!("{name} over auto")).collect();
        columns.extend(over.iter().map(String::as_str));
        let mut against = Table::new("auto against the others", &columns);
        let (mut pairs, mut bars, mut of_best) = (Vec::new(), Vec::new(), Vec::new());
        for (environment, model) in groups(self.record) {
            let cell = |name: &str| self.cell(&environment, &model, name);
            let mut group = Vec::new();
            for (i, name) in names.iter().copied().enumerate() {
                let Some(cell) = cell(name) else { continue };
                group.push(latency_bar(i, cell));
                let found = pair(cell, name);
                let predicted = cell.facts.get(PREDICTED).copied().unwrap_or(f64::NAN);
                let error = found.as_ref().map_or(f64::NAN, |pair| pair.ratio() - 1.0);
                each.row([
                    environment.clone(),
                    model.clone(),
                    name.to_owned(),
                    figure(cell, "latency_ms"),
                    shown(part(cell, "bound"), 1),
                    shown(predicted, 1),
                    percent(error),
                    cell.labels.get("plan").cloned().unwrap_or_default(),
                ]);
                pairs.extend(found);
            }
            if group.iter().any(|bar| bar.value.is_some()) {
                bars.push(Group { label: format!("{environment}/{model}"), bars: group });
            }
            let values =
                |name: &str| cell(name).map(|cell| cell.values("latency_ms")).unwrap_or_default();
            let auto = values(AUTO);
            let median = |name: &str| Spread::of(&values(name)).median;
            let best = others.iter().copied().filter(|name| median(name).is_finite());
            let Some(best) = best.min_by(|a, b| median(a).total_cmp(&median(b))) else { continue };
            if auto.is_empty() {
                continue;
            }
            let of = Spread::of_ratio(&auto, &values(best));
            of_best.push(of.median);
            let ratio = |name: &&str| format!("{:.3}", Spread::of_ratio(&values(name), &auto));
            let row = [
                environment.clone(),
                model.clone(),
                cell(AUTO).map_or("-".to_owned(), |cell| figure(cell, "latency_ms")),
                best.to_owned(),
                format!("{of:.3}"),
            ];
            against.row(row.into_iter().chain(others.iter().map(ratio)));
        }
        let series = names.iter().map(|&name| name.to_owned()).collect();
        let charts = vec![
            ("", scatter(&names, &pairs)),
            (
                "-latency",
                Chart {
                    title: "Latency of every strategy".to_owned(),
                    x: axis("environment/model"),
                    y: axis("ms"),
                    kind: ChartKind::Bars { groups: bars, series },
                },
            ),
        ];
        let mut notes = vec![
            "*Predicted*: the simulator's latency of the plan, from profiles measured under the devices' quotas: before the first placement of a model its workers measure themselves, and their links once for the testbed. *Error*: predicted over the median measured, less one.".to_owned(),
        ];
        let worst = of_best.iter().copied().fold(f64::NAN, f64::max);
        if worst.is_finite() {
            let count = of_best.len();
            notes.push(format!(
                "`auto` over the best other, at worst: {worst:.3}, of {count} pairs of environment and model."
            ));
        }
        notes.push(BOUND.to_owned());
        (vec![each, errors(&names, &pairs), against], notes, charts)
    }
}

/// The errors of predictions, by strategy and over all.
fn errors(names: &[&str], pairs: &[Pair<'_>]) -> Table {
    let mut table = Table::new(
        "Predicted over measured",
        &["variant", "cells", "predicted / measured", "largest error", "within 10%", "within 20%"],
    );
    let mut row = |name: &str, of: &[&Pair<'_>]| {
        let ratios: Vec<f64> = of.iter().map(|pair| pair.ratio()).collect();
        let off = ratios.iter().map(|ratio| (ratio - 1.0).abs());
        let largest = off.clone().fold(f64::NAN, f64::max);
        let within = BOUNDS.map(|bound| {
            percent(off.clone().filter(|off| *off <= bound).count() as f64 / ratios.len() as f64)
        });
        let [ten, twenty] = within;
        let spread = format!("{:.3}", Spread::of(&ratios));
        table.row([
            name.to_owned(),
            ratios.len().to_string(),
            spread,
            percent(largest),
            ten,
            twenty,
        ]);
    };
    for &name in names {
        row(name, &pairs.iter().filter(|pair| pair.variant == name).collect::<Vec<_>>());
    }
    row("all", &pairs.iter().collect::<Vec<_>>());
    table
}

/// The chart of predicted over measured latency, a point for each cell, and the line where both are equal.
fn scatter(names: &[&str], pairs: &[Pair<'_>]) -> Chart {
    let point = |x: f64, y: f64| Point { x, y, low: y, high: y };
    let mut series: Vec<Series> = Vec::new();
    for &name in names {
        let of = pairs.iter().filter(|pair| pair.variant == name);
        // A NaN point breaks the line.
        let points = of.flat_map(|pair| {
            let x = pair.measured.median;
            [point(x, pair.predicted), point(x, f64::NAN)]
        });
        series.push(Series { name: name.to_owned(), points: points.collect(), dashed: false });
    }
    let measured = pairs.iter().map(|pair| pair.measured.median);
    let (low, high) =
        measured.fold((f64::INFINITY, 0f64), |(low, high), ms| (low.min(ms), high.max(ms)));
    if low < high {
        let points = vec![point(low, low), point(high, high)];
        series.push(Series { name: "equal".to_owned(), points, dashed: true });
    }
    let axis = |label: &str| Axis { label: label.to_owned(), log: true, categories: None };
    Chart {
        title: "Predicted against measured latency".to_owned(),
        x: axis("measured, ms"),
        y: axis("predicted, ms"),
        kind: ChartKind::Lines { series },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        plot,
        record::{Bound, Verdict},
    };
    use std::collections::BTreeMap;

    #[test]
    fn predictions_are_shown_with_their_error_against_measurements() {
        let mut record = Record::new("planner", true, serde_json::json!({})).unwrap();
        let mut add = |variant: &str, predicted: f64, measured: [f64; 2]| {
            let cell = record.cell(&format!("A/bert/{variant}"), &[("plan", "somehow")]);
            cell.facts.insert(PREDICTED.to_owned(), predicted);
            for ms in measured {
                let values = [("latency_ms".to_owned(), ms)].into_iter().collect();
                cell.add(values, Verdict::Valid);
            }
        };
        add("local", 100.0, [99.0, 101.0]);
        add("galaxy", 65.0, [50.0, 50.0]);
        add("auto", 43.9, [40.0, 40.0]);
        let bound = Bound { ms: 45.0, parts: BTreeMap::new() };
        record.cell("A/bert/galaxy", &[]).bound = Some(bound);
        let cell = record.cell("A/bert/pipeline", &[]);
        cell.outcome = Outcome::Refused { why: "too small".into() };
        let found = Found { experiment: &USUAL, record: &record };
        let (tables, notes, charts) = found.predictions();
        let text: Vec<String> = tables.iter().map(ToString::to_string).collect();
        let row = |table: &str, begin: &str| {
            let line = table.lines().find(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                words.join(" ").starts_with(begin)
            });
            line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let galaxy = row(&text[0], "| A | bert | galaxy |");
        assert!(galaxy.contains("| 45.0 | 65.0 | 30.0% |"), "{}", text[0]);
        assert!(row(&text[0], "| A | bert | pipeline |").contains("| refused |"), "{}", text[0]);
        // One of three is off by more than 20%, one by 10%.
        assert!(row(&text[1], "| all | 3 |").ends_with("| 66.7% | 66.7% |"), "{}", text[1]);
        assert!(row(&text[2], "| A | bert |").contains("| galaxy | 0.800"), "{}", text[2]);
        assert!(notes[1].contains("at worst: 0.800, of 1 pairs"), "{notes:?}");
        let directory = tempfile::tempdir().unwrap();
        for (suffix, chart) in charts {
            plot::draw(&chart, &directory.path().join(format!("planner{suffix}"))).unwrap();
        }
    }
}
