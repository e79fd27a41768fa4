//! The description of a model: what every layer is made of, whatever family it comes from.
//!
//! One description-driven layer replaces a file for each architecture. A family is a table of
//! names and fields that ends in a [`ModelSpec`]; nothing after it knows the family.

use galaxy_common::{Wanted, plan::Extent};
use serde::{Deserialize, Serialize};

/// Which kind of norm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum NormKind {
    /// Mean and variance, weight and bias.
    Layer,
    /// Root mean square, weight only.
    Rms,
}

/// Where a layer's norms stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum NormPlace {
    /// Before each block; the residual stays raw; one more norm after the last layer.
    Pre,
    /// After each block's residual addition.
    Post,
}

/// The activation of an MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Activation {
    /// GELU by the error function.
    Gelu,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// x * sigmoid(x).
    Silu,
    /// max(x, 0).
    Relu,
    /// x * sigmoid(1.702 x).
    QuickGelu,
    /// GELU by the error function, at most 10.
    ClippedGelu,
    /// max(x, 0) squared.
    SquaredRelu,
    /// max(x, 0), at most 6.
    Relu6,
    /// x where it is positive, 0.01 x elsewhere.
    LeakyRelu,
    /// x * min(max(x + 3, 0), 6) / 6.
    HardSwish,
    /// x * tanh(ln(1 + e^x)).
    Mish,
    /// The normal distribution function of (x - [`LAPLACE_MEAN`]) / [`LAPLACE_DEVIATION`].
    Laplace,
    /// tanh(x).
    Tanh,
    /// 1 / (1 + e^-x).
    Sigmoid,
    /// x.
    Linear,
}

/// Where [`Activation::Laplace`] is one half,
#[expect(clippy::approx_constant, reason = "the reference has no more digits")]
pub const LAPLACE_MEAN: f32 = 0.707_107;
/// and how far from there it is 0.84.
pub const LAPLACE_DEVIATION: f32 = 0.282_095;

/// How rows know their place.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Positions {
    /// A table of `rows` rows is added to the embedding; position p reads row p + `offset`.
    Learned {
        /// Rows of the table.
        rows: u32,
        /// Added to the position.
        offset: u32,
    },
    /// The first `inverse_frequencies.len() * 2` columns of each query and key head are rotated in
    /// pairs: pair i by position * `inverse_frequencies[i]`.
    Rotary {
        /// One for each pair of columns; every scaling rule of the config is already in it.
        inverse_frequencies: Vec<f32>,
        /// The frequencies of long texts, where these differ (LongRoPE).
        long: Option<LongFrequencies>,
        /// What cosines and sines are multiplied by.
        scale: f32,
        /// Which columns are a pair.
        pairs: Pairs,
        /// Positions that the model was made for.
        limit: u32,
    },
}

/// The neighbours of a row that it sees in a layer with a sliding window, besides itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct SlidingWindow {
    /// So many rows before it,
    pub before: u32,
    /// and, where rows see later ones at all, so many after it.
    pub after: u32,
}

/// By which positions queries and keys of a layer are rotated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub enum Rotation {
    /// Those of the model.
    #[default]
    Usual,
    /// Those of its layers with windows ([`ModelSpec::local_positions`]).
    Local,
    /// None: such layers know nothing of positions (NoPE).
    None,
}

/// What layers of one model may differ in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct LayerKind {
    /// What a row sees of its text; none for all that the model lets it see.
    pub window: Option<SlidingWindow>,
    /// By which positions it is rotated, in a model with rotary positions.
    pub rotation: Rotation,
}

/// Other inverse frequencies, for all rows of a text that has become long.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LongFrequencies {
    /// Texts of more rows are long.
    pub above: u32,
    /// One for each pair of columns.
    pub inverse_frequencies: Vec<f32>,
}

/// Which columns of a head are rotated together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Pairs {
    /// Column i with column i + pairs (Llama).
    Halves,
    /// Column 2i with column 2i + 1 (GPT-J).
    Neighbours,
}

/// What is added to the scores of attention by how far apart two rows are, for each query head: the
/// same in all layers (T5, MPNet).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Distances {
    /// Rows of the table, half of them for later rows.
    pub buckets: u32,
    /// From this distance on, all are in the last bucket.
    pub most: u32,
}

impl Distances {
    /// The bucket of a key that stands `distance` rows after the query (before it, where that is
    /// negative): near ones have their own, others share them by the logarithm of the distance (as in
    /// T5, whose rounding this has too).
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

/// Rows that are made of an image: the first belongs to the class, each other to a square of pixels,
/// row by row of the image (ViT).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Patches {
    /// Values of a pixel.
    pub channels: u32,
    /// Pixels of the image from top to bottom; a multiple of `size`,
    pub height: u32,
    /// and from left to right.
    pub width: u32,
    /// Pixels of a side of a square.
    pub size: u32,
}

impl Patches {
    /// Rows of an image.
    pub fn rows(&self) -> u32 {
        1 + (self.height / self.size) * (self.width / self.size)
    }
    /// Values of a square.
    pub fn values(&self) -> u32 {
        self.channels * self.size * self.size
    }
    /// Values of an image.
    pub fn pixels(&self) -> usize {
        self.channels as usize * self.height as usize * self.width as usize
    }

    /// The squares of an image, one for each row; the row of the class has zeros.
    ///
    /// # Shapes
    /// pixels `[channels, height, width]`; the result `[rows, values]`, each square
    /// `[channels, size, size]`.
    ///
    /// # Panics
    /// When there are more or fewer pixels.
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

/// What turns the pooled row into class logits.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClassHead {
    /// Which row it reads.
    pub row: ClassRow,
    /// A dense layer of hidden x hidden before the output, and its activation.
    pub dense: Option<ClassActivation>,
    /// Whether that layer has a bias,
    pub dense_bias: bool,
    /// and whether a norm follows it.
    pub norm: bool,
    /// Number of classes.
    pub labels: u32,
    /// Whether the output layer has a bias.
    pub bias: bool,
    /// Names of the classes, as many as `labels`.
    pub names: Vec<String>,
    /// What the logits mean, if the config says so.
    pub problem: Option<Problem>,
    /// The token that a head of the last row takes for padding: rows of it at the end of a text are
    /// passed over.
    pub padding: Option<u32>,
}

impl ClassHead {
    /// How many of a text's tokens come before the padding at its end: the last of them has the row
    /// that is read. One at least, of a text that is nothing but padding.
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
    /// They are the values themselves.
    Regression,
    /// One class is right: their softmax is its probability.
    SingleLabel,
    /// Any number of classes is right: the sigmoid of each is its probability.
    MultiLabel,
}

/// Which row a class head reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ClassRow {
    /// The first.
    First,
    /// The last.
    Last,
}

/// What follows the dense layer of a class head.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ClassActivation {
    /// tanh (BERT's pooler).
    Tanh,
    /// max(x, 0) (DistilBERT).
    Relu,
    /// GELU by the error function (ModernBERT).
    Gelu,
}

/// What stands on top of the layers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum HeadSpec {
    /// Nothing: hidden states and pooled vectors only.
    None,
    /// Classes.
    Classes(ClassHead),
    /// Logits of the next token: hidden x vocabulary.
    Language {
        /// Whether its weights are the embedding table's.
        tied: bool,
        /// Whether it has a bias.
        bias: bool,
    },
}

impl HeadSpec {
    /// Classes that it tells apart; 0 without a class head.
    pub fn labels(&self) -> u32 {
        match self {
            Self::Classes(head) => head.labels,
            Self::None | Self::Language { .. } => 0,
        }
    }
}

/// What the scores of attention are multiplied by.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct ScoreScale {
    /// By one over the square root of this, which mostly is a head's width; none for no such factor.
    pub over_root: Option<f32>,
    /// Whether by one over the number of the layer, counted from one (GPT-2).
    pub by_layer: bool,
}

/// The description of a model.
///
/// Widths are in values, not bytes. `heads * head_width` may differ from `hidden`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ModelSpec {
    /// `model_type` of the config, for messages.
    pub family: String,
    /// Width of a row.
    pub hidden: u32,
    /// Layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key-value heads; divides `heads`.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_width: u32,
    /// Inner width of the MLP.
    pub inner: u32,
    /// Rows of the embedding table; 0 where rows are not made of tokens.
    pub vocabulary: u32,
    /// How rows are made of images, in a model of images.
    pub patches: Option<Patches>,
    /// Kind of all norms.
    pub norm: NormKind,
    /// Their place.
    pub norm_place: NormPlace,
    /// Added to the variance.
    pub norm_epsilon: f32,
    /// Whether norms have a bias, where their kind has one.
    pub norm_bias: bool,
    /// Whether files store what the weights of norms exceed 1 by (Gemma).
    pub norms_from_one: bool,
    /// Whether rows are normed before the first layer, as before all others: only of [`NormPlace::Pre`].
    pub first_norm: bool,
    /// Whether what a block adds to the residual is normed before it is added (Gemma).
    pub sum_norms: bool,
    /// Activation of the MLP.
    pub activation: Activation,
    /// Whether the MLP is gated: down(act(gate(x)) * up(x)).
    pub gated: bool,
    /// Whether attention and MLP of a layer read the same normed rows and are added to the residual
    /// together (GPT-J), instead of one after the other. Such a layer has one norm, before both.
    pub parallel: bool,
    /// Whether rows see earlier rows only.
    pub causal: bool,
    /// What layers differ in, one for each; empty where all are of the default kind.
    pub kinds: Vec<LayerKind>,
    /// What scores are multiplied by.
    pub scores: ScoreScale,
    /// Scores s become c tanh(s / c) of this c, before distances and windows (Gemma 2).
    pub score_cap: Option<f32>,
    /// The same of a language head's logits.
    pub logit_cap: Option<f32>,
    /// What rows of the embedding table are multiplied by.
    pub embedding_scale: f32,
    /// The token that takes no position of its own (RoBERTa's padding): texts with it are not run.
    pub unplaced: Option<u32>,
    /// Positions.
    pub positions: Positions,
    /// Rotary positions of the layers that have others than the rest.
    pub local_positions: Option<Positions>,
    /// What distances add to scores, besides.
    pub distances: Option<Distances>,
    /// Rows of the table of token types, of which one is added to each embedding; 0: there is none.
    pub token_types: u32,
    /// Whether a norm follows the embedding.
    pub embedding_norm: bool,
    /// Whether each query head and each key head is normed by itself, by its root mean square,
    /// before it is rotated (Qwen3).
    pub head_norm: bool,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub attention_output_bias: bool,
    /// Whether the MLP's products have biases.
    pub mlp_bias: bool,
    /// What stands on top.
    pub head: HeadSpec,
    /// Why nothing stands on top of a model whose architecture has a head, for messages.
    pub headless: Option<String>,
}

impl ModelSpec {
    /// What a plan must cover.
    pub fn extent(&self) -> Extent {
        Extent {
            layers: self.layers,
            heads: self.heads,
            columns: self.inner,
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

    /// A model of so many layers to measure with: in all of them rows see what they can, since the cost of less
    /// is told by what is seen.
    #[must_use]
    pub fn sample(&self, layers: u32) -> Self {
        Self { layers, kinds: Vec::new(), ..self.clone() }
    }

    /// What a layer has of its own.
    pub fn kind(&self, layer: u32) -> LayerKind {
        self.kinds.get(layer as usize).copied().unwrap_or_default()
    }

    /// The rotary positions of a layer; none where it has none.
    pub fn rotary(&self, layer: u32) -> Option<&Positions> {
        let positions = match self.kind(layer).rotation {
            Rotation::Usual => Some(&self.positions),
            Rotation::Local => self.local_positions.as_ref(),
            Rotation::None => None,
        };
        positions.filter(|positions| matches!(positions, Positions::Rotary { .. }))
    }

    /// How many rows before itself, and how many after, a row sees in a layer; none for all.
    pub fn sees(&self, layer: u32) -> (Option<u32>, Option<u32>) {
        let window = self.kind(layer).window;
        let ahead = if self.causal { Some(0) } else { window.map(|window| window.after) };
        (window.map(|window| window.before), ahead)
    }

    /// Whether rows are turned by how many come behind them, so that the same beginning of two texts is not
    /// the same in the model.
    pub fn turns_by_length(&self) -> bool {
        let long = |of: &Positions| matches!(of, Positions::Rotary { long: Some(_), .. });
        long(&self.positions) || self.local_positions.as_ref().is_some_and(long)
    }

    /// Whether rows see the same in all layers, in texts of so many rows.
    pub fn sees_alike(&self, rows: u32) -> bool {
        let narrow = |window: Option<SlidingWindow>| {
            window.filter(|of| of.before.min(if self.causal { u32::MAX } else { of.after }) < rows)
        };
        let mut windows = self.kinds.iter().map(|kind| narrow(kind.window));
        windows.next().is_none_or(|first| windows.all(|window| window == first))
    }

    /// What [`ModelSpec::position_limit`] is the size of, for messages.
    pub fn limited_by(&self) -> &'static str {
        "the model's table of positions"
    }

    /// The most rows that a text may have.
    pub fn position_limit(&self) -> u32 {
        match &self.positions {
            Positions::Learned { rows, offset } => rows.saturating_sub(*offset),
            Positions::Rotary { limit, .. } => *limit,
        }
    }

    /// How many of a text's tokens are run for what is wanted of it: from where a class head finds
    /// padding on, nothing counts.
    ///
    /// # Errors
    /// In words: why these tokens are not run as the reference runs them.
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

    /// What the scores of a layer are multiplied by.
    pub fn score_scale(&self, layer: u32) -> f32 {
        let width = self.scores.over_root.map_or(1.0, |of| f64::from(of).sqrt());
        let layers = if self.scores.by_layer { f64::from(layer) + 1.0 } else { 1.0 };
        (1.0 / (width * layers)) as f32
    }
}
