//! Branch and bound over placements from the bottom up (after MiniMalloc, Moffitt 2023).
//!
//! Among the smallest arenas take one whose offsets have the least sum. In it each item stands on
//! another one that it meets, or on the ground; so if its items are placed by their offsets, each
//! stands on the highest that was placed before it and that it meets. The search tries all such
//! orders, and leaves out an item while another one would fit below its offset, since the other one
//! would then stand there.

use super::{Item, Placed, load, steps};

/// Work that a search does at most, in steps of items that it looks at: some tens of milliseconds.
pub(super) const WORK: usize = 20_000_000;

/// Items that a search places at most: it goes as deep as there are items, and would not get far.
const ITEMS: usize = 1000;

/// An arena that is smaller than `size`, the smallest if the work suffices; it stops at `bound`.
pub(super) fn better(items: &[Item], bound: u64, size: u64, work: usize) -> Option<Placed> {
    if items.len() > ITEMS {
        return None;
    }
    let mut search = Search {
        items,
        bound,
        size,
        work,
        tops: vec![0; steps(items)],
        left: load(items),
        offsets: vec![None; items.len()],
        best: None,
    };
    search.place(items.len(), 0, 0);
    search.best.map(|offsets| Placed { offsets, size: search.size })
}

struct Search<'a> {
    items: &'a [Item],
    bound: u64,
    /// The arena to beat.
    size: u64,
    work: usize,
    /// The highest end of what is placed at each step.
    tops: Vec<u64>,
    /// Bytes at each step that are not placed.
    left: Vec<u64>,
    offsets: Vec<Option<u64>>,
    best: Option<Vec<u64>>,
}

impl Search<'_> {
    /// Places the items that are left, at `floor` at least, and there only those from number `next` on.
    fn place(&mut self, left: usize, floor: u64, next: usize) {
        if left == 0 {
            self.size = self.tops.iter().copied().max().unwrap_or(0);
            self.best = Some(self.offsets.iter().map(|offset| offset.unwrap_or(0)).collect());
            return;
        }
        for (offset, item) in self.choices(floor, next) {
            if self.work == 0 || self.size <= self.bound {
                return;
            }
            let life = self.items[item].life;
            let under = self.tops[life.steps()].to_vec();
            let end = offset + life.bytes;
            // A better arena may have been found since the choices were listed.
            if end >= self.size {
                continue;
            }
            self.tops[life.steps()].fill(end);
            self.left[life.steps()].iter_mut().for_each(|left| *left -= life.bytes);
            self.offsets[item] = Some(offset);
            self.place(left - 1, offset, item + 1);
            self.offsets[item] = None;
            self.left[life.steps()].iter_mut().for_each(|left| *left += life.bytes);
            self.tops[life.steps()].copy_from_slice(&under);
        }
    }

    /// Items that can be placed next with their offsets, the most promising first; none if no arena
    /// that is small enough can come of it.
    fn choices(&mut self, floor: u64, next: usize) -> Vec<(u64, usize)> {
        // How low what is left at each step can begin.
        let mut begins = vec![u64::MAX; self.tops.len()];
        let mut bases = Vec::new();
        let mut lowest_end = u64::MAX;
        for (item, Item { life, .. }) in self.items.iter().enumerate() {
            if self.offsets[item].is_some() {
                continue;
            }
            self.work = self.work.saturating_sub(life.len());
            let base = self.tops[life.steps()].iter().copied().max().unwrap_or(0);
            lowest_end = lowest_end.min(base + life.bytes);
            let begin = base.max(floor);
            begins[life.steps()].iter_mut().for_each(|lowest| *lowest = begin.min(*lowest));
            bases.push((base, item));
        }
        let too_high = |(&begin, &left): (&u64, &u64)| left > 0 && begin + left >= self.size;
        if begins.iter().zip(&self.left).any(too_high) {
            return Vec::new();
        }
        bases.retain(|&(base, item)| {
            base < lowest_end && (base > floor || base == floor && item >= next)
        });
        let large = |item: usize| {
            let life = self.items[item].life;
            u128::from(life.bytes) * life.len() as u128
        };
        bases.sort_by_key(|&(base, item)| (base, std::cmp::Reverse(large(item)), item));
        bases
    }
}
