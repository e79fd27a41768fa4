//! Who answers: a cluster, or a decoder of this process.

use crate::{decoder::Generator, failure::Failure};
use galaxy_client::{Client, GenerateOptions, Generated, Generating, Prompt, Token};
use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex, PoisonError},
};
use tokio::sync::mpsc;

/// Tokens on their way to the terminal.
const AHEAD: usize = 64;

/// Who answers.
pub enum Backend {
    /// A cluster, which serves a model of this name,
    Cluster {
        client: Box<Client>,
        model: String,
        /// and whose texts have so many tokens at most.
        context: u32,
    },
    /// A decoder.
    Here(Arc<Here>),
}

/// A decoder of this process.
pub struct Here {
    model: String,
    context: u32,
    generator: Mutex<Generator>,
}

/// What comes of an answer.
pub enum Piece {
    /// A token.
    Token(Token),
    /// The end, with what was held back of the text.
    Done { finish: String, text: String },
}

/// An answer on its way. Dropping it ends it.
pub enum Answer {
    Cluster(Box<Generating>),
    Here(mpsc::Receiver<Result<Piece, Failure>>),
}

impl From<Generator> for Backend {
    fn from(generator: Generator) -> Self {
        let (model, context) =
            (generator.decoder().name().to_owned(), generator.decoder().context());
        Self::Here(Arc::new(Here { model, context, generator: Mutex::new(generator) }))
    }
}

impl Backend {
    /// What the model is called.
    pub fn name(&self) -> &str {
        match self {
            Self::Cluster { model, .. } => model,
            Self::Here(here) => &here.model,
        }
    }

    /// Most tokens of a chat with its answer; 0 where nobody says.
    pub fn context(&self) -> u32 {
        match self {
            Self::Cluster { context, .. } => *context,
            Self::Here(here) => here.context,
        }
    }

    /// Asks for the answer to a chat.
    pub async fn ask(&self, tokens: Vec<u32>, options: GenerateOptions) -> Result<Answer, Failure> {
        match self {
            Self::Cluster { client, .. } => {
                let generating = client.generate(Prompt::Ids(tokens), options).await?;
                Ok(Answer::Cluster(Box::new(generating)))
            }
            Self::Here(here) => {
                let (pieces, coming) = mpsc::channel(AHEAD);
                let here = here.clone();
                tokio::task::spawn_blocking(move || {
                    let done = here.generate(tokens, options, &pieces);
                    // Who asked may be gone.
                    drop(pieces.blocking_send(done));
                });
                Ok(Answer::Here(coming))
            }
        }
    }
}

impl Here {
    /// Makes an answer to its end, or until nobody takes it any more.
    fn generate(
        &self,
        tokens: Vec<u32>,
        options: GenerateOptions,
        pieces: &mpsc::Sender<Result<Piece, Failure>>,
    ) -> Result<Piece, Failure> {
        // The answer before may not have ended yet.
        let mut generator = self.generator.lock().unwrap_or_else(PoisonError::into_inner);
        let task = generator.decoder().settle(tokens, false, options)?;
        let ended = generator.generate(task, &mut |token| match pieces
            .blocking_send(Ok(Piece::Token(token)))
        {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        })?;
        Ok(Piece::Done { finish: ended.finish.to_owned(), text: ended.text })
    }
}

impl Answer {
    /// What comes next.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn next(&mut self) -> Result<Piece, Failure> {
        let broke_off = || Failure::new("the answer broke off before its end");
        match self {
            Self::Cluster(generating) => match generating.next().await?.ok_or_else(broke_off)? {
                Generated::Token(token) => Ok(Piece::Token(token)),
                Generated::Done(done) => Ok(Piece::Done { finish: done.finish, text: done.text }),
            },
            Self::Here(coming) => coming.recv().await.ok_or_else(broke_off)?,
        }
    }
}
