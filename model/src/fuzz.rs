//! Single decoders of [`crate::ModelDir::open`], for the fuzz targets: no part of the interface.

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

/// How many tensors the text of a safetensors header names.
///
/// # Errors
/// As opening the file.
pub fn header(text: &[u8]) -> Result<usize, HeaderProblem> {
    store::parse_header(text).map(|tensors| tensors.len())
}

/// What the text of a `config.json` describes.
///
/// # Errors
/// As opening the directory.
pub fn config(text: &[u8]) -> Result<ModelSpec, ModelError> {
    let path = Path::new("config.json");
    let value = config::parse(path, text)?;
    family::read(&Fields::new(path, &value)?).map(|described| described.spec)
}

/// What the files beside it say about vectors.
///
/// # Errors
/// As asking the opened directory.
pub fn sentence(directory: &Path) -> Result<SentenceConfig, ModelError> {
    sentence::look_over(directory);
    sentence::read(directory, Some(2))
}

/// What the text of a `generation_config.json` says of generating text.
///
/// # Errors
/// As asking the opened directory.
pub fn generation(text: &[u8]) -> Result<Generation, ModelError> {
    generation::settings(Path::new("generation_config.json"), text)
}
