//! The models that a device has: a directory of model directories.

use crate::error::WorkerError;
use galaxy_model::ModelDir;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Where models are, if anywhere.
#[derive(Clone, Default, Debug)]
pub struct Models {
    dir: Option<PathBuf>,
}

impl Models {
    /// Looks into `dir`: model directories, or itself one.
    ///
    /// # Errors
    /// When it is no directory that we can read.
    pub fn new(dir: &Path) -> io::Result<Self> {
        // An absolute path has a base name, where "." has none.
        let dir = dir.canonicalize()?;
        std::fs::read_dir(&dir)?;
        Ok(Self { dir: Some(dir) })
    }

    /// Names and paths of what is there now.
    pub fn list(&self) -> Vec<(String, PathBuf)> {
        let named = |path: PathBuf| Some((path.file_name()?.to_str()?.to_owned(), path));
        let Some(dir) = &self.dir else { return Vec::new() };
        if dir.join("config.json").is_file() {
            return named(dir.clone()).into_iter().collect();
        }
        let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
        let mut found: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.join("config.json").is_file())
            .filter_map(named)
            .collect();
        found.sort();
        found
    }

    /// Opens the model that a plan names. A name is compared with what is there, and never used
    /// as a path.
    ///
    /// # Errors
    /// When it is not there, cannot be opened, or is not what the plan was made for.
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
        let model = ModelDir::open(path)?;
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
    fn a_name_is_never_a_path() {
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
        assert!(Models::new(&dir.path().join("missing")).is_err());
    }
}
