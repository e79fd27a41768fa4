//! What one device of a plan computes, and what it therefore holds.

use crate::{
    extent::Extent,
    ids::DeviceName,
    span::{Column, Head, Layer, Span, Token},
    streaming::Streaming,
    units::Bytes,
};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The part of each block of some layers that a device computes, and so the weights it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlockAssignment {
    /// The run of layers that this entry is about.
    pub layers: Span<Layer>,
    /// The query heads that the device computes in each of these layers, with the key-value heads that they use.
    pub heads: Span<Head>,
    /// The columns of the intermediate size that the device computes in the MLP of each of these layers.
    pub columns: Span<Column>,
}

/// What a device computes in one phase.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Blocks by runs of layers, in order, together all layers.
    pub blocks: Vec<BlockAssignment>,
    /// The relative weight of rows in connective blocks; turned into rows for each request by [`crate::apportion`].
    pub row_weight: u32,
    /// The slice of the vocabulary whose logits the device computes. Empty where the model has no such head.
    pub vocabulary: Span<Token>,
}

impl Assignment {
    /// The part of layer `layer`; empty where no run covers it.
    pub fn block(&self, layer: u32) -> BlockAssignment {
        let at = self.blocks.partition_point(|b| b.layers.end() <= layer);
        let found = self.blocks.get(at).copied().filter(|b| b.layers.has(layer));
        found.unwrap_or(BlockAssignment {
            layers: Span::new(layer, layer + 1),
            heads: Span::empty(),
            columns: Span::empty(),
        })
    }
    /// Whether the runs of layers follow one another and lie within the model; else the layer where they do not, and
    /// why. So there are no more runs than layers, however many a peer sends.
    pub(crate) fn fits(&self, extent: Extent) -> Result<(), (u32, &'static str)> {
        let mut next = 0;
        for BlockAssignment { layers, heads, columns } in &self.blocks {
            if layers.is_empty() || layers.start() < next {
                return Err((next, "its runs of layers do not follow one another"));
            }
            if layers.end() > extent.layers
                || heads.end() > extent.heads
                || columns.end() > extent.intermediate
            {
                return Err((layers.start(), "the model has fewer layers, heads or columns"));
            }
            next = layers.end();
        }
        Ok(())
    }
    /// Whether the device has a part in some attention block.
    pub fn any_heads(&self) -> bool {
        self.blocks.iter().any(|b| !b.heads.is_empty())
    }
    /// Whether the device has a part in some MLP block.
    pub fn any_columns(&self) -> bool {
        self.blocks.iter().any(|b| !b.columns.is_empty())
    }
    /// Whether the device has a part in the layers at all: rows, heads or columns.
    pub fn in_layers(&self) -> bool {
        self.row_weight > 0 || self.any_heads() || self.any_columns()
    }
}

/// One device of a plan.
///
/// It holds what it computes in either phase ([`DevicePlan::holds`]).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DevicePlan {
    /// The name of the device whose part this is.
    pub name: DeviceName,
    /// Bytes that the device grants to Galaxy as a whole.
    pub budget: Bytes,
    /// Threads for kernels.
    pub threads: u16,
    /// What it computes in prefill, for many rows at once.
    pub prefill: Assignment,
    /// What it computes in decode, for one row of each sequence at a time.
    pub decode: Assignment,
    /// How weights that do not stay in its memory come from disk; none where all stay.
    pub streaming: Option<Streaming>,
}

/// Whether a program computes many rows at once, or one row of each sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Phase {
    /// The pass over prompts or texts, many rows at once.
    Prefill,
    /// A pass with one row of each sequence.
    Decode,
}

impl DevicePlan {
    /// The part of the device in a phase.
    pub fn assignment(&self, phase: Phase) -> &Assignment {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        }
    }

    /// Whether it computes the same part of each block, and of the vocabulary, in both phases.
    pub fn computes_alike(&self) -> bool {
        let (prefill, decode) = (&self.prefill, &self.decode);
        (&prefill.blocks, prefill.vocabulary) == (&decode.blocks, decode.vocabulary)
    }

    /// What it holds: in each layer, and of the vocabulary, the run from the first to the last of what it computes in
    /// either phase.
    pub fn holds(&self) -> Cow<'_, Assignment> {
        let (prefill, decode) = (&self.prefill, &self.decode);
        if self.computes_alike() {
            return Cow::Borrowed(prefill);
        }
        let all = || prefill.blocks.iter().chain(&decode.blocks);
        let mut edges: Vec<u32> =
            all().flat_map(|block| [block.layers.start(), block.layers.end()]).collect();
        edges.sort_unstable();
        edges.dedup();
        let block = |layers: &[u32]| {
            let (one, other) = (prefill.block(layers[0]), decode.block(layers[0]));
            let (heads, columns) = (one.heads.hull(other.heads), one.columns.hull(other.columns));
            BlockAssignment { layers: Span::new(layers[0], layers[1]), heads, columns }
        };
        Cow::Owned(Assignment {
            blocks: edges.windows(2).map(block).collect(),
            row_weight: prefill.row_weight,
            vocabulary: prefill.vocabulary.hull(decode.vocabulary),
        })
    }
}
