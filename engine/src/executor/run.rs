//! One run: the state that its lanes share.

use super::{Job, RunError, TokenValues};
use crate::{compute::Binding, staging::Staging};
use galaxy_common::{Epoch, SequenceNumber};
use galaxy_graph::{
    Program,
    program::{Lane, OpId, TOKEN_VALUES},
    timeline::{LaneUse, Times, add_lane_use},
};
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

pub(super) struct Run {
    pub epoch: Epoch,
    pub sequence: SequenceNumber,
    pub program: Arc<Program>,
    /// The batch of the current step; changed only between steps, while no lane has the run.
    binding: RwLock<Binding>,
    /// The number of the current step, from 0.
    step: AtomicU32,
    pub staging: Arc<Staging>,
    deadline: Option<Instant>,
    clock: Instant,
    /// Mirrors `State::error`, for lanes between operations.
    failed: AtomicBool,
    state: Mutex<RunState>,
    /// What each lane sleeps on until its operation may begin.
    ready: Vec<Condvar>,
    /// What the caller sleeps on until all lanes are through.
    over: Condvar,
}

struct RunState {
    /// The number of operations that each lane has finished.
    done: Vec<u32>,
    /// The operation that each lane sleeps before, if it sleeps.
    asleep: Vec<Option<OpId>>,
    /// The number of lanes that still hold the run.
    active: usize,
    error: Option<RunError>,
    outcome: Outcome,
}

#[derive(Default)]
pub(super) struct Outcome {
    pub timeline: Vec<Times>,
    pub outputs: Vec<Vec<f32>>,
    /// What was chosen, for each choice of the batch one behind another: [`TOKEN_VALUES`] each.
    pub token_values: Vec<f32>,
}

/// The values that a lane fills for the caller.
#[derive(Clone, Copy)]
pub(super) enum Filled {
    /// An output of the program.
    Output(usize),
    /// All choices of the batch.
    SampledTokens,
}

impl Outcome {
    fn place(&mut self, what: Filled) -> &mut Vec<f32> {
        match what {
            Filled::Output(output) => &mut self.outputs[output],
            Filled::SampledTokens => &mut self.token_values,
        }
    }
}

/// Stops a lane: the run has failed, and keeps the error.
pub(super) struct Stop;

impl Run {
    pub fn new(job: Job, staging: Arc<Staging>, clock: Instant) -> Self {
        let choices = job.binding.shape.sampled().count();
        let state = RunState {
            done: vec![0; job.program.lanes.len()],
            asleep: vec![None; job.program.lanes.len()],
            active: 0,
            error: None,
            outcome: Outcome {
                timeline: vec![(0, 0); job.program.operations.len()],
                outputs: vec![Vec::new(); job.program.outputs.len()],
                token_values: vec![0.0; choices * TOKEN_VALUES as usize],
            },
        };
        let ready = job.program.lanes.iter().map(|_| Condvar::new()).collect();
        Self {
            epoch: job.epoch,
            sequence: job.sequence,
            program: job.program,
            binding: RwLock::new(job.binding),
            step: AtomicU32::new(0),
            staging,
            deadline: job.deadline,
            clock,
            failed: AtomicBool::new(false),
            state: Mutex::new(state),
            ready,
            over: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn binding(&self) -> RwLockReadGuard<'_, Binding> {
        self.binding.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a transfer in this step: steps differ in it, and every device counts them alike.
    pub fn transfer(&self, transfer: u32) -> u32 {
        transfer ^ (self.step.load(Ordering::Relaxed) << 22)
    }

    /// Binds the next step, after one that succeeded.
    pub fn bind<T>(&self, bind: impl FnOnce(&mut Binding) -> T) -> T {
        bind(&mut self.binding.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Gets ready for the next step, after one that succeeded.
    pub fn advance(&self) {
        self.step.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        state.done.fill(0);
        state.asleep.fill(None);
    }

    /// Takes out the values of an output, or of all choices, for a lane to fill, with room for
    /// `values`.
    pub fn take(&self, what: Filled, values: usize) -> Vec<f32> {
        let mut state = self.lock();
        let mut taken = std::mem::take(state.outcome.place(what));
        drop(state);
        taken.resize(values, 0.0);
        taken
    }

    /// Puts back the values that a lane has filled.
    pub fn put(&self, what: Filled, values: Vec<f32>) {
        *self.lock().outcome.place(what) = values;
    }

    /// Copies the choice for a segment to an output of the program.
    pub fn emit_token(&self, output: usize, segment: usize) {
        let binding = self.binding();
        let Some(at) = binding.shape.sampled().position(|(index, ..)| index == segment) else {
            return;
        };
        let Outcome { outputs, token_values, .. } = &mut self.lock().outcome;
        let token_values = token_values.chunks_exact(TOKEN_VALUES as usize).nth(at);
        if let (Some(output), Some(token_values)) = (outputs.get_mut(output), token_values) {
            output.clear();
            output.extend_from_slice(token_values);
        }
    }

    /// Copies what was chosen in the step that ended, for each choice of the batch, to `told`.
    pub fn sampled_tokens(&self, told: &mut [TokenValues]) {
        let outcome = &self.lock().outcome;
        let (all, _) = outcome.token_values.as_chunks();
        told.iter_mut().zip(all).for_each(|(told, values)| *told = *values);
    }

    /// Adds to `lanes` how they spent their time in the step that ended.
    pub fn add_use(&self, lanes: &mut [LaneUse]) {
        add_lane_use(&self.program, &self.lock().outcome.timeline, lanes);
    }

    pub fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    /// Whether the deadline has passed.
    pub fn late(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    pub fn enter(&self) {
        self.lock().active += 1;
    }

    pub fn leave(&self) {
        self.lock().active -= 1;
        self.over.notify_all();
    }

    /// Fails the run. The first error is the one that is kept.
    pub fn fail(&self, error: RunError) {
        let mut state = self.lock();
        if state.error.is_none() {
            state.error = Some(error);
        }
        self.failed.store(true, Ordering::Release);
        self.ready.iter().chain([&self.over]).for_each(Condvar::notify_all);
    }

    fn may_begin(&self, state: &RunState, op: OpId) -> bool {
        let waits = &self.program.operation(op).waits;
        waits.iter().all(|w| state.done[usize::from(w.lane.0)] >= w.count)
    }

    /// Sleeps until other lanes are as far as `op` of `lane` needs them.
    pub fn reach(&self, lane: usize, op: OpId) -> Result<(), Stop> {
        if self.has_failed() {
            return Err(Stop);
        }
        if self.program.operation(op).waits.is_empty() {
            return Ok(());
        }
        let mut state = self.lock();
        loop {
            if state.error.is_some() {
                return Err(Stop);
            }
            if self.may_begin(&state, op) {
                state.asleep[lane] = None;
                return Ok(());
            }
            state.asleep[lane] = Some(op);
            state = self.ready[lane].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The lane whose next operation may begin, and that operation, for a thread that drives all lanes. None
    /// when all are through, or the run has failed.
    pub fn next(&self) -> Option<(usize, OpId)> {
        let state = self.lock();
        if state.error.is_some() {
            return None;
        }
        let lanes = self.program.lanes.iter().enumerate();
        let left = lanes.filter_map(|(index, (lane, ids))| {
            let id = *ids.get(state.done[index] as usize)?;
            let rank = match lane {
                Lane::Send(_) => 0,
                Lane::Receive(_) => 2,
                _ => 1,
            };
            self.may_begin(&state, id).then_some((rank, id.0, index, id))
        });
        left.min_by_key(|(rank, order, ..)| (*rank, *order)).map(|(.., index, id)| (index, id))
    }

    /// Whether operations are left that cannot begin, although no error says why.
    pub fn stuck(&self) -> bool {
        let state = self.lock();
        let mut lanes = self.program.lanes.iter().zip(&state.done);
        state.error.is_none() && lanes.any(|((_, ids), done)| ids.len() > *done as usize)
    }

    /// Whether each segment has one row: then every transfer is waited for, and nothing hides it.
    pub fn has_single_rows(&self) -> bool {
        let binding = self.binding();
        binding.shape.rows() as usize == binding.shape.segments().len()
    }

    /// Counts one more operation of a lane as done, and wakes the lanes that waited for it.
    pub fn finish(&self, lane: usize, op: OpId, begin: u64) {
        let end = self.now();
        let mut state = self.lock();
        state.outcome.timeline[op.0 as usize] = (begin, end);
        state.done[lane] += 1;
        for (sleeper, ready) in self.ready.iter().enumerate() {
            if state.asleep[sleeper].is_some_and(|op| self.may_begin(&state, op)) {
                ready.notify_one();
            }
        }
    }

    /// Sleeps until no lane holds the run any more. When it fails, by a lane or by its deadline,
    /// calls `wake` once, so that lanes blocked in a link return.
    pub fn wait(&self, wake: impl Fn()) {
        let mut woken = false;
        let mut state = self.lock();
        while state.active > 0 {
            if state.error.is_some() && !woken {
                drop(state);
                wake();
                woken = true;
                state = self.lock();
                continue;
            }
            state = match self.deadline {
                Some(deadline) if state.error.is_none() => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left == Duration::ZERO {
                        drop(state);
                        self.fail(RunError::Deadline);
                        self.lock()
                    } else {
                        let waited = self.over.wait_timeout(state, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                }
                _ => self.over.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Whether the run has failed so far.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Gives the error of the run, if it has failed.
    pub fn check(&self) -> Result<(), RunError> {
        self.lock().error.take().map_or(Ok(()), Err)
    }

    pub fn outcome(&self) -> Outcome {
        std::mem::take(&mut self.lock().outcome)
    }
}
