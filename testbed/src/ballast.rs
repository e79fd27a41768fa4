//! Ballast: takes a device's quota while the device has nothing to compute.
//!
//! The kernel gives a group its slice at the begin of each period, used before or not. So a device
//! that waited for a tile would compute its next millisecond at the speed of a whole core, each time
//! it waits: a strategy that waits often would run on faster devices than one that does not (by a
//! fifth, measured with `megatron` on two boards of environment A). With a thread of the lowest
//! priority in the same group, a slice that the kernels do not use is gone, as time is on a real
//! device.

use crate::{environment::Hold, inside};
use anyhow::{Context, Result};
use std::process::{Child, Stdio};

/// The ballast of one device, which ends when dropped.
pub struct Ballast(Child);

impl Ballast {
    /// Starts the ballast on the core of the device's kernels.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(testbed: &str, device: &str, core: usize) -> Result<Self> {
        // SCHED_IDLE: whatever else wakes goes first, at once.
        let mut command = inside::command(testbed, device, Hold::Process, Some(core), "chrt")?;
        command.args(["-i", "0"]).arg(std::env::current_exe()?).arg("ballast");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self).with_context(|| format!("the ballast of {device}"))
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the ballast's process, which never ends by itself.
pub fn run() -> ! {
    loop {
        std::hint::spin_loop();
    }
}
