//! The lobby of a server that runs: whoever has to go is told so.

use super::places::{Guest, Lobby};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tokio::sync::oneshot;

/// A lobby that tasks share. Copies are the same one.
#[derive(Clone, Debug)]
pub struct Reception(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    origin: Instant,
}

#[derive(Debug)]
struct State {
    lobby: Lobby,
    tell: HashMap<Guest, oneshot::Sender<()>>,
}

impl Reception {
    /// A lobby for so many.
    pub fn new(most: usize) -> Self {
        let state = State { lobby: Lobby::new(most), tell: HashMap::new() };
        Self(Arc::new(Inner { state: Mutex::new(state), origin: Instant::now() }))
    }

    /// Takes in who comes. Never waits: another has to go, if need be.
    pub fn arrive(&self, address: IpAddr) -> (Stay, Notice) {
        let (tell, told) = oneshot::channel();
        let mut state = self.state();
        let (guest, goes) = state.lobby.arrive(self.0.origin.elapsed(), address);
        if let Some(goes) = goes {
            // A sender that is dropped says it.
            state.tell.remove(&goes);
        }
        state.tell.insert(guest, tell);
        (Stay { reception: self.clone(), guest }, Notice(told))
    }

    /// How many are here.
    pub fn len(&self) -> usize {
        self.state().lobby.len()
    }

    /// Whether nobody is here.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody's stay in a lobby: until this is dropped.
#[derive(Debug)]
pub struct Stay {
    reception: Reception,
    guest: Guest,
}

/// Tells somebody that it has to go.
#[derive(Debug)]
pub struct Notice(oneshot::Receiver<()>);

impl Notice {
    /// Ends when it has to go, to make room for another, or was dropped.
    ///
    /// # Cancel safety
    /// It can be waited for again.
    pub async fn given(&mut self) {
        drop((&mut self.0).await);
    }
}

impl Stay {
    /// Bytes came from it.
    pub fn heard(&self) {
        self.reception.state().lobby.heard(self.guest);
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut state = self.reception.state();
        state.lobby.leave(self.guest);
        state.tell.remove(&self.guest);
    }
}
