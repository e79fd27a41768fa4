//! Which devices take part, in which order, how many layers are cut by rows, in how many tiles, and over which
//! links: the best rings by the cost model.
//!
//! Up to eight devices, every set of them is bounded by what it could do if memory had no end, and
//! sets are priced exactly from the least bound up, until no bound is below what was found. The order
//! of a set is the one whose slowest cable is the fastest: that is all that the closed form sees of
//! an order when rows are equal. Sets of more than eight devices are the matter of [`crate::many`].

use crate::{
    cost_model::Reach,
    cutting::{RowLayers, Transport},
    links::Links,
    request::{Request, Search},
    ring::{Ring, Rings},
};
use galaxy_common::{Exchange, LinkProfile, LinkType};
use galaxy_model::ModelSpec;
use std::collections::BTreeMap;

/// The most devices of which all sets are looked at.
pub(crate) const ALL_SETS: usize = 8;

/// Bytes of a tile of a usual size, which stands for all.
pub(crate) const TILE: f64 = 65_536.0;

/// Numbers of tiles that are tried where none is given.
const TILES: [u16; 4] = [1, 2, 4, 8];

/// The most devices for which tiles may go straight to everyone.
const DIRECT: usize = 24;

/// How many times the cost of the best ring by the closed form a ring may cost, and still be simulated.
pub(crate) const MARGIN: f64 = 1.15;

/// How many sets get their numbers of layers by rows refined, where memory binds.
const REFINED: usize = 6;

/// A ring that was priced.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Priced {
    pub members: Vec<usize>,
    pub means: Transport,
    pub by_rows: RowLayers,
    /// Nanoseconds by the closed form.
    pub cost: f64,
}

impl Priced {
    pub fn ring(&self) -> Ring<'_> {
        Ring { members: &self.members, means: self.means, by_rows: self.by_rows }
    }
    /// Whether two rings cut blocks in the same way on almost as many devices.
    pub fn near(&self, other: &Self) -> bool {
        let (a, b) = (self.members.len(), other.members.len());
        self.kind().2 == other.kind().2 && 8 * a.max(b) <= 9 * a.min(b)
    }
    /// The kind of a ring: rings of one kind differ in tiles, links and numbers of layers only.
    pub fn kind(&self) -> (usize, &[usize], [bool; 3]) {
        let size = self.members.len();
        let members = if size > ALL_SETS { &[] } else { &self.members[..] };
        let RowLayers { attention, mlp, whole } = self.by_rows;
        (size, members, [attention > 0, mlp > 0, whole])
    }
}

/// All ways to carry the tiles of a ring of so many devices.
pub(crate) fn means(request: &Request<'_>, devices: usize) -> Vec<Transport> {
    let allowed = request.allowed;
    let exchanges = match allowed.exchange {
        Some(exchange) => vec![exchange],
        // With two devices both are the same; with very many, links are too many.
        None if (3..=DIRECT).contains(&devices) => vec![Exchange::Ring, Exchange::Direct],
        None => vec![Exchange::Ring],
    };
    let tiles = match allowed.tiles {
        _ if devices == 1 => vec![1],
        Some(tiles) => vec![tiles],
        None => TILES.to_vec(),
    };
    let mut all = Vec::new();
    for &link in if devices == 1 { &allowed.links[..1] } else { &allowed.links[..] } {
        for &wire in if devices == 1 { &allowed.wires[..1] } else { &allowed.wires[..] } {
            for &exchange in &exchanges {
                all.extend(tiles.iter().map(|&tiles| Transport { tiles, exchange, wire, link }));
            }
        }
    }
    all
}

/// Nanoseconds that a tile of so many bytes needs from one device to another; infinite where there is no link.
pub(crate) fn edge(links: &Links<'_>, link: LinkType, tile: f64, from: usize, to: usize) -> f64 {
    let time = |l: &LinkProfile| l.latency + tile * 1e9 / l.busy_rate;
    links.get(link, from, to).map_or(f64::INFINITY, time)
}

/// The order of `members` around a ring whose slowest cable is the fastest, and of those the one
/// whose cables take least together. The first stays first.
pub(crate) fn order(links: &Links<'_>, link: LinkType, tile: f64, members: &[usize]) -> Vec<usize> {
    let n = members.len();
    if n < 3 {
        return members.to_vec();
    }
    let edges: Vec<Vec<f64>> = members
        .iter()
        .map(|&from| members.iter().map(|&to| edge(links, link, tile, from, to)).collect())
        .collect();
    let off_diagonal = (0..n).flat_map(|a| (0..n).filter(move |&b| a != b).map(move |b| (a, b)));
    let times: Vec<f64> = off_diagonal.map(|(a, b)| edges[a][b]).collect();
    let (low, high) = times.iter().fold((f64::INFINITY, 0.0f64), |(l, h), &t| (l.min(t), h.max(t)));
    // Where all links are alike, as far as measuring tells, all orders are.
    if high <= low * 1.1 {
        return members.to_vec();
    }
    let order = if n <= ALL_SETS { shortest(&edges) } else { nearest(&edges) };
    order.into_iter().map(|at| members[at]).collect()
}

/// The best order of few, by branch and bound over (slowest edge, sum of edges).
fn shortest(edges: &[Vec<f64>]) -> Vec<usize> {
    struct OrderSearch<'a> {
        edges: &'a [Vec<f64>],
        best: (f64, f64),
        order: Vec<usize>,
        path: Vec<usize>,
    }
    fn go(state: &mut OrderSearch<'_>, worst: f64, sum: f64) {
        if (worst, sum) >= state.best && !state.order.is_empty() {
            return;
        }
        let (n, last) = (state.edges.len(), state.path[state.path.len() - 1]);
        if state.path.len() == n {
            let back = state.edges[last][0];
            let done = (worst.max(back), sum + back);
            if state.order.is_empty() || done < state.best {
                state.best = done;
                state.order.clone_from(&state.path);
            }
            return;
        }
        for next in 1..n {
            if !state.path.contains(&next) {
                let edge = state.edges[last][next];
                state.path.push(next);
                go(state, worst.max(edge), sum + edge);
                state.path.pop();
            }
        }
    }
    let infinite = (f64::INFINITY, f64::INFINITY);
    let mut state = OrderSearch { edges, best: infinite, order: Vec::new(), path: vec![0] };
    go(&mut state, 0.0, 0.0);
    state.order
}

/// An order of many: always on to the nearest, and then those at the slowest edge elsewhere while that
/// helps.
fn nearest(edges: &[Vec<f64>]) -> Vec<usize> {
    let mut order = from_nearest_to_nearest(edges);
    let time = |order: &[usize], at: usize| edges[order[at]][order[(at + 1) % order.len()]];
    let cost = |order: &[usize]| {
        let each = (0..order.len()).map(|at| time(order, at));
        each.fold((0.0f64, 0.0), |(worst, sum), t| (worst.max(t), sum + t))
    };
    let n = order.len();
    let mut best = cost(&order);
    for _ in 0..n {
        let slowest = (0..n).max_by(|&a, &b| time(&order, a).total_cmp(&time(&order, b)));
        let Some(slowest) = slowest else { break };
        let mut better = None;
        for from in [slowest, (slowest + 1) % n] {
            for to in 0..n {
                let mut moved = order.clone();
                let device = moved.remove(from);
                moved.insert(to, device);
                let new = cost(&moved);
                if new < best {
                    (best, better) = (new, Some(moved));
                }
            }
        }
        let Some(moved) = better else { break };
        order = moved;
    }
    let first = order.iter().position(|&at| at == 0).unwrap_or(0);
    order.rotate_left(first);
    order
}

/// From the first always on to the nearest.
fn from_nearest_to_nearest(edges: &[Vec<f64>]) -> Vec<usize> {
    let mut order = vec![0];
    while order.len() < edges.len() {
        let last = order[order.len() - 1];
        let left = (1..edges.len()).filter(|at| !order.contains(at));
        let next = left.min_by(|&a, &b| edges[last][a].total_cmp(&edges[last][b]).then(a.cmp(&b)));
        order.extend(next);
    }
    order
}

/// The best that each device of the set can reach, in any order.
pub(crate) fn best_reach(links: &Links<'_>, members: &[usize], means: Transport) -> Vec<Reach> {
    let reach = |&own: &usize| {
        let mut best = Reach { rate: 0.0, latency: f64::INFINITY, byte_cost: f64::INFINITY };
        for &other in members.iter().filter(|&&other| other != own) {
            for (from, to) in [(own, other), (other, own)] {
                let Ok(link) = links.get(means.link, from, to) else { continue };
                best.rate = best.rate.max(link.busy_rate);
                best.latency = best.latency.min(link.latency);
                let cost = link.send_cost.min(link.receive_cost) * 2.0;
                best.byte_cost = best.byte_cost.min(cost);
            }
        }
        match best.rate > 0.0 {
            true => best,
            // Alone, or where nothing was measured, links cost nothing: it is a bound.
            false => Reach { rate: f64::INFINITY, latency: 0.0, byte_cost: 0.0 },
        }
    };
    members.iter().map(reach).collect()
}

/// Numbers of layers by rows at the ends: none or all; of several texts also with cuts between them.
pub(crate) fn corners(spec: &ModelSpec, texts: u32, devices: usize) -> Vec<RowLayers> {
    if devices == 1 {
        return vec![RowLayers::default()];
    }
    let ends = [0, spec.layers];
    let pair = |attention| ends.map(|mlp| RowLayers { attention, mlp, whole: false });
    let all = ends.into_iter().flat_map(pair).flat_map(|by_rows| {
        let whole = RowLayers { whole: true, ..by_rows };
        [Some(by_rows), (by_rows.attention > 0 && texts > 1).then_some(whole)]
    });
    all.flatten().filter(|&by_rows| possible(spec, by_rows)).collect()
}

/// Whether layers can be cut so: both blocks of a parallel residual are cut alike.
fn possible(spec: &ModelSpec, by_rows: RowLayers) -> bool {
    !spec.parallel || by_rows.attention == by_rows.mlp
}

/// Other numbers of layers by rows: none, all, and a little more or less of each.
pub(crate) fn steps(spec: &ModelSpec, at: RowLayers) -> Vec<RowLayers> {
    let by = [4, 8, 32].map(|part| (spec.layers / part).max(1));
    let near = |now: u32| {
        let less = by.map(|by| now.saturating_sub(by));
        let more = by.map(|by| now + by);
        let mut near = [&less[..], &more, &[0, now, spec.layers]].concat();
        near.retain(|&layers| layers <= spec.layers);
        near.sort_unstable();
        near.dedup();
        near
    };
    let pair = |attention| {
        let all = near(at.mlp).into_iter().map(move |mlp| (attention, mlp));
        // One of the two changes.
        all.filter(move |&(a, m)| (a == at.attention) != (m == at.mlp) || spec.parallel && a == m)
    };
    let all = near(at.attention).into_iter().flat_map(pair);
    let cut =
        all.map(|(attention, mlp)| RowLayers { attention, mlp, whole: at.whole && attention > 0 });
    cut.filter(|&by_rows| possible(spec, by_rows) && by_rows != at).collect()
}

/// The best rings of few devices, one or two of a kind, the best first; at most `most`.
pub(crate) fn best(rings: &mut Rings<'_>, most: usize, search: &mut Search) -> Vec<Priced> {
    let sets = sets(rings.request.offers.len());
    search.all_subsets = sets.len() as u64;
    search.subsets = sets.len() as u64;
    let mut found = among(rings, &sets, most, DIRECT);
    found.truncate(most);
    found
}

/// The best ring of each number of devices, with blocks cut in each way. The closed form assumes rows that are
/// divided, so of one row it prefers rings that divide rows, and says little about how many devices should take
/// part in generating tokens; and of several texts it does not see what tiles hide of cutting one.
pub(crate) fn of_each_size(rings: &mut Rings<'_>) -> Vec<Priced> {
    let n = rings.request.offers.len();
    let (spec, sets) = (rings.request.spec, sets(n));
    let mut best = Vec::new();
    for size in 2..=n {
        let ways = means(rings.request, size);
        let sets: Vec<&Vec<usize>> = sets.iter().filter(|set| set.len() == size).collect();
        for by_rows in corners(spec, rings.texts, size) {
            best.extend(cheapest(rings, &sets, &ways, by_rows));
        }
    }
    best
}

/// The cheapest of these sets, by the last of the ways, and then its cheapest way.
fn cheapest(
    rings: &mut Rings<'_>,
    sets: &[&Vec<usize>],
    ways: &[Transport],
    by_rows: RowLayers,
) -> Option<Priced> {
    let mut found: Option<Priced> = None;
    let &means = ways.last()?;
    for set in sets {
        let members = order(&rings.links, means.link, TILE, set);
        let limit = found.as_ref().map_or(f64::INFINITY, |found| found.cost);
        if let Some(cost) = rings.price_below(Ring { members: &members, means, by_rows }, limit) {
            found = Some(Priced { members, means, by_rows, cost });
        }
    }
    let mut found = found?;
    for &means in ways {
        let ring = Ring { means, ..found.ring() };
        if let Some(cost) = rings.price_below(ring, found.cost) {
            (found.means, found.cost) = (means, cost);
        }
    }
    Some(found)
}

/// All sets of `n` devices but the empty one.
fn sets(n: usize) -> Vec<Vec<usize>> {
    (1u32..1 << n).map(|set| (0..n).filter(|d| set >> d & 1 == 1).collect()).collect()
}

/// A set with one way to carry tiles: its least bound, the bounds of each choice of layers by rows, its
/// devices, and that way.
type Entry = (f64, Vec<(f64, RowLayers)>, Vec<usize>, Transport);

/// The best rings of these sets, where tiles go straight to everyone among up to `direct` devices.
pub(crate) fn among(
    rings: &mut Rings<'_>,
    sets: &[Vec<usize>],
    most: usize,
    direct: usize,
) -> Vec<Priced> {
    let spec = rings.request.spec;
    // Every set, in every way, with the least that each could cost.
    let mut entries: Vec<Entry> = Vec::new();
    for set in sets {
        let ways = means(rings.request, set.len()).into_iter();
        let given = rings.request.allowed.exchange.is_some();
        let far = |m: &Transport| m.exchange == Exchange::Direct && set.len() > direct;
        let ways = ways.filter(|m| given || !far(m));
        for means in ways {
            let reach = best_reach(&rings.links, set, means);
            let mut ends = Vec::new();
            for by_rows in corners(spec, rings.texts, set.len()) {
                let ring = Ring { members: set, means, by_rows };
                if let Some(bound) = rings.bound(ring, &reach) {
                    ends.push((bound, by_rows));
                }
            }
            ends.sort_by(|a, b| a.0.total_cmp(&b.0));
            if let Some(&(bound, _)) = ends.first() {
                entries.push((bound, ends, set.clone(), means));
            }
        }
    }
    entries.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut found: Vec<Priced> = Vec::new();
    let mut refined = 0;
    let mut orders: BTreeMap<(Vec<usize>, LinkType), Vec<usize>> = BTreeMap::new();
    for (bound, ends, set, means) in entries {
        if bound >= limit(&found, most) {
            break;
        }
        let members = orders.entry((set, means.link));
        let members =
            &*members.or_insert_with_key(|(set, link)| order(&rings.links, *link, TILE, set));
        let whole = Ring { members, means, by_rows: RowLayers::default() };
        let Ok(reach) = rings.reaches(whole) else { continue };
        let mut short = false;
        for (bound, by_rows) in ends {
            if bound >= limit(&found, most) {
                break;
            }
            // The bound for the order that was taken; what the cost is above it is due to memory.
            let bound = rings.bound(Ring { by_rows, ..whole }, &reach).unwrap_or(bound);
            // What costs more than the last that is kept need not be priced.
            let last = found.get(most - 1).map_or(f64::INFINITY, |p| p.cost);
            let ring = Ring { members, means, by_rows };
            let cost = rings.price_below(ring, last.max(bound * 1.02));
            short |= cost.is_none_or(|cost| cost > bound * 1.02) && by_rows != RowLayers::default();
            if let Some(cost) = cost {
                keep(&mut found, Priced { members: members.clone(), means, by_rows, cost });
            }
        }
        if short && refined < REFINED {
            refined += 1;
            for priced in refine(rings, members, means, &reach) {
                keep(&mut found, priced);
            }
        }
    }
    found
}

/// The cost below which a ring is kept.
fn limit(found: &[Priced], most: usize) -> f64 {
    let best = found.first().map_or(f64::INFINITY, |p| p.cost * MARGIN);
    found.get(most - 1).map_or(best, |p| best.min(p.cost))
}

/// Keeps the best two of each kind, in order of their cost. Of many devices, sets of one size are of
/// one kind: those that are kept differ in little.
pub(crate) fn keep(found: &mut Vec<Priced>, new: Priced) {
    let at = found.partition_point(|p| p.cost <= new.cost);
    found.insert(at, new);
    let mut kept: Vec<Priced> = Vec::with_capacity(found.len());
    for priced in found.drain(..) {
        let alike = kept.iter().filter(|p| p.kind() == priced.kind());
        let twin = |p: &Priced| p.means == priced.means && p.by_rows == priced.by_rows;
        if alike.clone().count() < 2 && !alike.clone().any(twin) {
            kept.push(priced);
        }
    }
    *found = kept;
}

/// Numbers of layers by rows where memory does not allow all: a coarse grid, the least bound first,
/// then steps around the best, half as long each time.
pub(crate) fn refine(
    rings: &mut Rings<'_>,
    members: &[usize],
    means: Transport,
    reach: &[Reach],
) -> Vec<Priced> {
    let (spec, texts) = (rings.request.spec, rings.texts);
    let layers = spec.layers;
    let cut = |attention, mlp| RowLayers { attention, mlp, whole: attention > 0 && texts > 1 };
    let step = layers.div_ceil(4).max(1);
    let marks: Vec<u32> = (0..=4).map(|i| (i * step).min(layers)).collect();
    let mut grid = Vec::new();
    for &attention in &marks {
        for &mlp in &marks {
            let by_rows = cut(attention, mlp);
            if !possible(spec, by_rows) {
                continue;
            }
            if let Some(bound) = rings.bound(Ring { members, means, by_rows }, reach) {
                grid.push((bound, by_rows));
            }
        }
    }
    grid.sort_by(|a, b| a.0.total_cmp(&b.0));
    grid.dedup();
    let mut best: Option<(f64, RowLayers)> = None;
    for (bound, by_rows) in grid {
        if best.is_some_and(|b| bound >= b.0) {
            break;
        }
        let limit = best.map_or(f64::INFINITY, |b| b.0);
        if let Some(cost) = rings.price_below(Ring { members, means, by_rows }, limit) {
            best = Some((cost, by_rows));
        }
    }
    let mut step = i64::from(step / 2);
    while step > 0 {
        let Some((cost, at)) = best else { break };
        let mut better = best;
        let ways = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1), (1, 1), (-1, -1)];
        for (da, dm) in ways {
            let moved = |from: u32, by: i64| {
                u32::try_from(i64::from(from) + by * step).ok().filter(|&to| to <= layers)
            };
            let (Some(attention), Some(mlp)) = (moved(at.attention, da), moved(at.mlp, dm)) else {
                continue;
            };
            let by_rows = cut(attention, mlp);
            if !possible(spec, by_rows) {
                continue;
            }
            let limit = better.map_or(f64::INFINITY, |b| b.0);
            if let Some(cost) = rings.price_below(Ring { members, means, by_rows }, limit) {
                better = Some((cost, by_rows));
            }
        }
        if better.is_some_and(|b| b.0 < cost) {
            best = better;
        } else {
            step /= 2;
        }
    }
    let priced = |(cost, by_rows)| Priced { members: members.to_vec(), means, by_rows, cost };
    best.map(priced).into_iter().collect()
}
