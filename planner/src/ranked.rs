//! A plan that was simulated.

use crate::{
    predict,
    request::{PlanningError, Prediction, Request},
    ring::Candidate,
};

/// A plan with its prediction by the simulator.
#[derive(Clone, Debug)]
pub(crate) struct Ranked {
    pub candidate: Candidate,
    pub prediction: Prediction,
}

pub(crate) fn rank(request: &Request<'_>, candidate: Candidate) -> Result<Ranked, PlanningError> {
    let mut prediction = predict::predict(request, &candidate.plan)?;
    prediction.closed_form = candidate.closed_form;
    Ok(Ranked { candidate, prediction })
}

pub(crate) fn least(ranked: &[Ranked], of: impl Fn(&Ranked) -> f64) -> f64 {
    ranked.iter().map(of).fold(f64::INFINITY, f64::min)
}
