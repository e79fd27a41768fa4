//! A matrix as a device holds it: packed once, in the order in which the kernels read it.

pub(super) use crate::compute::kernels::lines::NoMemory as NoRoom;
use crate::compute::kernels::{
    lines::{Lines, NoMemory},
    micro::{Bf16, F16, F32, Format},
    vector,
};
use galaxy_common::{Bytes, WeightFormat};
use std::ops::Range;

/// Columns of a panel: in f32 a vector of AVX-512, and a line of cache.
pub(crate) const PANEL: usize = WeightFormat::PANEL as usize;

/// The values of a matrix, as wide as the checkpoint has them.
pub(crate) enum Values {
    /// 32 bits.
    F32(Lines<f32>),
    /// Bits of IEEE half precision.
    F16(Lines<u16>),
    /// Bits of bfloat16.
    Bf16(Lines<u16>),
}

/// A matrix or a slice of one.
///
/// # Shapes
/// `[inputs, outputs]`, whatever the checkpoint's order, in panels: the first 16 columns
/// row-major, then the next. Zeros fill the last one.
///
/// A gated matrix is gate | up columns. A panel of gate columns is followed by the panel of the up
/// columns that they gate, so that a tile of the product has both.
pub struct HeldMatrix {
    /// Width of what it multiplies.
    pub inputs: usize,
    /// Width of the product, gate and up columns together.
    pub outputs: usize,
    gated: bool,
    values: Values,
}

impl Values {
    /// `size` zeros, once: never grown, never copied.
    pub(crate) fn zeroed(format: WeightFormat, size: usize) -> Result<Self, NoMemory> {
        Ok(match format {
            WeightFormat::F32 => Self::F32(Lines::zeroed(size)?),
            WeightFormat::F16 => Self::F16(Lines::zeroed(size)?),
            WeightFormat::Bf16 => Self::Bf16(Lines::zeroed(size)?),
        })
    }
}

/// A rectangle of a matrix as held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Its first input,
    pub(crate) input: usize,
    /// and how many.
    pub(crate) inputs: usize,
    /// Its first column,
    pub(crate) column: usize,
    /// and how many.
    pub(crate) columns: usize,
}

/// A run of columns that lie side by side in one panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strip {
    /// First column of the matrix.
    pub(crate) column: usize,
    /// Columns.
    pub(crate) width: usize,
    /// Where its panel starts.
    pub(crate) panel: usize,
    /// Its first column in the panel.
    pub(crate) at: usize,
}

/// How the columns of a matrix lie in panels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) gated: bool,
}

impl Layout {
    /// Columns with those that fill up.
    pub(crate) fn packed(&self) -> usize {
        match self.gated {
            true => 2 * (self.outputs / 2).next_multiple_of(PANEL),
            false => self.outputs.next_multiple_of(PANEL),
        }
    }

    /// Bytes of all values, with those that fill up.
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
    pub(crate) inputs: usize,
    pub(crate) count: usize,
}

impl<'a, F: Format> Panels<'a, F> {
    /// So many of them, from panel `first` on.
    fn part(self, first: usize, count: usize) -> Self {
        Self { values: self.from(first, 0), count, ..self }
    }

    /// All from panel `panel` and its input `input` on.
    pub(crate) fn from(&self, panel: usize, input: usize) -> &'a [F::Element] {
        &self.values[(panel * self.inputs + input) * PANEL..]
    }
}

/// The panels of a matrix, by their format.
#[derive(Clone, Copy)]
pub(crate) enum AnyPanels<'a> {
    F32(Panels<'a, F32>),
    F16(Panels<'a, F16>),
    Bf16(Panels<'a, Bf16>),
}

/// A matrix to multiply with, wherever its values are.
#[derive(Clone, Copy)]
pub(crate) struct AnyMatrix<'a> {
    pub(crate) layout: Layout,
    pub(crate) panels: AnyPanels<'a>,
}

impl<'a> AnyMatrix<'a> {
    /// Packed values that begin these bytes; none where they are too few, or begin at odd places.
    pub(crate) fn of_bytes(layout: Layout, format: WeightFormat, bytes: &'a [u8]) -> Option<Self> {
        let bytes = bytes.get(..layout.bytes(format))?;
        let (inputs, count) = (layout.inputs, layout.packed() / PANEL);
        let bits = || bytemuck::try_cast_slice::<u8, u16>(bytes).ok();
        let panels = match format {
            WeightFormat::F32 => {
                let values = bytemuck::try_cast_slice(bytes).ok()?;
                AnyPanels::F32(Panels { values, inputs, count })
            }
            WeightFormat::F16 => AnyPanels::F16(Panels { values: bits()?, inputs, count }),
            WeightFormat::Bf16 => AnyPanels::Bf16(Panels { values: bits()?, inputs, count }),
        };
        Some(Self { layout, panels })
    }

    /// Columns of what it gives, after the gate.
    pub(crate) fn columns(&self) -> usize {
        if self.layout.gated { self.layout.outputs / 2 } else { self.layout.outputs }
    }

    /// What gives these columns; none where they are cut otherwise than between panels.
    pub(crate) fn part(self, columns: Range<usize>) -> Option<Self> {
        let Layout { inputs, outputs, gated } = self.layout;
        if columns == (0..self.columns()) {
            return Some(self);
        }
        let between = |column: usize| column.is_multiple_of(PANEL) || column == outputs;
        let fits = columns.start < columns.end && columns.end <= outputs;
        if gated || !fits || !between(columns.start) || !between(columns.end) {
            return None;
        }
        let layout = Layout { inputs, outputs: columns.len(), gated };
        let (first, count) = (columns.start / PANEL, layout.packed() / PANEL);
        let panels = match self.panels {
            AnyPanels::F32(panels) => AnyPanels::F32(panels.part(first, count)),
            AnyPanels::F16(panels) => AnyPanels::F16(panels.part(first, count)),
            AnyPanels::Bf16(panels) => AnyPanels::Bf16(panels.part(first, count)),
        };
        Some(Self { layout, panels })
    }
}

impl<'a> From<&'a HeldMatrix> for AnyMatrix<'a> {
    fn from(held: &'a HeldMatrix) -> Self {
        Self { layout: held.layout(), panels: held.panels() }
    }
}

impl HeldMatrix {
    /// A matrix of these packed values.
    pub(crate) fn new(layout: Layout, values: Values) -> Self {
        let Layout { inputs, outputs, gated } = layout;
        Self { inputs, outputs, gated, values }
    }

    /// A matrix of one value: for measuring, where what comes out does not matter.
    pub(crate) fn even(inputs: usize, outputs: usize, value: f32) -> Self {
        let layout = Layout { inputs, outputs, gated: false };
        let mut lines = Lines::default();
        lines.grow(inputs * layout.packed()).fill(value);
        Self::new(layout, Values::F32(lines))
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
        fn fill<T: bytemuck::Pod>(
            wide: &[f32],
            layout: Layout,
            narrow: impl Fn(f32) -> T,
        ) -> Lines<T> {
            let mut lines = Lines::default();
            let packed = lines.grow(layout.inputs * layout.packed());
            for strip in layout.strips(0..layout.outputs) {
                for input in 0..layout.inputs {
                    let from = &wide[input * layout.outputs + strip.column..][..strip.width];
                    let start = strip.panel + input * PANEL + strip.at;
                    let places = &mut packed[start..start + strip.width];
                    places.iter_mut().zip(from).for_each(|(place, value)| *place = narrow(*value));
                }
            }
            lines
        }
        let layout = Layout { inputs, outputs, gated };
        let values = match format {
            WeightFormat::F32 => Values::F32(fill(wide, layout, |v| v)),
            WeightFormat::F16 => {
                Values::F16(fill(wide, layout, |v| half::f16::from_f32(v).to_bits()))
            }
            WeightFormat::Bf16 => {
                Values::Bf16(fill(wide, layout, |v| half::bf16::from_f32(v).to_bits()))
            }
        };
        Self::new(layout, values)
    }

    /// Whether it is the other one bit for bit, zeros that fill up included.
    #[cfg(test)]
    pub(crate) fn same(&self, other: &Self) -> bool {
        let shape = |m: &Self| (m.inputs, m.outputs, m.gated);
        shape(self) == shape(other)
            && match (&self.values, &other.values) {
                (Values::F32(a), Values::F32(b)) => {
                    let bits = |v: &Lines<f32>| v.values().iter().map(|v| v.to_bits()).collect();
                    let (a, b): (Vec<u32>, Vec<u32>) = (bits(a), bits(b));
                    a == b
                }
                (Values::F16(a), Values::F16(b)) | (Values::Bf16(a), Values::Bf16(b)) => {
                    a.values() == b.values()
                }
                _ => false,
            }
    }

    /// Copies `window` of it to where input `input` and column `column` of a matrix of `layout` are.
    ///
    /// # Panics
    /// When the values are of another type, or a window does not lie in its matrix.
    pub(crate) fn copy(
        &self,
        window: Window,
        (input, column): (usize, usize),
        layout: Layout,
        values: &mut Values,
    ) {
        let from = self.layout();
        let mut runs = Vec::new();
        for target in layout.strips(column..column + window.columns) {
            let first = window.column + target.column - column;
            let mut at = target.panel + target.at + input * PANEL;
            for source in from.strips(first..first + target.width) {
                let start = source.panel + source.at + window.input * PANEL;
                runs.push((start, at, source.width));
                at += source.width;
            }
        }
        fn copy<T: Copy>(runs: &[(usize, usize, usize)], rows: usize, from: &[T], to: &mut [T]) {
            for (start, end, width) in runs.iter().copied() {
                // Inputs of a whole panel lie side by side.
                let (rows, width) = if width == PANEL { (1, rows * PANEL) } else { (rows, width) };
                for row in (0..rows).map(|row| row * PANEL) {
                    to[end + row..][..width].copy_from_slice(&from[start + row..][..width]);
                }
            }
        }
        let rows = window.inputs;
        match (&self.values, values) {
            (Values::F32(from), Values::F32(to)) => {
                copy(&runs, rows, from.values(), to.values_mut());
            }
            (Values::F16(from), Values::F16(to)) | (Values::Bf16(from), Values::Bf16(to)) => {
                copy(&runs, rows, from.values(), to.values_mut());
            }
            _ => unreachable!("matrices of one place in a model have one type"),
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout { inputs: self.inputs, outputs: self.outputs, gated: self.gated }
    }

    /// Whether it is gate | up columns.
    pub fn gated(&self) -> bool {
        self.gated
    }

    /// Columns of what it gives, after the gate.
    pub fn columns(&self) -> usize {
        if self.gated { self.outputs / 2 } else { self.outputs }
    }

    pub(crate) fn panels(&self) -> AnyPanels<'_> {
        let (inputs, count) = (self.inputs, self.layout().packed() / PANEL);
        match &self.values {
            Values::F32(v) => AnyPanels::F32(Panels { values: v.values(), inputs, count }),
            Values::F16(v) => AnyPanels::F16(Panels { values: v.values(), inputs, count }),
            Values::Bf16(v) => AnyPanels::Bf16(Panels { values: v.values(), inputs, count }),
        }
    }

    /// A copy of its values, row-major `[inputs, outputs]` in f32: for engines with a layout of
    /// their own, and for references.
    pub fn wide(&self) -> Vec<f32> {
        let mut wide = vec![0.0; self.inputs * self.outputs];
        for strip in self.layout().strips(0..self.outputs) {
            for input in 0..self.inputs {
                let out = &mut wide[input * self.outputs + strip.column..][..strip.width];
                let start = strip.panel + input * PANEL + strip.at;
                let held = start..start + strip.width;
                match &self.values {
                    Values::F32(values) => out.copy_from_slice(&values.values()[held]),
                    Values::F16(bits) => vector::widen_f16(&bits.values()[held], out),
                    Values::Bf16(bits) => vector::widen_bf16(&bits.values()[held], out),
                }
            }
        }
        wide
    }

    /// Bytes of its values, with those that fill up.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.raw().len() as u64)
    }

    /// Its values as they lie in memory.
    pub(crate) fn raw(&self) -> &[u8] {
        match &self.values {
            Values::F32(values) => bytemuck::cast_slice(values.values()),
            Values::F16(bits) | Values::Bf16(bits) => bytemuck::cast_slice(bits.values()),
        }
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
        let size = layout.inputs * layout.packed();
        let mut values = Values::zeroed(format, size)?;
        let to: &mut [u8] = match &mut values {
            Values::F32(values) => bytemuck::cast_slice_mut(values.values_mut()),
            Values::F16(bits) | Values::Bf16(bits) => bytemuck::cast_slice_mut(bits.values_mut()),
        };
        to.copy_from_slice(&bytes[..to.len()]);
        Ok(Self::new(layout, values))
    }
}

impl std::fmt::Debug for HeldMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let format = match self.values {
            Values::F32(_) => WeightFormat::F32,
            Values::F16(_) => WeightFormat::F16,
            Values::Bf16(_) => WeightFormat::Bf16,
        };
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
                let layout = Layout { inputs: 3, outputs, gated };
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
