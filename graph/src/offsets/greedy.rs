//! Placement of one item after another: each beside one that goes when it does, or as low as those before it allow.

use super::{Item, Lifetime, Placed};
use std::cmp::Reverse;

/// How often the items at the top are placed earlier, in the hope of a smaller arena.
const ROUNDS: usize = 64;

/// The best of several ways; it stops at the first whose arena has the size `bound`.
pub(super) fn best(items: &[Item], bound: u64) -> Placed {
    let meets = meetings(items);
    let mut best = beside(items, &meets, bound);
    if best.size <= bound {
        return best;
    }
    for mut order in orders(items) {
        for _ in 0..ROUNDS {
            let placed = lowest(items, &meets, &order);
            let top = topmost(items, &placed);
            if placed.size < best.size {
                best = placed;
            }
            if best.size <= bound {
                return best;
            }
            let Some(at) = top.and_then(|top| order.iter().position(|&item| item == top)) else {
                break;
            };
            order[..=at].rotate_right(1);
        }
    }
    best
}

/// Orders in which items are placed.
fn orders(items: &[Item]) -> [Vec<usize>; 4] {
    let by_size = |item: &Item| (Reverse(item.life.bytes), Reverse(item.life.len()));
    let by_length = |item: &Item| (Reverse(item.life.len()), Reverse(item.life.bytes));
    let area = |item: &Item| u128::from(item.life.bytes) * item.life.len() as u128;
    let by_start = |item: &Item| (item.life.first, Reverse(item.life.bytes));
    [
        ordered(items, by_size),
        ordered(items, by_length),
        ordered(items, |item| Reverse(area(item))),
        ordered(items, by_start),
    ]
}

/// Items by a key; those with equal keys stay as they are.
fn ordered<K: Ord>(items: &[Item], key: impl Fn(&Item) -> K) -> Vec<usize> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&item| key(&items[item]));
    order
}

/// For each item, those that are there at the same time.
fn meetings(items: &[Item]) -> Vec<Vec<usize>> {
    let meet = |item: &Item| {
        let others = items.iter().enumerate();
        let others =
            others.filter(|(_, other)| other.number != item.number && other.life.meets(&item.life));
        others.map(|(other, _)| other).collect()
    };
    items.iter().map(meet).collect()
}

/// Places items in an order, each at the lowest offset where it fits.
fn lowest(items: &[Item], meets: &[Vec<usize>], order: &[usize]) -> Placed {
    let mut offsets: Vec<Option<u64>> = vec![None; items.len()];
    let mut taken: Vec<(u64, u64)> = Vec::new();
    let mut size = 0;
    for &item in order {
        taken.clear();
        let placed = meets[item].iter().filter_map(|&other| Some((offsets[other]?, other)));
        taken.extend(placed.map(|(offset, other)| (offset, offset + items[other].life.bytes)));
        taken.sort_unstable();
        let mut offset = 0;
        for &(start, end) in &taken {
            if offset + items[item].life.bytes <= start {
                break;
            }
            offset = offset.max(end);
        }
        offsets[item] = Some(offset);
        size = size.max(offset + items[item].life.bytes);
    }
    Placed { offsets: offsets.into_iter().map(|offset| offset.unwrap_or(0)).collect(), size }
}

/// Places items as they come, each beside something that goes when it does or soon after, so that gaps grow together; in
/// an arena of the size `bound` where that is possible.
fn beside(items: &[Item], meets: &[Vec<usize>], bound: u64) -> Placed {
    let mut offsets: Vec<Option<u64>> = vec![None; items.len()];
    let mut taken: Vec<Taken> = Vec::new();
    let mut size = 0;
    for item in ordered(items, |item| (item.life.first, Reverse(item.life.bytes))) {
        taken.clear();
        let placed = meets[item].iter().filter_map(|&other| Some((offsets[other]?, other)));
        taken.extend(placed.map(|(begin, other)| {
            let Lifetime { bytes, last, .. } = items[other].life;
            Taken { begin, end: begin + bytes, last }
        }));
        taken.sort_unstable();
        let offset = best_side(&taken, items[item].life, bound)
            .unwrap_or_else(|| taken.iter().map(|taken| taken.end).fold(0, u64::max));
        offsets[item] = Some(offset);
        size = size.max(offset + items[item].life.bytes);
    }
    Placed { offsets: offsets.into_iter().map(|offset| offset.unwrap_or(0)).collect(), size }
}

/// Bytes of an arena that are taken until after a step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Taken {
    begin: u64,
    end: u64,
    last: usize,
}

/// The side of a gap in an arena of the size `bound` whose neighbour goes soonest after what is placed there, or if all
/// go before it, latest.
fn best_side(taken: &[Taken], own: Lifetime, bound: u64) -> Option<u64> {
    let mut below = Taken { begin: 0, end: 0, last: usize::MAX };
    let above = Taken { begin: bound, end: u64::MAX, last: usize::MAX };
    let rank = |last: usize| match last.checked_sub(own.last) {
        Some(after) => (true, usize::MAX - after),
        None => (false, last),
    };
    let mut best: Option<((bool, usize), u64)> = None;
    for &next in taken.iter().chain([&above]) {
        if next.begin >= below.end && next.begin - below.end >= own.bytes {
            for (last, offset) in [(below.last, below.end), (next.last, next.begin - own.bytes)] {
                if best.is_none_or(|(other, _)| rank(last) > other) {
                    best = Some((rank(last), offset));
                }
            }
        }
        if next.end > below.end {
            below = next;
        }
    }
    best.map(|(_, offset)| offset)
}

/// An item whose end is the arena's.
fn topmost(items: &[Item], placed: &Placed) -> Option<usize> {
    let ends = items.iter().zip(&placed.offsets).map(|(item, offset)| offset + item.life.bytes);
    ends.enumerate().max_by_key(|&(item, end)| (end, Reverse(item))).map(|(item, _)| item)
}
