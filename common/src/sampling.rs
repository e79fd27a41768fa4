//! How the next token is chosen.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

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

/// What a request says of a [`Sampling`]. What it leaves open comes from defaults.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SamplingParams {
    /// [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// [`Sampling::repetition`].
    pub repetition: Option<f32>,
    /// [`Sampling::presence`].
    pub presence: Option<f32>,
    /// [`Sampling::frequency`].
    pub frequency: Option<f32>,
    /// [`Sampling::bias`].
    pub bias: Vec<(u32, f32)>,
    /// [`Sampling::seed`]; without one another each time.
    pub seed: Option<u64>,
    /// [`Sampling::logprobs`].
    pub logprobs: u32,
}

/// What holds where neither a request nor the model's files say anything.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Fallback {
    /// [`Sampling::temperature`].
    pub temperature: f32,
    /// Most tokens that are generated; 0: as many as there is room for.
    pub max_tokens: u32,
}

/// Temperatures below this one take the likeliest token: the quotients of logits would leave what `f32` holds.
pub const COLDEST: f32 = 1e-5;
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

impl SamplingError {
    /// The parameter at fault.
    pub fn parameter(&self) -> &'static str {
        match self {
            Self::Range { what, .. } => what,
            Self::Logprobs(_) => "logprobs",
            Self::Biases(_) | Self::Token { .. } => "logit_bias",
        }
    }
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

    /// Puts biases in order, and checks everything against a vocabulary of so many tokens. A temperature below
    /// [`COLDEST`] becomes 0.
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
            ("top_p", self.top_p, 0.0..=1.0, "0 to 1"),
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
        if self.temperature < COLDEST {
            self.temperature = 0.0;
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

impl SamplingParams {
    /// With what `defaults` say where this says nothing. A bias of the same token is not added to.
    pub fn or(mut self, defaults: &Self) -> Self {
        let said: BTreeSet<u32> = self.bias.iter().map(|(token, _)| *token).collect();
        self.bias.extend(defaults.bias.iter().filter(|(token, _)| !said.contains(token)));
        Self {
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repetition: self.repetition.or(defaults.repetition),
            presence: self.presence.or(defaults.presence),
            frequency: self.frequency.or(defaults.frequency),
            bias: self.bias,
            seed: self.seed.or(defaults.seed),
            logprobs: self.logprobs,
        }
    }

    /// The whole of it: the likeliest token, unless something else was said. `seed` is taken if none was said.
    pub fn complete(self, seed: u64) -> Sampling {
        let plain = Sampling::default();
        Sampling {
            temperature: self.temperature.unwrap_or(plain.temperature),
            top_k: self.top_k.unwrap_or(plain.top_k),
            top_p: self.top_p.unwrap_or(plain.top_p),
            min_p: self.min_p.unwrap_or(plain.min_p),
            repetition: self.repetition.unwrap_or(plain.repetition),
            presence: self.presence.unwrap_or(plain.presence),
            frequency: self.frequency.unwrap_or(plain.frequency),
            bias: self.bias,
            seed: self.seed.unwrap_or(seed),
            logprobs: self.logprobs,
        }
    }
}

impl From<Sampling> for SamplingParams {
    fn from(sampling: Sampling) -> Self {
        Self {
            temperature: Some(sampling.temperature),
            top_k: Some(sampling.top_k),
            top_p: Some(sampling.top_p),
            min_p: Some(sampling.min_p),
            repetition: Some(sampling.repetition),
            presence: Some(sampling.presence),
            frequency: Some(sampling.frequency),
            bias: sampling.bias,
            seed: Some(sampling.seed),
            logprobs: sampling.logprobs,
        }
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
            (Sampling { top_p: -0.1, ..Sampling::default() }, "top_p must be 0 to 1, not -0.1"),
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
    #[test]
    fn edges_of_ranges_are_taken() {
        let base = Sampling::default();
        for fine in [
            Sampling { temperature: 100.0, top_p: 0.0, min_p: 1.0, ..base.clone() },
            Sampling { top_p: f32::MIN_POSITIVE, top_k: u32::MAX, ..base.clone() },
            Sampling { repetition: 0.01, presence: -100.0, frequency: 100.0, ..base.clone() },
            Sampling { top_p: -0.0, min_p: -0.0, presence: -0.0, ..base.clone() },
        ] {
            assert_eq!(fine.clone().checked(10), Ok(fine));
        }
        for cold in [-0.0, f32::from_bits(1), 1e-30, 1e-8, 9.9e-6] {
            let cold = Sampling { temperature: cold, ..base.clone() }.checked(10).expect("taken");
            assert_eq!(cold.temperature.to_bits(), 0, "the likeliest token");
        }
        let least = Sampling { temperature: COLDEST, ..base };
        assert_eq!(least.clone().checked(10), Ok(least));
    }

    #[test]
    fn defaults_hold_where_nothing_is_said() {
        let said = SamplingParams {
            temperature: Some(0.0),
            bias: vec![(3, 1.0)],
            logprobs: 2,
            ..SamplingParams::default()
        };
        let defaults = SamplingParams {
            temperature: Some(0.7),
            top_k: Some(20),
            bias: vec![(3, -9.0), (5, -9.0)],
            ..SamplingParams::default()
        };
        let want = Sampling {
            temperature: 0.0,
            top_k: 20,
            bias: vec![(3, 1.0), (5, -9.0)],
            seed: 4,
            logprobs: 2,
            ..Sampling::default()
        };
        assert_eq!(said.or(&defaults).complete(4), want);
        assert_eq!(SamplingParams::from(want.clone()).or(&defaults).complete(9), want);
    }
}
