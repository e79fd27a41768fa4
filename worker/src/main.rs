//! `galaxy-worker`: the program that runs on each device.

use anyhow::Context;
use clap::Parser;
use galaxy_common::{Bytes, printable::lines};
use galaxy_engine::compute::{
    choice::EngineChoice,
    kernels::instructions::{self, Instructions},
};
use galaxy_proto::{
    identity::Role,
    join::{home, identity_in},
};
use galaxy_worker::{CacheConfig, Worker, WorkerConfig};
use std::{
    io::{IsTerminal, Write},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
};
use tokio::signal::unix::{SignalKind, signal};

/// Threads of the I/O side; kernels have their own.
const IO_THREADS: usize = 2;
/// Threads for what blocks: loading, lowering.
const BLOCKING_THREADS: usize = 16;

/// Runs on each device: holds a part of the model, and computes with the others.
#[derive(Parser)]
#[command(name = "galaxy-worker", disable_version_flag = true)]
struct Flags {
    /// Directory of this device's identity, made by `galaxy keys issue NAME --role device` [default:
    /// the one that it joined with, device under $GALAXY_HOME or ~/.galaxy]
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Where to listen; port 0 takes any that is free
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:7100")]
    listen: SocketAddr,
    /// Address from which other devices are dialled over TCP, where this one has several [default:
    /// what the system takes]; QUIC has that of --listen
    #[arg(long, value_name = "ADDR")]
    from: Option<IpAddr>,
    /// Directory whose subdirectories are models, or one model's directory [default: none, the
    /// coordinator and other devices bring what is needed]
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// Where to keep what is brought of models that are not under --models; no two workers share it
    /// [default: galaxy/NAME under $XDG_CACHE_HOME or ~/.cache; of a device that joined, beside its identity]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Most bytes of it on disk; with 0B, models that are not under --models are refused
    #[arg(long, value_name = "SIZE", default_value = "20GB")]
    cache_bytes: Bytes,
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
    /// End when the program that started this one does
    #[arg(long, hide = true)]
    with_parent: bool,
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
            eprintln!("error: {}", lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn run(flags: Flags) -> anyhow::Result<()> {
    if flags.with_parent {
        use rustix::process::{Signal, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::TERM)).context("--with-parent")?;
    }
    if let Some(set) = flags.instructions {
        instructions::limit(set).context("--instructions, GALAXY_INSTRUCTIONS")?;
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let joined = home().map(|home| identity_in(&home, Role::Device)).filter(|dir| dir.exists());
    let identity = flags.identity.clone().or(joined).context(
        "this device has not joined a cluster: run `galaxy join`, with a line of `galaxy invite`, or give --identity DIR",
    )?;
    let cache = match flags.cache_bytes {
        Bytes(0) => None,
        limit => {
            let own = || match &flags.identity {
                Some(identity) => default_cache(identity),
                None => Some(identity.parent()?.join("cache")),
            };
            let dir = flags.cache.or_else(own);
            // Without a home directory there is no place for a cache, and a worker with models needs none.
            dir.map(|dir| CacheConfig { dir, limit })
        }
    };
    let config = WorkerConfig {
        identity,
        listen: flags.listen,
        from: flags.from,
        models: flags.models,
        cache,
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
        // Before the address is printed: whoever reads it may end this process at once.
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

/// Where this device caches models: under its name, since no two workers share a cache.
fn default_cache(identity: &Path) -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let caches = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    // "." has no base name, where an absolute path has one.
    let identity = identity.canonicalize().unwrap_or_else(|_| identity.to_owned());
    Some(caches.join("galaxy").join(identity.file_name()?))
}

/// Ends the process on a second signal, without waiting until all is closed. Not by returning: that joins threads.
fn at_once() -> ! {
    tracing::warn!("told twice: ending at once");
    std::process::exit(1)
}
