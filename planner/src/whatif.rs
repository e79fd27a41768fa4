//! What if: changes to what devices grant and do, and to links, as people write them.
//!
//! ```text
//! pi-2.memory=2GB        pi-2 grants so much
//! pi-2.speed=x2          its kernels take half as long
//! pi-1->pi-2.rate=1Gbit/s     the links between two devices, one way
//! pi-1->pi-2.rate=x2
//! pi-2.rate=x2           all links of a device, both ways
//! -pi-3                  without pi-3
//! ```

use crate::request::Offer;
use galaxy_common::{Bytes, ClusterProfile, DeviceName};
use std::str::FromStr;

/// One change.
#[derive(Clone, PartialEq, Debug)]
pub enum WhatIf {
    /// A device grants this much.
    Memory(DeviceName, Bytes),
    /// A device's kernels are so many times as fast.
    Speed(DeviceName, f64),
    /// The links from one device to another, or all of one device, carry this.
    Rate(DeviceName, Option<DeviceName>, Rate),
    /// A device is not there.
    Without(DeviceName),
}

/// What links carry.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rate {
    /// So many times what was measured.
    Times(f64),
    /// Bytes per second.
    Bytes(f64),
}

/// Text that is no change, or one of a device that is not there.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WhatIfError {
    /// Not understood.
    #[error(
        "{text:?} is no change: write NAME.memory=2GB, NAME.speed=x2, NAME.rate=x2, A->B.rate=1Gbit/s or -NAME"
    )]
    Text {
        /// What was given.
        text: String,
    },
    /// No such device.
    #[error("there is no device {name}: there are {known}")]
    Device {
        /// Which.
        name: DeviceName,
        /// Those that are.
        known: String,
    },
}

/// "x2", above zero.
fn times(text: &str) -> Option<f64> {
    let factor: f64 = text.strip_prefix('x')?.parse().ok()?;
    (factor.is_finite() && factor > 0.0).then_some(factor)
}

/// "100Mbit/s" as bytes per second.
fn rate(text: &str) -> Option<Rate> {
    if let Some(factor) = times(text) {
        return Some(Rate::Times(factor));
    }
    let units = [("Gbit/s", 1e9), ("Mbit/s", 1e6), ("Kbit/s", 1e3)];
    units.iter().find_map(|(unit, bits)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        (number.is_finite() && number > 0.0).then_some(Rate::Bytes(number * bits / 8.0))
    })
}

impl FromStr for WhatIf {
    type Err = WhatIfError;
    fn from_str(text: &str) -> Result<Self, WhatIfError> {
        let parsed = || {
            let text = text.trim();
            let device = |name: &str| DeviceName::new(name.trim()).ok();
            if let Some(name) = text.strip_prefix('-') {
                return Some(Self::Without(device(name)?));
            }
            let (what, value) = text.split_once('=')?;
            let (who, field) = what.trim().rsplit_once('.')?;
            let value = value.trim();
            match (field, who.split_once("->")) {
                ("rate", Some((from, to))) => {
                    Some(Self::Rate(device(from)?, Some(device(to)?), rate(value)?))
                }
                ("rate", None) => Some(Self::Rate(device(who)?, None, rate(value)?)),
                ("memory", None) => Some(Self::Memory(device(who)?, value.parse().ok()?)),
                ("speed", None) => Some(Self::Speed(device(who)?, times(value)?)),
                _ => None,
            }
        };
        parsed().ok_or_else(|| WhatIfError::Text { text: text.to_owned() })
    }
}

impl WhatIf {
    /// Changes what is offered and measured.
    ///
    /// # Errors
    /// When a device that is named is not offered.
    pub fn apply(
        &self,
        offers: &mut Vec<Offer>,
        profile: &mut ClusterProfile,
    ) -> Result<(), WhatIfError> {
        let names: Vec<String> = offers.iter().map(|o| o.name.to_string()).collect();
        let place = |name: &DeviceName| {
            let missing = || WhatIfError::Device { name: name.clone(), known: names.join(", ") };
            offers.iter().position(|o| o.name == *name).ok_or_else(missing)
        };
        match self {
            Self::Memory(name, memory) => {
                let at = place(name)?;
                offers[at].budget = *memory;
            }
            Self::Speed(name, factor) => {
                place(name)?;
                let of = profile.devices.iter_mut().filter(|d| d.device == *name);
                of.for_each(|device| *device = device.scaled(1.0 / factor));
            }
            Self::Rate(name, to, rate) => {
                place(name)?;
                if let Some(to) = to {
                    place(to)?;
                }
                for link in &mut profile.links {
                    let meant = match to {
                        Some(to) => link.from == *name && link.to == *to,
                        None => link.from == *name || link.to == *name,
                    };
                    if meant {
                        let factor = match *rate {
                            Rate::Times(factor) => factor,
                            Rate::Bytes(bytes) => bytes / link.rate,
                        };
                        link.rate *= factor;
                        link.busy_rate *= factor;
                    }
                }
            }
            Self::Without(name) => {
                let at = place(name)?;
                offers.remove(at);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::{self, Question};

    #[test]
    fn changes_are_read_and_made() {
        let devices = testing::devices(3, 30.0, 1e8);
        let mut question = Question::new(&testing::bert(2, 256), devices);
        let before = question.profile.clone();
        for text in ["d1.memory=2GB", "d1.speed=x2", "d0->d1.rate=80Mbit/s", "d2.rate=x2", "-d0"] {
            let change: WhatIf = text.parse().unwrap();
            change.apply(&mut question.offers, &mut question.profile).unwrap();
        }
        assert_eq!(question.offers.len(), 2);
        assert_eq!(question.offers[0].budget, Bytes(2_000_000_000));
        let time = |p: &ClusterProfile| p.devices[1].tables[0].nanos[0];
        assert_eq!(time(&question.profile) * 2.0, time(&before));
        let link = |p: &ClusterProfile, from: &str, to: &str| {
            let of =
                |l: &&galaxy_common::LinkProfile| l.from.as_str() == from && l.to.as_str() == to;
            p.links.iter().find(of).unwrap().busy_rate
        };
        assert!((link(&question.profile, "d0", "d1") - 1e7).abs() < 1.0);
        assert_eq!(link(&question.profile, "d1", "d0"), link(&before, "d1", "d0"));
        assert_eq!(link(&question.profile, "d1", "d2"), 2.0 * link(&before, "d1", "d2"));
    }

    #[test]
    fn what_is_no_change_is_refused() {
        for bad in [
            "",
            "d1",
            "d1.threads=2",
            "d1.memory=2",
            "d1.speed=2",
            "d1.speed=x0",
            "-",
            "d1->d2.memory=1GB",
            "d1.rate=xNaN",
        ] {
            assert!(bad.parse::<WhatIf>().is_err(), "{bad}");
        }
        let mut question = Question::new(&testing::bert(2, 256), testing::devices(1, 30.0, 1e8));
        let change: WhatIf = "-d7".parse().unwrap();
        let error = change.apply(&mut question.offers, &mut question.profile).unwrap_err();
        assert!(error.to_string().contains("there are d0"), "{error}");
    }
}
