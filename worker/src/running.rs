//! The state of a worker that runs programs: the shard in memory, the epoch that is placed with its programs, and what
//! is stored of those that ran.

use crate::{
    error::WorkerError,
    tasks::{Programs, lock},
};
use galaxy_common::{
    Activations, Assignment, BatchShape, Bytes, DeviceName, Epoch, Plan, Rank, SequenceNumber,
    Streaming, plan::Phase,
};
use galaxy_engine::{compute::Ending, executor::Executor};
use galaxy_graph::{Lowered, Program, Whole, program::Lane, timeline::Times};
use galaxy_model::ModelDir;
use galaxy_proto::v1;
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, Weak},
};
use tokio::sync::{RwLock, mpsc};
use tonic::Status;

/// The most lowered programs that are cached: requests come in a few shapes.
pub(crate) const LOWERED: usize = 32;
/// The most timelines that are stored, for `galaxy trace`.
const TIMELINES: usize = 32;

/// The channel that takes the events of an execution.
pub(crate) type Events = mpsc::Sender<Result<v1::ExecuteEvent, Status>>;

/// This device's program for a shape, and the digest of all devices' programs.
pub(crate) type Ours = ([u8; 32], Arc<Program>);

/// What runs, and on what.
#[derive(Default)]
pub(crate) struct Running {
    /// The shard: read while a program runs, written when another is loaded. So no two shards are
    /// in memory at once, not even while one is dropped.
    pub(crate) held: Arc<RwLock<Option<LoadedShard>>>,
    pub(crate) active: Mutex<Option<Arc<Active>>>,
    pub(crate) programs: Programs,
    pub(crate) timelines: Mutex<Timelines>,
    pub(crate) endings: Mutex<Endings>,
}

/// A shard in memory, inside the executor that runs it.
pub(crate) struct LoadedShard {
    pub(crate) key: ShardKey,
    pub(crate) executor: Arc<Executor>,
    pub(crate) bytes: Bytes,
}

/// What must be equal for a shard to be used again.
#[derive(Clone, PartialEq)]
pub(crate) struct ShardKey {
    pub(crate) fingerprint: String,
    /// The values to which rows are rounded: where they stay f32, weights in blocks are held as f32
    /// too.
    pub(crate) activations: Activations,
    pub(crate) holds: Assignment,
    pub(crate) threads: u16,
    pub(crate) cache: galaxy_common::Cache,
    pub(crate) streaming: Option<Streaming>,
}

/// The epoch that is placed.
pub(crate) struct Active {
    pub(crate) epoch: Epoch,
    pub(crate) rank: Rank,
    pub(crate) plan: Arc<Plan>,
    pub(crate) model: Arc<ModelDir>,
    /// Weak: the shard inside is dropped when another is to be loaded, even if a task still reports
    /// on a run.
    pub(crate) executor: Weak<Executor>,
    /// Programs by batch shape.
    pub(crate) lowered: Mutex<Lowered<Ours>>,
}

impl Active {
    /// The name of a device of the plan.
    pub(crate) fn name(&self, rank: Rank) -> Option<&DeviceName> {
        self.plan.ring.get(rank.index()).map(|device| &device.name)
    }

    /// This device's program for a batch shape.
    pub(crate) fn lower(&self, phase: Phase, shape: &BatchShape) -> Result<Ours, WorkerError> {
        let ours = |mut programs: Vec<Program>| {
            let digest = galaxy_graph::digest(&programs);
            (digest, Arc::new(programs.swap_remove(self.rank.index())))
        };
        let (spec, formats) = (self.model.spec(), self.model.formats());
        let whole = Whole { spec, formats, plan: &self.plan };
        Ok(lock(&self.lowered).get(whole, phase, shape, ours)?)
    }

    /// The name of a lane, with that of the device at its other end.
    pub(crate) fn lane(&self, lane: Lane) -> String {
        let name = |rank| self.name(rank).map_or_else(String::new, ToString::to_string);
        match lane {
            Lane::Compute => "compute".to_owned(),
            Lane::Copy => "copy".to_owned(),
            Lane::Send(rank) => format!("send {}", name(rank)),
            Lane::Receive(rank) => format!("receive {}", name(rank)),
            Lane::Load(loader) => format!("load {loader}"),
        }
    }
}

/// The timelines of the programs that ran lately.
#[derive(Default)]
pub(crate) struct Timelines {
    kept: VecDeque<(Epoch, SequenceNumber, Vec<Times>)>,
}

impl Timelines {
    /// Stores the times of a program that ran, in place of the oldest if there are many.
    pub(crate) fn put(&mut self, epoch: Epoch, sequence: SequenceNumber, times: Vec<Times>) {
        if self.kept.len() == TIMELINES {
            self.kept.pop_front();
        }
        self.kept.push_back((epoch, sequence, times));
    }
    /// The begin and end of each operation of a program that ran.
    pub(crate) fn get(
        &self,
        epoch: Epoch,
        sequence: SequenceNumber,
    ) -> Result<&[Times], WorkerError> {
        let found = self.kept.iter().find(|(e, s, _)| (*e, *s) == (epoch, sequence));
        found
            .map(|(_, _, times)| times.as_slice())
            .ok_or(WorkerError::NoTimeline { kept: TIMELINES })
    }
}

/// The handles that ask bursts of admitted programs to end.
#[derive(Default)]
pub(crate) struct Endings {
    admitted: Vec<(Epoch, SequenceNumber, Ending)>,
    /// The program that was last asked to end when it was not admitted: it may be on its way. A coordinator ends one
    /// burst at a time, so that one is enough.
    early: Option<(Epoch, SequenceNumber)>,
}

impl Endings {
    /// Adds the handle of a program that is admitted, and asks it to end if that was wanted already.
    pub(crate) fn add(&mut self, epoch: Epoch, sequence: SequenceNumber, ending: Ending) {
        if self.early == Some((epoch, sequence)) {
            ending.ask();
        }
        self.admitted.push((epoch, sequence, ending));
    }

    /// Removes the handle of a program that leaves.
    pub(crate) fn remove(&mut self, epoch: Epoch, sequence: SequenceNumber) {
        self.admitted.retain(|(e, s, _)| (*e, *s) != (epoch, sequence));
    }

    /// Asks the burst of a program to end: at once, or when it is admitted.
    pub(crate) fn ask(&mut self, epoch: Epoch, sequence: SequenceNumber) {
        let admitted = self.admitted.iter().find(|(e, s, _)| (*e, *s) == (epoch, sequence));
        match admitted {
            Some((.., ending)) => ending.ask(),
            None => self.early = Some((epoch, sequence)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_timeline_is_dropped_when_full() {
        let mut timelines = Timelines::default();
        for n in 0..=TIMELINES as u64 {
            timelines.put(Epoch(1), SequenceNumber(n), vec![]);
        }
        assert!(timelines.get(Epoch(1), SequenceNumber(0)).is_err());
        assert!(timelines.get(Epoch(1), SequenceNumber(1)).is_ok());
        assert!(timelines.get(Epoch(2), SequenceNumber(1)).is_err());
    }

    #[test]
    fn a_burst_asked_to_end_before_it_is_admitted_ends() {
        let (mut endings, epoch) = (Endings::default(), Epoch(1));
        let [one, two, three] = [1, 2, 3].map(SequenceNumber);
        let handles: [Ending; 3] = Default::default();
        endings.add(epoch, one, handles[0].clone());
        endings.ask(epoch, two);
        endings.add(epoch, two, handles[1].clone());
        endings.add(epoch, three, handles[2].clone());
        assert_eq!(handles.each_ref().map(Ending::is_asked), [false, true, false]);
        endings.ask(epoch, three);
        assert_eq!(handles.each_ref().map(Ending::is_asked), [false, true, true]);
    }
}
