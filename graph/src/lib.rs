//! Programs of operations, their lowering, the verifier and the simulator.
//!
//! A [`galaxy_common::Plan`] and a [`galaxy_common::BatchShape`] are lowered into one
//! [`program::Program`] for each device. The same programs are verified, simulated, and executed.
//! Everything here is pure: no clock, no files, no sockets; equal inputs give equal outputs.

pub mod budget;
pub mod holdings;
mod ids;
pub mod least_memory;
pub mod lower;
mod lowered;
pub mod offsets;
pub mod operators;
pub mod pieces;
pub mod program;
pub mod select;
pub mod share;
pub mod simulate;
pub mod timeline;
pub mod truncated;
pub mod verify;

pub use lower::{LowerError, digest, links, lower, takes};
pub use lowered::{Lowered, Whole};
pub use program::Program;
pub use select::{Selected, Selection};
pub use simulate::{
    ByteCost, Cable, Costs, Counted, Deadlock, Disk, FRAME_OVERHEAD, LinkRate, Observed, Predicted,
    simulate,
};
pub use verify::{VerifyError, verify, verify_graph};
