//! Candidates: splits in units become plans, and plans are checked against what devices grant.

use crate::{
    cutting::{Cutting, RowLayers, Transport},
    request::{Offer, PlanningError, Request},
    split::Split,
};
use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DevicePlan, Exchange, Layer, Layout, Mode, Modes, Plan,
    Span, Strategy, Unit,
};
use galaxy_graph::{LowerError, budget, budget::Needs};

/// Spans of `sizes` units each, one behind another, cut off at `all`.
fn spans<U: Unit>(sizes: &[usize], unit: u32, all: u32) -> Vec<Span<U>> {
    let mut at = 0;
    let span = |&size: &usize| {
        let from = at;
        at = (at + unit.saturating_mul(size as u32)).min(all);
        if size == 0 { Span::empty() } else { Span::new(from, at) }
    };
    sizes.iter().map(span).collect()
}

/// The modes of layers of which the first ones are cut by rows.
pub(crate) fn modes(layers: u32, by_rows: RowLayers) -> Vec<Modes> {
    let mut edges = vec![0, by_rows.attention.min(layers), by_rows.mlp.min(layers), layers];
    edges.sort_unstable();
    edges.dedup();
    let mode = |rows: bool| if rows { Mode::Sequence } else { Mode::Tensor };
    let run = |pair: &[u32]| Modes {
        layers: Span::<Layer>::new(pair[0], pair[1]),
        attention: mode(pair[0] < by_rows.attention),
        mlp: mode(pair[0] < by_rows.mlp),
    };
    edges.windows(2).map(run).collect()
}

/// A plan of the layout ring, or replicated, of these devices in this order.
pub(crate) fn ring(
    request: &Request<'_>,
    strategy: Strategy,
    members: &[usize],
    cutting: Cutting,
    split: &Split,
) -> Plan {
    let Cutting { units, means, by_rows, .. } = cutting;
    let spec = request.spec;
    let extent = spec.extent();
    let heads = spans(&split.heads, units.heads, extent.heads);
    let columns = spans(&split.columns, units.columns, extent.intermediate);
    let vocabulary = spans(&split.vocabulary, units.vocabulary, extent.vocabulary);
    let modes = modes(spec.layers, by_rows);
    let ring = members.iter().enumerate().map(|(at, &member)| {
        let rows = split.rows[at] as u32;
        let whole = |mode: Mode| mode == Mode::Sequence;
        let blocks = modes.iter().map(|run| BlockAssignment {
            layers: run.layers,
            heads: match (whole(run.attention), rows > 0) {
                (false, _) => heads[at],
                (true, true) => Span::first(extent.heads),
                (true, false) => Span::empty(),
            },
            columns: match (whole(run.mlp), rows > 0) {
                (false, _) => columns[at],
                (true, true) => Span::first(extent.intermediate),
                (true, false) => Span::empty(),
            },
        });
        let part =
            Assignment { blocks: blocks.collect(), row_weight: rows, vocabulary: vocabulary[at] };
        device(&request.offers[member], part)
    });
    // A device without a part in anything does not stand in a ring.
    let ring = ring.filter(|d| d.prefill.in_layers() || !d.prefill.vocabulary.is_empty()).collect();
    finish(request, strategy, strategy.layout(), modes, means, ring)
}

/// A plan of stages: so many layers of each device, in this order.
pub(crate) fn stages(
    request: &Request<'_>,
    members: &[usize],
    layers: &[u32],
    vocabulary: &[Span<galaxy_common::Token>],
    means: Transport,
) -> Plan {
    let spec = request.spec;
    let mut at = 0;
    let ring = members.iter().zip(layers).enumerate().map(|(place, (&member, &own))| {
        let span = Span::<Layer>::new(at, at + own);
        at += own;
        let part = Assignment {
            blocks: vec![BlockAssignment {
                layers: span,
                heads: Span::first(spec.heads),
                columns: Span::first(spec.intermediate),
            }],
            row_weight: u32::from(place + 1 == members.len()),
            vocabulary: vocabulary[place],
        };
        device(&request.offers[member], part)
    });
    let ring = ring.collect();
    let modes = Modes::uniform(spec.layers, Mode::Tensor);
    finish(request, Strategy::Pipeline, Layout::Stages, modes, means, ring)
}

fn device(offer: &Offer, part: Assignment) -> DevicePlan {
    DevicePlan {
        name: offer.name.clone(),
        budget: offer.budget,
        threads: offer.threads,
        prefill: part.clone(),
        decode: part,
        streaming: None,
    }
}

fn finish(
    request: &Request<'_>,
    strategy: Strategy,
    layout: Layout,
    modes: Vec<Modes>,
    means: Transport,
    ring: Vec<DevicePlan>,
) -> Plan {
    // Alone, tiles and links are nothing.
    let alone = ring.len() == 1;
    Plan {
        model: request.model.to_owned(),
        fingerprint: request.fingerprint.to_owned(),
        strategy,
        layout,
        modes,
        exchange: if alone { Exchange::Ring } else { means.exchange },
        link: means.link,
        wire: means.wire,
        activations: request.formats.activations(),
        tiles: if alone { 1 } else { means.tiles },
        max_rows: request.allowed.max_rows,
        cache: request.allowed.cache,
        ring,
    }
}

/// What each device of a plan needs.
///
/// # Errors
/// When the plan cannot be lowered.
pub(crate) fn needs(request: &Request<'_>, plan: &Plan) -> Result<Vec<Needs>, LowerError> {
    budget::needs_all(request.spec, request.formats, plan)
}

/// By how much devices of a plan are above what they grant: (place, bytes).
pub(crate) fn above(plan: &Plan, needs: &[Needs]) -> Vec<(usize, u64)> {
    let each = plan.ring.iter().zip(needs).enumerate();
    each.filter_map(|(at, (device, needs))| {
        let above = needs.total().0.checked_sub(device.budget.0).filter(|&b| b > 0)?;
        Some((at, above))
    })
    .collect()
}

/// The error of a plan that does not fit.
pub(crate) fn too_large(strategy: Strategy, plan: &Plan, needs: &[Needs]) -> PlanningError {
    let worst =
        above(plan, needs).into_iter().max_by_key(|&(at, bytes)| (bytes, std::cmp::Reverse(at)));
    let (at, bytes) = worst.unwrap_or((0, 0));
    let (device, need) = (&plan.ring[at], needs[at]);
    PlanningError::Memory {
        strategy,
        device: Some(device.name.clone()),
        missing: Bytes(bytes),
        what: format!(
            "it needs {} ({} of weights) and grants {}: raise its memory to {}, add devices, or lower max_rows",
            need.total(),
            need.weights,
            device.budget,
            need.total(),
        ),
    }
}
