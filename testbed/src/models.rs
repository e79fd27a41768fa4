//! Models with random weights in the shapes of well-known ones, for measuring.
//!
//! A directory of this cache is one that `transformers` would have written: the same files, tensor
//! names, shapes and types. Values depend on nothing but the names of their tensors, and are small
//! enough that no layer overflows.

mod family;
mod write;

pub use family::Shape;

use anyhow::{Context, Result, bail, ensure};
use galaxy_common::Bytes;
use galaxy_model::{Dtype, ModelDir, ModelError};
use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    time::Instant,
};

/// What `models` is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The models to write; all of them where none is named.
    pub names: Vec<String>,
    /// Where they are kept.
    #[arg(long, default_value = CACHE)]
    pub cache: PathBuf,
    /// Only says which there are.
    #[arg(long)]
    pub list: bool,
}

/// Where models are kept unless something else is said.
pub const CACHE: &str = "target/testbed-models";
/// Grows with every change of what is written, so that old caches are not taken for new ones.
const RECIPE: u32 = 1;
/// The file that says that a model is complete and made by this recipe.
const MARKER: &str = "made-by-galaxy-testbed";
/// Bytes that must stay free on the disk.
const RESERVE: u64 = 256 << 20;

/// A model of the catalogue.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// Its name, and that of its directory.
    pub name: &'static str,
    /// The published model whose shape it has.
    pub like: &'static str,
    /// Its shape.
    pub shape: Shape,
}

/// An encoder or decoder of the usual proportions, in 32-bit floats.
const fn usual(family: &'static str, layers: u32, hidden: u32, heads: u32) -> Shape {
    Shape {
        family,
        layers,
        hidden,
        heads,
        kv_heads: heads,
        inner: 4 * hidden,
        vocabulary: 30_522,
        positions: 512,
        dtype: Dtype::F32,
        config: "{}",
    }
}

const fn gpt2(layers: u32, hidden: u32, heads: u32) -> Shape {
    Shape { vocabulary: 50_257, positions: 1024, ..usual("gpt2", layers, hidden, heads) }
}

const fn opt(layers: u32, hidden: u32, heads: u32) -> Shape {
    let dtype = Dtype::F16;
    Shape { vocabulary: 50_272, positions: 2048, dtype, ..usual("opt", layers, hidden, heads) }
}

static CATALOGUE: [Model; 12] = [
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
    Model {
        name: "vit-large",
        like: "google/vit-large-patch16-224",
        // One row for each of 14 x 14 patches, and one for the class.
        shape: Shape { vocabulary: 1000, positions: 197, ..usual("vit", 24, 1024, 16) },
    },
    Model {
        name: "gpt-j-6b",
        like: "EleutherAI/gpt-j-6b",
        shape: Shape {
            vocabulary: 50_400,
            positions: 2048,
            dtype: Dtype::F16,
            ..usual("gptj", 28, 4096, 16)
        },
    },
    Model {
        name: "llama-125m",
        like: "facebook/MobileLLM-125M",
        shape: Shape {
            kv_heads: 3,
            inner: 1536,
            vocabulary: 32_000,
            positions: 2048,
            dtype: Dtype::Bf16,
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
            dtype: Dtype::Bf16,
            config: r#"{
                "bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 500000.0,
                "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3" }
            }"#,
            ..usual("llama", 16, 2048, 32)
        },
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

/// All models that can be written, small ones for tests at the end.
pub fn catalogue() -> &'static [Model] {
    &CATALOGUE
}

/// The model of this name.
///
/// # Errors
/// When there is none; it names all that there are.
pub fn find(name: &str) -> Result<&'static Model> {
    CATALOGUE.iter().find(|model| model.name == name).with_context(|| {
        let names: Vec<&str> = CATALOGUE.iter().map(|m| m.name).collect();
        format!("no model is named {name:?}; there are {}", names.join(", "))
    })
}

/// The directory of a model of the catalogue, written to `cache` first where it is not there yet.
///
/// # Errors
/// When there is no such model, or the disk refuses or is too full.
pub fn ensure(cache: &Path, name: &str) -> Result<PathBuf> {
    make(cache, name, &find(name)?.shape)
}

/// The directory of a BERT of this shape with a small vocabulary, written to `cache` first where
/// it is not there yet.
///
/// # Errors
/// When the disk refuses or is too full.
pub fn bert(cache: &Path, name: &str, layers: u32, hidden: u32, heads: u32) -> Result<PathBuf> {
    let shape = Shape { vocabulary: 1000, ..usual("bert", layers, hidden, heads) };
    make(cache, &format!("{name}-1000-words"), &shape)
}

impl Model {
    /// How many weights it has.
    pub fn parameters(&self) -> u64 {
        self.shape.parameters()
    }

    /// What its weights take on disk.
    pub fn bytes(&self) -> Bytes {
        self.shape.bytes()
    }

    /// Whether the engine can run it: its family is one that the engine knows.
    ///
    /// # Errors
    /// When there is no room for its config in the directory of temporary files.
    pub fn runs(&self) -> Result<bool> {
        let dir = tempfile::tempdir().context("a temporary directory")?;
        write::json_file(&dir.path().join("config.json"), &self.shape.config())?;
        // The config is read first: with a family that is known, the weights are what is missing.
        Ok(matches!(ModelDir::open(dir.path()), Err(ModelError::NotThere { .. })))
    }
}

impl Shape {
    /// How many weights it has; tables that serve twice are counted once.
    pub fn parameters(&self) -> u64 {
        self.tensors().iter().map(family::Tensor::values).sum()
    }

    /// What its weights take on disk.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.parameters() * u64::from(self.dtype.width()))
    }

    /// Tells apart whatever would be written differently.
    fn digest(&self) -> String {
        let all = format!("{RECIPE} {:?} {} {:?}", self.dtype, self.config(), self.tensors());
        blake3::hash(all.as_bytes()).to_hex().to_string()
    }
}

/// Writes models, or says which there are.
///
/// # Errors
/// When there is no such model, or the disk refuses or is too full.
pub fn run(options: &Options) -> Result<()> {
    let mut models: Vec<&Model> =
        options.names.iter().map(|name| find(name)).collect::<Result<_>>()?;
    if models.is_empty() {
        models = CATALOGUE.iter().collect();
    }
    if options.list {
        return list(&models, &options.cache);
    }
    let missing = models.iter().filter(|m| !is_complete(&options.cache.join(m.name), &m.shape));
    room(&options.cache, "these models", missing.map(|m| m.bytes()).sum())?;
    for model in models {
        let path = ensure(&options.cache, model.name)?;
        println!("{}: {}, {}", model.name, model.bytes(), path.display());
    }
    Ok(())
}

fn list(models: &[&Model], cache: &Path) -> Result<()> {
    println!(
        "| name | shape of | layers | hidden | heads | inner | vocabulary | millions of parameters \
         | type | size | the engine runs it | in {} |",
        cache.display()
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- | --- |");
    let word = |yes| if yes { "yes" } else { "no" };
    for model in models {
        let Shape { layers, hidden, heads, inner, vocabulary, dtype, .. } = model.shape;
        println!(
            "| {} | {} | {layers} | {hidden} | {heads} | {inner} | {vocabulary} | {:.1} | {dtype:?} \
             | {} | {} | {} |",
            model.name,
            model.like,
            model.parameters() as f64 * 1e-6,
            model.bytes(),
            word(model.runs()?),
            word(is_complete(&cache.join(model.name), &model.shape)),
        );
    }
    Ok(())
}

fn is_complete(dir: &Path, shape: &Shape) -> bool {
    std::fs::read_to_string(dir.join(MARKER)).is_ok_and(|digest| digest == shape.digest())
}

/// Writes a model of this shape to `cache/name`, unless it is there.
fn make(cache: &Path, name: &str, shape: &Shape) -> Result<PathBuf> {
    let dir = cache.join(name);
    if is_complete(&dir, shape) {
        return Ok(dir);
    }
    std::fs::create_dir_all(cache).with_context(|| cache.display().to_string())?;
    let _lock = lock(cache)?;
    if is_complete(&dir, shape) {
        return Ok(dir);
    }
    if dir.exists() {
        let ours = dir.join(MARKER).exists();
        ensure!(
            ours,
            "{} is not a model that this program made: move it away, or name another directory \
             for random models",
            dir.display()
        );
        std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    }
    let part = cache.join(format!("{name}.part"));
    if part.exists() {
        std::fs::remove_dir_all(&part).with_context(|| part.display().to_string())?;
    }
    room(cache, name, shape.bytes())?;
    std::fs::create_dir(&part).with_context(|| part.display().to_string())?;
    let begin = Instant::now();
    let bar = write::progress(name, shape.bytes().0);
    let written = files(&part, shape, write::SHARD_BYTES, &bar);
    bar.finish_and_clear();
    if let Err(error) = written {
        // What is left would only fill the disk; the error that matters is the first.
        let _ = std::fs::remove_dir_all(&part);
        return Err(error);
    }
    std::fs::rename(&part, &dir).with_context(|| dir.display().to_string())?;
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("wrote {name}: {} in {seconds:.1} s", shape.bytes());
    Ok(dir)
}

/// The files of a model; the marker is the last.
fn files(dir: &Path, shape: &Shape, shard_bytes: u64, bar: &indicatif::ProgressBar) -> Result<()> {
    write::write(dir, &shape.tensors(), shape.layers, shape.dtype, shard_bytes, bar)?;
    if let Some(preprocessor) = family::preprocessor(shape) {
        write::json_file(&dir.join("preprocessor_config.json"), &preprocessor)?;
    }
    write::json_file(&dir.join("config.json"), &shape.config())?;
    let marker = dir.join(MARKER);
    std::fs::write(&marker, shape.digest()).with_context(|| marker.display().to_string())
}

/// One writer at a time; a process that dies lets go.
fn lock(cache: &Path) -> Result<File> {
    let path = cache.join(".lock");
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| path.display().to_string());
        }
    }
    eprintln!("waiting for another process that writes models to {}", cache.display());
    file.lock().with_context(|| path.display().to_string())?;
    Ok(file)
}

/// Refuses what does not fit on the disk.
fn room(cache: &Path, what: &str, need: Bytes) -> Result<()> {
    let free = free(cache)?;
    if need.0 > 0 && need.0.saturating_add(RESERVE) > free {
        bail!(
            "writing {what} takes {need} in {}, and {} must stay free; the disk has {}: free some, \
             write fewer models, or choose a directory on another disk",
            cache.display(),
            Bytes(RESERVE),
            Bytes(free)
        );
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn free(path: &Path) -> Result<u64> {
    // The cache itself may not be there yet.
    let there = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    let disk = rustix::fs::statvfs(there).with_context(|| there.display().to_string())?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(target_os = "linux"))]
fn free(_path: &Path) -> Result<u64> {
    Ok(u64::MAX)
}

#[cfg(test)]
mod tests;
