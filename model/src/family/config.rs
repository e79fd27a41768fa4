//! Reads the `config.json` of each family into a [`ModelSpec`].

use super::{
    Top,
    heads::{dense_and_norm, first_row, language, last_row},
    kinds,
    limits::{
        MAX_CHANNELS, MAX_HEADS, MAX_INTERMEDIATE, MAX_LAYERS, MAX_PATCH, MAX_PIXELS,
        MAX_POSITIONS, MAX_TYPES, MAX_VOCABULARY, MAX_WIDTH,
    },
    rope::{RotaryFields, neighbours, rotary},
};
use crate::{
    config::{Fields, short},
    error::ModelError,
    spec::*,
};

pub(super) fn bert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("add_cross_attention", false, "only self-attention is run")?;
    absolute(config)?;
    let sizes =
        Sizes::read(config, &["hidden_size"], &["num_attention_heads"], &["num_hidden_layers"])?;
    Ok(ModelSpec {
        intermediate: config.count(&["intermediate_size"], MAX_INTERMEDIATE)?,
        norm_epsilon: epsilon(config, &["layer_norm_eps"], 1e-12)?,
        activation: activation(config, &["hidden_act"], Activation::Gelu)?,
        causal: config.flag("is_decoder", false)? && causal(config)?,
        positions: learned(config, &["max_position_embeddings"], 512)?,
        token_types: config.count_or_none(&["type_vocab_size"], MAX_TYPES)?.unwrap_or(2),
        head: match top {
            Top::Classes => first_row(config, Some(ClassActivation::Tanh))?,
            _ => HeadSpec::None,
        },
        ..encoder(sizes)
    })
}

/// RoBERTa: like BERT, but positions begin behind that of padding, and the class head is a module of its own.
pub(super) fn roberta(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let rows = bert(config, Top::Hidden)?.position_limit();
    let padding = match config.get(&["pad_token_id"]) {
        None => 1,
        Some((name, value)) => {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.filter(|&id| id < rows);
            id.ok_or_else(|| {
                config.wrong(name, format!("is {}, which has no position", short(value)))
            })?
        }
    };
    behind_padding(config, top, padding)
}

/// What RoBERTa and MPNet have in common, given the token id of padding.
fn behind_padding(config: &Fields<'_>, top: Top, padding: u32) -> Result<ModelSpec, ModelError> {
    let spec = bert(config, Top::Hidden)?;
    Ok(ModelSpec {
        positions: Positions::Learned { rows: spec.position_limit(), offset: padding + 1 },
        unplaced: Some(padding),
        head: match top {
            Top::Classes => first_row(config, Some(ClassActivation::Tanh))?,
            _ => HeadSpec::None,
        },
        ..spec
    })
}

/// MPNet: like RoBERTa, but without token types, and with a relative position bias.
pub(super) fn mpnet(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("is_decoder", false, "MPNet is an encoder")?;
    let field = "relative_attention_num_buckets";
    let buckets = config.count_or_none(&[field], 1 << 12)?.unwrap_or(32);
    if buckets < 4 || buckets % 4 != 0 {
        let problem = format!("is {buckets}: a multiple of 4 is wanted");
        return Err(config.wrong(field, problem));
    }
    // The reference has no config field for it.
    let most = 128.max(buckets);
    Ok(ModelSpec {
        token_types: 0,
        relative_bias: Some(RelativeBias { buckets, most }),
        // The padding id is fixed, whatever the config says, as in the reference.
        ..behind_padding(config, top, 1)?
    })
}

fn absolute(config: &Fields<'_>) -> Result<(), ModelError> {
    match config.text(&["position_embedding_type"])?.filter(|&kind| kind != "absolute") {
        Some(kind) => Err(config.unknown("position_embedding_type", kind, "absolute")),
        None => Ok(()),
    }
}

/// DistilBERT. Where a field and its synonym are both there, the name that all families share counts, as in the
/// reference.
pub(super) fn distilbert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let sizes = Sizes::read(
        config,
        &["hidden_size", "dim"],
        &["num_attention_heads", "n_heads"],
        &["num_hidden_layers", "n_layers"],
    )?;
    Ok(ModelSpec {
        intermediate: config.count(&["hidden_dim"], MAX_INTERMEDIATE)?,
        activation: activation(config, &["activation"], Activation::Gelu)?,
        positions: learned(config, &["max_position_embeddings"], 512)?,
        head: match top {
            Top::Classes => first_row(config, Some(ClassActivation::Relu))?,
            _ => HeadSpec::None,
        },
        ..encoder(sizes)
    })
}

pub(super) fn gpt2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let by_width = config.flag("scale_attn_weights", true)?;
    let by_layer = config.flag("scale_attn_by_inverse_layer_idx", false)?;
    let head = match top {
        Top::Hidden => HeadSpec::None,
        Top::Classes => last_row(config, None)?,
        Top::Language => language(config, true, false)?,
    };
    let spec = gpt(config, 1024)?;
    let over_root = by_width.then_some(spec.head_width as f32);
    Ok(ModelSpec { scores: ScoreScale { over_root, by_layer }, head, ..spec })
}

/// What GPT-2 and GPT-J have in common. `rows` is the number of positions where the config names none.
fn gpt(config: &Fields<'_>, rows: u32) -> Result<ModelSpec, ModelError> {
    config.must_be("add_cross_attention", false, "only self-attention is run")?;
    let sizes = Sizes::read(
        config,
        &["hidden_size", "n_embd"],
        &["num_attention_heads", "n_head"],
        &["num_hidden_layers", "n_layer"],
    )?;
    let intermediate =
        config.count_or_none(&["n_inner"], MAX_INTERMEDIATE)?.unwrap_or(4 * sizes.hidden);
    Ok(ModelSpec {
        intermediate,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["layer_norm_epsilon"], 1e-5)?,
        activation: activation(config, &["activation_function"], Activation::GeluTanh)?,
        causal: causal(config)?,
        positions: learned(config, &["max_position_embeddings", "n_positions"], rows)?,
        embedding_norm: false,
        ..encoder(sizes)
    })
}

/// GPT-J: like GPT-2, but with a parallel residual and rotary positions.
pub(super) fn gptj(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let spec = gpt(config, 2048)?;
    let limit = spec.position_limit();
    Ok(ModelSpec {
        parallel: true,
        positions: neighbours(config, spec.head_width, spec.hidden, limit)?,
        qkv_bias: false,
        attention_output_bias: false,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => last_row(config, None)?,
            Top::Language => language(config, false, true)?,
        },
        ..spec
    })
}

pub(super) fn opt(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    config.must_be("layer_norm_elementwise_affine", true, "only norms with weights are run")?;
    let norm_place = match config.flag("do_layer_norm_before", true)? {
        true => {
            let remedy = "with norms before blocks, only OPT with a final norm is run";
            config.must_be("_remove_final_layer_norm", false, remedy)?;
            NormPlace::Pre
        }
        false => NormPlace::Post,
    };
    let sizes =
        Sizes::read(config, &["hidden_size"], &["num_attention_heads"], &["num_hidden_layers"])?;
    let hidden = sizes.hidden;
    if let Some(width) = config.count_or_none(&["word_embed_proj_dim"], MAX_WIDTH)?
        && width != hidden
    {
        let problem = format!("is {width}: only that of the rows is run, {hidden}");
        return Err(config.wrong("word_embed_proj_dim", problem));
    }
    // The position table has two rows before the first position.
    let limit = config.count_or_none(&["max_position_embeddings"], MAX_POSITIONS)?.unwrap_or(2048);
    let bias = config.flag("enable_bias", true)?;
    Ok(ModelSpec {
        intermediate: config.count(&["ffn_dim"], MAX_INTERMEDIATE)?,
        norm_place,
        norm_epsilon: 1e-5,
        activation: activation(config, &["activation_function"], Activation::Relu)?,
        causal: causal(config)?,
        positions: Positions::Learned { rows: limit.saturating_add(2), offset: 2 },
        embedding_norm: false,
        qkv_bias: bias,
        attention_output_bias: bias,
        mlp_bias: bias,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => last_row(config, Some(1))?,
            Top::Language => language(config, true, false)?,
        },
        ..encoder(sizes)
    })
}

pub(super) fn llama(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    let spec = gated(config, top, Defaults::default())?;
    Ok(ModelSpec { qkv_bias: bias, attention_output_bias: bias, mlp_bias, ..spec })
}

pub(super) fn mistral(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let turns = RotaryFields::new(131_072);
    let defaults = Defaults { kv_heads: Some(8), turns, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    let window = window(config, Some(4096))?;
    Ok(ModelSpec { kinds: kinds::windowed(&spec, window), ..spec })
}

pub(super) fn qwen2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let turns = RotaryFields::new(32_768);
    let defaults = Defaults { kv_heads: Some(32), turns, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    Ok(ModelSpec { qkv_bias: true, kinds: some_windows(config, &spec)?, ..spec })
}

pub(super) fn qwen3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let bias = config.flag("attention_bias", false)?;
    let (head_width, turns) = (Some(128), RotaryFields::new(32_768));
    let defaults = Defaults { head_width, kv_heads: Some(32), turns, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    Ok(ModelSpec {
        head_norm: true,
        qkv_bias: bias,
        attention_output_bias: bias,
        kinds: some_windows(config, &spec)?,
        ..spec
    })
}

/// SmolLM3: like Llama, but some layers have no positions at all.
pub(super) fn smollm3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    let turns = RotaryFields { theta: ("rope_theta", 2_000_000.0), ..RotaryFields::new(32_768) };
    let defaults = Defaults { kv_heads: Some(4), turns, tied: true, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    let window = match config.flag("use_sliding_window", false)? {
        true => window(config, None)?,
        false => None,
    };
    let turned = kinds::rotated_layers(config, spec.layers)?;
    let slides = |layer: u32| window.is_some() && !turned[layer as usize];
    let sliding = kinds::sliding(config, spec.layers, slides)?;
    let kinds = kinds::list(&spec, &sliding, window, |layer| match turned[layer as usize] {
        true => Rotation::Usual,
        false => Rotation::None,
    });
    Ok(ModelSpec { qkv_bias: bias, attention_output_bias: bias, mlp_bias, kinds, ..spec })
}

/// Phi-3: like Llama, but queries, keys and values are one tensor, and so are gate and up.
pub(super) fn phi3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let turns = RotaryFields { partly: true, ..RotaryFields::new(4096) };
    let defaults = Defaults { turns, epsilon: 1e-5, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    let window = window(config, None)?;
    Ok(ModelSpec { kinds: kinds::windowed(&spec, window), ..spec })
}

pub(super) fn gemma2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let spec = gemma(config, top, RotaryFields::new(8192))?;
    let sliding = kinds::sliding(config, spec.layers, |layer| layer % 2 == 0)?;
    let window = window(config, Some(4096))?;
    let kinds = kinds::list(&spec, &sliding, window, |_| Rotation::Usual);
    let score_cap = cap(config, "attn_logit_softcapping", Some(50.0))?;
    let logit_cap = cap(config, "final_logit_softcapping", Some(30.0))?;
    Ok(ModelSpec { kinds, score_cap, logit_cap, ..spec })
}

/// Gemma 3: like Gemma 2, but heads are normed instead of scores being capped, and layers with windows have rotary
/// positions of their own.
pub(super) fn gemma3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let [whole, local] = ["full_attention", "sliding_attention"];
    let turns = RotaryFields { layers: Some(whole), ..RotaryFields::new(131_072) };
    let spec = gemma(config, top, RotaryFields { theta: ("rope_theta", 1_000_000.0), ..turns })?;
    let pattern = config.count_or_none(&["sliding_window_pattern"], MAX_LAYERS)?.unwrap_or(6);
    let sliding = kinds::sliding(config, spec.layers, |layer| (layer + 1) % pattern != 0)?;
    let window = window(config, Some(4096))?;
    // Without a causal mask the field counts the rows of both sides together.
    let window = window.map(|all| if spec.causal { all } else { all / 2 });
    let theta = ("rope_local_base_freq", 10_000.0);
    let turns = RotaryFields { layers: Some(local), theta, ..turns };
    let local = rotary(config, spec.head_width, turns)?;
    Ok(ModelSpec {
        head_norm: true,
        kinds: kinds::local(&spec, &sliding, window),
        local_positions: Some(local),
        logit_cap: cap(config, "final_logit_softcapping", None)?,
        ..spec
    })
}

/// What all Gemmas have in common: norms before and after blocks, whose weights are stored minus one, and scaled
/// embeddings.
fn gemma(config: &Fields<'_>, top: Top, turns: RotaryFields) -> Result<ModelSpec, ModelError> {
    let bias = config.flag("attention_bias", false)?;
    let causal = !config.flag("use_bidirectional_attention", false)? && causal(config)?;
    let defaults = Defaults {
        head_width: Some(256),
        kv_heads: Some(4),
        turns,
        tied: true,
        activation: (&["hidden_activation"], Activation::GeluTanh),
        ..Defaults::default()
    };
    let spec = gated(config, top, defaults)?;
    let over_root = config.positive_or_none(&["query_pre_attn_scalar"])?.unwrap_or(256.0);
    Ok(ModelSpec {
        causal,
        norms_from_one: true,
        sum_norms: true,
        scores: ScoreScale { over_root: Some(over_root as f32), by_layer: false },
        embedding_scale: f64::from(spec.hidden).sqrt() as f32,
        qkv_bias: bias,
        attention_output_bias: bias,
        ..spec
    })
}

/// The soft cap of scores or logits, if they are capped.
fn cap(
    config: &Fields<'_>,
    name: &'static str,
    default: Option<f32>,
) -> Result<Option<f32>, ModelError> {
    match config.names(name) {
        true => Ok(config.positive_or_none(&[name])?.map(|cap| cap as f32)),
        false => Ok(default),
    }
}

/// ModernBERT: an encoder with a gated MLP, norms before blocks, and a sliding window in most layers.
pub(super) fn modernbert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let sizes =
        Sizes::read(config, &["hidden_size"], &["num_attention_heads"], &["num_hidden_layers"])?;
    let head_width = sizes.head_width;
    let bias = config.flag("attention_bias", false)?;
    let every = config.count_or_none(&["global_attn_every_n_layers"], MAX_LAYERS)?.unwrap_or(3);
    let sliding = kinds::sliding(config, sizes.layers, |layer| layer % every != 0)?;
    let window = config.count_or_none(&["local_attention"], MAX_POSITIONS)?.unwrap_or(128) / 2;
    let [whole, local] = ["full_attention", "sliding_attention"];
    let turns = RotaryFields { scaled_alike: true, ..RotaryFields::new(8192) };
    let theta = ("global_rope_theta", 160_000.0);
    let positions =
        rotary(config, head_width, RotaryFields { layers: Some(whole), theta, ..turns })?;
    let theta = ("local_rope_theta", 10_000.0);
    let local = rotary(config, head_width, RotaryFields { layers: Some(local), theta, ..turns })?;
    let spec = ModelSpec {
        intermediate: config.count(&["intermediate_size"], MAX_INTERMEDIATE)?,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["norm_eps"], 1e-5)?,
        norm_bias: config.flag("norm_bias", false)?,
        first_norm: false,
        activation: activation(config, &["hidden_activation"], Activation::Gelu)?,
        gated: true,
        positions,
        local_positions: Some(local),
        qkv_bias: bias,
        attention_output_bias: bias,
        mlp_bias: config.flag("mlp_bias", false)?,
        head: match top {
            Top::Classes => dense_and_norm(config)?,
            _ => HeadSpec::None,
        },
        ..encoder(sizes)
    };
    Ok(ModelSpec { kinds: kinds::local(&spec, &sliding, Some(window)), ..spec })
}

/// The sliding window that a config gives, in rows.
fn window(config: &Fields<'_>, default: Option<u32>) -> Result<Option<u32>, ModelError> {
    match config.names("sliding_window") {
        true => config.count_or_none(&["sliding_window"], MAX_POSITIONS),
        false => Ok(default),
    }
}

/// The kinds of layers of Qwen models: those with a window are named by `layer_types`, or are the last ones.
fn some_windows(config: &Fields<'_>, spec: &ModelSpec) -> Result<Vec<LayerKind>, ModelError> {
    let window = match config.flag("use_sliding_window", false)? {
        true => window(config, Some(4096))?,
        false => None,
    };
    let whole = config.number_or_none(&["max_window_layers"])?.unwrap_or(28.0);
    let last = |layer: u32| window.is_some() && f64::from(layer) >= whole;
    let sliding = kinds::sliding(config, spec.layers, last)?;
    if window.is_none() && sliding.contains(&true) {
        let problem = "has sliding_attention, and use_sliding_window gives it no window";
        return Err(config.wrong("layer_types", problem));
    }
    Ok(kinds::list(spec, &sliding, window, |_| Rotation::Usual))
}

/// The values that a family assumes where its config is silent.
struct Defaults {
    head_width: Option<u32>,
    /// Key-value heads where the field is absent; where it is null there are as many as query heads.
    kv_heads: Option<u32>,
    /// The rotary positions of all layers, or, where kinds of layers differ, of those with full attention.
    turns: RotaryFields,
    epsilon: f64,
    /// Whether the language head shares the embedding table.
    tied: bool,
    /// The names of the field of the activation, and the activation where it is absent.
    activation: (&'static [&'static str], Activation),
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            head_width: None,
            kv_heads: None,
            turns: RotaryFields::new(2048),
            epsilon: 1e-6,
            tied: false,
            activation: (&["hidden_act"], Activation::Silu),
        }
    }
}

/// What Llama and families like it have, without biases: a decoder with a gated MLP, RMS norms and rotary positions.
/// Where nothing gives the width of heads, they share the hidden width evenly.
fn gated(config: &Fields<'_>, top: Top, defaults: Defaults) -> Result<ModelSpec, ModelError> {
    let hidden = config.count(&["hidden_size"], MAX_WIDTH)?;
    let heads = config.count(&["num_attention_heads"], MAX_HEADS)?;
    let head_width = match config.count_or_none(&["head_dim"], MAX_WIDTH)?.or(defaults.head_width) {
        Some(width) => width,
        None => divide(config, "hidden_size", hidden, "num_attention_heads", heads)?,
    };
    if heads.saturating_mul(head_width) > MAX_WIDTH {
        let problem = format!("makes {heads} heads wider than {MAX_WIDTH} together");
        return Err(config.wrong("head_dim", problem));
    }
    let field = "num_key_value_heads";
    let kv_heads = match config.count_or_none(&[field], MAX_HEADS)? {
        Some(count) => count,
        None => defaults.kv_heads.filter(|_| !config.names(field)).unwrap_or(heads),
    };
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
        intermediate: config.count(&["intermediate_size"], MAX_INTERMEDIATE)?,
        norm: NormKind::Rms,
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["rms_norm_eps"], defaults.epsilon)?,
        activation: activation(config, defaults.activation.0, defaults.activation.1)?,
        gated: true,
        causal: causal(config)?,
        positions: rotary(config, head_width, defaults.turns)?,
        embedding_norm: false,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        head: match top {
            Top::Hidden => HeadSpec::None,
            Top::Classes => last_row(config, None)?,
            Top::Language => language(config, defaults.tied, false)?,
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
    let size = match config.two("patch_size", MAX_PATCH)?.unwrap_or([16, 16]) {
        [height, width] if height == width => height,
        sides => {
            return Err(config.wrong("patch_size", format!("is {sides:?}: only squares are run")));
        }
    };
    let [height, width] = config.two("image_size", MAX_PIXELS)?.unwrap_or([224, 224]);
    for side in [height, width] {
        divide(config, "image_size", side, "patch_size", size)?;
    }
    let channels = config.count_or_none(&["num_channels"], MAX_CHANNELS)?.unwrap_or(3);
    let patches = Patches { channels, height, width, size };
    Ok(ModelSpec {
        intermediate: config.count(&["intermediate_size"], MAX_INTERMEDIATE)?,
        patches: Some(patches),
        norm_place: NormPlace::Pre,
        norm_epsilon: epsilon(config, &["layer_norm_eps"], 1e-12)?,
        activation: activation(config, &["hidden_act"], Activation::Gelu)?,
        positions: Positions::Learned { rows: patches.rows(), offset: 0 },
        embedding_norm: false,
        qkv_bias: config.flag("qkv_bias", true)?,
        head: match top {
            Top::Classes => first_row(config, None)?,
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
    /// Reads the sizes of a model whose heads share the hidden width evenly.
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

/// A description with BERT's settings and no family name, which families change where they differ.
fn encoder(sizes: Sizes) -> ModelSpec {
    let Sizes { hidden, heads, head_width, layers, vocabulary } = sizes;
    ModelSpec {
        family: String::new(),
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_width,
        intermediate: hidden,
        vocabulary,
        patches: None,
        norm: NormKind::Layer,
        norm_place: NormPlace::Post,
        norm_epsilon: 1e-12,
        norm_bias: true,
        norms_from_one: false,
        first_norm: true,
        sum_norms: false,
        activation: Activation::Gelu,
        gated: false,
        parallel: false,
        causal: false,
        kinds: Vec::new(),
        local_positions: None,
        scores: ScoreScale { over_root: Some(head_width as f32), by_layer: false },
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        unplaced: None,
        positions: Positions::Learned { rows: 0, offset: 0 },
        relative_bias: None,
        token_types: 0,
        embedding_norm: true,
        head_norm: false,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        head: HeadSpec::None,
        headless: None,
    }
}

/// Whether a decoder's rows see earlier rows only. The reference takes null for false.
fn causal(config: &Fields<'_>) -> Result<bool, ModelError> {
    config.flag("is_causal", !config.names("is_causal"))
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
    if value as f32 <= 0.0 || !(value as f32).is_finite() {
        return Err(config.wrong(names[0], format!("is {value}: a small number is wanted")));
    }
    Ok(value as f32)
}

fn activation(
    config: &Fields<'_>,
    names: &[&'static str],
    default: Activation,
) -> Result<Activation, ModelError> {
    Ok(match config.text(names)? {
        None => default,
        Some("gelu" | "gelu_python") => Activation::Gelu,
        Some(
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_fast" | "gelu_accurate",
        ) => Activation::GeluTanh,
        Some("quick_gelu") => Activation::QuickGelu,
        Some("gelu_10") => Activation::ClippedGelu,
        Some("silu" | "swish") => Activation::Silu,
        Some("relu") => Activation::Relu,
        Some("relu2") => Activation::SquaredRelu,
        Some("relu6") => Activation::Relu6,
        Some("leaky_relu") => Activation::LeakyRelu,
        Some("hardswish") => Activation::HardSwish,
        Some("mish") => Activation::Mish,
        Some("laplace") => Activation::Laplace,
        Some("tanh") => Activation::Tanh,
        Some("sigmoid") => Activation::Sigmoid,
        Some("linear") => Activation::Linear,
        Some(other) => {
            let name = config.get(names).map_or("activation", |(name, _)| name);
            return Err(config.unknown(name, other, ACTIVATIONS));
        }
    })
}

const ACTIVATIONS: &str = "gelu, gelu_10, gelu_accurate, gelu_fast, gelu_new, gelu_python, \
    gelu_python_tanh, gelu_pytorch_tanh, hardswish, laplace, leaky_relu, linear, mish, quick_gelu, \
    relu, relu2, relu6, sigmoid, silu, swish, tanh";

fn learned(
    config: &Fields<'_>,
    names: &[&'static str],
    default: u32,
) -> Result<Positions, ModelError> {
    let rows = config.count_or_none(names, MAX_POSITIONS)?.unwrap_or(default);
    Ok(Positions::Learned { rows, offset: 0 })
}
