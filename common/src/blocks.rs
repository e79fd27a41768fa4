//! Block tables: which blocks of the KV cache hold the rows of a sequence.
//!
//! The scheduler of a cluster hands out blocks, the same on all devices, and sends the table of each sequence that
//! begins to the devices. What a device does with a block does not depend on its number, so that sequences may share
//! blocks, and a table may name them in any order.

use crate::Cache;
use std::{collections::BTreeMap, sync::Arc};

/// The free blocks of a KV cache, and the tables of the sequences that have the others.
#[derive(Debug)]
pub struct BlockTables {
    /// The free blocks; the next to be handed out is the last of them.
    free: Vec<u32>,
    /// How many sequences have each block.
    users: Vec<u32>,
    /// The block table of each sequence, by the sequence's slot.
    tables: BTreeMap<u32, Arc<[u32]>>,
}

impl BlockTables {
    /// All blocks of a cache, none of them taken.
    pub fn new(cache: Cache) -> Self {
        let users = vec![0; cache.blocks() as usize];
        Self { free: (0..cache.blocks()).rev().collect(), users, tables: BTreeMap::new() }
    }

    /// A table for a sequence of so many rows: the blocks that it has, and as many more as it needs. None where
    /// there are not so many; then it keeps what it has.
    pub fn allocate(&mut self, slot: u32, rows: u32) -> Option<Arc<[u32]>> {
        let wanted = rows.div_ceil(Cache::BLOCK) as usize;
        let table = self.tables.get(&slot).cloned().unwrap_or_default();
        if wanted > table.len() {
            let rest = self.free.len().checked_sub(wanted - table.len())?;
            let more: Vec<u32> = self.free.drain(rest..).rev().collect();
            more.iter().for_each(|block| self.users[*block as usize] += 1);
            self.tables.insert(slot, table.iter().copied().chain(more).collect());
        }
        Some(self.tables.get(&slot).cloned().unwrap_or(table))
    }

    /// Gives a sequence that has no blocks the first so many of another: both have them.
    pub fn share(&mut self, slot: u32, of: u32, blocks: usize) {
        let table = self.tables.get(&of).cloned().unwrap_or_default();
        let shared = &table[..blocks.min(table.len())];
        shared.iter().for_each(|block| self.users[*block as usize] += 1);
        self.release(slot);
        self.tables.insert(slot, shared.into());
    }

    /// How many blocks none but these sequences have.
    pub fn only_of(&self, slots: impl Iterator<Item = u32>) -> usize {
        let mut users = self.users.clone();
        let tables = slots.filter_map(|slot| self.tables.get(&slot));
        let mut only = 0;
        for block in tables.flat_map(|table| table.iter()) {
            let users = &mut users[*block as usize];
            *users -= 1;
            only += usize::from(*users == 0);
        }
        only
    }

    /// How many blocks a sequence has.
    pub fn held(&self, slot: u32) -> usize {
        self.tables.get(&slot).map_or(0, |table| table.len())
    }

    /// Takes back the blocks of a sequence.
    pub fn release(&mut self, slot: u32) {
        self.keep(slot, 0);
    }

    /// Takes back all but so many blocks of a sequence.
    pub fn keep(&mut self, slot: u32, blocks: usize) {
        let table = self.tables.remove(&slot).unwrap_or_default();
        let (kept, rest) = table.split_at(blocks.min(table.len()));
        for block in rest.iter().rev() {
            let users = &mut self.users[*block as usize];
            *users -= 1;
            if *users == 0 {
                self.free.push(*block);
            }
        }
        if !kept.is_empty() {
            self.tables.insert(slot, kept.into());
        }
    }

    /// Blocks that no sequence has.
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CacheType;

    #[test]
    fn kv_blocks_are_allocated_once_shared_and_released() {
        let mut tables =
            BlockTables::new(Cache { rows: 5 * Cache::BLOCK + 7, values: CacheType::F32 });
        assert_eq!(tables.allocate(3, 1).as_deref(), Some(&[0][..]));
        assert_eq!(tables.allocate(8, 2 * Cache::BLOCK).as_deref(), Some(&[1, 2][..]));
        // The first has its block still, and another behind it.
        assert_eq!(tables.allocate(3, Cache::BLOCK + 1).as_deref(), Some(&[0, 3][..]));
        assert_eq!(tables.allocate(3, 7).as_deref(), Some(&[0, 3][..]));
        assert_eq!(tables.allocate(9, 2 * Cache::BLOCK), None);
        assert_eq!(tables.free(), 1);
        tables.release(8);
        tables.release(8);
        assert_eq!((tables.free(), tables.held(3), tables.held(8)), (3, 2, 0));
        tables.keep(3, 1);
        tables.keep(3, 5);
        assert_eq!((tables.free(), tables.held(3)), (4, 1));
        assert_eq!(tables.allocate(3, 2 * Cache::BLOCK).as_deref(), Some(&[0, 3][..]));
        assert_eq!(tables.allocate(9, 3 * Cache::BLOCK).as_deref(), Some(&[1, 2, 4][..]));
        assert_eq!(tables.allocate(10, 0).as_deref(), Some(&[][..]));
        assert_eq!(tables.allocate(11, 1), None);
        // What two have is free when both have given it back.
        tables.share(12, 9, 2);
        assert_eq!(tables.allocate(12, 2 * Cache::BLOCK).as_deref(), Some(&[1, 2][..]));
        assert_eq!((tables.only_of([9].into_iter()), tables.only_of([9, 12].into_iter())), (1, 3));
        tables.release(9);
        assert_eq!(tables.free(), 1);
        tables.keep(12, 1);
        assert_eq!(tables.free(), 2);
        tables.release(12);
        assert_eq!(tables.free(), 3);
    }
}
