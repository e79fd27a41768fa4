//! A decoder in this process, with which `galaxy generate --model` and `galaxy chat --model` generate text.

use super::{
    choice::whole,
    failure::Failure,
    in_process::{self, InProcess},
    run::Local,
};
use clap::Args;
use galaxy_client::{GenerateOptions, Token};
use galaxy_common::{Cache, CacheType, Sampling, Sequence};
use galaxy_engine::generate::{Goal, TokenEvent, token};
use galaxy_model::{
    HeadSpec, ModelDir,
    generation::{Ending, Generation},
    tokenizer::{TextStream, Tokenizer},
};
use std::{ops::ControlFlow, path::Path, sync::Arc};

/// The most rows of a prefill step, if no argument says otherwise.
const CHUNK: u32 = 256;

/// Arguments for a decoder that runs in this process.
#[derive(Args, Debug)]
#[command(next_help_heading = "With --model")]
pub struct DecoderArgs {
    /// Most rows of the prompt in one prefill step [default: 256].
    ///
    /// On a cluster, max_rows in its file says this.
    #[arg(long, value_name = "ROWS", requires = "model", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// Type of keys and values in the KV cache: f32, f16 or q8 [default: f32].
    ///
    /// f16 takes half the bytes of f32 and q8 about a quarter; both are lossy. On a cluster, its file says this.
    #[arg(long, alias = "cache", value_name = "TYPE", requires = "model")]
    kv_cache_format: Option<CacheType>,
    #[command(flatten)]
    local: Local,
}

/// A decoder whose files were read, without its weights.
pub struct Decoder {
    model: Arc<ModelDir>,
    tokenizer: Result<Tokenizer, Failure>,
    generation: Generation,
}

/// A request to a decoder, with all settings that the caller left open.
pub struct Task {
    /// The token ids of the prompt.
    pub tokens: Vec<u32>,
    /// Whether the generated tokens are decoded as text that continues the prompt, and not as a text of their own.
    pub behind: bool,
    /// The settings of the sampler.
    pub sampling: Sampling,
    /// The most tokens to generate.
    count: u32,
    /// The ids of the tokens that end the text.
    ends: Vec<u32>,
    stop: Vec<String>,
}

/// How a generated text ended.
pub struct Ended {
    /// `stop` or `length`, as a coordinator reports it.
    pub finish: &'static str,
    /// The rest of the text, which was held back.
    pub text: String,
}

/// A decoder with its weights, which generates one sequence after another.
pub struct Generator {
    decoder: Decoder,
    cluster: InProcess,
    chunk: u32,
    /// Tokens whose keys and values are in the KV cache.
    kept: Vec<u32>,
}

impl Task {
    /// The most rows of its sequence: those of the prompt, and of the tokens to generate.
    pub fn rows(&self) -> u32 {
        self.tokens.len() as u32 + self.count
    }
}

impl Decoder {
    /// Opens a model directory or a GGUF file.
    ///
    /// # Errors
    /// When it cannot be read, is no decoder, or does not go with the arguments.
    pub fn open(path: &Path, args: &DecoderArgs) -> Result<Self, Failure> {
        let model = in_process::open_model(path, args.local.rounding)?;
        let (spec, place) = (model.spec(), model.opened().display().to_string());
        if !spec.causal || !matches!(spec.head, HeadSpec::Language { .. }) {
            let what = format!("this model ({}) generates no text", spec.family);
            return Err(Failure::new(what).at(place).todo("take a decoder, as gpt2 or llama"));
        }
        let tokenizer = Tokenizer::open(model.path()).map_err(in_process::model_failure);
        let generation = model.generation().map_err(in_process::model_failure)?;
        Ok(Self { model, tokenizer, generation })
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// When the model has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Failure> {
        self.tokenizer.as_ref().map_err(Clone::clone)
    }

    /// Whether there is a tokenizer, which turns tokens into text.
    pub fn is_readable(&self) -> bool {
        self.tokenizer.is_ok()
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        self.model.name()
    }

    /// The context length: most tokens of a prompt with those that are generated after it.
    pub fn context(&self) -> u32 {
        self.model.spec().position_limit()
    }

    /// Makes a task of a prompt and its options; what these leave open is as the model's `generation_config.json` says.
    ///
    /// # Errors
    /// When the prompt or the options do not go with the model.
    pub fn settle(
        &self,
        tokens: Vec<u32>,
        behind: bool,
        options: GenerateOptions,
    ) -> Result<Task, Failure> {
        in_process::check(&self.model, 0, &tokens)?;
        let spec = self.model.spec();
        let left = spec.position_limit() - tokens.len() as u32;
        if left == 0 {
            let what =
                format!("the prompt fills all {} rows of {}", tokens.len(), spec.limited_by());
            return Err(Failure::new(what).todo("shorten it"));
        }
        if options.stop.iter().any(String::is_empty) {
            return Err(Failure::usage("an empty string would end every text").at("--stop"));
        }
        let settled = self.generation.complete(options, tokens.len() as u32, spec.vocabulary);
        let GenerateOptions { max_tokens, sampling, stop, ignore_end, .. } =
            settled.map_err(|error| Failure::new(error.to_string()))?;
        let sampling = whole(sampling, spec.vocabulary)?;
        if !stop.is_empty() && !self.is_readable() {
            let what = "strings that end the text need the model's tokenizer.json";
            return Err(Failure::usage(what).at("--stop"));
        }
        let count = if max_tokens == 0 { left } else { max_tokens.min(left) };
        let ends = if ignore_end { Vec::new() } else { self.generation.ends.clone() };
        Ok(Task { tokens, behind, sampling, count, ends, stop })
    }

    /// Loads the weights, for sequences of at most `rows` rows.
    ///
    /// # Errors
    /// When they cannot be loaded, or the arguments do not go together.
    pub fn start(self, args: &DecoderArgs, rows: u32) -> Result<Generator, Failure> {
        let values = args.kv_cache_format.unwrap_or(CacheType::F32);
        let cache = Cache { rows: Cache::taken(rows), values };
        let chunk = args.chunk.unwrap_or(CHUNK).min(rows).max(1);
        let settings = args.local.settings()?;
        let cluster = InProcess::start(self.model.clone(), &settings, chunk, cache)?;
        Ok(Generator { decoder: self, cluster, chunk, kept: Vec::new() })
    }
}

impl Generator {
    /// The decoder that generates.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Generates the tokens of a task, and passes each to `tell` until that breaks off. Rows with which the sequence
    /// begins as the one before did are not computed again.
    ///
    /// # Errors
    /// When a device fails.
    pub fn generate(
        &mut self,
        task: Task,
        tell: &mut (dyn FnMut(Token) -> ControlFlow<()> + Send),
    ) -> Result<Ended, Failure> {
        let Task { tokens, behind, sampling, count, ends, stop } = task;
        let (prompt, rows) = (tokens.len(), tokens.len() as u32 + count);
        let alike = self.kept.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        // The last row is computed in any case: the first token is chosen by it.
        let kept = alike.min(prompt - 1);
        let text = Sequence { slot: 0, rows, sampling, tokens, prompt };
        let tokenizer = self.decoder.tokenizer.as_ref().ok();
        let read_behind = if behind { &text.tokens[..] } else { &[] };
        let mut stream = tokenizer.map(|tokenizer| tokenizer.stream(read_behind));
        let (mut ending, mut made) = (Ending::new(stop), Vec::new());
        let (mut failed, mut ended) = (None, false);
        let mut on_token = |told: &TokenEvent| {
            let id = told[0] as u32;
            made.push(id);
            ended = ends.contains(&id);
            let piece = match stream.as_mut().filter(|_| !ended) {
                Some(stream) => read(stream, id),
                None => Ok(String::new()),
            };
            match piece {
                Ok(piece) if tell(token(told, ending.add(&piece).to_owned())).is_continue() => {
                    if ending.stopped() {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                }
                Ok(_) => ControlFlow::Break(()),
                Err(failure) => {
                    failed = Some(failure);
                    ControlFlow::Break(())
                }
            }
        };
        let goal = Goal { count, stop: ends.as_slice().into(), mask: None };
        self.kept.clear();
        let cluster = self.cluster.cluster();
        let result = cluster.resume(&text, kept as u32, &goal, self.chunk, &mut on_token);
        result.map_err(|error| Failure::new(error.to_string()))?;
        failed.map_or(Ok(()), Err)?;
        let mut rest = String::new();
        if let Some(stream) = stream.filter(|_| !ending.stopped()) {
            let left = stream.finish().map_err(in_process::model_failure)?;
            rest.push_str(ending.add(&left));
        }
        rest.push_str(ending.rest());
        let finish = if ended || ending.stopped() { "stop" } else { "length" };
        // The last token has gone through no layer.
        made.pop();
        self.kept = text.tokens;
        self.kept.extend(made);
        Ok(Ended { finish, text: rest })
    }
}

fn read(stream: &mut TextStream<'_>, id: u32) -> Result<String, Failure> {
    stream.push(id).map_err(in_process::model_failure)
}
