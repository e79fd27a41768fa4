#![allow(clippy::unwrap_used)]

use super::*;
use galaxy_common::{BlockAssignment, DeviceName};
use galaxy_graph::{budget, operators::LayerOperators};
use galaxy_model::HeadSpec;
use galaxy_model::ModelSpec;
use proptest::{prelude::*, test_runner::TestRunner};
use std::path::Path;

const FAMILIES: [&str; 7] =
    ["bert", "bert-f16", "distilbert", "gpt2", "gpt2-classes", "llama", "llama-tied-bf16"];

fn golden(name: &str) -> Arc<ModelDir> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name);
    Arc::new(ModelDir::open(&path).unwrap())
}

fn device(assignment: Assignment) -> DevicePlan {
    DevicePlan {
        name: DeviceName::new("here").unwrap(),
        budget: Bytes(1 << 30),
        threads: 1,
        prefill: assignment.clone(),
        decode: assignment,
        streaming: None,
    }
}

fn load(dir: &Arc<ModelDir>, device: &DevicePlan) -> Shard {
    Shard::load(dir.clone(), device, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

/// Two numbers of `0..=all`, as a span; one in four is empty, one in four is all.
fn span<U: galaxy_common::span::Unit>(all: u32, (kind, a, b): (u8, u32, u32)) -> Span<U> {
    let (a, b) = (a % (all + 1), b % (all + 1));
    match kind % 4 {
        0 => Span::new(a, a),
        1 => Span::first(all),
        _ => Span::new(a.min(b), a.max(b)),
    }
}

type Numbers = (u8, u32, u32);

/// An assignment with another part of each layer, drawn from `numbers`.
fn assignment(spec: &ModelSpec, numbers: &[[Numbers; 3]]) -> Assignment {
    let block = |layer: u32| {
        let [heads, columns, _] = numbers[layer as usize % numbers.len()];
        BlockAssignment {
            layers: Span::new(layer, layer + 1),
            heads: span(spec.heads, heads),
            columns: span(spec.intermediate, columns),
        }
    };
    let vocabulary = match spec.head {
        HeadSpec::Language { .. } => span(spec.vocabulary, numbers[0][2]),
        _ => Span::empty(),
    };
    Assignment { blocks: (0..spec.layers).map(block).collect(), row_weight: 1, vocabulary }
}

fn alike(a: &[ShardMatrix], b: &[ShardMatrix]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b))
}

fn same(a: &Shard, b: &Shard) {
    assert_eq!((&a.assignment, a.bytes()), (&b.assignment, b.bytes()));
    assert_eq!((&a.graph, &a.vectors), (&b.graph, &b.vectors));
    for (a, b) in a.products.iter().zip(&b.products) {
        assert_eq!((a.share, &a.bias), (b.share, &b.bias));
        assert!(alike(&a.matrices, &b.matrices), "{a:?} is not {b:?}");
    }
}

/// Values of `new` that `old` does not have, one by one: what the difference is.
fn missing(spec: &ModelSpec, width: u64, old: &Assignment, new: &Assignment) -> u64 {
    let mut values = 0;
    let count = |old: &std::ops::Range<u32>, new: &std::ops::Range<u32>| {
        new.clone().filter(|at| !old.contains(at)).count() as u64
    };
    let hidden = u64::from(spec.hidden);
    for layer in 0..spec.layers {
        let (a, b) = (old.block(layer), new.block(layer));
        let wide =
            |heads: Span<Head>| heads.start() * spec.head_width..heads.end() * spec.head_width;
        let kv = |heads| wide(galaxy_graph::lower::kv_span(spec, heads));
        let (queries, keys) =
            (count(&wide(a.heads), &wide(b.heads)), count(&kv(a.heads), &kv(b.heads)));
        values += hidden * (2 * queries + 2 * keys);
        if spec.qkv_bias && wide(a.heads) != wide(b.heads) && !b.heads.is_empty() {
            values += wide(b.heads).len() as u64 + 2 * kv(b.heads).len() as u64;
        }
        let panels = if spec.gated { 2 } else { 1 };
        values += hidden * (panels + 1) * count(&a.columns.iter(), &b.columns.iter());
        if spec.mlp_bias && a.columns != b.columns && !b.columns.is_empty() {
            values += panels * u64::from(b.columns.len());
        }
    }
    values += hidden * count(&old.vocabulary.iter(), &new.vocabulary.iter());
    values * width
}

/// A reshaped shard equals a fresh load bit for bit, and no byte is read that the old shard had.
#[test]
fn a_reshaped_shard_equals_a_freshly_loaded_shard() {
    let mut runner = TestRunner::new(ProptestConfig { cases: 150, ..Default::default() });
    let numbers = || any::<[[Numbers; 3]; 3]>();
    for name in FAMILIES {
        let dir = golden(name);
        let (spec, formats) = (dir.spec(), dir.formats());
        let format = dir.format();
        let graph = OperatorGraph::of(spec);
        let test = |(old, new): ([[Numbers; 3]; 3], [[Numbers; 3]; 3])| {
            let old = device(assignment(spec, &old));
            let new = device(assignment(spec, &new));
            let mut told = Vec::new();
            let mut progress = |read, of| {
                told.push((read, of));
                ControlFlow::Continue(())
            };
            let (shard, read) = load(&dir, &old).reshape(dir.clone(), &new, &mut progress).unwrap();
            let said = transition(&graph, formats, Some(&old.prefill), &new.prefill);
            assert_eq!(said.read, read);
            assert_eq!(read.0, missing(spec, format.bytes(1, 1), &old.prefill, &new.prefill));
            assert!(told.is_sorted() && told.last() == Some(&(read.0, read.0)), "{told:?}");
            same(&shard, &load(&dir, &new));
            // The peak is at least what is held at both ends, and at most one matrix more.
            let held = budget::PROCESS + shard.bytes().max(load(&dir, &old).bytes());
            let largest = u64::from(spec.hidden.max(3 * spec.heads * spec.head_width))
                * u64::from(spec.intermediate.max(spec.vocabulary) + 16)
                * 2
                * format.bytes(1, 1);
            assert!(held <= said.peak && said.peak.0 <= held.0 + largest + (2 << 20));
            Ok(())
        };
        runner.run(&(numbers(), numbers()), test).unwrap();
    }
}

/// A shard of matrices in many formats, too, is reshaped to the one that is loaded; parts of blocks
/// become f32.
#[test]
fn a_reshaped_quantised_shard_equals_a_freshly_loaded_shard() {
    let mut runner = TestRunner::new(ProptestConfig { cases: 60, ..Default::default() });
    let numbers = || any::<[[Numbers; 3]; 3]>();
    let dir = golden("../gguf/mixed.gguf");
    let graph = OperatorGraph::of(dir.spec());
    let test = |(old, new): ([[Numbers; 3]; 3], [[Numbers; 3]; 3])| {
        let [old, new] = [old, new].map(|numbers| device(assignment(dir.spec(), &numbers)));
        let mut quiet = |_, _| ControlFlow::Continue(());
        let (shard, read) = load(&dir, &old).reshape(dir.clone(), &new, &mut quiet).unwrap();
        let said = transition(&graph, dir.formats(), Some(&old.prefill), &new.prefill);
        assert_eq!(said.read, read);
        same(&shard, &load(&dir, &new));
        Ok(())
    };
    runner.run(&(numbers(), numbers()), test).unwrap();
}

/// One more column, one head less: what is read is that column.
#[test]
fn a_reshape_reads_only_the_added_column() {
    let dir = golden("llama");
    let spec = dir.spec();
    let part = |heads, columns| {
        let layers = Span::first(spec.layers);
        device(Assignment {
            blocks: vec![BlockAssignment { layers, heads, columns }],
            row_weight: 1,
            vocabulary: Span::first(spec.vocabulary),
        })
    };
    let old = part(Span::first(spec.heads), Span::new(3, 20));
    let new = part(Span::new(1, spec.heads), Span::new(3, 21));
    let (shard, read) =
        load(&dir, &old).reshape(dir.clone(), &new, &mut |_, _| ControlFlow::Continue(())).unwrap();
    // Of gate, up and down.
    assert_eq!(read.0, dir.format().bytes(3 * u64::from(spec.layers), spec.hidden.into()));
    let (_, read) =
        shard.reshape(dir.clone(), &new, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(read, Bytes(0));
}

#[test]
fn a_reshape_that_is_stopped_or_exceeds_the_model_is_an_error() {
    let dir = golden("bert");
    let spec = dir.spec();
    let numbers = |kind| [[(kind, 0, 0); 3]];
    let (none, all) = (assignment(spec, &numbers(0)), assignment(spec, &numbers(1)));
    let mut told = 0;
    let stopped = load(&dir, &device(none.clone())).reshape(
        dir.clone(),
        &device(all.clone()),
        &mut |_, _| {
            told += 1;
            if told == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    );
    assert!(matches!(stopped, Err(WeightError::Stopped)) && told == 3);
    let mut beyond = all;
    beyond.blocks[0].columns = Span::new(0, spec.intermediate + 1);
    let wrong = load(&dir, &device(none))
        .reshape(dir.clone(), &device(beyond), &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(wrong, Err(WeightError::Model(_))));
}

/// A shard to measure with has the parts that are asked for, each as a load gives it.
#[test]
fn a_sample_shard_has_the_requested_parts_as_loaded() {
    for name in FAMILIES {
        let dir = golden(name);
        let spec = dir.spec();
        let block = |heads, columns| BlockAssignment {
            layers: Span::empty(),
            heads: Span::first(heads),
            columns: Span::first(columns),
        };
        let blocks =
            [(0, block(1, 3)), (1, block(spec.heads, 0)), (0, block(0, spec.intermediate))];
        let progress = &mut |_, _| ControlFlow::Continue(());
        let sample = Shard::sample(dir.clone(), &blocks, Span::empty(), progress).unwrap();
        assert_eq!(sample.graph.layers.len(), 3);
        let products = |layer: LayerOperators| [layer.qkv, layer.output, layer.up, layer.down];
        for ((layer, block), sampled) in blocks.iter().zip(&sample.graph.layers) {
            let layers = Span::new(*layer, layer + 1);
            let part = Assignment {
                blocks: vec![BlockAssignment { layers, ..*block }],
                ..galaxy_graph::holdings::nothing()
            };
            let loaded = load(&dir, &device(part));
            let of_model = products(loaded.graph.layers[*layer as usize]);
            for (own, whole) in products(*sampled).into_iter().zip(of_model) {
                let both = (sample.product(own).unwrap(), loaded.product(whole).unwrap());
                assert!(alike(&both.0.matrices, &both.1.matrices), "{name}: {both:?}");
                assert_eq!((both.0.share, &both.0.bias), (both.1.share, &both.1.bias));
            }
            let attention = sample.graph.attention(sampled.attention).unwrap();
            assert_eq!(sample.heads(attention), block.heads);
        }
    }
}
