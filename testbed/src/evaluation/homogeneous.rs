//! `auto` beside `megatron` on homogeneous devices (Galaxy, Table IV).

use super::{
    Records, Shown,
    cells::{bound, grid, latency, of_bound, over, percent, shown, text},
    goal::{Goal, Rule, Unit},
};
use crate::{record::LATENCY, report::Table};

/// The name of the record that the section shows.
pub(super) const RECORD: &str = "table4";
const ENVIRONMENTS: [&str; 3] = ["A", "B", "C"];
const MODELS: [&str; 5] = ["distilbert", "bert-large", "gpt2-large", "opt-1.3b", "opt-2.7b"];
/// The least share of the ratio that the bounds allow.
const OF_BOUND: f64 = 0.95;
/// The least ratio that one cell of B or C must reach.
const RATIO: f64 = 1.5;

/// The paper's speedup over sequence parallelism; NaN where sequence parallelism was out of memory.
fn over_sequence(environment: &str, model: &str) -> f64 {
    match (environment, model) {
        ("A", "distilbert") => 1.08,
        ("A", "bert-large") => 1.09,
        ("B", "bert-large") => 1.11,
        _ => f64::NAN,
    }
}

pub(super) fn shown_of(records: &Records) -> Shown {
    let cells = records.cells(RECORD);
    let mut of_bounds = Goal::new(
        "homogeneous devices: `auto` over `megatron`, of what the bounds allow",
        "-",
        Rule::Every(OF_BOUND),
        Unit::Share,
    );
    let mut ratios = Goal::new(
        "homogeneous devices: `auto` over `megatron` in B or C",
        "1.28 to 1.46",
        Rule::Any(RATIO),
        Unit::Times,
    );
    let mut table = Table::new(
        "`auto` beside `megatron`, 125 Mbit/s",
        &[
            "environment",
            "model",
            "auto, ms: median (range)",
            "its bound, ms",
            "of the bound",
            "megatron, ms",
            "megatron / auto",
            "the bounds' ratio",
            "of it",
            "the paper's",
            "sequence / auto",
            "the paper's over sequence",
        ],
    );
    for at in grid(&ENVIRONMENTS, &[None], &MODELS) {
        let [auto, megatron, sequence] =
            ["auto", "megatron", "sequence"].map(|name| cells.find(at, name));
        let ratio = over(megatron, auto, LATENCY, 1.0);
        let allowed = bound(megatron) / bound(auto);
        let of = ratio.map(|ratio| ratio.median / allowed);
        of_bounds.add(at, of);
        if at.environment != "A" {
            ratios.add(at, ratio.map(|ratio| ratio.median));
        }
        table.row([
            at.environment.to_owned(),
            at.model.to_owned(),
            latency(auto),
            shown(bound(auto), 0),
            percent(of_bound(auto)),
            latency(megatron),
            text(&ratio, 2),
            shown(allowed, 2),
            percent(of.unwrap_or(f64::NAN)),
            shown(cells.paper(at, "auto").unwrap_or(f64::NAN), 2),
            text(&over(sequence, auto, LATENCY, 1.0), 2),
            shown(over_sequence(at.environment, at.model), 2),
        ]);
    }
    Shown {
        goals: vec![of_bounds, ratios],
        tables: vec![table],
        every: cells.every().into_iter().collect(),
        ..Shown::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::fixtures::records;

    fn reached(records: &Records) -> Vec<String> {
        shown_of(records).goals.iter().map(Goal::reached).collect()
    }

    #[test]
    fn the_measured_speedup_is_compared_with_the_speedup_of_the_bounds() {
        let found = records(
            RECORD,
            &[
                ("A/bert-large/megatron", &[150.0], Some(150.0)),
                ("A/bert-large/auto", &[100.0], Some(98.0)),
                ("B/bert-large/megatron", &[160.0], Some(160.0)),
                ("B/bert-large/auto", &[100.0], Some(80.0)),
            ],
        );
        assert_eq!(reached(&found), ["in part: 1 of 2 cells; 13 of 15 cells not measured", "yes"]);
        let table = shown_of(&found).tables[0].to_string();
        let row = table.lines().find(|line| line.starts_with("| A           | bert-large"));
        let words: Vec<&str> = row.unwrap_or_default().split_whitespace().collect();
        let row = words.join(" ");
        let expected = "| A | bert-large | 100.0 | 98 | 98.0% | 150.0 | 1.50 | 1.53 | 98.0% | 1.36 | \
                        not measured | 1.09 |";
        assert_eq!(row, expected, "{table}");
    }

    #[test]
    fn goals_without_a_record_are_not_measured() {
        assert_eq!(reached(&Records::default()), ["not measured", "not measured"]);
    }
}
