//! The page: a table for each kind of disk, the other measurements, and plots.

use super::{
    Disk, KEEPS, NAME, POLICIES, Policy, STORY, SWEEP_EACH, SWEEP_FREE, key,
    others::{BESIDE, MANY, TOGETHER},
};
use crate::{
    experiment::show::{axis, bar, percent, publish, shown},
    plot::{Axis, Chart, ChartKind, Group as Bars, Point, Series},
    record::{Cell, Record},
    report::{Table, figure},
};
use anyhow::Result;
use std::path::Path;

const DISKS: [(Disk, &str, &str); 4] = [
    (Disk::Free, "The disk as it is", ""),
    (
        Disk::Long,
        "The disk as it is, a text of 512 tokens: computing takes longer than reading",
        "-long",
    ),
    (
        Disk::Throttled,
        "A disk that is throttled: reading takes ten times as long as computing",
        "-throttled",
    ),
    (Disk::Each, "A disk that gives as little to each loader", "-each-loader"),
];

fn find<'a>(record: &'a Record, disk: Disk, model: &str, policy: Policy) -> Option<&'a Cell> {
    let key = key(disk, model, policy);
    record.cells.iter().find(|cell| cell.key == key)
}

/// The models that have cells on a disk, by the first part of the key.
fn models(record: &Record, of: &str) -> Vec<String> {
    let mut models = Vec::new();
    for cell in record.cells.iter().filter(|cell| cell.key.split('/').next() == Some(of)) {
        let model = cell.key.split('/').nth(1).unwrap_or_default().to_owned();
        if !models.contains(&model) {
            models.push(model);
        }
    }
    models
}

fn fact(cell: &Cell, name: &str) -> f64 {
    cell.facts.get(name).copied().unwrap_or(f64::NAN)
}

/// The least time in ms in which a throttled disk gives a request's bytes, with all loaders where each is
/// limited; NaN where the disk is not throttled.
fn bound(cell: &Cell, disk: Disk) -> f64 {
    let rate = match disk {
        Disk::Free | Disk::Long => f64::NAN,
        Disk::Throttled => fact(cell, "rate_mb"),
        Disk::Each => fact(cell, "rate_mb") * fact(cell, "agents"),
    };
    fact(cell, "model_mb") * fact(cell, "programs") / rate * 1e3
}

/// The name of the value that is a policy's delay. For `preload`, which reads before a request, reading is
/// included; for the others it is the run alone.
fn value(policy: Policy) -> &'static str {
    if policy == Policy::Preload { "whole_ms" } else { "run_ms" }
}

/// The share by which a cell holds more memory than its plan says; NaN where that was not measured.
fn off(cell: &Cell) -> f64 {
    let resident = cell.spread("rss_mb").median;
    if resident > 0.0 { resident / fact(cell, "planned_mb") - 1.0 } else { f64::NAN }
}

/// The speedup of PIPELOAD over PipeSwitch, and its share of PipeSwitch's memory, as the paper found them
/// (Hermes, Tables II and III), with 2, 4 and 6 agents.
fn hermes(model: &str, policy: Policy) -> Option<(f64, f64)> {
    let found = match model {
        "bert-large" => [(1.93, 0.271), (3.22, 0.392), (4.24, 0.551)],
        "vit-large" => [(1.73, 0.097), (2.77, 0.176), (3.64, 0.254)],
        "gpt2-medium" => [(1.44, 0.270), (1.76, 0.361), (2.19, 0.452)],
        "gpt-j-6b" => [(1.50, 0.134), (2.28, 0.197), (2.58, 0.260)],
        _ => return None,
    };
    let at = [Policy::PipeLoad(2), Policy::PipeLoad(4), Policy::PipeLoad(6)];
    at.into_iter().position(|known| known == policy).map(|at| found[at])
}

/// The columns of memory that follow a cell's delay in every table.
fn memory(cell: &Cell) -> [String; 5] {
    [
        shown(fact(cell, "weights_mb"), 1),
        percent(fact(cell, "weights_mb") / fact(cell, "model_mb")),
        figure(cell, "rss_mb"),
        shown(fact(cell, "planned_mb"), 1),
        percent(off(cell)),
    ]
}
const MEMORY: [&str; 5] =
    ["weights in memory, MB", "of the model", "resident, MB", "planned, MB", "over that by"];

pub(super) fn show(record: &Record, output: &Path) -> Result<()> {
    let (mut tables, mut charts) = (Vec::new(), Vec::new());
    for (disk, title, suffix) in DISKS {
        let names = models(record, disk.name());
        if names.is_empty() {
            continue;
        }
        tables.push(policies(record, disk, title, &names));
        let mut groups = Vec::new();
        for model in &names {
            let found = POLICIES.into_iter().enumerate();
            let bars = found
                .filter_map(|(at, p)| Some(bar(at, find(record, disk, model, p)?, value(p))))
                .collect();
            groups.push(Bars { label: model.clone(), bars });
        }
        charts.push((
            suffix,
            Chart {
                title: format!("A request, weights on disk. {title}"),
                x: axis("model"),
                y: Axis { log: true, ..axis("ms") },
                kind: ChartKind::Bars { groups, series: POLICIES.map(Policy::name).to_vec() },
            },
        ));
    }
    sweeps(record, &mut tables, &mut charts);
    tables.extend(requests(record));
    tables.extend(beside(record));
    tables.extend(together(record));
    let notes = [
        "*preload*: all weights are read, then the request is computed; *pipeswitch*: they are read by one loader while others are computed with, and all stay (the papers' baseline); *sequential*: a piece is read, then computed with; *sync*: two buffers in turns; *async*: a ring of the size of two pieces; *pipeload-m*: m loaders, and a ring of m + 1 layers; *auto*: the smallest buffer and the fewest loaders of those that a short run each finds fastest; *ring-b x m*: a ring of b pieces, m loaders; *keep-p%*: memory for p% of the weights, what fits stays.",
        "*Bytes / rate*: all pieces of the model over what the disk is throttled to, times the programs of a request (one for each token that is made); where each loader is limited, over all loaders.",
        "*Over preload*: over the time that the request takes when all weights are in memory.",
        "*Planned*: what the plan says, less the 32 MB that it keeps for a worker's process; *resident* is what the device's process takes on top of what it took before it opened the plan. The group's limit is the whole of the plan.",
        "A piece is at most 16 MiB, a matrix of a layer or some of its columns.",
    ];
    let not_kept = [
        "The disk is a virtual one that others share; its own rate varies from hour to hour.",
        "Loaders and kernels are on the two halves of one core.",
    ];
    let notes = notes.map(str::to_owned).to_vec();
    publish(record, (NAME, STORY), (tables, notes, charts), &not_kept, output)
}

fn policies(record: &Record, disk: Disk, title: &str, names: &[String]) -> Table {
    let mut columns =
        vec!["model", "policy", "request, ms", "faster than pipeswitch by", "over preload by"];
    if matches!(disk, Disk::Throttled | Disk::Each) {
        columns.extend(["bytes / rate, ms", "over that by"]);
    }
    columns.extend(MEMORY);
    columns.push("stalls, ms");
    columns.extend(["the paper: faster by", "memory"]);
    let mut table = Table::new(title, &columns);
    for model in names {
        let median = |policy, value: &str| {
            find(record, disk, model, policy).map_or(f64::NAN, |cell| cell.spread(value).median)
        };
        let (base, held) =
            (median(Policy::PipeSwitch, "run_ms"), median(Policy::Preload, "run_ms"));
        for policy in POLICIES.into_iter().chain(KEEPS.map(Policy::Keep)) {
            let Some(cell) = find(record, disk, model, policy) else { continue };
            let median = cell.spread(value(policy)).median;
            let mut row = vec![
                model.clone(),
                policy.name(),
                figure(cell, value(policy)),
                shown(base / median, 2),
                percent(median / held - 1.0),
            ];
            if matches!(disk, Disk::Throttled | Disk::Each) {
                let keeps = matches!(policy, Policy::Keep(_));
                let bound = if keeps { f64::NAN } else { bound(cell, disk) };
                row.extend([shown(bound, 0), percent(median / bound - 1.0)]);
            }
            row.extend(memory(cell));
            row.push(figure(cell, "stalled_ms"));
            let (faster, memory) = hermes(model, policy).unwrap_or((f64::NAN, f64::NAN));
            row.extend([shown(faster, 2), percent(memory)]);
            table.row(row);
        }
    }
    table
}

/// Adds the tables and charts of delay over memory: over buffers and loaders, and over the weights that stay.
fn sweeps(record: &Record, tables: &mut Vec<Table>, charts: &mut Vec<(&'static str, Chart)>) {
    let point = |cell: &Cell| {
        let spread = cell.spread("run_ms");
        let x = fact(cell, "weights_mb") / fact(cell, "model_mb") * 100.0;
        Point { x, y: spread.median, low: spread.low, high: spread.high }
    };
    let chart = |title: String, series: Vec<Series>| Chart {
        title,
        x: axis("weights in memory, % of the model"),
        y: Axis { log: true, ..axis("ms") },
        kind: ChartKind::Lines { series },
    };
    let line = |name: String, points: Vec<Point>| Series { name, points, dashed: false };
    for (disk, suffix, title, buffers, loaders) in [
        (Disk::Free, "-buffers", "the disk as it is", &SWEEP_FREE.0[..], &SWEEP_FREE.1[..]),
        (Disk::Each, "-loaders", "a limit for each loader", &SWEEP_EACH.0[..], &SWEEP_EACH.1[..]),
    ] {
        let mut series = Vec::new();
        let say = format!("Delay over buffers and loaders, {title}");
        let mut table = Table::new(
            &say,
            &[
                "model",
                "buffer, pieces",
                "loaders",
                "request, ms",
                "weights in memory, MB",
                "of the model",
            ],
        );
        for model in models(record, disk.name()) {
            for agents in loaders {
                let found = buffers.iter().filter_map(|buffer| {
                    Some((*buffer, find(record, disk, &model, Policy::Ring(*buffer, *agents))?))
                });
                let found: Vec<_> = found.collect();
                for (buffer, cell) in &found {
                    table.row([
                        model.clone(),
                        buffer.to_string(),
                        agents.to_string(),
                        figure(cell, "run_ms"),
                        shown(fact(cell, "weights_mb"), 1),
                        percent(fact(cell, "weights_mb") / fact(cell, "model_mb")),
                    ]);
                }
                if !found.is_empty() {
                    let points = found.iter().map(|(_, cell)| point(cell)).collect();
                    let many = if *agents == 1 { "loader" } else { "loaders" };
                    series.push(line(format!("{model}, {agents} {many}"), points));
                }
            }
        }
        if !series.is_empty() {
            tables.push(table);
            charts.push((suffix, chart(say, series)));
        }
    }
    let mut series = Vec::new();
    for model in models(record, Disk::Free.name()) {
        let found = KEEPS.map(|keep| find(record, Disk::Free, &model, Policy::Keep(keep)));
        let points: Vec<Point> = found.into_iter().flatten().map(point).collect();
        if !points.is_empty() {
            series.push(line(model, points));
        }
    }
    if !series.is_empty() {
        charts.push((
            "-kept",
            chart("Making a text: delay over what stays in memory".to_owned(), series),
        ));
    }
}

fn requests(record: &Record) -> Option<Table> {
    let mut columns = vec!["model", "policy", "requests"];
    columns.extend(MEMORY);
    columns.extend([
        "limit, MB",
        "page cache at the end, MB",
        "limit met, times",
        "pages read again",
    ]);
    let mut table =
        Table::new("Many requests in a row, in a group whose limit is the plan", &columns);
    let cells = record.cells.iter().filter(|cell| cell.key.starts_with(MANY));
    let mut any = false;
    for cell in cells {
        any = true;
        let label = |name: &str| cell.labels.get(name).cloned().unwrap_or_default();
        let mut row = vec![label("model"), label("policy"), shown(fact(cell, "requests"), 0)];
        row.extend(memory(cell));
        row.push(shown(fact(cell, "limit_mb"), 1));
        row.extend(
            ["cache_mb", "refused", "refaults"].map(|name| shown(cell.spread(name).median, 0)),
        );
        table.row(row);
    }
    any.then_some(table)
}

fn beside(record: &Record) -> Option<Table> {
    let columns = ["model", "loaders, jobs", "galaxy, MB/s", "fio, MB/s", "galaxy of fio"];
    let mut table = Table::new(
        "All pieces read, checksums compared, beside fio: the same file, 2 MiB at a time, direct",
        &columns,
    );
    let mut any = false;
    for cell in record.cells.iter().filter(|cell| cell.key.starts_with(BESIDE)) {
        any = true;
        let label = |name: &str| cell.labels.get(name).cloned().unwrap_or_default();
        let of = ["ours_mb_s", "fio_mb_s", "of_fio"].map(|name| figure(cell, name));
        let [ours, fio, ratio] = of;
        table.row([label("model"), label("policy"), ours, fio, ratio]);
    }
    any.then_some(table)
}

fn together(record: &Record) -> Option<Table> {
    let cell = record.cells.iter().find(|cell| cell.key.starts_with(TOGETHER))?;
    let title = "Three devices whose memory does not hold the model together";
    let mut table = Table::new(title, &["what", "value"]);
    let labels = ["model", "plan", "tokens"].map(|name| (name, cell.labels.get(name).cloned()));
    for (name, value) in labels {
        table.row([name.to_owned(), value.unwrap_or_default()]);
    }
    if let Some(sample) = cell.samples.last() {
        for (name, value) in sample.values.iter() {
            table.row([name.clone(), shown(*value, 1)]);
        }
    }
    Some(table)
}
