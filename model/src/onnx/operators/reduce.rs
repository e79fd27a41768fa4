//! Sums, means and largest values along axes.

use crate::onnx::{
    node::{KnownNode, Made, axes},
    operator::{Operator, Reduce, ReduceKind},
};

fn made(
    node: &KnownNode<'_>,
    kind: ReduceKind,
    axes: Vec<usize>,
    kept: bool,
) -> Result<Made, String> {
    let input = node.input(0)?.dims;
    let side = |(axis, side): (usize, &u64)| match (axes.contains(&axis), kept) {
        (false, _) => Some(*side),
        (true, true) => Some(1),
        (true, false) => None,
    };
    let dims = input.iter().enumerate().filter_map(side).collect();
    if kind != ReduceKind::Sum && axes.iter().any(|axis| input[*axis] == 0) {
        return Err(format!("an input of shape {input:?} has no values along these axes"));
    }
    Made::of_first(node, Operator::Reduce(Reduce { kind, axes }), dims)
}

/// Reads a reduction, whose axes are an attribute in old files and an input in new ones.
pub(super) fn read(node: &KnownNode<'_>) -> Result<Made, String> {
    let (kind, by_input) = match node.node.operator.as_str() {
        "ReduceSum" => (ReduceKind::Sum, 13),
        "ReduceMean" => (ReduceKind::Mean, 18),
        "ReduceMax" => (ReduceKind::Max, 18),
        _ => (ReduceKind::Min, 18),
    };
    let of = node.input(0)?.dims.len();
    let given = match node.opset >= by_input {
        true => node.optional_array(1)?.map(|array| array.list()).transpose()?,
        false => node.wholes("axes")?,
    };
    let nothing = node.opset >= by_input && node.flag("noop_with_empty_axes", false)?;
    let axes = match given.filter(|given| !given.is_empty()) {
        Some(given) => axes(given, of)?,
        None if nothing => Vec::new(),
        None => (0..of).collect(),
    };
    let kept = node.flag("keepdims", true)?;
    made(node, kind, axes, kept)
}

/// Reads the mean or largest value of all pixels of each channel.
pub(super) fn global(node: &KnownNode<'_>) -> Result<Made, String> {
    let of = node.input(0)?.dims.len();
    if of < 3 {
        return Err(format!("an input of {of} axes has no channels and pixels"));
    }
    let kind = match node.node.operator.as_str() {
        "GlobalMaxPool" => ReduceKind::Max,
        _ => ReduceKind::Mean,
    };
    made(node, kind, (2..of).collect(), true)
}
