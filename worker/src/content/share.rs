//! Pieces for other devices: of the model that this one has a place with, or is about to.

use super::data::Data;
use galaxy_model::{ModelDir, ModelError, pieces::Pieces};
use galaxy_proto::v1;
use std::sync::Arc;

/// The most devices that are served at one time; others go to the coordinator.
pub(crate) const CALLERS: usize = 16;

/// The pieces that this device can give to others.
#[derive(Clone)]
pub(crate) enum Shared {
    /// The data that has come into the cache.
    Cached(Arc<Data>),
    /// A model directory of this device. Each piece is compared with the manifest before it is given, and again by
    /// the device that takes it.
    Own(Arc<ModelDir>, Arc<Pieces>),
}

impl Shared {
    /// The pieces of a model directory of this device.
    pub(crate) fn own(model: Arc<ModelDir>) -> Result<Self, ModelError> {
        let pieces = Arc::new(model.pieces()?);
        Ok(Self::Own(model, pieces))
    }

    pub(super) fn is(&self, wants: &v1::Wants) -> bool {
        match self {
            Self::Cached(data) => data.content.0[..] == wants.content[..],
            Self::Own(model, _) => model.files_fingerprint() == wants.fingerprint,
        }
    }

    /// A bit for each piece that is there, and a number that grows when there are more.
    pub(super) fn holding(&self) -> (u64, Vec<u8>) {
        match self {
            Self::Cached(data) => data.holding(),
            Self::Own(_, pieces) => (0, vec![0xff; pieces.count().div_ceil(8) as usize]),
        }
    }
    pub(super) fn arrived(&self) -> u64 {
        match self {
            Self::Cached(data) => data.arrived(),
            Self::Own(..) => 0,
        }
    }

    /// The bytes of a piece; empty if it is not there, cannot be read or has a wrong digest.
    pub(super) fn read(&self, piece: u32) -> Vec<u8> {
        match self {
            Self::Cached(data) => data.read(piece).ok().flatten().unwrap_or_default(),
            Self::Own(model, pieces) => {
                let mut bytes = Vec::new();
                match model.read_piece(pieces, piece, &mut bytes) {
                    Ok(()) => bytes,
                    Err(error) => {
                        tracing::debug!(%error, "no piece is given");
                        Vec::new()
                    }
                }
            }
        }
    }
}
