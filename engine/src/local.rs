//! A whole plan in one process: an executor for each device, links in memory.

use crate::{
    compute::{Binding, Inputs, cpu::CpuEngine},
    executor::{Executor, Job, RunError, RunReport},
    link::{Links, memory},
    merge::{MergeError, Merged, merge},
    weights::{Shard, WeightError},
};
use galaxy_common::{BatchShape, Epoch, Plan, SequenceNumber, plan::Phase};
use galaxy_graph::{LowerError, Program, links, lower};
use galaxy_model::ModelDir;
use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// Why a local cluster fails.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The plan or shape gives no program.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// A shard could not be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// No thread could be started.
    #[error("no thread could be started: {0}")]
    Thread(#[from] std::io::Error),
    /// A run failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Results that do not fit.
    #[error(transparent)]
    Merge(#[from] MergeError),
}

/// Programs are kept for this many shapes.
const KEPT: usize = 8;

/// All devices of a plan in this process.
pub struct LocalCluster {
    dir: Arc<ModelDir>,
    plan: Plan,
    executors: Vec<Executor>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    epoch: Epoch,
    sequence: SequenceNumber,
    programs: Vec<(BatchShape, Vec<Arc<Program>>)>,
}

impl LocalCluster {
    /// Loads the shard of each device of `plan` and connects them.
    ///
    /// # Errors
    /// When a shard cannot be loaded.
    pub fn open(dir: Arc<ModelDir>, plan: Plan) -> Result<Self, LocalError> {
        plan.validate(dir.spec().extent()).map_err(LowerError::from)?;
        let mut executors = Vec::new();
        for device in &plan.ring {
            let shard = Shard::load(dir.clone(), device, &mut |_, _| ControlFlow::Continue(()))?;
            let engine = Box::new(CpuEngine::new(shard, device.threads));
            executors.push(Executor::start(device.name.as_str(), engine)?);
        }
        let cluster = Self { dir, plan, executors, state: Mutex::new(State::default()) };
        cluster.connect(&mut cluster.lock());
        Ok(cluster)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects the devices by other links, one end for each device by rank, until a run fails.
    pub fn connect_over(&self, ends: Vec<Links>) {
        self.join(&mut self.lock(), ends);
    }

    fn join(&self, state: &mut State, ends: Vec<Links>) {
        state.epoch = state.epoch.next();
        for (executor, links) in self.executors.iter().zip(ends) {
            executor.connect(state.epoch, links);
        }
    }

    fn connect(&self, state: &mut State) {
        let mut ends: Vec<Links> = self.executors.iter().map(|_| Links::default()).collect();
        for (from, to) in links(&self.plan) {
            let (sender, receiver, closer) = memory::link();
            ends[from.index()].senders.push((to, sender));
            ends[from.index()].closers.push(closer.clone());
            ends[to.index()].receivers.push((from, receiver));
            ends[to.index()].closers.push(closer);
        }
        self.join(state, ends);
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model.
    pub fn model(&self) -> &Arc<ModelDir> {
        &self.dir
    }

    /// The programs of a shape.
    ///
    /// # Errors
    /// When it cannot be lowered.
    pub fn programs(&self, shape: &BatchShape) -> Result<Vec<Arc<Program>>, LocalError> {
        Self::lowered(&self.dir, &self.plan, &mut self.lock(), shape)
    }

    fn lowered(
        dir: &ModelDir,
        plan: &Plan,
        state: &mut State,
        shape: &BatchShape,
    ) -> Result<Vec<Arc<Program>>, LocalError> {
        if let Some(at) = state.programs.iter().position(|(s, _)| s == shape) {
            let entry = state.programs.remove(at);
            state.programs.push(entry);
        } else {
            let programs = lower(dir.spec(), plan, Phase::Prefill, shape)?;
            if state.programs.len() == KEPT {
                state.programs.remove(0);
            }
            state.programs.push((shape.clone(), programs.into_iter().map(Arc::new).collect()));
        }
        Ok(state.programs.last().map(|(_, p)| p.clone()).unwrap_or_default())
    }

    /// Runs one batch on all devices: programs and reports in ring order.
    ///
    /// At `deadline` the batch is given up.
    ///
    /// # Errors
    /// When the shape cannot be lowered, a device fails or the deadline passes; the next batch
    /// starts afresh.
    pub fn execute(
        &self,
        shape: &BatchShape,
        inputs: impl Into<Inputs>,
        deadline: Option<Instant>,
    ) -> Result<(Vec<Arc<Program>>, Vec<RunReport>), LocalError> {
        let mut state = self.lock();
        let programs = Self::lowered(&self.dir, &self.plan, &mut state, shape)?;
        state.sequence = state.sequence.next();
        let binding = Binding { shape: shape.clone(), inputs: inputs.into() };
        let job = |program: &Arc<Program>| Job {
            epoch: state.epoch,
            sequence: state.sequence,
            program: program.clone(),
            binding: binding.clone(),
            deadline,
        };
        let results: Vec<Result<RunReport, RunError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .executors
                .iter()
                .zip(&programs)
                .map(|(executor, program)| {
                    let job = job(program);
                    scope.spawn(move || {
                        let result = executor.run(job);
                        if result.is_err() {
                            // The others wait for this device's tiles: let them go.
                            self.executors.iter().for_each(|e| e.disconnect(None));
                        }
                        result
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap_or(Err(RunError::Stopped))).collect()
        });
        let mut reports = Vec::new();
        let mut failed: Option<RunError> = None;
        for result in results {
            match result {
                Ok(report) => reports.push(report),
                // The cause is the error that is no consequence of another device's.
                Err(error) => match &failed {
                    Some(RunError::Aborted | RunError::Stale { .. } | RunError::Link { .. })
                    | None => {
                        failed = Some(error);
                    }
                    Some(_) => {}
                },
            }
        }
        if let Some(error) = failed {
            self.connect(&mut state);
            return Err(error.into());
        }
        Ok((programs, reports))
    }

    /// Runs one batch and puts the results together: one for each segment.
    ///
    /// # Errors
    /// As [`LocalCluster::execute`].
    pub fn run(
        &self,
        shape: &BatchShape,
        inputs: impl Into<Inputs>,
    ) -> Result<Vec<Merged>, LocalError> {
        let (programs, reports) = self.execute(shape, inputs, None)?;
        let parts: Vec<_> = programs
            .iter()
            .zip(&reports)
            .map(|(program, report)| (program.outputs.as_slice(), report.outputs.as_slice()))
            .collect();
        Ok(merge(self.dir.spec(), shape, &parts)?)
    }
}
