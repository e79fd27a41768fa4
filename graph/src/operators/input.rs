//! Inputs: values that come in with a request, as they are.

use super::{Axes, Content, Operate, OperatorId, Unlike, ValueId, WeightId};
use galaxy_common::{Share, Span};
use smallvec::SmallVec;

/// Rows of an input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Input {
    /// What it makes.
    pub output: ValueId,
    /// Its axes.
    pub axes: Axes,
}

impl Operate for Input {
    fn name(&self) -> String {
        format!("input ({:?})", self.axes)
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        SmallVec::new()
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        SmallVec::new()
    }
    fn shape(&self, _read: &[Axes]) -> Result<Axes, String> {
        Ok(self.axes)
    }
    fn content(
        &self,
        _id: OperatorId,
        _share: Span<Share>,
        _read: &[Option<Content>],
    ) -> Result<Content, Unlike> {
        Ok(Content::Value(self.output))
    }
}
