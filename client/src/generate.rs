//! Token streams: text that is generated token by token.

use crate::{answer::Report, client::Client, error::ClientError, pieces::report, retry::Attempts};
use futures_util::{Stream, stream};
use galaxy_common::{GenerateOptions, GeneratedToken, Prompt, RequestId};
use galaxy_proto::{
    WAITING, convert,
    v1::{self, generate_event::Event},
};
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

/// The end of a generated text.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Done {
    /// `stop` (a token or a string that ends texts) or `length`.
    pub finish: String,
    /// The rest of the text, which was held back.
    pub text: String,
    /// What the request cost.
    pub report: Report,
}

/// An item of a token stream.
#[derive(Clone, PartialEq, Debug)]
pub enum Generated {
    /// A generated token.
    Token(GeneratedToken),
    /// The end of the stream.
    Done(Done),
}

/// A text that is being generated. Dropping it ends the generation.
///
/// A text whose coordinator is gone is asked for again, with the tokens that are there already, and continues as it
/// would have. It is another request then.
#[derive(Debug)]
pub struct Generating {
    /// The number of its request, for a trace.
    pub request: RequestId,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The seed of the sampler.
    pub seed: u64,
    /// Whether tokens have text; a model without a tokenizer gives only their ids.
    pub text: bool,
    asked: GenerateCall,
    /// The events of the coordinator; none while the text has to be asked for again.
    events: Option<Events>,
    done: bool,
}

type Events = tonic::Streaming<v1::GenerateEvent>;

/// What a text is asked for with; the options have the tokens that were generated so far.
#[derive(Debug)]
struct GenerateCall {
    client: Client,
    prompt: Prompt,
    options: GenerateOptions,
}

impl GenerateCall {
    /// Asks until the text begins.
    async fn begin(
        &self,
        attempts: &mut Attempts<'_>,
    ) -> Result<(Events, v1::GenerateBegun), ClientError> {
        loop {
            match self.attempt(attempts).await {
                Ok(begun) => {
                    self.client.answered();
                    return Ok(begun);
                }
                Err(error) => attempts.fails(error).await?,
            }
        }
    }

    async fn attempt(
        &self,
        attempts: &mut Attempts<'_>,
    ) -> Result<(Events, v1::GenerateBegun), ClientError> {
        let request = convert::generate_request(self.prompt.clone(), self.options.clone());
        let mut stub = self.client.stub();
        let answer = timeout_at(attempts.until(), stub.generate(request)).await;
        let mut events = answer.map_err(|_| attempts.late())??.into_inner();
        let malformed = |what: &str| ClientError::Malformed { what: what.to_owned() };
        let Event::Begun(begun) = message(&mut events, attempts).await? else {
            return Err(malformed("the token stream has no beginning"));
        };
        match begun.generated as usize == self.options.generated.len() {
            true => Ok((events, begun)),
            false => Err(malformed("the answer does not continue after the generated tokens")),
        }
    }

    fn attempts(&self) -> Attempts<'_> {
        self.client.attempts(Instant::now() + self.client.timeout())
    }
}

impl Client {
    /// Generates text from a prompt, token by token. The timeout of a call bounds the wait for each token, restarts of
    /// the cluster and of its coordinator among that; a sequence that waits for room behind others may wait as long as
    /// it takes.
    ///
    /// # Errors
    /// As [`Client::embed`], and `unsupported_output` when the model generates no text.
    pub async fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: GenerateOptions,
    ) -> Result<Generating, ClientError> {
        Generating::begin(self.clone(), prompt.into(), options).await
    }
}

impl Generating {
    /// Asks for a text and waits until it begins; where other sequences have the room, for as long as they have it.
    pub(crate) async fn begin(
        client: Client,
        prompt: Prompt,
        options: GenerateOptions,
    ) -> Result<Self, ClientError> {
        let mut asked = GenerateCall { client, prompt, options };
        let (events, begun) = asked.begin(&mut asked.attempts()).await?;
        let v1::GenerateBegun { request, prompt_tokens, seed, text, .. } = begun;
        asked.options.sampling.seed = Some(seed);
        let (request, events) = (RequestId(request), Some(events));
        Ok(Self { request, prompt_tokens, seed, text, asked, events, done: false })
    }

    /// The next item; none after the end.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// As [`Client::embed`](crate::Client::embed), also when nothing comes within the timeout of a call: what the
    /// sequence waited for, or [`ClientError::Timeout`]. The stream ends with an error.
    pub async fn next(&mut self) -> Result<Option<Generated>, ClientError> {
        if self.done {
            return Ok(None);
        }
        let next = self.wait().await;
        match &next {
            Ok(Generated::Token(token)) => self.asked.options.generated.push(token.token),
            Ok(Generated::Done(_)) | Err(_) => self.done = true,
        }
        next.map(Some)
    }

    async fn wait(&mut self) -> Result<Generated, ClientError> {
        let Self { asked, events, request, .. } = self;
        let mut attempts = asked.attempts();
        loop {
            let Some(coming) = events else {
                let (coming, begun) = asked.begin(&mut attempts).await?;
                *request = RequestId(begun.request);
                *events = Some(coming);
                continue;
            };
            match message(coming, &mut attempts).await {
                Ok(event) => return generated(Some(event)),
                Err(error) => {
                    *events = None;
                    attempts.fails(error).await?;
                }
            }
        }
    }

    /// All items, as a stream.
    pub fn into_stream(self) -> impl Stream<Item = Result<Generated, ClientError>> {
        stream::try_unfold(self, |mut generating| async move {
            Ok(generating.next().await?.map(|generated| (generated, generating)))
        })
    }
}

/// Makes an item of an event that comes after the beginning.
pub(crate) fn generated(event: Option<Event>) -> Result<Generated, ClientError> {
    match event {
        Some(Event::Token(token)) => Ok(Generated::Token(token.into())),
        Some(Event::Done(v1::GenerateDone { finish, text, report: cost })) => {
            Ok(Generated::Done(Done { finish, text, report: report(cost)? }))
        }
        Some(Event::Begun(_) | Event::Waiting(_)) | None => {
            let what = "the token stream broke off before its end".to_owned();
            Err(ClientError::Malformed { what })
        }
    }
}

/// The next event that comes in time, other than those that report what the sequence waits for.
async fn message(events: &mut Events, attempts: &mut Attempts<'_>) -> Result<Event, ClientError> {
    loop {
        let event = timeout_at(attempts.until(), events.message()).await;
        let event = event.map_err(|_| attempts.late())??;
        // A connection that is closed may end what comes over it like any other end.
        match event.and_then(|event| event.event).ok_or(ClientError::BrokenOff)? {
            // The next sign may be as far away as others have the room.
            Event::Waiting(v1::GenerateWaiting { unready, .. }) if unready.is_empty() => {
                attempts.waits_until(Instant::now() + attempts.timeout() + WAITING);
            }
            Event::Waiting(v1::GenerateWaiting { unready, device }) => {
                attempts.waits(ClientError::unready(&unready, device));
            }
            event => return Ok(event),
        }
    }
}
