//! Conversions of text generation, between clients and the coordinator and between the coordinator
//! and workers.

use super::ConvertError;
use crate::v1;
use galaxy_common::{
    Burst, Fallback, GenerateOptions, GeneratedToken, Prompt, SamplingParams, Sequence, TokenGoal,
    plan::Phase,
};
use std::sync::Arc;

/// The request that asks a coordinator to generate.
pub fn generate_request(prompt: Prompt, options: GenerateOptions) -> v1::GenerateRequest {
    let GenerateOptions { max_tokens, sampling, stop, ignore_end, priority, generated, fallback } =
        options;
    let (prompt, ids) = match prompt {
        Prompt::Text(text) => (text, Vec::new()),
        Prompt::Ids(ids) => (String::new(), ids),
    };
    let model_defaults = fallback
        .map(|Fallback { temperature, max_tokens }| v1::ModelDefaults { temperature, max_tokens });
    let sampling = Some(sampling.into());
    v1::GenerateRequest {
        prompt,
        ids,
        max_tokens,
        sampling,
        stop,
        ignore_end,
        model_defaults,
        generated,
        priority,
    }
}

/// The prompt and the options of a request to generate.
///
/// # Errors
/// When the request has both a prompt and ids.
pub fn generate_options(
    request: v1::GenerateRequest,
) -> Result<(Prompt, GenerateOptions), ConvertError> {
    let v1::GenerateRequest {
        prompt,
        ids,
        max_tokens,
        sampling,
        stop,
        ignore_end,
        model_defaults,
        generated,
        priority,
    } = request;
    let prompt = match (prompt.is_empty(), ids.is_empty()) {
        (false, false) => return Err(ConvertError::Prompt),
        (true, false) => Prompt::Ids(ids),
        (_, true) => Prompt::Text(prompt),
    };
    let fallback = model_defaults
        .map(|v1::ModelDefaults { temperature, max_tokens }| Fallback { temperature, max_tokens });
    let sampling = sampling.unwrap_or_default().into();
    let options =
        GenerateOptions { max_tokens, sampling, stop, ignore_end, priority, generated, fallback };
    Ok((prompt, options))
}

impl From<SamplingParams> for v1::Sampling {
    fn from(params: SamplingParams) -> Self {
        let bias = params.bias.into_iter().map(|(token, bias)| v1::LogitBias { token, bias });
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition,
            presence_penalty: params.presence,
            frequency_penalty: params.frequency,
            logit_bias: bias.collect(),
            seed: params.seed,
            logprobs: params.logprobs,
        }
    }
}

impl From<v1::Sampling> for SamplingParams {
    fn from(sampling: v1::Sampling) -> Self {
        Self {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition: sampling.repetition_penalty,
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            bias: sampling.logit_bias.iter().map(|bias| (bias.token, bias.bias)).collect(),
            seed: sampling.seed,
            logprobs: sampling.logprobs,
        }
    }
}

impl From<GeneratedToken> for v1::GeneratedToken {
    fn from(GeneratedToken { token, logprob, top, text }: GeneratedToken) -> Self {
        let likely = |(token, logprob)| v1::Likely { token, logprob };
        Self { token, logprob, top: top.into_iter().map(likely).collect(), text }
    }
}

impl From<v1::GeneratedToken> for GeneratedToken {
    fn from(v1::GeneratedToken { token, logprob, top, text }: v1::GeneratedToken) -> Self {
        let top = top.iter().map(|likely| (likely.token, likely.logprob)).collect();
        Self { token, logprob, top, text }
    }
}

/// The wire form of a sequence that begins, with the blocks of the KV cache that hold its rows.
///
/// # Errors
/// When its sampling settings cannot be written.
pub fn sequence_to_wire(
    sequence: &Sequence,
    blocks: &[u32],
) -> Result<v1::SequenceStart, ConvertError> {
    let Sequence { slot, rows, sampling, tokens, prompt } = sequence;
    let tokens = tokens.clone();
    let sampling = postcard::to_stdvec(sampling).map_err(|_| ConvertError::Sampling)?;
    let (prompt, blocks) = (*prompt as u32, blocks.to_vec());
    Ok(v1::SequenceStart { slot: *slot, rows: *rows, sampling, tokens, prompt, blocks })
}

/// A sequence that begins, from its wire form, with the blocks of the KV cache that hold its rows.
///
/// # Errors
/// When its sampling settings cannot be read.
pub fn sequence_from_wire(
    sequence: v1::SequenceStart,
) -> Result<(Sequence, Arc<[u32]>), ConvertError> {
    let v1::SequenceStart { slot, rows, sampling, tokens, prompt, blocks } = sequence;
    let sampling = postcard::from_bytes(&sampling).map_err(|_| ConvertError::Sampling)?;
    Ok((Sequence { slot, rows, sampling, tokens, prompt: prompt as usize }, blocks.into()))
}

impl From<&Burst> for v1::Burst {
    fn from(Burst { phase, goals, steps, row_cost }: &Burst) -> Self {
        let goal = |goal: &TokenGoal| v1::TokenGoal { count: goal.count, stop: goal.stop.to_vec() };
        let (goals, decode) = (goals.iter().map(goal).collect(), *phase == Phase::Decode);
        let (steps, row_cost) = (*steps, row_cost.unwrap_or(0.0));
        Self { goals, decode, report_steps: false, steps, row_cost }
    }
}

impl From<v1::Burst> for Burst {
    fn from(v1::Burst { goals, decode, steps, row_cost, .. }: v1::Burst) -> Self {
        let phase = if decode { Phase::Decode } else { Phase::Prefill };
        let row_cost = Some(row_cost).filter(|cost| cost.is_finite() && *cost > 0.0);
        let goal = |goal: v1::TokenGoal| TokenGoal { count: goal.count, stop: goal.stop.into() };
        Self { phase, goals: goals.into_iter().map(goal).collect(), steps, row_cost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_common::Sampling;

    fn sampling() -> SamplingParams {
        SamplingParams {
            temperature: Some(0.5),
            top_k: Some(3),
            top_p: Some(0.25),
            min_p: Some(0.125),
            repetition: Some(1.5),
            presence: Some(-1.0),
            frequency: Some(2.0),
            bias: vec![(7, -3.5)],
            seed: Some(9),
            logprobs: 2,
        }
    }

    #[test]
    fn generate_requests_survive_conversion() {
        let options = GenerateOptions {
            max_tokens: 5,
            sampling: sampling(),
            stop: vec!["x".to_owned()],
            ignore_end: true,
            priority: -3,
            generated: vec![7, 300],
            fallback: Some(Fallback { temperature: 1.0, max_tokens: 16 }),
        };
        for asked in [
            (Prompt::from("a"), options),
            (Prompt::from(vec![1, 2]), GenerateOptions::default()),
            (Prompt::from(""), GenerateOptions { fallback: None, ..GenerateOptions::default() }),
        ] {
            let (prompt, options) = asked.clone();
            assert_eq!(generate_options(generate_request(prompt, options)), Ok(asked));
        }
        let both = v1::GenerateRequest { ids: vec![1], prompt: "a".into(), ..Default::default() };
        assert_eq!(generate_options(both), Err(ConvertError::Prompt));
    }

    #[test]
    fn generated_tokens_survive_conversion() {
        let top = vec![(17, -0.5), (3, -1.5)];
        let token = GeneratedToken { token: 17, logprob: -0.5, top, text: " is".into() };
        assert_eq!(GeneratedToken::from(v1::GeneratedToken::from(token.clone())), token);
    }

    #[test]
    fn sequences_and_bursts_survive_conversion() {
        let mut begun = Sequence {
            slot: 3,
            rows: 9,
            sampling: sampling().complete(1),
            tokens: vec![5, 6],
            prompt: 1,
        };
        let blocks = Arc::from([4, 1]);
        let survives = |begun: &Sequence| sequence_from_wire(sequence_to_wire(begun, &[4, 1])?);
        assert_eq!(survives(&begun), Ok((begun.clone(), Arc::clone(&blocks))));
        begun.sampling = Sampling::greedy();
        assert_eq!(survives(&begun), Ok((begun.clone(), blocks)));
        let unread = v1::SequenceStart { sampling: vec![1], ..Default::default() };
        assert_eq!(sequence_from_wire(unread), Err(ConvertError::Sampling));
        for phase in [Phase::Prefill, Phase::Decode] {
            let goal = |count| TokenGoal { count, stop: [2, 7].into() };
            for row_cost in [None, Some(0.25)] {
                let burst = Burst { phase, goals: vec![goal(16), goal(1)], steps: 9, row_cost };
                assert_eq!(Burst::from(v1::Burst::from(&burst)), burst);
            }
        }
    }
}
