//! Rounding values to blocks of few bits.
//!
//! A block's scale is the one, of several about the largest value, whose rounded values are nearest to the block in
//! squares; values are rounded with the scale as it is stored.

use galaxy_common::WeightFormat;
use half::f16;

/// Scales that are tried: those of the largest value, and so many a little smaller or larger.
const TRIED: i32 = 5;

/// Whether values can be rounded to a format: `q8_0`, `q6_k` and `q4_0`.
pub(crate) fn encodes(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Q8_0 | WeightFormat::Q6K | WeightFormat::Q4_0)
}

/// Rounds values to whole blocks. Values that make no whole block are left out; for a format that
/// [`encodes`] does not know, all.
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

/// A number whose distance from the next is its scale: what `value` is, and what it is rounded to.
fn rounded(value: f32, by: f32, (least, most): (f32, f32)) -> f32 {
    (value * by).round_ties_even().clamp(least, most)
}

/// The inverse of a scale; 0 where there is none.
fn inverse(scale: f32) -> f32 {
    if scale.abs() < 1e-30 { 0.0 } else { 1.0 / scale }
}

/// The scale for values that become whole numbers from `least`, which is below zero, to `-least - 1`.
fn scale_of(values: &[f32], least: f32) -> f32 {
    let largest = |most: f32, value: &f32| if value.abs() > most.abs() { *value } else { most };
    let largest = values.iter().fold(0.0, largest);
    // The largest becomes the least number: there is one more of them below zero than above.
    let first = inverse(largest) * least;
    if first == 0.0 {
        return 0.0;
    }
    let (mut best, mut found) = (0.0f32, 0.0f32);
    for step in -TRIED..=TRIED {
        let by = first * (1.0 + 0.02 * step as f32);
        let (mut both, mut squares) = (0.0f32, 0.0f32);
        for value in values {
            let whole = rounded(*value, by, (least, -least - 1.0));
            both += value * whole;
            squares += whole * whole;
        }
        // What the best scale for these whole numbers takes from the error.
        let gain = both * both * inverse(squares);
        if gain > best {
            (best, found) = (gain, both * inverse(squares));
        }
    }
    found
}

fn put(out: &mut [u8], at: usize, scale: f32) -> f32 {
    let half = f16::from_f32(scale);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

fn eights(values: &[f32], out: &mut [u8]) {
    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let by = inverse(put(out, 0, most / 127.0));
    for (value, out) in values.iter().zip(&mut out[2..]) {
        *out = rounded(*value, by, (-127.0, 127.0)) as i8 as u8;
    }
}

fn fours(values: &[f32], out: &mut [u8]) {
    let by = inverse(put(out, 0, scale_of(values, -8.0)));
    let code = |value: f32| (rounded(value, by, (-8.0, 7.0)) + 8.0) as u8;
    let (low, high) = values.split_at(16);
    for ((low, high), out) in low.iter().zip(high).zip(&mut out[2..]) {
        *out = code(*low) | code(*high) << 4;
    }
}

/// Sixteen scales of eight bits, whose scale is that of the largest.
fn sixes(values: &[f32], out: &mut [u8]) {
    let mut scales = [0.0f32; 16];
    for (scale, values) in scales.iter_mut().zip(values.chunks_exact(16)) {
        *scale = scale_of(values, -32.0);
    }
    let largest = |most: f32, scale: &f32| if scale.abs() > most.abs() { *scale } else { most };
    let d = put(out, 208, scales.iter().fold(0.0, largest) / -128.0);
    let by = inverse(d);
    out[..192].fill(0);
    for (at, (values, scale)) in values.chunks_exact(16).zip(scales).enumerate() {
        let whole = rounded(scale, by, (-128.0, 127.0));
        out[192 + at] = whole as i8 as u8;
        let by = inverse(d * whole);
        for (value, place) in values.iter().zip(16 * at..) {
            let code = (rounded(*value, by, (-32.0, 31.0)) + 32.0) as u8;
            let (part, quarter, l) = (place / 128, place % 128 / 32, place % 32);
            out[64 * part + l + 32 * (quarter % 2)] |= (code & 15) << (4 * (quarter / 2));
            out[128 + 32 * part + l] |= (code >> 4) << (2 * quarter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::blocks::decode, *};

    /// Values whose error ggml's own tests bound: 0.1 + 2 cos(i).
    fn waves() -> Vec<f32> {
        (0..4096).map(|at| 0.1 + 2.0 * (at as f32).cos()).collect()
    }

    fn again(format: WeightFormat, values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; format.bytes(values.len() as u64, 1) as usize];
        encode(format, values, &mut bytes);
        let mut out = vec![f32::NAN; values.len()];
        decode(format, &bytes, &mut out);
        out
    }

    #[test]
    fn what_is_rounded_is_near_to_what_it_was() {
        let values = waves();
        for (format, most) in
            [(WeightFormat::Q8_0, 1e-4), (WeightFormat::Q6K, 4e-4), (WeightFormat::Q4_0, 2e-3)]
        {
            let squares = values.iter().zip(again(format, &values)).map(|(a, b)| (a - b).powi(2));
            let error = squares.sum::<f32>().sqrt() / values.len() as f32;
            assert!(error <= most, "{format}: {error}");
        }
    }

    #[test]
    fn nothing_and_what_is_on_the_grid_stay() {
        for format in WeightFormat::ALL.into_iter().filter(|format| encodes(*format)) {
            assert_eq!(again(format, &[0.0; 256]), [0.0; 256], "{format}");
            let twice = again(format, &again(format, &waves()));
            let once = again(format, &waves());
            let off = twice.iter().zip(&once).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 2e-2, "{format}: {off}");
            let large = again(format, &[3e4; 256]);
            assert!(large.iter().all(|value| (value - 3e4).abs() < 500.0), "{format}");
        }
    }
}
