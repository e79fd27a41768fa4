//! The coordinator: the one place that clients ask.
//!
//! A request comes in through [`api`], is checked and turned into batches by [`session`], waits in [`admission`], and
//! runs on the [`fleet`] (sequences that generate tokens run together, as `scheduler` decides): on workers over gRPC,
//! whose presence [`membership`] follows and whose parts [`placement`] cuts from the [`cluster`] file or from profiles,
//! or on engines in this process. What devices and links can do is measured by [`profile`]; [`drift`] notices when a
//! device does it no longer. Workers without the model are supplied with what they need of it (`supply`). Activations
//! never pass through here: devices hand over results only.

pub mod admission;
pub mod api;
pub mod audit;
pub mod client_memory;
pub mod cluster;
mod connection;
pub mod drift;
pub mod error;
mod fair;
pub mod fleet;
#[doc(hidden)]
pub mod fuzz;
mod kv_blocks;
mod members;
pub mod membership;
mod model_server;
pub mod placement;
pub mod profile;
pub mod reception;
pub mod registry;
mod scheduler;
pub mod session;
pub mod trace;

pub use cluster::{Cluster, ClusterError};
pub use error::RequestError;
pub use fleet::{Fleet, Loading, LocalFleet, Notice, Planning, ProfileSource, RemoteFleet};
pub use session::{Embed, Input, Items, Limits, Prefix, RunOutput, Session};
