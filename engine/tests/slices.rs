//! Parts of what a device holds: other slices for decode than for prefill, and requests that select some of a model.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{
    BatchShape, Bytes, Cache, DeviceName, DevicePlan, Plan, Sampling, Span, Strategy, Wanted,
    WeightFormat, WireType, plan::Phase,
};
use galaxy_engine::{
    local::{LocalCluster, LocalError},
    sampler::Sequence,
    weights::WeightError,
};
use galaxy_graph::{
    LowerError, Selected, Selection,
    operators::OperatorGraph,
    pieces,
    share::{self, Member, PlanOptions},
    verify, verify_graph,
};
use galaxy_model::{
    ModelDir,
    shape::{SHARD_BYTES, Shape},
};
use safetensors::{SafeTensors, tensor::TensorView};
use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path, sync::Arc};

const LLAMA: Shape = Shape {
    family: "llama",
    layers: 4,
    hidden: 128,
    heads: 8,
    kv_heads: 4,
    intermediate: 192,
    vocabulary: 160,
    positions: 512,
    format: WeightFormat::F16,
    config: r#"{"head_dim": 16}"#,
};

fn written(shape: &Shape, at: &Path) -> Arc<ModelDir> {
    fs::create_dir_all(at).unwrap();
    shape.write(at, SHARD_BYTES, &mut |_| ()).unwrap();
    Arc::new(ModelDir::open(at).unwrap())
}

fn plan(model: &ModelDir, strategy: Strategy, devices: usize) -> Plan {
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats: model.formats(),
        strategy,
        wire: WireType::F32,
        tiles: 2,
        max_rows: 64,
        cache: match model.spec().causal {
            true => Cache { rows: 2 * Cache::BLOCK, values: galaxy_common::CacheType::F32 },
            false => Cache::NONE,
        },
    };
    let member = |at: usize| Member {
        name: DeviceName::new(format!("d{at}")).unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        share: 1.0 + at as f64 / 2.0,
    };
    let members: Vec<Member> = (0..devices).map(member).collect();
    share::plan(model.spec(), &terms, &members).unwrap()
}

fn tokens(cluster: &LocalCluster) -> Vec<u32> {
    let text = Sequence {
        slot: 0,
        prompt: 7,
        rows: 27,
        tokens: vec![3, 14, 15, 92, 65, 35, 89],
        sampling: Sampling::greedy(),
    };
    let mut made = Vec::new();
    let mut tell = |told: &galaxy_engine::generate::TokenEvent| {
        made.push(told[0] as u32);
        ControlFlow::Continue(())
    };
    cluster.generate(&text, 20, 4, &[], &mut tell).unwrap();
    made
}

fn logits(cluster: &LocalCluster, rows: u32) -> Vec<f32> {
    let wanted = match cluster.model().spec().causal {
        true => Wanted::AllLogits,
        false => Wanted::Hidden,
    };
    let shape = BatchShape::single(rows, wanted).unwrap();
    let ids: Vec<u32> = (0..rows).map(|row| row * 7 % 100).collect();
    cluster.run(&shape, ids).unwrap()[0].values().to_vec()
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let most = b.iter().fold(0f32, |most, b| most.max(b.abs()));
    a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / most
}

/// Cuts columns and the vocabulary between the two devices in decode.
fn decode(plan: &mut Plan, columns: u32, words: u32) {
    let ends = |device: &DevicePlan| {
        (device.decode.blocks[0].columns.end(), device.decode.vocabulary.end())
    };
    let all = ends(plan.ring.last().unwrap());
    let [first, second] = &mut plan.ring[..] else { panic!("two devices") };
    for block in &mut first.decode.blocks {
        block.columns = Span::new(0, columns);
    }
    for block in &mut second.decode.blocks {
        block.columns = Span::new(columns, all.0);
    }
    first.decode.vocabulary = Span::new(0, words);
    second.decode.vocabulary = Span::new(words, all.1);
}

#[test]
fn a_device_may_compute_other_slices_in_decode() {
    let at = tempfile::tempdir().unwrap();
    let model = written(&LLAMA, at.path());
    let alone = LocalCluster::open(model.clone(), plan(&model, Strategy::Local, 1)).unwrap();
    let expected = tokens(&alone);
    for (columns, words) in [(48, 64), (112, 112), (0, 0), (192, 160)] {
        let mut plan = plan(&model, Strategy::Galaxy, 2);
        // Between panels of what devices hold.
        for device in &mut plan.ring {
            let part = &mut device.prefill;
            let (from, to) = match part.vocabulary.start() {
                0 => (0, 80),
                _ => (80, 192),
            };
            part.blocks.iter_mut().for_each(|block| block.columns = Span::new(from, to));
            part.vocabulary = Span::new(from, to.min(160));
        }
        decode(&mut plan, columns, words);
        let (one, other) = (plan.ring[0].holds(), plan.ring[1].holds());
        assert_eq!(one.blocks[0].columns, Span::new(0, columns.max(80)));
        assert_eq!(other.vocabulary, Span::new(words.min(80), 160));
        let step = BatchShape::new(vec![galaxy_common::Segment {
            slot: 0,
            context_len: 0,
            cached: true,
            rows: 1,
            wanted: Wanted::Token(galaxy_common::CandidateCount::Few),
        }]);
        let step = step.unwrap();
        let spec = model.spec();
        for phase in [Phase::Prefill, Phase::Decode] {
            let programs = galaxy_graph::lower(spec, model.formats(), &plan, phase, &step).unwrap();
            assert_eq!(verify(spec, model.formats(), &plan, &step, &programs), Ok(()));
            // A program of the one phase is none of the other.
            let mut wrong = programs;
            let swapped = if phase == Phase::Prefill { Phase::Decode } else { Phase::Prefill };
            wrong.iter_mut().for_each(|program| program.phase = swapped);
            assert!(verify(spec, model.formats(), &plan, &step, &wrong).is_err());
        }
        let cluster = LocalCluster::open(model.clone(), plan).unwrap();
        assert_eq!(tokens(&cluster), expected, "{columns} {words}");
    }
    // Elsewhere it is refused by name, as are other heads.
    let mut odd = plan(&model, Strategy::Galaxy, 2);
    decode(&mut odd, 60, 64);
    let error = LocalCluster::open(model.clone(), odd).err().unwrap();
    let LocalError::Weights(WeightError::Phases { what: "columns", layer: 0 }) = error else {
        panic!("{error}")
    };
}

/// A model of the first layers, heads and columns of another.
fn cut(model: &Path, shape: &Shape, at: &Path) -> Arc<ModelDir> {
    fs::create_dir_all(at).unwrap();
    shape.write(at, SHARD_BYTES, &mut |_| ()).unwrap();
    let (small, large) = (at.join("model.safetensors"), model.join("model.safetensors"));
    let (small_bytes, large_bytes) = (fs::read(&small).unwrap(), fs::read(large).unwrap());
    let small_tensors = SafeTensors::deserialize(&small_bytes).unwrap();
    let large_tensors = SafeTensors::deserialize(&large_bytes).unwrap();
    let (hidden, heads, kv_heads) = (shape.hidden, 16 * shape.heads, 16 * shape.kv_heads);
    let cut = |(name, to): (String, TensorView<'_>)| {
        let from = large_tensors.tensor(&name).unwrap();
        // Shapes mean heads that are as wide as there are few of them.
        let shape = match name.rsplit('.').nth(1).unwrap() {
            "q_proj" => vec![heads as usize, hidden as usize],
            "k_proj" | "v_proj" => vec![kv_heads as usize, hidden as usize],
            "o_proj" => vec![hidden as usize, heads as usize],
            _ => to.shape().to_vec(),
        };
        let row = |shape: &[usize]| shape[1..].iter().product::<usize>() * 2;
        let (width, own) = (row(from.shape()), row(&shape));
        let rows = from.data().chunks(width).take(shape[0]);
        let values: Vec<u8> = rows.flat_map(|row| row[..own].to_vec()).collect();
        (name, (shape, values))
    };
    let tensors: BTreeMap<_, _> = small_tensors.tensors().into_iter().map(cut).collect();
    let views = tensors.iter().map(|(name, (shape, values))| {
        let dtype = safetensors::Dtype::F16;
        (name.clone(), TensorView::new(dtype, shape.clone(), values).unwrap())
    });
    fs::write(&small, safetensors::serialize(views, None).unwrap()).unwrap();
    Arc::new(ModelDir::open(at).unwrap())
}

#[test]
fn selected_layers_heads_and_columns_match_the_cut_model() {
    let bert = Shape { intermediate: 192, format: WeightFormat::F16, ..Shape::bert(4, 64, 4) };
    let parts = [
        (&LLAMA, [(2, 8, 192), (4, 4, 192), (4, 8, 64), (1, 2, 111), (4, 8, 192)].as_slice()),
        // Its heads are as wide as there are few of them, so that no model has fewer.
        (&bert, [(2, 4, 192), (4, 4, 96), (3, 4, 16)].as_slice()),
    ];
    let rings = [
        (Strategy::Local, 1),
        (Strategy::Galaxy, 2),
        (Strategy::Megatron, 2),
        (Strategy::Galaxy, 3),
        (Strategy::Sequence, 3),
    ];
    for (shape, selections) in parts {
        let at = tempfile::tempdir().unwrap();
        let model = written(shape, &at.path().join("all"));
        for &(layers, heads, columns) in selections {
            let kv_heads = shape.kv_heads * heads / shape.heads;
            let part = Shape { layers, heads, kv_heads, intermediate: columns, ..*shape };
            let part = cut(&at.path().join("all"), &part, &at.path().join("part"));
            let reference = LocalCluster::open(part.clone(), plan(&part, Strategy::Local, 1));
            let reference = reference.unwrap();
            let selection = Selection { layers, heads, columns };
            for (strategy, devices) in rings {
                let what = format!("{} {selection:?} {strategy} {devices}", shape.family);
                let plan = plan(&model, strategy, devices);
                let cluster = LocalCluster::open(model.clone(), plan).unwrap();
                let whole = logits(&cluster, 13);
                match cluster.select(selection) {
                    Ok(()) => {}
                    // Whoever has nothing of it has no place in the ring.
                    Err(LocalError::Lower(LowerError::Selection { why })) => {
                        assert!(devices > 2 && why.contains("not linked"), "{what}: {why}");
                        continue;
                    }
                    Err(error) => panic!("{what}: {error}"),
                }
                assert!(apart(&logits(&cluster, 13), &logits(&reference, 13)) < 1e-4, "{what}");
                if shape.heads == heads && model.spec().causal {
                    assert_eq!(tokens(&cluster), tokens(&reference), "{what}");
                }
                cluster.select(Selection::all(model.spec())).unwrap();
                assert_eq!(logits(&cluster, 13), whole, "{what}");
            }
        }
    }
}

#[test]
fn programs_of_a_selected_part_verify_and_bad_selections_are_refused() {
    let at = tempfile::tempdir().unwrap();
    let model = written(&LLAMA, at.path());
    let spec = model.spec();
    let plan = Arc::new(plan(&model, Strategy::Galaxy, 2));
    let shape = BatchShape::single(9, Wanted::AllLogits).unwrap();
    for (layers, heads, columns) in [(2, 8, 192), (4, 4, 64), (1, 2, 16)] {
        let selection = Selection { layers, heads, columns };
        let selected = Selected::new(spec, model.formats(), &plan, selection).unwrap();
        assert_eq!(selected.graph.check(), Ok(()));
        let programs = selected.lower(Phase::Prefill, &shape).unwrap();
        let check = |graph: &OperatorGraph, plan: &Plan| {
            let pieces = plan
                .ring
                .iter()
                .map(|device| pieces::of_device(graph, model.formats(), device))
                .collect();
            verify_graph(graph, pieces, plan, &shape, &programs)
        };
        assert_eq!(check(&selected.graph, &selected.plan), Ok(()));
        // They do not cover the whole model.
        assert!(check(&OperatorGraph::of(spec), &plan).is_err());
    }
    let refused =
        |selection: Selection| match Selected::new(spec, model.formats(), &plan, selection) {
            Err(LowerError::Selection { why }) => why,
            other => panic!("{other:?}"),
        };
    let all = Selection::all(spec);
    assert!(refused(Selection { layers: 0, ..all }).contains("no layers"));
    assert!(refused(Selection { layers: 5, ..all }).contains("fewer layers"));
    assert!(refused(Selection { heads: 3, ..all }).contains("share keys"));
    assert!(refused(Selection { columns: 0, ..all }).contains("columns"));
}
