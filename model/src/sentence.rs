//! The settings of a sentence-transformers directory: how hidden states are pooled, the modules behind the pooling,
//! prompts and lengths.

mod cross;
mod layers;
mod pooling;
mod read;
mod table;
#[cfg(test)]
mod tests;

use crate::warning::Warning;
pub use cross::CrossEncoder;
use galaxy_common::Wanted;
pub use layers::Activation;
pub(crate) use layers::Projection;
use layers::{Layer, to_unit_length};
pub use pooling::PoolingMode;
pub(crate) use read::{model_place, read};
use std::{collections::BTreeMap, path::Path};

/// How the hidden states of a text become its vector.
#[derive(Clone, PartialEq, Debug)]
pub struct SentenceConfig {
    /// How hidden states are pooled into one vector; the vectors of several modes are concatenated.
    pooling: Vec<PoolingMode>,
    /// Whether the rows of a prompt are pooled, too.
    include_prompt: bool,
    /// The modules that the pooled vector goes through, in this order.
    layers: Vec<Layer>,
    /// Prompts that are put before texts, by name.
    prompts: BTreeMap<String, String>,
    /// The name of the prompt that is used where a request names none.
    default_prompt: Option<String>,
    /// How many values vectors are cut to, if they are cut.
    dimensions: Option<u32>,
    /// Longer texts are cut to this many tokens, special ones included; `None` leaves it to the tokenizer.
    pub max_tokens: Option<u32>,
    /// Whether texts are lower-cased before anything that the tokenizer's own files say.
    pub lower_case: bool,
}

/// What a request asks of vectors, besides what the model's files say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VectorForm {
    /// How many values vectors are cut to; `None` leaves it to the model's files.
    pub dimensions: Option<u32>,
    /// Whether vectors are scaled to length one in the end.
    pub normalise: bool,
}

impl Default for SentenceConfig {
    /// The defaults of sentence-transformers for a plain model: mean pooling, not normalised.
    fn default() -> Self {
        Self {
            pooling: vec![PoolingMode::Mean],
            include_prompt: true,
            layers: Vec::new(),
            prompts: BTreeMap::new(),
            default_prompt: None,
            dimensions: None,
            max_tokens: None,
            lower_case: false,
        }
    }
}

impl SentenceConfig {
    /// The output that devices are asked for: the pooled vector where they can pool, or else hidden states.
    pub fn wanted(&self) -> Wanted {
        match self.pooling.as_slice() {
            [mode] => mode.on_devices().map_or(Wanted::Hidden, Wanted::Pooled),
            _ => Wanted::Hidden,
        }
    }

    /// The output that devices are asked for where texts have a prompt before them.
    pub fn wanted_behind_prompts(&self) -> Wanted {
        if self.include_prompt { self.wanted() } else { Wanted::Hidden }
    }

    /// Whether the rows of a prompt are pooled, too.
    pub fn pools_prompts(&self) -> bool {
        self.include_prompt
    }

    /// The prompt of this name, or the default prompt; empty where there is none.
    ///
    /// # Errors
    /// The known names, where this one is not among them.
    pub fn prompt(&self, name: Option<&str>) -> Result<&str, Vec<&str>> {
        let Some(name) = name.or(self.default_prompt.as_deref()) else { return Ok("") };
        let found = self.prompts.get(name).map(String::as_str);
        found.ok_or_else(|| self.prompts.keys().map(String::as_str).collect())
    }

    /// All prompts by their names, and the name of the one that is used where a request names none.
    pub(crate) fn prompts(&self) -> (&BTreeMap<String, String>, Option<&str>) {
        (&self.prompts, self.default_prompt.as_deref())
    }

    /// The number of values of a vector, before it is cut, for hidden states of `hidden` values.
    pub fn width(&self, hidden: u32) -> u32 {
        let pooled = hidden.saturating_mul(self.pooling.len() as u32);
        self.layers.iter().fold(pooled, |width, layer| layer.width(width))
    }

    /// The only way of pooling, of vectors that are scaled to length one in the end, and the matrices that they are
    /// multiplied with before that; `None` where anything else happens to them.
    pub(crate) fn only_pooling(&self) -> Option<(PoolingMode, Vec<Projection<'_>>)> {
        let ([mode], [before @ .., Layer::Normalise]) = (&self.pooling[..], &self.layers[..])
        else {
            return None;
        };
        let matrices: Option<Vec<_>> = before.iter().map(Layer::projection).collect();
        Some((*mode, matrices?))
    }

    /// What differs from other settings, as the end of a sentence.
    pub(crate) fn differs_from(&self, other: &Self) -> Option<&'static str> {
        let unlike = |differs: bool, what| differs.then_some(what);
        unlike(self.pooling != other.pooling, "how its rows are pooled")
            .or(unlike(self.layers != other.layers, "what its vectors go through"))
            .or(unlike(self.prompts != other.prompts, "its prompts"))
            .or(unlike(self.default_prompt != other.default_prompt, "its default prompt"))
            .or(unlike(self.include_prompt != other.include_prompt, "that prompts are not pooled"))
            .or(unlike(self.dimensions != other.dimensions, "to what its vectors are cut"))
            .or(unlike(self.lower_case != other.lower_case, "that texts are lower-cased"))
            .or(unlike(self.max_tokens != other.max_tokens, "how long its texts may be"))
    }

    /// Pools the hidden states of a text, of which the first `skipped` rows do not count; `None` where no row counts.
    ///
    /// # Shapes
    /// `rows` is `[rows, hidden]`, row-major.
    pub fn pool(&self, rows: &[f32], hidden: u32, skipped: usize) -> Option<Vec<f32>> {
        let hidden = hidden as usize;
        if rows.len() <= skipped.saturating_mul(hidden) {
            return None;
        }
        let mut pooled = Vec::with_capacity(self.pooling.len() * hidden);
        self.pooling.iter().for_each(|mode| mode.pool(rows, hidden, skipped, &mut pooled));
        Some(pooled)
    }

    /// Turns a pooled vector into the vector of the text: through the modules, cut and scaled.
    pub fn finish(&self, pooled: Vec<f32>, form: VectorForm) -> Vec<f32> {
        let mut values = self.layers.iter().fold(pooled, |values, layer| layer.apply(values));
        // As in sentence-transformers: a vector that was scaled to length one is not scaled again after it is cut.
        if let Some(dimensions) = form.dimensions.or(self.dimensions) {
            values.truncate(dimensions as usize);
        }
        if form.normalise {
            to_unit_length(&mut values);
        }
        values
    }
}

/// Warnings about unknown fields in the files of sentence-transformers.
pub(crate) fn look_over(root: &Path) -> Vec<Warning> {
    read::look_over(root)
}
