//! Sums, means and largest values along an axis, softmax, and interpolation: values of `[outer, side, inner]`.

use super::{
    super::{activation::ActivationFn, instructions::run, threads::Threads},
    each_row,
};
use galaxy_model::onnx::{ReduceKind, Tap};
use rten_simd::{Isa, SimdOp};

/// A loop over rows, compiled for the instructions of this process.
struct Rows<F>(F);

impl<F: FnOnce()> SimdOp for Rows<F> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        (self.0)();
    }
}

/// `out`, `[outer, inner]`, from all entries of the middle axis of `from`.
pub(crate) fn reduce(
    threads: &Threads,
    kind: ReduceKind,
    [outer, side, inner]: [usize; 3],
    from: &[f32],
    out: &mut [f32],
) {
    debug_assert_eq!(out.len(), outer * inner);
    each_row(threads, out, inner, side * inner, |number, out| {
        let from = &from[number * side * inner..][..side * inner];
        run(Rows(|| of_block(kind, side, from, out)));
    });
}

#[inline(always)]
fn of_block(kind: ReduceKind, side: usize, from: &[f32], out: &mut [f32]) {
    let inner = out.len();
    if inner == 1 {
        out[0] = match kind {
            ReduceKind::Sum => sum(from),
            ReduceKind::Mean => sum(from) / side as f32,
            ReduceKind::Max => from.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            ReduceKind::Min => from.iter().copied().fold(f32::INFINITY, f32::min),
        };
        return;
    }
    out.fill(match kind {
        ReduceKind::Sum | ReduceKind::Mean => 0.0,
        ReduceKind::Max => f32::NEG_INFINITY,
        ReduceKind::Min => f32::INFINITY,
    });
    for entry in from.chunks_exact(inner) {
        let pairs = out.iter_mut().zip(entry);
        match kind {
            ReduceKind::Sum | ReduceKind::Mean => pairs.for_each(|(o, x)| *o += x),
            ReduceKind::Max => pairs.for_each(|(o, x)| *o = o.max(*x)),
            ReduceKind::Min => pairs.for_each(|(o, x)| *o = o.min(*x)),
        }
    }
    if kind == ReduceKind::Mean {
        let by = 1.0 / side as f32;
        out.iter_mut().for_each(|o| *o *= by);
    }
}

/// The sum of many values, by parts, so that its error stays small.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let mut parts = [0f32; 16];
    let mut chunks = values.chunks_exact(16);
    for chunk in &mut chunks {
        parts.iter_mut().zip(chunk).for_each(|(part, x)| *part += x);
    }
    parts.iter().chain(chunks.remainder()).sum()
}

/// The softmax along the middle axis, or its logarithm.
pub(crate) fn softmax(
    threads: &Threads,
    log: bool,
    [outer, side, inner]: [usize; 3],
    from: &[f32],
    out: &mut [f32],
) {
    debug_assert_eq!(out.len(), outer * side * inner);
    each_row(threads, out, side * inner, 8 * side * inner, |number, out| {
        let from = &from[number * side * inner..][..side * inner];
        for at in 0..inner {
            let own = || from[at..].iter().step_by(inner).copied();
            let most = own().fold(f32::NEG_INFINITY, f32::max);
            let all: f32 = own().map(|x| (x - most).exp()).sum();
            for (o, x) in out[at..].iter_mut().step_by(inner).zip(own()) {
                *o = if log { x - most - all.ln() } else { (x - most).exp() / all };
            }
        }
    });
}

/// Entries of the middle axis of `from`, `[outer, side, inner]`, by their weights: `out` is `[outer, taps, inner]`.
pub(crate) fn interpolate(
    threads: &Threads,
    [outer, side, inner]: [usize; 3],
    taps: &[Vec<Tap>],
    from: &[f32],
    out: &mut [f32],
) {
    debug_assert_eq!(out.len(), outer * taps.len() * inner);
    each_row(threads, out, inner, 2 * inner, |number, out| {
        let (block, taps) = (number / taps.len(), &taps[number % taps.len()]);
        let entry = |tap: &Tap| &from[(block * side + tap.index as usize) * inner..][..inner];
        match taps.as_slice() {
            [] => out.fill(0.0),
            [one] if one.weight == 1.0 => out.copy_from_slice(entry(one)),
            taps => run(Rows(|| {
                out.fill(0.0);
                for tap in taps {
                    out.iter_mut().zip(entry(tap)).for_each(|(o, x)| *o += tap.weight * x);
                }
            })),
        }
    });
}

/// `out = activation(from * scale + shift)`, of each channel: rows of as many values as there are channels.
pub(crate) fn scale_channels(
    threads: &Threads,
    from: &[f32],
    (scale, shift): (&[f32], &[f32]),
    activation: Option<ActivationFn>,
    out: &mut [f32],
) {
    let width = scale.len();
    each_row(threads, out, width, width, |number, out| {
        let from = &from[number * width..][..width];
        run(Rows(|| {
            for (((o, x), scale), shift) in out.iter_mut().zip(from).zip(scale).zip(shift) {
                *o = x * scale + shift;
            }
        }));
        if let Some(activation) = activation {
            activation.apply(out);
        }
    });
}

/// Each value by the mean square of `size` neighbouring channels: x / (bias + alpha / size * sum of squares)^beta.
pub(crate) fn local_response(
    threads: &Threads,
    (size, alpha, beta, bias): (usize, f32, f32, f32),
    channels: usize,
    from: &[f32],
    out: &mut [f32],
) {
    let (before, after) = ((size - 1) / 2, size / 2);
    each_row(threads, out, channels, channels * (size + 8), |number, out| {
        let from = &from[number * channels..][..channels];
        for (at, o) in out.iter_mut().enumerate() {
            let near = &from[at.saturating_sub(before)..(at + after + 1).min(channels)];
            let squares: f32 = near.iter().map(|x| x * x).sum();
            *o = from[at] / (bias + alpha / size as f32 * squares).powf(beta);
        }
    });
}
