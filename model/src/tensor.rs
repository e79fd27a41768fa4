//! The matrices, vectors and tables that a model of a given spec has, by their purpose.

use crate::spec::*;

/// A matrix of a model, by layer. Mathematically `[inputs, outputs]` whatever its storage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Matrix {
    /// The query projection, `[hidden, heads * head_width]`.
    Query(u32),
    /// The key projection, `[hidden, kv_heads * head_width]`.
    Key(u32),
    /// The value projection, `[hidden, kv_heads * head_width]`.
    Value(u32),
    /// The output projection of attention, `[heads * head_width, hidden]`.
    AttentionOutput(u32),
    /// The gate projection of a gated MLP, `[hidden, inner]`.
    Gate(u32),
    /// The up projection of the MLP, `[hidden, inner]`.
    Up(u32),
    /// The down projection of the MLP, `[inner, hidden]`.
    Down(u32),
    /// The projection of image patches, `[values of a patch, hidden]`, in a model of images.
    Patch,
    /// The dense layer of a class head, `[hidden, hidden]`.
    ClassDense,
    /// The output layer of a class head, `[hidden, labels]`.
    ClassOutput,
    /// The language head, `[hidden, vocabulary]`; a tied one is the token embedding table.
    LanguageHead,
}

/// A vector of a model, by layer: a bias, the weights of a norm, or a small table.
///
/// With [`NormPlace::Pre`], `AttentionNorm` is before attention and `MlpNorm` before the MLP, unless a parallel
/// residual has a single norm; with [`NormPlace::Post`], each follows its block's addition to the residual.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Vector {
    /// The bias of the query projection.
    QueryBias(u32),
    /// The bias of the key projection.
    KeyBias(u32),
    /// The bias of the value projection.
    ValueBias(u32),
    /// The bias of the attention's output projection.
    AttentionOutputBias(u32),
    /// The bias of the MLP's up projection.
    UpBias(u32),
    /// The bias of the MLP's gate projection.
    GateBias(u32),
    /// The bias of the MLP's down projection.
    DownBias(u32),
    /// The weight of the norm of query heads, with a value for each column of a head.
    QueryHeadNorm(u32),
    /// The weight of the norm of key heads, with a value for each column of a head.
    KeyHeadNorm(u32),
    /// The weight of the attention's norm.
    AttentionNorm(u32),
    /// The bias of the attention's norm.
    AttentionNormBias(u32),
    /// The weight of the MLP's norm.
    MlpNorm(u32),
    /// The bias of the MLP's norm.
    MlpNormBias(u32),
    /// The weight of the norm of the attention's output, before it is added to the residual.
    AttentionSumNorm(u32),
    /// The weight of the norm of the MLP's output, before it is added to the residual.
    MlpSumNorm(u32),
    /// The bias of the projection of image patches.
    PatchBias,
    /// The embedding of the class's row, in a model of images.
    ClassRow,
    /// The weight of the norm that follows the embedding.
    EmbeddingNorm,
    /// The bias of the norm that follows the embedding.
    EmbeddingNormBias,
    /// The weight of the norm after the last layer.
    FinalNorm,
    /// The bias of the norm after the last layer.
    FinalNormBias,
    /// The table of token types, `[types, hidden]`, row-major.
    TokenTypes,
    /// The table of the relative position bias, `[buckets, heads]`, row-major.
    RelativeBias,
    /// The bias of the dense layer of a class head.
    ClassDenseBias,
    /// The weight of the norm behind the dense layer of a class head.
    ClassNorm,
    /// The bias of the norm behind the dense layer of a class head.
    ClassNormBias,
    /// The bias of the output layer of a class head.
    ClassOutputBias,
    /// The bias of the language head.
    LanguageBias,
}

/// A table that is read by rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Table {
    /// The token embedding table, `[vocabulary, hidden]`.
    Word,
    /// The table of learned positions, `[positions, hidden]`.
    Position,
}

impl Matrix {
    /// The same matrix of another layer; a matrix of no layer stays as it is.
    #[must_use]
    pub fn at(self, layer: impl Fn(u32) -> u32) -> Self {
        match self {
            Self::Query(l) => Self::Query(layer(l)),
            Self::Key(l) => Self::Key(layer(l)),
            Self::Value(l) => Self::Value(layer(l)),
            Self::AttentionOutput(l) => Self::AttentionOutput(layer(l)),
            Self::Gate(l) => Self::Gate(layer(l)),
            Self::Up(l) => Self::Up(layer(l)),
            Self::Down(l) => Self::Down(layer(l)),
            of_no_layer => of_no_layer,
        }
    }

    /// The inputs and outputs; `None` where a model of this spec has no such matrix.
    pub fn shape(self, spec: &ModelSpec) -> Option<(u32, u32)> {
        let attention = spec.heads * spec.head_width;
        let kv = spec.kv_heads * spec.head_width;
        let class = match &spec.head {
            HeadSpec::Classes(head) => Some(head),
            _ => None,
        };
        let layer = |layer: u32, shape| (layer < spec.layers).then_some(shape);
        match self {
            Self::Query(l) => layer(l, (spec.hidden, attention)),
            Self::Key(l) | Self::Value(l) => layer(l, (spec.hidden, kv)),
            Self::AttentionOutput(l) => layer(l, (attention, spec.hidden)),
            Self::Gate(l) => layer(l, (spec.hidden, spec.intermediate)).filter(|_| spec.gated),
            Self::Up(l) => layer(l, (spec.hidden, spec.intermediate)),
            Self::Down(l) => layer(l, (spec.intermediate, spec.hidden)),
            Self::Patch => spec.patches.map(|patches| (patches.values(), spec.hidden)),
            Self::ClassDense => class.and_then(|c| c.dense).map(|_| (spec.hidden, spec.hidden)),
            Self::ClassOutput => class.map(|c| (spec.hidden, c.labels)),
            Self::LanguageHead => matches!(spec.head, HeadSpec::Language { .. })
                .then_some((spec.hidden, spec.vocabulary)),
        }
    }

    /// All matrices of a model, layer by layer.
    pub fn all(spec: &ModelSpec) -> impl Iterator<Item = Self> {
        let layers = (0..spec.layers).flat_map(|l| {
            use Matrix::*;
            [Query(l), Key(l), Value(l), AttentionOutput(l), Gate(l), Up(l), Down(l)]
        });
        layers
            .chain([Self::Patch, Self::ClassDense, Self::ClassOutput, Self::LanguageHead])
            .filter(|m| m.shape(spec).is_some())
    }
}

impl Vector {
    /// The same vector of another layer; a vector of no layer stays as it is.
    #[must_use]
    pub fn at(self, layer: impl Fn(u32) -> u32) -> Self {
        match self {
            Self::QueryBias(l) => Self::QueryBias(layer(l)),
            Self::KeyBias(l) => Self::KeyBias(layer(l)),
            Self::ValueBias(l) => Self::ValueBias(layer(l)),
            Self::AttentionOutputBias(l) => Self::AttentionOutputBias(layer(l)),
            Self::UpBias(l) => Self::UpBias(layer(l)),
            Self::GateBias(l) => Self::GateBias(layer(l)),
            Self::DownBias(l) => Self::DownBias(layer(l)),
            Self::QueryHeadNorm(l) => Self::QueryHeadNorm(layer(l)),
            Self::KeyHeadNorm(l) => Self::KeyHeadNorm(layer(l)),
            Self::AttentionNorm(l) => Self::AttentionNorm(layer(l)),
            Self::AttentionNormBias(l) => Self::AttentionNormBias(layer(l)),
            Self::MlpNorm(l) => Self::MlpNorm(layer(l)),
            Self::MlpNormBias(l) => Self::MlpNormBias(layer(l)),
            Self::AttentionSumNorm(l) => Self::AttentionSumNorm(layer(l)),
            Self::MlpSumNorm(l) => Self::MlpSumNorm(layer(l)),
            of_no_layer => of_no_layer,
        }
    }

    /// Whether this is the weight of a norm.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::QueryHeadNorm(_)
                | Self::KeyHeadNorm(_)
                | Self::AttentionNorm(_)
                | Self::MlpNorm(_)
                | Self::AttentionSumNorm(_)
                | Self::MlpSumNorm(_)
                | Self::EmbeddingNorm
                | Self::FinalNorm
                | Self::ClassNorm
        )
    }

    /// The number of values; `None` where a model of this spec has no such vector.
    pub fn width(self, spec: &ModelSpec) -> Option<u32> {
        let attention = spec.heads * spec.head_width;
        let kv = spec.kv_heads * spec.head_width;
        let class = match &spec.head {
            HeadSpec::Classes(head) => Some(head),
            _ => None,
        };
        let hidden = spec.hidden;
        let norm_bias = spec.norm == NormKind::Layer && spec.norm_bias;
        let last = spec.norm_place == NormPlace::Pre;
        let layer = |l: u32, there: bool, width| (l < spec.layers && there).then_some(width);
        let normed = |l: u32| l > 0 || spec.first_norm || !last;
        match self {
            Self::QueryBias(l) => layer(l, spec.qkv_bias, attention),
            Self::KeyBias(l) | Self::ValueBias(l) => layer(l, spec.qkv_bias, kv),
            Self::AttentionOutputBias(l) => layer(l, spec.attention_output_bias, hidden),
            Self::UpBias(l) => layer(l, spec.mlp_bias, spec.intermediate),
            Self::GateBias(l) => layer(l, spec.mlp_bias && spec.gated, spec.intermediate),
            Self::DownBias(l) => layer(l, spec.mlp_bias, hidden),
            Self::QueryHeadNorm(l) | Self::KeyHeadNorm(l) => {
                layer(l, spec.head_norm, spec.head_width)
            }
            Self::AttentionNorm(l) => layer(l, normed(l), hidden),
            Self::AttentionSumNorm(l) | Self::MlpSumNorm(l) => layer(l, spec.sum_norms, hidden),
            Self::MlpNorm(l) => layer(l, !spec.parallel, hidden),
            Self::AttentionNormBias(l) => layer(l, norm_bias && normed(l), hidden),
            Self::MlpNormBias(l) => layer(l, norm_bias && !spec.parallel, hidden),
            Self::PatchBias | Self::ClassRow => spec.patches.map(|_| hidden),
            Self::EmbeddingNorm => spec.embedding_norm.then_some(hidden),
            Self::EmbeddingNormBias => (spec.embedding_norm && norm_bias).then_some(hidden),
            Self::FinalNorm => last.then_some(hidden),
            Self::FinalNormBias => (last && norm_bias).then_some(hidden),
            Self::TokenTypes => (spec.token_types > 0).then_some(spec.token_types * hidden),
            Self::RelativeBias => spec.relative_bias.map(|d| d.buckets * spec.heads),
            Self::ClassDenseBias => {
                class.filter(|c| c.dense_bias).and_then(|c| c.dense).map(|_| hidden)
            }
            Self::ClassNorm => class.filter(|c| c.norm).map(|_| hidden),
            Self::ClassNormBias => class.filter(|c| c.norm && norm_bias).map(|_| hidden),
            Self::ClassOutputBias => class.filter(|c| c.bias).map(|c| c.labels),
            Self::LanguageBias => {
                let bias = matches!(spec.head, HeadSpec::Language { bias: true, .. });
                bias.then_some(spec.vocabulary)
            }
        }
    }

    /// All vectors of a model, layer by layer.
    pub fn all(spec: &ModelSpec) -> impl Iterator<Item = Self> {
        use Vector::*;
        let layers = (0..spec.layers).flat_map(|l| {
            [
                QueryBias(l),
                KeyBias(l),
                ValueBias(l),
                AttentionOutputBias(l),
                UpBias(l),
                GateBias(l),
                DownBias(l),
                QueryHeadNorm(l),
                KeyHeadNorm(l),
                AttentionNorm(l),
                AttentionNormBias(l),
                MlpNorm(l),
                MlpNormBias(l),
                AttentionSumNorm(l),
                MlpSumNorm(l),
            ]
        });
        layers
            .chain([
                PatchBias,
                ClassRow,
                EmbeddingNorm,
                EmbeddingNormBias,
                FinalNorm,
                FinalNormBias,
                TokenTypes,
                RelativeBias,
                ClassDenseBias,
                ClassNorm,
                ClassNormBias,
                ClassOutputBias,
                LanguageBias,
            ])
            .filter(|v| v.width(spec).is_some())
    }
}
