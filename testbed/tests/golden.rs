//! Law 1 over pairwise combinations; `galaxy-testbed golden --full` runs the whole matrix.
#![allow(clippy::unwrap_used)]

use galaxy_common::WireType;
use galaxy_testbed::golden::{Split, TOLERANCE, cases, run};

#[test]
fn pairwise_combinations_match_transformers() {
    let failures: Vec<String> = cases(false)
        .iter()
        .filter_map(|case| {
            run(case, WireType::F32, TOLERANCE).err().map(|e| format!("{case:?}: {e:#}"))
        })
        .collect();
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

/// Half precision on the wire is lossy by name: results are near the reference, and not exact.
#[test]
fn f16_on_the_wire_is_close_to_the_reference_but_not_exact() {
    let mut worst = 0f32;
    for case in cases(false).iter().filter(|c| c.devices > 1 && c.split == Split::Equal) {
        worst = worst.max(run(case, WireType::F16, 3e-2).unwrap());
    }
    assert!(worst > 1e-6, "{worst}");
}
