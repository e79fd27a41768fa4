//! An environment: the devices that a testbed stands for, and the links between them.
//!
//! A file says what the *modelled* devices are: their speed, memory, link. One factor makes
//! compute and links of the emulation faster together, so that their ratio stays and an experiment
//! takes minutes instead of hours; another scales memory, for engines that hold weights wider than
//! the devices' own did.

use anyhow::{Context, Result, bail, ensure};
use galaxy_common::{Bytes, DeviceName};
use serde::{Deserialize, Deserializer, Serialize};
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

/// The environments that come with the testbed, by name.
const KNOWN: &[(&str, &str)] = &[
    ("A", include_str!("../environments/A.toml")),
    ("B", include_str!("../environments/B.toml")),
    ("C", include_str!("../environments/C.toml")),
    ("D", include_str!("../environments/D.toml")),
    ("E", include_str!("../environments/E.toml")),
    ("F", include_str!("../environments/F.toml")),
    ("G", include_str!("../environments/G.toml")),
    ("H", include_str!("../environments/H.toml")),
    ("I", include_str!("../environments/I.toml")),
    ("pair", include_str!("../environments/pair.toml")),
    ("two", include_str!("../environments/two.toml")),
    ("three", include_str!("../environments/three.toml")),
    ("four", include_str!("../environments/four.toml")),
];

/// The name of the coordinator's place, which is no device and has no limits.
pub const COORDINATOR: &str = "coordinator";
/// Most devices of an environment: their addresses are one byte, and their links one bridge.
const MAX_DEVICES: usize = 64;
/// Longest name of a device or testbed: it is part of names that the kernel cuts off.
const MAX_NAME: usize = 16;

/// A rate in bits per second.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Serialize)]
pub struct BitRate(pub f64);

/// A speed in thousands of millions of 32-bit floating-point operations per second.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Serialize)]
pub struct Gflops(pub f64);

/// Reads a number and its unit, as `125Mbit/s`.
fn quantity(text: &str, units: &[(&str, f64)]) -> Result<f64> {
    let text = text.trim();
    let at = text.find(|c: char| c.is_alphabetic()).unwrap_or(text.len());
    let (number, unit) = (text[..at].trim(), &text[at..]);
    let known = || units.iter().map(|u| u.0).collect::<Vec<_>>().join(", ");
    let Some((_, factor)) = units.iter().find(|(name, _)| *name == unit) else {
        bail!("{text:?} has no unit that fits here; write a number and one of {}", known());
    };
    let number: f64 = number.parse().with_context(|| format!("{text:?} has no number"))?;
    ensure!(number.is_finite() && number >= 0.0, "{text:?} must not be negative");
    Ok(number * factor)
}

impl FromStr for BitRate {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        quantity(text, &[("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9)]).map(Self)
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Mbit/s", (self.0 / 1e4).round() / 100.0)
    }
}

impl FromStr for Gflops {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        quantity(text, &[("GFLOP/s", 1.0), ("TFLOP/s", 1e3)]).map(Self)
    }
}

impl fmt::Display for Gflops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GFLOP/s", (self.0 * 100.0).round() / 100.0)
    }
}

fn parsed<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(d: D) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
}

fn perhaps<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(
    d: D,
) -> Result<Option<T>, D::Error> {
    parsed(d).map(Some)
}

fn duration<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    seconds(&String::deserialize(d)?).map_err(serde::de::Error::custom)
}

fn seconds(text: &str) -> Result<Duration> {
    quantity(text, &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)]).map(Duration::from_secs_f64)
}

/// The default turn, 2 ms. A quota of the kernel has slices of at least a millisecond, so a device of 15%
/// stops for 6 ms; each wait of one device for another then takes half of that longer than on devices that
/// are slow all the time: 10% of a request on four boards of environment C. Each turn of a gate takes 20 us
/// of its core twice.
fn turn() -> Duration {
    Duration::from_millis(2)
}

/// The part of a device that its quota limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hold {
    /// The threads that multiply. Links are then driven beside the quota, as by a device whose network costs
    /// it nothing; what they took is measured and shown.
    #[default]
    Compute,
    /// The whole process. Its links stop with it, as no slow processor's do.
    Process,
}

/// How much faster the emulation is than the devices that it stands for.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scale {
    /// The factor of compute and links.
    pub speed: f64,
    /// The factor of memory.
    pub memory: f64,
}

impl Default for Scale {
    fn default() -> Self {
        Self { speed: 1.0, memory: 1.0 }
    }
}

/// A modelled device: what an emulated one stands for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentDevice {
    /// The device's name.
    pub name: DeviceName,
    /// The kind of device, for people.
    #[serde(default)]
    pub kind: String,
    /// The device's speed; without it the device has a core of this machine to itself.
    #[serde(default, deserialize_with = "perhaps")]
    pub speed: Option<Gflops>,
    /// The memory that the device grants.
    #[serde(deserialize_with = "parsed")]
    pub memory: Bytes,
    /// The rate of the device's link, each way.
    #[serde(deserialize_with = "parsed")]
    pub rate: BitRate,
    /// The delay of everything that the device sends.
    #[serde(default, deserialize_with = "duration")]
    pub delay: Duration,
    /// The share of packets that its link loses, each way.
    #[serde(default)]
    pub loss: f64,
    /// Bytes per second that it reads from disk; without it, as many as this machine's disk gives.
    #[serde(default, deserialize_with = "perhaps")]
    pub disk: Option<Bytes>,
}

/// The devices and links of a testbed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// The environment's name.
    pub name: String,
    /// What the environment stands for, for people.
    #[serde(default)]
    pub about: String,
    /// What the quotas of all devices limit.
    #[serde(default)]
    pub hold: Hold,
    /// How much faster the emulation is than the modelled devices.
    #[serde(default)]
    pub scale: Scale,
    /// The length of the turns in which devices have their shares of a core. A device that waits for another
    /// waits for its turn, too; each turn takes some of the core.
    #[serde(default = "turn", deserialize_with = "duration")]
    pub turn: Duration,
    /// The values that all devices have instead of their own, as `10Mbit/s,memory=8GB`: a rate, `memory=`,
    /// `delay=` or `turn=`. They become part of the name.
    #[serde(default)]
    pub with: String,
    /// The devices, in ring order.
    #[serde(rename = "device")]
    pub devices: Vec<EnvironmentDevice>,
    /// How exactly its devices are calibrated.
    #[serde(skip)]
    pub precision: Precision,
    /// The text that the environment was read from.
    #[serde(skip)]
    source: String,
}

/// How exactly devices are calibrated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Precision {
    /// Exact enough for measurements that count.
    #[default]
    Full,
    /// A calibration of a few seconds, for smoke runs, which measure nothing.
    Rough,
}

impl Environment {
    /// Reads a file, or one of the environments that come with the testbed, by its name. After an `@` stand
    /// the values that all devices have instead of their own: `A@10Mbit/s,memory=8GB`.
    ///
    /// # Errors
    /// When there is no such file or name, or when a value cannot be.
    pub fn open(which: &str) -> Result<Self> {
        // A path may contain an `@`.
        let there = Path::new(which).is_file();
        if !there && let Some((which, with)) = which.rsplit_once('@') {
            let plain = Self::open(which)?;
            ensure!(plain.with.is_empty(), "{which} has other values already: {}", plain.with);
            // A key of the whole environment stands before all tables.
            let text = format!("with = {with:?}\n{}", plain.source);
            return Self::parse(&text).with_context(|| format!("environment {which}@{with}"));
        }
        if let Some((_, text)) = KNOWN.iter().find(|(name, _)| *name == which) {
            return Self::parse(text).with_context(|| format!("environment {which}"));
        }
        let path = PathBuf::from(which);
        let text = std::fs::read_to_string(&path).with_context(|| {
            let names: Vec<&str> = KNOWN.iter().map(|k| k.0).collect();
            format!("{which} is neither a file that can be read nor one of {}", names.join(", "))
        })?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let mut environment: Self = toml::from_str(text)?;
        environment.change()?;
        environment.check()?;
        environment.source = text.to_owned();
        Ok(environment)
    }

    /// Gives all devices the values that they have instead of their own.
    fn change(&mut self) -> Result<()> {
        for change in self.with.split(',').filter(|change| !change.is_empty()) {
            let (key, value) = change.split_once('=').unwrap_or(("rate", change));
            let value = value.trim();
            for device in &mut self.devices {
                match key.trim() {
                    "rate" => device.rate = value.parse()?,
                    "memory" => device.memory = value.parse()?,
                    "delay" => device.delay = seconds(value)?,
                    "turn" => self.turn = seconds(value)?,
                    other => bail!(
                        "{other:?} is nothing that all devices can have: known are a rate, memory=, delay= and turn="
                    ),
                }
            }
            let short = value.trim_end_matches("/s").replace(|c: char| !c.is_alphanumeric(), "-");
            self.name = format!("{}-{short}", self.name);
            self.about = format!("{}; {} {value}", self.about, key.trim());
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        check_name("the environment", &self.name)?;
        let Scale { speed, memory } = self.scale;
        for (what, factor) in [("speed", speed), ("memory", memory)] {
            let sound = factor.is_finite() && factor > 0.0;
            ensure!(sound, "scale.{what} = {factor} must be above 0");
        }
        let turns = Duration::from_micros(200)..=Duration::from_millis(20);
        ensure!(turns.contains(&self.turn), "turn = {:?} is not between 200us and 20ms", self.turn);
        let count = self.devices.len();
        ensure!((1..=MAX_DEVICES).contains(&count), "{count} devices: 1 to {MAX_DEVICES} fit");
        for (i, device) in self.devices.iter().enumerate() {
            let name = device.name.as_str();
            check_name("a device", name)?;
            let twice = self.devices[..i].iter().any(|d| d.name == device.name);
            ensure!(!twice, "two devices are named {name:?}");
            let taken = [COORDINATOR, "hub"].contains(&name);
            ensure!(!taken, "a device cannot be named {name:?}: the testbed uses that name");
            ensure!(device.rate.0 >= 1e5, "device {name:?}: a link needs at least 100kbit/s");
            ensure!((0.0..1.0).contains(&device.loss), "device {name:?}: loss is a share below 1");
            ensure!(device.delay < Duration::from_secs(1), "device {name:?}: delay above 1 s");
            let slow = device.speed.is_some_and(|speed| speed.0 <= 0.0);
            ensure!(!slow, "device {name:?}: speed must be above 0");
        }
        Ok(())
    }

    /// The text that the environment was read from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The rate of a device's link in the emulation, each way.
    pub fn rate(&self, device: &EnvironmentDevice) -> BitRate {
        BitRate(device.rate.0 * self.scale.speed)
    }

    /// The delay of a device's link in the emulation, shorter by the same factor as compute is faster.
    pub fn delay(&self, device: &EnvironmentDevice) -> Duration {
        device.delay.div_f64(self.scale.speed)
    }

    /// The speed that a device's quota must give in the emulation.
    pub fn speed(&self, device: &EnvironmentDevice) -> Option<Gflops> {
        device.speed.map(|speed| Gflops(speed.0 * self.scale.speed))
    }

    /// The memory that a device grants in the emulation.
    pub fn memory(&self, device: &EnvironmentDevice) -> Bytes {
        Bytes((device.memory.0 as f64 * self.scale.memory) as u64)
    }

    /// The bytes that a device reads from disk in a second of the emulation.
    pub fn disk(&self, device: &EnvironmentDevice) -> Option<Bytes> {
        device.disk.map(|disk| Bytes((disk.0 as f64 * self.scale.speed) as u64))
    }
}

/// Checks that a name consists of letters, digits and dashes: it becomes part of the names of namespaces and
/// groups.
///
/// # Errors
/// When it is anything else.
pub fn check_name(what: &str, name: &str) -> Result<()> {
    let fits = (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    ensure!(fits, "{what} is named {name:?}: 1 to {MAX_NAME} letters, digits and dashes are taken");
    Ok(())
}

/// The directory in which testbeds keep their files while they are up.
pub fn state_directory(root: bool) -> PathBuf {
    if root {
        return Path::new("/run/galaxy-testbed").to_owned();
    }
    std::env::var_os("XDG_RUNTIME_DIR")
        .map_or_else(std::env::temp_dir, PathBuf::from)
        .join("galaxy-testbed")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_environment_opens_under_its_name() {
        for (name, _) in KNOWN {
            let environment = Environment::open(name).unwrap();
            assert_eq!(environment.name, *name);
        }
    }

    #[test]
    fn speeds_of_the_paper_boards_are_proportional_to_their_clocks() {
        let f = Environment::open("F").unwrap();
        let speed = |i: usize| f.devices[i].speed.unwrap().0;
        assert!((speed(0) / speed(1) - 1470.0 / 825.0).abs() < 0.01);
        assert!((speed(2) / speed(1) - 403.0 / 825.0).abs() < 0.01);
    }

    #[test]
    fn invalid_environments_are_rejected_with_a_reason() {
        let sound =
            "name = \"x\"\n[[device]]\nname = \"a\"\nmemory = \"1GB\"\nrate = \"1Mbit/s\"\n";
        assert!(Environment::parse(sound).is_ok());
        for (from, to, says) in [
            ("1Mbit/s", "1", "write a number and one of kbit/s, Mbit/s"),
            ("1Mbit/s", "1kbit/s", "at least 100kbit/s"),
            ("name = \"a\"", "name = \"hub\"", "the testbed uses that name"),
            ("name = \"x\"", "name = \"x y\"", "letters, digits and dashes"),
            ("memory = \"1GB\"", "memory = \"1GB\"\nlos = 0.1", "unknown field `los`"),
            ("memory = \"1GB\"", "memory = \"1GB\"\nloss = 1.0", "loss is a share below 1"),
            ("memory = \"1GB\"", "memory = \"1GB\"\nspeed = \"0GFLOP/s\"", "above 0"),
            ("[[device]]", "turn = \"1us\"\n[[device]]", "not between 200us and 20ms"),
            ("[[device]]", "[scale]\nspeed = 0.0\n[[device]]", "scale.speed = 0 must be above 0"),
        ] {
            let error = Environment::parse(&sound.replacen(from, to, 1)).unwrap_err();
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
    }

    #[test]
    fn values_after_the_environment_name_apply_to_all_devices() {
        let own = Environment::open("B").unwrap();
        let other = Environment::open("B@10Mbit/s,memory=8GB,delay=2ms").unwrap();
        assert_eq!(other.name, "B-10Mbit-8GB-2ms");
        assert_eq!(other.devices.len(), own.devices.len());
        assert!(other.devices.iter().all(|d| d.rate.0 == 1e7 && d.memory == Bytes(8_000_000_000)));
        assert!(other.devices.iter().all(|d| d.delay == Duration::from_millis(2)));
        assert_eq!(other.devices[0].speed, own.devices[0].speed);
        // The text that is kept of it parses to the same environment.
        assert_eq!(Environment::parse(other.source()).unwrap(), other);
        for (with, says) in [
            ("A@10", "write a number and one of kbit/s"),
            ("A@speed=3", "known are a rate, memory=, delay= and turn="),
            ("A@1kbit/s", "at least 100kbit/s"),
            ("A@10Mbit/s@20Mbit/s", "has other values already"),
            ("nowhere@10Mbit/s", "neither a file"),
        ] {
            let error = Environment::open(with).unwrap_err();
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
    }

    #[test]
    fn an_environment_file_may_have_an_at_sign_in_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("at@home.toml");
        std::fs::write(&path, KNOWN[0].1).unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(Environment::open(path).unwrap().name, "A");
        assert_eq!(Environment::open(&format!("{path}@10Mbit/s")).unwrap().name, "A-10Mbit");
    }

    #[test]
    fn one_factor_scales_compute_and_links_together() {
        let a = Environment::open("A").unwrap();
        let device = &a.devices[0];
        let (link, speed) = (a.rate(device).0, a.speed(device).unwrap().0);
        assert!((link / speed - 125e6 / 7.5).abs() < 1.0);
    }
}
