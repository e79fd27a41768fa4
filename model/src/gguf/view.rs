//! The small files that a checkpoint has beside its weights, written for a GGUF file.

use super::Gguf;
use crate::error::ModelError;
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A temporary directory with the config and tokenizer of a GGUF file, removed when this is
/// dropped.
pub(crate) struct CheckpointView {
    directory: TempDir,
    file: PathBuf,
}

impl CheckpointView {
    /// Writes the files.
    ///
    /// # Errors
    /// When the GGUF file asks for something that is not supported, or the disk is full.
    pub(crate) fn write(gguf: &Gguf, path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: std::env::temp_dir(), source };
        let directory = tempfile::Builder::new().prefix("galaxy-gguf-").tempdir().map_err(io)?;
        let wrong = |why| ModelError::Gguf { path: path.to_owned(), why };
        let config = gguf.config().map_err(wrong)?;
        let put = |name: &str, json: &Json| {
            std::fs::write(directory.path().join(name), json.to_string()).map_err(io)
        };
        put("config.json", &config)?;
        for (name, json) in gguf.sentence().map_err(wrong)? {
            if let Some(inside) = Path::new(name).parent() {
                std::fs::create_dir_all(directory.path().join(inside)).map_err(io)?;
            }
            put(name, &json)?;
        }
        for layer in &gguf.dense {
            let place = directory.path().join(layer.module());
            std::fs::create_dir_all(&place).map_err(io)?;
            std::fs::write(place.join("config.json"), layer.config().to_string()).map_err(io)?;
            std::fs::write(place.join("model.safetensors"), layer.safetensors()).map_err(io)?;
        }
        put("generation_config.json", &gguf.generation_config())?;
        put("tokenizer_config.json", &gguf.tokenizer_config())?;
        if gguf.has_tokenizer() {
            put("tokenizer.json", &gguf.tokenizer().map_err(wrong)?)?;
        }
        Ok(Self { directory, file: path.to_owned() })
    }

    /// The directory with the files.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The GGUF file that they were written for.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }
}
