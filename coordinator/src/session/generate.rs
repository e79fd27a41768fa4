//! Texts that go on: stints of tokens, in turns with other requests, over changes of the plan.

mod telling;
mod way;

pub use telling::{Finish, Listener, Said};

use super::{READY_WAIT, Session, answer::Answer};
use crate::error::RequestError;
use galaxy_common::{Cache, GenerateOptions, Prompt};
use galaxy_proto::WAITING;
use std::time::Duration;
use telling::Telling;
use tokio::{
    sync::mpsc,
    time::{Instant, interval, sleep_until, timeout_at},
};
use way::Way;

/// How long a text waits for its cluster to come back before it is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between looks at a cluster that is gone.
const PAUSE: Duration = Duration::from_millis(100);

/// Whether a text may go on after this.
fn passes(error: &RequestError) -> bool {
    match error {
        RequestError::DeviceFailed { retryable, .. } => *retryable,
        RequestError::Unavailable { .. }
        | RequestError::DeviceLost { .. }
        | RequestError::TextLost { .. } => true,
        _ => false,
    }
}

impl Session {
    /// Goes on with a text, and says each token as it is made. Ends when nobody listens any more,
    /// after the stint that runs then. Runs to its end even where the cluster changes its plan or
    /// loses a device meanwhile, if within 30 s that comes back or the others go on without it.
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
        let begun = Instant::now();
        let allowed = timeout.unwrap_or(Duration::from_secs(24 * 3600));
        let deadline = begun + allowed;
        let late = RequestError::Deadline { allowed, ours: false };
        self.generates()?;
        let mut answer = self.begin()?;
        let (mut way, stop, tokenized) = self.way(prompt, options).await?;
        answer.tokenized(tokenized);
        let rows = Cache::taken(way.text.rows);
        let room = self.inner.room.take(self.caller.who(), rows);
        let waits = async {
            let mut ticks = interval(WAITING);
            loop {
                ticks.tick().await;
                // One that does not read now reads later.
                drop(listener.try_send(Ok(Said::Waiting)));
            }
        };
        let _room = tokio::select! {
            biased;
            room = timeout_at(deadline, room) => room.map_err(|_| late.clone())?,
            // Whoever goes meanwhile leaves the queue.
            () = listener.closed() => return Ok(()),
            never = waits => match never {},
        };
        // Who is told that it begins is not told to try again.
        tokio::select! {
            biased;
            ready = self.ready(Instant::now() + READY_WAIT) => ready?,
            () = listener.closed() => return Ok(()),
            () = sleep_until(deadline) => return Err(late),
        }
        let tokenizer = self.inner.files.tokenizer().ok();
        let stream = tokenizer.map(|tokenizer| tokenizer.stream(way.behind()));
        let readable = stream.is_some();
        let mut telling = Telling::new(stream, stop, listener, &self.inner.room);
        let said = Said::Begun {
            request: answer.request(),
            prompt: way.text.prompt as u32,
            seed: way.text.sampling.seed,
            text: readable,
        };
        let result = match telling.say(said).await {
            true => self.stints(&mut way, &mut answer, &mut telling, (deadline, late)).await,
            false => Ok(None),
        };
        if let Some((epoch, _)) = way.kept {
            self.inner.fleet.forget(epoch, way.text.slot).await;
        }
        answer.count(way.text.tokens.len() as u64);
        let report = answer.end();
        if let Some(finish) = result? {
            let text = telling.rest()?;
            telling.say(Said::Done { finish, text, report }).await;
        }
        Ok(())
    }

    /// Makes all tokens. Nothing when nobody listens any more.
    async fn stints(
        &self,
        way: &mut Way,
        answer: &mut Answer<'_>,
        telling: &mut Telling<'_>,
        (deadline, late): (Instant, RequestError),
    ) -> Result<Option<Finish>, RequestError> {
        let mut patience = None;
        loop {
            if way.left() == 0 {
                return Ok(Some(Finish::Length));
            }
            if telling.listener.is_closed() {
                return Ok(None);
            }
            if Instant::now() >= deadline {
                return Err(late);
            }
            let (tell, mut told) = mpsc::unbounded_channel();
            // What a program may have depends on the plan, which may be another.
            let task = way.next(self.outlook().max_rows, tell)?;
            let (before, segment) = (way.made(), task.shape.segments()[0]);
            let begun = Instant::now();
            let turn = tokio::select! {
                turn = answer.turn() => turn,
                // Nobody waits in the queue for who does not want it.
                () = telling.listener.closed() => return Ok(None),
                () = sleep_until(deadline) => return Err(late),
            };
            let ran = {
                let running = async { answer.run_in(turn?, task).await };
                tokio::pin!(running);
                loop {
                    tokio::select! {
                        biased;
                        Some(one) = told.recv() => telling.take(way, one),
                        ran = &mut running => break ran,
                    }
                }
            };
            while let Ok(one) = told.try_recv() {
                telling.take(way, one);
            }
            if let Some(finish) = telling.finish.take() {
                if let (Ok(run), None) = (&ran, way.kept) {
                    // Where room is to be given back.
                    way.kept = Some((run.epoch, 0));
                }
                telling.flush().await;
                return finish.map(Some);
            }
            let made = way.made() - before;
            if made > 0 {
                patience = None;
            }
            match ran {
                Ok(run) => {
                    // The last token has gone through no layer yet.
                    let rows = segment.rows + made.saturating_sub(1);
                    way.kept = Some((run.epoch, segment.past + rows));
                    way.breadth = run.breadth.unwrap_or(way.breadth);
                    // What goes well is no waiting.
                    if let Some(until) = &mut patience {
                        *until += begun.elapsed();
                    }
                }
                // Once something was told, or is kept.
                Err(error)
                    if passes(&error)
                        && (way.kept.is_some() || patience.is_some() || way.made() > 0) =>
                {
                    way.kept = None;
                    let until = *patience.get_or_insert_with(|| Instant::now() + PATIENCE);
                    if Instant::now() >= until {
                        return Err(error);
                    }
                    tracing::info!(request = %answer.request(), %error, "a text begins again");
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
            if !telling.flush().await {
                return Ok(None);
            }
        }
    }
}
