//! What the requests of one client hold in this process, and how much that may be.
//!
//! Counted are the bytes of requests as they come, what they are decoded into, and answers that were
//! not taken yet: whatever a client sends, it holds no more than its share.

use crate::error::RequestError;
use galaxy_common::{Bytes, DeviceName};
use galaxy_proto::identity::Role;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The memory that one client may hold by default.
pub const DEFAULT_CLIENT_MEMORY: Bytes = Bytes(256_000_000);

/// A client: the name and role of its certificate; none for a client of this machine without one.
pub type Who = Option<(DeviceName, Role)>;

/// The memory that all clients hold. Copies share it.
#[derive(Clone, Debug)]
pub struct ClientMemory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: Bytes,
    held: Mutex<HashMap<Who, u64>>,
}

impl ClientMemory {
    /// A memory in which each client may hold up to `limit`.
    pub fn new(limit: Bytes) -> Self {
        Self(Arc::new(Inner { limit, held: Mutex::default() }))
    }

    /// The memory that one client holds now.
    pub fn held(&self, who: &Who) -> Bytes {
        Bytes(self.all().get(who).copied().unwrap_or(0))
    }

    /// A caller that holds nothing yet.
    pub fn caller(&self, who: Who) -> Caller {
        Caller(Arc::new(Holding { memory: self.clone(), who, bytes: Mutex::new(0) }))
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Who, u64>> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, who: &Who, more: u64) -> Result<(), RequestError> {
        let limit = self.0.limit;
        let mut all = self.all();
        let held = all.get(who).copied().unwrap_or(0);
        match held.checked_add(more).filter(|sum| *sum <= limit.0) {
            Some(sum) => {
                all.insert(who.clone(), sum);
                Ok(())
            }
            None => Err(RequestError::ClientMemory { held: Bytes(held), more: Bytes(more), limit }),
        }
    }

    fn give(&self, who: &Who, bytes: u64) {
        let mut all = self.all();
        let Some(held) = all.get_mut(who) else { return };
        *held = held.saturating_sub(bytes);
        if *held == 0 {
            all.remove(who);
        }
    }
}

/// A request's part of what its client holds; given back when the last copy is dropped.
#[derive(Clone, Debug)]
pub struct Caller(Arc<Holding>);

#[derive(Debug)]
struct Holding {
    memory: ClientMemory,
    who: Who,
    bytes: Mutex<u64>,
}

impl Drop for Holding {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.give(&self.who, bytes);
    }
}

impl Caller {
    /// The client that asks.
    pub fn who(&self) -> &Who {
        &self.0.who
    }

    /// Holds `more` bytes in addition, until the request ends.
    ///
    /// # Errors
    /// [`RequestError::ClientMemory`] when its client may not hold that much.
    pub fn grow(&self, more: u64) -> Result<(), RequestError> {
        let mut bytes = self.bytes();
        self.0.memory.take(&self.0.who, more)?;
        *bytes += more;
        Ok(())
    }

    /// Holds `all` bytes in total from now on, which is most often less than before.
    ///
    /// # Errors
    /// As [`Caller::grow`].
    pub fn settle(&self, all: u64) -> Result<(), RequestError> {
        let mut bytes = self.bytes();
        match all.checked_sub(*bytes) {
            Some(more) => self.0.memory.take(&self.0.who, more)?,
            None => self.0.memory.give(&self.0.who, *bytes - all),
        }
        *bytes = all;
        Ok(())
    }

    /// Holds `bytes` in addition, until the returned value is dropped.
    ///
    /// # Errors
    /// As [`Caller::grow`].
    pub fn briefly(&self, bytes: u64) -> Result<MemoryGuard, RequestError> {
        self.0.memory.take(&self.0.who, bytes)?;
        Ok(MemoryGuard { caller: self.clone(), bytes })
    }

    fn bytes(&self) -> MutexGuard<'_, u64> {
        self.0.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that one step of a request holds, given back on drop.
#[derive(Debug)]
pub struct MemoryGuard {
    caller: Caller,
    bytes: u64,
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        self.caller.0.memory.give(&self.caller.0.who, self.bytes);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn who(name: &str) -> Who {
        Some((DeviceName::new(name).unwrap(), Role::Client))
    }

    #[test]
    fn a_client_never_holds_more_than_its_share_of_memory() {
        let memory = ClientMemory::new(Bytes(100));
        let greedy: Vec<_> = (0..50)
            .map(|_| memory.caller(who("greedy")))
            .filter(|caller| caller.grow(30).is_ok())
            .collect();
        assert_eq!((greedy.len(), memory.held(&who("greedy"))), (3, Bytes(90)));
        let error = greedy[0].grow(30).unwrap_err();
        assert!(error.retryable() && error.to_string().contains("client_memory"), "{error}");
        // Others have theirs, and what never fits is no matter of waiting.
        let honest = memory.caller(who("honest"));
        honest.grow(100).unwrap();
        assert!(!memory.caller(who("third")).grow(101).unwrap_err().retryable());
        let brief = greedy[1].briefly(10).unwrap();
        assert!(greedy[2].briefly(1).is_err());
        drop(brief);
        greedy[0].settle(5).unwrap();
        assert_eq!(memory.held(&who("greedy")), Bytes(65));
        drop((greedy, honest));
        assert!(memory.all().is_empty());
    }

    #[test]
    fn the_largest_byte_counts_do_not_overflow() {
        let memory = ClientMemory::new(Bytes(u64::MAX));
        let caller = memory.caller(None);
        caller.grow(u64::MAX).unwrap();
        assert!(caller.grow(1).is_err());
        assert!(caller.settle(u64::MAX).is_ok());
    }
}
