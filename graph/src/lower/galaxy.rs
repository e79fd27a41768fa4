//! Tensor-parallel blocks, sequence-parallel connective blocks, ring collectives in tiles
//! (Galaxy, §III-B and §III-D). With one device nothing is left of the rings: strategy `local`.
//! Blocks that are cut by rows are in `sequence`.
//!
//! Tiles: each device's rows are cut into `plan.tiles` runs. A block's first product runs on each
//! tile as it arrives while the next is on the wire; its last product runs tile by tile in the
//! order in which the ring sums them, so that a tile's sum travels while the next is multiplied;
//! and a tile that is summed is joined, normed and sent on at once. With one tile nothing
//! overlaps: each collective ends before the product that reads it begins. With many, the sums of
//! some travel while others are gathered (`stagger`). In a direct exchange tiles go straight from
//! owner to reader, and partial sums straight to the owner, which adds them.

use super::{
    Lowering,
    block::{
        BlockInner, BlockSum, add_norm_kind, computes, embed, first_products, last_products, room,
    },
    build::{Builder, TensorRows, Tile},
    collective::{Collective, Transfers},
    cuts::cuts,
    exchange, head,
    order::Order,
    ring::{Hop, Ring, Route},
    visible,
};
use crate::program::{Block, OpKind, Region, Role};
use galaxy_common::{BatchShape, BlockAssignment, Exchange, Mode, Rank, Row, Span, WireType};
use galaxy_model::{ModelSpec, NormPlace};

pub(super) fn program(lowering: Lowering<'_>, rank: Rank, order: &Order) -> Builder {
    let Lowering { graph, spec, plan, phase, shape } = lowering;
    let ring = Ring::layers(plan, phase);
    let rows = cuts(plan, phase, shape);
    let depth = 2 * usize::from(plan.tiles) * ring.len();
    let mut builder = Builder::new(graph, plan, phase, rank, depth);
    // Alone, rows that are cut wait for nobody.
    let alone = ring.len() == 1 && plan.any_sequence();
    let cut = if alone { 1 } else { u32::from(plan.tiles) };
    let mut last = None;
    if let Some(me) = ring.position(rank) {
        let tiles = |at: usize| -> Vec<Span<Row>> {
            let own = rows[ring.rank(at).index()];
            own.cut(cut).filter(|t| !t.is_empty()).collect()
        };
        let sees = |layer: u32| -> Vec<Span<Row>> {
            let of = |at: usize| {
                let device = &plan.ring[ring.rank(at).index()];
                let seen = visible(graph, layer, shape, rows[ring.rank(at).index()]);
                // Each device that owns rows of this batch or of later ones caches all of its sequences.
                let owns = device.prefill.row_weight > 0 || device.decode.row_weight > 0;
                kept(shape).filter(|_| owns).map_or(seen, |kept| ends(seen, kept))
            };
            (0..ring.len()).map(of).collect()
        };
        let mut device = DeviceLowering {
            lowering,
            order,
            me,
            own: rows[rank.index()],
            tiles: (0..ring.len()).map(tiles).collect(),
            sees: match spec.kinds.is_empty() {
                true => vec![sees(0)],
                false => (0..spec.layers.max(1)).map(sees).collect(),
            },
            all: Span::first(shape.rows()),
            ring: ring.clone(),
            b: &mut builder,
        };
        last = device.layers();
    }
    head::lower(&mut builder, lowering, &rows, |_| false, last);
    builder
}

/// The rows of a batch from the first that is to be cached to the last, if any is.
fn kept(shape: &BatchShape) -> Option<Span<Row>> {
    let kept = shape.placed().filter(|(_, segment)| segment.cached).map(|(rows, _)| rows);
    kept.reduce(ends)
}

/// The span from the first of two spans to the last.
pub(super) fn ends(a: Span<Row>, b: Span<Row>) -> Span<Row> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => Span::new(a.start().min(b.start()), a.end().max(b.end())),
    }
}

/// The rows that a device carries between blocks.
#[derive(Clone, Copy)]
pub(super) struct Carried {
    pub residual: TensorRows,
    /// The rows that blocks read: the residual itself with a post-norm.
    pub normed: TensorRows,
}

impl Carried {
    pub fn new(b: &mut Builder, spec: &ModelSpec, rows: Span<Row>) -> Self {
        let residual = b.tensor(Role::Residual, rows, spec.hidden);
        let normed = match spec.norm_place {
            NormPlace::Post => residual,
            NormPlace::Pre => b.tensor(Role::Normed, rows, spec.hidden),
        };
        Self { residual, normed }
    }
}

/// A block that normed tiles go to next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    pub layer: u32,
    pub block: Block,
}

impl Next {
    /// The block after it; `None` after the last. The two blocks of a parallel residual are one, which is
    /// called attention.
    pub fn after(self, spec: &ModelSpec) -> Option<Self> {
        match self.block {
            Block::Attention if !spec.parallel => Some(Self { block: Block::Mlp, ..self }),
            _ => Some(Self { layer: self.layer + 1, block: Block::Attention })
                .filter(|next| next.layer < spec.layers),
        }
    }
}

/// What a device has computed of its own rows for the block that follows, tile by tile.
#[derive(Default)]
pub(super) struct Ahead {
    /// Tiles in wire format that it reads again itself.
    pub staged: Vec<TensorRows>,
    /// Queries, keys and values of the own rows, where attention is cut by rows.
    pub qkv: Option<TensorRows>,
    /// Own rows whose queries are still to be computed, where attention is cut by rows.
    pub late: Vec<Span<Row>>,
    /// The own rows after an MLP that is cut by rows.
    pub joined: Option<Carried>,
}

pub(super) struct DeviceLowering<'a> {
    pub lowering: Lowering<'a>,
    pub order: &'a Order,
    pub me: usize,
    pub own: Span<Row>,
    /// The tiles of each position of the ring.
    pub tiles: Vec<Vec<Span<Row>>>,
    /// The rows that the own rows of each position see: one entry for each layer, or a single one where
    /// layers are alike.
    pub sees: Vec<Vec<Span<Row>>>,
    pub all: Span<Row>,
    pub ring: Ring,
    pub b: &'a mut Builder,
}

impl DeviceLowering<'_> {
    pub(super) fn hidden(&self) -> u32 {
        self.lowering.spec.hidden
    }
    pub(super) fn part(&self, at: usize, layer: u32) -> BlockAssignment {
        let Lowering { plan, phase, .. } = self.lowering;
        plan.ring[self.ring.rank(at).index()].assignment(phase).block(layer)
    }
    /// Which positions of the ring compute in a block.
    pub(super) fn active(&self, next: Next) -> Vec<bool> {
        let computes = |at| computes(self.lowering.spec, &self.part(at, next.layer), next.block);
        (0..self.ring.len()).map(computes).collect()
    }
    pub(super) fn mode(&self, next: Next) -> Mode {
        let plan = self.lowering.plan;
        let modes = plan.modes(next.layer).expect("a checked plan has modes of every layer");
        if next.block == Block::Attention { modes.attention } else { modes.mlp }
    }
    /// Whether tiles of a gather are collected by tile and not by owner: where a device works on one
    /// own tile after another, what it passes on must not wait for its last.
    pub(super) fn by_tile(&self) -> bool {
        self.lowering.plan.any_sequence()
    }
    fn overlaps(&self) -> bool {
        self.lowering.plan.tiles > 1
    }
    pub(super) fn transfer(
        &self,
        next: Next,
        collective: Collective,
        owner: usize,
        tile: usize,
    ) -> u32 {
        let transfers = Transfers { owners: self.ring.len(), tiles: self.lowering.plan.tiles };
        transfers.id((next.block, next.layer), collective, owner, tile)
    }

    /// Runs all layers; returns the rows after the last norm.
    fn layers(&mut self) -> Option<TensorRows> {
        let first = Next { layer: 0, block: Block::Attention };
        let mut ahead = Ahead::default();
        let mut carried = self.embed(first, &mut ahead);
        if let Some(tiles) = self.staggers() {
            let inside = self.enter(first, carried, ahead.staged);
            return self.staggered(tiles, carried, inside);
        }
        let mut at = Some(first);
        while let Some(here) = at {
            if here.block == Block::Attention {
                self.b.layer();
            }
            let next = here.after(self.lowering.spec);
            carried = match (self.mode(here), here.block) {
                (Mode::Tensor, _) => {
                    let inside = self.enter(here, carried, std::mem::take(&mut ahead.staged));
                    self.leave(here, next, carried, inside, &mut ahead)
                }
                (Mode::Sequence, Block::Attention) => self.attention(here, carried, &mut ahead),
                // It followed each tile of attention at once.
                (Mode::Sequence, _) => ahead.joined.take(),
            };
            at = next;
        }
        carried.map(|c| c.normed)
    }

    /// Embeds the own rows, norms them for the first block, and starts their way to it.
    fn embed(&mut self, next: Next, ahead: &mut Ahead) -> Option<Carried> {
        if self.own.is_empty() {
            return None;
        }
        self.b.at = (Block::Embedding, 0);
        let carried = Carried::new(self.b, self.lowering.spec, self.own);
        let residual = carried.residual.all();
        embed(self.b, residual, carried.normed.all());
        for tile in 0..self.tiles[self.me].len() {
            self.advance(Some(next), carried, tile, ahead);
        }
        Some(carried)
    }

    /// Takes one own tile as far into the next block as it goes without the rows of others.
    pub(super) fn advance(
        &mut self,
        next: Option<Next>,
        carried: Carried,
        tile: usize,
        ahead: &mut Ahead,
    ) {
        let Some(next) = next else { return };
        match (self.mode(next), next.block) {
            (Mode::Tensor, _) => {
                self.depart(next, carried.normed, tile, ahead);
                if self.by_tile() {
                    self.take_in(next, tile, &mut ahead.staged);
                }
            }
            (Mode::Sequence, Block::Attention) => {
                self.offer_keys(next, carried.normed, tile, ahead);
            }
            (Mode::Sequence, _) => self.mlp(next, carried, tile, ahead),
        }
    }

    /// Exports one own tile for the gather of `next`, and sends it.
    fn depart(&mut self, next: Next, normed: TensorRows, tile: usize, ahead: &mut Ahead) {
        let needs = self.active(next);
        let route = self.ring.gather_route(exchange(self.lowering.plan), self.me, self.me, &needs);
        // Without overlap the whole input is multiplied at once, so the own rows join it too.
        let joins = !self.overlaps() && needs[self.me] && self.own != self.all;
        if route.to.is_empty() && !joins {
            return;
        }
        let out = self.stage(normed, self.tiles[self.me][tile]);
        let id = self.transfer(next, Collective::Gather, self.me, tile);
        for to in route.to {
            self.b.send(self.ring.rank(to), id, tile as u16, out);
        }
        if joins {
            ahead.staged.push(out);
        }
    }

    /// Takes in tile number `tile` of all other owners, as far as these come here, and passes them on; those
    /// that this device reads go into `staged`.
    pub(super) fn take_in(&mut self, here: Next, tile: usize, staged: &mut Vec<TensorRows>) {
        self.b.at = (here.block, here.layer);
        for owner in self.ring.arrivals(self.me).skip(1) {
            let Some(&rows) = self.tiles[owner].get(tile) else { continue };
            let (route, expected, reads) = match self.mode(here) {
                Mode::Tensor => {
                    let needs = self.active(here);
                    let way = exchange(self.lowering.plan);
                    let route = self.ring.gather_route(way, owner, self.me, &needs);
                    (route, self.row_tile(rows), needs[self.me])
                }
                Mode::Sequence => self.keys_route(here.layer, owner, rows),
            };
            let got = self.pass_on(here, &route, (owner, tile), expected);
            staged.extend(got.filter(|_| reads));
        }
    }

    /// Takes in one tile of another owner and sends it on; `None` where it does not come here.
    fn pass_on(
        &mut self,
        here: Next,
        route: &Route,
        (owner, tile): (usize, usize),
        expected: Tile,
    ) -> Option<TensorRows> {
        let from = self.ring.rank(route.from?);
        let id = self.transfer(here, Collective::Gather, owner, tile);
        let got = self.b.receive(from, id, tile as u16, expected);
        for &to in &route.to {
            self.b.send(self.ring.rank(to), id, tile as u16, got);
        }
        Some(got)
    }

    /// [`Device::take_in`] of the tiles whose numbers are beyond this device's own.
    pub(super) fn take_in_rest(&mut self, here: Next, staged: &mut Vec<TensorRows>) {
        let all = self.tiles.iter().map(Vec::len).max().unwrap_or(0);
        for tile in self.tiles[self.me].len()..all {
            self.take_in(here, tile, staged);
        }
    }

    /// A tile of some rows of the hidden width, which a gather brings.
    fn row_tile(&self, rows: Span<Row>) -> Tile {
        Tile { role: Role::RowTile, rows, width: self.hidden() }
    }

    /// A tile of sums of some rows.
    fn sum_tile(&self, rows: Span<Row>) -> Tile {
        Tile { role: Role::SumTile, rows, width: self.hidden() }
    }

    /// Puts rows into wire format.
    pub(super) fn stage(&mut self, normed: TensorRows, rows: Span<Row>) -> TensorRows {
        let out = self.b.tensor(Role::RowTile, rows, self.hidden());
        let kind = OpKind::Export { staged: false };
        self.b.compute(kind, &[normed.rows(rows)], &[out.all()]);
        out
    }

    /// Tensors for what the first products of a block compute of all rows, if this device computes in it.
    pub(super) fn first(&mut self, here: Next) -> BlockInner {
        let part = self.part(self.me, here.layer);
        room(self.b, self.lowering.spec, &part, here.block, self.all)
    }

    /// Imports rows that were gathered, and runs the first products on them.
    pub(super) fn import(&mut self, layer: u32, staged: TensorRows, inside: BlockInner) {
        let piece = self.b.tensor(Role::Gathered, staged.rows, self.hidden());
        self.b.compute(OpKind::Import, &[staged.all()], &[piece.all()]);
        first_products(self.b, layer, piece.all(), inside, staged.rows);
    }

    /// AllGather into a block and its first products; returns what they compute.
    fn enter(
        &mut self,
        here: Next,
        carried: Option<Carried>,
        mut staged: Vec<TensorRows>,
    ) -> BlockInner {
        self.b.at = (here.block, here.layer);
        let needs = self.active(here);
        let inside = self.first(here);
        let whole = (!inside.is_empty() && !self.overlaps() && self.own != self.all)
            .then(|| self.b.tensor(Role::Gathered, self.all, self.hidden()));
        if let (None, Some(carried)) = (whole, carried) {
            first_products(self.b, here.layer, carried.normed.all(), inside, self.own);
        }
        if self.by_tile() {
            self.take_in_rest(here, &mut staged);
        }
        let others = if self.by_tile() { 0 } else { self.ring.len() };
        let read = |this: &mut Self, tile: TensorRows| {
            if let Some(whole) = whole {
                this.b.compute(OpKind::Import, &[tile.all()], &[whole.rows(tile.rows)]);
            } else if !inside.is_empty() {
                this.import(here.layer, tile, inside);
            }
        };
        staged.into_iter().for_each(|tile| read(self, tile));
        for owner in self.ring.arrivals(self.me).take(others).skip(1) {
            let route =
                self.ring.gather_route(exchange(self.lowering.plan), owner, self.me, &needs);
            for tile in 0..self.tiles[owner].len() {
                let expected = self.row_tile(self.tiles[owner][tile]);
                if let Some(staged) = self.pass_on(here, &route, (owner, tile), expected) {
                    read(self, staged);
                }
            }
        }
        if let Some(whole) = whole {
            first_products(self.b, here.layer, whole.all(), inside, self.all);
        }
        inside
    }

    /// The last product of a block, ReduceScatter, and the connective block that follows.
    fn leave(
        &mut self,
        here: Next,
        next: Option<Next>,
        carried: Option<Carried>,
        inside: BlockInner,
        ahead: &mut Ahead,
    ) -> Option<Carried> {
        self.b.at = (here.block, here.layer);
        let contributes = self.active(here);
        // Without overlap one product computes all rows before the first is sent.
        let whole =
            (!inside.is_empty() && !self.overlaps()).then(|| self.partial(here, inside, self.all));
        let joined = carried.map(|_| self.joined());
        let direct = self.is_direct();
        let mut early: Vec<Vec<TensorRows>> = Vec::new();
        for owner in self.ring.departures(self.me) {
            let mine = owner == self.me;
            if mine && self.by_tile() {
                // All of them come before any tile of the gather that the first of them begins.
                let own = 0..self.tiles[self.me].len();
                early = own.map(|tile| self.sums(here, &contributes, tile)).collect();
            }
            let hop = match direct {
                true => Hop { receive: false, send: !mine && contributes[self.me] },
                false => self.ring.scatter_hop(owner, self.me, &contributes),
            };
            for (index, rows) in self.tiles[owner].clone().into_iter().enumerate() {
                self.b.at = (here.block, here.layer);
                if !mine && !hop.send {
                    continue;
                }
                let partial = match whole {
                    Some(whole) => Some(whole.rows(rows)),
                    None if inside.is_empty() => None,
                    None => Some(self.partial(here, inside, rows).all()),
                };
                let id = self.transfer(here, Collective::Scatter, owner, index);
                let tile = index as u16;
                if !mine {
                    let added = hop.receive.then(|| {
                        let from = self.ring.rank(self.ring.previous(self.me));
                        self.b.receive(from, id, tile, self.sum_tile(rows))
                    });
                    let out = match partial {
                        Some(partial) => self.export(partial, rows, added),
                        // Passed through without a copy.
                        None => added.expect("a route of sums starts at a device that contributes"),
                    };
                    let to = if direct { owner } else { self.ring.next(self.me) };
                    self.b.send(self.ring.rank(to), id, tile, out);
                } else if let (Some(carried), Some(joined)) = (carried, joined) {
                    let sums = match early.get_mut(index) {
                        Some(sums) => std::mem::take(sums),
                        None => self.sums(here, &contributes, index),
                    };
                    let (partial, sums) = self.in_order(&contributes, rows, partial, sums);
                    let sum = self.add(rows, partial, sums);
                    self.add_norm(here, carried, joined, rows, sum);
                    self.advance(next, joined, index, ahead);
                }
            }
        }
        joined
    }

    /// Takes in the sums of an own tile: one that came along the ring, or one of each device that
    /// contributes, in rank order.
    fn sums(&mut self, here: Next, contributes: &[bool], tile: usize) -> Vec<TensorRows> {
        let from: Vec<usize> = match exchange(self.lowering.plan) {
            Exchange::Ring => {
                let hop = self.ring.scatter_hop(self.me, self.me, contributes);
                hop.receive.then(|| self.ring.previous(self.me)).into_iter().collect()
            }
            Exchange::Direct => {
                (0..self.ring.len()).filter(|&at| at != self.me && contributes[at]).collect()
            }
        };
        let expected = self.sum_tile(self.tiles[self.me][tile]);
        let id = self.transfer(here, Collective::Scatter, self.me, tile);
        let receive = |at| self.b.receive(self.ring.rank(at), id, tile as u16, expected);
        from.into_iter().map(receive).collect()
    }

    /// Puts the device's own sum among those that came straight from the others, so that they are added in
    /// order of ranks whoever owns the row, and each as it is on the wire. Of two sums either may come first.
    fn in_order(
        &mut self,
        contributes: &[bool],
        rows: Span<Row>,
        partial: Option<Region>,
        mut sums: Vec<TensorRows>,
    ) -> (Option<Region>, Vec<TensorRows>) {
        let before = contributes[..self.me].iter().filter(|contributes| **contributes).count();
        let exact = self.lowering.plan.wire == WireType::F32;
        match partial {
            Some(own) if !sums.is_empty() && (before > 1 || !exact) && self.is_direct() => {
                let own = self.export(own, rows, None);
                sums.insert(before, own);
                (None, sums)
            }
            partial => (partial, sums),
        }
    }

    fn is_direct(&self) -> bool {
        exchange(self.lowering.plan) == Exchange::Direct
    }

    /// Adds sums to the device's own one, in their order, except the last, which the join adds.
    fn add(
        &mut self,
        rows: Span<Row>,
        mut partial: Option<Region>,
        mut sums: Vec<TensorRows>,
    ) -> BlockSum {
        let last = sums.pop();
        for staged in sums {
            let sum = self.b.tensor(Role::Partial, rows, self.hidden());
            let (kind, mut reads) = match partial {
                Some(partial) => (OpKind::Add, vec![partial]),
                None => (OpKind::Import, Vec::new()),
            };
            reads.push(staged.all());
            self.b.compute(kind, &reads, &[sum.all()]);
            partial = Some(sum.all());
        }
        BlockSum { partial, staged: last }
    }

    /// Tensors for the own rows after a join.
    pub(super) fn joined(&mut self) -> Carried {
        Carried::new(self.b, self.lowering.spec, self.own)
    }

    /// The device's partial sums of some rows.
    pub(super) fn partial(
        &mut self,
        here: Next,
        inside: BlockInner,
        rows: Span<Row>,
    ) -> TensorRows {
        let heads = self.part(self.me, here.layer).heads;
        last_products(self.b, self.lowering, here.layer, heads, inside, rows)
    }

    pub(super) fn export(
        &mut self,
        partial: Region,
        rows: Span<Row>,
        added: Option<TensorRows>,
    ) -> TensorRows {
        let out = self.b.tensor(Role::SumTile, rows, self.hidden());
        let mut reads = vec![partial];
        reads.extend(added.map(TensorRows::all));
        self.b.compute(OpKind::Export { staged: added.is_some() }, &reads, &[out.all()]);
        out
    }

    pub(super) fn add_norm(
        &mut self,
        here: Next,
        carried: Carried,
        joined: Carried,
        rows: Span<Row>,
        sum: BlockSum,
    ) {
        self.b.at = (Block::Connective, here.layer);
        let (kind, writes_two) =
            add_norm_kind(self.b, self.lowering.spec, here.layer, here.block, sum);
        let mut reads = vec![carried.residual.rows(rows)];
        reads.extend(sum.regions());
        let mut writes = vec![joined.residual.rows(rows)];
        if writes_two {
            writes.push(joined.normed.rows(rows));
        }
        self.b.compute(kind, &reads, &writes);
    }
}
