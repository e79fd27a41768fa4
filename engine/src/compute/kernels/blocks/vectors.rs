//! Vectors of neighbouring columns, which the kernels for matrices in blocks are written in.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use crate::weights::PANEL;
use galaxy_model::blocks::exponent;
use half::f16;

/// Functions of [`Vectors`]; what their callers promise stands there.
macro_rules! declared {
    ($($(#[$doc:meta])* fn $name:ident($self:ident $(, $arg:ident: $type:ty)* $(,)?) $(-> $out:ty)?;)+) => { $(
        $(#[$doc])*
        // SAFETY: a declaration.
        unsafe fn $name($self $(, $arg: $type)*) $(-> $out)?;
    )+ };
}

/// Vectors of so many columns, by some instructions.
///
/// # Safety
/// Of all functions but `pack`: the processor has the instructions, and pointers are readable, or writable, as far
/// as a vector goes.
pub(crate) trait Vectors: Copy {
    /// Columns of a vector: a divisor of [`PANEL`].
    const LANES: usize;
    /// Bytes of 32 packed activations: 64 for 16 bits each, less for 8.
    const PACKED: usize = 64;
    /// The number that `signed_codes` subtracts from codes.
    const BIAS: i32 = 0;
    /// Four codes of each column.
    type Codes: Copy;
    /// A sum of whole numbers for each column.
    type Sum: Copy;
    /// A number for each column.
    type Floats: Copy;

    /// Packs 32 activations into [`Vectors::PACKED`] bytes.
    fn pack(group: &[i16; 32], out: &mut [u8]);

    /// Fetches a line to the first-level cache, if there are instructions for it: a hint, which may point anywhere.
    fn fetch(self, _line: *const u8) {}
    declared! {
        fn load(self, from: *const u8) -> Self::Codes;
        /// The low halves of bytes.
        fn low(self, codes: Self::Codes) -> Self::Codes;
        /// The high halves of bytes.
        fn high(self, codes: Self::Codes) -> Self::Codes;
        /// Codes with bit `line` of each byte of `bits` as their fifth bit.
        fn fifth(self, codes: Self::Codes, bits: Self::Codes, line: usize) -> Self::Codes;
        /// Codes with the two bits from `2 * line` on of each byte of `bits` as their fifth and sixth.
        fn sixth(self, codes: Self::Codes, bits: Self::Codes, line: usize) -> Self::Codes;
        /// The value that a table has for each code.
        fn lookup(self, table: &[u8; 16], codes: Self::Codes) -> Self::Codes;

        /// Codes of 8 bits as `dot` reads them: less [`Vectors::BIAS`]. Shorter ones are read as they are.
        fn signed_codes(self, codes: Self::Codes) -> Self::Codes;

        fn start(self, from: i32) -> Self::Sum;
        /// Adds the products of the four codes of each column with activations `4 * line..` of those packed.
        fn dot(
            self,
            sum: Self::Sum,
            codes: Self::Codes,
            packed: *const u8,
            line: usize,
        ) -> Self::Sum;
        fn end(self, sum: Self::Sum) -> Self::Floats;

        fn zero(self) -> Self::Floats;
        fn splat(self, value: f32) -> Self::Floats;
        fn floats(self, from: *const f32) -> Self::Floats;
        fn store(self, to: *mut f32, values: Self::Floats);
        fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
        /// The sum `a * b + c`.
        fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
        fn minus(self, a: Self::Floats) -> Self::Floats;

        /// Widens 16-bit floats.
        fn halves(self, from: *const u8) -> Self::Floats;
        /// Widens signed bytes.
        fn signed(self, from: *const u8) -> Self::Floats;
        /// The scales of MXFP4: 2^(byte - 128).
        fn exponents(self, from: *const u8) -> Self::Floats;
        /// The low six bits of bytes.
        fn low_six(self, from: *const u8) -> Self::Floats;
        /// The low four bits of bytes, and above them the two highest of others.
        fn low_and_top(self, from: *const u8, top: *const u8) -> Self::Floats;
        /// The high four bits of bytes, and above them the two highest of others.
        fn high_and_top(self, from: *const u8, top: *const u8) -> Self::Floats;
    }
}

/// Functions of [`Vectors`] that only call intrinsics.
macro_rules! vectors {
    ($(fn $name:ident($self:ident $(, $arg:ident: $type:ty)*) $(-> $out:ty)? $body:block)+) => { $(
        // SAFETY: callers promise what the trait asks.
        #[inline(always)]
        unsafe fn $name($self $(, $arg: $type)*) $(-> $out)? {
            // SAFETY: by that promise the processor has these instructions, and pointers are good.
            #[allow(unused_unsafe)]
            unsafe {
                $body
            }
        }
    )+ };
}
pub(super) use vectors;

/// Arrays, of which the compiler makes what it can: a whole panel.
#[derive(Clone, Copy)]
pub(crate) struct Arrays;

/// # Safety
/// So many bytes are readable.
// SAFETY: callers promise what is asked above.
#[inline(always)]
unsafe fn bytes<const N: usize>(from: *const u8) -> [u8; N] {
    // SAFETY: by the promise; any bytes are an array of bytes.
    unsafe { from.cast::<[u8; N]>().read_unaligned() }
}

impl Vectors for Arrays {
    const LANES: usize = PANEL;
    type Codes = [u8; 4 * PANEL];
    type Sum = [i32; PANEL];
    type Floats = [f32; PANEL];

    fn pack(group: &[i16; 32], out: &mut [u8]) {
        for (out, value) in out.as_chunks_mut().0.iter_mut().zip(group) {
            *out = value.to_ne_bytes();
        }
    }

    vectors! {
        fn load(self, from: *const u8) -> Self::Codes { bytes(from) }
        fn low(self, codes: Self::Codes) -> Self::Codes { codes.map(|code| code & 15) }
        fn high(self, codes: Self::Codes) -> Self::Codes { codes.map(|code| code >> 4) }
        fn fifth(self, codes: Self::Codes, bits: Self::Codes, line: usize) -> Self::Codes {
            let mut codes = codes;
            for (code, bits) in codes.iter_mut().zip(bits) {
                *code |= (bits >> line & 1) << 4;
            }
            codes
        }
        fn sixth(self, codes: Self::Codes, bits: Self::Codes, line: usize) -> Self::Codes {
            let mut codes = codes;
            for (code, bits) in codes.iter_mut().zip(bits) {
                *code |= (bits >> (2 * line) & 3) << 4;
            }
            codes
        }
        fn lookup(self, table: &[u8; 16], codes: Self::Codes) -> Self::Codes {
            codes.map(|code| table[usize::from(code & 15)])
        }
        fn signed_codes(self, codes: Self::Codes) -> Self::Codes { codes }
        fn start(self, from: i32) -> Self::Sum { [from; PANEL] }
        fn dot(self, sum: Self::Sum, codes: Self::Codes, packed: *const u8, line: usize) -> Self::Sum {
            let mut sum = sum;
            let four: [[u8; 2]; 4] = packed.add(8 * line).cast::<[[u8; 2]; 4]>().read_unaligned();
            let four = four.map(|value| i32::from(i16::from_ne_bytes(value)));
            for (sum, codes) in sum.iter_mut().zip(codes.as_chunks::<4>().0) {
                for (code, value) in codes.iter().zip(four) {
                    *sum += i32::from(*code) * value;
                }
            }
            sum
        }
        fn end(self, sum: Self::Sum) -> Self::Floats { sum.map(|sum| sum as f32) }
        fn zero(self) -> Self::Floats { [0.0; PANEL] }
        fn splat(self, value: f32) -> Self::Floats { [value; PANEL] }
        fn floats(self, from: *const f32) -> Self::Floats { from.cast::<[f32; PANEL]>().read_unaligned() }
        fn store(self, to: *mut f32, values: Self::Floats) { to.cast::<[f32; PANEL]>().write_unaligned(values) }
        fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
            let mut a = a;
            for (a, b) in a.iter_mut().zip(b) {
                *a *= b;
            }
            a
        }
        fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
            let mut c = c;
            for ((a, b), c) in a.iter().zip(b).zip(&mut c) {
                *c += a * b;
            }
            c
        }
        fn minus(self, a: Self::Floats) -> Self::Floats { a.map(|a| -a) }
        fn halves(self, from: *const u8) -> Self::Floats {
            let halves = bytes::<{ 2 * PANEL }>(from);
            let mut out = [0.0; PANEL];
            for (out, half) in out.iter_mut().zip(halves.as_chunks().0) {
                *out = f16::from_le_bytes(*half).to_f32();
            }
            out
        }
        fn signed(self, from: *const u8) -> Self::Floats { bytes(from).map(|byte| f32::from(byte as i8)) }
        fn exponents(self, from: *const u8) -> Self::Floats { bytes(from).map(exponent) }
        fn low_six(self, from: *const u8) -> Self::Floats { bytes(from).map(|byte| f32::from(byte & 63)) }
        fn low_and_top(self, from: *const u8, top: *const u8) -> Self::Floats {
            let mut low = bytes::<PANEL>(from).map(|byte| byte & 15);
            for (low, top) in low.iter_mut().zip(bytes::<PANEL>(top)) {
                *low |= top >> 6 << 4;
            }
            low.map(f32::from)
        }
        fn high_and_top(self, from: *const u8, top: *const u8) -> Self::Floats {
            let mut high = bytes::<PANEL>(from).map(|byte| byte >> 4);
            for (high, top) in high.iter_mut().zip(bytes::<PANEL>(top)) {
                *high |= top >> 6 << 4;
            }
            high.map(f32::from)
        }
    }
}
