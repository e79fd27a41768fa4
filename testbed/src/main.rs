//! `galaxy-testbed`: measurements and long checks that anyone can run.

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use galaxy_common::WireType;
use galaxy_testbed::{forward, golden, lean, links, overlap};

#[derive(Parser)]
#[command(version, about = "Measurements and long checks that anyone can run")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compares every family, strategy and split with the golden outputs.
    Golden {
        /// The whole matrix instead of pairwise combinations.
        #[arg(long)]
        full: bool,
        /// f16 on the wire, with a tolerance of 3e-2.
        #[arg(long)]
        half: bool,
    },
    /// Measures how much communication tiles hide, on two emulated devices (needs root).
    Overlap(overlap::Options),
    /// Measures how lean a worker is: start, idle time, peak memory, memory over many requests.
    Lean(lean::Options),
    /// Measures how near the links of an environment come to what was asked for (needs root and
    /// iperf3).
    Links(links::Options),
    /// Delays and loses what the links of a testbed carry.
    #[command(hide = true)]
    Forward {
        /// The testbed.
        testbed: String,
        /// Its links that delay or lose, as JSON.
        links: String,
    },
    /// The coordinator's side of `overlap`.
    #[command(hide = true)]
    OverlapInner {
        /// What to do, as JSON.
        inner: String,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Golden { full, half } => golden(full, half),
        Command::Overlap(options) => overlap::run(&options),
        Command::Lean(options) => lean::run(&options),
        Command::Links(options) => links::run(&options),
        Command::Forward { testbed, links } => forward::run(&testbed, &links),
        Command::OverlapInner { inner } => overlap::inner(&inner),
    }
}

fn golden(full: bool, half: bool) -> Result<()> {
    let cases = golden::cases(full);
    let (wire, tolerance) =
        if half { (WireType::F16, 3e-2) } else { (WireType::F32, golden::TOLERANCE) };
    let (mut worst, mut failed) = (0f32, 0);
    for (done, case) in cases.iter().enumerate() {
        match golden::run(case, wire, tolerance) {
            Ok(off) => worst = worst.max(off),
            Err(error) => {
                failed += 1;
                eprintln!("{case:?}: {error:#}");
            }
        }
        if (done + 1) % 50 == 0 {
            eprintln!("{} of {} cases, worst deviation {worst:.2e}", done + 1, cases.len());
        }
    }
    println!(
        "{} cases, {failed} failed, worst deviation {worst:.2e} (bound {tolerance:.0e})",
        cases.len()
    );
    if failed > 0 {
        bail!("{failed} cases failed");
    }
    Ok(())
}
