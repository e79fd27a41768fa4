//! Builds one device's program: collects operations, then gives tensors their slots and
//! operations their waits.

use super::LowerError;
use crate::program::{
    Block, Lane, LaneId, Memory, OpId, OpKind, Operation, Output, Program, Region, Role, Slot,
    SlotId, Tensor, TensorId, Wait,
};
use galaxy_common::{Bytes, Column, MAX_PAYLOAD_BYTES, Rank, Row, Span, WireType};
use std::collections::BTreeMap;

pub(crate) struct Builder {
    rank: Rank,
    wire: WireType,
    tensors: Vec<Tensor>,
    operations: Vec<Operation>,
    lanes: BTreeMap<Lane, Vec<OpId>>,
    outputs: Vec<Output>,
    /// The block and layer that new operations belong to.
    pub at: (Block, u32),
    /// Staging slots that may be in use at once: how far receives run ahead of the kernels.
    depth: usize,
}

/// A tensor while its program is built: what a caller reads and writes by rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Value {
    pub id: TensorId,
    pub rows: Span<Row>,
    pub width: u32,
}

impl Value {
    pub fn all(self) -> Region {
        self.rows(self.rows)
    }
    pub fn rows(self, rows: Span<Row>) -> Region {
        Region { tensor: self.id, rows, columns: Span::first(self.width) }
    }
    pub fn part(self, rows: Span<Row>, columns: Span<Column>) -> Region {
        Region { tensor: self.id, rows, columns }
    }
}

impl Builder {
    pub fn new(rank: Rank, wire: WireType, depth: usize) -> Self {
        Self {
            rank,
            wire,
            tensors: Vec::new(),
            operations: Vec::new(),
            lanes: BTreeMap::new(),
            outputs: Vec::new(),
            at: (Block::Embedding, 0),
            depth: depth.max(2),
        }
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn tensor(&mut self, role: Role, rows: Span<Row>, width: u32) -> Value {
        let memory = match role {
            Role::RowTile | Role::SumTile | Role::KeysValuesTile => Memory::Staging,
            _ => Memory::Device,
        };
        let id = TensorId(self.tensors.len() as u32);
        self.tensors.push(Tensor { role, rows, width, memory, slot: SlotId(0) });
        Value { id, rows, width }
    }

    pub fn compute(&mut self, kind: OpKind, reads: Vec<Region>, writes: Vec<Region>) {
        self.push(Lane::Compute, kind, reads, writes);
    }

    pub fn send(&mut self, to: Rank, transfer: u32, tile: u16, staged: Value) {
        self.push(Lane::Send(to), OpKind::Send { transfer, tile }, vec![staged.all()], vec![]);
    }

    pub fn receive(
        &mut self,
        from: Rank,
        transfer: u32,
        tile: u16,
        role: Role,
        rows: Span<Row>,
        width: u32,
    ) -> Value {
        let staged = self.tensor(role, rows, width);
        let kind = OpKind::Receive { transfer, tile };
        self.push(Lane::Receive(from), kind, vec![], vec![staged.all()]);
        staged
    }

    pub fn emit(&mut self, output: Output, region: Region) {
        let index = self.outputs.len() as u32;
        self.outputs.push(output);
        self.compute(OpKind::Emit { output: index }, vec![region], vec![]);
    }

    fn push(&mut self, lane: Lane, kind: OpKind, reads: Vec<Region>, writes: Vec<Region>) {
        let id = OpId(self.operations.len() as u32);
        self.lanes.entry(lane).or_default().push(id);
        self.operations.push(Operation {
            kind,
            lane: LaneId(0),
            reads,
            writes,
            waits: Vec::new(),
            takes: Bytes(0),
            gives: Bytes(0),
            block: self.at.0,
            layer: self.at.1,
        });
    }

    pub fn finish(mut self) -> Result<Program, LowerError> {
        // The compute lane is always there and always first.
        self.lanes.entry(Lane::Compute).or_default();
        let lanes: Vec<(Lane, Vec<OpId>)> = std::mem::take(&mut self.lanes).into_iter().collect();
        let mut place = vec![0u32; self.operations.len()];
        for (index, (_, ids)) in lanes.iter().enumerate() {
            for (at, id) in ids.iter().enumerate() {
                self.operations[id.0 as usize].lane = LaneId(index as u8);
                place[id.0 as usize] = at as u32;
            }
        }
        let (slots, before) = self.assign_slots(&place)?;
        self.assign_waits(lanes.len(), &place, &before);
        Ok(Program {
            rank: self.rank,
            wire: self.wire,
            tensors: self.tensors,
            slots,
            operations: self.operations,
            lanes,
            outputs: self.outputs,
        })
    }

    fn bytes(&self, tensor: &Tensor) -> u64 {
        let width = if tensor.memory == Memory::Device { 4 } else { self.wire.width() };
        u64::from(tensor.rows.len()) * u64::from(tensor.width) * u64::from(width)
    }

    /// Gives each tensor a slot in the order in which operations were collected. Returns the slots,
    /// and for each tensor how far each lane must be before it may be written.
    #[expect(clippy::type_complexity, reason = "two tables that belong together")]
    fn assign_slots(
        &mut self,
        place: &[u32],
    ) -> Result<(Vec<Slot>, Vec<BTreeMap<LaneId, u32>>), LowerError> {
        let staged = self.tensors.iter().filter(|t| t.memory == Memory::Staging);
        let tile = staged.map(|t| self.bytes(t)).max().unwrap_or(0);
        if tile > u64::from(MAX_PAYLOAD_BYTES) {
            return Err(LowerError::Tile { bytes: tile });
        }
        let touched = |op: &Operation| -> Vec<TensorId> {
            op.reads.iter().chain(&op.writes).map(|r| r.tensor).collect()
        };
        let mut last = vec![0usize; self.tensors.len()];
        for (index, op) in self.operations.iter().enumerate() {
            for id in touched(op) {
                last[id.0 as usize] = index;
            }
        }
        let mut slots: Vec<Slot> = Vec::new();
        let mut used: Vec<BTreeMap<LaneId, u32>> = Vec::new();
        let mut free: Vec<SlotId> = Vec::new();
        let mut seen = vec![false; self.tensors.len()];
        let mut before = vec![BTreeMap::new(); self.tensors.len()];
        for (index, &at) in place.iter().enumerate() {
            let ids = touched(&self.operations[index]);
            for &id in &ids {
                let tensor = id.0 as usize;
                if std::mem::replace(&mut seen[tensor], true) {
                    continue;
                }
                let memory = self.tensors[tensor].memory;
                let bytes = if memory == Memory::Staging {
                    tile
                } else {
                    self.bytes(&self.tensors[tensor])
                };
                let slot = match self.choose(&slots, &free, memory, bytes) {
                    Some(at) => free.remove(at),
                    None => {
                        slots.push(Slot { memory, bytes });
                        used.push(BTreeMap::new());
                        SlotId(slots.len() as u32 - 1)
                    }
                };
                before[tensor] = used[slot.0 as usize].clone();
                self.tensors[tensor].slot = slot;
                let taken = self.bytes(&self.tensors[tensor]);
                self.operations[index].takes.0 += taken;
            }
            for id in ids {
                let tensor = id.0 as usize;
                let slot = self.tensors[tensor].slot;
                let lane = self.operations[index].lane;
                let count = used[slot.0 as usize].entry(lane).or_insert(0);
                *count = (*count).max(at + 1);
                if last[tensor] == index && !free.contains(&slot) {
                    free.push(slot);
                    self.operations[index].gives.0 += self.bytes(&self.tensors[tensor]);
                }
            }
        }
        Ok((slots, before))
    }

    /// Device slots: the tightest that was left last, still warm in a cache. Staging slots: the one
    /// that was left first, and only when `depth` of them exist, so that lanes rarely wait for it.
    fn choose(&self, slots: &[Slot], free: &[SlotId], memory: Memory, bytes: u64) -> Option<usize> {
        let fits = |id: &SlotId| {
            let slot = slots[id.0 as usize];
            slot.memory == memory && slot.bytes >= bytes && slot.bytes / 2 <= bytes
        };
        match memory {
            Memory::Staging => {
                let have = slots.iter().filter(|s| s.memory == Memory::Staging).count();
                (have >= self.depth).then(|| free.iter().position(fits)).flatten()
            }
            Memory::Device => {
                let candidates = free.iter().enumerate().filter(|(_, id)| fits(id));
                candidates
                    .min_by_key(|(at, id)| (slots[id.0 as usize].bytes, free.len() - at))
                    .map(|(at, _)| at)
            }
        }
    }

    fn assign_waits(&mut self, lanes: usize, place: &[u32], before: &[BTreeMap<LaneId, u32>]) {
        let mut writers: Vec<Vec<(Region, LaneId, u32)>> = vec![Vec::new(); self.tensors.len()];
        for (index, op) in self.operations.iter().enumerate() {
            for region in &op.writes {
                writers[region.tensor.0 as usize].push((*region, op.lane, place[index] + 1));
            }
        }
        // What the operations before on the same lane have waited for already.
        let mut waited = vec![vec![0u32; lanes]; lanes];
        for op in &mut self.operations {
            let lane = usize::from(op.lane.0);
            let mut need: BTreeMap<LaneId, u32> = BTreeMap::new();
            let mut want = |other: LaneId, count: u32| {
                let entry = need.entry(other).or_insert(0);
                *entry = (*entry).max(count);
            };
            for region in &op.reads {
                for (written, other, count) in &writers[region.tensor.0 as usize] {
                    if written.rows.overlaps(region.rows)
                        && written.columns.overlaps(region.columns)
                    {
                        want(*other, *count);
                    }
                }
            }
            for region in &op.writes {
                for (&other, &count) in &before[region.tensor.0 as usize] {
                    want(other, count);
                }
            }
            for (other, count) in need {
                let done = &mut waited[lane][usize::from(other.0)];
                if other != op.lane && count > *done {
                    *done = count;
                    op.waits.push(Wait { lane: other, count });
                }
            }
        }
    }
}
