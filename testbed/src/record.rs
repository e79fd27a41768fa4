//! The record of an experiment: every sample, kept from the moment it was taken.
//!
//! It is one JSON file beside the tables and plots that are drawn from it. It is replaced as a whole after
//! every sample, so a run that is killed loses one sample at most, and the next run goes on from there.

mod machine;

pub use machine::Machine;

use crate::{calibrate::Calibration, processes};
use anyhow::{Context, Result, bail};
use galaxy_common::{Bytes, Spread};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::Write as _,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::Command,
};
use time::OffsetDateTime;

/// The setting that holds the environments, by their names: a record goes on with others.
pub const ENVIRONMENTS: &str = "environments";

/// The value of most samples: how long a request took, in ms.
pub const LATENCY: &str = "latency_ms";
/// The fact of a cell that is the latency that the planner predicts, in ms.
pub const PREDICTED: &str = "predicted_ms";

/// The format that this build reads and writes.
pub const FORMAT: u32 = 1;

/// An experiment's results, and what they were measured with.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The experiment's name.
    pub experiment: String,
    /// [`FORMAT`] of the build that wrote it.
    pub format: u32,
    /// The time at which the record was begun, in RFC 3339.
    pub started: String,
    /// The machine that stood for the devices.
    pub machine: Machine,
    /// The commits that samples were taken with; more than one when a run went on with a changed tree.
    pub commits: Vec<String>,
    /// The versions of the programs that were run, by name.
    pub versions: BTreeMap<String, String>,
    /// Whether devices were without shaping and quotas: such results say nothing of real devices.
    pub loopback: bool,
    /// The settings that would make results incomparable when changed.
    pub settings: Value,
    /// The calibrations, by the environment's name, or its name and the number of the repetition from
    /// scratch.
    pub calibrations: BTreeMap<String, Calibration>,
    /// The cells with their samples.
    pub cells: Vec<Cell>,
}

/// A record and the file that keeps it.
#[derive(Debug)]
pub struct RecordFile {
    record: Record,
    path: PathBuf,
}

/// One combination of the parameters that an experiment varies.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// The stable name of the cell, as `A/bert-large/galaxy`.
    pub key: String,
    /// The values of the parameters that are varied.
    pub labels: BTreeMap<String, String>,
    /// The samples, valid and invalid.
    pub samples: Vec<Sample>,
    /// The outcome of the cell.
    pub outcome: Outcome,
    /// The least latency that is possible, where it is known.
    pub bound: Option<Bound>,
    /// The paper's figure.
    pub paper: Option<f64>,
    /// The figures that do not vary between samples.
    #[serde(deserialize_with = "numbers")]
    pub facts: BTreeMap<String, f64>,
}

/// The outcome of a cell.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The cell has samples, or will have.
    #[default]
    Measured,
    /// There is no such plan.
    Refused {
        /// The reason of the refusal.
        why: String,
    },
    /// A device has too little memory.
    OutOfMemory {
        /// The name of the device.
        device: String,
        /// The memory that the plan needs on the device; unknown where the kernel ended the worker.
        needs: Option<Bytes>,
        /// The memory that the device grants.
        grants: Bytes,
    },
    /// The cell was tried in vain; a run that goes on tries it again.
    Failed {
        /// The error as text.
        error: String,
    },
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Measured => write!(f, "measured"),
            Self::Refused { why } => write!(f, "refused: {why}"),
            Self::OutOfMemory { device, needs, grants } => {
                let needs = needs.map_or("more".to_owned(), |needs| needs.to_string());
                write!(f, "out of memory: {device} grants {grants}, and it needs {needs}")
            }
            Self::Failed { error } => write!(f, "failed: {error}"),
        }
    }
}

/// The least latency that is possible, from measured compute, the integer split and the shaped rate.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Bound {
    /// The bound itself, in ms.
    #[serde(deserialize_with = "number")]
    pub ms: f64,
    /// The parts of the bound by name, in ms.
    #[serde(deserialize_with = "numbers")]
    pub parts: BTreeMap<String, f64>,
}

/// One measurement of a cell.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// The time at which it was taken, in RFC 3339.
    pub at: String,
    /// The measured values: `wall_ms`, `compute_ms`, `hidden` and so on.
    #[serde(deserialize_with = "numbers")]
    pub values: BTreeMap<String, f64>,
    /// Whether the sample counts.
    pub verdict: Verdict,
}

/// Whether a sample counts, and if not, why.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The devices had the properties that they stand for.
    Valid,
    /// The devices had not: the sample is kept, and shown in no figure.
    Invalid {
        /// The reasons, as sentences with the numbers.
        reasons: Vec<String>,
    },
}

/// Reads a number, or NaN from null: JSON has no NaN, and a record must be readable again all the same.
fn number<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(d)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let found: BTreeMap<String, Option<f64>> = BTreeMap::deserialize(d)?;
    Ok(found.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

impl Record {
    /// An empty record of this machine and tree. `settings` are those that would make results incomparable
    /// when changed; a run goes on only where they are equal.
    ///
    /// # Errors
    /// When the settings cannot be written as JSON, or the machine cannot be read.
    pub fn new(experiment: &str, loopback: bool, settings: impl Serialize) -> Result<Self> {
        let version = |name: &str, is: String| (name.to_owned(), is);
        Ok(Self {
            experiment: experiment.to_owned(),
            format: FORMAT,
            started: now(),
            machine: Machine::read()?,
            commits: vec![commit()],
            versions: BTreeMap::from([
                version("galaxy", galaxy_proto::VERSION.to_owned()),
                version("protocol", galaxy_proto::PROTOCOL.to_string()),
                version("built from", galaxy_proto::COMMIT.to_owned()),
            ]),
            loopback,
            settings: serde_json::to_value(settings).context("the experiment's settings")?,
            calibrations: BTreeMap::new(),
            cells: Vec::new(),
        })
    }

    /// The directory of a record by default.
    pub fn directory(experiment: &str) -> PathBuf {
        Path::new("target/testbed-results").join(experiment)
    }

    /// The record at `path` if there is one that can go on as `wanted`, else `wanted`, which is saved at
    /// once, so that a place that cannot be written is found before hours of measuring. `fresh` discards the
    /// record that is there.
    ///
    /// # Errors
    /// When the record that is there was measured otherwise, or cannot be read or written.
    pub fn open_or_new(path: &Path, wanted: Self, fresh: bool) -> Result<Self> {
        let there = path.try_exists().with_context(|| path.display().to_string())?;
        if fresh || !there {
            wanted.save(path)?;
            return Ok(wanted);
        }
        let anew = || format!("cannot go on with {}; start anew with --fresh", path.display());
        let mut found = Self::read(path).with_context(anew)?;
        let differs = found.differences(&wanted);
        if !differs.is_empty() {
            let error = anyhow::anyhow!("it was measured otherwise: {}", differs.join("; "));
            return Err(error.context(anew()));
        }
        for commit in wanted.commits {
            if !found.commits.contains(&commit) {
                found.commits.push(commit);
            }
        }
        let more = wanted.settings.get(ENVIRONMENTS).and_then(Value::as_object).cloned();
        let known = found.settings.get_mut(ENVIRONMENTS).and_then(Value::as_object_mut);
        if let (Some(known), Some(more)) = (known, more) {
            known.extend(more);
        }
        for cell in &mut found.cells {
            if matches!(cell.outcome, Outcome::Failed { .. }) {
                cell.outcome = Outcome::Measured;
            }
        }
        Ok(found)
    }

    /// Reads a record, to show it.
    ///
    /// # Errors
    /// When there is no record, or none of this format.
    pub fn read(path: &Path) -> Result<Self> {
        let read = || -> Result<Self> {
            let value: Value = serde_json::from_slice(&std::fs::read(path)?)?;
            match value.get("format").and_then(Value::as_u64) {
                Some(format) if format == u64::from(FORMAT) => Ok(serde_json::from_value(value)?),
                Some(format) => bail!("its format is {format}, and this build knows {FORMAT}"),
                None => bail!("it is no record of an experiment"),
            }
        };
        read().with_context(|| path.display().to_string())
    }

    /// Replaces the file as a whole: a process that is killed here leaves the old one or the new one.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let save = || -> Result<()> {
            if let Some(directory) = path.parent() {
                std::fs::create_dir_all(directory)?;
            }
            let part = path.with_extension("json.part");
            let mut file = File::create(&part)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            Ok(std::fs::rename(&part, path)?)
        };
        save().with_context(|| format!("{} cannot be written", path.display()))
    }

    /// The cell of that key, which is added where there is none.
    pub fn cell(&mut self, key: &str, labels: &[(&str, &str)]) -> &mut Cell {
        let found = self.cells.iter().position(|cell| cell.key == key);
        let at = found.unwrap_or(self.cells.len());
        if found.is_none() {
            let label = |(name, is): &(&str, &str)| ((*name).to_owned(), (*is).to_owned());
            self.cells.push(Cell {
                key: key.to_owned(),
                labels: labels.iter().map(label).collect(),
                samples: Vec::new(),
                outcome: Outcome::Measured,
                bound: None,
                paper: None,
                facts: BTreeMap::new(),
            });
        }
        &mut self.cells[at]
    }

    /// Whether the cell of that key is there, and needs no more samples.
    pub fn done(&self, key: &str, samples: usize) -> bool {
        self.cells.iter().any(|cell| cell.key == key && cell.done(samples))
    }

    /// The numbers of cells and samples, as `4 cells, 20 samples, 1 of them invalid`.
    pub fn extent(&self) -> String {
        let samples: usize = self.cells.iter().map(|cell| cell.samples.len()).sum();
        let invalid: usize = self.cells.iter().map(Cell::invalid).sum();
        format!("{} cells, {samples} samples, {invalid} of them invalid", self.cells.len())
    }

    /// The reasons why `wanted` cannot go on with this record.
    fn differences(&self, wanted: &Self) -> Vec<String> {
        let machine = |m: &Machine| Value::from(format!("{}, {} cores", m.processor, m.cores));
        let mut found = Vec::new();
        let (a, b) = (&self.experiment, &wanted.experiment);
        differ("experiment", &a.as_str().into(), &b.as_str().into(), &mut found);
        differ("machine", &machine(&self.machine), &machine(&wanted.machine), &mut found);
        differ("loopback", &self.loopback.into(), &wanted.loopback.into(), &mut found);
        let (a, b) = (&self.settings, &wanted.settings);
        differ("settings", &both(a, b), &both(b, a), &mut found);
        found
    }
}

impl RecordFile {
    /// The record of `wanted`'s experiment below `output`, as [`Record::open_or_new`] opens it.
    ///
    /// # Errors
    /// As [`Record::open_or_new`].
    pub fn open(output: &Path, wanted: Record, fresh: bool) -> Result<Self> {
        let name = &wanted.experiment;
        let path = output.join(name).join(format!("{name}.json"));
        Ok(Self { record: Record::open_or_new(&path, wanted, fresh)?, path })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the file as a whole, as [`Record::save`] does.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self) -> Result<()> {
        self.record.save(&self.path)
    }
}

impl Deref for RecordFile {
    type Target = Record;
    fn deref(&self) -> &Record {
        &self.record
    }
}

impl DerefMut for RecordFile {
    fn deref_mut(&mut self) -> &mut Record {
        &mut self.record
    }
}

impl Cell {
    /// Adds a sample. A sample with a value that is not finite does not count.
    pub fn add(&mut self, values: BTreeMap<String, f64>, verdict: Verdict) {
        let mut reasons = match verdict {
            Verdict::Valid => Vec::new(),
            Verdict::Invalid { reasons } => reasons,
        };
        let broken = values.iter().filter(|(_, value)| !value.is_finite());
        reasons.extend(broken.map(|(name, value)| format!("{name} is {value}")));
        self.samples.push(Sample { at: now(), values, verdict: Verdict::of(reasons) });
    }

    /// Rules out samples of which a value is too far below the largest of all, by the reason that `why`
    /// gives.
    pub fn rule_out(&mut self, name: &str, why: impl Fn(f64, f64) -> Option<String>) {
        let of = |sample: &Sample| sample.values.get(name).copied();
        let best = self.samples.iter().filter_map(of).fold(0.0, f64::max);
        for sample in &mut self.samples {
            if let (Some(value), Verdict::Valid) = (of(sample), &sample.verdict) {
                sample.verdict = Verdict::of(why(value, best).into_iter().collect());
            }
        }
    }

    /// The samples that count.
    pub fn valid(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(|sample| sample.verdict == Verdict::Valid)
    }

    /// The number of samples that do not count.
    pub fn invalid(&self) -> usize {
        self.samples.len() - self.valid().count()
    }

    /// Whether the cell needs no more samples.
    pub fn done(&self, wanted: usize) -> bool {
        self.outcome != Outcome::Measured || self.valid().count() >= wanted
    }

    /// One value of every sample that counts, in the order in which they were taken.
    pub fn values(&self, name: &str) -> Vec<f64> {
        self.valid().filter_map(|sample| sample.values.get(name).copied()).collect()
    }

    /// The spread of a value over the samples that count.
    pub fn spread(&self, name: &str) -> Spread {
        Spread::of(&self.values(name))
    }
}

impl Verdict {
    /// The same verdict with one more reason against the sample, if there is one.
    #[must_use]
    pub fn and(self, reason: Option<String>) -> Self {
        let mut reasons = match self {
            Self::Valid => Vec::new(),
            Self::Invalid { reasons } => reasons,
        };
        reasons.extend(reason);
        Self::of(reasons)
    }

    /// A verdict by the reasons against a sample: valid without any.
    pub fn of(reasons: Vec<String>) -> Self {
        if reasons.is_empty() { Self::Valid } else { Self::Invalid { reasons } }
    }
}

/// The present time in RFC 3339, to the second.
pub fn now() -> String {
    let t = OffsetDateTime::now_utc();
    let (year, month, day) = t.to_calendar_date();
    let (hour, minute, second) = t.to_hms();
    format!("{year:04}-{:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", u8::from(month))
}

/// The commit of the checkout, with `-dirty` where sources are changed. Results and pages are no sources:
/// writing them must not change what they report of themselves.
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(processes::root()).args(arguments).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(head) = git(&["rev-parse", "--short", "HEAD"]) else {
        return galaxy_proto::COMMIT.to_owned();
    };
    let sources = ["status", "--porcelain", "--", "*.rs", "*.toml", "*.proto", "Cargo.lock"];
    match git(&sources) {
        Some(changed) if changed.is_empty() => head,
        _ => format!("{head}-dirty"),
    }
}

/// The settings, without the environments that `others` do not have.
fn both(settings: &Value, others: &Value) -> Value {
    let mut settings = settings.clone();
    let others = others.get(ENVIRONMENTS).and_then(Value::as_object);
    let own = settings.get_mut(ENVIRONMENTS).and_then(Value::as_object_mut);
    if let (Some(own), Some(others)) = (own, others) {
        own.retain(|name, _| others.contains_key(name));
    }
    settings
}

/// Adds the places in which two values differ, by path.
fn differ(path: &str, was: &Value, is: &Value, found: &mut Vec<String>) {
    match (was, is) {
        (Value::Object(a), Value::Object(b)) => {
            let new = b.keys().filter(|key| !a.contains_key(*key));
            for key in a.keys().chain(new) {
                let value = |of: &serde_json::Map<String, Value>| of.get(key).cloned();
                let (a, b) = (value(a).unwrap_or_default(), value(b).unwrap_or_default());
                differ(&format!("{path}.{key}"), &a, &b, found);
            }
        }
        _ if was == is => {}
        // A float that went through a file may come back with another last bit.
        (Value::Number(a), Value::Number(b))
            if (a.is_f64() || b.is_f64()) && close(a.as_f64(), b.as_f64()) => {}
        _ => found.push(format!("{path} was {was}, now {is}")),
    }
}

fn close(a: Option<f64>, b: Option<f64>) -> bool {
    a.zip(b).is_some_and(|(a, b)| (a - b).abs() <= 1e-12 * a.abs().max(b.abs()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn values(wall: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("wall_ms".to_owned(), wall)])
    }

    fn wanted(settings: Value) -> Record {
        Record::new("table4", false, settings).unwrap()
    }

    #[test]
    fn a_record_continues_after_its_run_was_killed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table4/table4.json");
        let settings = json!({ "tokens": 30, "scale": 0.1, "envs": ["A", "B"] });
        let mut record = Record::open_or_new(&path, wanted(settings.clone()), false).unwrap();
        let cell = record.cell("A/bert-large/galaxy", &[("environment", "A")]);
        cell.add(values(1031.0), Verdict::Valid);
        cell.add(values(2500.0), Verdict::of(vec!["m1 received less".to_owned()]));
        cell.bound = Some(Bound { ms: f64::NAN, parts: values(1.0) });
        record.cell("A/tiny/galaxy", &[]).outcome = Outcome::Failed { error: "it ended".into() };
        record.save(&path).unwrap();
        // Killed in the middle of the next save.
        std::fs::write(path.with_extension("json.part"), "{\"experiment\": \"tab").unwrap();

        let mut found = Record::open_or_new(&path, wanted(settings), false).unwrap();
        assert_eq!(found.extent(), "2 cells, 2 samples, 1 of them invalid");
        assert_eq!(found.started, record.started);
        let cell = found.cell("A/bert-large/galaxy", &[]);
        assert!(cell.done(1) && !cell.done(2) && cell.labels["environment"] == "A");
        assert_eq!((cell.values("wall_ms"), cell.invalid()), (vec![1031.0], 1));
        assert!(cell.bound.as_ref().unwrap().ms.is_nan());
        assert!(!found.cell("A/tiny/galaxy", &[]).done(1), "what failed is tried again");
        found.save(&path).unwrap();
    }

    #[test]
    fn changed_settings_are_refused_by_name_unless_fresh_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        let mut record = wanted(json!({ "tokens": 30, "deep": { "tiles": [1, 4] } }));
        record.cell("a", &[]);
        record.save(&path).unwrap();
        let other = wanted(json!({ "tokens": 31, "deep": { "tiles": [1, 8] }, "new": true }));
        let error = Record::open_or_new(&path, other.clone(), false).unwrap_err();
        let text = format!("{error:#}");
        for part in [
            "start anew with --fresh",
            "settings.tokens was 30, now 31",
            "settings.deep.tiles was [1,4], now [1,8]",
            "settings.new was null, now true",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let mut unshaped = record.clone();
        unshaped.loopback = true;
        let error = Record::open_or_new(&path, unshaped, false).unwrap_err();
        assert!(format!("{error:#}").contains("loopback was false, now true"));
        assert!(Record::open_or_new(&path, other, true).unwrap().cells.is_empty());
        assert!(Record::read(&path).unwrap().cells.is_empty(), "it was replaced at once");
    }

    #[test]
    fn a_record_accepts_new_environments_and_refuses_changed_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        let of = |environments: Value| wanted(json!({ "tokens": 30, ENVIRONMENTS: environments }));
        of(json!({ "A": "two" })).save(&path).unwrap();
        let found = Record::open_or_new(&path, of(json!({ "B": "three" })), false).unwrap();
        assert_eq!(found.settings[ENVIRONMENTS], json!({ "A": "two", "B": "three" }));
        found.save(&path).unwrap();
        let changed = of(json!({ "B": "four" }));
        let error = format!("{:#}", Record::open_or_new(&path, changed, false).unwrap_err());
        assert!(error.contains("settings.environments.B was \"three\", now \"four\""), "{error}");
    }

    #[test]
    fn a_file_of_another_format_is_an_error_that_suggests_fresh() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        let record = wanted(json!({}));
        let mut old = serde_json::to_value(&record).unwrap();
        old["format"] = json!(0);
        for (text, says) in [
            (old.to_string(), "its format is 0, and this build knows 1"),
            ("{}".to_owned(), "no record of an experiment"),
            ("{\"format\": 1, \"exp".to_owned(), "EOF"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = Record::open_or_new(&path, record.clone(), false).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(says) && text.contains("--fresh"), "{text}");
        }
    }

    #[test]
    fn a_record_continues_with_another_commit_and_lists_both() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        let mut record = wanted(json!({ "rate": 0.1 + 0.2 }));
        record.commits = vec!["aaaaaaa".to_owned()];
        record.save(&path).unwrap();
        record.commits = vec!["bbbbbbb-dirty".to_owned()];
        for _ in 0..2 {
            let found = Record::open_or_new(&path, record.clone(), false).unwrap();
            assert_eq!(found.commits, ["aaaaaaa", "bbbbbbb-dirty"]);
            found.save(&path).unwrap();
        }
    }

    #[test]
    fn a_sample_with_a_nan_value_is_invalid() {
        let mut record = wanted(json!({}));
        let cell = record.cell("a", &[]);
        cell.add(values(f64::NAN), Verdict::Valid);
        let reasons = vec!["wall_ms is NaN".to_owned()];
        assert_eq!(cell.samples[0].verdict, Verdict::Invalid { reasons });
        let text = serde_json::to_string(&record).unwrap();
        let again: Record = serde_json::from_str(&text).unwrap();
        assert!(again.cells[0].samples[0].values["wall_ms"].is_nan());
    }

    #[test]
    fn refused_and_failed_cells_are_done_without_samples() {
        let mut record = wanted(json!({}));
        let cell = record.cell("a", &[]);
        for (outcome, done) in [
            (Outcome::Measured, false),
            (Outcome::Refused { why: "x".into() }, true),
            (Outcome::OutOfMemory { device: "m".into(), needs: None, grants: Bytes(1) }, true),
            (Outcome::Failed { error: "x".into() }, true),
        ] {
            cell.outcome = outcome;
            assert_eq!(cell.done(1), done);
        }
    }

    #[test]
    fn timestamps_have_the_format_of_rfc_3339() {
        let text = now();
        let shape: String =
            text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "0000-00-00T00:00:00Z");
    }
}
