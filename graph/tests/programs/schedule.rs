//! When things happen: what travels while something is computed, and how near a schedule comes to what
//! kernels and links allow.

use super::*;
use galaxy_common::Kernel;
use galaxy_graph::program::{Block, OpId};

/// BERT-Large and DistilBERT on equal devices.
fn well_known(hidden: u32, layers: u32) -> ModelSpec {
    let mut spec = spec(hidden, false, false, hidden / 64, HeadSpec::None);
    (spec.heads, spec.head_width, spec.intermediate) = (hidden / 64, 64, 4 * hidden);
    spec.layers = layers;
    spec
}

/// Devices of 15 GFLOP/s that move 1 GB/s in row operations, on links of 250 Mbit/s: links and
/// kernels are nearly as busy.
struct Ideal;
impl Costs for Ideal {
    fn compute(&self, program: &Program, op: &Operation) -> u64 {
        let size = |r: &galaxy_graph::program::Region| {
            (u64::from(r.rows.len()), u64::from(r.columns.len()))
        };
        let work = |rows: u64, inner: u64, width: u64| 2 * rows * inner * width / 15;
        match (op.kind, &op.reads[..], &op.writes[..]) {
            (OpKind::Product { .. }, [read], [write]) => {
                work(size(read).0, size(read).1, size(write).1)
            }
            (OpKind::Attend { .. }, [_, seen], [write]) => {
                2 * work(size(write).0, size(seen).0, size(write).1)
            }
            _ => op.reads.iter().chain(&op.writes).map(|r| program.region_bytes(r)).sum(),
        }
    }
    fn link(&self, _: Rank, _: Rank) -> LinkRate {
        LinkRate { latency: 60_000, rate: 250e6 / 8.0, window: 4 << 20, burst: 0 }
    }
}

/// The least nanoseconds of a run: what its kernels or links have to do.
fn floor(programs: &[Program]) -> f64 {
    let busy = programs.iter().map(|program| {
        let ids = &program.lanes[0].1;
        let compute: u64 =
            ids.iter().map(|&id| Ideal.compute(program, program.operation(id))).sum();
        // Packets of 1514 bytes carry 1448.
        let bytes = galaxy_graph::timeline::traffic(program).0 as f64 * 1514.0 / 1448.0;
        (compute as f64).max(bytes / 250e6 * 8e9)
    });
    busy.fold(0f64, f64::max)
}

#[test]
fn keys_and_values_travel_while_rows_are_computed() {
    let shape = BatchShape::single(284, Wanted::Pooled(Pooling::Mean)).unwrap();
    for (modes, tiles, bound) in
        [([(true, true); 2], 4, 1.10), ([(true, true); 2], 8, 1.05), ([(false, true); 2], 4, 1.08)]
    {
        let (strategy, exchange) = (Strategy::Auto, Exchange::Ring);
        let spec = well_known(1024, 24);
        let plan =
            laid_out(&RandomLayout { strategy, modes, exchange, tiles }, &spec, &[[1; 4]; 4]);
        let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        let (total, floor) = (simulate(&programs, &Ideal).unwrap().total as f64, floor(&programs));
        assert!(total < bound * floor, "{modes:?}, {tiles} tiles: {total} against {floor}");
    }
}

#[test]
fn staggered_tiles_come_within_4_percent_of_the_bound() {
    let shape = BatchShape::single(284, Wanted::Pooled(Pooling::Mean)).unwrap();
    for (spec, tiles, bound) in [
        (well_known(1024, 24), 4, 1.01),
        (well_known(1024, 24), 8, 1.01),
        (well_known(768, 6), 4, 1.04),
        (well_known(768, 6), 8, 1.03),
    ] {
        let plan = plan(Strategy::Galaxy, tiles, &spec, &[[1; 4]; 4]);
        let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
        let floor = floor(&programs);
        let total = simulate(&programs, &Ideal).unwrap().total as f64;
        assert!(total < bound * floor, "{tiles} tiles: {total} against {floor}");
    }
}

#[test]
fn queries_are_computed_after_keys_and_values_are_sent() {
    let shape = BatchShape::single(96, Wanted::Pooled(Pooling::Mean)).unwrap();
    for (tiles, exchange) in [(1, Exchange::Ring), (2, Exchange::Direct), (4, Exchange::Ring)] {
        let way =
            RandomLayout { strategy: Strategy::Auto, modes: [(true, true); 2], exchange, tiles };
        let spec = well_known(256, 4);
        let plan = laid_out(&way, &spec, &[[2; 4], [1; 4], [1; 4]]);
        for program in lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap() {
            let compute = program.lanes[0].1.iter().map(|&id| program.operation(id));
            let of_layer: Vec<&Operation> =
                compute.filter(|op| op.layer == 1 && op.block == Block::Attention).collect();
            let place = |is: &dyn Fn(&Operation) -> bool| -> Vec<usize> {
                (0..of_layer.len()).filter(|&at| is(of_layer[at])).collect()
            };
            let sent = place(&|op| matches!(op.kind, OpKind::Export { .. }));
            let is_qkv =
                |op: &Operation| matches!(op.kind, OpKind::Product { kernel: Kernel::Qkv, .. });
            let queries = place(&|op| is_qkv(op) && op.writes[0].columns.start() == 0);
            let attends = place(&|op| matches!(op.kind, OpKind::Attend { .. }));
            assert_eq!((sent.len(), queries.len()), (usize::from(tiles), 1), "all rows at once");
            assert!(sent[sent.len() - 1] < queries[0] && queries[0] < attends[0]);
        }
    }
}

/// A text of 64 rows is the first device's alone, and most of the second: attention over the first waits for
/// no keys, and comes before those of the second are taken in.
#[test]
fn tiles_wait_only_for_the_keys_of_their_own_sequences() {
    let text =
        |slot, rows| Segment { slot, context_len: 0, cached: false, rows, wanted: Wanted::Hidden };
    let shape = BatchShape::new(vec![text(0, 64), text(1, 96)]).unwrap();
    let (strategy, exchange) = (Strategy::Auto, Exchange::Ring);
    let spec = well_known(256, 4);
    let way = RandomLayout { strategy, modes: [(true, true); 2], exchange, tiles: 2 };
    let plan = laid_out(&way, &spec, &[[4; 4], [1; 4]]);
    let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
    let compute = programs[0].lanes[0].1.iter().map(|&id| programs[0].operation(id));
    let of_layer = compute.filter(|op| op.layer == 1 && op.block == Block::Attention);
    let mut came = Vec::new();
    for op in of_layer {
        match op.kind {
            OpKind::Attend { .. } => came.push((op.reads[0].rows, None)),
            OpKind::Import => came.push((op.writes[0].rows, Some(op.waits.len()))),
            _ => {}
        }
    }
    let rows = Span::<galaxy_common::Row>::new;
    let expected = [
        (rows(0, 64), Some(0)),
        (rows(0, 64), None),
        (rows(128, 144), Some(1)),
        (rows(64, 128), Some(0)),
        (rows(144, 160), Some(1)),
        (rows(64, 128), None),
    ];
    assert_eq!(came, expected);
}

/// Whether some rows of a block are on their way before all sums of the block before it are.
fn staggers(program: &Program, plan: &Plan) -> bool {
    let collective = |id: &OpId| match program.operation(*id).kind {
        OpKind::Send { transfer, .. } => {
            transfer / (plan.ring.len() as u32 * u32::from(plan.tiles))
        }
        _ => unreachable!("only sends are on a send lane"),
    };
    let sends = program.lanes.iter().filter(|(lane, _)| matches!(lane, Lane::Send(_)));
    let collectives: Vec<Vec<u32>> =
        sends.map(|(_, ids)| ids.iter().map(collective).collect()).collect();
    collectives.iter().any(|c| !c.is_sorted())
}

#[test]
fn tiles_are_staggered_only_where_many_and_large_enough() {
    let shape = BatchShape::single(24, Wanted::Hidden).unwrap();
    for (hidden, tiles, expected) in
        [(WIDE, 4, true), (WIDE, 6, true), (WIDE, 3, false), (WIDE, 1, false), (12, 4, false)]
    {
        let spec = spec(hidden, true, true, 3, HeadSpec::None);
        let plan = plan(Strategy::Galaxy, tiles, &spec, &[[2, 2, 1, 1], [1; 4], [1, 1, 1, 0]]);
        for program in lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap() {
            assert_eq!(staggers(&program, &plan), expected, "{hidden} wide, {tiles} tiles");
        }
    }
}
