//! `galaxy generate`: a text goes on, on workers of this process.

use super::{
    failure::Failure,
    ids::Ids,
    in_process::{self, InProcess},
    json, print, progress,
    run::Local,
};
use clap::Args;
use galaxy_common::{Cache, Sampling, WireType};
use galaxy_engine::{choose::Text, generate::Told};
use galaxy_model::{
    ModelDir,
    tokenizer::{TextStream, Tokenizer},
};
use serde::Serialize;
use std::{
    ops::ControlFlow,
    path::PathBuf,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

const SHAPE: &str = "\
With --json the result is one object:

  {
    \"text\": \" and then\", \"tokens\": [290, 788], \"finish\": \"length\",
    \"prompt_tokens\": 5, \"seed\": 1, \"logprobs\": [{\"token\": 290, \"logprob\": -1.2, \"top\": [[290, -1.2]]}],
    \"first_token_ms\": 12.3, \"tokens_per_second\": 81.0
  }

finish is stop (a token or a string that ends texts) or length. logprobs is null without
--logprobs. Text goes to stdout as it is made, what it took to stderr.";

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
    /// The model's directory, for workers of this process.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Most tokens that are made; at most as many as the model has positions for.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    #[command(flatten)]
    choice: Choice,
    /// Ends the text before this; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Goes on behind a token that ends texts.
    #[arg(long)]
    ignore_end: bool,
    /// Most rows of the prompt that go through at a time.
    #[arg(long, value_name = "ROWS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// How keys and values are kept: f32, or f16 (half the bytes, and lossy).
    #[arg(long, value_name = "W", default_value = "f32")]
    cache: WireType,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    local: Local,
}

/// How tokens are chosen.
#[derive(Args, Debug)]
#[command(next_help_heading = "Choice of tokens")]
struct Choice {
    /// Logits are divided by it; 0 takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// So many of the likeliest tokens stay; 0: all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// The likeliest tokens stay that have this mass together.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Tokens stay that are at least so likely, compared with the likeliest.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Makes tokens of the text less likely, above 1.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Taken from the logits of tokens that were chosen before.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    presence_penalty: f32,
    /// Taken from them for each time.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    frequency_penalty: f32,
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
    fn sampling(&self, vocabulary: u32) -> Result<Sampling, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or_else(|| now.map_or(0, |now| now.as_nanos() as u64)),
            logprobs: self.logprobs.unwrap_or(0),
        };
        sampling.checked(vocabulary).map_err(|error| Failure::usage(error.to_string()))
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    text: Option<String>,
    tokens: Vec<u32>,
    finish: &'static str,
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

impl Logprobs {
    fn of(told: &Told) -> Self {
        let top = told[4..].chunks_exact(2).take(told[3] as usize);
        let top = top.map(|pair| (pair[0] as u32, pair[1])).collect();
        Self { token: told[0] as u32, logprob: told[1], top }
    }
}

/// Text as it is made, held back where it may be the beginning of a string that ends it.
struct Teller<'a> {
    stream: Option<TextStream<'a>>,
    stop: &'a [String],
    text: String,
    /// Bytes of it that were shown.
    shown: usize,
    show: bool,
    stopped: bool,
}

impl Teller<'_> {
    fn push(&mut self, token: u32) -> Result<(), Failure> {
        let Some(stream) = &mut self.stream else {
            let text = if self.text.is_empty() { token.to_string() } else { format!(",{token}") };
            self.text.push_str(&text);
            return self.tell(self.text.len());
        };
        let piece = stream.push(token).map_err(in_process::model_failure)?;
        self.add(&piece)
    }

    fn add(&mut self, piece: &str) -> Result<(), Failure> {
        self.text.push_str(piece);
        let found = self.stop.iter().filter_map(|stop| self.text.find(stop.as_str())).min();
        if let Some(end) = found {
            self.text.truncate(end);
            self.stopped = true;
        }
        let held = if self.stopped { 0 } else { begun(&self.text, self.stop) };
        self.tell(self.text.len() - held)
    }

    fn tell(&mut self, end: usize) -> Result<(), Failure> {
        if end > self.shown {
            if self.show {
                print(&self.text[self.shown..end])?;
            }
            self.shown = end;
        }
        Ok(())
    }

    /// Tells the rest.
    fn finish(&mut self) -> Result<(), Failure> {
        if let Some(stream) = self.stream.take().filter(|_| !self.stopped) {
            let rest = stream.finish().map_err(in_process::model_failure)?;
            self.add(&rest)?;
        }
        self.tell(self.text.len())
    }
}

/// Bytes at the end of a text with which one of these may begin.
fn begun(text: &str, stop: &[String]) -> usize {
    let begins = |stop: &String| {
        let starts = stop.char_indices().map(|(at, _)| at).skip(1);
        starts.filter(|at| text.ends_with(&stop[..*at])).max().unwrap_or(0)
    };
    stop.iter().map(begins).max().unwrap_or(0)
}

/// `galaxy generate`.
pub async fn generate(args: GenerateArgs) -> Result<(), Failure> {
    let broke_off = |e| Failure::new(format!("the run broke off: {e}"));
    let loading = tokio::task::spawn_blocking(move || load(&args).map(|loaded| (args, loaded)));
    let loaded = progress::watch("loading the model", loading).await;
    let (args, loaded) = loaded.map_err(broke_off)??;
    tokio::task::spawn_blocking(move || go_on(&args, loaded)).await.map_err(broke_off)?
}

/// All that is known before the first token is made.
struct Loaded {
    cluster: InProcess,
    tokenizer: Option<Tokenizer>,
    text: Text,
    /// Tokens that end it.
    ends: Vec<u32>,
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
            let [ids]: [Vec<u32>; 1] = ids.read()?.try_into().map_err(|_| {
                Failure::usage("one sequence is gone on with at a time").at("--ids")
            })?;
            return Ok((ids, tokenizer.ok()));
        }
        (text, None) => {
            let tokenizer = tokenizer.as_ref().map_err(|e| Failure::new(e.to_string()))?;
            tokenizer.encode(text.as_deref().unwrap_or_default(), None)
        }
    };
    Ok((tokens.map_err(in_process::model_failure)?, tokenizer.ok()))
}

fn load(args: &GenerateArgs) -> Result<Loaded, Failure> {
    let model = in_process::open_model(&args.model)?;
    let (spec, place) = (model.spec(), model.path().display().to_string());
    if !spec.causal || !matches!(spec.head, galaxy_model::HeadSpec::Language { .. }) {
        let what = format!("this model ({}) makes no text", spec.family);
        return Err(Failure::new(what).at(place).todo("take a decoder, as gpt2 or llama"));
    }
    let (tokens, tokenizer) = prompt(args, &model)?;
    in_process::check(&model, 0, &tokens)?;
    let left = spec.position_limit() - tokens.len() as u32;
    if left == 0 {
        let what = format!("the prompt fills all {} positions of the model", tokens.len());
        return Err(Failure::new(what).todo("shorten it"));
    }
    let count = args.max_tokens.min(left);
    let sampling = args.choice.sampling(spec.vocabulary)?;
    if args.stop.iter().any(String::is_empty) {
        return Err(Failure::usage("an empty string would end every text").at("--stop"));
    }
    if !args.stop.is_empty() && tokenizer.is_none() {
        let what = "strings that end the text need the model's tokenizer.json";
        return Err(Failure::usage(what).at("--stop"));
    }
    let ends = match args.ignore_end {
        true => Vec::new(),
        false => model.end_tokens().map_err(in_process::model_failure)?,
    };
    let rows = tokens.len() as u32 + count;
    let cache = Cache { rows: Cache::taken(rows), values: args.cache };
    let chunk = args.chunk.min(tokens.len() as u32).max(1);
    let settings = args.local.settings()?;
    let cluster = InProcess::start(model, &settings, chunk, cache)?;
    let prompt = tokens.len();
    let text = Text { slot: 0, rows, sampling, tokens, prompt };
    Ok(Loaded { cluster, tokenizer, text, ends, count, chunk })
}

fn go_on(args: &GenerateArgs, loaded: Loaded) -> Result<(), Failure> {
    let Loaded { cluster, tokenizer, text, ends, count, chunk } = loaded;
    let (seed, prompt) = (text.sampling.seed, text.prompt);
    let stream = tokenizer.as_ref().map(Tokenizer::stream);
    let (stop, show) = (&args.stop[..], !args.json);
    let mut teller = Teller { stream, stop, text: String::new(), shown: 0, show, stopped: false };
    let (mut made, mut failed, mut ended) = (Vec::new(), None, false);
    let (begun, mut first, mut last) = (Instant::now(), None, Instant::now());
    let mut tell = |told: &Told| {
        last = Instant::now();
        first.get_or_insert(last);
        let token = told[0] as u32;
        ended = ends.contains(&token);
        if !ended {
            failed = teller.push(token).err();
        }
        made.push(*told);
        match failed.is_some() || teller.stopped {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let result = cluster.cluster().generate(&text, count, chunk, &ends, &mut tell);
    result.map_err(|error| Failure::new(error.to_string()))?;
    failed.map_or(Ok(()), Err)?;
    teller.finish()?;
    let finish = if ended || teller.stopped { "stop" } else { "length" };
    let waited = first.unwrap_or(last).duration_since(begun).as_secs_f64() * 1e3;
    let after = last.duration_since(first.unwrap_or(last)).as_secs_f64();
    let rate = (made.len() > 1).then(|| (made.len() - 1) as f64 / after);
    if args.json {
        let answer = Answer {
            text: tokenizer.is_some().then_some(teller.text),
            tokens: made.iter().map(|told| told[0] as u32).collect(),
            finish,
            prompt_tokens: prompt,
            seed,
            logprobs: args.choice.logprobs.map(|_| made.iter().map(Logprobs::of).collect()),
            first_token_ms: waited,
            tokens_per_second: rate,
        };
        return print(&json(&answer)?);
    }
    print("\n")?;
    let rate = rate.map_or(String::new(), |rate| format!(", then {rate:.1} tokens/s"));
    let count = made.len();
    eprintln!(
        "{prompt} tokens in, {count} out ({finish}); first after {waited:.0} ms{rate}; seed {seed}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn teller(stop: &[String]) -> Teller<'_> {
        Teller { stream: None, stop, text: String::new(), shown: 0, show: false, stopped: false }
    }

    #[test]
    fn what_may_begin_an_end_is_held_back() {
        let stop = ["END".to_owned(), "€ur".to_owned()];
        let mut teller = teller(&stop);
        let mut shown = Vec::new();
        for piece in ["a E", "N", "X b €", "u", "n EN"] {
            teller.add(piece).unwrap();
            shown.push(teller.text[..teller.shown].to_owned());
        }
        assert_eq!(shown, ["a ", "a ", "a ENX b ", "a ENX b ", "a ENX b €un "]);
        teller.add("D more").unwrap();
        assert!(teller.stopped);
        assert_eq!((teller.text.as_str(), teller.shown), ("a ENX b €un ", teller.text.len()));
    }

    #[test]
    fn biases_are_read() {
        assert_eq!(bias("17=-3.5"), Ok((17, -3.5)));
        for wrong in ["17", "=1", "-1=2", "1=x"] {
            assert!(bias(wrong).unwrap_err().contains("17=-3.5"));
        }
    }
}
