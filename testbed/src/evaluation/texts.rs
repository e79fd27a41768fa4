//! Batched texts per second, beside what the devices do alone.

use super::{
    Records, Shown,
    cells::{At, Cells, Figure, Lack, bound, fact, measured, percent, shown, text},
    goal::{Goal, Rule, Unit},
};
use crate::{
    record::Cell,
    report::{Table, figure},
};
use galaxy_common::Spread;

/// The name of the record that the section shows.
pub(super) const RECORD: &str = "embed";
/// The variant of all devices together, with exact values on links.
const TOGETHER: &str = "auto";
/// The variant with half precision on links, which is lossy: the goal is not about it.
const HALF: &str = "auto-f16";
/// The prefix of a variant that is one device alone, before the device's name.
const ALONE: &str = "alone-";
/// The name of the value that is measured.
const RATE: &str = "texts_per_s";
/// The least share of the sum of what all devices do alone.
const OF_SUM: f64 = 0.85;

/// The number of texts at once: a fact or a label of a cell.
fn texts(cell: &Cell) -> Option<u32> {
    let label = || cell.labels.get("texts").and_then(|texts| texts.parse().ok());
    let known = Some(fact(Some(cell), "texts")).filter(|texts| texts.is_finite());
    known.map(|texts| texts as u32).or_else(label)
}

/// The texts per second that all devices do alone, added up: of as many texts at once, or of any number where
/// the cell does not say.
fn sum(cells: Cells<'_>, at: At<'_>, count: Option<u32>) -> Result<f64, Lack> {
    let here = cells.all().filter(|(name, cell)| {
        let same = texts(cell).is_none_or(|texts| Some(texts) == count);
        name.at() == at && name.variant.starts_with(ALONE) && same
    });
    let mut sum = Err(Lack::Missing);
    for (_, cell) in here {
        match measured(Some(cell), RATE) {
            Ok(alone) => sum = Ok(sum.unwrap_or(0.0) + alone.median),
            // A device that cannot run the model alone adds nothing.
            Err(Lack::Impossible) => {}
            Err(Lack::Missing) => return Err(Lack::Missing),
        }
    }
    sum
}

/// The texts per second of the devices together, over the sum.
fn of_sum(together: &Cell, sum: Result<f64, Lack>) -> Figure {
    measured(Some(together), RATE)?;
    let sum = sum?;
    Ok(Spread::of(&together.values(RATE).iter().map(|rate| rate / sum).collect::<Vec<_>>()))
}

pub(super) fn shown_of(records: &Records) -> Shown {
    let cells = records.cells(RECORD);
    let mut goal = Goal::new(
        "texts per second of three devices, 1 to 64 at once: of the sum of each alone",
        "-",
        Rule::Every(OF_SUM),
        Unit::Share,
    );
    let mut table = Table::new(
        "Texts per second: all devices together, and the sum of what each does alone",
        &[
            "environment",
            "model",
            "on links",
            "texts at once",
            "together: median (range)",
            "sum of each alone",
            "of the sum",
            "bound, ms",
        ],
    );
    for (name, cell) in cells.all() {
        let links = match name.variant {
            TOGETHER => "f32",
            HALF => "f16",
            _ => continue,
        };
        let (at, count) = (name.at(), texts(cell));
        let alone = sum(cells, at, count);
        let of = of_sum(cell, alone);
        let at_once = count.map_or("-".to_owned(), |count| count.to_string());
        if name.variant == TOGETHER {
            goal.add(format!("{at}, {at_once} at once"), of.map(|of| of.median));
        }
        table.row([
            name.environment.to_owned(),
            name.model.to_owned(),
            links.to_owned(),
            at_once,
            figure(cell, RATE),
            shown(alone.unwrap_or(f64::NAN), 2),
            match of {
                Ok(of) => percent(of.median),
                Err(_) => text(&of, 2),
            },
            shown(bound(Some(cell)), 0),
        ]);
    }
    Shown { goals: vec![goal], tables: vec![table], ..Shown::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        evaluation::fixtures::{of, record},
        record::{Record, Verdict},
    };
    use std::collections::BTreeMap;

    /// A record with these cells: variant, texts at once, texts per second.
    fn made(cells: &[(&str, u32, f64)]) -> Record {
        let mut record = record(RECORD, &[]);
        for (variant, texts, rate) in cells {
            let count = texts.to_string();
            let labels = [("environment", "home"), ("model", "minilm"), ("variant", *variant)];
            let cell = record.cell(&format!("home/minilm/{variant}/{count}"), &labels);
            cell.facts.insert("texts".to_owned(), f64::from(*texts));
            cell.add(BTreeMap::from([(RATE.to_owned(), *rate)]), Verdict::Valid);
        }
        record
    }

    fn reached(record: Record) -> String {
        shown_of(&of(record)).goals[0].reached()
    }

    #[test]
    fn the_cluster_rate_is_compared_with_the_sum_of_single_devices() {
        let alone: [(&str, u32, f64); 2] = [("alone-a", 1, 6.0), ("alone-b", 1, 4.0)];
        let with = |rate| made(&[alone[0], alone[1], ("auto", 1, rate)]);
        assert_eq!(reached(with(8.5)), "yes");
        assert_eq!(reached(with(8.4)), "no");
        // A lossy variant is shown, and reaches no goal.
        let half = made(&[alone[0], alone[1], ("auto", 1, 8.4), ("auto-f16", 1, 9.0)]);
        let shown = shown_of(&of(half));
        assert_eq!(shown.goals[0].reached(), "no");
        assert!(shown.tables[0].to_string().contains("90.0%"), "{}", shown.tables[0]);
        let mut more = vec![("auto", 1, 9.0), ("auto", 64, 9.0)];
        more.extend(alone);
        let missing = "yes, where measured; 1 of 2 cells not measured";
        assert_eq!(reached(made(&more)), missing, "nobody was measured alone with 64");
        let shown = shown_of(&of(made(&more))).tables[0].to_string();
        assert!(shown.contains(" 90.0% "), "{shown}");
    }

    #[test]
    fn goals_without_a_record_are_not_measured() {
        let found = shown_of(&Records::default());
        assert_eq!(found.goals[0].reached(), "not measured");
    }
}
