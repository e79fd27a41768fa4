//! Texts that go on, token by token.

use crate::{answer::Report, error::ClientError, pieces::report};
use futures_util::{Stream, stream};
use galaxy_common::{GeneratedToken, RequestId};
use galaxy_proto::{
    WAITING,
    v1::{self, generate_event::Event},
};
use serde::Serialize;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

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
    Token(GeneratedToken),
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
        Some(Event::Token(token)) => Ok(Generated::Token(token.into())),
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
