//! The threads of the lanes: compute, links and loaders.

use super::{
    RunError, lock,
    run::{Filled, Run},
};
use crate::{
    compute::{ComputeError, Engine, Staged},
    link::{LinkError, LinkReceiver, LinkSender},
    sampler::Sequence,
    staging::InUse,
    stream::{Stream, StreamError},
};
use galaxy_common::{FrameHeader, Rank};
use galaxy_graph::{
    Program,
    program::{Lane, Memory, OpKind, Operation, Region, TOKEN_VALUES},
};
use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, SyncSender},
    },
};

/// Runs the operations of one lane of each run that comes, until the executor hangs up.
fn drive(
    lane: Lane,
    inbox: &Receiver<Arc<Run>>,
    mut step: impl FnMut(&Run, &Operation) -> Result<(), RunError>,
) {
    while let Ok(run) = inbox.recv() {
        follow(lane, &run, &mut step);
    }
}

/// Runs the operations of a lane on this thread, and has the lane leave the run, whatever becomes of
/// it.
fn guarded(lane: Lane, run: &Run, body: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        run.fail(RunError::Program(format!("lane {lane:?} panicked")));
    }
    run.leave();
}

/// Runs the operations of one lane of a run.
fn follow(lane: Lane, run: &Run, step: &mut impl FnMut(&Run, &Operation) -> Result<(), RunError>) {
    guarded(lane, run, || {
        let lanes = &run.program.lanes;
        let Some(index) = lanes.iter().position(|(l, _)| *l == lane) else { return };
        for &id in &lanes[index].1 {
            let op = run.program.operation(id);
            let Ok(()) = run.reach(index, id) else { return };
            let begin = run.now();
            if let Err(error) = step(run, op) {
                return run.fail(error);
            }
            run.finish(index, id, begin);
        }
    });
}

/// Runs the operations of all lanes on this thread. What can be computed or sent goes first: only where
/// nothing else is left does it wait for a peer.
fn follow_all(run: &Run, step: &mut impl FnMut(&Run, Lane, &Operation) -> Result<(), RunError>) {
    guarded(Lane::Compute, run, || {
        while let Some((index, id)) = run.next() {
            let begin = run.now();
            let lane = run.program.lanes[index].0;
            if let Err(error) = step(run, lane, run.program.operation(id)) {
                return run.fail(error);
            }
            run.finish(index, id, begin);
        }
        if run.stuck() {
            run.fail(RunError::Program("its operations wait for each other".to_owned()));
        }
    });
}

fn in_use(error: InUse) -> RunError {
    RunError::Program(error.to_string())
}

/// What the compute lane is asked to do.
pub(super) enum Work {
    /// Run its operations, and those of all other lanes where it gets the ends of their links.
    Run(Arc<Run>, Option<Arc<Ends>>),
    /// Take room for a sequence in these blocks, and answer whether there was any.
    Begin(Box<(Sequence, Arc<[u32]>)>, SyncSender<Result<(), ComputeError>>),
}

/// The sequences that have ended: the compute lane gives back their room before it does anything else.
#[derive(Default)]
pub(super) struct EndedSequences {
    /// Whether all sequences that there were have ended.
    pub(super) all: bool,
    /// The slots of sequences that have ended one by one.
    pub(super) slots: Vec<u32>,
}

/// The compute lane. It gives its engine back when the executor hangs up.
pub(super) fn compute(
    mut engine: Box<dyn Engine>,
    inbox: &Receiver<Work>,
    gone: &Mutex<EndedSequences>,
) -> Box<dyn Engine> {
    let stream = engine.streams();
    let mut prepared: Option<Arc<galaxy_graph::Program>> = None;
    while let Ok(work) = inbox.recv() {
        let EndedSequences { all, slots } = std::mem::take(&mut *lock(gone));
        if all {
            engine.end_all();
        }
        slots.into_iter().for_each(|slot| engine.end(slot));
        let (run, ends) = match work {
            Work::Run(run, ends) => (run, ends),
            Work::Begin(begins, answer) => {
                // The caller may be gone.
                drop(answer.send(engine.begin(&begins.0, &begins.1)));
                continue;
            }
        };
        let mut compute = |run: &Run, op: &Operation| {
            // Given back only by a step that succeeds: after any other the engine is prepared anew.
            let program = match prepared.take().filter(|p| Arc::ptr_eq(p, &run.program)) {
                Some(program) => program,
                None => {
                    engine.prepare(&run.program.slots)?;
                    run.program.clone()
                }
            };
            kernel(engine.as_mut(), stream.as_deref(), run, op)?;
            prepared = Some(program);
            Ok(())
        };
        match ends {
            None => follow(Lane::Compute, &run, &mut compute),
            Some(ends) => follow_all(&run, &mut |run, lane, op| match lane {
                Lane::Compute => compute(run, op),
                lane => ends.transfer(lane, run, op),
            }),
        }
        if run.has_failed() {
            prepared = None;
        }
    }
    engine
}

fn kernel(
    engine: &mut dyn Engine,
    stream: Option<&Stream>,
    run: &Run,
    op: &Operation,
) -> Result<(), RunError> {
    let program = &run.program;
    let staged = |regions: &[Region]| {
        regions.iter().copied().find(|r| program.tensor(r.tensor).memory == Memory::Staging)
    };
    let slot = |region: &Region| program.tensor(region.tensor).slot;
    let size = |region: &Region| program.region_bytes(region) as usize;
    let (read, write) = (staged(&op.reads), staged(&op.writes));
    let weights = program.weights(op).zip(stream);
    let weights = weights.map(|(region, stream)| stream.piece(place(program, &region)));
    let weights = weights.transpose().map_err(StreamError::from)?;
    let input = read.map(|r| run.staging.read(slot(&r))).transpose().map_err(in_use)?;
    let mut output = write.map(|w| run.staging.take(slot(&w))).transpose().map_err(in_use)?;
    let told = match op.kind {
        OpKind::Emit { output } => {
            let (output, index) = (program.outputs[output as usize], output as usize);
            let Some(region) = op.reads.first() else {
                run.emit_token(index, output.segment as usize);
                return Ok(());
            };
            let (rows, width) = output.extent(region.columns.len(), engine.labels());
            Some((Filled::Output(index), rows as usize * width as usize))
        }
        OpKind::Sample => {
            let choices = run.binding().shape.sampled().count();
            Some((Filled::SampledTokens, choices * TOKEN_VALUES as usize))
        }
        _ => None,
    };
    let mut emitted = told.map(|(what, values)| run.take(what, values));
    let result = engine.run(
        program,
        op,
        &run.binding(),
        Staged {
            input: input.as_ref().zip(read.as_ref()).map(|(tile, r)| tile.bytes(size(r))),
            output: output
                .as_mut()
                .and_then(Arc::get_mut)
                .zip(write.as_ref())
                .map(|(tile, w)| tile.bytes_mut(size(w))),
            weights: weights.as_deref(),
            emitted: emitted.as_deref_mut(),
        },
    );
    drop(weights);
    if let (Some(tile), Some(write)) = (output, write) {
        run.staging.put(slot(&write), tile);
    }
    if let (Some((what, _)), Some(values)) = (told, emitted) {
        run.put(what, values);
    }
    result.map_err(RunError::from)
}

/// Where the tensor of a region is in the buffer for weights, in bytes.
fn place(program: &Program, region: &Region) -> Range<u64> {
    let slot = program.slots[program.tensor(region.tensor).slot.0 as usize];
    slot.start..slot.start + slot.bytes
}

/// A lane of a loader, which reads pieces from disk.
pub(super) fn load(lane: Lane, stream: &Stream, inbox: &Receiver<Arc<Run>>) {
    drive(lane, inbox, |run, op| {
        let (OpKind::Load { piece }, Some(region)) = (op.kind, op.writes.first()) else {
            return Err(RunError::Program(format!("{:?} is no load", op.kind)));
        };
        Ok(stream.load(piece as usize, place(&run.program, region))?)
    });
}

fn header(run: &Run, op: &Operation, region: &Region) -> FrameHeader {
    let (OpKind::Send { transfer, tile } | OpKind::Receive { transfer, tile }) = op.kind else {
        return FrameHeader {
            epoch: run.epoch,
            sequence: run.sequence,
            transfer: u32::MAX,
            tile: 0,
            wire: run.program.wire,
            payload: 0,
        };
    };
    FrameHeader {
        epoch: run.epoch,
        sequence: run.sequence,
        transfer: run.transfer(transfer),
        tile,
        wire: run.program.wire,
        // Lowering refuses tiles that a frame cannot carry.
        payload: run.program.region_bytes(region) as u32,
    }
}

/// The ends of all links. Each is used by one thread at a time, by the order of a program, so that a lock
/// costs next to nothing.
#[derive(Default)]
pub(super) struct Ends {
    senders: Vec<(Rank, Mutex<Box<dyn LinkSender>>)>,
    receivers: Vec<(Rank, Mutex<Box<dyn LinkReceiver>>)>,
    /// Bytes of payload that every sender takes without waiting for its receiver.
    taken: u64,
}

impl Ends {
    pub(super) fn of(
        senders: Vec<(Rank, Box<dyn LinkSender>)>,
        receivers: Vec<(Rank, Box<dyn LinkReceiver>)>,
    ) -> Self {
        let taken = senders.iter().map(|(_, sender)| sender.takes()).min().unwrap_or(0);
        let senders = senders.into_iter().map(|(peer, end)| (peer, Mutex::new(end))).collect();
        let receivers = receivers.into_iter().map(|(peer, end)| (peer, Mutex::new(end))).collect();
        Self { senders, receivers, taken }
    }

    /// The lanes of these ends.
    pub(super) fn lanes(&self) -> impl Iterator<Item = Lane> {
        let senders = self.senders.iter().map(|(peer, _)| Lane::Send(*peer));
        senders.chain(self.receivers.iter().map(|(peer, _)| Lane::Receive(*peer)))
    }

    /// Whether links take all that a program sends to a peer in one transfer, so that nobody has to receive
    /// meanwhile.
    pub(super) fn take_all_of(&self, program: &Program) -> bool {
        let fits = |(lane, ids): &(Lane, Vec<_>)| {
            if !matches!(lane, Lane::Send(_)) {
                return matches!(lane, Lane::Compute | Lane::Receive(_));
            }
            let (mut last, mut bytes) = (None, 0);
            ids.iter().all(|id| {
                let op = program.operation(*id);
                if let OpKind::Send { transfer, .. } = op.kind {
                    if last.replace(transfer) != Some(transfer) {
                        bytes = 0;
                    }
                    bytes += op.reads.iter().map(|r| program.region_bytes(r)).sum::<u64>();
                }
                bytes <= self.taken
            })
        };
        self.taken > 0 && program.lanes.iter().all(fits)
    }

    /// Sends or receives the tile of an operation.
    fn transfer(&self, lane: Lane, run: &Run, op: &Operation) -> Result<(), RunError> {
        let none = || RunError::NoLink(lane);
        match lane {
            Lane::Send(peer) => {
                let end = self.senders.iter().find(|(to, _)| *to == peer).ok_or_else(none)?;
                send(peer, run, op, lock(&end.1).as_mut())
            }
            Lane::Receive(peer) => {
                let end = self.receivers.iter().find(|(from, _)| *from == peer).ok_or_else(none)?;
                receive(peer, run, op, lock(&end.1).as_mut())
            }
            _ => Err(none()),
        }
    }
}

fn link_error(peer: Rank) -> impl FnOnce(LinkError) -> RunError {
    move |source| RunError::Link { peer, source }
}

/// A lane of a link, which sends or receives tiles.
pub(super) fn transfer(lane: Lane, ends: &Ends, inbox: &Receiver<Arc<Run>>) {
    drive(lane, inbox, |run, op| ends.transfer(lane, run, op));
}

/// Sends the tile of activations of an operation to the peer of its lane, as one frame.
fn send(peer: Rank, run: &Run, op: &Operation, link: &mut dyn LinkSender) -> Result<(), RunError> {
    let region = op.reads[0];
    let tile = run.staging.read(run.program.tensor(region.tensor).slot).map_err(in_use)?;
    let header = header(run, op, &region);
    link.send(&header, tile.bytes(header.payload as usize)).map_err(link_error(peer))
}

fn receive(
    peer: Rank,
    run: &Run,
    op: &Operation,
    link: &mut dyn LinkReceiver,
) -> Result<(), RunError> {
    let region = op.writes[0];
    let slot = run.program.tensor(region.tensor).slot;
    let mut tile = run.staging.take(slot).map_err(in_use)?;
    let header = header(run, op, &region);
    let got = match Arc::get_mut(&mut tile) {
        Some(own) => {
            link.receive(&header, own.bytes_mut(header.payload as usize)).map_err(link_error(peer))
        }
        None => Err(in_use(InUse(slot))),
    };
    run.staging.put(slot, tile);
    got
}
