//! Blocks that are cut by rows: each device has all heads or columns, and computes its own rows.
//!
//! An MLP exchanges nothing. Attention gathers keys and values: a device multiplies queries, keys and
//! values of its own rows, and gets keys and values of the others' rows that its own see. All that needs
//! no rows of others runs tile by tile, from the join of a tile to its next keys and values, so that these
//! travel while the next tile is computed. Queries, which no other device needs, are computed when all
//! keys and values are on their way. With several texts, a tile waits for the keys and values of its own
//! texts only.

use super::{
    block::{BlockInner, BlockSum, append_kv, first_products, room},
    build::{TensorRows, Tile},
    collective::Collective,
    exchange,
    galaxy::{Ahead, Carried, DeviceLowering, Next, ends},
    kv_span,
    ring::Route,
    visible,
};
use crate::program::{Block, OpKind, Role};
use galaxy_common::{Row, Span, WeightFormat};

impl DeviceLowering<'_> {
    /// The rows that each position of the ring sees in a layer.
    fn sees(&self, layer: u32) -> &[Span<Row>] {
        &self.sees[(layer as usize).min(self.sees.len() - 1)]
    }

    /// Whether this device sees rows of others in a layer.
    fn gathers_keys(&self, layer: u32) -> bool {
        !self.own.contains(self.sees(layer)[self.me])
    }

    /// The route of the keys and values of a tile of `owner`, which go to devices that see some of them
    /// only; then the tile that travels, and whether this device is one of those.
    pub(super) fn keys_route(
        &self,
        layer: u32,
        owner: usize,
        rows: Span<Row>,
    ) -> (Route, Tile, bool) {
        let needs: Vec<bool> = self.sees(layer).iter().map(|sees| sees.overlaps(rows)).collect();
        let route = self.ring.gather_route(exchange(self.lowering.plan), owner, self.me, &needs);
        let others = self.sees(layer).iter().enumerate().filter(|(at, _)| *at != owner);
        let seen = others.map(|(_, sees)| sees.intersect(rows)).fold(Span::empty(), ends);
        // Also on devices that have no heads and only pass them on.
        let width = 2 * self.lowering.spec.kv_heads * self.lowering.spec.head_width;
        (route, Tile { role: Role::KeysValuesTile, rows: seen, width }, needs[self.me])
    }

    /// Values in a row of queries, and in a row of keys and values.
    fn widths(&self, layer: u32) -> (u32, u32) {
        let heads = self.part(self.me, layer).heads;
        let keys = 2 * kv_span(self.lowering.spec, heads).len();
        (heads.len() * self.lowering.spec.head_width, keys * self.lowering.spec.head_width)
    }

    /// Whether queries may be computed apart from keys and values: where kernels can cut the matrix
    /// between them, and it is not read from disk for each.
    fn can_make_queries_late(&self, queries: u32) -> bool {
        let device = &self.lowering.plan.ring[self.ring.rank(self.me).index()];
        queries.is_multiple_of(WeightFormat::PANEL) && device.streaming.is_none()
    }

    /// Computes queries, keys and values of an own tile, and sends keys and values to the devices that
    /// need them.
    pub(super) fn offer_keys(
        &mut self,
        next: Next,
        normed: TensorRows,
        tile: usize,
        ahead: &mut Ahead,
    ) {
        self.b.at = (next.block, next.layer);
        let rows = self.tiles[self.me][tile];
        let (queries, keys) = self.widths(next.layer);
        let qkv = match ahead.qkv {
            Some(qkv) => qkv,
            None => self.b.tensor(Role::Qkv, self.own, queries + keys),
        };
        ahead.qkv = Some(qkv);
        let (route, Tile { role, rows: seen, .. }, _) = self.keys_route(next.layer, self.me, rows);
        let gathers = self.gathers_keys(next.layer);
        let columns = Span::new(queries, queries + keys);
        let made = if !route.to.is_empty() && self.can_make_queries_late(queries) {
            match ahead.late.last_mut().filter(|last| last.end() == rows.start()) {
                Some(last) => *last = Span::new(last.start(), rows.end()),
                None => ahead.late.push(rows),
            }
            columns
        } else {
            Span::first(qkv.width)
        };
        let kind = self.b.product(next.layer, self.b.operators(next.layer).qkv);
        self.b.compute(kind, &[normed.rows(rows)], &[qkv.part(rows, made)]);
        let id = self.transfer(next, Collective::Gather, self.me, tile);
        // What others see stands between rows that nobody else does.
        let (first, last) = (seen.start().max(rows.start()), seen.end().max(rows.start()));
        for some in [(rows.start(), first), (first, last), (last, rows.end())] {
            let some = Span::new(some.0, some.1);
            let travels = some == seen && !route.to.is_empty();
            if some.is_empty() || !(travels || gathers) {
                continue;
            }
            let out = self.b.tensor(role, some, keys);
            let kind = OpKind::Export { staged: false };
            self.b.compute(kind, &[qkv.part(some, columns)], &[out.all()]);
            for &to in route.to.iter().filter(|_| travels) {
                self.b.send(self.ring.rank(to), id, tile as u16, out);
            }
            // In wire format as the others get them: all devices see the same values.
            if gathers {
                ahead.staged.push(out);
            }
        }
        self.take_in(next, tile, &mut ahead.staged);
    }

    /// Computes the queries that are left; then, tile by tile, imports the keys and values that the tile's
    /// rows see, and runs attention, its output product and the join. What arrives for later tiles travels
    /// meanwhile.
    pub(super) fn attention(
        &mut self,
        here: Next,
        carried: Option<Carried>,
        ahead: &mut Ahead,
    ) -> Option<Carried> {
        let Ahead { mut staged, qkv, late, .. } = std::mem::take(ahead);
        if let (Some(qkv), Some(carried)) = (qkv, carried) {
            self.b.at = (here.block, here.layer);
            let (queries, _) = self.widths(here.layer);
            let kind = self.b.product(here.layer, self.b.operators(here.layer).qkv);
            for rows in late {
                let made = qkv.part(rows, Span::first(queries));
                self.b.compute(kind, &[carried.normed.rows(rows)], &[made]);
            }
        }
        self.take_in_rest(here, &mut staged);
        let keys = self.keys(here, &staged);
        let own = qkv.zip(carried);
        let joined = own.map(|_| self.joined());
        if let (Some((qkv, carried)), Some(joined)) = (own, joined) {
            for (tile, rows) in self.tiles[self.me].clone().into_iter().enumerate() {
                self.b.at = (here.block, here.layer);
                if let Some(keys) = keys {
                    let seen = visible(&self.b.graph, here.layer, self.lowering.shape, rows);
                    self.import_keys(keys, &mut staged, seen);
                }
                let mut inside =
                    BlockInner { qkv: Some((qkv, keys.unwrap_or(qkv))), intermediate: None };
                if self.lowering.spec.parallel {
                    inside.intermediate = self.intermediate_rows(here, carried, rows);
                }
                self.add_norm_rows(here, inside, carried, joined, rows);
                self.advance(here.after(self.lowering.spec), joined, tile, ahead);
            }
        }
        if let Some(keys) = keys {
            self.b.at = (here.block, here.layer);
            // Rows that only sequences in the KV cache need.
            self.import_keys(keys, &mut staged, keys.rows);
            let kv_heads = kv_span(self.lowering.spec, self.part(self.me, here.layer).heads);
            append_kv(self.b, self.lowering.shape, here.layer, kv_heads, keys.all());
        }
        joined
    }

    /// A tensor for keys and values of all rows that the own rows see; `None` where those are all own.
    fn keys(&mut self, here: Next, staged: &[TensorRows]) -> Option<TensorRows> {
        if !self.gathers_keys(here.layer) {
            return None;
        }
        // Tiles follow one another, and all that are seen are there.
        let rows = staged.iter().map(|tile| tile.rows).reduce(ends)?;
        let (_, width) = self.widths(here.layer);
        Some(self.b.tensor(Role::KeysValues, rows, width))
    }

    /// Imports those of the staged tiles that have some of these rows.
    fn import_keys(&mut self, keys: TensorRows, staged: &mut Vec<TensorRows>, rows: Span<Row>) {
        for tile in staged.extract_if(.., |tile| tile.rows.overlaps(rows)) {
            self.b.compute(OpKind::Import, &[tile.all()], &[keys.rows(tile.rows)]);
        }
    }

    /// Runs an MLP on an own tile, and takes the tile on into the block after it.
    pub(super) fn mlp(&mut self, here: Next, carried: Carried, tile: usize, ahead: &mut Ahead) {
        self.b.at = (here.block, here.layer);
        let rows = self.tiles[self.me][tile];
        let joined = match ahead.joined {
            Some(joined) => joined,
            None => self.joined(),
        };
        ahead.joined = Some(joined);
        let inside =
            BlockInner { qkv: None, intermediate: self.intermediate_rows(here, carried, rows) };
        self.add_norm_rows(here, inside, carried, joined, rows);
        self.advance(here.after(self.lowering.spec), joined, tile, ahead);
    }

    /// Computes the intermediate rows of the MLP.
    fn intermediate_rows(
        &mut self,
        here: Next,
        carried: Carried,
        rows: Span<Row>,
    ) -> Option<TensorRows> {
        let part = self.part(self.me, here.layer);
        let inside = room(self.b, self.lowering.spec, &part, Block::Mlp, rows);
        first_products(self.b, here.layer, carried.normed.rows(rows), inside, rows);
        inside.intermediate
    }

    /// Runs the last products of a block on own rows, which gives their whole sum, and the join.
    fn add_norm_rows(
        &mut self,
        here: Next,
        inside: BlockInner,
        carried: Carried,
        joined: Carried,
        rows: Span<Row>,
    ) {
        let partial = self.partial(here, inside, rows);
        self.add_norm(here, carried, joined, rows, BlockSum::from(partial));
    }
}
