//! Changes to a cluster that are tried on paper: `--what-if`.

use galaxy_client::LinkRate;
use galaxy_common::{Bytes, ClusterProfile};
use galaxy_planner::Offer;

const FORMS: &str = "write DEVICE.memory=2GB, DEVICE.speed=x2, FROM->TO.rate=1Gbit/s, DEVICE.rate=1Gbit/s for all its links, or -DEVICE to leave it out";

/// Makes one change.
pub fn apply(
    text: &str,
    offers: &mut Vec<Offer>,
    profile: &mut ClusterProfile,
) -> Result<(), String> {
    if let Some(name) = text.strip_prefix('-') {
        known(name, offers)?;
        offers.retain(|offer| offer.name.as_str() != name);
        return Ok(());
    }
    let form = || format!("{text:?} is no change: {FORMS}");
    let (left, value) = text.split_once('=').ok_or_else(form)?;
    let (who, what) = left.rsplit_once('.').ok_or_else(form)?;
    match what {
        "memory" => {
            known(who, offers)?;
            let memory: Bytes = value.parse().map_err(|e| format!("{text:?}: {e}"))?;
            let mine = offers.iter_mut().filter(|offer| offer.name.as_str() == who);
            mine.for_each(|offer| offer.budget = memory);
        }
        "speed" => {
            known(who, offers)?;
            let factor: Option<f64> = value.strip_prefix('x').and_then(|n| n.parse().ok());
            let factor = factor.filter(|f| f.is_finite() && *f > 0.0);
            let factor =
                factor.ok_or_else(|| format!("{text:?}: write by which it is faster, like x2"))?;
            let mine = profile.devices.iter_mut().filter(|d| d.device.as_str() == who);
            mine.for_each(|device| *device = device.scaled(1.0 / factor));
        }
        "rate" => {
            let rate: LinkRate = value.parse().map_err(|e| format!("{text:?}: {e}"))?;
            let bytes = rate.bits_per_second() / 8.0;
            let ends = who.split_once("->");
            let (from, to) = ends.unwrap_or((who, who));
            known(from, offers)?;
            known(to, offers)?;
            let meant = |from_is: bool, to_is: bool| match ends {
                Some(_) => from_is && to_is,
                None => from_is || to_is,
            };
            for link in &mut profile.links {
                if meant(link.from.as_str() == from, link.to.as_str() == to) {
                    // Kernels take from the link the share that they took.
                    link.busy_rate *= bytes / link.rate;
                    link.rate = bytes;
                }
            }
        }
        _ => return Err(form()),
    }
    Ok(())
}

fn known(name: &str, offers: &[Offer]) -> Result<(), String> {
    if offers.iter().any(|offer| offer.name.as_str() == name) {
        return Ok(());
    }
    let names: Vec<&str> = offers.iter().map(|offer| offer.name.as_str()).collect();
    Err(format!("there is no device {name:?}: known are {}", names.join(" ")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_common::{DeviceName, LinkType};
    use galaxy_model::shape::Shape;
    use galaxy_planner::synthetic::{self, SyntheticDevice};

    fn cluster() -> (Vec<Offer>, ClusterProfile) {
        let device = |name: &str| SyntheticDevice {
            name: DeviceName::new(name).unwrap(),
            gflops: 10.0,
            memory_rate: 4.0,
            memory: Bytes(1_000_000_000),
            threads: 1,
            link_rate: 1e7,
            latency: 1e5,
        };
        let devices = [device("a"), device("b")];
        let spec = Shape::bert(2, 64, 4).spec().unwrap();
        let offer = |d: &SyntheticDevice| Offer {
            name: d.name.clone(),
            budget: d.memory,
            threads: d.threads,
        };
        let offers = devices.iter().map(offer).collect();
        (offers, synthetic::profile(&spec, "s", 4, &devices))
    }

    #[test]
    fn changes_are_made_where_they_are_meant() {
        let (mut offers, mut profile) = cluster();
        let before = profile.clone();
        apply("b.memory=2GB", &mut offers, &mut profile).unwrap();
        assert_eq!(offers[1].budget, Bytes(2_000_000_000));
        apply("a.speed=x2", &mut offers, &mut profile).unwrap();
        let first = |p: &ClusterProfile| p.devices[0].tables[0].nanos[0];
        assert_eq!(first(&profile), first(&before) / 2.0);
        assert_eq!(profile.devices[1], before.devices[1]);
        apply("a->b.rate=160Mbit/s", &mut offers, &mut profile).unwrap();
        let rate = |from: &str, to: &str| {
            let name = |n: &str| DeviceName::new(n).unwrap();
            profile.link(&name(from), &name(to), LinkType::Tls).unwrap().busy_rate
        };
        assert_eq!((rate("a", "b"), rate("b", "a")), (2e7, 1e7));
        apply("-a", &mut offers, &mut profile).unwrap();
        assert_eq!(offers.len(), 1);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let (mut offers, mut profile) = cluster();
        for (text, word) in [
            ("b", "write DEVICE.memory"),
            ("b.memory", "write DEVICE.memory"),
            ("b.colour=red", "write DEVICE.memory"),
            ("c.memory=2GB", "known are a b"),
            ("b.memory=much", "not a size"),
            ("b.speed=2", "like x2"),
            ("b.speed=x0", "like x2"),
            ("a->c.rate=1Gbit/s", "no device \"c\""),
            ("a->b.rate=fast", "not a link rate"),
            ("-c", "no device"),
        ] {
            let error = apply(text, &mut offers, &mut profile).expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
