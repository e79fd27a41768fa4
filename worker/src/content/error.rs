//! Why a model cannot be fetched.

use galaxy_common::{Bytes, private::PrivateError};
use galaxy_model::ModelError;
use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Why a model cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// The coordinator did not call in time.
    #[error("the coordinator does not bring the model: it has not called within {after:?}")]
    NoCall {
        /// How long the worker waited.
        after: Duration,
    },
    /// The coordinator called and then sent nothing.
    #[error("the coordinator does not bring the model: it has said nothing for {after:?}")]
    Silent {
        /// How long the worker waited.
        after: Duration,
    },
    /// The connection with the coordinator broke, or the coordinator lacks a piece.
    #[error("the coordinator brings no more of the model: {why}")]
    Lost {
        /// The reason, for people.
        why: String,
    },
    /// The coordinator offers another model.
    #[error("the plan is for the model {want}, and the coordinator brings {have}")]
    Other {
        /// The fingerprint in the plan.
        want: String,
        /// The fingerprint in the offer.
        have: String,
    },
    /// A manifest that cannot be read, or is not the one that was offered.
    #[error("the manifest that the coordinator sends is not what it should be: {why}")]
    Manifest {
        /// What is wrong, for people.
        why: String,
    },
    /// A piece whose digest is wrong, from the coordinator itself.
    #[error(
        "the coordinator's files are not those of its manifest: piece {piece} is another. Were they changed or damaged? Restart the coordinator"
    )]
    Wrong {
        /// The number of the piece.
        piece: u32,
    },
    /// The model cannot be opened.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache cannot be used.
    #[error("the cache in {} cannot be used: {source}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Somebody else may use the cache, or it is not what it should be.
    #[error("the cache cannot be used: {0}; or give --cache another directory")]
    Private(#[from] PrivateError),
    /// The disk is full.
    #[error(
        "the disk has no room for what the device needs of {model}, {needs} in all: free some, or give --cache a directory on another disk"
    )]
    Full {
        /// The name of the model.
        model: String,
        /// Bytes of the whole model.
        needs: Bytes,
    },
    /// The cache's limit is too small for what one plan needs.
    #[error(
        "the cache in {} may hold {limit}, and this device needs {needed} for its part: raise --cache-bytes to {needed} or give it a smaller share", dir.display()
    )]
    Small {
        /// Bytes that this plan needs in the cache.
        needed: Bytes,
        /// The limit, as `--cache-bytes` sets it.
        limit: Bytes,
        /// The directory of the cache.
        dir: PathBuf,
    },
    /// Another worker uses the cache.
    #[error("another worker uses the cache in {}: give each its own with --cache", dir.display())]
    Taken {
        /// The directory of the cache.
        dir: PathBuf,
    },
}

impl ContentError {
    pub(super) fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }
    /// Whether the same placement may succeed later although nobody changes anything.
    pub(crate) fn retryable(&self) -> bool {
        matches!(self, Self::NoCall { .. } | Self::Silent { .. } | Self::Lost { .. })
    }
}
