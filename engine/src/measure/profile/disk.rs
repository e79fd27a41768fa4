//! How fast the disk gives a model's files, around the page cache.

use rustix::fs::{Advice, Mode, OFlags, fadvise, open};
use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Bytes of one read: large enough for any disk, small next to what a device grants.
const PIECE: usize = 4 << 20;
/// What direct reads must be aligned to, on every disk that we know.
const ALIGNMENT: usize = 4096;
/// Fewer bytes than this say nothing of a disk.
const LEAST: u64 = 1 << 20;

/// Readers that share the disk in the second measurement.
const READERS: u64 = 4;

/// Bytes per second of the largest file of weights under `dir`, in reads of 4 MiB one after another, each for
/// at most half of `limit`: of one reader, and of four together, which read different parts. 0 where there
/// is nothing to read or it cannot be.
pub(super) fn rates(dir: &Path, limit: Duration) -> (f64, f64) {
    let Some((path, size)) = largest(dir) else { return (0.0, 0.0) };
    let one = rate(&path, 0..size, limit / 2);
    let part = (size / READERS).next_multiple_of(ALIGNMENT as u64);
    let four: f64 = std::thread::scope(|scope| {
        let reader = |at: u64| {
            let (path, range) = (&path, at * part..size.min((at + 1) * part));
            scope.spawn(move || rate(path, range, limit / 2))
        };
        let readers: Vec<_> = (0..READERS).map(reader).collect();
        readers.into_iter().map(|reader| reader.join().unwrap_or(0.0)).sum()
    });
    (one, if size >= READERS * PIECE as u64 { four } else { 0.0 })
}

fn rate(path: &Path, range: Range<u64>, limit: Duration) -> f64 {
    match direct(path, range.clone(), limit) {
        Ok(rate) => rate,
        // A file system that does not know direct reads (tmpfs, some network ones).
        Err(_) => cached(path, range, limit).unwrap_or(0.0),
    }
}

fn largest(dir: &Path) -> Option<(PathBuf, u64)> {
    let files = std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let weights = files.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
    let sized = weights.filter_map(|path| Some((path.metadata().ok()?.len(), path)));
    let (size, path) = sized.max_by_key(|(size, _)| *size)?;
    (size >= LEAST).then_some((path, size))
}

fn direct(path: &Path, range: Range<u64>, limit: Duration) -> io::Result<f64> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    let file = File::from(open(path, flags, Mode::empty())?);
    read(&file, range, limit)
}

fn cached(path: &Path, range: Range<u64>, limit: Duration) -> io::Result<f64> {
    let file = File::open(path)?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    let rate = read(&file, range, limit);
    // What was read only for this need not stay.
    fadvise(&file, 0, None, Advice::DontNeed)?;
    rate
}

fn read(file: &File, range: Range<u64>, limit: Duration) -> io::Result<f64> {
    let mut buffer = vec![0u8; PIECE + ALIGNMENT];
    let skip = buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    let piece = &mut buffer[skip..skip + PIECE];
    let (begin, mut at) = (Instant::now(), range.start);
    while begin.elapsed() < limit && at < range.end {
        let got = file.read_at(piece, at)?;
        at += got as u64;
        if got < PIECE {
            break;
        }
    }
    Ok((at - range.start) as f64 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_rate_of_a_file_is_positive_and_zero_without_files() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(rates(dir.path(), Duration::from_secs(1)), (0.0, 0.0));
        std::fs::write(dir.path().join("a.safetensors"), vec![1; (LEAST + 5) as usize]).unwrap();
        let (one, four) = rates(dir.path(), Duration::from_secs(1));
        assert!(one.is_finite() && one > 0.0 && four == 0.0, "{one} {four}");
    }
}
