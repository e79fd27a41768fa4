//! `galaxy classify --model FILE.onnx`: images by a network of operators, in this process.

use super::ranked;
use crate::{
    failure::Failure,
    images,
    in_process::cores,
    json,
    networks::{Report, Shapes, failed, is_onnx},
    print, progress,
};
use clap::Args;
use galaxy_common::Bytes;
use galaxy_engine::network::{NetworkEngine, NetworkError, NetworkTensor};
use galaxy_model::{
    image::{Filter, ImageProcessor, Preparation, Resizing},
    onnx::{Network, OnnxFile, Scores, ValueId},
    softmax,
};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

/// The mean and the deviation of ImageNet's red, green and blue, by which torchvision's models are trained.
const IMAGENET: ([f32; 3], [f32; 3]) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);
/// The most bytes of a file of labels.
const MAX_LABELS: u64 = 1 << 24;

/// Arguments for a network of an ONNX file. Such a file does not say how images are prepared for it.
#[derive(Args, Debug)]
#[command(next_help_heading = "With --model")]
pub(super) struct NetworkArgs {
    /// Classify images by this ONNX file in this process, without a cluster.
    #[arg(long, value_name = "FILE.onnx", requires = "image", conflicts_with_all = ["texts", "file"])]
    model: Option<PathBuf>,
    /// File with the label of each class in a line [default: those that the ONNX file names, else numbers].
    #[arg(long, value_name = "FILE", requires = "model")]
    labels: Option<PathBuf>,
    /// How images get the size that the network reads: the shorter side is resized to so many pixels, and the centre is
    /// cut out; or they are stretched [default: 8/7 of the size; stretch where that is no square].
    #[arg(long, value_name = "PIXELS|stretch", requires = "model")]
    resize: Option<Resize>,
    /// What values from 0 to 255 are multiplied by [default: 1/255].
    #[arg(long, value_name = "FACTOR", requires = "model", value_parser = finite)]
    scale: Option<f64>,
    /// Mean that is then subtracted, one or of each channel in the order of --channels [default: ImageNet's].
    ///
    /// ImageNet's is 0.485,0.456,0.406 of red, green and blue.
    #[arg(long, value_name = "MEAN", requires = "model")]
    mean: Option<OfChannels>,
    /// Deviation that is divided by at last, one or of each channel in the order of --channels [default: ImageNet's].
    ///
    /// ImageNet's is 0.229,0.224,0.225 of red, green and blue.
    #[arg(long, value_name = "DEVIATION", requires = "model", value_parser = deviation)]
    std: Option<OfChannels>,
    /// Order of the channels that the network reads [default: rgb].
    #[arg(long, value_enum, value_name = "ORDER", requires = "model")]
    channels: Option<Channels>,
    /// What the network gives [default: probabilities if its last operator is Softmax or Sigmoid, else logits].
    #[arg(long, value_enum, value_name = "WHAT", requires = "model")]
    scores: Option<ScoresName>,
    #[command(flatten)]
    shapes: Shapes,
    /// Kernel threads [default: the cores of this machine].
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// How images are resized, as `--resize` names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Resize {
    Stretch,
    Shorter(u32),
}

impl FromStr for Resize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("stretch", _) => Ok(Self::Stretch),
            (_, Ok(shorter)) if shorter > 0 => Ok(Self::Shorter(shorter)),
            _ => Err("give the pixels of the shorter side, or stretch".to_owned()),
        }
    }
}

/// A number for each channel: `0.5`, or `0.1,0.2,0.3`.
#[derive(Clone, Copy, PartialEq, Debug)]
struct OfChannels([f32; 3]);

impl FromStr for OfChannels {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split(',').map(|number| number.trim().parse());
        let numbers: Vec<f32> = numbers.collect::<Result<_, _>>().unwrap_or_default();
        let all = match numbers[..] {
            [one] => [one; 3],
            [a, b, c] => [a, b, c],
            _ => return Err("give one number, or three between commas".to_owned()),
        };
        match all.iter().all(|number| number.is_finite()) {
            true => Ok(Self(all)),
            false => Err("give finite numbers".to_owned()),
        }
    }
}

/// Parses deviations, which are above zero.
fn deviation(text: &str) -> Result<OfChannels, String> {
    let of: OfChannels = text.parse()?;
    match of.0.iter().all(|number| *number > 0.0) {
        true => Ok(of),
        false => Err("a deviation is above zero".to_owned()),
    }
}

/// Parses a finite number.
fn finite(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite());
    number.ok_or_else(|| "give a number".to_owned())
}

/// The orders that `--channels` names.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Channels {
    Rgb,
    Bgr,
}

/// The kinds of results that `--scores` names.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum ScoresName {
    Logits,
    Probabilities,
}

/// What `galaxy classify --model` prints.
#[derive(Serialize)]
struct Answer {
    labels: Vec<String>,
    scores: ScoresName,
    /// The logits of each image, where the network gives logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    logits: Option<Vec<Vec<f32>>>,
    probabilities: Vec<Vec<f32>>,
    report: Report,
}

impl NetworkArgs {
    /// Whether an ONNX file is named. Shapes alone are those of nothing.
    pub(super) fn is_given(&self) -> Result<bool, Failure> {
        match self.model.is_none() && !self.shapes.is_empty() {
            true => Err(Failure::usage("--shape goes with an ONNX file: --model FILE.onnx")),
            false => Ok(self.model.is_some()),
        }
    }

    /// How images are prepared for a network that reads so many rows and columns.
    fn preparation(&self, width: u32, height: u32) -> Preparation {
        let stretch = Resizing::Stretch { width, height };
        let resize = match self.resize {
            Some(Resize::Stretch) => stretch,
            Some(Resize::Shorter(shorter)) => Resizing::Centre { shorter },
            // 256 pixels for 224, and 342 for 299: what torchvision's models are evaluated with.
            None if width == height => {
                let shorter = (u64::from(width) * 8 + 3) / 7;
                Resizing::Centre { shorter: u32::try_from(shorter).unwrap_or(u32::MAX) }
            }
            None => stretch,
        };
        let blue_first = self.channels == Some(Channels::Bgr);
        let imagenet = |mut of: [f32; 3]| {
            if blue_first {
                of.reverse();
            }
            OfChannels(of)
        };
        Preparation {
            size: (width, height),
            resize,
            filter: Filter::Bilinear,
            scale: self.scale.unwrap_or(1.0 / 255.0),
            mean: self.mean.unwrap_or_else(|| imagenet(IMAGENET.0)).0,
            deviation: self.std.unwrap_or_else(|| imagenet(IMAGENET.1)).0,
            blue_first,
        }
    }

    /// The labels of so many classes.
    fn labels(&self, file: &OnnxFile, classes: usize) -> Result<Vec<String>, Failure> {
        let (labels, place) = match &self.labels {
            Some(path) => (Some(lines(path)?), path.as_path()),
            None => {
                let named = file.labels().map_err(|error| failed(error).todo("give --labels FILE"));
                (named?, file.path())
            }
        };
        match labels {
            None => Ok((0..classes).map(|class| class.to_string()).collect()),
            Some(labels) if labels.len() == classes => Ok(labels),
            Some(labels) => Err(Failure::new(format!(
                "it names {} classes, and the network has {classes}",
                labels.len()
            ))
            .at(place.display())
            .todo(format!("give --labels FILE with {classes} lines"))),
        }
    }
}

/// The lines of a file of labels.
fn lines(path: &Path) -> Result<Vec<String>, Failure> {
    let bytes = images::bounded(path, MAX_LABELS)?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::new("it is no text of UTF-8").at(path.display()))?;
    Ok(text.lines().map(|line| line.trim().to_owned()).collect())
}

/// How a network reads an image.
struct ImageInput {
    dims: Vec<u64>,
    width: u32,
    height: u32,
    /// Whether the channels of a pixel lie side by side.
    channels_last: bool,
}

impl ImageInput {
    /// How an input of this shape is an image, if it is one.
    fn of(dims: &[u64]) -> Option<Self> {
        let (height, width, channels_last) = match *dims {
            [1, 3, height, width] => (height, width, false),
            [1, height, width, 3] => (height, width, true),
            _ => return None,
        };
        let (width, height) = (u32::try_from(width).ok()?, u32::try_from(height).ok()?);
        Some(Self { dims: dims.to_vec(), width, height, channels_last })
    }

    /// The tensor of pixels `[channels, height, width]`.
    fn tensor(&self, pixels: Vec<f32>) -> NetworkTensor {
        let count = pixels.len() / 3;
        let values = match self.channels_last {
            true => (0..3 * count).map(|at| pixels[at % 3 * count + at / 3]).collect(),
            false => pixels,
        };
        NetworkTensor { dims: self.dims.clone(), values }
    }
}

/// The image that a network reads, its only result, and how many classes that has.
fn ports(path: &Path, network: &Network) -> Result<(ImageInput, ValueId, usize), Failure> {
    let dims = |id: &ValueId| &network.value(*id).dims;
    let image = match &network.inputs[..] {
        [one] => ImageInput::of(dims(one)),
        _ => None,
    };
    // One image gives one list of numbers, whatever axes of length 1 are around it.
    let classes = match &network.outputs[..] {
        [one] => {
            let long = dims(one).iter().filter(|side| **side != 1).copied().collect::<Vec<_>>();
            match long[..] {
                [classes] if classes > 1 => usize::try_from(classes).ok().map(|all| (*one, all)),
                _ => None,
            }
        }
        _ => None,
    };
    if let (Some(image), Some((result, classes))) = (image, classes) {
        return Ok((image, result, classes));
    }
    let named = |ids: &[ValueId]| {
        let one = |id: &ValueId| format!("{:?} {:?}", network.value(*id).name, dims(id));
        ids.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    Err(Failure::new(format!(
        "a network that classifies reads one image, [1, 3, height, width], and gives one list of classes; this one reads {} and gives {}",
        named(&network.inputs),
        named(&network.outputs)
    ))
    .at(path.display())
    .todo("`galaxy run --model FILE.onnx --input NAME=@FILE.npy` gives all results of any network"))
}

/// Runs `galaxy classify` with an ONNX file.
pub(super) async fn classify(
    args: NetworkArgs,
    images: Vec<PathBuf>,
    as_json: bool,
) -> Result<(), Failure> {
    let names: Vec<String> = images.iter().map(|path| path.display().to_string()).collect();
    let work = tokio::task::spawn_blocking(move || here(&args, &images));
    let answer = progress::watch("classifying in this process", work)
        .await
        .map_err(|e| Failure::new(format!("the run broke off: {e}")))??;
    print(&if as_json { json(&answer)? } else { shown(&names, &answer) })
}

fn here(args: &NetworkArgs, images: &[PathBuf]) -> Result<Answer, Failure> {
    let Some(path) = args.model.as_ref().filter(|path| is_onnx(path)) else {
        return Err(Failure::usage(
            "--model is no ONNX file: only these classify without a cluster",
        )
        .todo("`galaxy up --model DIR` makes a cluster for a model directory"));
    };
    let wrong = |error: NetworkError| Failure::new(error.to_string());
    let begin = Instant::now();
    let (file, network) = args.shapes.open(path)?;
    let (input, result, classes) = ports(path, &network)?;
    let labels = args.labels(&file, classes)?;
    let processor = ImageProcessor::new(args.preparation(input.width, input.height));
    let processor = processor.map_err(|error| Failure::usage(error.to_string()))?;
    let scores = args.scores.unwrap_or(match network.scores(result) {
        Scores::Logits => ScoresName::Logits,
        Scores::Probabilities => ScoresName::Probabilities,
    });
    let prepared = |path: &PathBuf| -> Result<NetworkTensor, Failure> {
        let pixels = processor.pixels(&images::file(path)?);
        let pixels = pixels.map_err(|error| Failure::new(error.to_string()).at(path.display()))?;
        Ok(input.tensor(pixels))
    };
    let tensors = images.iter().map(prepared).collect::<Result<Vec<_>, _>>()?;
    let mut engine =
        NetworkEngine::load(&file, &network, args.threads.unwrap_or_else(cores)).map_err(wrong)?;
    let loaded = Instant::now();
    let mut results = Vec::new();
    for tensor in &tensors {
        let tensors = engine.run(std::slice::from_ref(tensor)).map_err(wrong)?;
        results.extend(tensors.into_iter().map(|tensor| tensor.values));
    }
    let report = Report::of(&engine, [begin, loaded, Instant::now()]);
    Ok(match scores {
        ScoresName::Probabilities => {
            Answer { labels, scores, logits: None, probabilities: results, report }
        }
        ScoresName::Logits => {
            let probabilities = results.iter().map(|logits| softmax(logits)).collect();
            Answer { labels, scores, logits: Some(results), probabilities, report }
        }
    })
}

/// The best classes of each image, and what they cost.
fn shown(names: &[String], answer: &Answer) -> String {
    let Report { load_ms, execute_ms, weight_bytes, arena_bytes } = &answer.report;
    ranked(names, &answer.labels, &answer.probabilities)
        + &format!(
            "{} image{}; load {load_ms:.2} ms, execute {execute_ms:.2} ms; {} of weights, {} of values\n",
            names.len(),
            if names.len() == 1 { "" } else { "s" },
            Bytes(*weight_bytes),
            Bytes(*arena_bytes),
        )
}
