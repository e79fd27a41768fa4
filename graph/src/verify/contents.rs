//! Contents: every operation reads what its operator is meant to read.
//!
//! What a tensor holds is a value of the operator graph, or terms of a sum. The rules are the operators'
//! ([`crate::operators::Operate::content`]); those of what moves values between devices, caches rows and
//! chooses tokens are here.

use super::{VerifyError, order::Order, site};
use crate::{
    operators::{Attention, Content, OperandMismatch, Operator, OperatorGraph, OperatorId},
    pieces::Piece,
    program::{
        Block, OpId, OpKind, Operation, OutputKind, Program, Region, Role, candidates_tile_bytes,
    },
};
use galaxy_common::{BatchShape, DevicePlan, Plan, Row, Segment, Share, Span, Token, plan::Phase};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// What is known while programs are followed in an order in which they may run.
struct Contents<'a> {
    graph: &'a OperatorGraph,
    plan: &'a Plan,
    phase: Phase,
    shape: &'a BatchShape,
    programs: &'a [Program],
    order: &'a Order,
    /// Pieces of each device that reads its weights from disk.
    pieces: Vec<Vec<Piece>>,
    /// Devices that have a slice of the vocabulary, as bits.
    vocabulary_owners: u128,
    /// What each tensor of each device holds.
    held: Vec<Vec<Option<Content>>>,
    /// How many rows of an attention each device caches: by (device, attention).
    cached_rows: BTreeMap<(usize, OperatorId), u64>,
    /// Devices whose candidates each device has, as bits.
    collected: Vec<u128>,
    /// Devices that have chosen, as bits.
    sampled: u128,
}

pub(super) fn check(
    graph: &OperatorGraph,
    pieces: Vec<Vec<Piece>>,
    plan: &Plan,
    shape: &BatchShape,
    programs: &[Program],
    order: &Order,
) -> Result<(), VerifyError> {
    let phase = programs.first().map_or(Phase::Prefill, |program| program.phase);
    if let Some(other) = programs.iter().find(|program| program.phase != phase) {
        let why = format!("rank {} has a program of another phase", other.rank.index());
        return Err(VerifyError::Malformed(why));
    }
    let owners = plan.ranked().filter(|(_, d)| !d.assignment(phase).vocabulary.is_empty());
    let mut contents = Contents {
        graph,
        plan,
        phase,
        shape,
        programs,
        order,
        pieces,
        vocabulary_owners: owners.fold(0, |all, (rank, _)| all | bit(rank.index())),
        held: programs.iter().map(|p| vec![None; p.tensors.len()]).collect(),
        cached_rows: BTreeMap::new(),
        collected: vec![0; programs.len()],
        sampled: 0,
    };
    for &(rank, id) in &order.sequence {
        let at = At { rank, id, op: programs[rank].operation(id) };
        let made = contents.written(at).map_err(|unlike| contents.error(at, unlike))?;
        contents.store(at, made)?;
    }
    contents.caches_all()
}

fn bit(rank: usize) -> u128 {
    1 << (rank % 128)
}

/// An operation of a device, with its id.
#[derive(Clone, Copy)]
struct At<'a> {
    rank: usize,
    id: OpId,
    op: &'a Operation,
}

impl<'a> Contents<'a> {
    fn read(&self, at: At<'_>, index: usize) -> Option<&Content> {
        let region = at.op.reads.get(index)?;
        self.held[at.rank][region.tensor.0 as usize].as_ref()
    }

    fn error(&self, at: At<'_>, unlike: OperandMismatch) -> VerifyError {
        let have = self.read(at, unlike.at).map_or_else(|| "nothing".to_owned(), |h| h.to_string());
        VerifyError::Content { site: site(&self.programs[at.rank], at.id), have, want: unlike.want }
    }

    /// What an operation computes: a content for each region that it writes.
    fn written(&mut self, at: At<'_>) -> Result<Vec<Content>, OperandMismatch> {
        let own = bit(at.rank);
        match at.op.kind {
            OpKind::Embed(operator) | OpKind::Rows(operator) => {
                self.operator(at, operator, Span::empty(), at.op.reads.len())
            }
            OpKind::Product { operator, kernel, share } => {
                let known = self.graph.product(operator).is_some_and(|of| of.kernel == kernel);
                if !known {
                    return Err(OperandMismatch::new(
                        0,
                        "an operator that is a product of this kind",
                    ));
                }
                self.weights(at, operator)?;
                let operands = self.programs[at.rank].operands(at.op);
                self.operator(at, operator, share, operands)
            }
            OpKind::Attend { operator, heads, .. } => self.operator(at, operator, heads.of(), 2),
            OpKind::AppendKv { operator, .. } => self.append_kv(at, operator),
            OpKind::TopK { tokens } => {
                self.top_k(at, tokens)?;
                Ok(vec![Content::Candidates(own)])
            }
            OpKind::GatherCandidates => {
                let known = self.collected[at.rank];
                match self.read(at, 0) {
                    Some(Content::Candidates(who)) if known & who == 0 => {
                        self.collected[at.rank] = known | who;
                        Ok(vec![])
                    }
                    _ => Err(OperandMismatch::new(0, "candidates, of each device once")),
                }
            }
            OpKind::Sample => {
                let known = self.collected[at.rank];
                if known != self.vocabulary_owners {
                    let want =
                        format!("{}, not {known:b}", Content::Candidates(self.vocabulary_owners));
                    return Err(OperandMismatch::new(0, want));
                }
                self.sampled |= own;
                Ok(vec![])
            }
            OpKind::Export { staged: true } | OpKind::Add => {
                let all = match (self.read(at, 0), self.read(at, 1)) {
                    (Some(Content::Sums(own)), Some(Content::Sums(others))) => own.plus(others),
                    _ => None,
                };
                let all = all.ok_or_else(|| OperandMismatch::new(1, "sums of other shares"))?;
                Ok(vec![Content::Sums(all)])
            }
            OpKind::Export { staged: false } | OpKind::Import | OpKind::Select => {
                match self.read(at, 0) {
                    Some(have) => Ok(vec![have.clone()]),
                    None => Err(OperandMismatch::new(0, "rows")),
                }
            }
            OpKind::AddNorm { add, norm, post, partial, staged } => {
                let read = 1 + usize::from(partial) + usize::from(staged);
                let sum = self.operator(at, add, Span::empty(), read)?;
                let follows = self.graph.norm(norm).zip(self.graph.add(add));
                match follows.filter(|(norm, add)| norm.input == add.output) {
                    Some((norm, _)) if post => Ok(vec![Content::Value(norm.output)]),
                    Some((norm, _)) => Ok([sum, vec![Content::Value(norm.output)]].concat()),
                    None => Err(OperandMismatch::new(0, "the norm of this residual addition")),
                }
            }
            OpKind::Load { piece } => {
                let known = self.pieces[at.rank].get(piece as usize).map(Piece::stored);
                let written = at.op.writes.first();
                let bytes = written.map(|region| self.programs[at.rank].region_bytes(region));
                match known == bytes {
                    true => Ok(vec![Content::Weights(piece)]),
                    false => Err(OperandMismatch::new(0, "all of a piece of the shard")),
                }
            }
            OpKind::Receive { .. } => {
                let sent = self.order.source.get(&(at.rank, at.id)).and_then(|&(from, send)| {
                    let send = self.programs[from].operation(send);
                    self.held[from][send.reads[0].tensor.0 as usize].clone()
                });
                sent.map(|sent| vec![sent]).ok_or_else(|| OperandMismatch::new(0, "a tile"))
            }
            OpKind::Emit { output } => self.emit(at, output),
            OpKind::Send { .. } => Ok(vec![]),
        }
    }

    /// Checks that candidates are found from a row of logits for each choice, and that their tile has room
    /// for them.
    fn top_k(&self, at: At<'_>, tokens: Span<Token>) -> Result<(), OperandMismatch> {
        let logits = self.graph.language.and_then(|id| self.graph.product(id));
        let logits = logits.ok_or_else(|| OperandMismatch::new(0, "logits: there is no head"))?;
        let rows = &at.op.reads;
        (0..rows.len())
            .try_for_each(|index| self.want(at, index, Content::Value(logits.output)))?;
        let single = rows.iter().all(|region| region.rows.len() == 1);
        let ordered = rows.windows(2).all(|pair| pair[0].rows.end() <= pair[1].rows.start());
        if !single || !ordered || rows.len() != self.shape.sampled().count() {
            return Err(OperandMismatch::new(
                0,
                "a row of logits for each sequence that a token is sampled for",
            ));
        }
        let slice = self.plan.ring[at.rank].assignment(self.phase).vocabulary;
        if tokens != slice {
            return Err(OperandMismatch::new(0, format!("logits of {slice}")));
        }
        let tile = at.op.writes.first().map(|tile| self.programs[at.rank].region_bytes(tile));
        let bytes = candidates_tile_bytes(self.shape, slice.len());
        if tile.is_none_or(|tile| tile < bytes) {
            return Err(OperandMismatch::new(0, format!("room for {bytes} bytes of candidates")));
        }
        Ok(())
    }

    fn want(&self, at: At<'_>, index: usize, content: Content) -> Result<(), OperandMismatch> {
        match self.read(at, index) {
            Some(have) if *have == content => Ok(()),
            _ => Err(OperandMismatch::new(index, content)),
        }
    }

    /// What an operator computes from the first `count` regions that are read.
    fn operator(
        &self,
        at: At<'_>,
        id: OperatorId,
        share: Span<Share>,
        count: usize,
    ) -> Result<Vec<Content>, OperandMismatch> {
        let kind = |operator: &Operator| match at.op.kind {
            OpKind::Embed(_) => matches!(operator, Operator::Embed(_) | Operator::Input(_)),
            OpKind::Rows(_) => operator.operate().is_by_rows(),
            OpKind::Product { .. } => matches!(operator, Operator::Product(_)),
            OpKind::Attend { .. } => matches!(operator, Operator::Attention(_)),
            OpKind::AddNorm { .. } => matches!(operator, Operator::Add(_)),
            _ => false,
        };
        let operator = self.graph.get(id).filter(|operator| kind(operator));
        let operator =
            operator.ok_or_else(|| OperandMismatch::new(0, "an operator of this kind"))?;
        let operate = operator.operate();
        if let Some(cut) = operate.cut() {
            let device = self.plan.ring[at.rank].assignment(self.phase);
            if share.is_empty() || !cut.held(device, at.op.layer).contains(share) {
                return Err(OperandMismatch::new(0, "a share that the device holds"));
            }
        }
        if let Some((inputs, outputs)) = operate.share_columns(share) {
            let program = &self.programs[at.rank];
            let reads = at.op.reads.first().map(|region| region.columns.len());
            let makes = at.op.writes.first().map(|region| program.tensor(region.tensor).width);
            if (reads, makes) != (Some(inputs), Some(outputs)) {
                let want = format!("{inputs} columns, of which its share makes {outputs}");
                return Err(OperandMismatch::new(0, want));
            }
        }
        let read: Vec<_> = (0..count).map(|index| self.read(at, index).cloned()).collect();
        Ok(vec![operate.content(id, share, &read)?])
    }

    fn attention(&self, id: OperatorId) -> Result<&'a Attention, OperandMismatch> {
        self.graph.attention(id).ok_or_else(|| OperandMismatch::new(0, "an attention"))
    }

    /// Checks that a product takes its weights from where they are.
    fn weights(&self, at: At<'_>, operator: OperatorId) -> Result<(), OperandMismatch> {
        let index = self.programs[at.rank].operands(at.op);
        let loaded = at.op.reads.len() > index;
        match self.weights_of(at.rank, operator, at.op) {
            Weights::Held if loaded => Err(OperandMismatch::new(index, "no weights: it has them")),
            Weights::Held => Ok(()),
            Weights::Read(piece) => self.want(at, index, Content::Weights(piece)),
            Weights::None => Err(OperandMismatch::new(index, "the columns of a piece")),
        }
    }

    /// Where a device has the weights of the columns that a product writes.
    fn weights_of(&self, rank: usize, operator: OperatorId, op: &Operation) -> Weights {
        let device: &DevicePlan = &self.plan.ring[rank];
        let Some(streaming) = &device.streaming else { return Weights::Held };
        let columns = op.writes.first().map(|region| region.columns);
        let is = |piece: &Piece| piece.operator == operator && Some(piece.columns) == columns;
        match self.pieces[rank].iter().position(is) {
            Some(piece) if streaming.keeps(piece as u32) => Weights::Held,
            Some(piece) => Weights::Read(piece as u32),
            None => Weights::None,
        }
    }

    fn append_kv(&mut self, at: At<'_>, id: OperatorId) -> Result<Vec<Content>, OperandMismatch> {
        let input = self.attention(id)?.input;
        self.want(at, 0, Content::Value(input))?;
        let of = |(text, segment): (Span<Row>, &Segment)| {
            if segment.cached { text.intersect(at.op.reads[0].rows).len() } else { 0 }
        };
        let rows: u64 = self.shape.placed().map(of).map(u64::from).sum();
        *self.cached_rows.entry((at.rank, id)).or_default() += rows;
        Ok(vec![])
    }

    fn emit(&self, at: At<'_>, output: u32) -> Result<Vec<Content>, OperandMismatch> {
        let output = &self.programs[at.rank].outputs[output as usize];
        if output.kind == OutputKind::Token {
            let mut choices = self.shape.sampled();
            let wanted = choices.any(|(index, ..)| index == output.segment as usize);
            return match wanted && self.sampled & bit(at.rank) != 0 {
                true => Ok(vec![]),
                false => Err(OperandMismatch::new(0, "a sampled token of this sequence")),
            };
        }
        let logits = self.graph.language.and_then(|id| self.graph.product(id));
        let logits = logits.map(|product| Content::Value(product.output));
        if at.op.block == Block::Head && self.read(at, 0) != logits.as_ref() {
            self.want(at, 0, Content::Value(self.graph.last))?;
        }
        Ok(vec![])
    }

    fn store(&mut self, at: At<'_>, made: Vec<Content>) -> Result<(), VerifyError> {
        let site = || site(&self.programs[at.rank], at.id);
        // Workspace is not read.
        let program = &self.programs[at.rank];
        let kept = |region: &&Region| program.tensor(region.tensor).role != Role::Workspace;
        let writes: SmallVec<[&Region; 2]> = at.op.writes.iter().filter(kept).collect();
        if made.len() != writes.len() {
            let why = format!("{} writes {} regions", site(), at.op.writes.len());
            return Err(VerifyError::Malformed(why));
        }
        for (region, content) in writes.into_iter().zip(made) {
            let place = &mut self.held[at.rank][region.tensor.0 as usize];
            if let Some(former) = place.as_ref().filter(|former| **former != content) {
                let (have, want) = (content.to_string(), former.to_string());
                return Err(VerifyError::Content { site: site(), have, want });
            }
            *place = Some(content);
        }
        Ok(())
    }

    /// Checks that each device that caches rows of a layer caches each of them once, and that each head is
    /// cached by some device.
    fn caches_all(&self) -> Result<(), VerifyError> {
        let rows = self.shape.placed().filter(|(_, s)| s.cached);
        let rows: u64 = rows.map(|(rows, _)| u64::from(rows.len())).sum();
        let wrong = |why: String| Err(VerifyError::Malformed(why));
        if let Some(((rank, id), n)) = self.cached_rows.iter().find(|(_, n)| **n != rows) {
            return wrong(format!("rank {rank} keeps {n} of {rows} rows of operator {}", id.0));
        }
        if rows == 0 {
            return Ok(());
        }
        for (id, attention) in self.graph.attentions() {
            let keeps = |rank: &usize| self.cached_rows.contains_key(&(*rank, id));
            let heads = |rank: usize| {
                self.plan.ring[rank].assignment(self.phase).block(attention.layer).heads
            };
            let mut heads: Vec<_> = (0..self.programs.len()).filter(keeps).map(heads).collect();
            heads.sort_unstable();
            let covered = heads
                .iter()
                .try_fold(0, |at, span| (span.start() <= at).then_some(at.max(span.end())));
            if covered != Some(attention.heads) {
                let layer = attention.layer;
                return wrong(format!("keys and values of layer {layer} are not all cached"));
            }
        }
        Ok(())
    }
}

/// Where a device has the weights of a product.
enum Weights {
    Held,
    Read(u32),
    /// No piece has just these columns.
    None,
}
