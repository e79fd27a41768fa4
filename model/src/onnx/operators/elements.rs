//! Functions of each value by itself, or of two values.

use crate::onnx::{
    array,
    node::{KnownNode, Made},
    operator::{Binary, Operator, Unary},
};

/// The function that a node names.
fn function(node: &KnownNode<'_>) -> Result<Unary, String> {
    Ok(match node.node.operator.as_str() {
        "Abs" => Unary::Abs,
        "Ceil" => Unary::Ceil,
        "Elu" => Unary::Elu { alpha: node.float("alpha", 1.0)? },
        "Erf" => Unary::Erf,
        "Exp" => Unary::Exp,
        "Floor" => Unary::Floor,
        "HardSigmoid" => {
            Unary::HardSigmoid { alpha: node.float("alpha", 0.2)?, beta: node.float("beta", 0.5)? }
        }
        "HardSwish" => Unary::HardSwish,
        "LeakyRelu" => Unary::LeakyRelu { alpha: node.float("alpha", 0.01)? },
        "Log" => Unary::Log,
        "Mish" => Unary::Mish,
        "Neg" => Unary::Neg,
        "Reciprocal" => Unary::Reciprocal,
        "Relu" => Unary::Relu,
        "Sigmoid" => Unary::Sigmoid,
        "Softplus" => Unary::Softplus,
        "Sqrt" => Unary::Sqrt,
        "Tanh" => Unary::Tanh,
        other => return Err(format!("{other} is no function of one value")),
    })
}

/// Skips the attribute by which operators of version 1 said which inputs they overwrite.
fn skip_consumed(node: &KnownNode<'_>) -> Result<(), String> {
    if node.opset < 6 {
        node.wholes("consumed_inputs")?;
    }
    Ok(())
}

/// Reads a function of each value.
pub(super) fn unary(node: &KnownNode<'_>) -> Result<Made, String> {
    skip_consumed(node)?;
    let dims = node.input(0)?.dims.to_vec();
    Made::of_first(node, Operator::Unary(function(node)?), dims)
}

/// Reads a clip, whose bounds are attributes in old files and inputs in new ones.
pub(super) fn clip(node: &KnownNode<'_>) -> Result<Made, String> {
    skip_consumed(node)?;
    let bound = |at: usize, name: &'static str, default: f32| -> Result<f32, String> {
        if node.opset < 11 {
            return node.float(name, default);
        }
        match node.optional(at) {
            None => Ok(default),
            Some(_) => Ok(node.array(at)?.one()? as f32),
        }
    };
    let clip = Unary::Clip {
        least: bound(1, "min", f32::NEG_INFINITY)?,
        most: bound(2, "max", f32::INFINITY)?,
    };
    let dims = node.input(0)?.dims.to_vec();
    Made::of_first(node, Operator::Unary(clip), dims)
}

/// Reads a function of two values.
pub(super) fn binary(node: &KnownNode<'_>) -> Result<Made, String> {
    let function = match node.node.operator.as_str() {
        "Add" => Binary::Add,
        "Sub" => Binary::Sub,
        "Mul" => Binary::Mul,
        "Div" => Binary::Div,
        "Pow" => Binary::Pow,
        "PRelu" => Binary::PRelu,
        other => return Err(format!("{other} is no function of two values")),
    };
    skip_consumed(node)?;
    let (a, b) = (node.input(0)?, node.input(1)?);
    // Before version 7 the second value had to ask for being repeated, and from which axis on.
    if node.opset < 7 && (node.flag("broadcast", false)? || node.has("axis")) {
        let from = node.whole("axis", a.dims.len() as i64 - b.dims.len() as i64)?;
        if from + b.dims.len() as i64 != a.dims.len() as i64 {
            return Err(format!(
                "it repeats a value of shape {:?} from axis {from} on, which is not done",
                b.dims
            ));
        }
    }
    let dims = match function {
        // The slope is repeated along the axes of the value, and never the other way round.
        Binary::PRelu => {
            let dims = array::broadcast(a.dims, b.dims)?;
            if dims != a.dims {
                return Err(format!("a slope of shape {:?} does not fit {:?}", b.dims, a.dims));
            }
            dims
        }
        _ => array::broadcast(a.dims, b.dims)?,
    };
    Ok(Made {
        operator: Operator::Binary(function),
        reads: vec![0, 1],
        outputs: vec![(dims, a.element)],
    })
}

/// Reads a function of any number of values, which are taken one after another.
pub(super) fn several(node: &KnownNode<'_>) -> Result<Made, String> {
    let function = match node.node.operator.as_str() {
        "Max" => Binary::Max,
        "Min" => Binary::Min,
        _ => Binary::Add,
    };
    skip_consumed(node)?;
    let reads = node.present();
    let mut dims = node.input(0)?.dims.to_vec();
    for at in &reads {
        dims = array::broadcast(&dims, node.input(*at)?.dims)?;
    }
    Ok(Made {
        operator: Operator::Binary(function),
        reads,
        outputs: vec![(dims, node.input(0)?.element)],
    })
}
