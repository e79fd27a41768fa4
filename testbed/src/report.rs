//! The page of an experiment: its tables in Markdown, and all that a reader must know about them.

use crate::{
    calibrate::Calibration,
    record::{Cell, ENVIRONMENTS, Outcome, Record, Verdict},
};
use std::fmt::{self, Write as _};

/// The most samples that did not count whose reasons are shown; the others are in the JSON.
const MOST_REASONS: usize = 12;

/// A table in Markdown, aligned so that it reads well as text too. Columns of numbers are aligned to the
/// right.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Table {
    /// The title above the table; empty for none.
    pub title: String,
    /// The names of the columns.
    pub columns: Vec<String>,
    /// The cells of each row; those that a row lacks are empty.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(title: &str, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        Self { title: title.to_owned(), columns, rows: Vec::new() }
    }

    /// Adds a row of cells.
    pub fn row<T: fmt::Display>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(|cell| cell.to_string()).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.title.is_empty() {
            writeln!(f, "**{}**\n", self.title)?;
        }
        // A cell must not end its own cell or row.
        let clean = |text: &String| text.replace('|', "\\|").replace(['\n', '\r'], " ");
        let cells = |row: &Vec<String>| -> Vec<String> {
            (0..self.columns.len()).map(|i| row.get(i).map(clean).unwrap_or_default()).collect()
        };
        let (head, rows) = (cells(&self.columns), self.rows.iter().map(cells).collect::<Vec<_>>());
        let columns: Vec<(usize, bool)> = (0..head.len())
            .map(|i| {
                let texts = || rows.iter().map(|row| &row[i]);
                let width = texts().chain([&head[i]]).map(|text| text.chars().count()).max();
                (width.unwrap_or(0).max(3), texts().any(|text| is_number(text)))
            })
            .collect();
        let mut line = |row: &[String]| {
            for (text, &(width, right)) in row.iter().zip(&columns) {
                if right {
                    write!(f, "| {text:>width$} ")
                } else {
                    write!(f, "| {text:<width$} ")
                }?;
            }
            writeln!(f, "|")
        };
        line(&head)?;
        let rule = |&(width, right): &(usize, bool)| {
            if right { format!("{}:", "-".repeat(width - 1)) } else { "-".repeat(width) }
        };
        line(&columns.iter().map(rule).collect::<Vec<_>>())?;
        rows.iter().try_for_each(|row| line(row))
    }
}

/// Whether a text begins with a number, as `1031 (1012 to 1068)` and `-0.1%` do.
fn is_number(text: &str) -> bool {
    text.trim_start_matches(['+', '-', '<', '>', '~']).starts_with(|c: char| c.is_ascii_digit())
}

/// One value of a cell as text: the spread of the samples that count, and how many do not; or why there are
/// none.
pub fn figure(cell: &Cell, value: &str) -> String {
    match &cell.outcome {
        Outcome::Refused { .. } => return "refused".to_owned(),
        Outcome::OutOfMemory { .. } => return "out of memory".to_owned(),
        Outcome::Failed { .. } => return "failed".to_owned(),
        Outcome::Measured => {}
    }
    let spread = cell.spread(value);
    match cell.invalid() {
        0 => spread.to_string(),
        invalid => format!("{spread}, {invalid} invalid"),
    }
}

/// The contents of the page of a record.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// The record of the experiment.
    pub record: &'a Record,
    /// What was measured, in a few sentences.
    pub about: &'a str,
    /// The tables of figures.
    pub tables: &'a [Table],
    /// The notes on the tables, a paragraph each.
    pub notes: &'a [String],
    /// The properties of the modelled devices that the emulation does not keep.
    pub not_kept: &'a [String],
    /// The names of the plots' files, beside the page.
    pub plots: &'a [String],
}

/// Writes the whole page in Markdown.
impl fmt::Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = self.record;
        writeln!(f, "# {}\n", record.experiment)?;
        if record.loopback {
            writeln!(f, "**loopback: no shaping, not comparable**\n")?;
        }
        writeln!(f, "{}\n", self.about.trim())?;
        for table in self.tables {
            writeln!(f, "{table}")?;
        }
        for plot in self.plots {
            let name = plot.rsplit_once('.').map_or(plot.as_str(), |(name, _)| name);
            writeln!(f, "![{name}]({plot})\n")?;
        }
        for note in self.notes {
            writeln!(f, "{}\n", note.trim())?;
        }
        list(f, "What the emulation does not keep", self.not_kept)?;
        list(f, "What has no figure", &without_figure(record))?;
        list(f, "Samples that do not count", &reasons(record))?;
        writeln!(f, "## How it was measured\n\n{}", provenance(record))?;
        for (name, calibration) in &record.calibrations {
            writeln!(f, "{}", calibrated(name, calibration))?;
        }
        Ok(())
    }
}

fn list(f: &mut fmt::Formatter<'_>, title: &str, items: &[String]) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(f, "## {title}\n")?;
    for item in items {
        writeln!(f, "- {}", item.trim().replace('\n', "\n  "))?;
    }
    writeln!(f)
}

fn without_figure(record: &Record) -> Vec<String> {
    let said = |cell: &Cell| {
        let why = match &cell.outcome {
            Outcome::Measured => match (cell.samples.len(), cell.valid().count()) {
                (0, _) => "not measured yet".to_owned(),
                (tries, 0) => format!("none of {tries} samples counts"),
                _ => return None,
            },
            outcome => outcome.to_string(),
        };
        Some(format!("{}: {why}", cell.key))
    };
    record.cells.iter().filter_map(said).collect()
}

fn reasons(record: &Record) -> Vec<String> {
    let mut all = Vec::new();
    for cell in &record.cells {
        for sample in &cell.samples {
            if let Verdict::Invalid { reasons } = &sample.verdict {
                all.push(format!("{}, {}: {}", cell.key, sample.at, reasons.join("; ")));
            }
        }
    }
    let left = all.len().saturating_sub(MOST_REASONS);
    all.truncate(MOST_REASONS);
    if left > 0 {
        all.push(format!("and {left} more, in the JSON"));
    }
    all
}

fn provenance(record: &Record) -> String {
    let machine = &record.machine;
    let mut text = format!("- {}\n", record.extent());
    let mut line = |what: &str, is: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "- {what}: {is}");
    };
    line("begun", &record.started);
    let (cores, memory, kernel) = (machine.cores, machine.memory, &machine.kernel);
    let features = machine.features.join(" ");
    line("machine", &format!("{}, {cores} cores, {memory}, Linux {kernel}", machine.processor));
    line("processor features", &features);
    let mixed =
        if record.commits.len() > 1 { " (samples were taken with all of these)" } else { "" };
    line("commit", &format!("{}{mixed}", record.commits.join(", ")));
    let versions: Vec<String> =
        record.versions.iter().map(|(of, is)| format!("{of} {is}")).collect();
    line("versions", &versions.join(", "));
    let mut settings = record.settings.clone();
    // The environments' texts are in the JSON; here only their names are shown.
    if let Some(of) = settings.get_mut(ENVIRONMENTS)
        && let Some(environments) = of.as_object()
    {
        *of = environments.keys().cloned().collect();
    }
    line("settings", &format!("`{settings}`"));
    text
}

fn calibrated(name: &str, calibration: &Calibration) -> Table {
    let times = |factor: f64| format!("{} times", (factor * 1000.0).round() / 1000.0);
    let (speed, memory) = (times(calibration.scale.speed), times(calibration.scale.memory));
    let title = format!("{name}: compute and links {speed}, memory {memory} what it stands for");
    let columns = ["device", "asked, GFLOP/s", "measured, GFLOP/s", "quota, % of a core"];
    let mut table = Table::new(&title, &columns);
    for device in &calibration.devices {
        let shown = |value: Option<f64>, none: &str| {
            value.map_or_else(|| none.to_owned(), |value| format!("{value:.2}"))
        };
        table.row([
            device.name.clone(),
            shown(device.wanted_speed, "a core"),
            shown(device.measured, "-"),
            shown(device.quota.map(|quota| quota * 100.0), "none"),
        ]);
    }
    table
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{calibrate::Calibrated, environment::Scale, record::Machine};
    use galaxy_common::Bytes;
    use std::collections::BTreeMap;

    fn record() -> Record {
        let mut record = Record {
            experiment: "table4".into(),
            format: 1,
            started: "2026-01-02T03:04:05Z".into(),
            machine: Machine { processor: "AMD EPYC".into(), cores: 2, ..Machine::default() },
            commits: vec!["aaaaaaa".into()],
            versions: BTreeMap::from([("galaxy".into(), "0.1.0".into())]),
            loopback: false,
            settings: serde_json::json!({ "tokens": 30 }),
            calibrations: BTreeMap::new(),
            cells: Vec::new(),
        };
        let cell = record.cell("A/bert-large/galaxy", &[]);
        for wall in [1031.0, 1012.0, 1068.0] {
            cell.add(BTreeMap::from([("wall_ms".into(), wall)]), Verdict::Valid);
        }
        record
    }

    fn page(record: &Record) -> String {
        let (notes, not_kept) = (["A note.".to_owned()], ["CPU per byte.".to_owned()]);
        let mut table = Table::new("Latency, ms", &["strategy", "A"]);
        table.row(["galaxy".to_owned(), figure(&record.cells[0], "wall_ms")]);
        let plots = ["table4.svg".to_owned()];
        let tables = [table];
        let page = Page {
            record,
            about: "Latency.",
            tables: &tables,
            notes: &notes,
            not_kept: &not_kept,
            plots: &plots,
        };
        page.to_string()
    }

    #[test]
    fn table_columns_are_aligned_with_numbers_to_the_right() {
        let mut table = Table::new("", &["strategy", "A", "note"]);
        table.row(["galaxy", "1031 (1012 to 1068)", "a|b\nc"]);
        table.row(["größer", "refused"]);
        let text = "\
| strategy |                   A | note   |
| -------- | ------------------: | ------ |
| galaxy   | 1031 (1012 to 1068) | a\\|b c |
| größer   |             refused |        |
";
        assert_eq!(table.to_string(), text);
        let empty = Table::new("Nothing", &["a"]).to_string();
        assert_eq!(empty, "**Nothing**\n\n| a   |\n| --- |\n");
    }

    #[test]
    fn numbers_in_tables_are_recognised_by_their_first_characters() {
        for (text, number) in [("-0.1%", true), ("~4", true), ("-", false), ("m1", false)] {
            assert_eq!(is_number(text), number, "{text}");
        }
    }

    #[test]
    fn invalid_samples_are_counted_but_not_part_of_the_figure() {
        let mut record = record();
        let cell = &mut record.cells[0];
        assert_eq!(figure(cell, "wall_ms"), "1031 (1012 to 1068)");
        let invalid = Verdict::of(vec!["m1 received 11.2%".to_owned()]);
        for _ in 0..14 {
            cell.add(BTreeMap::from([("wall_ms".into(), 9999.0)]), invalid.clone());
        }
        assert_eq!(figure(cell, "wall_ms"), "1031 (1012 to 1068), 14 invalid");
        assert_eq!(figure(cell, "hidden"), "-, 14 invalid");
        let text = page(&record);
        for part in
            ["1 cells, 17 samples, 14 of them invalid", "m1 received 11.2%", "and 2 more, in the"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn cells_without_a_figure_show_the_reason() {
        let mut record = record();
        record.cell("A/none", &[]);
        for (outcome, shown, why) in [
            (
                Outcome::Refused { why: "no attention heads left".into() },
                "refused",
                "A/none: refused: no attention heads left",
            ),
            (
                Outcome::OutOfMemory {
                    device: "m1".into(),
                    needs: Some(Bytes(2_000_000_000)),
                    grants: Bytes(1_500_000_000),
                },
                "out of memory",
                "A/none: out of memory: m1 grants 1.50 GB, and it needs 2.00 GB",
            ),
            (Outcome::Failed { error: "it ended".into() }, "failed", "A/none: failed: it ended"),
            (Outcome::Measured, "-", "A/none: not measured yet"),
        ] {
            record.cell("A/none", &[]).outcome = outcome;
            assert_eq!(figure(&record.cells[1], "wall_ms"), shown);
            let text = page(&record);
            assert!(text.contains(why), "{text}");
        }
    }

    #[test]
    fn a_page_states_its_machine_commits_and_settings() {
        let mut record = record();
        assert!(!page(&record).contains("not comparable"));
        record.loopback = true;
        record.commits.push("bbbbbbb-dirty".into());
        let scale = Scale { speed: 2.0, memory: 2.0 };
        let device = |name: &str, asked| Calibrated {
            name: name.into(),
            wanted_speed: asked,
            measured: asked.map(|a| a * 1.01),
            quota: asked.map(|_| 0.143),
            set_share: None,
            core: 0,
        };
        let devices = vec![device("m0", Some(15.0)), device("d1", None)];
        record
            .calibrations
            .insert("A".into(), Calibration { scale, devices, ..Calibration::default() });
        let text = page(&record);
        for part in [
            "**loopback: no shaping, not comparable**",
            "| galaxy   | 1031 (1012 to 1068) |",
            "![table4](table4.svg)",
            "## What the emulation does not keep\n\n- CPU per byte.",
            "AMD EPYC, 2 cores",
            "commit: aaaaaaa, bbbbbbb-dirty (samples were taken with all of these)",
            "A: compute and links 2 times, memory 2 times what it stands for",
            "| m0     |          15.00 |             15.15 |              14.30 |",
            "| d1     |         a core |                 - |               none |",
            "settings: `{\"tokens\":30}`",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
