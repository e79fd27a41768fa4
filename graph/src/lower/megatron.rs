//! Tensor parallel blocks with an AllReduce after each, connective blocks replicated
//! (the baseline of Galaxy, §IV-A). Nothing overlaps.

use super::{
    Lowering,
    block::{
        BlockSum, add_norm_kind, blocks, computes, embed, first_products, last_products, room,
    },
    build::{Builder, TensorRows, Tile},
    collective::{Collective, Transfers},
    head,
    ring::Ring,
};
use crate::program::{Block, OpKind, Role};
use galaxy_common::{Rank, Row, Span};
use galaxy_model::NormPlace;

pub(super) fn program(lowering: Lowering<'_>, rank: Rank) -> Builder {
    let Lowering { graph, spec, plan, phase, shape } = lowering;
    let ring = Ring::layers(plan, phase);
    // The head sends all own tiles before it receives the first of another device.
    let depth = (4 * ring.len()).max(2 * usize::from(plan.tiles));
    let mut b = Builder::new(graph, plan, phase, rank, depth);
    let all = Span::<Row>::first(shape.rows());
    // Sums are computed and results are given by equal runs of rows, whoever holds what.
    let chunks: Vec<Span<Row>> = all.cut(ring.len() as u32).collect();
    let mut owned = vec![Span::empty(); plan.ring.len()];
    for (at, chunk) in chunks.iter().enumerate() {
        owned[ring.rank(at).index()] = *chunk;
    }
    let mut last = None;
    if let Some(me) = ring.position(rank) {
        let hidden = spec.hidden;
        let pre = spec.norm_place == NormPlace::Pre;
        let transfers = Transfers { owners: ring.len(), tiles: plan.tiles };
        let reduce = AllReduce { ring: &ring, me, chunks: &chunks, hidden, transfers };
        let mut residual = b.tensor(Role::Residual, all, hidden);
        let mut normed = if pre { b.tensor(Role::Normed, all, hidden) } else { residual };
        embed(&mut b, residual.all(), normed.all());
        for layer in 0..spec.layers {
            b.layer();
            for &block in blocks(spec) {
                b.at = (block, layer);
                let part =
                    |at: usize| plan.ring[ring.rank(at).index()].assignment(phase).block(layer);
                let contributes: Vec<bool> =
                    (0..ring.len()).map(|at| computes(spec, &part(at), block)).collect();
                let partial = contributes[me].then(|| {
                    let inside = room(&mut b, spec, &part(me), block, all);
                    first_products(&mut b, layer, normed.all(), inside, all);
                    last_products(&mut b, lowering, layer, part(me).heads, inside, all)
                });
                let sum = match (ring.len(), partial) {
                    (1, Some(partial)) => partial,
                    _ => reduce.lower(&mut b, (block, layer), &contributes, partial),
                };
                b.at = (Block::Connective, layer);
                let (kind, two) = add_norm_kind(&b, spec, layer, block, BlockSum::from(sum));
                let joined = b.tensor(Role::Residual, all, hidden);
                let mut writes = vec![joined.all()];
                let mut next = joined;
                if two {
                    next = b.tensor(Role::Normed, all, hidden);
                    writes.push(next.all());
                }
                b.compute(kind, &[residual.all(), sum.all()], &writes);
                (residual, normed) = (joined, next);
            }
        }
        last = Some(normed);
    }
    head::lower(&mut b, lowering, &owned, |_| false, last);
    b
}

/// Ring ReduceScatter, then ring AllGather. The sum of a run of rows is computed once and copied,
/// so that replicas agree to the bit, in every wire type.
struct AllReduce<'a> {
    /// The ring along which tiles travel.
    ring: &'a Ring,
    /// This device's position of the ring.
    me: usize,
    /// The rows whose sums each position computes.
    chunks: &'a [Span<Row>],
    /// How many values a row has.
    hidden: u32,
    /// The names of its transfers.
    transfers: Transfers,
}

impl AllReduce<'_> {
    /// Lowers the AllReduce of one block to this device's part in it. `contributes` says which positions have partial
    /// sums, `partial` are its own; returns the sums of all rows.
    fn lower(
        &self,
        b: &mut Builder,
        at: (Block, u32),
        contributes: &[bool],
        partial: Option<TensorRows>,
    ) -> TensorRows {
        let Self { ring, me, chunks, hidden: width, transfers } = *self;
        let id = |collective, owner| transfers.id(at, collective, owner, 0);
        let sum_tile = |rows| Tile { role: Role::SumTile, rows, width };
        let all = Span::first(chunks.last().map_or(0, |c| c.end()));
        let sum = b.tensor(Role::Sum, all, width);
        let (before, after) = (ring.rank(ring.previous(me)), ring.rank(ring.next(me)));
        let mut own = None;
        for owner in ring.departures(me) {
            let (rows, hop) = (chunks[owner], ring.scatter_hop(owner, me, contributes));
            if rows.is_empty() || (owner != me && !hop.send) {
                continue;
            }
            let transfer = id(Collective::Scatter, owner);
            let added = hop.receive.then(|| b.receive(before, transfer, 0, sum_tile(rows)));
            let out = match (partial, added) {
                (Some(partial), added) => {
                    let out = b.tensor(Role::SumTile, rows, width);
                    let mut reads = vec![partial.rows(rows)];
                    reads.extend(added.map(TensorRows::all));
                    let kind = OpKind::Export { staged: added.is_some() };
                    b.compute(kind, &reads, &[out.all()]);
                    Some(out)
                }
                (None, added) => added,
            };
            if owner == me {
                own = out;
            } else if let Some(out) = out {
                b.send(after, transfer, 0, out);
            }
        }
        let needs = vec![true; ring.len()];
        for owner in ring.arrivals(me) {
            let (rows, hop) = (chunks[owner], ring.gather_hop(owner, me, &needs));
            if rows.is_empty() {
                continue;
            }
            let transfer = id(Collective::Gather, owner);
            let tile = match (owner == me, own) {
                (true, Some(own)) => own,
                (true, None) => continue,
                (false, _) => b.receive(before, transfer, 0, sum_tile(rows)),
            };
            if hop.send {
                b.send(after, transfer, 0, tile);
            }
            b.compute(OpKind::Import, &[tile.all()], &[sum.rows(rows)]);
        }
        sum
    }
}
