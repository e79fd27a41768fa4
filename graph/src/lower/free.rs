//! Slots that are free while a program is built.

use crate::program::{Memory, Slot, SlotId};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::RangeInclusive,
};

/// Slots that no tensor uses, in the order in which they were left.
#[derive(Default)]
pub(super) struct Free {
    /// Free device slots, by their bytes.
    pub device: BTreeMap<u64, Vec<SlotId>>,
    staging: VecDeque<SlotId>,
    /// How many staging slots there are, free or not.
    pub staged: usize,
}

impl Free {
    pub fn leave(&mut self, slots: &[Slot], slot: SlotId) {
        let Slot { memory, bytes, .. } = slots[slot.0 as usize];
        match memory {
            // Pieces that come later may lie over it: the loaders wait for its last use.
            Memory::Stream => {}
            Memory::Staging => self.staging.push_back(slot),
            Memory::Device => self.device.entry(bytes).or_default().push(slot),
        }
    }

    /// Takes a free slot. Of device slots it is the tightest that fits, and of these the one left last,
    /// still warm in a cache. Of staging slots, which are all of one size, it is the one left first, and
    /// only when `depth` of them exist, so that lanes rarely wait for it.
    pub fn take(
        &mut self,
        memory: Memory,
        fits: RangeInclusive<u64>,
        depth: usize,
    ) -> Option<SlotId> {
        if memory == Memory::Staging {
            return if self.staged >= depth { self.staging.pop_front() } else { None };
        }
        self.device.range_mut(fits).find_map(|(_, left)| left.pop())
    }

    /// Takes the largest of the device slots that are too small, and makes it as large as it has to be:
    /// that takes less than one more slot, as where each tensor is larger than the one before.
    pub fn grown(&mut self, memory: Memory, size: u64, slots: &mut [Slot]) -> Option<SlotId> {
        let smaller = (memory == Memory::Device).then(|| self.device.range_mut(..size))?;
        let slot = smaller.rev().find_map(|(_, left)| left.pop())?;
        slots[slot.0 as usize].bytes = size;
        Some(slot)
    }
}
