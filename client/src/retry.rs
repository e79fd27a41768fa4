//! When to try again, as a pure function.

use crate::error::ClientError;
use std::time::Duration;

/// How often, and after which pauses, a call is tried again.
///
/// The pause doubles with every failure up to `longest`; jitter takes up to half of it away, so
/// that clients that failed together do not come back together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RetryPolicy {
    /// Attempts in all, the first one among them.
    pub attempts: u32,
    /// The pause after the first failure.
    pub first: Duration,
    /// No pause is longer.
    pub longest: Duration,
    /// Whether to try again when a device is at fault. Such a device comes back, or is planned around, in its
    /// own time, and the coordinator has waited for it already; so by default the caller is told at once. To
    /// outlive a loss takes more `attempts`, too: for the cluster's patience, and for the others to load.
    pub device_faults: bool,
}

impl Default for RetryPolicy {
    /// Six attempts with about 5 seconds between the first and the last: a full queue is served,
    /// or a coordinator started again, in less.
    fn default() -> Self {
        Self {
            attempts: 6,
            first: Duration::from_millis(200),
            longest: Duration::from_millis(3_200),
            device_faults: false,
        }
    }
}

impl RetryPolicy {
    /// Never tries again.
    pub fn never() -> Self {
        Self { attempts: 1, ..Self::default() }
    }

    /// Whether another attempt may help against this error.
    pub fn covers(&self, error: &ClientError) -> bool {
        error.retryable() && (self.device_faults || error.device().is_none())
    }

    /// The pause before the next attempt; `None` when there is to be none.
    ///
    /// `failed` attempts are over, `covered` says whether another may help, `jitter` lies in
    /// 0..1, and `left` is the time to the caller's deadline: a pause that would use it up is
    /// not begun.
    pub fn pause(
        &self,
        failed: u32,
        covered: bool,
        jitter: f64,
        left: Duration,
    ) -> Option<Duration> {
        if !covered || failed == 0 || failed >= self.attempts {
            return None;
        }
        // Above 2^20 times the first pause, every sane limit has long been reached.
        let doubled = self.first.saturating_mul(1 << (failed - 1).min(20));
        let pause = doubled.min(self.longest).mul_f64(1.0 - 0.5 * jitter.clamp(0.0, 1.0));
        (pause < left).then_some(pause)
    }
}

/// A number in 0..1 that differs between processes and calls.
pub(crate) fn jitter() -> f64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let bits = RandomState::new().build_hasher().finish() >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGES: Duration = Duration::from_secs(3600);

    #[test]
    fn pauses_double_up_to_the_longest() {
        let policy = RetryPolicy::default();
        let pauses: Vec<_> = (1..=6).map(|n| policy.pause(n, true, 0.0, AGES)).collect();
        let ms = |n| Some(Duration::from_millis(n));
        assert_eq!(pauses, [ms(200), ms(400), ms(800), ms(1600), ms(3200), None]);
    }

    #[test]
    fn only_what_a_retry_can_help() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.pause(1, false, 0.0, AGES), None);
        assert_eq!(RetryPolicy::never().pause(1, true, 0.0, AGES), None);
        assert_eq!(policy.pause(1, true, 0.0, Duration::from_millis(200)), None);
        assert!(policy.pause(1, true, 0.0, Duration::from_millis(201)).is_some());
    }

    #[test]
    fn jitter_takes_at_most_half() {
        let policy = RetryPolicy { attempts: u32::MAX, ..RetryPolicy::default() };
        assert_eq!(policy.pause(1, true, 1.0, AGES), Some(Duration::from_millis(100)));
        assert_eq!(policy.pause(1, true, 7.0, AGES), Some(Duration::from_millis(100)));
        assert_eq!(policy.pause(4_000_000, true, 0.0, AGES), Some(policy.longest));
        for _ in 0..100 {
            assert!((0.0..1.0).contains(&jitter()));
        }
    }
}
