//! How those fare who mean no harm while others do: strangers, clients and devices that take what
//! they can of a coordinator, a worker and `galaxy serve` on this machine.
//!
//! Each attack has an end, and so has each wait. What is looked at: by how much later an honest one is
//! answered, whose handshake takes 300 ms, and by how much the memory of who is attacked grows.

mod crowd;
mod greedy;
mod honest;

use crate::processes::{Process, Setup, TestCluster, program};
use anyhow::{Context, Result, bail};
use crowd::{Crowd, Manner};
use galaxy_proto::identity::{Identity, Role};
use greedy::Greed;
use honest::{DELAY, Honest};
use serde::Serialize;
use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// By how much later an honest one may be answered,
const LATER: Duration = Duration::from_millis(250);
/// by how much memory may grow under connections,
const GROWTH: u64 = 64 << 20;
/// and by how much under what one client sends: its budget, and that.
const BUDGET: u64 = 256_000_000 + GROWTH;
/// Requests of the honest one, of each measurement.
const ASKED: usize = 8;
/// Under what one client sends, requests wait for programs.
const BEHIND: Duration = Duration::from_secs(5);

/// What is tried.
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
    /// Connections of one identity with a valid certificate.
    #[arg(long, default_value_t = 300)]
    pub valid: usize,
    /// Prints the report as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Who is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The coordinator.
    Coordinator,
    /// A worker.
    Worker,
    /// `galaxy serve`.
    Serve,
}

/// One row of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Who was attacked.
    pub target: Target,
    /// By what.
    pub attack: String,
    /// Connections that were open at the end as the attacker sees it: whom the system dropped before it was
    /// accepted, and who says nothing, does not know,
    pub open: usize,
    /// and connections, or requests, in all.
    pub opened: u64,
    /// How long the honest one waited before, without its own delay: the median, in milliseconds.
    pub before_ms: f64,
    /// And meanwhile: the median,
    pub median_ms: f64,
    /// and the longest.
    pub longest_ms: f64,
    /// Times that it was not answered.
    pub unanswered: usize,
    /// By how many bytes the memory grew at most.
    pub growth: u64,
    /// Whether that is within bounds.
    pub held: bool,
}

/// Attacks all in turn, and says how they fared.
///
/// # Errors
/// When something cannot be started, or a bound was not kept.
pub fn run(options: &Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let rows = runtime.block_on(attack_all(options))?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        show(&rows);
    }
    match rows.iter().filter(|row| !row.held).count() {
        0 => Ok(()),
        failed => bail!("{failed} of {} bounds were not kept", rows.len()),
    }
}

fn show(rows: &[Row]) {
    println!(
        "| target | attack | open | opened | before, ms | median, ms | longest, ms | unanswered | memory, MB | kept |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for row in rows {
        println!(
            "| {:?} | {} | {} | {} | {:.0} | {:.0} | {:.0} | {} | {:.1} | {} |",
            row.target,
            row.attack,
            row.open,
            row.opened,
            row.before_ms,
            row.median_ms,
            row.longest_ms,
            row.unanswered,
            row.growth as f64 / 1e6,
            if row.held { "yes" } else { "NO" }
        );
    }
}

/// A cluster of one worker, and `galaxy serve` before it.
struct Stage {
    cluster: TestCluster,
    serve: Process,
    at: String,
}

impl Stage {
    fn up(model: &Path) -> Result<Self> {
        let model = model.canonicalize().with_context(|| model.display().to_string())?;
        let setup = Setup { shares: vec![1.0], ..Setup::new(model) };
        let cluster = TestCluster::start(setup)?;
        let mut command = Command::new(program("galaxy")?);
        command.args(["serve", "--listen", "127.0.0.1:0", "--coordinator", &cluster.address]);
        command.arg("--identity").arg(cluster.keys.of("server", Role::Client)?);
        command.env_remove("GALAXY_API_KEY");
        let mut serve = Process::spawn("galaxy serve", command)?;
        let line = serve.line("listening on http://")?;
        let at = line.trim_start_matches("listening on http://").split('/').next();
        let at = at.context("an address")?.to_owned();
        Ok(Self { cluster, serve, at })
    }

    fn address(&self, target: Target) -> &str {
        match target {
            Target::Coordinator => &self.cluster.address,
            Target::Worker => &self.cluster.addresses[0],
            Target::Serve => &self.at,
        }
    }

    fn memory(&self, target: Target) -> Result<u64> {
        let process = match target {
            Target::Coordinator => &self.cluster.coordinator,
            Target::Worker => &self.cluster.workers[0],
            Target::Serve => &self.serve,
        };
        resident(process.id())
    }

    fn identity(&self, name: &str, role: Role) -> Result<Identity> {
        Ok(Identity::load(&self.cluster.keys.of(name, role)?)?)
    }

    fn honest(&self, target: Target) -> Result<Honest> {
        let identity = match target {
            Target::Coordinator => Some(self.identity("honest", Role::Client)?),
            Target::Worker => Some(self.identity("coordinator", Role::Coordinator)?),
            Target::Serve => None,
        };
        Ok(Honest { target, address: self.address(target).parse()?, identity })
    }
}

/// What a process holds in memory.
fn resident(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).context("VmRSS")?;
    let kib: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
    Ok(kib * 1024)
}

async fn attack_all(options: &Options) -> Result<Vec<Row>> {
    let own = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let other = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    let stage = Stage::up(&options.model)?;
    let mut rows = Vec::new();
    for target in [Target::Coordinator, Target::Worker, Target::Serve] {
        for (from, whose) in [(other, "another address"), (own, "its own address")] {
            for (manner, how) in [(Manner::Silent, "silent"), (Manner::HalfOpen, "half-open")] {
                for rate in [0, options.rate] {
                    let again = if rate > 0 { format!(", {rate}/s again") } else { String::new() };
                    let attack = format!("{} {how} from {whose}{again}", options.connections);
                    let crowd = Crowd::gather(
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
        let role = if target == Target::Worker { Role::Device } else { Role::Client };
        let many = stage.identity(&format!("a-{role}"), role)?;
        let valid = crowd::valid(&stage, target, &many, options.valid).await?;
        let attack = format!("{} valid of one identity", options.valid);
        rows.push(under(&stage, target, attack, valid).await?);
    }
    for greed in Greed::ALL {
        rows.push(greedy::under(&stage, greed).await?);
    }
    Ok(rows)
}

/// How the honest one fares under a crowd, once that was there for a while.
async fn under(stage: &Stage, target: Target, attack: String, mut crowd: Crowd) -> Result<Row> {
    let honest = stage.honest(target)?;
    // Before: the crowd has not begun.
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
    target: Target,
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
