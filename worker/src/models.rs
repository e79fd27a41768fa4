//! The models that a device has: a directory of model directories and GGUF files.

use crate::error::WorkerError;
use galaxy_model::{ModelDir, gguf_file, quantise::of_fingerprint};
use std::{
    io,
    path::{Path, PathBuf},
};

/// The directory where this device has its models; none if it has none.
#[derive(Clone, Default, Debug)]
pub struct Models {
    dir: Option<PathBuf>,
}

impl Models {
    /// The models in `dir`: model directories and GGUF files, or itself one of them.
    ///
    /// # Errors
    /// When `dir` cannot be read.
    pub fn new(dir: &Path) -> io::Result<Self> {
        // An absolute path has a base name, where "." has none.
        let dir = dir.canonicalize()?;
        if gguf_file(&dir).is_none() {
            std::fs::read_dir(&dir)?;
        }
        Ok(Self { dir: Some(dir) })
    }

    /// The names and paths of the models that are there now.
    pub fn list(&self) -> Vec<(String, PathBuf)> {
        let named = |path: PathBuf| Some((path.file_name()?.to_str()?.to_owned(), path));
        let model = |path: PathBuf| match path.join("config.json").is_file() {
            true => named(path),
            false => named(gguf_file(&path)?),
        };
        let Some(dir) = &self.dir else { return Vec::new() };
        if dir.is_file() || dir.join("config.json").is_file() {
            return model(dir.clone()).into_iter().collect();
        }
        let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
        let entries = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<_> = entries.filter_map(model).collect();
        found.sort();
        found.dedup();
        found
    }

    /// Opens the model that a plan names. A name is compared with what is there, and never used
    /// as a path.
    ///
    /// # Errors
    /// When it is not there, cannot be opened, or is not the one that the plan was computed for.
    pub fn open(&self, name: &str, fingerprint: &str) -> Result<ModelDir, WorkerError> {
        let found = self.list();
        let Some((_, path)) = found.iter().find(|(found, _)| found == name) else {
            let known: Vec<_> = found.into_iter().map(|(name, _)| name).collect();
            return Err(WorkerError::UnknownModel {
                name: name.to_owned(),
                place: self.dir.as_ref().map_or("no directory".into(), |d| d.display().to_string()),
                known: if known.is_empty() { "none".to_owned() } else { known.join(", ") },
            });
        };
        let (_, rounded) = of_fingerprint(fingerprint);
        let model = ModelDir::open(path)?.quantised_to(rounded)?;
        if model.fingerprint() != fingerprint {
            return Err(WorkerError::Fingerprint {
                name: name.to_owned(),
                have: model.fingerprint().to_owned(),
                want: fingerprint.to_owned(),
            });
        }
        Ok(model)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn model_names_that_are_paths_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("models");
        for model in ["models/a", "models/b", "secret"] {
            std::fs::create_dir_all(dir.path().join(model)).unwrap();
            std::fs::write(dir.path().join(model).join("config.json"), "{}").unwrap();
        }
        std::fs::create_dir_all(inside.join("empty")).unwrap();
        let models = Models::new(&inside).unwrap();
        let names: Vec<_> = models.list().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b"]);
        for bad in ["../secret", "secret", "", ".", "a/../b", "/"] {
            let error = models.open(bad, "").err().unwrap();
            assert!(matches!(error, WorkerError::UnknownModel { .. }), "{bad}");
            assert!(error.to_string().contains("a, b"), "{error}");
        }
        let one = Models::new(&inside.join("a")).unwrap();
        assert_eq!(one.list()[0].0, "a");
        let gguf = |name: &str| std::fs::write(inside.join(name), "GGUF").unwrap();
        for name in ["m.gguf", "empty/n.gguf", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf"] {
            gguf(name);
        }
        let names: Vec<_> = models.list().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b", "m.gguf", "n.gguf", "s-00001-of-00002.gguf"]);
        let one = Models::new(&inside.join("m.gguf")).unwrap();
        assert_eq!(one.list()[0].0, "m.gguf");
        assert!(Models::new(&dir.path().join("missing")).is_err());
    }
}
