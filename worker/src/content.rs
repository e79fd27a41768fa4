//! Models that this device has no directory of: they come in pieces, from the coordinator and from other devices,
//! into a cache (ADR 0018).
//!
//! The coordinator names the content and sends its manifest; it does not matter then who sends the bytes, because
//! each piece is compared with its digest. The loader reads the model as if it were all there, and waits for pieces
//! that are not.

pub(crate) mod cache;
pub(crate) mod data;
pub(crate) mod error;
pub(crate) mod fetch;
pub(crate) mod links;
pub(crate) mod own;
pub(crate) mod proven;
pub(crate) mod service;
pub(crate) mod share;

pub use error::ContentError;

use crate::core::Core;
use crate::error::WorkerError;
use crate::tasks::blocking;
use data::{Data, PieceState};
use galaxy_common::Assignment;
use galaxy_graph::{
    holdings::{self, steps},
    operators::OperatorGraph,
};
use galaxy_model::{
    Matrix, ModelDir, ModelError, Vector, pieces::Pieces, quantise::of_fingerprint,
};
use links::ModelServer;
use std::{ops::Range, sync::Arc};
use tokio::sync::oneshot;

/// A model that is being fetched, and the coordinator that brings it.
pub(crate) struct Arriving {
    pub(crate) model: Arc<ModelDir>,
    pub(crate) data: Arc<Data>,
    pub(crate) supply: ModelServer,
}

/// Waits for the coordinator to bring the model of this fingerprint, until it can be opened.
pub(crate) async fn open(
    core: &Arc<Core>,
    waiting: oneshot::Receiver<ModelServer>,
    fingerprint: &str,
) -> Result<Arriving, WorkerError> {
    // The pieces are those of the files; quantisation happens as they are read.
    let (files, rounded) = of_fingerprint(fingerprint);
    let (mut supply, content, length) = links::offered(waiting, files).await?;
    let shared = core.clone();
    let kept = blocking(move || {
        let cache = shared.content.cache.as_ref().ok_or(WorkerError::Bug)?;
        Ok::<_, WorkerError>(cache.manifest(content)?)
    });
    let (manifest, fresh) = match kept.await?? {
        Some(manifest) => (manifest, None),
        None => {
            let (manifest, bytes) = links::manifest(&mut supply, content, length).await?;
            (manifest, Some(bytes))
        }
    };
    let shared = core.clone();
    let opened = blocking(move || {
        let cache = shared.content.cache.as_ref().ok_or(WorkerError::Bug)?;
        if let Some(bytes) = fresh {
            cache.keep_manifest(content, &bytes)?;
        }
        Ok::<_, WorkerError>(cache.model(content, manifest, rounded)?)
    });
    let (model, data) = opened.await??;
    Ok(Arriving { model, data, supply })
}

/// What may be dropped from the cache to make room.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evictable {
    /// Other models, and the pieces of this model, which is then fetched from the beginning.
    Anew,
    /// Other models only: pieces of this one stay, because it runs.
    Beside,
}

/// Makes room in the cache for `list`. Data that has to begin from nothing is opened again. None where there is no
/// room and this model's pieces must stay.
pub(crate) async fn room(
    core: &Arc<Core>,
    arriving: Arriving,
    list: &[u32],
    room: Evictable,
) -> Result<Option<Arriving>, WorkerError> {
    let (shared, list) = (core.clone(), list.to_vec());
    let made = blocking(move || {
        let Arriving { model, data, supply } = arriving;
        let cache = shared.content.cache.as_ref().ok_or(WorkerError::Bug)?;
        let absent = |piece: &u32| data.state(*piece) == PieceState::Absent;
        let mut missing: Vec<u32> = list.iter().copied().filter(absent).collect();
        missing.sort_unstable();
        let wanted = list.iter().map(|piece| data.pieces.bytes(*piece)).sum();
        if cache.room(&data, &missing, wanted, room)? {
            return Ok(Some(Arriving { model, data, supply }));
        }
        if room == Evictable::Beside {
            return Ok(None);
        }
        let (content, manifest) = (data.content, data.manifest.clone());
        let rounded = model.quantisation();
        drop((model, data));
        let (model, data) = cache.model(content, manifest, rounded)?;
        Ok::<_, WorkerError>(Some(Arriving { model, data, supply }))
    });
    made.await?
}

/// The pieces that a device of this assignment needs, in the order in which they should come, each once.
///
/// Vectors, which loading reads first; this rank's share of the tables; matrices in the order of loading; the other
/// shares of the tables. Every device needs the tables whole, and by the time that it wants the shares of others,
/// other devices have them: so the coordinator sends each about once.
///
/// # Errors
/// When the model lacks a tensor, which no opened model does.
pub(crate) fn order(
    model: &ModelDir,
    pieces: &Pieces,
    assignment: &Assignment,
    (rank, devices): (usize, usize),
) -> Result<Vec<u32>, ModelError> {
    let spec = model.spec();
    let mut list = Vec::new();
    let mut listed = vec![false; pieces.count() as usize];
    let mut add = |range: Range<u32>| {
        list.extend(range.filter(|piece| !std::mem::replace(&mut listed[*piece as usize], true)));
    };
    for which in Vector::all(spec) {
        add(model.vector_pieces(pieces, which)?);
    }
    for which in Matrix::all(spec) {
        // Every device holds these matrices whole.
        if let (Matrix::Patch | Matrix::ClassDense | Matrix::ClassOutput, Some(shape)) =
            (which, which.shape(spec))
        {
            add(model.matrix_pieces(pieces, which, 0..shape.0, 0..shape.1)?);
        }
    }
    let tables = model.table_pieces(pieces)?;
    let devices = devices.max(1) as u64;
    let share = |range: &Range<u32>, of: u64| {
        let at = |n: u64| range.start + (u64::from(range.end - range.start) * n / devices) as u32;
        at(of)..at(of + 1)
    };
    let rank = rank as u64 % devices;
    tables.iter().for_each(|table| add(share(table, rank)));
    for step in steps(&OperatorGraph::of(spec), &holdings::nothing(), assignment) {
        for part in step.new {
            add(model.matrix_pieces(pieces, part.matrix, part.inputs, part.outputs)?);
        }
    }
    for other in 1..devices {
        tables.iter().for_each(|table| add(share(table, (rank + other) % devices)));
    }
    Ok(list)
}
