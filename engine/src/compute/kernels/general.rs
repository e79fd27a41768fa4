//! Products of any two rectangles, by the `gemm` crate: what the other kernels fall back to.
#![allow(unsafe_code)]

use super::area::{Area, AreaMut};

/// A right-hand side: `[inputs, outputs]`, either way round.
#[derive(Clone, Copy)]
pub(crate) enum Right<'a> {
    /// Row-major `[inputs, outputs]`.
    Plain(Area<'a>),
    /// The transposed of row-major `[outputs, inputs]`.
    Transposed(Area<'a>),
}

/// `out = scale * left x right`, or with `add` `out += scale * left x right`.
///
/// # Shapes
/// left `[rows, inputs]`, right `[inputs, outputs]`, out `[rows, outputs]`.
///
/// # Panics
/// When they do not fit together.
pub(crate) fn multiply(
    left: Area<'_>,
    right: Right<'_>,
    scale: f32,
    out: &mut AreaMut<'_>,
    add: bool,
    parallelism: gemm::Parallelism,
) {
    product(Left::Plain(left), right, scale, out, add, parallelism);
}

/// `out = transposed left x right`.
///
/// # Shapes
/// left `[inputs, rows]`, right `[inputs, outputs]`, out `[rows, outputs]`.
///
/// # Panics
/// When they do not fit together.
pub(crate) fn multiply_transposed(
    left: Area<'_>,
    right: Right<'_>,
    out: &mut AreaMut<'_>,
    parallelism: gemm::Parallelism,
) {
    product(Left::Transposed(left), right, 1.0, out, false, parallelism);
}

/// A left-hand side: `[rows, inputs]`, either way round.
enum Left<'a> {
    Plain(Area<'a>),
    Transposed(Area<'a>),
}

fn product(
    left: Left<'_>,
    right: Right<'_>,
    scale: f32,
    out: &mut AreaMut<'_>,
    add: bool,
    parallelism: gemm::Parallelism,
) {
    let (left, left_rows, left_inputs, left_row_stride, left_input_stride) = match left {
        Left::Plain(m) => (m, m.rows(), m.columns(), m.stride(), 1),
        Left::Transposed(m) => (m, m.columns(), m.rows(), 1, m.stride()),
    };
    let (matrix, inputs, outputs, row_stride, column_stride) = match right {
        Right::Plain(m) => (m, m.rows(), m.columns(), m.stride(), 1),
        Right::Transposed(m) => (m, m.columns(), m.rows(), 1, m.stride()),
    };
    assert_eq!(left_inputs, inputs);
    assert_eq!(left_rows, out.rows());
    assert_eq!(out.columns(), outputs);
    if out.rows() == 0 || outputs == 0 {
        return;
    }
    if inputs == 0 {
        if !add {
            (0..out.rows()).for_each(|row| out.row(row).fill(0.0));
        }
        return;
    }
    for m in [&left, &matrix] {
        assert!((m.rows() - 1) * m.stride() + m.columns() <= m.values().len());
    }
    let (rows, out_stride) = (out.rows(), out.stride() as isize);
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
            out_stride,
            add,
            left.values().as_ptr(),
            left_input_stride as isize,
            left_row_stride as isize,
            matrix.values().as_ptr(),
            column_stride as isize,
            row_stride as isize,
            1.0_f32,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
