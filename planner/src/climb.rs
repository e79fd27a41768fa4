//! Better rings of many devices, by steps that the simulator confirms.
//!
//! The closed form ranks rings within some percent of what the simulator says, and like ones much better
//! than unlike ones. So each ring is estimated by its closed form times what simulated rings that are like
//! it took, as a multiple of theirs. The ring with the least estimate is simulated next. Around those that
//! prove good there are more: one device more or less, other tiles, another exchange, more or fewer layers
//! by rows.

use crate::{
    cutting::{RowLayers, Transport},
    many,
    ranked::{Ranked, least, rank},
    reasons,
    request::Request,
    ring::{By, Rings},
    search::{self, Priced, order},
};
use galaxy_common::{Plan, Strategy};

/// How many times the best latency a ring may take to be changed.
const GOOD: f64 = 1.02;
/// How many of the best rings are changed in any case.
const STARTS: usize = 3;
/// How many times the best latency the estimate of a ring may be for it to be simulated.
const HOPE: f64 = 1.05;
/// How many simulations in a row may not help before no other ring is simulated.
const PATIENCE: usize = 24;
/// The share of the best latency below which a simulation counts as help.
const HELPS: f64 = 0.998;
/// The share by which the costs of rings may differ that count as alike.
const ALIKE: f64 = 1e-4;
/// How many times the cost of the ring that is changed a change may cost by the closed form.
const WORSE: f64 = 1.3;
/// How fast simulated rings lose weight in an estimate the less they are like the ring: the factor in the
/// exponent.
const SHARP: f64 = 4.0;
/// The share by which an estimate is lowered for each unit by which the nearest simulated ring is unlike
/// the ring: it is the less certain.
const OPEN: f64 = 0.3;
/// The unlikeness from which on a ring is no less certain.
const UNKNOWN: f64 = 0.5;
/// The work of all simulations together, in tiles that go from device to device in a block: simulating
/// takes the longer, the more of these there are.
const WORK: usize = 160_000;
/// The work of simulating a plan besides its tiles, in the same unit.
const PLAN: usize = 100;

/// A ring that was simulated.
struct SimulatedRing {
    ring: Priced,
    latency: f64,
    /// Whether its changes were added to the rings that wait.
    changed: bool,
}

impl SimulatedRing {
    fn new(ring: Priced, latency: f64) -> Self {
        Self { ring, latency, changed: false }
    }
}

/// Better rings than the best of `ranked`, if there are any.
pub(crate) fn rings(
    request: &Request<'_>,
    rings: &mut Rings<'_>,
    ranked: &[Ranked],
    simulated: &mut u64,
) -> Vec<Ranked> {
    let orders = many::orders(rings);
    let mut seen: Vec<SimulatedRing> = Vec::new();
    for ranked in ranked {
        let priced = reasons::priced(rings, &ranked.candidate.plan);
        let priced = priced.filter(|priced| !seen.iter().any(|seen| same(&seen.ring, priced)));
        seen.extend(priced.map(|priced| SimulatedRing::new(priced, ranked.prediction.latency)));
    }
    let mut best = least(ranked, |ranked| ranked.prediction.latency);
    let mut plans: Vec<Plan> = ranked.iter().map(|ranked| ranked.candidate.plan.clone()).collect();
    let mut found = Vec::new();
    let mut waiting: Vec<Priced> = Vec::new();
    let (mut work, mut patience) = (WORK, PATIENCE);
    while patience > 0 {
        expand(rings, &mut seen, &mut waiting, &orders);
        let estimates = waiting.iter().map(|ring| estimate(&seen, ring)).enumerate();
        let next = estimates.min_by(|a, b| a.1.total_cmp(&b.1));
        let Some((next, _)) = next.filter(|next| next.1 < best * HOPE) else { break };
        let ring = waiting.swap_remove(next);
        let tiles = ring.members.len().pow(2) * usize::from(ring.means.tiles);
        let Some(left) = work.checked_sub(tiles + PLAN) else { continue };
        // A ring that has no room, or cannot be lowered, does not help; nor do devices without a part.
        let Ok(expected) = rings.expected(ring.ring()) else { continue };
        if plans.contains(&expected.plan) {
            continue;
        }
        plans.push(expected.plan.clone());
        work = left;
        *simulated += 1;
        patience -= 1;
        let Ok(expected) = rank(request, expected) else { continue };
        let latency = expected.prediction.latency;
        if latency < best {
            // Whether there is room takes longer to know than whether it helps.
            let Ok(fitted) = rings.fit(ring.ring(), Strategy::Auto, By::Exact) else { continue };
            let new = match fitted.plan == expected.candidate.plan {
                true => Ranked { candidate: fitted, ..expected },
                false => match rank(request, fitted) {
                    Ok(new) => new,
                    Err(_) => continue,
                },
            };
            seen.push(SimulatedRing::new(ring, new.prediction.latency));
            if new.prediction.latency < best * HELPS {
                patience = PATIENCE;
            }
            best = best.min(new.prediction.latency);
            found.push(new);
        } else {
            seen.push(SimulatedRing::new(ring, latency));
        }
    }
    found
}

/// Adds the changes of the best that were simulated to the rings that wait.
fn expand(
    rings: &mut Rings<'_>,
    seen: &mut [SimulatedRing],
    waiting: &mut Vec<Priced>,
    orders: &[Vec<usize>],
) {
    let mut order: Vec<usize> = (0..seen.len()).collect();
    order.sort_by(|&a, &b| seen[a].latency.total_cmp(&seen[b].latency));
    let Some(best) = order.first().map(|&first| seen[first].latency) else { return };
    for (place, at) in order.into_iter().enumerate() {
        if place >= STARTS && seen[at].latency > best * GOOD || seen[at].changed {
            continue;
        }
        seen[at].changed = true;
        let changes = changes(rings, &seen[at].ring, orders);
        let new = |change: &Priced| {
            let known = seen.iter().map(|seen| &seen.ring);
            !known.chain(&*waiting).any(|known| same(known, change) || alike(known, change))
        };
        let changes: Vec<Priced> = changes.into_iter().filter(new).collect();
        waiting.extend(changes);
    }
}

/// The latency that a ring may have: its closed form times what simulated rings took as multiples of
/// theirs, those most like it above all; and less, the more these multiples differ and the less is known of
/// such rings.
fn estimate(seen: &[SimulatedRing], ring: &Priced) -> f64 {
    let (mut weights, mut sum, mut squares) = (0.0, 0.0, 0.0);
    let mut near = UNKNOWN;
    for seen in seen {
        let unlike = unlike(&seen.ring, ring);
        let weight = (-SHARP * unlike).exp();
        let multiple = (seen.latency / seen.ring.cost).ln();
        weights += weight;
        sum += weight * multiple;
        squares += weight * multiple * multiple;
        near = near.min(unlike);
    }
    if weights <= 0.0 {
        return ring.cost;
    }
    let mean = sum / weights;
    let spread = (squares / weights - mean * mean).max(0.0).sqrt();
    ring.cost * (mean - spread).exp() * (1.0 - OPEN * near)
}

/// How much two rings differ in what the closed form does not see well.
fn unlike(a: &Priced, b: &Priced) -> f64 {
    let apart = |a: f64, b: f64| (a / b).ln().abs();
    let size = |ring: &Priced| ring.members.len() as f64;
    let other = |differs: bool| f64::from(u8::from(differs));
    let rows = |of: &dyn Fn(&Priced) -> u32| {
        let (a, b) = (f64::from(of(a)), f64::from(of(b)));
        (a - b).abs() / a.max(b).max(1.0)
    };
    apart(size(a), size(b))
        + apart(f64::from(a.means.tiles), f64::from(b.means.tiles))
        + other(a.means.exchange != b.means.exchange)
        + other(a.means.link != b.means.link)
        + other(a.means.wire != b.means.wire)
        + rows(&|ring| ring.by_rows.attention)
        + rows(&|ring| ring.by_rows.mlp)
        + other(a.by_rows.whole != b.by_rows.whole)
}

fn same(a: &Priced, b: &Priced) -> bool {
    a.members == b.members && a.means == b.means && a.by_rows == b.by_rows
}

/// Whether two rings differ only in devices that are like one another.
fn alike(a: &Priced, b: &Priced) -> bool {
    a.members.len() == b.members.len()
        && a.means == b.means
        && a.by_rows == b.by_rows
        && (a.cost - b.cost).abs() <= a.cost * ALIKE
}

/// Rings that differ a little from the one `at`.
fn changes(rings: &mut Rings<'_>, at: &Priced, orders: &[Vec<usize>]) -> Vec<Priced> {
    let mut all: Vec<(Vec<usize>, Transport, RowLayers)> = Vec::new();
    let mut sets = many::neighbours(&at.members, orders);
    sets.extend(many::larger_and_smaller(at.members.len(), orders));
    for set in sets {
        // Alone, nothing is carried or cut; more devices than some have other ways.
        let alone = at.members.len() == 1 || set.len() == 1;
        let ways = search::means(rings.request, set.len());
        let ways: Vec<Transport> =
            ways.into_iter().filter(|&means| alone || means == at.means).collect();
        let cuts = match alone {
            true => search::corners(rings.request.spec, rings.texts, set.len()),
            false => vec![at.by_rows],
        };
        for means in ways {
            let members = order(&rings.links, means.link, rings.tile(), &set);
            all.extend(cuts.iter().map(|&by_rows| (members.clone(), means, by_rows)));
        }
    }
    for means in search::means(rings.request, at.members.len()) {
        let others = [
            means.tiles != at.means.tiles,
            means.exchange != at.means.exchange,
            means.wire != at.means.wire,
            means.link != at.means.link,
        ];
        if others.into_iter().filter(|&other| other).count() == 1 {
            all.push((at.members.clone(), means, at.by_rows));
        }
    }
    for by_rows in search::steps(rings.request.spec, at.by_rows) {
        if at.members.len() > 1 {
            all.push((at.members.clone(), at.means, by_rows));
        }
    }
    let limit = at.cost * WORSE;
    let mut priced: Vec<Priced> = Vec::new();
    for (members, means, by_rows) in all {
        let mut new = Priced { members, means, by_rows, cost: 0.0 };
        let Some(cost) = rings.price_below(new.ring(), limit) else { continue };
        new.cost = cost;
        // One device for another that is like it, or one of several that are alike.
        let swapped = new.members.len() == at.members.len()
            && new.members != at.members
            && cost > at.cost * (1.0 - ALIKE);
        if !swapped && !priced.iter().any(|known| alike(known, &new)) {
            priced.push(new);
        }
    }
    priced
}
