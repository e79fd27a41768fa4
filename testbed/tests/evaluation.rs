//! The page of the evaluation says what the records that are kept say.

#![allow(clippy::unwrap_used)]

use galaxy_testbed::{evaluation, processes::root};

#[test]
fn the_evaluation_is_what_its_records_say() {
    let options = evaluation::Options {
        results: root().join("docs/results"),
        notes: root().join("testbed/evaluation.toml"),
        output: root().join("docs/evaluation.md"),
    };
    let made = evaluation::page(&options).unwrap();
    assert_eq!(made, evaluation::page(&options).unwrap(), "the same records give the same bytes");
    let kept = std::fs::read_to_string(&options.output).unwrap();
    assert!(
        made == kept,
        "docs/evaluation.md is not what docs/results and testbed/evaluation.toml say; at the root of the checkout: \
         cargo run --release -p galaxy-testbed -- report"
    );
}
