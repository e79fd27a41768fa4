//! The tensors of a GGUF file that is written: their names, and which matrices and vectors each holds.

use super::{super::dense::LAYERS, architecture::Architecture, unwritten};
use crate::{
    Matrix, ModelDir, ModelSpec, Positions, Table, Vector, error::ModelError, spec::NormPlace,
};
use galaxy_common::WeightFormat;

/// Where values of a tensor come from.
#[derive(Clone)]
pub(super) enum Source {
    /// The rows of a matrix. The number is the heads whose rows the file stores in pairs, if it does.
    Matrix(Matrix, Option<u32>),
    /// The token embedding table, rounded like a language head.
    TokenEmbedding,
    /// The table of learned positions, as it is.
    Positions,
    /// A vector. The number is the heads whose values the file stores in pairs, if it does.
    Vector(Vector, Option<u32>),
    /// Values that no matrix or vector of the model has: divisors of rotary frequencies, or a layer behind the pooling.
    Values(Vec<f32>),
}

/// A tensor to be written.
pub(super) struct Planned {
    pub(super) name: String,
    /// What it holds, one below another.
    pub(super) sources: Vec<Source>,
    /// The shape, the fastest dimension first, as files have it.
    pub(super) shape: Vec<u64>,
    pub(super) format: WeightFormat,
}

impl Planned {
    fn new(name: String, source: Source, shape: Vec<u64>, format: WeightFormat) -> Self {
        Self { name, sources: vec![source], shape, format }
    }

    pub(super) fn bytes(&self) -> u64 {
        let row = self.shape.first().copied().unwrap_or(1);
        self.format.bytes(row, self.shape.iter().skip(1).product())
    }
}

/// All tensors of the file, in their order.
pub(super) fn planned(
    model: &ModelDir,
    architecture: &Architecture,
) -> Result<Vec<Planned>, ModelError> {
    let spec = model.spec();
    let in_pairs = architecture.layout.in_pairs;
    let mut planned = vec![token_embedding(model)?];
    for (name, divisors) in architecture.divisors(model)? {
        let shape = vec![divisors.len() as u64];
        let source = Source::Values(divisors);
        planned.push(Planned::new(name.to_owned(), source, shape, WeightFormat::F32));
    }
    if let Positions::Learned { rows, .. } = spec.positions {
        let shape = vec![spec.hidden.into(), rows.into()];
        let name = "position_embd.weight".to_owned();
        planned.push(Planned::new(name, Source::Positions, shape, WeightFormat::F32));
    }
    let vector = |which: Vector| {
        let (name, paired) = named_vector(which, spec.norm_place)?;
        let heads = paired.filter(|_| in_pairs).map(|of| of(spec));
        let shape = match which {
            Vector::TokenTypes => vec![spec.hidden.into(), spec.token_types.into()],
            _ => vec![u64::from(which.width(spec)?)],
        };
        Some(Planned::new(name, Source::Vector(which, heads), shape, WeightFormat::F32))
    };
    planned.extend(Vector::all(spec).filter_map(vector));
    let sentence = model.sentence()?;
    for ((name, _), matrix) in LAYERS.into_iter().zip(architecture.dense(&sentence, model)) {
        let shape = vec![matrix.inputs.into(), matrix.outputs.into()];
        let source = Source::Values(matrix.weight.to_vec());
        planned.push(Planned::new(name.to_owned(), source, shape, WeightFormat::F32));
    }
    let tied = model.tied();
    for which in Matrix::all(spec).filter(|of| !(tied && *of == Matrix::LanguageHead)) {
        planned.extend(matrices(model, which, architecture)?);
    }
    Ok(planned)
}

fn token_embedding(model: &ModelDir) -> Result<Planned, ModelError> {
    let spec = model.spec();
    let (source, format) = match model.tied() {
        true => {
            let head = Matrix::LanguageHead;
            (Source::Matrix(head, None), model.formats().of(head))
        }
        false => {
            let own = model.table(Table::Word)?.2.format;
            let to =
                model.quantisation().and_then(|to| to.format(Matrix::LanguageHead, spec.hidden));
            (Source::TokenEmbedding, to.unwrap_or(own))
        }
    };
    let shape = vec![spec.hidden.into(), spec.vocabulary.into()];
    Ok(Planned::new("token_embd.weight".to_owned(), source, shape, format))
}

/// The tensor that begins with a matrix; `None` where the matrix follows another one in a tensor, or has no name.
fn matrices(
    model: &ModelDir,
    which: Matrix,
    architecture: &Architecture,
) -> Result<Option<Planned>, ModelError> {
    let (spec, layout) = (model.spec(), &architecture.layout);
    let in_layer = |layer: u32, name: &str| format!("blk.{layer}.{name}.weight");
    let (name, all) = match which {
        Matrix::Query(l) if layout.fused => {
            (in_layer(l, "attn_qkv"), vec![which, Matrix::Key(l), Matrix::Value(l)])
        }
        Matrix::Gate(l) if layout.fused => (in_layer(l, "ffn_up"), vec![which, Matrix::Up(l)]),
        Matrix::Key(_) | Matrix::Value(_) | Matrix::Up(_) if layout.fused => return Ok(None),
        Matrix::Query(l) => (in_layer(l, "attn_q"), vec![which]),
        Matrix::Key(l) => (in_layer(l, "attn_k"), vec![which]),
        Matrix::Value(l) => (in_layer(l, "attn_v"), vec![which]),
        Matrix::AttentionOutput(l) => (in_layer(l, "attn_output"), vec![which]),
        Matrix::Gate(l) => (in_layer(l, "ffn_gate"), vec![which]),
        Matrix::Up(l) => (in_layer(l, "ffn_up"), vec![which]),
        Matrix::Down(l) => (in_layer(l, "ffn_down"), vec![which]),
        Matrix::LanguageHead => ("output.weight".to_owned(), vec![which]),
        Matrix::Patch | Matrix::ClassDense | Matrix::ClassOutput => return Ok(None),
    };
    let format = model.formats().of(which);
    if all.iter().any(|one| model.formats().of(*one) != format) {
        let why = format!("parts of its {name} are in different formats");
        return Err(unwritten(model, why));
    }
    let shapes = all.iter().filter_map(|one| one.shape(spec));
    let (inputs, outputs) =
        shapes.fold((0, 0), |(_, outputs), (inputs, more)| (inputs, outputs + u64::from(more)));
    let heads = |one: Matrix| match one {
        Matrix::Query(_) => Some(spec.heads),
        Matrix::Key(_) => Some(spec.kv_heads),
        _ => None,
    };
    let source = |one| Source::Matrix(one, heads(one).filter(|_| layout.in_pairs));
    let sources = all.into_iter().map(source).collect();
    Ok(Some(Planned { name, sources, shape: vec![inputs.into(), outputs], format }))
}

/// A function of a model's description that counts the heads whose values may be stored in pairs.
type Heads = fn(&ModelSpec) -> u32;

/// The name of a vector in GGUF files, if it has one, and how its heads are counted, if their values may be in pairs.
fn named_vector(which: Vector, place: NormPlace) -> Option<(String, Option<Heads>)> {
    // Norms behind blocks have other names than those before them.
    let (attention, mlp) = match place {
        NormPlace::Pre => ("attn_norm", "ffn_norm"),
        NormPlace::Post => ("attn_output_norm", "layer_output_norm"),
    };
    let in_layer = |layer: u32, name: &str| format!("blk.{layer}.{name}");
    let heads: (Heads, Heads) = (|spec| spec.heads, |spec| spec.kv_heads);
    Some(match which {
        Vector::QueryBias(l) => (in_layer(l, "attn_q.bias"), Some(heads.0)),
        Vector::KeyBias(l) => (in_layer(l, "attn_k.bias"), Some(heads.1)),
        Vector::ValueBias(l) => (in_layer(l, "attn_v.bias"), None),
        Vector::AttentionOutputBias(l) => (in_layer(l, "attn_output.bias"), None),
        Vector::UpBias(l) => (in_layer(l, "ffn_up.bias"), None),
        Vector::GateBias(l) => (in_layer(l, "ffn_gate.bias"), None),
        Vector::DownBias(l) => (in_layer(l, "ffn_down.bias"), None),
        Vector::QueryHeadNorm(l) => (in_layer(l, "attn_q_norm.weight"), None),
        Vector::KeyHeadNorm(l) => (in_layer(l, "attn_k_norm.weight"), None),
        Vector::AttentionNorm(l) => (in_layer(l, &format!("{attention}.weight")), None),
        Vector::AttentionNormBias(l) => (in_layer(l, &format!("{attention}.bias")), None),
        Vector::AttentionSumNorm(l) => (in_layer(l, "post_attention_norm.weight"), None),
        Vector::MlpNorm(l) => (in_layer(l, &format!("{mlp}.weight")), None),
        Vector::MlpNormBias(l) => (in_layer(l, &format!("{mlp}.bias")), None),
        Vector::MlpSumNorm(l) => (in_layer(l, "post_ffw_norm.weight"), None),
        Vector::EmbeddingNorm => ("token_embd_norm.weight".to_owned(), None),
        Vector::EmbeddingNormBias => ("token_embd_norm.bias".to_owned(), None),
        Vector::TokenTypes => ("token_types.weight".to_owned(), None),
        Vector::FinalNorm => ("output_norm.weight".to_owned(), None),
        _ => return None,
    })
}
