//! End-to-end tests and measurements: golden outputs, clusters of real processes, faults.

pub mod emulate;
pub mod environment;
pub mod golden;
pub mod lean;
pub mod models;
pub mod overlap;
pub mod pairwise;
pub mod plot;
pub mod processes;
