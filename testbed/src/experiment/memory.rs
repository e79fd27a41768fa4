//! One device and a model from its disk: how long a request takes and how much memory it holds, by every
//! policy of reading (Hermes, Tables II and III, Fig. 7; Demand Layering, Table II and Fig. 13).

mod device;
mod others;
mod pages;

use super::{Options, open};
use crate::{
    cgroup::{self, DiskLimit, Group, Limits},
    health::{self, Watch},
    models,
    reader::{ReaderCommand, RequestCost},
    record::{Outcome, Record, RecordFile, Verdict},
};
use anyhow::{Context, Result, ensure};
use device::{DeviceProcess, forget};
use galaxy_common::{Bytes, Cache, DeviceName, Plan, Room, Span, Strategy, Streaming, WireType};
use galaxy_graph::{
    budget,
    operators::OperatorGraph,
    pieces::{self, Piece},
    share::{self, Member, PlanOptions},
};
use galaxy_model::{Formats, HeadSpec, ModelDir, ModelSpec};
use galaxy_planner::stream::{self, StreamingChoice};
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

/// The experiment's name.
pub(super) const NAME: &str = "memory";
/// One line on what the experiment shows.
pub(super) const ABOUT: &str =
    "delay and memory of one device whose weights come from disk, by every policy of reading";
/// The paragraph at the beginning of the page.
const STORY: &str = "One device, one compute thread, the same kernels and the same shard file for every policy. A request comes while nothing of the weights is in memory; the file is read directly, so that no page cache has it. Memory is the resident memory of the process (rss of its control group), looked at every 5 ms; the group's limit is what the plan said, but for `preload` and `pipeswitch`, which hold everything.";
/// The samples of each cell.
const SAMPLES: usize = 2;
/// How many samples are tried for each that counts.
const PATIENCE: usize = 3;
/// The tokens of a text.
const ROWS: u32 = 128;
/// The tokens of a long text.
const LONG: u32 = 512;
/// The tokens of a prompt, and the tokens that are generated after it (Hermes, \u{a7}V).
const MADE: (u32, u32) = (4, 8);
/// The time between two looks at memory.
const LOOK: Duration = Duration::from_millis(5);

/// The rate of the disk, and the length of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Disk {
    /// The disk as fast as it is.
    Free,
    /// The disk as fast as it is, and a text so long that computing takes several times as long as reading.
    Long,
    /// A disk throttled so far that reading takes ten times as long as computing, as on Hermes' testbed.
    Throttled,
    /// A disk that gives that throttled rate to each loader.
    Each,
}

impl Disk {
    fn name(self) -> &'static str {
        match self {
            Self::Free => "disk",
            Self::Long => "long-text",
            Self::Throttled => "throttled",
            Self::Each => "each-loader",
        }
    }
}

/// A policy by which weights are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Policy {
    Preload,
    Sequential,
    Sync,
    Async,
    PipeSwitch,
    PipeLoad(u16),
    /// The smallest buffer and the fewest loaders among the settings that short runs find fastest.
    Auto,
    /// A ring with room for this many of the largest pieces, and this many loaders.
    Ring(u64, u16),
    /// Memory for this share of the weights, in percent: the planner decides which stay.
    Keep(u64),
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
/// The policies for the largest model: a sample of it takes a minute.
const FEW: [Policy; 5] =
    [Policy::Preload, Policy::PipeSwitch, Policy::Sequential, Policy::Async, Policy::PipeLoad(2)];
/// The memory for generation, in percent of the weights.
const KEEPS: [u64; 4] = [15, 40, 65, 90];
/// The buffers, in pieces, and the loaders over which delay is shown where each loader is limited
/// (Hermes, Fig. 7).
const SWEEP_EACH: ([u64; 5], [u16; 4]) = ([2, 4, 8, 16, 24], [1, 2, 4, 6]);
/// The same where no loader is limited (Demand Layering, Fig. 13).
const SWEEP_FREE: ([u64; 7], [u16; 2]) = ([1, 2, 3, 4, 6, 8, 12], [1, 2]);

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
            Self::Ring(pieces, agents) => format!("ring-{pieces}x{agents}"),
            Self::Keep(percent) => format!("keep-{percent}%"),
        }
    }

    /// Whether the memory of the policy is bounded.
    fn bounded(self) -> bool {
        !matches!(self, Self::Preload | Self::PipeSwitch)
    }
}

/// The settings that `auto` chooses from: the size of its buffer in pieces of the largest size, and loaders.
const CHOICES: [(u64, u16); 6] = [(2, 1), (4, 1), (8, 1), (4, 2), (8, 4), (12, 6)];
/// The ratio to the fastest setting up to which another counts as fast.
const AS_FAST: f64 = 1.01;

/// The part of the experiment that a model takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Subset {
    /// Every policy, and delay over memory.
    All,
    /// A few policies with the disk as it is, and what three devices generate together.
    Large,
    /// A thousand requests in a row.
    Requests,
}

struct Model {
    name: &'static str,
    part: Subset,
}

const MODELS: [Model; 5] = [
    Model { name: "bert-large", part: Subset::All },
    Model { name: "vit-large", part: Subset::All },
    Model { name: "gpt2-medium", part: Subset::All },
    Model { name: "distilbert", part: Subset::Requests },
    Model { name: "gpt-j-6b", part: Subset::Large },
];
/// How many times as long reading takes as computing, where the disk is throttled (Hermes, \u{a7}II).
const RATIO: f64 = 10.0;

fn key(disk: Disk, model: &str, policy: Policy) -> String {
    format!("{}/{model}/{}", disk.name(), policy.name())
}

/// A model on one device, and its pieces.
struct MemoryCase {
    name: String,
    path: PathBuf,
    plan: Plan,
    spec: ModelSpec,
    formats: Formats,
    pieces: Vec<Piece>,
    ask: ReaderCommand,
}

impl MemoryCase {
    fn open(name: &str, path: &Path, rows: u32) -> Result<Self> {
        let model = ModelDir::open(path)?;
        let spec = model.spec().clone();
        let formats = model.formats();
        let makes = matches!(spec.head, HeadSpec::Language { .. });
        let rows = match (spec.patches, makes) {
            (Some(patches), _) => patches.rows(),
            (None, true) => MADE.0,
            (None, false) => rows.min(spec.position_limit()),
        };
        let kept = if makes { Cache::BLOCK } else { 0 };
        let terms = PlanOptions {
            model: model.name(),
            fingerprint: model.fingerprint(),
            formats,
            strategy: Strategy::Local,
            wire: WireType::F32,
            tiles: 1,
            max_rows: rows,
            cache: Cache { rows: kept, values: galaxy_common::CacheType::F32 },
        };
        let device = Member {
            name: DeviceName::new("device")?,
            budget: Bytes(u64::MAX >> 8),
            threads: 1,
            share: 1.0,
        };
        let plan = share::plan(&spec, &terms, &[device])?;
        let graph = OperatorGraph::of(&spec);
        let pieces = pieces::pieces(&graph, &plan.ring[0].prefill, formats, Streaming::PIECE);
        let ask =
            if makes { ReaderCommand::Make(MADE.0, MADE.1) } else { ReaderCommand::Run(rows) };
        Ok(Self {
            name: name.to_owned(),
            path: path.to_owned(),
            plan,
            spec,
            formats: formats.clone(),
            pieces,
            ask,
        })
    }

    fn stored(&self) -> u64 {
        self.pieces.iter().map(Piece::stored).sum()
    }

    fn largest(&self) -> u64 {
        self.pieces.iter().map(Piece::stored).max().unwrap_or(4096)
    }

    /// The bytes of the largest layer.
    fn layer(&self) -> u64 {
        let layers = u64::from(self.spec.layers.max(1));
        let head = OperatorGraph::of(&self.spec).language;
        let language = self.pieces.iter().filter(|piece| Some(piece.operator) == head);
        let head: u64 = language.map(Piece::stored).sum();
        (self.stored() - head).div_ceil(layers).max(self.largest())
    }

    /// The combinations of disk and policy that are measured of this part.
    fn cells(&self, part: Subset) -> Vec<(Disk, Policy)> {
        let with = |disk: Disk, policies: &[Policy]| {
            policies.iter().map(|policy| (disk, *policy)).collect::<Vec<_>>()
        };
        let makes = matches!(self.ask, ReaderCommand::Make(..));
        let keeps = KEEPS.map(Policy::Keep);
        let mut cells = with(Disk::Free, if part == Subset::Large { &FEW } else { &POLICIES });
        if makes {
            cells.extend(with(Disk::Free, &keeps));
        }
        // A token takes so little computing that any disk is as slow as the throttled disks below would be.
        if part != Subset::All || makes {
            return cells;
        }
        cells.extend(with(Disk::Throttled, &POLICIES));
        // The weights that preload reads come through no loader.
        cells.extend(with(Disk::Each, &POLICIES[1..]));
        let (buffers, agents) = SWEEP_FREE;
        let rings = buffers.iter().flat_map(|b| agents.map(|a| Policy::Ring(*b, a)));
        cells.extend(with(Disk::Free, &rings.collect::<Vec<_>>()));
        let (buffers, agents) = SWEEP_EACH;
        let rings = buffers.iter().flat_map(|b| agents.map(|a| Policy::Ring(*b, a)));
        cells.extend(with(Disk::Each, &rings.collect::<Vec<_>>()));
        cells
    }

    /// The plan of a policy. `choice` is the setting of `auto`.
    fn planned(&self, policy: Policy, choice: (u64, u16)) -> Result<Plan> {
        if let Policy::Keep(percent) = policy {
            let mut plan = self.plan.clone();
            let needs = budget::needs_all(&self.spec, &self.formats, &plan)?;
            let less = self.stored() * (100 - percent) / 100;
            plan.ring[0].budget = Bytes(needs[0].total().0.saturating_sub(less));
            return Ok(stream::fitted(
                &self.spec,
                &self.formats,
                &plan,
                &needs,
                StreamingChoice::PLAIN,
            )?);
        }
        let (largest, all) = (self.largest(), self.pieces.len() as u32);
        let (buffer, room, loaders) = match policy {
            Policy::Preload => (0, Room::Ring, 1),
            Policy::Sequential => (largest, Room::Parts(1), 1),
            Policy::Sync => (2 * largest, Room::Parts(2), 1),
            Policy::Async => (2 * largest, Room::Ring, 1),
            Policy::PipeSwitch => (self.stored(), Room::Ring, 1),
            // Each loader has a layer, and one is computed with.
            Policy::PipeLoad(loaders) => {
                (u64::from(loaders + 1) * self.layer(), Room::Ring, loaders)
            }
            Policy::Auto => (choice.0 * largest, Room::Ring, choice.1),
            Policy::Ring(pieces, loaders) => (pieces * largest, Room::Ring, loaders),
            Policy::Keep(_) => (2 * largest, Room::Ring, 1),
        };
        let stays = policy == Policy::Preload;
        let mut plan = self.plan.clone();
        let streaming = Streaming {
            format: self.formats.most(),
            piece: Streaming::PIECE,
            buffer: Bytes(buffer.next_multiple_of(4096).min(self.stored())),
            room,
            loaders,
            resident: if stays { vec![Span::first(all)] } else { Vec::new() },
        };
        plan.ring[0].streaming = Some(stream::without_end(&self.pieces, streaming));
        Ok(plan)
    }
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    ensure!(
        options.loopback || options.smoke || cgroup::missing(true).is_empty(),
        "without control groups of memory and disk there is nothing to hold a device to: {}; --loopback runs without",
        cgroup::missing(true).join("; ")
    );
    let all = MODELS.iter().map(|model| (model.name.to_owned(), model.part));
    let part = |name: &String| {
        let known = MODELS.iter().find(|model| model.name == name);
        (name.clone(), known.map_or(Subset::All, |model| model.part))
    };
    let few = options.smoke || options.loopback;
    let models: Vec<(String, Subset)> = match &options.models {
        Some(names) => names.iter().map(part).collect(),
        None if options.smoke => vec![("tiny-bert".to_owned(), Subset::All)],
        None => all.collect(),
    };
    let samples = options.samples.unwrap_or(SAMPLES);
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "samples": samples, "rows": [ROWS, LONG], "made": MADE, "piece": Streaming::PIECE,
        "ratio": RATIO,
    });
    let mut record = open(NAME, options, settings)?;
    for (name, part) in &models {
        let model = models::ensure(&options.cache, name)?.canonicalize()?;
        let case = MemoryCase::open(name, &model, ROWS)?;
        let bench = Bench { options, case: &case };
        if *part == Subset::Requests || few {
            bench.requests(&mut record)?;
        }
        if *part != Subset::Requests {
            let mut cells = case.cells(*part);
            cells.retain(|(disk, _)| *disk == Disk::Free || !few);
            bench.in_turns(&cells, samples, &mut record)?;
        }
        if *part == Subset::All && !few && matches!(case.ask, ReaderCommand::Run(_)) {
            bench.loaders(&mut record)?;
            if case.spec.patches.is_none() {
                let case = MemoryCase::open(name, &model, LONG)?;
                let bench = Bench { case: &case, ..bench };
                bench.in_turns(&POLICIES.map(|p| (Disk::Long, p)), samples, &mut record)?;
            }
        }
        if *part == Subset::Large && !few {
            others::together(options, &case, &mut record)?;
        }
    }
    record.save()?;
    pages::show(&record, &options.output)
}

/// The measurement of one model.
struct Bench<'a> {
    options: &'a Options,
    case: &'a MemoryCase,
}

impl Bench<'_> {
    fn shards(&self) -> PathBuf {
        self.options.cache.join("shards")
    }

    /// The bytes per second that a disk is throttled to; none where it is not.
    fn rate(&self, disk: Disk, record: &mut Record) -> Option<f64> {
        if matches!(disk, Disk::Free | Disk::Long) {
            return None;
        }
        // One rate for all policies.
        let of = |cell: &&crate::record::Cell| {
            let is = |name: &str, value: &str| cell.labels.get(name).is_some_and(|l| l == value);
            is("model", &self.case.name) && is("disk", disk.name())
        };
        let known = record.cells.iter().filter(of).find_map(|cell| cell.facts.get("rate_mb"));
        if let Some(rate) = known.filter(|rate| rate.is_finite()) {
            return Some(rate * 1e6);
        }
        let cell = record.cell(&key(Disk::Free, &self.case.name, Policy::Preload), &[]);
        let programs = self.programs() as f64;
        let seconds = cell.spread("run_ms").median * 1e-3;
        Some(self.case.stored() as f64 * programs / (RATIO * seconds))
    }

    /// How often a request reads through the weights.
    fn programs(&self) -> u64 {
        match self.case.ask {
            ReaderCommand::Make(_, made) => u64::from(made),
            _ => 1,
        }
    }

    /// Takes the cells of one disk after another, a sample of each in turn.
    fn in_turns(
        &self,
        cells: &[(Disk, Policy)],
        samples: usize,
        record: &mut RecordFile,
    ) -> Result<()> {
        for of_one in cells.chunk_by(|(one, _), (other, _)| one == other) {
            for wanted in 1..=samples {
                for &(disk, policy) in of_one {
                    self.cell(disk, policy, wanted, record)?;
                }
            }
        }
        Ok(())
    }

    /// Takes samples of a cell until `wanted` of them count.
    fn cell(
        &self,
        disk: Disk,
        policy: Policy,
        wanted: usize,
        record: &mut RecordFile,
    ) -> Result<()> {
        let key = key(disk, &self.case.name, policy);
        let (policy_name, rate) = (policy.name(), self.rate(disk, record));
        let labels =
            [("disk", disk.name()), ("model", self.case.name.as_str()), ("policy", &policy_name)];
        let cell = record.cell(&key, &labels);
        if cell.done(wanted) {
            return Ok(());
        }
        // The fastest setting that was found is kept, too.
        let known = |fact: &str| cell.facts.get(fact).copied();
        let known = known("choice_pieces").zip(known("choice_agents"));
        let mut choice =
            known.map_or(CHOICES[0], |(pieces, agents)| (pieces as u64, agents as u16));
        if policy == Policy::Auto && !self.options.smoke && known.is_none() {
            let mut found = Vec::new();
            for choice in CHOICES {
                let (values, ..) = self.sample(disk, policy, choice, rate)?;
                found.push((values["run_ms"], choice));
            }
            let least = found.iter().map(|(ms, _)| *ms).fold(f64::INFINITY, f64::min);
            let fast = found.iter().filter(|(ms, _)| *ms <= least * AS_FAST);
            choice = fast.map(|(_, choice)| *choice).min().unwrap_or(choice);
        }
        for _ in 0..PATIENCE {
            let taken = self.sample(disk, policy, choice, rate).with_context(|| key.clone());
            let cell = record.cell(&key, &labels);
            match taken {
                Ok((values, verdict, tokens)) => {
                    if !tokens.is_empty() {
                        let made: Vec<String> = tokens.iter().map(ToString::to_string).collect();
                        cell.labels.insert("tokens".to_owned(), made.join(" "));
                    }
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
            for (name, value) in self.facts(&self.case.planned(policy, choice)?)? {
                cell.facts.insert(name.to_owned(), value);
            }
            cell.facts.insert("rate_mb".to_owned(), rate.unwrap_or(f64::NAN) * 1e-6);
            if policy == Policy::Auto {
                cell.facts.insert("choice_pieces".to_owned(), choice.0 as f64);
                cell.facts.insert("choice_agents".to_owned(), f64::from(choice.1));
            }
            let done = cell.done(wanted);
            record.save()?;
            if done {
                break;
            }
        }
        Ok(())
    }

    /// The facts of a cell that follow from its plan: memory in MB, loaders, and programs of a request.
    fn facts(&self, plan: &Plan) -> Result<[(&'static str, f64); 6]> {
        let needs = budget::needs_all(&self.case.spec, &self.case.formats, plan)?[0];
        let streaming = plan.ring[0].streaming.as_ref();
        let (_, kept) = stream::read_and_kept(&self.case.spec, &self.case.formats, &plan.ring[0]);
        let held = streaming.map_or(self.case.stored(), |_| needs.stream.0 + kept.0);
        Ok([
            ("limit_mb", needs.total().0 as f64 * 1e-6),
            ("planned_mb", (needs.total().0 - budget::PROCESS.0) as f64 * 1e-6),
            ("weights_mb", held as f64 * 1e-6),
            ("model_mb", self.case.stored() as f64 * 1e-6),
            ("agents", streaming.map_or(1.0, |s| f64::from(s.loaders))),
            ("programs", self.programs() as f64),
        ])
    }

    /// Takes one sample: a request by this policy.
    fn sample(
        &self,
        disk: Disk,
        policy: Policy,
        choice: (u64, u16),
        rate: Option<f64>,
    ) -> Result<(BTreeMap<String, f64>, Verdict, Vec<u32>)> {
        let plan = self.case.planned(policy, choice)?;
        let throttled = rate.filter(|_| disk == Disk::Throttled);
        let limit = rate.filter(|_| disk == Disk::Each);
        self.run(&plan, policy.bounded(), (throttled, limit), self.case.ask)
    }

    /// Runs `ask` in a process of its own, which opens the plan before. `bounded` is whether the process is
    /// held to the memory that is planned, `throttled` the disk's rate, `limit` that of each loader.
    fn run(
        &self,
        plan: &Plan,
        bounded: bool,
        (throttled, limit): (Option<f64>, Option<f64>),
        ask: ReaderCommand,
    ) -> Result<(BTreeMap<String, f64>, Verdict, Vec<u32>)> {
        let needs = budget::needs_all(&self.case.spec, &self.case.formats, plan)?[0].total();
        std::fs::create_dir_all(self.shards())?;
        let work = tempfile::tempdir()?;
        let file = work.path().join("plan.json");
        std::fs::write(&file, serde_json::to_vec(plan)?)?;
        // The file is there before anything is measured or bounded.
        let mut first = DeviceProcess::start(self.case, &file, &self.shards(), None)?;
        first.ask(ReaderCommand::Open)?;
        drop(first);
        forget(&self.case.path)?;
        let mut device = DeviceProcess::start(self.case, &file, &self.shards(), limit)?;
        let testbed = self.options.testbed.as_deref().unwrap_or(NAME);
        let group = match self.options.loopback || self.options.smoke {
            true => None,
            false => {
                cgroup::remove(testbed)?;
                let holding = self.shards();
                let disk = throttled.map(|rate| DiskLimit { holding, rate: Bytes(rate as u64) });
                let memory = bounded.then_some(needs);
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
            let mut ask = || -> Result<(RequestCost, RequestCost)> {
                Ok((device.ask(ReaderCommand::Open)?, device.ask(ask)?))
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
            for (name, of) in [
                ("cache_mb", "cache"),
                ("refaults", "workingset_refault_file"),
                ("major_faults", "pgmajfault"),
            ] {
                let scale = if name == "cache_mb" { 1e-6 } else { 1.0 };
                let value = group.memory_stat(of).unwrap_or(0) as f64 * scale;
                values.insert(name.to_owned(), value);
            }
            values.insert("refused".to_owned(), group.refused().unwrap_or(0) as f64);
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
        Ok((values, verdict, ran.tokens))
    }
}
