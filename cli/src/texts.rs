//! `galaxy embed` and `galaxy rerank`, and the texts that commands take.

use super::{Connection, failure::Failure, json, milliseconds, print, progress};
use clap::Args;
use galaxy_client::{ClientError, EmbedOptions, Embeddings, Prefix, Ranking, Report, TooLong};
use std::{fmt::Write as _, io::Read, num::NonZeroU32, path::PathBuf};

/// The largest file of texts that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// The most values of a vector, or classes, that are shown in a line.
pub(super) const SHOWN: usize = 6;

/// Arguments that name texts.
#[derive(Args, Debug)]
pub(super) struct Texts {
    /// Texts, one per argument.
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// File with one text per line; - is stdin.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Cut texts that are too long for the model instead of refusing them.
    #[arg(long)]
    truncate: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of `galaxy embed`.
#[derive(Args, Debug)]
pub struct EmbedArgs {
    #[command(flatten)]
    texts: Texts,
    /// Put the model's prompt of this name, like query, before each text.
    ///
    /// Prompts are those of the model's config_sentence_transformers.json.
    #[arg(long, value_name = "NAME", conflicts_with = "prompt_text")]
    prompt: Option<String>,
    /// Put this text before each text.
    #[arg(long, value_name = "TEXT")]
    prompt_text: Option<String>,
    /// Truncate vectors to this many values, for models that are trained for it.
    #[arg(long, value_name = "COUNT")]
    dimensions: Option<NonZeroU32>,
    /// Scale vectors to length one, whatever the model's files say.
    #[arg(long)]
    normalize: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Arguments of `galaxy rerank`.
#[derive(Args, Debug)]
pub struct RerankArgs {
    /// The query that texts are ranked by.
    #[arg(value_name = "QUERY")]
    query: String,
    #[command(flatten)]
    texts: Texts,
    #[command(flatten)]
    connection: Connection,
}

impl EmbedArgs {
    fn options(&self) -> EmbedOptions {
        let named = self.prompt.clone().map(Prefix::Named);
        EmbedOptions {
            too_long: self.texts.too_long(),
            prefix: named.or_else(|| self.prompt_text.clone().map(Prefix::Text)),
            dimensions: self.dimensions,
            normalise: self.normalize,
        }
    }
}

impl Texts {
    pub(super) fn read(&self) -> Result<Vec<String>, Failure> {
        let mut texts = self.texts.clone();
        if let Some(path) = &self.file {
            texts.extend(lines(path)?);
        } else if texts.is_empty() {
            return Err(
                Failure::usage("no text is given").todo("give texts, or --file FILE, or --file -")
            );
        }
        Ok(texts)
    }

    pub(super) fn too_long(&self) -> TooLong {
        if self.truncate { TooLong::Truncate } else { TooLong::Refuse }
    }
}

/// Why a call about texts failed: these commands can cut what is too long.
pub(super) fn failure(error: ClientError) -> Failure {
    let is_too_long = error.code() == "text_too_long";
    let failure = Failure::from(error);
    if is_too_long { failure.todo("--truncate cuts it") } else { failure }
}

fn lines(path: &PathBuf) -> Result<Vec<String>, Failure> {
    let failed = |error| Failure::new(format!("cannot read texts: {error}")).at(path.display());
    let source: Box<dyn Read> = if path.as_os_str() == "-" {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(std::fs::File::open(path).map_err(failed)?)
    };
    let mut text = String::new();
    let read = source.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if read as u64 > MAX_FILE_BYTES {
        return Err(Failure::new(format!("more than {MAX_FILE_BYTES} bytes of texts"))
            .at(path.display())
            .todo("send them in several calls"));
    }
    Ok(text.lines().map(str::to_owned).collect())
}

/// Runs `galaxy embed`.
pub async fn embed(args: EmbedArgs) -> Result<(), Failure> {
    let texts = args.texts.read()?;
    let client = args.connection.open().await?;
    let answer = progress::watch("embedding", client.embed_with(&texts, args.options())).await;
    let answer = answer.map_err(failure)?;
    if args.texts.json { print(&json(&answer)?) } else { print(&embeddings(&texts, &answer)) }
}

/// Runs `galaxy rerank`.
pub async fn rerank(args: RerankArgs) -> Result<(), Failure> {
    let texts = args.texts.read()?;
    let client = args.connection.open().await?;
    let work = client.rerank(&args.query, &texts, args.texts.too_long());
    let answer = progress::watch("ranking", work).await.map_err(failure)?;
    if args.texts.json { print(&json(&answer)?) } else { print(&ranking(&texts, &answer)) }
}

fn ranking(texts: &[String], answer: &Ranking) -> String {
    let mut out = String::new();
    for ranked in &answer.ranked {
        let text = texts.get(ranked.index).map_or("", String::as_str);
        let _ = writeln!(out, "{:>9.4}  {:>4}  {}", ranked.score, ranked.index, excerpt(text));
    }
    out + &cost(texts.len(), &answer.report)
}

fn embeddings(texts: &[String], answer: &Embeddings) -> String {
    let mut out = String::new();
    for (text, vector) in texts.iter().zip(&answer.vectors) {
        let _ = writeln!(out, "{} {}", values(vector), excerpt(text));
    }
    out + &cost(texts.len(), &answer.report)
}

fn values(vector: &[f32]) -> String {
    let shown: Vec<String> = vector.iter().take(SHOWN).map(|v| format!("{v:>9.6}")).collect();
    let more = vector.len().saturating_sub(SHOWN);
    if more > 0 {
        format!("[{}, and {more} more]", shown.join(", "))
    } else {
        format!("[{}]", shown.join(", "))
    }
}

/// The beginning of a text, in quotes.
pub fn excerpt(text: &str) -> String {
    // What is left of a line of 100 after the values.
    const LONGEST: usize = 48;
    if text.chars().count() <= LONGEST {
        return format!("{text:?}");
    }
    format!("{:?}...", text.chars().take(LONGEST).collect::<String>())
}

/// One line that says what a call cost.
pub fn cost(count: usize, report: &Report) -> String {
    let ids: Vec<String> = report.requests.iter().map(ToString::to_string).collect();
    let name = if ids.len() > 3 {
        format!("requests {} to {}", ids[0], ids[ids.len() - 1])
    } else {
        format!("request {}", ids.join(", "))
    };
    format!(
        "{name}: {count} text{}, {} tokens; queue {}, tokenize {}, execute {}\n",
        if count == 1 { "" } else { "s" },
        report.tokens,
        milliseconds(report.queue),
        milliseconds(report.tokenize),
        milliseconds(report.execute),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_common::RequestId;

    #[test]
    fn files_give_one_text_for_each_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("texts.txt");
        std::fs::write(&path, "one\ntwo words\r\n\nlast").unwrap();
        assert_eq!(lines(&path).unwrap(), ["one", "two words", "", "last"]);
        let failure = lines(&dir.path().join("none.txt")).unwrap_err().to_string();
        assert!(failure.contains("none.txt"), "{failure}");
    }

    #[test]
    fn an_error_about_a_too_long_text_suggests_truncate() {
        let error = |code: &str| ClientError::Refused {
            code: code.to_owned(),
            message: "text 0 has 900 tokens".to_owned(),
            retryable: false,
            device: None,
        };
        let said = failure(error("text_too_long")).to_string();
        assert_eq!(said, "error: text 0 has 900 tokens; --truncate cuts it");
        let said = failure(error("empty_text")).to_string();
        assert_eq!(said, "error: text 0 has 900 tokens");
    }

    #[test]
    fn reranked_texts_are_shown_best_first() {
        let ranked = |index, score| galaxy_client::Ranked { index, score };
        let answer = Ranking {
            ranked: vec![ranked(1, 0.75), ranked(0, 0.125)],
            report: Report { requests: vec![RequestId(4)], ..Report::default() },
        };
        let shown = ranking(&["far".to_owned(), "near".to_owned()], &answer);
        let lines: Vec<_> = shown.lines().collect();
        assert_eq!(lines[..2], ["   0.7500     1  \"near\"", "   0.1250     0  \"far\""]);
    }

    #[test]
    fn long_texts_and_vectors_are_shortened_when_shown() {
        assert_eq!(values(&[0.5, -1.0]), "[ 0.500000, -1.000000]");
        assert!(values(&[0.0; 384]).ends_with("and 378 more]"));
        assert!(excerpt(&"ä".repeat(200)).ends_with("ä\"..."));
    }
}
