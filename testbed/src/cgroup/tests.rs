//! Groups in directories that stand for the system's, and what is written into them.
#![allow(clippy::unwrap_used)]

use super::*;
use tempfile::TempDir;

fn limits() -> Limits {
    Limits { quota: Some(0.14), memory: Some(Bytes(1_500_000_000)), disk: None }
}

/// Directories of plain files in place of the first version's hierarchies.
fn first() -> (TempDir, Hierarchies) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    let mut mounts = String::new();
    for controllers in ["cpu,cpuacct", "memory", "blkio"] {
        fs::create_dir(dir.path().join(controllers)).unwrap();
        mounts += &format!("cgroup {at}/{controllers} cgroup rw,{controllers} 0 0\n");
    }
    (dir, Hierarchies::parse(&mounts))
}

/// A directory of plain files in place of the unified hierarchy.
fn second(controllers: &str) -> (TempDir, Hierarchies) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("cgroup.controllers"), controllers).unwrap();
    let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
    let found = Hierarchies::parse(&mounts);
    (dir, found)
}

fn assert_holds(dir: &TempDir, files: &[(&str, &str)]) {
    for (file, value) in files {
        assert_eq!(text(&dir.path().join(file)), *value, "{file}");
    }
}

#[test]
fn the_cpu_quota_slice_is_the_shortest_that_gives_the_share() {
    for (share, want) in [
        (0.07, (1000, 14286)),
        (0.14, (1000, 7143)),
        (0.5, (1000, 2000)),
        (0.75, (1500, 2000)),
        (1.0, (2000, 2000)),
        (2.0, (4000, 2000)),
        (0.001, (1000, 1_000_000)),
    ] {
        assert_eq!(slice(share).unwrap(), want, "{share}");
    }
    for thousandths in 1..2000 {
        let share = f64::from(thousandths) / 1000.0;
        let (slice, period) = slice(share).unwrap();
        assert!((slice as f64 / period as f64 / share - 1.0).abs() < 6e-4, "{share}");
    }
    for wrong in [0.0, 0.0009, -1.0, f64::NAN, f64::INFINITY] {
        assert!(slice(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_cgroup_v1_group_writes_its_limits_and_reads_its_usage() {
    let (dir, found) = first();
    let group = Group::create_in(found, "t", "d", &limits()).unwrap();
    assert_holds(
        &dir,
        &[
            ("cpu,cpuacct/galaxy-t/cpu.shares", "102400"),
            ("cpu,cpuacct/galaxy-t/d/compute/cpu.cfs_period_us", "7143"),
            ("cpu,cpuacct/galaxy-t/d/compute/cpu.cfs_quota_us", "1000"),
            ("memory/galaxy-t/d/memory.limit_in_bytes", "1500000000"),
        ],
    );
    group.hold_thread(7, 8).unwrap();
    assert_holds(&dir, &[("cpu,cpuacct/galaxy-t/d/compute/tasks", "8")]);
    group.hold_process(9).unwrap();
    assert_holds(
        &dir,
        &[
            ("cpu,cpuacct/galaxy-t/d/compute/cgroup.procs", "9"),
            ("memory/galaxy-t/d/cgroup.procs", "9"),
            ("blkio/galaxy-t/d/cgroup.procs", "9"),
        ],
    );
    assert_eq!(group.processes(), [9]);

    let cpu = dir.path().join("cpu,cpuacct/galaxy-t/d");
    for (file, text) in [
        ("cpuacct.usage", "5000\n"),
        ("compute/cpuacct.usage", "4000\n"),
        ("compute/cpu.stat", "nr_periods 9\nnr_throttled 8\nthrottled_time 7\n"),
        ("../../../memory/galaxy-t/d/memory.max_usage_in_bytes", "77\n"),
        ("../../../memory/galaxy-t/d/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ] {
        fs::write(cpu.join(file), text).unwrap();
    }
    let want = Usage {
        compute_ns: 4000,
        total_ns: 5000,
        periods: 9,
        throttled: 8,
        memory_peak: Some(Bytes(77)),
        oom_kills: 2,
    };
    assert_eq!(group.usage().unwrap(), want);
}

#[test]
fn a_cgroup_v2_group_writes_its_limits_and_reads_its_usage() {
    let (dir, found) = second("cpu memory io pids");
    let group = Group::create_in(found, "t", "d", &limits()).unwrap();
    assert_holds(
        &dir,
        &[
            // A plain file keeps the last of the three values that were written.
            ("cgroup.subtree_control", "+io"),
            ("galaxy-t/cgroup.subtree_control", "+io"),
            ("galaxy-t/cpu.weight", "10000"),
            ("galaxy-t/d/cgroup.subtree_control", "+cpu"),
            ("galaxy-t/d/compute/cgroup.type", "threaded"),
            ("galaxy-t/d/compute/cpu.max", "1000 7143"),
            ("galaxy-t/d/memory.max", "1500000000"),
        ],
    );
    group.adopt(7).unwrap();
    group.hold_thread(7, 8).unwrap();
    assert_holds(
        &dir,
        &[
            ("galaxy-t/d/cgroup.procs", "7"),
            ("galaxy-t/d/compute/cgroup.threads", "8"),
            ("galaxy-t/d/compute/cgroup.procs", ""),
        ],
    );
    let at = dir.path().join("galaxy-t/d");
    for (file, text) in [
        ("cpu.stat", "usage_usec 5\nuser_usec 4\n"),
        ("compute/cpu.stat", "usage_usec 4\nnr_periods 9\nnr_throttled 8\n"),
        ("memory.events", "oom 3\noom_kill 2\noom_group_kill 1\n"),
    ] {
        fs::write(at.join(file), text).unwrap();
    }
    let usage = group.usage().unwrap();
    assert_eq!((usage.compute_ns, usage.total_ns), (4000, 5000));
    assert_eq!((usage.throttled, usage.oom_kills, usage.memory_peak), (8, 2, None));
}

#[test]
fn missing_cgroup_controllers_are_named_in_the_error() {
    let (_dir, found) = second("memory");
    let error = Group::create_in(found, "t", "d", &limits()).unwrap_err();
    assert!(format!("{error:#}").contains("CONFIG_CFS_BANDWIDTH"), "{error:#}");
    let missing = Hierarchies::default().missing(true).join("\n");
    for name in ["CONFIG_CFS_BANDWIDTH", "cpuacct", "CONFIG_MEMCG", "CONFIG_BLK_DEV_THROTTLING"] {
        assert!(missing.contains(name), "{name}: {missing}");
    }
}

#[test]
fn creating_a_cgroup_twice_or_entering_an_absent_one_is_refused() {
    let (_dir, found) = first();
    Group::create_in(found.clone(), "t", "d", &limits()).unwrap();
    let again = Group::create_in(found.clone(), "t", "d", &limits()).unwrap_err();
    assert!(again.to_string().contains("galaxy-testbed down t"), "{again:#}");
    let none = Group::open_in(found.clone(), "t", "e").unwrap().adopt(1).unwrap_err();
    assert!(none.to_string().contains("galaxy-testbed up"), "{none:#}");
    assert!(Group::open_in(found, "..", "e").is_err());
}

/// With real groups, where there are any.
#[test]
fn removing_a_cgroup_ends_its_processes() {
    let testbed = format!("end-{}", std::process::id());
    let small = Limits { memory: Some(Bytes(64 << 20)), ..limits() };
    let group = match Group::create(&testbed, "d", &small) {
        Ok(group) => group,
        Err(why) => return eprintln!("skipped: no control groups here ({why:#})"),
    };
    let mut child = Command::new("sleep").arg("1000").stdout(Stdio::null()).spawn().unwrap();
    group.hold_process(child.id()).unwrap();
    assert!(group.processes().contains(&child.id()));
    group.set_quota(0.6).unwrap();
    assert_eq!(group.usage().unwrap().oom_kills, 0);
    remove(&testbed).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(group.usage().is_err());
    remove(&testbed).unwrap();
}
