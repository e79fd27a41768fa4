//! Better rings of many devices, by steps that the simulator confirms.
//!
//! The closed form ranks rings within some percent. So the best of those that were simulated are changed
//! a little: one device more or less, other tiles, another exchange, more or fewer layers by rows. The
//! changes that the closed form likes best are simulated, and the first that helps is taken, while there
//! is one.

use crate::{
    auto::{Ranked, rank},
    closed::{ByRows, Means},
    many, reasons,
    request::Request,
    ring::{By, Rings},
    search::{self, Priced, order},
};
use galaxy_common::Strategy;

/// Rings that are changed.
const STARTS: usize = 3;
/// Changes of a ring that are simulated until one helps: the best by the closed form,
const TRIED: usize = 8;
/// as far as they are no worse than this by it.
const WORSE: f64 = 1.2;
/// What costs the same but for this share is alike.
const ALIKE: f64 = 1e-4;
/// What must be left of the latency: less is not worth another step.
const HELPS: f64 = 0.998;
/// What is simulated in all, in tiles that go from device to device in a block: simulating takes as long
/// as there are such,
const WORK: usize = 40_000;
/// and a little for each plan.
const PLAN: usize = 100;

/// Better rings than the best of `ranked`, if there are any.
pub(crate) fn rings(
    request: &Request<'_>,
    rings: &mut Rings<'_>,
    ranked: &[Ranked],
    simulated: &mut u64,
) -> Vec<Ranked> {
    let orders = many::orders(rings);
    let mut starts: Vec<&Ranked> = ranked.iter().collect();
    starts.sort_by(|a, b| a.prediction.latency.total_cmp(&b.prediction.latency));
    let mut known: Vec<Priced> = Vec::new();
    let mut found = Vec::new();
    let starts = starts.into_iter().filter_map(|start| {
        let priced = reasons::priced(rings, &start.candidate.plan)?;
        Some((start.clone(), priced))
    });
    let starts: Vec<(Ranked, Priced)> = starts.take(STARTS).collect();
    let mut left = WORK;
    for (start, mut at) in starts {
        let before = start.prediction.latency;
        let mut best = start;
        // The best has the most.
        let mut work = left / 2;
        left -= work;
        loop {
            let mut changes = changes(rings, &at, &orders);
            changes.retain(|new| !known.iter().any(|old| same(old, new)));
            let helps = changes.into_iter().take(TRIED).find_map(|change| {
                let tiles = change.members.len().pow(2) * usize::from(change.means.tiles);
                work = work.checked_sub(tiles + PLAN)?;
                *simulated += 1;
                known.push(change.clone());
                // What has no room, or cannot be lowered, does not help.
                let fitted = rings.fit(change.ring(), Strategy::Auto, By::Exact).ok()?;
                let new = rank(request, fitted).ok()?;
                let less = new.prediction.latency < best.prediction.latency * HELPS;
                less.then_some((new, change))
            });
            let Some(next) = helps else { break };
            (best, at) = next;
        }
        left += work;
        if best.prediction.latency < before {
            found.push(best);
        }
    }
    found
}

fn same(a: &Priced, b: &Priced) -> bool {
    a.members == b.members && a.means == b.means && a.by_rows == b.by_rows
}

/// Whether two rings differ in devices alone that are like one another.
fn alike(a: &Priced, b: &Priced) -> bool {
    a.members.len() == b.members.len()
        && a.means == b.means
        && a.by_rows == b.by_rows
        && (a.cost - b.cost).abs() <= a.cost * ALIKE
}

/// Rings that differ a little: of each kind of change in turn, the best by the closed form first.
fn changes(rings: &mut Rings<'_>, at: &Priced, orders: &[Vec<usize>]) -> Vec<Priced> {
    let mut all: Vec<(Vec<usize>, Means, ByRows)> = Vec::new();
    let mut sets = many::neighbours(&at.members, orders);
    sets.extend(many::larger_and_smaller(at.members.len(), orders));
    for set in sets {
        // Alone, nothing is carried; more devices than some have other ways.
        let ways = search::means(rings.request, set.len());
        if ways.contains(&at.means) {
            let members = order(&rings.links, at.means.link, rings.tile(), &set);
            all.push((members, at.means, at.by_rows));
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
    priced.sort_by(|a, b| a.cost.total_cmp(&b.cost));
    let kind = |new: &Priced| {
        let others = [
            new.means.tiles != at.means.tiles,
            new.means != at.means,
            new.by_rows != at.by_rows,
            new.members.len() > at.members.len(),
            new.members.len() < at.members.len(),
        ];
        others.into_iter().position(|other| other)
    };
    let before = |place: usize| {
        priced[..place].iter().filter(|other| kind(other) == kind(&priced[place])).count()
    };
    let turns: Vec<usize> = (0..priced.len()).map(before).collect();
    let mut in_turn: Vec<(usize, Priced)> = turns.into_iter().zip(priced).collect();
    in_turn.sort_by_key(|(turn, _)| *turn);
    in_turn.into_iter().map(|(_, new)| new).collect()
}
