//! `auto`: the best of everything that may be chosen.

use crate::{
    candidate, climb, left_out, many, policies,
    ranked::{Ranked, least, rank},
    reasons, rebalance,
    request::{Offer, Planned, PlanningError, Request, RunnerUp, Search, Workload},
    ring::{By, Candidate, Rings},
    search,
};
use galaxy_common::Strategy;

/// How many rings of few devices are simulated.
const SIMULATED: usize = 6;

/// How many rings of many devices are simulated: where the closed form sees all that is done, and where it does
/// not.
const SIMULATED_OF_MANY: [usize; 2] = [8, 10];
/// How many times the cost of the best by the closed form these may cost, in the same two cases.
const BEHIND: [f64; 2] = [1.25, 1.4];
/// Of many devices, a strategy that divides all of its work among all of them is looked at if it costs no more
/// than this many times the best.
const DIVIDED: f64 = 1.6;

/// How many times the latency of the best that was simulated stages may cost by their closed form, and still be
/// looked at: they are about as fast as it says.
const STAGES: f64 = 1.1;

/// The plan of the strategy that is asked for, with its reasons.
///
/// # Errors
/// As [`crate::plan`].
pub(crate) fn plan(request: &Request<'_>) -> Result<Planned, PlanningError> {
    let mut rings = Rings::new(request)?;
    let strategy = request.allowed.strategy;
    let mut search = Search::default();
    let reading = rings.request.workload;
    // Where tokens are generated, plans for one row at a time are candidates, too.
    let row = Workload { lengths: vec![(1, 1.0)], texts: 1, generated: 0, ..reading.clone() };
    let rows = Request { workload: &row, ..*request };
    let mut single = Rings::new(&rows)?;
    let mut ranked = if strategy == Strategy::Auto {
        let found = auto(request, &mut rings, &[], &mut search);
        if makes(request) {
            let known = found.as_deref().unwrap_or_default();
            match (auto(request, &mut single, known, &mut search), found) {
                (Ok(more), Ok(mut found)) => {
                    found.extend(more);
                    found
                }
                (Ok(found), Err(_)) | (Err(_), Ok(found)) => found,
                (Err(_), Err(error)) => return Err(error),
            }
        } else {
            found?
        }
    } else {
        let candidate = policies::plan(&mut rings, strategy, policies::Limits::NONE)?;
        search.simulated = 1;
        vec![rank(request, candidate)?]
    };
    // The order of finding decides between equals.
    ranked.sort_by(|a, b| a.prediction.latency.total_cmp(&b.prediction.latency));
    let first = fitting(request, &mut ranked)?;
    let other = |ranked: &Ranked| reasons::another(&ranked.candidate.plan, &first.candidate.plan);
    let other = ranked.into_iter().find(other);
    // Reasons are those of what takes longer.
    let made = f64::from(request.generated_tokens(&first.candidate.plan)) * first.prediction.token;
    let mut rings = if made > first.prediction.latency / 2.0 { single } else { rings };
    let left_out = left_out::left_out(&mut rings, &first);
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

/// Takes the first plan that fits. Plans that stay far below what is granted were not lowered so far.
fn fitting(request: &Request<'_>, ranked: &mut Vec<Ranked>) -> Result<Ranked, PlanningError> {
    let mut error = None;
    while !ranked.is_empty() {
        let mut first = ranked.remove(0);
        let plan = &first.candidate.plan;
        if first.candidate.needs.is_empty() {
            first.candidate.needs = candidate::needs(request, plan)?;
        }
        if candidate::above(plan, &first.candidate.needs).is_empty() {
            return Ok(first);
        }
        error = Some(candidate::too_large(plan.strategy, plan, &first.candidate.needs));
    }
    Err(error.unwrap_or(PlanningError::Nothing { why: "there is no candidate".into() }))
}

/// Whether tokens are generated.
fn makes(request: &Request<'_>) -> bool {
    request.workload.generated > 0 && request.allowed.cache.rows > 0
}

/// The candidates among the fastest devices, as many of these as all sets are searched of; without those in
/// `known`.
fn of_the_fastest(
    request: &Request<'_>,
    rings: &mut Rings<'_>,
    known: &[Ranked],
    search: &mut Search,
) -> Vec<Ranked> {
    let mut fastest = many::orders(rings)[0][..search::ALL_SETS].to_vec();
    fastest.sort_unstable();
    let offers: Vec<Offer> = fastest.iter().map(|&d| request.offers[d].clone()).collect();
    let read = Request { offers: &offers, ..*request };
    let priced = Request { offers: &offers, ..*rings.request };
    let mut own = Search::default();
    let found = Rings::new(&priced).map_err(PlanningError::from);
    let found = found.and_then(|mut fewer| candidates(&read, &mut fewer, known, &mut own));
    search.subsets += own.subsets;
    search.simulated += own.simulated;
    // What does not fit on them may fit on more.
    found.unwrap_or_default()
}

/// All candidates that fit, simulated for `request`, without those in `known`: of many devices those of all, and
/// of the fastest, so that one more device does not make a plan worse.
fn auto(
    request: &Request<'_>,
    rings: &mut Rings<'_>,
    known: &[Ranked],
    search: &mut Search,
) -> Result<Vec<Ranked>, PlanningError> {
    let all = candidates(request, rings, known, search);
    if request.offers.len() <= search::ALL_SETS {
        return all;
    }
    let fastest = of_the_fastest(request, rings, known, search);
    match all {
        Err(error) if fastest.is_empty() => Err(error),
        all => {
            let mut found = all.unwrap_or_default();
            found.extend(fastest);
            Ok(found)
        }
    }
}

/// The candidates that are found among `rings` as they are, without those in `known`.
fn candidates(
    request: &Request<'_>,
    rings: &mut Rings<'_>,
    known: &[Ranked],
    search: &mut Search,
) -> Result<Vec<Ranked>, PlanningError> {
    let mut ranked: Vec<Ranked> = Vec::new();
    let few = request.offers.len() <= search::ALL_SETS;
    // The closed form assumes rows that are divided.
    let unseen = usize::from(makes(request) || request.texts() > 1);
    let mut error = None;
    let mut keep = |found: Result<Candidate, PlanningError>, ranked: &mut Vec<Ranked>| {
        let found = found.and_then(|mut candidate| {
            candidate.plan.strategy = Strategy::Auto;
            let all = || ranked.iter().chain(known);
            let known = all().any(|r| r.candidate.plan == candidate.plan);
            // What cannot be lowered is no candidate.
            if known { Ok(None) } else { rank(request, candidate).map(Some) }
        });
        match found {
            Ok(found) => ranked.extend(found),
            Err(why) => error = policies::nearer(error.take(), why),
        }
    };
    let [found, mut apart] = match few {
        true => [search::best(rings, SIMULATED, search), Vec::new()],
        false => many::best(rings, search),
    };
    for priced in found {
        // Those far behind are there for the case that none of the others fits.
        let best = least(&ranked, |r| r.candidate.closed_form);
        if priced.cost <= best * search::MARGIN {
            keep(rings.fit(priced.ring(), Strategy::Auto, By::Exact), &mut ranked);
        }
    }
    apart.truncate(SIMULATED_OF_MANY[unseen]);
    for priced in apart {
        let best = least(&ranked, |r| r.candidate.closed_form);
        if priced.cost <= best * BEHIND[unseen] {
            keep(rings.fit(priced.ring(), Strategy::Auto, By::Exact), &mut ranked);
        }
    }
    if few && unseen > 0 {
        for priced in search::of_each_size(rings) {
            keep(rings.fit(priced.ring(), Strategy::Auto, By::Exact), &mut ranked);
        }
    }
    let closed = least(&ranked, |r| r.candidate.closed_form);
    for strategy in Strategy::ALL.into_iter().filter(|&s| s != Strategy::Auto) {
        let best = least(&ranked, |r| r.prediction.latency);
        let limits = policies::Limits {
            stages: best * STAGES,
            divided: if few { f64::INFINITY } else { closed * DIVIDED },
        };
        keep(policies::plan(rings, strategy, limits), &mut ranked);
    }
    search.simulated += ranked.len() as u64;
    if !few {
        let better = climb::rings(request, rings, &ranked, &mut search.simulated);
        ranked.extend(better);
    }
    let better = rebalance::rows(request, &ranked, &mut search.simulated);
    ranked.extend(better);
    if ranked.is_empty() {
        return Err(reasons::nothing_fits(rings, error));
    }
    Ok(ranked)
}
