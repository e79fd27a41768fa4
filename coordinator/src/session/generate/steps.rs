//! Where the sequences of all requests meet: each says what it waits for, and whoever has the turn runs the next
//! step of all of them.

use crate::{
    admission::Turn,
    client_memory::Who,
    error::{self, RequestError},
    fleet::{CachedSequence, FleetStatus, Readiness, Run, Task},
    kv_blocks::{Allocation, KvBlocks, Prefix},
    scheduler::{Limits, Scheduler, SequenceStep, Step, Waiting},
    session::{Session, stepped::Stepped},
};
use galaxy_common::{
    BatchShape, Burst, Cache, CandidateCount, Epoch, Segment, Sequence, TokenGoal, Wanted,
    plan::Phase,
};
use galaxy_engine::{generate::TokenEvent, pace::Ran};
use galaxy_graph::budget;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

/// The sequences of all requests that generate tokens.
pub(in crate::session) struct Steps {
    state: Mutex<State>,
    /// How many sequences have had a step, and have not said yet whether they wait for another.
    between: watch::Sender<usize>,
    /// Changes whenever there may be something new to run.
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    scheduler: Scheduler,
    /// The waiting sequences, in the order in which they came to wait.
    waiting: Vec<QueuedSequence>,
    /// The number of the sequence that came last, by which the oldest is known.
    ages: u64,
    numbers: u64,
    blocks: KvBlocks,
    /// How many waiting sequences had no room at the last look.
    starving: usize,
    /// Counts since the beginning; those that can be seen in the state are filled in when somebody asks.
    counts: Sequences,
}

/// Counts of the sequences that generate tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sequences {
    /// How many sequences wait for a step.
    pub waiting: usize,
    /// How many sequences are in the step that runs.
    pub running: usize,
    /// The most sequences that were in one step since the beginning.
    pub most: usize,
    /// How many sequences were evicted for an older one since the beginning.
    pub evicted: u64,
    /// How many sequences began with rows of the prefix cache since the beginning.
    pub prefixes: u64,
    /// How many rows of the prefix cache sequences began with since the beginning.
    pub prefix_rows: u64,
    /// How many blocks the KV cache has.
    pub blocks: u32,
    /// How many blocks of the KV cache no running sequence has.
    pub free: u32,
    /// How many tokens were generated since the beginning.
    pub tokens: u64,
    /// How many rows were drafted since the beginning.
    pub drafted: u64,
    /// How many drafted rows were accepted since the beginning.
    pub accepted: u64,
}

struct QueuedSequence {
    number: u64,
    client: Who,
    request: StepRequest,
    since: Instant,
    answer: oneshot::Sender<Answered>,
}

/// What a sequence waits for.
pub(super) struct StepRequest {
    /// Its number by the order in which sequences came: the oldest has the least.
    pub(super) age: u64,
    /// Its priority among the sequences of its client: lower numbers come first.
    pub(super) priority: i32,
    /// The sequence with all its tokens so far.
    pub(super) sequence: Arc<Sequence>,
    /// The epoch in which its rows are cached, and how many are; none where none are.
    pub(super) cached: Option<(Epoch, u32)>,
    /// How many tokens it may still get.
    pub(super) left: u32,
    pub(super) candidates: CandidateCount,
    /// The tokens that end it.
    pub(super) ends: Arc<[u32]>,
    /// Whether it is to run without others.
    pub(super) alone: bool,
    /// Whether its rows are the same whatever comes behind them, so that others may begin with them.
    pub(super) reusable: bool,
    /// Receives its tokens as they are generated.
    pub(super) token_events: mpsc::UnboundedSender<TokenEvent>,
}

/// The answer to a step request.
pub(super) struct Answered {
    pub(super) came: StepOutcome,
    /// Until this is dropped the next step waits for the sequence.
    pub(super) between: RejoinGuard,
}

pub(super) enum StepOutcome {
    /// A step of the sequence, and how many sequences were in it.
    Step(Result<Stepped, RequestError>, usize),
    /// The sequence was evicted: all its rows are to be run again.
    Evicted,
}

/// A sequence that has had a step and may wait for another.
pub(super) struct RejoinGuard(Arc<Steps>);

impl Drop for RejoinGuard {
    fn drop(&mut self) {
        self.0.between.send_modify(|between| *between -= 1);
    }
}

/// A sequence that waits; it leaves when this is dropped.
pub(super) struct WaitingSequence {
    steps: Arc<Steps>,
    number: u64,
    pub(super) answer: oneshot::Receiver<Answered>,
}

impl WaitingSequence {
    /// Whether the sequence still waits, and no step runs with it.
    pub(super) fn waits(&self) -> bool {
        self.steps.lock().waiting.iter().any(|entry| entry.number == self.number)
    }

    /// Takes the sequence out, unless a step runs with it already. Says whether it is out.
    pub(super) fn leave(&self) -> bool {
        let mut state = self.steps.lock();
        let before = state.waiting.len();
        state.waiting.retain(|entry| entry.number != self.number);
        state.waiting.len() < before
    }
}

impl Drop for WaitingSequence {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What is to run next, and for whom.
struct Next {
    phase: Phase,
    epoch: Epoch,
    taken: Taken,
    between: Vec<RejoinGuard>,
    task: Option<Task>,
}

/// A sequence that takes part in a step.
struct ScheduledSequence {
    part: SequenceStep,
    entry: QueuedSequence,
    /// How many of its rows are cached, its own or those that it begins with.
    context_len: u32,
    /// Its blocks of the KV cache; none where devices know of all of them already.
    table: Option<Arc<[u32]>>,
}

impl ScheduledSequence {
    /// Whether its row is that of the token that was sampled last.
    fn decodes(&self) -> bool {
        let StepRequest { sequence, cached, .. } = &self.entry.request;
        cached.is_some() && sequence.tokens.len() as u32 == self.context_len + 1
    }
}

/// Sequences that were taken out of those that wait.
#[derive(Default)]
struct Taken {
    /// The sequences that are evicted.
    evicted: Vec<QueuedSequence>,
    /// The sequences that take part in the step.
    scheduled: Vec<ScheduledSequence>,
    /// Slots that devices have to forget before the step.
    before: Vec<u32>,
    /// Slots that devices have to forget after the step.
    after: Vec<u32>,
}

impl Steps {
    pub(in crate::session) fn new() -> Arc<Self> {
        let (state, between, changed) =
            (Mutex::default(), watch::Sender::new(0), watch::Sender::new(0));
        Arc::new(Self { state, between, changed })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) {
        self.changed.send_modify(|changed| *changed += 1);
    }

    /// Changes whenever there may be something new to run.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The number of a sequence that comes, by which the oldest is known.
    pub(super) fn arrive(&self) -> u64 {
        let mut state = self.lock();
        state.ages += 1;
        state.ages
    }

    /// Ends a sequence. Its rows stay cached until their blocks are needed, so that another may begin with them. Gives
    /// an epoch, and the slots that devices have to forget in it.
    pub(super) fn depart(
        &self,
        client: &Who,
        sequence: &Sequence,
        reusable: Option<(Epoch, u32)>,
    ) -> (Epoch, Vec<u32>) {
        let mut state = self.lock();
        let (slot, epoch) = (sequence.slot, state.blocks.epoch());
        let forgotten = match reusable.filter(|(of, _)| *of == epoch) {
            Some((_, rows)) => {
                let tokens = sequence.tokens[..rows as usize].to_vec();
                state.blocks.end(slot, client.clone(), tokens)
            }
            None if state.blocks.release(slot) => vec![slot],
            None => Vec::new(),
        };
        drop(state);
        self.change();
        (epoch, forgotten)
    }

    /// Whether some sequences wait for blocks that others have.
    pub(super) fn starving(&self) -> bool {
        self.lock().starving > 0
    }

    /// Whether `rows` rows have room in blocks that no running sequence has.
    pub(super) fn has_room(&self, rows: usize) -> bool {
        rows <= (self.lock().blocks.free() * Cache::BLOCK) as usize
    }

    /// Makes the next step wait for a sequence.
    pub(super) fn between(self: &Arc<Self>) -> RejoinGuard {
        self.between.send_modify(|between| *between += 1);
        RejoinGuard(self.clone())
    }

    /// Counts of the sequences, as they are now.
    pub(in crate::session) fn sequences(&self) -> Sequences {
        let state = self.lock();
        Sequences {
            waiting: state.waiting.len(),
            blocks: state.blocks.all(),
            free: state.blocks.free(),
            ..state.counts
        }
    }

    /// Has a sequence wait for a step.
    pub(super) fn wait(self: &Arc<Self>, client: &Who, request: StepRequest) -> WaitingSequence {
        let (sender, answer) = oneshot::channel();
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        let (client, since) = (client.clone(), Instant::now());
        state.waiting.push(QueuedSequence { number, client, request, since, answer: sender });
        drop(state);
        self.change();
        WaitingSequence { steps: self.clone(), number, answer }
    }

    /// Takes what is to run next out of the waiting sequences. None where nothing can run.
    fn next(
        self: &Arc<Self>,
        status: &FleetStatus,
        ready: Option<Epoch>,
        drafts: bool,
    ) -> Option<Next> {
        let mut state = self.lock();
        let kept = state.waiting.iter().filter_map(|entry| entry.request.cached);
        let epoch = ready.or(kept.map(|(epoch, _)| epoch).max()).unwrap_or_default();
        let (cache, sequences, mixes) = match status.plan.as_deref() {
            Some(plan) => (plan.cache, budget::sequences(plan), plan.computes_alike()),
            None => (status.cache, 1, false),
        };
        state.blocks.enter(epoch, cache);
        for (entry, error) in state.refused(ready.is_some()) {
            let answered =
                Answered { came: StepOutcome::Step(Err(error), 1), between: self.between() };
            drop(entry.answer.send(answered));
        }
        let prefixes: Vec<Option<Prefix>> =
            state.waiting.iter().map(|entry| prefix_of(&state.blocks, entry)).collect();
        let (rows, free) = (status.max_rows, state.blocks.free());
        let limits = Limits { rows, sequences, free, drafts, mixes };
        let (step, starving) = {
            let waiting = state.seen(&prefixes);
            let step = state.scheduler.next(&waiting, limits);
            let runs = |at| step.iter().flat_map(|step| &step.parts).any(|part| part.index == at);
            let starves = |(at, of): &(usize, &Waiting<&Who>)| {
                !runs(*at)
                    && (of.context_len + of.rows).div_ceil(Cache::BLOCK) > of.blocks + limits.free
            };
            let starving = waiting.iter().enumerate().filter(starves).count();
            (step, starving)
        };
        state.starving = starving;
        let Step { evicted, parts, phase, steps, row_cost } = step?;
        let mut taken = state.taken(evicted, parts, &prefixes);
        if taken.scheduled.is_empty() && taken.evicted.is_empty() {
            // Trying again at once would come to the same.
            tracing::warn!("no sequence of the next step has room in the KV cache: all wait");
            return None;
        }
        // Steps whose sequences need as many candidates are the same programs, whichever need them.
        taken.scheduled.sort_by_key(|ScheduledSequence { part, entry, .. }| {
            (std::cmp::Reverse(entry.request.candidates), part.count.is_none())
        });
        let between = taken.scheduled.iter().map(|_| self.between()).collect();
        let task = task(&taken.scheduled, (phase, steps, row_cost), epoch);
        Some(Next { phase, epoch, taken, between, task })
    }

    /// Notes what a step took, and that devices know of the blocks of its sequences.
    fn ran(&self, phase: Phase, chosen: &[ScheduledSequence], run: &Run) {
        let mut state = self.lock();
        let decoding = chosen.iter().filter(|chosen| chosen.decodes()).count() as u32;
        let ran = match phase {
            Phase::Decode => {
                let (drafted, right) = run.decoded.beyond();
                state.counts.drafted += u64::from(drafted);
                state.counts.accepted += u64::from(right);
                Ran { rows: run.decoded.rows, steps: run.decoded.steps, decoding }
            }
            Phase::Prefill => {
                let rows = chosen.iter().map(|chosen| chosen.part.rows).sum();
                Ran { rows, steps: 1, decoding }
            }
        };
        state.scheduler.ran(phase, ran, run.took);
        state.counts.tokens += u64::from(run.decoded.tokens());
        chosen
            .iter()
            .for_each(|chosen| state.blocks.note_announced(chosen.entry.request.sequence.slot));
    }
}

impl State {
    /// Takes out the sequences that cannot go on as they are, and says why: their cached rows are gone, or, where the
    /// plan is known, its KV cache is too small for them.
    fn refused(&mut self, planned: bool) -> Vec<(QueuedSequence, RequestError)> {
        let (epoch, rows) = (self.blocks.epoch(), self.blocks.all() * Cache::BLOCK);
        let why = |QueuedSequence { request, .. }: &QueuedSequence| match request.cached {
            Some((of, _)) if of != epoch => Some(RequestError::CacheLost { epoch: of }),
            _ if planned && request.sequence.tokens.len() > rows as usize => {
                let (what, tokens) = ("the sequence".to_owned(), request.sequence.tokens.len());
                let limited_by = error::KV_CACHE_TOKENS;
                Some(RequestError::TooLong { what, tokens, limit: rows, limited_by })
            }
            _ => None,
        };
        let refused = |entry: QueuedSequence| why(&entry).map(|error| (entry, error));
        self.waiting.extract_if(.., |entry| why(entry).is_some()).filter_map(refused).collect()
    }

    /// The waiting sequences, as the scheduler sees them.
    fn seen(&self, prefixes: &[Option<Prefix>]) -> Vec<Waiting<&Who>> {
        let (all, now) = (self.waiting.iter().zip(prefixes), Instant::now());
        all.map(|(QueuedSequence { client, request, since, .. }, prefix)| {
            let there = prefix.map_or(0, |prefix| prefix.rows);
            let context_len = request.cached.map_or(there, |(_, rows)| rows);
            let rows = request.sequence.tokens.len() as u32 - context_len;
            let begins = request.cached.is_none();
            let blocks = if begins { 0 } else { self.blocks.held(request.sequence.slot) };
            let StepRequest { age, priority, left, alone, .. } = *request;
            let waited = now.saturating_duration_since(*since);
            Waiting {
                client,
                priority,
                waited,
                age,
                context_len,
                rows,
                left,
                blocks,
                begins,
                alone,
            }
        })
        .collect()
    }

    /// Takes the sequences of a step out of those that wait, by their index, and gives them their blocks. A sequence
    /// whose blocks are not to be had after all waits on.
    fn taken(
        &mut self,
        evicted: Vec<usize>,
        parts: Vec<SequenceStep>,
        prefixes: &[Option<Prefix>],
    ) -> Taken {
        let mut all: Vec<_> = std::mem::take(&mut self.waiting).into_iter().map(Some).collect();
        let evicted = evicted.into_iter().filter_map(|index| all[index].take()).collect();
        let mut taken = Taken { evicted, ..Taken::default() };
        for entry in &taken.evicted {
            self.blocks.release(entry.request.sequence.slot);
            taken.before.push(entry.request.sequence.slot);
        }
        let sources = parts.iter().filter_map(|part| prefixes[part.index]);
        let sources: Vec<u32> = sources.map(|prefix| prefix.of).collect();
        for (at, part) in parts.into_iter().enumerate() {
            // The first gets its room even if others lose the rows with which they would begin.
            let needed = if at == 0 { &[] } else { &sources[..] };
            let Some(entry) = all[part.index].take() else { continue };
            let (slot, prefix) = (entry.request.sequence.slot, prefixes[part.index]);
            if entry.request.cached.is_none() {
                self.blocks.release(slot);
            }
            // Another may have taken over the rows with which it would begin.
            let there = prefix.is_none() || prefix_of(&self.blocks, &entry) == prefix;
            let rows = part.blocks * Cache::BLOCK;
            let got = there.then(|| self.blocks.allocate(slot, prefix, rows, needed)).flatten();
            let Some(Allocation { table, before, after }) = got else {
                all[part.index] = Some(entry);
                continue;
            };
            taken.before.extend(before);
            taken.after.extend(after);
            let there = prefix.map_or(0, |prefix| prefix.rows);
            self.counts.prefixes += u64::from(prefix.is_some());
            self.counts.prefix_rows += u64::from(there);
            let context_len = entry.request.cached.map_or(there, |(_, rows)| rows);
            taken.scheduled.push(ScheduledSequence { part, entry, context_len, table });
        }
        self.waiting = all.into_iter().flatten().collect();
        self.counts.running = taken.scheduled.len();
        self.counts.most = self.counts.most.max(taken.scheduled.len());
        self.counts.evicted += taken.evicted.len() as u64;
        taken
    }
}

/// The cached rows with which a sequence begins, and which are not run again.
fn prefix_of(
    blocks: &KvBlocks,
    QueuedSequence { client, request, .. }: &QueuedSequence,
) -> Option<Prefix> {
    let begins = request.cached.is_none() && request.reusable;
    begins.then(|| blocks.prefix(client, &request.sequence.tokens)).flatten()
}

/// The program of a step in an epoch; none for no sequences.
fn task(
    chosen: &[ScheduledSequence],
    (phase, steps, row_cost): (Phase, u32, Option<f32>),
    epoch: Epoch,
) -> Option<Task> {
    let (mut segments, mut rows) = (Vec::new(), Vec::new());
    let (mut cached, mut goals) = (Vec::new(), Vec::new());
    let mut all = false;
    for ScheduledSequence { part, entry: QueuedSequence { request, .. }, context_len, table } in
        chosen
    {
        // Only one at a time is asked for all candidates.
        let candidates = match request.candidates {
            CandidateCount::All if all => CandidateCount::Many,
            candidates => candidates,
        };
        let wanted = match part.count {
            None => Wanted::Nothing,
            Some(count) => {
                all |= candidates == CandidateCount::All;
                goals.push(TokenGoal { count, stop: request.ends.clone() });
                Wanted::Token(candidates)
            }
        };
        let slot = request.sequence.slot;
        segments.push(Segment {
            slot,
            context_len: *context_len,
            cached: true,
            rows: part.rows,
            wanted,
        });
        rows.extend_from_slice(
            &request.sequence.tokens[*context_len as usize..(*context_len + part.rows) as usize],
        );
        let room = |table: Arc<[u32]>| {
            let rows = table.len() as u32 * Cache::BLOCK;
            (Arc::new(Sequence { rows, ..Sequence::clone(&request.sequence) }), table)
        };
        cached.push(CachedSequence {
            room: table.clone().map(room),
            epoch,
            token_events: request.token_events.clone(),
        });
    }
    let shape = BatchShape::new(segments).ok()?;
    let burst = (!goals.is_empty()).then_some(Burst { phase, goals, steps, row_cost });
    Some(Task { cached, burst, ..Task::new(shape, rows.as_slice()) })
}

impl Session {
    /// Runs the next step of all waiting sequences. False where there is nothing to run.
    pub(super) async fn lead(&self, turn: Turn) -> bool {
        let steps = &self.inner.steps;
        // Sequences that had the last step join in.
        drop(steps.between.subscribe().wait_for(|between| *between == 0).await);
        let ready = match self.readiness() {
            Readiness::Ready(epoch) => Some(epoch),
            _ => None,
        };
        let Some(next) = steps.next(&self.fleet_status(), ready, self.inner.limits.drafts) else {
            return false;
        };
        // A task of its own: the program runs to its end, whoever still waits for it.
        tokio::spawn(self.clone().run_step(turn, next));
        true
    }

    async fn run_step(self, turn: Turn, next: Next) {
        let Next { phase, epoch, taken, between, task } = next;
        let Taken { evicted, scheduled: chosen, before, after } = taken;
        let steps = &self.inner.steps;
        for slot in before {
            self.inner.fleet.forget(epoch, slot).await;
        }
        for QueuedSequence { answer, .. } in evicted {
            let answered = Answered { came: StepOutcome::Evicted, between: steps.between() };
            drop(answer.send(answered));
        }
        let Some(task) = task else { return steps.change() };
        let (shape, begun) = (task.shape.clone(), Instant::now());
        let result = self.inner.fleet.execute(task, self.inner.limits.timeout).await;
        let result = result.map(Arc::new);
        if let Ok(run) = &result {
            self.inner.counts.programs.fetch_add(1, Ordering::Relaxed);
            steps.ran(phase, &chosen, run);
        }
        for slot in after {
            self.inner.fleet.forget(epoch, slot).await;
        }
        steps.lock().counts.running = 0;
        drop(turn);
        let together = chosen.len();
        let mut candidate_counts =
            result.iter().flat_map(|run| run.decoded.candidate_counts.clone());
        for (ScheduledSequence { part, entry, context_len, .. }, between) in
            chosen.into_iter().zip(between)
        {
            let candidates = part.count.and_then(|_| candidate_counts.next());
            let stepped = |run: &Arc<Run>| Stepped {
                run: run.clone(),
                phase,
                shape: run.decoded.last.as_ref().unwrap_or(&shape).clone(),
                context_len,
                rows: part.rows,
                candidates,
                queued: begun.saturating_duration_since(entry.since),
            };
            let came =
                StepOutcome::Step(result.as_ref().map(stepped).map_err(Clone::clone), together);
            drop(entry.answer.send(Answered { came, between }));
        }
        steps.change();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{super::sequence::SequenceState, *};
    use galaxy_common::{Bytes, CacheType, DeviceName, Plan, Sampling, Strategy, WireType};
    use galaxy_graph::share::{self, Member, PlanOptions};
    use galaxy_model::ModelDir;
    use proptest::prelude::*;
    use std::path::Path;

    fn plan(blocks: u32) -> Plan {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/llama");
        let model = ModelDir::open(&path).unwrap();
        let terms = PlanOptions {
            model: model.name(),
            fingerprint: model.fingerprint(),
            formats: model.formats(),
            strategy: Strategy::Local,
            wire: WireType::F32,
            tiles: 1,
            max_rows: 100,
            cache: Cache { rows: blocks * Cache::BLOCK, values: CacheType::F32 },
        };
        let (name, budget) = (DeviceName::new("d").unwrap(), Bytes(1 << 30));
        let member = Member { name, budget, threads: 1, share: 1.0 };
        share::plan(model.spec(), &terms, &[member]).unwrap()
    }

    /// A sequence that begins like one of two others, and continues alike.
    fn sequence_state(age: u64, base: u32, prompt: usize, rows: u32) -> SequenceState {
        let tokens = (0..prompt as u32).map(|at| at * base % 90).collect();
        let sampling = Sampling::greedy();
        let text = Sequence { slot: age as u32, rows, sampling, tokens, prompt };
        SequenceState::new((age, 0), text, false, [].into(), true)
    }

    proptest! {
        /// Sequences with common prefixes arrive and end while KV blocks are few.
        #[test]
        fn every_step_runs_or_evicts_a_sequence_until_all_end(
            sequences in prop::collection::vec((1u32..3, 1usize..380, 1u32..300), 1..10),
            blocks in 2u32..6,
            at_once in 1usize..6,
            made in 1u32..40,
        ) {
            let plan = plan(blocks);
            let most = plan.cache.rows;
            let status = FleetStatus {
                strategy: plan.strategy,
                max_rows: plan.max_rows,
                cache: plan.cache,
                plan: Some(Arc::new(plan)),
                what: String::new(),
                predicted: None,
            };
            let steps = Steps::new();
            let all = sequences.into_iter().filter(|(_, prompt, _)| *prompt < most as usize);
            let mut to_come = all.collect::<Vec<_>>();
            let (mut going, mut rounds) = (Vec::<(u32, SequenceState, WaitingSequence)>::new(), 0);
            let (tell, _told) = mpsc::unbounded_channel();
            loop {
                while going.len() < at_once && let Some((base, prompt, left)) = to_come.pop() {
                    let rows = (prompt as u32 + left).min(most);
                    let current = sequence_state(steps.arrive(), base, prompt, rows);
                    let place = steps.wait(&None, current.request(tell.clone()));
                    going.push((base, current, place));
                }
                if going.is_empty() {
                    break;
                }
                rounds += 1;
                prop_assert!(rounds < 10_000);
                let next = steps.next(&status, Some(Epoch(1)), true);
                let Some(Next { taken, between, phase, .. }) = next else {
                    return Err(TestCaseError::fail("nobody runs"));
                };
                prop_assert!(!taken.scheduled.is_empty() || !taken.evicted.is_empty());
                let slots: Vec<u32> = taken.evicted.iter().map(|of| of.request.sequence.slot).collect();
                for (_, current, place) in &mut going {
                    if slots.contains(&current.sequence.slot) {
                        current.cached = None;
                        *place = steps.wait(&None, current.request(tell.clone()));
                    }
                }
                drop(between);
                for ScheduledSequence { part, entry, context_len, .. } in taken.scheduled {
                    let slot = entry.request.sequence.slot;
                    let at = going.iter().position(|(_, current, _)| current.sequence.slot == slot).unwrap();
                    let (base, current, _) = &mut going[at];
                    let made = part.count.map_or(0, |count| match phase {
                        Phase::Prefill => 1,
                        Phase::Decode => made.min(count),
                    });
                    let text = Arc::make_mut(&mut current.sequence);
                    for _ in 0..made {
                        text.tokens.push(text.tokens.len() as u32 * *base % 90);
                    }
                    let rows = context_len + part.rows + made.saturating_sub(1);
                    current.cached = Some((Epoch(1), rows));
                    prop_assert!(rows <= steps.lock().blocks.held(slot) * Cache::BLOCK);
                    if current.left() == 0 {
                        let (_, current, place) = going.remove(at);
                        drop(place);
                        steps.depart(&None, &current.sequence, current.reusable_rows());
                    } else {
                        going[at].2 = steps.wait(&None, current.request(tell.clone()));
                    }
                }
            }
            prop_assert_eq!(steps.sequences().free, blocks);
        }
    }
}
