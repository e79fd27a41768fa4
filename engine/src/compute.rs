//! The seam between programs and what multiplies: one trait, opaque buffers, completion by signal.

use crate::weights::{Shard, WeightError};
use galaxy_common::{BatchShape, Bytes};
use galaxy_graph::program::{Operation, Program, Slot};
use std::sync::Arc;

#[cfg(feature = "burn")]
pub mod burn;
mod call;
pub mod choice;
pub mod cpu;
pub mod kernels;

/// What of a batch a program does not contain: bound when it runs.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The segments.
    pub shape: BatchShape,
    /// Token ids, one for each row of the batch.
    pub tokens: Arc<[u32]>,
}

/// Host memory in wire format that an operation reads or writes, handed over by the executor.
///
/// Bytes are little endian values of the program's wire type, aligned to 4, row after row.
pub struct Staged<'a> {
    /// The tile that the operation adds or imports, if it reads one.
    pub input: Option<&'a [u8]>,
    /// The tile that the operation exports, if it writes one.
    pub output: Option<&'a mut [u8]>,
    /// Where `Emit` puts its values: rows x width of its output.
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
pub trait Engine: Send {
    /// Makes room for the device slots of a program; staging is the executor's. Room is kept and
    /// reused: after the largest program nothing is allocated any more.
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

    /// Classes that the model's head tells apart; 0 without such a head.
    fn labels(&self) -> u32;

    /// Bytes of weights as held, and of slots as held.
    fn held(&self) -> (Bytes, Bytes);

    /// Its shard, to be made another; nothing from an engine that holds weights in a form of its own.
    fn into_shard(self: Box<Self>) -> Option<Shard> {
        None
    }
}
