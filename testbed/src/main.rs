//! `galaxy-testbed`: measurements and long checks that anyone can run.

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use galaxy_common::WireType;
use galaxy_testbed::{golden, lean, overlap};
#[cfg(target_os = "linux")]
use galaxy_testbed::{inside, metronome, quotas};

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
    /// The coordinator's side of `overlap`.
    #[command(hide = true)]
    OverlapInner {
        /// What to do, as JSON.
        inner: String,
    },
    /// Becomes a program on a device.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    Inside(inside::Options),
    /// Makes short quotas true.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    Metronome(metronome::Options),
    /// Computes, and says how much it could.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    Busy(quotas::BusyOptions),
    /// Takes memory.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    Hog(quotas::HogOptions),
    /// Reads a file past the page cache.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    Read(quotas::ReadOptions),
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Golden { full, half } => golden(full, half),
        Command::Overlap(options) => overlap::run(&options),
        Command::Lean(options) => lean::run(&options),
        Command::OverlapInner { inner } => overlap::inner(&inner),
        #[cfg(target_os = "linux")]
        Command::Inside(options) => inside::run(&options),
        #[cfg(target_os = "linux")]
        Command::Metronome(options) => metronome::run(&options),
        #[cfg(target_os = "linux")]
        Command::Busy(options) => quotas::busy(&options),
        #[cfg(target_os = "linux")]
        Command::Hog(options) => quotas::hog(&options),
        #[cfg(target_os = "linux")]
        Command::Read(options) => quotas::read(&options),
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
