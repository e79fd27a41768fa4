//! `galaxy-testbed hostile`: how honest clients fare while strangers, clients and devices take what they can
//! of a coordinator, a worker and `galaxy serve` on this machine, and a mirror of the Hub attacks a pull.
//!
//! Each attack has an end, and so has each wait. Measured are how much later an honest client, whose
//! handshake takes 300 ms, is answered, and how much the memory of the attacked process grows.

mod crowd;
mod device;
mod greedy;
mod honest;
mod mirror;

use crate::processes::{Process, Setup, TestCluster, program};
use anyhow::{Context, Result, bail};
use crowd::{ConnectionState, HostileConnections};
use galaxy_proto::identity::{Identity, Role};
use greedy::RequestAttack;
use honest::{DELAY, Honest};
use serde::Serialize;
use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// The longest that an honest client may be answered later under connections than without.
const LATER: Duration = Duration::from_millis(250);
/// The bytes by which memory may grow under connections.
const GROWTH: u64 = 64 << 20;
/// The bytes by which memory may grow under what one client sends: its budget, and `GROWTH`.
const BUDGET: u64 = 256_000_000 + GROWTH;
/// The honest client's requests of each measurement.
const ASKED: usize = 8;
/// The longest that a request may be answered later under what one client sends, where requests wait for
/// programs.
const BEHIND: Duration = Duration::from_secs(5);

/// The options of `galaxy-testbed hostile`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The model that is served.
    #[arg(long, default_value = "models/all-MiniLM-L6-v2")]
    pub model: PathBuf,
    /// Connections that are held open.
    #[arg(long, default_value_t = 2500)]
    pub connections: usize,
    /// Connections that are opened again in each second, at most.
    #[arg(long, default_value_t = 500)]
    pub rate: u32,
    /// A model of images, with an image beside it.
    #[arg(long, default_value = "testdata/golden/vit")]
    pub images: PathBuf,
    /// Connections of one identity with a valid certificate.
    #[arg(long, default_value_t = 300)]
    pub valid: usize,
    /// Only these attacks.
    #[arg(long, value_enum, num_args = 1..)]
    pub only: Vec<Attacks>,
    /// Prints the report as JSON.
    #[arg(long)]
    pub json: bool,
}

/// The kinds of attacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Attacks {
    /// Connections that are held open, by strangers and by clients and devices.
    Connections,
    /// Requests of one client.
    Requests,
    /// A device's answers.
    Devices,
    /// A Hub mirror's answers.
    Mirrors,
}

/// The process that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostileTarget {
    /// The coordinator of the cluster.
    Coordinator,
    /// The worker of the cluster.
    Worker,
    /// The process of `galaxy serve`.
    Serve,
}

/// One row of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The process that was attacked.
    pub target: HostileTarget,
    /// The attack, as text.
    pub attack: String,
    /// The connections that were open at the end, as the attacker sees it: a silent connection that the
    /// system dropped before it was accepted still counts.
    pub open: usize,
    /// The connections, or requests, in all.
    pub opened: u64,
    /// The median wait of the honest client before the attack, without its own delay, in milliseconds.
    pub before_ms: f64,
    /// The median wait of the honest client during the attack, in milliseconds.
    pub median_ms: f64,
    /// The longest wait of the honest client during the attack, in milliseconds.
    pub longest_ms: f64,
    /// The honest client's requests that were not answered.
    pub unanswered: usize,
    /// The bytes by which memory grew at most.
    pub growth: u64,
    /// Whether waits and memory stayed within their bounds.
    pub held: bool,
}

/// The results of all attacks.
#[derive(Clone, Debug, Default, Serialize)]
struct Report {
    rows: Vec<Row>,
    devices: Vec<device::Row>,
    mirrors: Vec<mirror::Row>,
}

/// Runs the wanted attacks one after another, and prints how the honest clients fared.
///
/// # Errors
/// When something cannot be started, or a bound was not kept.
pub fn run(options: &Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut report = Report::default();
    let wanted = |attacks| options.only.is_empty() || options.only.contains(&attacks);
    if wanted(Attacks::Connections) {
        report.rows = runtime.block_on(hold_connections(options))?;
    }
    if wanted(Attacks::Requests) {
        report.rows.extend(runtime.block_on(ask_for_much(options))?);
    }
    if wanted(Attacks::Devices) {
        report.devices = runtime.block_on(device::all(&options.model))?;
    }
    if wanted(Attacks::Mirrors) {
        report.mirrors = mirror::all()?;
    }
    let Report { rows, devices, mirrors } = &report;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        if !rows.is_empty() {
            show(rows);
        }
        if !devices.is_empty() {
            device::show(devices);
        }
        if !mirrors.is_empty() {
            mirror::show(mirrors);
        }
    }
    let held = rows.iter().map(|row| row.held);
    let held = held.chain(devices.iter().map(|row| row.held));
    let held: Vec<bool> = held.chain(mirrors.iter().map(|row| row.held)).collect();
    match held.iter().filter(|held| !**held).count() {
        0 => Ok(()),
        failed => bail!("{failed} of {} bounds were not kept", held.len()),
    }
}

/// Prints which attack begins.
fn say(who: impl std::fmt::Display, attack: &str) {
    eprintln!("{who}: {attack}");
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

fn show(rows: &[Row]) {
    println!(
        "| target | attack | open | opened | before, ms | median, ms | longest, ms | unanswered | memory, MB | kept |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for row in rows {
        println!(
            "| {:?} | {} | {} | {} | {:.0} | {:.0} | {:.0} | {} | {} | {} |",
            row.target,
            row.attack,
            row.open,
            row.opened,
            row.before_ms,
            row.median_ms,
            row.longest_ms,
            row.unanswered,
            megabytes(row.growth),
            if row.held { "yes" } else { "NO" }
        );
    }
}

/// A cluster of one worker, and `galaxy serve` in front of it.
struct HostileCluster {
    model: PathBuf,
    cluster: TestCluster,
    serve: Process,
    at: String,
}

impl HostileCluster {
    fn up(model: &Path) -> Result<Self> {
        let model = model.canonicalize().with_context(|| model.display().to_string())?;
        let setup = Setup { shares: vec![1.0], ..Setup::new(model.clone()) };
        let cluster = TestCluster::start(setup)?;
        let mut command = Command::new(program("galaxy")?);
        command.args(["serve", "--listen", "127.0.0.1:0", "--coordinator", &cluster.address]);
        command.arg("--identity").arg(cluster.keys.of("server", Role::Client)?);
        command.env_remove("GALAXY_API_KEY");
        let mut serve = Process::spawn("galaxy serve", command)?;
        let line = serve.line("listening on http://")?;
        let at = line.trim_start_matches("listening on http://").split('/').next();
        let at = at.context("an address")?.to_owned();
        Ok(Self { model, cluster, serve, at })
    }

    fn address(&self, target: HostileTarget) -> &str {
        match target {
            HostileTarget::Coordinator => &self.cluster.address,
            HostileTarget::Worker => &self.cluster.addresses[0],
            HostileTarget::Serve => &self.at,
        }
    }

    fn memory(&self, target: HostileTarget) -> Result<u64> {
        let process = match target {
            HostileTarget::Coordinator => &self.cluster.coordinator,
            HostileTarget::Worker => &self.cluster.workers[0],
            HostileTarget::Serve => &self.serve,
        };
        resident(process.id())
    }

    fn identity(&self, name: &str, role: Role) -> Result<Identity> {
        Ok(Identity::load(&self.cluster.keys.of(name, role)?)?)
    }

    fn honest(&self, target: HostileTarget) -> Result<Honest> {
        let identity = match target {
            HostileTarget::Coordinator => Some(self.identity("honest", Role::Client)?),
            HostileTarget::Worker => Some(self.identity("coordinator", Role::Coordinator)?),
            HostileTarget::Serve => None,
        };
        Ok(Honest { target, address: self.address(target).parse()?, identity })
    }
}

/// The bytes of memory that a process holds now.
fn resident(pid: u32) -> Result<u64> {
    of_status(pid, "VmRSS:")
}

/// The most bytes of memory that a process has held.
fn peak(pid: u32) -> Result<u64> {
    of_status(pid, "VmHWM:")
}

fn of_status(pid: u32, name: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|line| line.starts_with(name)).context(name.to_owned())?;
    let kib: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
    Ok(kib * 1024)
}

async fn hold_connections(options: &Options) -> Result<Vec<Row>> {
    let own = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let other = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    let stage = HostileCluster::up(&options.model)?;
    let mut rows = Vec::new();
    for target in [HostileTarget::Coordinator, HostileTarget::Worker, HostileTarget::Serve] {
        for (from, whose) in [(other, "another address"), (own, "its own address")] {
            for (manner, how) in
                [(ConnectionState::Silent, "silent"), (ConnectionState::HalfOpen, "half-open")]
            {
                for rate in [0, options.rate] {
                    let again = if rate > 0 { format!(", {rate}/s again") } else { String::new() };
                    let attack = format!("{} {how} from {whose}{again}", options.connections);
                    let crowd = HostileConnections::gather(
                        (target, stage.address(target).parse()?),
                        from,
                        manner,
                        options.connections,
                        rate,
                    );
                    rows.push(under(&stage, target, attack, crowd.await).await?);
                }
            }
        }
        let role = if target == HostileTarget::Worker { Role::Device } else { Role::Client };
        let many = stage.identity(&format!("a-{role}"), role)?;
        let valid = crowd::valid(&stage, target, &many, options.valid).await?;
        let attack = format!("{} valid of one identity", options.valid);
        rows.push(under(&stage, target, attack, valid).await?);
    }
    Ok(rows)
}

async fn ask_for_much(options: &Options) -> Result<Vec<Row>> {
    let stage = HostileCluster::up(&options.model)?;
    let mut rows = Vec::new();
    for greed in RequestAttack::OF_TEXTS {
        rows.push(greedy::under(&stage, greed).await?);
    }
    drop(stage);
    rows.push(greedy::under(&HostileCluster::up(&options.images)?, RequestAttack::Images).await?);
    Ok(rows)
}

/// How the honest client fares under a crowd, once that was there for a while.
async fn under(
    stage: &HostileCluster,
    target: HostileTarget,
    attack: String,
    mut crowd: HostileConnections,
) -> Result<Row> {
    say(format_args!("{target:?}"), &attack);
    let honest = stage.honest(target)?;
    // Measured before the crowd begins.
    let before = honest.median(ASKED).await?.saturating_sub(DELAY);
    let memory = stage.memory(target)?;
    crowd.begin().await;
    let (mut waits, mut unanswered, mut peak) = (Vec::new(), 0, stage.memory(target)?);
    for _ in 0..ASKED {
        match honest.ask().await {
            Ok(wait) => waits.push(wait.saturating_sub(DELAY)),
            Err(_) => unanswered += 1,
        }
        peak = peak.max(stage.memory(target)?);
    }
    let (open, opened) = (crowd.open(), crowd.opened());
    drop(crowd);
    let row =
        row(target, attack, (open, opened), before, (waits, unanswered), peak - memory.min(peak));
    Ok(Row { held: row.held && row.growth <= GROWTH, ..row })
}

fn row(
    target: HostileTarget,
    attack: String,
    (open, opened): (usize, u64),
    before: Duration,
    (mut waits, unanswered): (Vec<Duration>, usize),
    growth: u64,
) -> Row {
    waits.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let longest = waits.last().copied().unwrap_or_default();
    let held = unanswered == 0 && longest <= before + LATER;
    let (before_ms, longest_ms) = (ms(before), ms(longest));
    let median_ms = ms(waits.get(waits.len() / 2).copied().unwrap_or_default());
    Row { target, attack, open, opened, before_ms, median_ms, longest_ms, unanswered, growth, held }
}
