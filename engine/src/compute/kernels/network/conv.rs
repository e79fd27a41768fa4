//! Convolutions of images whose channels lie side by side. A window's pixels are copied one behind another where they
//! do not lie so, and multiplied as rows of a product; where each channel has a kernel of its own they are not.

use super::{
    super::{
        activation::ActivationFn,
        area::{Area, AreaMut, Extent, grow},
        dense::{self, Epilogue},
        instructions::run,
    },
    Context, each_row,
};
use crate::weights::ShardMatrix;
use galaxy_model::onnx::Window;
use rten_simd::{Isa, SimdOp};
use std::sync::{Mutex, PoisonError};

/// Values of windows that are copied at a time: 1 MB.
const AT_A_TIME: usize = 1 << 18;

/// One axis of images, and the window that slides along it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Side {
    /// Pixels of what is read.
    pub(crate) read: usize,
    /// Pixels of the result.
    pub(crate) made: usize,
    pub(crate) kernel: usize,
    dilation: usize,
    stride: usize,
    before: usize,
    after: usize,
}

impl Side {
    pub(crate) fn new(read: usize, made: usize, window: &Window) -> Self {
        Self {
            read,
            made,
            kernel: window.kernel as usize,
            dilation: window.dilation as usize,
            stride: window.stride as usize,
            before: window.before as usize,
            after: window.after as usize,
        }
    }

    /// The pixel that element `of` of the window of result `at` sees; none in the padding.
    #[inline(always)]
    fn sees(&self, at: usize, of: usize) -> Option<usize> {
        let padded = at * self.stride + of * self.dilation;
        padded.checked_sub(self.before).filter(|pixel| *pixel < self.read)
    }

    /// How many elements of the window of result `at` count in a mean.
    pub(crate) fn counted(&self, at: usize, with_padding: bool) -> usize {
        let padded = self.read + self.before + self.after;
        let is_counted = |of: &usize| match with_padding {
            true => at * self.stride + of * self.dilation < padded,
            false => self.sees(at, *of).is_some(),
        };
        (0..self.kernel).filter(is_counted).count()
    }
}

/// Images and the windows that slide over them: depth, height and width, of which those that there are not are 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    pub(crate) images: usize,
    pub(crate) sides: [Side; 3],
}

impl Geometry {
    /// The most axes of an image.
    pub(crate) const MOST: usize = 3;

    /// The geometry of at most three axes behind one another.
    pub(crate) fn new(images: usize, sides: &[Side]) -> Self {
        let one = Window { kernel: 1, dilation: 1, stride: 1, before: 0, after: 0 };
        let mut all = [Side::new(1, 1, &one); 3];
        all[3 - sides.len()..].copy_from_slice(sides);
        Self { images, sides: all }
    }

    /// How many elements a window has.
    pub(crate) fn kernel(&self) -> usize {
        self.sides.iter().map(|side| side.kernel).product()
    }

    /// Whether each result sees its own pixel and nothing else.
    pub(crate) fn is_pointwise(&self) -> bool {
        let same = |side: &Side| {
            side.kernel == 1 && side.stride == 1 && side.before == 0 && side.read == side.made
        };
        self.sides.iter().all(same)
    }

    /// The image of a pixel of the result, and where it is there.
    #[inline(always)]
    pub(crate) fn pixel(&self, number: usize) -> (usize, [usize; 3]) {
        let [_, height, width] = self.sides.map(|side| side.made);
        let row = number / width;
        let slice = row / height;
        let depth = self.sides[0].made;
        (slice / depth, [slice % depth, row % height, number % width])
    }

    /// Gives each pixel that the window of a result sees, with the number of the window's element.
    #[inline(always)]
    pub(crate) fn seen(&self, image: usize, at: [usize; 3], mut each: impl FnMut(usize, usize)) {
        let [d, h, w] = self.sides;
        for a in 0..d.kernel {
            let Some(z) = d.sees(at[0], a) else { continue };
            for b in 0..h.kernel {
                let Some(y) = h.sees(at[1], b) else { continue };
                let row = ((image * d.read + z) * h.read + y) * w.read;
                for c in 0..w.kernel {
                    if let Some(x) = w.sees(at[2], c) {
                        each(row + x, (a * h.kernel + b) * w.kernel + c);
                    }
                }
            }
        }
    }
}

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
            Kernels::EachChannel(kernels) => self.each_channel(context, kernels, from, out),
            Kernels::Groups(groups) => self.groups(context, groups, from, out),
        }
    }

    fn groups(&self, context: &Context, groups: &[ShardMatrix], from: &[f32], out: &mut [f32]) {
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
        of: std::ops::Range<usize>,
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

    fn each_channel(&self, context: &Context, kernels: &[f32], from: &[f32], out: &mut [f32]) {
        let channels = self.channels.0;
        let values = 2 * self.geometry.kernel() * channels;
        each_row(&context.threads, out, channels, values, |number, out| {
            run(ChannelPixel { of: self, kernels, number, from, out });
            if let Some(activation) = self.activation {
                activation.apply(out);
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

/// One pixel of a convolution in which each channel has a kernel of its own.
struct ChannelPixel<'a> {
    of: &'a Convolution,
    kernels: &'a [f32],
    number: usize,
    from: &'a [f32],
    out: &'a mut [f32],
}

impl SimdOp for ChannelPixel<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let channels = self.of.channels.0;
        let (image, at) = self.of.geometry.pixel(self.number);
        match &self.of.bias {
            Some(bias) => self.out.copy_from_slice(bias),
            None => self.out.fill(0.0),
        }
        self.of.geometry.seen(image, at, |pixel, element| {
            let from = &self.from[pixel * channels..][..channels];
            let kernel = &self.kernels[element * channels..][..channels];
            for ((o, x), k) in self.out.iter_mut().zip(from).zip(kernel) {
                *o += x * k;
            }
        });
    }
}
