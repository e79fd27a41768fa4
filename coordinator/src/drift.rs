//! Drift: devices that run outside their profiles, as a state machine `(now, what ran) -> change`.
//!
//! It never reads a clock, plans nothing and moves nothing: the driver of [`crate::fleet::RemoteFleet`] does. It keeps
//! a track for the kernels of each device, and one for its disk: the ratio of the time that they took to the time that
//! the profile says, as the median of the last [`SAMPLES`] programs, so that one program beside a neighbour's burst
//! says nothing. What matters is how that ratio has moved since the epoch began, because no prediction is exact; only a
//! ratio that was far off from the first is drift by itself.
//!
//! A device is *outside* when its ratio has left the band `1 / (1 + margin)` to `1 + margin` for [`PATIENCE`] programs
//! in a row. Then a [`Change`] says by which factors the curves of which devices are to be scaled; the driver plans
//! with them and reports the outcome.
//!
//! Moving weights costs more than a few slow requests, so after a move there is no other for [`QUIET_PROGRAMS`]
//! programs and [`QUIET`]; a device that is far outside may break that rest once, and not again before a whole rest has
//! been kept. So a device that alternates makes at most two moves in each rest.

use crate::membership::Now;
use std::{collections::VecDeque, time::Duration};

/// How many of the last programs the median is taken of.
pub const SAMPLES: usize = 5;
/// How many programs in a row a device must be outside.
pub const PATIENCE: u32 = 4;
/// How many programs run after a move until the next one.
pub const QUIET_PROGRAMS: u64 = 20;
/// How much time passes after a move until the next one.
pub const QUIET: Duration = Duration::from_secs(30);
/// The share by which a new plan must be predicted to be faster, or the move is not worth it.
pub const GAIN: f64 = 0.10;
/// The shortest predicted time of a program that counts, in ns: in less, waking up weighs too much.
const LEAST: f64 = 100_000.0;
/// The power of `1 + margin` by which a device must be outside to break a rest.
const FAR: i32 = 3;

/// The number of a track: each device has one for its kernels, and behind it one for its disk.
pub type Track = usize;

/// The track of a device's kernels.
pub fn kernels_of(device: usize) -> Track {
    2 * device
}
/// The track of a device's disk.
pub fn disk_of(device: usize) -> Track {
    2 * device + 1
}
/// The device of a track, and whether the track is that of its disk.
pub fn whose(track: Track) -> (usize, bool) {
    (track / 2, track % 2 == 1)
}

/// How long a program took on the kernels of one device, or on its disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// The track that was measured.
    pub track: Track,
    /// How long its compute lane worked, or its busiest loader, in ns.
    pub measured: f64,
    /// The same by the device's profile, in ns.
    pub predicted: f64,
}

/// The factors by which curves are scaled for another plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// For each track, how many times as long as by its profile everything takes.
    pub factors: Vec<f64>,
    /// The tracks whose factor has changed, each with the factor before.
    pub moved: Vec<(Track, f64)>,
}

#[derive(Debug, Clone)]
struct TrackState {
    /// How many times as long as by its profile everything takes, as the plan in force assumes.
    factor: f64,
    /// The ratio at the beginning of the epoch; none until enough programs have run.
    reference: Option<f64>,
    recent: VecDeque<f64>,
    outside: u32,
}

/// The state machine that detects drift.
#[derive(Debug, Clone)]
pub struct Drift {
    margin: f64,
    tracks: Vec<TrackState>,
    programs: u64,
    /// The time and the program before which there is no other move; none before the first rest.
    rest: Option<(Now, u64)>,
    /// Whether a device that is far outside may break the rest.
    spare: bool,
    /// Whether a change is being looked at.
    asked: bool,
}

impl Drift {
    /// A machine of `tracks` tracks, which run as profiles say, and may run outside by the share `margin`.
    pub fn new(tracks: usize, margin: f64) -> Self {
        let mut drift =
            Self { margin, tracks: Vec::new(), programs: 0, rest: None, spare: true, asked: false };
        drift.grow(tracks);
        drift
    }

    /// Grows to `tracks` tracks, of which the new ones run as profiles say.
    pub fn grow(&mut self, tracks: usize) {
        let track =
            TrackState { factor: 1.0, reference: None, recent: VecDeque::new(), outside: 0 };
        self.tracks.resize(tracks.max(self.tracks.len()), track);
    }

    /// The factor by which the curve of each track is scaled in the plan in force.
    pub fn factors(&self) -> Vec<f64> {
        self.tracks.iter().map(|t| t.factor).collect()
    }

    /// Begins a new epoch: the times of the old one say nothing about it.
    pub fn begin(&mut self) {
        for track in &mut self.tracks {
            track.reference = None;
            track.recent.clear();
            track.outside = 0;
        }
    }

    /// Takes in how long a program took. Gives the change if curves should be scaled.
    pub fn observe(&mut self, now: Now, samples: &[Sample]) -> Option<Change> {
        self.programs += 1;
        for sample in samples {
            // Nothing, or no number: it has no part, or a worker says nonsense.
            let ratio = sample.measured / sample.predicted;
            let counts = sample.predicted >= LEAST && ratio.is_finite() && ratio > 0.0;
            if let Some(track) = self.tracks.get_mut(sample.track).filter(|_| counts) {
                track.take(ratio, self.margin);
            }
        }
        let outside = |t: &TrackState| t.outside >= PATIENCE;
        if self.asked || !self.tracks.iter().any(outside) {
            return None;
        }
        if self.resting(now) {
            let far = (1.0 + self.margin).powi(FAR);
            let is_far = |t: &TrackState| outside(t) && !(1.0 / far..=far).contains(&t.shift());
            if !(self.spare && self.tracks.iter().any(is_far)) {
                return None;
            }
        }
        self.asked = true;
        // Those that are about to be outside move along: one move instead of two.
        let moves = |t: &TrackState| t.outside > 0;
        let factor = |t: &TrackState| if moves(t) { t.factor * t.shift() } else { t.factor };
        let moved = self.tracks.iter().enumerate().filter(|(_, t)| moves(t));
        Some(Change {
            factors: self.tracks.iter().map(factor).collect(),
            moved: moved.map(|(device, t)| (device, t.factor)).collect(),
        })
    }

    /// Asks to look at the plan though no curve has changed, unless a change is being looked at, or the last move is
    /// too recent.
    pub fn ask(&mut self, now: Now) -> Option<Change> {
        // Not by programs: where nothing is asked, none run.
        if self.rest.is_some_and(|(until, _)| now < until) {
            return None;
        }
        let asked = std::mem::replace(&mut self.asked, true);
        (!asked).then(|| Change { factors: self.factors(), moved: Vec::new() })
    }

    /// Whether the last move is too recent for another.
    fn resting(&self, now: Now) -> bool {
        self.rest.is_some_and(|(until, programs)| now < until || self.programs < programs)
    }

    /// The change was looked at and the plan stays: what devices do now is expected of them from now on.
    pub fn keep(&mut self, change: &Change) {
        self.asked = false;
        for (track, _) in &change.moved {
            let (track, factor) = (&mut self.tracks[*track], change.factors[*track]);
            track.reference = track.reference.map(|r| r * factor / track.factor);
            track.factor = factor;
            track.outside = 0;
        }
    }

    /// The cluster moves to the plan that was found for the change.
    pub fn moved(&mut self, now: Now, change: &Change) {
        self.keep(change);
        self.begin_rest(now);
        self.begin();
    }

    fn begin_rest(&mut self, now: Now) {
        // A rest that was kept gives back what breaking one took.
        self.spare = !self.resting(now);
        self.rest = Some((now + QUIET, self.programs + QUIET_PROGRAMS));
    }

    /// There is no plan for the change, or no way to it: another look would soon find the same.
    pub fn refused(&mut self, now: Now) {
        self.dropped();
        self.begin_rest(now);
    }

    /// The look at the change, or the move, came to nothing.
    pub fn dropped(&mut self) {
        self.asked = false;
        self.tracks.iter_mut().for_each(|t| t.outside = 0);
    }
}

impl TrackState {
    fn take(&mut self, ratio: f64, margin: f64) {
        self.recent.truncate(SAMPLES - 1);
        self.recent.push_front(ratio);
        if self.recent.len() < SAMPLES {
            return;
        }
        let band = 1.0 + margin;
        let median = self.median();
        // What a prediction is wrong by from the first is no drift, but only as far as the band goes.
        let reference = *self
            .reference
            .get_or_insert_with(|| median.clamp(self.factor / band, self.factor * band));
        let shift = median / reference;
        let within = (1.0 / band..=band).contains(&shift);
        self.outside = if within { 0 } else { self.outside.saturating_add(1) };
    }

    fn median(&self) -> f64 {
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(1.0)
    }

    /// The factor by which the ratio has moved since the epoch began.
    fn shift(&self) -> f64 {
        self.reference.map_or(1.0, |reference| self.median() / reference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: f64 = 1e6;

    struct World {
        drift: Drift,
        now: Now,
        /// The time between programs.
        step: Duration,
    }

    impl World {
        fn new(devices: usize) -> Self {
            let step = Duration::from_millis(100);
            Self { drift: Drift::new(devices, 0.25), now: Now::ZERO, step }
        }
        /// Runs one program with these ratios.
        fn run(&mut self, ratios: &[f64]) -> Option<Change> {
            self.now += self.step;
            let sample = |(device, ratio): (usize, &f64)| Sample {
                track: device,
                measured: 20.0 * MS * ratio,
                predicted: 20.0 * MS,
            };
            let samples: Vec<Sample> = ratios.iter().enumerate().map(sample).collect();
            self.drift.observe(self.now, &samples)
        }
        /// Runs at most `most` programs, until something changes.
        fn until(&mut self, most: usize, ratios: &[f64]) -> Option<(usize, Change)> {
            (1..=most).find_map(|n| self.run(ratios).map(|change| (n, change)))
        }
    }

    #[test]
    fn a_device_at_a_third_of_its_speed_is_detected_within_ten_programs() {
        let mut world = World::new(3);
        assert_eq!(world.until(50, &[1.0, 1.05, 0.97]), None);
        let (programs, change) = world.until(10, &[1.0, 3.1, 0.97]).expect("seen");
        assert!((5..=7).contains(&programs), "{programs}");
        assert_eq!(change.moved, [(1, 1.0)]);
        assert!((change.factors[1] - 3.1 / 1.05).abs() < 1e-9, "{change:?}");
        assert_eq!((change.factors[0], change.factors[2]), (1.0, 1.0));
        assert_eq!(world.until(20, &[1.0, 3.1, 0.97]), None, "it is being looked at");
    }

    #[test]
    fn a_device_slow_from_the_start_of_an_epoch_is_detected() {
        let mut world = World::new(2);
        let (programs, change) = world.until(10, &[1.0, 3.0]).expect("seen");
        assert!(programs <= 9, "{programs}");
        assert!((change.factors[1] - 3.0 / 1.25).abs() < 1e-9, "the band is excused");
    }

    #[test]
    fn a_constant_prediction_error_within_the_margin_is_no_drift() {
        let mut world = World::new(2);
        assert_eq!(world.until(200, &[1.22, 0.85]), None);
        assert!(world.until(10, &[1.6, 0.85]).is_some());
    }

    #[test]
    fn bursts_and_invalid_samples_are_not_drift() {
        let mut world = World::new(2);
        for n in 0..200 {
            let burst = if n % 4 == 0 { 9.0 } else { 1.0 };
            assert_eq!(world.run(&[burst, 1.0]), None);
        }
        for ratio in [f64::NAN, f64::INFINITY, 0.0, -4.0] {
            assert_eq!(world.until(20, &[1.0, ratio]), None);
        }
        let tiny = [Sample { track: 0, measured: 9e4, predicted: 3e4 }];
        let elsewhere = [Sample { track: 7, measured: 9.0 * MS, predicted: MS }];
        for _ in 0..20 {
            assert_eq!(world.drift.observe(world.now, &tiny), None);
            assert_eq!(world.drift.observe(world.now, &elsewhere), None);
        }
    }

    #[test]
    fn a_kept_change_becomes_the_expected_speed() {
        let mut world = World::new(2);
        world.until(10, &[1.0, 1.0]);
        let (_, change) = world.until(10, &[1.5, 1.0]).expect("seen");
        world.drift.keep(&change);
        assert_eq!(world.drift.factors(), [1.5, 1.0]);
        assert_eq!(world.until(100, &[1.5, 1.0]), None);
        let (_, change) = world.until(10, &[1.0, 1.0]).expect("back");
        assert!((change.factors[0] - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_device_that_becomes_fast_again_after_a_move_is_detected() {
        let mut world = World::new(2);
        world.until(10, &[1.0, 1.0]);
        let (_, change) = world.until(10, &[1.0, 3.0]).expect("slow");
        world.drift.moved(world.now, &change);
        assert_eq!(world.until(400, &[1.0, 3.0]), None, "as expected now");
        let (programs, change) = world.until(10, &[1.0, 1.0]).expect("fast");
        assert!(programs <= 10);
        assert!((change.factors[1] - 1.0).abs() < 1e-9, "{change:?}");
    }

    #[test]
    fn only_large_drift_is_reported_in_the_quiet_time_after_a_move() {
        let mut world = World::new(2);
        world.until(10, &[1.0, 1.0]);
        let (_, change) = world.until(10, &[1.0, 3.0]).expect("slow");
        world.drift.moved(world.now, &change);
        let moved = world.now;
        world.until(10, &[1.0, 3.0]);
        // Outside, not far: rest is kept, and then it is seen at once.
        let (_, change) = world.until(1000, &[1.5, 3.0]).expect("in the end");
        assert!(world.now - moved >= QUIET, "{:?}", world.now - moved);
        world.drift.moved(world.now, &change);
        world.until(10, &[1.5, 3.0]);
        let moved = world.now;
        assert!(world.until(10, &[1.5, 0.9]).is_some(), "far outside");
        assert!(world.now - moved < QUIET);
    }

    #[test]
    fn a_refused_change_is_reported_again_only_after_the_quiet_time() {
        let mut world = World::new(2);
        world.until(10, &[1.0, 1.0]);
        let (_, change) = world.until(10, &[1.5, 1.0]).expect("slow");
        world.drift.refused(world.now);
        let begun = world.now;
        assert!(world.drift.ask(world.now).is_none());
        let (_, again) = world.until(1000, &[1.5, 1.0]).expect("in the end");
        assert!(world.now - begun >= QUIET, "{:?}", world.now - begun);
        assert_eq!(again, change);
    }

    #[test]
    fn an_alternating_device_causes_a_bounded_number_of_moves() {
        for period in [5, 10, 20, 60, 400] {
            let mut world = World::new(2);
            world.until(10, &[1.0, 1.0]);
            let begun = world.now;
            let mut moves: u32 = 0;
            for n in 0..3000 {
                let ratio = if (n / period) % 2 == 0 { 1.0 } else { 3.0 };
                if let Some(change) = world.run(&[1.0, ratio]) {
                    world.drift.moved(world.now, &change);
                    moves += 1;
                }
            }
            let rests = (world.now - begun).as_secs_f64() / QUIET.as_secs_f64();
            assert!(f64::from(moves) <= 2.0 * (rests + 1.0), "{moves} moves, period {period}");
            assert!(period < 10 || moves > 0);
        }
    }

    #[test]
    fn a_dropped_change_is_reported_again() {
        let mut world = World::new(1);
        world.until(10, &[1.0]);
        let (_, first) = world.until(10, &[2.0]).expect("seen");
        world.drift.dropped();
        let (programs, second) = world.until(10, &[2.0]).expect("again");
        assert_eq!((programs, first), (4, second));
    }
}
