//! The configs of encoders.

use super::{Sizes, activation, causal, divide, encoder, epsilon, learned};
use crate::{
    config::{Fields, short},
    error::ModelError,
    family::{
        Top,
        heads::{dense_and_norm, first_row},
        kinds,
        limits::{
            MAX_CHANNELS, MAX_HEADS, MAX_INTERMEDIATE, MAX_LAYERS, MAX_PATCH, MAX_PIXELS,
            MAX_POSITIONS, MAX_TYPES, MAX_WIDTH,
        },
        rope::{RotaryFields, rotary},
    },
    spec::*,
};

pub(in crate::family) fn bert(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn roberta(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn mpnet(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
pub(in crate::family) fn distilbert(
    config: &Fields<'_>,
    top: Top,
) -> Result<ModelSpec, ModelError> {
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

/// ModernBERT: an encoder with a gated MLP, norms before blocks, and a sliding window in most layers.
pub(in crate::family) fn modernbert(
    config: &Fields<'_>,
    top: Top,
) -> Result<ModelSpec, ModelError> {
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

pub(in crate::family) fn vit(config: &Fields<'_>, top: Top) -> Result<ModelSpec, ModelError> {
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
