//! Emulated devices and links, experiments on them, and end-to-end tests: golden outputs, clusters of
//! real processes, faults.

pub mod air;
pub mod ballast;
pub mod bound;
pub mod calibrate;
pub mod cgroup;
pub mod coldstart;
pub mod desk;
pub mod drift;
pub mod environment;
pub mod evaluation;
pub mod experiment;
pub mod forward;
pub mod golden;
pub mod health;
pub mod holding;
pub mod hostile;
pub mod inside;
pub mod instance;
pub mod join;
pub mod kernels;
pub mod lean;
pub mod links;
pub mod metronome;
pub mod models;
pub mod network;
pub mod pairwise;
pub mod peer;
pub mod plot;
pub mod probes;
pub mod processes;
pub mod quotas;
pub mod reader;
pub mod record;
pub mod report;
pub mod stage;
