//! The links of a whole cluster, measured as `galaxy profile` does: how long a round takes, and the rates of
//! links beside others and alone.

use super::Options;
use crate::{
    air::Air,
    golden::checkpoints_dir,
    network::{Link, Network, NetworkGuard, NetworkNode},
    processes::{Keys, Process, Setup, listening, worker_command},
};
use anyhow::{Result, ensure};
use galaxy_common::{ClusterProfile, LinkProfile, LinkType, Spread};
use galaxy_coord::{
    Cluster,
    profile::{Progress, Store, Wanted, collect},
};
use galaxy_proto::identity::{Identity, Role};
use std::{
    path::Path,
    process::Command,
    sync::Mutex,
    time::{Duration, Instant},
};

/// The port on which workers listen.
const PORT: u16 = 7100;

/// The network of a cluster: links of their own, or shared air.
enum Ground {
    Links(NetworkGuard),
    Air(Air),
}

impl Ground {
    fn up(options: &Options, devices: usize) -> Result<Self> {
        let link = Link::of(options.rates[0] * 1_000_000);
        let names = (0..devices).map(|i| format!("d{i}")).chain(["coordinator".to_owned()]);
        if options.air {
            return Ok(Self::Air(Air::up(&options.name, &names.collect::<Vec<_>>(), link)?));
        }
        let place = |(i, name)| NetworkNode { name, link: (i < devices).then_some(link) };
        Network::down(&options.name)?;
        let places: Vec<NetworkNode> = names.enumerate().map(place).collect();
        Ok(Self::Links(Network::held(&options.name, &places)?))
    }

    fn address(&self, i: usize) -> String {
        let host = match self {
            Self::Links(_) => Network::address(i),
            Self::Air(_) => Air::address(i),
        };
        format!("{host}:{PORT}")
    }

    fn inside<T: Send>(&self, i: usize, call: impl FnOnce() -> T + Send) -> Result<T> {
        match self {
            Self::Links(network) => network.inside(i, call),
            Self::Air(air) => air.inside(i, call),
        }
    }

    fn start(&self, i: usize, mut command: Command) -> Result<Process> {
        command.args(["--plain", "--listen", &self.address(i)]);
        let mut worker = self.inside(i, || Process::spawn(&format!("worker d{i}"), command))??;
        listening(&mut worker)?;
        Ok(worker)
    }
}

/// Measures the links of a cluster, and prints how long that took and what was found.
pub(super) fn run(options: &Options, devices: usize) -> Result<()> {
    ensure!((2..=100).contains(&devices), "a cluster of 2 to 100 devices is measured");
    ensure!(!options.rates.is_empty(), "--rates names none");
    let ground = Ground::up(options, devices)?;
    let work = tempfile::tempdir()?;
    let keys = Keys::create(&work.path().join("keys"))?;
    let setup = Setup { shares: vec![1.0; devices], ..Setup::new(checkpoints_dir().join("bert")) };
    let mut workers = Vec::new();
    for i in 0..devices {
        let identity = keys.of(&format!("d{i}"), Role::Device)?;
        workers.push(ground.start(i, worker_command(&identity, &setup.model)?)?);
    }
    let identity = keys.of("coordinator", Role::Coordinator)?;
    let addresses: Vec<String> = (0..devices).map(|i| ground.address(i)).collect();
    let file = work.path().join("cluster.toml");
    std::fs::write(&file, setup.cluster_file(&identity, &addresses))?;
    for link in LinkType::ALL {
        let measure = || measure(&file, &identity, link);
        let (profile, took) = ground.inside(devices, measure)??;
        report(link, devices, &profile.links, took);
    }
    drop(workers);
    Ok(())
}

/// The profiles of a cluster, and how long its links took: in rounds, and alone.
fn measure(
    file: &Path,
    identity: &Path,
    link: LinkType,
) -> Result<(ClusterProfile, [Duration; 2])> {
    let (cluster, identity) = (Cluster::open(file)?, Identity::load(identity)?);
    let (model, store) = (cluster.open_model()?, Store::new(&cluster.profiles));
    // The time at which links were begun, and the time at which all rounds were over.
    let times = Mutex::new((None, None));
    let listener = |progress: Progress| {
        let now = Instant::now();
        let mut times = times.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match progress {
            Progress::Links { now: what, .. } if what == "done" => times.1 = Some(now),
            Progress::Links { .. } => drop(times.0.get_or_insert(now)),
            Progress::Note(note) => eprintln!("note: {note}"),
            Progress::Device { .. } => {}
        }
    };
    let wanted = Wanted { fresh: false, links: vec![link] };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let profile =
        runtime.block_on(collect(&cluster, &model, &identity, &store, &wanted, &listener))?;
    let end = Instant::now();
    let (begun, rounds) = *times.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (begun, rounds) = (begun.unwrap_or(end), rounds.unwrap_or(end));
    Ok((profile, [rounds - begun, end - rounds]))
}

fn report(link: LinkType, devices: usize, links: &[LinkProfile], took: [Duration; 2]) {
    let mbit = |rate: fn(&LinkProfile) -> f64| {
        let rates = links.iter().map(rate).filter(|rate| *rate > 0.0).map(|rate| rate * 8e-6);
        Spread::of(&rates.collect::<Vec<_>>())
    };
    let rounds = 2 * (devices.next_multiple_of(2) - 1);
    let [together, alone] = took.map(|took| took.as_secs_f64());
    println!(
        "{link}: {} links in {rounds} rounds of {:.2} s; beside others {:.1} Mbit/s, under load {:.1}",
        links.len(),
        together / rounds as f64,
        mbit(|link| link.rate),
        mbit(|link| link.busy_rate),
    );
    println!(
        "{link}: {} links alone in {alone:.1} s: {:.1} Mbit/s; {} share a medium",
        links.iter().filter(|link| link.alone > 0.0).count(),
        mbit(|link| link.alone),
        links.iter().filter(|link| link.shares_medium()).count(),
    );
}
