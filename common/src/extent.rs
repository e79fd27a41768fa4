//! The size of a model, as far as plans depend on it.

/// The size of the model that a plan must cover.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The number of layers.
    pub layers: u32,
    /// Query heads of a layer.
    pub heads: u32,
    /// The intermediate size: columns of the MLP.
    pub intermediate: u32,
    /// Entries of the vocabulary that have logits; 0 without a language-model head.
    pub vocabulary: u32,
}
