//! The same model, devices and links under PyTorch with Gloo and under the plan that `auto` makes, in
//! turns.

mod page;

use super::{
    Options,
    contest::{self, Bench, Contest, ContestCell, Extent, SAMPLES, Sampled, Turn},
    open, placing, quiet,
};
use crate::{
    bound, calibrate,
    driver::Placed,
    environment::Environment,
    health::{self, DeviceShare},
    instance::Split,
    peer::gloo::{self, Gloo, PeerLayout},
    record::{LATENCY, Outcome},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{BatchShape, LinkType, Pooling, Strategy, Wanted};
use galaxy_coord::fleet::Run;
use galaxy_engine::merge::{Merged, merge};
use galaxy_graph::program::Output;
use serde_json::json;
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// The experiment's name.
pub(super) const NAME: &str = "peers";
/// One line on what the experiment shows.
pub(super) const ABOUT: &str =
    "the plan of `auto` beside PyTorch with Gloo: Megatron-style, sequence parallel, one device";
const ENVIRONMENTS: &[&str] = &["A", "B", "C", "D", "E", "F"];
const MODELS: &[&str] = &["distilbert", "bert-large", "gpt2-large"];
/// Tokens of the text: the average length of the paper's (Galaxy, §IV-A).
const TOKENS: u32 = 284;
/// The longest that one text may take.
const LIMIT: Duration = Duration::from_secs(600);
/// The name of the value that is the speed of devices over their processor time, in GFLOP/s.
const SPEED: &str = "devices_gflops";
/// The label of the first values of a result.
const RESULT: &str = "result";
/// How many of the first values of a result are kept.
const KEPT: usize = 32;
/// The label of our plan.
const PLAN: &str = "plan";
/// The label of how PyTorch keeps weights.
const WEIGHTS: &str = "weights";
/// The name of the version of PyTorch in the record.
const VERSION: &str = "PyTorch";

/// The side that runs the model, and its variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contender {
    Theirs(PeerLayout),
    /// Our engine, over plain TCP or TCP with TLS.
    Ours(LinkType),
}

const SINGLE: Contender = Contender::Theirs(PeerLayout::Single);
const MEGATRON: Contender = Contender::Theirs(PeerLayout::Megatron);
const SEQUENCE: Contender = Contender::Theirs(PeerLayout::Sequence);
const GALAXY: Contender = Contender::Ours(LinkType::Plain);
const GALAXY_TLS: Contender = Contender::Ours(LinkType::Tls);
const SIDES: [Contender; 5] = [SINGLE, MEGATRON, SEQUENCE, GALAXY, GALAXY_TLS];

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Self::Theirs(PeerLayout::Single) => "pytorch-single",
            Self::Theirs(PeerLayout::Megatron) => "pytorch-megatron",
            Self::Theirs(PeerLayout::Sequence) => "pytorch-sequence",
            Self::Ours(LinkType::Plain) => "galaxy",
            Self::Ours(_) => "galaxy-tls",
        }
    }
}

/// The experiment, as much of it as is run.
struct Peers {
    sides: Vec<Contender>,
    tokens: u32,
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let (environments, models, samples, tokens) = match options.smoke {
        true => (&["A"][..], &["tiny-bert"][..], 2, 24),
        false => (ENVIRONMENTS, MODELS, SAMPLES, TOKENS),
    };
    let extent = Extent::new(options, environments, models, samples)?;
    let version = gloo::version();
    let ours = |side: &Contender| matches!(side, Contender::Ours(_));
    let sides = SIDES.into_iter().filter(|side| version.is_some() || ours(side)).collect();
    // Other environments and models may follow, and PyTorch may be brought later.
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "tokens": tokens,
    });
    let mut file = open(NAME, options, settings)?;
    match version {
        None => eprintln!("without PyTorch: {} brings it", gloo::BRING),
        Some(version) => {
            let was = file.versions.insert(VERSION.to_owned(), version.clone());
            let same = was.as_ref().is_none_or(|was| *was == version);
            ensure!(
                same,
                "{} was measured beside PyTorch {}, and {version} is there: start anew with --fresh",
                file.path().display(),
                was.unwrap_or_default()
            );
        }
    }
    contest::run(&Peers { sides, tokens }, &extent, options, &mut file)?;
    page::show(&file, tokens, &options.output)
}

/// A model that one side has placed on the devices.
enum Runner<'a, 'p> {
    Ours(&'a mut Placed<'p>),
    Theirs(&'a mut Gloo),
}

impl Runner<'_, '_> {
    /// Runs a text, and returns how long that took, the mean of its last hidden states, and our run of it.
    fn run(
        &mut self,
        shape: &BatchShape,
        tokens: &Arc<[u32]>,
    ) -> Result<(Duration, Vec<f32>, Option<Run>)> {
        match self {
            Self::Theirs(gloo) => gloo.run(tokens).map(|answer| (answer.took, answer.mean, None)),
            Self::Ours(placed) => {
                let run = placed.execute(shape, tokens, LIMIT)?;
                let parts: Vec<(&[Output], &[Vec<f32>])> =
                    run.devices.iter().map(|d| (&d.outputs[..], &d.values[..])).collect();
                let merged = merge(placed.model().spec(), shape, &parts)?;
                let mean = merged.first().map(Merged::values).context("one text has one result")?;
                Ok((run.took, mean.to_vec(), Some(run)))
            }
        }
    }
}

impl Contest for Peers {
    type Contender = Contender;
    type State = ();

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
        (): &mut (),
        turn: &mut Turn<'_>,
    ) -> Result<Outcome> {
        let kills = bench.kills()?;
        let outcome = match *side {
            Contender::Theirs(way) => self.theirs(bench, way, turn),
            Contender::Ours(link) => self.ours(bench, link, turn),
        };
        outcome.or_else(|error| bench.failed(&error, &kills))
    }
}

impl Peers {
    /// Takes one turn of PyTorch, with the devices' memory to itself.
    fn theirs(&self, bench: &Bench<'_>, way: PeerLayout, turn: &mut Turn<'_>) -> Result<Outcome> {
        bench.testbed.stop_workers()?;
        let mut gloo = Gloo::start(bench.testbed, bench.model.path(), way, self.tokens)?;
        let weights = gloo.weights().to_owned();
        turn.cell().labels.insert(WEIGHTS.to_owned(), weights);
        self.samples(bench, Runner::Theirs(&mut gloo), turn)
    }

    /// Takes one turn of ours. Returns an outcome where there is no such plan.
    fn ours(&self, bench: &Bench<'_>, link: LinkType, turn: &mut Turn<'_>) -> Result<Outcome> {
        // These workers take both kinds of links.
        let split = Split::Profiles { tokens: self.tokens };
        let mut cluster = bench.cluster(Strategy::Auto, split, true)?;
        cluster.link = Some(link);
        cluster.plain = link == LinkType::Plain;
        let mut placed = match bench.place(cluster)? {
            Ok(placed) => placed,
            Err(outcome) => return Ok(outcome),
        };
        let cell = turn.cell();
        let before = cell.labels.insert(PLAN.to_owned(), placed.what());
        if before.is_some_and(|before| before != placed.what()) {
            // Earlier samples are by other profiles, from a run that was broken off.
            cell.samples.clear();
        }
        self.samples(bench, Runner::Ours(&mut placed), turn)
    }

    /// Takes the samples of one side's turn.
    fn samples(
        &self,
        bench: &Bench<'_>,
        mut runner: Runner<'_, '_>,
        turn: &mut Turn<'_>,
    ) -> Result<Outcome> {
        let shape = BatchShape::single(self.tokens, Wanted::Pooled(Pooling::Mean))?;
        let tokens: Arc<[u32]> = (0..self.tokens).map(|i| 3 + i * 7 % 900).collect();
        // The first text of a placement lowers, fills caches and wakes links.
        let (_, mean, _) = runner.run(&shape, &tokens)?;
        let kept: Vec<String> = mean.iter().take(KEPT).map(ToString::to_string).collect();
        turn.cell().labels.insert(RESULT.to_owned(), kept.join(" "));
        turn.take(
            |_| sample(bench, &mut runner, &shape, &tokens),
            |cell| {
                cell.rule_out(SPEED, health::slowed);
                cell.bound = bound::of(cell);
            },
        )?;
        Ok(Outcome::Measured)
    }
}

fn sample(
    bench: &Bench<'_>,
    runner: &mut Runner<'_, '_>,
    shape: &BatchShape,
    tokens: &Arc<[u32]>,
) -> Result<Sampled> {
    quiet(bench.options)?;
    let sent = bench.sent()?;
    let bytes = sent()?;
    let ((took, _, run), used) = bench.watched(|| 0, || runner.run(shape, tokens))?;
    let ms = took.as_secs_f64() * 1e3;
    let mut values = BTreeMap::from([(LATENCY.to_owned(), ms)]);
    if let (Some(before), Some(after)) = (bytes, sent()?) {
        values.insert("sent_mb".to_owned(), (after - before) as f64 * 1e-6);
    }
    values.extend(used.health.values());
    if let (Runner::Ours(placed), Some(run)) = (runner, run) {
        let observation = placed.observe(run, shape)?;
        values.extend(bound::parts(&observation, &placing::rates(bench.testbed, &observation)));
    }
    if bench.compares() {
        let done = calibrate::flops(bench.model.spec(), tokens.len() as u32);
        values.insert(SPEED.to_owned(), done / used.devices_ns() as f64);
    }
    // When PyTorch's processes waited for each other is not known, so it is not asked of ours either.
    let share = |device: &calibrate::Calibrated| DeviceShare {
        name: device.name.clone(),
        quota: device.quota,
        received: 0,
        busy: 0,
    };
    let shares: Vec<DeviceShare> = bench.testbed.calibration.devices.iter().map(share).collect();
    Ok((values, bench.judge(&used.health, &shares), format!("{ms:.0} ms")))
}
