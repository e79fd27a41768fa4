//! Embedding: tokens or image patches become rows.

use super::{Axes, Content, Norm, OperandMismatch, Operate, OperatorId, ValueId, WeightId};
use galaxy_common::{Share, Span};
use galaxy_model::Patches;
use smallvec::SmallVec;

/// Rows of tables, read from disk, or of image patches; with positions, token types and a norm where the
/// model has them.
#[derive(Clone, PartialEq, Debug)]
pub struct Embed {
    /// The image patches after their product; `None` where rows are of tokens.
    pub projected: Option<ValueId>,
    /// The value that it computes.
    pub output: ValueId,
    /// Columns of a row.
    pub width: u32,
    /// The image patches, the product that projects them, and the vector that the class row begins with;
    /// `None` where rows are of tokens.
    pub patches: Option<(Patches, OperatorId, WeightId)>,
    /// What rows of the token table are multiplied by.
    pub scale: f32,
    /// What is added to a position to find its row in the table of positions; none without such a table.
    pub positions: Option<u32>,
    /// The table of token types, and how many rows it has; `None` without one.
    pub types: Option<(WeightId, u32)>,
    /// The norm of the result, if the model has one.
    pub norm: Option<Norm>,
}

impl Operate for Embed {
    fn name(&self) -> String {
        match self.patches {
            Some(_) => "embedding of image patches".to_owned(),
            None => "embedding of tokens".to_owned(),
        }
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        self.projected.into_iter().collect()
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        let class = self.patches.map(|(_, _, class)| class);
        let types = self.types.map(|(types, _)| types);
        let norm = self.norm.iter().flat_map(Operate::weights);
        class.into_iter().chain(types).chain(norm).collect()
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        let own = Axes::Text { columns: self.width };
        match read.iter().all(|axes| *axes == own) {
            true => Ok(own),
            false => Err(format!("patches become {read:?} of {} columns", self.width)),
        }
    }
    fn content(
        &self,
        _id: OperatorId,
        _share: Span<Share>,
        _read: &[Option<Content>],
    ) -> Result<Content, OperandMismatch> {
        Ok(Content::Value(self.output))
    }
}
