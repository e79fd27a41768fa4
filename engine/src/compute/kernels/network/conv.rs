//! Convolutions of images whose channels lie side by side: products of a matrix with windows, which are read where they
//! lie. Only in volumes, and where pixels are far apart, are they copied one behind another.

use super::{
    super::{
        activation::ActivationFn,
        area::{Area, AreaMut, Extent, grow},
        dense::{self, Epilogue},
        windows::{Axis, Image, Windows},
    },
    Context,
    depthwise::Depthwise,
    each_row,
    geometry::Geometry,
};
use crate::weights::{AnyMatrix, ShardMatrix};
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// Values between pixels, of which multiples share so few lines of a first-level cache that the pixels of a tile push
/// each other out.
const FAR: usize = 1024;
/// Values of windows that are copied at a time: 1 MB.
const AT_A_TIME: usize = 1 << 18;

/// The kernels of a convolution, as they are multiplied with.
pub(crate) enum Kernels {
    /// A matrix `[window x channels of a group, outputs of a group]` for each group.
    Groups(Vec<ShardMatrix>),
    /// A kernel for each channel alone: `[window, channels]`.
    EachChannel(Vec<f32>),
}

/// A convolution with packed kernels.
pub(crate) struct Convolution {
    pub(crate) geometry: Geometry,
    /// Channels of what is read, and of the result.
    pub(crate) channels: (usize, usize),
    pub(crate) kernels: Kernels,
    pub(crate) bias: Option<Vec<f32>>,
    /// The activation function that follows.
    pub(crate) activation: Option<ActivationFn>,
    /// Windows that were copied.
    pub(crate) copied: Mutex<Vec<f32>>,
}

impl Convolution {
    /// The convolution of `from`, `[images, pixels, channels]`, to `out`, the same with its results.
    pub(crate) fn run(&self, context: &Context, from: &[f32], out: &mut [f32]) {
        match &self.kernels {
            Kernels::EachChannel(kernels) => {
                let (geometry, channels) = (&self.geometry, self.channels.0);
                let (bias, activation) = (self.bias.as_deref(), self.activation);
                let of = Depthwise { geometry, channels, kernels, bias, activation };
                of.run(context, from, out);
            }
            Kernels::Groups(groups) => self.groups(context, groups, from, out),
        }
    }

    fn groups(&self, context: &Context, groups: &[ShardMatrix], from: &[f32], out: &mut [f32]) {
        match self.geometry.plane() {
            Some(axes) if !self.is_packed_better() => {
                self.windows(context, groups, axes, (from, out));
            }
            _ => self.copied(context, groups, from, out),
        }
    }

    /// Whether pixels lie so far apart that few lines of a first-level cache hold them, and are better packed.
    fn is_packed_better(&self) -> bool {
        let apart = self.channels.0 * self.geometry.sides[2].stride;
        self.geometry.kernel() == 1 && apart.is_multiple_of(FAR)
    }

    /// Multiplies the windows of each image where they lie.
    fn windows(
        &self,
        context: &Context,
        groups: &[ShardMatrix],
        axes: [Axis; 2],
        (from, out): (&[f32], &mut [f32]),
    ) {
        let (channels, outputs) = self.channels;
        let (own, made) = (channels / groups.len(), outputs / groups.len());
        let [height, width] = axes;
        let rows = height.made * width.made;
        let images = from.chunks_exact((height.read * width.read * channels).max(1));
        for (values, out) in images.zip(out.chunks_exact_mut((rows * outputs).max(1))) {
            for (group, matrix) in groups.iter().enumerate() {
                let image = Image { values, channels, first: group * own, own };
                let windows = Windows::new(AnyMatrix::from(matrix).panels(), image, axes);
                let extent = Extent { start: group * made, rows, columns: made, stride: outputs };
                let Some(out) = AreaMut::new(out, extent) else { return };
                let bias = self.bias.as_deref().map(|bias| &bias[group * made..][..made]);
                let epilogue = Epilogue::of(bias, false, self.activation);
                dense::convolve(&context.threads, &context.scratch, windows, out, epilogue);
            }
        }
    }

    fn copied(&self, context: &Context, groups: &[ShardMatrix], from: &[f32], out: &mut [f32]) {
        let (channels, outputs) = self.channels;
        let (own, made) = (channels / groups.len(), outputs / groups.len());
        let rows = out.len() / outputs.max(1);
        let window = self.geometry.kernel() * own;
        let chunk = match self.geometry.is_pointwise() {
            true => rows,
            false => (AT_A_TIME / window.max(1)).clamp(1, rows.max(1)),
        };
        let mut copied = self.copied.lock().unwrap_or_else(PoisonError::into_inner);
        for first in (0..rows).step_by(chunk.max(1)) {
            let count = chunk.min(rows - first);
            for (group, matrix) in groups.iter().enumerate() {
                let left = match self.geometry.is_pointwise() {
                    true => {
                        let start = first * channels + group * own;
                        Area::new(
                            from,
                            Extent { start, rows: count, columns: own, stride: channels },
                        )
                    }
                    false => {
                        grow(&mut copied, count * window);
                        self.copy(
                            context,
                            from,
                            first,
                            group * own..(group + 1) * own,
                            &mut copied[..count * window],
                        );
                        Area::new(
                            &copied,
                            Extent { start: 0, rows: count, columns: window, stride: window },
                        )
                    }
                };
                let start = first * outputs + group * made;
                let extent = Extent { start, rows: count, columns: made, stride: outputs };
                let (Some(left), Some(out)) = (left, AreaMut::new(out, extent)) else { return };
                let bias = self.bias.as_deref().map(|bias| &bias[group * made..][..made]);
                let epilogue = Epilogue::of(bias, false, self.activation);
                dense::product(&context.threads, &context.scratch, left, matrix, out, epilogue);
            }
        }
    }

    /// Copies the windows of results from `first` on, `[results, window, channels of a group]`.
    fn copy(
        &self,
        context: &Context,
        from: &[f32],
        first: usize,
        of: Range<usize>,
        copied: &mut [f32],
    ) {
        let (channels, own) = (self.channels.0, of.len());
        let window = self.geometry.kernel() * own;
        each_row(&context.threads, copied, window, window, |number, row_of| {
            let (image, place) = self.geometry.pixel(first + number);
            let [d, h, w] = self.geometry.sides;
            let mut to = row_of.chunks_exact_mut(own);
            for a in 0..d.kernel {
                let z = d.sees(place[0], a);
                for b in 0..h.kernel {
                    let y = h.sees(place[1], b);
                    for c in 0..w.kernel {
                        let Some(to) = to.next() else { return };
                        match (z, y, w.sees(place[2], c)) {
                            (Some(z), Some(y), Some(x)) => {
                                let pixel = ((image * d.read + z) * h.read + y) * w.read + x;
                                to.copy_from_slice(&from[pixel * channels..][of.clone()]);
                            }
                            _ => to.fill(0.0),
                        }
                    }
                }
            }
        });
    }

    /// The transposed convolution: each pixel of `from`, `[images, pixels, channels]`, adds its kernels to the window of
    /// `out` that it is the result of. The geometry is that of the convolution from `out` to `from`.
    pub(crate) fn run_transposed(&self, context: &Context, from: &[f32], out: &mut [f32]) {
        let Kernels::Groups(groups) = &self.kernels else { return };
        let (channels, outputs) = self.channels;
        let (own, made) = (channels / groups.len(), outputs / groups.len());
        let rows = from.len() / channels.max(1);
        let window = self.geometry.kernel() * made;
        match &self.bias {
            Some(bias) => out.chunks_mut(outputs).for_each(|pixel| pixel.copy_from_slice(bias)),
            None => out.fill(0.0),
        }
        let mut copied = self.copied.lock().unwrap_or_else(PoisonError::into_inner);
        let chunk = (AT_A_TIME / window.max(1)).clamp(1, rows.max(1));
        for first in (0..rows).step_by(chunk) {
            let count = chunk.min(rows - first);
            for (group, matrix) in groups.iter().enumerate() {
                grow(&mut copied, count * window);
                let start = first * channels + group * own;
                let left =
                    Area::new(from, Extent { start, rows: count, columns: own, stride: channels });
                let extent = Extent { start: 0, rows: count, columns: window, stride: window };
                let (Some(left), Some(sums)) = (left, AreaMut::new(&mut copied, extent)) else {
                    return;
                };
                dense::product(
                    &context.threads,
                    &context.scratch,
                    left,
                    matrix,
                    sums,
                    Epilogue::default(),
                );
                for row in 0..count {
                    let (image, at) = self.geometry.pixel(first + row);
                    let sums = &copied[row * window..][..window];
                    self.geometry.seen(image, at, |pixel, element| {
                        let out = &mut out[pixel * outputs + group * made..][..made];
                        let sums = &sums[element * made..][..made];
                        out.iter_mut().zip(sums).for_each(|(o, x)| *o += x);
                    });
                }
            }
        }
        if let Some(activation) = self.activation {
            out.chunks_mut(1 << 12).for_each(|part| activation.apply(part));
        }
    }
}
