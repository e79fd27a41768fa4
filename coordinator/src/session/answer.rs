//! A request on its way through the queue and the fleet.

use super::{
    GRACE, READY_WAIT, Report, Session, Tensor,
    batch::{Sequence, pack, readable},
};
use crate::{
    admission::{Ticket, Turn},
    error::RequestError,
    fleet::{DeviceCost, DeviceRun, Readiness, Run, Task, blocking},
    trace::TracedProgram,
};
use galaxy_common::{BatchShape, RequestId, Wanted, plan::Phase};
use galaxy_engine::merge::{Merged, merge};
use galaxy_graph::program::Output;
use std::{
    sync::{PoisonError, atomic::Ordering},
    time::Duration,
};
use tokio::time::Instant;

/// How long a cluster is waited for that was not ready when the turn came.
const AGAIN: Duration = Duration::from_millis(1500);

/// A request on its way.
pub(super) struct Answer<'a> {
    session: &'a Session,
    ticket: Ticket,
    report: Report,
    programs: Vec<TracedProgram>,
    /// Until when the caller wants it, if it says.
    deadline: Option<Instant>,
}

impl<'a> Answer<'a> {
    pub(super) fn new(session: &'a Session, ticket: Ticket, report: Report) -> Self {
        Self { session, ticket, report, programs: Vec::new(), deadline: None }
    }

    /// The time that the caller gives, from now on.
    pub(super) fn within(mut self, timeout: Option<Duration>) -> Self {
        self.deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self
    }

    /// Notes how long tokenising took.
    pub(super) fn tokenized(&mut self, took: Duration) {
        self.report.tokenize = took;
    }

    /// Runs all sequences, in as many programs as it takes; results in the order of the sequences.
    pub(super) async fn run(
        &mut self,
        sequences: Vec<Sequence>,
        wanted: Wanted,
        normalise: bool,
    ) -> Result<Vec<Tensor>, RequestError> {
        let normalise = normalise && self.session.sentence().is_ok_and(|s| s.normalise);
        let max_rows = self.session.outlook().max_rows;
        self.report.tokens = sequences.iter().map(|s| u64::from(s.rows)).sum();
        let sequences = readable(self.session.spec(), sequences, wanted)?;
        let mut results: Vec<Option<Tensor>> = vec![None; sequences.len()];
        for batch in pack(&sequences, max_rows, wanted)? {
            let task = Task::new(batch.shape.clone(), batch.inputs.clone());
            let run = self.program(task).await?;
            let (session, shape) = (self.session.clone(), batch.shape);
            let merged = blocking(move || session.merged(&run, &shape, normalise)).await??;
            for (index, tensor) in batch.indices.into_iter().zip(merged) {
                results[index] = Some(tensor);
            }
        }
        let missing = || RequestError::Internal { why: "a sequence has no result".to_owned() };
        results.into_iter().collect::<Option<Vec<_>>>().ok_or_else(missing)
    }

    /// Notes how many tokens there are.
    pub(super) fn count(&mut self, tokens: u64) {
        self.report.tokens = tokens;
    }

    /// The request's number.
    pub(super) fn request(&self) -> RequestId {
        self.report.request
    }

    /// Waits for the turn and runs one program.
    async fn program(&mut self, task: Task) -> Result<Run, RequestError> {
        let turn = self.turn().await?;
        self.run_in(turn, task).await
    }

    /// Waits for the turn, and for a cluster that is ready.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue.
    pub(super) async fn turn(&mut self) -> Result<Turn, RequestError> {
        let waiting = Instant::now();
        let ran = || self.session.inner.programs.load(Ordering::Relaxed);
        let (mut until, mut before) = (waiting + READY_WAIT, ran());
        let turn = loop {
            self.session.ready(until).await?;
            let turn = self.ticket.turn().await?;
            // The fleet itself waits for the end of a move.
            if !matches!(self.session.readiness(), Readiness::Waiting { .. }) {
                break turn;
            }
            // Waiting behind programs is no waiting for the cluster. One that failed has only now ended its epoch.
            let now = Instant::now();
            until = until.max(now + AGAIN);
            if ran() != before {
                (until, before) = (now + READY_WAIT, ran());
            }
        };
        self.report.queue += waiting.elapsed();
        Ok(turn)
    }

    /// Runs one program in its turn.
    pub(super) async fn run_in(&mut self, turn: Turn, task: Task) -> Result<Run, RequestError> {
        let session = self.session.clone();
        let shape = task.shape.clone();
        let phase = task.going.as_ref().map_or(Phase::Prefill, |going| going.phase);
        // Longer if the caller gives more, and not shorter: what overruns it ends the epoch for all. It is over
        // before the caller's time is: who has no result is named.
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.unwrap_or_default().saturating_sub(GRACE);
        let limit = self.session.inner.limits.timeout.max(left);
        // A task of its own: the program runs to its end, whoever still waits for it.
        let task = tokio::spawn(async move {
            let run = session.inner.fleet.execute(task, limit).await;
            if run.is_ok() {
                session.inner.programs.fetch_add(1, Ordering::Relaxed);
            }
            drop(turn);
            run
        });
        let broke = |e| RequestError::Internal { why: format!("a task broke off: {e}") };
        let run = task.await.map_err(broke)??;
        self.report.execute += run.took;
        self.report.programs += 1;
        self.report.epoch = run.epoch;
        // The plan may have changed since the last one.
        for DeviceRun { name, cost, .. } in &run.devices {
            let known = self.report.devices.iter().position(|(of, _)| of == name);
            let at = known.unwrap_or_else(|| {
                self.report.devices.push((name.clone(), DeviceCost::default()));
                self.report.devices.len() - 1
            });
            let sum = &mut self.report.devices[at].1;
            sum.total_ns += cost.total_ns;
            sum.compute_busy_ns += cost.compute_busy_ns;
            sum.awaiting_receive_ns += cost.awaiting_receive_ns;
            sum.bytes_sent += cost.bytes_sent;
            sum.bytes_received += cost.bytes_received;
        }
        self.programs.push(TracedProgram {
            epoch: run.epoch,
            sequence: run.sequence,
            plan: run.plan.clone(),
            phase,
            shape,
        });
        Ok(run)
    }

    /// A copy of the request's place in the queue.
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket.clone()
    }

    /// Remembers the request for traces.
    pub(super) fn end(self) -> Report {
        let mut log = self.session.inner.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.push(self.report.request, self.programs);
        self.report
    }
}

impl Session {
    /// The results of one program, one for each segment. Blocks.
    fn merged(
        &self,
        run: &Run,
        shape: &BatchShape,
        normalise: bool,
    ) -> Result<Vec<Tensor>, RequestError> {
        let parts: Vec<(&[Output], &[Vec<f32>])> =
            run.devices.iter().map(|d| (&d.outputs[..], &d.values[..])).collect();
        let merged = merge(self.spec(), shape, &parts)
            .map_err(|e| RequestError::Internal { why: e.to_string() })?;
        let hidden = self.spec().hidden;
        let tensors =
            merged.into_iter().zip(shape.segments()).map(|(merged, segment)| match merged {
                Merged::Hidden(values) => Tensor { shape: vec![segment.rows, hidden], values },
                Merged::Vector(mut values) => {
                    if normalise {
                        to_unit_length(&mut values);
                    }
                    Tensor { shape: vec![hidden], values }
                }
                Merged::Nothing => Tensor { shape: vec![0], values: Vec::new() },
                Merged::Classes(values) | Merged::Token(values) => {
                    Tensor { shape: vec![values.len() as u32], values }
                }
                Merged::Logits { rows, values } => {
                    let vocabulary = self.spec().vocabulary;
                    let shape = match segment.wanted {
                        Wanted::LastLogits => vec![vocabulary],
                        _ => vec![rows, vocabulary],
                    };
                    Tensor { shape, values }
                }
            });
        Ok(tensors.collect())
    }
}

/// Scales to length one; what has no length stays.
fn to_unit_length(values: &mut [f32]) {
    let length = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    if length > 1e-12 {
        values.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_length() {
        let mut values = [3.0, 4.0];
        to_unit_length(&mut values);
        assert_eq!(values, [0.6, 0.8]);
        let mut zero = [0.0; 3];
        to_unit_length(&mut zero);
        assert_eq!(zero, [0.0; 3]);
    }
}
