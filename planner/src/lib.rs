//! Plans: from a model, measured devices and links, and a workload to the split that is predicted to
//! answer first, with reasons.
//!
//! Pure and deterministic: no files, no clock, no threads; equal inputs give equal plans.

mod closed;
mod costs;
mod draft;
mod memory;
mod predict;
mod request;
pub mod split;
pub mod synthetic;
#[cfg(test)]
mod testing;

pub use costs::ProfileCosts;
pub use request::{
    Advice, Allowed, DeviceShare, Offer, Planned, PlanningError, Prediction, Request, RunnerUp,
    Search, Workload,
};

/// Plans by `request.allowed.strategy`.
///
/// # Errors
/// When no device, no split or no memory does; the error says what is missing and where.
pub fn plan(request: &Request<'_>) -> Result<Planned, PlanningError> {
    let _ = request;
    Err(PlanningError::Nothing { why: "not written yet".into() })
}
