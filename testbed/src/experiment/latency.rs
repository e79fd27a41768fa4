//! Runs the cells of an experiment over latency: testbeds up and down, models placed, runs taken in turns and
//! judged, bounds computed.

use super::{Experiment, Options, Variant, quiet, settle};
use crate::{
    bound::{self, CellBound, Learner},
    calibrate,
    driver::{Driver, Observation, Placed, Refusal},
    environment::{COORDINATOR, Environment},
    health::{self, DeviceShare, Watch},
    instance::{Split, Testbed},
    models, namespaces,
    record::{Bound, ENVIRONMENTS, Outcome, PREDICTED, Record, Verdict},
};
use anyhow::{Result, anyhow, bail};
use galaxy_common::{BatchShape, Pooling, Reading, Strategy, Wanted};
use galaxy_coord::Cluster;
use galaxy_graph::timeline::{hidden, lane_use, traffic};
use galaxy_model::ModelDir;
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// The longest that one run may take: the largest model on the slowest devices takes a minute.
const LIMIT: Duration = Duration::from_secs(600);
/// A margin of drift that no device exceeds, so that the plan does not change while an experiment runs.
const STEADY: f64 = 100.0;
/// The fact of a cell that is the number of tokens of its text; below it, the operations that the text takes.
pub(super) const TOKENS: &str = "tokens";
pub(super) const FLOPS: &str = "flops";
/// The fact of a cell that is its environment's number of devices; below it, the rate of the slowest link of
/// the modelled devices, in Mbit/s.
pub(super) const DEVICES: &str = "devices";
pub(super) const RATE: &str = "rate_mbit";
/// The name of the value that is the speed of kernels over their processor time, in GFLOP/s.
const SPEED: &str = "kernels_gflops";
/// The tries of a cell for each sample that is wanted, invalid ones included.
const PATIENCE: usize = 3;
/// The most times that devices are measured until the host leaves the machine alone meanwhile.
const PROFILES: usize = 5;

/// A cell that is not done.
struct Cell {
    key: String,
    variant: &'static Variant,
    learner: Option<Learner>,
    tried: usize,
}

/// The progress of an experiment.
struct Progress {
    begun: Instant,
    done: usize,
    left: usize,
}

impl Progress {
    fn step(&mut self, key: &str, what: &str) {
        self.done += 1;
        self.left = self.left.saturating_sub(1);
        let each = self.begun.elapsed().as_secs_f64() / self.done as f64;
        let minutes = (each * self.left as f64 / 60.0).ceil();
        eprintln!("{key}: {what}; {} runs to go, about {minutes} min", self.left);
    }
}

/// The key of a cell: stable, so that a run that was broken off goes on.
pub fn key(environment: &str, model: &str, variant: &str, anew: Option<usize>) -> String {
    let key = format!("{environment}/{model}/{variant}");
    anew.map_or(key.clone(), |n| format!("{key}/{}", n + 1))
}

/// Runs all cells of an experiment that are left.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub fn run(experiment: &Experiment, options: &Options) -> Result<Record> {
    let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    let environments = options.environments().unwrap_or_else(|| own(experiment.environments));
    let models = options.models.clone().unwrap_or_else(|| own(experiment.models));
    let samples = options.samples.unwrap_or(experiment.samples);
    let environments: Vec<Environment> =
        environments.iter().map(|name| Environment::open(name)).collect::<Result<_>>()?;
    let settings = json!({
        "experiment": experiment.name, "smoke": options.smoke, "loopback": options.loopback,
        "plain": options.plain, "tokens": experiment.tokens,
        "anew": experiment.anew,
        "variants": experiment.variants.iter().map(|v| v.name).collect::<Vec<_>>(),
        ENVIRONMENTS: environments.iter().map(|e| (e.name.as_str(), e.source())).collect::<BTreeMap<_, _>>(),
    });
    let path = options.output.join(experiment.name).join(format!("{}.json", experiment.name));
    let wanted = Record::new(experiment.name, options.loopback, settings)?;
    let mut record = Record::open_or_new(&path, wanted, options.fresh)?;
    if !record.cells.is_empty() {
        eprintln!("going on with {}: {}", path.display(), record.extent());
    }
    let names: Vec<&str> = environments.iter().map(|e| e.name.as_str()).collect();
    let left = missing(&record, experiment, &names, &models, samples);
    let mut progress = Progress { begun: Instant::now(), done: 0, left };
    for environment in environments {
        for anew in 0..experiment.anew {
            let anew = (experiment.anew > 1).then_some(anew);
            let open = |record: &Record, model: &String| {
                let key = |v: &Variant| key(&environment.name, model, v.name, anew);
                experiment.variants.iter().any(|v| !done(record, &key(v), samples))
            };
            let left: Vec<&String> = models.iter().filter(|m| open(&record, m)).collect();
            let mut runs = Vec::new();
            for model in left {
                let Some(why) = unknown(model)? else {
                    runs.push(model);
                    continue;
                };
                for variant in experiment.variants {
                    let key = key(&environment.name, model, variant.name, anew);
                    record.cell(&key, &[]).outcome = Outcome::Refused { why: why.clone() };
                    progress.left = progress.left.saturating_sub(samples);
                    eprintln!("{key}: {why}");
                }
            }
            let left = runs;
            record.save(&path)?;
            if left.is_empty() {
                continue;
            }
            // Made before the testbed: writing gigabytes is no part of what is measured.
            for model in &left {
                models::ensure(&options.cache, model)?;
            }
            let name = options.testbed.as_deref().unwrap_or(experiment.name);
            let environment = environment.clone();
            let mut up = Testbed::anew(environment, name, options.loopback, &options.cache)?;
            for model in left {
                let models = options.cache.canonicalize()?;
                let (testbed, path) = (&mut up, path.as_path());
                let mut group =
                    Group { experiment, options, testbed, path, samples, model, models, anew };
                group.run(&mut record, &mut progress)?;
            }
            up.down()?;
        }
    }
    record.save(&path)?;
    Ok(record)
}

/// The number of samples that are still to be taken of what is asked for; a record may hold more than that.
fn missing(
    record: &Record,
    experiment: &Experiment,
    environments: &[&str],
    models: &[String],
    samples: usize,
) -> usize {
    let anew = || (0..experiment.anew).map(|n| (experiment.anew > 1).then_some(n));
    let cells = environments.iter().flat_map(|environment| {
        models.iter().flat_map(move |model| {
            experiment.variants.iter().flat_map(move |variant| {
                anew().map(move |anew| key(environment, model, variant.name, anew))
            })
        })
    });
    let left = cells.map(|key| match record.cells.iter().find(|cell| cell.key == key) {
        Some(cell) if cell.done(samples) => 0,
        Some(cell) => samples - cell.valid().count(),
        None => samples,
    });
    left.sum()
}

fn done(record: &Record, key: &str, samples: usize) -> bool {
    record.cells.iter().any(|cell| cell.key == key && cell.done(samples))
}

/// Why a model cannot run at all; none where it can.
fn unknown(model: &str) -> Result<Option<String>> {
    let shape = &models::find(model)?.shape;
    let why = || format!("family {} is not known to the engine yet", shape.family);
    Ok(shape.spec().is_err().then(why))
}

/// The variants of one model on one testbed, which take turns.
struct Group<'a> {
    experiment: &'a Experiment,
    options: &'a Options,
    testbed: &'a mut Testbed,
    path: &'a Path,
    samples: usize,
    model: &'a str,
    /// The directory of models that workers serve.
    models: PathBuf,
    anew: Option<usize>,
}

impl Group<'_> {
    fn run(&mut self, record: &mut Record, progress: &mut Progress) -> Result<()> {
        let path = models::ensure(&self.options.cache, self.model)?.canonicalize()?;
        let model = Arc::new(ModelDir::open(&path)?);
        let environment = &self.testbed.environment;
        self.testbed.start_workers(&self.models, self.options.plain, None)?;
        let stage = stage(self.testbed)?;
        let ballast = self.testbed.ballast()?;
        let cell = |variant: &'static Variant| Cell {
            key: key(&environment.name, self.model, variant.name, self.anew),
            variant,
            learner: None,
            tried: 0,
        };
        let mut cells: Vec<Cell> = self.experiment.variants.iter().map(cell).collect();
        loop {
            let mut open = 0;
            for cell in &mut cells {
                let wanted = self.samples;
                if done(record, &cell.key, wanted) || cell.tried >= wanted * PATIENCE {
                    continue;
                }
                if open == 0 {
                    settle(self.testbed, self.options, record, self.anew)?;
                }
                open += 1;
                self.turn(&stage, &model, cell, record, progress)?;
                record.save(self.path)?;
            }
            if open == 0 {
                break;
            }
        }
        drop((stage, ballast));
        self.testbed.stop_workers()?;
        bounds(&cells, record);
        record.save(self.path)
    }

    /// Places the model by the cell's variant, and takes some runs.
    fn turn(
        &self,
        stage: &Driver,
        model: &Arc<ModelDir>,
        cell: &mut Cell,
        record: &mut Record,
        progress: &mut Progress,
    ) -> Result<()> {
        let environment = &self.testbed.environment;
        let speed = |d| environment.speed(d).map_or(1.0, |speed| speed.0);
        let by_speed = cell.variant.strategy == Strategy::Galaxy;
        let share = |d| if by_speed { speed(d) } else { 1.0 };
        let shares: Vec<f64> = environment.devices.iter().map(share).collect();
        let Variant { strategy, tiles, .. } = *cell.variant;
        let kills = self.kills()?;
        let split = match tiles {
            None => Split::Profiles { tokens: self.tokens(cell.variant) },
            Some(tiles) => Split::Shares { shares: &shares, tiles },
        };
        let mut cluster = self.testbed.cluster(model.path(), strategy, split);
        cluster.plain = self.options.plain;
        // A plan that changed on the way would be another cell.
        cluster.drift = STEADY;
        // The disk here is no board's: what does not fit is out of memory, as it was for the paper.
        cluster.weight_streaming = Reading::Preload;
        let placed = match place(self.testbed, self.options.smoke, stage, cluster, model) {
            Ok(Ok(placed)) => Ok(placed),
            Ok(Err(refusal)) => {
                let refused = self.refused(refusal);
                // A worker that died of it, as while it measured itself, says more than the plan.
                match self.broken(&anyhow!("{refused}"), &kills)? {
                    killed @ Outcome::OutOfMemory { .. } => Err(killed),
                    _ => Err(refused),
                }
            }
            Err(error) => Err(self.broken(&error, &kills)?),
        };
        let placed = placed.and_then(|placed: Placed<'_>| match self.hold(&placed) {
            Ok(()) => Ok(placed),
            Err(error) => Err(Outcome::Failed { error: format!("{error:#}") }),
        });
        let mut placed = match placed {
            Ok(placed) => placed,
            Err(outcome) => {
                eprintln!("{}: {outcome}", cell.key);
                progress.left = progress.left.saturating_sub(self.samples);
                record.cell(&cell.key, &[]).outcome = outcome;
                return Ok(());
            }
        };
        let kept = record.cell(&cell.key, &self.labels(cell.variant));
        if let Some(predicted) = placed.predicted() {
            let predicted = predicted.as_secs_f64() * 1e3;
            let before = kept.facts.insert(PREDICTED.to_owned(), predicted);
            if before.is_some_and(|before| before != predicted) {
                // Earlier samples are of another plan, or by other profiles, from a run that was broken off.
                progress.left += kept.valid().count().min(self.samples);
                kept.samples.clear();
                cell.learner = None;
            }
            kept.labels.insert("plan".to_owned(), placed.what());
        }
        let count = self.tokens(cell.variant);
        let devices = &environment.devices;
        let rate = devices.iter().map(|device| device.rate.0).fold(f64::INFINITY, f64::min);
        let facts = [
            (TOKENS, f64::from(count)),
            (FLOPS, calibrate::flops(model.spec(), count)),
            (DEVICES, devices.len() as f64),
            (RATE, rate * 1e-6),
        ];
        kept.facts.extend(facts.map(|(name, value)| (name.to_owned(), value)));
        kept.paper = (self.experiment.paper)(&environment.name, self.model);
        let shape = BatchShape::single(count, Wanted::Pooled(Pooling::Mean))?;
        let tokens: Arc<[u32]> = (0..count).map(|i| 3 + i * 7 % 900).collect();
        // The first run of a placement lowers, fills caches and wakes links.
        for counted in std::iter::once(false).chain((0..self.experiment.in_a_row).map(|_| true)) {
            let sample = self.sample(&mut placed, &shape, &tokens);
            let (values, verdict, observation) = match sample {
                Ok(taken) => taken,
                Err(error) => {
                    let outcome = self.broken(&error, &kills)?;
                    eprintln!("{}: {outcome}", cell.key);
                    record.cell(&cell.key, &[]).outcome = outcome;
                    return Ok(());
                }
            };
            if !counted {
                continue;
            }
            cell.tried += 1;
            match &verdict {
                Verdict::Valid => {
                    progress.step(&cell.key, &format!("{:.0} ms", values["latency_ms"]));
                    let rates = rates(self.testbed, &observation);
                    cell.learner.get_or_insert_with(|| Learner::new(&rates)).learn(&observation)?;
                }
                Verdict::Invalid { reasons } => {
                    eprintln!("{}: does not count: {}", cell.key, reasons.join("; "));
                }
            }
            let kept = record.cell(&cell.key, &self.labels(cell.variant));
            kept.add(values, verdict);
            kept.rule_out(SPEED, health::slowed);
            record.save(self.path)?;
            if done(record, &cell.key, self.samples) {
                break;
            }
        }
        Ok(())
    }

    /// The tokens of the text for a variant.
    fn tokens(&self, variant: &Variant) -> u32 {
        self.experiment.tokens.of(variant.strategy, self.testbed.environment.devices.len())
    }

    fn hold(&self, placed: &Placed<'_>) -> Result<()> {
        let plan = placed.plan();
        self.testbed.hold(plan.ring.iter().map(|device| device.name.as_str()))
    }

    fn labels(&self, variant: &Variant) -> [(&'static str, &str); 3] {
        let environment = self.testbed.environment.name.as_str();
        [("environment", environment), ("model", self.model), ("variant", variant.name)]
    }

    fn sample(
        &self,
        placed: &mut Placed<'_>,
        shape: &BatchShape,
        tokens: &Arc<[u32]>,
    ) -> Result<(BTreeMap<String, f64>, Verdict, Observation)> {
        quiet(self.options)?;
        let count = self.testbed.environment.devices.len();
        let usages = || (0..count).map(|i| self.testbed.usage(i)).collect::<Result<Vec<_>>>();
        let computed = (0..count).map(|i| self.testbed.computed(i)).collect::<Result<Vec<_>>>()?;
        let (before, overhead) = (usages()?, self.testbed.overhead());
        let watch = Watch::start()?;
        let observation = placed.run(shape, tokens, LIMIT)?;
        let after = usages()?;
        let used: u64 = after.iter().zip(&before).map(|(a, b)| a.total_ns - b.total_ns).sum();
        let health = watch.finish(used + self.testbed.overhead().saturating_sub(overhead))?;
        let ms = |ns: u64| ns as f64 * 1e-6;
        let mut values = bound::spent(&observation)?;
        values.insert("latency_ms".to_owned(), observation.run.took.as_secs_f64() * 1e3);
        let rates = rates(self.testbed, &observation);
        let (mut shares, mut least_hidden, mut wire_cpu) = (Vec::new(), f64::MAX, 0f64);
        for (rank, &i) in devices(self.testbed, &observation).iter().enumerate() {
            let program = &observation.programs[rank];
            let lanes = lane_use(program, &observation.timelines[rank].operations);
            let (busy, awaiting) = lanes.first().map_or((0, 0), |l| (l.busy, l.awaiting_receive));
            if let Some(hidden) = hidden(awaiting, traffic(program).1, rates[rank]) {
                least_hidden = least_hidden.min(hidden);
            }
            let received = self.testbed.computed(i)?.saturating_sub(computed[i]);
            let limited = after[i].compute_ns - before[i].compute_ns;
            wire_cpu = wire_cpu.max(ms(after[i].total_ns - before[i].total_ns) - ms(limited));
            let calibrated = &self.testbed.calibration.devices[i];
            shares.push(DeviceShare {
                name: calibrated.name.clone(),
                quota: calibrated.quota,
                received,
                busy,
            });
        }
        if least_hidden < f64::MAX && !self.testbed.loopback {
            values.insert("hidden".to_owned(), least_hidden);
        }
        if !self.testbed.loopback {
            values.insert("wire_cpu_ms".to_owned(), wire_cpu);
        }
        values.extend(health.values());
        // On loopback and in smoke runs nothing is compared.
        let verdict = match self.testbed.loopback || self.options.smoke {
            true => Verdict::Valid,
            false => {
                let received: u64 = shares.iter().map(|share| share.received).sum();
                let done = calibrate::flops(placed.model().spec(), tokens.len() as u32);
                values.insert(SPEED.to_owned(), done / received as f64);
                health::judge(&health, &shares)
            }
        };
        Ok((values, verdict, observation))
    }

    fn refused(&self, refusal: Refusal) -> Outcome {
        match refusal {
            Refusal::Memory { device, needs, grants } => {
                Outcome::OutOfMemory { device: device.to_string(), needs: Some(needs), grants }
            }
            Refusal::Plan(why) => Outcome::Refused { why },
        }
    }

    /// The processes of each device that were killed for their memory until now.
    fn kills(&self) -> Result<Vec<u64>> {
        let count = self.testbed.environment.devices.len();
        (0..count).map(|i| Ok(self.testbed.usage(i)?.oom_kills)).collect()
    }

    /// The outcome of a run that failed on its devices; workers that were killed for their memory are started
    /// again.
    ///
    /// # Errors
    /// When a worker ended by itself: then it is a bug, and the error has what the worker printed.
    fn broken(&self, error: &anyhow::Error, before: &[u64]) -> Result<Outcome> {
        let environment = &self.testbed.environment;
        let kills = self.kills()?;
        let killed = (0..kills.len()).find(|&i| kills[i] > before[i]);
        let outcome = match killed {
            Some(i) => Outcome::OutOfMemory {
                device: environment.devices[i].name.to_string(),
                needs: None,
                grants: environment.memory(&environment.devices[i]),
            },
            None => Outcome::Failed { error: format!("{error:#}") },
        };
        if killed.is_some() {
            self.testbed.start_workers(&self.models, self.options.plain, None)?;
        } else if let Some(ended) = self.testbed.workers().iter().find(|w| !w.alive()) {
            let said = std::fs::read_to_string(self.testbed.log(&ended.device)).unwrap_or_default();
            bail!("the worker on {} ended ({error:#}); it said:\n{said}", ended.device);
        }
        Ok(outcome)
    }
}

/// Indices of the devices of a run, by rank.
fn devices(testbed: &Testbed, observation: &Observation) -> Vec<usize> {
    let index = |name: &galaxy_common::DeviceName| testbed.device(name.as_str()).unwrap_or(0);
    observation.run.devices.iter().map(|d| index(&d.name)).collect()
}

/// Bytes per second of the cable of each device of a run, by rank.
pub(super) fn rates(testbed: &Testbed, observation: &Observation) -> Vec<f64> {
    let environment = &testbed.environment;
    let rate = |i: usize| match testbed.loopback {
        true => f64::INFINITY,
        false => environment.rate(&environment.devices[i]).0 / 8.0,
    };
    devices(testbed, observation).into_iter().map(rate).collect()
}

/// Places a model. Profiles that this measures must be measured while the host leaves the machine alone, like
/// every sample.
pub(super) fn place<'s>(
    testbed: &Testbed,
    smoke: bool,
    stage: &'s Driver,
    cluster: Cluster,
    model: &Arc<ModelDir>,
) -> Result<Result<Placed<'s>, Refusal>> {
    let by_profiles = cluster.tiles.is_none();
    let _holding = by_profiles.then(|| testbed.holding()).transpose()?;
    let profiles = cluster.profiles.clone();
    let kept = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&profiles).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let counts = by_profiles && !testbed.loopback && !smoke;
    let tries = if counts { PROFILES } else { 1 };
    for _ in 1..tries {
        health::quiet()?;
        let (before, watch) = (kept(), Watch::start()?);
        let placed = stage.place(cluster.clone(), model)?;
        let stolen = watch.finish(0)?.steal_share;
        let mut new = kept();
        new.retain(|file| !before.contains(file));
        if new.is_empty() || stolen <= health::MOST_STEAL {
            return Ok(placed);
        }
        // A device that holds a part of a plan does not measure itself.
        drop(placed);
        eprintln!(
            "profiles do not count: the host took {:.1}% of the machine; they are measured again",
            stolen * 100.0
        );
        new.iter().try_for_each(std::fs::remove_file)?;
    }
    stage.place(cluster, model)
}

/// A stage at the place of the coordinator.
pub(super) fn stage(testbed: &Testbed) -> Result<Driver> {
    let namespace = namespaces::namespace(&testbed.name, COORDINATOR);
    let loopback = testbed.loopback;
    Driver::new(&testbed.identity(COORDINATOR), move || {
        // A thread that is not inside reaches no device, and its first call says so.
        if !loopback && let Err(error) = namespaces::enter(&namespace) {
            eprintln!("{error:#}");
        }
    })
}

/// Sets the bounds of all cells of a group: the least compute that one strategy needed is enough for every
/// other of the same split.
fn bounds(cells: &[Cell], record: &mut Record) {
    let seen: Vec<(&Cell, CellBound)> =
        cells.iter().filter_map(|c| Some((c, c.learner.as_ref()?.seen()))).collect();
    // Plans of different splits need different compute each.
    let split = |c: &Cell| c.variant.strategy != Strategy::Local && c.variant.tiles.is_some();
    let all = seen.iter().filter(|(c, _)| split(c)).map(|(_, s)| s.compute());
    let all = all.fold(f64::INFINITY, f64::min);
    for (cell, seen) in &seen {
        let least = if split(cell) { all } else { f64::INFINITY };
        let (ms, parts) = bound::bound(cell.variant.strategy, seen, least);
        record.cell(&cell.key, &[]).bound = Some(Bound { ms, parts });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::experiment::EXPERIMENTS;

    #[test]
    fn what_a_record_holds_of_others_is_not_left_out_of_what_is_asked_for() {
        let experiment = EXPERIMENTS.iter().find(|e| e.name == "table4").unwrap();
        let mut record = Record::new(experiment.name, true, json!({})).unwrap();
        let left =
            |record: &Record| missing(record, experiment, &["A"], &["bert-large".to_owned()], 2);
        let all = experiment.variants.len() * 2;
        assert_eq!(left(&record), all);
        for key in ["B/bert-large/auto", "A/distilbert/auto", "A/bert-large/auto"] {
            let cell = record.cell(key, &[]);
            for _ in 0..3 {
                cell.add(BTreeMap::new(), Verdict::Valid);
            }
        }
        assert_eq!(left(&record), all - 2);
        record.cell("A/bert-large/local", &[]).outcome = Outcome::Refused { why: String::new() };
        assert_eq!(left(&record), all - 4);
    }
}
