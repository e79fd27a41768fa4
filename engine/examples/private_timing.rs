#![allow(clippy::unwrap_used)]
use galaxy_common::{plan::Phase, *};
use galaxy_engine::{
    compute::{Binding, Engine, Staged, cpu::CpuEngine},
    weights::Shard,
};
use galaxy_graph::{lower, program::OpKind};
use galaxy_model::ModelDir;
use std::{collections::BTreeMap, path::Path, sync::Arc, time::Instant};
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let threads: u16 = args[2].parse().unwrap();
    let rows: u32 = args[3].parse().unwrap();
    let dir = Arc::new(ModelDir::open(Path::new(&args[1])).unwrap());
    let spec = dir.spec().clone();
    let whole = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(spec.layers),
            heads: Span::first(spec.heads),
            columns: Span::first(spec.inner),
        }],
        row_weight: 1,
        vocabulary: Span::first(spec.extent().vocabulary),
    };
    let plan = Plan {
        model: "x".into(),
        fingerprint: "x".into(),
        strategy: Strategy::Local,
        wire: WireType::F32,
        tiles: 1,
        max_rows: 4096,
        ring: vec![DevicePlan {
            name: DeviceName::new("here").unwrap(),
            budget: Bytes(1 << 33),
            threads,
            prefill: whole.clone(),
            decode: whole,
        }],
    };
    let t = Instant::now();
    let shard = Shard::load(dir.clone(), &plan.ring[0], &mut |_, _| {}).unwrap();
    println!(
        "{} load {:?} {}",
        galaxy_engine::compute::cpu::processor(),
        t.elapsed(),
        shard.bytes()
    );
    let mut e = CpuEngine::new(shard, threads);
    let shape = BatchShape::single(rows, Wanted::Hidden).unwrap();
    let programs = lower(&spec, &plan, Phase::Prefill, &shape).unwrap();
    let p = &programs[0];
    let b = Binding { shape, tokens: vec![5; rows as usize].into() };
    e.prepare(&p.slots).unwrap();
    let mut out = vec![0f32; rows as usize * spec.hidden as usize];
    let mut best: BTreeMap<(usize, String), u128> = BTreeMap::new();
    let mut total = u128::MAX;
    for _ in 0..15 {
        let t0 = Instant::now();
        for (i, op) in p.operations.iter().enumerate() {
            let t = Instant::now();
            let emitted = matches!(op.kind, OpKind::Emit { .. }).then_some(out.as_mut_slice());
            e.run(p, op, &b, Staged { input: None, output: None, emitted }).unwrap();
            let v = best
                .entry((i, format!("{:?}", op.kind).chars().take(60).collect()))
                .or_insert(u128::MAX);
            *v = (*v).min(t.elapsed().as_nanos());
        }
        total = total.min(t0.elapsed().as_nanos());
    }
    for ((_, k), v) in best {
        println!("{:9.3} ms {k}", v as f64 / 1e6);
    }
    println!("{:9.3} ms total", total as f64 / 1e6);
}
