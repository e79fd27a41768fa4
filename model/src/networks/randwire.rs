//! RandWire (Xie et al. 2019): stages whose nodes are wired at random, by the model of Watts and Strogatz (1998).

use super::build::{Activation, Builder, Image, window};

/// Nodes of a stage.
const NODES: usize = 32;
/// Neighbours of a node in the ring.
const NEIGHBOURS: usize = 4;
/// How likely an edge of the ring is to lead elsewhere.
const REWIRED: f64 = 0.75;
/// Channels of the first stage.
const CHANNELS: u64 = 78;

/// The network of the small regime whose wires depend on a seed.
pub(super) fn build(net: &mut Builder, seed: u64) {
    let image = net.image();
    let half = window(3).stride(2);
    let made = net.block(&image, half, CHANNELS / 2, Activation::Relu);
    let mut last = net.block(&made, half, CHANNELS, Activation::Linear);
    let mut random = SplitMix(seed);
    for stage in 0..3 {
        let before = wires(&mut random);
        last = build_stage(net, &last, CHANNELS << stage, &before);
    }
    let made = net.activate(&last, Activation::Relu);
    let made = net.block(&made, window(1), 1280, Activation::Relu);
    net.classify(&made, 1000);
}

/// SplitMix64 (Steele et al. 2014), so that wires are the same everywhere and always.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to 1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn under(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// For each node the nodes that it reads, all of which come before it: the edges of a Watts-Strogatz graph, from the
/// lower number to the higher one.
///
/// In the beginning each node is joined to the nearest ones in a ring. Then each edge, the nearest first and around the
/// ring, may be led from its node to any other that the node is not joined to yet.
fn wires(random: &mut SplitMix) -> Vec<Vec<usize>> {
    let mut joined = [[false; NODES]; NODES];
    let set = |joined: &mut [[bool; NODES]; NODES], one: usize, other: usize, to: bool| {
        joined[one][other] = to;
        joined[other][one] = to;
    };
    for node in 0..NODES {
        (1..=NEIGHBOURS / 2).for_each(|far| set(&mut joined, node, (node + far) % NODES, true));
    }
    for far in 1..=NEIGHBOURS / 2 {
        for node in 0..NODES {
            let old = (node + far) % NODES;
            if random.part() >= REWIRED {
                continue;
            }
            let free: Vec<usize> =
                (0..NODES).filter(|other| *other != node && !joined[node][*other]).collect();
            if free.is_empty() {
                continue;
            }
            let new = free[random.under(free.len())];
            set(&mut joined, node, old, false);
            set(&mut joined, node, new, true);
        }
    }
    (0..NODES).map(|node| (0..node).filter(|other| joined[node][*other]).collect()).collect()
}

/// The nodes of a stage. Those that read no other read what the stage does, and halve its side; those that no other
/// reads are averaged.
fn build_stage(net: &mut Builder, from: &Image, channels: u64, before: &[Vec<usize>]) -> Image {
    let mut made: Vec<Image> = Vec::new();
    for reads in before {
        let (sum, stride) = match reads.as_slice() {
            [] => (from.clone(), 2),
            [only] => (made[*only].clone(), 1),
            several => {
                // Sigmoids of the weights that are trained, which begin at 0.
                let parts: Vec<Image> =
                    several.iter().map(|read| net.weighted(&made[*read], 0.5)).collect();
                (added(net, &parts), 1)
            }
        };
        let ready = net.activate(&sum, Activation::Relu);
        let filtered = net.depthwise(&ready, window(3).stride(stride));
        let mixed = net.conv(&filtered, window(1), channels);
        made.push(net.norm(&mixed, 0.8));
    }
    let is_last = |node: &usize| before.iter().all(|reads| !reads.contains(node));
    let last: Vec<Image> = (0..NODES).filter(is_last).map(|node| made[node].clone()).collect();
    let sum = added(net, &last);
    net.scaled(&sum, 1.0 / last.len() as f32)
}

fn added(net: &mut Builder, parts: &[Image]) -> Image {
    let first = parts[0].clone();
    parts[1..].iter().fold(first, |sum, part| net.add(&sum, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wires_are_those_of_watts_and_strogatz() {
        for seed in 1..=50 {
            let before = wires(&mut SplitMix(seed));
            let edges: usize = before.iter().map(Vec::len).sum();
            assert_eq!(edges, NODES * NEIGHBOURS / 2, "edges move, and none goes or comes");
            let near = |(node, reads): (usize, &Vec<usize>)| {
                let is_near = |read: &&usize| (node - **read).min(NODES + **read - node) <= 2;
                reads.iter().filter(is_near).count()
            };
            let kept: usize = before.iter().enumerate().map(near).sum();
            // A quarter stays, and some come back.
            assert!((8..=34).contains(&kept), "seed {seed}: {kept} of {edges} edges are near");
            assert_eq!(before, wires(&mut SplitMix(seed)));
        }
    }
}
