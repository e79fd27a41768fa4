//! Control groups as the directories and files that they are.

use anyhow::{Context, Result};
use std::{
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
};

pub(super) fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

pub(super) fn number(path: &Path) -> Result<u64> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.trim().parse().with_context(|| format!("{} holds no number: {text:?}", path.display()))
}

/// The number after `name`, in a file with one name and number on each line.
pub(super) fn entry(path: &Path, name: &str) -> Result<u64> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
        .with_context(|| format!("{} has no {name:?}", path.display()))
}

pub(super) fn write(path: &Path, value: impl Display) -> Result<()> {
    fs::write(path, value.to_string())
        .with_context(|| format!("cannot write {value} to {}", path.display()))
}

pub(super) fn make_group(dir: &Path) -> Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let why = match error.kind() {
                io::ErrorKind::PermissionDenied => "control groups need root",
                io::ErrorKind::ReadOnlyFilesystem => "control groups are mounted read-only",
                _ => "the kernel makes no control group",
            };
            Err(error).with_context(|| format!("cannot make {}: {why}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Lets the groups below `dir` have these controllers: in the second version they have only those that the
/// group above hands on.
pub(super) fn hand_on(dir: &Path, controllers: &[&str]) -> Result<()> {
    let control = dir.join("cgroup.subtree_control");
    let have = text(&control);
    for controller in controllers {
        if !have.split_whitespace().any(|c| c == *controller) {
            write(&control, format!("+{controller}")).with_context(|| {
                format!(
                    "cgroup v2 does not hand the controller {controller} on: it must be in \
                     cgroup.controllers of {}, and no process may be in that very group unless it \
                     is the root",
                    dir.display()
                )
            })?;
        }
    }
    Ok(())
}

/// All processes of a group and of the groups below it. A group that vanishes meanwhile has none; the
/// processes of a threaded group (second version) are listed in the group above.
pub(super) fn processes_below(dir: &Path) -> Vec<u32> {
    let mut found: Vec<u32> =
        text(&dir.join("cgroup.procs")).lines().filter_map(|line| line.parse().ok()).collect();
    found.extend(groups_in(dir).iter().flat_map(|group| processes_below(group)));
    found
}

fn groups_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// Removes a group and those below it, the lowest first. A group that is not there is no error.
pub(super) fn remove_groups(dir: &Path) -> io::Result<()> {
    for group in groups_in(dir) {
        remove_groups(&group)?;
    }
    match fs::remove_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
