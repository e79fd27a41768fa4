//! Residual additions, where the terms of sums come together.

use super::{Axes, Content, Norm, OperandMismatch, Operate, OperatorId, ValueId, WeightId};
use galaxy_common::{Share, Span};
use smallvec::SmallVec;

/// The residual, plus the whole sums of products that are cut by their inputs, plus their biases: these
/// join here, once, at the owner of a row. Where the model says so, the sums are normed together before
/// they are added.
#[derive(Clone, PartialEq, Debug)]
pub struct Add {
    /// The residual that the sums are added to.
    pub residual: ValueId,
    /// The value that it computes.
    pub output: ValueId,
    /// Columns of a row.
    pub width: u32,
    /// The products whose sums are added, and how many shares each has.
    pub sums: SmallVec<[(OperatorId, u32); 2]>,
    /// The values that these products compute.
    pub terms: SmallVec<[ValueId; 2]>,
    /// The biases of these products.
    pub biases: SmallVec<[WeightId; 2]>,
    /// The norm of the sums before they are added, if the model has one.
    pub norm: Option<Norm>,
}

impl Operate for Add {
    fn name(&self) -> String {
        "residual addition".to_owned()
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        std::iter::once(self.residual).chain(self.terms.iter().copied()).collect()
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        let norm = self.norm.iter().flat_map(Operate::weights);
        self.biases.iter().copied().chain(norm).collect()
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        let own = Axes::Text { columns: self.width };
        match read.iter().all(|axes| *axes == own) {
            true => Ok(own),
            false => Err(format!("{read:?} are added, and rows have {} columns", self.width)),
        }
    }
    fn content(
        &self,
        _id: OperatorId,
        _share: Span<Share>,
        read: &[Option<Content>],
    ) -> Result<Content, OperandMismatch> {
        OperandMismatch::unless(read, 0, self.residual)?;
        let mut all = super::Sums::default();
        for (at, read) in read.iter().enumerate().skip(1) {
            let more = match read {
                Some(Content::Sums(more)) => all.plus(more),
                _ => None,
            };
            all = more.ok_or_else(|| {
                OperandMismatch::new(at, "sums of this addition, each share once")
            })?;
        }
        match all.is_whole(&self.sums) {
            true => Ok(Content::Value(self.output)),
            false => {
                Err(OperandMismatch::new(read.len() - 1, format!("all shares: {:?}", self.sums)))
            }
        }
    }
}
