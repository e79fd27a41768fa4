//! Normalisations: by stored statistics, by neighbouring channels, and softmax.

use crate::onnx::{
    node::{KnownNode, Made, axis},
    operator::{Operator, Softmax},
};

/// The most neighbouring channels that a value is normalised by.
const MOST: u64 = 1 << 16;

/// Reads a batch normalisation, as it is when a network runs.
pub(super) fn batch_norm(node: &KnownNode<'_>) -> Result<Made, String> {
    let input = node.input(0)?;
    let epsilon = node.float("epsilon", 1e-5)?;
    node.float("momentum", 0.9)?;
    if node.opset >= 14 && node.flag("training_mode", false)? {
        return Err("its attribute training_mode is 1: networks are not trained here".to_owned());
    }
    if node.opset < 7 && !node.flag("is_test", false)? && node.node.outputs.len() > 1 {
        return Err("its attribute is_test is 0: networks are not trained here".to_owned());
    }
    if node.opset < 9 && !node.flag("spatial", true)? {
        return Err("its attribute spatial is 0, which is not done".to_owned());
    }
    if node.opset < 6 {
        node.wholes("consumed_inputs")?;
    }
    let channels = input.dims.get(1).copied().unwrap_or(1);
    for at in 1..5 {
        let dims = node.input(at)?.dims;
        if dims != [channels] {
            return Err(format!(
                "its input {at} is of shape {dims:?}, and there are {channels} channels"
            ));
        }
    }
    let outputs = vec![(input.dims.to_vec(), input.element)];
    Ok(Made { operator: Operator::BatchNorm { epsilon }, reads: vec![0, 1, 2, 3, 4], outputs })
}

/// Reads a normalisation by neighbouring channels.
pub(super) fn local_response(node: &KnownNode<'_>) -> Result<Made, String> {
    let size = node.whole("size", 0)?;
    let Some(size) = u64::try_from(size).ok().filter(|n| (1..=MOST).contains(n)) else {
        return Err(format!("its attribute size is {size}: 1 to {MOST} are done"));
    };
    let operator = Operator::LocalResponseNorm {
        size,
        alpha: node.float("alpha", 1e-4)?,
        beta: node.float("beta", 0.75)?,
        bias: node.float("bias", 1.0)?,
    };
    let dims = node.input(0)?.dims;
    match dims.len() {
        0..3 => Err(format!("an input of shape {dims:?} has no channels and pixels")),
        _ => Made::of_first(node, operator, dims.to_vec()),
    }
}

/// Reads a softmax, which was over an axis and all behind it before version 13.
pub(super) fn softmax(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let old = node.opset < 13;
    let number = node.whole("axis", if old { 1 } else { -1 })?;
    // Behind the last axis there is nothing, over which everything is 1.
    let first = match old && number == dims.len() as i64 {
        true => dims.len(),
        false => axis(number, dims.len())?,
    };
    let end = if old { dims.len() } else { first + 1 };
    let log = node.node.operator == "LogSoftmax";
    Made::of_first(node, Operator::Softmax(Softmax { first, end, log }), dims.to_vec())
}
