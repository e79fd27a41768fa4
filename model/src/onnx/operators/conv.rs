//! Convolutions, and transposed ones.

use super::window::{self, AutoPad};
use crate::onnx::{
    node::{KnownNode, Made},
    operator::{Conv, ConvTranspose, Operator},
};

/// What both kinds have: groups, and whether there is a bias of as many values as there are outputs.
fn groups(node: &KnownNode<'_>) -> Result<u64, String> {
    let groups = node.whole("group", 1)?;
    u64::try_from(groups)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| format!("its attribute group is {groups}"))
}

/// The shapes of input and kernels, which have as many axes.
fn shapes<'a>(node: &KnownNode<'a>) -> Result<(&'a [u64], &'a [u64]), String> {
    let (input, kernels) = (node.input(0)?.dims, node.input(1)?.dims);
    if input.len() < 3 || input.len() != kernels.len() {
        return Err(format!(
            "an input of shape {input:?} does not fit kernels of shape {kernels:?}"
        ));
    }
    if let Some(shape) = window::kernel_shape(node)?.filter(|shape| *shape != kernels[2..]) {
        return Err(format!(
            "its attribute kernel_shape is {shape:?}, and its kernels are of shape {kernels:?}"
        ));
    }
    Ok((input, kernels))
}

fn bias(node: &KnownNode<'_>, outputs: u64) -> Result<bool, String> {
    match node.optional(2) {
        None => Ok(false),
        Some(bias) if bias.dims == [outputs] => Ok(true),
        Some(bias) => {
            Err(format!("a bias of shape {:?} does not fit {outputs} outputs", bias.dims))
        }
    }
}

fn finished(
    node: &KnownNode<'_>,
    operator: Operator,
    bias: bool,
    dims: Vec<u64>,
) -> Result<Made, String> {
    let reads = if bias { vec![0, 1, 2] } else { vec![0, 1] };
    Ok(Made { operator, reads, outputs: vec![(dims, node.input(0)?.element)] })
}

/// Reads a convolution.
pub(super) fn read(node: &KnownNode<'_>) -> Result<Made, String> {
    let (input, kernels) = shapes(node)?;
    let (groups, outputs) = (groups(node)?, kernels[0]);
    if kernels[1].checked_mul(groups) != Some(input[1]) || outputs % groups != 0 {
        return Err(format!(
            "an input of shape {input:?} does not fit kernels of shape {kernels:?} in {groups} groups"
        ));
    }
    let windows = window::windows(node, &kernels[2..], &input[2..], true)?;
    let bias = bias(node, outputs)?;
    let mut dims = vec![input[0], outputs];
    for (window, of) in windows.iter().zip(&input[2..]) {
        dims.push(window.results(*of)?);
    }
    finished(node, Operator::Conv(Conv { groups, windows, bias }), bias, dims)
}

/// Reads a transposed convolution.
pub(super) fn read_transposed(node: &KnownNode<'_>) -> Result<Made, String> {
    let (input, kernels) = shapes(node)?;
    let groups = groups(node)?;
    let outputs = kernels[1].checked_mul(groups);
    let Some(outputs) = outputs.filter(|_| kernels[0] == input[1] && input[1] % groups == 0) else {
        return Err(format!(
            "an input of shape {input:?} does not fit kernels of shape {kernels:?} in {groups} groups"
        ));
    };
    let axes = input.len() - 2;
    let list = |name| -> Result<Option<Vec<u64>>, String> {
        let Some(given) = node.wholes(name)? else { return Ok(None) };
        let numbers: Option<Vec<u64>> = given.iter().map(|n| u64::try_from(*n).ok()).collect();
        let numbers =
            numbers.filter(|n| n.len() == axes || name == "output_shape" && n.len() == axes + 2);
        numbers.map(Some).ok_or_else(|| format!("its attribute {name} is {given:?}"))
    };
    let extra = list("output_padding")?.unwrap_or_else(|| vec![0; axes]);
    // With images and channels in front, in some files.
    let wanted = list("output_shape")?.map(|shape| shape[shape.len() - axes..].to_vec());
    let pad = window::auto_pad(node)?;
    let mut windows = window::given(node, &kernels[2..], true)?;
    let bias = bias(node, outputs)?;
    let mut dims = vec![input[0], outputs];
    for (axis, window) in windows.iter_mut().enumerate() {
        let of = input[2 + axis];
        let reach = of.saturating_sub(1) * window.stride + window.extent() + extra[axis];
        let wanted = match (&wanted, pad) {
            (Some(shape), _) => Some(shape[axis]),
            (None, AutoPad::Upper | AutoPad::Lower) => Some(of * window.stride),
            (None, _) => None,
        };
        if pad == AutoPad::None {
            (window.before, window.after) = (0, 0);
        }
        if let Some(wanted) = wanted {
            let all = reach.saturating_sub(wanted);
            let (less, more) = (all / 2, all - all / 2);
            (window.before, window.after) =
                if pad == AutoPad::Upper { (less, more) } else { (more, less) };
        }
        let Some(side) = reach.checked_sub(window.before + window.after).filter(|side| *side > 0)
        else {
            return Err(format!("its padding is more than the {reach} elements of its result"));
        };
        dims.push(wanted.unwrap_or(side));
    }
    let operator = Operator::ConvTranspose(ConvTranspose { groups, windows, bias });
    finished(node, operator, bias, dims)
}
