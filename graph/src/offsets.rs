//! Offsets of buffers in one arena, such that those that live at the same time do not overlap.
//!
//! [`lifetimes`] says when each buffer of a [`MemoryGraph`] lives in a given order of its operators;
//! [`place`] finds the offsets. An arena is at least as large as what is live at any time; more is
//! lost to gaps. Several greedy orders are tried, then an exact search of bounded length.

mod exact;
mod greedy;
#[cfg(test)]
mod tests;

use crate::least_memory::{LeastMemory, MemoryError, MemoryGraph};
use std::ops::RangeInclusive;

/// Something that takes bytes in an arena for some steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// How many bytes it takes.
    pub bytes: u64,
    /// The first step at which it is there.
    pub first: usize,
    /// The last step at which it is there, itself included.
    pub last: usize,
}

impl Lifetime {
    fn steps(&self) -> RangeInclusive<usize> {
        self.first..=self.last
    }

    /// How many steps it is there.
    fn len(&self) -> usize {
        self.last - self.first + 1
    }

    fn meets(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Where things stand in an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The offset of each of them, in bytes; a multiple of the alignment.
    pub offsets: Vec<u64>,
    /// Bytes of the arena; a multiple of the alignment.
    pub size: u64,
    /// Bytes that any arena needs at least: those that are there at the fullest step, each thing filled
    /// up to the alignment.
    pub bound: u64,
}

/// Why things cannot be placed. It is the caller's fault, and a retry does not help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// Nothing is a multiple of 0.
    #[error("the alignment of an arena must be at least 1 byte")]
    NoAlignment,
    /// A lifetime ends before it begins.
    #[error("item {item} lives from step {first} to step {last}, which is before it")]
    Backwards {
        /// The item's number.
        item: usize,
        /// Its first step.
        first: usize,
        /// Its last step.
        last: usize,
    },
    /// The bytes of all have a sum that does not fit a number of 64 bits.
    #[error("all items have more bytes than 64 bits can count")]
    TooManyBytes,
}

/// Places things in an arena that is as small as a few orders and a short search can make it.
///
/// Things that take no bytes stand at offset 0.
pub fn place(lifetimes: &[Lifetime], alignment: u64) -> Result<Placement, PlaceError> {
    place_within(lifetimes, alignment, exact::WORK)
}

/// [`place`] with a bound on the work of the exact search.
fn place_within(
    lifetimes: &[Lifetime],
    alignment: u64,
    work: usize,
) -> Result<Placement, PlaceError> {
    let items = aligned(lifetimes, alignment)?;
    let bound = bound(&items);
    let mut best = greedy::best(&items, bound);
    if best.size > bound
        && let Some(better) = exact::better(&items, bound, best.size, work)
    {
        best = better;
    }
    let mut offsets = vec![0; lifetimes.len()];
    items.iter().zip(&best.offsets).for_each(|(item, &offset)| offsets[item.number] = offset);
    Ok(Placement { offsets, size: best.size, bound })
}

/// Something to place: it takes bytes, a multiple of the alignment, and its steps are few.
#[derive(Clone, Copy, Debug)]
struct Item {
    /// Its number among all things.
    number: usize,
    life: Lifetime,
}

/// Items that have offsets.
struct Placed {
    offsets: Vec<u64>,
    size: u64,
}

/// Those things that take bytes, with steps at which none begins left out.
fn aligned(lifetimes: &[Lifetime], alignment: u64) -> Result<Vec<Item>, PlaceError> {
    if alignment == 0 {
        return Err(PlaceError::NoAlignment);
    }
    let mut firsts: Vec<usize> = lifetimes.iter().map(|life| life.first).collect();
    firsts.sort_unstable();
    firsts.dedup();
    let mut items = Vec::new();
    let mut sum = 0u64;
    for (number, &Lifetime { bytes, first, last }) in lifetimes.iter().enumerate() {
        if last < first {
            return Err(PlaceError::Backwards { item: number, first, last });
        }
        let bytes = bytes.checked_next_multiple_of(alignment).ok_or(PlaceError::TooManyBytes)?;
        sum = sum.checked_add(bytes).ok_or(PlaceError::TooManyBytes)?;
        // Two lives that meet do so where one of them begins.
        let first = firsts.partition_point(|&other| other < first);
        let last = firsts.partition_point(|&other| other <= last) - 1;
        if bytes > 0 {
            items.push(Item { number, life: Lifetime { bytes, first, last } });
        }
    }
    Ok(items)
}

/// Steps that items live in, from 0.
fn steps(items: &[Item]) -> usize {
    items.iter().map(|item| item.life.last + 1).max().unwrap_or(0)
}

/// Bytes at each step.
fn load(items: &[Item]) -> Vec<u64> {
    let mut load = vec![0; steps(items)];
    for item in items {
        load[item.life.steps()].iter_mut().for_each(|bytes| *bytes += item.life.bytes);
    }
    load
}

/// Bytes at the fullest step.
fn bound(items: &[Item]) -> u64 {
    load(items).into_iter().max().unwrap_or(0)
}

/// When what a graph needs is there, for one order of its operators; each operator is a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphLifetimes {
    /// Everything that takes bytes in the arena.
    pub lifetimes: Vec<Lifetime>,
    /// Which of them each buffer is. Buffers that share their bytes are the same one; a buffer that is no
    /// input and that nothing makes is none.
    pub buffers: Vec<Option<usize>>,
    /// Which of them each operator's workspace is, if it has one.
    pub workspaces: Vec<Option<usize>>,
}

/// When the buffers and workspaces of a graph are there, if its operators run in this order.
///
/// The largest sum at a step is the order's [peak](MemoryGraph::peak). Inputs are there from the first
/// step; results, and inputs that nobody reads, to the last one.
pub fn lifetimes(graph: &MemoryGraph, order: &[usize]) -> Result<GraphLifetimes, MemoryError> {
    let indexed = graph.indexed()?;
    indexed.timeline(order)?;
    let end = order.len().saturating_sub(1);
    let mut step_of = vec![0; order.len()];
    order.iter().enumerate().for_each(|(step, &operator)| step_of[operator] = step);
    // The last step of each buffer that is there from a step on.
    let last = |buffer: usize, first: usize| {
        let own = &indexed.buffers[buffer];
        let read = own.readers.iter().map(|&reader| step_of[reader]).max();
        if own.is_kept { end } else { read.unwrap_or(first) }
    };
    let mut lifetimes = Vec::new();
    let mut buffers = vec![None; graph.bytes.len()];
    let mut add = |bytes, first, last| {
        lifetimes.push(Lifetime { bytes, first, last });
        lifetimes.len() - 1
    };
    for &input in &graph.inputs {
        buffers[input] = Some(add(graph.bytes[input], 0, last(input, 0)));
    }
    let mut workspaces = vec![None; order.len()];
    let mut longer = Vec::new();
    for (step, &operator) in order.iter().enumerate() {
        let own = &indexed.operators[operator];
        let shared = own.in_place.filter(|&(read, _)| last(read, 0) == step);
        for &made in &own.makes {
            let taken = shared.filter(|&(_, result)| result == made).map(|(read, _)| read);
            buffers[made] = match taken.and_then(|read| buffers[read]) {
                Some(item) => {
                    longer.push((item, last(made, step)));
                    Some(item)
                }
                None => Some(add(graph.bytes[made], step, last(made, step))),
            };
        }
        let workspace = graph.operators[operator].workspace;
        workspaces[operator] = (workspace > 0).then(|| add(workspace, step, step));
    }
    longer.into_iter().for_each(|(item, last): (usize, usize)| lifetimes[item].last = last);
    Ok(GraphLifetimes { lifetimes, buffers, workspaces })
}

/// States that the search for the order of least memory looks at, at most: under a second, and some ten megabytes.
pub const SEARCH: usize = 50_000;
/// Bytes that the place of a value is a multiple of: a line of cache.
const LINE: u64 = 64;

/// The operators of a graph in the order of least memory, and the places of its buffers in one arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrangement {
    /// The order, its peak, and how far it is proved.
    pub least: LeastMemory,
    /// The peak of the order in which the graph lists its operators.
    pub file_order: u64,
    /// The offset of each buffer in bytes; none of one that is never there.
    pub offsets: Vec<Option<u64>>,
    /// Bytes of the arena.
    pub size: u64,
}

/// Orders the operators of a graph, and places its buffers.
///
/// # Errors
/// When the graph makes no sense.
pub fn arrange(graph: &MemoryGraph) -> Result<Arrangement, MemoryError> {
    Arrangement::of(graph, graph.least(SEARCH)?)
}

impl Arrangement {
    /// Places the buffers of a graph in the order that a search found.
    ///
    /// # Errors
    /// When the graph makes no sense, or the order is not one of its operators.
    pub fn of(graph: &MemoryGraph, least: LeastMemory) -> Result<Self, MemoryError> {
        let in_file: Vec<usize> = (0..graph.operators.len()).collect();
        let GraphLifetimes { lifetimes, buffers, .. } = lifetimes(graph, &least.order)?;
        // A line is some bytes, and nothing goes before it comes: only the sum may be too large.
        let placed = place(&lifetimes, LINE).map_err(|_| MemoryError::TooManyBytes)?;
        let offset = |item: Option<usize>| item.map(|item| placed.offsets[item]);
        let offsets = buffers.into_iter().map(offset).collect();
        Ok(Self { least, file_order: graph.peak(&in_file)?, offsets, size: placed.size })
    }
}
