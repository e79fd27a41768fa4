//! Compares a model directory with its manifest, piece by piece, each before it is first read.
//!
//! A fingerprint tells models apart by a sample of their weights, so that a directory with the right fingerprint may
//! still hold other weights: damaged, or changed by somebody. A device that has the manifest from a source that it
//! trusts compares them. Pieces that were right are remembered, together with the state of the files.

use crate::{
    ModelDir,
    error::ModelError,
    manifest::{Digest, Manifest},
    pieces::Pieces,
    store::{Shard, Store},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    ops::Range,
    os::unix::fs::MetadataExt,
    sync::atomic::{AtomicU64, Ordering},
};

/// The version of the stored form.
const VERSION: u32 = 1;
/// Pieces in one word of the bit set.
const WORD: u32 = u64::BITS;

/// Which pieces of a directory were found to match its manifest.
#[derive(Debug)]
pub struct Proof {
    manifest: Manifest,
    pieces: Pieces,
    files: Vec<Stamp>,
    /// For each file, its tensors by their last byte: each with its first byte, and its place among the cuts.
    tensors: Vec<BTreeMap<u64, (u64, usize)>>,
    /// A bit for each piece that was found right.
    right: Vec<AtomicU64>,
}

/// The identity and times of a file, which tell whether it was replaced or written since.
#[derive(Serialize, Deserialize, PartialEq, Eq, Debug)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    /// The time of the last change of contents or attributes, which programs do not set.
    changed: (i64, i64),
}

/// The stored form of a proof.
#[derive(Serialize, Deserialize)]
struct StoredProof {
    version: u32,
    files: Vec<Stamp>,
    right: Vec<u64>,
}

impl Stamp {
    fn of(shard: &Shard) -> Result<Self, ModelError> {
        let about = shard.file.metadata();
        let about = about.map_err(|source| ModelError::Io { path: shard.path.clone(), source })?;
        Ok(Self {
            device: about.dev(),
            inode: about.ino(),
            bytes: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
        })
    }
}

impl Proof {
    /// A proof of a directory in which nothing is compared yet, except what was `kept` for the same files.
    ///
    /// # Errors
    /// When the manifest is of another model, or a file's state cannot be read.
    pub fn new(
        model: &ModelDir,
        manifest: Manifest,
        kept: Option<&[u8]>,
    ) -> Result<Self, ModelError> {
        if manifest.fingerprint() != model.files_fingerprint() {
            let (have, want) = (manifest.fingerprint(), model.files_fingerprint());
            return Err(ModelError::Manifest { why: format!("it is of {have}, not of {want}") });
        }
        let pieces = manifest.cut(model)?;
        let store = model.store();
        let files: Vec<_> = store.shards().iter().map(Stamp::of).collect::<Result<_, _>>()?;
        let mut tensors = vec![BTreeMap::new(); store.places()];
        for (place, cut) in pieces.cuts().iter().enumerate().filter(|(_, cut)| cut.bytes > 0) {
            let tensor = store.listed(&cut.name)?.0;
            if let Some(tensors) = tensors.get_mut(tensor.shard) {
                tensors.insert(tensor.offset + cut.bytes - 1, (tensor.offset, place));
            }
        }
        let words = pieces.count().div_ceil(WORD) as usize;
        let right = kept.and_then(|kept| StoredProof::read(kept, &files, words));
        let right = right.unwrap_or_else(|| vec![0; words]);
        let right = right.into_iter().map(AtomicU64::new).collect();
        Ok(Self { manifest, pieces, files, tensors, right })
    }

    /// Whether this is a proof of the model's files as they are now.
    pub fn is_of(&self, model: &ModelDir) -> bool {
        let now = model.store().shards().iter().map(Stamp::of).collect::<Result<Vec<_>, _>>();
        model.files_fingerprint() == self.manifest.fingerprint()
            && now.is_ok_and(|now| now == self.files)
    }

    /// The manifest that pieces are compared with.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The number of pieces that were found right.
    pub fn found(&self) -> u32 {
        self.right.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum()
    }

    /// The stored form, for the next time that the model is opened.
    ///
    /// # Errors
    /// When it cannot be serialised, which does not happen to proofs of this build.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ModelError> {
        let right: Vec<_> = self.right.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        // The fields in the order of [`Kept`].
        let kept = postcard::to_stdvec(&(VERSION, &self.files, right));
        let kept = kept.map_err(|error| ModelError::Manifest { why: error.to_string() })?;
        Ok([&Digest::of(&kept).0[..], &kept].concat())
    }

    /// Compares the pieces that hold these bytes of a file, unless they were found right before.
    pub(crate) fn admit(
        &self,
        store: &Store,
        shard: usize,
        bytes: Range<u64>,
    ) -> Result<(), ModelError> {
        let Some(tensors) = self.tensors.get(shard) else { return Ok(()) };
        for (&last, &(first, place)) in tensors.range(bytes.start..) {
            if first >= bytes.end {
                break;
            }
            let (start, end) = (bytes.start.max(first), bytes.end.min(last + 1));
            let pieces = self.pieces.cuts()[place].stored(start - first..end - first);
            for piece in pieces.filter(|piece| !self.is_right(*piece)) {
                let mut read = Vec::new();
                store.read_raw_piece(&self.pieces, piece, &mut read)?;
                self.compare(store, piece, &read)?;
            }
        }
        Ok(())
    }

    /// Compares a piece with the manifest, unless it was found right before.
    fn compare(&self, store: &Store, piece: u32, bytes: &[u8]) -> Result<(), ModelError> {
        if self.is_right(piece) {
            return Ok(());
        }
        if !self.manifest.is(piece, bytes) {
            let tensor = self.pieces.holding(piece)?.name.clone();
            let shard = store.listed(&tensor)?.0.shard;
            let path = store.path(shard).to_owned();
            return Err(ModelError::Piece { path, piece, tensor });
        }
        if let Some(word) = self.right.get((piece / WORD) as usize) {
            word.fetch_or(1 << (piece % WORD), Ordering::Relaxed);
        }
        Ok(())
    }

    fn is_right(&self, piece: u32) -> bool {
        let word = self.right.get((piece / WORD) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (piece % WORD) & 1 == 1)
    }
}

impl StoredProof {
    /// The stored bits, if they are of these files in their present state and as many words as are needed.
    fn read(bytes: &[u8], files: &[Stamp], words: usize) -> Option<Vec<u64>> {
        let (digest, kept) = bytes.split_at_checked(32)?;
        if Digest::of(kept).0[..] != *digest {
            return None;
        }
        let kept: Self = postcard::from_bytes(kept).ok()?;
        let same = kept.version == VERSION && kept.files == files && kept.right.len() == words;
        same.then_some(kept.right)
    }
}

impl ModelDir {
    /// Reads a piece from the model's files into `out`, which then has exactly its bytes.
    ///
    /// # Errors
    /// When there is no such piece, the files cannot be read, or the piece differs from the manifest that the model is
    /// compared with.
    pub fn read_piece(
        &self,
        pieces: &Pieces,
        piece: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        self.store().read_raw_piece(pieces, piece, out)?;
        match self.proof() {
            Some(proof) => proof.compare(self.store(), piece, out),
            None => Ok(()),
        }
    }

    /// Compares the tables of the model, whose rows are read request after request. `go_on` is asked before each piece
    /// whether to continue.
    ///
    /// # Errors
    /// When a piece cannot be read, or differs from the manifest.
    pub fn prove_tables(&self, mut go_on: impl FnMut() -> bool) -> Result<(), ModelError> {
        let Some(proof) = self.proof() else { return Ok(()) };
        let mut read = Vec::new();
        for piece in self.table_pieces(&proof.pieces)?.into_iter().flatten() {
            if !proof.is_right(piece) {
                if !go_on() {
                    return Ok(());
                }
                self.read_piece(&proof.pieces, piece, &mut read)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        Matrix, Table, Vector,
        shape::Shape,
        testing::{self, golden, golden_copy},
    };
    use std::{
        fs::{self, File},
        os::unix::fs::FileExt,
        path::Path,
        sync::Arc,
    };

    fn manifest(path: &Path) -> Manifest {
        testing::manifest(&ModelDir::open(path).unwrap())
    }

    fn proven(path: &Path, manifest: &Manifest, kept: Option<&[u8]>) -> ModelDir {
        let model = ModelDir::open(path).unwrap();
        model.prove(Arc::new(Proof::new(&model, manifest.clone(), kept).unwrap()));
        model
    }

    /// Reads all of a model, in windows whose edges lie anywhere.
    fn read_all(model: &ModelDir) -> Result<(), ModelError> {
        let mut scratch = Vec::new();
        for which in Vector::all(model.spec()) {
            model.vector(which)?;
        }
        for which in Matrix::all(model.spec()) {
            let (rows, columns) = which.shape(model.spec()).unwrap();
            for (from, to) in [(0, 3), (3, 10)] {
                let (inputs, outputs) = (0..rows, columns * from / 10..columns * to / 10);
                let mut out = vec![0.0; inputs.len() * outputs.len()];
                let width = outputs.len();
                let source = model.matrix(which)?;
                source.read_f32((inputs, outputs), &mut out, width, 0, &mut scratch)?;
            }
        }
        if model.spec().patches.is_none() {
            let mut row = vec![0.0; model.spec().hidden as usize];
            for id in 0..model.spec().vocabulary {
                model.embedding_rows(Table::Word, &[id], &mut row)?;
            }
        }
        // The position table, too.
        model.prove_tables(|| true)
    }

    /// Overwrites bytes of a tensor of a directory.
    fn write_over(path: &Path, tensor: &str, at: u64, bytes: &[u8]) {
        let model = ModelDir::open(path).unwrap();
        let tensor = model.store().listed(tensor).unwrap().0;
        let shard = &model.store().shards()[tensor.shard];
        let file = File::options().write(true).open(&shard.path).unwrap();
        file.write_all_at(bytes, tensor.offset + at).unwrap();
    }

    #[test]
    fn files_that_match_the_manifest_are_read_without_error() {
        for name in ["bert", "gpt2", "llama-tied-bf16", "vit"] {
            let model = proven(&golden(name), &manifest(&golden(name)), None);
            read_all(&model).unwrap();
            assert!(model.proof().unwrap().found() > 0, "{name}");
            assert!(model.proof().unwrap().is_of(&ModelDir::open(&golden(name)).unwrap()));
        }
    }

    /// Eight bytes of each matrix are overwritten, outside the fingerprint's sample. One matrix is in tiles.
    #[test]
    fn changed_bytes_in_any_tensor_are_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        Shape::bert(1, 640, 10).write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        let manifest = manifest(dir.path());
        let before = ModelDir::open(dir.path()).unwrap();
        let mut missed = Vec::new();
        for cut in before.pieces().unwrap().cuts() {
            let at = (cut.bytes / 7) & !7;
            write_over(dir.path(), &cut.name, at, &[0xa5; 8]);
            let model = ModelDir::open(dir.path()).unwrap();
            if model.fingerprint() == before.fingerprint() {
                model.prove(Arc::new(Proof::new(&model, manifest.clone(), None).unwrap()));
                let error = read_all(&model).unwrap_err();
                let found =
                    matches!(&error, ModelError::Piece { tensor, .. } if *tensor == cut.name);
                assert!(found && error.to_string().contains("model.safetensors"), "{error}");
            } else {
                missed.push(cut.name.clone());
            }
            // Back to the right bytes, by writing the model anew.
            Shape::bert(1, 640, 10).write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        }
        let tiled = |name: &String| name.contains("output.dense.weight");
        assert!(!missed.iter().any(tiled), "the sample has all of {missed:?}");
    }

    /// A change of one byte of any tensor is noticed, whatever format it is in.
    #[test]
    fn changed_bytes_in_any_gguf_tensor_are_found_and_named() {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/gguf/tiny.gguf");
        let manifest = manifest(&tiny);
        let manifest = Manifest::from_bytes(&manifest.to_bytes().unwrap()).unwrap();
        let model = proven(&tiny, &manifest, None);
        read_all(&model).unwrap();
        assert_eq!(model.proof().unwrap().found(), model.pieces().unwrap().count());

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        for cut in model.pieces().unwrap().cuts() {
            fs::copy(&tiny, &path).unwrap();
            // The model is opened before the change: the fingerprint's sample of a small file is all of it.
            let model = proven(&path, &manifest, None);
            write_over(&path, &cut.name, cut.bytes - 1, &[0x5a]);
            let error = read_all(&model).unwrap_err();
            let named = matches!(&error, ModelError::Piece { tensor, .. } if *tensor == cut.name);
            assert!(named, "{error}");
        }
    }

    #[test]
    fn verified_pieces_are_remembered_until_a_file_changes() {
        let copy = golden_copy("bert");
        let manifest = manifest(copy.path());
        let model = proven(copy.path(), &manifest, None);
        read_all(&model).unwrap();
        let proof = model.proof().unwrap();
        let kept = proof.to_bytes().unwrap();
        let again = proven(copy.path(), &manifest, Some(&kept));
        assert_eq!(again.proof().unwrap().found(), proof.found());
        // A proof that is cut short, of other files or of another form is ignored.
        for bad in [&kept[..kept.len() - 1], &kept[1..], b"", &[0; 99]] {
            assert_eq!(proven(copy.path(), &manifest, Some(bad)).proof().unwrap().found(), 0);
        }
        let other = golden_copy("bert");
        assert_eq!(proven(other.path(), &manifest, Some(&kept)).proof().unwrap().found(), 0);
        // The file was written since, though its time was set back.
        let path = copy.path().join("model.safetensors");
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        let bytes = fs::read(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&bytes[bytes.len() - 8..], bytes.len() as u64 - 8).unwrap();
        file.set_modified(time).unwrap();
        assert!(!proof.is_of(&ModelDir::open(copy.path()).unwrap()));
        assert_eq!(proven(copy.path(), &manifest, Some(&kept)).proof().unwrap().found(), 0);
    }

    #[test]
    fn embedding_tables_are_verified_before_the_first_row_is_read() {
        let copy = golden_copy("bert");
        let manifest = manifest(copy.path());
        let model = proven(copy.path(), &manifest, None);
        model.prove_tables(|| true).unwrap();
        let found = model.proof().unwrap().found();
        assert!(found > 0);
        let mut row = vec![0.0; model.spec().hidden as usize];
        model.embedding_rows(Table::Word, &[96], &mut row).unwrap();
        assert_eq!(model.proof().unwrap().found(), found);
    }

    #[test]
    fn a_manifest_of_another_model_is_refused() {
        let model = ModelDir::open(&golden("bert")).unwrap();
        let error = Proof::new(&model, manifest(&golden("gpt2")), None).unwrap_err();
        assert!(matches!(error, ModelError::Manifest { .. }), "{error}");
    }
}
