//! `galaxy-testbed report`: the goals, what was measured, and which goals were missed and why. It writes a
//! summary, and a page for each section beside the records. Pages are generated from the records and from
//! notes written by hand, and the same records and notes give the same bytes.

mod cells;
#[cfg(test)]
mod fixtures;
mod goal;
mod heterogeneous;
mod homogeneous;
mod peers;
mod planner;
mod rates;
mod scaling;
mod summaries;
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

/// The options of `galaxy-testbed report`: the records and notes, and the place of the pages.
#[derive(Clone, PartialEq, Eq, Debug, clap::Args)]
pub struct Options {
    /// The directory of records; the page of each section goes there, too.
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    pub results: PathBuf,
    /// The file of the notes, written by hand.
    #[arg(long, value_name = "FILE", default_value = "testbed/evaluation.toml")]
    pub notes: PathBuf,
    /// The file of the summary.
    #[arg(long, value_name = "FILE", default_value = "docs/evaluation.md")]
    pub output: PathBuf,
}

/// Writes all pages.
///
/// # Errors
/// When a record or the notes cannot be read, or a page cannot be written.
pub fn run(options: &Options) -> Result<()> {
    for (path, page) in pages(options)? {
        std::fs::write(&path, page).with_context(|| path.display().to_string())?;
        println!("written: {}", path.display());
    }
    Ok(())
}

/// The pages by their paths: the summary, and one for each section beside the records.
///
/// # Errors
/// When a record or the notes cannot be read.
pub fn pages(options: &Options) -> Result<BTreeMap<PathBuf, String>> {
    let text = std::fs::read_to_string(&options.notes);
    let text = text.with_context(|| options.notes.display().to_string())?;
    let notes = notes(&text).with_context(|| options.notes.display().to_string())?;
    let records = Records::read(&options.results)?;
    let files = files(&options.results)?;
    let beside = options.output.parent().unwrap_or(Path::new(""));
    let link = options.results.strip_prefix(beside).unwrap_or(&options.results);
    let sections: Vec<(&Section, Shown)> =
        SECTIONS.iter().map(|section| (section, (section.shown)(&records))).collect();
    let mut pages = BTreeMap::new();
    let mut drawn = Vec::new();
    for (section, shown) in &sections {
        let page = section_page(section, shown, &records, &notes, &files, &mut drawn);
        pages.insert(options.results.join(section.page()), page);
    }
    let place = ResultFiles { link: format!("{}/", link.display()), files };
    pages.insert(options.output.clone(), summary_page(&sections, &records, &notes, &place));
    Ok(pages)
}

/// The names of all files of the results, in order.
fn files(results: &Path) -> Result<Vec<String>> {
    let read = || -> std::io::Result<Vec<String>> {
        let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        std::fs::read_dir(results)?.map(|entry| entry.map(name)).collect()
    };
    let mut files = read().with_context(|| results.display().to_string())?;
    files.sort();
    Ok(files)
}

/// The beginning of the name of each section's page.
pub const SECTION_PREFIX: &str = "evaluation-";

/// A part of the evaluation: a page, and a line of the summary.
struct Section {
    /// The name of its note and of its page.
    name: &'static str,
    title: &'static str,
    /// The names of the records that the section shows.
    records: &'static [&'static str],
    /// What the goals and the papers let one expect.
    expected: &'static str,
    shown: fn(&Records) -> Shown,
}

impl Section {
    /// The file name of the section's page.
    fn page(&self) -> String {
        format!("{SECTION_PREFIX}{}.md", self.name)
    }
}

/// The contents of a section, computed from its records.
#[derive(Clone, PartialEq, Debug, Default)]
struct Shown {
    /// The goals of the section, each with what was measured.
    goals: Vec<Goal>,
    /// The main figures, where no goal is judged here.
    lines: Vec<String>,
    tables: Vec<Table>,
    /// Long tables, which the page folds.
    every: Vec<Table>,
}

const SECTIONS: &[Section] = &[
    Section {
        name: "homogeneous",
        title: "Homogeneous devices",
        records: &[homogeneous::RECORD],
        expected: "`auto` over `megatron` at least 95% of what the bounds allow in every cell, and at least 1.5 times in one of B or C. The paper's `galaxy` over Megatron-LM: 1.26 to 1.46 times, over sequence parallelism 1.08 to 1.11 where that fits (Galaxy, Table IV).",
        shown: homogeneous::shown_of,
    },
    Section {
        name: "heterogeneous",
        title: "Heterogeneous devices",
        records: &[heterogeneous::RECORD],
        expected: "In D, E and F, `auto` at least 1.3 times faster than the better of `megatron` and `sequence` that fits in memory, and 2.5 times at best, as in the paper (Galaxy, Fig. 9: 1.3 to 2.5, where both are split in equal parts). G, H and I are ours.",
        shown: heterogeneous::shown_of,
    },
    Section {
        name: "scaling",
        title: "Scaling",
        records: &[scaling::WEAK, scaling::STRONG],
        expected: "Four devices on links of 1000 Mbit/s: at least 86% of linear with 96 tokens for each, and 3.3 times one device with 384 tokens. The paper: 81% and 3.05 times for GPT2-L, 86% and 3.24 times for OPT-XL (Galaxy, Figs. 10 and 11), of one layer each; four layers here.",
        shown: scaling::shown_of,
    },
    Section {
        name: "bandwidth",
        title: "Link bandwidth",
        records: &[rates::RECORD],
        expected: "On links of 10 to 40 Mbit/s and with memory to spare, `auto` at least 1.5 times faster than `galaxy`; on none more than 5% slower than the best single device. The paper's `galaxy` over both baselines: 1.04 to 1.45 times (Galaxy, Fig. 8).",
        shown: rates::shown_of,
    },
    Section {
        name: "peers",
        title: "PyTorch with Gloo",
        records: &[peers::RECORD],
        expected: "Faster in every cell where both run, and at least 1.3 times faster than its Megatron-style run in A, B and C. The papers have no such figure.",
        shown: peers::shown_of,
    },
    Section {
        name: "embed",
        title: "Embedding throughput",
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
        title: "Overlap of communication and compute",
        records: &[summaries::OVERLAP],
        expected: "Tiles hide most of the communication (Galaxy, \u{a7}III-D; the paper has no figure).",
        shown: summaries::overlap,
    },
    Section {
        name: "transport",
        title: "Transports",
        records: &[summaries::TRANSPORT],
        expected: "At most 1 s of processor time for a GB with TLS and 2.5 s with QUIC, both ends, on a path that is not shaped; the planner chooses by what is measured. The papers have no such figures.",
        shown: summaries::transport,
    },
    Section {
        name: "memory",
        title: "Weight streaming",
        records: &[summaries::MEMORY],
        expected: "PIPELOAD with 2, 4 and 6 loaders over PipeSwitch: 1.93, 3.22, 4.24 times for BERT-Large with 27 to 55% of its memory, 1.73, 2.77, 3.64 times for ViT-Large with 10 to 25% (Hermes, Tables II and III; Fig. 7). Next to no delay with 88.4% less memory where computing takes longer than reading (Demand Layering, Table II and Fig. 13).",
        shown: summaries::memory,
    },
    Section {
        name: "decode",
        title: "Decode",
        records: &[summaries::DECODE],
        expected: "More tokens per second than the best single device and than llama.cpp over its RPC servers. The papers have no such figure.",
        shown: summaries::decode,
    },
];

/// The records, by their names.
#[derive(Clone, PartialEq, Debug, Default)]
struct Records(BTreeMap<String, Record>);

impl Records {
    /// Reads the records in a directory that the pages show.
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

    /// The cells of a record; none where there is no such record.
    fn cells(&self, name: &str) -> Cells<'_> {
        Cells { record: self.0.get(name) }
    }

    /// The records of a section that were read.
    fn of(&self, section: &Section) -> Vec<(&'static str, &Record)> {
        let found = section.records.iter();
        found.filter_map(|name| Some((*name, self.0.get(*name)?))).collect()
    }
}

/// A note of a section, written by hand.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    text: String,
}

type Notes = BTreeMap<String, Note>;

/// The name of the note that stands below the table of the summary.
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

/// The files of the results, as a page links to them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct ResultFiles {
    /// The prefix of a link to a file: the directory of the results, relative to the page's, and a slash;
    /// empty for a page that lies there.
    link: String,
    /// The names of all files, in order.
    files: Vec<String>,
}

impl ResultFiles {
    fn has(&self, file: &str) -> bool {
        self.files.iter().any(|known| known == file)
    }

    /// Links to the page of a record and to its samples, as far as they are there.
    fn pages(&self, record: &str) -> Vec<String> {
        let samples = format!("{record}.json");
        let samples = (samples, "every sample".to_owned());
        let known = [(format!("{record}.md"), record.to_owned()), samples].into_iter();
        let known = known.filter(|(file, _)| self.has(file));
        known.map(|(file, what)| format!("[{what}]({}{file})", self.link)).collect()
    }

    /// A link to the page of a record, or to its samples where it has none.
    fn page(&self, record: &str) -> String {
        let page = format!("{record}.md");
        let file = if self.has(&page) { page } else { format!("{record}.json") };
        format!("[{record}]({}{file})", self.link)
    }
}

/// The plots of a record: SVG, or PNG where there is no SVG of that name.
fn plots_of<'a>(files: &'a [String], record: &str) -> Vec<&'a str> {
    let has = |file: String| files.contains(&file);
    let of = |file: &&String| {
        let Some((stem, extension)) = file.rsplit_once('.') else { return false };
        let rest = stem.strip_prefix(record);
        let ours = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
        ours && match extension {
            "svg" => true,
            "png" => !has(format!("{stem}.svg")),
            _ => false,
        }
    };
    let mut plots: Vec<&str> = files.iter().filter(of).map(String::as_str).collect();
    // The plot of the record's own name is first; the others stay in order.
    plots.sort_by_key(|plot| !plot.starts_with(&format!("{record}.")));
    plots
}

const HEAD: &str = "\
# Evaluation

What was to be reached, what was measured, and what was not reached and why, beside the bound and the papers' figures.
This page is the summary; each section has a page of its own, with all tables and plots. `galaxy-testbed report` makes
these pages from the records in RESULTS and from the notes in `testbed/evaluation.toml`; they are not written
by hand. Only the latest record of each experiment is kept here; earlier runs stand in the history of `docs/results`.

";

const METHOD: &str = "\
## How to read it, and how to measure again

[testbed.md](testbed.md) says what the emulated devices and links are, what they do not keep of real ones, when a sample
does not count, and what the *bound* is. *Of the bound* is the bound over what was measured, so 100% is the most that can
be reached, but for the variance of the measured compute that the bound is made of. Figures are medians, with the smallest
and the largest value in brackets. Ratios are those of medians, with the range of the pairs that were measured in turn.
*Out of memory* and *refused* are results: such cells have no ratio and are not judged.

```sh
cargo build --release --locked --workspace --bins
sudo target/release/galaxy-testbed run NAME          # goes on where it was broken off
cp target/testbed-results/NAME/* docs/results/
target/release/galaxy-testbed report
```

";

fn summary_page(
    sections: &[(&Section, Shown)],
    records: &Records,
    notes: &Notes,
    place: &ResultFiles,
) -> String {
    let directory = place.link.trim_end_matches('/');
    let head = HEAD.replace("RESULTS", &format!("[{directory}]({directory})"));
    let summary = summary(sections, records, notes, place);
    ended(&format!("{head}{summary}{METHOD}{}", measured_records(records, place)))
}

/// The page of a section. `drawn` are the plots of the sections before it, which are not shown again.
fn section_page<'a>(
    section: &Section,
    shown: &Shown,
    records: &Records,
    notes: &Notes,
    files: &'a [String],
    drawn: &mut Vec<&'a str>,
) -> String {
    let mut plots = Vec::new();
    for plot in section.records.iter().flat_map(|name| plots_of(files, name)) {
        if !drawn.contains(&plot) {
            plots.push(plot);
            drawn.push(plot);
        }
    }
    let place = ResultFiles { link: String::new(), files: files.to_vec() };
    let mut page = part(section, shown, !records.of(section).is_empty(), &plots);
    if let Some(note) = notes.get(section.name) {
        page.push_str(&format!("{}\n\n", note.text.trim()));
    }
    let pages = section.records.iter().map(|name| place.pages(name).join(", "));
    let pages: Vec<String> = pages.filter(|pages| !pages.is_empty()).collect();
    if !pages.is_empty() {
        page.push_str(&format!("Records: {}.\n\n", pages.join("; ")));
    }
    ended(&page)
}

/// The text with exactly one line feed at its end.
fn ended(page: &str) -> String {
    format!("{}\n", page.trim_end())
}

/// The table of all records that the pages show.
fn measured_records(records: &Records, place: &ResultFiles) -> String {
    let mut table = Table::new("", &["record", "measured", "machine", "commits", "what"]);
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
    format!("## Records\n\n{table}\n")
}

/// The days on which a record was measured, from the first to the last.
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
    place: &ResultFiles,
) -> String {
    let mut goals = Table::new("", &goal::COLUMNS);
    let mut lines = String::new();
    for (section, shown) in sections {
        let link = format!("[{}]({}{})", section.title, place.link, section.page());
        for goal in &shown.goals {
            goals.row(goal.row(&link));
        }
        if shown.goals.is_empty() {
            let pages: Vec<String> =
                records.of(section).iter().map(|(name, _)| place.page(name)).collect();
            // Writing to a String cannot fail.
            let _ = match (pages.as_slice(), shown.lines.as_slice()) {
                ([], _) | (_, []) => writeln!(lines, "- {link}: not measured yet"),
                (pages, [line]) => writeln!(lines, "- {link}: {line} ({})", pages.join(", ")),
                (pages, several) => {
                    let several = several.iter().map(|line| format!("  - {line}\n"));
                    write!(
                        lines,
                        "- {link} ({}):\n{}",
                        pages.join(", "),
                        several.collect::<String>()
                    )
                }
            };
        }
    }
    let note = notes.get(SUMMARY).map_or(String::new(), |note| format!("{}\n\n", note.text.trim()));
    format!("## Summary\n\n{goals}\n{note}## What else was measured\n\n{lines}\n")
}

/// The page of a section without its note. `there` says whether it has records.
fn part(section: &Section, shown: &Shown, there: bool, plots: &[&str]) -> String {
    let mut text = format!("# {}\n\n*Expected*: {}\n\n", section.title, section.expected);
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
        say(format_args!("![{name}]({plot})\n"));
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use fixtures::{record, records};

    fn names(files: &[&str]) -> Vec<String> {
        files.iter().map(|&file| file.to_owned()).collect()
    }

    fn place(files: &[&str]) -> ResultFiles {
        ResultFiles { link: "results/".to_owned(), files: names(files) }
    }

    fn shown(records: &Records) -> Vec<(&'static Section, Shown)> {
        SECTIONS.iter().map(|section| (section, (section.shown)(records))).collect()
    }

    fn page_of(name: &str, records: &Records, notes: &Notes, files: &[&str]) -> String {
        let shown = shown(records);
        let (section, shown) = shown.iter().find(|(section, _)| section.name == name).unwrap();
        section_page(section, shown, records, notes, &names(files), &mut Vec::new())
    }

    #[test]
    fn sections_without_records_show_not_measured_yet() {
        let none = Records::default();
        let summary = summary_page(&shown(&none), &none, &Notes::new(), &place(&[]));
        for section in SECTIONS {
            let link = format!("[{}](results/evaluation-{}.md)", section.title, section.name);
            assert!(summary.contains(&link), "{link}\n{summary}");
            let page = page_of(section.name, &none, &Notes::new(), &[]);
            assert!(page.starts_with(&format!("# {}\n\n*Expected*: ", section.title)), "{page}");
            assert!(page.contains("Not measured yet: `galaxy-testbed run "), "{page}");
            assert!(!page.contains("NaN"), "{page}");
            assert!(page.ends_with(".\n") && !page.ends_with("\n\n"));
        }
        assert!(summary.contains("- [Decode](results/evaluation-decode.md): not measured yet\n"));
        assert!(!summary.contains("NaN") && !summary.contains("RESULTS"), "{summary}");
        assert!(
            page_of("scaling", &none, &Notes::new(), &[]).contains(
                "Not measured yet: `galaxy-testbed run weak`, `galaxy-testbed run strong`."
            )
        );
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
        let summary = summary_page(&shown(&found), &found, &notes, &place(&files));
        for part in [
            "from the records in [results](results) and",
            "| [table4](results/table4.md) | 2026-01-02 to 2026-01-03 | AMD EPYC, 2 cores, ",
            "| aaaaaaa | 2 cells, 4 samples, 0 of them invalid |",
            "1.550 (B, bert-large)",
            "[Homogeneous devices](results/evaluation-homogeneous.md)",
        ] {
            assert!(summary.contains(part), "{part}\n{summary}");
        }
        let page = page_of("homogeneous", &found, &notes, &files);
        for part in [
            "1.55 (1.50 to 1.60)",
            "<summary>Every cell of table4</summary>\n\n| cell ",
            "![table4](table4.svg)",
            "![table4-ratio](table4-ratio.png)",
            "Missed by a little.",
            "Records: [table4](table4.md), [every sample](table4.json).",
        ] {
            assert!(page.contains(part), "{part}\n{page}");
        }
        assert!(!page.contains("table4.png"), "{page}");
    }

    #[test]
    fn a_note_for_an_unknown_section_is_an_error_naming_all_sections() {
        let error = notes("[table5]\ntext = ''\n").unwrap_err().to_string();
        assert!(error.contains("\"table5\"") && error.contains("homogeneous, "), "{error}");
        assert!(notes("[peers]\nwords = ''\n").is_err());
    }

    #[test]
    fn records_of_smoke_or_loopback_runs_are_rejected() {
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
    fn plots_of_a_record_match_its_name_and_prefer_svg() {
        let files =
            names(&["slow.svg", "slower.svg", "slow-x.svg", "slow.json", "slow-y.png", "slow.png"]);
        assert_eq!(plots_of(&files, "slow"), ["slow.svg", "slow-x.svg", "slow-y.png"]);
        let files = names(&["slow-x.svg", "slow.svg"]);
        assert_eq!(plots_of(&files, "slow"), ["slow.svg", "slow-x.svg"]);
    }

    #[test]
    fn section_pages_are_written_to_the_directory_of_the_records() {
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
        // The pages of sections are no records: the next run writes the same.
        let made = pages(&options).unwrap();
        assert_eq!(made.len(), SECTIONS.len() + 1);
        for (path, page) in &made {
            assert_eq!(&std::fs::read_to_string(path).unwrap(), page);
        }
        let summary = &made[&options.output];
        assert!(summary.contains("[overlap](results/overlap.json)"), "{summary}");
        assert!(
            made[&options.results.join("evaluation-overlap.md")].contains("](overlap.json)"),
            "{made:?}"
        );
    }
}
