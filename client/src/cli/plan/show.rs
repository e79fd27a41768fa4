//! Plans in words and as JSON.

use crate::cli::{
    milliseconds,
    table::{row, table},
};
use galaxy_common::{Bytes, Layout, Span, Strategy, Unit};
use galaxy_coord::placement::modes;
use galaxy_planner::{Planned, PlanningError, Workload};
use serde_json::{Value, json};
use std::{fmt::Write as _, time::Duration};

/// Nanoseconds of a prediction as people read them.
fn ms(nanos: f64) -> String {
    milliseconds(Duration::from_nanos(nanos.max(0.0) as u64))
}

fn span<U: Unit>(span: Span<U>) -> String {
    match span.is_empty() {
        true => "-".to_owned(),
        false => format!("{}..{}", span.start(), span.end()),
    }
}

/// A plan with its reasons, for people.
pub fn planned(planned: &Planned, workload: &Workload) -> String {
    let Planned { plan, prediction, search, .. } = planned;
    let lengths: Vec<String> = workload.lengths.iter().map(|(n, _)| n.to_string()).collect();
    let mut out = format!(
        "{}: {} predicted for a text of {} tokens\n",
        planned.what,
        ms(prediction.latency),
        lengths.join(" or ")
    );
    let _ = write!(
        out,
        "  layout {}, exchange {}, links {}, wire {}, tiles {}",
        plan.layout, plan.exchange, plan.link, plan.wire, plan.tiles
    );
    let cut = modes(plan);
    if !cut.is_empty() {
        let _ = write!(out, ", blocks {cut}");
    }
    out.push('\n');
    out += &devices(planned);
    for (name, why) in &planned.left_out {
        let _ = writeln!(out, "left out: {name}: {why}");
    }
    if let Some(second) = &planned.runner_up {
        let _ = writeln!(out, "runner-up: {}, {}: {}", second.what, ms(second.latency), second.why);
    }
    for advice in &planned.advice {
        let _ = writeln!(out, "would help: {}: {}", advice.what, ms(advice.latency));
    }
    let _ = writeln!(
        out,
        "search: {} of {} sets of devices, {} splits, {} plans simulated; the closed form says {}, the simulator {}",
        search.subsets,
        search.all_subsets,
        search.splits,
        search.simulated,
        ms(prediction.closed_form),
        ms(prediction.latency)
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

/// Who does what, and what it takes.
fn devices(planned: &Planned) -> String {
    let stages = planned.plan.layout == Layout::Stages;
    let mut rows = vec![row([
        "device",
        "layers",
        "heads",
        "columns",
        "tokens",
        "rows",
        "needs",
        "grants",
        "compute",
        "of it links",
        "waiting",
        "sent",
        "received",
    ])];
    let weights: u32 = planned.plan.ring.iter().map(|d| d.prefill.row_weight).sum();
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
        let share = f64::from(part.row_weight) / f64::from(weights.max(1));
        let mut line = vec![
            device.name.to_string(),
            layers,
            joined(&heads),
            joined(&columns),
            span(part.vocabulary),
            if stages { "all".to_owned() } else { format!("{:.0}%", share * 100.0) },
            planned.needs.get(rank).map_or(String::new(), |n| n.total().to_string()),
            device.budget.to_string(),
        ];
        if let Some(share) = planned.prediction.devices.iter().find(|s| s.name == device.name) {
            line.extend([ms(share.compute), ms(share.links), ms(share.waiting)]);
            line.extend([share.sent, share.received].map(|n| Bytes(n).to_string()));
        }
        rows.push(line);
    }
    table(&rows)
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
pub fn planned_json(planned: &Planned) -> Value {
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
        "closed_form_ms": prediction.closed_form / 1e6,
        "devices": devices.collect::<Vec<_>>(),
        "left_out": left_out.collect::<Vec<_>>(),
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
    let mut rows = vec![row(["strategy", "predicted", "against the best", "plan"])];
    for (strategy, result) in all {
        rows.push(match result {
            Ok(p) => vec![
                strategy.to_string(),
                ms(p.prediction.latency),
                format!("{:.2}", p.prediction.latency / best),
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
