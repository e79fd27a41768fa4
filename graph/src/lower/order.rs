//! In which order a device of the ring takes the tiles of a layer, so that compute and link are
//! both busy.
//!
//! The order is that of an idealised ring of equal devices whose links are about as busy as their kernels,
//! which is where order decides. There each lane takes, whenever it is free, the most urgent step that is
//! ready (list scheduling). All devices of that ring do the same step at the same time, so what one sends
//! is what the next receives, in every order. Real devices and links only change when steps happen, never
//! their order.

use super::collective::Collective;
use galaxy_common::BatchShape;
use galaxy_model::ModelSpec;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    sync::OnceLock,
};

/// A step of a layer. A layer has two halves, attention and MLP (a parallel residual is one): each begins
/// with the block's last product and ends with the first product of the block that follows. `back` names
/// an owner of rows by its distance backwards along the ring; 0 is the device itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum LayerStep {
    /// The last product of the block.
    Partial { half: usize, back: usize, tile: usize },
    /// Adds the sum that came for another owner, and makes it ready to be sent on.
    Pass { half: usize, back: usize, tile: usize },
    /// The connective block of an own tile, after which it is ready to be sent.
    AddNorm { half: usize, tile: usize },
    /// The first product of the block that follows.
    First { half: usize, back: usize, tile: usize },
    /// Sends the tile of the owner `back`, and receives that of the owner before it.
    Shift { half: usize, collective: Collective, back: usize, tile: usize },
}

impl LayerStep {
    fn tile(self) -> usize {
        match self {
            Self::Partial { tile, .. }
            | Self::Pass { tile, .. }
            | Self::AddNorm { tile, .. }
            | Self::First { tile, .. }
            | Self::Shift { tile, .. } => tile,
        }
    }
    fn on_link(self) -> bool {
        matches!(self, Self::Shift { .. })
    }

    /// The steps of the layer that must be over before this one. What the first half reads is there
    /// already.
    fn after(self, n: usize) -> Vec<Self> {
        use Collective::{Gather, Scatter};
        let shift = |half, collective, back, tile| Self::Shift { half, collective, back, tile };
        match self {
            Self::Partial { half: 0, .. } => vec![],
            Self::Partial { half, back, tile } => vec![Self::First { half: half - 1, back, tile }],
            Self::Pass { half, back, tile } => {
                let sum = (back > 1).then(|| shift(half, Scatter, back - 1, tile));
                [Self::Partial { half, back, tile }].into_iter().chain(sum).collect()
            }
            Self::AddNorm { half, tile } => {
                vec![Self::Partial { half, back: 0, tile }, shift(half, Scatter, n - 1, tile)]
            }
            Self::First { half, back: 0, tile } => vec![Self::AddNorm { half, tile }],
            Self::First { half, back, tile } => vec![shift(half, Gather, back - 1, tile)],
            Self::Shift { half, collective: Scatter, back, tile } => {
                vec![Self::Pass { half, back, tile }]
            }
            Self::Shift { half, collective: Gather, back: 0, tile } => {
                vec![Self::AddNorm { half, tile }]
            }
            Self::Shift { half, collective: Gather, back, tile } => {
                vec![shift(half, Gather, back - 1, tile)]
            }
        }
    }
}

/// What steps cost in the idealised ring; only ratios count.
struct Costs {
    /// The last product of each half, on one tile; `first`: the first product of the block that follows.
    partial: Vec<u64>,
    first: Vec<u64>,
    /// A row operation on a tile, of whatever kind.
    row: u64,
    /// A tile on a link.
    wire: u64,
    /// The time from the end of a send until the tile may be used.
    lag: u64,
}

impl Costs {
    fn new(spec: &ModelSpec, shape: &BatchShape, n: usize, tiles: usize) -> Self {
        // Of a row, for each value of the hidden width.
        let queries = u64::from(spec.heads) * u64::from(spec.head_width);
        let keys = u64::from(spec.kv_heads) * u64::from(spec.head_width);
        let inner = u64::from(spec.intermediate);
        let up = if spec.gated { 2 * inner } else { inner };
        // Scores and what they weigh: each row with the rows of its text, or those before it.
        let pairs: u64 = shape.segments().iter().map(|s| u64::from(s.rows).pow(2)).sum();
        let seen = pairs / u64::from(shape.rows()).max(1) / if spec.causal { 2 } else { 1 };
        let attend = 2 * seen * queries / u64::from(spec.hidden).max(1);
        let (output, qkv) = (queries + attend, queries + 2 * keys);
        let (partial, first) = match spec.parallel {
            true => (vec![output + inner], vec![qkv + up]),
            false => (vec![output, inner], vec![up, qkv]),
        };
        let all: u64 = partial.iter().chain(&first).sum();
        // For each tile: n of each product, and 2 (n - 1) transfers a half; the link is a little less busy
        // than the kernels. With a lag, transfers that need one another do not follow at once, so
        // that latency is hidden too. These three ratios were the best over many models, rings
        // and links (ADR 0011).
        let (n, tiles) = (n as u64, tiles as u64);
        let transfers = 2 * partial.len() as u64 * (n - 1);
        let wire = (all * n * 23 / (transfers * 25)).max(1);
        Self { partial, first, row: (all / 200).max(1), wire, lag: wire * tiles / 4 }
    }
    fn of(&self, step: LayerStep) -> u64 {
        match step {
            LayerStep::Partial { half, .. } => self.partial[half].max(1),
            LayerStep::First { half, .. } => self.first[half].max(1),
            LayerStep::Pass { .. } | LayerStep::AddNorm { .. } => self.row,
            LayerStep::Shift { .. } => self.wire,
        }
    }
}

/// All steps of a layer in a ring of `n` devices of `tiles` tiles each, each after those that it
/// needs.
fn steps(halves: usize, n: usize, tiles: usize) -> Vec<LayerStep> {
    use Collective::{Gather, Scatter};
    let mut steps = Vec::new();
    for half in 0..halves {
        for tile in 0..tiles {
            steps.extend((0..n).map(|back| LayerStep::Partial { half, back, tile }));
            for back in 1..n {
                steps.push(LayerStep::Pass { half, back, tile });
                steps.push(LayerStep::Shift { half, collective: Scatter, back, tile });
            }
            steps.push(LayerStep::AddNorm { half, tile });
            steps.push(LayerStep::First { half, back: 0, tile });
            for back in 1..n {
                steps.push(LayerStep::Shift { half, collective: Gather, back: back - 1, tile });
                steps.push(LayerStep::First { half, back, tile });
            }
        }
    }
    steps
}

/// A lane of the idealised ring.
#[derive(Default)]
struct Lane {
    free: u64,
    /// Steps by the time from which they may start.
    coming: BinaryHeap<Reverse<(u64, usize)>>,
    /// Steps that may start now, the most urgent first.
    ready: BTreeSet<(Urgency, usize)>,
}

/// What goes first: row operations, which others wait for; then the first half of the tiles, so
/// that their way around the ring is hidden behind the products of the second; then the longest
/// way to the end.
type Urgency = (bool, bool, Reverse<u64>, usize);

impl Lane {
    /// When its next step starts; `None` where none is left.
    fn next(&self) -> Option<u64> {
        let coming = self.coming.peek().map(|Reverse((at, _))| self.free.max(*at));
        if self.ready.is_empty() { coming } else { Some(self.free) }
    }
    fn take(&mut self, now: u64, urgency: &[Urgency]) -> usize {
        while let Some(&Reverse((at, index))) = self.coming.peek()
            && at <= now
        {
            self.coming.pop();
            self.ready.insert((urgency[index], index));
        }
        self.ready.pop_first().expect("a step starts now").1
    }
}

/// The steps of a layer in the order in which devices take them, once it is known: the same on all
/// devices.
pub(crate) type Order = OnceLock<Vec<LayerStep>>;

/// The steps of a layer, in the order in which each device of a ring of `n` > 1 takes them.
pub(super) fn staggered(
    spec: &ModelSpec,
    shape: &BatchShape,
    n: usize,
    tiles: usize,
) -> Vec<LayerStep> {
    list(&Costs::new(spec, shape, n, tiles), n, tiles)
}

/// The steps of a layer in the order that list scheduling gives under these costs.
fn list(costs: &Costs, n: usize, tiles: usize) -> Vec<LayerStep> {
    let steps = steps(costs.partial.len(), n, tiles);
    let index: BTreeMap<LayerStep, usize> =
        steps.iter().enumerate().map(|(i, s)| (*s, i)).collect();
    let after: Vec<Vec<usize>> =
        steps.iter().map(|s| s.after(n).iter().map(|a| index[a]).collect()).collect();
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); steps.len()];
    let mut path: Vec<u64> = steps.iter().map(|&s| costs.of(s)).collect();
    for at in (0..steps.len()).rev() {
        for &earlier in &after[at] {
            before[earlier].push(at);
            path[earlier] = path[earlier].max(path[at] + costs.of(steps[earlier]));
        }
    }
    let urgency: Vec<Urgency> = steps
        .iter()
        .zip(&path)
        .map(|(step, &path)| {
            let row = matches!(step, LayerStep::Pass { .. } | LayerStep::AddNorm { .. });
            (!row, step.tile() >= tiles.div_ceil(2), Reverse(path), step.tile())
        })
        .collect();

    let mut lanes = [Lane::default(), Lane::default()];
    let mut missing: Vec<usize> = after.iter().map(Vec::len).collect();
    let mut ready = vec![0u64; steps.len()];
    for (at, step) in steps.iter().enumerate().filter(|(at, _)| missing[*at] == 0) {
        lanes[usize::from(step.on_link())].coming.push(Reverse((0, at)));
    }
    let mut order = Vec::with_capacity(steps.len());
    // Always the lane whose step starts first: all that is ready by then is known.
    while let Some((now, lane)) =
        (0..2).filter_map(|lane| lanes[lane].next().map(|now| (now, lane))).min()
    {
        let at = lanes[lane].take(now, &urgency);
        lanes[lane].free = now + costs.of(steps[at]);
        let done = lanes[lane].free + if steps[at].on_link() { costs.lag } else { 0 };
        order.push(steps[at]);
        for &next in &before[at] {
            ready[next] = ready[next].max(done);
            missing[next] -= 1;
            if missing[next] == 0 {
                let lane = usize::from(steps[next].on_link());
                lanes[lane].coming.push(Reverse((ready[next], next)));
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_listed_once_and_after_its_dependencies() {
        let costs = |halves: usize, tiles: usize| Costs {
            partial: vec![2, 4][..halves].to_vec(),
            first: vec![4, 3][..halves].to_vec(),
            row: 1,
            wire: 4,
            lag: tiles as u64,
        };
        let sizes = [(2, 1), (2, 4), (3, 5), (4, 4), (4, 8), (7, 3)];
        for (halves, (n, tiles)) in [1, 2].into_iter().flat_map(|h| sizes.map(|size| (h, size))) {
            let order = list(&costs(halves, tiles), n, tiles);
            let mut all = steps(halves, n, tiles);
            for (at, step) in order.iter().enumerate() {
                for needed in step.after(n) {
                    assert!(order[..at].contains(&needed), "{step:?} comes before {needed:?}");
                }
            }
            let mut sorted = order.clone();
            sorted.sort_unstable();
            all.sort_unstable();
            assert_eq!(sorted, all);
        }
    }
}
