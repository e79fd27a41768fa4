//! `auto` beside every other strategy, and what was predicted beside what was measured.

use super::{
    Records, Shown,
    cells::{At, Cells, fact, measured, over, percent, shown, text},
};
use crate::{
    record::{LATENCY, PREDICTED},
    report::Table,
};
use galaxy_common::Spread;

/// The names of the records that have plans of the planner.
pub(super) const RECORDS: &[&str] = &["planner", "table4", "heterogeneous", "bandwidth"];
const AUTO: &str = "auto";
/// The strategies that `auto` is compared with.
const OTHERS: [&str; 5] = ["local", "megatron", "sequence", "pipeline", "galaxy"];
/// The errors that predictions should stay within, and must stay within.
const ERRORS: [f64; 2] = [0.1, 0.2];
/// The highest ratio of the latency of `auto` to that of the best other strategy.
const OF_BEST: f64 = 1.05;

/// The errors of a record's predictions, as shares of what was measured and without their signs.
fn errors(cells: Cells<'_>) -> Vec<f64> {
    let off = |cell| {
        let measured = measured(Some(cell), LATENCY).ok()?.median;
        Some((fact(Some(cell), PREDICTED) / measured - 1.0).abs()).filter(|off| off.is_finite())
    };
    cells.all().filter_map(|(_, cell)| off(cell)).collect()
}

/// The latency of `auto` over that of the best other strategy, and the name of that strategy.
fn of_best(cells: Cells<'_>, at: At<'_>) -> Option<(Spread, &'static str)> {
    let auto = cells.find(at, AUTO);
    let found = OTHERS.into_iter().filter_map(|name| {
        let cell = cells.find(at, name)?;
        Some((measured(Some(cell), LATENCY).ok()?.median, cell, name))
    });
    let (_, best, name) = found.min_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
    Some((over(auto, Some(best), LATENCY, 1.0).ok()?, name))
}

fn share(values: &[f64], within: f64) -> f64 {
    values.iter().filter(|value| **value <= within).count() as f64 / values.len() as f64
}

pub(super) fn shown_of(records: &Records) -> Shown {
    let mut table = Table::new(
        "Predictions, and `auto` over the best other strategy, by record",
        &[
            "record",
            "cells predicted",
            "within 10%",
            "within 20%",
            "largest error",
            "auto over the best other: median (range)",
            "at most 1.05",
            "worst",
        ],
    );
    let mut lines = Vec::new();
    for record in RECORDS {
        let cells = records.cells(record);
        let errors = errors(cells);
        if errors.is_empty() {
            continue;
        }
        let places = cells.places();
        let found: Vec<(At<'_>, Spread, &str)> = places
            .iter()
            .filter_map(|at| of_best(cells, *at).map(|(of, name)| (*at, of, name)))
            .collect();
        let ratios: Vec<f64> = found.iter().map(|(_, of, _)| of.median).collect();
        let all = Spread::of(&ratios);
        let worst = found.iter().max_by(|(_, a, _), (_, b, _)| a.median.total_cmp(&b.median));
        let worst = worst.map(|(at, of, name)| format!("{} ({at}: {name})", text(&Ok(*of), 3)));
        let [ten, twenty] = ERRORS.map(|within| percent(share(&errors, within)));
        let largest = percent(errors.iter().copied().fold(f64::NAN, f64::max));
        let within =
            format!("{} of {}", ratios.iter().filter(|of| **of <= OF_BEST).count(), ratios.len());
        lines.push(format!(
            "`{record}`: {twenty} of {} predictions within 20%; `auto` over the best other strategy {}, at most {OF_BEST} in {within}",
            errors.len(),
            shown(all.median, 3),
        ));
        table.row([
            (*record).to_owned(),
            errors.len().to_string(),
            ten,
            twenty,
            largest,
            format!("{all:.3}"),
            within,
            worst.unwrap_or("-".to_owned()),
        ]);
    }
    Shown { lines, tables: vec![table], ..Shown::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::fixtures::{of, record};

    #[test]
    fn auto_is_compared_with_the_best_other_strategy() {
        let mut found = record(
            "table4",
            &[
                ("A/b/local", &[100.0], None),
                ("A/b/galaxy", &[80.0], None),
                ("A/b/auto", &[84.0], None),
                ("B/b/local", &[50.0], None),
                ("B/b/auto", &[55.0], None),
                ("C/b/auto", &[55.0], None),
            ],
        );
        for (cell, predicted) in found.cells.iter_mut().zip([100.0, 92.0, 88.2, 65.0]) {
            cell.facts.insert(PREDICTED.to_owned(), predicted);
        }
        let found = shown_of(&of(found));
        assert_eq!(
            found.lines,
            [
                "`table4`: 75.0% of 4 predictions within 20%; `auto` over the best other strategy 1.075, at most 1.05 in 1 of 2"
            ]
        );
        let table = found.tables[0].to_string();
        assert!(table.contains("1.100 (B, b: local)"), "{table}");
        assert!(table.contains(" 50.0% "), "{table}");
    }

    #[test]
    fn records_without_predictions_give_no_lines() {
        assert!(shown_of(&Records::default()).lines.is_empty());
        let found = of(record("table4", &[("A/b/local", &[100.0], None)]));
        assert!(shown_of(&found).lines.is_empty());
    }
}
