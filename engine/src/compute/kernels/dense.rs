//! Products of rows with a held matrix, on all threads.
// Hot path: no logging, no allocation once the scratch has grown; the only lock is a thread's own.

use super::{
    area::{Area, AreaMut, Cut, Extent},
    instructions::Instructions,
    micro::{F32, each_format},
    packed::{self, Block, Operand, pair_columns},
    threads::Threads,
    windows::Windows,
};
use crate::weights::AnyMatrix;
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

pub(crate) use packed::Epilogue;

/// Rows of which each thread has at least so many are divided among them; fewer go through all
/// threads, each with its own columns.
const ROWS_EACH: usize = 56;

/// Memory that products reuse, for each thread.
pub(crate) struct Scratch(Vec<Mutex<packed::Scratch>>);

impl Scratch {
    pub(crate) fn new(threads: &Threads) -> Self {
        Self((0..threads.count()).map(|_| Mutex::default()).collect())
    }

    /// Bytes of the thread that has most.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |own: &Mutex<packed::Scratch>| own.lock().map_or(0, |own| own.bytes());
        self.0.iter().map(bytes).max().unwrap_or(0)
    }
}

/// `out = left x matrix`, then the epilogue. With a gated matrix `out = activation(left x gate) * (left
/// x up)`.
///
/// # Shapes
/// left `[rows, inputs]`, out `[rows, matrix.columns()]`, bias `[matrix.outputs]`.
pub(crate) fn product<'m>(
    threads: &Threads,
    scratch: &Scratch,
    left: Area<'_>,
    matrix: impl Into<AnyMatrix<'m>>,
    out: AreaMut<'_>,
    epilogue: Epilogue<'_>,
) {
    on(Instructions::current(), threads, scratch, left, matrix.into(), out, epilogue);
}

/// [`product`] with these instructions.
pub(super) fn on(
    instructions: Instructions,
    threads: &Threads,
    scratch: &Scratch,
    left: Area<'_>,
    matrix: AnyMatrix<'_>,
    out: AreaMut<'_>,
    epilogue: Epilogue<'_>,
) {
    assert_eq!((left.columns(), out.columns()), (matrix.layout.inputs, matrix.columns()));
    assert_eq!(left.rows(), out.rows());
    let gated = matrix.layout.gated;
    let common = Common { instructions, threads, scratch, gated, epilogue };
    match matrix.blocks() {
        Some(panels) => common.divide(left, panels.by(instructions, matrix.activations), out),
        None => each_format!(matrix.format, F => common.divide(left, matrix.panels::<F>(), out)),
    }
}

/// `out = windows x matrix`, then the epilogue.
///
/// # Shapes
/// out `[results, outputs of the matrix]`.
pub(crate) fn convolve(
    threads: &Threads,
    scratch: &Scratch,
    windows: Windows<'_, F32>,
    out: AreaMut<'_>,
    epilogue: Epilogue<'_>,
) {
    let instructions = Instructions::current();
    let common = Common { instructions, threads, scratch, gated: false, epilogue };
    // The windows know their image.
    let none = Extent { start: 0, rows: out.rows(), columns: 0, stride: 0 };
    if let Some(left) = Area::new(&[], none) {
        common.divide(left, windows, out);
    }
}

/// What the parts of a product that threads compute have in common.
struct Common<'a> {
    instructions: Instructions,
    threads: &'a Threads,
    scratch: &'a Scratch,
    gated: bool,
    epilogue: Epilogue<'a>,
}

impl Common<'_> {
    /// Divides a product among the threads.
    fn divide<M: Operand>(&self, left: Area<'_>, matrix: M, out: AreaMut<'_>) {
        let threads = self.threads;
        // As much work as so many values that are only touched.
        let values = (matrix.inputs() * out.columns()).saturating_mul(out.rows().div_ceil(16));
        let (rows, pairs) = (out.rows(), matrix.count().div_ceil(2));
        let count = threads.count();
        if rows >= ROWS_EACH * count || pairs < count.min(rows) {
            let grain = rows.div_ceil(count);
            threads.each(out, grain, values, |first, out| {
                let left = left.part(first, out.rows(), 0, left.columns());
                self.block(left, matrix.behind(first), 0..pairs, out);
            });
        } else {
            let out = ByPairs { area: out, columns: pair_columns(self.gated) };
            threads.each(out, 1, values, |first, out| {
                self.block(left, matrix, first..first + out.items(), out.area);
            });
        }
    }

    /// Computes one thread's part.
    fn block<M: Operand>(&self, left: Area<'_>, matrix: M, pairs: Range<usize>, out: AreaMut<'_>) {
        let own = &self.scratch.0[self.threads.index()];
        let mut own = own.lock().unwrap_or_else(PoisonError::into_inner);
        let (gated, epilogue) = (self.gated, self.epilogue);
        let block = Block { left, matrix, gated, pairs, out, epilogue, scratch: &mut own };
        self.instructions.run(block);
    }
}

/// The columns of a product, cut between pairs of panels.
struct ByPairs<'a> {
    area: AreaMut<'a>,
    /// Columns of the result that a pair gives.
    columns: usize,
}

impl Cut for ByPairs<'_> {
    fn items(&self) -> usize {
        self.area.columns().div_ceil(self.columns)
    }
    fn cut(self, at: usize) -> (Self, Self) {
        let columns = self.columns;
        let (left, right) = self.area.cut_columns(at * columns);
        (Self { area: left, columns }, Self { area: right, columns })
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{activation::ActivationFn, testing::*},
        *,
    };
    use crate::weights::ShardMatrix;
    use galaxy_common::WeightFormat;

    const FORMATS: [WeightFormat; WeightFormat::FLOATS.len()] = WeightFormat::FLOATS;

    fn matrix(
        random: &mut Random,
        inputs: usize,
        outputs: usize,
        gated: bool,
        format: WeightFormat,
    ) -> ShardMatrix {
        let values = random.values(inputs * outputs);
        ShardMatrix::pack(&values, inputs, outputs, gated, format)
    }

    fn reference(x: &[f32], matrix: &ShardMatrix, bias: Option<&[f32]>) -> Vec<f64> {
        let (w, n) = (matrix.wide(), matrix.outputs);
        let mut out = Vec::new();
        for x in x.chunks(matrix.inputs) {
            let mut row: Vec<f64> = (0..n).map(|c| bias.map_or(0.0, |b| f64::from(b[c]))).collect();
            for (x, w) in x.iter().zip(w.chunks(n)) {
                row.iter_mut().zip(w).for_each(|(r, w)| *r += f64::from(*x) * f64::from(*w));
            }
            out.extend(row);
        }
        out
    }

    #[test]
    fn product_rows_are_bit_identical_whatever_else_is_in_the_batch() {
        each(|random, instructions| {
            for (inputs, outputs, gated) in
                [(7, 5, false), (513, 257, false), (2050, 100, false), (1100, 90, true)]
            {
                for format in FORMATS {
                    let matrix = matrix(random, inputs, outputs, gated, format);
                    let columns = AnyMatrix::from(&matrix).columns();
                    let x = random.values(200 * inputs);
                    let run = |first: usize, rows: usize, count: u16| {
                        let threads = Threads::new(count);
                        let scratch = Scratch::new(&threads);
                        let mut out = vec![f32::NAN; rows * columns];
                        let area = whole_mut(&mut out, rows, columns);
                        let left = whole(&x[first * inputs..][..rows * inputs], rows, inputs);
                        let epilogue = Epilogue::of(None, gated, Some(ActivationFn::Silu));
                        on(
                            instructions,
                            &threads,
                            &scratch,
                            left,
                            (&matrix).into(),
                            area,
                            epilogue,
                        );
                        out
                    };
                    let want = run(0, 200, 1);
                    for (first, rows) in
                        [(0, 1), (3, 1), (199, 1), (4, 2), (9, 6), (90, 15), (40, 160)]
                    {
                        for count in [1, 2] {
                            let got = run(first, rows, count);
                            let want = &want[first * columns..][..rows * columns];
                            let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                            let what = format!(
                                "{instructions} {inputs}x{outputs} {format} {first}+{rows}"
                            );
                            assert!(got.iter().zip(want).all(equal), "{what} x{count}");
                        }
                    }
                }
            }
        });
    }

    /// Ragged shapes, and some that cross the blocks of every kernel.
    const SHAPES: [(usize, usize, usize); 18] = [
        (1, 1, 1),
        (1, 7, 7),
        (1, 515, 1030),
        (2, 7, 3),
        (3, 1, 65),
        (5, 513, 257),
        (14, 3, 16),
        (15, 2050, 48),
        (29, 64, 17),
        (64, 33, 129),
        (71, 130, 300),
        (156, 1025, 33),
        (200, 1100, 1090),
        (309, 40, 70),
        (600, 40, 70),
        (160, 2050, 100),
        (230, 64, 20),
        (301, 70, 90),
    ];

    /// Every kernel is a function of the instructions, and of nothing else of the processor.
    fn each(test: impl Fn(&mut Random, Instructions)) {
        for instructions in Instructions::all() {
            test(&mut Random::default(), instructions);
        }
    }

    fn run(
        threads: &Threads,
        instructions: Instructions,
        left: Area<'_>,
        matrix: &ShardMatrix,
        out: AreaMut<'_>,
        epilogue: Epilogue<'_>,
    ) {
        let scratch = Scratch::new(threads);
        on(instructions, threads, &scratch, left, matrix.into(), out, epilogue);
    }

    #[test]
    fn scratch_of_products_stays_within_the_budget() {
        each(|random, instructions| {
            let threads = Threads::new(1);
            for (rows, inputs) in [1, 9, 40, 128, 154, 155, 300]
                .into_iter()
                .flat_map(|r| [64, 1030, 4096].map(|i| (r, i)))
            {
                let matrix = matrix(random, inputs, 1100, false, FORMATS[0]);
                let x = random.values(rows * inputs);
                let scratch = Scratch::new(&threads);
                let mut out = vec![0.0; rows * 1100];
                let (left, out) = (whole(&x, rows, inputs), whole_mut(&mut out, rows, 1100));
                on(
                    instructions,
                    &threads,
                    &scratch,
                    left,
                    (&matrix).into(),
                    out,
                    Epilogue::default(),
                );
                let held = scratch.0[0].lock().expect("nobody panicked").bytes();
                let said = galaxy_graph::budget::product_scratch(rows as u64, inputs as u64);
                assert!(held <= said, "{rows} x {inputs}: {held}, {said} were said");
            }
        });
    }

    #[test]
    fn part_of_a_matrix_gives_its_columns_bit_for_bit() {
        each(|random, instructions| {
            let (threads, columns) = (Threads::new(2), 106);
            for ((rows, inputs), format) in
                [(1, 70), (29, 64), (130, 33)].into_iter().flat_map(|s| FORMATS.map(|f| (s, f)))
            {
                let matrix = matrix(random, inputs, columns, false, format);
                let x = random.values(rows * inputs);
                let left = || whole(&x, rows, inputs);
                let mut all = vec![f32::NAN; rows * columns];
                let area = whole_mut(&mut all, rows, columns);
                run(&threads, instructions, left(), &matrix, area, Epilogue::default());
                for range in [0..48, 48..106, 16..64, 0..106, 0..40, 32..33] {
                    let part = AnyMatrix::from(&matrix).part(range.clone()).expect("whole panels");
                    let mut out = vec![f32::NAN; rows * range.len()];
                    let (area, scratch) =
                        (whole_mut(&mut out, rows, range.len()), Scratch::new(&threads));
                    on(instructions, &threads, &scratch, left(), part, area, Epilogue::default());
                    let want = all.chunks(columns).flat_map(|row| &row[range.clone()]);
                    assert!(want.eq(&out), "{range:?} of {rows} x {inputs}");
                }
                for wrong in [8..48, 96..112, 48..48] {
                    assert!(AnyMatrix::from(&matrix).part(wrong).is_none());
                }
            }
        });
    }

    #[test]
    fn a_slice_of_inputs_and_gated_columns_equals_a_smaller_matrix() {
        each(|random, instructions| {
            let threads = Threads::new(2);
            let (inputs, columns) = (70, 53);
            for (rows, format) in [1, 29].into_iter().flat_map(|r| FORMATS.map(|f| (r, f))) {
                let large = matrix(random, inputs, 2 * columns, true, format);
                let (wide, bias) = (large.wide(), random.values(2 * columns));
                let x = random.values(rows * inputs);
                for (from, to, own) in [(0, 70, 0..53), (6, 41, 16..40), (69, 70, 32..53)] {
                    let of = |column: usize| (from..to).map(move |i| i * 2 * columns + column);
                    let sides = [own.clone(), columns + own.start..columns + own.end];
                    let mut small = vec![0.0; (to - from) * 2 * own.len()];
                    let mut small_bias = vec![0.0; 2 * own.len()];
                    for (at, column) in sides.iter().cloned().flatten().enumerate() {
                        small_bias[at] = bias[column];
                        for (row, place) in of(column).enumerate() {
                            small[row * 2 * own.len() + at] = wide[place];
                        }
                    }
                    let small = ShardMatrix::pack(&small, to - from, 2 * own.len(), true, format);
                    let make = |matrix: AnyMatrix<'_>, epilogue: Epilogue<'_>| {
                        let mut out = vec![f32::NAN; rows * own.len()];
                        let area = whole_mut(&mut out, rows, own.len());
                        let left = whole(&x, rows, inputs).part(0, rows, from, to - from);
                        let scratch = Scratch::new(&threads);
                        on(instructions, &threads, &scratch, left, matrix, area, epilogue);
                        out
                    };
                    let part = AnyMatrix::from(&large).inputs(from..to).expect("it has them");
                    let part = part.part(own.clone()).expect("it begins with a panel");
                    let activation = Some(ActivationFn::Silu);
                    let got =
                        make(part, Epilogue::of(Some(&bias), true, activation).part(own.clone()));
                    let want =
                        make((&small).into(), Epilogue::of(Some(&small_bias), true, activation));
                    assert_eq!(got, want, "{rows} rows, inputs {from}..{to}, {own:?}");
                }
            }
        });
    }

    /// Every shape, format and set of instructions against f64; gated ones have SiLU.
    fn sweep(gated: bool) {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let (parts, activation) = if gated { (2, Some(ActivationFn::Silu)) } else { (1, None) };
        each(|random, instructions| {
            for count in [1, 2, 3] {
                let threads = Threads::new(count);
                for ((rows, inputs, columns), format) in
                    SHAPES.into_iter().flat_map(|shape| FORMATS.map(|format| (shape, format)))
                {
                    let matrix = matrix(random, inputs, parts * columns, gated, format);
                    let x = random.values(rows * inputs);
                    let bias = random.values(parts * columns);
                    let mut out = vec![f32::NAN; rows * columns];
                    let epilogue = Epilogue::of(Some(&bias), gated, activation);
                    let area = whole_mut(&mut out, rows, columns);
                    let left = whole(&x, rows, inputs);
                    run(&threads, instructions, left, &matrix, area, epilogue);
                    let mut want = reference(&x, &matrix, Some(&bias));
                    if gated {
                        let both = want.chunks(2 * columns);
                        let gate = |row: &[f64], c: usize| silu(row[c]) * row[columns + c];
                        want = both.flat_map(|row| (0..columns).map(|c| gate(row, c))).collect();
                    }
                    let what =
                        format!("{instructions} {rows}x{inputs}x{columns} {format:?} x{count}");
                    close(&what, &out, &want);
                }
            }
        });
    }

    #[test]
    fn products_match_f64() {
        sweep(false);
    }

    #[test]
    fn gated_products_match_f64() {
        sweep(true);
    }

    #[test]
    fn products_of_strided_areas_leave_other_columns_unchanged() {
        each(|random, instructions| {
            let matrix = matrix(random, 5, 6, false, WeightFormat::F32);
            let (rows, stride) = (4, 11);
            let x = random.values(rows * stride);
            let mut out = vec![9.0; rows * stride];
            let left = Area::new(&x, Extent { start: 2, rows, columns: 5, stride });
            let area = AreaMut::new(&mut out, Extent { start: 3, rows, columns: 6, stride });
            let epilogue = Epilogue::of(None, false, Some(ActivationFn::Relu));
            let (left, area) = (left.expect("fits"), area.expect("fits"));
            run(&Threads::new(1), instructions, left, &matrix, area, epilogue);
            let packed: Vec<f32> = x.chunks(stride).flat_map(|row| row[2..7].to_vec()).collect();
            let want: Vec<f64> =
                reference(&packed, &matrix, None).iter().map(|v| v.max(0.0)).collect();
            let got: Vec<f32> = out.chunks(stride).flat_map(|row| row[3..9].to_vec()).collect();
            close("a part", &got, &want);
            for row in out.chunks(stride) {
                assert!(row[..3].iter().chain(&row[9..]).all(|v| *v == 9.0));
            }
        });
    }

    /// Small enough for Miri.
    #[test]
    fn product_parts_on_threads_match_f64() {
        for (rows, inputs, outputs) in [(3, 160, 105), (60, 280, 20)] {
            let mut random = Random::default();
            let matrix = matrix(&mut random, inputs, outputs, false, WeightFormat::F32);
            let x = random.values(rows * inputs);
            let mut out = vec![f32::NAN; rows * outputs];
            let area = whole_mut(&mut out, rows, outputs);
            let (threads, left) = (Threads::new(2), whole(&x, rows, inputs));
            run(&threads, Instructions::Portable, left, &matrix, area, Epilogue::default());
            close("on threads", &out, &reference(&x, &matrix, None));
        }
    }

    #[test]
    fn a_product_of_no_rows_is_accepted() {
        each(|random, instructions| {
            let matrix = matrix(random, 5, 6, false, WeightFormat::Bf16);
            let out = AreaMut::new(&mut [], Extent { start: 0, rows: 0, columns: 6, stride: 6 });
            let left = Area::new(&[], Extent { start: 0, rows: 0, columns: 5, stride: 5 });
            let (left, out) = (left.expect("fits"), out.expect("fits"));
            run(&Threads::new(1), instructions, left, &matrix, out, Epilogue::default());
        });
    }
}
