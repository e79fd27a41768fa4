//! One run: what its lanes share.

use super::{Job, RunError};
use crate::{compute::Binding, staging::Staging};
use galaxy_common::{Epoch, SequenceNumber};
use galaxy_graph::{Program, program::OpId, timeline::Times};
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

pub(super) struct Run {
    pub epoch: Epoch,
    pub sequence: SequenceNumber,
    pub program: Arc<Program>,
    pub binding: Binding,
    pub staging: Arc<Staging>,
    deadline: Option<Instant>,
    clock: Instant,
    /// Mirrors `State::error`, for lanes between operations.
    failed: AtomicBool,
    state: Mutex<State>,
    /// One for each lane: it sleeps here until its operation may begin.
    ready: Vec<Condvar>,
    /// The caller sleeps here until all lanes are through.
    over: Condvar,
}

struct State {
    /// Operations that each lane has finished.
    done: Vec<u32>,
    /// The operation that a lane sleeps before.
    asleep: Vec<Option<OpId>>,
    /// Lanes that still hold the run.
    active: usize,
    error: Option<RunError>,
    outcome: Outcome,
}

#[derive(Default)]
pub(super) struct Outcome {
    pub timeline: Vec<Times>,
    pub outputs: Vec<Vec<f32>>,
}

/// A lane stops: the run has failed, and the error is kept there.
pub(super) struct Stop;

impl Run {
    pub fn new(job: Job, staging: Arc<Staging>, clock: Instant) -> Self {
        let state = State {
            done: vec![0; job.program.lanes.len()],
            asleep: vec![None; job.program.lanes.len()],
            active: 0,
            error: None,
            outcome: Outcome {
                timeline: vec![(0, 0); job.program.operations.len()],
                outputs: vec![Vec::new(); job.program.outputs.len()],
            },
        };
        let ready = job.program.lanes.iter().map(|_| Condvar::new()).collect();
        Self {
            epoch: job.epoch,
            sequence: job.sequence,
            program: job.program,
            binding: job.binding,
            staging,
            deadline: job.deadline,
            clock,
            failed: AtomicBool::new(false),
            state: Mutex::new(state),
            ready,
            over: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The first error is the one that is told.
    pub fn fail(&self, error: RunError) {
        let mut state = self.lock();
        if state.error.is_none() {
            state.error = Some(error);
        }
        self.failed.store(true, Ordering::Release);
        self.ready.iter().chain([&self.over]).for_each(Condvar::notify_all);
    }

    fn may_begin(&self, state: &State, op: OpId) -> bool {
        let waits = &self.program.operation(op).waits;
        waits.iter().all(|w| state.done[usize::from(w.lane.0)] >= w.count)
    }

    /// Sleeps until other lanes are as far as `op` of `lane` needs them.
    pub fn reach(&self, lane: usize, op: OpId) -> Result<(), Stop> {
        if self.failed.load(Ordering::Acquire) {
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

    pub fn emit(&self, output: usize, values: Vec<f32>) {
        self.lock().outcome.outputs[output] = values;
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

    pub fn outcome(&self) -> Result<Outcome, RunError> {
        let mut state = self.lock();
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut state.outcome)),
        }
    }
}
