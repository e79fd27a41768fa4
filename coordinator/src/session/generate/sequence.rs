//! The state of a sequence that generates tokens, and what it waits for.

use super::steps::StepRequest;
use crate::{
    error::{self, RequestError},
    session::{Session, stepped::Stepped},
};
use galaxy_common::{CandidateCount, Epoch, GenerateOptions, Prompt, Sequence};
use galaxy_engine::generate::TokenEvent;
use galaxy_model::{HeadSpec, generation::SettingsError};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::mpsc;

/// How many stop strings a request may have, each of at most `STOP_BYTES` bytes.
const STOPS: usize = 16;
const STOP_BYTES: usize = 256;

/// A sequence on its way from step to step.
pub(super) struct SequenceState {
    /// Its number by the order in which sequences came: the oldest has the least.
    pub(super) age: u64,
    /// Its priority among the sequences of its client: lower numbers come first.
    priority: i32,
    /// The sequence: its prompt, what was generated, and the most rows that it may have.
    pub(super) sequence: Arc<Sequence>,
    /// Whether the prompt came as text, and not as tokens.
    written: bool,
    /// The tokens that end it.
    pub(super) ends: Arc<[u32]>,
    /// The epoch in which its rows are cached, and how many are; none where none are.
    pub(super) cached: Option<(Epoch, u32)>,
    pub(super) candidates: CandidateCount,
    /// Whether it is to run without others, since a step with them has failed.
    pub(super) alone: bool,
    /// Whether its rows are the same whatever comes behind them.
    pub(super) reusable: bool,
}

impl SequenceState {
    /// A sequence of which nothing is cached.
    pub(super) fn new(
        (age, priority): (u64, i32),
        sequence: Sequence,
        written: bool,
        ends: Arc<[u32]>,
        reusable: bool,
    ) -> Self {
        let (sequence, cached, candidates, alone) =
            (Arc::new(sequence), None, CandidateCount::Few, false);
        Self { age, priority, sequence, written, ends, cached, candidates, alone, reusable }
    }

    /// The tokens behind which generated ones are read as text: those of a prompt that came as text, or none.
    pub(super) fn prompt_tokens(&self) -> &[u32] {
        if self.written { &self.sequence.tokens[..self.sequence.prompt] } else { &[] }
    }

    /// The rows that are cached, with their epoch, where another sequence may begin with them.
    pub(super) fn reusable_rows(&self) -> Option<(Epoch, u32)> {
        self.cached.filter(|_| self.reusable)
    }

    /// How many tokens were generated.
    pub(super) fn generated(&self) -> u32 {
        (self.sequence.tokens.len() - self.sequence.prompt) as u32
    }

    /// How many more tokens there is room for.
    pub(super) fn left(&self) -> u32 {
        self.sequence.rows - self.sequence.tokens.len() as u32
    }

    /// Notes a step that ran, and generated `made` tokens.
    pub(super) fn ran(&mut self, step: &Stepped, made: u32) {
        // The last token has gone through no layer yet.
        let rows = step.context_len + step.rows + made.saturating_sub(1);
        self.cached = Some((step.run.epoch, rows));
        self.candidates = step.candidates.unwrap_or(self.candidates);
        self.alone = false;
    }

    /// Notes a step that failed, with `together` sequences in it. Some where it may be tried again when its cluster is
    /// back; none where it may be at once.
    pub(super) fn failed(
        &mut self,
        error: RequestError,
        together: usize,
    ) -> Result<Option<RequestError>, RequestError> {
        match error {
            // Others in the step had rows cached in an epoch that is over.
            RequestError::CacheLost { .. } if self.cached.is_none() => Ok(None),
            error if error.passes() => {
                self.cached = None;
                Ok(Some(error))
            }
            // It may have failed because of another sequence.
            _ if together > 1 => {
                self.alone = true;
                Ok(None)
            }
            error => Err(error),
        }
    }

    /// What it waits for; `tell` receives its tokens.
    pub(super) fn request(&self, token_events: mpsc::UnboundedSender<TokenEvent>) -> StepRequest {
        StepRequest {
            age: self.age,
            priority: self.priority,
            sequence: self.sequence.clone(),
            cached: self.cached,
            left: self.left(),
            candidates: self.candidates,
            ends: self.ends.clone(),
            alone: self.alone,
            reusable: self.reusable,
            token_events,
        }
    }
}

impl Session {
    /// Checks that the model and its cluster generate tokens.
    pub(super) fn generates(&self) -> Result<(), RequestError> {
        let spec = self.spec();
        let refuse = |why: &str| RequestError::UnsupportedOutput {
            model: self.inner.model.name().to_owned(),
            wanted: "generated sequence".to_owned(),
            why: why.to_owned(),
        };
        if !(spec.causal && matches!(spec.head, HeadSpec::Language { .. })) {
            return Err(refuse("it predicts no next token: take a decoder, as gpt2 or llama"));
        }
        match self.fleet_status().cache.rows {
            0 => Err(refuse("this cluster has no KV cache: give it kv_cache_tokens")),
            _ => Ok(()),
        }
    }

    /// The context length: the most tokens of a prompt with what is generated after it; 0 where nothing is generated.
    pub fn context(&self) -> u32 {
        self.generates().map_or(0, |()| self.context_limit().0)
    }

    /// The context length, and what limits it.
    fn context_limit(&self) -> (u32, &'static str) {
        let (spec, cache) = (self.spec(), self.fleet_status().cache);
        let limits =
            [(spec.position_limit(), spec.limited_by()), (cache.rows, error::KV_CACHE_TOKENS)];
        limits.into_iter().min_by_key(|(limit, _)| *limit).expect("the array has two elements")
    }

    /// The tokens of a prompt, and how long tokenising took. Token ids that are given are checked later, with all
    /// others.
    async fn prompt(&self, prompt: Prompt) -> Result<(Vec<u32>, Duration), RequestError> {
        let text = match prompt {
            Prompt::Ids(ids) => return Ok((ids, Duration::ZERO)),
            Prompt::Text(text) => text,
        };
        self.read(move |session, _| {
            let tokenizer = session.inner.files.tokenizer()?;
            let limit = session.context_limit();
            let _tokenizing = session.tokenizing(&text, limit, || "the prompt".to_owned())?;
            let tokens = tokenizer.encode(&text, None);
            tokens.map_err(|e| RequestError::Invalid { why: format!("prompt: {e}") })
        })
        .await
    }

    /// Checks a request to generate. Gives its sequence, the strings that end it, and how long tokenising took.
    pub(super) async fn sequence_state(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
    ) -> Result<(SequenceState, Vec<String>, Duration), RequestError> {
        let invalid = |why: String| RequestError::Invalid { why };
        // The request is checked before work is spent on it.
        let whole = options.sampling.clone().complete(0);
        whole.checked(u32::MAX).map_err(|e| invalid(e.to_string()))?;
        let spec = self.spec();
        let written = matches!(prompt, Prompt::Text(_));
        let (tokens, took) = self.prompt(prompt).await?;
        let (mut settled, mut ends) = (options, Vec::new());
        if settled.fallback.is_some() || !settled.ignore_end {
            let generation = self.inner.files.generation()?;
            if !settled.ignore_end {
                ends.clone_from(&generation.ends);
            }
            let prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            settled =
                generation.complete(settled, prompt, spec.vocabulary).map_err(|e| match e {
                    SettingsError::NotDone { .. } => RequestError::Model { why: e.to_string() },
                    SettingsError::NoRoom { .. } => invalid(e.to_string()),
                })?;
        }
        let GenerateOptions { sampling, max_tokens, stop, priority, generated, .. } = settled;
        check_stop(&stop)?;
        if !stop.is_empty() {
            self.inner.files.tokenizer()?;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let sampling = sampling.complete(now.map_or(0, |now| now.as_nanos() as u64));
        let sampling = sampling.checked(spec.vocabulary).map_err(|e| invalid(e.to_string()))?;
        let (limit, limited_by) = self.context_limit();
        if tokens.is_empty() {
            return Err(RequestError::EmptyText { index: 0 });
        }
        if tokens.len() >= limit as usize {
            // One more must fit.
            let (tokens, limit) = (tokens.len(), limit - 1);
            let what = "the prompt".to_owned();
            return Err(RequestError::TooLong { what, tokens, limit, limited_by });
        }
        self.check_known(0, &tokens)?;
        let (prompt, room) = (tokens.len(), limit - tokens.len() as u32);
        let most = if max_tokens == 0 { room } else { max_tokens.min(room) };
        let slot = self.inner.counts.sequences.fetch_add(1, Ordering::Relaxed);
        if generated.len() > most as usize {
            let (have, limit) = (generated.len(), (limit - prompt as u32).min(most));
            let why = format!("{have} tokens were generated already, and {limit} are to be in all");
            return Err(invalid(why));
        }
        self.check_known(0, &generated)?;
        let sequence = Sequence { slot, rows: prompt as u32 + most, sampling, tokens, prompt };
        let (age, reusable) = (self.inner.steps.arrive(), !spec.rotates_by_length());
        let current = SequenceState::new((age, priority), sequence, written, ends.into(), reusable);
        Ok((current, stop, took))
    }
}

/// Checks the strings that end a sequence.
fn check_stop(stop: &[String]) -> Result<(), RequestError> {
    let why = match stop.iter().position(|s| s.is_empty() || s.len() > STOP_BYTES) {
        _ if stop.len() > STOPS => format!("stop has {} strings, and may have {STOPS}", stop.len()),
        None => return Ok(()),
        Some(at) if stop[at].is_empty() => {
            format!("stop[{at}] is empty, which would end every text: leave it out")
        }
        Some(at) => {
            format!("stop[{at}] has {} bytes, and may have {STOP_BYTES}", stop[at].len())
        }
    };
    Err(RequestError::Invalid { why })
}
