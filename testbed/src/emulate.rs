//! Two or more devices on one machine: network namespaces joined by shaped links.
//!
//! Only what the overlap measurement and the unplug test need; whole environments come with the
//! testbed proper. Everything it makes is named after this process and removed when dropped.

use anyhow::{Context, Result, bail, ensure};
use std::process::{Command, Stdio};

/// Network namespaces on one bridge, each behind a veth pair, shaped on the way out and in.
pub struct Network {
    prefix: String,
    devices: usize,
}

/// Bytes that a shaped link lets through at once after a pause: one full segment of the network
/// stack. A smaller burst makes the stack cut packets earlier, which costs the devices' processors
/// more than any real link does; so it stays, and predictions know of it.
pub const BURST: u64 = 70_000;

fn sh(line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (program, arguments) = words.split_first().context("an empty command")?;
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{program} is needed (Debian: apt-get install iproute2)"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Network {
    /// `devices` namespaces and one for the coordinator (number `devices`); each device's link
    /// carries `bits` per second each way.
    ///
    /// # Errors
    /// Without root, or where the kernel lacks namespaces, veth, bridge or tbf.
    pub fn up(devices: usize, bits: u64) -> Result<Self> {
        ensure!(
            sh("id -u")?.trim() == "0",
            "network namespaces need root: run this as root, or skip it"
        );
        let network = Self { prefix: format!("glx{}", std::process::id() % 100_000), devices };
        let p = &network.prefix;
        sh(&format!("ip netns add {p}-hub"))?;
        sh(&format!("ip netns exec {p}-hub ip link add br0 type bridge"))?;
        sh(&format!("ip netns exec {p}-hub ip link set br0 up"))?;
        for i in 0..=devices {
            sh(&format!("ip netns add {p}-{i}"))?;
            sh(&format!("ip link add {p}v{i} type veth peer name {p}h{i}"))?;
            sh(&format!("ip link set {p}v{i} netns {p}-{i} name eth0"))?;
            sh(&format!("ip link set {p}h{i} netns {p}-hub name h{i}"))?;
            sh(&format!("ip netns exec {p}-hub ip link set h{i} master br0 up"))?;
            sh(&format!("ip netns exec {p}-{i} ip addr add {}/24 dev eth0", Self::address(i)))?;
            sh(&format!("ip netns exec {p}-{i} ip link set eth0 up"))?;
            sh(&format!("ip netns exec {p}-{i} ip link set lo up"))?;
            if i < devices {
                let burst = BURST;
                let shape = format!("root tbf rate {bits}bit burst {burst} limit 16000000");
                sh(&format!("ip netns exec {p}-{i} tc qdisc add dev eth0 {shape}"))?;
                sh(&format!("ip netns exec {p}-hub tc qdisc add dev h{i} {shape}"))?;
            }
        }
        Ok(network)
    }

    /// The address of device `i`.
    pub fn address(i: usize) -> String {
        format!("10.201.77.{}", i + 1)
    }

    /// The name of the namespace of device `i`.
    pub fn namespace(&self, i: usize) -> String {
        format!("{}-{i}", self.prefix)
    }

    /// A command that runs in the namespace of device `i`.
    pub fn command(&self, i: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(i), program]);
        command
    }

    /// Pulls or plugs the cable of device `i`.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn plug(&self, i: usize, plugged: bool) -> Result<()> {
        let to = if plugged { "up" } else { "down" };
        sh(&format!("ip netns exec {}-hub ip link set h{i} {to}", self.prefix)).map(drop)
    }
}

impl Network {
    /// Cuts the path from device `from` to device `to`, both ways for a connection, and heals it;
    /// everyone else still reaches both.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn cut(&self, from: usize, to: usize, cut: bool) -> Result<()> {
        let (p, verb) = (&self.prefix, if cut { "add" } else { "del" });
        let address = Self::address(to);
        sh(&format!("ip netns exec {p}-{from} ip route {verb} blackhole {address}/32")).map(drop)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for i in 0..=self.devices {
            let _ = sh(&format!("ip netns del {}-{i}", self.prefix));
        }
        let _ = sh(&format!("ip netns del {}-hub", self.prefix));
    }
}
