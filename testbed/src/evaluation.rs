//! `report`: one page of what was to be reached, what was, and what was not and why, from the records that are
//! kept and a word by hand for each section. The same records and notes give the same bytes.

mod cells;
mod goal;
mod heterogeneous;
mod homogeneous;
#[cfg(test)]
mod made;
mod own_pages;
mod peers;
mod planner;
mod rates;
mod scaling;
mod texts;

use crate::{
    record::{Machine, Record},
    report::Table,
};
use anyhow::{Context, Result, bail, ensure};
use cells::Cells;
use goal::Goal;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::{Path, PathBuf},
};

/// Where what is needed is, and where the page goes.
#[derive(Clone, PartialEq, Eq, Debug, clap::Args)]
pub struct Options {
    /// Where records are kept, and pages and plots beside them
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    pub results: PathBuf,
    /// The words by hand
    #[arg(long, value_name = "FILE", default_value = "testbed/evaluation.toml")]
    pub notes: PathBuf,
    /// Where the page goes
    #[arg(long, value_name = "FILE", default_value = "docs/evaluation.md")]
    pub output: PathBuf,
}

/// Writes the page.
///
/// # Errors
/// When a record or the notes cannot be read, or the page cannot be written.
pub fn run(options: &Options) -> Result<()> {
    let page = page(options)?;
    std::fs::write(&options.output, page).with_context(|| options.output.display().to_string())?;
    println!("written: {}", options.output.display());
    Ok(())
}

/// The page.
///
/// # Errors
/// When a record or the notes cannot be read.
pub fn page(options: &Options) -> Result<String> {
    let text = std::fs::read_to_string(&options.notes);
    let text = text.with_context(|| options.notes.display().to_string())?;
    let notes = notes(&text).with_context(|| options.notes.display().to_string())?;
    let place = Place::of(&options.results, &options.output)?;
    Ok(whole(&Records::read(&options.results)?, &notes, &place))
}

/// A part of the page.
struct Section {
    /// Of its note.
    name: &'static str,
    title: &'static str,
    /// What it is made from.
    records: &'static [&'static str],
    /// What the issue and the papers let one expect.
    expected: &'static str,
    shown: fn(&Records) -> Shown,
}

/// What a section has to say.
#[derive(Clone, PartialEq, Debug, Default)]
struct Shown {
    /// What was to be reached.
    goals: Vec<Goal>,
    /// Main figures, where nothing is judged here.
    lines: Vec<String>,
    tables: Vec<Table>,
    /// Long tables, folded.
    every: Vec<Table>,
}

const SECTIONS: &[Section] = &[
    Section {
        name: "homogeneous",
        title: "Equal boards",
        records: &[homogeneous::RECORD],
        expected: "`auto` over `megatron` at least 95% of what the bounds allow in every cell, and at least 1.5 times in one of B or C. The paper's `galaxy` over Megatron-LM: 1.26 to 1.46 times, over sequence parallelism 1.08 to 1.11 where that fits (Galaxy, Table IV).",
        shown: homogeneous::shown_of,
    },
    Section {
        name: "heterogeneous",
        title: "Unlike devices",
        records: &[heterogeneous::RECORD],
        expected: "In D, E and F, `auto` at least 1.3 times faster than the better of `megatron` and `sequence` that fits in memory, and 2.5 times at best, as in the paper (Galaxy, Fig. 9: 1.3 to 2.5, where both are split in equal parts). G, H and I are ours.",
        shown: heterogeneous::shown_of,
    },
    Section {
        name: "scaling",
        title: "More devices",
        records: &[scaling::WEAK, scaling::STRONG],
        expected: "Four devices on links of 1000 Mbit/s: at least 86% of linear with 96 tokens for each, and 3.3 times one device with 384 tokens. The paper: 81% and 3.05 times for GPT2-L, 86% and 3.24 times for OPT-XL (Galaxy, Figs. 10 and 11), of one layer each; four layers here.",
        shown: scaling::shown_of,
    },
    Section {
        name: "bandwidth",
        title: "Slow and fast links",
        records: &[rates::RECORD],
        expected: "On links of 10 to 40 Mbit/s and with memory to spare, `auto` at least 1.5 times faster than `galaxy`; on none more than 5% slower than the best single device. The paper's `galaxy` over both baselines: 1.04 to 1.45 times (Galaxy, Fig. 8).",
        shown: rates::shown_of,
    },
    Section {
        name: "peers",
        title: "Beside PyTorch with Gloo",
        records: &[peers::RECORD],
        expected: "Faster in every cell where both run, and at least 1.3 times faster than its Megatron-style run in A, B and C. The papers have no such figure.",
        shown: peers::shown_of,
    },
    Section {
        name: "embed",
        title: "Batches of texts",
        records: &[texts::RECORD],
        expected: "Three devices together, 1 to 64 texts at once: at least 85% of the sum of the texts per second that each embeds alone. The papers have no such figure.",
        shown: texts::shown_of,
    },
    Section {
        name: "planner",
        title: "Plans and predictions",
        records: planner::RECORDS,
        expected: "`auto` at most 5% slower than the best other strategy, and predictions within 20% of what is measured.",
        shown: planner::shown_of,
    },
    Section {
        name: "overlap",
        title: "Communication behind compute",
        records: &[own_pages::OVERLAP],
        expected: "Tiles hide most of the communication (Galaxy, \u{a7}III-D; the paper has no figure).",
        shown: own_pages::overlap,
    },
    Section {
        name: "transport",
        title: "Links",
        records: &[own_pages::TRANSPORT],
        expected: "At most 1 s of processor time for a GB with TLS and 2.5 s with QUIC, both ends, on a path that is not shaped; the planner chooses by what is measured. The papers have no such figures.",
        shown: own_pages::transport,
    },
    Section {
        name: "memory",
        title: "Weights from disk",
        records: &[own_pages::MEMORY],
        expected: "PIPELOAD with 2, 4 and 6 loaders over PipeSwitch: 1.93, 3.22, 4.24 times for BERT-Large with 27 to 55% of its memory, 1.73, 2.77, 3.64 times for ViT-Large with 10 to 25% (Hermes, Tables II and III; Fig. 7). Next to no delay with 88.4% less memory where computing takes longer than reading (Demand Layering, Table II and Fig. 13).",
        shown: own_pages::memory,
    },
    Section {
        name: "decode",
        title: "Text",
        records: &[own_pages::DECODE],
        expected: "More tokens per second than the best single device and than llama.cpp over its RPC servers. The papers have no such figure.",
        shown: own_pages::decode,
    },
];

/// Records by their names.
#[derive(Clone, PartialEq, Debug, Default)]
struct Records(BTreeMap<String, Record>);

impl Records {
    /// Those of a directory that the page is made from.
    fn read(results: &Path) -> Result<Self> {
        let mut found = BTreeMap::new();
        for name in SECTIONS.iter().flat_map(|section| section.records) {
            let path = results.join(format!("{name}.json"));
            if path.try_exists().with_context(|| path.display().to_string())? {
                let record = Record::read(&path)?;
                let smoke = record.settings.get("smoke").is_some_and(|smoke| smoke == true);
                ensure!(
                    !record.loopback && !smoke,
                    "{} is of a smoke run or of loopback, which compare with nothing: run it again without, and copy the files from target/testbed-results/{name}",
                    path.display()
                );
                found.insert((*name).to_owned(), record);
            }
        }
        Ok(Self(found))
    }

    /// The cells of a record.
    fn cells(&self, name: &str) -> Cells<'_> {
        Cells { record: self.0.get(name) }
    }

    /// Those of a section.
    fn of(&self, section: &Section) -> Vec<(&'static str, &Record)> {
        let found = section.records.iter();
        found.filter_map(|name| Some((*name, self.0.get(*name)?))).collect()
    }
}

/// What is said by hand of a section.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    text: String,
}

type Notes = BTreeMap<String, Note>;

/// The note that stands below the summary.
const SUMMARY: &str = "summary";

fn notes(text: &str) -> Result<Notes> {
    let notes: Notes = toml::from_str(text)?;
    let known: Vec<&str> = SECTIONS.iter().map(|s| s.name).chain([SUMMARY]).collect();
    for name in notes.keys() {
        if !known.contains(&name.as_str()) {
            bail!("no section is named {name:?}; there are {}", known.join(", "));
        }
    }
    Ok(notes)
}

/// The files beside the records, as the page links them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Place {
    /// The directory, seen from the page's.
    link: String,
    /// Names of all files, in order.
    files: Vec<String>,
}

impl Place {
    fn of(results: &Path, output: &Path) -> Result<Self> {
        let beside = output.parent().unwrap_or(Path::new(""));
        let link = results.strip_prefix(beside).unwrap_or(results);
        let read = || -> std::io::Result<Vec<String>> {
            let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
            std::fs::read_dir(results)?.map(|entry| entry.map(name)).collect()
        };
        let mut files = read().with_context(|| results.display().to_string())?;
        files.sort();
        Ok(Self { link: link.display().to_string(), files })
    }

    fn has(&self, file: &str) -> bool {
        self.files.iter().any(|known| known == file)
    }

    /// The plots of a record: SVG, or PNG where there is no SVG of that name.
    fn plots(&self, record: &str) -> Vec<&str> {
        let of = |file: &&String| {
            let Some((stem, extension)) = file.rsplit_once('.') else { return false };
            let rest = stem.strip_prefix(record);
            let ours = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
            ours && match extension {
                "svg" => true,
                "png" => !self.has(&format!("{stem}.svg")),
                _ => false,
            }
        };
        let mut plots: Vec<&str> = self.files.iter().filter(of).map(String::as_str).collect();
        // That of the record's own name is first; the others stay in order.
        plots.sort_by_key(|plot| !plot.starts_with(&format!("{record}.")));
        plots
    }

    /// Links to the page of a record and to its samples, as far as they are there.
    fn pages(&self, record: &str) -> Vec<String> {
        let samples = format!("{record}.json");
        let samples = (samples, "every sample".to_owned());
        let known = [(format!("{record}.md"), record.to_owned()), samples].into_iter();
        let known = known.filter(|(file, _)| self.has(file));
        known.map(|(file, what)| format!("[{what}]({}/{file})", self.link)).collect()
    }

    /// A link to the page of a record, or to its samples where it has none.
    fn page(&self, record: &str) -> String {
        let page = format!("{record}.md");
        let file = if self.has(&page) { page } else { format!("{record}.json") };
        format!("[{record}]({}/{file})", self.link)
    }
}

fn whole(records: &Records, notes: &Notes, place: &Place) -> String {
    let sections: Vec<(&Section, Shown)> =
        SECTIONS.iter().map(|section| (section, (section.shown)(records))).collect();
    let mut page = String::new();
    page.push_str(&head(records, place));
    page.push_str(&summary(&sections, records, notes, place));
    let mut drawn = Vec::new();
    for (section, shown) in &sections {
        let plots: Vec<&str> = section.records.iter().flat_map(|name| place.plots(name)).collect();
        let plots: Vec<&str> = plots.into_iter().filter(|plot| !drawn.contains(plot)).collect();
        drawn.extend(&plots);
        let there = !records.of(section).is_empty();
        page.push_str(&part(section, shown, there, &plots, place));
        if let Some(note) = notes.get(section.name) {
            page.push_str(&format!("{}\n\n", note.text.trim()));
        }
        let pages = section.records.iter().map(|name| place.pages(name).join(", "));
        let pages: Vec<String> = pages.filter(|pages| !pages.is_empty()).collect();
        if !pages.is_empty() {
            page.push_str(&format!("Whole pages: {}.\n\n", pages.join("; ")));
        }
    }
    // Exactly one line end at the end.
    format!("{}\n", page.trim_end())
}

const HEAD: &str = "\
# Evaluation

What was to be reached, what was measured, and what was not reached and why: ours beside the bound and
beside the papers' figures. `galaxy-testbed report` makes this page from the records in RESULTS and
from the notes in `testbed/evaluation.toml`; it is not written by hand. Each experiment again, and the page after it:

```sh
cargo build --release --locked --workspace --bins
sudo target/release/galaxy-testbed run NAME          # goes on where it was broken off
cp target/testbed-results/NAME/* docs/results/
target/release/galaxy-testbed report
```

[testbed.md](testbed.md) says what the emulated devices and links are, what they do not keep of real ones, when a sample
does not count, and what the *bound* is. *Of the bound*: the bound over what was measured, so that 100% cannot be beaten
but by what the measured compute that it is made of varies. Figures are medians, with the smallest and the largest value in
brackets; ratios are those of medians, with the range of the pairs that were measured in turn. *Out of memory* and *refused*
are results: such cells have no ratio and are not judged.

";

fn head(records: &Records, place: &Place) -> String {
    let mut table = Table::new(
        "What the figures were taken from",
        &["record", "measured", "machine", "commits", "what"],
    );
    let mut listed: Vec<&str> = Vec::new();
    for (name, record) in SECTIONS.iter().flat_map(|section| records.of(section)) {
        if listed.contains(&name) {
            continue;
        }
        listed.push(name);
        table.row([
            place.page(name),
            days(record),
            machine(&record.machine),
            record.commits.join(", "),
            record.extent(),
        ]);
    }
    let link = format!("[{0}]({0})", place.link);
    format!("{}{table}\n", HEAD.replace("RESULTS", &link))
}

/// From the first day to the last.
fn days(record: &Record) -> String {
    let day = |at: &str| at.get(..10).unwrap_or(at).to_owned();
    let begun = day(&record.started);
    let samples = record.cells.iter().flat_map(|cell| &cell.samples);
    match samples.map(|sample| day(&sample.at)).max() {
        Some(last) if last > begun => format!("{begun} to {last}"),
        _ => begun,
    }
}

fn machine(machine: &Machine) -> String {
    let Machine { processor, cores, memory, kernel, .. } = machine;
    format!("{processor}, {cores} cores, {memory}, Linux {kernel}")
}

fn summary(
    sections: &[(&Section, Shown)],
    records: &Records,
    notes: &Notes,
    place: &Place,
) -> String {
    let mut goals = Table::new("", &goal::COLUMNS);
    let mut lines = String::new();
    for (section, shown) in sections {
        let link = format!("[{}](#{})", section.title, anchor(section.title));
        for goal in &shown.goals {
            goals.row(goal.row(&link));
        }
        if shown.goals.is_empty() {
            let said = match shown.lines.is_empty() {
                true => "not measured yet".to_owned(),
                false => shown.lines.join("; "),
            };
            let pages: Vec<String> =
                records.of(section).iter().map(|(name, _)| place.page(name)).collect();
            let pages = match pages.is_empty() {
                true => String::new(),
                false => format!(" ({})", pages.join(", ")),
            };
            // Writing to a String cannot fail.
            let _ = writeln!(lines, "- {link}: {said}{pages}");
        }
    }
    let note = notes.get(SUMMARY).map_or(String::new(), |note| format!("{}\n\n", note.text.trim()));
    format!("## Summary\n\n{goals}\n{note}What else was measured:\n\n{lines}\n")
}

/// As pages of Markdown name their headings.
fn anchor(title: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || [' ', '-'].contains(c);
    title.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

/// A section without its note; `there`: whether it has records.
fn part(section: &Section, shown: &Shown, there: bool, plots: &[&str], place: &Place) -> String {
    let mut text = format!("## {}\n\n*Expected*: {}\n\n", section.title, section.expected);
    let mut say = |what: std::fmt::Arguments<'_>| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{what}");
    };
    if !there {
        let runs = section.records.iter().map(|name| format!("`galaxy-testbed run {name}`"));
        say(format_args!("Not measured yet: {}.\n", runs.collect::<Vec<_>>().join(", ")));
    }
    for line in &shown.lines {
        say(format_args!("- {line}"));
    }
    if !shown.lines.is_empty() {
        say(format_args!(""));
    }
    let filled = |table: &&Table| there && !table.rows.is_empty();
    for table in shown.tables.iter().filter(filled) {
        say(format_args!("{table}"));
    }
    for table in shown.every.iter().filter(filled) {
        let folded = Table { title: String::new(), ..table.clone() };
        let title = &table.title;
        say(format_args!("<details>\n<summary>{title}</summary>\n\n{folded}\n</details>\n"));
    }
    for plot in plots {
        let name = plot.rsplit_once('.').map_or(*plot, |(name, _)| name);
        say(format_args!("![{name}]({}/{plot})\n", place.link));
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use made::{record, records};

    fn place(files: &[&str]) -> Place {
        let files = files.iter().map(|&file| file.to_owned()).collect();
        Place { link: "results".to_owned(), files }
    }

    #[test]
    fn without_records_every_section_says_so() {
        let page = whole(&Records::default(), &Notes::new(), &place(&[]));
        assert_eq!(page.matches("Not measured yet: `galaxy-testbed run ").count(), SECTIONS.len());
        for section in SECTIONS {
            assert!(page.contains(&format!("\n## {}\n", section.title)), "{}", section.title);
        }
        assert!(
            page.contains(
                "Not measured yet: `galaxy-testbed run weak`, `galaxy-testbed run strong`."
            )
        );
        assert!(!page.contains("NaN") && !page.contains("RESULTS"), "{page}");
        assert!(page.ends_with(".\n") && !page.ends_with("\n\n"));
    }

    #[test]
    fn a_section_has_its_tables_plots_note_and_links() {
        let found = records(
            "table4",
            &[
                ("B/bert-large/megatron", &[150.0, 160.0], Some(150.0)),
                ("B/bert-large/auto", &[100.0, 100.0], Some(98.0)),
            ],
        );
        let notes = notes("[homogeneous]\ntext = '''\nMissed by a little.\n'''\n").unwrap();
        let files = ["table4.json", "table4.md", "table4.png", "table4.svg", "table4-ratio.png"];
        let page = whole(&found, &notes, &place(&files));
        for part in [
            "from the records in [results](results) and",
            "| [table4](results/table4.md) | 2026-01-02 to 2026-01-03 | AMD EPYC, 2 cores, ",
            "| aaaaaaa | 2 cells, 4 samples, 0 of them invalid |",
            "1.550 (B, bert-large)",
            "- [Text](#text): not measured yet\n",
            "[Equal boards](#equal-boards)",
            "1.55 (1.50 to 1.60)",
            "<summary>Every cell of table4</summary>\n\n| cell ",
            "![table4](results/table4.svg)",
            "![table4-ratio](results/table4-ratio.png)",
            "Missed by a little.",
            "Whole pages: [table4](results/table4.md), [every sample](results/table4.json).",
        ] {
            assert!(page.contains(part), "{part}\n{page}");
        }
        assert!(!page.contains("table4.png"), "{page}");
    }

    #[test]
    fn a_note_of_no_section_is_an_error_that_names_them() {
        let error = notes("[table5]\ntext = ''\n").unwrap_err().to_string();
        assert!(error.contains("\"table5\"") && error.contains("homogeneous, "), "{error}");
        assert!(notes("[peers]\nwords = ''\n").is_err());
    }

    #[test]
    fn what_compares_with_nothing_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut made = record("overlap", &[]);
        let path = dir.path().join("overlap.json");
        made.save(&path).unwrap();
        assert_eq!(Records::read(dir.path()).unwrap().0.len(), 1);
        made.loopback = true;
        made.save(&path).unwrap();
        let error = Records::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("overlap.json is of a smoke run or of loopback"), "{error}");
        made.loopback = false;
        made.settings = serde_json::json!({ "smoke": true });
        made.save(&path).unwrap();
        assert!(Records::read(dir.path()).is_err());
    }

    #[test]
    fn plots_of_a_record_are_those_of_its_name() {
        let place =
            place(&["slow.svg", "slower.svg", "slow-x.svg", "slow.json", "slow-y.png", "slow.png"]);
        assert_eq!(place.plots("slow"), ["slow.svg", "slow-x.svg", "slow-y.png"]);
        let place = self::place(&["slow-x.svg", "slow.svg"]);
        assert_eq!(place.plots("slow"), ["slow.svg", "slow-x.svg"]);
        assert_eq!(anchor("Beside PyTorch, with Gloo"), "beside-pytorch-with-gloo");
    }

    #[test]
    fn a_page_is_written_beside_its_results() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            results: dir.path().join("results"),
            notes: dir.path().join("notes.toml"),
            output: dir.path().join("evaluation.md"),
        };
        std::fs::write(&options.notes, "").unwrap();
        let missing = run(&options).unwrap_err();
        assert!(format!("{missing:#}").contains("results: "), "{missing:#}");
        record("overlap", &[("A/b/2", &[1.0], None)])
            .save(&options.results.join("overlap.json"))
            .unwrap();
        run(&options).unwrap();
        let page = std::fs::read_to_string(&options.output).unwrap();
        assert_eq!(page, super::page(&options).unwrap());
        assert!(page.contains("[overlap](results/overlap.json)"), "{page}");
    }
}
