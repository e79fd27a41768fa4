//! Measures what one more device does to predicted latency: plans for random clusters of 8 to 63
//! devices and for the same with one more device, and writes a line of JSON for each. A case that the
//! file has is not planned again; two files of two versions can be compared.
//!
//!     cargo run --release -p galaxy-planner --example additions -- FILE FROM TO
//!     cargo run --release -p galaxy-planner --example additions -- FILE [OTHER]

use galaxy_planner::{
    Allowed, Offer, Planned, PlanningError, Request, Workload, plan, split, synthetic,
};
use std::{collections::BTreeMap, error::Error, fs, io::Write, time::Instant};

#[path = "../tests/additions/sample.rs"]
mod sample;
#[path = "../src/testing.rs"]
#[allow(dead_code)]
mod testing;

/// Predicted latency before and after the addition. Without a plan it is endless: JSON has null for
/// it.
type Case = (f64, f64);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [file, from, to] => run(file, from.parse()?, to.parse()?)?,
        [file] => report(&read(file)),
        [file, other] if other.parse::<u64>().is_err() => compare(&read(file), &read(other)),
        _ => eprintln!("give FILE FROM TO, FILE, or FILE OTHER"),
    }
    Ok(())
}

/// Plans the cases from one seed to another that the file lacks.
fn run(file: &str, from: u64, to: u64) -> std::io::Result<()> {
    let known = read(file);
    let mut out = fs::OpenOptions::new().append(true).create(true).open(file)?;
    for seed in (from..to).filter(|seed| !known.contains_key(seed)) {
        let case = sample::addition(seed, 8, 63);
        let (before, took_before) = timed(&case.request(case.before()));
        let (after, took_after) = timed(&case.request(&case.after.offers));
        let latency = |planned: &Result<Planned, PlanningError>| {
            planned.as_ref().map_or("null".to_owned(), |p| p.prediction.latency.to_string())
        };
        let what = |planned: &Result<Planned, PlanningError>| match planned {
            Ok(planned) => planned.what.clone(),
            Err(error) => error.to_string(),
        };
        let line = format!(
            "{{\"seed\": {seed}, \"before\": {}, \"after\": {}, \"seconds_before\": {took_before:.3}, \"seconds_after\": {took_after:.3}, \"case\": {:?}, \"plan_before\": {:?}, \"plan_after\": {:?}}}\n",
            latency(&before),
            latency(&after),
            case.what,
            what(&before),
            what(&after),
        );
        out.write_all(line.as_bytes())?;
    }
    report(&read(file));
    Ok(())
}

fn timed(request: &Request<'_>) -> (Result<Planned, PlanningError>, f64) {
    let begin = Instant::now();
    let planned = plan(request);
    (planned, begin.elapsed().as_secs_f64())
}

/// The cases of a file that this example wrote; none where there is no file.
fn read(file: &str) -> BTreeMap<u64, Case> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let number = |line: &str, key: &str| {
        let rest = line.split_once(&format!("\"{key}\": "))?.1;
        let number = rest.split([',', '}']).next()?;
        if number == "null" { Some(f64::INFINITY) } else { number.parse::<f64>().ok() }
    };
    let case = |line: &str| {
        let seed = number(line, "seed")? as u64;
        Some((seed, (number(line, "before")?, number(line, "after")?)))
    };
    text.lines().filter_map(case).collect()
}

/// Prints how latencies with one more device compare with those before.
fn report(cases: &BTreeMap<u64, Case>) {
    let with_plan = cases.iter().filter(|(_, case)| case.0.is_finite());
    ratios("one device more", with_plan.map(|(&seed, &(before, after))| (after / before, seed)));
}

/// Prints how latencies of one file compare with those of another.
fn compare(cases: &BTreeMap<u64, Case>, other: &BTreeMap<u64, Case>) {
    let both = || cases.iter().filter_map(|(seed, case)| Some((*seed, *case, *other.get(seed)?)));
    let before = both().filter(|(_, _, other)| other.0.is_finite());
    ratios("against the other, before", before.map(|(seed, own, other)| (own.0 / other.0, seed)));
    let after = both().filter(|(_, _, other)| other.1.is_finite());
    ratios("against the other, after", after.map(|(seed, own, other)| (own.1 / other.1, seed)));
}

fn ratios(what: &str, all: impl Iterator<Item = (f64, u64)>) {
    let mut all: Vec<(f64, u64)> = all.collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some(worst) = all.last() else { return println!("{what}: no cases") };
    let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize].0;
    let above = |limit: f64| all.iter().filter(|r| r.0 > limit).count();
    println!(
        "{what}: {} cases, worst {:.4} (seed {}), median {:.4}, one in ten below {:.4}; {} above 1, {} above 1.001, {} above 1.01",
        all.len(),
        worst.0,
        worst.1,
        at(0.5),
        at(0.1),
        above(1.0 + 1e-9),
        above(1.001),
        above(1.01),
    );
    let worst: Vec<String> =
        all.iter().rev().take(12).map(|r| format!("{} ({:.4})", r.1, r.0)).collect();
    println!("    the worst: {}", worst.join(", "));
}
