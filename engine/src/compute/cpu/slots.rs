//! The slots of the program that runs: memory that tensors take in turns.

use crate::compute::{
    ComputeError,
    kernels::area::{Area, Extent},
};
use galaxy_common::Bytes;
use galaxy_graph::program::{Element, Memory, Program, Region, Slot};

/// Buffers of the device slots, kept from program to program.
#[derive(Default)]
pub(crate) struct Slots {
    buffers: Vec<Vec<f32>>,
    /// Values of the largest program so far: what all buffers together may hold.
    peak: usize,
}

impl Slots {
    /// Makes room for these slots. Buffers are only given back where keeping them would hold more
    /// than the largest program takes, so that a budget made for it holds.
    pub(crate) fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError> {
        let need = |slot: &Slot| match slot.memory {
            Memory::Device => usize::try_from(slot.bytes.div_ceil(4)).unwrap_or(usize::MAX),
            Memory::Staging | Memory::Stream => 0,
        };
        let total = slots.iter().map(need).fold(0, usize::saturating_add);
        let peak = self.peak.max(total);
        if self.buffers.len() < slots.len() {
            self.buffers.resize_with(slots.len(), Vec::new);
        }
        let needs = |at: usize| slots.get(at).map_or(0, need);
        let kept = |(at, buffer): (usize, &Vec<f32>)| buffer.len().max(needs(at));
        if self.buffers.iter().enumerate().map(kept).fold(0, usize::saturating_add) > peak {
            for (at, buffer) in self.buffers.iter_mut().enumerate() {
                if buffer.len() > needs(at) {
                    *buffer = Vec::new();
                }
            }
        }
        for (at, buffer) in self.buffers.iter_mut().enumerate() {
            let len = needs(at);
            if buffer.len() < len {
                // The old one goes first, and its values with it: no program reads another's.
                *buffer = Vec::new();
                buffer
                    .try_reserve_exact(len)
                    .map_err(|_| ComputeError::Memory { wanted: Bytes(total as u64 * 4) })?;
                buffer.resize(len, 0.0);
            }
        }
        self.peak = peak;
        Ok(())
    }

    /// The values of a region of a device tensor; none where it does not fit or is being written.
    pub(crate) fn area(&self, program: &Program, region: &Region) -> Option<Area<'_>> {
        let tensor = program.tensors.get(region.tensor.0 as usize)?;
        if (tensor.memory, tensor.element) != (Memory::Device, Element::F32) {
            return None;
        }
        Area::new(self.buffers.get(tensor.slot.0 as usize)?, extent(program, region)?)
    }

    /// Takes the buffers of the device regions out, to be written while others are read.
    pub(crate) fn take(&mut self, program: &Program, writes: &[Region]) -> [Vec<f32>; 2] {
        let mut taken = [Vec::new(), Vec::new()];
        for (taken, region) in taken.iter_mut().zip(writes) {
            if let Some(buffer) = self.buffer(program, region) {
                std::mem::swap(taken, buffer);
            }
        }
        taken
    }

    /// Puts back the buffers that [`Slots::take`] took out.
    pub(crate) fn put_back(&mut self, program: &Program, writes: &[Region], taken: [Vec<f32>; 2]) {
        // Backwards: where two regions share a slot the first has its buffer, the second nothing.
        for (region, mut taken) in writes.iter().zip(taken).rev() {
            if let Some(buffer) = self.buffer(program, region) {
                std::mem::swap(&mut taken, buffer);
            }
        }
    }

    /// Bytes of all buffers.
    pub(crate) fn held(&self) -> Bytes {
        let values: usize = self.buffers.iter().map(Vec::capacity).sum();
        Bytes((values * size_of::<f32>()) as u64)
    }

    fn buffer(&mut self, program: &Program, region: &Region) -> Option<&mut Vec<f32>> {
        let tensor = program.tensors.get(region.tensor.0 as usize)?;
        if (tensor.memory, tensor.element) != (Memory::Device, Element::F32) {
            return None;
        }
        self.buffers.get_mut(tensor.slot.0 as usize)
    }
}

/// Where a region lies in the slot of its tensor.
pub(crate) fn extent(program: &Program, region: &Region) -> Option<Extent> {
    let tensor = program.tensors.get(region.tensor.0 as usize)?;
    let fits = tensor.rows.contains(region.rows) && region.columns.end() <= tensor.width;
    if !fits {
        return None;
    }
    let stride = tensor.width as usize;
    // An empty span may stand anywhere.
    let row = region.rows.start().saturating_sub(tensor.rows.start()) as usize;
    Some(Extent {
        start: row * stride + region.columns.start() as usize,
        rows: region.rows.len() as usize,
        columns: region.columns.len() as usize,
        stride,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepare(slots: &mut Slots, sizes: &[u64]) -> u64 {
        let slot = |&bytes: &u64| Slot { memory: Memory::Device, start: 0, bytes };
        slots.prepare(&sizes.iter().map(slot).collect::<Vec<_>>()).expect("there is memory");
        let enough = |(buffer, &bytes): (&Vec<f32>, &u64)| buffer.len() as u64 * 4 >= bytes;
        assert!(slots.buffers.iter().zip(sizes).all(enough), "{sizes:?}");
        slots.held().0
    }

    #[test]
    fn slot_memory_never_exceeds_what_the_largest_program_needs() {
        let mut slots = Slots::default();
        assert_eq!(prepare(&mut slots, &[1000, 40]), 1040);
        assert_eq!(prepare(&mut slots, &[400, 40, 200]), 640);
        // What is there stays: nothing is allocated for a smaller program.
        let before = slots.buffers[0].as_ptr();
        assert_eq!(prepare(&mut slots, &[4, 4, 4]), 640);
        assert_eq!(slots.buffers[0].as_ptr(), before);
        assert_eq!(prepare(&mut slots, &[1000, 40]), 1040);
        assert!(prepare(&mut slots, &[8, 0, 1000, 32]) <= 1040);
        let staging = Slot { memory: Memory::Staging, start: 0, bytes: 1 << 40 };
        slots.prepare(&[staging]).expect("staging is not the engine's");
        assert!(
            slots
                .prepare(&[Slot { memory: Memory::Device, start: 0, bytes: u64::MAX / 2 }])
                .is_err()
        );
        assert_eq!(prepare(&mut slots, &[16]), 16);
    }
}
