//! `galaxy embed` and `galaxy classify`.

use super::{Connection, failure::Failure, images, json, milliseconds, print, progress};
use clap::Args;
use galaxy_client::{Classes, ClientError, Embeddings, Report, TooLong};
use std::{fmt::Write as _, io::Read, path::PathBuf};

/// The largest file of texts that is read.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Values of a vector that fit a line.
const SHOWN: usize = 6;

/// Which texts.
#[derive(Args, Debug)]
struct Texts {
    /// The texts.
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// A file with one text in each line; - is stdin.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Cut texts that are too long for the model instead of refusing them.
    #[arg(long)]
    truncate: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Arguments of `galaxy embed`.
///
/// With --json: {"vectors": [[...], ...], "report": {...}}, in the order of the texts.
#[derive(Args, Debug)]
pub struct EmbedArgs {
    #[command(flatten)]
    texts: Texts,
    #[command(flatten)]
    connection: Connection,
}

/// Arguments of `galaxy classify`.
///
/// With --json: {"labels": [...], "logits": [[...], ...], "report": {...}}, in the order of the
/// texts.
#[derive(Args, Debug)]
pub struct ClassifyArgs {
    #[command(flatten)]
    texts: Texts,
    /// An image file, PNG or JPEG, for a model of images; instead of texts. May be given several
    /// times.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "file"])]
    image: Vec<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

impl Texts {
    fn read(&self) -> Result<Vec<String>, Failure> {
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

    fn too_long(&self) -> TooLong {
        if self.truncate { TooLong::Truncate } else { TooLong::Refuse }
    }
}

/// Why a call about texts failed: these commands can cut what is too long.
fn failure(error: ClientError) -> Failure {
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

/// `galaxy embed`.
pub async fn embed(args: EmbedArgs) -> Result<(), Failure> {
    let texts = args.texts.read()?;
    let client = args.connection.open().await?;
    let answer =
        progress::watch("embedding", client.embed_with(&texts, args.texts.too_long())).await;
    let answer = answer.map_err(failure)?;
    if args.texts.json { print(&json(&answer)?) } else { print(&embeddings(&texts, &answer)) }
}

/// `galaxy classify`.
pub async fn classify(args: ClassifyArgs) -> Result<(), Failure> {
    let (names, answer) = if args.image.is_empty() {
        let texts = args.texts.read()?;
        let client = args.connection.open().await?;
        let work = client.classify_with(&texts, args.texts.too_long());
        let answer = progress::watch("classifying", work).await.map_err(failure)?;
        (texts, answer)
    } else {
        let files = args.image.iter().map(|path| images::file(path));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let client = args.connection.open().await?;
        let answer = progress::watch("classifying", client.classify_images(&files)).await?;
        (args.image.iter().map(|path| path.display().to_string()).collect(), answer)
    };
    if args.texts.json { print(&json(&answer)?) } else { print(&classes(&names, &answer)) }
}

fn embeddings(texts: &[String], answer: &Embeddings) -> String {
    let mut out = String::new();
    for (text, vector) in texts.iter().zip(&answer.vectors) {
        let _ = writeln!(out, "{} {}", values(vector), excerpt(text));
    }
    out + &cost(texts.len(), &answer.report)
}

fn classes(texts: &[String], answer: &Classes) -> String {
    let mut out = String::new();
    for (text, logits) in texts.iter().zip(&answer.logits) {
        let mut ranked: Vec<_> = answer.labels.iter().zip(probabilities(logits)).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let shown: Vec<String> =
            ranked.iter().take(SHOWN).map(|(label, p)| format!("{label} {p:.4}")).collect();
        let more = if ranked.len() > SHOWN { ", ..." } else { "" };
        let _ = writeln!(out, "{}{more}  {}", shown.join(", "), excerpt(text));
    }
    out + &cost(texts.len(), &answer.report)
}

/// Softmax.
fn probabilities(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let raised: Vec<f64> = logits.iter().map(|&l| f64::from(l - top).exp()).collect();
    let sum: f64 = raised.iter().sum();
    raised.into_iter().map(|e| e / sum).collect()
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
    fn a_text_that_is_too_long_can_be_cut() {
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
    fn classes_are_ranked_by_probability() {
        let answer = Classes {
            labels: vec!["bad".into(), "good".into()],
            logits: vec![vec![1000.0, 1000.0 + 3f32.ln()]],
            report: Report { requests: vec![RequestId(4)], tokens: 3, ..Report::default() },
        };
        let shown = classes(&["fine".to_owned()], &answer);
        assert!(shown.starts_with("good 0.7500, bad 0.2500  \"fine\"\n"), "{shown}");
        assert!(shown.contains("request 4: 1 text, 3 tokens; queue 0.00 ms"), "{shown}");
    }

    #[test]
    fn long_texts_and_vectors_are_cut() {
        assert_eq!(values(&[0.5, -1.0]), "[ 0.500000, -1.000000]");
        assert!(values(&[0.0; 384]).ends_with("and 378 more]"));
        assert!(excerpt(&"ä".repeat(200)).ends_with("ä\"..."));
    }
}
