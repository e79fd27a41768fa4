//! Products of matrices, and of all matrices of two batches.

use crate::onnx::{
    array,
    node::{KnownNode, Made},
    operator::{Gemm, Operator},
};

/// Reads a product of matrices with scales and a bias.
pub(super) fn gemm(node: &KnownNode<'_>) -> Result<Made, String> {
    let gemm = Gemm {
        alpha: node.float("alpha", 1.0)?,
        beta: node.float("beta", 1.0)?,
        transposed: [node.flag("transA", false)?, node.flag("transB", false)?],
    };
    if node.opset < 7 {
        node.flag("broadcast", false)?;
    }
    let side = |at: usize| match (node.input(at)?.dims, gemm.transposed[at]) {
        (&[rows, columns], false) | (&[columns, rows], true) => Ok((rows, columns)),
        (dims, _) => Err(format!("its input {at} is of shape {dims:?}, which is no matrix")),
    };
    let ((rows, inner), (inputs, columns)) = (side(0)?, side(1)?);
    if inner != inputs {
        return Err(format!("a matrix of {inner} columns is multiplied by one of {inputs} rows"));
    }
    let dims = vec![rows, columns];
    let mut reads = vec![0, 1];
    if let Some(bias) = node.optional(2) {
        if array::broadcast(&dims, bias.dims)? != dims {
            return Err(format!("a bias of shape {:?} does not fit {dims:?}", bias.dims));
        }
        reads.push(2);
    }
    Ok(Made {
        operator: Operator::Gemm(gemm),
        reads,
        outputs: vec![(dims, node.input(0)?.element)],
    })
}

/// Reads a product of matrices, or of all matrices of two batches.
pub(super) fn matmul(node: &KnownNode<'_>) -> Result<Made, String> {
    let (a, b) = (node.input(0)?, node.input(1)?);
    let wrong = || format!("shapes {:?} and {:?} cannot be multiplied", a.dims, b.dims);
    // A list is a row on the left, and a column on the right; its axis is not in the result.
    let (mut left, mut right) = (a.dims.to_vec(), b.dims.to_vec());
    if left.is_empty() || right.is_empty() {
        return Err(wrong());
    }
    if a.dims.len() == 1 {
        left.insert(0, 1);
    }
    if b.dims.len() == 1 {
        right.push(1);
    }
    let ([batch_left @ .., rows, inner], [batch_right @ .., inputs, columns]) =
        (left.as_slice(), right.as_slice())
    else {
        return Err(wrong());
    };
    if inner != inputs {
        return Err(wrong());
    }
    let mut dims = array::broadcast(batch_left, batch_right)?;
    if a.dims.len() > 1 {
        dims.push(*rows);
    }
    if b.dims.len() > 1 {
        dims.push(*columns);
    }
    Ok(Made { operator: Operator::MatMul, reads: vec![0, 1], outputs: vec![(dims, a.element)] })
}
