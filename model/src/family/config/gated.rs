//! The configs of decoders with gated MLPs: Llama and families like it.

use super::{Sizes, activation, causal, divide, encoder, epsilon};
use crate::{
    config::Fields,
    error::ModelError,
    family::{
        Top,
        heads::{language, last_row},
        kinds,
        limits::{
            MAX_HEADS, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH,
        },
        rope::{RotaryFields, rotary},
    },
    spec::*,
};

pub(in crate::family) fn llama(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    let spec = gated(config, top, Defaults::default())?;
    Ok(ModelSpec { qkv_bias: bias, attention_output_bias: bias, mlp_bias, ..spec })
}

pub(in crate::family) fn mistral(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let turns = RotaryFields::new(131_072);
    let defaults = Defaults { kv_heads: Some(8), turns, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    let window = window(config, Some(4096))?;
    Ok(ModelSpec { kinds: kinds::windowed(&spec, window), ..spec })
}

pub(in crate::family) fn qwen2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let turns = RotaryFields::new(32_768);
    let defaults = Defaults { kv_heads: Some(32), turns, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    Ok(ModelSpec { qkv_bias: true, kinds: some_windows(config, &spec)?, ..spec })
}

pub(in crate::family) fn qwen3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn smollm3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn phi3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
    let turns = RotaryFields { partly: true, ..RotaryFields::new(4096) };
    let defaults = Defaults { turns, epsilon: 1e-5, ..Defaults::default() };
    let spec = gated(config, top, defaults)?;
    let window = window(config, None)?;
    Ok(ModelSpec { kinds: kinds::windowed(&spec, window), ..spec })
}

pub(in crate::family) fn gemma2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn gemma3(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
