//! Runs of layers, one behind another.

use super::LowerError;
use crate::program::Program;
use galaxy_common::{BatchShape, Plan, Rank, plan::Phase};
use galaxy_model::ModelSpec;

pub(super) fn program(
    _spec: &ModelSpec,
    plan: &Plan,
    _phase: Phase,
    _shape: &BatchShape,
    _rank: Rank,
) -> Result<Program, LowerError> {
    Err(LowerError::Past { segment: 0, strategy: plan.strategy })
}
