//! Models with random weights in the shapes of well-known ones, for measuring.
//!
//! `galaxy_model::shape` defines what is in them; here they are kept.

use anyhow::{Context, Result, bail, ensure};
use galaxy_common::Bytes;
use galaxy_model::shape::{Model, SHARD_BYTES, Shape, catalogue};
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    time::Instant,
};

/// The options of `galaxy-testbed models`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The names of the models to write; all of them where none is named.
    pub names: Vec<String>,
    /// The directory in which they are kept.
    #[arg(long, default_value = CACHE)]
    pub cache: PathBuf,
    /// Only lists the models that there are.
    #[arg(long)]
    pub list: bool,
}

/// The directory of models by default.
pub const CACHE: &str = "target/testbed-models";
/// The version of what is written. It grows with every change, so that old caches are not taken for new ones.
const RECIPE: u32 = 1;
/// The name of the file that marks a model as complete and made by this recipe.
const MARKER: &str = "made-by-galaxy-testbed";
/// The bytes that must stay free on the disk.
const RESERVE: u64 = 256 << 20;

/// The model of this name.
///
/// # Errors
/// When there is none; the error names all that there are.
pub fn find(name: &str) -> Result<&'static Model> {
    catalogue().iter().find(|model| model.name == name).with_context(|| {
        let names: Vec<&str> = catalogue().iter().map(|m| m.name).collect();
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
    make(cache, &format!("{name}-1000-words"), &Shape::bert(layers, hidden, heads))
}

/// The directory of a GPT-2 of this shape, with room for long texts, written to `cache` first where it is not
/// there yet.
///
/// # Errors
/// As [`bert`].
pub fn gpt2(cache: &Path, name: &str, layers: u32, hidden: u32, heads: u32) -> Result<PathBuf> {
    let shape = Shape { family: "gpt2", positions: 2048, ..Shape::bert(layers, hidden, heads) };
    make(cache, &format!("{name}-1000-words"), &shape)
}

/// A digest that differs for whatever would be written differently.
fn digest(shape: &Shape) -> String {
    let all = format!("{RECIPE} {:?} {} {:?}", shape.format, shape.config(), shape.tensors());
    blake3::hash(all.as_bytes()).to_hex().to_string()
}

/// Writes models, or lists those that there are.
///
/// # Errors
/// When there is no such model, or the disk refuses or is too full.
pub fn run(options: &Options) -> Result<()> {
    let mut models: Vec<&Model> =
        options.names.iter().map(|name| find(name)).collect::<Result<_>>()?;
    if models.is_empty() {
        models = catalogue().iter().collect();
    }
    if options.list {
        list(&models, &options.cache);
        return Ok(());
    }
    let missing = models.iter().filter(|m| !is_complete(&options.cache.join(m.name), &m.shape));
    room(&options.cache, "these models", missing.map(|m| m.shape.bytes()).sum())?;
    for model in models {
        let path = ensure(&options.cache, model.name)?;
        println!("{}: {}, {}", model.name, model.shape.bytes(), path.display());
    }
    Ok(())
}

fn list(models: &[&Model], cache: &Path) {
    println!(
        "| name | shape of | layers | hidden | heads | inner | vocabulary | millions of parameters \
         | type | size | the engine runs it | in {} |",
        cache.display()
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- | --- |");
    let word = |yes| if yes { "yes" } else { "no" };
    for model in models {
        let Shape { layers, hidden, heads, intermediate, vocabulary, format, .. } = model.shape;
        println!(
            "| {} | {} | {layers} | {hidden} | {heads} | {intermediate} | {vocabulary} | {:.1} | {format:?} \
             | {} | {} | {} |",
            model.name,
            model.like,
            model.shape.parameters() as f64 * 1e-6,
            model.shape.bytes(),
            word(model.shape.spec().is_ok()),
            word(is_complete(&cache.join(model.name), &model.shape)),
        );
    }
}

fn is_complete(dir: &Path, shape: &Shape) -> bool {
    std::fs::read_to_string(dir.join(MARKER)).is_ok_and(|found| found == digest(shape))
}

/// Writes a model of this shape to `cache/name`, unless it is there.
pub(crate) fn make(cache: &Path, name: &str, shape: &Shape) -> Result<PathBuf> {
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
    let bar = progress(name, shape.bytes().0);
    let written = files(&part, shape, &bar);
    bar.finish_and_clear();
    if let Err(error) = written {
        // The rest would only fill the disk; the error that matters is the first.
        let _ = std::fs::remove_dir_all(&part);
        return Err(error);
    }
    std::fs::rename(&part, &dir).with_context(|| dir.display().to_string())?;
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("wrote {name}: {} in {seconds:.1} s", shape.bytes());
    Ok(dir)
}

/// Writes the files of a model, the marker last.
fn files(dir: &Path, shape: &Shape, bar: &ProgressBar) -> Result<()> {
    shape.write(dir, SHARD_BYTES, &mut |bytes| bar.inc(bytes))?;
    let marker = dir.join(MARKER);
    std::fs::write(&marker, digest(shape)).with_context(|| marker.display().to_string())
}

/// A bar with rate and remaining time, where stderr is a terminal.
fn progress(name: &str, bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes).with_message(name.to_owned());
    let line = "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} \
                {decimal_bytes_per_sec} {eta} left";
    if let Ok(style) = ProgressStyle::with_template(line) {
        bar.set_style(style);
    }
    bar
}

/// Locks the cache for one writer at a time; a process that dies releases the lock.
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

/// Refuses a model that does not fit on the disk.
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
