#![allow(clippy::unwrap_used)]

use super::*;
use crate::golden::{self, GoldenCase, Split};
use galaxy_common::{BatchShape, Exchange, Strategy, Wanted, WireType};
use galaxy_engine::{compute::Inputs, local::LocalCluster};
use galaxy_model::ModelDir;
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// The catalogue's shapes, two layers high and narrow.
fn small() -> impl Iterator<Item = (&'static str, Shape)> {
    catalogue().iter().map(|model| {
        let (heads, kv_heads) =
            if model.shape.kv_heads < model.shape.heads { (4, 2) } else { (4, 4) };
        let vocabulary = 300;
        let shape = Shape {
            layers: 2,
            hidden: 64,
            heads,
            kv_heads,
            intermediate: 96,
            vocabulary,
            ..model.shape
        };
        (model.name, shape)
    })
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Names, shapes and types of all tensors in the weight files of a directory.
fn stored(dir: &Path) -> BTreeMap<String, (Vec<usize>, safetensors::Dtype)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (name, view) in file.tensors() {
                assert!(all.insert(name, (view.shape().to_vec(), view.dtype())).is_none());
            }
        }
    }
    all
}

#[test]
fn parameter_counts_equal_those_of_the_published_models() {
    let count = |name| find(name).unwrap().shape.parameters();
    assert_eq!(count("distilbert"), 66_985_530);
    assert_eq!(count("gpt2-medium"), 354_823_168);
    assert_eq!(count("gpt2-large"), 774_030_080);
    assert_eq!(count("opt-1.3b"), 1_315_758_080);
    assert_eq!(count("opt-2.7b"), 2_651_596_800);
    assert_eq!(count("vit-large"), 304_326_632);
    assert_eq!(count("gpt-j-6b"), 6_050_882_784);
    assert_eq!(count("llama-1b"), 1_235_814_400);
}

#[test]
fn written_tensors_match_the_described_shapes_of_every_family() {
    for (name, shape) in small() {
        let dir = tempfile::tempdir().unwrap();
        shape.write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        let stored = stored(dir.path());
        let tensors = shape.tensors();
        assert_eq!(stored.len(), tensors.len(), "{name}: a name stands twice");
        for tensor in tensors {
            let (have, dtype) = &stored[&tensor.name];
            assert!(have.iter().map(|&n| n as u32).eq(tensor.shape), "{name}: {}", tensor.name);
            let width = match dtype {
                safetensors::Dtype::F32 => 4,
                _ => 2,
            };
            assert_eq!(width, shape.format.bytes(1, 1));
        }
        assert_eq!(json(&dir.path().join("config.json"))["model_type"], shape.family);
        let images = dir.path().join("preprocessor_config.json").exists();
        assert_eq!(images, shape.family == "vit");
    }
}

#[test]
fn every_shape_runs_with_finite_results() {
    let mut ran = BTreeSet::new();
    for (name, shape) in small() {
        if !ran.insert((shape.family, shape.kv_heads)) {
            continue;
        }
        let cache = tempfile::tempdir().unwrap();
        let path = make(cache.path(), name, &shape).unwrap();
        let dir = Arc::new(ModelDir::open(&path).unwrap());
        assert_eq!((dir.spec().layers, dir.spec().hidden), (shape.layers, shape.hidden));
        assert_eq!(
            (dir.spec().intermediate, dir.spec().kv_heads),
            (shape.intermediate, shape.kv_heads)
        );
        let words = if dir.spec().patches.is_some() { 0 } else { shape.vocabulary };
        assert_eq!((dir.spec().vocabulary, dir.format()), (words, shape.format));
        let case = GoldenCase {
            checkpoint: "",
            strategy: Strategy::Galaxy,
            devices: 2,
            split: Split::Equal,
            tiles: 2,
            threads: 1,
            exchange: Exchange::Ring,
            mix: golden::MIXES[0],
        };
        let plan = golden::plan(&dir, &case, WireType::F32).unwrap();
        let cluster = LocalCluster::open(dir, plan).unwrap();
        let rows = cluster.model().spec().patches.map_or(9, |patches| patches.rows());
        let batch = BatchShape::single(rows, Wanted::Hidden).unwrap();
        let inputs = Inputs::any(cluster.model().spec(), rows, 3);
        let hidden = cluster.run(&batch, inputs).unwrap();
        let values = hidden[0].values();
        assert_eq!(values.len(), rows as usize * 64);
        assert!(values.iter().all(|v| v.is_finite() && v.abs() < 1e3), "{name}");
        assert!(values.iter().any(|v| v.abs() > 1e-3), "{name}: nothing comes out");
    }
    assert!(ran.len() >= 7, "{ran:?}");
}

#[test]
fn a_large_model_is_cut_into_files_with_an_index() {
    let (_, shape) = small().find(|(name, _)| *name == "gpt2-large").unwrap();
    let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    shape.write(one.path(), u64::MAX, &mut |_| {}).unwrap();
    shape.write(many.path(), 100_000, &mut |_| {}).unwrap();
    let index = json(&many.path().join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], shape.bytes().0);
    let map = index["weight_map"].as_object().unwrap();
    let names: BTreeSet<&str> = map.values().map(|v| v.as_str().unwrap()).collect();
    let count = names.len();
    assert!(count > 2);
    for (i, name) in names.iter().enumerate() {
        assert_eq!(*name, format!("model-{:05}-of-{count:05}.safetensors", i + 1));
        let tensors = map.values().filter(|v| v.as_str() == Some(name)).count();
        let bytes = std::fs::metadata(many.path().join(name)).unwrap().len();
        assert!(bytes < 110_000 || tensors == 1 || i == 0, "{name} has {bytes} bytes");
    }
    assert_eq!(stored(one.path()), stored(many.path()));
    // However it is cut, it is the same model.
    let open = |dir: &tempfile::TempDir| ModelDir::open(dir.path()).unwrap();
    let read = |dir: &ModelDir| dir.vector(galaxy_model::Vector::MlpNorm(1)).unwrap();
    assert_eq!(read(&open(&one)), read(&open(&many)));
}

#[test]
fn a_finished_model_is_kept_and_a_partial_one_written_again() {
    let cache = tempfile::tempdir().unwrap();
    let part = cache.path().join("x.part");
    std::fs::create_dir(&part).unwrap();
    std::fs::write(part.join("model.safetensors"), b"half").unwrap();
    let (_, shape) = small().next().unwrap();
    let dir = make(cache.path(), "x", &shape).unwrap();
    assert!(!part.exists());
    ModelDir::open(&dir).unwrap();
    let weights = dir.join("model.safetensors");
    let made = || std::fs::metadata(&weights).unwrap().modified().unwrap();
    let first = made();
    assert_eq!(make(cache.path(), "x", &shape).unwrap(), dir);
    assert_eq!(made(), first, "it was written again");
    // Another shape under the same name replaces it.
    make(cache.path(), "x", &Shape { layers: 1, ..shape }).unwrap();
    assert_eq!(ModelDir::open(&dir).unwrap().spec().layers, 1);
}

#[test]
fn a_model_directory_of_another_program_is_refused_and_unchanged() {
    let cache = tempfile::tempdir().unwrap();
    let real = cache.path().join("bert-large");
    std::fs::create_dir(&real).unwrap();
    std::fs::write(real.join("config.json"), b"{}").unwrap();
    let error = ensure(cache.path(), "bert-large").unwrap_err();
    assert!(error.to_string().contains("not a model that this program made"), "{error}");
    assert_eq!(std::fs::read(real.join("config.json")).unwrap(), b"{}");
}

#[test]
fn unknown_models_and_a_lack_of_disk_space_are_errors_with_a_reason() {
    let cache = tempfile::tempdir().unwrap();
    let error = ensure(cache.path(), "bert-huge").unwrap_err().to_string();
    assert!(error.contains("bert-huge") && error.contains("gpt2-large"), "{error}");
    assert!(error.contains("yolov4-416"), "{error}");
    if cfg!(target_os = "linux") {
        let error = kept::room(cache.path(), "x", Bytes(u64::MAX)).unwrap_err().to_string();
        assert!(error.contains("must stay free"), "{error}");
    }
}

#[test]
fn a_network_is_written_once_and_its_file_is_read() {
    let cache = tempfile::tempdir().unwrap();
    let recipe = network("tiny-darts").unwrap();
    assert!(!recipe.is_complete(cache.path()));
    let path = recipe.ensure(cache.path()).unwrap();
    assert!(recipe.is_complete(cache.path()));
    let weights = path.with_file_name(galaxy_model::networks::WEIGHTS);
    assert_eq!(std::fs::metadata(&weights).unwrap().len(), recipe.bytes().0);
    let first = std::fs::metadata(&path).unwrap().modified().unwrap();
    assert_eq!(recipe.ensure(cache.path()).unwrap(), path);
    assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), first, "written again");
    let file = galaxy_model::onnx::OnnxFile::open(&path).unwrap();
    let network = galaxy_model::onnx::Network::of(&file, &Default::default()).unwrap();
    assert_eq!(network.value(network.outputs[0]).dims, [1, 10]);
}
