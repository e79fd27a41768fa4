//! Generation over devices and links: on all devices by the planner's plan, on the best one alone, and by
//! llama.cpp over its RPC servers, in turns.

use super::{
    Options,
    contest::{self, Bench, Contest, ContestCell, Extent, SAMPLES, Sampled, Turn, key},
    open, quiet,
    show::{axis, bar, groups, percent, publish},
};
use crate::{
    driver::{GeneratedText, Placed},
    environment::Environment,
    holding::took,
    instance::Split,
    peer::{self, LlamaCpp},
    plot::{Axis, Chart, ChartKind, Group},
    record::{Cell, Outcome, Record},
    report::{Table, figure},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{Spread, Strategy};
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

/// The experiment's name.
pub(super) const NAME: &str = "decode";
/// One line on what the experiment shows.
pub(super) const ABOUT: &str = "tokens per second over devices and links, beside the best single device and llama.cpp over RPC";
/// The paragraph at the beginning of the page.
const STORY: &str = "A text of 64 tokens is read, and more are made behind it, the likeliest each time: by the plan that `auto` makes (TCP with TLS), by the best single device, and by llama.cpp with an RPC server on each device (plain TCP, layers split over them as it does by itself). Weights are bf16 on all sides, from the same file; a device has one thread. They take turns in one run.";
const ENVIRONMENTS: &[&str] = &["pair", "two", "two@125Mbit/s", "four", "four@125Mbit/s"];
const MODELS: &[&str] = &["llama-125m", "llama-1b"];
/// The tokens of the prompt.
const PROMPT: usize = 64;
/// The tokens that are generated after the first.
const MADE: usize = 48;
/// The context length for which each side reserves memory, in tokens.
const ROOM: u32 = 256;
/// The notes on the page.
const NOTES: &[&str] = &[
    "*pair*: two devices, each with one hardware thread of this machine to itself, which are the halves of one core: they share its memory bandwidth and its multipliers. *two*, *four*: devices of 15 GFLOP/s, that is a share of a core and of what it reads from memory.",
    "*A token*: from the first token of a text to its last, over how many there are between. *Outside of kernels*: what of it is not in the operations of the device whose kernels worked longest: links, coordination, waiting for a gate or for another device.",
    "*Bytes*: what all places sent, as the switch between them counted it: frames, headers, TLS, control. A text of one token is made besides the long one, and what that takes is the first token's.",
    "llama.cpp is built by `testbed/peers/llama-cpp/build` for this processor and driven by the program beside it, at the place of the coordinator; all threads of its servers are under the devices' quotas once weights are placed, ours that multiply. Its products of bf16 round the left side to bf16 where the processor multiplies that; ours keep it in f32.",
];
/// The properties of real devices that the emulation does not keep.
const NOT_KEPT: &[&str] = &[
    "A device of a share of a core waits for its gate: 0.2 ms on average in turns of 0.5 ms, each time that it waited for another device. Real devices do not; a plan that exchanges often loses by it here.",
    "Wake-ups and locks take as long here as on a machine of full speed: a few tens of microseconds.",
    "Devices share a last-level cache, and memory.",
];
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

/// The experiment, as much of it as is run.
struct Decode {
    sides: Vec<Contender>,
    prompt: usize,
    generated: usize,
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let ((environments, models), samples, prompt, made) = match options.smoke {
        true => ((&["pair"][..], &["tiny-gpt2"][..]), 2, 12, 20),
        false => ((ENVIRONMENTS, MODELS), SAMPLES, PROMPT, MADE),
    };
    let extent = Extent::new(options, environments, models, samples)?;
    let version = peer::version();
    if !options.smoke && version.is_none() {
        eprintln!("without llama.cpp: testbed/peers/llama-cpp/build makes it");
    }
    let peer = !options.smoke && version.is_some();
    let sides = SIDES.into_iter().filter(|side| *side != Contender::LlamaCpp || peer);
    let decode = Decode { sides: sides.collect(), prompt, generated: made };
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "plain": options.plain, "models": extent.models, "samples": extent.samples,
        "prompt": prompt, "made": made, "llama.cpp": version,
        "sides": decode.sides.iter().map(|side| side.name()).collect::<Vec<_>>(),
        "environments": extent.environments.iter().map(Environment::source).collect::<Vec<_>>(),
    });
    let mut file = open(NAME, options, settings)?;
    if let Some(version) = version.filter(|_| peer) {
        file.versions.insert("llama.cpp".to_owned(), version);
    }
    contest::run(&decode, &extent, options, &mut file)?;
    let found = Found { decode: &decode, record: &file, groups: groups(&file) };
    found.show(&options.output)
}

/// The side that generates now, with its model placed.
enum Generator<'a, 'p> {
    Ours(&'a Placed<'p>),
    Theirs(&'a mut LlamaCpp),
}

impl Generator<'_, '_> {
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

impl Contest for Decode {
    type Contender = Contender;
    type State = Option<LlamaCpp>;

    fn name(&self) -> &'static str {
        NAME
    }

    fn cells(&self, environment: &Environment, model: &str) -> Vec<ContestCell<Contender>> {
        let cell = |side: &Contender| ContestCell::of(&environment.name, model, side.name(), *side);
        self.sides.iter().map(cell).collect()
    }

    fn turn(
        &self,
        bench: &Bench<'_>,
        side: &Contender,
        peer: &mut Option<LlamaCpp>,
        turn: &mut Turn<'_>,
    ) -> Result<Outcome> {
        let strategy = match side {
            Contender::One => Strategy::Local,
            Contender::Galaxy => Strategy::Auto,
            Contender::LlamaCpp => {
                if peer.is_none() {
                    eprintln!("{}: weights are brought to the servers", turn.key);
                    *peer = Some(LlamaCpp::start(bench.testbed, bench.model.path(), ROOM)?);
                }
                let theirs = peer.as_mut().map(Generator::Theirs);
                return self.samples(bench, theirs.context("it was started")?, turn);
            }
        };
        let split = Split::Profiles { tokens: self.prompt as u32 };
        let mut cluster = bench.cluster(strategy, split, bench.options.plain)?;
        cluster.kv_cache_tokens = Some(ROOM);
        cluster.generate = Some(self.generated as u32);
        let placed = match bench.place(cluster)? {
            Ok(placed) => placed,
            Err(outcome) => return Ok(outcome),
        };
        turn.cell().labels.insert("plan".to_owned(), placed.what());
        self.samples(bench, Generator::Ours(&placed), turn)
    }
}

impl Decode {
    /// Takes the samples of one side's turn.
    fn samples(
        &self,
        bench: &Bench<'_>,
        mut maker: Generator<'_, '_>,
        turn: &mut Turn<'_>,
    ) -> Result<Outcome> {
        let prompt: Vec<u32> = (0..self.prompt as u32).map(|i| 3 + i * 7 % 90).collect();
        // The first generation of a placement lowers, fills caches and wakes links.
        maker.generate(&prompt, 2)?;
        turn.take(|cell| self.sample(bench, &mut maker, &prompt, cell), |_| ())?;
        Ok(Outcome::Measured)
    }

    fn sample(
        &self,
        bench: &Bench<'_>,
        maker: &mut Generator<'_, '_>,
        prompt: &[u32],
        cell: &mut Cell,
    ) -> Result<Sampled> {
        quiet(bench.options)?;
        let sent = bench.sent()?;
        let (made, driver) = (self.generated, maker.driver());
        let generate = || {
            // The cost of the first token is in both generations, and that of the others in one.
            let before = sent()?;
            let short = maker.generate(prompt, 1)?;
            let between = sent()?;
            let begun = Instant::now();
            let long = maker.generate(prompt, made + 1)?;
            Ok((short, long, begun.elapsed(), [before, between, sent()?]))
        };
        let ((short, long, whole, sent), used) =
            bench.watched(|| driver.map_or(0, took), generate)?;
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
        if let [Some(before), Some(between), Some(after)] = sent {
            let (first_bytes, bytes) = (between - before, after - between);
            values.insert("first_kb", first_bytes as f64 * 1e-3);
            values.insert("token_kb", bytes.saturating_sub(first_bytes) as f64 * 1e-3 / tokens);
        }
        if let Some(busy) = busy(&short, &long) {
            values.insert("outside", 1.0 - busy.as_secs_f64() / (last - first).as_secs_f64());
        }
        let told = format!(
            "{:.1} ms to the first token, {:.1} tokens/s",
            values["first_ms"], values["rate"]
        );
        let mut values: BTreeMap<String, f64> =
            values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        values.extend(used.health.values());
        let ids: Vec<String> = long.tokens.iter().map(ToString::to_string).collect();
        cell.labels.insert(TOKENS.to_owned(), ids.join(" "));
        Ok((values, bench.judge(&used.health, &[]), told))
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

/// The number of tokens, from the first on, that two cells have in common.
fn agreeing(one: &Cell, other: &Cell) -> Option<usize> {
    let (one, other) = (one.labels.get(TOKENS)?, other.labels.get(TOKENS)?);
    Some(one.split(' ').zip(other.split(' ')).take_while(|(a, b)| a == b).count())
}

/// A record of the experiment, and its groups of environment and model.
struct Found<'a> {
    decode: &'a Decode,
    record: &'a Record,
    groups: Vec<(String, String)>,
}

impl Found<'_> {
    fn show(&self, output: &Path) -> Result<()> {
        let first = format!("Time to the first token of a text of {}", self.decode.prompt);
        // Each table with its value, and whether it has ratios of galaxy to the other sides.
        let tables = [
            ("Tokens per second: median (range)", "rate", true),
            (&format!("{first}, ms"), "first_ms", true),
            ("Bytes on the wire for a token, kB, all devices together", "token_kb", false),
            ("Bytes on the wire to the first token, kB", "first_kb", false),
        ];
        let mut tables =
            tables.map(|(title, value, ratios)| self.table(title, value, ratios)).to_vec();
        tables.push(self.plans());
        let charts = vec![
            ("", self.chart("Tokens per second", "tokens/s", "rate")),
            ("-first", self.chart(&first, "ms", "first_ms")),
        ];
        let notes = NOTES.iter().map(|&note| note.to_owned()).collect();
        publish(self.record, (NAME, STORY), (tables, notes, charts), NOT_KEPT, output)
    }

    fn cell(&self, (environment, model): &(String, String), side: Contender) -> Option<&Cell> {
        let key = key(environment, model, side.name());
        self.record.cells.iter().find(|cell| cell.key == key)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.decode.sides.iter().map(|side| side.name())
    }

    /// The table of a value of all sides, and of the ratios of galaxy to the others.
    fn table(&self, title: &str, value: &str, ratios: bool) -> Table {
        let others = self.decode.sides.iter().filter(|side| **side != Contender::Galaxy);
        let others: Vec<Contender> = others.filter(|_| ratios).copied().collect();
        let over: Vec<String> =
            others.iter().map(|side| format!("galaxy is faster than {} by", side.name())).collect();
        let columns = ["devices", "model"].into_iter().chain(self.names());
        let columns: Vec<&str> = columns.chain(over.iter().map(String::as_str)).collect();
        let mut table = Table::new(title, &columns);
        for group in &self.groups {
            let mut row = vec![group.0.clone(), group.1.clone()];
            let cells = self.decode.sides.iter().map(|side| self.cell(group, *side));
            row.extend(cells.map(|cell| cell.map_or("-".into(), |cell| figure(cell, value))));
            let ours = self.cell(group, Contender::Galaxy);
            for side in &others {
                let ratio = ours.zip(self.cell(group, *side)).map(|(ours, theirs)| {
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
        table
    }

    fn plans(&self) -> Table {
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
        for group in &self.groups {
            let Some(ours) = self.cell(group, Contender::Galaxy) else { continue };
            let theirs = self.cell(group, Contender::LlamaCpp);
            let same = theirs.and_then(|theirs| agreeing(ours, theirs));
            table.row([
                group.0.clone(),
                group.1.clone(),
                ours.labels.get("plan").cloned().unwrap_or_default(),
                figure(ours, "token_ms"),
                percent(ours.spread("outside").median),
                same.map_or("-".to_owned(), |n| format!("{n} of {}", self.decode.generated + 1)),
            ]);
        }
        table
    }

    fn chart(&self, title: &str, unit: &str, value: &str) -> Chart {
        let bars = |group: &(String, String)| {
            let sides = self.decode.sides.iter().enumerate();
            let bars = sides
                .filter_map(|(series, side)| Some(bar(series, self.cell(group, *side)?, value)));
            Group { label: format!("{}/{}", group.0, group.1), bars: bars.collect() }
        };
        Chart {
            title: title.to_owned(),
            x: axis("devices/model"),
            y: Axis { log: true, ..axis(unit) },
            kind: ChartKind::Bars {
                groups: self.groups.iter().map(bars).collect(),
                series: self.names().map(str::to_owned).collect(),
            },
        }
    }
}
