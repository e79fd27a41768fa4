//! Sections that have pages of their own: overlap, links, weights from disk, generation. Here are their main
//! figures.

use super::{
    Records, Shown,
    cells::{Cells, bound, fact, latency, measured, of_bound, over, percent, shown},
};
use crate::report::{Table, figure};
use galaxy_common::Spread;

/// The names of the records that these sections show, one for each.
pub(super) const OVERLAP: &str = "overlap";
pub(super) const TRANSPORT: &str = "transport";
pub(super) const MEMORY: &str = "memory";
pub(super) const DECODE: &str = "decode";
/// The name of the value that is the share of communication behind compute.
const HIDDEN: &str = "hidden";
/// The name of the value that is the time of a request with its weights on disk, in ms.
const RUN: &str = "run_ms";
/// Numbers of PIPELOAD's loaders, each with its speedup over PipeSwitch and its share of PipeSwitch's memory.
type Loaders = [(u32, f64, f64); 3];
/// The figures that the paper reports (Hermes, Tables II and III), by model.
const HERMES: [(&str, Loaders); 2] = [
    ("bert-large", [(2, 1.93, 0.271), (4, 3.22, 0.392), (6, 4.24, 0.551)]),
    ("vit-large", [(2, 1.73, 0.097), (4, 2.77, 0.176), (6, 3.64, 0.254)]),
];
/// The paper's delay over preloading, and memory saved, as the mean of five models (Demand Layering,
/// \u{a7}IX).
const LAYERING: &str = "the paper: near zero with 88.4% less";

pub(super) fn overlap(records: &Records) -> Shown {
    let cells = records.cells(OVERLAP);
    let mut table = Table::new(
        "Tiles",
        &[
            "environment",
            "model",
            "tiles",
            "latency, ms: median (range)",
            "bound, ms",
            "of the bound",
            "communication hidden",
        ],
    );
    let mut best: Option<(f64, String)> = None;
    for (name, cell) in cells.all() {
        let hidden = measured(Some(cell), HIDDEN).map_or(f64::NAN, |spread| spread.median);
        if hidden.is_finite() && best.as_ref().is_none_or(|(most, _)| hidden > *most) {
            best = Some((hidden, format!("{}, {} tiles", name.at(), name.variant)));
        }
        table.row([
            name.environment.to_owned(),
            name.model.to_owned(),
            name.variant.to_owned(),
            latency(Some(cell)),
            shown(bound(Some(cell)), 0),
            percent(of_bound(Some(cell))),
            percent(hidden),
        ]);
    }
    let say =
        |(most, at)| format!("at best {} of the communication is hidden ({at})", percent(most));
    Shown { lines: best.map(say).into_iter().collect(), tables: vec![table], ..Shown::default() }
}

pub(super) fn transport(records: &Records) -> Shown {
    let cells = records.cells(TRANSPORT);
    let of = |link: &str, kind: &str, value: &str| {
        let cell = cells.named(&format!("{link}/{kind}"));
        measured(cell, value).map_or(f64::NAN, |spread| spread.median)
    };
    let kinds = ["plain", "tls", "quic"];
    let mut lines = Vec::new();
    for (link, value, digits, what) in [
        ("1 Gbit/s", "trip_us", 0, "a round trip of 16 bytes, us"),
        ("unshaped", "cpu_s_per_gb", 2, "processor time of a GB, both ends, s"),
        ("1 Gbit/s", "cpu_s_per_gb", 2, "processor time of a GB, both ends, s"),
        ("125 Mbit/s, 5 ms, 1% lost", "rate_mbit", 1, "Mbit/s that arrive"),
    ] {
        let found = kinds.map(|kind| of(link, kind, value));
        if found.iter().any(|value| value.is_finite()) {
            let [plain, tls, quic] = found.map(|value| shown(value, digits));
            lines.push(format!("{what} ({link}): TCP {plain}, with TLS {tls}, QUIC {quic}"));
        }
    }
    Shown { lines, ..Shown::default() }
}

pub(super) fn memory(records: &Records) -> Shown {
    let cells = records.cells(MEMORY);
    let mut lines = Vec::new();
    for (model, paper) in HERMES {
        lines.extend(loaders(cells, model, paper));
    }
    for model in ["bert-large", "vit-large"] {
        lines.extend(layering(cells, model));
    }
    Shown { lines, ..Shown::default() }
}

/// Compares more loaders with PipeSwitch, on a disk that gives the same limited rate to each loader.
fn loaders(cells: Cells<'_>, model: &str, paper: Loaders) -> Option<String> {
    let named = |policy: &str| cells.named(&format!("each-loader/{model}/{policy}"));
    let base = named("pipeswitch");
    let mut parts = Vec::new();
    for (count, faster, memory) in paper {
        let cell = named(&format!("pipeload-{count}"));
        let Ok(ratio) = over(base, cell, RUN, 1.0) else { continue };
        let share = fact(cell, "weights_mb") / fact(cell, "model_mb");
        parts.push(format!(
            "{count}: {} times with {} (the paper: {faster:.2} with {})",
            shown(ratio.median, 2),
            percent(share),
            percent(memory),
        ));
    }
    let say = || {
        format!(
            "{model}, a disk that gives as little to each loader, over `pipeswitch` and its memory, loaders: {}",
            parts.join("; ")
        )
    };
    (!parts.is_empty()).then(say)
}

/// Compares `auto` with all weights in memory, where computing takes longer than reading, or where it comes
/// nearest to that.
fn layering(cells: Cells<'_>, model: &str) -> Option<String> {
    ["long-text", "disk"].into_iter().find_map(|disk| {
        let named = |policy: &str| cells.named(&format!("{disk}/{model}/{policy}"));
        let auto = named("auto");
        let ratio = over(auto, named("preload"), RUN, 1.0).ok()?;
        let less = 1.0 - fact(auto, "weights_mb") / fact(auto, "model_mb");
        Some(format!(
            "{model}, {}, `auto` over all weights in memory: {:+.1}% with {} less in memory ({LAYERING})",
            if disk == "disk" { "the disk as it is" } else { "a long text" },
            (ratio.median - 1.0) * 100.0,
            percent(less),
        ))
    })
}

pub(super) fn decode(records: &Records) -> Shown {
    let cells = records.cells(DECODE);
    let mut table = Table::new(
        "Tokens per second: median (range)",
        &["devices", "model", "galaxy", "over one device", "over llama.cpp"],
    );
    let (mut over_one, mut over_peer) = (Vec::new(), Vec::new());
    for at in cells.places() {
        let [ours, one, peer] =
            ["galaxy", "one device", "llama.cpp"].map(|name| cells.find(at, name));
        let Some(ours) = ours else { continue };
        let faster =
            |other| over(Some(ours), other, "rate", 1.0).map_or(f64::NAN, |ratio| ratio.median);
        let (by_one, by_peer) = (faster(one), faster(peer));
        over_one.push(by_one);
        over_peer.push(by_peer);
        let rate = at.rate.map_or(String::new(), |rate| format!(", {rate} Mbit/s"));
        table.row([
            format!("{}{rate}", at.environment),
            at.model.to_owned(),
            figure(ours, "rate"),
            shown(by_one, 2),
            shown(by_peer, 2),
        ]);
    }
    let mut lines = Vec::new();
    for (what, ratios) in [("the best single device", over_one), ("llama.cpp over RPC", over_peer)]
    {
        let all = Spread::of(&ratios);
        if all.n > 0 {
            lines.push(format!("tokens per second over {what}: {all:.2}, of {} cells", all.n));
        }
    }
    Shown { lines, tables: vec![table], ..Shown::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        evaluation::fixtures::{of, record},
        record::{LATENCY, Record, Verdict},
    };
    use std::collections::BTreeMap;

    fn add(record: &mut Record, key: &str, values: &[(&str, f64)], facts: &[(&str, f64)]) {
        let owned = |pairs: &[(&str, f64)]| -> BTreeMap<String, f64> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        let cell = record.cell(key, &[]);
        cell.facts = owned(facts);
        cell.add(owned(values), Verdict::Valid);
    }

    #[test]
    fn loader_speed_and_memory_are_shown_with_the_figures_of_the_papers() {
        let mut found = record(MEMORY, &[]);
        let facts = [("weights_mb", 25.0), ("model_mb", 100.0)];
        add(&mut found, "each-loader/bert-large/pipeswitch", &[(RUN, 200.0)], &[]);
        add(&mut found, "each-loader/bert-large/pipeload-2", &[(RUN, 100.0)], &facts);
        add(&mut found, "disk/bert-large/preload", &[(RUN, 100.0)], &[]);
        add(&mut found, "disk/bert-large/auto", &[(RUN, 101.0)], &facts);
        let lines = memory(&of(found)).lines;
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].ends_with("2: 2.00 times with 25.0% (the paper: 1.93 with 27.1%)"));
        assert!(lines[1].contains("+1.0% with 75.0% less in memory"), "{}", lines[1]);
    }

    #[test]
    fn decode_rates_are_compared_with_one_device_and_llama_cpp() {
        let mut found = record(DECODE, &[]);
        for (variant, rate) in [("one device", 2.0), ("galaxy", 3.0), ("llama.cpp", 1.0)] {
            add(&mut found, &format!("two-125Mbit/llama-1b/{variant}"), &[("rate", rate)], &[]);
        }
        let shown = decode(&of(found));
        assert_eq!(
            shown.lines,
            [
                "tokens per second over the best single device: 1.50, of 1 cells",
                "tokens per second over llama.cpp over RPC: 3.00, of 1 cells"
            ]
        );
        assert!(shown.tables[0].to_string().contains("two, 125 Mbit/s"));
    }

    #[test]
    fn summaries_show_the_best_overlap_and_the_cost_of_each_transport() {
        let mut found = record(OVERLAP, &[]);
        add(&mut found, "pair/bert/1", &[(LATENCY, 10.0), (HIDDEN, -0.1)], &[]);
        add(&mut found, "pair/bert/4", &[(LATENCY, 8.0), (HIDDEN, 0.9)], &[]);
        let best = ["at best 90.0% of the communication is hidden (pair, bert, 4 tiles)"];
        assert_eq!(overlap(&of(found)).lines, best);
        let mut found = record(TRANSPORT, &[]);
        add(&mut found, "1 Gbit/s/tls", &[("trip_us", 40.0)], &[]);
        let trip = "a round trip of 16 bytes, us (1 Gbit/s): TCP -, with TLS 40, QUIC -";
        assert_eq!(transport(&of(found)).lines, [trip]);
    }

    #[test]
    fn summaries_without_records_have_no_lines() {
        let none = Records::default();
        for shown in [overlap(&none), transport(&none), memory(&none), decode(&none)] {
            assert!(shown.lines.is_empty());
        }
    }
}
