//! The seam between programs and what multiplies: one trait, opaque buffers, completion by signal.

use crate::{
    choose::{Text, TokenMask},
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
mod texts;

/// What the rows of a batch are made of.
#[derive(Clone, PartialEq, Debug)]
pub enum Inputs {
    /// A token id for each row, all of type 0.
    Tokens(Arc<[u32]>),
    /// A token id for each row, and the row's type: which of two texts it belongs to.
    Typed {
        /// The ids.
        tokens: Arc<[u32]>,
        /// As many types.
        types: Arc<[u8]>,
    },
    /// Squares of pixels: some rows of the batch, from `first` on, as
    /// [`Patches::cut`](galaxy_model::Patches::cut) gives them. Those of the class are not read.
    Patches {
        /// The first of them.
        first: u32,
        /// `[rows, values]`
        values: Arc<[f32]>,
    },
}

impl Inputs {
    /// Tokens, each of its type.
    pub fn typed(tokens: Vec<u32>, types: Vec<u8>) -> Self {
        match types.iter().all(|kind| *kind == 0) {
            true => tokens.into(),
            false => Self::Typed { tokens: tokens.into(), types: types.into() },
        }
    }

    /// Something for `rows` rows of a model, another for each `seed`: for measuring.
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

    /// What of it a device needs that embeds these rows of a batch of `spec`.
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

/// What of a batch a program does not contain: bound when it runs.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The segments.
    pub shape: BatchShape,
    /// What their rows are made of: all of them, or those that the device embeds.
    pub inputs: Inputs,
    /// For each choice of the batch ([`BatchShape::choices`]), which tokens may be chosen: all without a
    /// mask. May be shorter than the choices.
    pub masks: Vec<Option<TokenMask>>,
    /// By which others ask the burst to end.
    pub ending: Ending,
}

/// Asks a decode burst to end early, from any thread. A device that has a slice of the vocabulary says so with its
/// candidates, so that all devices end it behind the same step.
#[derive(Clone, Debug, Default)]
pub struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Asks for it.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Binding {
    /// Segments and their rows; every token may be chosen.
    pub fn new(shape: BatchShape, inputs: impl Into<Inputs>) -> Self {
        Self { shape, inputs: inputs.into(), masks: Vec::new(), ending: Ending::default() }
    }

    /// Which tokens may be chosen for a choice of the batch; all without a mask.
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
    /// Where `Emit` puts its values: rows x width of its output; and where `Choose` tells of its choice.
    pub emitted: Option<&'a mut [f32]>,
}

/// What went wrong in an engine.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// Memory for slots could not be had.
    #[error("the device has no room for {wanted} of activations")]
    Memory {
        /// How much was asked for.
        wanted: Bytes,
    },
    /// Weights that could not be read.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// A device that is not there, or that failed.
    #[error("the compute device failed: {why}")]
    Device {
        /// What it said.
        why: String,
    },
    /// A text that cannot be kept.
    #[error("text {slot} cannot go on here: {why}")]
    Text {
        /// Its slot.
        slot: u32,
        /// Why.
        why: &'static str,
    },
    /// A mask that leaves no token to choose.
    #[error(
        "no token may be chosen for the sequence in slot {slot}: its mask allows none that the model has"
    )]
    NoToken {
        /// Where the sequence is kept.
        slot: u32,
    },
    /// An operation that this engine does not know, or regions that do not fit together.
    #[error("operation {operation} does not fit this device's shard: {why}")]
    Operation {
        /// Which.
        operation: String,
        /// Why.
        why: String,
    },
}

/// What runs the compute lane of one device. It owns its weights and its slots.
///
/// The executor calls it from one thread, the compute thread. An engine that works asynchronously
/// returns from [`Engine::run`] when the operation is complete; one with a copy lane of its own may
/// overlap inside.
///
/// *The row contract:* a row's result is the same to the bit whatever the number of rows beside it in the batch,
/// and whether the rows that it sees are in the batch or were kept (ADR 0036). The cpu engine keeps it; the burn
/// engine, whose sums are the backend's matter, does not.
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

    /// Takes room for the keys and values of a text in these blocks of the cache, one behind another, and
    /// remembers how its tokens are chosen; a text of the same slot goes on with the blocks that it has, and
    /// more. Which blocks they are changes no result, and texts may share some
    /// ([`galaxy_common::BlockTables`]). After this nothing is allocated for it.
    ///
    /// # Errors
    /// When they are too few for its rows, or the cache does not have them.
    fn begin(&mut self, text: &Text, _blocks: &Arc<[u32]>) -> Result<(), ComputeError> {
        Err(ComputeError::Text { slot: text.slot, why: "this engine keeps nothing" })
    }

    /// Forgets a text, and gives its room back.
    fn end(&mut self, _slot: u32) {}

    /// Forgets all texts.
    fn end_all(&mut self) {}

    /// Classes that the model's head tells apart; 0 without such a head.
    fn labels(&self) -> u32;

    /// Bytes of weights as held, and of slots and of what is kept of texts.
    fn held(&self) -> (Bytes, Bytes);

    /// What brings its weights from disk, if something does.
    fn streams(&self) -> Option<Arc<Stream>> {
        None
    }

    /// Its shard, to be made another; nothing from an engine that holds weights in a form of its own.
    fn into_shard(self: Box<Self>) -> Option<Shard> {
        None
    }
}
