//! The programs of the workspace.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// The path of a program of the workspace, built into the directory above the tests' own.
///
/// # Errors
/// When the program is not built.
pub fn program(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe()?;
    let found = me.ancestors().skip(1).take(3).map(|dir| dir.join(name)).find(|p| p.is_file());
    found.with_context(|| {
        format!("{name} is not built: run `cargo build --release --workspace --bins` first")
    })
}
