//! Law 1 where tiles are staggered: the golden checkpoints are too narrow for it.
#![allow(clippy::unwrap_used)]

use galaxy_common::{
    BatchShape, Exchange, Plan, Pooling, Segment, Strategy, Wanted, WireType, plan::Phase,
};
use galaxy_engine::{local::LocalCluster, merge::Merged};
use galaxy_graph::{lower, verify};
use galaxy_model::ModelDir;
use galaxy_testbed::{
    golden::{GoldenCase, MIXES, SPLITS, Split, TOLERANCE, deviation, plan},
    models,
};
use std::{path::Path, sync::Arc};

#[test]
fn staggered_tiles_match_the_result_of_one_device() {
    let path = models::bert(Path::new(env!("CARGO_TARGET_TMPDIR")), "staggered", 2, 512, 8);
    let dir = Arc::new(ModelDir::open(&path.unwrap()).unwrap());
    let lengths = [150u32, 3, 147];
    let wanted = [Wanted::Hidden, Wanted::Pooled(Pooling::Mean), Wanted::Hidden];
    let segments = lengths.iter().zip(wanted).enumerate();
    let segments = segments.map(|(slot, (&rows, wanted))| Segment {
        slot: slot as u32,
        context_len: 0,
        cached: false,
        rows,
        wanted,
    });
    let shape = BatchShape::new(segments.collect()).unwrap();
    let tokens: Arc<[u32]> = (0..shape.rows()).map(|row| row * 37 % 1000).collect();
    let run = |strategy, devices, split, tiles| -> Vec<Merged> {
        let case = GoldenCase {
            checkpoint: "bert",
            strategy,
            devices,
            split,
            tiles,
            threads: 1,
            exchange: Exchange::Ring,
            mix: MIXES[0],
        };
        let plan = Plan { max_rows: shape.rows(), ..plan(&dir, &case, WireType::F32).unwrap() };
        let programs = lower(dir.spec(), dir.formats(), &plan, Phase::Prefill, &shape).unwrap();
        verify(dir.spec(), dir.formats(), &plan, &shape, &programs).unwrap();
        let cluster = LocalCluster::open(dir.clone(), plan).unwrap();
        cluster.run(&shape, tokens.clone()).unwrap()
    };
    let alone = run(Strategy::Local, 1, Split::Equal, 1);
    for devices in 2..5 {
        for (at, split) in SPLITS.into_iter().enumerate() {
            let tiles = [4, 5][(devices + at) % 2];
            let together = run(Strategy::Galaxy, devices, split, tiles);
            for (got, want) in together.iter().zip(&alone) {
                let off = deviation(got.values(), want.values()).unwrap();
                assert!(off <= TOLERANCE, "{devices} devices, {split:?}, {tiles} tiles: {off:e}");
            }
        }
    }
}
