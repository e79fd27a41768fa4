//! Sequences that generate tokens: in steps together with those of others, over changes of the plan.

mod events;
mod sequence;
mod steps;

pub use events::{Finish, GenerateEvent, Listener};

pub use steps::Sequences;
pub(super) use steps::Steps;

use super::{AGAIN, Session, answer::QueuedRequest};
use crate::{error::RequestError, fleet::Readiness};
use events::EventStream;
use galaxy_common::{GenerateOptions, Prompt};
use galaxy_engine::generate::TokenEvent;
use galaxy_proto::WAITING;
use sequence::SequenceState;
use std::{future::pending, time::Duration};
use steps::{Answered, RejoinGuard, StepOutcome, WaitingSequence};
use tokio::{
    sync::mpsc::{self, UnboundedReceiver},
    time::{Instant, interval_at, sleep_until},
};

/// How long a client that does not read is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// Until when a sequence is worked on.
struct Until {
    /// When the time that the caller gives is over; none if the caller gives none.
    deadline: Option<Instant>,
    /// The error when that time is over.
    late: RequestError,
    /// How long the sequence waits for its cluster between two tokens, if there is no deadline.
    patience: Duration,
    /// Until when the sequence waits for its cluster; none while it does not wait.
    ready: Option<Instant>,
}

impl Until {
    /// The limits of a sequence that begins now.
    fn of(timeout: Option<Duration>, patience: Duration) -> Self {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let late = RequestError::Deadline { allowed: timeout.unwrap_or_default(), ours: false };
        Self { deadline, late, patience, ready: None }
    }

    /// Notes that the cluster is not ready, or has failed. Gives until when that is borne.
    fn unready(&mut self) -> Instant {
        let ours = *self.ready.get_or_insert_with(|| Instant::now() + self.patience);
        self.deadline.unwrap_or(ours)
    }

    /// Whether a cluster in this state is still waited for, from one look at it to the next. While it is ready, it is
    /// other sequences that are waited for.
    fn bears(&mut self, readiness: &Readiness) -> bool {
        match readiness {
            Readiness::Ready(_) => {
                self.went_well(WAITING);
                true
            }
            Readiness::Moving { .. } | Readiness::Waiting { .. } => Instant::now() < self.unready(),
        }
    }

    /// Notes that all went well for `took`, which does not count as waiting.
    fn went_well(&mut self, took: Duration) {
        if let Some(ready) = &mut self.ready {
            *ready += took;
        }
    }
}

/// A sequence that generates tokens for whoever listens.
struct Generation<'a> {
    /// The state of the sequence.
    state: SequenceState,
    /// Its token stream.
    events: EventStream<'a>,
    /// Until when it is worked on.
    until: Until,
}

impl Session {
    /// Generates tokens behind a prompt, and sends each as it comes. Ends when nobody listens any more, after the step
    /// that runs then. Runs to its end even where the cluster starts, changes its plan or loses a device meanwhile.
    /// Without a timeout it waits for that as long as [`super::Limits::timeout`] says from one token to the next;
    /// waiting for room behind others does not count.
    ///
    /// # Cancel safety
    /// Not to be dropped before it is done: only its end gives back its blocks.
    pub async fn generate(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
        timeout: Option<Duration>,
        listener: Listener,
    ) {
        let result = self.run_generation(prompt, options, timeout, &listener).await;
        self.inner.counts.end(result.is_ok());
        if let Err(error) = result {
            drop(listener.send_timeout(Err(error), PATIENCE).await);
        }
    }

    async fn run_generation(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
        timeout: Option<Duration>,
        listener: &Listener,
    ) -> Result<(), RequestError> {
        let until = Until::of(timeout, self.inner.limits.timeout);
        self.generates()?;
        let mut answer = self.begin()?;
        let generated = options.generated.clone();
        let (mut state, stop, tokenized) = self.sequence_state(prompt, options).await?;
        answer.tokenized(tokenized);
        let tokenizer = self.inner.files.tokenizer().ok();
        let stream = tokenizer.map(|tokenizer| tokenizer.stream(state.prompt_tokens()));
        let event = GenerateEvent::Begun {
            request: answer.request(),
            prompt: state.sequence.prompt as u32,
            seed: state.sequence.sampling.seed,
            text: stream.is_some(),
            generated: generated.len() as u32,
        };
        let mut events = EventStream::new(stream, stop, listener, &self.inner.steps, event);
        events.resume(&mut state, &generated);
        let mut generation = Generation { state, events, until };
        let result = self.steps(&mut generation, &mut answer).await;
        let Generation { state, mut events, .. } = generation;
        let (epoch, forgotten) =
            self.inner.steps.depart(self.caller.who(), &state.sequence, state.reusable_rows());
        for slot in forgotten {
            self.inner.fleet.forget(epoch, slot).await;
        }
        answer.count(state.sequence.tokens.len() as u64);
        let report = answer.end();
        if let Some(finish) = result? {
            // A sequence that has all its tokens already has no step.
            events.begin();
            if !events.flush().await {
                return Ok(());
            }
            let text = events.rest()?;
            events.send(GenerateEvent::Done { finish, text, report }).await;
        }
        Ok(())
    }

    /// Generates all tokens. None when nobody listens any more.
    async fn steps(
        &self,
        generation: &mut Generation<'_>,
        answer: &mut QueuedRequest<'_>,
    ) -> Result<Option<Finish>, RequestError> {
        let mut between: Option<RejoinGuard> = None;
        // A sequence that resumes may end with the last token that it has.
        if let Some(finish) = self.flush_events(&mut generation.events).await? {
            return Ok(finish);
        }
        loop {
            let Generation { state, events, until } = generation;
            if state.left() == 0 {
                return Ok(Some(Finish::Length));
            }
            if events.listener.is_closed() {
                return Ok(None);
            }
            if until.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(self.late(until.late.clone()));
            }
            let (tell, mut told) = mpsc::unbounded_channel();
            let (before, begun) = (state.generated(), Instant::now());
            let place = self.inner.steps.wait(self.caller.who(), state.request(tell));
            drop(between.take());
            // A sequence that can begin does not wait for all of the burst that runs.
            if state.cached.is_none() && self.inner.steps.has_room(state.sequence.tokens.len()) {
                self.inner.fleet.end_burst();
            }
            let stepped = self.step(place, generation, answer, &mut told);
            let Some(Answered { came, between: still }) = stepped.await? else { return Ok(None) };
            let Generation { state, events, until } = generation;
            while let Ok(one) = told.try_recv() {
                events.take(state, one);
            }
            let made = state.generated() - before;
            if made > 0 {
                until.ready = None;
            }
            let failed = match came {
                StepOutcome::Evicted => {
                    state.cached = None;
                    None
                }
                StepOutcome::Step(Ok(step), _) => {
                    answer.ran(&step);
                    state.ran(&step, made);
                    events.begin();
                    until.went_well(begun.elapsed());
                    None
                }
                // The sequence has all that it needs.
                StepOutcome::Step(Err(_), _) if events.finish.is_some() => None,
                StepOutcome::Step(Err(error), together) => state.failed(error, together)?,
            };
            // The next step does not wait for a sequence that ends, or whose client does not keep up.
            let waits = failed.is_none() && events.finish.is_none() && !events.waits();
            between = waits.then_some(still);
            if let Some(error) = failed {
                if Instant::now() + AGAIN >= until.unready() {
                    return Err(error);
                }
                tracing::info!(request = %answer.request(), %error, "a sequence begins again");
                tokio::time::sleep(AGAIN).await;
            }
            if let Some(finish) = self.flush_events(events).await? {
                return Ok(finish);
            }
        }
    }

    /// Takes out a sequence that wants no more. False while a step runs with it, which ends early then.
    fn leave(&self, place: &WaitingSequence) -> bool {
        let left = place.leave();
        if !left {
            self.inner.fleet.end_burst();
        }
        left
    }

    /// Sends what waits to be sent. Some when the sequence ends by that: because of a token, or since nobody listens
    /// any more.
    async fn flush_events(
        &self,
        events: &mut EventStream<'_>,
    ) -> Result<Option<Option<Finish>>, RequestError> {
        let heard = events.flush().await;
        match events.finish.take() {
            Some(finish) => finish.map(|finish| Some(Some(finish))),
            None if !heard => Ok(Some(None)),
            None => Ok(None),
        }
    }

    /// Waits until a step has run with a sequence, and runs steps for all sequences while it has the turn. None when
    /// nobody listens any more.
    async fn step(
        &self,
        mut place: WaitingSequence,
        generation: &mut Generation<'_>,
        answer: &QueuedRequest<'_>,
        told: &mut UnboundedReceiver<TokenEvent>,
    ) -> Result<Option<Answered>, RequestError> {
        let Generation { state, events, until } = generation;
        let (deadline, late) = (until.deadline, until.late.clone());
        let mut changes = self.inner.steps.changes();
        // Whether there may be something to run, and whether the sequence can leave: not while a step with it runs.
        let (mut runnable, mut free) = (true, true);
        let mut ticks = interval_at(Instant::now() + WAITING, WAITING);
        let broke = |_| RequestError::Internal { why: "a step broke off".to_owned() };
        loop {
            let turn = {
                let turn = async {
                    if !runnable {
                        drop(changes.changed().await);
                    }
                    answer.turn().await
                };
                tokio::pin!(turn);
                loop {
                    tokio::select! {
                        biased;
                        Some(one) = told.recv() => {
                            events.take(state, one);
                            if events.finish.is_some() {
                                self.inner.fleet.end_burst();
                            }
                        }
                        answered = &mut place.answer => {
                            return answered.map(Some).map_err(broke);
                        }
                        turn = &mut turn, if free => break turn,
                        // A sequence whose listener is gone does not wait in the queue.
                        () = events.listener.closed(), if free => match self.leave(&place) {
                            true => return Ok(None),
                            false => free = false,
                        },
                        () = over(deadline), if free => match self.leave(&place) {
                            true => return Err(self.late(late)),
                            false => free = false,
                        },
                        _ = ticks.tick() => match place.waits() {
                            true => {
                                let readiness = self.readiness();
                                events.waiting(&readiness);
                                if !until.bears(&readiness) && place.leave() {
                                    return Err(self.late(late));
                                }
                            }
                            false => events.begin(),
                        },
                    }
                }
            };
            match turn {
                // A step with the sequence has ended just now: its answer comes.
                _ if !place.waits() => free = false,
                Ok(turn) => {
                    changes.mark_unchanged();
                    runnable = self.lead(turn).await;
                }
                Err(error) => {
                    place.leave();
                    let (came, between) =
                        (StepOutcome::Step(Err(error), 1), self.inner.steps.between());
                    return Ok(Some(Answered { came, between }));
                }
            }
        }
    }
}

/// Waits until the deadline; for ever, if there is none.
async fn over(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
