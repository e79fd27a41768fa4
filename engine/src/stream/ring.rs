//! The buffer that pieces pass through.
#![allow(unsafe_code)]

use crate::compute::kernels::lines::{Lines, MAPPED, NoMemory};
use std::{
    ops::{Deref, Range},
    ptr::NonNull,
    slice,
    sync::{Mutex, PoisonError},
};

/// Bytes that begin on a page, parts of which are written while others are read.
pub(crate) struct Ring {
    start: NonNull<u8>,
    bytes: u64,
    /// Where `start` points to; not touched while the ring lives.
    lines: Lines<u8>,
    /// The parts that are read or written now. A handful: one for each loader, and what the kernels
    /// read.
    used: Mutex<Vec<Use>>,
}

struct Use {
    place: Range<u64>,
    written: bool,
}

/// A part of the buffer that the program's waits should have kept free.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bytes {0:?} of the buffer for weights are in use: the program is broken")]
pub(crate) struct InUse(Range<u64>);

// SAFETY: bytes are handed out only as `used` allows: to one writer, or to readers.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// A buffer of so many bytes.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub(crate) fn new(bytes: u64) -> Result<Self, NoMemory> {
        // Direct reads go to whole pages.
        let size = usize::try_from(bytes).map_err(|_| NoMemory)?.max(MAPPED);
        let mut lines = Lines::zeroed(size)?;
        let start = NonNull::from(lines.values_mut()).cast();
        Ok(Self { start, bytes, lines, used: Mutex::new(Vec::with_capacity(32)) })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The whole buffer, while nobody else has it.
    pub(crate) fn all(&mut self) -> &mut [u8] {
        self.lines.values_mut()
    }

    /// Hands these bytes to a loader, if nobody has any of them.
    pub(crate) fn write(&self, place: Range<u64>) -> Result<RingWrite<'_>, InUse> {
        self.hand_out(&place, true)?;
        Ok(RingWrite(ReservedRange { ring: self, place }))
    }

    /// Hands these bytes to a kernel, if nobody writes any of them.
    pub(crate) fn read(&self, place: Range<u64>) -> Result<RingRead<'_>, InUse> {
        self.hand_out(&place, false)?;
        Ok(RingRead(ReservedRange { ring: self, place }))
    }

    fn hand_out(&self, place: &Range<u64>, written: bool) -> Result<(), InUse> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let meets = |other: &Use| {
            let apart = other.place.end <= place.start || place.end <= other.place.start;
            !apart && (written || other.written)
        };
        if place.start > place.end || place.end > self.bytes() || used.iter().any(meets) {
            return Err(InUse(place.clone()));
        }
        used.push(Use { place: place.clone(), written });
        Ok(())
    }

    fn take_back(&self, place: &Range<u64>, written: bool) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let is = |u: &Use| u.place == *place && u.written == written;
        if let Some(at) = used.iter().position(is) {
            used.swap_remove(at);
        }
    }
}

struct ReservedRange<'a> {
    ring: &'a Ring,
    place: Range<u64>,
}

impl ReservedRange<'_> {
    fn start(&self) -> *mut u8 {
        // SAFETY: `hand_out` has checked that the place lies in the buffer.
        unsafe { self.ring.start.as_ptr().add(self.place.start as usize) }
    }

    fn len(&self) -> usize {
        (self.place.end - self.place.start) as usize
    }
}

/// Bytes of the buffer that a loader writes.
pub(crate) struct RingWrite<'a>(ReservedRange<'a>);

impl RingWrite<'_> {
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the bytes lie in the buffer, are initialised, and while this lives nobody else has any
        // of them.
        unsafe { slice::from_raw_parts_mut(self.0.start(), self.0.len()) }
    }
}

impl Drop for RingWrite<'_> {
    fn drop(&mut self) {
        self.0.ring.take_back(&self.0.place, true);
    }
}

/// Bytes of the buffer that a kernel reads.
pub(crate) struct RingRead<'a>(ReservedRange<'a>);

impl Deref for RingRead<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie in the buffer, are initialised, and while this lives nobody writes any of
        // them.
        unsafe { slice::from_raw_parts(self.0.start(), self.0.len()) }
    }
}

impl Drop for RingRead<'_> {
    fn drop(&mut self) {
        self.0.ring.take_back(&self.0.place, false);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stream_buffer_bytes_have_one_writer_or_many_readers() {
        let ring = Ring::new(3 * 4096).unwrap();
        let mut first = ring.write(0..4096).unwrap();
        first.bytes().fill(7);
        assert!(ring.read(4000..5000).is_err());
        let second = ring.write(4096..8192).unwrap();
        assert!(ring.write(8000..9000).is_err());
        drop(first);
        let (a, b) = (ring.read(0..4096).unwrap(), ring.read(100..200).unwrap());
        assert!(a.iter().chain(b.iter()).all(|byte| *byte == 7));
        assert!(ring.write(150..160).is_err());
        drop((a, b, second));
        assert!(ring.write(0..3 * 4096).is_ok());
        assert!(ring.read(0..3 * 4096 + 1).is_err());
    }
}
