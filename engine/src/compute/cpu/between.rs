//! Kernels between products: residual additions with their norms, and wire format.

use super::{CpuEngine, alike, held::norm_of};
use crate::compute::{
    Staged,
    call::Call,
    kernels::{
        rows::{self, AddNormInputs},
        wire::{self, Tile},
    },
    op_error::{NO_OPERATOR, OpError},
};
use galaxy_graph::operators::OperatorId;

/// A residual addition with its norm, as an operation describes it.
#[derive(Clone, Copy)]
pub(super) struct AddNorm {
    pub(super) add: OperatorId,
    pub(super) norm: OperatorId,
    pub(super) post: bool,
    pub(super) partial: bool,
    pub(super) adds: bool,
}

impl Call<'_> {
    /// The staged tile of region `at` of those that are read, if it has this shape; none where the
    /// operation adds none.
    fn added<'s>(
        &self,
        adds: bool,
        input: Option<&'s [u8]>,
        at: usize,
        shape: (usize, usize),
    ) -> Result<Option<Tile<'s>>, OpError> {
        if !adds {
            return Ok(None);
        }
        let tile = self.tile(input, at)?;
        match tile.shape() == shape {
            true => Ok(Some(tile)),
            false => Err(OpError::Why("the staged tile differs in shape")),
        }
    }
}

impl CpuEngine {
    pub(super) fn add_norm(
        &self,
        call: &Call<'_>,
        of: AddNorm,
        input: Option<&[u8]>,
        written: &mut [Vec<f32>; 2],
    ) -> Result<(), OpError> {
        let [first, second] = written;
        let AddNorm { add, norm, post, partial, adds } = of;
        let residual = call.target(first, 0)?;
        let (rows, columns) = (residual.rows(), residual.columns());
        let normed = match post {
            true => None,
            false => Some(call.target(second, 1)?),
        };
        if normed.as_ref().is_some_and(|n| (n.rows(), n.columns()) != (rows, columns)) {
            return Err(OpError::Why("residual and normed rows differ in shape"));
        }
        let old = call.source(&self.slots, 0)?;
        alike(rows, columns, old)?;
        let sum = match partial {
            true => Some(call.source(&self.slots, 1)?),
            false => None,
        };
        sum.map_or(Ok(()), |sum| alike(rows, columns, sum))?;
        let staged = call.added(adds, input, 1 + usize::from(partial), (rows, columns))?;
        let add = self.shard.graph.add(add).ok_or(NO_OPERATOR)?;
        let mut biases = add.biases.iter().map(|id| self.shard.vector(*id));
        let biases = [biases.next().flatten(), biases.next().flatten()];
        let sum_norm = match &add.norm {
            Some(norm) => Some(norm_of(&self.shard, norm)?),
            None => None,
        };
        let norm = self.norm(norm, columns)?;
        let joined = AddNormInputs { residual: old, biases, partial: sum, staged, sum_norm, norm };
        rows::add_norm(&self.threads, joined, residual, normed);
        Ok(())
    }

    pub(super) fn export(
        &self,
        call: &Call<'_>,
        adds: bool,
        staged: Staged<'_>,
    ) -> Result<(), OpError> {
        let rows = call.source(&self.slots, 0)?;
        let shape = (rows.rows(), rows.columns());
        let tile = call.added(adds, staged.input, 1, shape)?;
        let wire = call.program.wire;
        let out = wire::tile_bytes(wire, shape.0, shape.1)
            .and_then(|bytes| staged.output?.get_mut(..bytes))
            .filter(|out| wire::aligned(wire, out))
            .ok_or(OpError::Why("the tile to write is not there, too short or not aligned"))?;
        wire::export(&self.threads, rows, tile, wire, out);
        Ok(())
    }

    pub(super) fn import(
        &self,
        call: &Call<'_>,
        input: Option<&[u8]>,
        written: &mut [f32],
    ) -> Result<(), OpError> {
        let out = call.target(written, 0)?;
        let shape = (out.rows(), out.columns());
        if let Some(tile) = call.added(true, input, 0, shape)? {
            wire::import(&self.threads, tile, out);
        }
        Ok(())
    }

    pub(super) fn add(
        &self,
        call: &Call<'_>,
        input: Option<&[u8]>,
        written: &mut [f32],
    ) -> Result<(), OpError> {
        let out = call.target(written, 0)?;
        let from = call.source(&self.slots, 0)?;
        alike(out.rows(), out.columns(), from)?;
        let shape = (out.rows(), out.columns());
        if let Some(tile) = call.added(true, input, 1, shape)? {
            wire::add(&self.threads, from, tile, out);
        }
        Ok(())
    }
}
