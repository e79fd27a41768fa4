//! The planner of the paper (Galaxy, §III-C, Algorithm 1 and Equation 6), as a baseline: work in
//! proportion to capacity, then what is too much for a device's memory is handed to those that have
//! some left, columns first, then heads. Rows equally, all devices, in the order given.

use crate::split::{DeviceCurves, Problem, Split};
use galaxy_common::{Column, apportion};

/// The split that the algorithm ends with; `Err` has it too where it does not fit, which the paper
/// calls a failure.
///
/// # Errors
/// Where some device would be out of memory.
pub fn algorithm(problem: &Problem) -> Result<Split, Split> {
    let whole = |times: &[f64]| times.last().copied().unwrap_or(0.0);
    // Equation 6: one over the time of a whole attention block and a whole MLP block.
    let times: Vec<f64> =
        problem.devices.iter().map(|s| whole(&s.heads.nanos) + whole(&s.columns.nanos)).collect();
    let least = times.iter().copied().filter(|&t| t > 0.0).fold(f64::INFINITY, f64::min);
    let capacity: Vec<u32> = times
        .iter()
        .map(|&t| if t > 0.0 && least.is_finite() { ((least / t * 1e6) as u32).max(1) } else { 1 })
        .collect();
    let share = |total: usize, weights: &[u32]| -> Vec<usize> {
        let spans = apportion::<Column>(total as u32, weights);
        spans.iter().map(|s| s.len() as usize).collect()
    };
    let owners: Vec<u32> = problem.devices.iter().map(|s| u32::from(s.owner)).collect();
    let mut split = Split {
        heads: share(problem.heads, &capacity),
        columns: share(problem.columns, &capacity),
        vocabulary: share(problem.vocabulary, &capacity),
        rows: share(problem.rows, &owners),
        cost: 0.0,
    };
    balance(problem, &mut split, &capacity, |s| &mut s.columns);
    balance(problem, &mut split, &capacity, |s| &mut s.heads);
    split.cost = problem.price(&split);
    let out = (0..problem.devices.len()).any(|d| above(problem, &split, d));
    if out { Err(split) } else { Ok(split) }
}

fn above(problem: &Problem, split: &Split, d: usize) -> bool {
    problem.bytes(split, d) > problem.devices[d].room
}

/// Lines 9 to 19: until no device of the list is out of memory, those that are hand what is too much
/// to those with memory left, by capacity, and leave the list.
fn balance(
    problem: &Problem,
    split: &mut Split,
    capacity: &[u32],
    part: fn(&mut Split) -> &mut Vec<usize>,
) {
    let mut list: Vec<usize> = (0..problem.devices.len()).collect();
    loop {
        let out: Vec<usize> = list.iter().copied().filter(|&d| above(problem, split, d)).collect();
        let has_room = |&d: &usize| {
            let side: &DeviceCurves = &problem.devices[d];
            problem.bytes(split, d) < side.room
        };
        let free: Vec<usize> = list.iter().copied().filter(has_room).collect();
        if out.is_empty() || free.is_empty() {
            return;
        }
        for o in out {
            let mut shift = 0;
            while above(problem, split, o) && part(split)[o] > 0 {
                part(split)[o] -= 1;
                shift += 1;
            }
            let weights: Vec<u32> = free.iter().map(|&f| capacity[f]).collect();
            let gains = apportion::<Column>(shift, &weights);
            for (&f, gain) in free.iter().zip(gains) {
                part(split)[f] += gain.len() as usize;
            }
            list.retain(|&d| d != o);
        }
    }
}
