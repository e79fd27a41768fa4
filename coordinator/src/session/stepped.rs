//! A step that a sequence took part in, for its state and for the report of its request.

use crate::fleet::Run;
use galaxy_common::{BatchShape, CandidateCount, plan::Phase};
use std::{sync::Arc, time::Duration};

/// A step that ran.
pub(super) struct Stepped {
    pub(super) run: Arc<Run>,
    pub(super) phase: Phase,
    pub(super) shape: BatchShape,
    /// How many rows of this sequence were cached before.
    pub(super) context_len: u32,
    /// How many rows of this sequence were run.
    pub(super) rows: u32,
    /// How many candidates its last token took, if it got one.
    pub(super) candidates: Option<CandidateCount>,
    /// How long the sequence had waited.
    pub(super) queued: Duration,
}
