//! The product of rows with a packed matrix, on one thread.
//!
//! Rows are packed in groups as high as a tile, so that the micro-kernel reads them one after the
//! other; a tile is a group of rows times a panel of the matrix. Inputs are taken in blocks, of which
//! the packed rows stay in a second-level cache while all panels pass by: the matrix is streamed once
//! for so many rows, in the order in which it lies in memory. The epilogue of a tile (bias, activation
//! function, gate) is computed while it lies in the first-level cache.
// Hot path: no locks, no logging, no allocation once the scratch has grown.

use super::{
    activation::ActivationFn,
    area::{Area, AreaMut},
    lines::Lines,
    micro::{self, Format, Left, Next, Right},
};
use crate::weights::{PANEL, Panels};
use rten_simd::{
    Isa, SimdOp,
    ops::{BitOps, NumOps},
};
use std::ops::Range;

/// Columns of a tile: a pair of panels.
pub(crate) const PAIR: usize = 2 * PANEL;
/// Rows of a tile with AVX-512, which has registers for so many with both panels.
pub(super) const WIDE_ROWS: usize = 14;
/// Rows of a tile with AVX2 and NEON, which have registers for so many with one panel.
const NARROW_ROWS: usize = 6;
/// Rows of a tile with AVX2 and NEON where both panels are read at once, which is what counts if rows
/// are few.
const FEW_ROWS: usize = 2;
/// Inputs of a panel that stay in a first-level cache (16 KB in f32) while the narrower tiles of all
/// rows are computed with it; the registers of AVX-512 need less of a panel at a time.
const NARROW_INPUTS: usize = 256;
/// Rows that are packed at a time: 630 KB with the inputs below.
pub(super) const MOST_ROWS: usize = 154;
/// Inputs of a row that are packed at a time, where not all have room.
const MOST_INPUTS: usize = 1024;
/// Bytes of packed rows, at most.
pub(super) const MOST_PACKED: usize = 4 * MOST_ROWS * MOST_INPUTS;
/// Pairs of panels whose sums wait between two blocks of inputs: with the rows above 630 KB.
const WAITING_PAIRS: usize = 32;

// Attention has half a megabyte of what a thread is granted.
const _: () = assert!(
    MOST_PACKED + 4 * MOST_ROWS * WAITING_PAIRS * PAIR + (1 << 19)
        <= galaxy_graph::budget::THREAD_SCRATCH as usize
);

/// Memory of one thread that products reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    rows: Lines<f32>,
    sums: Lines<f32>,
}

#[cfg(test)]
impl Scratch {
    pub(crate) fn bytes(&self) -> u64 {
        4 * (self.rows.values().len() + self.sums.values().len()) as u64
    }
}

/// What follows a product: bias and activation function.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// The bias, one value for each output of the matrix; of a gated one that of the gate, then that of what
    /// it gates.
    pub(crate) bias: [&'a [f32]; 2],
    /// The activation function that every value goes through, or in a gated product the gate alone.
    pub(crate) activation: Option<ActivationFn>,
}

impl<'a> Epilogue<'a> {
    /// The epilogue of a matrix with this bias, which of a gated one has the gate's columns first, and
    /// this activation function.
    pub(crate) fn of(
        bias: Option<&'a [f32]>,
        gated: bool,
        activation: Option<ActivationFn>,
    ) -> Self {
        let bias = bias.unwrap_or_default();
        let (gate, up) = bias.split_at(if gated { bias.len() / 2 } else { bias.len() });
        Self { bias: [gate, up], activation }
    }

    /// The epilogue of these columns of the product alone.
    pub(crate) fn part(self, columns: Range<usize>) -> Self {
        let part = |bias: &'a [f32]| bias.get(columns.clone()).unwrap_or_default();
        Self { bias: self.bias.map(part), ..self }
    }
}

/// Where the product of one pair of panels goes.
struct ProductTarget<'a> {
    /// The first column of the result that the pair gives.
    column: usize,
    /// The number of columns that the pair gives.
    width: usize,
    gated: bool,
    activation: Option<ActivationFn>,
    /// The bias of the pair's columns; zeros without one.
    bias: &'a [f32; PAIR],
}

/// The right-hand side of a product, as kernels read it: panels of a matrix.
pub(crate) trait Operand: Copy + Send + Sync {
    /// Inputs are divided between multiples of this.
    const STEP: usize;

    /// The number of inputs of all panels.
    fn inputs(&self) -> usize;
    /// The number of panels.
    fn count(&self) -> usize;
    /// The same operand for the rows behind so many; another one only where it knows what its rows are.
    #[must_use]
    fn behind(self, _rows: usize) -> Self {
        self
    }
    /// The number of chunks in which so many rows are taken, and of blocks in which their inputs are. Rows are packed
    /// again for every [`WAITING_PAIRS`] if there is more than one block.
    fn parts(&self, rows: usize) -> (usize, usize);
    /// Packs the part of the left-hand side as products with the panels read it.
    fn pack<I: Isa>(&self, isa: I, left: Area<'_>, part: &RowChunk, to: &mut Lines<f32>);
    /// Multiplies all rows of the part with one pair of panels. `scratch` is the packed part, and sums, [`PAIR`] for each
    /// row: those of the inputs before.
    fn pair<I: Isa>(
        &self,
        isa: I,
        part: &RowChunk,
        pair: usize,
        scratch: (&[f32], &mut [f32]),
        finish: Finish<'_, '_>,
    );
}

/// The part of a product that one thread computes: `out = epilogue(left x pairs of panels)`.
///
/// # Shapes
/// left `[rows, inputs]`, out `[rows, columns of the pairs]`.
pub(crate) struct Block<'a, 'o, M> {
    pub(crate) left: Area<'a>,
    pub(crate) matrix: M,
    pub(crate) gated: bool,
    pub(crate) pairs: Range<usize>,
    pub(crate) out: AreaMut<'o>,
    pub(crate) epilogue: Epilogue<'a>,
    pub(crate) scratch: &'a mut Scratch,
}

/// Columns of the result that a pair of panels gives.
pub(crate) fn pair_columns(gated: bool) -> usize {
    if gated { PANEL } else { PAIR }
}

/// A chunk of rows, and the block of inputs that is worked on.
#[derive(Clone)]
pub(crate) struct RowChunk {
    pub(crate) rows: Range<usize>,
    pub(crate) inputs: Range<usize>,
    /// Whether these are the first inputs.
    pub(crate) begin: bool,
    /// Whether these are the last inputs.
    pub(crate) end: bool,
}

impl<M: Operand> SimdOp for Block<'_, '_, M> {
    type Output = ();
    #[inline(always)]
    fn eval<I: Isa>(mut self, isa: I) {
        let (rows, inputs) = (self.out.rows(), self.matrix.inputs());
        let (chunks, blocks) = self.matrix.parts(rows);
        let together = if blocks > 1 { WAITING_PAIRS } else { usize::MAX };
        for chunk in 0..chunks {
            let rows = share(rows, chunks, chunk);
            let mut first = self.pairs.start;
            while first < self.pairs.end {
                let pairs = first..self.pairs.end.min(first.saturating_add(together));
                // All at once: growing loses what is there.
                let waiting = if blocks > 1 { pairs.len() } else { 1 };
                self.scratch.sums.grow(waiting * rows.len() * PAIR);
                for block in 0..blocks {
                    let (begin, end) = (block == 0, block + 1 == blocks);
                    let steps = share(inputs / M::STEP, blocks, block);
                    let inputs = steps.start * M::STEP..steps.end * M::STEP;
                    let part = RowChunk { rows: rows.clone(), inputs, begin, end };
                    self.matrix.pack(isa, self.left, &part, &mut self.scratch.rows);
                    for pair in pairs.clone() {
                        // Sums wait only if other inputs follow.
                        let waiting = if blocks > 1 { pair - first } else { 0 };
                        self.pair(isa, &part, pair, waiting);
                    }
                }
                first = pairs.end;
            }
        }
    }
}

/// Part `at` of `whole` in `parts` nearly equal ones.
pub(super) fn share(whole: usize, parts: usize, at: usize) -> Range<usize> {
    let (each, more) = (whole / parts, whole % parts);
    let start = at * each + at.min(more);
    start..start + each + usize::from(at < more)
}

/// Vectors of a panel: one with AVX-512, two with AVX2, four with NEON.
pub(super) const fn vectors<I: Isa>() -> usize {
    PANEL * size_of::<f32>() / size_of::<I::F32>()
}

/// Whether a vector is as wide as a panel.
pub(super) const fn wide<I: Isa>() -> bool {
    vectors::<I>() == 1
}

impl<M: Operand> Block<'_, '_, M> {
    /// Multiplies all rows of the part with one pair of panels.
    #[inline(always)]
    fn pair<I: Isa>(&mut self, isa: I, part: &RowChunk, pair: usize, waiting: usize) {
        let mut bias = [0.0; PAIR];
        let target = self.target(pair, &mut bias);
        let finish = Finish { first: part.rows.start, target, out: self.out.again() };
        let Scratch { rows: packed, sums } = &mut *self.scratch;
        let size = part.rows.len() * PAIR;
        let sums = &mut sums.values_mut()[waiting * size..][..size];
        self.matrix.pair(isa, part, pair, (packed.values(), sums), finish);
    }

    /// Where the product of a pair goes, and its bias.
    fn target<'t>(&self, pair: usize, bias: &'t mut [f32; PAIR]) -> ProductTarget<'t> {
        let (gated, Epilogue { bias: all, activation }) = (self.gated, self.epilogue);
        let columns = pair_columns(gated);
        let first = pair * columns;
        let [gate, up] = all;
        match gated {
            true => {
                copy(gate, first, &mut bias[..PANEL]);
                copy(up, first, &mut bias[PANEL..]);
            }
            false => copy(gate, first, bias),
        }
        let column = (pair - self.pairs.start) * columns;
        let width = columns.min(self.out.columns() - column);
        ProductTarget { column, width, gated, activation, bias }
    }
}

fn copy(from: &[f32], at: usize, out: &mut [f32]) {
    let from = &from[at.min(from.len())..];
    let len = from.len().min(out.len());
    out[..len].copy_from_slice(&from[..len]);
}

/// The number of groups in which so many rows are taken, each as high as a tile at most.
#[inline(always)]
pub(super) fn groups<I: Isa>(rows: usize) -> usize {
    rows.div_ceil(if wide::<I>() { WIDE_ROWS } else { NARROW_ROWS })
}

impl<F: Format> Operand for Panels<'_, F> {
    const STEP: usize = 1;

    fn inputs(&self) -> usize {
        self.inputs
    }

    fn count(&self) -> usize {
        self.count
    }

    /// Few rows have room for all inputs, and then panels are read from end to end.
    fn parts(&self, rows: usize) -> (usize, usize) {
        let all = rows * self.inputs <= MOST_ROWS * MOST_INPUTS;
        (rows.div_ceil(MOST_ROWS), if all { 1 } else { self.inputs.div_ceil(MOST_INPUTS) })
    }

    /// Rows of a group stand next to each other, input after input.
    #[inline(always)]
    fn pack<I: Isa>(&self, _: I, left: Area<'_>, part: &RowChunk, to: &mut Lines<f32>) {
        /// Inputs at a time, so that what is written stays in the first-level cache.
        const PIECE: usize = 64;
        let RowChunk { rows, inputs, .. } = part;
        let groups = groups::<I>(rows.len());
        let packed = to.grow(rows.len() * inputs.len());
        for group in 0..groups {
            let own = share(rows.len(), groups, group);
            let height = own.len();
            let packed = &mut packed[own.start * inputs.len()..own.end * inputs.len()];
            for (piece, packed) in packed.chunks_mut(PIECE * height).enumerate() {
                let start = inputs.start + piece * PIECE;
                for at in 0..height {
                    let row = left.row(rows.start + own.start + at);
                    let row = &row[start..start + packed.len() / height];
                    for (value, packed) in row.iter().zip(packed.chunks_exact_mut(height)) {
                        packed[at] = *value;
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn pair<I: Isa>(
        &self,
        isa: I,
        part: &RowChunk,
        pair: usize,
        (packed, sums): (&[f32], &mut [f32]),
        mut finish: Finish<'_, '_>,
    ) {
        let RowChunk { rows, inputs, begin, end } = part.clone();
        let groups = groups::<I>(rows.len());
        let panels = (self.count - 2 * pair).min(2);
        let depth = if wide::<I>() || groups == 1 { inputs.len() } else { NARROW_INPUTS };
        let steps = inputs.len().div_ceil(depth);
        let mut own = [0.0; WIDE_ROWS * PAIR];
        // Sums of one step of all inputs stay in the first-level cache.
        let waits = !(begin && end && steps == 1);
        for step in 0..steps {
            let some = share(inputs.len(), steps, step);
            for group in 0..groups {
                let place = share(rows.len(), groups, group);
                let height = place.len();
                let sums = match waits {
                    true => &mut sums[place.start * PAIR..place.end * PAIR],
                    false => &mut own[..height * PAIR],
                };
                let left = &packed[place.start * inputs.len()..place.end * inputs.len()];
                let left = &left[some.start * height..some.end * height];
                let right = self.from(2 * pair, inputs.start + some.start);
                let next = following(right, self.apart, some.len(), group, groups);
                let tile: Tile<'_, F> = Tile {
                    rows: height,
                    inputs: some.len(),
                    left,
                    right,
                    apart: self.apart * PANEL,
                    panels,
                    add: !begin || step > 0,
                    next: wide::<I>().then_some(next),
                };
                tile.sum(isa, sums);
                if end && step + 1 == steps {
                    finish.rows(isa, sums, place.start);
                }
            }
        }
    }
}

/// One group of rows times one pair of panels.
///
/// # Shapes
/// left `[inputs, rows]`, right `[panels, inputs, PANEL]`, sums `[rows, PAIR]`.
struct Tile<'a, F: Format> {
    rows: usize,
    inputs: usize,
    left: &'a [f32],
    right: &'a [F::Element],
    /// How far one panel is from the next, in values.
    apart: usize,
    /// The number of panels, one or two.
    panels: usize,
    /// Whether the products are added to the sums, instead of taking their place.
    add: bool,
    /// The part of the following panels that is fetched meanwhile; none where that is slower.
    next: Option<Next<F>>,
}

/// What a group of rows fetches from memory while it is worked on: its part of the same inputs of the pair of
/// panels behind `right`, which all groups together find in the cache then. Without it the first group waits
/// for memory, and the others leave it idle. AVX2 is slower with it.
#[inline(always)]
fn following<F: Format>(
    right: &[F::Element],
    all: usize,
    inputs: usize,
    group: usize,
    groups: usize,
) -> Next<F> {
    let from = right.as_ptr().wrapping_add(2 * all * PANEL);
    Next {
        from: from.wrapping_add(inputs * group / groups * PANEL),
        each: ((PANEL * size_of::<F::Element>()) << 8) / groups,
    }
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
        let both = self.panels == 2 && (wide::<I>() || self.rows <= FEW_ROWS);
        match (self.rows, vectors::<I>(), both) {
            (1, 1, true) => self.single::<I, 2, 1, 4>(isa, sums),
            (1, 1, false) => self.single::<I, 1, 1, 4>(isa, sums),
            (1, 2, true) => self.single::<I, 2, 2, 8>(isa, sums),
            (1, 2, false) => self.single::<I, 1, 2, 8>(isa, sums),
            (1, _, true) => self.single::<I, 2, 4, 16>(isa, sums),
            (1, _, false) => self.single::<I, 1, 4, 16>(isa, sums),
            (_, 1, true) => rows!(0, 2 x 1, 2 3 4 5 6 7 8 9 10 11 12 13 14),
            (_, 1, false) => rows!(0, 1 x 1, 2 3 4 5 6 7 8 9 10 11 12 13 14),
            (_, 2, true) => rows!(0, 2 x 2, 2),
            (_, 2, false) => {
                for panel in 0..self.panels {
                    rows!(panel, 1 x 2, 2 3 4 5 6);
                }
            }
            (_, _, true) => rows!(0, 2 x 4, 2),
            (_, _, false) => {
                for panel in 0..self.panels {
                    rows!(panel, 1 x 4, 2 3 4 5 6);
                }
            }
        }
    }

    /// Multiplies one row with all panels.
    #[inline(always)]
    fn single<I: Isa, const PANELS: usize, const VECTORS: usize, const ALL: usize>(
        &self,
        isa: I,
        sums: &mut [f32],
    ) {
        let ops = isa.f32();
        let mut tile = [[ops.zero(); VECTORS]; PANELS];
        if self.add {
            let places = sums.chunks_exact(ops.len());
            for (sum, place) in tile.as_flattened_mut().iter_mut().zip(places) {
                *sum = ops.load(place);
            }
        }
        let left = &self.left[..self.inputs];
        let tile =
            micro::stream::<I, F, PANELS, VECTORS, ALL>(isa, tile, left, self.right, self.apart);
        let places = sums.chunks_exact_mut(ops.len());
        for (sum, place) in tile.as_flattened().iter().zip(places) {
            ops.store(*sum, place);
        }
    }

    /// Multiplies the rows with `PANELS` panels from `panel` on.
    #[inline(always)]
    fn rows<I: Isa, const ROWS: usize, const PANELS: usize, const VECTORS: usize>(
        &self,
        isa: I,
        panel: usize,
        sums: &mut [f32],
    ) {
        let ops = isa.f32();
        let first = panel * PANEL;
        let mut tile = [[[ops.zero(); VECTORS]; PANELS]; ROWS];
        if self.add {
            for (row, tile) in tile.iter_mut().enumerate() {
                for (at, tile) in tile.iter_mut().enumerate() {
                    for (v, sum) in tile.iter_mut().enumerate() {
                        *sum = ops.load(&sums[row * PAIR + first + at * PANEL + v * ops.len()..]);
                    }
                }
            }
        }
        let left = Left { values: self.left, row: 1, step: ROWS };
        let right = Right { values: &self.right[panel * self.apart..], step: PANEL };
        let tile = micro::accumulate_panels::<I, F, ROWS, PANELS, VECTORS>(
            isa,
            tile,
            self.inputs,
            left,
            right,
            self.apart,
            self.next,
        );
        for (row, tile) in tile.iter().enumerate() {
            for (at, tile) in tile.iter().enumerate() {
                for (v, sum) in tile.iter().enumerate() {
                    let place = row * PAIR + first + at * PANEL + v * ops.len();
                    ops.store(*sum, &mut sums[place..]);
                }
            }
        }
    }
}

/// What becomes of the sums of a pair of panels: bias, activation function and gate, and their way to
/// the result.
pub(crate) struct Finish<'a, 'o> {
    /// The first row of the part.
    first: usize,
    target: ProductTarget<'a>,
    out: AreaMut<'o>,
}

impl Finish<'_, '_> {
    /// Finishes the rows from `row` of the part on: [`PAIR`] sums each.
    #[inline(always)]
    pub(crate) fn rows<I: Isa>(&mut self, isa: I, sums: &[f32], row: usize) {
        let ops = isa.f32();
        let ProductTarget { column, width, gated, .. } = self.target;
        let columns = pair_columns(gated);
        for (at, sums) in sums.chunks_exact(PAIR).enumerate() {
            let out = &mut self.out.row(self.first + row + at)[column..column + width];
            if width == columns {
                for place in (0..columns).step_by(ops.len()) {
                    ops.store(self.target.value(isa, sums, place), &mut out[place..]);
                }
            } else {
                let mut whole = [0.0; PAIR];
                for place in (0..columns).step_by(ops.len()) {
                    ops.store(self.target.value(isa, sums, place), &mut whole[place..]);
                }
                out.copy_from_slice(&whole[..width]);
            }
        }
    }
}

impl ProductTarget<'_> {
    /// The values of the result at columns `place..` of the pair. No closures here: they would be
    /// compiled without the instructions of the function that they stand in.
    #[inline(always)]
    fn value<I: Isa>(&self, isa: I, sums: &[f32], place: usize) -> I::F32 {
        let ops = isa.f32();
        let sum = ops.add(ops.load(&sums[place..]), ops.load(&self.bias[place..]));
        let value = match self.activation {
            Some(activation) => activation.eval(isa, sum),
            None => sum,
        };
        if !self.gated {
            return value;
        }
        let up = place + PANEL;
        ops.mul(value, ops.add(ops.load(&sums[up..]), ops.load(&self.bias[up..])))
    }
}
