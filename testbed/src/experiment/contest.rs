//! Contenders that take turns on one testbed, a few samples at a time: what changes about the machine changes for
//! all of them.

use super::{Options, placing, settle};
use crate::{
    cgroup::Usage,
    driver::{Driver, Placed},
    environment::{Environment, Precision},
    health::{self, DeviceShare, Health, Watch},
    instance::{Split, Testbed, Worker},
    models,
    network::Network,
    record::{Cell, Outcome, Record, RecordFile, Verdict},
};
use anyhow::{Context, Error, Result};
use galaxy_common::Strategy;
use galaxy_coord::Cluster;
use galaxy_model::ModelDir;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The samples of each cell that must count, in most contests.
pub(super) const SAMPLES: usize = 4;
/// How many samples a contender takes in a row.
const IN_A_ROW: usize = 2;
/// The samples that are tried for each that is wanted, invalid ones included.
const PATIENCE: usize = 3;

/// An experiment whose contenders take turns, with one model on one testbed after another.
pub(super) trait Contest {
    /// A way to run the model, with which others are compared.
    type Contender;
    /// What stays from one turn to the next, with the same model on the same testbed.
    type State: Default;

    /// The experiment's name.
    fn name(&self) -> &'static str;

    /// The cells of a model in an environment, in the order in which they have their turns.
    fn cells(&self, environment: &Environment, model: &str) -> Vec<ContestCell<Self::Contender>>;

    /// Takes one turn of a contender. Returns [`Outcome::Measured`] where samples were taken, else why there are none.
    fn turn(
        &self,
        bench: &Bench<'_>,
        contender: &Self::Contender,
        state: &mut Self::State,
        turn: &mut Turn<'_>,
    ) -> Result<Outcome>;

    /// The directory of a model, which is written or found before the testbed is made.
    fn directory(&self, cache: &Path, model: &str) -> Result<PathBuf> {
        Ok(models::ensure(cache, model)?.canonicalize()?)
    }

    /// Checks that a record may go on with an environment.
    fn check(&self, _: &Record, _: &Environment) -> Result<()> {
        Ok(())
    }

    /// The number of the repetition from scratch, in an experiment that is made anew several times.
    fn repetition(&self) -> Option<usize> {
        None
    }

    /// Whether the devices' shares are mended before the turn of `next`; `before` had the turn before in the same
    /// round.
    fn settles(&self, _next: &Self::Contender, before: Option<&Self::Contender>) -> bool {
        before.is_none()
    }

    /// Looks at what stayed from turn to turn, once no cell of the model is left.
    fn end(&self, _: Self::State, _: &mut Record) {}
}

/// The part of an experiment that is run.
pub(super) struct Extent {
    pub(super) environments: Vec<Environment>,
    /// The names of the models.
    pub(super) models: Vec<String>,
    /// The samples of each cell that must count.
    pub(super) samples: usize,
    /// The samples that are taken in a turn.
    pub(super) in_a_row: usize,
}

impl Extent {
    /// What the options ask for; where they do not, these environments, models and samples.
    pub(super) fn new(
        options: &Options,
        environments: &[&str],
        models: &[&str],
        samples: usize,
    ) -> Result<Self> {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let environments = options.environments().unwrap_or_else(|| own(environments));
        Ok(Self {
            environments: environments
                .iter()
                .map(|n| Environment::open(n))
                .collect::<Result<_>>()?,
            models: options.models.clone().unwrap_or_else(|| own(models)),
            samples: options.samples.unwrap_or(samples),
            in_a_row: IN_A_ROW,
        })
    }
}

/// A contender, and the cell that keeps its samples.
pub(super) struct ContestCell<T> {
    /// The stable name of the cell, so that a run that was broken off goes on.
    pub(super) key: String,
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) contender: T,
}

impl<T> ContestCell<T> {
    /// The cell of a variant with a model in an environment.
    pub(super) fn of(environment: &str, model: &str, variant: &str, contender: T) -> Self {
        let labels = [("environment", environment), ("model", model), ("variant", variant)];
        Self {
            key: key(environment, model, variant),
            labels: labels.map(|(name, is)| (name, is.to_owned())).into(),
            contender,
        }
    }
}

/// The key of the cell of a variant.
pub(super) fn key(environment: &str, model: &str, variant: &str) -> String {
    format!("{environment}/{model}/{variant}")
}

/// Runs all cells that are left: each testbed up and down, each model on it, the contenders in turns.
///
/// # Errors
/// When something fails that is no cell's own outcome. Samples that were taken are kept.
pub(super) fn run<C: Contest>(
    contest: &C,
    extent: &Extent,
    options: &Options,
    file: &mut RecordFile,
) -> Result<()> {
    for environment in &extent.environments {
        contest.check(file, environment)?;
        let mut left = Vec::new();
        for model in &extent.models {
            let cells = contest.cells(environment, model);
            if cells.iter().any(|cell| !file.done(&cell.key, extent.samples)) {
                // Made before the testbed: writing gigabytes is no part of what is measured.
                left.push((model, cells, contest.directory(&options.cache, model)?));
            }
        }
        if left.is_empty() {
            continue;
        }
        let name = options.testbed.as_deref().unwrap_or(contest.name());
        let mut environment = environment.clone();
        if options.smoke {
            environment.precision = Precision::Rough;
        }
        let mut testbed = Testbed::anew(environment, name, options.loopback, &options.cache)?;
        for (name, cells, directory) in left {
            let model = Arc::new(ModelDir::open(&directory)?);
            let (driver, ballast) = (Driver::new(&testbed)?, testbed.ballast()?);
            let bench = Bench { options, testbed: &mut testbed, name, model, driver };
            let mut state = C::State::default();
            rounds(file, (extent.samples, extent.in_a_row), &cells, |next, before, turn| {
                if contest.settles(next, before) {
                    settle(bench.testbed, options, turn.file, contest.repetition())?;
                }
                contest.turn(&bench, next, &mut state, turn)
            })?;
            contest.end(state, file);
            drop((bench, ballast));
            testbed.stop_workers()?;
            file.save()?;
        }
        testbed.down()?;
    }
    file.save()
}

/// Lets contenders take turns, each `in_a_row` samples at a time, until each has as many as are wanted or was tried
/// too often. `turn` is told who has the turn, and who had the turn before in the same round.
///
/// # Errors
/// Those of `turn`, with the cell's key.
pub(super) fn rounds<T>(
    file: &mut RecordFile,
    (samples, in_a_row): (usize, usize),
    cells: &[ContestCell<T>],
    mut turn: impl FnMut(&T, Option<&T>, &mut Turn<'_>) -> Result<Outcome>,
) -> Result<()> {
    let mut tried = vec![0; cells.len()];
    loop {
        let mut before = None;
        for (ContestCell { key, labels, contender }, tried) in cells.iter().zip(&mut tried) {
            if file.done(key, samples) || *tried >= samples * PATIENCE {
                continue;
            }
            *tried += in_a_row;
            let labels: Vec<(&str, &str)> =
                labels.iter().map(|(name, is)| (*name, is.as_str())).collect();
            file.cell(key, &labels);
            let last = *tried >= samples * PATIENCE;
            let mut taken = Turn { key, file, last, samples, in_a_row };
            let outcome = turn(contender, before, &mut taken).with_context(|| key.clone())?;
            if outcome != Outcome::Measured {
                eprintln!("{key}: {outcome}");
                file.cell(key, &[]).outcome = outcome;
            }
            file.save()?;
            before = Some(contender);
        }
        if before.is_none() {
            return Ok(());
        }
    }
}

/// The turn of a contender: its cell, and the samples that it may take.
pub(super) struct Turn<'a> {
    /// The key of the contender's cell.
    pub(super) key: &'a str,
    pub(super) file: &'a mut RecordFile,
    /// Whether the contender is not tried again after this turn.
    pub(super) last: bool,
    samples: usize,
    in_a_row: usize,
}

/// A sample: its values, whether it counts, and what is told of it if it does.
pub(super) type Sampled = (BTreeMap<String, f64>, Verdict, String);

impl Turn<'_> {
    /// The contender's cell.
    pub(super) fn cell(&mut self) -> &mut Cell {
        self.file.cell(self.key, &[])
    }

    /// Takes the samples of the turn. `sample` takes one, and may note in the cell what else it found; `review` looks
    /// at the cell with each that was added.
    pub(super) fn take(
        &mut self,
        mut sample: impl FnMut(&mut Cell) -> Result<Sampled>,
        review: impl Fn(&mut Cell),
    ) -> Result<()> {
        for _ in 0..self.in_a_row {
            let cell = self.file.cell(self.key, &[]);
            let (values, verdict, told) = sample(cell)?;
            match &verdict {
                Verdict::Valid => eprintln!("{}: {told}", self.key),
                Verdict::Invalid { reasons } => {
                    eprintln!("{}: does not count: {}", self.key, reasons.join("; "));
                }
            }
            cell.add(values, verdict);
            review(cell);
            let done = cell.done(self.samples);
            self.file.save()?;
            if done {
                break;
            }
        }
        Ok(())
    }
}

/// One model on one testbed, as contenders find it.
pub(super) struct Bench<'a> {
    pub(super) options: &'a Options,
    pub(super) testbed: &'a mut Testbed,
    /// The name of the model.
    pub(super) name: &'a str,
    pub(super) model: Arc<ModelDir>,
    driver: Driver,
}

/// What was used while something ran.
pub(super) struct Used {
    pub(super) health: Health,
    /// What each device had used before.
    pub(super) before: Vec<Usage>,
    /// What each device had used after.
    pub(super) after: Vec<Usage>,
}

impl Used {
    /// The processor time of all devices together, in ns.
    pub(super) fn devices_ns(&self) -> u64 {
        self.after.iter().zip(&self.before).map(|(a, b)| a.total_ns - b.total_ns).sum()
    }
}

impl Bench<'_> {
    /// The cluster of all devices, whose workers are started where they are not there. `plain` is whether they take
    /// ring links without TLS.
    pub(super) fn cluster(
        &self,
        strategy: Strategy,
        split: Split<'_>,
        plain: bool,
    ) -> Result<Cluster> {
        let workers = self.testbed.workers();
        if workers.is_empty() || !workers.iter().all(Worker::alive) {
            let served = self.model.path().parent().context("a model is in a directory")?;
            self.testbed.start_workers(served, plain, None)?;
        }
        let cluster = self.testbed.cluster(self.model.path(), strategy, split);
        Ok(Cluster { plain, ..cluster })
    }

    /// Places the model, or says why there is no such plan.
    pub(super) fn place(&self, cluster: Cluster) -> Result<Result<Placed<'_>, Outcome>> {
        let Self { options, testbed, model, driver, .. } = self;
        let placed = placing::place(testbed, options.smoke, driver, cluster, model)?;
        Ok(placed.map_err(Outcome::from))
    }

    /// Whether samples are compared with others: on loopback and in smoke runs they are not, and every one counts.
    pub(super) fn compares(&self) -> bool {
        !self.testbed.loopback && !self.options.smoke
    }

    /// The verdict on a sample.
    pub(super) fn judge(&self, health: &Health, devices: &[DeviceShare]) -> Verdict {
        match self.compares() {
            true => health::judge(health, devices),
            false => Verdict::Valid,
        }
    }

    /// Calls `run`, and watches the machine meanwhile. `beside` is the processor time so far, in ns, of processes
    /// beside the devices that take part.
    pub(super) fn watched<T>(
        &self,
        beside: impl Fn() -> u64,
        run: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Used)> {
        let count = self.testbed.environment.devices.len();
        let usages = || (0..count).map(|i| self.testbed.usage(i)).collect::<Result<Vec<_>>>();
        let others = || self.testbed.overhead() + beside();
        let (before, began) = (usages()?, others());
        let watch = Watch::start()?;
        let ran = run()?;
        let mut used = Used { health: Health::default(), before, after: usages()? };
        used.health = watch.finish(used.devices_ns() + others().saturating_sub(began))?;
        Ok((ran, used))
    }

    /// A counter of the bytes that all places have sent so far; it has none on loopback.
    pub(super) fn sent(&self) -> Result<impl Fn() -> Result<Option<u64>>> {
        let network = match self.testbed.loopback {
            true => None,
            false => Network::open(&self.testbed.name)?,
        };
        Ok(move || network.as_ref().map(|network| Ok(network.sent()?.iter().sum())).transpose())
    }

    /// The processes of each device that were killed for their memory until now.
    pub(super) fn kills(&self) -> Result<Vec<u64>> {
        let count = self.testbed.environment.devices.len();
        (0..count).map(|i| Ok(self.testbed.usage(i)?.oom_kills)).collect()
    }

    /// The outcome of a turn that failed on its devices. Where a process was killed for its memory since `before`, the
    /// workers are stopped, so that the next turn starts them again.
    pub(super) fn failed(&self, error: &Error, before: &[u64]) -> Result<Outcome> {
        let environment = &self.testbed.environment;
        let kills = self.kills()?;
        let Some(killed) = (0..kills.len()).find(|&i| kills[i] > before[i]) else {
            return Ok(Outcome::Failed { error: format!("{error:#}") });
        };
        self.testbed.stop_workers()?;
        let device = &environment.devices[killed];
        Ok(Outcome::OutOfMemory {
            device: device.name.to_string(),
            needs: None,
            grants: environment.memory(device),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn contenders_take_turns_until_done_or_out_of_tries() {
        let output = tempfile::tempdir().unwrap();
        let wanted = || Record::new("turns", true, json!({})).unwrap();
        let mut file = RecordFile::open(output.path(), wanted(), false).unwrap();
        let cells =
            ["good", "busy", "refused"].map(|name| ContestCell::of("A", "bert", name, name));
        let mut turns = Vec::new();
        let turn = |name: &&'static str, before: Option<&&str>, turn: &mut Turn<'_>| {
            turns.push((*name, before.is_none(), turn.last));
            let reasons = || if *name == "good" { Vec::new() } else { vec![(*name).to_owned()] };
            if *name == "refused" {
                return Ok(Outcome::Refused { why: String::new() });
            }
            let sample =
                |_: &mut Cell| Ok((BTreeMap::new(), Verdict::of(reasons()), String::new()));
            turn.take(sample, |_| ()).map(|()| Outcome::Measured)
        };
        rounds(&mut file, (3, 2), &cells, turn).unwrap();
        let first = [("good", true, false), ("busy", false, false), ("refused", false, false)];
        assert_eq!(turns[..3], first);
        assert_eq!(turns[3..5], first[..2]);
        // Three tries for each sample that is wanted are nine, which the fifth turn of two passes.
        assert_eq!(
            turns[5..],
            [("busy", true, false), ("busy", true, false), ("busy", true, true)]
        );
        let kept = RecordFile::open(output.path(), wanted(), false).unwrap();
        let counts = kept.cells.iter().map(|c| (c.key.as_str(), c.valid().count(), c.invalid()));
        let counts: Vec<_> = counts.collect();
        assert_eq!(
            counts,
            [("A/bert/good", 3, 0), ("A/bert/busy", 0, 10), ("A/bert/refused", 0, 0)]
        );
        assert_eq!(kept.cells[0].labels["variant"], "good");
    }
}
