//! The rate of a link, as people write it: `125Mbit/s`.

use std::{fmt, str::FromStr, time::Duration};

/// Bits that a link moves in a second.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct LinkRate {
    bits_per_second: f64,
}

/// Text that is no link rate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a link rate: write a number above zero and one of bit/s, kbit/s, Mbit/s, Gbit/s, kB/s, MB/s, GB/s, like \"125Mbit/s\""
)]
pub struct RateError {
    /// The text that was given.
    pub text: String,
}

impl LinkRate {
    /// The rate that moved `bytes` in `time`; `None` when one of them is zero.
    pub fn measured(bytes: u64, time: Duration) -> Option<Self> {
        let bits_per_second = bytes as f64 * 8.0 / time.as_secs_f64();
        (bits_per_second.is_finite() && bits_per_second > 0.0).then_some(Self { bits_per_second })
    }

    /// Bits per second.
    pub fn bits_per_second(self) -> f64 {
        self.bits_per_second
    }

    /// The time that `bytes` take on the link.
    pub fn time_of(self, bytes: u64) -> Duration {
        Duration::try_from_secs_f64(bytes as f64 * 8.0 / self.bits_per_second)
            .unwrap_or(Duration::MAX)
    }
}

impl FromStr for LinkRate {
    type Err = RateError;
    fn from_str(text: &str) -> Result<Self, RateError> {
        let wrong = || RateError { text: text.to_owned() };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
        let (number, unit) = trimmed.split_at(split);
        let scale = match unit {
            "bit/s" => 1.0,
            "kbit/s" | "Kbit/s" => 1e3,
            "Mbit/s" => 1e6,
            "Gbit/s" => 1e9,
            "B/s" => 8.0,
            "kB/s" | "KB/s" => 8e3,
            "MB/s" => 8e6,
            "GB/s" => 8e9,
            _ => return Err(wrong()),
        };
        let bits_per_second = number.trim().parse::<f64>().map_err(|_| wrong())? * scale;
        if bits_per_second.is_finite() && bits_per_second >= 1.0 {
            Ok(Self { bits_per_second })
        } else {
            Err(wrong())
        }
    }
}

impl fmt::Display for LinkRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.bits_per_second;
        if n >= 1e9 {
            write!(f, "{:.2} Gbit/s", n / 1e9)
        } else if n >= 1e6 {
            write!(f, "{:.1} Mbit/s", n / 1e6)
        } else {
            write!(f, "{:.1} kbit/s", n / 1e3)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_parse() {
        for (text, want) in
            [("125Mbit/s", 125e6), ("1 Gbit/s", 1e9), ("12.5MB/s", 100e6), ("56kbit/s", 56e3)]
        {
            assert_eq!(text.parse::<LinkRate>().map(LinkRate::bits_per_second), Ok(want), "{text}");
        }
        for bad in
            ["", "125", "125M", "0Mbit/s", "-1Mbit/s", "nanMbit/s", "125mbit/s", "1e999Gbit/s"]
        {
            assert!(bad.parse::<LinkRate>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_link_rate_gives_the_transfer_time_of_bytes() {
        let rate: LinkRate = "8Mbit/s".parse().expect("a rate");
        assert_eq!(rate.time_of(1_000_000), Duration::from_secs(1));
        assert_eq!(LinkRate::measured(1_000_000, Duration::from_secs(1)), Some(rate));
        assert_eq!(LinkRate::measured(0, Duration::from_secs(1)), None);
        assert_eq!(LinkRate::measured(1, Duration::ZERO), None);
        assert_eq!(rate.to_string(), "8.0 Mbit/s");
    }
}
