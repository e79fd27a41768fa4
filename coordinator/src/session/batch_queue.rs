//! Batches of several requests in one program: whoever has the turn takes along what waits and fits.
//!
//! Nobody waits for others to come: what is there when the turn comes, runs together. A row's result does not depend on
//! the rows beside it, so nobody's result changes.

use super::{GRACE, Session, batch::Batch};
use crate::{
    admission::Turn,
    client_memory::Who,
    error::RequestError,
    fair::in_turns,
    fleet::{Run, Task, blocking},
};
use galaxy_common::{BatchShape, Segment, Wanted};
use galaxy_engine::{
    compute::Inputs,
    merge::{Merged, merge},
};
use galaxy_graph::program::Output;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering};
use tokio::{sync::oneshot, time::Instant};

/// The batches that wait for the turn, in the order in which they came.
#[derive(Default)]
pub(super) struct BatchQueue(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    /// The number of the batch that came last.
    number: u64,
    batches: Vec<QueuedBatch>,
}

struct QueuedBatch {
    number: u64,
    client: Who,
    wanted: Wanted,
    batch: Arc<Batch>,
    /// Until when the caller wants the results; none if the caller does not say.
    deadline: Option<Instant>,
    answer: oneshot::Sender<Answered>,
}

/// The outcome of a batch, and how many other batches were in its program.
pub(super) type Answered = (Result<Shared, RequestError>, usize);

/// A batch's part of a program that ran.
pub(super) struct Shared {
    pub(super) run: Arc<Run>,
    /// The shape of the whole program.
    pub(super) shape: BatchShape,
    /// The results, one for each segment of the batch.
    pub(super) results: Vec<Merged>,
}

/// A batch that waits; it leaves when this is dropped.
pub(super) struct WaitingBatch<'a> {
    of: &'a BatchQueue,
    number: u64,
    pub(super) answer: oneshot::Receiver<Answered>,
}

impl WaitingBatch<'_> {
    /// Whether the batch still waits, and no program runs with it.
    pub(super) fn waits(&self) -> bool {
        self.of.lock().batches.iter().any(|entry| entry.number == self.number)
    }
}

impl Drop for WaitingBatch<'_> {
    fn drop(&mut self) {
        self.of.lock().batches.retain(|entry| entry.number != self.number);
    }
}

impl BatchQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a batch wait for the turn.
    pub(super) fn wait(
        &self,
        client: &Who,
        batch: &Arc<Batch>,
        wanted: Wanted,
        deadline: Option<Instant>,
    ) -> WaitingBatch<'_> {
        let (sender, answer) = oneshot::channel();
        let mut queue = self.lock();
        queue.number += 1;
        let (number, client, batch) = (queue.number, client.clone(), batch.clone());
        queue.batches.push(QueuedBatch { number, client, wanted, batch, deadline, answer: sender });
        WaitingBatch { of: self, number, answer }
    }

    /// Takes a batch, and with it those of the same kind for which its program has room, with clients in turns.
    fn take(&self, number: u64, max_rows: u32, alone: bool) -> Vec<QueuedBatch> {
        let mut queue = self.lock();
        let Some(at) = queue.batches.iter().position(|entry| entry.number == number) else {
            return Vec::new();
        };
        let first = queue.batches.remove(at);
        let (wanted, joins) = (first.wanted, !alone && first.joins());
        let may = |entry: &mut QueuedBatch| joins && entry.wanted == wanted && entry.joins();
        // The first has the turn; clients take turns behind it.
        let mut all = vec![Some(first)];
        all.extend(queue.batches.extract_if(.., may).map(Some));
        let order = in_turns(all.iter().flatten().map(|entry| entry.client.clone()));
        let (mut rows, mut taken) = (0, Vec::new());
        for at in order {
            let Some(entry) = all[at].take() else { continue };
            let more = entry.batch.shape.rows();
            if taken.is_empty() || rows + more <= max_rows {
                rows += more;
                taken.push(entry);
            } else {
                all[at] = Some(entry);
            }
        }
        queue.batches.extend(all.into_iter().flatten());
        queue.batches.sort_by_key(|entry| entry.number);
        taken
    }
}

impl QueuedBatch {
    /// Whether others may be in its program: images fill one by themselves.
    fn joins(&self) -> bool {
        !matches!(self.batch.inputs, Inputs::Patches { .. })
    }
}

/// The program of some batches, one after another.
fn task(entries: &[QueuedBatch]) -> Result<Task, RequestError> {
    if let [QueuedBatch { batch, .. }] = entries {
        return Ok(Task::new(batch.shape.clone(), batch.inputs.clone()));
    }
    let segments = entries.iter().flat_map(|entry| entry.batch.shape.segments());
    let placed = |(slot, segment): (u32, &Segment)| Segment { slot, ..*segment };
    let shape = BatchShape::new((0..).zip(segments).map(placed).collect());
    let shape = shape.map_err(|e| RequestError::Internal { why: e.to_string() })?;
    let (mut ids, mut kinds) = (Vec::new(), Vec::new());
    for entry in entries {
        match &entry.batch.inputs {
            Inputs::Tokens(tokens) => ids.extend_from_slice(tokens),
            Inputs::Typed { tokens, types } => {
                ids.extend_from_slice(tokens);
                kinds.extend_from_slice(types);
            }
            Inputs::Patches { .. } => {
                let why = "images are to share a program".to_owned();
                return Err(RequestError::Internal { why });
            }
        }
        kinds.resize(ids.len(), 0);
    }
    Ok(Task::new(shape, Inputs::typed(ids, kinds)))
}

impl Session {
    /// Runs a batch in its turn, and others that wait with it, unless it is to run alone.
    pub(super) fn run_with_others(&self, turn: Turn, place: &WaitingBatch<'_>, alone: bool) {
        if !place.waits() {
            return;
        }
        let entries =
            self.inner.batch_queue.take(place.number, self.fleet_status().max_rows, alone);
        // A task of its own: the program runs to its end, whoever still waits for it.
        tokio::spawn(self.clone().run_batches(turn, entries));
    }

    async fn run_batches(self, turn: Turn, entries: Vec<QueuedBatch>) {
        // The limit is longer if a caller gives more time, and never shorter: a program that overruns it ends the epoch
        // for all. It ends before the caller's time does, so that the device without a result is named.
        let now = Instant::now();
        let left =
            |deadline: Instant| deadline.saturating_duration_since(now).saturating_sub(GRACE);
        let left = entries.iter().filter_map(|entry| entry.deadline).map(left).max();
        let limit = self.inner.limits.timeout.max(left.unwrap_or_default());
        let ran = async {
            let task = task(&entries)?;
            let shape = task.shape.clone();
            let run = Arc::new(self.inner.fleet.execute(task, limit).await?);
            self.inner.counts.programs.fetch_add(1, Ordering::Relaxed);
            drop(turn);
            let (session, of, whole) = (self.clone(), run.clone(), shape.clone());
            let results = blocking(move || session.merged(&of, &whole)).await??;
            Ok((run, shape, results))
        };
        let ran: Result<_, RequestError> = ran.await;
        let (ran, mut results) = match ran {
            Ok((run, shape, results)) => (Ok((run, shape)), results.into_iter()),
            Err(error) => (Err(error), Vec::new().into_iter()),
        };
        let others = entries.len().saturating_sub(1);
        for QueuedBatch { batch, answer, .. } in entries {
            let results: Vec<Merged> = results.by_ref().take(batch.indices.len()).collect();
            let shared = match &ran {
                Ok((run, shape)) => Ok(Shared { run: run.clone(), shape: shape.clone(), results }),
                Err(error) => Err(error.clone()),
            };
            drop(answer.send((shared, others)));
        }
    }

    /// The results of a program, one for each segment. Blocks.
    fn merged(&self, run: &Run, shape: &BatchShape) -> Result<Vec<Merged>, RequestError> {
        let parts: Vec<(&[Output], &[Vec<f32>])> =
            run.devices.iter().map(|d| (&d.outputs[..], &d.values[..])).collect();
        merge(self.spec(), shape, &parts).map_err(|e| RequestError::Internal { why: e.to_string() })
    }
}
