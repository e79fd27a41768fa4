//! Matrices in formats of their own: the formats and bytes in which each is held, and the units between
//! which they are cut.

use super::{laid_out, language, spec};
use crate::RandomLayout;
use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DevicePlan, Exchange, Room, Span, Strategy, Streaming,
    WeightFormat,
};
use galaxy_graph::{
    budget,
    holdings::{self, Cuts, Run, WeightSlice},
    operators::{OperatorGraph, OperatorId, Product},
    pieces::{self, RUN_ALIGNMENT},
};
use galaxy_model::{Formats, Matrix, ModelSpec};

const Q4K: WeightFormat = WeightFormat::Q4K;
const Q6K: WeightFormat = WeightFormat::Q6K;

/// Four heads of 16 columns, two for each of keys and values, and a gated MLP of 96 columns.
fn model() -> ModelSpec {
    let spec = spec(64, true, true, 2, language());
    ModelSpec { heads: 4, head_width: 16, intermediate: 96, gated: true, ..spec }
}

fn part(spec: &ModelSpec, heads: Span<galaxy_common::Head>, columns: (u32, u32)) -> Assignment {
    let columns = Span::new(columns.0, columns.1);
    Assignment {
        blocks: vec![BlockAssignment { layers: Span::first(spec.layers), heads, columns }],
        row_weight: 1,
        vocabulary: Span::first(spec.vocabulary),
    }
}

/// The slices of a product that an assignment has, and the runs that they are held in.
fn runs(
    graph: &OperatorGraph,
    formats: &Formats,
    assignment: &Assignment,
    of: fn(&OperatorGraph) -> OperatorId,
) -> (Vec<WeightSlice>, Vec<Run>) {
    let product: &Product = graph.product(of(graph)).unwrap();
    let slices = graph.slices(product, assignment);
    let runs = product.runs(formats, &slices);
    (slices, runs.into_vec())
}

#[test]
fn neighbouring_slices_of_one_weight_format_form_one_matrix() {
    let spec = model();
    let graph = OperatorGraph::of(&spec);
    let all = part(&spec, Span::first(4), (0, 96));
    let qkv = |formats: &Formats| runs(&graph, formats, &all, |graph| graph.layers[0].qkv).1;
    let run = |format, slices, outputs| Run { format, slices, inputs: 64, outputs, gated: false };
    let formats = Formats::all(Q4K);
    assert_eq!(qkv(&formats), [run(Q4K, 0..3, 64 + 32 + 32)]);
    let mixed = formats.clone().with(Matrix::Value(0), Q6K);
    assert_eq!(qkv(&mixed), [run(Q4K, 0..2, 96), run(Q6K, 2..3, 32)]);
    let between = formats.with(Matrix::Key(0), Q6K);
    let each = [run(Q4K, 0..1, 64), run(Q6K, 1..2, 32), run(Q4K, 2..3, 32)];
    assert_eq!(qkv(&between), each);
    // Of other layers the first knows nothing.
    assert_eq!(qkv(&Formats::all(Q4K).with(Matrix::Value(1), Q6K)).len(), 1);
}

#[test]
fn cut_groups_and_gates_of_mixed_formats_are_widened_to_f32() {
    let spec = model();
    let graph = OperatorGraph::of(&spec);
    let formats = Formats::all(Q4K);
    let held = |heads, columns, of| {
        let (slices, runs) = runs(&graph, &formats, &part(&spec, heads, columns), of);
        assert_eq!(runs.len(), 1);
        assert_eq!(runs[0].outputs as usize, slices.iter().map(|s| s.outputs.len()).sum::<usize>());
        (runs[0].format, runs[0].inputs)
    };
    let down = |from, to| held(Span::first(4), (from, to), |graph| graph.layers[0].down);
    assert_eq!(down(0, 96), (Q4K, 96));
    assert_eq!(down(32, 64), (Q4K, 32));
    assert_eq!(down(64, 96), (Q4K, 32));
    assert_eq!(down(0, 48), (WeightFormat::F32, 48));
    assert_eq!(down(16, 96), (WeightFormat::F32, 80));
    let output = |heads| held(heads, (0, 96), |graph| graph.layers[0].output).0;
    assert_eq!(output(Span::new(2, 4)), Q4K);
    assert_eq!(output(Span::new(1, 4)), WeightFormat::F32);
    // Outputs are cut anywhere.
    let up = |columns| held(Span::first(4), columns, |graph| graph.layers[0].up).0;
    assert_eq!(up((5, 17)), Q4K);
    let unlike = Formats::all(Q4K).with(Matrix::Gate(0), Q6K);
    let all = part(&spec, Span::first(4), (0, 96));
    let (_, of_unlike) = runs(&graph, &unlike, &all, |graph| graph.layers[0].up);
    let format = WeightFormat::F32;
    assert_eq!(of_unlike, [Run { format, slices: 0..2, inputs: 64, outputs: 192, gated: true }]);
}

#[test]
fn shard_bytes_follow_the_weight_format_of_each_matrix() {
    let spec = model();
    let graph = OperatorGraph::of(&spec);
    let all = part(&spec, Span::first(4), (0, 96));
    let bytes = |formats: &Formats| holdings::bytes(&graph, formats, &all);
    let formats = Formats::all(Q4K);
    let more = formats.clone().with(Matrix::Down(1), Q6K);
    assert_eq!(bytes(&more) - bytes(&formats), Q6K.held(96, 64) - Q4K.held(96, 64));
    let read = |formats| holdings::transition(&graph, formats, None, &all).read.0;
    assert_eq!(read(&more) - read(&formats), Q6K.bytes(96, 64) - Q4K.bytes(96, 64));
    assert!(read(&formats.clone().with_vectors(WeightFormat::F32)) > read(&formats));
}

#[test]
fn weights_that_change_format_are_read_again_in_a_transition() {
    let spec = ModelSpec { mlp_bias: false, ..model() };
    let graph = OperatorGraph::of(&spec);
    let read = |formats: &Formats, old, new| {
        let [old, new] = [old, new].map(|columns| part(&spec, Span::first(4), columns));
        holdings::transition(&graph, formats, Some(&old), &new).read.0
    };
    let formats = Formats::all(Q4K);
    let layers = u64::from(spec.layers);
    // Gate and up outputs are kept, and of inputs of down those that were held in the same format.
    assert_eq!(read(&formats, (0, 96), (0, 64)), 0);
    assert_eq!(read(&formats, (0, 96), (0, 48)), layers * Q4K.bytes(48, 64));
    assert_eq!(read(&Formats::default(), (0, 96), (0, 48)), 0);
}

#[test]
fn matrices_of_a_piece_are_aligned_to_cache_lines() {
    let spec = ModelSpec { hidden: 32, ..model() };
    let graph = OperatorGraph::of(&spec);
    let most = WeightFormat::Mxfp4;
    let formats = Formats::all(most).with(Matrix::Value(0), Q6K);
    let all = part(&spec, Span::first(4), (0, 96));
    let pieces = pieces::pieces(&graph, &all, &formats, Bytes(1 << 10));
    let qkv = pieces.iter().find(|piece| piece.operator == graph.layers[0].qkv).unwrap();
    let places: Vec<_> = qkv.places().map(|(run, place)| (run.format, place)).collect();
    let (first, second) = (most.held(32, 96), Q6K.held(32, 32));
    let start = first.next_multiple_of(RUN_ALIGNMENT);
    assert!(start > first);
    assert_eq!(places, [(most, 0..first), (Q6K, start..start + second)]);
    assert_eq!((qkv.bytes, qkv.held()), (start + second, first + second));
    assert_eq!(qkv.first_planes(2), *qkv);
    // All other pieces have one matrix, and together they have all that is held.
    assert!(pieces.iter().all(|piece| piece.operator == qkv.operator || piece.runs.len() == 1));
    let held: u64 = pieces.iter().map(pieces::Piece::held).sum();
    let without = holdings::bytes(&graph, &formats, &holdings::nothing());
    let biases = holdings::bytes(&graph, &formats, &all) - without - held;
    assert_eq!(biases, u64::from(spec.layers) * 4 * (64 + 2 * 32 + 2 * 96));
    let other = pieces::pieces(&graph, &all, &Formats::all(most), Bytes(1 << 10));
    assert_ne!(pieces::identity("model", &pieces), pieces::identity("model", &other));
}

#[test]
fn weights_from_disk_are_as_stored_or_widened() {
    let (spec, formats) = (model(), Formats::all(Q4K).with(Matrix::Value(0), Q6K));
    let graph = OperatorGraph::of(&spec);
    let way = RandomLayout {
        strategy: Strategy::Megatron,
        modes: [(false, false); 2],
        exchange: Exchange::Ring,
        tiles: 1,
    };
    let plan = laid_out(&way, &spec, &[[1, 1, 1, 1]]);
    let device = |format| DevicePlan {
        streaming: Some(Streaming {
            format,
            piece: Bytes(8 << 10),
            buffer: Bytes(1 << 20),
            room: Room::Ring,
            loaders: 1,
            resident: Vec::new(),
        }),
        ..plan.ring[0].clone()
    };
    let bytes = |format| -> (u64, Bytes) {
        let device = device(format);
        let pieces = pieces::of_device(&graph, &formats, &device);
        let held = pieces.iter().map(pieces::Piece::held).sum();
        (held, budget::weights(&graph, &formats, &device))
    };
    let ((stored, of_stored), (widened, of_widened)) = (bytes(Q4K), bytes(WeightFormat::F32));
    assert!(stored * 3 < widened, "{stored} of {widened}");
    // What stays are vectors and biases.
    assert_eq!(of_stored, of_widened);
    let all = budget::all_weights(&graph, &formats, &plan.ring[0]);
    assert_eq!(of_stored.0 + stored, all.0);
}

#[test]
fn quantised_models_are_cut_between_quantisation_groups() {
    let spec = model();
    let cuts = |head_width, formats: &Formats| {
        let cuts = Cuts::of(&ModelSpec { head_width, ..spec.clone() }, formats);
        (cuts.heads, cuts.columns)
    };
    assert_eq!(cuts(16, &Formats::default()), (1, 1));
    assert_eq!(cuts(16, &Formats::all(Q4K)), (2, 32));
    assert_eq!(cuts(80, &Formats::all(Q4K)), (2, 32));
    assert_eq!(cuts(64, &Formats::all(Q4K)), (1, 32));
    assert_eq!(cuts(16, &Formats::default().with(Matrix::Down(1), Q6K)), (1, 32));
    assert_eq!(cuts(16, &Formats::all(Q4K).map(|_| WeightFormat::F16)), (1, 1));
}
