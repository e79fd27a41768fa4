//! Rows between devices, where several texts are cut by rows.
//!
//! The closed form shares rows by speed, and counts neither which texts a cut divides nor that it moves to the end
//! of a text. So rows go from the busiest device to others, as long as the simulator says that it helps.

use crate::{
    cost_model,
    predict::LENGTHS,
    ranked::{Ranked, least, rank},
    request::Request,
    ring::Candidate,
    search,
};
use galaxy_common::{
    Row, Span,
    plan::{Phase, own_rows},
};
use galaxy_graph::lower::at_ends;

/// The numbers of tiles in which plans are looked at, besides their own: the closed form ranks these by shares
/// that change here.
const TILES: [u16; 2] = [2, 4];
/// The part of a device's rows, one in so many, that a cut may take to move to the end of a text: plans are looked
/// at with such cuts, too.
const NEAR: u32 = 4;
/// How many times the best latency a plan may take to be looked at: cuts elsewhere may save so much.
const BEHIND: f64 = 2.0;
/// How many of the best plans get rows moved.
const PLANS: usize = 16;
/// The parts of all rows that are moved, one after the other: an eighth, a sixteenth, and so on.
const PARTS: [u32; 4] = [8, 16, 32, 64];
/// How many of the least busy devices are tried as those that get rows.
const IDLEST: usize = 2;
/// The share of the busiest device's compute time from which on a device gives rows.
const AS_BUSY: f64 = 0.98;
/// The share of the latency below which a change helps: saving less is not worth another plan.
const HELPS: f64 = 0.99;

/// Better plans than those of `ranked`, if there are any: none where texts come one by one, as sequences do for
/// which tokens are generated.
pub(crate) fn rows(request: &Request<'_>, ranked: &[Ranked], simulated: &mut u64) -> Vec<Ranked> {
    let loads = cost_model::loads(request, LENGTHS);
    let Some(load) = loads.iter().max_by_key(|load| load.texts).filter(|load| load.texts > 1)
    else {
        return Vec::new();
    };
    let batch = load.texts * load.text;
    let ends: Vec<u32> = (1..=load.texts).map(|text| text * load.text).collect();
    let before = least(ranked, |ranked| ranked.prediction.latency);
    let cut = |ranked: &&Ranked| {
        let plan = &ranked.candidate.plan;
        let few = (2..=search::ALL_SETS).contains(&plan.ring.len());
        few && plan.any_sequence() && ranked.prediction.latency <= before * BEHIND
    };
    let mut starts: Vec<Ranked> = ranked.iter().filter(cut).cloned().collect();
    for at in 0..starts.len() {
        let from = starts[at].candidate.clone();
        let whole = sizes(&at_ends(own_rows(&from.plan, Phase::Prefill, batch), &ends, NEAR));
        let others = TILES.into_iter().filter(|_| request.allowed.tiles.is_none());
        for tiles in others.chain([from.plan.tiles]) {
            let mut tiled = Candidate { needs: Vec::new(), ..from.clone() };
            tiled.plan.tiles = tiles;
            let equal = vec![1; whole.len()];
            for candidate in [weighed(&tiled, &whole), weighed(&tiled, &equal), tiled] {
                if starts.iter().all(|known| known.candidate.plan != candidate.plan) {
                    *simulated += 1;
                    starts.extend(rank(request, candidate).ok());
                }
            }
        }
    }
    starts.sort_by(|a, b| a.prediction.latency.total_cmp(&b.prediction.latency));
    starts.truncate(PLANS);
    let better = starts.into_iter().map(|start| improved(request, start, batch, simulated));
    better.filter(|better| better.prediction.latency < before).collect()
}

/// A plan with its rows moved as far as that helps.
fn improved(request: &Request<'_>, mut best: Ranked, batch: u32, simulated: &mut u64) -> Ranked {
    // In rows of a batch, so that one can be moved.
    let mut weights = sizes(&own_rows(&best.candidate.plan, Phase::Prefill, batch));
    for part in PARTS {
        let step = (batch / part).max(1);
        loop {
            let compute = |at: usize| best.prediction.devices[at].compute;
            let mut idle: Vec<usize> = (0..weights.len()).filter(|&at| weights[at] > 0).collect();
            idle.sort_by(|&a, &b| compute(a).total_cmp(&compute(b)));
            let most = idle.last().map_or(0.0, |&at| compute(at));
            // All that are as busy as the busiest give: else one of them goes on being that.
            let gives = |at: usize| compute(at) >= most * AS_BUSY && weights[at] > step;
            if !idle.iter().any(|&at| gives(at)) {
                break;
            }
            let mut better: Option<(Ranked, Vec<u32>)> = None;
            for &to in idle.iter().take(IDLEST).filter(|&&to| !gives(to)) {
                let mut moved = weights.clone();
                for from in (0..weights.len()).filter(|&at| gives(at)) {
                    moved[from] -= step;
                    moved[to] += step;
                }
                *simulated += 1;
                // What cannot be lowered does not help.
                let Ok(next) = rank(request, weighed(&best.candidate, &moved)) else { continue };
                let least =
                    better.as_ref().map_or(best.prediction.latency * HELPS, |(better, _)| {
                        better.prediction.latency
                    });
                if next.prediction.latency < least {
                    better = Some((next, moved));
                }
            }
            let Some(found) = better else { break };
            (best, weights) = found;
        }
    }
    best
}

fn sizes(shares: &[Span<Row>]) -> Vec<u32> {
    shares.iter().map(|share| share.len()).collect()
}

/// The plan with these shares of rows; what it needs is found again.
fn weighed(from: &Candidate, weights: &[u32]) -> Candidate {
    let mut candidate = Candidate { needs: Vec::new(), ..from.clone() };
    for (device, &weight) in candidate.plan.ring.iter_mut().zip(weights) {
        // A device that had no rows has no heads either; one that has some keeps some.
        let weight = if device.prefill.row_weight > 0 { weight.max(1) } else { 0 };
        (device.prefill.row_weight, device.decode.row_weight) = (weight, weight);
    }
    candidate
}
