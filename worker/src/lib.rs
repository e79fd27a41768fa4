//! The worker of a device: the control service that a coordinator drives, and the ring links to
//! the other devices of a plan.
//!
//! - [`serve`]: a worker as a whole; one port, told apart by ALPN.
//! - [`state`]: what the worker is doing, as a pure state machine.
//! - `place`: checks the plan and the budget, holds the shard, forms the links of an epoch.
//! - `content`: models of which this device has no directory come in pieces, into a cache.
//! - `execute`: lowers, compares digests, runs in sequence order, streams the results.
//! - `running`: the shard, the epoch that is placed, and its programs.
//! - `profile`, `probe`: measure the device, and its links.
//! - [`ring`]: how devices find each other, and the links that carry tiles.
//! - [`error`]: every way to fail, and what the coordinator gets to know of it.
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
mod running;
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
