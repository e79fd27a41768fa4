//! Builds one device's program: collects operations, then gives tensors their slots and
//! operations their waits.

use super::{LowerError, free::Free};
use crate::operators::{LayerOperators, Operator, OperatorGraph, OperatorId, Sizes};
use crate::program::{
    Block, Element, Lane, LaneId, Memory, OpId, OpKind, Operation, Output, Program, Region, Role,
    Slot, SlotId, Tensor, TensorId, Wait,
};
use galaxy_common::{
    Activations, Assignment, Bytes, Column, MAX_PAYLOAD_BYTES, Plan, Rank, Row, Span, WireType,
    plan::Phase,
};
use smallvec::SmallVec;
use std::{collections::BTreeMap, sync::Arc};

pub(crate) struct Builder {
    /// The graph whose operators the operations name.
    pub graph: Arc<OperatorGraph>,
    /// The device's assignment, which gives its share of each operator.
    part: Assignment,
    rank: Rank,
    phase: Phase,
    wire: WireType,
    activations: Activations,
    tensors: Vec<Tensor>,
    operations: Vec<Operation>,
    lanes: Vec<(Lane, Vec<OpId>)>,
    outputs: Vec<Output>,
    /// How many operations and tensors there were when each layer began.
    begins: Vec<(usize, usize)>,
    /// The block and layer that new operations belong to.
    pub at: (Block, u32),
    /// Staging slots that may be in use at once: how far receives run ahead of the kernels.
    depth: usize,
    /// For each tensor in the buffer for weights: where it begins, and which earlier tensors it lies
    /// over.
    streamed: BTreeMap<TensorId, (u64, Vec<TensorId>)>,
}

/// A tensor while its program is built: what a caller reads and writes by rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorRows {
    pub id: TensorId,
    pub rows: Span<Row>,
    pub width: u32,
}

impl TensorRows {
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

/// A tile in wire format, as its receiver knows it before it comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    /// What its values are.
    pub role: Role,
    /// The rows of the batch that it has.
    pub rows: Span<Row>,
    /// How many values a row has.
    pub width: u32,
}

impl Builder {
    pub fn new(
        graph: &Arc<OperatorGraph>,
        plan: &Plan,
        phase: Phase,
        rank: Rank,
        depth: usize,
    ) -> Self {
        Self {
            graph: graph.clone(),
            part: plan.ring[rank.index()].assignment(phase).clone(),
            rank,
            phase,
            wire: plan.wire,
            activations: plan.activations,
            tensors: Vec::new(),
            operations: Vec::new(),
            // The compute lane is always there and always first.
            lanes: vec![(Lane::Compute, Vec::new())],
            outputs: Vec::new(),
            begins: Vec::new(),
            at: (Block::Embedding, 0),
            depth: depth.max(2),
            streamed: BTreeMap::new(),
        }
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Begins the next layer. Layers that are cut alike have operations that are alike.
    pub fn layer(&mut self) {
        self.begins.push((self.operations.len(), self.tensors.len()));
    }

    pub fn tensor(&mut self, role: Role, rows: Span<Row>, width: u32) -> TensorRows {
        let memory = match role {
            Role::RowTile | Role::SumTile | Role::KeysValuesTile | Role::Candidates => {
                Memory::Staging
            }
            Role::Weights => Memory::Stream,
            _ => Memory::Device,
        };
        let id = TensorId(self.tensors.len() as u32);
        let element = memory.element(self.wire);
        self.tensors.push(Tensor { role, rows, width, memory, element, slot: SlotId(0) });
        TensorRows { id, rows, width }
    }

    /// A tile of `bytes` bytes that are no numbers.
    pub fn bytes_tile(&mut self, role: Role, bytes: u64) -> TensorRows {
        let width = self.wire.values(bytes);
        self.tensor(role, Span::first(1), u32::try_from(width).unwrap_or(u32::MAX))
    }

    /// The operators of a layer.
    pub fn operators(&self, layer: u32) -> LayerOperators {
        self.graph.layers[layer as usize]
    }

    /// The device's share of a product of a layer, as an operation.
    pub fn product(&self, layer: u32, operator: OperatorId) -> OpKind {
        let product = self.graph.product_of(operator, &self.part, layer);
        product.expect("operators of a layer are what they are")
    }

    pub fn compute(&mut self, kind: OpKind, reads: &[Region], writes: &[Region]) {
        self.push(Lane::Compute, kind, reads, writes);
        let operation = self.operations.last_mut().expect("it was pushed");
        let operator = kind.operator().and_then(|id| self.graph.get(id));
        let needs = |operator: &Operator| operator.operate().workspace(Sizes::of(operation));
        let bytes = operator.map_or(0, needs);
        if bytes > 0 {
            let width = u32::try_from(bytes.div_ceil(Element::F32.row(1))).unwrap_or(u32::MAX);
            let workspace = self.tensor(Role::Workspace, Span::first(1), width).all();
            let operation = self.operations.last_mut().expect("it was pushed");
            operation.writes.push(workspace);
        }
    }

    pub fn send(&mut self, to: Rank, transfer: u32, tile: u16, staged: TensorRows) {
        self.push(Lane::Send(to), OpKind::Send { transfer, tile }, &[staged.all()], &[]);
    }

    /// Receives a tile that the sender gives to [`Builder::send`] with the same transfer and number.
    pub fn receive(&mut self, from: Rank, transfer: u32, number: u16, tile: Tile) -> TensorRows {
        let staged = self.tensor(tile.role, tile.rows, tile.width);
        let kind = OpKind::Receive { transfer, tile: number };
        self.push(Lane::Receive(from), kind, &[], &[staged.all()]);
        staged
    }

    /// Receives a tile that the sender got from [`Builder::bytes_tile`].
    pub fn receive_bytes(
        &mut self,
        from: Rank,
        transfer: u32,
        role: Role,
        bytes: u64,
    ) -> TensorRows {
        let staged = self.bytes_tile(role, bytes);
        let kind = OpKind::Receive { transfer, tile: 0 };
        self.push(Lane::Receive(from), kind, &[], &[staged.all()]);
        staged
    }

    /// Loads `bytes` bytes to `start` of the buffer for weights, over those of the `former` tensors.
    pub fn load(
        &mut self,
        lane: Lane,
        kind: OpKind,
        (bytes, start): (u64, u64),
        former: Vec<TensorId>,
    ) -> TensorRows {
        let width = u32::try_from(bytes).unwrap_or(u32::MAX);
        let tensor = self.tensor(Role::Weights, Span::first(1), width);
        self.streamed.insert(tensor.id, (start, former));
        self.push(lane, kind, &[], &[tensor.all()]);
        tensor
    }

    /// The program with other operations in the place of each, as `each` pushes them.
    pub fn replaced<E>(
        mut self,
        mut each: impl FnMut(&mut Self, Lane, Operation) -> Result<(), E>,
    ) -> Result<Self, E> {
        let operations = std::mem::take(&mut self.operations);
        let mut lanes = vec![Lane::Compute; operations.len()];
        for (lane, ids) in &mut self.lanes {
            ids.drain(..).for_each(|id| lanes[id.0 as usize] = *lane);
        }
        for (lane, op) in lanes.into_iter().zip(operations) {
            self.at = (op.block, op.layer);
            each(&mut self, lane, op)?;
        }
        Ok(self)
    }

    /// Pushes an operation of [`Builder::replaced`] as it was.
    pub fn push_again(&mut self, lane: Lane, op: &Operation) {
        self.push(lane, op.kind, &op.reads, &op.writes);
    }

    pub fn emit(&mut self, output: Output, region: Region) {
        self.give(output, &[region]);
    }

    /// Emits a result that no tensor holds.
    pub fn emit_token(&mut self, output: Output) {
        self.give(output, &[]);
    }

    fn give(&mut self, output: Output, reads: &[Region]) {
        let index = self.outputs.len() as u32;
        self.outputs.push(output);
        self.compute(OpKind::Emit { output: index }, reads, &[]);
    }

    fn push(&mut self, lane: Lane, kind: OpKind, reads: &[Region], writes: &[Region]) {
        let id = OpId(self.operations.len() as u32);
        match self.lanes.iter_mut().find(|(known, _)| *known == lane) {
            Some((_, ids)) => ids.push(id),
            None => self.lanes.push((lane, vec![id])),
        }
        self.operations.push(Operation {
            kind,
            lane: LaneId(0),
            reads: SmallVec::from_slice(reads),
            writes: SmallVec::from_slice(writes),
            waits: SmallVec::new(),
            takes: Bytes(0),
            gives: Bytes(0),
            block: self.at.0,
            layer: self.at.1,
        });
    }

    pub fn finish(self) -> Result<Program, LowerError> {
        let (mut program, precedence) = self.slots(None)?;
        assign_waits(&mut program, &precedence);
        Ok(program)
    }

    /// The program with slots and without waits, and the state of its slots when each layer began.
    pub fn sketch(self) -> Result<Sketch, LowerError> {
        let (mut begins, depth) = (Vec::new(), self.depth);
        let (program, _) = self.slots(Some(&mut begins))?;
        Ok(Sketch { program, begins, depth })
    }

    /// The program with slots and without waits, and the order that its waits follow from.
    fn slots(
        mut self,
        standings: Option<&mut Vec<Standing>>,
    ) -> Result<(Program, Precedence), LowerError> {
        let mut lanes = std::mem::take(&mut self.lanes);
        lanes.sort_unstable_by_key(|(lane, _)| *lane);
        let mut place = vec![0u32; self.operations.len()];
        for (index, (_, ids)) in lanes.iter().enumerate() {
            for (at, id) in ids.iter().enumerate() {
                self.operations[id.0 as usize].lane = LaneId(index as u8);
                place[id.0 as usize] = at as u32;
            }
        }
        let (slots, before) = self.assign_slots(lanes.len(), &place, standings)?;
        let program = Program {
            rank: self.rank,
            phase: self.phase,
            wire: self.wire,
            activations: self.activations,
            tensors: self.tensors,
            slots,
            operations: self.operations,
            lanes,
            outputs: self.outputs,
        };
        Ok((program, Precedence { place, before }))
    }

    /// Gives each tensor a slot in the order in which operations were collected. Returns the slots, and
    /// for each tensor how far each lane must be before it may be written. The state of the slots when
    /// each layer begins goes into `standings`.
    fn assign_slots(
        &mut self,
        lanes: usize,
        place: &[u32],
        mut standings: Option<&mut Vec<Standing>>,
    ) -> Result<(Vec<Slot>, Before), LowerError> {
        let bytes: Vec<u64> = self.tensors.iter().map(Tensor::bytes).collect();
        let staged = self.tensors.iter().zip(&bytes).filter(|(t, _)| t.memory == Memory::Staging);
        let tile = staged.map(|(_, &bytes)| bytes).max().unwrap_or(0);
        if tile > u64::from(MAX_PAYLOAD_BYTES) {
            return Err(LowerError::Tile { bytes: tile });
        }
        let mut last = vec![0usize; self.tensors.len()];
        for (index, op) in self.operations.iter().enumerate() {
            for region in op.reads.iter().chain(&op.writes) {
                last[region.tensor.0 as usize] = index;
            }
        }
        let mut slots: Vec<Slot> = Vec::new();
        // How far each lane is that used a slot, row by row.
        let mut used: Vec<u32> = Vec::new();
        let mut free = Free::default();
        let mut seen = vec![false; self.tensors.len()];
        let mut before = Before { of: vec![(0, 0); self.tensors.len()], lanes: Vec::new() };
        let mut begins = self.begins.iter().peekable();
        for (index, (op, &at)) in self.operations.iter_mut().zip(place).enumerate() {
            // No operation reads it after this one, and none has written what takes its place.
            let replaced = self.graph.in_place(op, &self.tensors).filter(|(former, next)| {
                last[former.0 as usize] == index && !seen[next.0 as usize]
            });
            while let Some((_, made)) = begins.next_if(|(begin, _)| *begin == index) {
                if let Some(standings) = standings.as_deref_mut() {
                    let held = |slot: SlotId| slots[slot.0 as usize].bytes;
                    let live = (0..*made).filter(|&t| seen[t] && last[t] != usize::MAX);
                    let live = live.map(|t| (made - t, held(self.tensors[t].slot))).collect();
                    let device = free.device.iter().map(|(&bytes, left)| (bytes, left.len()));
                    let device = device.filter(|(_, left)| *left > 0).collect();
                    standings.push(Standing { live, device, staged: free.staged });
                }
            }
            for region in op.reads.iter().chain(&op.writes) {
                let tensor = region.tensor.0 as usize;
                if std::mem::replace(&mut seen[tensor], true) {
                    continue;
                }
                let memory = self.tensors[tensor].memory;
                if let Some((start, former)) = self.streamed.get(&region.tensor) {
                    let bytes = bytes[tensor];
                    slots.push(Slot { memory, start: *start, bytes });
                    used.resize(used.len() + lanes, 0);
                    // All lanes that used the tensors under it have to be done with them.
                    let mut row = vec![0; lanes];
                    for former in former {
                        let slot = self.tensors[former.0 as usize].slot.0 as usize;
                        let lanes = row.iter_mut().zip(&used[slot * lanes..]);
                        lanes.for_each(|(most, used)| *most = (*most).max(*used));
                    }
                    before.set(tensor, &row);
                    self.tensors[tensor].slot = SlotId(slots.len() as u32 - 1);
                    op.takes.0 += bytes;
                    continue;
                }
                if let Some((former, _)) = replaced.filter(|(_, next)| *next == region.tensor) {
                    let slot = self.tensors[former.0 as usize].slot;
                    before.set(tensor, &used[slot.0 as usize * lanes..][..lanes]);
                    self.tensors[tensor].slot = slot;
                    last[former.0 as usize] = usize::MAX;
                    continue;
                }
                let size = if memory == Memory::Staging { tile } else { bytes[tensor] };
                // After the layers, no later tensor misses a large slot that a small one took.
                let wide = if op.block == Block::Head { u64::MAX } else { 2 * size + 1 };
                let found = free.take(memory, size..=wide, self.depth);
                let slot = found.or_else(|| free.grown(memory, size, &mut slots));
                let slot = slot.unwrap_or_else(|| {
                    slots.push(Slot { memory, start: 0, bytes: size });
                    used.resize(used.len() + lanes, 0);
                    free.staged += usize::from(memory == Memory::Staging);
                    SlotId(slots.len() as u32 - 1)
                });
                let row = &used[slot.0 as usize * lanes..][..lanes];
                before.set(tensor, row);
                self.tensors[tensor].slot = slot;
                op.takes.0 += bytes[tensor];
            }
            for region in op.reads.iter().chain(&op.writes) {
                let tensor = region.tensor.0 as usize;
                let slot = self.tensors[tensor].slot;
                used[slot.0 as usize * lanes + usize::from(op.lane.0)] = at + 1;
                // A tensor that is named twice is left once.
                if last[tensor] == index {
                    last[tensor] = usize::MAX;
                    free.leave(&slots, slot);
                    op.gives.0 += bytes[tensor];
                }
            }
        }
        Ok((slots, before))
    }
}

/// The state of the slots when a layer begins.
struct Standing {
    /// Tensors in use: how many tensors ago each was created, and the bytes of its slot.
    live: Vec<(usize, u64)>,
    /// Free device slots: their bytes, and how many there are of that size. Which of equal ones is taken
    /// changes no size.
    device: Vec<(u64, usize)>,
    /// How many staging slots there are.
    staged: usize,
}

/// A program without waits, from which one with more layers follows.
pub(crate) struct Sketch {
    program: Program,
    begins: Vec<Standing>,
    depth: usize,
}

impl Sketch {
    /// The program as it would be with so many more layers in each of some runs of layers that are
    /// cut alike: `(first layer, one behind the last, more)`. None where more layers might take other
    /// slots.
    ///
    /// Device slots of what follows depend on nothing but their standing when a layer begins. Where a
    /// layer between others of its run begins as one or two before it, layers in between may be
    /// repeated as often as one likes, and no slot is added. A new staging slot is taken each time
    /// until `depth` exist.
    pub fn repeated(mut self, runs: &[(usize, usize, u32)]) -> Option<Program> {
        let mut staged = 0;
        for &(first, end, more) in runs {
            let Some(last) = self.begins.get(end - 1) else { continue };
            let period = (1..=2).find(|&period| {
                let before = &self.begins[end - 1 - period];
                let inside = first + period + 1 < end;
                let alike = before.live == last.live && before.device == last.device;
                inside && alike && more.is_multiple_of(period as u32)
            })?;
            let added = last.staged - self.begins[end - 1 - period].staged;
            staged += added * (more as usize / period);
        }
        let slots = &mut self.program.slots;
        let there = slots.iter().filter(|slot| slot.memory == Memory::Staging);
        let missing = self.depth.saturating_sub(there.clone().count()).min(staged);
        if let Some(&tile) = there.clone().next() {
            slots.extend(std::iter::repeat_n(tile, missing));
        }
        Some(self.program)
    }
}

/// Where operations stand on their lanes, and how far lanes must be before tensors may be written.
pub(crate) struct Precedence {
    place: Vec<u32>,
    before: Before,
}

fn assign_waits(program: &mut Program, precedence: &Precedence) {
    let lanes = program.lanes.len();
    let writers = Writers::new(&program.operations, &precedence.place, program.tensors.len());
    // What the operations before on the same lane have waited for already, row by row.
    let mut waited = vec![0u32; lanes * lanes];
    for op in &mut program.operations {
        let lane = usize::from(op.lane.0);
        let done = &mut waited[lane * lanes..][..lanes];
        // Behind one another on a lane is order enough.
        done[lane] = u32::MAX;
        let mut want = |other: LaneId, count: u32| {
            let done = &mut done[usize::from(other.0)];
            if count > *done {
                *done = count;
                match op.waits.iter_mut().find(|wait| wait.lane == other) {
                    Some(wait) => wait.count = count,
                    None => op.waits.push(Wait { lane: other, count }),
                }
            }
        };
        for region in &op.reads {
            if writers.only(region.tensor) == Some(op.lane) {
                continue;
            }
            for writer in writers.of(region.tensor) {
                if writer.rows.overlaps(region.rows) && writer.columns.overlaps(region.columns) {
                    want(writer.lane, writer.count);
                }
            }
        }
        for region in &op.writes {
            for &(other, count) in precedence.before.of(region.tensor) {
                want(other, count);
            }
        }
        op.waits.sort_unstable_by_key(|wait| wait.lane);
    }
}

/// How far each lane must be before a tensor may be written, one tensor's lanes behind another's.
struct Before {
    of: Vec<(u32, u32)>,
    lanes: Vec<(LaneId, u32)>,
}

impl Before {
    /// Records how far each lane must be before a tensor may be written; zero is no use at all.
    fn set(&mut self, tensor: usize, used: &[u32]) {
        let from = self.lanes.len() as u32;
        let lanes = used.iter().enumerate().filter(|(_, count)| **count > 0);
        self.lanes.extend(lanes.map(|(lane, &count)| (LaneId(lane as u8), count)));
        self.of[tensor] = (from, self.lanes.len() as u32);
    }
    fn of(&self, tensor: TensorId) -> &[(LaneId, u32)] {
        let (from, to) = self.of[tensor.0 as usize];
        &self.lanes[from as usize..to as usize]
    }
}

/// A region that an operation writes, and how far its lane is after it.
#[derive(Clone, Copy)]
struct Writer {
    rows: Span<Row>,
    columns: Span<Column>,
    lane: LaneId,
    count: u32,
}

/// The writers of all tensors, one tensor's behind another's.
struct Writers {
    /// Where the writers of each tensor begin, and the end of the last.
    from: Vec<u32>,
    all: Vec<Writer>,
    /// The lane of all writers of each tensor, where they share one.
    only: Vec<Option<LaneId>>,
}

impl Writers {
    fn new(operations: &[Operation], place: &[u32], tensors: usize) -> Self {
        let mut from = vec![0u32; tensors + 1];
        for region in operations.iter().flat_map(|op| &op.writes) {
            from[region.tensor.0 as usize + 1] += 1;
        }
        for tensor in 0..tensors {
            from[tensor + 1] += from[tensor];
        }
        let none =
            Writer { rows: Span::empty(), columns: Span::empty(), lane: LaneId(0), count: 0 };
        let mut all = vec![none; from[tensors] as usize];
        let mut next = from.clone();
        for (op, &at) in operations.iter().zip(place) {
            for region in &op.writes {
                let next = &mut next[region.tensor.0 as usize];
                let (rows, columns) = (region.rows, region.columns);
                all[*next as usize] = Writer { rows, columns, lane: op.lane, count: at + 1 };
                *next += 1;
            }
        }
        let each = from.windows(2).map(|pair| &all[pair[0] as usize..pair[1] as usize]);
        let only = each.map(|of| {
            let lane = of.first()?.lane;
            of.iter().all(|writer| writer.lane == lane).then_some(lane)
        });
        Self { only: only.collect(), from, all }
    }

    fn only(&self, tensor: TensorId) -> Option<LaneId> {
        self.only[tensor.0 as usize]
    }

    fn of(&self, tensor: TensorId) -> &[Writer] {
        let at = tensor.0 as usize;
        &self.all[self.from[at] as usize..self.from[at + 1] as usize]
    }
}
