//! Calibration: which share of a core gives a device the speed that it stands for.
//!
//! A layer of BERT-Large over 284 tokens, by the engine that experiments run, is timed on whole
//! cores first, then on all devices at once under their quotas; the quotas follow until every device
//! is as fast as asked. So caches that are shared and memory that is busy are in the figure.

use crate::{
    cgroup::Group,
    environment::{COORDINATOR, Environment, Gflops, Hold, Precision, Scale},
    holding::compute_threads,
    inside,
    metronome::{self, Gate},
    models,
    processes::kill,
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{
    BatchShape, Bytes, Cache, DeviceName, Pooling, Spread, Strategy, Wanted, WireType,
};
use galaxy_engine::local::LocalCluster;
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::{ModelDir, ModelSpec};
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

/// Tokens of the calibrating batch: the average of the paper's texts (Galaxy, §IV-A).
const TOKENS: u32 = 284;
/// The furthest that a device's speed may be from what was asked, as a share of it.
const TOLERANCE: f64 = 0.01;
/// The most rounds in which quotas are mended.
const ROUNDS: usize = 8;
/// The furthest that the speed may be off, as a share, when it was right some minutes ago.
const STILL: f64 = 0.05;
/// The furthest that the best round may be off in the end, as a share, for measurements to count: on a
/// machine that others share, the speed of a core itself moves by a few percent from one second to the next.
/// Results show what was reached.
const BOUND: f64 = 0.1;
/// How long each measurement takes: hundreds of a quota's periods.
const WINDOW: Duration = Duration::from_millis(2500);
/// How long each measurement of a rough calibration takes.
const ROUGH_WINDOW: Duration = Duration::from_millis(300);
/// The share of a core that quotas may promise. The rest is for links, the testbed, and the machine.
const PROMISED: f64 = 0.9;

/// The effort of a calibration, and how exact it is to be.
#[derive(Clone, Copy)]
struct Effort {
    /// The length of each measurement.
    window: Duration,
    /// The most rounds in which quotas are mended.
    rounds: usize,
    /// The furthest that a device's speed may be from what was asked, as a share of it.
    tolerance: f64,
}

impl Effort {
    const FULL: Self = Self { window: WINDOW, rounds: ROUNDS, tolerance: TOLERANCE };
    const ROUGH: Self = Self { window: ROUGH_WINDOW, rounds: 2, tolerance: BOUND };
}

/// The result of a calibration.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Calibration {
    /// How much faster the emulation is than the devices that it stands for.
    pub scale: Scale,
    /// The speed of each whole core, while all are busy, in GFLOP/s.
    pub cores: Vec<f64>,
    /// The devices, as they were calibrated.
    pub devices: Vec<Calibrated>,
}

/// One device, as it was calibrated.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Calibrated {
    /// The device's name.
    pub name: String,
    /// The core that the device's kernels run on.
    pub core: usize,
    /// The speed asked for, in GFLOP/s; none where the device has no speed of its own.
    #[serde(rename = "asked")]
    pub wanted_speed: Option<f64>,
    /// The share of the core that it gets while it computes; none where it has all of it.
    pub quota: Option<f64>,
    /// The share that the gate or the kernel is set to for that quota: gates take a while to open.
    #[serde(rename = "told")]
    pub set_share: Option<f64>,
    /// Its speed under that share while all devices are busy, in GFLOP/s.
    pub measured: Option<f64>,
}

impl Calibration {
    /// A calibration of devices without quotas, spread over the cores.
    pub fn none(environment: &Environment) -> Self {
        let speeds: Vec<Option<f64>> = environment
            .devices
            .iter()
            .map(|device| environment.speed(device).map(|Gflops(speed)| speed))
            .collect();
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let places = spread(&speeds, cores);
        let devices = environment.devices.iter().zip(speeds).zip(places);
        let devices = devices.map(|((device, asked), core)| Calibrated {
            name: device.name.to_string(),
            core,
            wanted_speed: asked,
            quota: None,
            set_share: None,
            measured: None,
        });
        Self { scale: environment.scale, cores: Vec::new(), devices: devices.collect() }
    }

    /// The furthest that a device's speed is from what was asked, as a share of what was asked.
    fn off(&self) -> f64 {
        let each =
            self.devices.iter().filter_map(|d| Some((d.measured? / d.wanted_speed? - 1.0).abs()));
        each.fold(0.0, f64::max)
    }

    /// Mends the shares of devices that were calibrated once: a core of a machine that others share
    /// has another speed some minutes later.
    ///
    /// # Errors
    /// When a measurement fails, or a device stays too far from its speed.
    pub(crate) fn again(
        &mut self,
        testbed: &str,
        cache: &Path,
        tell: &mut dyn FnMut(&[Calibrated]) -> Result<()>,
    ) -> Result<()> {
        if self.devices.iter().all(|d| d.wanted_speed.is_none()) {
            return Ok(());
        }
        self.settle(testbed, &model(cache)?, Effort { tolerance: STILL, ..Effort::FULL }, tell)?;
        self.check()
    }

    /// Measures all devices at once under their shares, and mends these until every device is as fast as
    /// asked, within the tolerance. The round that came nearest is kept.
    fn settle(
        &mut self,
        testbed: &str,
        model: &Path,
        effort: Effort,
        tell: &mut dyn FnMut(&[Calibrated]) -> Result<()>,
    ) -> Result<()> {
        let mut best = self.clone();
        // The setting that a device should have had, and what it got over its setting, by each round: cores
        // change their speed by themselves, so no round alone is to be trusted.
        let mut wanted = vec![Vec::new(); self.devices.len()];
        let mut received = vec![Vec::new(); self.devices.len()];
        for round in 1..=effort.rounds {
            let mut commands = Vec::new();
            tell(&self.devices)?;
            for device in &self.devices {
                // As a worker runs: its kernels under the quota, all else beside.
                let (core, hold) = (Some(device.core), Hold::Compute);
                let command = inside::command(testbed, &device.name, hold, core, me()?)?;
                let held = device.quota.map(|_| Group::open(testbed, &device.name)).transpose()?;
                commands.push((command, held));
            }
            let measured = speeds(commands, model, effort.window)?;
            for (device, speed) in self.devices.iter_mut().zip(&measured) {
                device.measured = Some(speed.wall);
            }
            let worst = self.off();
            eprintln!("calibrating {testbed}: round {round}, at most {:.1}% off", worst * 100.0);
            for ((device, speed), received) in self.devices.iter().zip(&measured).zip(&mut received)
            {
                received.push(speed.wall / speed.processor / device.set_share.unwrap_or(1.0));
            }
            if round == 1 || worst < best.off() {
                best = self.clone();
            }
            if worst <= effort.tolerance {
                break;
            }
            for ((device, speed), wanted) in self.devices.iter_mut().zip(&measured).zip(&mut wanted)
            {
                let Some((told, asked)) = device.set_share.zip(device.wanted_speed) else {
                    continue;
                };
                wanted.push(told * asked / speed.wall);
                device.set_share = Some(Spread::of(wanted).median.min(1.0));
            }
        }
        if best.off() > effort.tolerance {
            tell(&best.devices)?;
        }
        for (device, received) in best.devices.iter_mut().zip(&received) {
            // The share that it gets of its core; from now on it must get as much.
            device.quota =
                device.set_share.map(|told| (told * Spread::of(received).median).min(1.0));
        }
        *self = best;
        Ok(())
    }

    /// Checks that what is measured on these devices may count.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            self.off() <= BOUND,
            "after {ROUNDS} rounds a device is still {:.1}% from its speed, and {:.0}% are allowed: something else keeps this machine busy",
            self.off() * 100.0,
            BOUND * 100.0
        );
        Ok(())
    }
}

/// A core for each device: the fastest first, each on the core that has promised least.
fn spread(speeds: &[Option<f64>], cores: usize) -> Vec<usize> {
    let speed = |i: usize| speeds[i].unwrap_or(f64::MAX / 1e6);
    let mut order: Vec<usize> = (0..speeds.len()).collect();
    order.sort_by(|&a, &b| speed(b).total_cmp(&speed(a)));
    let mut promised = vec![0.0; cores];
    let mut places = vec![0; speeds.len()];
    for i in order {
        let least = (0..cores).min_by(|&a, &b| f64::total_cmp(&promised[a], &promised[b]));
        places[i] = least.unwrap_or(0);
        promised[places[i]] += speed(i);
    }
    places
}

/// Finds the quotas of a testbed that is up, and sets them through `tell`.
///
/// # Errors
/// When the environment asks for more than this machine has, or a measurement fails.
pub fn calibrate(
    testbed: &str,
    environment: &Environment,
    cache: &Path,
    tell: &mut dyn FnMut(&[Calibrated]) -> Result<()>,
) -> Result<Calibration> {
    let mut found = Calibration::none(environment);
    if found.devices.iter().all(|d| d.wanted_speed.is_none()) {
        return Ok(found);
    }
    let model = model(cache)?;
    let effort = match environment.precision {
        Precision::Full => Effort::FULL,
        Precision::Rough => Effort::ROUGH,
    };
    eprintln!("calibrating {testbed}: the speed of whole cores");
    let cores = found.devices.iter().map(|d| d.core).max().unwrap_or(0) + 1;
    let whole = (0..cores).map(|core| {
        let command = inside::command(testbed, COORDINATOR, Hold::Compute, Some(core), me()?)?;
        Ok((command, None))
    });
    // By processor time: a machine that has other work just now is no slower for that.
    let whole = speeds(whole.collect::<Result<_>>()?, &model, effort.window)?;
    found.cores = whole.iter().map(|speed| speed.processor).collect();
    for core in 0..cores {
        let promised = found.devices.iter().filter(|d| d.core == core);
        let promised = promised.filter_map(|d| d.wanted_speed).sum::<f64>() / found.cores[core];
        ensure!(
            promised <= PROMISED,
            "environment {} asks core {core} for {:.0}% of its {:.0} GFLOP/s, and at most {:.0}% can be promised: lower scale.speed to {:.2} or less",
            environment.name,
            promised * 100.0,
            found.cores[core],
            PROMISED * 100.0,
            environment.scale.speed * PROMISED / promised
        );
    }
    for device in &mut found.devices {
        device.quota = device.wanted_speed.map(|asked| asked / found.cores[device.core]);
        device.set_share = device.quota;
    }
    found.settle(testbed, &model, effort, tell)?;
    if environment.precision == Precision::Full
        && let Err(error) = found.check()
    {
        eprintln!("calibrating {testbed}: {error}; measurements would not count");
    }
    Ok(found)
}

/// Sets the shares of devices: by gates where the kernel can freeze single groups, else by its quotas.
pub(crate) fn tell(
    testbed: &str,
    turn: Duration,
    devices: &[Calibrated],
    metronome: &mut Option<u32>,
) -> Result<()> {
    let mut gates = Vec::new();
    for device in devices {
        let (Some(share), group) = (device.set_share, Group::open(testbed, &device.name)?) else {
            continue;
        };
        match group.gate() {
            Some(file) => gates.push(Gate { core: device.core, file, share }),
            None => group.set_quota(share)?,
        }
    }
    if let Some(old) = metronome.filter(|_| !gates.is_empty()) {
        // It may have stopped devices when it ends: its successor lets them go on.
        kill(old)?;
        *metronome = None;
    }
    if metronome.is_none() {
        let (pid, _) = metronome::start(testbed, metronome::EACH_US, turn, &gates)?;
        *metronome = Some(pid);
    }
    Ok(())
}

/// The directory of the model of one layer that is timed.
fn model(cache: &Path) -> Result<PathBuf> {
    Ok(models::bert(cache, "calibration", 1, 1024, 16)?.canonicalize()?)
}

fn me() -> Result<PathBuf> {
    Ok(std::env::current_exe()?)
}

/// The speed at which the calibrating batch ran, in GFLOP/s.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Speed {
    /// The speed by wall-clock time.
    wall: f64,
    /// The speed by processor time: what a core to itself would give.
    processor: f64,
}

/// Runs the calibrating batch by all commands at once, with their kernels held by the groups.
fn speeds(
    commands: Vec<(Command, Option<Group>)>,
    model: &Path,
    window: Duration,
) -> Result<Vec<Speed>> {
    let mut children: Vec<Child> = Vec::new();
    let mut said = Vec::new();
    for (mut command, held) in commands {
        command.arg("speed").arg(model).arg(window.as_millis().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn()?;
        let mut lines =
            BufReader::new(child.stdout.take().context("a pipe was asked for")?).lines();
        // It has run the batch once, so its threads are there.
        lines.next().context("the calibration ended early; its message is above")??;
        if let Some(group) = held {
            for thread in compute_threads(child.id())? {
                group.hold_thread(child.id(), thread)?;
            }
        }
        children.push(child);
        said.push(lines);
    }
    for child in &mut children {
        drop(child.stdin.take());
    }
    let results = children.into_iter().zip(said).map(|(mut child, mut lines)| {
        let line = lines.next().context("the calibration ended early; its message is above")??;
        child.wait()?;
        serde_json::from_str(&line).context("a speed was expected")
    });
    results.collect()
}

/// The floating-point operations that a batch of one text takes in the layers: matrix products and attention.
pub fn flops(spec: &ModelSpec, tokens: u32) -> f64 {
    let (rows, hidden) = (f64::from(tokens), f64::from(spec.hidden));
    let attention = f64::from(spec.heads * spec.head_width);
    let keys = f64::from(2 * spec.kv_heads * spec.head_width);
    let inner = f64::from(spec.intermediate) * if spec.gated { 3.0 } else { 2.0 };
    let products = 2.0 * rows * hidden * (2.0 * attention + keys + inner);
    f64::from(spec.layers) * (products + 4.0 * rows * rows * attention)
}

/// The measuring process: prints the speed that the calibrating batch reaches over `window`.
///
/// # Errors
/// When the model cannot be read.
pub fn speed(model: &Path, window: Duration) -> Result<()> {
    let dir = Arc::new(ModelDir::open(model)?);
    let terms = PlanOptions {
        model: dir.name(),
        fingerprint: dir.fingerprint(),
        formats: dir.formats(),
        strategy: Strategy::Local,
        wire: WireType::F32,
        tiles: 1,
        max_rows: TOKENS,
        cache: Cache::NONE,
    };
    let member =
        Member { name: DeviceName::new("me")?, budget: Bytes(u64::MAX), threads: 1, share: 1.0 };
    let cluster = LocalCluster::open(dir.clone(), share::plan(dir.spec(), &terms, &[member])?)?;
    let shape = BatchShape::single(TOKENS, Wanted::Pooled(Pooling::Mean))?;
    let tokens: Arc<[u32]> = (0..TOKENS).map(|i| 3 + i * 7 % 900).collect();
    cluster.execute(&shape, tokens.clone(), None)?;
    println!("ready");
    // Until whoever started us closes it: all begin at once.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let processor = || Duration::try_from(rustix::time::clock_gettime(ClockId::ProcessCPUTime));
    let (before, begin, mut runs) = (processor()?, Instant::now(), 0);
    while begin.elapsed() < window || runs < 2 {
        cluster.execute(&shape, tokens.clone(), None)?;
        runs += 1;
    }
    let done = f64::from(runs) * flops(dir.spec(), TOKENS) * 1e-9;
    let (wall, busy) = (begin.elapsed(), processor()?.saturating_sub(before));
    let speed = Speed { wall: done / wall.as_secs_f64(), processor: done / busy.as_secs_f64() };
    println!("{}", serde_json::to_string(&speed)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_spread_evenly_over_cores_by_speed() {
        assert_eq!(spread(&[Some(7.5); 4], 2), [0, 1, 0, 1]);
        // The laptop has a core to itself, the boards the other.
        assert_eq!(spread(&[Some(75.0), Some(7.5), Some(7.5), Some(7.5)], 2), [0, 1, 1, 1]);
        assert_eq!(spread(&[None, None], 2), [0, 1]);
        assert_eq!(spread(&[None], 1), [0]);
    }
}
