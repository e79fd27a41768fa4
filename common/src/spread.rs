//! The middle and the range of some values: how every measured figure is shown.

use serde::Serialize;
use std::fmt;

/// Some values, sorted and summed up. Values that are not finite are left out.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    /// The number of values.
    pub n: usize,
    /// Half of the values are at most this; with an even number, halfway between the middle two.
    pub median: f64,
    /// The smallest value.
    pub low: f64,
    /// The largest value.
    pub high: f64,
    /// A quarter of the values are at most this, between two values in proportion.
    pub lower_quartile: f64,
    /// Three quarters of the values are at most this.
    pub upper_quartile: f64,
}

impl Spread {
    /// The spread of these values; of none, all is NaN and shown as a dash.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let position = share * sorted.len().saturating_sub(1) as f64;
            let (below, above) = (position.floor(), position.ceil());
            let value = |i: f64| sorted.get(i as usize).copied().unwrap_or(f64::NAN);
            value(below) + (value(above) - value(below)) * (position - below)
        };
        Self {
            n: sorted.len(),
            median: at(0.5),
            low: at(0.0),
            high: at(1.0),
            lower_quartile: at(0.25),
            upper_quartile: at(0.75),
        }
    }

    /// The spread of `a / b`, where the values of both were measured in turn, so that what slowed
    /// one down slowed its partner down too. The range is that of the pairs. The median is the
    /// ratio of the medians, which always lies within it; a last value without a partner is left
    /// out.
    pub fn of_ratio(a: &[f64], b: &[f64]) -> Self {
        let finite = |(x, y): &(f64, f64)| (x / y).is_finite();
        let pairs = || a.iter().copied().zip(b.iter().copied()).filter(finite);
        let (a, b): (Vec<f64>, Vec<f64>) = pairs().unzip();
        let ratios: Vec<f64> = pairs().map(|(x, y)| x / y).collect();
        Self { median: Self::of(&a).median / Self::of(&b).median, ..Self::of(&ratios) }
    }

    /// The range as a share of the median.
    pub fn relative(&self) -> f64 {
        (self.high - self.low) / self.median
    }
}

/// `1031 (1012 to 1068)`, with four digits unless a precision is asked for. One value has no range.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.n == 0 {
            return f.pad("-");
        }
        let digits = f.precision().unwrap_or_else(|| {
            let largest = self.low.abs().max(self.high.abs());
            let magnitude = if largest > 0.0 { largest.log10().floor() } else { 0.0 };
            (3.0 - magnitude).clamp(0.0, 6.0) as usize
        });
        write!(f, "{:.digits$}", self.median)?;
        if self.n > 1 {
            write!(f, " ({:.digits$} to {:.digits$})", self.low, self.high)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_right_for_no_one_and_four_values() {
        let none = Spread::of(&[]);
        assert!(none.n == 0 && none.median.is_nan() && none.relative().is_nan());
        assert_eq!(none.to_string(), "-");
        let one = Spread::of(&[1031.4]);
        assert_eq!((one.median, one.low, one.high, one.relative()), (1031.4, 1031.4, 1031.4, 0.0));
        assert_eq!(one.to_string(), "1031");
        let four = Spread::of(&[4.0, 1.0, 3.0, 2.0]);
        assert_eq!((four.median, four.lower_quartile, four.upper_quartile), (2.5, 1.75, 3.25));
        assert_eq!(four.relative(), 3.0 / 2.5);
    }

    #[test]
    fn a_spread_shows_four_digits_unless_a_precision_is_given() {
        let spread = Spread::of(&[1012.4, 1068.0, 1031.2]);
        assert_eq!(spread.to_string(), "1031 (1012 to 1068)");
        assert_eq!(format!("{spread:.1}"), "1031.2 (1012.4 to 1068.0)");
        assert_eq!(Spread::of(&[0.94, 0.95, 0.9]).to_string(), "0.9400 (0.9000 to 0.9500)");
        assert_eq!(Spread::of(&[0.0, 0.0]).to_string(), "0.000 (0.000 to 0.000)");
    }

    #[test]
    fn values_that_are_not_finite_are_ignored() {
        let spread = Spread::of(&[f64::NAN, 2.0, f64::INFINITY]);
        assert_eq!((spread.n, spread.median), (1, 2.0));
    }

    #[test]
    fn a_ratio_of_medians_lies_within_its_pairs() {
        let ratio = Spread::of_ratio(&[20.0, 30.0, 22.0, 99.0], &[10.0, 12.0, 11.0]);
        assert_eq!((ratio.n, ratio.median), (3, 2.0));
        assert_eq!((ratio.low, ratio.high), (2.0, 2.5));
        assert_eq!(Spread::of_ratio(&[1.0], &[0.0]).n, 0);
        assert_eq!(Spread::of_ratio(&[], &[]).to_string(), "-");
    }
}
