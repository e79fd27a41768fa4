//! The manifest of a model: its config, its tensors, and a digest of each of its pieces.
//!
//! A device with a manifest from a source that it trusts can take pieces from any other. The digest
//! of the manifest itself names the content: equal digests, equal bytes.

use crate::{
    ModelDir, error::ModelError, pieces::Pieces, small_file::MAX_JSON_BYTES, store::Listed,
};
use serde::{Deserialize, Serialize};
use std::{fmt, ops::ControlFlow, path::Path, str::FromStr};

/// The largest manifest that is read, enough for a model of 500 GB.
pub const MAX_MANIFEST_BYTES: u64 = 128 << 20;
/// The version of how pieces are cut and listed; manifests of other versions are refused.
const VERSION: u32 = 1;

/// A BLAKE3 digest of some content.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
    /// A digest from the bytes of a message; `None` unless there are exactly 32.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}
impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl FromStr for Digest {
    type Err = blake3::HexError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        blake3::Hash::from_hex(text).map(|hash| Self(*hash.as_bytes()))
    }
}

/// The content of a model: its config, its tensors, and a digest of each piece.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    version: u32,
    name: String,
    fingerprint: String,
    config: Vec<u8>,
    tensors: Vec<Listed>,
    digests: Vec<Digest>,
}

impl Manifest {
    /// The manifest of a model directory, for which all data that the spec uses is read. `progress`
    /// is called with the bytes that were read and those that there are, and decides whether to go
    /// on; the result is `None` if it does not.
    ///
    /// # Errors
    /// When the model's files cannot be read.
    pub fn of(
        model: &ModelDir,
        config: Vec<u8>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Option<Self>, ModelError> {
        let pieces = model.pieces()?;
        let tensors = pieces.cuts().iter().map(|cut| model.listed(&cut.name));
        let tensors = tensors.collect::<Result<_, _>>()?;
        let mut digests = Vec::with_capacity(pieces.count() as usize);
        let mut bytes = Vec::new();
        for piece in 0..pieces.count() {
            model.read_piece(&pieces, piece, &mut bytes)?;
            digests.push(Digest::of(&bytes));
            if progress(pieces.span(piece).end, pieces.total()).is_break() {
                return Ok(None);
            }
        }
        Ok(Some(Self {
            version: VERSION,
            name: model.name().to_owned(),
            fingerprint: model.files_fingerprint().to_owned(),
            config,
            tensors,
            digests,
        }))
    }

    /// The form in which a manifest travels and is stored.
    ///
    /// # Errors
    /// When it cannot be serialised, which does not happen to manifests of this build.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ModelError> {
        postcard::to_stdvec(self).map_err(|error| ModelError::Manifest { why: error.to_string() })
    }

    /// Reads a manifest from untrusted bytes.
    ///
    /// # Errors
    /// When the bytes are no manifest of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ModelError> {
        let wrong = |why: String| ModelError::Manifest { why };
        let manifest: Self = postcard::from_bytes(bytes).map_err(|e| wrong(e.to_string()))?;
        if manifest.version != VERSION {
            return Err(wrong(format!("version {}, known is {VERSION}", manifest.version)));
        }
        if manifest.config.len() as u64 > MAX_JSON_BYTES {
            return Err(wrong(format!("a config of {} bytes", manifest.config.len())));
        }
        Ok(manifest)
    }

    /// How the model of this manifest is cut into pieces. `path` is for messages.
    ///
    /// # Errors
    /// When it describes no model that this build knows, or has not one digest for each piece.
    pub fn pieces(&self, path: &Path) -> Result<Pieces, ModelError> {
        self.cut(&ModelDir::outline(self, path)?)
    }

    /// The name of the model's directory at the source.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// The [`ModelDir::files_fingerprint`] of the model. A model that is rounded as it is read has
    /// the same manifest.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
    pub(crate) fn config(&self) -> &[u8] {
        &self.config
    }
    pub(crate) fn tensors(&self) -> &[Listed] {
        &self.tensors
    }
    /// Whether these bytes are the piece of this number.
    pub fn is(&self, piece: u32, bytes: &[u8]) -> bool {
        self.digests.get(piece as usize).is_some_and(|digest| *digest == Digest::of(bytes))
    }
    /// How its outline is cut. There may be no more pieces than digests, so that sizes that are
    /// only claimed take no memory.
    pub(crate) fn cut(&self, outline: &ModelDir) -> Result<Pieces, ModelError> {
        let digests = self.digests.len();
        let pieces = match outline.pieces_at_most(digests as u64) {
            Err(ModelError::TooLarge { .. }) => {
                let why = format!("{digests} digests, and more pieces");
                return Err(ModelError::Manifest { why });
            }
            pieces => pieces?,
        };
        self.fits(&pieces)?;
        Ok(pieces)
    }
    /// Checks that there is one digest for each piece, and no tensor besides those that are cut.
    fn fits(&self, pieces: &Pieces) -> Result<(), ModelError> {
        let (have, want) = (self.digests.len(), pieces.count() as usize);
        let (listed, cut) = (self.tensors.len(), pieces.cuts().len());
        match have == want && listed == cut {
            true => Ok(()),
            false => Err(ModelError::Manifest {
                why: format!("{have} digests for {want} pieces, {listed} tensors for {cut}"),
            }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        Arrivals, Matrix, Table, Vector,
        testing::{self, AllThere, arrived, golden},
    };
    use std::{fs, ops::Range, sync::Arc};

    struct Never;
    impl Arrivals for Never {
        fn wait(&self, bytes: Range<u64>) -> Result<(), String> {
            Err(format!("{} bytes are far away", bytes.end - bytes.start))
        }
    }

    fn manifest(path: &Path) -> (ModelDir, Manifest) {
        let model = ModelDir::open(path).unwrap();
        let manifest = testing::manifest(&model);
        (model, manifest)
    }

    fn assert_same(model: &ModelDir, other: &ModelDir) {
        assert_eq!((model.spec(), model.fingerprint()), (other.spec(), other.fingerprint()));
        assert_eq!((model.name(), model.format()), (other.name(), other.format()));
        let mut scratch = Vec::new();
        for which in Matrix::all(model.spec()) {
            let (rows, columns) = which.shape(model.spec()).unwrap();
            // Whole, and a window whose edges lie anywhere.
            let cut = |n: u32| (n / 3)..(n - n / 5);
            for (inputs, outputs) in [(0..rows, 0..columns), (cut(rows), cut(columns))] {
                let (width, size) = (outputs.len(), inputs.len() * outputs.len());
                let mut read = |model: &ModelDir| {
                    let mut out = vec![f32::NAN; size];
                    let source = model.matrix(which).unwrap();
                    let (inputs, outputs) = (inputs.clone(), outputs.clone());
                    source.read_f32((inputs, outputs), &mut out, width, 0, &mut scratch).unwrap();
                    out
                };
                assert_eq!(read(model), read(other), "{which:?}");
            }
        }
        for which in Vector::all(model.spec()) {
            assert_eq!(model.vector(which).unwrap(), other.vector(which).unwrap(), "{which:?}");
        }
        let ids = [5, 6, 7, 0, 96];
        let rows = |model: &ModelDir| {
            let mut out = vec![0.0; ids.len() * model.spec().hidden as usize];
            model.embedding_rows(Table::Word, &ids, &mut out).unwrap();
            out
        };
        assert_eq!(rows(model), rows(other));
    }

    #[test]
    fn a_model_sent_in_pieces_equals_its_directory() {
        for name in ["bert", "bert-f16", "distilbert", "gpt2", "gpt2-classes", "llama-tied-bf16"] {
            let model = ModelDir::open(&golden(name)).unwrap();
            assert_same(&model, &arrived(&model));
        }
    }

    #[test]
    fn matrices_cut_into_column_tiles_read_the_same_values() {
        let dir = tempfile::tempdir().unwrap();
        for format in [galaxy_common::WeightFormat::F32, galaxy_common::WeightFormat::Bf16] {
            let shape = crate::shape::Shape { format, ..crate::shape::Shape::bert(1, 640, 10) };
            let from = dir.path().join(format!("{format:?}"));
            fs::create_dir(&from).unwrap();
            shape.write(&from, u64::MAX, &mut |_| {}).unwrap();
            let model = ModelDir::open(&from).unwrap();
            assert!(model.pieces().unwrap().cuts().iter().filter(|cut| cut.tile > 0).count() > 1);
            assert_same(&model, &arrived(&model));
        }
    }

    #[test]
    fn a_gguf_model_sent_in_pieces_equals_its_file() {
        let of_file = |path: &Path| {
            let model = ModelDir::open(path).unwrap();
            let other = arrived(&model);
            assert_eq!((model.spec(), model.formats()), (other.spec(), other.formats()));
            for which in Matrix::all(model.spec()) {
                let read = |model: &ModelDir| {
                    let source = model.matrix(which).unwrap();
                    let (inputs, outputs) = (source.rows(), source.columns());
                    let (mut some, mut wide) = (Vec::new(), vec![0.0; (3 * inputs) as usize]);
                    if source.format().block().is_some() {
                        source
                            .read_raw_rows(inputs / 3..inputs - 5, 1..outputs, &mut some)
                            .unwrap();
                    }
                    let scratch = &mut Vec::new();
                    source.read_f32((0..inputs, 2..5), &mut wide, 3, 0, scratch).unwrap();
                    (some, wide)
                };
                assert!(read(&model) == read(&other), "{which:?}");
            }
            for which in Vector::all(model.spec()) {
                assert_eq!(model.vector(which).unwrap(), other.vector(which).unwrap(), "{which:?}");
            }
            model.pieces().unwrap().cuts().iter().filter(|cut| cut.tile > 0).count()
        };
        for name in ["tiny", "mixed"] {
            of_file(&golden("").parent().unwrap().join(format!("gguf/{name}.gguf")));
        }
        // Files with rows of queries in pairs, and with matrices in tiles of blocks.
        let shape = crate::shape::Shape {
            family: "llama",
            kv_heads: 2,
            vocabulary: 300,
            intermediate: 2048,
            ..crate::shape::Shape::bert(1, 1024, 8)
        };
        let dir = tempfile::tempdir().unwrap();
        for bits in crate::Quantisation::ALL {
            let from = dir.path().join(bits.name());
            fs::create_dir(&from).unwrap();
            shape.write(&from, u64::MAX, &mut |_| {}).unwrap();
            let model = ModelDir::open(&from).unwrap().quantised(bits).unwrap();
            let file = dir.path().join(format!("{bits}.gguf"));
            model.write_gguf(&file, &mut |_, _| {}).unwrap();
            assert_eq!(of_file(&file), 2, "{bits}");
        }
    }

    #[test]
    fn reading_a_piece_that_cannot_be_fetched_is_an_error() {
        let (_, manifest) = manifest(&golden("bert"));
        let data = tempfile::tempfile().unwrap();
        let other = ModelDir::arriving(&manifest, Path::new("x"), data, Arc::new(Never)).unwrap();
        let error = other.vector(Vector::EmbeddingNorm).unwrap_err().to_string();
        assert!(error.contains("168 bytes are far away"), "{error}");
    }

    #[test]
    fn a_piece_with_a_changed_byte_does_not_match_its_digest() {
        let (model, manifest) = manifest(&golden("llama-tied-bf16"));
        let pieces = model.pieces().unwrap();
        let mut bytes = Vec::new();
        model.read_piece(&pieces, 0, &mut bytes).unwrap();
        assert!(manifest.is(0, &bytes) && !manifest.is(1, &bytes));
        bytes[0] ^= 1;
        assert!(!manifest.is(0, &bytes) && !manifest.is(u32::MAX, &bytes));
    }

    #[test]
    fn damaged_manifest_bytes_never_panic() {
        let (_, manifest) = manifest(&golden("bert"));
        let whole = manifest.to_bytes().unwrap();
        assert_ne!(Digest::of(&whole), Digest::of(&whole[1..]));
        let text = Digest::of(&whole).to_string();
        assert_eq!(text.parse::<Digest>().unwrap(), Digest::of(&whole));
        assert!("x".parse::<Digest>().is_err() && Digest::read(&whole).is_none());
        for end in (0..whole.len()).step_by(97) {
            assert!(Manifest::from_bytes(&whole[..end]).is_err(), "{end}");
        }
        let file = || tempfile::tempfile().unwrap();
        for at in (0..whole.len()).step_by(61) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x5a;
            if let Ok(manifest) = Manifest::from_bytes(&bytes) {
                drop(ModelDir::arriving(&manifest, Path::new("x"), file(), Arc::new(AllThere)));
            }
        }
        let fewer = Manifest { digests: vec![Digest([0; 32])], ..manifest };
        let error = ModelDir::arriving(&fewer, Path::new("x"), file(), Arc::new(AllThere));
        assert!(matches!(error, Err(ModelError::Manifest { .. })));
    }
}
