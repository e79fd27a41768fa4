//! The fixed strategies: each gives one plan, or the reason why it has none.

use crate::{
    candidate,
    cutting::{Cutting, RowLayers, Transport, Units},
    request::{PlanningError, Request},
    ring::{By, Candidate, Ring, Rings, equal_parts},
    search::means,
    split::Split,
    stages,
};
use galaxy_common::{Exchange, Layout, Strategy};
use galaxy_graph::holdings::Cuts;

/// The most that plans may cost by the closed form to be looked at, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The limit of plans of stages.
    pub stages: f64,
    /// The limit of plans that divide everything among all devices.
    pub divided: f64,
}

impl Limits {
    /// No limits: every plan is looked at.
    pub const NONE: Self = Self { stages: f64::INFINITY, divided: f64::INFINITY };
}

/// The plan of a strategy, if it is within `limits`.
///
/// # Errors
/// When it has none that fits.
pub(crate) fn plan(
    rings: &mut Rings<'_>,
    strategy: Strategy,
    limits: Limits,
) -> Result<Candidate, PlanningError> {
    match strategy {
        Strategy::Local | Strategy::Auto => local(rings),
        Strategy::Galaxy => ring(rings, strategy, RowLayers::default(), By::Paper, limits.divided),
        Strategy::Sequence => {
            let layers = rings.request.spec.layers;
            ring(
                rings,
                strategy,
                RowLayers { attention: layers, mlp: layers, whole: false },
                By::Equal,
                limits.divided,
            )
        }
        Strategy::Megatron => megatron(rings, limits.divided),
        Strategy::Pipeline => pipeline(rings, limits.stages),
    }
}

/// Of two reasons why there is no plan, the one that the lesser amount of memory would mend.
pub(crate) fn nearer(old: Option<PlanningError>, new: PlanningError) -> Option<PlanningError> {
    let missing = |error: &PlanningError| match error {
        PlanningError::Memory { missing, .. } => missing.0,
        _ => u64::MAX,
    };
    Some(match old {
        Some(old) if missing(&old) <= missing(&new) => old,
        _ => new,
    })
}

/// The plan of one device: the fastest by the closed form that holds the model.
fn local(rings: &mut Rings<'_>) -> Result<Candidate, PlanningError> {
    let n = rings.request.offers.len();
    let alone = means(rings.request, 1)[0];
    let mut best: Option<Candidate> = None;
    let mut least: Option<PlanningError> = None;
    for member in 0..n {
        let ring = Ring { members: &[member], means: alone, by_rows: RowLayers::default() };
        match rings.fit(ring, Strategy::Local, By::Exact) {
            Ok(found) if best.as_ref().is_none_or(|b| found.closed_form < b.closed_form) => {
                best = Some(found);
            }
            Ok(_) => {}
            Err(error) => least = nearer(least, error),
        }
    }
    let nothing = || PlanningError::Nothing { why: "there is no device to plan for".into() };
    best.ok_or_else(|| least.unwrap_or_else(nothing))
}

/// The plan of all devices in the order of the file; tiles by the closed form where none are given.
fn ring(
    rings: &mut Rings<'_>,
    strategy: Strategy,
    by_rows: RowLayers,
    by: By,
    limit: f64,
) -> Result<Candidate, PlanningError> {
    let members: Vec<usize> = (0..rings.request.offers.len()).collect();
    // The best by the closed form first: mostly its programs fit too.
    let mut ways: Vec<(f64, Transport)> = plain(rings.request, members.len())
        .into_iter()
        .map(|means| (rings.price_by(Ring { members: &members, means, by_rows }, by), means))
        .collect();
    ways.sort_by(|a, b| a.0.total_cmp(&b.0));
    if ways.first().is_some_and(|choice| choice.0 > limit) {
        return Err(behind(strategy));
    }
    let mut error = None;
    for (_, means) in ways {
        let ring = Ring { members: &members, means, by_rows };
        match rings.fit(ring, strategy, by) {
            Ok(found) => return Ok(found),
            Err(why) => error = nearer(error, why),
        }
        if rings.hopeless(ring, strategy, by) {
            break;
        }
    }
    let nothing = || PlanningError::Nothing { why: "there is no device to plan for".into() };
    Err(error.unwrap_or_else(nothing))
}

/// The error of a plan that costs too much to be looked at.
fn behind(strategy: Strategy) -> PlanningError {
    PlanningError::Nothing { why: format!("{strategy} costs more than what is known") }
}

/// The ways to carry tiles of a strategy that knows rings of neighbours only, with the first wire
/// format and link type.
fn plain(request: &Request<'_>, devices: usize) -> Vec<Transport> {
    let mut all = means(request, devices);
    let (wire, link) = (request.allowed.wires[0], request.allowed.links[0]);
    let exchange = request.allowed.exchange.unwrap_or(Exchange::Ring);
    all.retain(|m| m.wire == wire && m.link == link && m.exchange == exchange);
    all
}

/// The plan that gives every device an equal part of everything.
fn megatron(rings: &mut Rings<'_>, limit: f64) -> Result<Candidate, PlanningError> {
    let request = rings.request;
    let n = request.offers.len();
    // Nothing of it is cut into tiles.
    let means = Transport { tiles: 1, ..plain(request, n)[0] };
    let members: Vec<usize> = (0..n).collect();
    let ring = Ring { members: &members, means, by_rows: RowLayers::default() };
    // No split of a ring costs more than its equal one.
    if limit.is_finite() && rings.price_below(ring, limit).is_none() {
        return Err(behind(Strategy::Megatron));
    }
    let extent = request.spec.extent();
    let equal = |total: u32| equal_parts(total as usize, n);
    let Cuts { heads, columns } = rings.cuts;
    let split = Split {
        heads: equal(extent.heads.div_ceil(heads)),
        columns: equal(extent.intermediate.div_ceil(columns)),
        vocabulary: equal(extent.vocabulary),
        rows: vec![1; n],
        cost: 0.0,
    };
    let units = Units { heads, columns, vocabulary: 1, rows: n as u32 };
    let cutting = Cutting { devices: n, units, means, by_rows: RowLayers::default() };
    let strategy = Strategy::Megatron;
    let plan = candidate::ring(request, strategy, &members, cutting, &split);
    let needs = candidate::needs(request, &plan)?;
    if !candidate::above(&plan, &needs).is_empty() {
        return Err(candidate::too_large(strategy, &plan, &needs));
    }
    // The closed form is that of a ring; the simulator knows better.
    let closed_form = rings.price(ring).unwrap_or(0.0);
    Ok(Candidate { plan, needs, closed_form })
}

fn pipeline(rings: &mut Rings<'_>, limit: f64) -> Result<Candidate, PlanningError> {
    let request = rings.request;
    if request.offers.len() == 1 || request.spec.layers == 1 {
        let mut found = local(rings)?;
        found.plan.strategy = Strategy::Pipeline;
        found.plan.layout = Layout::Stages;
        return Ok(found);
    }
    let mut best: Option<Candidate> = None;
    let mut error = None;
    // The most tiles are mostly the best. Where rows see all others one text passes in one part, and
    // tiles are for batches of several.
    let parts = request.spec.causal || rings.texts > 1;
    let ways = plain(request, request.offers.len()).into_iter().rev();
    for means in ways.take(if parts { usize::MAX } else { 1 }) {
        let means = Transport { exchange: Exchange::Ring, ..means };
        let limit = best.as_ref().map_or(limit, |b| b.closed_form);
        match stages::plan(rings, means, limit) {
            Ok(found) => best = Some(found),
            Err(why) => error = Some(why),
        }
    }
    let nothing = || PlanningError::Nothing { why: "no tiles are allowed".into() };
    best.ok_or_else(|| error.unwrap_or_else(nothing))
}
