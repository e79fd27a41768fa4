//! The commands that take an ONNX file.
#![allow(clippy::unwrap_used)]

use galaxy_model::onnx::{NewAttribute, NewModel, NewNode, NewTensor};
use std::{
    fs,
    io::Read,
    path::Path,
    process::{Command, Output},
};

/// Two branches, of which one is wide, and a network that is given nothing else.
fn model() -> NewModel {
    let conv =
        |input: &str, kernels: &str, output: &str| NewNode::new("Conv", &[input, kernels], output);
    let pointwise = |name: &str, outputs: u64, inputs: u64| {
        let values = vec![0.5; (outputs * inputs) as usize];
        NewTensor::floats(name, &[outputs, inputs, 1, 1], &values)
    };
    NewModel {
        opset: 17,
        nodes: vec![
            conv("x", "narrow", "a"),
            conv("x", "wide", "b"),
            conv("b", "back", "c"),
            NewNode::new("Concat", &["a", "c"], "y").with("axis", NewAttribute::Whole(1)),
        ],
        tensors: vec![
            pointwise("narrow", 8, 2),
            pointwise("wide", 64, 2),
            pointwise("back", 1, 64),
        ],
        inputs: vec![("x".into(), vec![None, Some(2), Some(3), None])],
        outputs: vec!["y".into()],
    }
}

/// A file of NumPy with numbers from 0 on.
fn npy(dims: &[u64]) -> Vec<u8> {
    let shape: String = dims.iter().map(|side| format!("{side}, ")).collect();
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    let count = dims.iter().product::<u64>();
    bytes.extend((0..count).flat_map(|at| (at as f32).to_le_bytes()));
    bytes
}

fn galaxy(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_galaxy"))
        .current_dir(directory)
        .args(arguments)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

#[test]
fn a_network_runs_on_a_numpy_file_and_writes_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("m.onnx"), model().bytes()).unwrap();
    fs::write(path.join("x.npy"), npy(&[1, 2, 3, 2])).unwrap();
    let line = ["run", "--model", "m.onnx", "--input", "x=@x.npy", "-o", "y.npz"];
    let output = galaxy(path, &line);
    assert!(output.status.success(), "{}", said(&output));
    let mut archive = zip::ZipArchive::new(fs::File::open(path.join("y.npz")).unwrap()).unwrap();
    let mut bytes = Vec::new();
    archive.by_name("y.npy").unwrap().read_to_end(&mut bytes).unwrap();
    let header = String::from_utf8_lossy(&bytes[10..128]).into_owned();
    assert!(header.contains("(1, 9, 3, 2, )"), "{header}");
    let values: Vec<f32> =
        bytes[128..].chunks_exact(4).map(|of| f32::from_le_bytes(of.try_into().unwrap())).collect();
    // Half of the sum of both channels, and 32 times as much.
    assert_eq!((values[0], values[5]), (3.0, 8.0));
    assert_eq!((values[48], values[53]), (96.0, 256.0));
    let output = galaxy(path, &line[..5]);
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["outputs"][0]["shape"], serde_json::json!([1, 9, 3, 2]));
    assert!(document["report"]["arena_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn the_order_of_least_memory_is_shown_with_its_proof() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("m.onnx"), model().bytes()).unwrap();
    let open = galaxy(path, &["plan", "--model", "m.onnx"]);
    assert!(said(&open).contains("--shape x=Nx2x3xN"), "{}", said(&open));
    let shape = ["plan", "--model", "m.onnx", "--shape", "x=1x2x3x100"];
    let output = galaxy(path, &shape);
    assert!(said(&output).contains("proved: no order needs less"), "{}", said(&output));
    let output = galaxy(path, &[&shape[..], &["--json"]].concat());
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["order"], serde_json::json!([1, 2, 0, 3]));
    let bytes = |name: &str| plan[name].as_u64().unwrap();
    assert!(bytes("least_bytes") < bytes("file_order_bytes"));
    assert_eq!(bytes("least_bytes"), bytes("bound_bytes"));
    assert!(plan["ordering_ms"].as_f64().unwrap() >= 0.0);
}

#[test]
fn what_does_not_fit_a_network_is_refused_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("m.onnx"), model().bytes()).unwrap();
    fs::write(path.join("x.npy"), npy(&[1, 2, 3, 2])).unwrap();
    fs::write(path.join("other.npy"), npy(&[1, 3, 3, 2])).unwrap();
    fs::write(path.join("no.npy"), b"no tensor").unwrap();
    for (arguments, reason) in [
        (vec!["--input", "z=@x.npy"], "its inputs are [\"x\"]"),
        (vec!["--input", "x=@other.npy"], "does not fit its input \"x\""),
        (vec!["--input", "x=@no.npy"], "no .npy file"),
        (vec!["--input", "x=@x.npy", "--devices", "2"], "one device"),
        (vec!["--input", "x=@x.npy", "--wire", "f16"], "one device"),
    ] {
        let output = galaxy(path, &[&["run", "--model", "m.onnx"], arguments.as_slice()].concat());
        assert!(!output.status.success() && said(&output).contains(reason), "{}", said(&output));
    }
    let output = galaxy(path, &["run", "--model", "m.onnx", "--ids", "1,2"]);
    assert!(said(&output).contains("takes --input"), "{}", said(&output));
}
