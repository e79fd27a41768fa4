//! Why a plan is as it is, for people and with numbers, and what would help.

use crate::{
    cutting::RowLayers,
    ranked::Ranked,
    request::{Advice, PlanningError},
    ring::Rings,
    search::Priced,
};
use galaxy_common::{
    Bytes, Exchange, Layout, LinkProfile, LinkType, Mode, Plan, Strategy, WireType,
};

/// Nanoseconds as a text in milliseconds.
pub(crate) fn millis(nanos: f64) -> String {
    let ms = nanos * 1e-6;
    if ms < 10.0 { format!("{ms:.2} ms") } else { format!("{ms:.0} ms") }
}

/// Layers of a plan cut by rows.
fn by_rows(plan: &Plan) -> RowLayers {
    let of = |mode: &dyn Fn(&galaxy_common::Modes) -> Mode| {
        let rows = plan.modes.iter().filter(|m| mode(m) == Mode::Sequence);
        rows.map(|m| m.layers.len()).sum()
    };
    RowLayers { attention: of(&|m| m.attention), mlp: of(&|m| m.mlp), whole: false }
}

/// What a plan is, as a phrase for people.
pub(crate) fn what(plan: &Plan) -> String {
    let reading: Vec<&str> =
        plan.ring.iter().filter(|d| d.streaming.is_some()).map(|d| d.name.as_str()).collect();
    match reading.is_empty() {
        true => cut(plan),
        false => format!("{}, weights from disk on {}", cut(plan), reading.join(", ")),
    }
}

/// How a plan is cut, as a phrase for people.
fn cut(plan: &Plan) -> String {
    let devices = plan.ring.len();
    if devices == 1 {
        return format!("everything on {}", plan.ring[0].name);
    }
    let layers = plan.modes.last().map_or(0, |m| m.layers.end());
    let rows = by_rows(plan);
    let kind = match plan.layout {
        Layout::Stages => return format!("pipeline of {devices} stages"),
        Layout::Replicated => return format!("megatron on {devices} devices"),
        Layout::Ring => match (rows.attention, rows.mlp) {
            (0, 0) => "galaxy".to_owned(),
            (a, m) if a == layers && m == layers => "sequence".to_owned(),
            (a, m) => {
                let of = |n: u32, what: &str| match n {
                    0 => None,
                    n if n == layers => Some(format!("all {what}")),
                    n => Some(format!("the {what} of {n} of {layers} layers")),
                };
                let parts: Vec<_> = of(a, "attention").into_iter().chain(of(m, "MLPs")).collect();
                format!("galaxy with {} by rows", parts.join(" and "))
            }
        },
    };
    let mut text = format!("{kind} on {devices} devices, {} tiles", plan.tiles);
    if plan.tiles == 1 {
        text = format!("{kind} on {devices} devices, without overlap");
    }
    if plan.exchange == Exchange::Direct {
        text += ", tiles straight to everyone";
    }
    match plan.wire {
        WireType::F32 => {}
        WireType::F16 => text += ", 16 bits on the wire",
        WireType::Q8 => text += ", 8 bits on the wire",
    }
    match plan.link {
        LinkType::Tls => {}
        LinkType::Plain => text += ", plain links",
        LinkType::Quic => text += ", links over QUIC",
    }
    text
}

/// Whether two plans are of different kinds: another layout, other devices, or other modes.
pub(crate) fn another(a: &Plan, b: &Plan) -> bool {
    let devices = |plan: &Plan| {
        let mut names: Vec<_> = plan.ring.iter().map(|d| d.name.clone()).collect();
        names.sort_unstable();
        names
    };
    let modes = |plan: &Plan| {
        let rows = by_rows(plan);
        (rows.attention > 0, rows.mlp > 0)
    };
    // Alone, a device does everything, whatever the layout.
    let alone = a.ring.len() == 1 && b.ring.len() == 1;
    devices(a) != devices(b) || (!alone && (a.layout != b.layout || modes(a) != modes(b)))
}

/// Why the second plan is slower than the first, for people.
pub(crate) fn why(first: &Ranked, other: &Ranked) -> String {
    let slower = other.prediction.latency - first.prediction.latency;
    let percent = 100.0 * slower / first.prediction.latency.max(1.0);
    let busiest = |r: &Ranked| {
        let most = r.prediction.devices.iter().max_by(|a, b| a.compute.total_cmp(&b.compute));
        most.map_or_else(String::new, |d| {
            format!("{} computes {} and waits {}", d.name, millis(d.compute), millis(d.waiting))
        })
    };
    let sent = |r: &Ranked| Bytes(r.prediction.devices.iter().map(|d| d.sent).max().unwrap_or(0));
    format!(
        "{} or {percent:.0}% slower: {}, and one device sends {} at most; in the plan taken {}, and {}",
        millis(slower),
        busiest(other),
        sent(other),
        busiest(first),
        sent(first),
    )
}

/// The ring of a plan as the search knows it; none for other layouts.
pub(crate) fn priced(rings: &mut Rings<'_>, plan: &Plan) -> Option<Priced> {
    let offers = rings.request.offers;
    let place = |name: &galaxy_common::DeviceName| offers.iter().position(|o| o.name == *name);
    let members = plan.ring.iter().map(|d| place(&d.name)).collect::<Option<Vec<usize>>>()?;
    let means = crate::cutting::Transport {
        tiles: plan.tiles,
        exchange: plan.exchange,
        wire: plan.wire,
        link: plan.link,
    };
    let mut by_rows = by_rows(plan);
    // Their units are texts.
    let weights: u32 = plan.ring.iter().map(|device| device.prefill.row_weight).sum();
    by_rows.whole = by_rows.attention > 0 && rings.texts > 1 && weights == rings.texts;
    let mut found = Priced { members, means, by_rows, cost: 0.0 };
    if plan.layout != Layout::Ring {
        return None;
    }
    found.cost = rings.price(found.ring())?;
    Some(found)
}

/// How many devices advice is given for, at most.
const ADVISED: usize = 8;
/// Advice is given where it leaves less than this share of the latency.
const WORTH: f64 = 0.98;

/// What would make the plan faster: memory on a device, or a cable twice as fast. The best three, by
/// the closed form of the plan's own devices and of all, scaled by what the simulator says.
pub(crate) fn advice(rings: &mut Rings<'_>, first: &Ranked) -> Vec<Advice> {
    let request = rings.request;
    let plan = &first.candidate.plan;
    let Some(chosen) = priced(rings, plan).or_else(|| everyone(rings)) else { return Vec::new() };
    let layers = request.spec.layers;
    let mut ways: Vec<Priced> = vec![chosen.clone()];
    let all: Vec<usize> = (0..request.offers.len()).collect();
    for members in [chosen.members.clone(), all] {
        if members.len() > 1 {
            for by_rows in [
                RowLayers::default(),
                RowLayers { attention: 0, mlp: layers, whole: false },
                RowLayers { attention: layers, mlp: layers, whole: rings.texts > 1 },
            ] {
                ways.push(Priced { members: members.clone(), by_rows, ..chosen.clone() });
            }
        }
    }
    let now = ways.iter().filter_map(|w| rings.price(w.ring())).fold(f64::INFINITY, f64::min);
    let scale = first.prediction.latency / now;
    let mut advice: Vec<Advice> = Vec::new();
    let mut tried = |what: String, changed: &crate::Request<'_>| {
        let Ok(mut again) = rings.again(changed) else { return false };
        let cost = ways.iter().filter_map(|w| again.price(w.ring())).fold(f64::INFINITY, f64::min);
        let helps = cost < now * WORTH;
        if helps {
            advice.push(Advice { what, latency: cost * scale });
        }
        helps
    };
    // With memory without end everywhere: where that does not help, no device's memory does.
    let mut offers = request.offers.to_vec();
    offers.iter_mut().for_each(|o| o.budget = Bytes(u64::MAX >> 8));
    let endless = crate::Request { offers: &offers, ..*request };
    let binds = rings.again(&endless).is_ok_and(|mut again| {
        let costs = ways.iter().filter_map(|w| again.price(w.ring()));
        costs.fold(f64::INFINITY, f64::min) < now * WORTH
    });
    // Those of the plan first.
    let others = (0..request.offers.len()).filter(|place| !chosen.members.contains(place));
    let advised = chosen.members.iter().copied().chain(others);
    for place in advised.take(if binds { ADVISED } else { 0 }) {
        let name = &request.offers[place].name;
        for percent in [25, 50, 100] {
            let mut offers = request.offers.to_vec();
            let more = Bytes(offers[place].budget.0 / 100 * percent);
            offers[place].budget = offers[place].budget + more;
            if tried(
                format!("{more} more memory on {name}"),
                &crate::Request { offers: &offers, ..*request },
            ) {
                break;
            }
        }
    }
    // The slowest cable of the plan, at both ends.
    let mut cables: Vec<(f64, usize)> = chosen
        .members
        .iter()
        .map(|&m| {
            let name = &request.offers[m].name;
            let mine = |l: &&LinkProfile| {
                l.link == chosen.means.link && (l.from == *name || l.to == *name)
            };
            let of = request.profile.links.iter().filter(mine);
            (of.map(|l| l.busy_rate).fold(0.0, f64::max), m)
        })
        .collect();
    cables.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let twice = |names: &[&galaxy_common::DeviceName]| {
        let mut profile = request.profile.clone();
        for link in &mut profile.links {
            if names.contains(&&link.from) || names.contains(&&link.to) {
                link.rate *= 2.0;
                link.busy_rate *= 2.0;
            }
        }
        profile
    };
    if let (Some(first), Some(last), true) =
        (cables.first(), cables.last(), chosen.members.len() > 1)
    {
        let alike = last.0 <= first.0 * 1.1;
        let names: Vec<_> = if alike {
            chosen.members.iter().map(|&m| &request.offers[m].name).collect()
        } else {
            vec![&request.offers[first.1].name]
        };
        let profile = twice(&names);
        let what = if alike {
            "links twice as fast".to_owned()
        } else {
            format!("a link twice as fast on {}", names[0])
        };
        tried(what, &crate::Request { profile: &profile, ..*request });
    }
    advice.sort_by(|a, b| a.latency.total_cmp(&b.latency));
    advice.truncate(3);
    advice
}

/// A ring of all devices.
fn everyone(rings: &mut Rings<'_>) -> Option<Priced> {
    let members: Vec<usize> = (0..rings.request.offers.len()).collect();
    let means = *crate::search::means(rings.request, members.len()).last()?;
    let mut all = Priced { members, means, by_rows: RowLayers::default(), cost: 0.0 };
    all.cost = rings.price(all.ring())?;
    Some(all)
}

/// The error of `auto` when nothing fits: what is missing to the plan that needs the least, all
/// devices together; or what else went wrong.
pub(crate) fn nothing_fits(rings: &Rings<'_>, error: Option<PlanningError>) -> PlanningError {
    let request = rings.request;
    let granted: u64 = request.offers.iter().map(|o| o.budget.0).sum();
    let whole = rings.memory.whole(request.spec);
    let short = whole.saturating_sub(granted);
    match error {
        Some(PlanningError::Memory { missing, device, what, .. }) => PlanningError::Memory {
            strategy: Strategy::Auto,
            device,
            missing: Bytes(missing.0.max(short).max(1)),
            what: format!("the weights take {} in all; {what}", Bytes(whole)),
        },
        Some(error) => error,
        None => PlanningError::Memory {
            strategy: Strategy::Auto,
            device: None,
            missing: Bytes(short.max(1)),
            what: format!(
                "the weights take {} in all, and {} together: raise memory or add devices",
                Bytes(whole),
                match request.offers {
                    [only] => format!(
                        "{} grants {}, not enough to work with them",
                        only.name,
                        Bytes(granted)
                    ),
                    all => format!("{} devices grant {}", all.len(), Bytes(granted)),
                },
            ),
        },
    }
}
