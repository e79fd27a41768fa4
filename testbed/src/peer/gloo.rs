//! PyTorch with Gloo on a testbed's devices: the same model and links, a process for each device.
//!
//! `testbed/peers/pytorch/bring` brings it; without it there is none to compare with.

use crate::{environment::EnvironmentDevice, instance::Testbed, network::Network, processes::root};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::{
    fs::File,
    io::{BufRead, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{ChildStdin, ChildStdout, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::Running;

/// The script that installs PyTorch, as errors name it.
pub const BRING: &str = "testbed/peers/pytorch/bring";
/// The script that runs on a device.
const SCRIPT: &str = "testbed/peers/pytorch/gloo.py";
/// The longest that it may take to start and to read its weights.
const PLACING: Duration = Duration::from_secs(300);
/// The longest that a text may take.
const RUNNING: Duration = Duration::from_secs(600);
/// The time between two looks at whether all of its processes are there.
const LOOK: Duration = Duration::from_millis(250);
/// The prefix of the names of the threads in which PyTorch lets Gloo add up and copy. Threads that drive
/// sockets have other names.
const SUMS: &str = "pt_gloo";

/// The way in which a model is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerLayout {
    /// The whole model on the fastest device.
    Single,
    /// Heads and columns of the intermediate size over all devices, equally.
    Megatron,
    /// Rows over all devices, equally.
    Sequence,
}

impl PeerLayout {
    fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Megatron => "megatron",
            Self::Sequence => "sequence",
        }
    }
}

/// The result of one text.
#[derive(Clone, PartialEq, Debug)]
pub struct GlooResult {
    /// The time from the moment that the first device was asked until it had the result.
    pub took: Duration,
    /// The mean of the last hidden states.
    pub mean: Vec<f32>,
}

/// A running PyTorch with Gloo, with a model placed.
pub struct Gloo {
    asks: Option<ChildStdin>,
    said: Receiver<String>,
    reader: Option<JoinHandle<()>>,
    /// The processes on the devices, by rank.
    members: Vec<Member>,
    weights: String,
}

/// A process on a device.
struct Member {
    device: String,
    running: Running,
    log: PathBuf,
}

/// The version of PyTorch; none where it was not installed.
pub fn version() -> Option<String> {
    std::fs::read_to_string(directory().join("complete")).ok().map(|text| text.trim().to_owned())
}

fn directory() -> PathBuf {
    root().join("target/peers/torch")
}

impl Gloo {
    /// Starts a process on every device, or on the fastest, and waits until all have their weights, for texts
    /// of `tokens` tokens. From then on the threads that compute are under the devices' quotas.
    ///
    /// # Errors
    /// When PyTorch was not installed, or a process ends, as one does that takes more memory than there is.
    pub fn start(testbed: &Testbed, model: &Path, way: PeerLayout, tokens: u32) -> Result<Self> {
        let devices = match way {
            PeerLayout::Single => vec![fastest(&testbed.environment.devices)],
            PeerLayout::Megatron | PeerLayout::Sequence => {
                (0..testbed.environment.devices.len()).collect()
            }
        };
        let host = match testbed.loopback {
            true => "127.0.0.1".to_owned(),
            false => Network::address(devices[0]),
        };
        let place = PeerJob { testbed, model, way, tokens, host: &host, count: devices.len() };
        let (first, asks, answers) = place.start(0, devices[0], "0")?;
        let (line, said) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for text in BufReader::new(answers).lines().map_while(Result::ok) {
                // The receiver may be gone.
                drop(line.send(text));
            }
        });
        let (asks, reader) = (Some(asks), Some(reader));
        let mut gloo = Self { asks, said, reader, members: vec![first], weights: String::new() };
        if devices.len() > 1 {
            let at = gloo.line(PLACING)?;
            let port = at.strip_prefix("at ").with_context(|| format!("PyTorch says {at:?}"))?;
            for (rank, &device) in devices.iter().enumerate().skip(1) {
                gloo.members.push(place.start(rank, device, port)?.0);
            }
        }
        let ready = gloo.line(PLACING)?;
        let weights = ready.strip_prefix("ready ");
        gloo.weights = weights.with_context(|| format!("PyTorch says {ready:?}"))?.to_owned();
        gloo.hold(testbed)?;
        Ok(gloo)
    }

    /// The form in which the first device keeps its weights: whichever is faster there.
    pub fn weights(&self) -> &str {
        &self.weights
    }

    /// Puts the threads that compute under the quotas, and leaves beside them those that drive sockets, as
    /// ours.
    fn hold(&self, testbed: &Testbed) -> Result<()> {
        if testbed.loopback {
            return Ok(());
        }
        for member in &self.members {
            let pid = member.running.0.id();
            let limited = testbed.limited_as(&member.device, pid)?;
            for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                let entry = entry?;
                let id: Option<u32> = entry.file_name().to_str().and_then(|id| id.parse().ok());
                let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                if let Some(id) = id.filter(|id| *id == pid || name.starts_with(SUMS)) {
                    limited.hold(id)?;
                }
            }
        }
        Ok(())
    }

    /// Runs one text on all devices.
    ///
    /// # Errors
    /// When PyTorch fails, with what its processes printed.
    pub fn run(&mut self, tokens: &[u32]) -> Result<GlooResult> {
        #[derive(Deserialize)]
        struct Said {
            ns: u64,
            mean: Vec<f32>,
        }
        let ids: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        let asks = self.asks.as_mut().context("it is open until this is dropped")?;
        // Where the process ended, `line` reports why.
        drop(writeln!(asks, "{}", ids.join(" ")));
        let line = self.line(RUNNING)?;
        let Said { ns, mean } =
            serde_json::from_str(&line).with_context(|| format!("PyTorch says {line:?}"))?;
        Ok(GlooResult { took: Duration::from_nanos(ns), mean })
    }

    /// The next line of the first device, as long as all processes are there.
    fn line(&mut self, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            match self.said.recv_timeout(LOOK) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("PyTorch ended{}", self.output()),
            }
            for member in &mut self.members {
                if let Some(status) = member.running.0.try_wait()? {
                    let device = member.device.clone();
                    bail!("PyTorch on {device} ended ({status}){}", self.output());
                }
            }
            let late = Instant::now() > deadline;
            ensure!(!late, "PyTorch says nothing for {limit:?}{}", self.output());
        }
    }

    /// All that the processes have printed.
    fn output(&self) -> String {
        let said = |member: &Member| {
            let text = std::fs::read_to_string(&member.log).unwrap_or_default();
            let text = text.trim();
            (!text.is_empty()).then(|| format!("; on {} it said:\n{text}", member.device))
        };
        self.members.iter().filter_map(said).collect()
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        self.asks = None;
        // Ends the processes, and with the first of them the lines that are read.
        self.members.clear();
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
    }
}

/// The settings that the processes of one model share.
struct PeerJob<'a> {
    testbed: &'a Testbed,
    model: &'a Path,
    way: PeerLayout,
    tokens: u32,
    host: &'a str,
    count: usize,
}

impl PeerJob<'_> {
    fn start(
        &self,
        rank: usize,
        device: usize,
        port: &str,
    ) -> Result<(Member, ChildStdin, ChildStdout)> {
        let Self { testbed, model, way, tokens, host, count } = self;
        let device = testbed.environment.devices[device].name.as_str();
        let python = directory().join("bin/python");
        ensure!(python.is_file(), "PyTorch is not there: {BRING} brings it");
        let mut command = testbed.command(device, testbed.environment.hold, &python)?;
        command.arg(root().join(SCRIPT)).arg(model).arg(way.name());
        command.args([rank.to_string(), count.to_string(), tokens.to_string()]).args([*host, port]);
        command.env("GLOO_SOCKET_IFNAME", if testbed.loopback { "lo" } else { "eth0" });
        let log = testbed.directory().join(format!("pytorch-{device}.log"));
        command.stderr(File::create(&log)?).stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().with_context(|| format!("PyTorch on {device}"))?;
        let mut running = Running(child);
        let asks = running.0.stdin.take().context("its input is piped")?;
        let answers = running.0.stdout.take().context("its output is piped")?;
        Ok((Member { device: device.to_owned(), running, log }, asks, answers))
    }
}

/// The index of the device on which a model runs that uses only one: the fastest, and of two equally fast
/// ones that with more memory.
fn fastest(devices: &[EnvironmentDevice]) -> usize {
    let of = |i: usize| {
        let device: &EnvironmentDevice = &devices[i];
        (device.speed.map_or(f64::INFINITY, |speed| speed.0), device.memory.0)
    };
    (0..devices.len()).fold(0, |best, i| if of(i) > of(best) { i } else { best })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::environment::Environment;

    #[test]
    fn the_single_device_baseline_uses_the_fastest_device() {
        let of = |name: &str| fastest(&Environment::open(name).unwrap().devices);
        assert_eq!(of("A"), 0);
        let f = Environment::open("F").unwrap();
        assert_eq!(f.devices[of("F")].kind, "Nano-L");
    }
}
