//! Decode of one row of each sequence at a time, in layouts in which devices share blocks: each device
//! that owns rows at all carries all of them, and every partial sum goes straight from the device that
//! computed it to all that carry rows. Two blocks of a layer are two messages one after the other, where
//! gathers and scatters would be four.
//!
//! A block that is cut by rows is held whole by each device that carries rows: it computes it for itself,
//! and nothing travels.

use super::{
    Lowering,
    block::{
        BlockSum, add_norm_kind, blocks, computes, embed, first_products, last_products, room,
    },
    build::{Builder, TensorRows, Tile},
    collective::{Collective, Transfers},
    galaxy::Carried,
    head,
    ring::Ring,
};
use crate::program::{Block, OpKind, Region, Role};
use galaxy_common::{
    BlockAssignment, DevicePlan, Layout, Mode, Plan, Rank, Row, Span, plan::Phase,
};

const PHASE: Phase = Phase::Decode;

/// Whether a device carries all rows between blocks.
pub(super) fn carries(plan: &Plan, device: &DevicePlan) -> bool {
    let part = device.assignment(PHASE);
    match plan.layout {
        Layout::Replicated => part.any_heads() || part.any_columns(),
        Layout::Ring | Layout::Stages => part.row_weight > 0,
    }
}

pub(super) fn program(lowering: Lowering<'_>, rank: Rank) -> Builder {
    let Lowering { graph, plan, shape, .. } = lowering;
    let ring = Ring::layers(plan, PHASE);
    let mut b = Builder::new(graph, plan, PHASE, rank, 4 * ring.len());
    let all = Span::<Row>::first(shape.rows());
    let carriers: Vec<bool> =
        (0..ring.len()).map(|at| carries(plan, &plan.ring[ring.rank(at).index()])).collect();
    // All carry them, and the first gives results.
    let mut owned = vec![Span::empty(); plan.ring.len()];
    if let Some(first) = carriers.iter().position(|carries| *carries) {
        owned[ring.rank(first).index()] = all;
    }
    let mut last = None;
    if let Some(me) = ring.position(rank) {
        let mut device = Device { lowering, ring: &ring, me, carriers, all, b: &mut b };
        last = device.layers();
    }
    let has_all = |rank: Rank| carries(plan, &plan.ring[rank.index()]);
    head::lower(&mut b, lowering, &owned, has_all, last);
    b
}

struct Device<'a> {
    lowering: Lowering<'a>,
    ring: &'a Ring,
    me: usize,
    /// Which positions of the ring carry rows.
    carriers: Vec<bool>,
    all: Span<Row>,
    b: &'a mut Builder,
}

impl Device<'_> {
    fn part(&self, at: usize, layer: u32) -> BlockAssignment {
        self.lowering.plan.ring[self.ring.rank(at).index()].assignment(PHASE).block(layer)
    }

    /// Runs all layers; returns the rows after the last norm.
    fn layers(&mut self) -> Option<TensorRows> {
        let mut carried = self.carriers[self.me].then(|| self.embed());
        let Lowering { spec, plan, .. } = self.lowering;
        for layer in 0..spec.layers {
            self.b.layer();
            for &block in blocks(spec) {
                self.b.at = (block, layer);
                let modes = plan.modes(layer).expect("a checked plan has modes of every layer");
                let mode = if block == Block::Attention { modes.attention } else { modes.mlp };
                carried = match mode {
                    Mode::Tensor => self.shared(block, layer, carried),
                    Mode::Sequence => carried.map(|carried| self.alone(block, layer, carried)),
                };
            }
        }
        carried.map(|carried| carried.normed)
    }

    fn embed(&mut self) -> Carried {
        let carried = Carried::new(self.b, self.lowering.spec, self.all);
        let residual = carried.residual.all();
        embed(self.b, residual, carried.normed.all());
        carried
    }

    /// The device's partial sums of a block.
    fn partial(&mut self, block: Block, layer: u32, normed: Region) -> TensorRows {
        let part = self.part(self.me, layer);
        let inside = room(self.b, self.lowering.spec, &part, block, self.all);
        first_products(self.b, layer, normed, inside, self.all);
        last_products(self.b, self.lowering, layer, part.heads, inside, self.all)
    }

    /// A block that the device holds all of and computes alone.
    fn alone(&mut self, block: Block, layer: u32, carried: Carried) -> Carried {
        let partial = self.partial(block, layer, carried.normed.all());
        self.add_norm(block, layer, carried, BlockSum::from(partial))
    }

    /// A block that several devices have a part of.
    fn shared(&mut self, block: Block, layer: u32, carried: Option<Carried>) -> Option<Carried> {
        let (spec, n, me) = (self.lowering.spec, self.ring.len(), self.me);
        let takes_part: Vec<bool> =
            (0..n).map(|at| computes(spec, &self.part(at, layer), block)).collect();
        let transfers = Transfers { owners: n, tiles: 1 };
        let id = |collective, owner| transfers.id((block, layer), collective, owner, 0);
        let hidden = spec.hidden;
        // A device that does not carry rows gets them from the first that does.
        let first = self.carriers.iter().position(|carries| *carries);
        let guests: Vec<usize> =
            (0..n).filter(|&at| takes_part[at] && !self.carriers[at]).collect();
        let mut normed = carried.map(|carried| carried.normed.all());
        if let (Some(first), false) = (first, guests.is_empty()) {
            let name = id(Collective::Gather, first);
            if let (true, Some(rows)) = (me == first, normed) {
                let out = self.b.tensor(Role::RowTile, self.all, hidden);
                self.b.compute(OpKind::Export { staged: false }, &[rows], &[out.all()]);
                for &guest in &guests {
                    self.b.send(self.ring.rank(guest), name, 0, out);
                }
            } else if guests.contains(&me) {
                let from = self.ring.rank(first);
                let tile = Tile { role: Role::RowTile, rows: self.all, width: hidden };
                let staged = self.b.receive(from, name, 0, tile);
                let rows = self.b.tensor(Role::Gathered, self.all, hidden);
                self.b.compute(OpKind::Import, &[staged.all()], &[rows.all()]);
                normed = Some(rows.all());
            }
        }
        let partial = match normed {
            Some(normed) if takes_part[me] => Some(self.partial(block, layer, normed)),
            _ => None,
        };
        self.b.at = (block, layer);
        let to: Vec<usize> =
            (1..n).map(|step| (me + step) % n).filter(|&at| self.carriers[at]).collect();
        // In wire format as the others get it: sums are equal to the bit wherever they are added.
        let alone = takes_part.iter().filter(|takes_part| **takes_part).count() < 2;
        let mut own = None;
        if let Some(partial) = partial {
            let exact = alone && to.is_empty();
            if !exact {
                let out = self.b.tensor(Role::SumTile, self.all, hidden);
                let kind = OpKind::Export { staged: false };
                self.b.compute(kind, &[partial.all()], &[out.all()]);
                for at in to {
                    self.b.send(self.ring.rank(at), id(Collective::Scatter, me), 0, out);
                }
                own = Some(out);
            }
        }
        let carried = carried?;
        // In ring order, on every device.
        let mut sums = Vec::new();
        for at in (0..n).filter(|&at| takes_part[at]) {
            let tile = match (at == me, own) {
                (true, Some(own)) => own,
                (true, None) => continue,
                (false, _) => {
                    let (from, name) = (self.ring.rank(at), id(Collective::Scatter, at));
                    let tile = Tile { role: Role::SumTile, rows: self.all, width: hidden };
                    self.b.receive(from, name, 0, tile)
                }
            };
            sums.push(tile);
        }
        let staged = sums.pop();
        let mut partial = if own.is_none() { partial.map(TensorRows::all) } else { None };
        for staged in sums {
            let more = self.b.tensor(Role::Partial, self.all, hidden);
            let (kind, mut reads) = match partial {
                Some(partial) => (OpKind::Add, vec![partial]),
                None => (OpKind::Import, Vec::new()),
            };
            reads.push(staged.all());
            self.b.compute(kind, &reads, &[more.all()]);
            partial = Some(more.all());
        }
        Some(self.add_norm(block, layer, carried, BlockSum { partial, staged }))
    }

    fn add_norm(&mut self, block: Block, layer: u32, carried: Carried, sum: BlockSum) -> Carried {
        self.b.at = (Block::Connective, layer);
        let joined = Carried::new(self.b, self.lowering.spec, self.all);
        let (kind, two) = add_norm_kind(self.b, self.lowering.spec, layer, block, sum);
        let mut reads = vec![carried.residual.all()];
        reads.extend(sum.regions());
        let mut writes = vec![joined.residual.all()];
        writes.extend(two.then(|| joined.normed.all()));
        self.b.compute(kind, &reads, &writes);
        joined
    }
}
