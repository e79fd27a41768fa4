//! The token stream of a sequence, for whoever listens.

use super::{PATIENCE, sequence::SequenceState, steps::Steps};
use crate::{error::RequestError, fleet::Readiness, session::Report};
use galaxy_common::{DeviceName, GeneratedToken, RequestId};
use galaxy_engine::generate::{TokenEvent, token};
use galaxy_model::{generation::Ending, tokenizer::TextStream};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::{self, Permit},
    time::timeout,
};

/// How long a client that does not read keeps others from its room.
const UNREAD: Duration = Duration::from_secs(10);

/// Why a sequence ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A token or a string ended the sequence.
    Stop,
    /// The sequence has as many tokens as were asked for, or as there is room for.
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

/// An event in the token stream of a sequence.
#[derive(Debug, Clone)]
pub enum GenerateEvent {
    /// The sequence waits, at its beginning or later: for room behind others, or for a cluster that is not ready. Sent
    /// again and again.
    Waiting {
        /// The device because of which the cluster is not ready, if it is one, and the reason; none if the cluster is
        /// ready.
        unready: Option<(Option<DeviceName>, String)>,
    },
    /// The sequence has begun. Sent before its tokens.
    Begun {
        /// The number of the request.
        request: RequestId,
        /// How many tokens the prompt has.
        prompt: u32,
        /// The seed by which tokens are sampled.
        seed: u64,
        /// Whether tokens come with their text, and not only as ids.
        text: bool,
        /// How many generated tokens the sequence resumes with, which are not sent again.
        generated: u32,
    },
    /// The next token of the sequence.
    Token(GeneratedToken),
    /// The sequence has ended. Sent last.
    Done {
        /// The reason why the sequence ended.
        finish: Finish,
        /// The rest of the text, which was held back.
        text: String,
        /// What the request cost.
        report: Report,
    },
}

/// Receives the token stream of a sequence.
pub type Listener = mpsc::Sender<Result<GenerateEvent, RequestError>>;

/// Sends the token stream of a sequence to its listener.
pub(super) struct EventStream<'a> {
    stream: Option<TextStream<'a>>,
    ending: Ending,
    /// Events that the listener had no room for.
    queue: VecDeque<GenerateEvent>,
    /// Why the sequence has ended, or that its tokens cannot be read; none while it continues.
    pub(super) finish: Option<Result<Finish, RequestError>>,
    pub(super) listener: &'a Listener,
    /// Where other sequences may wait for its room.
    steps: &'a Steps,
    /// The first event; none once it is sent.
    begins: Option<GenerateEvent>,
}

impl<'a> EventStream<'a> {
    /// A token stream whose tokens are read by `stream`, if there is one, as a text that ends before any of `stop`.
    pub(super) fn new(
        stream: Option<TextStream<'a>>,
        stop: Vec<String>,
        listener: &'a Listener,
        steps: &'a Steps,
        begins: GenerateEvent,
    ) -> Self {
        let (ending, queue, begins) = (Ending::new(stop), VecDeque::new(), Some(begins));
        Self { stream, ending, queue, finish: None, listener, steps, begins }
    }

    /// Sends that the sequence has begun, unless that is sent already.
    pub(super) fn begin(&mut self) {
        self.queue.extend(self.begins.take());
        self.send_waiting();
    }

    /// Sends that the sequence waits. A listener that does not read now reads it later.
    pub(super) fn waiting(&mut self, readiness: &Readiness) {
        if self.queue.is_empty() {
            let why = |(device, reason): (Option<&DeviceName>, &str)| {
                (device.cloned(), reason.to_owned())
            };
            let unready = readiness.obstacle().map(why);
            drop(self.listener.try_send(Ok(GenerateEvent::Waiting { unready })));
        }
    }

    /// Takes tokens into the text that were generated for an earlier request.
    pub(super) fn resume(&mut self, state: &mut SequenceState, generated: &[u32]) {
        for id in generated {
            if self.finish.is_none() {
                self.add(state, *id);
            }
        }
    }

    /// Whether events wait for room at the listener.
    pub(super) fn waits(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes a token into the text, if that has not ended, and sends it if there is room.
    pub(super) fn take(&mut self, state: &mut SequenceState, told: TokenEvent) {
        if self.finish.is_some() {
            return;
        }
        self.begin();
        if let Some(text) = self.add(state, told[0] as u32) {
            self.queue.push_back(GenerateEvent::Token(token(&told, text)));
            self.send_waiting();
        }
    }

    /// Takes a token into the text. Gives what it adds, as far as that is sure; none where the token cannot be read.
    fn add(&mut self, state: &mut SequenceState, id: u32) -> Option<String> {
        Arc::make_mut(&mut state.sequence).tokens.push(id);
        let mut text = String::new();
        if state.ends.contains(&id) {
            self.finish = Some(Ok(Finish::Stop));
        } else if let Some(stream) = &mut self.stream {
            match stream.push(id) {
                Ok(piece) => text.push_str(self.ending.add(&piece)),
                Err(error) => {
                    self.finish = Some(Err(RequestError::Model { why: error.to_string() }));
                    return None;
                }
            }
            if self.ending.stopped() {
                self.finish = Some(Ok(Finish::Stop));
            }
        }
        Some(text)
    }

    /// Sends the waiting events that there is room for.
    fn send_waiting(&mut self) {
        while let Some(event) = self.queue.pop_front() {
            use mpsc::error::TrySendError::{Closed, Full};
            match self.listener.try_send(Ok(event)) {
                Ok(()) => {}
                Err(Full(Ok(event))) => return self.queue.push_front(event),
                Err(Full(Err(_)) | Closed(_)) => return self.queue.clear(),
            }
        }
    }

    /// Sends all waiting events. False when nobody listens any more, or reads.
    pub(super) async fn flush(&mut self) -> bool {
        while let Some(event) = self.queue.pop_front() {
            if !self.send(event).await {
                return false;
            }
        }
        true
    }

    /// Waits until the listener takes something. A listener that does not read is given up sooner when others wait for
    /// its room.
    async fn reads(&self) -> Option<Permit<'_, Result<GenerateEvent, RequestError>>> {
        for _ in 0..PATIENCE.as_secs() / UNREAD.as_secs() {
            if let Ok(permit) = timeout(UNREAD, self.listener.reserve()).await {
                return permit.ok();
            }
            if self.steps.starving() {
                return None;
            }
        }
        None
    }

    pub(super) async fn send(&self, event: GenerateEvent) -> bool {
        let Some(permit) = self.reads().await else { return false };
        permit.send(Ok(event));
        true
    }

    /// The text that was held back.
    pub(super) fn rest(&mut self) -> Result<String, RequestError> {
        if let Some(stream) = self.stream.take().filter(|_| !self.ending.stopped()) {
            let rest = stream.finish();
            let rest = rest.map_err(|e| RequestError::Model { why: e.to_string() })?;
            let sure = self.ending.add(&rest).to_owned();
            return Ok(sure + self.ending.rest());
        }
        Ok(self.ending.rest().to_owned())
    }
}
