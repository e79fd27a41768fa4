//! KV blocks: those that each sequence has, and the prefix cache, which are the rows of ended sequences that are still
//! cached. Ended sequences are evicted from it where blocks are needed, the least recently used first.
//!
//! Pure: the caller tells the devices what they have to know, in the right order. Blocks have the same numbers on all
//! devices, and belong to an epoch: when the next one begins, all are free. Sequences that begin alike share whole
//! blocks. A block that is not full is never shared; a sequence that continues one that has ended takes over that one's
//! last block, too, and the ended sequence is evicted.

use crate::client_memory::Who;
use galaxy_common::{BlockTables, Cache, Epoch};
use std::{collections::BTreeMap, sync::Arc};

/// The fewest rows of another sequence's last block that are worth taking over.
const LEAST: usize = 16;

/// The blocks of the KV cache in an epoch.
pub struct KvBlocks {
    epoch: Epoch,
    cache: Cache,
    tables: BlockTables,
    /// How many blocks of each sequence devices know of, by its slot.
    announced: BTreeMap<u32, usize>,
    /// Sequences that have ended, the least recently used first.
    ended: Vec<Ended>,
}

/// A sequence that has ended, whose rows stay cached until their blocks are needed.
struct Ended {
    slot: u32,
    /// The client whose sequence it was: others get none of its rows.
    client: Who,
    /// The tokens of its cached rows.
    tokens: Vec<u32>,
}

/// Cached rows of an ended sequence that begins as another does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// The slot of the ended sequence whose rows they are.
    pub of: u32,
    /// How many rows they are.
    pub rows: u32,
    /// Whether the last block of the ended sequence is taken over, so that the sequence is given up.
    last: bool,
}

/// The blocks that a sequence gets.
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation {
    /// All its blocks, in the order of its rows; none where devices know of all of them already.
    pub table: Option<Arc<[u32]>>,
    /// Slots of ended sequences that devices have to forget before they run what the blocks are for.
    pub before: Vec<u32>,
    /// The slot of an ended sequence that devices have to forget after that.
    pub after: Option<u32>,
}

impl Default for KvBlocks {
    fn default() -> Self {
        let (epoch, cache, tables) = (Epoch::default(), Cache::NONE, BlockTables::new(Cache::NONE));
        Self { epoch, cache, tables, announced: BTreeMap::new(), ended: Vec::new() }
    }
}

impl KvBlocks {
    /// Forgets everything if the epoch or the cache is another.
    pub fn enter(&mut self, epoch: Epoch, cache: Cache) {
        if (self.epoch, self.cache) != (epoch, cache) {
            let tables = BlockTables::new(cache);
            *self = Self { epoch, cache, tables, ..Self::default() };
        }
    }

    /// The epoch whose blocks these are.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// How many blocks there are in all.
    pub fn all(&self) -> u32 {
        self.cache.blocks()
    }

    /// How many blocks no running sequence has: free ones, and those of ended sequences.
    pub fn free(&self) -> u32 {
        self.room(&self.evictable(&[])) as u32
    }

    /// How many blocks a sequence has.
    pub fn held(&self, slot: u32) -> u32 {
        self.tables.held(slot) as u32
    }

    /// Looks up the prefix cache: the longest run of cached rows with which a sequence begins, among the ended sequences
    /// of the same client. One row at least is computed again, because its logits are not kept. None where there are no
    /// such rows, or where their blocks are needed for the other rows of the sequence.
    pub fn prefix(&self, client: &Who, tokens: &[u32]) -> Option<Prefix> {
        let of = |ended: &Ended| {
            let alike = tokens.iter().zip(&ended.tokens).take_while(|(a, b)| a == b).count();
            let rows = alike.min(tokens.len().saturating_sub(1));
            let block = Cache::BLOCK as usize;
            let (whole, rest) = (rows / block * block, rows % block);
            // Not where more is evicted than found.
            let last = rest >= LEAST.max(ended.tokens.len() - rows);
            let rows = if last { rows } else { whole } as u32;
            Prefix { of: ended.slot, rows, last }
        };
        // Until the rows have run, the ended sequence has its blocks, too.
        let has_room = |prefix: &Prefix| {
            let more =
                (tokens.len() as u32).div_ceil(Cache::BLOCK) - prefix.rows.div_ceil(Cache::BLOCK);
            let more = more as usize;
            more <= self.tables.free() || more <= self.room(&self.evictable(&[prefix.of]))
        };
        let own = self.ended.iter().filter(|ended| ended.client == *client);
        let longest = own.map(of).max_by_key(|prefix| prefix.rows);
        longest.filter(|prefix| prefix.rows > 0 && has_room(prefix))
    }

    /// The slots of ended sequences that may be evicted: all but those that are `needed`.
    fn evictable(&self, needed: &[u32]) -> Vec<u32> {
        let ended = self.ended.iter().map(|ended| ended.slot);
        ended.filter(|slot| !needed.contains(slot)).collect()
    }

    /// How many blocks are free once these ended sequences are evicted.
    fn room(&self, evictable: &[u32]) -> usize {
        self.tables.free() + self.tables.only_of(evictable.iter().copied())
    }

    /// Gives a sequence blocks for `rows` rows; where it begins, the first of them with the rows of `prefix`. Ended
    /// sequences are evicted for that, the least recently used first, but not those that are `needed`. None
    /// where there are not enough; then the sequence has what it had.
    pub fn allocate(
        &mut self,
        slot: u32,
        prefix: Option<Prefix>,
        rows: u32,
        needed: &[u32],
    ) -> Option<Allocation> {
        let had = self.tables.held(slot);
        if let Some(Prefix { of, rows, .. }) = prefix {
            self.tables.share(slot, of, rows.div_ceil(Cache::BLOCK) as usize);
        }
        let source = prefix.map(|prefix| prefix.of);
        let needed: Vec<u32> = needed.iter().copied().chain(source).collect();
        let evictable = self.evictable(&needed);
        let more = (rows.div_ceil(Cache::BLOCK)).saturating_sub(self.held(slot)) as usize;
        if more > self.room(&evictable) {
            self.tables.keep(slot, had);
            return None;
        }
        let mut got = Allocation { table: None, before: Vec::new(), after: None };
        let mut evictable = evictable.into_iter();
        let table = loop {
            match self.tables.allocate(slot, rows) {
                Some(table) => break table,
                None => {
                    let oldest = evictable.next()?;
                    self.evict_ended(oldest);
                    got.before.push(oldest);
                }
            }
        };
        if let Some(of) = source {
            match prefix.is_some_and(|prefix| prefix.last) {
                true => {
                    self.evict_ended(of);
                    got.after = Some(of);
                }
                // The ended sequence is the most recently used now.
                false => self.ended.sort_by_key(|ended| ended.slot == of),
            }
        }
        got.table =
            (table.len() > self.announced.get(&slot).copied().unwrap_or(0)).then_some(table);
        Some(got)
    }

    /// Notes that devices know which blocks a sequence has.
    pub fn note_announced(&mut self, slot: u32) {
        let held = self.tables.held(slot);
        if held > 0 {
            self.announced.insert(slot, held);
        }
    }

    /// Takes back the blocks of a sequence, of which nothing stays cached. False where it had none, so that devices
    /// know nothing of it.
    pub fn release(&mut self, slot: u32) -> bool {
        let had = self.held(slot) > 0;
        self.tables.release(slot);
        self.announced.remove(&slot);
        had
    }

    /// Ends a sequence whose cached rows are those of `tokens`; they stay cached until their blocks are needed. Gives
    /// the slots that devices have to forget.
    pub fn end(&mut self, slot: u32, client: Who, tokens: Vec<u32>) -> Vec<u32> {
        if tokens.len() < LEAST {
            return if self.release(slot) { vec![slot] } else { Vec::new() };
        }
        // An ended sequence with which this one begins is of no more use.
        let covered = |ended: &Ended| ended.client == client && tokens.starts_with(&ended.tokens);
        let of_no_use = self.ended.iter().filter(|ended| covered(ended));
        let mut forgotten: Vec<u32> = of_no_use.map(|ended| ended.slot).collect();
        self.ended.push(Ended { slot, client, tokens });
        // The state of samplers has room for as many sequences as there are blocks, running ones among them.
        let most = (self.all() as usize / 2).max(1);
        let oldest = self.ended.len().saturating_sub(most);
        forgotten.extend(self.ended.iter().take(oldest).map(|ended| ended.slot));
        forgotten.sort_unstable();
        forgotten.dedup();
        forgotten.iter().for_each(|slot| self.evict_ended(*slot));
        forgotten
    }

    /// Evicts an ended sequence from the prefix cache.
    fn evict_ended(&mut self, slot: u32) {
        self.ended.retain(|ended| ended.slot != slot);
        self.release(slot);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::CacheType;

    const BLOCK: u32 = Cache::BLOCK;

    fn blocks(count: u32) -> KvBlocks {
        let mut kv = KvBlocks::default();
        kv.enter(Epoch(1), Cache { rows: count * BLOCK, values: CacheType::F32 });
        kv
    }

    fn tokens(rows: u32) -> Vec<u32> {
        (0..rows).collect()
    }

    fn table(got: Allocation) -> Vec<u32> {
        got.table.unwrap().to_vec()
    }

    #[test]
    fn the_prefix_cache_gives_the_next_turn_all_rows_of_the_last() {
        let mut kv = blocks(6);
        assert_eq!(table(kv.allocate(1, None, 400, &[]).unwrap()), [0, 1, 2]);
        kv.note_announced(1);
        assert_eq!(
            kv.allocate(1, None, 500, &[]).unwrap().table,
            None,
            "devices know of its blocks"
        );
        assert!(kv.end(1, None, tokens(500)).is_empty());
        assert_eq!((kv.free(), kv.held(1)), (6, 3));
        let mut next = tokens(500);
        next.extend([9; 40]);
        let prefix = kv.prefix(&None, &next).unwrap();
        assert_eq!((prefix.rows, prefix.last), (500, true));
        let got = kv.allocate(2, Some(prefix), 540, &[]).unwrap();
        assert_eq!((got.before.len(), got.after), (0, Some(1)));
        assert_eq!(table(got), [0, 1, 2]);
        assert_eq!(kv.free(), 3);
        // The same prompt once more: its last row is run anew.
        assert!(kv.end(2, None, tokens(500)).is_empty());
        assert_eq!(kv.prefix(&None, &tokens(500)).unwrap().rows, 499);
        // Another's rows are nobody else's.
        let other = Some((
            galaxy_common::DeviceName::new("x").unwrap(),
            galaxy_proto::identity::Role::Client,
        ));
        assert_eq!(kv.prefix(&other, &tokens(500)), None);
    }

    #[test]
    fn sequences_with_a_common_prefix_share_whole_kv_blocks() {
        let mut kv = blocks(8);
        kv.allocate(1, None, 900, &[]).unwrap();
        assert!(kv.end(1, None, tokens(900)).is_empty());
        let mut other = tokens(400);
        other.extend([7; 300]);
        let prefix = kv.prefix(&None, &other).unwrap();
        assert_eq!((prefix.rows, prefix.last), (2 * BLOCK, false));
        let got = kv.allocate(2, Some(prefix), 700, &[]).unwrap();
        assert_eq!((got.before.len(), got.after), (0, None));
        assert_eq!(table(got), [0, 1, 5, 6]);
        // Of eight blocks one is free, and three are those of the first alone.
        assert_eq!(kv.free(), 4);
        assert_eq!(kv.prefix(&None, &tokens(900)).unwrap().rows, 899, "it is there still");
        // Room comes from ended ones; what they share stays.
        let got = kv.allocate(3, None, 4 * BLOCK, &[]).unwrap();
        assert_eq!(got.before, [1]);
        assert_eq!(kv.free(), 0);
        assert_eq!(kv.allocate(4, None, 1, &[]), None);
        assert!(kv.release(2) && !kv.release(2) && !kv.release(4));
        assert_eq!(kv.free(), 4);
    }

    #[test]
    fn the_least_recently_used_prefix_is_given_up_first() {
        let mut kv = blocks(8);
        for slot in 1..=3 {
            let own: Vec<u32> = (0..300).map(|row| row + 1000 * slot).collect();
            kv.allocate(slot, None, 300, &[]).unwrap();
            assert!(kv.end(slot, None, own).is_empty());
        }
        let mut next: Vec<u32> = (1000..1300).collect();
        next.truncate(250);
        let prefix = kv.prefix(&None, &next).unwrap();
        // It would be given up for a part of it: of its first block both have the use.
        assert_eq!((prefix.rows, prefix.last), (249, true));
        let got = kv.allocate(9, Some(prefix), 600, &[]).unwrap();
        assert_eq!((got.after, kv.free()), (Some(1), 4));
        assert_eq!(kv.allocate(10, None, 2 * BLOCK, &[2]).unwrap().before, [3]);
        assert_eq!(kv.allocate(11, None, BLOCK, &[2]), None);
        assert_eq!(kv.held(11), 0);
        // One that another begins with is of no more use; there are half as many as blocks at most.
        let mut kv = blocks(6);
        for (slot, rows, gone) in [(1, 20, vec![]), (2, 30, vec![1]), (3, 5, vec![3])] {
            kv.allocate(slot, None, rows, &[]).unwrap();
            assert_eq!(kv.end(slot, None, tokens(rows)), gone);
        }
        for (slot, gone) in [(4, vec![]), (5, vec![]), (6, vec![2])] {
            kv.allocate(slot, None, 20, &[]).unwrap();
            assert_eq!(kv.end(slot, None, vec![slot; 20]), gone);
        }
        kv.enter(Epoch(2), kv.cache);
        assert_eq!((kv.free(), kv.prefix(&None, &tokens(30))), (6, None));
    }
}
