//! A number of units of something, shared by clients in turns.
//!
//! Of those that wait, the client that was served longest ago comes next, with the first of its requests. The next one
//! is waited for, however much it wants: no request is passed over for being large.

use crate::client_memory::Who;
use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::oneshot;

/// How many clients are remembered with their last turn.
const REMEMBERED: usize = 1024;

/// The order in which items of these clients take their turns: clients alternate, and the items of one client keep the
/// order in which they stand here.
pub(crate) fn in_turns<K: Hash + Eq>(clients: impl IntoIterator<Item = K>) -> Vec<usize> {
    let mut of_client: HashMap<K, usize> = HashMap::new();
    let turn = |(index, client): (usize, K)| {
        let before = of_client.entry(client).or_default();
        *before += 1;
        (*before, index)
    };
    let mut order: Vec<_> = clients.into_iter().enumerate().map(turn).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, index)| index).collect()
}

/// A number of units that clients share. Copies share the same units.
#[derive(Clone, Debug)]
pub(crate) struct Fair(Arc<Mutex<FairShareState>>);

#[derive(Debug)]
struct FairShareState {
    free: u32,
    waiting: VecDeque<Waiting>,
    /// The number of the request that began to wait last.
    number: u64,
    /// When each client was served last, by the count `times`.
    served: HashMap<Who, u64>,
    /// How many times any client was served.
    times: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    who: Who,
    wants: u32,
    take: oneshot::Sender<Share>,
}

impl FairShareState {
    fn serve(&mut self, who: &Who, much: u32) {
        self.free -= much;
        self.times += 1;
        if self.served.len() >= REMEMBERED {
            self.served.clear();
        }
        self.served.insert(who.clone(), self.times);
    }

    /// Serves the request that comes next, if there is enough for it.
    fn next(&mut self) -> Option<Waiting> {
        let last = |who: &Who| self.served.get(who).copied().unwrap_or(0);
        let (at, next) = self.waiting.iter().enumerate().min_by_key(|(_, w)| last(&w.who))?;
        if next.wants > self.free {
            return None;
        }
        let next = self.waiting.remove(at)?;
        self.serve(&next.who, next.wants);
        Some(next)
    }
}

impl Fair {
    /// `much` units, all of them free.
    pub fn new(much: u32) -> Self {
        Self(Arc::new(Mutex::new(FairShareState {
            free: much,
            waiting: VecDeque::new(),
            number: 0,
            served: HashMap::new(),
            times: 0,
        })))
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    /// Waits for `wants` units. More units than there are never come.
    ///
    /// # Cancel safety
    /// Dropping the future takes nothing.
    pub async fn take(&self, who: &Who, wants: u32) -> Share {
        struct Leaves<'a>(&'a Fair, u64);
        impl Drop for Leaves<'_> {
            fn drop(&mut self) {
                self.0.state().waiting.retain(|waiting| waiting.number != self.1);
                // It may have kept others.
                self.0.hand_out();
            }
        }
        let (number, taken) = {
            let mut state = self.state();
            if state.waiting.is_empty() && wants <= state.free {
                state.serve(who, wants);
                return Share { of: self.clone(), much: wants };
            }
            let (take, taken) = oneshot::channel();
            state.number += 1;
            let number = state.number;
            state.waiting.push_back(Waiting { number, who: who.clone(), wants, take });
            (number, taken)
        };
        let _leaves = Leaves(self, number);
        // Another may come before those that wait for more.
        self.hand_out();
        match taken.await {
            Ok(share) => share,
            // Its sender is dropped only with it.
            Err(_) => std::future::pending().await,
        }
    }

    fn hand_out(&self) {
        loop {
            let Some(Waiting { wants, take, .. }) = self.state().next() else { return };
            // If the receiver is gone, the share is dropped, and so given back.
            drop(take.send(Share { of: self.clone(), much: wants }));
        }
    }

    fn state(&self) -> MutexGuard<'_, FairShareState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Units that were taken, given back on drop.
#[derive(Debug)]
pub(crate) struct Share {
    of: Fair,
    much: u32,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.state().free += self.much;
        self.of.hand_out();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::DeviceName;
    use galaxy_proto::identity::Role;
    use tokio::sync::mpsc;

    fn client(name: &str) -> Who {
        Some((DeviceName::new(name).unwrap(), Role::Client))
    }

    #[test]
    fn items_are_ordered_so_that_clients_alternate() {
        assert_eq!(in_turns([7, 7, 7, 1, 7, 1, 2]), [0, 3, 6, 1, 5, 2, 4]);
        assert_eq!(in_turns::<u8>([]), Vec::<usize>::new());
    }

    #[tokio::test]
    async fn clients_take_turns() {
        let fair = Fair::new(1);
        let [greedy, honest] = ["greedy", "honest"].map(client);
        let running = fair.take(&greedy, 1).await;
        let (done, mut order) = mpsc::unbounded_channel();
        for (who, name) in [(&greedy, "greedy"); 9].into_iter().chain([(&honest, "honest"); 2]) {
            let (fair, who, done, waiting) =
                (fair.clone(), who.clone(), done.clone(), fair.waiting());
            let asked = fair.clone();
            tokio::spawn(async move {
                let share = fair.take(&who, 1).await;
                done.send(name).unwrap();
                drop(share);
            });
            while asked.waiting() == waiting {
                tokio::task::yield_now().await;
            }
        }
        drop((running, done));
        let mut names = Vec::new();
        while let Some(name) = order.recv().await {
            names.push(name);
        }
        assert_eq!(names[..4], ["honest", "greedy", "honest", "greedy"]);
        assert_eq!(names.len(), 11);
    }

    #[tokio::test]
    async fn dropped_waits_take_no_units_and_hold_up_no_other_request() {
        let fair = Fair::new(4);
        let held = fair.take(&None, 2).await;
        let mut large = Box::pin(fair.take(&None, 4));
        let mut small = Box::pin(fair.take(&None, 2));
        for waits in [&mut large, &mut small] {
            assert!(tokio::time::timeout(std::time::Duration::ZERO, waits).await.is_err());
        }
        assert_eq!(fair.waiting(), 2, "who wants much is not passed over");
        drop(large);
        let small = small.await;
        let mut next = Box::pin(fair.take(&None, 4));
        assert!(tokio::time::timeout(std::time::Duration::ZERO, &mut next).await.is_err());
        drop((held, small));
        // It has all of it, and is dropped before it looks.
        drop(next);
        assert_eq!(fair.waiting(), 0);
        assert_eq!(fair.state().free, 4);
    }
}
