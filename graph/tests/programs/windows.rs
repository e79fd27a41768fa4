//! Layers with windows: what travels of them, and that what their rows see is read.

use super::{plan, spec};
use galaxy_common::{BatchShape, Mode, Modes, Span, Strategy, Wanted, plan::Phase};
use galaxy_graph::{
    Program, lower,
    program::{Lane, OpKind, Role},
    verify,
};
use galaxy_model::{Formats, HeadSpec, LayerKind, ModelSpec, Positions, SlidingWindow};

const ROWS: u32 = 4096;

/// The programs of so many devices that share rows evenly, for one long text.
fn programs(spec: &ModelSpec, devices: usize) -> Vec<Program> {
    let mut plan = plan(Strategy::Sequence, 4, spec, &vec![[1; 4]; devices]);
    plan.max_rows = ROWS;
    plan.modes = Modes::uniform(spec.layers, Mode::Sequence);
    for device in &mut plan.ring {
        for block in &mut device.prefill.blocks {
            (block.heads, block.columns) =
                (Span::first(spec.heads), Span::first(spec.intermediate));
        }
        device.decode = device.prefill.clone();
    }
    let shape = BatchShape::single(ROWS, Wanted::Hidden).unwrap();
    let programs = lower(spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
    verify(spec, &Formats::default(), &plan, &shape, &programs).unwrap();
    programs
}

/// Bytes of keys and values that all devices send in a layer.
fn sent(programs: &[Program], layer: u32) -> u64 {
    let of = |program: &Program| {
        let sends = program.operations.iter().filter(|operation| {
            let lane = program.lanes[operation.lane.0 as usize].0;
            let tensor = operation.reads.first().map(|region| program.tensor(region.tensor));
            operation.layer == layer
                && matches!((operation.kind, lane), (OpKind::Send { .. }, Lane::Send(_)))
                && tensor.is_some_and(|tensor| tensor.role == Role::KeysValuesTile)
        });
        sends.map(|operation| program.region_bytes(&operation.reads[0])).sum::<u64>()
    };
    programs.iter().map(of).sum()
}

#[test]
fn a_sliding_window_layer_sends_fewer_keys_and_values() {
    for (causal, window, devices) in [
        (true, SlidingWindow { before: 511, after: 0 }, 2),
        (true, SlidingWindow { before: 511, after: 0 }, 4),
        (false, SlidingWindow { before: 256, after: 256 }, 2),
        (false, SlidingWindow { before: 256, after: 256 }, 3),
    ] {
        let mut spec = spec(12, true, causal, 2, HeadSpec::None);
        spec.positions = Positions::Learned { rows: ROWS, offset: 0 };
        let narrow = LayerKind { window: Some(window), ..LayerKind::default() };
        spec.kinds = vec![narrow, LayerKind::default()];
        let programs = programs(&spec, devices);
        let (narrow, whole) = (sent(&programs, 0), sent(&programs, 1));
        assert!(narrow > 0 && narrow * 10 <= whole * 4, "{causal} {devices}: {narrow} of {whole}");
    }
}
