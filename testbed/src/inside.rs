//! Starting a program on a device: in its namespace, in its control groups, on its core.
//!
//! The hidden command `inside` becomes the program that it is given, so that it has the process id
//! that was started, and no process of ours stays above it.

use crate::{cgroup::Group, environment::Hold, namespaces::enter, programs};
use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::thread::{self, CpuSet};
use std::{
    ffi::{OsStr, OsString},
    io,
    os::unix::process::CommandExt,
    process::Command,
};

/// Where a program is to run.
#[derive(Args, Debug)]
pub struct Options {
    /// The network namespace, by name; without it, this process's own.
    #[arg(long)]
    network: Option<String>,
    /// The control groups, as TESTBED/DEVICE; without them, this process's own.
    #[arg(long)]
    group: Option<String>,
    /// The part of the program that runs under the quota at once.
    #[arg(long, value_enum, default_value = "none")]
    hold: Occupant,
    /// The only core to run on.
    #[arg(long)]
    core: Option<usize>,
    /// The program and its arguments.
    #[arg(required = true, last = true)]
    program: Vec<OsString>,
}

/// The part of a program that runs under the quota from the start.
#[derive(Clone, Copy, clap::ValueEnum, Debug)]
enum Occupant {
    /// The whole process.
    Process,
    /// Nothing, until threads of the program are put under it.
    None,
}

/// A command that runs `program` on a device. With [`Hold::Compute`] it starts beside the quota,
/// and its threads are put under it by [`Group::hold_thread`].
///
/// # Errors
/// When `galaxy-testbed` is not built.
pub fn command(
    testbed: &str,
    device: &str,
    hold: Hold,
    core: Option<usize>,
    program: impl AsRef<OsStr>,
) -> Result<Command> {
    let mut command = Command::new(programs::program("galaxy-testbed")?);
    command.args(["inside", "--network", &format!("galaxy-{testbed}-{device}")]);
    command.args(["--group", &format!("{testbed}/{device}")]);
    if hold == Hold::Process {
        command.args(["--hold", "process"]);
    }
    if let Some(core) = core {
        command.args(["--core", &core.to_string()]);
    }
    command.arg("--").arg(program);
    Ok(command)
}

/// Becomes the program; returns only with an error.
///
/// # Errors
/// When there is no such namespace, group, core or program.
pub fn run(options: &Options) -> Result<()> {
    if let Some(network) = &options.network {
        enter(network)?;
    }
    if let Some(core) = options.core {
        pin(core)?;
    }
    if let Some(group) = &options.group {
        let (testbed, device) = group.split_once('/').context("--group is TESTBED/DEVICE")?;
        let (group, me) = (Group::open(testbed, device)?, std::process::id());
        match options.hold {
            Occupant::Process => group.hold_process(me)?,
            Occupant::None => group.adopt(me)?,
        }
    }
    let (program, arguments) = options.program.split_first().context("no program is given")?;
    let error = Command::new(program).args(arguments).exec();
    let name = program.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound => bail!(
            "there is no program {name:?}, as a path or in PATH; devices see the files of this \
             machine"
        ),
        _ => Err(error).with_context(|| format!("{name:?} does not start")),
    }
}

/// Keeps this thread, and those that it starts from now on, on one core.
///
/// # Errors
/// When this machine or this process has no such core.
pub fn pin(core: usize) -> Result<()> {
    let have = cores()?;
    if !have.contains(&core) {
        bail!("core {core} is not among those of this process: {have:?}");
    }
    let mut set = CpuSet::new();
    set.set(core);
    thread::sched_setaffinity(None, &set).with_context(|| format!("cannot keep to core {core}"))
}

/// The cores that this thread may run on.
///
/// # Errors
/// When the system does not report them.
pub fn cores() -> Result<Vec<usize>> {
    let set = thread::sched_getaffinity(None).context("cannot tell the cores of this process")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect())
}
