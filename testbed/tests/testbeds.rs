//! Testbeds: up, used, killed, down; and the experiments in their smoke forms.

#![allow(clippy::unwrap_used)]

use galaxy_testbed::{
    instance,
    peer::gloo,
    processes::{Process, program, root},
    record::Record,
};
use std::process::{Command, Output};

/// The environment of two devices with quotas, and of a link that delays, so that each part of a testbed is
/// used.
const SMALL: &str = r#"
name = "small"
about = "two small devices, for tests"

[[device]]
name = "a"
speed = "16GFLOP/s"
memory = "500MB"
rate = "200Mbit/s"
delay = "1ms"

[[device]]
name = "b"
speed = "12GFLOP/s"
memory = "500MB"
rate = "100Mbit/s"
"#;

/// [`SMALL`] without speeds: nothing is calibrated.
fn without_speeds() -> String {
    SMALL.lines().filter(|l| !l.starts_with("speed")).map(|l| format!("{l}\n")).collect()
}

fn real() -> bool {
    let environment = galaxy_testbed::environment::Environment::open("H").unwrap();
    let missing = instance::missing(&environment);
    if !missing.is_empty() {
        println!("skipped: {}", missing.join("; "));
    }
    missing.is_empty()
}

/// The command of the program, in the folder where it finds its models.
fn command() -> Command {
    let mut command = Command::new(program("galaxy-testbed").unwrap());
    command.current_dir(root());
    command
}

fn galaxy_testbed(arguments: &[&str]) -> Output {
    command().args(arguments).output().unwrap()
}

/// The output of a command, which must succeed.
fn done(arguments: &[&str]) -> String {
    let output = galaxy_testbed(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refused(arguments: &[&str], why: &str) {
    let output = galaxy_testbed(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(why), "{arguments:?}: {said}");
}

/// The namespaces and groups of a testbed that are still there.
fn left(name: &str) -> Vec<String> {
    let mut left = Vec::new();
    let groups = ["cpu", "cpuacct", "memory", "blkio", "."].map(|c| format!("/sys/fs/cgroup/{c}"));
    for directory in groups.iter().map(String::as_str).chain(["/run/netns", "/run/galaxy-testbed"])
    {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let entry_name = entry.file_name().to_string_lossy().into_owned();
            let ours = format!("galaxy-{name}");
            if entry_name == ours
                || entry_name == name
                || entry_name.starts_with(&format!("{ours}-"))
            {
                left.push(format!("{directory}/{entry_name}"));
            }
        }
    }
    left
}

fn smoke(experiment: &str, how: &[&str], cells: usize) {
    let output = tempfile::tempdir().unwrap();
    let to = output.path().to_str().unwrap();
    let mut arguments = vec!["run", experiment, "--smoke", "--output", to];
    arguments.extend(how);
    let shown = done(&arguments);
    let at = output.path().join(experiment);
    let record = Record::read(&at.join(format!("{experiment}.json"))).unwrap();
    assert_eq!(record.cells.len(), cells, "{shown}");
    assert!(record.cells.iter().all(|cell| cell.valid().count() == 2));
    let bounded = !matches!(experiment, "decode" | "embed" | "memory" | "peers");
    assert!(!bounded || record.cells.iter().all(|cell| cell.bound.is_some()));
    for suffix in [".md", ".svg", ".png"] {
        let size = at.join(format!("{experiment}{suffix}")).metadata().unwrap().len();
        assert!(size > 500, "{suffix} of {size} bytes");
    }
    // A finished experiment is shown again, and measures nothing.
    let again = done(&arguments);
    assert_eq!(shown, again);
}

#[test]
fn smoke_forms_run_on_loopback_without_root() {
    smoke("table4", &["--loopback", "--testbed", "loop4"], 24);
    smoke("overlap", &["--loopback", "--testbed", "loopo"], 5);
    smoke("weak", &["--loopback", "--testbed", "loopw"], 6);
    smoke("decode", &["--loopback", "--testbed", "loopt"], 2);
    smoke("embed", &["--loopback", "--testbed", "loope"], 10);
    smoke("memory", &["--loopback", "--testbed", "loopm"], 30);
    // Ours over plain TCP and with TLS, and the ways of PyTorch where that was brought.
    let sides = if gloo::version().is_some() { 5 } else { 2 };
    smoke("peers", &["--loopback", "--testbed", "loopg"], sides);
    let output = tempfile::tempdir().unwrap();
    let to = output.path().to_str().unwrap();
    done(&["run", "repeats", "--smoke", "--loopback", "--testbed", "loopr", "--output", to]);
    let page = std::fs::read_to_string(output.path().join("repeats/repeats.md")).unwrap();
    assert!(page.contains("loopback: no shaping, not comparable"), "{page}");
    let again = ["run", "repeats", "--smoke", "--loopback", "--testbed", "loopr", "--output", to];
    refused(&[&again[..], &["--plain"]].concat(), "start anew with --fresh");
    // More samples are added to those that there are.
    done(&[&again[..], &["--samples", "4"]].concat());
    let record = Record::read(&output.path().join("repeats/repeats.json")).unwrap();
    assert!(record.cells.iter().all(|cell| cell.valid().count() == 4));
}

/// Every strategy by the planner, from profiles that the workers measure, beside what it predicts.
#[test]
fn plans_are_measured_beside_their_predictions() {
    smoke("bandwidth", &["--loopback", "--testbed", "loops"], 12);
    smoke("heterogeneous", &["--loopback", "--testbed", "looph"], 8);
    let output = tempfile::tempdir().unwrap();
    let to = output.path().to_str().unwrap();
    refused(&["run", "planner", "--loopback", "--output", to], "first: galaxy-testbed run table4");
    let small = ["--loopback", "--environments", "A", "--models", "tiny-bert"];
    let mut arguments = vec!["run", "table4", "--smoke", "--testbed", "loopp", "--output", to];
    arguments.extend(small);
    done(&arguments);
    let shown = done(&["run", "planner", "--loopback", "--output", to]);
    assert!(shown.contains("predicted / measured"), "{shown}");
    assert!(output.path().join("planner/planner.svg").is_file());
    let record = Record::read(&output.path().join("table4/table4.json")).unwrap();
    assert_eq!(record.cells.len(), 6);
    for cell in &record.cells {
        assert!(cell.valid().count() == 2, "{}: {}", cell.key, cell.outcome);
        assert!(
            cell.facts["predicted_ms"] > 0.0 && !cell.labels["plan"].is_empty(),
            "{}",
            cell.key
        );
    }
}

/// A device that becomes slow: no request fails, whatever the coordinator makes of it.
#[test]
fn no_request_fails_when_a_device_becomes_slow() {
    let output = tempfile::tempdir().unwrap();
    let to = output.path().to_str().unwrap();
    let few =
        ["--smoke", "--loopback", "--testbed", "loopd", "--requests", "4", "--patience", "12"];
    let mut arguments = vec!["drift", "--output", to];
    arguments.extend(few);
    let shown = done(&arguments);
    assert!(shown.contains("requests until it was noticed"), "{shown}");
    let record = Record::read(&output.path().join("drift/drift.json")).unwrap();
    let counts: Vec<_> = record.cells.iter().map(|c| (c.key.as_str(), c.valid().count())).collect();
    assert!(counts.contains(&("before", 4)) && counts.contains(&("from scratch", 4)), "{counts:?}");
    assert!(counts.iter().any(|(phase, _)| *phase == "slowed"), "{counts:?}");
}

#[test]
fn smoke_forms_run_on_emulated_devices() {
    if real() {
        smoke("table4", &["--environments", "B", "--testbed", "smoke4"], 12);
        smoke("overlap", &["--testbed", "smokeo"], 5);
        assert_eq!(left("smoke4"), Vec::<String>::new());
    }
}

#[test]
fn down_removes_a_killed_testbed_and_frees_its_name_at_once() {
    if !real() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("small.toml");
    std::fs::write(&file, SMALL).unwrap();
    let plain = work.path().join("plain.toml");
    std::fs::write(&plain, without_speeds()).unwrap();
    let plain = plain.to_str().unwrap();
    let (file, to) = (file.to_str().unwrap(), work.path().to_str().unwrap());
    let run = ["run", "table4", "--smoke", "--testbed", "crash", "--output", to, "--environments"];
    let mut command = command();
    command.args(run).arg(file).args(["--samples", "1000"]);
    let mut running = Process::spawn("galaxy-testbed run", command).unwrap();
    running.line("small/tiny-bert/auto: ").unwrap();
    refused(&["down", "crash"], "in use by another galaxy-testbed");
    let workers = instance::Testbed::open("crash").unwrap().workers();
    assert!(workers.len() == 2 && workers.iter().all(instance::Worker::alive));
    running.kill().unwrap();
    // The testbed is still there, only without a user: its workers, forwarder and quotas go on.
    assert!(workers.iter().all(instance::Worker::alive));
    assert!(done(&["status", "crash"]).contains("at 10.201.77.1:7100"));
    done(&["down", "crash"]);
    assert_eq!(left("crash"), Vec::<String>::new());
    assert!(!workers.iter().any(instance::Worker::alive));
    // That nothing is there is no error.
    done(&["down", "crash"]);
    done(&["up", plain, "--name", "crash"]);
    // The process is killed by the kernel for its memory, and the status reports it.
    let hog = program("galaxy-testbed").unwrap();
    let hog = hog.to_str().unwrap();
    let hogged = galaxy_testbed(&["exec", "--name", "crash", "a", hog, "hog", "900000000"]);
    assert!(!hogged.status.success());
    assert!(done(&["status", "crash"]).contains("1 process killed for its memory"));
    done(&["down", "crash"]);
    assert_eq!(left("crash"), Vec::<String>::new());
}

#[test]
fn a_signal_that_ends_a_run_takes_its_testbed_down() {
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("small.toml");
    std::fs::write(&file, SMALL).unwrap();
    let run = |signal, code, how: &[&str]| {
        let mut command = command();
        command.args(["run", "table4", "--smoke", "--samples", "1000", "--testbed", "signal"]);
        command.arg("--output").arg(work.path()).arg("--environments").arg(&file).args(how);
        let mut running = Process::spawn("galaxy-testbed run", command).unwrap();
        running.line("small/tiny-bert/auto: ").unwrap();
        let workers = instance::Testbed::open("signal").unwrap().workers();
        assert!(workers.len() == 2 && workers.iter().all(instance::Worker::alive));
        running.signal(signal).unwrap();
        let (status, said) = running.ended().unwrap();
        assert_eq!(status.code(), Some(code), "{said}");
        assert!(said.contains("takes testbed signal down"), "{said}");
        assert!(!workers.iter().any(instance::Worker::alive));
        assert!(!instance::names().iter().any(|name| name == "signal"));
        assert_eq!(left("signal"), Vec::<String>::new());
    };
    run("TERM", 143, &["--fresh", "--loopback"]);
    if real() {
        run("INT", 130, &["--fresh"]);
    }
}

#[test]
fn two_testbeds_run_at_the_same_time_without_interference() {
    if !real() {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("plain.toml");
    std::fs::write(&file, without_speeds()).unwrap();
    let file = file.to_str().unwrap();
    for name in ["left", "right"] {
        done(&["up", file, "--name", name]);
    }
    refused(&["up", file, "--name", "left"], "take it down first");
    refused(&["exec", "--name", "left", "c", "true"], "it has a, b");
    refused(&["exec", "a", "true"], "say which by --name");
    refused(&["exec", "--name", "left", "a", "no-such-program"], "no program \"no-such-program\"");
    let address = |name: &str, place: &str| {
        done(&["exec", "--name", name, place, "ip", "-4", "-o", "addr", "show", "eth0"])
    };
    assert!(address("left", "b").contains("10.201.77.2"));
    done(&["down", "left"]);
    assert_eq!(left("left"), Vec::<String>::new());
    assert!(address("right", "coordinator").contains("10.201.77.3"));
    assert!(done(&["status"]).contains("testbed right"));
    done(&["down", "right"]);
    assert_eq!(left("right"), Vec::<String>::new());
}

#[test]
fn invalid_arguments_are_refused_with_the_valid_choices() {
    refused(&["up", "Z", "--loopback"], "one of A, B, C");
    refused(&["run", "nothing", "--loopback"], "there are table4, heterogeneous");
    refused(&["drift", "--loopback", "--requests", "0"], "--requests 0");
    refused(&["models", "gpt-5"], "there are distilbert");
    refused(&["status", "nobody"], "no testbed \"nobody\" is up");
    assert!(done(&["run"]).contains("table4"));
}
