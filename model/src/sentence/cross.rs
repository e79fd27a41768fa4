//! The settings of a cross-encoder, which reads a query and a text together to rank the text.

use super::{
    layers::Activation,
    read::{Transformer, modules, settings, transformer, unknown},
    table::json,
};
use crate::{config::Fields, directory::ModelDir, error::ModelError, spec::HeadSpec};
use std::path::Path;

/// How a pair of texts becomes a score.
#[derive(Clone, PartialEq, Debug)]
pub struct CrossEncoder {
    /// The activation that turns the single logit into the score.
    pub activation: Activation,
    /// The prompt that is put before the first text of a pair; may be empty.
    pub prompt: String,
    /// Longer pairs are cut to this many tokens, special ones included; `None` leaves it to the tokenizer.
    pub max_tokens: Option<u32>,
    /// Whether texts are lower-cased before anything that the tokenizer's own files say.
    pub lower_case: bool,
}

impl ModelDir {
    /// How the model ranks texts, if it is a cross-encoder: a model of texts with a single class.
    ///
    /// # Errors
    /// When the model has several classes or none, or a file is damaged or asks for something that is not supported.
    pub fn cross_encoder(&self) -> Result<CrossEncoder, ModelError> {
        match &self.spec().head {
            HeadSpec::Classes(head) if head.labels == 1 && self.spec().patches.is_none() => {
                read(self.root(), self.path())
            }
            head => {
                let what = match head.labels() {
                    0 => "score of a pair of texts: it has no class head".to_owned(),
                    labels => format!("score of a pair of texts: it has {labels} classes, not one"),
                };
                Err(ModelError::NotInModel { what })
            }
        }
    }
}

fn read(root: &Path, place: &Path) -> Result<CrossEncoder, ModelError> {
    let modules = modules(root)?;
    let mut of_modules = None;
    let mut asked = None;
    let mut prompt = String::new();
    if let Some(modules) = modules {
        let settings = settings(root)?;
        // Of other kinds of models only the transformer is used.
        if settings.model_type.as_deref() == Some("CrossEncoder") {
            let path = root.join("modules.json");
            if let Some(other) = modules.iter().find(|module| module.kind != "Transformer") {
                return Err(unknown(&path, other));
            }
            of_modules = Some(transformer(place)?);
            let path = root.join("config_sentence_transformers.json");
            let value = json(&path)?;
            asked = Activation::named(&Fields::new(&path, &value)?, "activation_fn")?;
            let name = settings.default_prompt;
            prompt = name.and_then(|name| settings.prompts.get(&name).cloned()).unwrap_or_default();
        }
    }
    let Transformer { max_tokens, lower_case } = of_modules.unwrap_or_default();
    let path = place.join("config.json");
    let value = json(&path)?;
    let config = Fields::new(&path, &value)?;
    let activation = match (asked, config.inner(&["sentence_transformers"])?) {
        (Some(activation), _) => Some(activation),
        (None, Some(inner)) => Activation::named(&inner, "activation_fn")?,
        (None, None) => Activation::named(&config, "sbert_ce_default_activation_function")?,
    };
    let activation = activation.unwrap_or(Activation::Sigmoid);
    Ok(CrossEncoder { activation, prompt, max_tokens, lower_case })
}
