//! Memory that starts on a line of cache, in large pages where the system has them.
#![allow(unsafe_code)]

use std::{
    alloc::{self, Layout},
    marker::PhantomData,
    ptr::NonNull,
    slice,
};

/// Bytes of a line of cache.
const LINE: usize = 64;
/// From so many bytes on, values are mapped where the system is Linux, and so begin on a page.
pub(crate) const MAPPED: usize = 64 << 10;
/// Bytes of a large page of most systems.
#[cfg(all(target_os = "linux", not(miri)))]
const HUGE: usize = 2 << 20;

/// Values that start on a line of cache, so that no vector of a panel lies across two. From 2 MiB on
/// they start on a large page, and the system is asked for such pages: weights are read in one go,
/// and with pages of 4 KiB one row of a product waits for addresses to be looked up, and reads at two
/// thirds of the memory's rate. All but small ones are mapped and unmapped one by one: an allocator
/// keeps what is freed of them, in holes that no larger matrix fits into, and a shard that changes
/// would then take what it held before beside what it holds.
pub(crate) struct Lines<T> {
    start: NonNull<T>,
    len: usize,
    memory: Memory,
    values: PhantomData<T>,
}

/// A line of memory where lines begin.
#[repr(align(64))]
struct Aligned(#[expect(dead_code, reason = "only its place counts")] [u8; LINE]);

const _: () = assert!(align_of::<Aligned>() == LINE);

/// Where the memory of values comes from.
enum Memory {
    /// Nowhere: there are none.
    None,
    /// From the allocator, with this layout.
    Allocated(Layout),
    /// From the system, mapped from this address on, so many bytes.
    #[cfg(all(target_os = "linux", not(miri)))]
    Mapped(NonNull<u8>, usize),
}

impl Memory {
    /// Takes memory of zeros, and gives where it begins.
    fn zeroed(size: usize) -> Result<(NonNull<u8>, Self), NoMemory> {
        if size == 0 {
            return Ok((NonNull::<Aligned>::dangling().cast(), Self::None));
        }
        #[cfg(all(target_os = "linux", not(miri)))]
        if size >= MAPPED {
            return mapped(size);
        }
        let layout = Layout::from_size_align(size, LINE).map_err(|_| NoMemory)?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or(NoMemory)?;
        Ok((start, Self::Allocated(layout)))
    }
}

/// There is no memory for so many values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoMemory;

// SAFETY: it owns its values, as a `Vec` does.
unsafe impl<T: Send> Send for Lines<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Lines<T> {}

impl<T: bytemuck::Pod> Lines<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(crate) fn zeroed(len: usize) -> Result<Self, NoMemory> {
        let size = len.checked_mul(size_of::<T>()).ok_or(NoMemory)?;
        let (start, memory) = Memory::zeroed(size)?;
        // A line is at least as aligned as any `Pod` of up to 64 bytes.
        const { assert!(align_of::<T>() <= LINE) };
        Ok(Self { start: start.cast(), len, memory, values: PhantomData })
    }
    /// The values, for reading.
    pub(crate) fn values(&self) -> &[T] {
        // SAFETY: `len` values lie from `start` on, initialised (zeros are a value of any `Pod`), and
        // borrowed as `self` is; without any, `start` is aligned.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
    /// The values, for writing.
    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `values`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
    /// Room for `len` values, which is kept. Those that were there are lost when it grows.
    ///
    /// # Panics
    /// When there is no memory for them.
    pub(crate) fn grow(&mut self, len: usize) -> &mut [T] {
        if self.len < len {
            // The old goes first: both together were never asked for.
            *self = Self::default();
            *self = Self::zeroed(len).unwrap_or_else(|NoMemory| {
                alloc::handle_alloc_error(Layout::array::<T>(len).unwrap_or(Layout::new::<T>()))
            });
        }
        &mut self.values_mut()[..len]
    }
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        let start = NonNull::dangling();
        Self { start, len: 0, memory: Memory::None, values: PhantomData }
    }
}

impl<T> Drop for Lines<T> {
    fn drop(&mut self) {
        match self.memory {
            Memory::None => {}
            Memory::Allocated(layout) => {
                // SAFETY: it was allocated with this layout, and nothing refers to it any more.
                unsafe { alloc::dealloc(self.start.as_ptr().cast(), layout) };
            }
            #[cfg(all(target_os = "linux", not(miri)))]
            Memory::Mapped(from, bytes) => {
                // SAFETY: it was mapped so, and nothing refers to it any more. That it stays mapped
                // if the system refuses harms nobody.
                let _ = unsafe { rustix::mm::munmap(from.as_ptr().cast(), bytes) };
            }
        }
    }
}

/// Zeros in pages of their own; from 2 MiB on they start on a large page, and are in such pages where
/// the system has them. What does not fill one stays in small ones, so that no more is held than was
/// asked for.
#[cfg(all(target_os = "linux", not(miri)))]
fn mapped(size: usize) -> Result<(NonNull<u8>, Memory), NoMemory> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    // Wherever the system puts it, a large page begins within the first of them. What is never
    // touched takes no memory.
    let large = size >= HUGE;
    let bytes = size.checked_add(if large { HUGE } else { 0 }).ok_or(NoMemory)?;
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: nothing is there yet, since the system chooses where.
    let from = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) };
    let from = NonNull::new(from.map_err(|_| NoMemory)?.cast::<u8>()).ok_or(NoMemory)?;
    if !large {
        return Ok((from, Memory::Mapped(from, bytes)));
    }
    // SAFETY: less than a large page further on, and `size` bytes follow there.
    let start = unsafe { from.add(from.as_ptr().align_offset(HUGE)) };
    // SAFETY: the range was mapped just now and is not used yet; the advice changes no contents. That
    // it is not followed is no error: it only makes reading faster.
    let _ = unsafe { madvise(start.as_ptr().cast(), size / HUGE * HUGE, Advice::LinuxHugepage) };
    Ok((start, Memory::Mapped(from, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_and_aligned_to_cache_lines() {
        // Miri takes minutes for a large page.
        let large = if cfg!(miri) { 3000 } else { (5 << 20) + 3 };
        for len in [0, 1, 17, 1000, large] {
            let mut lines = Lines::<u16>::zeroed(len).expect("there is memory");
            assert_eq!(lines.values().len(), len);
            assert!(lines.values().iter().all(|v| *v == 0));
            lines.values_mut().fill(7);
            assert!(len == 0 || lines.values().as_ptr().align_offset(LINE) == 0);
        }
        assert!(Lines::<f32>::zeroed(usize::MAX / 2).is_err());
        assert!(Lines::<f32>::zeroed(usize::MAX / 8).is_err());
    }

    #[test]
    fn growing_a_buffer_within_its_capacity_keeps_the_memory() {
        let mut lines = Lines::<f32>::default();
        assert!(lines.grow(0).is_empty());
        lines.grow(100).fill(1.0);
        let before = lines.values().as_ptr();
        assert_eq!(lines.grow(50).len(), 50);
        assert_eq!(lines.grow(100), [1.0; 100]);
        assert_eq!(lines.values().as_ptr(), before);
        assert_eq!(lines.grow(101).len(), 101);
    }
}
