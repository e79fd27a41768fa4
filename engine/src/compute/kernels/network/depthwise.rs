//! Convolutions in which each channel has a kernel of its own. The sums of some channels of some neighbouring pixels stay
//! in registers while the elements of the window pass by.

use super::{
    super::{
        activation::ActivationFn,
        instructions::run,
        packed::{share, wide},
    },
    Context, each_row,
    geometry::Geometry,
};
use rten_simd::{
    Isa, SimdOp,
    ops::{BitOps, NumOps},
};
use std::ops::Range;

/// Neighbouring pixels whose sums stay in the registers of AVX-512.
const WIDE_PIXELS: usize = 8;
/// Neighbouring pixels whose sums stay in other registers.
const NARROW_PIXELS: usize = 4;

/// A convolution with a kernel for each channel.
pub(crate) struct Depthwise<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) channels: usize,
    /// The kernels, `[window, channels]`.
    pub(crate) kernels: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    /// The activation function that follows.
    pub(crate) activation: Option<ActivationFn>,
}

impl Depthwise<'_> {
    /// The convolution of `from`, `[images, pixels, channels]`, to `out`, the same with its results.
    pub(crate) fn run(&self, context: &Context, from: &[f32], out: &mut [f32]) {
        let line = self.geometry.sides[2].made * self.channels;
        let values = 2 * self.geometry.kernel() * line;
        each_row(&context.threads, out, line, values, |number, out| {
            run(Line { of: self, number, from, out });
        });
    }
}

/// A line of the result.
struct Line<'a> {
    of: &'a Depthwise<'a>,
    number: usize,
    from: &'a [f32],
    out: &'a mut [f32],
}

impl SimdOp for Line<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let width = self.of.geometry.sides[2];
        if self.of.channels < isa.f32().len() {
            (0..width.made).for_each(|x| self.few(x));
            if let Some(activation) = self.of.activation {
                activation.apply(self.out);
            }
            return;
        }
        let inside = width.inside();
        for x in (0..inside.start).chain(inside.end..width.made) {
            self.pixels::<I, 1>(isa, x);
        }
        self.inside(isa, inside);
    }
}

impl Line<'_> {
    /// Computes pixels whose windows see no padding on the left or right.
    #[inline(always)]
    fn inside<I: Isa>(&mut self, isa: I, pixels: Range<usize>) {
        let most = if wide::<I>() { WIDE_PIXELS } else { NARROW_PIXELS };
        let tiles = pixels.len().div_ceil(most);
        for tile in 0..tiles {
            let place = share(pixels.len(), tiles, tile);
            let x = pixels.start + place.start;
            macro_rules! pixels {
                ($($count:literal)+) => {
                    match place.len() {
                        $($count => self.pixels::<I, $count>(isa, x),)+
                        _ => unreachable!("tiles are no wider"),
                    }
                };
            }
            pixels!(1 2 3 4 5 6 7 8);
        }
    }

    /// Computes `COUNT` pixels from `x` on: of more than one, all see as much as the first.
    #[inline(always)]
    fn pixels<I: Isa, const COUNT: usize>(&mut self, isa: I, x: usize) {
        let ops = isa.f32();
        let Depthwise { geometry, channels, kernels, bias, activation } = *self.of;
        let [d, h, w] = geometry.sides;
        let (image, [z, y, _]) = geometry.pixel(self.number * w.made);
        let apart = w.stride * channels;
        let mut channel = 0;
        while channel < channels {
            // The last channels are some of those before, and the rest.
            let first = channel.min(channels - ops.len());
            let begin = match bias {
                Some(bias) => ops.load(&bias[first..]),
                None => ops.zero(),
            };
            let mut sums = [begin; COUNT];
            for a in 0..d.kernel {
                let Some(z) = d.sees(z, a) else { continue };
                for b in 0..h.kernel {
                    let Some(y) = h.sees(y, b) else { continue };
                    let line = ((image * d.read + z) * h.read + y) * w.read;
                    for c in 0..w.kernel {
                        let Some(x) = w.sees(x, c) else { continue };
                        let element = (a * h.kernel + b) * w.kernel + c;
                        let kernel = ops.load(&kernels[element * channels + first..]);
                        let from = &self.from[(line + x) * channels + first..];
                        for (pixel, sum) in sums.iter_mut().enumerate() {
                            *sum = ops.mul_add(ops.load(&from[pixel * apart..]), kernel, *sum);
                        }
                    }
                }
            }
            for (pixel, sum) in sums.into_iter().enumerate() {
                let value = match activation {
                    Some(activation) => activation.eval(isa, sum),
                    None => sum,
                };
                ops.store(value, &mut self.out[(x + pixel) * channels + first..]);
            }
            channel += ops.len();
        }
    }

    /// Sums of a pixel that has fewer channels than a vector.
    fn few(&mut self, x: usize) {
        let Depthwise { geometry, channels, kernels, bias, .. } = *self.of;
        let (image, at) = geometry.pixel(self.number * geometry.sides[2].made + x);
        let out = &mut self.out[x * channels..][..channels];
        match bias {
            Some(bias) => out.copy_from_slice(bias),
            None => out.fill(0.0),
        }
        geometry.seen(image, at, |pixel, element| {
            let from = &self.from[pixel * channels..][..channels];
            let kernel = &kernels[element * channels..][..channels];
            for ((o, x), k) in out.iter_mut().zip(from).zip(kernel) {
                *o += x * k;
            }
        });
    }
}
