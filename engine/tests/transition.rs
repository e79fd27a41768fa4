//! What a change of plan takes of memory, as the system counts it: what an allocator keeps of what was
//! freed is in it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use galaxy_common::{Assignment, BlockAssignment, Bytes, DeviceName, DevicePlan, Span};
use galaxy_engine::weights::Shard;
use galaxy_graph::{budget, holdings::transition, operators::OperatorGraph};
use galaxy_model::{
    ModelDir,
    shape::{SHARD_BYTES, catalogue},
};
use std::{ops::ControlFlow, sync::Arc};

/// What the system counts late, and what is no matrix.
const SLACK: u64 = 4 << 20;

/// A line of what the system says of this process, in bytes.
fn status(what: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

fn device(heads: (u32, u32), columns: (u32, u32), layers: (u32, u32)) -> DevicePlan {
    let block = BlockAssignment {
        layers: Span::new(layers.0, layers.1),
        heads: Span::new(heads.0, heads.1),
        columns: Span::new(columns.0, columns.1),
    };
    let part = Assignment { blocks: vec![block], row_weight: 1, vocabulary: Span::empty() };
    DevicePlan {
        name: DeviceName::new("here").unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        prefill: part.clone(),
        decode: part,
        streaming: None,
    }
}

/// The only test of this program: what others hold would count too.
#[test]
fn the_memory_peak_of_a_transition_matches_the_prediction() {
    let directory = tempfile::tempdir().unwrap();
    let mut shape = catalogue().iter().find(|m| m.name == "tiny-bert").unwrap().shape;
    (shape.hidden, shape.heads, shape.intermediate, shape.layers) = (512, 8, 2048, 6);
    shape.write(directory.path(), SHARD_BYTES, &mut |_| ()).unwrap();
    let dir = Arc::new(ModelDir::open(directory.path()).unwrap());
    let graph = OperatorGraph::of(dir.spec());
    let go_on = |_, _| ControlFlow::Continue(());
    let (whole, heads, columns) = ((0, 6), (0, 8), (0, 2048));
    let pairs = [
        // From a half to the other, to a part, to all; from first layers to last ones and back.
        (device((0, 4), (0, 1024), whole), device((4, 8), (1024, 2048), whole)),
        (device(heads, columns, whole), device((2, 5), (100, 900), whole)),
        (device((2, 5), (100, 900), whole), device(heads, columns, whole)),
        (device(heads, columns, (0, 3)), device(heads, columns, (3, 6))),
        (device(heads, columns, (3, 6)), device(heads, columns, (0, 3))),
        (device(heads, (0, 0), whole), device((0, 0), columns, whole)),
    ];
    for (old, new) in pairs {
        let shard = Shard::load(dir.clone(), &old, &mut { go_on }).unwrap();
        let before = status("VmRSS:") - shard.bytes().0;
        // The most from now on.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let (shard, _) = shard.reshape(dir.clone(), &new, &mut { go_on }).unwrap();
        let measured = status("VmHWM:").saturating_sub(before);
        let said = transition(&graph, dir.formats(), Some(&old.prefill), &new.prefill).peak.0;
        let said = said - budget::PROCESS.0;
        println!("{measured} of {said}, {} held then", shard.bytes());
        // What it is read through is bounded by 2 MiB.
        assert!(measured <= said + SLACK && said <= measured + (3 << 20), "{measured} and {said}");
    }
}
