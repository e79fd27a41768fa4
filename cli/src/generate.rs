//! `galaxy generate`: generates text, on a cluster or on workers of this process.

use super::{
    Connection,
    choice::Choice,
    decoder::{Decoder, DecoderArgs, Generator, Task},
    failure::Failure,
    ids::Ids,
    in_process::model_failure,
    json,
    pace::Pace,
    print, progress, tell,
};
use clap::Args;
use galaxy_client::{GenerateOptions, Generated, Prompt, Token};
use galaxy_common::Fallback;
use serde::Serialize;
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

/// The settings where neither the command nor the model gives any.
const FALLBACK: Fallback = Fallback { temperature: 0.0, max_tokens: 128 };

const SHAPE: &str = "\
With --json the result is one object:

  {
    \"text\": \" and then\", \"tokens\": [290, 788], \"finish\": \"length\",
    \"prompt_tokens\": 5, \"seed\": 1, \"logprobs\": [{\"token\": 290, \"logprob\": -1.2, \"top\": [[290, -1.2]]}],
    \"first_token_ms\": 12.3, \"tokens_per_second\": 81.0
  }

finish is stop (a token or a string that ends texts) or length. logprobs is null without
--logprobs, text without a tokenizer. Text goes to stdout as it is made, what it took to stderr.";

/// Arguments of `galaxy generate`.
#[derive(Args, Debug)]
#[command(after_long_help = SHAPE)]
pub struct GenerateArgs {
    /// The prompt: the text to continue.
    #[arg(required_unless_present = "ids", conflicts_with = "ids")]
    prompt: Option<String>,
    /// Token ids of the prompt instead: 5,17,9, or @FILE.json with a list of ids.
    #[arg(long, value_name = "IDS|@FILE")]
    ids: Option<Ids>,
    /// Run this model in this process, without a cluster.
    ///
    /// DIR is a model directory or a GGUF file. No coordinator is asked.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Most tokens to generate [default: as the model's generation_config.json says, else 128].
    ///
    /// At most as many are generated as the context has room for.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// End the text before this string; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after tokens that end the text.
    #[arg(long)]
    ignore_end: bool,
    /// Priority among your own requests: those with lower numbers come first.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        conflicts_with = "model"
    )]
    priority: i32,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    json: bool,
    /// Print the log-probabilities of the N likeliest tokens at each place; needs --json.
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    decoder: DecoderArgs,
    #[command(flatten)]
    connection: Connection,
}

impl GenerateArgs {
    fn options(&self) -> Result<GenerateOptions, Failure> {
        let options = GenerateOptions {
            max_tokens: self.max_tokens.unwrap_or(0),
            sampling: self.choice.params(self.logprobs.unwrap_or(0))?,
            stop: self.stop.clone(),
            ignore_end: self.ignore_end,
            priority: self.priority,
            generated: Vec::new(),
            fallback: Some(FALLBACK),
        };
        Ok(self.choice.generation_config.apply(options))
    }
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct JsonReply<'a> {
    text: Option<String>,
    tokens: Vec<u32>,
    finish: &'a str,
    prompt_tokens: usize,
    seed: u64,
    logprobs: Option<Vec<Logprobs>>,
    first_token_ms: f64,
    tokens_per_second: Option<f64>,
}

#[derive(Serialize)]
struct Logprobs {
    token: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// Prints a text as it is generated, or gathers it for `--json`.
struct Show {
    json: bool,
    logprobs: bool,
    /// Whether tokens have text, and not only ids.
    readable: bool,
    prompt: usize,
    seed: u64,
    pace: Pace,
    text: String,
    made: Vec<Token>,
}

impl Show {
    fn new(args: &GenerateArgs, readable: bool, prompt: usize, seed: u64) -> Self {
        Self {
            json: args.json,
            logprobs: args.logprobs.is_some(),
            readable,
            prompt,
            seed,
            pace: Pace::begin(),
            text: String::new(),
            made: Vec::new(),
        }
    }

    fn token(&mut self, token: Token) -> Result<(), Failure> {
        self.pace.token();
        if self.readable {
            self.add(&token.text)?;
        } else {
            let separator = if self.made.is_empty() { "" } else { "," };
            self.add(&format!("{separator}{}", token.token))?;
        }
        self.made.push(token);
        Ok(())
    }

    fn add(&mut self, text: &str) -> Result<(), Failure> {
        self.text.push_str(text);
        if self.json || text.is_empty() { Ok(()) } else { print(text) }
    }

    /// Prints the rest of the text, and the times that it took.
    fn done(mut self, finish: &str, rest: &str) -> Result<(), Failure> {
        if self.readable {
            self.add(rest)?;
        }
        let (prompt, seed, pace) = (self.prompt, self.seed, self.pace);
        if self.json {
            let tokens = self.made.iter().map(|token| token.token).collect();
            let logprobs = self
                .made
                .into_iter()
                .map(|Token { token, logprob, top, .. }| Logprobs { token, logprob, top });
            let answer = JsonReply {
                text: self.readable.then_some(self.text),
                tokens,
                finish,
                prompt_tokens: prompt,
                seed,
                logprobs: self.logprobs.then(|| logprobs.collect()),
                first_token_ms: pace.first_ms(),
                tokens_per_second: pace.rate(),
            };
            return print(&json(&answer)?);
        }
        print("\n")?;
        let (count, pace) = (pace.tokens(), pace.words());
        tell(&format!("{prompt} tokens in, {count} out ({finish}); {pace}; seed {seed}"));
        Ok(())
    }
}

/// Runs `galaxy generate`.
pub async fn generate(args: GenerateArgs) -> Result<(), Failure> {
    let Some(path) = args.model.clone() else { return on_cluster(args).await };
    let broke_off = |e| Failure::new(format!("the run broke off: {e}"));
    let loading = move || load(&args, &path).map(|loaded| (args, loaded));
    let loading = tokio::task::spawn_blocking(loading);
    let loaded = progress::watch("loading the model", loading).await;
    let (args, (generator, task)) = loaded.map_err(broke_off)??;
    tokio::task::spawn_blocking(move || generate_here(&args, generator, task))
        .await
        .map_err(broke_off)?
}

/// Generates text on a cluster.
async fn on_cluster(args: GenerateArgs) -> Result<(), Failure> {
    let prompt = match (&args.prompt, &args.ids) {
        (_, Some(ids)) => Prompt::Ids(one(ids)?),
        (text, None) => Prompt::from(text.as_deref().unwrap_or_default()),
    };
    let options = args.options()?;
    let client = args.connection.open().await?;
    let pace = Pace::begin();
    let mut text = progress::watch("waiting", client.generate(prompt, options)).await?;
    let prompt = text.prompt_tokens as usize;
    let mut show = Show { pace, ..Show::new(&args, text.text, prompt, text.seed) };
    let mut next = progress::watch("reading the prompt", text.next()).await?;
    loop {
        match next {
            Some(Generated::Token(token)) => show.token(token)?,
            Some(Generated::Done(done)) => return show.done(&done.finish, &done.text),
            None => return Err(Failure::new("the text has no end")),
        }
        next = text.next().await?;
    }
}

/// The one sequence of ids that the argument must name.
fn one(ids: &Ids) -> Result<Vec<u32>, Failure> {
    let [ids]: [Vec<u32>; 1] = ids
        .read()?
        .try_into()
        .map_err(|_| Failure::usage("one sequence is continued at a time").at("--ids"))?;
    Ok(ids)
}

/// Loads a decoder with its weights, and makes the task that the arguments ask for.
fn load(args: &GenerateArgs, path: &Path) -> Result<(Generator, Task), Failure> {
    let decoder = Decoder::open(path, &args.decoder)?;
    let tokens = match (&args.prompt, &args.ids) {
        (_, Some(ids)) => one(ids)?,
        (text, None) => {
            let text = text.as_deref().unwrap_or_default();
            decoder.tokenizer()?.encode(text, None).map_err(model_failure)?
        }
    };
    // After a prompt of ids the text is one of its own.
    let task = decoder.settle(tokens, args.ids.is_none(), args.options()?)?;
    let generator = decoder.start(&args.decoder, task.rows())?;
    Ok((generator, task))
}

fn generate_here(args: &GenerateArgs, mut generator: Generator, task: Task) -> Result<(), Failure> {
    let readable = generator.decoder().is_readable();
    let mut show = Show::new(args, readable, task.tokens.len(), task.sampling.seed);
    let mut failed = None;
    let ended = generator.generate(task, &mut |token| match show.token(token) {
        Ok(()) => ControlFlow::Continue(()),
        Err(failure) => {
            failed = Some(failure);
            ControlFlow::Break(())
        }
    })?;
    failed.map_or(Ok(()), Err)?;
    show.done(ended.finish, &ended.text)
}
