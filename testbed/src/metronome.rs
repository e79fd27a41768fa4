//! The metronome: the process by which short quotas hold.
//!
//! The kernel looks at what a running thread has left of its quota only at its own tick, each 4 ms
//! or 10 ms, or when the thread is interrupted by another. A device of a seventh of a core then
//! runs for 4 ms and stands still for 24 ms, which no slow processor does. So a thread on every
//! core wakes often and goes back to sleep: each time the kernel accounts for what ran.

use crate::{
    cgroup::Hierarchies,
    inside::{cores, pin},
    namespaces::{enter, network_file},
    programs::program,
};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rustix::{
    process::setpriority_process,
    thread::{self, ClockId},
    time::{Timespec, clock_gettime},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    num::NonZeroU64,
    os::unix::{
        fs::{FileExt, MetadataExt},
        process::{CommandExt, ExitStatusExt},
    },
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

/// The time between two wakes, in microseconds.
///
/// Measured on a virtual machine of two cores with a tick of 4 ms, beside compilers that wanted
/// both cores, devices of 0.07, 0.14 and 0.285 on one core and one of 0.75 on the other:
///
/// | each | a core's time that it takes | what a busy thread loses besides | furthest share of a second, of the four | 0.75 ran at a stretch (median, p90) |
/// | --- | --- | --- | --- | --- |
/// | never | 0 | 0 | 39% | 4.0, 4.9 ms |
/// | 1000 us | 1.2% | 0.7% | 1.4% | 3.0, 3.0 ms |
/// | 500 us | 2.8% | 1.7% | 0.7% | 1.5, 3.5 ms |
/// | 200 us | 6.6% | 5% | 0.6% | 1.6, 1.6 ms |
///
/// With the cores to itself a device of 0.14 runs for 1.0 ms at a stretch (p90 1.3 ms) at 500 us,
/// and every second is exact to 0.3%. More often costs more than it mends.
pub const EACH_US: u64 = 500;
/// The time between two looks at whether the testbed is still there.
const LOOK: Duration = Duration::from_secs(1);
/// The real-time priority of the metronome: above all that is not real-time, and below what the kernel runs
/// at 50 and 99.
const PRIORITY: &str = "10";
/// The beginning of the line that the metronome prints once it runs.
const READY: &str = "metronome:";

/// The options of `galaxy-testbed metronome`.
#[derive(Args, Debug)]
pub struct Options {
    /// The testbed's name.
    testbed: String,
    /// Microseconds between wakes.
    #[arg(long, default_value_t = EACH_US, value_parser = clap::value_parser!(u64).range(50..=4000))]
    each_us: u64,
    /// The gates that open and shut in turn, as JSON.
    #[arg(long, default_value = "[]")]
    gates: String,
    /// How long each turn of the gates takes, in microseconds.
    #[arg(long, value_parser = clap::value_parser!(u64).range(200..=20_000))]
    turn_us: u64,
    /// Set by the metronome itself once its priority is as high as it can be.
    #[arg(long, hide = true)]
    as_is: Option<String>,
}

/// A device's gate, which lets its kernels run for their share of each turn, and stops them for the rest.
///
/// Unlike a quota of the kernel it gives nothing back to a device that waited: time that was not used is
/// gone, as on a real device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Gate {
    /// The core of the kernels; the gates of one core open one after the other.
    pub core: usize,
    /// The file that freezes the kernels and lets them go on.
    pub file: PathBuf,
    /// The share of each turn for which the gate is open.
    pub share: f64,
}

/// Starts the metronome of a testbed, which ends with the testbed. Returns its process id, and how it runs.
///
/// # Errors
/// When it does not start; the error is what it printed.
pub fn start(testbed: &str, each_us: u64, turn: Duration, gates: &[Gate]) -> Result<(u32, String)> {
    let mut child = Command::new(program("galaxy-testbed")?)
        .args(["metronome", testbed, "--each-us", &each_us.to_string()])
        .args(["--turn-us", &turn.as_micros().to_string()])
        .args(["--gates", &serde_json::to_string(gates)?])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // The metronome outlives us, and must not keep pipes open that others read from.
        .stderr(Stdio::piped())
        // A group of its own: an interrupt at the terminal is not meant for it.
        .process_group(0)
        .spawn()
        .context("the metronome does not start")?;
    let mut line = String::new();
    let said = child.stdout.take().context("its output is piped")?;
    BufReader::new(said).read_line(&mut line)?;
    if !line.starts_with(READY) {
        let mut why = String::new();
        let _ = child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut why));
        bail!("the metronome ended ({}): {}", child.wait()?, why.trim());
    }
    Ok((child.id(), line.trim_start_matches(READY).trim().to_owned()))
}

/// Wakes again and again until the namespace of the testbed's hub has lost its name.
///
/// # Errors
/// When there is no such namespace, or without root.
pub fn run(options: &Options) -> Result<()> {
    let hub = format!("galaxy-{}-hub", options.testbed);
    match &options.as_is {
        None => promote(options, &hub),
        Some(how) => beat(options, &hub, how, serde_json::from_str(&options.gates)?),
    }
}

/// Enters the namespace where `down` finds it, takes the highest priority that it gets, and starts over.
fn promote(options: &Options, hub: &str) -> Result<()> {
    Hierarchies::find()?.allow_real_time(std::process::id())?;
    enter(hub)?;
    let me = std::env::current_exe()?;
    let granted =
        Command::new("chrt").args(["-f", PRIORITY, "true"]).stderr(Stdio::null()).status();
    let (mut command, how) = match granted {
        Ok(status) if status.success() => {
            let mut command = Command::new("chrt");
            command.args(["-f", PRIORITY]).arg(me);
            (command, format!("real-time, SCHED_FIFO {PRIORITY}"))
        }
        other => {
            let why = match other {
                Ok(status) => match status.signal() {
                    Some(signal) => format!("chrt was ended by signal {signal}"),
                    None => "the system grants none".to_owned(),
                },
                Err(_) => "chrt is not installed (Debian: apt-get install util-linux)".to_owned(),
            };
            setpriority_process(None, -20).context("the metronome needs root")?;
            (Command::new(me), format!("nice -20, no real-time priority: {why}"))
        }
    };
    let each = options.each_us.to_string();
    command.args(["metronome", &options.testbed, "--each-us", &each, "--as-is", &how]);
    command.args(["--gates", &options.gates, "--turn-us", &options.turn_us.to_string()]);
    Err(command.exec()).context("the metronome does not start over")
}

fn beat(options: &Options, hub: &str, how: &str, gates: Vec<Gate>) -> Result<()> {
    let Options { each_us, turn_us, .. } = *options;
    ensure!(named(hub), "the metronome is not in the namespace {hub}");
    let cores = cores()?;
    let awake = awake();
    for &core in &cores {
        let here: Vec<Gate> = gates.iter().filter(|gate| gate.core == core).cloned().collect();
        if here.is_empty() && !gates.is_empty() {
            continue;
        }
        let thread = move || -> Result<()> {
            pin(core)?;
            // Without this what is not real-time wakes up to 50 us late.
            thread::set_current_timer_slack(NonZeroU64::new(1))?;
            if here.is_empty() { tick(each_us) } else { turn(&here, turn_us) }
        };
        std::thread::Builder::new()
            .name(format!("metronome-{core}"))
            .spawn(move || {
                if let Err(error) = thread() {
                    eprintln!("the metronome of core {core} stopped: {error:#}");
                }
            })
            .context("no thread for the metronome")?;
    }
    let rest = if awake.is_some() { "cores stay awake" } else { "cores sleep when idle" };
    println!("{READY} {} cores, each {each_us} us, {how}, {rest}", cores.len());
    while named(hub) {
        std::thread::sleep(LOOK);
    }
    for gate in gates {
        // The file is gone with its group, where the testbed is gone.
        let _ = fs::write(gate.file, "0");
    }
    // The threads end with the process.
    Ok(())
}

/// Keeps idle cores awake while the returned file is open, where the system allows that.
///
/// The host of a virtual machine may lend a core that sleeps to others, who leave caches of their own
/// in it, and kernels behind a gate are stopped for most of every turn (ADR 0012 has what was measured
/// of that). A core that is awake counts as idle all the same.
fn awake() -> Option<fs::File> {
    let mut latency = fs::OpenOptions::new().write(true).open("/dev/cpu_dma_latency").ok()?;
    latency.write_all(&0_i32.to_ne_bytes()).ok()?;
    Some(latency)
}

/// Opens the gates of a core one after the other, each for its share of every turn.
fn turn(gates: &[Gate], turn_us: u64) -> Result<()> {
    let turn = (turn_us * 1000).cast_signed();
    let mut files = Vec::new();
    for gate in gates {
        let file = fs::OpenOptions::new().write(true).open(&gate.file);
        let file = file.with_context(|| gate.file.display().to_string())?;
        file.write_at(b"1", 0)?;
        files.push((file, (gate.share * turn as f64) as i64));
    }
    let apart = APART * gates.first().map_or(0, |gate| gate.core as i64);
    loop {
        let now = clock_gettime(ClockId::Monotonic);
        let mut at = ((now.tv_sec * SECOND + now.tv_nsec) / turn + 1) * turn + apart % turn;
        for (file, open) in &files {
            until(at)?;
            file.write_at(b"0", 0)?;
            // From now, not from when it should have been: opening takes longer now and then. The
            // kernels run from when this thread sleeps to when it wakes, on their core.
            let now = clock_gettime(ClockId::Monotonic);
            at = now.tv_sec * SECOND + now.tv_nsec + open;
            until(at)?;
            file.write_at(b"1", 0)?;
        }
    }
}

const SECOND: i64 = 1_000_000_000;
/// The time between the beginnings of two cores' turns, in ns: the kernel opens one gate at a time, and gates
/// that met would keep each other waiting, a tenth of their time.
const APART: i64 = 165_000;

/// Sleeps until a time of the monotonic clock, in ns.
fn until(at: i64) -> Result<()> {
    let at = Timespec { tv_sec: at / SECOND, tv_nsec: at % SECOND };
    match thread::clock_nanosleep_absolute(ClockId::Monotonic, &at) {
        Ok(()) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("the clock cannot be waited for"),
    }
}

/// Wakes at whole multiples of the time between wakes, so that being late once does not shift the rest.
fn tick(each_us: u64) -> Result<()> {
    let each = (each_us * 1000).cast_signed();
    loop {
        let now = clock_gettime(ClockId::Monotonic);
        let next = ((now.tv_sec * SECOND + now.tv_nsec) / each + 1) * each;
        until(next)?;
    }
}

/// Whether the namespace of this process still has that name, which means that the testbed is up.
fn named(hub: &str) -> bool {
    let identity = |path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    let mine = identity("/proc/self/ns/net".into());
    mine.is_some() && mine == identity(network_file(hub))
}
