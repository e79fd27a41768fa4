//! Sequences that generate tokens: in steps together with those of others, over changes of the plan.

mod steps;
mod telling;
mod way;

pub use telling::{Finish, Listener, Said};

pub use steps::Sequences;
pub(super) use steps::{Stepped, Steps};

use super::{AGAIN, Session, answer::Answer};
use crate::{error::RequestError, fleet::Readiness};
use galaxy_common::{GenerateOptions, Prompt};
use galaxy_engine::generate::Told;
use galaxy_proto::WAITING;
use std::{future::pending, time::Duration};
use steps::{Answered, Between, Came, WaitingSequence};
use telling::Telling;
use tokio::{
    sync::mpsc::{self, UnboundedReceiver},
    time::{Instant, interval_at, sleep_until},
};
use way::Way;

/// How long a client is waited for that does not read.
const PATIENCE: Duration = Duration::from_secs(30);

/// Until when a sequence is worked on.
struct Until {
    /// The time that its caller gives, if it gives any,
    deadline: Option<Instant>,
    /// and the error when that is over.
    late: RequestError,
    /// Without: how long it waits for its cluster between two tokens,
    patience: Duration,
    /// and until when, if it waits.
    ready: Option<Instant>,
}

impl Until {
    /// From now on.
    fn of(timeout: Option<Duration>, patience: Duration) -> Self {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let late = RequestError::Deadline { allowed: timeout.unwrap_or_default(), ours: false };
        Self { deadline, late, patience, ready: None }
    }

    /// The cluster is not ready, or has failed: until when that is borne.
    fn unready(&mut self) -> Instant {
        let ours = *self.ready.get_or_insert_with(|| Instant::now() + self.patience);
        self.deadline.unwrap_or(ours)
    }

    /// Whether a cluster in this state is waited for still, between two looks at it. While it is ready, it is
    /// others that are waited for.
    fn bears(&mut self, readiness: &Readiness) -> bool {
        match readiness {
            Readiness::Ready(_) => {
                self.went_well(WAITING);
                true
            }
            Readiness::Moving { .. } | Readiness::Waiting { .. } => Instant::now() < self.unready(),
        }
    }

    /// What went well for so long is no waiting.
    fn went_well(&mut self, took: Duration) {
        if let Some(ready) = &mut self.ready {
            *ready += took;
        }
    }
}

impl Session {
    /// Generates tokens behind a prompt, and says each as it comes. Ends when nobody listens any more,
    /// after the step that runs then. Runs to its end even where the cluster starts, changes its plan or
    /// loses a device meanwhile. Without a timeout it waits for that as long as [`super::Limits::timeout`] says from one
    /// token to the next; waiting for room behind others counts against nothing.
    ///
    /// # Cancel safety
    /// Not to be dropped before it is done: room is given back in its end.
    pub async fn generate(
        &self,
        prompt: Prompt,
        options: GenerateOptions,
        timeout: Option<Duration>,
        listener: Listener,
    ) {
        let result = self.go_on(prompt, options, timeout, &listener).await;
        self.inner.counts.end(result.is_ok());
        if let Err(error) = result {
            drop(listener.send_timeout(Err(error), PATIENCE).await);
        }
    }

    async fn go_on(
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
        let (mut way, stop, tokenized) = self.way(prompt, options).await?;
        answer.tokenized(tokenized);
        let tokenizer = self.inner.files.tokenizer().ok();
        let stream = tokenizer.map(|tokenizer| tokenizer.stream(way.behind()));
        let said = Said::Begun {
            request: answer.request(),
            prompt: way.text.prompt as u32,
            seed: way.text.sampling.seed,
            text: stream.is_some(),
            generated: generated.len() as u32,
        };
        let mut telling = Telling::new(stream, stop, listener, &self.inner.steps, said);
        telling.resume(&mut way, &generated);
        let result = self.steps(&mut way, &mut answer, &mut telling, until).await;
        let (epoch, forgotten) = self.inner.steps.depart(self.caller.who(), &way);
        for slot in forgotten {
            self.inner.fleet.forget(epoch, slot).await;
        }
        answer.count(way.text.tokens.len() as u64);
        let report = answer.end();
        if let Some(finish) = result? {
            // One that goes on behind all its tokens has no step.
            telling.begin();
            if !telling.flush().await {
                return Ok(());
            }
            let text = telling.rest()?;
            telling.say(Said::Done { finish, text, report }).await;
        }
        Ok(())
    }

    /// Generates all tokens. Nothing when nobody listens any more.
    async fn steps(
        &self,
        way: &mut Way,
        answer: &mut Answer<'_>,
        telling: &mut Telling<'_>,
        mut until: Until,
    ) -> Result<Option<Finish>, RequestError> {
        let mut between: Option<Between> = None;
        // What goes on behind tokens may end with the last of them.
        if let Some(finish) = self.said(telling).await? {
            return Ok(finish);
        }
        loop {
            if way.left() == 0 {
                return Ok(Some(Finish::Length));
            }
            if telling.listener.is_closed() {
                return Ok(None);
            }
            if until.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(self.late(until.late));
            }
            let (tell, mut told) = mpsc::unbounded_channel();
            let (before, begun) = (way.made(), Instant::now());
            let place = self.inner.steps.wait(self.caller.who(), way.wish(tell));
            drop(between.take());
            // Who can begin does not wait for all of the burst that runs.
            if way.kept.is_none() && self.inner.steps.has_room(way.text.tokens.len()) {
                self.inner.fleet.end_burst();
            }
            let stepped = self.step(place, way, answer, telling, &mut told, &mut until);
            let Some(Answered { came, between: still }) = stepped.await? else { return Ok(None) };
            while let Ok(one) = told.try_recv() {
                telling.take(way, one);
            }
            let made = way.made() - before;
            if made > 0 {
                until.ready = None;
            }
            let failed = match came {
                Came::Evicted => {
                    way.kept = None;
                    None
                }
                Came::Step(Ok(step), _) => {
                    answer.ran(&step);
                    way.ran(&step, made);
                    telling.begin();
                    until.went_well(begun.elapsed());
                    None
                }
                // It has all that it needs.
                Came::Step(Err(_), _) if telling.finish.is_some() => None,
                Came::Step(Err(error), together) => way.failed(error, together)?,
            };
            // Nobody waits for one that ends, or whose client does not keep up.
            let waits = failed.is_none() && telling.finish.is_none() && !telling.waits();
            between = waits.then_some(still);
            if let Some(error) = failed {
                if Instant::now() + AGAIN >= until.unready() {
                    return Err(error);
                }
                tracing::info!(request = %answer.request(), %error, "a sequence begins again");
                tokio::time::sleep(AGAIN).await;
            }
            if let Some(finish) = self.said(telling).await? {
                return Ok(finish);
            }
        }
    }

    /// Has a sequence leave that wants no more. False while a step runs with it, which ends early then.
    fn leave(&self, place: &WaitingSequence) -> bool {
        let left = place.leave();
        if !left {
            self.inner.fleet.end_burst();
        }
        left
    }

    /// Says what waits to be said. Some when the sequence ends by that: because of a token, or since nobody
    /// listens any more.
    async fn said(
        &self,
        telling: &mut Telling<'_>,
    ) -> Result<Option<Option<Finish>>, RequestError> {
        let heard = telling.flush().await;
        match telling.finish.take() {
            Some(finish) => finish.map(|finish| Some(Some(finish))),
            None if !heard => Ok(Some(None)),
            None => Ok(None),
        }
    }

    /// Waits until a step has run with a sequence, and runs steps for all while it has the turn. None when nobody
    /// listens any more.
    async fn step(
        &self,
        mut place: WaitingSequence,
        way: &mut Way,
        answer: &Answer<'_>,
        telling: &mut Telling<'_>,
        told: &mut UnboundedReceiver<Told>,
        until: &mut Until,
    ) -> Result<Option<Answered>, RequestError> {
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
                            telling.take(way, one);
                            if telling.finish.is_some() {
                                self.inner.fleet.end_burst();
                            }
                        }
                        answered = &mut place.answer => {
                            return answered.map(Some).map_err(broke);
                        }
                        turn = &mut turn, if free => break turn,
                        // Nobody waits in the queue for who does not want it.
                        () = telling.listener.closed(), if free => match self.leave(&place) {
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
                                telling.waiting(&readiness);
                                if !until.bears(&readiness) && place.leave() {
                                    return Err(self.late(late));
                                }
                            }
                            false => telling.begin(),
                        },
                    }
                }
            };
            match turn {
                // A step with it has ended just now: its answer comes.
                _ if !place.waits() => free = false,
                Ok(turn) => {
                    changes.mark_unchanged();
                    runnable = self.lead(turn).await;
                }
                Err(error) => {
                    place.leave();
                    let (came, between) = (Came::Step(Err(error), 1), self.inner.steps.between());
                    return Ok(Some(Answered { came, between }));
                }
            }
        }
    }
}

/// Waits until then; for ever, if there is no such time.
async fn over(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
