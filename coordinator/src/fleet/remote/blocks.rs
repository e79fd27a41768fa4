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

/// The blocks of a sequence that begins. They are given back where it does not come to that.
pub(super) struct Taken<'a> {
    tables: &'a Tables,
    epoch: Epoch,
    slot: u32,
    table: Arc<[u32]>,
    kept: bool,
}

impl<'a> Taken<'a> {
    /// Takes blocks for all rows that a sequence may have.
    ///
    /// # Errors
    /// When not so many are free.
    pub(super) fn take(
        tables: &'a Tables,
        epoch: Epoch,
        plan: &Plan,
        text: &Text,
    ) -> Result<Self, RequestError> {
        let mut current = tables.lock();
        if current.0 != epoch {
            *current = (epoch, BlockTables::new(plan.cache));
        }
        let (slot, rows) = (text.slot, text.rows);
        let table = current.1.take(slot, rows).ok_or_else(|| {
            let (rows, limit) = (Cache::taken(rows), plan.cache.rows);
            RequestError::Invalid { why: LowerError::Cache { rows, limit }.to_string() }
        })?;
        Ok(Self { tables, epoch, slot, table, kept: false })
    }

    /// Their numbers, in order of rows.
    pub(super) fn table(&self) -> &[u32] {
        &self.table
    }

    /// Leaves them to the sequence, which has begun.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.tables.give(self.epoch, self.slot);
        }
    }
}
