//! Runs of layers, one behind another: each device has all rows of its layers, and the residual
//! travels from stage to stage.
//!
//! The batch goes through in parts, so that stages work at the same time: at ends of texts where
//! every row sees its whole text, anywhere where rows see only earlier ones, whose keys and values
//! a stage keeps. One text of the first kind passes the stages one after another; its rows still
//! leave in tiles, as the last join finishes them.

use super::{
    Lowering,
    block::{
        BlockInner, BlockSum, add_norm_kind, blocks, embed, first_products, last_products,
        norm_first, room,
    },
    build::{Builder, TensorRows, Tile},
    collective::{Collective, Transfers},
    galaxy::Carried,
    head, kv_span,
    ring::Ring,
};
use crate::program::{Block, OpKind, Role};
use galaxy_common::{BatchShape, BlockAssignment, Layer, Rank, Row, Span, plan::own_rows};

pub(super) fn program(lowering: Lowering<'_>, rank: Rank) -> Builder {
    let Lowering { graph, spec, plan, phase, shape } = lowering;
    let stages = Ring::layers(plan, phase);
    // A single stage has no others to keep busy.
    let tiles = if stages.len() > 1 { u32::from(plan.tiles) } else { 1 };
    let parts = parts(spec.causal, shape, tiles);
    // However texts are cut, tiles are no larger than those of one text.
    let most = shape.rows().div_ceil(tiles);
    let total = parts.iter().map(|part| part.tiles(most).count()).sum::<usize>();
    let me = stages.position(rank);
    let links = me.map_or(2, |at| usize::from(at > 0) + usize::from(at + 1 < stages.len()));
    let mut b = Builder::new(graph, plan, phase, rank, links * usize::from(plan.tiles));
    let mut last = None;
    if let Some(me) = me {
        let layers = |at: usize| {
            let part = plan.ring[stages.rank(at).index()].assignment(phase);
            let held = (0..spec.layers).filter(|&l| !part.block(l).heads.is_empty());
            let (first, end) = held.fold((spec.layers, 0), |(first, _), l| (first.min(l), l + 1));
            Span::<Layer>::new(first, end)
        };
        let transfers = Transfers { owners: stages.len(), tiles: total as u16 };
        let mut stage = Stage {
            lowering,
            layers: layers(me),
            before: me.checked_sub(1).map(|at| stages.rank(at)),
            after: (me + 1 < stages.len()).then(|| stages.rank(me + 1)),
            // By the first layer of the stage that receives.
            id: &|to, index| {
                let at = (Block::Attention, layers(to).start());
                transfers.id(at, Collective::Gather, to, index)
            },
            me,
            b: &mut b,
        };
        last = stage.run(&parts, most);
    }
    let owned = own_rows(plan, phase, shape.rows());
    head::lower(&mut b, lowering, &owned, |_| false, last);
    b
}

/// Rows that go through the stages together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MicroBatch {
    rows: Span<Row>,
    /// Rows of whole texts: those of this part, and of the parts that share some of them.
    texts: Span<Row>,
}

impl MicroBatch {
    /// Tiles of at most so many rows.
    fn tiles(self, most: u32) -> impl Iterator<Item = Span<Row>> {
        self.rows.cut(self.rows.len().div_ceil(most.max(1)))
    }
}

/// Cuts a batch into about `wanted` parts of about as many rows.
fn parts(causal: bool, shape: &BatchShape, wanted: u32) -> Vec<MicroBatch> {
    let ends: Vec<u32> = shape.placed().map(|(text, _)| text.end()).collect();
    let nearest = |row: u32| ends.iter().copied().min_by_key(|end| end.abs_diff(row));
    let even = Span::<Row>::first(shape.rows()).cut(wanted).map(|part| part.end());
    let mut cuts: Vec<u32> = match causal {
        true => even.collect(),
        false => even.filter_map(nearest).collect(),
    };
    cuts.dedup();
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let rows = starts.zip(&cuts).map(|(start, &end)| Span::new(start, end));
    let clean = |row: &u32| ends.contains(row);
    let whole = |rows: Span<Row>| {
        let start = cuts.iter().copied().filter(|&cut| cut <= rows.start()).rfind(clean);
        let end = cuts.iter().copied().filter(|&cut| cut >= rows.end()).find(clean);
        Span::new(start.unwrap_or(0), end.unwrap_or(shape.rows()))
    };
    let parts = rows.filter(|rows| !rows.is_empty());
    parts.map(|rows| MicroBatch { rows, texts: whole(rows) }).collect()
}

/// The layers of one device, as it lowers them.
struct Stage<'a> {
    lowering: Lowering<'a>,
    layers: Span<Layer>,
    before: Option<Rank>,
    after: Option<Rank>,
    /// Names the transfer of a tile to the stage of a position.
    id: &'a dyn Fn(usize, usize) -> u32,
    me: usize,
    b: &'a mut Builder,
}

impl Stage<'_> {
    /// Sends all parts through the stage; returns the rows after the last norm where no stage
    /// follows.
    fn run(&mut self, parts: &[MicroBatch], most: u32) -> Option<TensorRows> {
        let Lowering { spec, shape, .. } = self.lowering;
        let result = self.after.is_none().then(|| self.carried(Span::first(shape.rows())));
        // For each layer, the tensor for the texts of the part.
        let mut qkv: Vec<Option<TensorRows>> = vec![None; self.layers.len() as usize];
        let mut sent = 0;
        for part in parts {
            let tiles: Vec<Span<Row>> = part.tiles(most).collect();
            let mut carried = self.carried(part.rows);
            for (layer, qkv) in self.layers.iter().zip(&mut qkv) {
                let heads = Span::first(spec.heads);
                let kept = qkv.filter(|qkv| qkv.rows == part.texts).unwrap_or_else(|| {
                    let width = heads.len() + 2 * kv_span(spec, heads).len();
                    self.b.tensor(Role::Qkv, part.texts, width * spec.head_width)
                });
                *qkv = Some(kept);
                let kind = self.b.product(layer, self.b.operators(layer).qkv);
                if layer == self.layers.start() {
                    self.enter(part.rows, &tiles, sent, carried, kept);
                } else {
                    self.b.at = (Block::Attention, layer);
                    let writes = kept.rows(part.rows);
                    self.b.compute(kind, &[carried.normed.all()], &[writes]);
                }
                for &block in blocks(spec) {
                    self.b.at = (block, layer);
                    let attention = block == Block::Attention;
                    let mut inside = BlockInner::default();
                    if !attention || spec.parallel {
                        let all = self.part(layer);
                        inside = room(self.b, spec, &all, Block::Mlp, part.rows);
                        first_products(self.b, layer, carried.normed.all(), inside, part.rows);
                    }
                    inside.qkv = attention.then_some((kept, kept));
                    let last = layer + 1 == self.layers.end() && blocks(spec).ends_with(&[block]);
                    let after = result.filter(|_| last).unwrap_or_else(|| self.carried(part.rows));
                    let leaves = last && self.after.is_some();
                    let pieces = if leaves { &tiles[..] } else { &[part.rows] };
                    for (index, &rows) in pieces.iter().enumerate() {
                        self.leave((block, layer), inside, carried, after, rows);
                        if leaves {
                            self.send(after.residual, rows, sent + index);
                        }
                    }
                    carried = after;
                }
            }
            sent += tiles.len();
        }
        result.map(|result| result.normed)
    }

    /// The assignment of all of a layer.
    fn part(&self, layer: u32) -> BlockAssignment {
        BlockAssignment {
            layers: Span::new(layer, layer + 1),
            heads: Span::first(self.lowering.spec.heads),
            columns: Span::first(self.lowering.spec.intermediate),
        }
    }

    fn carried(&mut self, rows: Span<Row>) -> Carried {
        Carried::new(self.b, self.lowering.spec, rows)
    }

    /// Embeds a part, or takes it in tile by tile, up to queries, keys and values of the first
    /// layer.
    fn enter(
        &mut self,
        rows: Span<Row>,
        tiles: &[Span<Row>],
        first: usize,
        carried: Carried,
        qkv: TensorRows,
    ) {
        let layer = self.layers.start();
        let pieces = if self.before.is_some() { tiles } else { &[rows] };
        for (index, &rows) in pieces.iter().enumerate() {
            let (residual, normed) = (carried.residual.rows(rows), carried.normed.rows(rows));
            if let Some(from) = self.before {
                self.b.at = (Block::Attention, layer);
                let (id, tile) = ((self.id)(self.me, first + index), (first + index) as u16);
                let hidden = self.lowering.spec.hidden;
                let expected = Tile { role: Role::RowTile, rows, width: hidden };
                let staged = self.b.receive(from, id, tile, expected);
                self.b.compute(OpKind::Import, &[staged.all()], &[residual]);
                norm_first(self.b, layer, residual, normed);
            } else {
                self.b.at = (Block::Embedding, layer);
                embed(self.b, residual, normed);
            }
            self.b.at = (Block::Attention, layer);
            let kind = self.b.product(layer, self.b.operators(layer).qkv);
            self.b.compute(kind, &[normed], &[qkv.rows(rows)]);
        }
    }

    /// Runs the last products of a block, and the join.
    fn leave(
        &mut self,
        (block, layer): (Block, u32),
        inside: BlockInner,
        carried: Carried,
        joined: Carried,
        rows: Span<Row>,
    ) {
        self.b.at = (block, layer);
        let heads = Span::first(self.lowering.spec.heads);
        let partial = last_products(self.b, self.lowering, layer, heads, inside, rows);
        self.b.at = (Block::Connective, layer);
        let (kind, writes_two) =
            add_norm_kind(self.b, self.lowering.spec, layer, block, BlockSum::from(partial));
        let mut writes = vec![joined.residual.rows(rows)];
        writes.extend(writes_two.then(|| joined.normed.rows(rows)));
        self.b.compute(kind, &[carried.residual.rows(rows), partial.all()], &writes);
    }

    /// Sends a tile of the residual to the stage that follows.
    fn send(&mut self, residual: TensorRows, rows: Span<Row>, index: usize) {
        let Some(to) = self.after else { return };
        let out = self.b.tensor(Role::RowTile, rows, self.lowering.spec.hidden);
        let kind = OpKind::Export { staged: false };
        self.b.compute(kind, &[residual.rows(rows)], &[out.all()]);
        self.b.send(to, (self.id)(self.me + 1, index), index as u16, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_common::{Segment, Wanted};

    #[test]
    fn micro_batches_of_non_causal_models_end_with_sequences() {
        let segment = |(slot, rows)| Segment {
            slot,
            context_len: 0,
            cached: false,
            rows,
            wanted: Wanted::Hidden,
        };
        let shape = |rows: &[u32]| {
            let segments = (0..).zip(rows.iter().copied()).map(segment);
            BatchShape::new(segments.collect()).expect("a batch")
        };
        let spans = |causal, rows: &[u32], wanted| -> Vec<[u32; 4]> {
            let parts = parts(causal, &shape(rows), wanted);
            let ends =
                |p: &MicroBatch| [p.rows.start(), p.rows.end(), p.texts.start(), p.texts.end()];
            parts.iter().map(ends).collect()
        };
        assert_eq!(spans(false, &[12], 4), [[0, 12, 0, 12]]);
        assert_eq!(spans(true, &[12], 3), [[0, 4, 0, 12], [4, 8, 0, 12], [8, 12, 0, 12]]);
        assert_eq!(spans(false, &[3, 5, 4], 2), [[0, 8, 0, 8], [8, 12, 8, 12]]);
        assert_eq!(spans(true, &[6, 6], 4)[1..3], [[3, 6, 0, 6], [6, 9, 6, 12]]);
        assert_eq!(spans(true, &[1], 4), [[0, 1, 0, 1]]);
    }
}
