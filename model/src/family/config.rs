//! How the fields of each family's `config.json` become a [`ModelSpec`].

use super::Top;
use crate::{
    config::{Fields, short},
    error::ModelError,
    spec::*,
};
use std::f64::consts::TAU;

pub(super) const MAX_WIDTH: u32 = 1 << 20;
const MAX_INNER: u32 = 1 << 22;
const MAX_LAYERS: u32 = 4096;
const MAX_HEADS: u32 = 1 << 16;
const MAX_VOCABULARY: u32 = 1 << 24;
const MAX_POSITIONS: u32 = 1 << 24;
const MAX_LABELS: u32 = 1 << 16;
/// A token's type is a byte.
const MAX_TYPES: u32 = 1 << 8;
const MAX_PIXELS: u32 = 1 << 13;
const MAX_PATCH: u32 = 1 << 10;
const MAX_CHANNELS: u32 = 16;

pub(super) fn bert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("is_decoder", false, "BERT is run as an encoder")?;
    config.must_be("add_cross_attention", false, "only self-attention is run")?;
    absolute(config)?;
    let sizes =
        Sizes::read(config, &["hidden_size"], &["num_attention_heads"], &["num_hidden_layers"])?;
    Ok(ModelSpec {
        inner: config.count(&["intermediate_size"], MAX_INNER)?,
        norm_epsilon: epsilon(config, &["layer_norm_eps"], 1e-12)?,
        activation: activation(config, &["hidden_act"], Activation::Gelu)?,
        positions: learned(config, &["max_position_embeddings"], 512)?,
        token_types: config.count_or_none(&["type_vocab_size"], MAX_TYPES)?.unwrap_or(2),
        head: match top {
            Top::Classes => classes(config, ClassRow::First, Some(ClassActivation::Tanh), true)?,
            _ => HeadSpec::None,
        },
        ..encoder(sizes)
    })
}

/// As BERT, but positions begin behind that of padding, and the class head stands by itself.
pub(super) fn roberta(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let spec = bert(config, Top::Hidden)?;
    let padding = match config.get(&["pad_token_id"]) {
        None => 1,
        Some((name, value)) => {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.filter(|&id| id < spec.position_limit());
            id.ok_or_else(|| {
                config.wrong(name, format!("is {}, which has no position", short(value)))
            })?
        }
    };
    Ok(ModelSpec {
        positions: Positions::Learned { rows: spec.position_limit(), offset: padding + 1 },
        head: match top {
            Top::Classes => classes(config, ClassRow::First, Some(ClassActivation::Tanh), true)?,
            _ => HeadSpec::None,
        },
        ..spec
    })
}

/// As RoBERTa, but without token types, and with what distances add to scores.
pub(super) fn mpnet(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let field = "relative_attention_num_buckets";
    let buckets = config.count_or_none(&[field], 1 << 12)?.unwrap_or(32);
    if buckets < 4 || buckets % 4 != 0 {
        let problem = format!("is {buckets}: a multiple of 4 is wanted");
        return Err(config.wrong(field, problem));
    }
    // The reference has no field for it.
    let most = 128.max(buckets);
    Ok(ModelSpec {
        token_types: 0,
        distances: Some(Distances { buckets, most }),
        ..roberta(config, top)?
    })
}

fn absolute(config: &Fields<'_>) -> Result<(), ModelError> {
    match config.text(&["position_embedding_type"])?.filter(|&kind| kind != "absolute") {
        Some(kind) => Err(config.unknown("position_embedding_type", kind, "absolute")),
        None => Ok(()),
    }
}

pub(super) fn distilbert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let sizes = Sizes::read(
        config,
        &["dim", "hidden_size"],
        &["n_heads", "num_attention_heads"],
        &["n_layers", "num_hidden_layers"],
    )?;
    Ok(ModelSpec {
        inner: config.count(&["hidden_dim"], MAX_INNER)?,
        activation: activation(config, &["activation"], Activation::Gelu)?,
        positions: learned(config, &["max_position_embeddings"], 512)?,
        head: match top {
            Top::Classes => classes(config, ClassRow::First, Some(ClassActivation::Relu), true)?,
            _ => HeadSpec::None,
        },
        ..encoder(sizes)
    })
}

pub(super) fn gpt2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("scale_attn_weights", true, "only scaled attention is run")?;
    config.must_be("scale_attn_by_inverse_layer_idx", false, "only one scale is run")?;
    config.must_be("add_cross_attention", false, "only self-attention is run")?;
    let sizes = Sizes::read(
        config,
        &["n_embd", "hidden_size"],
        &["n_head", "num_attention_heads"],
        &["n_layer", "num_hidden_layers"],
    )?;
    let inner = config.count_or_none(&["n_inner"], MAX_INNER)?.unwrap_or(4 * sizes.hidden);
    Ok(ModelSpec {
        inner,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["layer_norm_epsilon"], 1e-5)?,
        activation: activation(config, &["activation_function"], Activation::GeluTanh)?,
        causal: true,
        positions: learned(config, &["n_positions", "max_position_embeddings"], 1024)?,
        embedding_norm: false,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => classes(config, ClassRow::Last, None, false)?,
            Top::Language => language(config, true, false)?,
        },
        ..encoder(sizes)
    })
}

/// As GPT-2, but both blocks of a layer beside each other, and rotary positions.
pub(super) fn gptj(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let spec = gpt2(config, Top::Hidden)?;
    let width = spec.head_width;
    let rotated = config.count_or_none(&["rotary_dim"], MAX_WIDTH)?.unwrap_or(width);
    if rotated > width || rotated % 2 == 1 {
        let problem = format!("is {rotated}: an even number up to the {width} columns of a head");
        return Err(config.wrong("rotary_dim", problem));
    }
    let inverse = |i: u32| 10_000f64.powf(-f64::from(2 * i) / f64::from(rotated)) as f32;
    Ok(ModelSpec {
        parallel: true,
        positions: Positions::Rotary {
            inverse_frequencies: (0..rotated / 2).map(inverse).collect(),
            pairs: Pairs::Neighbours,
            limit: spec.position_limit(),
        },
        qkv_bias: false,
        attention_output_bias: false,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => classes(config, ClassRow::Last, None, false)?,
            Top::Language => language(config, false, true)?,
        },
        ..spec
    })
}

pub(super) fn opt(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("layer_norm_elementwise_affine", true, "only norms with weights are run")?;
    config.must_be("_remove_final_layer_norm", false, "only OPT with a final norm is run")?;
    config.must_be("do_layer_norm_before", true, "only OPT with norms before blocks is run")?;
    let sizes =
        Sizes::read(config, &["hidden_size"], &["num_attention_heads"], &["num_hidden_layers"])?;
    let hidden = sizes.hidden;
    if let Some(width) = config.count_or_none(&["word_embed_proj_dim"], MAX_WIDTH)?
        && width != hidden
    {
        let problem = format!("is {width}: only that of the rows is run, {hidden}");
        return Err(config.wrong("word_embed_proj_dim", problem));
    }
    // The table has two rows before the first position.
    let limit = config.count_or_none(&["max_position_embeddings"], MAX_POSITIONS)?.unwrap_or(2048);
    let bias = config.flag("enable_bias", true)?;
    Ok(ModelSpec {
        inner: config.count(&["ffn_dim"], MAX_INNER)?,
        norm_place: NormPlace::Pre,
        norm_epsilon: 1e-5,
        activation: activation(config, &["activation_function"], Activation::Relu)?,
        causal: true,
        positions: Positions::Learned { rows: limit.saturating_add(2), offset: 2 },
        embedding_norm: false,
        qkv_bias: bias,
        attention_output_bias: bias,
        mlp_bias: bias,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => classes(config, ClassRow::Last, None, false)?,
            Top::Language => language(config, true, false)?,
        },
        ..encoder(sizes)
    })
}

pub(super) fn llama(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    let spec = gated(config, top, None)?;
    Ok(ModelSpec { qkv_bias: bias, attention_output_bias: bias, mlp_bias, ..spec })
}

/// Texts end where rows would no longer see their beginning.
pub(super) fn mistral(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let window = config.count_or_none(&["sliding_window"], MAX_POSITIONS)?;
    let mut spec = gated(config, top, None)?;
    if let (Positions::Rotary { limit, .. }, Some(window)) = (&mut spec.positions, window) {
        *limit = window.min(*limit);
    }
    Ok(spec)
}

pub(super) fn qwen2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("use_sliding_window", false, "only attention to the whole text is run")?;
    Ok(ModelSpec { qkv_bias: true, ..gated(config, top, None)? })
}

pub(super) fn qwen3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("use_sliding_window", false, "only attention to the whole text is run")?;
    let bias = config.flag("attention_bias", false)?;
    let spec = gated(config, top, Some(128))?;
    Ok(ModelSpec { head_norm: true, qkv_bias: bias, attention_output_bias: bias, ..spec })
}

/// What Llama has, without biases: a decoder with a gated MLP, norms by the root mean square and
/// rotary positions. Heads are `head_width` wide where the config does not say how wide; without
/// that, they share the hidden width.
fn gated(config: &Fields<'_>, top: Top, head_width: Option<u32>) -> Result<ModelSpec, ModelError> {
    let hidden = config.count(&["hidden_size"], MAX_WIDTH)?;
    let heads = config.count(&["num_attention_heads"], MAX_HEADS)?;
    let head_width = match config.count_or_none(&["head_dim"], MAX_WIDTH)?.or(head_width) {
        Some(width) => width,
        None => divide(config, "hidden_size", hidden, "num_attention_heads", heads)?,
    };
    if heads.saturating_mul(head_width) > MAX_WIDTH {
        let problem = format!("makes {heads} heads wider than {MAX_WIDTH} together");
        return Err(config.wrong("head_dim", problem));
    }
    let kv_heads = config.count_or_none(&["num_key_value_heads"], MAX_HEADS)?.unwrap_or(heads);
    divide(config, "num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
    let sizes = Sizes {
        hidden,
        heads,
        head_width,
        layers: config.count(&["num_hidden_layers"], MAX_LAYERS)?,
        vocabulary: config.count(&["vocab_size"], MAX_VOCABULARY)?,
    };
    Ok(ModelSpec {
        kv_heads,
        inner: config.count(&["intermediate_size"], MAX_INNER)?,
        norm: NormKind::Rms,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["rms_norm_eps"], 1e-6)?,
        activation: activation(config, &["hidden_act"], Activation::Silu)?,
        gated: true,
        causal: true,
        positions: rotary(config, head_width)?,
        embedding_norm: false,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => classes(config, ClassRow::Last, None, false)?,
            Top::Language => language(config, false, false)?,
        },
        ..encoder(sizes)
    })
}

pub(super) fn vit(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let [hidden, heads] = ["hidden_size", "num_attention_heads"];
    let (width, count) = (config.count(&[hidden], MAX_WIDTH)?, config.count(&[heads], MAX_HEADS)?);
    let sizes = Sizes {
        hidden: width,
        heads: count,
        head_width: divide(config, hidden, width, heads, count)?,
        layers: config.count(&["num_hidden_layers"], MAX_LAYERS)?,
        vocabulary: 0,
    };
    let size = config.count_or_none(&["patch_size"], MAX_PATCH)?.unwrap_or(16);
    let [height, width] = config.two("image_size", MAX_PIXELS)?.unwrap_or([224, 224]);
    for side in [height, width] {
        divide(config, "image_size", side, "patch_size", size)?;
    }
    let channels = config.count_or_none(&["num_channels"], MAX_CHANNELS)?.unwrap_or(3);
    let patches = Patches { channels, height, width, size };
    Ok(ModelSpec {
        inner: config.count(&["intermediate_size"], MAX_INNER)?,
        patches: Some(patches),
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["layer_norm_eps"], 1e-12)?,
        activation: activation(config, &["hidden_act"], Activation::Gelu)?,
        positions: Positions::Learned { rows: patches.rows(), offset: 0 },
        embedding_norm: false,
        qkv_bias: config.flag("qkv_bias", true)?,
        head: match top {
            Top::Classes => classes(config, ClassRow::First, None, true)?,
            _ => HeadSpec::None,
        },
        ..encoder(sizes)
    })
}

struct Sizes {
    hidden: u32,
    heads: u32,
    head_width: u32,
    layers: u32,
    vocabulary: u32,
}

impl Sizes {
    /// Heads that share the hidden width evenly.
    fn read(
        config: &Fields<'_>,
        hidden: &[&'static str],
        heads: &[&'static str],
        layers: &[&'static str],
    ) -> Result<Self, ModelError> {
        let width = config.count(hidden, MAX_WIDTH)?;
        let count = config.count(heads, MAX_HEADS)?;
        Ok(Self {
            hidden: width,
            heads: count,
            head_width: divide(config, hidden[0], width, heads[0], count)?,
            layers: config.count(layers, MAX_LAYERS)?,
            vocabulary: config.count(&["vocab_size"], MAX_VOCABULARY)?,
        })
    }
}

/// What BERT has, without a name; families say where they differ.
fn encoder(sizes: Sizes) -> ModelSpec {
    let Sizes { hidden, heads, head_width, layers, vocabulary } = sizes;
    ModelSpec {
        family: String::new(),
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_width,
        inner: hidden,
        vocabulary,
        patches: None,
        norm: NormKind::Layer,
        norm_place: NormPlace::Post,
        norm_epsilon: 1e-12,
        activation: Activation::Gelu,
        gated: false,
        parallel: false,
        causal: false,
        positions: Positions::Learned { rows: 0, offset: 0 },
        distances: None,
        token_types: 0,
        embedding_norm: true,
        head_norm: false,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        head: HeadSpec::None,
    }
}

fn divide(
    config: &Fields<'_>,
    field: &str,
    whole: u32,
    by: &str,
    parts: u32,
) -> Result<u32, ModelError> {
    if whole.is_multiple_of(parts) {
        return Ok(whole / parts);
    }
    Err(config.wrong(field, format!("is {whole}, which {by} = {parts} does not divide")))
}

fn epsilon(config: &Fields<'_>, names: &[&'static str], default: f64) -> Result<f32, ModelError> {
    let value = config.positive_or_none(names)?.unwrap_or(default);
    if value >= 1.0 || value as f32 <= 0.0 {
        return Err(config.wrong(names[0], format!("is {value}: a small number is wanted")));
    }
    Ok(value as f32)
}

fn activation(
    config: &Fields<'_>,
    names: &[&'static str],
    default: Activation,
) -> Result<Activation, ModelError> {
    match config.text(names)? {
        None => Ok(default),
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("relu") => Ok(Activation::Relu),
        Some(other) => {
            let known = "gelu, gelu_new, gelu_pytorch_tanh, silu, swish, relu";
            Err(config.unknown("activation", other, known))
        }
    }
}

fn learned(
    config: &Fields<'_>,
    names: &[&'static str],
    default: u32,
) -> Result<Positions, ModelError> {
    let rows = config.count_or_none(names, MAX_POSITIONS)?.unwrap_or(default);
    Ok(Positions::Learned { rows, offset: 0 })
}

/// Rotary frequencies, scaled as `transformers` does it.
fn rotary(config: &Fields<'_>, head_width: u32) -> Result<Positions, ModelError> {
    if head_width % 2 == 1 {
        let problem = format!("is {head_width}: rotary positions need an even width");
        return Err(config.wrong("head_dim", problem));
    }
    let limit = config.count_or_none(&["max_position_embeddings"], MAX_POSITIONS)?.unwrap_or(2048);
    // transformers 5 writes everything into rope_parameters; before, rope_theta stood beside
    // rope_scaling.
    let parameters = config.inner(&["rope_parameters"])?;
    let scaling = match parameters {
        Some(inner) => Some(inner),
        None => config.inner(&["rope_scaling"])?,
    };
    let of_parameters = match parameters {
        Some(inner) => inner.positive_or_none(&["rope_theta"])?,
        None => None,
    };
    let theta = match of_parameters {
        Some(theta) => theta,
        None => config.positive_or_none(&["rope_theta"])?.unwrap_or(10_000.0),
    };
    for fields in [Some(*config), scaling].into_iter().flatten() {
        let part = fields.positive_or_none(&["partial_rotary_factor"])?;
        if let Some(part) = part.filter(|&p| p != 1.0) {
            return Err(ModelError::Unsupported {
                path: config.path.to_owned(),
                field: "partial_rotary_factor",
                value: part.to_string(),
                remedy: "only whole heads are rotated in this family",
            });
        }
    }
    let pairs = head_width / 2;
    let plain = (0..pairs).map(|i| theta.powf(-f64::from(2 * i) / f64::from(head_width)));
    let kind = match scaling {
        Some(fields) => fields.text(&["rope_type", "type"])?.unwrap_or("default"),
        None => "default",
    };
    let frequencies: Vec<f64> = match (kind, scaling) {
        ("default", _) | (_, None) => plain.collect(),
        ("linear", Some(fields)) => {
            let factor = fields.positive(&["factor"])?;
            plain.map(|f| f / factor).collect()
        }
        ("llama3", Some(fields)) => {
            let factor = fields.positive(&["factor"])?;
            let low = fields.positive(&["low_freq_factor"])?;
            let high = fields.positive(&["high_freq_factor"])?;
            if low >= high {
                let problem = format!("is {low}: it must be below high_freq_factor = {high}");
                return Err(config.wrong("low_freq_factor", problem));
            }
            let original = &["original_max_position_embeddings"];
            let original = match fields.positive_or_none(original)? {
                Some(rows) => rows,
                None => config.positive_or_none(original)?.unwrap_or(f64::from(limit)),
            };
            let scale = |f: f64| {
                // Turns within the original context decide: many stay, few are slowed down.
                let turns = original * f / TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - keep) * f / factor + keep * f
            };
            plain.map(scale).collect()
        }
        (other, Some(_)) => {
            return Err(config.unknown("rope_type", other, "default, linear, llama3"));
        }
    };
    let inverse_frequencies: Vec<f32> = frequencies.into_iter().map(|f| f as f32).collect();
    if let Some(wrong) = inverse_frequencies.iter().find(|f| !f.is_finite()) {
        let problem = format!("is {theta}: with its scaling it gives the frequency {wrong}");
        return Err(config.wrong("rope_theta", problem));
    }
    Ok(Positions::Rotary { inverse_frequencies, pairs: Pairs::Halves, limit })
}

fn language(config: &Fields<'_>, tied: bool, bias: bool) -> Result<HeadSpec, ModelError> {
    Ok(HeadSpec::Language { tied: config.flag("tie_word_embeddings", tied)?, bias })
}

fn classes(
    config: &Fields<'_>,
    row: ClassRow,
    dense: Option<ClassActivation>,
    bias: bool,
) -> Result<HeadSpec, ModelError> {
    let names = match config.inner(&["id2label"])? {
        None => {
            // transformers leaves out what it would assume: two labels.
            let labels = config.count_or_none(&["num_labels"], MAX_LABELS)?.unwrap_or(2);
            (0..labels).map(|i| format!("LABEL_{i}")).collect()
        }
        Some(labels) => {
            let mut names = std::collections::BTreeMap::new();
            for (id, name) in labels.entries() {
                let Ok(index) = id.parse::<u32>() else {
                    return Err(config.wrong("id2label", format!("has the key {id:?}")));
                };
                let name = match name.as_str() {
                    Some(text) => text.to_owned(),
                    None => short(name),
                };
                names.insert(index, name);
            }
            let last = names.last_key_value().map(|(&index, _)| u64::from(index) + 1);
            if last != Some(names.len() as u64) || names.len() > MAX_LABELS as usize {
                let problem = format!("must number its labels 0 to n-1, at most {MAX_LABELS}");
                return Err(config.wrong("id2label", problem));
            }
            names.into_values().collect::<Vec<_>>()
        }
    };
    let labels = names.len() as u32;
    let problem = match config.text(&["problem_type"])? {
        None => None,
        Some("regression") => Some(Problem::Regression),
        Some("single_label_classification") => Some(Problem::SingleLabel),
        Some("multi_label_classification") => Some(Problem::MultiLabel),
        Some(other) => {
            let known = "regression, single_label_classification, multi_label_classification";
            return Err(config.unknown("problem_type", other, known));
        }
    };
    Ok(HeadSpec::Classes(ClassHead { row, dense, labels, bias, names, problem }))
}
