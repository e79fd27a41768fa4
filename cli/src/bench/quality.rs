//! `galaxy bench quality`: results of a model with rounded matrices, against those of the model as it is.

use crate::{
    failure::Failure,
    in_process::{self, InProcess, Rounding, Settings},
    table::{row, table},
};
use clap::Args;
use galaxy_client::{Input, Output};
use galaxy_common::{Bytes, Cache, Spread};
use galaxy_graph::{budget, operators::OperatorGraph};
use galaxy_model::{HeadSpec, ModelDir, Quantisation, tokenizer::Tokenizer};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

pub const MEANING: &str = "\
What the figures mean:

  divergence  of a decoder: the Kullback-Leibler divergence of the probabilities of the next token, of the model
              as it is from the rounded one, in nats. At each token of each text, behind the tokens that the text
              has: 0 is the same; 0.01 is hardly seen in what a model writes, 0.1 is.
  same token  of a decoder: at how many places the likeliest token is the same
  cosine      of an encoder: of the vector of a text with that of the model as it is: 1 is the same
  weights     what one device holds

Of divergences and cosines the median over texts, with the smallest and the largest.";

/// The texts that are measured with by default: of several kinds, so that no format is flattered.
const TEXTS: [&str; 12] = [
    "The river had risen in the night, and by morning the lower fields were under water as far as the old mill.",
    "A heat pump moves heat from a cold place to a warm one. It needs less energy than it delivers, because most of the heat is already there.",
    "In 1969 two people walked on the Moon for about two and a half hours, while a third waited in orbit.",
    "fn largest(values: &[i32]) -> Option<i32> { values.iter().copied().max() }",
    "To make the dough, mix 500 g of flour with 320 ml of water, 10 g of salt and 5 g of yeast, and let it rest.",
    "How do I change the battery of a smoke detector that hangs four metres above the floor?",
    "She said that the meeting had been moved to Thursday, that nobody had told her, and that she would not come.",
    "The court held that the contract was void, since one of the parties had been a minor when it was signed.",
    "Roses need sun for at least six hours a day; prune them in early spring, before the buds open.",
    "Der Zug nach Hamburg fährt heute von Gleis 7 und hat etwa zwanzig Minuten Verspätung.",
    "Total revenue rose by 4.2% to 1,318 million, while operating costs fell from 902 to 874 million.",
    "Each device of a cluster computes a part of every layer, and they exchange what the others need.",
];

/// Arguments of `galaxy bench quality`.
#[derive(Args, Debug)]
pub struct QualityArgs {
    /// Model directory or GGUF file, with a tokenizer and with matrices of 16 or 32 bits.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Formats to compare: q8, q6 and q4.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "q8,q6,q4")]
    formats: Vec<Quantisation>,
    /// File with one text per line [default: twelve built-in texts].
    #[arg(long, value_name = "FILE")]
    texts: Option<PathBuf>,
    /// Most tokens of each text; longer ones are cut.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=4096))]
    tokens: u32,
    /// Kernel threads [default: the cores of this machine].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize, Debug)]
pub struct Findings {
    model: String,
    format: &'static str,
    weights: Bytes,
    texts: usize,
    tokens: usize,
    lines: Vec<FormatFigures>,
}

/// One format, compared with the model as it is.
#[derive(Serialize, Debug)]
struct FormatFigures {
    format: &'static str,
    weights: Bytes,
    #[serde(flatten)]
    measured: Measured,
}

#[derive(Serialize, Debug)]
#[serde(rename_all = "snake_case")]
enum Measured {
    Decoder { divergence: Spread, mean: f64, same_token: f64 },
    Encoder { cosine: Spread },
}

/// Runs the model as it is, and rounded to each format.
pub fn measured(args: &QualityArgs) -> Result<Findings, Failure> {
    let model = in_process::open_model(&args.model, Rounding::default())?;
    let tokenizer = Tokenizer::open(model.path()).map_err(in_process::model_failure)?;
    let limit = args.tokens.min(model.spec().position_limit()) as usize;
    let mut texts = Vec::new();
    for text in read(args.texts.as_deref())? {
        let ids = tokenizer.encode(&text, Some(limit)).map_err(in_process::model_failure)?;
        texts.push(ids.into_iter().take(limit).collect::<Vec<u32>>());
    }
    texts.retain(|ids| ids.len() > 1);
    if texts.is_empty() {
        return Err(Failure::usage("there is no text of two tokens or more").at("--texts"));
    }
    let rows = texts.iter().map(Vec::len).max().unwrap_or(1) as u32;
    let threads = args.threads.unwrap_or(in_process::cores());
    let settings = Settings { threads, ..Settings::single() };
    let start =
        |model: &Arc<ModelDir>| InProcess::start(model.clone(), &settings, rows, Cache::NONE);
    let mut exact = start(&model)?;
    let mut lines = Vec::new();
    for format in &args.formats {
        let other = in_process::open_model(&args.model, Rounding::of_weights(Some(*format)))?;
        let mut rounded = start(&other)?;
        let decodes = matches!(model.spec().head, HeadSpec::Language { .. });
        let measured = match decodes {
            true => decoder(&mut exact, &mut rounded, &texts)?,
            false => encoder(&mut exact, &mut rounded, &texts)?,
        };
        lines.push(FormatFigures {
            format: format.name(),
            weights: weights(&other, &rounded),
            measured,
        });
    }
    Ok(Findings {
        model: model.name().to_owned(),
        format: model.format().name(),
        weights: weights(&model, &exact),
        texts: texts.len(),
        tokens: texts.iter().map(Vec::len).sum(),
        lines,
    })
}

/// Reads the texts of a file, one per line; without a file, the built-in ones.
fn read(file: Option<&Path>) -> Result<Vec<String>, Failure> {
    let Some(path) = file else { return Ok(TEXTS.map(str::to_owned).to_vec()) };
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::new(error.to_string()).at(path.display()))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
}

/// The bytes of the weights that the device holds.
fn weights(model: &ModelDir, cluster: &InProcess) -> Bytes {
    let graph = OperatorGraph::of(model.spec());
    budget::weights(&graph, model.formats(), &cluster.cluster().plan().ring[0])
}

fn decoder(
    exact: &mut InProcess,
    rounded: &mut InProcess,
    texts: &[Vec<u32>],
) -> Result<Measured, Failure> {
    let (mut means, mut all, mut same) = (Vec::new(), Vec::new(), 0);
    for (index, ids) in (0..).zip(texts) {
        let input = Input::Ids(ids.clone());
        let want = exact.run(index, &input, Output::AllLogits)?.values;
        let have = rounded.run(index, &input, Output::AllLogits)?.values;
        let words = want.len() / ids.len();
        let places = want.chunks(words).zip(have.chunks(words));
        let mut of_text = Vec::new();
        for (want, have) in places {
            of_text.push(divergence(want, have));
            same += usize::from(likeliest(want) == likeliest(have));
        }
        means.push(of_text.iter().sum::<f64>() / of_text.len() as f64);
        all.extend(of_text);
    }
    Ok(Measured::Decoder {
        divergence: Spread::of(&means),
        mean: all.iter().sum::<f64>() / all.len() as f64,
        same_token: same as f64 / all.len() as f64,
    })
}

fn encoder(
    exact: &mut InProcess,
    rounded: &mut InProcess,
    texts: &[Vec<u32>],
) -> Result<Measured, Failure> {
    let mut cosines = Vec::new();
    for (index, ids) in (0..).zip(texts) {
        let input = Input::Ids(ids.clone());
        let want = exact.run(index, &input, Output::Pooled)?.values;
        let have = rounded.run(index, &input, Output::Pooled)?.values;
        cosines.push(cosine(&want, &have));
    }
    Ok(Measured::Encoder { cosine: Spread::of(&cosines) })
}

/// The log-probabilities of logits.
fn logarithms(logits: &[f32]) -> Vec<f64> {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - most - sum.ln()).collect()
}

/// The Kullback-Leibler divergence of the probabilities of `want` from those of `have`.
fn divergence(want: &[f32], have: &[f32]) -> f64 {
    let pairs = logarithms(want).into_iter().zip(logarithms(have));
    pairs.map(|(p, q)| p.exp() * (p - q)).sum::<f64>().max(0.0)
}

fn likeliest(logits: &[f32]) -> usize {
    let most = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    most.map_or(0, |(at, _)| at)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

pub fn text(findings: &Findings) -> String {
    let Findings { model, format, weights, texts, tokens, lines } = findings;
    let mut out = format!(
        "{model}: {weights} of weights in {format}; against it, over {texts} texts of {tokens} tokens:\n"
    );
    let spread = |spread: &Spread, digits: usize| {
        let Spread { median, low, high, .. } = spread;
        format!("{median:.digits$} ({low:.digits$} to {high:.digits$})")
    };
    let decoder =
        matches!(lines.first(), Some(FormatFigures { measured: Measured::Decoder { .. }, .. }));
    let mut rows = vec![match decoder {
        true => row(["format", "weights", "divergence", "mean", "same token"]),
        false => row(["format", "weights", "cosine"]),
    }];
    for FormatFigures { format, weights, measured } in lines {
        let mut cells = vec![(*format).to_owned(), weights.to_string()];
        match measured {
            Measured::Decoder { divergence, mean, same_token } => {
                let same = format!("{:.1}%", same_token * 100.0);
                cells.extend([spread(divergence, 5), format!("{mean:.5}"), same]);
            }
            Measured::Encoder { cosine } => cells.push(spread(cosine, 6)),
        }
        rows.push(cells);
    }
    out += &table(&rows);
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn quantisation_to_fewer_bits_diverges_more() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-galaxy").into();
        let formats = Quantisation::ALL.to_vec();
        let args =
            QualityArgs { model, formats, texts: None, tokens: 24, threads: Some(1), json: false };
        let findings = measured(&args).unwrap();
        assert_eq!((findings.texts, findings.tokens, findings.lines.len()), (12, 12 * 24, 3));
        let means = findings.lines.iter().map(|line| match line.measured {
            Measured::Decoder { mean, .. } => mean,
            Measured::Encoder { .. } => panic!("it has a language head"),
        });
        let means: Vec<f64> = means.collect();
        assert!(means[0] > 0.0 && means[0] < means[1] && means[1] < means[2], "{means:?}");
        assert!(means[0] < 1e-3 && means[2] < 0.5, "{means:?}");
        let said = text(&findings);
        assert!(said.contains("same token") && said.contains("q4"), "{said}");
        assert!(findings.lines.iter().all(|line| line.weights < findings.weights));
    }

    #[test]
    fn divergence_and_cosine_match_their_formulas() {
        let (p, q) = ([0.5f64, 0.25, 0.25], [0.25f64, 0.5, 0.25]);
        let logits = |of: [f64; 3]| of.map(|p| p.ln() as f32 + 3.0);
        let want: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((divergence(&logits(p), &logits(q)) - want).abs() < 1e-6);
        assert!(divergence(&logits(p), &logits(p)) < 1e-9);
        assert!((cosine(&[1.0, 1.0], &[1.0, 0.0]) - 0.5f64.sqrt()).abs() < 1e-9);
        assert_eq!(likeliest(&[0.0, 2.0, 1.0]), 1);
    }
}
