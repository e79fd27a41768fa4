//! Model directories for tests: tiny safetensors files written by hand, and the golden ones.

use crate::{Arrivals, ModelDir, manifest::Manifest};
use std::{
    fs,
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    sync::Arc,
};

/// A tensor's name, type, shape and bytes.
pub(crate) type TestTensor<'a> = (&'a str, &'a str, Vec<u64>, Vec<u8>);

/// A safetensors file with this header, which may be wrong, and this data.
pub(crate) fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A valid safetensors file of these tensors.
pub(crate) fn file(tensors: &[TestTensor<'_>]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert((*name).to_owned(), entry);
        data.extend_from_slice(bytes);
    }
    raw(&serde_json::Value::Object(header).to_string(), &data)
}

/// A copy of a golden checkpoint that a test may damage.
pub(crate) fn golden_copy(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in fs::read_dir(golden(name)).expect("a golden checkpoint") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("a copy");
    }
    copy
}

/// Replaces a text in a file of a copy, where it occurs first. In a header, `new` must be as long
/// as `old`.
pub(crate) fn edit(copy: &tempfile::TempDir, file: &str, old: &str, new: &str) {
    let path = copy.path().join(file);
    let bytes = fs::read(&path).expect("a file");
    let places: Vec<_> =
        bytes.windows(old.len()).enumerate().filter(|(_, w)| *w == old.as_bytes()).collect();
    assert!(!places.is_empty(), "{file} has no {old:?}");
    let at = places[0].0;
    let mut edited = bytes[..at].to_vec();
    edited.extend_from_slice(new.as_bytes());
    edited.extend_from_slice(&bytes[at + old.len()..]);
    fs::write(path, edited).expect("a file");
}

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name)
}

/// Arrivals of a model that has arrived.
pub(crate) struct AllThere;
impl Arrivals for AllThere {
    fn wait(&self, _: Range<u64>) -> Result<(), String> {
        Ok(())
    }
}

/// The manifest of a model.
pub(crate) fn manifest(model: &ModelDir) -> Manifest {
    let config = fs::read(model.path().join("config.json")).expect("a config");
    let go_on = &mut |_, _| ControlFlow::Continue(());
    Manifest::of(model, config, go_on).expect("files").expect("all of it")
}

/// A model after all its pieces have arrived somewhere else.
pub(crate) fn arrived(model: &ModelDir) -> ModelDir {
    let pieces = model.pieces().expect("pieces");
    let (mut all, mut piece) = (Vec::new(), Vec::new());
    for at in 0..pieces.count() {
        model.read_piece(&pieces, at, &mut piece).expect("a piece");
        all.extend_from_slice(&piece);
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let data = dir.path().join("data");
    fs::write(&data, all).expect("a file");
    let file = fs::File::open(&data).expect("a file");
    let manifest = manifest(model).to_bytes().and_then(|bytes| Manifest::from_bytes(&bytes));
    let manifest = manifest.expect("a manifest, as it is sent");
    ModelDir::arriving(&manifest, dir.path(), file, Arc::new(AllThere)).expect("a model")
}

/// The values of a matrix, output by output.
pub(crate) fn rows(model: &ModelDir, which: crate::Matrix) -> Vec<Vec<f32>> {
    let source = model.matrix(which).expect("a matrix");
    let (inputs, outputs) = (source.rows(), source.columns());
    let mut out = vec![f32::NAN; (inputs * outputs) as usize];
    source
        .read_f32((0..inputs, 0..outputs), &mut out, outputs as usize, 0, &mut Vec::new())
        .expect("values");
    let output = |at: usize| out[at..].iter().step_by(outputs as usize).copied().collect();
    (0..outputs as usize).map(output).collect()
}
