//! Formats of weights: the one place that knows what bytes a matrix takes, and where it may be cut.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How the values of a weight matrix are stored, in a file or in memory.
///
/// Formats of few bits keep values in blocks of neighbouring inputs of one output, as GGUF files have them.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// A 32-bit float for each value.
    #[default]
    F32,
    /// An IEEE 16-bit float for each value.
    F16,
    /// The upper half of a 32-bit float (bfloat16) for each value.
    Bf16,
    /// Blocks of 32 values of 8 bits and a scale.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// Blocks of 32 values of 4 bits and a scale.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// Blocks of 32 values of 4 bits, a scale and a minimum.
    #[serde(rename = "q4_1")]
    Q4_1,
    /// Blocks of 32 values of 5 bits and a scale.
    #[serde(rename = "q5_0")]
    Q5_0,
    /// Blocks of 32 values of 5 bits, a scale and a minimum.
    #[serde(rename = "q5_1")]
    Q5_1,
    /// Blocks of 256 values of 4 bits, with a scale and a minimum of 6 bits each for every 32 of them.
    #[serde(rename = "q4_k")]
    Q4K,
    /// Blocks of 256 values of 5 bits, with a scale and a minimum of 6 bits each for every 32 of them.
    #[serde(rename = "q5_k")]
    Q5K,
    /// Blocks of 256 values of 6 bits, with a scale of 8 bits for every 16 of them.
    #[serde(rename = "q6_k")]
    Q6K,
    /// Blocks of 32 values out of 16 that are not evenly spaced, and a scale.
    Iq4Nl,
    /// Blocks of 256 values out of 16 that are not evenly spaced, with a scale of 6 bits for every 32 of them.
    Iq4Xs,
    /// Blocks of 32 floats of 4 bits, and a shared exponent.
    Mxfp4,
}

/// How the values of a matrix are stored in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WeightBlock {
    /// Neighbouring inputs of one output in a block.
    pub values: u32,
    /// Bytes of a block in a file.
    pub bytes: u32,
    /// Bits of a value, without the scales and minima that it shares with others.
    pub bits: u32,
    /// Bytes of the scales and minima of a block as devices hold it.
    pub scales: u32,
}

impl WeightBlock {
    /// Inputs that kernels take at a time; a matrix may be cut between any two such groups.
    pub const GROUP: u32 = 32;

    /// The number of groups that hold so many inputs.
    pub const fn groups(inputs: u64) -> u64 {
        inputs.div_ceil(Self::GROUP as u64)
    }

    /// The most blocks over which so many neighbouring inputs can lie, wherever they begin.
    pub const fn most(self, inputs: u64) -> u64 {
        let groups = (self.values / Self::GROUP) as u64;
        match Self::groups(inputs) {
            0 => 0,
            count => (count + groups - 1).div_ceil(groups),
        }
    }
}

impl WeightFormat {
    /// All weight formats, in the order of their declaration.
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
    ];
    /// The formats that store each value by itself, without blocks.
    pub const FLOATS: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];
    /// Outputs of a panel. Devices hold a matrix in panels, and fill up the last one.
    pub const PANEL: u32 = 16;

    /// How the values are stored in blocks; none where each is stored by itself.
    pub const fn block(self) -> Option<WeightBlock> {
        let (values, bytes, bits, scales) = match self {
            Self::F32 | Self::F16 | Self::Bf16 => return None,
            Self::Q8_0 => (32, 34, 8, 2),
            Self::Q4_0 | Self::Iq4Nl => (32, 18, 4, 2),
            Self::Q4_1 => (32, 20, 4, 4),
            Self::Q5_0 => (32, 22, 5, 2),
            Self::Q5_1 => (32, 24, 5, 4),
            Self::Q4K => (256, 144, 4, 16),
            Self::Q5K => (256, 176, 5, 16),
            Self::Q6K => (256, 210, 6, 18),
            Self::Iq4Xs => (256, 136, 4, 10),
            Self::Mxfp4 => (32, 17, 4, 1),
        };
        Some(WeightBlock { values, bytes, bits, scales })
    }

    /// Bits of a value that is stored by itself, or in a block without the scales and minima that it shares.
    const fn bits(self) -> u32 {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            _ => match self.block() {
                Some(block) => block.bits,
                None => 0,
            },
        }
    }

    /// Bytes of a matrix `[inputs, outputs]` as a file has it. Of a part of a block: its share of it.
    pub const fn bytes(self, inputs: u64, outputs: u64) -> u64 {
        let values = inputs * outputs;
        match self.block() {
            None => values * self.bits() as u64 / 8,
            Some(block) => (values * block.bytes as u64).div_ceil(block.values as u64),
        }
    }

    /// Bytes of a matrix `[inputs, outputs]` as a device holds it: in panels, the last one filled up. Of one in
    /// blocks, first the values of whole groups of inputs, then the scales of all blocks in which they can lie.
    pub const fn held(self, inputs: u64, outputs: u64) -> u64 {
        let outputs = Self::filled(outputs);
        match self.block() {
            None => self.bytes(inputs, outputs),
            Some(block) => {
                outputs * (self.held_values(inputs) + block.most(inputs) * block.scales as u64)
            }
        }
    }

    /// Bytes of the values of one output as a device holds it, without scales.
    pub const fn held_values(self, inputs: u64) -> u64 {
        match self.block() {
            None => self.bytes(inputs, 1),
            Some(block) => {
                WeightBlock::groups(inputs) * (WeightBlock::GROUP * block.bits / 8) as u64
            }
        }
    }

    /// Bit planes of a matrix that is stored plane by plane, the most significant first: the first `k` of them
    /// are its values in `k` bits.
    pub const fn planes(self) -> u32 {
        self.bits()
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
        match self.block() {
            None => 1,
            Some(_) => WeightBlock::GROUP,
        }
    }

    /// Its name in `config.json` (`torch_dtype`); that of what its values become, where torch has no such type.
    pub const fn torch(self) -> &'static str {
        match self {
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            _ => "float32",
        }
    }

    /// Its name in files, messages and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Iq4Nl => "iq4_nl",
            Self::Iq4Xs => "iq4_xs",
            Self::Mxfp4 => "mxfp4",
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
#[error("{0:?} is no format of weights that is known: {known} are", known = known())]
pub struct UnknownFormat(String);

/// The names of all formats.
fn known() -> String {
    WeightFormat::ALL.map(WeightFormat::name).join(", ")
}

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
    fn weight_format_names_parse_back() {
        for format in WeightFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
            assert_eq!(format.name().to_uppercase().parse(), Ok(format));
        }
        let unknown = "q3".parse::<WeightFormat>().map_err(|error| error.to_string());
        let unknown = unknown.expect_err("there is no such format");
        assert!(unknown.starts_with("\"q3\" is no format of weights that is known: f32, f16,"));
    }

    #[test]
    fn a_matrix_in_memory_is_padded_to_full_panels() {
        let format = WeightFormat::Bf16;
        assert_eq!((format.bytes(10, 17), format.held(10, 17)), (340, 640));
        assert_eq!(format.held(10, 32), format.bytes(10, 32));
    }

    #[test]
    fn weights_in_memory_take_at_most_3_percent_more_than_in_files() {
        for format in WeightFormat::ALL {
            let (stored, held) = (format.bytes(2048, 512), format.held(2048, 512));
            // Ten inputs begin a group, and a part of a block has all its scales.
            assert!(stored <= held && held * 100 <= stored * 103, "{format}: {held} of {stored}");
            assert!(format.held(32, 16) >= format.bytes(32, 16), "{format}");
        }
        assert_eq!(WeightFormat::Q4_0.held(40, 1), 16 * (2 * 16 + 2 * 2));
        assert_eq!(WeightFormat::Q6K.held(64, 16), 16 * (2 * 24 + 2 * 18));
        assert_eq!(WeightFormat::Q4K.bytes(32, 8), 144);
    }

    #[test]
    fn all_planes_of_a_matrix_have_the_size_of_the_matrix() {
        for format in WeightFormat::FLOATS {
            let held = format.held(3, 17);
            assert_eq!(format.held_planes(3, 17, format.planes()), held);
            assert_eq!(format.held_planes(3, 17, 1) * u64::from(format.planes()), held);
        }
        assert_eq!(WeightFormat::F16.held_planes(3, 17, 6), 3 * 32 * 6 / 8);
    }
}
