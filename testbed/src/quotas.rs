//! `galaxy-testbed quotas`: whether devices get what their limits allow: shares of a core over any second,
//! memory, disk.

use crate::{
    calibrate::Calibrated,
    cgroup::{Group, Usage},
    environment::{Environment, Hold},
    inside,
    instance::Testbed,
    processes::program,
    report::Table,
};
use anyhow::{Context, Result, ensure};
use clap::Args;
use galaxy_common::Bytes;
use rustix::{
    fs::OFlags,
    thread::{ClockId, gettid},
    time::clock_gettime,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Read, Write},
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
};

/// The furthest that a share over any second may be from what was asked for, as a part of that.
pub const TOLERANCE: f64 = 0.03;
/// The time between two samples of the clock of a busy loop.
const SAMPLE_NS: u64 = 20_000_000;
/// The shortest gap that a busy loop counts as a pause. An interrupt takes a few microseconds, throttling a
/// good part of a millisecond.
const PAUSE_NS: u64 = 200_000;
const SECOND_NS: u64 = 1_000_000_000;
/// The bytes that are allocated at once, so that the end comes near the limit.
const STEP: usize = 1 << 20;
/// The alignment of direct reads, in bytes.
const ALIGNED: usize = 4096;
/// The size of direct reads, in bytes.
const READ: usize = 1 << 20;

/// The options of `galaxy-testbed quotas`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The environment: a name or a file.
    #[arg(default_value = "C")]
    environment: String,
    /// The testbed's name while it is measured.
    #[arg(long, default_value = "quotas")]
    name: String,
    /// The seconds for which devices are kept busy.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// The directory of the calibrating model.
    #[arg(long, default_value = crate::models::CACHE)]
    cache: PathBuf,
}

/// Brings an environment up, keeps all its devices busy, lets one take too much memory, prints tables, and
/// takes it down.
///
/// # Errors
/// Without root, or when a quota or a limit does not hold.
pub fn run(options: &Options) -> Result<()> {
    let environment = Environment::open(&options.environment)?;
    let testbed = Testbed::anew(environment, &options.name, false, &options.cache)?;
    let testbed = testbed.calibrated()?;
    let hold = testbed.environment.hold;
    let load = |d: &Calibrated| {
        Some(Load { device: d.name.clone(), quota: d.quota?, hold, core: Some(d.core) })
    };
    let loads: Vec<Load> = testbed.calibration.devices.iter().filter_map(load).collect();
    let shares = shares(&testbed.name, &loads, options.seconds)?;
    let percent = |share: f64| format!("{:.2}", share * 100.0);
    let mut table = Table::new(
        "Shares of a core over each second",
        &["device", "asked, %", "least, %", "median, %", "most, %", "worst off, %", "burst, ms"],
    );
    for share in &shares {
        table.row([
            share.device.clone(),
            percent(share.asked),
            percent(share.min),
            percent(share.median),
            percent(share.max),
            percent(share.worst),
            format!("{:.2}", share.burst_us as f64 * 1e-3),
        ]);
    }
    println!("{table}");
    let device = testbed.environment.devices[0].clone();
    let limit = testbed.environment.memory(&device);
    let mut table =
        Table::new("A process that takes memory", &["of its limit", "killed", "kills counted"]);
    let mut held = true;
    for part in [80, 120] {
        let wanted = Bytes(limit.0 / 100 * part);
        let hogged = hog_on(&testbed.name, device.name.as_str(), wanted)?;
        held &= hogged.killed == (part > 100) && hogged.killed == (hogged.oom_kills > 0);
        table.row([format!("{part}%"), hogged.killed.to_string(), hogged.oom_kills.to_string()]);
    }
    println!("{table}");
    testbed.down()?;
    ensure!(held, "the memory limit of {} does not hold", device.name);
    let kept = shares.iter().filter(|share| share.kept()).count();
    ensure!(kept == shares.len(), "{} of {} quotas do not hold", shares.len() - kept, shares.len());
    Ok(())
}

/// A device whose quota is measured.
#[derive(Clone, PartialEq, Debug)]
pub struct Load {
    /// The device's name.
    pub device: String,
    /// The share of one core that it must get.
    pub quota: f64,
    /// The part that its quota limits: the process, or the one thread that computes.
    pub hold: Hold,
    /// The core that the device runs on.
    pub core: Option<usize>,
}

/// The share of a core that a device got.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Share {
    /// The device's name.
    pub device: String,
    /// The share that was asked for.
    pub asked: f64,
    /// The least of the shares over windows of one second, by the clock of the thread.
    pub min: f64,
    /// The median of these shares.
    pub median: f64,
    /// The largest of these shares.
    pub max: f64,
    /// The furthest distance of these shares from what was asked for, as a part of that.
    pub worst: f64,
    /// The time that the device ran at a stretch: the median, in microseconds.
    pub burst_us: u64,
    /// The same time at the 90th percentile, in microseconds.
    pub burst_p90_us: u64,
    /// The rounds of the busy loop in each second of its own clock, which show the cost of being interrupted
    /// often.
    pub rounds: f64,
    /// The resources that the device's groups have counted.
    pub usage: Usage,
}

impl Share {
    /// Whether the device got what was asked for in every second.
    pub fn kept(&self) -> bool {
        self.worst <= TOLERANCE
    }
}

/// The samples that a busy loop took.
#[derive(Serialize, Deserialize)]
struct LoopSamples {
    /// The nanoseconds since the start, by the monotonic clock and by the thread's own running time.
    samples: Vec<(u64, u64)>,
    bursts_ns: Vec<u64>,
    rounds: u64,
}

/// A child process with pipes that reports when it is ready, and begins when it is sent a line.
struct Runner {
    child: Child,
    tell: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Runner {
    fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("galaxy-testbed does not start")?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (tell, said) = pipes.context("both pipes were asked for")?;
        Ok(Self { child, tell, said: BufReader::new(said) })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a measuring process ended early; its message is above");
        Ok(line.trim().to_owned())
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Keeps all the devices busy at once for `seconds`, and returns what each got.
///
/// # Errors
/// When the testbed is not up.
pub fn shares(testbed: &str, loads: &[Load], seconds: u64) -> Result<Vec<Share>> {
    let mut runners = Vec::new();
    for load in loads {
        let device = load.device.as_str();
        let own = program("galaxy-testbed")?;
        let mut command = inside::command(testbed, device, load.hold, load.core, own)?;
        command.args(["busy", &seconds.to_string()]);
        let mut runner = Runner::start(command)?;
        let thread = runner.line()?.parse().context("it says which thread will be busy")?;
        let group = Group::open(testbed, device)?;
        if load.hold == Hold::Compute {
            group.hold_thread(runner.child.id(), thread)?;
        }
        runners.push((group, runner));
    }
    for (_, runner) in &mut runners {
        runner.tell.write_all(b"\n")?;
    }
    let one = |(load, (group, mut runner)): (&Load, (Group, Runner))| {
        let mut seen: LoopSamples = serde_json::from_str(&runner.line()?)?;
        share(load, &mut seen, group.usage()?)
    };
    loads.iter().zip(runners).map(one).collect()
}

fn share(load: &Load, seen: &mut LoopSamples, usage: Usage) -> Result<Share> {
    let mut shares = windows(&seen.samples);
    ensure!(!shares.is_empty(), "device {:?} was not busy for a second", load.device);
    shares.sort_by(f64::total_cmp);
    seen.bursts_ns.sort_unstable();
    let burst = |part: usize| {
        let at = (seen.bursts_ns.len() * part / 10).min(seen.bursts_ns.len().saturating_sub(1));
        seen.bursts_ns.get(at).map_or(0, |ns| ns / 1000)
    };
    let (min, max) = (shares[0], shares[shares.len() - 1]);
    let ran = seen.samples.last().map_or(1, |sample| sample.1.max(1));
    Ok(Share {
        device: load.device.clone(),
        asked: load.quota,
        min,
        median: shares[shares.len() / 2],
        max,
        worst: (load.quota - min).max(max - load.quota) / load.quota,
        burst_us: burst(5),
        burst_p90_us: burst(9),
        rounds: seen.rounds as f64 * SECOND_NS as f64 / ran as f64,
        usage,
    })
}

/// The share of each window of a second that begins at a sample.
fn windows(samples: &[(u64, u64)]) -> Vec<f64> {
    let mut end = 0;
    let mut shares = Vec::new();
    for &(wall, cpu) in samples {
        while end < samples.len() && samples[end].0 < wall + SECOND_NS {
            end += 1;
        }
        let Some(&(then, ran)) = samples.get(end) else { break };
        shares.push((ran - cpu) as f64 / (then - wall) as f64);
    }
    shares
}

/// The options of `galaxy-testbed busy`.
#[derive(Args, Debug)]
pub struct BusyOptions {
    /// The seconds for which it is busy.
    seconds: u64,
}

fn nanoseconds(clock: ClockId) -> u64 {
    let at = clock_gettime(clock);
    at.tv_sec.cast_unsigned() * SECOND_NS + at.tv_nsec.cast_unsigned()
}

/// The hidden command `busy`: prints its thread's id, waits for a line, runs, and prints its samples.
///
/// # Errors
/// When the process that started it is gone.
pub fn busy(options: &BusyOptions) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{}", gettid().as_raw_nonzero())?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    // One second more than asked for, of which the first is not looked at: what was left of the quota before
    // the thread became busy is used up in it.
    let start = nanoseconds(ClockId::Monotonic) + SECOND_NS;
    let end = start + options.seconds * SECOND_NS;
    let count = |each| (options.seconds * SECOND_NS / each) as usize + 1;
    let mut samples = Vec::with_capacity(count(SAMPLE_NS));
    let mut bursts_ns = Vec::with_capacity(count(PAUSE_NS));
    let (mut before, mut burst, mut next, mut rounds, mut ran) = (start, start, start, 0, 0);
    loop {
        let now = nanoseconds(ClockId::Monotonic);
        if now < start {
            continue;
        }
        if samples.is_empty() {
            (before, burst, ran) = (now, now, nanoseconds(ClockId::ThreadCPUTime));
        }
        rounds += 1;
        if now - before > PAUSE_NS {
            bursts_ns.push(before - burst);
            burst = now;
        }
        before = now;
        if now >= next {
            samples.push((now - start, nanoseconds(ClockId::ThreadCPUTime) - ran));
            next = now + SAMPLE_NS;
            if now >= end {
                break;
            }
        }
    }
    writeln!(out, "{}", serde_json::to_string(&LoopSamples { samples, bursts_ns, rounds })?)?;
    Ok(())
}

/// The outcome of a process that takes memory.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Hogged {
    /// The bytes that the process was to take.
    pub wanted: Bytes,
    /// Whether the process was killed.
    pub killed: bool,
    /// The processes of the device that were killed for their memory meanwhile, by the groups' count.
    pub oom_kills: u64,
    /// The most memory that the device has held so far.
    pub peak: Option<Bytes>,
}

/// Lets a process of the device take `wanted` bytes of memory, and returns what became of it.
///
/// # Errors
/// When the testbed is not up, or when the process ends in a third way.
pub fn hog_on(testbed: &str, device: &str, wanted: Bytes) -> Result<Hogged> {
    let group = Group::open(testbed, device)?;
    let before = group.usage()?.oom_kills;
    let mut command =
        inside::command(testbed, device, Hold::Compute, None, program("galaxy-testbed")?)?;
    let status = command.args(["hog", &wanted.0.to_string()]).status()?;
    ensure!(
        status.success() || killed(status),
        "a process that takes memory on {device:?} ended with {status}"
    );
    let usage = group.usage()?;
    Ok(Hogged {
        wanted,
        killed: killed(status),
        oom_kills: usage.oom_kills - before,
        peak: usage.memory_peak,
    })
}

fn killed(status: ExitStatus) -> bool {
    status.signal() == Some(9)
}

/// The options of `galaxy-testbed hog`.
#[derive(Args, Debug)]
pub struct HogOptions {
    /// The bytes to take.
    bytes: u64,
}

/// The hidden command `hog`: takes memory, touches all of it and ends.
///
/// # Errors
/// When the number of bytes is too large for this machine.
pub fn hog(options: &HogOptions) -> Result<()> {
    let wanted = usize::try_from(options.bytes)?;
    let mut held: Vec<Vec<u8>> = Vec::new();
    while held.len() * STEP < wanted {
        // Ones, since pages of zeros do not exist until they are written to.
        held.push(vec![1; STEP]);
    }
    ensure!(std::hint::black_box(&held).iter().all(|page| page[STEP - 1] == 1), "memory is lost");
    Ok(())
}

/// Lets a process of the device read a file past the page cache, and returns the bytes of each second.
///
/// # Errors
/// When the testbed is not up, or the file is empty or on a file system without direct reads.
pub fn disk_of(testbed: &str, device: &str, file: &Path) -> Result<f64> {
    let own = program("galaxy-testbed")?;
    let mut command = inside::command(testbed, device, Hold::Compute, None, own)?;
    command.arg("read").arg(file);
    let mut runner = Runner::start(command)?;
    let rate = runner.line()?;
    rate.parse().with_context(|| format!("it says its rate, not {rate:?}"))
}

/// The options of `galaxy-testbed read`.
#[derive(Args, Debug)]
pub struct ReadOptions {
    /// The file to read.
    file: PathBuf,
}

/// The hidden command `read`: reads a file past the page cache, and prints the bytes of each second.
///
/// # Errors
/// When the file cannot be read directly.
pub fn read(options: &ReadOptions) -> Result<()> {
    let path = options.file.display();
    let flags = OFlags::DIRECT.bits().cast_signed();
    let mut file: File = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(&options.file)
        .with_context(|| format!("{path} cannot be read past the page cache"))?;
    let mut buffer = vec![0; READ + ALIGNED];
    let at = buffer.as_ptr().align_offset(ALIGNED);
    let (start, mut bytes) = (nanoseconds(ClockId::Monotonic), 0);
    loop {
        match file.read(&mut buffer[at..at + READ]).with_context(|| format!("{path}"))? {
            0 => break,
            read => bytes += read,
        }
    }
    ensure!(bytes > 0, "{path} is empty");
    let took = (nanoseconds(ClockId::Monotonic) - start) as f64 / SECOND_NS as f64;
    println!("{}", bytes as f64 / took);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A tenth of a core, in bursts of 10 ms at the beginning of each period of 100 ms.
    fn samples() -> Vec<(u64, u64)> {
        (0..30).flat_map(|i| [(i * 100, i * 10), (i * 100 + 10, i * 10 + 10)]).map(ns).collect()
    }

    fn ns((wall, ran): (u64, u64)) -> (u64, u64) {
        (wall * 1_000_000, ran * 1_000_000)
    }

    fn load(quota: f64) -> Load {
        Load { device: "d".into(), quota, hold: Hold::Process, core: None }
    }

    #[test]
    fn windows_are_whole_seconds_only() {
        let shares = windows(&samples());
        assert!(shares.iter().all(|share| (share - 0.1).abs() < 1e-9), "{shares:?}");
        // The last window that is a whole second, of 3 s less 90 ms, begins at 1.91 s.
        assert_eq!(shares.len(), 40);
        assert!(windows(&samples()[..10]).is_empty());
    }

    #[test]
    fn one_bad_second_breaks_the_quota() {
        let seen = |samples| LoopSamples { samples, bursts_ns: vec![3000, 1000, 2000], rounds: 5 };
        let good = share(&load(0.1), &mut seen(samples()), Usage::default()).unwrap();
        assert!(good.kept() && good.burst_us == 2, "{good:?}");
        let mut late = samples();
        late.iter_mut().skip(40).for_each(|sample| sample.0 += 50_000_000);
        let bad = share(&load(0.1), &mut seen(late), Usage::default()).unwrap();
        assert!(!bad.kept() && bad.worst > 0.04 && bad.min < bad.median, "{bad:?}");
    }
}
