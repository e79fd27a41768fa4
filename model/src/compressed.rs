//! Matrices of compressed-tensors checkpoints (`pack-quantized`): codes packed into words, with scales in a tensor of
//! their own. They are read as blocks of GGUF files, byte by byte what such a file would have.

use crate::error::ModelError;
use galaxy_common::{WeightBlock, WeightFormat};
use half::{bf16, f16};
use serde_json::Value;

/// Inputs in a block.
const BLOCK: u64 = WeightBlock::GROUP as u64;
/// The most blocks that are read at once: half a megabyte of codes of 4 bits.
const MOST_BLOCKS: u64 = 1 << 15;
/// Outputs whose zero points of 4 bits stand in one word.
const ZEROS_IN_WORD: u64 = 8;

/// The endings of the tensors that a matrix called `NAME.weight` is stored in.
pub(crate) const CODES: &str = ".weight_packed";
pub(crate) const SCALES: &str = ".weight_scale";
pub(crate) const ZEROS: &str = ".weight_zero_point";
pub(crate) const SHAPE: &str = ".weight_shape";
pub(crate) const ORDER: &str = ".weight_g_idx";

/// A matrix `[outputs, inputs]` whose codes and scales stand in several tensors.
pub(crate) struct CompressedMatrix {
    /// The name of the matrix.
    pub(crate) name: String,
    pub(crate) outputs: u64,
    pub(crate) inputs: u64,
    /// The blocks that it is read as: Q8_0, Q4_0, or Q5_0 where it has zero points, since a code of 4 bits less another
    /// one takes 5.
    pub(crate) format: WeightFormat,
    /// Codes in words of 32 bits, the first in the lowest bits: `[outputs, inputs]`.
    pub(crate) codes: Place,
    /// A scale for each output and group of inputs: `[outputs, groups]`.
    pub(crate) scales: Place,
    /// The format of the scales.
    pub(crate) scale: WeightFormat,
    /// Codes that stand for zero, in words that hold those of eight outputs: `[outputs / 8, groups]`.
    pub(crate) zeros: Option<Place>,
    /// Inputs that share a scale.
    pub(crate) group: u64,
}

/// Where a tensor begins: the number of its file, and bytes from the start of that.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) shard: usize,
    pub(crate) offset: u64,
}

/// Fills a buffer with the bytes of a file from a place on.
type Read<'a> = dyn Fn(&mut [u8], Place) -> Result<(), ModelError> + 'a;

impl Place {
    fn plus(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

impl CompressedMatrix {
    /// The format in which a matrix is read whose codes have so many bits; `None` where there is no such format.
    pub(crate) fn format(bits: u64, zeros: bool) -> Option<WeightFormat> {
        match (bits, zeros) {
            (8, false) => Some(WeightFormat::Q8_0),
            (4, false) => Some(WeightFormat::Q4_0),
            (4, true) => Some(WeightFormat::Q5_0),
            _ => None,
        }
    }

    /// The bytes that all its blocks take.
    pub(crate) fn bytes(&self) -> u64 {
        self.format.bytes(self.inputs, self.outputs)
    }

    /// Fills `out` with the bytes of its blocks from byte `at` on, output by output. `read` reads the files.
    ///
    /// # Errors
    /// When a file cannot be read, or a scale cannot be held in 16 bits.
    pub(crate) fn read(&self, out: &mut [u8], at: u64, read: &Read<'_>) -> Result<(), ModelError> {
        let size = self.format.bytes(BLOCK, 1);
        let (first, end) = (at / size, (at + out.len() as u64).div_ceil(size));
        let mut block = vec![0; size as usize];
        let mut place = first;
        while place < end {
            let count = MOST_BLOCKS.min(end - place);
            let part = Part::read(self, place, count, read)?;
            for number in place..place + count {
                part.write(self, number, &mut block)?;
                let begin = number * size;
                let (from, to) = (begin.max(at), (begin + size).min(at + out.len() as u64));
                out[(from - at) as usize..(to - at) as usize]
                    .copy_from_slice(&block[(from - begin) as usize..(to - begin) as usize]);
            }
            place += count;
        }
        Ok(())
    }

    /// Bytes of the codes of a block in the file.
    fn code_bytes(&self) -> u64 {
        match self.format {
            WeightFormat::Q8_0 => BLOCK,
            _ => BLOCK / 2,
        }
    }

    /// Blocks of an output.
    fn blocks(&self) -> u64 {
        self.inputs / BLOCK
    }

    /// Groups of an output.
    fn groups(&self) -> u64 {
        self.inputs / self.group
    }

    /// The output of a block, and the group of inputs that it is in.
    fn group_of(&self, block: u64) -> (u64, u64) {
        (block / self.blocks(), block % self.blocks() * BLOCK / self.group)
    }

    /// The place of a block's scale among all scales.
    fn scale_of(&self, block: u64) -> u64 {
        let (output, group) = self.group_of(block);
        output * self.groups() + group
    }
}

/// What the files have of some neighbouring blocks.
struct Part {
    /// The first block.
    first: u64,
    codes: Vec<u8>,
    /// The place of the first scale that was read.
    first_scale: u64,
    scales: Vec<u8>,
    /// The first word of zero points that was read.
    first_zero: u64,
    zeros: Vec<u8>,
}

impl Part {
    fn read(
        of: &CompressedMatrix,
        first: u64,
        count: u64,
        read: &Read<'_>,
    ) -> Result<Self, ModelError> {
        let last = first + count - 1;
        let take = |place: Place, from: u64, end: u64, width: u64| {
            let mut bytes = vec![0; ((end - from) * width) as usize];
            read(&mut bytes, place.plus(from * width)).map(|()| bytes)
        };
        let first_scale = of.scale_of(first);
        let first_zero = of.group_of(first).0 / ZEROS_IN_WORD * of.groups();
        let end_zero = (of.group_of(last).0 / ZEROS_IN_WORD + 1) * of.groups();
        Ok(Self {
            first,
            codes: take(of.codes, first, first + count, of.code_bytes())?,
            first_scale,
            scales: take(of.scales, first_scale, of.scale_of(last) + 1, of.scale.bytes(1, 1))?,
            first_zero,
            zeros: match of.zeros {
                Some(zeros) => take(zeros, first_zero, end_zero, 4)?,
                None => Vec::new(),
            },
        })
    }

    /// Writes a block as a GGUF file has it.
    fn write(&self, of: &CompressedMatrix, block: u64, out: &mut [u8]) -> Result<(), ModelError> {
        let width = of.code_bytes() as usize;
        let codes = &self.codes[(block - self.first) as usize * width..][..width];
        let scale = self.scale(of, block)?;
        out[..2].copy_from_slice(&scale.to_le_bytes());
        // Neighbours share a byte in the file, values 16 apart in a block.
        let code = |at: usize| codes[at / 2] >> (4 * (at % 2)) & 15;
        match of.format {
            WeightFormat::Q8_0 => {
                for (out, code) in out[2..].iter_mut().zip(codes) {
                    *out = code ^ 0x80;
                }
            }
            WeightFormat::Q5_0 => {
                let zero = self.zero(of, block);
                let code = |at: usize| code(at) + 16 - zero;
                let fifths = (0..BLOCK as usize).map(|at| u32::from(code(at) >> 4) << at);
                out[2..6].copy_from_slice(&fifths.fold(0, |all, bit| all | bit).to_le_bytes());
                for (at, out) in out[6..].iter_mut().enumerate() {
                    *out = code(at) & 15 | (code(at + 16) & 15) << 4;
                }
            }
            _ => {
                for (at, out) in out[2..].iter_mut().enumerate() {
                    *out = code(at) | code(at + 16) << 4;
                }
            }
        }
        Ok(())
    }

    /// The scale of a block.
    fn scale(&self, of: &CompressedMatrix, block: u64) -> Result<f16, ModelError> {
        let at = (of.scale_of(block) - self.first_scale) as usize;
        let two = |at: usize| [self.scales[at], self.scales[at + 1]];
        let scale = match of.scale {
            WeightFormat::F16 => f16::from_le_bytes(two(2 * at)).to_f32(),
            WeightFormat::Bf16 => bf16::from_le_bytes(two(2 * at)).to_f32(),
            _ => {
                let ([a, b], [c, d]) = (two(4 * at), two(4 * at + 2));
                f32::from_le_bytes([a, b, c, d])
            }
        };
        let held = f16::from_f32(scale);
        match held.is_finite() {
            true => Ok(held),
            false => Err(ModelError::Scale { tensor: of.name.clone(), scale }),
        }
    }

    /// The code that stands for zero in a block.
    fn zero(&self, of: &CompressedMatrix, block: u64) -> u8 {
        let (output, group) = of.group_of(block);
        let word = output / ZEROS_IN_WORD * of.groups() + group - self.first_zero;
        let place = output % ZEROS_IN_WORD;
        self.zeros[(4 * word + place / 2) as usize] >> (4 * (place % 2)) & 15
    }
}

/// Checks what a `quantization_config` asks for: codes of 4 or 8 bits in `pack-quantized`, and nothing beside. Gives
/// the names of fields that are not known.
///
/// # Errors
/// The field that asks for something else, and its value.
pub(crate) fn check(config: &Value) -> Result<Vec<String>, (String, Value)> {
    let mut unknown = Vec::new();
    check_fields("", config, of_config, &mut unknown)?;
    for (group, value) in config["config_groups"].as_object().into_iter().flatten() {
        let group = format!("config_groups.{group}");
        // A list of targets has a scheme by the group's name.
        if value.is_array() && !SCHEMES.iter().any(|scheme| group.ends_with(scheme)) {
            return Err((group, value.clone()));
        }
        check_fields(&format!("{group}."), value, of_group, &mut unknown)?;
        check_fields(&format!("{group}.weights."), &value["weights"], of_weights, &mut unknown)?;
    }
    Ok(unknown)
}

/// The schemes that a group may have by its name: they ask for codes of 4 or 8 bits and nothing beside.
const SCHEMES: [&str; 3] = [".W4A16", ".W4A16_ASYM", ".W8A16"];

/// Checks the fields of an object. `fits` says whether a field has a value that is done here, and `None` of one that is
/// not known.
fn check_fields(
    before: &str,
    object: &Value,
    fits: impl Fn(&str, &Value) -> Option<bool>,
    unknown: &mut Vec<String>,
) -> Result<(), (String, Value)> {
    for (name, value) in object.as_object().into_iter().flatten() {
        match fits(name, value) {
            Some(true) => {}
            Some(false) => return Err((format!("{before}{name}"), value.clone())),
            None => unknown.push(format!("{before}{name}")),
        }
    }
    Ok(())
}

fn of_config(name: &str, value: &Value) -> Option<bool> {
    Some(match name {
        "config_groups"
        | "quant_method"
        | "quantization_status"
        | "global_compression_ratio"
        | "ignore"
        | "version" => true,
        // The format of each group is its own.
        "format" => is_packed(value) || *value == "mixed-precision",
        "kv_cache_scheme" | "moe_sparsity_config" => value.is_null(),
        "sparsity_config" => is_empty(value) || value["format"] == "dense",
        "transform_config" => is_empty(value),
        _ => return None,
    })
}

fn of_group(name: &str, value: &Value) -> Option<bool> {
    Some(match name {
        "targets" | "weights" => true,
        "format" => value.is_null() || is_packed(value),
        "input_activations" | "output_activations" => value.is_null(),
        _ => return None,
    })
}

/// Of the weights of a group: how many inputs share a scale, and whether there are zero points, is what the tensors
/// say.
fn of_weights(name: &str, value: &Value) -> Option<bool> {
    Some(match name {
        "num_bits" => *value == 4 || *value == 8,
        "type" => *value == "int",
        "strategy" => *value == "group" || *value == "channel",
        "dynamic" => *value == false,
        // In the order of "weight", columns stand where they belong.
        "actorder" => {
            value.is_null() || *value == "weight" || *value == "static" || *value == false
        }
        "block_structure" => value.is_null(),
        "group_size" | "symmetric" | "observer" | "observer_kwargs" | "scale_dtype"
        | "zp_dtype" => true,
        _ => return None,
    })
}

fn is_packed(value: &Value) -> bool {
    *value == "pack-quantized"
}

/// Whether a value asks for nothing.
fn is_empty(value: &Value) -> bool {
    let nothing = |value: &Value| match value {
        Value::Null => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    match value {
        Value::Object(fields) => fields.values().all(nothing),
        value => nothing(value),
    }
}

#[cfg(test)]
mod tests;
