//! Products of rows with a held matrix, and what is fused to them.
// Hot path: no locks, no logging, no allocation once the scratch has grown.

use super::{
    area::{Area, AreaMut, Extent},
    general::{Right, multiply},
    threads::Threads,
    vector::{self, Curve},
};
use crate::weights::{HeldMatrix, PANEL, Strip, Values};
use std::ops::Range;

/// 16-bit matrices are widened by strips of so many inputs: at most 512 KiB, which stays in a
/// second-level cache until the strip is multiplied.
const BLOCK_INPUTS: usize = 2048;
/// Rows that `gemm` takes without packing them again for every strip; beyond [`MANY_ROWS`] that
/// packing is too little to matter, and fewer calls are better.
const FEW_ROWS: usize = 48;
const MANY_ROWS: usize = 192;
/// The up half of a gated product waits in blocks of so many rows and columns (1 MiB).
const GATED_ROWS: usize = 512;
const GATED_COLUMNS: usize = 512;

/// Memory that products reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    widened: Vec<f32>,
    gated: Vec<f32>,
}

/// How 16 bits are a number.
#[derive(Clone, Copy)]
enum Wide {
    F16,
    Bf16,
}

impl Wide {
    fn widen(self, bits: &[u16], out: &mut [f32]) {
        match self {
            Self::F16 => vector::widen_f16(bits, out),
            Self::Bf16 => vector::widen_bf16(bits, out),
        }
    }
}

/// What follows a product.
#[derive(Clone, Copy)]
pub(crate) struct Epilogue<'a> {
    /// One for each output of the matrix.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) curve: Option<Curve>,
}

/// `out = left x matrix`, then the epilogue.
///
/// # Shapes
/// left `[rows, inputs]`, out `[rows, outputs]`.
pub(crate) fn product(
    threads: &Threads,
    scratch: &mut Scratch,
    left: Area<'_>,
    matrix: &HeldMatrix,
    mut out: AreaMut<'_>,
    epilogue: Epilogue<'_>,
) {
    raw(threads, &mut scratch.widened, left, matrix, 0..matrix.outputs, &mut out);
    let Epilogue { bias, curve } = epilogue;
    if bias.is_none() && curve.is_none() {
        return;
    }
    let values = out.rows() * out.columns();
    threads.each(out, 1, values, |_, mut rows| {
        for at in 0..rows.rows() {
            let row = rows.row(at);
            if let Some(bias) = bias {
                vector::add(row, bias);
            }
            if let Some(curve) = curve {
                curve.apply(row);
            }
        }
    });
}

/// `out = curve(left x gate) * (left x up)`, where the matrix is gate | up.
///
/// # Shapes
/// left `[rows, inputs]`, matrix `[inputs, 2 * columns]`, out `[rows, columns]`.
pub(crate) fn gated_product(
    threads: &Threads,
    scratch: &mut Scratch,
    left: Area<'_>,
    matrix: &HeldMatrix,
    mut out: AreaMut<'_>,
    bias: Option<&[f32]>,
    curve: Curve,
) {
    let (rows, columns) = (out.rows(), out.columns());
    let Scratch { widened, gated } = scratch;
    for row in (0..rows).step_by(GATED_ROWS) {
        let height = GATED_ROWS.min(rows - row);
        let left = left.part(row, height, 0, left.columns());
        for column in (0..columns).step_by(GATED_COLUMNS) {
            let width = GATED_COLUMNS.min(columns - column);
            grow(gated, height * width);
            let extent = Extent { start: 0, rows: height, columns: width, stride: width };
            let mut up = AreaMut::new(gated, extent).expect("it has grown to that");
            let mut gate = out.part(row, height, column, width);
            let right = columns + column..columns + column + width;
            raw(threads, widened, left, matrix, column..column + width, &mut gate);
            raw(threads, widened, left, matrix, right.clone(), &mut up);
            threads.each((gate, Some(up)), 1, 2 * height * width, |_, (mut gate, up)| {
                let mut up = up.expect("both halves are cut alike");
                for at in 0..gate.rows() {
                    let (gate, up) = (gate.row(at), up.row(at));
                    if let Some(bias) = bias {
                        vector::add(gate, &bias[column..column + width]);
                        vector::add(up, &bias[right.clone()]);
                    }
                    curve.apply(gate);
                    vector::times(gate, up);
                }
            });
        }
    }
}

/// `out = left x matrix[.., columns]`.
fn raw(
    threads: &Threads,
    widened: &mut Vec<f32>,
    left: Area<'_>,
    matrix: &HeldMatrix,
    columns: Range<usize>,
    out: &mut AreaMut<'_>,
) {
    if out.rows() == 1 {
        let work = matrix.inputs * columns.len();
        threads.each(out.row(0), 64, work, |first, piece| {
            single(left.row(0), matrix, columns.start + first, piece);
        });
        return;
    }
    match &matrix.values {
        Values::F32(values) => {
            // Threads take rows: each goes through all strips, which they share in cache.
            let work = out.rows() * out.columns();
            threads.each(out.again(), FEW_ROWS / 2, work, |first, mut out| {
                let left = left.part(first, out.rows(), 0, left.columns());
                for strip in matrix.strips(columns.clone()) {
                    let right = strip_area(values, strip, matrix.inputs);
                    let (rows, column) = (out.rows(), strip.column - columns.start);
                    let mut out = out.part(0, rows, column, strip.width);
                    by_rows(left, right, &mut out, false);
                }
            });
        }
        Values::F16(bits) => {
            blocks(threads, widened, left, matrix, columns, out, bits, Wide::F16);
        }
        Values::Bf16(bits) => {
            blocks(threads, widened, left, matrix, columns, out, bits, Wide::Bf16);
        }
    }
}

fn strip_area(values: &[f32], strip: Strip, inputs: usize) -> Area<'_> {
    let Strip { start, width, pitch, .. } = strip;
    let extent = Extent { start, rows: inputs, columns: width, stride: pitch };
    Area::new(values, extent).expect("a matrix has all its values")
}

/// `out (+)= left x right`, by runs of rows of the size that `gemm` likes.
fn by_rows(left: Area<'_>, right: Area<'_>, out: &mut AreaMut<'_>, add: bool) {
    let rows = out.rows();
    let runs = if rows > MANY_ROWS { 1 } else { rows.div_ceil(FEW_ROWS) };
    let mut row = 0;
    for run in 0..runs {
        let height = (rows - row) / (runs - run);
        let left = left.part(row, height, 0, left.columns());
        let mut out = out.part(row, height, 0, out.columns());
        let none = gemm::Parallelism::None;
        multiply(left, Right::Plain(right), 1.0, &mut out, add, none);
        row += height;
    }
}

/// The product with a 16-bit matrix, block by block.
#[expect(clippy::too_many_arguments, reason = "one call for each of two formats")]
fn blocks(
    threads: &Threads,
    widened: &mut Vec<f32>,
    left: Area<'_>,
    matrix: &HeldMatrix,
    columns: Range<usize>,
    out: &mut AreaMut<'_>,
    bits: &[u16],
    format: Wide,
) {
    grow(widened, BLOCK_INPUTS.min(matrix.inputs) * PANEL);
    for strip in matrix.strips(columns.clone()) {
        let Strip { column, width, start, pitch } = strip;
        for input in (0..matrix.inputs).step_by(BLOCK_INPUTS) {
            let height = BLOCK_INPUTS.min(matrix.inputs - input);
            let extent = Extent { start: 0, rows: height, columns: width, stride: width };
            let block = AreaMut::new(widened, extent).expect("it has grown to that");
            threads.each(block, 1, height * width, |first, mut rows| {
                for at in 0..rows.rows() {
                    let start = start + (input + first + at) * pitch;
                    format.widen(&bits[start..start + width], rows.row(at));
                }
            });
            let right = Area::new(widened, extent).expect("it has grown to that");
            let left = left.part(0, left.rows(), input, height);
            let rows = out.rows();
            let out = out.part(0, rows, column - columns.start, width);
            threads.each(out, FEW_ROWS / 2, rows * height, |first, mut out| {
                let left = left.part(first, out.rows(), 0, height);
                by_rows(left, right, &mut out, input > 0);
            });
        }
    }
}

/// `out = x x matrix[.., first..]` for one row: bound by memory, so the matrix is read once, as it
/// is held.
fn single(x: &[f32], matrix: &HeldMatrix, first: usize, out: &mut [f32]) {
    for strip in matrix.strips(first..first + out.len()) {
        let Strip { column, width, start, pitch } = strip;
        let out = &mut out[column - first..][..width];
        match &matrix.values {
            Values::F32(values) => combine(x, out, pitch, start, values),
            Values::F16(bits) => combine_f16(x, out, pitch, start, bits),
            Values::Bf16(bits) => combine_bf16(x, out, pitch, start, bits),
        }
    }
}

/// The sum of the rows of `w` (each `pitch` apart, from `start`), scaled by `x`.
fn combine(x: &[f32], out: &mut [f32], pitch: usize, start: usize, w: &[f32]) {
    let width = out.len();
    let row = |input: usize| &w[input * pitch + start..][..width];
    out.fill(0.0);
    let (fours, rest) = x.as_chunks::<4>();
    for (at, four) in fours.iter().enumerate() {
        let input = at * 4;
        let rows = [row(input), row(input + 1), row(input + 2), row(input + 3)];
        vector::add_four(out, *four, rows);
    }
    for (at, x) in rest.iter().enumerate() {
        vector::add_scaled(out, *x, row(fours.len() * 4 + at));
    }
}

/// As [`combine`], for bfloat16.
fn combine_bf16(x: &[f32], out: &mut [f32], pitch: usize, start: usize, w: &[u16]) {
    let width = out.len();
    let row = |input: usize| &w[input * pitch + start..][..width];
    out.fill(0.0);
    let (fours, rest) = x.as_chunks::<4>();
    for (at, four) in fours.iter().enumerate() {
        let input = at * 4;
        let rows = [row(input), row(input + 1), row(input + 2), row(input + 3)];
        vector::add_four_bf16(out, *four, rows);
    }
    let mut wide = [0.0; PANEL];
    for (at, x) in rest.iter().enumerate() {
        vector::widen_bf16(row(fours.len() * 4 + at), &mut wide[..width]);
        vector::add_scaled(out, *x, &wide[..width]);
    }
}

/// As [`combine`], for half precision.
fn combine_f16(x: &[f32], out: &mut [f32], pitch: usize, start: usize, w: &[u16]) {
    let width = out.len();
    let row = |input: usize| &w[input * pitch + start..][..width];
    let mut wide = [[0.0; PANEL]; 4];
    out.fill(0.0);
    let (fours, rest) = x.as_chunks::<4>();
    for (at, four) in fours.iter().enumerate() {
        for (i, wide) in wide.iter_mut().enumerate() {
            vector::widen_f16(row(at * 4 + i), &mut wide[..width]);
        }
        vector::add_four(out, *four, [&wide[0], &wide[1], &wide[2], &wide[3]]);
    }
    for (at, x) in rest.iter().enumerate() {
        let wide = &mut wide[0][..width];
        vector::widen_f16(row(fours.len() * 4 + at), wide);
        vector::add_scaled(out, *x, wide);
    }
}

/// Room for `len` values, kept.
pub(crate) fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};

    fn matrix(random: &mut Random, inputs: usize, outputs: usize, format: u8) -> HeldMatrix {
        let values = random.values(inputs * outputs);
        let values = match format {
            0 => Values::F32(values),
            1 => Values::F16(values.iter().map(|v| half::f16::from_f32(*v).to_bits()).collect()),
            _ => Values::Bf16(values.iter().map(|v| half::bf16::from_f32(*v).to_bits()).collect()),
        };
        // Random values are as random in panels.
        HeldMatrix { inputs, outputs, values }
    }

    /// Row-major, out of the panels.
    fn wide(matrix: &HeldMatrix) -> Vec<f64> {
        let panels = wide_panels(matrix);
        let mut rows = vec![f64::NAN; panels.len()];
        for strip in matrix.strips(0..matrix.outputs) {
            for input in 0..matrix.inputs {
                let from = &panels[strip.start + input * strip.pitch..][..strip.width];
                rows[input * matrix.outputs + strip.column..][..strip.width].copy_from_slice(from);
            }
        }
        rows
    }

    fn wide_panels(matrix: &HeldMatrix) -> Vec<f64> {
        match &matrix.values {
            Values::F32(values) => values.iter().map(|v| f64::from(*v)).collect(),
            Values::F16(bits) => bits.iter().map(|b| half::f16::from_bits(*b).to_f64()).collect(),
            Values::Bf16(bits) => bits.iter().map(|b| half::bf16::from_bits(*b).to_f64()).collect(),
        }
    }

    fn reference(x: &[f32], matrix: &HeldMatrix, bias: Option<&[f32]>) -> Vec<f64> {
        let (w, n) = (wide(matrix), matrix.outputs);
        let mut out = Vec::new();
        for x in x.chunks(matrix.inputs) {
            for column in 0..n {
                let products = x.iter().enumerate().map(|(k, x)| f64::from(*x) * w[k * n + column]);
                out.push(products.sum::<f64>() + bias.map_or(0.0, |b| f64::from(b[column])));
            }
        }
        out
    }

    /// Ragged shapes, and some that cross the blocks of every kernel.
    const SHAPES: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (1, 7, 7),
        (1, 515, 1030),
        (2, 7, 3),
        (3, 1, 65),
        (5, 513, 257),
        (64, 33, 129),
        (71, 130, 300),
        (600, 40, 70),
    ];

    #[test]
    fn products_match_f64() {
        let mut random = Random::default();
        for threads in [1, 2, 3] {
            let threads = Threads::new(threads);
            let mut scratch = Scratch::default();
            for (rows, inputs, outputs) in SHAPES {
                for format in 0..3 {
                    let matrix = matrix(&mut random, inputs, outputs, format);
                    let x = random.values(rows * inputs);
                    let bias = random.values(outputs);
                    let left = whole(&x, rows, inputs);
                    let mut out = vec![f32::NAN; rows * outputs];
                    let epilogue = Epilogue { bias: Some(&bias), curve: None };
                    let area = whole_mut(&mut out, rows, outputs);
                    product(&threads, &mut scratch, left, &matrix, area, epilogue);
                    let what = format!("{rows}x{inputs}x{outputs} format {format}");
                    close(&what, &out, &reference(&x, &matrix, Some(&bias)));
                }
            }
        }
    }

    #[test]
    fn gated_products_match_f64() {
        let mut random = Random::default();
        for threads in [1, 2] {
            let threads = Threads::new(threads);
            let mut scratch = Scratch::default();
            for (rows, inputs, columns) in SHAPES {
                for format in 0..3 {
                    let matrix = matrix(&mut random, inputs, 2 * columns, format);
                    let x = random.values(rows * inputs);
                    let bias = random.values(2 * columns);
                    let mut out = vec![f32::NAN; rows * columns];
                    let left = whole(&x, rows, inputs);
                    let area = whole_mut(&mut out, rows, columns);
                    let bias = Some(bias.as_slice());
                    gated_product(&threads, &mut scratch, left, &matrix, area, bias, Curve::Silu);
                    let both = reference(&x, &matrix, bias);
                    let silu = |x: f64| x / (1.0 + (-x).exp());
                    let want: Vec<f64> = both
                        .chunks(2 * columns)
                        .flat_map(|row| (0..columns).map(|c| silu(row[c]) * row[columns + c]))
                        .collect();
                    close(&format!("{rows}x{inputs}x{columns} format {format}"), &out, &want);
                }
            }
        }
    }

    #[test]
    fn parts_of_wider_rows_stay_apart() {
        let mut random = Random::default();
        let matrix = matrix(&mut random, 5, 6, 0);
        let (rows, stride) = (4, 11);
        let x = random.values(rows * stride);
        let mut out = vec![9.0; rows * stride];
        let left = Area::new(&x, Extent { start: 2, rows, columns: 5, stride });
        let area = AreaMut::new(&mut out, Extent { start: 3, rows, columns: 6, stride });
        let epilogue = Epilogue { bias: None, curve: Some(Curve::Relu) };
        let (left, area) = (left.expect("fits"), area.expect("fits"));
        product(&Threads::new(1), &mut Scratch::default(), left, &matrix, area, epilogue);
        let packed: Vec<f32> = x.chunks(stride).flat_map(|row| row[2..7].to_vec()).collect();
        let want: Vec<f64> = reference(&packed, &matrix, None).iter().map(|v| v.max(0.0)).collect();
        let got: Vec<f32> = out.chunks(stride).flat_map(|row| row[3..9].to_vec()).collect();
        close("a part", &got, &want);
        for row in out.chunks(stride) {
            assert!(row[..3].iter().chain(&row[9..]).all(|v| *v == 9.0));
        }
    }
}
