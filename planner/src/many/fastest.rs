//! Rings of the fastest devices, priced in all ways, and what one device more or less changes.

use crate::{
    request::Search,
    ring::{Ring, Rings},
    search::{self, Priced, TILE, order},
};

/// How many rings are kept.
const MOST: usize = 4;
/// How many times the best ring is changed.
const CHANGES: usize = 3;
/// How many sets are looked at each time.
const NEAR: usize = 6;
/// The most devices among which tiles go straight to everyone here.
const DIRECT: usize = 16;

/// The best rings of the fastest devices, the best first. `fastest` has all of them, the fastest first.
pub(super) fn rings(rings: &mut Rings<'_>, fastest: &[usize], search: &mut Search) -> Vec<Priced> {
    let n = fastest.len();
    let mut sizes: Vec<usize> = Vec::new();
    let mut size = 1;
    while size < n {
        sizes.push(size);
        // As fine as a fifth: costs change slowly with many devices.
        size += (size / 5).max(1);
    }
    sizes.push(n);
    let set = |count: usize| {
        let mut set = fastest[..count].to_vec();
        set.sort_unstable();
        set
    };
    let sets: Vec<Vec<usize>> = sizes.iter().map(|&count| set(count)).collect();
    search.subsets += sets.len() as u64;
    let mut found = search::among(rings, &sets, MOST, DIRECT);
    for _ in 0..CHANGES {
        let Some(best) = found.first().cloned() else { break };
        let near = near(&best.members, fastest);
        search.subsets += near.len() as u64;
        for set in near {
            let members = order(&rings.links, best.means.link, TILE, &set);
            let ring = Ring { members: &members, ..best.ring() };
            if let Some(cost) = rings.price(ring) {
                let (means, by_rows) = (best.means, best.by_rows);
                search::keep(&mut found, Priced { members, means, by_rows, cost });
            }
        }
        if found.first().is_some_and(|f| f.cost >= best.cost) {
            break;
        }
    }
    found.truncate(MOST);
    found
}

/// Sets of one device more or less: those around the edge between inside and outside first.
fn near(inside: &[usize], fastest: &[usize]) -> Vec<Vec<usize>> {
    let mut near: Vec<(usize, Vec<usize>)> = Vec::new();
    for (rank, &device) in fastest.iter().enumerate() {
        let mut set = inside.to_vec();
        match set.iter().position(|&m| m == device) {
            Some(at) if set.len() > 1 => drop(set.remove(at)),
            Some(_) => continue,
            None => set.push(device),
        }
        set.sort_unstable();
        near.push((rank.abs_diff(inside.len()), set));
    }
    near.sort_by_key(|(away, _)| *away);
    near.into_iter().take(NEAR).map(|(_, set)| set).collect()
}
