//! Tensors in files of NumPy: `.npy`, and several of them in a `.npz`.

use galaxy_model::onnx::{Array, ElementType};
use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    path::Path,
};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest header that is read.
const MAX_HEADER: usize = 1 << 16;
/// The longest file that is read.
const MAX_BYTES: u64 = 1 << 32;

/// Types of elements by their names in files. Those of one byte have no order of bytes.
const TYPES: [(&str, ElementType); 12] = [
    ("<f4", ElementType::F32),
    ("<f8", ElementType::F64),
    ("<f2", ElementType::F16),
    ("<i8", ElementType::I64),
    ("<i4", ElementType::I32),
    ("<i2", ElementType::I16),
    ("|i1", ElementType::I8),
    ("<u8", ElementType::U64),
    ("<u4", ElementType::U32),
    ("<u2", ElementType::U16),
    ("|u1", ElementType::U8),
    ("|b1", ElementType::Bool),
];

/// Reads the tensor of a `.npy` file. The error is a sentence about what is wrong.
pub fn read(path: &Path) -> Result<Array, String> {
    let open = |error: io::Error| format!("it cannot be read: {error}");
    let mut file = File::open(path).map_err(open)?;
    let length = file.metadata().map_err(open)?.len();
    if length > MAX_BYTES {
        return Err(format!("it has {length} bytes, and {MAX_BYTES} are read at most"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(open)?;
    parse(&bytes)
}

/// The tensor of the bytes of a `.npy` file.
fn parse(bytes: &[u8]) -> Result<Array, String> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("it is no .npy file of NumPy")?;
    let (length, rest) = match rest {
        [1, _, a, b, rest @ ..] => (usize::from(u16::from_le_bytes([*a, *b])), rest),
        [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
        _ => return Err("its version is not known: 1, 2 and 3 are".to_owned()),
    };
    if length > rest.len().min(MAX_HEADER) {
        return Err("it is cut short, or its header is longer than any".to_owned());
    }
    let (header, values) = rest.split_at(length);
    let header = std::str::from_utf8(header).map_err(|_| "its header is no text")?;
    let field = |name: &str| {
        let (_, after) = header.split_once(&format!("'{name}':"))?;
        Some(after.trim_start())
    };
    let kind = field("descr").and_then(|after| after.strip_prefix('\'')?.split('\'').next());
    let kind = kind.ok_or("its header names no type of elements")?;
    let known = TYPES.iter().find(|(name, _)| *name == kind);
    let Some((_, element)) = known else {
        let names: Vec<&str> = TYPES.iter().map(|(name, _)| *name).collect();
        return Err(format!("its elements are of type {kind:?}; known are {}", names.join(", ")));
    };
    if field("fortran_order").is_none_or(|after| !after.starts_with("False")) {
        return Err(
            "its axes are in the order of Fortran: save numpy.ascontiguousarray of it".to_owned()
        );
    }
    let shape = field("shape").and_then(|after| after.strip_prefix('(')?.split_once(')'));
    let (shape, _) = shape.ok_or("its header has no shape")?;
    let sides = shape.split(',').map(str::trim).filter(|side| !side.is_empty());
    let dims = sides.map(str::parse::<u64>).collect::<Result<Vec<_>, _>>();
    let dims = dims.map_err(|_| format!("its shape ({shape}) is none"))?;
    let count = dims.iter().try_fold(1u64, |all, side| all.checked_mul(*side));
    let want = count.and_then(|count| count.checked_mul(element.bytes()));
    if want != Some(values.len() as u64) {
        return Err(format!("{} bytes are no ({shape}) values of type {kind}", values.len()));
    }
    Ok(Array::of_bytes(dims, *element, values))
}

/// Writes a tensor of floats as a `.npy` file.
fn write(dims: &[u64], values: &[f32], to: &mut dyn Write) -> io::Result<()> {
    let sides: String = dims.iter().map(|side| format!("{side}, ")).collect();
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sides}), }}");
    // With what stands before it the header is a multiple of 64 bytes, and ends with a new line.
    let length = (MAGIC.len() + 4 + header.len() + 1).next_multiple_of(64) - MAGIC.len() - 4;
    while header.len() + 1 < length {
        header.push(' ');
    }
    header.push('\n');
    to.write_all(MAGIC)?;
    to.write_all(&[1, 0])?;
    to.write_all(&(header.len() as u16).to_le_bytes())?;
    to.write_all(header.as_bytes())?;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    to.write_all(&bytes)
}

/// Writes tensors of floats as a `.npz` file, each by its name.
pub fn write_all<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a [u64], &'a [f32])>,
    to: impl Write + Seek,
) -> io::Result<()> {
    let mut zip = ZipWriter::new(to);
    let options =
        SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(true);
    for (name, dims, values) in tensors {
        zip.start_file(format!("{name}.npy"), options)?;
        write(dims, values, &mut zip)?;
    }
    zip.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_model::onnx::Values;

    fn written(dims: &[u64], values: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(dims, values, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn written_tensors_are_read_back_and_headers_end_at_a_line() {
        for (dims, values) in
            [(vec![], vec![1.5]), (vec![3], vec![1.0, 2.0, 3.0]), (vec![2, 0], vec![])]
        {
            let bytes = written(&dims, &values);
            assert_eq!((bytes.len() - 4 * values.len()) % 64, 0);
            let array = parse(&bytes).unwrap();
            let want: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
            assert_eq!((array.dims, array.values), (dims, Values::Floats(want)));
        }
    }

    #[test]
    fn broken_files_are_refused_with_a_reason() {
        let good = written(&[2, 3], &[0.0; 6]);
        for cut in 0..good.len() {
            assert!(parse(&good[..cut]).is_err(), "{cut}");
        }
        let change = |from: &str, to: &str| {
            let text = String::from_utf8_lossy(&good[10..128]).replace(from, to);
            let mut bytes = good[..10].to_vec();
            bytes.extend(text.as_bytes().iter().take(118));
            bytes.extend(&good[128..]);
            parse(&bytes).unwrap_err()
        };
        assert!(change("<f4", ">f4").contains(">f4"));
        assert!(change("False", "True ").contains("Fortran"));
        assert!(change("(2, 3", "(2, 9").contains("no (2, 9"));
        assert!(change("(2, 3", "(-2,3").contains("none"));
    }
}
