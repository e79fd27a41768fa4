//! Pooling of images whose channels lie side by side.

use super::{
    super::{instructions::run, threads::Threads, windows::Axis},
    each_row,
    geometry::Geometry,
};
use galaxy_model::onnx::PoolKind;
use rten_simd::{
    Isa, SimdOp,
    ops::{BitOps, NumOps},
};

/// The largest or mean value of each window of each channel.
///
/// # Shapes
/// from `[images, depth, height, width, channels]`, out the same with the results of the windows.
pub(crate) fn pool(
    threads: &Threads,
    kind: PoolKind,
    geometry: &Geometry,
    channels: usize,
    from: &[f32],
    out: &mut [f32],
) {
    let kernel: usize = geometry.sides.iter().map(|side| side.kernel).product();
    each_row(threads, out, channels, kernel * channels, |number, out| {
        run(Pixel { kind, geometry, channels, number, from, out });
    });
}

/// Vectors of channels that are pooled together.
const TOGETHER: usize = 4;

/// One pixel of a result.
struct Pixel<'a> {
    kind: PoolKind,
    geometry: &'a Geometry,
    channels: usize,
    number: usize,
    from: &'a [f32],
    out: &'a mut [f32],
}

impl SimdOp for Pixel<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let (image, at) = self.geometry.pixel(self.number);
        let by = match self.kind {
            PoolKind::Max => 1.0,
            PoolKind::Average { with_padding } => {
                let counted = |(side, at): (&Axis, usize)| side.counted(at, with_padding);
                let count: usize = self.geometry.sides.iter().zip(at).map(counted).product();
                1.0 / count.max(1) as f32
            }
        };
        let lanes = isa.f32().len();
        if self.channels < lanes {
            return self.few((image, at), by);
        }
        let many = lanes * TOGETHER;
        let mut channel = 0;
        while channel < self.channels {
            let is_max = self.kind == PoolKind::Max;
            // The last channels are some of those before, and the rest.
            let first = channel.min(self.channels - lanes);
            let place = (image, at, first);
            channel = match (channel + many <= self.channels, is_max) {
                (true, true) => self.vectors::<I, TOGETHER, true>(isa, place, by),
                (true, false) => self.vectors::<I, TOGETHER, false>(isa, place, by),
                (false, true) => self.vectors::<I, 1, true>(isa, place, by),
                (false, false) => self.vectors::<I, 1, false>(isa, place, by),
            };
        }
    }
}

impl Pixel<'_> {
    /// Pools `COUNT` vectors of channels from `first` on, and gives the channel behind them.
    #[inline(always)]
    fn vectors<I: Isa, const COUNT: usize, const MAX: bool>(
        &mut self,
        isa: I,
        (image, at, first): (usize, [usize; 3], usize),
        by: f32,
    ) -> usize {
        let ops = isa.f32();
        let [d, h, w] = self.geometry.sides;
        let mut all = [ops.splat(if MAX { f32::NEG_INFINITY } else { 0.0 }); COUNT];
        for a in 0..d.kernel {
            let Some(z) = d.sees(at[0], a) else { continue };
            for b in 0..h.kernel {
                let Some(y) = h.sees(at[1], b) else { continue };
                let line = ((image * d.read + z) * h.read + y) * w.read;
                for c in 0..w.kernel {
                    let Some(x) = w.sees(at[2], c) else { continue };
                    let from = &self.from[(line + x) * self.channels + first..];
                    for (all, from) in all.iter_mut().zip(from.chunks_exact(ops.len())) {
                        let value = ops.load(from);
                        *all = match MAX {
                            // What is not a number stays: it is not equal to itself.
                            true => {
                                let larger = ops.select(*all, value, ops.ge(*all, value));
                                ops.select(larger, *all, ops.eq(*all, *all))
                            }
                            false => ops.add(*all, value),
                        };
                    }
                }
            }
        }
        for (all, out) in all.into_iter().zip(self.out[first..].chunks_exact_mut(ops.len())) {
            ops.store(if MAX { all } else { ops.mul(all, ops.splat(by)) }, out);
        }
        first + COUNT * ops.len()
    }

    /// Pools fewer channels than a vector has.
    fn few(self, (image, at): (usize, [usize; 3]), by: f32) {
        let Self { kind, geometry, channels, from, out, .. } = self;
        out.fill(if kind == PoolKind::Max { f32::NEG_INFINITY } else { 0.0 });
        geometry.seen(image, at, |place, _| {
            let pixel = &from[place * channels..][..channels];
            let pairs = out.iter_mut().zip(pixel);
            match kind {
                PoolKind::Max => {
                    pairs.for_each(|(o, x)| *o = if *x > *o || x.is_nan() { *x } else { *o })
                }
                PoolKind::Average { .. } => pairs.for_each(|(o, x)| *o += x),
            }
        });
        out.iter_mut().for_each(|o| *o *= by);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::instructions::Instructions, *};
    use galaxy_model::onnx::Window;

    #[test]
    fn windows_of_any_channels_are_pooled_and_what_is_no_number_stays() {
        let window = Window { kernel: 3, dilation: 1, stride: 2, before: 1, after: 1 };
        let geometry = Geometry::new(1, &[Axis::new(7, 4, &window), Axis::new(9, 5, &window)]);
        for instructions in Instructions::all() {
            for channels in [1, 3, 16, 21, 40] {
                let mut from: Vec<f32> =
                    (0..63 * channels).map(|at| (at * 37 % 101) as f32).collect();
                from[20 * channels] = f32::NAN;
                for kind in [PoolKind::Max, PoolKind::Average { with_padding: false }] {
                    let mut out = vec![0.0; 20 * channels];
                    for (number, out) in out.chunks_exact_mut(channels).enumerate() {
                        let geometry = &geometry;
                        let from = &from;
                        instructions.run(Pixel { kind, geometry, channels, number, from, out });
                    }
                    for (at, got) in out.iter().enumerate() {
                        let (pixel, channel) = (at / channels, at % channels);
                        let mut seen = Vec::new();
                        geometry.seen(0, [0, pixel / 5, pixel % 5], |place, _| {
                            seen.push(from[place * channels + channel]);
                        });
                        let want = match kind {
                            _ if seen.iter().any(|x| x.is_nan()) => f32::NAN,
                            PoolKind::Max => seen.iter().copied().fold(f32::MIN, f32::max),
                            PoolKind::Average { .. } => {
                                seen.iter().sum::<f32>() / seen.len() as f32
                            }
                        };
                        let is_right = got.is_nan() && want.is_nan() || (got - want).abs() < 1e-4;
                        assert!(
                            is_right,
                            "{instructions} {channels} {kind:?} {at}: {got} and not {want}"
                        );
                    }
                }
            }
        }
    }
}
