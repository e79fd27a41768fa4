//! The program itself: what it prints, and how it ends.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::DeviceName;
use galaxy_proto::identity::{Authority, Role};
use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

fn worker() -> Command {
    Command::new(env!("CARGO_BIN_EXE_galaxy-worker"))
}

#[test]
fn the_worker_prints_its_address_and_exits_on_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let name = DeviceName::new("pi-1").unwrap();
    let identity = authority.issue(&name, Role::Device, 1).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    for signal in ["TERM", "INT"] {
        let mut child = worker()
            .args(["--listen", "127.0.0.1:0", "--identity"])
            .arg(&identity)
            .arg("--models")
            .arg(&golden)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on 127.0.0.1:").unwrap();
        assert_ne!(address.parse::<u16>().unwrap(), 0);
        let kill = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        assert!(child.wait().unwrap().success(), "{signal}");
    }
}

#[test]
fn the_worker_prints_its_version_and_startup_errors() {
    let output = worker().arg("--version").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains(&format!("protocol {}", galaxy_proto::PROTOCOL)) && text.contains("commit"),
        "{text}"
    );

    let output = worker().args(["--identity", "/nowhere", "--models", "/"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("error: ") && text.contains("/nowhere"), "{text}");

    let output = worker().args(["--memory", "lots"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("1.5GB"));

    let output = worker().args(["--engine", "gpu"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("known are cpu, burn-flex"));
}
