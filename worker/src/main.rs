//! `galaxy-worker`: runs on each device.

use anyhow::Context;
use clap::Parser;
use galaxy_common::Bytes;
use galaxy_engine::compute::{
    choice::EngineChoice,
    kernels::instructions::{self, Instructions},
};
use galaxy_worker::{Worker, WorkerConfig};
use std::{
    io::{IsTerminal, Write},
    net::SocketAddr,
    path::PathBuf,
    process::ExitCode,
};
use tokio::signal::unix::{SignalKind, signal};

/// Threads of the I/O side; kernels have their own.
const IO_THREADS: usize = 2;
/// Threads for what blocks: loading, and one for each program that runs or waits.
const BLOCKING_THREADS: usize = 16;

/// Runs on each device: holds a part of the model, and computes with the others.
#[derive(Parser)]
#[command(name = "galaxy-worker", disable_version_flag = true)]
struct Flags {
    /// Directory of this device's identity, made by `galaxy keys issue NAME --role device`
    #[arg(long, value_name = "DIR", required_unless_present = "version")]
    identity: Option<PathBuf>,
    /// Where to listen; port 0 takes any that is free
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:7100")]
    listen: SocketAddr,
    /// Directory whose subdirectories are models, or one model's directory
    #[arg(long, value_name = "DIR", required_unless_present = "version")]
    models: Option<PathBuf>,
    /// What to compute with: cpu, or burn-flex, burn-wgpu[:N], burn-cuda[:N] where compiled in
    #[arg(long, value_name = "ENGINE", default_value = "cpu")]
    engine: EngineChoice,
    /// Cores that kernels may use [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<u16>,
    /// Memory to grant, like 1.5GB [default: what the coordinator's cluster file says]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Allow ring links without TLS: only on isolated networks, and for measuring
    #[arg(long)]
    plain: bool,
    /// Vector instructions of kernels, instead of the best that there are: avx512, avx2, neon or
    /// portable
    #[arg(long, value_name = "SET", env = "GALAXY_INSTRUCTIONS")]
    instructions: Option<Instructions>,
    /// Print version, commit and protocol
    #[arg(long)]
    version: bool,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    if flags.version {
        println!("galaxy-worker {}", galaxy_proto::version_line());
        return ExitCode::SUCCESS;
    }
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match run(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: Flags) -> anyhow::Result<()> {
    if let Some(set) = flags.instructions {
        instructions::limit(set).context("--instructions, GALAXY_INSTRUCTIONS")?;
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let config = WorkerConfig {
        identity: flags.identity.context("--identity DIR is needed")?,
        listen: flags.listen,
        models: flags.models.context("--models DIR is needed")?,
        engine: flags.engine,
        threads: flags.threads.unwrap_or(u16::try_from(cores).unwrap_or(u16::MAX)),
        memory: flags.memory,
        plain: flags.plain,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("io")
        .enable_all()
        .build()
        .context("threads cannot be started")?;
    runtime.block_on(async {
        // Before the address is printed: whoever reads it may end us at once.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let worker = Worker::start(config).await?;
        let mut out = std::io::stdout();
        writeln!(out, "listening on {}", worker.address())?;
        out.flush()?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("draining");
        tokio::select! {
            () = worker.shutdown() => {}
            _ = terminate.recv() => at_once(),
            _ = interrupt.recv() => at_once(),
        }
        Ok(())
    })
}

/// For who does not want to wait until all is closed. Not by returning: that joins threads.
fn at_once() -> ! {
    tracing::warn!("told twice: ending at once");
    std::process::exit(1)
}
