//! `galaxy bench decode`: how fast one device decodes, against how fast it reads memory.

use crate::{
    failure::Failure,
    in_process::{self, InProcess, Rounding, Settings},
};
use clap::Args;
use galaxy_common::{
    BatchShape, Bytes, Cache, CacheType, CandidateCount, Sampling, Segment, Sequence, Spread,
    Wanted, plan::Phase,
};
use galaxy_engine::{
    compute::kernels::instructions::Instructions,
    generate::{BURST_STEPS, Goal},
    local::{LocalError, LocalGeneration},
    measure,
};
use galaxy_graph::{budget, operators::OperatorGraph, program::Lane};
use serde::Serialize;
use std::{fmt::Write as _, path::PathBuf};

pub const MEANING: &str = "\
What the figures mean:

  token     from one token to the next, over bursts of 16, in the middle of all
  GB/s      bytes of weights over that: each token reads all of them once
  memory    reading a buffer far larger than the last-level cache, measured between the
            bursts: nothing that comes from memory can be faster
  of memory the one over the other, each burst with the measurement beside it
  besides   what a token takes besides the operations of the compute lane

A model that fits into the last-level cache may exceed 100%. Whatever else runs on this
device shows as spread; let nothing else run.";

/// Arguments of `galaxy bench decode`.
#[derive(Args, Debug)]
pub struct DecodeArgs {
    /// The decoder to run: a model directory or a GGUF file.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    rounding: Rounding,
    /// Kernel threads [default: the cores of this machine].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Length of the prompt, in rows (tokens).
    #[arg(long, alias = "past", value_name = "ROWS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
    prompt_rows: u32,
    /// Type of keys and values in the KV cache: f32, f16 or q8 [default: f32].
    #[arg(long, alias = "cache", value_name = "TYPE")]
    kv_cache_format: Option<CacheType>,
    /// Decode bursts to time, of 16 tokens each.
    #[arg(long, alias = "stints", value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    bursts: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize, Debug)]
pub struct Findings {
    model: String,
    weights: Bytes,
    instructions: String,
    threads: u16,
    prompt_rows: u32,
    token_ms: Spread,
    /// Bytes of weights over the time of a token, in GB/s.
    reads: Spread,
    /// The rate at which the device reads memory, measured after each burst, in GB/s.
    memory: Spread,
    of_memory: Spread,
    besides_us: Spread,
}

/// Times decode bursts, and reads memory between them.
pub fn measured(args: &DecodeArgs) -> Result<Findings, Failure> {
    let model = in_process::open_model(&args.model, args.rounding)?;
    let spec = model.spec();
    let threads = args.threads.unwrap_or(in_process::cores());
    let made = args.bursts.saturating_add(1) * BURST_STEPS + 1;
    let rows = args.prompt_rows.saturating_add(made);
    if rows > spec.position_limit() {
        let (limited_by, limit) = (spec.limited_by(), spec.position_limit());
        let what = format!("{rows} rows, and {limited_by} has {limit}");
        return Err(Failure::usage(what).todo("lower --prompt-rows or --bursts"));
    }
    let cache =
        Cache { rows: Cache::taken(rows), values: args.kv_cache_format.unwrap_or(CacheType::F32) };
    let settings = Settings { threads, ..Settings::single() };
    let alone = InProcess::start(model.clone(), &settings, args.prompt_rows, cache)?;
    let cluster = alone.cluster();
    let formats = model.formats();
    let weights = budget::weights(&OperatorGraph::of(spec), formats, &cluster.plan().ring[0]);
    let failed = |error: LocalError| Failure::new(error.to_string());
    let prompt: Vec<u32> = (0..args.prompt_rows).map(|at| at * 7919 % spec.vocabulary).collect();
    let text =
        Sequence { slot: 0, rows, sampling: Sampling::greedy(), tokens: Vec::new(), prompt: 0 };
    cluster.begin(&text).map_err(failed)?;
    let mut breadth = CandidateCount::Few;
    let mut make = |phase, context_len, tokens: &[u32], count| {
        let (rows, wanted) = (tokens.len() as u32, Wanted::Token(breadth));
        let segment = Segment { slot: 0, context_len, cached: true, rows, wanted };
        let shape = BatchShape::new(vec![segment]).map_err(|e| Failure::new(e.to_string()))?;
        let goals = [Goal { count, ..Goal::default() }];
        let made = cluster.generate_steps(phase, &shape, tokens, &goals, None).map_err(failed)?;
        breadth = made.decoded.candidate_counts[0];
        Ok::<LocalGeneration, Failure>(made)
    };
    let last = |made: &LocalGeneration| made.tokens[0].last().map_or(0, |told| told[0] as u32);
    let mut context_len = args.prompt_rows;
    let mut token = last(&make(Phase::Prefill, 0, &prompt, 1)?);
    let instructions = Instructions::current();
    let (mut each, mut memory) = (Vec::new(), Vec::new());
    let (mut reads, mut shares, mut besides) = (Vec::new(), Vec::new(), Vec::new());
    for burst in 0..=args.bursts {
        let made = make(Phase::Decode, context_len, &[token], BURST_STEPS)?;
        (context_len, token) = (context_len + BURST_STEPS, last(&made));
        if burst == 0 {
            // Pages and caches are there after this one.
            continue;
        }
        let report = &made.reports[0];
        let nanos = report.ended.saturating_sub(report.started) as f64 / f64::from(BURST_STEPS);
        let compute = report.lanes.iter().find(|lane| lane.lane == Lane::Compute);
        let rate = weights.0 as f64 / nanos;
        let most = measure::stream(instructions, threads).median;
        each.push(nanos * 1e-6);
        let busy = compute.map_or(0.0, |lane| lane.busy as f64) / f64::from(BURST_STEPS);
        besides.push((nanos - busy) * 1e-3);
        reads.push(rate);
        memory.push(most);
        shares.push(rate / most);
    }
    Ok(Findings {
        model: model.name().to_owned(),
        weights,
        instructions: instructions.to_string(),
        threads,
        prompt_rows: args.prompt_rows,
        token_ms: Spread::of(&each),
        reads: Spread::of(&reads),
        memory: Spread::of(&memory),
        of_memory: Spread::of(&shares),
        besides_us: Spread::of(&besides),
    })
}

pub fn text(findings: &Findings) -> String {
    let Findings { model, weights, instructions, threads, prompt_rows, .. } = findings;
    let plural = if *threads == 1 { "" } else { "s" };
    let mut out = format!(
        "{model}: {weights} of weights, {instructions}, {threads} thread{plural}, behind {prompt_rows} rows\n"
    );
    let mut line = |name: &str, spread: &Spread, scale: f64, unit: &str| {
        let [median, low, high] =
            [spread.median, spread.low, spread.high].map(|value| value * scale);
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {name:<10} {median:>8.2} ({low:.2} to {high:.2}) {unit}");
    };
    line("token", &findings.token_ms, 1.0, "ms");
    line("reads", &findings.reads, 1.0, "GB/s");
    line("memory", &findings.memory, 1.0, "GB/s");
    line("of memory", &findings.of_memory, 100.0, "%");
    line("besides", &findings.besides_us, 1.0, "us a token");
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn args(prompt_rows: u32, bursts: u32) -> DecodeArgs {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-galaxy").into();
        DecodeArgs {
            model,
            threads: Some(1),
            rounding: Rounding::default(),
            prompt_rows,
            kv_cache_format: None,
            bursts,
            json: false,
        }
    }

    #[test]
    fn decode_is_measured_and_too_long_a_context_is_refused() {
        let findings = measured(&args(8, 2)).unwrap();
        assert_eq!((findings.token_ms.n, findings.of_memory.n), (2, 2));
        assert!(findings.token_ms.low > 0.0 && findings.memory.low > 0.0);
        let said = text(&findings);
        assert!(said.contains("tiny-galaxy") && said.contains("of memory"), "{said}");
        let error = measured(&args(512, 2)).unwrap_err().to_string();
        assert!(error.contains("table of positions has 512"), "{error}");
    }
}
