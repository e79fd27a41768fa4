//! The same cells run by PyTorch with Gloo.

use super::{
    Records, Shown,
    cells::{bound, latency, of_bound, over, percent, shown, text},
    goal::{Goal, Rule, Unit},
};
use crate::{record::LATENCY, report::Table};

/// The name of the record that the section shows.
pub(super) const RECORD: &str = "peers";
/// The variant of our runs without TLS, as Gloo runs.
const OURS: &str = "galaxy";
/// The variant of our runs with TLS.
const WITH_TLS: &str = "galaxy-tls";
const SINGLE: &str = "pytorch-single";
const MEGATRON: &str = "pytorch-megatron";
const SEQUENCE: &str = "pytorch-sequence";
/// The environments in which PyTorch's Megatron-style run must be slower by at least `RATIO`.
const EQUAL_BOARDS: [&str; 3] = ["A", "B", "C"];
const RATIO: f64 = 1.3;
/// The ratio above which we are faster, to the digits that are shown.
const FASTER: f64 = 1.0;

pub(super) fn shown_of(records: &Records) -> Shown {
    let cells = records.cells(RECORD);
    let mut faster = Goal::new(
        "PyTorch: its Megatron-style, its sequence-parallel and its run on one device over ours",
        "-",
        Rule::Every(FASTER),
        Unit::Times,
    );
    let mut megatron_style = Goal::new(
        "PyTorch with Gloo: its Megatron-style run over ours in A, B and C",
        "-",
        Rule::Every(RATIO),
        Unit::Times,
    );
    let mut table = Table::new(
        "Ours and PyTorch's; both without TLS, and ours with it",
        &[
            "environment",
            "model",
            "galaxy, ms: median (range)",
            "its bound, ms",
            "of the bound",
            "galaxy with TLS, ms",
            "PyTorch, Megatron-style, ms",
            "it / galaxy",
            "PyTorch, sequence-parallel, ms",
            "it / galaxy",
            "PyTorch, one device, ms",
            "it / galaxy",
        ],
    );
    for at in cells.places() {
        let find = |name| cells.find(at, name);
        let ours = find(OURS);
        let [megatron, sequence, single] =
            [MEGATRON, SEQUENCE, SINGLE].map(|name| over(find(name), ours, LATENCY, 1.0));
        faster.add(format!("{at}, {MEGATRON}"), megatron.map(|ratio| ratio.median));
        faster.add(format!("{at}, {SEQUENCE}"), sequence.map(|ratio| ratio.median));
        faster.add(format!("{at}, {SINGLE}"), single.map(|ratio| ratio.median));
        if EQUAL_BOARDS.contains(&at.environment) {
            megatron_style.add(at, megatron.map(|ratio| ratio.median));
        }
        table.row([
            at.environment.to_owned(),
            at.model.to_owned(),
            latency(ours),
            shown(bound(ours), 0),
            percent(of_bound(ours)),
            latency(find(WITH_TLS)),
            latency(find(MEGATRON)),
            text(&megatron, 2),
            latency(find(SEQUENCE)),
            text(&sequence, 2),
            latency(find(SINGLE)),
            text(&single, 2),
        ]);
    }
    Shown {
        goals: vec![faster, megatron_style],
        tables: vec![table],
        every: cells.every().into_iter().collect(),
        ..Shown::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        evaluation::fixtures::{of, record},
        record::Outcome,
    };

    fn reached(records: &Records) -> Vec<String> {
        shown_of(records).goals.iter().map(Goal::reached).collect()
    }

    #[test]
    fn only_cells_measured_on_both_sides_are_compared() {
        let mut found = record(
            RECORD,
            &[
                ("A/bert-large/galaxy", &[100.0], None),
                ("A/bert-large/pytorch-megatron", &[129.0], None),
                ("A/bert-large/pytorch-sequence", &[], None),
                ("A/bert-large/pytorch-single", &[200.0], None),
                ("D/bert-large/galaxy", &[100.0], None),
                ("D/bert-large/pytorch-single", &[200.0], None),
                ("D/bert-large/pytorch-megatron", &[99.0], None),
                ("D/bert-large/pytorch-sequence", &[140.0], None),
            ],
        );
        found.cells[2].outcome = Outcome::Refused { why: "killed for memory".to_owned() };
        assert_eq!(reached(&of(found)), ["in part: 4 of 5 cells", "no"]);
        assert_eq!(reached(&Records::default()), ["not measured", "not measured"]);
    }
}
