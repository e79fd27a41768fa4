//! Networks of convolutions of well-known shapes, with random weights, as ONNX files: for measurements and tests that
//! depend on structure and speed, and not on results.
//!
//! A network is described by its layers, and written as an exporter writes it: a normalisation and an activation
//! function are nodes of their own. Weights are scaled as He et al. (2015) initialise them, so that values neither vanish
//! nor overflow, and depend on nothing but a seed and the names of network and tensor. They lie in a file beside the
//! model's, and are written part after part.
//!
//! Detectors end before their boxes are decoded: their outputs are the raw maps of each scale.

mod build;
mod darknet;
mod darts;
mod dense;
mod mobile;
mod nasnet;
mod randwire;
mod residual;
mod scaled;
#[cfg(test)]
mod tests;

use crate::{
    onnx::NewModel,
    random::{BUFFER, Numbers, flushed},
    shape::WriteError,
};
use build::Builder;
use galaxy_common::Bytes;
use std::{
    fs::File,
    path::{Path, PathBuf},
};

/// The name of the file of the model.
pub const MODEL: &str = "model.onnx";
/// The name of the file of its weights.
pub const WEIGHTS: &str = "weights.bin";
/// What all weights depend on besides names. Another number gives other networks.
const SEED: u64 = 20_150_206;

/// A network of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name of the network and of its directory.
    pub name: &'static str,
    /// What has the same structure.
    pub like: &'static str,
    /// The side of the images that it reads.
    pub side: u64,
    /// What puts its layers together.
    build: fn(&mut Builder),
}

/// A network with the shapes of all its tensors, to be written.
#[derive(Clone, PartialEq, Debug)]
pub struct Description {
    /// Its nodes. Its weights are said to be in [`WEIGHTS`].
    pub model: NewModel,
    /// Its weights, in the order in which they lie there.
    pub weights: Vec<Weight>,
}

/// A tensor of random values.
#[derive(Clone, PartialEq, Debug)]
pub struct Weight {
    /// What its values depend on: the seed, and the names of the network and of the tensor.
    pub key: String,
    /// How many values it has.
    pub values: u64,
    /// The middle of its values.
    pub center: f32,
    /// The most by which a value differs from that.
    pub amplitude: f32,
    /// Whether it is trained, and counts as a parameter; a mean or variance is measured.
    pub is_trained: bool,
}

static CATALOGUE: [Entry; 21] = [
    entry("resnet-50", "ResNet-50, as torchvision has it", 224, residual::resnet_50),
    entry("resnet-152", "ResNet-152, as torchvision has it", 224, residual::resnet_152),
    entry("resnet-152-608", "ResNet-152 on larger images", 608, residual::resnet_152),
    entry("densenet-121", "DenseNet-121", 224, dense::densenet_121),
    entry("densenet-201", "DenseNet-201", 224, dense::densenet_201),
    entry("densenet-201-608", "DenseNet-201 on larger images", 608, dense::densenet_201),
    entry("mobilenet-v2", "MobileNetV2", 224, mobile::mobilenet_v2),
    entry("yolov3-416", "YOLOv3 of Darknet", 416, darknet::yolov3),
    entry("yolov3-608", "YOLOv3 of Darknet", 608, darknet::yolov3),
    entry("yolov4-416", "YOLOv4 of Darknet", 416, darknet::yolov4),
    entry("yolov4-608", "YOLOv4 of Darknet", 608, darknet::yolov4),
    entry("yolov4-p6", "Scaled YOLOv4, P6, on images of half its side", 640, scaled::yolov4_p6),
    entry("shufflenet-v1", "ShuffleNet 1x of eight groups", 224, mobile::shufflenet_v1),
    entry("shufflenet-v2", "ShuffleNetV2 1x", 224, mobile::shufflenet_v2),
    entry("nasnet-mobile", "NASNet-A 4 @ 1056", 224, nasnet::mobile),
    entry("darts", "DARTS of the second order, for ImageNet", 224, darts::imagenet),
    entry("darts-cifar", "DARTS of the second order, for CIFAR-10", 32, darts::cifar),
    entry("randwire-1", "RandWire WS(4, 0.75), C = 78", 224, |net| randwire::build(net, 1)),
    entry("randwire-2", "RandWire WS(4, 0.75), C = 78", 224, |net| randwire::build(net, 2)),
    entry("randwire-3", "RandWire WS(4, 0.75), C = 78", 224, |net| randwire::build(net, 3)),
    entry("tiny-darts", "nothing: cells of DARTS, for tests", 64, darts::tiny),
];

const fn entry(
    name: &'static str,
    like: &'static str,
    side: u64,
    build: fn(&mut Builder),
) -> Entry {
    Entry { name, like, side, build }
}

/// All networks of the catalogue.
pub fn catalogue() -> &'static [Entry] {
    &CATALOGUE
}

impl Entry {
    /// The network with the shapes of all its tensors.
    pub fn describe(&self) -> Description {
        let mut builder = Builder::new(self.name, self.side);
        (self.build)(&mut builder);
        builder.finish()
    }
}

impl Description {
    /// How many values of its weights are trained.
    pub fn parameters(&self) -> u64 {
        let trained = self.weights.iter().filter(|weight| weight.is_trained);
        trained.map(|weight| weight.values).sum()
    }

    /// The bytes that its weights take, statistics of normalisations included.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.weights.iter().map(|weight| 4 * weight.values).sum())
    }

    /// How many nodes have an operator of this name.
    pub fn count(&self, operator: &str) -> usize {
        self.model.nodes.iter().filter(|node| node.operator == operator).count()
    }

    /// Writes the model and its weights into the existing directory `dir`. `progress` is called with the bytes that were
    /// written since its last call.
    ///
    /// # Errors
    /// When a file cannot be written, for example because the disk is full.
    pub fn write(&self, dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<(), WriteError> {
        let path = dir.join(WEIGHTS);
        let mut write = |file: &mut File| {
            flushed(file, |put| {
                self.put_weights(&mut |bytes: &[u8]| {
                    put(bytes)?;
                    progress(bytes.len() as u64);
                    Ok(())
                })
            })
        };
        File::create(&path).and_then(|mut file| write(&mut file)).map_err(WriteError::at(&path))?;
        self.write_model(dir).map(|_| ())
    }

    /// Writes the model alone into the existing directory `dir`, for what reads no values: the file of weights has its
    /// length and no content. Returns the path of the model.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_structure(&self, dir: &Path) -> Result<PathBuf, WriteError> {
        let path = dir.join(WEIGHTS);
        let file = File::create(&path).and_then(|file| file.set_len(self.bytes().0));
        file.map_err(WriteError::at(&path))?;
        self.write_model(dir)
    }

    fn write_model(&self, dir: &Path) -> Result<PathBuf, WriteError> {
        let path = dir.join(MODEL);
        std::fs::write(&path, self.model.bytes()).map_err(WriteError::at(&path))?;
        Ok(path)
    }

    /// Hands over the bytes of all weights, part after part.
    fn put_weights<E>(&self, put: &mut dyn FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut values = vec![0.0; BUFFER / 4];
        let mut bytes = vec![0; BUFFER];
        for weight in &self.weights {
            let mut numbers = Numbers::new(&weight.key);
            let mut left = weight.values;
            while left > 0 {
                let count = left.min(values.len() as u64) as usize;
                numbers.fill(&mut values[..count], weight.center, weight.amplitude);
                for (out, value) in bytes.as_chunks_mut().0.iter_mut().zip(&values[..count]) {
                    *out = value.to_le_bytes();
                }
                put(&bytes[..4 * count])?;
                left -= count as u64;
            }
        }
        Ok(())
    }
}
