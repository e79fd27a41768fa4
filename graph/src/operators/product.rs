//! Products of rows with a matrix, and what follows them on each row.

use super::{
    Axes, Content, Cut, CutSide, OperandMismatch, Operate, OperatorId, Sizes, Sums, ValueId,
    WeightId, Work,
};
use galaxy_common::{Head, Kernel, Share, Span};
use galaxy_model::{Activation, LongFrequencies, Pairs, Positions};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// Rows times matrices that stand side by side.
#[derive(Clone, PartialEq, Debug)]
pub struct Product {
    /// The value that it reads.
    pub input: ValueId,
    /// The value that it computes.
    pub output: ValueId,
    /// The matrices, all with the same number of inputs.
    pub matrices: SmallVec<[WeightId; 3]>,
    /// Inputs of each matrix, and their outputs together.
    pub shape: (u32, u32),
    /// The bias of each matrix. That of a product that is cut by its inputs joins with the sum
    /// ([`super::Add`]).
    pub biases: SmallVec<[WeightId; 3]>,
    /// How devices may share it; `None` where each holds all of it.
    pub cut: Option<Cut>,
    /// Whether the first of two matrices gates the second: activation(first) * second.
    pub gated: bool,
    /// The activation function that follows on each value, if there is one.
    pub activation: Option<Activation>,
    /// The soft cap c of results, if there is one: a result x becomes c tanh(x / c) at last.
    pub cap: Option<f32>,
    /// What follows on each head of queries, keys and values; `None` of other products.
    pub heads: Option<Heads>,
    /// The kernel that it is measured as.
    pub kernel: Kernel,
}

/// Slices of the matrices of a product: of each the matrix, and the ranges of its inputs and
/// outputs.
pub type Slices = SmallVec<[(WeightId, Range<u32>, Range<u32>); 3]>;

/// A part of the matrices of a product that stand side by side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Within {
    /// The range of inputs, which is the same in all of them.
    pub inputs: Range<u32>,
    /// The range of columns of each.
    pub columns: SmallVec<[Range<u32>; 3]>,
}

/// What follows on the heads of queries, keys and values.
#[derive(Clone, PartialEq, Debug)]
pub struct Heads {
    /// Query heads that share a key-value head.
    pub group: u32,
    /// Columns of a head.
    pub width: u32,
    /// Norms of each head by itself, if the model has them.
    pub norms: Option<HeadNorms>,
    /// The rotary positions by which queries and keys are turned, if the layer has them.
    pub rotary: Option<Arc<Rotary>>,
}

impl Heads {
    /// The key-value heads that these query heads use.
    pub fn kv_heads(&self, heads: Span<Head>) -> Span<Head> {
        shared(self.group, heads)
    }
}

/// The key-value heads that these query heads use, where `group` query heads share one. Neighbours
/// may share one.
pub(crate) fn shared(group: u32, heads: Span<Head>) -> Span<Head> {
    if heads.is_empty() {
        return Span::empty();
    }
    let group = group.max(1);
    Span::new(heads.start() / group, heads.end().div_ceil(group))
}

/// RMS norms of query heads and of key heads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HeadNorms {
    /// The vector that scales the columns of a query head.
    pub query: WeightId,
    /// The vector that scales the columns of a key head.
    pub key: WeightId,
    /// What is added to the mean square.
    pub epsilon: f32,
}

/// Rotary positions ([`Positions::Rotary`]).
#[derive(Clone, PartialEq, Debug)]
pub struct Rotary {
    /// An inverse frequency for each pair of columns.
    pub inverse_frequencies: Vec<f32>,
    /// Other frequencies for long sequences, if the model has them.
    pub long: Option<LongFrequencies>,
    /// What cosines and sines are multiplied by.
    pub scale: f32,
    /// Which columns are a pair.
    pub pairs: Pairs,
    /// The most rows that a sequence may have.
    pub limit: u32,
}

impl Rotary {
    /// The rotary positions of a model that has them.
    pub(super) fn of(positions: &Positions) -> Option<Self> {
        match positions {
            Positions::Learned { .. } => None,
            Positions::Rotary { inverse_frequencies, long, scale, pairs, limit } => Some(Self {
                inverse_frequencies: inverse_frequencies.clone(),
                // Other frequencies for fewer columns fit no table.
                long: long
                    .clone()
                    .filter(|long| long.inverse_frequencies.len() == inverse_frequencies.len()),
                scale: *scale,
                pairs: *pairs,
                limit: *limit,
            }),
        }
    }
}

impl Rotary {
    /// The number of rows above which a sequence is long; the largest number where none is.
    pub fn above(&self) -> u32 {
        self.long.as_ref().map_or(u32::MAX, |long| long.above)
    }

    /// Whether a sequence of so many rows is long.
    pub fn is_long(&self, length: u32) -> bool {
        self.long.is_some() && length > self.above()
    }

    /// The frequencies of a sequence of so many rows.
    pub fn frequencies(&self, length: u32) -> &[f32] {
        match self.long.as_ref().filter(|_| self.is_long(length)) {
            Some(long) => &long.inverse_frequencies,
            None => &self.inverse_frequencies,
        }
    }
}

impl Product {
    /// Columns of the matrices for each column of the result: two with a gate.
    fn gates(&self) -> u32 {
        if self.gated { 2 } else { 1 }
    }

    /// Where share `own` is in the matrices of a device that holds share `held`; none where it is
    /// not in there.
    pub fn within(&self, held: Span<Share>, own: Span<Share>) -> Option<Within> {
        if !held.contains(own) {
            return None;
        }
        let (mut inputs, mut columns, mut first) = (0..self.shape.0, SmallVec::new(), 0);
        for ((_, all, outputs), (_, read, made)) in
            self.slices(held).into_iter().zip(self.slices(own))
        {
            inputs = read.start - all.start..read.end - all.start;
            let start = first + made.start - outputs.start;
            columns.push(start..start + made.len() as u32);
            first += outputs.len() as u32;
        }
        Some(Within { inputs, columns })
    }

    /// The slices of its matrices that a share has; all of them where the product is not cut.
    pub fn slices(&self, share: Span<Share>) -> Slices {
        let (inputs, outputs) = self.shape;
        let each = outputs / (self.matrices.len() as u32).max(1);
        let of = |units: Span<Share>, width: u32| units.start() * width..units.end() * width;
        let cut = |at: usize| match (self.cut, &self.heads) {
            (None, _) => (0..inputs, 0..each),
            (Some(Cut { side: CutSide::Inputs, count, .. }), _) => {
                (of(share, inputs / count.max(1)), 0..each)
            }
            (Some(_), Some(heads)) if at > 0 => {
                (0..inputs, of(heads.kv_heads(share.of()).of(), heads.width))
            }
            (Some(_), Some(heads)) => (0..inputs, of(share, heads.width)),
            (Some(cut), None) => (0..inputs, of(share, each / cut.count.max(1))),
        };
        let slice = |(at, &matrix)| {
            let (inputs, outputs) = cut(at);
            (matrix, inputs, outputs)
        };
        self.matrices.iter().enumerate().map(slice).collect()
    }
}

impl Operate for Product {
    fn name(&self) -> String {
        match self.activation {
            Some(activation) => format!("product (with {activation:?} behind it)"),
            None => "product".to_owned(),
        }
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        SmallVec::from_slice(&[self.input])
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        let norms = self.heads.as_ref().and_then(|heads| heads.norms);
        let norms = norms.into_iter().flat_map(|norms| [norms.query, norms.key]);
        self.matrices.iter().chain(&self.biases).copied().chain(norms).collect()
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        let (inputs, outputs) = self.shape;
        match *read {
            [Axes::Text { columns }] if columns == inputs => {
                Ok(Axes::Text { columns: outputs / self.gates() })
            }
            _ => Err(format!("a matrix of {inputs} inputs is multiplied by {read:?}")),
        }
    }
    fn cut(&self) -> Option<Cut> {
        self.cut
    }
    fn share_columns(&self, share: Span<Share>) -> Option<(u32, u32)> {
        let ((inputs, outputs), cut) = (self.shape, self.cut?);
        let (outputs, count) = (outputs / self.gates(), cut.count.max(1));
        Some(match (cut.side, &self.heads) {
            (CutSide::Inputs, _) => (inputs / count * share.len(), outputs),
            (CutSide::Outputs, None) => (inputs, outputs / count * share.len()),
            (CutSide::Outputs, Some(heads)) => {
                let kv_heads = heads.kv_heads(share.of()).len();
                (inputs, (share.len() + 2 * kv_heads) * heads.width)
            }
        })
    }
    fn content(
        &self,
        id: OperatorId,
        share: Span<Share>,
        read: &[Option<Content>],
    ) -> Result<Content, OperandMismatch> {
        OperandMismatch::unless(read, 0, self.input)?;
        if self.cut.is_none_or(|cut| cut.side == CutSide::Outputs) {
            return match read.get(1) {
                None => Ok(Content::Value(self.output)),
                Some(_) => Err(OperandMismatch::new(1, "nothing: it is no sum")),
            };
        }
        let own = Sums::one(id, share);
        let all = match read.get(1) {
            None => Some(own),
            Some(Some(Content::Sums(others))) => own.plus(others),
            Some(_) => None,
        };
        all.map(Content::Sums).ok_or_else(|| OperandMismatch::new(1, "sums of other shares"))
    }
    fn work(&self, sizes: Sizes) -> Work {
        let outputs = sizes.outputs * self.gates();
        let values = f64::from(sizes.inputs) * f64::from(outputs);
        Work {
            operations: 2.0 * f64::from(sizes.rows) * values,
            weights: (sizes.inputs.into(), outputs.into()),
        }
    }
}
