//! ONNX files on the command line: which inputs they get, and what comes out.

use super::{
    failure::Failure,
    in_process::cores,
    json, npy, print, progress,
    tensors::{Destination, NamedTensor},
};
use clap::Args;
use galaxy_common::Bytes;
use galaxy_engine::network::{NetworkEngine, NetworkError, NetworkMemory, NetworkTensor};
use galaxy_model::{
    ModelError,
    onnx::{Fixed, Network, OnnxFile},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

/// Whether a path is that of an ONNX file, by its name.
pub fn is_onnx(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("onnx"))
}

/// The shape of an input: `NAME=1x3x224x224`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputShape {
    name: String,
    dims: Vec<u64>,
}

impl FromStr for InputShape {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, shape) = text
            .rsplit_once('=')
            .ok_or("give the name of an input, =, and its shape, like x=1x3x224x224")?;
        let dims = shape.split('x').map(str::parse).collect::<Result<Vec<_>, _>>();
        let dims = dims.map_err(|_| format!("{shape:?} is no shape like 1x3x224x224"))?;
        Ok(Self { name: name.to_owned(), dims })
    }
}

/// The values of an input: `NAME=@FILE.npy`, or `@FILE.npy` of a network with one input.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InputFile {
    name: Option<String>,
    path: PathBuf,
}

impl FromStr for InputFile {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.strip_prefix('@') {
            Some(path) => (None, path),
            None => {
                let (name, path) =
                    text.split_once("=@").ok_or("give NAME=@FILE.npy, or @FILE.npy")?;
                (Some(name.to_owned()), path)
            }
        };
        Ok(Self { name, path: PathBuf::from(path) })
    }
}

/// Arguments about the shapes of a network's inputs.
#[derive(Args, Debug)]
pub struct Shapes {
    /// Shape of an input of an ONNX file that leaves it open, like x=1x3x224x224; may be given several times.
    #[arg(long, value_name = "NAME=SHAPE")]
    shape: Vec<InputShape>,
}

/// A failure of an ONNX file.
pub fn failed(error: ModelError) -> Failure {
    Failure::new(error.to_string())
}

impl Shapes {
    /// Whether none is given.
    pub fn is_empty(&self) -> bool {
        self.shape.is_empty()
    }

    /// A file, and its network with these shapes.
    pub fn open(&self, path: &Path) -> Result<(OnnxFile, Network), Failure> {
        let shapes =
            self.shape.iter().map(|shape| (shape.name.clone(), shape.dims.clone())).collect();
        let file = OnnxFile::open(path).map_err(failed)?;
        let fixed = Fixed { shapes, values: BTreeMap::new() };
        let network = Network::of(&file, &fixed).map_err(failed)?;
        Ok((file, network))
    }
}

/// What `galaxy run` prints of a network.
#[derive(Serialize)]
struct Document {
    outputs: Vec<NamedTensor>,
    report: Report,
}

/// How a network ran.
#[derive(Serialize)]
pub struct Report {
    /// The time until it was ready to run.
    pub load_ms: f64,
    /// The time that it ran.
    pub execute_ms: f64,
    /// Bytes of its weights as held.
    pub weight_bytes: u64,
    /// Bytes of the arena of all values that operators compute.
    pub arena_bytes: u64,
}

impl Report {
    /// The report of a network that was ready and was over at these times.
    pub fn of(engine: &NetworkEngine, [begin, loaded, ended]: [Instant; 3]) -> Self {
        let NetworkMemory { weights: Bytes(weight_bytes), arena: Bytes(arena_bytes), .. } =
            engine.memory();
        let milliseconds = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let (load_ms, execute_ms) = (milliseconds(begin, loaded), milliseconds(loaded, ended));
        Self { load_ms, execute_ms, weight_bytes, arena_bytes }
    }
}

/// The inputs of a network by their names: those that are given when it runs, and those that shapes depend on.
struct Given {
    tensors: BTreeMap<String, NetworkTensor>,
    fixed: Fixed,
}

/// Reads inputs. Whole numbers are fixed when the network is loaded, since shapes may depend on them.
fn given(file: &OnnxFile, inputs: &[InputFile]) -> Result<Given, Failure> {
    let names: Vec<&str> = file.inputs().map(|input| input.name.as_str()).collect();
    let mut of = Given { tensors: BTreeMap::new(), fixed: Fixed::default() };
    for input in inputs {
        let name = match (&input.name, names.as_slice()) {
            (Some(name), _) => name.clone(),
            (None, [one]) => (*one).to_owned(),
            (None, _) => {
                return Err(Failure::usage(format!(
                    "the file has the inputs {names:?}: say which one, as NAME=@FILE.npy"
                ))
                .at("--input"));
            }
        };
        let array =
            npy::read(&input.path).map_err(|why| Failure::new(why).at(input.path.display()))?;
        if !names.contains(&name.as_str()) {
            return Err(Failure::usage(format!(
                "the file has no input {name:?}: its inputs are {names:?}"
            ))
            .at("--input"));
        }
        if array.element.is_float() {
            let values = array.floats().iter().map(|value| *value as f32).collect();
            of.fixed.shapes.insert(name.clone(), array.dims.clone());
            of.tensors.insert(name, NetworkTensor { dims: array.dims, values });
        } else {
            of.fixed.values.insert(name, array);
        }
    }
    let is_given = |name: &str| of.tensors.contains_key(name) || of.fixed.values.contains_key(name);
    match names.iter().find(|name| !is_given(name)) {
        Some(name) => Err(Failure::usage(format!(
            "the input {name:?} is missing: give --input {name}=@FILE.npy"
        ))),
        None => Ok(of),
    }
}

/// Runs `galaxy run` with an ONNX file, in this process.
pub async fn run(
    path: PathBuf,
    inputs: Vec<InputFile>,
    threads: Option<u16>,
    destination: Option<&Destination>,
    as_json: bool,
) -> Result<(), Failure> {
    let work = tokio::task::spawn_blocking(move || here(&path, &inputs, threads));
    let document = progress::watch("running in this process", work)
        .await
        .map_err(|e| Failure::new(format!("the run broke off: {e}")))??;
    if let Some(destination) = destination {
        destination.write_named(&document.outputs, || json(&document))?;
        if !as_json {
            let names: Vec<&str> =
                document.outputs.iter().map(|tensor| tensor.name.as_str()).collect();
            return print(&format!(
                "wrote {} to {}\n",
                names.join(", "),
                destination.path().display()
            ));
        }
    }
    print(&json(&document)?)
}

fn here(path: &Path, inputs: &[InputFile], threads: Option<u16>) -> Result<Document, Failure> {
    let begin = Instant::now();
    let file = OnnxFile::open(path).map_err(failed)?;
    let given = given(&file, inputs)?;
    let network = Network::of(&file, &given.fixed).map_err(failed)?;
    let wrong = |error: NetworkError| Failure::new(error.to_string());
    let mut engine =
        NetworkEngine::load(&file, &network, threads.unwrap_or_else(cores)).map_err(wrong)?;
    let mut tensors = given.tensors;
    let ordered: Vec<NetworkTensor> =
        engine.inputs().filter_map(|(name, _)| tensors.remove(name)).collect();
    let loaded = Instant::now();
    let results = engine.run(&ordered).map_err(wrong)?;
    let report = Report::of(&engine, [begin, loaded, Instant::now()]);
    let named = |((name, _), tensor): ((&str, &[u64]), NetworkTensor)| NamedTensor {
        name: name.to_owned(),
        shape: tensor.dims,
        values: tensor.values,
    };
    Ok(Document { outputs: engine.outputs().zip(results).map(named).collect(), report })
}
