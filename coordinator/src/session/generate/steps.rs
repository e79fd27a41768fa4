//! Where the sequences of all requests meet: each says what it waits for, and whoever has the turn runs the next
//! step of all of them.

use crate::{
    admission::Turn,
    client_memory::Who,
    error::RequestError,
    fleet::{CachedSequence, Outlook, Readiness, Run, Task},
    scheduler::{Limits, Part, Scheduler, Step, Waiting},
    session::Session,
};
use galaxy_common::{
    BatchShape, Breadth, Burst, Cache, Epoch, Segment, Text, TokenGoal, Wanted, plan::Phase,
};
use galaxy_engine::generate::Told;
use galaxy_graph::budget;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

/// The sequences that are here.
pub(in crate::session) struct Steps {
    state: Mutex<State>,
    /// How many have had a step and not said yet whether they wait for another.
    between: watch::Sender<usize>,
    /// Changes whenever there may be something to run that was not there before.
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    scheduler: Scheduler,
    /// In the order in which they came to wait.
    waiting: Vec<Entry>,
    /// Places that were given to sequences by the time when they came, and to those that wait.
    ages: u64,
    numbers: u64,
    /// Blocks of the cache that sequences have, by age, and in which epoch.
    blocks: HashMap<u64, (Epoch, u32)>,
    /// How many had no room when somebody looked last.
    starving: usize,
    /// How many are in the step that runs.
    running: usize,
    /// The most that were in one step, and how many were evicted, since the beginning.
    together: usize,
    evicted: u64,
}

/// The sequences that generate tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sequences {
    /// How many wait for a step.
    pub waiting: usize,
    /// How many are in the step that runs.
    pub running: usize,
    /// The most that were in one step since the beginning.
    pub together: usize,
    /// How many lost their room to an older one since the beginning.
    pub evicted: u64,
}

struct Entry {
    number: u64,
    client: Who,
    wish: Wish,
    since: Instant,
    answer: oneshot::Sender<Answered>,
}

/// What a sequence waits for.
pub(super) struct Wish {
    /// Its place among all sequences by the time when they came.
    pub(super) age: u64,
    /// With all tokens so far.
    pub(super) text: Arc<Text>,
    /// Rows that are in the cache, and in which epoch.
    pub(super) kept: Option<(Epoch, u32)>,
    /// Tokens that it may get still.
    pub(super) left: u32,
    pub(super) breadth: Breadth,
    /// Tokens that end it.
    pub(super) ends: Arc<[u32]>,
    /// Whether it is to run without others.
    pub(super) alone: bool,
    /// Is told of its tokens.
    pub(super) tell: mpsc::UnboundedSender<Told>,
}

/// What became of a wish.
pub(super) struct Answered {
    pub(super) came: Came,
    /// Until this is dropped the next step waits for the sequence.
    pub(super) between: Between,
}

pub(super) enum Came {
    /// A step of it, among so many sequences.
    Step(Result<Stepped, RequestError>, usize),
    /// Its room is another's: all its rows are to be run again.
    Evicted,
}

/// A step that ran.
pub(in crate::session) struct Stepped {
    pub(in crate::session) run: Arc<Run>,
    pub(in crate::session) phase: Phase,
    pub(in crate::session) shape: BatchShape,
    /// Rows of this sequence.
    pub(super) rows: u32,
    /// Candidates that its last token took, if it got some.
    pub(super) breadth: Option<Breadth>,
    /// How long it had waited.
    pub(in crate::session) queued: Duration,
}

/// A sequence that has had a step and may wait for another.
pub(super) struct Between(Arc<Steps>);

impl Between {
    fn new(steps: &Arc<Steps>) -> Self {
        steps.between.send_modify(|between| *between += 1);
        Self(steps.clone())
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.0.between.send_modify(|between| *between -= 1);
    }
}

/// A sequence that waits; it leaves when this is dropped.
pub(super) struct Place {
    steps: Arc<Steps>,
    number: u64,
    pub(super) answer: oneshot::Receiver<Answered>,
}

impl Place {
    /// Whether no step runs with the sequence.
    pub(super) fn waits(&self) -> bool {
        self.steps.lock().waiting.iter().any(|entry| entry.number == self.number)
    }

    /// Leaves, unless a step with the sequence runs already.
    pub(super) fn leave(&self) -> bool {
        let mut state = self.steps.lock();
        let before = state.waiting.len();
        state.waiting.retain(|entry| entry.number != self.number);
        state.waiting.len() < before
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What is to run next, and for whom.
struct Next {
    step: Step,
    epoch: Epoch,
    evicted: Vec<Entry>,
    entries: Vec<Entry>,
    between: Vec<Between>,
    task: Task,
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

    /// Changes whenever there may be something to run that was not there before.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The place of a sequence that comes.
    pub(super) fn arrive(&self) -> u64 {
        let mut state = self.lock();
        state.ages += 1;
        state.ages
    }

    /// A sequence that came has ended, and no device keeps anything of it.
    pub(super) fn depart(&self, age: u64) {
        self.lock().blocks.remove(&age);
        self.change();
    }

    /// Whether some wait for room that others have.
    pub(super) fn starving(&self) -> bool {
        self.lock().starving > 0
    }

    /// Makes the next step wait for a sequence.
    pub(super) fn between(self: &Arc<Self>) -> Between {
        Between::new(self)
    }

    /// What there is.
    pub(in crate::session) fn sequences(&self) -> Sequences {
        let state = self.lock();
        let State { running, together, evicted, .. } = *state;
        Sequences { waiting: state.waiting.len(), running, together, evicted }
    }

    /// Waits for a step.
    pub(super) fn wait(self: &Arc<Self>, client: &Who, wish: Wish) -> Place {
        let (sender, answer) = oneshot::channel();
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        let (client, since) = (client.clone(), Instant::now());
        state.waiting.push(Entry { number, client, wish, since, answer: sender });
        drop(state);
        self.change();
        Place { steps: self.clone(), number, answer }
    }

    /// Takes what is to run next out of those that wait. None where nothing can run.
    fn next(self: &Arc<Self>, outlook: &Outlook, ready: Option<Epoch>) -> Option<Next> {
        let mut state = self.lock();
        let kept = |entry: &Entry| entry.wish.kept.map(|(epoch, _)| epoch);
        let known = state.waiting.iter().filter_map(kept).max();
        let epoch = ready.or(known).unwrap_or_default();
        let lost: Vec<_> =
            state.waiting.extract_if(.., |e| kept(e).is_some_and(|of| of != epoch)).collect();
        for Entry { wish, answer, .. } in lost {
            let error = RequestError::TextLost { epoch: wish.kept.unwrap_or_default().0 };
            let came = Came::Step(Err(error), 1);
            drop(answer.send(Answered { came, between: Between::new(self) }));
        }
        let has = |age| state.blocks.get(&age).filter(|has| has.0 == epoch).map_or(0, |has| has.1);
        let waiting: Vec<Waiting<&Who>> = state
            .waiting
            .iter()
            .map(|Entry { client, wish, .. }| {
                let past = wish.kept.map_or(0, |(_, rows)| rows);
                let rows = wish.text.tokens.len() as u32 - past;
                let blocks = if wish.kept.is_some() { has(wish.age) } else { 0 };
                let (age, left, alone) = (wish.age, wish.left, wish.alone);
                Waiting { client, age, past, rows, left, blocks, alone }
            })
            .collect();
        let taken: u32 = state.blocks.values().filter(|has| has.0 == epoch).map(|has| has.1).sum();
        let limits = Limits {
            rows: outlook.max_rows,
            sequences: outlook.plan.as_deref().map_or(1, budget::sequences),
            free: outlook.cache.blocks().saturating_sub(taken),
        };
        let step = state.scheduler.next(&waiting, limits);
        let starving = waiting.iter().enumerate().filter(|(index, of)| {
            let runs = step.iter().flat_map(|step| &step.parts).any(|part| part.index == *index);
            !runs && (of.past + of.rows).div_ceil(Cache::BLOCK) > of.blocks + limits.free
        });
        let starving = starving.count();
        drop(waiting);
        state.starving = starving;
        let step = step?;
        // By their places among those that wait.
        let mut all: Vec<_> = std::mem::take(&mut state.waiting).into_iter().map(Some).collect();
        let mut take = |index: usize| all[index].take();
        let evicted: Vec<_> = step.evicted.iter().filter_map(|index| take(*index)).collect();
        let mut chosen: Vec<_> =
            step.parts.iter().filter_map(|part| Some((*part, take(part.index)?))).collect();
        state.waiting = all.into_iter().flatten().collect();
        // Steps whose sequences need as many candidates are the same programs, whichever need them.
        chosen.sort_by_key(|(part, entry)| {
            (std::cmp::Reverse(entry.wish.breadth), part.count.is_none())
        });
        let task = task(&chosen, step.phase, |age| {
            state.blocks.get(&age).filter(|has| has.0 == epoch).map_or(0, |has| has.1)
        });
        let (parts, entries): (Vec<_>, Vec<_>) = chosen.into_iter().unzip();
        let between = entries.iter().map(|_| Between::new(self)).collect();
        state.running = entries.len();
        state.together = state.together.max(entries.len());
        state.evicted += evicted.len() as u64;
        let step = Step { parts, ..step };
        Some(Next { step, epoch, evicted, entries, between, task: task? })
    }

    /// Notes what a step took and which blocks its sequences have now.
    fn ran(&self, step: &Step, entries: &[Entry], run: &Run) {
        let mut state = self.lock();
        state.scheduler.ran(step, run.tokens, run.took);
        for (part, entry) in step.parts.iter().zip(entries) {
            state.blocks.insert(entry.wish.age, (run.epoch, part.blocks));
        }
    }
}

/// The program of a step; `has` says how many blocks a sequence has, by its age.
fn task(chosen: &[(Part, Entry)], phase: Phase, has: impl Fn(u64) -> u32) -> Option<Task> {
    let (mut segments, mut rows) = (Vec::new(), Vec::new());
    let (mut cached, mut goals) = (Vec::new(), Vec::new());
    let mut all = false;
    for (part, Entry { wish, .. }) in chosen {
        let past = wish.kept.map_or(0, |(_, rows)| rows);
        // Only one at a time is asked for all candidates.
        let breadth = match wish.breadth {
            Breadth::All if all => Breadth::Many,
            breadth => breadth,
        };
        let wanted = match part.count {
            None => Wanted::Nothing,
            Some(count) => {
                all |= breadth == Breadth::All;
                goals.push(TokenGoal { count, stop: wish.ends.clone() });
                Wanted::Token(breadth)
            }
        };
        let slot = wish.text.slot;
        segments.push(Segment { slot, past, kept: true, rows: part.rows, wanted });
        rows.extend_from_slice(&wish.text.tokens[past as usize..(past + part.rows) as usize]);
        let grows = wish.kept.is_none() || part.blocks > has(wish.age);
        let room = || Text { rows: part.blocks * Cache::BLOCK, ..Text::clone(&wish.text) };
        cached.push(CachedSequence {
            room: grows.then(|| Arc::new(room())),
            kept: wish.kept.map(|(epoch, _)| epoch),
            tell: wish.tell.clone(),
        });
    }
    let shape = BatchShape::new(segments).ok()?;
    let burst = (!goals.is_empty()).then_some(Burst { phase, goals });
    Some(Task { cached, burst, ..Task::new(shape, rows.as_slice()) })
}

impl Session {
    /// Runs the next step of all sequences that wait. False where there is none.
    pub(super) async fn lead(&self, turn: Turn) -> bool {
        let steps = &self.inner.steps;
        // Those that had the last one join in.
        drop(steps.between.subscribe().wait_for(|between| *between == 0).await);
        let ready = match self.readiness() {
            Readiness::Ready(epoch) => Some(epoch),
            _ => None,
        };
        let Some(next) = steps.next(&self.outlook(), ready) else { return false };
        // A task of its own: the program runs to its end, whoever still waits for it.
        tokio::spawn(self.clone().run_step(turn, next));
        true
    }

    async fn run_step(self, turn: Turn, next: Next) {
        let Next { step, epoch, evicted, entries, between, task } = next;
        let steps = &self.inner.steps;
        for Entry { wish, answer, .. } in evicted {
            self.inner.fleet.forget(epoch, wish.text.slot).await;
            steps.lock().blocks.remove(&wish.age);
            let answered = Answered { came: Came::Evicted, between: Between::new(steps) };
            drop(answer.send(answered));
        }
        let (shape, begun) = (task.shape.clone(), Instant::now());
        let result = self.inner.fleet.execute(task, self.inner.limits.timeout).await;
        let result = result.map(Arc::new);
        if let Ok(run) = &result {
            self.inner.counts.programs.fetch_add(1, Ordering::Relaxed);
            steps.ran(&step, &entries, run);
        }
        steps.lock().running = 0;
        drop(turn);
        let together = entries.len();
        let mut breadths = result.iter().flat_map(|run| run.breadths.clone());
        for ((entry, part), between) in entries.into_iter().zip(&step.parts).zip(between) {
            let breadth = part.count.and_then(|_| breadths.next());
            let stepped = |run: &Arc<Run>| Stepped {
                run: run.clone(),
                phase: step.phase,
                shape: shape.clone(),
                rows: part.rows,
                breadth,
                queued: begun.saturating_duration_since(entry.since),
            };
            let came = Came::Step(result.as_ref().map(stepped).map_err(Clone::clone), together);
            drop(entry.answer.send(Answered { came, between }));
        }
        steps.change();
    }
}
