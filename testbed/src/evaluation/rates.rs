//! `auto` over slow and fast links (Galaxy, Fig. 8).

use super::{
    Records, Shown,
    cells::{bound, grid, latency, of_bound, over, percent, shown, text},
    goal::{Goal, Rule, Unit},
};
use crate::{record::LATENCY, report::Table};

/// The name of the record that the section shows.
pub(super) const RECORD: &str = "bandwidth";
const ENVIRONMENTS: [&str; 2] = ["A", "F"];
const MODELS: [&str; 2] = ["distilbert", "bert-large"];
/// The rates of links, in Mbit/s.
const RATES: [Option<u32>; 6] = [Some(10), Some(20), Some(40), Some(125), Some(500), Some(1000)];
/// The highest rate of a slow link, in Mbit/s.
const SLOW: u32 = 40;
/// The least speedup over `galaxy` on slow links.
const RATIO: f64 = 1.5;
/// The highest ratio of the latency of `auto` to that of the best single device.
const OF_ONE: f64 = 1.05;

pub(super) fn shown_of(records: &Records) -> Shown {
    let cells = records.cells(RECORD);
    let mut over_galaxy = Goal::new(
        "slow links, 10 to 40 Mbit/s: `auto` over `galaxy`",
        "-",
        Rule::Every(RATIO),
        Unit::Times,
    );
    let mut of_one = Goal::new(
        "links of 10 to 1000 Mbit/s: latency of `auto` over that of the best single device",
        "-",
        Rule::Never(OF_ONE),
        Unit::Times,
    );
    let mut table = Table::new(
        "`auto` and the others over the rate of links, memory for all",
        &[
            "environment",
            "Mbit/s",
            "model",
            "auto, ms: median (range)",
            "its bound, ms",
            "of the bound",
            "galaxy / auto",
            "the bounds' ratio",
            "auto / one device",
            "megatron / auto",
            "sequence / auto",
            "pipeline / auto",
            "plan of auto",
        ],
    );
    for at in grid(&ENVIRONMENTS, &RATES, &MODELS) {
        let auto = cells.find(at, "auto");
        let [galaxy, one, megatron, sequence, pipeline] =
            ["galaxy", "local", "megatron", "sequence", "pipeline"]
                .map(|name| cells.find(at, name));
        let by_galaxy = over(galaxy, auto, LATENCY, 1.0);
        let by_one = over(auto, one, LATENCY, 1.0);
        if at.rate.is_some_and(|rate| rate <= SLOW) {
            over_galaxy.add(at, by_galaxy.map(|ratio| ratio.median));
        }
        of_one.add(at, by_one.map(|ratio| ratio.median));
        let others =
            [megatron, sequence, pipeline].map(|cell| text(&over(cell, auto, LATENCY, 1.0), 2));
        let [megatron, sequence, pipeline] = others;
        let plan = auto.and_then(|cell| cell.labels.get("plan")).cloned();
        table.row([
            at.environment.to_owned(),
            at.rate.map_or("-".to_owned(), |rate| rate.to_string()),
            at.model.to_owned(),
            latency(auto),
            shown(bound(auto), 0),
            percent(of_bound(auto)),
            text(&by_galaxy, 2),
            shown(bound(galaxy) / bound(auto), 2),
            text(&by_one, 2),
            megatron,
            sequence,
            pipeline,
            plan.unwrap_or_default(),
        ]);
    }
    Shown {
        goals: vec![over_galaxy, of_one],
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
    fn only_slow_links_count_for_the_speedup_over_galaxy() {
        let found = records(
            RECORD,
            &[
                ("A-10Mbit-8GB/distilbert/galaxy", &[300.0], None),
                ("A-10Mbit-8GB/distilbert/local", &[100.0], None),
                ("A-10Mbit-8GB/distilbert/auto", &[104.0], None),
                ("F-500Mbit-8GB/distilbert/galaxy", &[100.0], None),
                ("F-500Mbit-8GB/distilbert/local", &[90.0], None),
                ("F-500Mbit-8GB/distilbert/auto", &[100.0], None),
            ],
        );
        assert_eq!(
            reached(&found),
            [
                "yes, where measured; 11 of 12 cells not measured",
                "in part: 1 of 2 cells; 22 of 24 cells not measured"
            ]
        );
        assert_eq!(reached(&Records::default()), ["not measured", "not measured"]);
    }
}
