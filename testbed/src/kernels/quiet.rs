//! Measuring while nothing else runs on our core.

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};
use std::time::Instant;

/// The least processor time, as a share of the time that passed, of a turn that nothing disturbed. The time
/// that the kernel spends on our behalf stays below 3%.
pub(super) const UNDISTURBED: f64 = 0.97;
/// The most tries for a turn that nothing disturbs. If there is none, the last turn counts, and its share
/// shows that it was disturbed.
const TRIES: usize = 6;

/// Runs a turn, and returns its value and the processor time that this process had in it, as a share of the
/// time that passed. With several threads the share may be above 1, and says less.
pub(super) fn quietly<T>(mut turn: impl FnMut() -> Result<T>) -> Result<(T, f64)> {
    let mut once = || {
        let (begin, before) = (Instant::now(), processor_time());
        let value = turn()?;
        let had = processor_time() - before;
        anyhow::Ok((value, had / begin.elapsed().as_secs_f64()))
    };
    for _ in 1..TRIES {
        let (value, share) = once()?;
        if share >= UNDISTURBED {
            return Ok((value, share));
        }
    }
    once()
}

/// The seconds of processor time that this process has had.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_retried_up_to_the_limit_and_its_error_is_returned() {
        let mut turns = 0;
        let (value, share) = quietly(|| {
            turns += 1;
            // Another process has the core: here, whichever may.
            std::thread::yield_now();
            Ok(turns)
        })
        .unwrap();
        assert!(value == turns && (1..=TRIES).contains(&turns) && share >= 0.0);
        assert!(quietly(|| -> Result<()> { anyhow::bail!("no") }).is_err());
    }
}
