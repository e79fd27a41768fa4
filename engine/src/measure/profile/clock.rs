//! The clock that operations are timed with.
//!
//! A device may be given a part of a core only, or share it with others: it then runs for a
//! millisecond or a few and stands still for some more. Short operations fall between the pauses
//! and long ones have several, so no number of samples of the one or the other tells what a
//! program of both takes. Time of the thread on its processor has no pauses; what they add is
//! measured over everything that ran, and is a factor of all times.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// How often the cost of reading the clocks is measured.
const READINGS: usize = 200;

/// A clock that times what one thread does.
pub(super) struct Clock {
    /// Whether time on the processor is what counts. With several kernel threads one waits for
    /// another at times, and that is part of what an operation takes; other engines compute on
    /// threads or devices of their own.
    alone: bool,
    /// The time that reading the clocks adds, in nanoseconds.
    reading: f64,
    on_the_wall: f64,
    on_the_processor: f64,
}

/// When something began.
pub(super) struct Begun {
    wall: Instant,
    processor: Duration,
}

impl Clock {
    /// A clock; `alone` says whether the calling thread does all the work.
    pub(super) fn new(alone: bool) -> Self {
        let mut clock = Self { alone, reading: 0.0, on_the_wall: 0.0, on_the_processor: 0.0 };
        let mut readings: Vec<f64> = (0..READINGS).map(|_| clock.end(clock.begin())).collect();
        readings.sort_by(f64::total_cmp);
        clock.reading = readings[READINGS / 2];
        (clock.on_the_wall, clock.on_the_processor) = (0.0, 0.0);
        clock
    }

    pub(super) fn begin(&self) -> Begun {
        let processor = if self.alone { on_processor() } else { Duration::ZERO };
        Begun { wall: Instant::now(), processor }
    }

    /// Nanoseconds since `begun`, without pauses if this thread computes alone.
    pub(super) fn end(&mut self, begun: Begun) -> f64 {
        let wall = begun.wall.elapsed().as_nanos() as f64;
        if !self.alone {
            return wall - self.reading;
        }
        let took = on_processor().saturating_sub(begun.processor).as_nanos() as f64;
        self.on_the_wall += wall;
        self.on_the_processor += took;
        took - self.reading
    }

    /// By how much longer everything took than it ran.
    pub(super) fn factor(&self) -> f64 {
        let factor = self.on_the_wall / self.on_the_processor;
        if self.alone && factor.is_finite() { factor.max(1.0) } else { 1.0 }
    }
}

/// Time that this thread was on a processor.
fn on_processor() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_measures_work_and_a_finite_pause_factor() {
        for alone in [true, false] {
            let mut clock = Clock::new(alone);
            let begun = clock.begin();
            let sum: u64 = (0..5_000_000u64).map(std::hint::black_box).sum();
            let took = clock.end(begun);
            assert!(sum > 0 && took > 1e5, "{took}");
            assert!(clock.factor() >= 1.0 && clock.factor().is_finite());
        }
    }
}
