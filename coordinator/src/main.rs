//! `galaxy-coord`: the coordinator of a cluster, or a model embedded in this process.

use anyhow::{Context, Result, bail};
use clap::Parser;
use galaxy_common::{
    Bytes, DeviceName, Epoch,
    plan::{CacheType, Plan, Strategy, WireType},
    printable::lines,
};
use galaxy_coord::{
    Cluster, ClusterError, Fleet, Limits, LocalFleet, Notice, RemoteFleet, Session,
    api::Api,
    audit::Audit,
    client_memory::DEFAULT_CLIENT_MEMORY,
    cluster::{DEFAULT_FILE, DEFAULT_LISTEN, DEFAULT_MAX_ROWS, DEFAULT_QUEUE, DEFAULT_TIMEOUT},
    profile::Progress,
    reception::Update,
    registry::Registry,
};
use galaxy_engine::compute::kernels::instructions::{self, Instructions};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::{ModelDir, Quantisation};
use galaxy_proto::identity::{Identity, Role};
use std::{
    collections::HashMap,
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

/// The least time between two lines about one device's loading.
const PROGRESS: Duration = Duration::from_millis(500);
/// The least time between two lines about what is measured, which takes longer.
const MEASURING: Duration = Duration::from_secs(5);
/// The most rows of an embedded model's program: more only makes activations larger.
const EMBEDDED_ROWS: u32 = 8192;
/// How many lines may wait for the console.
const LINES: usize = 256;
/// How long connections may take to end once every request is answered.
const GOODBYE: Duration = Duration::from_secs(2);

/// The coordinator of a Galaxy cluster; or, without a cluster file, a model in this process.
#[derive(Parser)]
#[command(name = "galaxy-coord", disable_version_flag = true)]
struct Flags {
    /// The cluster file (default: cluster.toml of the current directory, if it is there).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "threads", "identity", "weights_format"])]
    cluster: Option<PathBuf>,
    /// Without a cluster: the model's directory.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Without a cluster: round the model's matrices to q8, q6 or q4 as they are read, which is lossy.
    #[arg(long, value_name = "BITS")]
    weights_format: Option<Quantisation>,
    /// Without a cluster: threads for kernels (default: all cores).
    #[arg(long, value_name = "N")]
    threads: Option<u16>,
    /// Where clients are served (default: what the cluster file says, or 127.0.0.1:7000).
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,
    /// Without a cluster: the coordinator's identity; without one, plaintext on loopback only.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Without a cluster: vector instructions of kernels, instead of the best that there are:
    /// avx512, avx2, neon or portable.
    #[arg(long, value_name = "SET", env = "GALAXY_INSTRUCTIONS")]
    instructions: Option<Instructions>,
    /// Write who drained the cluster, who was refused and the like to this file, as JSON lines behind
    /// what is in it.
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
    /// End when the program that started this one does.
    #[arg(long, hide = true)]
    with_parent: bool,
    /// Print version, commit and protocol.
    #[arg(long)]
    version: bool,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    if flags.version {
        say(&format!("galaxy-coord {}", galaxy_proto::version_line()));
        return ExitCode::SUCCESS;
    }
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_max_level(tracing::Level::WARN)
        .init();
    match start(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn start(flags: Flags) -> Result<()> {
    if flags.with_parent {
        use rustix::process::{Signal, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::TERM)).context("--with-parent")?;
    }
    if let Some(set) = flags.instructions {
        instructions::limit(set).context("--instructions, GALAXY_INSTRUCTIONS")?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("no async runtime")?;
    match &flags.model {
        Some(model) => runtime.block_on(embedded(model, &flags)),
        None => runtime.block_on(cluster(&cluster_file(&flags)?, &flags)),
    }
}

/// The audit log that was asked for.
fn audit(flags: &Flags) -> Result<Audit> {
    let Some(path) = &flags.audit else { return Ok(Audit::none()) };
    Audit::open(path).with_context(|| format!("--audit {}", path.display()))
}

/// The cluster file that was given, or that of the current directory.
fn cluster_file(flags: &Flags) -> Result<PathBuf> {
    let file = flags.cluster.clone().unwrap_or_else(|| DEFAULT_FILE.into());
    if flags.threads.is_some() || flags.identity.is_some() {
        bail!("--threads and --identity are for a model in this process: give --model DIR, too");
    }
    if flags.cluster.is_none() && !file.exists() {
        bail!(
            "there is no {DEFAULT_FILE} in this directory: give --cluster FILE, or --model DIR to run a model in this process"
        );
    }
    Ok(file)
}

/// Coordinates the workers of a cluster file.
async fn cluster(file: &Path, flags: &Flags) -> Result<()> {
    let audit = audit(flags)?;
    let mut cluster = Cluster::open(file).map_err(|error| match error {
        ClusterError::Read { .. } => anyhow::Error::new(error),
        _ => anyhow::Error::new(error).context(file.display().to_string()),
    })?;
    for warning in &cluster.warnings {
        tracing::warn!("{}: {warning}", file.display());
    }
    let identity = coordinator(&cluster.identity)?;
    let model = with_warnings(cluster.open_model()?);
    let listen = flags.listen.as_deref().unwrap_or(&cluster.listen).to_owned();
    let Cluster { queue, timeout, client_memory, speculation: drafts, .. } = cluster;
    let limits = Limits { queue, timeout, client_memory, drafts };
    let name = cluster.name.clone();
    say(&format!(
        "cluster {name}: {} on {} devices by {}{}",
        model.name(),
        cluster.devices.len(),
        cluster.strategy,
        if cluster.by_hand() { ", split by hand" } else { ", split by profiles" }
    ));
    let serving = identity.clone();
    let registry = Arc::new(Registry::open(file, &cluster, &identity)?);
    cluster.devices = registry.devices()?;
    let fleet =
        RemoteFleet::start(cluster, model.clone(), identity, first_epoch(), listener_of()?)?;
    let fleet = Arc::new(fleet);
    let listener = bind(&listen).await?;
    let update: Update = {
        let fleet = fleet.clone();
        Arc::new(move |devices| {
            let fleet = fleet.clone();
            Box::pin(async move { fleet.update(devices).await })
        })
    };
    tokio::spawn(read_again(registry.clone(), update.clone()));
    let session =
        tokio::task::spawn_blocking(move || Session::new(model, fleet as Arc<dyn Fleet>, limits));
    let session = session.await?;
    let api = Api::new(session, &name).audited(audit).joined_by(registry, update);
    serve(api, listener, Some(&serving)).await
}

/// Reads the devices of the files again whenever SIGHUP comes.
async fn read_again(registry: Arc<Registry>, update: Update) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    while hangup.recv().await.is_some() {
        let registry = registry.clone();
        match tokio::task::spawn_blocking(move || registry.devices()).await {
            Ok(Ok(devices)) => {
                say(&format!(
                    "read again: {} devices; what [cluster] says is read at the start only",
                    devices.len()
                ));
                update(devices).await;
            }
            Ok(Err(error)) => say(&format!("the files are not in order, nothing changes: {error}")),
            Err(error) => say(&format!("the files were not read: {error}")),
        }
    }
}

/// Runs a model in this process.
async fn embedded(path: &Path, flags: &Flags) -> Result<()> {
    let audit = audit(flags)?;
    let identity = flags.identity.as_deref().map(coordinator).transpose()?;
    let listen = flags.listen.as_deref().unwrap_or(DEFAULT_LISTEN);
    let model = with_warnings(ModelDir::open(path)?.quantised_to(flags.weights_format)?);
    let listener = bind(listen).await?;
    if identity.is_none() && !listener.local_addr()?.ip().is_loopback() {
        bail!(
            "{listen} can be reached from other machines: give --identity, or listen on 127.0.0.1"
        );
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = flags.threads.unwrap_or(u16::try_from(cores).unwrap_or(u16::MAX)).max(1);
    let plan = alone(&model, threads)?;
    let begun = Instant::now();
    let opened = model.clone();
    let session = tokio::task::spawn_blocking(move || {
        let fleet = LocalFleet::open(opened.clone(), plan)?;
        let limits = Limits {
            queue: DEFAULT_QUEUE,
            timeout: DEFAULT_TIMEOUT,
            client_memory: DEFAULT_CLIENT_MEMORY,
            drafts: true,
        };
        Ok::<_, anyhow::Error>(Session::new(opened, Arc::new(fleet) as Arc<dyn Fleet>, limits))
    });
    let session = session.await??;
    let weights: Bytes = session.devices().iter().map(|d| d.weight_bytes).sum();
    let took = begun.elapsed().as_secs_f64();
    say(&format!(
        "ready: {} in this process, {weights} of weights in {took:.1} s, {threads} threads",
        model.name()
    ));
    serve(Api::new(session, "embedded").audited(audit), listener, identity.as_ref()).await
}

/// Warns of what in a model may not do what its author meant.
fn with_warnings(model: ModelDir) -> Arc<ModelDir> {
    for warning in model.warnings() {
        tracing::warn!("{warning}");
    }
    Arc::new(model)
}

/// The plan of a machine on its own.
fn alone(model: &ModelDir, threads: u16) -> Result<Plan> {
    let name = DeviceName::new("local")?;
    let member = Member { name, budget: Bytes(u64::MAX), threads, share: 1.0 };
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy: Strategy::Local,
        wire: WireType::F32,
        tiles: 1,
        max_rows: model.spec().position_limit().clamp(DEFAULT_MAX_ROWS, EMBEDDED_ROWS),
        cache: galaxy_coord::placement::cache_for(model.spec(), None, CacheType::F32),
    };
    Ok(share::plan(model.spec(), &terms, &[member])?)
}

fn coordinator(directory: &Path) -> Result<Identity> {
    let identity = Identity::load(directory)?;
    if identity.role() != Role::Coordinator {
        bail!(
            "{} is the identity of {} {}, and a coordinator's is needed: run `galaxy keys issue NAME --role coordinator`",
            directory.display(),
            identity.role(),
            identity.name()
        );
    }
    Ok(identity)
}

/// Opens the port and prints its address.
async fn bind(listen: &str) -> Result<TcpListener> {
    let listener = TcpListener::bind(listen).await.with_context(|| {
        format!("cannot listen on {listen}: is the address this machine's, and is the port free?")
    })?;
    say(&format!("listening on {}", listener.local_addr()?));
    Ok(listener)
}

/// Serves until a signal comes, then answers what was taken, and ends.
async fn serve(api: Api, listener: TcpListener, identity: Option<&Identity>) -> Result<()> {
    let session = api.session().clone();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (drained, after) = tokio::sync::oneshot::channel();
    let ending = session.clone();
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        say("draining: answering what was taken, taking no more");
        tokio::select! {
            () = ending.end() => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // The other end is gone only if the server has failed already.
        let _ = drained.send(());
    };
    let served = api.serve(listener, identity, stop);
    let late = async {
        let _ = after.await;
        tokio::time::sleep(GOODBYE).await;
    };
    let ended = tokio::select! {
        ended = served => ended,
        () = late => Ok(()),
    };
    session.close().await;
    Ok(ended?)
}

/// The first epoch, which grows over restarts, so that workers never take a new coordinator for a stale one.
fn first_epoch() -> Epoch {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Epoch::starting(seconds)
}

/// Prints what happens; progress of one device not more often than every [`PROGRESS`].
///
/// The console has a thread of its own: one that is held up holds up nobody, and lines that it
/// does not keep up with are dropped. The thread ends when the listener is dropped; nobody waits
/// for it, because the console may be held up for good.
fn listener_of() -> Result<Arc<dyn Fn(Notice) + Send + Sync>> {
    let (lines, printed) = mpsc::sync_channel::<String>(LINES);
    let print = move || printed.iter().for_each(|line| say(&line));
    std::thread::Builder::new()
        .name("console".to_owned())
        .spawn(print)
        .context("no thread for the console")?;
    let last: Mutex<HashMap<Option<DeviceName>, Instant>> = Mutex::new(HashMap::new());
    Ok(Arc::new(move |notice| {
        let progress = match &notice {
            Notice::Loading { device, .. } | Notice::Preparing { device, .. } => {
                Some(Some(device.clone()))
            }
            Notice::Profiling { progress } => match progress {
                Progress::Device { device, .. } => Some(Some(device.clone())),
                Progress::Links { .. } => Some(None),
                Progress::Note(_) => None,
            },
            _ => None,
        };
        if let Some(of) = progress {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            let pause = match notice {
                Notice::Profiling { .. } => MEASURING,
                _ => PROGRESS,
            };
            if last.get(&of).is_some_and(|at| at.elapsed() < pause) {
                return;
            }
            last.insert(of, Instant::now());
        }
        // Full: dropped.
        let _ = lines.try_send(notice.to_string());
    }))
}

/// Prints a line at once, as it can be shown. A console that is gone is no reason to stop serving.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", lines(line)).and_then(|()| out.flush());
}
