//! `galaxy-testbed chaos`: a cluster of real processes whose devices and coordinator are killed, frozen and
//! unplugged, one after another, under many clients. No client may receive anything but the right answer.
//!
//! There are three devices, of which each two hold the model and no single one does. What clients ask has
//! been asked before any fault; an answer that differs from the first one is checked token by token.
//!
//! Every fault and every request is a line of the record, from the moment it is over. A run that is started again
//! goes on to as many faults as are wanted.

mod cases;
mod client;
mod crowd;
mod faults;
mod record;

pub use cases::Outcome;
pub use record::Summary;

use crate::processes::{Planned, Process, Setup, TestCluster};
use anyhow::{Result, ensure};
use cases::Cases;
use client::ChaosClient;
use crowd::Crowd;
use faults::FaultSequence;
use galaxy_common::{Bytes, Cache, CacheType, DeviceName, Plan, Strategy, WireType};
use galaxy_graph::{
    budget,
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Role;
use record::{Record, RecordLine, Settings};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

/// Devices of the cluster.
const DEVICES: usize = 3;
/// The most rows of a program.
const MAX_ROWS: u32 = 128;
/// Rows of the KV cache: fewer than the clients ask for, so that sequences are evicted now and then.
const KV_CACHE_TOKENS: u32 = 16 * Cache::BLOCK;
/// The longest that the cluster may take to answer again, once a fault is over.
const RECOVERY: Duration = Duration::from_secs(180);
/// The time that clients give a call, and a generation from one token to the next.
const TIMEOUT: Duration = Duration::from_secs(120);
/// A request that has not ended after this time hangs.
const HANG: Duration = Duration::from_secs(300);
/// The time between two looks at the count of answers.
const LOOK: Duration = Duration::from_millis(20);

/// The options of `galaxy-testbed chaos`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The model: one that generates tokens.
    #[arg(long, default_value = "models/tiny-galaxy")]
    pub model: PathBuf,
    /// The number of faults in all, those of the record among them.
    #[arg(long, default_value_t = 300)]
    pub faults: usize,
    /// The number of clients.
    #[arg(long, default_value_t = 16)]
    pub clients: usize,
    /// How many of the clients ask `galaxy serve`; the others have the SDK [default: a quarter].
    #[arg(long)]
    pub served: Option<usize>,
    /// The seed that decides on faults and requests.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The longest time that a fault lasts, in ms.
    #[arg(long, default_value_t = 8000)]
    pub outage: u64,
    /// The longest pause between an answer after a fault and the next fault, in ms.
    #[arg(long, default_value_t = 2000)]
    pub pause: u64,
    /// Devices have no links of their own, which takes no root: none is unplugged.
    #[arg(long)]
    pub loopback: bool,
    /// The file of the record: a line of JSON for each fault and request.
    #[arg(long, default_value = "target/testbed-results/chaos.jsonl")]
    pub output: PathBuf,
}

/// Injects the faults, and prints the outcomes of the requests.
///
/// # Errors
/// When something cannot be started, the cluster does not come back, or a request went wrong.
pub fn run(options: &Options) -> Result<()> {
    let summary = play(options)?;
    print!("{summary}");
    summary.draw(&options.output.with_extension(""))?;
    ensure!(summary.is_clean(), "requests went wrong: {} has them", options.output.display());
    Ok(())
}

/// Injects the faults, and returns the outcomes of the requests, those of the record among them.
///
/// # Errors
/// When something cannot be started, or the cluster does not come back.
pub fn play(options: &Options) -> Result<Summary> {
    let served = options.served.unwrap_or(options.clients / 4);
    ensure!(
        served < options.clients,
        "--served must be less than --clients, {}: one of them at least has the SDK",
        options.clients
    );
    let model = Arc::new(ModelDir::open(&options.model)?);
    let (one, memory) = memory(&model)?;
    let settings = Settings {
        model: model.name().to_owned(),
        clients: options.clients,
        served,
        seed: options.seed,
        memory,
        loopback: options.loopback,
    };
    let record = Record::open(&options.output, &settings)?;
    let done = record.faults();
    if done < options.faults {
        let lines = format!(
            "patience = \"3s\"\nweight_streaming = \"preload\"\nqueue = {}",
            4 * options.clients
        );
        let setup = Setup {
            max_rows: MAX_ROWS,
            kv_cache_tokens: Some(KV_CACHE_TOKENS),
            shares: vec![1.0; DEVICES],
            network: !options.loopback,
            planned: Some(Planned { memory, lines }),
            ..Setup::new(options.model.canonicalize()?)
        };
        eprintln!("{DEVICES} devices of {memory}: one alone would need {one}");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let mut cluster = TestCluster::start(setup)?;
        // What requests leave open is as the SDK has it: the model's own settings are not asked.
        let timeout = format!("{}s", TIMEOUT.as_secs());
        let flags = ["--timeout", &timeout, "--generation-config", "none"];
        let (mut server, address) = cluster.serve("server", &flags)?;
        let served = vec![ChaosClient::Served(address); served];
        strike(options, &runtime, (&mut cluster, &mut server), served, (&model, &record))
            .inspect_err(|_| eprintln!("{}\n{}", cluster.output(), server.output()))?;
    }
    Ok(record.summary())
}

/// Asks every request once, and then again and again while faults happen.
fn strike(
    options: &Options,
    runtime: &tokio::runtime::Runtime,
    (cluster, server): (&mut TestCluster, &mut Process),
    mut clients: Vec<ChaosClient>,
    (model, record): (&Arc<ModelDir>, &Arc<Record>),
) -> Result<()> {
    for number in clients.len()..options.clients {
        let builder = cluster.builder(&format!("client-{number}"), Role::Client)?;
        let client = runtime.block_on(builder.timeout(TIMEOUT).connect())?;
        clients.push(ChaosClient::Sdk(Box::new(client)));
    }
    let cases = Cases::new(options.seed, model.clone(), plan(model, 1)?)?;
    let cases = Arc::new(runtime.block_on(cases.asked(&clients))?);
    eprintln!("{} requests are known, and answered", cases.len());
    let crowd = Crowd::begin(runtime, clients, &cases, record, options.seed);
    let told = told_to_end(runtime)?;
    let mut deck = FaultSequence::new(options.seed, !options.loopback);
    for number in 0..options.faults {
        let fault = deck.next(options.outage);
        let pause = deck.pause(options.pause);
        if number < record.faults() {
            continue;
        }
        ensure!(!server.is_over()?, "galaxy serve has ended");
        ensure!(!told.load(Ordering::Relaxed), "it was told to end: started again, it goes on");
        std::thread::sleep(pause);
        let begun = Instant::now();
        fault.inject(cluster)?;
        let (broken, answered) = (begun.elapsed(), record.answered());
        while record.answered() == answered {
            ensure!(
                begun.elapsed() < broken + RECOVERY,
                "no answer for {RECOVERY:?} after {fault}"
            );
            std::thread::sleep(LOOK);
        }
        let mended_ms = millis(begun.elapsed().saturating_sub(broken));
        record.add(&RecordLine::Fault {
            number,
            what: fault.to_string(),
            broken_ms: millis(broken),
            mended_ms,
        })?;
        eprintln!("{:3} {fault}, answers {mended_ms} ms later; {}", number + 1, record.counts());
    }
    runtime.block_on(crowd.end())
}

/// A flag that becomes true with Ctrl-C or SIGTERM, so that processes and links are removed before this
/// process ends.
fn told_to_end(runtime: &tokio::runtime::Runtime) -> Result<Arc<AtomicBool>> {
    let _inside = runtime.enter();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let told = Arc::new(AtomicBool::new(false));
    let tell = told.clone();
    runtime.spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tell.store(true, Ordering::Relaxed);
    });
    Ok(told)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The plan of a number of equal devices, without regard to their budgets.
///
/// # Errors
/// When the model cannot be divided among so many.
pub fn plan(model: &ModelDir, devices: usize) -> Result<Plan> {
    let member = |at: usize| {
        let name = DeviceName::new(format!("d{at}"))?;
        anyhow::Ok(Member { name, budget: Bytes(1 << 40), threads: 1, share: 1.0 })
    };
    let members = (0..devices).map(member).collect::<Result<Vec<_>>>()?;
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy: if devices == 1 { Strategy::Local } else { Strategy::Galaxy },
        wire: WireType::F32,
        tiles: 4,
        max_rows: MAX_ROWS,
        cache: Cache { rows: KV_CACHE_TOKENS, values: CacheType::F32 },
    };
    Ok(share::plan(model.spec(), &terms, &members)?)
}

/// The memory that one device would need by itself, and the memory that each grants: enough for two, too
/// little for one.
fn memory(model: &ModelDir) -> Result<(Bytes, Bytes)> {
    let most = |devices: usize| {
        let plan = plan(model, devices)?;
        let needs = budget::needs_all(model.spec(), model.formats(), &plan)?;
        anyhow::Ok(needs.iter().map(|needs| needs.total()).max().unwrap_or_default())
    };
    let (one, two) = (most(1)?, most(2)?);
    ensure!(two < one, "two devices need as much as one: {two} each, and {one}");
    // Parts need not be equal.
    Ok((one, Bytes(two.0 + (one.0 - two.0) / 2)))
}
