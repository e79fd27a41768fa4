//! The settings of the sampler.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// How the sampler chooses the next token from logits. Penalties and biases come first, then temperature, then each
/// bound on what is left of the one before: `top_k`, `top_p`, `min_p`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// The number of likeliest tokens that stay candidates; 0: all.
    pub top_k: u32,
    /// The likeliest tokens stay that have this probability mass together; 1: all.
    pub top_p: f32,
    /// Tokens stay that are at least so likely, compared with the likeliest; 0: all.
    pub min_p: f32,
    /// Repetition penalty: logits of tokens of the sequence are divided by it if they are positive, else multiplied;
    /// 1 changes nothing (Keskar et al., CTRL).
    pub repetition: f32,
    /// Presence penalty: subtracted from the logits of tokens that were chosen before.
    pub presence: f32,
    /// Frequency penalty: subtracted from the logits of tokens that were chosen before, once for each time.
    pub frequency: f32,
    /// Added to the logits of these tokens, which stand in ascending order, each once.
    pub bias: Vec<(u32, f32)>,
    /// Noise is a function of it, of the position and of the token: the same seed gives the same text, however the
    /// vocabulary is split.
    pub seed: u64,
    /// The number of likeliest tokens that come with each choice, with their log-probabilities.
    pub logprobs: u32,
}

/// What a request says of a [`Sampling`]. What it leaves open comes from defaults.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct SamplingParams {
    /// The value of [`Sampling::temperature`], if the request sets it.
    pub temperature: Option<f32>,
    /// The value of [`Sampling::top_k`], if the request sets it.
    pub top_k: Option<u32>,
    /// The value of [`Sampling::top_p`], if the request sets it.
    pub top_p: Option<f32>,
    /// The value of [`Sampling::min_p`], if the request sets it.
    pub min_p: Option<f32>,
    /// The value of [`Sampling::repetition`], if the request sets it.
    pub repetition: Option<f32>,
    /// The value of [`Sampling::presence`], if the request sets it.
    pub presence: Option<f32>,
    /// The value of [`Sampling::frequency`], if the request sets it.
    pub frequency: Option<f32>,
    /// The entries of [`Sampling::bias`] that the request sets, in any order.
    pub bias: Vec<(u32, f32)>,
    /// The value of [`Sampling::seed`]; without one, it is another each time.
    pub seed: Option<u64>,
    /// The value of [`Sampling::logprobs`], which no default changes.
    pub logprobs: u32,
}

/// The settings that hold where neither a request nor the model's files say anything.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Fallback {
    /// The fallback of [`Sampling::temperature`].
    pub temperature: f32,
    /// The most tokens to generate; 0: as many as there is room for.
    pub max_tokens: u32,
}

/// The lowest temperature: those below it take the likeliest token, since quotients of logits would leave what `f32`
/// holds.
pub const COLDEST: f32 = 1e-5;
/// The largest `logprobs`: so many of the likeliest tokens may come with each choice.
pub const MOST_LOGPROBS: u32 = 20;
/// The most biases of a request.
pub const MOST_BIASES: usize = 1024;

/// Why sampling settings are refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A number out of its range.
    #[error("{what} must be {range}, not {value}")]
    Range {
        /// The parameter's name.
        what: &'static str,
        /// The range that it may have, for people.
        range: &'static str,
        /// The value that was asked for.
        value: f32,
    },
    /// More than [`MOST_LOGPROBS`] of the likeliest tokens.
    #[error("logprobs must be at most {MOST_LOGPROBS}, not {0}")]
    Logprobs(u32),
    /// More biases than are taken.
    #[error("logit_bias may have at most {MOST_BIASES} tokens, not {0}")]
    Biases(usize),
    /// A bias for a token that the vocabulary does not have, or that stands twice.
    #[error("logit_bias names token {token}, which stands there twice or is none of {vocabulary}")]
    Token {
        /// The id of the token.
        token: u32,
        /// The number of tokens in the vocabulary.
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
    /// Settings that always take the likeliest token.
    pub fn greedy() -> Self {
        Self::default()
    }

    /// Puts biases in ascending order, and checks everything against a vocabulary of so many tokens. A temperature
    /// below [`COLDEST`] becomes 0.
    ///
    /// # Errors
    /// The first setting that is out of its range.
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

    /// Whether a penalty depends on the tokens of the sequence so far.
    pub fn looks_back(&self) -> bool {
        (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
    }

    /// Whether all tokens of the vocabulary can be sampled: the temperature is above 0, and nothing bounds the
    /// candidates.
    pub fn is_unbounded(&self) -> bool {
        self.temperature > 0.0 && self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

impl SamplingParams {
    /// Completes these settings with those of `defaults` where these say nothing. A bias of the same token is not
    /// added to.
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

    /// All settings: those that are left open take the likeliest token. `seed` holds where none is set.
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
    fn sampling_settings_out_of_range_are_refused() {
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
    fn sampling_settings_at_their_limits_are_accepted() {
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
    fn unset_sampling_settings_take_the_defaults_of_the_model() {
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
