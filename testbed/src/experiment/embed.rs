//! Texts per second of an embedding model, many texts at once: on all devices by the planner's plan for that
//! many texts, and on each of them alone, in turns.

use super::{
    Options,
    contest::{self, Bench, Contest, ContestCell, Extent, SAMPLES, Sampled, Turn},
    open, placing, quiet,
    show::{Shown, axis, publish, shown},
};
use crate::{
    bound,
    driver::Placed,
    environment::Environment,
    instance::Split,
    models,
    plot::{Axis, Chart, ChartKind, Point, Series},
    record::{Cell, LATENCY, Outcome, PREDICTED, Record},
    report::{Table, figure},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{BatchShape, Pooling, Segment, Spread, Strategy, Wanted, WireType};
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// The experiment's name.
pub(super) const NAME: &str = "embed";
/// One line on what the experiment shows.
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
/// The numbers of texts at once.
const TEXTS: &[u32] = &[1, 2, 4, 8, 16, 32, 64];
/// The tokens of each text.
const TOKENS: u32 = 64;
/// The least share of the sum that all devices together should reach.
const WANTED: f64 = 0.85;
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
/// The variant of all devices with exact values on links.
const AUTO: &str = "auto";
/// The variant of all devices with half precision on links.
const HALF: &str = "auto-f16";
/// The prefix of the variants of one device alone.
const ALONE: &str = "alone-";
/// The name of the value that is measured: texts per second.
const RATE: &str = "texts_per_s";

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

/// Whether a model's own weights are there.
fn brought(model: &str) -> bool {
    model == MODEL && Path::new(BROUGHT).join("model.safetensors").is_file()
}

/// The experiment, as much of it as is run.
struct Embed {
    texts: &'static [u32],
    /// The tokens of each text.
    tokens: u32,
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let (environments, model, texts, tokens, samples) = match options.smoke {
        true => (&["B"][..], "tiny-bert", &[1, 4][..], 12, 2),
        false => (ENVIRONMENTS, MODEL, TEXTS, TOKENS, SAMPLES),
    };
    let extent = Extent::new(options, environments, &[model], samples)?;
    // Cells themselves say which environments and models there are: more may be added to them.
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "plain": options.plain, "tokens": tokens,
    });
    let mut file = open(NAME, options, settings)?;
    contest::run(&Embed { texts, tokens }, &extent, options, &mut file)?;
    publish(&file, (NAME, STORY), show(&file), NOT_KEPT, &options.output)
}

/// A digest that differs for another text of an environment.
fn digest(environment: &Environment) -> String {
    blake3::hash(environment.source().as_bytes()).to_hex()[..16].to_owned()
}

impl Contest for Embed {
    /// A side, and the number of texts.
    type Contender = (Contender, u32);
    type State = ();

    fn name(&self) -> &'static str {
        NAME
    }

    fn cells(&self, environment: &Environment, model: &str) -> Vec<ContestCell<Self::Contender>> {
        let sides = Contender::all(environment);
        let both = self.texts.iter().flat_map(|texts| sides.iter().map(move |side| (side, *texts)));
        let cell = |(side, texts): (&Contender, u32)| {
            let name = side.name(environment);
            let mut cell = ContestCell::of(&environment.name, model, &name, (side.clone(), texts));
            cell.key += &format!("/{texts}");
            let weights = if brought(model) { "its own" } else { "random, in its shape" };
            cell.labels.extend([
                (SOURCE, digest(environment)),
                (COUNT, texts.to_string()),
                (WEIGHTS, weights.to_owned()),
            ]);
            cell
        };
        both.map(cell).collect()
    }

    /// The directory of a model: its own, or one with random weights.
    fn directory(&self, cache: &Path, model: &str) -> Result<PathBuf> {
        let own = brought(model);
        let path = if own { PathBuf::from(BROUGHT) } else { models::ensure(cache, model)? };
        path.canonicalize().with_context(|| path.display().to_string())
    }

    /// Checks that an environment is as it was when cells of it were measured.
    fn check(&self, record: &Record, environment: &Environment) -> Result<()> {
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

    /// The shares are mended before each number of texts.
    fn settles(&self, (_, texts): &Self::Contender, before: Option<&Self::Contender>) -> bool {
        before.is_none_or(|(_, before)| before != texts)
    }

    fn turn(
        &self,
        bench: &Bench<'_>,
        (side, texts): &Self::Contender,
        (): &mut (),
        turn: &mut Turn<'_>,
    ) -> Result<Outcome> {
        let (texts, tokens) = (*texts, self.tokens);
        let strategy = match side {
            Contender::Auto | Contender::Half => Strategy::Auto,
            Contender::Alone(_) => Strategy::Local,
        };
        let split = Split::Profiles { tokens };
        let mut cluster = bench.cluster(strategy, split, bench.options.plain)?;
        if let Contender::Alone(at) = side {
            let own = cluster.devices.swap_remove(*at);
            cluster.devices = vec![own];
        }
        if *side == Contender::Half {
            cluster.wire = Some(WireType::F16);
        }
        cluster.texts = texts;
        // Budgets hold for the rows of the largest batch, whatever batch is planned for.
        cluster.max_rows = self.texts.iter().max().map_or(tokens, |most| most * tokens);
        let mut placed = match bench.place(cluster)? {
            Ok(placed) => placed,
            Err(outcome) => return Ok(outcome),
        };
        let cell = turn.cell();
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
        turn.take(
            |_| sample(bench, &mut placed, &shape, &ids),
            |cell| cell.bound = bound::of(cell),
        )?;
        Ok(Outcome::Measured)
    }
}

fn sample(
    bench: &Bench<'_>,
    placed: &mut Placed<'_>,
    shape: &BatchShape,
    ids: &Arc<[u32]>,
) -> Result<Sampled> {
    quiet(bench.options)?;
    let (run, used) = bench.watched(|| 0, || placed.execute(shape, ids, LIMIT))?;
    let took = run.took.as_secs_f64();
    let rate = shape.segments().len() as f64 / took;
    let mut values = BTreeMap::from([(LATENCY.to_owned(), took * 1e3), (RATE.to_owned(), rate)]);
    values.extend(used.health.values());
    let observation = placed.observe(run, shape)?;
    values.extend(bound::parts(&observation, &placing::rates(bench.testbed, &observation)));
    Ok((values, bench.judge(&used.health, &[]), format!("{rate:.1} texts/s")))
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
                figure(found.together, LATENCY),
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
        kind: ChartKind::Lines { series: lines },
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
