//! A request on its way through the queue and the fleet.

use super::{
    AGAIN, Report, SOONER, Session, Tensor,
    batch::{Batch, Sequence, pack, readable},
    batch_queue::Shared,
    stepped::Stepped,
};
use crate::{
    admission::{Ticket, Turn},
    error::RequestError,
    fleet::{Readiness, Run, blocking},
    trace::TracedProgram,
};
use galaxy_common::{BatchShape, RequestId, Segment, Wanted, plan::Phase};
use galaxy_engine::merge::Merged;
use galaxy_model::sentence::{SentenceConfig, VectorForm};
use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// A request on its way through the queue and the fleet.
pub(super) struct QueuedRequest<'a> {
    session: &'a Session,
    ticket: Ticket,
    report: Report,
    programs: Vec<TracedProgram>,
    /// Until when the caller wants the answer; none if the caller does not say.
    deadline: Option<Instant>,
    /// Until when what fails is tried again.
    again: Option<Instant>,
}

impl<'a> QueuedRequest<'a> {
    pub(super) fn new(session: &'a Session, ticket: Ticket, report: Report) -> Self {
        Self { session, ticket, report, programs: Vec::new(), deadline: None, again: None }
    }

    /// Sets the time that the caller gives, from now on.
    pub(super) fn within(mut self, timeout: Option<Duration>) -> Self {
        let begun = Instant::now();
        self.deadline = timeout.and_then(|timeout| begun.checked_add(timeout));
        let allowed = timeout.unwrap_or(self.session.inner.limits.timeout);
        self.again = begun.checked_add(allowed.saturating_sub(2 * AGAIN + SOONER));
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
        outcome: Outcome,
    ) -> Result<Vec<Tensor>, RequestError> {
        let outcome = Arc::new(outcome);
        let max_rows = self.session.fleet_status().max_rows;
        self.report.tokens = sequences.iter().map(|s| u64::from(s.rows)).sum();
        let sequences = readable(self.session.spec(), sequences, wanted)?;
        let mut results: Vec<Option<Tensor>> = vec![None; sequences.len()];
        for batch in pack(&sequences, max_rows, wanted)? {
            let batch = Arc::new(batch);
            let merged = self.shared(&batch, wanted).await?;
            let (session, outcome, of) = (self.session.clone(), outcome.clone(), batch.clone());
            let finish = move || session.finished(merged, &of, &outcome);
            let finished = blocking(finish).await??;
            for (index, tensor) in batch.indices.iter().zip(finished) {
                results[*index] = Some(tensor);
            }
        }
        let missing = || RequestError::Internal { why: "a sequence has no result".to_owned() };
        results.into_iter().collect::<Option<Vec<_>>>().ok_or_else(missing)
    }

    /// Notes how many tokens the request has.
    pub(super) fn count(&mut self, tokens: u64) {
        self.report.tokens = tokens;
    }

    /// The request's number.
    pub(super) fn request(&self) -> RequestId {
        self.report.request
    }

    /// Runs a batch, in its own turn or in that of another batch that takes it along.
    async fn shared(
        &mut self,
        batch: &Arc<Batch>,
        wanted: Wanted,
    ) -> Result<Vec<Merged>, RequestError> {
        let (session, waiting) = (self.session, Instant::now());
        let mut alone = false;
        loop {
            let batch_queue = &session.inner.batch_queue;
            let mut place = batch_queue.wait(session.caller.who(), batch, wanted, self.deadline);
            let mut runs = false;
            let answered = loop {
                tokio::select! {
                    biased;
                    answered = &mut place.answer => break answered,
                    turn = self.turn(), if !runs => {
                        match turn {
                            Ok(turn) => session.run_with_others(turn, &place, alone),
                            Err(error) if place.waits() => return Err(error),
                            Err(_) => {}
                        }
                        runs = true;
                    }
                }
            };
            let broke = |_| RequestError::Internal { why: "a program broke off".to_owned() };
            match answered.map_err(broke)? {
                (Ok(Shared { run, shape, results }), _) => {
                    self.report.queue += waiting.elapsed().saturating_sub(run.took);
                    self.note(&run, Phase::Prefill, shape);
                    return Ok(results);
                }
                // What the cluster mends is run again.
                (Err(error), _) if error.passes() && self.has_time() => {
                    tracing::info!(request = %self.report.request, %error, "runs again");
                    tokio::time::sleep(AGAIN).await;
                }
                // It may have failed because of another batch.
                (Err(error), others) if others > 0 && !error.retryable() => {
                    tracing::info!(request = %self.report.request, %error, "runs alone");
                    alone = true;
                }
                (Err(error), _) => return Err(error),
            }
        }
    }

    /// Whether the caller still waits after another try.
    fn has_time(&self) -> bool {
        self.again.is_none_or(|until| Instant::now() < until)
    }

    /// Waits for the turn, and for a cluster that is ready.
    ///
    /// # Errors
    /// [`RequestError::NoPlan`] when it never will be as things are.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue.
    pub(super) async fn turn(&self) -> Result<Turn, RequestError> {
        loop {
            self.session.ready().await?;
            let turn = self.ticket.turn().await;
            // The fleet itself waits for the end of a move.
            if !matches!(self.session.readiness(), Readiness::Waiting { .. }) {
                return Ok(turn);
            }
        }
    }

    /// Notes a step that a sequence of the request took part in.
    pub(super) fn ran(&mut self, step: &Stepped) {
        self.report.queue += step.queued;
        if self.report.programs == 0 {
            self.report.cached = step.context_len;
        }
        self.note(&step.run, step.phase, step.shape.clone());
    }

    fn note(&mut self, run: &Run, phase: Phase, shape: BatchShape) {
        self.report.add(run);
        let (epoch, sequence, plan) = (run.epoch, run.sequence, run.plan.clone());
        self.programs.push(TracedProgram { epoch, sequence, plan, phase, shape });
    }

    /// Ends the request: remembers it for traces, and gives its report.
    pub(super) fn end(self) -> Report {
        let mut log = self.session.inner.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.push(self.report.request, self.programs);
        self.report
    }
}

impl Session {
    /// Turns the results of a batch into tensors. Blocks.
    fn finished(
        &self,
        results: Vec<Merged>,
        batch: &Batch,
        outcome: &Outcome,
    ) -> Result<Vec<Tensor>, RequestError> {
        let of = results.into_iter().zip(batch.shape.segments()).zip(&batch.indices);
        let tensor = |((merged, segment), index): ((Merged, &Segment), &usize)| match outcome {
            Outcome::Vectors(vectors) => vectors.tensor(self.spec().hidden, *index, merged),
            Outcome::AsItIs => Ok(self.tensor(segment, merged)),
        };
        of.map(tensor).collect()
    }

    fn tensor(&self, segment: &Segment, merged: Merged) -> Tensor {
        let hidden = self.spec().hidden;
        match merged {
            Merged::Hidden(values) => Tensor { shape: vec![segment.rows, hidden], values },
            Merged::Nothing => Tensor { shape: vec![0], values: Vec::new() },
            Merged::Vector(values) | Merged::Classes(values) | Merged::Token(values) => {
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
        }
    }
}

/// How the results of devices become the answer.
pub(super) enum Outcome {
    /// The results are the answer as they are.
    AsItIs,
    /// The results are pooled as far as devices have not, and go through the modules on top.
    Vectors(Vectors),
}

/// How the results of devices become the vectors of texts.
pub(super) struct Vectors {
    pub(super) sentence: Arc<SentenceConfig>,
    /// How many rows of each sequence are not pooled; empty where all are.
    pub(super) skipped: Vec<u32>,
    pub(super) form: VectorForm,
}

impl Vectors {
    /// Vectors as the model's files say.
    pub(super) fn of(sentence: Arc<SentenceConfig>) -> Self {
        Self { sentence, skipped: Vec::new(), form: VectorForm::default() }
    }

    fn tensor(&self, hidden: u32, index: usize, merged: Merged) -> Result<Tensor, RequestError> {
        let pooled = match merged {
            Merged::Vector(values) => values,
            Merged::Hidden(rows) => {
                let skipped = self.skipped.get(index).copied().unwrap_or(0);
                let pooled = self.sentence.pool(&rows, hidden, skipped as usize);
                pooled.ok_or_else(|| {
                    let why = format!(
                        "text {index} has no tokens besides its prompt, whose tokens this model leaves out"
                    );
                    RequestError::Invalid { why }
                })?
            }
            other => {
                let why =
                    format!("{} values came where a vector was asked for", other.values().len());
                return Err(RequestError::Internal { why });
            }
        };
        let values = self.sentence.finish(pooled, self.form);
        Ok(Tensor { shape: vec![values.len() as u32], values })
    }
}
