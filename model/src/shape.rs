//! Shapes of well-known models, and models of such shapes with made-up weights, for measurements
//! and tests that depend on speed and not on results.
//!
//! A directory that is written here looks as if `transformers` had written it: the same files,
//! tensor names, shapes and types. Values depend only on the names of their tensors, and are small
//! enough that no layer overflows.

mod family;
mod write;

use crate::{ModelError, ModelSpec, config::Fields};
use galaxy_common::{Bytes, WeightFormat};
use std::{
    io,
    path::{Path, PathBuf},
};

/// The most bytes of a file of weights, as `transformers` cut them for years.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// The shape of a model, whatever its family.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shape {
    /// The `model_type` of its config.
    pub family: &'static str,
    /// The number of layers.
    pub layers: u32,
    /// The hidden size: values in a row.
    pub hidden: u32,
    /// The number of query heads.
    pub heads: u32,
    /// The number of key-value heads.
    pub kv_heads: u32,
    /// The intermediate size of the MLP.
    pub intermediate: u32,
    /// Rows of the token embedding table; in an image model, the number of classes.
    pub vocabulary: u32,
    /// The longest sequence that the model is for, in rows.
    pub positions: u32,
    /// The format in which its weights are stored.
    pub format: WeightFormat,
    /// Config fields that differ from the family's, as a JSON object.
    pub config: &'static str,
}

/// How the values of a tensor are distributed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// Around one, within 0.05.
    Norm,
    /// Around zero, within 0.01.
    Bias,
    /// Around zero, with a deviation of 0.02.
    Weight,
    /// Around zero, and smaller the more layers there are: each layer adds it to the residual.
    Residual,
}

/// A tensor to be written.
#[derive(Clone, PartialEq, Debug)]
pub struct Tensor {
    /// The tensor's full name.
    pub name: String,
    /// The shape, as the family stores it.
    pub shape: Vec<u32>,
    /// How the values are distributed.
    pub fill: Fill,
}

impl Tensor {
    /// The number of values.
    pub fn values(&self) -> u64 {
        self.shape.iter().map(|&n| u64::from(n)).product()
    }
}

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}")]
pub struct WriteError {
    /// The file that was to be written.
    pub path: PathBuf,
    /// The error of the operating system.
    pub source: io::Error,
}

impl WriteError {
    pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + use<'_> {
        move |source| Self { path: path.to_owned(), source }
    }
}

/// A model of the catalogue.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// The name of the model and of its directory.
    pub name: &'static str,
    /// The published model that has the same shape.
    pub like: &'static str,
    /// The shape of the model.
    pub shape: Shape,
}

/// A model of the usual proportions, in 32-bit floats.
const fn usual(family: &'static str, layers: u32, hidden: u32, heads: u32) -> Shape {
    Shape {
        family,
        layers,
        hidden,
        heads,
        kv_heads: heads,
        intermediate: 4 * hidden,
        vocabulary: 30_522,
        positions: 512,
        format: WeightFormat::F32,
        config: "{}",
    }
}

const fn gpt2(layers: u32, hidden: u32, heads: u32) -> Shape {
    Shape { vocabulary: 50_257, positions: 1024, ..usual("gpt2", layers, hidden, heads) }
}

const fn opt(layers: u32, hidden: u32, heads: u32) -> Shape {
    Shape { vocabulary: 50_272, positions: 2048, ..usual("opt", layers, hidden, heads) }
}

static CATALOGUE: [Model; 15] = [
    Model {
        name: "distilbert",
        like: "distilbert/distilbert-base-uncased",
        shape: usual("distilbert", 6, 768, 12),
    },
    Model {
        name: "bert-large",
        like: "google-bert/bert-large-uncased",
        shape: usual("bert", 24, 1024, 16),
    },
    Model { name: "gpt2-medium", like: "openai-community/gpt2-medium", shape: gpt2(24, 1024, 16) },
    Model { name: "gpt2-large", like: "openai-community/gpt2-large", shape: gpt2(36, 1280, 20) },
    Model { name: "opt-1.3b", like: "facebook/opt-1.3b", shape: opt(24, 2048, 32) },
    Model { name: "opt-2.7b", like: "facebook/opt-2.7b", shape: opt(32, 2560, 32) },
    // A few layers of these, as many as a small device has room for.
    Model { name: "gpt2-large-4", like: "openai-community/gpt2-large", shape: gpt2(4, 1280, 20) },
    Model { name: "opt-2.7b-4", like: "facebook/opt-2.7b", shape: opt(4, 2560, 32) },
    Model {
        name: "vit-large",
        like: "google/vit-large-patch16-224",
        // One row for each of 14 x 14 image patches, and one for the class.
        shape: Shape { vocabulary: 1000, positions: 197, ..usual("vit", 24, 1024, 16) },
    },
    Model {
        name: "gpt-j-6b",
        like: "EleutherAI/gpt-j-6b",
        shape: Shape {
            vocabulary: 50_400,
            positions: 2048,
            format: WeightFormat::F16,
            ..usual("gptj", 28, 4096, 16)
        },
    },
    Model {
        name: "llama-125m",
        like: "facebook/MobileLLM-125M",
        shape: Shape {
            kv_heads: 3,
            intermediate: 1536,
            vocabulary: 32_000,
            positions: 2048,
            format: WeightFormat::Bf16,
            ..usual("llama", 30, 576, 9)
        },
    },
    Model {
        name: "llama-1b",
        like: "meta-llama/Llama-3.2-1B",
        shape: Shape {
            kv_heads: 8,
            vocabulary: 128_256,
            positions: 131_072,
            format: WeightFormat::Bf16,
            config: r#"{
                "bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 500000.0,
                "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3" }
            }"#,
            ..usual("llama", 16, 2048, 32)
        },
    },
    Model {
        name: "all-MiniLM-L6-v2",
        like: "sentence-transformers/all-MiniLM-L6-v2",
        shape: usual("bert", 6, 384, 12),
    },
    Model {
        name: "tiny-bert",
        like: "nothing: for tests",
        shape: Shape { vocabulary: 1000, ..usual("bert", 2, 64, 4) },
    },
    Model {
        name: "tiny-gpt2",
        like: "nothing: for tests",
        shape: Shape { vocabulary: 1000, positions: 512, ..gpt2(2, 64, 4) },
    },
];

/// All models of the catalogue, the small ones for tests at the end.
pub fn catalogue() -> &'static [Model] {
    &CATALOGUE
}

impl Shape {
    /// The number of weights; a table that is used twice counts once.
    pub fn parameters(&self) -> u64 {
        self.tensors().iter().map(Tensor::values).sum()
    }

    /// The bytes that the weights take on disk.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.format.bytes(1, self.parameters()))
    }

    /// A BERT of this shape with a small vocabulary.
    pub const fn bert(layers: u32, hidden: u32, heads: u32) -> Self {
        Self { vocabulary: 1000, ..usual("bert", layers, hidden, heads) }
    }

    /// The description of a model of this shape, without any files.
    ///
    /// # Errors
    /// When the family is not known here.
    pub fn spec(&self) -> Result<ModelSpec, ModelError> {
        let config = self.config();
        let fields = Fields::new(Path::new(self.family), &config)?;
        crate::family::read(&fields).map(|described| described.spec)
    }

    /// Writes a model of this shape into the existing directory `dir`, in files of weights of at
    /// most `shard_bytes`. `progress` is called with the bytes that were written since its last
    /// call.
    ///
    /// # Errors
    /// When a file cannot be written, for example because the disk is full.
    pub fn write(
        &self,
        dir: &Path,
        shard_bytes: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), WriteError> {
        write::write(dir, &self.tensors(), self.layers, self.format, shard_bytes, progress)?;
        if let Some(preprocessor) = family::preprocessor(self) {
            write::json_file(&dir.join("preprocessor_config.json"), &preprocessor)?;
        }
        self.write_config(dir)
    }

    /// Writes only the `config.json`.
    ///
    /// # Errors
    /// When the file cannot be written, for example because the disk is full.
    pub fn write_config(&self, dir: &Path) -> Result<(), WriteError> {
        write::json_file(&dir.join("config.json"), &self.config())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn generated_weights_depend_on_name_and_kind_of_the_tensor() {
        let values = |name: &str, fill| {
            let tensor = Tensor { name: name.into(), shape: vec![600, 1000], fill };
            let dir = tempfile::tempdir().unwrap();
            write::write(dir.path(), &[tensor], 2, WeightFormat::F32, u64::MAX, &mut |_| {})
                .unwrap();
            let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let words = file.tensor(name).unwrap().data().as_chunks().0;
            words.iter().map(|&word| f32::from_le_bytes(word)).collect::<Vec<_>>()
        };
        let spread = |values: &[f32], center: f32| {
            let square = |v: &f32| f64::from(v - center).powi(2);
            (values.iter().map(square).sum::<f64>() / values.len() as f64).sqrt()
        };
        let weights = values("a", Fill::Weight);
        assert_eq!(weights, values("a", Fill::Weight));
        assert_ne!(weights, values("b", Fill::Weight));
        // There is more than one buffer of values, and no buffer equals the one before.
        assert_ne!(weights[..1000], weights[(1 << 18)..][..1000]);
        assert!((spread(&weights, 0.0) - 0.02).abs() < 1e-4);
        assert!((spread(&values("a", Fill::Residual), 0.0) - 0.01).abs() < 1e-4);
        let norms = values("a", Fill::Norm);
        assert!(norms.iter().all(|v| (0.9..1.1).contains(v)) && spread(&norms, 1.0) > 0.02);
    }
}
