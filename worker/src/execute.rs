//! Execute: runs one program, in sequence order, and sends its results in pieces.

use crate::{
    burst::{Decode, checked},
    core::Core,
    error::WorkerError,
    running::{Active, Events},
    state::Turn,
    tasks::{blocking, lock},
};
use bytes::Bytes;
use galaxy_common::{
    BatchShape, CandidateCount, Epoch, Sequence, SequenceNumber, Wanted, plan::Phase,
};
use galaxy_engine::{
    compute::{Binding, Ending, Inputs},
    executor::{Job, RunError, RunReport},
    generate::{Decoded, Generated},
};
use galaxy_graph::timeline::LaneUse;
use galaxy_model::ModelSpec;
use galaxy_proto::{convert, v1};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Bytes of a piece of a result: far below the limit of a message, far above its overhead.
const PIECE_BYTES: usize = 1 << 20;
/// The time for a request that names none, and the most for one that names more.
const LONGEST: Duration = Duration::from_secs(3600);

/// The time after which a run whose coordinator is gone is given up.
const ORPHANED: Duration = Duration::from_secs(5);

/// The time after its deadline in which a request is answered.
const REPORT: Duration = Duration::from_secs(5);

/// A program's place in the queue. Leaves it when dropped, whatever happened.
struct QueuePlace {
    core: Arc<Core>,
    epoch: Epoch,
    sequence: SequenceNumber,
    ending: Ending,
}

impl QueuePlace {
    fn take(core: &Arc<Core>, epoch: Epoch, sequence: SequenceNumber) -> Result<Self, WorkerError> {
        core.tell(|state| state.admit(epoch, sequence))?;
        let ending = Ending::default();
        lock(&core.running.endings).add(epoch, sequence, ending.clone());
        Ok(Self { core: core.clone(), epoch, sequence, ending })
    }

    /// Waits until it is this program's turn, and starts it.
    async fn start(&self, deadline: Instant) -> Result<(), WorkerError> {
        let (epoch, sequence) = (self.epoch, self.sequence);
        let mut state = self.core.state.subscribe();
        let turn = async {
            loop {
                match self.core.tell(|state| state.start(epoch, sequence)) {
                    Turn::Start => return Ok(()),
                    Turn::Gone => return Err(WorkerError::aborted()),
                    Turn::Wait => {}
                }
                let changed = state.wait_for(|state| state.turn(epoch, sequence) != Turn::Wait);
                changed.await.map_err(|_| WorkerError::Bug)?;
            }
        };
        tokio::time::timeout_at(deadline, turn).await.unwrap_or(Err(WorkerError::Deadline))
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        lock(&self.core.running.endings).remove(self.epoch, self.sequence);
        self.core.tell(|state| state.leave(self.epoch, self.sequence));
    }
}

/// A request that was checked as far as possible without a plan.
pub(crate) struct CheckedRequest {
    epoch: Epoch,
    sequence: SequenceNumber,
    digest: Vec<u8>,
    pub(crate) shape: BatchShape,
    /// The sequences that begin, with the blocks of the KV cache that each takes.
    pub(crate) begins: Vec<(Sequence, Arc<[u32]>)>,
    decode: Option<Decode>,
    pub(crate) left: Duration,
}

/// The inputs that a request gives for the rows of its batch.
pub(crate) struct Rows {
    pub(crate) tokens: Vec<u32>,
    /// The type of each token; empty where all are 0.
    types: Vec<u8>,
    /// Bytes of image patches, as f32 values; empty for a model of texts.
    patches: Vec<u8>,
    /// The row of the batch to which the first patch belongs.
    first: u32,
}

impl CheckedRequest {
    pub(crate) fn read(request: v1::ExecuteRequest) -> Result<(Self, Rows), WorkerError> {
        let v1::ExecuteRequest { digest, tokens, types, patches, first_row, .. } = request;
        let left = match request.timeout_ms {
            0 => LONGEST,
            ms => Duration::from_millis(ms).min(LONGEST),
        };
        let shape = convert::shape(request.segments, tokens.len())?;
        let decode = request.burst.map(|burst| Decode::read(burst, &shape)).transpose()?;
        let begins = request
            .begins
            .into_iter()
            .map(convert::sequence_from_wire)
            .collect::<Result<_, _>>()?;
        let (epoch, sequence) = (Epoch(request.epoch), SequenceNumber(request.sequence));
        let rows = Rows { tokens, types, patches, first: first_row };
        Ok((Self { epoch, sequence, digest, shape, begins, decode, left }, rows))
    }
}

/// An execution that was admitted.
pub(crate) struct Execution {
    place: QueuePlace,
    active: Arc<Active>,
    asked: CheckedRequest,
    inputs: Inputs,
    deadline: Instant,
}

/// The results of an execution.
struct Ran {
    report: RunReport,
    /// The tokens that were generated, of one sequence after another.
    tokens: Vec<u32>,
    decoded: Decoded,
}

impl Execution {
    /// Checks a request and takes its place in the queue.
    pub(crate) fn admit(
        core: &Arc<Core>,
        request: v1::ExecuteRequest,
    ) -> Result<Self, WorkerError> {
        let (mut asked, rows) = CheckedRequest::read(request)?;
        let deadline = Instant::now() + asked.left;
        let epoch = asked.epoch;
        let place = QueuePlace::take(core, epoch, asked.sequence)?;
        let active = core
            .active()
            .filter(|active| active.epoch == epoch)
            .ok_or(WorkerError::Refused(crate::state::Refusal::NotPlaced { epoch }))?;
        let spec = active.model.spec();
        for (text, _) in &mut asked.begins {
            *text = checked(text.clone(), spec.vocabulary)?;
        }
        let inputs = inputs(spec, &asked.shape, rows)?;
        Ok(Self { place, active, asked, inputs, deadline })
    }

    /// The most steps that can be reported one by one.
    pub(crate) fn steps(&self) -> usize {
        self.asked.decode.as_ref().map_or(0, Decode::steps)
    }

    /// Runs the program and reports into `events`. Once it runs, it runs to its end or to a Cancel:
    /// the other devices depend on it. Where nobody listens any more, the run ends in a few
    /// seconds.
    pub(crate) async fn run(self, events: Events) {
        let (epoch, sequence) = (self.place.epoch, self.place.sequence);
        let core = self.place.core.clone();
        let deadline = self.deadline;
        let finishing = self.finish(events.clone());
        tokio::pin!(finishing);
        let result = tokio::select! {
            result = &mut finishing => result,
            () = alone(&events) => {
                // Other devices may never have been asked: their tiles would not come before the
                // deadline.
                tracing::warn!(%epoch, %sequence, "the coordinator is gone: what runs is given up");
                drop(core.cancel(epoch).await);
                finishing.await
            }
        };
        let sent = async {
            match result {
                Ok((ran, active)) => send_all(&events, ran, &active).await,
                Err(error) => {
                    tracing::warn!(%epoch, %sequence, %error, "execution failed");
                    events.send(Err(error.into_status(&core.name))).await.is_ok()
                }
            }
        };
        // A caller that takes nothing must not make this worker keep results without end.
        let sent = tokio::time::timeout_at(deadline + REPORT, sent).await;
        if sent != Ok(true) {
            tracing::debug!(%epoch, %sequence, "the caller hung up");
        }
    }

    async fn finish(self, events: Events) -> Result<(Ran, Arc<Active>), WorkerError> {
        let Self { place, active, asked, inputs, deadline } = self;
        let CheckedRequest { digest, shape, begins, decode, .. } = asked;
        let phase = decode.as_ref().map_or(Phase::Prefill, Decode::phase);
        let (lowering, wanted) = (active.clone(), shape.clone());
        let (ours, program) = blocking(move || lowering.lower(phase, &wanted)).await??;
        if digest != ours {
            return Err(WorkerError::Digest);
        }
        // A device that lacks patches would fail in the middle, and the others with it.
        let spec = active.model.spec();
        if spec.patches.is_some() && inputs.part(spec, program.embedded()) != inputs {
            return Err(WorkerError::Patches { rows: program.embedded().len() });
        }
        // While this lock is read, no other shard is loaded.
        let held = tokio::time::timeout_at(deadline, place.core.running.held.clone().read_owned())
            .await
            .map_err(|_| WorkerError::Deadline)?;
        place.start(deadline).await?;
        let job = Job {
            epoch: place.epoch,
            sequence: place.sequence,
            program,
            binding: Binding { ending: place.ending.clone(), ..Binding::new(shape, inputs) },
            deadline: Some(on_threads(deadline)),
        };
        let executor = active.executor.upgrade().ok_or_else(WorkerError::aborted)?;
        let lowering = active.clone();
        let result = place.core.running.programs.run(move || {
            let run = || {
                let begin = |(text, blocks)| executor.begin(text, blocks);
                begins.into_iter().try_for_each(begin)?;
                match decode {
                    None => {
                        let report = executor.run(job)?;
                        Ok(Ran { report, tokens: Vec::new(), decoded: Decoded::default() })
                    }
                    Some(decode) => {
                        let (generated, tokens) = decode.run(&executor, job, &lowering, &events)?;
                        let Generated { report, decoded } = generated;
                        Ok(Ran { report, tokens, decoded })
                    }
                }
            };
            let result = run();
            // In this order: a task that may load then finds the executor gone.
            drop(executor);
            drop(held);
            result
        });
        let ran: Ran = result.await?.map_err(|error| match error {
            WorkerError::Run { source: source @ RunError::Link { peer, .. }, .. } => {
                WorkerError::Run { peer: active.name(peer).cloned(), source }
            }
            error => error,
        })?;
        let timeline = ran.report.timeline.clone();
        lock(&place.core.running.timelines).put(place.epoch, place.sequence, timeline);
        Ok((ran, active))
    }
}

/// Waits until nobody has listened for a while.
async fn alone(events: &Events) {
    events.closed().await;
    tokio::time::sleep(ORPHANED).await;
}

/// The inputs of a batch, checked against the model.
fn inputs(
    spec: &ModelSpec,
    shape: &BatchShape,
    Rows { tokens, types, patches: squares, first }: Rows,
) -> Result<Inputs, WorkerError> {
    let Some(of) = spec.patches else {
        if shape.rows() as usize != tokens.len() {
            return Err(WorkerError::Tokens { tokens: tokens.len(), rows: shape.rows() });
        }
        let vocabulary = spec.vocabulary;
        return match tokens.iter().position(|token| *token >= vocabulary) {
            Some(row) => Err(WorkerError::Token { row, token: tokens[row], vocabulary }),
            None => typed(spec, shape, tokens, types),
        };
    };
    let values = convert::floats(&squares);
    let rows = (values.len() / of.values() as usize) as u32;
    let end = first.saturating_add(rows);
    if values.len() != rows as usize * of.values() as usize || end > shape.rows() {
        return Err(WorkerError::Patches { rows: shape.rows() });
    }
    Ok(Inputs::Patches { first, values: values.into() })
}

/// Tokens with a type each, if the model has these types.
fn typed(
    spec: &ModelSpec,
    shape: &BatchShape,
    tokens: Vec<u32>,
    types: Vec<u8>,
) -> Result<Inputs, WorkerError> {
    let fits = types.is_empty() || types.len() == tokens.len();
    if !fits || types.iter().any(|kind| u32::from(*kind) >= spec.token_types.max(1)) {
        return Err(WorkerError::Types { rows: shape.rows(), types: spec.token_types.max(1) });
    }
    Ok(Inputs::typed(tokens, types))
}

/// Sends results in pieces, then what they cost. False when nobody listens.
async fn send_all(events: &Events, ran: Ran, active: &Active) -> bool {
    let Ran { report, tokens, decoded: Decoded { counts, candidate_counts, steps, rows, last } } =
        ran;
    let wanted = |breadth: CandidateCount| v1::Wanted::from(Wanted::Token(breadth)).into();
    for (output, values) in report.outputs.iter().enumerate() {
        let mut offset = 0;
        for part in values.chunks(PIECE_BYTES / 4) {
            // Little endian, as all processors are that this builds for.
            let data = Bytes::copy_from_slice(bytemuck::cast_slice(part));
            let bytes = data.len() as u64;
            let piece = v1::OutputPiece { output: output as u32, offset, data };
            let event = v1::execute_event::Event::Piece(piece);
            if events.send(Ok(v1::ExecuteEvent { event: Some(event) })).await.is_err() {
                return false;
            }
            offset += bytes;
        }
    }
    let lane = |used: &LaneUse| v1::LaneSummary {
        lane: active.lane(used.lane),
        busy_ns: used.busy,
        awaiting_receive_ns: used.awaiting_receive,
    };
    let done = v1::ExecuteDone {
        seconds_ns: report.ended.saturating_sub(report.started),
        lanes: report.lanes.iter().map(lane).collect(),
        bytes_sent: report.bytes_sent,
        bytes_received: report.bytes_received,
        tokens,
        wanted: candidate_counts.into_iter().map(wanted).collect(),
        counts,
        steps,
        rows,
        last: last.as_ref().map(convert::segments).unwrap_or_default(),
    };
    let event = v1::execute_event::Event::Done(done);
    events.send(Ok(v1::ExecuteEvent { event: Some(event) })).await.is_ok()
}

/// A deadline by the clock of the executor's threads. In virtual time that of tasks is another, and may be far behind.
fn on_threads(deadline: Instant) -> std::time::Instant {
    std::time::Instant::now() + deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn the_executor_gets_all_of_the_time_that_is_left_in_virtual_time() {
        let left = Duration::from_secs(1);
        let deadline = Instant::now() + left;
        let real = std::time::Instant::now();
        assert!(on_threads(deadline) >= real + left);
    }
}
