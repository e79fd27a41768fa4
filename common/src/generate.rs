//! Text generation: what a client asks for, what devices get of each sequence, and the tokens that are generated.
//! These types are the only form of a sequence between two wires: whoever forwards a sequence forwards them.

use crate::{
    plan::Phase,
    sampling::{Fallback, Sampling, SamplingParams},
};
use serde::Serialize;
use std::sync::Arc;

/// The prompt of a sequence.
#[derive(Clone, PartialEq, Debug)]
pub enum Prompt {
    /// A text, which the coordinator tokenises.
    Text(String),
    /// Token ids; also for models without a tokenizer.
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

/// How a sequence is generated.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateOptions {
    /// The most tokens to generate; 0: as many as the defaults say, or as there is room for.
    pub max_tokens: u32,
    /// How tokens are chosen. The same seed gives the same text; without one it is another each time.
    pub sampling: SamplingParams,
    /// Strings before the first of which the text ends.
    pub stop: Vec<String>,
    /// Whether generation goes on after an end-of-text token.
    pub ignore_end: bool,
    /// Which of its client's sequences come first where not all can: those with the lower number, and each ten
    /// seconds of waiting lower a sequence's number by one. Clients take turns whatever theirs say.
    pub priority: i32,
    /// Tokens that were generated after the prompt already: generation continues after them. They count as generated,
    /// and are not sent again.
    pub generated: Vec<u32>,
    /// What the request leaves open is as the model's `generation_config.json` says, and as this where that says
    /// nothing. Without it, the likeliest token is taken and nothing of that file holds but the end-of-text tokens.
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

/// A generated token.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GeneratedToken {
    /// The token's id in the vocabulary.
    pub token: u32,
    /// Its log-probability, before penalties, biases and temperature.
    pub logprob: f32,
    /// The likeliest tokens with their log-probabilities, as many as `logprobs` asks for.
    pub top: Vec<(u32, f32)>,
    /// The text that the token adds, as far as that is certain.
    pub text: String,
}

/// A sequence in its slot, as every device gets it.
#[derive(Clone, PartialEq, Debug)]
pub struct Sequence {
    /// The slot of the KV cache in which its keys and values are stored.
    pub slot: u32,
    /// The most rows that it may have in the end.
    pub rows: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Its tokens so far. May be left out: then penalties see none of them, and nothing is drafted from them.
    pub tokens: Vec<u32>,
    /// How many of the tokens are the prompt; the others were generated.
    pub prompt: usize,
}

/// A decode burst: tokens that are generated for the sequences of a batch in one execution, until one of the
/// sequences has what it is to get, and each has one at least.
#[derive(Clone, PartialEq, Debug)]
pub struct Burst {
    /// Whether the programs are those that are lowered for many rows, or for one row of each sequence.
    pub phase: Phase,
    /// What each sequence of which a token is wanted is to get, in the order of the batch.
    pub goals: Vec<TokenGoal>,
    /// The most steps: a sequence gets a token of each, and more where drafts are right.
    pub steps: u32,
    /// The share of a step's time that one more row takes, where drafts may be verified.
    pub row_cost: Option<f32>,
}

/// The tokens that one sequence gets in a burst.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenGoal {
    /// The most tokens to generate; more than one only from single rows.
    pub count: u32,
    /// Tokens that end the sequence: none is generated behind one of these.
    pub stop: Arc<[u32]>,
}
