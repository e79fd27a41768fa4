//! What programs ask, as OpenAI's API has it. Each field is read with `null` as absent, and one that would change
//! the answer and is not carried out is refused by its name.

use super::{
    body::{Field, Object, parse},
    chat::{Message, TemplateArguments},
    error::ApiError,
};
use crate::{Fallback, GenerateOptions, Prompt, SamplingParams};
use axum::http::StatusCode;
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};

/// Tokens of `/v1/completions`, if nobody says how many.
const MAX_TOKENS: u32 = 16;
/// The temperature of OpenAI's API, if nobody says another.
const TEMPERATURE: f32 = 1.0;
/// Prompts of one request, which are answered one after another.
const MAX_PROMPTS: usize = 64;

/// What a prompt may be.
const PROMPTS: &str = "a text, a list of texts, a list of token ids, or a list of those";

/// Parameters of texts that would change the answer and are not carried out: the values that ask for nothing, as
/// JSON, and why others are refused. They are OpenAI's, then those that vLLM and llama.cpp add to them.
const NOT_DONE: &[(&str, &[&str], &str)] = &[
    ("n", &["1"], "one choice is made of each prompt"),
    ("best_of", &["1"], "one choice is made of each prompt"),
    ("echo", &["false"], "prompts are not repeated"),
    ("suffix", &["\"\""], "texts are made behind their prompt only"),
    ("logprobs", &["false"], "log-probabilities are not told here"),
    ("top_logprobs", &["0"], "log-probabilities are not told here"),
    ("tools", &["[]"], "tools are not called"),
    ("functions", &["[]"], "tools are not called"),
    ("tool_choice", &["\"none\"", "\"auto\""], "tools are not called"),
    ("function_call", &["\"none\"", "\"auto\""], "tools are not called"),
    ("response_format", &["{\"type\": \"text\"}"], "no format is forced"),
    ("modalities", &["[\"text\"]", "[]"], "answers are text"),
    ("audio", &[], "answers are text"),
    ("web_search_options", &[], "nothing is searched"),
    ("prompt_logprobs", &["false"], "log-probabilities are not told here"),
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

/// The same, of vectors.
const NOT_DONE_OF_VECTORS: &[(&str, &[&str], &str)] =
    &[("truncate_prompt_tokens", &[], "texts are cut to what the model takes, with truncate")];

/// `POST /v1/completions`.
#[derive(Debug)]
pub struct CompletionRequest {
    /// Texts or their tokens, none empty.
    pub prompts: Vec<Prompt>,
    /// How they go on.
    pub choice: Choice,
}

/// `POST /v1/chat/completions`.
#[derive(Debug)]
pub struct ChatRequest {
    /// What was said.
    pub messages: Vec<Message>,
    /// For the template, like `{"enable_thinking": false}`.
    pub chat_template_kwargs: TemplateArguments,
    /// How it goes on.
    pub choice: Choice,
}

/// `POST /v1/embeddings`.
#[derive(Debug)]
pub struct EmbeddingRequest {
    /// What vectors are made of.
    pub input: EmbeddingInput,
    /// The model that is asked for, if any is.
    pub model: Option<String>,
    /// Values of each vector, if not as many as the model's have.
    pub dimensions: Option<u32>,
    /// Cut texts that are too long instead of refusing them.
    pub truncate: bool,
    base64: bool,
}

/// What vectors are made of.
#[derive(Clone, PartialEq, Debug)]
pub enum EmbeddingInput {
    /// Texts.
    Texts(Vec<String>),
    /// The token ids of texts.
    Ids(Vec<Vec<u32>>),
}

/// What a request for text says besides its prompt.
#[derive(Debug)]
pub struct Choice {
    /// The model that is asked for, if any is.
    pub model: Option<String>,
    /// Whether the answer comes as events.
    pub stream: bool,
    /// Whether the last event of a stream says how many tokens there were.
    pub usage: bool,
    /// How tokens are chosen.
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
        /// What templates get, as it was sent: the order of its keys is what they show.
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

    /// `{"object": "list", "data": [...], ...}`.
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
    /// With so many tokens at most, if neither the request nor the model says how many; 0: as many as there is
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
            fallback: Some(Fallback { temperature: TEMPERATURE, max_tokens }),
        };
        Ok(Self {
            model: request.get("model").text()?.map(str::to_owned),
            stream: request.get("stream").flag()?.unwrap_or(false),
            usage: usage.transpose()?.flatten().unwrap_or(false),
            options,
        })
    }
}

/// Refuses what would be answered wrongly.
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
    // What of it the vocabulary has is for the coordinator to say.
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn completion(text: &str) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::read(text.as_bytes())
    }

    fn chat(more: &str) -> Result<ChatRequest, ApiError> {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}]{more}}}"#);
        ChatRequest::read(body.as_bytes())
    }

    fn fallback(max_tokens: u32) -> GenerateOptions {
        let fallback = Some(Fallback { temperature: 1.0, max_tokens });
        GenerateOptions { fallback, ..GenerateOptions::default() }
    }

    #[test]
    fn what_is_not_said_is_left_open() {
        let request = completion(r#"{"prompt": "a", "user": "who", "model": "m"}"#).unwrap();
        assert_eq!(request.prompts, ["a".into()]);
        assert_eq!(request.choice.options, fallback(16));
        let none = request.choice.options.without_model_defaults();
        assert_eq!((none.sampling.temperature, none.max_tokens), (Some(1.0), 16));
        let request = chat("").unwrap();
        assert_eq!(request.choice.options, fallback(0));
        assert!(!request.choice.usage && !request.choice.stream);
    }

    #[test]
    fn what_is_said_is_done() {
        let text = r#"{
            "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
            "presence_penalty": -1, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "seed": -1,
            "logit_bias": {"10": -100, "9": 5.5}, "stop": ["x", "y"], "ignore_eos": true, "logprobs": null,
            "stream": true, "stream_options": {"include_usage": true}
        }"#;
        let CompletionRequest { prompts, choice } = completion(text).unwrap();
        assert!(choice.usage && choice.stream);
        assert_eq!(prompts, [Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]);
        let sampling = SamplingParams {
            temperature: Some(0.5),
            top_k: Some(0),
            top_p: Some(0.9),
            min_p: Some(0.1),
            repetition: Some(1.5),
            presence: Some(-1.0),
            frequency: Some(0.25),
            bias: vec![(9, 5.5), (10, -100.0)],
            seed: Some(u64::MAX),
            logprobs: 0,
        };
        let stop = vec!["x".to_owned(), "y".to_owned()];
        let want =
            GenerateOptions { max_tokens: 5, sampling, stop, ignore_end: true, ..fallback(16) };
        assert_eq!(choice.options, want);
    }

    /// Every optional field, of all routes.
    const OPTIONAL: &[&str] = &[
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "ignore_eos",
        "chat_template_kwargs",
        "encoding_format",
        "dimensions",
        "truncate",
        "user",
        "metadata",
        "parallel_tool_calls",
        "store",
        "service_tier",
    ];

    #[test]
    fn null_means_absent() {
        let names = OPTIONAL.iter().copied().chain(NOT_DONE.iter().map(|row| row.0));
        let nulls: String = names.map(|name| format!(", {name:?}: null")).collect();
        let request = completion(&format!(r#"{{"prompt": "a"{nulls}}}"#)).unwrap();
        assert_eq!(request.choice.options, fallback(16));
        assert_eq!(chat(&nulls).unwrap().choice.options, fallback(0));
        let request =
            EmbeddingRequest::read(format!(r#"{{"input": "a"{nulls}}}"#).as_bytes()).unwrap();
        assert_eq!(
            (request.model, request.dimensions, request.truncate, request.base64),
            (None, None, false, false)
        );
        assert!(
            chat(r#", "stream_options": {"include_usage": null}, "logit_bias": {"5": null}"#)
                .is_ok()
        );
        let message = r#"{"messages": [{"role": "assistant", "content": null, "name": null, "tool_calls": null,
            "tool_call_id": null, "refusal": null, "audio": null}]}"#;
        ChatRequest::read(message.as_bytes()).unwrap();
    }

    #[test]
    fn values_that_ask_for_nothing_are_accepted() {
        for (name, values, _) in NOT_DONE {
            for value in *values {
                let more = format!(", {name:?}: {value}");
                assert_eq!(chat(&more).unwrap().choice.options, fallback(0), "{more}");
                assert!(completion(&format!(r#"{{"prompt": "a"{more}}}"#)).is_ok(), "{more}");
            }
        }
        let nothing = r#", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "stop": [], "n": 1.0,
            "parallel_tool_calls": false, "user": "u", "metadata": {"a": "b"}, "store": false,
            "service_tier": "auto", "stream_options": {"include_usage": false}, "chat_template_kwargs": {}"#;
        assert!(chat(nothing).is_ok());
    }

    #[test]
    fn what_cannot_be_answered_is_refused_by_name() {
        for (text, param, says) in [
            (r#"{"prompt": "a", "n": 2}"#, "n", "n = 2 is not supported: one choice"),
            (r#"{"prompt": "a", "n": 0}"#, "n", "n = 0 is not supported"),
            (r#"{"prompt": "a", "best_of": 2}"#, "best_of", "one choice"),
            (r#"{"prompt": "a", "echo": true}"#, "echo", "not repeated"),
            (r#"{"prompt": "a", "logprobs": 1}"#, "logprobs", "log-probabilities"),
            (r#"{"prompt": "a", "suffix": "b"}"#, "suffix", "suffix = \"b\" is not supported"),
            (r#"{"prompt": "a", "tools": [{}]}"#, "tools", "not called"),
            (r#"{"prompt": "a", "tool_choice": "required"}"#, "tool_choice", "\"required\""),
            (
                r#"{"prompt": "a", "response_format": {"type": "json_object"}}"#,
                "response_format",
                "no format",
            ),
            (r#"{"prompt": "a", "guided_json": {"type": "object"}}"#, "guided_json", "no format"),
            (r#"{"prompt": "a", "max_tokens": 0}"#, "max_tokens", "at least 1, not the number 0"),
            (
                r#"{"prompt": "a", "max_tokens": -1}"#,
                "max_tokens",
                "max_tokens must be a whole number of at least 1",
            ),
            (r#"{"prompt": "a", "max_tokens": 8.0}"#, "max_tokens", "not the number 8.0"),
            (r#"{"prompt": "a", "top_k": -2}"#, "top_k", "at least -1"),
            (
                r#"{"prompt": "a", "temperature": "0.5"}"#,
                "temperature",
                "a number, not the text \"0.5\"",
            ),
            (
                r#"{"prompt": "a", "temperature": -1}"#,
                "temperature",
                "temperature must be 0 to 100, not -1",
            ),
            (r#"{"prompt": "a", "top_p": 1.5}"#, "top_p", "0 to 1"),
            (r#"{"prompt": "a", "repetition_penalty": 0}"#, "repetition_penalty", "0.01 to 100"),
            (r#"{"prompt": "a", "seed": 1.5}"#, "seed", "64 bits"),
            (r#"{"prompt": "a", "seed": 1e30}"#, "seed", "64 bits"),
            (r#"{"prompt": "a", "logit_bias": {"the": 1}}"#, "logit_bias", "\"the\" is not the id"),
            (r#"{"prompt": "a", "logit_bias": {"1": 1, "01": 2}}"#, "logit_bias", "token 1"),
            (r#"{"prompt": "a", "logit_bias": {"1": "x"}}"#, "logit_bias.1", "a number"),
            (r#"{"prompt": "a", "logit_bias": [1]}"#, "logit_bias", "an object of token ids"),
            (
                r#"{"prompt": "a", "stop": 5}"#,
                "stop",
                "a text or a list of texts, not the number 5",
            ),
            (r#"{"prompt": "a", "stop": ["x", ""]}"#, "stop", "stop[1] is empty"),
            (r#"{"prompt": "a", "stop": ["x", 5]}"#, "stop[1]", "a text, not the number 5"),
            (r#"{"prompt": "a", "stream": 1}"#, "stream", "true or false"),
            (
                r#"{"prompt": "a", "stream_options": {"include_usage": 1}}"#,
                "stream_options.include_usage",
                "true or false",
            ),
            (r#"{"prompt": "a", "model": 7}"#, "model", "a text, not the number 7"),
            (r#"{"prompt": 5}"#, "prompt", "a text, a list of texts"),
            (r#"{"prompt": []}"#, "prompt", "prompt is empty"),
            (r#"{"prompt": ""}"#, "prompt", "prompt is empty"),
            (r#"{"prompt": ["a", ""]}"#, "prompt[1]", "prompt[1] is empty"),
            (r#"{"prompt": ["a", 5]}"#, "prompt[1]", "a text, not the number 5"),
            (r#"{"prompt": [1, "a"]}"#, "prompt[1]", "a token id, not the text \"a\""),
            (r#"{"prompt": [1, -1]}"#, "prompt[1]", "a token id, not the number -1"),
            (r#"{"prompt": [[1], 2]}"#, "prompt[1]", "a list of token ids, not the number 2"),
            (r#"{"prompt": [[1], [2, null]]}"#, "prompt[1][1]", "a token id, not null"),
            (r#"{"prompt": [[1], []]}"#, "prompt[1]", "prompt[1] is empty"),
            (r#"{"prompt": [null]}"#, "prompt", "a text, a list of texts"),
            (r#"{"max_tokens": 5}"#, "prompt", "prompt is missing: it must be a text, a list"),
        ] {
            let error = completion(text).expect_err(text);
            assert!(error.message.contains(says), "{text}: {}", error.message);
            assert_eq!(error.body()["error"]["param"], param, "{text}");
        }
        let many = format!(r#"{{"prompt": {:?}}}"#, vec!["a"; MAX_PROMPTS + 1]);
        assert!(completion(&many).unwrap_err().message.contains("65 prompts"));
    }

    #[test]
    fn what_is_wrong_with_messages_is_told_where() {
        for (messages, param, says) in [
            ("5", "messages", "a list of at least one message, not the number 5"),
            ("[]", "messages", "a list of at least one message"),
            ("null", "messages", "messages is missing"),
            ("[7]", "messages[0]", "an object with role and content"),
            (r#"[{"content": "x"}]"#, "messages[0].role", "messages[0].role is missing"),
            (
                r#"[{"role": "user", "content": 5}]"#,
                "messages[0].content",
                "a text or a list of parts, not the number 5",
            ),
            (
                r#"[{"role": "user", "content": ["x"]}]"#,
                "messages[0].content[0]",
                "an object with type and text",
            ),
            (
                r#"[{"role": "user", "content": [{"type": "text"}]}]"#,
                "messages[0].content[0].text",
                "is missing",
            ),
            (
                r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#,
                "messages[0].content[0].type",
                "\"image_url\" is not supported",
            ),
            (
                r#"[{"role": "user"}, {"role": "assistant", "tool_calls": "x"}]"#,
                "messages[1].tool_calls",
                "a list of calls",
            ),
        ] {
            let body = format!(r#"{{"messages": {messages}}}"#);
            let error = ChatRequest::read(body.as_bytes()).expect_err(&body);
            assert!(error.message.contains(says), "{body}: {}", error.message);
            assert_eq!(error.body()["error"]["param"], param, "{body}");
        }
        let error = chat(r#", "chat_template_kwargs": [1]"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("chat_template_kwargs"));
        let twice = chat(r#", "messages": [{"role": "user", "content": "b"}]"#).unwrap_err();
        assert!(twice.message.contains("once"), "{}", twice.message);
    }

    #[test]
    fn vectors_come_as_numbers_or_as_bytes() {
        let ask = |more: &str| {
            let body = format!(r#"{{"input": ["a", "b"]{more}}}"#);
            EmbeddingRequest::read(body.as_bytes())
        };
        let vectors = [vec![1.0, -0.1], vec![0.5, 2.0]];
        let request = ask("").unwrap();
        assert_eq!(request.input, EmbeddingInput::Texts(vec!["a".to_owned(), "b".to_owned()]));
        let answer = request.answer("m", &vectors, 7);
        let second = json!({ "object": "embedding", "index": 1, "embedding": [0.5, 2.0] });
        assert_eq!(answer["data"][1], second);
        assert_eq!(answer["usage"], json!({ "prompt_tokens": 7, "total_tokens": 7 }));
        // As `struct.pack("<2f", 1.0, -0.1)` has them.
        let answer = ask(r#", "encoding_format": "base64""#).unwrap().answer("m", &vectors, 7);
        assert_eq!(answer["data"][0]["embedding"], "AACAP83MzL0=");
        assert_eq!(ask(r#", "dimensions": 2"#).unwrap().dimensions, Some(2));
        for (more, param, says) in [
            (r#", "dimensions": 0"#, "dimensions", "at least 1"),
            (
                r#", "encoding_format": "int8""#,
                "encoding_format",
                "float or base64, not the text \"int8\"",
            ),
            (r#", "truncate": "yes""#, "truncate", "true or false"),
        ] {
            let error = ask(more).unwrap_err();
            assert!(error.message.contains(says), "{}", error.message);
            assert_eq!(error.param.as_deref(), Some(param));
        }
        for (input, want) in [("[1, 2]", vec![vec![1, 2]]), ("[[1], [2]]", vec![vec![1], vec![2]])]
        {
            let body = format!(r#"{{"input": {input}}}"#);
            let request = EmbeddingRequest::read(body.as_bytes()).unwrap();
            assert_eq!(request.input, EmbeddingInput::Ids(want));
        }
    }
}
