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

/// A text of an answer, or a piece of one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AnswerText {
    pub text: String,
    /// The ids of its tokens, for a request that asks for them.
    pub token_ids: Option<Vec<u32>>,
}

impl AnswerText {
    /// Adds a piece.
    pub fn push(&mut self, piece: &Self) {
        self.text.push_str(&piece.text);
        if let Some(ids) = &piece.token_ids {
            self.token_ids.get_or_insert_default().extend(ids);
        }
    }

    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.token_ids.as_ref().is_none_or(Vec::is_empty)
    }
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
    pub fn whole(&self, texts: Vec<(AnswerText, String)>, usage: Usage) -> Value {
        let choices = texts.into_iter().enumerate().map(|(index, (text, finish))| {
            let said = match self.form {
                Form::Completion => ("text", text.text.into()),
                Form::Chat => ("message", json!({ "role": "assistant", "content": text.text })),
            };
            choice(index, said, text.token_ids, Some(&finish))
        });
        let mut answer = self.around(choices.collect(), false);
        answer["usage"] = usage.json();
        answer
    }

    /// The first chunk of a stream; only chats have one.
    pub fn begin(&self) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        (self.form == Form::Chat).then(|| self.chunk(0, delta, None, None))
    }

    /// A chunk with a piece of text `index`; none if the piece is empty.
    pub fn piece(&self, index: usize, piece: AnswerText) -> Option<Value> {
        if piece.is_empty() {
            return None;
        }
        let what = match self.form {
            Form::Completion => piece.text.into(),
            Form::Chat => json!({ "content": piece.text }),
        };
        Some(self.chunk(index, what, piece.token_ids, None))
    }

    /// The last chunk of text `index`, with why it ends.
    pub fn end(&self, index: usize, finish: &str) -> Value {
        match self.form {
            Form::Completion => self.chunk(index, "".into(), None, Some(finish)),
            Form::Chat => self.chunk(index, json!({}), None, Some(finish)),
        }
    }

    /// The last chunk of a stream, with the tokens of the whole answer.
    pub fn usage(&self, usage: Usage) -> Value {
        let mut answer = self.around(Vec::new(), true);
        answer["usage"] = usage.json();
        answer
    }

    fn chunk(
        &self,
        index: usize,
        what: Value,
        token_ids: Option<Vec<u32>>,
        finish: Option<&str>,
    ) -> Value {
        let key = if self.form == Form::Chat { "delta" } else { "text" };
        self.around(vec![choice(index, (key, what), token_ids, finish)], true)
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

/// A choice of an answer: what it says, under its key, and why it ends, if it does.
fn choice(
    index: usize,
    (key, what): (&str, Value),
    token_ids: Option<Vec<u32>>,
    finish: Option<&str>,
) -> Value {
    let mut choice =
        json!({ "index": index, key: what, "logprobs": null, "finish_reason": finish });
    if let Some(ids) = token_ids {
        choice["token_ids"] = json!(ids);
    }
    choice
}
