//! Which sequence has which blocks of the devices' key-value caches.

use crate::error::RequestError;
use galaxy_common::{BlockTables, Cache, Epoch, Plan, Text};
use galaxy_graph::LowerError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The block tables of an epoch: with the next one all blocks are free.
pub(super) struct Tables(Mutex<(Epoch, BlockTables)>);

impl Default for Tables {
    fn default() -> Self {
        Self(Mutex::new((Epoch::default(), BlockTables::new(Cache::NONE))))
    }
}

impl Tables {
    fn lock(&self) -> MutexGuard<'_, (Epoch, BlockTables)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes back the blocks of a sequence, if its epoch is not over.
    pub(super) fn give(&self, epoch: Epoch, slot: u32) {
        let mut tables = self.lock();
        if tables.0 == epoch {
            tables.1.give(slot);
        }
    }
}

/// The blocks of sequences that begin or get more. They are given back where it does not come to that.
pub(super) struct Taken<'a> {
    tables: &'a Tables,
    epoch: Epoch,
    /// Each with how many it had before.
    slots: Vec<(u32, usize)>,
}

impl<'a> Taken<'a> {
    /// None yet.
    pub(super) fn new(tables: &'a Tables, epoch: Epoch) -> Self {
        Self { tables, epoch, slots: Vec::new() }
    }

    /// Takes blocks for all rows that a sequence may have: their numbers, in order of rows.
    ///
    /// # Errors
    /// When not so many are free.
    pub(super) fn take(&mut self, plan: &Plan, text: &Text) -> Result<Arc<[u32]>, RequestError> {
        let mut current = self.tables.lock();
        if current.0 != self.epoch {
            *current = (self.epoch, BlockTables::new(plan.cache));
        }
        let (slot, rows) = (text.slot, text.rows);
        let had = current.1.held(slot);
        let table = current.1.take(slot, rows).ok_or_else(|| {
            let (rows, limit) = (Cache::taken(rows), plan.cache.rows);
            RequestError::Invalid { why: LowerError::Cache { rows, limit }.to_string() }
        })?;
        self.slots.push((slot, had));
        Ok(table)
    }

    /// Leaves them to the sequences, which have begun.
    pub(super) fn keep(&mut self) {
        self.slots.clear();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut tables = self.tables.lock();
        if tables.0 == self.epoch {
            self.slots.iter().for_each(|(slot, had)| tables.1.keep(*slot, *had));
        }
    }
}
