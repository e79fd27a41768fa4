//! Rings of many devices: which of all the sets of more than [`search::ALL_SETS`] are looked at.
//!
//! Devices are put in several orders, and the first few of each order are a set, from one device to all.
//! An order is of the devices whose links are no slower than some limit, by what each could take of the
//! model until some time: its speed decides where that time is short, its memory where it is long, and
//! between them whichever binds. A device more takes its place in these orders and pushes others back
//! that can do less: so sets of any size only become better, as far as the closed form sees. The best set
//! of each size is looked at closely, and those that are the best of all are changed by one device at a
//! time while that helps.

mod fastest;

use crate::{
    cost_model::Reach,
    cutting::{RowLayers, Transport},
    request::Search,
    ring::{Ring, Rings},
    search::{self, Priced, best_reach, corners, edge, means, order, refine},
};
use galaxy_common::LinkType;
use std::collections::{BTreeMap, BTreeSet};

/// Up to so many devices, sets of every size are tried; then sizes grow by an eighth.
const EACH_SIZE: usize = 12;
/// How many limits of links are tried: classes of links, the fastest first, besides all of them.
const CLASSES: usize = 4;
/// The factor by which links of one class may differ.
const CLASS: f64 = 1.5;
/// Times until which devices could take a part, as shares of that by which all together take the model.
const TIMES: [f64; 5] = [0.0, 1.0, 2.0, 4.0, f64::INFINITY];
/// How many of the best rings are tried in all ways; `BEHIND`: how many times the best cost a ring may cost
/// to be kept.
const CLOSER: usize = 12;
const BEHIND: f64 = 1.6;
/// How many of the rings that are found are changed by one device at a time.
const CHANGED: usize = 3;
/// How often each of those is changed at most.
const CHANGES: usize = 16;
/// How many of the rings that are found get their numbers of layers by rows refined, where memory binds.
const REFINED: usize = 4;
/// How many of the fastest devices small sets are taken from, which grow from the best pair.
const GROWN_FROM: usize = 16;
/// How many devices a change may leave out, and how many it may take in.
const NEAR: usize = 8;

/// The best rings: those of the fastest devices, and of each size and way to cut blocks one or two, the
/// best first.
pub(crate) fn best(rings: &mut Rings<'_>, search: &mut Search) -> [Vec<Priced>; 2] {
    let n = rings.request.offers.len();
    search.all_subsets = if n < 64 { (1u64 << n) - 1 } else { u64::MAX };
    let orders = orders(rings);
    // The first order is that of all devices by speed.
    let fastest = fastest::rings(rings, &orders[0], search);
    let mut sets = sets(rings, &orders);
    sets.extend(grown(rings, &orders[0]).into_iter().map(|set| (set.len(), set)));
    search.subsets += sets.len() as u64;
    let mut found: Vec<Priced> = Vec::new();
    let mut sized = of_each_size(rings, &sets);
    let limit = sized.first().map_or(f64::INFINITY, |p| p.cost * BEHIND);
    sized.retain(|p| p.cost <= limit);
    for priced in sized.iter().take(CLOSER) {
        search::keep(&mut found, in_all_ways(rings, priced.clone()));
    }
    for priced in sized.into_iter().skip(CLOSER) {
        search::keep(&mut found, priced);
    }
    for priced in found.iter().take(CHANGED).cloned().collect::<Vec<_>>() {
        let changed = changed(rings, priced, &orders, search);
        let changed = in_all_ways(rings, changed);
        search::keep(&mut found, changed);
    }
    let mut refined: Vec<(Vec<usize>, Transport)> = Vec::new();
    for priced in found.clone() {
        let twin = refined.iter().any(|known| known.0 == priced.members);
        if refined.len() < REFINED && !twin && bound_by_memory(rings, &priced) {
            refined.push((priced.members, priced.means));
        }
    }
    for (members, means) in refined {
        let ring = Ring { members: &members, means, by_rows: RowLayers::default() };
        let Ok(reach) = rings.reaches(ring) else { continue };
        for priced in refine(rings, &members, means, &reach) {
            search::keep(&mut found, priced);
        }
    }
    if let Some(best) = found.first() {
        let least = floor(rings, n);
        search.gap = ((best.cost - least) / best.cost).max(0.0);
    }
    [fastest, apart(found)]
}

/// Of these rings, the best first: the first two, and of those behind them whichever differ in size or in
/// how blocks are cut.
fn apart(all: Vec<Priced>) -> Vec<Priced> {
    let mut kept: Vec<Priced> = Vec::new();
    for priced in all {
        if kept.len() < 2 || !kept.iter().any(|known| known.near(&priced)) {
            kept.push(priced);
        }
    }
    kept
}

/// The orders of devices of which the first few are sets.
pub(crate) fn orders(rings: &mut Rings<'_>) -> Vec<Vec<usize>> {
    let n = rings.request.offers.len();
    let alone = means(rings.request, 1)[0];
    let speed: Vec<f64> = (0..n)
        .map(|d| {
            let ring = Ring { members: &[d], means: alone, by_rows: RowLayers::default() };
            let reach = best_reach(&rings.links, &[d], alone);
            rings.bound(ring, &reach).unwrap_or(f64::INFINITY)
        })
        .collect();
    let whole = rings.memory.whole(rings.request.spec) as f64;
    let memory: Vec<f64> = rings.request.offers.iter().map(|o| o.budget.0 as f64 / whole).collect();
    // What a device takes until a time, as a share of the model.
    let taken = |d: usize, time: f64| (time / speed[d]).min(memory[d]);
    let together = |time: f64| (0..n).map(|d| taken(d, time)).sum::<f64>() >= 1.0;
    let (mut low, mut high) = (0.0, speed.iter().copied().fold(0.0, f64::max) * 2.0);
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        if together(middle) { high = middle } else { low = middle }
    }
    let mut orders: Vec<Vec<usize>> = Vec::new();
    for class in classes(rings) {
        for times in TIMES {
            let time = if times == 0.0 { 0.0 } else { high * times };
            let key = |d: usize| if times == 0.0 { -speed[d] } else { taken(d, time) };
            let mut order = class.clone();
            order.sort_by(|&a, &b| {
                let by_speed = speed[a].total_cmp(&speed[b]);
                key(b).total_cmp(&key(a)).then(by_speed).then(a.cmp(&b))
            });
            if !orders.contains(&order) {
                orders.push(order);
            }
        }
    }
    orders
}

/// The devices whose links are no slower than some limit: all of them, and fewer and fewer.
fn classes(rings: &Rings<'_>) -> Vec<Vec<usize>> {
    let request = rings.request;
    let n = request.offers.len();
    let tile = rings.tile();
    let mut classes = vec![(0..n).collect::<Vec<usize>>()];
    for &link in &request.allowed.links {
        // The third best link: whether a device is well connected does not hang on one neighbour.
        let slowness = |d: usize| {
            let both =
                |o| edge(&rings.links, link, tile, d, o).max(edge(&rings.links, link, tile, o, d));
            let mut edges: Vec<f64> = (0..n).filter(|&o| o != d).map(both).collect();
            edges.sort_by(f64::total_cmp);
            edges[2.min(edges.len() - 1)]
        };
        let mut slow: Vec<(f64, usize)> = (0..n).map(|d| (slowness(d), d)).collect();
        slow.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut from = slow[0].0;
        let mut ends = Vec::new();
        for (at, &(edge, _)) in slow.iter().enumerate() {
            if edge > from * CLASS {
                ends.push(at);
                from = edge;
            }
        }
        for end in ends.into_iter().take(CLASSES) {
            let mut class: Vec<usize> = slow[..end].iter().map(|s| s.1).collect();
            class.sort_unstable();
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
    }
    classes
}

/// The sets that orders make and that could hold the model, each once, the small ones first.
fn sets(rings: &Rings<'_>, orders: &[Vec<usize>]) -> BTreeSet<(usize, Vec<usize>)> {
    let offers = rings.request.offers;
    let whole = rings.memory.whole(rings.request.spec);
    let mut sets = BTreeSet::new();
    for order in orders {
        let mut size = 1;
        while size <= order.len() {
            let mut set = order[..size].to_vec();
            set.sort_unstable();
            if set.iter().map(|&d| offers[d].budget.0).fold(0, u64::saturating_add) >= whole {
                sets.insert((size, set));
            }
            if size == order.len() {
                break;
            }
            let step = if size < EACH_SIZE { 1 } else { size / 8 };
            size = (size + step).min(order.len());
        }
    }
    sets
}

/// Sets that grow device by device from the best pair of the fastest devices, for each way to cut blocks:
/// where pairs have links of their own, few devices that reach one another well do better than the fastest.
fn grown(rings: &mut Rings<'_>, fastest: &[usize]) -> BTreeSet<Vec<usize>> {
    let near = &fastest[..fastest.len().min(GROWN_FROM)];
    let mut sets = BTreeSet::new();
    for by_rows in corners(rings.request.spec, rings.texts, 2) {
        let pairs = near.iter().enumerate();
        let pairs = pairs.flat_map(|(at, &a)| near[at + 1..].iter().map(move |&b| vec![a, b]));
        let mut best = cheapest(rings, pairs.collect(), by_rows);
        while let Some(set) = best {
            let others = near.iter().filter(|d| set.len() < search::ALL_SETS && !set.contains(d));
            let larger = others.map(|&d| [&set[..], &[d]].concat()).collect();
            best = cheapest(rings, larger, by_rows);
            sets.insert(set);
        }
    }
    sets
}

/// The cheapest of these sets by the closed form, if any fits; sorted.
fn cheapest(
    rings: &mut Rings<'_>,
    sets: Vec<Vec<usize>>,
    by_rows: RowLayers,
) -> Option<Vec<usize>> {
    let mut best: Option<(f64, Vec<usize>)> = None;
    for mut set in sets {
        set.sort_unstable();
        for means in some_ways(rings, set.len()) {
            let members = order(&rings.links, means.link, rings.tile(), &set);
            let limit = best.as_ref().map_or(f64::INFINITY, |best| best.0);
            if let Some(cost) = rings.price_below(Ring { members: &members, means, by_rows }, limit)
            {
                best = Some((cost, set.clone()));
            }
        }
    }
    best.map(|best| best.1)
}

/// A few ways to carry tiles, which stand for all.
fn some_ways(rings: &Rings<'_>, devices: usize) -> Vec<Transport> {
    let all = means(rings.request, devices);
    let bytes = |m: &Transport| m.wire.row(rings.request.spec.hidden.into());
    let narrow = all.iter().map(bytes).min();
    let most = all.iter().map(|m| m.tiles).max().unwrap_or(1).min(4);
    let few = |m: &Transport| m.tiles == most || m.tiles == 1;
    let some: Vec<Transport> =
        all.iter().copied().filter(|m| Some(bytes(m)) == narrow && few(m)).collect();
    if some.is_empty() { all } else { some }
}

/// What a ring costs at least, its members in order, and how its tiles are carried.
type Bound = (f64, Vec<usize>, Transport);

/// The best ring of each size, with blocks cut in each way, the best first.
fn of_each_size(rings: &mut Rings<'_>, sets: &BTreeSet<(usize, Vec<usize>)>) -> Vec<Priced> {
    // By size and cut, what every set could cost at least.
    let mut bounds: BTreeMap<(usize, RowLayers), Vec<Bound>> = BTreeMap::new();
    for (size, set) in sets {
        let mut orders: BTreeMap<LinkType, Vec<usize>> = BTreeMap::new();
        for means in some_ways(rings, *size) {
            let members = orders.entry(means.link);
            let members =
                &*members.or_insert_with_key(|&link| order(&rings.links, link, rings.tile(), set));
            let whole = Ring { members, means, by_rows: RowLayers::default() };
            let Ok(reach) = rings.reaches(whole) else { continue };
            for by_rows in corners(rings.request.spec, rings.texts, *size) {
                if let Some(bound) = rings.bound(Ring { by_rows, ..whole }, &reach) {
                    let all = bounds.entry((*size, by_rows)).or_default();
                    all.push((bound, members.clone(), means));
                }
            }
        }
    }
    let least = |all: &Vec<Bound>| all.iter().map(|b| b.0).fold(f64::INFINITY, f64::min);
    let mut bounds: Vec<_> = bounds.into_iter().map(|(key, all)| (least(&all), key, all)).collect();
    bounds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut found: Vec<Priced> = Vec::new();
    let mut best = f64::INFINITY;
    for (least, (_, by_rows), mut all) in bounds {
        if least > best * BEHIND {
            break;
        }
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut own: Option<Priced> = None;
        for (bound, members, means) in all {
            let limit = own.as_ref().map_or(best * BEHIND, |own| own.cost);
            if bound >= limit {
                break;
            }
            let ring = Ring { members: &members, means, by_rows };
            if let Some(cost) = rings.price_below(ring, limit) {
                own = Some(Priced { members, means, by_rows, cost });
            }
        }
        best = own.as_ref().map_or(best, |own| best.min(own.cost));
        found.extend(own);
    }
    found.sort_by(|a, b| a.cost.total_cmp(&b.cost));
    found
}

/// The same devices, with their tiles carried in the best way.
fn in_all_ways(rings: &mut Rings<'_>, mut found: Priced) -> Priced {
    for means in means(rings.request, found.members.len()) {
        let members = match means.link == found.means.link {
            true => found.members.clone(),
            false => order(&rings.links, means.link, rings.tile(), &found.members),
        };
        let ring = Ring { members: &members, means, by_rows: found.by_rows };
        if let Some(cost) = rings.price_below(ring, found.cost) {
            found = Priced { members, means, cost, ..found };
        }
    }
    found
}

/// The ring after changes by one device, as long as these help by the closed form.
fn changed(
    rings: &mut Rings<'_>,
    mut found: Priced,
    orders: &[Vec<usize>],
    search: &mut Search,
) -> Priced {
    for _ in 0..CHANGES {
        let mut better: Option<Priced> = None;
        for set in neighbours(&found.members, orders) {
            search.subsets += 1;
            let Priced { means, by_rows, cost, .. } = better.as_ref().unwrap_or(&found);
            if !search::means(rings.request, set.len()).contains(means) {
                continue;
            }
            let members = order(&rings.links, means.link, rings.tile(), &set);
            let ring = Ring { members: &members, means: *means, by_rows: *by_rows };
            if let Some(cost) = rings.price_below(ring, *cost) {
                better = Some(Priced { members, means: *means, by_rows: *by_rows, cost });
            }
        }
        let Some(next) = better else { break };
        found = next;
    }
    found
}

/// Sets that differ by one device: without one of those that stand last in some order, with one of those
/// outside that stand first, or both.
pub(crate) fn neighbours(members: &[usize], orders: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut last: Vec<usize> = Vec::new();
    let mut first: Vec<usize> = Vec::new();
    for at in 0..2 {
        for order in orders {
            let inside = order.iter().rev().filter(|d| members.contains(d)).nth(at);
            let outside = order.iter().filter(|d| !members.contains(d)).nth(at);
            let new = inside.filter(|d| last.len() < NEAR && !last.contains(d));
            last.extend(new);
            let new = outside.filter(|d| first.len() < NEAR && !first.contains(d));
            first.extend(new);
        }
    }
    let without = |d: usize| members.iter().copied().filter(|&m| m != d).collect::<Vec<usize>>();
    let mut sets: Vec<Vec<usize>> = Vec::new();
    for &out in &last {
        sets.push(without(out));
        sets.extend(first.iter().map(|&new| [&without(out)[..], &[new]].concat()));
    }
    sets.extend(first.iter().map(|&new| [members, &[new]].concat()));
    sets.retain(|set| !set.is_empty());
    sets.iter_mut().for_each(|set| set.sort_unstable());
    sets
}

/// Sets of an eighth or a third more or fewer devices: the first so many of each order.
pub(crate) fn larger_and_smaller(size: usize, orders: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let steps = [(size / 8).max(2), (size / 3).max(3)];
    let sizes = steps.map(|step| [size.saturating_sub(step), size + step]);
    let mut sets: Vec<Vec<usize>> = Vec::new();
    for order in orders {
        for size in sizes.into_iter().flatten() {
            let mut set = order.iter().copied().take(size).collect::<Vec<usize>>();
            set.sort_unstable();
            if set.len() == size && size > 0 && !sets.contains(&set) {
                sets.push(set);
            }
        }
    }
    sets
}

/// Whether memory keeps blocks from being cut by rows that would cost less so.
fn bound_by_memory(rings: &mut Rings<'_>, priced: &Priced) -> bool {
    let Ok(reach) = rings.reaches(priced.ring()) else { return false };
    let (spec, texts) = (rings.request.spec, rings.texts);
    corners(spec, texts, priced.members.len()).into_iter().any(|by_rows| {
        let ring = Ring { by_rows, ..priced.ring() };
        let below = rings.bound(ring, &reach).filter(|&bound| bound < priced.cost);
        below.is_some_and(|bound| rings.price_below(ring, bound * 1.02).is_none())
    })
}

/// A lower bound of what any plan of any set costs: all devices, links that cost nothing, nothing cut into
/// tiles.
fn floor(rings: &mut Rings<'_>, n: usize) -> f64 {
    let all: Vec<usize> = (0..n).collect();
    let free = vec![Reach { rate: f64::INFINITY, latency: 0.0, byte_cost: 0.0 }; n];
    let ends = corners(rings.request.spec, rings.texts, n).into_iter();
    let bounds: Vec<Option<f64>> =
        ends.map(|by_rows| rings.relaxed(&all, by_rows, &free)).collect();
    bounds.into_iter().flatten().fold(f64::INFINITY, f64::min)
}
