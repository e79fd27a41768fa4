//! What the machine did during a sample, and whether the sample may count.
//!
//! # How busy is measured
//! The kernel adds to the fields `user` and `system` of `/proc/stat` by looking at what runs when a timer
//! ticks. A quota's periods beat with those ticks: a group that had 30% of a core was shown as 52%. `idle` is
//! clocked, not sampled, and so is the processor time of control groups; only these are used. Time that is
//! neither idle nor of a process is the kernel's work on packets between namespaces, and belongs to nobody.

use crate::record::Verdict;
use anyhow::{Context, Result};
use std::{
    collections::HashMap,
    fs,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// The share of its quota that a device must receive while it is busy: the quotas' own tolerance.
pub const LEAST_OF_QUOTA: f64 = 0.97;
/// The largest share of the machine that its host may give to others: it slows all devices down unequally.
pub const MOST_STEAL: f64 = 0.02;
/// The share of the machine that must be idle in every second. A machine without rest makes
/// threads wait for each other, which the devices would not.
pub const LEAST_IDLE: f64 = 0.03;
/// The largest share of a core that processes other than the testbed's may take: a quiet system takes 1%.
/// Samples shorter than a second may have as much of it as one of a second.
pub const MOST_OTHERS: f64 = 0.05;

/// The least speed of kernels, as a share of the best speed of the same kernels over the same tiles: where they
/// are slower than that, the machine was.
const LEAST_SPEED: f64 = 0.7;
/// The time between two looks at the machine.
const LOOK: Duration = Duration::from_millis(250);
/// The unit of `/proc/stat` in seconds, which is the same on every architecture that Galaxy is built for.
const TICK: f64 = 0.01;
/// The file of the processor time of all processes in ns, by control groups of the first version.
const ALL_PROCESSES: &str = "/sys/fs/cgroup/cpuacct/cpuacct.usage";
/// The least share of a core with which another process is named.
const OF_NOTE: f64 = 0.01;

/// How long cores are kept busy to see whether the host leaves them alone.
const PROBE: Duration = Duration::from_millis(300);
/// How long cores rest when the host does not.
const REST: Duration = Duration::from_millis(700);
/// How often the probe is tried.
const PROBES: usize = 60;

/// What the machine did during a sample. Shares are of the whole machine, unless they say otherwise.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Health {
    /// How long the machine was watched, in seconds.
    pub seconds: f64,
    /// The share in which the machine was not idle.
    pub busy_share: f64,
    /// The idle share of the busiest second, or of the whole sample if that was shorter.
    pub least_idle_share: f64,
    /// The share that the machine's host took.
    pub steal_share: f64,
    /// The share of one core that processes other than the testbed's took. Without control groups of the
    /// first version, the kernel's work on packets is included.
    pub others_share: f64,
    /// The busiest of these processes, as `rustc 12.0%`; only those that still ran at the end.
    pub others: Vec<String>,
}

impl Health {
    /// The figures by name, to be kept with a sample.
    pub fn values(&self) -> impl Iterator<Item = (String, f64)> {
        [
            ("machine_busy", self.busy_share),
            ("machine_least_idle", self.least_idle_share),
            ("machine_steal", self.steal_share),
            ("machine_others", self.others_share),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
    }
}

/// The processor time that a device received during a sample.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceShare {
    /// The device's name.
    pub name: String,
    /// The device's share of a core; none where it is not held to any.
    pub quota: Option<f64>,
    /// The processor time of the threads under the quota, in ns.
    pub received: u64,
    /// How long these threads had something to do, in ns.
    pub busy: u64,
}

/// The verdict on a sample: whether it may count.
pub fn judge(health: &Health, devices: &[DeviceShare]) -> Verdict {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let mut reasons = Vec::new();
    for DeviceShare { name, quota, received, busy } in devices {
        let (received, busy) = (*received as f64, *busy as f64);
        if let Some(quota) = quota.filter(|quota| received < LEAST_OF_QUOTA * quota * busy) {
            let got = percent(received / busy);
            let quota = percent(quota);
            reasons
                .push(format!("{name} received {got} of a core while busy; its quota is {quota}"));
        }
    }
    if health.steal_share > MOST_STEAL {
        let (took, most) = (percent(health.steal_share), percent(MOST_STEAL));
        reasons.push(format!("the host took {took} of the machine; {most} is allowed"));
    }
    // Devices with cores to themselves may use all of them.
    let limited = devices.iter().any(|device| device.quota.is_some());
    if limited && health.least_idle_share < LEAST_IDLE {
        let (idle, least) = (percent(health.least_idle_share), percent(LEAST_IDLE));
        reasons
            .push(format!("only {idle} of the machine was idle in some second; {least} is needed"));
    }
    if health.others_share * health.seconds > MOST_OTHERS * health.seconds.max(1.0) {
        let (took, most) = (percent(health.others_share), percent(MOST_OTHERS));
        let names = match health.others.as_slice() {
            [] => String::new(),
            names => format!(" ({})", names.join(", ")),
        };
        reasons.push(format!("other processes took {took} of a core{names}; {most} is allowed"));
    }
    Verdict::of(reasons)
}

/// Waits until the host leaves the machine alone, or for a minute: what the host takes comes in bursts, and
/// only a busy machine shows it.
///
/// # Errors
/// Where the machine has no `/proc/stat`.
pub fn quiet() -> Result<()> {
    for probe in 1..=PROBES {
        let since = Instant::now();
        let before = Look::take(since)?;
        std::thread::scope(|scope| {
            for _ in 0..before.cores {
                scope.spawn(|| {
                    while since.elapsed() < PROBE {
                        std::hint::spin_loop();
                    }
                });
            }
        });
        let steal = before.share(&Look::take(since)?, |look| look.steal);
        if steal <= MOST_STEAL {
            return Ok(());
        }
        let then = match probe {
            1 => "waiting",
            PROBES => "going on all the same",
            _ => "",
        };
        if !then.is_empty() {
            eprintln!("the host takes {:.1}% of the machine; {then}", steal * 100.0);
        }
        std::thread::sleep(REST);
    }
    Ok(())
}

/// Why a sample does not count whose kernels did far less in their processor time than those of the best
/// sample of the same plan: then the host has slowed the cores themselves, which no clock of ours shows.
/// Other plans are no measure: they have other tiles, and kernels that wait longer for links are slower after
/// it. Both speeds are in GFLOP/s of processor time.
pub fn slowed(reached: f64, best: f64) -> Option<String> {
    (reached < LEAST_SPEED * best).then(|| {
        format!(
            "kernels reached {reached:.0} GFLOP/s of processor time, and {best:.0} at another time: the cores themselves were slower"
        )
    })
}

/// The clocks of the machine at one moment, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Look {
    at: f64,
    idle: f64,
    steal: f64,
    cores: usize,
    /// The processor time of all processes together; none where the kernel keeps no count.
    processes: Option<f64>,
}

impl Look {
    fn take(since: Instant) -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let processes = fs::read_to_string(ALL_PROCESSES).ok();
        let processes =
            processes.and_then(|text| text.trim().parse().ok()).map(|ns: f64| ns * 1e-9);
        Self::parse(&text, processes, since.elapsed().as_secs_f64())
    }

    fn parse(stat: &str, processes: Option<f64>, at: f64) -> Result<Self> {
        let mut lines = stat.lines();
        let first = lines.next().and_then(|line| line.strip_prefix("cpu "));
        let first = first.context("/proc/stat does not begin with all cores")?;
        let clocks: Vec<f64> = first.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        let clock = |i: usize| clocks.get(i).copied().unwrap_or(0.0) * TICK;
        let cores = lines.take_while(|line| line.starts_with("cpu")).count();
        // Waiting for a disk is idle too.
        Ok(Self { at, idle: clock(3) + clock(4), steal: clock(7), cores, processes })
    }

    /// The share of the machine's time that `clock` advanced, from `self` to `then`.
    fn share(&self, then: &Self, clock: impl Fn(&Self) -> f64) -> f64 {
        let all = (then.at - self.at) * self.cores as f64;
        if all <= 0.0 { 0.0 } else { ((clock(then) - clock(self)) / all).clamp(0.0, 1.0) }
    }
}

/// Sums up the looks, first to last. `own` are the seconds of processor time that were the testbed's own.
fn sum_up(looks: &[Look], own: f64) -> Health {
    let [first, .., last] = looks else { return Health::default() };
    let seconds = last.at - first.at;
    let idle = |look: &Look| look.idle;
    let steal = first.share(last, |look| look.steal);
    let busy = (1.0 - first.share(last, idle) - steal).max(0.0);
    let in_a_second = looks.iter().enumerate().filter_map(|(i, from)| {
        let to = looks[i..].iter().find(|to| to.at - from.at >= 1.0)?;
        Some(from.share(to, idle))
    });
    let least = in_a_second.fold(None, |least: Option<f64>, x| Some(least.map_or(x, |l| l.min(x))));
    let processes = first.processes.zip(last.processes).map(|(first, last)| last - first);
    let taken = processes.unwrap_or(busy * seconds * first.cores as f64);
    Health {
        seconds,
        busy_share: busy,
        least_idle_share: least.unwrap_or_else(|| first.share(last, idle)),
        steal_share: steal,
        others_share: if seconds > 0.0 { (taken - own).max(0.0) / seconds } else { 0.0 },
        others: Vec::new(),
    }
}

/// The processor time of this process, in ns.
fn this_process() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
    // Without /proc nothing is watched.
    #[cfg(not(target_os = "linux"))]
    0
}

/// The name and the processor seconds of every process that runs, by its id.
fn running() -> HashMap<u32, (String, f64)> {
    let Ok(entries) = fs::read_dir("/proc") else { return HashMap::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let time = |pid: u32| {
        // It may have ended meanwhile.
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
        // utime and stime; the first field after the name is the state, number 3.
        let clocks = rest.split_whitespace().skip(11).take(2);
        let ticks: f64 = clocks.filter_map(|field| field.parse::<f64>().ok()).sum();
        Some((pid, (name.to_owned(), ticks * TICK)))
    };
    pids.filter_map(time).collect()
}

/// The busiest processes since `before` that are in no testbed's group, as `rustc 12.0%`.
fn busiest(before: &HashMap<u32, (String, f64)>, seconds: f64) -> Vec<String> {
    let used = |pid: &u32, now: f64| now - before.get(pid).map_or(0.0, |(_, then)| *then);
    let mut all: Vec<(u32, String, f64)> = running()
        .into_iter()
        .map(|(pid, (name, now))| (pid, name, used(&pid, now) / seconds))
        .filter(|(pid, _, share)| *share >= OF_NOTE && *pid != std::process::id())
        .filter(|(pid, ..)| {
            let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            !groups.contains("/galaxy-")
        })
        .collect();
    all.sort_by(|a, b| b.2.total_cmp(&a.2));
    all.iter().take(3).map(|(_, name, share)| format!("{name} {:.1}%", share * 100.0)).collect()
}

/// Looks at the machine from time to time until a sample is over.
pub struct Watch {
    stop: Sender<()>,
    looks: JoinHandle<Result<Vec<Look>>>,
    before: HashMap<u32, (String, f64)>,
    own: u64,
}

impl Watch {
    /// Begins to watch.
    ///
    /// # Errors
    /// Where the machine has no `/proc/stat`.
    pub fn start() -> Result<Self> {
        let before = running();
        let own = this_process();
        let (stop, stopped) = mpsc::channel();
        let since = Instant::now();
        let mut looks = vec![Look::take(since)?];
        let looks = std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
            loop {
                let last = stopped.recv_timeout(LOOK);
                looks.push(Look::take(since)?);
                if last != Err(RecvTimeoutError::Timeout) {
                    return Ok(looks);
                }
            }
        })?;
        Ok(Self { stop, looks, before, own })
    }

    /// Ends the watch, and sums up. `ours` is the processor time since the start of the testbed's groups and
    /// of its processes outside them, in ns, without this process.
    ///
    /// # Errors
    /// When the machine could not be looked at.
    pub fn finish(self, ours: u64) -> Result<Health> {
        let own = this_process() - self.own;
        // Sending fails only when the thread has ended, which the next line reports.
        let _ = self.stop.send(());
        let looks = self.looks.join().ok().context("the thread that watches panicked")??;
        let health = sum_up(&looks, (own + ours) as f64 * 1e-9);
        let others = busiest(&self.before, health.seconds.max(TICK));
        Ok(Health { others, ..health })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sound() -> Health {
        Health {
            seconds: 10.0,
            busy_share: 0.5,
            least_idle_share: LEAST_IDLE,
            steal_share: MOST_STEAL,
            others_share: MOST_OTHERS,
            others: vec!["rustc 4.0%".to_owned()],
        }
    }

    fn device(quota: Option<f64>, received: u64) -> DeviceShare {
        DeviceShare { name: "m1".to_owned(), quota, received, busy: 1_000_000_000 }
    }

    fn reasons(health: &Health, devices: &[DeviceShare]) -> String {
        match judge(health, devices) {
            Verdict::Valid => String::new(),
            Verdict::Invalid { reasons } => reasons.join("\n"),
        }
    }

    #[test]
    fn a_slowed_core_is_detected() {
        assert_eq!((slowed(64.0, 90.0), slowed(64.0, f64::NAN)), (None, None));
        assert!(slowed(62.0, 90.0).unwrap().contains("62 GFLOP/s of processor time, and 90"));
    }

    #[test]
    fn samples_exactly_at_the_thresholds_are_valid() {
        let devices = [device(Some(0.1), 97_000_001), device(None, 0)];
        assert_eq!(reasons(&sound(), &devices), "");
        assert_eq!(reasons(&sound(), &[DeviceShare { busy: 0, ..device(Some(0.1), 0) }]), "");
    }

    #[test]
    fn a_crossed_threshold_is_reported_with_its_numbers() {
        let said = reasons(&sound(), &[device(Some(0.143), 112_000_000)]);
        assert_eq!(said, "m1 received 11.2% of a core while busy; its quota is 14.3%");
        for (health, says) in [
            (
                Health { steal_share: 0.021, ..sound() },
                "the host took 2.1% of the machine; 2.0% is allowed",
            ),
            (
                Health { least_idle_share: 0.029, ..sound() },
                "only 2.9% of the machine was idle in some second; 3.0% is needed",
            ),
            (
                Health { others_share: 0.051, ..sound() },
                "other processes took 5.1% of a core (rustc 4.0%); 5.0% is allowed",
            ),
        ] {
            assert_eq!(reasons(&health, &[device(Some(0.1), 100_000_000)]), says);
        }
        // Devices with cores to themselves may take all of them.
        let full = Health { least_idle_share: 0.0, ..sound() };
        assert_eq!(reasons(&full, &[device(None, 0)]), "");
        let all = Health { steal_share: 1.0, least_idle_share: 0.0, others_share: 1.0, ..sound() };
        assert_eq!(reasons(&all, &[device(Some(1.0), 0)]).lines().count(), 4);
    }

    #[test]
    fn short_samples_allow_other_processes_as_much_time_as_one_second() {
        let short = |others_share| Health { seconds: 0.1, others_share, ..sound() };
        assert_eq!(reasons(&short(0.49), &[]), "");
        assert!(!reasons(&short(0.51), &[]).is_empty());
    }

    const STAT: &str = "cpu  9861 1 2 117000 500 0 7 300 0 0\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\n";

    #[test]
    fn proc_stat_is_parsed_and_an_empty_file_rejected() {
        let look = Look::parse(STAT, Some(4.0), 1.5).unwrap();
        let clocks = (look.idle, look.steal, look.cores, look.processes);
        assert_eq!(clocks, (1175.0, 3.0, 2, Some(4.0)));
        assert!(Look::parse("", None, 0.0).is_err());
    }

    /// Two cores, watched for three seconds: idle, then full, then idle.
    fn looks(processes: bool) -> Vec<Look> {
        let busy = |quarter: usize| if (4..8).contains(&quarter) { 0.5 } else { 0.0 };
        (0..=12)
            .map(|i| {
                let worked: f64 = (0..i).map(busy).sum();
                let at = i as f64 * 0.25;
                // The host takes a little in the end; of the work, 0.2 s is on packets.
                let steal = if i == 12 { 0.06 } else { 0.0 };
                let processes = processes.then_some(100.0 + worked * 0.9);
                Look { at, idle: 50.0 + 2.0 * at - worked - steal, steal, cores: 2, processes }
            })
            .collect()
    }

    #[test]
    fn health_sums_up_shares_and_finds_the_busiest_second() {
        let health = sum_up(&looks(true), 1.5);
        assert!((health.seconds - 3.0).abs() < 1e-9);
        assert!((health.busy_share - 2.0 / 6.0).abs() < 1e-9);
        assert!(health.least_idle_share.abs() < 1e-9);
        assert!((health.steal_share - 0.01).abs() < 1e-9);
        assert!((health.others_share - 0.1).abs() < 1e-9, "1.8 s of processes, 1.5 s own, in 3 s");
        // Without count of processes, all that is busy and not the testbed's own is others'.
        assert!((sum_up(&looks(false), 1.4).others_share - 0.2).abs() < 1e-9);
        // Shorter than a second: the whole.
        assert!((sum_up(&looks(true)[3..6], 0.0).least_idle_share - 0.5).abs() < 1e-9);
        assert_eq!(sum_up(&[], 0.0), Health::default());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn watching_this_machine_gives_finite_shares() {
        let health = Watch::start().unwrap().finish(0).unwrap();
        for (name, share) in health.values() {
            assert!(share.is_finite() && share >= 0.0, "{name} is {share}");
        }
    }
}
