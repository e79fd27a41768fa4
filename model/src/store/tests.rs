use super::*;
use crate::testing::{TestTensor, file, raw};
use proptest::prelude::*;

fn open(files: &[(&str, Vec<u8>)]) -> Result<Store, ModelError> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).expect("a file");
    }
    Store::open(directory.path())
}

fn open_one(bytes: Vec<u8>) -> Result<Store, ModelError> {
    open(&[("model.safetensors", bytes)])
}

fn problem(bytes: Vec<u8>) -> HeaderProblem {
    match open_one(bytes) {
        Err(ModelError::Header { problem, .. }) => problem,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("a damaged file was accepted"),
    }
}

fn tensor(name: &str) -> TestTensor<'_> {
    (name, "F32", vec![2, 1], vec![0; 8])
}

#[test]
fn a_valid_safetensors_file_opens() {
    let store = open_one(file(&[tensor("b"), tensor("a")])).expect("valid");
    assert!(store.has("a") && !store.has("c"));
    let (a, dtype) = store.tensor("a", &[2, 1]).expect("there");
    assert_eq!((dtype, a.bytes), (WeightFormat::F32, 8));
    assert!(matches!(store.tensor("a", &[1, 2]), Err(ModelError::Shape { .. })));
    assert!(matches!(store.tensor("c", &[1]), Err(ModelError::MissingTensor { .. })));
}

#[test]
fn a_header_length_beyond_the_file_is_rejected() {
    assert_eq!(problem(vec![1; 7]), HeaderProblem::Short { have: 7 });
    for length in [u64::MAX, 101_000_000, 9] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}      ");
        assert_eq!(problem(bytes), HeaderProblem::Length { bytes: length, allowed: 8 });
    }
}

#[test]
fn a_truncated_safetensors_file_is_rejected() {
    let mut bytes = file(&[tensor("a"), tensor("b")]);
    bytes.pop();
    let have = bytes.len() as u64;
    match open_one(bytes) {
        Err(ModelError::Truncated { tensor, end, have: h, .. }) => {
            assert_eq!((tensor.as_str(), end, h), ("b", have + 1, have));
        }
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn invalid_tensor_offsets_and_sizes_are_rejected() {
    let header = |b: &str| {
        let a = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
        raw(&format!(r#"{{"a":{a},"b":{b}}}"#), &[0; 64])
    };
    for start in [4u64, 12] {
        let end = start + 8;
        let entry = format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":[{start},{end}]}}"#);
        assert!(matches!(problem(header(&entry)), HeaderProblem::Offsets { .. }));
    }
    let entry = r#"{"dtype":"F32","shape":[3],"data_offsets":[8,16]}"#;
    assert!(matches!(problem(header(entry)), HeaderProblem::Size { want: 12, have: 8, .. }));
    let entry = r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[8,16]}"#;
    assert!(matches!(problem(header(entry)), HeaderProblem::Impossible { .. }));
    let entry = r#"{"dtype":"F32","shape":[0],"data_offsets":[8,4]}"#;
    assert!(matches!(problem(header(entry)), HeaderProblem::Impossible { .. }));
    let entry = r#"{"dtype":"F9","shape":[],"data_offsets":[8,18446744073709551615]}"#;
    assert!(matches!(open_one(header(entry)), Err(ModelError::Truncated { .. })));
    let entry = r#"{"dtype":"F32","shape":[-1],"data_offsets":[8,12]}"#;
    assert!(matches!(problem(header(entry)), HeaderProblem::Json { .. }));
}

#[test]
fn a_duplicate_tensor_name_is_rejected() {
    let entry = r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#;
    let twice = raw(&format!(r#"{{"a":{entry},"a":{entry}}}"#), &[0; 4]);
    assert_eq!(problem(twice), HeaderProblem::Twice { tensor: "a".to_owned() });
}

#[test]
fn an_unsupported_type_is_an_error_only_when_its_tensor_is_read() {
    let mask = ("mask", "BOOL", vec![3], vec![0; 3]);
    let store = open_one(file(&[mask, tensor("a")])).expect("valid");
    assert!(store.tensor("a", &[2, 1]).is_ok());
    let error = store.tensor("mask", &[3]).err().expect("no float").to_string();
    assert!(error.contains("BOOL") && error.contains("F32, F16, BF16"), "{error}");
}

fn index(pairs: &[(&str, &str)]) -> Vec<u8> {
    let map: BTreeMap<_, _> = pairs.iter().copied().collect();
    serde_json::json!({ "metadata": {}, "weight_map": map }).to_string().into_bytes()
}

#[test]
fn weight_files_must_contain_the_tensors_of_their_index() {
    const INDEX: &str = "model.safetensors.index.json";
    let one = ("1.safetensors", file(&[tensor("a")]));
    let two = ("2.safetensors", file(&[tensor("b")]));
    let both = index(&[("a", "1.safetensors"), ("b", "2.safetensors")]);
    let store = open(&[one.clone(), two.clone(), (INDEX, both.clone())]).expect("valid");
    assert!(store.has("a") && store.has("b"));

    let missing = open(&[one.clone(), (INDEX, both.clone())]);
    assert!(matches!(missing, Err(ModelError::NotThere { wanted, .. }) if wanted == two.0));
    let broken = open(&[one.clone(), ("2.safetensors", file(&[tensor("c")])), (INDEX, both)]);
    assert!(matches!(broken, Err(ModelError::MissingTensor { tensor, .. }) if tensor == "b"));
    let names = index(&[("a", "1.safetensors"), ("c", "3.safetensors")]);
    let third = ("3.safetensors", file(&[tensor("a"), tensor("c")]));
    let twice = open(&[one, third, (INDEX, names)]);
    assert!(matches!(twice, Err(ModelError::Duplicate { tensor, .. }) if tensor == "a"));
    for name in ["../x.safetensors", "/etc/passwd", "..", "", ".", "a/b", "a\\b"] {
        let result = open(&[(INDEX, index(&[("a", name)]))]);
        assert!(matches!(result, Err(ModelError::ShardName { .. })), "{name:?}");
    }
    assert!(matches!(open(&[]), Err(ModelError::NotThere { .. })));
    let text = open(&[(INDEX, b"{".to_vec())]);
    assert!(matches!(text, Err(ModelError::Json { .. })));
}

proptest! {
    #[test]
    fn any_safetensors_bytes_open_without_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = parse_header(&bytes);
        let _ = open_one(bytes);
    }

    #[test]
    fn any_header_entry_stays_within_the_file_or_is_rejected(
        dtype in prop_oneof![Just("F32"), Just("BF16"), Just("F4"), Just("")],
        shape in proptest::collection::vec(prop_oneof![0u64..5, any::<u64>()], 0..4),
        start in prop_oneof![Just(0u64), any::<u64>()],
        end in prop_oneof![0u64..64, any::<u64>()],
    ) {
        let entry = serde_json::json!({
            "a": { "dtype": dtype, "shape": shape, "data_offsets": [start, end] }
        });
        if let Ok(store) = open_one(raw(&entry.to_string(), &[0; 32])) {
            prop_assert!(end <= 32);
            let _ = store.tensor("a", &shape);
        }
    }
}
