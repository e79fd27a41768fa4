//! Requests of programs, as OpenAI's API has them. Each field is read with `null` as absent, and one that would change
//! the answer and is not supported is refused by its name.

use super::{
    body::{Field, Object, parse},
    chat::{Message, TemplateArguments},
    error::ApiError,
};
use axum::http::StatusCode;
use base64::{Engine, prelude::BASE64_STANDARD};
use galaxy_client::{Fallback, GenerateOptions, Prompt, SamplingParams};
use serde::Deserialize;
use serde_json::{Value, json};

/// The most tokens of `/v1/completions`, if neither the request nor the model says how many.
const MAX_TOKENS: u32 = 16;
/// The temperature of OpenAI's API, if neither the request nor the model gives another.
const TEMPERATURE: f32 = 1.0;
/// The most prompts of one request; they are answered one after another.
const MAX_PROMPTS: usize = 64;

/// What a prompt may be.
const PROMPTS: &str = "a text, a list of texts, a list of token ids, or a list of those";

/// Parameters of generation that would change the answer and are not supported: the values that ask for nothing, as
/// JSON, and why others are refused. They are OpenAI's, then those that vLLM and llama.cpp add to them.
const NOT_DONE: &[(&str, &[&str], &str)] = &[
    ("n", &["1"], "one choice is generated for each prompt"),
    ("best_of", &["1"], "one choice is generated for each prompt"),
    ("echo", &["false"], "prompts are not repeated"),
    ("suffix", &["\"\""], "only continuations of the prompt are generated"),
    ("logprobs", &["false"], "log-probabilities are not given here"),
    ("top_logprobs", &["0"], "log-probabilities are not given here"),
    ("tools", &["[]"], "tools are not called"),
    ("functions", &["[]"], "tools are not called"),
    ("tool_choice", &["\"none\"", "\"auto\""], "tools are not called"),
    ("function_call", &["\"none\"", "\"auto\""], "tools are not called"),
    ("response_format", &["{\"type\": \"text\"}"], "no format is forced"),
    ("modalities", &["[\"text\"]", "[]"], "answers are text"),
    ("audio", &[], "answers are text"),
    ("web_search_options", &[], "nothing is searched"),
    ("prompt_logprobs", &["false"], "log-probabilities are not given here"),
    ("guided_json", &[], "no format is forced"),
    ("guided_regex", &[], "no format is forced"),
    ("guided_choice", &["[]"], "no format is forced"),
    ("guided_grammar", &[], "no format is forced"),
    ("structured_outputs", &["{}"], "no format is forced"),
    ("structural_tag", &[], "no format is forced"),
    ("json_schema", &[], "no format is forced"),
    ("grammar", &["\"\""], "no format is forced"),
    ("min_tokens", &["0"], "no text is kept from its end"),
    ("stop_token_ids", &["[]"], "strings end a text, in stop"),
    ("include_stop_str_in_output", &["false"], "a text ends before the string that ends it"),
    ("bad_words", &["[]"], "words are not forbidden"),
    ("allowed_token_ids", &["[]"], "tokens are not forbidden"),
    ("logits_processors", &["[]"], "logits are not processed"),
    ("use_beam_search", &["false"], "beams are not searched"),
    ("truncate_prompt_tokens", &[], "prompts are not cut"),
    ("typical_p", &["1", "0"], "typical sampling is not done"),
    ("tfs_z", &["1"], "tail-free sampling is not done"),
    ("mirostat", &["0"], "mirostat is not done"),
    ("xtc_probability", &["0"], "XTC sampling is not done"),
    ("dry_multiplier", &["0"], "DRY sampling is not done"),
    ("dynatemp_range", &["0"], "the temperature does not change"),
    ("chat_template", &[], "the model's own template is taken"),
    ("add_generation_prompt", &["true"], "chats end with the beginning of an answer"),
    ("continue_final_message", &["false"], "chats end with the beginning of an answer"),
    ("documents", &["[]"], "documents are not put into chats"),
];

/// Parameters of embeddings that are not supported, with the columns of `NOT_DONE`.
const NOT_DONE_OF_VECTORS: &[(&str, &[&str], &str)] =
    &[("truncate_prompt_tokens", &[], "texts are cut to what the model takes, with truncate")];

/// The body of `POST /v1/completions`.
#[derive(Debug)]
pub struct CompletionRequest {
    /// The prompts, as texts or token ids; none is empty.
    pub prompts: Vec<Prompt>,
    /// What the request asks besides its prompts.
    pub choice: Choice,
}

/// The body of `POST /v1/chat/completions`.
#[derive(Debug)]
pub struct ChatRequest {
    /// The messages of the chat so far.
    pub messages: Vec<Message>,
    /// Arguments for the chat template, like `{"enable_thinking": false}`.
    pub chat_template_kwargs: TemplateArguments,
    /// What the request asks besides its messages.
    pub choice: Choice,
}

/// The body of `POST /v1/embeddings`.
#[derive(Debug)]
pub struct EmbeddingRequest {
    /// The texts to embed.
    pub input: EmbeddingInput,
    /// The model that is asked for, if any is.
    pub model: Option<String>,
    /// The length of each vector; that of the model's if absent.
    pub dimensions: Option<u32>,
    /// Whether texts that are too long are cut instead of refused.
    pub truncate: bool,
    base64: bool,
}

/// What a request embeds.
#[derive(Clone, PartialEq, Debug)]
pub enum EmbeddingInput {
    /// Texts, which the coordinator tokenises.
    Texts(Vec<String>),
    /// The token ids of texts.
    Ids(Vec<Vec<u32>>),
}

/// What a request for text asks besides its prompt.
#[derive(Debug)]
pub struct Choice {
    /// The model that is asked for, if any is.
    pub model: Option<String>,
    /// Whether the answer comes as events.
    pub stream: bool,
    /// Whether the last event of a stream says how many tokens there were.
    pub usage: bool,
    /// Whether the ids of the generated tokens stand beside their text.
    pub token_ids: bool,
    /// How much is generated, and how tokens are sampled.
    pub options: GenerateOptions,
}

impl CompletionRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// When it cannot be answered.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let map = parse(body)?;
        let request = Object::new(&map);
        let choice = Choice::read(&request, MAX_TOKENS)?;
        let field = request.get("prompt");
        let prompts: Vec<Prompt> = match texts_or_ids(&field)? {
            EmbeddingInput::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            EmbeddingInput::Ids(many) => many.into_iter().map(Prompt::Ids).collect(),
        };
        match prompts.len() {
            1..=MAX_PROMPTS => Ok(Self { prompts, choice }),
            many => {
                let message =
                    format!("prompt has {many} prompts; one request may have {MAX_PROMPTS}");
                Err(ApiError::bad(message).of("prompt"))
            }
        }
    }
}

impl ChatRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// When it cannot be answered.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        /// What templates get, with its keys in the order in which they were sent, since templates show it.
        #[derive(Deserialize)]
        struct Chat {
            messages: Vec<Message>,
            chat_template_kwargs: Option<TemplateArguments>,
        }
        let map = parse(body)?;
        let request = Object::new(&map);
        check_messages(&request.get("messages"))?;
        request.get("chat_template_kwargs").object("an object")?;
        let choice = Choice::read(&request, 0)?;
        let chat = serde_json::from_slice(body);
        let Chat { messages, chat_template_kwargs } = chat.map_err(|_| {
            ApiError::bad("messages and chat_template_kwargs must be there once each")
                .of("messages")
        })?;
        let chat_template_kwargs = chat_template_kwargs.unwrap_or_default();
        Ok(Self { messages, chat_template_kwargs, choice })
    }
}

impl EmbeddingRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// When it cannot be answered.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let map = parse(body)?;
        let request = Object::new(&map);
        refuse(&request, NOT_DONE_OF_VECTORS)?;
        let format = request.get("encoding_format");
        let base64 = match format.text()? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(format.wrong("float or base64")),
        };
        Ok(Self {
            input: texts_or_ids(&request.get("input"))?,
            model: request.get("model").text()?.map(str::to_owned),
            dimensions: request.get("dimensions").count(1)?,
            truncate: request.get("truncate").flag()?.unwrap_or(false),
            base64,
        })
    }

    /// The answer as JSON: `{"object": "list", "data": [...], ...}`.
    pub fn answer(&self, model: &str, vectors: &[Vec<f32>], tokens: u64) -> Value {
        let data = vectors.iter().enumerate().map(|(index, vector)| {
            let embedding = match self.base64 {
                false => json!(vector),
                true => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                    BASE64_STANDARD.encode(bytes).into()
                }
            };
            json!({ "object": "embedding", "index": index, "embedding": embedding })
        });
        let data: Vec<Value> = data.collect();
        let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        json!({ "object": "list", "data": data, "model": model, "usage": usage })
    }
}

impl Choice {
    /// Reads the fields. `max_tokens` holds if neither the request nor the model says how many; 0: as many as there is
    /// room for.
    fn read(request: &Object<'_>, max_tokens: u32) -> Result<Self, ApiError> {
        refuse(request, NOT_DONE)?;
        let stream_options = request.get("stream_options").object("an object")?;
        let usage = stream_options.map(|options| options.get("include_usage").flag());
        let most = |name| request.get(name).count(1);
        let options = GenerateOptions {
            max_tokens: most("max_completion_tokens")?.or(most("max_tokens")?).unwrap_or(0),
            sampling: sampling(request)?,
            stop: stop(&request.get("stop"))?,
            ignore_end: request.get("ignore_eos").flag()?.unwrap_or(false),
            priority: request.get("priority").whole()?.unwrap_or(0),
            generated: Vec::new(),
            fallback: Some(Fallback { temperature: TEMPERATURE, max_tokens }),
        };
        Ok(Self {
            model: request.get("model").text()?.map(str::to_owned),
            stream: request.get("stream").flag()?.unwrap_or(false),
            usage: usage.transpose()?.flatten().unwrap_or(false),
            token_ids: request.get("return_token_ids").flag()?.unwrap_or(false),
            options,
        })
    }
}

/// Refuses parameters that are not supported, with values that would change the answer.
fn refuse(request: &Object<'_>, not_done: &[(&str, &[&str], &str)]) -> Result<(), ApiError> {
    for (name, asks_nothing, why) in not_done {
        let field = request.get(name);
        if field.value().is_some() && !field.is_one_of(asks_nothing) {
            return Err(field.unsupported(why));
        }
    }
    Ok(())
}

fn sampling(request: &Object<'_>) -> Result<SamplingParams, ApiError> {
    let number = |name| request.get(name).number();
    let mut bias = Vec::new();
    let biases = request.get("logit_bias").object("an object of token ids and numbers")?;
    for (token, field) in biases.iter().flat_map(Object::entries) {
        let Ok(token) = token.parse() else {
            let message =
                format!("{} is no bias: {token:?} is not the id of a token", field.path());
            return Err(ApiError::bad(message).of("logit_bias"));
        };
        bias.extend(field.number()?.map(|value| (token, value)));
    }
    bias.sort_by_key(|&(token, _)| token);
    let params = SamplingParams {
        temperature: number("temperature")?,
        // -1 and 0: all.
        top_k: request.get("top_k").count(-1)?,
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        repetition: number("repetition_penalty")?,
        presence: number("presence_penalty")?,
        frequency: number("frequency_penalty")?,
        bias,
        seed: request.get("seed").seed()?,
        logprobs: 0,
    };
    // Token ids are checked against the vocabulary by the coordinator.
    match params.clone().complete(0).checked(u32::MAX) {
        Ok(_) => Ok(params),
        Err(error) => Err(ApiError::bad(error.to_string()).of(error.parameter())),
    }
}

fn stop(field: &Field<'_>) -> Result<Vec<String>, ApiError> {
    let stop = field.texts("a text or a list of texts")?.unwrap_or_default();
    match stop.iter().position(String::is_empty) {
        None => Ok(stop),
        Some(at) => {
            let message = format!("stop[{at}] is empty, which would end every text: leave it out");
            Err(ApiError::bad(message).of("stop"))
        }
    }
}

/// Texts or token ids, of at least one text, none of which is empty.
fn texts_or_ids(field: &Field<'_>) -> Result<EmbeddingInput, ApiError> {
    let path = field.path();
    let empty = |at: Option<usize>| {
        let place = at.map_or(path.to_owned(), |at| format!("{path}[{at}]"));
        let message = format!("{place} is empty: it must be {PROMPTS}, with something in it");
        ApiError::new(StatusCode::BAD_REQUEST, "empty_text", message).of(place)
    };
    let first = match field.value() {
        Some(Value::Array(list)) => list.first().ok_or_else(|| empty(None))?,
        Some(Value::String(text)) if text.is_empty() => return Err(empty(None)),
        Some(text @ Value::String(_)) => text,
        _ => return Err(field.wrong(PROMPTS)),
    };
    let (input, found) = match first {
        Value::String(_) => {
            let texts = field.texts(PROMPTS)?.unwrap_or_default();
            let found = texts.iter().position(String::is_empty);
            (EmbeddingInput::Texts(texts), found)
        }
        Value::Array(_) => {
            let lists = field.list(PROMPTS)?.into_iter().flatten();
            let takes = "a list of token ids";
            let many = lists.map(|list| Ok(list.ids(takes)?.unwrap_or_default()));
            let many: Vec<Vec<u32>> = many.collect::<Result<_, ApiError>>()?;
            let found = many.iter().position(Vec::is_empty);
            (EmbeddingInput::Ids(many), found)
        }
        Value::Number(_) => {
            let ids = field.ids(PROMPTS)?.unwrap_or_default();
            (EmbeddingInput::Ids(vec![ids]), None)
        }
        _ => return Err(field.wrong(PROMPTS)),
    };
    found.map_or(Ok(input), |at| Err(empty(Some(at))))
}

/// Checks what all templates rely on.
fn check_messages(field: &Field<'_>) -> Result<(), ApiError> {
    let takes = "a list of at least one message";
    let mut messages = field.list(takes)?.ok_or_else(|| field.wrong(takes))?.peekable();
    if messages.peek().is_none() {
        return Err(field.wrong(takes));
    }
    for message in messages {
        let takes = "an object with role and content";
        let message = message.object(takes)?.ok_or_else(|| message.wrong(takes))?;
        let role = message.get("role");
        role.text()?.ok_or_else(|| role.wrong("a text, like user"))?;
        message.get("name").text()?;
        message.get("tool_call_id").text()?;
        message.get("tool_calls").list("a list of calls")?;
        let content = message.get("content");
        if !matches!(content.value(), Some(Value::String(_))) {
            for part in content.list("a text or a list of parts")?.into_iter().flatten() {
                check_part(&part)?;
            }
        }
    }
    Ok(())
}

/// Checks a part of a message's content.
fn check_part(part: &Field<'_>) -> Result<(), ApiError> {
    let takes = "an object with type and text";
    let part = part.object(takes)?.ok_or_else(|| part.wrong(takes))?;
    let (kind, text) = (part.get("type"), part.get("text"));
    match kind.text()? {
        Some("text") => {}
        Some(_) => return Err(kind.unsupported("messages are text")),
        None => return Err(kind.wrong("text")),
    }
    text.text()?.ok_or_else(|| text.wrong("a text")).map(drop)
}

#[cfg(test)]
mod tests;
