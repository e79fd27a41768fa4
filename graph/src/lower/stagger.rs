//! Layers whose tiles are staggered: the second half of the tiles is summed while the first is
//! gathered, and the first product of the next block runs on what is there (ADR 0011).

use super::{
    Lowering,
    block::{BlockInner, BlockSum, blocks, first_products},
    build::{TensorRows, Tile},
    collective::Collective,
    galaxy::{Carried, DeviceLowering, Next},
    order::{LayerStep, staggered},
};
use crate::program::Role;
use galaxy_common::Exchange;
use std::collections::BTreeMap;

/// The fewest tiles that are staggered: of fewer, what is hidden is lost again to coarser steps.
const LEAST_TILES: usize = 4;

/// The fewest bytes of a tile that is staggered: smaller ones pass faster than they arrive. Then
/// latency rules, and the plain order, which has all tiles of a step on their way at once, is
/// better.
const LEAST_BYTES: u64 = 16 << 10;

/// Half a layer: from the last product of a block to the first product of the one that follows.
struct Half {
    here: Next,
    /// The block that follows; `None` after the last layer.
    next: Option<Next>,
    /// Which positions of the ring add to the sums; `needs`: which need the rows that result.
    contributes: Vec<bool>,
    needs: Vec<bool>,
    carried: Option<Carried>,
    joined: Option<Carried>,
    /// What the last products read; `first`: what the first products of the next block fill.
    inside: BlockInner,
    first: BlockInner,
    /// The device's own parts of sums, by owner and tile; `sums` and `rows`: what is staged of each
    /// collective.
    partials: BTreeMap<(usize, usize), TensorRows>,
    sums: BTreeMap<(usize, usize), TensorRows>,
    rows: BTreeMap<(usize, usize), TensorRows>,
}

impl DeviceLowering<'_> {
    /// How many tiles a device has at most, if tiles are staggered; equal on all devices.
    pub(super) fn staggers(&self) -> Option<usize> {
        let plan = self.lowering.plan;
        let tiles = self.tiles.iter().map(Vec::len).max().unwrap_or(0);
        let rows = self.tiles.iter().flatten().map(|t| t.len()).max().unwrap_or(0);
        let row = plan.wire.row(self.hidden().into());
        let plain = !plan.any_sequence() && plan.exchange == Exchange::Ring;
        let worth = tiles >= LEAST_TILES && u64::from(rows) * row >= LEAST_BYTES;
        (self.ring.len() > 1 && plain && worth).then_some(tiles)
    }

    /// Runs all layers, from what the first products of the first one computed. Returns the rows
    /// after the last norm.
    pub(super) fn staggered(
        &mut self,
        tiles: usize,
        mut carried: Option<Carried>,
        mut inside: BlockInner,
    ) -> Option<TensorRows> {
        let (Lowering { spec, shape, .. }, n) = (self.lowering, self.ring.len());
        let order = self.order.get_or_init(|| staggered(spec, shape, n, tiles));
        for layer in 0..spec.layers {
            self.b.layer();
            let mut halves = Vec::with_capacity(2);
            for &block in blocks(spec) {
                let half = self.half(Next { layer, block }, carried, inside);
                (carried, inside) = (half.joined, half.first);
                halves.push(half);
            }
            for &step in order {
                self.step(&mut halves, step);
            }
        }
        carried.map(|c| c.normed)
    }

    fn half(&mut self, here: Next, carried: Option<Carried>, inside: BlockInner) -> Half {
        let next = here.after(self.lowering.spec);
        Half {
            here,
            next,
            contributes: self.active(here),
            needs: next.map_or_else(|| vec![false; self.ring.len()], |next| self.active(next)),
            carried,
            joined: carried.map(|_| self.joined()),
            inside,
            first: next.map(|next| self.first(next)).unwrap_or_default(),
            partials: BTreeMap::new(),
            sums: BTreeMap::new(),
            rows: BTreeMap::new(),
        }
    }

    /// Lowers one step of all devices, as far as this one has a part in it.
    fn step(&mut self, halves: &mut [Half], step: LayerStep) {
        let owner = |back| self.ring.back(self.me, back);
        match step {
            LayerStep::Partial { half, back, tile } => {
                self.partial_of(&mut halves[half], owner(back), tile);
            }
            LayerStep::Pass { half, back, tile } => {
                let (half, key) = (&mut halves[half], (owner(back), tile));
                // A device without a part passes the sum through without a copy.
                if let Some(partial) = half.partials.remove(&key) {
                    self.b.at = (half.here.block, half.here.layer);
                    let added = half.sums.remove(&key);
                    half.sums.insert(key, self.export(partial.all(), partial.rows, added));
                }
            }
            LayerStep::AddNorm { half, tile } => self.add_norm_of(&mut halves[half], tile),
            LayerStep::First { half, back, tile } => {
                self.first_of(&halves[half], owner(back), tile);
            }
            LayerStep::Shift { half, collective, back, tile } => {
                self.shift(&mut halves[half], collective, (owner(back), owner(back + 1)), tile);
            }
        }
    }

    fn partial_of(&mut self, half: &mut Half, owner: usize, tile: usize) {
        let Some(&rows) = self.tiles[owner].get(tile).filter(|_| !half.inside.is_empty()) else {
            return;
        };
        let hop = self.ring.scatter_hop(owner, self.me, &half.contributes);
        if owner == self.me || hop.send {
            self.b.at = (half.here.block, half.here.layer);
            half.partials.insert((owner, tile), self.partial(half.here, half.inside, rows));
        }
    }

    fn add_norm_of(&mut self, half: &mut Half, tile: usize) {
        let (Some(&rows), Some(carried), Some(joined)) =
            (self.tiles[self.me].get(tile), half.carried, half.joined)
        else {
            return;
        };
        let key = (self.me, tile);
        let partial = half.partials.remove(&key).map(TensorRows::all);
        let sum = BlockSum { partial, staged: half.sums.remove(&key) };
        self.add_norm(half.here, carried, joined, rows, sum);
        if self.ring.gather_hop(self.me, self.me, &half.needs).send {
            half.rows.insert(key, self.stage(joined.normed, rows));
        }
    }

    fn first_of(&mut self, half: &Half, owner: usize, tile: usize) {
        let Some(next) = half.next.filter(|_| !half.first.is_empty()) else { return };
        let Some(&rows) = self.tiles[owner].get(tile) else { return };
        self.b.at = (next.block, next.layer);
        if owner != self.me {
            self.import(next.layer, half.rows[&(owner, tile)], half.first);
        } else if let Some(joined) = half.joined {
            first_products(self.b, next.layer, joined.normed.rows(rows), half.first, rows);
        }
    }

    /// Sends the tile of the first of `owners`, and receives that of the second.
    fn shift(
        &mut self,
        half: &mut Half,
        collective: Collective,
        owners: (usize, usize),
        tile: usize,
    ) {
        let gathers = collective == Collective::Gather;
        let Some(at) = (if gathers { half.next } else { Some(half.here) }) else { return };
        self.b.at = (at.block, at.layer);
        let (staged, role) =
            if gathers { (&mut half.rows, Role::RowTile) } else { (&mut half.sums, Role::SumTile) };
        let hop = |owner| {
            if gathers {
                self.ring.gather_hop(owner, self.me, &half.needs)
            } else {
                self.ring.scatter_hop(owner, self.me, &half.contributes)
            }
        };
        let (sent, received) = owners;
        if self.tiles[sent].len() > tile && hop(sent).send {
            let to = self.ring.rank(self.ring.next(self.me));
            let id = self.transfer(at, collective, sent, tile);
            self.b.send(to, id, tile as u16, staged[&(sent, tile)]);
        }
        if let Some(&rows) = self.tiles[received].get(tile)
            && hop(received).receive
        {
            let from = self.ring.rank(self.ring.previous(self.me));
            let id = self.transfer(at, collective, received, tile);
            let expected = Tile { role, rows, width: self.hidden() };
            let value = self.b.receive(from, id, tile as u16, expected);
            staged.insert((received, tile), value);
        }
    }
}
