//! Activation functions that stand on their own.

use super::{Axes, Operate, Reach, Sizes, ValueId, Work};
use galaxy_model::Activation;
use smallvec::SmallVec;

/// An activation function of each element. The result may take the place of what is read.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Activate {
    /// The value that it reads.
    pub input: ValueId,
    /// The value that it computes.
    pub output: ValueId,
    /// The activation function.
    pub activation: Activation,
}

impl Operate for Activate {
    fn name(&self) -> String {
        format!("activation ({:?})", self.activation)
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        SmallVec::from_slice(&[self.input])
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        match read {
            [axes] => Ok(*axes),
            _ => Err(format!("one value is read, not {read:?}")),
        }
    }
    fn is_by_rows(&self) -> bool {
        true
    }
    fn reach_in_row(&self, _at: usize) -> Reach {
        Reach::Same
    }
    fn in_place(&self) -> Option<usize> {
        Some(0)
    }
    fn work(&self, sizes: Sizes) -> Work {
        let operations = f64::from(sizes.rows) * f64::from(sizes.outputs);
        Work { operations, ..Work::default() }
    }
}
