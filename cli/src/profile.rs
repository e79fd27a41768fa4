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
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::IsTerminal,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The pause between two lines of progress where stderr is no terminal.
const SPARSE: Duration = Duration::from_secs(10);

/// Rows that are shown, beside the most that were measured.
const SHOWN: [u32; 3] = [1, 16, 128];

/// Arguments of `galaxy profile`.
#[derive(Args, Debug)]
pub struct ProfileArgs {
    #[command(subcommand)]
    command: Option<ProfileCommand>,
    /// Cluster file with the devices to measure.
    ///
    /// Profiles are kept where it says, or in profiles/ beside it.
    #[arg(long, global = true, value_name = "FILE", default_value = DEFAULT_FILE)]
    cluster: PathBuf,
    /// Measure everything anew, whatever was measured before.
    #[arg(long)]
    fresh: bool,
    /// Print one JSON object.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand, Debug)]
enum ProfileCommand {
    /// Show the profiles that are kept, and measure nothing.
    Show,
}

/// Runs `galaxy profile`.
pub async fn profile(args: ProfileArgs) -> Result<(), Failure> {
    if args.fresh && matches!(args.command, Some(ProfileCommand::Show)) {
        return Err(Failure::usage("--fresh measures, and `show` only shows what is kept")
            .todo("leave out one of the two"));
    }
    let place = args.cluster.display();
    let failed = |what: String| Failure::new(what).at(&place);
    let cluster = Cluster::open(&args.cluster).map_err(|e| failed(e.to_string()))?;
    let model = cluster.open_model().map_err(|e| failed(e.to_string()))?;
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
            let line = ProgressLine::new();
            let listener = |progress| line.show(progress);
            let collected = collect(&cluster, &model, &identity, &store, &wanted, &listener).await;
            line.finish();
            collected.map_err(failure)?
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

/// The profiles that are kept of a cluster's devices and links, as far as there are any.
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

/// The progress of all that is measured: one line that moves where stderr is a terminal, else a line
/// every ten seconds.
struct ProgressLine {
    /// The line that moves; none where stderr is no terminal.
    bar: Option<ProgressBar>,
    state: Mutex<ProgressState>,
}

#[derive(Default)]
struct ProgressState {
    /// Of each device, the points that were measured, and how many there are in all.
    devices: BTreeMap<DeviceName, (u32, u32)>,
    /// When a line was written last; none before the first.
    written: Option<Instant>,
}

impl ProgressState {
    /// The line that shows how far all devices are.
    fn now(&mut self, progress: Progress) -> String {
        match progress {
            Progress::Note(note) => format!("note: {note}"),
            Progress::Links { done, total, now } => format!("links: {done} of {total}, {now}"),
            Progress::Device { device, done, total, now } => {
                self.devices.insert(device.clone(), (done, total));
                let part = |&(done, total): &(u32, u32)| f64::from(done) / f64::from(total.max(1));
                let sum: f64 = self.devices.values().map(part).sum();
                let (count, percent) =
                    (self.devices.len(), 100.0 * sum / self.devices.len() as f64);
                let devices = if count == 1 { "device" } else { "devices" };
                format!("{count} {devices}: {percent:.0}%, {device}: {now}")
            }
        }
    }
}

impl ProgressLine {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) =
                ProgressStyle::with_template("{spinner} measuring {wide_msg} {elapsed}")
            {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, state: Mutex::default() }
    }

    fn show(&self, progress: Progress) {
        let is_note = matches!(progress, Progress::Note(_));
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = state.now(progress);
        match &self.bar {
            Some(bar) if is_note => bar.suspend(|| tell(&now)),
            Some(bar) => bar.set_message(now),
            None if is_note => tell(&now),
            None if state.written.is_none_or(|written| written.elapsed() >= SPARSE) => {
                state.written = Some(Instant::now());
                tell(&format!("measuring {now}"));
            }
            None => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Profiles as tables, for people.
fn show(profile: &ClusterProfile, spec: &ModelSpec, now: u64) -> String {
    let mut out = String::new();
    for device in &profile.devices {
        out += &self::device(device, spec, now);
    }
    if !profile.links.is_empty() {
        out += "links\n";
        out += &self::links_table(&profile.links, now);
        out += &shared(&profile.links);
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
    let most = profile.table(Kernel::AddNorm).and_then(|t| t.axes[0].last()).copied().unwrap_or(1);
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

/// Multiplications and additions of a product or of attention; none for other kernels.
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
        "alone",
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
            if link.alone > 0.0 { rate(link.alone) } else { "-".to_owned() },
            rate(link.busy_rate),
            format!("{:.0}%", link.spread * 100.0),
            cost(link.send_cost),
            cost(link.receive_cost),
            age(now.saturating_sub(link.measured)),
        ]);
    }
    table(&lines)
}

/// A sentence on links that share a medium; empty if none do.
fn shared(links: &[LinkProfile]) -> String {
    let sharing: Vec<&LinkProfile> = links.iter().filter(|link| link.shares_medium()).collect();
    let Some(worst) = sharing.iter().max_by(|a, b| slowdown(a).total_cmp(&slowdown(b))) else {
        return String::new();
    };
    format!(
        "links share a medium, or devices a machine: {} of the links that were measured alone are faster \
         then, {} -> {} {:.1} times as fast as with {} beside it. Plans count on the rates beside others, \
         since the links of a ring work at the same time.\n",
        sharing.len(),
        worst.from,
        worst.to,
        slowdown(worst),
        worst.beside
    )
}

/// How many times as fast a link is alone.
fn slowdown(link: &LinkProfile) -> f64 {
    link.alone / link.rate
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

    #[tokio::test]
    async fn show_with_fresh_is_refused() {
        let (command, cluster) = (Some(ProfileCommand::Show), "/nowhere".into());
        let args = ProfileArgs { command, cluster, fresh: true, json: false };
        let failure = profile(args).await.unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.to_string().contains("--fresh measures"), "{failure}");
    }

    #[test]
    fn progress_of_many_devices_is_one_line() {
        let mut state = ProgressState::default();
        let mut at = |name: &str, done| {
            let device = DeviceName::new(name).unwrap();
            let now = "a layer at 4 rows".to_owned();
            state.now(Progress::Device { device, done, total: 40, now })
        };
        assert_eq!(at("pi-1", 10), "1 device: 25%, pi-1: a layer at 4 rows");
        assert_eq!(at("pi-2", 30), "2 devices: 50%, pi-2: a layer at 4 rows");
        assert_eq!(at("pi-1", 40), "2 devices: 88%, pi-1: a layer at 4 rows");
        let now = "pi-1 -> pi-2, tls".to_owned();
        let links = state.now(Progress::Links { done: 1, total: 2, now });
        assert_eq!(links, "links: 1 of 2, pi-1 -> pi-2, tls");
    }

    #[test]
    fn a_shown_profile_lists_devices_kernels_and_links() {
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
            tables: [Kernel::Qkv, Kernel::Attend, Kernel::AddNorm].map(table).to_vec(),
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
            beside: 1,
            alone: 25.0e6,
            send_cost: 1.25,
            receive_cost: 0.5,
            spread: 0.02,
            measured: 0,
        };
        let profile = ClusterProfile { devices: vec![device], links: vec![link] };
        let text = show(&profile, &spec(), 1000 + 3 * 3600);
        assert!(shared(&[LinkProfile { alone: 13e6, ..profile.links[0].clone() }]).is_empty());
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
            "25.0 MB/s",
            "1 of the links that were measured alone are faster then, pi-1 -> pi-2 2.0 times as fast as with 1 beside it",
            "1.25 ms",
            "0.50 ms",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
