//! Norms of whole rows.

use super::{Axes, Operate, ValueId, WeightId};
use galaxy_model::NormKind;
use smallvec::SmallVec;

/// A norm of each row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Norm {
    /// The value that it reads.
    pub input: ValueId,
    /// The value that it computes.
    pub output: ValueId,
    /// Columns of a row.
    pub width: u32,
    /// The kind of norm.
    pub kind: NormKind,
    /// What is added to the variance, or to the mean square of an RMS norm.
    pub epsilon: f32,
    /// The vector that scales columns.
    pub weight: WeightId,
    /// The vector that is added then, if there is one.
    pub bias: Option<WeightId>,
}

impl Operate for Norm {
    fn name(&self) -> String {
        format!("norm ({:?})", self.kind)
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        SmallVec::from_slice(&[self.input])
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        match read {
            [axes @ Axes::Text { columns }] if *columns == self.width => Ok(*axes),
            _ => Err(format!("a norm of {} columns reads {read:?}", self.width)),
        }
    }
    fn is_by_rows(&self) -> bool {
        true
    }
}
