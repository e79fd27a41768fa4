//! What a device is believed to know of epochs.

use super::{Event, Membership, Now};
use galaxy_common::Epoch;
use std::time::Duration;

/// How far ahead of this machine's clock that of an earlier coordinator may have been.
const AHEAD: Duration = Duration::from_secs(400 * 24 * 3600);
/// The year 2020: a clock that is before it was never set, and says nothing about those of others; then no epoch from
/// beyond the year 2240 is believed.
const SET: Epoch = Epoch::starting(1_577_836_800);
const UNSET_LIMIT: Epoch = Epoch::starting(1 << 33);

impl Membership {
    /// An event as far as it is believed: a device that reports an impossible epoch counts as broken.
    pub(super) fn doubted(&self, now: Now, event: Event) -> Event {
        match event {
            Event::Connected { device, attempt, epoch }
                if epoch > believed(self.start, now).max(self.epoch) =>
            {
                let reason = format!(
                    "it says that it was placed in epoch {epoch}, which no coordinator has given out: \
                     start its worker again, and look after that device"
                );
                Event::Broken { device, attempt, reason }
            }
            event => event,
        }
    }
}

/// The latest epoch that a device is believed to know, `now` after a coordinator began with `start`. Coordinators begin
/// theirs by the clock, so that what one of them can have given out is not far ahead of it; a device that reports more
/// would make all others refuse the epochs that come after.
fn believed(start: Epoch, now: Now) -> Epoch {
    if start < SET {
        return UNSET_LIMIT;
    }
    let ahead = Epoch::starting((now + AHEAD).as_secs());
    Epoch(start.0.saturating_add(ahead.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_epochs_are_believed_only_within_a_bound_of_the_clock() {
        let of = |start| believed(start, Duration::from_secs(60));
        let now = 1_800_000_000;
        assert!(of(Epoch::starting(now)) >= Epoch::starting(now + 365 * 24 * 3600));
        assert!(of(Epoch::starting(now)) < Epoch::starting(now + 2 * 365 * 24 * 3600));
        // What a board without a clock is told by those that have one.
        assert!(of(Epoch::starting(100)) > Epoch::starting(now));
        for start in [Epoch(0), Epoch::starting(now)] {
            // However often it is pushed to the limit, there is room.
            assert!(of(start) < Epoch(1 << 62));
        }
    }
}
