//! `galaxy bench pairs`: two coordinators on the same prompts, in turns.

use crate::{
    Connection,
    failure::Failure,
    json, print, progress,
    table::{row, table},
};
use clap::Args;
use galaxy_client::{Client, GenerateOptions, Generated, Prompt};
use galaxy_common::{SamplingParams, Spread};
use serde::Serialize;
use std::{path::PathBuf, time::Instant};

pub(super) const MEANING: &str = "\
What the figures mean:

  tokens/s  tokens behind the first, over the time from the first to the last
  ratio     the coordinator's over the other's, of texts that follow one another: the median, the
            lowest and the highest of all rounds
  same      whether both gave the same tokens

Below them stands the ratio of the times of all prompts together, round by round.

Prompts are read from a file, with a line of three dashes between two. Both coordinators answer each in
turn, and which is first changes from round to round.";

/// Arguments of `galaxy bench pairs`.
#[derive(Args, Debug)]
pub(super) struct PairsArgs {
    /// File of prompts, with a line of three dashes between two.
    #[arg(value_name = "FILE")]
    prompts: PathBuf,
    /// Address of the other coordinator.
    #[arg(long, value_name = "HOST:PORT")]
    against: String,
    /// Times that both coordinators answer each prompt.
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Tokens of each answer.
    #[arg(long, value_name = "N", default_value_t = 96,
        value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Sampling temperature; 0 takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// What was found for one prompt.
#[derive(Serialize)]
struct Pair {
    prompt: String,
    /// Tokens per second of the coordinator and of the other, over all rounds.
    rates: [Spread; 2],
    ratio: Spread,
    same: bool,
}

#[derive(Serialize)]
struct Findings {
    model: String,
    plans: [String; 2],
    pairs: Vec<Pair>,
    /// The other's time over the coordinator's for all prompts together, over all rounds.
    ratio: Spread,
}

/// Splits the text of a file into its prompts.
fn prompts(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let cut = |line: &&str| line.len() == 3 && line.bytes().all(|byte| byte == b'-');
    let parts = lines.split(cut).map(|part| part.join("\n").trim_end_matches('\n').to_owned());
    parts.filter(|part| !part.trim().is_empty()).collect()
}

/// Runs `galaxy bench pairs`.
pub(super) async fn measure(args: &PairsArgs) -> Result<(), Failure> {
    let place = args.prompts.display().to_string();
    let text = std::fs::read_to_string(&args.prompts);
    let prompts = prompts(&text.map_err(|e| Failure::new(e.to_string()).at(&place))?);
    if prompts.is_empty() {
        return Err(Failure::usage("the file has no prompts").at(&place));
    }
    let clients = [
        args.connection.open().await?,
        args.connection.clone().at(args.against.clone()).open().await?,
    ];
    let (one, other) = (clients[0].status().await?, clients[1].status().await?);
    if one.model != other.model {
        let what = format!("one serves {} and the other {}", one.model, other.model);
        return Err(Failure::usage(what).todo("compare two coordinators of the same model"));
    }
    let all = async {
        for client in &clients {
            generate(args, client, &prompts[0]).await?;
        }
        // By prompt, by round: seconds of both.
        let mut seconds = vec![Vec::new(); prompts.len()];
        let mut same = vec![true; prompts.len()];
        for round in 0..args.rounds {
            for (at, prompt) in prompts.iter().enumerate() {
                let mut both = [(0.0, Vec::new()), (0.0, Vec::new())];
                let first = (round as usize + at) % 2;
                for side in [first, 1 - first] {
                    both[side] = generate(args, &clients[side], prompt).await?;
                }
                same[at] &= both[0].1 == both[1].1;
                let steps = |side: usize| both[side].1.len().saturating_sub(1) as f64;
                seconds[at].push([(both[0].0, steps(0)), (both[1].0, steps(1))]);
            }
        }
        Ok::<_, Failure>((seconds, same))
    };
    let (seconds, same) = progress::watch("answering in turns", all).await?;
    let rate = |(seconds, steps): (f64, f64)| steps / seconds;
    let pairs = prompts.into_iter().zip(&seconds).zip(same).map(|((prompt, rounds), same)| Pair {
        prompt,
        rates: [0, 1]
            .map(|side| Spread::of(&rounds.iter().map(|r| rate(r[side])).collect::<Vec<_>>())),
        ratio: Spread::of(&rounds.iter().map(|[a, b]| rate(*a) / rate(*b)).collect::<Vec<_>>()),
        same,
    });
    let whole = |round: usize| {
        let sum = |side: usize| seconds.iter().map(|rounds| rounds[round][side].0).sum::<f64>();
        sum(1) / sum(0)
    };
    let findings = Findings {
        model: one.model,
        plans: [one.plan, other.plan],
        pairs: pairs.collect(),
        ratio: Spread::of(&(0..args.rounds as usize).map(whole).collect::<Vec<_>>()),
    };
    print(&if args.json { json(&findings)? } else { self::text(&findings) })
}

/// Generates an answer. Returns the seconds from its first token to its last, and its tokens.
async fn generate(
    args: &PairsArgs,
    client: &Client,
    prompt: &str,
) -> Result<(f64, Vec<u32>), Failure> {
    let options = GenerateOptions {
        max_tokens: args.tokens,
        sampling: SamplingParams {
            temperature: Some(args.temperature),
            seed: Some(1),
            ..SamplingParams::default()
        },
        ignore_end: true,
        fallback: None,
        ..GenerateOptions::default()
    };
    let mut text = client.generate(Prompt::Text(prompt.to_owned()), options).await?;
    let (mut begun, mut tokens) = (Instant::now(), Vec::new());
    while let Some(Generated::Token(token)) = text.next().await? {
        if tokens.is_empty() {
            begun = Instant::now();
        }
        tokens.push(token.token);
    }
    Ok((begun.elapsed().as_secs_f64(), tokens))
}

fn text(findings: &Findings) -> String {
    let Findings { model, plans: [one, other], pairs, ratio } = findings;
    let mut rows = vec![row(["prompt", "tokens/s", "other", "ratio", "from", "to", "same"])];
    rows.extend(pairs.iter().map(|pair| {
        let begin: String = pair.prompt.split_whitespace().collect::<Vec<_>>().join(" ");
        vec![
            begin.chars().take(32).collect(),
            format!("{:.1}", pair.rates[0].median),
            format!("{:.1}", pair.rates[1].median),
            format!("{:.2}", pair.ratio.median),
            format!("{:.2}", pair.ratio.low),
            format!("{:.2}", pair.ratio.high),
            if pair.same { "yes" } else { "no" }.to_owned(),
        ]
    }));
    let Spread { median, low, high, n, .. } = ratio;
    format!(
        "{model}\n  by {one}\n  and by {other}\n\n{}\nall prompts: {median:.3} ({low:.3} to {high:.3}, n={n})\n",
        table(&rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_three_dashes_separate_prompts() {
        assert_eq!(prompts("a\nb\n---\n\n  c\n---\n\n"), ["a\nb", "\n  c"]);
        assert_eq!(prompts("--- a ---\n"), ["--- a ---"]);
        assert!(prompts("\n---\n").is_empty());
        for file in ["repeating", "plain"] {
            let path = format!("{}/../testdata/speculation/{file}.txt", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(path).unwrap_or_default();
            assert_eq!(prompts(&text).len(), 6, "{file}");
        }
    }
}
