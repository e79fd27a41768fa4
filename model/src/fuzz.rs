//! Decoders of [`crate::ModelDir::open`], one by one, for the fuzz targets: no part of the
//! interface.

use crate::{
    ModelError, ModelSpec,
    config::{self, Fields},
    error::HeaderProblem,
    family,
    generation::{self, Generation},
    sentence::{self, SentenceConfig},
    store,
};
use std::path::Path;

/// Parses a safetensors header, and returns how many tensors it lists.
///
/// # Errors
/// As for opening the file.
pub fn header(text: &[u8]) -> Result<usize, HeaderProblem> {
    store::parse_header(text).map(|tensors| tensors.len())
}

/// Reads the model that a `config.json` describes.
///
/// # Errors
/// As for opening the directory.
pub fn config(text: &[u8]) -> Result<ModelSpec, ModelError> {
    let path = Path::new("config.json");
    let value = config::parse(path, text)?;
    family::read(&Fields::new(path, &value)?).map(|described| described.spec)
}

/// Reads what the files of sentence-transformers in a directory say about vectors.
///
/// # Errors
/// As for asking the opened directory.
pub fn sentence(directory: &Path) -> Result<SentenceConfig, ModelError> {
    sentence::look_over(directory);
    sentence::read(directory, Some(2))
}

/// Reads the settings of a `generation_config.json`.
///
/// # Errors
/// As for asking the opened directory.
pub fn generation(text: &[u8]) -> Result<Generation, ModelError> {
    generation::settings(Path::new("generation_config.json"), text)
}
