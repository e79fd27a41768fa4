//! One program on every worker: dispatch, results, and what happens when one of them fails.

use super::{
    Message, Shared,
    calls::{broke_off, gone},
};
use crate::{
    connection::Connection,
    drift::{Sample, disk_of, kernels_of},
    error::RequestError,
    fleet::{DeviceCost, DeviceRun, Dispatch, Readiness, Run, Task, blocking},
    membership::{Event, Index},
    placement::{self, Busy},
};
use galaxy_common::{
    CandidateCount, ClusterProfile, DeviceName, Epoch, Plan, SequenceNumber, Wanted,
};
use galaxy_engine::{
    compute::Inputs,
    generate::{Decoded, TokenEvent},
};
use galaxy_graph::{budget::SEQUENCES, program::TOKEN_VALUES};
use galaxy_proto::{
    convert::{self, bytes, segments},
    fault::{Fault, from_status},
    v1::{
        self, EndBurstRequest, ExecuteDone, ExecuteRequest, ForgetRequest, GeneratedStep,
        OutputPiece, execute_event,
    },
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::{mpsc::UnboundedSender, watch},
    task::JoinSet,
    time::Instant,
};
use tonic::Status;

/// How long we wait for the membership to name the device that is gone: when one device reports a broken link, that is
/// most often the device at its other end. Twice the time between pings, and some for the answer.
const VERDICT: Duration = Duration::from_millis(1500);

/// How much longer than we wait devices may take: the one that keeps the others waiting is named here, where it is
/// known who is done.
const LONGER: Duration = Duration::from_secs(1);

/// How long a device may take to hear that a burst is to end, which is over by then.
const BURST_ENDS: Duration = Duration::from_secs(2);
/// How long a device may take to give back the blocks of a sequence.
const FORGET: Duration = Duration::from_secs(60);

/// Why one device has no result.
enum Failure {
    /// The connection to the device is gone.
    Gone { attempt: u64, reason: String },
    /// The device said why it failed.
    Fault(Fault),
}

/// How long to wait where a limit is beyond what a clock can hold: a century.
const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Runs one program on every device. The caller holds the turn.
pub(super) async fn execute(
    shared: &Arc<Shared>,
    task: Task,
    limit: Duration,
) -> Result<Run, RequestError> {
    let begun = Instant::now();
    let until = begun.checked_add(limit).unwrap_or_else(|| begun + NEVER);
    // While this is held the plan stays.
    let Ok(_running) = tokio::time::timeout_at(until, shared.plan_lock.read()).await else {
        let reason = "the cluster moves to another plan".to_owned();
        return Err(RequestError::Unavailable { device: None, reason });
    };
    let mut readiness = shared.readiness.subscribe();
    let epoch = ready(&mut readiness, until).await?;
    // Blocks of another epoch may be others by now.
    let mut epochs = task.cached.iter().map(|cached| cached.epoch);
    if let Some(epoch) = epochs.find(|of| *of != epoch) {
        return Err(RequestError::CacheLost { epoch });
    }
    let (placement, profile) = {
        let table = shared.device_table();
        (table.placement.clone(), table.profile.clone())
    };
    let placement = placement.ok_or_else(|| RequestError::Internal {
        why: "the cluster is ready without a plan".to_owned(),
    })?;
    let (plan, ring) = (placement.plan.clone(), placement.ring.clone());
    let dispatch = dispatch(shared, &plan, profile, &task).await?;
    let sequence = SequenceNumber(shared.sequence.fetch_add(1, Ordering::SeqCst) + 1);
    let mut request = ExecuteRequest {
        epoch: epoch.0,
        sequence: sequence.0,
        digest: dispatch.digest.to_vec(),
        segments: segments(&task.shape),
        timeout_ms: u64::try_from(limit.saturating_add(LONGER).as_millis()).unwrap_or(u64::MAX),
        ..ExecuteRequest::default()
    };
    for (text, blocks) in task.cached.iter().filter_map(|cached| cached.room.as_ref()) {
        let begins = convert::sequence_to_wire(text, blocks);
        let begins = begins.map_err(|error| RequestError::Internal { why: error.to_string() })?;
        request.begins.push(begins);
    }
    request.burst = task.burst.as_ref().map(v1::Burst::from);
    let mut program = Program { shared, epoch, ring: &ring, dispatch: &dispatch, readiness };
    let calls = program.call(&request, &task)?;
    let several = task.burst.as_ref().is_some_and(|burst| burst.steps > 1);
    *shared.burst() = several.then_some((epoch, sequence));
    let results = program.results(calls, limit, until).await;
    *shared.burst() = None;
    let (devices, decoded) = results?;
    // Weights from disk are read anew for each step.
    program.observe(&devices, f64::from(decoded.steps.max(1)));
    Ok(Run { epoch, sequence, plan, devices, took: begun.elapsed(), decoded })
}

/// Waits until programs may run, and gives the epoch in which they may.
async fn ready(
    readiness: &mut watch::Receiver<Readiness>,
    until: Instant,
) -> Result<Epoch, RequestError> {
    loop {
        let state = readiness.borrow_and_update().clone();
        state.runs()?;
        let reason = match state {
            Readiness::Ready(epoch) => return Ok(epoch),
            Readiness::Moving { reason } | Readiness::Waiting { reason, .. } => reason,
        };
        if !matches!(tokio::time::timeout_at(until, readiness.changed()).await, Ok(Ok(()))) {
            return Err(RequestError::Unavailable { device: None, reason });
        }
    }
}

/// The dispatch of a task: what its programs are known by, and how long they are predicted to take.
async fn dispatch(
    shared: &Arc<Shared>,
    plan: &Arc<Plan>,
    profile: Option<Arc<ClusterProfile>>,
    task: &Task,
) -> Result<Arc<Dispatch>, RequestError> {
    // Profiles do not say yet how long a program takes that uses the KV cache.
    let (phase, plain) = (task.phase(), task.cached.is_empty());
    let (shared, plan, shape) = (shared.clone(), plan.clone(), task.shape.clone());
    blocking(move || {
        shared.lowered.dispatch(&plan, phase, &shape, |programs| {
            let profile = profile.as_ref()?;
            let (spec, pricer) = (shared.model.spec(), shared.planning.pricer);
            // Without a prediction there is no drift to be seen, and the program runs all the same.
            let mut busy = placement::busy(spec, &plan, profile, &shape, programs, pricer).ok()?;
            if !plain {
                busy.iter_mut().for_each(|busy| busy.kernels = 0.0);
            }
            busy.iter().any(|busy| *busy != Busy::default()).then_some(busy)
        })
    })
    .await?
}

/// A program that runs on all devices of a ring.
struct Program<'a> {
    shared: &'a Arc<Shared>,
    epoch: Epoch,
    ring: &'a [Index],
    dispatch: &'a Dispatch,
    readiness: watch::Receiver<Readiness>,
}

/// A device that is called, and the connection to it.
struct Callee {
    /// Which of the fleet it is.
    device: Index,
    /// The number of the attempt by which it was connected.
    attempt: u64,
    /// The connection that the attempt made.
    connection: Connection,
}

/// What a device answers: its results by output, and what they took.
type Answer = Result<(Vec<Vec<f32>>, ExecuteDone), Status>;
/// The calls to all devices: rank, attempt of the connection, answer.
type Calls = JoinSet<(usize, u64, Answer)>;

impl Program<'_> {
    /// Calls every device, each with the inputs that it needs.
    fn call(&self, request: &ExecuteRequest, task: &Task) -> Result<Calls, RequestError> {
        let connections: Vec<_> = {
            let table = self.shared.device_table();
            let entries = self.ring.iter().map(|device| (*device, &table.entries[*device]));
            entries.map(|(device, e)| (device, e.attempt, e.connection.clone())).collect()
        };
        let spec = self.shared.model.spec();
        let labels = spec.head.labels();
        let mut calls = JoinSet::new();
        for (rank, (device, attempt, connection)) in connections.into_iter().enumerate() {
            let connection = connection.ok_or_else(|| ended(self.shared, self.epoch, device))?;
            let callee = Callee { device, attempt, connection };
            let sizes = self.dispatch.outputs[rank].iter().map(|o| {
                let (rows, width) = o.extent(spec.hidden, labels);
                rows as usize * width as usize
            });
            // One of them sends each token as it is generated, the others report theirs at the end.
            let tell = if rank == 0 { task.listeners() } else { Vec::new() };
            let (sizes, shared) = (sizes.collect(), self.shared.clone());
            // Pixels go to the rows' owners.
            let burst =
                request.burst.clone().map(|b| v1::Burst { report_steps: !tell.is_empty(), ..b });
            let request = ExecuteRequest { burst, ..request.clone() };
            let request = match task.inputs.part(spec, self.dispatch.embedded[rank]) {
                Inputs::Tokens(tokens) => ExecuteRequest { tokens: tokens.to_vec(), ..request },
                Inputs::Typed { tokens, types } => {
                    let (tokens, types) = (tokens.to_vec(), types.to_vec());
                    ExecuteRequest { tokens, types, ..request }
                }
                Inputs::Patches { first, values } => {
                    ExecuteRequest { patches: bytes(&values), first_row: first, ..request }
                }
            };
            calls.spawn(async move {
                let run = run_on(&shared, callee, request, sizes, tell);
                (rank, attempt, run.await)
            });
        }
        Ok(calls)
    }

    /// Waits for all devices. Gives what each returned, and what the burst has decoded.
    async fn results(
        &mut self,
        mut calls: Calls,
        limit: Duration,
        until: Instant,
    ) -> Result<(Vec<DeviceRun>, Decoded), RequestError> {
        let mut results: Vec<Option<DeviceRun>> = vec![None; self.ring.len()];
        let (mut tokens, mut decoded) = (None, Decoded::default());
        loop {
            let (rank, attempt, answer) = tokio::select! {
                joined = calls.join_next() => match joined {
                    None => break,
                    Some(Ok(done)) => done,
                    Some(Err(error)) => {
                        self.spoil(self.ring[0], "a call broke off").await;
                        return Err(RequestError::Internal { why: format!("a call broke off: {error}") });
                    }
                },
                _ = left(&mut self.readiness, self.epoch) => {
                    return Err(ended(self.shared, self.epoch, self.ring[0]));
                }
                () = tokio::time::sleep_until(until) => {
                    let late = results.iter().position(Option::is_none).unwrap_or(0);
                    let reason = format!("it has no result after {limit:?}, the limit of a program");
                    return Err(self.failed(self.ring[late], reason).await);
                }
            };
            let device = self.ring[rank];
            let (values, done) = match answer {
                Ok(given) => given,
                Err(status) => {
                    let failure = if gone(&status) {
                        Failure::Gone { attempt, reason: broke_off(&status) }
                    } else {
                        Failure::Fault(from_status(&status))
                    };
                    let (shared, epoch) = (self.shared, self.epoch);
                    return Err(verdict(shared, &mut self.readiness, epoch, device, failure).await);
                }
            };
            decoded = decoded_of(&done);
            if *tokens.get_or_insert_with(|| done.tokens.clone()) != done.tokens {
                let reason = "it has sampled other tokens than another device".to_owned();
                return Err(self.failed(device, reason).await);
            }
            let name = self.shared.device(device).name.clone();
            let outputs = self.dispatch.outputs[rank].clone();
            results[rank] = Some(DeviceRun { name, outputs, values, cost: cost(&done) });
        }
        let devices: Option<Vec<_>> = results.into_iter().collect();
        let missing = || RequestError::Internal { why: "a device has no result".to_owned() };
        Ok((devices.ok_or_else(missing)?, decoded))
    }

    /// Reports to the driver how long kernels and loaders worked, beside what was predicted.
    fn observe(&self, devices: &[DeviceRun], steps: f64) {
        let Some(predicted) = &self.dispatch.busy else { return };
        let samples = |((device, run), busy): ((&Index, &DeviceRun), &Busy)| {
            let DeviceCost { compute_busy_ns, disk_busy_ns, .. } = run.cost;
            let (kernels, disk) = (compute_busy_ns as f64, disk_busy_ns as f64);
            [
                Sample { track: kernels_of(*device), measured: kernels, predicted: busy.kernels },
                Sample { track: disk_of(*device), measured: disk, predicted: busy.disk * steps },
            ]
        };
        let samples = self.ring.iter().zip(devices).zip(predicted).flat_map(samples).collect();
        // A driver that does not keep up misses one.
        drop(self.shared.messages.try_send(Message::Ran { epoch: self.epoch, samples }));
    }

    async fn spoil(&mut self, device: Index, reason: &str) {
        spoil(self.shared, &mut self.readiness, self.epoch, device, reason).await;
    }

    /// Ends the epoch because of a device, and gives the error.
    async fn failed(&mut self, device: Index, reason: String) -> RequestError {
        self.spoil(device, &reason).await;
        let device = self.shared.device(device).name.clone();
        RequestError::DeviceFailed { device, reason, retryable: true }
    }
}

/// What a device reports to have decoded. The shape of the last step is taken only if it is one that drafts can lead
/// to: few segments, of one row each.
fn decoded_of(done: &ExecuteDone) -> Decoded {
    let candidates = |wanted: &i32| match convert::wanted(*wanted) {
        Ok(Wanted::Token(candidates)) => candidates,
        // A guess that costs little where it is wrong.
        _ => CandidateCount::Few,
    };
    let candidate_counts = done.wanted.iter().map(candidates).collect();
    let few = (1..=SEQUENCES as usize).contains(&done.last.len());
    let last = few.then(|| convert::shape(done.last.clone(), done.last.len()).ok()).flatten();
    let last = last.filter(|shape| shape.rows() as usize == shape.segments().len());
    let (counts, steps, rows) = (done.counts.clone(), done.steps, done.rows);
    Decoded { counts, candidate_counts, steps, rows, last }
}

/// The devices of the plan in force, and the connections to them.
fn connections(shared: &Shared) -> Vec<(Index, Option<Connection>)> {
    let table = shared.device_table();
    let ring = table.placement.iter().flat_map(|placement| &placement.ring);
    ring.map(|device| (*device, table.entries[*device].connection.clone())).collect()
}

/// Asks the burst that runs to end, once. A device that does not hear it ends with the others, or they with it.
pub(super) fn end_burst(shared: &Shared) {
    let Some((epoch, sequence)) = shared.burst().take() else { return };
    let request = EndBurstRequest { epoch: epoch.0, sequence: sequence.0 };
    for mut connection in connections(shared).into_iter().filter_map(|(_, connection)| connection) {
        tokio::spawn(async move {
            drop(tokio::time::timeout(BURST_ENDS, connection.end_burst(request)).await);
        });
    }
}

/// Gives back the blocks of a sequence on every device of an epoch. When this returns, all devices have heard it, or
/// the epoch has ended, and with it all that they cached.
pub(super) async fn forget(shared: &Shared, epoch: Epoch, slot: u32) {
    let mut readiness = shared.readiness.subscribe();
    if *readiness.borrow_and_update() != Readiness::Ready(epoch) {
        return;
    }
    let told = futures_util::future::join_all(connections(shared).into_iter().map(
        |(device, connection)| async move {
            let request = ForgetRequest { epoch: epoch.0, slot };
            // Asked once, however long it takes: a call that is left early may not have been heard.
            let mut connection = connection?;
            let answer = tokio::time::timeout(FORGET, connection.forget(request)).await;
            (!matches!(answer, Ok(Ok(_)))).then_some(device)
        },
    ));
    let told = tokio::select! {
        told = told => told,
        () = left(&mut readiness, epoch) => return,
    };
    if let Some(device) = told.into_iter().flatten().next() {
        // One that is gone ends the epoch by itself.
        drop(tokio::time::timeout(VERDICT, left(&mut readiness, epoch)).await);
        if *readiness.borrow() == Readiness::Ready(epoch) {
            let reason = "it does not give back the room of a sequence";
            spoil(shared, &mut readiness, epoch, device, reason).await;
        }
    }
}

/// Waits until programs of `epoch` may not run any more.
async fn left(readiness: &mut watch::Receiver<Readiness>, epoch: Epoch) {
    // Without a sender the fleet is gone, and the epoch with it.
    drop(readiness.wait_for(|r| *r != Readiness::Ready(epoch)).await);
}

/// Tells the driver that the links of an epoch are of no further use, and waits until the epoch is over: whoever has
/// the turn next must not begin in it.
async fn spoil(
    shared: &Shared,
    readiness: &mut watch::Receiver<Readiness>,
    epoch: Epoch,
    device: Index,
    reason: &str,
) {
    shared.tell(Event::Spoiled { epoch, device, reason: reason.to_owned() }).await;
    drop(tokio::time::timeout(VERDICT, left(readiness, epoch)).await);
}

/// The error of a program whose epoch has ended.
fn ended(shared: &Shared, epoch: Epoch, fallback: Index) -> RequestError {
    let table = shared.device_table();
    let (device, reason) = match &table.ended {
        Some((of, device, reason)) if *of == epoch => (*device, reason.clone()),
        _ => (fallback, "it is not connected".to_owned()),
    };
    RequestError::DeviceLost { device: shared.device(device).name.clone(), reason }
}

/// Finds out whose fault a failure is, and ends the epoch: the other devices wait for tiles that
/// will not come.
async fn verdict(
    shared: &Shared,
    readiness: &mut watch::Receiver<Readiness>,
    epoch: Epoch,
    device: Index,
    failure: Failure,
) -> RequestError {
    match failure {
        Failure::Gone { attempt, reason } => {
            shared.tell(Event::Broken { device, attempt, reason }).await;
            drop(tokio::time::timeout(VERDICT, left(readiness, epoch)).await);
            ended(shared, epoch, device)
        }
        Failure::Fault(fault) => {
            let link = matches!(fault.code.as_str(), "link_lost" | "aborted");
            if link && tokio::time::timeout(VERDICT, left(readiness, epoch)).await.is_ok() {
                return ended(shared, epoch, device);
            }
            spoil(shared, readiness, epoch, device, &fault.message).await;
            let blamed = DeviceName::new(fault.device.clone()).ok();
            let known = blamed.filter(|b| shared.cluster().devices.iter().any(|d| d.name == *b));
            let device = known.unwrap_or_else(|| shared.device(device).name.clone());
            let Fault { message: reason, retryable, code, .. } = fault;
            match code.as_str() {
                "draining" => RequestError::Unavailable { device: Some(device), reason },
                _ => RequestError::DeviceFailed { device, reason, retryable: retryable || link },
            }
        }
    }
}

/// Runs a program on a device. Gives its outputs, of these sizes, and its report; `tell` hears of tokens as they come,
/// one listener for each sequence.
async fn run_on(
    shared: &Shared,
    callee: Callee,
    request: ExecuteRequest,
    sizes: Vec<usize>,
    tell: Vec<UnboundedSender<TokenEvent>>,
) -> Answer {
    let Callee { device, attempt, mut connection } = callee;
    let mut values: Vec<Vec<f32>> = sizes.iter().map(|n| Vec::with_capacity(*n)).collect();
    let goals = request.burst.as_ref().map_or(&[][..], |burst| &burst.goals);
    let most: Vec<u32> = goals.iter().map(|goal| goal.count).collect();
    let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); tell.len()];
    let mut events = connection.execute(request).await?.into_inner();
    while let Some(event) = events.message().await? {
        match event.event {
            Some(execute_event::Event::Piece(piece)) => {
                shared.tell(Event::Heard { device, attempt }).await;
                take(&mut values, &sizes, &piece)?;
            }
            Some(execute_event::Event::Step(step)) => {
                shared.tell(Event::Heard { device, attempt }).await;
                let step = token_events(&step, shared.model.spec().vocabulary, tell.len())?;
                for (at, told) in step {
                    tokens[at].push(told[0] as u32);
                    if tokens[at].len() > most.get(at).map_or(0, |most| *most as usize) {
                        return Err(short());
                    }
                    // Whoever does not listen any more misses nothing.
                    tell[at].send(told).unwrap_or_default();
                }
            }
            Some(execute_event::Event::Done(done)) => {
                // To the end of the stream: one that is left before it must be reset.
                drop(events.message().await);
                let whole = values.iter().zip(&sizes).all(|(v, n)| v.len() == *n);
                // What was sent token by token is what the device reports at the end.
                let counts = tokens.iter().map(|tokens| tokens.len() as u32);
                let same = tell.is_empty()
                    || tokens.concat() == done.tokens && counts.eq(done.counts.iter().copied());
                let all: u64 = done.counts.iter().map(|count| u64::from(*count)).sum();
                let counted = all == done.tokens.len() as u64;
                return if whole && same && counted { Ok((values, done)) } else { Err(short()) };
            }
            None => {}
        }
    }
    Err(Status::unavailable("it broke off before its result was complete"))
}

fn short() -> Status {
    Status::data_loss("its result is not what the program says")
}

/// The tokens of a step, each with the index of its sequence. Refuses counts for another number of sequences, and
/// tokens that are not in the vocabulary.
pub(crate) fn token_events(
    GeneratedStep { counts, tokens }: &GeneratedStep,
    vocabulary: u32,
    sequences: usize,
) -> Result<Vec<(usize, TokenEvent)>, Status> {
    let values = convert::floats(tokens);
    let (told, rest) = values.as_chunks::<{ TOKEN_VALUES as usize }>();
    // Ids of all vocabularies are whole in f32.
    let known = |told: &TokenEvent| (0.0..vocabulary as f32).contains(&told[0]);
    let all: u64 = counts.iter().map(|count| u64::from(*count)).sum();
    let whole = rest.is_empty() && tokens.len().is_multiple_of(4) && told.len() as u64 == all;
    if !whole || counts.len() != sequences || !told.iter().all(known) {
        return Err(short());
    }
    let of = counts.iter().enumerate().flat_map(|(at, n)| std::iter::repeat_n(at, *n as usize));
    Ok(of.zip(told.iter().copied()).collect())
}

/// Appends a piece to its output. Pieces of an output come in order.
pub(crate) fn take(
    values: &mut [Vec<f32>],
    sizes: &[usize],
    piece: &OutputPiece,
) -> Result<(), Status> {
    let index = piece.output as usize;
    let (Some(value), Some(&size)) = (values.get_mut(index), sizes.get(index)) else {
        return Err(short());
    };
    let fits = piece.data.len().is_multiple_of(4)
        && piece.offset == value.len() as u64 * 4
        && value.len() + piece.data.len() / 4 <= size;
    if !fits {
        return Err(short());
    }
    let floats = piece.data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    value.extend(floats);
    Ok(())
}

fn cost(done: &ExecuteDone) -> DeviceCost {
    let compute = done.lanes.iter().find(|l| l.lane == "compute");
    let loaders = done.lanes.iter().filter(|l| l.lane.starts_with("load "));
    DeviceCost {
        total_ns: done.seconds_ns,
        compute_busy_ns: compute.map_or(0, |l| l.busy_ns),
        disk_busy_ns: loaders.map(|l| l.busy_ns).max().unwrap_or(0),
        awaiting_receive_ns: compute.map_or(0, |l| l.awaiting_receive_ns),
        bytes_sent: done.bytes_sent,
        bytes_received: done.bytes_received,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(output: u32, offset: u64, values: &[f32]) -> OutputPiece {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        OutputPiece { output, offset, data }
    }

    #[test]
    fn malformed_tokens_from_a_worker_are_refused() {
        let token = |id: f32| {
            let mut told = vec![0.0; TOKEN_VALUES as usize];
            told[0] = id;
            bytes(&told)
        };
        let step = |counts: &[u32], tokens: &[u8]| {
            let (counts, tokens) = (counts.to_vec(), tokens.to_vec().into());
            GeneratedStep { counts, tokens }
        };
        for bad in [token(97.0), token(-1.0), token(f32::NAN), vec![0; 4], Vec::new()] {
            assert!(token_events(&step(&[1], &bad), 97, 1).is_err(), "{bad:?}");
        }
        let three = [token(96.0), token(0.0), token(5.0)].concat();
        let good =
            token_events(&step(&[2, 0, 1], &three), 97, 3).expect("tokens of the vocabulary");
        let good: Vec<_> = good.iter().map(|(at, told)| (*at, told[0])).collect();
        assert_eq!(good, [(0, 96.0), (0, 0.0), (2, 5.0)]);
        let cut = &three[..three.len() - 1];
        let huge = [u32::MAX, u32::MAX, 5];
        for (counts, tokens, sequences) in [
            (&[1, 1, 1][..], &three[..], 2),
            (&[1, 2], &three, 3),
            (&[1, 1], &three, 2),
            (&[3, 3], &three, 2),
            (&[1, 1, 1], cut, 3),
            (&huge, &three, 3),
            (&[], &three, 0),
        ] {
            assert!(
                token_events(&step(counts, tokens), 97, sequences).is_err(),
                "{counts:?} {sequences}"
            );
        }
        let unknown = [token(1.0), token(97.0)].concat();
        assert!(token_events(&step(&[1, 1], &unknown), 97, 2).is_err(), "one that is not known");
    }

    #[test]
    fn output_pieces_that_do_not_fit_their_output_are_refused() {
        let mut values = vec![Vec::new(), Vec::new()];
        let sizes = [3, 0];
        assert!(take(&mut values, &sizes, &piece(0, 0, &[1.0, 2.0])).is_ok());
        assert!(take(&mut values, &sizes, &piece(0, 0, &[1.0])).is_err(), "out of order");
        assert!(take(&mut values, &sizes, &piece(0, 8, &[1.0, 2.0])).is_err(), "too long");
        assert!(take(&mut values, &sizes, &piece(1, 0, &[1.0])).is_err(), "more than none");
        assert!(take(&mut values, &sizes, &piece(9, 0, &[])).is_err(), "no such output");
        assert!(take(&mut values, &sizes, &piece(0, 8, &[3.0])).is_ok());
        assert_eq!(values[0], [1.0, 2.0, 3.0]);
    }
}
