//! `galaxy-testbed probes`: how the probes of `galaxy profile` find the rate of a link, and how long they
//! take: pairs at several rates beside the probes of a reference, in turns, and whole clusters.

mod cluster;

use crate::{
    network::{Link, Network, NetworkNode},
    processes::{Keys, Process, listening, worker_command},
};
use anyhow::{Context, Result};
use galaxy_common::{DeviceName, LinkType, Spread};
use galaxy_proto::{
    channel::connect,
    fault::from_status,
    identity::{Identity, Role},
    v1::{self, worker_client::WorkerClient},
};
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use tonic::transport::Channel;

/// The options of `galaxy-testbed probes`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Rates of the links in Mbit/s.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "10,50,125,500,1000")]
    pub rates: Vec<u64>,
    /// The number of samples of each rate and type of link.
    #[arg(long, default_value_t = 5)]
    pub samples: usize,
    /// A `galaxy-worker` of another version, whose probes are the reference. Without it, the reference is our
    /// own probes with the longer bulks of version 7 of the protocol.
    #[arg(long, value_name = "PROGRAM")]
    pub reference: Option<PathBuf>,
    /// Measures, instead of pairs, the links of this many devices, as `galaxy profile` does, at the first
    /// rate.
    #[arg(long, value_name = "DEVICES")]
    pub cluster: Option<usize>,
    /// With --cluster: all links share one medium of that rate.
    #[arg(long, requires = "cluster")]
    pub air: bool,
    /// The testbed's name while it is up.
    #[arg(long, default_value = "probes")]
    pub name: String,
}

/// The length of the reference's bulks, in ms.
const LONG: u32 = 250;
/// The longest that a call that probes may take.
const LIMIT: Duration = Duration::from_secs(30);
/// The index of the place from which the workers are asked.
const DESK: usize = 2;
/// The ports on which workers listen: ours, and those of the reference.
const PORTS: [u16; 2] = [7100, 7200];

/// Measures the links, and prints a table.
///
/// # Errors
/// Without root, or when a link cannot be created or probed.
pub fn run(options: &Options) -> Result<()> {
    if let Some(devices) = options.cluster {
        return cluster::run(options, devices);
    }
    println!(
        "| link | reference, Mbit/s | probe, Mbit/s | off | under load: reference | probe | off | latency, us: reference | probe | seconds: reference | probe |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    );
    for &mbit in &options.rates {
        let pair = Pair::up(options, mbit)?;
        pair.measure(options.samples, mbit).with_context(|| {
            let said: String = pair.workers.iter().map(Process::output).collect();
            format!("at {mbit} Mbit/s; the workers said:\n{said}")
        })?;
    }
    Ok(())
}

/// Two devices, a link between them, and on each a worker of ours and one of the reference.
struct Pair {
    workers: Vec<Process>,
    coordinator: Identity,
    network: crate::network::NetworkGuard,
    _work: tempfile::TempDir,
}

/// The result of one way to probe: rates in Mbit/s, the latency in microseconds, and how long it took.
#[derive(Clone, Copy, Debug)]
struct Sample {
    rate: f64,
    busy: f64,
    latency: f64,
    seconds: f64,
}

impl Pair {
    fn up(options: &Options, mbit: u64) -> Result<Self> {
        let link = Some(Link::of(mbit * 1_000_000));
        let place = |i, link| NetworkNode { name: format!("d{i}"), link };
        Network::down(&options.name)?;
        let network =
            Network::held(&options.name, &[place(0, link), place(1, link), place(2, None)])?;
        let work = tempfile::tempdir()?;
        let keys = Keys::create(work.path())?;
        let mut workers = Vec::new();
        for i in 0..2 {
            let identity = keys.of(&format!("d{i}"), Role::Device)?;
            for (reference, port) in [None, options.reference.as_deref()].into_iter().zip(PORTS) {
                let mut command = command(reference, &identity, work.path())?;
                command.args(["--listen", &format!("{}:{port}", Network::address(i))]);
                let start = || Process::spawn(&format!("worker d{i}"), command);
                let mut worker = network.inside(i, start)??;
                listening(&mut worker)?;
                workers.push(worker);
            }
        }
        let coordinator = Identity::load(&keys.of("coordinator", Role::Coordinator)?)?;
        Ok(Self { workers, coordinator, network, _work: work })
    }

    fn measure(&self, samples: usize, mbit: u64) -> Result<()> {
        let take = || -> Result<Vec<(LinkType, Vec<[Sample; 2]>)>> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let ours = ProbeClient::sit(&self.coordinator, PORTS[0]).await?;
                let reference = ProbeClient::sit(&self.coordinator, PORTS[1]).await?;
                let mut all: Vec<_> = LinkType::ALL.map(|link| (link, Vec::new())).into();
                for taken in 0..samples {
                    // The two ways take turns: what changes about the machine changes for both.
                    for (link, pairs) in &mut all {
                        let pair = [reference.reference(*link).await?, ours.probe(*link).await?];
                        eprintln!("{mbit} Mbit/s, {link}, sample {}: {pair:.2?}", taken + 1);
                        pairs.push(pair);
                    }
                }
                Ok(all)
            })
        };
        for (link, pairs) in self.network.inside(DESK, take)?? {
            let of = |at: usize, value: fn(&Sample) -> f64| {
                Spread::of(&pairs.iter().map(|pair| value(&pair[at])).collect::<Vec<_>>())
            };
            let off = |value: fn(&Sample) -> f64| {
                format!("{:+.1}%", 100.0 * (of(1, value).median / of(0, value).median - 1.0))
            };
            let rates =
                |value| format!("{:.1} | {:.1} | {}", of(0, value), of(1, value), off(value));
            let (rest, load) = (rates(|s| s.rate), rates(|s| s.busy));
            println!(
                "| {mbit} Mbit/s, {link} | {rest} | {load} | {:.0} | {:.0} | {:.2} | {:.2} |",
                of(0, |s| s.latency),
                of(1, |s| s.latency),
                of(0, |s| s.seconds),
                of(1, |s| s.seconds),
            );
        }
        Ok(())
    }
}

/// The command of a worker of ours, or of another program, that takes plain links, too.
fn command(program: Option<&Path>, identity: &Path, models: &Path) -> Result<Command> {
    let ours = worker_command(identity, models)?;
    let mut command = match program {
        None => ours,
        Some(program) => {
            let mut command = Command::new(program);
            command.args(ours.get_args());
            command
        }
    };
    command.arg("--plain");
    Ok(command)
}

/// A client of the first device that asks it to probe its link to the second.
struct ProbeClient {
    first: WorkerClient<Channel>,
    peer: v1::Peer,
}

impl ProbeClient {
    async fn sit(identity: &Identity, port: u16) -> Result<Self> {
        let open = async |i: usize| -> Result<WorkerClient<Channel>> {
            let device = DeviceName::new(format!("d{i}"))?;
            let address = format!("{}:{port}", Network::address(i));
            let known = (&device, Role::Device);
            Ok(WorkerClient::new(connect(&address, Some(identity), known, LIMIT).await?))
        };
        let (first, mut second) = (open(0).await?, open(1).await?);
        let asked = v1::DescribeRequest { protocol: galaxy_proto::PROTOCOL };
        let described = second.describe(asked).await?.into_inner();
        let address = format!("{}:{port}", Network::address(1));
        let peer = v1::Peer { name: described.name, address, plain_port: described.plain_port };
        Ok(Self { first, peer })
    }

    async fn ask(&self, link: LinkType, compute: bool, bulk_ms: u32) -> Result<v1::ProbeReply> {
        let peer = Some(self.peer.clone());
        let request = v1::ProbeRequest { peer, compute, link: link.to_string(), bulk_ms };
        let mut first = self.first.clone();
        let reply = tokio::time::timeout(LIMIT, first.probe(request)).await?;
        Ok(reply.map_err(|status| from_status(&status))?.into_inner())
    }

    /// Probes a link as version 7 of the protocol did: twice, with long bulks.
    async fn reference(&self, link: LinkType) -> Result<Sample> {
        let begun = Instant::now();
        let idle = self.ask(link, false, LONG).await?;
        let mut busy = self.ask(link, true, LONG).await?;
        // An answer of version 7 had only one rate.
        if busy.busy_rate.is_empty() {
            busy.busy_rate = busy.rate;
        }
        let busy = v1::ProbeReply { rate: idle.rate, round_trip_ns: idle.round_trip_ns, ..busy };
        Ok(Sample::of(&busy, begun))
    }

    /// Probes a link as `galaxy profile` does.
    async fn probe(&self, link: LinkType) -> Result<Sample> {
        let begun = Instant::now();
        Ok(Sample::of(&self.ask(link, true, 0).await?, begun))
    }
}

impl Sample {
    fn of(reply: &v1::ProbeReply, begun: Instant) -> Self {
        let mbit = |rates: &[f64]| Spread::of(rates).median * 8e-6;
        let latency = reply.round_trip_ns.iter().copied().fold(f64::INFINITY, f64::min) / 2e3;
        let seconds = begun.elapsed().as_secs_f64();
        Self { rate: mbit(&reply.rate), busy: mbit(&reply.busy_rate), latency, seconds }
    }
}
