//! A device's shard: its slices of a model's matrices, and the small vectors, in memory.
//!
//! Everything is read by byte range straight to where it stays: while a shard loads, the process
//! holds no more than the shard and one bounded read buffer. Embedding tables are not held; their
//! rows are read from disk when a batch needs them.

mod matrix;

pub use matrix::HeldMatrix;
pub(crate) use matrix::{AnyPanels, PANEL, Panels};

use crate::compute::kernels::lines::Lines;
use galaxy_common::{BlockAssignment, Bytes, DevicePlan, Head, Layer, Span, Token};
use galaxy_graph::{budget, lower::kv_span};
use galaxy_model::{
    Dtype, HeadSpec, Matrix, MatrixSource, ModelDir, ModelError, ModelSpec, NormKind, NormPlace,
    Vector,
};
use matrix::{Layout, Values};
use std::{
    ops::{ControlFlow, Range},
    sync::Arc,
};

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
    /// The MLP's norm.
    pub mlp_norm: NormVectors,
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

/// The part of a model that one device holds.
#[derive(Debug)]
pub struct Shard {
    pub(crate) dir: Arc<ModelDir>,
    pub(crate) layers: Vec<LayerShard>,
    pub(crate) embedding_norm: Option<NormVectors>,
    pub(crate) token_type: Option<Vec<f32>>,
    pub(crate) final_norm: Option<NormVectors>,
    pub(crate) vocabulary: Span<Token>,
    pub(crate) language: Option<HeldMatrix>,
    pub(crate) classes: Option<ClassShard>,
    bytes: Bytes,
}

impl Shard {
    /// Loads the part of `device`. `progress` is told the bytes that are there and the bytes that
    /// there will be, after each matrix, and says whether to go on.
    ///
    /// # Errors
    /// When the model's files do not have what the device is to hold, memory does not, or
    /// `progress` breaks off.
    pub fn load(
        dir: Arc<ModelDir>,
        device: &DevicePlan,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self, WeightError> {
        let spec = dir.spec();
        same_phases(spec, device)?;
        let total = budget::weights(spec, dir.dtype().width(), device).0;
        let mut loader = Loader { dir: &dir, scratch: Vec::new(), held: 0, total, progress };
        let part = &device.prefill;
        let blocks: Vec<_> = (0..spec.layers).map(|layer| (layer, part.block(layer))).collect();
        loader.shard(&dir, &blocks, part.vocabulary)
    }

    /// Loads a shard to measure with: its layer `n` is as much of the model's layer `blocks[n].0`
    /// as `blocks[n].1` says, so that one shard can have matrices of several widths.
    ///
    /// # Errors
    /// As [`Shard::load`].
    pub fn sample(
        dir: Arc<ModelDir>,
        blocks: &[(u32, BlockAssignment)],
        vocabulary: Span<Token>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self, WeightError> {
        // Nobody knows what it will be, and nobody asks: what is told are bytes that are there.
        let mut loader = Loader { dir: &dir, scratch: Vec::new(), held: 0, total: 0, progress };
        loader.shard(&dir, blocks, vocabulary)
    }

    /// Bytes of all matrices and vectors that it holds. Never more than `graph::budget` says.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The model that it is a part of.
    pub fn spec(&self) -> &ModelSpec {
        self.dir.spec()
    }
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

/// A part of a matrix: inputs and outputs.
type Part = (Matrix, Range<u32>, Range<u32>);

/// Where a piece of a matrix goes: columns from `at` of rows `stride` apart.
struct Place<'a, T> {
    out: &'a mut [T],
    stride: usize,
    at: usize,
}

/// Values of a block of rows that wait to be spread over panels: 4 MB in f32.
const SPREAD: usize = 1 << 20;

/// Fills the panels of a matrix from `sources`, side by side.
///
/// A checkpoint that stores a row for each output is read panel by panel, straight to its place.
/// One that stores a row for each input (GPT-2) is read by blocks of whole rows and spread, since
/// a panel of it would be a small piece of every row.
fn fill<T: Copy + Default>(
    sources: &[MatrixSource<'_>],
    parts: &[Part],
    layout: Layout,
    values: &mut [T],
    mut read: impl FnMut(
        &MatrixSource<'_>,
        Range<u32>,
        Range<u32>,
        Place<'_, T>,
    ) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let mut first = 0;
    for (source, (_, rows, columns)) in sources.iter().zip(parts) {
        let (inputs, width) = (rows.len(), columns.len());
        let column = |at: usize| columns.start + (at - first) as u32;
        if source.stores_inputs_as_rows() && width > 0 {
            let height = (SPREAD / width).clamp(1, inputs);
            let mut block = vec![T::default(); height * width];
            for row in (0..inputs).step_by(height) {
                let height = height.min(inputs - row);
                let from = rows.start + row as u32;
                let place = Place { out: &mut block[..height * width], stride: width, at: 0 };
                read(source, from..from + height as u32, columns.clone(), place)?;
                for strip in layout.strips(first..first + width) {
                    for at in 0..height {
                        let to = strip.panel + (row + at) * PANEL + strip.at;
                        let from = at * width + (strip.column - first);
                        values[to..to + strip.width]
                            .copy_from_slice(&block[from..from + strip.width]);
                    }
                }
            }
        } else {
            for strip in layout.strips(first..first + width) {
                let out = &mut values[strip.panel..strip.panel + PANEL * inputs];
                let wanted = column(strip.column)..column(strip.column + strip.width);
                let place = Place { out, stride: PANEL, at: strip.at };
                read(source, rows.clone(), wanted, place)?;
            }
        }
        first += width;
    }
    Ok(())
}

struct Loader<'a> {
    dir: &'a ModelDir,
    /// What file bytes pass through; it grows to the read limit of `galaxy_model` and no further.
    scratch: Vec<u8>,
    held: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>,
}

impl Loader<'_> {
    fn shard(
        &mut self,
        dir: &Arc<ModelDir>,
        blocks: &[(u32, BlockAssignment)],
        vocabulary: Span<Token>,
    ) -> Result<Shard, WeightError> {
        let spec = self.dir.spec();
        let mut layers = Vec::with_capacity(blocks.len());
        for (layer, block) in blocks {
            layers.push(self.layer(*layer, block.heads, block.columns.iter())?);
        }
        let embedding_norm = match spec.embedding_norm {
            true => Some(self.norm(Vector::EmbeddingNorm, Vector::EmbeddingNormBias)?),
            false => None,
        };
        let final_norm = match spec.norm_place {
            NormPlace::Pre => Some(self.norm(Vector::FinalNorm, Vector::FinalNormBias)?),
            NormPlace::Post => None,
        };
        let token_type = self.vector_if(spec.token_types, Vector::TokenTypeRow)?;
        let hidden = 0..spec.hidden;
        let language = self.matrix(&[(Matrix::LanguageHead, hidden.clone(), vocabulary.iter())])?;
        let classes = match &spec.head {
            HeadSpec::Classes(head) => {
                let dense = match head.dense {
                    Some(_) => self
                        .matrix(&[(Matrix::ClassDense, hidden.clone(), hidden.clone())])?
                        .zip(self.vector_if(true, Vector::ClassDenseBias)?),
                    None => None,
                };
                let output = self.matrix(&[(Matrix::ClassOutput, hidden, 0..head.labels)])?;
                let bias = self.vector_if(head.bias, Vector::ClassOutputBias)?;
                output.map(|output| ClassShard { dense, output, bias })
            }
            HeadSpec::None | HeadSpec::Language { .. } => None,
        };
        self.tell(self.total)?;
        Ok(Shard {
            dir: dir.clone(),
            layers,
            embedding_norm,
            token_type,
            final_norm,
            vocabulary,
            language,
            classes,
            bytes: Bytes(self.held),
        })
    }

    fn layer(
        &mut self,
        layer: u32,
        heads: Span<Head>,
        columns: Range<u32>,
    ) -> Result<LayerShard, WeightError> {
        let spec = self.dir.spec();
        let hidden = 0..spec.hidden;
        let kv_heads = kv_span(spec, heads);
        let width = spec.head_width;
        let queries = heads.start() * width..heads.end() * width;
        let keys = kv_heads.start() * width..kv_heads.end() * width;
        let qkv = self.matrix(&[
            (Matrix::Query(layer), hidden.clone(), queries.clone()),
            (Matrix::Key(layer), hidden.clone(), keys.clone()),
            (Matrix::Value(layer), hidden.clone(), keys.clone()),
        ])?;
        let qkv_bias = match spec.qkv_bias && !queries.is_empty() {
            true => Some(self.slices(&[
                (Vector::QueryBias(layer), queries.clone()),
                (Vector::KeyBias(layer), keys.clone()),
                (Vector::ValueBias(layer), keys),
            ])?),
            false => None,
        };
        let attention_output =
            self.matrix(&[(Matrix::AttentionOutput(layer), queries, hidden.clone())])?;
        let (up, up_bias) = if spec.gated {
            let up = self.matrix(&[
                (Matrix::Gate(layer), hidden.clone(), columns.clone()),
                (Matrix::Up(layer), hidden.clone(), columns.clone()),
            ])?;
            let slices = [
                (Vector::GateBias(layer), columns.clone()),
                (Vector::UpBias(layer), columns.clone()),
            ];
            let held = spec.mlp_bias && !columns.is_empty();
            (up, if held { Some(self.slices(&slices)?) } else { None })
        } else {
            let up = self.matrix(&[(Matrix::Up(layer), hidden.clone(), columns.clone())])?;
            let held = spec.mlp_bias && !columns.is_empty();
            let slices = [(Vector::UpBias(layer), columns.clone())];
            (up, if held { Some(self.slices(&slices)?) } else { None })
        };
        let down = self.matrix(&[(Matrix::Down(layer), columns, hidden)])?;
        Ok(LayerShard {
            heads,
            kv_heads,
            qkv,
            qkv_bias,
            attention_output,
            attention_output_bias: self
                .vector_if(spec.attention_output_bias, Vector::AttentionOutputBias(layer))?,
            up,
            up_bias,
            down,
            down_bias: self.vector_if(spec.mlp_bias, Vector::DownBias(layer))?,
            attention_norm: self
                .norm(Vector::AttentionNorm(layer), Vector::AttentionNormBias(layer))?,
            mlp_norm: self.norm(Vector::MlpNorm(layer), Vector::MlpNormBias(layer))?,
        })
    }

    /// Parts that have the same inputs, side by side; nothing where they have no values.
    fn matrix(&mut self, parts: &[Part]) -> Result<Option<HeldMatrix>, WeightError> {
        let inputs = parts[0].1.len();
        let outputs: usize = parts.iter().map(|p| p.2.len()).sum();
        if inputs == 0 || outputs == 0 {
            return Ok(None);
        }
        let mut sources = Vec::with_capacity(parts.len());
        for (which, rows, columns) in parts {
            let source = self.dir.matrix(*which)?;
            if rows.end > source.rows() || columns.end > source.columns() {
                // Refused before there is memory for it; the error is the reader's own.
                let (rows, columns) = (rows.clone(), columns.clone());
                source.read_f32(rows, columns, &mut [], outputs, 0, &mut self.scratch)?;
            }
            sources.push(source);
        }
        let mut dtype = sources[0].dtype();
        if sources.iter().any(|s| s.dtype() != dtype) {
            dtype = Dtype::F32;
        }
        let gated = matches!(parts, [(Matrix::Gate(_), ..), (Matrix::Up(_), ..)]);
        let layout = Layout { inputs, outputs, gated };
        let size = inputs * layout.packed();
        let values = match dtype {
            Dtype::F32 => {
                let mut values = self.room::<f32>(size)?;
                let out = values.values_mut();
                fill(&sources, parts, layout, out, |source, rows, columns, place| {
                    let Place { out, stride, at } = place;
                    source.read_f32(rows, columns, out, stride, at, &mut self.scratch)
                })?;
                Values::F32(values)
            }
            Dtype::F16 | Dtype::Bf16 => {
                let mut bits = self.room::<u16>(size)?;
                let out = bits.values_mut();
                fill(&sources, parts, layout, out, |source, rows, columns, place| {
                    let Place { out, stride, at } = place;
                    source.read_u16(rows, columns, out, stride, at, &mut self.scratch)
                })?;
                if dtype == Dtype::F16 { Values::F16(bits) } else { Values::Bf16(bits) }
            }
        };
        let matrix = HeldMatrix::new(layout, values);
        self.count(matrix.bytes().0)?;
        Ok(Some(matrix))
    }

    /// Exactly `size` zeros, once: never grown, never copied.
    fn room<T: bytemuck::Pod>(&self, size: usize) -> Result<Lines<T>, WeightError> {
        Lines::zeroed(size).map_err(|_| WeightError::Memory {
            wanted: Bytes((size * size_of::<T>()) as u64),
            held: Bytes(self.held),
        })
    }

    fn slices(&mut self, parts: &[(Vector, Range<u32>)]) -> Result<Vec<f32>, WeightError> {
        let mut all = Vec::with_capacity(parts.iter().map(|p| p.1.len()).sum());
        for (which, range) in parts {
            let whole = self.dir.vector(*which)?;
            let range = range.start as usize..range.end as usize;
            // A span beyond the model has failed already, when the matrix was read.
            all.extend_from_slice(whole.get(range).unwrap_or_default());
        }
        self.count(size_of_val(all.as_slice()) as u64)?;
        Ok(all)
    }

    fn vector_if(&mut self, held: bool, which: Vector) -> Result<Option<Vec<f32>>, WeightError> {
        if !held {
            return Ok(None);
        }
        let vector = self.dir.vector(which)?;
        self.count(size_of_val(vector.as_slice()) as u64)?;
        Ok(Some(vector))
    }

    fn norm(&mut self, weight: Vector, bias: Vector) -> Result<NormVectors, WeightError> {
        let biased = self.dir.spec().norm == NormKind::Layer;
        let weight = self.vector_if(true, weight)?.unwrap_or_default();
        Ok(NormVectors { weight, bias: self.vector_if(biased, bias)? })
    }

    fn count(&mut self, bytes: u64) -> Result<(), WeightError> {
        self.held += bytes;
        self.tell(self.held.min(self.total))
    }

    fn tell(&mut self, done: u64) -> Result<(), WeightError> {
        match (self.progress)(done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(WeightError::Stopped),
        }
    }
}
