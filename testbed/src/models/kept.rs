//! Directories of models that are written once: a marker says by which recipe, and that all is there.

use anyhow::{Context, Result, bail, ensure};
use galaxy_common::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    time::Instant,
};

/// The version of what is written. It grows with every change, so that old caches are not taken for new ones.
const RECIPE: u32 = 1;
/// The name of the file that marks a model as complete and made by this recipe.
const MARKER: &str = "made-by-galaxy-testbed";
/// The bytes that must stay free on the disk.
const RESERVE: u64 = 256 << 20;

/// What is written to the directory of a model.
pub(super) struct Recipe<'a> {
    /// It differs for whatever would be written differently.
    digest: String,
    /// The bytes that it takes.
    pub(super) bytes: Bytes,
    /// Writes the files, and says how many bytes were written since it last did.
    write: &'a Write<'a>,
}

/// Something that writes the files of a model to a directory.
type Write<'a> = dyn Fn(&Path, &mut dyn FnMut(u64)) -> Result<()> + 'a;

impl<'a> Recipe<'a> {
    /// A recipe for what is described by a text, and takes so many bytes.
    pub(super) fn new(description: &str, bytes: Bytes, write: &'a Write<'a>) -> Self {
        let digest = blake3::hash(format!("{RECIPE} {description}").as_bytes());
        Self { digest: digest.to_hex().to_string(), bytes, write }
    }

    /// Whether a directory is complete, and made by this recipe.
    pub(super) fn is_complete(&self, dir: &Path) -> bool {
        std::fs::read_to_string(dir.join(MARKER)).is_ok_and(|found| found == self.digest)
    }

    /// Writes the files of a model, the marker last.
    fn files(&self, dir: &Path, bar: &ProgressBar) -> Result<()> {
        (self.write)(dir, &mut |bytes| bar.inc(bytes))?;
        let marker = dir.join(MARKER);
        std::fs::write(&marker, &self.digest).with_context(|| marker.display().to_string())
    }
}

/// Writes a model to `cache/name`, unless it is there.
pub(super) fn ensure(cache: &Path, name: &str, recipe: &Recipe<'_>) -> Result<PathBuf> {
    let dir = cache.join(name);
    if recipe.is_complete(&dir) {
        return Ok(dir);
    }
    std::fs::create_dir_all(cache).with_context(|| cache.display().to_string())?;
    let _lock = lock(cache)?;
    if recipe.is_complete(&dir) {
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
    room(cache, name, recipe.bytes)?;
    std::fs::create_dir(&part).with_context(|| part.display().to_string())?;
    let begin = Instant::now();
    let bar = progress(name, recipe.bytes.0);
    let written = recipe.files(&part, &bar);
    bar.finish_and_clear();
    if let Err(error) = written {
        // The rest would only fill the disk; the error that matters is the first.
        let _ = std::fs::remove_dir_all(&part);
        return Err(error);
    }
    std::fs::rename(&part, &dir).with_context(|| dir.display().to_string())?;
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("wrote {name}: {} in {seconds:.1} s", recipe.bytes);
    Ok(dir)
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
pub(super) fn room(cache: &Path, what: &str, need: Bytes) -> Result<()> {
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
