//! The model families: for each, how the fields of its config become a [`ModelSpec`], and how its tensors are named.
//!
//! A family is a row of a table. `{}` in a tensor's name stands for the layer. Names lie below one of the family's
//! prefixes (the one below which its first table is found), except those that begin with `/`.

mod config;
pub(crate) mod fields;
mod heads;
mod kinds;
mod limits;
mod rope;
mod table;
#[cfg(test)]
mod tests;

use crate::{
    compressed,
    config::{Fields, short},
    error::ModelError,
    fields::{check, listed},
    matrix::Storage,
    spec::ModelSpec,
    warning::Warning,
};
use table::FAMILIES;

/// The kind of head that an architecture has on top of its layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Top {
    Hidden,
    Classes,
    Language,
}

/// A model family: what its configs and checkpoints look like.
pub(crate) struct Family {
    /// The `model_type` in its configs.
    pub(crate) model_type: &'static str,
    architectures: &'static [(&'static str, Top)],
    read: fn(&Fields<'_>, Top) -> Result<ModelSpec, ModelError>,
    /// The prefixes that tensor names may have, tried in this order.
    pub(crate) prefixes: &'static [&'static str],
    /// How the matrices of layers are stored; heads are always stored as `nn.Linear` does.
    pub(crate) storage: Storage,
    pub(crate) names: Names,
}

/// The names of a family's tensors, without `.weight` and `.bias`; names that end with `!` have neither. A name is
/// empty where the family has no such tensor. Where query, key and value have the same name, they are one tensor, one
/// below another; so are gate and up.
pub(crate) struct Names {
    pub(crate) word: &'static str,
    pub(crate) patch: &'static str,
    pub(crate) class_row: &'static str,
    pub(crate) position: &'static str,
    pub(crate) token_type: &'static str,
    pub(crate) relative_bias: &'static str,
    pub(crate) embedding_norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    pub(crate) query_norm: &'static str,
    pub(crate) key_norm: &'static str,
    pub(crate) attention_output: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) attention_sum_norm: &'static str,
    pub(crate) mlp_sum_norm: &'static str,
    pub(crate) final_norm: &'static str,
    pub(crate) class_dense: &'static str,
    pub(crate) class_norm: &'static str,
    pub(crate) class_output: &'static str,
    pub(crate) language_head: &'static str,
}

/// What a config describes: a family, and a model of it.
pub(crate) struct Described {
    pub(crate) family: &'static Family,
    pub(crate) spec: ModelSpec,
    /// Warnings about fields that are not supported.
    pub(crate) warnings: Vec<Warning>,
}

/// Finds the family of a config, and reads the model that it describes.
pub(crate) fn read(config: &Fields<'_>) -> Result<Described, ModelError> {
    let architecture = match config.get(&["architectures"]) {
        None => None,
        Some((_, value)) => match value.as_array().map(|list| list.first().map(|v| v.as_str())) {
            Some(None) => None,
            Some(Some(Some(name))) => Some(name),
            _ => {
                let problem = format!("is {}: a list of names is wanted", short(value));
                return Err(config.wrong("architectures", problem));
            }
        },
    };
    let by_architecture = |f: &&Family| f.architectures.iter().any(|a| Some(a.0) == architecture);
    let family = match (config.text(&["model_type"])?, architecture) {
        (Some(model_type), _) => {
            FAMILIES.iter().find(|f| f.model_type == model_type).ok_or_else(|| {
                let known: Vec<_> = FAMILIES.iter().map(|f| f.model_type).collect();
                config.unknown("model_type", model_type, known.join(", "))
            })?
        }
        (None, Some(name)) => FAMILIES.iter().find(by_architecture).ok_or_else(|| {
            let known = FAMILIES.iter().flat_map(|f| f.architectures).map(|a| a.0);
            config.unknown("architecture", name, known.collect::<Vec<_>>().join(", "))
        })?,
        (None, None) => return Err(config.wrong("model_type", "is missing")),
    };
    let top = match architecture {
        None => Top::Hidden,
        Some(name) => {
            let known = || family.architectures.iter().map(|a| a.0).collect::<Vec<_>>().join(", ");
            let found = family.architectures.iter().find(|a| a.0 == name);
            found.ok_or_else(|| config.unknown("architecture", name, known()))?.1
        }
    };
    let quantised = quantised(config)?;
    let mut warnings = check(config, fields::tables(family.model_type))?;
    warnings.extend(quantised);
    let spec = (family.read)(config, top)?;
    // A base model has no head that could be missing.
    let with_head = architecture.filter(|name| top == Top::Hidden && !name.ends_with("Model"));
    let headless = with_head.map(|name| format!("the head of {name} is not carried out"));
    let spec = ModelSpec { family: family.model_type.to_owned(), headless, ..spec };
    Ok(Described { family, spec, warnings })
}

/// Checks how the model's files say that it is quantised: by compressed-tensors, or not at all. Gives a warning about
/// fields that are not known.
fn quantised(config: &Fields<'_>) -> Result<Option<Warning>, ModelError> {
    let path = || config.path.to_owned();
    let Some((field, value)) = config.get(&["quantization_config", "compression_config"]) else {
        return Ok(None);
    };
    let method = value.get("quant_method");
    if field == "quantization_config" && method.is_none_or(|method| method != "compressed-tensors")
    {
        return Err(ModelError::Unsupported {
            path: path(),
            field,
            // The method (GPTQ, AWQ, ...) is the most useful part.
            value: short(method.unwrap_or(value)),
            remedy: "use a checkpoint of compressed-tensors (pack-quantized), a GGUF file, or one in F32, F16 or BF16",
        });
    }
    let unknown = compressed::check(value).map_err(|(name, value)| {
        let problem = format!(
            "asks for {name} = {}, which is not done: codes of 4 or 8 bits in pack-quantized are",
            short(&value)
        );
        config.wrong(field, problem)
    })?;
    let text = format!("{} of {field} are not known here", listed(&unknown));
    Ok((!unknown.is_empty()).then(|| Warning { path: path(), text }))
}

/// A tensor's full name: the prefix, the pattern with the layer's number, and the ending.
pub(crate) fn full(prefix: &str, pattern: &str, layer: u32, ending: &str) -> String {
    let (prefix, pattern) = match pattern.strip_prefix('/') {
        Some(rest) => ("", rest),
        None => (prefix, pattern),
    };
    let (pattern, ending) = match pattern.strip_suffix('!') {
        Some(bare) => (bare, ""),
        None => (pattern, ending),
    };
    format!("{prefix}{}{ending}", pattern.replace("{}", &layer.to_string()))
}
