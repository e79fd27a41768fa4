//! The record of a run: each fault and each request as a line of JSON.

use super::cases::Outcome;
use crate::plot::{self, Axis, Chart, ChartKind, Point, Series};
use anyhow::{Context, Result, ensure};
use galaxy_common::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File, OpenOptions},
    io::Write as _,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The settings that all lines of one record share.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The model's name.
    pub model: String,
    /// The number of clients.
    pub clients: usize,
    /// How many of them asked `galaxy serve`.
    #[serde(default)]
    pub served: usize,
    /// The seed that decided on faults and requests.
    pub seed: u64,
    /// The memory that each device granted.
    pub memory: Bytes,
    /// Whether devices had no links of their own.
    pub loopback: bool,
}

/// One line of the record.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "line")]
pub enum RecordLine {
    /// The first line: the settings of the run.
    Chaos(Settings),
    /// A fault, which has been mended.
    Fault {
        /// The number of the fault, from 0.
        number: usize,
        /// The fault as a sentence.
        what: String,
        /// How long the fault lasted, in ms.
        broken_ms: u64,
        /// The time from its end to the next answer of any client, in ms.
        mended_ms: u64,
    },
    /// A request that has ended.
    Request {
        /// The number of the client that asked.
        client: usize,
        /// The number of the request among the cases of the run.
        case: usize,
        /// The outcome of the request.
        outcome: Outcome,
        /// How long the request took, in ms.
        took_ms: u64,
        /// The longest time in which nothing of the answer arrived, in ms.
        waited_ms: u64,
        /// What was wrong with the answer; empty where nothing was.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        why: String,
    },
}

/// The file of a record, and the summary of its lines.
pub struct Record(Mutex<RecordState>);

struct RecordState {
    file: File,
    summary: Summary,
}

/// The outcomes of the requests, and how long clients waited.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Summary {
    /// The number of faults.
    pub faults: usize,
    /// The number of requests of each outcome.
    pub outcomes: BTreeMap<Outcome, usize>,
    /// The longest time in which nothing of an answer arrived, for each answered request, in ms and
    /// ascending.
    pub waited_ms: Vec<u64>,
    /// The time from the end of each fault to the next answer, in ms and ascending.
    pub mended_ms: Vec<u64>,
}

impl Record {
    /// Opens the record at `path` to go on with it, or begins one.
    ///
    /// # Errors
    /// When it has other settings, or cannot be read or written.
    pub fn open(path: &Path, settings: &Settings) -> Result<Arc<Self>> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let mut summary = Summary::default();
        // The last line may have been cut off.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        for (at, line) in text[..whole].lines().enumerate() {
            let place = || format!("{}, line {}", path.display(), at + 1);
            match serde_json::from_str(line).with_context(place)? {
                RecordLine::Chaos(of) => ensure!(
                    of == *settings,
                    "{} is of another run ({of:?}): name another file with --output, or remove it",
                    path.display()
                ),
                line => summary.add(&line),
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        file.set_len(whole as u64)?;
        let record = Self(Mutex::new(RecordState { file, summary }));
        if whole == 0 {
            record.add(&RecordLine::Chaos(settings.clone()))?;
        }
        Ok(Arc::new(record))
    }

    fn state(&self) -> MutexGuard<'_, RecordState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a line.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn add(&self, line: &RecordLine) -> Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        let mut state = self.state();
        state.summary.add(line);
        state.file.write_all(text.as_bytes()).context("the record cannot be written")
    }

    /// The number of faults so far.
    pub fn faults(&self) -> usize {
        self.state().summary.faults
    }

    /// The number of requests that were answered so far.
    pub fn answered(&self) -> usize {
        self.state().summary.waited_ms.len()
    }

    /// The number of requests of each outcome, on one line.
    pub fn counts(&self) -> String {
        self.state().summary.counts()
    }

    /// The summary of all lines so far.
    pub fn summary(&self) -> Summary {
        let mut summary = self.state().summary.clone();
        summary.waited_ms.sort_unstable();
        summary.mended_ms.sort_unstable();
        summary
    }
}

impl Summary {
    fn add(&mut self, line: &RecordLine) {
        match line {
            RecordLine::Chaos(_) => {}
            RecordLine::Fault { mended_ms, .. } => {
                self.faults += 1;
                self.mended_ms.push(*mended_ms);
            }
            RecordLine::Request { outcome, waited_ms, .. } => {
                *self.outcomes.entry(*outcome).or_default() += 1;
                if outcome.is_answered() {
                    self.waited_ms.push(*waited_ms);
                }
            }
        }
    }

    /// The number of requests of that outcome.
    pub fn of(&self, outcome: Outcome) -> usize {
        self.outcomes.get(&outcome).copied().unwrap_or(0)
    }

    /// Whether every request was answered, and rightly.
    pub fn is_clean(&self) -> bool {
        self.outcomes.keys().all(|outcome| outcome.is_fine())
    }

    fn counts(&self) -> String {
        let each = Outcome::ALL.map(|outcome| format!("{} {outcome}", self.of(outcome)));
        each.join(", ")
    }

    /// Draws how long requests waited, as a plot.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn draw(&self, path_without_extension: &Path) -> Result<()> {
        let line = |name: &str, times: &[u64]| {
            let point = |share: u32| {
                let y = quantile(times, f64::from(share) / 1000.0).max(1) as f64 / 1e3;
                Point { x: f64::from(share) / 10.0, y, low: y, high: y }
            };
            let points = (0..=100).map(|at| point(at * 10)).chain([point(999)]);
            let mut points: Vec<Point> = points.collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series { name: name.to_owned(), points, dashed: true }
        };
        let series = vec![
            line("longest time without anything new", &self.waited_ms),
            line("from the end of a fault to an answer", &self.mended_ms),
        ];
        let chart = Chart {
            title: format!("{} faults: how long requests waited", self.faults),
            x: Axis { label: "of all, %".to_owned(), ..Axis::default() },
            y: Axis { label: "s".to_owned(), log: true, ..Axis::default() },
            kind: ChartKind::Lines { series },
        };
        plot::draw(&chart, path_without_extension)
    }
}

/// The value below which this share of the ascending values lies.
fn quantile(ascending: &[u64], share: f64) -> u64 {
    let last = ascending.len().saturating_sub(1);
    ascending.get((last as f64 * share).round() as usize).copied().unwrap_or(0)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} faults; requests: {}", self.faults, self.counts())?;
        writeln!(f, "\n| s | median | 90% | 99% | longest |\n| --- | ---: | ---: | ---: | ---: |")?;
        for (what, times) in [
            ("a request's longest time without anything new", &self.waited_ms),
            ("from the end of a fault to an answer", &self.mended_ms),
        ] {
            write!(f, "| {what} |")?;
            for share in [0.5, 0.9, 0.99, 1.0] {
                write!(f, " {:.2} |", quantile(times, share) as f64 / 1e3)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_chaos_record_continues_after_a_truncated_last_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chaos.jsonl");
        let settings = Settings {
            model: "m".to_owned(),
            clients: 2,
            served: 1,
            seed: 1,
            memory: Bytes(5),
            loopback: true,
        };
        let request = |outcome, waited_ms| RecordLine::Request {
            client: 0,
            case: 3,
            outcome,
            took_ms: 9,
            waited_ms,
            why: String::new(),
        };
        let what = "d0 is killed".to_owned();
        let fault = RecordLine::Fault { number: 0, what, broken_ms: 5, mended_ms: 7 };
        let record = Record::open(&path, &settings).unwrap();
        for line in [request(Outcome::Right, 8), fault, request(Outcome::NearTie, 2)] {
            record.add(&line).unwrap();
        }
        let before = record.summary();
        assert!(before.is_clean() && before.waited_ms == [2, 8], "{before:?}");
        drop(record);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"line\":\"fau").unwrap();
        let record = Record::open(&path, &settings).unwrap();
        assert_eq!((record.summary(), record.faults()), (before, 1));
        record.add(&request(Outcome::Lost, 3)).unwrap();
        let after = Record::open(&path, &settings).unwrap().summary();
        assert!(!after.is_clean() && after.of(Outcome::Lost) == 1 && after.waited_ms.len() == 2);
        let other = Settings { seed: 2, ..settings };
        let error = Record::open(&path, &other).map(drop).unwrap_err().to_string();
        assert!(error.contains("--output"), "{error}");
    }

    #[test]
    fn a_quantile_is_the_value_at_its_share_and_zero_without_values() {
        let times: Vec<u64> = (0..=100).collect();
        assert_eq!([0.5, 0.9, 1.0].map(|share| quantile(&times, share)), [50, 90, 100]);
        assert_eq!(quantile(&[], 0.5), 0);
    }
}
