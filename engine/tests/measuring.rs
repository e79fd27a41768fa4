//! What measuring takes of memory, as the system counts it: what an allocator keeps of what was freed is
//! in it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use galaxy_common::{Bytes, DeviceName};
use galaxy_engine::{
    compute::choice::EngineChoice,
    measure::{
        MeasureError,
        profile::{Setting, measure},
    },
};
use galaxy_model::{
    ModelDir,
    shape::{SHARD_BYTES, catalogue},
};
use std::{ops::ControlFlow, sync::Arc, time::Duration};

/// The most that this process has held since `clear`, in bytes.
fn peak() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

/// The only test of this program: what others hold would count too.
#[test]
fn measuring_stays_within_the_memory_of_the_cluster_file() {
    let directory = tempfile::tempdir().unwrap();
    let mut shape = catalogue().iter().find(|m| m.name == "tiny-bert").unwrap().shape;
    // Layers of 28 MB: all widths of one take 53 MB, and there are many.
    (shape.hidden, shape.heads, shape.intermediate, shape.layers) = (768, 12, 3072, 8);
    shape.write(directory.path(), SHARD_BYTES, &mut |_| ()).unwrap();
    let dir = Arc::new(ModelDir::open(directory.path()).unwrap());
    let setting = |limit: u64| Setting {
        device: DeviceName::new("here").unwrap(),
        engine: EngineChoice::Cpu,
        threads: 2,
        max_rows: 512,
        memory: None,
        limit: Some(Bytes(limit)),
        time: Duration::from_millis(300),
    };
    let run = |limit| measure(&dir, &setting(limit), &mut |_, _, _| ControlFlow::Continue(()));
    let Err(MeasureError::Room { needed, granted, granter }) = run(1 << 20) else {
        panic!("there is no room")
    };
    assert_eq!((granted, granter), (Bytes(1 << 20), "memory in the cluster file"));
    // What the process holds by then is part of what is needed, and grows a little meanwhile.
    for limit in [needed.0 + (8 << 20), 100_000_000, 150_000_000] {
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let measured = run(limit).unwrap();
        println!("{} granted, {} taken", Bytes(limit), Bytes(peak()));
        assert!(!measured.profile.tables.is_empty());
        assert!(peak() <= limit, "{} granted, {} taken", Bytes(limit), Bytes(peak()));
    }
}
