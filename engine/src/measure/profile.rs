//! What a device can do with models of a shape: its [`DeviceProfile`], measured with the engine
//! that runs its programs.
//!
//! The largest shares of a layer that a device may get are held side by side, each as a layer of
//! one shard, so that each product has the matrix that it would have. A *walk* runs all operations
//! of a layer at one number of rows, for each width once; walks of all row counts follow one
//! another in rounds, so that whatever slows the device for a while slows no single point, and
//! each next walk uses the next copy of the widths, so that weights come from memory. Attention
//! has a grid of its own. Points whose samples differ are measured again while time is left.

mod clock;
mod disk;
mod samples;
mod setup;
mod wake;
mod widths;

use super::{MeasureError, free_memory, last_level_cache, resident_memory};
use crate::{
    compute::{choice::EngineChoice, kernels::instructions::Instructions},
    weights::{Shard, WeightError},
};
use galaxy_common::{Bytes, Cache, DeviceName, DeviceProfile, Kernel, PROFILE_VERSION};
use galaxy_graph::budget;
use galaxy_model::ModelDir;
use samples::Samples;
use setup::ProfileSetup;
use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use widths::{MeasuringDevice, Sample};

/// Numbers of rows of walks: steps of the kernels are below 16 rows, and above 64 times are linear
/// within a few percent.
const ROWS: [u32; 9] = [1, 4, 8, 16, 32, 64, 128, 256, 512];
/// Sizes of attention: numbers of queries, and of keys.
const SIZES: [u32; 6] = [1, 16, 64, 128, 256, 512];
/// The time for measuring the disk.
const DISK: Duration = Duration::from_secs(1);
/// The seconds of the disk's time that loading may take.
const LOAD: f64 = 2.0;
/// The part of the time that the first round may take: another must fit behind it.
const FIRST: f64 = 0.6;
/// Up to so many rows a walk is short, and runs with each copy of the widths.
const FEW: u32 = 16;

/// How a device is to be measured.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The name of the device.
    pub device: DeviceName,
    /// The engine that its programs run on.
    pub engine: EngineChoice,
    /// The number of kernel threads.
    pub threads: u16,
    /// The most rows of one program.
    pub max_rows: u32,
    /// The memory that the device grants; none where it does not say.
    pub memory: Option<Bytes>,
    /// The memory that the cluster file grants on the device; none where it does not say.
    pub limit: Option<Bytes>,
    /// The time for the kernels; disk, loading and the rest take a few seconds more.
    pub time: Duration,
}

/// The time for the kernels where nobody says otherwise: with the rest well below 20 seconds.
pub const TIME: Duration = Duration::from_secs(12);

/// The listener to progress: it gets the points that were measured, of how many, and what is measured
/// now, and says whether to go on.
pub type Progress<'a> = &'a mut dyn FnMut(u32, u32, &str) -> ControlFlow<()>;

/// The name of an engine with the instructions of its kernels, as profiles have it.
pub fn engine_name(engine: EngineChoice) -> String {
    match engine {
        EngineChoice::Cpu => format!("{engine} {}", Instructions::current()),
        EngineChoice::Burn(_) => engine.to_string(),
    }
}

/// A profile, and how steadily it was measured.
#[derive(Clone, PartialEq, Debug)]
pub struct Measured {
    /// The profile of the device.
    pub profile: DeviceProfile,
    /// By how much longer everything took than it ran, because the device stood still in between:
    /// 1 on a core of one's own. All times of the profile have it in them.
    pub pauses: f64,
}

/// Measures this device with the shape of `dir`'s model.
///
/// # Errors
/// When the model cannot be loaded, does not fit, or an operation fails; [`MeasureError::Stopped`]
/// when `progress` wants no more.
pub fn measure(
    dir: &Arc<ModelDir>,
    setting: &Setting,
    progress: Progress<'_>,
) -> Result<Measured, MeasureError> {
    let spec = dir.spec();
    tell(progress, 0, 1, "disk")?;
    let (disk, disk_shared) = disk::rates(dir.path(), DISK);
    tell(progress, 0, 1, "loading")?;
    let Granted { memory, granter } = granted(setting);
    // What the process holds by now is part of what is granted, and so is what it takes anyway.
    let held = budget::PROCESS.max(resident_memory().unwrap_or_default());
    let room = MeasuringDevice {
        memory: Bytes(memory.0.saturating_sub(held.0)),
        cache: last_level_cache(),
        load: Bytes(if disk > 0.0 { (disk * LOAD) as u64 } else { u64::MAX }),
        format: setting.engine.holds(dir.formats()).widest(),
        threads: setting.threads,
    };
    let sample = Sample::choose(spec, setting.max_rows, room)
        .map_err(|more| MeasureError::Room { needed: held + more, granted: memory, granter })?;
    let mut go_on = |_, _| progress(0, 1, "loading");
    let shard = Shard::sample(dir.clone(), &sample.blocks, sample.vocabulary, &mut go_on);
    let shard = shard.map_err(|error| match error {
        WeightError::Stopped => MeasureError::Stopped,
        error => error.into(),
    })?;
    let engine = setting.engine.start(shard, setting.threads, Cache::NONE)?;
    let alone = setting.threads == 1 && setting.engine == EngineChoice::Cpu;
    let mut stand = ProfileSetup::new(engine, (spec, dir.formats().activations()), sample, alone)?;
    tracing::debug!(
        copies = stand.sample().copies(), rows = stand.sample().rows, slots = %stand.slots(),
        "measuring"
    );
    let mut samples = Samples::default();
    rounds(&mut stand, setting, &mut samples, progress)?;
    let pauses = stand.clock.factor();
    let wake = wake::wake(stand.engine)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let profile = DeviceProfile {
        version: PROFILE_VERSION,
        device: setting.device.clone(),
        shape: dir.shape_key(),
        threads: setting.threads,
        engine: engine_name(setting.engine),
        measured: now.map_or(0, |since| since.as_secs()),
        tables: samples.tables(pauses),
        wake,
        memory: setting.memory.unwrap_or_default(),
        disk,
        disk_shared,
    };
    Ok(Measured { profile, pauses })
}

/// The memory that may be held in all, and what limits it.
struct Granted {
    memory: Bytes,
    granter: &'static str,
}

/// The least of what the device grants, what the cluster file grants of it, and what is there.
fn granted(setting: &Setting) -> Granted {
    // What the kernel needs meanwhile is left to it.
    let free = |free: Bytes| Bytes(free.0 / 10 * 9) + resident_memory().unwrap_or_default();
    let limits = [
        (setting.limit, "memory in the cluster file"),
        (setting.memory, "the worker's own --memory"),
        (free_memory().map(free), "what is free on the device"),
    ];
    let least = limits.into_iter().filter_map(|(limit, by)| Some((limit?, by))).min_by_key(|l| l.0);
    let (memory, granter) = least.unwrap_or((Bytes(u64::MAX), "nothing"));
    Granted { memory, granter }
}

fn tell(progress: Progress<'_>, done: u32, total: u32, now: &str) -> Result<(), MeasureError> {
    match progress(done, total, now) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(MeasureError::Stopped),
    }
}

/// One thing that is measured in each round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Station {
    /// All operations of a layer at so many rows.
    Walk(u32),
    /// Attention of this layer of the sample.
    Attention(usize),
}

impl Station {
    fn has(self, stand: &ProfileSetup, kernel: Kernel, sizes: &[u32]) -> bool {
        match self {
            Self::Walk(rows) => kernel != Kernel::Attend && sizes[0] == rows,
            Self::Attention(layer) => {
                let heads = stand.sample().blocks[layer].1.heads.len();
                kernel == Kernel::Attend && sizes[2] == heads
            }
        }
    }

    fn name(self) -> String {
        match self {
            Self::Walk(rows) => format!("a layer at {rows} rows"),
            Self::Attention(_) => "attention".to_owned(),
        }
    }
}

/// Measures all stations in rounds: a first walk at each number of rows as far as [`FIRST`] of the
/// time allows, attention once, then again those that need it, until none does or the time is over.
fn rounds(
    stand: &mut ProfileSetup,
    setting: &Setting,
    samples: &mut Samples,
    progress: Progress<'_>,
) -> Result<(), MeasureError> {
    let begin = Instant::now();
    let most = stand.sample().rows;
    let up_to = |all: &[u32], most: u32| {
        let mut sizes: Vec<u32> = all.iter().copied().filter(|&size| size < most).collect();
        sizes.push(most);
        sizes
    };
    let (set, copies) = (stand.sample().set, stand.sample().copies());
    let mut stations: Vec<(Station, f64)> = Vec::new();
    let (mut copy, mut taken) = (0, Vec::new());
    let mut measure = |stand: &mut ProfileSetup, station, sizes: &[u32], samples: &mut Samples| {
        let begin = Instant::now();
        match station {
            Station::Walk(rows) => {
                for _ in 0..if rows <= FEW { copies } else { 1 } {
                    stand.walk(rows, copy % copies, &mut taken)?;
                    copy += 1;
                }
            }
            Station::Attention(layer) => stand.attend(layer, sizes, &mut taken)?,
        }
        samples.add(&mut taken);
        Ok::<f64, MeasureError>(begin.elapsed().as_secs_f64())
    };
    let limit = setting.time.as_secs_f64();
    // The first walk touches all memory for the first time.
    measure(stand, Station::Walk(1), &[], &mut Samples::default())?;
    let rows = up_to(&ROWS, most);
    let total = (rows.len() + set) as u32 * samples::LEAST as u32;
    let mut done = 0;
    let mut sizes = vec![1];
    for &rows in &rows {
        // Costs grow with rows: what is too much for this device ends the grid before it.
        let expected = stations.last().map_or(0.0, |&(station, cost)| match station {
            Station::Walk(before) => cost * f64::from(rows) / f64::from(before),
            Station::Attention(_) => 0.0,
        });
        if stations.len() > 2 && begin.elapsed().as_secs_f64() + expected > FIRST * limit {
            break;
        }
        tell(progress, done, total, &Station::Walk(rows).name())?;
        let cost = measure(stand, Station::Walk(rows), &[], samples)?;
        stations.push((Station::Walk(rows), cost));
        sizes = up_to(&SIZES, rows);
        done += 1;
    }
    for layer in (0..set).rev() {
        tell(progress, done, total, &Station::Attention(layer).name())?;
        let cost = measure(stand, Station::Attention(layer), &sizes, samples)?;
        stations.push((Station::Attention(layer), cost));
        done += 1;
    }
    loop {
        let mut again = false;
        for &(station, cost) in &stations {
            if !samples.wanting(|kernel, sizes| station.has(stand, kernel, sizes)) {
                continue;
            }
            if begin.elapsed().as_secs_f64() + cost > limit {
                continue;
            }
            again = true;
            done = (done + 1).min(total);
            tell(progress, done, total, &station.name())?;
            measure(stand, station, &sizes, samples)?;
        }
        if !again {
            return tell(progress, total, total, "waking up");
        }
    }
}
