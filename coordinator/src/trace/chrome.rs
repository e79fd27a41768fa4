//! Chrome's trace format: one process for each device, one thread for each lane.

use super::{TracedProgram, lane_name};
use crate::fleet::Timeline;
use galaxy_common::{Kernel, Rank, RequestId};
use galaxy_graph::{
    Program,
    program::{Block, OpKind, Operation},
};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Collects the events of a trace.
pub(super) struct Writer {
    request: RequestId,
    events: Vec<Value>,
    named: BTreeSet<(u16, Option<String>)>,
    /// All threads so far: (device, lane), in the order of their numbers.
    threads: Vec<(u16, String)>,
}

impl Writer {
    pub(super) fn new(request: RequestId) -> Self {
        Self { request, events: Vec::new(), named: BTreeSet::new(), threads: Vec::new() }
    }

    /// Adds one program of one device.
    pub(super) fn program(
        &mut self,
        rank: Rank,
        traced: &TracedProgram,
        program: &Program,
        timeline: &Timeline,
    ) {
        let device = traced.plan.ring.get(rank.index()).map(|d| d.name.to_string());
        let device = device.unwrap_or_default();
        if self.named.insert((rank.0, None)) {
            let args = json!({ "name": device });
            self.events
                .push(json!({ "ph": "M", "name": "process_name", "pid": rank.0, "args": args }));
        }
        for (lane, operations) in &program.lanes {
            let lane = lane_name(&traced.plan, *lane);
            let tid = self.thread(rank, &lane);
            for op in operations {
                let operation = program.operation(*op);
                let (start, end) = timeline.operations[op.0 as usize];
                let at = i128::from(start) + i128::from(timeline.offset_ns);
                let bytes: u64 = operation
                    .reads
                    .iter()
                    .chain(&operation.writes)
                    .map(|r| program.region_bytes(r))
                    .sum();
                self.events.push(json!({
                    "ph": "X",
                    "name": name(operation),
                    "cat": category(operation),
                    "pid": rank.0,
                    "tid": tid,
                    "ts": at as f64 / 1e3,
                    "dur": end.saturating_sub(start) as f64 / 1e3,
                    "args": {
                        "operation": op.0,
                        "bytes": bytes,
                        "sequence": traced.sequence.0,
                        "epoch": traced.epoch.0,
                    },
                }));
            }
        }
    }

    /// The number of a lane's thread; names it where it is new.
    fn thread(&mut self, rank: Rank, lane: &str) -> usize {
        let key = (rank.0, lane.to_owned());
        let tid = self.threads.iter().position(|t| *t == key).unwrap_or_else(|| {
            self.threads.push(key);
            self.threads.len() - 1
        });
        if self.named.insert((rank.0, Some(lane.to_owned()))) {
            let args = json!({ "name": lane });
            self.events.push(
                json!({ "ph": "M", "name": "thread_name", "pid": rank.0, "tid": tid, "args": args }),
            );
        }
        tid
    }

    /// The finished file. Times count from the first operation; it says how many programs are not in it.
    pub(super) fn finish(mut self, missing: usize) -> String {
        let first =
            self.events.iter().filter_map(|e| e["ts"].as_f64()).fold(f64::INFINITY, f64::min);
        for event in &mut self.events {
            if let Some(at) = event["ts"].as_f64() {
                // Whole nanoseconds: clocks tell no more.
                event["ts"] = json!(((at - first) * 1e3).round() / 1e3);
            }
        }
        json!({
            "displayTimeUnit": "ms",
            "otherData": { "request": self.request.0, "missing_programs": missing },
            "traceEvents": self.events,
        })
        .to_string()
    }
}

fn category(operation: &Operation) -> &'static str {
    match operation.block {
        Block::Embedding => "embedding",
        Block::Attention => "attention",
        Block::Mlp => "mlp",
        Block::Connective => "connective",
        Block::Head => "head",
    }
}

/// The name of an operation, for people, like "L3 mlp up rows 0..71".
fn name(operation: &Operation) -> String {
    let what = match &operation.kind {
        OpKind::Embed(_) => "embed".to_owned(),
        OpKind::Rows(_) => "norm".to_owned(),
        OpKind::Product { kernel, .. } => match kernel {
            Kernel::Qkv => "qkv".to_owned(),
            Kernel::AttentionOutput => "output".to_owned(),
            Kernel::Up => "up".to_owned(),
            Kernel::Down => "down".to_owned(),
            Kernel::Language => "logits".to_owned(),
            other => format!("{other:?}").to_lowercase(),
        },
        OpKind::Attend { .. } => "attend".to_owned(),
        OpKind::AppendKv { .. } => "append kv".to_owned(),
        OpKind::TopK { .. } => "top-k".to_owned(),
        OpKind::GatherCandidates => "gather candidates".to_owned(),
        OpKind::Sample => "sample".to_owned(),
        OpKind::AddNorm { .. } => "add and norm".to_owned(),
        OpKind::Export { .. } => "export".to_owned(),
        OpKind::Import => "import".to_owned(),
        OpKind::Add => "add".to_owned(),
        OpKind::Select => "select".to_owned(),
        OpKind::Send { transfer, tile } => format!("send {transfer} tile {tile}"),
        OpKind::Load { piece } => format!("load piece {piece}"),
        OpKind::Receive { transfer, tile } => format!("receive {transfer} tile {tile}"),
        OpKind::Emit { output } => format!("emit {output}"),
    };
    let rows = operation.writes.first().or(operation.reads.first()).map(|r| r.rows);
    let rows = rows.map(|r| format!(" {r}")).unwrap_or_default();
    let layer = match operation.block {
        Block::Embedding | Block::Head => String::new(),
        _ => format!("L{} ", operation.layer),
    };
    format!("{layer}{} {what}{rows}", category(operation))
}
