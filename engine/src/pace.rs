//! How long steps take, measured on those that ran lately: it decides whether drafted rows pay.

use std::time::Duration;

/// The weight of a burst relative to the one behind it.
const LATELY: f64 = 0.9;
/// The cost of one more row as a share of a step of one row, before it is known.
const ROW: f64 = 0.15;
/// The weight of that assumption, in squares of rows: about one burst of a row more.
const PRIOR: f64 = 0.5;
/// The least cost of one more row, as a share of a step's mean time per row.
const LEAST: f64 = 0.004;

/// A burst that ran, or a step that read prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// The number of rows of all steps together.
    pub rows: u32,
    /// The number of steps.
    pub steps: u32,
    /// The number of sequences that decoded in each step.
    pub decoding: u32,
}

/// How long steps take: those of a decode burst as a line over their rows.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    /// Sums over bursts, each of which counts a little less than the one behind it: of 1, of the rows of a step, of
    /// their squares, of the seconds of a step, and of these times rows.
    sums: [f64; 5],
    /// The seconds that a row of a prompt takes; none before one ran.
    row: Option<f64>,
}

/// A running mean that follows changes within a few values.
fn follow(mean: &mut Option<f64>, value: f64) {
    *mean = Some(mean.map_or(value, |mean| mean + (value - mean) / 4.0));
}

impl Pace {
    /// Notes what a decode burst took.
    pub fn decoded(&mut self, ran: Ran, took: Duration) {
        let steps = f64::from(ran.steps.max(1));
        // No step takes no time.
        let (rows, took) = (f64::from(ran.rows) / steps, took.as_secs_f64().max(1e-9) / steps);
        let values = [1.0, rows, rows * rows, took, rows * took];
        for (sum, value) in self.sums.iter_mut().zip(values) {
            *sum = *sum * LATELY + value;
        }
    }

    /// Notes what a step with rows of prompts took. Beside sequences that decode they took what the step took longer
    /// than one without them.
    pub fn prefilled(&mut self, ran: Ran, took: Duration) {
        let took = took.as_secs_f64();
        let decoding = if ran.decoding == 0 { None } else { self.step(ran.decoding as usize) };
        let least = LEAST * took;
        let took = (took - decoding.unwrap_or(0.0)).max(least);
        follow(&mut self.row, took / f64::from(ran.rows.saturating_sub(ran.decoding).max(1)));
    }

    /// Seconds of a row of a prompt, if some ran.
    pub fn row(&self) -> Option<f64> {
        self.row
    }

    /// Seconds of a step of one row and of each more, if some ran.
    fn line(&self) -> Option<(f64, f64)> {
        let [count, rows, squares, took, products] = self.sums;
        if count <= 0.0 {
            return None;
        }
        let (rows, took) = (rows / count, took / count);
        let variance = (squares / count - rows * rows).max(0.0);
        let covariance = products / count - rows * took;
        let expected = ROW * took / (1.0 + ROW * (rows - 1.0));
        let more = (covariance + PRIOR / count * expected) / (variance + PRIOR / count);
        // A step of many rows takes no less than one of one, and no row more than the mean one.
        let more = more.clamp(LEAST * took / rows.max(1.0), took / rows.max(1.0));
        Some((took - (rows - 1.0) * more, more))
    }

    /// Seconds of a step that decodes so many sequences, if some ran.
    pub fn step(&self, sequences: usize) -> Option<f64> {
        let (one, more) = self.line()?;
        Some(one + more * sequences.saturating_sub(1) as f64)
    }

    /// The time that one more row takes, as a share of the time of a step that decodes so many
    /// sequences.
    pub fn row_cost(&self, sequences: usize) -> f32 {
        let beside = sequences.saturating_sub(1) as f64;
        let known = self.line().map(|(one, more)| more / (one + more * beside));
        known.unwrap_or(ROW / (1.0 + ROW * beside)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burst(steps: u32, rows: u32) -> Ran {
        Ran { rows: steps * rows, steps, decoding: rows }
    }

    #[test]
    fn the_row_cost_is_learned_from_bursts_of_different_widths() {
        let mut pace = Pace::default();
        let near = |a: f32, b: f32| (a - b).abs() < 0.1 * b;
        assert!(near(pace.row_cost(1), 0.15) && pace.step(1).is_none());
        let took =
            |rows: u32, steps: u32| Duration::from_micros(u64::from(steps * (900 + 100 * rows)));
        // Of bursts that are all alike nothing is learned.
        (0..9).for_each(|_| pace.decoded(burst(4, 1), took(1, 4)));
        assert!(near(pace.row_cost(1), 0.15), "{}", pace.row_cost(1));
        for rows in [1, 4, 2, 8, 3, 5].repeat(4) {
            pace.decoded(burst(3, rows), took(rows, 3));
        }
        assert!(near(pace.row_cost(1), 0.1), "{}", pace.row_cost(1));
        assert!(near(pace.row_cost(6), 1.0 / 15.0), "{}", pace.row_cost(6));
        let step = pace.step(8).unwrap_or_default();
        assert!((step - 0.0017).abs() < 1e-4, "{step}");
        // Steps become slower, whatever their rows.
        (0..40).for_each(|_| pace.decoded(burst(2, 1), Duration::from_millis(20)));
        assert!((pace.step(1).unwrap_or_default() - 0.01).abs() < 1e-3);
    }

    #[test]
    fn rows_of_prompts_beside_sequences_that_decode_take_what_a_step_takes_longer() {
        let mut pace = Pace::default();
        pace.decoded(burst(1, 4), Duration::from_millis(80));
        pace.prefilled(Ran { rows: 24, steps: 1, decoding: 4 }, Duration::from_millis(180));
        assert!(pace.row().is_some_and(|row| (row - 0.005).abs() < 1e-6), "{:?}", pace.row());
        // No row takes no time.
        (0..99).for_each(|_| {
            pace.prefilled(Ran { rows: 24, steps: 1, decoding: 4 }, Duration::from_millis(50));
        });
        assert!(pace.row().is_some_and(|row| row > 0.0));
    }

    #[test]
    fn prefill_gives_no_step_time_and_an_empty_burst_a_finite_time() {
        let mut pace = Pace::default();
        pace.prefilled(Ran { rows: 100, steps: 1, decoding: 0 }, Duration::from_secs(1));
        assert_eq!((pace.row(), pace.step(3)), (Some(0.01), None));
        pace.decoded(Ran { rows: 0, steps: 0, decoding: 0 }, Duration::ZERO);
        assert!(pace.row_cost(1).is_finite() && pace.step(1).is_some_and(f64::is_finite));
    }
}
