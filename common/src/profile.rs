//! Profiles: what devices and links were measured to do, as curves that a planner can read.
//!
//! A profile is data from outside (a file, a device), so [`DeviceProfile::check`] and
//! [`LinkProfile::check`] stand between it and everything that computes with it.

use crate::{ids::DeviceName, plan::LinkType, units::Bytes};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Grows whenever kernels or what is measured of them change so much that old profiles mislead.
pub const PROFILE_VERSION: u32 = 2;

/// Nanoseconds that no time of a profile reaches: below this bound, sums of times stay far below what 64 bits count.
const LONGEST: f64 = 1e13;
/// The slowest rate of a link that can be used, in bytes per second.
const SLOWEST: f64 = 1e3;
/// Nanoseconds of a processor that no byte on a link costs.
const COSTLIEST: f64 = 1e6;
/// A link that is more than so many times as fast alone as beside others shares a medium with them: more than what two
/// measurements of one link differ by.
const SHARED: f64 = 1.25;

/// A kind of operation that is measured on a device. Sizes of an operation are given in the order of the axes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// The product of hidden states to queries, keys and values, rotation included; axes: rows, output columns.
    Qkv,
    /// The product of attention's output to hidden states; axes: rows, input columns.
    AttentionOutput,
    /// The product of hidden states to the intermediate columns, activation function included; axes: rows, columns
    /// (of one of gate and up).
    Up,
    /// The product of intermediate columns to hidden states; axes: rows, columns.
    Down,
    /// The product of hidden states to logits; axes: rows, columns of the vocabulary slice.
    Language,
    /// Queries of some rows over keys and values of some rows, none of them masked; axes: query
    /// rows, key rows, heads. Causal attention costs what the pairs cost that are not masked.
    Attend,
    /// Residual, bias and norm over rows of the hidden width; axes: rows.
    #[serde(rename = "join")]
    AddNorm,
    /// A norm alone; axes: rows.
    Norm,
    /// Token and position embedding; axes: rows.
    Embed,
    /// Rows of the hidden width into wire format, 32 bits; axes: rows.
    Export,
    /// The same with a staged tile added; axes: rows.
    ExportAdd,
    /// Rows of the hidden width out of wire format; axes: rows.
    Import,
}

impl Kernel {
    /// Whether it is a product that devices share by its inputs: its second axis.
    pub fn is_cut_by_inputs(self) -> bool {
        matches!(self, Self::AttentionOutput | Self::Down)
    }

    /// All kernels, in the order of their declaration.
    pub const ALL: [Self; 12] = [
        Self::Qkv,
        Self::AttentionOutput,
        Self::Up,
        Self::Down,
        Self::Language,
        Self::Attend,
        Self::AddNorm,
        Self::Norm,
        Self::Embed,
        Self::Export,
        Self::ExportAdd,
        Self::Import,
    ];
    /// The number of axes of its table.
    pub fn axes(self) -> usize {
        match self {
            Self::Attend => 3,
            Self::Qkv | Self::AttentionOutput | Self::Up | Self::Down | Self::Language => 2,
            _ => 1,
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Qkv => "qkv",
            Self::AttentionOutput => "attention output",
            Self::Up => "up",
            Self::Down => "down",
            Self::Language => "language head",
            Self::Attend => "attention",
            Self::AddNorm => "add and norm",
            Self::Norm => "norm",
            Self::Embed => "embed",
            Self::Export => "export",
            Self::ExportAdd => "export with sum",
            Self::Import => "import",
        })
    }
}

/// The most points of a grid: measurements have some hundred.
const MOST_POINTS: usize = 1 << 14;
/// The most bytes of an engine's name.
const MOST_WORDS: usize = 128;

/// Times of one kernel over a grid of sizes: linear between points; beyond the last point of an axis as between its
/// last two, below the first in proportion to the size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Table {
    /// The kernel that was measured.
    pub kernel: Kernel,
    /// Sizes along each axis, growing.
    pub axes: Vec<Vec<u32>>,
    /// Nanoseconds, the last axis fastest: as many as the product of the axes' lengths.
    pub nanos: Vec<f64>,
    /// Range of the samples behind each value over their median, in the same order.
    pub spread: Vec<f64>,
}

impl Table {
    /// Nanoseconds of an operation of these sizes; 0 where one of them is 0.
    pub fn at(&self, sizes: &[f64]) -> f64 {
        if sizes.iter().any(|&s| s <= 0.0) || sizes.len() != self.axes.len() {
            return 0.0;
        }
        self.interpolate(sizes, 0, 0).max(0.0)
    }

    fn interpolate(&self, sizes: &[f64], axis: usize, base: usize) -> f64 {
        let Some(points) = self.axes.get(axis) else {
            return self.nanos.get(base).copied().unwrap_or(0.0);
        };
        let value = |i: usize| self.interpolate(sizes, axis + 1, base * points.len() + i);
        let (x, first) = (sizes[axis], f64::from(points[0]));
        if x <= first || points.len() == 1 {
            return value(0) * (x / first);
        }
        let above = points.iter().position(|&p| f64::from(p) >= x).unwrap_or(points.len() - 1);
        let (low, high) = (f64::from(points[above - 1]), f64::from(points[above]));
        let (from, to) = (value(above - 1), value(above));
        from + (to - from) * (x - low) / (high - low)
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.axes.len() != self.kernel.axes() {
            return Err("has another number of axes than its kernel");
        }
        if self.axes.iter().any(|a| a.is_empty() || a[0] == 0 || !a.is_sorted_by(|x, y| x < y)) {
            return Err("has an axis whose sizes do not grow from above zero");
        }
        let points = self.axes.iter().try_fold(1usize, |n, a| n.checked_mul(a.len()));
        if points != Some(self.nanos.len()) || self.nanos.len() != self.spread.len() {
            return Err("has another number of values than its axes have points");
        }
        if self.nanos.len() > MOST_POINTS {
            return Err("has more points than any measurement");
        }
        if !self.nanos.iter().all(|t| *t > 0.0 && *t < LONGEST) {
            return Err("has a time that no operation takes");
        }
        if !self.spread.iter().all(|s| s.is_finite() && *s >= 0.0) {
            return Err("has a spread that is not a number");
        }
        Ok(())
    }
}

/// What a device was measured to do with models of one shape.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// The [`PROFILE_VERSION`] of the program that measured.
    pub version: u32,
    /// The device that was measured.
    pub device: DeviceName,
    /// The shape that it was measured for: equal for models of equal sizes and number types.
    pub shape: String,
    /// The number of kernel threads.
    pub threads: u16,
    /// The engine, with the instructions of its kernels: "cpu avx512".
    pub engine: String,
    /// The time of the measurement, in seconds of the Unix epoch.
    pub measured: u64,
    /// One table for each kernel that the shape has.
    pub tables: Vec<Table>,
    /// Nanoseconds between two operations of the compute lane of which the second waits for another lane: waking up,
    /// counting.
    pub wake: f64,
    /// Bytes that the device grants, as it says itself; 0 for no limit of its own.
    pub memory: Bytes,
    /// Bytes per second that one reader gets from its disk, read directly; 0 where that was not measured.
    pub disk: f64,
    /// Bytes per second that several readers get together; 0 where that was not measured.
    pub disk_shared: f64,
}

/// Why a profile cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// A profile of another version.
    #[error(
        "the profile of {device} is of version {found}, and this program uses {PROFILE_VERSION}: run `galaxy profile`"
    )]
    Version {
        /// The device whose profile it is.
        device: DeviceName,
        /// The version of the profile.
        found: u32,
    },
    /// A profile for another shape of model.
    #[error(
        "the profile of {device} is of models of shape {found}, and this one has {wanted}: run `galaxy profile`"
    )]
    Shape {
        /// The device whose profile it is.
        device: DeviceName,
        /// The shape of the profile.
        found: String,
        /// The shape of the model.
        wanted: String,
    },
    /// A device's profile with values that no measurement gives.
    #[error(
        "the profile of {device}: {what} {why}: measure it again with `galaxy profile --fresh`"
    )]
    Device {
        /// The device whose profile it is.
        device: DeviceName,
        /// The part of the profile that is wrong.
        what: String,
        /// What is wrong with it, for people.
        why: &'static str,
    },
    /// A link's profile with a value that no measurement gives.
    #[error(
        "the profile of the link from {from} to {to}: {what} is {value}, which no link has: measure it again with `galaxy profile --fresh`"
    )]
    Link {
        /// The device that sends.
        from: DeviceName,
        /// The device that receives.
        to: DeviceName,
        /// The part of the profile that is wrong.
        what: &'static str,
        /// The value of that part.
        value: f64,
    },
    /// A device without a profile.
    #[error("there is no profile of {device}: run `galaxy profile`")]
    NoDevice {
        /// The device that has no profile.
        device: DeviceName,
    },
    /// A pair of devices without a profile of their link.
    #[error(
        "there is no profile of the link from {from} to {to}: can {from} reach {to}? Run `galaxy profile`"
    )]
    NoLink {
        /// The device that would send.
        from: DeviceName,
        /// The device that would receive.
        to: DeviceName,
    },
}

impl DeviceProfile {
    /// The table of a kernel; none where it was not measured.
    pub fn table(&self, kernel: Kernel) -> Option<&Table> {
        self.tables.iter().find(|t| t.kernel == kernel)
    }

    /// Nanoseconds of an operation of these sizes; 0 for what was not measured.
    pub fn nanos(&self, kernel: Kernel, sizes: &[f64]) -> f64 {
        self.table(kernel).map_or(0.0, |table| table.at(sizes))
    }

    /// The largest spread of all points, with its kernel; none without tables.
    pub fn noisiest(&self) -> Option<(Kernel, f64)> {
        let worst = |t: &Table| (t.kernel, t.spread.iter().copied().fold(0.0, f64::max));
        self.tables.iter().map(worst).max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The profile of a device like this one whose kernels take `factor` times as long.
    pub fn scaled(&self, factor: f64) -> Self {
        let mut scaled = self.clone();
        scaled.tables.iter_mut().flat_map(|t| &mut t.nanos).for_each(|t| *t *= factor);
        scaled
    }

    /// The profile of a device like this one whose disk takes `factor` times as long; a disk that was not measured
    /// stays so.
    #[must_use]
    pub fn with_disk_scaled(mut self, factor: f64) -> Self {
        self.disk /= factor;
        self.disk_shared /= factor;
        self
    }

    /// Checks that the profile can be used for models of `shape`.
    ///
    /// # Errors
    /// What is wrong with it: another version or shape, zeros, negative or endless times.
    pub fn check(&self, shape: &str) -> Result<(), ProfileError> {
        let device = self.device.clone();
        if self.version != PROFILE_VERSION {
            return Err(ProfileError::Version { device, found: self.version });
        }
        if self.shape != shape {
            let (found, wanted) = (self.shape.clone(), shape.to_owned());
            return Err(ProfileError::Shape { device, found, wanted });
        }
        let wrong =
            |what: String, why| Err(ProfileError::Device { device: device.clone(), what, why });
        if self.engine.len() > MOST_WORDS {
            return wrong("the name of the engine".into(), "is longer than any");
        }
        for table in &self.tables {
            if let Err(why) = table.check() {
                return wrong(format!("the table of {}", table.kernel), why);
            }
        }
        for kernel in Kernel::ALL {
            let times = self.tables.iter().filter(|t| t.kernel == kernel).count();
            if times == 0 && kernel != Kernel::Language {
                return wrong(format!("the table of {kernel}"), "is missing");
            }
            if times > 1 {
                return wrong(format!("the table of {kernel}"), "stands there twice");
            }
        }
        if !(0.0..LONGEST).contains(&self.wake) {
            return wrong("the time between operations".into(), "is not a number of nanoseconds");
        }
        if ![self.disk, self.disk_shared].iter().all(|rate| rate.is_finite() && *rate >= 0.0) {
            return wrong("the rate of the disk".into(), "is not a number of bytes");
        }
        Ok(())
    }
}

/// What a link from one device to another was measured to do.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LinkProfile {
    /// The [`PROFILE_VERSION`] of the program that measured.
    pub version: u32,
    /// The device that sends.
    pub from: DeviceName,
    /// The device that receives.
    pub to: DeviceName,
    /// The transport of the link.
    pub link: LinkType,
    /// From the end of a send to its arrival, nanoseconds: half the least round trip of a small
    /// frame.
    pub latency: f64,
    /// Bytes of tiles per second, while the kernels of both devices rest, and `beside` other links are measured at
    /// the same time.
    pub rate: f64,
    /// The rate while the kernels of both devices work, in bytes per second.
    pub busy_rate: f64,
    /// How many links between other devices were measured at the same time.
    #[serde(default)]
    pub beside: u32,
    /// The rate while no other link was measured and kernels rested, in bytes per second; 0 where that was not
    /// measured.
    #[serde(default)]
    pub alone: f64,
    /// By how many nanoseconds a byte sent delays the kernels of `from`.
    pub send_cost: f64,
    /// By how many nanoseconds a byte received delays the kernels of `to`.
    pub receive_cost: f64,
    /// Range of the rates that were measured over their median.
    pub spread: f64,
    /// The time of the measurement, in seconds of the Unix epoch.
    pub measured: u64,
}

impl LinkProfile {
    /// Whether the link has less for itself when other links work: as on one radio channel, or one cable.
    pub fn shares_medium(&self) -> bool {
        self.alone > SHARED * self.rate
    }

    /// Checks that the profile can be used.
    ///
    /// # Errors
    /// The first value that is wrong with it.
    pub fn check(&self) -> Result<(), ProfileError> {
        if self.version != PROFILE_VERSION {
            let (device, found) = (self.from.clone(), self.version);
            return Err(ProfileError::Version { device, found });
        }
        let rate = |v: f64| v.is_finite() && v >= SLOWEST;
        let below = |most: f64, v: f64| (0.0..most).contains(&v);
        let fields = [
            ("the rate", self.rate, rate(self.rate)),
            ("the rate under compute", self.busy_rate, rate(self.busy_rate)),
            ("the rate alone", self.alone, self.alone == 0.0 || rate(self.alone)),
            ("the latency", self.latency, below(LONGEST, self.latency)),
            ("the cost of sending", self.send_cost, below(COSTLIEST, self.send_cost)),
            ("the cost of receiving", self.receive_cost, below(COSTLIEST, self.receive_cost)),
            // Shown to people only, but no number has no form in a file.
            ("the spread", self.spread, below(f64::INFINITY, self.spread)),
        ];
        match fields.into_iter().find(|(_, _, good)| !good) {
            None => Ok(()),
            Some((what, value, _)) => {
                let (from, to) = (self.from.clone(), self.to.clone());
                Err(ProfileError::Link { from, to, what, value })
            }
        }
    }
}

/// Profiles of the devices of a cluster and of the links between them.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ClusterProfile {
    /// The profiles of the devices.
    pub devices: Vec<DeviceProfile>,
    /// The profiles of the links: one for each ordered pair and transport that was measured.
    pub links: Vec<LinkProfile>,
}

impl ClusterProfile {
    /// The profile of a device.
    ///
    /// # Errors
    /// [`ProfileError::NoDevice`].
    pub fn device(&self, name: &DeviceName) -> Result<&DeviceProfile, ProfileError> {
        let missing = || ProfileError::NoDevice { device: name.clone() };
        self.devices.iter().find(|d| d.device == *name).ok_or_else(missing)
    }

    /// The profile of a link.
    ///
    /// # Errors
    /// [`ProfileError::NoLink`].
    pub fn link(
        &self,
        from: &DeviceName,
        to: &DeviceName,
        link: LinkType,
    ) -> Result<&LinkProfile, ProfileError> {
        let missing = || ProfileError::NoLink { from: from.clone(), to: to.clone() };
        let found = self.links.iter().find(|l| l.from == *from && l.to == *to && l.link == link);
        found.ok_or_else(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        Table {
            kernel: Kernel::Up,
            axes: vec![vec![1, 10], vec![100, 200]],
            nanos: vec![10.0, 20.0, 40.0, 80.0],
            spread: vec![0.0; 4],
        }
    }

    #[test]
    fn a_table_is_linear_between_points_and_beyond_them() {
        let t = table();
        assert_eq!(t.at(&[1.0, 100.0]), 10.0);
        assert_eq!(t.at(&[10.0, 150.0]), 60.0);
        assert_eq!(t.at(&[5.5, 100.0]), 25.0);
        assert_eq!(t.at(&[10.0, 300.0]), 120.0);
        assert_eq!(t.at(&[10.0, 50.0]), 20.0, "in proportion below the first");
        assert_eq!(t.at(&[0.0, 100.0]), 0.0);
        assert_eq!(t.at(&[1.0]), 0.0, "sizes of another kernel");
    }

    #[test]
    fn impossible_values_in_a_profile_table_are_refused() {
        assert_eq!(table().check(), Ok(()));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut t = table();
            t.nanos[2] = bad;
            assert!(t.check().is_err(), "{bad}");
        }
        let axes = |axes: Vec<Vec<u32>>| Table { axes, ..table() };
        assert!(axes(vec![vec![1, 10]]).check().is_err());
        assert!(axes(vec![vec![10, 1], vec![100, 200]]).check().is_err());
        assert!(axes(vec![vec![0, 1], vec![100, 200]]).check().is_err());
        assert!(axes(vec![vec![1, 2, 3], vec![100, 200]]).check().is_err());
    }
}
