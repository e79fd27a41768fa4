//! Runs the cells of an experiment over latency: each variant placed, runs taken in turns and judged, bounds computed.

use super::{
    Experiment, Options, Variant,
    contest::{self, Bench, Contest, ContestCell, Extent, Turn},
    open,
    placing::{devices, rates},
    quiet,
};
use crate::{
    bound::{self, CellBound, Learner},
    calibrate,
    driver::{Observation, Placed},
    environment::Environment,
    health::{self, DeviceShare},
    instance::Split,
    models,
    record::{Bound, Cell, ENVIRONMENTS, LATENCY, Outcome, PREDICTED, Record, RecordFile, Verdict},
};
use anyhow::{Error, Result, anyhow, bail};
use galaxy_common::{BatchShape, Pooling, Reading, Strategy, Wanted};
use galaxy_coord::Cluster;
use galaxy_graph::timeline::{hidden, lane_use, traffic};
use serde_json::json;
use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// The longest that one run may take: the largest model on the slowest devices takes a minute.
const LIMIT: Duration = Duration::from_secs(600);
/// The fact of a cell that is the number of tokens of its text.
pub(super) const TOKENS: &str = "tokens";
/// The fact of a cell that is the number of operations that its text takes.
pub(super) const FLOPS: &str = "flops";
/// The fact of a cell that is its environment's number of devices.
pub(super) const DEVICES: &str = "devices";
/// The fact of a cell that is the rate of the slowest link of the modelled devices, in Mbit/s.
pub(super) const RATE: &str = "rate_mbit";
/// The name of the value that is the speed of kernels over their processor time, in GFLOP/s.
const SPEED: &str = "kernels_gflops";

/// The progress of an experiment.
struct Progress {
    begun: Instant,
    done: usize,
    left: usize,
}

impl Progress {
    /// Counts a sample, and says how many are to go.
    fn step(&mut self) -> String {
        self.done += 1;
        self.left = self.left.saturating_sub(1);
        let each = self.begun.elapsed().as_secs_f64() / self.done as f64;
        let minutes = (each * self.left as f64 / 60.0).ceil();
        format!("{} runs to go, about {minutes} min", self.left)
    }

    /// Leaves out samples that cannot be taken.
    fn skip(&mut self, samples: usize) {
        self.left = self.left.saturating_sub(samples);
    }
}

/// The variants of an experiment, which take turns.
struct Variants<'a> {
    experiment: &'a Experiment,
    samples: usize,
    /// The number of the repetition from scratch, if there are several.
    anew: Option<usize>,
    progress: &'a RefCell<Progress>,
}

/// The numbers of an experiment's repetitions from scratch; none where it is made once.
fn repetitions(experiment: &Experiment) -> impl Iterator<Item = Option<usize>> {
    let several = experiment.anew > 1;
    (0..experiment.anew).map(move |anew| several.then_some(anew))
}

/// The key of a cell in a repetition.
fn key(environment: &str, model: &str, variant: &Variant, anew: Option<usize>) -> String {
    let key = contest::key(environment, model, variant.name);
    anew.map_or(key.clone(), |n| format!("{key}/{}", n + 1))
}

/// Runs all cells of an experiment that are left.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub fn run(experiment: &Experiment, options: &Options) -> Result<RecordFile> {
    let Experiment { environments, models, samples, in_a_row, .. } = *experiment;
    let Extent { environments, models, samples, .. } =
        Extent::new(options, environments, models, samples)?;
    let settings = json!({
        "experiment": experiment.name, "smoke": options.smoke, "loopback": options.loopback,
        "plain": options.plain, "tokens": experiment.tokens,
        "anew": experiment.anew,
        "variants": experiment.variants.iter().map(|v| v.name).collect::<Vec<_>>(),
        ENVIRONMENTS: environments.iter().map(|e| (e.name.as_str(), e.source())).collect::<BTreeMap<_, _>>(),
    });
    let mut file = open(experiment.name, options, settings)?;
    if !file.cells.is_empty() {
        eprintln!("going on with {}: {}", file.path().display(), file.extent());
    }
    let names: Vec<&str> = environments.iter().map(|e| e.name.as_str()).collect();
    let left = missing(&file, experiment, &names, &models, samples);
    let progress = RefCell::new(Progress { begun: Instant::now(), done: 0, left });
    for environment in environments {
        for anew in repetitions(experiment) {
            let variants = Variants { experiment, samples, anew, progress: &progress };
            let mut known = Vec::new();
            for model in &models {
                match unknown(model)? {
                    None => known.push(model.clone()),
                    Some(why) => variants.refuse(&environment, model, &why, &mut file),
                }
            }
            let environments = vec![environment.clone()];
            let extent = Extent { environments, models: known, samples, in_a_row };
            contest::run(&variants, &extent, options, &mut file)?;
        }
    }
    Ok(file)
}

/// The number of samples that are still to be taken of what is asked for; a record may hold more than that.
fn missing(
    record: &Record,
    experiment: &Experiment,
    environments: &[&str],
    models: &[String],
    samples: usize,
) -> usize {
    let cells = environments.iter().flat_map(|environment| {
        models.iter().flat_map(move |model| {
            experiment.variants.iter().flat_map(move |variant| {
                repetitions(experiment).map(move |anew| key(environment, model, variant, anew))
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

/// Why a model cannot run at all; none where it can.
fn unknown(model: &str) -> Result<Option<String>> {
    let shape = &models::find(model)?.shape;
    let why = || format!("family {} is not known to the engine yet", shape.family);
    Ok(shape.spec().is_err().then(why))
}

impl Contest for Variants<'_> {
    type Contender = &'static Variant;
    /// What was learnt of each variant, by its cell's key.
    type State = BTreeMap<String, (&'static Variant, Learner)>;

    fn name(&self) -> &'static str {
        self.experiment.name
    }

    /// Cells get their labels once there is a plan: pages of plans leave the others out.
    fn cells(&self, environment: &Environment, model: &str) -> Vec<ContestCell<Self::Contender>> {
        let cell = |variant| ContestCell {
            key: key(&environment.name, model, variant, self.anew),
            labels: Vec::new(),
            contender: variant,
        };
        self.experiment.variants.iter().map(cell).collect()
    }

    fn repetition(&self) -> Option<usize> {
        self.anew
    }

    fn turn(
        &self,
        bench: &Bench<'_>,
        variant: &&'static Variant,
        learners: &mut Self::State,
        turn: &mut Turn<'_>,
    ) -> Result<Outcome> {
        let kills = bench.kills()?;
        let placed = bench.place(self.cluster(bench, variant)?);
        if !matches!(placed, Ok(Ok(_))) {
            self.progress.borrow_mut().skip(self.samples);
        }
        let mut placed = match placed {
            Ok(Ok(placed)) => placed,
            // A worker that died of it, as while it measured itself, says more than the plan.
            Ok(Err(refused)) => match failed(bench, &anyhow!("{refused}"), &kills)? {
                killed @ Outcome::OutOfMemory { .. } => return Ok(killed),
                _ => return Ok(refused),
            },
            Err(error) => return failed(bench, &error, &kills),
        };
        self.describe(bench, variant, &placed, learners, turn);
        match self.samples(bench, variant, &mut placed, learners, turn) {
            Ok(()) => Ok(Outcome::Measured),
            Err(error) => failed(bench, &error, &kills),
        }
    }

    /// Sets the bounds of all cells: the least compute that one strategy needed is enough for every other of the same
    /// split.
    fn end(&self, learners: Self::State, record: &mut Record) {
        let seen: Vec<(&String, &Variant, CellBound)> = learners
            .iter()
            .map(|(key, (variant, learner))| (key, *variant, learner.seen()))
            .collect();
        // Plans of different splits need different compute each.
        let split =
            |variant: &Variant| variant.strategy != Strategy::Local && variant.tiles.is_some();
        let all = seen.iter().filter(|(_, variant, _)| split(variant)).map(|(.., s)| s.compute());
        let all = all.fold(f64::INFINITY, f64::min);
        for (key, variant, seen) in &seen {
            let least = if split(variant) { all } else { f64::INFINITY };
            let (ms, parts) = bound::bound(variant.strategy, seen, least);
            record.cell(key, &[]).bound = Some(Bound { ms, parts });
        }
    }
}

impl Variants<'_> {
    /// Refuses all cells of a model.
    fn refuse(&self, environment: &Environment, model: &str, why: &str, record: &mut Record) {
        for ContestCell { key, .. } in self.cells(environment, model) {
            if !record.done(&key, self.samples) {
                eprintln!("{key}: {why}");
                record.cell(&key, &[]).outcome = Outcome::Refused { why: why.to_owned() };
                self.progress.borrow_mut().skip(self.samples);
            }
        }
    }

    /// The tokens of the text for a variant.
    fn tokens(&self, bench: &Bench<'_>, variant: &Variant) -> u32 {
        self.experiment.tokens.of(variant.strategy, bench.testbed.environment.devices.len())
    }

    fn cluster(&self, bench: &Bench<'_>, variant: &Variant) -> Result<Cluster> {
        let environment = &bench.testbed.environment;
        let speed = |d| environment.speed(d).map_or(1.0, |speed| speed.0);
        let by_speed = variant.strategy == Strategy::Galaxy;
        let share = |d| if by_speed { speed(d) } else { 1.0 };
        let shares: Vec<f64> = environment.devices.iter().map(share).collect();
        let split = match variant.tiles {
            None => Split::Profiles { tokens: self.tokens(bench, variant) },
            Some(tiles) => Split::Shares { shares: &shares, tiles },
        };
        let mut cluster = bench.cluster(variant.strategy, split, bench.options.plain)?;
        // The disk here is no board's: what does not fit is out of memory, as it was for the paper.
        cluster.weight_streaming = Reading::Preload;
        Ok(cluster)
    }

    /// Notes in the cell what is known once the model is placed.
    fn describe(
        &self,
        bench: &Bench<'_>,
        variant: &Variant,
        placed: &Placed<'_>,
        learners: &mut <Self as Contest>::State,
        turn: &mut Turn<'_>,
    ) {
        let environment = &bench.testbed.environment;
        let labels = ContestCell::of(&environment.name, bench.name, variant.name, ()).labels;
        let cell = turn.cell();
        cell.labels.extend(labels.into_iter().map(|(name, is)| (name.to_owned(), is)));
        if let Some(predicted) = placed.predicted() {
            let predicted = predicted.as_secs_f64() * 1e3;
            let before = cell.facts.insert(PREDICTED.to_owned(), predicted);
            if before.is_some_and(|before| before != predicted) {
                // Earlier samples are of another plan, or by other profiles, from a run that was broken off.
                self.progress.borrow_mut().left += cell.valid().count().min(self.samples);
                cell.samples.clear();
                learners.remove(&cell.key);
            }
            cell.labels.insert("plan".to_owned(), placed.what());
        }
        let count = self.tokens(bench, variant);
        let devices = &environment.devices;
        let rate = devices.iter().map(|device| device.rate.0).fold(f64::INFINITY, f64::min);
        let facts = [
            (TOKENS, f64::from(count)),
            (FLOPS, calibrate::flops(placed.model().spec(), count)),
            (DEVICES, devices.len() as f64),
            (RATE, rate * 1e-6),
        ];
        cell.facts.extend(facts.map(|(name, value)| (name.to_owned(), value)));
        cell.paper = (self.experiment.paper)(&environment.name, bench.name);
    }

    /// Takes the samples of one variant's turn.
    fn samples(
        &self,
        bench: &Bench<'_>,
        variant: &'static Variant,
        placed: &mut Placed<'_>,
        learners: &mut <Self as Contest>::State,
        turn: &mut Turn<'_>,
    ) -> Result<()> {
        let count = self.tokens(bench, variant);
        let shape = BatchShape::single(count, Wanted::Pooled(Pooling::Mean))?;
        let tokens: Arc<[u32]> = (0..count).map(|i| 3 + i * 7 % 900).collect();
        // The first run of a placement lowers, fills caches and wakes links.
        placed.run(&shape, &tokens, LIMIT)?;
        let sample = |cell: &mut Cell| {
            let (values, verdict, observation) = sample(bench, placed, &shape, &tokens)?;
            let mut told = format!("{:.0} ms", values[LATENCY]);
            if verdict == Verdict::Valid {
                let learner = || (variant, Learner::new(&rates(bench.testbed, &observation)));
                let (_, learner) = learners.entry(cell.key.clone()).or_insert_with(learner);
                learner.learn(&observation)?;
                told = format!("{told}; {}", self.progress.borrow_mut().step());
            }
            Ok((values, verdict, told))
        };
        turn.take(sample, |cell| cell.rule_out(SPEED, health::slowed))
    }
}

fn sample(
    bench: &Bench<'_>,
    placed: &mut Placed<'_>,
    shape: &BatchShape,
    tokens: &Arc<[u32]>,
) -> Result<(BTreeMap<String, f64>, Verdict, Observation)> {
    quiet(bench.options)?;
    let testbed = &*bench.testbed;
    let count = testbed.environment.devices.len();
    let computed = (0..count).map(|i| testbed.computed(i)).collect::<Result<Vec<_>>>()?;
    let (observation, used) = bench.watched(|| 0, || placed.run(shape, tokens, LIMIT))?;
    let ms = |ns: u64| ns as f64 * 1e-6;
    let mut values = bound::spent(&observation)?;
    values.insert(LATENCY.to_owned(), observation.run.took.as_secs_f64() * 1e3);
    let rates = rates(testbed, &observation);
    let (mut shares, mut least_hidden, mut wire_cpu) = (Vec::new(), f64::MAX, 0f64);
    for (rank, &i) in devices(testbed, &observation).iter().enumerate() {
        let program = &observation.programs[rank];
        let lanes = lane_use(program, &observation.timelines[rank].operations);
        let (busy, awaiting) = lanes.first().map_or((0, 0), |l| (l.busy, l.awaiting_receive));
        if let Some(hidden) = hidden(awaiting, traffic(program).1, rates[rank]) {
            least_hidden = least_hidden.min(hidden);
        }
        let received = testbed.computed(i)?.saturating_sub(computed[i]);
        let (before, after) = (&used.before[i], &used.after[i]);
        let limited = after.compute_ns - before.compute_ns;
        wire_cpu = wire_cpu.max(ms(after.total_ns - before.total_ns) - ms(limited));
        let calibrated = &testbed.calibration.devices[i];
        shares.push(DeviceShare {
            name: calibrated.name.clone(),
            quota: calibrated.quota,
            received,
            busy,
        });
    }
    if least_hidden < f64::MAX && !testbed.loopback {
        values.insert("hidden".to_owned(), least_hidden);
    }
    if !testbed.loopback {
        values.insert("wire_cpu_ms".to_owned(), wire_cpu);
    }
    values.extend(used.health.values());
    if bench.compares() {
        let received: u64 = shares.iter().map(|share| share.received).sum();
        let done = calibrate::flops(placed.model().spec(), tokens.len() as u32);
        values.insert(SPEED.to_owned(), done / received as f64);
    }
    Ok((values, bench.judge(&used.health, &shares), observation))
}

/// The outcome of a turn that failed on its devices.
///
/// # Errors
/// When a worker ended by itself: then it is a bug, and the error has what the worker printed.
fn failed(bench: &Bench<'_>, error: &Error, before: &[u64]) -> Result<Outcome> {
    let outcome = bench.failed(error, before)?;
    let workers = bench.testbed.workers();
    if let Some(ended) = workers.iter().find(|worker| !worker.alive()) {
        let said = std::fs::read_to_string(bench.testbed.log(&ended.device)).unwrap_or_default();
        bail!("the worker on {} ended ({error:#}); it said:\n{said}", ended.device);
    }
    Ok(outcome)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::experiment::EXPERIMENTS;

    #[test]
    fn missing_samples_are_counted_only_for_the_selected_cells() {
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
