//! The sampling arguments of `galaxy generate` and `galaxy chat`.

use super::{failure::Failure, generation_config::GenerationConfig};
use clap::Args;
use galaxy_common::{Sampling, SamplingParams};
use std::time::{SystemTime, UNIX_EPOCH};

/// Sampling arguments. Settings that are not given are as the model's `generation_config.json`
/// says.
#[derive(Args, Debug)]
#[command(next_help_heading = "Choice of tokens")]
pub struct Choice {
    /// Where settings come from that are not given.
    #[arg(long, value_enum, default_value_t)]
    pub generation_config: GenerationConfig,
    /// Sampling temperature; 0 takes the likeliest token [default: as the model says, else 0].
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Sample among the K likeliest tokens; 0 for all.
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Sample among the likeliest tokens whose probabilities add up to P.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Sample among tokens that are at least P times as likely as the likeliest.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Penalty on tokens that the text has already; above 1 makes them less likely.
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Subtract X from the logits of tokens that were generated before.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    presence_penalty: Option<f32>,
    /// Subtract X from a token's logit for each time that it was generated.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    frequency_penalty: Option<f32>,
    /// Add X to the logit of the token ID; may be given several times.
    #[arg(long, value_name = "ID=X", value_parser = bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the sampler; the same seed gives the same text [default: another each time].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("{text:?} is not a token id and a number: write 17=-3.5");
    let (token, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((token.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

impl Choice {
    /// The given settings, checked, with log-probabilities of the `logprobs` likeliest tokens at
    /// each place.
    pub fn params(&self, logprobs: u32) -> Result<SamplingParams, Failure> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            bias: self.logit_bias.clone(),
            seed: self.seed,
            logprobs,
        };
        // Token ids are checked against the vocabulary where the model is.
        whole(params.clone(), u32::MAX).map(|_| params)
    }
}

/// Completes and checks settings; the seed comes from the clock if none was given.
pub fn whole(params: SamplingParams, vocabulary: u32) -> Result<Sampling, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let sampling = params.complete(now.map_or(0, |now| now.as_nanos() as u64));
    sampling.checked(vocabulary).map_err(|error| Failure::usage(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_biases_parse_and_malformed_biases_are_errors() {
        assert_eq!(bias("17=-3.5"), Ok((17, -3.5)));
        for wrong in ["17", "=1", "-1=2", "1=x"] {
            assert!(bias(wrong).is_err_and(|error| error.contains("17=-3.5")));
        }
    }
}
