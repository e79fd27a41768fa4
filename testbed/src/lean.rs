//! `galaxy-testbed lean`: a worker's start, idle processor time, peak memory, and memory over many requests.

use crate::{
    models,
    processes::{Keys, Process, listening, worker_command},
};
use anyhow::{Context, Result, ensure};
use galaxy_common::{
    BatchShape, Bytes, DeviceName, Epoch, LinkType, Pooling, Reading, Segment, Spread, Strategy,
    Wanted, WireType,
};
use galaxy_coord::{
    Cluster, Fleet, RemoteFleet,
    client_memory::DEFAULT_CLIENT_MEMORY,
    cluster::{DEFAULT_DRIFT, DEFAULT_LENGTH, DEFAULT_PATIENCE, DEFAULT_PROFILES, DeviceConfig},
    fleet::{Readiness, Task},
};
use galaxy_model::ModelDir;
use galaxy_proto::{
    channel::connect,
    fault::from_status,
    identity::{Identity, Role},
    v1::{ProfileRequest, profile_event, worker_client::WorkerClient},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The options of `galaxy-testbed lean`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The number of requests over which memory must stay flat.
    #[arg(long, default_value_t = 10_000)]
    pub requests: usize,
    /// The number of layers of the BERT-Large shape whose peak memory is measured.
    #[arg(long, default_value_t = 24)]
    pub layers: u32,
    /// The number of starts that are timed.
    #[arg(long, default_value_t = 10)]
    pub starts: usize,
    /// The seconds over which an idle worker is watched.
    #[arg(long, default_value_t = 10)]
    pub idle: u64,
    /// The directory of the random model.
    #[arg(long, default_value = "target/testbed-models")]
    pub cache: PathBuf,
    /// Measures only the peak memory of a worker that is profiled with this much granted, for the shape of
    /// BERT-Large; 0B means as much as is free.
    #[arg(long, value_name = "BYTES")]
    pub profiled: Option<Bytes>,
    /// The model of the many requests.
    #[arg(long, default_value = "models/all-MiniLM-L6-v2")]
    pub model: PathBuf,
}

/// A value of `/proc/PID/status` in bytes.
fn status(pid: u32, key: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|l| l.starts_with(key)).with_context(|| key.to_owned())?;
    let kilobytes: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
    Ok(kilobytes * 1024)
}

/// Processor time of a process, in clock ticks of 10 ms.
fn ticks(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = text[text.rfind(')').context("a name")?..].split_whitespace().collect();
    Ok(fields[12].parse::<u64>()? + fields[13].parse::<u64>()?)
}

fn start(identity: &Path, model: &Path) -> Result<(Process, String)> {
    let models = model.parent().context("a model has a parent directory")?;
    let mut command = worker_command(identity, models)?;
    command.args(["--listen", "127.0.0.1:0"]);
    let mut worker = Process::spawn("galaxy-worker", command)?;
    let address = listening(&mut worker)?;
    Ok((worker, address))
}

struct Bench {
    keys: PathBuf,
    workers: Vec<(Process, String)>,
    _work: tempfile::TempDir,
}

impl Bench {
    fn up(devices: usize, model: &Path) -> Result<Self> {
        let work = tempfile::tempdir()?;
        let keys = work.path().join("keys");
        let identities = Keys::create(&keys)?;
        identities.of("coordinator", Role::Coordinator)?;
        let mut workers = Vec::new();
        for i in 0..devices {
            let identity = identities.of(&format!("d{i}"), Role::Device)?;
            workers.push(start(&identity, model)?);
        }
        Ok(Self { keys, workers, _work: work })
    }

    async fn fleet(&self, model: &Arc<ModelDir>, max_rows: u32) -> Result<RemoteFleet> {
        let device = |(i, (_, address)): (usize, &(Process, String))| -> Result<DeviceConfig> {
            Ok(DeviceConfig {
                name: DeviceName::new(format!("d{i}"))?,
                address: address.clone(),
                addresses: Vec::new(),
                memory: Bytes(8_000_000_000),
                threads: Some(1),
                share: Some(1.0),
            })
        };
        let cluster = Cluster {
            kv_cache_tokens: Some(0),
            generate: None,
            kv_cache_format: galaxy_common::CacheType::F32,
            name: "lean".into(),
            model: model.path().to_owned(),
            identity: self.keys.join("coordinator"),
            authority: None,
            strategy: Strategy::Galaxy,
            wire: Some(WireType::F32),
            activations: galaxy_common::Activations::default(),
            tiles: Some(4),
            listen: "127.0.0.1:0".into(),
            max_rows,
            queue: 4,
            client_memory: DEFAULT_CLIENT_MEMORY,
            speculation: true,
            link: Some(LinkType::Tls),
            plain: false,
            lossy: false,
            weight_streaming: Reading::Auto,
            warnings: Vec::new(),
            weights_format: None,
            lengths: vec![DEFAULT_LENGTH],
            texts: 1,
            profiles: self.keys.join(DEFAULT_PROFILES),
            drift: DEFAULT_DRIFT,
            patience: DEFAULT_PATIENCE,
            timeout: Duration::from_secs(60),
            devices: self.workers.iter().enumerate().map(device).collect::<Result<_>>()?,
        };
        let epoch = Epoch(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() << 20);
        let identity = Identity::load(&self.keys.join("coordinator"))?;
        let fleet = RemoteFleet::start(cluster, model.clone(), identity, epoch, Arc::new(|_| {}))?;
        let mut ready = fleet.readiness();
        ready.wait_for(|r| matches!(r, Readiness::Ready(_))).await?;
        Ok(fleet)
    }
}

/// Measures everything, and prints a table.
///
/// # Errors
/// When a process fails or a bound is not kept.
pub fn run(options: &Options) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    if let Some(granted) = options.profiled {
        return runtime.block_on(profiled(options, granted));
    }
    let none = tempfile::tempdir()?;
    let mut starts = Vec::new();
    for _ in 0..options.starts {
        let work = tempfile::tempdir()?;
        let identity = Keys::create(&work.path().join("keys"))?.of("d0", Role::Device)?;
        let begin = Instant::now();
        let worker = start(&identity, &none.path().join("model"))?;
        starts.push(begin.elapsed().as_secs_f64() * 1e3);
        drop(worker);
    }
    println!("| what | bound | measured |\n| --- | ---: | ---: |");
    println!("| start to listening, ms | 100 | {:.1} |", Spread::of(&starts));
    runtime.block_on(peak(options))?;
    runtime.block_on(many(options))
}

/// Has a worker measure itself with this much granted, and prints the memory that it took.
async fn profiled(options: &Options, granted: Bytes) -> Result<()> {
    let name = format!("bert-large-{}", options.layers);
    let path = models::bert(&options.cache, &name, options.layers, 1024, 16)?.canonicalize()?;
    let model = ModelDir::open(&path)?;
    let bench = Bench::up(1, &path)?;
    let (worker, address) = &bench.workers[0];
    let identity = Identity::load(&bench.keys.join("coordinator"))?;
    let (device, limit) = (DeviceName::new("d0")?, Duration::from_secs(60));
    let channel = connect(address, Some(&identity), (&device, Role::Device), limit).await?;
    let request = ProfileRequest {
        model: model.name().to_owned(),
        fingerprint: model.fingerprint().to_owned(),
        threads: 0,
        max_rows: 512,
        memory_bytes: granted.0,
        activations: galaxy_common::Activations::default().to_string(),
    };
    let before = status(worker.id(), "VmHWM")?;
    let asked = WorkerClient::new(channel).profile(request).await;
    let mut events = asked.map_err(|status| from_status(&status))?.into_inner();
    while let Some(event) = events.message().await.map_err(|status| from_status(&status))? {
        if let Some(profile_event::Event::Profile(bytes)) = event.event {
            eprintln!("a profile of {} bytes came", bytes.len());
        }
    }
    let peak = status(worker.id(), "VmHWM")?;
    println!("| what | granted | measured |\n| --- | ---: | ---: |");
    println!("| peak memory before it is profiled | {granted} | {} |", Bytes(before));
    println!("| and after | {granted} | {} |", Bytes(peak));
    ensure!(granted.0 == 0 || peak <= granted.0, "the peak is above what was granted");
    Ok(())
}

async fn peak(options: &Options) -> Result<()> {
    let name = format!("bert-large-{}", options.layers);
    let path = models::bert(&options.cache, &name, options.layers, 1024, 16)?.canonicalize()?;
    let model = Arc::new(ModelDir::open(&path)?);
    let bench = Bench::up(2, &path)?;
    let fleet = bench.fleet(&model, 512).await?;
    let tokens: Arc<[u32]> = (0..512).map(|i| 3 + i * 7 % 900).collect();
    let shape = BatchShape::single(512, Wanted::Hidden)?;
    for _ in 0..3 {
        let run =
            fleet.execute(Task::new(shape.clone(), tokens.clone()), Duration::from_secs(60)).await;
        run.map_err(|e| anyhow::anyhow!("{e}"))?;
    }
    for ((worker, _), device) in bench.workers.iter().zip(fleet.devices()) {
        let pid = worker.id();
        let (peak, weights) = (status(pid, "VmHWM")?, device.weight_bytes.0);
        let bound = weights + weights * 15 / 100 + 60_000_000;
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        println!(
            "| peak memory of {}, BERT-Large shape, {} of weights, 512 tokens | {} | {} |",
            device.name,
            Bytes(weights),
            Bytes(bound),
            Bytes(peak)
        );
        println!("| model files mapped | 0 | {} |", maps.matches("safetensors").count());
        ensure!(peak <= bound, "the peak is above its bound");
        ensure!(!maps.contains("safetensors"), "a model file is mapped");
    }
    let before: Vec<u64> =
        bench.workers.iter().map(|(w, _)| ticks(w.id())).collect::<Result<_>>()?;
    tokio::time::sleep(Duration::from_secs(options.idle)).await;
    for ((worker, _), before) in bench.workers.iter().zip(before) {
        let used = (ticks(worker.id())? - before) as f64 / options.idle as f64;
        println!("| idle processor time, % of a core over {} s | 1 | {used:.2} |", options.idle);
    }
    fleet.close().await;
    Ok(())
}

async fn many(options: &Options) -> Result<()> {
    let path = options.model.canonicalize().context("run scripts/setup first")?;
    let model = Arc::new(ModelDir::open(&path)?);
    let bench = Bench::up(2, &path)?;
    let fleet = bench.fleet(&model, 512).await?;
    let resident = || -> Result<Vec<u64>> {
        bench.workers.iter().map(|(w, _)| status(w.id(), "VmRSS")).collect()
    };
    let mut after_first = Vec::new();
    let begin = Instant::now();
    for i in 0..options.requests {
        // Lengths and kinds vary, so that programs are lowered again and slots change.
        let rows = 1 + (i as u32 * 37) % 60;
        let segment = |slot, rows| Segment {
            slot,
            context_len: 0,
            cached: false,
            rows,
            wanted: Wanted::Pooled(Pooling::Mean),
        };
        let shape = BatchShape::new(vec![segment(0, rows), segment(1, 1 + rows / 2)])?;
        let tokens: Arc<[u32]> =
            (0..shape.rows()).map(|t| 1000 + (t * 31 + i as u32) % 20_000).collect();
        let run = fleet.execute(Task::new(shape, tokens), Duration::from_secs(60)).await;
        run.map_err(|e| anyhow::anyhow!("request {i}: {e}"))?;
        if i == options.requests / 10 {
            after_first = resident()?;
        }
        if i % 1000 == 999 {
            let now: Vec<String> = resident()?.into_iter().map(|b| Bytes(b).to_string()).collect();
            let seconds = begin.elapsed().as_secs_f64();
            eprintln!("{} requests, {seconds:.0} s, resident {}", i + 1, now.join(" and "));
        }
    }
    for (first, last) in after_first.iter().zip(resident()?) {
        println!(
            "| resident memory after {} and after {} requests | flat | {} and {} |",
            options.requests / 10,
            options.requests,
            Bytes(*first),
            Bytes(last)
        );
        ensure!(last < first + 4_000_000, "memory grows");
    }
    fleet.close().await;
    Ok(())
}
