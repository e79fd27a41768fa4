//! Random values for files of weights: pseudo-random numbers that depend on a name alone, and files that are written as
//! fast as the disk takes them.

use std::{
    fs::File,
    io::{self, Write},
    sync::mpsc::sync_channel,
};

/// Bytes that are computed and written at once.
pub(crate) const BUFFER: usize = 1 << 20;
/// Bytes between two flushes to the disk.
const PIECE: usize = 128 << 20;

/// Pseudo-random numbers that depend on nothing but a tensor's name.
pub(crate) struct Numbers {
    seed: u32,
    next: u32,
}

impl Numbers {
    pub(crate) fn new(name: &str) -> Self {
        let digest = blake3::hash(name.as_bytes());
        let seed = digest.as_bytes().iter().take(4).fold(0, |n, &b| n << 8 | u32::from(b));
        Self { seed, next: 0 }
    }

    /// Fills `out` with values in `center - amplitude ..= center + amplitude`. Each is a hash of
    /// its place, not of the value before it, so that the compiler computes many at once.
    pub(crate) fn fill(&mut self, out: &mut [f32], center: f32, amplitude: f32) {
        let scale = amplitude / 2f32.powi(31);
        for (value, place) in out.iter_mut().zip(0u32..) {
            let mut x = self.next.wrapping_add(place).wrapping_mul(0x9e37_79b9) ^ self.seed;
            x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
            x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
            x ^= x >> 16;
            *value = center + scale * x.cast_signed() as f32;
        }
        self.next = self.next.wrapping_add(out.len() as u32);
    }
}

/// Writes what `parts` puts, part after part, to the end of a file, and waits until the disk has it.
///
/// Meanwhile another thread waits for the disk, one flush behind: memory does not fill up with
/// unwritten bytes, and the progress of `parts` is that of the disk.
pub(crate) fn flushed(
    file: &mut File,
    parts: impl FnOnce(&mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()>,
) -> io::Result<()> {
    let (written, pieces) = sync_channel::<()>(0);
    let same = file.try_clone()?;
    std::thread::scope(|scope| {
        let disk = scope.spawn(move || pieces.iter().try_for_each(|()| same.sync_data()));
        let mut pending = 0;
        let mut put = |bytes: &[u8]| {
            file.write_all(bytes)?;
            pending += bytes.len();
            // A disk that failed no longer has a receiver; its error is returned at the end.
            if pending >= PIECE && written.send(()).is_ok() {
                pending = 0;
            }
            Ok(())
        };
        parts(&mut put)?;
        drop(written);
        disk.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    file.sync_all()
}
