//! Where the controllers of a machine are.

use super::files::{text, write};
use anyhow::{Context, Result};
use std::{fs, path::PathBuf};

pub(super) const NO_CPU: &str = "there is no control group of the processor: mount its controller \
    (`mkdir -p /sys/fs/cgroup/cpu && mount -t cgroup -o cpu cgroup /sys/fs/cgroup/cpu`, or cgroup \
    v2 with `cpu` in cgroup.controllers); the kernel needs CONFIG_CFS_BANDWIDTH";
pub(super) const NO_ACCOUNTS: &str = "there is no account of processor time: mount the controller `cpuacct` \
    (`mount -t cgroup -o cpuacct cgroup /sys/fs/cgroup/cpuacct`); the kernel needs \
    CONFIG_CGROUP_CPUACCT";
pub(super) const NO_MEMORY: &str = "there is no control group of memory: mount its controller \
    (`mount -t cgroup -o memory cgroup /sys/fs/cgroup/memory`, or cgroup v2 with `memory` in \
    cgroup.controllers); the kernel needs CONFIG_MEMCG, and for the first version CONFIG_MEMCG_V1";
pub(super) const NO_DISK: &str = "there is no control group of disks: mount its controller \
    (`mount -t cgroup -o blkio cgroup /sys/fs/cgroup/blkio`, or cgroup v2 with `io` in \
    cgroup.controllers); the kernel needs CONFIG_BLK_DEV_THROTTLING";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Version {
    One,
    Two,
}

/// Where a controller is mounted, and in which version of control groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ControllerPath {
    pub(super) root: PathBuf,
    pub(super) version: Version,
}

/// The control groups of a machine: where each controller that matters here is mounted.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Hierarchies {
    pub(super) cpu: Option<ControllerPath>,
    /// Accounts of processor time; in the second version they are part of every group.
    pub(super) accounts: Option<ControllerPath>,
    pub(super) memory: Option<ControllerPath>,
    pub(super) disk: Option<ControllerPath>,
    /// The unified hierarchy, whatever controllers it has: it can freeze any group.
    pub(super) unified: Option<ControllerPath>,
}

impl Hierarchies {
    /// The control groups of this machine.
    ///
    /// # Errors
    /// When the system does not say what is mounted.
    pub fn find() -> Result<Self> {
        let path = "/proc/self/mounts";
        let mounts = fs::read_to_string(path)
            .with_context(|| format!("cannot read {path}: control groups need Linux and /proc"))?;
        Ok(Self::parse(&mounts))
    }

    /// The control groups among mounts, in the form of `/proc/self/mounts`. A controller is never in a
    /// hierarchy of each version at once; of several mounts of one hierarchy the first is taken.
    pub fn parse(mounts: &str) -> Self {
        let mut found = Self::default();
        for line in mounts.lines() {
            let mut words = line.split(' ').skip(1);
            let (Some(at), Some(kind), Some(options)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let root = PathBuf::from(unescaped(at));
            let (version, controllers) = match kind {
                "cgroup" => (Version::One, options.replace(',', " ")),
                "cgroup2" => (Version::Two, text(&root.join("cgroup.controllers"))),
                _ => continue,
            };
            if version == Version::Two {
                found.unified.get_or_insert_with(|| ControllerPath { root: root.clone(), version });
            }
            for controller in controllers.split_whitespace() {
                let slot = match controller {
                    "cpu" => &mut found.cpu,
                    "cpuacct" => &mut found.accounts,
                    "memory" => &mut found.memory,
                    "blkio" | "io" => &mut found.disk,
                    _ => continue,
                };
                slot.get_or_insert_with(|| ControllerPath { root: root.clone(), version });
            }
        }
        if found.cpu.as_ref().is_some_and(|cpu| cpu.version == Version::Two) {
            found.accounts.clone_from(&found.cpu);
        }
        found
    }

    /// The places of all controllers, each once: several controllers may share a hierarchy.
    pub(super) fn places(&self) -> Vec<&ControllerPath> {
        let mut places: Vec<&ControllerPath> = Vec::new();
        let all = [&self.cpu, &self.accounts, &self.memory, &self.disk, &self.unified];
        for place in all.into_iter().flatten() {
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// Whether threads of one device can be in different groups in that hierarchy.
    pub(super) fn splits(&self, place: &ControllerPath) -> bool {
        [&self.cpu, &self.accounts, &self.unified].into_iter().flatten().any(|p| p == place)
    }

    /// The names of the second version's controllers that are in that place.
    pub(super) fn handed_on(&self, place: &ControllerPath) -> Vec<&'static str> {
        let named = [(&self.cpu, "cpu"), (&self.memory, "memory"), (&self.disk, "io")];
        let here = named.into_iter().filter(|(p, _)| p.as_ref() == Some(place));
        here.map(|(_, name)| name).collect()
    }

    /// Moves a process out of the groups in which nothing real-time may run: those of the first version's
    /// processor controller. The second version has no such groups.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn allow_real_time(&self, pid: u32) -> Result<()> {
        match self.cpu.as_ref() {
            Some(ControllerPath { root, version: Version::One }) => {
                write(&root.join("cgroup.procs"), pid)
            }
            _ => Ok(()),
        }
    }
}

/// A mount point with its blanks and backslashes, which the kernel writes as octal escapes.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(path.to_owned(), |path, (from, to)| path.replace(from, to))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::Path;

    fn place(root: &str, version: Version) -> Option<ControllerPath> {
        Some(ControllerPath { root: root.into(), version })
    }

    #[test]
    fn cgroup_v1_controllers_are_found_mounted_alone_or_together() {
        let apart = "proc /proc proc rw 0 0\n\
            cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0\n\
            cgroup /sys/fs/cgroup/cpuacct cgroup rw,relatime,cpuacct 0 0\n\
            cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0\n\
            cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
            cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0\n\
            cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n\
            cgroup2 /nowhere cgroup2 rw,relatime 0 0\n";
        let found = Hierarchies::parse(apart);
        assert_eq!(found.cpu, place("/sys/fs/cgroup/cpu", Version::One));
        assert_eq!(found.accounts, place("/sys/fs/cgroup/cpuacct", Version::One));
        assert_eq!(found.memory, place("/sys/fs/cgroup/memory", Version::One));
        assert_eq!(found.disk, place("/sys/fs/cgroup/blkio", Version::One));
        // The unified one has no controllers, and can stop groups all the same.
        assert_eq!(found.unified, place("/nowhere", Version::Two));
        assert_eq!(found.places().len(), 5);
        assert!(found.unified.as_ref().is_some_and(|unified| found.splits(unified)));

        let together = "cgroup /a\\040b/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n";
        let found = Hierarchies::parse(together);
        assert_eq!(found.cpu, place("/a b/cpu,cpuacct", Version::One));
        assert_eq!(found.accounts, found.cpu);
        assert_eq!((found.places().len(), &found.memory), (1, &None));
    }

    #[test]
    fn each_controller_is_found_when_both_cgroup_versions_are_mounted() {
        let unified = tempfile::tempdir().unwrap();
        fs::write(unified.path().join("cgroup.controllers"), "cpu io hugetlb\n").unwrap();
        let mounts = format!(
            "cgroup /m cgroup rw,memory 0 0\ncgroup /a cgroup rw,cpuacct 0 0\n\
             cgroup2 {} cgroup2 rw 0 0\n",
            unified.path().display()
        );
        let found = Hierarchies::parse(&mounts);
        let cpu = found.cpu.clone().unwrap();
        assert_eq!((cpu.root.as_path(), cpu.version), (unified.path(), Version::Two));
        // Groups of the second version keep their own accounts.
        assert_eq!(found.accounts, found.cpu);
        assert_eq!(found.memory.as_ref().unwrap().root, Path::new("/m"));
        assert_eq!(found.handed_on(&cpu), ["cpu", "io"]);
        assert!(found.splits(&cpu) && !found.splits(found.memory.as_ref().unwrap()));
    }

    #[test]
    fn malformed_mount_lines_are_ignored() {
        assert_eq!(Hierarchies::parse("\ncgroup\ncgroup /x cgroup\n"), Hierarchies::default());
    }
}
