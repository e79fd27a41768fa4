//! Moving values: every entry of a result is one of what is read, or a constant.

use super::{super::threads::Threads, each_row};

/// Which entries of an axis of what is read those of a result are.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Entries {
    /// Entries that follow one another.
    Run {
        /// The first one.
        first: usize,
        /// How many there are.
        count: usize,
    },
    /// Any entries; none where there is none.
    Any(Vec<Option<u32>>),
}

impl Entries {
    /// These entries, as a run where they are one.
    pub(crate) fn of(entries: Vec<Option<u32>>) -> Self {
        let follow = |pair: &[Option<u32>]| matches!(pair, [Some(a), Some(b)] if a.checked_add(1) == Some(*b));
        match entries.first() {
            Some(Some(first)) if entries.windows(2).all(follow) => {
                Self::Run { first: *first as usize, count: entries.len() }
            }
            _ => Self::Any(entries),
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::Run { count, .. } => *count,
            Self::Any(entries) => entries.len(),
        }
    }

    /// The entry that one of the result is.
    fn at(&self, number: usize) -> Option<usize> {
        match self {
            Self::Run { first, .. } => Some(first + number),
            Self::Any(entries) => entries[number].map(|entry| entry as usize),
        }
    }
}

/// Which entry of what is read each entry of a result is, along each axis.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct EntryMap {
    /// For each axis of the result, how far apart entries of what is read are, and which they are.
    axes: Vec<(usize, Entries)>,
}

impl EntryMap {
    /// The map of these axes.
    pub(crate) fn new(mut axes: Vec<(usize, Entries)>) -> Self {
        if axes.is_empty() {
            axes.push((1, Entries::Run { first: 0, count: 1 }));
        }
        // Runs of an axis that is read as a whole are one run of the axis before it.
        while let [
            ..,
            (stride, Entries::Run { first, count }),
            (1, Entries::Run { first: 0, count: side }),
        ] = axes.as_slice()
            && stride == side
        {
            let run = Entries::Run { first: first * side, count: count * side };
            axes.truncate(axes.len() - 2);
            axes.push((1, run));
        }
        Self { axes }
    }

    /// The map of a part of each axis: the first entry, the step to the next, and how many there are.
    pub(crate) fn of_parts(dims: &[usize], parts: &[(usize, i64, usize)]) -> Self {
        let entries = |&(first, step, count): &(usize, i64, usize)| match step {
            1 => Entries::Run { first, count },
            _ => Entries::Any(
                (0..count as i64).map(|at| u32::try_from(first as i64 + at * step).ok()).collect(),
            ),
        };
        Self::new(strides(dims).into_iter().zip(parts.iter().map(entries)).collect())
    }
}

/// How far apart neighbours along each axis are.
pub(crate) fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    strides
}

/// `out` by a map of `from`; `outside` stands where there is no entry.
pub(crate) fn mapped(
    threads: &Threads,
    map: &EntryMap,
    from: &[f32],
    outside: f32,
    out: &mut [f32],
) {
    let Some(((stride, last), outer)) = map.axes.split_last() else { return };
    let width = last.count();
    each_row(threads, out, width, width, |number, out| {
        let mut number = number;
        let mut start = Some(0);
        for (stride, entries) in outer.iter().rev() {
            let entry = entries.at(number % entries.count());
            number /= entries.count();
            start = start.zip(entry).map(|(start, entry)| start + entry * stride);
        }
        match (start, last) {
            (None, _) => out.fill(outside),
            (Some(start), Entries::Run { first, .. }) if *stride == 1 => {
                out.copy_from_slice(&from[start + first..][..width]);
            }
            (Some(start), last) => {
                for (at, o) in out.iter_mut().enumerate() {
                    *o = last.at(at).map_or(outside, |entry| from[start + entry * stride]);
                }
            }
        }
    });
}

/// Axes in another order: axis i of the result is axis `order[i]` of `from`, which is of shape `dims`.
pub(crate) fn transpose(
    threads: &Threads,
    dims: &[usize],
    order: &[usize],
    from: &[f32],
    out: &mut [f32],
) {
    let strides = strides(dims);
    // Axes that stay neighbours are one.
    let mut axes: Vec<(usize, usize)> = Vec::new();
    for &axis in order.iter().filter(|axis| dims[**axis] != 1) {
        match axes.last_mut() {
            Some((side, stride)) if *stride == strides[axis] * dims[axis] => {
                (*side, *stride) = (*side * dims[axis], strides[axis]);
            }
            _ => axes.push((dims[axis], strides[axis])),
        }
    }
    let (width, stride) = axes.pop().unwrap_or((1, 1));
    // Where the innermost axis of `from` is the one outside of the run, some of its entries are moved together: lines of
    // cache are then read as a whole.
    let together = match axes.last_mut() {
        Some((side, 1)) => {
            let most = (1..=TOGETHER).rev().find(|count| side.is_multiple_of(*count)).unwrap_or(1);
            *side /= most;
            most
        }
        _ => 1,
    };
    if let (Some((_, step)), true) = (axes.last_mut(), together > 1) {
        *step = together;
    }
    each_row(threads, out, together * width, 4 * together * width, |number, out| {
        let (mut number, mut start) = (number, 0);
        for (side, stride) in axes.iter().rev() {
            start += number % side * stride;
            number /= side;
        }
        match stride {
            1 => out.copy_from_slice(&from[start..start + width]),
            _ if together > 1 => turned(&from[start..], stride, (together, width), out),
            _ => {
                out.iter_mut().zip(from[start..].iter().step_by(stride)).for_each(|(o, x)| *o = *x)
            }
        }
    });
}

/// The most entries of an axis that are moved together.
const TOGETHER: usize = 32;
/// Rows of a matrix that are read at a time as it is transposed: their lines stay in a first-level cache.
const AT_A_TIME: usize = 16;

/// Transposes the first columns of a matrix whose rows are `stride` values apart.
///
/// # Shapes
/// out `[columns, rows]`.
fn turned(from: &[f32], stride: usize, (columns, rows): (usize, usize), out: &mut [f32]) {
    for first in (0..rows).step_by(AT_A_TIME) {
        let some = first..rows.min(first + AT_A_TIME);
        for (column, out) in out.chunks_exact_mut(rows).enumerate().take(columns) {
            for (row, o) in some.clone().zip(&mut out[some.clone()]) {
                *o = from[row * stride + column];
            }
        }
    }
}

/// Channels of each pixel in another order: those of `[outer, inner]` become `[inner, outer]`.
pub(crate) fn shuffle(
    threads: &Threads,
    (outer, inner): (usize, usize),
    from: &[f32],
    out: &mut [f32],
) {
    let channels = outer * inner;
    each_row(threads, out, channels, 2 * channels, |number, out| {
        let from = &from[number * channels..][..channels];
        for (group, from) in from.chunks_exact(inner).enumerate() {
            let mut at = group;
            for x in from {
                out[at] = *x;
                at += outer;
            }
        }
    });
}

/// Puts rows of `width` values of `from` at column `at` of rows of `out`, which are `apart` values apart.
pub(crate) fn place(
    threads: &Threads,
    from: &[f32],
    width: usize,
    at: usize,
    apart: usize,
    out: &mut [f32],
) {
    if width == 0 {
        return;
    }
    each_row(threads, out, apart, width, |number, out| {
        out[at..at + width].copy_from_slice(&from[number * width..][..width]);
    });
}

/// Entries of the middle axis of `from`, `[outer, side, inner]`, by their numbers: `out` is `[outer, indices, inner]`.
///
/// # Errors
/// The first number that is no entry.
pub(crate) fn gather(
    threads: &Threads,
    [outer, side, inner]: [usize; 3],
    from: &[f32],
    indices: &[f32],
    out: &mut [f32],
) -> Result<(), f32> {
    let entry = |index: f32| {
        let own = if index < 0.0 { index + side as f32 } else { index };
        (own >= 0.0 && own < side as f32).then_some(own as usize).ok_or(index)
    };
    let entries = indices.iter().map(|index| entry(*index)).collect::<Result<Vec<_>, _>>()?;
    debug_assert_eq!(out.len(), outer * entries.len() * inner);
    each_row(threads, out, inner, inner, |number, out| {
        let (block, entry) = (number / entries.len(), entries[number % entries.len()]);
        out.copy_from_slice(&from[(block * side + entry) * inner..][..inner]);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The transposition by its definition.
    fn reference(dims: &[usize], order: &[usize], from: &[f32]) -> Vec<f32> {
        let (strides, made): (Vec<usize>, Vec<usize>) =
            order.iter().map(|axis| (strides(dims)[*axis], dims[*axis])).unzip();
        let place = |mut number: usize| {
            let mut place = 0;
            for (side, stride) in made.iter().zip(&strides).rev() {
                place += number % side * stride;
                number /= side;
            }
            from[place]
        };
        (0..from.len()).map(place).collect()
    }

    #[test]
    fn axes_in_any_order_are_those_of_the_definition() {
        let threads = Threads::new(2);
        let cases: [(&[usize], &[usize]); 8] = [
            (&[1, 3, 40, 32], &[0, 2, 3, 1]),
            (&[2, 5, 7, 48], &[0, 3, 1, 2]),
            (&[2, 3, 4, 5], &[0, 2, 1, 3]),
            (&[37, 53], &[1, 0]),
            (&[64, 33], &[1, 0]),
            (&[2, 3, 4, 5], &[3, 2, 1, 0]),
            (&[2, 1, 4, 1], &[3, 2, 1, 0]),
            (&[6], &[0]),
        ];
        for (dims, order) in cases {
            let from: Vec<f32> = (0..dims.iter().product()).map(|at: usize| at as f32).collect();
            let mut out = vec![f32::NAN; from.len()];
            transpose(&threads, dims, order, &from, &mut out);
            assert_eq!(out, reference(dims, order, &from), "{dims:?} {order:?}");
        }
    }

    #[test]
    fn shuffled_channels_are_the_transposition_of_their_groups() {
        let threads = Threads::new(1);
        let from: Vec<f32> = (0..5 * 12).map(|at| at as f32).collect();
        let mut out = vec![f32::NAN; from.len()];
        shuffle(&threads, (3, 4), &from, &mut out);
        assert_eq!(out, reference(&[5, 3, 4], &[0, 2, 1], &from));
    }
}
