//! What programs ask and what they are answered, as OpenAI's API has it.

use super::{
    chat::{Message, TemplateArguments},
    error::ApiError,
};
use crate::{GenerateOptions, Prompt, Sampling};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Tokens of `/v1/completions`, if nobody says how many.
const MAX_TOKENS: u32 = 16;
/// Prompts of one request, which are answered one after another.
const MAX_PROMPTS: usize = 64;

/// `POST /v1/completions`.
#[derive(Deserialize, Debug)]
pub struct CompletionRequest {
    prompt: Prompts,
    #[serde(flatten)]
    pub choice: Choice,
}

/// `POST /v1/chat/completions`.
#[derive(Deserialize, Debug)]
pub struct ChatRequest {
    pub messages: Vec<Message>,
    /// For the template, like `{"enable_thinking": false}`.
    #[serde(default)]
    pub chat_template_kwargs: TemplateArguments,
    #[serde(flatten)]
    pub choice: Choice,
}

/// `POST /v1/embeddings`.
#[derive(Deserialize, Debug)]
pub struct EmbeddingRequest {
    input: Prompts,
    pub model: Option<String>,
    #[serde(default)]
    encoding_format: Encoding,
    dimensions: Option<usize>,
    /// Cut texts that are too long instead of refusing them.
    #[serde(default)]
    pub truncate: bool,
}

/// Texts or their tokens, one or several.
#[derive(Deserialize, Debug)]
#[serde(untagged, expecting = "a text, a list of texts, a list of token ids, or a list of those")]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

#[derive(Deserialize, Debug, Default, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    Base64,
}

#[derive(Deserialize, Debug)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize, Debug)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// How tokens are chosen, and how they are told. What is not there is as OpenAI has it.
#[derive(Deserialize, Debug)]
pub struct Choice {
    pub model: Option<String>,
    #[serde(default)]
    pub stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    stop: Option<Stop>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    ignore_eos: Option<bool>,
    // What would change the answer, and is not there.
    n: Option<u32>,
    best_of: Option<u32>,
    echo: Option<bool>,
    suffix: Option<Value>,
    logprobs: Option<Value>,
    top_logprobs: Option<Value>,
    tools: Option<Value>,
    functions: Option<Value>,
    response_format: Option<Value>,
}

impl Choice {
    /// Whether the last event of a stream says how many tokens there were.
    pub fn usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    /// As the SDK has it. With `default` tokens at most, if nobody says how many; 0: as many as there
    /// is room for.
    fn options(&self, default: u32) -> Result<GenerateOptions, ApiError> {
        self.refuse()?;
        let mut bias = Vec::new();
        for (token, &value) in self.logit_bias.iter().flatten() {
            let wrong = || ApiError::bad(format!("logit_bias: {token:?} is not the id of a token"));
            bias.push((token.parse().map_err(|_| wrong())?, value));
        }
        bias.sort_by_key(|&(token, _)| token);
        let most = self.max_completion_tokens.or(self.max_tokens);
        if most == Some(0) {
            return Err(ApiError::bad("max_tokens must be at least 1"));
        }
        let plain = Sampling::default();
        Ok(GenerateOptions {
            max_tokens: most.unwrap_or(default),
            sampling: Sampling {
                temperature: self.temperature.unwrap_or(1.0),
                // -1 and 0: all.
                top_k: self.top_k.map_or(0, |k| u32::try_from(k.max(0)).unwrap_or(u32::MAX)),
                top_p: self.top_p.unwrap_or(plain.top_p),
                min_p: self.min_p.unwrap_or(plain.min_p),
                repetition: self.repetition_penalty.unwrap_or(plain.repetition),
                presence: self.presence_penalty.unwrap_or(plain.presence),
                frequency: self.frequency_penalty.unwrap_or(plain.frequency),
                bias,
                ..plain
            },
            seed: self.seed.map(i64::cast_unsigned),
            stop: match &self.stop {
                None => Vec::new(),
                Some(Stop::One(text)) => vec![text.clone()],
                Some(Stop::Many(texts)) => texts.clone(),
            },
            ignore_end: self.ignore_eos.unwrap_or(false),
        })
    }

    /// What would be answered wrongly is not answered.
    fn refuse(&self) -> Result<(), ApiError> {
        let set = |value: &Option<Value>| match value {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(_) => true,
        };
        let format = self.response_format.as_ref().and_then(|format| format.get("type"));
        let asked = [
            ("n above 1", self.n.is_some_and(|n| n > 1)),
            ("best_of above 1", self.best_of.is_some_and(|n| n > 1)),
            ("echo", self.echo == Some(true)),
            ("suffix", set(&self.suffix)),
            ("logprobs", set(&self.logprobs) || set(&self.top_logprobs)),
            ("a list of tools", set(&self.tools) || set(&self.functions)),
            ("a response_format other than text", format.is_some_and(|format| format != "text")),
        ];
        match asked.iter().find(|(_, asked)| *asked) {
            Some((what, _)) => Err(ApiError::unsupported(what)),
            None => Ok(()),
        }
    }
}

impl CompletionRequest {
    /// The prompts, and how they go on.
    pub fn parts(self) -> Result<(Vec<Prompt>, GenerateOptions), ApiError> {
        let options = self.choice.options(MAX_TOKENS)?;
        let prompts: Vec<Prompt> = match self.prompt {
            Prompts::Text(text) => vec![Prompt::Text(text)],
            Prompts::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Prompts::Ids(ids) => vec![Prompt::Ids(ids)],
            Prompts::ManyIds(many) => many.into_iter().map(Prompt::Ids).collect(),
        };
        let empty = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Ids(ids) => ids.is_empty(),
        };
        match prompts.len() {
            0 => Err(ApiError::bad("there is no prompt")),
            _ if prompts.iter().any(empty) => Err(ApiError::bad("a prompt is empty")),
            1..=MAX_PROMPTS => Ok((prompts, options)),
            many => Err(ApiError::bad(format!("{many} prompts are more than {MAX_PROMPTS}"))),
        }
    }
}

impl ChatRequest {
    pub fn options(&self) -> Result<GenerateOptions, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::bad("there are no messages"));
        }
        self.choice.options(0)
    }
}

impl EmbeddingRequest {
    /// The texts.
    pub fn texts(&mut self) -> Result<Vec<String>, ApiError> {
        let texts = match std::mem::replace(&mut self.input, Prompts::Texts(Vec::new())) {
            Prompts::Text(text) => vec![text],
            Prompts::Texts(texts) => texts,
            // An empty list is one of texts.
            Prompts::Ids(_) | Prompts::ManyIds(_) => {
                return Err(ApiError::bad("token ids have no vectors here; send texts"));
            }
        };
        if texts.is_empty() { Err(ApiError::bad("there is no input")) } else { Ok(texts) }
    }

    /// `{"object": "list", "data": [...], ...}`.
    pub fn answer(
        &self,
        model: &str,
        vectors: &[Vec<f32>],
        tokens: u64,
    ) -> Result<Value, ApiError> {
        let width = vectors.first().map_or(0, Vec::len);
        if let Some(wanted) = self.dimensions.filter(|&wanted| wanted != width) {
            let why = format!("the model's vectors have {width} dimensions, not {wanted}");
            return Err(ApiError::bad(why));
        }
        let data = vectors.iter().enumerate().map(|(index, vector)| {
            let embedding = match self.encoding_format {
                Encoding::Float => json!(vector),
                Encoding::Base64 => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                    BASE64_STANDARD.encode(bytes).into()
                }
            };
            json!({ "object": "embedding", "index": index, "embedding": embedding })
        });
        let data: Vec<Value> = data.collect();
        let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
        Ok(json!({ "object": "list", "data": data, "model": model, "usage": usage }))
    }
}

/// Tokens that went in and came out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub prompt: u64,
    pub made: u64,
}

impl Usage {
    fn json(self) -> Value {
        let Self { prompt, made } = self;
        json!({ "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made })
    }
}

/// What texts are told as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    Completion,
    Chat,
}

/// The words around the texts of one request.
#[derive(Clone, Debug)]
pub struct Frame {
    pub form: Form,
    /// The coordinator's number of its first text.
    pub request: u64,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

impl Frame {
    /// A whole answer: the texts, each with why it ends.
    pub fn whole(&self, texts: Vec<(String, String)>, usage: Usage) -> Value {
        let choices = texts.into_iter().enumerate().map(|(index, (text, finish))| match self.form {
            Form::Completion => {
                json!({ "index": index, "text": text, "logprobs": null, "finish_reason": finish })
            }
            Form::Chat => json!({
                "index": index, "message": { "role": "assistant", "content": text },
                "logprobs": null, "finish_reason": finish,
            }),
        });
        let mut answer = self.around(choices.collect(), false);
        answer["usage"] = usage.json();
        answer
    }

    /// What a stream begins with; only chats have that.
    pub fn begin(&self) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        (self.form == Form::Chat).then(|| self.chunk(0, delta, None))
    }

    /// A piece of text `index`, if it is not empty.
    pub fn piece(&self, index: usize, text: &str) -> Option<Value> {
        let what = match self.form {
            Form::Completion => text.into(),
            Form::Chat => json!({ "content": text }),
        };
        (!text.is_empty()).then(|| self.chunk(index, what, None))
    }

    /// The end of text `index`.
    pub fn end(&self, index: usize, finish: &str) -> Value {
        match self.form {
            Form::Completion => self.chunk(index, "".into(), Some(finish)),
            Form::Chat => self.chunk(index, json!({}), Some(finish)),
        }
    }

    /// What all of it took.
    pub fn usage(&self, usage: Usage) -> Value {
        let mut answer = self.around(Vec::new(), true);
        answer["usage"] = usage.json();
        answer
    }

    fn chunk(&self, index: usize, what: Value, finish: Option<&str>) -> Value {
        let key = if self.form == Form::Chat { "delta" } else { "text" };
        let choice =
            json!({ "index": index, key: what, "logprobs": null, "finish_reason": finish });
        self.around(vec![choice], true)
    }

    fn around(&self, choices: Vec<Value>, chunk: bool) -> Value {
        let (id, object) = match (self.form, chunk) {
            (Form::Completion, _) => ("cmpl", "text_completion"),
            (Form::Chat, false) => ("chatcmpl", "chat.completion"),
            (Form::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
        };
        json!({
            "id": format!("{id}-{}", self.request), "object": object, "created": self.created,
            "model": self.model, "choices": choices,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn completion(text: &str) -> Result<(Vec<Prompt>, GenerateOptions), String> {
        let request: CompletionRequest = serde_json::from_str(text).map_err(|e| e.to_string())?;
        request.parts().map_err(|e| e.message)
    }

    #[test]
    fn what_is_not_said_is_as_openai_has_it() {
        let (prompts, options) =
            completion(r#"{"prompt": "a", "user": "who", "model": "m"}"#).unwrap();
        assert_eq!(prompts, ["a".into()]);
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        assert_eq!(options, GenerateOptions { max_tokens: 16, sampling, ..Default::default() });
        let chat =
            r#"{"messages": [{"role": "user", "content": "a", "name": "b"}], "n": 1, "tools": []}"#;
        let chat: ChatRequest = serde_json::from_str(chat).unwrap();
        assert_eq!(chat.options().unwrap().max_tokens, 0);
        assert!(!chat.choice.usage());
    }

    #[test]
    fn what_is_said_is_done() {
        let text = r#"{
            "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
            "presence_penalty": -1, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "seed": -1,
            "logit_bias": {"10": -100, "9": 5.5}, "stop": ["x", "y"], "ignore_eos": true, "logprobs": null,
            "stream": true, "stream_options": {"include_usage": true}
        }"#;
        let request: CompletionRequest = serde_json::from_str(text).unwrap();
        assert!(request.choice.usage() && request.choice.stream == Some(true));
        let (prompts, options) = request.parts().unwrap();
        assert_eq!(prompts, [Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]);
        let sampling = Sampling {
            temperature: 0.5,
            top_p: 0.9,
            min_p: 0.1,
            repetition: 1.5,
            presence: -1.0,
            frequency: 0.25,
            bias: vec![(9, 5.5), (10, -100.0)],
            ..Sampling::default()
        };
        let stop = vec!["x".to_owned(), "y".to_owned()];
        let seed = Some(u64::MAX);
        let want = GenerateOptions { max_tokens: 5, sampling, seed, stop, ignore_end: true };
        assert_eq!(options, want);
    }

    #[test]
    fn what_cannot_be_answered_is_refused() {
        for (text, says) in [
            (r#"{"prompt": "a", "n": 2}"#, "n above 1"),
            (r#"{"prompt": "a", "best_of": 2}"#, "best_of"),
            (r#"{"prompt": "a", "echo": true}"#, "echo"),
            (r#"{"prompt": "a", "logprobs": 1}"#, "logprobs"),
            (r#"{"prompt": "a", "suffix": "b"}"#, "suffix"),
            (r#"{"prompt": "a", "tools": [{}]}"#, "tools"),
            (r#"{"prompt": "a", "response_format": {"type": "json_object"}}"#, "response_format"),
            (r#"{"prompt": "a", "max_tokens": 0}"#, "at least 1"),
            (r#"{"prompt": "a", "logit_bias": {"the": 1}}"#, "\"the\" is not the id"),
            (r#"{"prompt": "a", "stop": 5}"#, "a text or a list of texts"),
            (r#"{"prompt": 5}"#, "a text, a list of texts"),
            (r#"{"prompt": []}"#, "no prompt"),
            (r#"{"prompt": ["a", ""]}"#, "a prompt is empty"),
            (r#"{"prompt": [[]]}"#, "a prompt is empty"),
            (r#"{"max_tokens": 5}"#, "missing field `prompt`"),
            (r#"{"prompt": "a""#, "EOF"),
        ] {
            let error = completion(text).expect_err(text);
            assert!(error.contains(says), "{text}: {error}");
        }
        let many = format!(r#"{{"prompt": {:?}}}"#, vec!["a"; MAX_PROMPTS + 1]);
        assert!(completion(&many).unwrap_err().contains("65 prompts"));
    }

    #[test]
    fn vectors_come_as_numbers_or_as_bytes() {
        let ask = |more: &str| -> EmbeddingRequest {
            serde_json::from_str(&format!(r#"{{"input": ["a", "b"]{more}}}"#)).unwrap()
        };
        let vectors = [vec![1.0, -0.1], vec![0.5, 2.0]];
        let mut request = ask("");
        assert_eq!(request.texts().unwrap(), ["a", "b"]);
        let answer = request.answer("m", &vectors, 7).unwrap();
        let second = json!({ "object": "embedding", "index": 1, "embedding": [0.5, 2.0] });
        assert_eq!(answer["data"][1], second);
        assert_eq!(answer["usage"], json!({ "prompt_tokens": 7, "total_tokens": 7 }));
        // As `struct.pack("<2f", 1.0, -0.1)` has them.
        let answer = ask(r#", "encoding_format": "base64""#).answer("m", &vectors, 7).unwrap();
        assert_eq!(answer["data"][0]["embedding"], "AACAP83MzL0=");
        assert!(ask(r#", "dimensions": 2"#).answer("m", &vectors, 7).is_ok());
        let error = ask(r#", "dimensions": 3"#).answer("m", &vectors, 7).unwrap_err();
        assert!(error.message.contains("2 dimensions, not 3"), "{error:?}");
        let mut ids: EmbeddingRequest = serde_json::from_str(r#"{"input": [1, 2]}"#).unwrap();
        assert!(ids.texts().is_err());
    }
}
