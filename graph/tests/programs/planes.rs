//! Weights that are stored plane by plane: a request that selects fewer planes reads the first bytes of each
//! piece, and programs that load another number of them are found.

use super::{RandomLayout, laid_out, language, reading, spec};
use galaxy_common::{BatchShape, Exchange, Plan, Strategy, Wanted, WeightFormat, plan::Phase};
use galaxy_graph::{
    Program, VerifyError, lower,
    operators::OperatorGraph,
    pieces::{self, Piece},
    program::{OpKind, Role},
    verify_graph,
};
use galaxy_model::{Formats, ModelSpec};
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
};

fn streamed() -> (ModelSpec, Plan) {
    let way = RandomLayout {
        strategy: Strategy::Megatron,
        modes: [(false, false); 2],
        exchange: Exchange::Ring,
        tiles: 1,
    };
    let mut spec = spec(256, true, true, 3, language());
    spec.gated = true;
    let plan = laid_out(&way, &spec, &[[1, 1, 1, 1], [2, 1, 1, 3]]);
    let plan = reading(&spec, &plan, (4, 0, 1, 0b101));
    (spec, plan)
}

/// The planes of 16-bit values, the most significant first.
fn planes_of(values: &[u16]) -> Vec<Vec<u8>> {
    let bit = |value: u16, plane: u32| (value >> (15 - plane) & 1) as u8;
    let byte =
        |eight: &[u16], plane| eight.iter().fold(0, |all, value| all << 1 | bit(*value, plane));
    (0..16).map(|plane| values.chunks(8).map(|eight| byte(eight, plane)).collect()).collect()
}

#[test]
fn the_first_planes_of_a_piece_are_its_first_bytes() {
    let (spec, plan) = streamed();
    let formats = Formats::all(WeightFormat::F16);
    let graph = OperatorGraph::of(&spec);
    let pieces =
        pieces::pieces(&graph, &plan.ring[1].prefill, &formats, galaxy_common::Bytes(2048));
    assert!(pieces.len() > 8);
    let path = std::env::temp_dir().join(format!("galaxy-planes-{}", std::process::id()));
    let mut file = File::create_new(&path).unwrap();
    let values = |number: usize, piece: &Piece| -> Vec<u16> {
        let value = |at: u64| (at as u32 * 40_503 + number as u32 * 7919) as u16;
        (0..piece.bytes / 2).map(value).collect()
    };
    let mut starts = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        starts.push(file.stream_position().unwrap());
        let planes = planes_of(&values(number, piece)).concat();
        assert_eq!(planes.len() as u64, piece.bytes);
        file.write_all(&planes).unwrap();
    }
    let mut file = File::open(&path).unwrap();
    for (number, (piece, start)) in pieces.iter().zip(starts).enumerate() {
        for planes in [1, 2, 6, 16, 99] {
            let selected = piece.first_planes(planes);
            let planes = planes.min(16);
            let mut bytes = vec![0; selected.bytes as usize];
            file.seek(SeekFrom::Start(start)).unwrap();
            file.read_exact(&mut bytes).unwrap();
            let all = values(number, piece);
            assert_eq!(bytes.len(), all.len() / 8 * planes as usize);
            // They are the values in so many bits.
            let value = |at: usize| {
                let bit =
                    |plane: usize| bytes[plane * (all.len() / 8) + at / 8] >> (7 - at % 8) & 1;
                (0..planes as usize).fold(0u16, |value, plane| value << 1 | u16::from(bit(plane)))
            };
            assert!((0..all.len()).all(|at| value(at) == all[at] >> (16 - planes)));
        }
    }
    std::fs::remove_file(path).unwrap();
}

/// The program with loads of these pieces.
fn loading(program: &Program, pieces: &[Piece]) -> Program {
    let mut program = program.clone();
    let mut widths = Vec::new();
    for op in &program.operations {
        if let OpKind::Load { piece } = op.kind {
            widths.push((op.writes[0].tensor, pieces[piece as usize].stored() as u32));
        }
    }
    for (tensor, width) in widths {
        program.tensors[tensor.0 as usize].width = width;
        for op in &mut program.operations {
            let regions = op.reads.iter_mut().chain(&mut op.writes);
            let of = regions.filter(|region| region.tensor == tensor);
            of.for_each(|region| region.columns = galaxy_common::Span::first(width));
        }
    }
    program
}

#[test]
fn a_program_loads_the_planes_that_are_selected_and_no_others() {
    let (spec, plan) = streamed();
    let shape = BatchShape::single(5, Wanted::AllLogits).unwrap();
    let programs = lower(&spec, &Formats::default(), &plan, Phase::Prefill, &shape).unwrap();
    let graph = OperatorGraph::of(&spec);
    let selected = |planes: u32| -> Vec<Vec<Piece>> {
        let of = |piece: Piece| piece.first_planes(planes);
        let all =
            plan.ring.iter().map(|device| pieces::of_device(&graph, &Formats::default(), device));
        all.map(|pieces| pieces.into_iter().map(of).collect()).collect()
    };
    let loads = |planes: u32| -> Vec<Program> {
        let each = programs.iter().zip(selected(planes));
        each.map(|(program, pieces)| loading(program, &pieces)).collect()
    };
    let weights = |program: &Program| {
        let of = program.tensors.iter().filter(|tensor| tensor.role == Role::Weights);
        of.map(|tensor| tensor.bytes()).sum::<u64>()
    };
    assert_eq!(loads(32), programs);
    assert!(weights(&loads(1)[0]) < weights(&programs[0]));
    let verify = |planes, programs: &[Program]| {
        verify_graph(&graph, selected(planes), &plan, &shape, programs)
    };
    for planes in [1, 6, 32] {
        assert_eq!(verify(planes, &loads(planes)), Ok(()));
    }
    for (planes, loaded) in [(1, 32), (32, 1)] {
        let found = verify(planes, &loads(loaded));
        assert!(matches!(found, Err(VerifyError::Content { .. })), "{found:?}");
    }
}
