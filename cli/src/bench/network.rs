//! `galaxy bench network`: how long a network of an ONNX file takes, and which of its operators take most of it.

use crate::{
    failure::Failure,
    in_process::cores,
    networks::Shapes,
    table::{row, table},
};
use clap::Args;
use galaxy_common::{Bytes, Spread};
use galaxy_engine::network::{NetworkEngine, NetworkError, NetworkTensor};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

/// How many operators are shown.
const SHOWN: usize = 12;

/// Arguments of `galaxy bench network`.
#[derive(Args, Debug)]
pub(super) struct NetworkArgs {
    /// ONNX file to time.
    #[arg(value_name = "FILE.onnx")]
    model: PathBuf,
    #[command(flatten)]
    shapes: Shapes,
    /// Kernel threads [default: the cores of this machine].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Runs to time, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// What was measured of a network.
#[derive(Serialize)]
pub(super) struct Findings {
    model: String,
    threads: u16,
    /// A whole run, in milliseconds.
    run: Spread,
    load_ms: f64,
    weight_bytes: u64,
    arena_bytes: u64,
    steps: usize,
    /// The median of each kind of operator, all of a run together, in milliseconds.
    operators: Vec<(String, f64)>,
    /// The median of each step, in milliseconds, the longest first.
    longest: Vec<(String, f64)>,
}

/// Times a network.
pub(super) fn measured(args: &NetworkArgs) -> Result<Findings, Failure> {
    let wrong = |error: NetworkError| Failure::new(error.to_string());
    let begin = Instant::now();
    let (file, network) = args.shapes.open(&args.model)?;
    let threads = args.threads.unwrap_or_else(cores);
    let mut engine = NetworkEngine::load(&file, &network, threads).map_err(wrong)?;
    let load_ms = begin.elapsed().as_secs_f64() * 1e3;
    let inputs: Vec<NetworkTensor> = engine.inputs().map(|(_, dims)| any(dims)).collect();
    let (mut runs, mut steps): (Vec<f64>, Vec<Vec<f64>>) = Default::default();
    let mut names: Vec<String> = engine.order().map(str::to_owned).collect();
    steps.resize(names.len(), Vec::new());
    for number in 0..args.runs + 2 {
        let begin = Instant::now();
        let (mut last, mut at) = (begin, 0);
        let mut over = || {
            let now = Instant::now();
            if number >= 2 {
                steps[at].push((now - last).as_secs_f64() * 1e3);
            }
            (last, at) = (now, at + 1);
        };
        engine.run_with(&inputs, &mut over).map_err(wrong)?;
        if number >= 2 {
            runs.push(begin.elapsed().as_secs_f64() * 1e3);
        }
    }
    let medians = steps.iter().map(|times| Spread::of(times).median);
    let mut longest: Vec<(String, f64)> = names.drain(..).zip(medians).collect();
    let mut kinds: BTreeMap<String, f64> = BTreeMap::new();
    for (name, time) in &longest {
        *kinds.entry(kind(name).to_owned()).or_default() += time;
    }
    let mut operators: Vec<(String, f64)> = kinds.into_iter().collect();
    operators.sort_by(|a, b| b.1.total_cmp(&a.1));
    longest.sort_by(|a, b| b.1.total_cmp(&a.1));
    let memory = engine.memory();
    let (Bytes(weight_bytes), Bytes(arena_bytes)) = (memory.weights, memory.arena);
    let model = name(&args.model);
    let (run, steps) = (Spread::of(&runs), steps.len());
    Ok(Findings {
        model,
        threads,
        run,
        load_ms,
        weight_bytes,
        arena_bytes,
        steps,
        operators,
        longest,
    })
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The operator of a step, which stands in parentheses behind the name of its node.
fn kind(step: &str) -> &str {
    let operator = step.rsplit_once(" (").and_then(|(_, operator)| operator.strip_suffix(')'));
    operator.unwrap_or("change of layout")
}

/// A tensor of this shape of numbers between 0 and 1.
fn any(dims: &[u64]) -> NetworkTensor {
    let count = dims.iter().product::<u64>();
    let values = (0..count).map(|at| (at * 7919 % 1021) as f32 / 1021.0).collect();
    NetworkTensor { dims: dims.to_vec(), values }
}

/// What was measured, for people.
pub(super) fn text(of: &Findings) -> String {
    let run = of.run;
    let mut out = format!(
        "{}, {} steps, threads: {}\n  a run     {:.2} ms ({:.2} to {:.2}, n={})\n  loading   {:.0} ms\n  weights   {}, values {}\n\n",
        of.model,
        of.steps,
        of.threads,
        run.median,
        run.low,
        run.high,
        run.n,
        of.load_ms,
        Bytes(of.weight_bytes),
        Bytes(of.arena_bytes)
    );
    let lines = |title: &str, all: &[(String, f64)]| {
        let line = |(name, time): &(String, f64)| {
            let share = 100.0 * time / run.median.max(f64::MIN_POSITIVE);
            row([name, &format!("{time:.3}"), &format!("{share:.1}%")])
        };
        let head = row([title, "ms", "of a run"]);
        table(&std::iter::once(head).chain(all.iter().take(SHOWN).map(line)).collect::<Vec<_>>())
    };
    out += &lines("operators", &of.operators);
    out.push('\n');
    out + &lines("longest steps", &of.longest)
}
