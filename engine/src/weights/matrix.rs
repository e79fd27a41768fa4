//! A matrix as a device holds it: packed once, in the order in which the kernels read it.

pub(super) use crate::compute::kernels::lines::NoMemory as NoRoom;
use crate::compute::kernels::{
    blocks::{BlockPanels, GROUP, place::BlockLayout},
    lines::{Lines, NoMemory},
    micro::{Format, each_format},
};
use galaxy_common::{Activations, Bytes, WeightFormat};
use galaxy_graph::holdings::{Run, WeightSlice};
use std::ops::Range;

/// Columns of a panel: in f32 a vector of AVX-512, and a line of cache.
pub(crate) const PANEL: usize = WeightFormat::PANEL as usize;

/// A matrix or a slice of one.
///
/// # Shapes
/// `[inputs, outputs]`, whatever the checkpoint's order, in panels: the first 16 columns
/// row-major, then the next. Zeros fill the last one. Values in blocks of few bits stand in panels as
/// `BlockLayout` in `kernels/blocks/place.rs` says.
///
/// A gated matrix is gate | up columns. A panel of gate columns is followed by the panel of the up
/// columns that they gate, so that a tile of the product has both.
pub struct ShardMatrix {
    /// The width of the rows that it multiplies.
    pub inputs: usize,
    /// The width of the product, gate and up columns together.
    pub outputs: usize,
    gated: bool,
    /// The first input that it has of the whole matrix.
    first: usize,
    format: WeightFormat,
    /// The bytes of the packed values, with those that fill up.
    values: Lines<u8>,
}

/// A rectangle of a held matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// The first input.
    pub(crate) input: usize,
    /// The number of inputs.
    pub(crate) inputs: usize,
    /// The first column.
    pub(crate) column: usize,
    /// The number of columns.
    pub(crate) columns: usize,
}

/// A run of columns that lie side by side in one panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strip {
    /// The first column in the matrix.
    pub(crate) column: usize,
    /// The number of columns.
    pub(crate) width: usize,
    /// Where the panel starts, in values.
    pub(crate) panel: usize,
    /// The first column in the panel.
    pub(crate) at: usize,
}

/// How the columns of a matrix lie in panels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) gated: bool,
    /// The first input in the whole matrix, which says where in a block it stands.
    pub(crate) first: usize,
}

impl Layout {
    /// The layout of a run of these slices, which stand side by side.
    pub(crate) fn of(run: &Run, slices: &[WeightSlice]) -> Self {
        let first = slices.first().map_or(0, |slice| slice.inputs.start as usize);
        let (inputs, outputs) = (run.inputs as usize, run.outputs as usize);
        Self { inputs, outputs, gated: run.gated, first }
    }

    /// The layout of values in blocks; none where they stand by themselves.
    pub(crate) fn blocks(&self, format: WeightFormat) -> Option<BlockLayout> {
        BlockLayout::new(format, (self.inputs, self.first), self.packed())
    }

    /// The panel of a strip, and its first column in that.
    pub(crate) fn lane(&self, strip: &Strip) -> (usize, usize) {
        (strip.panel / (PANEL * self.inputs.max(1)), strip.at)
    }

    /// The number of columns, with those that fill up.
    pub(crate) fn packed(&self) -> usize {
        match self.gated {
            true => 2 * (self.outputs / 2).next_multiple_of(PANEL),
            false => self.outputs.next_multiple_of(PANEL),
        }
    }

    /// The bytes of all values, with those that fill up.
    pub(crate) fn bytes(&self, format: WeightFormat) -> usize {
        format.held(self.inputs as u64, self.packed() as u64) as usize
    }

    /// Cuts `columns` where they cease to be neighbours.
    pub(crate) fn strips(self, columns: Range<usize>) -> impl Iterator<Item = Strip> {
        let (mut column, half) = (columns.start, self.outputs / 2);
        std::iter::from_fn(move || {
            // Gate panels have even numbers, up panels odd ones.
            let (panel, at, end) = match (self.gated, column < half) {
                (false, _) => (column / PANEL, column % PANEL, columns.end),
                (true, true) => (column / PANEL * 2, column % PANEL, columns.end.min(half)),
                (true, false) => {
                    let up = column - half;
                    (up / PANEL * 2 + 1, up % PANEL, columns.end)
                }
            };
            let width = (PANEL - at).min(end.saturating_sub(column));
            let strip = Strip { column, width, panel: panel * PANEL * self.inputs, at };
            column += width;
            (width > 0).then_some(strip)
        })
    }
}

/// The panels of a matrix, to be multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a, F: Format> {
    values: &'a [F::Element],
    /// The number of inputs that are multiplied with.
    pub(crate) inputs: usize,
    /// The number of inputs that a panel has.
    pub(crate) apart: usize,
    /// The first input that is multiplied with.
    first: usize,
    /// The number of inputs that are multiplied with.
    pub(crate) count: usize,
}

impl<'a, F: Format> Panels<'a, F> {
    /// All values from input `input` of panel `panel` on.
    pub(crate) fn from(&self, panel: usize, input: usize) -> &'a [F::Element] {
        &self.values[(panel * self.apart + self.first + input) * PANEL..]
    }
}

/// A matrix to multiply with, wherever its values are held.
#[derive(Clone, Copy)]
pub(crate) struct AnyMatrix<'a> {
    pub(crate) layout: Layout,
    pub(crate) format: WeightFormat,
    /// The type that rows are rounded to which are multiplied with values in blocks.
    pub(crate) activations: Activations,
    /// The first of its inputs among those that its panels have, and how many these are.
    within: (usize, usize),
    /// The values of all inputs of its panels, aligned to 4; of values in blocks the codes.
    bytes: &'a [u8],
    /// The headers of values in blocks; empty where values stand by themselves.
    headers: &'a [u8],
}

impl<'a> AnyMatrix<'a> {
    /// The matrix of the packed values that these bytes begin with; none where they are too few, or not
    /// aligned.
    pub(crate) fn of_bytes(layout: Layout, format: WeightFormat, bytes: &'a [u8]) -> Option<Self> {
        let bytes = bytes.get(..layout.bytes(format))?;
        let aligned = bytes.is_empty() || bytes.as_ptr().align_offset(align_of::<f32>()) == 0;
        aligned.then(|| Self::whole(layout, format, bytes))
    }

    /// The matrix of all of these packed values.
    fn whole(layout: Layout, format: WeightFormat, bytes: &'a [u8]) -> Self {
        let codes = layout.blocks(format).map_or(bytes.len(), |blocks| blocks.codes());
        let (bytes, headers) = bytes.split_at(codes);
        let activations = Activations::default();
        Self { layout, format, activations, within: (0, layout.inputs), bytes, headers }
    }

    /// The same matrix, for rows that are rounded so; none where they are not to be rounded, and would have
    /// to be.
    pub(crate) fn by(self, activations: Activations) -> Option<Self> {
        let exact = activations == Activations::F32;
        (!exact || self.format.block().is_none()).then_some(Self { activations, ..self })
    }

    /// Its panels, where values stand in blocks; none where they stand by themselves.
    pub(crate) fn blocks(&self) -> Option<BlockPanels<'a>> {
        let (first, all) = self.within;
        // Of all inputs of the panels, whose first is that many before its own.
        let whole = Layout { inputs: all, first: self.layout.first - first, ..self.layout };
        Some(BlockPanels {
            codes: self.bytes,
            headers: self.headers,
            format: self.format,
            block: self.format.block()?,
            inputs: self.layout.inputs,
            first: first / GROUP,
            apart: all / GROUP,
            phase: whole.blocks(self.format)?.phase(),
            count: self.layout.packed() / PANEL,
        })
    }

    /// Its panels.
    ///
    /// # Panics
    /// When `F` is another format than its own.
    pub(crate) fn panels<F: Format>(&self) -> Panels<'a, F> {
        let (inputs, count) = (self.layout.inputs, self.layout.packed() / PANEL);
        let (first, apart) = self.within;
        Panels { values: bytemuck::cast_slice(self.bytes), inputs, apart, first, count }
    }

    /// The number of columns of the product, after the gate.
    pub(crate) fn columns(&self) -> usize {
        if self.layout.gated { self.layout.outputs / 2 } else { self.layout.outputs }
    }

    /// The part of the matrix that gives these columns; none where they do not begin with a panel.
    pub(crate) fn part(self, columns: Range<usize>) -> Option<Self> {
        let Layout { outputs, gated, .. } = self.layout;
        if columns == (0..self.columns()) {
            return Some(self);
        }
        let all = self.columns();
        let fits = columns.start < columns.end && columns.end <= all;
        if !fits || !columns.start.is_multiple_of(PANEL) {
            return None;
        }
        // Panels of gate and up columns alternate.
        let each = outputs / all.max(1);
        let layout = Layout { outputs: each * columns.len(), gated, ..self.layout };
        let panels =
            each * columns.start / PANEL..each * columns.start / PANEL + layout.packed() / PANEL;
        let all = Layout { inputs: self.within.1, ..self.layout };
        let (bytes, headers) = match all.blocks(self.format) {
            Some(blocks) => blocks.panel(),
            None => (self.format.held(all.inputs as u64, PANEL as u64) as usize, 0),
        };
        let of = |bytes: &'a [u8], each: usize| bytes.get(each * panels.start..each * panels.end);
        let (bytes, headers) = (of(self.bytes, bytes)?, of(self.headers, headers)?);
        Some(Self { layout, bytes, headers, ..self })
    }

    /// The part of the matrix that reads these of its inputs; none where it has fewer.
    pub(crate) fn inputs(self, inputs: Range<usize>) -> Option<Self> {
        if inputs == (0..self.layout.inputs) {
            return Some(self);
        }
        let cut = self.format.cut() as usize;
        let whole = inputs.start.is_multiple_of(cut) && inputs.end.is_multiple_of(cut);
        let fits = whole && inputs.start < inputs.end && inputs.end <= self.layout.inputs;
        let within = (self.within.0 + inputs.start, self.within.1);
        let first = self.layout.first + inputs.start;
        let layout = Layout { inputs: inputs.len(), first, ..self.layout };
        fits.then_some(Self { layout, within, ..self })
    }
}

impl<'a> From<&'a ShardMatrix> for AnyMatrix<'a> {
    fn from(held: &'a ShardMatrix) -> Self {
        Self::whole(held.layout(), held.format, held.values.values())
    }
}

impl ShardMatrix {
    /// A matrix of these packed values: [`Layout::bytes`] of them.
    pub(crate) fn new(layout: Layout, format: WeightFormat, values: Lines<u8>) -> Self {
        let Layout { inputs, outputs, gated, first } = layout;
        Self { inputs, outputs, gated, first, format, values }
    }

    /// A matrix whose values are all the same: for measuring, where the result does not matter.
    pub(crate) fn even(inputs: usize, outputs: usize, value: f32) -> Self {
        let layout = Layout { inputs, outputs, gated: false, first: 0 };
        let mut lines = Lines::default();
        let bytes = lines.grow(layout.bytes(WeightFormat::F32));
        bytemuck::cast_slice_mut(bytes).fill(value);
        Self::new(layout, WeightFormat::F32, lines)
    }

    /// A matrix of f32, of which `value` gives each value by its input and output.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub(crate) fn of(
        inputs: usize,
        outputs: usize,
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<Self, NoMemory> {
        let layout = Layout { inputs, outputs, gated: false, first: 0 };
        let mut lines = Lines::zeroed(layout.bytes(WeightFormat::F32))?;
        let packed: &mut [f32] = bytemuck::cast_slice_mut(lines.values_mut());
        for strip in layout.strips(0..outputs) {
            for input in 0..inputs {
                let start = strip.panel + input * PANEL + strip.at;
                let places = packed[start..start + strip.width].iter_mut().enumerate();
                places.for_each(|(at, place)| *place = value(input, strip.column + at));
            }
        }
        Ok(Self::new(layout, WeightFormat::F32, lines))
    }

    /// Packs `wide`, row-major `[inputs, outputs]`, narrowed to `format`.
    ///
    /// # Panics
    /// When it has other than `inputs * outputs` values, or a gated matrix an odd number of outputs.
    #[cfg(test)]
    pub(crate) fn pack(
        wide: &[f32],
        inputs: usize,
        outputs: usize,
        gated: bool,
        format: WeightFormat,
    ) -> Self {
        assert!(wide.len() == inputs * outputs && (!gated || outputs.is_multiple_of(2)));
        fn fill<F: Format>(wide: &[f32], layout: Layout, packed: &mut [u8]) {
            let packed: &mut [F::Element] = bytemuck::cast_slice_mut(packed);
            for strip in layout.strips(0..layout.outputs) {
                for input in 0..layout.inputs {
                    let from = &wide[input * layout.outputs + strip.column..][..strip.width];
                    let start = strip.panel + input * PANEL + strip.at;
                    let places = packed[start..start + strip.width].iter_mut();
                    places.zip(from).for_each(|(place, value)| *place = F::narrow(*value));
                }
            }
        }
        let layout = Layout { inputs, outputs, gated, first: 0 };
        let mut lines = Lines::default();
        let packed = lines.grow(layout.bytes(format));
        each_format!(format, F => fill::<F>(wide, layout, packed));
        Self::new(layout, format, lines)
    }

    /// Whether it equals the other one bit for bit, zeros that fill up included.
    #[cfg(test)]
    pub(crate) fn same(&self, other: &Self) -> bool {
        let shape = |m: &Self| (m.inputs, m.outputs, m.gated, m.format);
        shape(self) == shape(other) && self.values.values() == other.values.values()
    }

    /// Copies `window` of it to where input `input` and column `column` of a matrix of `layout` are.
    ///
    /// `values` are as many bytes, of the same format.
    ///
    /// # Panics
    /// When a window does not lie in its matrix.
    pub(crate) fn copy(
        &self,
        window: Window,
        (input, column): (usize, usize),
        layout: Layout,
        values: &mut [u8],
    ) {
        let (own, from) = (self.layout(), self.values.values());
        if let (Some(blocks), Some(to)) = (own.blocks(self.format), layout.blocks(self.format)) {
            return self.copy_blocks(&blocks, window, (input, column), (layout, to), values);
        }
        // Bytes of so many values.
        let bytes = |values: usize| self.format.bytes(1, values as u64) as usize;
        for target in layout.strips(column..column + window.columns) {
            let first = window.column + target.column - column;
            let mut at = target.panel + target.at + input * PANEL;
            for source in own.strips(first..first + target.width) {
                let start = source.panel + source.at + window.input * PANEL;
                // Inputs of a whole panel lie side by side.
                let (rows, width) = match source.width {
                    PANEL => (1, window.inputs * PANEL),
                    width => (window.inputs, width),
                };
                for row in (0..rows).map(|row| row * PANEL) {
                    let from = &from[bytes(start + row)..][..bytes(width)];
                    values[bytes(at + row)..][..bytes(width)].copy_from_slice(from);
                }
                at += source.width;
            }
        }
    }

    /// Copies as [`HeldMatrix::copy`] does, values in blocks, column by column.
    fn copy_blocks(
        &self,
        own: &BlockLayout,
        window: Window,
        (input, column): (usize, usize),
        (layout, to): (Layout, BlockLayout),
        values: &mut [u8],
    ) {
        let groups = window.input / GROUP..(window.input + window.inputs) / GROUP;
        let from = self.values.values();
        let lanes = |layout: Layout, first: usize| {
            layout.strips(first..first + window.columns).flat_map(move |strip| {
                let (panel, lane) = layout.lane(&strip);
                (lane..lane + strip.width).map(move |lane| (panel, lane))
            })
        };
        for (source, target) in lanes(self.layout(), window.column).zip(lanes(layout, column)) {
            to.copy((own, from), groups.clone(), source, (input / GROUP, target), values);
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        let Self { inputs, outputs, gated, first, .. } = *self;
        Layout { inputs, outputs, gated, first }
    }

    /// Whether its columns are gate | up.
    pub fn gated(&self) -> bool {
        self.gated
    }

    /// The number of columns of the product, after the gate.
    pub fn columns(&self) -> usize {
        if self.gated { self.outputs / 2 } else { self.outputs }
    }

    /// A copy of its values, row-major `[inputs, outputs]` in f32: for engines with a layout of
    /// their own, and for references.
    pub fn wide(&self) -> Vec<f32> {
        let mut wide = vec![0.0; self.inputs * self.outputs];
        if let Some(blocks) = self.layout().blocks(self.format) {
            self.widen_blocks(&blocks, &mut wide);
            return wide;
        }
        for strip in self.layout().strips(0..self.outputs) {
            for input in 0..self.inputs {
                let out = &mut wide[input * self.outputs + strip.column..][..strip.width];
                let start = strip.panel + input * PANEL + strip.at;
                each_format!(self.format, F => {
                    let values = bytemuck::cast_slice(self.values.values());
                    F::widen(&values[start..start + strip.width], out);
                });
            }
        }
        wide
    }

    fn widen_blocks(&self, blocks: &BlockLayout, wide: &mut [f32]) {
        let layout = self.layout();
        for strip in layout.strips(0..self.outputs) {
            let (panel, lane) = layout.lane(&strip);
            for group in 0..self.inputs / GROUP {
                let values = blocks.widen(self.values.values(), panel, group);
                for (input, values) in (group * GROUP..).zip(values) {
                    let out = &mut wide[input * self.outputs + strip.column..][..strip.width];
                    out.copy_from_slice(&values[lane..lane + strip.width]);
                }
            }
        }
    }

    /// The bytes of its values, with those that fill up.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.values.values().len() as u64)
    }

    /// A matrix of the packed values that begin these bytes.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub(crate) fn of_raw(
        layout: Layout,
        format: WeightFormat,
        bytes: &[u8],
    ) -> Result<Self, NoMemory> {
        let mut values = Lines::zeroed(layout.bytes(format))?;
        let to = values.values_mut();
        to.copy_from_slice(&bytes[..to.len()]);
        Ok(Self::new(layout, format, values))
    }
}

impl std::fmt::Debug for ShardMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let format = self.format;
        let gated = if self.gated { ", gated" } else { "" };
        write!(f, "[{}, {}] {format}{gated}", self.inputs, self.outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_cover_every_column_once_and_lie_in_their_panels() {
        for gated in [false, true] {
            for outputs in (1..140).filter(|n| !gated || n % 2 == 0) {
                let layout = Layout { inputs: 3, outputs, gated, first: 0 };
                let mut places = vec![None; layout.packed()];
                let mut next = 0;
                for strip in layout.strips(0..outputs) {
                    assert_eq!(strip.column, next);
                    next += strip.width;
                    assert!(strip.at + strip.width <= PANEL);
                    for at in 0..strip.width {
                        let place = &mut places[strip.panel / 3 + strip.at + at];
                        assert_eq!(place.replace(strip.column + at), None);
                    }
                    // Any part of it begins where the whole has it.
                    let part = layout.strips(strip.column + strip.width / 2..outputs).next();
                    let part = part.expect("it is not empty");
                    assert_eq!(part.at, strip.at + strip.width / 2);
                }
                assert_eq!(next, outputs);
                if gated {
                    for pair in places.chunks(2 * PANEL) {
                        let (gate, up) = pair.split_at(PANEL);
                        let pairs = gate.iter().zip(up);
                        assert!(pairs.into_iter().all(|(g, u)| g.map(|g| g + outputs / 2) == *u));
                    }
                }
            }
        }
    }
}
