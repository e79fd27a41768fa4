//! `galaxy generate`: a text goes on, on a cluster or on workers of this process.

use super::{
    Connection,
    failure::Failure,
    generation_config::GenerationConfig,
    ids::Ids,
    in_process::{self, InProcess},
    json, print, progress,
    run::Local,
    tell,
};
use clap::Args;
use galaxy_client::{GenerateOptions, Generated, Prompt, Token};
use galaxy_common::{Cache, Fallback, Sampling, SamplingParams, Text, WireType};
use galaxy_engine::generate::{Told, token};
use galaxy_model::{
    ModelDir,
    generation::Ending,
    tokenizer::{TextStream, Tokenizer},
};
use serde::Serialize;
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// Rows of a prompt that go through at a time in this process.
const CHUNK: u32 = 256;
/// What holds where neither the command nor the model says anything.
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
    /// The text that goes on.
    #[arg(required_unless_present = "ids", conflicts_with = "ids")]
    prompt: Option<String>,
    /// Its token ids instead: 5,17,9, or @FILE.json with a list of ids.
    #[arg(long, value_name = "IDS|@FILE")]
    ids: Option<Ids>,
    /// Run this model, a directory or a GGUF file, in this process, without a cluster; then no coordinator is
    /// asked.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Most tokens that are made; at most as many as the model has positions for. Default: as the model's
    /// generation_config.json says, else 128.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    #[command(flatten)]
    choice: Choice,
    /// Ends the text before this; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Goes on behind a token that ends texts.
    #[arg(long)]
    ignore_end: bool,
    /// Most rows of the prompt that go through at a time. Default: 256; a cluster's are its max_rows.
    #[arg(long, value_name = "ROWS", requires = "model", help_heading = "With --model", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// How keys and values are kept: f32, or f16 (half the bytes, and lossy). Default: f32; a
    /// cluster's are kept as its file says.
    #[arg(long, value_name = "W", requires = "model", help_heading = "With --model")]
    cache: Option<WireType>,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    local: Local,
    #[command(flatten)]
    connection: Connection,
}

/// How tokens are chosen. What is not given is as the model's `generation_config.json` says.
#[derive(Args, Debug)]
#[command(next_help_heading = "Choice of tokens")]
struct Choice {
    /// Where the settings come from that are not given here.
    #[arg(long, value_enum, default_value_t)]
    generation_config: GenerationConfig,
    /// Logits are divided by it; 0 takes the likeliest token. Default: as the model says, else 0.
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// So many of the likeliest tokens stay; 0: all.
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// The likeliest tokens stay that have this mass together.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Tokens stay that are at least so likely, compared with the likeliest.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Makes tokens of the text less likely, above 1.
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Taken from the logits of tokens that were chosen before.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    presence_penalty: Option<f32>,
    /// Taken from them for each time.
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    frequency_penalty: Option<f32>,
    /// Added to the logit of a token: ID=X; may be given several times.
    #[arg(long, value_name = "ID=X", value_parser = bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same text. Default: another each time.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Tells, with --json, of so many of the likeliest tokens at each place.
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("{text:?} is not a token id and a number: write 17=-3.5");
    let (token, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((token.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

impl Choice {
    /// As it was given, which is checked.
    fn params(&self) -> Result<SamplingParams, Failure> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            bias: self.logit_bias.clone(),
            seed: self.seed,
            logprobs: self.logprobs.unwrap_or(0),
        };
        // What of it the vocabulary has is seen where the model is.
        whole(params.clone(), u32::MAX).map(|_| params)
    }
}

/// All of it, with a seed of its own if none was given.
fn whole(params: SamplingParams, vocabulary: u32) -> Result<Sampling, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let sampling = params.complete(now.map_or(0, |now| now.as_nanos() as u64));
    sampling.checked(vocabulary).map_err(|error| Failure::usage(error.to_string()))
}

impl GenerateArgs {
    fn options(&self) -> Result<GenerateOptions, Failure> {
        let options = GenerateOptions {
            max_tokens: self.max_tokens.unwrap_or(0),
            sampling: self.choice.params()?,
            stop: self.stop.clone(),
            ignore_end: self.ignore_end,
            fallback: Some(FALLBACK),
        };
        Ok(self.choice.generation_config.apply(options))
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer<'a> {
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

/// Shows a text as it is made, or gathers it.
struct Show {
    json: bool,
    logprobs: bool,
    /// Whether there is text, and not only ids.
    readable: bool,
    prompt: usize,
    seed: u64,
    begun: Instant,
    first: Option<Instant>,
    last: Instant,
    text: String,
    made: Vec<Token>,
}

impl Show {
    fn new(args: &GenerateArgs, readable: bool, prompt: usize, seed: u64, begun: Instant) -> Self {
        Self {
            json: args.json,
            logprobs: args.choice.logprobs.is_some(),
            readable,
            prompt,
            seed,
            begun,
            first: None,
            last: begun,
            text: String::new(),
            made: Vec::new(),
        }
    }

    fn token(&mut self, token: Token) -> Result<(), Failure> {
        self.last = Instant::now();
        self.first.get_or_insert(self.last);
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

    /// Tells the rest, and what it took.
    fn done(mut self, finish: &str, rest: &str) -> Result<(), Failure> {
        if self.readable {
            self.add(rest)?;
        }
        let (prompt, seed, count) = (self.prompt, self.seed, self.made.len());
        let first = self.first.unwrap_or(self.last);
        let waited = first.duration_since(self.begun).as_secs_f64() * 1e3;
        let after = self.last.duration_since(first).as_secs_f64();
        let rate = (count > 1).then(|| (count - 1) as f64 / after);
        if self.json {
            let tokens = self.made.iter().map(|token| token.token).collect();
            let logprobs = self
                .made
                .into_iter()
                .map(|Token { token, logprob, top, .. }| Logprobs { token, logprob, top });
            let answer = Answer {
                text: self.readable.then_some(self.text),
                tokens,
                finish,
                prompt_tokens: prompt,
                seed,
                logprobs: self.logprobs.then(|| logprobs.collect()),
                first_token_ms: waited,
                tokens_per_second: rate,
            };
            return print(&json(&answer)?);
        }
        print("\n")?;
        let rate = rate.map_or(String::new(), |rate| format!(", then {rate:.1} tokens/s"));
        tell(&format!(
            "{prompt} tokens in, {count} out ({finish}); first after {waited:.0} ms{rate}; seed {seed}"
        ));
        Ok(())
    }
}

/// `galaxy generate`.
pub async fn generate(args: GenerateArgs) -> Result<(), Failure> {
    let Some(path) = args.model.clone() else { return on_cluster(args).await };
    let broke_off = |e| Failure::new(format!("the run broke off: {e}"));
    let loading = move || load(&args, &path).map(|loaded| (args, loaded));
    let loading = tokio::task::spawn_blocking(loading);
    let loaded = progress::watch("loading the model", loading).await;
    let (args, loaded) = loaded.map_err(broke_off)??;
    tokio::task::spawn_blocking(move || go_on(&args, loaded)).await.map_err(broke_off)?
}

/// Asks a coordinator.
async fn on_cluster(args: GenerateArgs) -> Result<(), Failure> {
    let prompt = match (&args.prompt, &args.ids) {
        (_, Some(ids)) => Prompt::Ids(one(ids)?),
        (text, None) => Prompt::from(text.as_deref().unwrap_or_default()),
    };
    let options = args.options()?;
    let client = args.connection.open().await?;
    let begun = Instant::now();
    let mut text = progress::watch("waiting", client.generate(prompt, options)).await?;
    let prompt = text.prompt_tokens as usize;
    let mut show = Show::new(&args, text.text, prompt, text.seed, begun);
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

/// One sequence of ids.
fn one(ids: &Ids) -> Result<Vec<u32>, Failure> {
    let [ids]: [Vec<u32>; 1] = ids
        .read()?
        .try_into()
        .map_err(|_| Failure::usage("one sequence is gone on with at a time").at("--ids"))?;
    Ok(ids)
}

/// All that is known before the first token is made.
struct Loaded {
    cluster: InProcess,
    tokenizer: Option<Tokenizer>,
    text: Text,
    /// Tokens that end it, and strings.
    ends: Vec<u32>,
    stop: Vec<String>,
    /// Most that are made,
    count: u32,
    /// and rows of the prompt that go through at a time.
    chunk: u32,
}

/// The prompt's tokens, and what turns tokens into text.
fn prompt(args: &GenerateArgs, model: &ModelDir) -> Result<(Vec<u32>, Option<Tokenizer>), Failure> {
    let tokenizer = Tokenizer::open(model.path());
    let tokens = match (&args.prompt, &args.ids) {
        (_, Some(ids)) => {
            let ids = one(ids)?;
            return Ok((ids, tokenizer.ok()));
        }
        (text, None) => {
            let tokenizer = tokenizer.as_ref().map_err(|e| Failure::new(e.to_string()))?;
            tokenizer.encode(text.as_deref().unwrap_or_default(), None)
        }
    };
    Ok((tokens.map_err(in_process::model_failure)?, tokenizer.ok()))
}

fn load(args: &GenerateArgs, path: &Path) -> Result<Loaded, Failure> {
    let model = in_process::open_model(path)?;
    let (spec, place) = (model.spec(), model.path().display().to_string());
    if !spec.causal || !matches!(spec.head, galaxy_model::HeadSpec::Language { .. }) {
        let what = format!("this model ({}) makes no text", spec.family);
        return Err(Failure::new(what).at(place).todo("take a decoder, as gpt2 or llama"));
    }
    let (tokens, tokenizer) = prompt(args, &model)?;
    in_process::check(&model, 0, &tokens)?;
    let left = spec.position_limit() - tokens.len() as u32;
    if left == 0 {
        let what = format!("the prompt fills all {} rows of {}", tokens.len(), spec.limited_by());
        return Err(Failure::new(what).todo("shorten it"));
    }
    let options = args.options()?;
    if options.stop.iter().any(String::is_empty) {
        return Err(Failure::usage("an empty string would end every text").at("--stop"));
    }
    let generation = model.generation().map_err(in_process::model_failure)?;
    let settled = generation.settle(options, tokens.len() as u32, spec.vocabulary);
    let GenerateOptions { max_tokens, sampling, stop, ignore_end, .. } =
        settled.map_err(|error| Failure::new(error.to_string()))?;
    let (count, sampling) = (max_tokens.min(left), whole(sampling, spec.vocabulary)?);
    if !stop.is_empty() && tokenizer.is_none() {
        let what = "strings that end the text need the model's tokenizer.json";
        return Err(Failure::usage(what).at("--stop"));
    }
    let ends = if ignore_end { Vec::new() } else { generation.ends };
    let rows = tokens.len() as u32 + count;
    let values = args.cache.unwrap_or(WireType::F32);
    let cache = Cache { rows: Cache::taken(rows), values };
    let chunk = args.chunk.unwrap_or(CHUNK).min(tokens.len() as u32).max(1);
    let settings = args.local.settings()?;
    let cluster = InProcess::start(model, &settings, chunk, cache)?;
    let prompt = tokens.len();
    let text = Text { slot: 0, rows, sampling, tokens, prompt };
    Ok(Loaded { cluster, tokenizer, text, ends, stop, count, chunk })
}

fn go_on(args: &GenerateArgs, loaded: Loaded) -> Result<(), Failure> {
    let Loaded { cluster, tokenizer, text, ends, stop, count, chunk } = loaded;
    let begun = Instant::now();
    let mut show = Show::new(args, tokenizer.is_some(), text.prompt, text.sampling.seed, begun);
    // Behind a prompt of ids the text is one of its own.
    let behind = if args.ids.is_some() { &[] } else { &text.tokens[..] };
    let mut stream = tokenizer.as_ref().map(|tokenizer| tokenizer.stream(behind));
    let mut ending = Ending::new(stop);
    let (mut failed, mut ended) = (None, false);
    let mut tell = |told: &Told| {
        ended = ends.contains(&(told[0] as u32));
        let stream = stream.as_mut().filter(|_| !ended);
        failed = one_token(told, stream, &mut ending, &mut show).err();
        match failed.is_some() || ending.stopped() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let result = cluster.cluster().generate(&text, count, chunk, &ends, &mut tell);
    result.map_err(|error| Failure::new(error.to_string()))?;
    failed.map_or(Ok(()), Err)?;
    let mut rest = String::new();
    if let Some(stream) = stream.filter(|_| !ending.stopped()) {
        let left = stream.finish().map_err(in_process::model_failure)?;
        rest.push_str(ending.add(&left));
    }
    rest.push_str(ending.rest());
    let finish = if ended || ending.stopped() { "stop" } else { "length" };
    show.done(finish, &rest)
}

fn one_token(
    told: &Told,
    stream: Option<&mut TextStream<'_>>,
    ending: &mut Ending,
    show: &mut Show,
) -> Result<(), Failure> {
    let piece = match stream {
        Some(stream) => stream.push(told[0] as u32).map_err(in_process::model_failure)?,
        None => String::new(),
    };
    show.token(token(told, ending.add(&piece).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_are_read() {
        assert_eq!(bias("17=-3.5"), Ok((17, -3.5)));
        for wrong in ["17", "=1", "-1=2", "1=x"] {
            assert!(bias(wrong).is_err_and(|error| error.contains("17=-3.5")));
        }
    }
}
