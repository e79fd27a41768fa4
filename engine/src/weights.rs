//! A device's shard: its slices of a model's matrices, and the small vectors, in memory.
//!
//! Everything is read by byte range straight to where it stays: while a shard loads, the process
//! holds no more than the shard and one bounded read buffer. Embedding tables are not held; their
//! rows are read from disk when a batch needs them.

mod load;
mod matrix;
mod streamed;

pub use matrix::HeldMatrix;
pub(crate) use matrix::{AnyMatrix, AnyPanels, PANEL, Panels};
pub(crate) use streamed::Streamed;

use crate::stream::StreamError;
use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DevicePlan, Head, Layer, Span, Token, WeightFormat,
};
use galaxy_graph::holdings::{Held, transition};
use galaxy_model::{ModelDir, ModelError, ModelSpec};
use load::Loader;
use std::{ops::ControlFlow, sync::Arc};

/// Why a shard could not be loaded, or a row of a table not be read.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The model's files do not give what the shard needs.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Memory for a matrix could not be had.
    #[error("the device has no room for {wanted} of weights, with {held} held already")]
    Memory {
        /// The matrix.
        wanted: Bytes,
        /// What was loaded before it.
        held: Bytes,
    },
    /// Whoever was told of the progress wanted no more of it.
    #[error("loading was stopped")]
    Stopped,
    /// Values that are not stored as the plan has them.
    #[error(
        "the plan reads {planned} values from disk, and the model has {stored} values: plan anew"
    )]
    Format {
        /// As planned.
        planned: WeightFormat,
        /// As they are.
        stored: WeightFormat,
    },
    /// The file of the shard cannot be written or read.
    #[error("{0}")]
    Stream(Box<StreamError>),
    /// A plan that this build cannot hold.
    #[error(
        "the plan gives the device other {what} for decode than for prefill in layer {layer}: give both phases the same"
    )]
    Phases {
        /// Of what.
        what: &'static str,
        /// Where; 0 for what no layer has.
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

/// What a norm scales by, and what it adds.
#[derive(Clone, PartialEq, Debug)]
pub struct NormVectors {
    /// One for each column.
    pub weight: Vec<f32>,
    /// One for each column; none for an RMS norm.
    pub bias: Option<Vec<f32>>,
}

/// What a device holds of one layer. A matrix of no rows or columns is not there.
#[derive(Debug)]
pub struct LayerShard {
    /// Query heads.
    pub heads: Span<Head>,
    /// The key-value heads that they use.
    pub kv_heads: Span<Head>,
    /// hidden -> queries | keys | values of the heads.
    pub qkv: Option<HeldMatrix>,
    /// Bias of these.
    pub qkv_bias: Option<Vec<f32>>,
    /// context of the heads -> hidden.
    pub attention_output: Option<HeldMatrix>,
    /// Its bias, whole: it joins at the owner of a row.
    pub attention_output_bias: Option<Vec<f32>>,
    /// hidden -> inner columns; gated: gate columns | up columns.
    pub up: Option<HeldMatrix>,
    /// Bias of these.
    pub up_bias: Option<Vec<f32>>,
    /// inner columns -> hidden.
    pub down: Option<HeldMatrix>,
    /// Its bias, whole.
    pub down_bias: Option<Vec<f32>>,
    /// The attention's norm.
    pub attention_norm: NormVectors,
    /// The MLP's norm, where it has one of its own.
    pub mlp_norm: Option<NormVectors>,
    /// The norms of query heads and of key heads, where each is normed by itself.
    pub head_norms: Option<[NormVectors; 2]>,
}

/// The class head.
#[derive(Debug)]
pub struct ClassShard {
    /// A dense layer before the output, and its bias.
    pub dense: Option<(HeldMatrix, Vec<f32>)>,
    /// hidden -> classes.
    pub output: HeldMatrix,
    /// Bias of the output.
    pub bias: Option<Vec<f32>>,
}

/// What makes rows of squares of pixels.
#[derive(Debug)]
pub struct PatchShard {
    /// A square -> hidden.
    pub matrix: HeldMatrix,
    /// Its bias.
    pub bias: Vec<f32>,
    /// What the row of the class begins with.
    pub class_row: Vec<f32>,
}

/// The part of a model that one device holds.
#[derive(Debug)]
pub struct Shard {
    pub(crate) dir: Arc<ModelDir>,
    pub(crate) layers: Vec<LayerShard>,
    pub(crate) patch: Option<PatchShard>,
    pub(crate) embedding_norm: Option<NormVectors>,
    pub(crate) token_types: Option<Vec<f32>>,
    /// What distances add to scores: `[buckets, heads]`, of all heads.
    pub(crate) distances: Option<Vec<f32>>,
    pub(crate) final_norm: Option<NormVectors>,
    pub(crate) vocabulary: Span<Token>,
    pub(crate) language: Option<HeldMatrix>,
    /// Its bias.
    pub(crate) language_bias: Option<Vec<f32>>,
    pub(crate) classes: Option<ClassShard>,
    /// The matrices, where they come from disk; then there are none above.
    pub(crate) streamed: Option<Streamed>,
    /// What it holds.
    assignment: Assignment,
}

/// Who is told of progress: bytes that were read, and bytes that there are to read.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

impl Shard {
    /// Loads the part of `device`. `progress` is told the bytes that were read and the bytes that
    /// there are to read, after each matrix, and says whether to go on.
    ///
    /// # Errors
    /// When the model's files do not have what the device is to hold, memory does not, or
    /// `progress` breaks off.
    pub fn load(
        dir: Arc<ModelDir>,
        device: &DevicePlan,
        progress: Progress<'_>,
    ) -> Result<Self, WeightError> {
        same_phases(dir.spec(), device)?;
        let transition = transition(dir.spec(), dir.format(), None, &device.prefill);
        let mut loader = Loader::new(&dir, transition.read, progress);
        let mut shard = loader.common(dir.clone(), 0..dir.spec().layers)?;
        loader.change(&mut shard, &device.prefill)?;
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
        let mut shard = loader.common(dir.clone(), blocks.iter().map(|block| block.0))?;
        loader.sample(&mut shard, blocks, vocabulary)?;
        loader.end()?;
        Ok(shard)
    }

    /// Turns it into the part of `device`, of the same model: what stays is kept, and only what is
    /// missing is read; [`transition`] says how much that is and what memory it takes. Gives the
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
        same_phases(dir.spec(), device)?;
        let (format, new) = (dir.format(), &device.prefill);
        // What came from disk is read anew.
        self.streamed = None;
        let transition = transition(dir.spec(), format, Some(&self.assignment), new);
        let mut loader = Loader::new(&dir, transition.read, progress);
        loader.change(&mut self, new)?;
        let read = loader.end()?;
        self.dir = dir;
        Ok((self, read))
    }

    /// Bytes of all matrices and vectors that it holds. Never more than `graph::budget` says.
    pub fn bytes(&self) -> Bytes {
        let matrix = |matrix: &Option<HeldMatrix>| matrix.as_ref().map_or(0, |m| m.bytes().0);
        let vector = |vector: &Option<Vec<f32>>| vector.as_ref().map_or(0, |v| floats(v));
        let norm = |norm: &NormVectors| floats(&norm.weight) + vector(&norm.bias);
        let layer = |layer: &LayerShard| {
            let matrices = [&layer.qkv, &layer.attention_output, &layer.up, &layer.down];
            let biases =
                [&layer.qkv_bias, &layer.attention_output_bias, &layer.up_bias, &layer.down_bias];
            matrices.map(matrix).iter().sum::<u64>()
                + biases.map(vector).iter().sum::<u64>()
                + norm(&layer.attention_norm)
                + layer.mlp_norm.iter().map(norm).sum::<u64>()
                + layer.head_norms.iter().flatten().map(norm).sum::<u64>()
        };
        let classes = self.classes.as_ref().map_or(0, |classes| {
            let dense = classes.dense.as_ref().map_or(0, |(m, bias)| m.bytes().0 + floats(bias));
            dense + classes.output.bytes().0 + vector(&classes.bias)
        });
        let patch = self.patch.as_ref().map_or(0, |patch| {
            patch.matrix.bytes().0 + floats(&patch.bias) + floats(&patch.class_row)
        });
        let norms = [&self.embedding_norm, &self.final_norm];
        Bytes(
            self.layers.iter().map(layer).sum::<u64>()
                + norms.into_iter().flatten().map(norm).sum::<u64>()
                + vector(&self.token_types)
                + vector(&self.distances)
                + matrix(&self.language)
                + vector(&self.language_bias)
                + patch
                + classes
                + self.streamed.as_ref().map_or(0, Streamed::bytes),
        )
    }

    /// The model that it is a part of.
    pub fn spec(&self) -> &ModelSpec {
        self.dir.spec()
    }

    /// The place of a matrix, in layer `at` of the shard if it is one of a layer.
    fn place(&mut self, held: Held, at: usize) -> &mut Option<HeldMatrix> {
        match held {
            Held::Qkv(_) => &mut self.layers[at].qkv,
            Held::AttentionOutput(_) => &mut self.layers[at].attention_output,
            Held::Up(_) => &mut self.layers[at].up,
            Held::Down(_) => &mut self.layers[at].down,
            Held::Language => &mut self.language,
        }
    }
}

fn floats(values: &[f32]) -> u64 {
    size_of_val(values) as u64
}

/// Products name a matrix, not a part of one, so a device cannot hold more than a phase computes.
fn same_phases(spec: &ModelSpec, device: &DevicePlan) -> Result<(), WeightError> {
    let layers = Span::<Layer>::first(spec.layers);
    for layer in layers.iter() {
        let (prefill, decode) = (device.prefill.block(layer), device.decode.block(layer));
        if prefill.heads != decode.heads {
            return Err(WeightError::Phases { what: "heads", layer });
        }
        if prefill.columns != decode.columns {
            return Err(WeightError::Phases { what: "columns", layer });
        }
    }
    if device.prefill.vocabulary != device.decode.vocabulary {
        return Err(WeightError::Phases { what: "tokens", layer: 0 });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
