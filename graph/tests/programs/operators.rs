//! Operator graphs of descriptions, and programs that name the wrong operators of them.

use super::{Case, case, classes, language, spec};
use galaxy_common::{Kernel, Span};
use galaxy_graph::{
    VerifyError,
    operators::{Axes, CutSide, Operator, OperatorGraph, Weight},
    program::{OpKind, Operation},
};
use galaxy_model::{HeadSpec, Matrix, ModelSpec, Pairs, Patches, Positions, RelativeBias, Vector};

/// Model descriptions that have every weight between them.
fn specs() -> Vec<ModelSpec> {
    let rotary = Positions::Rotary {
        inverse_frequencies: vec![1.0],
        long: None,
        scale: 1.0,
        pairs: Pairs::Halves,
        limit: 300,
    };
    let bert = spec(12, false, false, 6, classes());
    let gpt = spec(12, true, true, 3, language());
    let relative_bias = Some(RelativeBias { buckets: 8, most: 16 });
    let patches = Some(Patches { channels: 3, height: 8, width: 8, size: 4 });
    vec![
        ModelSpec { token_types: 2, embedding_norm: true, ..bert.clone() },
        ModelSpec { patches, vocabulary: 0, ..bert.clone() },
        ModelSpec { relative_bias, ..bert },
        ModelSpec { parallel: true, positions: rotary.clone(), ..gpt.clone() },
        ModelSpec { gated: true, head_norm: true, positions: rotary, ..gpt.clone() },
        ModelSpec { head: HeadSpec::Language { tied: false, bias: true }, ..gpt.clone() },
        ModelSpec { layers: 0, ..gpt },
    ]
}

#[test]
fn operator_graphs_are_consistent_and_name_every_weight() {
    for spec in specs() {
        let graph = OperatorGraph::of(&spec);
        assert_eq!(graph.check(), Ok(()), "{spec:?}");
        let all = Matrix::all(&spec).map(Weight::Matrix);
        for weight in all.chain(Vector::all(&spec).map(Weight::Vector)) {
            // Without layers nothing stands before the first.
            let named = graph.weight(weight).is_some() || spec.layers == 0;
            assert!(named, "no operator reads {weight:?}");
        }
        let named = graph.weights.iter().filter(|weight| match weight {
            Weight::Matrix(matrix) => matrix.shape(&spec).is_none(),
            Weight::Vector(vector) => vector.width(&spec).is_none(),
        });
        assert_eq!(named.collect::<Vec<_>>(), Vec::<&Weight>::new(), "the model has no such");
        let cuts = graph.operators.iter().filter_map(|operator| operator.operate().cut());
        let sums = cuts.filter(|cut| cut.side == CutSide::Inputs).count();
        assert_eq!(sums as u32, 2 * spec.layers);
    }
}

#[test]
fn an_inconsistent_operator_graph_is_refused() {
    let whole = OperatorGraph::of(&spec(12, true, true, 3, language()));
    let mut wide = whole.clone();
    let columns = wide.values[0].columns() + 1;
    wide.values[0].axes = Axes::Text { columns };
    assert!(wide.check().unwrap_err().contains("13"), "{:?}", wide.check());
    let mut turned = whole.clone();
    turned.operators.reverse();
    assert!(turned.check().unwrap_err().contains("not made before"));
    let mut lost = whole;
    lost.weights.pop();
    assert!(lost.check().unwrap_err().contains("weight"));
}

/// The error of a case after `change` of the first operation for which it does something.
fn changed(change: impl Fn(&mut Operation) -> bool) -> VerifyError {
    let mut case: Case = case();
    let operations = &mut case.programs[1].operations;
    assert!(operations.iter_mut().any(change), "nothing was changed");
    case.verify().unwrap_err()
}

#[test]
fn an_operator_of_another_layer_or_kind_is_found() {
    let graph = OperatorGraph::of(&case().spec);
    let [first, second] = [graph.layers[0], graph.layers[1]];
    let attends = |op: &mut Operation| match &mut op.kind {
        OpKind::Attend { operator, .. } => {
            *operator = second.attention;
            true
        }
        _ => false,
    };
    let norms = |op: &mut Operation| match &mut op.kind {
        OpKind::AddNorm { norm, .. } => {
            *norm = second.after_mlp.norm;
            true
        }
        _ => false,
    };
    let multiplies = |op: &mut Operation| match &mut op.kind {
        OpKind::Product { operator, kernel: Kernel::Down, .. } => {
            *operator = second.down;
            true
        }
        _ => false,
    };
    let embeds = |op: &mut Operation| match &mut op.kind {
        OpKind::Embed(operator) => {
            *operator = first.up;
            true
        }
        _ => false,
    };
    let nowhere = |op: &mut Operation| match &mut op.kind {
        OpKind::Product { operator, .. } => {
            operator.0 = u32::MAX;
            true
        }
        _ => false,
    };
    for found in
        [changed(attends), changed(norms), changed(multiplies), changed(embeds), changed(nowhere)]
    {
        assert!(matches!(found, VerifyError::Content { .. }), "{found}");
    }
}

#[test]
fn a_share_of_another_device_is_found() {
    let grown = |op: &mut Operation| match &mut op.kind {
        OpKind::Product { share, .. } => {
            *share = Span::new(share.start(), share.end() + 1);
            true
        }
        _ => false,
    };
    let smaller = |op: &mut Operation| match &mut op.kind {
        OpKind::Product { share, kernel: Kernel::Down, .. } => {
            *share = Span::new(share.start(), share.end() - 1);
            true
        }
        _ => false,
    };
    for found in [changed(grown), changed(smaller)] {
        assert!(matches!(found, VerifyError::Content { .. }), "{found}");
    }
}

#[test]
fn products_and_kernels_agree_on_which_side_is_cut() {
    let graph = OperatorGraph::of(&spec(12, true, true, 3, language()));
    for operator in &graph.operators {
        if let Operator::Product(product) = operator {
            let by_inputs = product.cut.is_some_and(|cut| cut.side == CutSide::Inputs);
            assert_eq!(product.kernel.is_cut_by_inputs(), by_inputs);
        }
    }
}
