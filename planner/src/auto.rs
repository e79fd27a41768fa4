//! `auto`: the best of everything that may be chosen.

use crate::{
    draft, policies, predict, reasons,
    request::{Planned, PlanningError, Prediction, Request, RunnerUp, Search},
    ring::{By, Candidate, Rings},
    search,
};
use galaxy_common::Strategy;
use galaxy_graph::budget;

/// Rings that are simulated, few devices and many.
const SIMULATED: [usize; 2] = [6, 4];

/// A plan with what the simulator says of it.
#[derive(Clone, Debug)]
pub(crate) struct Ranked {
    pub candidate: Candidate,
    pub prediction: Prediction,
}

/// Plans by the strategy that is asked for.
///
/// # Errors
/// As [`crate::plan`].
pub(crate) fn plan(request: &Request<'_>) -> Result<Planned, PlanningError> {
    let mut rings = Rings::new(request)?;
    let strategy = request.allowed.strategy;
    let mut search = Search::default();
    let mut ranked = if strategy == Strategy::Auto {
        auto(&mut rings, &mut search)?
    } else {
        let candidate = policies::plan(&mut rings, strategy)?;
        search.simulated = 1;
        vec![rank(request, candidate)?]
    };
    // The order of finding decides between equals.
    ranked.sort_by(|a, b| a.prediction.latency.total_cmp(&b.prediction.latency));
    let first = fitting(request, &mut ranked)?;
    ranked.retain(|r| reasons::another(&r.candidate.plan, &first.candidate.plan));
    let other = fitting(request, &mut ranked).ok();
    let left_out = reasons::left_out(&mut rings, &first);
    let advice = match strategy {
        Strategy::Auto => reasons::advice(&mut rings, &first),
        _ => Vec::new(),
    };
    search.splits = rings.splits;
    let runner_up = other.map(|other| RunnerUp {
        what: reasons::what(&other.candidate.plan),
        latency: other.prediction.latency,
        why: reasons::why(&first, &other),
        plan: other.candidate.plan,
    });
    Ok(Planned {
        what: reasons::what(&first.candidate.plan),
        prediction: first.prediction,
        needs: first.candidate.needs,
        plan: first.candidate.plan,
        left_out,
        runner_up,
        advice,
        search,
    })
}

/// Takes the first that fits, with all its layers lowered. Few layers, or none where a plan stays
/// far below what is granted, were enough to look for it.
fn fitting(request: &Request<'_>, ranked: &mut Vec<Ranked>) -> Result<Ranked, PlanningError> {
    let mut error = None;
    while !ranked.is_empty() {
        let mut first = ranked.remove(0);
        let plan = &first.candidate.plan;
        first.candidate.needs = budget::needs_all(request.spec, request.matrix_width, plan)?;
        if draft::above(plan, &first.candidate.needs).is_empty() {
            return Ok(first);
        }
        error = Some(draft::too_large(plan.strategy, plan, &first.candidate.needs));
    }
    Err(error.unwrap_or(PlanningError::Nothing { why: "there is no candidate".into() }))
}

fn rank(request: &Request<'_>, candidate: Candidate) -> Result<Ranked, PlanningError> {
    let mut prediction = predict::predict(request, &candidate.plan)?;
    prediction.closed_form = candidate.closed_form;
    Ok(Ranked { candidate, prediction })
}

/// All candidates that fit, simulated.
fn auto(rings: &mut Rings<'_>, search: &mut Search) -> Result<Vec<Ranked>, PlanningError> {
    let request = rings.request;
    let many = request.offers.len() > search::ALL_SETS;
    let most = SIMULATED[usize::from(many)];
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut keep = |mut candidate: Candidate| {
        candidate.plan.strategy = Strategy::Auto;
        if !candidates.iter().any(|c| c.plan == candidate.plan) {
            candidates.push(candidate);
        }
    };
    let mut error = None;
    for priced in search::best(rings, most, search) {
        match rings.fit(priced.ring(), Strategy::Auto, By::Exact) {
            Ok(candidate) => keep(candidate),
            Err(why) => error = policies::nearer(error, why),
        }
    }
    let given = [
        Strategy::Local,
        Strategy::Galaxy,
        Strategy::Megatron,
        Strategy::Sequence,
        Strategy::Pipeline,
    ];
    for strategy in given {
        match policies::plan(rings, strategy) {
            Ok(candidate) => keep(candidate),
            Err(why) => error = policies::nearer(error, why),
        }
    }
    let mut ranked: Vec<Ranked> = Vec::new();
    for candidate in candidates {
        // What cannot be lowered is no candidate.
        match rank(request, candidate) {
            Ok(candidate) => ranked.push(candidate),
            Err(why) => error = policies::nearer(error, why),
        }
    }
    search.simulated = ranked.len() as u64;
    if ranked.is_empty() {
        return Err(reasons::nothing_fits(rings, error));
    }
    Ok(ranked)
}
