//! What a worker is doing, as a pure state machine: no clock, no sockets, no threads.
//!
//! The async shell keeps one [`WorkerState`] in a watch channel; tasks change it through the events
//! below and wait for it to become what they need.

use galaxy_common::{Epoch, SequenceNumber};
use std::collections::BTreeSet;

/// The most programs that may wait behind the one that runs.
pub const QUEUE: usize = 4;

/// The state of a worker: its epoch, its phase and its queue of programs.
#[derive(Clone, Default, Debug)]
pub struct WorkerState {
    epoch: Epoch,
    phase: Phase,
    draining: bool,
    waiting: BTreeSet<SequenceNumber>,
    running: Option<SequenceNumber>,
    started: Option<SequenceNumber>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Phase {
    #[default]
    Idle,
    Placing,
    Ready,
    /// The device, or a link of it, is being measured.
    Measuring,
}

/// Why the state machine refuses an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An epoch that is not the current one.
    #[error("epoch {asked} is stale or unknown here: this worker is in epoch {current}")]
    StaleEpoch {
        /// The epoch that was asked for.
        asked: Epoch,
        /// The epoch of this worker.
        current: Epoch,
    },
    /// The epoch is still being placed, or was cancelled.
    #[error("epoch {epoch} is not placed here")]
    NotPlaced {
        /// The epoch that was asked for.
        epoch: Epoch,
    },
    /// The worker holds a place in a plan, where it must not.
    #[error("it holds a place in a plan (epoch {epoch}): stop the coordinator, and measure then")]
    Placed {
        /// The epoch of that plan.
        epoch: Epoch,
    },
    /// The device, or a link of it, is being measured.
    #[error("it is being measured: try again when that is over")]
    Measuring,
    /// No more requests are taken.
    #[error("the worker is draining")]
    Draining,
    /// The queue is full.
    #[error("{QUEUE} programs wait already")]
    Overloaded,
    /// A sequence number that was started or waits already, or that a later one overtook.
    #[error("sequence number {asked} comes too late: {started} was started, or waits, already")]
    OutOfOrder {
        /// The sequence number that was asked for.
        asked: SequenceNumber,
        /// The latest sequence number that was started.
        started: SequenceNumber,
    },
}

/// Whether a program may start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// The program may start now.
    Start,
    /// Other programs are before it.
    Wait,
    /// The program can never start: its epoch is over.
    Gone,
}

impl WorkerState {
    /// The coordinator places `epoch`: everything of earlier epochs is over.
    ///
    /// # Errors
    /// When that epoch or a later one is known already, or the worker is draining.
    pub fn place(&mut self, epoch: Epoch) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        if self.phase == Phase::Measuring {
            return Err(Refusal::Measuring);
        }
        if epoch <= self.epoch {
            return Err(Refusal::StaleEpoch { asked: epoch, current: self.epoch });
        }
        let draining = self.draining;
        *self = Self { epoch, phase: Phase::Placing, draining, ..Self::default() };
        Ok(())
    }

    /// Begins a measurement of the device, or of a link of it: nothing else happens meanwhile.
    ///
    /// # Errors
    /// When it holds a place, is measured already, or is draining.
    pub fn measure(&mut self) -> Result<(), Refusal> {
        match self.phase {
            _ if self.draining => Err(Refusal::Draining),
            Phase::Measuring => Err(Refusal::Measuring),
            // A program of a cancelled epoch may still run.
            Phase::Idle if self.running.is_none() => {
                self.phase = Phase::Measuring;
                Ok(())
            }
            _ => Err(Refusal::Placed { epoch: self.epoch }),
        }
    }

    /// Ends the measurement.
    pub fn measured(&mut self) {
        if self.phase == Phase::Measuring {
            self.phase = Phase::Idle;
        }
    }

    /// The shard is held and the links are formed. False when the epoch is over meanwhile.
    pub fn placed(&mut self, epoch: Epoch) -> bool {
        let current = self.epoch == epoch && self.phase == Phase::Placing;
        if current {
            self.phase = Phase::Ready;
        }
        current
    }

    /// The coordinator cancels `epoch`, or its placement failed. False when it is over already.
    pub fn cancel(&mut self, epoch: Epoch) -> bool {
        let current = self.is_current(epoch);
        if current {
            self.phase = Phase::Idle;
            self.waiting.clear();
        }
        current
    }

    /// Takes a program into the queue.
    ///
    /// # Errors
    /// When the program may not wait here.
    pub fn admit(&mut self, epoch: Epoch, sequence: SequenceNumber) -> Result<(), Refusal> {
        if epoch != self.epoch {
            return Err(Refusal::StaleEpoch { asked: epoch, current: self.epoch });
        }
        if self.phase != Phase::Ready {
            return Err(Refusal::NotPlaced { epoch });
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        if let Some(started) = self.started.filter(|started| sequence <= *started) {
            return Err(Refusal::OutOfOrder { asked: sequence, started });
        }
        if self.waiting.contains(&sequence) {
            return Err(Refusal::OutOfOrder { asked: sequence, started: sequence });
        }
        if self.waiting.len() >= QUEUE {
            return Err(Refusal::Overloaded);
        }
        self.waiting.insert(sequence);
        Ok(())
    }

    /// Whether an admitted program may start. Programs start in sequence order, one at a time.
    pub fn turn(&self, epoch: Epoch, sequence: SequenceNumber) -> Turn {
        if epoch != self.epoch || self.phase != Phase::Ready || !self.waiting.contains(&sequence) {
            Turn::Gone
        } else if self.running.is_some() || self.waiting.first() != Some(&sequence) {
            Turn::Wait
        } else {
            Turn::Start
        }
    }

    /// Starts a program if it is its turn.
    pub fn start(&mut self, epoch: Epoch, sequence: SequenceNumber) -> Turn {
        let turn = self.turn(epoch, sequence);
        if turn == Turn::Start {
            self.waiting.remove(&sequence);
            (self.running, self.started) = (Some(sequence), Some(sequence));
        }
        turn
    }

    /// Removes an admitted program: it is done, failed, or was given up.
    pub fn leave(&mut self, epoch: Epoch, sequence: SequenceNumber) {
        if epoch == self.epoch {
            self.waiting.remove(&sequence);
            if self.running == Some(sequence) {
                self.running = None;
            }
        }
    }

    /// Takes no more requests, or takes them again.
    pub fn drain(&mut self, on: bool) {
        self.draining = on;
    }

    /// Whether an epoch is being placed.
    pub fn placing(&self) -> bool {
        self.phase == Phase::Placing
    }
    /// Whether an epoch is being placed, or is ready.
    pub fn has_epoch(&self) -> bool {
        self.is_current(self.epoch)
    }
    /// Whether the device, or a link of it, is being measured.
    pub fn measuring(&self) -> bool {
        self.phase == Phase::Measuring
    }
    /// The current epoch, or the last one.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
    /// Whether `epoch` is being placed or ready.
    pub fn is_current(&self, epoch: Epoch) -> bool {
        self.epoch == epoch && matches!(self.phase, Phase::Placing | Phase::Ready)
    }
    /// The program that runs.
    pub fn running(&self) -> Option<SequenceNumber> {
        self.running
    }
    /// Whether no more requests are taken.
    pub fn draining(&self) -> bool {
        self.draining
    }
    /// Whether nothing runs and nothing waits.
    pub fn quiet(&self) -> bool {
        self.running.is_none() && self.waiting.is_empty()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const E: Epoch = Epoch(5);
    fn seq(n: u64) -> SequenceNumber {
        SequenceNumber(n)
    }
    fn ready() -> WorkerState {
        let mut state = WorkerState::default();
        state.place(E).unwrap();
        assert!(state.placed(E));
        state
    }

    #[test]
    fn programs_start_in_order_one_at_a_time() {
        let mut state = ready();
        for n in [2, 1, 3] {
            state.admit(E, seq(n)).unwrap();
        }
        assert_eq!(state.start(E, seq(2)), Turn::Wait);
        assert_eq!(state.start(E, seq(1)), Turn::Start);
        assert_eq!(state.start(E, seq(2)), Turn::Wait);
        state.leave(E, seq(1));
        assert_eq!(state.start(E, seq(2)), Turn::Start);
        let late = Refusal::OutOfOrder { asked: seq(1), started: seq(2) };
        assert_eq!(state.admit(E, seq(1)), Err(late));
        assert!(matches!(state.admit(E, seq(3)), Err(Refusal::OutOfOrder { .. })));
        state.leave(E, seq(2));
        state.leave(E, seq(3));
        assert!(state.quiet());
    }

    #[test]
    fn a_full_program_queue_answers_overloaded() {
        let mut state = ready();
        for n in 0..QUEUE as u64 {
            state.admit(E, seq(n)).unwrap();
        }
        assert_eq!(state.admit(E, seq(99)), Err(Refusal::Overloaded));
        // The one that starts makes room.
        assert_eq!(state.start(E, seq(0)), Turn::Start);
        state.admit(E, seq(99)).unwrap();
    }

    #[test]
    fn stale_epochs_are_rejected_and_later_epochs_replace_the_current() {
        let mut state = ready();
        state.admit(E, seq(1)).unwrap();
        assert!(matches!(state.place(E), Err(Refusal::StaleEpoch { .. })));
        assert!(matches!(state.place(Epoch(4)), Err(Refusal::StaleEpoch { .. })));
        state.place(Epoch(6)).unwrap();
        assert_eq!(state.turn(E, seq(1)), Turn::Gone);
        assert!(matches!(state.admit(E, seq(2)), Err(Refusal::StaleEpoch { .. })));
        assert_eq!(
            state.admit(Epoch(6), seq(1)),
            Err(Refusal::NotPlaced { epoch: Epoch(6) }),
            "still placing"
        );
        assert!(!state.placed(E), "the old placement came too late");
        assert!(state.placed(Epoch(6)));
        state.leave(E, seq(1));
        state.admit(Epoch(6), seq(0)).unwrap();
    }

    #[test]
    fn cancel_ends_an_epoch_for_good() {
        let mut state = ready();
        state.admit(E, seq(1)).unwrap();
        assert!(!state.cancel(Epoch(4)));
        assert!(state.cancel(E));
        assert!(!state.cancel(E));
        assert_eq!(state.turn(E, seq(1)), Turn::Gone);
        assert!(matches!(state.admit(E, seq(2)), Err(Refusal::NotPlaced { .. })));
        assert!(!state.placed(E));
        state.place(Epoch(6)).unwrap();
    }

    #[test]
    fn placements_and_measurements_exclude_each_other() {
        let mut state = ready();
        assert_eq!(state.measure(), Err(Refusal::Placed { epoch: E }));
        state.measured();
        assert!(state.is_current(E), "nothing was measured");
        state.cancel(E);
        state.measure().unwrap();
        assert_eq!(state.measure(), Err(Refusal::Measuring));
        assert_eq!(state.place(Epoch(6)), Err(Refusal::Measuring));
        assert!(!state.cancel(E) && !state.is_current(E));
        assert!(matches!(state.admit(E, seq(1)), Err(Refusal::NotPlaced { .. })));
        state.measured();
        state.place(Epoch(6)).unwrap();
        let mut state = WorkerState::default();
        state.drain(true);
        assert_eq!(state.measure(), Err(Refusal::Draining));
    }

    #[test]
    fn a_draining_worker_finishes_queued_programs_and_rejects_new_ones() {
        let mut state = ready();
        state.admit(E, seq(1)).unwrap();
        state.drain(true);
        assert_eq!(state.admit(E, seq(2)), Err(Refusal::Draining));
        assert_eq!(state.place(Epoch(6)), Err(Refusal::Draining));
        assert_eq!(state.start(E, seq(1)), Turn::Start);
        state.leave(E, seq(1));
        assert!(state.quiet());
        state.drain(false);
        state.admit(E, seq(2)).unwrap();
    }
}
