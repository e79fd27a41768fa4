//! Graphs of 500 operators that no network has: how long orders take to find, and how far they are proved, at worst.

use fastrand::Rng;
use galaxy_graph::least_memory::{MemoryGraph, MemoryOperator};

/// Operators of a graph, but for that in a square, which has 484.
const OPERATORS: usize = 500;
/// The largest buffer.
const BYTES: u64 = 1000;

/// Graphs with their names, always the same.
pub(super) fn graphs() -> Vec<(String, MemoryGraph)> {
    let mut random = Rng::with_seed(7);
    let mut all = Vec::new();
    for near in [4, 16, 64, OPERATORS] {
        let name = format!("each reads up to 3 of the {near} results before it");
        all.push((name, near_ones(&mut random, near)));
    }
    all.push(("a square, each reads those above and to its left".to_owned(), square(&mut random)));
    all.push(("100 chains, joined two by two".to_owned(), chains(&mut random)));
    all.push(("250 results, each of 250 others reads 3".to_owned(), two_layers(&mut random)));
    all
}

/// A graph while it is made; the first buffer is its input.
struct Making<'a> {
    graph: MemoryGraph,
    random: &'a mut Rng,
}

impl<'a> Making<'a> {
    fn new(random: &'a mut Rng) -> Self {
        let graph = MemoryGraph { bytes: vec![64], inputs: vec![0], ..MemoryGraph::default() };
        Self { graph, random }
    }

    /// An operator with one result of any size; the result.
    fn add(&mut self, reads: Vec<usize>) -> usize {
        let made = self.graph.bytes.len();
        self.graph.bytes.push(self.random.u64(1..=BYTES));
        let operator = MemoryOperator { reads, makes: vec![made], ..MemoryOperator::default() };
        self.graph.operators.push(operator);
        made
    }
}

fn near_ones(random: &mut Rng, near: usize) -> MemoryGraph {
    let mut making = Making::new(random);
    for made in 1..=OPERATORS {
        let count = making.random.usize(1..=3);
        let reads = (0..count).map(|_| made - 1 - making.random.usize(..near.min(made)));
        let reads = reads.collect();
        making.add(reads);
    }
    making.graph
}

fn square(random: &mut Rng) -> MemoryGraph {
    const SIDE: usize = 22;
    let mut making = Making::new(random);
    for place in 0..SIDE * SIDE {
        let left = (place % SIDE > 0).then_some(place);
        let above = (place >= SIDE).then(|| place + 1 - SIDE);
        let mut reads: Vec<usize> = [left, above].into_iter().flatten().collect();
        if reads.is_empty() {
            reads.push(0);
        }
        making.add(reads);
    }
    making.graph
}

fn chains(random: &mut Rng) -> MemoryGraph {
    let mut making = Making::new(random);
    let mut ends: Vec<usize> =
        (0..100).map(|_| (0..4).fold(0, |last, _| making.add(vec![last]))).collect();
    while ends.len() > 1 {
        let one = ends.swap_remove(making.random.usize(..ends.len()));
        let other = ends.swap_remove(making.random.usize(..ends.len()));
        let joined = making.add(vec![one, other]);
        ends.push(joined);
    }
    making.graph
}

fn two_layers(random: &mut Rng) -> MemoryGraph {
    let mut making = Making::new(random);
    let half = OPERATORS / 2;
    (0..half).for_each(|_| _ = making.add(vec![0]));
    for _ in 0..half {
        let reads = (0..3).map(|_| 1 + making.random.usize(..half)).collect();
        let made = making.add(reads);
        making.graph.kept.push(made);
    }
    making.graph
}
