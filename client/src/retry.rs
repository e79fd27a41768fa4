//! When a call is tried again.

use crate::error::ClientError;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::time::Instant;

/// How often, and after which pauses, a call is tried again, or a text that is being generated is asked for again.
/// Never beyond the deadline.
///
/// The pause doubles with every failure up to `longest`; jitter takes up to half of it away, so
/// that clients that failed together do not come back together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RetryPolicy {
    /// Attempts in all, the first one among them.
    pub attempts: u32,
    /// The pause after the first failure.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// Whether to try again when a device is at fault, too. The coordinator has waited for the device already, for as
    /// long as its patience lasts.
    pub device_faults: bool,
}

impl Default for RetryPolicy {
    /// As often as the call's time allows, at least once in 1.6 s: a coordinator that was killed is started again, a
    /// device comes back, a full queue is served.
    fn default() -> Self {
        Self {
            attempts: u32::MAX,
            first: Duration::from_millis(200),
            longest: Duration::from_millis(1_600),
            device_faults: true,
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

/// The attempts of one call, until its deadline.
pub(crate) struct Attempts<'a> {
    policy: RetryPolicy,
    /// The timeout of a call.
    timeout: Duration,
    /// Whether a coordinator is known to answer us, so that a connection that breaks was not refused.
    answered: &'a AtomicBool,
    until: Instant,
    failed: u32,
    /// Why the last attempt failed, or what the call waits for.
    last: Option<ClientError>,
}

impl<'a> Attempts<'a> {
    pub(crate) fn new(
        policy: RetryPolicy,
        timeout: Duration,
        answered: &'a AtomicBool,
        until: Instant,
    ) -> Self {
        Self { policy, timeout, answered, until, failed: 0, last: None }
    }

    /// The deadline of the call.
    pub(crate) fn until(&self) -> Instant {
        self.until
    }

    /// The timeout of a call.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The time that is left until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// The error of a call whose time is over: what it waited for, where that is known.
    pub(crate) fn late(&mut self) -> ClientError {
        let timeout = self.timeout;
        self.last.take().unwrap_or(ClientError::Timeout { timeout })
    }

    /// Notes what the coordinator says the call waits for.
    pub(crate) fn waits(&mut self, error: ClientError) {
        self.last = Some(error);
    }

    /// Moves the deadline to `until` at the soonest: a call that waits its turn uses up none of its time.
    pub(crate) fn waits_until(&mut self, until: Instant) {
        self.until = self.until.max(until);
        self.last = None;
    }

    /// Notes an attempt that failed, and waits until it is time for the next.
    ///
    /// # Errors
    /// The error of the call, if there is to be no other attempt.
    pub(crate) async fn fails(&mut self, error: ClientError) -> Result<(), ClientError> {
        self.failed = self.failed.saturating_add(1);
        let left = self.left();
        // The transport and the coordinator know the deadline too, and may be first to say so.
        if error.is_deadline(left) {
            return Err(self.late());
        }
        // The transport cannot know of a coordinator that wants TLS.
        let error = error.explained(!self.answered.load(Ordering::Relaxed));
        let covered = self.policy.covers(&error);
        match self.policy.pause(self.failed, covered, jitter(), left) {
            Some(pause) => {
                self.last = Some(error);
                tokio::time::sleep(pause).await;
                Ok(())
            }
            None => Err(error),
        }
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
        assert_eq!(pauses, [ms(200), ms(400), ms(800), ms(1600), ms(1600), ms(1600)]);
        let few = RetryPolicy { attempts: 2, ..policy };
        assert_eq!([1, 2].map(|n| few.pause(n, true, 0.0, AGES)), [ms(200), None]);
    }

    #[test]
    fn only_retryable_errors_are_retried_within_the_remaining_time() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.pause(1, false, 0.0, AGES), None);
        assert_eq!(RetryPolicy::never().pause(1, true, 0.0, AGES), None);
        assert_eq!(policy.pause(1, true, 0.0, Duration::from_millis(200)), None);
        assert!(policy.pause(1, true, 0.0, Duration::from_millis(201)).is_some());
    }

    #[test]
    fn jitter_shortens_a_pause_by_at_most_half() {
        let policy = RetryPolicy { attempts: u32::MAX, ..RetryPolicy::default() };
        assert_eq!(policy.pause(1, true, 1.0, AGES), Some(Duration::from_millis(100)));
        assert_eq!(policy.pause(1, true, 7.0, AGES), Some(Duration::from_millis(100)));
        assert_eq!(policy.pause(4_000_000, true, 0.0, AGES), Some(policy.longest));
        for _ in 0..100 {
            assert!((0.0..1.0).contains(&jitter()));
        }
    }
}
