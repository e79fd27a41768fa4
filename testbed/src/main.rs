//! `galaxy-testbed`: emulated devices and links, measurements and long checks that anyone can run.

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use galaxy_common::WireType;
use galaxy_testbed::{
    ballast, calibrate, chaos, coldstart, commands, drift, evaluation, experiment, forward, golden,
    hostile, inside, join, kernels, lean, links, metronome, models, orders, probes, quotas, reader,
};
use std::{path::PathBuf, process::ExitCode, time::Duration};

#[derive(Parser)]
#[command(version, about = "Emulated devices and links, measurements, and long checks")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Makes devices and links on this machine, with a worker on each device.
    Up(commands::Up),
    /// Removes a testbed, also one that a crash left.
    Down {
        /// The testbed's name [default: the only one].
        name: Option<String>,
        /// Every testbed that is up.
        #[arg(long)]
        all: bool,
    },
    /// Shows the testbeds that are up, and their devices.
    Status {
        /// The testbed's name [default: all].
        name: Option<String>,
    },
    /// Runs a command on a device, or at the place of the coordinator.
    Exec(commands::Exec),
    /// Runs an experiment; without a name, lists them.
    Run(experiment::Options),
    /// Writes the pages of the evaluation, from the records and from notes by hand.
    Report(evaluation::Options),
    /// Slows one device under load, and shows when the coordinator has moved work away from it.
    Drift(drift::Options),
    /// Measures the time to the first answer when only the coordinator has the model.
    Coldstart(coldstart::Options),
    /// Measures the way from two bare machines to an answer over both, by joining.
    Join(join::Options),
    /// Writes models with random weights in the shapes of well-known ones, once.
    Models(models::Options),
    /// Measures what the order of least memory saves in networks, and how long it takes to find.
    Orders(orders::Options),
    /// Measures how near the links of an environment come to what was asked for.
    Links(links::Options),
    /// Measures how the probes of `galaxy profile` find rates, and how long they take.
    Probes(probes::Options),
    /// Measures how near devices come to their quotas, second by second, and whether limits kill.
    Quotas(quotas::Options),
    /// Compares every family, strategy and split with the golden outputs.
    Golden {
        /// The whole matrix instead of pairwise combinations.
        #[arg(long)]
        full: bool,
        /// Half precision (f16) on the wire, with a tolerance of 3e-2.
        #[arg(long)]
        half: bool,
    },
    /// Kills, freezes and unplugs devices and the coordinator under many clients, who must not notice.
    Chaos(chaos::Options),
    /// Attacks a cluster on this machine, and measures how honest clients fare meanwhile.
    Hostile(hostile::Options),
    /// Measures how lean a worker is: start, idle time, peak memory, memory over many requests.
    Lean(lean::Options),
    /// Measures kernels: against what a core can do, cut into parts, in 16 bits, on two threads.
    Kernels(kernels::Options),
    /// Measures what it is asked for on standard input, one request on each line.
    #[command(hide = true)]
    KernelsServe(kernels::ServeOptions),
    /// Shows what the comparison of kernels with PyTorch found.
    #[command(hide = true)]
    KernelsShow(kernels::ShowOptions),
    /// Delays and loses packets on the links of a testbed.
    #[command(hide = true)]
    Forward {
        /// The testbed's name.
        testbed: String,
        /// Its links that delay or lose, as JSON.
        links: String,
    },
    /// Becomes a program on a device.
    #[command(hide = true)]
    Inside(inside::Options),
    /// Runs the metronome, by which short quotas hold.
    #[command(hide = true)]
    Metronome(metronome::Options),
    /// Keeps a core busy, and prints how much of it this process got.
    #[command(hide = true)]
    Busy(quotas::BusyOptions),
    /// Runs requests of one device, one on each line.
    #[command(hide = true)]
    Reader(reader::Options),
    /// Takes a number of bytes of memory.
    #[command(hide = true)]
    Hog(quotas::HogOptions),
    /// Reads a file past the page cache.
    #[command(hide = true)]
    Read(quotas::ReadOptions),
    /// Takes a quota that nobody uses.
    #[command(hide = true)]
    Ballast,
    /// Prints the speed that the calibrating batch reaches.
    #[command(hide = true)]
    Speed {
        /// The directory of the calibrating model.
        model: PathBuf,
        /// The length of the measurement, in ms.
        window: u64,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Up(options) => commands::up(&options),
        Command::Down { name, all } => commands::down(name.as_deref(), all),
        Command::Status { name } => commands::status(name.as_deref()),
        Command::Exec(options) => commands::exec(&options),
        Command::Run(options) => experiment::run(&options),
        Command::Report(options) => evaluation::run(&options),
        Command::Drift(options) => drift::run(&options),
        Command::Coldstart(options) => coldstart::run(&options),
        Command::Join(options) => join::run(&options),
        Command::Models(options) => models::run(&options),
        Command::Orders(options) => orders::run(&options),
        Command::Links(options) => links::run(&options),
        Command::Probes(options) => probes::run(&options),
        Command::Quotas(options) => quotas::run(&options),
        Command::Reader(options) => reader::serve(&options),
        Command::Golden { full, half } => golden(full, half),
        Command::Chaos(options) => chaos::run(&options),
        Command::Hostile(options) => hostile::run(&options),
        Command::Lean(options) => lean::run(&options),
        Command::Kernels(options) => kernels::run(&options),
        Command::KernelsServe(options) => kernels::serve(&options),
        Command::KernelsShow(options) => kernels::show(&options),
        Command::Forward { testbed, links } => forward::run(&testbed, &links),
        Command::Inside(options) => inside::run(&options),
        Command::Metronome(options) => metronome::run(&options),
        Command::Busy(options) => quotas::busy(&options),
        Command::Hog(options) => quotas::hog(&options),
        Command::Read(options) => quotas::read(&options),
        Command::Ballast => ballast::run(),
        Command::Speed { model, window } => calibrate::speed(&model, Duration::from_millis(window)),
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
