//! Delay and loss of links, for kernels without netem.
//!
//! Where a link delays or loses, its two ends are TAP interfaces instead of a veth pair: the device's `eth0`,
//! and the hub's. One process for each testbed, the forwarder, runs inside its hub and moves the frames
//! between them: what a device sends waits for the link's delay, what it receives passes at once. Both ends
//! are shaped in front of it like any other link. The forwarder decides nothing else, and ends with the
//! namespaces.
//!
//! Packets that the stack has not cut up yet pass whole, with the header that says how to cut them
//! (the `virtio_net_hdr` of [`tun_rs`]'s offload): on a small machine that is the difference between
//! a tenth of a core and all of it.

use crate::{
    namespaces::{enter, inside, namespace, network_file},
    programs::program,
};
use anyhow::{Context, Result, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, ioctl_fionbio},
    process::{setpriority_process, setsid},
    thread::set_current_timer_slack,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    fs,
    io::{Read as _, Write as _},
    num::NonZeroU64,
    os::unix::fs::MetadataExt as _,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

/// The bytes of the largest frame: 64 KB of a packet, its Ethernet header, and the header that says how to
/// cut it.
const FRAME: usize = 66_000;
/// Frames of one end that are moved before the others have their turn.
const TURN: usize = 16;
/// The time between two looks at whether the namespaces still have their names: as long as the forwarder
/// holds an interface, the kernel keeps a namespace that was removed.
const LOOK: Duration = Duration::from_secs(1);
/// The longest that the forwarder wakes before a frame is due, and then spins: more than the delay of any
/// sleep on an idle virtual machine.
const EARLY: Duration = Duration::from_micros(300);
/// The longest that the forwarder may take to start.
const PATIENCE: Duration = Duration::from_secs(10);
/// The text that the forwarder prints when its interfaces are there.
const READY: &str = "ready";
/// The bytes that may wait beyond what the link's rate brings during its delay.
const SPARE: u64 = 1 << 20;

/// A link that delays or loses packets.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct EmulatedLink {
    /// The index of the link's place, after which the hub's end is named.
    pub i: usize,
    /// The name of the link's place.
    pub place: String,
    /// The delay of everything that its device sends, in ns.
    pub delay_ns: u64,
    /// The share of packets that is lost, each way.
    pub loss: f64,
    /// The rate of the link, in bits per second.
    pub rate: u64,
}

/// Makes an interface as links with delays and losses need it, in the namespace of the calling thread.
///
/// # Errors
/// When this machine has no such interfaces.
pub(crate) fn check() -> Result<()> {
    tap("t0", true).map(drop)
}

/// Starts the forwarder of a testbed, and waits until its interfaces are there.
pub(crate) fn start(testbed: &str, lines: &[EmulatedLink]) -> Result<()> {
    let mut command = Command::new(program("galaxy-testbed")?);
    command.args(["forward", testbed, &serde_json::to_string(lines)?]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = inside(&namespace(testbed, "hub"), || command.spawn())?
        .context("the forwarder does not start")?;
    let mut said = child.stdout.take().context("a pipe was asked for")?;
    let limit = Timespec::try_from(PATIENCE).context("a limit of seconds")?;
    let mut ready = [0; READY.len()];
    let in_time = poll(&mut [PollFd::new(&said, PollFlags::IN)], Some(&limit))? > 0;
    if !in_time || said.read_exact(&mut ready).is_err() {
        let _ = child.kill();
        let mut why = String::new();
        let _ = child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut why));
        let _ = child.wait();
        let why = if in_time { why.trim() } else { "it takes too long" };
        bail!("the forwarder, which delays and loses packets, does not start: {why}");
    }
    // A delay is as precise as this process is prompt. Without a real-time priority it goes on all the same.
    let _ = Command::new("chrt")
        .args(["--fifo", "--pid", "1", &child.id().to_string()])
        .stdin(Stdio::null())
        .output();
    Ok(())
}

/// Runs the forwarder's process, until its interfaces or the names of their namespaces are gone.
///
/// # Errors
/// When it cannot make its interfaces.
pub fn run(testbed: &str, lines: &str) -> Result<()> {
    let lines: Vec<EmulatedLink> = serde_json::from_str(lines).context("the links are not JSON")?;
    // Whoever started it may go, and its terminal too.
    let _ = setsid();
    let hub = namespace(testbed, "hub");
    enter(&hub)?;
    let mut homes = vec![hub];
    let (mut ends, mut cables) = (Vec::new(), Vec::new());
    for line in &lines {
        let home = namespace(testbed, &line.place);
        // A lost packet is one on the wire, not one of many segments.
        let whole = line.loss == 0.0;
        ends.push(inside(&home, || tap("eth0", whole))??);
        ends.push(tap(&format!("h{}", line.i), whole)?);
        cables.push(Cable::of(line));
        homes.push(home);
    }
    let homes = Homes::of(homes)?;
    let _ = setpriority_process(None, -20);
    let _ = set_current_timer_slack(NonZeroU64::new(1));
    let mut out = std::io::stdout();
    out.write_all(READY.as_bytes()).and_then(|()| out.flush()).context("nobody listens")?;
    forward(&ends, &mut cables, &homes)
}

/// Makes one end of a link in the namespace of the calling thread.
fn tap(name: &str, whole: bool) -> Result<SyncDevice> {
    let builder = DeviceBuilder::new().name(name).layer(Layer::L2).enable(false);
    let device = builder
        .with(|options| {
            options.offload(whole);
        })
        .build_sync()
        .with_context(|| format!("the TAP interface {name}"))?;
    ioctl_fionbio(&device, true)?;
    Ok(device)
}

/// The names of namespaces, each with the identity that it had at the start.
struct Homes(Vec<(String, u64)>);

impl Homes {
    fn of(names: Vec<String>) -> Result<Self> {
        let known = |name: String| {
            let found = Self::find(&name).with_context(|| format!("{name} is gone"))?;
            Ok((name, found))
        };
        names.into_iter().map(known).collect::<Result<_>>().map(Self)
    }

    fn find(name: &str) -> Option<u64> {
        fs::metadata(network_file(name)).ok().map(|found| found.ino())
    }

    fn are_there(&self) -> bool {
        self.0.iter().all(|(name, inode)| Self::find(name) == Some(*inode))
    }
}

/// What a link does to frames. It has no interfaces, and no clock of its own.
struct Cable {
    delay: Duration,
    /// The probability of a loss, as a part of 2^64.
    loss: u64,
    chance: u64,
    waiting: VecDeque<(Instant, Vec<u8>)>,
    bytes: u64,
    room: u64,
}

impl Cable {
    fn of(line: &EmulatedLink) -> Self {
        let delay = Duration::from_nanos(line.delay_ns);
        Self {
            delay,
            loss: (line.loss * u64::MAX as f64) as u64,
            // A seed that differs for each link, and is the same every time.
            chance: line.i as u64,
            waiting: VecDeque::new(),
            bytes: 0,
            room: SPARE + 2 * (line.rate as f64 / 8.0 * delay.as_secs_f64()) as u64,
        }
    }

    /// Whether the next frame is lost (SplitMix64).
    fn loses(&mut self) -> bool {
        self.chance = self.chance.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.chance;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) < self.loss
    }

    /// Takes a frame that the link's device sent, unless too many bytes wait.
    fn send(&mut self, now: Instant, frame: &[u8]) {
        let size = frame.len() as u64;
        if self.bytes + size <= self.room {
            self.bytes += size;
            self.waiting.push_back((now + self.delay, frame.to_vec()));
        }
    }

    /// The time at which the next frame is due; none where none waits.
    fn due(&self) -> Option<Instant> {
        self.waiting.front().map(|(due, _)| *due)
    }

    /// The next frame, once it is due.
    fn next(&mut self, now: Instant) -> Option<Vec<u8>> {
        let (_, frame) = self.waiting.pop_front_if(|(due, _)| *due <= now)?;
        self.bytes -= frame.len() as u64;
        Some(frame)
    }
}

/// How long to sleep so as to wake in time, learnt from how late earlier sleeps ended.
#[derive(Default)]
struct Sleep {
    late: Duration,
}

impl Sleep {
    /// The time to sleep before something is due in `due`; zero once it is time to spin.
    fn before(&self, due: Duration) -> Duration {
        due.saturating_sub(self.late)
    }

    /// Learns from a sleep: fast upwards, slowly downwards, so that being late is rare and spinning short.
    fn took_longer(&mut self, late: Duration) {
        let late = late.min(EARLY);
        self.late = match late > self.late {
            true => self.late + (late - self.late) / 4,
            false => self.late - (self.late - late) / 32,
        };
    }
}

/// Moves frames until an interface or a namespace is gone. `ends` are the device's end and the hub's of each
/// cable in turn.
fn forward(ends: &[SyncDevice], cables: &mut [Cable], homes: &Homes) -> Result<()> {
    ensure!(ends.len() == 2 * cables.len(), "two ends for each link");
    let mut fds: Vec<PollFd<'_>> = ends.iter().map(|end| PollFd::new(end, PollFlags::IN)).collect();
    let mut frame = vec![0; FRAME];
    let mut look = Instant::now() + LOOK;
    let mut sleep = Sleep::default();
    loop {
        let next = cables.iter().filter_map(Cable::due).fold(look, Instant::min);
        let left = sleep.before(next.saturating_duration_since(Instant::now()));
        let until = Instant::now() + left;
        let ready = match poll(&mut fds, Some(&Timespec::try_from(left)?)) {
            Ok(ready) => ready,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error).context("waiting for frames"),
        };
        let now = Instant::now();
        if ready == 0 && !left.is_zero() {
            sleep.took_longer(now.saturating_duration_since(until));
        }
        if now >= look {
            if !homes.are_there() {
                return Ok(());
            }
            look = now + LOOK;
        }
        for (i, cable) in cables.iter_mut().enumerate() {
            let (device, hub) = (&ends[2 * i], &ends[2 * i + 1]);
            while let Some(due) = cable.next(now) {
                pass(hub, &due);
            }
            let states = [fds[2 * i].revents(), fds[2 * i + 1].revents()];
            if states.iter().any(|state| state.intersects(PollFlags::ERR | PollFlags::NVAL)) {
                return Ok(()); // the interface is gone
            }
            if states[0].contains(PollFlags::IN) {
                let taken = take(device, &mut frame, |frame| {
                    if cable.loses() {
                    } else if cable.delay.is_zero() {
                        pass(hub, frame);
                    } else {
                        cable.send(now, frame);
                    }
                });
                if !taken {
                    return Ok(());
                }
            }
            if states[1].contains(PollFlags::IN) {
                let taken = take(hub, &mut frame, |frame| {
                    if !cable.loses() {
                        pass(device, frame);
                    }
                });
                if !taken {
                    return Ok(());
                }
            }
        }
    }
}

/// Reads the frames that have arrived, at most `TURN` of them; false when the interface is gone.
fn take(from: &SyncDevice, frame: &mut [u8], mut each: impl FnMut(&[u8])) -> bool {
    for _ in 0..TURN {
        match rustix::io::read(from, &mut *frame) {
            Ok(size) => each(&frame[..size]),
            Err(Errno::INTR) => {}
            Err(Errno::BADFD) => return false,
            // Nothing more, or nothing that can be read while it is down.
            Err(_) => break,
        }
    }
    true
}

/// Hands a frame to the other end. An end that is unplugged takes none: the frame is lost, as on any cable.
/// An end that is gone is noticed when it is read from.
fn pass(to: &SyncDevice, frame: &[u8]) {
    let _ = rustix::io::write(to, frame);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn line(delay_ns: u64, loss: f64) -> EmulatedLink {
        EmulatedLink { i: 0, place: "d0".into(), delay_ns, loss, rate: 8_000_000 }
    }

    #[test]
    fn frames_leave_the_link_in_order_and_never_before_the_delay() {
        let mut cable = Cable::of(&line(3_000_000, 0.0));
        let start = Instant::now();
        let after = |us| start + Duration::from_micros(us);
        cable.send(start, &[1]);
        cable.send(after(1000), &[2]);
        assert_eq!(cable.due(), Some(after(3000)));
        assert_eq!(cable.next(after(2999)), None);
        assert_eq!(cable.next(after(3500)), Some(vec![1]));
        assert_eq!(cable.next(after(3500)), None);
        assert_eq!(cable.next(after(4000)), Some(vec![2]));
        assert_eq!(cable.due(), None);
    }

    #[test]
    fn sleep_adapts_to_the_measured_wake_up_delay_within_a_bound() {
        let mut sleep = Sleep::default();
        let ms = Duration::from_millis;
        assert_eq!(sleep.before(ms(3)), ms(3));
        for _ in 0..50 {
            sleep.took_longer(ms(10));
        }
        assert!(EARLY - sleep.late < Duration::from_micros(1), "bounded: {:?}", sleep.late);
        assert_eq!(sleep.before(Duration::from_micros(200)), Duration::ZERO);
        for _ in 0..500 {
            sleep.took_longer(Duration::ZERO);
        }
        assert!(sleep.late < Duration::from_micros(1));
    }

    #[test]
    fn the_frame_queue_of_a_link_is_bounded() {
        let mut cable = Cable::of(&line(1_000_000, 0.0));
        let now = Instant::now();
        for _ in 0..200 {
            cable.send(now, &[0; 16_000]);
        }
        assert!(cable.bytes <= cable.room && cable.bytes + 16_000 > cable.room);
        let later = now + Duration::from_secs(1);
        while cable.next(later).is_some() {}
        assert_eq!(cable.bytes, 0);
    }

    #[test]
    fn the_share_of_lost_frames_matches_the_configured_loss() {
        let mut cable = Cable::of(&line(0, 0.02));
        let lost = (0..100_000).filter(|_| cable.loses()).count();
        assert!((1900..2100).contains(&lost), "{lost}");
        let mut whole = Cable::of(&line(0, 0.0));
        assert!((0..100_000).all(|_| !whole.loses()));
    }
}
