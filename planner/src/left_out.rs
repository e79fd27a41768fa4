//! Why a device has no part in a plan, with numbers.
//!
//! The cause is found by asking what would be if the device were like the others in one thing: its link,
//! its kernels, or its memory. What alone would make it worth a part is the cause; of several the one that
//! would save most.

use crate::{
    cost_model::{Load, mean},
    ranked::Ranked,
    reasons::{millis, priced},
    request::Request,
    ring::{Ring, Rings},
    search::{Priced, means},
};
use galaxy_common::{
    Bytes, ClusterProfile, DeviceName, DeviceProfile, Kernel, Layout, LinkProfile, LinkRate, Plan,
    Strategy,
};
use std::time::Duration;

/// The share by which traits of devices may differ that count as alike: these devices have the same
/// reason.
const ALIKE: f64 = 0.05;
/// How many times as long kernels or links must take to count as slower.
const SLOWER: f64 = 1.05;

/// What tells one device from another.
#[derive(Clone, PartialEq, Debug)]
struct Traits {
    /// How many times as long its kernels take as the fastest of the plan.
    slower: f64,
    memory: Bytes,
    /// Its best link with a device of the plan; none where none was measured.
    link: Option<LinkProfile>,
}

impl Traits {
    fn alike(&self, other: &Self) -> bool {
        let near = |a: f64, b: f64| (a - b).abs() <= ALIKE * a.max(b);
        let links = match (&self.link, &other.link) {
            (Some(a), Some(b)) => near(a.busy_rate, b.busy_rate) && near(a.latency, b.latency),
            (a, b) => a.is_none() && b.is_none(),
        };
        near(self.slower, other.slower)
            && near(self.memory.0 as f64, other.memory.0 as f64)
            && links
    }

    fn speed(&self) -> String {
        match self.slower > SLOWER {
            true => format!(
                "its kernels are {:.1} times slower than the fastest in the plan",
                self.slower
            ),
            false => "it is as fast as the fastest in the plan".to_owned(),
        }
    }
}

/// A thing in which a device may be like the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Thing {
    Link,
    Kernels,
    Memory,
}

/// Devices that have no part, and why.
pub(crate) fn left_out(rings: &mut Rings<'_>, first: &Ranked) -> Vec<(DeviceName, String)> {
    let plan = &first.candidate.plan;
    let request = rings.request;
    let chosen = priced(rings, plan);
    let mut out: Vec<(DeviceName, String)> = Vec::new();
    let mut known: Vec<(Traits, String)> = Vec::new();
    for (place, offer) in request.offers.iter().enumerate() {
        if plan.ring.iter().any(|d| d.name == offer.name) {
            continue;
        }
        let traits = traits(rings, plan, place);
        let strategy = request.allowed.strategy;
        let why = match (&chosen, known.iter().find(|(of, _)| of.alike(&traits))) {
            _ if strategy != Strategy::Auto => {
                format!("strategy {strategy} gives it no part; {}", traits.speed())
            }
            (_, Some((_, why))) => why.clone(),
            (Some(chosen), None) => of_ring(rings, chosen, place, &traits),
            (None, None) => of_others(rings, plan, &traits),
        };
        known.push((traits, why.clone()));
        out.push((offer.name.clone(), why));
    }
    out
}

/// Nanoseconds that a device takes for the larger products of a layer, all rows of a request's programs
/// together.
fn layer(rings: &Rings<'_>, name: &DeviceName) -> Option<f64> {
    let (request, spec) = (rings.request, rings.request.spec);
    let rows = mean(&rings.loads, &Load::rows);
    let device = request.profile.device(name).ok()?;
    let inner = f64::from(spec.intermediate);
    let width = f64::from((spec.heads + 2 * spec.kv_heads) * spec.head_width);
    Some(
        device.nanos(Kernel::Qkv, &[rows, width])
            + device.nanos(Kernel::Up, &[rows, inner])
            + device.nanos(Kernel::Down, &[rows, inner]),
    )
}

fn traits(rings: &Rings<'_>, plan: &Plan, place: usize) -> Traits {
    let offer = &rings.request.offers[place];
    let fastest = plan.ring.iter().filter_map(|d| layer(rings, &d.name));
    let fastest = fastest.fold(f64::INFINITY, f64::min);
    let slower = layer(rings, &offer.name).map_or(1.0, |own| own / fastest);
    let mine = |l: &&LinkProfile| {
        let other = if l.from == offer.name { &l.to } else { &l.from };
        (l.from == offer.name || l.to == offer.name)
            && l.link == plan.link
            && plan.ring.iter().any(|d| d.name == *other)
    };
    let links = rings.request.profile.links.iter().filter(mine);
    let link = links.max_by(|a, b| a.busy_rate.total_cmp(&b.busy_rate)).cloned();
    Traits { slower, memory: offer.budget, link }
}

/// The fastest link between devices of a plan; of a plan of one device, between any two others.
fn fastest(request: &Request<'_>, plan: &[&DeviceName], own: &DeviceName) -> Option<LinkProfile> {
    let alone = plan.len() < 2;
    let inside = |name: &DeviceName| if alone { name != own } else { plan.contains(&name) };
    let allowed = |l: &&LinkProfile| {
        request.allowed.links.contains(&l.link) && inside(&l.from) && inside(&l.to)
    };
    let links = request.profile.links.iter().filter(allowed);
    links.max_by(|a, b| a.busy_rate.total_cmp(&b.busy_rate)).cloned()
}

/// Why a ring is better without a device.
fn of_ring(rings: &mut Rings<'_>, chosen: &Priced, place: usize, traits: &Traits) -> String {
    let speed = traits.speed();
    if traits.link.is_none() {
        return format!("no link between it and the plan's devices was measured; {speed}");
    }
    let offer = &rings.request.offers[place];
    let cost = with(rings, chosen, place);
    if let Some(cost) = cost.filter(|&cost| cost <= chosen.cost) {
        return format!(
            "it would save {} at most by the closed form, and the simulator does not see that; {speed}",
            millis(chosen.cost - cost)
        );
    }
    let things = [Thing::Link, Thing::Kernels, Thing::Memory];
    let like = |thing| Some((like_others(rings, chosen, place, thing)?, thing));
    let mut causes: Vec<(f64, Thing)> = things.into_iter().filter_map(like).collect();
    causes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let adds = match cost {
        Some(cost) => format!(
            "it would add {} ({:.0}%)",
            millis(cost - chosen.cost),
            100.0 * (cost - chosen.cost) / chosen.cost
        ),
        None => format!("it grants {}, and no plan with it fits", offer.budget),
    };
    match causes.first() {
        // Which of them would be enough?
        Some(&(least, thing)) if least < chosen.cost => {
            let saved = 100.0 * (chosen.cost - least) / chosen.cost;
            let cause = cause(rings.request, chosen, place, traits, thing);
            format!("{adds} because of {cause} it would save {saved:.1}%")
        }
        Some(&(least, thing)) if cost.is_none_or(|cost| least < cost * (1.0 - ALIKE)) => {
            let cause = cause(rings.request, chosen, place, traits, thing);
            let left = millis(least - chosen.cost);
            format!(
                "{adds}, mostly because of {cause} it would still add {left}: one more device is one more way for every tile"
            )
        }
        _ => format!("{adds}: one more device is one more way for every tile, and {speed}"),
    }
}

/// The cause as the beginning of a sentence, up to what would be without it.
fn cause(
    request: &Request<'_>,
    chosen: &Priced,
    place: usize,
    traits: &Traits,
    thing: Thing,
) -> String {
    let link = |l: &LinkProfile| {
        let rate = LinkRate::measured(l.busy_rate as u64, Duration::from_secs(1));
        let rate = rate.map_or_else(|| "no rate".to_owned(), |rate| rate.to_string());
        format!("{rate}, {}", millis(l.latency))
    };
    match thing {
        Thing::Link => {
            let own = traits.link.as_ref().map_or_else(String::new, link);
            match fastest(request, &names(request, chosen), &request.offers[place].name) {
                Some(best) => {
                    format!(
                        "its link ({own}; the fastest of the others has {}): with such a link",
                        link(&best)
                    )
                }
                None => format!("its link ({own}): with a link that costs nothing"),
            }
        }
        Thing::Kernels => {
            format!(
                "its kernels, {:.1} times slower than the fastest in the plan: with such kernels",
                traits.slower
            )
        }
        Thing::Memory => {
            let most = most_memory(request, chosen);
            format!(
                "its memory ({}; the plan's devices grant up to {most}): with as much",
                traits.memory
            )
        }
    }
}

fn names<'a>(request: &Request<'a>, chosen: &Priced) -> Vec<&'a DeviceName> {
    chosen.members.iter().map(|&m| &request.offers[m].name).collect()
}

fn most_memory(request: &Request<'_>, chosen: &Priced) -> Bytes {
    chosen.members.iter().map(|&m| request.offers[m].budget).max().unwrap_or(Bytes(0))
}

/// What the ring costs with one more device: carried as it is, where that is possible, else in the best
/// way; `None` where none fits.
fn with(rings: &mut Rings<'_>, chosen: &Priced, place: usize) -> Option<f64> {
    let mut best: Option<f64> = None;
    let members = [&chosen.members[..], &[place]].concat();
    let mut ways = means(rings.request, members.len());
    if ways.contains(&chosen.means) {
        ways = vec![chosen.means];
    }
    for means in ways {
        let ring = Ring { members: &members, means, by_rows: chosen.by_rows };
        let limit = best.unwrap_or(f64::INFINITY);
        best = rings.price_below(ring, limit).or(best);
    }
    best
}

/// What the ring costs with a device that is like the others in one thing; none where it is so already.
fn like_others(rings: &Rings<'_>, chosen: &Priced, place: usize, thing: Thing) -> Option<f64> {
    let request = rings.request;
    let own = &request.offers[place].name;
    let members = names(request, chosen);
    let part = |name: &DeviceName| name == own || members.contains(&name);
    let links = request.profile.links.iter().filter(|l| part(&l.from) && part(&l.to));
    let mut profile = ClusterProfile {
        devices: request.profile.devices.clone(),
        links: links.cloned().collect(),
    };
    let mut offers = request.offers.to_vec();
    match thing {
        Thing::Link => {
            let best = fastest(request, &members, own);
            for link in &mut profile.links {
                if link.from == *own || link.to == *own {
                    let free = LinkProfile { latency: 0.0, busy_rate: 1e12, ..link.clone() };
                    let like = best.clone().unwrap_or(free);
                    let (from, to, of) = (link.from.clone(), link.to.clone(), link.link);
                    *link = LinkProfile { from, to, link: of, ..like };
                }
            }
        }
        Thing::Kernels => {
            let fastest = members.iter().filter_map(|&name| Some((layer(rings, name)?, name)));
            let (_, name) = fastest.min_by(|a, b| a.0.total_cmp(&b.0))?;
            let like: DeviceProfile = request.profile.device(name).ok()?.clone();
            let device = profile.devices.iter_mut().find(|device| device.device == *own)?;
            *device = DeviceProfile { device: own.clone(), ..like };
        }
        Thing::Memory => {
            let most = most_memory(request, chosen);
            if most <= offers[place].budget {
                return None;
            }
            offers[place].budget = most;
        }
    }
    let changed = Request { profile: &profile, offers: &offers, ..*request };
    let mut rings = match thing {
        Thing::Kernels => Rings::new(&changed).ok()?,
        Thing::Link | Thing::Memory => rings.again(&changed).ok()?,
    };
    with(&mut rings, chosen, place)
}

/// Why a plan of another layout is better without a device: the way to it, its memory, or its kernels.
fn of_others(rings: &Rings<'_>, plan: &Plan, traits: &Traits) -> String {
    let speed = traits.speed();
    let Some(link) = &traits.link else {
        return format!("no link between it and the plan's devices was measured; {speed}");
    };
    if plan.layout != Layout::Stages {
        return format!("the plan needs no more devices; {speed}");
    }
    let request = rings.request;
    let bytes = mean(&rings.loads, &Load::rows) * plan.wire.row(request.spec.hidden.into()) as f64;
    let way = |l: &LinkProfile| l.latency + bytes / l.busy_rate * 1e9;
    let between = plan.ring.windows(2).filter_map(|pair| {
        let link = request.profile.link(&pair[0].name, &pair[1].name, plan.link).ok()?;
        Some(way(link))
    });
    let slowest = between.fold(0.0, f64::max);
    let own = way(link);
    if slowest > 0.0 && own > slowest * SLOWER && own / slowest > traits.slower {
        return format!(
            "a way to it takes {}, and the slowest of the pipeline's {}: it saves less than that",
            millis(own),
            millis(slowest)
        );
    }
    let (fixed, each) = rings.memory.stage(request.spec, request.allowed.max_rows, 1, false);
    if traits.memory.0 < fixed + each {
        return format!(
            "it grants {}, and one layer takes {} there; {speed}",
            traits.memory,
            Bytes(fixed + each)
        );
    }
    format!(
        "the pipeline's layers are done sooner without it: a way more takes {}, and {speed}",
        millis(own)
    )
}
