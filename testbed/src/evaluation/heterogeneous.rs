//! `auto` beside `megatron` and `sequence` on heterogeneous devices (Galaxy, Fig. 9).

use super::{
    Records, Shown,
    cells::{
        At, Cells, Figure, Lack, Name, bound, grid, latency, measured, of_bound, over, percent,
        shown, text,
    },
    goal::{Goal, Rule, Unit},
};
use crate::{
    record::{Cell, LATENCY},
    report::Table,
};

/// The name of the record that the section shows.
pub(super) const RECORD: &str = "heterogeneous";
/// The paper's environments, which are judged.
const JUDGED: [&str; 3] = ["D", "E", "F"];
/// Environments of our own, which are shown and not judged.
const OTHERS: [&str; 3] = ["G", "H", "I"];
const MODELS: [&str; 3] = ["distilbert", "bert-large", "gpt2-large"];
/// The variants that `auto` is compared with, as the planner makes them.
const PLANNED: [&str; 2] = ["megatron", "sequence"];
/// The same variants in equal parts, as the paper has them.
const EQUAL: [&str; 2] = ["megatron-equal", "sequence-equal"];
/// The least ratio in every cell.
const EVERYWHERE: f64 = 1.3;
/// The least ratio in the best cell.
const AT_BEST: f64 = 2.5;

/// The faster of two variants, among those that fit in memory.
fn better<'a>(cells: Cells<'a>, at: At<'_>, names: [&str; 2]) -> Result<&'a Cell, Lack> {
    let mut best: Option<(f64, &Cell)> = None;
    for name in names {
        let cell = cells.find(at, name);
        match measured(cell, LATENCY) {
            Err(Lack::Missing) => return Err(Lack::Missing),
            Err(Lack::Impossible) => {}
            Ok(spread) => {
                let found = cell.map(|cell| (spread.median, cell));
                let faster = |(ms, _): &(f64, &Cell)| best.is_none_or(|(least, _)| *ms < least);
                best = found.filter(faster).or(best);
            }
        }
    }
    best.map(|(_, cell)| cell).ok_or(Lack::Impossible)
}

/// The name and the latency of the better variant, as text.
fn named(cell: Result<&Cell, Lack>) -> String {
    match cell {
        Ok(cell) => format!("{} {}", Name::of(cell).variant, latency(Some(cell))),
        Err(Lack::Impossible) => "neither fits".to_owned(),
        Err(Lack::Missing) => latency(None),
    }
}

fn ratio(cell: Result<&Cell, Lack>, auto: Option<&Cell>) -> Figure {
    over(Some(cell?), auto, LATENCY, 1.0)
}

pub(super) fn shown_of(records: &Records) -> Shown {
    let cells = records.cells(RECORD);
    let goals = |what, at_best| {
        let goal = |what, paper, rule| Goal::new(what, paper, rule, Unit::Times);
        [goal(what, "1.3", Rule::Every(EVERYWHERE)), goal(at_best, "2.5", Rule::Any(AT_BEST))]
    };
    let mut planned_goals = goals(
        "heterogeneous devices, D to F: `auto` over the better of `megatron` and `sequence` that fits",
        "the same, at best, heterogeneous devices",
    );
    let mut equal_goals = goals(
        "heterogeneous devices, D to F: `auto` over the better of both in equal parts, as in the paper",
        "the same, at best, heterogeneous devices in equal parts",
    );
    let mut table = Table::new(
        "`auto` beside the better of `megatron` and `sequence` that fits in memory",
        &[
            "environment",
            "model",
            "auto, ms: median (range)",
            "its bound, ms",
            "of the bound",
            "better of the two, ms",
            "it / auto",
            "the bounds' ratio",
            "of it",
            "better in equal parts, ms",
            "it / auto",
            "the paper's",
        ],
    );
    let environments: Vec<&str> = JUDGED.into_iter().chain(OTHERS).collect();
    for at in grid(&environments, &[None], &MODELS) {
        let auto = cells.find(at, "auto");
        let [planned, equal] = [PLANNED, EQUAL].map(|names| better(cells, at, names));
        let [over_planned, over_equal] = [planned, equal].map(|cell| ratio(cell, auto));
        let judged = JUDGED.contains(&at.environment);
        if judged {
            let median = |figure: &Figure| figure.map(|spread| spread.median);
            planned_goals.iter_mut().for_each(|goal| goal.add(at, median(&over_planned)));
            equal_goals.iter_mut().for_each(|goal| goal.add(at, median(&over_equal)));
        }
        let allowed = bound(planned.ok()) / bound(auto);
        table.row([
            at.environment.to_owned(),
            at.model.to_owned(),
            latency(auto),
            shown(bound(auto), 0),
            percent(of_bound(auto)),
            named(planned),
            text(&over_planned, 2),
            shown(allowed, 2),
            percent(over_planned.map_or(f64::NAN, |ratio| ratio.median) / allowed),
            named(equal),
            text(&over_equal, 2),
            if judged { "1.3 to 2.5" } else { "-" }.to_owned(),
        ]);
    }
    Shown {
        goals: planned_goals.into_iter().chain(equal_goals).collect(),
        tables: vec![table],
        every: cells.every().into_iter().collect(),
        ..Shown::default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        evaluation::fixtures::{of, record, records},
        record::Outcome,
    };

    fn reached(records: &Records) -> Vec<String> {
        shown_of(records).goals.iter().map(Goal::reached).collect()
    }

    #[test]
    fn auto_is_compared_with_the_fastest_baseline_that_fits() {
        let mut found = record(
            RECORD,
            &[
                ("D/distilbert/megatron", &[260.0], None),
                ("D/distilbert/sequence", &[120.0], None),
                ("D/distilbert/auto", &[100.0], None),
                ("E/distilbert/megatron", &[260.0], None),
                ("E/distilbert/sequence", &[], None),
                ("E/distilbert/auto", &[100.0], None),
                ("E/distilbert/megatron-equal", &[300.0], None),
                ("E/distilbert/sequence-equal", &[290.0], None),
                ("G/distilbert/megatron", &[100.0], None),
                ("G/distilbert/sequence", &[100.0], None),
                ("G/distilbert/auto", &[100.0], None),
            ],
        );
        found.cells[4].outcome = Outcome::Refused { why: "too large".to_owned() };
        let found = of(found);
        let part = "in part: 1 of 2 cells; 7 of 9 cells not measured";
        let yes = "yes, where measured; 8 of 9 cells not measured";
        assert_eq!(reached(&found), [part, "yes", yes, "yes"]);
        let table = shown_of(&found).tables[0].to_string();
        assert!(table.contains("sequence 120.0 "), "{table}");
        assert!(table.contains("sequence-equal 290.0 "), "{table}");
    }

    #[test]
    fn there_is_no_comparison_where_no_baseline_fits() {
        let mut found = record(
            RECORD,
            &[("D/b/megatron", &[], None), ("D/b/sequence", &[], None), ("D/b/auto", &[1.0], None)],
        );
        for cell in &mut found.cells[..2] {
            cell.outcome = Outcome::Refused { why: "too large".to_owned() };
        }
        let at = At { environment: "D", rate: None, model: "b" };
        let cells = Cells { record: Some(&found) };
        assert_eq!(better(cells, at, PLANNED).unwrap_err(), Lack::Impossible);
        assert_eq!(better(cells, at, EQUAL).unwrap_err(), Lack::Missing);
        assert_eq!(named(better(cells, at, PLANNED)), "neither fits");
        assert_eq!(reached(&records("table4", &[])), ["not measured"; 4]);
    }
}
