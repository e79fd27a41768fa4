//! Sets of many devices for stages: those whose layers cost the least together.

use super::Stage;

/// How many bounds on the slowest stage are tried, where stages work at the same time.
const BOUNDS: usize = 12;
/// The factor by which each bound is above the one before.
const GROWTH: f64 = 1.2;
/// How many devices are tried as the last stage.
const LAST: usize = 3;

/// For each bound on the slowest stage, the devices with the least sum of stages and of ways to
/// them: exact where a way to a device costs the same from anywhere.
pub(super) fn sets(
    stages: &[Stage],
    layers: u32,
    parts: f64,
    hop: &dyn Fn(usize, usize) -> f64,
) -> Vec<Vec<usize>> {
    let n = stages.len();
    // The third nearest stands for all.
    let way = |d: usize| {
        let mut near: Vec<f64> =
            (0..n).filter(|&o| o != d).map(|o| hop(o, d).max(hop(d, o))).collect();
        near.sort_by(f64::total_cmp);
        near[2.min(near.len() - 1)]
    };
    let ways: Vec<f64> = (0..n).map(way).collect();
    let within = |bound: f64, d: usize| {
        let stage = &stages[d];
        if ways[d] > bound { 0 } else { stage.most.min((bound / stage.layer) as u32) }
    };
    let mut sets: Vec<Vec<usize>> = Vec::new();
    let mut offer = |bound: f64| {
        let caps: Vec<u32> = (0..n).map(|d| within(bound, d)).collect();
        let set = least(stages, &ways, &caps, layers, parts);
        sets.extend(set.filter(|set| set.len() > 1));
    };
    offer(f64::INFINITY);
    if parts > 1.0 {
        let enough = |bound: f64| (0..n).map(|d| within(bound, d)).sum::<u32>() >= layers;
        let (mut low, mut high) = (0.0, f64::from(layers) * longest(stages));
        for _ in 0..40 {
            let middle = f64::midpoint(low, high);
            if enough(middle) { high = middle } else { low = middle }
        }
        (0..BOUNDS).for_each(|at| offer(high * GROWTH.powi(at as i32) * (1.0 + 1e-9)));
    }
    sets.sort_unstable();
    sets.dedup();
    sets
}

fn longest(stages: &[Stage]) -> f64 {
    stages.iter().map(|stage| stage.layer).fold(0.0, f64::max)
}

/// The devices with the least sum of stages and ways, found by how many layers are given out so
/// far.
fn least(
    stages: &[Stage],
    ways: &[f64],
    caps: &[u32],
    layers: u32,
    parts: f64,
) -> Option<Vec<usize>> {
    let all = layers as usize;
    // The least sum of so many layers on the devices so far, and what the last of them took.
    let mut sums = vec![f64::INFINITY; all + 1];
    sums[0] = 0.0;
    let mut taken: Vec<Vec<u32>> = Vec::with_capacity(stages.len());
    for (stage, (&way, &cap)) in stages.iter().zip(ways.iter().zip(caps)) {
        let mut next = sums.clone();
        let mut own = vec![0u32; all + 1];
        for given in 1..=all {
            for more in 1..=(cap as usize).min(given) {
                let sum = sums[given - more] + stage.layer / parts * more as f64 + way;
                if sum < next[given] {
                    (next[given], own[given]) = (sum, more as u32);
                }
            }
        }
        sums = next;
        taken.push(own);
    }
    if !sums[all].is_finite() {
        return None;
    }
    let mut left = all;
    let mut set: Vec<usize> = Vec::new();
    for (d, own) in taken.iter().enumerate().rev() {
        if own[left] > 0 {
            left -= own[left] as usize;
            set.push(d);
        }
    }
    set.sort_unstable();
    Some(set)
}

/// Orders of a set: for some of its devices as the last, always back to the nearest.
pub(super) fn ways(
    stages: &[Stage],
    set: &[usize],
    hop: &dyn Fn(usize, usize) -> f64,
) -> Vec<Vec<usize>> {
    let mut last = set.to_vec();
    let end = |d: usize| stages[d].head + stages[d].tail;
    let key = |d: usize| (std::cmp::Reverse(stages[d].most_last.min(1)), end(d));
    last.sort_by(|&a, &b| {
        let (a_key, b_key) = (key(a), key(b));
        a_key.0.cmp(&b_key.0).then(a_key.1.total_cmp(&b_key.1)).then(a.cmp(&b))
    });
    let from = |&last: &usize| {
        let mut order = vec![last];
        while order.len() < set.len() {
            let to = order[order.len() - 1];
            let left = set.iter().copied().filter(|d| !order.contains(d));
            let next = left.min_by(|&a, &b| hop(a, to).total_cmp(&hop(b, to)).then(a.cmp(&b)));
            order.extend(next);
        }
        order.reverse();
        order
    };
    last.iter().take(LAST).map(from).collect()
}
