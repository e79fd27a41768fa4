//! The worker of a device: the control service that a coordinator drives, and the ring links to
//! the other devices of a plan.
//!
//! - [`serve`]: a worker as a whole; one port, told apart by ALPN.
//! - [`state`]: what it is doing, as a pure state machine.
//! - `place`: check the plan and the budget, hold the shard, form the links of an epoch.
//! - `content`: models of which this device has no directory come in pieces, into a cache.
//! - `execute`: lower, compare digests, run in sequence order, stream the results.
//! - `profile`, `probe`: the device, and its links, measure themselves.
//! - [`ring`]: how devices find each other, and the links that carry tiles.
//! - [`error`]: every way to fail, and how the coordinator is told.
//!
//! Async tasks do no tensor maths; whatever blocks runs on threads of its own.

mod announce;
mod burst;
mod content;
mod core;
mod execute;
mod place;
mod probe;
mod profile;
mod service;

pub mod error;
#[doc(hidden)]
pub mod fuzz;
pub mod models;
pub mod ring;
pub mod serve;
pub mod state;
mod tasks;

pub use content::{ContentError, cache::CacheConfig};
pub use serve::{StartError, Worker, WorkerConfig};
