//! The slots of the program that runs, as tensors of the device.

use crate::compute::{ComputeError, op_error::OpError};
use burn::{Device, Tensor};
use galaxy_common::Bytes;
use galaxy_graph::program::{Element, Memory, Program, Region, Slot, TensorId};

/// What each device slot holds: the last tensor of the program that was written to it.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<SlotTensor>,
    bytes: u64,
}

struct SlotTensor {
    /// The bytes that the slot may hold.
    bytes: u64,
    /// The tensor of the program that it holds.
    tensor: Option<(TensorId, Tensor<2>)>,
}

impl Slots {
    /// Makes room for these slots. burn allocates when a tensor is written, and keeps what it has for
    /// the next one; so all that is asked here is whether the host could have that much at all.
    pub(super) fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError> {
        let need = |slot: &Slot| match slot.memory {
            Memory::Device => slot.bytes,
            Memory::Staging | Memory::Stream => 0,
        };
        let total = slots.iter().map(need).fold(0, u64::saturating_add);
        let probe = usize::try_from(total).map(|bytes| Vec::<u8>::new().try_reserve_exact(bytes));
        if !matches!(probe, Ok(Ok(()))) {
            return Err(ComputeError::Memory { wanted: Bytes(total) });
        }
        self.slots.clear();
        self.slots.extend(slots.iter().map(|slot| SlotTensor { bytes: need(slot), tensor: None }));
        self.bytes = total;
        Ok(())
    }

    /// Bytes of all slots.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// The values of a region of a device tensor.
    pub(super) fn read(&self, program: &Program, region: &Region) -> Result<Tensor<2>, OpError> {
        let place = RegionLocation::of(program, region)?;
        let held = self.slots.get(place.slot).and_then(|held| held.tensor.as_ref());
        let held = held.filter(|(id, held)| *id == region.tensor && held.dims() == place.whole);
        let (_, tensor) = held.ok_or(OpError::Why("what it reads is not held"))?;
        Ok(match place.is_whole() {
            true => tensor.clone(),
            false => tensor.clone().slice([place.rows, place.columns]),
        })
    }

    /// Writes a region of a device tensor.
    ///
    /// # Shapes
    /// `values`: `[rows, columns]` of the region.
    pub(super) fn write(
        &mut self,
        program: &Program,
        region: &Region,
        device: &Device,
        values: Tensor<2>,
    ) -> Result<(), OpError> {
        let place = RegionLocation::of(program, region)?;
        if values.dims() != [place.rows.len(), place.columns.len()] {
            return Err(OpError::Why("what it reads and writes differ in shape"));
        }
        let [rows, columns] = place.whole;
        let held = self.slots.get_mut(place.slot).ok_or(OpError::Why(NO_ROOM))?;
        if (rows as u64).saturating_mul(columns as u64).saturating_mul(4) > held.bytes {
            return Err(OpError::Why(NO_ROOM));
        }
        let tensor = if place.is_whole() {
            values
        } else {
            let old = held.tensor.take().filter(|(id, _)| *id == region.tensor);
            let old = old.map(|(_, old)| old).filter(|old| old.dims() == place.whole);
            let old = old.unwrap_or_else(|| Tensor::zeros(place.whole, device));
            old.slice_assign([place.rows, place.columns], values)
        };
        held.tensor = Some((region.tensor, tensor));
        Ok(())
    }
}

const NO_ROOM: &str = "what it writes has no room";

/// Where a region lies.
struct RegionLocation {
    slot: usize,
    /// Rows and columns of the whole tensor.
    whole: [usize; 2],
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
}

impl RegionLocation {
    fn of(program: &Program, region: &Region) -> Result<Self, OpError> {
        let tensor = program.tensors.get(region.tensor.0 as usize);
        let tensor = tensor.filter(|tensor| {
            tensor.memory == Memory::Device
                && tensor.element == Element::F32
                && tensor.rows.contains(region.rows)
                && region.columns.end() <= tensor.width
                && !region.rows.is_empty()
                && !region.columns.is_empty()
        });
        let tensor = tensor.ok_or(OpError::Why("a region is not within a tensor of the device"))?;
        let first = (region.rows.start() - tensor.rows.start()) as usize;
        Ok(Self {
            slot: tensor.slot.0 as usize,
            whole: [tensor.rows.len() as usize, tensor.width as usize],
            rows: first..first + region.rows.len() as usize,
            columns: region.columns.range(),
        })
    }

    fn is_whole(&self) -> bool {
        [self.rows.len(), self.columns.len()] == self.whole
    }
}
