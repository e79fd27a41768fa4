//! The pace of a sequence: its time to first token, and its tokens per second.

use std::time::Instant;

/// When a sequence was asked for, and when its tokens came.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    begun: Instant,
    first: Option<Instant>,
    last: Instant,
    tokens: u32,
}

impl Pace {
    /// The pace of a sequence that is asked for now.
    pub fn begin() -> Self {
        let begun = Instant::now();
        Self { begun, first: None, last: begun, tokens: 0 }
    }

    /// Notes that a token came now.
    pub fn token(&mut self) {
        self.last = Instant::now();
        self.first.get_or_insert(self.last);
        self.tokens += 1;
    }

    /// The number of tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Tokens per second after the first; none with fewer than two.
    pub fn rate(&self) -> Option<f64> {
        let after = self.last.duration_since(self.first?).as_secs_f64();
        (self.tokens > 1).then(|| f64::from(self.tokens - 1) / after)
    }

    /// The time to first token, in milliseconds; 0 if none came.
    pub fn first_ms(&self) -> f64 {
        let first = self.first.unwrap_or(self.begun);
        first.duration_since(self.begun).as_secs_f64() * 1e3
    }

    /// The pace as a phrase, for people.
    pub fn words(&self) -> String {
        let rate = self.rate().map_or(String::new(), |rate| format!(", then {rate:.1} tokens/s"));
        format!("first token after {:.0} ms{rate}", self.first_ms())
    }
}
