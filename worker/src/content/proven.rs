//! What is known of the model directories of this device that were compared with a manifest.

use crate::tasks::lock;
use galaxy_model::{ModelDir, manifest::Digest, proof::Proof};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// The directories that were compared in the life of this process, by fingerprint.
#[derive(Default)]
pub(crate) struct ProvenModels(Mutex<HashMap<String, Known>>);

/// A directory that was compared: its content, and the proof.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) content: Digest,
    pub(super) proof: Arc<Proof>,
}

impl ProvenModels {
    pub(super) fn get(&self, model: &ModelDir) -> Option<Known> {
        lock(&self.0).get(model.files_fingerprint()).cloned()
    }

    /// Keeps what was found of a directory, in place of what was known of it before.
    pub(super) fn keep(&self, model: &ModelDir, known: Known) {
        lock(&self.0).insert(model.files_fingerprint().to_owned(), known);
    }
}
