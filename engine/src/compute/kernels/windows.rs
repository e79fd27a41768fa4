//! Products of a matrix with the windows of an image: a convolution. Windows are read where they lie, while the sums of
//! some neighbouring pixels stay in registers; none is copied. Only an image that has padding is, once, with zeros
//! around it.
// Hot path: no locks, no logging, no allocation once the scratch has grown.

use super::{
    area::Area,
    lines::Lines,
    micro::{self, Format, Left, Right},
    packed::{Finish, Operand, PAIR, RowChunk, WIDE_ROWS, groups, share, vectors, wide},
};
use crate::weights::{PANEL, Panels};
use galaxy_model::onnx::Window;
use rten_simd::{Isa, ops::BitOps};
use std::ops::Range;

/// Values of an image that are worked on at a time: 256 KB, which stay in a second-level cache while all panels pass by.
const AT_A_TIME: usize = 1 << 16;
/// Values between neighbouring pixels that are a multiple of this share few lines of a first-level cache.
const CROWDED: usize = 1 << 8;

/// One axis of images, and the window that slides along it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Axis {
    /// Pixels of what is read.
    pub(crate) read: usize,
    /// Pixels of the result.
    pub(crate) made: usize,
    pub(crate) kernel: usize,
    pub(crate) dilation: usize,
    pub(crate) stride: usize,
    /// Zeros before the first pixel.
    before: usize,
    /// Zeros behind the last pixel.
    after: usize,
}

impl Axis {
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

    /// An axis of so many pixels, each of which is a window.
    pub(crate) fn pointwise(pixels: usize) -> Self {
        Self { read: pixels, made: pixels, kernel: 1, dilation: 1, stride: 1, before: 0, after: 0 }
    }

    /// The pixel that element `of` of the window of result `at` sees; none in the padding.
    #[inline(always)]
    pub(crate) fn sees(&self, at: usize, of: usize) -> Option<usize> {
        let padded = at * self.stride + of * self.dilation;
        padded.checked_sub(self.before).filter(|pixel| *pixel < self.read)
    }

    /// The results whose windows see no padding.
    pub(crate) fn inside(&self) -> Range<usize> {
        let end = match self.read.checked_sub((self.kernel - 1) * self.dilation + 1) {
            Some(last) => (last + self.before) / self.stride + 1,
            None => 0,
        };
        let end = end.min(self.made);
        self.before.div_ceil(self.stride).min(end)..end
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

    /// How many pixels, padding included, the windows of so many results see.
    fn seen(&self, results: usize) -> usize {
        results.saturating_sub(1) * self.stride + (self.kernel - 1) * self.dilation + 1
    }

    /// Whether no window sees padding.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside().len() == self.made
    }
}

/// The values of an image and the channels that are read of it.
///
/// # Shapes
/// values `[height, width, channels]`.
#[derive(Clone, Copy)]
pub(crate) struct Image<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) channels: usize,
    /// The first of the channels that are read.
    pub(crate) first: usize,
    /// How many channels are read.
    pub(crate) own: usize,
}

/// The panels of a matrix, and an image whose windows they are multiplied with: row `y * width + x` of the product is
/// the result at (`y`, `x`).
///
/// # Shapes
/// panels `[window height, window width, own channels]` inputs.
#[derive(Clone, Copy)]
pub(crate) struct Windows<'a, F: Format> {
    panels: Panels<'a, F>,
    image: Image<'a>,
    height: Axis,
    width: Axis,
    /// The result that is the first row of the product.
    first: usize,
}

/// Pixels as windows read them.
#[derive(Clone, Copy)]
struct Pixels<'p> {
    values: &'p [f32],
    /// How far a pixel is from the next.
    pixel: usize,
    /// How far a line of pixels is from the next.
    line: usize,
    /// The line of results that sees the first line of pixels first.
    first: usize,
}

impl<'a, F: Format> Windows<'a, F> {
    /// # Panics
    /// When the panels do not have as many inputs as a window.
    pub(crate) fn new(panels: Panels<'a, F>, image: Image<'a>, [height, width]: [Axis; 2]) -> Self {
        assert_eq!(panels.inputs, height.kernel * width.kernel * image.own);
        Self { panels, image, height, width, first: 0 }
    }

    /// Whether windows are read from the image itself.
    fn is_in_place(&self) -> bool {
        self.height.is_inside() && self.width.is_inside()
    }

    /// How far a pixel of a copy is from the next.
    fn pixel(&self) -> usize {
        let own = self.image.own;
        own + if (own * self.width.stride).is_multiple_of(CROWDED) { PANEL } else { 0 }
    }

    /// The lines of results that these rows of the product are in.
    fn lines(&self, rows: &Range<usize>) -> Range<usize> {
        let place = |row: usize| (self.first + row) / self.width.made;
        place(rows.start)..place(rows.end.max(1) - 1) + 1
    }

    fn pixels<'p>(&'p self, packed: &'p [f32], rows: &Range<usize>) -> Pixels<'p> {
        match self.is_in_place() {
            true => {
                let Image { values, channels, first, .. } = self.image;
                let line = self.width.read * channels;
                Pixels { values: &values[first..], pixel: channels, line, first: 0 }
            }
            false => {
                let pixel = self.pixel();
                let line = self.width.seen(self.width.made) * pixel;
                Pixels { values: packed, pixel, line, first: self.lines(rows).start }
            }
        }
    }

    /// Copies a line of pixels, with zeros where there are none.
    #[inline(always)]
    fn copy_line(&self, y: Option<usize>, out: &mut [f32]) {
        let Image { values, channels, first, own } = self.image;
        let (pixel, Axis { read, before, .. }) = (self.pixel(), self.width);
        let Some(y) = y else { return out.fill(0.0) };
        let (left, rest) = out.split_at_mut((before * pixel).min(out.len()));
        let (inside, right) = rest.split_at_mut((read * pixel).min(rest.len()));
        left.fill(0.0);
        right.fill(0.0);
        let from = &values[y * read * channels..][..read * channels];
        if pixel == channels {
            return inside.copy_from_slice(&from[..inside.len()]);
        }
        for (to, from) in inside.chunks_exact_mut(pixel).zip(from.chunks_exact(channels)) {
            to[..own].copy_from_slice(&from[first..][..own]);
        }
    }
}

impl<F: Format> Operand for Windows<'_, F> {
    const STEP: usize = 1;

    fn inputs(&self) -> usize {
        self.panels.inputs
    }

    fn count(&self) -> usize {
        self.panels.count
    }

    fn behind(self, rows: usize) -> Self {
        Self { first: self.first + rows, ..self }
    }

    /// Whole lines of results, where they can be divided so.
    fn parts(&self, rows: usize) -> (usize, usize) {
        let line = self.width.seen(self.width.made) * self.image.own * self.height.stride;
        let lines = (AT_A_TIME / line.max(1)).saturating_sub(self.height.kernel / 2).max(1);
        let pixels = match lines {
            1 => (AT_A_TIME / (line / self.width.made.max(1)).max(1))
                .clamp(64, self.width.made.max(64)),
            _ => lines * self.width.made,
        };
        let least = rows.div_ceil(pixels).max(1);
        let whole = rows / self.width.made.max(1);
        let even = (least..2 * least).find(|chunks| whole > 0 && whole.is_multiple_of(*chunks));
        (even.unwrap_or(least), 1)
    }

    #[inline(always)]
    fn pack<I: Isa>(&self, _: I, _: Area<'_>, part: &RowChunk, to: &mut Lines<f32>) {
        if self.is_in_place() {
            return;
        }
        let results = self.lines(&part.rows);
        let line = self.width.seen(self.width.made) * self.pixel();
        let count = self.height.seen(results.len());
        let first = results.start * self.height.stride;
        let packed = to.grow(count * line);
        for (at, out) in packed[..count * line].chunks_exact_mut(line).enumerate() {
            let y = (first + at).checked_sub(self.height.before);
            self.copy_line(y.filter(|y| *y < self.height.read), out);
        }
    }

    #[inline(always)]
    fn pair<I: Isa>(
        &self,
        isa: I,
        part: &RowChunk,
        pair: usize,
        (packed, _): (&[f32], &mut [f32]),
        mut finish: Finish<'_, '_>,
    ) {
        let pixels = self.pixels(packed, &part.rows);
        let (start, end) = (self.first + part.rows.start, self.first + part.rows.end);
        let (height, width) = (self.height, self.width);
        // A line of a window is one run of inputs, where its pixels lie side by side without anything between them.
        let is_run = width.dilation == 1 && pixels.pixel == self.image.own;
        let (runs, inputs) = match is_run {
            true => (1, width.kernel * self.image.own),
            false => (width.kernel, self.image.own),
        };
        let mut sums = [0.0; WIDE_ROWS * PAIR];
        let mut at = start;
        while at < end {
            let (y, x) = (at / width.made, at % width.made);
            let count = (width.made - x).min(end - at);
            let tiles = groups::<I>(count);
            for tile in 0..tiles {
                let place = share(count, tiles, tile);
                let from = (y - pixels.first) * height.stride * pixels.line
                    + (x + place.start) * width.stride * pixels.pixel;
                let of = Tile::<'_, F> {
                    rows: place.len(),
                    left: &pixels.values[from..],
                    row: width.stride * pixels.pixel,
                    lines: (height.kernel, height.dilation * pixels.line),
                    runs: (runs, width.dilation * pixels.pixel),
                    inputs,
                    right: self.panels.from(2 * pair, 0),
                    apart: self.panels.apart * PANEL,
                    panels: (self.panels.count - 2 * pair).min(2),
                };
                let sums = &mut sums[..place.len() * PAIR];
                of.sum(isa, sums);
                finish.rows(isa, sums, at - start + place.start);
            }
            at += count;
        }
    }
}

/// Some neighbouring results times one pair of panels.
///
/// # Shapes
/// right `[panels, lines, runs, inputs, PANEL]`, sums `[rows, PAIR]`.
struct Tile<'a, F: Format> {
    rows: usize,
    /// The image from the first value on that the first result sees.
    left: &'a [f32],
    /// How far the window of a result is from the next.
    row: usize,
    /// Lines of a window, and how far one is from the next.
    lines: (usize, usize),
    /// Runs of inputs in a line of a window, and how far one is from the next.
    runs: (usize, usize),
    /// Inputs of a run.
    inputs: usize,
    right: &'a [F::Element],
    /// How far one panel is from the next.
    apart: usize,
    panels: usize,
}

impl<F: Format> Tile<'_, F> {
    #[inline(always)]
    fn sum<I: Isa>(self, isa: I, sums: &mut [f32]) {
        macro_rules! rows {
            ($panel:expr, $panels:literal x $vectors:literal, $($rows:literal)+) => {
                match self.rows {
                    $($rows => self.rows::<I, $rows, $panels, $vectors>(isa, $panel, sums),)+
                    _ => unreachable!("groups are no higher"),
                }
            };
        }
        match (vectors::<I>(), self.panels == 2 && wide::<I>()) {
            (1, true) => rows!(0, 2 x 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            (1, false) => rows!(0, 1 x 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            (2, _) => {
                for panel in 0..self.panels {
                    rows!(panel, 1 x 2, 1 2 3 4 5 6);
                }
            }
            _ => {
                for panel in 0..self.panels {
                    rows!(panel, 1 x 4, 1 2 3 4 5 6);
                }
            }
        }
    }

    /// Multiplies the windows with `PANELS` panels from `panel` on.
    #[inline(always)]
    fn rows<I: Isa, const ROWS: usize, const PANELS: usize, const VECTORS: usize>(
        &self,
        isa: I,
        panel: usize,
        sums: &mut [f32],
    ) {
        let ops = isa.f32();
        let mut tile = [[[ops.zero(); VECTORS]; PANELS]; ROWS];
        let right = &self.right[panel * self.apart..];
        let mut input = 0;
        for line in 0..self.lines.0 {
            for run in 0..self.runs.0 {
                let from = line * self.lines.1 + run * self.runs.1;
                let left = Left { values: &self.left[from..], row: self.row, step: 1 };
                let right = Right { values: &right[input * PANEL..], step: PANEL };
                tile = micro::accumulate_panels::<I, F, ROWS, PANELS, VECTORS>(
                    isa,
                    tile,
                    self.inputs,
                    left,
                    right,
                    self.apart,
                    None,
                );
                input += self.inputs;
            }
        }
        for (row, tile) in tile.iter().enumerate() {
            for (at, tile) in tile.iter().enumerate() {
                for (v, sum) in tile.iter().enumerate() {
                    let place = row * PAIR + (panel + at) * PANEL + v * ops.len();
                    ops.store(*sum, &mut sums[place..]);
                }
            }
        }
    }
}
