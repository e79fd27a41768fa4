//! A long prompt that comes while streams decode: how long its first token takes, and how long the streams wait.

use super::{Draw, StreamTimes, greedy};
use crate::failure::Failure;
use galaxy_client::{Client, Generated};
use galaxy_common::Spread;
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How many tokens each stream has before the prompt is sent: the times between these say what a step takes.
pub(super) const STREAM_TOKENS: u32 = 16;

/// A long prompt of random tokens.
#[derive(Clone, Copy)]
pub(super) struct LongPrompt {
    pub(super) tokens: u32,
    pub(super) vocabulary: u32,
    pub(super) seed: u64,
}

/// What a long prompt took beside streams, and what it took from them.
#[derive(Serialize)]
pub(super) struct LongPromptFindings {
    tokens: u32,
    /// The time to its first token beside the streams.
    first_ms: f64,
    /// The time to the first token of such a prompt alone.
    alone_ms: f64,
    /// The median time from one token of a stream to the next, before the prompt came.
    step_ms: f64,
    /// The longest time between two tokens of any stream while the prompt was read.
    longest_gap_ms: f64,
    /// How many streams were over before the prompt had its first token.
    ended: usize,
}

impl LongPromptFindings {
    /// The findings as a sentence.
    pub(super) fn text(&self) -> String {
        let Self { tokens, first_ms, alone_ms, step_ms, longest_gap_ms, ended } = self;
        let ended = match ended {
            0 => String::new(),
            some => format!("; {some} streams were over before it: raise --tokens"),
        };
        format!(
            "a prompt of {tokens} tokens beside the streams has its first token after {first_ms:.0} ms, {:.2} times \
             the {alone_ms:.0} ms that it takes alone; the longest gap of a stream meanwhile is {longest_gap_ms:.0} ms, \
             {:.2} times a step of {step_ms:.1} ms{ended}\n",
            first_ms / alone_ms,
            longest_gap_ms / step_ms
        )
    }
}

/// When a prompt was sent, and when its first token came.
struct Interval {
    sent: Instant,
    first: Instant,
}

/// When a long prompt was answered beside streams, and when alone.
pub(super) struct LongPromptTimes {
    tokens: u32,
    beside: Interval,
    alone: Interval,
}

impl LongPrompt {
    /// Sends the prompt once `ready` streams are decoding, and one like it when all have ended.
    pub(super) async fn measure(
        self,
        client: Client,
        (ready, mut decoding): (u32, watch::Receiver<u32>),
    ) -> Result<LongPromptTimes, Failure> {
        if decoding.wait_for(|now| *now >= ready).await.is_err() {
            return Err(Failure::new("the streams ended before a long prompt could come"));
        }
        let beside = self.first_token(&client, 1).await?;
        while decoding.changed().await.is_ok() {}
        let alone = self.first_token(&client, 2).await?;
        Ok(LongPromptTimes { tokens: self.tokens, beside, alone })
    }

    /// Sends the prompt of this number, and waits for its first token.
    async fn first_token(self, client: &Client, number: u64) -> Result<Interval, Failure> {
        let mut draw = Draw::new(self.seed.wrapping_add(number << 56));
        let prompt = draw.prompt(self.tokens, self.vocabulary);
        let sent = Instant::now();
        let mut generating = client.generate(prompt, greedy(1)).await?;
        let mut first = None;
        loop {
            match generating.next().await? {
                Some(Generated::Token(_)) => drop(first.get_or_insert_with(Instant::now)),
                Some(Generated::Done(done)) if done.report.cached > 0 => {
                    return Err(Failure::new(
                        "rows of the long prompt were in the KV cache already",
                    )
                    .todo("choose another --seed"));
                }
                _ => break,
            }
        }
        let first = first.ok_or_else(|| Failure::new("the long prompt got no token"))?;
        Ok(Interval { sent, first })
    }
}

impl LongPromptTimes {
    /// What the prompt took, and how long the streams waited.
    pub(super) fn beside(self, streams: &[StreamTimes]) -> LongPromptFindings {
        let Self { tokens, beside, alone } = self;
        let ended =
            |stream: &&StreamTimes| stream.next.last().is_none_or(|(at, _)| *at < beside.first);
        let gaps = || streams.iter().flat_map(|stream| &stream.next);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let before: Vec<f64> =
            gaps().filter(|(at, _)| *at <= beside.sent).map(|(_, gap)| ms(*gap)).collect();
        let meanwhile = gaps().filter(|(at, gap)| {
            *at > beside.sent && at.checked_sub(*gap).is_none_or(|from| from < beside.first)
        });
        LongPromptFindings {
            tokens,
            first_ms: ms(beside.first - beside.sent),
            alone_ms: ms(alone.first - alone.sent),
            step_ms: Spread::of(&before).median,
            longest_gap_ms: meanwhile.map(|(_, gap)| ms(*gap)).fold(0.0, f64::max),
            ended: streams.iter().filter(ended).count(),
        }
    }
}

#[cfg(test)]
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
        let found = LongPromptTimes { tokens: 64, beside, alone }.beside(&streams);
        assert_eq!((found.first_ms, found.alone_ms, found.ended), (40.0, 20.0, 0));
        assert_eq!((found.step_ms, found.longest_gap_ms), (10.0, 30.0));
        assert!(found.text().contains("2.00 times the 20 ms"), "{}", found.text());
        let (beside, alone) = (
            Interval { sent: at(115), first: at(251) },
            Interval { sent: at(300), first: at(320) },
        );
        let found = LongPromptTimes { tokens: 64, beside, alone }.beside(&streams);
        assert_eq!((found.ended, found.longest_gap_ms), (1, 90.0));
    }
}
