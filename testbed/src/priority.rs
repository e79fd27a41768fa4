//! The real-time priorities of threads.

use std::process::{Command, Stdio};

/// The real-time priority of kernels behind a gate: above all that is not real-time.
pub(crate) const KERNELS: u8 = 1;
/// The real-time priority of the thread that puts kernels there: the weight of its own testbed would keep it
/// waiting.
pub(crate) const HOLDER: u8 = 2;

/// Gives a thread a real-time priority, where that is granted: without, it is late at times.
pub(crate) fn real_time(thread: u32, priority: u8) {
    let mut command = Command::new("chrt");
    command.args(["--fifo", "--pid", &priority.to_string(), &thread.to_string()]);
    let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}
