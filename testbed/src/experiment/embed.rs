//! Texts per second of an embedding model, many texts at once: on all devices by the planner's plan for that
//! many texts, and on each of them alone, in turns.

use super::{
    Options,
    latency::{place, rates as cables, stage},
    quiet, settle,
    show::{Shown, axis, publish, shown},
};
use crate::{
    bound,
    driver::{Driver, Placed, Refusal},
    environment::Environment,
    health::{self, Watch},
    instance::{Split, Testbed},
    models,
    plot::{Axis, Chart, Kind, Point, Series},
    record::{Cell, Outcome, PREDICTED, Record, Verdict},
    report::{Table, figure},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{BatchShape, Pooling, Segment, Spread, Strategy, Wanted, WireType};
use galaxy_model::ModelDir;
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// The experiment's name; below it, one line on what it shows.
pub(super) const NAME: &str = "embed";
pub(super) const ABOUT: &str =
    "texts per second of an embedding model, 1 to 64 at once, beside what each device does alone";
/// The paragraph at the beginning of the page.
const STORY: &str = "Texts of 64 tokens are embedded, so many at once: one request is one batch, and its latency is from dispatch to the last vector. `auto` plans all devices for so many texts (`texts` in a cluster file), `auto-f16` with half precision on links (`wire = \"f16\"`, which is lossy), and each device does the same work alone; they take turns in one run. What all devices give together is held against the sum of what each gives alone, which no way to share the work exceeds by much: 85% of it is the least that is wanted of three devices.";
/// The environments, with short turns: few texts take so little time that waiting for turns of 2 ms would be
/// much of it.
const ENVIRONMENTS: &[&str] = &["B@turn=0.5ms", "B@1000Mbit/s,turn=0.5ms", "F@turn=0.5ms"];
/// The model that `scripts/setup` brings, if that was run; else one with random weights in its shape.
const MODEL: &str = "all-MiniLM-L6-v2";
const BROUGHT: &str = "models/all-MiniLM-L6-v2";
/// The numbers of texts at once; below it, the tokens of each text.
const TEXTS: &[u32] = &[1, 2, 4, 8, 16, 32, 64];
const TOKENS: u32 = 64;
/// The least share of the sum that all devices together should reach.
const WANTED: f64 = 0.85;
/// The samples of each cell; below it, how many are taken in a row, and how many are tried for each that
/// counts.
const SAMPLES: usize = 4;
const IN_A_ROW: usize = 2;
const PATIENCE: usize = 3;
/// A margin of drift that no device exceeds, so that the plan does not change while an experiment runs.
const STEADY: f64 = 100.0;
/// The longest that a batch may take.
const LIMIT: Duration = Duration::from_secs(600);
/// The labels of a cell, by name.
const ENVIRONMENT: &str = "environment";
const SOURCE: &str = "source";
const OF: &str = "model";
const WHO: &str = "variant";
const COUNT: &str = "texts";
const PLAN: &str = "plan";
const WEIGHTS: &str = "weights";
/// The variant of all devices with exact values on links; below it, the one with half precision on links, and
/// the prefix of each device alone.
const AUTO: &str = "auto";
const HALF: &str = "auto-f16";
const ALONE: &str = "alone-";
/// The name of the value that is measured: texts per second.
const RATE: &str = "texts_per_s";

/// The part of the experiment that is run.
struct Extent {
    environments: Vec<String>,
    models: Vec<String>,
    texts: &'static [u32],
    tokens: u32,
    samples: usize,
}

impl Extent {
    fn new(options: &Options) -> Self {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let (environments, model, texts, tokens, samples) = match options.smoke {
            true => (&["B"][..], "tiny-bert", &[1, 4][..], 12, 2),
            false => (ENVIRONMENTS, MODEL, TEXTS, TOKENS, SAMPLES),
        };
        Self {
            environments: options.environments().unwrap_or_else(|| own(environments)),
            models: options.models.clone().unwrap_or_else(|| own(&[model])),
            texts,
            tokens,
            samples: options.samples.unwrap_or(samples),
        }
    }

    /// The rows of the largest batch: budgets hold for them, whatever batch is planned for.
    fn rows(&self) -> u32 {
        self.texts.iter().max().map_or(self.tokens, |most| most * self.tokens)
    }
}

/// The side that embeds the texts.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Contender {
    Auto,
    /// All devices, with half precision on links.
    Half,
    /// The device of this index, alone.
    Alone(usize),
}

impl Contender {
    fn all(environment: &Environment) -> Vec<Self> {
        let alone = (0..environment.devices.len()).map(Self::Alone);
        [Self::Auto, Self::Half].into_iter().chain(alone).collect()
    }

    fn name(&self, environment: &Environment) -> String {
        match self {
            Self::Auto => AUTO.to_owned(),
            Self::Half => HALF.to_owned(),
            Self::Alone(at) => format!("{ALONE}{}", environment.devices[*at].name),
        }
    }
}

fn key(environment: &str, model: &str, side: &str, texts: u32) -> String {
    format!("{environment}/{model}/{side}/{texts}")
}

/// Whether a model's own weights are there.
fn brought(model: &str) -> bool {
    model == MODEL && Path::new(BROUGHT).join("model.safetensors").is_file()
}

/// The directory of a model: its own, or one with random weights.
fn directory(cache: &Path, model: &str) -> Result<PathBuf> {
    let own = brought(model);
    let path = if own { PathBuf::from(BROUGHT) } else { models::ensure(cache, model)? };
    path.canonicalize().with_context(|| path.display().to_string())
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let extent = Extent::new(options);
    let environments: Vec<Environment> =
        extent.environments.iter().map(|name| Environment::open(name)).collect::<Result<_>>()?;
    // Cells themselves say which environments and models there are: more may be added to them.
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "plain": options.plain, "tokens": extent.tokens,
    });
    let path = options.output.join(NAME).join(format!("{NAME}.json"));
    let wanted = Record::new(NAME, options.loopback, settings)?;
    let mut record = Record::open_or_new(&path, wanted, options.fresh)?;
    for environment in environments {
        unchanged(&record, &environment)?;
        let open = |model: &&String| {
            let sides = Contender::all(&environment);
            let keys = sides.iter().flat_map(|side| {
                let of = |&n: &u32| key(&environment.name, model, &side.name(&environment), n);
                extent.texts.iter().map(of).collect::<Vec<_>>()
            });
            keys.into_iter().any(|key| !done(&record, &key, extent.samples))
        };
        let left: Vec<&String> = extent.models.iter().filter(open).collect();
        if left.is_empty() {
            continue;
        }
        for model in &left {
            directory(&options.cache, model)?;
        }
        let name = options.testbed.as_deref().unwrap_or(NAME);
        let mut up = Testbed::anew(environment, name, options.loopback, &options.cache)?;
        for model in left {
            let (extent, path) = (&extent, path.as_path());
            Turns { extent, options, testbed: &mut up, path, model }.run(&mut record)?;
        }
        up.down()?;
    }
    record.save(&path)?;
    publish(&record, (NAME, STORY), show(&record), NOT_KEPT, &options.output)
}

fn done(record: &Record, key: &str, samples: usize) -> bool {
    record.cells.iter().any(|cell| cell.key == key && cell.done(samples))
}

/// A digest that differs for another text of an environment.
fn digest(environment: &Environment) -> String {
    blake3::hash(environment.source().as_bytes()).to_hex()[..16].to_owned()
}

/// Checks that an environment is as it was when cells of it were measured.
fn unchanged(record: &Record, environment: &Environment) -> Result<()> {
    let of = |cell: &&Cell| cell.labels.get(ENVIRONMENT) == Some(&environment.name);
    let source = digest(environment);
    let same = |cell: &Cell| cell.labels.get(SOURCE) == Some(&source);
    ensure!(
        record.cells.iter().filter(of).all(same),
        "environment {} is another than it was when cells of it were measured: start anew with --fresh",
        environment.name
    );
    Ok(())
}

/// The turns of all sides, with one model on one testbed.
struct Turns<'a> {
    extent: &'a Extent,
    options: &'a Options,
    testbed: &'a mut Testbed,
    path: &'a Path,
    model: &'a str,
}

impl Turns<'_> {
    fn run(&mut self, record: &mut Record) -> Result<()> {
        let path = directory(&self.options.cache, self.model)?;
        let model = Arc::new(ModelDir::open(&path)?);
        let served = path.parent().context("a model is in a directory")?;
        self.testbed.start_workers(served, self.options.plain, None)?;
        let stage = stage(self.testbed)?;
        let ballast = self.testbed.ballast()?;
        let sides = Contender::all(&self.testbed.environment);
        let mut tried: BTreeMap<String, usize> = BTreeMap::new();
        loop {
            let (mut open, mut settled) = (false, None);
            for &texts in self.extent.texts {
                for side in &sides {
                    let name = side.name(&self.testbed.environment);
                    let key = key(&self.testbed.environment.name, self.model, &name, texts);
                    let tried = tried.entry(key.clone()).or_default();
                    let wanted = self.extent.samples;
                    if done(record, &key, wanted) || *tried >= wanted * PATIENCE {
                        continue;
                    }
                    if settled != Some(texts) {
                        settle(self.testbed, self.options, record, None)?;
                        settled = Some(texts);
                    }
                    open = true;
                    *tried += IN_A_ROW;
                    self.label(record, &key, &name, texts);
                    let outcome = self.turn(&stage, &model, (side, texts), &key, record);
                    if let Some(outcome) = outcome.with_context(|| key.clone())? {
                        eprintln!("{key}: {outcome}");
                        record.cell(&key, &[]).outcome = outcome;
                    }
                    record.save(self.path)?;
                }
            }
            if !open {
                break;
            }
        }
        drop((stage, ballast));
        self.testbed.stop_workers()?;
        Ok(())
    }

    /// Sets the labels of a cell.
    fn label(&self, record: &mut Record, key: &str, side: &str, texts: u32) {
        let environment = &self.testbed.environment;
        let (source, texts) = (digest(environment), texts.to_string());
        let labels = [
            (ENVIRONMENT, environment.name.as_str()),
            (SOURCE, source.as_str()),
            (OF, self.model),
            (WHO, side),
            (COUNT, texts.as_str()),
            (WEIGHTS, if brought(self.model) { "its own" } else { "random, in its shape" }),
        ];
        record.cell(key, &labels);
    }

    /// Places the model, and takes a few samples. Returns an outcome where there is no such plan.
    fn turn(
        &self,
        stage: &Driver,
        model: &Arc<ModelDir>,
        (side, texts): (&Contender, u32),
        key: &str,
        record: &mut Record,
    ) -> Result<Option<Outcome>> {
        let tokens = self.extent.tokens;
        let strategy = match side {
            Contender::Auto | Contender::Half => Strategy::Auto,
            Contender::Alone(_) => Strategy::Local,
        };
        let mut cluster = self.testbed.cluster(model.path(), strategy, Split::Profiles { tokens });
        if let Contender::Alone(at) = side {
            let own = cluster.devices.swap_remove(*at);
            cluster.devices = vec![own];
        }
        if *side == Contender::Half {
            cluster.wire = Some(WireType::F16);
        }
        cluster.plain = self.options.plain;
        cluster.drift = STEADY;
        cluster.texts = texts;
        cluster.max_rows = self.extent.rows();
        let mut placed = match place(self.testbed, self.options.smoke, stage, cluster, model)? {
            Ok(placed) => placed,
            Err(Refusal::Memory { device, needs, grants }) => {
                let (device, needs) = (device.to_string(), Some(needs));
                return Ok(Some(Outcome::OutOfMemory { device, needs, grants }));
            }
            Err(Refusal::Plan(why)) => return Ok(Some(Outcome::Refused { why })),
        };
        self.testbed.hold(placed.plan().ring.iter().map(|device| device.name.as_str()))?;
        let cell = record.cell(key, &[]);
        if let Some(predicted) = placed.predicted() {
            let predicted = predicted.as_secs_f64() * 1e3;
            let before = cell.facts.insert(PREDICTED.to_owned(), predicted);
            if before.is_some_and(|before| before != predicted) {
                // Earlier samples are of another plan, or by other profiles, from a run that was broken off.
                cell.samples.clear();
            }
        }
        cell.labels.insert(PLAN.to_owned(), placed.what());
        let wanted = Wanted::Pooled(Pooling::Mean);
        let segment = |slot| Segment { slot, context_len: 0, cached: false, rows: tokens, wanted };
        let shape = BatchShape::new((0..texts).map(segment).collect())?;
        let ids: Arc<[u32]> = (0..texts * tokens).map(|i| 3 + i * 7 % 900).collect();
        // The first batch of a placement lowers, fills caches and wakes links.
        placed.execute(&shape, &ids, LIMIT)?;
        for _ in 0..IN_A_ROW {
            let (values, verdict) = self.sample(&mut placed, &shape, &ids)?;
            match &verdict {
                Verdict::Valid => eprintln!("{key}: {:.1} texts/s", values[RATE]),
                Verdict::Invalid { reasons } => {
                    eprintln!("{key}: does not count: {}", reasons.join("; "));
                }
            }
            let cell = record.cell(key, &[]);
            cell.add(values, verdict);
            cell.bound = bound::of(cell);
            record.save(self.path)?;
            if done(record, key, self.extent.samples) {
                break;
            }
        }
        Ok(None)
    }

    fn sample(
        &self,
        placed: &mut Placed<'_>,
        shape: &BatchShape,
        ids: &Arc<[u32]>,
    ) -> Result<(BTreeMap<String, f64>, Verdict)> {
        quiet(self.options)?;
        let count = self.testbed.environment.devices.len();
        let used = || -> Result<u64> {
            let devices = (0..count).map(|i| Ok(self.testbed.usage(i)?.total_ns));
            Ok(devices.sum::<Result<u64>>()? + self.testbed.overhead())
        };
        let (before, watch) = (used()?, Watch::start()?);
        let run = placed.execute(shape, ids, LIMIT)?;
        let health = watch.finish(used()?.saturating_sub(before))?;
        let took = run.took.as_secs_f64();
        let texts = shape.segments().len() as f64;
        let mut values = BTreeMap::from([
            ("latency_ms".to_owned(), took * 1e3),
            (RATE.to_owned(), texts / took),
        ]);
        values.extend(health.values());
        let observation = placed.observe(run, shape)?;
        values.extend(bound::parts(&observation, &cables(self.testbed, &observation)));
        // On loopback and in smoke runs nothing is compared, and every sample counts.
        let verdict = match self.testbed.loopback || self.options.smoke {
            true => Verdict::Valid,
            false => health::judge(&health, &[]),
        };
        Ok((values, verdict))
    }
}

const NOT_KEPT: &[&str] = &[
    "A quota comes in slices: each wait for another device gives back up to one. Devices that hold whole texts wait for nobody until the end.",
    "Wake-ups and locks take as long here as on a machine of full speed: a few tens of microseconds.",
    "Devices share a last-level cache, and memory.",
];

fn label<'a>(cell: &'a Cell, name: &str) -> &'a str {
    cell.labels.get(name).map_or("", String::as_str)
}

/// The cells of one number of texts of a model in an environment: of all devices, and of each alone.
struct CellGroup<'a> {
    texts: u32,
    together: &'a Cell,
    alone: Vec<&'a Cell>,
}

/// The key of a group of cells: environment, model, and [`AUTO`] or [`HALF`].
type Of<'a> = (&'a str, &'a str, &'a str);

impl<'a> CellGroup<'a> {
    /// All groups of a record by their key, the fewest texts first.
    fn all(record: &'a Record) -> Vec<(Of<'a>, Vec<Self>)> {
        let mut all: Vec<(Of<'_>, Vec<Self>)> = Vec::new();
        for together in record.cells.iter().filter(|cell| [AUTO, HALF].contains(&label(cell, WHO)))
        {
            let same = |cell: &&Cell| {
                let alone = label(cell, WHO).starts_with(ALONE);
                let like = |l: &&str| label(cell, l) == label(together, l);
                alone && [ENVIRONMENT, OF, COUNT].iter().all(like)
            };
            let texts = label(together, COUNT).parse().unwrap_or(1);
            let alone = record.cells.iter().filter(same).collect();
            let found = Self { texts, together, alone };
            let of = (label(together, ENVIRONMENT), label(together, OF), label(together, WHO));
            match all.iter_mut().find(|(other, _)| *other == of) {
                Some((_, group)) => group.push(found),
                None => all.push((of, vec![found])),
            }
        }
        all.iter_mut().for_each(|(_, group)| group.sort_by_key(|found| found.texts));
        all
    }

    /// The sum of the texts per second of each device alone: by the medians, the lowest and the highest.
    fn sum(&self) -> Option<[f64; 3]> {
        let spreads: Vec<Spread> = self.alone.iter().map(|cell| cell.spread(RATE)).collect();
        let there = !spreads.is_empty() && spreads.iter().all(|spread| spread.n > 0);
        let sum = |of: fn(&Spread) -> f64| spreads.iter().map(of).sum();
        there.then(|| [sum(|s| s.median), sum(|s| s.low), sum(|s| s.high)])
    }

    /// The share of the sum that all devices reach together: by medians, at least, at most.
    fn share(&self) -> Option<[f64; 3]> {
        let all = self.together.spread(RATE);
        let [median, low, high] = self.sum().filter(|_| all.n > 0)?;
        Some([all.median / median, all.low / high, all.high / low])
    }

    /// The predicted texts per second.
    fn predicted(&self) -> f64 {
        let ms = self.together.facts.get(PREDICTED).copied().unwrap_or(f64::NAN);
        f64::from(self.texts) / ms * 1e3
    }
}

fn show(record: &Record) -> Shown {
    let all = CellGroup::all(record);
    let models = all.iter().any(|((_, model, _), _)| *model != all[0].0.1);
    let (mut tables, mut lines, mut below) = (Vec::new(), Vec::new(), Vec::new());
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for ((environment, model, who), group) in &all {
        let mut name = (*environment).to_owned();
        if models {
            name = format!("{name}, {model}");
        }
        if *who == HALF {
            name.push_str(", f16 on links");
        }
        let mut rates = rates(&format!("{name}: texts per second, median (range)"), who, group);
        let mut plans = Table::new(
            &format!("{name}: plans of `{who}`"),
            &[
                "texts at once",
                WEIGHTS,
                PLAN,
                "latency, ms",
                "bound, ms",
                "predicted, ms",
                "texts/s",
                "predicted texts/s",
            ],
        );
        let mut points = Vec::new();
        for found in group {
            let share = found.share();
            rates.row(rate_row(found, share));
            plans.row([
                found.texts.to_string(),
                label(found.together, WEIGHTS).to_owned(),
                label(found.together, PLAN).to_owned(),
                figure(found.together, "latency_ms"),
                shown(found.together.bound.as_ref().map_or(f64::NAN, |bound| bound.ms), 1),
                shown(found.together.facts.get(PREDICTED).copied().unwrap_or(f64::NAN), 1),
                shown(found.together.spread(RATE).median, 2),
                shown(found.predicted(), 2),
            ]);
            let x = f64::from(found.texts);
            (least, most) = (least.min(x), most.max(x));
            let Some([y, low, high]) = share.map(|share| share.map(|part| part * 100.0)) else {
                continue;
            };
            points.push(Point { x, y, low, high });
            if y < WANTED * 100.0 {
                below.push(format!("{name} with {}: {y:.1}%", found.texts));
            }
        }
        tables.extend([rates, plans]);
        lines.push(Series { name, points, dashed: false });
    }
    if least <= most {
        let point = |x| Point { x, y: WANTED * 100.0, low: WANTED * 100.0, high: WANTED * 100.0 };
        let name = format!("{:.0}%", WANTED * 100.0);
        lines.push(Series { name, points: vec![point(least), point(most)], dashed: true });
    }
    let chart = Chart {
        title: "Texts per second of all devices, of the sum of each alone".to_owned(),
        x: Axis { log: true, ..axis("texts at once") },
        y: axis("%"),
        kind: Kind::Lines { series: lines },
    };
    let reached = match below.is_empty() {
        true => format!("Every number of texts reaches {:.0}% of the sum.", WANTED * 100.0),
        false => format!("Below {:.0}% of the sum: {}.", WANTED * 100.0, below.join("; ")),
    };
    let notes = vec![
        reached,
        "*Sum*: of the medians of what each device gives alone, by a plan for it alone, measured for each device by itself. *Over the sum*: of medians; in brackets the least of all devices over the largest sum, and the largest over the least.".to_owned(),
        "*Bound*: what the slowest device computed, or how long the busiest cable is busy, the longer of both.".to_owned(),
        "*Predicted*: what the planner says of the plan, from profiles that the devices measured of themselves before.".to_owned(),
    ];
    (tables, notes, vec![("", chart)])
}

/// The table of texts per second of a group, still without rows.
fn rates(title: &str, who: &str, group: &[CellGroup<'_>]) -> Table {
    let of = |cell: &&Cell| cell.labels.get(WHO).cloned().unwrap_or_default();
    let alone: Vec<String> =
        group.first().into_iter().flat_map(|f| f.alone.iter().map(of)).collect();
    let mut columns = vec!["texts at once", who];
    columns.extend(alone.iter().map(String::as_str));
    columns.extend(["sum of those", "over the sum", "predicted"]);
    Table::new(title, &columns)
}

fn rate_row(found: &CellGroup<'_>, share: Option<[f64; 3]>) -> Vec<String> {
    let mut row = vec![found.texts.to_string(), figure(found.together, RATE)];
    row.extend(found.alone.iter().map(|cell| figure(cell, RATE)));
    row.push(shown(found.sum().map_or(f64::NAN, |[median, ..]| median), 2));
    row.push(share.map_or("-".to_owned(), |share| {
        let [median, low, high] = share.map(|part| part * 100.0);
        format!("{median:.1}% ({low:.1} to {high:.1})")
    }));
    row.push(shown(found.predicted(), 2));
    row
}
