//! What was broken, and what became of each request: a line of JSON each.

use super::cases::Outcome;
use crate::plot::{self, Axis, Chart, Kind, Point, Series};
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

/// What lines of one record have in common.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The model's name.
    pub model: String,
    /// How many clients there were.
    pub clients: usize,
    /// What decided on faults and requests.
    pub seed: u64,
    /// What each device granted.
    pub memory: Bytes,
    /// Whether devices had no links of their own.
    pub loopback: bool,
}

/// A line.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "line")]
pub enum Line {
    /// The first.
    Chaos(Settings),
    /// Something was broken, and mended.
    Fault {
        /// Which, from 0.
        number: usize,
        /// What.
        what: String,
        /// How long it was broken,
        broken_ms: u64,
        /// and how long it took from then to the next answer of any client.
        mended_ms: u64,
    },
    /// A request has ended.
    Request {
        /// Of which client.
        client: usize,
        /// What it asked for.
        case: usize,
        /// What became of it.
        outcome: Outcome,
        /// How long it took,
        took_ms: u64,
        /// and the longest time in which nothing came of it.
        waited_ms: u64,
        /// What was wrong.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        why: String,
    },
}

/// The file, and what stands in it.
pub struct Record(Mutex<State>);

struct State {
    file: File,
    summary: Summary,
}

/// What became of requests.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Summary {
    /// Things that were broken.
    pub faults: usize,
    /// Requests by what became of them.
    pub outcomes: BTreeMap<Outcome, usize>,
    /// The longest time in which nothing came of a request, for each that was answered, in ms and ascending.
    pub waited_ms: Vec<u64>,
    /// How long it took after each fault until somebody was answered, in ms and ascending.
    pub mended_ms: Vec<u64>,
}

impl Record {
    /// Goes on with a record of the same settings, or begins one.
    ///
    /// # Errors
    /// When it is of others, or cannot be read or written.
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
                Line::Chaos(of) => ensure!(
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
        let record = Self(Mutex::new(State { file, summary }));
        if whole == 0 {
            record.add(&Line::Chaos(settings.clone()))?;
        }
        Ok(Arc::new(record))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a line.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn add(&self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        let mut state = self.state();
        state.summary.add(line);
        state.file.write_all(text.as_bytes()).context("the record cannot be written")
    }

    /// How many faults there were.
    pub fn faults(&self) -> usize {
        self.state().summary.faults
    }

    /// How many requests were answered.
    pub fn answered(&self) -> usize {
        self.state().summary.waited_ms.len()
    }

    /// Requests by what became of them, in a line.
    pub fn counts(&self) -> String {
        self.state().summary.counts()
    }

    /// What there is so far.
    pub fn summary(&self) -> Summary {
        let mut summary = self.state().summary.clone();
        summary.waited_ms.sort_unstable();
        summary.mended_ms.sort_unstable();
        summary
    }
}

impl Summary {
    fn add(&mut self, line: &Line) {
        match line {
            Line::Chaos(_) => {}
            Line::Fault { mended_ms, .. } => {
                self.faults += 1;
                self.mended_ms.push(*mended_ms);
            }
            Line::Request { outcome, waited_ms, .. } => {
                *self.outcomes.entry(*outcome).or_default() += 1;
                if outcome.is_answered() {
                    self.waited_ms.push(*waited_ms);
                }
            }
        }
    }

    /// How many requests became that.
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

    /// Draws how long requests waited.
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
            kind: Kind::Lines { series },
        };
        plot::draw(&chart, path_without_extension)
    }
}

/// The value below which such a share of them lies.
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
    fn a_record_goes_on_where_it_was_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chaos.jsonl");
        let settings = Settings {
            model: "m".to_owned(),
            clients: 2,
            seed: 1,
            memory: Bytes(5),
            loopback: true,
        };
        let request = |outcome, waited_ms| Line::Request {
            client: 0,
            case: 3,
            outcome,
            took_ms: 9,
            waited_ms,
            why: String::new(),
        };
        let what = "d0 is killed".to_owned();
        let fault = Line::Fault { number: 0, what, broken_ms: 5, mended_ms: 7 };
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
    fn shares_of_what_waited() {
        let times: Vec<u64> = (0..=100).collect();
        assert_eq!([0.5, 0.9, 1.0].map(|share| quantile(&times, share)), [50, 90, 100]);
        assert_eq!(quantile(&[], 0.5), 0);
    }
}
