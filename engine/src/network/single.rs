//! Operators that read one value: what their steps do.

use super::{
    steps::{Run, simple},
    values::{Layout, around},
};
use crate::compute::kernels::network::{
    Context,
    arrange::{self, Entries, EntryMap},
    elements, reduce,
};
use galaxy_model::onnx::{Operator, PadMode, Reduce, Resize, SliceAxis, Softmax};
use std::sync::{Mutex, PoisonError};

/// What the step of an operator does with a value of the shape `dims` in memory; `None` for operators that read more
/// than one. Both shapes are in this layout.
pub(super) fn run(
    operator: &Operator,
    layout: Layout,
    dims: &[usize],
    made: &[usize],
) -> Option<Run> {
    let at = |axis: usize| layout.axis(axis, dims.len());
    Some(match operator {
        Operator::Unary(function) => {
            let function = *function;
            Box::new(move |call| {
                let from = call.reads[0];
                elements::unary(&call.context.threads, function, from, call.makes[0]);
                Ok(())
            })
        }
        Operator::LocalResponseNorm { size, alpha, beta, bias } => {
            let settings = (*size as usize, *alpha, *beta, *bias);
            let channels = *dims.last()?;
            simple(move |context, from, out| {
                reduce::local_response(&context.threads, settings, channels, from, out);
            })
        }
        Operator::Softmax(Softmax { first, end, log }) => {
            let log = *log;
            let sides = match *end == first + 1 {
                true => around(dims, at(*first), at(*first) + 1),
                false => around(dims, *first, *end),
            };
            simple(move |context, from, out| {
                reduce::softmax(&context.threads, log, sides, from, out);
            })
        }
        Operator::Slice { axes } => sliced(axes, dims, &at),
        Operator::Pad { mode, before, after } => {
            let mut borders = vec![(0, 0); dims.len()];
            for axis in 0..dims.len() {
                borders[at(axis)] = (before[axis], after[axis]);
            }
            padded(*mode, dims, &borders)
        }
        Operator::Expand => mapped(expanded(dims, made), 0.0),
        Operator::Reduce(of) => reduced(of, dims, &at),
        Operator::Resize(resize) => resized(resize, dims, layout),
        _ => return None,
    })
}

/// A part of each axis.
fn sliced(axes: &[SliceAxis], dims: &[usize], at: &dyn Fn(usize) -> usize) -> Run {
    let mut parts = vec![(0, 1, 0); dims.len()];
    for (axis, part) in axes.iter().enumerate() {
        parts[at(axis)] = (part.start as usize, part.step, part.count as usize);
    }
    mapped(EntryMap::of_parts(dims, &parts), 0.0)
}

/// Entries by a map; `outside` stands where there are none.
pub(super) fn mapped(map: EntryMap, outside: f32) -> Run {
    simple(move |context, from, out| arrange::mapped(&context.threads, &map, from, outside, out))
}

/// A border of these widths before and after each axis.
fn padded(mode: PadMode, dims: &[usize], borders: &[(i64, i64)]) -> Run {
    let entries = |(side, (before, after)): (&usize, &(i64, i64))| {
        let side = *side as i64;
        let entry = |at: i64| match mode {
            _ if (0..side).contains(&at) => Some(at),
            PadMode::Constant(_) => None,
            PadMode::Edge => Some(at.clamp(0, side - 1)),
            PadMode::Wrap => Some(at.rem_euclid(side)),
            PadMode::Reflect => {
                let period = 2 * (side - 1).max(1);
                let at = at.rem_euclid(period);
                Some(if at < side { at } else { period - at })
            }
        };
        let all = -before..side + after;
        Entries::of(all.map(|at| entry(at).and_then(|at| u32::try_from(at).ok())).collect())
    };
    let entries = dims.iter().zip(borders).map(entries);
    let outside = if let PadMode::Constant(value) = mode { value } else { 0.0 };
    mapped(EntryMap::new(arrange::strides(dims).into_iter().zip(entries).collect()), outside)
}

/// The map of a value that is repeated along axes of length 1, and along axes before all others.
fn expanded(dims: &[usize], made: &[usize]) -> EntryMap {
    let more = made.len() - dims.len();
    let strides = arrange::strides(dims);
    let entries = |(axis, side): (usize, &usize)| {
        let own = axis.checked_sub(more).map(|axis| (dims[axis], strides[axis]));
        match own {
            Some((own, stride)) if own != 1 => (stride, Entries::Run { first: 0, count: *side }),
            _ => (1, Entries::of(vec![Some(0); *side])),
        }
    };
    EntryMap::new(made.iter().enumerate().map(entries).collect())
}

/// A reduction, of one run of axes after another.
fn reduced(of: &Reduce, dims: &[usize], at: &dyn Fn(usize) -> usize) -> Run {
    let mut axes: Vec<usize> = of.axes.iter().map(|axis| at(*axis)).collect();
    axes.sort_unstable();
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for axis in axes {
        match runs.last_mut() {
            Some((_, end)) if *end == axis => *end += 1,
            _ => runs.push((axis, axis + 1)),
        }
    }
    let (kind, mut left, mut passes) = (of.kind, dims.to_vec(), Vec::new());
    for (first, end) in runs {
        passes.push(Pass { sides: around(&left, first, end), made: 1 });
        left[first..end].fill(1);
    }
    in_passes(passes, move |context, _, sides, from, out| {
        reduce::reduce(&context.threads, kind, sides, from, out);
    })
}

/// A change of size, of one axis after another.
fn resized(of: &Resize, dims: &[usize], layout: Layout) -> Run {
    let (mut left, mut passes, mut taps) = (dims.to_vec(), Vec::new(), Vec::new());
    for (axis, own) in of.axes.iter().enumerate() {
        let Some(own) = own else { continue };
        let axis = layout.axis(axis, dims.len());
        passes.push(Pass { sides: around(&left, axis, axis + 1), made: own.len() });
        left[axis] = own.len();
        taps.push((axis, own.clone()));
    }
    // Entries that are made of nothing, along each axis.
    let mut blanks = Vec::new();
    for (axis, own) in &taps {
        let [outer, side, inner] = around(&left, *axis, axis + 1);
        let empty = (0..side).filter(|entry| own[*entry].is_empty());
        let of_all = empty.flat_map(|entry| (0..outer).map(move |at| (at * side + entry) * inner));
        blanks.extend(of_all.map(|start| (start, inner)));
    }
    let outside = of.outside;
    let passes = in_passes(passes, move |context, pass, sides, from, out| {
        reduce::interpolate(&context.threads, sides, &taps[pass].1, from, out);
    });
    Box::new(move |call| {
        passes(call)?;
        for (start, count) in &blanks {
            call.makes[0][*start..start + count].fill(outside);
        }
        Ok(())
    })
}

/// One of several passes over a value: `[outer, side, inner]` becomes `[outer, made, inner]`.
struct Pass {
    sides: [usize; 3],
    made: usize,
}

/// A step of several passes, each over what the one before has made.
fn in_passes(
    passes: Vec<Pass>,
    run: impl Fn(&Context, usize, [usize; 3], &[f32], &mut [f32]) + Send + Sync + 'static,
) -> Run {
    let between: Mutex<[Vec<f32>; 2]> = Mutex::default();
    simple(move |context, from, out| {
        let mut between = between.lock().unwrap_or_else(PoisonError::into_inner);
        let [mut read, mut made] = between.each_mut();
        if passes.is_empty() {
            out.copy_from_slice(from);
        }
        for (number, Pass { sides, made: entries }) in passes.iter().enumerate() {
            let from = if number == 0 { from } else { read.as_slice() };
            if number + 1 == passes.len() {
                run(context, number, *sides, from, out);
            } else {
                made.resize(sides[0] * entries * sides[2], 0.0);
                run(context, number, *sides, from, made);
                std::mem::swap(&mut read, &mut made);
            }
        }
    })
}
