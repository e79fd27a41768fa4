//! Products by the `gemm` crate: what the other kernels fall back to where no vectors fit.
#![allow(unsafe_code)]

use super::area::{Area, AreaMut};

/// `out = left x right`, or with `add` `out += left x right`, on the calling thread.
///
/// # Shapes
/// left `[rows, inputs]`, right `[inputs, outputs]`, out `[rows, outputs]`.
///
/// # Panics
/// When they do not fit together.
pub(crate) fn multiply(left: Area<'_>, right: Area<'_>, out: &mut AreaMut<'_>, add: bool) {
    let (rows, inputs, outputs) = (out.rows(), left.columns(), out.columns());
    assert_eq!((left.rows(), right.rows(), right.columns()), (rows, inputs, outputs));
    if rows == 0 || outputs == 0 {
        return;
    }
    if inputs == 0 {
        if !add {
            (0..rows).for_each(|row| out.row(row).fill(0.0));
        }
        return;
    }
    for m in [&left, &right] {
        assert!((m.rows() - 1) * m.stride() + m.columns() <= m.values().len());
    }
    // SAFETY: by the assertions every element `row * stride + column` of the two areas that are read
    // lies inside their slices, which live through the call; those of `out` are its own by what an
    // `AreaMut` is, so it overlaps neither, and `columns <= stride` (kept by `AreaMut` where there
    // are several rows) makes its elements distinct. All values are initialised f32.
    unsafe {
        gemm::gemm(
            rows,
            outputs,
            inputs,
            out.pointer(),
            1,
            out.stride() as isize,
            add,
            left.values().as_ptr(),
            1,
            left.stride() as isize,
            right.values().as_ptr(),
            1,
            right.stride() as isize,
            1.0_f32,
            1.0_f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
