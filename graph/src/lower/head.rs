//! What follows the last layer: results of own rows, and the vocabulary-split head.

use super::{
    Lowering,
    build::{Builder, TensorRows, Tile},
    collective::{Collective, Transfers},
    exchange,
    ring::Ring,
    wanted_rows,
};
use crate::program::{
    Block, OpKind, Output, OutputKind, Reduce, Region, Role, candidates_tile_bytes,
};
use galaxy_common::{Exchange, Pooling, Rank, Row, Span, Wanted};
use galaxy_model::{ClassRow, HeadSpec, ModelSpec};

/// Emits the results of the rows that this device owns by `owned` (a span for each rank), reading
/// them from `last`, the rows after the last norm; then gathers the rows that the vocabulary-split
/// head reads, and multiplies this device's slice. Devices for which `has_all` says so have rows of
/// others, too. Where a token is wanted, all devices choose it.
pub(super) fn lower(
    b: &mut Builder,
    lowering: Lowering<'_>,
    owned: &[Span<Row>],
    has_all: impl Fn(Rank) -> bool,
    last: Option<TensorRows>,
) {
    let Lowering { spec, shape, .. } = lowering;
    b.at = (Block::Head, spec.layers);
    let rank = b.rank();
    let own = owned[rank.index()];
    if let Some(last) = last.filter(|_| !own.is_empty()) {
        for (index, (rows, segment)) in shape.placed().enumerate() {
            let here = rows.intersect(own);
            if !here.is_empty() {
                emit_rows(b, spec, index as u32, rows, segment.wanted, last.rows(here));
            }
        }
    }
    let made = logits(b, lowering, owned, has_all, last);
    if shape.sampled().next().is_some() {
        sample(b, lowering, &made);
    }
}

/// Candidates for the next tokens of a batch go in one tile from each device that has a slice of the
/// vocabulary to all others, and all choose. `logits` are the rows that tokens are chosen from, if
/// this device has any.
fn sample(b: &mut Builder, lowering: Lowering<'_>, logits: &[Region]) {
    let Lowering { spec, plan, phase, shape, .. } = lowering;
    let me = b.rank();
    let slice = |rank: Rank| plan.ring[rank.index()].assignment(phase).vocabulary;
    let bytes = |rank: Rank| candidates_tile_bytes(shape, slice(rank).len());
    // Transfer numbers after those of all tiles of layers and head.
    let first = 4 * (spec.layers + 1) * plan.ring.len() as u32 * u32::from(plan.tiles);
    let id = |from: Rank| first + u32::from(from.0);
    let mut own = None;
    if !logits.is_empty() {
        let tile = b.bytes_tile(Role::Candidates, bytes(me));
        b.compute(OpKind::TopK { tokens: slice(me) }, logits, &[tile.all()]);
        for (to, _) in plan.ranked().filter(|(to, _)| *to != me) {
            b.send(to, id(me), 0, tile);
        }
        own = Some(tile);
    }
    for (from, _) in plan.ranked().filter(|(rank, _)| !slice(*rank).is_empty()) {
        let tile = match own.filter(|_| from == me) {
            Some(own) => own,
            None => b.receive_bytes(from, id(from), Role::Candidates, bytes(from)),
        };
        b.compute(OpKind::GatherCandidates, &[tile.all()], &[]);
    }
    b.compute(OpKind::Sample, &[], &[]);
    if me == Rank(0) {
        for (index, ..) in shape.sampled() {
            b.emit_token(Output { segment: index as u32, kind: OutputKind::Token });
        }
    }
}

/// Emits what is wanted of a segment, which has these rows of the batch, as far as it follows from those of its rows
/// that are `here`: own ones after the last norm.
fn emit_rows(
    b: &mut Builder,
    spec: &ModelSpec,
    segment: u32,
    rows: Span<Row>,
    wanted: Wanted,
    here: Region,
) {
    let own = here.rows;
    let first_row = Span::new(rows.start(), rows.start() + 1);
    let last_row = Span::new(rows.end() - 1, rows.end());
    let mut one = |row: Span<Row>, kind: OutputKind| {
        if own.contains(row) {
            b.emit(Output { segment, kind }, Region { rows: row, ..here });
        }
    };
    match wanted {
        Wanted::Hidden => {
            let within = Span::new(own.start() - rows.start(), own.end() - rows.start());
            b.emit(Output { segment, kind: OutputKind::Hidden { rows: within } }, here);
        }
        Wanted::Pooled(pooling) => {
            let pooled = |reduce, rows| OutputKind::Pooled { reduce, rows };
            match pooling {
                Pooling::Cls => one(first_row, pooled(Reduce::Row, 1)),
                Pooling::LastToken => one(last_row, pooled(Reduce::Row, 1)),
                Pooling::Mean | Pooling::MeanSqrtLen => {
                    let kind = pooled(Reduce::Sum, own.len());
                    b.emit(Output { segment, kind }, here);
                }
                Pooling::Max => {
                    let kind = pooled(Reduce::Max, own.len());
                    b.emit(Output { segment, kind }, here);
                }
            }
        }
        Wanted::Classes => {
            if let HeadSpec::Classes(head) = &spec.head {
                let row = match head.row {
                    ClassRow::First => first_row,
                    ClassRow::Last => last_row,
                };
                one(row, OutputKind::Classes);
            }
        }
        Wanted::LastLogits | Wanted::AllLogits | Wanted::Token(_) | Wanted::Nothing => {}
    }
}

/// The wanted rows of a segment: its index, the rows in the batch, and their numbers among all
/// wanted rows.
type Numbered = (u32, Span<Row>, Span<Row>);

/// Numbers wanted rows in row order; those of one owner follow one another.
fn numbered(wanted: &[(u32, Span<Row>)]) -> Vec<Numbered> {
    let mut counted = 0;
    let number = |&(segment, rows): &(u32, Span<Row>)| {
        counted += rows.len();
        (segment, rows, Span::new(counted - rows.len(), counted))
    };
    wanted.iter().map(number).collect()
}

/// The numbers of the wanted rows among `own`.
fn numbers(wanted: &[(u32, Span<Row>)], own: Span<Row>) -> Span<Row> {
    let before = |edge: u32| -> u32 {
        wanted.iter().map(|(_, rows)| edge.clamp(rows.start(), rows.end()) - rows.start()).sum()
    };
    if own.is_empty() {
        return Span::empty();
    }
    Span::new(before(own.start()), before(own.end()))
}

/// Copies the wanted rows among those of `own` that have the numbers of `piece`.
fn select(
    b: &mut Builder,
    wanted: &[Numbered],
    own: Span<Row>,
    last: TensorRows,
    piece: TensorRows,
) {
    for &(_, batch, numbers) in wanted {
        // Of this segment's wanted rows: those that are mine and in this tile.
        let mine = batch.intersect(own);
        if mine.is_empty() {
            continue;
        }
        let from = numbers.start() + (mine.start() - batch.start());
        let here = Span::new(from, from + mine.len()).intersect(piece.rows);
        if here.is_empty() {
            continue;
        }
        let start = batch.start() + (here.start() - numbers.start());
        let source = last.rows(Span::new(start, start + here.len()));
        b.compute(OpKind::Select, &[source], &[piece.rows(here)]);
    }
}

/// Gathers the wanted rows, multiplies them with this device's slice of the vocabulary, and emits
/// the logits that were asked for. Returns the rows of logits that tokens are chosen from, in the
/// order of their segments.
fn logits(
    b: &mut Builder,
    lowering: Lowering<'_>,
    owned: &[Span<Row>],
    has_all: impl Fn(Rank) -> bool,
    last: Option<TensorRows>,
) -> Vec<Region> {
    let Lowering { spec, plan, phase, shape, .. } = lowering;
    let wanted = wanted_rows(shape);
    let ring = Ring::head(plan, phase);
    let Some(me) = ring.position(b.rank()) else { return Vec::new() };
    if wanted.is_empty() {
        return Vec::new();
    }
    let has_all: Vec<bool> = (0..ring.len()).map(|at| has_all(ring.rank(at))).collect();
    let way = if has_all.contains(&true) { Exchange::Direct } else { exchange(plan) };
    let compact = numbered(&wanted);
    let counted = compact.last().map_or(0, |(.., numbers)| numbers.end());
    let vocabulary = |at: usize| plan.ring[ring.rank(at).index()].assignment(phase).vocabulary;
    let needs: Vec<bool> =
        (0..ring.len()).map(|at| !vocabulary(at).is_empty() && !has_all[at]).collect();
    let slice = vocabulary(me);
    let width = spec.hidden;
    let tiles = |at: usize| -> Vec<Span<Row>> {
        let own = numbers(&wanted, owned[ring.rank(at).index()]);
        own.cut(u32::from(plan.tiles)).filter(|t| !t.is_empty()).collect()
    };
    let transfers = Transfers { owners: ring.len(), tiles: plan.tiles };
    let id = |owner: usize, tile: usize| {
        transfers.id((Block::Head, spec.layers), Collective::Gather, owner, tile)
    };
    let language = b.graph.language.filter(|_| !slice.is_empty());
    let out = language.map(|operator| {
        let out = b.tensor(Role::Logits, Span::first(counted), slice.len());
        (b.product(spec.layers, operator), out)
    });
    for owner in ring.arrivals(me) {
        let route = ring.gather_route(way, owner, me, &needs);
        for (tile, rows) in tiles(owner).into_iter().enumerate() {
            let piece = if owner == me || has_all[me] {
                let Some(last) = last else { continue };
                if route.to.is_empty() && out.is_none() {
                    continue;
                }
                let own = owned[ring.rank(owner).index()];
                let piece = b.tensor(Role::Wanted, rows, width);
                select(b, &compact, own, last, piece);
                if !route.to.is_empty() {
                    let staged = b.tensor(Role::RowTile, rows, width);
                    let kind = OpKind::Export { staged: false };
                    b.compute(kind, &[piece.all()], &[staged.all()]);
                    for &to in &route.to {
                        b.send(ring.rank(to), id(owner, tile), tile as u16, staged);
                    }
                }
                piece
            } else {
                let Some(from) = route.from else { continue };
                let (from, id) = (ring.rank(from), id(owner, tile));
                let expected = Tile { role: Role::RowTile, rows, width };
                let staged = b.receive(from, id, tile as u16, expected);
                for &to in &route.to {
                    b.send(ring.rank(to), id, tile as u16, staged);
                }
                if out.is_none() {
                    continue;
                }
                let piece = b.tensor(Role::Wanted, rows, width);
                b.compute(OpKind::Import, &[staged.all()], &[piece.all()]);
                piece
            };
            if let Some((product, out)) = out {
                b.compute(product, &[piece.all()], &[out.rows(rows)]);
            }
        }
    }
    let mut made = Vec::new();
    if let Some((_, out)) = out {
        for &(segment, batch, numbers) in &compact {
            let (rows, of) = shape.placed().nth(segment as usize).expect("numbered by the shape");
            if matches!(of.wanted, Wanted::Token(_)) {
                made.push(out.rows(numbers));
                continue;
            }
            let within = Span::new(batch.start() - rows.start(), batch.end() - rows.start());
            let kind = OutputKind::Logits { rows: within, vocabulary: slice };
            b.emit(Output { segment, kind }, out.rows(numbers));
        }
    }
    made
}
