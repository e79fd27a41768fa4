//! The same model, devices and links under PyTorch with Gloo and under the plan that `auto` makes, in
//! turns.

mod page;

use super::{
    Options,
    latency::{place, rates, stage},
    quiet, settle,
};
use crate::{
    bound, calibrate,
    driver::{Driver, Placed, Refusal},
    environment::Environment,
    health::{self, DeviceShare, Watch},
    instance::{self, Split, Testbed},
    models,
    network::Network,
    peer::gloo::{self, Gloo, PeerLayout},
    record::{Outcome, Record, Verdict},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{BatchShape, LinkType, Pooling, Strategy, Wanted};
use galaxy_coord::fleet::Run;
use galaxy_engine::merge::{Merged, merge};
use galaxy_graph::program::Output;
use galaxy_model::ModelDir;
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// The experiment's name; below it, one line on what it shows.
pub(super) const NAME: &str = "peers";
pub(super) const ABOUT: &str =
    "the plan of `auto` beside PyTorch with Gloo: Megatron-style, sequence parallel, one device";
const ENVIRONMENTS: &[&str] = &["A", "B", "C", "D", "E", "F"];
const MODELS: &[&str] = &["distilbert", "bert-large", "gpt2-large"];
/// Tokens of the text: the average length of the paper's (Galaxy, §IV-A).
const TOKENS: u32 = 284;
/// The samples of each cell; below it, how many are taken in a row, and how many are tried for each that
/// counts.
const SAMPLES: usize = 4;
const IN_A_ROW: usize = 2;
const PATIENCE: usize = 3;
/// The longest that one text may take.
const LIMIT: Duration = Duration::from_secs(600);
/// A margin of drift that no device exceeds, so that the plan does not change while an experiment runs.
const STEADY: f64 = 100.0;
/// The name of the value that is the speed of devices over their processor time, in GFLOP/s.
const SPEED: &str = "devices_gflops";
/// The label of the first values of a result; below it, how many values are kept.
const RESULT: &str = "result";
const KEPT: usize = 32;
/// The label of our plan; below it, the label of how PyTorch keeps weights, and the name of its version in
/// the record.
const PLAN: &str = "plan";
const WEIGHTS: &str = "weights";
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

fn key(environment: &str, model: &str, side: Contender) -> String {
    format!("{environment}/{model}/{}", side.name())
}

/// The part of the experiment that is run.
struct Extent {
    environments: Vec<String>,
    models: Vec<String>,
    sides: Vec<Contender>,
    samples: usize,
    tokens: u32,
}

impl Extent {
    fn new(options: &Options) -> Self {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let (environments, models, samples, tokens) = match options.smoke {
            true => (&["A"][..], &["tiny-bert"][..], 2, 24),
            false => (ENVIRONMENTS, MODELS, SAMPLES, TOKENS),
        };
        let peer = gloo::version().is_some();
        let sides = SIDES.into_iter().filter(|side| peer || matches!(side, Contender::Ours(_)));
        Self {
            environments: options.environments().unwrap_or_else(|| own(environments)),
            models: options.models.clone().unwrap_or_else(|| own(models)),
            sides: sides.collect(),
            samples: options.samples.unwrap_or(samples),
            tokens,
        }
    }
}

/// Runs all cells that are left, and shows the record.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let extent = Extent::new(options);
    let environments: Vec<Environment> =
        extent.environments.iter().map(|name| Environment::open(name)).collect::<Result<_>>()?;
    // Other environments and models may follow, and PyTorch may be brought later.
    let settings = json!({
        "experiment": NAME, "smoke": options.smoke, "loopback": options.loopback,
        "tokens": extent.tokens,
    });
    let path = options.output.join(NAME).join(format!("{NAME}.json"));
    let wanted = Record::new(NAME, options.loopback, settings)?;
    let mut record = Record::open_or_new(&path, wanted, options.fresh)?;
    match gloo::version() {
        None => eprintln!("without PyTorch: {} brings it", gloo::BRING),
        Some(version) => {
            let was = record.versions.insert(VERSION.to_owned(), version.clone());
            let same = was.as_ref().is_none_or(|was| *was == version);
            ensure!(
                same,
                "{} was measured beside PyTorch {}, and {version} is there: start anew with --fresh",
                path.display(),
                was.unwrap_or_default()
            );
        }
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
            let models = options.cache.canonicalize()?;
            let mut turns = Turns { extent, options, testbed: &mut up, path, model, models };
            turns.run(&mut record)?;
        }
        up.down()?;
    }
    record.save(&path)?;
    page::show(&record, extent.tokens, &options.output)
}

/// The turns of all sides, with one model on one testbed.
struct Turns<'a> {
    extent: &'a Extent,
    options: &'a Options,
    testbed: &'a mut Testbed,
    path: &'a Path,
    model: &'a str,
    /// The directory of models that workers serve.
    models: PathBuf,
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

impl Turns<'_> {
    fn run(&mut self, record: &mut Record) -> Result<()> {
        let path = models::ensure(&self.options.cache, self.model)?.canonicalize()?;
        let model = Arc::new(ModelDir::open(&path)?);
        let stage = stage(self.testbed)?;
        let ballast = self.testbed.ballast()?;
        let mut tried = vec![0; self.extent.sides.len()];
        loop {
            let mut open = false;
            for (&side, tried) in self.extent.sides.iter().zip(&mut tried) {
                let key = key(&self.testbed.environment.name, self.model, side);
                let wanted = self.extent.samples;
                if record.cell(&key, &self.labels(side)).done(wanted) || *tried >= wanted * PATIENCE
                {
                    continue;
                }
                if !open {
                    settle(self.testbed, self.options, record, None)?;
                }
                open = true;
                *tried += IN_A_ROW;
                let kills = self.kills()?;
                let outcome = match side {
                    Contender::Theirs(way) => self.theirs(way, &model, &key, record),
                    Contender::Ours(link) => self.ours(&stage, link, &model, &key, record),
                };
                let outcome = outcome.or_else(|error| self.broken(&error, &kills).map(Some))?;
                if let Some(outcome) = outcome {
                    eprintln!("{key}: {outcome}");
                    record.cell(&key, &[]).outcome = outcome;
                }
                record.save(self.path)?;
            }
            if !open {
                break;
            }
        }
        drop((stage, ballast));
        self.testbed.stop_workers()
    }

    fn labels(&self, side: Contender) -> [(&str, &str); 3] {
        let environment = self.testbed.environment.name.as_str();
        [("environment", environment), ("model", self.model), ("variant", side.name())]
    }

    /// Takes one turn of PyTorch, with the devices' memory to itself.
    fn theirs(
        &self,
        way: PeerLayout,
        model: &ModelDir,
        key: &str,
        record: &mut Record,
    ) -> Result<Option<Outcome>> {
        self.testbed.stop_workers()?;
        let mut gloo = Gloo::start(self.testbed, model.path(), way, self.extent.tokens)?;
        let weights = gloo.weights().to_owned();
        record.cell(key, &[]).labels.insert(WEIGHTS.to_owned(), weights);
        self.turn(&mut Runner::Theirs(&mut gloo), model, key, record)?;
        Ok(None)
    }

    /// Takes one turn of ours. Returns an outcome where there is no such plan.
    fn ours(
        &self,
        stage: &Driver,
        link: LinkType,
        model: &Arc<ModelDir>,
        key: &str,
        record: &mut Record,
    ) -> Result<Option<Outcome>> {
        let workers = self.testbed.workers();
        if workers.is_empty() || !workers.iter().all(instance::Worker::alive) {
            // These workers take both kinds of links.
            self.testbed.start_workers(&self.models, true, None)?;
        }
        let split = Split::Profiles { tokens: self.extent.tokens };
        let mut cluster = self.testbed.cluster(model.path(), Strategy::Auto, split);
        cluster.link = Some(link);
        cluster.plain = link == LinkType::Plain;
        cluster.drift = STEADY;
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
        let before = cell.labels.insert(PLAN.to_owned(), placed.what());
        if before.is_some_and(|before| before != placed.what()) {
            // Earlier samples are by other profiles, from a run that was broken off.
            cell.samples.clear();
        }
        self.turn(&mut Runner::Ours(&mut placed), model, key, record)?;
        Ok(None)
    }

    /// Takes a few samples of one side, and adds them to its cell.
    fn turn(
        &self,
        runner: &mut Runner<'_, '_>,
        model: &ModelDir,
        key: &str,
        record: &mut Record,
    ) -> Result<()> {
        let shape = BatchShape::single(self.extent.tokens, Wanted::Pooled(Pooling::Mean))?;
        let tokens: Arc<[u32]> = (0..self.extent.tokens).map(|i| 3 + i * 7 % 900).collect();
        // The first text of a placement lowers, fills caches and wakes links.
        let (_, mean, _) = runner.run(&shape, &tokens)?;
        let kept: Vec<String> = mean.iter().take(KEPT).map(ToString::to_string).collect();
        record.cell(key, &[]).labels.insert(RESULT.to_owned(), kept.join(" "));
        for _ in 0..IN_A_ROW {
            let (values, verdict) = self.sample(runner, model, &shape, &tokens)?;
            match &verdict {
                Verdict::Valid => eprintln!("{key}: {:.0} ms", values["latency_ms"]),
                Verdict::Invalid { reasons } => {
                    eprintln!("{key}: does not count: {}", reasons.join("; "));
                }
            }
            let cell = record.cell(key, &[]);
            cell.add(values, verdict);
            cell.rule_out(SPEED, health::slowed);
            cell.bound = bound::of(cell);
            let done = cell.done(self.extent.samples);
            record.save(self.path)?;
            if done {
                break;
            }
        }
        Ok(())
    }

    fn sample(
        &self,
        runner: &mut Runner<'_, '_>,
        model: &ModelDir,
        shape: &BatchShape,
        tokens: &Arc<[u32]>,
    ) -> Result<(BTreeMap<String, f64>, Verdict)> {
        quiet(self.options)?;
        let network = match self.testbed.loopback {
            true => None,
            false => Network::open(&self.testbed.name)?,
        };
        let sent = || -> Result<u64> {
            Ok(network.as_ref().map(Network::sent).transpose()?.unwrap_or_default().iter().sum())
        };
        let count = self.testbed.environment.devices.len();
        let devices = || -> Result<u64> {
            (0..count).map(|i| Ok(self.testbed.usage(i)?.total_ns)).sum::<Result<u64>>()
        };
        let (before, overhead, bytes) = (devices()?, self.testbed.overhead(), sent()?);
        let watch = Watch::start()?;
        let (took, _, run) = runner.run(shape, tokens)?;
        let used = devices()? - before;
        let health = watch.finish(used + self.testbed.overhead().saturating_sub(overhead))?;
        let mut values = BTreeMap::from([("latency_ms".to_owned(), took.as_secs_f64() * 1e3)]);
        if network.is_some() {
            values.insert("sent_mb".to_owned(), (sent()? - bytes) as f64 * 1e-6);
        }
        values.extend(health.values());
        if let (Runner::Ours(placed), Some(run)) = (runner, run) {
            let observation = placed.observe(run, shape)?;
            values.extend(bound::parts(&observation, &rates(self.testbed, &observation)));
        }
        // On loopback and in smoke runs nothing is compared.
        if self.testbed.loopback || self.options.smoke {
            return Ok((values, Verdict::Valid));
        }
        let done = calibrate::flops(model.spec(), self.extent.tokens);
        values.insert(SPEED.to_owned(), done / used as f64);
        // When PyTorch's processes waited for each other is not known, so it is not asked of ours either.
        let share = |device: &calibrate::Calibrated| DeviceShare {
            name: device.name.clone(),
            quota: device.quota,
            received: 0,
            busy: 0,
        };
        let shares: Vec<DeviceShare> = self.testbed.calibration.devices.iter().map(share).collect();
        Ok((values, health::judge(&health, &shares)))
    }

    /// The processes of each device that were killed for their memory until now.
    fn kills(&self) -> Result<Vec<u64>> {
        let count = self.testbed.environment.devices.len();
        (0..count).map(|i| Ok(self.testbed.usage(i)?.oom_kills)).collect()
    }

    /// The outcome of a turn that failed on its devices.
    fn broken(&self, error: &anyhow::Error, before: &[u64]) -> Result<Outcome> {
        let (environment, kills) = (&self.testbed.environment, self.kills()?);
        let killed = (0..kills.len()).find(|&i| kills[i] > before[i]);
        Ok(match killed {
            Some(i) => Outcome::OutOfMemory {
                device: environment.devices[i].name.to_string(),
                needs: None,
                grants: environment.memory(&environment.devices[i]),
            },
            None => Outcome::Failed { error: format!("{error:#}") },
        })
    }
}
