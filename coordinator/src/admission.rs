//! Admission: a bounded queue in front of the one place where programs run.
//!
//! A request holds a [`Ticket`] from admission to answer; its programs take the turn one at a
//! time, first come, first served. Full means refused.

use crate::error::RequestError;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The queue.
#[derive(Clone, Debug)]
pub struct Admission {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    queue: usize,
    /// Requests that are here.
    requests: watch::Sender<usize>,
    turn: Arc<Semaphore>,
    waiting: AtomicUsize,
    draining: AtomicBool,
}

/// A place in the queue, given back when the last copy is dropped.
#[derive(Clone, Debug)]
pub struct Ticket {
    place: Arc<Place>,
}

/// One of the requests that are here.
#[derive(Debug)]
struct Place(Admission);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.inner.requests.send_modify(|requests| *requests -= 1);
    }
}

impl Admission {
    /// A queue in which `queue` requests may wait while one runs.
    pub fn new(queue: usize) -> Self {
        let (requests, turn) = (watch::Sender::new(0), Arc::new(Semaphore::new(1)));
        let (waiting, draining) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { inner: Arc::new(Inner { queue, requests, turn, waiting, draining }) }
    }

    /// Lets a request in.
    ///
    /// # Errors
    /// [`RequestError::Draining`], or [`RequestError::Overloaded`] when the queue is full.
    pub fn admit(&self) -> Result<Ticket, RequestError> {
        if self.draining() {
            return Err(RequestError::Draining);
        }
        let queue = self.inner.queue;
        let comes = |requests: &mut usize| {
            let room = *requests <= queue;
            *requests += usize::from(room);
            room
        };
        match self.inner.requests.send_if_modified(comes) {
            true => Ok(Ticket { place: Arc::new(Place(self.clone())) }),
            false => Err(RequestError::Overloaded { queue }),
        }
    }

    /// Takes no more requests, or takes them again.
    pub fn drain(&self, on: bool) {
        self.inner.draining.store(on, Ordering::SeqCst);
    }

    /// Whether no more requests are taken.
    pub fn draining(&self) -> bool {
        self.inner.draining.load(Ordering::SeqCst)
    }

    /// Requests that wait for their turn.
    pub fn queued(&self) -> usize {
        self.inner.waiting.load(Ordering::Relaxed)
    }

    /// Waits until no request is left.
    pub async fn idle(&self) {
        // The sender is ours.
        drop(self.inner.requests.subscribe().wait_for(|requests| *requests == 0).await);
    }
}

/// The right to run one program; given back on drop.
pub struct Turn {
    _permit: OwnedSemaphorePermit,
    _ticket: Ticket,
}

impl Ticket {
    /// Waits for the turn. Keep it until the program has ended, whoever still wants its result.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue.
    ///
    /// # Errors
    /// Never while the queue exists.
    pub async fn turn(&self) -> Result<Turn, RequestError> {
        struct Waiting<'a>(&'a AtomicUsize);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let inner = &self.place.0.inner;
        inner.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&inner.waiting);
        let permit = inner.turn.clone().acquire_owned().await;
        let permit = permit.map_err(|_| RequestError::Draining)?;
        Ok(Turn { _permit: permit, _ticket: self.clone() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn full_is_refused_and_left_places_are_given_again() {
        let admission = Admission::new(1);
        let running = admission.admit().unwrap();
        let turn = running.turn().await.unwrap();
        let waiting = admission.admit().unwrap();
        assert_eq!(admission.admit().err(), Some(RequestError::Overloaded { queue: 1 }));
        let mut next = Box::pin(waiting.turn());
        assert!(tokio::time::timeout(std::time::Duration::ZERO, &mut next).await.is_err());
        assert_eq!(admission.queued(), 1);
        drop(next);
        assert_eq!(admission.queued(), 0, "a client that goes away leaves the queue");
        drop(waiting);
        let waiting = admission.admit().unwrap();
        drop((running, turn));
        waiting.turn().await.unwrap();
    }

    #[tokio::test]
    async fn drain_refuses_and_waits_for_what_runs() {
        let admission = Admission::new(4);
        let ticket = admission.admit().unwrap();
        let turn = ticket.turn().await.unwrap();
        drop(ticket);
        admission.drain(true);
        assert_eq!(admission.admit().err(), Some(RequestError::Draining));
        let mut idle = Box::pin(admission.idle());
        assert!(tokio::time::timeout(std::time::Duration::ZERO, &mut idle).await.is_err());
        // Whoever waits for the end keeps nobody out.
        admission.drain(false);
        drop(admission.admit().unwrap());
        admission.drain(true);
        drop(turn);
        idle.await;
        admission.drain(false);
        assert!(admission.admit().is_ok());
    }
}
