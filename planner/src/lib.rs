//! Plans: from a model, measured devices and links, and a workload to the split that is predicted to
//! answer first, with reasons.
//!
//! Pure and deterministic: no files, no clock, no threads; equal inputs give equal plans.

mod auto;
mod candidate;
mod climb;
mod cost_model;
mod costs;
mod cutting;
mod left_out;
mod links;
mod many;
mod memory;
pub mod paper;
mod policies;
mod predict;
mod ranked;
mod reasons;
mod rebalance;
mod request;
mod ring;
mod search;
pub mod split;
mod stages;
pub mod stream;
pub mod synthetic;
#[cfg(test)]
mod testing;
pub mod whatif;

use galaxy_common::Reading;

pub use costs::ProfileCosts;
pub use request::{
    Advice, Allowed, DeviceShare, Offer, Planned, PlanningError, Prediction, Request, RunnerUp,
    Search, Workload,
};

/// The plan of the strategy `request.allowed.strategy` for a request, with its reasons.
///
/// # Errors
/// When no device, no split or no memory is enough; the error says what is missing and where.
pub fn plan(request: &Request<'_>) -> Result<Planned, PlanningError> {
    check(request)?;
    match auto::plan(request) {
        // Weights that no memory holds come from disk.
        Err(PlanningError::Memory { .. }) if request.allowed.reading != Reading::Preload => {
            stream::plan(request)
        }
        Ok(found) if request.allowed.reading == Reading::Auto => {
            Ok(stream::or_faster(request, found))
        }
        planned => planned,
    }
}

/// Predicts the latency of a given plan, by the simulator: means over the workload's lengths. Its
/// `closed_form` repeats the latency.
///
/// # Errors
/// When a profile is missing, or the plan cannot be lowered.
pub fn predict(
    request: &Request<'_>,
    plan: &galaxy_common::Plan,
) -> Result<Prediction, PlanningError> {
    check(request)?;
    predict::predict(request, plan)
}

/// Nanoseconds that a decode step of each of these numbers of sequences is predicted to take under a plan, by the
/// simulator: means over the workload's lengths. A step gives each sequence a token. Empty where the workload generates
/// no tokens.
///
/// # Errors
/// When a profile is missing, or the plan cannot be lowered.
pub fn decode_steps(
    request: &Request<'_>,
    plan: &galaxy_common::Plan,
    sequences: &[u32],
) -> Result<Vec<(u32, f64)>, PlanningError> {
    check(request)?;
    predict::decode_steps(request, plan, sequences)
}

/// Refuses questions that have no answer, and profiles that cannot be used.
fn check(request: &Request<'_>) -> Result<(), PlanningError> {
    let nothing = |why: &str| Err(PlanningError::Nothing { why: why.to_owned() });
    let (allowed, workload) = (request.allowed, request.workload);
    if request.offers.is_empty() {
        return nothing("there is no device to plan for: name one in the cluster file");
    }
    if request.offers.len() > galaxy_common::plan::MAX_DEVICES {
        return nothing("there are more devices than a ring may have: leave some out");
    }
    let twice = |i: usize| request.offers[..i].iter().any(|o| o.name == request.offers[i].name);
    if let Some(i) = (0..request.offers.len()).find(|&i| twice(i)) {
        let why = format!("device {} is offered twice", request.offers[i].name);
        return Err(PlanningError::Nothing { why });
    }
    let weighs = |&(rows, share): &(u32, f64)| rows > 0 && share.is_finite() && share > 0.0;
    if workload.lengths.is_empty() || !workload.lengths.iter().all(weighs) {
        return nothing(
            "the workload needs lengths of at least one token, with weights above zero",
        );
    }
    if workload.texts == 0 {
        return nothing("the workload needs at least one text at once");
    }
    if allowed.wires.is_empty() || allowed.links.is_empty() {
        return nothing("at least one number type and one link type must be allowed");
    }
    if request.spec.layers == 0 || request.spec.heads == 0 || request.spec.kv_heads == 0 {
        return nothing("the model has no layers or no heads");
    }
    for offer in request.offers {
        request.profile.device(&offer.name)?.check(request.shape)?;
    }
    let offered = |name: &galaxy_common::DeviceName| request.offers.iter().any(|o| o.name == *name);
    for link in &request.profile.links {
        if offered(&link.from) && offered(&link.to) && allowed.links.contains(&link.link) {
            link.check()?;
        }
    }
    Ok(())
}
