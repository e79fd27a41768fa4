//! `galaxy profile`: has devices and links measured, and shows what was.

use super::{
    failure::Failure,
    json, print,
    table::{row, table},
    tell,
};
use clap::{Args, Subcommand};
use galaxy_common::{Bytes, ClusterProfile, DeviceName, DeviceProfile, Kernel, LinkProfile, Table};
use galaxy_coord::{
    Cluster,
    cluster::DEFAULT_FILE,
    profile::{CollectError, Progress, Store, Wanted, collect},
};
use galaxy_model::{ModelDir, ModelSpec};
use galaxy_proto::identity::{Identity, Role};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::{
    collections::HashMap,
    fmt::Write as _,
    io::IsTerminal,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

/// Rows that are shown, beside the most that were measured.
const SHOWN: [u32; 3] = [1, 16, 128];

/// Arguments of `galaxy profile`.
#[derive(Args, Debug)]
pub struct ProfileArgs {
    #[command(subcommand)]
    command: Option<ProfileCommand>,
    /// The cluster file. Profiles are kept where it says, or in profiles/ beside it.
    #[arg(long, global = true, value_name = "FILE", default_value = DEFAULT_FILE)]
    cluster: PathBuf,
    /// Measure everything, whatever was measured before.
    #[arg(long)]
    fresh: bool,
    /// Print one JSON object.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand, Debug)]
enum ProfileCommand {
    /// Shows what is kept, and measures nothing.
    Show,
}

/// `galaxy profile`.
pub async fn profile(args: ProfileArgs) -> Result<(), Failure> {
    let place = args.cluster.display();
    let failed = |what: String| Failure::new(what).at(&place);
    let cluster = Cluster::open(&args.cluster).map_err(|e| failed(e.to_string()))?;
    let model = ModelDir::open(&cluster.model).map_err(|e| failed(e.to_string()))?;
    let store = Store::new(&cluster.profiles);
    let profile = match args.command {
        Some(ProfileCommand::Show) => kept(&cluster, &model, &store)?,
        None => {
            let identity = Identity::load(&cluster.identity).map_err(|e| failed(e.to_string()))?;
            if identity.role() != Role::Coordinator {
                let what = format!("{} is no coordinator's identity", cluster.identity.display());
                return Err(failed(what).todo("name one of role coordinator in the file"));
            }
            let wanted = Wanted { fresh: args.fresh, links: cluster.links() };
            let bars = Bars::default();
            let listener = |progress| bars.show(progress);
            collect(&cluster, &model, &identity, &store, &wanted, &listener)
                .await
                .map_err(failure)?
        }
    };
    match args.json {
        true => print(&json(&profile)?),
        false => print(&show(&profile, model.spec(), now())),
    }
}

fn failure(error: CollectError) -> Failure {
    let failure = Failure::new(error.to_string());
    match error {
        CollectError::Unreachable { .. } => failure.todo("start its worker, then try again"),
        _ => failure,
    }
}

/// What is kept of the devices of a cluster, as far as it is there.
fn kept(cluster: &Cluster, model: &ModelDir, store: &Store) -> Result<ClusterProfile, Failure> {
    let shape = model.shape_key();
    let failed = |error: galaxy_coord::profile::StoreError| Failure::new(error.to_string());
    let mut profile = ClusterProfile::default();
    for device in &cluster.devices {
        profile.devices.extend(store.device(&device.name, &shape, |_| true).map_err(failed)?);
    }
    profile.links = store.links().map_err(failed)?;
    let named = |name: &DeviceName| cluster.devices.iter().any(|device| device.name == *name);
    profile.links.retain(|link| named(&link.from) && named(&link.to));
    match profile.devices.is_empty() {
        true => Err(Failure::new(format!("no device has a profile for models of shape {shape}"))
            .at(store.dir().display())
            .todo("`galaxy profile` measures them")),
        false => Ok(profile),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A bar for each device and one for the links, where stderr is a terminal; else a line for each
/// thing that is begun.
#[derive(Default)]
struct Bars {
    all: MultiProgress,
    each: Mutex<HashMap<String, (ProgressBar, String)>>,
}

impl Bars {
    fn show(&self, progress: Progress) {
        let (name, done, total, now) = match progress {
            Progress::Device { device, done, total, now } => (device.to_string(), done, total, now),
            Progress::Links { done, total, now } => ("links".to_owned(), done, total, now),
            Progress::Note(note) => {
                return self.all.suspend(|| tell(&format!("note: {note}")));
            }
        };
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        let terminal = std::io::stderr().is_terminal();
        let (bar, last) = each.entry(name.clone()).or_insert_with(|| {
            let bar = ProgressBar::new(u64::from(total));
            if let Ok(style) =
                ProgressStyle::with_template("{prefix:12} {bar:24} {pos}/{len} {msg} {elapsed}")
            {
                bar.set_style(style);
            }
            (if terminal { self.all.add(bar) } else { bar }, String::new())
        });
        if terminal {
            bar.set_length(u64::from(total));
            bar.set_prefix(name);
            bar.set_message(now);
            bar.set_position(u64::from(done));
        } else if *last != now {
            tell(&format!("{name}: {done} of {total}, {now}"));
            *last = now;
        }
    }
}

/// Profiles as people read them.
fn show(profile: &ClusterProfile, spec: &ModelSpec, now: u64) -> String {
    let mut out = String::new();
    for device in &profile.devices {
        out += &self::device(device, spec, now);
    }
    if !profile.links.is_empty() {
        out += "links\n";
        out += &self::links_table(&profile.links, now);
    }
    out
}

fn device(profile: &DeviceProfile, spec: &ModelSpec, now: u64) -> String {
    let mut out = String::new();
    let threads = match profile.threads {
        1 => "1 thread".to_owned(),
        threads => format!("{threads} threads"),
    };
    let disk = match profile.disk > 0.0 {
        true => format!("disk {:.0} MB/s", profile.disk / 1e6),
        false => "disk not measured".to_owned(),
    };
    let granted = match profile.memory {
        Bytes(0) => String::new(),
        memory => format!("{memory} granted, "),
    };
    let _ = writeln!(
        out,
        "{}: {}, {threads}, {granted}{disk}, wakes in {:.1} us; measured {}",
        profile.device,
        profile.engine,
        profile.wake / 1e3,
        age(now.saturating_sub(profile.measured))
    );
    let most = profile.table(Kernel::Join).and_then(|t| t.axes[0].last()).copied().unwrap_or(1);
    let mut rows: Vec<u32> = SHOWN.into_iter().filter(|&rows| rows < most).collect();
    rows.push(most);
    let mut lines = vec![row(["kernel", "of"])];
    lines[0].extend(rows.iter().map(|rows| match rows {
        1 => "1 row".to_owned(),
        rows => format!("{rows} rows"),
    }));
    lines[0].extend(row(["GFLOP/s", "spread"]));
    for table in &profile.tables {
        lines.push(kernel(table, &rows, spec));
    }
    out + &self::table(&lines)
}

fn kernel(table: &Table, rows: &[u32], spec: &ModelSpec) -> Vec<String> {
    let widest = table.axes.last().and_then(|axis| axis.last()).copied().unwrap_or(1);
    let sizes = |rows: u32| -> Vec<f64> {
        let (rows, widest) = (f64::from(rows), f64::from(widest));
        match table.kernel.axes() {
            1 => vec![rows],
            2 => vec![rows, widest],
            _ => vec![rows, rows, widest],
        }
    };
    let what = match table.kernel.axes() {
        1 => String::new(),
        2 => format!("{widest} columns"),
        _ => format!("{widest} heads"),
    };
    let mut line = vec![table.kernel.to_string(), what];
    line.extend(rows.iter().map(|&rows| time(table.at(&sizes(rows)))));
    let most = rows.last().copied().unwrap_or(1);
    line.push(match operations(table.kernel, f64::from(most), f64::from(widest), spec) {
        Some(operations) => format!("{:.1}", operations / table.at(&sizes(most))),
        None => String::new(),
    });
    let spread = table.spread.iter().copied().fold(0.0, f64::max);
    line.push(format!("{:.0}%", spread * 100.0));
    line
}

/// Multiplications and additions of a product or of attention.
fn operations(kernel: Kernel, rows: f64, widest: f64, spec: &ModelSpec) -> Option<f64> {
    let hidden = f64::from(spec.hidden);
    match kernel {
        Kernel::Up if spec.gated => Some(4.0 * rows * hidden * widest),
        Kernel::Qkv | Kernel::AttentionOutput | Kernel::Up | Kernel::Down | Kernel::Language => {
            Some(2.0 * rows * hidden * widest)
        }
        Kernel::Attend => Some(4.0 * rows * rows * widest * f64::from(spec.head_width)),
        _ => None,
    }
}

fn links_table(links: &[LinkProfile], now: u64) -> String {
    let mut lines = vec![row([
        "from",
        "to",
        "type",
        "latency",
        "rate",
        "under compute",
        "spread",
        "a MB costs here",
        "and there",
        "measured",
    ])];
    let rate = |rate: f64| format!("{:.1} MB/s", rate / 1e6);
    // Nanoseconds for a byte are milliseconds for a megabyte.
    let cost = |cost: f64| format!("{cost:.2} ms");
    for link in links {
        lines.push(vec![
            link.from.to_string(),
            link.to.to_string(),
            link.link.to_string(),
            time(link.latency),
            rate(link.rate),
            rate(link.busy_rate),
            format!("{:.0}%", link.spread * 100.0),
            cost(link.send_cost),
            cost(link.receive_cost),
            age(now.saturating_sub(link.measured)),
        ]);
    }
    table(&lines)
}

/// Nanoseconds as people read them.
fn time(nanos: f64) -> String {
    match nanos {
        n if n < 1e6 => format!("{:.1} us", n / 1e3),
        n if n < 1e9 => format!("{:.2} ms", n / 1e6),
        n => format!("{:.2} s", n / 1e9),
    }
}

fn age(seconds: u64) -> String {
    match seconds {
        0..120 => "just now".to_owned(),
        120..7200 => format!("{} minutes ago", seconds / 60),
        7200..172_800 => format!("{} hours ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::{Bytes, LinkType, PROFILE_VERSION};
    use galaxy_model::shape::Shape;

    fn spec() -> ModelSpec {
        let dir = tempfile::tempdir().unwrap();
        Shape::bert(2, 64, 4).write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        ModelDir::open(dir.path()).unwrap().spec().clone()
    }

    #[test]
    fn it_shows_what_a_planner_reads() {
        let name = |text: &str| DeviceName::new(text).unwrap();
        let table = |kernel: Kernel| Table {
            kernel,
            axes: vec![vec![1, 200]; kernel.axes()],
            nanos: vec![2e6; 1 << kernel.axes()],
            spread: vec![0.07; 1 << kernel.axes()],
        };
        let device = DeviceProfile {
            version: PROFILE_VERSION,
            device: name("pi-1"),
            shape: "s".into(),
            threads: 1,
            engine: "cpu neon".into(),
            measured: 1000,
            tables: [Kernel::Qkv, Kernel::Attend, Kernel::Join].map(table).to_vec(),
            wake: 5e3,
            memory: Bytes(1_500_000_000),
            disk: 40e6,
            disk_shared: 0.0,
        };
        let link = LinkProfile {
            version: PROFILE_VERSION,
            from: name("pi-1"),
            to: name("pi-2"),
            link: LinkType::Tls,
            latency: 250e3,
            rate: 12.5e6,
            busy_rate: 11.0e6,
            send_cost: 1.25,
            receive_cost: 0.5,
            spread: 0.02,
            measured: 0,
        };
        let profile = ClusterProfile { devices: vec![device], links: vec![link] };
        let text = show(&profile, &spec(), 1000 + 3 * 3600);
        for part in [
            "pi-1: cpu neon, 1 thread, 1.50 GB granted, disk 40 MB/s, wakes in 5.0 us; measured 3 hours ago",
            "1 row",
            "16 rows",
            "128 rows",
            "200 rows",
            "200 columns",
            "200 heads",
            "2.00 ms",
            "7%",
            // 2 x 200 x 64 x 200 in 2 ms.
            "2.6",
            "250.0 us",
            "12.5 MB/s",
            "11.0 MB/s",
            "1.25 ms",
            "0.50 ms",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
