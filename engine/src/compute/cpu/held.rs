//! What a device holds, as kernels take it.

use crate::{
    compute::{
        call::Call,
        kernels::{activation::ActivationFn, dense::Epilogue, rows::Norm},
        op_error::{NO_MATRIX, NO_OPERATOR, OpError},
    },
    weights::{AnyMatrix, Shard, ShardProduct},
};
use galaxy_graph::operators::{self, OperatorId};
use galaxy_model::Activation;
use std::ops::Range;

fn activation(activation: Activation) -> ActivationFn {
    match activation {
        Activation::Gelu => ActivationFn::Gelu,
        Activation::GeluTanh => ActivationFn::GeluTanh,
        Activation::Silu => ActivationFn::Silu,
        Activation::Relu => ActivationFn::Relu,
        Activation::QuickGelu => ActivationFn::QuickGelu,
        Activation::ClippedGelu => ActivationFn::ClippedGelu,
        Activation::SquaredRelu => ActivationFn::SquaredRelu,
        Activation::Relu6 => ActivationFn::Relu6,
        Activation::LeakyRelu => ActivationFn::LeakyRelu,
        Activation::HardSwish => ActivationFn::HardSwish,
        Activation::Mish => ActivationFn::Mish,
        Activation::Laplace => ActivationFn::Laplace,
        Activation::Tanh => ActivationFn::Tanh,
        Activation::Sigmoid => ActivationFn::Sigmoid,
        Activation::Linear => ActivationFn::Linear,
    }
}

/// A norm with its vectors.
pub(super) fn norm_of<'a>(shard: &'a Shard, norm: &operators::Norm) -> Result<Norm<'a>, OpError> {
    let weight = shard.vector(norm.weight).ok_or(NO_MATRIX)?;
    let bias = match norm.bias {
        Some(bias) => Some(shard.vector(bias).ok_or(NO_MATRIX)?),
        None => None,
    };
    Ok(Norm { kind: norm.kind, epsilon: norm.epsilon, weight, bias })
}

/// The matrix that computes the first of these columns of a product, as the device holds it, out of these inputs or
/// all, with its epilogue: for as many columns as stand in one matrix.
pub(super) fn matrix<'a>(
    shard: &'a Shard,
    (operator, of): (OperatorId, &operators::Product),
    (inputs, columns): (Option<&Range<u32>>, Range<usize>),
    loaded: Option<&'a [u8]>,
) -> Result<(AnyMatrix<'a>, Epilogue<'a>), OpError> {
    let activation = of.cap.map(ActivationFn::Cap).or(of.activation.map(activation));
    if let (Some(streamed), Some(_)) = (&shard.streamed, of.cut) {
        let piece = streamed.matrix((operator, columns.start as u32), loaded);
        let (matrix, bias) = piece.ok_or(NO_MATRIX)?;
        return Ok((matrix, Epilogue::of(bias, of.gated, activation)));
    }
    let ShardProduct { matrices, bias, .. } = shard.product(operator).ok_or(NO_OPERATOR)?;
    let (mut first, mut rest) = (0, matrices.iter());
    let whole = loop {
        let matrix = rest.next().ok_or(NO_MATRIX)?;
        if columns.start < first + matrix.columns() {
            break AnyMatrix::from(matrix);
        }
        first += matrix.columns();
    };
    let columns = columns.start..columns.end.min(first + whole.columns());
    let own = columns.start - first..columns.end - first;
    let part = match inputs {
        Some(inputs) => whole.inputs(inputs.start as usize..inputs.end as usize),
        None => Some(whole),
    };
    let part = part.and_then(|part| part.part(own));
    let part = part.ok_or(OpError::Why("rows, matrix and product do not fit together"))?;
    Ok((part, Epilogue::of(bias.as_deref(), of.gated, activation).part(columns)))
}

/// The matrix, for rows that are rounded as the program says.
pub(super) fn by<'m>(
    call: &Call<'_>,
    matrix: impl Into<AnyMatrix<'m>>,
) -> Result<AnyMatrix<'m>, OpError> {
    let why = "its rows are not to be rounded, and its weights are held in blocks of few bits";
    matrix.into().by(call.program.activations).ok_or(OpError::Why(why))
}
