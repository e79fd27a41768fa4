//! The files of weights of a model: their checked headers, and positioned reads.

mod combine;

use crate::{
    compressed::CompressedMatrix,
    config,
    dtype::{OF_GGUF, bits, format, in_blocks, of_gguf},
    error::{HeaderProblem, ModelError},
    gguf::{GgmlType, Gguf, renamed},
    recognise,
    small_file::read_bounded,
};
use galaxy_common::WeightFormat;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{IgnoredAny, MapAccess, Visitor},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The safetensors format's own limit for a header, in bytes.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The most shards that are opened, each of which is an open file; far above any model that is real.
pub(crate) const MAX_SHARDS: usize = 1024;

/// An open file of weights.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    name: String,
    pub(crate) file: File,
    bytes: u64,
}

/// A tensor: its type and shape, and where its bytes are.
pub(crate) struct Tensor {
    pub(crate) shard: usize,
    dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Where the tensor begins, in bytes from the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Bytes of a row in one tile, where tiles lie one after another; 0 where whole rows do.
    pub(crate) tile: u64,
    /// The format of the values, if it is known.
    format: Option<WeightFormat>,
    /// Heads whose rows are stored in pairs, one of the first half and one of the second in turns; 0 where rows are
    /// stored in order.
    pub(crate) paired: u64,
}

/// Waits for the data of a model that arrives in pieces.
pub trait Arrivals: Send + Sync {
    /// Waits until these bytes of the data have arrived and were found right.
    ///
    /// # Errors
    /// A sentence about why they do not arrive.
    fn wait(&self, bytes: Range<u64>) -> Result<(), String>;
}

/// Says whether these bytes of a shard may be read, or why not.
pub(crate) type Admit = dyn Fn(&Store, usize, Range<u64>) -> Result<(), ModelError> + Send + Sync;

/// All tensors of a model, and the files that hold them.
pub(crate) struct Store {
    directory: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, Tensor>,
    /// Matrices that stand in several tensors: each is read as a file of its own, behind those of `shards`.
    compressed: Vec<CompressedMatrix>,
    /// Waits for data, in a model that arrives in pieces. Its only shard is the data.
    arrivals: Option<Arc<dyn Arrivals>>,
    /// Is asked about bytes before they are read, if a complete model is compared with its manifest.
    admit: OnceLock<Box<Admit>>,
}

impl Store {
    /// Opens `model.safetensors`, or the shards of `model.safetensors.index.json`.
    pub(crate) fn open(directory: &Path) -> Result<Self, ModelError> {
        let mut store = Self {
            directory: directory.to_owned(),
            shards: Vec::new(),
            tensors: HashMap::new(),
            compressed: Vec::new(),
            arrivals: None,
            admit: OnceLock::new(),
        };
        if directory.join("model.safetensors").is_file() {
            store.add("model.safetensors")?;
            return Ok(store);
        }
        let index_path = directory.join("model.safetensors.index.json");
        if !index_path.is_file() {
            return Err(recognise::directory(directory, "model.safetensors"));
        }
        let bytes = read_bounded(&index_path, MAX_HEADER_BYTES)?;
        let index: Index = config::parse(&index_path, &bytes)?;
        let names: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        if names.len() > MAX_SHARDS {
            return Err(ModelError::Field {
                path: index_path,
                field: "weight_map".to_owned(),
                problem: format!("names {} shards; at most {MAX_SHARDS} are opened", names.len()),
            });
        }
        for name in names {
            let plain = Path::new(name).file_name().is_some_and(|f| f == name);
            if !plain || name.contains(['/', '\\', '\0']) {
                return Err(ModelError::ShardName { path: index_path, shard: name.to_owned() });
            }
            store.add(name)?;
        }
        for (tensor, shard) in &index.weight_map {
            let at_home = store.tensors.get(tensor).map(|t| &store.shards[t.shard].name);
            if at_home != Some(shard) {
                return Err(ModelError::MissingTensor {
                    path: directory.join(shard),
                    tensor: tensor.clone(),
                });
            }
        }
        Ok(store)
    }

    /// The tensors of a GGUF file with all its parts, under the names that they have in checkpoints.
    pub(crate) fn of_gguf(parts: Vec<(PathBuf, File, Gguf)>) -> Result<Self, ModelError> {
        let mut store = Self {
            directory: parts.first().map(|(path, ..)| path.clone()).unwrap_or_default(),
            shards: Vec::new(),
            tensors: HashMap::new(),
            compressed: Vec::new(),
            arrivals: None,
            admit: OnceLock::new(),
        };
        let architecture = parts.first().and_then(|(.., gguf)| gguf.architecture());
        let architecture = architecture.unwrap_or_default().to_owned();
        let architecture = architecture.as_str();
        let paired = parts.first().and_then(|(.., gguf)| gguf.paired_heads());
        for (path, file, gguf) in parts {
            let io = |source| ModelError::Io { path: path.clone(), source };
            let bytes = file.metadata().map_err(io)?.len();
            let shard = store.shards.len();
            for listed in gguf.tensors {
                let name = renamed(architecture, &listed.name);
                let heads = |ending: &str| name.ends_with(ending);
                let paired = match paired {
                    Some((heads_of_queries, _))
                        if heads(".q_proj.weight") || heads(".q_proj.bias") =>
                    {
                        heads_of_queries
                    }
                    Some((_, of_keys)) if heads(".k_proj.weight") || heads(".k_proj.bias") => {
                        of_keys
                    }
                    _ => 0,
                };
                let rows = listed.shape.first().copied().unwrap_or(0);
                if paired > 0 && !rows.is_multiple_of(paired.saturating_mul(2)) {
                    let why =
                        format!("{rows} rows of {} are no {paired} heads of pairs", listed.name);
                    return Err(ModelError::Gguf { path, why });
                }
                let format = match listed.kind {
                    GgmlType::Known(format) => Some(format),
                    GgmlType::Unknown(_) => None,
                };
                let tensor = Tensor {
                    shard,
                    dtype: of_gguf(&listed.kind.name(), paired),
                    shape: listed.shape,
                    offset: listed.offset,
                    bytes: listed.bytes,
                    tile: 0,
                    format,
                    paired,
                };
                if store.tensors.insert(name.clone(), tensor).is_some() {
                    return Err(ModelError::Duplicate { path, tensor: name });
                }
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            store.shards.push(Shard { path, name, file, bytes });
        }
        Ok(store)
    }

    /// Tensors without data; [`Store::lay`] says where each will be.
    pub(crate) fn outline(path: &Path, tensors: &[Listed]) -> Result<Self, ModelError> {
        let mut known = HashMap::with_capacity(tensors.len());
        for Listed { name, dtype, shape } in tensors {
            let wrong = |problem| ModelError::Header { path: path.to_owned(), problem };
            let impossible = || wrong(HeaderProblem::Impossible { tensor: name.clone() });
            let count = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
            let blocks = in_blocks(dtype);
            let bytes = match blocks {
                Some((format, _)) => GgmlType::Known(format).bytes_of(shape),
                None => bits(dtype).and_then(|bits| Some(count?.checked_mul(bits)? / 8)),
            };
            let tensor = Tensor {
                shard: 0,
                dtype: dtype.clone(),
                shape: shape.clone(),
                offset: 0,
                bytes: bytes.ok_or_else(impossible)?,
                tile: 0,
                format: blocks.map(|(format, _)| format).or_else(|| format(dtype)),
                paired: blocks.map_or(0, |(_, paired)| paired),
            };
            let rows = shape.first().copied().unwrap_or(0);
            if tensor.paired > 0 && !rows.is_multiple_of(tensor.paired.saturating_mul(2)) {
                return Err(impossible());
            }
            if known.insert(name.clone(), tensor).is_some() {
                return Err(wrong(HeaderProblem::Twice { tensor: name.clone() }));
            }
        }
        let directory = path.to_owned();
        let (shards, admit) = (Vec::new(), OnceLock::new());
        let compressed = Vec::new();
        Ok(Self { directory, shards, tensors: known, compressed, arrivals: None, admit })
    }

    /// Gives an outline the file in which its data arrives.
    pub(crate) fn arrive(&mut self, data: File, arrivals: Arc<dyn Arrivals>) {
        let bytes = self.tensors.values().fold(0u64, |sum, t| sum.saturating_add(t.bytes));
        let (path, name) = (self.directory.clone(), "data".to_owned());
        self.shards = vec![Shard { path, name, file: data, bytes }];
        self.arrivals = Some(arrivals);
    }

    /// Says where a tensor is in the data.
    pub(crate) fn lay(&mut self, name: &str, offset: u64, tile: u64) {
        if let Some(tensor) = self.tensors.get_mut(name) {
            (tensor.offset, tensor.tile) = (offset, tile);
        }
    }

    /// Whether the tensors are from a GGUF file, on this device or elsewhere.
    pub(crate) fn is_of_gguf(&self) -> bool {
        self.tensors.values().any(|tensor| tensor.dtype.starts_with(OF_GGUF))
    }

    /// A tensor by its name, whatever its type, and its entry in a manifest.
    pub(crate) fn listed(&self, name: &str) -> Result<(&Tensor, Listed), ModelError> {
        let tensor = self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor {
            path: self.directory.clone(),
            tensor: name.to_owned(),
        })?;
        let (dtype, shape) = (tensor.dtype.clone(), tensor.shape.clone());
        Ok((tensor, Listed { name: name.to_owned(), dtype, shape }))
    }

    fn add(&mut self, name: &str) -> Result<(), ModelError> {
        let path = self.directory.join(name);
        if !path.is_file() {
            return Err(ModelError::NotThere {
                path: self.directory.clone(),
                wanted: name.to_owned(),
            });
        }
        let io = |source| ModelError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let header = |problem| match recognise::weights(&path) {
            Ok(()) => ModelError::Header { path: path.clone(), problem },
            Err(error) => error,
        };
        if bytes < 8 {
            return Err(header(HeaderProblem::Short { have: bytes }));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(io)?;
        let length = u64::from_le_bytes(length);
        let allowed = (bytes - 8).min(MAX_HEADER_BYTES);
        if length > allowed {
            return Err(header(HeaderProblem::Length { bytes: length, allowed }));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 8).map_err(io)?;
        let entries = parse_header(&text).map_err(header)?;
        let shard = self.shards.len();
        let start = 8 + length;
        for (name, entry) in entries {
            let end = start.saturating_add(entry.data_offsets.1);
            if end > bytes {
                return Err(ModelError::Truncated { path, tensor: name, end, have: bytes });
            }
            let tensor = Tensor {
                shard,
                format: format(&entry.dtype),
                dtype: entry.dtype,
                shape: entry.shape,
                offset: start + entry.data_offsets.0,
                bytes: entry.data_offsets.1 - entry.data_offsets.0,
                tile: 0,
                paired: 0,
            };
            if self.tensors.contains_key(&name) {
                return Err(ModelError::Duplicate { path, tensor: name });
            }
            self.tensors.insert(name, tensor);
        }
        self.shards.push(Shard { path, name: name.to_owned(), file, bytes });
        Ok(())
    }

    /// Names of all tensors, in order.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor of known type and of this shape.
    pub(crate) fn tensor(
        &self,
        name: &str,
        want: &[u64],
    ) -> Result<(&Tensor, WeightFormat), ModelError> {
        let tensor = self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor {
            path: self.directory.clone(),
            tensor: name.to_owned(),
        })?;
        let path = || self.path(tensor.shard).to_owned();
        if tensor.shape != want {
            return Err(ModelError::Shape {
                path: path(),
                tensor: name.to_owned(),
                want: want.to_vec(),
                have: tensor.shape.clone(),
            });
        }
        let unknown = || ModelError::TensorType {
            path: path(),
            tensor: name.to_owned(),
            dtype: tensor.dtype.clone(),
        };
        Ok((tensor, tensor.format.ok_or_else(unknown)?))
    }

    /// Fills `out` from byte `at` of a shard. In a model that arrives it waits for these bytes; with a
    /// manifest at hand they are compared with it first.
    pub(crate) fn read_at(&self, shard: usize, out: &mut [u8], at: u64) -> Result<(), ModelError> {
        let bytes = at..at.saturating_add(out.len() as u64);
        if let Some(admit) = self.admit.get() {
            admit(self, shard, bytes)?;
        } else if let Some(arrivals) = &self.arrivals {
            let path = || self.path(shard).to_owned();
            arrivals.wait(bytes).map_err(|why| ModelError::Absent { path: path(), why })?;
        }
        self.read_raw(shard, out, at)
    }

    /// Asks about everything that is read from now on; false if something else is asked already.
    pub(crate) fn admit_by(&self, admit: Box<Admit>) -> bool {
        self.admit.set(admit).is_ok()
    }

    /// The files that hold the tensors.
    pub(crate) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The number of files, with those that are read out of several tensors.
    pub(crate) fn places(&self) -> usize {
        self.shards.len() + self.compressed.len()
    }

    /// The path of a file, for messages; the directory in an outline, which has no files.
    pub(crate) fn path(&self, shard: usize) -> &Path {
        let compressed = shard.checked_sub(self.shards.len());
        let matrix = compressed.and_then(|at| self.compressed.get(at));
        let shard = self.shards.get(matrix.map_or(shard, |matrix| matrix.codes.shard));
        shard.map_or(&self.directory, |shard| &shard.path)
    }

    /// Fills `out` from byte `at` of a shard, without waiting or comparing.
    pub(crate) fn read_raw(&self, shard: usize, out: &mut [u8], at: u64) -> Result<(), ModelError> {
        let Some(shard) = self.shards.get(shard) else {
            let matrix = &self.compressed[shard - self.shards.len()];
            return matrix
                .read(out, at, &|out, place| self.read_raw(place.shard, out, place.offset));
        };
        shard
            .file
            .read_exact_at(out, at)
            .map_err(|source| ModelError::Io { path: shard.path.clone(), source })
    }

    /// Whether two tensors are equal, judged by a sample of their contents. In an outline, tensors of the same type and
    /// shape count as equal.
    pub(crate) fn alike(&self, one: &str, other: &str) -> Result<bool, ModelError> {
        let (Some(a), Some(b)) = (self.tensors.get(one), self.tensors.get(other)) else {
            return Ok(false);
        };
        if a.dtype != b.dtype || a.shape != b.shape {
            return Ok(false);
        }
        if self.shards.is_empty() {
            return Ok(true);
        }
        let mut sample = [[0; SAMPLE_BYTES as usize]; 2];
        for at in samples(one, a.bytes) {
            let length = SAMPLE_BYTES.min(a.bytes - at) as usize;
            for (tensor, sample) in [a, b].into_iter().zip(&mut sample) {
                self.read_at(tensor.shard, &mut sample[..length], tensor.offset + at)?;
            }
            if sample[0][..length] != sample[1][..length] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds the names, types, shapes and places of all tensors to a digest, and a sample of the contents of each, so
    /// that a retrained model of the same shape differs. The order does not depend on hashing.
    pub(crate) fn digest(&self, hasher: &mut blake3::Hasher) -> Result<(), ModelError> {
        let text = |hasher: &mut blake3::Hasher, bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        for shard in &self.shards {
            text(hasher, shard.name.as_bytes());
            text(hasher, &shard.bytes.to_le_bytes());
        }
        let sorted: BTreeMap<_, _> = self.tensors.iter().collect();
        let mut sample = [0; SAMPLE_BYTES as usize];
        for (name, tensor) in sorted {
            text(hasher, name.as_bytes());
            text(hasher, tensor.dtype.as_bytes());
            text(hasher, &(tensor.shard as u64).to_le_bytes());
            text(hasher, &tensor.offset.to_le_bytes());
            text(hasher, &tensor.bytes.to_le_bytes());
            let shape: Vec<u8> = tensor.shape.iter().flat_map(|d| d.to_le_bytes()).collect();
            text(hasher, &shape);
            for at in samples(name, tensor.bytes) {
                let length = SAMPLE_BYTES.min(tensor.bytes - at) as usize;
                self.read_at(tensor.shard, &mut sample[..length], tensor.offset + at)?;
                text(hasher, &sample[..length]);
            }
        }
        Ok(())
    }
}

/// A tensor as a manifest lists it.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
}

/// Bytes of a sample: a block that every disk reads at once.
const SAMPLE_BYTES: u64 = 4096;

/// Where the contents of a tensor are sampled: at its first block, and at one that its name decides, so that not every
/// tensor is sampled at the same rows.
fn samples(name: &str, bytes: u64) -> impl Iterator<Item = u64> {
    let blocks = bytes.div_ceil(SAMPLE_BYTES);
    let digest = blake3::hash(name.as_bytes());
    let number = digest.as_bytes().iter().take(8).fold(0u64, |n, &b| n << 8 | u64::from(b));
    let other = (blocks > 1).then(|| (1 + number % (blocks.max(2) - 1)) * SAMPLE_BYTES);
    (blocks > 0).then_some(0).into_iter().chain(other)
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// A tensor as a safetensors header lists it.
#[derive(Deserialize, Debug)]
pub(crate) struct TensorEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Parses a header. The tensors are in the order of their bytes, which follow one another without a gap.
pub(crate) fn parse_header(text: &[u8]) -> Result<Vec<(String, TensorEntry)>, HeaderProblem> {
    let Entries(mut entries) = serde_json::from_slice(text)
        .map_err(|error| HeaderProblem::Json { text: error.to_string() })?;
    let mut seen = HashSet::new();
    if let Some((name, _)) = entries.iter().find(|(name, _)| !seen.insert(name.as_str())) {
        return Err(HeaderProblem::Twice { tensor: name.clone() });
    }
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut expected = 0;
    for (name, entry) in &entries {
        let (start, end) = entry.data_offsets;
        if start != expected {
            return Err(HeaderProblem::Offsets { tensor: name.clone(), start, expected });
        }
        let impossible = || HeaderProblem::Impossible { tensor: name.clone() };
        let have = end.checked_sub(start).ok_or_else(impossible)?;
        let count = entry.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let count = count.ok_or_else(impossible)?;
        if let Some(bits) = bits(&entry.dtype) {
            let want = count.checked_mul(bits).ok_or_else(impossible)? / 8;
            if want != have {
                return Err(HeaderProblem::Size { tensor: name.clone(), want, have });
            }
        }
        expected = end;
    }
    Ok(entries)
}

/// The entries of a header in a list: a map would hide a name that is there twice.
struct Entries(Vec<(String, TensorEntry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

#[cfg(test)]
mod tests;
