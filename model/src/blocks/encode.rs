//! Rounding values to blocks of few bits.
//!
//! The scale of a `q8_0` block is that of its largest value. For `q6_k` and `q4_0` several scales near that one are
//! tried, and the one with the least squared error is taken; values are rounded with the scale as it is stored. Sums
//! are added up in a fixed order, so that every device gets the same bits from the same values.

use super::{MOST_VALUES, decode};
use galaxy_common::WeightFormat;
use half::f16;

/// How many scales are tried on each side of the largest value's own.
const TRIED: i32 = 5;
/// The relative step from one inverse scale that is tried to the next.
const STEP: f32 = 0.02;
/// How many partial sums are added up, so that the compiler computes a sum with vector instructions.
const LANES: usize = 8;
/// The most bytes that a block has, of the formats that values are rounded to here.
const MOST_BYTES: usize = 210;

/// Whether values can be rounded to a format: `q8_0`, `q6_k` and `q4_0`.
pub(crate) fn encodes(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Q8_0 | WeightFormat::Q6K | WeightFormat::Q4_0)
}

/// Rounds values to whole blocks. Values that fill no whole block are left out; for a format that [`encodes`] does not
/// know, all are.
pub(crate) fn encode(format: WeightFormat, values: &[f32], out: &mut [u8]) {
    let Some(block) = format.block() else { return };
    let (count, size) = (block.values as usize, block.bytes as usize);
    for (values, out) in values.chunks_exact(count).zip(out.chunks_exact_mut(size)) {
        match format {
            WeightFormat::Q8_0 => eights(values, out),
            WeightFormat::Q6K => sixes(values, out),
            WeightFormat::Q4_0 => fours(values, out),
            _ => {}
        }
    }
}

/// Replaces values by what they decode to after they were rounded to whole blocks. Nothing changes for a format that
/// [`encodes`] does not know.
pub(crate) fn round(format: WeightFormat, values: &mut [f32]) {
    let Some(block) = format.block().filter(|_| encodes(format)) else { return };
    let (mut bytes, size) = ([0; MOST_BYTES], block.bytes as usize);
    for values in values.chunks_exact_mut((block.values as usize).min(MOST_VALUES)) {
        encode(format, values, &mut bytes[..size]);
        decode(format, &bytes[..size], values);
    }
}

/// The whole number nearest to `value * by`, the even one of two, clamped from `least` to `most`: exact for numbers
/// below 2^22, as scaled values are.
fn whole(value: f32, by: f32, (least, most): (f32, f32)) -> f32 {
    // At this size neighbouring floats are 1 apart, and the vector units of every processor can add.
    const WHOLE: f32 = 12_582_912.0;
    ((value * by).clamp(least, most) + WHOLE) - WHOLE
}

/// The inverse of a scale, or 0 where the scale is too near to zero to have one.
fn inverse(scale: f32) -> f32 {
    if scale.abs() < 1e-30 { 0.0 } else { 1.0 / scale }
}

/// The one of a and b that is farther from zero.
fn farther(a: f32, b: f32) -> f32 {
    if b.abs() > a.abs() { b } else { a }
}

/// The scale for values that are rounded to whole numbers from `least`, which is negative, to `-least - 1`.
fn scale_of(values: &[f32], least: f32) -> f32 {
    // The largest becomes the least number: there is one more of them below zero than above.
    let first = inverse(values.iter().copied().fold(0.0, farther)) * least;
    if first == 0.0 {
        return 0.0;
    }
    let (mut best, mut found) = (0.0f32, 0.0f32);
    for step in -TRIED..=TRIED {
        let by = first * (1.0 + STEP * step as f32);
        let (mut both, mut squares) = ([0.0f32; LANES], [0.0f32; LANES]);
        for values in values.as_chunks::<LANES>().0 {
            for at in 0..LANES {
                let whole = whole(values[at], by, (least, -least - 1.0));
                both[at] += values[at] * whole;
                squares[at] += whole * whole;
            }
        }
        let both: f32 = both.iter().sum();
        let scale = both * inverse(squares.iter().sum());
        // What the best scale for these whole numbers takes off the sum of the squared values.
        if both * scale > best {
            (best, found) = (both * scale, scale);
        }
    }
    found
}

/// Stores a scale as f16, and returns the value that was stored.
fn put(out: &mut [u8], at: usize, scale: f32) -> f32 {
    let half = f16::from_f32(scale.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

fn eights(values: &[f32], out: &mut [u8]) {
    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let by = inverse(put(out, 0, most / 127.0));
    for (value, out) in values.iter().zip(&mut out[2..]) {
        *out = whole(*value, by, (-128.0, 127.0)) as i8 as u8;
    }
}

fn fours(values: &[f32], out: &mut [u8]) {
    let by = inverse(put(out, 0, scale_of(values, -8.0)));
    let code = |value: f32| (whole(value, by, (-8.0, 7.0)) + 8.0) as u8;
    let (low, high) = values.split_at(16);
    for ((low, high), out) in low.iter().zip(high).zip(&mut out[2..]) {
        *out = code(*low) | code(*high) << 4;
    }
}

/// Encodes a block of `q6_k`: sixteen scales of 8 bits, which share one scale, that of the largest of them.
fn sixes(values: &[f32], out: &mut [u8]) {
    let mut scales = [0.0f32; 16];
    for (scale, values) in scales.iter_mut().zip(values.chunks_exact(16)) {
        *scale = scale_of(values, -32.0);
    }
    let d = put(out, 208, scales.iter().copied().fold(0.0, farther) / -128.0);
    let by = inverse(d);
    out[..192].fill(0);
    for (at, (values, scale)) in values.chunks_exact(16).zip(scales).enumerate() {
        let scale = whole(scale, by, (-128.0, 127.0));
        out[192 + at] = scale as i8 as u8;
        let by = inverse(d * scale);
        for (value, place) in values.iter().zip(16 * at..) {
            let code = (whole(*value, by, (-32.0, 31.0)) + 32.0) as u8;
            let (part, quarter, l) = (place / 128, place % 128 / 32, place % 32);
            out[64 * part + l + 32 * (quarter % 2)] |= (code & 15) << (4 * (quarter / 2));
            out[128 + 32 * part + l] |= (code >> 4) << (2 * quarter);
        }
    }
}

#[cfg(test)]
mod tests;
