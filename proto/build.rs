//! Compiles the .proto files without a `protoc`, and finds out which commit this is.

use std::{error::Error, path::Path, process::Command};

fn main() -> Result<(), Box<dyn Error>> {
    let files = ["common", "content", "worker", "coordinator", "join", "members"]
        .map(|f| format!("galaxy/v1/{f}.proto"));
    for file in &files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(&files, ["."])?;
    tonic_prost_build::configure()
        .bytes(".galaxy.v1.OutputPiece.data")
        .bytes(".galaxy.v1.GeneratedStep.tokens")
        .bytes(".galaxy.v1.Piece.data")
        .compile_fds(descriptors)?;

    println!("cargo:rustc-env=GALAXY_COMMIT={}", commit());
    Ok(())
}

/// The commit that is built, or `unknown`.
fn commit() -> String {
    // What scripts/check builds names no commit, so that a new one compiles nothing again. The folder is
    // `.../PROFILE/build/PACKAGE/out`.
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    if Path::new(&out).ancestors().nth(3).is_some_and(|profile| profile.ends_with("checks")) {
        return "unknown".to_owned();
    }
    // The file that changes with every checkout and commit; a missing file would rebuild always.
    for watched in ["../.git/HEAD", "../.git/logs/HEAD"] {
        if Path::new(watched).exists() {
            println!("cargo:rerun-if-changed={watched}");
        }
    }
    Command::new("git")
        .args(["rev-parse", "--short", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .map(|text| text.trim().to_owned())
        .unwrap_or_else(|| "unknown".to_owned())
}
