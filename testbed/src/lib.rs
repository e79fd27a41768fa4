//! End-to-end tests and measurements: golden outputs, clusters of real processes, faults.

pub mod environment;
pub mod forward;
pub mod golden;
pub mod lean;
pub mod links;
pub mod models;
pub mod network;
pub mod overlap;
pub mod pairwise;
pub mod processes;
