//! Overlap, measured: two devices in network namespaces, a BERT-Large shape, a link so slow that
//! communication takes about half as long as compute.
//!
//! Hidden communication = 1 - (compute lane idle while awaiting a receive) / (bytes / link rate).
//! Runs with one tile (no overlap) and with several alternate, in one measurement; the simulator,
//! fed with the operations' measured costs and the shaped rate, predicts both.

use crate::{
    models,
    network::{Link, Network, Place, burst},
    processes::{Keys, Process, program},
    spread::Spread,
};
use anyhow::{Context, Result, bail, ensure};
use galaxy_common::{
    BatchShape, Bytes, DeviceName, Epoch, Strategy, Wanted, WireType, plan::Phase,
};
use galaxy_coord::{
    Cluster, Fleet, RemoteFleet,
    cluster::Device,
    fleet::{Readiness, Run, Timeline},
};
use galaxy_graph::{LinkRate, Observed, Program, lower, simulate, timeline};
use galaxy_model::ModelDir;
use galaxy_proto::identity::{Identity, Role};
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What to measure.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
pub struct Options {
    /// Layers of the model (BERT-Large has 24).
    #[arg(long, default_value_t = 24)]
    pub layers: u32,
    /// Tokens of the text.
    #[arg(long, default_value_t = 284)]
    pub tokens: u32,
    /// Tiles of the overlapping runs.
    #[arg(long, default_value_t = 4)]
    pub tiles: u16,
    /// Rounds; each has runs with one tile and runs with several.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Runs of each kind in a round.
    #[arg(long, default_value_t = 5)]
    pub repeats: usize,
    /// Bits per second of each device's link; default: so that communication is half of compute.
    #[arg(long)]
    pub rate: Option<u64>,
    /// Ring links without TLS.
    #[arg(long)]
    pub plain: bool,
    /// Where the random model is kept.
    #[arg(long, default_value = "target/testbed-models")]
    pub cache: PathBuf,
    /// Where the result goes, as JSON.
    #[arg(long)]
    pub output: Option<PathBuf>,
}

/// What the coordinator's side needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Inner {
    options: Options,
    model: PathBuf,
    keys: PathBuf,
    /// Bits per second; 0 while the compute time is being found.
    rate: u64,
}

/// One kind of run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Tiles.
    pub tiles: u16,
    /// Wall time of each run, ms.
    pub wall_ms: Vec<f64>,
    /// Hidden communication of each run, the worse of the devices.
    pub hidden: Vec<f64>,
    /// Compute time of each run, ms, the larger of the devices.
    pub compute_ms: Vec<f64>,
    /// What the simulator predicts for each run from the operations' costs in the run before, ms.
    pub predicted_ms: Vec<f64>,
    /// Bytes that a device receives.
    pub bytes: u64,
}

impl Measured {
    fn add(&mut self, run: &Run, programs: &[Program], times: &[Timeline], rate: f64) {
        let mut worst = f64::MAX;
        let mut compute = 0f64;
        for (program, device) in programs.iter().zip(times) {
            let lanes = timeline::lane_use(program, &device.operations);
            let (_, received) = timeline::traffic(program);
            self.bytes = received;
            let hidden = timeline::hidden(lanes[0].awaiting_receive, received, rate);
            worst = worst.min(hidden.unwrap_or(0.0));
            compute = compute.max(lanes[0].busy as f64 * 1e-6);
        }
        let wall = run.devices.iter().map(|d| d.cost.total_ns).max().unwrap_or(0);
        self.wall_ms.push(wall as f64 * 1e-6);
        self.hidden.push(worst);
        self.compute_ms.push(compute);
    }
    fn line(&self) -> String {
        let percent: Vec<f64> = self.hidden.iter().map(|h| h * 100.0).collect();
        format!(
            "| {} | {:.1} | {:.1} | {:.1} | {:.1} |",
            self.tiles,
            Spread::of(&self.wall_ms),
            Spread::of(&self.compute_ms),
            Spread::of(&percent),
            Spread::of(&self.predicted_ms)
        )
    }
}

/// Runs the whole measurement and prints a table.
///
/// # Errors
/// Without root, or when a process fails.
pub fn run(options: &Options) -> Result<()> {
    let name = format!("bert-large-{}", options.layers);
    let model = models::bert(&options.cache, &name, options.layers, 1024, 16)?.canonicalize()?;
    let work = tempfile::tempdir()?;
    let keys = work.path().join("keys");
    let identities = Keys::create(&keys)?;
    identities.of("coordinator", Role::Coordinator)?;
    let mut rate = options.rate.unwrap_or(0);
    let mut result = None;
    while result.is_none() {
        // The first pass finds the compute time on links that do not matter.
        let link = (rate > 0).then(|| Link::of(rate));
        let place = |name: &str, link| Place { name: name.to_owned(), link };
        let places = [place("d0", link), place("d1", link), place("coordinator", None)];
        let network = Network::held(&format!("overlap{}", std::process::id()), &places)?;
        let mut workers = Vec::new();
        for i in 0..2 {
            let identity = identities.of(&format!("d{i}"), Role::Device)?;
            let mut command = Command::new("taskset");
            command.args(["-c", &i.to_string()]).arg(program("galaxy-worker")?);
            let address = format!("{}:7100", Network::address(i));
            let start = || worker(command, &address, &identity, &model, options.plain);
            workers.push(network.inside(i, start)??.0);
        }
        let inner =
            Inner { options: options.clone(), model: model.clone(), keys: keys.clone(), rate };
        let me = std::env::current_exe()?;
        let mut command = Command::new(me);
        command.arg("overlap-inner").arg(serde_json::to_string(&inner)?).stderr(Stdio::inherit());
        let output = network.inside(2, || command.output())??;
        ensure!(output.status.success(), "the coordinator's side failed");
        let measured: Vec<Measured> = serde_json::from_slice(&output.stdout)?;
        if rate == 0 {
            let one = measured.first().context("no runs")?;
            let compute = Spread::of(&one.compute_ms).median * 1e-3;
            rate = (one.bytes as f64 * 8.0 / (compute / 2.0)) as u64;
            eprintln!(
                "compute {:.0} ms, {} received by each device: link shaped to {} Mbit/s",
                compute * 1e3,
                Bytes(one.bytes),
                rate / 1_000_000
            );
        } else {
            result = Some(measured);
        }
    }
    report(options, rate, &result.context("no result")?)
}

/// Starts a worker of one kernel thread that serves `model`, with a command that ends where its
/// arguments begin; returns it with the address that it listens on.
///
/// # Errors
/// When it ends before it listens.
pub fn worker(
    mut command: Command,
    listen: &str,
    identity: &Path,
    model: &Path,
    plain: bool,
) -> Result<(Process, String)> {
    let models = model.parent().context("a model has a parent directory")?;
    command.args(["--threads", "1", "--listen", listen]);
    command.arg("--identity").arg(identity).arg("--models").arg(models);
    if plain {
        command.arg("--plain");
    }
    let mut worker = Process::spawn("galaxy-worker", command)?;
    let line = worker.line("listening on ")?;
    let address = line.trim_start_matches("listening on ").trim().to_owned();
    Ok((worker, address))
}

/// The coordinator's side, in its own namespace.
///
/// # Errors
/// When the devices cannot be placed or a run fails.
pub fn inner(text: &str) -> Result<()> {
    let inner: Inner = serde_json::from_str(text)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let measured = runtime.block_on(measure(&inner))?;
    println!("{}", serde_json::to_string(&measured)?);
    Ok(())
}

async fn measure(inner: &Inner) -> Result<Vec<Measured>> {
    let options = &inner.options;
    let model = Arc::new(ModelDir::open(&inner.model)?);
    let tokens: Arc<[u32]> = (0..options.tokens).map(|i| 3 + i * 7 % 900).collect();
    let shape = BatchShape::single(options.tokens, Wanted::Pooled(galaxy_common::Pooling::Mean))?;
    let rate = inner.rate as f64 / 8.0;
    let link = LinkRate { latency: 60_000, rate, window: 4 << 20, burst: burst(inner.rate) };
    let mut epoch = Epoch(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() << 20);
    let kinds: &[u16] = if inner.rate == 0 { &[1] } else { &[1, options.tiles] };
    let mut measured: Vec<Measured> =
        kinds.iter().map(|&tiles| Measured { tiles, ..Measured::default() }).collect();
    let (rounds, repeats) =
        if inner.rate == 0 { (1, 3) } else { (options.rounds, options.repeats) };
    for round in 0..rounds {
        for result in &mut measured {
            eprintln!("round {} of {rounds}, {} tiles", round + 1, result.tiles);
            epoch = Epoch(epoch.0 + 1000);
            let identity = Identity::load(&inner.keys.join("coordinator"))?;
            let cluster = cluster(inner, result.tiles)?;
            let quiet = Arc::new(|_| {});
            let fleet = RemoteFleet::start(cluster, model.clone(), identity, epoch, quiet)?;
            let mut ready = fleet.readiness();
            ready.wait_for(|r| matches!(r, Readiness::Ready(_))).await?;
            let plan = fleet.plan();
            let programs = lower(model.spec(), &plan, Phase::Prefill, &shape)?;
            let mut before: Option<Observed> = None;
            for _ in 0..=repeats {
                let run =
                    fleet.execute(shape.clone(), tokens.clone(), Duration::from_secs(60)).await;
                let run = run.map_err(|e| anyhow::anyhow!("{e}"))?;
                let times = fleet.timelines(run.epoch, run.sequence).await;
                let times = times.map_err(|e| anyhow::anyhow!("{e}"))?;
                let mut observed = Observed::new(vec![link; programs.len()]);
                for (program, device) in programs.iter().zip(&times) {
                    observed.learn(program, &device.operations, galaxy_graph::Counted::FromReady);
                }
                // The first run of a placement warms up, and teaches the second.
                if let Some(before) = before.replace(observed) {
                    result.add(&run, &programs, &times, rate);
                    let predicted = simulate(&programs, &before)?;
                    result.predicted_ms.push(predicted.total as f64 * 1e-6);
                }
            }
            fleet.close().await;
        }
    }
    Ok(measured)
}

fn cluster(inner: &Inner, tiles: u16) -> Result<Cluster> {
    let device = |i: usize| -> Result<Device> {
        Ok(Device {
            name: DeviceName::new(format!("d{i}"))?,
            address: format!("{}:7100", Network::address(i)),
            memory: Bytes(8_000_000_000),
            threads: Some(1),
            share: 1.0,
        })
    };
    Ok(Cluster {
        name: "overlap".into(),
        model: inner.model.clone(),
        identity: inner.keys.join("coordinator"),
        strategy: Strategy::Galaxy,
        wire: WireType::F32,
        tiles,
        listen: "127.0.0.1:0".into(),
        max_rows: inner.options.tokens,
        queue: 4,
        plain: inner.options.plain,
        timeout: Duration::from_secs(60),
        devices: vec![device(0)?, device(1)?],
    })
}

fn report(options: &Options, rate: u64, measured: &[Measured]) -> Result<()> {
    let [one, many] = measured else { bail!("two kinds of runs were asked for") };
    let link = if options.plain { "plain TCP" } else { "TCP with TLS" };
    println!(
        "BERT-Large shape, {} layers, {} tokens, 2 devices of one core, {link}, {} Mbit/s each way, {} runs of each kind",
        options.layers,
        options.tokens,
        rate / 1_000_000,
        one.wall_ms.len()
    );
    println!("communication {:.0} ms by bytes / rate", one.bytes as f64 * 8e3 / rate as f64);
    println!("\n| tiles | wall, ms | compute, ms | hidden, % | predicted, ms |");
    println!("| ---: | ---: | ---: | ---: | ---: |");
    println!("{}\n{}", one.line(), many.line());
    let (a, b) = (Spread::of(&one.wall_ms).median, Spread::of(&many.wall_ms).median);
    let gain = a - b;
    let (p, q) = (Spread::of(&one.predicted_ms).median, Spread::of(&many.predicted_ms).median);
    let predicted = p - q;
    println!(
        "\ngain {gain:.1} ms measured, {predicted:.1} ms predicted: {:+.1}%; speed-up {:.3} measured, {:.3} predicted",
        (gain / predicted - 1.0) * 100.0,
        a / b,
        p / q
    );
    if let Some(path) = &options.output {
        std::fs::write(path, serde_json::to_vec_pretty(&(options, rate, measured))?)?;
    }
    Ok(())
}
