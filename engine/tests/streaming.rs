//! Weights that come from disk: whatever stays, however small the buffer, the results are those of weights that all
//! stay; and what happens when files are damaged, cut off or gone.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    BatchShape, Bytes, Cache, DeviceName, Plan, Room, Sampling, Segment, Span, Strategy, Streaming,
    Wanted, WireType,
};
use galaxy_engine::{local::LocalCluster, sampler::Sequence, stream::Stream};
use galaxy_graph::{
    operators::OperatorGraph,
    pieces,
    program::Lane,
    share::{self, Member, PlanOptions},
    verify,
};
use galaxy_model::ModelDir;
use std::{
    fs,
    ops::ControlFlow,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

fn open(name: &str) -> Arc<ModelDir> {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    Arc::new(ModelDir::open(&golden.join(name)).unwrap())
}

fn plan(model: &ModelDir, strategy: Strategy, devices: usize, cache: Cache) -> Plan {
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles: 1 + devices as u16 % 3,
        max_rows: 64,
        cache,
    };
    let member = |at: usize| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1 + (at % 2) as u16,
        share: 1.0 + at as f64 / 2.0,
    };
    let members: Vec<Member> = (0..devices).map(member).collect();
    share::plan(model.spec(), &terms, &members).unwrap()
}

/// The plan with weights from disk: pieces are small, `spare` blocks more than the largest are there, and of
/// each `of` pieces one stays, if any.
fn streamed(model: &ModelDir, plan: &Plan, room: Room, loaders: u16, spare: u64, of: u32) -> Plan {
    let mut plan = plan.clone();
    for device in &mut plan.ring {
        let mut streaming = Streaming {
            format: model.format(),
            piece: Bytes(8 << 10),
            buffer: Bytes(0),
            room,
            loaders,
            resident: Vec::new(),
        };
        device.streaming = Some(streaming.clone());
        let pieces = pieces::of_device(&OperatorGraph::of(model.spec()), model.formats(), device);
        let largest = pieces.iter().map(|piece| piece.stored()).max().unwrap_or(4096);
        let parts = if let Room::Parts(parts) = room { u64::from(parts) } else { 1 };
        streaming.buffer = Bytes(largest * parts + spare * 4096);
        let stay = (0..pieces.len() as u32).filter(|at| of > 0 && at % of == 0);
        streaming.resident = stay.map(|at| Span::new(at, at + 1)).collect();
        device.streaming = Some(streaming);
    }
    plan
}

fn shape(model: &ModelDir, rows: u32) -> BatchShape {
    let wanted = match model.spec().head.labels() {
        0 => Wanted::Hidden,
        _ => Wanted::Classes,
    };
    let segment = Segment { slot: 0, context_len: 0, cached: false, rows, wanted };
    BatchShape::new(vec![segment]).unwrap()
}

fn tokens(rows: u32) -> Vec<u32> {
    (0..rows).map(|at| 3 + at * 7 % 90).collect()
}

/// Sequential, synchronous, asynchronous, and with several loaders; with all pieces read, and with some held
/// in memory.
const WAYS: [(Room, u16, u64, u32); 5] = [
    (Room::Parts(1), 1, 0, 0),
    (Room::Parts(2), 1, 0, 3),
    (Room::Ring, 1, 3, 0),
    (Room::Ring, 3, 9, 4),
    (Room::Ring, 2, 1 << 16, 0),
];

/// How many pieces were not given by the shards' files.
fn remade(cluster: &LocalCluster) -> u64 {
    cluster.streams().map(Stream::remade).sum()
}

#[test]
fn results_with_streamed_weights_equal_resident_weights() {
    let files = tempfile::tempdir().unwrap();
    for name in
        ["bert", "bert-f16", "gpt2", "gpt2-classes", "llama-tied-bf16", "gptj", "mpnet", "qwen3"]
    {
        let model = open(name);
        for (strategy, devices) in [
            (Strategy::Local, 1),
            (Strategy::Galaxy, 3),
            (Strategy::Megatron, 2),
            (Strategy::Sequence, 2),
            (Strategy::Pipeline, 2),
        ] {
            let held = plan(&model, strategy, devices, Cache::NONE);
            let shape = shape(&model, 19);
            let inputs = tokens(19);
            let cluster = LocalCluster::open(model.clone(), held.clone()).unwrap();
            let want = cluster.run(&shape, &inputs[..]).unwrap();
            for (room, agents, spare, of) in WAYS {
                let plan = streamed(&model, &held, room, agents, spare, of);
                let say = format!("{name} {strategy} {room:?} {agents} {spare} {of}");
                let cluster =
                    LocalCluster::open_with(model.clone(), plan.clone(), files.path()).unwrap();
                let programs = cluster.programs(&shape).unwrap();
                let programs: Vec<_> = programs.iter().map(|p| (**p).clone()).collect();
                verify(model.spec(), model.formats(), &plan, &shape, &programs).unwrap();
                let lanes = programs.iter().flat_map(|program| &program.lanes);
                assert!(lanes.into_iter().any(|(lane, _)| matches!(lane, Lane::Load(_))), "{say}");
                // Twice: the buffer has something of the run before.
                for _ in 0..2 {
                    assert_eq!(cluster.run(&shape, &inputs[..]).unwrap(), want, "{say}");
                }
                assert_eq!(remade(&cluster), 0, "{say}");
            }
        }
    }
}

#[test]
fn tokens_with_streamed_weights_equal_resident_weights() {
    let files = tempfile::tempdir().unwrap();
    let cache = Cache { rows: Cache::BLOCK, values: galaxy_common::CacheType::F32 };
    for name in ["gpt2", "llama-tied-bf16", "gptj"] {
        let model = open(name);
        for (strategy, devices) in
            [(Strategy::Local, 1), (Strategy::Galaxy, 3), (Strategy::Pipeline, 2)]
        {
            let held = plan(&model, strategy, devices, cache);
            let make = |plan: Plan| {
                let cluster = LocalCluster::open_with(model.clone(), plan, files.path()).unwrap();
                let prompt = tokens(11);
                let sampling = Sampling::greedy();
                let text = Sequence { slot: 1, rows: 40, sampling, prompt: 11, tokens: prompt };
                let mut made = Vec::new();
                let mut tell = |told: &galaxy_engine::generate::TokenEvent| {
                    made.push(told[0] as u32);
                    ControlFlow::Continue(())
                };
                cluster.generate(&text, 25, 8, &[], &mut tell).unwrap();
                assert_eq!(remade(&cluster), 0);
                made
            };
            let want = make(held.clone());
            for (room, agents, spare, of) in WAYS {
                let plan = streamed(&model, &held, room, agents, spare, of);
                assert_eq!(make(plan), want, "{name} {strategy} {room:?} {agents} {spare} {of}");
            }
        }
    }
}

/// The files of shards.
fn files(at: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(at).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

fn flip(path: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 16], at).unwrap();
}

/// What was damaged is read again from the model's files, and the file is whole again.
#[test]
fn a_damaged_shard_file_is_repaired_and_never_used() {
    let at = tempfile::tempdir().unwrap();
    let model = open("gpt2");
    let held = plan(&model, Strategy::Local, 1, Cache::NONE);
    let (shape, inputs) = (shape(&model, 9), tokens(9));
    let want = LocalCluster::open(model.clone(), held.clone()).unwrap();
    let want = want.run(&shape, &inputs[..]).unwrap();
    let plan = streamed(&model, &held, Room::Ring, 2, 4, 5);
    let cluster = || LocalCluster::open_with(model.clone(), plan.clone(), at.path()).unwrap();
    let run = |cluster: &LocalCluster| cluster.run(&shape, &inputs[..]).unwrap();
    assert_eq!(run(&cluster()), want);
    let [path] = &files(at.path())[..] else { panic!("one file") };
    let good = fs::read(path).unwrap();
    // A bit of every block, one after another: values, zeros, checksums, header.
    for block in 0..good.len() as u64 / 4096 {
        flip(path, block * 4096 + block * 7 % 4096);
        flip(path, block * 4096 + 4095);
        let cluster = cluster();
        assert_eq!(run(&cluster), want, "block {block}");
        assert_eq!(run(&cluster), want, "block {block}");
        fs::write(path, &good).unwrap();
    }
    // While it is open, and nothing of it stays.
    let of_none = streamed(&model, &held, Room::Ring, 2, 4, 0);
    let open = LocalCluster::open_with(model.clone(), of_none, at.path()).unwrap();
    flip(path, 5000);
    assert_eq!(run(&open), want);
    assert_eq!(remade(&open), 1);
    assert!(fs::read(path).unwrap() == good, "it is mended");
    assert_eq!((run(&open), remade(&open)), (want.clone(), 1));
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(4096).unwrap();
    assert_eq!(run(&open), want);
    fs::remove_file(path).unwrap();
    assert_eq!(run(&open), want, "an open file stays until it is closed");
    drop(open);
    // Gone, cut off, empty, something else, of another model.
    assert_eq!(run(&cluster()), want);
    assert!(fs::read(path).unwrap() == good);
    for wrong in [&good[..good.len() - 1], &good[..5000], &[], b"GALXSHRD", &vec![0; good.len()]] {
        fs::write(path, wrong).unwrap();
        assert_eq!(run(&cluster()), want);
        assert!(fs::read(path).unwrap() == good);
    }
}

/// An attempt that was broken off is continued, as far as it is good.
#[test]
fn a_partly_written_shard_file_is_continued() {
    let at = tempfile::tempdir().unwrap();
    let model = open("bert");
    let held = plan(&model, Strategy::Local, 1, Cache::NONE);
    let plan = streamed(&model, &held, Room::Ring, 1, 0, 0);
    let device = &plan.ring[0];
    let write = |steps: usize| {
        let mut told = 0;
        let mut progress = |_, _| {
            told += 1;
            if told > steps { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let shard =
            galaxy_engine::weights::Shard::stream(model.clone(), device, at.path(), &mut progress);
        (shard.is_ok(), told)
    };
    let (done, told) = write(3);
    assert!(!done && told == 4);
    let [part] = &files(at.path())[..] else { panic!("one file") };
    assert_eq!(part.extension().unwrap(), "part");
    let all = pieces::of_device(&OperatorGraph::of(model.spec()), model.formats(), device).len();
    // The third is not as it was written; the fourth and what follows are not there.
    flip(part, fs::metadata(part).unwrap().len() - 4);
    let (done, told) = write(usize::MAX);
    assert!(done && told == all - 2, "{told} of {all}");
    assert_eq!(files(at.path()).len(), 1, "nothing is left of the attempt");
    let (done, told) = write(usize::MAX);
    assert!(done && told == 0, "it is there");
    // Another plan's takes its place.
    let held = plan.ring[0].clone();
    let other = streamed(&model, &plan, Room::Ring, 1, 0, 0);
    let mut other = other.ring[0].clone();
    other.streaming.as_mut().unwrap().piece = Bytes(4 << 10);
    let mut quiet = |_, _| ControlFlow::Continue(());
    let shard = galaxy_engine::weights::Shard::stream(model, &other, at.path(), &mut quiet);
    assert!(shard.is_ok() && files(at.path()).len() == 1 && held.name == other.name);
}

/// A disk that gives neither the file nor the model: the run fails and says why, and the next one is right.
#[test]
fn a_disk_read_error_fails_the_run_and_the_next_run_succeeds() {
    let at = tempfile::tempdir().unwrap();
    let copy = at.path().join("gpt2");
    fs::create_dir(&copy).unwrap();
    for file in files(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/gpt2")) {
        fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    let model = Arc::new(ModelDir::open(&copy).unwrap());
    let held = plan(&model, Strategy::Galaxy, 2, Cache::NONE);
    let (shape, inputs) = (shape(&model, 9), tokens(9));
    let want = LocalCluster::open(model.clone(), held.clone()).unwrap();
    let want = want.run(&shape, &inputs[..]).unwrap();
    let plan = streamed(&model, &held, Room::Ring, 2, 4, 0);
    let shards = at.path().join("shards");
    let cluster = LocalCluster::open_with(model, plan, &shards).unwrap();
    assert_eq!(cluster.run(&shape, &inputs[..]).unwrap(), want);
    // Cut off in the middle: reads behind that give nothing.
    let mut cut = files(&shards);
    cut.push(copy.join("model.safetensors"));
    let whole: Vec<Vec<u8>> = cut.iter().map(|path| fs::read(path).unwrap()).collect();
    let length = |path: &PathBuf, length| {
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
    };
    cut.iter().zip(&whole).for_each(|(path, whole)| length(path, whole.len() as u64 / 2));
    for _ in 0..2 {
        let error = cluster.run(&shape, &inputs[..]).unwrap_err().to_string();
        assert!(error.contains("cannot be read") || error.contains("safetensors"), "{error}");
    }
    cut.iter().zip(&whole).for_each(|(path, whole)| fs::write(path, whole).unwrap());
    assert_eq!(cluster.run(&shape, &inputs[..]).unwrap(), want);
}
