//! The scale of an axis: from values to places, and the ticks beside it.

/// An axis: the values at its ends, and whether it is logarithmic.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    log: bool,
}

impl Scale {
    /// An axis that holds all of these values and ends at a tick, and that includes zero if `from_zero`. On a
    /// logarithmic axis values that are not above zero are left out.
    pub(super) fn around(values: impl Iterator<Item = f64>, log: bool, from_zero: bool) -> Self {
        let sound = values.filter(|v| v.is_finite() && (!log || *v > 0.0));
        let (mut low, mut high) =
            sound.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            (low, high) = if log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        if log {
            // Some room beyond the outermost values, since a bar of no height shows nothing.
            let (low, high) = (round_log(low / 1.1, false), round_log(high * 1.05, true));
            return Self { low, high, log };
        }
        if from_zero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if low == high {
            high = low + if low == 0.0 { 1.0 } else { low.abs() };
        }
        let step = step(low, high);
        Self { low: (low / step).floor() * step, high: (high / step).ceil() * step, log }
    }

    /// An axis that begins and ends at the outermost values.
    pub(super) fn tight(values: impl Iterator<Item = f64> + Clone, log: bool) -> Self {
        let around = Self::around(values.clone(), log, false);
        let sound = values.filter(|v| v.is_finite() && (!log || *v > 0.0));
        let (low, high) =
            sound.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        if low < high { Self { low, high, log } } else { around }
    }

    /// The place of a value: 0 at the lower end, 1 at the upper.
    pub(super) fn place(&self, value: f64) -> f64 {
        if self.log {
            let value = value.max(self.low * 1e-3);
            return (value / self.low).ln() / (self.high / self.low).ln();
        }
        (value - self.low) / (self.high - self.low)
    }

    /// The values of ticks, and their labels.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        if !self.log {
            let step = step(self.low, self.high);
            let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
            // A step of 2.5 needs one decimal more than its size suggests.
            let tenth = step * 10f64.powi(decimals as i32);
            let decimals = decimals + usize::from((tenth - tenth.round()).abs() > 1e-6);
            let first = (self.low / step - 1e-9).ceil();
            let count = ((self.high / step + 1e-9).floor() - first) as usize;
            let values = (0..=count).map(|i| (first + i as f64) * step);
            return values.map(|v| (v, format!("{:.decimals$}", v + 0.0))).collect();
        }
        let decades = (self.high / self.low).log10();
        let digits: &[f64] = match decades {
            d if d <= 2.2 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let (from, to) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let all = (from..=to).flat_map(|e| digits.iter().map(move |d| d * 10f64.powi(e)));
        let within = all.filter(|v| *v >= self.low * 0.999 && *v <= self.high * 1.001);
        within.map(|v| (v, short(v))).collect()
    }
}

/// The next of 1, 2 and 5 times a power of ten, upwards or downwards.
fn round_log(value: f64, up: bool) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let digit = value / power;
    let choices = [1.0, 2.0, 5.0, 10.0];
    let found = match up {
        true => choices.into_iter().find(|c| *c >= digit - 1e-9),
        false => choices.into_iter().rev().find(|c| *c <= digit + 1e-9),
    };
    found.unwrap_or(1.0) * power
}

/// The step between ticks: about six of them, at round numbers.
fn step(low: f64, high: f64) -> f64 {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let digit = rough / power;
    let round = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|d| *d >= digit * 0.95).unwrap_or(10.0);
    round * power
}

/// A number with about three digits.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    let text = match size {
        0.0 => return "0".into(),
        s if !(1e-3..1e6).contains(&s) => return format!("{value:.0e}"),
        s if s >= 99.95 => format!("{value:.0}"),
        s if s >= 9.995 => format!("{value:.1}"),
        s if s >= 0.995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(values: &[f64], log: bool) -> Vec<String> {
        let scale = Scale::around(values.iter().copied(), log, true);
        scale.ticks().into_iter().map(|t| t.1).collect()
    }

    #[test]
    fn ticks_are_round_numbers_around_the_values() {
        assert_eq!(labels(&[3.0, 97.0], false), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(
            labels(&[0.011], false),
            ["0.0000", "0.0025", "0.0050", "0.0075", "0.0100", "0.0125"]
        );
        assert_eq!(labels(&[1.2], false), ["0.00", "0.25", "0.50", "0.75", "1.00", "1.25"]);
        assert_eq!(labels(&[3.0, 180.0], true), ["2", "5", "10", "20", "50", "100", "200"]);
        assert_eq!(labels(&[0.5, 40_000.0], true), ["1", "10", "100", "1000", "10000"]);
    }

    #[test]
    fn axis_ends_enclose_all_finite_values() {
        for log in [false, true] {
            for values in
                [vec![], vec![f64::NAN], vec![7.0], vec![0.0], vec![-3.0, 5.0], vec![1e-9, 1e9]]
            {
                let scale = Scale::around(values.iter().copied(), log, false);
                assert!(scale.low < scale.high, "{values:?}");
                assert!(!scale.ticks().is_empty(), "{values:?}");
                for value in values.into_iter().filter(|v| v.is_finite() && (!log || *v > 0.0)) {
                    assert!((0.0..=1.0).contains(&scale.place(value)), "{value}");
                }
            }
        }
    }

    #[test]
    fn plot_numbers_are_shortened_without_trailing_zeros() {
        for (value, text) in
            [(1234.4, "1234"), (12.34, "12.3"), (1.0, "1"), (0.0456, "0.046"), (0.0, "0")]
        {
            assert_eq!(short(value), text);
        }
    }
}
