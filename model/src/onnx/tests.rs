#![allow(clippy::unwrap_used)]

use super::*;
use crate::ModelError;
use proptest::prelude::*;
use std::{collections::BTreeMap, io::Write, path::Path};

/// An image, a convolution with a stored kernel, and a function behind it.
fn small() -> NewModel {
    NewModel {
        opset: 17,
        nodes: vec![
            NewNode::new("Conv", &["x", "w", "b"], "c")
                .with("pads", NewAttribute::Wholes(vec![1, 1, 1, 1]))
                .with("strides", NewAttribute::Wholes(vec![2, 2])),
            NewNode::new("Relu", &["c"], "y"),
        ],
        tensors: vec![
            NewTensor::floats("w", &[4, 3, 3, 3], &[0.5; 108]),
            NewTensor::floats("b", &[4], &[0.0, 1.0, 2.0, 3.0]),
        ],
        inputs: vec![("x".into(), vec![None, Some(3), Some(7), Some(5)])],
        outputs: vec!["y".into()],
    }
}

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn network(bytes: &[u8]) -> Result<Network, ModelError> {
    let file = file(bytes);
    Network::of(&OnnxFile::open(file.path())?, &Fixed::default())
}

fn refused(model: &NewModel) -> String {
    network(&model.bytes()).unwrap_err().to_string()
}

/// A model of one node that reads an image.
fn one(node: NewNode) -> NewModel {
    NewModel { nodes: vec![node], outputs: vec!["y".into()], ..small() }
}

#[test]
fn a_written_file_is_read_with_its_shapes_fixed() {
    let network = network(&small().bytes()).unwrap();
    assert_eq!(network.nodes.len(), 2);
    assert_eq!(network.value(network.inputs[0]).dims, [1, 3, 7, 5]);
    assert_eq!(network.value(network.outputs[0]).dims, [1, 4, 4, 3]);
    assert_eq!(network.weight_bytes(), 4 * (108 + 4));
}

#[test]
fn every_cut_of_a_file_is_an_error() {
    let bytes = small().bytes();
    for cut in 0..bytes.len() {
        let found = network(&bytes[..cut]);
        assert!(found.is_err(), "{cut} of {}", bytes.len());
    }
}

#[test]
fn what_follows_from_shapes_is_worked_out_when_a_network_is_loaded() {
    // The classic chain of exporters: [batch, -1] from the shape of what is read.
    let model = NewModel {
        nodes: vec![
            NewNode::new("Shape", &["x"], "shape"),
            NewNode::new("Gather", &["shape", "zero"], "batch"),
            NewNode::new("Unsqueeze", &["batch", "zeros"], "batches"),
            NewNode::new("Concat", &["batches", "rest"], "to").with("axis", NewAttribute::Whole(0)),
            NewNode::new("Reshape", &["x", "to"], "y"),
        ],
        tensors: vec![
            NewTensor { dims: vec![], ..NewTensor::wholes("zero", &[0]) },
            NewTensor::wholes("zeros", &[0]),
            NewTensor::wholes("rest", &[-1]),
        ],
        outputs: vec!["y".into()],
        ..small()
    };
    let network = network(&model.bytes()).unwrap();
    assert_eq!(network.nodes.len(), 1);
    assert_eq!(network.value(network.outputs[0]).dims, [1, 105]);
}

#[test]
fn views_of_stored_tensors_are_stored_tensors() {
    let model = NewModel {
        nodes: vec![
            NewNode::new("Reshape", &["large", "to"], "w"),
            NewNode::new("MatMul", &["x", "w"], "y"),
        ],
        tensors: vec![
            NewTensor::floats("large", &[6400], &[1.0; 6400]),
            NewTensor::wholes("to", &[5, 1280]),
        ],
        outputs: vec!["y".into()],
        ..small()
    };
    let network = network(&model.bytes()).unwrap();
    let weight = network.value(network.nodes[0].reads[1]);
    assert_eq!(weight.dims, [5, 1280]);
    assert!(matches!(&weight.source, Source::Stored(tensor) if tensor.dims == [5, 1280]));
}

#[test]
fn nodes_that_cannot_be_computed_are_named_with_the_reason() {
    let cases = [
        (NewNode::new("Sqrtt", &["x"], "y"), "Sqrtt"),
        (NewNode::new("Relu", &["nothing"], "y"), "\"nothing\", which no node before it computes"),
        (NewNode::new("Relu", &["x"], "y").with("slope", NewAttribute::Float(1.0)), "\"slope\""),
        (NewNode::new("Conv", &["x", "b"], "y"), "[4]"),
        (
            NewNode::new("Concat", &["x", "b"], "y").with("axis", NewAttribute::Whole(0)),
            "do not fit",
        ),
        (
            NewNode::new("Transpose", &["x"], "y")
                .with("perm", NewAttribute::Wholes(vec![0, 1, 1, 2])),
            "twice",
        ),
        (NewNode::new("Flatten", &["x"], "y").with("axis", NewAttribute::Whole(9)), "axis 9"),
        (
            NewNode::new("Softmax", &["x"], "y").with("axis", NewAttribute::Float(1.0)),
            "whole number",
        ),
        (NewNode::new("Reshape", &["x", "b"], "y"), "whole numbers"),
        (NewNode::new("Reshape", &["b", "x"], "y"), "fixed when it is loaded"),
    ];
    for (node, reason) in cases {
        let message = refused(&one(node.clone()));
        assert!(message.contains(reason), "{node:?}: {message}");
        assert!(message.contains("node \"y\""), "{message}");
    }
    let mut domain = small().bytes();
    domain.truncate(domain.len() - 6);
    assert!(network(&domain).is_err());
}

#[test]
fn inputs_of_open_or_other_shapes_are_asked_for_by_name() {
    let mut model = small();
    model.inputs[0].1[2] = None;
    let message = refused(&model);
    assert!(message.contains("\"x\"") && message.contains("--shape x=Nx3xNx5"), "{message}");
    let file = file(&model.bytes());
    let open = OnnxFile::open(file.path()).unwrap();
    let of = |name: &str, dims: &[u64]| {
        let shapes = BTreeMap::from([(name.to_owned(), dims.to_vec())]);
        Network::of(&open, &Fixed { shapes, ..Fixed::default() })
    };
    assert!(of("x", &[2, 3, 9, 5]).is_ok());
    assert!(of("x", &[2, 4, 9, 5]).unwrap_err().to_string().contains("does not fit"));
    assert!(of("z", &[2, 3, 9, 5]).unwrap_err().to_string().contains("no input \"z\""));
}

#[test]
fn tensors_of_absurd_sizes_are_refused_before_anything_is_taken() {
    let mut model = small();
    model.tensors[0].dims = vec![1 << 40, 1 << 40, 3, 3];
    assert!(refused(&model).contains("impossible shape"));
    model.tensors[0].dims = vec![4, 3, 3, 4];
    assert!(refused(&model).contains("takes 576 bytes, and has 432"));
    let mut model = small();
    model.nodes[0].attributes[0].1 = NewAttribute::Wholes(vec![1 << 40; 4]);
    assert!(refused(&model).contains("pads"));
    let mut model = one(NewNode::new("Expand", &["x", "to"], "y"));
    model.tensors.push(NewTensor::wholes("to", &[1 << 44, 3, 7, 5]));
    assert!(refused(&model).contains("too large"));
}

#[test]
fn external_tensors_are_read_beside_the_model_and_nowhere_else() {
    let directory = tempfile::tempdir().unwrap();
    let values: Vec<u8> =
        [0.0f32; 2].iter().chain(&[0.5; 108]).flat_map(|x| x.to_le_bytes()).collect();
    std::fs::write(directory.path().join("weights.bin"), values).unwrap();
    let path = directory.path().join("model.onnx");
    let open = |location: &str, offset: u64| {
        let mut model = small();
        model.tensors[0].data = NewData::External { location: location.into(), offset };
        std::fs::write(&path, model.bytes()).unwrap();
        let file = OnnxFile::open(&path)?;
        Network::of(&file, &Fixed::default())?;
        file.floats(&file.initializers[0])
    };
    assert_eq!(open("weights.bin", 8).unwrap(), [0.5; 108]);
    assert_eq!(open("./weights.bin", 4).unwrap()[..2], [0.0, 0.5]);
    let refused = |location, offset| open(location, offset).unwrap_err().to_string();
    assert!(refused("weights.bin", 12).contains("cut short"));
    assert!(refused("weights.bin", u64::MAX).contains("cut short"));
    for bad in ["../weights.bin", "/etc/passwd", ""] {
        assert!(refused(bad, 0).contains("not inside"), "{bad}");
    }
    assert!(refused("none.bin", 0).contains("none.bin"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn any_bytes_are_a_network_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = network(&bytes);
    }

    #[test]
    fn any_changed_byte_of_a_file_gives_a_network_or_an_error(
        at in any::<prop::sample::Index>(), to: u8, more in any::<prop::sample::Index>(), other: u8,
    ) {
        let mut bytes = small().bytes();
        let (at, more) = (at.index(bytes.len()), more.index(bytes.len()));
        bytes[at] = to;
        bytes[more] = other;
        let _ = network(&bytes);
    }
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = OnnxFile::open(Path::new("/nowhere/model.onnx")).unwrap_err();
    assert!(error.to_string().contains("/nowhere/model.onnx"));
}
