//! What answers a chat: a cluster, or a decoder of this process.

use crate::{decoder::Generator, failure::Failure};
use galaxy_client::{Client, GenerateOptions, Generated, Generating, Prompt, Token};
use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::mpsc;

/// The most tokens that wait for the terminal.
const AHEAD: usize = 64;

/// What answers a chat.
pub enum Backend {
    /// A cluster, by its coordinator.
    Cluster {
        client: Box<Client>,
        model: String,
        /// The context length: most tokens of a chat with its answer; 0 if nothing is generated
        /// there.
        context: u32,
    },
    /// A decoder of this process.
    Here(Arc<Here>),
}

/// A decoder of this process, with the name of its model and its context length.
pub struct Here {
    model: String,
    context: u32,
    generator: Mutex<Generator>,
}

/// A piece of an answer.
pub enum AnswerEvent {
    /// A generated token.
    Token(Token),
    /// The end: why the answer ended, and the rest of its text, which was held back.
    Done { finish: String, text: String },
}

/// An answer that is being generated. Dropping it ends the generation.
pub enum ChatReply {
    Cluster(Box<Generating>),
    Here(mpsc::Receiver<Result<AnswerEvent, Failure>>),
}

impl From<Generator> for Backend {
    fn from(generator: Generator) -> Self {
        let (model, context) =
            (generator.decoder().name().to_owned(), generator.decoder().context());
        Self::Here(Arc::new(Here { model, context, generator: Mutex::new(generator) }))
    }
}

impl Backend {
    /// The model's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Cluster { model, .. } => model,
            Self::Here(here) => &here.model,
        }
    }

    /// The context length: most tokens of a chat with its answer; 0 if the cluster generates
    /// nothing.
    pub fn context(&self) -> u32 {
        match self {
            Self::Cluster { context, .. } => *context,
            Self::Here(here) => here.context,
        }
    }

    /// Asks for the answer to a chat, which is given as tokens.
    pub async fn ask(
        &self,
        tokens: Vec<u32>,
        options: GenerateOptions,
    ) -> Result<ChatReply, Failure> {
        match self {
            Self::Cluster { client, .. } => {
                let generating = client.generate(Prompt::Ids(tokens), options).await?;
                Ok(ChatReply::Cluster(Box::new(generating)))
            }
            Self::Here(here) => {
                let (pieces, coming) = mpsc::channel(AHEAD);
                let here = here.clone();
                tokio::task::spawn_blocking(move || {
                    let done = here.generate(tokens, options, &pieces);
                    // Who asked may be gone.
                    drop(pieces.blocking_send(done));
                });
                Ok(ChatReply::Here(coming))
            }
        }
    }
}

impl Here {
    /// Generates an answer to its end, or until nobody takes it any more.
    fn generate(
        &self,
        tokens: Vec<u32>,
        options: GenerateOptions,
        pieces: &mpsc::Sender<Result<AnswerEvent, Failure>>,
    ) -> Result<AnswerEvent, Failure> {
        // The answer before may not have ended yet.
        let mut generator = self.generator.lock().unwrap_or_else(PoisonError::into_inner);
        let task = generator.decoder().settle(tokens, false, options)?;
        let ended = generator.generate(task, &mut |token| match pieces
            .blocking_send(Ok(AnswerEvent::Token(token)))
        {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        })?;
        Ok(AnswerEvent::Done { finish: ended.finish.to_owned(), text: ended.text })
    }
}

impl ChatReply {
    /// Waits for the next piece.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn next(&mut self) -> Result<AnswerEvent, Failure> {
        let broke_off = || Failure::new("the answer broke off before its end");
        match self {
            Self::Cluster(generating) => match generating.next().await?.ok_or_else(broke_off)? {
                Generated::Token(token) => Ok(AnswerEvent::Token(token)),
                Generated::Done(done) => {
                    Ok(AnswerEvent::Done { finish: done.finish, text: done.text })
                }
            },
            Self::Here(coming) => coming.recv().await.ok_or_else(broke_off)?,
        }
    }
}
