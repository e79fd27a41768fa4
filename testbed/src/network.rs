//! The network of a testbed: a namespace for each device, and its link to a bridge, shaped both ways.
//!
//! Everything is named after the testbed, and lives inside its namespaces: whoever knows the name
//! can remove it all, whatever became of those who made it. No address, route or interface of the
//! machine itself is touched.

mod guard;

pub use guard::NetworkGuard;

use crate::{
    environment::check_name,
    forward::{self, EmulatedLink},
    namespaces::{NAMES, inside, namespace},
};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde::Deserialize;
use std::{
    fmt, fs,
    io::Write as _,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The bytes that a link lets through at once after a pause, as time at its rate. With more, short messages
/// would pass unshaped; with less, a link never reaches its rate, because the kernel fills its bucket that
/// late, and because the stack cuts packets before the link instead of behind it, which costs the devices'
/// processors more than any real link does.
const BURST: Duration = Duration::from_micros(550);
/// The bytes of the largest packet that the stack hands to any link whole; to a slower link less, so that it
/// fits into what passes at once. At 250 Mbit/s, both ways at once, that costs 0.08 of a core.
const SUPER_PACKET: u64 = 65_536;
/// The bytes of the largest packet for a slow link: two segments, and what the kernel sets aside for headers.
const SMALL_PACKET: u64 = 4_096;
/// The bytes that may wait for a link: more than all windows of its connections, so that a packet is lost
/// only where loss was asked for.
const WAITING: u64 = 16_000_000;
/// The congestion control of connections: the default of small devices' systems, whatever this machine itself
/// uses.
pub(crate) const CONGESTION: &str = "cubic";
/// The first three numbers of the addresses in every testbed.
const SUBNET: &str = "10.201.77";
/// How long killed processes may take to be gone.
const GONE: Duration = Duration::from_secs(10);
/// The time between two looks at what ends by itself.
const LOOK: Duration = Duration::from_millis(5);

/// The rate, delay and loss of a link.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// The bits per second each way, headers counted.
    pub rate: u64,
    /// The delay of everything that its device sends.
    pub delay: Duration,
    /// The share of packets that is lost, each way.
    pub loss: f64,
}

impl Link {
    /// A link of this rate, in bits per second, without delay or loss.
    pub fn of(rate: u64) -> Self {
        Self { rate, delay: Duration::ZERO, loss: 0.0 }
    }

    /// Whether delay or loss is emulated beside the rate.
    fn has_delay_or_loss(&self) -> bool {
        !self.delay.is_zero() || self.loss > 0.0
    }
}

/// The bytes that a link of this rate lets through at once after a pause.
pub fn burst(rate: u64) -> u64 {
    // Every packet must fit, with the headers that its segments will have.
    in_a_burst(rate).max(super_packet(rate) * 5 / 4)
}

/// The bytes of the largest packet that the stack hands to a link of this rate whole.
fn super_packet(rate: u64) -> u64 {
    in_a_burst(rate).clamp(SMALL_PACKET, SUPER_PACKET)
}

fn in_a_burst(rate: u64) -> u64 {
    (rate as f64 / 8.0 * BURST.as_secs_f64()) as u64
}

/// A place in the network: a device or the coordinator.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkNode {
    /// The place's name.
    pub name: String,
    /// The place's link; without one, nothing is shaped.
    pub link: Option<Link>,
}

/// A thing that this machine lacks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Missing {
    /// The name of the thing, as "tc of iproute2".
    pub what: String,
    /// The remedy, as text.
    pub remedy: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.remedy)
    }
}

/// The namespaces of a testbed that is up. Dropping it leaves them: see [`NetworkGuard`].
#[derive(Debug)]
pub struct Network {
    testbed: String,
    places: Vec<String>,
}

impl Network {
    /// What this machine lacks for links. `bent` says whether delays or losses are asked for.
    pub fn missing(bent: bool) -> Vec<Missing> {
        let lacks =
            |what: &str, remedy: &str| vec![Missing { what: what.into(), remedy: remedy.into() }];
        if !geteuid().is_root() {
            return lacks(
                "the rights of root",
                "run it with sudo, or with --loopback (no shaping)",
            );
        }
        for program in ["ip", "tc"] {
            if Command::new(program).arg("-V").output().is_err() {
                return lacks(program, "apt-get install iproute2");
            }
        }
        let testbed = format!("try{}", std::process::id());
        let hub = namespace(&testbed, "hub");
        if let Err(error) = run("ip", &["netns", "add", &hub]) {
            return lacks(
                &format!("network namespaces ({error:#})"),
                "a kernel with CONFIG_NET_NS, and the capability CAP_SYS_ADMIN",
            );
        }
        let tried = inside(&hub, || {
            let mut missing = Vec::new();
            for (what, program, line, option) in [
                ("bridges", "ip", "link add br0 type bridge", "CONFIG_BRIDGE"),
                ("veth pairs", "ip", "link add h0 type veth peer name eth0", "CONFIG_VETH"),
                (
                    "super-packets of a chosen size",
                    "ip",
                    "link set h0 gso_max_size 4096 gro_max_size 4096",
                    "iproute2 5.19",
                ),
                (
                    "shaped links (tbf)",
                    "tc",
                    "qdisc add dev h0 root tbf rate 1mbit burst 20000 limit 100000",
                    "CONFIG_NET_SCH_TBF",
                ),
            ] {
                if let Err(error) = run(program, &line.split(' ').collect::<Vec<_>>()) {
                    missing.push(Missing {
                        what: format!("{what} (`{program} {line}`: {error:#})"),
                        remedy: match option.starts_with("CONFIG") {
                            true => format!("a kernel with {option}"),
                            false => format!("{option} or newer"),
                        },
                    });
                }
            }
            if bent
                && !has_netem("h0")
                && let Err(error) = forward::check()
            {
                missing.push(Missing {
                    what: format!("delay and loss: neither netem nor TAP interfaces ({error:#})"),
                    remedy: "a kernel with CONFIG_TUN and the device /dev/net/tun, or with \
                             CONFIG_NET_SCH_NETEM"
                        .into(),
                });
            }
            missing
        });
        let removed = Self::down(&testbed);
        match tried {
            Ok(missing) if removed.is_ok() => missing,
            Ok(_) => lacks("a way to remove namespaces", "the capability CAP_SYS_ADMIN"),
            Err(error) => {
                lacks(&format!("a way into namespaces ({error:#})"), "the capability CAP_SYS_ADMIN")
            }
        }
    }

    /// Makes the namespaces of `testbed` and the links of its places, in their order.
    ///
    /// # Errors
    /// Without root, where the kernel lacks something, or when it is up already.
    pub fn up(testbed: &str, places: &[NetworkNode]) -> Result<Self> {
        ensure!(
            geteuid().is_root(),
            "network namespaces need root: run this as root, or with --loopback (no shaping)"
        );
        check_testbed(testbed)?;
        ensure!(places.len() <= 200, "{} places: at most 200 fit on a bridge", places.len());
        for place in places {
            check_name("a place", &place.name)?;
            ensure!(place.name != "hub", "a place cannot be named \"hub\": the bridge is");
        }
        ensure!(
            namespaces(testbed)?.is_empty(),
            "testbed {testbed} is up, or something of it is left: take it down first"
        );
        // The process that creates the hub owns the name.
        run("ip", &["netns", "add", &namespace(testbed, "hub")])?;
        let made = Self::make(testbed, places);
        if made.is_err() {
            let _ = Self::down(testbed);
        }
        made
    }

    fn make(testbed: &str, places: &[NetworkNode]) -> Result<Self> {
        let inner = |place: &NetworkNode| namespace(testbed, &place.name);
        let names: Vec<String> = places.iter().map(|p| format!("netns add {}", inner(p))).collect();
        batch("ip", &names)?;
        let hub = namespace(testbed, "hub");
        let bent =
            places.iter().any(|place| place.link.is_some_and(|link| link.has_delay_or_loss()));
        let netem = bent && inside(&hub, || has_netem("lo"))?;
        let mut lines = Vec::new();
        for (i, place) in places.iter().enumerate() {
            let Some(link) = place.link.filter(|link| !netem && link.has_delay_or_loss()) else {
                continue;
            };
            let delay_ns = u64::try_from(link.delay.as_nanos()).context("a delay of centuries")?;
            let (place, loss) = (place.name.clone(), link.loss);
            lines.push(EmulatedLink { i, place, delay_ns, loss, rate: link.rate });
        }
        if !lines.is_empty() {
            forward::start(testbed, &lines)?;
        }
        inside(&hub, || -> Result<()> {
            let mut steps = vec!["link add br0 type bridge".to_owned(), "link set br0 up".into()];
            let mut shapes = Vec::new();
            for (i, place) in places.iter().enumerate() {
                let port = format!("h{i}");
                if lines.iter().all(|line| line.i != i) {
                    let peer = format!("eth0 netns {}", inner(place));
                    steps.push(format!("link add {port} type veth peer name {peer}"));
                }
                // The alias tells `open` which place it is.
                steps.push(format!("link set {port} alias {}", place.name));
                steps.push(configured(&port, place.link.as_ref()));
                steps.push(format!("link set {port} master br0 up"));
                if let Some(link) = &place.link {
                    let way = Link { delay: Duration::ZERO, ..*link };
                    shapes.extend(shape(&port, &way, netem));
                }
            }
            batch("ip", &steps)?;
            batch("tc", &shapes)
        })??;
        for (i, place) in places.iter().enumerate() {
            inside(&inner(place), || -> Result<()> {
                // Where the kernel has no such choice, or leaves it to no namespace, it stays what it is.
                let _ = fs::write("/proc/sys/net/ipv4/tcp_congestion_control", CONGESTION);
                let steps = [
                    configured("eth0", place.link.as_ref()),
                    format!("addr add {}/24 dev eth0", Self::address(i)),
                    "link set eth0 up".into(),
                    "link set lo up".into(),
                ];
                batch("ip", &steps)?;
                match &place.link {
                    Some(link) => batch("tc", &shape("eth0", link, netem)),
                    None => Ok(()),
                }
            })?
            .with_context(|| format!("the link of {}", place.name))?;
        }
        let places = places.iter().map(|place| place.name.clone()).collect();
        Ok(Self { testbed: testbed.to_owned(), places })
    }

    /// Opens the network of a testbed that another process has made; none where there is none.
    ///
    /// # Errors
    /// When only a part of it is there.
    pub fn open(testbed: &str) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Port {
            ifname: String,
            #[serde(default)]
            ifalias: Option<String>,
        }
        check_testbed(testbed)?;
        let there = namespaces(testbed)?;
        if there.is_empty() {
            return Ok(None);
        }
        let broken =
            || format!("only a part of testbed {testbed} is up: take it down, and up again");
        let hub = namespace(testbed, "hub");
        ensure!(there.contains(&hub), broken());
        let text = inside(&hub, || run("ip", &["-j", "link", "show"]))??;
        let ports: Vec<Port> = serde_json::from_str(&text).context("what `ip -j` says")?;
        let mut places: Vec<(usize, String)> = ports
            .into_iter()
            .filter_map(|port| Some((port.ifname.strip_prefix('h')?.parse().ok()?, port.ifalias?)))
            .collect();
        places.sort();
        let whole = places.iter().enumerate().all(|(i, (at, _))| i == *at)
            && places.len() + 1 == there.len()
            && places.iter().all(|(_, name)| there.contains(&namespace(testbed, name)));
        ensure!(whole, broken());
        let places = places.into_iter().map(|(_, name)| name).collect();
        Ok(Some(Self { testbed: testbed.to_owned(), places }))
    }

    /// Ends every process in the namespaces of a testbed, and removes them. Namespaces that are not there are
    /// no error.
    ///
    /// # Errors
    /// Without root, or when a process does not end.
    pub fn down(testbed: &str) -> Result<()> {
        check_testbed(testbed)?;
        let names = namespaces(testbed)?;
        if names.is_empty() {
            return Ok(());
        }
        ensure!(geteuid().is_root(), "testbed {testbed} was made by root: run this as root");
        let deadline = Instant::now() + GONE;
        loop {
            let left = processes(&names)?;
            if left.is_empty() {
                break;
            }
            ensure!(
                Instant::now() < deadline,
                "processes of testbed {testbed} do not end when killed: {left:?}"
            );
            for pid in left.into_iter().filter_map(Pid::from_raw) {
                // It may have ended by itself meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
            thread::sleep(LOOK);
        }
        let steps: Vec<String> = names.iter().map(|name| format!("netns del {name}")).collect();
        batch("ip", &steps)
    }

    /// The testbed's name.
    pub fn testbed(&self) -> &str {
        &self.testbed
    }

    /// The names of the places, in order.
    pub fn places(&self) -> &[String] {
        &self.places
    }

    /// The address of place `i`.
    pub fn address(i: usize) -> String {
        format!("{SUBNET}.{}", i + 1)
    }

    /// The name of the namespace of place `i`.
    pub fn namespace(&self, i: usize) -> String {
        namespace(&self.testbed, &self.places[i])
    }

    /// Calls `call` on a thread inside place `i`; see [`inside`].
    ///
    /// # Errors
    /// As [`enter`](crate::namespaces::enter).
    pub fn inside<T: Send>(&self, i: usize, call: impl FnOnce() -> T + Send) -> Result<T> {
        inside(&self.namespace(i), call)
    }

    /// Pulls or plugs the cable of place `i`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn plug(&self, i: usize, plugged: bool) -> Result<()> {
        let to = if plugged { "up" } else { "down" };
        let hub = namespace(&self.testbed, "hub");
        inside(&hub, || run("ip", &["link", "set", &format!("h{i}"), to]))?.map(drop)
    }

    /// The bytes that the link of place `i` has carried towards it so far, headers counted. They are counted
    /// by its shaper, since the stack counts one header for each whole packet.
    ///
    /// # Errors
    /// When the link is not shaped.
    pub fn carried(&self, i: usize) -> Result<u64> {
        #[derive(Deserialize)]
        struct Shaper {
            kind: String,
            bytes: u64,
        }
        let hub = namespace(&self.testbed, "hub");
        let port = format!("h{i}");
        let text = inside(&hub, || run("tc", &["-s", "-j", "qdisc", "show", "dev", &port]))??;
        let shapers: Vec<Shaper> = serde_json::from_str(&text).context("what `tc -j` says")?;
        let shaper = shapers.iter().find(|shaper| shaper.kind == "tbf");
        shaper.map(|shaper| shaper.bytes).with_context(|| format!("{port} is not shaped"))
    }

    /// The bytes that each place has sent so far, with one header counted for each packet that the stack
    /// passes on whole.
    ///
    /// # Errors
    /// When the kernel does not report them.
    pub fn sent(&self) -> Result<Vec<u64>> {
        #[derive(Deserialize)]
        struct Port {
            ifname: String,
            stats64: Counters,
        }
        #[derive(Deserialize)]
        struct Counters {
            rx: Counter,
        }
        #[derive(Deserialize)]
        struct Counter {
            bytes: u64,
        }
        let hub = namespace(&self.testbed, "hub");
        let text = inside(&hub, || run("ip", &["-s", "-j", "link", "show"]))??;
        let ports: Vec<Port> = serde_json::from_str(&text).context("what `ip -s -j` says")?;
        let of = |i: usize| {
            let port = ports.iter().find(|port| port.ifname == format!("h{i}"));
            port.map(|port| port.stats64.rx.bytes).with_context(|| format!("there is no port h{i}"))
        };
        (0..self.places.len()).map(of).collect()
    }

    /// Cuts the path from place `from` to place `to`, both ways for a connection, or heals it. All other
    /// places still reach both.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn cut(&self, from: usize, to: usize, cut: bool) -> Result<()> {
        let verb = if cut { "add" } else { "del" };
        let route = format!("{}/32", Self::address(to));
        self.inside(from, || run("ip", &["route", verb, "blackhole", &route]))?.map(drop)
    }
}

/// The names of the testbeds that have namespaces here.
pub fn testbeds() -> Vec<String> {
    let entries = fs::read_dir(NAMES).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (testbed, _) = name.strip_prefix("galaxy-")?.split_once('-')?;
        Some(testbed.to_owned())
    });
    let names: std::collections::BTreeSet<String> = names.collect();
    names.into_iter().collect()
}

/// The ids of the testbed's own processes, which run beside the bridge.
pub fn daemons(testbed: &str) -> Vec<i32> {
    processes(&[namespace(testbed, "hub")]).unwrap_or_default()
}

/// Checks that a name has no dash, which would let two testbeds claim one name: `a` with a device `b-c`,
/// `a-b` with `c`.
fn check_testbed(testbed: &str) -> Result<()> {
    check_name("the testbed", testbed)?;
    ensure!(
        !testbed.contains('-'),
        "a testbed cannot be named {testbed:?}: names of devices follow a dash; \
         give it a name of letters and digits with --name"
    );
    Ok(())
}

/// The namespaces of a testbed that are there, the hub last: as long as it is there, the name is taken.
fn namespaces(testbed: &str) -> Result<Vec<String>> {
    let prefix = namespace(testbed, "");
    let entries = match fs::read_dir(NAMES) {
        Ok(entries) => entries,
        // No namespace was ever named on this machine.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).context(NAMES),
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.context(NAMES)?.file_name().to_string_lossy().into_owned();
        if name.starts_with(&prefix) {
            names.push(name);
        }
    }
    let hub = namespace(testbed, "hub");
    names.sort_by_key(|name| (*name == hub, name.clone()));
    Ok(names)
}

/// The ids of the processes in some namespaces, except this one.
fn processes(names: &[String]) -> Result<Vec<i32>> {
    let of = |path: PathBuf| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let wanted: Vec<_> = names.iter().filter_map(|name| of(Path::new(NAMES).join(name))).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let name = entry.context("/proc")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A process that ended meanwhile has no namespace any more.
        let there = of(Path::new("/proc").join(&name).join("ns/net"));
        let mine = i64::from(pid) == i64::from(std::process::id());
        if !mine && there.is_some_and(|there| wanted.contains(&there)) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Whether this kernel delays and loses packets itself, tried on an interface.
fn has_netem(interface: &str) -> bool {
    let tries = ["qdisc", "replace", "dev", interface, "root", "netem", "delay", "1ms"];
    let has = run("tc", &tries).is_ok();
    if has {
        let _ = run("tc", &["qdisc", "del", "dev", interface, "root"]);
    }
    has
}

/// The arguments of `ip` that keep packets small enough for what the link lets through at once, and IPv6 from
/// chatting.
pub(crate) fn configured(interface: &str, link: Option<&Link>) -> String {
    let size = link.map_or(SUPER_PACKET, |link| super_packet(link.rate));
    format!("link set {interface} gso_max_size {size} gro_max_size {size} addrgenmode none")
}

/// The lines for `tc` that shape one end of a link.
pub(crate) fn shape(interface: &str, link: &Link, netem: bool) -> Vec<String> {
    let (rate, burst) = (link.rate, burst(link.rate));
    let tbf = format!("tbf rate {rate}bit burst {burst} limit {WAITING}");
    if !netem || !link.has_delay_or_loss() {
        return vec![format!("qdisc add dev {interface} root {tbf}")];
    }
    let (delay, loss) = (link.delay.as_nanos() as f64 * 1e-3, link.loss * 100.0);
    let netem = format!("netem limit 100000 delay {delay}us loss {loss}%");
    vec![
        format!("qdisc add dev {interface} root handle 1: {netem}"),
        format!("qdisc add dev {interface} parent 1:1 handle 2: {tbf}"),
    ]
}

/// Runs a program of iproute2, and returns what it prints.
fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let output = command.output().with_context(|| needed(program))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("`{program} {}` failed: {}", arguments.join(" "), why.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs many lines in one process of the program.
pub(crate) fn batch(program: &str, lines: &[String]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut command = Command::new(program);
    command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| needed(program))?;
    let mut text = lines.join("\n");
    text.push('\n');
    let mut pipe = child.stdin.take().context("a pipe was asked for")?;
    // It stops reading at the first line that fails, and its own error says more than this one would.
    let _ = pipe.write_all(text.as_bytes());
    drop(pipe);
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    let at = why.rsplit_once("-:").and_then(|(_, at)| at.trim().parse::<usize>().ok());
    let line = at.and_then(|at| lines.get(at.checked_sub(1)?)).map_or("-batch -", String::as_str);
    bail!("`{program} {line}` failed: {}", why.lines().next().unwrap_or_default().trim());
}

fn needed(program: &str) -> String {
    format!("{program} is needed (Debian: apt-get install iproute2)")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn places(count: usize) -> Vec<NetworkNode> {
        let link = Some(Link::of(100_000_000));
        (0..count).map(|i| NetworkNode { name: format!("d-{i}"), link }).collect()
    }

    fn root() -> bool {
        let root = geteuid().is_root();
        if !root {
            eprintln!("skipped: namespaces need root");
        }
        root
    }

    #[test]
    fn a_testbed_name_with_a_dash_is_rejected() {
        let error = Network::open("a-b").unwrap_err();
        assert!(error.to_string().contains("--name"), "{error:#}");
    }

    #[test]
    fn a_faster_link_has_a_larger_token_bucket() {
        assert_eq!(burst(10_000_000), 5_120);
        assert_eq!(burst(250_000_000), 21_483);
        assert_eq!(burst(10_000_000_000), 687_500);
    }

    #[test]
    fn a_network_is_found_by_name_and_removed_with_its_processes() {
        if !root() {
            return;
        }
        let name = format!("up{}", std::process::id());
        let other = Network::held(&format!("{name}x"), &places(1)).unwrap();
        let made = Network::up(&name, &places(3)).unwrap();
        let found = Network::open(&name).unwrap().expect("it is up");
        assert_eq!(found.places(), made.places());
        assert!(Network::up(&name, &places(3)).unwrap_err().to_string().contains("is up"));
        let mut inner =
            made.inside(1, || Command::new("sleep").arg("1000").spawn()).unwrap().unwrap();
        // A half-removed testbed is refused, and can still be removed. The first place is removed here, not
        // the last: without the last it would be a smaller testbed.
        run("ip", &["netns", "del", &made.namespace(0)]).unwrap();
        assert!(Network::open(&name).unwrap_err().to_string().contains("a part"));
        Network::down(&name).unwrap();
        assert!(!inner.wait().unwrap().success(), "it was killed");
        assert!(Network::open(&name).unwrap().is_none());
        Network::down(&name).unwrap();
        assert!(Network::open(other.testbed()).unwrap().is_some(), "others stay");
    }

    #[test]
    fn network_nodes_reach_each_other_unless_their_path_is_cut() {
        if !root() {
            return;
        }
        let name = format!("cut{}", std::process::id());
        let network = Network::held(&name, &places(2)).unwrap();
        let reach = || {
            let listener = || std::net::TcpListener::bind((Network::address(1), 0));
            let listener = network.inside(1, listener).unwrap().unwrap();
            let to = listener.local_addr().unwrap();
            network.inside(0, || std::net::TcpStream::connect(to).is_ok()).unwrap()
        };
        assert!(reach());
        network.cut(0, 1, true).unwrap();
        assert!(!reach());
        network.cut(0, 1, false).unwrap();
        assert!(reach());
    }
}
