//! Lowering: a plan and a batch shape become one program for each device.

mod block;
mod build;
mod collective;
mod cuts;
mod decode;
mod free;
mod galaxy;
mod head;
#[cfg(test)]
mod images;
mod megatron;
mod order;
mod pipeline;
mod ring;
mod sequence;
mod stagger;
mod stream;

use crate::{
    operators::{OperatorGraph, shared},
    pieces::{self, Piece},
    program::Program,
};
use build::Builder;
pub(crate) use build::Sketch;
pub(crate) use cuts::cuts_move;
pub use cuts::{at_ends, farthest};
use galaxy_common::{
    Assignment, BatchShape, Cache, Exchange, Head, Layout, MAX_PAYLOAD_BYTES, Mode, Plan,
    PlanError, Rank, Row, ShapeError, Span, Wanted, plan::Phase,
};
use galaxy_model::{Formats, HeadSpec, ModelSpec};
use order::Order;
use ring::Ring;
use std::{collections::BTreeSet, sync::Arc};

/// The version of lowering, which changes whenever the same plan and shape lower to another program.
pub const LOWERING: u32 = 12;

/// Ranks whose programs one thread lowers, at least, where only bounds are asked for.
const RANKS_OF_THREAD: usize = 8;

/// Why a plan and a shape give no programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// The plan is not valid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The shape is not valid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The batch has more rows than the plan's limit, for which budgets are computed.
    #[error("a batch of {rows} rows is above the plan's limit of {limit}")]
    Rows {
        /// Rows of the batch.
        rows: u32,
        /// The plan's limit.
        limit: u32,
    },
    /// A sequence is longer than the model can read.
    #[error("sequence {segment} has {rows} tokens, and {limited_by} has {limit} rows")]
    Positions {
        /// The sequence's place in the batch.
        segment: usize,
        /// Its rows, with cached ones.
        rows: u32,
        /// The most rows that a sequence may have.
        limit: u32,
        /// What sets this limit.
        limited_by: &'static str,
    },
    /// The rows of a segment are not those of an image.
    #[error("image {segment} has {rows} rows, and those of this model have {whole}")]
    Image {
        /// The segment's place in the batch.
        segment: usize,
        /// Rows of the segment.
        rows: u32,
        /// Rows of an image of this model.
        whole: u32,
    },
    /// An output is wanted that the model cannot give.
    #[error("this model ({family}) gives no {wanted}{why}")]
    Output {
        /// `model_type` of the model.
        family: String,
        /// What was asked for.
        wanted: &'static str,
        /// The reason, in parentheses; empty where none is known.
        why: String,
    },
    /// A sequence has more rows to be cached than the plan's KV cache has room for.
    #[error(
        "{rows} rows are to be cached, and this plan has a KV cache of {limit}: raise its rows, or ask for fewer tokens"
    )]
    Cache {
        /// Rows of the sequence, with those that fill up its last block.
        rows: u32,
        /// Rows of the KV cache.
        limit: u32,
    },
    /// Rows are to be cached of a model whose rows see later ones.
    #[error("this model ({family}) is not causal: it cannot continue a cached sequence")]
    WholeTexts {
        /// `model_type` of the model.
        family: String,
    },
    /// The two blocks of a parallel residual are cut in different ways.
    #[error(
        "layer {layer} has parallel residuals in this model ({family}): a plan must cut both of its blocks by rows, or none"
    )]
    ParallelResidual {
        /// `model_type` of the model.
        family: String,
        /// The first layer that is cut so.
        layer: u32,
    },
    /// A piece of weights does not fit the buffer that it passes through.
    #[error(
        "a piece of {wanted} bytes does not fit the {room} that it may take of the buffer for weights: raise the buffer"
    )]
    Buffer {
        /// Bytes of the piece.
        wanted: u64,
        /// Bytes of the buffer that one piece may take.
        room: u64,
    },
    /// This part of the model cannot be computed.
    #[error("this part of the model cannot be computed: {why}")]
    Selection {
        /// The reason, for people.
        why: &'static str,
    },
    /// A tile is larger than a frame can carry.
    #[error(
        "a tile of {bytes} bytes is above a frame's limit of {MAX_PAYLOAD_BYTES}: use more tiles or a smaller max_rows"
    )]
    Tile {
        /// Bytes of the tile.
        bytes: u64,
    },
}

/// What is lowered: a batch of one phase, for a model under a plan.
#[derive(Clone, Copy)]
pub(crate) struct Lowering<'a> {
    /// The graph whose operators the programs name.
    pub graph: &'a Arc<OperatorGraph>,
    /// The description of the model.
    pub spec: &'a ModelSpec,
    /// The plan by which devices divide the model.
    pub plan: &'a Plan,
    /// The phase, which decides which assignment of each device is in force.
    pub phase: Phase,
    /// The shape of the batch.
    pub shape: &'a BatchShape,
}

/// One program for each rank of the plan. `formats` are those of the model's matrices: what comes from disk
/// follows from them.
///
/// # Errors
/// When the plan, the shape and the model do not fit together.
pub fn lower(
    spec: &ModelSpec,
    formats: &Formats,
    plan: &Plan,
    phase: Phase,
    shape: &BatchShape,
) -> Result<Vec<Program>, LowerError> {
    let graph = Arc::new(OperatorGraph::of(spec));
    let pieces = |rank: Rank| pieces::of_device(&graph, formats, &plan.ring[rank.index()]);
    of_graph(Lowering { graph: &graph, spec, plan, phase, shape }, &pieces)
}

/// Lowers as `lower` does, with an operator graph that exists already. `pieces` gives those of a device that reads
/// its weights from disk.
pub(crate) fn of_graph(
    lowering: Lowering<'_>,
    pieces: &dyn Fn(Rank) -> Vec<Piece>,
) -> Result<Vec<Program>, LowerError> {
    let Lowering { spec, plan, shape, .. } = lowering;
    fits(spec, plan)?;
    takes(spec, plan, shape)?;
    let order = Order::default();
    let ranks = plan.ranked().map(|(rank, _)| rank);
    let program = |rank: Rank| {
        let operations = operations(lowering, rank, &order);
        match &plan.ring[rank.index()].streaming {
            Some(streaming) => stream::weave(operations, streaming, &pieces(rank))?.finish(),
            None => operations.finish(),
        }
    };
    ranks.map(program).collect()
}

/// The operations of one rank, without a check of the plan and the shape.
fn operations(lowering: Lowering<'_>, rank: Rank, order: &Order) -> Builder {
    match (lowering.plan.layout, lowering.phase) {
        (Layout::Stages, _) => pipeline::program(lowering, rank),
        (_, Phase::Decode) => decode::program(lowering, rank),
        (Layout::Ring, _) => galaxy::program(lowering, rank, order),
        (Layout::Replicated, _) => megatron::program(lowering, rank),
    }
}

/// What `of` makes of the program of each of some ranks, with its slots and without its waits, for any plan and
/// shape: for bounds on what a batch takes. None where it makes nothing of one of them. Programs of many ranks
/// are lowered by several threads.
pub(crate) fn sketches<T: Send>(
    spec: &ModelSpec,
    plan: &Plan,
    phase: Phase,
    shape: &BatchShape,
    ranks: &[Rank],
    of: impl Fn(Sketch) -> Option<T> + Sync,
) -> Result<Option<Vec<T>>, LowerError> {
    let graph = Arc::new(OperatorGraph::of(spec));
    let order = Order::default();
    let sketch = |&rank: &Rank| -> Result<Option<T>, LowerError> {
        let lowering = Lowering { graph: &graph, spec, plan, phase, shape };
        Ok(of(operations(lowering, rank, &order).sketch()?))
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores.min(ranks.len().div_ceil(RANKS_OF_THREAD)).max(1);
    let part = ranks.len().div_ceil(threads).max(1);
    let some = |ranks: &[Rank]| ranks.iter().map(sketch).collect::<Result<Option<Vec<T>>, _>>();
    let some = &some;
    let parts: Result<Option<Vec<Vec<T>>>, _> = std::thread::scope(|scope| {
        let (own, others) = ranks.split_at(part.min(ranks.len()));
        let others = others.chunks(part);
        let others: Vec<_> = others.map(|ranks| scope.spawn(move || some(ranks))).collect();
        let over = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        std::iter::once(some(own)).chain(over).collect()
    });
    Ok(parts?.map(|parts| parts.into_iter().flatten().collect()))
}

/// The digest of all programs: it is equal on devices that lowered the same ones.
pub fn digest(programs: &[Program]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&LOWERING.to_le_bytes());
    for program in programs {
        let bytes = postcard::to_stdvec(program).expect("a program is plain data without maps");
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
    }
    *hasher.finalize().as_bytes()
}

/// The ordered pairs (from, to) of ranks between which programs of this plan send.
pub fn links(plan: &Plan) -> Vec<(Rank, Rank)> {
    let mut pairs = BTreeSet::new();
    for phase in [Phase::Prefill, Phase::Decode] {
        let (layers, head) = (Ring::layers(plan, phase), Ring::head(plan, phase));
        let direct = exchange(plan) == Exchange::Direct;
        if phase == Phase::Decode && plan.cache.rows == 0 {
            continue;
        }
        if plan.cache.rows > 0 {
            // Candidates for the next token go to all.
            pairs.extend(meet_directly(plan, phase, |_, from, _| !from.vocabulary.is_empty()));
        }
        if phase == Phase::Decode && plan.layout != Layout::Stages {
            let among = |a: Rank, b: Rank| {
                let carries = |rank: Rank| decode::carries(plan, &plan.ring[rank.index()]);
                carries(a) || carries(b)
            };
            let all = (0..layers.len()).flat_map(|a| (0..layers.len()).map(move |b| (a, b)));
            let ranks = all.map(|(a, b)| (layers.rank(a), layers.rank(b)));
            pairs.extend(ranks.filter(|(a, b)| among(*a, *b)));
            let all = plan.ranked().flat_map(|a| plan.ranked().map(move |b| (a, b)));
            let heads = all.filter(|(a, b)| {
                decode::carries(plan, a.1) && !b.1.assignment(phase).vocabulary.is_empty()
            });
            pairs.extend(heads.map(|(a, b)| (a.0, b.0)));
        }
        match plan.layout {
            Layout::Stages => pairs.extend(layers.around().take(layers.len().saturating_sub(1))),
            _ if direct => pairs.extend(meet_directly(plan, phase, exchanges_rows)),
            _ => pairs.extend(layers.around()),
        }
        if direct {
            pairs.extend(meet_directly(plan, phase, |_, from, to| {
                from.row_weight > 0 && !to.vocabulary.is_empty()
            }));
        } else {
            pairs.extend(head.around());
        }
    }
    pairs.into_iter().filter(|(from, to)| from != to).collect()
}

/// How tiles travel under a plan: replicated layouts know the ring only.
fn exchange(plan: &Plan) -> Exchange {
    match plan.layout {
        Layout::Replicated => Exchange::Ring,
        Layout::Ring | Layout::Stages => plan.exchange,
    }
}

fn meet_directly(
    plan: &Plan,
    phase: Phase,
    meet: impl Fn(&Plan, &Assignment, &Assignment) -> bool,
) -> Vec<(Rank, Rank)> {
    let all = plan.ranked().flat_map(|a| plan.ranked().map(move |b| (a, b)));
    let met = all.filter(|(a, b)| meet(plan, a.1.assignment(phase), b.1.assignment(phase)));
    met.map(|(a, b)| (a.0, b.0)).collect()
}

/// Whether a device of assignment `from` sends rows or sums straight to one of assignment `to` in some block.
fn exchanges_rows(plan: &Plan, from: &Assignment, to: &Assignment) -> bool {
    let owns = |part: &Assignment| part.row_weight > 0;
    let computes = |part: &Assignment| {
        let layers =
            plan.modes.iter().flat_map(|modes| modes.layers.iter().map(move |l| (l, modes)));
        layers.into_iter().any(|(layer, modes)| {
            let block = part.block(layer);
            (modes.attention == Mode::Tensor && !block.heads.is_empty())
                || (modes.mlp == Mode::Tensor && !block.columns.is_empty())
        })
    };
    let keys = plan.modes.iter().any(|modes| modes.attention == Mode::Sequence);
    owns(from) && (computes(to) || keys && owns(to)) || computes(from) && owns(to)
}

/// The rows of a batch that `rows` of it see in a layer, from the first text among them to the last; `rows`
/// themselves where they are of no text.
fn visible(graph: &OperatorGraph, layer: u32, shape: &BatchShape, rows: Span<Row>) -> Span<Row> {
    let of = graph.layers.get(layer as usize).and_then(|of| graph.attention(of.attention));
    let texts = shape.placed().filter(|(segment, _)| segment.overlaps(rows));
    let seen = texts.filter_map(|(text, _)| of.map(|of| of.sees(rows, text)));
    seen.reduce(|all, more| Span::new(all.start(), more.end())).unwrap_or(rows)
}

/// The key-value heads that these query heads use. Neighbouring query heads may share one.
pub fn kv_span(spec: &ModelSpec, heads: Span<Head>) -> Span<Head> {
    shared(spec.group(), heads)
}

/// The wanted rows of each segment that wants logits: (segment, rows of the batch).
fn wanted_rows(shape: &BatchShape) -> Vec<(u32, Span<Row>)> {
    let mut wanted = Vec::new();
    for (index, (rows, segment)) in shape.placed().enumerate() {
        match segment.wanted {
            Wanted::LastLogits | Wanted::Token(_) => {
                wanted.push((index as u32, Span::new(rows.end() - 1, rows.end())))
            }
            Wanted::AllLogits => wanted.push((index as u32, rows)),
            _ => {}
        }
    }
    wanted
}

/// Checks that a plan is valid, and is one for this model.
pub(crate) fn fits(spec: &ModelSpec, plan: &Plan) -> Result<(), LowerError> {
    plan.validate(spec.extent())?;
    match plan.modes.iter().find(|m| spec.parallel && m.attention != m.mlp) {
        Some(unlike) => {
            let layer = unlike.layers.start();
            Err(LowerError::ParallelResidual { family: spec.family.clone(), layer })
        }
        None => Ok(()),
    }
}

/// Checks that a plan has programs for a batch. Cached rows count here, which programs themselves do not know.
///
/// # Errors
/// When the plan, the batch and the model do not fit together.
pub fn takes(spec: &ModelSpec, plan: &Plan, shape: &BatchShape) -> Result<(), LowerError> {
    if shape.rows() > plan.max_rows {
        return Err(LowerError::Rows { rows: shape.rows(), limit: plan.max_rows });
    }
    let kept = shape.segments().iter().filter(|segment| segment.cached);
    let taken = kept.map(|s| Cache::taken(s.context_len.saturating_add(s.rows)));
    // Sequences may share blocks, and the rows of a draft are those of one sequence: whether there is room for all
    // is up to their block tables.
    let taken = taken.max().unwrap_or(0);
    if taken > 0 && !spec.causal {
        return Err(LowerError::WholeTexts { family: spec.family.clone() });
    }
    if taken > plan.cache.rows {
        return Err(LowerError::Cache { rows: taken, limit: plan.cache.rows });
    }
    for (index, segment) in shape.segments().iter().enumerate() {
        let (rows, limit) =
            (segment.context_len.saturating_add(segment.rows), spec.position_limit());
        if rows > limit {
            let limited_by = spec.limited_by();
            return Err(LowerError::Positions { segment: index, rows, limit, limited_by });
        }
        if let Some(whole) = spec.patches.map(|patches| patches.rows()).filter(|&n| n != rows) {
            return Err(LowerError::Image { segment: index, rows, whole });
        }
        let refused = |wanted| {
            let why = spec.headless.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
            Err(LowerError::Output { family: spec.family.clone(), wanted, why })
        };
        match (segment.wanted, &spec.head) {
            (Wanted::Classes, HeadSpec::Classes(_))
            | (Wanted::Hidden | Wanted::Pooled(_) | Wanted::Nothing, _) => {}
            (Wanted::Classes, _) => return refused("class logits: it has no classification head"),
            (_, HeadSpec::Language { .. }) => {}
            _ => return refused("next-token logits: it has no language-model head"),
        }
    }
    Ok(())
}
