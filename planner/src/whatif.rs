//! What if: changes to what devices grant and do, and to links, as people write them.
//!
//! ```text
//! pi-2.memory=2GB        pi-2 grants so much
//! pi-2.speed=x2          its kernels take half as long
//! pi-1->pi-2.rate=1Gbit/s     the links between two devices, one way
//! pi-1->pi-2.rate=x2
//! pi-2.rate=x2           all links of a device, both ways; a rate as well
//! -pi-3                  without pi-3
//! ```

use crate::request::Offer;
use galaxy_common::{Bytes, ClusterProfile, DeviceName, LinkRate};
use std::str::FromStr;

/// A change of devices or links.
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
    /// This rate, whatever was measured.
    Of(LinkRate),
}

/// A text that is no change, or a change of a device that is not there.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WhatIfError {
    /// The text is of no known form.
    #[error(
        "{text:?} is no change: write DEVICE.memory=2GB, DEVICE.speed=x2, DEVICE.rate=1Gbit/s or x2 for all its links, FROM->TO.rate=1Gbit/s for one, or -DEVICE to leave it out"
    )]
    Text {
        /// What was given.
        text: String,
    },
    /// A name or value in the text is not valid.
    #[error("{text:?}: {why}")]
    Value {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// There is no device of this name.
    #[error("there is no device {name}: there are {known}")]
    Device {
        /// The name that was given.
        name: DeviceName,
        /// The names of the devices that there are.
        known: String,
    },
}

/// The factor of a text like "x2", above zero.
fn times(text: &str) -> Result<f64, String> {
    let factor = text.strip_prefix('x').and_then(|n| n.parse().ok());
    let factor = factor.filter(|f: &f64| f.is_finite() && *f > 0.0);
    factor.ok_or_else(|| format!("{text:?} is no factor: write x and a number above zero, like x2"))
}

fn rate(text: &str) -> Result<Rate, String> {
    match text.starts_with('x') {
        true => times(text).map(Rate::Times),
        false => text.parse().map(Rate::Of).map_err(|e: galaxy_common::RateError| e.to_string()),
    }
}

fn device(name: &str) -> Result<DeviceName, String> {
    DeviceName::new(name.trim()).map_err(|e| e.to_string())
}

/// The change that a text of the right form is; `None` where the form is another.
fn change(text: &str) -> Option<Result<WhatIf, String>> {
    if let Some(name) = text.strip_prefix('-') {
        return Some(device(name).map(WhatIf::Without));
    }
    let (what, value) = text.split_once('=')?;
    let (who, field) = what.trim().rsplit_once('.')?;
    let value = value.trim();
    let memory = || value.parse().map_err(|e: galaxy_common::UnitError| e.to_string());
    Some(match (field, who.split_once("->")) {
        ("rate", Some((from, to))) => {
            device(from).and_then(|from| Ok(WhatIf::Rate(from, Some(device(to)?), rate(value)?)))
        }
        ("rate", None) => device(who).and_then(|who| Ok(WhatIf::Rate(who, None, rate(value)?))),
        ("memory", None) => device(who).and_then(|who| Ok(WhatIf::Memory(who, memory()?))),
        ("speed", None) => device(who).and_then(|who| Ok(WhatIf::Speed(who, times(value)?))),
        _ => return None,
    })
}

impl FromStr for WhatIf {
    type Err = WhatIfError;
    fn from_str(text: &str) -> Result<Self, WhatIfError> {
        let whole = || text.to_owned();
        let change = change(text.trim()).ok_or_else(|| WhatIfError::Text { text: whole() })?;
        change.map_err(|why| WhatIfError::Value { text: whole(), why })
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
                            Rate::Of(rate) => rate.bits_per_second() / 8.0 / link.rate,
                        };
                        // Kernels take from the link the share that they took.
                        link.rate *= factor;
                        link.busy_rate *= factor;
                        link.alone *= factor;
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
    fn what_if_changes_are_parsed_and_applied() {
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
    fn malformed_what_if_changes_and_unknown_devices_are_refused() {
        let forms = "write DEVICE.memory=2GB, DEVICE.speed=x2";
        for (text, word) in [
            ("", forms),
            ("d1", forms),
            ("d1.memory", forms),
            ("d1.threads=2", forms),
            ("d1->d2.memory=1GB", forms),
            ("d1.memory=2", "not a size"),
            ("d1.memory=much", "\"much\" is not a size"),
            ("d1.speed=2", "like x2"),
            ("d1.speed=x0", "like x2"),
            ("d1.speed=x-1", "like x2"),
            ("d1.rate=xNaN", "like x2"),
            ("d0->d1.rate=fast", "not a link rate"),
            ("d0->d1.rate=0Mbit/s", "not a link rate"),
            ("-", "name"),
            ("D 1.memory=2GB", "\"D 1\" is not a name"),
        ] {
            let error = text.parse::<WhatIf>().expect_err(text).to_string();
            assert!(error.contains(word) && error.contains(&format!("{text:?}")), "{error}");
        }
        let mut question = Question::new(&testing::bert(2, 256), testing::devices(2, 30.0, 1e8));
        let before = question.offers.clone();
        for text in ["-d7", "d7.memory=2GB", "d7.speed=x2", "d7.rate=x2", "d0->d7.rate=x2"] {
            let change: WhatIf = text.parse().unwrap();
            let error = change.apply(&mut question.offers, &mut question.profile).unwrap_err();
            assert_eq!(error.to_string(), "there is no device d7: there are d0, d1", "{text}");
        }
        assert_eq!(question.offers, before);
    }
}
