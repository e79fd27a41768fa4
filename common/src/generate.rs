//! Texts that go on: what is asked of one, what devices are told of it, and the tokens that come of it. These types
//! are all that there is of a text between two wires: whoever passes it on passes them on.

use crate::{
    plan::Phase,
    sampling::{Fallback, Sampling, SamplingParams},
};
use serde::Serialize;
use std::sync::Arc;

/// What goes on.
#[derive(Clone, PartialEq, Debug)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Its tokens. For models without a tokenizer too.
    Ids(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}
impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Self::Ids(ids)
    }
}

/// How it goes on.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateOptions {
    /// Most tokens that are made; 0: as many as the defaults say, or as there is room for.
    pub max_tokens: u32,
    /// How tokens are chosen. The same seed gives the same text; without one it is another each time.
    pub sampling: SamplingParams,
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Whether it goes on behind a token that ends texts.
    pub ignore_end: bool,
    /// Which of its client's sequences come first where not all can: those with the lower number, and each ten seconds
    /// that one has waited make its number one less. Clients take turns whatever theirs say.
    pub priority: i32,
    /// Tokens that were generated behind the prompt already: it goes on behind them. They count as generated, and
    /// are not told again.
    pub generated: Vec<u32>,
    /// What is left open is as the model's `generation_config.json` says, and as this where that says nothing.
    /// Without it, the likeliest token is taken and nothing of that file holds but the tokens that end texts.
    pub fallback: Option<Fallback>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 0,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
            ignore_end: false,
            priority: 0,
            generated: Vec::new(),
            fallback: Some(Fallback::default()),
        }
    }
}

impl GenerateOptions {
    /// Leaves the model's `generation_config.json` aside: what is left open is as the fallback says.
    pub fn without_model_defaults(mut self) -> Self {
        if let Some(fallback) = self.fallback.take() {
            self.sampling.temperature.get_or_insert(fallback.temperature);
            if self.max_tokens == 0 {
                self.max_tokens = fallback.max_tokens;
            }
        }
        self
    }
}

/// A token that was made.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GeneratedToken {
    /// Its id.
    pub token: u32,
    /// Its log-probability, before anything is done to logits.
    pub logprob: f32,
    /// The likeliest tokens with theirs, as many as `logprobs` says.
    pub top: Vec<(u32, f32)>,
    /// What it adds to the text, as far as that is sure.
    pub text: String,
}

/// A text that goes on in its slot, as every device is told of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Text {
    /// Where its keys and values are kept.
    pub slot: u32,
    /// Rows that it may have in the end.
    pub rows: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Its tokens so far. May be left out: then penalties see none of them, and nothing is drafted from them.
    pub tokens: Vec<u32>,
    /// How many of them were asked with; the others were chosen.
    pub prompt: usize,
}

/// A decode burst: tokens that are generated for the sequences of a batch in one execution, until one of the
/// sequences has what it is to get, and each has one at least.
#[derive(Clone, PartialEq, Debug)]
pub struct Burst {
    /// Whether the programs are those that are lowered for many rows, or for one row of each sequence.
    pub phase: Phase,
    /// What each sequence is to get of which a token is wanted, in the order of the batch.
    pub goals: Vec<TokenGoal>,
    /// How many steps it has, at most: a sequence gets a token of each, and more where drafts are right.
    pub steps: u32,
    /// What one more row takes of the time of a step, where drafts may be verified.
    pub row_cost: Option<f32>,
}

/// The tokens that one sequence gets in a burst.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenGoal {
    /// How many; more than one only from single rows.
    pub count: u32,
    /// Tokens that end the sequence: none is generated behind one of these.
    pub stop: Arc<[u32]>,
}
