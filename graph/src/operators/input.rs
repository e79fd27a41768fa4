//! Inputs: values that come in with a request, as they are.

use super::{Axes, Operate, ValueId};
use smallvec::SmallVec;

/// The rows of an input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Input {
    /// The value that it gives.
    pub output: ValueId,
    /// The axes of that value.
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
    fn shape(&self, _read: &[Axes]) -> Result<Axes, String> {
        Ok(self.axes)
    }
}
