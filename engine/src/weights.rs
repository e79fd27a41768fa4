//! A device's shard: its slices of a model's matrices, and the small vectors, in memory.
//!
//! Everything is read by byte range straight to where it stays: while a shard loads, the process
//! holds no more than the shard and one bounded read buffer. Embedding tables are not held; their
//! rows are read from disk when a batch needs them.

mod load;
mod matrix;
mod streamed;

pub use matrix::ShardMatrix;
pub(crate) use matrix::{AnyMatrix, PANEL, Panels};
#[cfg(test)]
pub(crate) use matrix::{Layout, Window};
pub(crate) use streamed::Streamed;

use crate::stream::StreamError;
use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DevicePlan, Head, Share, Span, Token, WeightFormat,
};
use galaxy_graph::{
    holdings::transition,
    operators::{Attention, Axis, CutSide, OperatorGraph, OperatorId, Product, Weight, WeightId},
};
use galaxy_model::{Formats, ModelDir, ModelError};
use load::Loader;
use std::{
    ops::{ControlFlow, Range},
    sync::Arc,
};

/// Why a shard cannot be loaded, or a row of a table not be read.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The model's files do not give what the shard needs.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The memory for a matrix cannot be allocated.
    #[error("the device has no room for {wanted} of weights, with {held} held already")]
    Memory {
        /// The bytes of the matrix.
        wanted: Bytes,
        /// The bytes that were loaded before it.
        held: Bytes,
    },
    /// The listener to progress asked to stop.
    #[error("loading was stopped")]
    Stopped,
    /// The values are not stored as the plan has them.
    #[error(
        "the plan reads {planned} values from disk, and the model has {stored} values: plan anew"
    )]
    Format {
        /// The format in the plan.
        planned: WeightFormat,
        /// The format in the model's files.
        stored: WeightFormat,
    },
    /// The file of the shard cannot be written or read.
    #[error("{0}")]
    Stream(Box<StreamError>),
    /// The plan gives the device parts that this build cannot compute with.
    #[error(
        "the plan gives the device other {what} for decode than for prefill in layer {layer}, and it cannot compute with a part of what it holds of them: give both phases the same"
    )]
    Phases {
        /// What the parts are of: heads, columns or tokens.
        what: &'static str,
        /// The layer; the number of layers for what follows them.
        layer: u32,
    },
}

impl From<StreamError> for WeightError {
    fn from(error: StreamError) -> Self {
        match error {
            StreamError::Weights(error) => error,
            error => Self::Stream(Box::new(error)),
        }
    }
}

/// The part of a product that a device holds.
#[derive(Debug, Default)]
pub(crate) struct ShardProduct {
    /// The share of the product.
    pub(crate) share: Span<Share>,
    /// The matrices of the share, side by side, one for each run of the same format; none where there are no
    /// values, or they come from disk.
    pub(crate) matrices: Vec<ShardMatrix>,
    /// The bias of their columns.
    pub(crate) bias: Option<Vec<f32>>,
}

/// The part of a model that one device holds.
#[derive(Debug)]
pub struct Shard {
    pub(crate) dir: Arc<ModelDir>,
    /// The operators that its weights are of.
    pub(crate) graph: Arc<OperatorGraph>,
    /// What is held of each product, by the number of its operator; of other operators nothing.
    pub(crate) products: Vec<ShardProduct>,
    /// The vectors, by the number of their weight; biases of shared products, and matrices, are not
    /// here.
    pub(crate) vectors: Vec<Option<Vec<f32>>>,
    /// The matrices, where they come from disk; then `products` has none.
    pub(crate) streamed: Option<Streamed>,
    /// The assignment of what it holds.
    assignment: Assignment,
}

/// The listener to progress: it gets the bytes that were read and the bytes that there are to read, and
/// says whether to go on.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

impl Shard {
    /// Loads the part of `device`. `progress` gets the bytes that were read and the bytes that there
    /// are to read, after each matrix, and says whether to go on.
    ///
    /// # Errors
    /// When the model's files do not have what the device is to hold, memory does not, or
    /// `progress` breaks off.
    pub fn load(
        dir: Arc<ModelDir>,
        device: &DevicePlan,
        progress: Progress<'_>,
    ) -> Result<Self, WeightError> {
        let graph = Arc::new(OperatorGraph::of(dir.spec()));
        phases_fit(&graph, dir.formats(), device)?;
        let holds = device.holds();
        let transition = transition(&graph, dir.formats(), None, &holds);
        let mut loader = Loader::new(&dir, transition.read, progress);
        let mut shard = loader.common(dir.clone(), graph, &|layer| layer)?;
        loader.change(&mut shard, &holds)?;
        loader.end()?;
        Ok(shard)
    }

    /// Loads a shard to measure with: its layer `n` is as much of the model's layer `blocks[n].0`
    /// as `blocks[n].1` says, so that one shard can have matrices of several widths. It is never
    /// reshaped.
    ///
    /// # Errors
    /// As [`Shard::load`].
    pub fn sample(
        dir: Arc<ModelDir>,
        blocks: &[(u32, BlockAssignment)],
        vocabulary: Span<Token>,
        progress: Progress<'_>,
    ) -> Result<Self, WeightError> {
        // Nobody knows how much it will be, and nobody asks.
        let mut loader = Loader::new(&dir, Bytes(0), progress);
        let spec = dir.spec().sample(blocks.len() as u32);
        let layer = |at: u32| blocks[at as usize].0;
        let graph = Arc::new(OperatorGraph::of(&spec));
        let mut shard = loader.common(dir.clone(), graph, &layer)?;
        loader.sample(&mut shard, blocks, vocabulary)?;
        loader.end()?;
        Ok(shard)
    }

    /// Turns the shard into the part of `device`, of the same model: what stays is kept, and only what
    /// is missing is read; [`transition`] says how much that is and what memory it takes. Gives the
    /// bytes that were read, too.
    ///
    /// # Errors
    /// As [`Shard::load`]. Whatever was held has gone then.
    pub fn reshape(
        mut self,
        dir: Arc<ModelDir>,
        device: &DevicePlan,
        progress: Progress<'_>,
    ) -> Result<(Self, Bytes), WeightError> {
        phases_fit(&self.graph, dir.formats(), device)?;
        let new = &*device.holds();
        // What came from disk is read anew.
        self.streamed = None;
        let transition = transition(&self.graph, dir.formats(), Some(&self.assignment), new);
        let mut loader = Loader::new(&dir, transition.read, progress);
        loader.change(&mut self, new)?;
        let read = loader.end()?;
        self.dir = dir;
        Ok((self, read))
    }

    /// Bytes of all matrices and vectors that it holds. Never more than `graph::budget` says.
    pub fn bytes(&self) -> Bytes {
        let product = |product: &ShardProduct| {
            let matrices = product.matrices.iter().map(|matrix| matrix.bytes().0);
            matrices.sum::<u64>() + product.bias.as_deref().map_or(0, floats)
        };
        let streamed = self.streamed.as_ref().map_or(0, Streamed::bytes);
        let vectors = self.vectors.iter().flatten().map(|vector| floats(vector));
        Bytes(self.products.iter().map(product).chain(vectors).sum::<u64>() + streamed)
    }

    /// What it holds of a product; none where there is no such operator.
    pub(crate) fn product(&self, operator: OperatorId) -> Option<&ShardProduct> {
        self.products.get(operator.0 as usize)
    }

    /// A vector; none where the model does not have it.
    pub(crate) fn vector(&self, weight: WeightId) -> Option<&[f32]> {
        self.vectors.get(weight.0 as usize)?.as_deref()
    }

    /// The query heads that it computes of an attention.
    pub(crate) fn heads(&self, attention: &Attention) -> Span<Head> {
        self.product(attention.projection).map_or(Span::empty(), |product| product.share.of())
    }

    /// The tokens of the vocabulary that it has logits for.
    pub(crate) fn vocabulary(&self) -> Span<Token> {
        let language = self.graph.language.and_then(|id| self.product(id));
        language.map_or(Span::empty(), |product| product.share.of())
    }

    /// Notes the shares of an assignment.
    fn take_shares(&mut self, assignment: &Assignment) {
        for (id, product) in self.graph.shared() {
            self.products[id.0 as usize].share = self.graph.share(product, assignment);
        }
        self.assignment = assignment.clone();
    }
}

/// Whether a product that is cut at these inputs is cut between groups of the blocks of its matrices.
fn blocks_fit(
    graph: &OperatorGraph,
    formats: &Formats,
    product: &Product,
    inputs: &Range<u32>,
) -> bool {
    product.matrices.iter().all(|id| match graph.weights.get(id.0 as usize) {
        Some(Weight::Matrix(matrix)) => {
            let cut = formats.held(*matrix).cut();
            inputs.start.is_multiple_of(cut) && inputs.end.is_multiple_of(cut)
        }
        _ => true,
    })
}

fn floats(values: &[f32]) -> u64 {
    size_of_val(values) as u64
}

/// Checks that what the device computes in each phase is a part of what it holds that kernels can read: keys
/// and values are cached for one run of heads, columns begin with a panel, and pieces on disk are read whole.
fn phases_fit(
    graph: &OperatorGraph,
    formats: &Formats,
    device: &DevicePlan,
) -> Result<(), WeightError> {
    let holds = device.holds();
    for (_, product) in graph.shared() {
        let share = |assignment| graph.share(product, assignment);
        let held = share(&holds);
        for own in [share(&device.prefill), share(&device.decode)] {
            if held == own || own.is_empty() && product.heads.is_none() {
                continue;
            }
            let panels = (own.start() - held.start()).is_multiple_of(WeightFormat::PANEL);
            let between = match product.within(held, own) {
                Some(within) => blocks_fit(graph, formats, product, &within.inputs),
                None => false,
            };
            let cut = product.cut.filter(|cut| {
                cut.axis != Axis::Heads
                    && if cut.side == CutSide::Inputs { between } else { panels }
            });
            if cut.is_none() || device.streaming.is_some() {
                let what = product.cut.map_or("columns", |cut| cut.axis.plural());
                return Err(WeightError::Phases { what, layer: graph.layer(product) });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
