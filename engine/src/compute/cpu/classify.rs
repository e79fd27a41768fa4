//! The class head on one row.

use super::held::{by, norm_of};
use crate::{
    compute::{
        call::Call,
        kernels::{
            activation::ActivationFn,
            area::{Area, AreaMut, Extent, grow},
            dense::{self, Epilogue},
            threads::Threads,
        },
        op_error::{NO_MATRIX, NO_OPERATOR, OpError},
    },
    weights::Shard,
};
use galaxy_model::ClassActivation;

/// Writes the logits of all classes of a row to `out`. `few` is scratch, which grows to the width of the head.
pub(super) fn classify(
    call: &Call<'_>,
    (shard, threads, scratch): (&Shard, &Threads, &dense::Scratch),
    few: &mut Vec<f32>,
    row: Area<'_>,
    out: &mut [f32],
) -> Result<(), OpError> {
    let classes = shard.graph.classes.as_ref();
    let classes = classes.ok_or(OpError::Why("the model has no class head"))?;
    let of = |id| {
        let held = shard.product(id).ok_or(NO_OPERATOR)?;
        Ok((held.matrices.first().ok_or(NO_MATRIX)?, held.bias.as_deref()))
    };
    let single = |columns| Extent { start: 0, rows: 1, columns, stride: columns };
    let room = OpError::Why("the class head does not fit the row");
    let mut row = row;
    if let Some((dense, activation)) = classes.dense {
        let (dense, bias) = of(dense)?;
        grow(few, dense.outputs);
        if dense.inputs != row.columns() {
            return Err(room);
        }
        let activation = match activation {
            Some(ClassActivation::Tanh) => Some(ActivationFn::Tanh),
            Some(ClassActivation::Relu) => Some(ActivationFn::Relu),
            Some(ClassActivation::Gelu) => Some(ActivationFn::Gelu),
            None => None,
        };
        let Some(area) = AreaMut::new(few, single(dense.outputs)) else { return Err(room) };
        let epilogue = Epilogue::of(bias, false, activation);
        dense::product(threads, scratch, row, by(call, dense)?, area, epilogue);
        if let Some(norm) = &classes.norm {
            norm_of(shard, norm)?.apply(&mut few[..dense.outputs]);
        }
        row = Area::single(&few[..dense.outputs]);
    }
    let (output, bias) = of(classes.output)?;
    if output.inputs != row.columns() || output.outputs != out.len() {
        return Err(room);
    }
    let Some(area) = AreaMut::new(out, single(output.outputs)) else { return Err(room) };
    let epilogue = Epilogue::of(bias, false, None);
    dense::product(threads, scratch, row, by(call, output)?, area, epilogue);
    Ok(())
}
