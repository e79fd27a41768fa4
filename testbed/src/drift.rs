//! `galaxy-testbed drift`: one device is slowed under load, as by a neighbour or its own heat. It measures
//! how many requests pass until the coordinator has noticed and moved work away, whether one fails, and how
//! near the latency comes to that of a plan made from scratch for the slow device.

use crate::{
    driver::{Driver, Placed},
    environment::Environment,
    instance::{self, Split, Testbed},
    models,
    plot::{self, Axis, Chart, ChartKind, Point, Series},
    record::{Record, Verdict},
    report::{Page, Table, figure},
};
use anyhow::{Context, Result, bail, ensure};
use galaxy_common::{BatchShape, Epoch, Pooling, Spread, Strategy, Wanted};
use galaxy_coord::fleet::Notice;
use galaxy_model::ModelDir;
use serde_json::json;
use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// How long one request may take.
const LIMIT: Duration = Duration::from_secs(120);
/// The most requests that a coordinator may take to notice: the goal.
const WITHIN: usize = 10;
/// Failed requests that end the measurement: none should fail.
const FAILURES: usize = 10;
/// How long a worker that is slowed by being stopped runs in each turn.
const SLICE: Duration = Duration::from_millis(1);
/// The names of the phases, in their order.
const PHASES: [&str; 4] = ["before", "slowed", "moved", "from scratch"];

/// The options of `galaxy-testbed drift`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The environment: a name or a file.
    #[arg(long, default_value = "A")]
    pub environment: String,
    /// The model, of the catalogue of `models --list`.
    #[arg(long, default_value = "bert-large")]
    pub model: String,
    /// The device that becomes slow [default: the last].
    #[arg(long)]
    pub device: Option<String>,
    /// The factor by which the device becomes slower.
    #[arg(long, default_value_t = 3.0)]
    pub factor: f64,
    /// Tokens of each text.
    #[arg(long, default_value_t = 284)]
    pub tokens: u32,
    /// Requests before the device is slowed, and with each of the two plans after it.
    #[arg(long, default_value_t = 10)]
    pub requests: usize,
    /// Requests after which a coordinator that has not moved is given up.
    #[arg(long, default_value_t = 60)]
    pub patience: usize,
    /// A small model and few requests: every step of it, in seconds.
    #[arg(long)]
    pub smoke: bool,
    /// Processes on this machine's loopback instead of devices and links: no root, nothing to compare.
    #[arg(long)]
    pub loopback: bool,
    /// The testbed's name.
    #[arg(long, default_value = "drift")]
    pub testbed: String,
    /// The directory of models.
    #[arg(long, default_value = crate::models::CACHE)]
    pub cache: PathBuf,
    /// The directory of results.
    #[arg(long, default_value = "target/testbed-results")]
    pub output: PathBuf,
}

/// A process that is stopped for most of the time, where there are no quotas.
struct Stopping {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stopping {
    /// Lets a process run for one part in `factor` of the time.
    fn start(pid: u32, factor: f64) -> Result<Self> {
        use rustix::process::{Pid, Signal, kill_process};
        let id = Pid::from_raw(pid.cast_signed()).context("a process has a number")?;
        let over = Arc::new(AtomicBool::new(false));
        let end = over.clone();
        let thread = std::thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                // A worker that is gone is reported by whoever asks it.
                let _ = kill_process(id, Signal::STOP);
                std::thread::sleep(SLICE.mul_f64(factor - 1.0));
                let _ = kill_process(id, Signal::CONT);
                std::thread::sleep(SLICE);
            }
        });
        Ok(Self { over, thread: Some(thread) })
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The result of the measurement.
#[derive(Default)]
struct DriftFindings {
    /// Requests until the coordinator noticed that the device is slow; none if it never did.
    noticed: Option<usize>,
    /// Requests until one ran by another plan; none if none did.
    moved: Option<usize>,
    failures: Vec<String>,
    plans: Vec<(&'static str, String)>,
}

/// Runs the measurement, and prints its result.
///
/// # Errors
/// When it cannot run here, or something other than a request fails.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.loopback || instance::is_root(),
        "a testbed makes namespaces and groups, which needs root; --loopback runs without, unshaped and not to be compared"
    );
    ensure!(options.factor > 1.0, "--factor {} makes nothing slower", options.factor);
    ensure!(options.requests > 0, "--requests 0 measures nothing: 1 is the least");
    let environment = Environment::open(&options.environment)?;
    let last = environment.devices.last().map(|device| device.name.to_string());
    let slow = options.device.clone().or(last).context("an environment has devices")?;
    let settings = json!({
        "environment": environment.source(), "model": options.model, "device": slow,
        "factor": options.factor, "tokens": options.tokens, "requests": options.requests,
        "smoke": options.smoke,
    });
    let mut record = Record::new("drift", options.loopback, settings)?;
    let path = match options.smoke {
        true => models::bert(&options.cache, "drift", 4, 256, 4)?,
        false => models::ensure(&options.cache, &options.model)?,
    };
    let model = Arc::new(ModelDir::open(&path.canonicalize()?)?);
    let testbed = Testbed::anew(environment, &options.testbed, options.loopback, &options.cache)?;
    let mut testbed = if options.smoke { testbed } else { testbed.calibrated()? };
    record.calibrations.insert(testbed.environment.name.clone(), testbed.calibration.clone());
    let found = drift(options, &mut testbed, &slow, &model, &mut record)?;
    testbed.down()?;
    show(options, &slow, &record, &found)
}

fn drift(
    options: &Options,
    testbed: &mut Testbed,
    slow: &str,
    model: &Arc<ModelDir>,
    record: &mut Record,
) -> Result<DriftFindings> {
    let index = testbed.device(slow)?;
    let models = options.cache.canonicalize()?;
    testbed.start_workers(&models, false, None)?;
    // Every placement has kernel threads of its own.
    let holding = testbed.holding()?;
    let stage = Driver::new(testbed)?;
    let _ballast = testbed.ballast()?;
    let split = Split::Profiles { tokens: options.tokens };
    let told = Arc::new(Mutex::new(Vec::new()));
    let (hear, pace) = (told.clone(), holding.pace());
    let cluster = testbed.cluster(model.path(), Strategy::Auto, split);
    let profiles = cluster.profiles.clone();
    let placed = stage.place_with_notices(cluster, model, move |notice| {
        if let Notice::Drift { device, .. } = notice {
            hear.lock().unwrap_or_else(PoisonError::into_inner).push(device.to_string());
        }
        match notice {
            Notice::Moving { .. } => pace.rest(false),
            Notice::Ready { .. } => pace.rest(true),
            _ => {}
        }
        if matches!(notice, Notice::Drift { .. } | Notice::Moving { .. } | Notice::Ready { .. }) {
            eprintln!("{notice}");
        }
    })?;
    let placed = placed.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
    let mut asker = Asker::new(options, record)?;
    let mut found = DriftFindings::default();
    found.plans.push((PHASES[0], placed.what()));
    // The first request lowers programs, fills caches and wakes links.
    asker.ask(&placed, None)?;
    let mut epoch = Epoch::default();
    for _ in 0..options.requests {
        epoch = asker.ask(&placed, Some(PHASES[0]))?.context("a request failed before all")?;
    }
    let stopping = match testbed.loopback {
        true => {
            let worker = testbed.workers().into_iter().find(|worker| worker.device == slow);
            let worker = worker.context("its worker was started")?;
            Some(Stopping::start(worker.pid, options.factor)?)
        }
        false => {
            testbed.slow(index, options.factor)?;
            None
        }
    };
    eprintln!("{slow} is {} times as slow", options.factor);
    let (mut asked, mut after) = (0, 0);
    while after < options.requests && asked < options.patience + options.requests {
        asked += 1;
        let phase = if found.moved.is_some() { PHASES[2] } else { PHASES[1] };
        let ran = asker.ask(&placed, Some(phase))?;
        let noticed = !told.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if noticed && found.noticed.is_none() {
            found.noticed = Some(asked);
        }
        if let Some(ran) = ran
            && ran != epoch
        {
            // The plan of the last move counts, and the first request of a plan lowers it.
            found.moved.get_or_insert(asked);
            (epoch, after) = (ran, 0);
        }
        after += usize::from(found.moved.is_some());
        if found.moved.is_none() && asked >= options.patience {
            break;
        }
    }
    found.plans.push((PHASES[2], placed.what()));
    drop(placed);
    // The latency of a plan from scratch, with profiles of the device as it is now.
    let mut cluster = testbed.cluster(model.path(), Strategy::Auto, split);
    cluster.profiles = profiles.with_file_name("profiles-slow");
    holding.pace().rest(false);
    let placed = stage.place(cluster, model)?.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
    holding.pace().rest(true);
    found.plans.push((PHASES[3], placed.what()));
    asker.ask(&placed, None)?;
    for _ in 0..options.requests {
        asker.ask(&placed, Some(PHASES[3]))?;
    }
    drop(placed);
    found.failures = asker.failures;
    drop((stage, stopping));
    testbed.stop_workers()?;
    Ok(found)
}

/// Asks one request after another.
struct Asker<'a> {
    shape: BatchShape,
    tokens: Arc<[u32]>,
    record: &'a mut Record,
    failures: Vec<String>,
}

impl<'a> Asker<'a> {
    fn new(options: &Options, record: &'a mut Record) -> Result<Self> {
        Ok(Self {
            shape: BatchShape::single(options.tokens, Wanted::Pooled(Pooling::Mean))?,
            tokens: (0..options.tokens).map(|i| 3 + i * 7 % 900).collect(),
            record,
            failures: Vec::new(),
        })
    }

    /// Asks once, and keeps the latency in a phase; returns the epoch that it ran in, if it did.
    fn ask(&mut self, placed: &Placed<'_>, phase: Option<&'static str>) -> Result<Option<Epoch>> {
        let begun = std::time::Instant::now();
        let run = match placed.execute(&self.shape, &self.tokens, LIMIT) {
            Ok(run) => run,
            Err(error) => {
                eprintln!("a request failed: {error:#}");
                self.failures.push(format!("{error:#}"));
                ensure!(self.failures.len() < FAILURES, "too many requests failed");
                return Ok(None);
            }
        };
        if let Some(phase) = phase {
            // The latency includes the time that the request waited for a move.
            let ms = begun.elapsed().as_secs_f64() * 1e3;
            let values = [("latency_ms".to_owned(), ms)].into_iter().collect();
            self.record.cell(phase, &[("phase", phase)]).add(values, Verdict::Valid);
        }
        Ok(Some(run.epoch))
    }
}

fn show(options: &Options, slow: &str, record: &Record, found: &DriftFindings) -> Result<()> {
    let values = |phase: &str| {
        let cell = record.cells.iter().find(|cell| cell.key == phase);
        cell.map(|cell| cell.values("latency_ms")).unwrap_or_default()
    };
    let mut table = Table::new("Latency", &["phase", "requests", "latency, ms", "plan"]);
    let (mut series, mut at) = (Vec::new(), 0);
    for phase in PHASES {
        let Some(cell) = record.cells.iter().find(|cell| cell.key == phase) else { continue };
        let plan = found.plans.iter().find(|(of, _)| *of == phase);
        table.row([
            phase.to_owned(),
            values(phase).len().to_string(),
            figure(cell, "latency_ms"),
            plan.map_or("the one before".to_owned(), |(_, what)| what.clone()),
        ]);
        let points = values(phase).into_iter().map(|ms| {
            at += 1;
            Point { x: f64::from(at), y: ms, low: ms, high: ms }
        });
        series.push(Series { name: phase.to_owned(), points: points.collect(), dashed: false });
    }
    let or_never = |n: Option<usize>| n.map_or("never".to_owned(), |n| n.to_string());
    let median = |phase: &str| Spread::of(&values(phase)).median;
    let ratio = median(PHASES[2]) / median(PHASES[3]);
    let mut outcome = Table::new("What came of it", &["", "found", "wanted"]);
    let within = |n: Option<usize>| (or_never(n), format!("at most {WITHIN}"));
    let (noticed, wanted) = within(found.noticed);
    outcome.row(["requests until it was noticed".to_owned(), noticed, wanted]);
    let moved = or_never(found.moved);
    outcome.row(["requests until another plan was in force".to_owned(), moved, "-".to_owned()]);
    let failed = found.failures.len().to_string();
    outcome.row(["requests that failed".to_owned(), failed, "0".to_owned()]);
    let shown = if ratio.is_finite() { format!("{ratio:.3}") } else { "-".to_owned() };
    outcome.row([
        "latency in the end over that of a plan from scratch".to_owned(),
        shown,
        "at most 1.1".to_owned(),
    ]);
    let axis = |label: &str| Axis { label: label.to_owned(), log: false, categories: None };
    let chart = Chart {
        title: format!("Latency while {slow} becomes {} times as slow", options.factor),
        x: axis("request"),
        y: axis("ms"),
        kind: ChartKind::Lines { series },
    };
    let directory = options.output.join("drift");
    std::fs::create_dir_all(&directory)?;
    record.save(&directory.join("drift.json"))?;
    plot::draw(&chart, &directory.join("drift"))?;
    let tables = [table, outcome];
    let mut notes = vec![format!(
        "{slow} is slowed to one part in {} while requests come one after another. The latency of a request is what its caller waits, a move between two plans included.",
        options.factor
    )];
    notes.extend(found.failures.iter().map(|why| format!("A request failed: {why}")));
    let page = Page {
        record,
        about: "A device that becomes slow under load: when work moves away from it.",
        tables: &tables,
        notes: &notes,
        not_kept: &[],
        plots: &["drift.svg".to_owned()],
    };
    let path = directory.join("drift.md");
    std::fs::write(&path, page.to_string())?;
    for table in &tables {
        println!("{table}");
    }
    println!("written: {}", path.display());
    if !found.failures.is_empty() {
        bail!("{} requests failed: none should", found.failures.len());
    }
    Ok(())
}
