//! Runs directories of ONNX's conformance tests (`model.onnx`, `test_data_set_0/input_0.pb`, `output_0.pb`), and says
//! of each whether its results are right, or why it is not run.
//!
//!     cargo run --release -p galaxy-engine --example onnx_conformance -- [--tolerance 1e-4] DIRECTORY...
//!
//! Without a tolerance results are right within 1e-3 of each value and 1e-7, as ONNX's own runner has it; with one,
//! within so much of the largest value, or of 2.4e-3 for 1e-4 where all are smaller: onnxruntime computes functions whose
//! values go up to 1, as its sigmoid, to two roundings of that. How far they are apart at most is said in the same terms.
//! Shapes come from the inputs; those of whole numbers are fixed as a network is loaded, and others where a network cannot
//! be loaded otherwise.

use galaxy_engine::network::{NetworkEngine, NetworkTensor};
use galaxy_model::onnx::{Array, Fixed, Network, OnnxFile, read_tensor};
use std::{collections::BTreeMap, path::Path};

fn tensor(array: &Array) -> NetworkTensor {
    let values = array.floats().iter().map(|value| *value as f32).collect();
    NetworkTensor { dims: array.dims.clone(), values }
}

/// The network of a file with its inputs, and those of them that are given when it runs.
fn network(file: &OnnxFile, set: &Path) -> Result<(Network, Vec<NetworkTensor>), String> {
    let read = |(at, input): (usize, _)| {
        let array = read_tensor(&set.join(format!("input_{at}.pb")));
        (input, array.ok())
    };
    let inputs: Vec<_> = file.inputs().enumerate().map(read).collect();
    let load = |all: bool| {
        let mut fixed = Fixed::default();
        let mut given = Vec::new();
        for (at, (input, array)) in inputs.iter().enumerate() {
            let Some(array) = array else { continue };
            let is_index = at == 1 && file.path().to_string_lossy().contains("gather");
            if !array.element.is_float() && !is_index || all && at > 0 {
                fixed.values.insert(input.name.clone(), array.clone());
            } else {
                fixed.shapes.insert(input.name.clone(), array.dims.clone());
                given.push(tensor(array));
            }
        }
        Network::of(file, &fixed).map(|network| (network, given)).map_err(|error| error.to_string())
    };
    match load(false) {
        Err(why) if why.contains("has to be fixed") => load(true),
        other => other,
    }
}

/// How far values are apart at most, over the largest one; or the first that is wrong.
fn compare(got: &[f32], want: &[f32], tolerance: Option<f32>) -> Result<f32, String> {
    let most = want.iter().fold(0f32, |most, x| most.max(x.abs()));
    let most = tolerance.map_or(most, |by| most.max(2.0 * f32::EPSILON / by));
    let allowed = |x: f32| tolerance.map_or(1e-7 + 1e-3 * x.abs(), |by| by * most);
    let is_right =
        |a: f32, b: f32| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= allowed(b);
    match got.iter().zip(want).enumerate().find(|(_, (a, b))| !is_right(**a, **b)) {
        Some((at, (a, b))) => {
            Err(format!("value {at} is {a}, and {b} is right, where the largest is {most}"))
        }
        None => {
            let apart = got.iter().zip(want).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
            Ok(apart.fold(0f32, f32::max) / most.max(f32::MIN_POSITIVE))
        }
    }
}

fn case(directory: &Path, tolerance: Option<f32>) -> Result<String, (&'static str, String)> {
    let set = directory.join("test_data_set_0");
    let file = OnnxFile::open(&directory.join("model.onnx"));
    let file = file.map_err(|error| ("left out", error.to_string()))?;
    let (network, given) = network(&file, &set).map_err(|why| ("left out", why))?;
    let wrong = |why: String| ("wrong", why);
    let mut engine =
        NetworkEngine::load(&file, &network, 2).map_err(|error| wrong(error.to_string()))?;
    let mut apart = 0f32;
    // Twice, since the second run finds what the first has left.
    for _ in 0..2 {
        let results = engine.run(&given).map_err(|error| wrong(error.to_string()))?;
        for (at, got) in results.iter().enumerate() {
            let want = read_tensor(&set.join(format!("output_{at}.pb")));
            let want = tensor(&want.map_err(|error| wrong(error.to_string()))?);
            if got.dims != want.dims {
                return Err(wrong(format!("{:?} values, and {:?} are right", got.dims, want.dims)));
            }
            apart = compare(&got.values, &want.values, tolerance).map_err(wrong)?.max(apart);
        }
    }
    Ok(format!("{} steps, {apart:.1e} apart", engine.order().count()))
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut tolerance = None;
    if arguments.first().is_some_and(|first| first == "--tolerance") {
        tolerance = arguments.get(1).and_then(|value| value.parse().ok());
        arguments.drain(..2.min(arguments.len()));
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for argument in arguments {
        let directory = Path::new(&argument);
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (state, text) = match case(directory, tolerance) {
            Ok(text) => ("right", text),
            Err((state, why)) => (state, why),
        };
        *counts.entry(state).or_default() += 1;
        println!("{name}\t{state}\t{text}");
    }
    println!("{counts:?}");
}
