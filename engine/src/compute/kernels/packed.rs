//! The product of rows with a packed matrix, on one thread.
//!
//! Rows are packed in groups as high as a tile, so that the micro-kernel reads them one after the
//! other; a tile is a group of rows times a panel of the matrix. Inputs are taken in blocks, of
//! which the packed rows stay in a second-level cache while all panels pass by: the matrix is
//! streamed once for so many rows, in the order in which it lies in memory. What a tile is followed
//! by (bias, curve, gate) is done while it lies in the first-level cache.
// Hot path: no locks, no logging, no allocation once the scratch has grown.

use super::{
    area::{Area, AreaMut, Extent},
    general,
    micro::{self, Format, Left, Right},
    vector::Curve,
};
use crate::weights::{Lines, PANEL, Panels};
use rten_simd::{
    Isa, SimdOp,
    isa::GenericIsa,
    ops::{BitOps, NumOps},
};
use std::ops::Range;

/// Gate columns of a panel, and up columns.
const HALF: usize = PANEL / 2;
/// Rows of a tile: with two vectors of columns AVX-512 has registers for so many,
const WIDE_ROWS: usize = 14;
/// and AVX2 (and NEON, with four) for so many.
const NARROW_ROWS: usize = 6;
/// Rows that are packed at a time,
const MOST_ROWS: usize = 154;
/// and inputs of them: 630 KB together.
const MOST_INPUTS: usize = 1024;
/// Panels whose sums wait between two blocks of inputs: with the rows above 630 KB.
const WAITING_PANELS: usize = 32;

/// Memory of one thread that products reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    rows: Lines<f32>,
    sums: Lines<f32>,
}

/// What follows a product.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// One for each output of the matrix.
    pub(crate) bias: Option<&'a [f32]>,
    /// Every value goes through it; in a gated product the gate does.
    pub(crate) curve: Option<Curve>,
}

/// Where the product of one panel goes.
struct Target<'a> {
    /// Its first column of the result,
    column: usize,
    /// and how many there are.
    width: usize,
    gated: bool,
    curve: Option<Curve>,
    /// Of the panel's columns; zeros without one.
    bias: &'a [f32; PANEL],
}

/// `out = epilogue(left x panels)`.
///
/// # Shapes
/// left `[rows, inputs]`, out `[rows, columns of the panels]`.
pub(crate) struct Block<'a, 'o, F: Format> {
    pub(crate) left: Area<'a>,
    pub(crate) matrix: Panels<'a, F>,
    pub(crate) gated: bool,
    pub(crate) panels: Range<usize>,
    pub(crate) out: AreaMut<'o>,
    pub(crate) epilogue: Epilogue<'a>,
    pub(crate) scratch: &'a mut Scratch,
}

/// Columns of the result that a panel gives.
pub(crate) fn panel_columns(gated: bool) -> usize {
    if gated { HALF } else { PANEL }
}

impl<F: Format> SimdOp for Block<'_, '_, F> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let most = if lanes::<I>() >= HALF { WIDE_ROWS } else { NARROW_ROWS };
        let (rows, inputs) = (self.out.rows(), self.matrix.inputs);
        // Chunks of rows of nearly equal size, and in each groups of nearly equal size.
        let chunks = rows.div_ceil(MOST_ROWS);
        let blocks = inputs.div_ceil(MOST_INPUTS);
        let together = if blocks > 1 { WAITING_PANELS } else { usize::MAX };
        for chunk in 0..chunks {
            let part = share(rows, chunks, chunk);
            let groups = part.len().div_ceil(most);
            let mut first = self.panels.start;
            while first < self.panels.end {
                let panels = first..self.panels.end.min(first.saturating_add(together));
                for block in 0..blocks {
                    let inputs = share(inputs, blocks, block);
                    let (begin, end) = (block == 0, block + 1 == blocks);
                    self.pack(part.clone(), groups, inputs.clone());
                    for panel in panels.clone() {
                        self.panel(
                            isa,
                            part.clone(),
                            groups,
                            inputs.clone(),
                            panel,
                            panel - first,
                            begin,
                            end,
                        );
                    }
                }
                first = panels.end;
            }
        }
    }
}

/// Part `at` of `whole` in `parts` nearly equal ones.
fn share(whole: usize, parts: usize, at: usize) -> Range<usize> {
    let (each, more) = (whole / parts, whole % parts);
    let start = at * each + at.min(more);
    start..start + each + usize::from(at < more)
}

const fn lanes<I: Isa>() -> usize {
    size_of::<I::F32>() / size_of::<f32>()
}

impl<F: Format> Block<'_, '_, F> {
    /// Packs rows: those of a group stand next to each other, input after input.
    #[inline(always)]
    fn pack(&mut self, rows: Range<usize>, groups: usize, inputs: Range<usize>) {
        /// Inputs at a time, so that what is written stays in the first-level cache.
        const PIECE: usize = 64;
        let packed = self.scratch.rows.grow(rows.len() * inputs.len());
        for group in 0..groups {
            let own = share(rows.len(), groups, group);
            let height = own.len();
            let packed = &mut packed[own.start * inputs.len()..own.end * inputs.len()];
            for (piece, packed) in packed.chunks_mut(PIECE * height).enumerate() {
                let start = inputs.start + piece * PIECE;
                for at in 0..height {
                    let row = self.left.row(rows.start + own.start + at);
                    let row = &row[start..start + packed.len() / height];
                    for (value, packed) in row.iter().zip(packed.chunks_exact_mut(height)) {
                        packed[at] = *value;
                    }
                }
            }
        }
    }

    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "the innermost of five loops")]
    fn panel<I: Isa>(
        &mut self,
        isa: I,
        rows: Range<usize>,
        groups: usize,
        inputs: Range<usize>,
        panel: usize,
        waiting: usize,
        begin: bool,
        end: bool,
    ) {
        let step = self.matrix.width(panel);
        let right = Right::<F> { values: self.matrix.rows(panel, inputs.start), step };
        let mut bias = [0.0; PANEL];
        let columns = panel_columns(self.gated);
        let column = (panel - self.panels.start) * columns;
        if end {
            bias_of(&self.epilogue, self.gated, panel, &mut bias);
        }
        let width = columns.min(self.out.columns() - column);
        let Epilogue { curve, .. } = self.epilogue;
        let target = Target { column, width, gated: self.gated, curve, bias: &bias };
        let Scratch { rows: packed, sums } = &mut *self.scratch;
        let packed = packed.values();
        let height = rows.len();
        let mut own = [0.0; WIDE_ROWS * PANEL];
        let mut kept = match begin && end {
            true => None,
            false => {
                Some(&mut sums.grow((waiting + 1) * height * PANEL)[waiting * height * PANEL..])
            }
        };
        for group in 0..groups {
            let part = share(height, groups, group);
            let left = &packed[part.start * inputs.len()..part.end * inputs.len()];
            let sums = match &mut kept {
                Some(sums) => &mut sums[part.start * PANEL..part.end * PANEL],
                None => &mut own[..part.len() * PANEL],
            };
            tile::<I, F>(isa, part.len(), inputs.len(), left, right, sums, !begin);
            if end {
                finish(isa, sums, rows.start + part.start, &target, &mut self.out);
            }
        }
    }
}

impl<F: Format> Block<'_, '_, F> {
    /// As [`Block::eval`], by the `gemm` crate: for processors that no micro-kernel is written for.
    pub(crate) fn general(mut self) {
        let (rows, inputs) = (self.out.rows(), self.matrix.inputs);
        let isa = GenericIsa::new();
        let Scratch { rows: wide, sums } = &mut *self.scratch;
        for chunk in 0..rows.div_ceil(MOST_ROWS) {
            let part = share(rows, rows.div_ceil(MOST_ROWS), chunk);
            for panel in self.panels.clone() {
                let width = self.matrix.width(panel);
                let sums = sums.grow(part.len() * PANEL);
                let blocks = inputs.div_ceil(MOST_INPUTS);
                for block in 0..blocks {
                    let inputs = share(inputs, blocks, block);
                    let values = &self.matrix.rows(panel, inputs.start)[..inputs.len() * width];
                    let wide = wide.grow(values.len());
                    F::widen(values, wide);
                    let whole = |rows, columns, stride| Extent { start: 0, rows, columns, stride };
                    let right = Area::new(wide, whole(inputs.len(), width, width));
                    let right = general::Right::Plain(right.expect("it has grown to that"));
                    let left = self.left.part(part.start, part.len(), inputs.start, inputs.len());
                    let sums = AreaMut::new(sums, whole(part.len(), width, PANEL));
                    let mut sums = sums.expect("it has grown to that");
                    let none = gemm::Parallelism::None;
                    general::multiply(left, right, 1.0, &mut sums, block > 0, none);
                }
                let mut bias = [0.0; PANEL];
                bias_of(&self.epilogue, self.gated, panel, &mut bias);
                let columns = panel_columns(self.gated);
                let column = (panel - self.panels.start) * columns;
                let width = columns.min(self.out.columns() - column);
                let Epilogue { curve, .. } = self.epilogue;
                let target = Target { column, width, gated: self.gated, curve, bias: &bias };
                finish(isa, sums, part.start, &target, &mut self.out);
            }
        }
    }
}

/// The biases of a panel's columns, zeros where there are none.
fn bias_of(epilogue: &Epilogue<'_>, gated: bool, panel: usize, bias: &mut [f32; PANEL]) {
    let first = panel * panel_columns(gated);
    match epilogue.bias {
        Some(all) if gated => {
            let (gate, up) = all.split_at(all.len() / 2);
            copy(gate, first, &mut bias[..HALF]);
            copy(up, first, &mut bias[HALF..]);
        }
        Some(all) => copy(all, first, bias),
        None => {}
    }
}

fn copy(from: &[f32], at: usize, out: &mut [f32]) {
    let from = &from[at.min(from.len())..];
    let len = from.len().min(out.len());
    out[..len].copy_from_slice(&from[..len]);
}

/// `sums = left x right`, or with `add` `sums += left x right`, for the rows of one group.
///
/// # Shapes
/// left `[inputs, rows]`, right `[inputs, 32 or 16 columns]`, sums `[rows, PANEL]`.
#[inline(always)]
fn tile<I: Isa, F: Format>(
    isa: I,
    rows: usize,
    inputs: usize,
    left: &[f32],
    right: Right<'_, F>,
    sums: &mut [f32],
    add: bool,
) {
    macro_rules! rows {
        ($vectors:literal, $right:expr, $at:expr, $($rows:literal)+) => {
            match rows {
                $($rows => sum::<I, F, $rows, $vectors>(isa, inputs, left, $right, &mut sums[$at..], add),)+
                _ => unreachable!("groups are no higher"),
            }
        };
    }
    if lanes::<I>() == HALF {
        if right.step == PANEL {
            rows!(2, right, 0, 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
        } else {
            rows!(1, right, 0, 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
        }
    } else {
        for half in 0..right.step / HALF {
            let right = Right { values: &right.values[half * HALF..], step: right.step };
            if lanes::<I>() == HALF / 2 {
                rows!(2, right, half * HALF, 1 2 3 4 5 6);
            } else {
                rows!(4, right, half * HALF, 1 2 3 4 5 6);
            }
        }
    }
}

#[inline(always)]
fn sum<I: Isa, F: Format, const ROWS: usize, const VECTORS: usize>(
    isa: I,
    inputs: usize,
    left: &[f32],
    right: Right<'_, F>,
    sums: &mut [f32],
    add: bool,
) {
    let ops = isa.f32();
    let mut tile = [[ops.zero(); VECTORS]; ROWS];
    if add {
        for (row, tile) in tile.iter_mut().enumerate() {
            for (v, sum) in tile.iter_mut().enumerate() {
                *sum = ops.load(&sums[row * PANEL + v * ops.len()..]);
            }
        }
    }
    let left = Left { values: left, row: 1, step: ROWS };
    let tile = micro::accumulate(isa, tile, inputs, left, right);
    for (row, tile) in tile.iter().enumerate() {
        for (v, sum) in tile.iter().enumerate() {
            ops.store(*sum, &mut sums[row * PANEL + v * ops.len()..]);
        }
    }
}

/// Bias, curve and gate of a tile, and its way to the result.
#[inline(always)]
fn finish<I: Isa>(
    isa: I,
    sums: &mut [f32],
    row: usize,
    target: &Target<'_>,
    out: &mut AreaMut<'_>,
) {
    let ops = isa.f32();
    let Target { column, width, gated, curve, bias } = *target;
    let columns = panel_columns(gated);
    for (at, sums) in sums.chunks_exact_mut(PANEL).enumerate() {
        let out = &mut out.row(row + at)[column..column + width];
        let value = |v: usize| {
            let place = v * ops.len();
            ops.add(ops.load(&sums[place..]), ops.load(&bias[place..]))
        };
        let vectors = columns / ops.len();
        let result = |v: usize| {
            let gate = value(v);
            let gate = match curve {
                Some(curve) => curve.eval(isa, gate),
                None => gate,
            };
            if gated { ops.mul(gate, value(v + vectors)) } else { gate }
        };
        if width == columns {
            for v in 0..vectors {
                ops.store(result(v), &mut out[v * ops.len()..]);
            }
        } else {
            let mut whole = [0.0; PANEL];
            for v in 0..vectors {
                ops.store(result(v), &mut whole[v * ops.len()..]);
            }
            out.copy_from_slice(&whole[..width]);
        }
    }
}
