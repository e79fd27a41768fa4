//! Delay and loss of links, for kernels without netem.

use crate::network::Missing;
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// A link that delays or loses.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Line {
    /// The place's number: the hub's end is named after it.
    pub i: usize,
    /// The place's name.
    pub place: String,
    /// Added to all that its device sends, ns.
    pub delay_ns: u64,
    /// The share of packets that is lost, each way.
    pub loss: f64,
    /// Bits per second.
    pub rate: u64,
}

/// What this machine lacks for delays and losses.
pub(crate) fn missing() -> Vec<Missing> {
    Vec::new()
}

/// Starts the forwarder of a testbed, and waits until its interfaces are there.
pub(crate) fn start(_testbed: &str, lines: &[Line]) -> Result<()> {
    bail!("{} links delay or lose, which comes with the next change", lines.len())
}
