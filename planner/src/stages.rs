//! Plans of stages: runs of layers, one behind another.
//!
//! One text passes through all stages, so its latency is the sum of what each takes and of what the
//! links between take. Where rows see earlier rows only, it passes in as many parts as there are
//! tiles, and so do several texts at once, as whole ones where rows see all of theirs; then stages work at
//! the same time:
//!
//! ```text
//! cost = (sum of stages and ways + (parts - 1) slowest of them) / parts + latencies
//! ```
//!
//! The language head over every row is of the last stage; over last rows alone it comes after all.
//!
//! For a set of devices and a bound on the slowest stage, the least sum gives every device one layer,
//! and then as many as bound and memory allow to the fastest, the next fastest, and so on: the sum is
//! linear in layers. All bounds that some number of layers makes are tried.
//! The order matters to links alone, and is the shortest way through all of them (Held and Karp).
//! Of up to eight devices all sets are tried. Of more, the fastest two, three, and so on, in the order
//! of their speed; and for some bounds on the slowest stage those whose layers cost the least together, if
//! a way to a device costs the same from anywhere ([`many`]).

mod many;

use crate::{
    candidate,
    cost_model::{Load, mean},
    cutting::Transport,
    memory::Memory,
    request::{PlanningError, Request},
    ring::{Candidate, Rings},
};
use galaxy_common::{Bytes, DeviceProfile, Kernel, Span, Strategy, Token, Wanted};

/// The most devices of which all sets are tried.
const ALL_SETS: usize = 8;
/// How many sets are lowered at most, the best first, until one fits.
const TRIES: usize = 8;

struct Stage {
    /// Nanoseconds of a layer on this device.
    layer: f64,
    /// How many layers memory allows.
    most: u32,
    /// How many layers memory allows in the last stage, which has the vocabulary.
    most_last: u32,
    /// Nanoseconds of the language head over all rows, part by part as they come; 0 where not all rows are
    /// wanted.
    head: f64,
    /// Nanoseconds of the language head over the last row of each text, when all have come; 0 where all
    /// rows are wanted.
    tail: f64,
}

/// The best plan of two stages or more that fits and costs no more than `limit`.
///
/// # Errors
/// When there is none.
pub(crate) fn plan(
    rings: &Rings<'_>,
    means: Transport,
    limit: f64,
) -> Result<Candidate, PlanningError> {
    let Rings { request, memory, loads, links, texts, .. } = rings;
    let n = request.offers.len();
    let parts = parts(request, means, *texts);
    let stages = (0..n).map(|d| stage(request, memory, loads, d, parts));
    let stages = stages.collect::<Result<Vec<Stage>, _>>()?;
    let bytes = mean(loads, &Load::rows) * means.wire.row(request.spec.hidden.into()) as f64;
    // Nanoseconds of all rows from one device to another; endless where they cannot reach. Kernels
    // wait meanwhile, so that bytes do not delay them.
    let way = |from: usize, to: usize| {
        let link = links.get(means.link, from, to);
        link.map_or((f64::INFINITY, 0.0), |l| (bytes / l.busy_rate * 1e9, l.latency))
    };
    let hop = |from: usize, to: usize| {
        let (all, latency) = way(from, to);
        all / parts + latency
    };
    let mut found: Vec<(f64, Vec<usize>, Vec<u32>)> = Vec::new();
    let mut offer = |order: Vec<usize>, hops: f64| {
        if least(&stages, &order, request.spec.layers, parts) + hops > limit {
            return;
        }
        let slowest = order.windows(2).map(|p| way(p[0], p[1]).0).fold(0.0, f64::max);
        if let Some((time, layers)) = share(&stages, &order, request.spec.layers, parts, slowest) {
            found.push((time + hops, order, layers));
        }
    };
    if n <= ALL_SETS {
        for (hops, order) in ways(n, &hop) {
            offer(order, hops);
        }
    } else {
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| stages[a].layer.total_cmp(&stages[b].layer).then(a.cmp(&b)));
        let sets = (2..=n.min(request.spec.layers as usize)).map(|count| order[..count].to_vec());
        let mut sets: Vec<Vec<usize>> = sets.collect();
        for order in many::sets(&stages, request.spec.layers, parts, &hop) {
            for order in many::ways(&stages, &order, &hop) {
                sets.extend((!sets.contains(&order)).then_some(order));
            }
        }
        for order in sets {
            let hops: f64 = order.windows(2).map(|p| hop(p[0], p[1])).sum();
            offer(order, hops);
        }
    }
    found.retain(|f| f.0.is_finite() && f.0 <= limit);
    found.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
    let mut last = None;
    for (time, order, mut layers) in found.into_iter().take(TRIES) {
        let vocabulary = request.spec.extent().vocabulary;
        let mut words = vec![Span::<Token>::empty(); order.len()];
        words[order.len() - 1] = Span::first(vocabulary);
        // What programs need beyond what was expected: a layer less where it is too much.
        for _ in 0..4 {
            let plan = candidate::stages(request, &order, &layers, &words, means);
            let needs = candidate::needs(request, &plan)?;
            let above = candidate::above(&plan, &needs);
            if above.is_empty() {
                return Ok(Candidate { plan, needs, closed_form: time });
            }
            last = Some(candidate::too_large(Strategy::Pipeline, &plan, &needs));
            let full: Vec<usize> = above.iter().map(|a| a.0).collect();
            let roomy = |d: &usize| !full.contains(d);
            let gains = (0..order.len())
                .filter(roomy)
                .min_by(|&a, &b| stages[order[a]].layer.total_cmp(&stages[order[b]].layer));
            let Some(gains) = gains else { break };
            for d in full {
                if layers[d] > 1 {
                    layers[d] -= 1;
                    layers[gains] += 1;
                }
            }
        }
    }
    let granted: Bytes = request.offers.iter().map(|o| o.budget).sum();
    Err(last.unwrap_or_else(|| PlanningError::Memory {
        strategy: Strategy::Pipeline,
        device: None,
        missing: missing(request, memory),
        what: format!("{n} devices grant {granted} together: raise memory or add devices"),
    }))
}

/// A lower bound of what any share of layers costs: all of them on the fastest device, and the slowest
/// stage as if layers could be divided.
fn least(stages: &[Stage], order: &[usize], layers: u32, parts: f64) -> f64 {
    let times = || order.iter().map(|&d| stages[d].layer);
    let fastest = times().fold(f64::INFINITY, f64::min);
    let together: f64 = times().map(|time| 1.0 / time).sum();
    f64::from(layers) * (fastest + (parts - 1.0) / together) / parts
}

/// Bytes that are missing at least where no set of devices holds all layers.
fn missing(request: &Request<'_>, memory: &Memory) -> Bytes {
    let all = memory.whole(request.spec);
    let granted: u64 = request.offers.iter().map(|o| o.budget.0).sum();
    Bytes(all.saturating_sub(granted).max(1))
}

/// How many parts a batch is cut into: where rows see later ones, between texts.
fn parts(request: &Request<'_>, means: Transport, texts: u32) -> f64 {
    let tiles = u32::from(means.tiles);
    f64::from(if request.spec.causal { tiles } else { tiles.min(texts) })
}

fn stage(
    request: &Request<'_>,
    memory: &Memory,
    loads: &[Load],
    at: usize,
    parts: f64,
) -> Result<Stage, PlanningError> {
    let (spec, offer) = (request.spec, &request.offers[at]);
    let device: &DeviceProfile = request.profile.device(&offer.name)?;
    let width = f64::from(spec.head_width);
    let heads = f64::from(spec.heads);
    let qkv = (heads + 2.0 * f64::from(spec.kv_heads)) * width;
    let inner = f64::from(spec.intermediate);
    let joins = if spec.parallel { 1.0 } else { 2.0 };
    let layer = mean(loads, &|load| {
        let rows = load.rows() / parts;
        let part = device.nanos(Kernel::Qkv, &[rows, qkv])
            + load.attend(device, rows, spec, heads)
            + device.nanos(Kernel::AttentionOutput, &[rows, heads * width])
            + device.nanos(Kernel::Up, &[rows, inner])
            + device.nanos(Kernel::Down, &[rows, inner])
            + joins * device.nanos(Kernel::AddNorm, &[rows]);
        parts * part
    });
    let words = f64::from(spec.extent().vocabulary);
    let wanted = request.workload.wanted;
    let head = mean(loads, &|load| device.nanos(Kernel::Language, &[load.wanted(wanted), words]));
    let each_row = request.workload.wanted == Wanted::AllLogits;
    let (head, tail) = if each_row { (head, 0.0) } else { (0.0, head) };
    let most = |last: bool| {
        let (fixed, each) = memory.stage(spec, request.allowed.max_rows, offer.threads, last);
        offer.budget.0.saturating_sub(fixed) / each.max(1)
    };
    let limit = |layers: u64| layers.min(u64::from(spec.layers)) as u32;
    Ok(Stage { layer, most: limit(most(false)), most_last: limit(most(true)), head, tail })
}

/// The least cost of the stages in this order, without the ways between them, of which the slowest takes
/// `way`; and the layers of each.
fn share(
    stages: &[Stage],
    order: &[usize],
    layers: u32,
    parts: f64,
    way: f64,
) -> Option<(f64, Vec<u32>)> {
    let last = order.len() - 1;
    let cap = |at: usize| {
        let stage = &stages[order[at]];
        if at == last { stage.most_last } else { stage.most }
    };
    if (0..order.len()).any(|at| cap(at) == 0) || order.len() as u32 > layers {
        return None;
    }
    let mut fastest: Vec<usize> = (0..order.len()).collect();
    fastest.sort_by(|&a, &b| {
        stages[order[a]].layer.total_cmp(&stages[order[b]].layer).then(a.cmp(&b))
    });
    let head = |at: usize| if at == last { stages[order[at]].head } else { 0.0 };
    let within = |bound: f64| -> Option<(f64, Vec<u32>)> {
        let most = |at: usize| cap(at).min(((bound - head(at)) / stages[order[at]].layer) as u32);
        let mut taken = vec![1u32; order.len()];
        let mut left = layers - order.len() as u32;
        for &at in &fastest {
            let more = most(at).checked_sub(1)?.min(left);
            taken[at] += more;
            left -= more;
        }
        let time = |at: usize| f64::from(taken[at]) * stages[order[at]].layer + head(at);
        let sum: f64 = (0..order.len()).map(time).sum();
        let slowest = (0..order.len()).map(time).fold(way, f64::max);
        let cost = (sum + (parts - 1.0) * slowest) / parts + stages[order[last]].tail;
        (left == 0).then_some((cost, taken))
    };
    if parts <= 1.0 {
        return within(f64::INFINITY);
    }
    let bounds = (0..order.len()).flat_map(|at| {
        // A little more, so that the quotient is not rounded below.
        let bound = move |n| stages[order[at]].layer * f64::from(n) * (1.0 + 1e-9) + head(at);
        (1..=layers).map(bound)
    });
    let all = bounds.filter_map(within);
    all.min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)))
}

/// For each set of two or more, and each of its devices as the last, the shortest way through all of
/// it: (its length, its order).
fn ways(n: usize, hop: &dyn Fn(usize, usize) -> f64) -> Vec<(f64, Vec<usize>)> {
    let full = 1usize << n;
    let mut best = vec![vec![(f64::INFINITY, usize::MAX); n]; full];
    for (d, start) in (0..n).map(|d| (d, 1usize << d)) {
        best[start][d] = (0.0, usize::MAX);
    }
    let hops: Vec<Vec<f64>> = (0..n)
        .map(|from| {
            (0..n).map(|to| if from == to { f64::INFINITY } else { hop(from, to) }).collect()
        })
        .collect();
    let mut found = Vec::new();
    for set in 1..full {
        for last in (0..n).filter(|d| set >> d & 1 == 1) {
            let (way, _) = best[set][last];
            if !way.is_finite() {
                continue;
            }
            if set.count_ones() > 1 {
                let (mut order, mut rest, mut at) = (Vec::new(), set, last);
                while at != usize::MAX {
                    order.push(at);
                    let before = best[rest][at].1;
                    rest &= !(1 << at);
                    at = before;
                }
                order.reverse();
                found.push((way, order));
            }
            for next in (0..n).filter(|d| set >> d & 1 == 0) {
                let longer = way + hops[last][next];
                let entry = &mut best[set | 1 << next][next];
                if longer < entry.0 {
                    *entry = (longer, last);
                }
            }
        }
    }
    found
}
