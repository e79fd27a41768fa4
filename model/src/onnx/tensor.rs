//! Tensors in ONNX files: what their elements are, and where they lie.

use super::wire::{Field, Wire};
use crate::positioned::Problem;
use half::{bf16, f16};
use std::{ops::Range, path::PathBuf, sync::Arc};

/// The most axes of a tensor.
pub(super) const MAX_AXES: usize = 16;

/// The type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ElementType {
    /// A 32-bit float.
    F32,
    /// A 64-bit float.
    F64,
    /// An IEEE 16-bit float.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
    /// A signed whole number of 8 bits.
    I8,
    /// A signed whole number of 16 bits.
    I16,
    /// A signed whole number of 32 bits.
    I32,
    /// A signed whole number of 64 bits.
    I64,
    /// A whole number of 8 bits.
    U8,
    /// A whole number of 16 bits.
    U16,
    /// A whole number of 32 bits.
    U32,
    /// A whole number of 64 bits.
    U64,
    /// True or false, a byte each.
    Bool,
    /// Something else, by its number in files.
    Other(i32),
}

/// The types that are read: number in files, type, name, bytes.
const TYPES: [(i32, ElementType, &str, u64); 13] = [
    (1, ElementType::F32, "float", 4),
    (2, ElementType::U8, "uint8", 1),
    (3, ElementType::I8, "int8", 1),
    (4, ElementType::U16, "uint16", 2),
    (5, ElementType::I16, "int16", 2),
    (6, ElementType::I32, "int32", 4),
    (7, ElementType::I64, "int64", 8),
    (9, ElementType::Bool, "bool", 1),
    (10, ElementType::F16, "float16", 2),
    (11, ElementType::F64, "double", 8),
    (12, ElementType::U32, "uint32", 4),
    (13, ElementType::U64, "uint64", 8),
    (16, ElementType::Bf16, "bfloat16", 2),
];

/// The names of types that are not read, for messages.
const NOT_READ: [(i32, &str); 10] = [
    (0, "undefined"),
    (8, "string"),
    (14, "complex64"),
    (15, "complex128"),
    (17, "float8e4m3fn"),
    (18, "float8e4m3fnuz"),
    (19, "float8e5m2"),
    (20, "float8e5m2fnuz"),
    (21, "uint4"),
    (22, "int4"),
];

impl ElementType {
    /// The type of this number in files.
    pub(super) fn of(number: i64) -> Self {
        let number = i32::try_from(number).unwrap_or(i32::MAX);
        let known = TYPES.iter().find(|(n, ..)| *n == number);
        known.map_or(Self::Other(number), |(_, element, ..)| *element)
    }

    /// The number of the type in files.
    pub(super) fn number(self) -> i32 {
        if let Self::Other(number) = self {
            return number;
        }
        TYPES.iter().find(|(_, element, ..)| *element == self).map_or(0, |(number, ..)| *number)
    }

    /// The name of the type in ONNX, for messages.
    pub fn name(self) -> String {
        if let Self::Other(number) = self {
            let known = NOT_READ.iter().find(|(n, _)| *n == number);
            return known.map_or(format!("type {number}"), |(_, name)| (*name).to_owned());
        }
        let known = TYPES.iter().find(|(_, element, ..)| *element == self);
        known.map_or(String::new(), |(_, _, name, _)| (*name).to_owned())
    }

    /// Bytes of an element; 0 of a type that is not read.
    pub fn bytes(self) -> u64 {
        TYPES.iter().find(|(_, element, ..)| *element == self).map_or(0, |(.., bytes)| *bytes)
    }

    /// Whether elements are floats.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }

    /// Widens bytes of this type to numbers. Whole numbers above 2^53 are not exact.
    pub(super) fn floats(self, bytes: &[u8]) -> Vec<f64> {
        let size = (self.bytes() as usize).max(1);
        bytes.chunks_exact(size).map(|bytes| self.float(bytes)).collect()
    }

    fn float(self, bytes: &[u8]) -> f64 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
            (Self::F64, bytes) => bytes.try_into().map_or(0.0, f64::from_le_bytes),
            (Self::F16, &[a, b]) => f16::from_le_bytes([a, b]).into(),
            (Self::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).into(),
            _ => self.whole(bytes) as f64,
        }
    }

    /// Widens bytes of this type to whole numbers; floats are cut at their point.
    pub(super) fn wholes(self, bytes: &[u8]) -> Vec<i64> {
        let size = (self.bytes() as usize).max(1);
        bytes.chunks_exact(size).map(|bytes| self.whole(bytes)).collect()
    }

    fn whole(self, bytes: &[u8]) -> i64 {
        match (self, bytes) {
            (Self::U8, &[a]) => a.into(),
            (Self::Bool, &[a]) => (a != 0).into(),
            (Self::I8, &[a]) => (a as i8).into(),
            (Self::U16, &[a, b]) => u16::from_le_bytes([a, b]).into(),
            (Self::I16, &[a, b]) => i16::from_le_bytes([a, b]).into(),
            (Self::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]).into(),
            (Self::I32, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).into(),
            (Self::I64 | Self::U64, bytes) => bytes.try_into().map_or(0, i64::from_le_bytes),
            _ => self.float(bytes) as i64,
        }
    }
}

/// Where the elements of a tensor lie, as little-endian bytes row after row.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Storage {
    /// A range of the model's file.
    Within(Range<u64>),
    /// A range of another file, by its name beside the model's; to the end of that file without a length.
    External { name: String, offset: u64, length: Option<u64> },
    /// Here, since the file has them in another form.
    Here(Arc<[u8]>),
}

/// A tensor of an ONNX file.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredTensor {
    /// Its name; empty inside an attribute.
    pub name: String,
    /// Its shape, the slowest axis first.
    pub dims: Vec<u64>,
    /// The type of its elements.
    pub element: ElementType,
    pub(super) storage: Storage,
}

impl StoredTensor {
    /// How many elements it has.
    pub fn count(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Whether its elements lie in another file.
    pub(super) fn is_external(&self) -> bool {
        matches!(self.storage, Storage::External { .. })
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.count() * self.element.bytes()
    }
}

/// How many elements a tensor of this shape has; none where that is more than can be counted, or stored.
pub(super) fn count(dims: &[u64]) -> Option<u64> {
    let all = dims.iter().try_fold(1u64, |all, side| all.checked_mul(*side))?;
    (all < 1 << 48).then_some(all)
}

/// The fields of a tensor's message, as they come.
#[derive(Default)]
struct Fields {
    name: String,
    dims: Vec<i64>,
    element: i64,
    raw: Option<Range<u64>>,
    /// Ranges of floats or doubles one behind another.
    floats: Vec<Range<u64>>,
    wholes: Vec<u64>,
    texts: bool,
    is_external: bool,
    is_segment: bool,
    location: Option<String>,
    offset: u64,
    length: Option<u64>,
    /// Floats that stand by themselves.
    single: Vec<u8>,
}

/// Reads a tensor's message.
pub(super) fn read(wire: &mut Wire<'_>, range: Range<u64>) -> Result<StoredTensor, Problem> {
    let mut of = Fields::default();
    wire.fields(range, |wire, number, field| {
        match (number, &field) {
            (1, Field::Bytes(range)) => {
                let dims = &mut of.dims;
                wire.varints(range.clone(), |n| dims.push(n as i64))?;
            }
            (1, field) => of.dims.push(field.whole()?),
            (2, field) => of.element = field.whole()?,
            (3, _) => of.is_segment = true,
            (4 | 10, Field::Bytes(range)) => of.floats.push(range.clone()),
            (4, Field::Fixed32(bytes)) => of.single.extend(bytes),
            (10, Field::Fixed64(bytes)) => of.single.extend(bytes),
            (5 | 7 | 11, Field::Bytes(range)) => {
                let wholes = &mut of.wholes;
                wire.varints(range.clone(), |n| wholes.push(n))?;
            }
            (5 | 7 | 11, field) => of.wholes.push(field.whole()? as u64),
            (6, _) => of.texts = true,
            (8, field) => of.name = wire.text(field)?,
            (9, field) => of.raw = Some(field.place()?),
            (13, field) => external(wire, field.place()?, &mut of)?,
            (14, field) => of.is_external = field.whole()? == 1,
            _ => {}
        }
        if of.dims.len() > MAX_AXES {
            return Err(format!("a tensor has more than {MAX_AXES} axes").into());
        }
        Ok(())
    })?;
    finished(wire, of)
}

/// Reads an entry about external data: a key and its value.
fn external(wire: &mut Wire<'_>, range: Range<u64>, of: &mut Fields) -> Result<(), Problem> {
    let (mut key, mut value) = (String::new(), String::new());
    wire.fields(range, |wire, number, field| {
        match number {
            1 => key = wire.text(&field)?,
            2 => value = wire.text(&field)?,
            _ => {}
        }
        Ok(())
    })?;
    let number = || {
        let wrong = || format!("external data has the {key} {value:?}, which is no number");
        value.parse::<u64>().map_err(|_| Problem::from(wrong()))
    };
    match key.as_str() {
        "location" => of.location = Some(value),
        "offset" => of.offset = number()?,
        "length" => of.length = Some(number()?),
        // A checksum, and names of page sizes.
        _ => {}
    }
    Ok(())
}

/// The tensor of these fields.
fn finished(wire: &mut Wire<'_>, of: Fields) -> Result<StoredTensor, Problem> {
    let element = ElementType::of(of.element);
    let shown =
        if of.name.is_empty() { "a tensor".to_owned() } else { format!("tensor {:?}", of.name) };
    let dims: Option<Vec<u64>> = of.dims.iter().map(|n| u64::try_from(*n).ok()).collect();
    let Some((dims, all)) = dims.and_then(|dims| count(&dims).map(|all| (dims, all))) else {
        return Err(format!("{shown} has the impossible shape {:?}", of.dims).into());
    };
    if of.is_segment {
        return Err(format!("{shown} is stored in segments, which are not read").into());
    }
    // What is of no type that is read is refused where it is needed.
    if of.texts || element.bytes() == 0 {
        let storage = Storage::Here(Vec::new().into());
        return Ok(StoredTensor { name: of.name, dims, element, storage });
    }
    let want = all * element.bytes();
    let storage = if of.is_external {
        let Some(name) = of.location else {
            return Err(format!("{shown} lies in another file, whose name is missing").into());
        };
        Storage::External { name, offset: of.offset, length: of.length }
    } else if let Some(raw) = of.raw {
        Storage::Within(raw)
    } else if let ([one], true) = (of.floats.as_slice(), of.single.is_empty()) {
        Storage::Within(one.clone())
    } else if !of.wholes.is_empty() {
        Storage::Here(narrow(element, &of.wholes).into())
    } else {
        let mut bytes = Vec::new();
        for range in of.floats {
            bytes.extend(wire.bytes(range)?);
        }
        bytes.extend(of.single);
        Storage::Here(bytes.into())
    };
    let have = match &storage {
        Storage::Within(range) => range.end - range.start,
        Storage::Here(bytes) => bytes.len() as u64,
        Storage::External { length, .. } => length.unwrap_or(want),
    };
    if have != want {
        let name = element.name();
        return Err(format!(
            "{shown} of {dims:?} {name} values takes {want} bytes, and has {have}"
        )
        .into());
    }
    Ok(StoredTensor { name: of.name, dims, element, storage })
}

/// Numbers that were stored one by one, as bytes of their type. Floats of 16 bits are stored by their bits.
fn narrow(element: ElementType, numbers: &[u64]) -> Vec<u8> {
    let size = element.bytes() as usize;
    numbers.iter().flat_map(|n| n.to_le_bytes().into_iter().take(size)).collect()
}

/// The file beside `model` that holds external data.
///
/// # Errors
/// When its name leads out of the model's directory.
pub(super) fn beside(model: &std::path::Path, name: &str) -> Result<PathBuf, String> {
    let path = std::path::Path::new(name);
    let inside = path
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_) | std::path::Component::CurDir));
    if !inside || name.is_empty() {
        return Err(format!(
            "external data in {name:?}, which is not inside the model's directory"
        ));
    }
    Ok(model.parent().unwrap_or(std::path::Path::new("")).join(path))
}
