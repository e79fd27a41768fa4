//! What an executor and a local cluster are good for after something went wrong.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    BatchShape, Bytes, Cache, DeviceName, Epoch, Rank, SequenceNumber, Strategy, Wanted, WireType,
    plan::Phase,
};
use galaxy_engine::{
    compute::{Binding, ComputeError, Engine, Staged},
    executor::{Executor, Job, RunError},
    link::{LinkCloser, Links},
    local::{LocalCluster, LocalError},
    weights::{Shard, WeightError},
};
use galaxy_graph::{
    Program, lower,
    operators::OperatorId,
    program::{Block, Lane, LaneId, OpId, OpKind, Operation, Slot},
    share::{self, Member, PlanOptions},
};
use galaxy_model::ModelDir;
use std::{
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// What an engine is to do next, and what was asked of it.
#[derive(Default)]
struct Script {
    refuse_prepare: bool,
    fail: bool,
    panic: bool,
    prepared: u32,
}

struct Scripted(Arc<Mutex<Script>>);

fn trouble() -> ComputeError {
    ComputeError::Memory { wanted: Bytes(1) }
}

impl Engine for Scripted {
    fn prepare(&mut self, _: &[Slot]) -> Result<(), ComputeError> {
        let mut script = self.0.lock().unwrap();
        script.prepared += 1;
        if std::mem::take(&mut script.refuse_prepare) { Err(trouble()) } else { Ok(()) }
    }
    fn run(
        &mut self,
        _: &Program,
        _: &Operation,
        _: &Binding,
        _: Staged<'_>,
    ) -> Result<(), ComputeError> {
        let (fail, panic) = {
            let mut script = self.0.lock().unwrap();
            (std::mem::take(&mut script.fail), std::mem::take(&mut script.panic))
        };
        assert!(!panic, "as the script says");
        if fail { Err(trouble()) } else { Ok(()) }
    }
    fn labels(&self) -> u32 {
        0
    }
    fn held(&self) -> (Bytes, Bytes) {
        (Bytes(0), Bytes(0))
    }
}

/// A program of one operation that touches nothing.
fn program() -> Arc<Program> {
    Arc::new(Program {
        rank: Rank(0),
        phase: Phase::Prefill,
        wire: WireType::F32,
        activations: galaxy_common::Activations::default(),
        tensors: vec![],
        slots: vec![],
        operations: vec![Operation {
            kind: OpKind::Embed(OperatorId(0)),
            lane: LaneId(0),
            reads: Default::default(),
            writes: Default::default(),
            waits: Default::default(),
            takes: Bytes(0),
            gives: Bytes(0),
            block: Block::Embedding,
            layer: 0,
        }],
        lanes: vec![(Lane::Compute, vec![OpId(0)])],
        outputs: vec![],
    })
}

#[test]
fn an_engine_is_prepared_again_after_an_error_or_a_panic() {
    let script = Arc::new(Mutex::new(Script::default()));
    let executor = Executor::start("d0", Box::new(Scripted(script.clone()))).unwrap();
    let program = program();
    let run = || {
        let shape = BatchShape::single(1, Wanted::Hidden).unwrap();
        executor.run(Job {
            epoch: Epoch(1),
            sequence: SequenceNumber(1),
            program: program.clone(),
            binding: Binding::new(shape, vec![0]),
            deadline: None,
        })
    };
    let prepared = || script.lock().unwrap().prepared;

    script.lock().unwrap().refuse_prepare = true;
    assert!(matches!(run(), Err(RunError::Compute(_))));
    run().unwrap();
    run().unwrap();
    assert_eq!(prepared(), 2, "once more after the refusal, and not for the same program again");
    script.lock().unwrap().fail = true;
    assert!(matches!(run(), Err(RunError::Compute(_))));
    run().unwrap();
    assert_eq!(prepared(), 3);
    script.lock().unwrap().panic = true;
    assert!(matches!(run(), Err(RunError::Program(_))));
    run().unwrap();
    assert_eq!(prepared(), 4);
}

#[test]
fn ending_an_epoch_late_leaves_the_next_epoch_connected() {
    struct Seen(AtomicBool);
    impl LinkCloser for Seen {
        fn close(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let executor = Executor::start("d0", Box::new(Scripted(Arc::default()))).unwrap();
    let connect = |epoch| {
        let closed = Arc::new(Seen(AtomicBool::new(false)));
        executor.connect(epoch, Links { closers: vec![closed.clone()], ..Links::default() });
        move || closed.0.load(Ordering::SeqCst)
    };
    let (first, second) = (connect(Epoch(1)), connect(Epoch(2)));
    assert!(first() && !second());
    executor.disconnect(Some(Epoch(1)));
    assert!(!second());
    executor.disconnect(Some(Epoch(2)));
    assert!(second());
    let third = connect(Epoch(3));
    executor.disconnect(None);
    assert!(third());
}

fn bert() -> Arc<ModelDir> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/bert");
    Arc::new(ModelDir::open(&path).unwrap())
}

fn plan(model: &ModelDir) -> galaxy_common::Plan {
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy: Strategy::Galaxy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: 64,
        cache: Cache::NONE,
    };
    let member = |name| Member {
        name: DeviceName::new(name).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        share: 1.0,
    };
    share::plan(model.spec(), &terms, &["a", "b"].map(member)).unwrap()
}

/// The epoch of a run may end between the start of the run and the moment in which it takes its links.
#[test]
fn a_run_whose_epoch_has_just_ended_is_aborted() {
    let model = bert();
    let shape = BatchShape::single(3, Wanted::Hidden).unwrap();
    let programs =
        lower(model.spec(), model.formats(), &plan(&model), Phase::Prefill, &shape).unwrap();
    let program = Arc::new(programs[0].clone());
    let executor = Executor::start("a", Box::new(Scripted(Arc::default()))).unwrap();
    let run = |epoch| {
        executor.run(Job {
            epoch,
            sequence: SequenceNumber(1),
            program: program.clone(),
            binding: Binding::new(shape.clone(), vec![1, 2, 3]),
            deadline: None,
        })
    };
    executor.connect(Epoch(1), Links::default());
    executor.disconnect(Some(Epoch(1)));
    assert!(matches!(run(Epoch(1)), Err(RunError::Aborted)));
    assert!(matches!(run(Epoch(2)), Err(RunError::Stale { .. })));
    executor.connect(Epoch(2), Links::default());
    assert!(matches!(run(Epoch(1)), Err(RunError::Stale { wanted: Epoch(1), have: Epoch(2) })));
}

#[test]
fn a_local_cluster_stops_at_the_deadline_and_serves_the_next_request() {
    let model = bert();
    let cluster = LocalCluster::open(model.clone(), plan(&model)).unwrap();
    let shape = BatchShape::single(9, Wanted::Hidden).unwrap();
    let tokens: Arc<[u32]> = (0..9).collect();
    let late = cluster.execute(&shape, tokens.clone(), Some(Instant::now()));
    let late = late.err().unwrap();
    assert!(matches!(late, LocalError::Run(RunError::Deadline)), "{late}");
    cluster.execute(&shape, tokens, None).unwrap();
}

#[test]
fn loading_stops_when_the_progress_callback_breaks() {
    let model = bert();
    let plan = plan(&model);
    let mut told = 0;
    let stopped = Shard::load(model, &plan.ring[0], &mut |_, _| {
        told += 1;
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(WeightError::Stopped)));
    assert_eq!(told, 1);
}
