//! The short form of `galaxy-testbed chaos`: each kind of fault, twice.
#![allow(clippy::unwrap_used)]

use galaxy_testbed::{
    chaos::{self, Options, Outcome},
    processes::root,
};

#[test]
fn requests_survive_every_kind_of_fault() {
    let id = std::process::Command::new("id").arg("-u").output().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        model: root().join("models/tiny-galaxy"),
        faults: 8,
        clients: 16,
        served: None,
        seed: 5,
        outage: 4000,
        pause: 300,
        loopback: id.stdout != b"0\n",
        output: dir.path().join("chaos.jsonl"),
    };
    let summary = chaos::play(&options).unwrap_or_else(|error| panic!("{error:#}"));
    eprintln!("{summary}");
    assert!(summary.is_clean(), "{}", std::fs::read_to_string(&options.output).unwrap());
    assert_eq!(summary.faults, 8);
    assert!(summary.of(Outcome::Right) >= 8, "{summary}");
    summary.draw(&dir.path().join("chaos")).unwrap();
}
