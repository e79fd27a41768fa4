//! End-to-end tests and measurements: golden outputs, clusters of real processes, faults.

pub mod cgroup;
pub mod emulate;
pub mod environment;
pub mod golden;
#[cfg(target_os = "linux")]
pub mod inside;
pub mod lean;
#[cfg(target_os = "linux")]
pub mod metronome;
pub mod models;
pub mod overlap;
pub mod pairwise;
pub mod processes;
#[cfg(target_os = "linux")]
pub mod quotas;
