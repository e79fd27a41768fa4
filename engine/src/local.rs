//! A whole plan in one process: an executor for each device, links in memory.

use crate::{
    compute::{
        Binding, Ending, Inputs,
        choice::{EngineChoice, EngineError},
        cpu::CpuEngine,
    },
    executor::{Executor, Job, RunError, RunReport},
    generate::{BURST_STEPS, Decoded, Drafting, Generated, Generation, Goal, TokenEvent},
    link::{Links, memory},
    merge::{MergeError, Merged, merge},
    pace::{Pace, Ran},
    sampler::Sequence,
    stream::Stream,
    weights::{Shard, WeightError},
};
use galaxy_common::{
    BatchShape, BlockTables, Cache, CandidateCount, Epoch, Plan, Segment, SequenceNumber, Wanted,
    plan::Phase,
};
use galaxy_graph::{
    LowerError, Lowered, Program, Selected, Selection, Whole, budget, links,
    operators::OperatorGraph,
};
use galaxy_model::ModelDir;
use std::{
    ops::ControlFlow,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// Why a local cluster fails.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The plan or shape gives no program.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The model has an operator that the engine does not have.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A shard cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// No thread can be started.
    #[error("no thread could be started: {0}")]
    Thread(#[from] std::io::Error),
    /// A run of a device failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The devices' results do not fit the batch.
    #[error(transparent)]
    Merge(#[from] MergeError),
}

/// The tokens that a burst has generated, and how it ran.
#[derive(Debug)]
pub struct LocalGeneration {
    /// The values that are reported of each token of each sequence.
    pub tokens: Vec<Vec<TokenEvent>>,
    /// How many tokens were generated, and in how many steps.
    pub decoded: Decoded,
    /// The programs that ran last, by rank.
    pub programs: Vec<Arc<Program>>,
    /// The report of each device, by rank.
    pub reports: Vec<RunReport>,
}

/// The number of shapes whose programs are kept.
const KEPT: usize = 32;

/// All devices of a plan in this process.
pub struct LocalCluster {
    dir: Arc<ModelDir>,
    plan: Arc<Plan>,
    executors: Vec<Executor>,
    streams: Vec<Option<Arc<Stream>>>,
    programs: Mutex<Lowered<Vec<Arc<Program>>>>,
    /// The part of the model that batches compute with; none for all of it.
    selected: Mutex<Option<Arc<Selected>>>,
    state: Mutex<LocalClusterState>,
    /// The flag by which the burst that runs is asked to end.
    ending: Mutex<Ending>,
    /// The block tables: which sequence has which blocks of the cache.
    tables: Mutex<BlockTables>,
}

#[derive(Default)]
struct LocalClusterState {
    epoch: Epoch,
    sequence: SequenceNumber,
    /// How long decode steps take lately.
    pace: Pace,
}

/// A decode burst that is to run.
struct Burst<'a> {
    phase: Phase,
    shape: &'a BatchShape,
    /// The tokens of its rows.
    tokens: &'a [u32],
    goals: &'a [Goal],
    /// The most steps that it has.
    steps: u32,
    drafting: Option<Drafting>,
    deadline: Option<Instant>,
}

impl<'a> Burst<'a> {
    /// A burst in any number of steps, without drafts.
    fn new(phase: Phase, shape: &'a BatchShape, tokens: &'a [u32], goals: &'a [Goal]) -> Self {
        Self { phase, shape, tokens, goals, steps: u32::MAX, drafting: None, deadline: None }
    }
}

/// The prefill of a sequence: its prompt goes through in chunks.
#[derive(Clone, Copy)]
struct Prefill<'a> {
    /// The sequence, which has the prompt.
    text: &'a Sequence,
    /// The number of its first tokens whose rows are cached already.
    kept: u32,
    /// The most rows of a chunk.
    chunk: u32,
}

impl LocalCluster {
    /// Loads the shard of each device of `plan` and connects them.
    ///
    /// # Errors
    /// When a shard cannot be loaded.
    pub fn open(dir: Arc<ModelDir>, plan: Plan) -> Result<Self, LocalError> {
        Self::open_with(dir, plan, &std::env::temp_dir())
    }

    /// Opens a cluster as [`LocalCluster::open`] does, with the files of shards that come from disk in
    /// `shards`.
    ///
    /// # Errors
    /// When a shard cannot be loaded.
    pub fn open_with(dir: Arc<ModelDir>, plan: Plan, shards: &Path) -> Result<Self, LocalError> {
        plan.validate(dir.spec().extent()).map_err(LowerError::from)?;
        EngineChoice::Cpu.check(&OperatorGraph::of(dir.spec()))?;
        let (mut executors, mut streams) = (Vec::new(), Vec::new());
        for device in &plan.ring {
            let mut quiet = |_, _| ControlFlow::Continue(());
            let shard = Shard::stream(dir.clone(), device, shards, &mut quiet)?;
            streams.push(shard.streams());
            let engine = Box::new(CpuEngine::new(shard, device.threads).with_cache(plan.cache));
            executors.push(Executor::start(device.name.as_str(), engine)?);
        }
        let tables = Mutex::new(BlockTables::new(plan.cache));
        let (plan, state) = (Arc::new(plan), Mutex::default());
        let programs = Mutex::new(Lowered::new(KEPT));
        let (selected, ending) = (Mutex::default(), Mutex::default());
        let cluster =
            Self { dir, plan, executors, streams, programs, selected, state, ending, tables };
        cluster.connect(&mut cluster.lock());
        Ok(cluster)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, LocalClusterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects the devices by other links, one end for each device by rank, until a run fails.
    pub fn connect_over(&self, ends: Vec<Links>) {
        self.join(&mut self.lock(), ends);
    }

    fn join(&self, state: &mut LocalClusterState, ends: Vec<Links>) {
        state.epoch = state.epoch.next();
        for (executor, links) in self.executors.iter().zip(ends) {
            executor.connect(state.epoch, links);
        }
    }

    fn connect(&self, state: &mut LocalClusterState) {
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

    /// The plan of the cluster.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The streams that bring weights from disk, of the devices that read them so.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.streams.iter().flatten().map(Arc::as_ref)
    }

    /// The directory of the model.
    pub fn model(&self) -> &Arc<ModelDir> {
        &self.dir
    }

    /// The programs of a shape, by rank.
    ///
    /// # Errors
    /// When it cannot be lowered.
    pub fn programs(&self, shape: &BatchShape) -> Result<Vec<Arc<Program>>, LocalError> {
        self.lowered(Phase::Prefill, shape)
    }

    fn lowered(&self, phase: Phase, shape: &BatchShape) -> Result<Vec<Arc<Program>>, LocalError> {
        let shared = |programs: Vec<Program>| programs.into_iter().map(Arc::new).collect();
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let selected = self.selected.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(match selected {
            Some(selected) => programs.get_selected(&selected, phase, shape, shared)?,
            None => {
                let (spec, formats) = (self.dir.spec(), self.dir.formats());
                let whole = Whole { spec, formats, plan: &self.plan };
                programs.get(whole, phase, shape, shared)?
            }
        })
    }

    /// Has batches compute with this part of the model from now on; devices hold what they held. A sequence that is
    /// resumed must have begun with as many layers.
    ///
    /// # Errors
    /// When the model has no such part, or the plan cannot compute it.
    pub fn select(&self, selection: Selection) -> Result<(), LocalError> {
        let spec = self.dir.spec();
        let part = match selection == Selection::all(spec) {
            true => None,
            false => {
                let selected = Selected::new(spec, self.dir.formats(), &self.plan, selection)?;
                Some(Arc::new(selected))
            }
        };
        *self.selected.lock().unwrap_or_else(PoisonError::into_inner) = part;
        Ok(())
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
        let programs = self.lowered(Phase::Prefill, shape)?;
        state.sequence = state.sequence.next();
        let binding = Binding::new(shape.clone(), inputs);
        let (epoch, sequence) = (state.epoch, state.sequence);
        let reports = self.on_each(&mut state, |rank, executor| {
            let (program, binding) = (programs[rank].clone(), binding.clone());
            executor.run(Job { epoch, sequence, program, binding, deadline })
        })?;
        Ok((programs, reports))
    }

    /// Runs `work` on all devices at a time, and connects them anew where one fails.
    fn on_each<T: Send>(
        &self,
        state: &mut LocalClusterState,
        work: impl Fn(usize, &Executor) -> Result<T, RunError> + Sync,
    ) -> Result<Vec<T>, LocalError> {
        let work = &work;
        let results: Vec<Result<T, RunError>> = std::thread::scope(|scope| {
            let on = |(rank, executor)| {
                scope.spawn(move || {
                    let result = work(rank, executor);
                    if result.is_err() {
                        // The others wait for this device's tiles: let them go.
                        self.executors.iter().for_each(|e| e.disconnect(None));
                    }
                    result
                })
            };
            let threads: Vec<_> = self.executors.iter().enumerate().map(on).collect();
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
            self.connect(state);
            return Err(error.into());
        }
        Ok(reports)
    }

    /// Generates tokens behind a prompt, which `text` has, until there are `count` or one of `stop`, or until `tell`
    /// breaks off: it is called with the values of each token as it is generated. Some more may be generated by then,
    /// which are not reported. The prompt goes through in chunks of at most `chunk` rows. Tokens are drafted where that
    /// pays.
    ///
    /// # Errors
    /// As [`LocalCluster::execute`]; when the sequence does not fit the plan's cache.
    pub fn generate(
        &self,
        text: &Sequence,
        count: u32,
        chunk: u32,
        stop: &[u32],
        tell: &mut (dyn FnMut(&TokenEvent) -> ControlFlow<()> + Send),
    ) -> Result<(), LocalError> {
        let goal = Goal { count, stop: stop.into(), mask: None };
        let mut state = self.lock();
        let made = match self.begin(text) {
            Ok(()) => {
                self.prefill_and_decode(&mut state, Prefill { text, kept: 0, chunk }, &goal, tell)
            }
            Err(error) => Err(error),
        };
        self.end(text.slot);
        made
    }

    /// Generates tokens as [`LocalCluster::generate`] does, behind a prompt whose first `kept` tokens, fewer than it
    /// has, are those of the sequence that its slot has: their rows are cached, and do not run again. The slot keeps
    /// its room until [`LocalCluster::end`].
    ///
    /// # Errors
    /// As [`LocalCluster::generate`].
    pub fn resume(
        &self,
        text: &Sequence,
        kept: u32,
        goal: &Goal,
        chunk: u32,
        tell: &mut (dyn FnMut(&TokenEvent) -> ControlFlow<()> + Send),
    ) -> Result<(), LocalError> {
        let mut state = self.lock();
        self.begin(text)?;
        self.prefill_and_decode(&mut state, Prefill { text, kept, chunk }, goal, tell)
    }

    /// Takes room for a sequence on all devices.
    ///
    /// # Errors
    /// When a device has none.
    pub fn begin(&self, text: &Sequence) -> Result<(), LocalError> {
        let rows = text.rows;
        let blocks = self.tables().allocate(text.slot, rows).ok_or_else(|| {
            let (rows, limit) = (Cache::taken(rows), self.plan.cache.rows);
            LowerError::Cache { rows, limit }
        })?;
        self.begin_in(text, &blocks)
    }

    /// Gives a sequence these blocks on all devices; the caller sees to the block tables.
    ///
    /// # Errors
    /// When a device does not have them.
    pub fn begin_in(&self, text: &Sequence, blocks: &Arc<[u32]>) -> Result<(), LocalError> {
        let begin = |executor: &Executor| executor.begin(text.clone(), blocks.clone());
        Ok(self.executors.iter().try_for_each(begin)?)
    }

    /// Forgets a sequence on all devices.
    pub fn end(&self, slot: u32) {
        self.executors.iter().for_each(|executor| executor.end(Some(slot)));
        self.tables().release(slot);
    }

    /// Asks the burst that runs to end behind its next step.
    pub fn end_burst(&self) {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).ask();
    }

    fn tables(&self) -> std::sync::MutexGuard<'_, BlockTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Generates tokens for sequences that have begun, from the rows that come first (those of a prompt, or
    /// of the last token of each sequence), until one of them has what is wanted of it.
    ///
    /// # Errors
    /// As [`LocalCluster::execute`].
    pub fn generate_steps(
        &self,
        phase: Phase,
        shape: &BatchShape,
        tokens: &[u32],
        goals: &[Goal],
        deadline: Option<Instant>,
    ) -> Result<LocalGeneration, LocalError> {
        self.generate_drafting(phase, shape, tokens, (goals, u32::MAX, None), deadline)
    }

    /// Generates tokens as [`LocalCluster::generate_steps`] does, in so many steps at most. With `row_cost`, the share of a
    /// step's time that one more row takes, drafts are verified that make tokens come sooner.
    ///
    /// # Errors
    /// As [`LocalCluster::execute`].
    pub fn generate_drafting(
        &self,
        phase: Phase,
        shape: &BatchShape,
        tokens: &[u32],
        (goals, steps, row_cost): (&[Goal], u32, Option<f32>),
        deadline: Option<Instant>,
    ) -> Result<LocalGeneration, LocalError> {
        let rows = budget::sequences(self.plan());
        let drafting = row_cost.map(|row_cost| Drafting { row_cost, rows });
        let burst = Burst { steps, drafting, deadline, ..Burst::new(phase, shape, tokens, goals) };
        self.steps(&mut self.lock(), &burst, &|_, _| ControlFlow::Continue(()))
    }

    /// Runs the prefill of a sequence that has begun, and generates tokens behind it.
    fn prefill_and_decode(
        &self,
        state: &mut LocalClusterState,
        prefill: Prefill<'_>,
        goal: &Goal,
        tell: &mut (dyn FnMut(&TokenEvent) -> ControlFlow<()> + Send),
    ) -> Result<(), LocalError> {
        let Prefill { text, kept, chunk } = prefill;
        let Goal { count, stop, .. } = goal;
        let segment = |context_len: u32, rows: u32, wanted| {
            let segment = Segment { slot: text.slot, context_len, cached: true, rows, wanted };
            BatchShape::new(vec![segment]).map_err(LowerError::from)
        };
        let (mut context_len, most) = (kept, budget::sequences(self.plan()));
        // The number of generated tokens, the last of them, and whether that is enough.
        let now = Mutex::new((tell, (0, 0, false)));
        let tell = |_: usize, told: &TokenEvent| {
            let (tell, (made, last, over)) =
                &mut *now.lock().unwrap_or_else(PoisonError::into_inner);
            if !*over {
                (*made, *last) = (*made + 1, told[0] as u32);
                *over = tell(told).is_break() || *made >= *count || stop.contains(last);
            }
            if *over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let so_far = || now.lock().unwrap_or_else(PoisonError::into_inner).1;
        let rest = text.tokens.get(kept as usize..).unwrap_or_default();
        let mut chunks = rest.chunks(chunk.max(1) as usize).peekable();
        let candidate_counts = vec![CandidateCount::Few];
        let mut decoded = Decoded { candidate_counts, ..Decoded::default() };
        let goal = |count| [Goal { count, stop: stop.clone(), mask: None }];
        while let Some(chunk) = chunks.next() {
            let rows = chunk.len() as u32;
            if chunks.peek().is_none() {
                let shape = segment(context_len, rows, Wanted::Token(decoded.candidate_counts[0]))?;
                let goals = goal(1);
                let burst = Burst::new(Phase::Prefill, &shape, chunk, &goals);
                LocalGeneration { decoded, .. } = self.steps(state, &burst, &tell)?;
            } else {
                let shape = segment(context_len, rows, Wanted::Nothing)?;
                let programs = self.lowered(Phase::Prefill, &shape)?;
                state.sequence = state.sequence.next();
                let (epoch, sequence) = (state.epoch, state.sequence);
                let binding = Binding::new(shape, chunk);
                self.on_each(state, |rank, executor| {
                    let (program, binding) = (programs[rank].clone(), binding.clone());
                    executor.run(Job { epoch, sequence, program, binding, deadline: None })
                })?;
            }
            context_len += rows;
        }
        while let (made @ 1.., last, false) = so_far() {
            let shape =
                segment(context_len + made - 1, 1, Wanted::Token(decoded.candidate_counts[0]))?;
            let (tokens, goals) = ([last], goal(*count - made));
            let drafting = Some(Drafting { row_cost: state.pace.row_cost(1), rows: most });
            let burst = Burst::new(Phase::Decode, &shape, &tokens, &goals);
            let begun = Instant::now();
            LocalGeneration { decoded, .. } =
                self.steps(state, &Burst { steps: BURST_STEPS, drafting, ..burst }, &tell)?;
            let ran = Ran { rows: decoded.rows, steps: decoded.steps, decoding: 1 };
            state.pace.decoded(ran, begun.elapsed());
        }
        Ok(())
    }

    /// Generates tokens on all devices, which must all report the same. `tell` hears of those of the first device as
    /// they are generated; where it breaks off, the burst ends early.
    fn steps(
        &self,
        state: &mut LocalClusterState,
        burst: &Burst<'_>,
        tell: &(dyn Fn(usize, &TokenEvent) -> ControlFlow<()> + Sync),
    ) -> Result<LocalGeneration, LocalError> {
        let Burst { phase, shape, tokens, goals, steps, drafting, deadline } = *burst;
        let first = self.lowered(phase, shape)?;
        state.sequence = state.sequence.next();
        let (epoch, sequence) = (state.epoch, state.sequence);
        let ending = Ending::default();
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&ending);
        let all = self.on_each(state, |rank, executor| {
            let program = first[rank].clone();
            let binding = Binding { ending: ending.clone(), ..Binding::new(shape.clone(), tokens) };
            let generation = Generation {
                first: Job { epoch, sequence, program, binding, deadline },
                goals: goals.to_vec(),
                steps,
                drafting,
            };
            let mut last = first.clone();
            let program = |shape: &BatchShape| {
                let programs = self.lowered(phase, shape);
                let programs = programs.map_err(|error| RunError::Program(error.to_string()))?;
                last.clone_from(&programs);
                Ok::<_, RunError>(programs[rank].clone())
            };
            let mut told = vec![Vec::new(); goals.len()];
            let tell = |at: usize, one: &TokenEvent| {
                told[at].push(*one);
                if rank == 0 && tell(at, one).is_break() {
                    ending.ask();
                }
                None
            };
            let generated = generation.run(executor, program, tell)?;
            Ok((told, generated, last))
        })?;
        if let Some(other) = all.iter().position(|(told, ..)| *told != all[0].0) {
            let why = format!("rank {other} has sampled other tokens than rank 0");
            return Err(RunError::Program(why).into());
        }
        let mut all = all.into_iter();
        let (told, first, programs) = all.next().ok_or(RunError::Stopped)?;
        let others = all.map(|(_, generated, _)| generated.report);
        let Generated { report, decoded } = first;
        let reports = [report].into_iter().chain(others).collect();
        Ok(LocalGeneration { tokens: told, decoded, programs, reports })
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
