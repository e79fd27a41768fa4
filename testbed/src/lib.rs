//! End-to-end tests and measurements: golden outputs, clusters of real processes, faults.

pub mod bound;
pub mod environment;
pub mod forward;
pub mod golden;
pub mod health;
pub mod lean;
pub mod models;
pub mod network;
pub mod overlap;
pub mod pairwise;
pub mod processes;
pub mod stage;
pub mod record;
pub mod report;
pub mod spread;
