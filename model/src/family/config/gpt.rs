//! The configs of GPT-2 and families like it.

use super::{Sizes, activation, causal, encoder, epsilon, learned};
use crate::{
    config::Fields,
    error::ModelError,
    family::{
        Top,
        heads::{language, last_row},
        limits::{MAX_INTERMEDIATE, MAX_POSITIONS, MAX_WIDTH},
        rope::neighbours,
    },
    spec::*,
};

pub(in crate::family) fn gpt2(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn gptj(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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

pub(in crate::family) fn opt(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
