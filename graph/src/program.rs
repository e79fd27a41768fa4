//! Programs: what one device does for one batch, as operations on lanes.
//!
//! A program is data. The simulator predicts its timeline, the verifier proves things about it,
//! the executor runs it; none of them asks where it came from.

use crate::ids::OperatorId;
use galaxy_common::{
    Activations, BatchShape, Bytes, Column, Head, Kernel, Rank, Row, Share, Span, Token, WireType,
    plan::Phase, sampling::MOST_LOGPROBS,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// A resource of a device that runs one operation after another, in the order of its list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Lane {
    /// The device's kernels.
    Compute,
    /// Copies between device memory and host memory, where they run beside the kernels (a GPU).
    Copy,
    /// Frames to one peer.
    Send(Rank),
    /// Frames from one peer.
    Receive(Rank),
    /// Weights from disk; one lane for each loader.
    Load(u16),
}

/// An index into [`Program::tensors`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct TensorId(pub u32);
/// An index into [`Program::slots`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SlotId(pub u32);
/// An index into [`Program::operations`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct OpId(pub u32);
/// An index into [`Program::lanes`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct LaneId(pub u8);

/// Where a tensor or slot lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Memory {
    /// Memory of the engine; only the compute and copy lanes touch it.
    Device,
    /// Host memory in wire format; every lane may touch it.
    Staging,
    /// The buffer that weights from disk pass through; loaders write it, the compute lane reads it.
    Stream,
}

impl Memory {
    /// The type of the elements there, unless a tensor says something else.
    pub fn element(self, wire: WireType) -> Element {
        match (self, wire) {
            (Self::Device, _) | (Self::Staging, WireType::F32) => Element::F32,
            (Self::Staging, WireType::F16) => Element::F16,
            (Self::Staging, WireType::Q8) => Element::Q8,
            (Self::Stream, _) => Element::Byte,
        }
    }
}

/// The type of each element of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Element {
    /// A 32-bit float.
    F32,
    /// An IEEE 16-bit float.
    F16,
    /// A whole number of 8 bits, with a scale for each 32 of a row ([`WireType::Q8`]).
    Q8,
    /// A byte that is no number, as of weights in the format of their piece.
    Byte,
}

impl Element {
    /// Bytes of a row of so many values.
    pub const fn row(self, values: u64) -> u64 {
        match self {
            Self::F32 => WireType::F32.row(values),
            Self::F16 => WireType::F16.row(values),
            Self::Q8 => WireType::Q8.row(values),
            Self::Byte => values,
        }
    }
}

/// A value of the program, rows x columns, of which each element is written exactly once.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Tensor {
    /// What the tensor holds.
    pub role: Role,
    /// Rows of the batch (or, for [`Role::Wanted`] and [`Role::Logits`], of the wanted rows) that it has room for.
    pub rows: Span<Row>,
    /// Values in a row.
    pub width: u32,
    /// The memory that it is in.
    pub memory: Memory,
    /// The type of its elements.
    pub element: Element,
    /// The slot that it uses, from the slot's first byte on.
    pub slot: SlotId,
}

impl Tensor {
    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows.len()) * self.element.row(self.width.into())
    }
}

/// What a tensor holds; for people, for costs, and for the verifier's rules on partial sums.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Role {
    /// The residual stream.
    Residual,
    /// Rows after a norm: what blocks read.
    Normed,
    /// Rows gathered from all devices.
    Gathered,
    /// Queries, keys and values of the device's heads, one behind another.
    Qkv,
    /// Keys and values of all key-value heads, of the rows that a device's own rows see.
    KeysValues,
    /// Attention's output before the output product.
    Context,
    /// Intermediate rows of the MLP.
    Intermediate,
    /// Partial sums of a row-split product.
    Partial,
    /// Complete sums (AllReduce).
    Sum,
    /// Rows that the head reads.
    Wanted,
    /// Logits of a slice of the vocabulary.
    Logits,
    /// A tile of normed rows in wire format.
    RowTile,
    /// A tile of partial sums in wire format.
    SumTile,
    /// A tile of keys and values in wire format.
    KeysValuesTile,
    /// A device's candidates for the next tokens of a batch: bytes, whose columns are counted as values in wire
    /// format.
    Candidates,
    /// A piece of the shard: bytes, each a column.
    Weights,
    /// What an operation works in: it is written, and not read afterwards.
    Workspace,
}

/// A piece of memory that tensors take in turns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// The memory that it is a part of.
    pub memory: Memory,
    /// The byte of the buffer of [`Memory::Stream`] at which it begins; slots there may overlap. 0 in other
    /// memory.
    pub start: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// Rows x columns of a tensor. Rows count as the tensor's do (in rows of the batch).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Region {
    /// The tensor that it is a part of.
    pub tensor: TensorId,
    /// The range of its rows.
    pub rows: Span<Row>,
    /// The range of its columns.
    pub columns: Span<Column>,
}

/// The blocks that operations belong to, for traces and costs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Block {
    /// Token and position embedding.
    Embedding,
    /// Attention of a layer.
    Attention,
    /// The MLP of a layer.
    Mlp,
    /// Residual additions and norms between these.
    Connective,
    /// What stands on top of the layers.
    Head,
}

/// How rows become (part of) one vector.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Reduce {
    /// One row as it is.
    Row,
    /// The sum of rows.
    Sum,
    /// The largest value of each column.
    Max,
}

/// What an operation does. What it reads and writes stands in its regions, in the order given here; what
/// there is to know of an operator stands in the graph ([`crate::operators::OperatorGraph`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum OpKind {
    /// Embeds rows: tokens or patches + positions + types, then the embedding norm if the model has one; or
    /// takes those of an input. Reads nothing; writes `Residual rows`.
    Embed(OperatorId),
    /// An operator that is shared by rows alone: a norm, a window. Reads the rows that its result needs; writes
    /// rows, then `Workspace` if it needs any.
    Rows(OperatorId),
    /// A product with the device's share of the matrices of an operator. Reads [rows x in], then
    /// [rows x out] to be added, if any, then the `Weights` that make these columns, if they are not held;
    /// writes [rows x out]. It may make some of the share's columns alone.
    Product {
        /// The product that it computes.
        operator: OperatorId,
        /// The kernel that it is measured as.
        kernel: Kernel,
        /// The device's share.
        share: Span<Share>,
    },
    /// Attention of query rows. Reads [Qkv rows: queries], then [Qkv or KeysValues rows: keys and values of this
    /// batch that they see], besides cached rows; writes [Context rows].
    Attend {
        /// The attention that it computes.
        operator: OperatorId,
        /// Query heads of the device.
        heads: Span<Head>,
        /// Key-value heads of the device.
        kv_heads: Span<Head>,
    },
    /// Puts keys and values of segments that are to be cached behind their cached rows. Reads [Qkv or KeysValues
    /// rows: keys and values]; writes the device's KV cache, which is no tensor of the program.
    AppendKv {
        /// The attention whose keys and values these are.
        operator: OperatorId,
        /// Key-value heads of the device.
        kv_heads: Span<Head>,
    },
    /// Computes residual' = residual + bias + sum, where the sum is a partial region, a staged tile in wire
    /// format, or both; `norm` on top: with a post-norm the residual itself is normed, otherwise a second tensor
    /// takes the normed rows. Reads `Residual`, then `Partial or Sum` if `partial`, then `SumTile` if `staged`;
    /// writes `Residual'`, then `Normed` if the norm is a pre-norm.
    AddNorm {
        /// The residual addition. Biases join here, once.
        add: OperatorId,
        /// The norm that follows at once.
        norm: OperatorId,
        /// Whether the norm replaces the residual.
        post: bool,
        /// Whether a region of f32 sums is read.
        partial: bool,
        /// Whether a staged tile is added.
        staged: bool,
    },
    /// Writes rows in wire format, adding a staged tile if there is one: partial sums are summed
    /// in ring order here. Reads `rows`, then `SumTile` if `staged`; writes a staged tile.
    Export {
        /// Whether a staged tile is added.
        staged: bool,
    },
    /// Reads rows from wire format. Reads a staged tile; writes `rows`.
    Import,
    /// Adds a staged tile of sums. Reads `Partial rows`, then `SumTile`; writes `Partial rows`.
    Add,
    /// Copies rows into the compact tensor of wanted rows. Reads `Normed or Residual rows`;
    /// writes `Wanted rows`, as many.
    Select,
    /// Sends a staged tile. Reads `tile`; writes nothing here.
    Send {
        /// The number of the transfer: equal on both ends.
        transfer: u32,
        /// The tile's number in its collective, for traces.
        tile: u16,
    },
    /// Reads a piece of the shard from disk. Reads nothing here; writes `Weights`.
    Load {
        /// The number of the piece, in the order of `galaxy_graph::pieces`.
        piece: u32,
    },
    /// Receives a staged tile. Reads nothing here; writes `tile`.
    Receive {
        /// The number of the transfer: equal on both ends.
        transfer: u32,
        /// The tile's number in its collective, for traces.
        tile: u16,
    },
    /// Finds the candidates for the next tokens of all segments of which a token is wanted
    /// ([`BatchShape::sampled`]), from the device's slice of the vocabulary and after penalties. Reads a row of
    /// logits for each of them, in their order; writes one tile of candidates ([`candidates_tile_bytes`]).
    TopK {
        /// The device's slice of the vocabulary.
        tokens: Span<Token>,
    },
    /// Adds the candidates of a device, in rank order, to what is known of the next tokens of these segments.
    /// Reads a tile of candidates; writes nothing here.
    GatherCandidates,
    /// Chooses the next token of each of these segments, as every other device does, from all candidates.
    /// Reads and writes nothing here.
    Sample,
    /// Hands a result, `outputs[output]`, to the coordinator. Reads `rows`, or nothing if the result is a token.
    Emit {
        /// Index into [`Program::outputs`].
        output: u32,
    },
}

impl OpKind {
    /// The operator that it computes; none of what only moves rows or chooses tokens.
    pub fn operator(&self) -> Option<OperatorId> {
        match *self {
            Self::Embed(operator)
            | Self::Rows(operator)
            | Self::Product { operator, .. }
            | Self::Attend { operator, .. }
            | Self::AppendKv { operator, .. }
            | Self::AddNorm { add: operator, .. } => Some(operator),
            _ => None,
        }
    }
}

/// One result of a device, on its way to the coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Output {
    /// The segment that it belongs to.
    pub segment: u32,
    /// What the result is.
    pub kind: OutputKind,
}

/// What a result is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum OutputKind {
    /// Hidden states of these rows (counted within the segment): rows x hidden.
    Hidden {
        /// The rows, counted within the segment.
        rows: Span<Row>,
    },
    /// Part of a pooled vector: 1 x hidden, over `rows` rows.
    Pooled {
        /// How the rows were reduced.
        reduce: Reduce,
        /// How many rows were reduced.
        rows: u32,
    },
    /// The logits of the classes: 1 x labels. The engine runs the class head on the row it reads.
    Classes,
    /// Logits of a slice of the vocabulary: rows x slice.
    Logits {
        /// The rows, counted within the segment.
        rows: Span<Row>,
        /// The slice of the vocabulary.
        vocabulary: Span<Token>,
    },
    /// The next token: 1 x [`TOKEN_VALUES`].
    Token,
}

/// Values of [`OutputKind::Token`]: the token, its log-probability, 1 where the candidates prove the choice or
/// else 0, 1 where a device was asked to end the decode burst or else 0, how many of the likeliest follow, and
/// these with their log-probabilities. All numbers are small enough for f32.
pub const TOKEN_VALUES: u32 = 5 + 2 * MOST_LOGPROBS;

/// Bytes of `count` candidates for one token: how many there are, with the highest bit where the decode burst is
/// to end, the least score that is sure, two log-sum-exps of the whole slice, and of each candidate the token and
/// its logit before and after penalties and temperature.
pub fn candidates_bytes(count: u32) -> u64 {
    16 + 12 * u64::from(count)
}

/// Bytes of the tile of candidates for a batch, from a device with so many tokens of the vocabulary. The
/// candidates for each choice of the batch follow one another, each as long as its own number of candidates says
/// ([`candidates_bytes`]); the rest of the tile has no meaning.
pub fn candidates_tile_bytes(shape: &BatchShape, tokens: u32) -> u64 {
    shape.sampled().map(|(_, _, breadth)| candidates_bytes(breadth.of(tokens))).sum()
}

impl Output {
    /// Rows and width of the result. `hidden` and `labels` are the model's.
    pub fn extent(&self, hidden: u32, labels: u32) -> (u32, u32) {
        match self.kind {
            OutputKind::Hidden { rows } => (rows.len(), hidden),
            OutputKind::Pooled { .. } => (1, hidden),
            OutputKind::Classes => (1, labels),
            OutputKind::Logits { rows, vocabulary } => (rows.len(), vocabulary.len()),
            OutputKind::Token => (1, TOKEN_VALUES),
        }
    }
}

/// A wait: the operation does not start before that lane has finished its first `count` operations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Wait {
    /// Another lane of the same device.
    pub lane: LaneId,
    /// How many of that lane's operations must have ended.
    pub count: u32,
}

/// Regions of an operation: mostly one or two, and then without memory of their own.
pub type Regions = SmallVec<[Region; 2]>;

/// An operation of a program, which runs on one lane.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Operation {
    /// What the operation does.
    pub kind: OpKind,
    /// The lane that it runs on.
    pub lane: LaneId,
    /// The regions that it reads, in the order that its kind gives.
    pub reads: Regions,
    /// The regions that it writes, in the order that its kind gives.
    pub writes: Regions,
    /// What it waits for, besides the operation before it on its lane; at most one for each lane.
    pub waits: SmallVec<[Wait; 4]>,
    /// Bytes of slots that are taken by its start (first writes).
    pub takes: Bytes,
    /// Bytes of slots that are free after its end (last uses).
    pub gives: Bytes,
    /// The block that it belongs to.
    pub block: Block,
    /// The layer of that block.
    pub layer: u32,
}

/// What one device does for one batch shape.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Program {
    /// The rank of the device that runs it.
    pub rank: Rank,
    /// The phase that it is of, which says what devices have of the model.
    pub phase: Phase,
    /// The wire format: the number type of activations on links.
    pub wire: WireType,
    /// What rows are rounded to that are multiplied with weights in blocks.
    pub activations: Activations,
    /// Its tensors, by their ids.
    pub tensors: Vec<Tensor>,
    /// The slots in which its tensors are, by their ids.
    pub slots: Vec<Slot>,
    /// Its operations, in an order that respects every wait and every lane.
    pub operations: Vec<Operation>,
    /// Lanes that are used, and their operations in order.
    pub lanes: Vec<(Lane, Vec<OpId>)>,
    /// The results that it hands to the coordinator.
    pub outputs: Vec<Output>,
}

impl Program {
    /// The operation of this id.
    pub fn operation(&self, id: OpId) -> &Operation {
        &self.operations[id.0 as usize]
    }
    /// The rows that it embeds.
    pub fn embedded(&self) -> Span<Row> {
        let embeds = self.operations.iter().filter(|op| matches!(op.kind, OpKind::Embed(_)));
        let rows = embeds.flat_map(|op| &op.writes).map(|region| region.rows);
        rows.fold(Span::empty(), Span::hull)
    }
    /// The tensor of this id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0 as usize]
    }
    /// Bytes of a region.
    pub fn region_bytes(&self, region: &Region) -> u64 {
        let element = self.tensor(region.tensor).element;
        u64::from(region.rows.len()) * element.row(region.columns.len().into())
    }
    /// Bytes of all slots in this memory: what the program takes there, besides weights that stay.
    pub fn slot_bytes(&self, memory: Memory) -> Bytes {
        let slots = self.slots.iter().filter(|s| s.memory == memory);
        match memory {
            Memory::Stream => Bytes(slots.map(|s| s.start + s.bytes).max().unwrap_or(0)),
            Memory::Device | Memory::Staging => slots.map(|s| Bytes(s.bytes)).sum(),
        }
    }
    /// The region of weights from disk that an operation reads, if it reads one.
    pub fn weights(&self, op: &Operation) -> Option<Region> {
        let last = op.reads.last().copied();
        last.filter(|region| self.tensor(region.tensor).memory == Memory::Stream)
    }
    /// How many regions an operation reads besides weights.
    pub fn operands(&self, op: &Operation) -> usize {
        op.reads.len() - usize::from(self.weights(op).is_some())
    }
    /// The ranks that it sends to, and those that it receives from.
    pub fn peers(&self) -> (Vec<Rank>, Vec<Rank>) {
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for (lane, _) in &self.lanes {
            match *lane {
                Lane::Send(rank) => to.push(rank),
                Lane::Receive(rank) => from.push(rank),
                _ => {}
            }
        }
        (to, from)
    }
}
