//! Products with matrices in blocks, for every format and set of instructions.

use super::{
    super::{
        activation::ActivationFn,
        area::Area,
        dense::{Epilogue, Scratch, on},
        instructions::Instructions,
        lines::Lines,
        testing::{Random, whole, whole_mut},
        threads::Threads,
    },
    GROUP,
    place::BlockLayout,
};
use crate::weights::{AnyMatrix, Layout, ShardMatrix, Window};
use galaxy_common::{Activations, WeightBlock, WeightFormat};

fn formats() -> impl Iterator<Item = (WeightFormat, WeightBlock)> {
    WeightFormat::ALL.into_iter().filter_map(|format| Some((format, format.block()?)))
}

/// Random blocks as a file has them, whose scales are finite and not large.
fn blocks(random: &mut Random, format: WeightFormat, count: usize) -> Vec<u8> {
    let size = format.block().expect("it has blocks").bytes as usize;
    let values = random.values(size * count + 2 * count);
    let (bytes, scales) = values.split_at(size * count);
    let mut bytes: Vec<u8> = bytes.iter().map(|value| (value * 127.0) as i8 as u8).collect();
    for (block, scales) in bytes.chunks_mut(size).zip(scales.chunks(2)) {
        let mut half = |at: usize, value: f32| {
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        };
        match format {
            WeightFormat::Mxfp4 => block[0] = 120 + (scales[0].abs() * 8.0) as u8,
            WeightFormat::Q6K => half(208, scales[0] * 1e-3),
            _ => {
                half(0, scales[0] * 1e-2);
                let minima =
                    [WeightFormat::Q4_1, WeightFormat::Q5_1, WeightFormat::Q4K, WeightFormat::Q5K];
                if minima.contains(&format) {
                    half(2, scales[1] * 1e-2);
                }
            }
        }
    }
    bytes
}

/// A matrix as a file has it: the blocks of an output, then those of the next.
struct File {
    format: WeightFormat,
    inputs: usize,
    bytes: Vec<u8>,
}

impl File {
    fn new(random: &mut Random, format: WeightFormat, inputs: usize, outputs: usize) -> Self {
        let in_block = format.block().expect("it has blocks").values as usize;
        let bytes = blocks(random, format, inputs.div_ceil(in_block) * outputs);
        Self { format, inputs, bytes }
    }

    /// The same matrix as it is held, from input `first` on.
    fn held(&self, first: usize, inputs: usize, outputs: usize, gated: bool) -> ShardMatrix {
        let layout = Layout { inputs, outputs, gated, first };
        let blocks = layout.blocks(self.format).expect("it has blocks");
        let block = self.format.block().expect("it has blocks");
        let in_block = block.values as usize;
        let row = self.inputs.div_ceil(in_block) * block.bytes as usize;
        let mut values = Lines::zeroed(layout.bytes(self.format)).expect("there is memory");
        for strip in layout.strips(0..outputs) {
            let (panel, lane) = layout.lane(&strip);
            for at in 0..strip.width {
                let row = &self.bytes[(strip.column + at) * row..][..row];
                let row = &row[first / in_block * block.bytes as usize..];
                let (skip, to) = (first % in_block / GROUP, 0..inputs / GROUP);
                blocks.place(row, skip, to, (panel, lane + at), values.values_mut());
            }
        }
        ShardMatrix::new(layout, self.format, values)
    }
}

fn product(
    instructions: Instructions,
    threads: u16,
    x: &[f32],
    matrix: AnyMatrix<'_>,
    epilogue: Epilogue<'_>,
) -> Vec<f32> {
    let (inputs, columns) = (matrix.layout.inputs, matrix.columns());
    let rows = x.len() / inputs;
    let threads = Threads::new(threads);
    let mut out = vec![f32::NAN; rows * columns];
    let area = whole_mut(&mut out, rows, columns);
    let left: Area<'_> = whole(x, rows, inputs);
    on(instructions, &threads, &Scratch::new(&threads), left, matrix, area, epilogue);
    out
}

fn reference(x: &[f32], matrix: &ShardMatrix) -> Vec<f64> {
    let (wide, columns) = (matrix.wide(), matrix.outputs);
    let row = |x: &[f32]| {
        let mut row = vec![0.0; columns];
        for (x, wide) in x.iter().zip(wide.chunks(columns)) {
            row.iter_mut().zip(wide).for_each(|(r, w)| *r += f64::from(*x) * f64::from(*w));
        }
        row
    };
    x.chunks(matrix.inputs).flat_map(row).collect()
}

/// What rounding an activation of at most 1 may move its product by, of the weight: half of a step, and as much
/// again, of the smaller one, for sums in f32.
fn bound(activations: Activations) -> f64 {
    let half = |most: f64| 0.5 / most;
    match activations {
        Activations::A8 => half(127.0) + half(32639.0),
        _ => 2.0 * half(32639.0),
    }
}

/// The types that rows are rounded to.
const ROUNDED: [Activations; 2] = [Activations::A16, Activations::A8];

fn by(matrix: &ShardMatrix, activations: Activations) -> AnyMatrix<'_> {
    AnyMatrix::from(matrix).by(activations).expect("rows are rounded")
}

#[test]
fn quantised_products_are_near_f64_products_of_dequantised_weights() {
    let mut random = Random::default();
    for (format, _) in formats() {
        for (rows, inputs, outputs) in [
            (1, 32, 1),
            (1, 256, 33),
            (2, 544, 48),
            (3, 96, 16),
            (4, 512, 20),
            (7, 288, 50),
            (160, 1120, 70),
        ] {
            let file = File::new(&mut random, format, inputs, outputs);
            let matrix = file.held(0, inputs, outputs, false);
            let x = random.values(rows * inputs);
            let want = reference(&x, &matrix);
            let wide = matrix.wide();
            let weights =
                |column| wide.iter().skip(column).step_by(outputs).map(|w| f64::from(w.abs()));
            let bounds: Vec<f64> = (0..outputs).map(|c| weights(c).sum::<f64>()).collect();
            for (instructions, to) in Instructions::all().flat_map(|i| ROUNDED.map(|to| (i, to))) {
                let got = product(instructions, 2, &x, by(&matrix, to), Epilogue::default());
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    let off = (f64::from(*got) - want).abs();
                    let what =
                        format!("{format} {to} by {instructions}, {rows}x{inputs}x{outputs}");
                    let bound = bound(to) * bounds[at % outputs];
                    assert!(off <= bound, "{what}: at {at} {got} and not {want}");
                }
            }
        }
    }
}

#[test]
fn quantised_product_rows_are_bit_identical_in_every_batch() {
    let mut random = Random::default();
    for (format, _) in formats() {
        for (inputs, outputs, gated) in [(2080, 100, false), (1120, 90, true)] {
            let file = File::new(&mut random, format, inputs, outputs);
            let matrix = file.held(0, inputs, outputs, gated);
            let x = random.values(200 * inputs);
            let epilogue = || Epilogue::of(None, gated, Some(ActivationFn::Silu));
            for (instructions, to) in Instructions::all().flat_map(|i| ROUNDED.map(|to| (i, to))) {
                let run = |first: usize, rows: usize, threads| {
                    let x = &x[first * inputs..][..rows * inputs];
                    product(instructions, threads, x, by(&matrix, to), epilogue())
                };
                let want = run(0, 200, 1);
                let columns = matrix.columns();
                for (first, rows) in
                    [(0, 1), (199, 1), (4, 2), (9, 3), (17, 4), (90, 15), (40, 160)]
                {
                    for threads in [1, 2] {
                        let got = run(first, rows, threads);
                        let want = &want[first * columns..][..rows * columns];
                        let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{format} {to} by {instructions}, rows {first}+{rows} x{threads}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn parts_of_a_quantised_matrix_give_equal_products() {
    let mut random = Random::default();
    let (inputs, outputs) = (544, 106);
    for (format, _) in formats() {
        let file = File::new(&mut random, format, inputs, outputs);
        let whole = file.held(0, inputs, outputs, false);
        let x = random.values(5 * inputs);
        for instructions in Instructions::all() {
            let all = product(instructions, 1, &x, (&whole).into(), Epilogue::default());
            let part = AnyMatrix::from(&whole).part(48..106).expect("it begins with a panel");
            let got = product(instructions, 1, &x, part, Epilogue::default());
            let want: Vec<f32> = all.chunks(outputs).flat_map(|row| row[48..].to_vec()).collect();
            assert_eq!(got, want, "{format} by {instructions}");
            for inputs_of in [32..544, 96..352, 480..544] {
                let some: Vec<f32> =
                    x.chunks(inputs).flat_map(|row| row[inputs_of.clone()].to_vec()).collect();
                let within =
                    AnyMatrix::from(&whole).inputs(inputs_of.clone()).expect("whole groups");
                let alone = file.held(inputs_of.start, inputs_of.len(), outputs, false);
                let of = |matrix| product(instructions, 1, &some, matrix, Epilogue::default());
                assert_eq!(of(within), of((&alone).into()), "{format} of inputs {inputs_of:?}");
            }
        }
        assert!(AnyMatrix::from(&whole).inputs(16..544).is_none());
        assert!(AnyMatrix::from(&whole).inputs(32..500).is_none());
    }
}

#[test]
fn copied_blocks_equal_blocks_that_are_read_from_the_file() {
    let mut random = Random::default();
    for (format, _) in formats() {
        for gated in [false, true] {
            let file = File::new(&mut random, format, 1088, 100);
            let from = file.held(96, 768, 100, gated);
            let want = file.held(352, 320, 100, gated);
            let layout = Layout { inputs: 320, outputs: 100, gated, first: 352 };
            let mut values = Lines::zeroed(layout.bytes(format)).expect("there is memory");
            // In two parts, so that a copy begins within a block.
            for (first, count) in [(0, 96), (96, 224)] {
                let window = Window { input: 256 + first, inputs: count, column: 0, columns: 100 };
                from.copy(window, (first, 0), layout, values.values_mut());
            }
            assert!(ShardMatrix::new(layout, format, values).same(&want), "{format}");
        }
    }
}

#[test]
fn non_finite_inputs_give_nan_and_tiny_inputs_give_near_zero() {
    let mut random = Random::default();
    for (format, _) in formats() {
        let file = File::new(&mut random, format, 96, 16);
        let matrix = file.held(0, 96, 16, false);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random.values(96);
            x[40] = bad;
            for (instructions, to) in Instructions::all().flat_map(|i| ROUNDED.map(|to| (i, to))) {
                let got = product(instructions, 1, &x, by(&matrix, to), Epilogue::default());
                let all = got.iter().all(|value| value.is_nan());
                assert!(all, "{format} {to} by {instructions}: {bad}");
            }
        }
        for small in [0.0, 1e-38, -1e-44] {
            let x = [small; 96];
            for instructions in Instructions::all() {
                let got = product(instructions, 1, &x, (&matrix).into(), Epilogue::default());
                assert!(got.iter().all(|value| value.abs() < 1e-30), "{format} by {instructions}");
            }
        }
    }
}

#[test]
fn scratch_of_quantised_products_stays_within_the_budget() {
    let mut random = Random::default();
    let file = File::new(&mut random, WeightFormat::Q4_0, 4096, 64);
    let matrix = file.held(0, 4096, 64, false);
    let threads = Threads::new(1);
    let scratch = Scratch::new(&threads);
    for rows in [1, 40, 154, 155, 300] {
        let x = random.values(rows * 4096);
        let mut out = vec![0.0; rows * 64];
        let area = whole_mut(&mut out, rows, 64);
        let left = whole(&x, rows, 4096);
        let matrix = AnyMatrix::from(&matrix);
        on(Instructions::current(), &threads, &scratch, left, matrix, area, Epilogue::default());
    }
    assert!(scratch.bytes() + (1 << 19) <= galaxy_graph::budget::THREAD_SCRATCH);
}

#[test]
fn a_block_layout_is_as_large_as_the_weight_format_says() {
    for (format, block) in formats() {
        for (inputs, first) in [(32, 0), (544, 224), (2048, 0), (1024, 32)] {
            let layout = BlockLayout::new(format, (inputs, first), 48).expect("it has blocks");
            let (codes, headers) = layout.panel();
            let held = format.held(inputs as u64, 48) as usize;
            assert_eq!(3 * (codes + headers), held, "{format} {block:?}");
            assert_eq!(layout.codes(), 3 * codes);
        }
    }
}

#[test]
fn products_of_8_bit_activations_agree_for_all_instruction_sets() {
    let mut random = Random::default();
    for (format, _) in formats() {
        // Of one group each sum is a whole number times two scales.
        let file = File::new(&mut random, format, 32, 48);
        let matrix = file.held(0, 32, 48, false);
        let x = random.values(3 * 32);
        let of = |instructions| {
            product(instructions, 1, &x, by(&matrix, Activations::A8), Epilogue::default())
        };
        let want = of(Instructions::Portable);
        for instructions in Instructions::all() {
            for (got, want) in of(instructions).iter().zip(&want) {
                let off = (got - want).abs();
                assert!(off <= 1e-6 * want.abs().max(1e-2), "{format} by {instructions}");
            }
        }
        assert!(AnyMatrix::from(&matrix).by(Activations::F32).is_none(), "{format}");
    }
}
