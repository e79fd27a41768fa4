//! The costs and rates of links: TCP, TCP with TLS and QUIC between two workers, at several rates, delays and
//! losses, measured by the probes that planning rests on; and which of them a plan would take.

use super::{
    Options,
    contest::{ContestCell, rounds},
    open,
    show::{publish, shown},
};
use crate::{
    health::{Health, Watch},
    network::{self, Link, Network, NetworkGuard, NetworkNode},
    plot::{Axis, Chart, ChartKind, Point, Series},
    processes::{Keys, Process, listening, worker_command},
    record::{Cell, Outcome, PREDICTED, Record, RecordFile, Verdict},
    report::{Table, figure},
};
use anyhow::{Context, Result};
use galaxy_common::{
    Bytes, ClusterProfile, DeviceName, LinkProfile, LinkType, PROFILE_VERSION, Pooling, Spread,
    Strategy, Wanted, WeightFormat, WireType,
};
use galaxy_model::Formats;
use galaxy_planner::{Allowed, Offer, Request, Workload, synthetic};
use galaxy_proto::{
    channel::connect,
    fault::from_status,
    identity::{Identity, Role},
    v1::{self, worker_client::WorkerClient},
};
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};
use tonic::transport::Channel;

/// The experiment's name.
pub(super) const NAME: &str = "transport";
/// One line on what the experiment shows.
pub(super) const ABOUT: &str =
    "TCP, TCP with TLS and QUIC: latency, rate, processor time of a byte; which one a plan takes";
/// The paragraph at the beginning of the page.
const STORY: &str = "Two workers, each in a network namespace of its own, joined by one link that is shaped both ways, and the probe that `galaxy profile` makes between them: round trips of 16 bytes, then frames of up to 256 KiB one way, acknowledged at the end.";
/// The model that is planned for.
const MODEL: &str = "bert-large";
/// The tokens of the text that is planned for.
const TOKENS: u32 = 284;
/// The speed of the devices that are planned for, in GFLOP/s, like a core of this machine.
const GFLOPS: f64 = 75.0;
/// The rate of the memory of the devices that are planned for.
const MEMORY_RATE: f64 = 12.0;
/// The length of a short bulk in ms.
const SHORT: u32 = 20;
/// The length of a long bulk in ms. The processor time of a byte is what long bulks took beyond short ones: both
/// have a handshake and round trips.
const LONG: u32 = 1000;
/// The samples of each cell.
const SAMPLES: usize = 3;
/// The share of the machine above which processes other than the workers disturb a sample.
const OTHERS: f64 = 0.10;
/// The share of the machine that its host may take.
const STEAL: f64 = 0.02;
/// The longest that a call that probes may take.
const LIMIT: Duration = Duration::from_secs(30);
/// The label of TCP's congestion control, which decides how much is under way.
const CONTROL: &str = "congestion control";
/// The index of the place from which the workers are asked.
const DESK: usize = 2;

/// The properties of a link.
#[derive(Clone, Copy)]
struct Condition {
    name: &'static str,
    /// Bits per second; none where nothing is shaped.
    rate: Option<u64>,
    delay: Duration,
    /// The share of packets that is lost, each way.
    loss: f64,
}

const fn clean(name: &'static str, mbit: u64) -> Condition {
    Condition { name, rate: Some(mbit * 1_000_000), delay: Duration::ZERO, loss: 0.0 }
}

const fn bent(name: &'static str, mbit: u64, delay_ms: u64, loss: f64) -> Condition {
    Condition { delay: Duration::from_millis(delay_ms), loss, ..clean(name, mbit) }
}

/// The condition of devices on one machine, without shaping.
const OPEN: Condition = Condition { rate: None, ..clean("unshaped", 0) };

const CONDITIONS: &[Condition] = &[
    OPEN,
    clean("1 Gbit/s", 1000),
    clean("500 Mbit/s", 500),
    clean("125 Mbit/s", 125),
    clean("40 Mbit/s", 40),
    clean("10 Mbit/s", 10),
    bent("125 Mbit/s, 5 ms", 125, 5, 0.0),
    bent("125 Mbit/s, 5 ms, 0.1% lost", 125, 5, 0.001),
    bent("125 Mbit/s, 5 ms, 1% lost", 125, 5, 0.01),
    bent("40 Mbit/s, 3 ms, 1% lost", 40, 3, 0.01),
];

const SMOKE: &[Condition] = &[OPEN, CONDITIONS[3], CONDITIONS[9]];

const LINKS: [LinkType; 3] = [LinkType::Plain, LinkType::Tls, LinkType::Quic];

/// The name of a type of link in tables.
fn name(link: LinkType) -> &'static str {
    match link {
        LinkType::Plain => "TCP",
        LinkType::Tls => "TCP with TLS",
        LinkType::Quic => "QUIC",
    }
}

fn key(condition: &Condition, link: LinkType) -> String {
    format!("{}/{link}", condition.name)
}

/// Measures all links that are left, and shows the record.
///
/// # Errors
/// When a link cannot be created or measured. Samples that were taken are kept.
pub(super) fn run(options: &Options) -> Result<()> {
    let conditions = match (options.loopback, options.smoke) {
        (true, _) => &[OPEN][..],
        (false, true) => SMOKE,
        (false, false) => CONDITIONS,
    };
    let samples = options.samples.unwrap_or(if options.smoke { 1 } else { SAMPLES });
    let settings = json!({
        "conditions": conditions.iter().map(|c| c.name).collect::<Vec<_>>(), "samples": samples,
        "smoke": options.smoke, "bulks_ms": [SHORT, LONG], "model": MODEL, "tokens": TOKENS,
        "gflops": GFLOPS, "others_at_most": OTHERS,
    });
    let mut file = open(NAME, options, settings)?;
    let work = tempfile::tempdir()?;
    let keys = Keys::create(work.path())?;
    for condition in conditions {
        let cells = LINKS.map(|link| {
            let key = key(condition, link);
            ContestCell { key, labels: Vec::new(), contender: link }
        });
        if cells.iter().any(|cell| !file.done(&cell.key, samples)) {
            let lab = Lab::up(condition, options, &keys, work.path())?;
            lab.measure(&cells, samples, options.smoke, &mut file).with_context(|| {
                format!("{}; the workers said:\n{}", condition.name, lab.said())
            })?;
        }
    }
    predict(conditions, options, &mut file)?;
    file.save()?;
    show(conditions, &file, &options.output)
}

/// Two workers and the link between them.
struct Lab {
    workers: Vec<Process>,
    addresses: Vec<String>,
    coordinator: Identity,
    network: Option<NetworkGuard>,
}

impl Lab {
    fn up(condition: &Condition, options: &Options, keys: &Keys, models: &Path) -> Result<Self> {
        let network = match options.loopback {
            true => None,
            false => {
                let link = condition.rate.map(|rate| Link {
                    rate,
                    delay: condition.delay,
                    loss: condition.loss,
                });
                let device = |i| NetworkNode { name: format!("d{i}"), link };
                let coordinator = NetworkNode { name: "coordinator".to_owned(), link: None };
                let name = options.testbed.as_deref().unwrap_or(NAME);
                Network::down(name)?;
                Some(Network::held(name, &[device(0), device(1), coordinator])?)
            }
        };
        let mut workers = Vec::new();
        let mut addresses = Vec::new();
        for i in 0..2 {
            let identity = keys.of(&format!("d{i}"), Role::Device)?;
            let mut command = worker_command(&identity, models)?;
            let listen = match &network {
                None => "127.0.0.1:0".to_owned(),
                Some(_) => format!("{}:7100", Network::address(i)),
            };
            command.args(["--plain", "--listen", &listen]);
            let start = || Process::spawn(&format!("worker d{i}"), command);
            let mut worker = match &network {
                Some(network) => network.inside(i, start)??,
                None => start()?,
            };
            addresses.push(listening(&mut worker)?);
            workers.push(worker);
        }
        let coordinator = Identity::load(&keys.of("coordinator", Role::Coordinator)?)?;
        Ok(Self { workers, addresses, coordinator, network })
    }

    fn said(&self) -> String {
        self.workers.iter().map(Process::output).collect()
    }

    /// Calls `call` at a place of the network.
    fn inside<T: Send>(&self, place: usize, call: impl FnOnce() -> T + Send) -> Result<T> {
        match &self.network {
            Some(network) => network.inside(place, call),
            None => Ok(call()),
        }
    }

    /// Lets the types of links take turns, a sample each.
    fn measure(
        &self,
        cells: &[ContestCell<LinkType>],
        samples: usize,
        all_count: bool,
        file: &mut RecordFile,
    ) -> Result<()> {
        let control = self.inside(0, congestion_control)?;
        self.inside(DESK, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let client = runtime.block_on(ProbeClient::sit(self))?;
            let sample = |link, cell: &mut Cell| {
                let (values, verdict) = runtime.block_on(client.sample(self, link))?;
                cell.labels.insert(CONTROL.to_owned(), control.clone());
                let told = format!("{values:.2?}");
                Ok((values, if all_count { Verdict::Valid } else { verdict }, told))
            };
            rounds(file, (samples, 1), cells, |link, _, turn| {
                match turn.take(|cell| sample(*link, cell), |_| ()) {
                    // The packets that open a link may be lost on it, too.
                    Err(error) if !turn.last => eprintln!("{}: {error:#}", turn.key),
                    Err(error) => return Ok(Outcome::Failed { error: format!("{error:#}") }),
                    Ok(()) => {}
                }
                Ok(Outcome::Measured)
            })
        })?
    }

    /// The processor time of both workers so far, in ns.
    fn cpu(&self) -> u64 {
        self.workers.iter().map(|worker| cpu(worker.id())).sum()
    }
}

/// The name of TCP's congestion control in the namespace of this thread.
fn congestion_control() -> String {
    let chosen = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    chosen.map_or("unknown".to_owned(), |name| name.trim().to_owned())
}

/// The processor time of a process so far, in ns, of the threads that it has now.
fn cpu(pid: u32) -> u64 {
    std::fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

/// A client of both workers that asks for probes.
struct ProbeClient {
    first: WorkerClient<Channel>,
    peer: v1::Peer,
}

impl ProbeClient {
    async fn sit(lab: &Lab) -> Result<Self> {
        let open = async |i: usize| -> Result<WorkerClient<Channel>> {
            let device = DeviceName::new(format!("d{i}"))?;
            let address = &lab.addresses[i];
            let known = (&device, Role::Device);
            Ok(WorkerClient::new(connect(address, Some(&lab.coordinator), known, LIMIT).await?))
        };
        let (first, mut second) = (open(0).await?, open(1).await?);
        let asked = v1::DescribeRequest { protocol: galaxy_proto::PROTOCOL };
        let described = second.describe(asked).await?.into_inner();
        let address = lab.addresses[1].clone();
        let peer = v1::Peer { name: described.name, address, plain_port: described.plain_port };
        Ok(Self { first, peer })
    }

    async fn probe(&self, link: LinkType, compute: bool, bulk_ms: u32) -> Result<v1::ProbeReply> {
        let peer = Some(self.peer.clone());
        let request = v1::ProbeRequest { peer, compute, link: link.to_string(), bulk_ms };
        let mut first = self.first.clone();
        let reply = tokio::time::timeout(LIMIT, first.probe(request)).await?;
        Ok(reply.map_err(|status| from_status(&status))?.into_inner())
    }

    /// Takes one sample of a link.
    async fn sample(&self, lab: &Lab, link: LinkType) -> Result<(BTreeMap<String, f64>, Verdict)> {
        let daemons = || -> u64 {
            let testbed = lab.network.as_ref().map(|network| network.testbed());
            let ids = testbed.map(network::daemons).unwrap_or_default();
            ids.into_iter().map(|pid| cpu(pid.unsigned_abs())).sum()
        };
        let (watch, helpers, before) = (Watch::start()?, daemons(), lab.cpu());
        let short = self.probe(link, false, SHORT).await?;
        let between = lab.cpu();
        let long = self.probe(link, false, LONG).await?;
        let after = lab.cpu();
        let health = watch.finish(after - before + (daemons() - helpers))?;
        let busy = self.probe(link, true, 0).await?;
        let more = (after - between) as f64 - (between - before) as f64;
        // Where losses slowed the long bulks down so far that they carried no more than the short ones, the
        // sample does not count.
        let more_bytes = match long.bytes > short.bytes {
            true => (long.bytes - short.bytes) as f64,
            false => f64::NAN,
        };
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let median = |values: &[f64]| Spread::of(values).median;
        let values = [
            ("trip_us", median(&long.round_trip_ns) / 1e3),
            ("least_trip_us", least(&long.round_trip_ns) / 1e3),
            ("rate_mbit", median(&long.rate) * 8.0 / 1e6),
            ("busy_rate_mbit", median(&busy.busy_rate) * 8.0 / 1e6),
            // Nanoseconds of a byte are seconds of 10^9 bytes.
            ("cpu_s_per_gb", more / more_bytes),
            ("send_cost_s_per_gb", median(&busy.send_cost_ns)),
            ("receive_cost_s_per_gb", median(&busy.receive_cost_ns)),
        ];
        let values = values.into_iter().map(|(name, value)| (name.to_owned(), value));
        Ok((values.chain(health.values()).collect(), judge(&health)))
    }
}

fn judge(health: &Health) -> Verdict {
    let percent = |share: f64| share * 100.0;
    let others = (health.others_share > OTHERS).then(|| {
        let (share, whose) = (percent(health.others_share), health.others.join(", "));
        format!("others took {share:.0}% of the machine ({whose})")
    });
    let steal = (health.steal_share > STEAL)
        .then(|| format!("the host took {:.1}% of the machine", percent(health.steal_share)));
    Verdict::of(others.into_iter().chain(steal).collect())
}

/// Plans for two devices over each type of link, by what was measured of it.
fn predict(conditions: &[Condition], options: &Options, record: &mut Record) -> Result<()> {
    // Only the model's shape is used: no weights are written.
    let spec = crate::models::find(MODEL)?.shape.spec()?;
    let devices = ["d0", "d1"].map(|name| synthetic::SyntheticDevice {
        name: DeviceName::new(name).expect("two characters are a name"),
        gflops: GFLOPS,
        memory_rate: MEMORY_RATE,
        memory: Bytes(8_000_000_000),
        threads: 1,
        link_rate: 1.0,
        latency: 0.0,
    });
    let made = synthetic::profile(&spec, MODEL, WeightFormat::F32, &devices);
    let offers = devices.clone().map(|device| Offer {
        name: device.name,
        budget: device.memory,
        threads: device.threads,
    });
    let workload = Workload {
        generated: 0,
        texts: 1,
        lengths: vec![(TOKENS, 1.0)],
        wanted: Wanted::Pooled(Pooling::Mean),
    };
    for condition in conditions {
        for link in LINKS {
            let cell = record.cell(&key(condition, link), &[]);
            if cell.valid().next().is_none() {
                continue;
            }
            let of = |value: &str| cell.spread(value).median;
            let links = [(0, 1), (1, 0)].map(|(from, to)| LinkProfile {
                version: PROFILE_VERSION,
                from: devices[from].name.clone(),
                to: devices[to].name.clone(),
                link,
                latency: of("least_trip_us") * 1e3 / 2.0,
                rate: of("rate_mbit") * 1e6 / 8.0,
                busy_rate: of("busy_rate_mbit") * 1e6 / 8.0,
                beside: 0,
                alone: 0.0,
                send_cost: of("send_cost_s_per_gb").max(0.0),
                receive_cost: of("receive_cost_s_per_gb").max(0.0),
                spread: 0.0,
                measured: 0,
            });
            let profile = ClusterProfile { devices: made.devices.clone(), links: links.to_vec() };
            let allowed = Allowed {
                strategy: if options.smoke { Strategy::Galaxy } else { Strategy::Auto },
                wires: vec![WireType::F32],
                links: vec![link],
                tiles: None,
                exchange: None,
                max_rows: TOKENS,
                cache: galaxy_common::Cache::NONE,
                reading: galaxy_common::Reading::Preload,
            };
            let planned = galaxy_planner::plan(&Request {
                spec: &spec,
                formats: &Formats::default(),
                model: MODEL,
                fingerprint: MODEL,
                shape: MODEL,
                offers: &offers,
                profile: &profile,
                workload: &workload,
                allowed: &allowed,
            })?;
            cell.facts.insert(PREDICTED.to_owned(), planned.prediction.latency / 1e6);
            cell.labels.insert("plan".to_owned(), planned.what);
        }
    }
    Ok(())
}

fn find<'a>(record: &'a Record, condition: &Condition, link: LinkType) -> Option<&'a Cell> {
    let key = key(condition, link);
    record.cells.iter().find(|cell| cell.key == key)
}

fn show(conditions: &[Condition], record: &Record, output: &Path) -> Result<()> {
    let mut tables = Vec::new();
    for (title, value) in [
        ("Round trip of 16 bytes, \u{b5}s", "trip_us"),
        ("Rate of payload, Mbit/s", "rate_mbit"),
        ("Processor time of both workers together, s for each GB", "cpu_s_per_gb"),
        ("What a GB sent takes from kernels of the sender, s", "send_cost_s_per_gb"),
        ("What a GB received takes from kernels of the receiver, s", "receive_cost_s_per_gb"),
    ] {
        let mut table =
            Table::new(title, &["link", name(LINKS[0]), name(LINKS[1]), name(LINKS[2])]);
        for condition in conditions {
            let figures = LINKS.map(|link| {
                find(record, condition, link).map_or("-".to_owned(), |cell| figure(cell, value))
            });
            table.row([condition.name.to_owned()].into_iter().chain(figures));
        }
        tables.push(table);
    }
    let title = format!(
        "Predicted: {MODEL}, {TOKENS} tokens, two devices of {GFLOPS} GFLOP/s, ms, and the plan's link"
    );
    let sealed = "best with TLS inside";
    let columns = ["link", name(LINKS[0]), name(LINKS[1]), name(LINKS[2]), "best", sealed];
    let mut table = Table::new(&title, &columns);
    for condition in conditions {
        let predicted = LINKS.map(|link| {
            let cell = find(record, condition, link);
            cell.and_then(|cell| cell.facts.get(PREDICTED)).copied().unwrap_or(f64::NAN)
        });
        let best = |of: &[usize]| {
            let least = of.iter().min_by(|a, b| predicted[**a].total_cmp(&predicted[**b]));
            least.map_or("-", |at| if predicted[*at].is_finite() { name(LINKS[*at]) } else { "-" })
        };
        let figures = predicted.map(|ms| shown(ms, 1));
        let choices = [best(&[0, 1, 2]).to_owned(), best(&[1, 2]).to_owned()];
        table.row([condition.name.to_owned()].into_iter().chain(figures).chain(choices));
    }
    tables.push(table);
    let controls = record.cells.iter().filter_map(|cell| cell.labels.get(CONTROL));
    let controls: BTreeSet<&str> = controls.map(String::as_str).collect();
    let controls = controls.into_iter().collect::<Vec<_>>().join(", ");
    let notes = vec![
        format!("*TCP's congestion control*: {controls}, as this machine has it in the workers' namespaces. QUIC's: BBR. What small devices come with, CUBIC, takes every lost packet for congestion."),
        "*Processor time*: what a probe with bulks of a second (256 MB at most) took more than one with bulks of 20 ms, over the bytes that it carried more: handshakes and round trips are in neither. It is of all threads of both workers, what the kernel did for them in their system calls included, what it did elsewhere not.".to_owned(),
        "*What it takes from kernels*: how much longer a kernel on the worker's one thread took while frames passed, on a machine whose cores the workers share.".to_owned(),
        format!("*Predicted*: profiles of two devices that do not exist ({GFLOPS} GFLOP/s, {MEMORY_RATE} GB/s) beside links as measured here. The plan is made anew for each type of link."),
    ];
    let curves = [
        ("-rate", "Rate of payload", "Mbit/s", "rate_mbit"),
        ("", "Processor time of a byte, both ends", "s for each GB", "cpu_s_per_gb"),
    ];
    let mut charts = Vec::new();
    for (suffix, title, unit, value) in curves {
        let line = |link: LinkType| Series {
            name: name(link).to_owned(),
            points: conditions
                .iter()
                .enumerate()
                .map(|(x, condition)| {
                    let of = find(record, condition, link).map(|cell| cell.spread(value));
                    let (y, low, high) =
                        of.map_or((f64::NAN, f64::NAN, f64::NAN), |s| (s.median, s.low, s.high));
                    Point { x: x as f64, y, low, high }
                })
                .collect(),
            dashed: false,
        };
        let categories = conditions.iter().map(|condition| condition.name.to_owned()).collect();
        let chart = Chart {
            title: title.to_owned(),
            x: Axis { label: "link".to_owned(), log: false, categories: Some(categories) },
            y: Axis { label: unit.to_owned(), log: value == "rate_mbit", categories: None },
            kind: ChartKind::Lines { series: LINKS.map(line).to_vec() },
        };
        charts.push((suffix, chart));
    }
    let not_kept = [
        "Both ends share a machine of few cores, and its caches.",
        "Real network cards cut and join packets of TCP in hardware; here, as over loopback, large packets pass whole unless packets are lost one by one.",
    ];
    publish(record, (NAME, STORY), (tables, notes, charts), &not_kept, output)
}
