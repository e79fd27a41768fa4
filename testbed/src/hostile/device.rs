//! A device of the cluster that means harm to its coordinator.

use super::{ASKED, BEHIND, GROWTH, megabytes, resident, say};
use crate::processes::{Keys, Process, coordinator, listening, worker_command};
use anyhow::{Context, Result, bail, ensure};
use galaxy_client::{Client, RetryPolicy};
use galaxy_common::{DeviceName, DeviceProfile};
use galaxy_proto::{
    PROTOCOL,
    door::Door,
    identity::{Identity, Role},
    v1::{
        self, execute_event, place_event, profile_event,
        worker_server::{Worker, WorkerServer},
    },
};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{net::TcpListener, task::JoinHandle};
use tonic::{Request, Response, Status, Streaming, codegen::BoxStream};

/// How long each has.
const WHILE: Duration = Duration::from_secs(15);
/// When a device that was removed must be out.
const OUT: Duration = Duration::from_secs(3);
/// After this nothing is answered any more.
const PATIENCE: Duration = Duration::from_secs(60);
/// For one probe of a link, as the coordinator has it.
const PROBE: Duration = Duration::from_secs(20);
/// For the place of a device that made ready, as the coordinator has it.
const LINKED: Duration = Duration::from_secs(20);
/// Between two requests of the client.
const PAUSE: Duration = Duration::from_millis(20);

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// It describes itself by texts of a megabyte.
    Words,
    /// It was in the last epoch that there is, and says all else as high.
    Epoch,
    /// Its profile is 15 MB of nothing.
    Profile,
    /// It is measured without an end, and tells of it.
    Progress,
    /// It is measured, and says no word.
    Silence,
    /// By its profile it is the fastest; its links are measured without a word.
    Links,
    /// By its profile it is the fastest, and it makes ready without a word.
    Prepare,
    /// It takes the place of the fastest without a word.
    Place,
    /// It gives results without an end.
    Execute,
}

impl Deed {
    const ALL: [Self; 9] = [
        Self::Words,
        Self::Epoch,
        Self::Profile,
        Self::Progress,
        Self::Silence,
        Self::Links,
        Self::Prepare,
        Self::Place,
        Self::Execute,
    ];

    /// How long it is looked at.
    fn lasts(self) -> Duration {
        match self {
            Self::Words | Self::Epoch | Self::Profile | Self::Progress | Self::Silence => WHILE,
            // Measuring and planning come first.
            _ => 4 * WHILE,
        }
    }

    /// By how much later requests may be answered.
    fn waits(self) -> Duration {
        match self {
            // Links are measured when nothing runs, and places are taken then.
            Self::Links => PROBE + BEHIND,
            Self::Place => LINKED + BEHIND,
            _ => BEHIND,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Words => "describes itself by texts of 1 MB",
            Self::Epoch => "was in epoch 2^64 - 1, and says all else as high",
            Self::Profile => "has a profile of 15 MB of zeros",
            Self::Progress => "is measured without an end, and tells of it",
            Self::Silence => "is measured without a word",
            Self::Links => "is fast by its word, and probes without one",
            Self::Prepare => "is fast by its word, and makes ready without one",
            Self::Place => "is fast by its word, and takes its place without one",
            Self::Execute => "is fast by its word, and gives results without an end",
        }
    }
}

/// How a client fared that asks the others.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What the device did.
    pub device: String,
    /// How often the device was asked for what it does wrong.
    pub calls: u64,
    /// How often the client asked,
    pub asked: u64,
    /// and how often it was not answered.
    pub unanswered: u64,
    /// How long an answer took before, in milliseconds: the median.
    pub before_ms: f64,
    /// How long it took meanwhile: the median,
    pub median_ms: f64,
    /// and the longest.
    pub longest_ms: f64,
    /// When a request was answered after the device was removed, in milliseconds.
    pub again_ms: f64,
    /// By how many bytes the coordinator's memory grew at most.
    pub growth: u64,
    /// Whether that is within bounds.
    pub held: bool,
}

/// A cluster of one honest device, to which others can be added.
struct Others {
    keys: Keys,
    coordinator: Process,
    client: Client,
    /// Where files of devices are.
    devices: PathBuf,
    /// What the honest device does.
    profile: DeviceProfile,
    _worker: Process,
    _dir: TempDir,
}

/// Adds a device of each kind to a cluster of an honest one, and removes it again.
///
/// # Errors
/// When something cannot be started.
pub async fn all(model: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for deed in Deed::ALL {
        rows.push(Others::start(model).await?.beside(deed).await?);
    }
    Ok(rows)
}

/// Prints them.
pub fn show(rows: &[Row]) {
    println!(
        "\n| a device that | its calls | asked | unanswered | before, ms | median, ms | longest, ms | removed, ms | memory, MB | kept |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for row in rows {
        println!(
            "| {} | {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {} |",
            row.device,
            row.calls,
            row.asked,
            row.unanswered,
            row.before_ms,
            row.median_ms,
            row.longest_ms,
            row.again_ms,
            megabytes(row.growth),
            if row.held { "yes" } else { "NO" }
        );
    }
}

impl Others {
    async fn start(model: &Path) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let keys = Keys::create(&dir.path().join("keys"))?;
        let model = model.canonicalize().with_context(|| model.display().to_string())?;
        let mut command = worker_command(&keys.of("d0", Role::Device)?, &model)?;
        command.args(["--listen", "127.0.0.1:0"]);
        let mut worker = Process::spawn("worker d0", command)?;
        let address = listening(&mut worker)?;
        let identity = keys.of("coordinator", Role::Coordinator)?;
        let file = dir.path().join("cluster.toml");
        let text = format!(
            "[cluster]\nname = \"test\"\nmodel = {model:?}\nidentity = {identity:?}\n\
             authority = \"keys\"\nlisten = \"127.0.0.1:0\"\n\n\
             [[device]]\nname = \"d0\"\naddress = \"{address}\"\nmemory = \"1GB\"\n"
        );
        std::fs::write(&file, text)?;
        let devices = dir.path().join("devices.d");
        std::fs::create_dir(&devices)?;
        let (mut coordinator, address) = coordinator(&file)?;
        coordinator.line("ready: ")?;
        let client = Client::builder().address(&address).identity(keys.of("laptop", Role::Client)?);
        let client = client.retry(RetryPolicy::never()).connect().await?;
        let profile = measured_one(&dir.path().join("profiles"))?;
        Ok(Self { keys, coordinator, client, devices, profile, _worker: worker, _dir: dir })
    }

    async fn ask(&self) -> Result<Duration> {
        let begun = Instant::now();
        self.client.embed(&["sea"]).await?;
        Ok(begun.elapsed())
    }

    async fn beside(&self, deed: Deed) -> Result<Row> {
        say("a device", deed.words());
        let mut usual = Vec::new();
        for _ in 0..ASKED {
            usual.push(self.ask().await?);
        }
        let memory = resident(self.coordinator.id())?;
        let calls = Arc::new(AtomicU64::new(0));
        let profile = DeviceProfile { device: DeviceName::new("d1")?, ..self.profile.scaled(0.01) };
        let device = Device { deed, calls: calls.clone(), profile };
        let (address, server) = listen(device, &self.keys).await?;
        let text = format!("name = \"d1\"\naddress = {address:?}\nmemory = \"1GB\"\n");
        std::fs::write(self.devices.join("d1.toml"), text)?;
        self.coordinator.signal("HUP")?;
        let (mut waits, mut unanswered, mut most) = (Vec::new(), 0, 0);
        let begun = Instant::now();
        while begun.elapsed() < deed.lasts() {
            match self.ask().await {
                Ok(wait) => waits.push(wait),
                Err(_) => unanswered += 1,
            }
            most = most.max(resident(self.coordinator.id())?);
            tokio::time::sleep(PAUSE).await;
        }
        std::fs::remove_file(self.devices.join("d1.toml"))?;
        self.coordinator.signal("HUP")?;
        let removed = Instant::now();
        while self.ask().await.is_err() {
            ensure!(removed.elapsed() < PATIENCE, "nothing is answered after {}", deed.words());
        }
        let again = removed.elapsed();
        server.abort();
        let (before, longest) =
            (median(&mut usual), waits.iter().max().copied().unwrap_or_default());
        let growth = most.saturating_sub(memory);
        let calls = calls.load(Ordering::Relaxed);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(Row {
            device: deed.words().to_owned(),
            calls,
            asked: waits.len() as u64 + unanswered,
            unanswered,
            before_ms: ms(before),
            median_ms: ms(median(&mut waits)),
            longest_ms: ms(longest),
            growth,
            again_ms: ms(again),
            // Whose results are wrong loses the requests that it has a part in (docs/security.md).
            held: calls > 0
                && (unanswered == 0 || deed == Deed::Execute)
                && longest <= before + deed.waits()
                && growth <= GROWTH
                && again <= OUT,
        })
    }
}

/// The first profile of a device in a directory.
fn measured_one(dir: &Path) -> Result<DeviceProfile> {
    for entry in std::fs::read_dir(dir)? {
        if let Ok(profile) = serde_json::from_slice(&std::fs::read(entry?.path())?) {
            return Ok(profile);
        }
    }
    bail!("no profile in {}", dir.display())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Listens as a device, and says where.
async fn listen(device: Device, keys: &Keys) -> Result<(String, JoinHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let identity = Identity::load(&keys.of(device.profile.device.as_str(), Role::Device)?)?;
    let door = Door::open(listener, Some(&identity), None);
    let server = tonic::transport::Server::builder().add_service(WorkerServer::new(device));
    Ok((address, tokio::spawn(async move { drop(server.serve_with_incoming(door).await) })))
}

/// A text of a megabyte that would move a console's cursor.
fn text() -> String {
    "\u{1b}[2Jhello\r\n".repeat(100_000)
}

struct Device {
    deed: Deed,
    calls: Arc<AtomicU64>,
    /// That of the fastest of all.
    profile: DeviceProfile,
}

impl Device {
    /// It was asked for what some do wrong.
    fn asked(&self, deeds: &[Deed]) {
        if deeds.contains(&self.deed) {
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn no<T>(&self) -> Answer<T> {
        Err(Status::unimplemented(text()))
    }
}

type Answer<T> = Result<Response<T>, Status>;

fn ready_for(ready: v1::PlaceReady) -> Result<v1::PlaceEvent, Status> {
    Ok(v1::PlaceEvent { event: Some(place_event::Event::Ready(ready)) })
}

fn measured(event: profile_event::Event) -> Result<v1::ProfileEvent, Status> {
    Ok(v1::ProfileEvent { event: Some(event) })
}

#[tonic::async_trait]
impl Worker for Device {
    type PlaceStream = BoxStream<v1::PlaceEvent>;
    type ExecuteStream = BoxStream<v1::ExecuteEvent>;
    type PrepareStream = BoxStream<v1::PlaceEvent>;
    type SupplyStream = BoxStream<v1::Wants>;
    type ProfileStream = BoxStream<v1::ProfileEvent>;

    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Answer<v1::DescribeReply> {
        self.asked(&[Deed::Words, Deed::Epoch]);
        let (name, version) =
            (self.profile.device.to_string(), env!("CARGO_PKG_VERSION").to_owned());
        let usual = v1::DescribeReply {
            protocol: PROTOCOL,
            version,
            name,
            threads: self.profile.threads.into(),
            engine: self.profile.engine.clone(),
            ..Default::default()
        };
        Ok(Response::new(match self.deed {
            Deed::Words => v1::DescribeReply {
                version: text(),
                commit: text(),
                models: vec!["\u{1b}c".to_owned(); 1 << 20],
                ..usual
            },
            Deed::Epoch => v1::DescribeReply {
                epoch: u64::MAX,
                threads: u32::MAX,
                memory_bytes: u64::MAX,
                plain_port: u32::MAX,
                ..usual
            },
            _ => usual,
        }))
    }

    async fn profile(&self, _: Request<v1::ProfileRequest>) -> Answer<Self::ProfileStream> {
        self.asked(&[Deed::Profile, Deed::Progress, Deed::Silence]);
        let progress = || {
            profile_event::Event::Progress(v1::ProfileProgress {
                done: u32::MAX,
                total: 1,
                now: text(),
            })
        };
        Ok(Response::new(match self.deed {
            Deed::Silence => Box::pin(tokio_stream::pending()),
            Deed::Progress => {
                Box::pin(tokio_stream::iter(std::iter::repeat_with(move || measured(progress()))))
            }
            Deed::Profile => {
                let profile = profile_event::Event::Profile(vec![0; 15_000_000]);
                Box::pin(tokio_stream::iter([measured(profile)]))
            }
            _ => {
                let profile = postcard::to_stdvec(&self.profile).unwrap_or_default();
                let profile = profile_event::Event::Profile(profile);
                Box::pin(tokio_stream::iter([measured(profile)]))
            }
        }))
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Answer<v1::HealthReply> {
        let most = u64::MAX;
        let epoch = if self.deed == Deed::Epoch { most } else { 0 };
        let (clock_ns, resident_bytes, running_sequence) = (most, most, most);
        Ok(Response::new(v1::HealthReply {
            epoch,
            clock_ns,
            resident_bytes,
            running_sequence,
            ..Default::default()
        }))
    }

    async fn deny(&self, _: Request<v1::DenyRequest>) -> Answer<v1::DenyReply> {
        Ok(Response::new(v1::DenyReply {}))
    }
    async fn cancel(&self, _: Request<v1::CancelRequest>) -> Answer<v1::CancelReply> {
        Ok(Response::new(v1::CancelReply {}))
    }
    async fn place(&self, _: Request<v1::PlaceRequest>) -> Answer<Self::PlaceStream> {
        self.asked(&[Deed::Place]);
        match self.deed {
            Deed::Place => Ok(Response::new(Box::pin(tokio_stream::pending()))),
            Deed::Execute => {
                let ready = v1::PlaceReady {
                    weight_bytes: u64::MAX,
                    seconds: f64::NAN,
                    ..Default::default()
                };
                Ok(Response::new(Box::pin(tokio_stream::iter([ready_for(ready)]))))
            }
            _ => self.no(),
        }
    }
    async fn execute(&self, _: Request<v1::ExecuteRequest>) -> Answer<Self::ExecuteStream> {
        self.asked(&[Deed::Execute]);
        let data = vec![0; 1 << 20];
        let piece = move || {
            let piece = v1::OutputPiece { output: 0, offset: 0, data: data.clone().into() };
            Ok(v1::ExecuteEvent { event: Some(execute_event::Event::Piece(piece)) })
        };
        Ok(Response::new(Box::pin(tokio_stream::iter(std::iter::repeat_with(piece)))))
    }
    async fn forget(&self, _: Request<v1::ForgetRequest>) -> Answer<v1::ForgetReply> {
        self.no()
    }
    async fn end_burst(&self, _: Request<v1::EndBurstRequest>) -> Answer<v1::EndBurstReply> {
        self.no()
    }
    async fn drain(&self, _: Request<v1::DrainRequest>) -> Answer<v1::DrainReply> {
        self.no()
    }
    async fn prepare(&self, _: Request<v1::PrepareRequest>) -> Answer<Self::PrepareStream> {
        self.asked(&[Deed::Prepare]);
        match self.deed {
            Deed::Prepare => Ok(Response::new(Box::pin(tokio_stream::pending()))),
            Deed::Place | Deed::Execute => {
                Ok(Response::new(Box::pin(tokio_stream::iter([ready_for(
                    v1::PlaceReady::default(),
                )]))))
            }
            _ => self.no(),
        }
    }
    async fn supply(&self, _: Request<Streaming<v1::Supplied>>) -> Answer<Self::SupplyStream> {
        self.no()
    }
    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Answer<v1::ProbeReply> {
        self.asked(&[Deed::Links]);
        if self.deed == Deed::Links {
            std::future::pending::<()>().await;
        }
        let (round_trip_ns, rate) = (vec![1e5; 3], vec![1e9; 3]);
        let busy_rate = rate.clone();
        Ok(Response::new(v1::ProbeReply { round_trip_ns, rate, busy_rate, ..Default::default() }))
    }
    async fn timeline(&self, _: Request<v1::TimelineRequest>) -> Answer<v1::TimelineReply> {
        self.no()
    }
}
