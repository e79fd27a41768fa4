//! Vectors, classes and scores of texts: the requests for them, and how texts become sequences.

use super::{
    Input, Report, Session,
    answer::{Outcome, Vectors},
    batch::Sequence,
    limits::check_count,
};
use crate::{client_memory::MemoryGuard, error::RequestError, fleet::blocking};
use galaxy_common::Wanted;
use galaxy_model::{
    ClassHead, HeadSpec, ModelError, Problem,
    sentence::{SentenceConfig, VectorForm},
    softmax,
    tokenizer::Encoded,
};
use std::{num::NonZeroU32, time::Duration};

/// How many bytes of a text are allowed for each token: more than tokens have, but for runs of one letter.
const TOKEN_BYTES: usize = 64;
/// How many bytes of any text are read.
const TEXT_BYTES: usize = 64 << 10;
/// Bytes that tokenisers take for each byte of a text (measured: 240).
const TOKENIZING: u64 = 256;

/// What is put before each text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prefix {
    /// A prompt of the model's files, by its name.
    Named(String),
    /// This text, as it is.
    Text(String),
}

/// A request for the vectors of texts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Embed {
    /// The texts whose vectors are wanted.
    pub texts: Vec<String>,
    /// Token ids instead of texts: used as they are.
    pub ids: Vec<Vec<u32>>,
    /// Whether texts that are too long are cut.
    pub truncate: bool,
    /// What is put before each text, instead of what the model's files say.
    pub prefix: Option<Prefix>,
    /// How many values each vector is cut to, instead of what the model's files say.
    pub dimensions: Option<NonZeroU32>,
    /// Whether vectors are scaled to length one in the end, whatever the model's files say.
    pub normalise: bool,
}

/// What is to be classified.
#[derive(Debug, Clone, PartialEq)]
pub enum Items {
    /// Texts, and whether those that are too long are cut.
    Texts(Vec<String>, bool),
    /// Image files, PNG or JPEG.
    Images(Vec<Vec<u8>>),
}

/// The vectors of texts.
#[derive(Debug, Clone)]
pub struct Embeddings {
    /// How many values each vector has.
    pub width: u32,
    /// The vectors, one after another: `[texts, width]`.
    pub vectors: Vec<f32>,
    /// What the request cost.
    pub report: Report,
}

/// The class logits of texts or images.
#[derive(Debug, Clone)]
pub struct Classes {
    /// The names of the classes.
    pub labels: Vec<String>,
    /// The logits of each text, one after another: `[texts, labels]`.
    pub logits: Vec<f32>,
    /// What the logits mean, as many values.
    pub probabilities: Vec<f32>,
    /// What the request cost.
    pub report: Report,
}

/// How well texts answer a query.
#[derive(Debug, Clone)]
pub struct Scores {
    /// One score for each text, in their order.
    pub scores: Vec<f32>,
    /// What the request cost.
    pub report: Report,
}

impl Session {
    /// One vector for each text, as the model's files and the caller say.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue; a program that runs is finished and its result dropped.
    ///
    /// # Errors
    /// Each kind is its own variant.
    pub async fn embed(
        &self,
        embed: Embed,
        timeout: Option<Duration>,
    ) -> Result<Embeddings, RequestError> {
        let work = async {
            let sentence = self.inner.files.sentence()?.clone();
            let form = self.form(&sentence, embed.dimensions, embed.normalise)?;
            let limit = self.text_limit(self.inner.files.token_limit(sentence.max_tokens));
            let mut answer = self.begin()?.within(timeout);
            let (sequences, skipped, wanted) = if embed.ids.is_empty() {
                let prompt = prompt(&sentence, embed.prefix)?;
                let wanted = match prompt.is_empty() {
                    true => sentence.wanted(),
                    false => sentence.wanted_behind_prompts(),
                };
                let texts = Texts { prompt, truncate: embed.truncate, limit };
                let skips = !sentence.pools_prompts();
                let ((sequences, skipped), took) = self.tokenize(embed.texts, texts, skips).await?;
                answer.tokenized(took);
                (sequences, skipped, wanted)
            } else {
                (self.given(embed, limit)?, Vec::new(), sentence.wanted())
            };
            let outcome = Outcome::Vectors(Vectors { sentence, skipped, form });
            let results = answer.run(sequences, wanted, outcome).await?;
            let width = results.first().map_or(0, |first| first.values.len() as u32);
            let vectors = results.into_iter().flat_map(|t| t.values).collect();
            Ok(Embeddings { width, vectors, report: answer.end() })
        };
        self.timed(timeout, work).await
    }

    /// Class logits for each text or image.
    ///
    /// # Cancel safety
    /// As [`Session::embed`].
    ///
    /// # Errors
    /// Each kind is its own variant.
    pub async fn classify(
        &self,
        items: Items,
        timeout: Option<Duration>,
    ) -> Result<Classes, RequestError> {
        let work = async {
            let wanted = self.supported(Wanted::Classes)?;
            let mut answer = self.begin()?.within(timeout);
            let (sequences, took) = match items {
                Items::Texts(texts, truncate) => {
                    let limit = self.text_limit(self.inner.files.token_limit(None));
                    let how = Texts { prompt: String::new(), truncate, limit };
                    let ((sequences, _), took) = self.tokenize(texts, how, false).await?;
                    (sequences, took)
                }
                Items::Images(images) => {
                    check_count(images.len(), "images")?;
                    self.prepare(images.into_iter().map(Input::Image).collect()).await?
                }
            };
            answer.tokenized(took);
            let results = answer.run(sequences, wanted, Outcome::AsItIs).await?;
            let HeadSpec::Classes(head) = &self.spec().head else {
                let why = "a model without classes has classified".to_owned();
                return Err(RequestError::Internal { why });
            };
            let (labels, head) = (head.names.clone(), head.clone());
            let work = move || {
                let each = results.iter().flat_map(|t| probabilities(&head, &t.values));
                let probabilities = each.collect();
                (results.into_iter().flat_map(|t| t.values).collect(), probabilities)
            };
            let (logits, probabilities) = blocking(work).await?;
            Ok(Classes { labels, logits, probabilities, report: answer.end() })
        };
        self.timed(timeout, work).await
    }

    /// How well each text answers a query: the model reads both together.
    ///
    /// # Cancel safety
    /// As [`Session::embed`].
    ///
    /// # Errors
    /// Each kind is its own variant.
    pub async fn rerank(
        &self,
        query: String,
        texts: Vec<String>,
        truncate: bool,
        timeout: Option<Duration>,
    ) -> Result<Scores, RequestError> {
        let work = async {
            let cross = self.inner.files.cross_encoder()?.clone();
            let limit = self.text_limit(self.inner.files.token_limit(cross.max_tokens));
            let mut answer = self.begin()?.within(timeout);
            let query = Texts { prompt: cross.prompt + &query, truncate, limit };
            let (sequences, took) = self.pair(query, texts).await?;
            answer.tokenized(took);
            let results = answer.run(sequences, Wanted::Classes, Outcome::AsItIs).await?;
            let logits = results.into_iter().flat_map(|t| t.values);
            let score = |logit: f32| cross.activation.apply(f64::from(logit)) as f32;
            Ok(Scores { scores: logits.map(score).collect(), report: answer.end() })
        };
        self.timed(timeout, work).await
    }

    /// The form of vectors that a request asks for.
    fn form(
        &self,
        sentence: &SentenceConfig,
        dimensions: Option<NonZeroU32>,
        normalise: bool,
    ) -> Result<VectorForm, RequestError> {
        let width = sentence.width(self.spec().hidden);
        let dimensions = dimensions.map(NonZeroU32::get);
        match dimensions.filter(|dimensions| *dimensions > width) {
            None => Ok(VectorForm { dimensions, normalise }),
            Some(dimensions) => Err(RequestError::Invalid {
                why: format!(
                    "{dimensions} dimensions are asked for, and the model's vectors have {width}"
                ),
            }),
        }
    }

    /// The token ids of a request as sequences, checked.
    fn given(
        &self,
        embed: Embed,
        limit: (u32, &'static str),
    ) -> Result<Vec<Sequence>, RequestError> {
        let invalid = |why: &str| Err(RequestError::Invalid { why: why.to_owned() });
        if !embed.texts.is_empty() {
            return invalid("the request has texts and token ids: send one kind");
        }
        if embed.prefix.is_some() {
            return invalid("a prompt is put before texts, and the request has token ids");
        }
        check_count(embed.ids.len(), "sequences")?;
        for (index, ids) in embed.ids.iter().enumerate() {
            self.check_ids(index, ids, limit)?;
        }
        Ok(embed.ids.into_iter().map(Sequence::from).collect())
    }

    /// Turns texts into tokens, where blocking is allowed. Gives also how many rows of each are its prompt's, if
    /// `skips`.
    async fn tokenize(
        &self,
        texts: Vec<String>,
        how: Texts,
        skips: bool,
    ) -> Result<((Vec<Sequence>, Vec<u32>), Duration), RequestError> {
        self.check_texts(&texts)?;
        for (index, text) in texts.iter().enumerate() {
            check_bytes(how.prompt.len() + text.len(), how.limit, || of(index))?;
        }
        self.read(move |session, gone| {
            let tokenizer = session.inner.files.tokenizer()?;
            let mut sequences = Vec::with_capacity(texts.len());
            for (index, mut text) in texts.into_iter().enumerate() {
                gone.check()?;
                text.insert_str(0, &how.prompt);
                let _tokenizing = session.tokenizing(&text, how.limit, || of(index))?;
                let encoded = tokenizer.encode(&text, how.cut()).map_err(|e| of_text(index, &e))?;
                sequences.push(session.fitting(index, encoded.into(), how.limit)?);
            }
            let skipped = match skips && !how.prompt.is_empty() {
                true => {
                    let prompt = tokenizer.prompt_tokens(&how.prompt, how.limit.0 as usize);
                    vec![prompt.map_err(|e| of_text(0, &e))? as u32; sequences.len()]
                }
                false => Vec::new(),
            };
            Ok((sequences, skipped))
        })
        .await
    }

    /// Turns pairs of a query and each text into tokens, where blocking is allowed.
    async fn pair(
        &self,
        query: Texts,
        texts: Vec<String>,
    ) -> Result<(Vec<Sequence>, Duration), RequestError> {
        self.check_texts(&texts)?;
        if query.prompt.trim().is_empty() {
            return Err(RequestError::Nothing { what: "query" });
        }
        self.read(move |session, gone| {
            let tokenizer = session.inner.files.tokenizer()?;
            let types = session.spec().token_types;
            let _tokenizing =
                session.tokenizing(&query.prompt, query.limit, || "the query".to_owned())?;
            let pair = |(index, text): (usize, &String)| {
                gone.check()?;
                let _tokenizing = session.tokenizing(text, query.limit, || of(index))?;
                let encoded = tokenizer.encode_pair(&query.prompt, text, query.cut());
                let mut encoded = encoded.map_err(|e| of_text(index, &e))?;
                // A table of one row cannot tell them apart.
                if types < 2 {
                    encoded.types.clear();
                }
                if encoded.types.iter().any(|kind| u32::from(*kind) >= types.max(1)) {
                    let why = format!("the tokenizer gives token types beyond the model's {types}");
                    return Err(RequestError::Model { why });
                }
                session.fitting(index, encoded, query.limit)
            };
            texts.iter().enumerate().map(pair).collect()
        })
        .await
    }

    /// Takes the memory that tokenising a text needs, unless the text has more bytes than its tokens could have.
    pub(super) fn tokenizing(
        &self,
        text: &str,
        limit: (u32, &'static str),
        what: impl FnOnce() -> String,
    ) -> Result<MemoryGuard, RequestError> {
        check_bytes(text.len(), limit, what)?;
        self.caller.briefly(text.len() as u64 * TOKENIZING)
    }

    fn check_texts(&self, texts: &[String]) -> Result<(), RequestError> {
        check_count(texts.len(), "texts")?;
        if self.spec().patches.is_some() {
            let why = "this model reads images, and texts came".to_owned();
            return Err(RequestError::Invalid { why });
        }
        match texts.iter().position(|t| t.trim().is_empty()) {
            Some(index) => Err(RequestError::EmptyText { index }),
            None => Ok(()),
        }
    }

    /// The tokens of a text as a sequence, if the model can run them.
    fn fitting(
        &self,
        index: usize,
        encoded: Encoded,
        (limit, limited_by): (u32, &'static str),
    ) -> Result<Sequence, RequestError> {
        let Encoded { ids, types } = encoded;
        if ids.is_empty() {
            return Err(RequestError::EmptyText { index });
        }
        if ids.len() > limit as usize {
            let tokens = ids.len();
            return Err(RequestError::TextTooLong { index, tokens, limit, limited_by });
        }
        self.check_known(index, &ids)?;
        Ok(Sequence::typed(ids, types))
    }
}

/// How texts become tokens.
struct Texts {
    /// What is put before each of them.
    prompt: String,
    truncate: bool,
    limit: (u32, &'static str),
}

impl Texts {
    fn cut(&self) -> Option<usize> {
        self.truncate.then_some(self.limit.0 as usize)
    }
}

/// What is put before each text.
fn prompt(sentence: &SentenceConfig, prefix: Option<Prefix>) -> Result<String, RequestError> {
    let name = match prefix {
        Some(Prefix::Text(text)) => return Ok(text),
        Some(Prefix::Named(name)) => Some(name),
        None => None,
    };
    sentence.prompt(name.as_deref()).map(str::to_owned).map_err(|known| {
        let known = match known.is_empty() {
            true => "it has none".to_owned(),
            false => format!("known are {}", known.join(", ")),
        };
        let name = name.unwrap_or_default();
        RequestError::Invalid { why: format!("the model has no prompt {name:?}: {known}") }
    })
}

/// What the logits of one text mean, as the pipelines of transformers decide it.
fn probabilities(head: &ClassHead, logits: &[f32]) -> Vec<f32> {
    let sigmoid = |logit: &f32| 1.0 / (1.0 + (-logit).exp());
    match head.problem {
        Some(Problem::Regression) => logits.to_vec(),
        Some(Problem::MultiLabel) => logits.iter().map(sigmoid).collect(),
        _ if head.labels == 1 => logits.iter().map(sigmoid).collect(),
        Some(Problem::SingleLabel) | None => softmax(logits),
    }
}

/// Refuses a text by its bytes, before it is tokenised.
fn check_bytes(
    bytes: usize,
    (limit, limited_by): (u32, &'static str),
    what: impl FnOnce() -> String,
) -> Result<(), RequestError> {
    let most = (limit as usize).saturating_mul(TOKEN_BYTES).max(TEXT_BYTES);
    match bytes > most {
        true => Err(RequestError::TextTooLarge { what: what(), bytes, most, limit, limited_by }),
        false => Ok(()),
    }
}

fn of(index: usize) -> String {
    format!("text {index}")
}

fn of_text(index: usize, error: &ModelError) -> RequestError {
    RequestError::Invalid { why: format!("text {index}: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_model::ClassRow;

    #[test]
    fn probabilities_follow_the_problem_type_of_the_model() {
        let of = |problem, logits: &[f32]| {
            let labels = logits.len() as u32;
            let names = (0..labels).map(|i| i.to_string()).collect();
            let (row, dense, bias) = (ClassRow::First, None, true);
            let (padding, dense_bias, norm) = (None, false, false);
            let head =
                ClassHead { row, dense, dense_bias, norm, labels, bias, names, problem, padding };
            probabilities(&head, logits)
        };
        let far = [1000.0, 1000.0 + 3f32.ln()];
        for problem in [None, Some(Problem::SingleLabel)] {
            assert_eq!(of(problem, &[0.0]), [0.5], "one class is a yes or a no");
            let have = of(problem, &far);
            assert!((have[0] - 0.25).abs() < 1e-4 && (have[1] - 0.75).abs() < 1e-4, "{have:?}");
        }
        assert_eq!(of(Some(Problem::MultiLabel), &[0.0, -1e9, 1e9]), [0.5, 0.0, 1.0]);
        assert_eq!(of(Some(Problem::Regression), &[0.3]), [0.3]);
        assert_eq!(of(Some(Problem::Regression), &[0.3, 2.0]), [0.3, 2.0]);
    }
}
