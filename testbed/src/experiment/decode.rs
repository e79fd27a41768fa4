//! Generation over devices and links: on all devices by the planner's plan, on the best one alone, and by
//! llama.cpp over its RPC servers, in turns.

use super::{
    Options,
    latency::{place, stage},
    quiet, settle,
    show::{axis, bar, groups, percent, publish},
};
use crate::{
    driver::{Driver, GeneratedText, Placed, Refusal},
    environment::Environment,
    health::{self, Watch},
    holding::took,
    instance::{Split, Testbed},
    models,
    network::Network,
    peer::{self, LlamaCpp},
    plot::{Axis, Chart, Group, Kind},
    record::{Cell, Outcome, Record, Verdict},
    report::{Table, figure},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{Spread, Strategy};
use galaxy_model::ModelDir;
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// The experiment's name; below it, one line on what it shows.
pub(super) const NAME: &str = "decode";
pub(super) const ABOUT: &str = "tokens per second over devices and links, beside the best single device and llama.cpp over RPC";
/// The paragraph at the beginning of the page.
const STORY: &str = "A text of 64 tokens is read, and more are made behind it, the likeliest each time: by the plan that `auto` makes (TCP with TLS), by the best single device, and by llama.cpp with an RPC server on each device (plain TCP, layers split over them as it does by itself). Weights are bf16 on all sides, from the same file; a device has one thread. They take turns in one run.";
const ENVIRONMENTS: &[&str] = &["pair", "two", "two@125Mbit/s", "four", "four@125Mbit/s"];
const MODELS: &[&str] = &["llama-125m", "llama-1b"];
/// The tokens of the prompt; below it, the tokens that are generated after the first.
const PROMPT: usize = 64;
const MADE: usize = 48;
/// The context length for which each side reserves memory, in tokens.
const ROOM: u32 = 256;
/// The samples of each cell; below it, how many are taken in a row, and how many are tried for each that
/// counts.
const SAMPLES: usize = 4;
const IN_A_ROW: usize = 2;
const PATIENCE: usize = 3;
/// A margin of drift that no device exceeds, so that the plan does not change while an experiment runs.
const STEADY: f64 = 100.0;
/// The label of the generated tokens.
const TOKENS: &str = "tokens";

/// The side that generates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contender {
    One,
    Galaxy,
    LlamaCpp,
}

const SIDES: [Contender; 3] = [Contender::One, Contender::Galaxy, Contender::LlamaCpp];

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Self::One => "one device",
            Self::Galaxy => "galaxy",
            Self::LlamaCpp => "llama.cpp",
        }
    }
}

fn key(environment: &str, model: &str, side: Contender) -> String {
    format!("{environment}/{model}/{}", side.name())
}

/// The part of the experiment that is run.
struct Extent {
    environments: Vec<String>,
    models: Vec<String>,
    sides: Vec<Contender>,
    samples: usize,
    prompt: usize,
    made: usize,
}

impl Extent {
    fn new(options: &Options) -> Self {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let (environments, models, samples, prompt, made) = match options.smoke {
            true => (&["pair"][..], &["tiny-gpt2"][..], 2, 12, 20),
            false => (ENVIRONMENTS, MODELS, SAMPLES, PROMPT, MADE),
        };
        let peer = !options.smoke && peer::version().is_some();
        let sides = SIDES.into_iter().filter(|side| *side != Contender::LlamaCpp || peer);
        Self {
            environments: options.environments().unwrap_or_else(|| own(environments)),
            models: options.models.clone().unwrap_or_else(|| own(models)),
            sides: sides.collect(),
            samples: options.samples.unwrap_or(samples),
            prompt,
            made,
        }
    }
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let extent = Extent::new(options);
    if !options.smoke && peer::version().is_none() {
        eprintln!("without llama.cpp: testbed/peers/llama-cpp/build makes it");
    }
    let environments: Vec<Environment> =
        extent.environments.iter().map(|name| Environment::open(name)).collect::<Result<_>>()?;
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "plain": options.plain, "models": extent.models, "samples": extent.samples,
        "prompt": extent.prompt, "made": extent.made, "llama.cpp": peer::version(),
        "sides": extent.sides.iter().map(|side| side.name()).collect::<Vec<_>>(),
        "environments": environments.iter().map(Environment::source).collect::<Vec<_>>(),
    });
    let directory = options.output.join(NAME);
    let path = directory.join(format!("{NAME}.json"));
    let wanted = Record::new(NAME, options.loopback, settings)?;
    let mut record = Record::open_or_new(&path, wanted, options.fresh)?;
    if let Some(version) = peer::version().filter(|_| extent.sides.contains(&Contender::LlamaCpp)) {
        record.versions.insert("llama.cpp".to_owned(), version);
    }
    for environment in environments {
        let open = |record: &mut Record, model: &String| {
            let key = |side: &Contender| key(&environment.name, model, *side);
            extent.sides.iter().any(|side| !record.cell(&key(side), &[]).done(extent.samples))
        };
        let left: Vec<&String> = extent.models.iter().filter(|m| open(&mut record, m)).collect();
        if left.is_empty() {
            continue;
        }
        for model in &left {
            models::ensure(&options.cache, model)?;
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
    show(&extent, &record, &options.output)
}

/// The turns of all sides, with one model on one testbed.
struct Turns<'a> {
    extent: &'a Extent,
    options: &'a Options,
    testbed: &'a mut Testbed,
    path: &'a Path,
    model: &'a str,
}

/// The side that generates now, with its model placed.
enum Maker<'a, 'p> {
    Ours(&'a Placed<'p>),
    Theirs(&'a mut LlamaCpp),
}

impl Maker<'_, '_> {
    /// The process id of a side's process that runs beside the devices; none where it has none.
    fn driver(&self) -> Option<u32> {
        match self {
            Self::Ours(_) => None,
            Self::Theirs(peer) => Some(peer.driver()),
        }
    }

    fn generate(&mut self, prompt: &[u32], count: usize) -> Result<GeneratedText> {
        match self {
            Self::Ours(placed) => placed.generate(prompt, count as u32),
            Self::Theirs(peer) => peer.generate(prompt, count as u32),
        }
    }
}

impl Turns<'_> {
    fn run(&mut self, record: &mut Record) -> Result<()> {
        let path = models::ensure(&self.options.cache, self.model)?.canonicalize()?;
        let model = Arc::new(ModelDir::open(&path)?);
        let served = self.options.cache.canonicalize()?;
        self.testbed.start_workers(&served, self.options.plain, None)?;
        let stage = stage(self.testbed)?;
        let ballast = self.testbed.ballast()?;
        let mut peer = None;
        let mut tried = [0; SIDES.len()];
        loop {
            let mut open = false;
            for (at, &side) in self.extent.sides.iter().enumerate() {
                let key = key(&self.testbed.environment.name, self.model, side);
                let wanted = self.extent.samples;
                if record.cell(&key, &self.labels(side)).done(wanted)
                    || tried[at] >= wanted * PATIENCE
                {
                    continue;
                }
                if !open {
                    settle(self.testbed, self.options, record, None)?;
                }
                open = true;
                tried[at] += IN_A_ROW;
                let outcome = match side {
                    Contender::LlamaCpp => {
                        if peer.is_none() {
                            eprintln!("{key}: weights are brought to the servers");
                            peer = Some(LlamaCpp::start(self.testbed, &path, ROOM)?);
                        }
                        let peer = peer.as_mut().context("it was started")?;
                        self.turn(&mut Maker::Theirs(peer), &key, record).map(|()| None)
                    }
                    Contender::One => self.ours(&stage, &model, Strategy::Local, &key, record),
                    Contender::Galaxy => self.ours(&stage, &model, Strategy::Auto, &key, record),
                };
                if let Some(outcome) = outcome.with_context(|| key.clone())? {
                    eprintln!("{key}: {outcome}");
                    record.cell(&key, &[]).outcome = outcome;
                }
                record.save(self.path)?;
            }
            if !open {
                break;
            }
        }
        drop((peer, stage, ballast));
        self.testbed.stop_workers()?;
        Ok(())
    }

    fn labels(&self, side: Contender) -> [(&str, &str); 3] {
        let environment = self.testbed.environment.name.as_str();
        [("environment", environment), ("model", self.model), ("variant", side.name())]
    }

    /// Takes one turn of ours. Returns an outcome where there is no such plan.
    fn ours(
        &self,
        stage: &Driver,
        model: &Arc<ModelDir>,
        strategy: Strategy,
        key: &str,
        record: &mut Record,
    ) -> Result<Option<Outcome>> {
        let tokens = self.extent.prompt as u32;
        let mut cluster = self.testbed.cluster(model.path(), strategy, Split::Profiles { tokens });
        cluster.plain = self.options.plain;
        cluster.drift = STEADY;
        cluster.kv_cache_tokens = Some(ROOM);
        cluster.generate = Some(self.extent.made as u32);
        let placed = match place(self.testbed, self.options.smoke, stage, cluster, model)? {
            Ok(placed) => placed,
            Err(Refusal::Memory { device, needs, grants }) => {
                let (device, needs) = (device.to_string(), Some(needs));
                return Ok(Some(Outcome::OutOfMemory { device, needs, grants }));
            }
            Err(Refusal::Plan(why)) => return Ok(Some(Outcome::Refused { why })),
        };
        self.testbed.hold(placed.plan().ring.iter().map(|device| device.name.as_str()))?;
        record.cell(key, &[]).labels.insert("plan".to_owned(), placed.what());
        self.turn(&mut Maker::Ours(&placed), key, record)?;
        Ok(None)
    }

    /// Takes a few samples of one side, and adds them to its cell.
    fn turn(&self, maker: &mut Maker<'_, '_>, key: &str, record: &mut Record) -> Result<()> {
        let Extent { prompt, made, samples, .. } = *self.extent;
        let prompt: Vec<u32> = (0..prompt as u32).map(|i| 3 + i * 7 % 90).collect();
        // The first generation of a placement lowers, fills caches and wakes links.
        maker.generate(&prompt, 2)?;
        for _ in 0..IN_A_ROW {
            let (values, verdict, text) = self.sample(maker, &prompt, made)?;
            match &verdict {
                Verdict::Valid => eprintln!(
                    "{key}: {:.1} ms to the first token, {:.1} tokens/s",
                    values["first_ms"], values["rate"]
                ),
                Verdict::Invalid { reasons } => {
                    eprintln!("{key}: does not count: {}", reasons.join("; "));
                }
            }
            let cell = record.cell(key, &[]);
            let ids: Vec<String> = text.iter().map(ToString::to_string).collect();
            cell.labels.insert(TOKENS.to_owned(), ids.join(" "));
            cell.add(values, verdict);
            record.save(self.path)?;
            if record.cell(key, &[]).done(samples) {
                break;
            }
        }
        Ok(())
    }

    fn sample(
        &self,
        maker: &mut Maker<'_, '_>,
        prompt: &[u32],
        made: usize,
    ) -> Result<(BTreeMap<String, f64>, Verdict, Vec<u32>)> {
        quiet(self.options)?;
        let network = match self.testbed.loopback {
            true => None,
            false => Network::open(&self.testbed.name)?,
        };
        let sent = || -> Result<u64> {
            Ok(network.as_ref().map(Network::sent).transpose()?.unwrap_or_default().iter().sum())
        };
        let count = self.testbed.environment.devices.len();
        let driver = maker.driver();
        let used = || -> Result<u64> {
            let devices = (0..count).map(|i| Ok(self.testbed.usage(i)?.total_ns));
            let devices: u64 = devices.sum::<Result<u64>>()?;
            Ok(devices + self.testbed.overhead() + driver.map_or(0, took))
        };
        let (used_before, watch) = (used()?, Watch::start()?);
        // The cost of the first token is in both generations, and that of the others in one.
        let before = sent()?;
        let short = maker.generate(prompt, 1)?;
        let between = sent()?;
        let begun = Instant::now();
        let long = maker.generate(prompt, made + 1)?;
        let whole = begun.elapsed();
        let (first_bytes, bytes) = (between - before, sent()? - between);
        let health = watch.finish(used()? - used_before)?;
        ensure!(long.tokens.len() == made + 1, "{} tokens were made", long.tokens.len());
        let (first, last) = (long.at[0], long.at[made]);
        let tokens = made as f64;
        let token = (last - first).as_secs_f64() / tokens;
        let mut values = BTreeMap::from([
            ("first_ms", first.min(short.at[0]).as_secs_f64() * 1e3),
            ("token_ms", token * 1e3),
            ("rate", 1.0 / token),
            ("whole_ms", whole.as_secs_f64() * 1e3),
        ]);
        if network.is_some() {
            values.insert("first_kb", first_bytes as f64 * 1e-3);
            values.insert("token_kb", bytes.saturating_sub(first_bytes) as f64 * 1e-3 / tokens);
        }
        if let Some(busy) = busy(&short, &long) {
            values.insert("outside", 1.0 - busy.as_secs_f64() / (last - first).as_secs_f64());
        }
        let mut values: BTreeMap<String, f64> =
            values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        values.extend(health.values());
        let verdict = match self.testbed.loopback || self.options.smoke {
            true => Verdict::Valid,
            false => health::judge(&health, &[]),
        };
        Ok((values, verdict, long.tokens))
    }
}

/// How long the kernels of the busiest device worked on the tokens that the long generation has beyond the
/// short one.
fn busy(short: &GeneratedText, long: &GeneratedText) -> Option<Duration> {
    let (short, long) = (short.report.as_ref()?, long.report.as_ref()?);
    let busy = |(name, cost): &(_, galaxy_coord::fleet::DeviceCost)| {
        let before = short.devices.iter().find(|(other, _)| other == name);
        cost.compute_busy_ns - before.map_or(0, |(_, cost)| cost.compute_busy_ns)
    };
    long.devices.iter().map(busy).max().map(Duration::from_nanos)
}

fn find<'a>(
    record: &'a Record,
    environment: &str,
    model: &str,
    side: Contender,
) -> Option<&'a Cell> {
    let key = key(environment, model, side);
    record.cells.iter().find(|cell| cell.key == key)
}

/// The number of tokens, from the first on, that two cells have in common.
fn agreeing(one: &Cell, other: &Cell) -> Option<usize> {
    let (one, other) = (one.labels.get(TOKENS)?, other.labels.get(TOKENS)?);
    Some(one.split(' ').zip(other.split(' ')).take_while(|(a, b)| a == b).count())
}

fn show(extent: &Extent, record: &Record, output: &Path) -> Result<()> {
    let groups = groups(record);
    let names: Vec<&str> = extent.sides.iter().map(|side| side.name()).collect();
    let cells = |(environment, model): &(String, String)| -> Vec<Option<&Cell>> {
        extent.sides.iter().map(|side| find(record, environment, model, *side)).collect()
    };
    let first = format!("Time to the first token of a text of {}", extent.prompt);
    let mut tables = Vec::new();
    // Each table with its value, and whether it has ratios of galaxy to the other sides.
    for (title, value, ratios) in [
        ("Tokens per second: median (range)", "rate", true),
        (&format!("{first}, ms"), "first_ms", true),
        ("Bytes on the wire for a token, kB, all devices together", "token_kb", false),
        ("Bytes on the wire to the first token, kB", "first_kb", false),
    ] {
        let mut columns = vec!["devices", "model"];
        columns.extend(&names);
        let over: Vec<Contender> =
            extent.sides.iter().copied().filter(|s| *s != Contender::Galaxy).collect();
        let titles: Vec<String> =
            over.iter().map(|side| format!("galaxy is faster than {} by", side.name())).collect();
        if ratios {
            columns.extend(titles.iter().map(String::as_str));
        }
        let mut table = Table::new(title, &columns);
        for group in &groups {
            let figures =
                cells(group).into_iter().map(|c| c.map_or("-".into(), |c| figure(c, value)));
            let mut row: Vec<String> =
                [group.0.clone(), group.1.clone()].into_iter().chain(figures).collect();
            let ours = find(record, &group.0, &group.1, Contender::Galaxy);
            for side in over.iter().filter(|_| ratios) {
                let theirs = find(record, &group.0, &group.1, *side);
                let ratio = ours.zip(theirs).map(|(ours, theirs)| {
                    let (ours, theirs) = (ours.values(value), theirs.values(value));
                    match value == "rate" {
                        true => Spread::of_ratio(&ours, &theirs),
                        false => Spread::of_ratio(&theirs, &ours),
                    }
                });
                let some = ratio.filter(|ratio| ratio.n > 0);
                row.push(some.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")));
            }
            table.row(row);
        }
        tables.push(table);
    }
    let mut table = Table::new(
        "Plans, and where the time of a token goes",
        &[
            "devices",
            "model",
            "plan",
            "token, ms",
            "outside of kernels",
            "same tokens as llama.cpp",
        ],
    );
    for group in &groups {
        let Some(ours) = find(record, &group.0, &group.1, Contender::Galaxy) else { continue };
        let theirs = find(record, &group.0, &group.1, Contender::LlamaCpp);
        let same = theirs.and_then(|theirs| agreeing(ours, theirs));
        table.row([
            group.0.clone(),
            group.1.clone(),
            ours.labels.get("plan").cloned().unwrap_or_default(),
            figure(ours, "token_ms"),
            percent(ours.spread("outside").median),
            same.map_or("-".to_owned(), |n| format!("{n} of {}", extent.made + 1)),
        ]);
    }
    tables.push(table);
    let mut charts = Vec::new();
    for (suffix, title, unit, value) in
        [("", "Tokens per second", "tokens/s", "rate"), ("-first", &first, "ms", "first_ms")]
    {
        let bars = groups.iter().map(|group| Group {
            label: format!("{}/{}", group.0, group.1),
            bars: cells(group)
                .into_iter()
                .enumerate()
                .filter_map(|(series, cell)| Some(bar(series, cell?, value)))
                .collect(),
        });
        let chart = Chart {
            title: title.to_owned(),
            x: axis("devices/model"),
            y: Axis { log: true, ..axis(unit) },
            kind: Kind::Bars {
                groups: bars.collect(),
                series: names.iter().map(|&name| name.to_owned()).collect(),
            },
        };
        charts.push((suffix, chart));
    }
    let notes = vec![
        "*pair*: two devices, each with one hardware thread of this machine to itself, which are the halves of one core: they share its memory bandwidth and its multipliers. *two*, *four*: devices of 15 GFLOP/s, that is a share of a core and of what it reads from memory.".to_owned(),
        "*A token*: from the first token of a text to its last, over how many there are between. *Outside of kernels*: what of it is not in the operations of the device whose kernels worked longest: links, coordination, waiting for a gate or for another device.".to_owned(),
        "*Bytes*: what all places sent, as the switch between them counted it: frames, headers, TLS, control. A text of one token is made besides the long one, and what that takes is the first token's.".to_owned(),
        "llama.cpp is built by `testbed/peers/llama-cpp/build` for this processor and driven by the program beside it, at the place of the coordinator; all threads of its servers are under the devices' quotas once weights are placed, ours that multiply. Its products of bf16 round the left side to bf16 where the processor multiplies that; ours keep it in f32.".to_owned(),
    ];
    let not_kept = [
        "A device of a share of a core waits for its gate: 0.2 ms on average in turns of 0.5 ms, each time that it waited for another device. Real devices do not; a plan that exchanges often loses by it here.",
        "Wake-ups and locks take as long here as on a machine of full speed: a few tens of microseconds.",
        "Devices share a last-level cache, and memory.",
    ];
    publish(record, (NAME, STORY), (tables, notes, charts), &not_kept, output)
}
