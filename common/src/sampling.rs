//! How the next token is chosen.

use serde::{Deserialize, Serialize};

/// How the next token is chosen from logits. Penalties and biases come first, then temperature, then
/// each bound on what is left of the one before: `top_k`, `top_p`, `min_p`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// So many of the likeliest tokens stay; 0: all.
    pub top_k: u32,
    /// The likeliest tokens stay that have this mass together; 1: all.
    pub top_p: f32,
    /// Tokens stay that are at least so likely, compared with the likeliest; 0: all.
    pub min_p: f32,
    /// Logits of tokens of the text are divided by it if they are positive, else multiplied; 1: not
    /// (Keskar et al., CTRL).
    pub repetition: f32,
    /// Taken from the logits of tokens that were chosen before.
    pub presence: f32,
    /// Taken from them for each time.
    pub frequency: f32,
    /// Added to the logits of these tokens, which stand in order and once.
    pub bias: Vec<(u32, f32)>,
    /// Noise is a function of it, of the position and of the token: the same seed gives the same text,
    /// however the vocabulary is split.
    pub seed: u64,
    /// So many of the likeliest tokens are told with each choice.
    pub logprobs: u32,
}

/// Most tokens that are told with each choice.
pub const MOST_LOGPROBS: u32 = 20;
/// Most biases.
pub const MOST_BIASES: usize = 1024;

/// Sampling that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A number out of its range.
    #[error("{what} must be {range}, not {value}")]
    Range {
        /// Which.
        what: &'static str,
        /// What it may be.
        range: &'static str,
        /// What it is.
        value: f32,
    },
    /// More than is told.
    #[error("logprobs must be at most {MOST_LOGPROBS}, not {0}")]
    Logprobs(u32),
    /// More biases than are taken.
    #[error("logit_bias may have at most {MOST_BIASES} tokens, not {0}")]
    Biases(usize),
    /// A token that the vocabulary does not have, or that stands twice.
    #[error("logit_bias names token {token}, which stands there twice or is none of {vocabulary}")]
    Token {
        /// Which.
        token: u32,
        /// Tokens that there are.
        vocabulary: u32,
    },
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            bias: Vec::new(),
            seed: 0,
            logprobs: 0,
        }
    }
}

impl Sampling {
    /// The likeliest token, always.
    pub fn greedy() -> Self {
        Self::default()
    }

    /// Puts biases in order, and checks everything against a vocabulary of so many tokens.
    ///
    /// # Errors
    /// The first thing that makes no sense.
    pub fn checked(mut self, vocabulary: u32) -> Result<Self, SamplingError> {
        let numbers = [
            ("temperature", self.temperature, 0.0..=100.0, "0 to 100"),
            ("min_p", self.min_p, 0.0..=1.0, "0 to 1"),
            ("repetition_penalty", self.repetition, 0.01..=100.0, "0.01 to 100"),
            ("presence_penalty", self.presence, -100.0..=100.0, "-100 to 100"),
            ("frequency_penalty", self.frequency, -100.0..=100.0, "-100 to 100"),
            ("top_p", self.top_p, f32::MIN_POSITIVE..=1.0, "above 0 and at most 1"),
        ];
        let biases =
            self.bias.iter().map(|(_, b)| ("logit_bias", *b, -1e4..=1e4, "-10000 to 10000"));
        let wrong =
            numbers.into_iter().chain(biases).find(|(_, value, range, _)| !range.contains(value));
        if let Some((what, value, _, range)) = wrong {
            return Err(SamplingError::Range { what, range, value });
        }
        if self.logprobs > MOST_LOGPROBS {
            return Err(SamplingError::Logprobs(self.logprobs));
        }
        if self.bias.len() > MOST_BIASES {
            return Err(SamplingError::Biases(self.bias.len()));
        }
        self.bias.sort_by_key(|(token, _)| *token);
        let twice = self.bias.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| pair[0].0);
        let beyond = self.bias.iter().map(|(token, _)| *token).find(|token| *token >= vocabulary);
        match twice.or(beyond) {
            Some(token) => Err(SamplingError::Token { token, vocabulary }),
            None => Ok(self),
        }
    }

    /// Whether tokens of the text before count.
    pub fn looks_back(&self) -> bool {
        (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
    }

    /// Whether noise chooses among all tokens there are.
    pub fn is_unbounded(&self) -> bool {
        self.temperature > 0.0 && self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_values_are_refused() {
        let ok = |sampling: Sampling| sampling.checked(10).err().map(|error| error.to_string());
        assert_eq!(ok(Sampling::greedy()), None);
        let cases = [
            (
                Sampling { temperature: f32::NAN, ..Sampling::default() },
                "temperature must be 0 to 100, not NaN",
            ),
            (Sampling { temperature: -1.0, ..Sampling::default() }, "temperature"),
            (Sampling { top_p: 0.0, ..Sampling::default() }, "top_p must be above 0"),
            (Sampling { top_p: 1.5, ..Sampling::default() }, "top_p"),
            (Sampling { min_p: 2.0, ..Sampling::default() }, "min_p"),
            (Sampling { repetition: 0.0, ..Sampling::default() }, "repetition_penalty"),
            (Sampling { presence: f32::INFINITY, ..Sampling::default() }, "presence_penalty"),
            (Sampling { frequency: -1e9, ..Sampling::default() }, "frequency_penalty"),
            (Sampling { logprobs: 21, ..Sampling::default() }, "at most 20, not 21"),
            (Sampling { bias: vec![(10, 1.0)], ..Sampling::default() }, "token 10"),
            (Sampling { bias: vec![(3, 1.0), (3, 2.0)], ..Sampling::default() }, "token 3"),
            (Sampling { bias: vec![(3, f32::NAN)], ..Sampling::default() }, "logit_bias must be"),
            (Sampling { bias: vec![(0, 0.0); 1025], ..Sampling::default() }, "at most 1024"),
        ];
        for (sampling, says) in cases {
            let error = ok(sampling).expect("refused");
            assert!(error.contains(says), "{error}");
        }
        let ordered = Sampling { bias: vec![(3, 1.0), (1, 2.0)], ..Sampling::default() };
        assert_eq!(ordered.checked(10).expect("sensible").bias, [(1, 2.0), (3, 1.0)]);
    }
}
