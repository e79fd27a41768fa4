//! Texts that go on, over both wires.

use super::ConvertError;
use crate::v1;
use galaxy_common::{
    Fallback, GenerateOptions, GeneratedToken, Prompt, SamplingParams, Stint, Text, plan::Phase,
};

/// What a coordinator is asked of a text that goes on.
pub fn generate_request(prompt: Prompt, options: GenerateOptions) -> v1::GenerateRequest {
    let GenerateOptions { max_tokens, sampling, stop, ignore_end, fallback } = options;
    let (prompt, ids) = match prompt {
        Prompt::Text(text) => (text, Vec::new()),
        Prompt::Ids(ids) => (String::new(), ids),
    };
    let model_defaults = fallback
        .map(|Fallback { temperature, max_tokens }| v1::ModelDefaults { temperature, max_tokens });
    let sampling = Some(sampling.into());
    v1::GenerateRequest { prompt, ids, max_tokens, sampling, stop, ignore_end, model_defaults }
}

/// What is asked of a text that goes on.
///
/// # Errors
/// When the request has a text and tokens.
pub fn generate_options(
    request: v1::GenerateRequest,
) -> Result<(Prompt, GenerateOptions), ConvertError> {
    let v1::GenerateRequest { prompt, ids, max_tokens, sampling, stop, ignore_end, model_defaults } =
        request;
    let prompt = match (prompt.is_empty(), ids.is_empty()) {
        (false, false) => return Err(ConvertError::Prompt),
        (true, false) => Prompt::Ids(ids),
        (_, true) => Prompt::Text(prompt),
    };
    let fallback = model_defaults
        .map(|v1::ModelDefaults { temperature, max_tokens }| Fallback { temperature, max_tokens });
    let sampling = sampling.unwrap_or_default().into();
    Ok((prompt, GenerateOptions { max_tokens, sampling, stop, ignore_end, fallback }))
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

impl TryFrom<&Text> for v1::GoingText {
    type Error = ConvertError;
    fn try_from(text: &Text) -> Result<Self, ConvertError> {
        let Text { slot, rows, sampling, tokens, prompt } = text;
        let tokens = if sampling.looks_back() { tokens.clone() } else { Vec::new() };
        let sampling = postcard::to_stdvec(sampling).map_err(|_| ConvertError::Sampling)?;
        Ok(Self { slot: *slot, rows: *rows, sampling, tokens, prompt: *prompt as u32 })
    }
}

impl TryFrom<v1::GoingText> for Text {
    type Error = ConvertError;
    fn try_from(text: v1::GoingText) -> Result<Self, ConvertError> {
        let v1::GoingText { slot, rows, sampling, tokens, prompt } = text;
        let sampling = postcard::from_bytes(&sampling).map_err(|_| ConvertError::Sampling)?;
        Ok(Self { slot, rows, sampling, tokens, prompt: prompt as usize })
    }
}

impl From<&Stint> for v1::Making {
    fn from(Stint { phase, count, stop }: &Stint) -> Self {
        let decode = *phase == Phase::Decode;
        Self { count: *count, stop: stop.to_vec(), decode, tell: false }
    }
}

impl From<v1::Making> for Stint {
    fn from(v1::Making { count, stop, decode, .. }: v1::Making) -> Self {
        let phase = if decode { Phase::Decode } else { Phase::Prefill };
        Self { phase, count, stop: stop.into() }
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
    fn what_is_asked_of_a_text_survives() {
        let options = GenerateOptions {
            max_tokens: 5,
            sampling: sampling(),
            stop: vec!["x".to_owned()],
            ignore_end: true,
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
    fn tokens_survive() {
        let top = vec![(17, -0.5), (3, -1.5)];
        let token = GeneratedToken { token: 17, logprob: -0.5, top, text: " is".into() };
        assert_eq!(GeneratedToken::from(v1::GeneratedToken::from(token.clone())), token);
    }

    #[test]
    fn texts_and_stints_survive() {
        let mut text = Text {
            slot: 3,
            rows: 9,
            sampling: sampling().complete(1),
            tokens: vec![5, 6],
            prompt: 1,
        };
        let survives = |text: &Text| Text::try_from(v1::GoingText::try_from(text)?);
        assert_eq!(survives(&text).as_ref(), Ok(&text));
        text.sampling = Sampling::greedy();
        let without = Text { tokens: Vec::new(), ..text.clone() };
        assert_eq!(survives(&text), Ok(without), "nothing looks back at its tokens");
        let unread = v1::GoingText { sampling: vec![1], ..Default::default() };
        assert_eq!(Text::try_from(unread), Err(ConvertError::Sampling));
        for phase in [Phase::Prefill, Phase::Decode] {
            let stint = Stint { phase, count: 16, stop: [2, 7].into() };
            assert_eq!(Stint::from(v1::Making::from(&stint)), stint);
        }
    }
}
