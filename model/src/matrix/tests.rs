//! Windows of matrices, read from a file.

use super::*;
use crate::testing::file;
use proptest::prelude::*;

/// Passes on a store's f32 matrix of `outputs * parts` outputs, or one of its parts. Value (i, o)
/// of the whole is i * 1000 + o.
fn with<R>(
    inputs: u32,
    outputs: u32,
    (parts, part): (u32, u32),
    storage: Storage,
    format: WeightFormat,
    test: impl FnOnce(MatrixSource<'_>) -> R,
) -> R {
    let all = outputs * parts;
    let (rows, columns) = match storage {
        Storage::OutputRows => (all, inputs),
        Storage::InputRows => (inputs, all),
    };
    let mut bytes = Vec::new();
    for r in 0..rows {
        for c in 0..columns {
            let (i, o) = if storage == Storage::OutputRows { (c, r) } else { (r, c) };
            match format {
                WeightFormat::F32 => bytes.extend(value(i, o).to_le_bytes()),
                _ => bytes.extend(bits(i, o).to_le_bytes()),
            }
        }
    }
    let shape = vec![u64::from(rows), u64::from(columns)];
    let name = format.name().to_uppercase();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let text = file(&[("w", &name, shape.clone(), bytes)]);
    std::fs::write(directory.path().join("model.safetensors"), text).expect("a file");
    let store = Store::open(directory.path()).expect("valid");
    let (tensor, format) = store.tensor("w", &shape).expect("there");
    test(MatrixSource {
        store: &store,
        name: "w".to_owned(),
        shard: tensor.shard,
        format,
        stored: format,
        storage,
        offset: tensor.offset,
        pitch: u64::from(columns),
        height: u64::from(rows),
        tile: u64::from(columns),
        first_output: u64::from(outputs * part),
        paired: 0,
        inputs,
        outputs,
    })
}

fn value(i: u32, o: u32) -> f32 {
    (i * 1000 + o) as f32
}
/// A pattern of bits that is finite in both 16-bit types.
fn bits(i: u32, o: u32) -> u16 {
    ((i * 31 + o * 7) % 0x7000) as u16
}

/// Reads a window into a buffer with margins, and compares all of it.
fn check_f32(
    m: &MatrixSource<'_>,
    inputs: Range<u32>,
    outputs: Range<u32>,
    want: &dyn Fn(u32, u32) -> f32,
) {
    let (at, stride) = (3, outputs.len() + 5);
    let mut out = vec![-1.0; inputs.len() * stride];
    let mut scratch = Vec::new();
    m.read_f32((inputs.clone(), outputs.clone()), &mut out, stride, at, &mut scratch)
        .expect("in range");
    assert!(scratch.capacity() as u64 <= BUFFER_BYTES);
    for (row, i) in inputs.enumerate() {
        for column in 0..stride {
            let inside = (at..at + outputs.len()).contains(&column);
            let want = if inside { want(i, outputs.start + (column - at) as u32) } else { -1.0 };
            let have = out[row * stride + column];
            assert!(have == want, "({i}, {column}): {have} is not {want}");
        }
    }
}

#[test]
fn large_windows_of_a_matrix_are_read_exactly() {
    for storage in [Storage::OutputRows, Storage::InputRows] {
        // Stored rows of 800 kB in segments; strided parts of them with large gaps; and many
        // short rows, more than one buffer of them.
        for (rows, columns) in [(21, 200_000), (70_000, 33)] {
            let (inputs, outputs) = match storage {
                Storage::OutputRows => (columns, rows),
                Storage::InputRows => (rows, columns),
            };
            with(inputs, outputs, (1, 0), storage, WeightFormat::F32, |m| {
                check_f32(&m, 0..inputs, 0..outputs, &value);
                check_f32(&m, inputs / 3..inputs / 2, 1..outputs - 1, &value);
                check_f32(&m, 1..inputs - 1, outputs / 3..outputs / 2, &value);
            });
        }
    }
}

#[test]
fn matrix_reads_out_of_range_are_errors() {
    with(4, 6, (1, 0), Storage::OutputRows, WeightFormat::F32, |m| {
        let mut scratch = Vec::new();
        let mut out = [0.0; 24];
        let mut read = |i: Range<u32>, o: Range<u32>, stride, at| {
            m.read_f32((i, o), &mut out, stride, at, &mut scratch)
        };
        assert!(read(0..4, 0..6, 6, 0).is_ok());
        assert!(matches!(read(0..5, 0..6, 6, 0), Err(ModelError::Range { what: "inputs", .. })));
        assert!(matches!(read(0..4, 5..7, 6, 0), Err(ModelError::Range { what: "outputs", .. })));
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = read(3..2, 0..6, 6, 0);
        assert!(matches!(backwards, Err(ModelError::Range { .. })));
        assert!(matches!(read(0..4, 0..6, 5, 0), Err(ModelError::Area { .. })));
        assert!(matches!(read(0..4, 0..6, 6, 1), Err(ModelError::Area { .. })));
        assert!(matches!(read(0..4, 0..3, 7, 4), Err(ModelError::Area { .. })));
        assert!(matches!(read(0..4, 0..3, usize::MAX, 0), Err(ModelError::Area { .. })));
        assert!(read(2..2, 0..6, 0, 0).is_ok());
        assert!(read(0..3, 0..3, 7, 4).is_ok());
        let mut out = [[0; 2]; 24];
        let raw = m.read_raw((0..4, 0..6), &mut out, 6, 0, &mut scratch);
        assert!(matches!(raw, Err(ModelError::Width { .. })));
    });
}

/// Six outputs of 128 inputs, in four blocks each, whose bytes count up.
fn with_blocks<R>(test: impl FnOnce(MatrixSource<'_>) -> R) -> R {
    let (format, row) = (WeightFormat::Q8_0, 4 * 34);
    let bytes = (0..6 * row).map(|at| (at % 251) as u8).collect();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let text = file(&[("w", "U8", vec![6, row], bytes)]);
    std::fs::write(directory.path().join("model.safetensors"), text).expect("a file");
    let store = Store::open(directory.path()).expect("valid");
    let (tensor, _) = store.listed("w").expect("there");
    test(MatrixSource {
        store: &store,
        name: "w".to_owned(),
        shard: tensor.shard,
        format,
        stored: format,
        storage: Storage::OutputRows,
        offset: tensor.offset,
        pitch: 128,
        height: 6,
        tile: 128,
        first_output: 0,
        paired: 0,
        inputs: 128,
        outputs: 6,
    })
}

#[test]
fn quantisation_blocks_are_read_as_they_are_stored() {
    let of = |outputs: &[usize], blocks: Range<usize>| -> Vec<u8> {
        let row =
            |output: &usize| 4 * 34 * output + 34 * blocks.start..4 * 34 * output + 34 * blocks.end;
        outputs.iter().flat_map(row).map(|at| (at % 251) as u8).collect()
    };
    with_blocks(|mut m| {
        let mut out = Vec::new();
        let mut rows = |m: &MatrixSource<'_>, inputs, outputs| {
            m.read_raw_rows(inputs, outputs, &mut out).expect("in range");
            out.clone()
        };
        assert_eq!(rows(&m, 0..128, 1..4), of(&[1, 2, 3], 0..4));
        // A part of a block is read as the whole block.
        assert_eq!(rows(&m, 40..65, 2..5), of(&[2, 3, 4], 1..3));
        assert_eq!(rows(&m, 31..32, 5..6), of(&[5], 0..1));
        assert!(rows(&m, 32..32, 0..6).is_empty());
        assert!(rows(&m, 0..128, 3..3).is_empty());
        let mut one = vec![0; 2 * 34];
        m.read_raw_blocks(40..65, 3, &mut one).expect("in range");
        assert_eq!(one, of(&[3], 1..3));
        let wrong = m.read_raw_blocks(40..66, 3, &mut one[1..]);
        assert!(matches!(wrong, Err(ModelError::Area { need: 68, have: 67, .. })));
        let beyond = m.read_raw_blocks(40..65, 6, &mut one);
        assert!(matches!(beyond, Err(ModelError::Range { what: "outputs", .. })));
        let raw = m.read_raw((0..1, 0..1), &mut [[0; 2]], 1, 0, &mut Vec::new());
        assert!(matches!(raw, Err(ModelError::Width { .. })));
        m.paired = 1;
        assert_eq!(rows(&m, 0..128, 1..5), of(&[2, 4, 1, 3], 0..4));
        (m.format, m.stored) = (WeightFormat::F16, WeightFormat::F16);
        let raw = m.read_raw_rows(0..128, 0..1, &mut Vec::new());
        assert!(matches!(raw, Err(ModelError::Width { .. })));
    });
}

#[test]
fn reading_a_matrix_beyond_the_end_of_its_file_is_an_error() {
    with(4, 6, (1, 0), Storage::OutputRows, WeightFormat::F32, |mut m| {
        m.offset += 64;
        let read = m.read_f32((0..4, 0..6), &mut [0.0; 24], 6, 0, &mut Vec::new());
        assert!(matches!(read, Err(ModelError::Io { .. })));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_window_of_a_matrix_is_read_exactly(
        (inputs, i) in (1u32..60).prop_flat_map(|n| (Just(n), (0..=n, 0..=n))),
        (outputs, o) in (1u32..60).prop_flat_map(|n| (Just(n), (0..=n, 0..=n))),
        part in (1u32..4).prop_flat_map(|n| (Just(n), 0..n)),
        by_output in any::<bool>(),
        format in prop::sample::select(&WeightFormat::FLOATS[..]),
    ) {
        let storage = if by_output { Storage::OutputRows } else { Storage::InputRows };
        let i = i.0.min(i.1)..i.0.max(i.1);
        let o = o.0.min(o.1)..o.0.max(o.1);
        let shift = outputs * part.1;
        with(inputs, outputs, part, storage, format, |m| {
            prop_assert_eq!((m.rows(), m.columns(), m.format()), (inputs, outputs, format));
            check_f32(&m, i.clone(), o.clone(), &|i, o| match format {
                WeightFormat::F32 => value(i, o + shift),
                WeightFormat::F16 => f16::from_bits(bits(i, o + shift)).to_f32(),
                _ => bf16::from_bits(bits(i, o + shift)).to_f32(),
            });
            if format != WeightFormat::F32 {
                let mut out = vec![[0; 2]; i.len() * o.len()];
                let width = o.len();
                m.read_raw((i.clone(), o.clone()), &mut out, width, 0, &mut Vec::new())
                    .expect("in range");
                let raw = |i| o.clone().map(move |o| bits(i, o + shift).to_le_bytes());
                prop_assert_eq!(out, i.flat_map(raw).collect::<Vec<_>>());
            }
            Ok(())
        })?;
    }
}
