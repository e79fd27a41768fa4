//! The pages of the evaluation say what the records that are kept say, and the summary is short.

#![allow(clippy::unwrap_used)]

use galaxy_testbed::{
    evaluation::{self, SECTION_PREFIX},
    processes::root,
};
use std::path::PathBuf;

const MAKE_AGAIN: &str =
    "at the root of the checkout: cargo run --release -p galaxy-testbed -- report";
/// The most lines of the summary, so that it is read in some minutes.
const MOST_LINES: usize = 150;

fn options() -> evaluation::Options {
    evaluation::Options {
        results: root().join("docs/results"),
        notes: root().join("testbed/evaluation.toml"),
        output: root().join("docs/evaluation.md"),
    }
}

#[test]
fn the_evaluation_pages_match_their_records() {
    let options = options();
    let made = evaluation::pages(&options).unwrap();
    assert_eq!(made, evaluation::pages(&options).unwrap(), "the same records give the same bytes");
    for (path, page) in &made {
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            *page == kept,
            "{} is not what docs/results and testbed/evaluation.toml say; {MAKE_AGAIN}",
            path.display()
        );
    }
    let entries = std::fs::read_dir(&options.results).unwrap().map(|entry| entry.unwrap());
    let of_section =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(SECTION_PREFIX);
    for path in entries.map(|entry| entry.path()).filter(of_section) {
        assert!(
            made.contains_key(&path),
            "{} is the page of no section: remove it",
            path.display()
        );
    }
}

#[test]
fn the_evaluation_summary_is_within_its_line_limit() {
    let options = options();
    let made = evaluation::pages(&options).unwrap();
    let lines = made[&options.output].lines().count();
    assert!(lines <= MOST_LINES, "{lines} lines, above {MOST_LINES}");
}
