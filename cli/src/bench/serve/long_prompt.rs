//! A long prompt that comes while streams decode: how long its first token takes, and what the streams feel of it.

use super::{Draw, StreamTimes};
use crate::failure::Failure;
use galaxy_client::{Client, GenerateOptions, Generated, Prompt, SamplingParams};
use galaxy_common::Spread;
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How many tokens each stream gets before the prompt is sent: its steps are compared with those.
pub(super) const STREAM_TOKENS: u64 = 16;

/// What a long prompt took beside streams, and what it took from them.
#[derive(Serialize)]
pub(super) struct LongPrompt {
    tokens: u32,
    /// The time to its first token beside the streams, and alone.
    first_ms: f64,
    alone_ms: f64,
    /// The median time from one token of a stream to the next, before the prompt came.
    step_ms: f64,
    /// The longest time between two tokens of any stream while the prompt was read.
    longest_gap_ms: f64,
}

impl LongPrompt {
    /// The findings as a sentence.
    pub(super) fn text(&self) -> String {
        let Self { tokens, first_ms, alone_ms, step_ms, longest_gap_ms } = self;
        format!(
            "a prompt of {tokens} tokens beside the streams: first token after {first_ms:.0} ms, {:.2} times the \
             {alone_ms:.0} ms that it takes alone; the streams' longest gap {longest_gap_ms:.0} ms, {:.2} of their \
             steps of {step_ms:.1} ms\n",
            first_ms / alone_ms,
            longest_gap_ms / step_ms
        )
    }
}

/// When a prompt was sent, and when its first token came.
pub(super) struct Interval {
    sent: Instant,
    first: Instant,
}

/// Sends a prompt of `tokens` random tokens once `ready` streams are decoding, and waits for its first token.
pub(super) async fn first_token(
    client: Client,
    mut draw: Draw,
    (tokens, vocabulary): (u32, u32),
    (ready, mut decoding): (u32, watch::Receiver<u32>),
) -> Result<Interval, Failure> {
    // Where the streams have failed, their errors say more.
    drop(decoding.wait_for(|now| *now >= ready).await);
    let ids: Vec<u32> = (0..tokens).map(|_| draw.below(vocabulary)).collect();
    let options = GenerateOptions {
        max_tokens: 1,
        sampling: SamplingParams { temperature: Some(0.0), ..SamplingParams::default() },
        ignore_end: true,
        fallback: None,
        ..GenerateOptions::default()
    };
    let sent = Instant::now();
    let mut generating = client.generate(Prompt::Ids(ids), options).await?;
    let mut first = None;
    loop {
        match generating.next().await? {
            Some(Generated::Token(_)) => drop(first.get_or_insert_with(Instant::now)),
            Some(Generated::Done(done)) if done.report.cached > 0 => {
                return Err(Failure::new("rows of the long prompt were in the KV cache already")
                    .todo("choose another --seed"));
            }
            _ => break,
        }
    }
    let first = first.ok_or_else(|| Failure::new("the long prompt got no token"))?;
    Ok(Interval { sent, first })
}

/// What a prompt of so many tokens took, beside streams and alone, and what the streams felt.
pub(super) fn compare(
    tokens: u32,
    beside: &Interval,
    alone: &Interval,
    streams: &[StreamTimes],
) -> Result<LongPrompt, Failure> {
    let ended = |stream: &StreamTimes| stream.next.last().is_none_or(|(at, _)| *at < beside.first);
    if streams.iter().any(ended) {
        return Err(Failure::new("a stream ended before the long prompt had its first token")
            .todo("raise --tokens, so that the streams go on for so long"));
    }
    let gaps = || streams.iter().flat_map(|stream| &stream.next);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let before: Vec<f64> =
        gaps().filter(|(at, _)| *at <= beside.sent).map(|(_, gap)| ms(*gap)).collect();
    let meanwhile = gaps().filter(|(at, gap)| {
        *at > beside.sent && at.checked_sub(*gap).is_none_or(|from| from < beside.first)
    });
    Ok(LongPrompt {
        tokens,
        first_ms: ms(beside.first - beside.sent),
        alone_ms: ms(alone.first - alone.sent),
        step_ms: Spread::of(&before).median,
        longest_gap_ms: meanwhile.map(|(_, gap)| ms(*gap)).fold(0.0, f64::max),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_gaps_while_the_prompt_is_read_count() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        // Steps of 10 ms, but for gaps of 80 before the prompt, 30 while it is read, and 90 behind it.
        let times = [10, 20, 100, 110, 120, 150, 160, 250];
        let next = times.windows(2).map(|pair| (at(pair[1]), at(pair[1]) - at(pair[0]))).collect();
        let streams = [StreamTimes { next, ..StreamTimes::default() }];
        let beside = Interval { sent: at(115), first: at(155) };
        let alone = Interval { sent: at(300), first: at(320) };
        let found = compare(64, &beside, &alone, &streams).unwrap();
        assert_eq!((found.first_ms, found.alone_ms), (40.0, 20.0));
        assert_eq!((found.step_ms, found.longest_gap_ms), (10.0, 30.0));
        assert!(found.text().contains("2.00 times") && found.text().contains("3.00 of"));
        let late = Interval { sent: at(115), first: at(251) };
        assert!(compare(64, &late, &alone, &streams).is_err());
    }
}
