use super::*;
use crate::{
    Matrix, ModelDir,
    proof::Proof,
    testing::{TestTensor, arrived, file, manifest, rows},
};
use serde_json::json;
use std::{fs, os::unix::fs::FileExt, path::PathBuf, sync::Arc};
use tempfile::TempDir;

/// The checkpoint that `scripts/golden-compressed.py` writes.
fn written() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/compressed")
}

/// A copy with another field in its `quantization_config`, or in the weights of its first group.
fn with(pointer: &str, value: Value) -> TempDir {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(written().join(name), copy.path().join(name)).expect("a copy");
    }
    let path = copy.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
    let parent = config["quantization_config"].pointer_mut(parent).expect("a parent");
    parent.as_object_mut().expect("an object").insert(name.to_owned(), value);
    fs::write(&path, config.to_string()).expect("a file");
    copy
}

/// The matrices of the first layer in the order of their names, with the format of each: of 5 bits where the file has
/// 4 and zero points.
const MATRICES: [(Matrix, WeightFormat); 7] = [
    (Matrix::Down(0), WeightFormat::Q5_0),
    (Matrix::Gate(0), WeightFormat::Q5_0),
    (Matrix::Up(0), WeightFormat::Q5_0),
    (Matrix::Key(0), WeightFormat::Q4_0),
    (Matrix::AttentionOutput(0), WeightFormat::Q8_0),
    (Matrix::Query(0), WeightFormat::Q4_0),
    (Matrix::Value(0), WeightFormat::Q4_0),
];

#[test]
fn packed_matrices_have_the_values_that_compressed_tensors_gives_them() {
    let model = ModelDir::open(&written()).expect("a model");
    let bytes = fs::read(written().join("values.f32")).expect("values");
    let mut want = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    for (which, format) in MATRICES {
        assert_eq!(model.formats().of(which), format, "{which:?}");
        for have in rows(&model, which).into_iter().flatten() {
            assert_eq!(Some(have), want.next(), "{which:?}");
        }
    }
    assert_eq!(want.next(), None);
    assert_eq!(model.warnings(), []);
}

#[test]
fn any_bytes_of_a_packed_matrix_equal_those_of_the_whole() {
    let model = ModelDir::open(&written()).expect("a model");
    let store = model.store();
    for name in ["mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"] {
        let tensor = store.listed(&format!("model.layers.1.{name}.weight")).expect("a matrix").0;
        let mut whole = vec![0; tensor.bytes as usize];
        store.read_at(tensor.shard, &mut whole, 0).expect("all of it");
        for (at, end) in [(0, 1), (17, 19), (34, 1000), (whole.len() - 3, whole.len())] {
            let mut part = vec![0; end - at];
            store.read_at(tensor.shard, &mut part, at as u64).expect("a part");
            assert_eq!(part, whole[at..end], "{name}");
        }
    }
}

#[test]
fn a_packed_model_sent_in_pieces_equals_its_directory() {
    let model = ModelDir::open(&written()).expect("a model");
    let other = arrived(&model);
    assert_eq!((other.fingerprint(), other.formats()), (model.fingerprint(), model.formats()));
    for which in Matrix::all(model.spec()) {
        assert_eq!(rows(&other, which), rows(&model, which), "{which:?}");
    }
}

#[test]
fn a_changed_packed_matrix_differs_from_its_manifest() {
    let copy = with("/version", json!("1"));
    let manifest = manifest(&ModelDir::open(copy.path()).expect("a model"));
    let open = || {
        let model = ModelDir::open(copy.path()).expect("a model");
        model.prove(Arc::new(Proof::new(&model, manifest.clone(), None).expect("a proof")));
        model
    };
    let read = |model: &ModelDir| {
        let matrix = model.matrix(Matrix::Up(1)).expect("a matrix");
        matrix.read_raw_rows(0..64, 100..120, &mut Vec::new())
    };
    read(&open()).expect("it is as it was");
    let model = open();
    let path = copy.path().join("model.safetensors");
    let bytes = fs::read(&path).expect("a file");
    // The last codes of the matrix: behind what the fingerprint samples.
    let header = u64::from_le_bytes(*bytes.first_chunk().expect("a length"));
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header as usize]).expect("JSON");
    let end = &entries["model.layers.1.mlp.up_proj.weight_packed"]["data_offsets"][1];
    let end = 8 + header + end.as_u64().expect("an offset");
    let file = fs::File::options().write(true).open(&path).expect("a file");
    file.write_all_at(&[bytes[end as usize - 1] ^ 0x11], end - 1).expect("a byte");
    let error = read(&model).expect_err("a byte differs").to_string();
    assert!(error.contains("up_proj.weight") && error.contains("model.safetensors"), "{error}");
}

#[test]
fn quantisation_settings_that_are_not_done_are_rejected_by_name() {
    let weights = "/config_groups/group_0/weights";
    for (pointer, value, want) in [
        ("/format", json!("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        ("/kv_cache_scheme", json!({ "num_bits": 8 }), "kv_cache_scheme"),
        ("/sparsity_config", json!({ "format": "sparse-24-bitmask" }), "sparsity_config"),
        ("/transform_config", json!({ "config_groups": { "u": {} } }), "transform_config"),
        ("/quant_method", json!("gptq"), "\"gptq\""),
        ("/config_groups/FP8", json!(["Linear"]), "config_groups.FP8"),
        ("/config_groups/group_1/input_activations", json!({ "num_bits": 8 }), "input_activations"),
        (&format!("{weights}/num_bits"), json!(3), "num_bits = 3"),
        (&format!("{weights}/type"), json!("float"), "weights.type"),
        (&format!("{weights}/strategy"), json!("block"), "\"block\""),
        (&format!("{weights}/actorder"), json!("group"), "actorder"),
    ] {
        let error = ModelDir::open(with(pointer, value).path()).expect_err("not done").to_string();
        assert!(error.contains(want) && error.contains("config.json"), "{error}\nlacks {want}");
    }
    let unknown = with("/config_groups/group_0/weights/rotation", json!(true));
    let warnings = ModelDir::open(unknown.path()).expect("a model").warnings().to_vec();
    assert!(
        warnings.iter().any(|warning| warning.text.contains("group_0.weights.rotation")),
        "{warnings:?}"
    );
}

/// The error of a store in which the tensors of one matrix `[2, 64]` are these.
fn told(change: impl Fn(&mut Vec<TestTensor<'_>>)) -> String {
    let shape = [2u64, 64].map(u64::to_le_bytes).concat();
    let mut tensors = vec![
        ("a.weight_packed", "I32", vec![2, 8], vec![0x21; 64]),
        ("a.weight_scale", "F32", vec![2, 1], 0.5f32.to_le_bytes().repeat(2)),
        ("a.weight_shape", "I64", vec![2], shape),
    ];
    change(&mut tensors);
    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::write(directory.path().join("model.safetensors"), file(&tensors)).expect("a file");
    let mut store = crate::store::Store::open(directory.path()).expect("a store");
    let read = store.combine().and_then(|_| {
        let tensor = store.tensor("a.weight", &[2, 64])?.0;
        let mut out = vec![0; tensor.bytes as usize];
        store.read_at(tensor.shard, &mut out, 0).map(|()| out)
    });
    match read {
        Ok(out) => {
            // The scale, and the first and the seventeenth code.
            assert_eq!(out[..3], [0, 0x38, 0x11]);
            String::new()
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn tensors_that_do_not_fit_together_are_rejected_by_name() {
    assert_eq!(told(|_| {}), "");
    type Change = Box<dyn Fn(&mut Vec<TestTensor<'_>>)>;
    let cases: [(Change, &str); 12] = [
        (Box::new(|t| drop(t.remove(1))), "has no a.weight_scale"),
        (Box::new(|t| drop(t.remove(2))), "has no a.weight_shape"),
        (Box::new(|t| t[2] = ("a.weight_shape", "I64", vec![1], vec![0; 8])), "two numbers"),
        (Box::new(|t| t[2].3 = [u64::MAX; 2].map(u64::to_le_bytes).concat()), "its codes are"),
        (Box::new(|t| t[2].3 = vec![0; 16]), "its codes are"),
        (Box::new(|t| t[0] = ("a.weight_packed", "U8", vec![2, 32], vec![0; 64])), "U8 values"),
        (Box::new(|t| t[0] = ("a.weight_packed", "I32", vec![2, 6], vec![0; 48])), "6 words"),
        (Box::new(|t| t[1] = ("a.weight_scale", "F32", vec![2, 4], vec![0; 32])), "[2, 4]"),
        (Box::new(|t| t[1] = ("a.weight_scale", "I32", vec![2, 1], vec![0; 8])), "its scales are"),
        (
            Box::new(|t| t.push(("a.weight_zero_point", "I8", vec![2, 1], vec![0; 2]))),
            "its zero points are",
        ),
        (Box::new(|t| t.push(("a.weight_g_idx", "I32", vec![64], vec![0; 256]))), "actorder"),
        (Box::new(|t| t.push(("a.weight", "F16", vec![2, 64], vec![0; 256]))), "as a tensor too"),
    ];
    for (change, want) in cases {
        let error = told(change);
        assert!(error.contains(want) && error.contains("a.weight"), "{error}\nlacks {want}");
    }
    for scale in [f32::INFINITY, 1e6, f32::NAN] {
        let error = told(|t| t[1].3 = scale.to_le_bytes().repeat(2));
        assert!(error.contains("16-bit float"), "{error}");
    }
}
