//! Functions of each value, and of two values whose axes may be repeated.

use super::{
    super::{
        activation::{ActivationFn, Map},
        instructions::run,
        threads::Threads,
    },
    each_row,
};
use galaxy_model::onnx::{Binary, Unary};
use rten_simd::{Isa, SimdOp};
use rten_vecmath::{Erf, Exp};

/// Values that are worked on at a time, which stay in a first-level cache.
const AT_A_TIME: usize = 2048;

/// A function of each value of a row, in place, by a plain loop.
struct Each<'a, F>(&'a mut [f32], F);

impl<F: Fn(f32) -> f32> SimdOp for Each<'_, F> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        self.0.iter_mut().for_each(|x| *x = (self.1)(*x));
    }
}

/// The function of each value of `row`, in place.
fn apply(function: Unary, row: &mut [f32]) {
    match function {
        Unary::Abs => run(Each(row, f32::abs)),
        Unary::Ceil => run(Each(row, f32::ceil)),
        Unary::Clip { least, most } => run(Each(row, move |x| {
            let x = if x < least { least } else { x };
            if x > most { most } else { x }
        })),
        Unary::Elu { alpha } => {
            run(Each(row, move |x: f32| if x < 0.0 { alpha * x.exp_m1() } else { x }))
        }
        Unary::Erf => run(Map(Erf {}, row)),
        Unary::Exp => run(Map(Exp {}, row)),
        Unary::Floor => run(Each(row, f32::floor)),
        Unary::HardSigmoid { alpha, beta } => {
            run(Each(row, move |x: f32| (alpha * x + beta).clamp(0.0, 1.0)))
        }
        Unary::HardSwish => run(Each(row, |x: f32| x * (x / 6.0 + 0.5).clamp(0.0, 1.0))),
        Unary::LeakyRelu { alpha } => run(Each(row, move |x| if x < 0.0 { alpha * x } else { x })),
        Unary::Log => run(Each(row, f32::ln)),
        Unary::Mish => ActivationFn::Mish.apply(row),
        Unary::Neg => run(Each(row, |x: f32| -x)),
        Unary::Reciprocal => run(Each(row, |x: f32| 1.0 / x)),
        Unary::Relu => run(Each(row, |x: f32| if x < 0.0 { 0.0 } else { x })),
        Unary::Sigmoid => ActivationFn::Sigmoid.apply(row),
        Unary::Softplus => run(Each(row, |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() })),
        Unary::Sqrt => run(Each(row, f32::sqrt)),
        Unary::Tanh => ActivationFn::Tanh.apply(row),
    }
}

/// `out = function(from)`, or of `out` itself without `from`.
pub(crate) fn unary(threads: &Threads, function: Unary, from: Option<&[f32]>, out: &mut [f32]) {
    by_chunks(threads, out, |at, out| {
        if let Some(from) = from {
            out.copy_from_slice(&from[at..at + out.len()]);
        }
        apply(function, out);
    });
}

/// Runs `work` on chunks of `out` with the place of their first value.
fn by_chunks(threads: &Threads, out: &mut [f32], work: impl Fn(usize, &mut [f32]) + Sync) {
    let values = out.len();
    threads.each(out, AT_A_TIME, values, |first, part: &mut [f32]| {
        for (at, chunk) in part.chunks_mut(AT_A_TIME).enumerate() {
            work(first + at * AT_A_TIME, chunk);
        }
    });
}

/// The operands of a function of two values along one axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct BinaryAxis {
    side: usize,
    /// How far apart neighbours are; 0 where the operand is repeated.
    strides: [usize; 2],
}

/// How two operands are repeated to fit the shape of a result: few axes, of which the last is the longest run.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Broadcast {
    axes: Vec<BinaryAxis>,
}

impl Broadcast {
    /// The axes of a result of this shape, from operands of these shapes, which fit it from behind.
    pub(crate) fn new(dims: &[usize], a: &[usize], b: &[usize]) -> Self {
        let strides = |of: &[usize]| -> Vec<usize> {
            let mut strides = vec![0; dims.len()];
            let mut all = 1;
            for (axis, side) in of.iter().enumerate().rev() {
                let at = axis + dims.len() - of.len();
                strides[at] = if *side == 1 { 0 } else { all };
                all *= side;
            }
            strides
        };
        let (a, b) = (strides(a), strides(b));
        let mut axes: Vec<BinaryAxis> = Vec::new();
        for axis in (0..dims.len()).filter(|axis| dims[*axis] != 1) {
            let own = BinaryAxis { side: dims[axis], strides: [a[axis], b[axis]] };
            match axes.last_mut() {
                // What goes on where the axis before goes on is one axis with it.
                Some(last) if (0..2).all(|of| last.strides[of] == own.strides[of] * own.side) => {
                    *last = BinaryAxis { side: last.side * own.side, strides: own.strides };
                }
                _ => axes.push(own),
            }
        }
        if axes.is_empty() {
            axes.push(BinaryAxis { side: dims.iter().product(), strides: [0, 0] });
        }
        Self { axes }
    }

    /// The places in both operands of the run of values with this number.
    fn places(&self, mut number: usize) -> [usize; 2] {
        let mut places = [0; 2];
        let outer = self.axes.len() - 1;
        for axis in self.axes[..outer].iter().rev() {
            let at = number % axis.side;
            number /= axis.side;
            for (place, stride) in places.iter_mut().zip(axis.strides) {
                *place += at * stride;
            }
        }
        places
    }
}

/// A function of two values along a run, each of which goes on, or is repeated.
struct Pairs<'a, F> {
    out: &'a mut [f32],
    /// None where it stands in `out`.
    a: Option<&'a [f32]>,
    b: &'a [f32],
    function: F,
}

impl<F: Fn(f32, f32) -> f32> SimdOp for Pairs<'_, F> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Self { out, a, b, function: f } = self;
        match (a, b) {
            (None, &[b]) => out.iter_mut().for_each(|o| *o = f(*o, b)),
            (None, b) => out.iter_mut().zip(b).for_each(|(o, b)| *o = f(*o, *b)),
            (Some(&[a]), &[b]) => out.fill(f(a, b)),
            (Some(a), &[b]) => out.iter_mut().zip(a).for_each(|(o, a)| *o = f(*a, b)),
            (Some(&[a]), b) => out.iter_mut().zip(b).for_each(|(o, b)| *o = f(a, *b)),
            (Some(a), b) => {
                out.iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o = f(*a, *b));
            }
        }
    }
}

/// `out = activation(function(a, b))`; without `a`, it stands in `out` and is not repeated.
pub(crate) fn binary(
    threads: &Threads,
    (function, activation): (Binary, Option<ActivationFn>),
    broadcast: &Broadcast,
    both: (Option<&[f32]>, &[f32]),
    out: &mut [f32],
) {
    let to = (out, activation);
    match function {
        Binary::Add => pairs(threads, broadcast, both, to, |a, b| a + b),
        Binary::Sub => pairs(threads, broadcast, both, to, |a, b| a - b),
        Binary::Mul => pairs(threads, broadcast, both, to, |a, b| a * b),
        Binary::Div => pairs(threads, broadcast, both, to, |a, b| a / b),
        Binary::Pow => pairs(threads, broadcast, both, to, power),
        Binary::Max => {
            pairs(threads, broadcast, both, to, |a, b| if b > a || b.is_nan() { b } else { a })
        }
        Binary::Min => {
            pairs(threads, broadcast, both, to, |a, b| if b < a || b.is_nan() { b } else { a })
        }
        Binary::PRelu => {
            pairs(threads, broadcast, both, to, |a, b| if a < 0.0 { a * b } else { a })
        }
    }
}

/// The power of a with the exponent b, without a logarithm for the square and the root.
#[inline(always)]
fn power(a: f32, b: f32) -> f32 {
    match b {
        2.0 => a * a,
        0.5 => a.sqrt(),
        b => a.powf(b),
    }
}

fn pairs(
    threads: &Threads,
    broadcast: &Broadcast,
    (a, b): (Option<&[f32]>, &[f32]),
    (out, activation): (&mut [f32], Option<ActivationFn>),
    function: impl Fn(f32, f32) -> f32 + Sync + Copy,
) {
    let each = |a: Option<&[f32]>, b: &[f32], out: &mut [f32]| {
        run(Pairs { out: &mut *out, a, b, function });
        if let Some(activation) = activation {
            activation.apply(out);
        }
    };
    let Some(&BinaryAxis { side, strides }) = broadcast.axes.last() else { return };
    // One long run is cut into chunks, of which each is a run.
    if broadcast.axes.len() == 1 {
        let part = |of: &'_ [f32], stride: usize, at: usize, len: usize| match stride {
            0 => 0..1.min(of.len()),
            _ => at..at + len,
        };
        return by_chunks(threads, out, |at, out| {
            let len = out.len();
            let a = a.map(|a| &a[part(a, strides[0], at, len)]);
            each(a, &b[part(b, strides[1], at, len)], out);
        });
    }
    each_row(threads, out, side, side, |number, out| {
        let places = broadcast.places(number);
        let run_of = |of: usize| {
            if strides[of] == 0 {
                places[of]..places[of] + 1
            } else {
                places[of]..places[of] + side
            }
        };
        let a = a.map(|a| &a[run_of(0)]);
        each(a, &b[run_of(1)], out);
    });
}
