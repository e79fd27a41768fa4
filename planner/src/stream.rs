//! Plans for memory that does not add up: weights come from disk, on one device or on many (PIPELOAD; Demand
//! Layering).
//!
//! What a device can hold stays, spread evenly over the order of use, so that its disk has something to do all
//! the time; the rest passes through a buffer. How large that is and how many loaders fill it is what is
//! predicted fastest, and of what is as fast the least (Demand Layering, §V-D; Hermes, §IV). How much of the model
//! each device gets follows from what the simulator says of stalls: shares are changed one by one while that
//! helps.

use crate::{
    auto, candidate, predict, reasons,
    request::{Allowed, Offer, Planned, PlanningError, Prediction, Request, Search},
};
use galaxy_common::{
    Assignment, BlockAssignment, Bytes, DeviceName, DevicePlan, Exchange, MAX_LOADERS,
    PIECE_ALIGNMENT, Piece, Plan, Reading, Room, Span, Strategy, Streaming,
};
use galaxy_graph::{
    budget::Needs,
    operators::OperatorGraph,
    pieces,
    share::{self, Member, PlanOptions},
};
use galaxy_model::{Formats, ModelSpec};

/// Buffers that are tried: room for so many of the largest pieces.
const BUFFERS: [u64; 4] = [2, 1, 4, 8];
/// Loaders that are tried where the disk gives several more than one.
const LOADERS: [u16; 3] = [1, 2, 4];
/// Latencies within this factor of each other count as equal.
const AS_FAST: f64 = 1.002;
/// The factors by which shares are changed, one after the other.
const STEPS: [f64; 3] = [1.5, 1.2, 1.08];
/// Plans by shares that are simulated at most, of each strategy; of more devices than [`FEW`] none.
const SIMULATED: u64 = 80;
/// The most devices whose programs are few, and simulated fast.
const FEW: usize = 8;

/// How weights come from disk on devices that cannot hold all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamingChoice {
    /// What a device's buffer has room for, if memory allows: so many of its largest pieces, or of its
    /// layers.
    pub buffer: u64,
    /// Whether `buffer` counts layers, and not pieces.
    pub layers: bool,
    /// How pieces share the buffer.
    pub room: Room,
    /// How many loaders read at the same time.
    pub loaders: u16,
}

impl StreamingChoice {
    /// The way where nothing is predicted: two pieces, one loader.
    pub const PLAIN: Self = Self { buffer: 2, layers: false, room: Room::Ring, loaders: 1 };

    /// The way that a cluster file names; for `auto` the plain one.
    pub const fn named(reading: Reading) -> Self {
        match reading {
            Reading::Auto | Reading::Preload | Reading::Async => Self::PLAIN,
            Reading::Sequential => Self { buffer: 1, room: Room::Parts(1), ..Self::PLAIN },
            Reading::Sync => Self { room: Room::Parts(2), ..Self::PLAIN },
            Reading::PipeLoad(loaders) => {
                Self { buffer: loaders as u64 + 1, layers: true, loaders, ..Self::PLAIN }
            }
        }
    }
}

/// The plan with weights from disk on every device that grants less than `needs` says it takes without.
///
/// # Errors
/// When a device has no room for a single piece.
pub fn fitted(
    spec: &ModelSpec,
    formats: &Formats,
    plan: &Plan,
    needs: &[Needs],
    way: StreamingChoice,
) -> Result<Plan, PlanningError> {
    let (mut plan, graph) = (plan.clone(), OperatorGraph::of(spec));
    for (device, needs) in plan.ring.iter_mut().zip(needs) {
        if needs.total() <= device.budget {
            continue;
        }
        let streaming = streaming(&graph, formats, device, needs, way);
        device.streaming = Some(streaming.map_err(|missing| PlanningError::Memory {
            strategy: plan.strategy,
            device: Some(device.name.clone()),
            missing: Bytes(missing),
            what: format!(
                "even with its weights on disk it needs {} and grants {}: raise its memory, add devices, or lower max_rows or kv_cache_tokens",
                Bytes(device.budget.0 + missing),
                device.budget
            ),
        })?);
    }
    Ok(plan)
}

/// How a device reads what it cannot hold; else how many bytes are missing even for that.
fn streaming(
    graph: &OperatorGraph,
    formats: &Formats,
    device: &DevicePlan,
    needs: &Needs,
    way: StreamingChoice,
) -> Result<Streaming, u64> {
    let all = pieces::pieces(graph, &device.holds(), formats, Streaming::PIECE);
    let bytes: u64 = all.iter().map(pieces::Piece::held).sum();
    let largest = all.iter().map(|piece| piece.stored()).max().unwrap_or(PIECE_ALIGNMENT);
    let rest = needs.total().0.saturating_sub(bytes);
    let room = device.budget.0.saturating_sub(rest);
    if room < largest {
        return Err(rest + largest - device.budget.0);
    }
    let language = |piece: &&pieces::Piece| Some(piece.operator) == graph.language;
    let head: u64 = all.iter().filter(language).map(pieces::Piece::stored).sum();
    let stored: u64 = all.iter().map(pieces::Piece::stored).sum();
    let layer = (stored - head).div_ceil((graph.layers.len() as u64).max(1)).max(largest);
    let unit = if way.layers { layer } else { largest };
    // Parts are of the largest piece each: as many as there is room for.
    let parts = if let Room::Parts(parts) = way.room { u64::from(parts) } else { 1 };
    let (room_for, way) = match room / largest >= parts {
        true => (way.buffer.saturating_mul(unit), way),
        false => (largest, StreamingChoice { room: Room::Parts(1), ..way }),
    };
    let buffer = room_for.min(room) / PIECE_ALIGNMENT * PIECE_ALIGNMENT;
    let mut left = (room - buffer).min(bytes);
    // The first piece first: it is needed at once.
    let share = left as f64 / bytes.max(1) as f64;
    let mut due = all.first().map_or(0.0, |first| first.bytes as f64);
    let mut resident: Vec<Span<Piece>> = Vec::new();
    for (at, piece) in (0..).zip(&all) {
        due += share * piece.bytes as f64;
        if due < piece.bytes as f64 || left < piece.bytes {
            continue;
        }
        due -= piece.bytes as f64;
        left -= piece.bytes;
        match resident.last_mut() {
            Some(last) if last.end() == at => *last = Span::new(last.start(), at + 1),
            _ => resident.push(Span::new(at, at + 1)),
        }
    }
    let streaming = Streaming {
        format: formats.most(),
        piece: Streaming::PIECE,
        buffer: Bytes(buffer),
        room: way.room,
        loaders: way.loaders.clamp(1, MAX_LOADERS),
        resident,
    };
    Ok(without_end(&all, streaming))
}

/// The same streaming, without the end of the ring that no piece reaches: each goes behind the one before, or to
/// the beginning where it would not fit.
pub fn without_end(pieces: &[pieces::Piece], mut streaming: Streaming) -> Streaming {
    if streaming.room != Room::Ring {
        return streaming;
    }
    let (mut at, mut furthest) = (0, 0);
    for (_, piece) in (0..).zip(pieces).filter(|(number, _)| !streaming.keeps(*number)) {
        let size = piece.stored();
        at = if at + size > streaming.buffer.0 { size } else { at + size };
        furthest = at.max(furthest);
    }
    streaming.buffer = Bytes(furthest.min(streaming.buffer.0));
    streaming
}

/// A plan that fits, with its prediction.
struct StreamingPlan {
    plan: Plan,
    needs: Vec<Needs>,
    prediction: Prediction,
    choice: StreamingChoice,
}

/// The fastest plan that reads weights from disk where memory does not add up.
///
/// # Errors
/// When devices have no room even so: the one that lacks least.
pub(crate) fn plan(request: &Request<'_>) -> Result<Planned, PlanningError> {
    let mut looking = Looking { request, simulated: 0, refused: None, best: None };
    // As if memory were no question: what compute and links would have.
    let offers = without_limit(request);
    let strategies = match request.allowed.strategy {
        Strategy::Auto => Strategy::ALL.to_vec(),
        given => vec![given],
    };
    for strategy in strategies {
        let allowed = Allowed { strategy, ..request.allowed.clone() };
        let relaxed = Request { offers: &offers, allowed: &allowed, ..*request };
        if let Ok(relaxed) = auto::plan(&relaxed) {
            looking.look_all_ways(relaxed.plan);
        }
        if strategy != Strategy::Auto {
            looking.climb(strategy);
        }
    }
    let Looking { simulated, refused, best, .. } = looking;
    let nothing = || PlanningError::Nothing { why: "there is no device to plan for".into() };
    let StreamingPlan { plan, needs, prediction, .. } =
        best.ok_or_else(|| refused.unwrap_or_else(nothing))?;
    let idle = request.offers.iter().filter(|o| plan.ring.iter().all(|d| d.name != o.name));
    let why = "with weights from disk it is predicted slower with this device".to_owned();
    let left_out: Vec<(DeviceName, String)> =
        idle.map(|offer| (offer.name.clone(), why.clone())).collect();
    Ok(Planned {
        what: reasons::what(&plan),
        plan,
        prediction,
        needs,
        left_out,
        runner_up: None,
        advice: Vec::new(),
        search: Search { simulated, ..Search::default() },
    })
}

/// The plan that was found, or one that reads weights from disk if that is faster: where memory forces a split far
/// from the fastest one, a disk may do so less.
pub(crate) fn or_faster(request: &Request<'_>, found: Planned) -> Planned {
    let whole = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(request.spec.layers),
            heads: Span::first(request.spec.heads),
            columns: Span::first(request.spec.intermediate),
        }],
        row_weight: 1,
        vocabulary: Span::first(request.spec.extent().vocabulary),
    };
    let all =
        pieces::pieces(&OperatorGraph::of(request.spec), &whole, request.formats, Streaming::PIECE);
    let all: u64 = all.iter().map(|piece| piece.bytes).sum();
    // Memory forces nothing on a device that could hold everything, with what it works in besides.
    let besides = found.needs.iter().map(|n| n.total().0 - n.weights.0).max().unwrap_or(0);
    let roomy = |offer: &Offer| offer.budget.0 > 2 * (all + besides);
    if request.offers.len() > FEW || request.offers.iter().all(roomy) {
        return found;
    }
    let offers = without_limit(request);
    let latency = |planned: &Planned| planned.prediction.latency;
    match auto::plan(&Request { offers: &offers, ..*request }) {
        Ok(relaxed) if latency(&relaxed) < latency(&found) => match plan(request) {
            Ok(streamed) if latency(&streamed) < latency(&found) => streamed,
            _ => found,
        },
        _ => found,
    }
}

/// The devices as if memory were no question.
fn without_limit(request: &Request<'_>) -> Vec<Offer> {
    let without = |offer: &Offer| Offer { budget: Bytes(u64::MAX >> 8), ..offer.clone() };
    request.offers.iter().map(without).collect()
}

struct Looking<'a> {
    request: &'a Request<'a>,
    simulated: u64,
    /// Why the plan that came nearest has no room.
    refused: Option<PlanningError>,
    best: Option<StreamingPlan>,
}

impl Looking<'_> {
    /// Changes shares, from those of memory on, as long as that makes the plan faster.
    fn climb(&mut self, strategy: Strategy) {
        let offers = self.request.offers;
        let way = StreamingChoice::named(self.request.allowed.reading);
        let mut shares: Vec<f64> = offers.iter().map(|o| o.budget.0.max(1) as f64).collect();
        let Some(mut least) = self.share(strategy, &shares, way) else { return };
        let most = self.simulated + if offers.len() > FEW { 0 } else { SIMULATED };
        if offers.len() > 1 && strategy != Strategy::Sequence {
            for step in STEPS {
                let mut better = true;
                while better && self.simulated < most {
                    better = false;
                    for at in 0..shares.len() {
                        for factor in [step, 1.0 / step] {
                            let mut changed = shares.clone();
                            changed[at] *= factor;
                            let found = self.share(strategy, &changed, way);
                            if let Some(latency) = found.filter(|l| *l < least / AS_FAST) {
                                (shares, least, better) = (changed, latency, true);
                            }
                        }
                    }
                }
            }
        }
        if let Ok(plan) = self.shared(strategy, &shares) {
            self.look_all_ways(plan);
        }
    }

    fn shared(&self, strategy: Strategy, shares: &[f64]) -> Result<Plan, PlanningError> {
        let Request { allowed, spec, model, fingerprint, formats, .. } = *self.request;
        let member = |(offer, share): (&Offer, &f64)| Member {
            name: offer.name.clone(),
            budget: offer.budget,
            threads: offer.threads,
            share: *share,
        };
        let members: Vec<Member> = self.request.offers.iter().zip(shares).map(member).collect();
        let terms = PlanOptions {
            model,
            fingerprint,
            formats,
            strategy,
            wire: allowed.wires[0],
            // What is loaded is used for all rows at once, or would be loaded again.
            tiles: 1,
            max_rows: allowed.max_rows,
            cache: allowed.cache,
        };
        let none = |why: share::ShareError| PlanningError::Nothing { why: why.to_string() };
        let mut plan = share::plan(spec, &terms, &members).map_err(none)?;
        plan.link = allowed.links[0];
        plan.exchange = allowed.exchange.unwrap_or(Exchange::Ring);
        Ok(plan)
    }

    /// The predicted latency of a plan by shares.
    fn share(&mut self, strategy: Strategy, shares: &[f64], way: StreamingChoice) -> Option<f64> {
        let plan = self.shared(strategy, shares).ok()?;
        let needs = candidate::needs(self.request, &plan).ok()?;
        self.look(&plan, &needs, way)
    }

    /// Looks at a plan with every buffer and number of loaders that may help.
    fn look_all_ways(&mut self, mut plan: Plan) {
        for device in &mut plan.ring {
            let offer = self.request.offers.iter().find(|offer| offer.name == device.name);
            device.budget = offer.map_or(device.budget, |offer| offer.budget);
        }
        let Ok(needs) = candidate::needs(self.request, &plan) else { return };
        if self.request.allowed.reading != Reading::Auto {
            self.look(&plan, &needs, StreamingChoice::named(self.request.allowed.reading));
            return;
        }
        let several = plan.ring.iter().any(|device| {
            let profile = self.request.profile.device(&device.name);
            profile.is_ok_and(|profile| profile.disk_shared > 1.1 * profile.disk)
        });
        let most = if several { LOADERS.len() } else { 1 };
        let few = plan.ring.len() <= FEW;
        for agents in &LOADERS[..if few { most } else { 1 }] {
            for &buffer in &BUFFERS[..if few { BUFFERS.len() } else { 1 }] {
                self.look(
                    &plan,
                    &needs,
                    StreamingChoice { buffer, loaders: *agents, ..StreamingChoice::PLAIN },
                );
            }
        }
    }

    /// The predicted latency of a plan, with weights from disk where that is needed. It is kept, if it is the
    /// best.
    fn look(&mut self, plan: &Plan, needs: &[Needs], way: StreamingChoice) -> Option<f64> {
        let request = self.request;
        let fitting = || -> Result<StreamingPlan, PlanningError> {
            let plan = fitted(request.spec, request.formats, plan, needs, way)?;
            let needs = candidate::needs(request, &plan)?;
            if !candidate::above(&plan, &needs).is_empty() {
                return Err(candidate::too_large(plan.strategy, &plan, &needs));
            }
            let prediction = predict::predict(request, &plan)?;
            Ok(StreamingPlan { plan, needs, prediction, choice: way })
        };
        self.simulated += 1;
        match fitting() {
            Ok(found) => {
                let latency = found.prediction.latency;
                let better = self.best.as_ref().is_none_or(|best| {
                    let smaller = (found.choice.loaders, found.choice.buffer)
                        < (best.choice.loaders, best.choice.buffer);
                    let known = best.prediction.latency;
                    latency * AS_FAST < known || latency < known * AS_FAST && smaller
                });
                if better {
                    self.best = Some(found);
                }
                Some(latency)
            }
            Err(why) => {
                self.refused = crate::policies::nearer(self.refused.take(), why);
                None
            }
        }
    }
}

/// Bytes that a device reads from disk for each program, and those of its matrices that stay.
pub fn read_and_kept(spec: &ModelSpec, formats: &Formats, device: &DevicePlan) -> (Bytes, Bytes) {
    let Some(streaming) = &device.streaming else { return (Bytes(0), Bytes(0)) };
    let (mut read, mut kept) = (0, 0);
    let pieces = pieces::of_device(&OperatorGraph::of(spec), formats, device);
    for (at, piece) in (0..).zip(pieces) {
        match streaming.keeps(at) {
            true => kept += piece.bytes,
            false => read += piece.stored(),
        }
    }
    (Bytes(read), Bytes(kept))
}
