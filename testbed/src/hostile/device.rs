//! A device of the cluster that attacks its coordinator.

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

/// How long each short attack lasts.
const WHILE: Duration = Duration::from_secs(15);
/// The time within which requests are answered again after the device was removed.
const OUT: Duration = Duration::from_secs(3);
/// The longest wait for an answer after the removal.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time limit of the coordinator for one probe of a link.
const PROBE: Duration = Duration::from_secs(20);
/// The time limit of the coordinator for a device that made ready to take its place.
const LINKED: Duration = Duration::from_secs(20);
/// The time between two requests of the client.
const PAUSE: Duration = Duration::from_millis(20);

/// The attack of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceAttack {
    /// It describes itself with strings of a megabyte.
    Words,
    /// It claims to have been in the highest epoch, and other numbers as high.
    Epoch,
    /// Its profile is 15 MB of zeros.
    Profile,
    /// Measuring it never ends, and it keeps reporting progress.
    Progress,
    /// Measuring it never ends, and it reports nothing.
    Silence,
    /// By its profile it is the fastest; it never answers when its links are to be probed.
    Links,
    /// By its profile it is the fastest; it never answers when it is to make a plan ready.
    Prepare,
    /// By its profile it is the fastest; it never answers when it is to take its place in a plan.
    Place,
    /// By its profile it is the fastest; its results never end.
    Execute,
}

impl DeviceAttack {
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

    /// How long the attack is watched.
    fn lasts(self) -> Duration {
        match self {
            Self::Words | Self::Epoch | Self::Profile | Self::Progress | Self::Silence => WHILE,
            // Measuring and planning come first.
            _ => 4 * WHILE,
        }
    }

    /// By how much later requests may be answered during the attack.
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

/// How a client fared that asks the cluster while a device attacks.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The attack, as text.
    pub device: String,
    /// How often the device was asked for what it does wrong.
    pub calls: u64,
    /// How many requests the client sent.
    pub asked: u64,
    /// How many of the client's requests were not answered.
    pub unanswered: u64,
    /// The median time of an answer before the attack, in milliseconds.
    pub before_ms: f64,
    /// The median time of an answer during the attack, in milliseconds.
    pub median_ms: f64,
    /// The longest time of an answer during the attack, in milliseconds.
    pub longest_ms: f64,
    /// The time from the device's removal to the next answer, in milliseconds.
    pub again_ms: f64,
    /// The bytes by which the coordinator's memory grew at most.
    pub growth: u64,
    /// Whether waits and memory stayed within their bounds.
    pub held: bool,
}

/// A cluster of one honest device, to which others can be added.
struct Others {
    keys: Keys,
    coordinator: Process,
    client: Client,
    /// The folder of the files that name further devices.
    devices: PathBuf,
    /// The profile of the honest device.
    profile: DeviceProfile,
    _worker: Process,
    _dir: TempDir,
}

/// Adds a device for each attack to a cluster of an honest one, and removes it again.
///
/// # Errors
/// When something cannot be started.
pub async fn all(model: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for deed in DeviceAttack::ALL {
        rows.push(Others::start(model).await?.beside(deed).await?);
    }
    Ok(rows)
}

/// Prints the rows as a table.
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

    async fn beside(&self, deed: DeviceAttack) -> Result<Row> {
        say("a device", deed.words());
        let mut usual = Vec::new();
        for _ in 0..ASKED {
            usual.push(self.ask().await?);
        }
        let memory = resident(self.coordinator.id())?;
        let calls = Arc::new(AtomicU64::new(0));
        let profile = DeviceProfile { device: DeviceName::new("d1")?, ..self.profile.scaled(0.01) };
        let device = HostileDevice { deed, calls: calls.clone(), profile };
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
            // A device whose results are wrong loses the requests that it takes part in (docs/security.md).
            held: calls > 0
                && (unanswered == 0 || deed == DeviceAttack::Execute)
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

/// Starts a hostile device, and returns its address and its task.
async fn listen(device: HostileDevice, keys: &Keys) -> Result<(String, JoinHandle<()>)> {
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

struct HostileDevice {
    deed: DeviceAttack,
    calls: Arc<AtomicU64>,
    /// The profile of the fastest device of all.
    profile: DeviceProfile,
}

impl HostileDevice {
    /// Counts a call, if its attack is one of these.
    fn asked(&self, deeds: &[DeviceAttack]) {
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
impl Worker for HostileDevice {
    type PlaceStream = BoxStream<v1::PlaceEvent>;
    type ExecuteStream = BoxStream<v1::ExecuteEvent>;
    type PrepareStream = BoxStream<v1::PlaceEvent>;
    type SupplyStream = BoxStream<v1::Wants>;
    type ProfileStream = BoxStream<v1::ProfileEvent>;

    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Answer<v1::DescribeReply> {
        self.asked(&[DeviceAttack::Words, DeviceAttack::Epoch]);
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
            DeviceAttack::Words => v1::DescribeReply {
                version: text(),
                commit: text(),
                models: vec!["\u{1b}c".to_owned(); 1 << 20],
                ..usual
            },
            DeviceAttack::Epoch => v1::DescribeReply {
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
        self.asked(&[DeviceAttack::Profile, DeviceAttack::Progress, DeviceAttack::Silence]);
        let progress = || {
            profile_event::Event::Progress(v1::ProfileProgress {
                done: u32::MAX,
                total: 1,
                now: text(),
            })
        };
        Ok(Response::new(match self.deed {
            DeviceAttack::Silence => Box::pin(tokio_stream::pending()),
            DeviceAttack::Progress => {
                Box::pin(tokio_stream::iter(std::iter::repeat_with(move || measured(progress()))))
            }
            DeviceAttack::Profile => {
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
        let epoch = if self.deed == DeviceAttack::Epoch { most } else { 0 };
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
        self.asked(&[DeviceAttack::Place]);
        match self.deed {
            DeviceAttack::Place => Ok(Response::new(Box::pin(tokio_stream::pending()))),
            DeviceAttack::Execute => {
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
        self.asked(&[DeviceAttack::Execute]);
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
        self.asked(&[DeviceAttack::Prepare]);
        match self.deed {
            DeviceAttack::Prepare => Ok(Response::new(Box::pin(tokio_stream::pending()))),
            DeviceAttack::Place | DeviceAttack::Execute => Ok(Response::new(Box::pin(
                tokio_stream::iter([ready_for(v1::PlaceReady::default())]),
            ))),
            _ => self.no(),
        }
    }
    async fn supply(&self, _: Request<Streaming<v1::Supplied>>) -> Answer<Self::SupplyStream> {
        self.no()
    }
    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Answer<v1::ProbeReply> {
        self.asked(&[DeviceAttack::Links]);
        if self.deed == DeviceAttack::Links {
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
