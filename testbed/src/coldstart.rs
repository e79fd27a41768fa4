//! Cold starts: how long until the first answer when the model lies with the coordinator alone.
//!
//! Devices without a model, each behind a link of the same rate, as the coordinator is. What the
//! devices hold together is the model, so every byte of it that a device needs must leave the
//! coordinator at least once: the time of that on its link, or the time of its disk to read it, the
//! larger one, is the bound. A first answer takes that, the placement, and a request.

use crate::{
    instance, models,
    network::{Link, Network, NetworkGuard, NetworkNode},
    processes::{Keys, Process, Setup, bare_worker, coordinator_command, listening},
    report::Table,
};
use anyhow::{Context, Result, ensure};
use galaxy_client::{Client, Output};
use galaxy_common::{Bytes, LinkRate, Spread};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Role;
use rustix::fs::{Advice, fadvise};
use serde_json::json;
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Bytes of an Ethernet frame for each segment of payload, and the payload's bytes.
const FRAME: (f64, f64) = (1514.0, 1448.0);
/// The share of the bound's rate that a cold start must reach.
const GOAL: f64 = 0.8;
/// The address of this process beside the devices.
const OUTSIDE: &str = "10.201.77.201/24";
/// Where the coordinator listens inside.
const PORT: u16 = 7000;

/// The options of `galaxy-testbed coldstart`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Rates of the links, of devices and coordinator.
    #[arg(long, value_delimiter = ',', default_value = "125Mbit/s,1000Mbit/s")]
    pub rates: Vec<LinkRate>,
    /// The number of devices, of equal shares.
    #[arg(long, default_value_t = 2)]
    pub devices: usize,
    /// The model, of the catalogue of `models --list`.
    #[arg(long, default_value = "bert-large")]
    pub model: String,
    /// Starts of each kind at each rate.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// The directory of models, and of what devices are brought.
    #[arg(long, default_value = models::CACHE)]
    pub cache: PathBuf,
    /// Without namespaces: nothing is shaped, and nothing can be compared.
    #[arg(long)]
    pub loopback: bool,
    /// A small model, one round: every step, and no figures to publish.
    #[arg(long)]
    pub smoke: bool,
    /// Prints one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The kinds of starts, in the order of a round.
const KINDS: [&str; 3] = ["first: digests too", "cold: nothing on devices", "again: caches kept"];

/// Measures cold starts, and shows them beside their bounds.
///
/// # Errors
/// Without root, or when a cluster does not start.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.loopback || instance::is_root(),
        "shaped links need root; --loopback runs without, unshaped and not to be compared"
    );
    ensure!(options.devices > 0 && options.rounds > 0, "one device and one round are the least");
    let path = match options.smoke {
        true => models::bert(&options.cache, "coldstart", 2, 256, 4)?,
        false => models::ensure(&options.cache, &options.model)?,
    };
    let path = path.canonicalize()?;
    let bytes = ModelDir::open(&path)?.pieces()?.total();
    rustix::fs::sync();
    let disk = read_cold(&path)?;
    eprintln!("{} to bring; the disk reads {} in a second", Bytes(bytes), Bytes(disk as u64));
    let rounds = if options.smoke { 1 } else { options.rounds };
    let (mut rows, mut table) = (Vec::new(), Table::new("Cold starts", &COLUMNS));
    for rate in &options.rates {
        let mut starts: [Vec<f64>; 3] = Default::default();
        for _ in 0..rounds {
            for (kind, took) in round(options, &path, *rate)?.into_iter().enumerate() {
                starts[kind].push(took.as_secs_f64());
            }
        }
        let link = bytes as f64 * 8.0 / rate.bits_per_second() * FRAME.0 / FRAME.1;
        let bound = link.max(bytes as f64 / disk);
        for (kind, starts) in KINDS.iter().zip(&starts) {
            let took = Spread::of(starts);
            let share = bound / took.median;
            let brings = !kind.starts_with("again");
            let judged = brings && !options.loopback && !options.smoke;
            table.row([
                rate_text(options, *rate),
                (*kind).to_owned(),
                format!("{:.2} ({:.2} to {:.2}, {})", took.median, took.low, took.high, took.n),
                if brings { format!("{bound:.2}") } else { String::new() },
                if brings { format!("{:.0}%", share * 100.0) } else { String::new() },
                match judged {
                    true if share >= GOAL => "yes".to_owned(),
                    true => "no".to_owned(),
                    false => String::new(),
                },
            ]);
            rows.push(json!({
                "rate_bits": rate.bits_per_second(), "kind": kind, "seconds": starts,
                "bound_seconds": bound, "link_seconds": link, "bytes": bytes, "disk_rate": disk,
            }));
        }
    }
    if options.json {
        println!(
            "{}",
            json!({ "loopback": options.loopback, "smoke": options.smoke, "starts": rows })
        );
    } else {
        println!("{table}");
    }
    Ok(())
}

const COLUMNS: [&str; 6] =
    ["links", "start", "to the first answer, s", "bound, s", "of the bound", "80% reached"];

fn rate_text(options: &Options, rate: LinkRate) -> String {
    match options.loopback {
        true => "loopback".to_owned(),
        false => format!("{:.0} Mbit/s", rate.bits_per_second() * 1e-6),
    }
}

/// Runs one round: a first start, a start with nothing on the devices, and a start with all caches kept.
fn round(options: &Options, model: &Path, rate: LinkRate) -> Result<[Duration; 3]> {
    let network = match options.loopback {
        true => None,
        false => Some(links(options.devices, rate)?),
    };
    // Removes the manifest of an earlier round.
    drop(fs::remove_file(model.join(".galaxy-manifest")));
    let stand = StartSetup::new(options, model, network)?;
    let first = stand.start(true)?;
    let cold = stand.start(true)?;
    let again = stand.start(false)?;
    Ok([first, cold, again])
}

fn links(devices: usize, rate: LinkRate) -> Result<NetworkGuard> {
    let link = Some(Link::of(rate.bits_per_second().round() as u64));
    let device = |i| NetworkNode { name: format!("d{i}"), link };
    let coordinator = NetworkNode { name: "coordinator".to_owned(), link };
    let places: Vec<NetworkNode> = (0..devices).map(device).chain([coordinator]).collect();
    Network::held(&format!("cold{}", std::process::id()), &places)?.joined(OUTSIDE)
}

/// The keys, network and directory in which starts happen.
struct StartSetup {
    setup: Setup,
    keys: Keys,
    network: Option<NetworkGuard>,
    dir: tempfile::TempDir,
}

impl StartSetup {
    fn new(options: &Options, model: &Path, network: Option<NetworkGuard>) -> Result<Self> {
        // On the disk of the models, which is the one that is measured.
        let dir = tempfile::tempdir_in(&options.cache)?;
        let keys = Keys::create(&dir.path().join("keys"))?;
        let setup =
            Setup { shares: vec![1.0; options.devices], memory: "16GB", ..Setup::new(model) };
        Ok(Self { setup, keys, network, dir })
    }

    /// Calls `call` inside the namespace of place `i`, or here without namespaces.
    fn inside<T: Send>(&self, i: usize, call: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        match &self.network {
            Some(network) => network.inside(i, call)?,
            None => call(),
        }
    }

    fn host(&self, i: usize) -> String {
        self.network.as_ref().map_or("127.0.0.1".to_owned(), |_| Network::address(i))
    }

    /// Starts all, with empty caches if it is a cold start, and returns the time from the coordinator's start
    /// to the first answer.
    fn start(&self, cold: bool) -> Result<Duration> {
        let devices = self.setup.shares.len();
        let caches = self.dir.path().join("caches");
        if cold && caches.exists() {
            fs::remove_dir_all(&caches)?;
        }
        let (mut workers, mut addresses) = (Vec::new(), Vec::new());
        for i in 0..devices {
            let name = format!("d{i}");
            let mut command =
                bare_worker(&self.keys.of(&name, Role::Device)?, &caches.join(&name))?;
            command.args(["--listen", &format!("{}:0", self.host(i))]);
            let mut worker = self.inside(i, || Process::spawn(&name, command))?;
            addresses.push(listening(&mut worker)?);
            workers.push(worker);
        }
        let listen = match &self.network {
            Some(_) => format!("{}:{PORT}", self.host(devices)),
            None => "127.0.0.1:0".to_owned(),
        };
        let identity = self.keys.of("coordinator", Role::Coordinator)?;
        let file = self.dir.path().join("cluster.toml");
        let text = self.setup.cluster_file(&identity, &addresses);
        fs::write(&file, text.replace("127.0.0.1:0", &listen))?;
        forget(&self.setup.model)?;
        let command = coordinator_command(&file)?;
        let begun = Instant::now();
        let mut coordinator =
            self.inside(devices, || Process::spawn("the coordinator", command))?;
        let address = listening(&mut coordinator)?;
        coordinator.line("ready: ")?;
        let runtime = tokio::runtime::Runtime::new()?;
        let identity = self.keys.of("laptop", Role::Client)?;
        runtime.block_on(async {
            let client = Client::builder().address(&address).identity(identity).connect().await?;
            client.run(&[[5, 6, 7, 8]], Output::Hidden).await
        })?;
        let took = begun.elapsed();
        for line in coordinator.output().lines().filter(|line| line.contains(" placed: ")) {
            eprintln!("{line}");
        }
        eprintln!("first answer after {:.2} s", took.as_secs_f64());
        Ok(took)
    }
}

fn weights(model: &Path) -> Result<Vec<PathBuf>> {
    let files = fs::read_dir(model)?.map(|entry| Ok(entry?.path()));
    let files = files.collect::<Result<Vec<_>>>()?;
    let weights = |path: &PathBuf| path.extension().is_some_and(|e| e == "safetensors");
    Ok(files.into_iter().filter(weights).collect())
}

/// Drops a model from the page cache.
fn forget(model: &Path) -> Result<()> {
    for path in weights(model)? {
        fadvise(File::open(path)?, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// Bytes per second at which the disk gives a model that no cache holds.
fn read_cold(model: &Path) -> Result<f64> {
    forget(model)?;
    let (mut bytes, mut buffer) = (0u64, vec![0; 4 << 20]);
    let begun = Instant::now();
    for path in weights(model)? {
        let mut file = File::open(&path)?;
        loop {
            let read = file.read(&mut buffer).with_context(|| path.display().to_string())?;
            if read == 0 {
                break;
            }
            bytes += read as u64;
        }
    }
    Ok(bytes as f64 / begun.elapsed().as_secs_f64())
}
