//! The micro-kernel: a block of sums stays in registers while the inputs pass by.
//!
//! `sums[i][v] += left[i] * right[v]` for one input after another, where `right[v]` is a vector of
//! neighbouring columns. Left values are taken one by one from wherever they lie; right ones are
//! 32 or 16 bits wide, and widened in registers.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::vector;
use rten_simd::{
    Isa, Simd,
    ops::{BitOps, Extend, IntOps, NumOps},
};
use std::array;

/// How the right-hand side is stored.
pub(crate) trait Format: Copy + Send + Sync {
    /// One value.
    type Element: Copy + Send + Sync;

    /// Loads `VECTORS` f32 vectors of neighbouring values. One, or an even number.
    ///
    /// # Safety
    /// So many values are readable from `from` on.
    // SAFETY: a declaration; what callers promise stands above.
    unsafe fn load<I: Isa, const VECTORS: usize>(
        isa: I,
        from: *const Self::Element,
    ) -> [I::F32; VECTORS];

    /// Widens values. Both are equally long.
    fn widen(from: &[Self::Element], out: &mut [f32]);
}

/// 32-bit floats.
#[derive(Clone, Copy)]
pub(crate) struct F32;
/// Bits of IEEE half precision.
#[derive(Clone, Copy)]
pub(crate) struct F16;
/// Bits of bfloat16.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

impl Format for F32 {
    type Element = f32;
    // SAFETY: callers promise what the trait asks.
    #[inline(always)]
    unsafe fn load<I: Isa, const VECTORS: usize>(isa: I, from: *const f32) -> [I::F32; VECTORS] {
        let ops = isa.f32();
        // SAFETY: `VECTORS` vectors are readable from `from` on.
        array::from_fn(|v| unsafe { ops.load_ptr(from.add(v * ops.len())) })
    }
    fn widen(from: &[f32], out: &mut [f32]) {
        out.copy_from_slice(from);
    }
}

impl Format for F16 {
    type Element = u16;
    // SAFETY: callers promise what the trait asks.
    #[inline(always)]
    unsafe fn load<I: Isa, const VECTORS: usize>(isa: I, from: *const u16) -> [I::F32; VECTORS] {
        let (ops, wide) = (isa.f16(), isa.f32());
        let from = from.cast::<rten_simd::f16>();
        if VECTORS == 1 {
            // SAFETY: only the first half of the lanes is read, which is one f32 vector's worth.
            let half = unsafe { ops.load_ptr_mask(from, ops.first_n_mask(wide.len())) };
            return array::from_fn(|_| ops.extend_low(half));
        }
        let mut out = [wide.zero(); VECTORS];
        for pair in 0..VECTORS / 2 {
            // SAFETY: this pair of f32 vectors is one vector of halves, readable by the promise.
            let halves = unsafe { ops.load_ptr(from.add(pair * ops.len())) };
            out[2 * pair] = ops.extend_low(halves);
            out[2 * pair + 1] = ops.extend_high(halves);
        }
        out
    }
    fn widen(from: &[u16], out: &mut [f32]) {
        vector::widen_f16(from, out);
    }
}

impl Format for Bf16 {
    type Element = u16;
    // SAFETY: callers promise what the trait asks.
    #[inline(always)]
    unsafe fn load<I: Isa, const VECTORS: usize>(isa: I, from: *const u16) -> [I::F32; VECTORS] {
        let (ops, wide, words) = (isa.i16(), isa.f32(), isa.i32());
        let from = from.cast::<i16>();
        // The sign that extending copies upwards is shifted out again.
        let widen = |x: I::I32| words.shift_left::<16>(x).reinterpret_cast::<I::F32>();
        if VECTORS == 1 {
            // SAFETY: only the first half of the lanes is read, which is one f32 vector's worth.
            let half = unsafe { ops.load_ptr_mask(from, ops.first_n_mask(wide.len())) };
            return array::from_fn(|_| widen(ops.extend_low(half)));
        }
        let mut out = [wide.zero(); VECTORS];
        for pair in 0..VECTORS / 2 {
            // SAFETY: this pair of f32 vectors is one vector of halves, readable by the promise.
            let halves = unsafe { ops.load_ptr(from.add(pair * ops.len())) };
            out[2 * pair] = widen(ops.extend_low(halves));
            out[2 * pair + 1] = widen(ops.extend_high(halves));
        }
        out
    }
    fn widen(from: &[u16], out: &mut [f32]) {
        vector::widen_bf16(from, out);
    }
}

/// The left-hand side of a block: value `i` of input `k` is `values[i * row + k * step]`.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row: usize,
    pub(crate) step: usize,
}

/// The right-hand side of a block: its columns of input `k` are `values[k * step..]`.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a, F: Format> {
    pub(crate) values: &'a [F::Element],
    pub(crate) step: usize,
}

/// A right-hand side of which every panel is a [`Right`] of its own, `apart` values from the last.
#[derive(Clone, Copy)]
pub(crate) struct Pair<'a, F: Format> {
    pub(crate) right: Right<'a, F>,
    pub(crate) apart: usize,
    /// What will be read after it: a line of this is fetched to the second-level cache with each
    /// input. Nothing is fetched twice that is there.
    pub(crate) next: &'a [F::Element],
}

/// Bytes of a line of cache.
const LINE: usize = 64;
/// How far ahead the right-hand side is fetched to the first-level cache, in bytes of a panel.
const AHEAD: usize = 1024;

/// `sums + left x right` over `inputs` inputs.
///
/// # Shapes
/// sums `[ROWS, VECTORS * lanes]`, left `[ROWS, inputs]`, right `[inputs, VECTORS * lanes]`.
///
/// # Panics
/// When left or right have too few values.
#[inline(always)]
pub(crate) fn accumulate<I: Isa, F: Format, const ROWS: usize, const VECTORS: usize>(
    isa: I,
    sums: [[I::F32; VECTORS]; ROWS],
    inputs: usize,
    left: Left<'_>,
    right: Right<'_, F>,
) -> [[I::F32; VECTORS]; ROWS] {
    let pair = Pair { right, apart: 0, next: &[] };
    let sums = sums.map(|row| [row]);
    accumulate_pair::<I, F, ROWS, 1, VECTORS>(isa, sums, inputs, left, pair).map(|[row]| row)
}

/// As [`accumulate`], for `PANELS` panels at a time.
///
/// # Shapes
/// sums `[ROWS, PANELS, VECTORS * lanes]`.
///
/// # Panics
/// When left or right have too few values.
#[inline(always)]
pub(crate) fn accumulate_pair<
    I: Isa,
    F: Format,
    const ROWS: usize,
    const PANELS: usize,
    const VECTORS: usize,
>(
    isa: I,
    mut sums: [[[I::F32; VECTORS]; PANELS]; ROWS],
    inputs: usize,
    left: Left<'_>,
    pair: Pair<'_, F>,
) -> [[[I::F32; VECTORS]; PANELS]; ROWS] {
    if inputs == 0 {
        return sums;
    }
    let Pair { right, apart, next } = pair;
    let ops = isa.f32();
    let width = VECTORS * ops.len();
    assert!((ROWS - 1) * left.row + (inputs - 1) * left.step < left.values.len());
    assert!((PANELS - 1) * apart + (inputs - 1) * right.step + width <= right.values.len());
    let (mut a, mut b) = (left.values.as_ptr(), right.values.as_ptr());
    let line = LINE / size_of::<F::Element>();
    let (mut next, step) = if next.is_empty() { (b, 0) } else { (next.as_ptr(), line) };
    for _ in 0..inputs {
        if PANELS > 1 {
            fetch::<false>(next.cast());
            next = next.wrapping_add(step);
        }
        let columns: [[I::F32; VECTORS]; PANELS] = array::from_fn(|panel| {
            for at in 0..width.div_ceil(line) {
                fetch::<true>(
                    b.wrapping_add(panel * apart + at * line).wrapping_byte_add(AHEAD).cast(),
                );
            }
            // SAFETY: input k of `inputs` of this panel is loaded from
            // `right.values[panel * apart + k * right.step..]`; the last vector of the last input
            // of the last panel ends within the slice by the second assertion.
            unsafe { F::load::<I, VECTORS>(isa, b.add(panel * apart)) }
        });
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the largest index, of the last row and input, is in bounds by the first
            // assertion.
            let value = ops.splat(unsafe { *a.add(i * left.row) });
            for (sums, columns) in sums.iter_mut().zip(columns) {
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = ops.mul_add(value, column, *sum);
                }
            }
        }
        a = a.wrapping_add(left.step);
        b = b.wrapping_add(right.step);
    }
    sums
}

/// Fetches a line to the first-level cache, or to the second. A hint: `at` may point anywhere.
#[inline(always)]
fn fetch<const FIRST: bool>(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 processor has this instruction, and it does nothing where the
        // address is not mapped.
        unsafe {
            match FIRST {
                true => _mm_prefetch::<_MM_HINT_T0>(at.cast()),
                false => _mm_prefetch::<_MM_HINT_T1>(at.cast()),
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction changes neither memory nor registers, and does nothing where the
    // address is not mapped.
    unsafe {
        match FIRST {
            true => {
                std::arch::asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly))
            }
            false => {
                std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly))
            }
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
