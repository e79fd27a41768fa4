//! `galaxy-coord` as a person meets it: which cluster file it takes.
#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

/// What the program says when it fails.
fn refused(directory: &Path, arguments: &[&str]) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_galaxy-coord"));
    let output = program.args(arguments).current_dir(directory).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_cluster_file_of_the_directory_is_the_default() {
    let directory = tempfile::tempdir().unwrap();
    let missing = refused(directory.path(), &[]);
    for word in ["there is no cluster.toml in this directory", "--cluster FILE", "--model DIR"] {
        assert!(missing.contains(word), "{missing}");
    }
    fs::write(directory.path().join("cluster.toml"), "[cluster").unwrap();
    let error = refused(directory.path(), &[]);
    assert!(error.contains("cluster.toml") && !error.contains("there is no"), "{error}");
    assert_eq!(refused(directory.path(), &["--cluster", "cluster.toml"]), error);
}

#[test]
fn options_of_a_model_in_this_process_are_not_ignored() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("cluster.toml"), "").unwrap();
    let error = refused(directory.path(), &["--threads", "2"]);
    assert!(error.contains("--threads") && error.contains("--model DIR"), "{error}");
}
