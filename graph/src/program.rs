//! Programs: what one device does for one batch, as operations on lanes.
//!
//! A program is data. The simulator predicts its timeline, the verifier proves things about it,
//! the executor runs it; none of them asks where it came from.

use crate::operators::OperatorId;
use galaxy_common::{
    Activations, BatchShape, Bytes, Column, Head, Kernel, Rank, Row, Share, Span, Token, WireType,
    plan::Phase, sampling::MOST_LOGPROBS,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// A resource of a device that runs one operation after another, in the order of its list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Lane {
    /// The kernels.
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
    /// What lies there, unless a tensor says something else.
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
    /// 32-bit float.
    F32,
    /// IEEE 16-bit float.
    F16,
    /// A whole number of 8 bits, with a scale for each 32 of a row ([`WireType::Q8`]).
    Q8,
    /// A byte that is no number, as of weights in the format of their piece.
    Byte,
}

impl Element {
    /// Bytes of a row of so many.
    pub const fn row(self, values: u64) -> u64 {
        match self {
            Self::F32 => WireType::F32.row(values),
            Self::F16 => WireType::F16.row(values),
            Self::Q8 => WireType::Q8.row(values),
            Self::Byte => values,
        }
    }
}

/// A value of the program: rows x columns, each element written exactly once.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Tensor {
    /// What it holds.
    pub role: Role,
    /// Rows of the batch (or, for [`Role::Wanted`] and [`Role::Logits`], of the wanted rows) that it has room for.
    pub rows: Span<Row>,
    /// Values in a row.
    pub width: u32,
    /// Where it lives.
    pub memory: Memory,
    /// What each of its elements is.
    pub element: Element,
    /// Its bytes are the first of this slot.
    pub slot: SlotId,
}

impl Tensor {
    /// Bytes of all of it.
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
    /// The inner rows of the MLP.
    Inner,
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
    /// A device's candidates for the next tokens of a batch: bytes, whose columns count as values in wire
    /// format do.
    Candidates,
    /// A piece of the shard: bytes, each a column.
    Weights,
    /// What an operation works in: it is written, and nobody reads it afterwards.
    Workspace,
}

/// A piece of memory that tensors take in turns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// Where.
    pub memory: Memory,
    /// In the buffer of [`Memory::Stream`], from which byte on; slots there may overlap. Else 0.
    pub start: u64,
    /// How much.
    pub bytes: u64,
}

/// Rows x columns of a tensor. Rows count as the tensor's do (in rows of the batch).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Region {
    /// Of which tensor.
    pub tensor: TensorId,
    /// Which rows.
    pub rows: Span<Row>,
    /// Which columns.
    pub columns: Span<Column>,
}

/// The blocks that operations belong to, for traces and costs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Block {
    /// Token and position embedding.
    Embedding,
    /// Attention.
    Attention,
    /// MLP.
    Mlp,
    /// Residual and norm between them.
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
    /// An operator that is shared by rows alone: a norm, a window. Reads the rows that those it makes need;
    /// writes rows, then `Workspace` if it needs any.
    Rows(OperatorId),
    /// A product with the device's share of the matrices of an operator. Reads [rows x in], then
    /// [rows x out] to be added, if any, then the `Weights` that make these columns, if they are not held;
    /// writes [rows x out]. It may make some of the share's columns alone.
    Product {
        /// Which.
        operator: OperatorId,
        /// What it is measured as.
        kernel: Kernel,
        /// The device's share.
        share: Span<Share>,
    },
    /// Attention of query rows. Reads [Qkv rows: queries], then [Qkv or KeysValues rows: keys and
    /// values of this batch that they see], besides those of the past that the device keeps; writes
    /// [Context rows].
    Attend {
        /// Which.
        operator: OperatorId,
        /// Query heads of the device.
        heads: Span<Head>,
        /// Key-value heads of the device.
        kv_heads: Span<Head>,
    },
    /// Puts keys and values of kept segments behind those of their past. Reads [Qkv or KeysValues rows:
    /// keys and values]; writes what no program has, the device's cache.
    Keep {
        /// Of which attention.
        operator: OperatorId,
        /// Key-value heads of the device.
        kv_heads: Span<Head>,
    },
    /// residual' = residual + bias + sum, where the sum is a partial region, a staged tile in wire
    /// format, or both; `norm` on top: with a post-norm the residual itself is normed, otherwise a
    /// second tensor takes the normed rows.
    /// Reads `Residual`, then `Partial or Sum` if `partial`, then `SumTile` if `staged`;
    /// writes `Residual'`, then `Normed` if the norm is a pre-norm.
    Join {
        /// Which residual addition. Biases join here, once.
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
        /// The edge: equal on both ends.
        transfer: u32,
        /// Tile of its collective, for traces.
        tile: u16,
    },
    /// Reads a piece of the shard from disk. Reads nothing here; writes `Weights`.
    Load {
        /// Which (`galaxy_graph::pieces`).
        piece: u32,
    },
    /// Receives a staged tile. Reads nothing here; writes `tile`.
    Receive {
        /// The edge: equal on both ends.
        transfer: u32,
        /// Tile of its collective, for traces.
        tile: u16,
    },
    /// Names the likeliest next tokens of all segments of which a token is wanted
    /// ([`BatchShape::choices`]), from the device's slice of the vocabulary and after penalties. Reads a
    /// row of logits for each of them, in their order; writes one tile of candidates
    /// ([`candidates_tile_bytes`]).
    Shortlist {
        /// That slice.
        tokens: Span<Token>,
    },
    /// Adds the candidates of a device, in rank order, to what is known of the next token of these
    /// segments. Reads a tile of candidates; writes nothing here.
    Collect,
    /// Chooses the next token of each of these segments, as every other device does, from all candidates.
    /// Reads and writes nothing here.
    Choose,
    /// Hands rows to the coordinator. Of a token it reads nothing. Reads `rows`; the result is `outputs[output]`.
    Emit {
        /// Index into [`Program::outputs`].
        output: u32,
    },
}

impl OpKind {
    /// The operator that it is of; none of what only moves or chooses.
    pub fn operator(&self) -> Option<OperatorId> {
        match *self {
            Self::Embed(operator)
            | Self::Rows(operator)
            | Self::Product { operator, .. }
            | Self::Attend { operator, .. }
            | Self::Keep { operator, .. }
            | Self::Join { add: operator, .. } => Some(operator),
            _ => None,
        }
    }
}

/// One result of a device, on its way to the coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Output {
    /// Of which segment.
    pub segment: u32,
    /// What it is.
    pub kind: OutputKind,
}

/// What a result is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum OutputKind {
    /// Hidden states of these rows (counted within the segment): rows x hidden.
    Hidden {
        /// Which rows of the segment.
        rows: Span<Row>,
    },
    /// Part of a pooled vector: 1 x hidden, over `rows` rows.
    Pooled {
        /// How rows were reduced.
        reduce: Reduce,
        /// Over how many rows.
        rows: u32,
    },
    /// The logits of the classes: 1 x labels. The engine runs the class head on the row it reads.
    Classes,
    /// Logits of a slice of the vocabulary: rows x slice.
    Logits {
        /// Rows within the segment.
        rows: Span<Row>,
        /// Which slice.
        vocabulary: Span<Token>,
    },
    /// The next token: 1 x [`TOKEN_VALUES`].
    Token,
}

/// Values of [`OutputKind::Token`]: the token, its log-probability, 1 where the candidates prove the
/// choice or else 0, 1 where a device was asked to end the burst or else 0, how many of the likeliest follow, and
/// these with their log-probabilities. All numbers are small enough for f32.
pub const TOKEN_VALUES: u32 = 5 + 2 * MOST_LOGPROBS;

/// Bytes of `count` candidates for one token: how many there are, with the highest bit where the burst is to
/// end, the least score that is sure, two log-sum-exps of the whole slice, and of each candidate the token and
/// its logit before and after penalties and temperature.
pub fn candidates_bytes(count: u32) -> u64 {
    16 + 12 * u64::from(count)
}

/// Bytes of the tile of candidates for a batch, from a device with so many tokens of the vocabulary. The
/// candidates for each choice of the batch follow one another, each as long as its own number of
/// candidates says ([`candidates_bytes`]); what is left of the tile then is of no meaning.
pub fn candidates_tile_bytes(shape: &BatchShape, tokens: u32) -> u64 {
    shape.choices().map(|(_, _, breadth)| candidates_bytes(breadth.of(tokens))).sum()
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

/// "Not before that lane has finished its first `count` operations."
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Wait {
    /// Another lane of the same device.
    pub lane: LaneId,
    /// How many of its operations.
    pub count: u32,
}

/// Regions of an operation: mostly one or two, and then without memory of their own.
pub type Regions = SmallVec<[Region; 2]>;

/// An operation.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Operation {
    /// What it does.
    pub kind: OpKind,
    /// On which lane.
    pub lane: LaneId,
    /// What it reads.
    pub reads: Regions,
    /// What it writes.
    pub writes: Regions,
    /// What it waits for, besides the operation before it on its lane; at most one for each lane.
    pub waits: SmallVec<[Wait; 4]>,
    /// Bytes of slots that are taken by its start (first writes).
    pub takes: Bytes,
    /// Bytes of slots that are free after its end (last uses).
    pub gives: Bytes,
    /// The block it belongs to,
    pub block: Block,
    /// and the layer of that block.
    pub layer: u32,
}

/// What one device does for one batch shape.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Program {
    /// Whose.
    pub rank: Rank,
    /// Of which phase: what devices have of the model in it.
    pub phase: Phase,
    /// How tiles are written.
    pub wire: WireType,
    /// To what rows are rounded that are multiplied with weights in blocks.
    pub activations: Activations,
    /// Its values.
    pub tensors: Vec<Tensor>,
    /// Their memory.
    pub slots: Vec<Slot>,
    /// Its operations, in an order that respects every wait and every lane.
    pub operations: Vec<Operation>,
    /// Lanes that are used, and their operations in order.
    pub lanes: Vec<(Lane, Vec<OpId>)>,
    /// Results.
    pub outputs: Vec<Output>,
}

impl Program {
    /// An operation.
    pub fn operation(&self, id: OpId) -> &Operation {
        &self.operations[id.0 as usize]
    }
    /// The rows that it embeds.
    pub fn embedded(&self) -> Span<Row> {
        let embeds = self.operations.iter().filter(|op| matches!(op.kind, OpKind::Embed(_)));
        let rows = embeds.flat_map(|op| &op.writes).map(|region| region.rows);
        rows.fold(Span::empty(), Span::hull)
    }
    /// A tensor.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0 as usize]
    }
    /// Bytes of a region.
    pub fn region_bytes(&self, region: &Region) -> u64 {
        let element = self.tensor(region.tensor).element;
        u64::from(region.rows.len()) * element.row(region.columns.len().into())
    }
    /// Bytes of all slots: what the program takes besides weights that stay.
    pub fn slot_bytes(&self, memory: Memory) -> Bytes {
        let slots = self.slots.iter().filter(|s| s.memory == memory);
        match memory {
            Memory::Stream => Bytes(slots.map(|s| s.start + s.bytes).max().unwrap_or(0)),
            Memory::Device | Memory::Staging => slots.map(|s| Bytes(s.bytes)).sum(),
        }
    }
    /// What of the reads of an operation are weights from disk.
    pub fn weights(&self, op: &Operation) -> Option<Region> {
        let last = op.reads.last().copied();
        last.filter(|region| self.tensor(region.tensor).memory == Memory::Stream)
    }
    /// How many regions an operation reads besides weights.
    pub fn operands(&self, op: &Operation) -> usize {
        op.reads.len() - usize::from(self.weights(op).is_some())
    }
    /// The peers that it sends to and receives from.
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
