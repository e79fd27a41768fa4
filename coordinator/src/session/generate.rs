//! Texts that go on: stints of tokens, in turns with other requests, over changes of the plan.

use super::{READY_WAIT, Report, Session, answer::Answer};
use crate::{
    error::{self, RequestError},
    fair::Fair,
    fleet::{Going, Task, blocking},
};
use galaxy_common::{
    BatchShape, Breadth, Cache, Epoch, GenerateOptions, GeneratedToken, Prompt, RequestId, Segment,
    Stint, Text, Wanted, plan::Phase,
};
use galaxy_engine::generate::{STINT, Told, token};
use galaxy_model::{
    HeadSpec,
    generation::{Ending, SettingsError},
    tokenizer::TextStream,
};
use galaxy_proto::WAITING;
use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    sync::mpsc::{self, Permit},
    time::{Instant, interval, sleep_until, timeout, timeout_at},
};

/// How long a text waits for its cluster to come back before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a text that is not read keeps others from its room.
const UNREAD: Duration = Duration::from_secs(10);
/// Between looks at a cluster that is gone.
const PAUSE: Duration = Duration::from_millis(100);
/// Stops that a request may have, and bytes of one.
const STOPS: usize = 16;
const STOP_BYTES: usize = 256;

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// By a token or a string that ends texts.
    Stop,
    /// It has as many tokens as were asked for, or as there is room for.
    Length,
}

impl std::fmt::Display for Finish {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Length => "length",
        })
    }
}

/// What is said of a text that goes on.
#[derive(Debug, Clone)]
pub enum Said {
    /// It waits for room behind others, before it begins. Again and again.
    Waiting,
    /// First.
    Begun {
        /// The request's number.
        request: RequestId,
        /// Tokens of the prompt.
        prompt: u32,
        /// The seed that is taken.
        seed: u64,
        /// Whether there is text, and not only ids.
        text: bool,
    },
    /// A token.
    Token(GeneratedToken),
    /// Last.
    Done {
        /// Why.
        finish: Finish,
        /// The rest of the text.
        text: String,
        /// What it cost.
        report: Report,
    },
}

/// Where what is said goes.
pub type Listener = mpsc::Sender<Result<Said, RequestError>>;

/// A text on its way.
struct Way {
    /// With its prompt, and what was made.
    text: Arc<Text>,
    /// Whether the prompt was written, and not given as tokens.
    written: bool,
    /// Tokens that end it.
    ends: Arc<[u32]>,
    /// Rows that are kept, and in which epoch.
    kept: Option<(Epoch, u32)>,
    breadth: Breadth,
}

impl Way {
    /// The tokens behind which those that are made are to be read.
    fn behind(&self) -> &[u32] {
        if self.written { &self.text.tokens[..self.text.prompt] } else { &[] }
    }

    fn made(&self) -> u32 {
        (self.text.tokens.len() - self.text.prompt) as u32
    }

    /// How many there is room for still.
    fn left(&self) -> u32 {
        self.text.rows - self.text.tokens.len() as u32
    }

    /// The rows that go through next: at most so many. Tells of what is made.
    fn next(&self, chunk: u32, tell: mpsc::UnboundedSender<Told>) -> Result<Task, RequestError> {
        let (epoch, past) = self.kept.unwrap_or_default();
        let left = self.text.tokens.len() as u32 - past;
        let rows = left.min(chunk.max(1));
        let (phase, count) = match left == 1 && past > 0 {
            true => (Phase::Decode, STINT.min(self.left())),
            false => (Phase::Prefill, 1),
        };
        let stint = (left == rows).then(|| Stint { phase, count, stop: self.ends.clone() });
        let wanted = stint.as_ref().map_or(Wanted::Nothing, |_| Wanted::Token(self.breadth));
        let segment = Segment { slot: self.text.slot, past, kept: true, rows, wanted };
        let shape = BatchShape::new(vec![segment])
            .map_err(|e| RequestError::Internal { why: e.to_string() })?;
        let some = &self.text.tokens[past as usize..(past + rows) as usize];
        let begins = self.kept.is_none().then(|| self.text.clone());
        let going = Going { begins, epoch, stint, tell };
        Ok(Task { going: Some(going), ..Task::new(shape, some) })
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

/// Whether a text may go on after this.
fn passes(error: &RequestError) -> bool {
    match error {
        RequestError::DeviceFailed { retryable, .. } => *retryable,
        RequestError::Unavailable { .. }
        | RequestError::DeviceLost { .. }
        | RequestError::TextLost { .. } => true,
        _ => false,
    }
}

impl Session {
    /// Goes on with a text, and says each token as it is made. Ends when nobody listens any more,
    /// after the stint that runs then. Runs to its end even where the cluster changes its plan or
    /// loses a device meanwhile, if within 30 s that comes back or the others go on without it.
    ///
    /// # Cancel safety
    /// Not to be dropped before it is done: room is given back in its end.
    pub async fn generate(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
        timeout: Option<Duration>,
        listener: Listener,
    ) {
        let result = self.go_on(prompt, options, timeout, &listener).await;
        let count = if result.is_ok() { &self.inner.served } else { &self.inner.failed };
        count.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = result {
            drop(listener.send_timeout(Err(error), PATIENCE).await);
        }
    }

    async fn go_on(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
        timeout: Option<Duration>,
        listener: &Listener,
    ) -> Result<(), RequestError> {
        let begun = Instant::now();
        let allowed = timeout.unwrap_or(Duration::from_secs(24 * 3600));
        let deadline = begun + allowed;
        let late = RequestError::Deadline { allowed, ours: false };
        self.generates()?;
        let mut answer = self.begin()?;
        let (mut way, stop, tokenized) = self.way(prompt, options).await?;
        answer.tokenized(tokenized);
        let rows = Cache::taken(way.text.rows);
        let room = self.inner.room.take(self.caller.who(), rows);
        let waits = async {
            let mut ticks = interval(WAITING);
            loop {
                ticks.tick().await;
                // One that does not read now reads later.
                drop(listener.try_send(Ok(Said::Waiting)));
            }
        };
        let _room = tokio::select! {
            biased;
            room = timeout_at(deadline, room) => room.map_err(|_| late.clone())?,
            // Whoever goes meanwhile leaves the queue.
            () = listener.closed() => return Ok(()),
            never = waits => match never {},
        };
        // Who is told that it begins is not told to try again.
        tokio::select! {
            biased;
            ready = self.ready(Instant::now() + READY_WAIT) => ready?,
            () = listener.closed() => return Ok(()),
            () = sleep_until(deadline) => return Err(late),
        }
        let tokenizer = self.inner.tokenizer.as_ref().ok();
        let stream = tokenizer.map(|tokenizer| tokenizer.stream(way.behind()));
        let ending = Ending::new(stop);
        let queue = VecDeque::new();
        let room = &self.inner.room;
        let mut telling = Telling { stream, ending, queue, finish: None, listener, room };
        let said = Said::Begun {
            request: answer.request(),
            prompt: way.text.prompt as u32,
            seed: way.text.sampling.seed,
            text: telling.stream.is_some(),
        };
        let result = match telling.say(said).await {
            true => self.stints(&mut way, &mut answer, &mut telling, (deadline, late)).await,
            false => Ok(None),
        };
        if let Some((epoch, _)) = way.kept {
            self.inner.fleet.forget(epoch, way.text.slot).await;
        }
        answer.count(way.text.tokens.len() as u64);
        let report = answer.end();
        if let Some(finish) = result? {
            let text = telling.rest()?;
            telling.say(Said::Done { finish, text, report }).await;
        }
        Ok(())
    }

    /// Makes all tokens. Nothing when nobody listens any more.
    async fn stints(
        &self,
        way: &mut Way,
        answer: &mut Answer<'_>,
        telling: &mut Telling<'_>,
        (deadline, late): (Instant, RequestError),
    ) -> Result<Option<Finish>, RequestError> {
        let mut patience = None;
        loop {
            if way.left() == 0 {
                return Ok(Some(Finish::Length));
            }
            if telling.listener.is_closed() {
                return Ok(None);
            }
            if Instant::now() >= deadline {
                return Err(late);
            }
            let (tell, mut told) = mpsc::unbounded_channel();
            // What a program may have depends on the plan, which may be another.
            let task = way.next(self.outlook().max_rows, tell)?;
            let (before, segment) = (way.made(), task.shape.segments()[0]);
            let begun = Instant::now();
            let turn = tokio::select! {
                turn = answer.turn() => turn,
                // Nobody waits in the queue for who does not want it.
                () = telling.listener.closed() => return Ok(None),
                () = sleep_until(deadline) => return Err(late),
            };
            let ran = {
                let running = async { answer.run_in(turn?, task).await };
                tokio::pin!(running);
                loop {
                    tokio::select! {
                        biased;
                        Some(one) = told.recv() => telling.take(way, one),
                        ran = &mut running => break ran,
                    }
                }
            };
            while let Ok(one) = told.try_recv() {
                telling.take(way, one);
            }
            if let Some(finish) = telling.finish.take() {
                if let (Ok(run), None) = (&ran, way.kept) {
                    // Where room is to be given back.
                    way.kept = Some((run.epoch, 0));
                }
                telling.flush().await;
                return finish.map(Some);
            }
            let made = way.made() - before;
            if made > 0 {
                patience = None;
            }
            match ran {
                Ok(run) => {
                    // The last token has gone through no layer yet.
                    let rows = segment.rows + made.saturating_sub(1);
                    way.kept = Some((run.epoch, segment.past + rows));
                    way.breadth = run.breadth.unwrap_or(way.breadth);
                    // What goes well is no waiting.
                    if let Some(until) = &mut patience {
                        *until += begun.elapsed();
                    }
                }
                // Once something was told, or is kept.
                Err(error)
                    if passes(&error)
                        && (way.kept.is_some() || patience.is_some() || way.made() > 0) =>
                {
                    way.kept = None;
                    let until = *patience.get_or_insert_with(|| Instant::now() + PATIENCE);
                    if Instant::now() >= until {
                        return Err(error);
                    }
                    tracing::info!(request = %answer.request(), %error, "a text begins again");
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
            if !telling.flush().await {
                return Ok(None);
            }
        }
    }

    /// Whether the model and its cluster make text.
    fn generates(&self) -> Result<(), RequestError> {
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

    /// Most tokens of a prompt with what is generated after it, and what limits them.
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
        let session = self.clone();
        blocking(move || {
            let begun = Instant::now();
            let tokenizer = session.tokenizer()?;
            let limit = session.going_limit();
            let _tokenizing = session.tokenizing(&text, limit, || "the prompt".to_owned())?;
            let tokens = tokenizer.encode(&text, None);
            let tokens =
                tokens.map_err(|e| RequestError::Invalid { why: format!("prompt: {e}") })?;
            Ok((tokens, begun.elapsed()))
        })
        .await?
    }

    /// Checks what is asked. Gives the strings that end the text, too, and how long tokenising took.
    async fn way(
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
            let model = |why: &String| RequestError::Model { why: why.clone() };
            let generation = self.inner.generation.as_ref().map_err(model)?;
            if !settled.ignore_end {
                ends.clone_from(&generation.ends);
            }
            let prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            settled = generation.settle(settled, prompt, spec.vocabulary).map_err(|e| match e {
                SettingsError::NotDone { .. } => RequestError::Model { why: e.to_string() },
                SettingsError::NoRoom { .. } => invalid(e.to_string()),
            })?;
        }
        let GenerateOptions { sampling, max_tokens, stop, .. } = settled;
        check_stop(&stop)?;
        if !stop.is_empty() {
            self.tokenizer()?;
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
        let vocabulary = spec.vocabulary;
        if let Some(&token) = tokens.iter().find(|&&id| id >= vocabulary) {
            return Err(RequestError::UnknownToken { index: 0, token, vocabulary });
        }
        let (prompt, room) = (tokens.len(), limit - tokens.len() as u32);
        let most = if max_tokens == 0 { room } else { max_tokens.min(room) };
        let slot = self.inner.slots.fetch_add(1, Ordering::Relaxed);
        let text = Text { slot, rows: prompt as u32 + most, sampling, tokens, prompt };
        let (text, ends) = (Arc::new(text), ends.into());
        let way = Way { text, written, ends, kept: None, breadth: Breadth::Few };
        Ok((way, stop, took))
    }
}

/// Says things of a text.
struct Telling<'a> {
    stream: Option<TextStream<'a>>,
    ending: Ending,
    /// What the listener had no room for.
    queue: VecDeque<Said>,
    /// The text has ended, or cannot be read.
    finish: Option<Result<Finish, RequestError>>,
    listener: &'a Listener,
    /// What others may wait for.
    room: &'a Fair,
}

impl Telling<'_> {
    /// Takes a token into the text, if that has not ended, and says it if there is room.
    fn take(&mut self, way: &mut Way, told: Told) {
        if self.finish.is_some() {
            return;
        }
        let id = told[0] as u32;
        Arc::make_mut(&mut way.text).tokens.push(id);
        let mut text = String::new();
        if way.ends.contains(&id) {
            self.finish = Some(Ok(Finish::Stop));
        } else if let Some(stream) = &mut self.stream {
            match stream.push(id) {
                Ok(piece) => text.push_str(self.ending.add(&piece)),
                Err(error) => {
                    self.finish = Some(Err(RequestError::Model { why: error.to_string() }));
                    return;
                }
            }
            if self.ending.stopped() {
                self.finish = Some(Ok(Finish::Stop));
            }
        }
        self.queue.push_back(Said::Token(token(&told, text)));
        while let Some(said) = self.queue.pop_front() {
            use mpsc::error::TrySendError::{Closed, Full};
            match self.listener.try_send(Ok(said)) {
                Ok(()) => {}
                Err(Full(Ok(said))) => return self.queue.push_front(said),
                Err(Full(Err(_)) | Closed(_)) => return self.queue.clear(),
            }
        }
    }

    /// Says what waits. False when nobody listens any more, or takes it.
    async fn flush(&mut self) -> bool {
        while let Some(said) = self.queue.pop_front() {
            if !self.say(said).await {
                return false;
            }
        }
        true
    }

    /// Waits until the listener takes something. Who does not read is given up sooner when others wait
    /// for its room.
    async fn reads(&self) -> Option<Permit<'_, Result<Said, RequestError>>> {
        for _ in 0..PATIENCE.as_secs() / UNREAD.as_secs() {
            if let Ok(permit) = timeout(UNREAD, self.listener.reserve()).await {
                return permit.ok();
            }
            if self.room.waiting() > 0 {
                return None;
            }
        }
        None
    }

    async fn say(&self, said: Said) -> bool {
        let Some(permit) = self.reads().await else { return false };
        permit.send(Ok(said));
        true
    }

    /// The text that was held back.
    fn rest(&mut self) -> Result<String, RequestError> {
        if let Some(stream) = self.stream.take().filter(|_| !self.ending.stopped()) {
            let rest = stream.finish();
            let rest = rest.map_err(|e| RequestError::Model { why: e.to_string() })?;
            let sure = self.ending.add(&rest).to_owned();
            return Ok(sure + self.ending.rest());
        }
        Ok(self.ending.rest().to_owned())
    }
}
