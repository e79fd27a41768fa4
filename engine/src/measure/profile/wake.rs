//! How long the compute lane takes to go on when another lane has what it waits for.

use crate::{
    compute::{Binding, Engine},
    executor::{Executor, Job},
    link::{LinkError, LinkSender, Links, memory},
    measure::MeasureError,
};
use galaxy_common::{
    BatchShape, Bytes, Column, Epoch, FrameHeader, Rank, Row, SequenceNumber, Span, Wanted,
    WireType, plan::Phase,
};
use galaxy_graph::{
    Program,
    program::{
        Block, Lane, LaneId, Memory, OpId, OpKind, Operation, Region, Role, Slot, SlotId, Tensor,
        TensorId, Wait,
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How often a tile goes round.
const ROUNDS: u32 = 100;
/// The least time that a tile is on its way: so long that the lane that waits sleeps, and its processor with
/// it, as between two tiles of a batch. Up to `LONGER_US` more are added, so that waits end at any time.
const LEAST: Duration = Duration::from_micros(300);
const LONGER_US: u64 = 1000;
/// Values of the tile: next to nothing, so that waking up is what is seen.
const WIDTH: u32 = 64;
/// A device that takes longer than this for all rounds has a fault.
const LIMIT: Duration = Duration::from_secs(10);

const COMPUTE: LaneId = LaneId(0);
const SEND: LaneId = LaneId(1);
const RECEIVE: LaneId = LaneId(2);

/// A link on which tiles take a while.
struct Late {
    link: Box<dyn LinkSender>,
    sent: u64,
}

impl LinkSender for Late {
    fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), LinkError> {
        self.sent += 1;
        // Any times, spread evenly.
        std::thread::sleep(LEAST + Duration::from_micros(self.sent * 618 % LONGER_US));
        self.link.send(header, payload)
    }
}

/// The mean time from the end of a receive to the begin of the operation that waits for it, nanoseconds: a tile goes
/// out, back over a link in memory, and in, through the three lanes that every program has. The mean, because a batch
/// pays for all of its waits: a device that runs in turns mostly continues at once, or much later.
pub(super) fn wake(engine: Box<dyn Engine>) -> Result<f64, MeasureError> {
    let executor = Executor::start("profile", engine)?;
    let (sender, receiver, closer) = memory::link();
    let sender = Box::new(Late { link: sender, sent: 0 });
    let links = Links {
        senders: vec![(Rank(0), sender)],
        receivers: vec![(Rank(0), receiver)],
        closers: vec![closer],
    };
    executor.connect(Epoch(1), links);
    let binding = Binding::new(BatchShape::single(1, Wanted::Hidden)?, vec![0]);
    let program = Arc::new(round_trips());
    let report = executor.run(Job {
        epoch: Epoch(1),
        sequence: SequenceNumber(1),
        program: program.clone(),
        binding,
        deadline: Some(Instant::now() + LIMIT),
    })?;
    let gap = |round: u32| {
        let (_, received) = report.timeline[(4 * round + 2) as usize];
        let (begun, _) = report.timeline[(4 * round + 3) as usize];
        begun.saturating_sub(received) as f64
    };
    Ok((0..ROUNDS).map(gap).sum::<f64>() / f64::from(ROUNDS))
}

/// Export, send, receive and import, again and again; each waits for the one before.
fn round_trips() -> Program {
    let rows = Span::<Row>::first(1);
    let tensor = |role, memory: Memory, slot| {
        let element = memory.element(WireType::F32);
        Tensor { role, rows, width: WIDTH, memory, element, slot: SlotId(slot) }
    };
    let region =
        |tensor| Region { tensor: TensorId(tensor), rows, columns: Span::<Column>::first(WIDTH) };
    let slot = |memory| Slot { memory, start: 0, bytes: u64::from(WIDTH) * 4 };
    let wait = |lane, count| Wait { lane, count };
    let operation = |kind, lane, reads: &[Region], writes: &[Region], wait: Wait| Operation {
        kind,
        lane,
        reads: reads.into(),
        writes: writes.into(),
        waits: std::iter::once(wait).collect(),
        takes: Bytes(0),
        gives: Bytes(0),
        block: Block::Head,
        layer: 0,
    };
    let mut operations = Vec::new();
    for k in 0..ROUNDS {
        let (transfer, tile) = (k, 0);
        let send = OpKind::Send { transfer, tile };
        let receive = OpKind::Receive { transfer, tile };
        let (values, out, back) = ([region(0)], [region(1)], [region(2)]);
        operations.extend([
            // Not before the last tile was sent, whose room it takes.
            operation(OpKind::Export { staged: false }, COMPUTE, &values, &out, wait(SEND, k)),
            operation(send, SEND, &out, &[], wait(COMPUTE, 2 * k + 1)),
            operation(receive, RECEIVE, &[], &back, wait(COMPUTE, 2 * k)),
            operation(OpKind::Import, COMPUTE, &back, &values, wait(RECEIVE, k + 1)),
        ]);
    }
    let lane = |lane| {
        let of = |(at, op): (usize, &Operation)| (op.lane == lane).then_some(OpId(at as u32));
        operations.iter().enumerate().filter_map(of).collect()
    };
    let lanes = vec![
        (Lane::Compute, lane(COMPUTE)),
        (Lane::Send(Rank(0)), lane(SEND)),
        (Lane::Receive(Rank(0)), lane(RECEIVE)),
    ];
    Program {
        rank: Rank(0),
        phase: Phase::Prefill,
        wire: WireType::F32,
        activations: galaxy_common::Activations::default(),
        tensors: vec![
            tensor(Role::Normed, Memory::Device, 0),
            tensor(Role::RowTile, Memory::Staging, 1),
            tensor(Role::RowTile, Memory::Staging, 2),
        ],
        slots: vec![slot(Memory::Device), slot(Memory::Staging), slot(Memory::Staging)],
        operations,
        lanes,
        outputs: Vec::new(),
    }
}
