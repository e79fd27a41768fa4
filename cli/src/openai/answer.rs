//! Answers to programs that ask for text, as OpenAI's API has them.

use serde_json::{Value, json};

/// The numbers of tokens of prompts and of answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub prompt: u64,
    /// Tokens of prompts whose rows were in the KV cache already.
    pub cached: u64,
    pub generated: u64,
}

impl Usage {
    fn json(self) -> Value {
        let Self { prompt, cached, generated } = self;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": { "cached_tokens": cached },
        })
    }
}

/// The form of an answer: that of completions, or of chats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    Completion,
    Chat,
}

/// The fields that all objects of one answer share.
#[derive(Clone, Debug)]
pub struct Frame {
    pub form: Form,
    /// The coordinator's number of the first sequence's request.
    pub request: u64,
    /// When the answer began, in seconds since 1970.
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

    /// The first chunk of a stream; only chats have one.
    pub fn begin(&self) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        (self.form == Form::Chat).then(|| self.chunk(0, delta, None))
    }

    /// A chunk with a piece of text `index`; none if the piece is empty.
    pub fn piece(&self, index: usize, text: &str) -> Option<Value> {
        let what = match self.form {
            Form::Completion => text.into(),
            Form::Chat => json!({ "content": text }),
        };
        (!text.is_empty()).then(|| self.chunk(index, what, None))
    }

    /// The last chunk of text `index`, with why it ends.
    pub fn end(&self, index: usize, finish: &str) -> Value {
        match self.form {
            Form::Completion => self.chunk(index, "".into(), Some(finish)),
            Form::Chat => self.chunk(index, json!({}), Some(finish)),
        }
    }

    /// The last chunk of a stream, with the tokens of the whole answer.
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
