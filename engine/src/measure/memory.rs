//! How much memory this process may take: what the system has, and what its control group allows.

use galaxy_common::Bytes;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where control groups are, if there are any.
const GROUPS: &str = "/sys/fs/cgroup";

/// Memory that is free for us: what the system says is available, or what our control group has left
/// where that is less. None where neither says.
pub fn free_memory() -> Option<Bytes> {
    [available(), group()].into_iter().flatten().min()
}

/// Memory that this process holds now: its pages that are there, code included. None where the system
/// does not say.
pub fn resident_memory() -> Option<Bytes> {
    line("/proc/self/status", "VmRSS:")
}

fn available() -> Option<Bytes> {
    line("/proc/meminfo", "MemAvailable:")
}

/// The bytes that a line of a file of the system says, which counts kB.
fn line(path: &str, name: &str) -> Option<Bytes> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kilobytes << 10))
}

fn group() -> Option<Bytes> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    left(&text, Path::new(GROUPS))
}

/// What the groups of `text` (as /proc/self/cgroup writes it) and all above them have left.
fn left(text: &str, root: &Path) -> Option<Bytes> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        // The second version has one hierarchy and names no controller; the first has one for each.
        let (root, limit, used) = match controllers {
            "" => (root.to_owned(), "memory.max", "memory.current"),
            names if names.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => return None,
        };
        let inner = root.join(path.trim_start_matches('/'));
        let groups = inner.ancestors().filter(|group| group.starts_with(&root));
        groups.filter_map(|group| room(group, limit, used)).min()
    };
    text.lines().filter_map(of_line).min()
}

fn room(group: &Path, limit: &str, used: &str) -> Option<Bytes> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    // "max" is no number: no limit.
    let limit = number(group.join(limit))?;
    let used = number(group.join(used)).unwrap_or(0);
    // What lies in the page cache for us goes when we need the room.
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    // The first version counts the groups below apart, in what is used and here.
    let cached = ["total_inactive_file ", "inactive_file "]
        .into_iter()
        .find_map(|name| stat.lines().find_map(|line| line.strip_prefix(name)))
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0);
    Some(Bytes(limit.saturating_sub(used.saturating_sub(cached))))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn memory_limits_of_cgroups_of_both_versions_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(left("0::/a/b\n", root), None, "no groups at all");
        write(root.join("a/b/memory.max"), "max\n");
        write(root.join("a/memory.max"), "1000\n");
        assert_eq!(left("0::/a/b\n", root), Some(Bytes(1000)), "a limit above us");
        write(root.join("a/memory.current"), "700\n");
        write(root.join("a/memory.stat"), "anon 1\ninactive_file 200\n");
        assert_eq!(left("0::/a/b\n", root), Some(Bytes(500)));
        write(root.join("memory/x/memory.limit_in_bytes"), "90\n");
        write(root.join("memory/x/memory.usage_in_bytes"), "95\n");
        let text = "7:cpu,cpuacct:/x\n6:memory:/x\n0::/\n";
        assert_eq!(left(text, root), Some(Bytes(0)), "nothing is left");
        let stat = "inactive_file 5\ntotal_inactive_file 30\n";
        write(root.join("memory/x/memory.stat"), stat);
        assert_eq!(left(text, root), Some(Bytes(25)), "of groups below, too");
        assert_eq!(left("not a line of it\n1:memory\n", root), None);
    }
}
