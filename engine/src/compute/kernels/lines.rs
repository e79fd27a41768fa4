//! Memory that starts on a line of cache, in large pages where the system has them.
#![allow(unsafe_code)]

use std::{
    alloc::{self, Layout},
    marker::PhantomData,
    ptr::NonNull,
    slice,
};

/// A line of cache.
const LINE: usize = 64;
/// A large page of most systems.
const HUGE: usize = 2 << 20;

/// Values that start on a line of cache, so that no vector of a panel lies across two. From 2 MiB on
/// they start on a large page, and the system is asked for such pages: weights are read in one go,
/// and with pages of 4 KiB one row of a product waits for addresses to be looked up, and reads at two
/// thirds of the memory's rate.
pub(crate) struct Lines<T> {
    start: NonNull<T>,
    len: usize,
    /// Of the allocation; nothing is allocated where its size is 0.
    layout: Layout,
    values: PhantomData<T>,
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
        let align = if size < HUGE { LINE } else { HUGE };
        let layout = Layout::from_size_align(size, align).map_err(|_| NoMemory)?;
        if size == 0 {
            return Ok(Self { layout, ..Self::default() });
        }
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc::alloc(layout) }).ok_or(NoMemory)?;
        in_large_pages(start, size);
        // SAFETY: `size` bytes from `start` on were allocated just now.
        unsafe { start.write_bytes(0, size) };
        // A line is at least as aligned as any `Pod` of up to 64 bytes.
        const { assert!(align_of::<T>() <= LINE) };
        Ok(Self { start: start.cast(), len, layout, values: PhantomData })
    }
    /// The values.
    pub(crate) fn values(&self) -> &[T] {
        // SAFETY: `len` values lie from `start` on, initialised (zeros are a value of any `Pod`), and
        // borrowed as `self` is; without any, `start` is aligned.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
    /// The values.
    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `values`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
    /// Room for `len` values, kept. Those that were there are lost when it grows.
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
        Self { start, len: 0, layout: Layout::new::<()>(), values: PhantomData }
    }
}

impl<T> Drop for Lines<T> {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: it was allocated with this layout, and nothing refers to it any more.
            unsafe { alloc::dealloc(self.start.as_ptr().cast(), self.layout) };
        }
    }
}

/// Asks for large pages, before the memory is touched. What does not fill a page stays in small
/// ones, so that no more is held than was asked for.
fn in_large_pages(start: NonNull<u8>, size: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    if size >= HUGE {
        use rustix::mm::{Advice, madvise};
        let whole = size / HUGE * HUGE;
        // SAFETY: the range was allocated just now and is not used yet; the advice changes no
        // contents. That it is not followed is no error: it only makes reading faster.
        let _ = unsafe { madvise(start.as_ptr().cast(), whole, Advice::LinuxHugepage) };
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (start, size);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_start_on_a_line() {
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
    fn room_is_kept() {
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
