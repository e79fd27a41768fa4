//! What is known of a sequence that generates tokens, and what it waits for.

use super::steps::{Stepped, Wish};
use crate::{
    error::{self, RequestError},
    session::Session,
};
use galaxy_common::{Breadth, Epoch, GenerateOptions, Prompt, Text};
use galaxy_engine::generate::Told;
use galaxy_model::{HeadSpec, generation::SettingsError};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::mpsc;

/// Stops that a request may have, and bytes of one.
const STOPS: usize = 16;
const STOP_BYTES: usize = 256;

/// A sequence on its way.
pub(super) struct Way {
    /// Its place among all sequences by the time when they came.
    pub(super) age: u64,
    /// Which of a client's come first.
    priority: i32,
    /// With its prompt, what was generated, and the rows that it may have in the end.
    pub(super) text: Arc<Text>,
    /// Whether the prompt was written, and not given as tokens.
    written: bool,
    /// Tokens that end it.
    pub(super) ends: Arc<[u32]>,
    /// Rows that are kept, and in which epoch.
    pub(super) kept: Option<(Epoch, u32)>,
    pub(super) breadth: Breadth,
    /// Whether it is to run without others, since a step with them has failed.
    pub(super) alone: bool,
    /// Whether its rows are the same whatever comes behind them.
    pub(super) reusable: bool,
}

impl Way {
    /// One of which nothing is kept.
    pub(super) fn new(
        (age, priority): (u64, i32),
        text: Text,
        written: bool,
        ends: Arc<[u32]>,
        reusable: bool,
    ) -> Self {
        let (text, kept, breadth, alone) = (Arc::new(text), None, Breadth::Few, false);
        Self { age, priority, text, written, ends, kept, breadth, alone, reusable }
    }

    /// The tokens behind which those that are made are to be read.
    pub(super) fn behind(&self) -> &[u32] {
        if self.written { &self.text.tokens[..self.text.prompt] } else { &[] }
    }

    /// How many tokens were made.
    pub(super) fn made(&self) -> u32 {
        (self.text.tokens.len() - self.text.prompt) as u32
    }

    /// How many there is room for still.
    pub(super) fn left(&self) -> u32 {
        self.text.rows - self.text.tokens.len() as u32
    }

    /// Notes a step that ran, which gave so many tokens.
    pub(super) fn ran(&mut self, step: &Stepped, made: u32) {
        // The last token has gone through no layer yet.
        let rows = step.past + step.rows + made.saturating_sub(1);
        self.kept = Some((step.run.epoch, rows));
        self.breadth = step.breadth.unwrap_or(self.breadth);
        self.alone = false;
    }

    /// Notes a step that failed, among so many sequences. Some where it may be tried again when its cluster is
    /// back; none where it may be at once.
    pub(super) fn failed(
        &mut self,
        error: RequestError,
        together: usize,
    ) -> Result<Option<RequestError>, RequestError> {
        match error {
            // Others that came with it had been kept in an epoch that is over.
            RequestError::TextLost { .. } if self.kept.is_none() => Ok(None),
            error if error.passes() => {
                self.kept = None;
                Ok(Some(error))
            }
            // It may be because of another one.
            _ if together > 1 => {
                self.alone = true;
                Ok(None)
            }
            error => Err(error),
        }
    }

    /// What it waits for, and who is told of its tokens.
    pub(super) fn wish(&self, tell: mpsc::UnboundedSender<Told>) -> Wish {
        Wish {
            age: self.age,
            priority: self.priority,
            text: self.text.clone(),
            kept: self.kept,
            left: self.left(),
            breadth: self.breadth,
            ends: self.ends.clone(),
            alone: self.alone,
            reusable: self.reusable,
            tell,
        }
    }
}

impl Session {
    /// Whether the model and its cluster make text.
    pub(super) fn generates(&self) -> Result<(), RequestError> {
        let spec = self.spec();
        let refuse = |why: &str| RequestError::UnsupportedOutput {
            model: self.inner.model.name().to_owned(),
            wanted: "text that goes on".to_owned(),
            why: why.to_owned(),
        };
        if !(spec.causal && matches!(spec.head, HeadSpec::Language { .. })) {
            return Err(refuse("it predicts no next token: take a decoder, as gpt2 or llama"));
        }
        match self.outlook().cache.rows {
            0 => Err(refuse("this cluster keeps nothing of texts: give it cache_rows")),
            _ => Ok(()),
        }
    }

    /// Most tokens of a prompt with what is generated after it; 0 where nothing is generated.
    pub fn context(&self) -> u32 {
        self.generates().map_or(0, |()| self.going_limit().0)
    }

    /// The same, and what limits them.
    fn going_limit(&self) -> (u32, &'static str) {
        let (spec, cache) = (self.spec(), self.outlook().cache);
        let limits = [(spec.position_limit(), spec.limited_by()), (cache.rows, error::CACHE_ROWS)];
        limits.into_iter().min_by_key(|(limit, _)| *limit).expect("the array has two elements")
    }

    /// The tokens of a prompt, and how long that took. Those that are given are checked with all others.
    async fn prompt(&self, prompt: Prompt) -> Result<(Vec<u32>, Duration), RequestError> {
        let text = match prompt {
            Prompt::Ids(ids) => return Ok((ids, Duration::ZERO)),
            Prompt::Text(text) => text,
        };
        self.read(move |session, _| {
            let tokenizer = session.inner.files.tokenizer()?;
            let limit = session.going_limit();
            let _tokenizing = session.tokenizing(&text, limit, || "the prompt".to_owned())?;
            let tokens = tokenizer.encode(&text, None);
            tokens.map_err(|e| RequestError::Invalid { why: format!("prompt: {e}") })
        })
        .await
    }

    /// Checks what is asked. Gives the strings that end the text, too, and how long tokenising took.
    pub(super) async fn way(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
    ) -> Result<(Way, Vec<String>, Duration), RequestError> {
        let invalid = |why: String| RequestError::Invalid { why };
        // What is wrong with the request is said before anything is made of it.
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
            settled = generation.settle(settled, prompt, spec.vocabulary).map_err(|e| match e {
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
        let (limit, limited_by) = self.going_limit();
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
        let slot = self.inner.counts.texts.fetch_add(1, Ordering::Relaxed);
        if generated.len() > most as usize {
            let (have, limit) = (generated.len(), (limit - prompt as u32).min(most));
            let why = format!("{have} tokens were generated already, and {limit} are to be in all");
            return Err(invalid(why));
        }
        self.check_known(0, &generated)?;
        let text = Text { slot, rows: prompt as u32 + most, sampling, tokens, prompt };
        let (age, reusable) = (self.inner.steps.arrive(), !spec.turns_by_length());
        let way = Way::new((age, priority), text, written, ends.into(), reusable);
        Ok((way, stop, took))
    }
}

/// Checks the strings that end a text.
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
