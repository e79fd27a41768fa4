//! Runs programs on a device.
//!
//! [`executor::Executor`] runs the lanes of a program: one thread for the kernels, which owns an
//! [`compute::Engine`], and one for each end of a [`link`]. [`local::LocalCluster`] runs whole plans
//! in one process over links in memory.

pub mod compute;
mod draft;
pub mod executor;
pub mod generate;
pub mod link;
pub mod local;
pub mod measure;
pub mod merge;
pub mod network;
pub mod pace;
pub mod sampler;
mod staging;
pub mod stream;
pub mod weights;
