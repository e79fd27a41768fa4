//! Formats of weights: the one place that knows what bytes a matrix takes, and where it may be cut.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How the values of a weight matrix are stored, in a file or in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    /// 32-bit float.
    F32,
    /// IEEE 16-bit float.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
}

impl WeightFormat {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];
    /// Outputs of a panel. Devices hold a matrix in panels, and fill up the last one.
    pub const PANEL: u32 = 16;

    /// Bytes of a matrix `[inputs, outputs]` as a file has it.
    pub const fn bytes(self, inputs: u64, outputs: u64) -> u64 {
        let value = match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        };
        inputs * outputs * value
    }

    /// Bytes of a matrix `[inputs, outputs]` as a device holds it: in panels, the last one filled up.
    pub const fn held(self, inputs: u64, outputs: u64) -> u64 {
        self.bytes(inputs, Self::filled(outputs))
    }

    /// Bit planes of a matrix that is stored plane by plane, the most significant first: the first `k` of them
    /// are its values in `k` bits.
    pub const fn planes(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
        }
    }

    /// Bytes of the first so many planes of a matrix `[inputs, outputs]` as a device holds it: a bit for each
    /// value of each plane.
    pub const fn held_planes(self, inputs: u64, outputs: u64, planes: u32) -> u64 {
        inputs * Self::filled(outputs) / 8 * planes as u64
    }

    /// Outputs with those that fill up the last panel.
    pub const fn filled(outputs: u64) -> u64 {
        outputs.next_multiple_of(Self::PANEL as u64)
    }

    /// Inputs between two of which it may be cut: multiples of this.
    pub const fn cut(self) -> u32 {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
        }
    }

    /// Its name in `config.json` (`torch_dtype`).
    pub const fn torch(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// Its name in files, messages and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A format that nobody knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no format of weights that is known: f32, f16 and bf16 are")]
pub struct UnknownFormat(String);

impl FromStr for WeightFormat {
    type Err = UnknownFormat;

    /// By its [`name`](Self::name), in letters of any case.
    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        let found = Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| UnknownFormat(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_which_format() {
        for format in WeightFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
            assert_eq!(format.name().to_uppercase().parse(), Ok(format));
        }
        let unknown = "q4".parse::<WeightFormat>().map_err(|error| error.to_string());
        assert_eq!(
            unknown,
            Err("\"q4\" is no format of weights that is known: f32, f16 and bf16 are".to_owned())
        );
    }

    #[test]
    fn a_matrix_that_is_held_fills_its_last_panel() {
        let format = WeightFormat::Bf16;
        assert_eq!((format.bytes(10, 17), format.held(10, 17)), (340, 640));
        assert_eq!(format.held(10, 32), format.bytes(10, 32));
    }

    #[test]
    fn all_planes_of_a_matrix_are_the_matrix() {
        for format in WeightFormat::ALL {
            let held = format.held(3, 17);
            assert_eq!(format.held_planes(3, 17, format.planes()), held);
            assert_eq!(format.held_planes(3, 17, 1) * u64::from(format.planes()), held);
        }
        assert_eq!(WeightFormat::F16.held_planes(3, 17, 6), 3 * 32 * 6 / 8);
    }
}
