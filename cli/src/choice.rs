//! How tokens are chosen: what `galaxy generate` and `galaxy chat` let a person say of it.

use super::{failure::Failure, generation_config::GenerationConfig};
use clap::Args;
use galaxy_common::{Sampling, SamplingParams};
use std::time::{SystemTime, UNIX_EPOCH};

/// How tokens are chosen. What is not given is as the model's `generation_config.json` says.
#[derive(Args, Debug)]
#[command(next_help_heading = "Choice of tokens")]
pub struct Choice {
    /// Where the settings come from that are not given here.
    #[arg(long, value_enum, default_value_t)]
    pub generation_config: GenerationConfig,
    /// Logits are divided by it; 0 takes the likeliest token. Default: as the model says, else 0.
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// So many of the likeliest tokens stay; 0: all.
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// The likeliest tokens stay that have this mass together.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Tokens stay that are at least so likely, compared with the likeliest.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Makes tokens of the text less likely, above 1.
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Taken from the logits of tokens that were chosen before.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    presence_penalty: Option<f32>,
    /// Taken from them for each time.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    frequency_penalty: Option<f32>,
    /// Added to the logit of a token: ID=X; may be given several times.
    #[arg(long, value_name = "ID=X", value_parser = bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same text. Default: another each time.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("{text:?} is not a token id and a number: write 17=-3.5");
    let (token, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((token.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

impl Choice {
    /// As it was given, which is checked; so many of the likeliest tokens are told at each place.
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
        // What of it the vocabulary has is seen where the model is.
        whole(params.clone(), u32::MAX).map(|_| params)
    }
}

/// All of it, with a seed of its own if none was given.
pub fn whole(params: SamplingParams, vocabulary: u32) -> Result<Sampling, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let sampling = params.complete(now.map_or(0, |now| now.as_nanos() as u64));
    sampling.checked(vocabulary).map_err(|error| Failure::usage(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_are_read() {
        assert_eq!(bias("17=-3.5"), Ok((17, -3.5)));
        for wrong in ["17", "=1", "-1=2", "1=x"] {
            assert!(bias(wrong).is_err_and(|error| error.contains("17=-3.5")));
        }
    }
}
