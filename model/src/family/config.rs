//! Reads the `config.json` of each family into a [`ModelSpec`].

mod encoders;
mod gated;
mod gpt;

use super::limits::{MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH};
use crate::{config::Fields, error::ModelError, spec::*};

pub(super) use encoders::{bert, distilbert, modernbert, mpnet, roberta, vit};
pub(super) use gated::{gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3, smollm3};
pub(super) use gpt::{gpt2, gptj, opt};

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
