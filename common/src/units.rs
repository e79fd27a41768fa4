//! Quantities with units, as people write them: `1.5GB`.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A number of bytes. Written with decimal units: `1.5GB` is 1 500 000 000; `KiB`, `MiB`, `GiB` are binary.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// Text that is not a size in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a size: write a number and one of B, KB, MB, GB, KiB, MiB, GiB, like \"1.5GB\""
)]
pub struct UnitError {
    /// The text that was given.
    pub text: String,
}

impl FromStr for Bytes {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let wrong = || UnitError { text: text.to_owned() };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
        let (number, unit) = trimmed.split_at(split);
        let scale: f64 = match unit.to_ascii_lowercase().as_str() {
            "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "kib" => 1024.0,
            "mib" => 1024.0 * 1024.0,
            "gib" => 1024.0 * 1024.0 * 1024.0,
            _ => return Err(wrong()),
        };
        let number: f64 = number.trim().parse().map_err(|_| wrong())?;
        let bytes = number * scale;
        // 2^53: above it a float no longer counts single bytes, and no device has so many.
        if !(0.0..9.0e15).contains(&bytes) {
            return Err(wrong());
        }
        Ok(Self(bytes.round() as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{} B", self.0),
            1_000..1_000_000 => write!(f, "{:.1} KB", n / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} MB", n / 1e6),
            _ => write!(f, "{:.2} GB", n / 1e9),
        }
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}
impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self(0), |a, b| a + b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        for (text, want) in
            [("1.5GB", 1_500_000_000), ("2 MiB", 2 << 20), ("0b", 0), ("512kb", 512_000)]
        {
            assert_eq!(text.parse(), Ok(Bytes(want)), "{text}");
        }
        for bad in ["", "12", "GB", "-1GB", "1e300GB", "1.5XB", "nanGB"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }
}
