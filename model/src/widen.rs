//! Converts the values of any format to f32.
// Hot path of loading: no locks, no logging, no allocation.

use crate::blocks::decode;
use galaxy_common::WeightFormat;
use half::{bf16, f16};

/// Evaluates `$body` with `$widen` as the function that converts the bytes of one value of a format to f32, or
/// `$blocks` for formats whose values are in blocks.
macro_rules! each_value {
    ($format:expr, $widen:ident => $body:expr, $blocks:expr) => {
        match $format {
            WeightFormat::F32 => {
                let $widen = f32::from_le_bytes;
                $body
            }
            WeightFormat::F16 => {
                let $widen = |bytes: [u8; 2]| f16::from_le_bytes(bytes).to_f32();
                $body
            }
            WeightFormat::Bf16 => {
                let $widen = |bytes: [u8; 2]| bf16::from_le_bytes(bytes).to_f32();
                $body
            }
            _ => $blocks,
        }
    };
}

pub(crate) use each_value;

/// Converts the values of a format to f32.
pub(crate) fn widen(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    each_value!(format, widen => {
        for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *value = widen(*bytes);
        }
    }, decode(format, bytes, out));
}
