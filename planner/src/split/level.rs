//! Units given out one by one, each to the device that is done with it first.

/// Halvings after which only few units are left to be given out one by one.
const BISECTIONS: usize = 12;

/// Gives out `total` units, each to the device that is done with it first, from `units` up to
/// `caps`: the slowest is then as fast as it can be. None where the caps are too low or the start is
/// too high.
pub(super) fn level(
    times: &[&[f64]],
    caps: &[usize],
    mut units: Vec<usize>,
    total: usize,
) -> Option<Vec<usize>> {
    if units.iter().sum::<usize>() > total || caps.iter().sum::<usize>() < total {
        return None;
    }
    // Most at once: all that is done by a time, the latest by which no more than all are.
    let start = units.clone();
    let by = |time: f64, d: usize| {
        let done = times[d].partition_point(|&t| t <= time).saturating_sub(1);
        done.min(caps[d]).max(start[d])
    };
    let mut high = times.iter().zip(caps).map(|(t, &cap)| t[cap]).fold(0.0, f64::max);
    let mut low = 0.0;
    for _ in 0..BISECTIONS {
        let middle = f64::midpoint(low, high);
        let sum: usize = (0..units.len()).map(|d| by(middle, d)).sum();
        if sum <= total { low = middle } else { high = middle }
    }
    let early: Vec<usize> = (0..units.len()).map(|d| by(low, d)).collect();
    if early.iter().sum::<usize>() <= total {
        units = early;
    }
    for _ in units.iter().sum::<usize>()..total {
        let open = (0..units.len()).filter(|&d| units[d] < caps[d]);
        let next =
            open.min_by(|&x, &y| times[x][units[x] + 1].total_cmp(&times[y][units[y] + 1]))?;
        units[next] += 1;
    }
    Some(units)
}
