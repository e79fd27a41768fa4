//! Texts that go on, token by token.

use crate::{answer::Report, error::ClientError, pieces::report};
use futures_util::{Stream, stream};
use galaxy_common::{Fallback, RequestId, SamplingParams};
use galaxy_proto::{
    WAITING,
    v1::{self, generate_event::Event},
};
use serde::Serialize;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

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
pub struct Token {
    /// Its id.
    pub token: u32,
    /// Its log-probability, before anything is done to logits.
    pub logprob: f32,
    /// The likeliest tokens with theirs, as many as `logprobs` says.
    pub top: Vec<(u32, f32)>,
    /// What it adds to the text, as far as that is sure.
    pub text: String,
}

/// The end of a text.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Done {
    /// `stop` (a token or a string that ends texts) or `length`.
    pub finish: String,
    /// What was held back of the text.
    pub text: String,
    /// What it cost.
    pub report: Report,
}

/// What comes of a text that goes on.
#[derive(Clone, PartialEq, Debug)]
pub enum Generated {
    /// A token.
    Token(Token),
    /// The last thing.
    Done(Done),
}

/// A text on its way. Dropping it ends it.
#[derive(Debug)]
pub struct Generating {
    /// Its number, for a trace.
    pub request: RequestId,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The seed that was taken.
    pub seed: u64,
    /// Whether there is text; without, the model has no tokenizer, and there are only ids.
    pub text: bool,
    events: tonic::Streaming<v1::GenerateEvent>,
    patience: Duration,
    done: bool,
}

impl Generating {
    /// Waits for the beginning until then, and if other texts have the room for as long as they have it.
    pub(crate) async fn begin(
        mut events: tonic::Streaming<v1::GenerateEvent>,
        mut until: Instant,
        patience: Duration,
    ) -> Result<Self, ClientError> {
        let first = loop {
            match message(&mut events, until, patience).await? {
                // The next sign may be as far away as they are.
                Some(Event::Waiting(_)) => until = Instant::now() + patience + WAITING,
                first => break first,
            }
        };
        let Some(Event::Begun(v1::GenerateBegun { request, prompt_tokens, seed, text })) = first
        else {
            let what = "a text that goes on has no beginning".to_owned();
            return Err(ClientError::Malformed { what });
        };
        let request = RequestId(request);
        Ok(Self { request, prompt_tokens, seed, text, events, patience, done: false })
    }

    /// What comes next; nothing behind the end.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// As [`Client::embed`](crate::Client::embed); [`ClientError::Timeout`] when nothing comes for as
    /// long as a call may take.
    pub async fn next(&mut self) -> Result<Option<Generated>, ClientError> {
        if self.done {
            return Ok(None);
        }
        let until = Instant::now() + self.patience;
        let next = generated(message(&mut self.events, until, self.patience).await?);
        self.done = !matches!(next, Ok(Generated::Token(_)));
        next.map(Some)
    }

    /// All of it, as a stream.
    pub fn into_stream(self) -> impl Stream<Item = Result<Generated, ClientError>> {
        stream::try_unfold(self, |mut generating| async move {
            Ok(generating.next().await?.map(|generated| (generated, generating)))
        })
    }
}

/// What comes of what is said behind the beginning.
pub(crate) fn generated(event: Option<Event>) -> Result<Generated, ClientError> {
    match event {
        Some(Event::Token(v1::GeneratedToken { token, logprob, top, text })) => {
            let top = top.iter().map(|likely| (likely.token, likely.logprob)).collect();
            Ok(Generated::Token(Token { token, logprob, top, text }))
        }
        Some(Event::Done(v1::GenerateDone { finish, text, report: cost })) => {
            Ok(Generated::Done(Done { finish, text, report: report(cost)? }))
        }
        Some(Event::Begun(_) | Event::Waiting(_)) | None => {
            let what = "a text that goes on broke off before its end".to_owned();
            Err(ClientError::Malformed { what })
        }
    }
}

/// The next thing that is said, if it comes until then.
async fn message(
    events: &mut tonic::Streaming<v1::GenerateEvent>,
    until: Instant,
    timeout: Duration,
) -> Result<Option<Event>, ClientError> {
    let event = timeout_at(until, events.message()).await;
    Ok(event.map_err(|_| ClientError::Timeout { timeout })??.and_then(|event| event.event))
}

/// What a coordinator is asked.
pub(crate) fn request(prompt: Prompt, options: GenerateOptions) -> v1::GenerateRequest {
    let GenerateOptions { max_tokens, sampling, stop, ignore_end, fallback } = options;
    let (prompt, ids) = match prompt {
        Prompt::Text(text) => (text, Vec::new()),
        Prompt::Ids(ids) => (String::new(), ids),
    };
    let bias = sampling.bias.iter().map(|&(token, bias)| v1::LogitBias { token, bias });
    let sampling = v1::Sampling {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition,
        presence_penalty: sampling.presence,
        frequency_penalty: sampling.frequency,
        logit_bias: bias.collect(),
        seed: sampling.seed,
        logprobs: sampling.logprobs,
    };
    let model_defaults = fallback
        .map(|Fallback { temperature, max_tokens }| v1::ModelDefaults { temperature, max_tokens });
    let sampling = Some(sampling);
    v1::GenerateRequest { prompt, ids, max_tokens, sampling, stop, ignore_end, model_defaults }
}
