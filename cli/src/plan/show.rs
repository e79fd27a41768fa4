//! Plans as text for people, and as JSON.

use crate::{
    milliseconds,
    table::{row, table},
};
use galaxy_common::{
    Activations, Bytes, DeviceName, DevicePlan, Layout, LinkProfile, Span, Strategy, Unit,
    WeightFormat,
};
use galaxy_coord::placement::modes;
use galaxy_graph::operators::OperatorGraph;
use galaxy_model::{Formats, ModelSpec};
use galaxy_planner::{Planned, PlanningError, Workload};
use serde_json::{Value, json};
use std::{fmt::Write as _, time::Duration};

/// Nanoseconds of a prediction as milliseconds, for people.
fn ms(nanos: f64) -> String {
    milliseconds(Duration::from_nanos(nanos.max(0.0) as u64))
}

fn span<U: Unit>(span: Span<U>) -> String {
    match span.is_empty() {
        true => "-".to_owned(),
        false => format!("{}..{}", span.start(), span.end()),
    }
}

/// The workload as a phrase: `count` texts at once, with their lengths.
fn texts(workload: &Workload, count: u32) -> String {
    let lengths: Vec<String> = workload.lengths.iter().map(|(n, _)| n.to_string()).collect();
    match (&lengths[..], count) {
        ([one], 1) => format!("a text of {one} tokens"),
        ([one], many) => format!("{many} texts of {one} tokens at once"),
        (all, 1) => format!("texts of {} tokens, in the mean", all.join(", ")),
        (all, many) => format!("{many} texts at once, of {} tokens, in the mean", all.join(", ")),
    }
}

/// The two ends of a link: from the first device to the second.
type Pair<'a> = (&'a DeviceName, &'a DeviceName);

/// A plan with its reasons, for people.
pub fn planned(
    planned: &Planned,
    (spec, formats): (&ModelSpec, &Formats),
    (workload, decode_steps): (&Workload, &[(u32, f64)]),
    unlinked: &[Pair<'_>],
) -> String {
    let Planned { plan, prediction, search, .. } = planned;
    let predicted = ms(prediction.latency);
    // Where tokens are generated, texts come one by one.
    let count = if prediction.token > 0.0 { 1 } else { workload.texts };
    let mut out = format!("{}: {predicted} predicted for {}", planned.what, texts(workload, count));
    if count > 1 {
        let _ = write!(out, ", {:.1} texts/s", f64::from(count) * 1e9 / prediction.latency);
    }
    if prediction.token > 0.0 {
        let (made, rate) = (workload.generated, 1e9 / prediction.token);
        let _ = write!(out, " and {made} tokens made for each, {rate:.1} tokens/s");
    }
    out.push('\n');
    let together: Vec<String> = decode_steps
        .iter()
        .map(|(sequences, step)| {
            let rate = f64::from(*sequences) * 1e9 / step;
            format!("{sequences} sequences together {rate:.1} tokens/s ({} a step)", ms(*step))
        })
        .collect();
    if !together.is_empty() {
        let _ = writeln!(out, "{}", together.join(", "));
    }
    if plan.activations != Activations::default() {
        let _ = writeln!(out, "activations {}", plan.activations);
    }
    if plan.ring.len() > 1 {
        let _ = write!(
            out,
            "layout {}, exchange {}, links {}, wire {}, tiles {}",
            plan.layout, plan.exchange, plan.link, plan.wire, plan.tiles
        );
        let cut = modes(plan);
        if !cut.is_empty() {
            let _ = write!(out, ", blocks {cut}");
        }
        out.push('\n');
    }
    let graph = OperatorGraph::of(spec);
    let parts = parts(planned, (&graph, formats));
    let _ = write!(out, "\n{parts}\n{}\n", times(planned));
    out += &smaller(planned, (&graph, formats));
    if let Some(table) = reading(planned, (spec, formats)) {
        let _ = writeln!(out, "{table}");
    }
    for (why, names) in grouped(&planned.left_out) {
        let _ = writeln!(out, "left out: {}: {why}", listed(&names));
    }
    for (from, to) in unlinked {
        let _ = writeln!(
            out,
            "not measured: the link from {from} to {to}: can {from} reach {to}? `galaxy profile` tries again"
        );
    }
    if let Some(second) = &planned.runner_up {
        let _ = writeln!(out, "runner-up: {}, {}: {}", second.what, ms(second.latency), second.why);
    }
    for advice in &planned.advice {
        let less = 100.0 * (1.0 - advice.latency / prediction.latency);
        let _ = writeln!(
            out,
            "would help: {}: {} instead of {predicted}, {less:.0}% less",
            advice.what,
            ms(advice.latency)
        );
    }
    let _ = writeln!(
        out,
        "search: {} of {} sets of devices, {} splits by the closed form ({} for this one), {} plans simulated",
        search.subsets,
        // The planner counts no further.
        match search.all_subsets {
            u64::MAX => "more than 10^19".to_owned(),
            all => all.to_string(),
        },
        search.splits,
        ms(prediction.closed_form),
        search.simulated,
    );
    if search.gap > 0.0 {
        let _ = writeln!(
            out,
            "what was not looked at is at most {:.1}% faster by the closed form",
            search.gap * 100.0
        );
    }
    out
}

/// A sentence on links between devices of the plan that share a medium; empty if none do.
pub fn shared(planned: &Planned, links: &[LinkProfile]) -> String {
    let ring = &planned.plan.ring;
    let named = |name: &DeviceName| ring.iter().any(|device| device.name == *name);
    let used = |link: &&LinkProfile| {
        link.link == planned.plan.link && named(&link.from) && named(&link.to)
    };
    match links.iter().filter(used).filter(|link| link.shares_medium()).count() {
        0 => String::new(),
        count => format!(
            "links share a medium: {count} of those between these devices are faster alone than beside others, \
             and the prediction counts on the rates beside others\n"
        ),
    }
}

/// Devices grouped by why they were left out, in the order of the first of each group.
fn grouped(left_out: &[(DeviceName, String)]) -> Vec<(&str, Vec<&str>)> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for (name, why) in left_out {
        match groups.iter_mut().find(|(other, _)| other == why) {
            Some((_, names)) => names.push(name.as_str()),
            None => groups.push((why, vec![name.as_str()])),
        }
    }
    groups
}

/// The first names of a list, and how many more there are.
fn listed(names: &[&str]) -> String {
    const READ: usize = 6;
    match names.len() {
        0..=READ => names.join(", "),
        all => format!("{} and {} more", names[..READ].join(", "), all - READ),
    }
}

/// Bytes of the matrices that a device holds, by their formats; the largest first.
fn weights(
    device: &DevicePlan,
    (graph, formats): (&OperatorGraph, &Formats),
) -> Vec<(WeightFormat, u64)> {
    let mut all: Vec<(WeightFormat, u64)> = Vec::new();
    let holds = device.holds();
    for (_, product) in graph.shared() {
        for run in product.runs(formats, &graph.slices(product, &holds)) {
            match all.iter_mut().find(|(format, _)| *format == run.format) {
                Some((_, bytes)) => *bytes += run.bytes(),
                None => all.push((run.format, run.bytes())),
            }
        }
    }
    all.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    all.retain(|(_, bytes)| *bytes > 0);
    all
}

/// A sentence on what weights would take if they were rounded as they are read; empty where some are quantised already,
/// or nothing would be saved.
fn smaller(planned: &Planned, (graph, formats): (&OperatorGraph, &Formats)) -> String {
    let all = |formats: &Formats| -> u64 {
        let ring = planned.plan.ring.iter();
        ring.flat_map(|device| weights(device, (graph, formats))).map(|(_, bytes)| bytes).sum()
    };
    let few = |(format, _): &(WeightFormat, u64)| format.block().is_some();
    if planned.plan.ring.iter().flat_map(|d| weights(d, (graph, formats))).any(|of| few(&of)) {
        return String::new();
    }
    let [eight, four] = [WeightFormat::Q8_0, WeightFormat::Q4_0]
        .map(|format| Bytes(all(&Formats::all(format).with_activations(formats.activations()))));
    let now = Bytes(all(formats));
    if eight >= now {
        return String::new();
    }
    format!(
        "weights take {now}: rounded they would take about {eight} (weights_format = \"q8\") or {four} (\"q4\")\n"
    )
}

/// A table of what each device computes, and of the memory for it.
fn parts(planned: &Planned, of: (&OperatorGraph, &Formats)) -> String {
    let stages = planned.plan.layout == Layout::Stages;
    let head = [
        "device",
        "layers",
        "heads",
        "columns",
        "rows",
        "vocabulary",
        "weights",
        "needs",
        "grants",
    ];
    let mut rows = vec![row(head)];
    let all_rows: u32 = planned.plan.ring.iter().map(|d| d.prefill.row_weight).sum();
    for (rank, device) in planned.plan.ring.iter().enumerate() {
        let part = &device.prefill;
        let held: Vec<_> =
            part.blocks.iter().filter(|b| !b.heads.is_empty() || !b.columns.is_empty()).collect();
        let layers = match (held.first(), held.last()) {
            (Some(first), Some(last)) => format!("{}..{}", first.layers.start(), last.layers.end()),
            _ => "-".to_owned(),
        };
        // Layers may be cut differently: then all that it ever computes.
        let heads: Vec<String> = distinct(held.iter().map(|b| span(b.heads)));
        let columns: Vec<String> = distinct(held.iter().map(|b| span(b.columns)));
        let share = f64::from(part.row_weight) / f64::from(all_rows.max(1));
        rows.push(vec![
            device.name.to_string(),
            layers,
            joined(&heads),
            joined(&columns),
            if stages { "all".to_owned() } else { format!("{:.0}%", share * 100.0) },
            span(part.vocabulary),
            joined(&weights(device, of).iter().map(in_words).collect::<Vec<_>>()),
            planned.needs.get(rank).map_or(String::new(), |n| n.total().to_string()),
            device.budget.to_string(),
        ]);
    }
    // Many models have no language head.
    if rows.iter().skip(1).all(|row| row[5] == "-") {
        rows.iter_mut().for_each(|row| drop(row.remove(5)));
    }
    table(&rows)
}

/// A table of where each device's time goes, and of the bytes that it sends and receives.
fn times(planned: &Planned) -> String {
    let mut rows =
        vec![row(["device", "computes", "of it for links", "waits", "sends", "receives"])];
    for share in &planned.prediction.devices {
        let mut line = vec![share.name.to_string()];
        line.extend([share.compute, share.links, share.waiting].map(ms));
        line.extend([share.sent, share.received].map(|n| Bytes(n).to_string()));
        rows.push(line);
    }
    table(&rows)
}

/// A table of what devices read from disk; none if none reads.
fn reading(planned: &Planned, (spec, formats): (&ModelSpec, &Formats)) -> Option<String> {
    let head = ["device", "weights that stay", "buffer", "read each time", "loaders", "stalls"];
    let mut rows = vec![row(head)];
    for (device, share) in planned.plan.ring.iter().zip(&planned.prediction.devices) {
        let Some(streaming) = &device.streaming else { continue };
        let (read, kept) = galaxy_planner::stream::read_and_kept(spec, formats, device);
        rows.push(vec![
            device.name.to_string(),
            kept.to_string(),
            streaming.buffer.to_string(),
            read.to_string(),
            streaming.loaders.to_string(),
            ms(share.stalled),
        ]);
    }
    (rows.len() > 1).then(|| table(&rows))
}

fn in_words((format, bytes): &(WeightFormat, u64)) -> String {
    format!("{} {format}", Bytes(*bytes))
}

fn distinct(items: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = Vec::new();
    items.for_each(|item| {
        if !seen.contains(&item) {
            seen.push(item);
        }
    });
    seen
}

fn joined(items: &[String]) -> String {
    if items.is_empty() { "-".to_owned() } else { items.join(", ") }
}

/// A plan with its reasons, as JSON; times in milliseconds.
pub fn planned_json(
    planned: &Planned,
    decode_steps: &[(u32, f64)],
    unlinked: &[Pair<'_>],
) -> Value {
    let Planned { prediction, search, .. } = planned;
    let devices = planned.plan.ring.iter().enumerate().map(|(rank, device)| {
        let share = prediction.devices.iter().find(|s| s.name == device.name);
        let needs = planned.needs.get(rank);
        json!({
            "device": device.name,
            "needed_bytes": needs.map(|n| n.total().0),
            "weight_bytes": needs.map(|n| n.weights.0),
            "budget_bytes": device.budget.0,
            "compute_ms": share.map(|s| s.compute / 1e6),
            "links_ms": share.map(|s| s.links / 1e6),
            "waiting_ms": share.map(|s| s.waiting / 1e6),
            "stalled_ms": share.map(|s| s.stalled / 1e6),
            "streaming": device.streaming.as_ref().map(|streaming| json!({
                "buffer_bytes": streaming.buffer.0, "loaders": streaming.loaders,
            })),
            "bytes_sent": share.map(|s| s.sent),
            "bytes_received": share.map(|s| s.received),
        })
    });
    let left_out = planned.left_out.iter().map(|(name, why)| json!({"device": name, "why": why}));
    let advice = planned.advice.iter();
    let advice = advice.map(|a| json!({"what": a.what, "predicted_ms": a.latency / 1e6}));
    json!({
        "what": planned.what,
        "predicted_ms": prediction.latency / 1e6,
        "token_ms": prediction.token / 1e6,
        "decode_steps": decode_steps.iter().map(|(sequences, step)| json!({
            "sequences": sequences, "step_ms": step / 1e6,
        })).collect::<Vec<_>>(),
        "closed_form_ms": prediction.closed_form / 1e6,
        "devices": devices.collect::<Vec<_>>(),
        "left_out": left_out.collect::<Vec<_>>(),
        "links_not_measured": unlinked.iter().map(|(from, to)| json!({"from": from, "to": to})).collect::<Vec<_>>(),
        "runner_up": planned.runner_up.as_ref().map(|r| json!({
            "what": r.what, "predicted_ms": r.latency / 1e6, "why": r.why, "plan": r.plan,
        })),
        "advice": advice.collect::<Vec<_>>(),
        "search": {
            "subsets": search.subsets, "all_subsets": search.all_subsets, "splits": search.splits,
            "simulated": search.simulated, "gap": search.gap,
        },
        "plan": planned.plan,
    })
}

type Compared = [(Strategy, Result<Planned, PlanningError>)];

/// Every strategy, for people.
pub fn compared(all: &Compared) -> String {
    let best = all.iter().filter_map(|(_, r)| r.as_ref().ok()).map(|p| p.prediction.latency);
    let best = best.fold(f64::INFINITY, f64::min);
    let mut rows = vec![row(["strategy", "predicted", "slower by", "plan"])];
    for (strategy, result) in all {
        rows.push(match result {
            Ok(p) => vec![
                strategy.to_string(),
                ms(p.prediction.latency),
                format!("{:.0}%", 100.0 * (p.prediction.latency / best - 1.0)),
                p.what.clone(),
            ],
            Err(why) => vec![strategy.to_string(), "-".into(), "-".into(), why.to_string()],
        });
    }
    table(&rows)
}

/// Every strategy, as JSON.
pub fn compared_json(all: &Compared) -> Value {
    let one = |(strategy, result): &(Strategy, Result<Planned, PlanningError>)| match result {
        Ok(p) => json!({
            "strategy": strategy, "predicted_ms": p.prediction.latency / 1e6, "what": p.what,
        }),
        Err(why) => json!({"strategy": strategy, "why_not": why.to_string()}),
    };
    Value::Array(all.iter().map(one).collect())
}
