//! Admission: a bounded queue in front of the one place where programs run.
//!
//! A request holds a [`Ticket`] from admission to answer; its programs take the turn one at a time, and clients take
//! turns. A request that finds the queue full is refused; one client has at most half of the places while others are
//! here.

use crate::{
    client_memory::Who,
    error::RequestError,
    fair::{Fair, Share},
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::sync::watch;

/// The bounded queue of requests. Copies share it.
#[derive(Clone, Debug)]
pub struct Admission {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    queue: usize,
    /// How many requests hold a ticket.
    requests: watch::Sender<usize>,
    /// How many tickets each client holds.
    by: Mutex<HashMap<Who, usize>>,
    turn: Fair,
    draining: AtomicBool,
    /// Whether the process ends; another coordinator may follow.
    ending: AtomicBool,
}

impl Inner {
    fn by(&self) -> MutexGuard<'_, HashMap<Who, usize>> {
        self.by.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the queue, given back when the last copy is dropped.
#[derive(Clone, Debug)]
pub struct Ticket {
    place: Arc<AdmittedRequest>,
}

/// The place of one request in the queue, given back on drop.
#[derive(Debug)]
struct AdmittedRequest {
    admission: Admission,
    who: Who,
}

impl Drop for AdmittedRequest {
    fn drop(&mut self) {
        let inner = &self.admission.inner;
        let mut by = inner.by();
        if let Some(count) = by.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                by.remove(&self.who);
            }
        }
        drop(by);
        inner.requests.send_modify(|requests| *requests -= 1);
    }
}

impl Admission {
    /// A queue in which `queue` requests may wait while one runs; half as many more, if one client has
    /// filled it and others come.
    pub fn new(queue: usize) -> Self {
        let (requests, by, turn) = (watch::Sender::new(0), Mutex::default(), Fair::new(1));
        let (draining, ending) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { inner: Arc::new(Inner { queue, requests, by, turn, draining, ending }) }
    }

    /// Admits a request of `who`.
    ///
    /// # Errors
    /// [`RequestError::Draining`], [`RequestError::Unavailable`] when the coordinator ends, or
    /// [`RequestError::Overloaded`] when the queue is full.
    pub fn admit(&self, who: &Who) -> Result<Ticket, RequestError> {
        if self.inner.ending.load(Ordering::SeqCst) {
            // Whoever tries again finds the next one.
            let reason = "the coordinator ends".to_owned();
            return Err(RequestError::Unavailable { device: None, reason });
        }
        if self.draining() {
            return Err(RequestError::Draining);
        }
        let queue = self.inner.queue;
        let mut by = self.inner.by();
        let all: usize = by.values().sum();
        let has = by.get(who).copied().unwrap_or(0);
        let half = queue.div_ceil(2).max(1);
        let room = match all <= queue {
            true => has == all || has < half,
            false => has < half && all - has > half && all <= queue + half,
        };
        if !room {
            return Err(RequestError::Overloaded { queue });
        }
        *by.entry(who.clone()).or_default() += 1;
        drop(by);
        self.inner.requests.send_modify(|requests| *requests += 1);
        Ok(Ticket {
            place: Arc::new(AdmittedRequest { admission: self.clone(), who: who.clone() }),
        })
    }

    /// Takes no more requests, or takes them again.
    pub fn drain(&self, on: bool) {
        self.inner.draining.store(on, Ordering::SeqCst);
    }

    /// Takes no more requests, for good: the coordinator ends.
    pub fn end(&self) {
        self.drain(true);
        self.inner.ending.store(true, Ordering::SeqCst);
    }

    /// Whether no more requests are taken.
    pub fn draining(&self) -> bool {
        self.inner.draining.load(Ordering::SeqCst)
    }

    /// Requests that wait for their turn.
    pub fn queued(&self) -> usize {
        self.inner.turn.waiting()
    }

    /// Waits until no request holds a ticket.
    pub async fn idle(&self) {
        // The sender is ours.
        drop(self.inner.requests.subscribe().wait_for(|requests| *requests == 0).await);
    }
}

/// The right to run one program; given back on drop.
#[derive(Debug)]
pub struct Turn {
    _share: Share,
    _ticket: Ticket,
}

impl Ticket {
    /// Waits for the turn. Keep it until the program has ended, whoever still wants its result.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue.
    pub async fn turn(&self) -> Turn {
        let AdmittedRequest { admission, who } = &*self.place;
        let share = admission.inner.turn.take(who, 1).await;
        Turn { _share: share, _ticket: self.clone() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_refuses_requests_and_reuses_freed_places() {
        let admission = Admission::new(1);
        let running = admission.admit(&None).unwrap();
        let turn = running.turn().await;
        let waiting = admission.admit(&None).unwrap();
        assert_eq!(admission.admit(&None).err(), Some(RequestError::Overloaded { queue: 1 }));
        let mut next = Box::pin(waiting.turn());
        assert!(tokio::time::timeout(std::time::Duration::ZERO, &mut next).await.is_err());
        assert_eq!(admission.queued(), 1);
        drop(next);
        assert_eq!(admission.queued(), 0, "a client that goes away leaves the queue");
        drop(waiting);
        let waiting = admission.admit(&None).unwrap();
        drop((running, turn));
        waiting.turn().await;
    }

    #[tokio::test]
    async fn a_drain_refuses_requests_and_waits_for_running_ones() {
        let admission = Admission::new(4);
        let ticket = admission.admit(&None).unwrap();
        let turn = ticket.turn().await;
        drop(ticket);
        admission.drain(true);
        let refused = || admission.admit(&None).err().unwrap();
        assert_eq!((refused(), refused().retryable()), (RequestError::Draining, false));
        let mut idle = Box::pin(admission.idle());
        assert!(tokio::time::timeout(std::time::Duration::ZERO, &mut idle).await.is_err());
        // Whoever waits for the end keeps nobody out.
        admission.drain(false);
        drop(admission.admit(&None).unwrap());
        admission.drain(true);
        drop(turn);
        idle.await;
        admission.drain(false);
        assert!(admission.admit(&None).is_ok());
        // Who comes while the coordinator ends may come to the next one.
        admission.end();
        let error = admission.admit(&None).err().unwrap();
        assert!(error.retryable() && error.to_string().contains("ends"), "{error}");
    }

    fn client(name: &str) -> Who {
        let name = galaxy_common::DeviceName::new(name).unwrap();
        Some((name, galaxy_proto::identity::Role::Client))
    }

    #[test]
    fn one_client_gets_half_of_the_queue_while_other_clients_have_places() {
        let admission = Admission::new(64);
        let [greedy, honest, third] = ["greedy", "honest", "third"].map(client);
        let mut many: Vec<_> = (0..70).filter_map(|_| admission.admit(&greedy).ok()).collect();
        assert_eq!(many.len(), 65, "nobody else is here");
        // It filled the queue, and others come in all the same: more than half for them.
        let few: Vec<_> = (0..20).filter_map(|_| admission.admit(&honest).ok()).collect();
        assert_eq!(few.len(), 20);
        let third: Vec<_> = (0..20).filter_map(|_| admission.admit(&third).ok()).collect();
        assert_eq!(third.len(), 12, "but it has an end");
        assert!(admission.admit(&greedy).is_err());
        many.truncate(32);
        assert!(admission.admit(&greedy).is_err(), "half is what it has");
        drop((few, third));
        assert!(admission.admit(&greedy).is_ok());
    }
}
