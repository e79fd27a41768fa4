//! Directories of models that this device has itself.
//!
//! A plan names a model by its fingerprint, which is of a sample of the weights. So what such a directory holds is
//! compared with the coordinator's manifest, each piece before it is computed with or given away. A coordinator is
//! asked for its manifest once in the life of a process; what was found right is stored in the cache, with the files
//! in which it was found.

use super::{ContentError, cache::Cache, links, proven::Known};
use crate::{core::Core, error::WorkerError, tasks::blocking};
use galaxy_model::{
    ModelDir,
    manifest::{Digest, Manifest},
    proof::Proof,
};
use std::sync::{Arc, atomic::Ordering};
use tokio::sync::oneshot;

/// Has `model` compared with its manifest as it is read, if that is known: the same files as before, or others. False
/// if the coordinator has to be asked.
pub(crate) async fn prove_again(
    core: &Arc<Core>,
    model: &Arc<ModelDir>,
) -> Result<bool, WorkerError> {
    let (shared, model) = (core.clone(), model.clone());
    let proven = blocking(move || {
        let Some(Known { content, proof }) = shared.content.own.get(&model) else {
            return Ok(false);
        };
        if proof.is_of(&model) {
            model.prove(proof);
        } else {
            begin(&shared, &model, content, proof.manifest().clone())?;
        }
        Ok::<_, WorkerError>(true)
    });
    proven.await?
}

/// Has `model` compared as it is read, with the manifest of the coordinator that was asked to call.
pub(crate) async fn prove(
    core: &Arc<Core>,
    model: &Arc<ModelDir>,
    waiting: oneshot::Receiver<links::ModelServer>,
) -> Result<(), WorkerError> {
    let (mut supply, content, length) = links::offered(waiting, model.files_fingerprint()).await?;
    let shared = core.clone();
    let kept = blocking(move || {
        let cache = usable(&shared)?;
        cache.manifest(content).unwrap_or_else(|error| not_kept(&error))
    });
    let manifest = match kept.await? {
        Some(manifest) => manifest,
        None => {
            let (manifest, bytes) = links::manifest(&mut supply, content, length).await?;
            let shared = core.clone();
            let keep = blocking(move || {
                let kept = usable(&shared).map(|cache| cache.keep_manifest(content, &bytes));
                kept.and_then(Result::err).map(|error| not_kept::<()>(&error));
            });
            keep.await?;
            manifest
        }
    };
    let (shared, model) = (core.clone(), model.clone());
    blocking(move || begin(&shared, &model, content, manifest)).await?
}

fn begin(
    core: &Core,
    model: &ModelDir,
    content: Digest,
    manifest: Manifest,
) -> Result<(), WorkerError> {
    let kept = usable(core).and_then(|cache| cache.proof(content));
    let proof = Arc::new(Proof::new(model, manifest, kept.as_deref())?);
    model.prove(proof.clone());
    core.content.own.keep(model, Known { content, proof });
    Ok(())
}

/// Compares the tables, which no loading reads, and stores what was found.
pub(crate) async fn finish(core: &Arc<Core>, model: &Arc<ModelDir>) -> Result<(), WorkerError> {
    let (shared, model) = (core.clone(), model.clone());
    let finished = blocking(move || {
        model.prove_tables(|| !shared.ending.load(Ordering::Relaxed))?;
        if let (Some(cache), Some(Known { content, proof })) =
            (usable(&shared), shared.content.own.get(&model))
            && let Err(error) = cache.keep_proof(content, &proof.to_bytes()?)
        {
            not_kept::<()>(&error);
        }
        Ok::<_, WorkerError>(())
    });
    finished.await?
}

/// The cache, where there is one and it can be used: a device with the model needs none.
fn usable(core: &Core) -> Option<&Cache> {
    let cache = core.content.cache.as_ref()?;
    match cache.take() {
        Ok(_) => Some(cache),
        Err(error) => not_kept(&error),
    }
}

fn not_kept<T>(error: &ContentError) -> Option<T> {
    tracing::warn!(%error, "what was compared of the model is not kept: it is compared again at the next start");
    None
}
