//! Limits log lines that somebody else may cause: some of them are written, and the others are
//! counted.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The most lines of a window.
const LINES: u64 = 8;
/// The length of a window.
const WINDOW: Duration = Duration::from_secs(1);

/// Decides which lines are written.
#[derive(Debug, Default)]
pub struct Sampled(Mutex<Sample>);

#[derive(Debug, Default)]
struct Sample {
    /// The time at which this window began; none before the first line.
    since: Option<Instant>,
    written: u64,
    left_out: u64,
}

impl Sampled {
    /// Whether a line may be written now; if so, how many were left out since the last one.
    pub fn take(&self) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now())
    }
}

impl Sample {
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            (self.since, self.written) = (Some(now), 0);
        }
        if self.written == LINES {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_log_lines_is_sampled_and_counted() {
        let mut sample = Sample::default();
        let begun = Instant::now();
        let written = (0..10_000).filter(|_| sample.take(begun).is_some()).count();
        assert_eq!(written, 8);
        assert_eq!(sample.take(begun + WINDOW), Some(9_992));
        assert_eq!(sample.take(begun + WINDOW), Some(0));
    }
}
