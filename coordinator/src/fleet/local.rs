//! A fleet in this process: the engine on threads of our own, over links in memory.

use super::{
    BoxFuture, DeviceCost, DeviceRun, DeviceView, Fleet, FleetStatus, Readiness, Run, Task,
    Timeline, blocking,
};
use crate::error::RequestError;
use galaxy_common::{Burst, Bytes, Epoch, SequenceNumber, plan::Plan};
use galaxy_engine::{
    compute::{Inputs, kernels::instructions::Instructions},
    executor::{RunError, RunReport},
    generate::{Decoded, Goal},
    local::{LocalCluster, LocalError, LocalGeneration},
};
use galaxy_graph::{Program, budget, operators::OperatorGraph, program::Lane};
use galaxy_model::ModelDir;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// How many programs' timelines are kept.
const TIMELINES: usize = 64;
/// The only epoch: a process that ends takes its devices with it.
const EPOCH: Epoch = Epoch(1);

type CachedRanges = VecDeque<(SequenceNumber, Vec<Vec<(u64, u64)>>)>;

/// The devices of a plan as threads of this process.
pub struct LocalFleet {
    cluster: Arc<LocalCluster>,
    plan: Arc<Plan>,
    sequence: AtomicU64,
    timelines: Mutex<CachedRanges>,
    readiness: watch::Sender<Readiness>,
    devices: Vec<DeviceView>,
}

impl LocalFleet {
    /// Loads every device's shard. Blocks.
    ///
    /// # Errors
    /// When a shard cannot be loaded.
    pub fn open(model: Arc<ModelDir>, plan: Plan) -> Result<Self, LocalError> {
        let formats = model.formats();
        let graph = OperatorGraph::of(model.spec());
        let needs = budget::needs_all(model.spec(), formats, &plan).unwrap_or_default();
        let devices = plan
            .ranked()
            .map(|(rank, device)| DeviceView {
                name: device.name.to_string(),
                address: "in this process".to_owned(),
                state: "ready",
                detail: String::new(),
                part: Some(device.clone()),
                weight_bytes: budget::weights(&graph, formats, device),
                budget: device.budget,
                needed: needs.get(rank.index()).map_or(Bytes(0), |n| n.total()),
                threads: device.threads,
                processor: Instructions::current().to_string(),
            })
            .collect();
        let cluster = Arc::new(LocalCluster::open(model, plan.clone())?);
        Ok(Self {
            cluster,
            plan: Arc::new(plan),
            sequence: AtomicU64::new(0),
            timelines: Mutex::new(VecDeque::with_capacity(TIMELINES)),
            readiness: watch::Sender::new(Readiness::Ready(EPOCH)),
            devices,
        })
    }
}

/// What a program cost one device, by its report.
fn cost(report: &RunReport) -> DeviceCost {
    let compute = report.lanes.iter().find(|l| l.lane == Lane::Compute);
    let loaders = report.lanes.iter().filter(|l| matches!(l.lane, Lane::Load(_)));
    DeviceCost {
        total_ns: report.ended.saturating_sub(report.started),
        compute_busy_ns: compute.map_or(0, |l| l.busy),
        disk_busy_ns: loaders.map(|l| l.busy).max().unwrap_or(0),
        awaiting_receive_ns: compute.map_or(0, |l| l.awaiting_receive),
        bytes_sent: report.bytes_sent,
        bytes_received: report.bytes_received,
    }
}

/// Programs and reports by rank, and what the burst has decoded.
type Ran = (Vec<Arc<Program>>, Vec<RunReport>, Decoded);

/// Runs a program on all devices. Blocks.
fn run(cluster: &LocalCluster, task: Task, deadline: Option<Instant>) -> Result<Ran, LocalError> {
    let mut room = task.cached.iter().filter_map(|cached| cached.room.as_ref());
    room.try_for_each(|(text, blocks)| cluster.begin_in(text, blocks))?;
    if let (Some(burst), Inputs::Tokens(tokens)) = (&task.burst, &task.inputs) {
        let Burst { phase, goals, steps, row_cost } = burst;
        let goals: Vec<Goal> = goals.iter().map(Goal::from).collect();
        let wanted = (&goals[..], *steps, *row_cost);
        let LocalGeneration { tokens: told, decoded, programs, reports } =
            cluster.generate_drafting(*phase, &task.shape, tokens, wanted, deadline)?;
        for (tell, told) in task.listeners().iter().zip(told) {
            // Whoever does not listen any more misses nothing.
            told.into_iter().for_each(|told| tell.send(told).unwrap_or_default());
        }
        return Ok((programs, reports, decoded));
    }
    let (programs, reports) = cluster.execute(&task.shape, task.inputs, deadline)?;
    Ok((programs, reports, Decoded::default()))
}

impl Fleet for LocalFleet {
    fn readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.subscribe()
    }

    fn status(&self) -> FleetStatus {
        FleetStatus {
            strategy: self.plan.strategy,
            max_rows: self.plan.max_rows,
            plan: Some(self.plan.clone()),
            what: format!("{} in this process", self.plan.strategy),
            predicted: None,
            cache: self.plan.cache,
        }
    }

    fn execute(&self, task: Task, limit: Duration) -> BoxFuture<'_, Result<Run, RequestError>> {
        Box::pin(async move {
            let cluster = self.cluster.clone();
            let begun = Instant::now();
            let deadline = begun.checked_add(limit);
            let (programs, reports, decoded) =
                blocking(move || run(&cluster, task, deadline)).await?.map_err(|e| match e {
                    LocalError::Run(RunError::Deadline) => {
                        RequestError::Deadline { allowed: limit, ours: true }
                    }
                    e => RequestError::Internal { why: e.to_string() },
                })?;
            let took = begun.elapsed();
            let sequence = SequenceNumber(self.sequence.fetch_add(1, Ordering::Relaxed) + 1);
            let mut times = Vec::with_capacity(reports.len());
            let mut devices = Vec::with_capacity(reports.len());
            for ((part, program), report) in self.plan.ring.iter().zip(&programs).zip(reports) {
                let cost = cost(&report);
                times.push(report.timeline);
                devices.push(DeviceRun {
                    name: part.name.clone(),
                    outputs: program.outputs.clone(),
                    values: report.outputs,
                    cost,
                });
            }
            let mut kept = self.timelines.lock().unwrap_or_else(PoisonError::into_inner);
            kept.truncate(TIMELINES - 1);
            kept.push_front((sequence, times));
            let (epoch, plan) = (EPOCH, self.plan.clone());
            Ok(Run { epoch, sequence, plan, devices, took, decoded })
        })
    }

    fn end_burst(&self) {
        self.cluster.end_burst();
    }

    fn forget(&self, _epoch: Epoch, slot: u32) -> BoxFuture<'_, ()> {
        self.cluster.end(slot);
        Box::pin(std::future::ready(()))
    }

    fn timelines(
        &self,
        _epoch: Epoch,
        sequence: SequenceNumber,
    ) -> BoxFuture<'_, Result<Vec<Timeline>, RequestError>> {
        let kept = self.timelines.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter().find(|(s, _)| *s == sequence).map(|(_, times)| {
            let timeline = |t: &Vec<_>| Timeline { operations: t.clone(), offset_ns: 0 };
            times.iter().map(timeline).collect()
        });
        let found = found.ok_or_else(|| RequestError::Invalid {
            why: format!("the timelines of program {sequence} are not stored any more"),
        });
        Box::pin(std::future::ready(found))
    }

    fn devices(&self) -> Vec<DeviceView> {
        self.devices.clone()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
