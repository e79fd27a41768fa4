//! The [`Engine`] trait: what runs the operations of a compute lane, each to its end.

use crate::{
    sampler::{Sequence, TokenMask},
    stream::Stream,
    weights::{Shard, WeightError},
};
use galaxy_common::{BatchShape, Bytes, Row, Span};
use galaxy_graph::program::{Operation, Program, Slot};
use galaxy_model::ModelSpec;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

#[cfg(feature = "burn")]
pub mod burn;
mod cache;
mod call;
pub mod choice;
pub mod cpu;
pub mod kernels;
mod op_error;
mod sequences;
mod start;

/// What the rows of a batch are computed from.
#[derive(Clone, PartialEq, Debug)]
pub enum Inputs {
    /// A token id for each row, all of type 0.
    Tokens(Arc<[u32]>),
    /// A token id for each row, and the row's type: which of two texts it belongs to.
    Typed {
        /// The token ids, one for each row.
        tokens: Arc<[u32]>,
        /// The token types, one for each row.
        types: Arc<[u8]>,
    },
    /// Image patches: some rows of the batch, from `first` on, as
    /// [`Patches::cut`](galaxy_model::Patches::cut) gives them. The row of the class token is not read.
    Patches {
        /// The row of the batch that the first of these patches belongs to.
        first: u32,
        /// The values of the patches, `[rows, values]`.
        values: Arc<[f32]>,
    },
}

impl Inputs {
    /// Token ids, each with its type.
    pub fn typed(tokens: Vec<u32>, types: Vec<u8>) -> Self {
        match types.iter().all(|kind| *kind == 0) {
            true => tokens.into(),
            false => Self::Typed { tokens: tokens.into(), types: types.into() },
        }
    }

    /// Arbitrary inputs for `rows` rows of a model, others for each `seed`: for measuring.
    pub fn any(spec: &ModelSpec, rows: u32, seed: u32) -> Self {
        let number = |at: u32| seed.wrapping_add(at).wrapping_mul(7919);
        match spec.patches {
            Some(patches) => {
                let count = u64::from(rows) * u64::from(patches.values());
                let value = |at: u64| (number(at as u32) % 255) as f32 / 127.0 - 1.0;
                Self::Patches { first: 0, values: (0..count).map(value).collect() }
            }
            None => {
                let vocabulary = spec.vocabulary.max(1);
                let tokens = (0..rows).map(|at| number(at) % vocabulary).collect();
                // The table of types is added in any case; where it has several rows, all are used.
                let kinds = spec.token_types.clamp(1, 1 << 8);
                Self::typed(tokens, (0..rows).map(|at| (at % kinds) as u8).collect())
            }
        }
    }

    /// The part that a device needs which embeds these rows of a batch of `spec`.
    pub fn part(&self, spec: &ModelSpec, rows: Span<Row>) -> Self {
        match (self, spec.patches) {
            (Self::Patches { first, values }, Some(patches)) => {
                let width = patches.values() as usize;
                let at = |row: u32| row.saturating_sub(*first) as usize * width;
                let range = at(rows.start())..at(rows.end());
                let part = values.get(range).unwrap_or_default();
                Self::Patches { first: rows.start(), values: part.into() }
            }
            _ => self.clone(),
        }
    }
}

impl From<Arc<[u32]>> for Inputs {
    fn from(tokens: Arc<[u32]>) -> Self {
        Self::Tokens(tokens)
    }
}

impl From<Vec<u32>> for Inputs {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens.into())
    }
}

impl From<&[u32]> for Inputs {
    fn from(tokens: &[u32]) -> Self {
        Self::Tokens(tokens.into())
    }
}

/// The parts of a batch that a program does not contain: they are bound when it runs.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The segments of the batch.
    pub shape: BatchShape,
    /// The inputs of all rows, or of those that the device embeds.
    pub inputs: Inputs,
    /// For each choice of the batch ([`BatchShape::sampled`]), which tokens may be chosen: all without a
    /// mask. May be shorter than the choices.
    pub masks: Vec<Option<TokenMask>>,
    /// The flag by which others ask the burst to end.
    pub ending: Ending,
}

/// Asks a decode burst to end early, from any thread. A device that has a slice of the vocabulary says so with its
/// candidates, so that all devices end it behind the same step.
#[derive(Clone, Debug, Default)]
pub struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Asks for the burst to end.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the burst was asked to end.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Binding {
    /// A binding of segments and the inputs of their rows, without masks.
    pub fn new(shape: BatchShape, inputs: impl Into<Inputs>) -> Self {
        Self { shape, inputs: inputs.into(), masks: Vec::new(), ending: Ending::default() }
    }

    /// The mask of a choice of the batch; none where every token may be chosen.
    pub(crate) fn mask(&self, choice: usize) -> Option<&TokenMask> {
        self.masks.get(choice)?.as_ref()
    }
}

/// Host memory in wire format that an operation reads or writes, handed over by the executor.
///
/// Bytes are little endian values of the program's wire type, aligned to 4, row after row.
#[derive(Default)]
pub struct Staged<'a> {
    /// The tile that the operation adds or imports, if it reads one.
    pub input: Option<&'a [u8]>,
    /// The tile that the operation exports, if it writes one.
    pub output: Option<&'a mut [u8]>,
    /// The weights that were loaded for the operation, if it reads any from disk.
    pub weights: Option<&'a [u8]>,
    /// Where `Emit` puts its values, rows x width of its output, and `Sample` its choice.
    pub emitted: Option<&'a mut [f32]>,
}

/// Why an engine failed.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// The memory for slots cannot be allocated.
    #[error("the device has no room for {wanted} of activations")]
    Memory {
        /// The memory that was asked for.
        wanted: Bytes,
    },
    /// Weights cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The device is missing, or failed.
    #[error("the compute device failed: {why}")]
    Device {
        /// The message of the device.
        why: String,
    },
    /// The KV cache has no room for a sequence.
    #[error("the sequence in slot {slot} cannot continue on this device: {why}")]
    Sequence {
        /// The slot of the sequence.
        slot: u32,
        /// The reason, for people.
        why: &'static str,
    },
    /// The mask of a sequence leaves no token to choose.
    #[error(
        "no token may be sampled for the sequence in slot {slot}: its mask allows none that the model has"
    )]
    NoToken {
        /// The slot of the sequence.
        slot: u32,
    },
    /// The engine does not know the operation, or its regions do not fit together.
    #[error("operation {operation} does not fit this device's shard: {why}")]
    Operation {
        /// The kind of the operation, with its attributes.
        operation: String,
        /// The reason, for people.
        why: String,
    },
}

/// What runs the compute lane of one device. It owns its weights and its slots.
///
/// The executor calls it from one thread, the compute thread. An engine that works asynchronously
/// returns from [`Engine::run`] when the operation is complete; one with a copy lane of its own may
/// overlap inside.
///
/// *The row contract:* a row's result is the same to the bit whatever the number of rows beside it in the batch, and
/// whether the rows that it sees are in the batch or are cached (ADR 0036). The cpu engine keeps it; the burn engine,
/// whose sums are the backend's matter, does not.
pub trait Engine: Send {
    /// Makes room for the device slots of a program; staging is the executor's. Room is kept and
    /// reused: after the largest program nothing is allocated any more. Called before a run of another
    /// program, and before any that follows a run that failed: nothing of that one is left then.
    ///
    /// # Errors
    /// When the memory is not there.
    fn prepare(&mut self, slots: &[Slot]) -> Result<(), ComputeError>;

    /// Runs one operation of the compute lane to its end.
    ///
    /// # Errors
    /// When the operation does not fit the shard, or an embedding row cannot be read.
    fn run(
        &mut self,
        program: &Program,
        operation: &Operation,
        binding: &Binding,
        staged: Staged<'_>,
    ) -> Result<(), ComputeError>;

    /// Takes room for the keys and values of a sequence in these blocks of the cache, one behind another, and
    /// remembers how its tokens are chosen. Where its slot has a sequence, these blocks take the place of
    /// that one's: rows of blocks that both have stay. Which blocks they are changes no result, and sequences
    /// may share some ([`galaxy_common::BlockTables`]). After this nothing is allocated for it.
    ///
    /// # Errors
    /// When the blocks are too few for its rows, or the cache does not have them.
    fn begin(&mut self, text: &Sequence, _blocks: &Arc<[u32]>) -> Result<(), ComputeError> {
        Err(ComputeError::Sequence { slot: text.slot, why: "this engine has no KV cache" })
    }

    /// Forgets a sequence, and gives its blocks back.
    fn end(&mut self, _slot: u32) {}

    /// Forgets all sequences.
    fn end_all(&mut self) {}

    /// The number of classes of the model's class head; 0 without one.
    fn labels(&self) -> u32;

    /// Bytes of weights as held, and of slots together with the KV cache.
    fn held(&self) -> (Bytes, Bytes);

    /// The stream that brings weights from disk, if some are not held.
    fn streams(&self) -> Option<Arc<Stream>> {
        None
    }

    /// Its shard, for another engine to take over; none from an engine that holds weights in a form of its
    /// own.
    fn into_shard(self: Box<Self>) -> Option<Shard> {
        None
    }
}
