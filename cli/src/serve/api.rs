//! The routes, and who may use them.

use super::limits::MAX_BYTES;
use crate::generation_config::GenerationConfig;
use axum::{
    Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, Request, State, rejection::BytesRejection},
    http::{HeaderValue, Method, StatusCode, header, uri::Authority},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::stream;
use galaxy_cli::openai::{
    answer::{AnswerText, Form, Frame, Usage},
    chat::Chat,
    error::{ApiError, answer},
    rerank::RerankRequest,
    wire::{ChatRequest, Choice, CompletionRequest, EmbeddingInput, EmbeddingRequest},
};
use galaxy_client::{
    Client, ClientError, ClusterStatus, EmbedOptions, Generated, Generating, Prompt, TooLong,
};
use serde_json::{Value, json};
use std::{
    convert::Infallible,
    net::IpAddr,
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::sync::mpsc;

/// How long the coordinator may take to report its status.
const STATUS: Duration = Duration::from_secs(5);
/// The list of routes, for answers to requests of any other.
const ROUTES: &str = "there are POST /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/rerank, and GET \
                      /v1/models, /v1/models/NAME and /health";
/// The most events that wait for a program that reads slowly.
const EVENTS: usize = 64;

type Answer = Result<Response, ApiError>;
type Received = Result<Bytes, BytesRejection>;

/// The API: what its routes share.
#[derive(Clone)]
pub struct Api(Arc<Inner>);

struct Inner {
    client: Client,
    /// The client that asks for the status, on a connection of its own: generation does not keep it waiting.
    status: Client,
    key: Option<String>,
    chat: Option<Chat>,
    /// Where settings come from that requests leave open.
    settings: GenerationConfig,
    started: u64,
}

impl Api {
    pub fn new(
        client: Client,
        status: Client,
        key: Option<String>,
        chat: Option<Chat>,
        settings: GenerationConfig,
    ) -> Self {
        Self(Arc::new(Inner { client, status, key, chat, settings, started: now() }))
    }

    pub fn router(self) -> Router {
        Router::new()
            .route("/health", get(health))
            .route("/v1/models", get(models))
            .route("/v1/models/{*name}", get(model))
            .route("/v1/embeddings", post(embeddings))
            .route("/v1/rerank", post(rerank))
            .route("/v1/completions", post(completions))
            .route("/v1/chat/completions", post(chats))
            .fallback(nothing)
            .method_not_allowed_fallback(other_method)
            .layer(DefaultBodyLimit::max(MAX_BYTES))
            .layer(middleware::from_fn_with_state(self.clone(), guard))
            .with_state(self)
    }

    /// The status of the coordinator, if it reports it within `STATUS`.
    async fn status(&self) -> Result<ClusterStatus, ClientError> {
        self.0.status.with_timeout(STATUS).status().await
    }

    /// The name of the model that is served; an error if another one is `asked` for.
    async fn model(&self, asked: Option<&str>) -> Result<String, ApiError> {
        // A coordinator that starts is waited for, as it is by what is asked next.
        let model = self.0.status.status().await?.model;
        match asked {
            Some(asked) if !asked.is_empty() && asked != model => {
                let why = format!("there is no model {asked:?} here; the cluster serves {model:?}");
                Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", why).of("model"))
            }
            _ => Ok(model),
        }
    }

    fn card(&self, model: String) -> Value {
        json!({ "id": model, "object": "model", "created": self.0.started, "owned_by": "galaxy" })
    }
}

/// Lets in requests that show the key. Without a key we listen on loopback only, and what is left to keep out are pages
/// in a browser of this machine: they cannot send JSON elsewhere unasked, nor hide which host they call.
async fn guard(State(api): State<Api>, request: Request, next: Next) -> Answer {
    let headers = request.headers();
    match &api.0.key {
        Some(key) => {
            let shown = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
            if !shown.and_then(|s| s.strip_prefix(b"Bearer ")).is_some_and(|s| same(s, key)) {
                let why = "the API key is missing or wrong";
                return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", why));
            }
        }
        None => {
            let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
            if !host.is_some_and(is_loopback) {
                let why =
                    "without an API key only this machine is answered, under the name localhost";
                return Err(ApiError::new(StatusCode::FORBIDDEN, "wrong_host", why));
            }
        }
    }
    if request.method() == Method::POST {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = kind.map(|kind| kind.split(';').next().unwrap_or_default().trim());
        if !kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/json")) {
            let came = kind.map_or("missing".to_owned(), |kind| format!("{kind:?}"));
            let why = format!("content-type must be application/json, and is {came}");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", why));
        }
    }
    Ok(next.run(request).await)
}

/// Whether two keys are the same, in a time that does not tell where they differ.
fn same(shown: &[u8], key: &str) -> bool {
    let key = key.as_bytes();
    let differences = shown.iter().zip(key).fold(0, |all, (a, b)| all | (a ^ b));
    shown.len() == key.len() && std::hint::black_box(differences) == 0
}

/// Whether a `Host` names this machine to itself.
fn is_loopback(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

async fn nothing(request: Request) -> ApiError {
    let why = format!("there is no {}; {ROUTES}", request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, "not_found", why)
}

async fn other_method(request: Request) -> ApiError {
    let why = format!("{} does not take {}; {ROUTES}", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", why)
}

async fn health(State(api): State<Api>) -> Answer {
    let status = api.status().await?;
    let code = match &*status.state {
        "ready" | "moving" => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    Ok(answer(code, &json!({ "state": status.state, "model": status.model })))
}

async fn models(State(api): State<Api>) -> Answer {
    let model = api.card(api.model(None).await?);
    Ok(answer(StatusCode::OK, &json!({ "object": "list", "data": [model] })))
}

async fn model(State(api): State<Api>, Path(name): Path<String>) -> Answer {
    let model = api.model(Some(&name)).await?;
    Ok(answer(StatusCode::OK, &api.card(model)))
}

async fn embeddings(State(api): State<Api>, body: Received) -> Answer {
    let request = EmbeddingRequest::read(&received(body)?)?;
    let model = api.model(request.model.as_deref()).await?;
    let options = EmbedOptions {
        too_long: if request.truncate { TooLong::Truncate } else { TooLong::Refuse },
        dimensions: request.dimensions.and_then(NonZeroU32::new),
        ..EmbedOptions::default()
    };
    let done = match &request.input {
        EmbeddingInput::Texts(texts) => api.0.client.embed_with(texts, options).await,
        EmbeddingInput::Ids(ids) => api.0.client.embed_ids(ids, options).await,
    };
    let done = done.map_err(|error| ApiError::from(error).about("input"))?;
    let value = request.answer(&model, &done.vectors, done.report.tokens);
    Ok(answer(StatusCode::OK, &value))
}

async fn rerank(State(api): State<Api>, body: Received) -> Answer {
    let request = RerankRequest::read(&received(body)?)?;
    let model = api.model(request.model.as_deref()).await?;
    let too_long = if request.truncate { TooLong::Truncate } else { TooLong::Refuse };
    let (query, documents) = (&request.query, &request.documents);
    let ranking = api.0.client.rerank(query, documents, too_long).await;
    let ranking = ranking.map_err(|error| ApiError::from(error).about("documents"))?;
    Ok(answer(StatusCode::OK, &request.answer(&model, &ranking)))
}

async fn completions(State(api): State<Api>, body: Received) -> Answer {
    let CompletionRequest { prompts, choice } = CompletionRequest::read(&received(body)?)?;
    let model = api.model(choice.model.as_deref()).await?;
    Texts::begin(&api, (Form::Completion, model), prompts, choice).await?.answer().await
}

async fn chats(State(api): State<Api>, body: Received) -> Answer {
    let ChatRequest { messages, chat_template_kwargs, choice } =
        ChatRequest::read(&received(body)?)?;
    let model = api.model(choice.model.as_deref()).await?;
    let of = api.clone();
    // A long chat takes its time, and others are answered meanwhile.
    let tokens = tokio::task::spawn_blocking(move || {
        let Some(chat) = &of.0.chat else {
            let why = "chats need the model's template: start galaxy serve with --model DIR";
            return Err(ApiError::bad(why));
        };
        chat.tokens(&messages, &chat_template_kwargs)
    });
    let broke = |e| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", format!("{e}"));
    let prompt = Prompt::Ids(tokens.await.map_err(broke)??);
    Texts::begin(&api, (Form::Chat, model), vec![prompt], choice).await?.answer().await
}

/// The body of a request, if all of it came.
fn received(body: Received) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| {
        let why = match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                format!("the request has more than {} MiB: send it in parts", MAX_BYTES >> 20)
            }
            _ => "the request broke off before its end".to_owned(),
        };
        ApiError::new(rejection.status(), "invalid_body", why)
    })
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The texts of one request, which are generated one after another. The first has begun before the answer does, so that
/// the status of the answer tells what is wrong with a request.
struct Texts {
    client: Client,
    frame: Frame,
    choice: Choice,
    /// The text that is being generated.
    text: Generating,
    index: usize,
    /// Whether the beginning of that text was passed on.
    begun: bool,
    rest: std::vec::IntoIter<Prompt>,
    usage: Usage,
}

/// A piece of an answer's text.
enum TextEvent {
    Begin,
    Text(AnswerText),
    /// The last piece of the text, and why the text ends.
    End(AnswerText, String),
}

impl Texts {
    async fn begin(
        api: &Api,
        (form, model): (Form, String),
        prompts: Vec<Prompt>,
        mut choice: Choice,
    ) -> Result<Self, ApiError> {
        let client = api.0.client.clone();
        choice.options = api.0.settings.apply(choice.options);
        let mut rest = prompts.into_iter();
        let Some(prompt) = rest.next() else { return Err(ApiError::bad("there is no prompt")) };
        let field = if form == Form::Chat { "messages" } else { "prompt" };
        let begun = client.generate(prompt, choice.options.clone()).await;
        let text = begun.map_err(|error| ApiError::from(error).about(field))?;
        if !text.text {
            return Err(ApiError::bad("the model has no tokenizer, so that there is no text"));
        }
        let frame = Frame { form, request: text.request.0, created: now(), model };
        let usage = Usage::default();
        Ok(Self { client, frame, choice, text, index: 0, begun: false, rest, usage })
    }

    /// The next piece, with the index of its text; none after the last text.
    async fn next(&mut self) -> Result<Option<(usize, TextEvent)>, ClientError> {
        loop {
            if !self.begun {
                self.begun = true;
                self.usage.prompt += u64::from(self.text.prompt_tokens);
                return Ok(Some((self.index, TextEvent::Begin)));
            }
            match self.text.next().await? {
                Some(Generated::Token(token)) => {
                    self.usage.generated += 1;
                    let token_ids = self.choice.token_ids.then(|| vec![token.token]);
                    let piece = AnswerText { text: token.text, token_ids };
                    return Ok(Some((self.index, TextEvent::Text(piece))));
                }
                Some(Generated::Done(done)) => {
                    self.usage.cached += done.report.cached;
                    let piece = AnswerText { text: done.text, token_ids: None };
                    return Ok(Some((self.index, TextEvent::End(piece, done.finish))));
                }
                None => {}
            }
            let Some(prompt) = self.rest.next() else { return Ok(None) };
            self.text = self.client.generate(prompt, self.choice.options.clone()).await?;
            self.index += 1;
            self.begun = false;
        }
    }

    async fn answer(self) -> Answer {
        if self.choice.stream { Ok(self.stream()) } else { self.whole().await }
    }

    async fn whole(mut self) -> Answer {
        let mut texts: Vec<(AnswerText, String)> = Vec::new();
        while let Some((_, piece)) = self.next().await? {
            match (piece, texts.last_mut()) {
                (TextEvent::Text(more), Some((text, _))) => text.push(&more),
                (TextEvent::End(more, why), Some((text, finish))) => {
                    text.push(&more);
                    *finish = why;
                }
                (_, _) => texts.push(Default::default()),
            }
        }
        Ok(answer(StatusCode::OK, &self.frame.whole(texts, self.usage)))
    }

    /// The answer as server-sent events. A program that disconnects ends the generation.
    fn stream(self) -> Response {
        let (events, mut arriving) = mpsc::channel::<Bytes>(EVENTS);
        tokio::spawn(async move {
            tokio::select! {
                _ = self.tell(&events) => {}
                () = events.closed() => {}
            }
        });
        let told = stream::poll_fn(move |context| {
            arriving.poll_recv(context).map(|event| event.map(Ok::<_, Infallible>))
        });
        let mut response = Body::from_stream(told).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }

    /// Sends the whole answer as events; an error when nobody listens any more.
    async fn tell(
        mut self,
        events: &mpsc::Sender<Bytes>,
    ) -> Result<(), mpsc::error::SendError<Bytes>> {
        loop {
            let value = match self.next().await {
                Ok(Some((_, TextEvent::Begin))) => self.frame.begin(),
                Ok(Some((index, TextEvent::Text(piece)))) => self.frame.piece(index, piece),
                Ok(Some((index, TextEvent::End(piece, finish)))) => {
                    if let Some(last) = self.frame.piece(index, piece) {
                        events.send(event(&last)).await?;
                    }
                    Some(self.frame.end(index, &finish))
                }
                Ok(None) => break,
                // An error is the last event.
                Err(error) => return events.send(event(&ApiError::from(error).body())).await,
            };
            if let Some(value) = value {
                events.send(event(&value)).await?;
            }
        }
        if self.choice.usage {
            events.send(event(&self.frame.usage(self.usage))).await?;
        }
        events.send(Bytes::from_static(b"data: [DONE]\n\n")).await
    }
}

/// A server-sent event.
fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_hosts_are_distinguished_from_others() {
        for host in [
            "localhost",
            "localhost:8080",
            "LOCALHOST:1",
            "127.0.0.1:8080",
            "[::1]:8080",
            "127.1.2.3",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "example.com",
            "localhost.example.com:8080",
            "10.0.0.1:8080",
            "[::2]",
            "127.0.0.1.nip.io",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn an_api_key_matches_only_as_a_whole() {
        assert!(same(b"secret", "secret"));
        for shown in [&b""[..], b"secre", b"secret ", b"Secret", b"secrets"] {
            assert!(!same(shown, "secret"), "{shown:?}");
        }
    }
}
