//! Reading operators from nodes: which there are, and one file for each kind.

mod arrange;
mod conv;
mod elements;
mod normalise;
mod pool;
mod product;
mod reduce;
mod resize;
mod window;

use super::{
    node::{KnownNode, Made},
    operator::Operator,
    tensor::ElementType,
};

/// Reads an operator from a node.
type Read = fn(&KnownNode<'_>) -> Result<Made, String>;

/// The operators that are known, by their names in files.
const KNOWN: &[(&str, Read)] = &[
    ("Abs", elements::unary),
    ("Add", elements::binary),
    ("AveragePool", pool::read),
    ("BatchNormalization", normalise::batch_norm),
    ("Cast", arrange::cast),
    ("Ceil", elements::unary),
    ("Clip", elements::clip),
    ("Concat", arrange::concat),
    ("Conv", conv::read),
    ("ConvTranspose", conv::read_transposed),
    ("Div", elements::binary),
    ("Dropout", arrange::dropout),
    ("Elu", elements::unary),
    ("Erf", elements::unary),
    ("Exp", elements::unary),
    ("Expand", arrange::expand),
    ("Flatten", arrange::flatten),
    ("Floor", elements::unary),
    ("Gather", arrange::gather),
    ("Gemm", product::gemm),
    ("GlobalAveragePool", reduce::global),
    ("GlobalMaxPool", reduce::global),
    ("HardSigmoid", elements::unary),
    ("HardSwish", elements::unary),
    ("Identity", arrange::identity),
    ("LRN", normalise::local_response),
    ("LeakyRelu", elements::unary),
    ("Log", elements::unary),
    ("LogSoftmax", normalise::softmax),
    ("MatMul", product::matmul),
    ("Max", elements::several),
    ("MaxPool", pool::read),
    ("Min", elements::several),
    ("Mish", elements::unary),
    ("Mul", elements::binary),
    ("Neg", elements::unary),
    ("PRelu", elements::binary),
    ("Pad", arrange::pad),
    ("Pow", elements::binary),
    ("Reciprocal", elements::unary),
    ("ReduceMax", reduce::read),
    ("ReduceMean", reduce::read),
    ("ReduceMin", reduce::read),
    ("ReduceSum", reduce::read),
    ("Relu", elements::unary),
    ("Reshape", arrange::reshape),
    ("Resize", resize::read),
    ("Sigmoid", elements::unary),
    ("Slice", arrange::slice),
    ("Softmax", normalise::softmax),
    ("Softplus", elements::unary),
    ("Split", arrange::split),
    ("Sqrt", elements::unary),
    ("Squeeze", arrange::squeeze),
    ("Sub", elements::binary),
    ("Sum", elements::several),
    ("Tanh", elements::unary),
    ("Transpose", arrange::transpose),
    ("Unsqueeze", arrange::unsqueeze),
    ("Upsample", resize::upsample),
];

/// Reads what a node is.
///
/// # Errors
/// When its operator is not known, or its attributes and inputs do not fit it.
pub(super) fn read(node: &KnownNode<'_>) -> Result<Made, String> {
    let name = node.node.operator.as_str();
    let Some((_, read)) = KNOWN.iter().find(|(known, _)| *known == name) else {
        return Err(format!("the operator {name} is not known here"));
    };
    let made = read(node)?;
    node.check_all_read()?;
    Ok(made)
}

/// Checks that an operator can be computed when a network runs, where values are floats, or whole numbers that are only
/// moved.
///
/// # Errors
/// The first input or output that is of another type.
pub(super) fn check_types(node: &KnownNode<'_>, made: &Made) -> Result<(), String> {
    let is_whole = |element| matches!(element, ElementType::I64 | ElementType::I32);
    for at in &made.reads {
        let element = node.input(*at)?.element;
        let is_index = matches!(made.operator, Operator::Gather { .. }) && *at == 1;
        if element != ElementType::F32
            && !((is_index || made.operator.only_moves()) && is_whole(element))
        {
            let name = &node.node.inputs[*at];
            return Err(format!(
                "its input {at} ({name:?}) holds {} values, and it is computed in float",
                element.name()
            ));
        }
    }
    match made
        .outputs
        .iter()
        .find(|(_, element)| *element != ElementType::F32 && !is_whole(*element))
    {
        Some((_, element)) => Err(format!(
            "it computes {} values, and float, int32 and int64 are known",
            element.name()
        )),
        None => Ok(()),
    }
}
