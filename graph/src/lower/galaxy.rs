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
    build::{Builder, Value},
    exchange, head, kv_span,
    order::Order,
    ring::{Hop, Ring, Route},
    visible,
};
use crate::program::{Block, JoinOf, NormOf, OpKind, Product, Region, Role};
use galaxy_common::{
    BatchShape, BlockAssignment, Exchange, Head, Mode, Plan, Rank, Row, Span,
    plan::{Phase, own_rows},
};
use galaxy_model::{ModelSpec, NormPlace};

/// The four collectives of a layer, in order; the head's follows the last layer's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Collective {
    Gather,
    Scatter,
}

/// Names the transfer of a tile so that both ends of every link agree.
pub(crate) fn transfer(
    layer: u32,
    block: Block,
    collective: Collective,
    ring: usize,
    owner: usize,
    tiles: u16,
    tile: usize,
) -> u32 {
    let of_layer = match (block, collective) {
        (Block::Mlp, Collective::Gather) => 2,
        (Block::Mlp, Collective::Scatter) => 3,
        (_, Collective::Gather) => 0,
        (_, Collective::Scatter) => 1,
    };
    let collective = layer * 4 + of_layer;
    (collective * ring as u32 + owner as u32) * u32::from(tiles) + tile as u32
}

pub(super) fn program(
    spec: &ModelSpec,
    plan: &Plan,
    phase: Phase,
    shape: &BatchShape,
    rank: Rank,
    order: &Order,
) -> Builder {
    let ring = Ring::layers(plan, phase);
    let rows = own_rows(plan, phase, shape.rows());
    let depth = 2 * usize::from(plan.tiles) * ring.len();
    let mut builder = Builder::new(rank, plan.wire, depth);
    // Alone, rows that are cut wait for nobody.
    let alone = ring.len() == 1 && plan.any_sequence();
    let cut = if alone { 1 } else { u32::from(plan.tiles) };
    let mut last = None;
    if let Some(me) = ring.position(rank) {
        let tiles = |at: usize| -> Vec<Span<Row>> {
            let own = rows[ring.rank(at).index()];
            own.cut(cut).filter(|t| !t.is_empty()).collect()
        };
        let mut device = Device {
            spec,
            plan,
            shape,
            phase,
            order,
            me,
            own: rows[rank.index()],
            tiles: (0..ring.len()).map(tiles).collect(),
            sees: (0..ring.len())
                .map(|at| visible(spec, shape, rows[ring.rank(at).index()]))
                .collect(),
            all: Span::first(shape.rows()),
            ring: ring.clone(),
            b: &mut builder,
        };
        last = device.layers();
    }
    head::lower(&mut builder, spec, plan, phase, shape, &rows, last);
    builder
}

/// The rows that a device carries between blocks.
#[derive(Clone, Copy)]
pub(super) struct Carried {
    pub residual: Value,
    /// The residual itself with a post-norm.
    pub normed: Value,
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

/// Where normed tiles go next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    pub layer: u32,
    pub block: Block,
}

impl Next {
    /// The block after it.
    pub fn after(self, layers: u32) -> Option<Self> {
        match self.block {
            Block::Attention => Some(Self { block: Block::Mlp, ..self }),
            _ => Some(Self { layer: self.layer + 1, block: Block::Attention })
                .filter(|next| next.layer < layers),
        }
    }
}

/// What a device has made of its own rows for the block that follows, tile by tile.
#[derive(Default)]
pub(super) struct Ahead {
    /// Tiles in wire format that it reads again itself.
    pub staged: Vec<Value>,
    /// Queries, keys and values, where rows of attention are cut.
    pub qkv: Option<Value>,
    /// The rows after an MLP whose rows are cut.
    pub joined: Option<Carried>,
}

pub(super) struct Device<'a> {
    pub spec: &'a ModelSpec,
    pub plan: &'a Plan,
    pub shape: &'a BatchShape,
    pub phase: Phase,
    pub order: &'a Order,
    pub me: usize,
    pub own: Span<Row>,
    /// Tiles of each position of the ring.
    pub tiles: Vec<Vec<Span<Row>>>,
    /// The rows that the own rows of each position see.
    pub sees: Vec<Span<Row>>,
    pub all: Span<Row>,
    pub ring: Ring,
    pub b: &'a mut Builder,
}

impl Device<'_> {
    pub(super) fn hidden(&self) -> u32 {
        self.spec.hidden
    }
    pub(super) fn part(&self, at: usize, layer: u32) -> BlockAssignment {
        self.plan.ring[self.ring.rank(at).index()].assignment(self.phase).block(layer)
    }
    /// Who computes in a block.
    pub(super) fn active(&self, next: Next) -> Vec<bool> {
        (0..self.ring.len())
            .map(|at| {
                let part = self.part(at, next.layer);
                if next.block == Block::Attention {
                    !part.heads.is_empty()
                } else {
                    !part.columns.is_empty()
                }
            })
            .collect()
    }
    pub(super) fn mode(&self, next: Next) -> Mode {
        let modes = self.plan.modes(next.layer).expect("a checked plan has modes of every layer");
        if next.block == Block::Attention { modes.attention } else { modes.mlp }
    }
    /// Whether tiles of a gather are collected by tile and not by owner: where a device works on one
    /// own tile after another, what it passes on must not wait for its last.
    pub(super) fn by_tile(&self) -> bool {
        self.plan.any_sequence()
    }
    fn overlaps(&self) -> bool {
        self.plan.tiles > 1
    }
    pub(super) fn transfer(
        &self,
        next: Next,
        collective: Collective,
        owner: usize,
        tile: usize,
    ) -> u32 {
        transfer(next.layer, next.block, collective, self.ring.len(), owner, self.plan.tiles, tile)
    }

    /// All layers; returns the rows after the last norm.
    fn layers(&mut self) -> Option<Value> {
        let first = Next { layer: 0, block: Block::Attention };
        let mut ahead = Ahead::default();
        let mut carried = self.embed(first, &mut ahead);
        if let Some(tiles) = self.staggers() {
            let inner = self.enter(first, carried, ahead.staged);
            return self.staggered(tiles, carried, inner);
        }
        let mut at = Some(first);
        while let Some(here) = at {
            if here.block == Block::Attention {
                self.b.layer();
            }
            let next = here.after(self.spec.layers);
            carried = match (self.mode(here), here.block) {
                (Mode::Tensor, _) => {
                    let inner = self.enter(here, carried, std::mem::take(&mut ahead.staged));
                    self.leave(here, next, carried, inner, &mut ahead)
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
        let carried = Carried::new(self.b, self.spec, self.own);
        let residual = carried.residual.all();
        self.b.compute(OpKind::Embed, &[], &[residual]);
        if self.spec.norm_place == NormPlace::Pre {
            let kind = OpKind::Norm(NormOf::Attention(0));
            self.b.compute(kind, &[residual], &[carried.normed.all()]);
        }
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
    fn depart(&mut self, next: Next, normed: Value, tile: usize, ahead: &mut Ahead) {
        let needs = self.active(next);
        let route = self.ring.gather_route(exchange(self.plan), self.me, self.me, &needs);
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

    /// Takes in the tiles of that number of all other owners, as far as they come here, and passes
    /// them on; into `staged` what this device reads.
    pub(super) fn take_in(&mut self, here: Next, tile: usize, staged: &mut Vec<Value>) {
        self.b.at = (here.block, here.layer);
        for owner in self.ring.arrivals(self.me).skip(1) {
            let Some(&rows) = self.tiles[owner].get(tile) else { continue };
            let (route, role, width, reads) = match self.mode(here) {
                Mode::Tensor => {
                    let needs = self.active(here);
                    let way = exchange(self.plan);
                    let route = self.ring.gather_route(way, owner, self.me, &needs);
                    (route, Role::RowTile, self.hidden(), needs[self.me])
                }
                Mode::Sequence => self.keys_route(owner, rows),
            };
            let got = self.pass_on(here, &route, owner, tile, (role, width));
            staged.extend(got.filter(|_| reads));
        }
    }

    /// Takes in one tile of another owner and sends it on; nothing where it does not come here.
    fn pass_on(
        &mut self,
        here: Next,
        route: &Route,
        owner: usize,
        tile: usize,
        (role, width): (Role, u32),
    ) -> Option<Value> {
        let from = self.ring.rank(route.from?);
        let rows = self.tiles[owner][tile];
        let id = self.transfer(here, Collective::Gather, owner, tile);
        let got = self.b.receive(from, id, tile as u16, role, rows, width);
        for &to in &route.to {
            self.b.send(self.ring.rank(to), id, tile as u16, got);
        }
        Some(got)
    }

    /// [`Device::take_in`] of the tiles beyond this device's own.
    pub(super) fn take_in_rest(&mut self, here: Next, staged: &mut Vec<Value>) {
        let all = self.tiles.iter().map(Vec::len).max().unwrap_or(0);
        for tile in self.tiles[self.me].len()..all {
            self.take_in(here, tile, staged);
        }
    }

    /// Puts rows into wire format.
    pub(super) fn stage(&mut self, normed: Value, rows: Span<Row>) -> Value {
        let out = self.b.tensor(Role::RowTile, rows, self.hidden());
        let kind = OpKind::Export { staged: false };
        self.b.compute(kind, &[normed.rows(rows)], &[out.all()]);
        out
    }

    /// The first product of a block and the tensor that it fills, if this device computes in it.
    pub(super) fn first(&mut self, here: Next) -> Option<(OpKind, Value)> {
        let (role, width, product) = match here.block {
            Block::Attention => {
                let heads = self.part(self.me, here.layer).heads;
                let kv = kv_span(self.spec, heads);
                let width = (heads.len() + 2 * kv.len()) * self.spec.head_width;
                (Role::Qkv, width, Product::Qkv)
            }
            _ => (Role::Inner, self.part(self.me, here.layer).columns.len(), Product::Up),
        };
        let kind = OpKind::Product { layer: here.layer, product };
        let needed = self.active(here)[self.me];
        needed.then(|| (kind, self.b.tensor(role, self.all, width)))
    }

    /// The first product on rows that were gathered.
    pub(super) fn import(&mut self, kind: OpKind, staged: Value, inner: Value) {
        let piece = self.b.tensor(Role::Gathered, staged.rows, self.hidden());
        self.b.compute(OpKind::Import, &[staged.all()], &[piece.all()]);
        self.b.compute(kind, &[piece.all()], &[inner.rows(staged.rows)]);
    }

    /// AllGather into a block and its first product. Returns the product's rows.
    fn enter(
        &mut self,
        here: Next,
        carried: Option<Carried>,
        mut staged: Vec<Value>,
    ) -> Option<Value> {
        self.b.at = (here.block, here.layer);
        let needs = self.active(here);
        let first = self.first(here);
        let inner = first.map(|(_, inner)| inner);
        let whole = (first.is_some() && !self.overlaps() && self.own != self.all)
            .then(|| self.b.tensor(Role::Gathered, self.all, self.hidden()));
        if let (Some((kind, inner)), None, Some(carried)) = (first, whole, carried) {
            self.b.compute(kind, &[carried.normed.all()], &[inner.rows(self.own)]);
        }
        if self.by_tile() {
            self.take_in_rest(here, &mut staged);
        }
        for tile in staged {
            if let Some(whole) = whole {
                self.b.compute(OpKind::Import, &[tile.all()], &[whole.rows(tile.rows)]);
            } else if let Some((kind, inner)) = first {
                self.import(kind, tile, inner);
            }
        }
        let others = if self.by_tile() { 0 } else { self.ring.len() };
        for owner in self.ring.arrivals(self.me).take(others).skip(1) {
            let route = self.ring.gather_route(exchange(self.plan), owner, self.me, &needs);
            for tile in 0..self.tiles[owner].len() {
                let of = (Role::RowTile, self.hidden());
                let Some(staged) = self.pass_on(here, &route, owner, tile, of) else { continue };
                if let Some(whole) = whole {
                    self.b.compute(OpKind::Import, &[staged.all()], &[whole.rows(staged.rows)]);
                } else if let Some((kind, inner)) = first {
                    self.import(kind, staged, inner);
                }
            }
        }
        if let (Some(whole), Some((kind, inner))) = (whole, first) {
            self.b.compute(kind, &[whole.all()], &[inner.all()]);
        }
        inner
    }

    /// The last product of a block, ReduceScatter, and the connective block that follows.
    fn leave(
        &mut self,
        here: Next,
        next: Option<Next>,
        carried: Option<Carried>,
        inner: Option<Value>,
        ahead: &mut Ahead,
    ) -> Option<Carried> {
        self.b.at = (here.block, here.layer);
        let contributes = self.active(here);
        // Without overlap one product makes all rows before the first is sent.
        let whole = match inner {
            Some(inner) if !self.overlaps() => Some(self.partial(here, inner, self.all)),
            _ => None,
        };
        let joined = carried.map(|_| self.joined());
        let direct = exchange(self.plan) == Exchange::Direct;
        let mut early: Vec<Vec<Value>> = Vec::new();
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
                let partial = match (inner, whole) {
                    (_, Some(whole)) => Some(whole.rows(rows)),
                    (Some(inner), None) => Some(self.partial(here, inner, rows).all()),
                    (None, None) => None,
                };
                let id = self.transfer(here, Collective::Scatter, owner, index);
                let tile = index as u16;
                if !mine {
                    let added = hop.receive.then(|| {
                        let from = self.ring.rank(self.ring.previous(self.me));
                        self.b.receive(from, id, tile, Role::SumTile, rows, self.hidden())
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
                    let (partial, added) = self.add(rows, partial, sums);
                    self.join(here, carried, joined, rows, partial, added);
                    self.advance(next, joined, index, ahead);
                }
            }
        }
        joined
    }

    /// Takes in the sums of an own tile: one along the ring, or one of each who contributes, in ring
    /// order.
    fn sums(&mut self, here: Next, contributes: &[bool], tile: usize) -> Vec<Value> {
        let from: Vec<usize> = match exchange(self.plan) {
            Exchange::Ring => {
                let hop = self.ring.scatter_hop(self.me, self.me, contributes);
                hop.receive.then(|| self.ring.previous(self.me)).into_iter().collect()
            }
            Exchange::Direct => {
                let others = (1..self.ring.len()).map(|step| (self.me + step) % self.ring.len());
                others.filter(|&at| contributes[at]).collect()
            }
        };
        let (rows, hidden) = (self.tiles[self.me][tile], self.hidden());
        let id = self.transfer(here, Collective::Scatter, self.me, tile);
        let receive =
            |at| self.b.receive(self.ring.rank(at), id, tile as u16, Role::SumTile, rows, hidden);
        from.into_iter().map(receive).collect()
    }

    /// Adds sums to the device's own one, in their order, up to the last, which joins with them.
    fn add(
        &mut self,
        rows: Span<Row>,
        mut partial: Option<Region>,
        mut sums: Vec<Value>,
    ) -> (Option<Region>, Option<Value>) {
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
        (partial, last)
    }

    /// Room for the own rows after a join.
    pub(super) fn joined(&mut self) -> Carried {
        Carried::new(self.b, self.spec, self.own)
    }

    /// The device's partial sums of some rows.
    pub(super) fn partial(&mut self, here: Next, inner: Value, rows: Span<Row>) -> Value {
        let out = self.b.tensor(Role::Partial, rows, self.hidden());
        if here.block == Block::Attention {
            let heads = self.part(self.me, here.layer).heads;
            let context =
                attend(self.b, self.spec, self.shape, here.layer, heads, (inner, inner), rows);
            let kind = OpKind::Product { layer: here.layer, product: Product::AttentionOutput };
            self.b.compute(kind, &[context.all()], &[out.all()]);
        } else {
            let kind = OpKind::Product { layer: here.layer, product: Product::Down };
            self.b.compute(kind, &[inner.rows(rows)], &[out.all()]);
        }
        out
    }

    pub(super) fn export(
        &mut self,
        partial: Region,
        rows: Span<Row>,
        added: Option<Value>,
    ) -> Value {
        let out = self.b.tensor(Role::SumTile, rows, self.hidden());
        let mut reads = vec![partial];
        reads.extend(added.map(Value::all));
        self.b.compute(OpKind::Export { staged: added.is_some() }, &reads, &[out.all()]);
        out
    }

    pub(super) fn join(
        &mut self,
        here: Next,
        carried: Carried,
        joined: Carried,
        rows: Span<Row>,
        partial: Option<Region>,
        added: Option<Value>,
    ) {
        self.b.at = (Block::Connective, here.layer);
        let (kind, writes_two) =
            join_kind(self.spec, here.layer, here.block, partial.is_some(), added.is_some());
        let mut reads = vec![carried.residual.rows(rows)];
        reads.extend(partial);
        reads.extend(added.map(Value::all));
        let mut writes = vec![joined.residual.rows(rows)];
        if writes_two {
            writes.push(joined.normed.rows(rows));
        }
        self.b.compute(kind, &reads, &writes);
    }
}

/// The residual addition after a block, with the norm that follows at once; and whether the norm
/// has a tensor of its own.
pub(super) fn join_kind(
    spec: &ModelSpec,
    layer: u32,
    block: Block,
    partial: bool,
    staged: bool,
) -> (OpKind, bool) {
    let post = spec.norm_place == NormPlace::Post;
    let attention = block == Block::Attention;
    let norm = match (attention, post) {
        (true, true) => NormOf::Attention(layer),
        (true, false) | (false, true) => NormOf::Mlp(layer),
        (false, false) if layer + 1 < spec.layers => NormOf::Attention(layer + 1),
        (false, false) => NormOf::Final,
    };
    let join = if attention { JoinOf::Attention } else { JoinOf::Mlp };
    (OpKind::Join { layer, join, norm, post, partial, staged }, !post)
}

/// Attention of `rows` over the queries, keys and values of the device's heads: queries stand first
/// in the rows of one tensor, keys and values last in the rows of the same or another.
pub(super) fn attend(
    b: &mut Builder,
    spec: &ModelSpec,
    shape: &BatchShape,
    layer: u32,
    heads: Span<Head>,
    (from, over): (Value, Value),
    rows: Span<Row>,
) -> Value {
    let kv_heads = kv_span(spec, heads);
    let queries = heads.len() * spec.head_width;
    let keys = 2 * kv_heads.len() * spec.head_width;
    let context = b.tensor(Role::Context, rows, queries);
    let reads = [
        from.part(rows, Span::first(queries)),
        over.part(visible(spec, shape, rows), Span::new(over.width - keys, over.width)),
    ];
    b.compute(OpKind::Attend { layer, heads, kv_heads }, &reads, &[context.all()]);
    context
}
