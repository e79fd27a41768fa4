//! The description of a model: what every layer consists of, whatever its family.
//!
//! One description-driven layer replaces a file for each architecture. A family is a table of
//! names and fields that ends in a [`ModelSpec`]; nothing after it knows the family.

use galaxy_common::{Wanted, plan::Extent};
use serde::{Deserialize, Serialize};

/// The kind of a norm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum NormKind {
    /// Layer norm: by mean and variance, with weight and bias.
    Layer,
    /// RMS norm: by the root mean square, with a weight only.
    Rms,
}

/// Where the norms of a layer are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum NormPlace {
    /// Before each block; the residual is not normed, and a last norm follows the last layer.
    Pre,
    /// After each block's addition to the residual.
    Post,
}

/// The activation function of an MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Activation {
    /// GELU by the error function.
    Gelu,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// SiLU: x * sigmoid(x).
    Silu,
    /// ReLU: max(x, 0).
    Relu,
    /// The sigmoid approximation of GELU: x * sigmoid(1.702 x).
    QuickGelu,
    /// GELU by the error function, at most 10.
    ClippedGelu,
    /// ReLU squared: max(x, 0)^2.
    SquaredRelu,
    /// ReLU up to 6: min(max(x, 0), 6).
    Relu6,
    /// Leaky ReLU: x where it is positive, 0.01 x elsewhere.
    LeakyRelu,
    /// Hard swish: x * min(max(x + 3, 0), 6) / 6.
    HardSwish,
    /// Mish: x * tanh(ln(1 + e^x)).
    Mish,
    /// The normal distribution function of (x - [`LAPLACE_MEAN`]) / [`LAPLACE_DEVIATION`].
    Laplace,
    /// The hyperbolic tangent.
    Tanh,
    /// The logistic function: 1 / (1 + e^-x).
    Sigmoid,
    /// No activation: x itself.
    Linear,
}

/// The mean of the normal distribution in [`Activation::Laplace`], where its value is one half.
#[expect(clippy::approx_constant, reason = "the reference has no more digits")]
pub const LAPLACE_MEAN: f32 = 0.707_107;
/// The standard deviation of the normal distribution in `Activation::Laplace`.
pub const LAPLACE_DEVIATION: f32 = 0.282_095;

/// How a model encodes the positions of rows.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Positions {
    /// A table of `rows` rows is added to the embedding: position p adds row p + `offset`.
    Learned {
        /// The rows of the position table.
        rows: u32,
        /// The row of the first position.
        offset: u32,
    },
    /// The first `inverse_frequencies.len() * 2` columns of each query and key head are rotated in
    /// pairs: pair i by position * `inverse_frequencies[i]`.
    Rotary {
        /// The frequency of each pair of columns, with every scaling rule of the config applied.
        inverse_frequencies: Vec<f32>,
        /// The frequencies of long texts, where they differ (LongRoPE).
        long: Option<LongFrequencies>,
        /// The factor by which cosines and sines are multiplied.
        scale: f32,
        /// Which columns form a pair.
        pairs: Pairs,
        /// The longest sequence that the model is for, in rows.
        limit: u32,
    },
}

/// The rows that a row sees in a layer with a sliding window, besides itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct SlidingWindow {
    /// How many rows before it a row sees.
    pub before: u32,
    /// How many rows after it a row sees; a causal mask hides them in any case.
    pub after: u32,
}

/// The positions by which a layer rotates queries and keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub enum Rotation {
    /// The positions that most layers have (`positions` of the model's description).
    #[default]
    Usual,
    /// The positions of layers with windows ([`ModelSpec::local_positions`]).
    Local,
    /// No positions: the layer does not rotate (NoPE).
    None,
}

/// The properties in which layers of one model may differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct LayerKind {
    /// The sliding window; `None` where rows see all that the model lets them see.
    pub window: Option<SlidingWindow>,
    /// The positions by which the layer rotates, in a model with rotary positions.
    pub rotation: Rotation,
}

/// The inverse frequencies that all rows of a long text have instead.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LongFrequencies {
    /// A text is long if it has more rows than this.
    pub above: u32,
    /// The inverse frequency of each pair of columns.
    pub inverse_frequencies: Vec<f32>,
}

/// Which columns of a head are rotated as a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Pairs {
    /// Column i and column i + pairs (Llama).
    Halves,
    /// Column 2i and column 2i + 1 (GPT-J).
    Neighbours,
}

/// A relative position bias: each query head adds to attention scores a value that depends on how far apart two rows
/// are, the same in all layers (T5, MPNet).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RelativeBias {
    /// The rows of the bias table, half of them for keys after the query.
    pub buckets: u32,
    /// The distance from which on all rows share the last bucket.
    pub most: u32,
}

impl RelativeBias {
    /// The bucket of a key that is `distance` rows after the query, or before it where that is negative. Near keys have
    /// buckets of their own, others share them by the logarithm of the distance (as in T5, with the same rounding).
    pub fn bucket(&self, distance: i64) -> u32 {
        let half = self.buckets / 2;
        let (later, apart) = (distance > 0, distance.unsigned_abs());
        let exact = half / 2;
        let bucket = if apart < u64::from(exact) {
            apart as u32
        } else {
            let share = (apart as f32 / exact as f32).ln()
                / (f64::from(self.most) / f64::from(exact)).ln() as f32;
            (exact + (share * (half - exact) as f32) as u32).min(half - 1)
        };
        bucket + if later { half } else { 0 }
    }
}

/// How an image becomes rows: the first row is the class's, each other one is that of an image patch, line by line
/// (ViT).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Patches {
    /// The channels of the image: values of a pixel.
    pub channels: u32,
    /// The height of the image in pixels, a multiple of `size`.
    pub height: u32,
    /// The width of the image in pixels, a multiple of `size`.
    pub width: u32,
    /// The side of a patch in pixels; patches are square.
    pub size: u32,
}

impl Patches {
    /// The rows of an image: one for each patch, and one for the class.
    pub fn rows(&self) -> u32 {
        1 + (self.height / self.size) * (self.width / self.size)
    }
    /// The number of values of a patch.
    pub fn values(&self) -> u32 {
        self.channels * self.size * self.size
    }
    /// The number of values of an image: its pixels times the channels.
    pub fn pixels(&self) -> usize {
        self.channels as usize * self.height as usize * self.width as usize
    }

    /// Cuts an image into patches, one for each row; the row of the class is zeros.
    ///
    /// # Shapes
    /// `pixels` is `[channels, height, width]`; the result is `[rows, values]`, each row a patch of `[channels, size,
    /// size]`.
    ///
    /// # Panics
    /// When `pixels` does not have as many values as an image.
    pub fn cut(&self, pixels: &[f32]) -> Vec<f32> {
        assert_eq!(pixels.len(), self.pixels(), "an image of this size");
        let (size, width) = (self.size as usize, self.width as usize);
        let mut rows = vec![0.0; self.rows() as usize * self.values() as usize];
        let mut out = rows[self.values() as usize..].chunks_exact_mut(size.max(1));
        for top in (0..self.height as usize).step_by(size) {
            for left in (0..width).step_by(size) {
                for channel in pixels.chunks_exact(self.height as usize * width) {
                    for line in top..top + size {
                        if let Some(out) = out.next() {
                            out.copy_from_slice(&channel[line * width + left..][..size]);
                        }
                    }
                }
            }
        }
        rows
    }
}

/// The head that turns one row into the logits of classes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClassHead {
    /// The row that the head reads.
    pub row: ClassRow,
    /// The activation behind a dense layer of hidden x hidden before the output; `None` where there is no such layer.
    pub dense: Option<ClassActivation>,
    /// Whether the dense layer has a bias.
    pub dense_bias: bool,
    /// Whether a norm follows the dense layer.
    pub norm: bool,
    /// The number of classes.
    pub labels: u32,
    /// Whether the output layer has a bias.
    pub bias: bool,
    /// The names of the classes, as many as `labels`.
    pub names: Vec<String>,
    /// What the logits mean, if the config says so.
    pub problem: Option<Problem>,
    /// The padding token of a head that reads the last row: rows of it at the end of a text are passed over.
    pub padding: Option<u32>,
}

impl ClassHead {
    /// How many tokens of a text come before the padding at its end, at least one: the row of the last of them is read.
    pub fn unpadded(&self, tokens: &[u32]) -> usize {
        match (self.row, self.padding) {
            (ClassRow::Last, Some(padding)) if tokens.last() == Some(&padding) => {
                tokens.iter().rposition(|&id| id != padding).map_or(1, |last| last + 1)
            }
            _ => tokens.len(),
        }
    }
}

/// What the logits of a class head mean (`problem_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Problem {
    /// The logits are the predicted values themselves.
    Regression,
    /// A single class is right: the softmax of the logits gives the probabilities.
    SingleLabel,
    /// Any number of classes are right: the sigmoid of each logit is the probability of its class.
    MultiLabel,
}

/// The row that a class head reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ClassRow {
    /// The first row of a text.
    First,
    /// The last row of a text, padding left out.
    Last,
}

/// The activation behind the dense layer of a class head.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ClassActivation {
    /// The hyperbolic tangent (BERT's pooler).
    Tanh,
    /// ReLU: max(x, 0) (DistilBERT).
    Relu,
    /// GELU by the error function (ModernBERT).
    Gelu,
}

/// The head on top of the layers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum HeadSpec {
    /// No head: only hidden states and pooled vectors are to be had.
    None,
    /// A head that tells classes apart.
    Classes(ClassHead),
    /// A language head of hidden x vocabulary: the logits of the next token.
    Language {
        /// Whether the head shares the token embedding table.
        tied: bool,
        /// Whether the head has a bias.
        bias: bool,
    },
}

impl HeadSpec {
    /// The number of classes; 0 without a class head.
    pub fn labels(&self) -> u32 {
        match self {
            Self::Classes(head) => head.labels,
            Self::None | Self::Language { .. } => 0,
        }
    }
}

/// The scale of attention scores, as a product of factors.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ScoreScale {
    /// A factor of one over the square root of this number, which mostly is the width of a head; `None` for no such
    /// factor.
    pub over_root: Option<f32>,
    /// Whether there is a factor of one over the layer's number, counted from one (GPT-2).
    pub by_layer: bool,
}

/// The description of a model.
///
/// Sizes are in values, not bytes. `heads * head_width` may differ from `hidden`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The `model_type` of the config, for messages.
    pub family: String,
    /// The hidden size: values in a row.
    pub hidden: u32,
    /// The number of layers.
    pub layers: u32,
    /// The number of query heads.
    pub heads: u32,
    /// The number of key-value heads; divides `heads`.
    pub kv_heads: u32,
    /// The width of a head.
    pub head_width: u32,
    /// The intermediate size: columns between the two products of an MLP.
    #[serde(rename = "inner")] // The key of profiles is a digest of these names.
    pub intermediate: u32,
    /// Rows of the token embedding table; 0 in a model of images.
    pub vocabulary: u32,
    /// How images become rows, in a model of images.
    pub patches: Option<Patches>,
    /// The kind of all norms.
    pub norm: NormKind,
    /// Where the norms of a layer are.
    pub norm_place: NormPlace,
    /// The number that norms add to the variance or mean square.
    pub norm_epsilon: f32,
    /// Whether norms have a bias, where their kind can have one.
    pub norm_bias: bool,
    /// Whether files store the weights of norms minus one (Gemma).
    pub norms_from_one: bool,
    /// Whether the first layer norms its input, as all others do; relevant for [`NormPlace::Pre`] only.
    pub first_norm: bool,
    /// Whether the output of a block is normed before it is added to the residual (Gemma).
    pub sum_norms: bool,
    /// The activation function of the MLP.
    pub activation: Activation,
    /// Whether the MLP is gated: down(act(gate(x)) * up(x)).
    pub gated: bool,
    /// Whether layers have a parallel residual (GPT-J): attention and MLP read the same normed rows, and both are added
    /// to the residual together. Such a layer has one norm, before both.
    pub parallel: bool,
    /// Whether rows see only themselves and earlier rows.
    pub causal: bool,
    /// The kind of each layer; empty where all layers are of the default kind.
    pub kinds: Vec<LayerKind>,
    /// The scale of attention scores.
    pub scores: ScoreScale,
    /// The soft cap c of attention scores, if there is one: a score s becomes c tanh(s / c), before position bias and
    /// windows (Gemma 2).
    pub score_cap: Option<f32>,
    /// The soft cap of the language head's logits, if there is one.
    pub logit_cap: Option<f32>,
    /// The factor by which token embeddings are multiplied.
    pub embedding_scale: f32,
    /// The token that takes no position (RoBERTa's padding): texts that contain it are refused.
    pub unplaced: Option<u32>,
    /// How the model encodes positions.
    pub positions: Positions,
    /// The rotary positions of layers whose rotation is `Local`.
    pub local_positions: Option<Positions>,
    /// The relative position bias that is added to scores, if there is one.
    #[serde(rename = "distances")]
    pub relative_bias: Option<RelativeBias>,
    /// Rows of the table of token types, one of which is added to each embedding; 0 where there is no such table.
    pub token_types: u32,
    /// Whether a norm follows the embedding.
    pub embedding_norm: bool,
    /// Whether each query head and each key head has an RMS norm of its own, before it is rotated (Qwen3).
    pub head_norm: bool,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub attention_output_bias: bool,
    /// Whether the MLP's products have biases.
    pub mlp_bias: bool,
    /// The head on top of the layers.
    pub head: HeadSpec,
    /// Why the model has no head although its architecture has one, for messages.
    pub headless: Option<String>,
}

impl ModelSpec {
    /// The extent that a plan must cover.
    pub fn extent(&self) -> Extent {
        Extent {
            layers: self.layers,
            heads: self.heads,
            intermediate: self.intermediate,
            vocabulary: match self.head {
                HeadSpec::Language { .. } => self.vocabulary,
                _ => 0,
            },
        }
    }

    /// Query heads that share one key-value head.
    pub fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// The same model with so many layers for measurements. All layers are of the default kind, without windows: what a
    /// window saves follows from the rows that it hides.
    #[must_use]
    pub fn sample(&self, layers: u32) -> Self {
        Self { layers, kinds: Vec::new(), ..self.clone() }
    }

    /// The kind of a layer.
    pub fn kind(&self, layer: u32) -> LayerKind {
        self.kinds.get(layer as usize).copied().unwrap_or_default()
    }

    /// The rotary positions of a layer; `None` where it is not rotated.
    pub fn rotary(&self, layer: u32) -> Option<&Positions> {
        let positions = match self.kind(layer).rotation {
            Rotation::Usual => Some(&self.positions),
            Rotation::Local => self.local_positions.as_ref(),
            Rotation::None => None,
        };
        positions.filter(|positions| matches!(positions, Positions::Rotary { .. }))
    }

    /// How many rows before a row, and how many after it, the row sees in a layer; `None` for all.
    pub fn sees(&self, layer: u32) -> (Option<u32>, Option<u32>) {
        let window = self.kind(layer).window;
        let ahead = if self.causal { Some(0) } else { window.map(|window| window.after) };
        (window.map(|window| window.before), ahead)
    }

    /// Whether rotary positions depend on the length of a text (LongRoPE), so that rows of the same beginning differ
    /// between texts.
    pub fn rotates_by_length(&self) -> bool {
        let long = |of: &Positions| matches!(of, Positions::Rotary { long: Some(_), .. });
        long(&self.positions) || self.local_positions.as_ref().is_some_and(long)
    }

    /// Whether rows see the same rows in all layers, in texts of up to `rows` rows.
    pub fn sees_alike(&self, rows: u32) -> bool {
        let narrow = |window: Option<SlidingWindow>| {
            window.filter(|of| of.before.min(if self.causal { u32::MAX } else { of.after }) < rows)
        };
        let mut windows = self.kinds.iter().map(|kind| narrow(kind.window));
        windows.next().is_none_or(|first| windows.all(|window| window == first))
    }

    /// The name of the limit in [`ModelSpec::position_limit`], for messages.
    pub fn limited_by(&self) -> &'static str {
        "the model's table of positions"
    }

    /// The most rows that a sequence may have.
    pub fn position_limit(&self) -> u32 {
        match &self.positions {
            Positions::Learned { rows, offset } => rows.saturating_sub(*offset),
            Positions::Rotary { limit, .. } => *limit,
        }
    }

    /// How many tokens of a text are run for an output: for a class head, those before the padding at its end.
    ///
    /// # Errors
    /// A sentence about why these tokens cannot be run as in the reference.
    pub fn readable(&self, tokens: &[u32], wanted: Wanted) -> Result<usize, String> {
        if let Some(token) = self.unplaced.filter(|token| tokens.contains(token)) {
            return Err(format!(
                "token {token} is this model's padding, which takes no position: leave it out"
            ));
        }
        let (Wanted::Classes, HeadSpec::Classes(head)) = (wanted, &self.head) else {
            return Ok(tokens.len());
        };
        let count = head.unpadded(tokens);
        if count < tokens.len() && !self.causal {
            return Err(format!(
                "it ends with the model's padding, token {}, and rows before it see it: leave it out",
                tokens[count]
            ));
        }
        Ok(count)
    }

    /// The factor by which attention scores of a layer are multiplied.
    pub fn score_scale(&self, layer: u32) -> f32 {
        let width = self.scores.over_root.map_or(1.0, |of| f64::from(of).sqrt());
        let layers = if self.scores.by_layer { f64::from(layer) + 1.0 } else { 1.0 };
        (1.0 / (width * layers)) as f32
    }
}
