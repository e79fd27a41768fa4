//! The coordinator's side of an experiment: places models on a testbed's devices and runs batches,
//! from inside the testbed's network.

use anyhow::{Context, Result, bail};
use galaxy_common::{
    BatchShape, Bytes, DeviceName, Epoch, GenerateOptions, Plan, Prompt, plan::Phase,
};
use galaxy_coord::{
    Cluster, Fleet, Limits, RemoteFleet, RequestError, Session,
    client_memory::DEFAULT_CLIENT_MEMORY,
    fleet::{Notice, Readiness, Run, Task, Timeline},
    placement::PlacementError,
    session::{Report, Said},
};
use galaxy_graph::{Program, lower};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Identity;
use std::{
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{mpsc, watch},
};

/// How long weights may take to be placed, from the last word of a profile on: the largest models
/// that a testbed holds, from a disk that is shared.
const PLACING: Duration = Duration::from_secs(300);
/// How long a text may take.
const MAKING: Duration = Duration::from_secs(600);

/// Threads inside a network.
pub struct Stage {
    runtime: Runtime,
    identity: PathBuf,
}

/// A model on the devices.
pub struct Placed<'a> {
    stage: &'a Stage,
    fleet: Arc<RemoteFleet>,
    session: Session,
    model: Arc<ModelDir>,
    programs: Option<(BatchShape, Arc<Vec<Program>>)>,
}

/// Why a model is not on the devices.
#[derive(Debug)]
pub enum Refusal {
    /// A device's part does not fit into what it grants.
    Memory {
        /// Whose.
        device: DeviceName,
        /// What it would take.
        needs: Bytes,
        /// What it grants.
        grants: Bytes,
    },
    /// Anything else that is no failure: the strategy cannot cut this model so.
    Plan(String),
}

/// A text that was made.
pub struct Text {
    /// Its tokens, without those of the prompt,
    pub tokens: Vec<u32>,
    /// and when each was there, from the request on.
    pub at: Vec<Duration>,
    /// What it cost, where that is told.
    pub report: Option<Report>,
}

/// A batch that ran, and what each device did when.
pub struct Observation {
    /// The run.
    pub run: Run,
    /// Its programs, by rank.
    pub programs: Arc<Vec<Program>>,
    /// When each operation began and ended, by rank.
    pub timelines: Vec<Timeline>,
}

impl Stage {
    /// Threads that `enter` a network as they start, and speak as the coordinator.
    ///
    /// # Errors
    /// When there are no threads.
    pub fn new(identity: &Path, enter: impl Fn() + Send + Sync + 'static) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("stage")
            .on_thread_start(enter)
            .enable_all()
            .build()?;
        Ok(Self { runtime, identity: identity.to_owned() })
    }

    /// Runs a future on the threads of the stage: only they are inside the network.
    fn inside<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.runtime.block_on(self.runtime.spawn(future)).context("the stage broke")
    }

    /// Places a model, and waits until requests can be served.
    ///
    /// # Errors
    /// When a device does not answer, or fails.
    pub fn place(
        &self,
        cluster: Cluster,
        model: &Arc<ModelDir>,
    ) -> Result<Result<Placed<'_>, Refusal>> {
        self.place_telling(cluster, model, |_| ())
    }

    /// [`Stage::place`] that tells of all that the coordinator notices, as long as the model is placed.
    ///
    /// # Errors
    /// As [`Stage::place`].
    pub fn place_telling(
        &self,
        cluster: Cluster,
        model: &Arc<ModelDir>,
        tell: impl Fn(&Notice) + Send + Sync + 'static,
    ) -> Result<Result<Placed<'_>, Refusal>> {
        let (refused, mut refusal) = watch::channel(None);
        let (measuring, mut measured) = watch::channel(());
        let listener = move |notice: Notice| {
            tell(&notice);
            match notice {
                Notice::Profiling { .. } => measuring.send_replace(()),
                Notice::Unplanned { reason } => drop(refused.send_replace(Some(reason))),
                _ => {}
            }
        };
        let identity = Identity::load(&self.identity)?;
        let epoch = Epoch(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64);
        let (name, dir) = (cluster.name.clone(), model.clone());
        let begun = self.inside(async move {
            let fleet = match RemoteFleet::start(cluster, dir, identity, epoch, Arc::new(listener))
            {
                Ok(fleet) => Arc::new(fleet),
                Err(error) => return Err(error),
            };
            let mut ready = fleet.readiness();
            let in_time = loop {
                tokio::select! {
                    ready = ready.wait_for(|r| matches!(r, Readiness::Ready(_))) => {
                        break ready.is_ok();
                    }
                    Ok(_) = refusal.wait_for(Option::is_some) => break false,
                    Ok(()) = measured.changed() => {}
                    () = tokio::time::sleep(PLACING) => break false,
                }
            };
            let refusal = refusal.borrow().clone();
            Ok((fleet, in_time, refusal))
        })?;
        let fleet = match begun {
            Ok((fleet, true, _)) => fleet,
            Ok((fleet, false, Some(why))) => {
                self.inside(async move { fleet.close().await })?;
                return Ok(Err(Refusal::Plan(why)));
            }
            Ok((fleet, false, None)) => {
                let state = fleet.readiness().borrow().clone();
                let closing = fleet.clone();
                self.inside(async move { closing.close().await })?;
                let Readiness::Waiting { device, reason, .. } = state else {
                    bail!("it came late")
                };
                let device = device.map_or_else(String::new, |d| format!("{d}: "));
                bail!("{name}: the devices are not ready after {PLACING:?}: {device}{reason}");
            }
            Err(PlacementError::Budget { device, needs, grants }) => {
                return Ok(Err(Refusal::Memory { device, needs: needs.total(), grants }));
            }
            Err(other) => return Ok(Err(Refusal::Plan(other.to_string()))),
        };
        let limits = Limits {
            queue: 4,
            timeout: MAKING,
            client_memory: DEFAULT_CLIENT_MEMORY,
            // Experiments compare steps, and models with random weights repeat themselves.
            drafts: false,
        };
        let session = Session::new(model.clone(), fleet.clone(), limits);
        Ok(Ok(Placed { stage: self, fleet, session, model: model.clone(), programs: None }))
    }
}

impl Placed<'_> {
    /// The model.
    pub fn model(&self) -> &ModelDir {
        &self.model
    }

    /// The plan.
    pub fn plan(&self) -> Arc<Plan> {
        self.fleet.plan().expect("a fleet that is ready has a plan")
    }

    /// The plan in words: "galaxy on 3 devices, 4 tiles".
    pub fn what(&self) -> String {
        self.fleet.outlook().what
    }

    /// How long the text that was planned for is predicted to take; a split by hand is not predicted.
    pub fn predicted(&self) -> Option<Duration> {
        self.fleet.outlook().predicted
    }

    /// Runs one batch, by whatever plan is in force then.
    ///
    /// # Errors
    /// When it fails, with what failed.
    pub fn execute(&self, shape: &BatchShape, tokens: &Arc<[u32]>, limit: Duration) -> Result<Run> {
        let (fleet, shape, inputs) = (self.fleet.clone(), shape.clone(), tokens.clone());
        Ok(self
            .stage
            .inside(async move { fleet.execute(Task::new(shape, inputs), limit).await })??)
    }

    /// Makes the likeliest tokens behind a prompt, so many, whatever they are.
    ///
    /// # Errors
    /// When it fails, with what failed.
    pub fn generate(&self, prompt: &[u32], count: u32) -> Result<Text> {
        let prompt = Prompt::Ids(prompt.to_vec());
        let options = GenerateOptions {
            max_tokens: count,
            ignore_end: true,
            fallback: None,
            ..GenerateOptions::default()
        };
        let session = self.session.clone();
        let made = self.stage.inside(async move {
            let (listener, mut said) = mpsc::channel(1024);
            let begun = Instant::now();
            let making = tokio::spawn(async move {
                session.generate(prompt, options, Some(MAKING), listener).await;
            });
            let (mut tokens, mut at, mut report) = (Vec::new(), Vec::new(), None);
            while let Some(said) = said.recv().await {
                match said? {
                    Said::Waiting { .. } | Said::Begun { .. } => {}
                    Said::Token(token) => {
                        tokens.push(token.token);
                        at.push(begun.elapsed());
                    }
                    Said::Done { report: cost, .. } => report = Some(cost),
                }
            }
            drop(making.await);
            Ok::<_, RequestError>(Text { tokens, at, report })
        })?;
        Ok(made?)
    }

    /// Runs one batch, and asks when each device did what. The plan must not change meanwhile.
    ///
    /// # Errors
    /// When it fails, with what failed.
    pub fn run(
        &mut self,
        shape: &BatchShape,
        tokens: &Arc<[u32]>,
        limit: Duration,
    ) -> Result<Observation> {
        let run = self.execute(shape, tokens, limit)?;
        self.observe(run, shape)
    }

    /// Asks when each device did what in the last run, which was of such a batch.
    ///
    /// # Errors
    /// When a device does not answer, or has forgotten it.
    pub fn observe(&mut self, run: Run, shape: &BatchShape) -> Result<Observation> {
        let programs = match &self.programs {
            Some((of, programs)) if of == shape => programs.clone(),
            _ => {
                let formats = self.model.formats();
                let spec = self.model.spec();
                let programs = Arc::new(lower(spec, formats, &self.plan(), Phase::Prefill, shape)?);
                self.programs = Some((shape.clone(), programs.clone()));
                programs
            }
        };
        let (fleet, epoch, sequence) = (self.fleet.clone(), run.epoch, run.sequence);
        let timelines =
            self.stage.inside(async move { fleet.timelines(epoch, sequence).await })??;
        Ok(Observation { run, programs, timelines })
    }
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        let fleet = self.fleet.clone();
        // A stage that broke has told so already.
        drop(self.stage.inside(async move { fleet.close().await }));
    }
}
