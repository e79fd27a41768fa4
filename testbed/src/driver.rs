//! The coordinator's side of an experiment: places models on a testbed's devices and runs batches,
//! from inside the testbed's network.

use crate::{
    environment::COORDINATOR,
    instance::Testbed,
    namespaces::{enter, namespace},
    record::Outcome,
};
use anyhow::{Context, Result, bail};
use galaxy_common::{
    BatchShape, Bytes, DeviceName, Epoch, GenerateOptions, Plan, Prompt, plan::Phase,
};
use galaxy_coord::{
    Cluster, Fleet, Limits, RemoteFleet, RequestError, Session,
    client_memory::DEFAULT_CLIENT_MEMORY,
    fleet::{Notice, Readiness, Run, Task, Timeline},
    placement::PlacementError,
    session::{GenerateEvent, Report},
};
use galaxy_graph::{Program, lower};
use galaxy_model::ModelDir;
use galaxy_proto::identity::Identity;
use std::{
    future::Future,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{mpsc, watch},
};

/// The longest that weights may take to be placed, from the last progress of a profile on: for the largest
/// models that a testbed holds, from a disk that is shared.
const PLACING: Duration = Duration::from_secs(300);
/// The longest that a generation may take.
const GENERATION_TIMEOUT: Duration = Duration::from_secs(600);

/// The threads inside a testbed's network that act as its coordinator.
pub struct Driver {
    runtime: Runtime,
    identity: PathBuf,
}

/// A model that is placed on the devices.
pub struct Placed<'a> {
    driver: &'a Driver,
    fleet: Arc<RemoteFleet>,
    session: Session,
    model: Arc<ModelDir>,
    programs: Option<(BatchShape, Arc<Vec<Program>>)>,
}

/// The reason why a model is not placed on the devices.
#[derive(Debug)]
pub enum Refusal {
    /// A device's part does not fit into the memory that it grants.
    Memory {
        /// The name of the device.
        device: DeviceName,
        /// The memory that the device's part needs.
        needs: Bytes,
        /// The memory that the device grants.
        grants: Bytes,
    },
    /// The strategy cannot split this model in this way; the text says why.
    Plan(String),
}

/// A generated sequence.
pub struct GeneratedText {
    /// The generated tokens, without those of the prompt.
    pub tokens: Vec<u32>,
    /// The time at which each token was there, from the request on.
    pub at: Vec<Duration>,
    /// The costs of the request; none where they are not known.
    pub report: Option<Report>,
}

/// A batch that ran, and the timelines of all devices.
pub struct Observation {
    /// The run's results and costs of each device.
    pub run: Run,
    /// The programs of the run, by rank.
    pub programs: Arc<Vec<Program>>,
    /// The begin and end of each operation, by rank.
    pub timelines: Vec<Timeline>,
}

impl From<Refusal> for Outcome {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Memory { device, needs, grants } => {
                Self::OutOfMemory { device: device.to_string(), needs: Some(needs), grants }
            }
            Refusal::Plan(why) => Self::Refused { why },
        }
    }
}

impl Driver {
    /// A driver at the coordinator's place of a testbed, with its identity.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn new(testbed: &Testbed) -> Result<Self> {
        let (namespace, loopback) = (namespace(&testbed.name, COORDINATOR), testbed.loopback);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("driver")
            .on_thread_start(move || {
                // A thread that is not inside reaches no device, and its first call says so.
                if !loopback && let Err(error) = enter(&namespace) {
                    eprintln!("{error:#}");
                }
            })
            .enable_all()
            .build()?;
        Ok(Self { runtime, identity: testbed.identity(COORDINATOR) })
    }

    /// Runs a future on the threads of the driver: only they are inside the network.
    fn inside<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.runtime.block_on(self.runtime.spawn(future)).context("the driver's thread panicked")
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
        self.place_with_notices(cluster, model, |_| ())
    }

    /// Like [`Driver::place`], and calls `tell` with all that the coordinator notices, as long as the model is
    /// placed.
    ///
    /// # Errors
    /// As [`Driver::place`].
    pub fn place_with_notices(
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
            timeout: GENERATION_TIMEOUT,
            client_memory: DEFAULT_CLIENT_MEMORY,
            // Experiments compare steps, and models with random weights repeat themselves.
            drafts: false,
        };
        let session = Session::new(model.clone(), fleet.clone(), limits);
        Ok(Ok(Placed { driver: self, fleet, session, model: model.clone(), programs: None }))
    }
}

impl Placed<'_> {
    /// The model that is placed.
    pub fn model(&self) -> &ModelDir {
        &self.model
    }

    /// The plan that is in force.
    pub fn plan(&self) -> Arc<Plan> {
        self.fleet.plan().expect("a fleet that is ready has a plan")
    }

    /// The plan as a sentence: "galaxy on 3 devices, 4 tiles".
    pub fn what(&self) -> String {
        self.fleet.status().what
    }

    /// The predicted time of the text that was planned for; none for a split by hand, which is not predicted.
    pub fn predicted(&self) -> Option<Duration> {
        self.fleet.status().predicted
    }

    /// Runs one batch, by the plan that is in force then.
    ///
    /// # Errors
    /// When the batch fails, with the reason.
    pub fn execute(&self, shape: &BatchShape, tokens: &Arc<[u32]>, limit: Duration) -> Result<Run> {
        let (fleet, shape, inputs) = (self.fleet.clone(), shape.clone(), tokens.clone());
        Ok(self
            .driver
            .inside(async move { fleet.execute(Task::new(shape, inputs), limit).await })??)
    }

    /// Generates `count` tokens behind a prompt, the likeliest each time, even past one that ends a text.
    ///
    /// # Errors
    /// When the generation fails, with the reason.
    pub fn generate(&self, prompt: &[u32], count: u32) -> Result<GeneratedText> {
        let prompt = Prompt::Ids(prompt.to_vec());
        let options = GenerateOptions {
            max_tokens: count,
            ignore_end: true,
            fallback: None,
            ..GenerateOptions::default()
        };
        let session = self.session.clone();
        let made = self.driver.inside(async move {
            let (listener, mut said) = mpsc::channel(1024);
            let begun = Instant::now();
            let generation = tokio::spawn(async move {
                session.generate(prompt, options, Some(GENERATION_TIMEOUT), listener).await;
            });
            let (mut tokens, mut at, mut report) = (Vec::new(), Vec::new(), None);
            while let Some(said) = said.recv().await {
                match said? {
                    GenerateEvent::Waiting { .. } | GenerateEvent::Begun { .. } => {}
                    GenerateEvent::Token(token) => {
                        tokens.push(token.token);
                        at.push(begun.elapsed());
                    }
                    GenerateEvent::Done { report: cost, .. } => report = Some(cost),
                }
            }
            drop(generation.await);
            Ok::<_, RequestError>(GeneratedText { tokens, at, report })
        })?;
        Ok(made?)
    }

    /// Runs one batch, and fetches the devices' timelines. The plan must not change meanwhile.
    ///
    /// # Errors
    /// When the batch fails, with the reason.
    pub fn run(
        &mut self,
        shape: &BatchShape,
        tokens: &Arc<[u32]>,
        limit: Duration,
    ) -> Result<Observation> {
        let run = self.execute(shape, tokens, limit)?;
        self.observe(run, shape)
    }

    /// Fetches the devices' timelines of the last run, which was of a batch of this shape.
    ///
    /// # Errors
    /// When a device does not answer, or has no timeline of the run any more.
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
            self.driver.inside(async move { fleet.timelines(epoch, sequence).await })??;
        Ok(Observation { run, programs, timelines })
    }
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        let fleet = self.fleet.clone();
        // A driver that broke has already reported an error.
        drop(self.driver.inside(async move { fleet.close().await }));
    }
}
