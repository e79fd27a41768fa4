//! How near links come to the rates and delays that were asked for: rates with iperf3, delays with an echo.

use crate::{
    environment::{COORDINATOR, Environment},
    network::{Link, Network, NetworkNode},
    processes::Process,
};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, UdpSocket},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The furthest that a rate may be from what was asked for, as a share.
pub const RATE_BOUND: f64 = 0.03;
/// The furthest that a round trip's added delays may be from what was asked for.
pub const DELAY_BOUND: Duration = Duration::from_micros(300);
/// The seconds before bytes are counted: connections that share slow links find their speed in them, and the
/// acknowledgements of one wait behind the first rush of another.
const WARM: u64 = 3;
/// The seconds that connections go on afterwards, so that none ends while bytes are counted.
const AFTER: u64 = 1;
/// The port on which iperf3 listens inside a device.
const PORT: &str = "5201";
/// The number of messages of a round trip's measurement.
const PROBES: usize = 200;
/// How long a message may be under way before it counts as lost.
const LOST: Duration = Duration::from_millis(500);
/// How long the echo waits for the next message: longer than any loss in between.
const DEAF: Duration = Duration::from_secs(5);
/// The number of messages lost in a row that is no accident any more.
const SILENT: usize = 8;
/// The pause between two messages: the link is idle, as between the steps of a ring.
const PAUSE: Duration = Duration::from_millis(1);

/// The options of `galaxy-testbed links`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// An environment's file, or the name of one that comes with the testbed.
    pub environment: String,
    /// The testbed's name while it is measured.
    #[arg(long, default_value = "links")]
    pub name: String,
    /// The seconds of each flow.
    #[arg(long, default_value_t = 5)]
    pub seconds: u64,
}

/// The flows that ran at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// Two flows between a pair of devices, one each way.
    Pair,
    /// A flow from every device to its next.
    Ring,
}

/// One flow of bytes from one device to another.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Flow {
    /// The name of the sending device.
    pub from: String,
    /// The name of the receiving device.
    pub to: String,
    /// The flows that ran at the same time.
    pub kind: LinkKind,
    /// The bits per second of the slower of both links.
    pub asked: f64,
    /// The share of packets that both links lose: TCP then stays below the rate.
    pub loss: f64,
    /// The bits per second that arrived, headers and acknowledgements counted, from the link's shaper.
    pub measured: f64,
    /// The bits per second of payload that arrived, from iperf3.
    pub payload: f64,
}

impl Flow {
    /// How far the measured rate is from what was asked for, as a share of that.
    pub fn deviation(&self) -> f64 {
        self.measured / self.asked - 1.0
    }
}

/// The round trips of messages from one device to another and back.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RoundTrip {
    /// The name of the device that sent the messages.
    pub from: String,
    /// The name of the device that sent them back.
    pub to: String,
    /// The seconds that both links add.
    pub asked: f64,
    /// The seconds that each message took; without lost ones.
    pub samples: Vec<f64>,
    /// The number of messages that were lost.
    pub lost: usize,
}

impl RoundTrip {
    /// The sample that this share of all samples do not exceed; none where all were lost.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get((share * last as f64).round() as usize).copied()
    }

    /// The seconds by which the median is above what was asked for, over that of links without delay.
    pub fn deviation(&self, without: &Self) -> Option<f64> {
        Some(self.quantile(0.5)? - without.quantile(0.5)? - self.asked)
    }
}

/// The places of an environment: its devices, and the coordinator's.
pub fn places(environment: &Environment) -> Vec<NetworkNode> {
    let device = |device| {
        let rate = environment.rate(device).0.round() as u64;
        let link = Link { rate, delay: environment.delay(device), loss: device.loss };
        NetworkNode { name: device.name.to_string(), link: Some(link) }
    };
    let coordinator = NetworkNode { name: COORDINATOR.into(), link: None };
    environment.devices.iter().map(device).chain([coordinator]).collect()
}

/// Brings the links of an environment up, measures them, prints tables, and takes them down.
///
/// # Errors
/// Without root or iperf3, or when a link is too far from what was asked for.
pub fn run(options: &Options) -> Result<()> {
    let environment = Environment::open(&options.environment)?;
    let places = places(&environment);
    let begin = Instant::now();
    let network = Network::held(&options.name, &places)?;
    eprintln!("{} is up after {:?}", options.name, begin.elapsed());
    let trips = round_trips(&network, &places)?;
    let without = undelayed(&places)?;
    println!("| round trip | asked, ms | median (5% to 95%), ms | off, ms | lost |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    let ms = |seconds: Option<f64>| seconds.unwrap_or(f64::NAN) * 1e3;
    for trip in [&without].into_iter().chain(&trips) {
        println!(
            "| {} - {} | {:.3} | {:.3} ({:.3} to {:.3}) | {:+.3} | {} of {PROBES} |",
            trip.from,
            trip.to,
            trip.asked * 1e3,
            ms(trip.quantile(0.5)),
            ms(trip.quantile(0.05)),
            ms(trip.quantile(0.95)),
            ms(trip.deviation(&without)),
            trip.lost
        );
    }
    let flows = rates(&network, &places, options.seconds)?;
    println!("\n| flow | beside | asked, Mbit/s | measured, Mbit/s | off | payload, Mbit/s |");
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    for flow in &flows {
        println!(
            "| {} -> {} | {} | {:.1} | {:.2} | {:+.2}% | {:.2} |",
            flow.from,
            flow.to,
            match flow.kind {
                LinkKind::Pair => "its reverse",
                LinkKind::Ring => "the ring",
            },
            flow.asked * 1e-6,
            flow.measured * 1e-6,
            flow.deviation() * 100.0,
            flow.payload * 1e-6
        );
    }
    let off = |flow: &&Flow| flow.loss == 0.0 && flow.deviation().abs() > RATE_BOUND;
    let slow = flows.iter().filter(off).count();
    let late = |trip: &&RoundTrip| {
        trip.deviation(&without).is_none_or(|off| off.abs() > DELAY_BOUND.as_secs_f64())
    };
    let late = trips.iter().filter(late).count();
    ensure!(
        slow == 0 && late == 0,
        "{slow} of {} rates and {late} of {} delays are too far off",
        flows.len(),
        trips.len()
    );
    Ok(())
}

/// The indices of the places that have links, each with its link.
fn shaped(places: &[NetworkNode]) -> Vec<(usize, Link)> {
    let link = |(i, place): (usize, &NetworkNode)| place.link.map(|link| (i, link));
    places.iter().enumerate().filter_map(link).collect()
}

/// Measures the rate of every pair of devices, both ways at once, and then of all devices at once,
/// each to its next.
///
/// # Errors
/// Without iperf3, or when it fails.
pub fn rates(network: &Network, places: &[NetworkNode], seconds: u64) -> Result<Vec<Flow>> {
    let devices = shaped(places);
    ensure!(devices.len() > 1, "a flow needs two devices with links");
    let numbers: Vec<usize> = devices.iter().map(|(i, _)| *i).collect();
    let mut flows = Vec::new();
    for (at, &a) in numbers.iter().enumerate() {
        for &b in &numbers[at + 1..] {
            flows.extend(together(network, places, &[(a, b)], LinkKind::Pair, seconds)?);
        }
    }
    let next = numbers.iter().cycle().skip(1);
    let ring: Vec<(usize, usize)> = numbers.iter().copied().zip(next.copied()).collect();
    flows.extend(together(network, places, &ring, LinkKind::Ring, seconds)?);
    Ok(flows)
}

/// Runs flows at the same time, and their reverses too if they are a pair's.
fn together(
    network: &Network,
    places: &[NetworkNode],
    ways: &[(usize, usize)],
    kind: LinkKind,
    seconds: u64,
) -> Result<Vec<Flow>> {
    let servers: Result<Vec<Process>> = ways.iter().map(|way| listen(network, way.1)).collect();
    let servers = servers?;
    let both = kind == LinkKind::Pair;
    let back = ways.iter().filter(|_| both).map(|(from, to)| (*to, *from));
    let all: Vec<(usize, usize)> = ways.iter().copied().chain(back).collect();
    let (sent, carried) = thread::scope(|scope| {
        let start = |&(from, to): &(usize, usize)| {
            scope.spawn(move || send(network, from, to, seconds, both))
        };
        let senders: Vec<_> = ways.iter().map(start).collect();
        let carried = carried(network, &all, seconds);
        let joined = |sender: thread::ScopedJoinHandle<'_, Result<_>>| {
            sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let sent: Result<Vec<(f64, Option<f64>)>> = senders.into_iter().map(joined).collect();
        (sent, carried)
    });
    drop(servers);
    let (there, back): (Vec<f64>, Vec<Option<f64>>) = sent?.into_iter().unzip();
    let payload = there.into_iter().chain(back.into_iter().flatten());
    let carried = carried?;
    let flow = |(((from, to), measured), payload)| -> Result<Flow> {
        let (one, other): (&NetworkNode, &NetworkNode) = (&places[from], &places[to]);
        let links = one.link.zip(other.link).context("both ends have links")?;
        Ok(Flow {
            from: one.name.clone(),
            to: other.name.clone(),
            kind,
            asked: links.0.rate.min(links.1.rate) as f64,
            loss: 1.0 - (1.0 - links.0.loss) * (1.0 - links.1.loss),
            measured,
            payload,
        })
    };
    all.into_iter().zip(carried).zip(payload).map(flow).collect()
}

/// The bits per second, headers counted, that arrive at the end of each way, once all are at speed.
fn carried(network: &Network, ways: &[(usize, usize)], seconds: u64) -> Result<Vec<f64>> {
    let count = || -> Result<Vec<(f64, Instant)>> {
        let count = |&(_, to): &(usize, usize)| Ok((network.carried(to)? as f64, Instant::now()));
        ways.iter().map(count).collect()
    };
    thread::sleep(Duration::from_secs(WARM));
    let before = count()?;
    thread::sleep(Duration::from_secs(seconds));
    let after = count()?;
    let rate = |(before, after): (&(f64, Instant), &(f64, Instant))| {
        (after.0 - before.0) * 8.0 / after.1.duration_since(before.1).as_secs_f64()
    };
    Ok(before.iter().zip(&after).map(rate).collect())
}

/// Starts an iperf3 that serves one measurement at a place.
fn listen(network: &Network, at: usize) -> Result<Process> {
    let mut command = Command::new("iperf3");
    command.args(["--server", "--one-off", "--forceflush", "--port", PORT]);
    let mut server = network
        .inside(at, || Process::spawn("iperf3", command))?
        .context("iperf3 is needed (Debian: apt-get install iperf3)")?;
    server.line("listening")?;
    Ok(server)
}

/// Sends for some seconds, and returns the bits of payload per second that arrived there, and back.
fn send(
    network: &Network,
    from: usize,
    to: usize,
    seconds: u64,
    both: bool,
) -> Result<(f64, Option<f64>)> {
    #[derive(Deserialize)]
    struct Report {
        error: Option<String>,
        end: Option<End>,
    }
    #[derive(Deserialize)]
    struct End {
        sum_received: Option<Sum>,
        sum_received_bidir_reverse: Option<Sum>,
    }
    #[derive(Deserialize)]
    struct Sum {
        bits_per_second: f64,
    }
    let mut command = Command::new("iperf3");
    command.args(["--client", &Network::address(to), "--port", PORT, "--json"]);
    command.args(["--connect-timeout", "5000", "--time", &(seconds + AFTER).to_string()]);
    command.args(["--omit", &WARM.to_string()]);
    if both {
        command.arg("--bidir");
    }
    command.stdin(Stdio::null());
    let output = network.inside(from, || command.output())??;
    let report: Report = serde_json::from_slice(&output.stdout).context("what iperf3 says")?;
    if let Some(error) = report.error {
        bail!("iperf3 from place {from} to place {to}: {error}");
    }
    let end = report.end.context("iperf3 has no result")?;
    let there = end.sum_received.context("iperf3 received nothing")?.bits_per_second;
    let back = end.sum_received_bidir_reverse.map(|sum| sum.bits_per_second);
    ensure!(back.is_some() == both, "this iperf3 does not measure both ways at once: 3.7 does");
    Ok((there, back))
}

/// Measures round trips between every pair of devices.
///
/// # Errors
/// When a socket fails.
pub fn round_trips(network: &Network, places: &[NetworkNode]) -> Result<Vec<RoundTrip>> {
    let devices = shaped(places);
    let mut trips = Vec::new();
    for (at, (a, one)) in devices.iter().enumerate() {
        for (b, other) in &devices[at + 1..] {
            let asked = one.delay + other.delay;
            trips.push(round_trip(network, places, (*a, *b), asked)?);
        }
    }
    Ok(trips)
}

/// Measures round trips over two links without delay, of the first two places' rates, in a testbed of its
/// own.
///
/// # Errors
/// When that testbed cannot be created.
pub fn undelayed(places: &[NetworkNode]) -> Result<RoundTrip> {
    let rates = shaped(places).into_iter().map(|(_, link)| link.rate);
    let place = |(i, rate)| NetworkNode { name: format!("plain{i}"), link: Some(Link::of(rate)) };
    let places: Vec<NetworkNode> = rates.take(2).enumerate().map(place).collect();
    ensure!(places.len() == 2, "a round trip needs two devices");
    let network = Network::held(&format!("plain{}", std::process::id()), &places)?;
    round_trip(&network, &places, (0, 1), Duration::ZERO)
}

fn round_trip(
    network: &Network,
    places: &[NetworkNode],
    (from, to): (usize, usize),
    asked: Duration,
) -> Result<RoundTrip> {
    let socket = |at: usize, patience: Duration| -> Result<UdpSocket> {
        let address: IpAddr = Network::address(at).parse()?;
        let socket = network.inside(at, || UdpSocket::bind((address, 0)))??;
        socket.set_read_timeout(Some(patience))?;
        Ok(socket)
    };
    let (mine, theirs) = (socket(from, LOST)?, socket(to, DEAF)?);
    mine.connect(theirs.local_addr()?)?;
    let mut samples = Vec::new();
    thread::scope(|scope| -> Result<()> {
        // The echo ends when nothing arrives any more.
        scope.spawn(|| {
            let mut message = [0; 64];
            while let Ok((size, from)) = theirs.recv_from(&mut message) {
                let _ = theirs.send_to(&message[..size], from);
                if message[0] == u8::MAX {
                    break;
                }
            }
        });
        // The first message finds the way, and is not counted.
        let mut silent = 0;
        for i in 0..=PROBES {
            let begin = Instant::now();
            let number = u64::try_from(i)?.to_be_bytes();
            mine.send(&number)?;
            let mut answer = [0; 64];
            let answered = loop {
                match mine.recv(&mut answer) {
                    Ok(size) if answer[..size] == number => break true,
                    Ok(_) => {} // one that was given up
                    Err(_) => break false,
                }
            };
            if answered && i > 0 {
                samples.push(begin.elapsed().as_secs_f64());
            }
            silent = if answered { 0 } else { silent + 1 };
            ensure!(silent < SILENT, "{SILENT} messages in a row are lost: the link is down");
            thread::sleep(PAUSE);
        }
        mine.send(&[u8::MAX])?;
        Ok(())
    })?;
    Ok(RoundTrip {
        from: places[from].name.clone(),
        to: places[to].name.clone(),
        asked: asked.as_secs_f64(),
        lost: PROBES - samples.len(),
        samples,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_device_and_the_coordinator_get_a_network_node() {
        let places = places(&Environment::open("H").unwrap());
        assert_eq!(places.len(), 5);
        let link = places[0].link.unwrap();
        assert_eq!((link.rate, link.delay), (80_000_000, Duration::from_micros(1500)));
        assert_eq!(places[4].link, None);
    }

    #[test]
    fn the_deviation_excludes_the_round_trip_of_links_without_delay() {
        let trip = |asked, samples: &[f64]| RoundTrip {
            from: "a".into(),
            to: "b".into(),
            asked,
            samples: samples.to_vec(),
            lost: 0,
        };
        let off = trip(0.006, &[0.0063, 0.0062, 0.0061]).deviation(&trip(0.0, &[0.0001]));
        assert!((off.unwrap() - 0.0001).abs() < 1e-9);
        assert_eq!(trip(0.0, &[]).quantile(0.5), None);
    }

    /// A whole link with a delay, through TAP interfaces or netem, whatever there is.
    #[test]
    fn round_trips_over_a_delayed_link_are_never_early() {
        let bent = Link { rate: 100_000_000, delay: Duration::from_millis(1), loss: 0.0 };
        if !Network::missing(true).is_empty() {
            eprintln!("skipped: {:?}", Network::missing(true));
            return;
        }
        if crate::processes::program("galaxy-testbed").is_err() {
            eprintln!("skipped: galaxy-testbed is not built");
            return;
        }
        let place = |name: &str| NetworkNode { name: name.into(), link: Some(bent) };
        let places = [place("a"), place("b")];
        let network = Network::held(&format!("bent{}", std::process::id()), &places).unwrap();
        let trip = &round_trips(&network, &places).unwrap()[0];
        assert_eq!(trip.lost, 0);
        // Messages are never early; how late they are is for a measurement to say.
        assert!(trip.samples.iter().all(|&sample| sample >= 0.002), "{:?}", trip.samples);
        // What delays the packets goes with the rest.
        let name = network.testbed().to_owned();
        drop(network);
        assert!(Network::open(&name).unwrap().is_none());
    }
}
