//! Kernels of networks of operators, over tensors of any number of axes. Axes that are worked on alike are one: a kernel
//! sees `[outer, axis, inner]`, or images of pixels whose channels lie side by side.
// Hot path: no locks, no logging.

pub(crate) mod arrange;
pub(crate) mod conv;
mod depthwise;
pub(crate) mod elements;
pub(crate) mod geometry;
pub(crate) mod pool;
pub(crate) mod reduce;

use super::{
    area::{AreaMut, Extent},
    dense,
    threads::Threads,
};

/// What kernels of a network share.
pub(crate) struct Context {
    /// The kernel threads.
    pub(crate) threads: Threads,
    /// Memory that products reuse.
    pub(crate) scratch: dense::Scratch,
}

/// Runs `work` on each row of `width` values of `out`, with its number, on all threads. `values` says how much work a
/// row is, in values touched.
pub(crate) fn each_row(
    threads: &Threads,
    out: &mut [f32],
    width: usize,
    values: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) {
    if width == 0 || out.is_empty() {
        return;
    }
    let rows = out.len() / width;
    let extent = Extent { start: 0, rows, columns: width, stride: width };
    let Some(area) = AreaMut::new(out, extent) else { return };
    threads.each(area, 1, rows * values, |first, mut part| {
        for row in 0..part.rows() {
            work(first + row, part.row(row));
        }
    });
}
