//! What is said of a text that goes on, to whoever listens.

use super::{PATIENCE, steps::Steps, way::Way};
use crate::{error::RequestError, fleet::Readiness, session::Report};
use galaxy_common::{DeviceName, GeneratedToken, RequestId};
use galaxy_engine::generate::{Told, token};
use galaxy_model::{generation::Ending, tokenizer::TextStream};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    sync::mpsc::{self, Permit},
    time::timeout,
};

/// How long a text that is not read keeps others from its room.
const UNREAD: Duration = Duration::from_secs(10);

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
    /// It waits, at its beginning or later: for room behind others, or for a cluster that is not ready. Again and
    /// again.
    Waiting {
        /// Why the cluster is not ready, if it is not, and because of whom, if it is a device.
        unready: Option<(Option<DeviceName>, String)>,
    },
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
        /// How many tokens it goes on behind, which are not said again.
        generated: u32,
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

/// Says things of a text.
pub(super) struct Telling<'a> {
    stream: Option<TextStream<'a>>,
    ending: Ending,
    /// What the listener had no room for.
    queue: VecDeque<Said>,
    /// The text has ended, or cannot be read.
    pub(super) finish: Option<Result<Finish, RequestError>>,
    pub(super) listener: &'a Listener,
    /// Where others may wait for its room.
    steps: &'a Steps,
    /// What is said first, until it is.
    begins: Option<Said>,
}

impl<'a> Telling<'a> {
    /// Tokens are read by `stream`, if there is one, as a text that ends before any of `stop`.
    pub(super) fn new(
        stream: Option<TextStream<'a>>,
        stop: Vec<String>,
        listener: &'a Listener,
        steps: &'a Steps,
        begins: Said,
    ) -> Self {
        let (ending, queue, begins) = (Ending::new(stop), VecDeque::new(), Some(begins));
        Self { stream, ending, queue, finish: None, listener, steps, begins }
    }

    /// Says that it has begun, if that was not said.
    pub(super) fn begin(&mut self) {
        self.queue.extend(self.begins.take());
        self.send();
    }

    /// Says that it waits. One that does not read now reads later.
    pub(super) fn waiting(&mut self, readiness: &Readiness) {
        if self.queue.is_empty() {
            let why = |(device, reason): (Option<&DeviceName>, &str)| {
                (device.cloned(), reason.to_owned())
            };
            let unready = readiness.obstacle().map(why);
            drop(self.listener.try_send(Ok(Said::Waiting { unready })));
        }
    }

    /// Takes tokens into the text that were said by another.
    pub(super) fn resume(&mut self, way: &mut Way, generated: &[u32]) {
        for id in generated {
            if self.finish.is_none() {
                self.add(way, *id);
            }
        }
    }

    /// Whether the listener has had no room for something.
    pub(super) fn waits(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes a token into the text, if that has not ended, and says it if there is room.
    pub(super) fn take(&mut self, way: &mut Way, told: Told) {
        if self.finish.is_some() {
            return;
        }
        self.begin();
        if let Some(text) = self.add(way, told[0] as u32) {
            self.queue.push_back(Said::Token(token(&told, text)));
            self.send();
        }
    }

    /// Takes a token into the text. Gives what it adds, as far as that is sure; nothing where it cannot be read.
    fn add(&mut self, way: &mut Way, id: u32) -> Option<String> {
        Arc::make_mut(&mut way.text).tokens.push(id);
        let mut text = String::new();
        if way.ends.contains(&id) {
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

    /// Says of what waits what there is room for.
    fn send(&mut self) {
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
    pub(super) async fn flush(&mut self) -> bool {
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
            if self.steps.starving() {
                return None;
            }
        }
        None
    }

    pub(super) async fn say(&self, said: Said) -> bool {
        let Some(permit) = self.reads().await else { return false };
        permit.send(Ok(said));
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
