//! The executor: runs programs on the lanes of one device, and measures them.
//!
//! The compute lane is a thread of its own that owns the engine; each end of a link is an I/O
//! thread. All three kinds follow their list of operations, wait for each other by counters, and
//! stamp each operation's begin and end. So while tile k is multiplied, tile k+1 is on the wire.
//! Where so little is sent that nothing could hide behind it, as for a token, the compute lane drives the
//! links itself: waking a thread takes longer than to send a row.
//!
//! Hot path: between the first and the last operation of a run, lanes take one short lock for each
//! operation, and neither log nor allocate.

mod lanes;
mod run;

use crate::{
    compute::{Binding, ComputeError, Engine},
    draft::{Histories, SharedHistories},
    link::{LinkError, Links},
    sampler::Sequence,
    staging::Staging,
    stream::StreamError,
    weights::Shard,
};
use galaxy_common::{Epoch, Rank, SequenceNumber};
use galaxy_graph::{
    Program,
    program::{Lane, TOKEN_VALUES},
    timeline::{LaneUse, Times, no_use, traffic},
};
use lanes::{EndedSequences, Ends, Work};
use run::Run;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Instant,
};

/// One program to run.
#[derive(Clone)]
pub struct Job {
    /// The epoch of the links that it needs.
    pub epoch: Epoch,
    /// Its place among the programs of the epoch.
    pub sequence: SequenceNumber,
    /// The program to run.
    pub program: Arc<Program>,
    /// The batch that the program runs for.
    pub binding: Binding,
    /// When to give up; none for never.
    pub deadline: Option<Instant>,
}

/// The values that are reported of a chosen token, as [`TOKEN_VALUES`] lists them.
pub type TokenValues = [f32; TOKEN_VALUES as usize];

/// What follows a step of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunStep {
    /// Nothing: the run is over.
    Done,
    /// The next step, as it is bound now.
    Next,
}

/// The function that is called between steps: it gets each choice of the batch, and binds the next step where one is to
/// follow. The next step has the same program: as many segments of as many rows, of which the same is wanted.
pub type Next<'a> = dyn FnMut(&[TokenValues], &mut Binding) -> RunStep + 'a;

/// The results of a run, and how it spent its time.
#[derive(Debug)]
pub struct RunReport {
    /// The values of each output of the program, in order.
    pub outputs: Vec<Vec<f32>>,
    /// When the run began, on the executor's clock (nanoseconds).
    pub started: u64,
    /// When the run ended, on the same clock.
    pub ended: u64,
    /// Begin and end of each operation in the last step.
    pub timeline: Vec<Times>,
    /// How the lanes spent their time, in all steps together.
    pub lanes: Vec<LaneUse>,
    /// Bytes of tiles that were sent, in all steps together.
    pub bytes_sent: u64,
    /// Bytes of tiles that were received, in all steps together.
    pub bytes_received: u64,
}

impl RunReport {
    /// Adds the time and the traffic of the run before this one, of a program with the same lanes.
    pub(crate) fn follow(&mut self, earlier: &Self) {
        self.started = earlier.started;
        self.bytes_sent += earlier.bytes_sent;
        self.bytes_received += earlier.bytes_received;
        for lane in &mut self.lanes {
            if let Some(before) = earlier.lanes.iter().find(|before| before.lane == lane.lane) {
                lane.busy += before.busy;
                lane.idle += before.idle;
                lane.awaiting_receive += before.awaiting_receive;
            }
        }
    }
}

/// Why a run ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The run was aborted, or its links were replaced.
    #[error("the run was aborted")]
    Aborted,
    /// The deadline passed while it ran.
    #[error("the deadline passed while it ran")]
    Deadline,
    /// The run needs links of another epoch.
    #[error("the run is of epoch {wanted}, and the links are of epoch {have}")]
    Stale {
        /// The epoch of the job.
        wanted: Epoch,
        /// The epoch of the links.
        have: Epoch,
    },
    /// The run needs a link that is not there.
    #[error("there is no link {0:?}")]
    NoLink(Lane),
    /// A link failed while it ran.
    #[error("the link with rank {peer} failed: {source}")]
    Link {
        /// The rank of the peer at the other end.
        peer: Rank,
        /// What went wrong on the link.
        source: LinkError,
    },
    /// The engine failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// Weights cannot be read from disk.
    #[error(transparent)]
    Stream(Box<StreamError>),
    /// The program is broken, or does not fit what is asked of it: it uses memory in a way that its
    /// waits do not allow, for example.
    #[error("{0}")]
    Program(String),
    /// A thread of the executor is gone.
    #[error("the executor has stopped")]
    Stopped,
}

impl From<StreamError> for RunError {
    fn from(error: StreamError) -> Self {
        Self::Stream(Box::new(error))
    }
}

/// A thread that drives a lane, and the channel that gives it runs.
struct Worker<T = (), W = Arc<Run>> {
    lane: Lane,
    runs: Option<SyncSender<W>>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static, W: Send + 'static> Worker<T, W> {
    fn spawn(
        name: String,
        lane: Lane,
        body: impl FnOnce(Receiver<W>) -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        let (runs, inbox) = sync_channel(1);
        let thread = std::thread::Builder::new().name(name).spawn(move || body(inbox))?;
        Ok(Self { lane, runs: Some(runs), thread: Some(thread) })
    }
    fn give(&self, run: W) -> Result<(), RunError> {
        let runs = self.runs.as_ref().ok_or(RunError::Stopped)?;
        runs.send(run).map_err(|_| RunError::Stopped)
    }
    /// Ends the thread, and gives what its lane leaves, once.
    fn join(&mut self) -> Option<T> {
        self.runs = None;
        // A lane that panicked has failed its run already.
        self.thread.take()?.join().ok()
    }
}

/// The links of an epoch and the threads that drive them.
struct Connected {
    epoch: Epoch,
    /// The epoch whose links were closed, while there are no others.
    ended: Option<Epoch>,
    workers: Vec<Worker>,
    ends: Arc<Ends>,
    closers: Vec<Arc<dyn crate::link::LinkCloser>>,
    current: Option<Arc<Run>>,
}

/// Runs the programs of one device.
pub struct Executor {
    name: String,
    started: Instant,
    compute: Mutex<Worker<Box<dyn Engine>, Work>>,
    ended: Arc<Mutex<EndedSequences>>,
    /// The tokens of the sequences, to draft from.
    histories: Mutex<SharedHistories>,
    loaders: Mutex<Vec<Worker>>,
    connected: Mutex<Connected>,
    /// The turn to run: one program at a time. It keeps the staging memory of the last program for the
    /// next.
    turn: Mutex<Option<(Arc<Program>, Arc<Staging>)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executor {
    /// Starts the compute thread of the device `name`.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(name: &str, engine: Box<dyn Engine>) -> Result<Self, std::io::Error> {
        let mut loaders = Vec::new();
        if let Some(stream) = engine.streams() {
            for agent in 0..stream.agents() {
                let (lane, stream) = (Lane::Load(agent), stream.clone());
                let body = move |inbox: Receiver<Arc<Run>>| lanes::load(lane, &stream, &inbox);
                loaders.push(Worker::spawn(format!("load-{agent}-{name}"), lane, body)?);
            }
        }
        let ended = Arc::new(Mutex::new(EndedSequences::default()));
        let told = ended.clone();
        let compute = Worker::spawn(format!("compute-{name}"), Lane::Compute, move |inbox| {
            lanes::compute(engine, &inbox, &told)
        })?;
        Ok(Self {
            name: name.to_owned(),
            started: Instant::now(),
            compute: Mutex::new(compute),
            ended,
            histories: Mutex::default(),
            loaders: Mutex::new(loaders),
            connected: Mutex::new(Connected {
                epoch: Epoch::default(),
                ended: None,
                workers: Vec::new(),
                ends: Arc::default(),
                closers: Vec::new(),
                current: None,
            }),
            turn: Mutex::new(None),
        })
    }

    /// Replaces the links. A run over the old ones is aborted.
    pub fn connect(&self, epoch: Epoch, links: Links) {
        self.disconnect(None);
        let ends = Arc::new(Ends::of(links.senders, links.receivers));
        let mut workers = Vec::new();
        for lane in ends.lanes() {
            let own = ends.clone();
            let body = move |inbox: Receiver<Arc<Run>>| lanes::transfer(lane, &own, &inbox);
            let name = match lane {
                Lane::Send(peer) => format!("send-{peer}-{}", self.name),
                Lane::Receive(peer) => format!("receive-{peer}-{}", self.name),
                _ => continue,
            };
            // A link without its thread makes every run fail with `NoLink`, which says enough.
            workers.extend(Worker::spawn(name, lane, body).ok());
        }
        let mut connected = lock(&self.connected);
        let closers = links.closers;
        *connected = Connected { epoch, ended: None, workers, ends, closers, current: None };
    }

    /// Aborts what runs and closes all links. Returns when their threads are gone. With an epoch,
    /// only if its links are the ones that stand: whoever ends an epoch late ends no later one.
    pub fn disconnect(&self, epoch: Option<Epoch>) {
        let mut workers = {
            let mut connected = lock(&self.connected);
            if epoch.is_some_and(|epoch| epoch != connected.epoch) {
                return;
            }
            if let Some(run) = &connected.current {
                run.fail(RunError::Aborted);
            }
            for closer in connected.closers.drain(..) {
                closer.close();
            }
            let ended = Some(std::mem::take(&mut connected.epoch));
            connected.ended = ended.filter(|epoch| *epoch != Epoch::default()).or(connected.ended);
            connected.ends = Arc::default();
            std::mem::take(&mut connected.workers)
        };
        for worker in &mut workers {
            worker.join();
        }
    }

    /// Ends the executor, and gives the shard of its engine back, if that has one to give. Links are closed,
    /// and the memory that programs worked in is given back.
    pub fn into_shard(self) -> Option<Shard> {
        self.disconnect(None);
        self.end_loaders();
        let engine = lock(&self.compute).join()?;
        engine.into_shard()
    }

    fn end_loaders(&self) {
        for mut loader in lock(&self.loaders).drain(..) {
            loader.join();
        }
    }

    /// Nanoseconds on the clock of the timelines.
    pub fn clock(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Takes room for a sequence in these blocks of the cache, and tells the engine how its tokens are
    /// chosen.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn begin(&self, text: Sequence, blocks: Arc<[u32]>) -> Result<(), RunError> {
        lock(&self.histories).begin(&text);
        let (answer, answered) = sync_channel(1);
        lock(&self.compute).give(Work::Begin(Box::new((text, blocks)), answer))?;
        Ok(answered.recv().map_err(|_| RunError::Stopped)??)
    }

    /// Forgets a sequence, or without a slot all of them, once the current run is over: before anything else
    /// runs or begins. Does not wait for that.
    pub fn end(&self, slot: Option<u32>) {
        lock(&self.histories).end(slot);
        let mut gone = lock(&self.ended);
        match slot {
            Some(slot) => gone.slots.push(slot),
            None => *gone = EndedSequences { all: true, slots: Vec::new() },
        }
    }

    /// Runs one program to its end. Blocks; runs of other threads wait for their turn.
    ///
    /// # Errors
    /// See [`RunError`]. After a failed link or an abort the epoch's links are of no further use.
    pub fn run(&self, job: Job) -> Result<RunReport, RunError> {
        self.run_steps(job, &mut |_, _| RunStep::Done)
    }

    /// Takes out the tokens of sequences while these run.
    pub(crate) fn take_histories(&self, slots: impl Iterator<Item = u32>) -> Histories {
        lock(&self.histories).take(slots)
    }

    /// Puts the tokens of sequences back, but those of sequences that have ended since.
    pub(crate) fn put_histories(&self, histories: &mut Histories) {
        lock(&self.histories).put(histories);
    }

    /// Runs a program of which tokens are wanted, step after step, each as `next` binds it; that is called on
    /// this thread. Between steps nothing is allocated.
    ///
    /// # Errors
    /// As [`Executor::run`].
    pub fn run_steps(&self, job: Job, next: &mut Next<'_>) -> Result<RunReport, RunError> {
        let mut turn = lock(&self.turn);
        let program = job.program.clone();
        let staging = match turn.take() {
            Some((last, staging)) if Arc::ptr_eq(&last, &program) => staging,
            former => {
                let former = former.and_then(|(_, staging)| Arc::try_unwrap(staging).ok());
                Arc::new(Staging::new(&program, former))
            }
        };
        let choices = job.binding.shape.sampled().count();
        let mut told = vec![[0.0; TOKEN_VALUES as usize]; choices];
        let run = Arc::new(Run::new(job, staging.clone(), self.started));
        let started = self.clock();
        let mut steps = 0;
        let mut lanes = no_use(&program);
        let alone = self.alone(&run);
        let result = loop {
            steps += 1;
            if let Err(error) = self.run_lanes(&run, alone.as_ref()) {
                break Err(error);
            }
            run.add_use(&mut lanes);
            run.sampled_tokens(&mut told);
            match run.bind(|binding| next(&told, binding)) {
                RunStep::Done => break Ok(self.report(&run, started, steps, lanes)),
                RunStep::Next => run.advance(),
            }
        };
        lock(&self.connected).current = None;
        if result.is_ok() {
            *turn = Some((program, staging));
        }
        result
    }

    /// The ends of the links, where one thread is to drive all lanes; none where each lane has its own.
    fn alone(&self, run: &Run) -> Option<Arc<Ends>> {
        let ends = lock(&self.connected).ends.clone();
        let few = run.program.lanes.len() > 1 && run.has_single_rows();
        (few && ends.take_all_of(&run.program)).then_some(ends)
    }

    fn run_lanes(&self, run: &Arc<Run>, alone: Option<&Arc<Ends>>) -> Result<(), RunError> {
        if run.late() {
            self.close_links(run.epoch);
            return Err(RunError::Deadline);
        }
        {
            let mut connected = lock(&self.connected);
            let lanes = || run.program.lanes.iter().map(|(lane, _)| *lane);
            let peers = || lanes().filter(|lane| matches!(lane, Lane::Send(_) | Lane::Receive(_)));
            let needs_links = peers().next().is_some();
            if needs_links && connected.ended == Some(run.epoch) {
                return Err(RunError::Aborted);
            }
            if needs_links && connected.epoch != run.epoch {
                return Err(RunError::Stale { wanted: run.epoch, have: connected.epoch });
            }
            connected.current = Some(run.clone());
            let loaders = lock(&self.loaders);
            let worker = |lane: Lane| {
                let all = connected.workers.iter().chain(loaders.iter());
                all.into_iter().find(|w| w.lane == lane).ok_or(RunError::NoLink(lane))
            };
            let others = || lanes().filter(|lane| *lane != Lane::Compute);
            others().try_for_each(|lane| worker(lane).map(|_| ()))?;
            for lane in others().filter(|_| alone.is_none()) {
                run.enter();
                worker(lane)?.give(run.clone()).inspect_err(|_| run.leave())?;
            }
            run.enter();
            let work = Work::Run(run.clone(), alone.cloned());
            lock(&self.compute).give(work).inspect_err(|_| run.leave())?;
        }
        run.wait(|| self.close_links(run.epoch));
        run.check()
    }

    /// The report of a run that began at `started`, and went through its program `steps` times.
    fn report(&self, run: &Run, started: u64, steps: u64, lanes: Vec<LaneUse>) -> RunReport {
        let outcome = run.outcome();
        let (bytes_sent, bytes_received) = traffic(&run.program);
        RunReport {
            outputs: outcome.outputs,
            started,
            ended: self.clock(),
            lanes,
            timeline: outcome.timeline,
            bytes_sent: bytes_sent * steps,
            bytes_received: bytes_received * steps,
        }
    }

    /// Wakes lanes that are blocked in a link; `epoch` is over for this device.
    fn close_links(&self, epoch: Epoch) {
        let connected = lock(&self.connected);
        if connected.epoch == epoch {
            connected.closers.iter().for_each(|closer| closer.close());
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.disconnect(None);
        self.end_loaders();
        lock(&self.compute).join();
    }
}
