//! The progress of a pull: one line that moves on a terminal, some lines elsewhere.

use crate::tell;
use galaxy_cli::hub::{HubError, Watch};
use galaxy_common::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

/// The pause between two lines on a long file, where there is no terminal.
const LINES: Duration = Duration::from_secs(10);

/// The progress of a pull, shown on stderr.
pub(super) struct Shown {
    bar: ProgressBar,
    terminal: bool,
    file: String,
    /// The size of the file that is coming, in bytes.
    size: u64,
    /// The bytes of all files that have come before it.
    before: u64,
    /// Whether the length of all files is known.
    expected: bool,
    /// Whether nothing was reported of the file yet: bytes that are there at first were there
    /// before.
    first: bool,
    /// Whether a pause is shown.
    paused: bool,
    /// When the last line was written.
    line: Instant,
}

impl Shown {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::new(0);
        // What is last is cut where the line ends.
        let form = "{decimal_bytes} of {decimal_total_bytes} ({decimal_bytes_per_sec}, {eta} left) {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style);
        }
        Self {
            bar,
            terminal: io::stderr().is_terminal(),
            file: String::new(),
            size: 0,
            before: 0,
            expected: false,
            first: true,
            paused: false,
            line: Instant::now(),
        }
    }

    /// Sets the bytes that are still to come, of all files together.
    pub(super) fn expect(&mut self, bytes: u64) {
        self.expected = true;
        self.bar.set_length(self.before.saturating_add(bytes));
    }

    /// Begins with a file of `size` bytes.
    pub(super) fn begin(&mut self, file: &str, size: u64) {
        (self.file, self.size, self.first) = (file.to_owned(), size, true);
        self.bar.set_message(self.file.clone());
        // Short files say nothing of how fast long ones come.
        self.bar.reset_eta();
        if !self.expected {
            self.bar.inc_length(size);
        }
    }

    /// Ends the file, all of which has come.
    pub(super) fn end(&mut self) {
        self.before = self.before.saturating_add(self.size);
        self.bar.set_position(self.before);
    }

    /// Writes a line, where there is none that moves.
    fn say(&mut self, how: &str) {
        if !self.terminal {
            self.line = Instant::now();
            // Nobody is left to tell when stderr is closed.
            tell(&format!("{}: {how}", self.file));
        }
    }
}

impl Watch for Shown {
    fn have(&mut self, bytes: u64) {
        self.bar.set_position(self.before.saturating_add(bytes));
        if std::mem::take(&mut self.paused) {
            self.bar.set_message(self.file.clone());
        }
        let all = Bytes(self.size);
        if std::mem::take(&mut self.first) {
            if bytes == 0 {
                return self.say(&all.to_string());
            }
            self.bar.reset_eta();
            return self.say(&format!("goes on from {} of {all}", Bytes(bytes)));
        }
        if self.line.elapsed() >= LINES {
            let rate = Bytes(self.bar.per_sec() as u64);
            self.say(&format!("{} of {all}, {rate}/s", Bytes(bytes)));
        }
    }

    fn pauses(&mut self, why: &HubError, pause: Duration) {
        self.paused = true;
        let what = format!("{why}; again in {pause:.1?}");
        match self.file.is_empty() {
            true => self.bar.set_message(what.clone()),
            false => self.bar.set_message(format!("{} ({what})", self.file)),
        }
        if !self.terminal {
            tell(&what);
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
