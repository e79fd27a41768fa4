//! Staging: host memory in wire format that the lanes of one run hand to each other.
//!
//! A slot has one writer or many readers at a time; the program's waits see to it. Here it costs
//! one uncontended lock and no copy. A slot that is found in use is a broken program, and an error.

use galaxy_graph::program::{Memory, Program, SlotId};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes aligned to 4, so that kernels may read them as f32 or f16.
pub(crate) struct Tile(Vec<u32>);

impl Tile {
    fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(4)])
    }
    pub fn bytes(&self, len: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..len]
    }
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
    fn capacity(&self) -> usize {
        self.0.len() * 4
    }
}

/// The staging slots of one program.
pub(crate) struct Staging {
    slots: Vec<Mutex<Option<Arc<Tile>>>>,
}

/// A slot that the program's waits should have freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("staging slot {0:?} is in use when it should be free: the program is broken")]
pub(crate) struct InUse(pub SlotId);

impl Staging {
    /// Slots for `program`, reusing the memory of `former`.
    pub fn new(program: &Program, former: Option<Self>) -> Self {
        let mut kept: Vec<Arc<Tile>> = former
            .into_iter()
            .flat_map(|s| s.slots)
            .filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let slots = program.slots.iter().map(|slot| {
            if slot.memory != Memory::Staging {
                return Mutex::new(None);
            }
            let bytes = slot.bytes as usize;
            // Much larger ones are let go, so that one large batch does not hold memory for ever.
            let fits = |t: &Arc<Tile>| (bytes..=bytes.max(4096) * 2).contains(&t.capacity());
            let tile = match kept.iter().position(fits) {
                Some(at) => kept.swap_remove(at),
                None => Arc::new(Tile::new(bytes)),
            };
            Mutex::new(Some(tile))
        });
        Self { slots: slots.collect() }
    }

    fn slot(&self, id: SlotId) -> std::sync::MutexGuard<'_, Option<Arc<Tile>>> {
        self.slots[id.0 as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A share of a slot for a reader, to be dropped before the operation counts as done.
    pub fn read(&self, id: SlotId) -> Result<Arc<Tile>, InUse> {
        self.slot(id).clone().ok_or(InUse(id))
    }

    /// The slot itself for its writer, to be given back by [`Staging::put`].
    pub fn take(&self, id: SlotId) -> Result<Arc<Tile>, InUse> {
        let mut slot = self.slot(id);
        match slot.as_mut().map(Arc::get_mut) {
            Some(Some(_)) => slot.take().ok_or(InUse(id)),
            _ => Err(InUse(id)),
        }
    }

    pub fn put(&self, id: SlotId, tile: Arc<Tile>) {
        *self.slot(id) = Some(tile);
    }
}
