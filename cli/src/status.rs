//! `galaxy status` and `galaxy drain`.

use super::{
    Connection,
    failure::Failure,
    json, milliseconds, print, progress,
    table::{row, table},
};
use clap::Args;
use galaxy_client::{ClusterStatus, DeviceStatus, SequencesStatus};
use galaxy_common::Bytes;
use std::{fmt::Write as _, ops::Range};

/// The column of the vocabulary slice in a row of the table.
const TOKENS: usize = 4;
/// No machine has so much memory: a budget from this on means that there is no limit.
const UNLIMITED: Bytes = Bytes(1 << 50);

/// Arguments of `galaxy status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Arguments of `galaxy drain`.
#[derive(Args, Debug)]
pub struct DrainArgs {
    /// Let the coordinator take requests again.
    #[arg(long)]
    off: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Runs `galaxy status`.
pub async fn status(args: StatusArgs) -> Result<(), Failure> {
    let client = args.connection.open().await?;
    let status = progress::watch("asking the coordinator", client.status()).await?;
    if args.json { print(&json(&status)?) } else { print(&show(&status)) }
}

/// Runs `galaxy drain`.
pub async fn drain(args: DrainArgs) -> Result<(), Failure> {
    let client = args.connection.open_admin().await?;
    if args.off {
        progress::watch("asking the coordinator", client.undrain()).await?;
    } else {
        progress::watch("waiting for what is queued", client.drain()).await?;
    }
    if args.json {
        return print(&json(&serde_json::json!({ "draining": !args.off }))?);
    }
    print(if args.off { "requests are taken again\n" } else { "no more requests are taken\n" })
}

fn show(status: &ClusterStatus) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "cluster {:?} is {}", status.cluster, status.state);
    let _ = writeln!(
        out,
        "  model {}, strategy {}, epoch {}",
        status.model, status.strategy, status.epoch
    );
    if status.layout.is_empty() {
        out += "  no plan yet\n";
    } else {
        out += &plan(status);
    }
    let _ = writeln!(
        out,
        "  {} queued, {} served, {} failed",
        status.queued, status.served, status.failed
    );
    if status.context > 0 {
        out += &sequences(&status.sequences);
    }
    let _ = writeln!(
        out,
        "  coordinator {} (commit {}, protocol {})",
        status.version, status.commit, status.protocol
    );
    out + &devices(&status.devices)
}

/// The lines on sequences and the KV cache.
fn sequences(of: &SequencesStatus) -> String {
    let mut out = format!(
        "  sequences: {} running, {} waiting, at most {} in a step; {} tokens generated\n  KV cache: {} of {} blocks free",
        of.running, of.waiting, of.most, of.tokens, of.free, of.blocks
    );
    if of.prefixes > 0 {
        let _ = write!(out, "; {} prompts began with {} rows of it", of.prefixes, of.prefix_rows);
    }
    if of.drafted > 0 {
        let _ = write!(out, "; {} of {} drafted tokens were accepted", of.accepted, of.drafted);
    }
    if of.evicted > 0 {
        let _ = write!(out, "; {} evictions: raise kv_cache_tokens", of.evicted);
    }
    out + "\n"
}

/// The lines on the plan in force.
fn plan(status: &ClusterStatus) -> String {
    let mut out = format!("  plan {}", status.plan);
    if let Some(time) = status.predicted {
        let _ = write!(out, ", predicted {}", milliseconds(time));
    }
    let _ = write!(
        out,
        "\n  layout {}, exchange {}, links {}, wire {}, tiles {}",
        status.layout, status.exchange, status.link, status.wire, status.tiles
    );
    if !status.modes.is_empty() {
        let _ = write!(out, ", blocks {}", status.modes);
    }
    out + "\n"
}

/// A table of what each device holds.
pub fn devices(devices: &[DeviceStatus]) -> String {
    let mut rows = vec![row([
        "device", "state", "heads", "columns", "tokens", "rows", "threads", "kernels", "weights",
        "needs", "grants", "address", "",
    ])];
    let weights: u64 = devices.iter().map(|d| u64::from(d.row_weight)).sum();
    for device in devices {
        let share = if weights == 0 {
            "-".to_owned()
        } else {
            format!("{:.0}%", 100.0 * f64::from(device.row_weight) / weights as f64)
        };
        rows.push(vec![
            device.name.clone(),
            device.state.clone(),
            span(&device.heads),
            span(&device.columns),
            span(&device.vocabulary),
            share,
            device.threads.to_string(),
            device.processor.clone(),
            device.weight_bytes.to_string(),
            device.needed_bytes.to_string(),
            if device.budget_bytes < UNLIMITED {
                device.budget_bytes.to_string()
            } else {
                "no limit".to_owned()
            },
            device.address.clone(),
            device.detail.clone(),
        ]);
    }
    // Most models have no logits over a vocabulary, and then nobody holds a slice of it.
    if devices.iter().all(|d| d.vocabulary.is_empty()) {
        rows.iter_mut().for_each(|row| drop(row.remove(TOKENS)));
    }
    table(&rows)
}

fn span(range: &Range<u32>) -> String {
    if range.is_empty() { "-".to_owned() } else { format!("{}..{}", range.start, range.end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_shows_the_share_and_memory_of_each_device() {
        let device = DeviceStatus {
            name: "pi-1".to_owned(),
            address: "10.0.0.1:7100".to_owned(),
            state: "lost".to_owned(),
            detail: "no answer for 2.5 s".to_owned(),
            heads: 0..6,
            columns: 0..768,
            vocabulary: 0..0,
            row_weight: 2,
            weight_bytes: Bytes(12_000_000),
            budget_bytes: Bytes(1_500_000_000),
            needed_bytes: Bytes(80_000_000),
            threads: 2,
            processor: "neon".to_owned(),
        };
        let other = DeviceStatus { row_weight: 1, budget_bytes: Bytes(u64::MAX), ..device.clone() };
        let text = devices(&[device.clone(), other]);
        for part in [
            "0..6",
            "0..768",
            "67%",
            "33%",
            "12.0 MB",
            "1.50 GB",
            "no limit",
            "no answer for 2.5 s",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("tokens"), "{text}");
        assert!(devices(&[DeviceStatus { vocabulary: 0..97, ..device }]).contains("0..97"));
    }
}
