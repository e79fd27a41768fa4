//! The micro-kernel: a block of sums stays in registers while the inputs pass by.
//!
//! `sums[i][v] += left[i] * right[v]` for one input after another, where `right[v]` is a vector of
//! neighbouring columns. Left values are taken one by one from wherever they lie; right ones are
//! 32 or 16 bits wide, and widened in registers. Every sum adds its inputs one after the other, whatever
//! the number of rows.
//!
//! There are no closures in what is inlined here: they would be compiled without the instructions
//! of the function that they end up in.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::vector;
use rten_simd::{
    Isa, Simd,
    ops::{BitOps, Extend, IntOps, NumOps},
};

/// How the values of the right-hand side are stored.
pub(crate) trait Format: Copy + Send + Sync {
    /// The type of one stored value.
    type Element: bytemuck::Pod + Send + Sync;

    /// Loads `VECTORS` f32 vectors of neighbouring values: one, or an even number.
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

    /// Narrows a value.
    #[cfg(test)]
    fn narrow(value: f32) -> Self::Element;
}

/// Evaluates `$body` with `$name` the [`Format`] of a [`galaxy_common::WeightFormat`] whose values stand by
/// themselves.
macro_rules! each_format {
    ($format:expr, $name:ident => $body:expr) => {
        match $format {
            galaxy_common::WeightFormat::F32 => {
                type $name = $crate::compute::kernels::micro::F32;
                $body
            }
            galaxy_common::WeightFormat::F16 => {
                type $name = $crate::compute::kernels::micro::F16;
                $body
            }
            galaxy_common::WeightFormat::Bf16 => {
                type $name = $crate::compute::kernels::micro::Bf16;
                $body
            }
            other => unreachable!("{other} stands in blocks"),
        }
    };
}
pub(crate) use each_format;

/// Floats of 32 bits.
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
        let mut out = [ops.zero(); VECTORS];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: `VECTORS` vectors are readable from `from` on.
            *out = unsafe { ops.load_ptr(from.add(v * ops.len())) };
        }
        out
    }
    fn widen(from: &[f32], out: &mut [f32]) {
        out.copy_from_slice(from);
    }
    #[cfg(test)]
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Format for F16 {
    type Element = u16;
    // SAFETY: callers promise what the trait asks.
    #[inline(always)]
    unsafe fn load<I: Isa, const VECTORS: usize>(isa: I, from: *const u16) -> [I::F32; VECTORS] {
        const { assert!(VECTORS == 1 || VECTORS.is_multiple_of(2)) };
        let (ops, wide) = (isa.f16(), isa.f32());
        let from = from.cast::<rten_simd::f16>();
        if VECTORS == 1 {
            // SAFETY: only the first half of the lanes is read, which is one f32 vector's worth.
            let half = unsafe { ops.load_ptr_mask(from, ops.first_n_mask(wide.len())) };
            return [ops.extend_low(half); VECTORS];
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
    #[cfg(test)]
    fn narrow(value: f32) -> u16 {
        half::f16::from_f32(value).to_bits()
    }
}

impl Format for Bf16 {
    type Element = u16;
    // SAFETY: callers promise what the trait asks.
    #[inline(always)]
    unsafe fn load<I: Isa, const VECTORS: usize>(isa: I, from: *const u16) -> [I::F32; VECTORS] {
        const { assert!(VECTORS == 1 || VECTORS.is_multiple_of(2)) };
        let (ops, wide) = (isa.i16(), isa.f32());
        let from = from.cast::<i16>();
        if VECTORS == 1 {
            // SAFETY: only the first half of the lanes is read, which is one f32 vector's worth.
            let half = unsafe { ops.load_ptr_mask(from, ops.first_n_mask(wide.len())) };
            return [widen(isa, ops.extend_low(half)); VECTORS];
        }
        let mut out = [wide.zero(); VECTORS];
        for pair in 0..VECTORS / 2 {
            // SAFETY: this pair of f32 vectors is one vector of halves, readable by the promise.
            let halves = unsafe { ops.load_ptr(from.add(pair * ops.len())) };
            out[2 * pair] = widen(isa, ops.extend_low(halves));
            out[2 * pair + 1] = widen(isa, ops.extend_high(halves));
        }
        out
    }
    fn widen(from: &[u16], out: &mut [f32]) {
        vector::widen_bf16(from, out);
    }
    #[cfg(test)]
    fn narrow(value: f32) -> u16 {
        half::bf16::from_f32(value).to_bits()
    }
}

/// The bits of bfloat16 as f32. The sign that extending copied upwards is shifted out again.
#[inline(always)]
fn widen<I: Isa>(isa: I, bits: I::I32) -> I::F32 {
    isa.i32().shift_left::<16>(bits).reinterpret_cast::<I::F32>()
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

/// What follows the right-hand sides, and comes from memory while they are worked on.
#[derive(Clone, Copy)]
pub(crate) struct Next<F: Format> {
    /// Where the values that follow begin, for the first panel; it may lie outside of what there is.
    pub(crate) from: *const F::Element,
    /// How much of each panel is fetched with each input, in 1/256 of a byte.
    pub(crate) each: usize,
}

/// Bytes of a line of cache.
const LINE: usize = 64;
/// How far ahead the right-hand side is fetched to the first-level cache, in bytes of a panel.
const AHEAD: usize = 512;

/// Inputs of one row that are loaded together.
const AT_ONCE: usize = 4;

/// Multiplies as [`accumulate_panels`] does, for one row, whose inputs are neighbours, as are those of each
/// right-hand side. It is bound by memory: each panel is read as one stream, which hardware fetches ahead
/// better than any hint (on Zen 4: 31 GB/s, with hints 26 to 30). Sums wait for the input before, those of
/// the panels not for each other.
///
/// `ALL` is four times `VECTORS`.
///
/// # Shapes
/// sums `[PANELS, VECTORS * lanes]`, left `[inputs]`, right `[inputs, VECTORS * lanes]`.
///
/// # Panics
/// When right has too few values.
#[inline(always)]
pub(crate) fn stream<
    I: Isa,
    F: Format,
    const PANELS: usize,
    const VECTORS: usize,
    const ALL: usize,
>(
    isa: I,
    mut sums: [[I::F32; VECTORS]; PANELS],
    left: &[f32],
    right: &[F::Element],
    apart: usize,
) -> [[I::F32; VECTORS]; PANELS] {
    const { assert!(ALL == AT_ONCE * VECTORS) };
    let ops = isa.f32();
    let width = VECTORS * ops.len();
    let last = (PANELS - 1).saturating_mul(apart);
    assert!(last.saturating_add(left.len().saturating_mul(width)) <= right.len());
    let mut from = right.as_ptr();
    let (fours, rest) = left.as_chunks::<AT_ONCE>();
    for four in fours {
        for (panel, sums) in sums.iter_mut().enumerate() {
            // SAFETY: four inputs of `width` values each; those of the last panel end within the slice by
            // the assertion.
            let columns = unsafe { F::load::<I, ALL>(isa, from.wrapping_add(panel * apart)) };
            for (at, column) in columns.into_iter().enumerate() {
                let sum = &mut sums[at % VECTORS];
                *sum = ops.mul_add(ops.splat(four[at / VECTORS]), column, *sum);
            }
        }
        from = from.wrapping_add(AT_ONCE * width);
    }
    for value in rest {
        for (panel, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above, one input.
            let columns = unsafe { F::load::<I, VECTORS>(isa, from.wrapping_add(panel * apart)) };
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = ops.mul_add(ops.splat(*value), column, *sum);
            }
        }
        from = from.wrapping_add(width);
    }
    sums
}

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
    let mut panels = [[[isa.f32().zero(); VECTORS]; 1]; ROWS];
    for (panel, sums) in panels.iter_mut().zip(sums) {
        *panel = [sums];
    }
    let panels =
        accumulate_panels::<I, F, ROWS, 1, VECTORS>(isa, panels, inputs, left, right, 0, None);
    let mut sums = sums;
    for (sums, panel) in sums.iter_mut().zip(panels) {
        *sums = panel[0];
    }
    sums
}

/// Multiplies as [`accumulate`] does, for `PANELS` right-hand sides, each `apart` values behind the last, as
/// those of `next` are.
///
/// # Shapes
/// sums `[ROWS, PANELS, VECTORS * lanes]`.
///
/// # Panics
/// When left or right have too few values.
#[inline(always)]
pub(crate) fn accumulate_panels<
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
    right: Right<'_, F>,
    apart: usize,
    next: Option<Next<F>>,
) -> [[[I::F32; VECTORS]; PANELS]; ROWS] {
    if inputs == 0 {
        return sums;
    }
    let ops = isa.f32();
    let width = VECTORS * ops.len();
    let last = ((ROWS - 1).saturating_mul(left.row))
        .saturating_add((inputs - 1).saturating_mul(left.step));
    assert!(last < left.values.len());
    let last = ((PANELS - 1).saturating_mul(apart))
        .saturating_add((inputs - 1).saturating_mul(right.step));
    assert!(last.saturating_add(width) <= right.values.len());
    let (mut a, mut b) = (left.values.as_ptr(), right.values.as_ptr());
    let line = LINE / size_of::<F::Element>();
    for k in 0..inputs {
        let mut columns = [[ops.zero(); VECTORS]; PANELS];
        for (panel, columns) in columns.iter_mut().enumerate() {
            let from = b.wrapping_add(panel * apart);
            if let Some(next) = next {
                // A hint, as below.
                let from = next.from.wrapping_add(panel * apart);
                ops.prefetch(from.wrapping_byte_add((k * next.each) >> 8).cast());
            }
            for at in 0..width.div_ceil(line) {
                // A hint: it may point anywhere.
                let ahead = from.wrapping_add(at * line).wrapping_byte_add(AHEAD);
                ops.prefetch(ahead.cast());
            }
            // SAFETY: input k of `inputs` of this panel is loaded from
            // `right.values[panel * apart + k * right.step..]`; the last vector of the last input
            // of the last panel ends within the slice by the second assertion.
            *columns = unsafe { F::load::<I, VECTORS>(isa, from) };
        }
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
