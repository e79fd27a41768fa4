//! Activation functions, at every lane of a vector.
// Hot path: no locks, no logging, no allocation.

use super::{instructions::run, vector::exp2};
use galaxy_model::{LAPLACE_DEVIATION, LAPLACE_MEAN};
use rten_simd::{
    Isa, Simd, SimdOp, SimdUnaryOp,
    ops::{BitOps, FloatOps, NumOps},
};
use rten_vecmath::Tanh;

/// The function that an element goes through after a product.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum ActivationFn {
    Gelu,
    GeluTanh,
    Silu,
    Relu,
    Tanh,
    QuickGelu,
    ClippedGelu,
    SquaredRelu,
    Relu6,
    LeakyRelu,
    HardSwish,
    Mish,
    Laplace,
    Sigmoid,
    Linear,
    /// The cap c tanh(x / c).
    Cap(f32),
}

impl ActivationFn {
    /// The function at each lane of `x`, for loops that hold their values in registers.
    #[inline(always)]
    pub(crate) fn eval<I: Isa>(self, isa: I, x: I::F32) -> I::F32 {
        match self {
            Self::Gelu => Gelu.eval(isa, x),
            Self::GeluTanh => GeluTanh.eval(isa, x),
            Self::Silu => Silu.eval(isa, x),
            Self::Relu => Relu.eval(isa, x),
            Self::Tanh => Tanh {}.eval(isa, x),
            Self::QuickGelu => QuickGelu.eval(isa, x),
            Self::ClippedGelu => ClippedGelu.eval(isa, x),
            Self::SquaredRelu => SquaredRelu.eval(isa, x),
            Self::Relu6 => Relu6.eval(isa, x),
            Self::LeakyRelu => LeakyRelu.eval(isa, x),
            Self::HardSwish => HardSwish.eval(isa, x),
            Self::Mish => Mish.eval(isa, x),
            Self::Laplace => Laplace.eval(isa, x),
            Self::Sigmoid => Sigmoid.eval(isa, x),
            Self::Linear => Linear.eval(isa, x),
            Self::Cap(most) => cap(isa, x, most),
        }
    }

    /// The function at each value of `row`, in place.
    pub(crate) fn apply(self, row: &mut [f32]) {
        // One loop for each function: none asks again for every vector which it is.
        match self {
            Self::Gelu => run(Map(Gelu, row)),
            Self::GeluTanh => run(Map(GeluTanh, row)),
            Self::Silu => run(Map(Silu, row)),
            Self::Relu => run(Map(Relu, row)),
            Self::Tanh => run(Map(Tanh {}, row)),
            Self::QuickGelu => run(Map(QuickGelu, row)),
            Self::ClippedGelu => run(Map(ClippedGelu, row)),
            Self::SquaredRelu => run(Map(SquaredRelu, row)),
            Self::Relu6 => run(Map(Relu6, row)),
            Self::LeakyRelu => run(Map(LeakyRelu, row)),
            Self::HardSwish => run(Map(HardSwish, row)),
            Self::Mish => run(Map(Mish, row)),
            Self::Laplace => run(Map(Laplace, row)),
            Self::Sigmoid => run(Map(Sigmoid, row)),
            Self::Linear => run(Map(Linear, row)),
            Self::Cap(most) => run(Map(Cap(most), row)),
        }
    }
}

/// The cap `most` tanh(`x` / `most`).
#[inline(always)]
pub(crate) fn cap<I: Isa>(isa: I, x: I::F32, most: f32) -> I::F32 {
    let ops = isa.f32();
    ops.mul(Tanh {}.eval(isa, ops.mul(x, ops.splat(1.0 / most))), ops.splat(most))
}

/// The cap as a function object.
struct Cap(f32);

impl SimdUnaryOp<f32> for Cap {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        cap(isa, x, self.0)
    }
}

/// The quotient x / (1 + 2^falling): `x` times a logistic function.
#[inline(always)]
fn times_logistic<I: Isa>(isa: I, x: I::F32, falling: I::F32) -> I::F32 {
    let ops = isa.f32();
    ops.div(x, ops.add(ops.one(), exp2(isa, falling)))
}

/// GELU by the normal distribution: x * Phi(x), where Phi(x) is the logistic function of
/// log(Phi(x) / Phi(-x)), which is x times a smooth function of x * x.
struct Gelu;

/// The polynomial in x * x that is log2(Phi(-x) / Phi(x)) / x for |x| <= 5, fitted to the least largest
/// error of the GELU (2.3e-8).
const GELU: [f32; 7] = [
    -2.302_210_4,
    -0.104_832_18,
    9.158_642e-5,
    0.000_160_439_14,
    -1.157_792_8e-5,
    3.916_360_4e-7,
    -5.328_362_7e-9,
];
/// The x * x from which on the factor of x stays: the GELU is less than 2e-6 from x or 0, and goes
/// there.
const GELU_END: f32 = 25.0;

impl SimdUnaryOp<f32> for Gelu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        times_logistic(isa, x, isa.f32().mul(x, gelu_slope(isa, x)))
    }
}

/// The factor log2(Phi(-x) / Phi(x)) / x, by its polynomial.
#[inline(always)]
fn gelu_slope<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    let ops = isa.f32();
    let square = ops.min(ops.mul(x, x), ops.splat(GELU_END));
    let mut slope = ops.splat(GELU[6]);
    for at in (0..6).rev() {
        slope = ops.mul_add(slope, square, ops.splat(GELU[at]));
    }
    slope
}

/// GELU by the hyperbolic tangent: (1 + tanh(y)) / 2 is the logistic function of 2y.
struct GeluTanh;

impl SimdUnaryOp<f32> for GeluTanh {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        // y = sqrt(2 / pi) * (x + 0.044715 * x^3)
        const LINEAR: f64 = -std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2;
        const FALLING: f64 = LINEAR * std::f64::consts::LOG2_E;
        let ops = isa.f32();
        let (first, third) = (ops.splat(FALLING as f32), ops.splat((FALLING * 0.044_715) as f32));
        let slope = ops.mul_add(ops.mul(x, x), third, first);
        times_logistic(isa, x, ops.mul(x, slope))
    }
}

struct Silu;

impl SimdUnaryOp<f32> for Silu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let falling = isa.f32().mul(x, isa.f32().splat(-std::f32::consts::LOG2_E));
        times_logistic(isa, x, falling)
    }
}

struct Relu;

impl SimdUnaryOp<f32> for Relu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        ops.max(ops.zero(), x)
    }
}

/// The logistic function 1 / (1 + 2^falling).
#[inline(always)]
fn logistic<I: Isa>(isa: I, falling: I::F32) -> I::F32 {
    times_logistic(isa, isa.f32().one(), falling)
}

/// Quick GELU: x times the logistic function of 1.702 x.
struct QuickGelu;

impl SimdUnaryOp<f32> for QuickGelu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let falling = isa.f32().mul(x, isa.f32().splat(-1.702 * std::f32::consts::LOG2_E));
        times_logistic(isa, x, falling)
    }
}

struct ClippedGelu;

impl SimdUnaryOp<f32> for ClippedGelu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        isa.f32().min(isa.f32().splat(10.0), Gelu.eval(isa, x))
    }
}

struct SquaredRelu;

impl SimdUnaryOp<f32> for SquaredRelu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let positive = Relu.eval(isa, x);
        isa.f32().mul(positive, positive)
    }
}

struct Relu6;

impl SimdUnaryOp<f32> for Relu6 {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        isa.f32().min(isa.f32().splat(6.0), Relu.eval(isa, x))
    }
}

struct LeakyRelu;

impl SimdUnaryOp<f32> for LeakyRelu {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        ops.max(ops.mul(x, ops.splat(0.01)), x)
    }
}

struct HardSwish;

impl SimdUnaryOp<f32> for HardSwish {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let share = Relu6.eval(isa, ops.add(x, ops.splat(3.0)));
        ops.mul(x, ops.mul(share, ops.splat(1.0 / 6.0)))
    }
}

/// Mish: x * tanh(ln(1 + e)), where e = e^x: the tangent is n / (n + 2) of n = e * (e + 2), and 1 from 20 on.
struct Mish;

impl SimdUnaryOp<f32> for Mish {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let most = ops.min(ops.splat(20.0), x);
        let power = exp2(isa, ops.mul(most, ops.splat(std::f32::consts::LOG2_E)));
        let grown = ops.mul(power, ops.add(power, ops.splat(2.0)));
        ops.mul(x, ops.div(grown, ops.add(grown, ops.splat(2.0))))
    }
}

/// The distribution function of a normal distribution with a mean and deviation of its own, by the
/// polynomial of [`Gelu`].
struct Laplace;

impl SimdUnaryOp<f32> for Laplace {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        let ops = isa.f32();
        let by = ops.splat(1.0 / LAPLACE_DEVIATION);
        let x = ops.mul(ops.sub(x, ops.splat(LAPLACE_MEAN)), by);
        logistic(isa, ops.mul(x, gelu_slope(isa, x)))
    }
}

struct Sigmoid;

impl SimdUnaryOp<f32> for Sigmoid {
    #[inline(always)]
    fn eval<I: Isa>(&self, isa: I, x: I::F32) -> I::F32 {
        logistic(isa, isa.f32().mul(x, isa.f32().splat(-std::f32::consts::LOG2_E)))
    }
}

struct Linear;

impl SimdUnaryOp<f32> for Linear {
    #[inline(always)]
    fn eval<I: Isa>(&self, _: I, x: I::F32) -> I::F32 {
        x
    }
}

/// A function of one value, for every value of a row.
pub(crate) struct Map<'a, F>(pub(crate) F, pub(crate) &'a mut [f32]);

impl<F: SimdUnaryOp<f32>> SimdOp for Map<'_, F> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let (Self(function, row), ops) = (self, isa.f32());
        let mut vectors = row.chunks_exact_mut(ops.len());
        for vector in &mut vectors {
            ops.store(function.eval(isa, ops.load(vector)), vector);
        }
        let rest = vectors.into_remainder();
        if !rest.is_empty() {
            let out = function.eval(isa, ops.load_pad(rest).0).to_array();
            rest.copy_from_slice(&out.as_ref()[..rest.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ActivationFn; 15] = [
        ActivationFn::Gelu,
        ActivationFn::GeluTanh,
        ActivationFn::Silu,
        ActivationFn::Relu,
        ActivationFn::Tanh,
        ActivationFn::QuickGelu,
        ActivationFn::ClippedGelu,
        ActivationFn::SquaredRelu,
        ActivationFn::Relu6,
        ActivationFn::LeakyRelu,
        ActivationFn::HardSwish,
        ActivationFn::Mish,
        ActivationFn::Laplace,
        ActivationFn::Sigmoid,
        ActivationFn::Linear,
    ];

    fn points() -> Vec<f32> {
        (-12_000..=12_000).map(|i| i as f32 * 1e-3).collect()
    }

    /// The error function, by its series, or by the continued fraction of erfc where that converges
    /// faster.
    fn erf(x: f64) -> f64 {
        if x.abs() < 2.5 {
            let mut term = x;
            let mut sum = x;
            for n in 1..60 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return sum * 2.0 / std::f64::consts::PI.sqrt();
        }
        let z = x.abs();
        let fraction = (1..60).rev().fold(z, |f, n| z + f64::from(n) / 2.0 / f);
        let erfc = (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt());
        (1.0 - erfc).copysign(x)
    }

    fn worst(curve: ActivationFn, reference: impl Fn(f64) -> f64) -> f64 {
        let mut got = points();
        curve.apply(&mut got);
        let error = |(x, y): (&f32, &f32)| {
            let x = f64::from(*x);
            (f64::from(*y) - reference(x)).abs() / x.abs().max(1.0)
        };
        points().iter().zip(&got).map(error).fold(0.0, f64::max)
    }

    #[test]
    fn activation_functions_match_f64() {
        let gelu = |x: f64| 0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt()));
        let laplace = |x: f64| {
            let x = (x - f64::from(LAPLACE_MEAN)) / f64::from(LAPLACE_DEVIATION);
            0.5 * (1.0 + erf(x / 2.0_f64.sqrt()))
        };
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let tanh_gelu = |x: f64| 0.5 * x * (1.0 + (root * (x + 0.044715 * x * x * x)).tanh());
        for (curve, error) in [
            (ActivationFn::Gelu, worst(ActivationFn::Gelu, gelu)),
            (ActivationFn::GeluTanh, worst(ActivationFn::GeluTanh, tanh_gelu)),
            (ActivationFn::Silu, worst(ActivationFn::Silu, |x| x / (1.0 + (-x).exp()))),
            (ActivationFn::Relu, worst(ActivationFn::Relu, |x| x.max(0.0))),
            (ActivationFn::Tanh, worst(ActivationFn::Tanh, f64::tanh)),
            (
                ActivationFn::QuickGelu,
                worst(ActivationFn::QuickGelu, |x| x / (1.0 + (-1.702 * x).exp())),
            ),
            (ActivationFn::ClippedGelu, worst(ActivationFn::ClippedGelu, |x| gelu(x).min(10.0))),
            (
                ActivationFn::SquaredRelu,
                worst(ActivationFn::SquaredRelu, |x| x.max(0.0).powi(2)) / 12.0,
            ),
            (ActivationFn::Relu6, worst(ActivationFn::Relu6, |x| x.clamp(0.0, 6.0))),
            (ActivationFn::LeakyRelu, worst(ActivationFn::LeakyRelu, |x| x.max(0.01 * x))),
            (
                ActivationFn::HardSwish,
                worst(ActivationFn::HardSwish, |x| x * (x + 3.0).clamp(0.0, 6.0) / 6.0),
            ),
            (ActivationFn::Mish, worst(ActivationFn::Mish, |x| x * x.exp().ln_1p().tanh())),
            (ActivationFn::Laplace, worst(ActivationFn::Laplace, laplace)),
            (ActivationFn::Sigmoid, worst(ActivationFn::Sigmoid, |x| 1.0 / (1.0 + (-x).exp()))),
            (ActivationFn::Linear, worst(ActivationFn::Linear, |x| x)),
        ] {
            assert!(error <= 2e-7, "{curve:?}: {error:e}");
        }
    }

    #[test]
    fn activation_functions_on_vectors_equal_whole_rows() {
        struct Each<'a>(ActivationFn, &'a mut [f32]);
        impl SimdOp for Each<'_> {
            type Output = ();
            #[inline(always)]
            fn eval<I: Isa>(self, isa: I) {
                let ops = isa.f32();
                for vector in self.1.chunks_exact_mut(ops.len()) {
                    ops.store(self.0.eval(isa, ops.load(vector)), vector);
                }
            }
        }
        for curve in ALL {
            let mut rows = points()[..24_000].to_vec();
            let mut lanes = rows.clone();
            curve.apply(&mut rows);
            run(Each(curve, &mut lanes));
            assert_eq!(lanes, rows, "{curve:?}");
        }
    }

    #[test]
    fn activation_functions_keep_nan_and_are_exact_at_huge_inputs() {
        for curve in
            [ActivationFn::Gelu, ActivationFn::GeluTanh, ActivationFn::Silu, ActivationFn::Relu]
        {
            let mut row = [f32::NAN, 1e30, -1e30, -0.0];
            curve.apply(&mut row);
            assert!(row[0].is_nan(), "{curve:?}");
            assert_eq!(row[1..], [1e30, 0.0, 0.0], "{curve:?}");
        }
        for curve in ALL {
            let mut row = [f32::NAN; 3];
            curve.apply(&mut row);
            assert!(row.iter().all(|value| value.is_nan()), "{curve:?}");
        }
    }
}
