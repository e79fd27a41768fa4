//! Data: what is written, read, and handed on.

use super::{VerifyError, order::Order, site};
use crate::pieces::{self, Piece};
use crate::program::{
    Block, JoinOf, Memory, NormOf, OpId, OpKind, Operation, OutputKind, Product, Program, Region,
    TensorId,
};
use galaxy_common::{BatchShape, DevicePlan, Mode, Plan, Rank, Row, Segment, Span, plan::Phase};
use galaxy_model::{ModelSpec, NormPlace};
use std::{collections::BTreeMap, fmt};

/// Whose sums: devices with heads, and devices with columns.
type Who = [u128; 2];

/// What the elements of a tensor are. Blocks count from 0, two in a layer; where both stand beside each
/// other they begin with the rows of the first and end with the sums of the second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// The raw residual stream before block `0` (2 x layer, + 1 before the MLP).
    Residual(u32),
    /// Rows that block `0` reads.
    Rows(u32),
    /// What the first product of block `0` makes, or attention on top of it.
    Inside(u32),
    /// Sums after block `0` of the devices of a set.
    Sum(u32, Who),
    Logits,
    /// Candidates for the next token of a segment, of a device.
    Candidates(u32, u128),
    /// A piece of the device's shard.
    Weights(u32),
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Residual(at) => write!(f, "the residual before block {at}"),
            Self::Rows(at) => write!(f, "normed rows for block {at}"),
            Self::Inside(at) => write!(f, "inner values of block {at}"),
            Self::Sum(at, [heads, columns]) => {
                write!(f, "sums of block {at} over heads of {heads:b} and columns of {columns:b}")
            }
            Self::Logits => write!(f, "logits"),
            Self::Weights(piece) => write!(f, "piece {piece} of the shard"),
            Self::Candidates(segment, who) => {
                write!(f, "candidates of text {segment} from devices {who:b}")
            }
        }
    }
}

pub(super) fn check(
    spec: &ModelSpec,
    plan: &Plan,
    shape: &BatchShape,
    programs: &[Program],
    order: &Order,
) -> Result<(), VerifyError> {
    for (rank, program) in programs.iter().enumerate() {
        accesses(programs, rank, program, order)?;
    }
    contents(spec, plan, shape, programs, order)
}

/// Writes once, reads covered, slots handed on in order.
fn accesses(
    programs: &[Program],
    rank: usize,
    program: &Program,
    order: &Order,
) -> Result<(), VerifyError> {
    let mut writes: Vec<Vec<(Region, OpId)>> = vec![Vec::new(); program.tensors.len()];
    // For each tensor, its last access on each lane; and its first access, which orders a slot.
    let mut last: Vec<BTreeMap<u8, OpId>> = vec![BTreeMap::new(); program.tensors.len()];
    let mut by_slot: BTreeMap<u32, Vec<TensorId>> = BTreeMap::new();
    let mut streamed: Vec<TensorId> = Vec::new();
    let operations = || program.operations.iter().enumerate().map(|(i, op)| (OpId(i as u32), op));
    for (id, op) in operations() {
        for region in op.reads.iter().chain(&op.writes) {
            let lasts = &mut last[region.tensor.0 as usize];
            if lasts.is_empty() {
                match program.tensor(region.tensor).memory {
                    Memory::Stream => streamed.push(region.tensor),
                    _ => {
                        let slot = program.tensor(region.tensor).slot.0;
                        by_slot.entry(slot).or_default().push(region.tensor);
                    }
                }
            }
            lasts.insert(op.lane.0, id);
        }
        for region in &op.writes {
            let former = &mut writes[region.tensor.0 as usize];
            if former.iter().any(|(other, _)| meet(other, region).is_some()) {
                let (tensor, rows) = (region.tensor.0, region.rows);
                return Err(VerifyError::DoubleWrite { site: site(program, id), tensor, rows });
            }
            former.push((*region, id));
        }
    }
    for (id, op) in operations() {
        for region in &op.reads {
            let mut covered = 0;
            for (written, writer) in &writes[region.tensor.0 as usize] {
                let Some(area) = meet(written, region) else { continue };
                if order.before(programs, rank, *writer, id) {
                    covered += area;
                }
            }
            if covered != u64::from(region.rows.len()) * u64::from(region.columns.len()) {
                let (tensor, rows) = (region.tensor.0, region.rows);
                return Err(VerifyError::UncoveredRead { site: site(program, id), tensor, rows });
            }
        }
    }
    let handed_on = |former: TensorId, next: TensorId| {
        for (_, writer) in &writes[next.0 as usize] {
            for user in last[former.0 as usize].values() {
                if !order.before(programs, rank, *user, *writer) {
                    return Err(VerifyError::Reuse {
                        site: site(program, *writer),
                        slot: program.tensor(next).slot.0,
                        former: site(program, *user),
                    });
                }
            }
        }
        Ok(())
    };
    for tensors in by_slot.values() {
        tensors.windows(2).try_for_each(|pair| handed_on(pair[0], pair[1]))?;
    }
    // What lies over one another in the buffer for weights.
    let place = |tensor: TensorId| {
        let slot = program.slots[program.tensor(tensor).slot.0 as usize];
        slot.start..slot.start.saturating_add(slot.bytes)
    };
    for (at, &next) in streamed.iter().enumerate() {
        let own = place(next);
        let meets = |former: &&TensorId| {
            let other = place(**former);
            own.start < other.end && other.start < own.end
        };
        streamed[..at].iter().filter(meets).try_for_each(|&former| handed_on(former, next))?;
    }
    Ok(())
}

/// How many elements two regions share.
fn meet(a: &Region, b: &Region) -> Option<u64> {
    let rows = a.rows.intersect(b.rows).len();
    let columns = a.columns.intersect(b.columns).len();
    (rows > 0 && columns > 0).then(|| u64::from(rows) * u64::from(columns))
}

/// Every operation reads what it is meant to read.
fn contents(
    spec: &ModelSpec,
    plan: &Plan,
    shape: &BatchShape,
    programs: &[Program],
    order: &Order,
) -> Result<(), VerifyError> {
    let mut held: Vec<Vec<Option<Content>>> =
        programs.iter().map(|p| vec![None; p.tensors.len()]).collect();
    let mut kept: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let mut collected: BTreeMap<(usize, u32), u128> = BTreeMap::new();
    let words = plan.ranked().filter(|(_, d)| !d.assignment(Phase::Prefill).vocabulary.is_empty());
    let words = words.fold(0, |all, (rank, _)| all | 1 << (rank.0 % 128));
    let pieces: Vec<Vec<Piece>> =
        plan.ring.iter().map(|device| pieces::of_device(spec, device)).collect();
    for &(rank, id) in &order.sequence {
        let program = &programs[rank];
        let op = program.operation(id);
        let read = |at: usize| op.reads.get(at).and_then(|r| held[rank][r.tensor.0 as usize]);
        let wrong = |have: Option<Content>, want: &str| {
            let have = have.map_or_else(|| "nothing".to_owned(), |h| h.to_string());
            Err(VerifyError::Content { site: site(program, id), have, want: want.to_owned() })
        };
        let want = |at: usize, content: Content| match read(at) {
            Some(have) if have == content => Ok(()),
            have => wrong(have, &content.to_string()),
        };
        let made = match op.kind {
            OpKind::Embed => vec![entry(spec)],
            OpKind::Norm(norm) => {
                let stage = stage(spec, norm);
                want(0, Content::Residual(stage))?;
                vec![Content::Rows(stage)]
            }
            OpKind::Product { layer, product } => {
                let weights = weights_of(&pieces[rank], &plan.ring[rank], (layer, product), op);
                let at = program.operands(op);
                match (weights, op.reads.len() > at) {
                    (Weights::Held, false) => {}
                    (Weights::Read(piece), true) => want(at, Content::Weights(piece))?,
                    (Weights::Held, true) => return wrong(read(at), "no weights: it has them"),
                    (Weights::Read(piece), false) => {
                        return wrong(None, &Content::Weights(piece).to_string());
                    }
                    (Weights::None, _) => return wrong(None, "the columns of a piece"),
                }
                match product {
                    Product::Qkv | Product::Up => {
                        let at = 2 * layer + u32::from(product == Product::Up);
                        want(0, Content::Rows(first(spec, at)))?;
                        vec![Content::Inside(at)]
                    }
                    Product::AttentionOutput | Product::Down => {
                        let down = product == Product::Down;
                        want(0, Content::Inside(2 * layer + u32::from(down)))?;
                        let at = 2 * layer + u32::from(down || spec.parallel);
                        let own = 1 << (rank % 128);
                        let mut who = if down { [0, own] } else { [own, 0] };
                        if program.operands(op) > 1 {
                            who = match read(1) {
                                Some(Content::Sum(of, others)) if of == at => {
                                    match both(who, others) {
                                        Some(all) => all,
                                        None => return wrong(read(1), "sums of other products"),
                                    }
                                }
                                have => return wrong(have, "sums of this block"),
                            };
                        }
                        vec![Content::Sum(at, who)]
                    }
                    Product::Language => {
                        want(0, Content::Rows(2 * spec.layers))?;
                        vec![Content::Logits]
                    }
                }
            }
            OpKind::Attend { layer, .. } => {
                want(0, Content::Inside(2 * layer))?;
                want(1, Content::Inside(2 * layer))?;
                if !sees_all(spec, shape, op) {
                    return wrong(read(1), "keys and values of all rows that the queries see");
                }
                vec![Content::Inside(2 * layer)]
            }
            OpKind::Keep { layer, .. } => {
                want(0, Content::Inside(2 * layer))?;
                let of = |(text, segment): (Span<Row>, &Segment)| {
                    if segment.kept { text.intersect(op.reads[0].rows).len() } else { 0 }
                };
                *kept.entry((rank, layer)).or_default() +=
                    shape.placed().map(of).map(u64::from).sum::<u64>();
                vec![]
            }
            OpKind::Shortlist { segment, .. } => {
                want(0, Content::Logits)?;
                vec![Content::Candidates(segment, 1 << (rank % 128))]
            }
            OpKind::Collect { segment, .. } => {
                let known = collected.entry((rank, segment)).or_default();
                match read(0) {
                    Some(Content::Candidates(of, who)) if of == segment && *known & who == 0 => {
                        *known |= who;
                    }
                    have => return wrong(have, "candidates of this text, each device once"),
                }
                vec![]
            }
            OpKind::Choose { segment } => {
                let known = collected.get(&(rank, segment)).copied().unwrap_or(0);
                if known != words {
                    let have = Some(Content::Candidates(segment, known));
                    return wrong(have, &Content::Candidates(segment, words).to_string());
                }
                vec![]
            }
            OpKind::Export { staged: true } | OpKind::Add => {
                let all = match (read(0), read(1)) {
                    (Some(Content::Sum(a, who)), Some(Content::Sum(b, others))) if a == b => {
                        both(who, others).map(|all| Content::Sum(a, all))
                    }
                    _ => None,
                };
                match all {
                    Some(all) => vec![all],
                    None => return wrong(read(1), "sums of the same block over other devices"),
                }
            }
            OpKind::Export { staged: false } | OpKind::Import | OpKind::Select => match read(0) {
                Some(have) => vec![have],
                None => return wrong(None, "rows"),
            },
            OpKind::Join { layer, join, norm, post, partial, staged } => {
                let at = 2 * layer + u32::from(join == JoinOf::Mlp);
                let before = first(spec, at);
                want(0, if post { Content::Rows(before) } else { Content::Residual(before) })?;
                let mut sum = [0; 2];
                for index in 1..1 + usize::from(partial) + usize::from(staged) {
                    let more = match read(index) {
                        Some(Content::Sum(of, who)) if of == at => both(who, sum),
                        _ => None,
                    };
                    match more {
                        Some(more) => sum = more,
                        None => return wrong(read(index), "sums of this block, each device once"),
                    }
                }
                let all = contributors(spec, plan, rank, at);
                if sum != all {
                    let have = Some(Content::Sum(at, sum));
                    return wrong(have, &Content::Sum(at, all).to_string());
                }
                if stage(spec, norm) != at + 1 {
                    return wrong(None, "the norm of the block that follows");
                }
                if post {
                    vec![Content::Rows(at + 1)]
                } else {
                    vec![Content::Residual(at + 1), Content::Rows(at + 1)]
                }
            }
            OpKind::Load { piece } => {
                let known = pieces[rank].get(piece as usize);
                let bytes = op.writes.first().map(|region| program.region_bytes(region));
                if known.map(Piece::stored) != bytes {
                    return wrong(None, "all of a piece of the shard");
                }
                vec![Content::Weights(piece)]
            }
            OpKind::Receive { .. } => {
                let sent = order.source.get(&(rank, id)).and_then(|&(from, send)| {
                    let send = programs[from].operation(send);
                    held[from][send.reads[0].tensor.0 as usize]
                });
                match sent {
                    Some(sent) => vec![sent],
                    None => return wrong(None, "a tile"),
                }
            }
            OpKind::Emit { output }
                if program.outputs[output as usize].kind == OutputKind::Token =>
            {
                let segment = program.outputs[output as usize].segment;
                if !collected.contains_key(&(rank, segment)) {
                    return wrong(None, "a choice of this text");
                }
                vec![]
            }
            OpKind::Emit { .. } => {
                if op.block == Block::Head && !matches!(read(0), Some(Content::Logits)) {
                    want(0, Content::Rows(2 * spec.layers))?;
                }
                vec![]
            }
            OpKind::Send { .. } => vec![],
        };
        store(&mut held[rank], program, id, op, &made)?;
    }
    let rows: u64 =
        shape.placed().filter(|(_, s)| s.kept).map(|(rows, _)| u64::from(rows.len())).sum();
    keeps_all(spec, plan, programs, &kept, rows)
}

/// Where a device has the weights of a product.
enum Weights {
    Held,
    Read(u32),
    /// In no piece.
    None,
}

/// Where a device of these pieces has the weights of what a product writes.
fn weights_of(
    pieces: &[Piece],
    device: &DevicePlan,
    (layer, product): (u32, Product),
    op: &Operation,
) -> Weights {
    let Some(streaming) = &device.streaming else { return Weights::Held };
    let held = pieces::held(layer, product);
    let columns = op.writes.first().map(|region| region.columns);
    let is = |piece: &Piece| piece.held == held && Some(piece.columns) == columns;
    match pieces.iter().position(is) {
        Some(piece) if streaming.keeps(piece as u32) => Weights::Held,
        Some(piece) => Weights::Read(piece as u32),
        None => Weights::None,
    }
}

/// Whether each row is kept once in each layer by whoever keeps any, and each head by somebody.
fn keeps_all(
    spec: &ModelSpec,
    plan: &Plan,
    programs: &[Program],
    kept: &BTreeMap<(usize, u32), u64>,
    rows: u64,
) -> Result<(), VerifyError> {
    let wrong = |why: String| Err(VerifyError::Malformed(why));
    if let Some(((rank, layer), n)) = kept.iter().find(|(_, n)| **n != rows) {
        return wrong(format!("rank {rank} keeps {n} of {rows} rows of layer {layer}"));
    }
    if rows == 0 {
        return Ok(());
    }
    for layer in 0..spec.layers {
        let keepers = (0..programs.len()).filter(|rank| kept.contains_key(&(*rank, layer)));
        let heads = |rank: usize| plan.ring[rank].assignment(Phase::Prefill).block(layer).heads;
        let mut heads: Vec<_> = keepers.map(heads).collect();
        heads.sort_unstable();
        let covered =
            heads.iter().try_fold(0, |at, span| (span.start() <= at).then_some(at.max(span.end())));
        if covered != Some(spec.heads) {
            return wrong(format!("keys and values of layer {layer} are not all kept"));
        }
    }
    Ok(())
}

fn store(
    held: &mut [Option<Content>],
    program: &Program,
    id: OpId,
    op: &Operation,
    made: &[Content],
) -> Result<(), VerifyError> {
    if made.len() != op.writes.len() {
        let why = format!("{} writes {} regions", site(program, id), op.writes.len());
        return Err(VerifyError::Malformed(why));
    }
    for (region, content) in op.writes.iter().zip(made) {
        let place = &mut held[region.tensor.0 as usize];
        if place.is_some_and(|former| former != *content) {
            return Err(VerifyError::Content {
                site: site(program, id),
                have: content.to_string(),
                want: place.map(|p| p.to_string()).unwrap_or_default(),
            });
        }
        *place = Some(*content);
    }
    Ok(())
}

fn entry(spec: &ModelSpec) -> Content {
    match spec.norm_place {
        NormPlace::Post => Content::Rows(0),
        NormPlace::Pre => Content::Residual(0),
    }
}

/// The block whose input a norm makes.
fn stage(spec: &ModelSpec, norm: NormOf) -> u32 {
    match (norm, spec.norm_place) {
        (NormOf::Attention(layer), NormPlace::Pre) => 2 * layer,
        (NormOf::Mlp(layer), NormPlace::Pre) | (NormOf::Attention(layer), NormPlace::Post) => {
            2 * layer + 1
        }
        (NormOf::Mlp(layer), NormPlace::Post) => 2 * (layer + 1),
        (NormOf::Final, _) => 2 * spec.layers,
    }
}

/// Whether attention reads all rows that its queries see.
fn sees_all(spec: &ModelSpec, shape: &BatchShape, op: &Operation) -> bool {
    let [queries, keys] = &op.reads[..] else { return false };
    shape.placed().filter(|(text, _)| text.overlaps(queries.rows)).all(|(text, _)| {
        let end = if spec.causal { queries.rows.end().min(text.end()) } else { text.end() };
        keys.rows.contains(Span::new(text.start(), end))
    })
}

/// The block at whose beginning those rows are made that block `at` reads.
fn first(spec: &ModelSpec, at: u32) -> u32 {
    if spec.parallel { at / 2 * 2 } else { at }
}

/// Both together, if nobody is in both.
fn both(a: Who, b: Who) -> Option<Who> {
    let apart = a[0] & b[0] == 0 && a[1] & b[1] == 0;
    apart.then_some([a[0] | b[0], a[1] | b[1]])
}

/// Whose partial sums make up a row of the device `rank` after a block.
fn contributors(spec: &ModelSpec, plan: &Plan, rank: usize, block: u32) -> Who {
    let columns = !block.is_multiple_of(2);
    let heads = !columns || spec.parallel;
    let among = |there: bool, who: u128| if there { who } else { 0 };
    let modes = plan.modes(block / 2);
    let mode = modes.map(|m| if columns { m.mlp } else { m.attention });
    if mode == Some(Mode::Sequence) {
        let own = 1 << (rank % 128);
        return [among(heads, own), among(columns, own)];
    }
    let has = |(rank, device): (Rank, &galaxy_common::DevicePlan)| {
        let (part, own) = (device.assignment(Phase::Prefill).block(block / 2), 1 << (rank.0 % 128));
        let heads = among(heads && !part.heads.is_empty(), own);
        [heads, among(columns && !part.columns.is_empty(), own)]
    };
    plan.ranked().map(has).fold([0; 2], |a, b| [a[0] | b[0], a[1] | b[1]])
}
