//! The exact split: heads, columns, rows and vocabulary of devices in a given order, for given
//! numbers of layers in each mode, with the least cost that the closed form gives to any split.
//!
//! # The problem
//! Device d that takes h heads, c columns, v tokens of the vocabulary and r rows (all in units) costs
//! `heads[h]`, `columns[c]`, `vocabulary[v]` and `rows[r]` nanoseconds; `wire[r]` is what its cables
//! need for a block. The slowest device rules each stage:
//!
//! ```text
//! A = max heads   M = max columns   V = max vocabulary   P = max rows   W = max wire
//! cost = P + V + fixed + carried * W + attention * overlap(A, W) + mlp * overlap(M, W)
//! overlap(x, w) = max(x, w) + min(x, w) / tiles
//! ```
//!
//! and each device holds `heads.bytes[h] + columns.bytes[c] + vocabulary.bytes[v]` within what it has
//! left. All tables grow with their units, except `wire`, which shrinks with rows: who owns them does
//! not receive them.
//!
//! # The method
//! Rows share nothing with the rest but W, so the few best pairs (W, P) are found first, by
//! thresholds. Without memory, A, M and V are each found by giving unit after unit to the device
//! that is done with it first. Where that does not fit, thresholds of A are tried from the least up;
//! for each, the least M is found by bisection over a knapsack: of all ways to give out the heads
//! within A and memory, the one that leaves room for the most columns within M. Both are exact. The
//! vocabulary is exact without memory; where memory binds, a few splits of it are tried, and the rest
//! is exact for each.

mod level;

use level::level;

/// What a device does with a number of units: index 0 is none of them.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CostCurve {
    /// Nanoseconds, which grow with the units.
    pub nanos: Vec<f64>,
    /// Bytes, which grow with the units.
    pub bytes: Vec<u64>,
}

/// A device of the problem, with what it costs.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceCurves {
    /// What heads cost, by their units.
    pub heads: CostCurve,
    /// What columns cost, by their units.
    pub columns: CostCurve,
    /// What the vocabulary costs, by its units.
    pub vocabulary: CostCurve,
    /// Nanoseconds by units of rows, growing.
    pub rows: Vec<f64>,
    /// Nanoseconds of the wire in a block by units of rows, shrinking.
    pub wire: Vec<f64>,
    /// Whether it may own rows.
    pub owner: bool,
    /// Bytes that it has for heads, columns and vocabulary.
    pub room: u64,
}

/// The problem of splitting a model's work among the devices of a ring.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    /// Devices in ring order.
    pub devices: Vec<DeviceCurves>,
    /// Units of heads to give out.
    pub heads: usize,
    /// Units of columns to give out.
    pub columns: usize,
    /// Units of the vocabulary to give out.
    pub vocabulary: usize,
    /// Units of rows to give out.
    pub rows: usize,
    /// How many layers have their attention cut by heads.
    pub attention: f64,
    /// How many layers have their MLP cut by columns.
    pub mlp: f64,
    /// How many times W is paid by itself.
    pub carried: f64,
    /// Nanoseconds that are paid in any case.
    pub fixed: f64,
    /// Tiles that overlap; 1 if none do.
    pub tiles: f64,
    /// Whether layers have a parallel residual: then A and M together are hidden behind one W, or it
    /// behind them, and `attention` counts such layers.
    pub parallel_residual: bool,
}

/// A solution of the problem.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Split {
    /// Units of heads of each device.
    pub heads: Vec<usize>,
    /// Units of columns of each device.
    pub columns: Vec<usize>,
    /// Units of the vocabulary of each device.
    pub vocabulary: Vec<usize>,
    /// Units of rows of each device.
    pub rows: Vec<usize>,
    /// Its cost by the closed form, in nanoseconds.
    pub cost: f64,
}

/// The error where no split fits: what is missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Missing {
    /// How many bytes are missing at least.
    pub bytes: u64,
    /// The device that lacks them, as its place in the ring; `None` if it is no single one.
    pub device: Option<usize>,
}

/// The slowest device of each of the stages that memory couples.
#[derive(Clone, Debug)]
struct Stages {
    heads: Vec<usize>,
    columns: Vec<usize>,
    vocabulary: Vec<usize>,
    /// A, M and V of the problem, in nanoseconds.
    slowest: [f64; 3],
}

/// Heads of each device, and the most columns that it could take beside them.
struct Capacity {
    heads: Vec<usize>,
    columns: Vec<usize>,
}

/// Units of rows of each device, with their W and P.
struct Rows {
    split: Vec<usize>,
    wire: f64,
    work: f64,
}

impl Problem {
    /// The cost of a stage of `x` nanoseconds whose wire needs `w`.
    fn overlap(&self, x: f64, w: f64) -> f64 {
        x.max(w) + x.min(w) / self.tiles
    }

    fn cost(&self, rows: &Rows, [a, m, v]: [f64; 3]) -> f64 {
        let blocks = match self.parallel_residual {
            true => self.attention * self.overlap(a + m, rows.wire),
            false => {
                self.attention * self.overlap(a, rows.wire) + self.mlp * self.overlap(m, rows.wire)
            }
        };
        rows.work + v + self.fixed + self.carried * rows.wire + blocks
    }

    /// The closed form of a split.
    pub fn price(&self, split: &Split) -> f64 {
        let most = |of: &dyn Fn(usize) -> f64| (0..self.devices.len()).map(of).fold(0.0, f64::max);
        let rows = Rows {
            split: Vec::new(),
            wire: most(&|d| self.devices[d].wire[split.rows[d]]),
            work: most(&|d| self.devices[d].rows[split.rows[d]]),
        };
        let a = most(&|d| self.devices[d].heads.nanos[split.heads[d]]);
        let m = most(&|d| self.devices[d].columns.nanos[split.columns[d]]);
        let v = most(&|d| self.devices[d].vocabulary.nanos[split.vocabulary[d]]);
        self.cost(&rows, [a, m, v])
    }

    /// Bytes that a split takes of what device `d` has left.
    pub fn bytes(&self, split: &Split, d: usize) -> u64 {
        self.held(d, [split.heads[d], split.columns[d], split.vocabulary[d]])
    }

    /// Bytes of so many units of heads, columns and vocabulary on device `d`.
    fn held(&self, d: usize, [heads, columns, words]: [usize; 3]) -> u64 {
        let side = &self.devices[d];
        side.heads.bytes[heads] + side.columns.bytes[columns] + side.vocabulary.bytes[words]
    }

    /// The least cost that any split could have if memory had no end. `None` where no device may own
    /// rows.
    pub fn bound(&self) -> Option<f64> {
        self.bound_with(self.slowest())
    }

    /// A, M and V if memory had no end, in nanoseconds.
    pub fn slowest(&self) -> [f64; 3] {
        self.unbounded().slowest
    }

    /// [`Self::bound`] where [`Self::slowest`] is known.
    pub fn bound_with(&self, slowest: [f64; 3]) -> Option<f64> {
        let mut best: Option<f64> = None;
        self.each_rows(|rows, wire| {
            let cost = self.cost(&rows, slowest);
            let least = best.map_or(cost, |best| best.min(cost));
            best = Some(least);
            // Those that follow take no less work.
            self.cost(&Rows { split: Vec::new(), wire, work: rows.work }, slowest) < least
        });
        best
    }

    /// The best split.
    ///
    /// # Errors
    /// When none fits.
    pub fn solve(&self) -> Result<Split, Missing> {
        self.solve_below(f64::INFINITY)
    }

    /// The best split, if it costs less than `limit`.
    ///
    /// # Errors
    /// When none fits, or none costs less.
    pub fn solve_below(&self, limit: f64) -> Result<Split, Missing> {
        // Parts together take no less than the whole.
        if self.whole() > self.devices.iter().map(|s| s.room).sum() {
            return Err(self.missing());
        }
        let rows = self.row_splits();
        if rows.is_empty() {
            let device = (0..self.devices.len()).max_by_key(|&d| self.devices[d].room);
            return Err(Missing { bytes: 1, device });
        }
        let mut best: Option<Split> = None;
        let mut offer = |stages: &Stages| {
            for rows in &rows {
                let cost = self.cost(rows, stages.slowest);
                if cost < best.as_ref().map_or(limit, |b| b.cost) {
                    best = Some(Split {
                        heads: stages.heads.clone(),
                        columns: stages.columns.clone(),
                        vocabulary: stages.vocabulary.clone(),
                        rows: rows.split.clone(),
                        cost,
                    });
                }
            }
            best.as_ref().map_or(limit, |b| b.cost)
        };
        let free = self.unbounded();
        if self.fits(&free) {
            offer(&free);
        } else {
            let least = |[a, m, v]: [f64; 3]| {
                let costs = rows.iter().map(|rows| self.cost(rows, [a, m, v]));
                costs.fold(f64::INFINITY, f64::min)
            };
            let mut cost = limit;
            if least(free.slowest) >= cost {
                return Err(self.missing());
            }
            let thresholds = self.thresholds(&free);
            for vocabulary in self.vocabularies(&free) {
                cost = self.within_memory(&vocabulary, &thresholds, cost, &least, &mut offer);
            }
        }
        best.ok_or_else(|| self.missing())
    }

    fn fits(&self, stages: &Stages) -> bool {
        let units = |d: usize| [stages.heads[d], stages.columns[d], stages.vocabulary[d]];
        (0..self.devices.len()).all(|d| self.held(d, units(d)) <= self.devices[d].room)
    }

    /// The split with the least A, M and V, if memory had no end.
    fn unbounded(&self) -> Stages {
        let curve = |total: usize, of: fn(&DeviceCurves) -> &CostCurve| {
            let times: Vec<&[f64]> = self.devices.iter().map(|s| &of(s).nanos[..]).collect();
            let caps: Vec<usize> = times.iter().map(|t| t.len() - 1).collect();
            level(&times, &caps, vec![0; times.len()], total).unwrap_or_default()
        };
        let heads = curve(self.heads, |s| &s.heads);
        let columns = curve(self.columns, |s| &s.columns);
        let vocabulary = curve(self.vocabulary, |s| &s.vocabulary);
        self.stages(heads, columns, vocabulary)
    }

    fn stages(&self, heads: Vec<usize>, columns: Vec<usize>, vocabulary: Vec<usize>) -> Stages {
        let slowest = [
            self.most(&heads, |s| &s.heads),
            self.most(&columns, |s| &s.columns),
            self.most(&vocabulary, |s| &s.vocabulary),
        ];
        Stages { heads, columns, vocabulary, slowest }
    }

    /// Nanoseconds of the slowest device with these units.
    fn most(&self, units: &[usize], of: fn(&DeviceCurves) -> &CostCurve) -> f64 {
        let each = self.devices.iter().zip(units).map(|(s, &n)| of(s).nanos[n]);
        each.fold(0.0, f64::max)
    }

    /// Splits of rows such that no other has both W and P smaller.
    fn row_splits(&self) -> Vec<Rows> {
        let mut found = Vec::new();
        self.each_rows(|rows, _| {
            found.push(rows);
            true
        });
        found
    }

    /// [`Self::row_splits`] from the least P up, each with the least W that one of those behind it may
    /// have, while `more` are wanted.
    fn each_rows(&self, mut more: impl FnMut(Rows, f64) -> bool) {
        let n = self.devices.len();
        let zeros = vec![0.0; self.rows + 1];
        // A device that may own none does not compute, and receives all.
        let work: Vec<&[f64]> =
            self.devices.iter().map(|s| if s.owner { &s.rows[..] } else { &zeros[..1] }).collect();
        let caps: Vec<usize> = work.iter().map(|w| w.len() - 1).collect();
        let measure = |split: Vec<usize>| {
            let wire = (0..n).map(|d| self.devices[d].wire[split[d]]).fold(0.0, f64::max);
            let done = (0..n).map(|d| work[d][split[d]]).fold(0.0, f64::max);
            Rows { split, wire, work: done }
        };
        let Some(fastest) = level(&work, &caps, vec![0; n], self.rows).map(measure) else { return };
        let mut thresholds: Vec<f64> = self
            .devices
            .iter()
            .flat_map(|s| s.wire.iter().copied())
            .filter(|&w| w < fastest.wire)
            .collect();
        thresholds.sort_unstable_by(f64::total_cmp);
        thresholds.dedup();
        let least = thresholds.first().copied().unwrap_or(fastest.wire);
        if !more(fastest, least) {
            return;
        }
        // From the loosest bound on the wire to the tightest, until no rows meet it.
        while let Some(bound) = thresholds.pop() {
            let owned = self.devices.iter().zip(&caps).map(|(side, &cap)| {
                let enough = side.wire.partition_point(|&w| w > bound);
                (enough <= cap).then_some(enough)
            });
            let Some(owned) = owned.collect::<Option<Vec<usize>>>() else { break };
            let Some(rows) = level(&work, &caps, owned, self.rows).map(measure) else { break };
            thresholds.truncate(thresholds.partition_point(|&w| w < rows.wire));
            if !more(rows, least) {
                break;
            }
        }
    }

    /// The splits of the vocabulary that are tried where memory binds.
    fn vocabularies(&self, free: &Stages) -> Vec<Vec<usize>> {
        if self.vocabulary == 0 {
            return vec![vec![0; self.devices.len()]];
        }
        let times: Vec<&[f64]> = self.devices.iter().map(|s| &s.vocabulary.nanos[..]).collect();
        let mut tried = vec![free.vocabulary.clone()];
        let most = times.iter().map(|t| t[t.len() - 1]).fold(0.0, f64::max);
        let steps = 5;
        for step in 0..=steps {
            let share = f64::from(step) / f64::from(steps);
            let bound = free.slowest[2] + (most - free.slowest[2]) * share * share;
            // As much as time and memory allow on those with the most room beside their part of the
            // blocks, the rest where it goes.
            let spare = |d: usize| {
                let side = &self.devices[d];
                let taken = side.heads.bytes[free.heads[d]] + side.columns.bytes[free.columns[d]];
                side.room.saturating_sub(taken)
            };
            for beside_blocks in [true, false] {
                let mut order: Vec<usize> = (0..self.devices.len()).collect();
                order.sort_by_key(|&d| std::cmp::Reverse(spare(d)));
                let mut left = self.vocabulary;
                let mut units = vec![0; self.devices.len()];
                for d in order {
                    let curve = &self.devices[d].vocabulary;
                    let room = if beside_blocks { spare(d) } else { self.devices[d].room };
                    let fit = curve.bytes.partition_point(|&b| b <= room).saturating_sub(1);
                    let fast = curve.nanos.partition_point(|&t| t <= bound).saturating_sub(1);
                    units[d] = fit.min(fast).min(left);
                    left -= units[d];
                }
                if left == 0 && !tried.contains(&units) {
                    tried.push(units);
                }
            }
        }
        tried
    }

    /// The values that A and M may have: no less than without memory, in order.
    fn thresholds(&self, free: &Stages) -> [Vec<f64>; 2] {
        let values = |of: fn(&DeviceCurves) -> &CostCurve, from: f64| {
            let all = self.devices.iter().flat_map(|s| of(s).nanos.iter().copied());
            let mut all: Vec<f64> = all.filter(|&t| t >= from).collect();
            all.sort_unstable_by(f64::total_cmp);
            all.dedup();
            all
        };
        [values(|s| &s.heads, free.slowest[0]), values(|s| &s.columns, free.slowest[1])]
    }

    /// Offers all pairs of A and M that no other beats, for one split of the vocabulary; returns the
    /// best cost.
    fn within_memory(
        &self,
        vocabulary: &[usize],
        [heads, columns]: &[Vec<f64>; 2],
        mut best: f64,
        least: &dyn Fn([f64; 3]) -> f64,
        offer: &mut dyn FnMut(&Stages) -> f64,
    ) -> f64 {
        let words = |d: usize| {
            let side = &self.devices[d];
            side.room.checked_sub(side.vocabulary.bytes[vocabulary[d]])
        };
        let Some(rooms) = (0..self.devices.len()).map(words).collect::<Option<Vec<u64>>>() else {
            return best;
        };
        let last = self.most(vocabulary, |s| &s.vocabulary);
        // No better than what was found, or nothing fits beside this part of the vocabulary however
        // long it takes.
        let (Some(&a), Some(&m)) = (heads.first(), columns.first()) else { return best };
        if least([a, m, last]) >= best
            || self.knapsack(f64::INFINITY, f64::INFINITY, &rooms).is_none()
        {
            return best;
        }
        // The least M that was found for a smaller A bounds that of a larger one.
        let (mut at, mut most) = (0, columns.len());
        while at < heads.len() {
            // What is worth the while: M of which the cost beside A is less than the best.
            let worth = |&m: &f64| least([heads[at], m, last]) < best;
            let Some(slowest) = columns[..most].partition_point(worth).checked_sub(1) else {
                break;
            };
            // More fits within a larger A, and less is worth the while beside it.
            let fits = |at: usize| self.knapsack(heads[at], columns[slowest], &rooms).is_some();
            let Some(next) = first(at, heads.len(), fits) else { break };
            if next > at {
                at = next;
                continue;
            }
            let (mut low, mut high) = (0, slowest);
            while low < high {
                let middle = low.midpoint(high);
                match self.knapsack(heads[at], columns[middle], &rooms) {
                    Some(_) => high = middle,
                    None => low = middle + 1,
                }
            }
            let found = self.knapsack(heads[at], columns[high], &rooms);
            if let Some((heads, columns)) = found.and_then(|found| self.filled(&found)) {
                best = best.min(offer(&self.stages(heads, columns, vocabulary.to_vec())));
            }
            most = high;
            at += 1;
        }
        best
    }

    /// Heads within two thresholds and memory that leave room for all columns, and how many columns
    /// each device could take beside them, if there are any.
    fn knapsack(&self, a: f64, m: f64, rooms: &[u64]) -> Option<Capacity> {
        let n = self.devices.len();
        // For each device, the most columns beside so many heads.
        let mut beside: Vec<u32> = Vec::with_capacity(n * (self.heads + 1));
        let mut ends: Vec<usize> = Vec::with_capacity(n);
        let (mut most, mut reach) = (0, 0);
        for (side, &room) in self.devices.iter().zip(rooms) {
            let from = beside.len();
            let heads = side.heads.nanos.partition_point(|&t| t <= a);
            let columns = &side.columns.bytes;
            let mut fast = side.columns.nanos.partition_point(|&t| t <= m);
            for &bytes in &side.heads.bytes[..heads] {
                let Some(left) = room.checked_sub(bytes) else { break };
                // The more heads, the fewer columns.
                fast = columns[..fast].partition_point(|&b| b <= left);
                let Some(columns) = fast.checked_sub(1) else { break };
                beside.push(columns as u32);
            }
            let own = beside.len() - from;
            most += *beside.get(from)? as usize;
            reach += own - 1;
            ends.push(beside.len());
        }
        if most < self.columns || reach < self.heads {
            return None;
        }
        // best[h]: one more than the most columns beside h heads of the devices so far; 0 for none.
        let width = self.heads + 1;
        let mut best = vec![0u32; width * (n + 1)];
        best[0] = 1;
        let mut from = 0;
        for (d, &end) in ends.iter().enumerate() {
            let (before, next) = best[d * width..].split_at_mut(width);
            for (h, &before) in before.iter().enumerate().filter(|(_, before)| **before > 0) {
                for (next, columns) in next[h..width].iter_mut().zip(&beside[from..end]) {
                    *next = (*next).max(before + columns);
                }
            }
            from = end;
        }
        if (best[n * width + self.heads] as usize) <= self.columns {
            return None;
        }
        // Back along the way that was best, of equals with the most heads on the last.
        let mut left = self.heads;
        let mut room = Capacity { heads: vec![0; n], columns: vec![0; n] };
        for d in (0..n).rev() {
            let own = &beside[d.checked_sub(1).map_or(0, |before| ends[before])..ends[d]];
            let wanted = best[(d + 1) * width + left];
            let before = &best[d * width..][..width];
            let made = |&own_heads: &usize| {
                let before = before[left - own_heads];
                before > 0 && before + own[own_heads] == wanted
            };
            let heads = (0..own.len().min(left + 1)).rev().find(made)?;
            (room.heads[d], room.columns[d]) = (heads, own[heads] as usize);
            left -= heads;
        }
        Some(room)
    }

    /// The heads as found, and all columns beside them.
    fn filled(&self, room: &Capacity) -> Option<(Vec<usize>, Vec<usize>)> {
        let times: Vec<&[f64]> = self.devices.iter().map(|s| &s.columns.nanos[..]).collect();
        let columns = level(&times, &room.columns, vec![0; times.len()], self.columns)?;
        Some((room.heads.clone(), columns))
    }

    /// The bytes that are missing at least, where nothing fits.
    fn missing(&self) -> Missing {
        let each = |d: usize| {
            let side = &self.devices[d];
            side.heads.bytes[0] + side.columns.bytes[0] + side.vocabulary.bytes[0]
        };
        if let Some(d) = (0..self.devices.len()).find(|&d| each(d) > self.devices[d].room) {
            return Missing { bytes: each(d) - self.devices[d].room, device: Some(d) };
        }
        let room: u64 = self.devices.iter().map(|s| s.room).sum();
        Missing { bytes: self.whole().saturating_sub(room).max(1), device: None }
    }

    /// Bytes of all that there is to hold, each counted on the device where it takes least.
    fn whole(&self) -> u64 {
        let whole = |of: fn(&DeviceCurves) -> &CostCurve| {
            let each = self.devices.iter().map(|s| of(s).bytes.last().copied().unwrap_or(0));
            each.min().unwrap_or(0)
        };
        whole(|s| &s.heads) + whole(|s| &s.columns) + whole(|s| &s.vocabulary)
    }
}

/// The first place from `from` on, before `end`, that `holds`, where all after it do too: in steps
/// twice as long each time, as it is mostly near.
fn first(from: usize, end: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut step, mut high) = (from, 1, from);
    while !holds(high) {
        low = high + 1;
        if low >= end {
            return None;
        }
        high = (high + step).min(end - 1);
        step *= 2;
    }
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) { high = middle } else { low = middle + 1 }
    }
    Some(high)
}

#[cfg(test)]
mod tests;
