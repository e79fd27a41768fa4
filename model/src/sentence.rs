//! What a sentence-transformers directory says about vectors: how hidden states are pooled, what stands on
//! the pooled vector, prompts, lengths.

mod cross;
mod layers;
mod pooling;
mod read;
mod table;
#[cfg(test)]
mod tests;

use crate::{directory::ModelDir, error::ModelError, fields::Warning};
pub use cross::CrossEncoder;
use galaxy_common::Wanted;
pub use layers::Activation;
use layers::{Layer, to_unit_length};
pub use pooling::PoolingMode;
pub(crate) use read::{model_place, read};
use std::{collections::BTreeMap, path::Path};

/// How the rows of a text become its vector.
#[derive(Clone, PartialEq, Debug)]
pub struct SentenceConfig {
    /// How rows become one vector; the vectors of several modes stand one behind another.
    pooling: Vec<PoolingMode>,
    /// Whether the rows of a prompt are pooled, too.
    include_prompt: bool,
    /// What stands on the pooled vector, in this order.
    layers: Vec<Layer>,
    /// Texts put before others, by name.
    prompts: BTreeMap<String, String>,
    /// The name of the one that is used where nothing else is asked.
    default_prompt: Option<String>,
    /// Vectors are cut to so many values.
    dimensions: Option<u32>,
    /// Longer texts are cut to this many tokens, special ones included; instead of what the tokenizer says.
    pub max_tokens: Option<u32>,
    /// Whether text is lower-cased before all that the tokenizer's own files say.
    pub lower_case: bool,
}

/// What is asked of vectors besides what a model's files say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VectorForm {
    /// They are cut to so many values, instead of what the files say.
    pub dimensions: Option<u32>,
    /// They are scaled to length one in the end.
    pub normalise: bool,
}

impl Default for SentenceConfig {
    /// What sentence-transformers does with a plain model: mean pooling, not normalised.
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
    /// What devices are asked for: the pooled vector, where they can pool it.
    pub fn wanted(&self) -> Wanted {
        match self.pooling.as_slice() {
            [mode] => mode.on_devices().map_or(Wanted::Hidden, Wanted::Pooled),
            _ => Wanted::Hidden,
        }
    }

    /// The same for texts with a prompt before them.
    pub fn wanted_behind_prompts(&self) -> Wanted {
        if self.include_prompt { self.wanted() } else { Wanted::Hidden }
    }

    /// Whether the rows of a prompt are pooled, too.
    pub fn pools_prompts(&self) -> bool {
        self.include_prompt
    }

    /// The prompt of this name, or else the one that is used by default; empty where there is none.
    ///
    /// # Errors
    /// The known names, where this one is not among them.
    pub fn prompt(&self, name: Option<&str>) -> Result<&str, Vec<&str>> {
        let Some(name) = name.or(self.default_prompt.as_deref()) else { return Ok("") };
        let found = self.prompts.get(name).map(String::as_str);
        found.ok_or_else(|| self.prompts.keys().map(String::as_str).collect())
    }

    /// Values of a vector, of hidden states of so many, before it is cut.
    pub fn width(&self, hidden: u32) -> u32 {
        let pooled = hidden.saturating_mul(self.pooling.len() as u32);
        self.layers.iter().fold(pooled, |width, layer| layer.width(width))
    }

    /// The pooled vector of a text, of whose rows the first `skipped` do not count; none where no row
    /// counts.
    ///
    /// # Shapes
    /// `rows`: `[rows, hidden]`
    pub fn pool(&self, rows: &[f32], hidden: u32, skipped: usize) -> Option<Vec<f32>> {
        let hidden = hidden as usize;
        if rows.len() <= skipped.saturating_mul(hidden) {
            return None;
        }
        let mut pooled = Vec::with_capacity(self.pooling.len() * hidden);
        self.pooling.iter().for_each(|mode| mode.pool(rows, hidden, skipped, &mut pooled));
        Some(pooled)
    }

    /// The vector of a text, of its pooled one.
    pub fn finish(&self, pooled: Vec<f32>, form: VectorForm) -> Vec<f32> {
        let mut values = self.layers.iter().fold(pooled, |values, layer| layer.apply(values));
        // As sentence-transformers: what was scaled to length one before is not scaled again.
        if let Some(dimensions) = form.dimensions.or(self.dimensions) {
            values.truncate(dimensions as usize);
        }
        if form.normalise {
            to_unit_length(&mut values);
        }
        values
    }
}

impl ModelDir {
    /// Reads `modules.json` and the files that it names, weights among them.
    ///
    /// # Errors
    /// When one is damaged, or asks for something that this build does not do.
    pub fn sentence(&self) -> Result<SentenceConfig, ModelError> {
        read(self.root(), Some(self.spec().hidden))
    }
}

/// Fields of the files of sentence-transformers that nothing is known of.
pub(crate) fn look_over(root: &Path) -> Vec<Warning> {
    read::look_over(root)
}
