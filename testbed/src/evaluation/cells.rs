//! Access to the cells of a record by environment, model and variant.

use crate::{
    experiment::EXPERIMENTS,
    record::{Cell, LATENCY, Outcome, Record},
    report::{Table, figure},
};
use galaxy_common::Spread;
use std::fmt;

/// The text in place of a figure that nobody measured.
pub(super) const NOT_MEASURED: &str = "not measured";

/// The reason why there is no figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lack {
    /// There can be no figure: a side of it has too little memory, or there is no such plan.
    Impossible,
    /// The cell was not measured, or no sample of it counts.
    Missing,
}

/// A measured figure, or why there is none.
pub(super) type Figure = Result<Spread, Lack>;

/// The labels of a cell: its environment, model and variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Name<'a> {
    pub(super) environment: &'a str,
    pub(super) model: &'a str,
    pub(super) variant: &'a str,
}

impl<'a> Name<'a> {
    /// The name by the cell's labels, or by its key where it never ran. An environment's name may contain a
    /// `/`.
    pub(super) fn of(cell: &'a Cell) -> Self {
        let mut parts = cell.key.rsplitn(3, '/');
        let mut label = |name: &str| {
            let part = parts.next().unwrap_or_default();
            cell.labels.get(name).map_or(part, String::as_str)
        };
        let (variant, model) = (label("variant"), label("model"));
        Self { environment: label("environment"), model, variant }
    }

    /// The place where the cell was measured.
    pub(super) fn at(self) -> At<'a> {
        let (environment, rate) = place(self.environment);
        At { environment, rate, model: self.model }
    }
}

/// A place of measurement: an environment, the rate of its links where that is not the environment's own, and
/// a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct At<'a> {
    pub(super) environment: &'a str,
    /// The rate of the links in Mbit/s; none where it is the environment's own.
    pub(super) rate: Option<u32>,
    pub(super) model: &'a str,
}

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rate {
            Some(rate) => write!(f, "{}, {rate} Mbit/s, {}", self.environment, self.model),
            None => write!(f, "{}, {}", self.environment, self.model),
        }
    }
}

/// All combinations of environments, rates and models.
pub(super) fn grid<'a>(
    environments: &[&'a str],
    rates: &[Option<u32>],
    models: &[&'a str],
) -> Vec<At<'a>> {
    let mut grid = Vec::new();
    for &environment in environments {
        for &rate in rates {
            grid.extend(models.iter().map(|&model| At { environment, rate, model }));
        }
    }
    grid
}

/// The name of an environment without changes, and the rate in Mbit/s where a change sets it: `A-10Mbit-8GB`,
/// as cells have it, and `A@10Mbit/s,memory=8GB`, as it is asked for, are `A` and 10.
fn place(environment: &str) -> (&str, Option<u32>) {
    let mut parts = environment.split(['@', '-', ',']);
    let base = parts.next().unwrap_or_default();
    let rate = parts.find_map(|part| {
        let part = part.trim_end_matches("/s");
        let of = |unit: &str, times: u32| {
            part.strip_suffix(unit)?.trim().parse::<u32>().ok()?.checked_mul(times)
        };
        of("Mbit", 1).or_else(|| of("Gbit", 1000))
    });
    (base, rate)
}

/// The cells of a record; none where there is no record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cells<'a> {
    pub(super) record: Option<&'a Record>,
}

impl<'a> Cells<'a> {
    /// All cells, in the order of the record.
    pub(super) fn all(self) -> impl Iterator<Item = (Name<'a>, &'a Cell)> {
        let cells = self.record.into_iter().flat_map(|record| &record.cells);
        cells.map(|cell| (Name::of(cell), cell))
    }

    /// The cell of a variant at a place.
    pub(super) fn find(self, at: At<'_>, variant: &str) -> Option<&'a Cell> {
        let mut all = self.all();
        all.find(|(name, _)| name.at() == at && name.variant == variant).map(|(_, cell)| cell)
    }

    /// The places that have cells, each once.
    pub(super) fn places(self) -> Vec<At<'a>> {
        let mut places = Vec::new();
        for (name, _) in self.all() {
            if !places.contains(&name.at()) {
                places.push(name.at());
            }
        }
        places
    }

    /// The cell of this key.
    pub(super) fn named(self, key: &str) -> Option<&'a Cell> {
        self.record?.cells.iter().find(|cell| cell.key == key)
    }

    /// The number of devices of an environment; NaN where it is not known.
    pub(super) fn devices(self, at: At<'_>) -> f64 {
        let Some(record) = self.record else { return f64::NAN };
        let here = |environment: &str| place(environment) == (at.environment, at.rate);
        let known = self.all().filter(|(name, _)| here(name.environment));
        let mut known = known.map(|(_, cell)| fact(Some(cell), "devices"));
        let mut calibrated = record.calibrations.iter().filter(|(name, _)| here(name));
        let count = calibrated.next().map(|(_, calibration)| calibration.devices.len() as f64);
        known.find(|count| count.is_finite()).or(count).unwrap_or(f64::NAN)
    }

    /// The paper's figure for a variant at a place.
    pub(super) fn paper(self, at: At<'_>, variant: &str) -> Option<f64> {
        let record = self.record?;
        let kept = self.find(at, variant).and_then(|cell| cell.paper);
        let known = || EXPERIMENTS.iter().find(|e| e.name == record.experiment);
        kept.or_else(|| (known()?.paper)(at.environment, at.model))
    }

    /// A table of the latencies of all cells, beside their bounds.
    pub(super) fn every(self) -> Option<Table> {
        let record = self.record?;
        let title = format!("Every cell of {}", record.experiment);
        let columns =
            ["cell", "variant", "median (range), ms", "bound, ms", "of the bound", "plan"];
        let mut table = Table::new(&title, &columns);
        for (name, cell) in self.all() {
            let plan = cell.labels.get("plan").cloned().unwrap_or_default();
            table.row([
                name.at().to_string(),
                name.variant.to_owned(),
                latency(Some(cell)),
                shown(bound(Some(cell)), 0),
                percent(of_bound(Some(cell))),
                plan,
            ]);
        }
        Some(table)
    }
}

/// A value of a cell, over the samples that count.
pub(super) fn measured(cell: Option<&Cell>, value: &str) -> Figure {
    let cell = cell.ok_or(Lack::Missing)?;
    match &cell.outcome {
        Outcome::Refused { .. } | Outcome::OutOfMemory { .. } => Err(Lack::Impossible),
        Outcome::Failed { .. } => Err(Lack::Missing),
        Outcome::Measured => Some(cell.spread(value)).filter(|s| s.n > 0).ok_or(Lack::Missing),
    }
}

/// A value of one cell over that of another, multiplied by `times`, sample by sample.
pub(super) fn over(above: Option<&Cell>, below: Option<&Cell>, value: &str, times: f64) -> Figure {
    let sides = [measured(above, value), measured(below, value)];
    // A value that cannot be goes before one that is missing.
    for lack in [Lack::Impossible, Lack::Missing] {
        if sides.contains(&Err(lack)) {
            return Err(lack);
        }
    }
    let values = |cell: Option<&Cell>| cell.map(|cell| cell.values(value)).unwrap_or_default();
    let above: Vec<f64> = values(above).into_iter().map(|value| value * times).collect();
    Some(Spread::of_ratio(&above, &values(below))).filter(|s| s.n > 0).ok_or(Lack::Missing)
}

/// The latency of a cell as text, or the reason why there is none.
pub(super) fn latency(cell: Option<&Cell>) -> String {
    match cell {
        Some(cell) if cell.outcome != Outcome::Measured || !cell.samples.is_empty() => {
            figure(cell, LATENCY)
        }
        _ => NOT_MEASURED.to_owned(),
    }
}

/// The bound of a cell in ms; NaN where it has none.
pub(super) fn bound(cell: Option<&Cell>) -> f64 {
    cell.and_then(|cell| cell.bound.as_ref()).map_or(f64::NAN, |bound| bound.ms)
}

/// The bound of a cell over its measured latency; NaN where one of them is missing.
pub(super) fn of_bound(cell: Option<&Cell>) -> f64 {
    bound(cell) / measured(cell, LATENCY).map_or(f64::NAN, |spread| spread.median)
}

/// A fact of a cell by its name; NaN where it has none of that name.
pub(super) fn fact(cell: Option<&Cell>, name: &str) -> f64 {
    cell.and_then(|cell| cell.facts.get(name)).copied().unwrap_or(f64::NAN)
}

/// A figure as the text of a table's cell.
pub(super) fn text(figure: &Figure, digits: usize) -> String {
    match figure {
        Ok(spread) => format!("{spread:.digits$}"),
        Err(Lack::Impossible) => "-".to_owned(),
        Err(Lack::Missing) => NOT_MEASURED.to_owned(),
    }
}

pub(super) fn shown(value: f64, digits: usize) -> String {
    if value.is_finite() { format!("{value:.digits$}") } else { "-".to_owned() }
}

pub(super) fn percent(value: f64) -> String {
    if value.is_finite() { format!("{:.1}%", value * 100.0) } else { "-".to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::evaluation::fixtures::record;

    #[test]
    fn environment_names_are_parsed_into_name_and_rate() {
        for (name, known) in [
            ("A", ("A", None)),
            ("A-10Mbit-8GB", ("A", Some(10))),
            ("A@10Mbit/s,memory=8GB", ("A", Some(10))),
            ("F-1Gbit-8GB", ("F", Some(1000))),
            ("F-8GB", ("F", None)),
            ("", ("", None)),
        ] {
            assert_eq!(place(name), known, "{name}");
        }
    }

    #[test]
    fn a_cell_without_labels_is_named_by_its_key() {
        let mut record = record("table4", &[("A@10Mbit/s,memory=8GB/bert/auto", &[], None)]);
        let name = Name { environment: "A@10Mbit/s,memory=8GB", model: "bert", variant: "auto" };
        assert_eq!(Name::of(&record.cells[0]), name);
        let cell = &mut record.cells[0];
        cell.labels.insert("environment".to_owned(), "B".to_owned());
        assert_eq!(Name::of(cell), Name { environment: "B", ..name });
        cell.key = "slow".to_owned();
        assert_eq!(Name::of(cell), Name { environment: "B", model: "", variant: "slow" });
        assert_eq!(name.at().to_string(), "A, 10 Mbit/s, bert");
    }

    #[test]
    fn ratios_distinguish_refused_cells_from_missing_cells() {
        let mut record = record(
            "table4",
            &[
                ("A/b/slow", &[6.0, 8.0], None),
                ("A/b/fast", &[2.0, 4.0], None),
                ("A/b/x", &[], None),
            ],
        );
        record.cells[2].outcome = Outcome::Refused { why: "no heads left".to_owned() };
        let cells = Cells { record: Some(&record) };
        let at = At { environment: "A", rate: None, model: "b" };
        let [slow, fast, refused] = ["slow", "fast", "x"].map(|name| cells.find(at, name));
        let ratio = over(slow, fast, LATENCY, 2.0).unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high), (14.0 / 3.0, 4.0, 6.0));
        assert_eq!(over(slow, refused, LATENCY, 1.0), Err(Lack::Impossible));
        assert_eq!(over(None, refused, LATENCY, 1.0), Err(Lack::Impossible));
        assert_eq!(over(slow, None, LATENCY, 1.0), Err(Lack::Missing));
        assert_eq!(over(slow, fast, "rate", 1.0), Err(Lack::Missing));
        assert_eq!((latency(None), latency(refused)), (NOT_MEASURED.into(), "refused".into()));
        assert_eq!(cells.places(), [at]);
        assert!(Cells { record: None }.every().is_none());
        assert!(cells.every().unwrap().to_string().contains("| A, b | slow    | 7.000 (6.000"));
    }
}
