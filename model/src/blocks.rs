//! Values in blocks of few bits: how files have them, and what they stand for.
//!
//! A block has a code of a few bits for each value, and scales and minima that its values share. Values are those of
//! the reference (`gguf.quants` of PyPI `gguf`) to the bit: the same products and sums in f32, in the same order.

mod encode;

pub(crate) use encode::{encode, encodes, round};

use galaxy_common::{WeightBlock, WeightFormat};
use half::f16;

/// The most values that a block of any format has.
pub(crate) const MOST_VALUES: usize = 256;
/// The most bytes that the header of a block has, whatever its format.
pub const MOST_HEADER: usize = 18;
/// Values of a group: they are decoded together.
const GROUP: usize = WeightBlock::GROUP as usize;

/// The values that the codes of IQ4 stand for.
pub const NOT_LINEAR: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values that the codes of MXFP4 stand for.
pub const FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The scale of MXFP4 for values of [`FLOATS`]: 2^(e - 128), which is a subnormal number where e is 0 or 1.
pub const fn exponent(e: u8) -> f32 {
    match e {
        0..=1 => f32::from_bits(0x0020_0000 << e),
        _ => f32::from_bits((e as u32 - 1) << 23),
    }
}

/// Decodes whole blocks to f32. Bytes that fill no whole block are left out; of a format without blocks, all are.
pub(crate) fn decode(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    let Some(block) = format.block() else { return };
    let (values, size) = (block.values as usize, block.bytes as usize);
    for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(values)) {
        let header = header(format, block);
        for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
            let codes = codes(format, block, group);
            decode_group(format, &header, group, &codes, out);
        }
    }
}

/// Decodes one group of a block, given its header and its codes.
fn decode_group(
    format: WeightFormat,
    header: &[u8; MOST_HEADER],
    group: usize,
    codes: &[u8; GROUP],
    out: &mut [f32],
) {
    let half = |at: usize| f16::from_le_bytes([header[at], header[at + 1]]).to_f32();
    let signed = |at: usize| f32::from(header[at] as i8);
    let mut each = |value: &dyn Fn(usize, u8) -> f32| {
        for (at, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            *out = value(at, *code);
        }
    };
    let linear = |code: u8| f32::from(NOT_LINEAR[usize::from(code)]);
    match format {
        WeightFormat::Q8_0 => each(&|_, q| half(0) * (f32::from(q) - 128.0)),
        WeightFormat::Q4_0 => each(&|_, q| half(0) * (f32::from(q) - 8.0)),
        WeightFormat::Q5_0 => each(&|_, q| half(0) * (f32::from(q) - 16.0)),
        WeightFormat::Q4_1 | WeightFormat::Q5_1 => each(&|_, q| half(0) * f32::from(q) + half(2)),
        WeightFormat::Q4K | WeightFormat::Q5K => {
            let s = &header[4..16];
            let (scale, least) = match group {
                0..4 => (s[group] & 63, s[group + 4] & 63),
                _ => {
                    let both = s[group + 4];
                    (both & 15 | s[group - 4] >> 6 << 4, both >> 4 | s[group] >> 6 << 4)
                }
            };
            let (d, m) = (half(0) * f32::from(scale), half(2) * f32::from(least));
            each(&|_, q| d * f32::from(q) - m);
        }
        WeightFormat::Q6K => {
            let scale = |at: usize| half(0) * signed(2 + 2 * group + at / 16);
            each(&|at, q| scale(at) * (f32::from(q) - 32.0));
        }
        WeightFormat::Iq4Nl => each(&|_, q| half(0) * linear(q)),
        WeightFormat::Iq4Xs => {
            let d = half(0) * signed(2 + group);
            each(&|_, q| d * linear(q));
        }
        WeightFormat::Mxfp4 => {
            each(&|_, q| exponent(header[0]) * f32::from(FLOATS[usize::from(q)]));
        }
        _ => {}
    }
}

/// The bytes that hold the codes of a group of 32 values, where a file has two codes of 4 bits in each byte: the low
/// halves are the codes of the first 16 values. `None` for formats that store their codes otherwise.
pub fn pairs(format: WeightFormat, block: &[u8], group: usize) -> Option<&[u8]> {
    match format {
        WeightFormat::Q4_0 | WeightFormat::Iq4Nl => Some(&block[2..18]),
        WeightFormat::Q4_1 => Some(&block[4..20]),
        WeightFormat::Mxfp4 => Some(&block[1..17]),
        WeightFormat::Iq4Xs => Some(&block[8 + 16 * group..][..16]),
        _ => None,
    }
}

/// The codes of a group of 32 values of a block: numbers of 4, 5, 6 or 8 bits, those of 8 bits with 128 added.
pub fn codes(format: WeightFormat, block: &[u8], group: usize) -> [u8; GROUP] {
    let mut codes = [0; GROUP];
    if let Some(pairs) = pairs(format, block, group) {
        halves(pairs, &mut codes);
        return codes;
    }
    match format {
        WeightFormat::Q8_0 => {
            for (code, byte) in codes.iter_mut().zip(&block[2..34]) {
                *code = byte ^ 0x80;
            }
        }
        WeightFormat::Q5_0 => {
            halves(&block[6..22], &mut codes);
            fifths(&block[2..6], &mut codes);
        }
        WeightFormat::Q5_1 => {
            halves(&block[8..24], &mut codes);
            fifths(&block[4..8], &mut codes);
        }
        WeightFormat::Q4K | WeightFormat::Q5K => {
            let fives = format == WeightFormat::Q5K;
            let first = if fives { 48 } else { 16 };
            let bytes = &block[first + 32 * (group / 2)..][..32];
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (4 * (group % 2)) & 15;
            }
            if fives {
                for (code, bits) in codes.iter_mut().zip(&block[16..48]) {
                    *code |= (bits >> group & 1) << 4;
                }
            }
        }
        WeightFormat::Q6K => {
            let (part, quarter) = (group / 4, group % 4);
            let low = &block[64 * part + 32 * (quarter % 2)..][..32];
            let high = &block[128 + 32 * part..][..32];
            for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
                *code = low >> (4 * (quarter / 2)) & 15 | (high >> (2 * quarter) & 3) << 4;
            }
        }
        _ => {}
    }
    codes
}

/// Unpacks codes of 4 bits: the low halves of all bytes, then the high halves.
fn halves(bytes: &[u8], codes: &mut [u8; GROUP]) {
    let (low, high) = codes.split_at_mut(GROUP / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Adds a fifth bit to each code.
fn fifths(bytes: &[u8], codes: &mut [u8; GROUP]) {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (at, code) in codes.iter_mut().enumerate() {
        *code |= ((bits >> at & 1) as u8) << 4;
    }
}

/// The header of a block: its scales and minima, those of 16 bits first. They are as the file has them, except the
/// scales of `IQ4_XS`, which become signed bytes.
pub fn header(format: WeightFormat, block: &[u8]) -> [u8; MOST_HEADER] {
    let mut header = [0; MOST_HEADER];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    match format {
        WeightFormat::Q8_0 | WeightFormat::Q4_0 | WeightFormat::Q5_0 | WeightFormat::Iq4Nl => {
            put(0, &block[..2]);
        }
        WeightFormat::Q4_1 | WeightFormat::Q5_1 => put(0, &block[..4]),
        WeightFormat::Q4K | WeightFormat::Q5K => put(0, &block[..16]),
        WeightFormat::Mxfp4 => put(0, &block[..1]),
        WeightFormat::Q6K => {
            put(0, &block[208..210]);
            put(2, &block[192..208]);
        }
        WeightFormat::Iq4Xs => {
            put(0, &block[..2]);
            let high = u16::from_le_bytes([block[2], block[3]]);
            for group in 0..8 {
                let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
                let scale = low | ((high >> (2 * group) & 3) as u8) << 4;
                put(2 + group, &[scale.wrapping_sub(32)]);
            }
        }
        _ => {}
    }
    header
}
