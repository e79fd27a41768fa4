//! Pooling of images whose channels lie side by side.

use super::{
    super::{instructions::run, threads::Threads, windows::Axis},
    each_row,
    geometry::Geometry,
};
use galaxy_model::onnx::PoolKind;
use rten_simd::{Isa, SimdOp};

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
    fn eval<I: Isa>(self, _: I) {
        let Self { kind, geometry, channels, number, from, out } = self;
        let (image, at) = geometry.pixel(number);
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
        if let PoolKind::Average { with_padding } = kind {
            let counted = |(side, at): (&Axis, usize)| side.counted(at, with_padding);
            let count: usize = geometry.sides.iter().zip(at).map(counted).product();
            let by = 1.0 / count.max(1) as f32;
            out.iter_mut().for_each(|o| *o *= by);
        }
    }
}
