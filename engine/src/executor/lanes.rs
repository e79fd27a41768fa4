//! The threads of the lanes.

use super::{
    RunError,
    run::{Run, Told},
};
use crate::{
    choose::Text,
    compute::{ComputeError, Engine, Staged},
    link::{LinkError, LinkReceiver, LinkSender},
    staging::InUse,
};
use galaxy_common::{FrameHeader, Rank};
use galaxy_graph::program::{Lane, Memory, OpKind, Operation, Region, TOKEN_VALUES};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
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

/// Runs the operations of one lane of a run.
fn follow(lane: Lane, run: &Run, step: &mut impl FnMut(&Run, &Operation) -> Result<(), RunError>) {
    let body = AssertUnwindSafe(|| {
        let lanes = &run.program.lanes;
        let Some(index) = lanes.iter().position(|(l, _)| *l == lane) else { return };
        for &id in &lanes[index].1 {
            let op = run.program.operation(id);
            let Ok(()) = run.reach(index, id) else { return };
            let begin = run.now();
            if let Err(error) = step(run, op) {
                run.fail(error);
                return;
            }
            run.finish(index, id, begin);
        }
    });
    if catch_unwind(body).is_err() {
        run.fail(RunError::Program(format!("lane {lane:?} panicked")));
    }
    run.leave();
}

fn in_use(error: InUse) -> RunError {
    RunError::Program(error.to_string())
}

/// What the compute lane is asked for.
pub(super) enum Work {
    /// To run its operations.
    Run(Arc<Run>),
    /// To take room for a text, and to say whether there was any.
    Begin(Box<Text>, SyncSender<Result<(), ComputeError>>),
    /// To forget a text, or all.
    End(Option<u32>),
}

/// The compute lane. It leaves its engine.
pub(super) fn compute(mut engine: Box<dyn Engine>, inbox: &Receiver<Work>) -> Box<dyn Engine> {
    let mut prepared: Option<Arc<galaxy_graph::Program>> = None;
    while let Ok(work) = inbox.recv() {
        let run = match work {
            Work::Run(run) => run,
            Work::Begin(text, answer) => {
                // Whoever asked may have gone.
                drop(answer.send(engine.begin(&text)));
                continue;
            }
            Work::End(Some(slot)) => {
                engine.end(slot);
                continue;
            }
            Work::End(None) => {
                engine.end_all();
                continue;
            }
        };
        follow(Lane::Compute, &run, &mut |run, op| {
            // Given back only by a step that succeeds: after any other the engine is prepared anew.
            let program = match prepared.take().filter(|p| Arc::ptr_eq(p, &run.program)) {
                Some(program) => program,
                None => {
                    engine.prepare(&run.program.slots)?;
                    run.program.clone()
                }
            };
            kernel(engine.as_mut(), run, op)?;
            prepared = Some(program);
            Ok(())
        });
    }
    engine
}

fn kernel(engine: &mut dyn Engine, run: &Run, op: &Operation) -> Result<(), RunError> {
    let program = &run.program;
    let staged = |regions: &[Region]| {
        regions.iter().copied().find(|r| program.tensor(r.tensor).memory == Memory::Staging)
    };
    let slot = |region: &Region| program.tensor(region.tensor).slot;
    let size = |region: &Region| program.region_bytes(region) as usize;
    let (read, write) = (staged(&op.reads), staged(&op.writes));
    let input = read.map(|r| run.staging.read(slot(&r))).transpose().map_err(in_use)?;
    let mut output = write.map(|w| run.staging.take(slot(&w))).transpose().map_err(in_use)?;
    let told = match op.kind {
        OpKind::Emit { output } => {
            let (output, index) = (program.outputs[output as usize], output as usize);
            let Some(region) = op.reads.first() else {
                run.tell(index, output.segment as usize);
                return Ok(());
            };
            let (rows, width) = output.extent(region.columns.len(), engine.labels());
            Some((Told::Output(index), rows as usize * width as usize))
        }
        OpKind::Choose { segment } => Some((Told::Choice(segment as usize), TOKEN_VALUES as usize)),
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
            emitted: emitted.as_deref_mut(),
        },
    );
    if let (Some(tile), Some(write)) = (output, write) {
        run.staging.put(slot(&write), tile);
    }
    if let (Some((what, _)), Some(values)) = (told, emitted) {
        run.put(what, values);
    }
    result.map_err(RunError::from)
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

fn link_error(peer: Rank) -> impl FnOnce(LinkError) -> RunError {
    move |source| RunError::Link { peer, source }
}

/// A send lane.
pub(super) fn send(peer: Rank, mut link: Box<dyn LinkSender>, inbox: &Receiver<Arc<Run>>) {
    drive(Lane::Send(peer), inbox, |run, op| {
        let region = op.reads[0];
        let tile = run.staging.read(run.program.tensor(region.tensor).slot).map_err(in_use)?;
        let header = header(run, op, &region);
        link.send(&header, tile.bytes(header.payload as usize)).map_err(link_error(peer))
    });
}

/// A receive lane.
pub(super) fn receive(peer: Rank, mut link: Box<dyn LinkReceiver>, inbox: &Receiver<Arc<Run>>) {
    drive(Lane::Receive(peer), inbox, |run, op| {
        let region = op.writes[0];
        let slot = run.program.tensor(region.tensor).slot;
        let mut tile = run.staging.take(slot).map_err(in_use)?;
        let header = header(run, op, &region);
        let got = match Arc::get_mut(&mut tile) {
            Some(own) => link
                .receive(&header, own.bytes_mut(header.payload as usize))
                .map_err(link_error(peer)),
            None => Err(in_use(InUse(slot))),
        };
        run.staging.put(slot, tile);
        got
    });
}
