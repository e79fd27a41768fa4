//! The kept inputs of fuzzing go through every decoder again: `fuzz/corpus/TARGET/`, one input in each file.
//! Inputs that `scripts/fuzz` found are named by their digest, those made by hand by their contents.
#![allow(clippy::unwrap_used)]

#[path = "../../../fuzz/src/lib.rs"]
mod targets;

mod seeds;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus")
}

fn names(of: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(of).unwrap_or_else(|e| panic!("{}: {e}", of.display()));
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// One test for all targets, so that no other takes memory meanwhile.
#[test]
fn decoders_handle_every_input_of_the_fuzz_corpus() {
    seeds_are_kept();
    let known: BTreeSet<String> = targets::TARGETS.iter().map(|t| t.name.to_owned()).collect();
    assert_eq!(names(&corpus()), known, "a folder for each target");
    for target in &known {
        let programs = corpus().join("../fuzz_targets").join(format!("{target}.rs"));
        assert!(programs.is_file(), "{target} has no program");
        for input in names(&corpus().join(target)) {
            // The last line before a panic names the input.
            println!("{target}/{input}");
            targets::run(target, &fs::read(corpus().join(target).join(input)).unwrap());
        }
    }
}

/// Checks that inputs which are right by today's formats are in the corpus; fuzzing begins with them. After a
/// format changed: `WRITE_SEEDS=1 cargo nextest run --release -p galaxy-testbed --test corpus`.
fn seeds_are_kept() {
    let write = std::env::var_os("WRITE_SEEDS").is_some();
    for (target, name, bytes) in seeds::all() {
        let path = corpus().join(target).join(format!("seed-{name}"));
        if write {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &bytes).unwrap();
        }
        let same = fs::read(&path).is_ok_and(|kept| kept == bytes);
        assert!(same, "{} is not what it should be: run with WRITE_SEEDS=1", path.display());
    }
}
