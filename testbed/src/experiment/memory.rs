//! One device and a model from its disk: how long a request takes and how much memory it holds, by every
//! policy of reading (Hermes, Tables II and III, Fig. 7; Demand Layering, Table II and Fig. 13).

use super::{
    Options,
    show::{axis, bar, percent, publish, shown},
};
use crate::{
    cgroup::{self, DiskLimit, Group, Limits},
    health::{self, Watch},
    models,
    plot::{Axis, Chart, Group as Bars, Kind, Point, Series},
    reader::{Ask, Took},
    record::{Cell, Outcome, Record, Verdict},
    report::{Table, figure},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{Bytes, Cache, DeviceName, Plan, Room, Span, Strategy, Streaming, WireType};
use galaxy_graph::{
    budget,
    pieces::{self, Piece},
    share::{self, Member, Terms},
};
use galaxy_model::{HeadSpec, ModelDir, ModelSpec};
use rustix::fs::{Advice, fadvise};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

/// The experiment's name, and what it shows.
pub(super) const NAME: &str = "memory";
pub(super) const ABOUT: &str =
    "delay and memory of one device whose weights come from disk, by every policy of reading";
/// Where the page begins.
const STORY: &str = "One device, one compute thread, the same kernels and the same shard file for every policy. A request comes while nothing of the weights is in memory; the file is read directly, so that no page cache has it. Memory is the resident memory of the process (rss of its control group), looked at every 5 ms; the group's limit is what the plan said, but for `preload` and `pipeswitch`, which hold everything.";
/// Samples of each cell, and how many are tried for each that counts.
const SAMPLES: usize = 3;
const PATIENCE: usize = 3;
/// Tokens of a text that is read, and of one that is made (Hermes, \u{a7}V: 4 and 8).
const ROWS: u32 = 128;
const MADE: (u32, u32) = (4, 8);
/// The most rows of a plan.
const MAX_ROWS: u32 = 512;
/// Between two looks at memory.
const LOOK: Duration = Duration::from_millis(5);

/// What the disk gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Disk {
    /// What it can.
    Free,
    /// So little that reading takes ten times as long as computing (GPT-J: twice), as on Hermes' testbed.
    Throttled,
    /// As little to each loader.
    Each,
}

const DISKS: [Disk; 3] = [Disk::Free, Disk::Throttled, Disk::Each];

impl Disk {
    fn name(self) -> &'static str {
        match self {
            Self::Free => "disk",
            Self::Throttled => "throttled",
            Self::Each => "each-loader",
        }
    }
}

/// How weights come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Policy {
    Preload,
    Sequential,
    Sync,
    Async,
    PipeSwitch,
    PipeLoad(u16),
    /// The smallest buffer and the fewest loaders of those that short runs find fastest.
    Auto,
}

const POLICIES: [Policy; 9] = [
    Policy::Preload,
    Policy::PipeSwitch,
    Policy::Sequential,
    Policy::Sync,
    Policy::Async,
    Policy::PipeLoad(2),
    Policy::PipeLoad(4),
    Policy::PipeLoad(6),
    Policy::Auto,
];

impl Policy {
    fn name(self) -> String {
        match self {
            Self::Preload => "preload".to_owned(),
            Self::Sequential => "sequential".to_owned(),
            Self::Sync => "sync".to_owned(),
            Self::Async => "async".to_owned(),
            Self::PipeSwitch => "pipeswitch".to_owned(),
            Self::PipeLoad(agents) => format!("pipeload-{agents}"),
            Self::Auto => "auto".to_owned(),
        }
    }

    /// Whether its memory is bounded.
    fn bounded(self) -> bool {
        !matches!(self, Self::Preload | Self::PipeSwitch)
    }
}

/// What `auto` chooses from: pieces of the largest size that its buffer has room for, and loaders.
const CHOICES: [(u64, u16); 6] = [(2, 1), (4, 1), (8, 1), (4, 2), (8, 4), (12, 6)];
/// What is as fast as the fastest.
const AS_FAST: f64 = 1.01;

struct Model {
    name: &'static str,
    /// How many times as long reading takes as computing, where the disk is throttled.
    ratio: f64,
}

const MODELS: [Model; 3] = [
    Model { name: "bert-large", ratio: 10.0 },
    Model { name: "vit-large", ratio: 10.0 },
    Model { name: "gpt2-medium", ratio: 10.0 },
];

fn key(disk: Disk, model: &str, policy: Policy) -> String {
    format!("{}/{model}/{}", disk.name(), policy.name())
}

/// A model on one device, and its pieces.
struct Case {
    name: String,
    path: PathBuf,
    plan: Plan,
    spec: ModelSpec,
    width: u32,
    pieces: Vec<Piece>,
    ask: Ask,
}

impl Case {
    fn open(name: &str, path: &Path) -> Result<Self> {
        let model = ModelDir::open(path)?;
        let spec = model.spec().clone();
        let width = model.dtype().width();
        let makes = matches!(spec.head, HeadSpec::Language { .. });
        let rows = MAX_ROWS.min(spec.position_limit());
        let kept = if makes { Cache::BLOCK } else { 0 };
        let terms = Terms {
            model: model.name(),
            fingerprint: model.fingerprint(),
            strategy: Strategy::Local,
            wire: WireType::F32,
            tiles: 1,
            max_rows: rows,
            cache: Cache { rows: kept, values: WireType::F32 },
        };
        let device = Member {
            name: DeviceName::new("device")?,
            budget: Bytes(u64::MAX >> 8),
            threads: 1,
            share: 1.0,
        };
        let plan = share::plan(&spec, &terms, &[device])?;
        let pieces = pieces::pieces(&spec, &plan.ring[0].prefill, width, Streaming::PIECE);
        let ask = if makes { Ask::Make(MADE.0, MADE.1) } else { Ask::Run(ROWS) };
        Ok(Self { name: name.to_owned(), path: path.to_owned(), plan, spec, width, pieces, ask })
    }

    fn stored(&self) -> u64 {
        self.pieces.iter().map(Piece::stored).sum()
    }

    fn largest(&self) -> u64 {
        self.pieces.iter().map(Piece::stored).max().unwrap_or(4096)
    }

    /// Bytes of the largest layer.
    fn layer(&self) -> u64 {
        let layers = u64::from(self.spec.layers.max(1));
        let language =
            self.pieces.iter().filter(|p| p.held == galaxy_graph::holdings::Held::Language);
        let head: u64 = language.map(Piece::stored).sum();
        (self.stored() - head).div_ceil(layers).max(self.largest())
    }

    /// The plan of a policy.
    fn planned(&self, policy: Policy, choice: (u64, u16)) -> Plan {
        let (largest, all) = (self.largest(), self.pieces.len() as u32);
        let (buffer, room, agents) = match policy {
            Policy::Preload => (0, Room::Ring, 1),
            Policy::Sequential => (largest, Room::Parts(1), 1),
            Policy::Sync => (2 * largest, Room::Parts(2), 1),
            Policy::Async => (2 * largest, Room::Ring, 1),
            Policy::PipeSwitch => (self.stored(), Room::Ring, 1),
            // Each agent has a layer, and one is computed with.
            Policy::PipeLoad(agents) => (u64::from(agents + 1) * self.layer(), Room::Ring, agents),
            Policy::Auto => (choice.0 * largest, Room::Ring, choice.1),
        };
        let stays = policy == Policy::Preload;
        let mut plan = self.plan.clone();
        plan.ring[0].streaming = Some(Streaming {
            width: self.width as u8,
            piece: Streaming::PIECE,
            buffer: Bytes(buffer.next_multiple_of(4096).min(self.stored())),
            room,
            agents,
            resident: if stays { vec![Span::first(all)] } else { Vec::new() },
        });
        plan
    }
}

/// Runs all that is left, and shows what was found.
///
/// # Errors
/// When something fails that is no cell's own outcome. What was measured is kept.
pub(super) fn run(options: &Options) -> Result<()> {
    ensure!(
        options.loopback || options.smoke || cgroup::missing(true).is_empty(),
        "without control groups of memory and disk there is nothing to hold a device to: {}; --loopback runs without",
        cgroup::missing(true).join("; ")
    );
    let names: Vec<String> = match (&options.models, options.smoke) {
        (Some(names), _) => names.clone(),
        (None, true) => vec!["tiny-bert".to_owned()],
        (None, false) => MODELS.iter().map(|model| model.name.to_owned()).collect(),
    };
    let samples = options.samples.unwrap_or(if options.smoke { 2 } else { SAMPLES });
    let disks = if options.loopback || options.smoke { &DISKS[..1] } else { &DISKS };
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "models": names, "samples": samples, "rows": ROWS, "made": MADE, "piece": Streaming::PIECE,
    });
    let directory = options.output.join(NAME);
    let path = directory.join(format!("{NAME}.json"));
    let wanted = Record::new(NAME, options.loopback, settings)?;
    let mut record = Record::open_or_new(&path, wanted, options.fresh)?;
    for name in &names {
        let model = models::ensure(&options.cache, name)?.canonicalize()?;
        let case = Case::open(name, &model)?;
        let bench = Bench { options, case: &case, path: &path, samples };
        for &disk in disks {
            // What preload reads is no loader's.
            let all = POLICIES.into_iter();
            for policy in all.filter(|p| disk != Disk::Each || *p != Policy::Preload) {
                bench.cell(disk, policy, &mut record)?;
            }
        }
    }
    record.save(&path)?;
    show(&names, disks, &record, &options.output)
}

/// One model, measured.
struct Bench<'a> {
    options: &'a Options,
    case: &'a Case,
    path: &'a Path,
    samples: usize,
}

impl Bench<'_> {
    fn shards(&self) -> PathBuf {
        self.options.cache.join("shards")
    }

    /// Bytes per second that a disk is throttled to.
    fn rate(&self, disk: Disk, record: &mut Record) -> Option<f64> {
        if disk == Disk::Free {
            return None;
        }
        let known = MODELS.iter().find(|model| model.name == self.case.name);
        let ratio = known.map_or(10.0, |model| model.ratio);
        let cell = record.cell(&key(Disk::Free, &self.case.name, Policy::Preload), &[]);
        let programs = self.programs() as f64;
        let seconds = cell.spread("run_ms").median * 1e-3;
        Some(self.case.stored() as f64 * programs / (ratio * seconds))
    }

    /// How often a request goes through the weights.
    fn programs(&self) -> u64 {
        match self.case.ask {
            Ask::Make(_, made) => u64::from(made),
            _ => 1,
        }
    }

    fn cell(&self, disk: Disk, policy: Policy, record: &mut Record) -> Result<()> {
        let key = key(disk, &self.case.name, policy);
        let (policy_name, rate) = (policy.name(), self.rate(disk, record));
        let labels =
            [("disk", disk.name()), ("model", self.case.name.as_str()), ("policy", &policy_name)];
        if record.cell(&key, &labels).done(self.samples) {
            return Ok(());
        }
        let mut choice = CHOICES[0];
        if policy == Policy::Auto && !self.options.smoke {
            let mut found = Vec::new();
            for choice in CHOICES {
                let (values, _) = self.sample(disk, policy, choice, rate)?;
                found.push((values["run_ms"], choice));
            }
            let least = found.iter().map(|(ms, _)| *ms).fold(f64::INFINITY, f64::min);
            let fast = found.iter().filter(|(ms, _)| *ms <= least * AS_FAST);
            choice = fast.map(|(_, choice)| *choice).min().unwrap_or(choice);
        }
        for _ in 0..self.samples * PATIENCE {
            let taken = self.sample(disk, policy, choice, rate).with_context(|| key.clone());
            let cell = record.cell(&key, &labels);
            match taken {
                Ok((values, verdict)) => {
                    eprintln!(
                        "{key}: {:.0} ms, {:.0} MB resident at most{}",
                        values["run_ms"],
                        values["rss_mb"],
                        if verdict == Verdict::Valid { "" } else { " (does not count)" }
                    );
                    cell.add(values, verdict);
                }
                Err(error) => {
                    eprintln!("{error:#}");
                    cell.outcome = Outcome::Failed { error: format!("{error:#}") };
                    break;
                }
            }
            let plan = self.case.planned(policy, choice);
            let needs = budget::needs_all(&self.case.spec, self.case.width, &plan)?[0];
            let held = match policy {
                Policy::Preload => self.case.stored(),
                _ => needs.stream.0,
            };
            let streaming = plan.ring[0].streaming.as_ref().context("it was given")?;
            for (name, value) in [
                ("planned_mb", needs.total().0 as f64 * 1e-6),
                ("weights_mb", held as f64 * 1e-6),
                ("model_mb", self.case.stored() as f64 * 1e-6),
                ("agents", f64::from(streaming.agents)),
                ("rate_mb", rate.unwrap_or(f64::NAN) * 1e-6),
                ("programs", self.programs() as f64),
            ] {
                cell.facts.insert(name.to_owned(), value);
            }
            let done = cell.done(self.samples);
            record.save(self.path)?;
            if done {
                break;
            }
        }
        Ok(())
    }

    /// One request, in a process of its own.
    fn sample(
        &self,
        disk: Disk,
        policy: Policy,
        choice: (u64, u16),
        rate: Option<f64>,
    ) -> Result<(BTreeMap<String, f64>, Verdict)> {
        let plan = self.case.planned(policy, choice);
        let needs = budget::needs_all(&self.case.spec, self.case.width, &plan)?[0].total();
        std::fs::create_dir_all(self.shards())?;
        let work = tempfile::tempdir()?;
        let file = work.path().join("plan.json");
        std::fs::write(&file, serde_json::to_vec(&plan)?)?;
        let limit = rate.filter(|_| disk == Disk::Each);
        // The file is there before anything is measured or bounded.
        let mut first = Device::start(self.case, &file, &self.shards(), None)?;
        first.ask(Ask::Open)?;
        drop(first);
        forget(&self.case.path)?;
        let mut device = Device::start(self.case, &file, &self.shards(), limit)?;
        let testbed = self.options.testbed.as_deref().unwrap_or(NAME);
        let group = match self.options.loopback || self.options.smoke {
            true => None,
            false => {
                cgroup::remove(testbed)?;
                let holding = self.shards();
                let throttled = rate.filter(|_| disk == Disk::Throttled);
                let disk = throttled.map(|rate| DiskLimit { holding, rate: Bytes(rate as u64) });
                let memory = policy.bounded().then_some(needs);
                let limits = Limits { quota: None, memory, disk };
                let group = Group::create(testbed, "device", &limits)?;
                group.adopt(device.child.id())?;
                Some(group)
            }
        };
        let (watch, most, over) = (Watch::start()?, AtomicU64::new(0), AtomicBool::new(false));
        let taken = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let rss = match &group {
                        Some(group) => group.memory_stat("rss").unwrap_or(0),
                        None => 0,
                    };
                    most.fetch_max(rss, Ordering::Relaxed);
                    std::thread::sleep(LOOK);
                }
            });
            let mut ask = || -> Result<(Took, Took)> {
                Ok((device.ask(Ask::Open)?, device.ask(self.case.ask)?))
            };
            let taken = ask();
            over.store(true, Ordering::Relaxed);
            taken
        });
        let (opened, ran) = taken?;
        ensure!(ran.remade == 0, "{} pieces did not come from the file", ran.remade);
        let mut values = BTreeMap::from([
            ("open_ms".to_owned(), opened.ms),
            ("run_ms".to_owned(), ran.ms),
            ("whole_ms".to_owned(), opened.ms + ran.ms),
            ("busy_ms".to_owned(), ran.busy_ms),
            ("stalled_ms".to_owned(), ran.stalled_ms),
            ("rss_mb".to_owned(), most.load(Ordering::Relaxed) as f64 * 1e-6),
        ]);
        if ran.loading_ms > 0.0 {
            let rate = ran.loaded as f64 * 1e-3 / ran.loading_ms;
            values.insert("loader_mb_s".to_owned(), rate);
        }
        let mut used = 0;
        if let Some(group) = &group {
            used = group.usage()?.total_ns;
            for name in ["cache", "pgmajfault"] {
                let value = group.memory_stat(name).unwrap_or(0) as f64;
                values.insert(name.to_owned(), value);
            }
        }
        drop(device);
        if group.is_some() {
            cgroup::remove(testbed)?;
        }
        let health = watch.finish(used)?;
        values.extend(health.values());
        let verdict = match self.options.loopback || self.options.smoke {
            true => Verdict::Valid,
            false => health::judge(&health, &[]),
        };
        Ok((values, verdict))
    }
}

/// Lets go of what the page cache has of a model.
fn forget(model: &Path) -> Result<()> {
    for entry in std::fs::read_dir(model)? {
        let file = File::open(entry?.path())?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// The process of the device.
struct Device {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Device {
    fn start(case: &Case, plan: &Path, shards: &Path, limit: Option<f64>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("reader").arg(&case.path).arg(plan).arg(shards);
        if let Some(limit) = limit {
            command.args(["--limit", &limit.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("this program starts itself")?;
        let asks = child.stdin.take().context("its input is piped")?;
        let answers = BufReader::new(child.stdout.take().context("its output is piped")?);
        Ok(Self { child, asks, answers })
    }

    fn ask(&mut self, ask: Ask) -> Result<Took> {
        writeln!(self.asks, "{}", serde_json::to_string(&ask)?).context("the device ended")?;
        let mut line = String::new();
        let got = self.answers.read_line(&mut line)?;
        ensure!(got > 0, "the device ended: out of memory, or see above");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn find<'a>(record: &'a Record, disk: Disk, model: &str, policy: Policy) -> Option<&'a Cell> {
    let key = key(disk, model, policy);
    record.cells.iter().find(|cell| cell.key == key)
}

/// What of a request's time is the least that its bytes take: where loaders are limited, all of them.
fn bound(cell: &Cell, disk: Disk) -> f64 {
    let fact = |name: &str| cell.facts.get(name).copied().unwrap_or(f64::NAN);
    let rate = match disk {
        Disk::Free => f64::NAN,
        Disk::Throttled => fact("rate_mb"),
        Disk::Each => fact("rate_mb") * fact("agents"),
    };
    fact("model_mb") * fact("programs") / rate * 1e3
}

fn show(names: &[String], disks: &[Disk], record: &Record, output: &Path) -> Result<()> {
    let (mut tables, mut charts) = (Vec::new(), Vec::new());
    for &disk in disks {
        let title = match disk {
            Disk::Free => "The disk as it is",
            Disk::Throttled => {
                "A disk that is throttled to the papers' ratio of reading to computing"
            }
            Disk::Each => "Loaders that reach a part of the disk each, in the same ratio",
        };
        let mut table = Table::new(
            title,
            &[
                "model",
                "policy",
                "request, ms",
                "faster than pipeswitch by",
                "bytes / rate, ms",
                "over that by",
                "weights in memory, MB",
                "of the model",
                "resident, MB",
                "planned, MB",
                "stalls, ms",
            ],
        );
        let mut groups = Vec::new();
        for model in names {
            let base = find(record, disk, model, Policy::PipeSwitch);
            let mut bars = Vec::new();
            for (series, policy) in POLICIES.into_iter().enumerate() {
                let Some(cell) = find(record, disk, model, policy) else { continue };
                bars.push(bar(series, cell, value(policy)));
                let fact = |name: &str| cell.facts.get(name).copied().unwrap_or(f64::NAN);
                let median = cell.spread(value(policy)).median;
                let base = base.map_or(f64::NAN, |base| base.spread("run_ms").median);
                let bound = bound(cell, disk);
                table.row([
                    model.clone(),
                    policy.name(),
                    figure(cell, value(policy)),
                    shown(base / median, 2),
                    shown(bound, 0),
                    percent(median / bound - 1.0),
                    shown(fact("weights_mb"), 1),
                    percent(fact("weights_mb") / fact("model_mb")),
                    figure(cell, "rss_mb"),
                    shown(fact("planned_mb"), 0),
                    figure(cell, "stalled_ms"),
                ]);
            }
            groups.push(Bars { label: model.clone(), bars });
        }
        tables.push(table);
        let series = POLICIES.map(Policy::name).to_vec();
        charts.push((
            match disk {
                Disk::Free => "",
                Disk::Throttled => "-throttled",
                Disk::Each => "-each-loader",
            },
            Chart {
                title: format!("A request, weights on disk. {title}"),
                x: axis("model"),
                y: Axis { log: true, ..axis("ms") },
                kind: Kind::Bars { groups, series },
            },
        ));
    }
    let trade = |policy: Policy| Series {
        name: policy.name(),
        points: names
            .iter()
            .filter_map(|model| find(record, DISKS[0], model, policy))
            .map(|cell| {
                let spread = cell.spread(value(policy));
                let held = cell.facts.get("weights_mb").copied().unwrap_or(f64::NAN);
                let Point { y, low, high, .. } =
                    Point { x: 0.0, y: spread.median, low: spread.low, high: spread.high };
                Point { x: held, y, low, high }
            })
            .filter(|point| point.x.is_finite() && point.y.is_finite())
            .collect(),
        dashed: false,
    };
    charts.push((
        "-trade",
        Chart {
            title: "Delay over weights in memory, the disk as it is".to_owned(),
            x: Axis { log: true, ..axis("weights in memory, MB") },
            y: Axis { log: true, ..axis("ms") },
            kind: Kind::Lines { series: POLICIES.map(trade).to_vec() },
        },
    ));
    let notes = vec![
        "*preload*: all weights are read, then the request is computed; *pipeswitch*: they are read by one loader while others are computed with, and all stay (the papers' baseline); *sequential*: a piece is read, then computed with; *sync*: two buffers in turns; *async*: a ring of the size of two pieces; *pipeload-m*: m loaders, and a ring of m + 1 layers; *auto*: the smallest buffer and the fewest loaders of those that a short run each finds fastest.".to_owned(),
        "*Bytes / rate*: all pieces of the model over what the disk is throttled to, times the programs of a request (one for each token that is made); where each loader is limited, over all loaders.".to_owned(),
        "A piece is at most 16 MiB, a matrix of a layer or some of its columns.".to_owned(),
    ];
    let not_kept = [
        "The disk is a virtual one that others share; its own rate varies from hour to hour.",
        "Loaders and kernels are on the two halves of one core.",
    ];
    publish(record, (NAME, STORY), (tables, notes, charts), &not_kept, output)
}

/// The value that is a policy's delay: of what is read before a request, reading is a part.
fn value(policy: Policy) -> &'static str {
    if policy == Policy::Preload { "whole_ms" } else { "run_ms" }
}
