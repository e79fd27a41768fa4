//! End-to-end tests and measurements: golden outputs, clusters of real processes, faults.

pub mod golden;
pub mod pairwise;
