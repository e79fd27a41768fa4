//! `galaxy classify` with an ONNX file.
#![allow(clippy::unwrap_used)]

use galaxy_model::onnx::{NewAttribute, NewModel, NewNode};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The means of red, green and blue of the image of 77 x 31 pixels.
const MEANS: [f64; 3] = [128.20612, 127.0553, 125.57227];
/// What torchvision makes of the same image for 224 x 224 pixels, in the mean of each channel.
const TORCHVISION: [f64; 3] = [0.116693, 0.219788, 0.375471];
/// Arguments by which values stay as they are in the file.
const AS_THEY_ARE: [&str; 8] = ["--resize", "stretch", "--scale", "1", "--mean", "0", "--std", "1"];

fn image() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/vit/image.png")
}

/// A network whose classes are the means of its three channels.
fn means(dims: [Option<u64>; 4]) -> NewModel {
    NewModel {
        opset: 17,
        nodes: vec![
            NewNode::new("GlobalAveragePool", &["x"], "p"),
            NewNode::new("Flatten", &["p"], "y"),
        ],
        inputs: vec![("x".into(), dims.to_vec())],
        outputs: vec!["y".into()],
        tensors: Vec::new(),
    }
}

fn fixed(dims: [u64; 4]) -> NewModel {
    means(dims.map(Some))
}

/// Runs `galaxy classify` in a directory in which `m.onnx` has these bytes.
fn classify(directory: &Path, bytes: &[u8], arguments: &[&str]) -> Output {
    fs::write(directory.join("m.onnx"), bytes).unwrap();
    Command::new(env!("CARGO_BIN_EXE_galaxy"))
        .current_dir(directory)
        .args(["classify", "--model", "m.onnx", "--image"])
        .arg(image())
        .args(arguments)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

fn answer(bytes: &[u8], arguments: &[&str]) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let output = classify(directory.path(), bytes, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn assert_near(value: &Value, want: [f64; 3]) {
    let have = numbers(value);
    let near = have.len() == 3 && have.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-3);
    assert!(near, "{have:?} instead of {want:?}");
}

#[test]
fn logits_become_probabilities_of_the_labels_in_the_file() {
    let bytes =
        fixed([1, 3, 31, 77]).bytes_with(&[("names", "{0: 'red', 1: \"green\", 2: 'blue'}")]);
    let directory = tempfile::tempdir().unwrap();
    let shown = said(&classify(directory.path(), &bytes, &AS_THEY_ARE));
    assert!(shown.contains("red 0.7204, green 0.2279, blue 0.0517  \""), "{shown}");
    let found = answer(&bytes, &AS_THEY_ARE);
    assert_eq!(found["labels"], json!(["red", "green", "blue"]));
    assert_eq!(found["scores"], "logits");
    assert_near(&found["logits"][0], MEANS);
    assert!((numbers(&found["probabilities"][0]).iter().sum::<f64>() - 1.0).abs() < 1e-6);
    assert!(found["report"]["arena_bytes"].as_u64().unwrap() > 0);
    let two = answer(&bytes, &[&["--image", image().to_str().unwrap()], &AS_THEY_ARE[..]].concat());
    assert_eq!(two["logits"][0], two["logits"][1]);
}

#[test]
fn images_are_prepared_as_torchvision_does_where_nothing_is_said() {
    let found = answer(&fixed([1, 3, 224, 224]).bytes(), &[]);
    assert_eq!(found["labels"], json!(["0", "1", "2"]));
    assert_near(&found["logits"][0], TORCHVISION);
    let last_first = answer(&fixed([1, 3, 224, 224]).bytes(), &["--channels", "bgr"]);
    let [red, green, blue] = TORCHVISION;
    assert_near(&last_first["logits"][0], [blue, green, red]);
}

#[test]
fn options_say_how_images_are_prepared() {
    let model = fixed([1, 3, 31, 77]).bytes();
    let caffe = ["--channels", "bgr", "--scale", "2", "--mean", "1,2,3", "--std", "4"];
    let [red, green, blue] = MEANS;
    let want = [(2.0 * blue - 1.0) / 4.0, (2.0 * green - 2.0) / 4.0, (2.0 * red - 3.0) / 4.0];
    assert_near(&answer(&model, &caffe)["logits"][0], want);
    // Nothing is left to be cut off.
    let cut = answer(&model, &[&["--resize", "31"], &AS_THEY_ARE[2..]].concat());
    assert_near(&cut["logits"][0], MEANS);
    let open = means([None, Some(3), None, None]).bytes();
    let shape = [&["--shape", "x=1x3x31x77"], &AS_THEY_ARE[..]].concat();
    assert_near(&answer(&open, &shape)["logits"][0], MEANS);
    let mut last = fixed([1, 31, 77, 3]);
    last.nodes[0].inputs = vec!["t".into()];
    let order = NewAttribute::Wholes(vec![0, 3, 1, 2]);
    last.nodes.insert(0, NewNode::new("Transpose", &["x"], "t").with("perm", order));
    assert_near(&answer(&last.bytes(), &AS_THEY_ARE)["logits"][0], MEANS);
}

#[test]
fn what_a_softmax_gives_is_shown_as_it_is() {
    let plain = answer(&fixed([1, 3, 31, 77]).bytes(), &AS_THEY_ARE);
    let mut model = fixed([1, 3, 31, 77]);
    model.nodes.push(NewNode::new("Softmax", &["y"], "z"));
    model.outputs = vec!["z".into()];
    let found = answer(&model.bytes(), &AS_THEY_ARE);
    assert_eq!((&found["scores"], found.get("logits")), (&json!("probabilities"), None));
    let want: [f64; 3] = numbers(&plain["probabilities"][0]).try_into().unwrap();
    assert_near(&found["probabilities"][0], want);
    let forced = answer(&model.bytes(), &[&["--scores", "logits"], &AS_THEY_ARE[..]].concat());
    assert_eq!(forced["scores"], "logits");
    assert_near(&forced["logits"][0], want);
}

#[test]
fn what_does_not_classify_is_refused_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("two.txt"), "red\ngreen\n").unwrap();
    fs::write(path.join("three.txt"), "red\ngreen\nblue, as the sky\n").unwrap();
    let model = fixed([1, 3, 31, 77]);
    let refused = |model: &NewModel, metadata: &[(&str, &str)], arguments: &[&str], why: &str| {
        let output = classify(path, &model.bytes_with(metadata), arguments);
        assert!(!output.status.success() && said(&output).contains(why), "{}", said(&output));
    };
    refused(&model, &[], &["--labels", "two.txt"], "names 2 classes, and the network has 3");
    refused(&model, &[("names", "['a']")], &[], "give --labels FILE with 3 lines");
    refused(&model, &[("names", "['a]")], &[], "under \"names\" is no list of labels");
    refused(&model, &[], &["--resize", "30"], "74 x 30 pixels, and the model reads 77 x 31");
    let open = means([None, Some(3), None, None]);
    refused(&open, &[], &[], "--shape x=Nx3xNxN");
    let batch = fixed([2, 3, 31, 77]);
    refused(&batch, &[], &[], "this one reads \"x\" [2, 3, 31, 77] and gives \"y\" [2, 3]");
    let image = NewModel { outputs: vec!["p".into(), "y".into()], ..model.clone() };
    refused(&image, &[], &[], "`galaxy run --model FILE.onnx --input NAME=@FILE.npy`");
    let output = classify(path, &model.bytes(), &["--labels", "three.txt"]);
    assert!(said(&output).contains("blue, as the sky 0."), "{}", said(&output));
}
