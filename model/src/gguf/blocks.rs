//! Values in blocks of few bits, as GGUF files have them.
//!
//! Values are those of the reference (`gguf.quants` of PyPI `gguf`) to the bit: the same products and sums in
//! f32, in the same order.

use galaxy_common::WeightFormat;
use half::f16;

/// Most values of a block.
pub(crate) const MOST_VALUES: usize = 256;

/// The values that 4 bits of IQ4 stand for.
const NOT_LINEAR: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values that 4 bits of MXFP4 stand for.
const FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The values of whole blocks. Bytes that make no whole block are left out; of a format without blocks, all.
pub(crate) fn decode(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    let Some(block) = format.block() else { return };
    let (values, size) = (block.values as usize, block.bytes as usize);
    let blocks = bytes.chunks_exact(size).zip(out.chunks_exact_mut(values));
    for (block, out) in blocks {
        match format {
            WeightFormat::Q4_0 => {
                let d = half(block, 0);
                nibbles(&block[2..18], out, |q| d * (f32::from(q) - 8.0));
            }
            WeightFormat::Q4_1 => {
                let (d, m) = (half(block, 0), half(block, 2));
                nibbles(&block[4..20], out, |q| d * f32::from(q) + m);
            }
            WeightFormat::Q5_0 => {
                let d = half(block, 0);
                let fifths = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
                fives(&block[6..22], fifths, out, |q| d * (f32::from(q) - 16.0));
            }
            WeightFormat::Q5_1 => {
                let (d, m) = (half(block, 0), half(block, 2));
                let fifths = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
                fives(&block[8..24], fifths, out, |q| d * f32::from(q) + m);
            }
            WeightFormat::Q8_0 => {
                let d = half(block, 0);
                for (value, q) in out.iter_mut().zip(&block[2..34]) {
                    *value = f32::from(*q as i8) * d;
                }
            }
            WeightFormat::Iq4Nl => {
                let d = half(block, 0);
                nibbles(&block[2..18], out, |q| d * f32::from(NOT_LINEAR[usize::from(q)]));
            }
            WeightFormat::Mxfp4 => {
                // 2^(e - 128), and half of the smallest normal number below that.
                let d = match block[0] {
                    e @ 0..=1 => f32::from_bits(0x0020_0000 << e),
                    e => f32::from_bits((u32::from(e) - 1) << 23),
                };
                nibbles(&block[1..17], out, |q| d * f32::from(FLOATS[usize::from(q)]));
            }
            WeightFormat::Q4K => k(block, &[], &block[16..144], out),
            WeightFormat::Q5K => k(block, &block[16..48], &block[48..176], out),
            WeightFormat::Q6K => sixes(block, out),
            WeightFormat::Iq4Xs => {
                let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
                for (sub, out) in out.chunks_exact_mut(32).enumerate() {
                    let low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
                    let scale = u16::from(low) | (high >> (2 * sub) & 3) << 4;
                    let d = d * (f32::from(scale) - 32.0);
                    let quants = &block[8 + 16 * sub..][..16];
                    nibbles(quants, out, |q| d * f32::from(NOT_LINEAR[usize::from(q)]));
                }
            }
            _ => {}
        }
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low halves of all bytes, then high ones.
fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (value(byte & 15), value(byte >> 4));
    }
}

/// The same with a fifth bit for each value.
fn fives(bytes: &[u8], fifths: u32, out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(bytes.len());
    for (at, ((low, high), byte)) in low.iter_mut().zip(high).zip(bytes).enumerate() {
        let fifth = |at: usize| ((fifths >> at & 1) as u8) << 4;
        *low = value(byte & 15 | fifth(at));
        *high = value(byte >> 4 | fifth(at + bytes.len()));
    }
}

/// Blocks of 256 with scales and minima of 6 bits for 32 values each.
fn k(block: &[u8], fifths: &[u8], quants: &[u8], out: &mut [f32]) {
    let (d, dmin, s) = (half(block, 0), half(block, 2), &block[4..16]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, least) = match sub {
            0..4 => (s[sub] & 63, s[sub + 4] & 63),
            _ => (s[sub + 4] & 15 | s[sub - 4] >> 6 << 4, s[sub + 4] >> 4 | s[sub] >> 6 << 4),
        };
        let (d, m) = (d * f32::from(scale), dmin * f32::from(least));
        let bytes = &quants[32 * (sub / 2)..][..32];
        for (at, (value, byte)) in out.iter_mut().zip(bytes).enumerate() {
            let fifth = fifths.get(at).map_or(0, |bits| (bits >> sub & 1) << 4);
            let q = byte >> (4 * (sub % 2)) & 15 | fifth;
            *value = d * f32::from(q) - m;
        }
    }
}

fn sixes(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) =
        (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (at, value) in out.iter_mut().enumerate().take(MOST_VALUES) {
        let (part, within) = (at / 128, at % 128);
        let (quarter, l) = (within / 32, within % 32);
        let four = low[64 * part + l + 32 * (quarter % 2)] >> (4 * (quarter / 2)) & 15;
        let two = high[32 * part + l] >> (2 * quarter) & 3;
        let q = i32::from(four | two << 4) - 32;
        let scale = f32::from(scales[at / 16] as i8);
        *value = d * scale * q as f32;
    }
}
