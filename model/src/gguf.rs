//! GGUF files: weights, the description of the model and its tokenizer in one file. Its header is parsed as a whole,
//! and tensors are then read by byte range.

mod config;
mod dense;
mod encoder;
mod names;
mod strips;
#[cfg(test)]
mod tests;
mod tokenizer;
mod view;
mod write;

use config::STRETCHES;
pub(crate) use dense::{is_dense, read_dense};
pub(crate) use names::renamed;
pub(crate) use view::CheckpointView;

use crate::{
    error::{HeaderProblem, ModelError},
    positioned::{At, Problem},
    widen::widen,
};
use galaxy_common::WeightFormat;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io::{BufReader, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The first bytes of every GGUF file.
const MAGIC: &[u8; 4] = b"GGUF";
/// The largest header that is read. It holds the vocabulary; no real one is nearly as large.
const MAX_HEAD_BYTES: u64 = 256 << 20;
/// The most tensors that a header may list.
const MAX_TENSORS: u64 = 1 << 20;
const MAX_FIELDS: u64 = 1 << 16;
const MAX_SIDES: u32 = 4;
/// The most files that a model may be split over.
const MAX_PARTS: u32 = 1024;
/// The most values of a list in the metadata: a vocabulary, or its merges.
const MAX_LIST: u64 = 1 << 22;
/// How deep lists may be nested in lists.
const MAX_DEPTH: u32 = 4;
/// The most bytes of a tensor of frequency divisors.
const MAX_DIVISORS_BYTES: u64 = 1 << 18;
/// The alignment of tensors where a file gives none, in bytes.
const ALIGNMENT: u64 = 32;

/// A value of a file's metadata.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum MetadataValue {
    Whole(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    List(Vec<MetadataValue>),
}

/// A tensor as a file's header lists it.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    /// The shape, the slowest dimension first, as everywhere else here; the file has it the other way round.
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: GgmlType,
    /// Where the tensor begins, in bytes from the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Listed {
    /// Where the tensor ends, in bytes from the start of the file.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// The type of a tensor's values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GgmlType {
    Known(WeightFormat),
    /// A type that is not read, by its number in files.
    Unknown(u32),
}

impl GgmlType {
    fn of(number: u32) -> Self {
        let known = FORMATS.iter().find(|(n, _)| *n == number);
        known.map_or(Self::Unknown(number), |(_, format)| Self::Known(*format))
    }

    /// The name of the type, for messages.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Known(format) => format.name().to_uppercase(),
            Self::Unknown(number) => match KNOWN_ELSEWHERE.iter().find(|(n, _)| *n == number) {
                Some((_, name)) => (*name).to_owned(),
                None => format!("GGUF type {number}"),
            },
        }
    }

    /// Bytes of a tensor of this shape, the slowest dimension first; `None` where the rows are no whole blocks, or the
    /// type is not known.
    pub(crate) fn bytes_of(self, shape: &[u64]) -> Option<u64> {
        let (row, sides) = shape.split_last()?;
        let rows = sides.iter().try_fold(1u64, |rows, side| rows.checked_mul(*side))?;
        self.bytes(*row, rows)
    }

    /// Bytes of `rows` rows of `row` values; `None` where the rows are no whole blocks, or the type is not known.
    fn bytes(self, row: u64, rows: u64) -> Option<u64> {
        let Self::Known(format) = self else { return None };
        let (values, bytes) = match format.block() {
            Some(block) => (block.values.into(), block.bytes.into()),
            None => (1, format.bytes(1, 1)),
        };
        if !row.is_multiple_of(values) {
            return None;
        }
        (row / values).checked_mul(bytes)?.checked_mul(rows)
    }
}

/// The formats that are read, by their numbers in files.
const FORMATS: [(u32, WeightFormat); 14] = [
    (0, WeightFormat::F32),
    (1, WeightFormat::F16),
    (2, WeightFormat::Q4_0),
    (3, WeightFormat::Q4_1),
    (6, WeightFormat::Q5_0),
    (7, WeightFormat::Q5_1),
    (8, WeightFormat::Q8_0),
    (12, WeightFormat::Q4K),
    (13, WeightFormat::Q5K),
    (14, WeightFormat::Q6K),
    (20, WeightFormat::Iq4Nl),
    (23, WeightFormat::Iq4Xs),
    (30, WeightFormat::Bf16),
    (39, WeightFormat::Mxfp4),
];

/// The names of types that are not read, for messages.
const KNOWN_ELSEWHERE: [(u32, &str); 16] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (26, "I32"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
];

/// The header of a GGUF file.
#[derive(Debug)]
pub(crate) struct Gguf {
    fields: BTreeMap<String, MetadataValue>,
    pub(crate) tensors: Vec<Listed>,
    /// The number of rows of each tensor, by its name in the file. The first part of a split model has those of all
    /// parts.
    rows: HashMap<String, u64>,
    /// The frequency divisors of rotary positions, by the names of their tensors: in the first part, once they were
    /// read.
    divisors: BTreeMap<String, Vec<f32>>,
    /// The dense layers behind the pooling: in the first part, once they were read.
    dense: Vec<dense::DenseLayer>,
}

impl Gguf {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// When the file is no GGUF file, or its header is damaged.
    pub(crate) fn read(path: &Path, file: &File) -> Result<Self, ModelError> {
        let wrong = |text: String| ModelError::Header {
            path: path.to_owned(),
            problem: HeaderProblem::Gguf { text },
        };
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let size = file.metadata().map_err(io)?.len();
        let mut head = Head {
            inner: BufReader::with_capacity(1 << 16, At { file, at: 0 }),
            read: 0,
            limit: size.min(MAX_HEAD_BYTES),
        };
        let gguf = head.gguf().map_err(|problem| match problem {
            Problem::Io(source) => io(source),
            Problem::Text(text) => wrong(text),
        })?;
        gguf.check(size).map_err(wrong)?;
        Ok(gguf)
    }

    /// Checks that tensors have different names, do not overlap, and end within a file of `size` bytes.
    fn check(&self, size: u64) -> Result<(), String> {
        let mut names = HashSet::new();
        if let Some(twice) = self.tensors.iter().find(|t| !names.insert(t.name.as_str())) {
            return Err(format!("tensor {} stands twice", twice.name));
        }
        let mut places: Vec<&Listed> = self.tensors.iter().collect();
        places.sort_by_key(|tensor| tensor.offset);
        for pair in places.windows(2) {
            if pair[0].end() > pair[1].offset {
                let (one, other) = (&pair[0].name, &pair[1].name);
                return Err(format!("tensors {one} and {other} lie over one another"));
            }
        }
        for tensor in places {
            if tensor.end() > size {
                let (name, end) = (&tensor.name, tensor.end());
                return Err(format!(
                    "tensor {name} would end at byte {end}, and the file has {size}: it was cut short"
                ));
            }
        }
        Ok(())
    }

    /// A text of the metadata, by the name of its field; `None` where it is absent or no text.
    pub(crate) fn text(&self, field: &str) -> Option<&str> {
        match self.fields.get(field)? {
            MetadataValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number of the metadata; `None` where it is absent, negative or no whole number.
    pub(crate) fn whole(&self, field: &str) -> Option<u64> {
        match self.fields.get(field)? {
            MetadataValue::Whole(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// A number of the metadata, whole or not.
    pub(crate) fn number(&self, field: &str) -> Option<f64> {
        match self.fields.get(field)? {
            MetadataValue::Whole(number) => Some(*number as f64),
            MetadataValue::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// A boolean of the metadata.
    pub(crate) fn flag(&self, field: &str) -> Option<bool> {
        match self.fields.get(field)? {
            MetadataValue::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    /// A list of the metadata.
    pub(crate) fn list(&self, field: &str) -> Option<&[MetadataValue]> {
        match self.fields.get(field)? {
            MetadataValue::List(list) => Some(list),
            _ => None,
        }
    }
}

struct Head<'a> {
    inner: BufReader<At<'a>>,
    read: u64,
    limit: u64,
}

impl Head<'_> {
    fn gguf(&mut self) -> Result<Gguf, Problem> {
        let magic: [u8; 4] = self.array()?;
        if magic != *MAGIC {
            return Err("it does not begin with GGUF".to_owned().into());
        }
        let version = self.u32()?;
        if !(2..=3).contains(&version) {
            let hint =
                if version.swap_bytes() == 3 { " (it is of a big-endian machine)" } else { "" };
            return Err(format!("version {version}{hint} is not known: 2 and 3 are").into());
        }
        let (tensors, pairs) = (self.u64()?, self.u64()?);
        for (what, count, most) in
            [("tensors", tensors, MAX_TENSORS), ("fields", pairs, MAX_FIELDS)]
        {
            if count > most {
                return Err(
                    format!("it says that it has {count} {what}, and {most} are read").into()
                );
            }
        }
        let mut fields = BTreeMap::new();
        for _ in 0..pairs {
            let name = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            if fields.contains_key(&name) {
                return Err(format!("field {name} stands twice").into());
            }
            fields.insert(name, value);
        }
        let mut listed = Vec::new();
        for _ in 0..tensors {
            listed.push(self.tensor()?);
        }
        let alignment = match fields.get("general.alignment") {
            None => ALIGNMENT,
            Some(MetadataValue::Whole(n @ 1..=0x10_0000)) if (*n as u64).is_power_of_two() => {
                *n as u64
            }
            Some(other) => return Err(format!("general.alignment is {other:?}").into()),
        };
        let data = self.read.next_multiple_of(alignment);
        for tensor in &mut listed {
            if !tensor.offset.is_multiple_of(alignment) {
                return Err(format!("tensor {} begins at an odd place", tensor.name).into());
            }
            tensor.offset = data.saturating_add(tensor.offset);
        }
        let rows =
            |tensor: &Listed| (tensor.name.clone(), tensor.shape.first().copied().unwrap_or(1));
        let rows = listed.iter().map(rows).collect();
        let (divisors, dense) = (BTreeMap::new(), Vec::new());
        Ok(Gguf { fields, tensors: listed, rows, divisors, dense })
    }

    fn tensor(&mut self) -> Result<Listed, Problem> {
        let name = self.string()?;
        let sides = self.u32()?;
        if sides > MAX_SIDES {
            return Err(format!("tensor {name} has {sides} sides").into());
        }
        let mut shape = Vec::new();
        for _ in 0..sides {
            shape.push(self.u64()?);
        }
        let (kind, offset) = (GgmlType::of(self.u32()?), self.u64()?);
        let row = shape.first().copied().unwrap_or(1);
        let rows = shape.iter().skip(1).try_fold(1u64, |n, &side| n.checked_mul(side));
        let bytes = match (kind, rows.and_then(|rows| kind.bytes(row, rows))) {
            (_, Some(bytes)) => bytes,
            // An unknown type is refused when the tensor is needed.
            (GgmlType::Unknown(_), None) => 0,
            (kind, None) => {
                let kind = kind.name();
                return Err(format!("tensor {name} of {shape:?} values cannot be {kind}").into());
            }
        };
        shape.reverse();
        Ok(Listed { name, shape, kind, offset, bytes })
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<MetadataValue, Problem> {
        Ok(match kind {
            0 => MetadataValue::Whole(u8::from_le_bytes(self.array()?).into()),
            1 => MetadataValue::Whole(i8::from_le_bytes(self.array()?).into()),
            2 => MetadataValue::Whole(u16::from_le_bytes(self.array()?).into()),
            3 => MetadataValue::Whole(i16::from_le_bytes(self.array()?).into()),
            4 => MetadataValue::Whole(self.u32()?.into()),
            5 => MetadataValue::Whole(i32::from_le_bytes(self.array()?).into()),
            6 => MetadataValue::Float(f32::from_le_bytes(self.array()?).into()),
            7 => MetadataValue::Flag(u8::from_le_bytes(self.array()?) != 0),
            8 => MetadataValue::Text(self.string()?),
            9 if depth < MAX_DEPTH => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // Each value takes at least a byte.
                if count > (self.limit - self.read).min(MAX_LIST) {
                    return Err(format!("a list of {count} values goes beyond the file: it was cut short, or is longer than any").into());
                }
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(self.value(kind, depth + 1)?);
                }
                MetadataValue::List(list)
            }
            10 => MetadataValue::Whole(self.u64()?.into()),
            11 => MetadataValue::Whole(i64::from_le_bytes(self.array()?).into()),
            12 => MetadataValue::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(format!("a field has type {kind}, which is not known").into()),
        })
    }

    fn string(&mut self) -> Result<String, Problem> {
        let length = self.u64()?;
        if length > self.limit - self.read {
            return Err(
                format!("a text of {length} bytes goes beyond the file: it was cut short").into()
            );
        }
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| "a text is not UTF-8".to_owned().into())
    }

    fn u32(&mut self) -> Result<u32, Problem> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Problem> {
        self.array().map(u64::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Problem> {
        let after = self.read + bytes.len() as u64;
        if after > self.limit {
            return Err("its head ends too early: the file was cut short".to_owned().into());
        }
        self.inner.read_exact(bytes).map_err(Problem::Io)?;
        self.read = after;
        Ok(())
    }
}

/// The tensor of the divisors of rotary frequencies.
const DIVISORS: &str = "rope_freqs.weight";

/// Whether a tensor holds divisors of rotary frequencies.
pub(crate) fn is_of_positions(name: &str) -> bool {
    name == DIVISORS || STRETCHES.contains(&name)
}

/// The GGUF file that a path stands for, if it stands for one: the file itself, or the only one in a directory that is
/// no checkpoint. For a split model, this is its first part.
pub fn meant(path: &Path) -> Option<PathBuf> {
    let ends = |path: &Path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if path.is_file() {
        let first = |(name, _, count)| format!("{name}-00001-of-{count:05}.gguf");
        return ends(path).then(|| match numbered(path).map(first) {
            Some(first) => path.with_file_name(first),
            None => path.to_owned(),
        });
    }
    if ["config.json", "modules.json"].iter().any(|file| path.join(file).exists()) {
        return None;
    }
    let files = std::fs::read_dir(path).ok()?.flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = files.filter(|file| ends(file) && file.is_file()).collect();
    files.sort();
    let first = files.first()?.clone();
    let (count, of_first) = (files.len(), numbered(&first).map_or(1, |(.., count)| count));
    (count == of_first as usize).then_some(first)
}

/// The parts of the name of a split model's file: the common beginning, the file's number, and how many there are.
fn numbered(path: &Path) -> Option<(String, u32, u32)> {
    let stem = path.file_stem()?.to_str()?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| if text.len() == 5 { text.parse().ok() } else { None };
    Some((name.to_owned(), digits(number)?, digits(count)?))
}

/// Opens a GGUF file, and all other parts where the model is split, and reads their headers.
///
/// # Errors
/// When a part is missing or cannot be read.
pub(crate) fn parts(path: &Path) -> Result<Vec<(PathBuf, File, Gguf)>, ModelError> {
    let open = |path: PathBuf| {
        let file = File::open(&path);
        let file = file.map_err(|source| ModelError::Io { path: path.clone(), source })?;
        let gguf = Gguf::read(&path, &file)?;
        Ok::<_, ModelError>((path, file, gguf))
    };
    let (name, count) = match numbered(path) {
        Some((name, _, count)) if (1..=MAX_PARTS).contains(&count) => (name, count),
        _ => return Ok(vec![open(path.to_owned())?]),
    };
    let mut parts = Vec::new();
    for number in 1..=count {
        let part = path.with_file_name(format!("{name}-{number:05}-of-{count:05}.gguf"));
        if !part.is_file() {
            let wanted = part.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = path.parent().unwrap_or(path).to_owned();
            return Err(ModelError::NotThere { path, wanted });
        }
        parts.push(open(part)?);
    }
    let rows: Vec<_> = parts.iter().flat_map(|(.., gguf)| gguf.rows.clone()).collect();
    parts[0].2.rows.extend(rows);
    Ok(parts)
}

/// Reads the divisors of rotary frequencies into the header of the first part; a checkpoint has them in its config.
///
/// # Errors
/// When the file cannot be read, or has divisors that no model has.
pub(crate) fn read_divisors(parts: &mut [(PathBuf, File, Gguf)]) -> Result<(), ModelError> {
    let mut found = BTreeMap::new();
    for (path, file, gguf) in parts.iter() {
        for tensor in gguf.tensors.iter().filter(|tensor| is_of_positions(&tensor.name)) {
            let wrong = |why: &str| ModelError::Gguf {
                path: path.clone(),
                why: format!("{} {why}", tensor.name),
            };
            let GgmlType::Known(format) = tensor.kind else {
                return Err(wrong("is of no known type"));
            };
            let fits = tensor.shape.len() == 1 && tensor.bytes <= MAX_DIVISORS_BYTES;
            if !fits || format.block().is_some() {
                return Err(wrong("is no short list of numbers"));
            }
            let mut bytes = vec![0; tensor.bytes as usize];
            let read = file.read_exact_at(&mut bytes, tensor.offset);
            read.map_err(|source| ModelError::Io { path: path.clone(), source })?;
            let mut divisors = vec![0.0; tensor.shape[0] as usize];
            widen(format, &bytes, &mut divisors);
            if divisors.iter().any(|by| !(1e-6..=1e6).contains(by)) {
                return Err(wrong("divides by what no model has"));
            }
            found.insert(tensor.name.clone(), divisors);
        }
    }
    if let Some((.., first)) = parts.first_mut() {
        first.divisors = found;
    }
    Ok(())
}
