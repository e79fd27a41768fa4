//! The lobby of a running server: it notifies each connection that has to go.

use super::places::{Guest, Lobby};
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tokio::sync::Notify;

/// A lobby that tasks share. Clones are the same lobby.
#[derive(Clone, Debug)]
pub struct SharedLobby(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<LobbyState>,
    origin: Instant,
}

#[derive(Debug)]
struct LobbyState {
    lobby: Lobby,
    tell: HashMap<Guest, Arc<Notify>>,
}

impl SharedLobby {
    /// A lobby for so many connections.
    pub fn new(most: usize) -> Self {
        let state = LobbyState { lobby: Lobby::new(most), tell: HashMap::new() };
        Self(Arc::new(Inner { state: Mutex::new(state), origin: Instant::now() }))
    }

    /// Takes in a connection. Never waits: another has to go, if need be.
    pub fn arrive(&self, address: IpAddr) -> (Stay, Notice) {
        let tell = Arc::new(Notify::new());
        let notice = Notice(tell.clone());
        let stay = Stay { lobby: self.clone(), address, tell, guest: Mutex::new(None) };
        stay.back();
        (stay, notice)
    }

    /// The number of connections in the lobby.
    pub fn len(&self) -> usize {
        self.state().lobby.len()
    }

    /// Whether the lobby is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn state(&self) -> MutexGuard<'_, LobbyState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stay of a connection in a lobby: until this is dropped.
#[derive(Debug)]
pub struct Stay {
    lobby: SharedLobby,
    address: IpAddr,
    tell: Arc<Notify>,
    /// The connection in the lobby; none while it is away.
    guest: Mutex<Option<Guest>>,
}

impl Stay {
    /// Notes that bytes came from the connection.
    pub fn heard(&self) {
        if let Some(guest) = *self.guest() {
            self.lobby.state().lobby.heard(guest);
        }
    }

    /// Leaves the lobby, so that the connection does not have to go for others.
    pub fn away(&self) {
        if let Some(guest) = self.guest().take() {
            let mut state = self.lobby.state();
            state.lobby.leave(guest);
            state.tell.remove(&guest);
        }
    }

    /// Enters the lobby again, as a connection that has just come.
    pub fn back(&self) {
        self.away();
        let mut state = self.lobby.state();
        let now = self.lobby.0.origin.elapsed();
        let (guest, goes) = state.lobby.arrive(now, self.address);
        if let Some(tell) = goes.and_then(|goes| state.tell.remove(&goes)) {
            tell.notify_one();
        }
        state.tell.insert(guest, self.tell.clone());
        *self.guest() = Some(guest);
    }

    fn guest(&self) -> MutexGuard<'_, Option<Guest>> {
        self.guest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.away();
    }
}

/// Notifies a connection that it has to go.
#[derive(Debug)]
pub struct Notice(Arc<Notify>);

impl Notice {
    /// Ends when the connection has to go, to make room for another.
    ///
    /// # Cancel safety
    /// It can be waited for again, until it was given.
    pub async fn given(&self) {
        self.0.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{net::Ipv4Addr, time::Duration};
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_connection_evicted_from_the_lobby_is_notified() {
        let lobby = SharedLobby::new(1);
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let (first, told) = lobby.arrive(address);
        first.away();
        let (second, also) = lobby.arrive(address);
        assert!(timeout(Duration::ZERO, told.given()).await.is_err(), "it was away");
        first.back();
        also.given().await;
        drop(second);
        assert_eq!(lobby.len(), 1);
        drop(first);
        assert!(lobby.is_empty());
    }
}
