//! Vectors of columns in NEON, with its products of four bytes and without.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::vectors::{Vectors, vectors};
use std::arch::{aarch64::*, asm};

/// NEON, whose vectors are a quarter of a panel. Activations are 16 bits wide.
#[derive(Clone, Copy)]
pub(crate) struct Neon;
/// NEON with products of four bytes, whose vectors are a quarter of a panel. Activations are in planes
/// of 8 bits.
#[derive(Clone, Copy)]
pub(crate) struct NeonDot<const PLANES: usize>;

/// The functions that both have in common.
macro_rules! quarter_panels {
    () => {
        vectors! {
            fn load(self, from: *const u8) -> uint8x16_t { vld1q_u8(from) }
            fn low(self, codes: uint8x16_t) -> uint8x16_t { vandq_u8(codes, vdupq_n_u8(15)) }
            fn high(self, codes: uint8x16_t) -> uint8x16_t { vshrq_n_u8::<4>(codes) }
            fn fifth(self, codes: uint8x16_t, bits: uint8x16_t, line: usize) -> uint8x16_t {
                let bits = vshlq_u8(bits, vdupq_n_s8(4 - line as i8));
                vorrq_u8(codes, vandq_u8(bits, vdupq_n_u8(0x10)))
            }
            fn sixth(self, codes: uint8x16_t, bits: uint8x16_t, line: usize) -> uint8x16_t {
                let bits = vshlq_u8(bits, vdupq_n_s8(4 - 2 * line as i8));
                vorrq_u8(codes, vandq_u8(bits, vdupq_n_u8(0x30)))
            }
            fn lookup(self, table: &[u8; 16], codes: uint8x16_t) -> uint8x16_t {
                vqtbl1q_u8(vld1q_u8(table.as_ptr()), codes)
            }
            fn zero(self) -> float32x4_t { vdupq_n_f32(0.0) }
            fn splat(self, value: f32) -> float32x4_t { vdupq_n_f32(value) }
            fn floats(self, from: *const f32) -> float32x4_t { vld1q_f32(from) }
            fn store(self, to: *mut f32, values: float32x4_t) { vst1q_f32(to, values) }
            fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
            fn mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
                vfmaq_f32(c, a, b)
            }
            fn minus(self, a: float32x4_t) -> float32x4_t { vnegq_f32(a) }
            fn halves(self, from: *const u8) -> float32x4_t { widen_halves(vld1_u16(from.cast())) }
            fn signed(self, from: *const u8) -> float32x4_t {
                let bytes = vreinterpret_s8_u8(four(from));
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
            }
            fn exponents(self, from: *const u8) -> float32x4_t {
                let e = vmovl_u16(vget_low_u16(vmovl_u8(four(from))));
                let normal = vshlq_n_u32::<23>(vsubq_u32(e, vdupq_n_u32(1)));
                let small = vshlq_u32(vdupq_n_u32(0x0020_0000), vreinterpretq_s32_u32(e));
                let is_small = vcltq_u32(e, vdupq_n_u32(2));
                vreinterpretq_f32_u32(vbslq_u32(is_small, small, normal))
            }
            fn low_six(self, from: *const u8) -> float32x4_t {
                widen(vand_u8(four(from), vdup_n_u8(63)))
            }
            fn low_and_top(self, from: *const u8, top: *const u8) -> float32x4_t {
                let low = vand_u8(four(from), vdup_n_u8(15));
                widen(vorr_u8(low, vshl_n_u8::<4>(vshr_n_u8::<6>(four(top)))))
            }
            fn high_and_top(self, from: *const u8, top: *const u8) -> float32x4_t {
                let high = vshr_n_u8::<4>(four(from));
                widen(vorr_u8(high, vshl_n_u8::<4>(vshr_n_u8::<6>(four(top)))))
            }
        }
    };
}

/// Four bytes, and zeros behind them.
// SAFETY: to be called where four bytes are readable.
#[inline(always)]
unsafe fn four(from: *const u8) -> uint8x8_t {
    // SAFETY: as above; NEON is part of 64-bit Arm.
    unsafe { vcreate_u8(u64::from(from.cast::<u32>().read_unaligned())) }
}

// SAFETY: NEON is part of 64-bit Arm.
#[inline(always)]
unsafe fn widen(bytes: uint8x8_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))) }
}

/// Widens 16-bit floats.
// SAFETY: NEON is part of 64-bit Arm, and so is this instruction of it.
#[inline(always)]
unsafe fn widen_halves(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: as above.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

impl Vectors for Neon {
    const LANES: usize = 4;
    type Codes = uint8x16_t;
    /// The sums of the first, the second, the third and the fourth codes of each column.
    type Sum = [int32x4_t; 4];
    type Floats = float32x4_t;

    fn pack(group: &[i16; 32], out: &mut [u8]) {
        for (out, value) in out.as_chunks_mut().0.iter_mut().zip(group) {
            *out = value.to_ne_bytes();
        }
    }

    quarter_panels!();
    vectors! {
        fn signed_codes(self, codes: uint8x16_t) -> uint8x16_t { codes }
        fn start(self, from: i32) -> Self::Sum {
            [vsetq_lane_s32::<0>(from, vdupq_n_s32(0)); 4]
        }
        fn dot(self, sum: Self::Sum, codes: uint8x16_t, packed: *const u8, line: usize) -> Self::Sum {
            let values = vld1_s16(packed.add(8 * line).cast());
            let low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes)));
            let high = vreinterpretq_s16_u16(vmovl_high_u8(codes));
            [
                vmlal_s16(sum[0], vget_low_s16(low), values),
                vmlal_s16(sum[1], vget_high_s16(low), values),
                vmlal_s16(sum[2], vget_low_s16(high), values),
                vmlal_s16(sum[3], vget_high_s16(high), values),
            ]
        }
        fn end(self, sum: Self::Sum) -> float32x4_t {
            let [a, b, c, d] = sum;
            vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)))
        }
    }
}

impl<const PLANES: usize> Vectors for NeonDot<PLANES> {
    const LANES: usize = 4;
    const PACKED: usize = 32 * PLANES;
    const BIAS: i32 = 128;
    type Codes = uint8x16_t;
    type Sum = [int32x4_t; PLANES];
    type Floats = float32x4_t;

    fn pack(group: &[i16; 32], out: &mut [u8]) {
        super::pack_planes(group, out);
    }

    quarter_panels!();
    vectors! {
        fn signed_codes(self, codes: uint8x16_t) -> uint8x16_t { veorq_u8(codes, vdupq_n_u8(0x80)) }
        fn start(self, from: i32) -> Self::Sum {
            let mut sum = [vdupq_n_s32(0); PLANES];
            sum[0] = vdupq_n_s32(from);
            sum
        }
        fn dot(self, sum: Self::Sum, codes: uint8x16_t, packed: *const u8, line: usize) -> Self::Sum {
            let mut sum = sum;
            for (plane, sum) in sum.iter_mut().enumerate() {
                let four = vld1q_dup_s32(packed.add(32 * plane + 4 * line).cast());
                asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                    inout(vreg) *sum, in(vreg) codes, in(vreg) four,
                    options(pure, nomem, nostack, preserves_flags));
            }
            sum
        }
        fn end(self, sum: Self::Sum) -> float32x4_t {
            let mut all = sum[0];
            for high in &sum[1..] {
                all = vaddq_s32(all, vshlq_n_s32::<8>(*high));
            }
            vcvtq_f32_s32(all)
        }
    }
}
