//! `galaxy bench serve`: how a coordinator answers many clients at once.

mod long_prompt;

use crate::{
    Connection,
    failure::Failure,
    json, print, progress,
    table::{row, table},
};
use clap::Args;
use galaxy_client::{Client, ClientError, EmbedOptions, GenerateOptions, Generated, Prompt};
use galaxy_common::{SamplingParams, Spread};
use long_prompt::{LongPrompt, LongPromptFindings};
use serde::Serialize;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::{sync::watch, task::JoinSet};

pub(super) const MEANING: &str = "\
What the figures mean:

  clients   streams at a time: each sends its next prompt when its last answer is whole
  tokens/s  tokens that all of them got, over the time from the first prompt to the last token
  first     from a prompt to its first token: the median, and the time that 95 of 100 are within
  next      from one token to the next, the same
  gap       the longest time between two tokens of any stream

With --long-prompt, one more prompt comes once all streams decode. Its first token is timed
beside them and alone; the longest gap of any stream meanwhile is compared with a step.

Prompts are random tokens of random lengths, drawn by --seed: the same for each number of
clients. --plot writes the times over the number of clients as a picture (SVG).";

/// Arguments of `galaxy bench serve`.
#[derive(Args, Debug)]
pub(super) struct ServeArgs {
    /// Numbers of concurrent clients to measure, like 1,4,16.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16",
        value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: Vec<u32>,
    /// Requests that each client sends, one after another.
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    requests: u32,
    /// Tokens of each prompt: a number or a range, like 16-256.
    #[arg(long, value_name = "N|N-N", default_value = "16-128", value_parser = lengths)]
    prompt: (u32, u32),
    /// Ask for embeddings instead of generated tokens.
    ///
    /// One request with the texts of all clients is measured, too.
    #[arg(long, conflicts_with_all = ["tokens", "plot"])]
    embed: bool,
    /// Send a prompt of this many tokens beside the streams, once all of them decode.
    #[arg(long, value_name = "N", conflicts_with = "embed",
        value_parser = clap::value_parser!(u32).range(1..))]
    long_prompt: Option<u32>,
    /// Tokens of each answer: a number or a range.
    #[arg(long, value_name = "N|N-N", default_value = "32-64", value_parser = lengths)]
    tokens: (u32, u32),
    /// Seed of the random prompts and lengths.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write latency over the number of clients to this file, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Parses a range of lengths: one number, or two with a dash between.
fn lengths(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.trim().parse::<u32>().map_err(|e| format!("{text:?}: {e}"));
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    match (number(from)?, number(to)?) {
        (from, to) if from > 0 && from <= to => Ok((from, to)),
        (from, to) => Err(format!("{from} to {to} is no range of lengths from 1 on")),
    }
}

/// The findings for one number of clients.
#[derive(Serialize)]
struct Level {
    clients: u32,
    requests: usize,
    /// Tokens of all prompts.
    prompt_tokens: u64,
    tokens: u64,
    seconds: f64,
    tokens_per_second: f64,
    /// Times from a prompt to its first token.
    first: Times,
    next: Times,
    longest_gap_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    long_prompt: Option<LongPromptFindings>,
}

/// The spread and the 95th percentile of times, in ms.
#[derive(Serialize)]
struct Times {
    spread: Spread,
    /// The 95th percentile; NaN without times.
    p95: f64,
}

impl Times {
    fn of(times: &[Duration]) -> Self {
        let mut ms: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let at = (ms.len() * 95).div_ceil(100).saturating_sub(1);
        Self { spread: Spread::of(&ms), p95: ms.get(at).copied().unwrap_or(f64::NAN) }
    }
}

#[derive(Serialize)]
struct Findings {
    cluster: String,
    model: String,
    plan: String,
    seed: u64,
    levels: Vec<Level>,
}

/// The tokens and times that a client has seen.
#[derive(Default)]
struct StreamTimes {
    prompt_tokens: u64,
    tokens: u64,
    first: Vec<Duration>,
    /// When each token came that was not the first, and how long after the one before it.
    next: Vec<(Instant, Duration)>,
}

/// A pseudorandom generator: Marsaglia's xorshift.
#[derive(Clone)]
struct Draw(u64);

impl Draw {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(end)) >> 32) as u32
    }

    fn of(&mut self, (from, to): (u32, u32)) -> u32 {
        from + self.below(to - from + 1)
    }

    /// A prompt of so many random tokens.
    fn prompt(&mut self, tokens: u32, vocabulary: u32) -> Prompt {
        Prompt::Ids((0..tokens).map(|_| self.below(vocabulary)).collect())
    }
}

/// Asks for so many tokens, each the likeliest.
fn greedy(max_tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        sampling: SamplingParams { temperature: Some(0.0), ..SamplingParams::default() },
        ignore_end: true,
        fallback: None,
        ..GenerateOptions::default()
    }
}

/// Runs `galaxy bench serve`.
pub(super) async fn measure(args: &ServeArgs) -> Result<(), Failure> {
    let client = args.connection.open().await?;
    let status = client.status().await?;
    let vocabulary = status.devices.iter().map(|device| device.vocabulary.end).max().unwrap_or(0);
    if args.embed {
        return embed(args, &client, &status.model).await;
    }
    if status.context == 0 || vocabulary == 0 {
        let what = format!("model {} generates no text here", status.model);
        return Err(Failure::new(what).todo("measure a cluster whose model is a decoder"));
    }
    if args.prompt.1 + args.tokens.1 > status.context {
        let what = format!(
            "prompts of {} tokens with {} behind them do not fit the context of {}",
            args.prompt.1, args.tokens.1, status.context
        );
        return Err(
            Failure::usage(what).todo("lower --prompt or --tokens, or raise kv_cache_tokens")
        );
    }
    if args.long_prompt.is_some() && args.tokens.0 <= long_prompt::STREAM_TOKENS {
        let what = format!(
            "streams of {} tokens are over before a long prompt could come beside them",
            args.tokens.0
        );
        return Err(Failure::usage(what).todo("raise --tokens"));
    }
    if let Some(tokens) = args.long_prompt.filter(|tokens| *tokens >= status.context) {
        let what =
            format!("a prompt of {tokens} tokens does not fit the context of {}", status.context);
        return Err(Failure::usage(what).todo("lower --long-prompt, or raise kv_cache_tokens"));
    }
    // The first request may meet devices that have never run this shape.
    let warm = StreamOptions { requests: 1, vocabulary, prompt: args.prompt, tokens: (4, 4) };
    stream(client.clone(), Draw::new(args.seed ^ 1), warm, watch::Sender::new(0)).await?;
    let mut levels = Vec::new();
    for (number, &clients) in (1..).zip(&args.clients) {
        let level = level(args, &client, (number, clients), vocabulary);
        levels.push(progress::watch("asking as many clients would", level).await?);
    }
    let findings = Findings {
        cluster: status.cluster,
        model: status.model,
        plan: status.plan,
        seed: args.seed,
        levels,
    };
    if let Some(path) = &args.plot {
        let place = path.display().to_string();
        std::fs::write(path, plot(&findings))
            .map_err(|e| Failure::new(e.to_string()).at(&place))?;
    }
    print(&if args.json { json(&findings)? } else { text(&findings) })
}

/// Measures a number of concurrent clients; it is the level of this number.
async fn level(
    args: &ServeArgs,
    client: &Client,
    (number, clients): (u64, u32),
    vocabulary: u32,
) -> Result<Level, Failure> {
    let (mut streams, begun) = (JoinSet::new(), Instant::now());
    let decoding = watch::Sender::new(0);
    let of = StreamOptions {
        requests: args.requests,
        vocabulary,
        prompt: args.prompt,
        tokens: args.tokens,
    };
    for at in 0..clients {
        let draw = Draw::new(args.seed.wrapping_add(u64::from(at) << 20));
        streams.spawn(stream(client.clone(), draw, of, decoding.clone()));
    }
    // A set of one, so that an error of a stream ends it.
    let mut beside = JoinSet::new();
    if let Some(tokens) = args.long_prompt {
        let prompt = LongPrompt { tokens, vocabulary, seed: args.seed.wrapping_add(number << 40) };
        beside.spawn(prompt.measure(client.clone(), (clients, decoding.subscribe())));
    }
    // From now on the streams alone say how many of them decode.
    drop(decoding);
    let broke = |e| Failure::new(format!("a client broke off: {e}"));
    let mut seen = Vec::new();
    while let Some(of) = streams.join_next().await {
        seen.push(of.map_err(broke)??);
    }
    let mut all = StreamTimes::default();
    for of in &seen {
        all.prompt_tokens += of.prompt_tokens;
        all.tokens += of.tokens;
        all.first.extend(&of.first);
        all.next.extend(&of.next);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let long_prompt = match beside.join_next().await {
        Some(times) => Some(times.map_err(broke)??.beside(&seen)),
        None => None,
    };
    let next: Vec<Duration> = all.next.iter().map(|(_, gap)| *gap).collect();
    Ok(Level {
        clients,
        requests: all.first.len(),
        prompt_tokens: all.prompt_tokens,
        tokens: all.tokens,
        seconds,
        tokens_per_second: all.tokens as f64 / seconds,
        longest_gap_ms: next.iter().max().map_or(f64::NAN, |gap| gap.as_secs_f64() * 1e3),
        first: Times::of(&all.first),
        next: Times::of(&next),
        long_prompt,
    })
}

/// The requests of one client.
#[derive(Clone, Copy)]
struct StreamOptions {
    requests: u32,
    vocabulary: u32,
    prompt: (u32, u32),
    tokens: (u32, u32),
}

/// One client, which sends its requests one after another. It is counted in `decoding` once its first answer has
/// [`long_prompt::STREAM_TOKENS`] tokens.
async fn stream(
    client: Client,
    mut draw: Draw,
    StreamOptions { requests, vocabulary, prompt, tokens }: StreamOptions,
    decoding: watch::Sender<u32>,
) -> Result<StreamTimes, Failure> {
    let mut seen = StreamTimes::default();
    for _ in 0..requests {
        let rows = draw.of(prompt);
        let prompt = draw.prompt(rows, vocabulary);
        seen.prompt_tokens += u64::from(rows);
        let options = greedy(draw.of(tokens));
        let mut last = Instant::now();
        let mut text = client.generate(prompt, options).await?;
        let mut first = true;
        while let Some(Generated::Token(_)) = text.next().await? {
            let now = Instant::now();
            match first {
                true => seen.first.push(now - last),
                false => seen.next.push((now, now - last)),
            }
            (last, first) = (now, false);
            seen.tokens += 1;
            if seen.tokens == u64::from(long_prompt::STREAM_TOKENS) {
                decoding.send_modify(|streams| *streams += 1);
            }
        }
    }
    Ok(seen)
}

/// Texts per second of some clients, or of one request with all texts.
#[derive(Serialize)]
struct Rate {
    /// The number of clients; none for one request with all texts.
    clients: Option<u32>,
    texts: usize,
    seconds: f64,
    texts_per_second: f64,
    /// Times from a request to its vectors.
    latency: Times,
}

/// Token ids below this one are in the vocabulary of any model.
const KNOWN: u32 = 90;

/// Runs `galaxy bench serve --embed`.
async fn embed(args: &ServeArgs, client: &Client, model: &str) -> Result<(), Failure> {
    let texts = |at: u32| -> Vec<Vec<u32>> {
        let mut draw = Draw::new(args.seed.wrapping_add(u64::from(at) << 20));
        let mut text = || (0..draw.of(args.prompt)).map(|_| 1 + draw.below(KNOWN - 1)).collect();
        (0..args.requests).map(|_| text()).collect()
    };
    client.embed_ids(&texts(0), EmbedOptions::default()).await?;
    let mut rates = Vec::new();
    for &clients in &args.clients {
        let (mut tasks, begun) = (JoinSet::new(), Instant::now());
        for at in 0..clients {
            let (client, texts) = (client.clone(), texts(at));
            tasks.spawn(async move {
                let mut times = Vec::with_capacity(texts.len());
                for text in texts {
                    let begun = Instant::now();
                    client.embed_ids(&[text], EmbedOptions::default()).await?;
                    times.push(begun.elapsed());
                }
                Ok::<_, ClientError>(times)
            });
        }
        let mut times = Vec::new();
        let all = async {
            while let Some(of) = tasks.join_next().await {
                let broke = |e| Failure::new(format!("a client broke off: {e}"));
                times.extend(of.map_err(broke)??);
            }
            Ok::<_, Failure>(())
        };
        progress::watch("asking as many clients would", all).await?;
        rates.push(Rate::of(Some(clients), times.len(), begun.elapsed(), &times));
    }
    let most = args.clients.iter().max().copied().unwrap_or(1);
    let all: Vec<Vec<u32>> = (0..most).flat_map(texts).collect();
    let begun = Instant::now();
    client.embed_ids(&all, EmbedOptions::default()).await?;
    let took = begun.elapsed();
    rates.push(Rate::of(None, all.len(), took, &[took]));
    if args.json {
        return print(&json(&rates)?);
    }
    let mut rows = vec![row(["clients", "texts", "texts/s", "latency ms", "95%"])];
    rows.extend(rates.iter().map(|rate| {
        vec![
            rate.clients.map_or("one request".to_owned(), |clients| clients.to_string()),
            rate.texts.to_string(),
            format!("{:.1}", rate.texts_per_second),
            format!("{:.1}", rate.latency.spread.median),
            format!("{:.1}", rate.latency.p95),
        ]
    }));
    print(&format!("{model}\n\n{}", table(&rows)))
}

impl Rate {
    fn of(clients: Option<u32>, texts: usize, took: Duration, times: &[Duration]) -> Self {
        let seconds = took.as_secs_f64();
        let texts_per_second = texts as f64 / seconds;
        Self { clients, texts, seconds, texts_per_second, latency: Times::of(times) }
    }
}

fn text(findings: &Findings) -> String {
    let mut rows = vec![row([
        "clients", "requests", "tokens/s", "first ms", "95%", "next ms", "95%", "gap ms",
    ])];
    rows.extend(findings.levels.iter().map(|level| {
        let ms = |time: f64| format!("{time:.1}");
        vec![
            level.clients.to_string(),
            level.requests.to_string(),
            format!("{:.1}", level.tokens_per_second),
            ms(level.first.spread.median),
            ms(level.first.p95),
            ms(level.next.spread.median),
            ms(level.next.p95),
            ms(level.longest_gap_ms),
        ]
    }));
    let Findings { cluster, model, plan, levels, .. } = findings;
    let long = levels.iter().filter_map(|level| Some((level.clients, level.long_prompt.as_ref()?)));
    let long: String =
        long.map(|(clients, long)| format!("\n{clients} clients: {}", long.text())).collect();
    format!("{model} on {cluster}: {plan}\n\n{}{long}", table(&rows))
}

/// The width and height of the picture.
const SIZE: (f64, f64) = (760.0, 420.0);
/// The free space at the left, right, top and bottom of the picture.
const MARGIN: (f64, f64, f64, f64) = (70.0, 150.0, 50.0, 50.0);

/// Gives the median and the 95th percentile of a level's times, in ms.
type Line = fn(&Level) -> (f64, f64);

/// Draws latency over the number of clients as SVG: medians as lines, with bars up to the 95th percentiles.
fn plot(findings: &Findings) -> String {
    let series: [(&str, &str, Line); 3] = [
        ("first token", "#1b6ca8", |level| (level.first.spread.median, level.first.p95)),
        ("next token", "#c0561a", |level| (level.next.spread.median, level.next.p95)),
        ("longest gap", "#777777", |level| (level.longest_gap_ms, level.longest_gap_ms)),
    ];
    let values = findings.levels.iter().flat_map(|level| series.map(|(.., of)| of(level)));
    let values = values.flat_map(|(median, p95)| [median, p95]).filter(|v| *v > 0.0);
    let (low, high) = values.fold((f64::MAX, 1.0f64), |(l, h), v| (l.min(v), h.max(v)));
    // Whole powers of ten around them.
    let (low, high) = (low.min(high).log10().floor(), high.log10().ceil());
    let (left, right, top, bottom) = MARGIN;
    let (width, height) = (SIZE.0 - left - right, SIZE.1 - top - bottom);
    let last = findings.levels.len().saturating_sub(1).max(1) as f64;
    let x = |at: usize| left + width * at as f64 / last;
    let y = |ms: f64| {
        let share = (ms.max(1e-3).log10() - low) / (high - low).max(1.0);
        top + height * (1.0 - share)
    };
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" \
         font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"24\" font-size=\"15\">Latency over load: {} on {}</text>\n",
        SIZE.0,
        SIZE.1,
        escaped(&findings.model),
        escaped(&findings.cluster)
    );
    for power in low as i32..=high as i32 {
        let (ms, at) = (10f64.powi(power), y(10f64.powi(power)));
        svg += &format!(
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{ms}</text>\n",
            left + width,
            left - 8.0,
            at + 4.0
        );
    }
    for (at, level) in findings.levels.iter().enumerate() {
        let (x, clients) = (x(at), level.clients);
        let (names, rates) = (top + height + 20.0, top - 13.0);
        let rate = level.tokens_per_second;
        svg += &format!(
            "<text x=\"{x:.1}\" y=\"{names:.1}\" text-anchor=\"middle\">{clients}</text>\
             <text x=\"{x:.1}\" y=\"{rates:.1}\" text-anchor=\"middle\" font-size=\"11\" \
             fill=\"#555\">{rate:.0} tokens/s</text>\n"
        );
    }
    svg += &format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">clients at a time</text>\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">ms</text>\n",
        left + width / 2.0,
        SIZE.1 - 10.0,
        top + height / 2.0
    );
    for (number, (name, color, of)) in series.iter().enumerate() {
        let mut line = String::new();
        for (at, level) in findings.levels.iter().enumerate() {
            let (median, p95) = of(level);
            let (x, from, to) = (x(at), y(median), y(p95));
            line += &format!("{x:.1},{from:.1} ");
            svg += &format!(
                "<circle cx=\"{x:.1}\" cy=\"{from:.1}\" r=\"3.5\" fill=\"{color}\"/>\
                 <path d=\"M{x:.1} {from:.1}V{to:.1}m-4 0h8\" stroke=\"{color}\" fill=\"none\"/>\n"
            );
        }
        let (x, y) = (left + width + 16.0, top + 14.0 + 22.0 * number as f64);
        svg += &format!(
            "<polyline points=\"{line}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\"/>\
             <circle cx=\"{x}\" cy=\"{y}\" r=\"4\" fill=\"{color}\"/>\
             <text x=\"{}\" y=\"{}\">{name}</text>\n",
            x + 10.0,
            y + 4.0
        );
    }
    let (x, y) = (left + width + 12.0, top + 90.0);
    svg += &format!(
        "<text x=\"{x}\" y=\"{y}\" font-size=\"11\" fill=\"#555\">points: medians</text>\
         <text x=\"{x}\" y=\"{}\" font-size=\"11\" fill=\"#555\">bars: up to 95 of 100</text>\n</svg>\n",
        y + 16.0
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_numbers_or_ranges() {
        assert_eq!(lengths("7"), Ok((7, 7)));
        assert_eq!(lengths("16 - 32"), Ok((16, 32)));
        for bad in ["", "0", "0-4", "9-3", "x", "1-2-3", "-4"] {
            assert!(lengths(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn draws_stay_within_their_range() {
        let mut draw = Draw::new(0);
        let drawn: Vec<u32> = (0..1000).map(|_| draw.of((3, 9))).collect();
        assert!(drawn.iter().all(|value| (3..=9).contains(value)));
        assert!((3..=9).all(|value| drawn.contains(&value)));
        assert_ne!(Draw::new(1).below(1 << 30), Draw::new(2).below(1 << 30));
    }

    #[test]
    fn plots_of_empty_or_extreme_findings_are_finite_and_escaped() {
        let level = |clients: u32, ms: f64| Level {
            clients,
            requests: 3,
            prompt_tokens: 9,
            tokens: 8,
            seconds: 1.0,
            tokens_per_second: 8.0,
            first: Times { spread: Spread::of(&[ms]), p95: 2.0 * ms },
            next: Times { spread: Spread::of(&[]), p95: f64::NAN },
            longest_gap_ms: 3.0 * ms,
            long_prompt: None,
        };
        let findings = |levels| Findings {
            cluster: "a<b".into(),
            model: "m&n".into(),
            plan: String::new(),
            seed: 1,
            levels,
        };
        for levels in [vec![], vec![level(1, 5.0)], vec![level(1, 0.01), level(8, 90_000.0)]] {
            let picture = plot(&findings(levels));
            assert!(picture.contains("m&amp;n on a&lt;b") && picture.ends_with("</svg>\n"));
            assert!(!picture.contains("inf"), "{picture}");
        }
    }
}
