//! The steps of a network: calls of kernels on values at fixed places of an arena.

use super::NetworkError;
use crate::compute::kernels::network::Context;
use std::ops::Range;

/// Where a value that a step reads lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Operand {
    /// It does not change: the number of the constant.
    Constant(usize),
    /// Steps or inputs give it: the number of the buffer.
    Buffer(usize),
}

/// What a kernel is called with.
pub(super) struct Call<'a> {
    pub(super) context: &'a Context,
    /// The values that it reads. The first one is none where it stands in the first one that is computed.
    pub(super) reads: Vec<Option<&'a [f32]>>,
    /// The values that it computes.
    pub(super) makes: Vec<&'a mut [f32]>,
}

impl<'a> Call<'a> {
    /// A value that it reads, which is not computed in place.
    pub(super) fn read(&self, at: usize) -> &'a [f32] {
        self.reads.get(at).copied().flatten().unwrap_or_default()
    }

    /// The first value that it reads, and the first one that it computes.
    pub(super) fn one(&mut self) -> (&'a [f32], &mut [f32]) {
        let read = self.read(0);
        (read, self.makes.first_mut().map_or(&mut [], |made| made))
    }
}

/// What a step does. The error is a sentence about why it cannot.
pub(super) type Run = Box<dyn Fn(&mut Call<'_>) -> Result<(), String> + Send + Sync>;

/// What a step does that reads one value and computes one.
pub(super) fn simple(run: impl Fn(&Context, &[f32], &mut [f32]) + Send + Sync + 'static) -> Run {
    Box::new(move |call: &mut Call<'_>| {
        let context = call.context;
        let (from, out) = call.one();
        run(context, from, out);
        Ok(())
    })
}

/// A step of a network.
pub(super) struct Step {
    /// The node that it computes, for messages.
    pub(super) shown: String,
    pub(super) reads: Vec<Operand>,
    /// Numbers of buffers.
    pub(super) makes: Vec<usize>,
    /// Whether the first value that it computes may take the place of the first one that it reads.
    pub(super) in_place: bool,
    pub(super) run: Run,
}

impl Step {
    /// Runs the step on the values of an arena.
    pub(super) fn call(
        &self,
        context: &Context,
        arena: &mut [f32],
        places: &[Range<usize>],
        constants: &[Vec<f32>],
    ) -> Result<(), NetworkError> {
        let wrong = |why: String| NetworkError::Operator { node: self.shown.clone(), why };
        let mut ranges: Vec<Range<usize>> =
            self.makes.iter().map(|at| places[*at].clone()).collect();
        let written = ranges.len();
        for operand in &self.reads {
            if let Operand::Buffer(at) = operand
                && !ranges.contains(&places[*at])
            {
                ranges.push(places[*at].clone());
            }
        }
        let Some(mut parts) = parts(arena, &ranges) else {
            return Err(wrong("its values lie over one another".to_owned()));
        };
        let read: Vec<&[f32]> = parts.split_off(written).into_iter().map(|part| &*part).collect();
        let of = |operand: &Operand| match operand {
            Operand::Constant(at) => Some(constants[*at].as_slice()),
            Operand::Buffer(at) => {
                let range = &places[*at];
                // An empty value lies nowhere.
                let at = ranges.iter().position(|known| known == range)?;
                if range.is_empty() {
                    Some(&[][..])
                } else {
                    at.checked_sub(written).map(|at| read[at])
                }
            }
        };
        let reads = self.reads.iter().map(of).collect();
        let mut call = Call { context, reads, makes: parts };
        (self.run)(&mut call).map_err(wrong)
    }
}

/// These ranges of an arena, each by itself; none where some lie over one another.
fn parts<'a>(arena: &'a mut [f32], ranges: &[Range<usize>]) -> Option<Vec<&'a mut [f32]>> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|at| !ranges[*at].is_empty()).collect();
    order.sort_unstable_by_key(|at| ranges[*at].start);
    let mut parts: Vec<&mut [f32]> = ranges.iter().map(|_| &mut [][..]).collect();
    let (mut rest, mut start) = (arena, 0);
    for at in order {
        let Range { start: first, end } = ranges[at].clone();
        let (_, from) = rest.split_at_mut_checked(first.checked_sub(start)?)?;
        let (part, after) = from.split_at_mut_checked(end - first)?;
        (parts[at], rest, start) = (part, after, end);
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_arena_are_those_asked_for_and_never_overlap() {
        let mut arena: Vec<f32> = (0..10).map(|n| n as f32).collect();
        let found = parts(&mut arena, &[6..8, 0..2, 4..4, 3..6])
            .map(|parts| parts.into_iter().map(|part| part.to_vec()).collect::<Vec<_>>());
        let want = vec![vec![6.0, 7.0], vec![0.0, 1.0], vec![], vec![3.0, 4.0, 5.0]];
        assert_eq!(found, Some(want));
        assert!(parts(&mut arena, &[0..4, 3..6]).is_none());
        assert!(parts(&mut arena, &[0..1, 8..12]).is_none());
    }
}
