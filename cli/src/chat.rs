//! `galaxy chat`: a conversation with a model, on a cluster or in this process.

mod answer;
mod files;
mod lines;

pub use files::other_model;

use super::{
    Connection, choice::Choice, decoder::DecoderArgs, failure::Failure, json, pace::Pace, print,
    progress, tell,
};
use answer::{AnswerEvent, Backend, ChatReply};
use clap::Args;
use galaxy_cli::openai::chat::{Chat, Message, TemplateArguments};
use galaxy_client::GenerateOptions;
use galaxy_common::Fallback;
use lines::{Input, Interrupts, Lines};
use serde::Serialize;
use std::path::PathBuf;

/// The settings where neither the command nor the model gives any: the likeliest tokens, and a page of an answer.
const FALLBACK: Fallback = Fallback { temperature: 0.0, max_tokens: 512 };

const SHAPE: &str = "\
A line is a message. /clear forgets what was said, /exit or Ctrl-D ends the chat, Ctrl-C an answer. The answer
goes to stdout as it is made, what it took to stderr. Where stdin is no terminal, the first message that has no
answer ends the chat, with exit code 1.

With --json each answer is one object, on a line of its own:

  {
    \"text\": \"Hello!\", \"finish\": \"stop\", \"prompt_tokens\": 31, \"tokens\": 3,
    \"context_tokens\": 34, \"context\": 2048, \"first_token_ms\": 12.3, \"tokens_per_second\": 81.0
  }

finish is stop (a token or a string that ends texts), length, or interrupted. context_tokens are those of the
chat so far, of at most context.";

/// Arguments of `galaxy chat`.
#[derive(Args, Debug)]
#[command(after_long_help = SHAPE)]
pub struct ChatArgs {
    /// System message, before the first message [default: that of the chat template].
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Run this model in this process, without a cluster.
    ///
    /// DIR is a model directory or a GGUF file. No coordinator is asked.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Cluster file that names the coordinator and the model [default: that of galaxy up, else cluster.toml].
    ///
    /// The chat template and the tokenizer are read from its model.
    #[arg(long, value_name = "FILE", conflicts_with = "model", help_heading = "Coordinator")]
    cluster: Option<PathBuf>,
    /// Model directory or GGUF file with the chat template and tokenizer of the cluster's model.
    ///
    /// Needed where no cluster file is on this machine.
    #[arg(long, value_name = "DIR", conflicts_with = "model", help_heading = "Coordinator")]
    template: Option<PathBuf>,
    /// Most tokens of an answer [default: as the model's generation_config.json says, else 512].
    ///
    /// An answer has at most as many tokens as the context has room for.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// End an answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print one JSON object for each answer instead of its text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    decoder: DecoderArgs,
    #[command(flatten)]
    connection: Connection,
}

/// The object that `--json` prints for each answer.
#[derive(Serialize)]
struct AnswerJson<'a> {
    text: &'a str,
    finish: &'a str,
    prompt_tokens: u32,
    tokens: u32,
    context_tokens: u32,
    context: u32,
    first_token_ms: f64,
    tokens_per_second: Option<f64>,
}

/// Runs `galaxy chat`.
pub async fn chat(args: ChatArgs) -> Result<(), Failure> {
    let settings = GenerateOptions {
        max_tokens: args.max_tokens.unwrap_or(0),
        sampling: args.choice.params(0)?,
        stop: args.stop.clone(),
        ignore_end: false,
        priority: 0,
        generated: Vec::new(),
        fallback: Some(FALLBACK),
    };
    let options = args.choice.generation_config.apply(settings);
    let system = args.system.as_deref().map(|text| Message::new("system", text));
    let mut lines = Lines::begin();
    let (system, json) = (Vec::from_iter(system), args.json);
    let (chat, backend) = files::open(args).await?;
    let messages = system.clone();
    let mut conversation = Conversation { chat, backend, options, system, messages, json };
    if lines.is_terminal() {
        let name = conversation.backend.name();
        tell(&format!("chat with {name}; /clear forgets what was said, /exit or Ctrl-D ends it"));
    }
    let mut interrupts = Interrupts::watch(lines.is_terminal())?;
    while let Some(line) = lines.next(&mut interrupts).await? {
        let failed = match Input::of(&line) {
            Input::Nothing => Ok(()),
            Input::Exit => return Ok(()),
            Input::Clear => {
                conversation.messages.clone_from(&conversation.system);
                Ok(())
            }
            Input::Unknown(command) => {
                let what = format!("{command} is no command; there are /clear and /exit");
                Err(Failure::new(what))
            }
            Input::Message(text) => conversation.turn(text, &mut interrupts).await,
        };
        match failed {
            // A person goes on.
            Err(failure) if lines.is_terminal() && !failure.is_enough() => {
                tell(&failure.to_string());
            }
            other => other?,
        }
    }
    Ok(())
}

/// A chat with its messages so far.
struct Conversation {
    chat: Chat,
    backend: Backend,
    options: GenerateOptions,
    /// The messages that each chat begins with: the system message, if there is one.
    system: Vec<Message>,
    /// All messages so far, beginning with those of `system`.
    messages: Vec<Message>,
    json: bool,
}

impl Conversation {
    /// Adds a message to the chat and shows its answer. A message without an answer is removed again.
    async fn turn(&mut self, text: &str, interrupts: &mut Interrupts) -> Result<(), Failure> {
        let before = self.messages.len();
        self.messages.push(Message::new("user", text));
        match self.answer(interrupts).await {
            Ok(text) => {
                self.messages.push(Message::new("assistant", &text));
                Ok(())
            }
            Err(failure) => {
                self.messages.truncate(before);
                Err(failure)
            }
        }
    }

    /// Shows the answer to the messages so far, token by token, and returns its text.
    async fn answer(&self, interrupts: &mut Interrupts) -> Result<String, Failure> {
        // The whole chat, as the template has it: what it begins with stays as it was sent before.
        let tokens = self.chat.tokens(&self.messages, &TemplateArguments::default());
        let tokens = tokens.map_err(|error| Failure::new(error.message))?;
        let (prompt, context) = (tokens.len() as u32, self.backend.context());
        if context > 0 && prompt >= context {
            return Err(self.full(prompt));
        }
        let mut pace = Pace::begin();
        let asking = self.backend.ask(tokens, self.options.clone());
        let mut answer = progress::watch("waiting", asking).await?;
        let mut text = String::new();
        let mut next =
            progress::watch("reading the chat", self.next(&mut answer, interrupts)).await?;
        let finish = loop {
            match next {
                AnswerEvent::Token(token) => {
                    pace.token();
                    self.show(&mut text, &token.text)?;
                }
                AnswerEvent::Done { finish, text: rest } => {
                    self.show(&mut text, &rest)?;
                    break finish;
                }
            }
            next = self.next(&mut answer, interrupts).await?;
        };
        let used = prompt + pace.tokens();
        if self.json {
            let told = AnswerJson {
                text: &text,
                finish: &finish,
                prompt_tokens: prompt,
                tokens: pace.tokens(),
                context_tokens: used,
                context,
                first_token_ms: pace.first_ms(),
                tokens_per_second: pace.rate(),
            };
            print(&json(&told)?)?;
        } else {
            print("\n")?;
            tell(&format!("{}; {used} of {context} tokens of the context", pace.words()));
        }
        if finish == "length" {
            match used >= context {
                true => tell(&format!("the answer is cut: {}", self.full(used).words())),
                false => tell("the answer is cut: it has as many tokens as --max-tokens allows"),
            }
        }
        Ok(text)
    }

    /// The next piece of an answer; its end, once somebody interrupts it.
    async fn next(
        &self,
        answer: &mut ChatReply,
        interrupts: &mut Interrupts,
    ) -> Result<AnswerEvent, Failure> {
        tokio::select! {
            biased;
            () = interrupts.next() => {
                Ok(AnswerEvent::Done { finish: "interrupted".to_owned(), text: String::new() })
            }
            piece = answer.next() => piece,
        }
    }

    fn show(&self, text: &mut String, more: &str) -> Result<(), Failure> {
        text.push_str(more);
        if self.json || more.is_empty() { Ok(()) } else { print(more) }
    }

    /// The failure of a chat whose `tokens` leave no room for an answer.
    fn full(&self, tokens: u32) -> Failure {
        let context = self.backend.context();
        let what = format!("the context is full: the chat has {tokens} of {context} tokens");
        let larger = match self.backend {
            Backend::Cluster { .. } => "; a cluster has what kv_cache_tokens in its file says",
            Backend::Here(_) => "",
        };
        Failure::new(what).todo(format!("/clear begins anew{larger}"))
    }
}
