//! `galaxy classify`: texts and images by a cluster, images by an ONNX file in this process.

mod network;

use super::{
    Connection,
    failure::Failure,
    images, json, print, progress,
    texts::{self, SHOWN, Texts, cost, excerpt},
};
use clap::Args;
use galaxy_client::Classes;
use std::{fmt::Write as _, path::PathBuf};

/// Arguments of `galaxy classify`.
#[derive(Args, Debug)]
pub struct ClassifyArgs {
    #[command(flatten)]
    texts: Texts,
    /// Image file to classify instead of texts, PNG or JPEG; may be given several times.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "file"])]
    image: Vec<PathBuf>,
    #[command(flatten)]
    network: network::NetworkArgs,
    #[command(flatten)]
    connection: Connection,
}

/// Runs `galaxy classify`.
pub async fn classify(args: ClassifyArgs) -> Result<(), Failure> {
    if args.network.is_given()? {
        return network::classify(args.network, args.image, args.texts.json).await;
    }
    let (names, answer) = if args.image.is_empty() {
        let texts = args.texts.read()?;
        let client = args.connection.open().await?;
        let work = client.classify_with(&texts, args.texts.too_long());
        let answer = progress::watch("classifying", work).await.map_err(texts::failure)?;
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

fn classes(texts: &[String], answer: &Classes) -> String {
    ranked(texts, &answer.labels, &answer.probabilities) + &cost(texts.len(), &answer.report)
}

/// A line for each text or image: its best classes with their probabilities, and its name.
fn ranked(names: &[String], labels: &[String], probabilities: &[Vec<f32>]) -> String {
    let mut out = String::new();
    for (name, probabilities) in names.iter().zip(probabilities) {
        let mut ranked: Vec<_> = labels.iter().zip(probabilities).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(a.1));
        let shown: Vec<String> =
            ranked.iter().take(SHOWN).map(|(label, p)| format!("{label} {p:.4}")).collect();
        let more = if ranked.len() > SHOWN { ", ..." } else { "" };
        let _ = writeln!(out, "{}{more}  {}", shown.join(", "), excerpt(name));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_client::Report;
    use galaxy_common::RequestId;

    #[test]
    fn classes_are_ranked_by_probability() {
        let answer = Classes {
            labels: vec!["bad".into(), "good".into()],
            logits: vec![vec![0.0, 3f32.ln()]],
            probabilities: vec![vec![0.25, 0.75]],
            report: Report { requests: vec![RequestId(4)], tokens: 3, ..Report::default() },
        };
        let shown = classes(&["fine".to_owned()], &answer);
        assert!(shown.starts_with("good 0.7500, bad 0.2500  \"fine\"\n"), "{shown}");
        assert!(shown.contains("request 4: 1 text, 3 tokens; queue 0.00 ms"), "{shown}");
    }
}
