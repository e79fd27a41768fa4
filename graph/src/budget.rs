//! The memory that a plan needs of each device (`Needs`), which law 2 holds within the device's memory budget.

pub use crate::holdings::PROCESS;

use crate::{
    holdings::{self, READ_BUFFERS},
    lower::{LowerError, Sketch, cuts_move, farthest, fits, kv_span, sketches},
    operators::OperatorGraph,
    pieces,
    program::{Memory, Program, Role},
    truncated,
};
use galaxy_common::{
    BatchShape, Bytes, Cache, CandidateCount, DevicePlan, Layout, Plan, Rank, Row, Segment, Span,
    Wanted, WeightFormat, plan::Phase,
};
use galaxy_model::{Formats, HeadSpec, ModelSpec, Positions};

/// Bytes that each kernel thread works in at most: packed rows and sums of a product, and scores.
pub const THREAD_SCRATCH: u64 = 2 << 20;

/// Values of rows that a product packs at a time.
pub const PACKED: u64 = 154 << 10;
/// Rows that a product packs at a time where they do not fit `PACKED` with all their inputs.
const PACKED_ROWS: u64 = 154;
/// Columns whose sums wait for further inputs in such a product; in others it is only `AT_A_TIME`, those that a
/// thread computes at a time.
const WAITING: u64 = 1 << 10;
const AT_A_TIME: u64 = 32;

/// Values of queries that attention packs at a time, with as many of their context.
const QUERIES: u64 = 20 << 10;
/// Values that attention works in besides.
const KEYS: u64 = 44 << 10;
/// Lanes added to fill up vectors.
const MORE_LANES: u64 = 128;

/// Bytes that a kernel thread works in for products of up to so many rows and inputs.
pub fn product_scratch(rows: u64, inputs: u64) -> u64 {
    let together = rows.saturating_mul(inputs);
    let waits = if together > PACKED { WAITING } else { AT_A_TIME };
    // Processors that no kernel is written for widen a group of columns instead.
    let widened = inputs.min(1 << 10) * u64::from(WeightFormat::PANEL);
    // Rows and sums fill up pages.
    4 * (together.min(PACKED).max(widened) + rows.min(PACKED_ROWS) * waits) + (2 << 12)
}

/// Bytes that a kernel thread works in for attention of so many rows and `lanes` heads that share keys, without
/// the values that are copied together.
pub fn attention_scratch(rows: u64, lanes: u64, head_width: u64) -> u64 {
    let lanes = (rows * lanes).min(QUERIES / head_width.max(1)) + MORE_LANES;
    // Heads are filled up to a vector, too.
    4 * (2 * lanes * (head_width + 15) + KEYS)
}

/// Keys whose values each thread copies together, as one block.
const KEYS_AT_A_TIME: u64 = 144;

/// Rows of a position table that are read at a time.
pub const POSITION_ROWS: u64 = 64;

/// Bytes of a sequence's candidates and of their tiles, besides what grows with the vocabulary.
const SAMPLER_SCRATCH: u64 = 64 << 10;

/// Bytes that the kernels of a device share.
pub const SHARED_SCRATCH: u64 = 1 << 18;

/// The bytes that a plan asks of one device, by what they are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needs {
    /// Weights that stay, as held.
    pub weights: Bytes,
    /// The buffer that weights from disk pass through; 0 where all weights stay.
    pub stream: Bytes,
    /// Device slots of the largest program.
    pub activations: Bytes,
    /// Staging slots of the largest program.
    pub staging: Bytes,
    /// Results of the largest program, on their way to the coordinator.
    pub results: Bytes,
    /// Scratch memory that the kernels work in.
    pub scratch: Bytes,
    /// The KV cache, rotary angles of all its positions, and what the sampler works in; 0 without a cache.
    pub cache: Bytes,
    /// The process itself.
    pub process: Bytes,
}

impl Needs {
    /// The larger of both, part by part.
    fn or_more(self, other: Self) -> Self {
        Self {
            weights: self.weights.max(other.weights),
            stream: self.stream.max(other.stream),
            activations: self.activations.max(other.activations),
            staging: self.staging.max(other.staging),
            results: self.results.max(other.results),
            scratch: self.scratch.max(other.scratch),
            cache: self.cache.max(other.cache),
            process: self.process.max(other.process),
        }
    }
    /// The most bytes at any time. While weights are read, what programs work in is not there yet; while they
    /// are written to a file, piece after piece, the weights that stay are not there either.
    pub fn total(&self) -> Bytes {
        let works = self.activations + self.staging + self.results + self.scratch + self.cache;
        let read = if self.stream == Bytes(0) { self.weights } else { self.stream };
        (self.weights + self.stream + works).max(read + Bytes(READ_BUFFERS)) + self.process
    }
}

/// What the plan asks of the device of `rank`, for programs of up to `plan.max_rows` rows.
///
/// `formats` are those of the model's matrices as devices hold them.
///
/// # Errors
/// When the plan cannot be lowered.
///
/// # Panics
/// When the plan has no such rank.
pub fn needs(
    spec: &ModelSpec,
    formats: &Formats,
    plan: &Plan,
    rank: Rank,
) -> Result<Needs, LowerError> {
    Ok(needs_of(spec, formats, plan, &[rank])?[0])
}

/// [`needs`] of every device, in ring order.
///
/// # Errors
/// When the plan cannot be lowered.
pub fn needs_all(
    spec: &ModelSpec,
    formats: &Formats,
    plan: &Plan,
) -> Result<Vec<Needs>, LowerError> {
    let ranks: Vec<Rank> = plan.ranked().map(|(rank, _)| rank).collect();
    needs_of(spec, formats, plan, &ranks)
}

/// Layers that are lowered at first of each run of layers that are cut alike.
const LAYERS: u32 = 4;

fn needs_of(
    spec: &ModelSpec,
    formats: &Formats,
    plan: &Plan,
    ranks: &[Rank],
) -> Result<Vec<Needs>, LowerError> {
    fits(spec, plan)?;
    // A stage keeps something of each of its layers.
    let mut layers = if plan.layout == Layout::Stages { spec.layers } else { LAYERS };
    let most = loop {
        if let Some(most) = most(spec, plan, ranks, layers)? {
            break most;
        }
        layers *= 2;
    };
    let graph = OperatorGraph::of(spec);
    let with_weights = |(rank, needs): (&Rank, Needs)| Needs {
        weights: weights(&graph, formats, &plan.ring[rank.index()]),
        cache: cache(spec, plan.cache, &plan.ring[rank.index()]),
        ..needs
    };
    Ok(ranks.iter().zip(most).map(with_weights).collect())
}

/// What the widest batches take besides weights, found with about `layers` layers of each run that is cut
/// alike; `None` where the rest of them might take more.
fn most(
    spec: &ModelSpec,
    plan: &Plan,
    ranks: &[Rank],
    layers: u32,
) -> Result<Option<Vec<Needs>>, LowerError> {
    // Slots may be taken in turns of two layers.
    let alike = spec.sees_alike(plan.max_rows);
    let keep = |all: u32| if alike && all > layers { layers + (all - layers) % 2 } else { all };
    let (short_spec, short) = truncated::truncated(spec, plan, keep);
    let (mut at, mut cut) = (0, Vec::new());
    for run in truncated::runs(plan) {
        let (first, own) = (at, keep(run.len()));
        at += own as usize;
        cut.extend((run.len() > own).then_some((first, at, run.len() - own)));
    }
    let mut most: Option<Vec<Needs>> = None;
    let mut shapes: Vec<(Phase, BatchShape)> =
        widest(spec, plan)?.into_iter().map(|shape| (Phase::Prefill, shape)).collect();
    if plan.cache.rows > 0 {
        let step = widest_step(plan)?;
        shapes.extend([Phase::Prefill, Phase::Decode].map(|phase| (phase, step.clone())));
    }
    for (phase, shape) in shapes {
        let of = |sketch: Sketch| {
            let program = sketch.repeated(&cut)?;
            let running = of_running(spec, &plan.ring[program.rank.index()], &program);
            let results = running.results + other_results(spec, plan, program.rank);
            Some(rounded(spec, plan, &program, Needs { results, ..running }))
        };
        let Some(these) = sketches(&short_spec, &short, phase, &shape, ranks, of)? else {
            return Ok(None);
        };
        most = Some(match most {
            Some(most) => most.into_iter().zip(these).map(|(a, b)| a.or_more(b)).collect(),
            None => these,
        });
    }
    Ok(Some(most.unwrap_or_default()))
}

/// Whether a device may have [`farthest`] rows on top of its share under this plan.
pub fn moves(plan: &Plan) -> bool {
    plan.ring.len() > 1 && cuts_move(plan)
}

/// Adds to the needs of a program for one of [`widest`] what other batches may take on top: where rows are cut,
/// a part of fewer rows may be a row longer than its share, and then not fit where that of more would; and
/// where cuts move to ends of texts, a device may have more rows than its share.
pub fn rounded(spec: &ModelSpec, plan: &Plan, program: &Program, needs: Needs) -> Needs {
    if plan.ring.len() == 1 {
        return needs;
    }
    // A tensor of all rows never has more.
    let more = |rows: u32| if moves(plan) && rows < plan.max_rows { farthest(rows) } else { 0 };
    let mut slots = vec![0; program.slots.len()];
    let mut tile = 0;
    for tensor in &program.tensors {
        let (rows, width) = (tensor.rows.len(), u64::from(tensor.width));
        match tensor.memory {
            Memory::Device => {
                let slot = &mut slots[tensor.slot.0 as usize];
                *slot = (tensor.element.row(width) * u64::from(1 + more(rows))).max(*slot);
            }
            // All slots of tiles are of the size of the largest.
            Memory::Staging if tensor.role != Role::Candidates => {
                let bytes = tensor.element.row(width);
                tile = (bytes * u64::from(rows + more(rows))).max(tile);
            }
            Memory::Staging | Memory::Stream => {}
        }
    }
    let staged = program.slots.iter().filter(|slot| slot.memory == Memory::Staging);
    let staged: u64 = staged.map(|slot| tile.saturating_sub(slot.bytes)).sum();
    // Keys and values of texts that end elsewhere may come in one tile more.
    let staged = staged + if moves(plan) && plan.any_sequence() { tile } else { 0 };
    let embedded = u64::from(more(program.embedded().len()));
    let pixels = spec.patches.map_or(0, |patches| embedded * u64::from(patches.values()) * 8);
    Needs {
        activations: needs.activations + Bytes(slots.iter().sum()),
        staging: needs.staging + Bytes(staged),
        scratch: needs.scratch + Bytes(pixels),
        ..needs
    }
}

/// Results that may come on top of those of [`widest`], of the rows that are a device's own: hidden states of a
/// language model besides logits of other sequences, and class logits, if there are more classes than a row has
/// values.
fn other_results(spec: &ModelSpec, plan: &Plan, rank: Rank) -> Bytes {
    let weight = |device: &DevicePlan| match plan.layout {
        Layout::Replicated => 1,
        _ => u64::from(device.prefill.row_weight),
    };
    let all: u64 = plan.ring.iter().map(weight).sum();
    // Of fewer rows a device may have one more than of all, but no more than its share.
    let rows = u64::from(plan.max_rows) * weight(&plan.ring[rank.index()]);
    let share = rows.div_ceil(all.max(1)).min(u64::from(plan.max_rows)) as u32;
    let more = if moves(plan) && share < plan.max_rows { farthest(share) } else { 0 };
    let (share, more) = (u64::from(share), u64::from(more));
    let hidden = u64::from(spec.hidden);
    let values = match &spec.head {
        HeadSpec::Language { .. } => (share + more) * hidden,
        HeadSpec::Classes(head) => {
            let labels = u64::from(head.labels);
            share * labels.saturating_sub(hidden) + more * labels.max(hidden)
        }
        HeadSpec::None => more * hidden,
    };
    Bytes(4 * values)
}

/// The batches that take the most memory: budgets are the most that any of them needs.
///
/// # Errors
/// When the plan allows too many rows.
pub fn widest(spec: &ModelSpec, plan: &Plan) -> Result<Vec<BatchShape>, LowerError> {
    // The widest program is the one of most rows that all want the widest result.
    let wanted = match spec.head {
        HeadSpec::Language { .. } => Wanted::AllLogits,
        _ => Wanted::Hidden,
    };
    let segment =
        |(slot, rows): (u32, u32)| Segment { slot, context_len: 0, cached: false, rows, wanted };
    let shape = |mut texts: Vec<u32>| {
        texts.retain(|&rows| rows > 0);
        BatchShape::new((0..).zip(texts).map(segment).collect()).map_err(LowerError::from)
    };
    let all = plan.max_rows;
    if !plan.any_sequence() && plan.layout != Layout::Stages {
        let length = spec.position_limit().clamp(1, all);
        let mut texts = vec![length; (all / length) as usize];
        texts.push(all % length);
        return Ok(vec![shape(texts)?]);
    }
    // Where rows are cut, or texts go from stage to stage, it matters where texts end. No batch sees
    // more rows at once than one text of all, be it longer than any may be; and in parts of unlike
    // sizes tensors of one do not fit into slots of another.
    let tiles = Span::<Row>::first(all).cut(u32::from(plan.tiles)).map(|tile| tile.len());
    let two = |first: u32| vec![first, all - first];
    let fifths = (u64::from(all) * 2 / 5) as u32;
    let parts = [vec![all], two(all / 2), two(all / 4), two(all - all / 4), two(fifths)];
    parts.into_iter().chain([two(all - fifths), tiles.collect()]).map(shape).collect()
}

/// Sequences of which one step generates tokens, at most.
pub const SEQUENCES: u32 = 16;

/// How many sequences a step of a plan may generate tokens for: no more than its cache has blocks for.
pub fn sequences(plan: &Plan) -> u32 {
    plan.cache.blocks().min(plan.max_rows).clamp(1, SEQUENCES)
}

/// The decode step that takes the most memory: one of its sequences asks for every candidate, all others for
/// many. No more than one asks for every candidate at a time, since that is of the size of the vocabulary.
fn widest_step(plan: &Plan) -> Result<BatchShape, LowerError> {
    let segment = |slot| {
        let wanted =
            Wanted::Token(if slot == 0 { CandidateCount::All } else { CandidateCount::Many });
        Segment { slot, context_len: 0, cached: true, rows: 1, wanted }
    };
    Ok(BatchShape::new((0..sequences(plan)).map(segment).collect())?)
}

/// Bytes that `device` takes for generation at most: the KV cache of its heads in whole blocks, rotary angles
/// of all positions, and what the sampler works in. None without a cache.
pub fn cache(spec: &ModelSpec, cache: Cache, device: &DevicePlan) -> Bytes {
    if cache.rows == 0 {
        return Bytes(0);
    }
    let heads = |layer| u64::from(kv_span(spec, device.prefill.block(layer).heads).len());
    let head = cache.values.bytes(spec.head_width);
    let row: u64 = (0..spec.layers).map(|layer| 2 * heads(layer) * head).sum();
    let rows = u64::from(cache.blocks() * Cache::BLOCK);
    let positions = match &spec.positions {
        Positions::Rotary { limit, .. } => angle_bytes(spec) * u64::from(cache.rows.min(*limit)),
        Positions::Learned { .. } => 0,
    };
    // A sequence takes a block at least.
    let texts = u64::from(cache.blocks());
    let choosing = texts * (4 * u64::from(device.holds().vocabulary.len()) + SAMPLER_SCRATCH);
    Bytes(rows * row + positions + choosing)
}

/// What `device` needs to hold its shard and run `program`.
pub fn of_program(
    spec: &ModelSpec,
    formats: &Formats,
    device: &DevicePlan,
    program: &Program,
) -> Needs {
    let graph = OperatorGraph::of(spec);
    Needs { weights: weights(&graph, formats, device), ..of_running(spec, device, program) }
}

/// What `device` needs to run `program`, without its shard.
fn of_running(spec: &ModelSpec, device: &DevicePlan, program: &Program) -> Needs {
    let labels = spec.head.labels();
    let results = program.outputs.iter().map(|output| {
        let (rows, width) = output.extent(spec.hidden, labels);
        Bytes(u64::from(rows) * u64::from(width) * 4)
    });
    Needs {
        weights: Bytes(0),
        // Held whole, whatever this program reads.
        stream: device.streaming.as_ref().map_or(Bytes(0), |streaming| streaming.buffer),
        activations: program.slot_bytes(Memory::Device),
        staging: program.slot_bytes(Memory::Staging),
        results: results.sum(),
        scratch: scratch(spec, device, program),
        cache: Bytes(0),
        process: PROCESS,
    }
}

/// Bytes that the kernels work in: packed rows, sums and scores of each thread, and positions.
fn scratch(spec: &ModelSpec, device: &DevicePlan, program: &Program) -> Bytes {
    let rows = program.tensors.iter().map(|tensor| tensor.rows.end()).max().unwrap_or(0);
    let positions = match &spec.positions {
        Positions::Rotary { limit, .. } => angle_bytes(spec) * u64::from(rows.min(*limit)),
        Positions::Learned { .. } => POSITION_ROWS * u64::from(spec.hidden) * 4,
    };
    // The relative position bias of each head, for each distance.
    let distances = spec
        .relative_bias
        .map_or(0, |_| 8 * u64::from(rows.min(spec.position_limit())) * u64::from(spec.heads));
    // A block of values of one head.
    let each = of_thread(spec, u64::from(rows)) + 4 * KEYS_AT_A_TIME * u64::from(spec.head_width);
    // Pixels as they came, and as they are read.
    let embedded = u64::from(program.embedded().len());
    let pixels = spec.patches.map_or(0, |patches| embedded * u64::from(patches.values()) * 8);
    Bytes(u64::from(device.threads) * each + SHARED_SCRATCH + positions + distances + pixels)
}

/// Bytes of the cosines and sines of one position, with those for long sequences and for local layers where the
/// model has others for them.
pub fn angle_bytes(spec: &ModelSpec) -> u64 {
    let of = |positions: &Positions| match positions {
        Positions::Learned { .. } => 0,
        Positions::Rotary { inverse_frequencies, long, .. } => {
            8 * inverse_frequencies.len() as u64 * (1 + u64::from(long.is_some()))
        }
    };
    of(&spec.positions) + spec.local_positions.as_ref().map_or(0, of)
}

/// Bytes that each kernel thread works in for a model, whatever part of it a device holds.
pub fn of_thread(spec: &ModelSpec, rows: u64) -> u64 {
    let pixels = spec.patches.map_or(0, |patches| patches.values());
    let inputs = spec.hidden.max(spec.intermediate).max(spec.heads * spec.head_width).max(pixels);
    let lanes = spec.heads.div_ceil(spec.kv_heads.max(1));
    let attention = attention_scratch(rows, u64::from(lanes), u64::from(spec.head_width));
    (product_scratch(rows, u64::from(inputs)) + attention).min(THREAD_SCRATCH)
}

/// Bytes of the shard that `device` holds in memory.
pub fn weights(graph: &OperatorGraph, formats: &Formats, device: &DevicePlan) -> Bytes {
    let Some(streaming) = &device.streaming else { return all_weights(graph, formats, device) };
    let all = all_weights(graph, &pieces::on_disk(streaming, formats), device);
    let pieces = (0..).zip(pieces::of_device(graph, formats, device));
    let read = pieces.filter(|(number, _)| !streaming.keeps(*number));
    Bytes(all.0.saturating_sub(read.map(|(_, piece)| piece.held()).sum()))
}

/// Bytes of the shard that `device` holds, in memory and on disk.
pub fn all_weights(graph: &OperatorGraph, formats: &Formats, device: &DevicePlan) -> Bytes {
    Bytes(holdings::bytes(graph, formats, &device.holds()))
}
