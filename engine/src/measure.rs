//! The most that a device can do, and how near kernels come to it.
//!
//! [`peak`] and [`stream`] are the bounds: arithmetic in registers alone, and reading memory alone.
//! [`Bench`] runs the operations of real programs one by one and times each: products, attention
//! and what is done to rows are measured as they run in a cluster, and nothing else.

mod bench;
pub mod load;
mod memory;
pub mod profile;

pub use bench::{Batch, Bench, MeasureError, ModelPart, OperationKind, Timed, Work};
pub use memory::{free_memory, resident_memory};

use crate::compute::kernels::{
    ceiling::{self, Pattern},
    instructions::Instructions,
    lines::Lines,
};
use galaxy_common::{Bytes, Spread};
use std::{sync::Barrier, time::Instant};

/// How often a bound is measured.
const REPEATS: usize = 9;
/// How long one measurement of [`peak`] takes at least, in seconds: far more than the clock's step.
const LEAST: f64 = 4e-3;
/// The least that [`stream`] goes through, in bytes, where memory allows it.
const LEAST_READ: u64 = 256 << 20;
/// How often [`stream`] goes through its buffer with each pattern.
const PASSES: usize = 3;
/// How many values each thread reads in one measurement of [`stream`]: 32 MB, a millisecond or a few,
/// so that whatever else runs on a core for a moment spoils one of many.
const PIECE: usize = 8 << 20;
/// The last-level cache of a machine that does not say, in bytes: more than most have.
const UNKNOWN_CACHE: u64 = 32 << 20;

/// The most arithmetic that `threads` cores do with these instructions: multiplications and additions
/// in registers, nothing read, nothing written.
///
/// # Units
/// GFLOP/s of all threads together; a fused multiplication and addition counts as two.
pub fn peak(instructions: Instructions, threads: u16) -> Spread {
    let mut turns = 1 << 10;
    loop {
        let begin = Instant::now();
        ceiling::multiply(instructions, turns);
        if begin.elapsed().as_secs_f64() >= LEAST {
            break;
        }
        turns *= 2;
    }
    let once = |_: usize| ceiling::multiply(instructions, turns) as f64;
    let rates: Vec<f64> = (0..REPEATS).map(|_| together(threads, once)).collect();
    Spread::of(&rates)
}

/// The most that `threads` cores read from memory with these instructions: a buffer far larger than the
/// last-level cache, or a quarter of free memory where that is less, by the fastest of several
/// patterns.
///
/// # Units
/// GB/s of all threads together.
pub fn stream(instructions: Instructions, threads: u16) -> Spread {
    let wanted = LEAST_READ.max(4 * last_level_cache().0);
    let bytes = free_memory().map_or(wanted, |free| wanted.min(free.0 / 4));
    // In such pages as weights lie in, and written, so that every page has memory of its own.
    let mut lines = Lines::default();
    let values: &mut [f32] = lines.grow(usize::try_from(bytes / 4).unwrap_or(usize::MAX));
    values.iter_mut().enumerate().for_each(|(at, value)| *value = (at % 16) as f32);
    let values = &*values;
    let count = usize::from(threads.max(1));
    let piece = (PIECE * count).min(values.len()).max(1);
    let share = piece.div_ceil(count);
    let once = |pattern, piece: &[f32]| {
        let read = |thread: usize| {
            let part = piece.chunks(share).nth(thread).unwrap_or(&[]);
            ceiling::read(instructions, part, pattern);
            size_of_val(part) as f64
        };
        together(threads, read)
    };
    let rates = |pattern| {
        let passes = (0..PASSES).flat_map(|_| values.chunks_exact(piece));
        Spread::of(&passes.map(|piece| once(pattern, piece)).collect::<Vec<_>>())
    };
    let all = Pattern::ALL.map(rates);
    all.into_iter().max_by(|a, b| a.median.total_cmp(&b.median)).unwrap_or(Spread::of(&[]))
}

/// Runs `work` on so many threads at once and returns what they did together, by nanoseconds.
fn together(threads: u16, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    if threads <= 1 {
        let begin = Instant::now();
        let done = work(0);
        return done / begin.elapsed().as_nanos() as f64;
    }
    let start = Barrier::new(usize::from(threads));
    let (work, start) = (&work, &start);
    let each = |thread| {
        move || {
            start.wait();
            let begin = Instant::now();
            let done = work(thread);
            (begin, done, Instant::now())
        }
    };
    let results: Vec<(Instant, f64, Instant)> = std::thread::scope(|scope| {
        let running: Vec<_> =
            (0..usize::from(threads)).map(|thread| scope.spawn(each(thread))).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let begin = results.iter().map(|r| r.0).min();
    let end = results.iter().map(|r| r.2).max();
    let done: f64 = results.iter().map(|r| r.1).sum();
    match (begin, end) {
        (Some(begin), Some(end)) => done / end.duration_since(begin).as_nanos() as f64,
        _ => f64::NAN,
    }
}

/// The largest cache of this processor, as the system says it; 32 MiB where it does not.
pub fn last_level_cache() -> Bytes {
    let size = |index: u32| -> Option<u64> {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(path).ok()?;
        let text = text.trim();
        let (number, scale) = match text.strip_suffix('K') {
            Some(number) => (number, 1 << 10),
            None => (text.strip_suffix('M')?, 1 << 20),
        };
        Some(number.parse::<u64>().ok()? * scale)
    };
    Bytes((0..8).filter_map(size).max().unwrap_or(UNKNOWN_CACHE))
}

/// How many matrices or layers of `bytes` each must be gone through in turn so that every one comes
/// from memory: together three times the last-level cache, but no more than half of free memory.
/// At least two.
pub fn copies(bytes: Bytes) -> u32 {
    let wanted = (3 * last_level_cache().0).div_ceil(bytes.0.max(1));
    let most = free_memory().map_or(u64::MAX, |free| free.0 / 2 / bytes.0.max(1));
    u32::try_from(wanted.min(most).max(2)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measured_rate_of_many_threads_is_finite_and_positive() {
        for threads in [1, 3] {
            let rate = together(threads, |thread| (thread + 1) as f64 * 1e9);
            assert!(rate.is_finite() && rate > 0.0, "{rate}");
        }
    }

    #[test]
    fn cache_size_and_memory_of_the_machine_are_positive() {
        assert!(last_level_cache().0 >= 1 << 10);
        assert!(free_memory().is_none_or(|free| free.0 > 0));
        assert!(resident_memory().is_none_or(|held| held.0 > 0));
    }
}
