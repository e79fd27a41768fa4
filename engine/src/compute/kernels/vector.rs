//! Kernels over single rows, in the widest vectors that the processor reports at run time.
//!
//! Plain loops inside of [`SimdOp::eval`] are compiled once for each instruction set, so they are
//! vector loops too.
// Hot path: no locks, no logging, no allocation.

use super::{eighths, instructions::run};
use half::slice::HalfFloatSliceExt;
use rten_simd::{
    Isa, Simd, SimdOp,
    ops::{BitOps, IntOps, NumOps},
};

/// The coefficients of P in 2^x = 1 + x * P(x) for |x| <= 1/2, fitted to the least largest relative
/// error (9.1e-8).
#[expect(clippy::approx_constant, reason = "fitted: it is not the logarithm of 2")]
const EXP2: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];
/// The number that rounds a small one to a whole one when it is added, which then stands in the lowest
/// bits.
const ROUND: f32 = 12_582_912.0;

/// The power 2^x for x between -126 and 128, where it is infinite.
#[inline(always)]
fn exp2_between<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    let (ops, words) = (isa.f32(), isa.i32());
    let rounded = ops.add(x, ops.splat(ROUND));
    let rest = ops.sub(x, ops.sub(rounded, ops.splat(ROUND)));
    let mut power = ops.splat(EXP2[4]);
    for at in (0..4).rev() {
        power = ops.mul_add(power, rest, ops.splat(EXP2[at]));
    }
    let power: I::I32 = ops.mul_add(power, rest, ops.one()).reinterpret_cast();
    let whole = words.shift_left::<23>(rounded.reinterpret_cast());
    words.add(power, whole).reinterpret_cast()
}

/// The power 2^x; below 2^-126 it stays there, from 2^128 on it is infinite. The relative error is below
/// 2e-7.
#[inline(always)]
pub(crate) fn exp2<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    let ops = isa.f32();
    // In this order: of two operands x86 gives the second where one is not a number.
    exp2_between(isa, ops.min(ops.splat(128.0), ops.max(ops.splat(-126.0), x)))
}

/// The power 2^x as [`exp2`] gives it, for x that are not positive.
#[inline(always)]
pub(crate) fn exp2_falling<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    exp2_between(isa, isa.f32().max(isa.f32().splat(-126.0), x))
}

macro_rules! row_loop {
    ($(#[$doc:meta])* $name:ident, $kernel:ident, ($($arg:ident: $type:ty),+), $body:block) => {
        struct $kernel<'a> { $($arg: $type),+ }
        impl<'a> SimdOp for $kernel<'a> {
            type Output = ();
            #[inline(always)]
            fn eval<I: Isa>(self, _: I) {
                let Self { $($arg),+ } = self;
                $body
            }
        }
        $(#[$doc])*
        pub(crate) fn $name<'a>($($arg: $type),+) {
            run($kernel { $($arg),+ });
        }
    };
}

row_loop!(
    /// Adds a row to another: out += add.
    add, Add, (out: &'a mut [f32], add: &'a [f32]), {
        for (o, a) in out.iter_mut().zip(add) { *o += a; }
    }
);
row_loop!(
    /// Takes the larger of each two values: out = max(out, other).
    largest, Largest, (out: &'a mut [f32], other: &'a [f32]), {
        for (o, b) in out.iter_mut().zip(other) { *o = o.max(*b); }
    }
);
row_loop!(
    /// Rotates, in each head of `width` columns, the pairs (low, high) by the angles of these cosines
    /// and sines: low values are the first half of the rotated columns, high ones the second.
    turn, Turn, (row: &'a mut [f32], width: usize, cosines: &'a [f32], sines: &'a [f32]), {
        let half = cosines.len();
        for head in row.chunks_exact_mut(width) {
            let (low, high) = head[..2 * half].split_at_mut(half);
            for (((l, h), c), s) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
                (*l, *h) = (*l * c - *h * s, *h * c + *l * s);
            }
        }
    }
);
row_loop!(
    /// Widens bfloat16 to f32.
    widen_bf16, WidenBf16, (bits: &'a [u16], out: &'a mut [f32]), {
        for (o, b) in out.iter_mut().zip(bits) { *o = f32::from_bits(u32::from(*b) << 16); }
    }
);

row_loop!(
    /// Rounds heads of `width` columns to 8 bits, each with scales of its own.
    narrow_heads, NarrowHeads, (row: &'a [f32], width: usize, codes: &'a mut [i8], scales: &'a mut [f32]), {
        let heads = row.chunks_exact(width).zip(codes.chunks_exact_mut(width));
        let scales = scales.chunks_exact_mut(width.div_ceil(eighths::GROUP));
        for ((head, codes), scales) in heads.zip(scales) {
            eighths::narrow(head, codes, scales);
        }
    }
);

/// Widens half precision. Both are equally long.
pub(crate) fn widen_f16(bits: &[u16], out: &mut [f32]) {
    use half::slice::HalfBitsSliceExt;
    bits.reinterpret_cast::<half::f16>().convert_to_f32_slice(out);
}

/// Rounds to half precision. Both are equally long.
pub(crate) fn narrow_f16(values: &[f32], out: &mut [u16]) {
    use half::slice::HalfBitsSliceExt;
    out.reinterpret_cast_mut::<half::f16>().convert_from_f32_slice(values);
}

/// Rounds values to those that half precision has.
pub(crate) fn round_f16(values: &mut [f32]) {
    let mut bits = [0; 256];
    for values in values.chunks_mut(bits.len()) {
        let bits = &mut bits[..values.len()];
        narrow_f16(values, bits);
        widen_f16(bits, values);
    }
}

/// The sum, and the sum of squares, of the values less `by`.
struct Moments<'a> {
    row: &'a [f32],
    by: f32,
}

impl SimdOp for Moments<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> (f32, f32) {
        let ops = isa.f32();
        let by = ops.splat(self.by);
        // Four of each, so that no addition waits for the one before it.
        let (mut sums, mut squares) = ([ops.zero(); 4], [ops.zero(); 4]);
        let mut blocks = self.row.chunks_exact(4 * ops.len());
        for block in &mut blocks {
            for at in 0..4 {
                let value = ops.sub(ops.load(&block[at * ops.len()..]), by);
                sums[at] = ops.add(sums[at], value);
                squares[at] = ops.mul_add(value, value, squares[at]);
            }
        }
        let [a, b, c, d] = sums;
        let mut sum = ops.sum(ops.add(ops.add(a, b), ops.add(c, d)));
        let [a, b, c, d] = squares;
        let mut square = ops.sum(ops.add(ops.add(a, b), ops.add(c, d)));
        for value in blocks.remainder() {
            sum += value - self.by;
            square += (value - self.by) * (value - self.by);
        }
        (sum, square)
    }
}

/// The sum of exponentials of the values less the largest of them, times `by`.
struct Exponentials<'a> {
    row: &'a [f32],
    most: f32,
    by: f32,
}

impl SimdOp for Exponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> f32 {
        let ops = isa.f32();
        let (most, by) = (ops.splat(self.most), ops.splat(self.by * std::f32::consts::LOG2_E));
        let mut sums = [ops.zero(); 2];
        let mut blocks = self.row.chunks_exact(2 * ops.len());
        for block in &mut blocks {
            for at in 0..2 {
                let value = ops.sub(ops.load(&block[at * ops.len()..]), most);
                sums[at] = ops.add(sums[at], exp2_falling(isa, ops.mul(value, by)));
            }
        }
        let mut sum = ops.sum(ops.add(sums[0], sums[1]));
        for value in blocks.remainder() {
            sum += ((value - self.most) * self.by).exp();
        }
        sum
    }
}

/// The logarithm of the sum of exponentials of the values times `by`, which is positive.
pub(crate) fn log_sum_exp(row: &[f32], by: f32) -> f32 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if most.is_infinite() {
        return most;
    }
    run(Exponentials { row, most, by }).ln() + most * by
}

row_loop!(
    /// Adds two rows: out = a + b.
    sum_two, SumTwo, (out: &'a mut [f32], a: &'a [f32], b: &'a [f32]), {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) { *o = a + b; }
    }
);
row_loop!(
    /// Adds three rows: out = (a + b) + c.
    sum_three, SumThree, (out: &'a mut [f32], a: &'a [f32], b: &'a [f32], c: &'a [f32]), {
        for (((o, a), b), c) in out.iter_mut().zip(a).zip(b).zip(c) { *o = (a + b) + c; }
    }
);
row_loop!(
    /// Scales a row in place: row = (row - coarse - fine) * by * weight.
    scale_in_place, ScaleInPlace,
    (row: &'a mut [f32], mean: (f32, f32), by: f32, weight: &'a [f32]), {
        for (r, w) in row.iter_mut().zip(weight) { *r = ((*r - mean.0) - mean.1) * by * w; }
    }
);
row_loop!(
    /// Scales a row to another: out = (from - coarse - fine) * by * weight.
    scale_to, ScaleTo,
    (out: &'a mut [f32], from: &'a [f32], mean: (f32, f32), by: f32, weight: &'a [f32]), {
        for ((o, f), w) in out.iter_mut().zip(from).zip(weight) {
            *o = ((f - mean.0) - mean.1) * by * w;
        }
    }
);
row_loop!(
    /// Scales a row in place and adds a bias: row = (row - coarse - fine) * by * weight + bias.
    scale_and_add_in_place, ScaleAndAddInPlace,
    (row: &'a mut [f32], mean: (f32, f32), by: f32, weight: &'a [f32], bias: &'a [f32]), {
        for ((r, w), b) in row.iter_mut().zip(weight).zip(bias) {
            *r = ((*r - mean.0) - mean.1) * by * w + b;
        }
    }
);
row_loop!(
    /// Scales a row to another and adds a bias: out = (from - coarse - fine) * by * weight + bias.
    scale_and_add_to, ScaleAndAddTo,
    (
        out: &'a mut [f32], from: &'a [f32], mean: (f32, f32), by: f32, weight: &'a [f32],
        bias: &'a [f32]
    ), {
        for (((o, f), w), b) in out.iter_mut().zip(from).zip(weight).zip(bias) {
            *o = ((f - mean.0) - mean.1) * by * w + b;
        }
    }
);

/// The mean that a layer norm subtracts from a row, coarse and fine, and the factor that it scales by
/// then. An f32 mean of large values is coarse: what it leaves over is a small mean of its own.
fn centre(row: &[f32], epsilon: f32) -> ((f32, f32), f32) {
    let width = row.len() as f32;
    let coarse = run(Moments { row, by: 0.0 }).0 / width;
    let (sum, square) = run(Moments { row, by: coarse });
    let fine = sum / width;
    let variance = (square / width - fine * fine).max(0.0);
    ((coarse, fine), 1.0 / (variance + epsilon).sqrt())
}

/// The factor that an RMS norm scales a row by.
fn level(row: &[f32], epsilon: f32) -> f32 {
    1.0 / (run(Moments { row, by: 0.0 }).1 / row.len() as f32 + epsilon).sqrt()
}

/// Normalises a row to mean 0 and variance 1, then applies weight and bias.
pub(crate) fn layer_norm(row: &mut [f32], weight: &[f32], bias: Option<&[f32]>, epsilon: f32) {
    let (mean, by) = centre(row, epsilon);
    match bias {
        Some(bias) => scale_and_add_in_place(row, mean, by, weight, bias),
        None => scale_in_place(row, mean, by, weight),
    }
}

/// Normalises as [`layer_norm`] does, to another row.
pub(crate) fn layer_norm_to(
    out: &mut [f32],
    from: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    epsilon: f32,
) {
    let (mean, by) = centre(from, epsilon);
    match bias {
        Some(bias) => scale_and_add_to(out, from, mean, by, weight, bias),
        None => scale_to(out, from, mean, by, weight),
    }
}

/// Normalises a row to a mean square of 1, then applies the weight.
pub(crate) fn rms_norm(row: &mut [f32], weight: &[f32], epsilon: f32) {
    let by = level(row, epsilon);
    scale_in_place(row, (0.0, 0.0), by, weight);
}

/// Normalises as [`rms_norm`] does, to another row.
pub(crate) fn rms_norm_to(out: &mut [f32], from: &[f32], weight: &[f32], epsilon: f32) {
    scale_to(out, from, (0.0, 0.0), level(from, epsilon), weight);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_of_values_with_a_large_mean_match_f64() {
        let width = 37;
        let values: Vec<f32> = (0..width).map(|i| 1000.0 + (i as f32 * 0.7).sin()).collect();
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + i as f32 * 0.01).collect();
        let bias: Vec<f32> = (0..width).map(|i| i as f32 * 0.02).collect();
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (x, w, b) = (wide(&values), wide(&weight), wide(&bias));
        let mean = x.iter().sum::<f64>() / width as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let square = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let mut layer = values.clone();
        layer_norm(&mut layer, &weight, Some(&bias), 1e-12);
        let mut elsewhere = vec![f32::NAN; width];
        layer_norm_to(&mut elsewhere, &values, &weight, Some(&bias), 1e-12);
        let mut rms = values.clone();
        rms_norm(&mut rms, &weight, 1e-6);
        for i in 0..width {
            let want = (x[i] - mean) / (variance + 1e-12).sqrt() * w[i] + b[i];
            assert!((f64::from(layer[i]) - want).abs() < 2e-6, "{i}: {} {want}", layer[i]);
            assert_eq!(layer[i], elsewhere[i], "{i}");
            let want = x[i] / (square + 1e-6).sqrt() * w[i];
            assert!((f64::from(rms[i]) - want).abs() < 2e-6, "{i}: {} {want}", rms[i]);
        }
    }
}
